"""rl.agents.pevi, r2pvi, drpvi and what they share, against a NumPy transcription and searches over fine grids."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers import r2pvi_reference as reference
from rl.agents import drpvi, linear, pevi, r2pvi
from rl.envs import american_put, linear_mdp
from rl.replay import linear as replay
from rl.replay.linear import Trajectories

HORIZON = 4
CUTS = np.linspace(0, HORIZON, 8001)
FACTORS = np.geomspace(1e-6, HORIZON, 8001)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@functools.cache
def random_data(seed: int = 0, count: int = 150, size: int = 5, actions: int = 3) -> Trajectories:
    """Simplex features that no MDP made: weights of either sign, values below 0, stopping in half of the states."""
    rng = np.random.default_rng(seed)
    features = rng.dirichlet(np.full(size, 0.4), size=(HORIZON, count))
    following = rng.dirichlet(np.full(size, 0.4), size=(HORIZON - 1, count, actions))
    stopping = np.where(
        rng.random((HORIZON - 1, count)) < 0.5, -np.inf, rng.normal(size=(HORIZON - 1, count))
    )
    theta = rng.random((HORIZON, size))
    reward = (features * theta[:, None]).sum(-1)
    return Trajectories(features, reward, following, stopping, theta)


NUMBERS = ("beta", "ridge", "reward_bound", "scale", "radius")  # what enters the arithmetic alone


@functools.partial(jax.jit, static_argnums=(0, 1))
def fitted(module: Any, config: Any, numbers: dict[str, Any], data: Trajectories) -> tuple[linear.Fit, Any]:
    config = dataclasses.replace(config, **numbers)
    result = module.fit(config, data)
    return result, linear.q_values(config, result, data.next_features[0])


def fit_and_q(module: Any, config: Any, data: Trajectories | None = None) -> tuple[linear.Fit, np.ndarray]:
    """The fit, and its values [H, N, A] of the data's first next features; one program for all numbers."""
    numbers = {name: getattr(config, name) for name in NUMBERS if hasattr(config, name)}
    rest = dataclasses.replace(config, **dict.fromkeys(numbers, 1.0))
    return jax.device_get(fitted(module, rest, numbers, random_data() if data is None else data))


def on_grid(objective: Callable, grid: np.ndarray) -> reference.Estimate:
    """The maximum over a fine grid: slow, and right to the grid's spacing whatever the shape of the objective."""

    def estimate(rows: np.ndarray, v: np.ndarray, _: float) -> np.ndarray:
        return np.array([objective(row, v, grid[:, None]).max() for row in rows])

    return estimate


def at_most_mean(estimate: reference.Estimate) -> reference.Estimate:
    return lambda rows, v, horizon: np.minimum(estimate(rows, v, horizon), rows @ v)


PLAIN = {"beta": 0.3, "ridge": 0.5}
CASES = [
    (pevi, pevi.Config(**PLAIN), None, 1e-10),
    (r2pvi, r2pvi.Config("tv", 0.4, **PLAIN), reference.tv(0.4), 1e-10),
    *(
        (r2pvi, r2pvi.Config("kl", 0.4, estimate=kind, **PLAIN), reference.kl(0.4, kind), 1e-10)
        for kind in r2pvi.ESTIMATES
    ),
    (
        r2pvi,
        r2pvi.Config("chi2", 0.4, estimate="plain", **PLAIN),
        on_grid(reference.chi2_objective(0.4), CUTS),
        1e-5,
    ),
    (
        r2pvi,
        r2pvi.Config("chi2", 0.4, **PLAIN),
        at_most_mean(on_grid(reference.chi2_objective(0.4, "normalised"), CUTS)),
        1e-5,
    ),
    (
        drpvi,
        drpvi.Config("tv", 0.2, **PLAIN),
        on_grid(reference.tv_ball_objective(0.2), CUTS),
        1e-3,
    ),
    (
        drpvi,
        drpvi.Config("kl", 0.2, **PLAIN),
        on_grid(reference.kl_ball_objective(0.2), FACTORS),
        1e-4,
    ),
]


@pytest.mark.parametrize(("module", "config", "estimate", "atol"), CASES)
def test_fits_are_those_of_the_transcription(module: Any, config: Any, estimate: Any, atol: float) -> None:
    features = random_data().next_features[0]
    expected = reference.fit(random_data(), estimate, **PLAIN, penalty=config.penalty)
    _, ours = fit_and_q(module, config)
    for step in range(HORIZON):
        np.testing.assert_allclose(ours[step], expected(step, features), atol=atol)


