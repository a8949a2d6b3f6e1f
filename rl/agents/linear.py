"""What the agents with linear features share: ridge regression, the penalty, and one pass backwards in time.

The setting is a finite horizon ``H``, known features ``phi(s, a)`` on the simplex of ``d`` factors, transitions
``P_h(s' | s, a) = sum_i phi_i mu_{h,i}(s')`` and rewards ``phi @ theta_h``. For a function ``f`` of the next
state, ``E[f(s') | s, a] = phi @ z(f)`` with one number per factor, and

    z(f) = Lambda_h^-1 sum_n phi_n f(s'_n),   Lambda_h = ridge I + sum_n phi_n phi_n'

estimates them by ridge regression. A robust agent lets an adversary shift every factor ``mu_{h,i}`` by itself:
its ``estimate`` replaces the ``i``-th entry of ``z(V)`` by the dual of `rl.values.robust`, with the row
``(Lambda^-1 Phi')_i`` in place of probabilities. These weights are signed and do not sum to 1, so that what is
safe there (a minimum below the mean, a concave dual) need not hold here; `best_cut` makes no use of it.

A fit is one backward pass, not a `rl.types.Learner`: there are no gradient steps, no optimiser and no state
between updates, and the data is read once. It is a pure function of its arrays: vmap it over replications,
lambda or radius. It computes in the dtype of the data. Float64 (`jax.enable_x64`) matters where the ridge is
small against the number of samples, since the inverse of Lambda multiplies rounding by its condition number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import linalg
from rl.replay import linear as replay
from rl.replay.linear import Trajectories
from rl.settings import require_choice
from rl.types import Array

PENALTIES = ("diagonal", "theory", "ellipsoid")

_BLOCK = 64  # sorted samples at once in `best_cut`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The hyper-parameters that every agent of this family has; defaults are the R2PVI paper's for its linear MDP.

    ``penalty`` is what is taken off the value of features ``phi``, ``beta`` times

    - ``diagonal``: ``sqrt(sum_i phi_i^2 (Lambda^-1)_ii)``, as in the code published with R2PVI;
    - ``theory``: ``sum_i phi_i sqrt((Lambda^-1)_ii)``, that of the paper's suboptimality bound as it is
      remembered (its proofs were not read). Every factor is
      estimated by itself, and all may be wrong in the same direction; the default is smaller by up to sqrt(d);
    - ``ellipsoid``: ``sqrt(phi' Lambda^-1 phi)``, that of PEVI and of linear bandits: errors of one regression.
    """

    beta: float = 1.0  # size of the penalty
    ridge: float = 0.1  # gamma of the R2PVI paper, lambda of the PEVI paper
    penalty: str = "diagonal"  # one of PENALTIES
    reward_bound: float = 1.0  # no value exceeds this times the steps that are left
    variance_aware: bool = False  # weigh samples by the inverse variance of their next value, as VA-DRPVI


class Fit(NamedTuple):
    """What a backward pass leaves: everything that the greedy policy needs."""

    weights: Array  # [H, d]
    uncertainty: Array  # [H, d] diagonal of Lambda^-1; [H, d, d] all of it for the ellipsoid


class Regression(NamedTuple):
    """The ridge regression of one step."""

    weighted: Array  # [N, d] features, each divided by its sample's variance
    inverse: Array  # [d, d] Lambda^-1

    def z(self, f: Array) -> Array:
        """The factors' means [d] of ``f`` [N], which is given at the next states."""
        return self.inverse @ (f @ self.weighted)


# (regression, next values [N], their bound [], this step's slice of ``extra``) -> [d]
Estimate = Callable[[Regression, Array, Array, Any], Array]


@linalg.exact
def backward(
    config: Config, data: Trajectories, estimate: Estimate, extra: Any = None, *, known_reward: bool = True
) -> Fit:
    """Fits the weights of every step, from the last to the first, each from the values of the next.

    Args:
      config: see `Config`.
      data: the trajectories.
      estimate: from a regression and the values of the next states to the factors' values.
      extra: a pytree of arrays with leading axis ``H`` that ``estimate`` gets a slice of.
      known_reward: whether ``theta`` is used as given, or ``estimate`` is given reward plus value.

    Raises:
      ValueError: bad settings or data (`rl.replay.linear.check`), or a covariance that is singular and no ridge.
    """
    _check(config, data)
    fit = _pass(config, data, estimate, extra, known_reward, jnp.ones_like(data.reward))
    if not config.variance_aware:
        return fit
    weight = _inverse_variance(config, data, fit)
    return _pass(config, data, estimate, extra, known_reward, weight)


