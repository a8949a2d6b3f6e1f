"""Turns sweeps, finished or not, into a report: scores with intervals, aggregates, curves, and what is missing.

    python -m experiments.report sweeps/boards/locomotion.yaml
    python -m experiments.report sweeps/boards/heads.yaml --set=updates=20000 --out=runs/boards/heads

It reads what `sweeps.run` left and trains nothing, so it may be called while that goes on. The flags --set, --workdir,
--count, --seed and --together must be those of `sweeps.run`: they decide which runs there are. Several files make one
report, if they have one metric. Runs that differ in nothing but --seed count as seeds of one run.

    python -m experiments.report sweeps/boards/locomotion.yaml --store
    python -m experiments.report sweeps/boards/locomotion.yaml --finished=other/machine/finished

The first also copies what a report needs of finished runs, without their checkpoints, to the folder ``finished`` of
the report, whose runs every later report in that folder counts. The second counts such runs of any folder, of another
machine say, beside those in the sweep's own, as `sweeps.run` does with the same flag. A report names the commits and
the machines of its runs, and takes the place of no report of more runs.

Aggregates, their intervals by the stratified bootstrap, probabilities of improvement and performance profiles are those
of Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice". Published numbers
stand in the tables where data, updates and settings are the same, and in a table of their own where they are not.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from absl import app
from absl import flags as absl_flags

from experiments import common, flags, presets, report_page, studies
from rl import checkpoint, lifecycle, log, statistics
from rl.data import recipes
from rl.data.files import expanded
from sweeps import layout, records
from sweeps.layout import Program, Sweep
from sweeps.scripts import SCRIPTS

_OPTIMA = {"normalized_return": 100.0} | dict.fromkeys(lifecycle.RATES, 1.0)
_THRESHOLDS = 101  # of a performance profile
_RESAMPLES = 10_000
_OTHER = "other code"  # the state of a folder that holds another run than the sweep asks for
STORED = "finished"  # the folder of a report in which finished runs are stored
# Settings that do not decide what a run learns, nor when it is evaluated.
_INDIFFERENT = (
    *("seed", "seeds", "workdir", *layout.INDIFFERENT),
    *("mesh_seed", "mesh_data", "data_folder", "unroll", "validation", "save_every", "preset"),
)
# Settings of how a run is scored, and those that its head, which a protocol names itself, may not read.
_SCORING = (
    *("eval_every", "eval_episodes", "policy_estimates"),
    *("head", "head_size", "head_low", "head_high", "head_start", "head_kappa"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a report was made with, as it is stored."""

    files: tuple[str, ...]
    out: str
    baseline: str = ""  # parameter=value of what others are compared with
    evaluations: int = 1  # the last ones, of which a last score is the mean


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


