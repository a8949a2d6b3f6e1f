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

    The union consists of pieces. Its length is the sum of their ends less that of their starts, and which intervals
    those belong to is found among all pairs. That is constant wherever the length has a gradient: there is no maximum
    over pairs to go back through, and nothing of size k^2 is kept.
    """
    starts, ends = _pieces(*jax.lax.stop_gradient((start, end)))
    total = jnp.where(ends, end, 0.0).sum(-1) - jnp.where(starts, start, 0.0).sum(-1)
    return jax.nn.relu(total)  # rounding of the sums, which are of other orders, may be below 0


def _pieces(start: Array, end: Array) -> tuple[Array, Array]:
    """Which intervals [..., k] a piece of their union starts with, and which it ends with, of equal ones the first."""
    lower = jnp.tril(jnp.ones((start.shape[-1],) * 2, bool), -1)  # [i, j]: j comes before i
    s_i, s_j, e_i, e_j = start[..., None], start[..., None, :], end[..., None], end[..., None, :]
    real = s_j < e_j
    before = real & (e_j >= s_i) & ((s_j < s_i) | ((s_j == s_i) & lower))
    beyond = real & (s_j <= e_i) & ((e_j > e_i) | ((e_j == e_i) & lower))
    return (start < end) & ~before.any(-1), (start < end) & ~beyond.any(-1)
