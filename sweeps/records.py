"""What the folders of a sweep's programs hold: how far each is, its scores and its errors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import notes
from rl import locks, log, outcomes, run_folder, statistics
from sweeps import layout
from sweeps.layout import Program, Sweep
from sweeps.scripts import SCRIPTS

FAILED, SWEEP = "failed.json", "sweep.json"
DIVERGED = "diverged.json"  # in the folder of a program whose runs are trained one by one
DIVERGENCE = "diverged"  # begins the error of a run that did
_SHOWN = 10  # rows of the table at the end

Rows = dict[Path, list[dict[str, Any]]]
"""Of the runs of programs, by their folders."""


class MetricError(ValueError):
    """The runs do not log the sweep's metric."""


class State(NamedTuple):
    """How far a program is."""

    name: str  # done, running, failed, stopped or waiting
    step: int  # of `total`, both in the unit of the script's length
    total: int
    seconds: float  # of training so far; 0 where nobody knows
    error: str = ""


def state(program: Program, place: Path) -> State:
    """How far the program in the folder is; reads only small files."""
    settings, config, _ = layout.arguments(program, place)
    script = SCRIPTS[program.script]
    total = getattr(settings, script.length)
    if layout.finished(program, place):
        return State("done", total, total, log.read_json(place / log.RESULT)["wall_seconds"])
    if (place / run_folder.OVERWRITE).exists():
        return State("running" if holder(program, place) else "waiting", 0, total, 0.0)
    if (place / DIVERGED).exists():
        of_runs = _state_of_single_runs(program, place, total)
        claimed = locks.holder(place, layout.CLAIM)  # also between two of them
        return of_runs._replace(name="running", error="") if claimed else of_runs
    steps = script.steps(settings, config)
    rows = log.read(place, steps) if (place / log.METRICS).exists() else []
    step = rows[-1]["step"] // (steps // total) if rows else 0
    seconds = _seconds(place) if rows else 0.0
    if holder(program, place):
        return State("running", step, total, seconds)
    if (place / FAILED).exists():
        return State("failed", step, total, seconds, log.read_json(place / FAILED)["error"])
    return State("stopped" if rows else "waiting", step, total, seconds)


def _state_of_single_runs(program: Program, place: Path, total: int) -> State:
    """How far the runs of a program that diverged are, of which each is trained alone."""
    each = [state(part, folder) for folder, part in layout.single_run_folders(program, place).items()]
    names = {one.name for one in each}
    step, seconds = sum(one.step for one in each) // len(each), sum(one.seconds for one in each)
    if names == {"done"} or "running" in names:
        return State("done" if names == {"done"} else "running", step, total, seconds)
    if (place / FAILED).exists():
        return State("failed", step, total, seconds, log.read_json(place / FAILED)["error"])
    return State("stopped", step, total, seconds)


def _seconds(place: Path) -> float:
    """Wall time of the newest session that got further, up to its last line of metrics, scaled to all lines.

    To resume writes that file again: of a session without a line yet, the checkpoint that it resumed from says when the
    one before ended. 0 where nothing says it.
    """
    config = log.read_json(place / log.CONFIG)
    sessions = [{"step": 0, **config}, *config["resumed"]]
    step, resumed = log.read(place)[-1]["step"], sessions[-1]["step"]
    written = place / run_folder.CHECKPOINTS / str(resumed) if step <= resumed else place / log.METRICS
    end = max(step, resumed)
    session = next((one for one in reversed(sessions) if one["step"] < end), None)
    if session is None or not written.exists():
        return 0.0
    passed = written.stat().st_mtime - datetime.fromisoformat(session["started"]).timestamp()
    return max(passed, 0.0) * step / (end - session["step"])


