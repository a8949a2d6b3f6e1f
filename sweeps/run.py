r"""Runs a sweep file without a server: every combination of a grid, or a number of random draws.

    python -m sweeps.run sweeps/iql_expectile.yaml
    python -m sweeps.run sweeps/rebrac_random.yaml --count=16 --set=updates=20000 --set=eval_every=10000
    python -m sweeps.run sweeps/heads_pointmaze.yaml --budget=2h
    python -m sweeps.run sweeps/heads_pointmaze.yaml --status

`experiments.report` makes tables and figures of it, finished or not.

The files are Weights & Biases' own (``wandb sweep FILE`` takes them as they are), for any script that trains:
experiments/offline.py, goals.py, online.py, mbpo.py, model_based.py and language.py. Runs of the first two that differ
only in float hyper-parameters of the agent, other than discounts and values of 0, are trained together as one program,
on one copy of the data; not so where these would widen the support of a categorical head for one another.

Leaves a folder per program, named by its parameters, and sweep.json with every run's scores, the best first. The same
command continues a sweep that was stopped, at the epoch where it was stopped; what is finished is not trained again,
whatever else was added to the file since. Runs that are trained together are finished together: another value of one of
their hyper-parameters makes another program, which trains all of them. A run that fails leaves failed.json, and the
others go on; where one diverges, those that were trained with it are trained again, each alone. The same command may
run several times at once, also on several machines that share the folder: each takes what no other has open.
Tiers of locomotion that `experiments.collect` makes, and that are not there yet, are made before their first run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import math
import re
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from absl import app, flags

from experiments import common, presets
from experiments import flags as config_flags
from rl import agents, checkpoint, data, lifecycle, log, shard, statistics, train
from rl.data import recipes
from rl.data.files import existing, expanded
from rl.types import Spec
from rl.values import heads

_EVALUATIONS = tuple(f"eval/{name}" for name in (*lifecycle.SCORES, "length", "fitted_q"))  # of policies


class Script(NamedTuple):
    """A script that trains, as a sweep sees it."""

    task: str  # the setting that names what is learned from or in
    length: str = "updates"  # the setting that says how long, and the entry in result.json
    per_unit: str = ""  # the agent's setting that says how many steps one unit of the length is; without, one
    together: bool = False  # whether it trains runs together that differ in float hyper-parameters
    presets: bool = True  # whether it has published settings
    evaluations: tuple[str, ...] = _EVALUATIONS  # the metrics that it may log of them; (): others, too


SCRIPTS = {
    "offline": Script("dataset", together=True),
    "goals": Script("dataset", together=True),
    "online": Script("env", "steps"),
    "mbpo": Script("env", "steps"),
    "model_based": Script("dataset", "epochs", per_unit="updates"),
    "language": Script("log", presets=False, evaluations=()),
}
FAILED, SWEEP = "failed.json", "sweep.json"
DIVERGED = "diverged.json"  # in the folder of a program whose runs are trained one by one
GOALS = ("maximize", "minimize")
RAY = "ray"  # an engine, beside this process
_PROGRAMS = {f"experiments/{name}.py": name for name in SCRIPTS}
# What a parameter may have.
_PARAMETER = ("value", "values", "probabilities", "distribution", "min", "max", "mu", "sigma", "q")
_OF_DISTRIBUTION = {"normal": {"mu", "sigma"}, "q_uniform": {"min", "max", "q"}}  # of others: min and max
_IGNORED = ("name", "description", "project", "entity", "command", "program")
_DIVERGED = "diverged"  # begins the error of such a run
# Settings of a run that decide nothing that it learns.
INDIFFERENT = ("overwrite", "tensorboard", "wandb", "eval_processes", "env_processes")
_SHOWN = 10  # rows of the table at the end
_ALARM = 5.0  # seconds between two requests to stop, after the budget is spent
_PAUSE = 5.0  # seconds until programs whose data another process makes are tried again

_print_once = functools.cache(print)  # of what is tried again after every pause


Rows = dict[Path, list[dict[str, Any]]]
"""Of the runs of programs, by their folders."""


class MetricError(ValueError):
    """The runs do not log the sweep's metric."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Runs that one compiled program trains: they share ``fixed`` and differ in ``swept``."""

    fixed: dict[str, Any]
    swept: dict[str, list[float]]  # {flag: one value per run}; empty for a single run
    script: str = "offline"  # one of SCRIPTS

    @property
    def runs(self) -> int:
        return len(next(iter(self.swept.values()), [None]))

    def apart(self) -> list[Program]:
        """Its runs, each as a program of its own."""
        return [
            Program(self.fixed, {name: [values[i]] for name, values in self.swept.items()}, self.script)
            for i in range(self.runs)
        ]


class Sweep(NamedTuple):
    """A sweep file with what was asked for beside it."""

    file: str
    script: str  # one of SCRIPTS
    metric: str
    goal: str  # maximize or minimize
    root: Path  # the folder of all its programs
    runs: int
    programs: dict[Path, Program]  # by their folders
    # When the command did that trains it, by `time.time`: what ended since then it does not train, even to overwrite.
    began: float = math.inf


class State(NamedTuple):
    """How far a program is."""

    name: str  # done, running, failed, stopped or waiting
    step: int  # of `total`, both in the unit of the script's length
    total: int
    seconds: float  # of training so far; 0 where nobody knows
    error: str = ""


class _Strict(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML's loader silently drops the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if (
                key.value != "<<"
                and (mark := first.setdefault(str(key.value), key.start_mark)) != key.start_mark
            ):
                raise yaml.constructor.ConstructorError(
                    f"{key.value} is given here", mark, "and here again: leave one out", key.start_mark
                )
        return node