def test_no_product_is_rounded_on_an_accelerator() -> None:
    """GPUs and TPUs round the operands of products, unless the program says otherwise; CPUs never do."""
    data = jax.tree.map(np.float32, random_data())
    configs = {pevi: pevi.Config(variance_aware=True), r2pvi: r2pvi.Config(), drpvi: drpvi.Config()}
    for module, config in configs.items():
        text = fitted.lower(module, config, {}, data).as_text()
        products = re.findall(r"stablehlo\.dot_general.*", text)
        assert products and all("precision = [HIGHEST, HIGHEST]" in product for product in products)


@pytest.mark.parametrize("penalty", linear.PENALTIES)
def test_penalties(penalty: str) -> None:
    config = r2pvi.Config("tv", 0.4, penalty=penalty, **PLAIN)
    features = random_data().next_features[0]
    expected = reference.fit(random_data(), reference.tv(0.4), penalty=penalty, **PLAIN)
    np.testing.assert_allclose(fit_and_q(r2pvi, config)[1][1], expected(1, features), atol=1e-10)


def test_the_theory_penalises_most_and_without_beta_all_agree() -> None:
    for beta in (0.0, 0.3):
        config = r2pvi.Config("tv", 0.4, beta=beta, ridge=0.5)
        q = {p: fit_and_q(r2pvi, dataclasses.replace(config, penalty=p))[1][-1] for p in linear.PENALTIES}
        assert (q["theory"] <= q["diagonal"] + 1e-12).all()
        assert (beta == 0) == np.allclose(q["theory"], q["diagonal"])


# ---- the searches: one regression, hard values ------------------------------------------------------------

SITUATIONS = {
    "generic": np.random.default_rng(1).uniform(0, 3, 150),
    "negative values": np.random.default_rng(2).normal(size=150),
    "ties": np.random.default_rng(3).integers(0, 3, 150).astype(float),
    "beyond the bound": np.random.default_rng(4).uniform(2, 9, 150),
    "one value": np.full(150, 0.7),
    "all negative": -np.random.default_rng(5).uniform(1, 2, 150),
}


def regression(seed: int = 6, count: int = 150) -> linear.Regression:
    """Rows of both signs: a third of them is taken negative, which no data does so strongly."""
    rng = np.random.default_rng(seed)
    weighted = rng.dirichlet(np.full(5, 0.4), size=count) * rng.choice([1, 1, -1], size=(count, 1))
    inverse = np.linalg.inv(weighted.T @ weighted + 0.1 * np.eye(5))
    return linear.Regression(weighted, inverse)


@functools.partial(jax.jit, static_argnames=("name", "kind"))
def estimates(
    name: str, problem: linear.Regression, values: np.ndarray, size: float, kind: str = "normalised"
) -> jax.Array:
    """The factors' values at a price (chi2, kl_price) or radius (tv, kl) of ``size``."""
    bound = jnp.asarray(float(HORIZON))
    problem = jax.tree.map(jnp.asarray, problem)
    if name == "chi2":
        return r2pvi._chi2(r2pvi.Config("chi2", size, estimate="plain"), problem, values, bound)
    if name == "kl_price":
        return r2pvi._kl(r2pvi.Config("kl", size, estimate=kind), problem, values, bound)
    return drpvi._FACTORS[name](problem, values, bound, jnp.full(problem.inverse.shape[0], size))


SEARCHES = {
    "chi2": (reference.chi2_objective(0.3), CUTS, 1e-6),
    "tv": (reference.tv_ball_objective(0.3), CUTS, 1e-5),
    "kl": (reference.kl_ball_objective(0.3), FACTORS, 1e-5),
}


def twice_on_grid(objective: Any, row: np.ndarray, values: np.ndarray, grid: np.ndarray) -> float:
    """The maximum over a grid, and over a finer one around it."""
    with np.errstate(over="ignore", invalid="ignore"):
        every = np.nan_to_num(objective(row, values, grid[:, None]), nan=-np.inf, posinf=-np.inf)
        best = int(every.argmax())
        around = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 8001)
        return float(max(every.max(), np.nanmax(objective(row, values, around[:, None]))))


