"""What came out of a run: its scores with their intervals, as result.json has them, and its learning curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl import log, plot, selection, statistics
from rl.run_folder import CURVE, Run

# Scores that are summarised, and those worth a curve, the most telling first.
SCORES = ("return", "normalized_return", "success", "final_success")
HEADLINE = ("normalized_return", "success", "final_success", "return")
RATES = ("success", "final_success")


def labels(variants: Sequence[Mapping[str, float]]) -> list[str]:
    """What tells the variants of a run apart, in words: ``expectile=0.7, temperature=3``."""
    return [", ".join(f"{name}={value:g}" for name, value in variant.items()) for variant in variants]


def scored_rows(folder: Path, up_to: float = math.inf) -> list[dict[str, Any]]:
    """What a run logged after step 0: an evaluation before, of what it started from, is none of its scores.

    Nor is what was logged after the step ``up_to``, its end, when it was trained further.

    Raises:
      ValueError: a score is NaN; the message names its line.
    """
    rows = [row for row in log.read(folder, up_to) if row["step"] > 0]
    for row in rows:
        for name in [name for name in SCORES if np.isnan(row.get(f"eval/{name}", 0.0)).any()]:
            raise ValueError(
                f"{folder / log.METRICS}: eval/{name} of step {row['step']} is NaN, so that nothing can be summed up: "
                "remove this line, and run the same command again"
            )
    return rows


def summary(
    rows: Sequence[Mapping[str, Any]], part: int = 0, parts: int = 1, task_episodes: int = 0
) -> dict[str, Any]:
    """Last, best and selected scores of every metric that a run logged, with 95 % intervals over seeds.

    Intervals are Student's, and `rl.statistics.rate_interval`'s of success rates, which stay within 0 and 1. Where a
    run reported success at some evaluations only, at the others there was none.

    Args:
      rows: of the run's log, as `scored_rows` reads them.
      part, parts: which of how many equal shares of the logged seeds, such as those of a variant.
      task_episodes: as of `rl.run_folder.Run`.
    """
    scores: dict[str, Any] = {}
    for name in SCORES:
        history = _history(rows, name)
        if not history.size:
            continue
        history = np.split(history, parts, 1)[part]
        estimates = np.asarray([row["eval/fitted_q"] for row in rows if "eval/fitted_q" in row])
        estimates[~np.isfinite(estimates)] = -np.inf  # a fit that diverged recommends nothing
        estimates = np.split(estimates, parts, 1)[part] if estimates.size else estimates
        interval = statistics.rate_interval if name in RATES else statistics.interval
        tasks = history.shape[-1] // task_episodes if task_episodes else 1
        choices = selection.select(history, estimates if estimates.size else None, tasks)
        scores[name] = {
            which: {
                "mean": float(score.mean()),
                "iqm": float(statistics.iqm(score[:, None])),
                "ci95": list(interval(score)),
                "per_seed": score,
            }
            for which, score in choices.items()
        }
    return scores


def series(folder: Path, name: str, up_to: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
    """Steps [T] and scores [T, S, episodes] of a run's evaluations, as by `rl.log.series` and as `summary` has them.

    Raises:
      KeyError: none has the score.
    """
    rows = log.read(folder, up_to)
    if not (steps := [row["step"] for row in _evaluations(rows, name)]):
        log.series(folder, f"eval/{name}", up_to)  # which says what there is
    return np.asarray(steps), _history(rows, name)


def _history(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A score at each of `_evaluations`, [T, S, episodes]."""
    evaluations, key = _evaluations(rows, name), f"eval/{name}"
    none = next((np.zeros_like(row[key], float) for row in evaluations if key in row), None)
    return np.asarray([np.atleast_1d(row.get(key, none)) for row in evaluations], float)


def _evaluations(rows: Sequence[Mapping[str, Any]], name: str) -> Sequence[Mapping[str, Any]]:
    """The rows of evaluations that have a score; of success all of them, if any has it."""
    reported = [row for row in rows if f"eval/{name}" in row]
    if name in RATES and reported:
        return [row for row in rows if any(f"eval/{score}" in row for score in SCORES)]
    return reported


def scores_of(
    run: Run, each: Callable[[int, int], Mapping[str, Any]] = lambda part, parts: {}
) -> dict[str, Any]:
    """The entries of result.json on scores; see `rl.lifecycle.Session.finish`."""
    rows, parts = scored_rows(run.folder, run.total), max(len(run.variants), 1)

    def entries(part: int) -> dict[str, Any]:
        scores = {"scores": summary(rows, part, parts, run.task_episodes)}
        return {**scores, **_estimates(rows, part, parts), **each(part, parts)}

    if not run.variants:
        return entries(0)
    return {"variants": [{"parameters": variant, **entries(i)} for i, variant in enumerate(run.variants)]}


def _estimates(rows: Sequence[Mapping[str, Any]], part: int, parts: int) -> dict[str, Any]:
    """The last values that `rl.fitted_q` estimated, as an entry of result.json; none where it was not asked for."""
    history = [row["eval/fitted_q"] for row in rows if "eval/fitted_q" in row]
    if not history:
        return {}
    values = np.split(np.asarray(history[-1], float), parts)[part]
    return {"fitted_q": {"mean": float(values.mean()), "per_seed": values}}


def draw(run: Run) -> None:
    """The learning curve of the run's most telling score, if it was evaluated; of several variants, one for each."""
    for name in HEADLINE:
        try:
            steps, scores = series(run.folder, name, run.total)
        except KeyError:
            continue
        parts = np.split(scores.mean(-1), len(run.variants) or 1, 1)
        plot.learning_curve(
            run.folder / CURVE,
            {
                label: (steps, part)
                for label, part in zip(labels(run.variants) or [run.label], parts, strict=True)
            },
            ylabel=name.replace("_", " "),
            title=f"{run.title}: {run.label}" if run.variants else run.title,
            xlabel=run.axis,
            rate=name in RATES,
        )
        return
