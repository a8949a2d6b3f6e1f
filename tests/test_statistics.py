"""rl.statistics against rliable, SciPy, exhaustive enumeration and simulated coverage."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
import types

import numpy as np
import pytest
from scipy import optimize, stats

from rl import statistics

AGGREGATES = ("mean", "median", "iqm", "optimality_gap")


@pytest.fixture
def scores() -> np.ndarray:
    return np.random.default_rng(0).normal(60, 30, size=(7, 11))


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates_agree_with_rliable(name: str, scores: np.ndarray) -> None:
    metrics = pytest.importorskip("rliable.metrics")
    theirs = {"optimality_gap": lambda x: metrics.aggregate_optimality_gap(x, gamma=100)}.get(
        name, getattr(metrics, f"aggregate_{name}")
    )
    np.testing.assert_allclose(getattr(statistics, name)(scores), theirs(scores), rtol=1e-13)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 3), (8, 8)])
def test_iqm_is_the_mean_trimmed_by_a_quarter(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).lognormal(size=shape)
    np.testing.assert_allclose(statistics.iqm(x), stats.trim_mean(x, 0.25, axis=None), rtol=1e-13)


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates_map_over_leading_axes(name: str) -> None:
    x = np.random.default_rng(2).normal(size=(2, 3, 5, 4))
    aggregate = getattr(statistics, name)
    assert aggregate(x).shape == (2, 3)
    np.testing.assert_allclose(aggregate(x)[1, 2], aggregate(x[1, 2]), rtol=1e-13)


def test_probability_of_improvement_agrees_with_rliable_and_counts_ties_as_half() -> None:
    metrics = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 4, size=(6, 5)).astype(float), rng.integers(0, 4, size=(9, 5)).astype(float)
    ours = statistics.probability_of_improvement(x, y)
    np.testing.assert_allclose(ours, metrics.probability_of_improvement(x, y), rtol=1e-13)
    pairs = [(a > b) + 0.5 * (a == b) for k in range(5) for a in x[:, k] for b in y[:, k]]
    np.testing.assert_allclose(ours, np.mean(pairs), rtol=1e-13)
    assert statistics.probability_of_improvement(x, x[::-1]) == 0.5


def test_probability_of_improvement_needs_the_same_tasks() -> None:
    with pytest.raises(ValueError, match="x has 3 tasks and y has 2"):
        statistics.probability_of_improvement(np.ones((4, 3)), np.ones((4, 2)))


def test_bootstrap_quantiles_are_those_of_all_possible_resamples() -> None:
    """3 seeds and 2 tasks have 3^6 equally likely resamples: the exact bootstrap distribution."""
    x = np.array([[0.0, 10.0], [1.0, 40.0], [3.0, 90.0]])
    columns = list(itertools.product(range(3), repeat=3))
    exact = [np.mean(x[list(i), 0]) + np.mean(x[list(j), 1]) for i in columns for j in columns]
    ours = statistics.bootstrap(lambda s: s.mean(-2).sum(-1), x, confidence=0.8, resamples=200_000)
    np.testing.assert_allclose(ours, np.quantile(exact, [0.1, 0.9]), atol=1e-9)  # a lattice: no noise left


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """rliable.library, whose bootstrap is arch's: arch 7.2 as a whole cannot be imported beside pandas 3."""
    arch = importlib.util.find_spec("arch")
    pytest.importorskip("rliable")
    if arch is None or arch.submodule_search_locations is None:
        pytest.skip("needs arch")
    package = types.ModuleType("arch")
    package.__path__ = list(arch.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "arch", package)
    return importlib.import_module("rliable.library")


@pytest.mark.parametrize("name", AGGREGATES)
def test_bootstrap_agrees_with_rliable(name: str, scores: np.ndarray, library: types.ModuleType) -> None:
    aggregate = getattr(statistics, name)
    np.random.seed(0)  # noqa: NPY002, rliable draws from the global generator
    _, theirs = library.get_interval_estimates({"a": scores}, lambda x: np.array([aggregate(x)]), reps=4000)
    ours = statistics.bootstrap(aggregate, scores, resamples=50_000)
    width = ours.high - ours.low
    np.testing.assert_allclose(ours, theirs["a"].ravel(), atol=0.04 * width)


