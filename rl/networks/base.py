"""The one interface that agents see, and ensembles of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax

from rl.types import Array, Key, Params

if TYPE_CHECKING:
    from flax import nnx


class Network(NamedTuple):
    """A function with parameters, as two pure functions."""

    init: Callable[..., Params]  # (key, *example inputs) -> parameters
    # (parameters, *inputs) -> outputs; policies also take ``key=``, with which an update drops hidden units
    apply: Callable[..., Any]


def from_linen(module: nn.Module) -> Network:
    """A Flax Linen module with parameters only (no mutable collections) as a `Network`."""

    def apply(params: Params, *inputs: Array, key: Key | None = None) -> Any:
        return module.apply({"params": params}, *inputs, rngs=None if key is None else {"dropout": key})

    return Network(init=lambda key, *inputs: module.init(key, *inputs)["params"], apply=apply)


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Network:
    """A Flax NNX module with parameters only as a `Network`; its parameters are nested dictionaries of arrays.

    Args:
      make: builds the module, with the streams from which its initial parameters are drawn.

    Raises:
      ValueError: the module keeps more than parameters, such as the averages of a batch norm, or the keys of a dropout.
    """
    from flax import nnx  # half a second that only its users wait for

    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, others = nnx.graphdef(module), nnx.state(module, nnx.Not(nnx.Param))
    if kept := [".".join(map(str, path)) for path, _ in nnx.to_flat_state(others)]:
        raise ValueError(
            f"a network's module may keep parameters only, and this one keeps {', '.join(kept)}, which no update would "
            "carry on: leave out the layers that they are of"
        )

    def init(key: Key, *inputs: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param))

    def apply(params: Params, *inputs: Array, key: Key | None = None) -> Any:
        del key  # a dropout keeps keys, and is refused above
        return nnx.merge(graph, params)(*inputs)

    return Network(init, apply)


def ensemble(network: Network, members: int) -> Network:
    """``members`` independent copies: a leading axis [E] on every parameter and output; inputs are shared.

    Raises:
      ValueError: fewer than one.
    """
    if members < 1:
        raise ValueError(f"an ensemble of {members} networks (critics={members}): give at least 1")

    def init(key: Key, *inputs: Array) -> Params:
        return jax.vmap(lambda k: network.init(k, *inputs))(jax.random.split(key, members))

    def apply(params: Params, *inputs: Array) -> Any:
        return jax.vmap(lambda p: network.apply(p, *inputs))(params)

    return Network(init, apply)


def first_member(params: Params) -> Params:
    """The first member's parameters of an `ensemble`, for the network that it consists of.

    Who uses the first of an ensemble's outputs and no other has all of them computed, and their gradients, too: XLA
    leaves none out.
    """
    return jax.tree.map(lambda x: x[0], params)
