"""Dense layers, and the settings that every network of an agent shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rl import linalg
from rl.settings import require_choices
from rl.types import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "tanh": jnp.tanh,
    "silu": nn.silu,
}
INITIALISERS = ("pytorch", "rlkit", "orthogonal", "ppo", "glorot", "lecun")
ENCODERS = ("nature", "impala")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What all networks of an agent have in common, but for their widths and the LayerNorm of values and critics.

    Initialisers:

    - ``pytorch``: kernels and biases U(-b, b) with b = 1 / sqrt(fan_in), the default of ``torch.nn.Linear``;
    - ``rlkit``: such kernels, biases 0.1, and both U(-3e-3, 3e-3) in the last layer (1e-3 in that of a policy), as in
      rlkit and the code of EDAC and ReBRAC;
    - ``orthogonal``: gain sqrt(2) in every layer, biases 0 (jaxrl, IQL);
    - ``ppo``: such, with gain 0.01 in the last layer (policies of PPO, all networks of ARSQ), and in the layer through
      which a transformer reads a history;
    - ``glorot``: U(-b, b) with b = sqrt(6 / (fan_in + fan_out)), biases 0 (Keras, Dopamine);
    - ``lecun``: a truncated normal of variance 1 / fan_in, biases 0 (Flax).

    Histories are read by a transformer, which has an activation and norms of its own: activation and LayerNorm are
    there of the layer alone that joins an action to its features (`rl.networks.mlp`).
    """

    activation: str = "relu"  # relu, gelu, tanh or silu; with histories of the layer that joins the action
    initialiser: str = "pytorch"  # pytorch, rlkit, orthogonal, ppo, glorot or lecun
    policy_layer_norm: bool = False  # LayerNorm in the policy; layer_norm is that of values and critics
    norm_after: bool = False  # LayerNorm stands after each activation, not before it
    residual: bool = False  # skip connection around hidden layers as wide as their input
    dropout: float = 0.0  # dropout rate of the policy's hidden layers, in updates only
    encoder: str = "nature"  # encoder of images: nature (Mnih et al. 2015) or impala (Espeholt et al. 2018)
    shift: int = 0  # pixels by which an update shifts its images at random (DrQ: 4)

    def __post_init__(self) -> None:
        choices = {"activation": ACTIVATIONS, "initialiser": INITIALISERS, "encoder": ENCODERS}
        require_choices(self, choices, "network.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"network.dropout={self.dropout} must lie in [0, 1)")
        if self.shift < 0:
            raise ValueError(f"network.shift={self.shift} must be at least 0, in pixels")


DEFAULT = Architecture()
# Of the agents in OGBench's code (Park et al. 2025).
OGBENCH = Architecture("gelu", "glorot", norm_after=True)


class Start(NamedTuple):
    """The initialisers of one layer."""

    kernel: nn.initializers.Initializer
    bias: nn.initializers.Initializer


def start(name: str, fan_in: int, last: float | None = None) -> Start:
    """The initialisers called ``name`` (see `Architecture`) for a layer of ``fan_in`` inputs.

    Args:
      name: one of `INITIALISERS`.
      fan_in: inputs of each unit.
      last: in the last layer of a network, the bound that ``rlkit`` has there; None in all others.
    """
    bound = 1 / math.sqrt(max(1, fan_in))
    zeros = nn.initializers.zeros_init()
    if name == "pytorch":
        return Start(_uniform(bound), _uniform(bound))
    if name == "rlkit" and last is not None:
        return Start(_uniform(last), _uniform(last))
    if name == "rlkit":
        return Start(_uniform(bound), nn.initializers.constant(0.1))
    if name in ("orthogonal", "ppo"):
        small = name == "ppo" and last is not None
        return Start(linalg.orthogonal(0.01 if small else math.sqrt(2)), zeros)
    if name == "glorot":
        return Start(nn.initializers.glorot_uniform(), zeros)
    return Start(nn.initializers.lecun_normal(), zeros)


def _uniform(bound: float) -> nn.initializers.Initializer:
    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> Array:
        return nn.initializers.uniform(2 * bound)(key, shape, dtype) - bound

    return init


@jax.custom_vjp
def _matmul(x: Array, kernel: Array) -> Array:
    return x @ kernel


def _matmul_gradients(operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = operands
    batch = tuple(range(x.ndim - 1))  # contracted as it is: merging its axes would move rows between devices
    # Not `@` on transposed arrays: under vmap the transposes would become copies.
    to_x = jax.lax.dot_general(cotangent, kernel, (((x.ndim - 1,), (1,)), ((), ())))
    return to_x, jax.lax.dot_general(x, cotangent, ((batch, batch), ((), ())))


_matmul.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _matmul_gradients)


def dense_product(x: Array, kernel: Array, dimension_numbers: Any, precision: Any = None) -> Array:
    """What `nn.Dense` multiplies with, its arguments included.

    JAX's own rule computes the kernel's gradient transposed; for an ensemble, whose members are vmapped, XLA's
    CPU compiler copies it back. The price is that there is no forward mode (`jax.jvp`), which nothing here uses.
    """
    del dimension_numbers, precision  # the last axis of x and the first of the kernel, in JAX's default
    return _matmul(x, kernel)


def row_product(x: Array, kernel: Array, dimension_numbers: Any = None, precision: Any = None) -> Array:
    """`dense_product` of x [B, ..., n] with its leading axes merged; devices may share ``B`` and no other of them.

    The kernel's gradient contracts the leading axes. XLA's CPU compiler does so with one axis as it is; several it
    moves behind the last one, and computes anew in that order whatever x is made of: the gradient of a gated
    feed-forward layer takes 1.5 times as long.
    """
    del dimension_numbers, precision
    return _merged(_matmul, x, kernel)


def vocabulary_product(features: Array, rows: Array) -> Array:
    """Features [B, ..., D] by rows [A, D] of their type, summed in float32: [B, ..., A] float32.

    Axes are as in `row_product`. JAX's own rule would compute gradients from a cotangent in float32, and so all their
    products in that type.
    """
    return _merged(_by_rows, features, rows)


def _merged(product: Callable[[Array, Array], Array], x: Array, weight: Array) -> Array:
    y = product(x.reshape(-1, x.shape[-1]), weight)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _contract(x: Array, x_axis: int, y: Array, y_axis: int) -> Array:
    dimensions = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _by_rows(x: Array, rows: Array) -> Array:
    return _contract(x, 1, rows.astype(x.dtype), 1)


def _by_rows_gradients(operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, rows = operands
    cotangent = cotangent.astype(x.dtype)
    to_x = _contract(cotangent, 1, rows.astype(x.dtype), 0)
    to_rows = _contract(cotangent, 0, x, 0)
    return to_x.astype(x.dtype), to_rows.astype(rows.dtype)


_by_rows.defvjp(lambda x, rows: (_by_rows(x, rows), (x, rows)), _by_rows_gradients)


class MLP(nn.Module):
    """Dense layers with an activation between them, and LayerNorm before or after each activation if asked for.

    Hidden units are dropped only where `apply` is given a key for ``dropout``.
    """

    hidden: Sequence[int]
    outputs: int
    layer_norm: bool = False
    architecture: Architecture = DEFAULT
    last: float = 3e-3  # see `start`
    dropout: float = 0.0
    gain: float = 1.0  # of the last layer's kernel at its start

    @nn.compact
    def __call__(self, x: Array) -> Array:
        a = self.architecture
        if isinstance(self.hidden, int):
            raise ValueError(f"hidden={self.hidden} must be a tuple of widths, such as (256, 256)")

        def dense(x: Array, width: int, last: float | None = None, gain: float = 1.0) -> Array:
            kernel, bias = start(a.initialiser, x.shape[-1], last)
            scaled = lambda *of: gain * kernel(*of)
            return nn.Dense(width, kernel_init=scaled, bias_init=bias, dot_general=dense_product)(x)

        def norm(y: Array) -> Array:
            return nn.LayerNorm()(y) if self.layer_norm else y

        def drop(y: Array) -> Array:
            return nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(y)

        for width in self.hidden:
            x = hidden_units(a, dense(x, width), norm, x, drop)
        return dense(x, self.outputs, self.last, self.gain)


def hidden_units(
    architecture: Architecture,
    y: Array,
    norm: Callable[[Array], Array],
    x: Array | None = None,
    drop: Callable[[Array], Array] = lambda y: y,
) -> Array:
    """What a hidden layer of an `MLP` makes of its product ``y`` [..., n] with its input: [..., n].

    Args:
      architecture: activation, the place of the norm, and whether layers of one width are residual.
      y: the product.
      norm: LayerNorm, or what leaves all as it is.
      x: the layer's input, which a residual layer of its shape adds; None: it is not added.
      drop: dropout.
    """
    activation = ACTIVATIONS[architecture.activation]
    y = drop(norm(activation(y)) if architecture.norm_after else activation(norm(y)))
    return x + y if architecture.residual and x is not None and x.shape == y.shape else y