@pytest.mark.slow
@pytest.mark.parametrize("situation", list(SITUATIONS))
@pytest.mark.parametrize("name", list(SEARCHES))
def test_searches_find_the_largest_of_a_fine_grid(name: str, situation: str) -> None:
    values, problem = SITUATIONS[situation], regression()
    objective, grid, tolerance = SEARCHES[name]
    ours = np.asarray(estimates(name, problem, values, 0.3))
    rows = problem.inverse @ problem.weighted.T
    least = (
        min(values.min(), 0.0) if name == "kl" else 0.0
    )  # whose formula is of values that are not negative
    expected = least + np.array([twice_on_grid(objective, row, values - least, grid) for row in rows])
    size = np.maximum(1, np.abs(expected))
    assert (ours >= expected - 1e-6 * size).all()
    assert (ours <= expected + tolerance * size).all()


@pytest.mark.parametrize("situation", list(SITUATIONS))
@pytest.mark.parametrize("kind", r2pvi.ESTIMATES)
def test_kl_of_hard_values(kind: str, situation: str) -> None:
    """Against the textbook formula, which is safe at this price; values below 0 are scaled in ours."""
    values, problem = SITUATIONS[situation], regression()
    ours = estimates("kl_price", problem, values, 0.3, kind)
    rows = problem.inverse @ problem.weighted.T
    np.testing.assert_allclose(ours, reference.kl(0.3, kind)(rows, values, HORIZON), atol=1e-8)


@pytest.mark.slow
def test_best_cut_is_one_sweep_whatever_the_block() -> None:
    """Counts around the block's length: what fills the last block up must not count."""
    for count in (1, 2, 127, 128, 129, 300):
        rng = np.random.default_rng(count)
        values, problem = rng.uniform(0, 3, count), regression(count, count)
        ours = estimates("tv", problem, values, 0.1)
        rows = problem.inverse @ problem.weighted.T
        cuts = np.concatenate([[0.0, 4.0], values])[:, None]
        expected = [reference.tv_ball_objective(0.1)(row, values, cuts).max() for row in rows]
        np.testing.assert_allclose(ours, expected, atol=1e-10)


# ---- laws ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_prices_and_no_radius_leave_the_nominal_fit() -> None:
    """The acceptance list's limit: without an adversary all divergences are one pessimistic value iteration."""
    features = random_data().next_features[0]
    nominal = reference.fit(random_data(), lambda rows, v, _: rows @ v, **PLAIN)(0, features)
    for divergence in ("tv", "kl"):
        config = r2pvi.Config(divergence, 1e7, **PLAIN)
        np.testing.assert_allclose(fit_and_q(r2pvi, config)[1][0], nominal, atol=1e-5)
    env = linear_mdp.make(0.3, 0.2)
    configs = [r2pvi.Config(divergence, 1e7) for divergence in ("tv", "kl", "chi2")]

    @jax.jit
    def q_of_each() -> list[jax.Array]:
        data = linear_mdp.collect(env, jax.random.key(0), 100)
        return [linear.q_values(config, r2pvi.fit(config, data), env.features) for config in configs]

    same = q_of_each()
    np.testing.assert_allclose(same[1], same[0], atol=1e-6)
    np.testing.assert_allclose(
        same[2], same[0], atol=0.02
    )  # a maximum over signed rows may exceed the nominal


