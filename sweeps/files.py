"""Sweep files, as Weights & Biases has them: what may stand in one, and the runs that it asks for."""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rl.files import existing
from sweeps.scripts import PROGRAMS, SCRIPTS

GOALS = ("maximize", "minimize")
# What a parameter may have.
_PARAMETER = ("value", "values", "probabilities", "distribution", "min", "max", "mu", "sigma", "q")
_OF_DISTRIBUTION = {"normal": {"mu", "sigma"}, "q_uniform": {"min", "max", "q"}}  # of others: min and max
_IGNORED = ("name", "description", "project", "entity", "command", "program")


class _Strict(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML's loader silently drops the first; dates stay texts."""

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


_Strict.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def find(path: str) -> Path:
    """The sweep file of that name, or the one beside this package, where it is installed. Raises ValueError."""
    shipped = Path(__file__).parents[1] / path
    if Path(path).exists() or not shipped.is_file():
        return existing(path, "give a sweep file, such as sweeps/first.yaml")
    return shipped


def read(path: str) -> dict[str, Any]:
    """The sweep in the file. Raises ValueError if it is not one that can be run here."""
    file = find(path)
    try:
        sweep = yaml.load(file.read_text(encoding="utf-8"), _Strict)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}): save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(sweep, dict) or not isinstance(sweep.get("parameters"), dict):
        raise ValueError(f"{path} has no 'parameters': see sweeps/iql_expectile.yaml for a small one")
    if sweep.get("method") not in ("grid", "random"):
        raise ValueError(f"{path}: method {sweep.get('method')!r} needs wandb's server; here: grid or random")
    if str(sweep.setdefault("program", next(iter(PROGRAMS)))) not in PROGRAMS:
        raise ValueError(f"{path}: {', '.join(PROGRAMS)} can be run here, not {sweep['program']}")
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
        if not isinstance(name, str):
            raise ValueError(f"{path}: the parameter {name!r} is not the name of a flag")
        _check_parameter(f"{path}: {name}", parameter, sweep["method"])
    if not isinstance(command := sweep.get("command", []), list):
        raise ValueError(f"{path}: command must be a list of words, not {command!r}")
    for word in command:
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
    logged = SCRIPTS[PROGRAMS[sweep["program"]]].evaluations
    training = str(metric["name"]).startswith(("train/", "validation/", "model/"))
    if logged and not training and metric["name"] not in logged:
        raise ValueError(f"{path}: no run logs the metric {metric['name']}; there are {', '.join(logged)}")
    return sweep


def _check_parameter(name: str, parameter: Any, method: str) -> None:
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
    if "probabilities" in parameter:
        weights = parameter["probabilities"]
        if isinstance(weights, list):
            weights = parameter["probabilities"] = [_number(x) for x in weights]
        whole = isinstance(weights, list) and all(isinstance(x, int | float) and x >= 0 for x in weights)
        if not (whole and len(weights) == len(parameter.get("values", ())) and abs(sum(weights) - 1) < 1e-6):
            raise ValueError(f"{name}: probabilities={weights} must be one for each value, and sum to 1")
        if method == "grid":
            raise ValueError(f"{name}: a grid has each of its values: leave probabilities out")
    for bound in ("value", "min", "max", "mu", "sigma", "q"):
        if bound in parameter:
            parameter[bound] = _number(parameter[bound])
            if bound != "value" and not _is_finite(parameter[bound]):
                raise ValueError(f"{name}: {bound}={parameter[bound]!r} is no finite number")
    if parameter.get("q", 1) <= 0:
        raise ValueError(f"{name}: q={parameter['q']} must be above 0")
    listed, kind = parameter.keys() & {"value", "values"}, str(parameter.get("distribution", "uniform"))
    taken = set() if listed else _OF_DISTRIBUTION.get(kind, {"min", "max"})
    if stray := parameter.keys() & {"min", "max", "mu", "sigma", "q"} - taken:
        raise ValueError(
            f"{name} has {', '.join(sorted(stray))}, which is not of {''.join(listed) or f'distribution {kind!r}'}: "
            "leave it out, or give distribution: q_uniform with min, max and q, or normal with mu and sigma"
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _number(value: Any) -> Any:
    """A number such as 1e-3, which YAML takes for a text; anything else as it is."""
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_number else value


def overrides(items: list[str]) -> dict[str, Any]:
    """{flag: value} of texts ``flag=value``. Raises ValueError on others."""
    pairs = [item.removeprefix("--").partition("=") for item in items]
    names = [name for name, _, _ in pairs]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set takes flag=value pairs, not {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"--set={name}=... is given twice, and fixes one value: leave one of them out")
    try:
        return {name: _number(yaml.load(value, _Strict)) if value else "" for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise ValueError(f"--set={' --set='.join(items)} holds a value that is not YAML: {error}") from None


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
