"""What `experiments.report` reads of the folders of a sweep's runs, finished or not."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import notes, studies
from rl import checkpoint, log, outcomes
from sweeps import layout, records
from sweeps.layout import Program, Sweep
from sweeps.scripts import SCRIPTS

_WITHOUT_SCORE = (records.DIVERGENCE, "failed", "no scores")  # the states of runs that ended so
OTHER = "other code"  # the state of a folder that holds another run than the sweep asks for
# Settings that do not decide what a run learns, nor when it is evaluated.
INDIFFERENT = (
    *("seed", "seeds", "workdir", *layout.INDIFFERENT),
    *("mesh_seed", "mesh_data", "data_folder", "validation", "save_every", "preset"),
)
_UNSCORED = (
    "Reports are of the scores of policies in an environment, and of language models there are none: sweeps.run ranks "
    "such runs by any metric that they log"
)


class Part(NamedTuple):
    """One run of a sweep, for several seeds."""

    variant: str  # what tells it from other runs on the same task
    task: str
    parameters: dict[str, Any]
    script: str
    folder: Path
    program: Path  # the folder of its program, of which that may be one
    index: int  # type: ignore[assignment]  # among the runs that were trained together there
    runs: int  # of these
    state: records.State
    result: dict[str, Any] | None  # result.json, if it is finished
    scores: dict[str, Any] | None  # its own part of that
    never: bool = False  # others on its task have reported a rate, and this run has not: it is 0


def read(plan: Sweep) -> Iterator[Part]:
    """All runs of a sweep, with what is known of them."""
    script = SCRIPTS[plan.script]
    runs = [
        (place, i, program, alone, single)
        for place, program in plan.programs.items()
        for i, (alone, single) in enumerate(layout.single_run_folders(program, place).items())
    ]
    configs = [single.fixed | {name: value for name, (value,) in single.swept.items()} for *_, single in runs]
    varied = _varied(configs, {script.task, script.length, "seed", "agent"})
    states = {place: _checked_state(program, place, plan.root) for place, program in plan.programs.items()}
    for (place, i, program, alone, single), parameters in zip(runs, configs, strict=True):
        settings, *_ = layout.arguments(program, place)
        state, where, index, count = states[place], place, i, program.runs
        result = None
        if state.name != OTHER and layout.has_result(program, place):
            result = studies.load(place / log.RESULT)
        elif program.runs > 1 and state.name != OTHER and layout.has_result(single, alone):
            where, index, count = alone, 0, 1  # its program diverged
            result = studies.load(where / log.RESULT)
        yield Part(
            _label(settings.agent, parameters, varied),
            str(getattr(settings, script.task)),
            parameters,
            plan.script,
            where,
            place,
            index,
            count,
            state,
            result,
            notes.parts(result)[index][1]["scores"] if result else None,
        )


def told_apart(parts: Sequence[Part]) -> list[Part]:
    """The runs of several sweeps, with the settings in which two of one name differ in their names.

    A sweep names its runs by what varies in it, and what is fixed in one may have another value in the next.
    """
    cells: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        cells.setdefault((part.variant, part.task), []).append(part)
    differ: dict[str, set[str]] = {}
    for (variant, _), (first, *others) in cells.items():
        names = (name for part in others for name in differing(first, part, SCRIPTS[part.script].length))
        differ.setdefault(variant, set()).update(names)
    return [
        part._replace(
            variant=_label(
                part.variant, part.parameters, [x for x in part.parameters if x in differ[part.variant]]
            )
        )
        for part in parts
    ]


def shortened(parts: Sequence[Part]) -> list[Part]:
    """The runs, with files called by their names alone, but for those that lie in several folders under one name."""
    files = {part.task for part in parts if part.task.endswith((".hdf5", ".h5", ".npz", ".jsonl"))}
    names = collections.Counter(Path(file).name for file in files)
    short = {file: Path(file).name for file in files if names[Path(file).name] == 1}
    return [part._replace(task=short.get(part.task, part.task)) for part in parts]


def with_rates(parts: Sequence[Part], score: str) -> list[Part]:
    """The runs, where a rate is 0 in those that never had it on a task on which others have: some environments report
    success only where there is some.
    """
    if score not in outcomes.RATES:
        return list(parts)
    reported = [_reports(part, score) for part in parts]
    tasks = {part.task for part, known in zip(parts, reported, strict=True) if known}
    return [
        part if known or part.task not in tasks else _never(part, score)
        for part, known in zip(parts, reported, strict=True)
    ]


def _reports(part: Part, score: str) -> bool:
    """Whether a run has the score so far."""
    if part.scores is not None:
        return score in part.scores
    with contextlib.suppress(KeyError, FileNotFoundError):
        return part.state.name != OTHER and outcomes.series(part.folder, score, length(part)) is not None
    return False


def _never(part: Part, score: str) -> Part:
    """The run with a rate of 0 in its evaluations, if it is finished and has any."""
    if part.scores is None:
        return part._replace(never=True)
    if "return" not in part.scores:
        return part
    none = {
        which: {"per_seed": np.zeros_like(x["per_seed"], float)} for which, x in part.scores["return"].items()
    }
    return part._replace(never=True, scores={**part.scores, score: none})


def _varied(configs: Sequence[Mapping[str, Any]], without: set[str]) -> list[str]:
    """The parameters in which the runs of a sweep differ, in the order of its file."""
    names = dict.fromkeys(name for parameters in configs for name in parameters)
    return [
        name
        for name in names
        if name not in without and len({str(parameters.get(name)) for parameters in configs}) > 1
    ]


def _label(agent: str, parameters: Mapping[str, Any], varied: Sequence[str]) -> str:
    """The name of a row: ``iql, hl_gauss, expectile=0.9``."""
    words = [
        str(parameters.get(name))
        if name in ("head", "preset")
        else f"{name.removeprefix('agent.')}={parameters.get(name)}"
        for name in varied
    ]
    return ", ".join([agent, *words])


def _checked_state(program: Program, place: Path, root: Path) -> records.State:
    """How far a program is; where its folder holds another run, what differs."""
    try:
        layout.check_folder(program, place, root)
        return records.state(program, place)
    except (ValueError, checkpoint.CheckpointError) as error:
        return records.State(OTHER, 0, 1, 0.0, str(error))


def fate(part: Part, score: str) -> str:
    """What became of a run: done, no scores, diverged, or what its program is, failed say."""
    if part.result is not None:
        return "done" if score in (part.scores or {}) else "no scores"
    diverged = part.state.name == "failed" and part.state.error.startswith(records.DIVERGENCE)
    return records.DIVERGENCE if diverged else part.state.name


def failures(parts: Sequence[Part], score: str) -> list[dict[str, str]]:
    """The variants and tasks one of whose runs ended without a score, and how. Unfinished ones may have it yet."""
    ended = {(part.variant, part.task): how for part in parts if (how := fate(part, score)) in _WITHOUT_SCORE}
    return [{"variant": variant, "task": task, "state": how} for (variant, task), how in ended.items()]


def program_state(group: Sequence[Part], score: str) -> dict[str, Any]:
    """A program's state, for result.json, with those of its runs that are not finished, or all if none is left.

    Runs whose program diverged are trained one by one: some may be finished, and the program is not.
    """
    state, left = group[0].state, [part for part in group if part.result is None]
    without = [part for part in group if part.result is not None and score not in (part.scores or {})]
    return {
        "folder": str(group[0].program),
        "variants": [part.variant for part in left or without or group],
        "task": group[0].task,
        "seed": group[0].parameters.get("seed"),
        "state": fate((left or without or group)[0], score),
        "share": state.step / state.total,
        "length": length(group[0]),
        "error": state.error or f"its result has no {score}" * bool(without and not left),
    }


def check_kept(earlier: Path, programs: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a report that is there already has finished programs that this one has not, or longer."""
    then = log.read_json(earlier).get("programs", []) if earlier.exists() else []
    finished, before = (
        {
            Path(program["folder"]).name: program.get("length", 0)
            for program in of
            if program["state"] == "done"
        }
        for of in (programs, then)
    )
    if lost := [name for name, length in before.items() if finished.get(name, -1) < length]:
        raise ValueError(
            f"{earlier.parent} holds a report of finished programs, of which {len(lost)} are not finished here, or are "
            f"shorter, {sorted(lost)[0]} for one. Say where they lie (--finished=FOLDER, --workdir); or, if the sweep "
            "does not ask for them any more, choose another --out or remove that report. Nothing was written"
        )


