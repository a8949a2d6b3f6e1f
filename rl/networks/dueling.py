"""Values of all bins of an interval, for each dimension of an action: what CQN asks level after level.

The dueling network of CQN (Seo et al. 2024; after Wang et al. 2016): two streams see the features of an observation,
the interval of each dimension that is to be cut, as its centre, and the level; one says the value of the interval, the
other the advantages of its bins, whose mean is taken off. Both are outputs of a value head, so that the sum is too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rl.networks import mlp
from rl.networks.base import Network, from_linen
from rl.networks.layers import DEFAULT, MLP, Architecture, dense_product, start
from rl.types import Array, Key, Params, Spec

STREAMS = ("advantage", "value")


class Dueling(NamedTuple):
    """The network in two parts: the first depends on the observation alone, and need be asked once for all levels."""

    init: Callable[[Key, Any], Params]  # (key, [..., *observation]) -> parameters
    encode: Callable[[Params, Any], tuple[Array, ...]]  # (parameters, [..., *observation]) -> features
    # (parameters, features, centres [..., D] of the intervals, level [] int32 or [...]) -> outputs [..., D, B, K];
    # the intervals may have more leading axes than the observation
    apply: Callable[[Params, tuple[Array, ...], Array, Any], Array]


class Trunk(nn.Module):
    """Dense, LayerNorm, tanh: what a stream keeps of the observation."""

    width: int
    initialiser: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = start(self.initialiser, x.shape[-1])
        dense = nn.Dense(self.width, kernel_init=kernel, bias_init=bias, dot_general=dense_product)
        return jnp.tanh(nn.LayerNorm()(dense(x)))


def dueling(
    spec: Spec,
    levels: int,
    bins: int,
    outputs: int,
    features: int,
    hidden: Sequence[int],
    layer_norm: bool = True,
    architecture: Architecture = DEFAULT,
) -> Dueling:
    """The network; its last layers start at 0, so that all bins are worth the same.

    Args:
      spec: of the environment; actions have ``D`` dimensions.
      levels: ``L``.
      bins: ``B``, at each level.
      outputs: ``K`` of the value head.
      features: width of each stream's `Trunk`; 0 leaves it out.
      hidden: widths of each stream's hidden layers. After a transformer (histories) only the last of them, as in
        `rl.networks.mlp`.
      layer_norm: whether hidden layers have LayerNorm.
      architecture: activation, initialiser and encoder; the trunk's activation is tanh.
    """
    shape, size = spec.observation_shape, spec.action_size
    encoder = mlp.encoder(shape, hidden, architecture)
    hidden = mlp.dense_widths(shape, hidden, joined=True)
    trunk = from_linen(Trunk(features, architecture.initialiser)) if features else None
    widths = {"advantage": size * bins * outputs, "value": size * outputs}
    streams: dict[str, Network] = {
        name: from_linen(MLP(hidden, width, layer_norm, architecture)) for name, width in widths.items()
    }
    last = f"Dense_{len(hidden)}"

    def init(key: Key, observation: Any) -> Params:
        keys = iter(jax.random.split(key, 1 + 2 * len(STREAMS)))
        params: dict[str, Any] = {}
        if encoder:
            params["encoder"] = encoder.init(next(keys), observation)
            observation = encoder.apply(params["encoder"], observation)
        for name in STREAMS:
            stream, seen = {}, observation
            if trunk:
                stream["trunk"] = trunk.init(next(keys), observation)
                seen = trunk.apply(stream["trunk"], observation)
            joined = jnp.zeros((*seen.shape[:-1], seen.shape[-1] + size + levels))
            dense = streams[name].init(next(keys), joined)
            params[name] = stream | {"dense": dense | {last: jax.tree.map(jnp.zeros_like, dense[last])}}
        return params

    def encode(params: Params, observation: Any) -> tuple[Array, ...]:
        seen = encoder.apply(params["encoder"], observation) if encoder else observation
        return tuple(trunk.apply(params[name]["trunk"], seen) if trunk else seen for name in STREAMS)

    def apply(params: Params, features: tuple[Array, ...], centres: Array, level: Any) -> Array:
        axes = centres.shape[:-1]
        one_hot = jnp.broadcast_to(jax.nn.one_hot(level, levels), (*axes, levels))

        def stream(name: str, seen: Array) -> Array:
            joined = jnp.concatenate([jnp.broadcast_to(seen, (*axes, seen.shape[-1])), centres, one_hot], -1)
            flat = streams[name].apply(params[name]["dense"], joined)
            return flat.reshape(*axes, size, -1, outputs)

        advantage, value = map(stream, STREAMS, features)
        return value + advantage - advantage.mean(-2, keepdims=True)

    return Dueling(init, encode, apply)
