"""rl.values.robust against minimisation over distributions by SciPy, and the laws that the definition gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from rl.values import robust

NAMES = ("tv", "kl", "chi2")
FUNCTIONS = {**robust.REGULARISED, **{f"{name}_ball": ball for name, ball in robust.BALLS.items()}}
JITTED = {name: jax.jit(f) for name, f in FUNCTIONS.items()}
WORST_CASE = jax.jit(robust.worst_case, static_argnums=0)


def in_float32(name: str, values: np.ndarray, weights: np.ndarray, x: float) -> float:
    """One of `FUNCTIONS`, with one compilation for each number of values."""
    return float(JITTED[name](np.float32(values), np.float32(weights), np.float32(x)))


law = settings(deadline=None, max_examples=60, derandomize=True)
divergence = pytest.mark.parametrize("name", NAMES)
function = pytest.mark.parametrize("name", list(FUNCTIONS))

DIVERGENCES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "tv": lambda q, p: 0.5 * np.abs(q - p).sum(),
    "kl": lambda q, p: special.rel_entr(q, p).sum(),
    "chi2": lambda q, p: ((q - p) ** 2 / p).sum(),
}


def problems() -> list[tuple[np.ndarray, np.ndarray]]:
    """Supports of 2 to 7 values: generic, with ties, with values that cannot occur, and all equal."""
    rng = np.random.default_rng(0)
    distributions = [(rng.normal(size=n) * 3, rng.dirichlet(np.ones(n))) for n in (2, 3, 5, 7)]
    ties = np.array([1.0, 0.0, 2.0, 0.0, 2.0, 1.0])
    impossible = (np.array([-9.0, 0.5, 0.1, 9.0, 0.3]), np.array([0.0, 0.2, 0.5, 0.0, 0.3]))
    distributions += [(ties, rng.dirichlet(np.ones(6))), impossible, (np.full(3, 0.7), np.full(3, 1 / 3))]
    # One shape is one compilation; what fills it up cannot occur.
    return [tuple(np.pad(x, (0, 7 - len(x))) for x in problem) for problem in distributions]


def minimum(
    name: str, values: np.ndarray, p: np.ndarray, scale: float | None = None, radius: float | None = None
) -> float:
    """The least ``q @ values + scale * D(q, p)``, or the least ``q @ values`` in the ball, over the support of p."""
    values, p = values[p > 0], p[p > 0]
    if name == "tv":
        return linear_program(values, p, scale, radius)
    distance = DIVERGENCES[name]
    price = scale or 0.0
    constraints: list = [{"type": "eq", "fun": lambda q: q.sum() - 1}]
    if radius is not None:
        constraints.append({"type": "ineq", "fun": lambda q: radius - distance(np.maximum(q, 0), p)})
    best = optimize.minimize(
        lambda q: q @ values + price * distance(np.maximum(q, 0), p),
        p,
        bounds=[(0, 1)] * len(p),
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 300},
    )
    return float(best.fun)


def linear_program(values: np.ndarray, p: np.ndarray, scale: float | None, radius: float | None) -> float:
    """Over (q, t) with ``t >= |q - p|``, so that ``sum(t) / 2`` is the total variation."""
    n, eye = len(p), np.eye(len(p))
    bounds_of_t = np.block([[eye, -eye], [-eye, -eye]])
    limits = np.concatenate([p, -p])
    if radius is not None:
        bounds_of_t = np.vstack([bounds_of_t, np.concatenate([np.zeros(n), np.full(n, 0.5)])])
        limits = np.append(limits, radius)
    cost = np.concatenate([values, np.full(n, (scale or 0.0) / 2)])
    total = np.concatenate([np.ones(n), np.zeros(n)])[None]
    best = optimize.linprog(cost, bounds_of_t, limits, total, [1.0], bounds=(0, None))
    return float(best.fun)


# ---- the definition --------------------------------------------------------------------------------------


@divergence
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 4.0, 50.0])
def test_regularised_is_the_minimum_over_distributions(name: str, scale: float) -> None:
    for values, p in problems():
        with jax.enable_x64(True):
            ours = float(JITTED[name](values, p, scale))
        np.testing.assert_allclose(ours, minimum(name, values, p, scale=scale), atol=2e-6)


@divergence
@pytest.mark.parametrize("radius", [0.0, 0.01, 0.1, 0.4, 0.9, 2.0])
def test_ball_is_the_minimum_over_distributions(name: str, radius: float) -> None:
    for values, p in problems():
        with jax.enable_x64(True):
            ours = float(JITTED[f"{name}_ball"](values, p, radius))
        np.testing.assert_allclose(ours, minimum(name, values, p, radius=radius), atol=5e-6)


@divergence
@pytest.mark.parametrize("scale", [1e-6, 0.01, 0.3, 1.0, 4.0, 1e5])
def test_worst_case_attains_the_dual(name: str, scale: float) -> None:
    for values, p in problems():
        with jax.enable_x64(True):
            q, cost = map(np.asarray, WORST_CASE(name, values, p, scale))
            dual = float(JITTED[name](values, p, scale))
        np.testing.assert_allclose(q.sum(), 1, atol=1e-12)
        assert (q >= 0).all() and (q[p == 0] == 0).all()
        np.testing.assert_allclose(q @ values + cost, dual, atol=1e-9)
        support = p > 0
        np.testing.assert_allclose(cost, scale * DIVERGENCES[name](q[support], p[support]), atol=2e-9)


@divergence
def test_gradient_is_the_worst_case(name: str) -> None:
    """The envelope theorem; there is no gradient through the units of the arithmetic."""
    values, p = problems()[3]
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(robust.REGULARISED[name]))(jnp.asarray(values), p, 0.7)
        np.testing.assert_allclose(gradient, WORST_CASE(name, values, p, 0.7)[0], atol=1e-9)


@pytest.mark.parametrize("name", sorted(robust.BALLS))
def test_gradient_of_a_ball_is_its_worst_case(name: str) -> None:
    """Against differences; and within no ball, one that holds everything, or of equal values it is a distribution."""
    values, p = problems()[3]
    step = 1e-5 * np.eye(len(values))
    with jax.enable_x64(True):
        ball = jax.jit(robust.BALLS[name])
        gradient = jax.jit(jax.grad(robust.BALLS[name]))
        differences = [(ball(values + h, p, 0.1) - ball(values - h, p, 0.1)) / 2e-5 for h in step]
        np.testing.assert_allclose(gradient(values, p, 0.1), differences, atol=2e-5)
        for edge, radius in ((values, 0.0), (values, 1e3), (np.ones_like(values), 0.1)):
            np.testing.assert_allclose(np.sum(gradient(edge, p, radius)), 1.0, atol=1e-6)


@function
def test_duals_of_the_paper(name: str) -> None:
    """Each against the paper's one-dimensional dual, maximised on a fine grid."""
    values, p, x = np.random.default_rng(3).normal(size=5) * 3, np.full(5, 0.2), np.float32(0.3)
    a = (values.min() + np.geomspace(1e-4, 100, 40_001))[:, None]
    b = np.geomspace(1e-4, 1e4, 20_001)[:, None]
    clipped = np.minimum(values, a)
    mean = clipped @ p
    variance = ((clipped - mean[:, None]) ** 2) @ p
    expected = {
        "tv": np.minimum(values, values.min() + x) @ p,
        "kl": -x * np.log(np.exp(-values / x) @ p),
        "chi2": (mean - variance / (4 * x)).max(),
        "tv_ball": (mean - x * (a[:, 0] - values.min())).max(),
        "kl_ball": (-b[:, 0] * special.logsumexp(-values / b, b=p, axis=-1) - b[:, 0] * x).max(),
        # Duchi & Namkoong (2021), for chi2 without their factor 1/2.
        "chi2_ball": (a[:, 0] - np.sqrt(1 + x) * np.sqrt((np.maximum(a - values, 0) ** 2) @ p)).max(),
    }
    np.testing.assert_allclose(in_float32(name, values, p, x), expected[name], atol=2e-4)


