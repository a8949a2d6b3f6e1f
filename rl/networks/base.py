"""The one interface that agents see, and ensembles of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from rl.types import Array, Key, Params


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