def test_performance_profiles_agree_with_rliable_and_their_bands_are_intervals_of_each_threshold(
    scores: np.ndarray, library: types.ModuleType
) -> None:
    thresholds = np.array([-20.0, scores[2, 3], 60.0, 200.0])  # one is a score: it is not above itself
    ours = statistics.performance_profile(scores, thresholds)
    theirs = [library.run_score_deviation(scores, threshold) for threshold in thresholds]
    np.testing.assert_allclose(ours, theirs, rtol=1e-13)
    assert statistics.performance_profile(np.ones((2, 5, 7, 11)), thresholds).shape == (2, 5, 4)
    band = statistics.bootstrap(
        lambda x: statistics.performance_profile(x, thresholds), scores, resamples=500
    )
    for i, threshold in enumerate(thresholds):
        alone = statistics.bootstrap(lambda x, at=threshold: (x > at).mean((-2, -1)), scores, resamples=500)
        np.testing.assert_allclose((band.low[i], band.high[i]), alone, rtol=1e-13)


def test_bootstrap_of_two_matrices_resamples_them_independently() -> None:
    """Of X and its copy, an independent resample improves on the other half of the time, more or less."""
    x = np.random.default_rng(4).normal(size=(8, 3))
    low, high = statistics.bootstrap(statistics.probability_of_improvement, x, x.copy())
    assert low < 0.4 < 0.6 < high