def scored(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """A row for every run of a program that is finished, with its parameters and its last score, if that is finite.

    Raises:
      MetricError: the runs do not log ``metric``.
    """
    each = program.single_runs()
    scores = _last(program, workdir, metric).reshape(len(each), -1)
    interval = (
        statistics.rate_interval if metric.rpartition("/")[2] in outcomes.RATES else statistics.interval
    )

    def outcome(per_seed: np.ndarray) -> dict[str, Any]:
        if lost := (~np.isfinite(per_seed)).sum():
            return {"error": f"{lost} of {per_seed.size} last {metric} are not finite"}
        return {"score": per_seed.mean(), "ci95": list(interval(per_seed))}

    return [row_of(part, workdir) | outcome(per_seed) for part, per_seed in zip(each, scores, strict=True)]


def _last(program: Program, workdir: Path, metric: str) -> np.ndarray:
    """The last score of every seed of a program's runs, [R * S]. Raises MetricError, as `scored`.

    It is that of the result; what a result does not sum up is in the metrics, whose last lines may have been lost.
    """
    score = metric.removeprefix("eval/")
    of_runs = [part.get("scores", {}) for _, part in notes.parts(log.read_json(workdir / log.RESULT))]
    if metric != score and all(score in scores for scores in of_runs):
        return np.array([scores[score]["last"]["per_seed"] for scores in of_runs])
    settings, config, _ = layout.arguments(program, workdir)
    try:
        last = log.series(workdir, metric, SCRIPTS[program.script].steps(settings, config))[1][-1]
    except KeyError as error:
        raise MetricError(
            f"the sweep's metric is not logged: {error.args[0]}. Change the metric in the file; what is finished is "
            "not trained again"
        ) from None
    count = program.runs * getattr(settings, "seeds", 1)
    # One number, of a metric that is the same for all seeds.
    return np.broadcast_to(last, count) if last.size == 1 else last.reshape(count, -1).mean(-1)


def row_of(run: Program, workdir: Path) -> dict[str, Any]:
    """What every row says of its run: all parameters, and the folder of its program."""
    swept = {name: value for name, (value,) in run.swept.items()}
    return {"parameters": run.fixed | swept, "workdir": str(workdir)}


def ranked(rows: list[dict[str, Any]], goal: str) -> list[dict[str, Any]]:
    """The rows, best score first; those without one last."""
    sign = 1 if goal == "minimize" else -1
    return sorted(rows, key=lambda row: sign * row["score"] if "score" in row else math.inf)


def is_finished(row: Mapping[str, Any], script: str) -> bool:
    """Whether the run of a row is `layout.finished`."""
    return layout.finished(Program(row["parameters"], {}, script), Path(row["workdir"]))


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The errors of the runs that failed."""
    return [row["error"] for row in rows if "error" in row]


def done(sweep: Sweep, known: Collection[Path] = ()) -> Rows:
    """The rows of the programs that are finished, but for those that are known.

    Raises:
      MetricError: as `scored`, if none of them has the metric.
    """
    rows: Rows = {}
    failed: list[MetricError] = []
    for place, program in sweep.programs.items():
        if place not in known and layout.finished(program, place):
            try:
                rows[place] = scored(program, place, sweep.metric)
            except MetricError as error:
                failed.append(error)
                rows[place] = [row_of(part, place) | {"error": str(error)} for part in program.single_runs()]
    if failed and len(failed) == len(rows) and not known:
        raise failed[0]
    return rows


def trained_alone(sweep: Sweep, known: Collection[Path]) -> list[dict[str, Any]]:
    """The rows of finished runs that were trained alone, because their program diverged and is not finished."""
    return [
        row
        for place, program in sweep.programs.items()
        if place not in known and program.runs > 1
        for folder, part in layout.single_run_folders(program, place).items()
        if layout.finished(part, folder)
        for row in scored(part, folder, sweep.metric)
    ]


def ended(program: Program, place: Path, metric: str, began: float) -> list[dict[str, Any]]:
    """The rows of a program that is finished, or that failed since the command ``began``; [] of others."""
    if layout.finished(program, place):
        return scored(program, place, metric)
    each = layout.single_run_folders(program, place)
    done = {folder for folder, part in each.items() if layout.finished(part, folder)}
    error = _error(place, began)
    if not error and len(done) < len(each):
        return []
    return [
        row
        for folder, part in each.items()
        for row in (
            scored(part, folder, metric) if folder in done else [row_of(part, place) | {"error": error}]
        )
    ]


def _error(place: Path, began: float) -> str:
    """Why the program there failed since ``began``, if it would in any process: memory is full in one, say."""
    with contextlib.suppress(FileNotFoundError):  # or another process is about to try it again
        failed = log.read_json(place / FAILED)
        if (place / FAILED).stat().st_mtime >= began and failed.get("explained", True):
            return str(failed["error"])
    return ""


def holder(program: Program, place: Path) -> str | None:
    """Which process prepares or trains the program, or a run of it alone."""
    files = (
        *((folder, locks.LOCK) for folder in (place, *layout.single_run_folders(program, place))),
        (place, layout.CLAIM),
    )
    held = ((folder, locks.holder(folder, lock)) for folder, lock in files)
    return next((f"{folder} is in use by {process}" for folder, process in held if process), None)


def data_versions(results: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, int]:
    """{task: on how many versions of its data its runs were trained}, by the digests in pairs of (task, result)."""
    digests: dict[str, set[str]] = {}
    for task, result in results:
        if result.get("digest"):
            digests.setdefault(task, set()).add(result["digest"])
    return {task: len(of_task) for task, of_task in digests.items()}


def other_data(planned: Mapping[Path, Program]) -> Iterator[str]:
    """A line for each task whose finished programs were trained on different data: their scores do not compare."""
    results = (
        (
            str(getattr(layout.arguments(program, place)[0], SCRIPTS[program.script].task)),
            log.read_json(place / log.RESULT),
        )
        for place, program in planned.items()
        if layout.finished(program, place)
    )
    for task, versions in data_versions(results).items():
        if versions > 1:
            yield (
                f"not the same data: {task} had {versions} versions when its programs were trained, so that their "
                "scores do not compare; --overwrite trains all again"
            )


def status(planned: Mapping[Path, Program]) -> Iterator[str]:
    """What is done, running, failed and waiting, in lines; and how long the rest takes at the speed so far."""
    states = {place: state(program, place) for place, program in planned.items()}
    counts = {
        name: sum(one.name == name for one in states.values())
        for name in ("done", "running", "failed", "stopped", "waiting")
    }
    yield f"{len(states)} programs: " + ", ".join(
        f"{count} {name}" for name, count in counts.items() if count
    )
    work: dict[str, np.ndarray] = {}  # {agent: [left, trained, seconds]}
    for place, one in states.items():
        size = planned[place].runs * one.total
        share = one.step / one.total
        agent = str(planned[place].fixed.get("agent", ""))
        trained = size * share if one.seconds else 0.0
        work[agent] = work.get(agent, np.zeros(3)) + np.array([size * (1 - share), trained, one.seconds])
        error = f"  {one.error.splitlines()[0]}" if one.error else ""
        yield f"{one.name:8s} {100 * share:4.0f} %  {place.name}{error}"
    left, trained, seconds = np.sum(list(work.values()), axis=0)
    if not left:
        return
    if not trained:
        yield "nothing was trained yet that says how long the rest takes"
        return
    rest = sum(sums[0] * (sums[2] / sums[1] if sums[1] else seconds / trained) for sums in work.values())
    unknown = [agent for agent, sums in work.items() if sums[0] and not sums[1]]
    guessed = f", of {', '.join(unknown)} at the mean speed of the others" if unknown else ""
    yield f"the rest takes one process about {timedelta(seconds=round(rest))} at the speed so far{guessed}"


def table(rows: Sequence[Mapping[str, Any]], place: Path) -> Iterator[str]:
    """The best rows, with the parameters in which they differ; the last line says how many were left out."""
    shared = set.intersection(*(set(map(str, row["parameters"].items())) for row in rows)) if rows else set()
    for row in rows[:_SHOWN]:
        varied = {name: x for name, x in row["parameters"].items() if str((name, x)) not in shared}
        score = (
            f"{row['score']:10.4g}  [{row['ci95'][0]:.4g}, {row['ci95'][1]:.4g}]"
            if "score" in row
            else row["error"].splitlines()[0]
        )
        yield f"{score}  {varied}"
    if len(rows) > _SHOWN:
        yield f"... and {len(rows) - _SHOWN} more runs: all {len(rows)} are in {place}"
