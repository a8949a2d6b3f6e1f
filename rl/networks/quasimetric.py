"""Distances that need not be symmetric: interval quasimetric embeddings (IQE, Wang & Isola 2022).

A latent vector is ``N`` groups of ``k`` numbers. From ``x`` to ``y`` each group covers a part of the real line, and a
distance is made of how long the parts are:

    l_n(x, y) = | union_i [x_ni, max(x_ni, y_ni)] |
    d(x, y)   = a max_n l_n + (1 - a) mean_n l_n,   a = sigmoid of a parameter

so that d(x, x) = 0, d(x, y) >= 0, d(x, z) <= d(x, y) + d(y, z), and d(x, y) may differ from d(y, x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.networks import mlp
from rl.networks.layers import DEFAULT, Architecture
from rl.types import Array, Key, Params, Spec


class Quasimetric(NamedTuple):
    """A distance in the latent space of an encoder."""

    init: Callable[[Key, Any], Params]  # (key, observation) -> parameters
    embed: Callable[[Params, Any], Array]  # (parameters, observation [..., *observation]) -> latent [..., L]
    distance: Callable[[Params, Array, Array], Array]  # (parameters, from [..., L], to [..., L]) -> [...]


def interval(
    spec: Spec,
    latent: int,
    hidden: Sequence[int],
    layer_norm: bool = False,
    architecture: Architecture = DEFAULT,
    group: int = 8,
) -> Quasimetric:
    """IQE after dense layers.

    Args:
      spec: of the observations.
      latent: ``L``, the size of the latent space.
      hidden, layer_norm, architecture: as in `rl.networks.mlp`.
      group: ``k``, latent numbers that make one interval union.

    Raises:
      ValueError: ``latent`` is no multiple of ``group``.
    """
    if latent < group or latent % group:
        raise ValueError(f"latent={latent} must be a multiple of {group}, the intervals of one group")
    encoder = mlp.state_value(latent, hidden, layer_norm, architecture, spec)

    def init(key: Key, observation: Any) -> Params:
        return {"encoder": encoder.init(key, observation), "mixture": jnp.zeros(())}

    def distance(params: Params, start: Array, end: Array) -> Array:
        grouped = lambda x: x.reshape((*x.shape[:-1], latent // group, group))
        length = union_length(grouped(start), grouped(end))
        share = jax.nn.sigmoid(params["mixture"])
        return share * length.max(-1) + (1.0 - share) * length.mean(-1)

    return Quasimetric(init, lambda params, x: encoder.apply(params["encoder"], x), distance)


def union_length(start: Array, end: Array) -> Array:
    """Length [...] of the union of ``k`` intervals from ``start`` [..., k] to ``end``, empty where that is not beyond.

    The intervals are taken in the order of their starts, without a sort: each adds what lies beyond the farthest end of
    those before it, found among all pairs.
    """
    end = jnp.maximum(start, end)
    index = jnp.arange(start.shape[-1])
    earlier = (start[..., None, :] < start[..., :, None]) | (
        (start[..., None, :] == start[..., :, None]) & (index < index[:, None])
    )
    covered = jnp.where(earlier, end[..., None, :], -jnp.inf).max(-1)
    return jax.nn.relu(end - jnp.maximum(start, covered)).sum(-1)
