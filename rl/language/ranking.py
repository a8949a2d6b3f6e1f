"""How well numbers rank answers to problems of which the right ones are known: NumPy, one array for each problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl import statistics

CUTS = (1, 2, 5, 10, 20, 50, 100)


def report(
    scores: Mapping[str, Sequence[np.ndarray]], right: Sequence[np.ndarray], against: str = ""
) -> dict[str, Any]:
    """What each ranking is worth, beside drawing at random, with 95 % intervals over problems.

    ``pass_at`` is the share of problems of which one of the ``k`` best-ranked answers is right; of ``random`` it is the
    estimate of Chen et al. (2021). ``pairs`` is how often a right answer is ranked above a wrong one to the same
    problem, ties counting half; problems without both are left out of it. At random it is one half, which is known and
    has no interval: NaN. ``difference`` has both less those of ``against``.

    Args:
      scores: for each ranking the scores [m] of each problem's answers; higher is better.
      right: which answers are right, [m] bool of each problem.
      against: the ranking that the others are compared with, problem by problem; empty: none.

    Raises:
      ValueError: there is no problem, or a score is not finite.
    """
    if not right:
        raise ValueError("there are no problems with outcomes to compare rankings on")
    fewest = min(map(len, right))
    cuts = [k for k in CUTS if k < fewest] or [1]
    right = [np.asarray(each).astype(bool) for each in right]
    mixed = [number for number, each in enumerate(right) if 0 < each.sum() < len(each)]
    passes = {
        "random": {k: np.array([pass_at_k(one[None], k) for one in right]) for k in cuts},
        **{
            name: {
                k: np.array(
                    [ranked_pass_at_k(one[None], x[None], k) for one, x in zip(right, of, strict=True)]
                )
                for k in cuts
            }
            for name, of in scores.items()
        },
    }
    pairs = {
        "random": np.full(len(mixed), 0.5),
        **{name: np.array([_above(of[n], right[n]) for n in mixed]) for name, of in scores.items()},
    }
    summary: dict[str, Any] = {
        "problems": len(right),
        "mixed_problems": len(mixed),
        "candidates": sum(map(len, right)),
        "right": float(np.concatenate(right).mean()),
        "pass_at": {name: {str(k): _rate(x) for k, x in of.items()} for name, of in passes.items()},
    }
    if mixed:
        summary["pairs"] = {
            "random": {"mean": 0.5, "ci95": [math.nan, math.nan]},
            **{name: _rate(pairs[name]) for name in scores},
        }
    if against:
        summary["against"] = against
        summary["difference"] = {
            name: {
                "pass_at": {str(k): _mean(passes[name][k] - passes[against][k]) for k in cuts},
                **({"pairs": _mean(pairs[name] - pairs[against])} if mixed else {}),
            }
            for name in scores
            if name != against
        }
    return summary


def table(summary: Mapping[str, Any]) -> str:
    """A report as lines of text."""
    cuts = list(next(iter(summary["pass_at"].values())))
    titles = ["ranking", *(f"pass@{k}" for k in cuts), "right above wrong"]
    rows = [
        [name, *map(_shown, of.values()), _shown(summary["pairs"][name]) if "pairs" in summary else "-"]
        for name, of in summary["pass_at"].items()
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    )


def _above(scores: np.ndarray, right: np.ndarray) -> float:
    """How often a right answer has a higher score than a wrong one (the statistic of Mann and Whitney)."""
    wrong = np.sort(scores[~right])
    below = np.searchsorted(wrong, scores[right], "left") + np.searchsorted(wrong, scores[right], "right")
    return float(below.sum() / (2 * len(wrong) * right.sum()))  # of equal ones half


def _rate(each: np.ndarray) -> dict[str, Any]:
    return {"mean": float(each.mean()), "ci95": list(statistics.rate_interval(each))}


def _mean(each: np.ndarray) -> dict[str, Any]:
    return {"mean": float(each.mean()), "ci95": list(statistics.interval(each))}


def _shown(one: Mapping[str, Any]) -> str:
    low, high = one["ci95"]
    return f"{one['mean']:.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")


def best_of(scores: np.ndarray, k: int) -> np.ndarray:
    """The ``k`` candidates of highest score, best first, [P, k] int; of equal ones the earlier comes first.

    Args:
      scores: [P, m], finite; of the ``m`` answers to each of ``P`` prompts.
      k: at most m.

    Raises:
      ValueError: ``k`` out of range, or a score that is not finite.
    """
    _check_scores(scores, k)
    return np.argsort(-np.asarray(scores, np.float64), axis=1, kind="stable")[:, :k]


def pass_at_k(passed: np.ndarray, k: int) -> float:
    """The chance that one of ``k`` candidates drawn without replacement passes, averaged over problems.

    The unbiased estimate of Chen et al. (2021), section 2.1.

    Args:
      passed: [problems, m] bool.
      k: at most m.
    """
    m = passed.shape[1]
    _check_k(k, m)
    failed = m - passed.sum(1)
    return float(np.mean([1 - math.comb(int(f), k) / math.comb(m, k) for f in failed]))


def ranked_pass_at_k(passed: np.ndarray, scores: np.ndarray, k: int) -> float:
    """The share of problems where one of the ``k`` candidates of highest score passes (CodeT, Chen et al. 2023).

    Candidates of equal score count with the chance that they are among the ``k``.

    Args:
      passed: [problems, m] bool.
      scores: [problems, m], finite.
      k: at most m.

    Raises:
      ValueError: ``k`` out of range, or a score that is not finite.
    """
    _check_scores(scores, k)
    outcomes = np.asarray(passed).astype(bool)
    return float(np.mean([_chance(p, s, k) for p, s in zip(outcomes, scores, strict=True)]))


def _chance(passed: np.ndarray, scores: np.ndarray, k: int) -> float:
    border = np.sort(scores)[-k]
    if passed[scores > border].any():
        return 1.0
    tied, left = passed[scores == border], k - int((scores > border).sum())
    return 1 - math.comb(int((~tied).sum()), left) / math.comb(len(tied), left)


def _check_scores(scores: np.ndarray, k: int) -> None:
    _check_k(k, scores.shape[1])
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite: candidates cannot be ranked")


def _check_k(k: int, m: int) -> None:
    if not 1 <= k <= m:
        raise ValueError(f"cannot take {k} of {m} candidates")