def run(plans: Sequence[Sweep], out: str, baseline: str = "", evaluations: int = 1) -> dict[str, Any]:
    """Writes result.json, README.md and the figures into ``out``; returns what result.json holds.

    Args:
      plans: the sweeps.
      out: a folder, made if missing.
      baseline: ``parameter=value`` of what others are compared with; by default behaviour cloning or the scalar head.
      evaluations: the last ones, of which a last score is the mean.

    Raises:
      ValueError: sweeps of several metrics, or of one that is to be small, a metric that no run has, two sweeps of one
        run, an unknown baseline, a run of fewer evaluations or whose metrics were cut, or a report of other finished
        programs, or of longer ones, in ``out``.
    """
    score = _score(plans)
    parts = _shortened([part for plan in plans for part in _parts(plan)])
    _check_apart(parts)
    _check_metric(parts, score, plans)
    of_program: dict[Path, list[Part]] = {}
    for part in parts:
        of_program.setdefault(part.program, []).append(part)
    states = [_state(group, score) for group in of_program.values()]
    _check_kept(Path(out) / log.RESULT, states)
    cells, lost = _cells(parts, score, evaluations), _lost(parts)
    against = _baselines(parts, baseline)
    outcome = {
        "score": score,
        "rate": score in lifecycle.RATES,
        "unit": _unit(plans[0].script),
        "tasks": list(dict.fromkeys(part.task for part in parts)),
        "variants": list(dict.fromkeys(part.variant for part in parts)),
        "programs": states,
        "strangers": [name for plan in plans for name in _strangers(plan)],
        "data": _data(parts, Path(out) / log.RESULT),
        "other_data": _other_data(parts),
        "other_lengths": _other_lengths(parts),
        "other_settings": _other_settings(parts),
        "lost_lines": {
            str(x.folder): x.result["lost_lines"] for x in parts if x.result and "lost_lines" in x.result
        },
        "machines": _machines(parts),
        "cells": cells,
        "better": _better(cells, against),
        **_aggregated(cells, score),
        "published": _published(parts, cells, score, evaluations),
        "curves": _curves(parts, score, lost),
        "lost": lost,
    }
    settings = Settings(tuple(plan.file for plan in plans), out, baseline, evaluations)
    result = studies.finish(settings, outcome, report_page.blocks)
    report_page.draw(Path(out), result)
    return result


def _score(plans: Sequence[Sweep]) -> str:
    """The name of the score that the sweeps are of. Raises ValueError if there is none for all."""
    metrics = {plan.metric: plan.file for plan in plans}
    if len(metrics) > 1:
        listed = ", ".join(f"{name} in {file}" for name, file in metrics.items())
        raise ValueError(f"a report has one metric, and these files have several: {listed}")
    for plan in plans:
        if plan.goal != "maximize":
            raise ValueError(
                f"{plan.file}: the goal of {plan.metric} is to {plan.goal} it, and reports say who has more of a "
                "score: sweeps.run ranks such runs"
            )
    units = {_unit(plan.script): plan.file for plan in plans}
    if len(units) > 1:
        listed = ", ".join(f"{name} in {file}" for name, file in units.items())
        raise ValueError(f"curves of {listed} cannot share an axis: report these files apart")
    return next(iter(metrics)).removeprefix("eval/")


def _unit(script: str) -> str:
    """What the curves of a script count: updates, also where its length is in epochs, or environment steps."""
    return "updates" if SCRIPTS[script].per_unit else SCRIPTS[script].length


# ---- what the runs left -----------------------------------------------------------------------------------


def _parts(plan: Sweep) -> Iterator[Part]:
    """All runs of a sweep, with what is known of them."""
    script = SCRIPTS[plan.script]
    runs = [
        (place, i, program, alone, single)
        for place, program in plan.programs.items()
        for i, (alone, single) in enumerate(layout.apart(program, place).items())
    ]
    configs = [single.fixed | {name: value for name, (value,) in single.swept.items()} for *_, single in runs]
    varied = _varied(configs, {script.task, script.length, "seed", "agent"})
    states = {place: _checked_state(program, place, plan.root) for place, program in plan.programs.items()}
    for (place, i, program, alone, single), parameters in zip(runs, configs, strict=True):
        settings, *_ = layout.arguments(program, place)
        state, where, index, count = states[place], place, i, program.runs
        result = None
        if state.name != _OTHER and layout.finished(program, place):
            result = studies.load(place / log.RESULT)
        elif program.runs > 1 and state.name != _OTHER and layout.finished(single, alone):
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
            common.parts(result)[index][1]["scores"] if result else None,
        )


def _shortened(parts: Sequence[Part]) -> list[Part]:
    """The runs, with files called by their names alone, but for those that lie in several folders under one name."""
    files = {part.task for part in parts if part.task.endswith((".hdf5", ".h5", ".npz", ".jsonl"))}
    names = collections.Counter(Path(file).name for file in files)
    short = {file: Path(file).name for file in files if names[Path(file).name] == 1}
    return [part._replace(task=short.get(part.task, part.task)) for part in parts]


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
        return records.State(_OTHER, 0, 1, 0.0, str(error))