def q_values(config: Config, fit: Fit, features: Array) -> Array:
    """Pessimistic values [H, ...] of the same features [..., d] at every step, clipped above but not below."""
    return q_by_step(config, fit, jnp.broadcast_to(features, (fit.weights.shape[0], *features.shape)))


@linalg.exact
def q_by_step(config: Config, fit: Fit, features: Array) -> Array:
    """Pessimistic values [H, ...] of each step's own features [H, ..., d].

    Raises:
      ValueError: the features are of another horizon or number of factors than the fit.
    """
    horizon, size = fit.weights.shape
    if (features.shape[0], features.shape[-1]) != (horizon, size):
        raise ValueError(
            f"the fit has {horizon} steps of {size} features, not {features.shape[0]} of {features.shape[-1]}"
        )
    remaining = jnp.arange(horizon, 0, -1, dtype=fit.weights.dtype)
    return jax.vmap(lambda weights, uncertainty, left, phi: _q(config, weights, uncertainty, left, phi))(
        *fit, remaining, features
    )


def _pass(
    config: Config, data: Trajectories, estimate: Estimate, extra: Any, known_reward: bool, weight: Array
) -> Fit:
    horizon = data.features.shape[0]
    bound = jnp.asarray(horizon * config.reward_bound, data.features.dtype)
    last = _regression(config, data.features[-1], weight[-1])
    weights = data.theta[-1] if known_reward else last.z(data.reward[-1])

    def step(after: tuple[Array, Array], now: Any) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        features, reward, theta, weight, next_features, stopping, remaining, extra = now
        regression = _regression(config, features, weight)
        value = _value(config, *after, next_features, stopping, remaining)
        if known_reward:
            weights = theta + estimate(regression, value, bound, extra)
        else:
            weights = estimate(regression, reward + value, bound, extra)
        result = weights, _uncertainty(config, regression)
        return result, result

    before = jax.tree.map(lambda x: x[:-1], (data.features, data.reward, data.theta, weight))
    remaining = jnp.arange(horizon - 1, 0, -1, dtype=data.features.dtype)
    now = (*before, data.next_features, data.stopping, remaining)
    final = weights, _uncertainty(config, last)
    _, earlier = jax.lax.scan(step, final, (*now, jax.tree.map(lambda x: x[:-1], extra)), reverse=True)
    return Fit(*(jnp.concatenate([x, y[None]]) for x, y in zip(earlier, final, strict=True)))


def _inverse_variance(config: Config, data: Trajectories, fit: Fit) -> Array:
    """One over the estimated variance of the next value, which is at least 1, of every sample [H, N].

    The variance-aware versions weigh the regressions of a second pass by it (VA-DRPVI, Liu & Xu 2024). Here moments are
    regressed on all data; the authors' code has the regularisation alone for the matrix, which moves estimates to
    their limits, and variances to 1.
    """
    horizon = data.features.shape[0]
    bound = horizon * config.reward_bound

    def step(now: Any) -> Array:
        features, next_features, stopping, weights, uncertainty, remaining = now
        regression = _regression(config, features, jnp.ones_like(stopping))
        value = _value(config, weights, uncertainty, next_features, stopping, remaining)
        second = jnp.clip(features @ regression.z(jnp.square(value)), 0.0, bound**2)
        first = jnp.clip(features @ regression.z(value), 0.0, bound)
        return 1 / jnp.maximum(second - jnp.square(first), 1.0)

    remaining = jnp.arange(horizon - 1, 0, -1, dtype=data.features.dtype)
    after = fit.weights[1:], fit.uncertainty[1:], remaining
    inverse = jax.lax.map(step, (data.features[:-1], data.next_features, data.stopping, *after))
    return jnp.concatenate([inverse, jnp.ones_like(data.reward[-1:])])


def _regression(config: Config, features: Array, weight: Array) -> Regression:
    weighted = features * weight[:, None]
    identity = jnp.eye(features.shape[-1], dtype=features.dtype)
    return Regression(weighted, linalg.positive_inverse(weighted.T @ features + config.ridge * identity))


def _uncertainty(config: Config, regression: Regression) -> Array:
    return regression.inverse if config.penalty == "ellipsoid" else jnp.diagonal(regression.inverse)


def _q(config: Config, weights: Array, uncertainty: Array, remaining: Array, features: Array) -> Array:
    if config.penalty == "ellipsoid":
        penalty = jnp.sqrt(jnp.maximum(((features @ uncertainty) * features).sum(-1), 0.0))
    elif config.penalty == "theory":
        penalty = features @ jnp.sqrt(uncertainty)
    else:
        penalty = jnp.sqrt(jnp.square(features) @ uncertainty)
    return jnp.minimum(features @ weights - config.beta * penalty, remaining * config.reward_bound)


