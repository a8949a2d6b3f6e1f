"""Multi-layer perceptrons for values, critics and policies over flat observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp

from rl.networks.base import Network, from_linen
from rl.types import Array, Spec

# U(-1/sqrt(fan_in), 1/sqrt(fan_in)): the initialiser of the PyTorch code that most of the papers used.
_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


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


class MLP(nn.Module):
    """Dense layers with ReLU between them, and LayerNorm before each ReLU if asked for.

    ``final_scale`` shrinks the last layer's initial weights, so that outputs start near 0.
    """

    hidden: Sequence[int]
    outputs: int
    layer_norm: bool = False
    final_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.hidden:
            x = nn.Dense(width, kernel_init=_uniform, dot_general=dense_product)(x)
            x = nn.relu(nn.LayerNorm()(x) if self.layer_norm else x)
        last = nn.initializers.variance_scaling(self.final_scale**2 / 3, "fan_in", "uniform")
        return nn.Dense(self.outputs, kernel_init=last, dot_general=dense_product)(x)


def state_value(outputs: int, hidden: Sequence[int], layer_norm: bool = False) -> Network:
    """V: observation [..., O] -> head outputs [..., K]."""
    return from_linen(MLP(hidden, outputs, layer_norm))


def action_values(spec: Spec, outputs: int, hidden: Sequence[int], layer_norm: bool = False) -> Network:
    """Q of every discrete action: observation [..., O] -> head outputs [..., A, K]."""
    body = from_linen(MLP(hidden, spec.action_size * outputs, layer_norm))

    def apply(params, observation: Array) -> Array:
        flat = body.apply(params, observation)
        return flat.reshape((*flat.shape[:-1], spec.action_size, outputs))

    return Network(body.init, apply)


def critic(
    spec: Spec, outputs: int, hidden: Sequence[int], layer_norm: bool = False, final_scale: float = 1.0
) -> Network:
    """Q: (observation [..., O], action) -> head outputs [..., K].

    A discrete action [...] int enters one-hot, a continuous one [..., D] as it is.
    """
    body = from_linen(MLP(hidden, outputs, layer_norm, final_scale))

    def join(observation: Array, action: Array) -> Array:
        if spec.discrete:
            action = jax.nn.one_hot(action, spec.action_size)
        return jnp.concatenate([observation, action], -1)

    return Network(
        init=lambda key, observation, action: body.init(key, join(observation, action)),
        apply=lambda params, observation, action: body.apply(params, join(observation, action)),
    )


def deterministic_policy(spec: Spec, hidden: Sequence[int], layer_norm: bool = False) -> Network:
    """observation [..., O] -> action [..., D] in (-1, 1)."""
    body = from_linen(MLP(hidden, spec.action_size, layer_norm))
    return Network(body.init, lambda params, observation: jnp.tanh(body.apply(params, observation)))


def behaviour_policy(spec: Spec, hidden: Sequence[int]) -> Network:
    """observation -> a distribution with full support on logged actions, for likelihood fits (BC, AWR).

    Continuous: a normal with mean in (-1, 1) and a learned standard deviation that does not depend on the
    state, as in IQL's code; not squashed, so that logged actions at the bounds have a finite density.
    Discrete: categorical.
    """
    body = from_linen(MLP(hidden, spec.action_size))
    if spec.discrete:
        return Network(
            body.init, lambda params, observation: distrax.Categorical(body.apply(params, observation))
        )

    def init(key, observation: Array):
        return {"body": body.init(key, observation), "log_std": jnp.zeros(spec.action_size)}

    def apply(params, observation: Array) -> distrax.Distribution:
        mean = jnp.tanh(body.apply(params["body"], observation))
        std = jnp.exp(jnp.clip(params["log_std"], LOG_STD_MIN, LOG_STD_MAX))
        return distrax.Independent(distrax.Normal(mean, jnp.broadcast_to(std, mean.shape)), 1)

    return Network(init, apply)


def squashed_policy(spec: Spec, hidden: Sequence[int]) -> Network:
    """observation [..., O] -> a tanh-squashed diagonal normal on (-1, 1)^D (SAC, Haarnoja et al. 2018)."""
    body = from_linen(MLP(hidden, 2 * spec.action_size, final_scale=0.01))

    def apply(params, observation: Array) -> distrax.Distribution:
        mean, log_std = jnp.split(body.apply(params, observation), 2, axis=-1)
        normal = distrax.Normal(mean, jnp.exp(jnp.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)))
        return distrax.Transformed(distrax.Independent(normal, 1), distrax.Block(distrax.Tanh(), 1))

    return Network(body.init, apply)


def squashed_mode(policy: distrax.Distribution) -> Array:
    """The tanh of the underlying mean [..., D]: what is acted on when evaluating."""
    return jnp.tanh(policy.distribution.mean())