def _state(group: Sequence[Part], score: str) -> dict[str, Any]:
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
        "state": state.name if left else "no scores" if without else "done",
        "share": state.step / state.total,
        "length": _length(group[0]),
        "error": state.error or f"its result has no {score}" * bool(without and not left),
    }


def _check_kept(earlier: Path, programs: Sequence[Mapping[str, Any]]) -> None:
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
            f"shorter, {sorted(lost)[0]} for one. Say where they lie (--finished=FOLDER, --workdir), or choose another "
            "--out, or remove that report. Nothing was written"
        )


def _strangers(plan: Sweep) -> list[str]:
    """Run folders beside those of the sweep: of other parameters than are asked for."""
    places = {place.name for place in plan.programs}
    return sorted(
        str(path.parent) for path in plan.root.glob(f"*/{log.CONFIG}") if path.parent.name not in places
    )


def _check_apart(parts: Sequence[Part]) -> None:
    """Raises ValueError if two runs of one cell have the same seeds, or differ in more than seeds."""
    cells: dict[tuple[str, str], dict[int, Part]] = {}
    for part in parts:
        seed = getattr(_settings(part)[0], "seed", 0)
        cell = cells.setdefault((part.variant, part.task), {})
        if seed in cell:
            raise ValueError(
                f"{cell[seed].folder} and {part.folder} are both {part.variant} on {part.task} with the same seed: "
                "report their files apart"
            )
        first = next(iter(cell.values()), part)
        if differences := _changed(first, part):
            raise ValueError(
                f"{first.folder} and {part.folder} are both {part.variant} on {part.task}, but are no seeds of one "
                f"run: the second has {' '.join(differences)}. Report their files apart"
            )
        cell[seed] = part


def _settings(part: Part) -> tuple[Any, Any]:
    """The settings of a run, and its agent's hyper-parameters."""
    settings, config, _ = layout.arguments(Program(part.parameters, {}, part.script), Path())
    return settings, config


def _changed(first: Part, second: Part, *without: str) -> list[str]:
    """The flags of what the second run learns by and the first does not; the task does not count."""
    indifferent = (*_INDIFFERENT, *without, SCRIPTS[second.script].task)
    flat = []
    for part in (first, second):
        settings, config = _settings(part)
        agent = {f"agent.{name}": value for name, value in dataclasses.asdict(config).items()}
        # As text, in which NaN equals NaN.
        flat.append({name: str(x) for name, x in (dataclasses.asdict(settings) | agent).items()})
    before, now = flat
    return [f"--{name}={x}" for name, x in now.items() if name not in indifferent and before.get(name) != x]


def _check_metric(parts: Sequence[Part], score: str, plans: Sequence[Sweep]) -> None:
    """Raises ValueError if there are finished runs, and none has the score."""
    known = [list(part.scores) for part in parts if part.scores is not None]
    if known and not any(score in names for names in known):
        there = sorted({name for names in known for name in names})
        raise ValueError(
            f"{', '.join(plan.file for plan in plans)}: no finished run has scores of the metric "
            f"{plans[0].metric}; they have {', '.join(f'eval/{name}' for name in there) or 'none'}. Change the metric "
            "in the file; the runs stay as they are"
        )


def _cells(parts: Sequence[Part], score: str, evaluations: int) -> list[dict[str, Any]]:
    """The scores of all runs that are finished, with all their seeds."""
    groups: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.variant, part.task), []).append(part)
    cells = []
    for (variant, task), group in groups.items():
        if not all(part.scores and score in part.scores for part in group):
            continue
        cells.append(
            {
                "variant": variant,
                "task": task,
                "folders": [str(part.folder) for part in group],
                **{
                    which: statistics.summary(
                        np.concatenate([_per_seed(part, score, which, evaluations) for part in group]),
                        rate=score in lifecycle.RATES,
                    )
                    for which in report_page.WHICH
                },
            }
        )
    return cells