def read(path: str) -> dict[str, Any]:
    """The sweep in the file. Raises ValueError if it is not one that can be run here."""
    try:
        sweep = yaml.load(existing(path, "give a sweep file, such as sweeps/first.yaml").read_text(), _Strict)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(sweep, dict) or not isinstance(sweep.get("parameters"), dict):
        raise ValueError(f"{path} has no 'parameters': see sweeps/iql_expectile.yaml for a small one")
    if sweep.get("method") not in ("grid", "random"):
        raise ValueError(f"{path}: method {sweep.get('method')!r} needs wandb's server; here: grid or random")
    if sweep.setdefault("program", next(iter(_PROGRAMS))) not in _PROGRAMS:
        raise ValueError(f"{path}: {', '.join(_PROGRAMS)} can be run here, not {sweep['program']}")
    if "early_terminate" in sweep:
        raise ValueError(
            f"{path}: early_terminate needs wandb's server; here every run is trained to its end: leave it out, or "
            "give fewer updates"
        )
    if not isinstance(sweep.get("run_cap", 1), int) or sweep.get("run_cap", 1) < 1:
        raise ValueError(f"{path}: run_cap must be a number of runs, at least 1, not {sweep['run_cap']!r}")
    unknown = set(sweep) - {"parameters", "method", "metric", "run_cap", *_IGNORED}
    if unknown:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
    for name, parameter in sweep["parameters"].items():
        _check_parameter(f"{path}: {name}", parameter)
    for word in sweep.get("command", []):
        if str(word).startswith("--") and word != "--wandb":
            raise ValueError(f"{path}: flags of the command are not read here: write {word} as a parameter")
    metric = sweep.setdefault("metric", {"name": "eval/return", "goal": GOALS[0]})
    if not isinstance(metric, dict) or "name" not in metric:
        raise ValueError(f"{path}: metric must be written {{name: eval/success, goal: maximize}}")
    if "goal" not in metric:
        raise ValueError(
            f"{path}: metric has no goal: write goal: maximize or goal: minimize, which wandb's server takes if none "
            "is given"
        )
    if metric["goal"] not in GOALS:
        raise ValueError(f"{path}: the goal of a metric is {' or '.join(GOALS)}, not {metric['goal']!r}")
    if "target" in metric:
        raise ValueError(
            f"{path}: the target of a metric needs wandb's server; here all runs are trained: leave it out"
        )
    logged = SCRIPTS[_PROGRAMS[sweep["program"]]].evaluations
    training = str(metric["name"]).startswith(("train/", "validation/", "model/"))
    if logged and not training and metric["name"] not in logged:
        raise ValueError(f"{path}: no run logs the metric {metric['name']}; there are {', '.join(logged)}")
    return sweep


def _check_parameter(name: str, parameter: Any) -> None:
    """Raises ValueError on a parameter of a sweep that is not written as wandb has it; numbers in it become numbers."""
    if not isinstance(parameter, dict) or not isinstance(parameter.get("values", []), list):
        raise ValueError(f"{name} must be written {{value: x}}, {{values: [x, y]}} or by min and max")
    if unknown := parameter.keys() - _PARAMETER:
        raise ValueError(
            f"{name} has {', '.join(sorted(map(str, unknown)))}: known are {', '.join(_PARAMETER)}"
        )
    if {"value", "values"} <= parameter.keys():
        raise ValueError(f"{name} has both value and values: give one")
    if "values" in parameter:
        parameter["values"] = [_number(x) for x in parameter["values"]]
        weights = parameter.get("probabilities")
        whole = weights is None or (len(weights) == len(parameter["values"]) and abs(sum(weights) - 1) < 1e-6)
        if not whole or any(x < 0 for x in weights or []):
            raise ValueError(f"{name}: probabilities={weights} must be one for each value, and sum to 1")
    for bound in ("value", "min", "max", "mu", "sigma", "q"):
        if bound in parameter:
            parameter[bound] = _number(parameter[bound])
            if bound != "value" and not isinstance(parameter[bound], int | float):
                raise ValueError(f"{name}: {bound}={parameter[bound]!r} is no number")
    if parameter.get("q", 1) <= 0:
        raise ValueError(f"{name}: q={parameter['q']} must be above 0")
    listed, kind = parameter.keys() & {"value", "values"}, parameter.get("distribution", "uniform")
    taken = set() if listed else _OF_DISTRIBUTION.get(kind, {"min", "max"})
    if stray := parameter.keys() & {"min", "max", "mu", "sigma", "q"} - taken:
        raise ValueError(
            f"{name} has {', '.join(sorted(stray))}, which is not of {''.join(listed) or f'distribution {kind!r}'}: "
            "leave it out, or give distribution: q_uniform with min, max and q, or normal with mu and sigma"
        )


def _number(value: Any) -> Any:
    """A number such as 1e-3, which YAML takes for a text; anything else as it is."""
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_number else value


