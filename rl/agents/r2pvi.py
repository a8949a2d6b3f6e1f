"""R2PVI, robust regularised pessimistic value iteration (Tang, Liu & Xu, ICML 2025).

An adversary may shift every factor of the dynamics, at a price of ``lambda`` times its f-divergence from the
nominal one. From the last step to the first, with ``z`` and ``Lambda`` of `rl.agents.linear`,

    w_h = theta_h + w^,   Q_h = min{phi @ w_h - beta sqrt(phi' diag(Lambda^-1) phi), H - h + 1},   V_h = max_a Q_h

where ``w^_i``, the worst value of factor ``i``, is for

    tv     z(min(V, min V + lambda))_i
    kl     -lambda log max(1 + z(exp(-V / lambda) - 1)_i, exp(-H / lambda))
    chi2   max_a z(V_a)_i + (z(V_a)_i^2 - z(V_a^2)_i) / (4 lambda),   V_a = min(V, a),   0 <= a <= H

Differences. For kl the authors regress ``exp(-V / lambda)`` itself (``shifted=False``). The ridge pulls every
regression towards 0, which for them means: where there is no data, the value is infinite, or ``H`` after the
floor. Regressing the difference from 1 pulls towards the value 0, as for the other divergences. For chi2 the
authors search with Nelder-Mead (and in the simulated MDP for the minimum); here the maximum is exact.

Not a `rl.types.Learner`: see `rl.agents.linear`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from rl.agents import linear
from rl.agents.linear import Fit, Regression
from rl.replay.linear import Trajectories
from rl.settings import require_choice
from rl.types import Array


@dataclasses.dataclass(frozen=True)
class Config(linear.Config):
    """Hyper-parameters; defaults are the paper's for the simulated linear MDP."""

    divergence: str = "tv"  # tv, kl or chi2
    scale: float = 0.1  # lambda, the price of a shift: small is robust, large is not
    shifted: bool = True  # kl only: regress exp(-V / lambda) - 1, not exp(-V / lambda)


def fit(config: Config, data: Trajectories) -> Fit:
    """One backward pass. ``config.scale`` may be a traced number, to vmap over it.

    Raises:
      ValueError: an unknown divergence, a scale that is not positive; see `rl.agents.linear.backward` for more.
    """
    require_choice("divergence", config.divergence, _FACTORS)
    linear.positive("scale (lambda, the price of a shift)", config.scale)
    factors = _FACTORS[config.divergence]
    return linear.backward(
        config, data, lambda regression, values, bound, _: factors(config, regression, values, bound)
    )


def _tv(config: Config, regression: Regression, values: Array, bound: Array) -> Array:
    del bound
    return regression.z(jnp.minimum(values, values.min() + config.scale))


def _kl(config: Config, regression: Regression, values: Array, bound: Array) -> Array:
    # Everything is multiplied by exp(least / scale), or negative values would overflow at a small scale.
    least = jnp.minimum(values.min(), 0.0)
    one = jnp.exp(least / config.scale)
    if config.shifted:
        difference = jnp.expm1((least - values) / config.scale) - jnp.expm1(least / config.scale)
        mean = one + regression.z(difference)
    else:
        mean = regression.z(jnp.exp((least - values) / config.scale))
    floor = jnp.maximum(jnp.exp((least - bound) / config.scale), jnp.finfo(mean.dtype).tiny)
    return least - config.scale * jnp.log(jnp.maximum(mean, floor))


def _chi2(config: Config, regression: Regression, values: Array, bound: Array) -> Array:
    def objective(cut: Array, mean: Array, square: Array) -> Array:
        return mean + (jnp.square(mean) - square) / (4 * config.scale)

    def inside(below: Array, above: Array) -> Array:
        return (2 * config.scale + below) / (1 - above)

    return linear.best_cut(regression, values, bound, objective, inside)


_FACTORS: dict[str, Any] = {"tv": _tv, "kl": _kl, "chi2": _chi2}