def _per_seed(part: Part, score: str, which: str, evaluations: int) -> np.ndarray:
    """[S] scores of a finished run by one of `report_page.WHICH`."""
    assert part.scores is not None
    each = np.atleast_1d(part.scores[score][which]["per_seed"])
    if which == "last" and evaluations > 1:
        if not (part.folder / log.METRICS).exists():
            raise ValueError(
                f"--evaluations={evaluations}: {part.folder} has no {log.METRICS}: leave --evaluations out"
            )
        steps, curve = _curve(part, score)
        if len(curve) < evaluations:
            raise ValueError(f"--evaluations={evaluations}: {part.folder} has {len(curve)} of them")
        if not np.allclose(curve[-1], each, equal_nan=True):
            raise ValueError(
                f"--evaluations={evaluations}: {part.folder / log.METRICS} does not end with the scores of "
                f"{log.RESULT} beside it: its last lines were lost. Take that folder again from where it was trained, "
                "or leave --evaluations out"
            )
        if len(set(np.diff(steps[-evaluations:])) - {np.diff(steps).min()}):
            raise ValueError(
                f"--evaluations={evaluations}: {part.folder / log.METRICS} lacks some of the last ones, whose lines "
                "were lost: leave --evaluations out"
            )
        return curve[-evaluations:].mean(0)
    return each


def _data(parts: Sequence[Part], earlier: Path) -> dict[str, dict[str, Any]]:
    """{task: transitions, digest and mean score} of data that were made here and that finished runs were trained on.

    The mean score is what ``earlier`` has, or else that of the file on this machine, if it is of the same data. Tasks
    whose runs had different data (`_other_data`), or do not say which, are left out.
    """
    known = log.read_json(earlier).get("data", {}) if earlier.exists() else {}
    runs: dict[str, list[Mapping[str, Any]]] = {}
    cards: dict[str, dict[str, Any]] = {}
    for part in parts:
        settings, _ = _settings(part)
        if part.result and (name := getattr(settings, "dataset", "")) in recipes.LOCOMOTION:
            runs.setdefault(part.task, []).append(part.result)
            cards[part.task] = _card(name, settings.data_folder)
    data = {}
    for task, results in runs.items():
        said = {
            name: {result[name] for result in results if result.get(name)}
            for name in ("digest", "transitions")
        }
        if any(len(values) > 1 for values in said.values()):
            continue
        own = {name: value for name, values in said.items() for value in values}
        fitting = [card for card in (known.get(task, {}), cards[task]) if _same_data(card, own)]
        scored = [card for card in fitting if card.get("normalized_return") is not None]
        entry = next(iter(scored or fitting), {}) | own
        if "transitions" in entry:
            data[task] = entry
    return data


def _card(name: str, folder: str) -> dict[str, Any]:
    """What there is to say of a dataset's file on this machine; empty if it is not there."""
    recipe = recipes.LOCOMOTION[name]
    card = recipes.read_card(expanded(folder or recipes.default_folder(recipe.family)) / recipe.file)
    of_report = {"transitions": "transitions", "normalized_return": "normalized_return_d4rl"}
    return {key: card.get(there) for key, there in of_report.items()} if card else {}


