r"""Runs a sweep file without a server: every combination of a grid, or a number of random draws.

    python -m sweeps.run sweeps/iql_expectile.yaml
    python -m sweeps.run sweeps/rebrac_random.yaml --count=16 --set=updates=20000 --set=seeds=2

The files are Weights & Biases' own (``wandb sweep FILE`` takes them as they are). Runs that differ only in
float hyper-parameters of the agent are trained together as one program, on one copy of the data. Leaves a
folder per program, and sweep.json with every run's scores, the best first; the same command continues a sweep
that was stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from absl import app, flags

from experiments import common, goals, offline, presets
from experiments import flags as config_flags
from rl import agents, lifecycle, log, shard, statistics, train

_SCRIPTS = {"offline": offline, "goals": goals}
_PROGRAMS = {f"experiments/{name}.py": name for name in _SCRIPTS}
_IGNORED = ("early_terminate", "name", "description", "project", "entity", "run_cap", "command", "program")


@dataclasses.dataclass(frozen=True)
class Program:
    """Runs that one compiled program trains: they share ``fixed`` and differ in ``swept``."""

    fixed: dict[str, Any]
    swept: dict[str, list[float]]  # {flag: one value per run}; empty for a single run
    script: str = "offline"  # or goals

    @property
    def runs(self) -> int:
        return len(next(iter(self.swept.values()), [None]))

    def apart(self) -> list[Program]:
        """Its runs, each as a program of its own."""
        return [
            Program(self.fixed, {name: [values[i]] for name, values in self.swept.items()}, self.script)
            for i in range(self.runs)
        ]


def read(path: str) -> dict[str, Any]:
    """The sweep in the file. Raises ValueError if it is not one that can be run here."""
    try:
        sweep = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(sweep, dict) or not isinstance(sweep.get("parameters"), dict):
        raise ValueError(f"{path} has no 'parameters': see sweeps/iql_expectile.yaml for a small one")
    if sweep.get("method") not in ("grid", "random"):
        raise ValueError(f"{path}: method {sweep.get('method')!r} needs wandb's server; here: grid or random")
    if sweep.setdefault("program", next(iter(_PROGRAMS))) not in _PROGRAMS:
        raise ValueError(f"{path}: {' and '.join(_PROGRAMS)} can be run here, not {sweep['program']}")
    unknown = set(sweep) - {"parameters", "method", "metric", *_IGNORED}
    if unknown:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
    for name, parameter in sweep["parameters"].items():
        if not isinstance(parameter, dict) or not isinstance(parameter.get("values", []), list):
            raise ValueError(
                f"{path}: {name} must be written {{value: x}}, {{values: [x, y]}} or by min and max"
            )
    metric = sweep.setdefault("metric", {"name": "eval/return"})
    if not isinstance(metric, dict) or "name" not in metric:
        raise ValueError(f"{path}: metric must be written {{name: eval/success, goal: maximize}}")
    return sweep


def combinations(sweep: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The runs of a sweep, as {flag: value}: all of a grid in file order, or ``count`` random draws."""
    parameters = sweep["parameters"]
    if sweep["method"] == "grid":
        choices = [_choices(name, parameter) for name, parameter in parameters.items()]
        for values in itertools.product(*choices):
            yield dict(zip(parameters, values, strict=True))
        return
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield {name: _draw(name, parameter, rng) for name, parameter in parameters.items()}


def programs(runs: list[dict[str, Any]], most: int, script: str = "offline") -> list[Program]:
    """Groups runs that one program can train, at most ``most``: equal but for float hyper-parameters.

    A value of 0 stays out of a group, because it may switch a term off; so does the discount, on which the
    support of categorical heads depends.
    """
    groups: dict[str, list[Program]] = {}
    for run in runs:
        swept = {name: value for name, value in run.items() if _can_be_swept(run, name, value, script)}
        varying = sorted(name for name in swept if any(other.get(name) != run[name] for other in runs))
        fixed = {name: value for name, value in run.items() if name not in varying}
        group = groups.setdefault(json.dumps([fixed, varying], sort_keys=True), [])
        if not group or not varying or group[-1].runs >= most:
            group.append(Program(fixed, {name: [] for name in varying}, script))
        for name in varying:
            group[-1].swept[name].append(float(run[name]))
    return [program for group in groups.values() for program in group]


