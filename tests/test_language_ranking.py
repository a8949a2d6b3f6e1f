"""rl.language.ranking: shares and pairs counted one by one, ties, and intervals over problems."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from rl import log, statistics
from rl.language import ranking

RIGHT = [np.array(each, bool) for each in ([1, 0, 0, 1], [0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1])]
SCORES = [
    np.array(each) for each in ([0.5, 2.0, 0.5, 3.0], [1.0, 1.0, 1.0], [5.0, 4, 3, 2, 1], [1.0, 2.0, 3.0])
]


def test_shares_and_pairs_are_what_counting_gives() -> None:
    other = [-each for each in SCORES]
    report = ranking.report({"scores": SCORES, "other": other}, RIGHT, against="other")
    assert (report["problems"], report["mixed_problems"], report["candidates"], report["right"]) == (
        4,
        2,
        15,
        6 / 15,
    )
    assert list(report["pass_at"]["scores"]) == ["1", "2"]  # of three candidates the best three are all
    for k in (1, 2):
        by_chance = [
            np.mean([each[list(c)].any() for c in itertools.combinations(range(len(each)), k)])
            for each in RIGHT
        ]
        one = report["pass_at"]["random"][str(k)]
        assert one["mean"] == pytest.approx(np.mean(by_chance))
        assert one["ci95"] == pytest.approx(statistics.rate_interval(by_chance))
    assert report["pass_at"]["scores"]["1"]["mean"] == pytest.approx((1 + 1 / 3 + 0 + 1) / 4)
    pairs = []
    for scores, right in zip(SCORES[:2], RIGHT[:2], strict=True):
        of_each = [np.sign(a - b) / 2 + 0.5 for a in scores[right] for b in scores[~right]]
        pairs.append(np.mean(of_each))
    assert (
        report["pairs"]["scores"]["mean"] == pytest.approx(np.mean(pairs)) == pytest.approx((0.625 + 0.5) / 2)
    )
    assert report["pairs"]["random"]["mean"] == 0.5 and np.isnan(report["pairs"]["random"]["ci95"]).all()
    difference = report["difference"]["scores"]
    assert difference["pairs"]["mean"] == pytest.approx(np.mean(2 * np.array(pairs) - 1))
    assert difference["pairs"]["ci95"] == pytest.approx(statistics.interval(2 * np.array(pairs) - 1))
    assert "other" not in report["difference"]
    lines = ranking.table(report).splitlines()
    assert lines[0].split("  ")[0] == "ranking" and [line.split()[0] for line in lines[1:]] == [
        "random",
        "scores",
        "other",
    ]
    assert "0.562 [" in lines[2] and lines[1].endswith("]  0.500")


def test_a_report_is_written_as_json_and_read_back(tmp_path: Path) -> None:
    """Chance's interval, which is not a number, too."""
    report = ranking.report({"scores": SCORES}, RIGHT)
    log.write_json(tmp_path / "ranking.json", report)
    read = log.read_json(tmp_path / "ranking.json")
    np.testing.assert_equal(read, report)
    assert ranking.table(read) == ranking.table(report)


def test_where_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no problems with outcomes"):
        ranking.report({"scores": []}, [])
    with pytest.raises(ValueError, match="a score is not finite"):
        ranking.report({"scores": [np.array([1.0, math.nan])]}, [np.array([True, False])])
    report = ranking.report({"scores": [np.array([1.0, 0.0])]}, [np.array([False, False])])
    assert "pairs" not in report and math.isnan(report["pass_at"]["scores"]["1"]["ci95"][0])
    assert ranking.table(report).splitlines()[2].split() == ["scores", "0.000", "-"]


def test_pass_at_k_is_the_average_over_subsets() -> None:
    passed = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], bool)
    for k in (1, 2, 5):
        subsets = list(itertools.combinations(range(5), k))
        expected = np.mean([[row[list(s)].any() for s in subsets] for row in passed])
        assert ranking.pass_at_k(passed, k) == pytest.approx(expected)
        # Without an opinion, ranking is drawing.
        assert ranking.ranked_pass_at_k(passed, np.zeros((3, 5)), k) == pytest.approx(expected)


def test_the_best_of_n_by_hand() -> None:
    scores = np.array([[1.0, 3.0, 2.0, 3.0], [-1.0, -4.0, -1.0, -2.0]])
    assert ranking.best_of(scores, 3).tolist() == [[1, 3, 2], [0, 2, 3]]
    assert ranking.best_of(scores.astype(np.float32), 1).tolist() == [[1], [0]]
    assert ranking.best_of(np.array([[0, 5, 3]], np.uint8), 3).tolist() == [
        [1, 2, 0]
    ]  # -x is no order of these
    with pytest.raises(ValueError, match="cannot take 5 of 4"):
        ranking.best_of(scores, 5)
    with pytest.raises(ValueError, match="not finite"):
        ranking.best_of(scores * np.inf, 1)


def test_ranked_pass_at_k() -> None:
    passed = np.array([[0, 1, 0], [1, 0, 0]], bool)
    scores = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 2.0]])
    assert ranking.ranked_pass_at_k(passed, scores, 1) == 0.0
    assert ranking.ranked_pass_at_k(passed, scores, 2) == 0.5
    assert ranking.ranked_pass_at_k(passed.astype(np.uint8), scores, 2) == 0.5  # ~ of numbers is not "not"
    assert ranking.ranked_pass_at_k(passed, scores, 3) == 1.0
    # A wrong answer before two that share the second place.
    assert ranking.ranked_pass_at_k(passed[:1], np.array([[3.0, 2.0, 2.0]]), 2) == 0.5
    with pytest.raises(ValueError, match="cannot take 4 of 3"):
        ranking.ranked_pass_at_k(passed, scores, 4)
    with pytest.raises(ValueError, match="not finite"):
        ranking.ranked_pass_at_k(passed, scores * np.nan, 1)