def _same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two are of the same data: by digest if both have it, and else by transitions."""
    shared = [name for name in ("digest", "transitions") if name in one and name in other]
    return bool(shared) and one[shared[0]] == other[shared[0]]


def _other_data(parts: Sequence[Part]) -> list[str]:
    """The tasks whose finished runs were not all trained on the same data, by the digests that runs keep."""
    digests: dict[str, set[str]] = {}
    for part in parts:
        if part.result and part.result.get("digest"):
            digests.setdefault(part.task, set()).add(str(part.result["digest"]))
    return [task for task, task_digests in digests.items() if len(task_digests) > 1]


def _other_lengths(parts: Sequence[Part]) -> dict[str, dict[str, int]]:
    """{task: {variant: updates, or environment steps}} where the finished runs of a task were not equally long."""
    lengths: dict[str, dict[str, int]] = {}
    for part in (part for part in parts if part.scores is not None):
        lengths.setdefault(part.task, {})[part.variant] = _length(part)
    return {task: of_task for task, of_task in lengths.items() if len(set(of_task.values())) > 1}


def _length(part: Part) -> int:
    """How long the run is to be, in what its curves count."""
    script, (settings, config) = SCRIPTS[part.script], _settings(part)
    return getattr(settings, script.length) * (getattr(config, script.per_unit) if script.per_unit else 1)


def _other_settings(parts: Sequence[Part]) -> dict[str, dict[str, dict[str, str]]]:
    """{variant: {parameter: {task: value}}} of what the runs of one name do not share on all tasks."""
    values: dict[str, dict[str, dict[str, str]]] = {}
    tasks: dict[str, set[str]] = {}
    for part in parts:
        tasks.setdefault(part.variant, set()).add(part.task)
        of_variant = values.setdefault(part.variant, {})
        script = SCRIPTS[part.script]
        for name, value in part.parameters.items():
            if name not in (script.task, *_INDIFFERENT):
                of_variant.setdefault(name, {})[part.task] = str(value)
    differ = {
        variant: {
            name: of_task
            for name, of_task in of_variant.items()
            if len(set(of_task.values())) > 1 or of_task.keys() != tasks[variant]
        }
        for variant, of_variant in values.items()
    }
    return {variant: names for variant, names in differ.items() if names}


def _machines(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """What finished runs were made with: commits and hardware of all their sessions, and how many runs there are."""
    results = {part.folder: part.result for part in parts if part.result and "hardware" in part.result}
    counts: dict[tuple[str, str], int] = {}
    for folder, result in results.items():
        first = log.read_json(folder / log.CONFIG) if (folder / log.CONFIG).exists() else {}
        sessions = [one for one in (first, *first.get("resumed", [])) if "hardware" in one] or [result]
        commits = dict.fromkeys(studies.short(one["commit"]) for one in sessions)
        machines = dict.fromkeys(_machine(one["hardware"]) for one in sessions)
        key = (", then ".join(commits), ", then ".join(machines))
        counts[key] = counts.get(key, 0) + 1
    return [{"commit": commit, "hardware": machine, "programs": n} for (commit, machine), n in counts.items()]


def _machine(host: Mapping[str, Any]) -> str:
    name = host["cpu"] if host["backend"] == "cpu" else f"{host['devices']} {host['device']}"
    return f"{name}, {host['cores']} {'core' if host['cores'] == 1 else 'cores'}"


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
        done = _checked_state(program, place, root).name != _OTHER and layout.finished(program, place)
        result, length = target / log.RESULT, SCRIPTS[program.script].length
        if done and result.exists():
            there, here = (log.read_json(x / log.RESULT)[length] for x in (target, place))
            if there > here:
                raise ValueError(
                    f"{target} holds a run of {there} {length}, more than the {here} of {place}: choose another --out"
                )
        if not done or (result.exists() and result.read_bytes() == (place / log.RESULT).read_bytes()):
            continue
        target.mkdir(parents=True, exist_ok=True)
        for name in (log.CONFIG, log.METRICS, log.RESULT):
            if name == log.METRICS and not (place / name).exists():
                continue
            with log.replacing(target / name) as partial:
                shutil.copyfile(place / name, partial)
        count += 1
    return count


def _diverged(plan: Sweep) -> Iterator[Path]:
    """The programs some of whose runs diverged, so that each was trained alone."""
    for place, program in plan.programs.items():
        alone = any((part / log.RESULT).exists() for part in layout.apart(program, place))
        if alone and not layout.finished(program, place):
            yield place


def _curve(part: Part, score: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [T] and means over episodes [T, S] of every evaluation so far."""
    steps, scores = log.series(part.folder, f"eval/{score}")
    each = scores.reshape(len(scores), scores.shape[1], -1).mean(-1)
    return steps, np.split(each, part.runs, 1)[part.index]


