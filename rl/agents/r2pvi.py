"""R2PVI, robust regularised pessimistic value iteration (Tang, Liu & Xu, ICML 2025).

An adversary may shift every factor of the dynamics, at a price of ``lambda`` times its f-divergence from the
nominal one. From the last step to the first, with ``z`` and ``Lambda`` of `rl.agents.linear`,

    w_h = theta_h + w^,   Q_h = min{phi @ w_h - beta sqrt(phi' diag(Lambda^-1) phi), H - h + 1},   V_h = max_a Q_h

where ``w^_i``, the worst value of factor ``i``, is for

    tv     z(min(V, min V + lambda))_i
    kl     min{m_i (-lambda log max(z(exp(-V / lambda))_i / m_i, exp(-H / lambda))), z(V)_i},   m = z(1)
    chi2   min{max_a z(V_a)_i + (z(V_a)_i^2 / m_i - z(V_a^2)_i) / (4 lambda), z(V)_i},   V_a = min(V, a),   0 <= a <= H

Differences. For kl and chi2 the authors have neither ``m`` nor the second term. The ridge pulls every regression
towards 0, by ``m_i`` from 1, and a logarithm or a division by a small lambda makes much of that: a factor that leads to
one value for certain, which no adversary of finite divergence can change, is given another. ``estimate`` is one of

- ``normalised``: the formulas above. Means are divided by what the ridge leaves of 1 and their worst value is
  multiplied by it, as it is for tv by itself: a factor that was never seen is worth 0. No worst value exceeds the mean,
  which rows of both signs do not respect by themselves.
- ``plain``: the authors', ``-lambda log max(z(exp(-V / lambda))_i, exp(-H / lambda))`` for kl, and ``m_i = 1`` for
  chi2. For kl a factor that was never seen is worth ``H``, and ``-lambda log m_i``, which is large where lambda is, is
  added for nothing.
- ``shifted``: kl only, ``-lambda log max(1 + z(exp(-V / lambda) - 1)_i, exp(-H / lambda))``, as the authors have it for
  the ball of DRVI-L (`rl.agents.drpvi`). It cannot exceed ``-lambda log(1 - m_i)``, which for ``n`` samples of a factor
  is ``lambda log(1 + n / ridge)``, however large ``V`` is, and is ``H`` where ``m_i`` exceeds 1: of use only where
  lambda is not small against values.

For chi2 the authors search with Nelder-Mead (and in the simulated MDP for the minimum); here the maximum is exact.

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

ESTIMATES = ("normalised", "plain", "shifted")


@dataclasses.dataclass(frozen=True)
class Config(linear.Config):
    """Hyper-parameters; defaults are the paper's for the simulated linear MDP."""

    divergence: str = "tv"  # tv, kl or chi2
    scale: float = 0.1  # lambda, the price of a shift: small is robust, large is not
    estimate: str = "normalised"  # of kl and chi2: one of ESTIMATES


def fit(config: Config, data: Trajectories) -> Fit:
    """One backward pass. ``config.scale`` may be a traced number, to vmap over it.

    Raises:
      ValueError: an unknown divergence or estimate, a scale that is not positive; see `rl.agents.linear.backward` for
        more.
    """
    require_choice("divergence", config.divergence, _FACTORS)
    require_choice("estimate", config.estimate, ESTIMATES if config.divergence == "kl" else ESTIMATES[:2])
    linear.positive("scale (lambda, the price of a shift)", config.scale)
    factors = _FACTORS[config.divergence]
    return linear.backward(
        config, data, lambda regression, values, bound, _: factors(config, regression, values, bound)
    )


def _tv(config: Config, regression: Regression, values: Array, bound: Array) -> Array:
    del bound
    return regression.z(jnp.minimum(values, values.min() + config.scale))


def _kl(config: Config, regression: Regression, values: Array, bound: Array) -> Array:
    weights, mass = regression.inverse @ regression.weighted.T, _mass(config, regression)
    if config.estimate == "shifted":
        # Its 1 is the mean of one more sample, of value 0, that has the missing weight.
        weights = jnp.concatenate([weights, 1 - weights.sum(-1, keepdims=True)], -1)
        values, mass = jnp.append(values, 0.0), jnp.ones_like(mass)
    least, mean = _exponential(weights, values, config.scale)
    mean = mean / mass
    log_mean = jnp.where(mean > 0, jnp.log(jnp.where(mean > 0, mean, 1.0)), -jnp.inf)
    worst = mass * (least - config.scale * jnp.maximum(log_mean, (least - bound) / config.scale))
    return worst if config.estimate == "shifted" else _at_most_mean(config, regression, values, worst)


def _exponential(weights: Array, values: Array, scale: Any) -> tuple[Array, Array]:
    """Each factor's least value [d], and its mean of ``exp((least - V) / scale)``, which is of about the size of 1.

    With the least value of all in its place, that of a factor whose values are larger by many scales would vanish. A
    weight that is rounding is none: at a small scale it would count for more than all others.
    """
    size = jnp.abs(weights)
    seen = size > 8 * jnp.finfo(weights.dtype).eps * size.max(-1, keepdims=True)
    least = jnp.where(seen, values, jnp.inf).min(-1)
    least = jnp.where(jnp.isfinite(least), least, 0.0)  # of a factor that was never seen
    shares = jnp.where(seen, jnp.exp(jnp.minimum(least[:, None] - values, 0.0) / scale), 0.0)
    return least, (weights * shares).sum(-1)


def _chi2(config: Config, regression: Regression, values: Array, bound: Array) -> Array:
    mass = _mass(config, regression)

    def objective(cut: Array, mean: Array, square: Array) -> Array:
        return mean + (jnp.square(mean) / mass - square) / (4 * config.scale)

    def inside(below: Array, above: Array) -> Array:
        return (2 * config.scale * mass + below) / (mass - above)

    worst = linear.best_cut(regression, values, bound, objective, inside)
    return _at_most_mean(config, regression, values, worst)


def _mass(config: Config, regression: Regression) -> Array:
    """``z(1)`` [d], to divide by: 1 where a factor was never seen, and where nothing is normalised."""
    if config.estimate == "plain":
        return jnp.ones_like(regression.weighted[0])
    mass = regression.z(jnp.ones_like(regression.weighted[:, 0]))
    return jnp.where(mass == 0, 1.0, mass)


def _at_most_mean(config: Config, regression: Regression, values: Array, worst: Array) -> Array:
    return worst if config.estimate == "plain" else jnp.minimum(worst, regression.z(values))


_FACTORS: dict[str, Any] = {"tv": _tv, "kl": _kl, "chi2": _chi2}
