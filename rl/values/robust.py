"""Robust expectations: the worst mean of a value when its distribution may shift, by f-divergence duality.

An adversary replaces the distribution ``p`` of a value by ``q``, absolutely continuous with respect to ``p``.
Either it pays a price, ``inf_q E_q[V] + scale * D(q, p)`` (`tv`, `kl`, `chi2`: the regularised form of
R2PVI, Tang, Liu & Xu, ICML 2025), or it has a budget, ``inf_q {E_q[V] : D(q, p) <= radius}`` (`tv_ball`,
`kl_ball`, `chi2_ball`: the constrained form of robust MDPs). The divergences, all 0 at ``q = p``:

    tv     (1/2) sum |q - p|
    kl     sum q log(q / p)
    chi2   sum (q - p)^2 / p

Everywhere ``values`` and ``weights`` are [..., N], the weights the probabilities ``p`` (each vector is
normalised to sum 1; values of weight 0 cannot occur and do not count), ``scale > 0`` and ``radius >= 0`` are
[...]; leading axes broadcast, and the result is [...]. Each result lies between the smallest possible value
(scale to 0, radius to infinity) and the mean (scale to infinity, radius 0), and is finite for every finite
input: the arithmetic is done in units of the values' range. Precision is that of the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rl.settings import require_choice
from rl.types import Array

Dual = Callable[[Array, Array, Array | float], Array]

_GOLDEN = (5**0.5 - 1) / 2
_STEPS = 40  # of a golden-section search, each of one evaluation: the bracket narrows by 0.618 in one, by 4e-9 in all


# ---- at a price ------------------------------------------------------------------------------------------


def tv(values: Array, weights: Array, scale: Array | float) -> Array:
    """``inf_q E_q[V] + scale * TV(q, p)`` [...]: ``E_p[min(V, min V + scale)]``.

    Moving a unit of mass costs ``scale`` with TV half the L1 distance, so that what lies more than ``scale``
    above the minimum is worth moving there, all of it.
    """
    problem = _problem(values, weights)
    return problem.restore(_mean(problem, jnp.minimum(problem.unit, problem.relative(scale))))


def kl(values: Array, weights: Array, scale: Array | float) -> Array:
    """``inf_q E_q[V] + scale * KL(q, p)`` [...]: ``-scale * log E_p[exp(-V / scale)]``, the entropic risk."""
    problem = _problem(values, weights)
    return problem.restore(_entropic(problem, _bounded(problem.relative(scale))))


def chi2(values: Array, weights: Array, scale: Array | float) -> Array:
    """``inf_q E_q[V] + scale * chi2(q, p)`` [...]: ``max_a E_p[V_a] - Var_p[V_a] / (4 scale)``, V_a = min(V, a).

    Exact: the best ``a`` solves ``E_p[(a - V)+] = 2 scale``, one linear equation between each two sorted values.
    """
    problem = _problem(values, weights)
    price = _bounded(problem.relative(scale))
    ratio = _chi2_ratio(problem, price)
    # Each factor is moderate, but the square of a ratio need not be finite.
    cost = (problem.weight * (ratio - 1) * (price * (ratio - 1))).sum(-1)
    return problem.restore(_mean(problem, ratio * problem.unit) + cost)


# ---- within a ball ---------------------------------------------------------------------------------------


def tv_ball(values: Array, weights: Array, radius: Array | float) -> Array:
    """``inf_q {E_q[V] : TV(q, p) <= radius}`` [...]: ``max_a E_p[min(V, a)] - radius (a - min V)``.

    The largest values give up a mass of ``radius``, TV being half the L1 distance, to the smallest. A radius of 1
    reaches every distribution.
    """
    problem = _problem(values, weights)
    unit, weight = _sorted(problem)
    above = jnp.flip(jnp.cumsum(jnp.flip(weight, -1), -1), -1) - weight
    moved = jnp.clip(jnp.asarray(radius, unit.dtype)[..., None] - above, 0.0, weight)
    return problem.restore(((weight - moved) * unit).sum(-1))


def kl_ball(values: Array, weights: Array, radius: Array | float) -> Array:
    """``inf_q {E_q[V] : KL(q, p) <= radius}`` [...]: ``max_b -b log E_p[exp(-V / b)] - b radius`` over ``b > 0``.

    The dual is concave in ``b``; a golden-section search over ``log b`` finds it to the dtype's precision.
    """
    problem = _problem(values, weights)
    radius = jnp.asarray(radius, problem.unit.dtype)
    epsilon = jnp.finfo(problem.unit.dtype).eps
    end = jnp.full(jnp.broadcast_shapes(problem.low.shape, radius.shape), -2 * jnp.log(epsilon))

    def dual(log_price: Array) -> Array:
        price = jnp.exp(log_price)
        return _entropic(problem, price[..., None]) - price * radius

    return problem.restore(golden_section(dual, -end, end)[1])


def chi2_ball(values: Array, weights: Array, radius: Array | float) -> Array:
    """``inf_q {E_q[V] : chi2(q, p) <= radius}`` [...], exact: ``q`` is in proportion to ``p (a - V)+``.

    Its divergence falls with ``a``; between each two sorted values the equation for ``a`` is quadratic.
    """
    problem = _problem(values, weights)
    radius = jnp.asarray(radius, problem.unit.dtype)[..., None]
    unit, weight = _sorted(problem)
    below, total, excess = _waterline(unit, weight)
    beyond = jnp.flip(jnp.cumsum(jnp.flip(weight, -1), -1), -1) - weight
    # Sum of squares about their mean of the values so far (Welford): positive terms, nothing cancels.
    step = jnp.where(below > 0, excess / _positive(below), 0.0)
    spread = jnp.cumsum(weight * below / _positive(total) * jnp.square(step), -1)
    reached = spread * total >= jnp.square(excess) * (radius * total - beyond)
    last = reached.sum(-1, keepdims=True) - 1
    last = jnp.broadcast_to(last, (*jnp.broadcast_shapes(last.shape[:-1], unit.shape[:-1]), 1))
    top, mass, excess, spread, beyond = (_at(x, last) for x in (unit, total, excess, spread, beyond))
    # What is not taken has no derivative either: a factor of 0 would not hide that of a root at 0, or of a quotient.
    tilted = (excess > 0) & (radius * mass > beyond)
    square = (radius * mass - beyond) / _positive(jnp.where(tilted, spread * mass, 1.0))
    slope = jnp.sqrt(jnp.where(tilted, square, 1.0))
    slope = jnp.where(tilted, jnp.minimum(slope, 1 / _positive(jnp.where(tilted, excess, 1.0))), 0.0)
    ratio = jnp.maximum((1 - excess * slope) / mass + (top - problem.unit) * slope, 0.0)
    ratio = jnp.where(problem.unit <= top, ratio, 0.0)
    return problem.restore(_mean(problem, ratio * problem.unit) / _mean(problem, ratio))


REGULARISED: dict[str, Dual] = {"tv": tv, "kl": kl, "chi2": chi2}
BALLS: dict[str, Dual] = {"tv": tv_ball, "kl": kl_ball, "chi2": chi2_ball}


# ---- the adversary itself --------------------------------------------------------------------------------


def worst_case(divergence: str, values: Array, weights: Array, scale: Array | float) -> tuple[Array, Array]:
    """The minimiser of a regularised dual, and its price.

    Returns:
      q [..., N], probabilities, and ``scale * D(q, p)`` [...]: ``sum(q * values) + price`` is the dual
      ``REGULARISED[divergence](values, weights, scale)``.

    Raises:
      ValueError: on an unknown divergence.
    """
    require_choice("divergence", divergence, REGULARISED)
    problem = _problem(values, weights)
    price = _bounded(problem.relative(scale))
    if divergence == "tv":
        mass = jnp.where(problem.unit <= problem.relative(scale), problem.weight, 0.0)
        lowest = jnp.where(problem.weight > 0, problem.unit, jnp.inf).argmin(-1)
        q = mass + (1 - mass.sum(-1, keepdims=True)) * jax.nn.one_hot(
            lowest, mass.shape[-1], dtype=mass.dtype
        )
    elif divergence == "kl":
        q = jax.nn.softmax(jnp.log(_positive(problem.weight)) - problem.unit / price, axis=-1)
        q = jnp.where(problem.weight > 0, q, 0.0)
    else:
        q = problem.weight * _chi2_ratio(problem, price)
    q = q / q.sum(-1, keepdims=True)
    dual = REGULARISED[divergence](problem.unit, problem.weight, price[..., 0])
    cost = jnp.maximum(dual - (q * problem.unit).sum(-1), 0.0)
    return q, 2 * problem.half_unit * cost


# ---- shared arithmetic -----------------------------------------------------------------------------------


def golden_section(objective: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """The maximiser [...] and maximum [...] of a unimodal, elementwise ``objective`` between ``low`` and ``high``."""

    def narrow(_: int, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        low, high, left, right, at_left, at_right = carry
        drop_right = at_left >= at_right
        low, high = jnp.where(drop_right, low, left), jnp.where(drop_right, right, high)
        probe = jnp.where(drop_right, high - _GOLDEN * (high - low), low + _GOLDEN * (high - low))
        value = objective(probe)
        inner, at_inner = jnp.where(drop_right, left, right), jnp.where(drop_right, at_left, at_right)
        return (
            low,
            high,
            jnp.where(drop_right, probe, inner),
            jnp.where(drop_right, inner, probe),
            jnp.where(drop_right, value, at_inner),
            jnp.where(drop_right, at_inner, value),
        )

    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    carry = (low, high, left, right, objective(left), objective(right))
    _, _, left, right, at_left, at_right = jax.lax.fori_loop(0, _STEPS, narrow, carry)
    return jnp.where(at_left >= at_right, left, right), jnp.maximum(at_left, at_right)


class _Problem(NamedTuple):
    """Values in units of their range: ``low + 2 * half_unit * unit``, ``unit`` in [0, 4) and 0 at the minimum.

    Half the unit is stored, because the range of finite numbers need not be finite.
    """

    low: Array  # [...]
    half_unit: Array  # [...], a power of two, an eighth to a quarter of the range
    unit: Array  # [..., N], 0 where the weight is
    weight: Array  # [..., N], sum 1

    def relative(self, scale: Array | float) -> Array:
        """``scale`` [...] in the units of ``unit``, [..., 1]."""
        return (jnp.asarray(scale, self.unit.dtype) / 2 / self.half_unit)[..., None]

    def restore(self, unit: Array) -> Array:
        """The value of a robust mean, which lies between the minimum and the mean but for rounding."""
        part = self.half_unit * jnp.clip(unit, 0.0, _mean(self, self.unit))
        return self.low + part + part


def _problem(values: Array, weights: Array) -> _Problem:
    chex.assert_axis_dimension(weights, -1, jnp.shape(values)[-1])
    dtype = jnp.result_type(values, weights, jnp.float32)
    values, weights = jnp.broadcast_arrays(jnp.asarray(values, dtype), jnp.asarray(weights, dtype))
    possible = weights >= jnp.finfo(dtype).tiny
    weight = jnp.where(possible, weights, 0.0)
    low = jnp.where(possible, values, jnp.inf).min(-1)
    half = jnp.where(possible, values / 2 - low[..., None] / 2, 0.0)
    # A power of two scales without rounding; these have an inverse that is no denormal, which XLA takes for 0.
    _, exponent = jnp.frexp(jax.lax.stop_gradient(half.max(-1)))
    half_unit = jnp.ldexp(jnp.ones_like(low), jnp.maximum(exponent - 2, jnp.finfo(dtype).minexp + 1))
    return _Problem(low, half_unit, half / half_unit[..., None], weight / weight.sum(-1, keepdims=True))


def _mean(problem: _Problem, x: Array) -> Array:
    return (problem.weight * x).sum(-1)


def _bounded(price: Array) -> Array:
    """Prices beyond these bounds are limits, to the precision of any float."""
    return jnp.clip(price, 1e-20, 1e20)


def _positive(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


def _entropic(problem: _Problem, price: Array) -> Array:
    """``-price log E_p[exp(-unit / price)]`` [...] for ``price`` [..., 1]."""
    exponent = -problem.unit / price
    # Near 1 the mean is 1 + E[expm1], or a large price would amplify its rounding; far from 1 that cancels.
    shift, mean = _mean(problem, jnp.expm1(exponent)), _mean(problem, jnp.exp(exponent))
    near = shift > -0.5
    log_mean = jnp.where(
        near, jnp.log1p(jnp.where(near, shift, 0.0)), jnp.log(jnp.where(near, 1.0, _positive(mean)))
    )
    return -price[..., 0] * log_mean


def _chi2_ratio(problem: _Problem, price: Array) -> Array:
    """``q / p`` [..., N] of the chi2 adversary: ``(a - unit)+ / (2 price)`` with mean 1, for ``price`` [..., 1]."""
    unit, weight = _sorted(problem)
    _, total, excess = _waterline(unit, weight)
    last = (excess < 2 * price).sum(-1, keepdims=True) - 1
    last = jnp.broadcast_to(last, (*jnp.broadcast_shapes(last.shape[:-1], unit.shape[:-1]), 1))
    top, mass, excess = (_at(x, last) for x in (unit, total, excess))
    # a - unit as a sum of two positive parts: for a small price the difference itself is all rounding.
    level = (2 * price - excess) / mass + (top - problem.unit)
    return jnp.maximum(level, 0.0) / (2 * price)


def _waterline(unit: Array, weight: Array) -> tuple[Array, Array, Array]:
    """For each sorted value: the mass before it, up to it, and ``E_p[(value - V)+]``, as sums of positive terms."""
    total = jnp.cumsum(weight, -1)
    below = jnp.concatenate([jnp.zeros_like(total[..., :1]), total[..., :-1]], -1)
    return below, total, jnp.cumsum(below * jnp.diff(unit, prepend=unit[..., :1]), -1)


def _sorted(problem: _Problem) -> tuple[Array, Array]:
    """``unit`` in ascending order, and the weights in the same order."""
    unit, weight = jax.lax.sort((problem.unit, problem.weight), dimension=-1, num_keys=1)
    return unit, weight


def _at(x: Array, index: Array) -> Array:
    x = jnp.broadcast_to(x, (*index.shape[:-1], x.shape[-1]))
    return jnp.take_along_axis(x, index, -1)