def _curves(parts: Sequence[Part], score: str, lost: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Means over episodes at every evaluation so far, of runs that are finished and of those that are not."""
    groups: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    unfinished = set()
    for part in parts:
        if part.state.name == _OTHER or (part.variant, part.task) in lost:
            continue
        try:
            steps, scores = _curve(part, score)
        except (KeyError, FileNotFoundError):
            continue
        groups.setdefault((part.variant, part.task), []).append((steps, scores))
        if part.scores is None:
            unfinished.add((part.variant, part.task))
    curves = []
    for (variant, task), group in groups.items():
        shared = functools.reduce(np.intersect1d, [steps for steps, _ in group])
        curves.append(
            {
                "variant": variant,
                "task": task,
                "finished": (variant, task) not in unfinished,
                "steps": shared,
                "scores": np.concatenate([scores[np.isin(steps, shared)] for steps, scores in group], 1),
            }
        )
    return curves


def _lost(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The variants and tasks of which a finished run has no metrics, and so no curve."""
    lost = [
        (part.variant, part.task)
        for part in parts
        if part.scores is not None and not (part.folder / log.METRICS).exists()
    ]
    return list(dict.fromkeys(lost))


# ---- what follows from the scores --------------------------------------------------------------------------


def _baselines(parts: Sequence[Part], baseline: str) -> dict[str, str]:
    """{variant: the variant that it is compared with}, of variants that are no baseline themselves.

    It is the one that has the baseline's value and otherwise the same parameters, or the only one that has it.
    """
    of = {part.variant: _identity(part) for part in parts}
    choices = [baseline] if baseline else ["agent=bc", "head=scalar"]
    for name, value in (choice.split("=", 1) if "=" in choice else (choice, "") for choice in choices):
        with_it = [variant for variant, identity in of.items() if str(identity.get(name)) == value]
        others = {
            variant: next(
                (base for base in with_it if of[base] == {**identity, name: of[base][name]}),
                with_it[0] if len(with_it) == 1 else "",
            )
            for variant, identity in of.items()
            if variant not in with_it
        }
        baselines = {variant: base for variant, base in others.items() if base}
        if baselines:
            return baselines
    if baseline:
        raise ValueError(
            f"--baseline={baseline}: no run of these sweeps has that, beside others to compare with it. Write "
            "parameter=value, such as agent=bc or head=scalar"
        )
    return {}


def _identity(part: Part) -> dict[str, Any]:
    """The parameters that make a variant."""
    script = SCRIPTS[part.script]
    without = {script.task, script.length, "seed"}
    return {name: value for name, value in part.parameters.items() if name not in without}


def _better(cells: Sequence[Mapping[str, Any]], against: Mapping[str, str]) -> list[dict[str, Any]]:
    """Where the interval of a variant's last score lies above or below that of its baseline."""
    last = {(cell["variant"], cell["task"]): cell["last"]["ci95"] for cell in cells}
    rows = []
    for variant, base in against.items():
        tasks = [
            task
            for name, task in last
            if name == variant
            and (base, task) in last
            # A single seed has no interval.
            and np.isfinite([last[variant, task], last[base, task]]).all()
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


def _aggregated(cells: Sequence[Mapping[str, Any]], score: str) -> dict[str, Any]:
    """Aggregates, probabilities of improvement and profiles over the tasks that all variants in them have finished.

    Variants with fewer than half of the tasks of the one with most are left out, so that one that has just begun does
    not take the others' tasks away.
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
        empty = {"aggregate_tasks": tasks, "aggregates": {}, "improvement": [], "profiles": {}}
        return empty | {"unaggregated": bool(cells)}  # which results of older reports lack: their pages stay
    matrices = {
        variant: _matrix(variant, {task: scores[task] for task in tasks})
        for variant, scores in included.items()
    }
    optimum = _OPTIMA.get(score)
    statistic = {name: getattr(statistics, name) for name in report_page.AGGREGATES}
    if optimum is None:
        del statistic["optimality_gap"]
    else:
        statistic["optimality_gap"] = lambda x: statistics.optimality_gap(x, optimum)
    thresholds = _thresholds(matrices.values(), optimum)
    return {
        "aggregate_tasks": tasks,
        "aggregates": {
            variant: {name: _bootstrapped(function, matrix) for name, function in statistic.items()}
            for variant, matrix in matrices.items()
        },
        "improvement": [
            {"x": x, "y": y, **_bootstrapped(statistics.probability_of_improvement, matrices[x], matrices[y])}
            for x in matrices
            for y in matrices
            if x != y
        ],
        "profiles": {
            "thresholds": thresholds,
            **{
                variant: _bootstrapped(lambda s: statistics.performance_profile(s, thresholds), matrix, 2000)
                for variant, matrix in matrices.items()
            },
        },
    }


def _matrix(variant: str, scores: Mapping[str, np.ndarray]) -> np.ndarray:
    """Scores [S, K]."""
    counts = {task: len(each) for task, each in scores.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"{variant} has different numbers of seeds on its tasks, {counts}: report files of one number together"
        )
    return np.stack(list(scores.values()), 1)


def _thresholds(matrices: Any, optimum: float | None) -> np.ndarray:
    """From the worst run, or 0, to the best, or the optimum."""
    low, high = (by([by(matrix) for matrix in matrices]) for by in (np.min, np.max))
    return np.linspace(min(0.0, low) if optimum else low, max(optimum or high, high), _THRESHOLDS)


def _bootstrapped(function: Any, *arguments: Any) -> dict[str, Any]:
    """A statistic of [S, K] matrices and its 95 % interval; a number at the end is how many resamples to take."""
    matrices = [x for x in arguments if isinstance(x, np.ndarray)]
    resamples = next((x for x in arguments if isinstance(x, int)), _RESAMPLES)
    value = function(*matrices)
    interval = statistics.bootstrap(function, *matrices, resamples=resamples)
    return {"value": value, "ci95": [np.broadcast_to(bound, np.shape(value)) for bound in interval]}


# ---- published numbers -------------------------------------------------------------------------------------


def _published(
    parts: Sequence[Part], cells: Sequence[Mapping[str, Any]], score: str, evaluations: int
) -> list[dict[str, Any]]:
    """What others reported for the agents and tasks of the sweeps, and in what their protocol differs from ours."""
    finished = {(cell["variant"], cell["task"]) for cell in cells}
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in sorted((Path(__file__).parent / "papers" / "published").glob("*.yaml")):
        entry = yaml.safe_load(path.read_text())
        if "protocol" not in entry:
            continue
        for part in parts:
            settings, _ = _settings(part)
            protocol = entry["protocol"] | entry.get("agents", {}).get(settings.agent, {})
            task = presets.task_name(str(getattr(settings, SCRIPTS[part.script].task)))
            numbers = entry["scores"].get(task, {}).get(settings.agent)
            if numbers is None or getattr(settings, "head", "scalar") != protocol.get("head", "scalar"):
                continue
            rows[path.stem, part.variant, part.task] = {
                "source": entry["source"],
                "variant": part.variant,
                "task": part.task,
                "mean": numbers[0],
                "deviation": numbers[1] if len(numbers) > 1 else None,
                "differs": _differences(part, settings, protocol, score, evaluations),
                "finished": (part.variant, part.task) in finished,
            }
    return list(rows.values())


def _differences(
    part: Part, settings: Any, protocol: Mapping[str, Any], score: str, evaluations: int
) -> list[str]:
    """In words, what a run does otherwise than a published protocol."""
    script = SCRIPTS[part.script]
    length = getattr(settings, script.length)
    differs = [] if score == protocol["score"] else [f"scores are not of {protocol['score']}"]
    known = any(fnmatch.fnmatchcase(part.task, pattern) for pattern in protocol["datasets"])
    if not known or "regenerated" in (part.result or {}).get("source", ""):
        differs.append(f"data are not {protocol['data']}")
    if length != protocol.get(script.length):
        differs.append(f"{length:,} {script.length}")
    if evaluations != (theirs := protocol.get("evaluations", 1)):
        differs.append(f"last scores are of {evaluations} evaluations, not {theirs}")
    if getattr(settings, "preset", presets.NONE) == presets.NONE:
        differs.append("no published settings")
        return differs
    # A schedule may be as long as the run.
    chosen = ("agent", "preset", script.task, script.length, *_SCORING)
    preset = {name: x for name, x in part.parameters.items() if name in chosen}
    if changed := _changed(part._replace(parameters=preset), part, script.length, *_SCORING):
        differs.append(f"other settings than published ({' '.join(changed)})")
    published = presets.stored(part.script, settings, script.task) or {"missing": []}
    return differs + [f"not here: {text}" for text in published["missing"]]


# ---- the command line --------------------------------------------------------------------------------------


def main(argv: list[str], values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    files = argv[1:]
    if not files:
        raise ValueError("give a sweep file: python -m experiments.report sweeps/boards/locomotion.yaml")
    if values.workdir and len(files) > 1:
        raise ValueError(
            "--workdir is the folder of one sweep, and these are several files: report them apart"
        )
    plans = [layout.from_flags(file, {}, values) for file in files]
    out = str(expanded(values.out or usual_folder(plans[0])))
    stored = [str(folder) for folder in [Path(out) / STORED] if folder.is_dir()]
    plans = [layout.adopt(plan, stored) for plan in plans]
    result = run(plans, out, values.baseline, values.evaluations)
    if values.store:
        print(f"{store(plans, Path(out) / STORED)} more finished programs are stored in {Path(out) / STORED}")
        for place in (place for plan in plans for place in _diverged(plan)):
            print(
                f"{place} is not stored: some of its runs diverged, so that it is not finished as a program"
            )
    print((Path(out) / studies.REPORT).read_text())
    print(f"Everything is in {result['settings']['out']}; look at {studies.REPORT} first.")


def usual_folder(plan: Sweep) -> Path:
    """Where the report of a sweep goes: those of the boards here are stored, others are not."""
    file = Path(plan.file).resolve()
    board = file.parent == Path(layout.__file__).parent / "boards"
    return Path("results/boards", file.stem) if board else plan.root / "report"


def define(values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """The flags of the command."""
    layout.define(values)
    absl_flags.adopt_module_key_flags(layout, values)  # --help lists them here, too
    absl_flags.DEFINE_string(
        "out",
        "",
        "folder of the report; by default results/boards/FILE for a file of sweeps/boards, and else the folder report "
        "in the sweep's own (runs/sweeps/FILE)",
        values,
    )
    absl_flags.DEFINE_bool(
        "store", False, "copy the finished runs, without their checkpoints, to the report's folder", values
    )
    absl_flags.DEFINE_string(
        "baseline",
        "",
        "parameter=value of the runs that others are compared with; by default agent=bc, or else head=scalar",
        values,
    )
    absl_flags.DEFINE_integer(
        "evaluations",
        1,
        "how many of the last evaluations a last score is the mean of (published tables of OGBench: 3)",
        1,
        flag_values=values,
    )


if __name__ == "__main__":
    define()
    app.run(flags.reporting(main), flags_parser=flags.parser(words=99))
