"""rl.selection: last, best and selected are told apart, and only `best` is optimistic; choosing among policies."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from rl import selection


def test_select_keeps_last_best_and_selected_apart() -> None:
    scores = np.array([[[1.0, 3.0]], [[9.0, 1.0]], [[4.0, 8.0]], [[0.0, 2.0]]])  # [T=4, S=1, episodes=2]
    by_halves = selection.select(scores)
    assert {name: score.tolist() for name, score in by_halves.items()} == {
        "last": [1.0],
        "best": [6.0],
        "selected": [1.0],  # 9 is the best first half; its other half scored 1
    }
    estimated = selection.select(scores, estimates=[[0.3], [0.1], [0.2], [0.0]])["selected"]
    assert estimated.tolist() == [2.0]


def test_select_works_on_each_run_apart() -> None:
    scores = np.random.default_rng(0).normal(size=(5, 3, 4))
    together = selection.select(scores)
    for s in range(3):
        for name, alone in selection.select(scores[:, s : s + 1]).items():
            assert together[name][s] == alone[0]


def test_a_run_without_a_finite_estimate_keeps_its_last_evaluation() -> None:
    scores = np.array([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])
    estimates = [[-math.inf, 0.0], [-math.inf, 2.0], [-math.inf, 1.0]]
    assert selection.select(scores, estimates)["selected"].tolist() == [5.0, 4.0]


@pytest.mark.parametrize("diverged", [np.nan, np.inf, -np.inf])
def test_fits_that_diverged_recommend_nothing(diverged: float) -> None:
    """Of the second run all did: its last evaluation is taken."""
    estimates = [[1.0, diverged], [diverged, diverged], [2.0, diverged], [0.0, diverged]]
    scores = np.arange(8.0).reshape(4, 2, 1)
    assert selection.select(scores, estimates)["selected"].tolist() == [4.0, 7.0]


def test_both_halves_have_as_many_episodes_of_each_task() -> None:
    """Three episodes of two tasks, which take turns: one of each to select by, two of each to score on."""
    scores = np.tile([0.0, 1.0], 3) * np.ones((2, 1, 1))  # one task always succeeds, the other never
    assert selection.select(scores, tasks=2)["selected"].tolist() == [0.5]
    with pytest.raises(ValueError, match="6 episodes are not equally many of each of 4 tasks"):
        selection.select(scores, tasks=4)


def test_best_is_optimistic_and_selected_is_not() -> None:
    """All evaluations are of equally good policies (mean 0), so any gain is selection bias."""
    scores = np.random.default_rng(0).normal(size=(20, 2000, 10))
    means = {name: score.mean() for name, score in selection.select(scores).items()}
    assert means["best"] > 0.5
    assert abs(means["last"]) < 0.03
    assert abs(means["selected"]) < 0.04


@pytest.mark.parametrize(
    ("scores", "estimates", "message"),
    [
        (np.ones((3, 2)), None, r"\[evaluations, seeds, episodes\], got shape \(3, 2\)"),
        (np.ones((0, 2, 4)), None, "got shape"),
        (np.ones((3, 2, 1)), None, "at least 2"),
        (np.ones((3, 2, 4)), np.ones((3, 1)), r"\(3, 2\), got \(3, 1\)"),
        (np.full((3, 2, 4), np.nan), None, "NaN"),
    ],
)
def test_histories_that_cannot_be_compared_are_refused(scores, estimates, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection.select(scores, estimates)


# ---- choosing among policies --------------------------------------------------------------------------------


def test_expected_best_is_the_mean_over_all_subsets() -> None:
    """The closed form, with ties; its weights for scores that choose and are not counted."""
    scores = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 4.0])
    by = np.array([2.0, 7.0, 1.0, 8.0, 2.0, 8.0, 2.0])  # ties of three and of two
    for k in range(1, 8):
        subsets = [list(subset) for subset in itertools.combinations(range(7), k)]
        best = [scores[subset].max() for subset in subsets]
        assert selection.expected_best(scores, k) == pytest.approx(np.mean(best))
        chosen = [scores[subset][by[subset] == by[subset].max()].mean() for subset in subsets]
        assert selection.expected_best(scores, k, by) == pytest.approx(np.mean(chosen))
    many = np.arange(3000.0)  # of which there are more subsets than a float can count
    assert selection.expected_best(many, 1500) == pytest.approx(1500 * 3001 / 1501 - 1)


def test_expected_best_by_other_scores_has_no_optimism() -> None:
    """All policies are equally good, so that what the best of them has more is noise."""
    scores, others = np.random.default_rng(0).normal(size=(2, 500, 20))
    same = np.mean([selection.expected_best(x, 10) for x in scores])
    held_out = np.mean([selection.expected_best(x, 10, y) for x, y in zip(scores, others, strict=True)])
    assert same > 1 and abs(held_out) < 0.1


def test_a_bandit_among_policies_without_noise_tries_each_once_and_keeps_the_best() -> None:
    """Then its first n pulls are n policies drawn at random. The better of two is chosen from the second on."""
    scores = np.array([-3.0, -8.0, -2.5, -10.0, -4.0])  # an untried policy, counted as 0, would win
    curve = selection.bandit(
        np.repeat(scores[:, None], 3, 1), 8, jax.random.key(0), trials=1000, resamples=40
    )
    expected = [selection.expected_best(scores, min(n, 5)) for n in range(1, 9)]
    np.testing.assert_allclose(curve.mean[:4], expected[:4], atol=4 * scores.std() / math.sqrt(1000))
    np.testing.assert_allclose(curve.mean[4:], -2.5, rtol=1e-6)
    assert (curve.low <= curve.mean + 1e-6).all() and (curve.mean <= curve.high + 1e-6).all()
    assert curve.low[-1] < curve.high[-1]  # others might not have the best one among them
    three = selection.bandit(
        np.repeat(scores[:, None], 3, 1), 8, jax.random.key(0), policies=3, trials=1000, resamples=1
    )
    assert three.mean[-1] == pytest.approx(selection.expected_best(scores, 3), abs=0.3)


def test_one_policy_is_chosen_whatever_it_returns() -> None:
    curve = selection.bandit([[1.0, 5.0]], 3, jax.random.key(0), scores=[7.0])
    np.testing.assert_allclose(curve.mean, 7.0)
    assert np.isnan([curve.low, curve.high]).all()


def test_a_trial_is_that_of_a_loop() -> None:
    """UCB1 with its bonus, draws and choices, written down a second time."""
    rng = np.random.default_rng(7)
    returns, scores = rng.normal(size=(6, 9)), rng.normal(size=6)
    returns -= returns.mean(1, keepdims=True) - np.arange(6)[:, None] / 20  # hard to tell apart
    arms, episodes, alpha = rng.permutation(6)[:4], rng.integers(9, size=200), 6.0
    seen: list[list[float]] = [[] for _ in arms]
    expected = []
    for pull, episode in enumerate(episodes, 1):
        bounds = [np.mean(x) + math.sqrt(alpha * math.log(pull) / len(x)) if x else math.inf for x in seen]
        arm = int(np.argmax(bounds))
        seen[arm].append(returns[arms[arm], episode])
        expected.append(scores[arms[int(np.argmax([np.mean(x) if x else -math.inf for x in seen]))]])
    assert len(set(expected)) > 2 and min(map(len, seen)) > 2
    of_numpy = [
        jax.numpy.asarray(x) for x in (np.float32(returns), np.float32(scores), alpha, arms, episodes)
    ]
    curve = selection._trial(*of_numpy)
    np.testing.assert_allclose(curve, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_bandit_is_one_program_and_its_interval_is_over_policies() -> None:
    """Of many policies the interval at the first pull is that of their mean; more trials do not make it narrower."""
    returns = np.random.default_rng(0).normal(size=(30, 4)) * [[3.0]]
    compiled = selection._curves._cache_size()
    curves = [
        selection.bandit(returns + level, 1, jax.random.key(0), alpha=level, trials=400) for level in (0, 9)
    ]
    assert selection._curves._cache_size() == compiled + 1
    np.testing.assert_allclose(curves[1].mean, curves[0].mean + 9, rtol=1e-5)
    half = 1.96 * returns.mean(1).std() / math.sqrt(30)
    assert (curves[0].high - curves[0].low) / 2 == pytest.approx(half, rel=0.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: selection.expected_best([[1.0]], 1), r"must be \[policies\], got shapes \(1, 1\)"),
        (lambda: selection.expected_best([1.0, 2.0], 1, [1.0]), r"got shapes \(2,\) and \(1,\)"),
        (lambda: selection.expected_best([1.0, np.nan], 1), "must be finite"),
        (lambda: selection.expected_best([1.0, 2.0], 3), "k=3 of 2 policies cannot be tried: give 1 to 2"),
        (lambda: selection.expected_best([1.0, 2.0], 0), "k=0 of 2"),
        (lambda: selection.bandit([1.0], 3, None), r"\[policies, episodes\], got shape \(1,\)"),
        (lambda: selection.bandit([[1.0]], 3, None, scores=[1.0, 2.0]), r"\[policies\] \(1,\), got shape"),
        (lambda: selection.bandit([[np.inf]], 3, None), "must be finite"),
        (lambda: selection.bandit([[1.0]], 3, None, policies=2), "policies=2 of 1 cannot be drawn"),
        (lambda: selection.bandit([[1.0]], 0, None), "pulls=0, .* must be at least 1"),
        (lambda: selection.bandit([[1.0]], 1, None, alpha=-1.0), "alpha=-1.0 not negative"),
    ],
)
def test_policies_that_nobody_can_choose_among_are_refused(call, message: str) -> None:
    """A number of policies that is too large is no smaller one: unifloral cuts it before its check, which is dead."""
    with pytest.raises(ValueError, match=message):
        call()
