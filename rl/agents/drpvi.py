"""DRPVI (Liu & Xu, NeurIPS 2024) and DRVI-L (Ma et al. 2022): robustness to a ball around the nominal dynamics.

As R2PVI (`rl.agents.r2pvi`), but the shift of each factor is free within a divergence of ``radius`` and
forbidden beyond. The worst value ``w^_i`` of factor ``i`` is for

    tv   max_a z(min(V, a))_i - radius_i a,                                  0 <= a <= H           (DRPVI)
    kl   max_b -b log max(1 + z(exp(-V / b) - 1)_i, 1e-6) - b radius_i,      1e-6 <= b <= H        (DRVI-L)

The first assumes a fail state: ``a`` would else be measured from the smallest value. The second is for values that are
not negative. Where a penalty makes some negative it is taken of ``V - min V``, and ``min V`` added to it: exp(-V / b)
is beyond any floor there, and what a factor that was never seen is worth, 0, would not be a bad value any more.

Differences. The authors run one Nelder-Mead search per factor. Here the first maximum is exact, at one of the
values. In the second, ``b`` enters the data through one smooth function of ``log b`` per factor: it is computed at
Chebyshev nodes that all factors share and maximised between them, so that the data is read once.

Not a `rl.types.Learner`: see `rl.agents.linear`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from rl.agents import linear
from rl.agents.linear import Fit, Regression
from rl.replay.linear import Trajectories
from rl.settings import require_choice
from rl.types import Array
from rl.values import robust

_LEAST_PRICE = 1e-6
_FLOOR = 1e-6
_NODES = 128
_GRID = 512


@dataclasses.dataclass(frozen=True)
class Config(linear.Config):
    """Hyper-parameters; defaults are the R2PVI paper's for the simulated linear MDP, whose radius is of one factor."""

    divergence: str = "tv"  # tv is DRPVI, kl is DRVI-L
    radius: float | Array = 0.1  # rho, of the ball: one number, or [H, d] for each step and factor


def fit(config: Config, data: Trajectories) -> Fit:
    """One backward pass. ``config.radius`` may be a traced array, to vmap over it.

    Raises:
      ValueError: an unknown divergence, a negative radius or one of another horizon or number of factors; see
        `rl.agents.linear.backward` for more.
    """
    require_choice("divergence", config.divergence, _FACTORS)
    linear.positive("radius", config.radius, zero=True)
    shape = (data.features.shape[0], data.features.shape[-1])
    radius = jnp.asarray(config.radius, data.features.dtype)
    if radius.shape not in ((), shape):
        raise ValueError(f"radius must be one number or [steps, factors] = {shape}, not {radius.shape}")
    return linear.backward(config, data, _FACTORS[config.divergence], jnp.broadcast_to(radius, shape))


def _tv(regression: Regression, values: Array, bound: Array, radius: Array) -> Array:
    return linear.best_cut(regression, values, bound, lambda cut, mean, _: mean - radius * cut)


def _kl(regression: Regression, values: Array, bound: Array, radius: Array) -> Array:
    nodes, grid, to_grid = (jnp.asarray(x, values.dtype) for x in _chebyshev())
    low, high = jnp.log(jnp.asarray(_LEAST_PRICE, values.dtype)), jnp.log(bound)
    least = jnp.minimum(values.min(), 0.0)

    def log_price(x: Array) -> Array:
        return low + (high - low) * (1 + x) / 2

    # 1 + z(exp(-V / b) - 1), of V - least.
    difference = jnp.expm1((least - values[:, None]) / jnp.exp(log_price(nodes)))
    mean = 1 + regression.inverse @ (regression.weighted.T @ difference)  # [d, nodes]

    def dual(log_price: Array, mean: Array) -> Array:
        price = jnp.exp(log_price)
        return least - price * (jnp.log(jnp.maximum(mean, _FLOOR)) + radius[:, None])

    best = dual(log_price(grid), mean @ to_grid.T).argmax(-1)
    step = jnp.asarray([-1, 1])
    around = grid[jnp.clip(best[:, None] + step, 0, _GRID - 1)]

    def refine(x: Array) -> Array:
        return dual(log_price(x)[:, None], (_interpolation(nodes, x) * mean).sum(-1, keepdims=True))[:, 0]

    _, refined = robust.golden_section(refine, around[:, 0], around[:, 1])
    return refined


def _chebyshev() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes on [-1, 1], a grid there, and the matrix from values at the nodes to values on the grid."""
    nodes = -np.cos(np.pi * np.arange(_NODES + 1) / _NODES)
    grid = np.linspace(-1, 1, _GRID)
    return nodes, grid, np.asarray(_interpolation(nodes, grid, np))


def _interpolation(nodes: Any, x: Any, xp: Any = jnp) -> Any:
    """Weights [..., nodes] of the barycentric formula at ``x`` [...] (Berrut & Trefethen 2004)."""
    sign = (-1.0) ** np.arange(len(nodes))
    sign[[0, -1]] /= 2
    distance = x[..., None] - nodes
    at_node = xp.abs(distance) < 1e-12
    weight = xp.asarray(sign, distance.dtype) / xp.where(at_node, 1.0, distance)
    weight = xp.where(at_node.any(-1, keepdims=True), at_node, weight)
    return weight / weight.sum(-1, keepdims=True)


_FACTORS: dict[str, Any] = {"tv": _tv, "kl": _kl}