def test_bootstrap_does_not_depend_on_how_it_is_chunked(scores: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    whole = statistics.bootstrap(statistics.iqm, scores, resamples=2000)
    monkeypatch.setattr(statistics, "_CHUNK", scores.size * 300)
    np.testing.assert_allclose(
        statistics.bootstrap(statistics.iqm, scores, resamples=2000), whole, rtol=1e-12
    )


def test_bootstrap_is_a_function_of_its_seed(scores: np.ndarray) -> None:
    first, again, other = (statistics.bootstrap(statistics.iqm, scores, seed=s) for s in (5, 5, 6))
    assert first == again
    assert first != other


def test_interval_is_the_student_t_interval() -> None:
    x = np.array([3.0, 5.0, 4.0, 9.0, 1.0])
    theirs = stats.ttest_1samp(x, 0).confidence_interval(0.9)
    np.testing.assert_allclose(statistics.interval(x, 0.9), theirs, rtol=1e-12)


def test_for_few_seeds_the_t_interval_covers_and_the_bootstrap_does_not() -> None:
    x = np.random.default_rng(7).normal(size=(600, 5))
    student = [statistics.interval(row) for row in x]
    percentile = [statistics.bootstrap(statistics.mean, row[:, None], resamples=500) for row in x]
    covers = [np.mean([i.low <= 0 <= i.high for i in intervals]) for intervals in (student, percentile)]
    assert abs(covers[0] - 0.95) < 0.03
    assert covers[1] < 0.89


def test_one_seed_has_no_interval() -> None:
    assert np.isnan(statistics.interval([3.0])).all()
    assert np.isnan(statistics.bootstrap(statistics.iqm, np.ones((1, 4)))).all()
    mixed = statistics.bootstrap(statistics.probability_of_improvement, np.ones((3, 2)), np.zeros((1, 2)))
    assert np.isnan(mixed).all()


def test_the_interval_of_a_ratio_holds_the_ratios_that_students_interval_does_not_reject() -> None:
    rng = np.random.default_rng(11)
    for seeds in (3, 8):
        y = rng.normal(10, 1, seeds)
        for x in (2 * y + rng.normal(0, 1, seeds), -y, rng.normal(0, 1, seeds)):
            low, high = statistics.ratio_interval(x, y, 0.9)
            assert low <= x.mean() / y.mean() <= high
            for ratio, inside in ((low, True), (high, True), (low - 1e-3, False), (high + 1e-3, False)):
                left, right = statistics.interval(x - ratio * y, 0.9)
                assert (left <= 1e-9 and right >= -1e-9) == inside
    assert np.isnan(statistics.ratio_interval([1.0, 2.0, 3.0], [-1.0, 2.0, 0.5])).all()  # of a mean around 0
    assert np.isnan(statistics.ratio_interval([1.0], [2.0])).all()


def test_a_choice_by_other_seeds_gains_nothing_from_noise() -> None:
    """Choices that are alike score their common mean; the largest of each seed would score above it."""
    noise = np.random.default_rng(0).normal(size=(4000, 5, 9))
    chosen = np.array([statistics.held_out_best(scores) for scores in noise])
    assert abs(chosen.mean()) < 0.02 and noise.max(-1).mean() > 1.4
    np.testing.assert_array_equal(
        statistics.held_out_best([[0.0, 1.0], [5.0, 2.0], [0.0, 3.0]]), [0.0, 2.0, 0.0]
    )


def test_the_interval_of_a_rate_is_where_the_score_test_does_not_reject() -> None:
    """Its bounds are the roots of |mean - p| = t sqrt(p (1 - p) d / S), found by bisection; within 0 and 1."""
    rng = np.random.default_rng(8)
    for rates in (rng.beta(9, 1, 5), rng.random(12), np.array([0.0, 1, 1, 1]), np.full(4, 0.3), np.ones(6)):
        low, high = statistics.rate_interval(rates, 0.9)
        mean, seeds = rates.mean(), len(rates)
        equal = np.ptp(rates) == 0
        spread = 1 if equal else rates.var(ddof=1) / (mean * (1 - mean))
        t = stats.t.ppf(0.95, seeds - 1)

        def excess(p: float, mean=mean, seeds=seeds, spread=spread, t=t) -> float:
            return abs(mean - p) - t * np.sqrt(p * (1 - p) * spread / seeds)

        assert 0 <= low < high <= 1 and low <= mean <= high
        assert low == pytest.approx(optimize.brentq(excess, 1e-12, mean - 1e-9), abs=1e-7)
        if mean < 1:
            assert high == pytest.approx(optimize.brentq(excess, mean + 1e-9, 1 - 1e-12), abs=1e-7)


def test_the_interval_of_a_rate_is_wilsons_for_many_seeds_of_one_episode() -> None:
    rates = (np.arange(4000) < 3900).astype(float)
    theirs = stats.binomtest(3900, 4000).proportion_ci(method="wilson")
    np.testing.assert_allclose(statistics.rate_interval(rates), theirs, atol=5e-6)  # a variance with ddof=1
    centred = 0.5 + 0.02 * np.random.default_rng(9).normal(size=6)
    np.testing.assert_allclose(statistics.rate_interval(centred), statistics.interval(centred), atol=1e-4)
    assert np.isnan(statistics.rate_interval([1.0])).all()


def test_rates_that_are_equal_up_to_rounding_have_the_interval_of_equal_ones() -> None:
    """Four seeds that reach 271 of 300 goals, by other tasks each: means over tasks differ in the last bit."""
    reached = np.array(
        [[57, 54, 54, 48, 58], [60, 51, 49, 51, 60], [59, 55, 57, 55, 45], [50, 54, 59, 56, 52]]
    )
    rates = (reached / 60).mean(1)
    assert 0 < np.ptp(rates) < 1e-15
    np.testing.assert_allclose(
        statistics.rate_interval(rates), statistics.rate_interval(np.full(4, 271 / 300)), rtol=1e-12
    )


def test_the_interval_of_a_rate_covers_where_students_does_not() -> None:
    """A fifth of the runs fails for good: four that all succeeded know of no spread."""
    rates = (np.random.default_rng(10).random((800, 4)) < 0.8).astype(float)
    covers = [np.mean([low <= 0.8 <= high for low, high in map(interval, rates)])
              for interval in (statistics.rate_interval, statistics.interval)]  # fmt: skip
    assert covers[0] > 0.95 and covers[1] < 0.7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.iqm([[1.0, np.nan], [2.0, np.inf]]), "2 of 4 scores are NaN or infinite"),
        (lambda: statistics.interval([1.0, np.nan]), "1 of 2 scores are NaN"),
        (lambda: statistics.mean(np.ones((0, 3))), r"no scores: shape \(0, 3\)"),
        (lambda: statistics.interval([]), "no scores"),
        (
            lambda: statistics.ratio_interval([1.0, 2.0], [1.0, 2.0, 3.0]),
            "as many scores above as below, got 2 and 3",
        ),
        (lambda: statistics.rate_interval([0.5, 1.5]), r"success rates lie in \[0, 1\], not in \[0.5, 1.5\]"),
        (lambda: statistics.held_out_best(np.ones((1, 4))), "two seeds or more, got shape \\(1, 4\\)"),
        (lambda: statistics.iqm([1.0, 2.0]), r"\[..., seeds, tasks\], got shape \(2,\)"),
        (lambda: statistics.interval(np.ones((3, 2))), r"one score per seed"),
        (lambda: statistics.bootstrap(statistics.iqm, np.ones((2, 3, 2))), r"\[seeds, tasks\] matrices"),
    ],
)
def test_scores_that_cannot_be_used_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_it_does_not_import_jax() -> None:
    code = "import sys, json, rl.statistics; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert "jax" not in modules


def test_a_summary_holds_the_mean_the_interval_and_each() -> None:
    summary = statistics.summary([1, 2, 3])
    assert summary["mean"] == 2.0 and summary["ci95"] == list(statistics.interval(np.array([1.0, 2.0, 3.0])))
    np.testing.assert_array_equal(summary["each"], [1.0, 2.0, 3.0])
    assert statistics.summary([1.0, 0.5], rate=True)["ci95"] == list(statistics.rate_interval([1.0, 0.5]))
