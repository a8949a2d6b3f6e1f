"""The statistics of a report's scores: tables, comparisons with a baseline, aggregates and learning curves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import report_page, report_runs
from experiments.report_runs import Part
from rl import log, outcomes, statistics
from sweeps.scripts import SCRIPTS

# Of scores that have one scale on all tasks.
_OPTIMA = {"normalized_return": 100.0} | dict.fromkeys(outcomes.RATES, 1.0)
_THRESHOLDS = 101  # of a performance profile
_NONE: Mapping[str, Any] = {"aggregates": {}, "improvement": [], "profiles": {}}  # no aggregates


def cells(parts: Sequence[Part], score: str, evaluations: int) -> list[dict[str, Any]]:
    """The scores of all runs that are finished, with all their seeds."""
    groups: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.variant, part.task), []).append(part)
    rows = []
    for (variant, task), group in groups.items():
        if not all(part.scores and score in part.scores for part in group):
            continue
        rows.append(
            {
                "variant": variant,
                "task": task,
                "folders": [str(part.folder) for part in group],
                **{
                    which: statistics.summary(
                        np.concatenate([_finite(part, score, which, evaluations) for part in group]),
                        rate=score in outcomes.RATES,
                    )
                    for which in report_page.WHICH
                },
            }
        )
    return rows


def _finite(part: Part, score: str, which: str, evaluations: int) -> np.ndarray:
    """The scores of a run's seeds. Raises ValueError, naming the run, if one is not finite."""
    each = report_runs.per_seed(part, score, which, evaluations)
    if not np.isfinite(each).all():
        raise ValueError(
            f"{part.folder}: its {which} scores {each.tolist()} are not all finite, and have no mean: "
            "look into its returns, or leave the run out"
        )
    return each