def _value(
    config: Config, weights: Array, uncertainty: Array, features: Array, stopping: Array, remaining: Array
) -> Array:
    return jnp.maximum(_q(config, weights, uncertainty, remaining, features).max(-1), stopping)


# ---- searches over the factors' duals --------------------------------------------------------------------


def best_cut(
    regression: Regression,
    values: Array,
    bound: Array,
    objective: Callable[..., Array],
    inside: Callable[[Array, Array], Array] | None = None,
) -> Array:
    """``max_a objective(a, z(min(V, a)), z(min(V, a)^2))`` over ``a`` in [0, bound], for every factor [d].

    Between two sorted values both means are polynomials in ``a``. One sweep over the values keeps their
    coefficients, so that all intervals' ends are tried, and a point within each: O(N d^2), and no tolerance.

    Args:
      regression: of this step.
      values: [N] next values.
      bound: [] largest cut.
      objective: elementwise in arrays [B, d]; its first argument may be [B, 1].
      inside: from the mean of what lies below the cut, times its mass, and the mass above it, both [B, d], to the
        stationary point of the objective, if it has one between the ends.
    """
    count, size = regression.weighted.shape
    order = jnp.argsort(values)
    block = min(_BLOCK, count + 1)
    padding = -(count + 1) % block
    # A sample of no weight in front begins the first interval; those at the end fill up the last block.
    rows = jnp.pad(regression.weighted[order], ((1, padding), (0, 0)))
    ordered = values[order]
    low = jnp.concatenate([jnp.minimum(ordered[:1], 0.0), ordered, jnp.full(padding, ordered[-1])])
    high = jnp.concatenate([low[1:], jnp.full(1, jnp.inf, low.dtype)])
    total = regression.inverse @ regression.weighted.sum(0)
    triangle = jnp.tri(block, dtype=rows.dtype)

    def sweep(carry: tuple[Array, Array], now: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        sums, best = carry
        rows, low, high = now
        weights = rows @ regression.inverse
        powers = jnp.concatenate([weights, weights * low[:, None], weights * jnp.square(low)[:, None]], -1)
        sums = sums + triangle @ powers
        mass, first, second = jnp.split(sums, 3, axis=-1)
        above = total - mass
        begin, end = (jnp.clip(x, 0.0, bound)[:, None] for x in (low, high))
        cuts = [begin, end]
        if inside is not None:
            cuts.append(jnp.clip(jnp.nan_to_num(inside(first, above)), begin, end))
        tried = [objective(a, first + a * above, second + jnp.square(a) * above) for a in cuts]
        allowed = ((high >= 0) & (low <= bound))[:, None]
        highest = jnp.where(allowed, jnp.stack(tried).max(0), -jnp.inf).max(0)
        return (sums[-1], jnp.maximum(best, highest)), None

    blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), (rows, low, high))
    start = jnp.zeros(3 * size, rows.dtype), jnp.full(size, -jnp.inf, rows.dtype)
    (_, best), _ = jax.lax.scan(sweep, start, blocks)
    return best


# ---- bad input -------------------------------------------------------------------------------------------


def positive(name: str, value: Any, *, zero: bool = False) -> None:
    """Refuses a setting that is not positive (or not negative, with ``zero``); a traced value passes.

    Raises:
      ValueError: naming the setting and what it must be.
    """
    if isinstance(value, jax.core.Tracer):
        return
    value = np.asarray(value)
    if not (np.isfinite(value) & (value >= 0 if zero else value > 0)).all():
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0 and finite, not {value}")


def _check(config: Config, data: Trajectories) -> None:
    replay.check(data)
    require_choice("penalty", config.penalty, PENALTIES)
    positive("beta", config.beta, zero=True)
    positive("ridge", config.ridge, zero=True)
    positive("reward_bound", config.reward_bound)
    if isinstance(config.ridge, jax.core.Tracer) or config.ridge > 0:
        return
    if isinstance(data.features, jax.core.Tracer):
        return
    size = data.features.shape[-1]
    for step, features in enumerate(np.asarray(data.features, np.float64)):
        rank = np.linalg.matrix_rank(features)
        if rank < size:
            raise ValueError(
                f"the covariance of step {step} is singular: its {len(features)} feature vectors span {rank} of "
                f"{size} dimensions. Set ridge above 0, or collect data that visits every factor"
            )