@pytest.mark.slow
def test_vmap_over_prices_radii_and_replications_is_one_at_a_time() -> None:
    prices = np.array([0.1, 0.7])
    data = jax.tree.map(lambda *x: np.stack(x), random_data(0), random_data(1))
    for module, config, field in (
        (r2pvi, r2pvi.Config("tv"), "scale"),
        (r2pvi, r2pvi.Config("chi2"), "scale"),
        (drpvi, drpvi.Config("kl"), "radius"),
    ):
        one = lambda x, d, c=config, m=module, f=field: m.fit(dataclasses.replace(c, **{f: x}), d).weights
        together = jax.jit(jax.vmap(jax.vmap(one, (0, None)), (None, 0)))(prices, data)
        alone = jax.jit(one)(0.7, random_data(1))
        np.testing.assert_allclose(together[1, 1], alone, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_a_radius_for_each_step_and_factor() -> None:
    radius = np.zeros((HORIZON, 5))
    radius[1, 3] = 0.4
    some, none = (fit_and_q(drpvi, drpvi.Config("tv", r, **PLAIN))[0].weights for r in (radius, 0.0))
    np.testing.assert_array_equal(some[2:], none[2:])
    np.testing.assert_array_equal(np.delete(some[1], 3), np.delete(none[1], 3))
    assert some[1, 3] < none[1, 3]


def test_variance_aware_weights_are_the_inverse_variances() -> None:
    """Against the definition, written out: a first pass, its values' moments, and a weighted second pass."""
    config = pevi.Config(variance_aware=True, reward_bound=3.0, **PLAIN)
    data = random_data()._replace(stopping=random_data().stopping * 5)

    @jax.jit
    def two_passes(data: Trajectories) -> tuple[Any, ...]:
        first = pevi.fit(dataclasses.replace(config, variance_aware=False), data)
        q = linear.q_values(config, first, data.next_features[1])
        return linear._inverse_variance(config, data, first), q, pevi.fit(config, data).uncertainty

    weight, q, uncertainty = jax.device_get(two_passes(data))
    assert weight.min() < 0.5 and weight.max() == 1
    step, bound = 1, 3.0 * HORIZON
    phi = data.features[step]
    value = np.maximum(q[step + 1].max(-1), data.stopping[step])
    rows = np.linalg.inv(phi.T @ phi + config.ridge * np.eye(5)) @ phi.T
    second = np.clip(phi @ (rows @ value**2), 0, bound**2)
    variance = np.maximum(second - np.clip(phi @ (rows @ value), 0, bound) ** 2, 1)
    np.testing.assert_allclose(weight[step], 1 / variance, rtol=1e-9)
    weighted = phi * weight[step][:, None]
    inverse = np.linalg.inv(weighted.T @ phi + config.ridge * np.eye(5))
    np.testing.assert_allclose(uncertainty[step], inverse, rtol=1e-8)


@pytest.mark.slow
def test_float32_works_and_small_prices_stay_finite() -> None:
    data = jax.tree.map(lambda x: x.astype(np.float32), random_data())
    for module, config in (
        (r2pvi, r2pvi.Config("tv", 1e-6)),
        *((r2pvi, r2pvi.Config("kl", 1e-6, estimate=kind)) for kind in r2pvi.ESTIMATES),
        (r2pvi, r2pvi.Config("chi2", 1e-3)),
        (drpvi, drpvi.Config("kl", 5.0)),
        (drpvi, drpvi.Config("tv", 5.0)),
    ):
        result = jax.jit(lambda data, m=module, c=config: m.fit(c, data))(data)
        assert result.weights.dtype == np.float32
        assert np.isfinite(result.weights).all()


def test_kl_of_factors_that_lead_to_values_many_prices_apart() -> None:
    """In float32 and at a small price: means of exp(-V / price) of the better factor vanish beside the other's."""
    low, high, price = -3.0, 3.0, 0.05
    values = np.array([low, low + 0.5, high, high + 0.5], np.float32)
    features = np.repeat(np.eye(3, dtype=np.float32)[:2], 2, 0)
    problem = linear.Regression(features, np.diag(np.float32([1 / 2.1, 1 / 2.1, 10])))  # ridge 0.1
    kept, least = 2 / 2.1, np.array([low, high])
    normalised = kept * (least - price * np.log((1 + np.exp(-0.5 / price)) / 2))
    plain = least - price * np.log((1 + np.exp(-0.5 / price)) / 2.1)
    for kind, expected in {"normalised": [*normalised, 0], "plain": [*plain, HORIZON]}.items():
        np.testing.assert_allclose(estimates("kl_price", problem, values, price, kind), expected, rtol=1e-5)
    # In a ball the worst of all is what was never seen, and all but what the ridge takes is the factor's own.
    ball = estimates("kl", problem, values, 0.01)
    assert low <= ball[2] < low + 0.01 and low <= ball[0] < low + 0.5 < ball[1] < high + 0.5


@pytest.mark.parametrize("divergence", ["tv", "kl", "chi2"])
def test_where_nothing_is_uncertain_no_price_costs_anything(divergence: str) -> None:
    """One factor that always leads to itself, and a reward of 1 in each of 20 steps: no adversary has a choice.

    Data bring the value to within what the ridge takes, however small the price is against it.
    """
    steps, count = 20, 1000
    ones = functools.partial(np.ones, dtype=np.float64)
    data = Trajectories(
        features=ones((steps, count, 1)),
        reward=ones((steps, count)),
        next_features=ones((steps - 1, count, 1, 1)),
        stopping=np.full((steps - 1, count), -np.inf),
        theta=ones((steps, 1)),
    )
    config = r2pvi.Config(divergence, beta=0.0)
    scales = np.array([0.01, 1.0, 100.0])
    values = jax.jit(jax.vmap(lambda x: r2pvi.fit(dataclasses.replace(config, scale=x), data).weights[0, 0]))(
        scales
    )
    np.testing.assert_allclose(values, steps, rtol=0.01)


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "config", "message"),
    [
        (r2pvi, r2pvi.Config("hellinger"), "divergence='hellinger': choose one of tv, kl, chi2"),
        (r2pvi, r2pvi.Config(scale=0.0), "scale .* must be above 0 and finite, not 0"),
        (r2pvi, r2pvi.Config(scale=-1.0), "scale .* must be above 0"),
        (r2pvi, r2pvi.Config(scale=float("nan")), "scale .* must be above 0"),
        (drpvi, drpvi.Config("chi2"), "divergence='chi2': choose one of tv, kl"),
        (drpvi, drpvi.Config(radius=-0.1), "radius must be at least 0"),
        (
            drpvi,
            drpvi.Config(radius=np.zeros((3, 5))),
            r"radius must be one number or .* \(4, 5\), not \(3, 5\)",
        ),
        (pevi, pevi.Config(penalty="none"), "penalty='none': choose one of diagonal, theory, ellipsoid"),
        (pevi, pevi.Config(ridge=-1.0), "ridge must be at least 0"),
        (pevi, pevi.Config(beta=-1.0), "beta must be at least 0"),
        (pevi, pevi.Config(reward_bound=0.0), "reward_bound must be above 0"),
    ],
)
def test_bad_settings(module: Any, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.fit(config, random_data())


def test_features_of_another_horizon_or_map() -> None:
    config = pevi.Config(**PLAIN)
    result, _ = fit_and_q(pevi, config)
    for features, message in ((np.zeros((3, 5)), "not 3 of 5"), (np.zeros((4, 6)), "not 4 of 6")):
        with pytest.raises(ValueError, match=f"the fit has 4 steps of 5 features, {message}"):
            linear.q_by_step(config, result, features)


def test_singular_covariance_without_ridge() -> None:
    features = random_data().features.copy()
    features[2, :, 0] = 0.0
    with pytest.raises(ValueError, match=r"covariance of step 2 is singular.*span 4 of 5.*ridge above 0"):
        pevi.fit(pevi.Config(ridge=0.0), random_data()._replace(features=features))
    without = jax.jit(
        lambda: pevi.fit(pevi.Config(ridge=0.0), random_data())
    )()  # data that the check can see
    assert np.isfinite(without.weights).all()


def first_feature(data: Trajectories, value: float) -> Trajectories:
    features = data.features.copy()
    features[0, 0, 0] = value
    return data._replace(features=features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d._replace(features=2 * d.features),
            "features are not on the simplex: one vector sums to 2",
        ),
        (lambda d: first_feature(d, -0.5), "not on the simplex: one is -0.5"),
        (lambda d: first_feature(d, np.nan), "not on the simplex: one is nan"),
        (lambda d: d._replace(next_features=3 * d.next_features), "next_features are not on the simplex"),
        (
            lambda d: d._replace(theta=d.theta[1:]),
            r"theta has shape \(3, 5\); with 4 steps .* must be \(4, 5\)",
        ),
        (
            lambda d: d._replace(next_features=d.next_features[1:]),
            r"next_features has shape \(2, 150, 3, 5\)",
        ),
        (lambda d: d._replace(stopping=d.reward), r"stopping has shape \(4, 150\)"),
        (lambda d: d._replace(reward=d.reward[:, 1:]), r"reward has shape \(4, 149\)"),
        (lambda d: d._replace(features=d.features[0]), "features must be .steps, trajectories, features."),
    ],
)
def test_bad_data(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pevi.fit(pevi.Config(), change(random_data()))


def test_good_data_passes_also_the_puts_vanishing_features() -> None:
    replay.check(random_data())
    env = american_put.make()
    replay.check(jax.jit(lambda: american_put.collect(env, jax.random.key(0), 10, 81.0))())