def unplanned_folders(plan: Sweep) -> list[str]:
    """Run folders beside those of the sweep: of other parameters than are asked for."""
    places = {place.name for place in plan.programs}
    return sorted(
        str(path.parent) for path in plan.root.glob(f"*/{log.CONFIG}") if path.parent.name not in places
    )


def check_apart(parts: Sequence[Part]) -> None:
    """Raises ValueError if two runs of one cell have the same seeds, or differ in more than seeds."""
    cells: dict[tuple[str, str], dict[int, Part]] = {}
    for part in parts:
        seed = getattr(arguments(part)[0], "seed", 0)
        cell = cells.setdefault((part.variant, part.task), {})
        if seed in cell:
            raise ValueError(
                f"{cell[seed].folder} and {part.folder} are both {part.variant} on {part.task} with the same seed: "
                "report their files apart"
            )
        first = next(iter(cell.values()), part)
        if differences := changed(first, part):
            raise ValueError(
                f"{first.folder} and {part.folder} are both {part.variant} on {part.task}, but are no seeds of one "
                f"run: the second has {' '.join(differences)}. Report their files apart"
            )
        cell[seed] = part


def check_metric(parts: Sequence[Part], score: str, plans: Sequence[Sweep]) -> None:
    """Raises ValueError if there are finished runs, and none has the score."""
    known = [list(part.scores) for part in parts if part.scores is not None]
    if known and not any(score in names for names in known):
        there = sorted({name for names in known for name in names})
        raise ValueError(
            f"{', '.join(plan.file for plan in plans)}: no finished run has scores of the metric "
            f"{plans[0].metric}; they have {', '.join(f'eval/{name}' for name in there) or 'none'}. "
            + ("Change the metric in the file; the runs stay as they are" if there else _UNSCORED)
        )