def overridden(sweep: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep with each of the parameters {flag: value} fixed, in place of what the file says of it."""
    fixed = {name: {"value": value} for name, value in values.items()}
    return {**sweep, "parameters": {**sweep["parameters"], **fixed}}


def combinations(sweep: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The runs of a sweep, as {flag: value}: a grid in file order, or ``count`` random draws; at most its run_cap.

    A combination that was drawn before is left out. Every parameter has draws of its own, whatever else there is.
    """
    parameters, most = sweep["parameters"], sweep.get("run_cap")
    if sweep["method"] == "grid":
        choices = [_choices(name, parameter) for name, parameter in parameters.items()]
        for values in itertools.islice(itertools.product(*choices), most):
            yield dict(zip(parameters, values, strict=True))
        return
    streams = {name: np.random.default_rng([seed, zlib.crc32(str(name).encode())]) for name in parameters}
    drawn = set()
    for _ in range(count if most is None else min(count, most)):
        run = {name: _draw(name, parameter, streams[name]) for name, parameter in parameters.items()}
        if (key := json.dumps(run, default=str)) not in drawn:
            drawn.add(key)
            yield run


def programs(runs: list[dict[str, Any]], most: int, script: str = "offline") -> list[Program]:
    """Groups runs that one program can train, at most ``most``: equal but for float hyper-parameters.

    A value of 0 stays out of a group, because it may switch a term off; so do the discounts, by which the support of
    categorical heads and the returns of chunks are made. Runs whose support the data give are grouped where their
    targets reach equally far beyond the rewards: the support of a run depends on no other.
    """
    groups: dict[str, list[Program]] = {}
    names = {name for run in runs for name in run}
    differ = {name for name in names if any(run.get(name) != runs[0].get(name) for run in runs)}
    for run in runs:
        varying = sorted(name for name in differ & run.keys() if _can_be_swept(run, name, run[name], script))
        fixed = {name: value for name, value in run.items() if name not in varying}
        reach = _reach(run, script) if varying else []
        group = groups.setdefault(json.dumps([fixed, varying, reach], sort_keys=True), [])
        if not group or not varying or group[-1].runs >= most:
            group.append(Program(fixed, {name: [] for name in varying}, script))
        for name in varying:
            group[-1].swept[name].append(float(run[name]))
    return [program for group in groups.values() for program in group]


def arguments(program: Program, workdir: Path) -> tuple[Any, Any, dict[str, list[float]]]:
    """What the script's ``run`` takes. Raises ValueError on a parameter that does not exist or has another type."""
    script, module = SCRIPTS[program.script], _module(program.script)
    fixed = program.fixed | {"workdir": str(workdir)}
    if "workdir" in program.fixed:
        raise ValueError(
            "the sweep sets workdir, which decides where runs are stored: give --workdir to the runner"
        )
    defaults, config_of = _defaults(program.script), _config_of(program.script)
    config = config_of(str(fixed.get("agent", defaults.agent)))
    settings_known = config_flags.names(defaults)
    known = [*settings_known, *(f"agent.{name}" for name in config_flags.names(config))]
    for name in fixed:
        if name in settings_known or hasattr(defaults, name) or name.startswith("agent."):
            continue
        near = difflib.get_close_matches(f"agent.{name}" if f"agent.{name}" in known else name, known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(settings_known)}"
        raise ValueError(f"experiments.{program.script} has no setting {name!r}{hint}")
    if script.presets:
        settings, config = presets.resolve(program.script, defaults, config_of, script.task, fixed)
    else:
        fields = {name.removeprefix("agent."): x for name, x in fixed.items() if name.startswith("agent.")}
        plain = {name: x for name, x in fixed.items() if not name.startswith("agent.")}
        settings = config_flags.with_fields(defaults, plain)
        config = config_flags.with_fields(config, fields, "agent.")
    module.check(settings, *([config] if program.script == "model_based" else []))
    return settings, config, {name.removeprefix("agent."): v for name, v in program.swept.items()}


def folder(program: Program, root: Path) -> Path:
    """Where the program is trained: a folder that its parameters name, but not how long it is trained, nor how."""
    script = SCRIPTS[program.script]
    fixed = {name: x for name, x in program.fixed.items() if name not in (script.length, *INDIFFERENT)}
    text = json.dumps([program.script, fixed, program.swept], sort_keys=True, default=str)
    words = [
        Path(str(program.fixed[name])).name
        for name in ("agent", script.task, "head")
        if name in program.fixed
    ]
    return root / "-".join([*words, hashlib.sha256(text.encode()).hexdigest()[:8]])


def plan(runs: list[dict[str, Any]], most: int, script: str, root: Path) -> dict[Path, Program]:
    """The programs of a sweep by their folders, of which nothing is read.

    Raises:
      ValueError: parameters that cannot be run, an unknown dataset, or two programs of one folder.
    """
    planned: dict[Path, Program] = {}
    for program in programs(runs, most, script):
        place = folder(program, root)
        settings, *_ = arguments(program, place)
        if hasattr(settings, "dataset"):
            data.check_name(settings.dataset)
        if place in planned:
            length = SCRIPTS[script].length
            equal = ", ".join(f"--{name}" for name in (length, *INDIFFERENT))
            raise ValueError(
                f"two runs of the sweep would share {place}: they differ in nothing but {equal}, if at all "
                f"({planned[place].fixed} and {program.fixed}). Give each value once, and another --workdir for "
                f"each --{length}"
            )
        planned[place] = program
    return planned


def adopt(sweep: Sweep, folders: Sequence[str]) -> Sweep:
    """The sweep, whose programs that are finished in one of ``folders``, and not in its own, lie there.

    Args:
      sweep: as laid out by `load`.
      folders: of finished runs, such as `experiments.report` stores with ``--store``, from any machine.

    Raises:
      ValueError: one of them is no folder.
    """
    others = [expanded(folder) for folder in folders]
    for other in others:
        if not other.is_dir():
            raise ValueError(f"--finished={other} is no folder: experiments.report --store makes one")

    def where(place: Path, program: Program) -> Path:
        stored = (other / place.name for other in others)
        return next((x for x in (place, *stored) if finished(program, x)), place)

    return sweep._replace(programs={where(*item): item[1] for item in sweep.programs.items()})


def check_folder(program: Program, place: Path, root: Path) -> None:
    """Raises CheckpointError or ValueError if the folder holds a run that is not this program, or a longer one.

    A folder that is not in the sweep's, ``root``, is one of --finished.
    """
    settings, config, sweep = arguments(program, place)
    if (place / log.CONFIG).exists() and not settings.overwrite:
        _check_same(place, root, program.script, settings, config, sweep)
        _check_length(place, SCRIPTS[program.script].length, settings)


def load(
    file: str,
    overrides: Mapping[str, Any],
    workdir: str = "",
    *,
    count: int = 10,
    seed: int = 0,
    together: int = 16,
) -> Sweep:
    """The sweep in a file, laid out; what its folders hold is not looked at.

    Args:
      file: of the sweep.
      overrides: {flag: value} in place of what the file says of that flag.
      workdir: the folder of all its programs; by default runs/sweeps/FILE.
      count, seed: of a random sweep, how many draws, and of which they are.
      together: runs trained as one program, at most.

    Raises:
      ValueError: a file or a flag that cannot be used; the message names the file.
    """
    sweep = overridden(read(file), overrides)
    root = expanded(workdir or f"runs/sweeps/{Path(file).stem}")
    runs = list(combinations(sweep, count, seed))
    if not runs:
        raise ValueError(f"{file} asks for no runs: one of its parameters has no values")
    script, metric = _PROGRAMS[sweep["program"]], sweep["metric"]
    try:
        planned = plan(runs, together, script, root)
    except ValueError as error:
        lacking = "has no setting" in str(error) and len({str(run.get("agent")) for run in runs}) > 1
        apart = "; an agent without it needs a file of its own, and one report takes both files" * lacking
        raise ValueError(f"{file}: {error}{apart}") from None
    return Sweep(file, script, metric["name"], metric["goal"], root, len(runs), planned)


def _check_same(
    place: Path, root: Path, script: str, settings: Any, config: Any, sweep: Mapping[str, Any]
) -> None:
    """Raises CheckpointError if the run in the folder, finished or not, is of other settings than are now meant.

    Their flags are the same, so that what differs are defaults, presets or the code of this version. A setting or a
    hyper-parameter that the run did not know yet had the effect of its default.
    """
    stored = log.read_json(place / log.CONFIG).get("config", {})
    before, usual = stored.get("settings", {}), type(settings)()
    new = [
        name
        for name in (_module(script)._IDENTITY if SCRIPTS[script].task in before else ())
        if name not in before and str(getattr(settings, name)) != str(getattr(usual, name))
    ]
    identity = [name for name in (*before, *new) if hasattr(settings, name)]
    known = checkpoint.flat(stored.get("config", {}))
    defaults = checkpoint.flat(dataclasses.asdict(type(config)()))
    of_agent = {
        name: value
        for name, value in checkpoint.flat(dataclasses.asdict(config)).items()
        if name in known or value != defaults[name]
    }
    now = {
        "agent": settings.agent,
        "settings": {name: getattr(settings, name) for name in identity},
        "config": of_agent,
        **({"sweep": sweep} if "sweep" in stored else {}),
    }
    differences = checkpoint.differences(
        {name: stored.get(name) for name in now}, json.loads(json.dumps(now, default=str))
    )
    if differences:
        listed = "\n  ".join(differences)
        remedy = (
            "Choose another --workdir, or move that folder away to train it again"
            if place.parent == root
            else f"Leave {place.parent} out of --finished, give another folder there, or move that run away to train "
            "it again"
        )
        raise checkpoint.CheckpointError(
            f"{place} holds a run of other code or defaults:\n  {listed}\nNothing was trained. {remedy}"
        )


def _check_length(place: Path, length: str, settings: Any) -> None:
    """Raises ValueError if the run in the folder is longer than the sweep asks for."""
    count = log.read_json(place / log.RESULT).get(length, 0) if (place / log.RESULT).exists() else 0
    if count > getattr(settings, length):
        raise ValueError(
            f"{place} holds a run of {count} {length}, more than the sweep's {length}={getattr(settings, length)}: "
            "choose another --workdir"
        )


def state(program: Program, place: Path) -> State:
    """How far the program in the folder is; reads only small files."""
    settings, config, _ = arguments(program, place)
    script = SCRIPTS[program.script]
    total = getattr(settings, script.length)
    if finished(program, place):
        return State("done", total, total, log.read_json(place / log.RESULT)["wall_seconds"])
    if (place / DIVERGED).exists():
        return _state_apart(program, place, total)
    rows = log.read(place) if (place / log.METRICS).exists() else []
    step = rows[-1]["step"] // (getattr(config, script.per_unit) if script.per_unit else 1) if rows else 0
    seconds = _seconds(place) if rows else 0.0
    if lifecycle.holder(place):
        return State("running", step, total, seconds)
    if (place / FAILED).exists():
        return State("failed", step, total, seconds, log.read_json(place / FAILED)["error"])
    return State("stopped" if rows else "waiting", step, total, seconds)


def _state_apart(program: Program, place: Path, total: int) -> State:
    """How far the runs of a program that diverged are, of which each is trained alone."""
    each = [state(part, folder) for folder, part in apart(program, place).items()]
    names = {one.name for one in each}
    step, seconds = sum(one.step for one in each) // len(each), sum(one.seconds for one in each)
    if names == {"done"} or "running" in names:
        return State("done" if names == {"done"} else "running", step, total, seconds)
    if (place / FAILED).exists():
        return State("failed", step, total, seconds, log.read_json(place / FAILED)["error"])
    return State("stopped", step, total, seconds)


def apart(program: Program, place: Path) -> dict[Path, Program]:
    """The runs of a program by the folders in which each is trained alone if they diverge together."""
    return {place / f"{i:03d}": part for i, part in enumerate(program.apart())}


def _seconds(place: Path) -> float:
    """Wall time of the newest session that got further, up to its last line of metrics, scaled to all lines.

    To resume writes that file again: of a session without a line yet, the checkpoint that it resumed from says when the
    one before ended. 0 where nothing says it.
    """
    config = log.read_json(place / log.CONFIG)
    sessions = [{"step": 0, **config}, *config["resumed"]]
    step, resumed = log.read(place)[-1]["step"], sessions[-1]["step"]
    written = place / lifecycle.CHECKPOINTS / str(resumed) if step <= resumed else place / log.METRICS
    end = max(step, resumed)
    session = next((one for one in reversed(sessions) if one["step"] < end), None)
    if session is None or not written.exists():
        return 0.0
    passed = written.stat().st_mtime - datetime.fromisoformat(session["started"]).timestamp()
    return max(passed, 0.0) * step / (end - session["step"])


def finished(program: Program, place: Path, began: float = math.inf) -> bool:
    """Whether the program's result is there, as long as the sweep asks for; to overwrite, one of since ``began``."""
    if not (place / log.RESULT).exists():
        return False
    settings, *_ = arguments(program, place)
    if settings.overwrite and (place / log.RESULT).stat().st_mtime < began:
        return False
    length = SCRIPTS[program.script].length
    return log.read_json(place / log.RESULT).get(length) == getattr(settings, length)


def _is_finished(row: Mapping[str, Any], script: str) -> bool:
    """Whether the run of a row is `finished`."""
    return finished(Program(row["parameters"], {}, script), Path(row["workdir"]))


def collect(program: Program) -> None:
    """Makes the tier of locomotion that the program learns from, if it is one that is not there.

    One that is there and has not its published size is used as it is, with a warning.
    Other datasets are downloaded where they are read, or refused there with the command that makes them. SIGTERM stops
    it as Ctrl-C does, in the middle; what is made so far is kept.

    Raises:
      lifecycle.InUse: another process is making it.
      data.DataError: it cannot be made.
      KeyboardInterrupt: it was stopped.
    """
    settings, *_ = arguments(program, Path())
    name = getattr(settings, "dataset", "")
    if name not in recipes.LOCOMOTION:
        return
    recipe = recipes.LOCOMOTION[name]
    place = expanded(settings.data_folder or recipes.default_folder(recipe.family))
    if (place / recipe.file).exists():
        held = recipes.read_card(place / recipe.file).get("transitions")
        published = recipes.locomotion.plan(recipe, None, 0, None).transitions
        if held not in (None, published):
            warnings.warn(
                f"{place / recipe.file} has {held:,} transitions, and {name} at its published size {published:,}: "
                f"do not compare runs on both. python -m experiments.collect --dataset={name} --out={place} "
                "--overwrite makes it at that size in its place; another --out, and --set=data_folder with "
                "that folder here, keep both",
                stacklevel=2,
            )
        return
    _print_once(f"{name} is not in {place}: it is made now, at its published size", file=sys.stderr)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        recipes.collect(name, out=place)
    except RuntimeError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise lifecycle.InUse(str(error)) from error
        raise data.DataError(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def execute(program: Program, workdir: Path, metric: str, began: float = math.inf) -> list[dict[str, Any]]:
    """Trains one program, if it is not finished; one row per run, with its parameters and its last score or its error.

    If one of several runs diverges, all are trained again one by one, so that it takes only itself down. What was begun
    since the command ``began`` goes on, also to overwrite.

    Raises:
      MetricError: the runs do not log ``metric``.
    """
    if lifecycle.of_first(finished(program, workdir, began)):
        return _read(program, workdir, metric)
    settings, config, sweep = arguments(program, workdir)
    if settings.overwrite and _begun(workdir, began):
        settings = dataclasses.replace(settings, overwrite=False)
    if settings.overwrite and shard.is_main():
        (workdir / DIVERGED).unlink(missing_ok=True)
    if settings.overwrite or not lifecycle.of_first((workdir / DIVERGED).exists()):
        try:
            run = _module(program.script).run
            run(settings, config, sweep) if SCRIPTS[program.script].together else run(settings, config)
            return _read(program, workdir, metric)
        except train.Diverged as error:
            if program.runs == 1:
                return [_row(program, workdir) | {"error": f"{_DIVERGED}: {error}"}]
            if shard.is_main():
                log.write_json(workdir / DIVERGED, {"error": str(error)})
    parts = apart(program, workdir).items()
    return [row for folder, part in parts for row in execute(part, folder, metric, began)]


def _begun(place: Path, began: float) -> bool:
    """Whether the run in the folder started since ``began``; to overwrite, what was there before it is gone."""
    with contextlib.suppress(FileNotFoundError):
        # The file's own time is of who went on with the run last.
        started = log.read_json(place / log.CONFIG)["started"]
        return datetime.fromisoformat(started).timestamp() >= began
    return False


def _read(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """`scored` in the first process; nothing in the others, which may not see yet what it has written."""
    return scored(program, workdir, metric) if shard.is_main() else []


def scored(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """A row for every run of a program that is finished, with its parameters and its last score, if that is finite.

    Raises:
      MetricError: the runs do not log ``metric``.
    """
    each = program.apart()
    scores = _last(program, workdir, metric).reshape(len(each), -1)
    interval = (
        statistics.rate_interval if metric.rpartition("/")[2] in lifecycle.RATES else statistics.interval
    )

    def outcome(per_seed: np.ndarray) -> dict[str, Any]:
        if lost := (~np.isfinite(per_seed)).sum():
            return {"error": f"{lost} of {per_seed.size} last {metric} are not finite"}
        return {"score": per_seed.mean(), "ci95": list(interval(per_seed))}

    return [_row(part, workdir) | outcome(per_seed) for part, per_seed in zip(each, scores, strict=True)]


def _last(program: Program, workdir: Path, metric: str) -> np.ndarray:
    """The last score of every seed of a program's runs, [R * S]. Raises MetricError, as `scored`.

    It is that of the result; what a result does not sum up is in the metrics, whose last lines may have been lost.
    """
    score = metric.removeprefix("eval/")
    of_runs = [part.get("scores", {}) for _, part in common.parts(log.read_json(workdir / log.RESULT))]
    if metric != score and all(score in scores for scores in of_runs):
        return np.array([scores[score]["last"]["per_seed"] for scores in of_runs])
    try:
        last = log.series(workdir, metric)[1][-1]
    except KeyError as error:
        raise MetricError(
            f"the sweep's metric is not logged: {error.args[0]}. Change the metric in the file; what is finished is "
            "not trained again"
        ) from None
    settings, *_ = arguments(program, workdir)
    return last.reshape(program.runs * getattr(settings, "seeds", 1), -1).mean(-1)


def ranked(rows: list[dict[str, Any]], goal: str) -> list[dict[str, Any]]:
    """The rows, best score first; those without one last."""
    sign = 1 if goal == "minimize" else -1
    return sorted(rows, key=lambda row: sign * row["score"] if "score" in row else math.inf)


def _row(run: Program, workdir: Path) -> dict[str, Any]:
    swept = {name: value for name, (value,) in run.swept.items()}
    return {"parameters": run.fixed | swept, "workdir": str(workdir)}


def _choices(name: str, parameter: Mapping[str, Any]) -> list[Any]:
    if "values" in parameter:
        return list(parameter["values"])
    if "value" in parameter:
        return [parameter["value"]]
    raise ValueError(f"{name}: a grid needs 'value' or 'values', not {sorted(parameter)}")


def _draw(name: str, parameter: Mapping[str, Any], rng: np.random.Generator) -> Any:
    """One value of a parameter, by wandb's names of distributions."""
    if "value" in parameter:
        return parameter["value"]
    if "values" in parameter:
        if not parameter["values"]:
            raise ValueError(f"{name}: there are no values to draw")
        probabilities = parameter.get("probabilities")
        return parameter["values"][rng.choice(len(parameter["values"]), p=probabilities)]
    low, high = parameter.get("min"), parameter.get("max")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = parameter.get("distribution") or ("int_uniform" if whole else "uniform")
    if kind == "normal":
        return float(rng.normal(parameter.get("mu", 0.0), parameter.get("sigma", 1.0)))
    if low is None or high is None or not low < high:
        raise ValueError(f"{name}: distribution {kind!r} needs min < max")
    if kind == "int_uniform":
        return int(rng.integers(low, high + 1))
    if kind == "uniform":
        return float(rng.uniform(low, high))
    if kind == "log_uniform_values":
        if low <= 0:
            raise ValueError(f"{name}: distribution {kind!r} needs min above 0")
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))
    if kind == "q_uniform":
        step = parameter.get("q", 1.0)
        return float(round(rng.uniform(low, high) / step) * step)
    raise ValueError(f"{name}: distribution {kind!r} is not supported here")


def _can_be_swept(run: Mapping[str, Any], name: str, value: Any, script: str) -> bool:
    field = name.removeprefix("agent.")
    if not SCRIPTS[script].together or field == name or field in ("discount", "chunk_discount"):
        return False
    if type(value) not in (int, float) or value == 0:
        return False
    config = _config_of(script)(run.get("agent", _defaults(script).agent))
    return isinstance(getattr(config, field, None), float)


def _reach(run: dict[str, Any], script: str) -> list[float]:
    """Where the targets of a run end if rewards give values in [0, 1], at those ends of a support that no flag gives.

    Of one and of two actions, since targets may reach further with their number; nothing for a head without a support.
    """
    settings, config, _ = arguments(Program(run, {}, script), Path())
    if settings.head in heads.UNBOUNDED:
        return []
    ranges = [agents.target_range(settings.agent, config, Spec((1,), size), 0.0, 1.0) for size in (1, 2)]
    flags_of_ends = (settings.head_low, settings.head_high)
    return [end for ends in ranges for end, flag in zip(ends, flags_of_ends, strict=True) if math.isnan(flag)]


def _module(script: str) -> ModuleType:
    """Imported where it is needed: nobody should wait for six scripts to run one."""
    return importlib.import_module(f"experiments.{script}")


def _defaults(script: str) -> Any:
    module = _module(script)
    return module.PUBLISHED if SCRIPTS[script].presets else module.Settings()


def _config_of(script: str) -> Callable[[str], Any]:
    """An agent's name -> its default hyper-parameters."""
    module = _module(script)
    of_script: dict[str, Callable[[str], Any]] = {
        "model_based": lambda name: module.config(name),
        "language": lambda name: module.agent(name).Config(),
    }
    return of_script.get(script, common.config)


def _overrides(items: list[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in items]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set takes flag=value pairs, not {name!r}")
    try:
        return {name.removeprefix("--"): _number(yaml.safe_load(value)) for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise ValueError(f"--set={' --set='.join(items)} holds a value that is not YAML: {error}") from None


def duration(text: str) -> float:
    """Seconds of ``90s``, ``10m``, ``2h``, ``1d`` or ``1h30m``.

    Raises:
      ValueError: it is none; the message names the flag.
    """
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        raise ValueError(f"--budget={text} is no duration: write 90s, 10m, 2h, 1d or 1h30m")
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(count) * unit[letter] for count, letter in re.findall(r"([\d.]+)([smhd])", text))


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[Callable[[], bool]]:
    """Asks the run that is open to stop after so many seconds, and any that opens later; yields whether they are over.

    The request is SIGTERM, which `rl.train.stop_requests` understands: the epoch ends with a checkpoint. So does
    `collect`.
    """
    if math.isinf(seconds):
        yield lambda: False
        return
    end, usual = time.monotonic() + seconds, signal.getsignal(signal.SIGTERM)

    def ring(*_: Any) -> None:
        if signal.getsignal(signal.SIGTERM) is not usual:  # a run is open
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM)
    try:
        yield lambda: lifecycle.anywhere(time.monotonic() >= end)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    left, trained, seconds = sum(work.values())
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


def _train(sweep: Sweep, store: Callable[[Rows], None], over: Any) -> bool:
    """Trains what is not finished, one program after another; whether the budget was enough.

    Args:
      sweep: with its programs, all checked.
      store: is given the rows so far after every program.
      over: whether the budget is spent.
    """
    say = functools.cache(print)  # what is tried again is not said again
    rows = done(sweep) if shard.is_main() else {}
    rows = {place: rows.get(place, []) for place in sweep.programs if lifecycle.of_first(place in rows)}
    store(rows)
    for place in _left(sweep, rows):
        if over():
            return False
        program = sweep.programs[place]
        if shard.is_main():
            say(f"{place}: {program.fixed} x {program.swept}")
        judged = program, place, sweep.metric, sweep.began
        try:
            known = ended(*judged) if shard.is_main() else []
            rows[place] = known if lifecycle.of_first(bool(known)) else attempt(*judged)
        except lifecycle.InUse as error:
            say(f"left to another process: {error}", file=sys.stderr)
            continue
        except MetricError as error:
            rows[place] = _unscored(program, place, error, rows)
        except (train.Interrupted, KeyboardInterrupt):
            if over():
                return False
            raise
        if shard.is_main():
            for error in failures(rows[place])[:1]:
                print(f"failed: {error}", file=sys.stderr)
        store(rows)
    return True


def _left(sweep: Sweep, rows: Rows) -> Iterator[Path]:
    """The programs without rows; after a pause again those that still have none and that no process has open.

    Another process makes their data, or it had them open and stopped. Several processes that train as one make no data,
    and do not wait.
    """
    left = list(sweep.programs)
    while left := [place for place in left if place not in rows]:
        yield from left
        left = [place for place in left if place not in rows and not _holder(sweep.programs[place], place)]
        if not left or jax.process_count() > 1:
            return
        time.sleep(_PAUSE)


def _unscored(program: Program, place: Path, error: MetricError, rows: Rows) -> list[dict[str, Any]]:
    """The rows of a program that does not log the metric. Raises the error if no run has a score yet."""
    if not any("score" in row for of_program in rows.values() for row in of_program):
        raise error  # before more is trained for a metric that no run may have
    return [_row(part, place) | {"error": str(error)} for part in program.apart()]


def _submit(sweep: Sweep, store: Callable[[Rows], None], values: flags.FlagValues, deadline: float) -> bool:
    """`_train` on a Ray cluster, until a ``deadline`` by `time.time`."""
    from sweeps import cluster

    rows, whole = done(sweep), True
    store(rows)
    left = {place: program for place, program in sweep.programs.items() if place not in rows}
    if not left:
        return True
    print(f"{len(left)} programs go to Ray; --status says how far they are")
    ended = cluster.outcomes(
        left, sweep.metric, sweep.began, values.ray_address, values.cpus, values.gpus, deadline, _holder
    )
    for place, kind, answer in ended:
        if kind == cluster.OVER:
            whole = False
            continue
        if kind == cluster.METRIC:
            rows[place] = _unscored(left[place], place, MetricError(answer), rows)
        else:
            lost = [_row(part, place) | {"error": answer} for part in left[place].apart()]
            rows[place] = answer if kind == cluster.ROWS else lost
        print(f"{place}: {'; '.join(failures(rows[place])[:1]) or 'done'}")
        store(rows)
    return whole


def done(sweep: Sweep, known: Collection[Path] = ()) -> Rows:
    """The rows of the programs that are finished, but for those that are known.

    Raises:
      MetricError: as `scored`, if none of them has the metric.
    """
    rows: Rows = {}
    failed: list[MetricError] = []
    for place, program in sweep.programs.items():
        if place not in known and finished(program, place, sweep.began):
            try:
                rows[place] = scored(program, place, sweep.metric)
            except MetricError as error:
                failed.append(error)
                rows[place] = [_row(part, place) | {"error": str(error)} for part in program.apart()]
    if failed and len(failed) == len(rows) and not known:
        raise failed[0]
    return rows


def alone(sweep: Sweep, known: Collection[Path]) -> list[dict[str, Any]]:
    """The rows of finished runs that were trained alone, because their program diverged and is not finished."""
    return [
        row
        for place, program in sweep.programs.items()
        if place not in known and program.runs > 1
        for folder, part in apart(program, place).items()
        if finished(part, folder, sweep.began)
        for row in scored(part, folder, sweep.metric)
    ]


def ended(program: Program, place: Path, metric: str, began: float) -> list[dict[str, Any]]:
    """The rows of a program that some process has finished, or failed at, since the command began; [] of others."""
    if finished(program, place, began):
        return scored(program, place, metric)
    each = apart(program, place)
    done = {folder for folder, part in each.items() if finished(part, folder, began)}
    error = _error(place, began)
    if not error and len(done) < len(each):
        return []
    return [
        row
        for folder, part in each.items()
        for row in (
            scored(part, folder, metric) if folder in done else [_row(part, place) | {"error": error}]
        )
    ]


def _error(place: Path, began: float) -> str:
    """Why the program there failed since ``began``, if it would in any process: memory is full in one, say."""
    with contextlib.suppress(FileNotFoundError):  # or another process is about to try it again
        failed = log.read_json(place / FAILED)
        if (place / FAILED).stat().st_mtime >= began and failed.get("explained", True):
            return str(failed["error"])
    return ""


def _holder(program: Program, place: Path) -> str | None:
    """Which process has the program's folder open, or one in which a run of it is trained alone."""
    held = ((folder, lifecycle.holder(folder)) for folder in (place, *apart(program, place)))
    return next((f"{folder} is in use by {process}" for folder, process in held if process), None)


def attempt(program: Program, place: Path, metric: str, began: float = math.inf) -> list[dict[str, Any]]:
    """Makes the program's data and trains it, as far as neither is done; a row per run, with its score or its error.

    A run that fails leaves failed.json in its folder. What was begun since the command ``began`` goes on, also to
    overwrite.

    Raises:
      MetricError: the runs do not log ``metric``.
      lifecycle.InUse: another process has its folder open, or makes its data.
      train.Interrupted, KeyboardInterrupt: it was stopped.
    """
    explained = True
    try:
        if jax.process_count() == 1:  # several would be in each other's way
            if held := _holder(program, place):  # before its data are read
                raise lifecycle.InUse(held)
            collect(program)
            (place / FAILED).unlink(missing_ok=True)
        rows = execute(program, place, metric, began)
        (place / FAILED).unlink(missing_ok=True)
    except (MetricError, lifecycle.InUse, train.Interrupted):
        raise
    except (*config_flags.EXPLAINED, RuntimeError) as error:  # of an environment say, or memory that is full
        if jax.process_count() > 1:  # others may have gone on, and would wait for ever
            raise
        explained = isinstance(error, config_flags.EXPLAINED)
        if not explained:
            traceback.print_exc()
        rows = [_row(part, place) | {"error": f"{type(error).__name__}: {error}"} for part in program.apart()]
    if failures(rows) and shard.is_main():
        with contextlib.suppress(OSError):  # a full disk has no room to say so, and the rows do
            place.mkdir(parents=True, exist_ok=True)
            failed = {"error": failures(rows)[0], "runs": len(failures(rows)), "explained": explained}
            log.write_json(place / FAILED, failed)
    return rows


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The errors of the runs that failed."""
    return [row["error"] for row in rows if "error" in row]


def main(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> None:
    began = time.time()
    if len(argv) != 2:
        raise ValueError("give one sweep file: python -m sweeps.run sweeps/iql_expectile.yaml")
    if values.engine == RAY or values.status or values.dry_run:
        jax.config.update("jax_platforms", "cpu")  # accelerators are for those that train
    else:
        shard.initialize()
    budget = duration(values.budget) if values.budget else math.inf
    sweep = from_flags(argv[1], {"overwrite": True} if values.overwrite else {}, values)
    try:
        for place, program in sweep.programs.items():
            check_folder(program, place, sweep.root)
    except ValueError as error:
        raise ValueError(f"{sweep.file}: {error}") from None
    say = print if shard.is_main() else lambda _: None
    say(f"{sweep.runs} runs in {len(sweep.programs)} programs, to {sweep.root}")
    if values.dry_run:
        for place, program in sweep.programs.items():
            say(json.dumps({"folder": place.name, **dataclasses.asdict(program)}))
        return
    if values.status:
        for line in status(sweep.programs):
            say(line)
        return
    if jax.process_count() == 1:  # hosts of one slice must all train the same, whatever their clocks say
        sweep = sweep._replace(began=began)
    known: Rows = {}

    def ranking() -> list[dict[str, Any]]:
        rows = [row for of_program in known.values() for row in of_program]
        return ranked(rows + alone(sweep, known), sweep.goal)

    def store(rows: Rows) -> None:
        known.update(rows)
        if not shard.is_main():
            return
        known.update(done(sweep, known))  # other processes finish programs, too
        try:
            sweep.root.mkdir(parents=True, exist_ok=True)
            log.write_json(
                sweep.root / SWEEP, {"file": sweep.file, "metric": sweep.metric, "runs": ranking()}
            )
        except OSError as error:
            remedy = f"{error.strerror}: change that, and the same command goes on; what is finished stays as it is"
            raise OSError(error.errno, remedy, str(sweep.root / SWEEP)) from error

    if values.engine == RAY:
        whole = _submit(sweep, store, values, time.time() + budget)
    else:
        with alarm(budget) as over:
            whole = _train(sweep, store, over)
    store({})
    rows = ranking()
    for line in table(rows, sweep.root / SWEEP):
        say(line)
    left = len(sweep.programs) - len(known)
    if whole and left:
        say(
            f"{left} of {len(sweep.programs)} programs are left to other processes: --status says how far they are"
        )
    if not whole:
        command = "the same command" + " without --overwrite" * values.overwrite
        say(f"the budget of {values.budget} is spent; {command} continues, and --status says what is left")
    failed = failures(rows)
    lost = len(failures([row for row in rows if _is_finished(row, sweep.script)]))
    if again := len(failed) - lost:
        say(
            f"{again} of {sweep.runs} runs failed, see {sweep.root / SWEEP}; the same command tries them again"
        )
    if lost:
        say(
            f"{lost} of {sweep.runs} runs are finished without a score, see {sweep.root / SWEEP}; they are not trained "
            "again without --overwrite"
        )
    say(f"Everything is in {sweep.root}; look at {SWEEP} first.")
    if not all(error.startswith(_DIVERGED) for error in failed):  # which is a result of hyper-parameters
        raise SystemExit(1)


def from_flags(file: str, overrides: Mapping[str, Any], values: flags.FlagValues) -> Sweep:
    """`load` with the flags of `define_layout`, over which ``overrides`` win; `adopt` with --finished."""
    sweep = load(
        file,
        _overrides(values.set) | overrides,
        values.workdir,
        count=values.count,
        seed=values.seed,
        together=values.together,
    )
    return adopt(sweep, values.finished)


def define_layout(values: flags.FlagValues = flags.FLAGS) -> None:
    """The flags that decide which programs a sweep has, and where they lie."""
    flags.DEFINE_integer("count", 10, "draws of a random sweep", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "decides what a random sweep draws", 0, flag_values=values)
    flags.DEFINE_integer("together", 16, "runs trained as one program, at most", 1, flag_values=values)
    flags.DEFINE_string("workdir", "", "where results go; by default runs/sweeps/FILE", values)
    flags.DEFINE_multi_string(
        "set", [], "flag=value in place of what the file says of that flag; may be repeated", values
    )
    flags.DEFINE_multi_string(
        "finished", [], "a further folder of finished runs, of another machine say; may be repeated", values
    )


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """The runner's flags."""
    define_layout(values)
    flags.DEFINE_string(
        "budget",
        "",
        "stop cleanly after this time (90s, 10m, 2h, 1h30m) and the epoch then in progress",
        values,
    )
    flags.DEFINE_bool(
        "status", False, "only say what is done, running, failed and how long the rest takes", values
    )
    flags.DEFINE_enum(
        "engine", "", ["", RAY], "ray: programs are tasks of a Ray cluster (extra: ray)", values
    )
    flags.DEFINE_string(
        "ray_address", "auto", "address of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT", values
    )
    flags.DEFINE_float("cpus", 1.0, "CPUs of each program on a Ray cluster", 0.0, flag_values=values)
    flags.DEFINE_float("gpus", 0.0, "GPUs of each program on a Ray cluster", 0.0, flag_values=values)
    flags.DEFINE_bool("overwrite", False, "train all of the sweep again, also what is finished", values)
    flags.DEFINE_bool("dry_run", False, "only print what would run together", values)


if __name__ == "__main__":
    define()
    app.run(config_flags.reporting(main), flags_parser=config_flags.parser(words=1))
