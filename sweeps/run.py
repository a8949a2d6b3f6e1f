r"""Runs a sweep file without a server: every combination of a grid, or a number of random draws.

    python -m sweeps.run sweeps/iql_expectile.yaml
    python -m sweeps.run sweeps/cql_random.yaml --count=16 --set=updates=20000,seeds=2

The files are Weights & Biases' own (``wandb sweep FILE`` takes them as they are). Runs that differ only in
float hyper-parameters of the agent are trained together as one program, on one copy of the data. Leaves a
folder per program, and sweep.json with every run's scores, the best first.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from absl import app, flags

from experiments import flags as config_flags
from experiments import offline
from rl import agents, log, statistics

FLAGS = flags.FLAGS

_IGNORED = ("early_terminate", "name", "description", "project", "entity", "run_cap", "command", "program")


@dataclasses.dataclass(frozen=True)
class Program:
    """Runs that one compiled program trains: they share ``fixed`` and differ in ``swept``."""

    fixed: dict[str, Any]
    swept: dict[str, list[float]]  # {flag: one value per run}; empty for a single run


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
    unknown = set(sweep) - {"parameters", "method", "metric", *_IGNORED}
    if unknown:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
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


def programs(runs: list[dict[str, Any]]) -> list[Program]:
    """Groups runs that one program can train: equal but for float hyper-parameters of the agent.

    A value of 0 stays out of a group, because it may switch a term off; so does the discount, on which the
    support of categorical heads depends.
    """
    groups: dict[str, Program] = {}
    for run in runs:
        swept = {name: value for name, value in run.items() if _can_be_swept(run, name, value)}
        varying = {name for name in swept if any(other.get(name) != run[name] for other in runs)}
        fixed = {name: value for name, value in run.items() if name not in varying}
        key = json.dumps([fixed, sorted(varying)], sort_keys=True)
        program = groups.setdefault(key, Program(fixed, {name: [] for name in sorted(varying)}))
        for name in program.swept:
            program.swept[name].append(float(run[name]))
    return list(groups.values())


def execute(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """Trains one program; one row per run, with its parameters and its score."""
    plain = {name: value for name, value in program.fixed.items() if not name.startswith("agent.")}
    settings = config_flags.with_fields(offline.Settings(), plain | {"workdir": str(workdir)})
    own = {name.removeprefix("agent."): v for name, v in program.fixed.items() if name.startswith("agent.")}
    config = config_flags.with_fields(agents.get(settings.agent).Config(), own)
    sweep = {name.removeprefix("agent."): values for name, values in program.swept.items()}
    result = offline.run(settings, config, sweep)
    variants = max(1, *(len(v) for v in sweep.values())) if sweep else 1
    scores = result["scores"].get(metric)
    rows = []
    for i in range(variants):
        swept = {name: values[i] for name, values in program.swept.items()}
        row: dict[str, Any] = {"parameters": program.fixed | swept, "workdir": str(workdir)}
        if scores:
            own_seeds = np.asarray(scores["last"]["per_seed"]).reshape(variants, settings.seeds)[i]
            row |= {metric: own_seeds.mean(), "ci95": list(statistics.interval(own_seeds))}
        rows.append(row)
    return rows


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
    kind = parameter.get("distribution") or ("int_uniform" if isinstance(low, int) else "uniform")
    if kind == "normal":
        return float(rng.normal(parameter.get("mu", 0.0), parameter.get("sigma", 1.0)))
    if low is None or high is None or not low < high:
        raise ValueError(f"{name}: distribution {kind!r} needs min < max")
    if kind == "int_uniform":
        return int(rng.integers(low, high + 1))
    if kind == "uniform":
        return float(rng.uniform(low, high))
    if kind == "log_uniform_values":
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))
    if kind == "q_uniform":
        step = parameter.get("q", 1.0)
        return float(round(rng.uniform(low, high) / step) * step)
    raise ValueError(f"{name}: distribution {kind!r} is not supported here")


def _can_be_swept(run: Mapping[str, Any], name: str, value: Any) -> bool:
    field = name.removeprefix("agent.")
    if field == name or field == "discount" or not isinstance(value, int | float) or value == 0:
        return False
    default = getattr(agents.get(run.get("agent", offline.Settings.agent)).Config(), field, None)
    return isinstance(default, float)


def _overrides(items: list[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in items]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set takes flag=value pairs, not {name!r}")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def main(argv: list[str]) -> None:
    try:
        if len(argv) != 2:
            raise ValueError("give one sweep file: python -m sweeps.run sweeps/iql_expectile.yaml")
        sweep = read(argv[1])
        runs = list(combinations(sweep, FLAGS.count, FLAGS.seed))
        plan = programs([run | _overrides(FLAGS.set) for run in runs])
        root = Path(FLAGS.workdir or f"runs/sweeps/{Path(argv[1]).stem}")
        print(f"{len(runs)} runs in {len(plan)} programs, to {root}")
        if FLAGS.dry_run:
            for program in plan:
                print(json.dumps(dataclasses.asdict(program)))
            return
        metric = sweep.get("metric", {}).get("name", "return").rpartition("/")[2]
        sign = 1 if sweep.get("metric", {}).get("goal") == "minimize" else -1
        rows: list[dict[str, Any]] = []
        for i, program in enumerate(plan):
            print(f"program {i + 1} of {len(plan)}: {program.fixed} x {program.swept}")
            rows += execute(program, root / f"{i:03d}", metric)
            rows.sort(key=lambda row: sign * row.get(metric, -math.inf * sign))
            log.write_json(root / "sweep.json", {"file": argv[1], "metric": metric, "runs": rows})
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    for row in rows[:10]:
        print(f"{row.get(metric, math.nan):10.4g}  {row.get('ci95', '')}  {row['parameters']}")


if __name__ == "__main__":
    flags.DEFINE_integer("count", 10, "runs of a random sweep")
    flags.DEFINE_integer("seed", 0, "of the random draws")
    flags.DEFINE_string("workdir", "", "where results go; by default runs/sweeps/FILE")
    flags.DEFINE_list("set", [], "flag=value pairs that override the file, for all runs")
    flags.DEFINE_bool("dry_run", False, "only print what would run together")
    app.run(main)