def arguments(program: Program, workdir: Path) -> tuple[Any, Any, dict[str, list[float]]]:
    """What the script's ``run`` takes. Raises ValueError on a parameter that does not exist or has another type."""
    given = program.fixed | {"workdir": str(workdir)}
    published = _SCRIPTS[program.script].PUBLISHED
    settings, config = presets.resolve(program.script, published, common.config, "dataset", given)
    return settings, config, {name.removeprefix("agent."): v for name, v in program.swept.items()}


def execute(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """Trains one program; one row per run, with its parameters and its last score or what went wrong.

    If one of several runs diverges, all are trained again one by one, so that it takes only itself down.

    Raises:
      ValueError: the runs do not log ``metric``.
    """
    settings, config, sweep = arguments(program, workdir)
    each = program.apart()
    try:
        _SCRIPTS[program.script].run(settings, config, sweep)
    except train.Diverged as error:
        if len(each) > 1:
            parts = enumerate(each)
            return [row for i, part in parts for row in execute(part, workdir / f"{i:03d}", metric)]
        return [_row(program, workdir) | {"error": str(error)}]
    try:
        last = log.series(workdir, metric)[1][-1]
    except KeyError as error:
        raise ValueError(f"the sweep's metric is not logged: {error.args[0]}") from None
    scores = last.reshape(len(each), settings.seeds, -1).mean(-1)
    interval = (
        statistics.rate_interval if metric.rpartition("/")[2] in lifecycle.RATES else statistics.interval
    )
    return [
        _row(part, workdir) | {"score": own.mean(), "ci95": list(interval(own))}
        for part, own in zip(each, scores, strict=True)
    ]


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
    if field == name or field == "discount" or type(value) not in (int, float) or value == 0:
        return False
    default = getattr(agents.get(run.get("agent", _SCRIPTS[script].Settings.agent)).Config(), field, None)
    return isinstance(default, float)


def _overrides(items: list[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in items]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set takes flag=value pairs, not {name!r}")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def main(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> None:
    if len(argv) != 2:
        raise ValueError("give one sweep file: python -m sweeps.run sweeps/iql_expectile.yaml")
    shard.initialize()
    sweep = read(argv[1])
    root = Path(values.workdir or f"runs/sweeps/{Path(argv[1]).stem}")
    runs = [run | _overrides(values.set) for run in combinations(sweep, values.count, values.seed)]
    if not runs:
        raise ValueError(f"{argv[1]} asks for no runs: one of its parameters has no values")
    plan = programs(runs, values.together, _PROGRAMS[sweep["program"]])
    folders = [root / f"{i:03d}" for i in range(len(plan))]
    for program, folder in zip(plan, folders, strict=True):  # a mistake in the last one is known at once
        arguments(program, folder)
    say = print if shard.is_main() else lambda _: None
    say(f"{len(runs)} runs in {len(plan)} programs, to {root}")
    if values.dry_run:
        for program in plan:
            say(json.dumps(dataclasses.asdict(program)))
        return
    metric, rows = sweep["metric"]["name"], []
    for program, folder in zip(plan, folders, strict=True):
        say(f"{folder}: {program.fixed} x {program.swept}")
        rows = ranked(rows + execute(program, folder, metric), sweep["metric"].get("goal", "maximize"))
        if shard.is_main():
            log.write_json(root / "sweep.json", {"file": argv[1], "metric": metric, "runs": rows})
    shared = set.intersection(*(set(map(str, row["parameters"].items())) for row in rows))
    for row in rows[:10]:
        own = {name: value for name, value in row["parameters"].items() if str((name, value)) not in shared}
        say(f"{row.get('score', math.nan):10.4g}  {row.get('ci95', '')}  {own}")


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """The runner's flags."""
    flags.DEFINE_integer("count", 10, "runs of a random sweep", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the random draws", 0, flag_values=values)
    flags.DEFINE_integer("together", 16, "runs trained as one program, at most", 1, flag_values=values)
    flags.DEFINE_string("workdir", "", "where results go; by default runs/sweeps/FILE", values)
    flags.DEFINE_multi_string("set", [], "flag=value that overrides the file; may be repeated", values)
    flags.DEFINE_bool("dry_run", False, "only print what would run together", values)


if __name__ == "__main__":
    define()
    app.run(config_flags.reporting(main))