def curves(parts: Sequence[Part], score: str, lost: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Means over episodes at every evaluation so far, of runs that are finished and of those that are not."""
    groups: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    unfinished = set()
    for part in parts:
        if part.state.name == report_runs.OTHER or (part.variant, part.task) in lost:
            continue
        try:
            steps, scores = report_runs.curve(part, score)
        except (KeyError, FileNotFoundError):
            continue
        except ValueError as error:
            print(f"note: no learning curve of {part.folder}: {error}", file=sys.stderr)
            continue
        groups.setdefault((part.variant, part.task), []).append((steps, scores))
        if part.scores is None:
            unfinished.add((part.variant, part.task))
    rows = []
    for (variant, task), group in groups.items():
        shared = functools.reduce(np.intersect1d, [steps for steps, _ in group])
        rows.append(
            {
                "variant": variant,
                "task": task,
                "finished": (variant, task) not in unfinished,
                "steps": shared,
                "scores": np.concatenate([scores[np.isin(steps, shared)] for steps, scores in group], 1),
            }
        )
    return rows


def without_curve(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The variants and tasks of which a finished run has no metrics, and so no curve."""
    lost = [
        (part.variant, part.task)
        for part in parts
        if part.scores is not None and not (part.folder / log.METRICS).exists()
    ]
    return list(dict.fromkeys(lost))


def baselines(parts: Sequence[Part], baseline: str) -> dict[str, str]:
    """{variant: the variant that it is compared with}, of variants that are no baseline themselves.

    It is the one that has the baseline's value and otherwise the same parameters, or the only one that has it.
    """

    def compared(identity: Mapping[str, Any], but: str) -> dict[str, Any]:
        return {name: x for name, x in identity.items() if name not in (*report_runs.INDIFFERENT, but)}

    of = {part.variant: identity(part) for part in parts}
    choices = [baseline] if baseline else ["agent=bc", "head=scalar"]
    for name, value in (choice.split("=", 1) if "=" in choice else (choice, "") for choice in choices):
        with_it = [variant for variant, identity in of.items() if str(identity.get(name)) == value]
        others = {
            variant: next(
                (base for base in with_it if compared(of[base], name) == compared(identity, name)),
                with_it[0] if len(with_it) == 1 else "",
            )
            for variant, identity in of.items()
            if variant not in with_it
        }
        if against := {variant: base for variant, base in others.items() if base}:
            return against
    if baseline:
        raise ValueError(
            f"--baseline={baseline}: no run of these sweeps has that, beside others to compare with it. Write "
            "parameter=value, such as agent=bc or head=scalar"
        )
    return {}


def identity(part: Part) -> dict[str, Any]:
    """The parameters that make a variant."""
    script = SCRIPTS[part.script]
    without = {script.task, script.length, "seed"}
    return {name: value for name, value in part.parameters.items() if name not in without}


def better(cells: Sequence[Mapping[str, Any]], against: Mapping[str, str]) -> list[dict[str, Any]]:
    """Where the interval of a variant's last score lies above or below that of its baseline.

    Tasks on which either has none (`report_page.has_width`) are not decided and do not count.
    """
    last = {(cell["variant"], cell["task"]): cell["last"]["ci95"] for cell in cells}
    rows = []
    for variant, base in against.items():
        tasks = [
            task
            for name, task in last
            if name == variant
            and (base, task) in last
            and all(report_page.has_width(last[one, task]) for one in (variant, base))
        ]
        pairs = {task: (last[variant, task], last[base, task]) for task in tasks}
        rows.append(
            {
                "variant": variant,
                "baseline": base,
                "tasks": tasks,
                "better": [task for task, (interval, other) in pairs.items() if interval[0] > other[1]],
                "worse": [task for task, (interval, other) in pairs.items() if interval[1] < other[0]],
            }
        )
    return rows


def aggregated(cells: Sequence[Mapping[str, Any]], score: str) -> dict[str, Any]:
    """Aggregates, probabilities of improvement and profiles over the tasks that all variants in them have finished.

    A score without an optimum has no scale that tasks share: those with large numbers would decide its aggregates and
    profiles, and there are none. Probabilities of improvement compare on each task apart.

    Variants with fewer than half of the tasks of the one with most are left out, so that one that has just begun does
    not take the others' tasks away. Where one has different numbers of seeds on its tasks there are no aggregates:
    ``unequal_seeds`` says which.
    """
    done: dict[str, dict[str, np.ndarray]] = {}
    for cell in cells:
        done.setdefault(cell["variant"], {})[cell["task"]] = np.asarray(cell["last"]["each"])
    most = max((len(tasks) for tasks in done.values()), default=0)
    included = {variant: tasks for variant, tasks in done.items() if 2 * len(tasks) >= most}
    tasks = [
        task for task in dict.fromkeys(c["task"] for c in cells) if all(task in x for x in included.values())
    ]
    if len(tasks) < 2:
        # Results of older reports lack the last one: their pages stay.
        return {**_NONE, "aggregate_tasks": tasks, "unaggregated": bool(cells)}
    seeds = {variant: {task: len(scores[task]) for task in tasks} for variant, scores in included.items()}
    if unequal := {variant: counts for variant, counts in seeds.items() if len(set(counts.values())) > 1}:
        return {**_NONE, "aggregate_tasks": tasks, "unequal_seeds": unequal}
    matrices = {
        variant: np.stack([scores[task] for task in tasks], 1) for variant, scores in included.items()
    }
    optimum = _OPTIMA.get(score)
    return {
        "aggregate_tasks": tasks,
        "aggregates": {
            variant: {} if optimum is None else _aggregates(matrix, optimum)
            for variant, matrix in matrices.items()
        },
        "improvement": [
            {"x": x, "y": y, **_bootstrapped(statistics.probability_of_improvement, matrices[x], matrices[y])}
            for x in matrices
            for y in matrices
            if x != y
        ],
        "profiles": {} if optimum is None else _profiles(matrices, optimum),
    }


def _aggregates(matrix: np.ndarray, optimum: float) -> dict[str, Any]:
    """{name: value and interval} of a variant's scores [S, K]."""
    statistic = {name: getattr(statistics, name) for name in report_page.AGGREGATES}
    statistic["optimality_gap"] = lambda x: statistics.optimality_gap(x, optimum)
    return {name: _bootstrapped(function, matrix) for name, function in statistic.items()}


def _profiles(matrices: Mapping[str, np.ndarray], optimum: float) -> dict[str, Any]:
    """Thresholds [T], and by variant the shares of runs above them with intervals."""
    thresholds = _thresholds(matrices.values(), optimum)
    profile = lambda x: statistics.performance_profile(x, thresholds)
    return {
        "thresholds": thresholds,
        **{name: _bootstrapped(profile, matrix, resamples=2000) for name, matrix in matrices.items()},
    }


def _thresholds(matrices: Collection[np.ndarray], optimum: float) -> np.ndarray:
    """From the worst run, or 0, to the best, or the optimum."""
    low, high = (by([by(matrix) for matrix in matrices]) for by in (np.min, np.max))
    return np.linspace(min(0.0, low), max(optimum, high), _THRESHOLDS)


def _bootstrapped(
    function: Callable[..., Any], *matrices: np.ndarray, resamples: int = 10_000
) -> dict[str, Any]:
    """A statistic of [S, K] matrices and its 95 % interval, by this many resamples."""
    value = function(*matrices)
    interval = statistics.bootstrap(function, *matrices, resamples=resamples)
    return {"value": value, "ci95": [np.broadcast_to(bound, np.shape(value)) for bound in interval]}