def arguments(part: Part) -> tuple[Any, Any]:
    """The settings of a run, and its agent's hyper-parameters."""
    settings, config, _ = layout.arguments(Program(part.parameters, {}, part.script), Path())
    return settings, config


def changed(first: Part, second: Part, *without: str) -> list[str]:
    """`differing` as flags."""
    return [f"--{name}={x}" for name, x in differing(first, second, *without).items()]


def differing(first: Part, second: Part, *without: str) -> dict[str, str]:
    """{flag: value} of what the second run learns by and the first does not; the task does not count."""
    indifferent = (*INDIFFERENT, *without, SCRIPTS[second.script].task)
    flat = []
    for part in (first, second):
        settings, config = arguments(part)
        card = checkpoint.flat(dataclasses.asdict(settings))
        card |= checkpoint.flat(dataclasses.asdict(config), "agent.")
        # As text, in which NaN equals NaN.
        flat.append({name: str(x) for name, x in card.items()})
    before, now = flat
    return {name: x for name, x in now.items() if name not in indifferent and before.get(name) != x}


def length(part: Part) -> int:
    """How long the run is to be, in what its curves count."""
    return SCRIPTS[part.script].steps(*arguments(part))


def curve(part: Part, score: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [T] and means over episodes [T, S] of every evaluation so far."""
    steps, scores = outcomes.series(part.folder, "return" if part.never else score, length(part))
    scores = np.zeros_like(scores) if part.never else scores
    each = scores.reshape(len(scores), scores.shape[1], -1).mean(-1)
    return steps, np.split(each, part.runs, 1)[part.index]


def per_seed(part: Part, score: str, which: str, evaluations: int) -> np.ndarray:
    """[S] scores of a finished run by one of `report_page.WHICH`."""
    assert part.scores is not None
    each = np.atleast_1d(part.scores[score][which]["per_seed"])
    if which == "last" and evaluations > 1:
        if not (part.folder / log.METRICS).exists():
            raise ValueError(
                f"--evaluations={evaluations}: {part.folder} has no {log.METRICS}: leave --evaluations out"
            )
        steps, means = curve(part, score)
        steps, means = steps[steps > 0], means[steps > 0]  # what a run begins with is none of its scores
        if len(means) < evaluations:
            raise ValueError(f"--evaluations={evaluations}: {part.folder} has {len(means)} of them")
        if not np.allclose(means[-1], each, equal_nan=True):
            raise ValueError(
                f"--evaluations={evaluations}: {part.folder / log.METRICS} does not end with the scores of "
                f"{log.RESULT} beside it: its last lines were lost. Take that folder again from where it was trained, "
                "or leave --evaluations out"
            )
        period, every = np.diff(steps).min(), SCRIPTS[part.script].steps(*arguments(part), "eval_every")
        if period >= 2 * every or len(set(np.diff(steps[-evaluations:])) - {period}):
            raise ValueError(
                f"--evaluations={evaluations}: {part.folder / log.METRICS} lacks some of the last ones, whose lines "
                "were lost: leave --evaluations out"
            )
        return means[-evaluations:].mean(0)
    return each


def store(plans: Sequence[Sweep], folder: Path) -> int:
    """Copies what a report needs of the programs that are finished; returns how many were not there yet.

    These are their settings, metrics and results: no checkpoints. The result comes last, so that a copy that was cut
    short is no finished run. A run whose metrics were lost is stored without them, and has no learning curve.

    Raises:
      ValueError: a longer run of the same parameters is stored there.
    """
    count = 0
    for root, place, program in ((plan.root, *item) for plan in plans for item in plan.programs.items()):
        target = folder / place.name
        done = _checked_state(program, place, root).name != OTHER and layout.has_result(program, place)
        result, unit = target / log.RESULT, SCRIPTS[program.script].length
        if done and result.exists():
            there, here = (log.read_json(x / log.RESULT)[unit] for x in (target, place))
            if there > here:
                raise ValueError(
                    f"{target} holds a run of {there} {unit}, more than the {here} of {place}: choose another --out"
                )
        if not done or (result.exists() and result.read_bytes() == (place / log.RESULT).read_bytes()):
            continue
        target.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)  # of fewer updates: the folder is no finished run until all is copied
        for name in (log.CONFIG, log.METRICS, log.RESULT):
            if name == log.METRICS and not (place / name).exists():
                continue
            with log.replacing(target / name) as partial:
                shutil.copyfile(place / name, partial)
        count += 1
    return count


def diverged(plan: Sweep) -> Iterator[Path]:
    """The programs some of whose runs diverged, so that each was trained alone."""
    for place, program in plan.programs.items():
        alone = any((part / log.RESULT).exists() for part in layout.single_run_folders(program, place))
        if alone and not layout.has_result(program, place):
            yield place