# ---- laws ------------------------------------------------------------------------------------------------

any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-100, 100, width=32)
positive = st.floats(2**-20, 2**20, width=32)
not_negative = st.floats(0, width=32, allow_infinity=False)
some_weights = hnp.arrays(np.float32, 6, elements=st.just(0.0) | st.floats(2**-20, 1, width=32)).filter(
    np.any
)
any_weights = hnp.arrays(np.float32, 6, elements=st.floats(0, 1, width=32)).filter(lambda w: w.max() > 1e-30)


def bounds(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    weights = weights.astype(np.float64) / weights.astype(np.float64).sum()
    return values[weights > 0].min(), float(values.astype(np.float64) @ weights)


@function
@law
@given(hnp.arrays(np.float32, 6, elements=any_float32), any_weights, not_negative)
def test_finite_and_between_minimum_and_mean(
    name: str, values: np.ndarray, weights: np.ndarray, x: float
) -> None:
    """For every finite float32: the largest, denormal ones, and a price or radius of 0."""
    weights = np.where(weights < np.finfo(np.float32).tiny, 0, weights)  # XLA takes denormals for 0
    result = in_float32(name, values, weights, x)
    low, mean = bounds(values, weights)
    size = 1e-5 * np.abs(values.astype(np.float64)).max() + 1e-37
    assert low - size <= result <= mean + size


@function
@law
@given(hnp.arrays(np.float32, 6, elements=moderate), some_weights, positive, positive)
def test_monotone(name: str, values: np.ndarray, weights: np.ndarray, x: float, y: float) -> None:
    """Up with the price, down with the radius."""
    small, large = (in_float32(name, values, weights, z) for z in sorted((x, y)))
    if name.endswith("ball"):
        small, large = large, small
    assert small <= large + 1e-5 * np.abs(values).max()


@function
@law
@given(hnp.arrays(np.float32, 6, elements=moderate), some_weights)
def test_limits(name: str, values: np.ndarray, weights: np.ndarray) -> None:
    low, mean = bounds(values, weights)
    towards_low, towards_mean = (1e12, 0.0) if name.endswith("ball") else (1e-12, 1e12)
    atol = 3e-5 * np.abs(values).max() + 1e-9
    np.testing.assert_allclose(in_float32(name, values, weights, towards_low), low, atol=atol)
    np.testing.assert_allclose(in_float32(name, values, weights, towards_mean), mean, atol=atol)


@function
@law
@given(hnp.arrays(np.float32, 6, elements=moderate), some_weights, st.floats(0.03125, 32, width=32))
def test_moves_and_stretches_with_the_values(
    name: str, values: np.ndarray, weights: np.ndarray, x: float
) -> None:
    plain = in_float32(name, values, weights, x)
    atol = 1e-4 + 1e-5 * np.abs(values).max()
    np.testing.assert_allclose(in_float32(name, values + 64, weights, x), plain + 64, atol=atol)
    stretched = x if name.endswith("ball") else 4 * x
    np.testing.assert_allclose(in_float32(name, 4 * values, weights, stretched), 4 * plain, atol=4 * atol)


@function
@law
@given(hnp.arrays(np.float32, 6, elements=moderate), some_weights, st.floats(0.03125, 32, width=32))
def test_only_the_distribution_counts(name: str, values: np.ndarray, weights: np.ndarray, x: float) -> None:
    """Not the order, not how a value's mass is split, nor the sum of the weights, nor what cannot occur."""
    order = np.random.default_rng(0).permutation(6)
    other_values = np.concatenate([values[order], values, [-1e6, 1e6]]).astype(np.float32)
    other_weights = np.concatenate([weights[order], weights, [0, 0]]).astype(np.float32)
    plain = in_float32(name, values, weights, x)
    atol = 2e-5 * np.abs(values).max() + 1e-6
    np.testing.assert_allclose(in_float32(name, other_values, other_weights, x), plain, atol=atol)


@divergence
def test_float32_is_as_good_as_its_precision(name: str) -> None:
    """A rare low value at a low price: what cancels in the textbook formulas."""
    pad = lambda x: np.pad(x, (0, 3))  # what fills it up cannot occur: the programs are those of `problems`
    values = pad(np.array([0.0, 0.5, 0.5 + 1e-6, 1.0]))
    for rare in (1e-3, 1e-5, 1e-7):
        p = pad(np.array([rare, 0.6, 0.1, 0.3 - rare]))
        for x in (1e-7, 1e-5, 1e-3, 0.1, 10.0):
            for function_name in (name, f"{name}_ball"):
                single = in_float32(function_name, values, p, x)
                with jax.enable_x64(True):
                    double = float(JITTED[function_name](values, p, x))
                np.testing.assert_allclose(single, double, atol=2e-6)


# ---- shapes ----------------------------------------------------------------------------------------------


@function
def test_leading_axes_broadcast_and_vmap_agrees(name: str) -> None:
    rng = np.random.default_rng(1)
    values = np.float32(rng.normal(size=(4, 1, 5)))
    weights = np.float32(rng.dirichlet(np.ones(5), size=3))
    x = np.float32([[0.2], [0.5], [1.0], [9.0]])
    f = FUNCTIONS[name]
    both = jax.jit(lambda *arguments: (f(*arguments), jax.vmap(f, (0, None, 0))(*arguments)))
    together, mapped = both(values, weights, x)
    assert together.shape == (4, 3)
    alone = [[in_float32(name, v[0], w, s[0]) for w in weights] for v, s in zip(values, x, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(together, mapped, rtol=1e-6, atol=1e-6)


@divergence
def test_worst_case_broadcasts(name: str) -> None:
    rng = np.random.default_rng(2)
    values, weights = np.float32(rng.normal(size=(4, 1, 5))), np.float32(rng.dirichlet(np.ones(5), size=3))
    scale = np.ones((4, 1), np.float32)
    worst_case = partial(robust.worst_case, name)
    both = jax.jit(lambda v, w, s: (worst_case(v, w, s), worst_case(v[2, 0], w[1], s[2, 0])))
    (q, cost), (one, price) = jax.device_get(both(values, weights, scale))
    assert q.shape == (4, 3, 5) and cost.shape == (4, 3)
    np.testing.assert_allclose(q[2, 1], one, atol=1e-6)
    np.testing.assert_allclose(cost[2, 1], price, atol=1e-6)


@function
def test_wrong_shapes_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="Chex"):
        FUNCTIONS[name](np.zeros(4, np.float32), np.ones((4, 1), np.float32), 1.0)


def test_unknown_divergence() -> None:
    with pytest.raises(ValueError, match=r"divergence='hellinger': choose one of tv, kl, chi2"):
        robust.worst_case("hellinger", np.zeros(2), np.ones(2), 1.0)


def test_golden_section_finds_each_maximum() -> None:
    centre = np.float32([-2.0, 0.3, 4.9])
    low, high = np.full((2, 3), [[-3], [5]], np.float32)
    where, value = jax.jit(partial(robust.golden_section, lambda x: 1 - (x - centre) ** 2))(low, high)
    np.testing.assert_allclose(where, centre, atol=1e-3)
    np.testing.assert_allclose(value, 1, atol=1e-6)
