"""rl.selection: last, best and selected are told apart, and only `best` is optimistic."""

from __future__ import annotations

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
        (np.ones((3, 2, 4)), np.full((3, 2), np.nan), "NaN"),
    ],
)
def test_histories_that_cannot_be_compared_are_refused(scores, estimates, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection.select(scores, estimates)
