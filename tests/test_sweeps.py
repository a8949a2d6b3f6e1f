"""Sweep files and the runner that needs no server: which runs there are, which train together, what they score."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import point_mass  # noqa: F401  (registers its environment)
import pytest
import yaml
from absl import flags as absl_flags

from experiments import common, flags, goals, offline, presets, report
from rl import checkpoint, data, lifecycle, locks, log, outcomes, run_folder, train
from sweeps import files, layout, records, scripts, training
from sweeps import run as sweeps
from sweeps.layout import Program, Sweep

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("sweeps/**/*.yaml"))
METRIC = {"name": "eval/return", "goal": "maximize"}
SMALL = {
    "dataset": "synthetic-continuous",
    "seeds": 2,
    "updates": 4,
    "eval_every": 2,
    "batch_size": 8,
    "tensorboard": False,
    "agent.hidden": "8,8",
}


def grid(**parameters: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): {"values": values} for name, values in parameters.items()}
    return {"method": "grid", "parameters": named, "metric": METRIC}


def runs_of(sweep: dict[str, Any], count: int = 50, seed: int = 0) -> list[dict[str, Any]]:
    return list(files.combinations(sweep, count, seed))


def write(path: Path, sweep: Any) -> str:
    path.write_text(yaml.safe_dump(sweep))
    return str(path)


def start(*argv: str) -> None:
    """``python -m sweeps.run`` in this process."""
    values = absl_flags.FlagValues()
    sweeps.define(values)
    sweeps.main(values(["sweeps.run", *argv]), values)


def test_run_cap_is_the_most_runs() -> None:
    sweep = grid(seed=[1, 2, 3])
    assert [run["seed"] for run in runs_of(sweep | {"run_cap": 2})] == [1, 2]
    draws = {"method": "random", "parameters": {"discount": {"min": 0.9, "max": 0.99}}}
    assert runs_of(draws | {"run_cap": 2}) == runs_of(draws, count=2)
    assert len(runs_of(draws | {"run_cap": 60})) == 50


# ---- the files that are in the repository ---------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_asks_for_runs_that_its_program_can_do(path: Path) -> None:
    sweep = files.read(str(path))
    assert sweep["metric"]["name"].removeprefix("eval/") in outcomes.SCORES
    assert sweep["metric"]["goal"] in ("maximize", "minimize")
    runs = runs_of(sweep, count=20)
    assert runs
    script = Path(sweep["program"]).stem
    module, known = scripts.module(script), scripts.SCRIPTS[script]
    of_agent = module.config if script == "model_based" else common.config
    first_seeds = {str({**run, "seed": None}): run for run in reversed(runs)}  # seeds differ in nothing else
    for run in first_seeds.values():
        argv = [f"--{name}={value}" for name, value in run.items()]  # as wandb's ${args} writes them
        values = absl_flags.FlagValues()
        flags.parser(module.PUBLISHED, of_agent, values)([script, *argv])
        typed, config = presets.from_flags(script, module.PUBLISHED, of_agent, known.task, values)
        ours, sweep_config, _ = layout.arguments(Program(run, {}, script), Path(typed.workdir))
        assert str(ours) == str(dataclasses.replace(typed, workdir=ours.workdir))
        assert sweep_config == config
        if known.task == "dataset":
            assert data.ogbench.known(typed.dataset) or typed.dataset in data.names()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_how_it_is_run_and_how_long_it_takes_and_a_board_what_it_answers(path: Path) -> None:
    about = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert path.parent.name != "boards" or any(
        "?" in line or "part of the board" in line for line in about[:2]
    )
    assert any(line.startswith("# Time, on ") for line in about)
    command = f"python -m sweeps.run {path.relative_to(ROOT)}"
    assert any(command in line or "$name" in line for line in about)


def test_a_sweep_may_be_of_goals(tmp_path: Path) -> None:
    """Its runs have that script's defaults and its published settings, and float fields are swept together."""
    file = grid(agent=["gciql"], dataset=["pointmaze-large-stitch-v0"], agent__alpha=[0.003, 0.03])
    sweep = files.read(write(tmp_path / "goals.yaml", file | {"program": "experiments/goals.py"}))
    (program,) = layout.programs(runs_of(sweep), 16, "goals")
    settings, config, swept = layout.arguments(program, tmp_path)
    assert isinstance(settings, goals.Settings) and settings.batch_size == 1024
    assert config.goals.actor.random == 0.5 and swept == {"alpha": [0.003, 0.03]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_wandb_would_start_the_same_program(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    assert (ROOT / raw["program"]).exists()
    module = raw["command"][raw["command"].index("-m") + 1]
    assert module.replace(".", "/") + ".py" == raw["program"]
    assert raw["command"][-2:] == ["--wandb", "${args}"]  # the server learns scores from wandb alone


# ---- which runs ---------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_in_file_order() -> None:
    sweep = grid(head=["scalar", "c51"], seed=[0, 1, 2], agent__expectile=[0.5, 0.9])
    sweep["parameters"]["updates"] = {"value": 7}
    expected = [
        {"head": h, "seed": s, "agent.expectile": e, "updates": 7}
        for h, s, e in itertools.product(["scalar", "c51"], [0, 1, 2], [0.5, 0.9])
    ]
    assert runs_of(sweep) == expected


def random(**parameters: Any) -> list[dict[str, Any]]:
    """2,000 draws, beside a number that makes no two alike."""
    parameters |= {"other": {"min": 0.0, "max": 1.0}}
    return runs_of({"method": "random", "parameters": parameters}, count=2000)


def test_a_number_that_yaml_takes_for_a_text_is_one(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("{method: random, parameters: {x: {min: 1e-5, max: 3e-3}, y: {values: [7e-1, text]}}}")
    parameters = files.read(str(path))["parameters"]
    assert parameters == {"x": {"min": 1e-5, "max": 3e-3}, "y": {"values": [0.7, "text"]}}


@pytest.mark.parametrize(
    ("parameter", "kind", "low", "high", "median"),
    [
        ({"min": -2.0, "max": 6.0}, float, -2, 6, 2),
        ({"min": 0, "max": 0.5}, float, 0, 0.5, 0.25),
        ({"min": 3, "max": 9}, int, 3, 9, 6),
        ({"distribution": "uniform", "min": 1, "max": 3}, float, 1, 3, 2),
        ({"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2}, float, 1e-4, 1e-2, 1e-3),
        ({"distribution": "q_uniform", "min": 0.0, "max": 2.0, "q": 0.5}, float, 0, 2, 1),
        ({"distribution": "normal", "mu": 3.0, "sigma": 0.1}, float, 2, 4, 3),
    ],
)
def test_random_draws_follow_their_distribution(
    parameter: dict[str, Any], kind: type, low: float, high: float, median: float
) -> None:
    drawn = [run["x"] for run in random(x=parameter)]
    assert all(type(x) is kind and low <= x <= high for x in drawn)
    below = np.mean(np.asarray(drawn) < median) + np.mean(np.asarray(drawn) == median) / 2
    assert abs(below - 0.5) < 0.05  # 4.5 standard deviations of the mean of 2000
    if "q" in parameter:
        assert set(drawn) == {0.0, 0.5, 1.0, 1.5, 2.0}
    if kind is int:
        assert set(drawn) == set(range(3, 10))


def test_what_was_drawn_is_not_drawn_again_and_parameters_have_draws_of_their_own() -> None:
    """Else two runs would share a folder, and ``--set`` would change everything else."""
    parameters = {"x": {"values": [0.7, 0.9]}, "y": {"values": [1, 2, 3]}, "z": {"value": 5}}
    runs = runs_of({"method": "random", "parameters": parameters}, 60, 0)
    assert sorted((run["x"], run["y"]) for run in runs) == list(itertools.product([0.7, 0.9], [1, 2, 3]))
    continuous = {"x": {"min": 0.0, "max": 1.0}, "y": {"min": 0.0, "max": 1.0}}
    both = runs_of({"method": "random", "parameters": continuous}, 5, 0)
    fixed = runs_of({"method": "random", "parameters": continuous | {"x": {"value": 3.0}}}, 5, 0)
    assert [run["y"] for run in both] == [run["y"] for run in fixed]
    assert [run["y"] for run in both] != [run["x"] for run in both]


def test_random_choices_have_their_probabilities() -> None:
    counts = Counter(run["x"] for run in random(x={"values": ["a", "b"], "probabilities": [0.2, 0.8]}))
    assert abs(counts["a"] - 400) < 100 and counts["a"] + counts["b"] == 2000
    counts = Counter(run["x"] for run in random(x={"values": [1, 2, 3, 4]}))
    assert all(abs(counts[x] - 500) < 100 for x in (1, 2, 3, 4))
    assert {run["x"] for run in random(x={"value": 5})} == {5}


def test_random_draws_depend_on_the_seed_alone() -> None:
    sweep = {"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0}}}
    assert runs_of(sweep, 5, 1) == runs_of(sweep, 5, 1) == runs_of(sweep, 9, 1)[:5]
    assert runs_of(sweep, 5, 1) != runs_of(sweep, 5, 2)


# ---- which runs train together ---------------------------------------------------------------------------


STRUCTURE = ("agent", "head", "seed", "agent.critics", "agent.layer_norm", "agent.discount")


def test_grouping_keeps_every_run_and_mixes_no_structures() -> None:
    sweep = grid(
        agent=["iql"],
        head=["scalar", "c51"],
        seed=[0, 1],
        agent__critics=[2, 3],
        agent__layer_norm=[False, True],
        agent__discount=[0.9, 0.99],
        agent__expectile=[0.5, 0.9],
        agent__temperature=[0.0, 1.0, 3.0],
    )
    runs = runs_of(sweep)
    plan = layout.programs(runs, 16)
    apart = [
        single.fixed | {n: v for n, (v,) in single.swept.items()} for p in plan for single in p.single_runs()
    ]

    def canonical(run: dict[str, Any]) -> str:
        return json.dumps(run, sort_keys=True)

    assert sorted(map(canonical, apart)) == sorted(map(canonical, runs))
    for program in plan:
        assert all(name in program.fixed for name in STRUCTURE)
        assert all(0.0 not in values for values in program.swept.values())
    # 2 * 2 * 2 * 2 * 2 structures, each with temperature 0 apart from the rest
    assert sorted(program.runs for program in plan) == [2] * 32 + [4] * 32


def test_no_program_trains_more_runs_than_asked() -> None:
    runs = runs_of(grid(agent__expectile=[0.1 * i for i in range(1, 10)]))
    plan = layout.programs(runs, 4)
    assert [program.runs for program in plan] == [4, 4, 1]
    assert [{"agent.expectile": x} for p in plan for x in p.swept["agent.expectile"]] == runs


def test_runs_that_are_equal_stay_runs_of_their_own() -> None:
    assert [program.runs for program in layout.programs([{"seed": 1}, {"seed": 1}], 16)] == [1, 1]


def test_only_float_fields_of_the_agent_are_swept() -> None:
    def fixed(name: str, *values: Any) -> bool:
        (program, *_) = layout.programs([{"agent": "cql", name: value} for value in values], 16)
        return name in program.fixed

    assert not fixed("agent.weight", 1, 5.0)
    assert fixed("agent.samples", 2, 4)
    assert fixed("agent.weight", True, False)  # refused later, by its type
    assert fixed("agent.weight", "5", "6")
    assert fixed("reward_shift", 1.0, 2.0)  # the data's, not the agent's
    soft = [{"agent": "sac_n", "agent.target_entropy": x} for x in (-1.0, -2.0)]
    assert [program.runs for program in layout.programs(soft, 16)] == [2]  # a float where it is not none
    (program, *_) = layout.programs([{"agent": "deas", "agent.chunk_discount": x} for x in (0.9, 0.95)], 16)
    assert "agent.chunk_discount" in program.fixed  # batches are made with it, once for all runs


@pytest.mark.parametrize(
    ("fixed", "name", "values", "expected"),
    [
        ({"agent": "rebrac", "head": "hl_gauss"}, "critic_cloning", [0.001, 0.01, 0.5], [1, 1, 1]),
        ({"agent": "rebrac", "head": "hl_gauss"}, "policy_cloning", [0.001, 0.01, 0.5], [3]),
        ({"agent": "rebrac", "head": "quantile"}, "critic_cloning", [0.001, 0.01, 0.5], [3]),
        ({"agent": "rebrac", "head": "c51", "head_low": -9}, "critic_cloning", [0.001, 0.01, 0.5], [3]),
        ({"agent": "sac_n", "head": "two_hot"}, "initial_alpha", [0.1, 0.5, 2.0, 3.0, 2.0], [2, 2, 1]),
        ({"agent": "sac_n", "head": "two_hot"}, "target_entropy", [-3.0, -1.0, -2.0], [1, 1, 1]),
        ({"agent": "dqn", "head": "c51"}, "temperature", [0.1, 0.2], [1, 1]),
        ({"agent": "dqn", "head": "c51", "head_high": 9}, "temperature", [0.1, 0.2], [2]),
    ],
)
def test_no_run_widens_the_support_of_another(
    fixed: dict[str, Any], name: str, values: list[float], expected: list[int]
) -> None:
    """Else the results of a run would depend on what else is in the sweep, and on ``--together``."""
    plan = layout.programs([fixed | {f"agent.{name}": value} for value in values], 16)
    assert [program.runs for program in plan] == expected


# ---- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("a: [", "is not YAML"),
        (
            "parameters: {seed: {value: 0}, seed: {value: 1}}",
            "seed is given here(.|\n)*and here again: leave one out",
        ),
        ({"method": "grid"}, "has no 'parameters'"),
        ({"method": "bayes", "parameters": {}}, "method 'bayes' needs wandb's server"),
        ({"method": "grid", "parameters": {}, "paramters": {}}, r"unknown keys \['paramters'\]"),
        ({"method": "grid", "parameters": {}, "early_terminate": {}}, "early_terminate needs wandb's server"),
        ({"method": "grid", "parameters": {}, "run_cap": 0}, "run_cap must be a number of runs"),
        ({"method": "grid", "parameters": {"seed": 3}}, "seed must be written {value: x}"),
        ({"method": "grid", "parameters": {"seed": {"values": 3}}}, "seed must be written {value: x}"),
        ({"method": "grid", "parameters": {}, "metric": "eval/return"}, "metric must be written"),
        (
            {"method": "grid", "parameters": {}, "metric": METRIC | {"name": "return"}},
            "no run logs the metric return;",
        ),
        (
            {"method": "random", "parameters": {"x": {"min": 0.1, "max": 0.9, "distrbution": "uniform"}}},
            "x has distrbution: known are value, values",
        ),
        ({"method": "grid", "parameters": {"x": {"value": 1, "values": [2]}}}, "both value and values"),
        (
            {"method": "random", "parameters": {"x": {"min": "low", "max": 1.0}}},
            "min='low' is no finite number",
        ),
        (
            {"method": "random", "parameters": {"x": {"min": 0, "max": float("inf")}}},
            "max=inf is no finite number",
        ),
        (
            {"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": ["a", "b"]}}},
            "must be one for",
        ),
        (
            {"method": "grid", "parameters": {"x": {"values": [1], "probabilities": [1.0]}}},
            "leave probabilities out",
        ),
        ({"method": "grid", "parameters": {5: {"value": 1}}}, "the parameter 5 is not the name of a flag"),
        (
            {"method": "grid", "parameters": {"x": {"value": 1}}, "program": [1]},
            r"can be run here, not \[1\]",
        ),
        (
            {"method": "grid", "parameters": {"x": {"value": 1}}, "command": 5},
            "command must be a list of words",
        ),
        ({"method": "random", "parameters": {"x": {"min": 0, "max": 1, "q": 0}}}, "q=0 must be above 0"),
        (
            {"method": "random", "parameters": {"x": {"min": 32, "max": 256, "q": 32}}},
            "x has q, which is not of distribution 'uniform': leave it out, or give distribution: q_uniform",
        ),
        (
            {"method": "random", "parameters": {"x": {"distribution": "normal", "mu": 1, "min": 0}}},
            "x has min, which is not of distribution 'normal'",
        ),
        (
            {"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0, "mu": 1, "sigma": 2}}},
            "x has mu, sigma, which",
        ),
        (
            {"method": "grid", "parameters": {"x": {"value": 3, "max": 9}}},
            "x has max, which is not of value:",
        ),
        (
            {"method": "grid", "parameters": {}, "metric": {"name": "validation/critic_loss"}},
            "metric has no goal: write goal: maximize or goal: minimize, which wandb's server takes",
        ),
        (
            {"method": "grid", "parameters": {}, "metric": METRIC | {"target": 0.9}},
            "the target of a metric needs wandb's server",
        ),
        (
            {"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [0.9]}}},
            r"probabilities=\[0.9\] must be one for each value",
        ),
        (
            {"method": "grid", "parameters": {}, "command": ["python", "--agent.alpha=3", "${args}"]},
            "write --agent.alpha=3 as a parameter",
        ),
        (
            {"method": "grid", "parameters": {}, "metric": METRIC | {"goal": "minimise"}},
            "the goal of a metric is maximize or minimize, not 'minimise'",
        ),
        (
            {"method": "grid", "parameters": {}, "metric": METRIC | {"name": "eval/retrun"}},
            "no run logs the metric eval/retrun; there are eval/return, ",
        ),
        (
            {"method": "grid", "parameters": {}, "program": "train.py"},
            r"experiments/offline.py, .*, experiments/language.py can be run here, not train.py",
        ),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(sweep: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(sweep if isinstance(sweep, str) else yaml.safe_dump(sweep))
    with pytest.raises(ValueError, match=message):
        files.read(str(path))


def test_a_key_that_overrides_what_is_merged_is_not_given_twice(tmp_path: Path) -> None:
    text = """
parameters:
  seed: &zero {value: 0}
  head: &one {<<: *zero, value: scalar}
  agent: {<<: *one, value: iql}
method: grid
"""
    (tmp_path / "sweep.yaml").write_text(text)
    assert files.read(str(tmp_path / "sweep.yaml"))["parameters"]["agent"] == {"value": "iql"}


def test_dates_stay_texts_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("{method: grid, parameters: {date: {value: 2026-01-31}}}")
    assert files.read(str(file))["parameters"]["date"] == {"value": "2026-01-31"}
    assert files.overrides(["date=2026-01-31"]) == {"date": "2026-01-31"}
    assert files.overrides(["data_folder="]) == {
        "data_folder": ""
    }  # and not None, of which a text would be made
    file.write_bytes(b"# f\xe4r\n{method: grid, parameters: {}}")
    with pytest.raises(ValueError, match=r"sweep\.yaml is not in UTF-8"):
        files.read(str(file))


@pytest.mark.parametrize(
    ("method", "parameter", "message"),
    [
        ("grid", {"min": 0.0, "max": 1.0}, "x: a grid needs 'value' or 'values'"),
        ("random", {"min": 2.0, "max": 1.0}, "x: distribution 'uniform' needs min < max"),
        ("random", {"min": 2.0}, "needs min < max"),
        ("random", {"distribution": "beta", "min": 0.0, "max": 1.0}, "'beta' is not supported here"),
        ("random", {"distribution": "log_uniform_values", "min": 0.0, "max": 1.0}, "above 0"),
    ],
)
def test_a_parameter_that_cannot_be_drawn_is_named(method: str, parameter: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs_of({"method": method, "parameters": {"x": parameter}})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give one sweep file"),
        (["--set=seeds"], "--set takes flag=value"),
        (["--set=seed=0", "--set=--seed=1"], "--set=seed=... is given twice"),
        (["--set=agent.expectil=0.5"], "no setting 'expectil': did you mean 'expectile'"),
        (["--set=agent=iqll"], "unknown agent 'iqll': did you mean 'iql'"),
        (["--set=head=hlgauss"], "unknown value head 'hlgauss': choose one of scalar, two_hot, hl_gauss"),
        (["--set=seeds=2.5"], "seeds must be of type int"),
        (["--set=expectile=0.5"], "no setting 'expectile': did you mean 'agent.expectile'"),
        (["--set=dataset=hopper-medum-v2"], "s.yaml: unknown dataset 'hopper-medum-v2': did you mean hopper"),
        (["--set=agnt.hidden=4,4"], "no setting 'agnt.hidden': did you mean 'agent.hidden'"),
        (["--set=seeds=["], r"--set=seeds=\[ holds a value that is not YAML"),
        (["--set=eval_episodes=1"], "s.yaml: --eval_episodes=1: give 0 for none or at least 2"),
        (["--set=workdir=runs/x"], "the sweep sets workdir, .*: give --workdir to the runner"),
        (["--set=updates=[1, 2]"], "updates must be of type int"),
        (
            ["--set=head=c51", "--set=head_low=5", "--set=head_high=-5"],
            "s.yaml: --head_low=5 and --head_high=-5",
        ),
        (["--count=3"], "s.yaml: --count: only a random sweep draws its runs"),
        (["--seed=0", "--count=3"], "s.yaml: --count, --seed: only a random sweep"),
        (["--budget=soon"], "--budget=soon is no duration: write 90s, 10m, 2h"),
    ],
)
def test_a_mistake_is_found_before_anything_is_trained(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "run", lambda *_: pytest.fail("trained"))
    file = [write(tmp_path / "s.yaml", grid(head=["scalar"]))] if argv else []
    with pytest.raises(ValueError, match=message):
        start(*file, *argv, f"--workdir={tmp_path}")


def test_a_parameter_of_no_grid_is_named_with_its_file(tmp_path: Path) -> None:
    file = write(tmp_path / "s.yaml", {"method": "grid", "parameters": {"x": {"min": 0.0, "max": 1.0}}})
    with pytest.raises(ValueError, match=f"^{file}: x: a grid needs 'value' or 'values'"):
        layout.load(file, {})


def test_a_baseline_without_what_is_swept_is_sent_to_a_file_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "s.yaml", grid(agent=["bc", "iql"]))
    with pytest.raises(ValueError, match=r"bc has no setting 'expectile'.*needs a file of its own"):
        layout.load(file, {"agent.expectile": 0.5})


@pytest.mark.parametrize(
    ("seeds", "devices"), [({}, 4), ({"seeds": 2}, 2), ({"seeds": 6}, 2), ({"seeds": 3}, 1)]
)
def test_runs_that_are_trained_alone_are_spread_over_as_many_devices_as_their_seeds_allow(
    seeds: dict[str, int], devices: int
) -> None:
    """A program of two runs of two seeds fits on four devices, and each of its runs does not."""
    program = Program({"mesh_seed": 4, **seeds}, {"agent.expectile": [0.6, 0.9]})
    parts = layout.single_run_folders(program, Path("p"))
    assert [part.fixed for part in parts.values()] == [{**program.fixed, "mesh_seed": devices}] * 2
    wider = dataclasses.replace(
        program, fixed={**program.fixed, "mesh_data": 3}
    )  # all 12 devices are still used
    for part in layout.single_run_folders(wider, Path("p")).values():
        assert part.fixed["mesh_seed"] * part.fixed["mesh_data"] == 12
    assert (
        "mesh_seed"
        not in layout.single_run_folders(Program(seeds, program.swept), Path("p"))[Path("p/000")].fixed
    )


# ---- what is trained and what it scores ---------------------------------------------------------------------


@pytest.mark.long
def test_together_they_train_what_each_trains_alone(tmp_path: Path) -> None:
    values = {"agent.expectile": [0.6, 0.9], "agent.learning_rate": [1e-3, 1e-2]}
    together = Program(SMALL, values)
    rows = training.execute(together, tmp_path / "together", "train/critic_loss")
    for i, (single, row) in enumerate(zip(together.single_runs(), rows, strict=True)):
        fixed = SMALL | {name: column[i] for name, column in values.items()}
        (alone,) = training.execute(Program(fixed, {}), tmp_path / str(i), "train/critic_loss")
        assert row["parameters"] == alone["parameters"] == fixed
        assert {name: value for name, (value,) in single.swept.items()}.items() <= fixed.items()
        assert row["score"] == pytest.approx(alone["score"], rel=1e-5)
        assert row["ci95"] == pytest.approx(alone["ci95"], rel=1e-4)
    both = log.series(tmp_path / "together", "train/critic_loss")[1]
    assert both.shape == (2, 4)
    np.testing.assert_allclose(both[:, 2:], log.series(tmp_path / "1", "train/critic_loss")[1], rtol=1e-5)
    assert rows[0]["score"] != rows[1]["score"]


@pytest.mark.slow
@pytest.mark.command
def test_a_sweep_ranks_its_runs_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = grid(agent=["iql"], seed=[0, 1], agent__temperature=[1.0, 3.0])
    sweep["parameters"] |= {name: {"value": value} for name, value in SMALL.items()}
    sweep["parameters"]["environment"] = {"value": "point_mass:PointMass-v0"}
    sweep["parameters"] |= {"eval_episodes": {"value": 2}, "eval_processes": {"value": 0}}
    file = write(tmp_path / "sweep.yaml", sweep)
    start(file, f"--workdir={tmp_path}", "--set=updates=2")
    result = json.loads((tmp_path / "sweep.json").read_text())
    scores = [row["score"] for row in result["runs"]]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    for row in result["runs"]:
        logged = log.series(Path(row["workdir"]), "eval/return")[1][-1]  # [2 variants * 2 seeds, episodes]
        variant = 1 if row["parameters"]["agent.temperature"] == 3.0 else 0
        assert row["score"] == pytest.approx(logged.reshape(2, 4)[variant].mean())
        assert row["ci95"][0] < row["score"] < row["ci95"][1]
        assert row["parameters"]["updates"] == 2
    text = capsys.readouterr().out
    assert "4 runs in 2 programs" in text and text.rstrip().splitlines()[-5].split()[0] == f"{scores[0]:.4g}"
    assert "'dataset'" not in text.splitlines()[-2]  # only what differs
    folder = Path(result["runs"][0]["workdir"])
    variants = json.loads((folder / log.RESULT).read_text())["variants"]
    assert [one["parameters"] for one in variants] == [{"temperature": 1.0}, {"temperature": 3.0}]
    for one in variants:  # scores and intervals of each, over its own two seeds
        row = next(
            row
            for row in result["runs"]
            if row["workdir"] == str(folder)
            and row["parameters"]["agent.temperature"] == one["parameters"]["temperature"]
        )
        assert one["scores"]["return"]["last"]["mean"] == pytest.approx(row["score"])
        assert one["scores"]["return"]["last"]["ci95"] == pytest.approx(row["ci95"])
    modified = (folder / log.METRICS).stat().st_mtime_ns
    start(file, f"--workdir={tmp_path}", "--set=updates=2")
    assert json.loads((tmp_path / "sweep.json").read_text()) == result
    assert (folder / log.METRICS).stat().st_mtime_ns == modified
    values = absl_flags.FlagValues()
    report.define(values)
    where = [f"--workdir={tmp_path}", "--set=updates=2", f"--out={tmp_path / 'report'}"]
    report.main(values(["experiments.report", file, *where]), values)
    reported = json.loads((tmp_path / "report" / log.RESULT).read_text())
    for cell in reported[
        "cells"
    ]:  # seeds 0 and 1 are seeds of one run there, so that each cell is two rows here
        temperature = float(cell["variant"].removeprefix("iql, temperature="))
        cell_scores = [
            row["score"] for row in result["runs"] if row["parameters"]["agent.temperature"] == temperature
        ]
        assert len(cell["last"]["each"]) == 4 and cell["last"]["mean"] == pytest.approx(np.mean(cell_scores))
    assert len(reported["cells"]) == 2 and [len(c["scores"][0]) for c in reported["curves"]] == [4, 4]


def test_the_goal_decides_which_is_best() -> None:
    rows = [{"score": 1.0}, {"error": "diverged"}, {"score": 3.0}, {"score": 2.0}]
    assert [row.get("score") for row in records.ranked(rows, "maximize")] == [3.0, 2.0, 1.0, None]
    assert [row.get("score") for row in records.ranked(rows, "minimize")] == [1.0, 2.0, 3.0, None]


def test_a_run_that_diverges_takes_only_itself_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command trains no run together again that diverged so, and the status is that of its runs."""
    trained, states, broken, failing = [], [], [1e9], [0.3]

    def fake(settings: offline.Settings, config: Any, sweep: dict[str, list[float]]) -> None:
        rates, place = sweep["learning_rate"], Path(settings.workdir)
        trained.append(rates)
        with locks.alone(place):
            if settings.overwrite:  # as a session begins
                (place / run_folder.OVERWRITE).unlink()
            states.append(records.state(program, tmp_path).name)
            if any(rate in broken for rate in rates):
                raise train.Diverged("q not finite at update 3")
        if rates == failing:
            raise OSError("the disk is gone")
        row = {"step": 4, "eval/return": [[rate, rate] for rate in rates for _ in range(2)]}
        (place / log.METRICS).write_text(json.dumps(row) + "\n")
        log.result(place, {"updates": settings.updates, "wall_seconds": 2.0})

    monkeypatch.setattr(offline, "run", fake)
    program = Program(SMALL, {"agent.learning_rate": [0.1, 1e9, 0.3]})
    failed = training.attempt(program, tmp_path / "before", "eval/return")  # one for another reason
    assert [row.get("score") for row in failed] == [pytest.approx(0.1), None, None]
    assert failed[2]["error"] == "OSError: the disk is gone"
    failing.clear(), trained.clear(), states.clear()
    rows = training.attempt(program, tmp_path, "eval/return")
    assert [row["parameters"]["agent.learning_rate"] for row in rows] == [0.1, 1e9, 0.3]
    assert [row.get("score") for row in rows] == [pytest.approx(0.1), None, pytest.approx(0.3)]
    assert "not finite" in rows[1]["error"]
    assert trained == [[0.1, 1e9, 0.3], [0.1], [1e9], [0.3]] and states == ["running"] * 4
    state = records.state(program, tmp_path)
    assert state[:4] == ("failed", 2, 4, 4.0) and "not finite" in state.error  # two of three, of four updates
    again = planned({tmp_path: program})  # as the same command finds it, which tries the second once more
    assert records.done(again) == {}
    assert [row["score"] for row in records.trained_alone(again, ())] == pytest.approx([0.1, 0.3])
    earlier = records.ended(program, tmp_path, "eval/return", 0.0)  # as a process finds it that began before
    assert [row.get("score") for row in earlier] == [row.get("score") for row in rows]
    assert not records.ended(program, tmp_path, "eval/return", math.inf)
    broken.clear()
    with locks.alone(tmp_path / "001"), pytest.raises(locks.InUse, match="001 is in use by process"):
        training.attempt(program, tmp_path, "eval/return")
    assert len(records.failures(training.attempt(program, tmp_path, "eval/return"))) == 0
    assert trained[4:] == [[1e9]] and records.state(program, tmp_path) == records.State("done", 4, 4, 6.0)
    ended = records.ended(program, tmp_path, "eval/return", 0.0)
    assert len(ended) == 3 and not records.failures(ended)  # each alone
    layout.mark(planned({tmp_path: dataclasses.replace(program, fixed=SMALL | {"overwrite": True})}))
    assert records.state(program, tmp_path) == records.State("waiting", 0, 4, 0.0)
    assert records.ended(program, tmp_path, "eval/return", 0.0) == []
    training.attempt(program, tmp_path, "eval/return")
    assert trained[5:] == [[0.1, 1e9, 0.3]] and layout.finished(program, tmp_path)
    # Of the runs that were trained alone before, none is taken for one of today.
    assert not any(
        layout.finished(*one[::-1]) for one in layout.single_run_folders(program, tmp_path).items()
    )


def planned(programs: dict[Path, Program]) -> Sweep:
    return Sweep("s.yaml", "offline", "eval/return", "maximize", Path(), len(programs), programs)


def test_finished_runs_without_a_score_stop_no_others(tmp_path: Path) -> None:
    """Without the metric, or with one that is not finite; the metric of none is an error of the file."""
    lines = {"good": {"eval/return": [1.0, 3.0]}, "without": {}, "infinite": {"eval/return": [math.inf, 1.0]}}
    sweep = planned({tmp_path / name: Program(SMALL, {}) for name in lines})
    for name, line in lines.items():
        leave(tmp_path / name, line)
    good, without, infinite = (row for (row,) in records.done(sweep).values())
    assert good["score"] == 2 and "metric is not logged" in without["error"]
    assert infinite["error"] == "1 of 2 last eval/return are not finite"
    with pytest.raises(records.MetricError, match="metric is not logged"):
        records.done(planned({tmp_path / "without": Program(SMALL, {})}))


def leave(place: Path, line: dict[str, Any]) -> None:
    """What a finished run of `SMALL` leaves that has logged one line."""
    place.mkdir()
    (place / log.METRICS).write_text(json.dumps({"step": 4, **line}) + "\n")
    log.result(place, {"updates": SMALL["updates"], "wall_seconds": 1.0})


def test_a_score_that_is_not_finite_is_of_its_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are trained with it keep theirs, and nobody says that it is tried again."""
    monkeypatch.setattr(offline, "run", lambda *_: pytest.fail("trained"))
    sweep = grid(agent__expectile=[0.5, 0.7, 0.9])
    sweep["parameters"] |= {name: {"value": value} for name, value in SMALL.items()}
    file = write(tmp_path / "sweep.yaml", sweep)
    (place,) = layout.load(file, {}, str(tmp_path)).programs
    leave(place, {"eval/return": [1.0, 3.0, math.nan, 1.0, 5.0, 5.0]})
    with pytest.raises(SystemExit):
        start(file, f"--workdir={tmp_path}")
    rows = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [row.get("score") for row in rows] == [5.0, 2.0, None]
    assert rows[2]["parameters"]["agent.expectile"] == 0.7
    assert rows[2]["error"] == "1 of 2 last eval/return are not finite"
    text = capsys.readouterr().out
    assert "1 of 3 runs are finished without a score" in text and "again without --overwrite" in text
    assert "tries them again" not in text


def test_a_metric_that_is_not_logged_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(
        records.MetricError, match=r"metric is not logged: .*'eval/return'; it has: train/policy_loss"
    ):
        training.execute(Program(SMALL | {"agent": "bc"}, {}), tmp_path, "eval/return")


def test_no_values_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asks for no runs"):
        start(write(tmp_path / "s.yaml", grid(head=[])))


def test_a_dry_run_only_says_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "s.yaml", grid(agent__expectile=[0.5, 0.9], head=["scalar", "c51"]))
    start(file, "--dry_run", f"--workdir={tmp_path / 'out'}")
    first, *plan = capsys.readouterr().out.splitlines()
    assert first.startswith("4 runs in 2 programs")
    assert [json.loads(line)["swept"] for line in plan] == [{"agent.expectile": [0.5, 0.9]}] * 2
    assert not (tmp_path / "out").exists()


# ---- data that can be made ------------------------------------------------------------------------------------------


def tier_sweep(path: Path) -> str:
    sweep = grid(seed=[0, 1], dataset=["hopper-medium-regen-v5", "synthetic-continuous"])
    run = {"seeds": 2, "updates": 4, "eval_every": 2, "tensorboard": False, "data_folder": str(path / "data")}
    sweep["parameters"] |= {name: {"value": value} for name, value in run.items()}
    return write(path / "sweep.yaml", sweep)


def test_a_tier_that_is_not_there_is_made_before_its_first_run(
    counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def make(name: str, *, out: Path) -> None:
        assert name == "hopper-medium-regen-v5" and len(counted) == len(folders) == 0
        folders.append(out)
        out.mkdir()
        (out / f"{name}.hdf5").touch()

    monkeypatch.setattr(training.recipes, "collect", make)
    start(tier_sweep(tmp_path), f"--workdir={tmp_path / 'runs'}")
    assert folders == [tmp_path / "data"] and counted == [0, 1, 0, 1]


def test_a_tier_of_another_size_is_used_with_a_warning(counted: list[int], tmp_path: Path) -> None:
    """A trial's file would stand beside stored runs on the published size without a word."""
    file, where = tier_sweep(tmp_path), f"--workdir={tmp_path / 'runs'}"
    tier = tmp_path / "data" / "hopper-medium-regen-v5"
    tier.parent.mkdir()
    tier.with_suffix(".hdf5").touch()
    log.write_json(tier.with_suffix(".json"), {"transitions": 1_000_000})
    with warnings.catch_warnings(action="error"):
        start(file, where, "--set=seed=0")
    log.write_json(tier.with_suffix(".json"), {"transitions": 100_000})
    with pytest.warns(
        UserWarning, match=r"has 100,000 transitions, .* 1,000,000: .* --overwrite makes it"
    ) as said:
        start(file, where, "--set=seed=1")
    assert len(said) == 1 and counted == [0, 0, 1, 1]


def test_data_that_cannot_be_made_stop_no_other_run(
    counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the budget ends their making, too."""

    def fail(name: str, *, out: Path) -> None:
        raise RuntimeError("no space left. Finished chunks are kept")

    file, where = tier_sweep(tmp_path), f"--workdir={tmp_path / 'runs'}"
    monkeypatch.setattr(training.recipes, "collect", fail)
    with pytest.raises(SystemExit):
        start(file, where)
    assert counted == [0, 1]
    assert "failed: DataError: no space left. Finished chunks are kept" in capsys.readouterr().err

    def endless(name: str, *, out: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(training.recipes, "collect", endless)
    start(file, where, "--budget=0.2s")
    assert "the budget of 0.2s is spent" in capsys.readouterr().out and counted == [0, 1]


def test_data_that_another_process_makes_are_waited_for(
    counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the budget is spent; others are trained meanwhile, and nothing is said twice."""
    tier, pauses = tmp_path / "data" / "hopper-medium-regen-v5.hdf5", []

    def make(name: str, *, out: Path) -> None:
        assert len(pauses) < 3
        raise RuntimeError(f"Another run is making {name} in {out}") from BlockingIOError()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:  # the other process has made it
            tier.parent.mkdir()
            tier.touch()

    monkeypatch.setattr(training.recipes, "collect", make)
    # Of this module alone: threads of other libraries sleep, too.
    monkeypatch.setattr(sweeps, "time", types.SimpleNamespace(time=time.time, sleep=pause))
    file, runs = tier_sweep(tmp_path), str(tmp_path / "runs")
    assert not sweeps._train(layout.load(file, {}, runs), lambda rows: None, lambda: bool(pauses))
    assert counted == [0, 1] and pauses == [sweeps._PAUSE]
    said = capsys.readouterr().err
    assert said.count("it is made now") == said.count("left to another process: Another run is making") == 1
    start(file, f"--workdir={runs}")
    assert counted == [0, 1, 0, 1] and pauses == [sweeps._PAUSE] * 3


# ---- every script ---------------------------------------------------------------------------------------------------

SCRIPTS = {
    "offline": ({"agent": "iql", "dataset": "synthetic-continuous"}, {"agent.expectile": [0.5, 0.7]}, 1),
    "goals": ({"agent": "gciql", "dataset": "synthetic-goals"}, {"agent.alpha": [0.5, 0.7]}, 1),
    "online": ({"agent": "sac", "env": "Pendulum-v1"}, {"agent.learning_rate": [1e-3, 1e-4]}, 2),
    "mbpo": ({"agent": "sac", "env": "Pendulum-v1"}, {"loss.floor": [0.5, 0.7]}, 2),
    "model_based": ({"agent": "mopo", "dataset": "hopper-medium-v2"}, {"agent.penalty": [0.5, 0.7]}, 2),
    "language": ({"agent": "ilql", "environment": "maze"}, {"agent.expectile": [0.5, 0.7]}, 2),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_can_be_swept(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs get its own settings, are trained together where it can, and are scored by what they log."""
    fixed, varied, count = SCRIPTS[script]
    length = scripts.SCRIPTS[script].length
    parameters = {name: {"value": value} for name, value in fixed.items()}
    parameters |= {name: {"values": values} for name, values in varied.items()}
    sweep = {"method": "grid", "parameters": parameters, "program": f"experiments/{script}.py"}
    file = write(tmp_path / "sweep.yaml", sweep)
    module = scripts.module(script)
    signature, trained = inspect.signature(module.run), []

    def fake(*inputs: Any) -> None:
        signature.bind(*inputs)
        settings = inputs[0]
        assert type(settings) is module.Settings
        seeds = getattr(settings, "seeds", 1)
        values = [x for column in (inputs[2] if len(inputs) > 2 else {}).values() for x in column] or [1.0]
        trained.append(values)
        stored = {name: getattr(settings, name) for name in module.IDENTITY}
        stored |= dict.fromkeys(getattr(module, "LEFT_OPEN", ()), 0.5)  # as the run decided
        card = {"agent": settings.agent, "settings": stored, "config": dataclasses.asdict(inputs[1])}
        resumed = (Path(settings.workdir) / log.RESULT).exists()
        with log.open_run(settings.workdir, card, tensorboard=False, resumed=resumed) as run:
            run.write(1, {"eval/return": np.repeat(values, seeds)})
            run.result({length: getattr(settings, length), "wall_seconds": 1.0})

    monkeypatch.setattr(module, "run", fake)
    start(file, f"--workdir={tmp_path}")
    rows = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert len(trained) == count and len({row["workdir"] for row in rows}) == count
    ((name, values),) = varied.items()
    assert sorted(row["parameters"][name] for row in rows) == sorted(values)
    if count == 1:
        assert [row["score"] for row in rows] == pytest.approx(sorted(values, reverse=True))
    start(file, f"--workdir={tmp_path}")  # finds its runs again, whatever they have decided themselves
    assert len(trained) == count
    place = Path(rows[0]["workdir"])
    (place / run_folder.UNFINISHED).touch()  # an export, say, was not made yet
    start(file, f"--workdir={tmp_path}")
    assert len(trained) == count + 1
    for name in getattr(module, "LEFT_OPEN", ()):
        with pytest.raises(checkpoint.CheckpointError, match=rf"{name}: 0.5 in the checkpoint, 3"):
            layout.check_folder(Program({**rows[0]["parameters"], name: 3}, {}, script), place, tmp_path)


# ---- what --set changes, and where runs land ------------------------------------------------------------------------


def test_a_parameter_that_is_set_is_no_longer_varied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "s.yaml", grid(agent__expectile=[0.5, 0.7, 0.9], seed=[0, 1]))
    start(file, "--dry_run", "--set=agent.expectile=6e-1", "--set=updates=2e4", f"--workdir={tmp_path}")
    first, *plan = capsys.readouterr().out.splitlines()
    assert first.startswith("2 runs in 2 programs")
    assert [json.loads(line)["fixed"] for line in plan] == [
        {"agent.expectile": 0.6, "seed": seed, "updates": 20000} for seed in (0, 1)
    ]


def test_a_table_that_is_cut_says_so(tmp_path: Path) -> None:
    rows = [{"parameters": {"seed": i}, "score": -i, "ci95": [0.0, 1.0]} for i in range(13)]
    lines = list(records.table(rows, tmp_path / "sweep.json"))
    assert len(lines) == 11 and lines[-1] == f"... and 3 more runs: all 13 are in {tmp_path / 'sweep.json'}"
    assert len(list(records.table(rows[:10], tmp_path))) == 10
    assert "{'seed': 9}" in lines[9]


def test_a_folder_is_named_by_what_is_trained_there(tmp_path: Path) -> None:
    """By all parameters but the length, so that a longer sweep goes on and a larger one keeps what it has.

    Nor by those that change nothing that is learned: a sweep that is watched on Weights & Biases trains nothing anew.
    """

    def place(**fixed: Any) -> str:
        return layout.folder(Program(fixed, {"agent.expectile": [0.5, 0.7]}), tmp_path).name

    one = place(agent="iql", dataset="/data/a.hdf5", updates=10)
    assert one.startswith("iql-a.hdf5-") and one == place(updates=20, dataset="/data/a.hdf5", agent="iql")
    assert one == place(agent="iql", dataset="/data/a.hdf5", wandb=True, eval_processes=0)
    written = ({"eval_every": 2000, "agent.hidden": "8,8"}, {"eval_every": 2e3, "agent.hidden": [8, 8]})
    assert len({place(agent="iql", dataset="/data/a.hdf5", **fixed) for fixed in written}) == 1
    others = [place(agent="iql", dataset="/data/a.hdf5", seed=1), place(agent="iql", dataset="/other/a.hdf5")]
    others += [place(agent="iql", dataset="/data/a.hdf5", head_sigma=sigma) for sigma in (0.5, 2.0)]
    assert len({one, *others}) == 5


def test_a_default_that_is_written_out_trains_nothing_again(tmp_path: Path) -> None:
    """A file that gets more seeds names the first one, too, which it had by default."""
    before = Program({"agent": "iql", "dataset": "/data/a.hdf5"}, {"agent.expectile": [0.5, 0.7]})
    place = layout.folder(before, tmp_path)
    place.mkdir()

    def now(**fixed: Any) -> Path:
        return layout.folder(dataclasses.replace(before, fixed={**before.fixed, **fixed}), tmp_path)

    assert now(seed=0) == now(seed="0") == now(head="scalar") == place
    assert place not in (now(seed=1), now(head="hl_gauss"), now(seed=0, head="hl_gauss"))


def test_two_runs_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    for shared in ({"updates": [1000, 2000], "eval_every": [500]}, {"seed": [1, 1]}):
        with pytest.raises(ValueError, match=r"two runs of the sweep would share .*--updates"):
            start(write(tmp_path / "s.yaml", grid(**shared)), f"--workdir={tmp_path}")
    twice = write(tmp_path / "s.yaml", grid(**{"agent.expectile": [0.5, 0.7, 0.5]}))
    with pytest.raises(
        ValueError, match=r"two runs of the sweep are the same, .*expectile': 0.5.*: give each value"
    ):
        start(twice, f"--workdir={tmp_path}")


# ---- runs that fail, go on and are left alone ----------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`experiments.offline.run` counts to its number of updates; the seeds that it was called with."""
    return count_in_place_of_training(monkeypatch, lambda settings, session: None)


def count_in_place_of_training(
    monkeypatch: pytest.MonkeyPatch,
    each: Callable[[offline.Settings, lifecycle.Session], None],
    prepare: Callable[[offline.Settings], None] = lambda settings: None,
) -> list[int]:
    seeds: list[int] = []

    def fake(settings: offline.Settings, config: Any, sweep: Any = None) -> dict[str, Any]:
        this = common.run(
            settings, config, settings.updates, task="count", identity=("seed",), card={"sweep": sweep or {}}
        )
        seeds.append(settings.seed)
        prepare(settings)
        start = lifecycle.begin(this, {"state": np.zeros(1)})
        with lifecycle.session(this, start) as session:
            for step in range(start.step + 1, settings.updates + 1):
                session.write(step, {"eval/return": np.full((settings.seeds, 2), settings.seed + step)})
                each(settings, session)
                session.keep(step, {"state": np.zeros(1)}, due=step == settings.updates)
            return session.finish()

    monkeypatch.setattr(offline, "run", fake)
    monkeypatch.setattr(outcomes, "draw", lambda run: None)
    return seeds


def seeds_sweep(path: Path, *seeds: int) -> str:
    sweep = grid(seed=list(seeds))
    sweep["parameters"] |= {
        name: {"value": SMALL[name]} for name in ("seeds", "updates", "eval_every", "tensorboard")
    }
    return write(path / "sweep.yaml", sweep)


@pytest.mark.long
def test_two_processes_train_a_sweep_as_one(tmp_path: Path) -> None:
    """The second process may see what the first has written only later, and neither decides alone."""
    sweep = yaml.safe_load(Path(seeds_sweep(tmp_path, 0, 1)).read_text())
    file = write(tmp_path / "sweep.yaml", sweep | {"metric": METRIC | {"name": "train/critic_loss"}})
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    cluster = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "sweeps.run", file, f"--workdir={tmp_path / 'runs'}"]
    command += ["--set=mesh_seed=2", "--set=seeds=2"]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **cluster, "JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
        )
        for index in range(2)
    ]
    try:
        printed = [process.communicate(timeout=300)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert ["2 runs in 2 programs" in text for text in printed] == [True, False]
    rows = json.loads((tmp_path / "runs" / "sweep.json").read_text())["runs"]
    assert len([row["score"] for row in rows]) == 2


def status_of(file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    start(file, "--status", f"--workdir={folder}")
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize("kind", [OSError, RuntimeError, TypeError])
def test_a_run_that_fails_stops_no_other_and_is_tried_again(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [1]

    def fail(settings: offline.Settings, session: lifecycle.Session) -> None:
        if settings.seed in broken:
            raise kind("no space left")

    trained = count_in_place_of_training(monkeypatch, fail)
    file = seeds_sweep(tmp_path, 0, 1, 2)
    with pytest.raises(SystemExit) as stopped:
        start(file, f"--workdir={tmp_path}")
    assert stopped.value.code == 1 and trained == [0, 1, 2]
    said = capsys.readouterr()
    assert "1 of 3 runs failed" in said.out and ("Traceback" in said.err) == (kind is not OSError)
    rows = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [row.get("error") for row in rows] == [None, None, f"{kind.__name__}: no space left"]
    # What may be of this machine alone is tried again by workers on others, and a mistake in the code is not.
    (failed,) = tmp_path.glob("*/failed.json")
    assert json.loads(failed.read_text())["explained"] == (kind is TypeError)
    states = status_of(file, tmp_path, capsys)
    assert states[0] == "3 programs: 2 done, 1 failed"
    assert any(line.startswith("failed") and "no space left" in line for line in states)
    broken.clear()
    start(file, f"--workdir={tmp_path}")
    assert trained == [0, 1, 2, 1]
    assert status_of(file, tmp_path, capsys)[0] == "3 programs: 3 done"


@pytest.mark.parametrize(("overwrite", "kind"), [(False, ValueError), (True, ValueError), (False, OSError)])
def test_what_another_process_ended_meanwhile_is_not_trained_again(
    overwrite: bool, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first seed is trained, the same command is started by another process, which tries all others.

    But for a program that failed there of what may be its own trouble, a disk that is full, say.
    """
    own = kind is OSError
    flags = [f"--workdir={tmp_path}", *["--overwrite"] * overwrite]

    def train_elsewhere(settings: offline.Settings, session: lifecycle.Session) -> None:
        if settings.seed == 0 and trained.count(0) == 1 and 1 not in trained:
            with contextlib.suppress(SystemExit):
                start(file, *flags)
        if settings.seed == 2:
            raise kind("no space left")

    file = seeds_sweep(tmp_path, 0, 1, 2)
    trained = count_in_place_of_training(monkeypatch, train_elsewhere)
    with pytest.raises(SystemExit):
        start(file, *flags)
    assert trained == [0, 1, 2] + [2] * own
    rows = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert sorted(row.get("score", row.get("error")) for row in rows[:2]) == [4.0, 5.0]
    assert rows[2]["error"] == f"{kind.__name__}: no space left"
    with pytest.raises(SystemExit):
        start(file, *flags)
    assert trained[3 + own :] == ([0, 1, 2] if overwrite else [2])


@pytest.mark.parametrize("again", ["", "--overwrite"])
def test_overwriting_that_was_stopped_goes_on(
    again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old results are never taken for new ones: not by the command after it, by --status or by a report."""
    kill: list[int] = []

    def stop(settings: offline.Settings, session: lifecycle.Session) -> None:
        if kill:
            session.stopping.append(kill.pop())

    trained = count_in_place_of_training(monkeypatch, stop)
    file = seeds_sweep(tmp_path, 0, 1, 2)
    start(file, f"--workdir={tmp_path}")
    old = {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"*/{log.RESULT}")}
    kill.append(signal.SIGTERM)
    with pytest.raises(train.Interrupted):
        start(file, f"--workdir={tmp_path}", "--overwrite")
    assert status_of(file, tmp_path, capsys)[0] == "3 programs: 1 stopped, 2 waiting"
    start(file, f"--workdir={tmp_path}", *filter(None, [again]))
    assert trained == [0, 1, 2, 0, 0, 1, 2]
    assert all(path.stat().st_mtime_ns > old[path] for path in tmp_path.glob(f"*/{log.RESULT}"))
    assert status_of(file, tmp_path, capsys)[0] == "3 programs: 3 done"
    start(file, f"--workdir={tmp_path}")
    assert len(trained) == 7


def test_a_disk_that_fills_up_takes_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can be written from the second run on, not even what went wrong; with room again the rest is trained."""
    full: list[int] = []
    write = log.write_json

    def refuse(path: Path, values: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(path, values)

    def fill(settings: offline.Settings, session: lifecycle.Session) -> None:
        if settings.seed == 1 and trained.count(1) == 1:
            full.append(1)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "write_json", refuse)
    trained = count_in_place_of_training(monkeypatch, fill)
    file = seeds_sweep(tmp_path, 0, 1, 2)
    with pytest.raises(
        OSError, match=r"No space left on device: change that, and the same command goes on; .*sweep\.json"
    ):
        start(file, f"--workdir={tmp_path}")
    assert trained == [0, 1] and "failed: OSError" in capsys.readouterr().err
    (row,) = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    before = (Path(row["workdir"]) / log.RESULT).read_bytes()
    full.clear()
    start(file, f"--workdir={tmp_path}")
    assert trained == [0, 1, 1, 2] and (Path(row["workdir"]) / log.RESULT).read_bytes() == before


def test_a_larger_sweep_trains_only_what_is_new(counted: list[int], tmp_path: Path) -> None:
    start(seeds_sweep(tmp_path, 3, 1), f"--workdir={tmp_path}")
    start(seeds_sweep(tmp_path, 0, 1, 2, 3), f"--workdir={tmp_path}")
    assert counted == [3, 1, 0, 2]
    start(
        seeds_sweep(tmp_path, 0, 1), f"--workdir={tmp_path}", "--set=updates=6"
    )  # and goes on with a longer one
    assert counted[4:] == [0, 1]
    start(seeds_sweep(tmp_path, 0, 1), f"--workdir={tmp_path}", "--set=updates=6", "--overwrite")
    assert counted[6:] == [0, 1]
    scores = [row["score"] for row in json.loads((tmp_path / "sweep.json").read_text())["runs"]]
    assert scores == [7.0, 6.0]
    with pytest.raises(ValueError, match="holds a run of 6 updates, more than the sweep's updates=4"):
        start(seeds_sweep(tmp_path, 0), f"--workdir={tmp_path}")


@contextlib.contextmanager
def stored_card(folder: Path) -> Iterator[dict[str, Any]]:
    """What the only run below the folder has stored of itself, to be changed."""
    (config,) = folder.glob(f"*/{log.CONFIG}")
    stored = json.loads(config.read_text())
    yield stored["config"]
    config.write_text(json.dumps(stored))


def test_a_run_folder_of_other_code_is_refused_before_anything_is_trained(
    counted: list[int], tmp_path: Path
) -> None:
    start(seeds_sweep(tmp_path, 0), f"--workdir={tmp_path}")
    with stored_card(tmp_path) as card:
        card["config"]["expectile"] = 0.123  # as if the default had been another
    with pytest.raises(
        checkpoint.CheckpointError, match=r"other code or defaults:\n  config.expectile: 0.123"
    ):
        start(seeds_sweep(tmp_path, 1, 0), f"--workdir={tmp_path}")
    with pytest.raises(checkpoint.CheckpointError, match=rf"Leave {tmp_path} out of --finished"):
        start(seeds_sweep(tmp_path, 0), f"--workdir={tmp_path / 'other'}", f"--finished={tmp_path}")
    assert counted == [0]


def test_a_finished_run_of_an_edited_agent_of_ones_own_is_refused(
    counted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = (ROOT / "docs" / "example_agent.py").read_text()
    (tmp_path / "swept_agent.py").write_text(code)
    sweep = yaml.safe_load(Path(seeds_sweep(tmp_path, 0, 1)).read_text())
    sweep["parameters"]["agent"] = {"value": "swept_agent"}
    file = write(tmp_path / "sweep.yaml", sweep)
    start(file, f"--workdir={tmp_path / 'runs'}")
    assert "nothing to train" not in capsys.readouterr().out
    start(file, f"--workdir={tmp_path / 'runs'}")
    assert "nothing to train: 2 of 2 programs finished earlier" in capsys.readouterr().out
    (tmp_path / "swept_agent.py").write_text(code.replace("value_loss + policy_loss", "policy_loss"))
    del sys.modules["swept_agent"]
    with pytest.raises(
        checkpoint.CheckpointError, match=r"swept_agent.py has changed since .*\nNothing was trained"
    ):
        start(file, f"--workdir={tmp_path / 'runs'}")
    assert counted == [0, 1]


def test_a_setting_that_a_run_did_not_know_yet_had_the_effect_of_its_default(
    counted: list[int], tmp_path: Path
) -> None:
    """Stored results stay results when an agent learns another setting, and when a script loses one."""
    start(seeds_sweep(tmp_path, 0), f"--workdir={tmp_path}")
    with stored_card(tmp_path) as card:
        del card["config"]["candidates"], card["config"]["network"]["residual"]
        card["settings"]["unroll"] = 1
    start(seeds_sweep(tmp_path, 0), f"--workdir={tmp_path}")
    assert counted == [0]


def test_how_many_devices_share_a_batch_counts_where_each_has_a_part_of_the_log(tmp_path: Path) -> None:
    """Its draws depend on it; elsewhere it changes the speed alone."""

    def place(devices: int, **fixed: Any) -> Path:
        return layout.folder(Program({"agent": "iql", "mesh_data": devices, **fixed}, {}), tmp_path)

    assert place(2) == place(4)
    assert place(2, split_data=True) != place(4, split_data=True)


def test_a_metric_that_no_run_has_stops_the_sweep_and_loses_nothing(
    counted: list[int], tmp_path: Path
) -> None:
    file = seeds_sweep(tmp_path, 0, 1)
    sweep = yaml.safe_load(Path(file).read_text())
    other = write(tmp_path / "other.yaml", sweep | {"metric": METRIC | {"name": "eval/success"}})
    with pytest.raises(records.MetricError, match=r"'eval/success'; it has: eval/return.* Change the metric"):
        start(other, f"--workdir={tmp_path}")
    start(file, f"--workdir={tmp_path}")
    assert counted == [0, 1]


def test_what_another_process_has_open_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has finished meanwhile is in sweep.json all the same."""
    others: list[lifecycle.Session] = []

    def finish_the_other(settings: offline.Settings, session: lifecycle.Session) -> None:
        if others and settings.seed == 1:
            other = others.pop()
            other.write(settings.updates, {"eval/return": np.zeros((settings.seeds, 2))})
            other.finish()

    count_in_place_of_training(monkeypatch, finish_the_other)
    file = seeds_sweep(tmp_path, 0, 1)
    first, second = layout.plan(runs_of(files.read(file)), 16, "offline", tmp_path)
    chosen, config, _ = layout.arguments(Program(runs_of(files.read(file))[0], {}), first)
    taken = common.run(chosen, config, chosen.updates, task="count", identity=("seed",), card={"sweep": {}})
    stored = lambda: json.loads((tmp_path / "sweep.json").read_text())["runs"]
    with lifecycle.session(taken, lifecycle.Start({}, 0, 0.0, False, None)) as other:
        assert locks.holder(first) and not locks.holder(second)
        assert status_of(file, tmp_path, capsys)[0] == "2 programs: 1 running, 1 waiting"
        start(file, f"--workdir={tmp_path}")
        assert [row["parameters"]["seed"] for row in stored()] == [1]
        said = capsys.readouterr()
        assert "left to another process" in said.err and "1 of 2 programs are left to other" in said.out
        others.append(other)
        shutil.rmtree(second)
        start(file, f"--workdir={tmp_path}")
        assert [row["parameters"]["seed"] for row in stored()] == [1, 0]


def test_what_another_process_prepares_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between a program's start and its session models are fitted, which takes hours: not by all workers at once."""
    seen = []

    def work_elsewhere(settings: offline.Settings) -> None:
        if settings.seed == 0:
            seen.append(status_of(file, tmp_path, capsys)[0])
            start(file, f"--workdir={tmp_path}")
            seen.append(capsys.readouterr().err)

    trained = count_in_place_of_training(monkeypatch, lambda settings, session: None, work_elsewhere)
    file = seeds_sweep(tmp_path, 0, 1)
    start(file, f"--workdir={tmp_path}")
    assert trained == [0, 1] and seen[0] == "2 programs: 1 running, 1 waiting"
    assert "left to another process" in seen[1]
    assert status_of(file, tmp_path, capsys)[0] == "2 programs: 2 done"


# ---- the budget ----------------------------------------------------------------------------------------------------


def test_a_budget_ends_a_sweep_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of its second program, whose session opens after the time is up."""
    endless = [True]

    def wait(settings: offline.Settings, session: lifecycle.Session) -> None:
        while endless[0] and settings.seed == 1 and not session.stopping:
            pass

    trained = count_in_place_of_training(monkeypatch, wait)
    monkeypatch.setattr(training, "_ALARM", 0.05)
    file = seeds_sweep(tmp_path, 0, 1, 2)
    start(file, f"--workdir={tmp_path}", "--budget=0.5s")
    assert "the budget of 0.5s is spent; the same command continues" in capsys.readouterr().out
    assert 2 not in trained
    endless.clear()
    endless.append(False)
    start(file, f"--workdir={tmp_path}", "--budget=1h")
    assert status_of(file, tmp_path, capsys)[0] == "3 programs: 3 done"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5d", 129600), ("1h30m", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert sweeps.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2 h", "2H", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        sweeps.duration(text)


def test_the_rest_is_estimated_from_what_is_done(counted: list[int], tmp_path: Path) -> None:
    start(seeds_sweep(tmp_path, 0), f"--workdir={tmp_path}")
    (result,) = tmp_path.glob(f"*/{log.RESULT}")
    result.write_text(json.dumps(json.loads(result.read_text()) | {"wall_seconds": 100.0}))
    runs = runs_of(files.read(seeds_sweep(tmp_path, 0, 1, 2)))
    planned = layout.plan(runs, 16, "offline", tmp_path)
    *_, rest = records.status(planned)
    assert rest == "the rest takes one process about 0:03:20 at the speed so far"
    # A result of the same task whose data were others is said.
    first, second, _ = planned
    shutil.copytree(first, second)
    for place, digest in ((second, "one"), (first, "one"), (first, "another")):
        assert not list(records.other_data(planned))
        log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | {"digest": digest})
    (said,) = records.other_data(planned)
    assert said.startswith("not the same data: ") and "had 2 versions when its programs were trained" in said


@pytest.mark.parametrize(
    ("resumed", "last", "seconds"),
    [
        ([], 0, 0.0),
        ([], 100, 1000.0),
        ([(100, 5000)], 100, 1000.0),  # no line yet
        ([(100, 5000)], 110, 55.0),  # ten steps in five seconds
        ([(100, 5000), (100, 7000)], 100, 1000.0),  # nor of the session before
        ([(40, 500), (100, 5000)], 90, 750.0),  # sixty steps in 500 seconds, the last ten without a line
        ([(60, 5000)], 60, 0.0),  # its checkpoint is not there
    ],
)
def test_the_time_of_a_run_is_of_the_session_that_trained(
    resumed: list[tuple[int, int]], last: int, seconds: float, tmp_path: Path
) -> None:
    """A session that has just resumed has written the metrics again and trained nothing."""

    def at(second: int) -> str:
        return datetime.fromtimestamp(second, UTC).isoformat()

    sessions = [{"step": step, "started": at(second)} for step, second in resumed]
    log.write_json(tmp_path / log.CONFIG, {"started": at(0), "resumed": sessions})
    (tmp_path / log.METRICS).write_text("".join(f'{{"step": {step}}}\n' for step in range(0, last + 1, 10)))
    written = resumed[-1][1] + 5 if resumed else 1000
    os.utime(tmp_path / log.METRICS, (written, written))
    saved = tmp_path / run_folder.CHECKPOINTS / "100"
    saved.mkdir(parents=True)
    os.utime(saved, (1000, 1000))
    assert records._seconds(tmp_path) == pytest.approx(seconds)


@pytest.mark.slow
def test_each_agent_has_a_speed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"bc": 10.0, "iql": 100.0, "cql": 0.0}  # of one run of 20 updates; nobody knows CQL's

    def state(program: Program, place: Path) -> records.State:
        spent = seconds[program.fixed["agent"]] if program.fixed["seed"] == 0 else 0.0
        return records.State("done", 20, 20, spent) if spent else records.State("waiting", 0, 20, 0.0)

    monkeypatch.setattr(records, "state", state)
    runs = [{"agent": agent, "seed": seed} for agent in seconds for seed in (0, 1)]
    runs.append({"agent": "iql", "seed": 2})
    planned = {Path(f"{i}"): Program(run, {}) for i, run in enumerate(runs)}
    *_, rest = records.status(planned)  # 10, twice 100, and twice the mean of both
    assert rest.startswith("the rest takes one process about 0:05:20 at the speed so far, of cql at the mean")
