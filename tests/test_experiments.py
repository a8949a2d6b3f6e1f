"""The scripts as a user meets them: what they leave, what they say, and what interruptions cannot change."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import point_mass  # noqa: F401  (registers its environment)
import pytest
from absl import flags as absl_flags
from jax.experimental import multihost_utils

from experiments import (
    checks,
    common,
    flags,
    goals,
    interaction,
    language,
    mbpo,
    model_based,
    notes,
    offline,
    online,
    presets,
    quickstart,
)
from rl import (
    acting,
    agents,
    checkpoint,
    data,
    fitted_q,
    lifecycle,
    log,
    run_folder,
    shard,
    statistics,
    train,
)
from rl.agents import iql, rebrac
from rl.agents.optimisers import Adam
from rl.data import DataError, recipes
from rl.dynamics import value_aware
from rl.networks import mlp
from rl.networks.layers import Architecture
from rl.programs.pool import IsolationError
from rl.replay import chunks
from rl.replay.dataset import Dataset, value_bounds
from rl.replay.goals import Goals, Hindsight
from rl.replay.transform import Transform
from rl.shard import hosts
from rl.types import Spec, State, Transition
from rl.values import heads

ROOT = Path(__file__).parent.parent
DISCRETE = ("bc", "cql", "dqn", "iql")
CONTINUOUS = (
    *("arsq", "bc", "cql", "cqn", "deas", "edac", "fql", "ifql", "iql", "rebrac", "sac", "sac_n", "td3"),
    "td3_bc",
)
LARGE = ("cqn", "fql", "rebrac")  # slow to compile
# ifql has the values of iql and the flow of fql, and deas is its code; sac and td3 are the code of sac_n and td3_bc.
# What the script does for cql, edac and sac_n it does for the others; test_contracts has their updates
SHARED = ("cql", "deas", "edac", "ifql", "sac", "sac_n", "td3")
LEFT_OUT = dict.fromkeys(LARGE, pytest.mark.slow) | dict.fromkeys(SHARED, pytest.mark.long)
TINY = {"seeds": 2, "updates": 6, "eval_every": 3, "batch_size": 8, "tensorboard": False}
EVALUATED = {"environment": "point_mass:PointMass-v0", "eval_episodes": 2, "eval_processes": 0}


def config(agent: str = "iql", **changes: Any) -> Any:
    sizes = {"hidden": (8, 8), "critics": 2, "samples": 2, "levels": 2, "bins": 3, "features": 4}
    sizes |= {"flow_steps": 2}
    small = sizes | changes
    fields = {field.name for field in dataclasses.fields(agents.get(agent).Config)}
    return agents.get(agent).Config(**{name: value for name, value in small.items() if name in fields})


def settings(workdir: Path, **changes: Any) -> offline.Settings:
    return offline.Settings(**TINY | {"workdir": str(workdir)} | changes)


def state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, without the clock."""
    from orbax.checkpoint import v1 as ocp

    arrays = ocp.load(workdir / "checkpoints" / str(step) / "arrays")
    return {name: np.asarray(value) for name, value in arrays.items() if name != "seconds"}


def assert_same_bits(one: Path, other: Path, step: int) -> None:
    left, right = state(one, step), state(other, step)
    assert left.keys() == right.keys() and len(left) > 10
    for name, value in left.items():
        assert value.tobytes() == right[name].tobytes(), name
    assert (one / log.METRICS).read_bytes() == (other / log.METRICS).read_bytes()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(*arguments: str, module: str = "experiments.offline", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "CI": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a signal to its group is a Ctrl-C in its terminal
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def arguments(chosen: offline.Settings, *agent_flags: str) -> list[str]:
    return [f"--{name}={value}" for name, value in dataclasses.asdict(chosen).items()] + list(agent_flags)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- every script runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        *(pytest.param(agent, "continuous", marks=LEFT_OUT.get(agent, [])) for agent in CONTINUOUS),
        *((agent, "discrete") for agent in DISCRETE),
    ],
)
def test_offline_trains_every_agent_for_three_updates(agent: str, kind: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, agent=agent, dataset=f"synthetic-{kind}", updates=3)
    assert offline.run(chosen, config(agent, hidden=(8,)))["updates"] == 3
    (row,) = log.read(tmp_path)
    assert row.pop("step") == 3
    assert all(np.shape(value) == (2,) and np.isfinite(value).all() for value in row.values())


def test_every_agent_is_tried() -> None:
    assert sorted({*CONTINUOUS, *DISCRETE, *agents.GOALS}) == sorted(agents.AGENTS)


@pytest.mark.slow
@pytest.mark.command
def test_quickstart_compares_two_agents_on_data_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ogbench")
    small = {name: dataclasses.replace(large, hidden=(8, 8)) for name, large in quickstart.CONFIGS.items()}
    monkeypatch.setattr(quickstart, "CONFIGS", small)
    chosen = quickstart.Settings(
        transitions=2000, seeds=2, updates=3, eval_every=3, eval_episodes=2, workdir=str(tmp_path)
    )
    result = quickstart.run(chosen)
    assert json.loads((tmp_path / log.RESULT).read_text())["agents"].keys() == {"bc", "iql"}
    for agent in ("bc", "iql"):
        assert result["agents"][agent]["updates"] == 3
        assert np.shape(log.series(tmp_path / agent, "eval/success")[1]) == (1, 2, 2)
        assert (tmp_path / agent / "curve.png").exists()
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert result["agents"]["bc"]["digest"] == result["agents"]["iql"]["digest"]


def test_quickstart_says_nothing_of_intervals_that_one_seed_has_not() -> None:
    scores = lambda each: {name: {"last": statistics.summary(each)} for name in ("success", "return")}
    several = {name: {"scores": scores([0.0, 1.0])} for name in quickstart.CONFIGS}
    one = {name: {"scores": scores([0.5])} for name in quickstart.CONFIGS}
    assert "overlap" in [*quickstart.summary({"agents": several, "intervals_apart": False}, 2)][-1]
    lines = [*quickstart.summary({"agents": one, "intervals_apart": False}, 1)]
    assert not any("nan" in line or "overlap" in line for line in lines) and "not known" in lines[-1]


def test_quickstart_calls_intervals_apart_only_if_they_are() -> None:
    def result(low: float, high: float) -> dict[str, Any]:
        return {"scores": {"return": {"last": {"ci95": [low, high]}}}}

    assert quickstart._apart(result(0, 1), result(1.1, 2))
    assert not quickstart._apart(result(0, 1), result(0.9, 2))
    assert not quickstart._apart(result(1.1, 2), result(0, 1))
    assert not quickstart._apart(result(np.nan, np.nan), result(0, 1))


# ---- flags --------------------------------------------------------------------------------------------


def parse(*argv: str) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    flags.parser(offline.Settings(), lambda name: agents.get(name).Config(), values)(["offline", *argv])
    return values


@pytest.mark.parametrize(
    "owner",
    [
        *(script.Settings for script in (goals, language, model_based, offline, online, quickstart)),
        *(module.Config for module in (*agents.AGENTS.values(), *language.AGENTS.values())),
        Adam,
        Architecture,
        Goals,
        Hindsight,
        value_aware.Settings,
    ],
    ids=lambda owner: f"{owner.__module__}.{owner.__name__}",
)
def test_every_setting_says_what_it_is(owner: type) -> None:
    comments = flags.comments(owner)
    for field in dataclasses.fields(owner):
        assert comments.get(field.name), f"{owner.__module__}.{field.name} has no comment"


def test_help_names_every_choice() -> None:
    comments = flags.comments(offline.Settings)
    assert all(name in comments["agent"] for name in agents.AGENTS if name not in agents.GOALS)
    assert all(name in flags.comments(goals.Settings)["agent"] for name in agents.GOALS)
    assert all(name in comments["head"] for name in heads.NAMES)
    losses = flags.comments(mbpo.Settings)["model_loss"].replace("(_rows)", ", anisotropic_rows")
    assert losses.split(", ") == list(value_aware.LOSSES)
    assert "sac" in flags.comments(mbpo.Settings)["agent"]  # spread over lines, and not the inherited one


def test_flags_arrive_with_their_types() -> None:
    values = parse("--agent=cql", "--agent.hidden=8,16", "--agent.max_backup", "--updates=5", "--head_low=-3")
    chosen = flags.read(offline.Settings(), values=values)
    agent_config = flags.read(agents.get("cql").Config(), "agent.", values)
    given = dataclasses.replace(offline.Settings(), agent="cql", updates=5, head_low=-3.0)
    assert repr(chosen) == repr(given)  # NaNs among them differ from themselves
    assert agent_config == dataclasses.replace(agents.get("cql").Config(), hidden=(8, 16), max_backup=True)


def test_flags_reach_the_settings_of_networks_and_optimisers() -> None:
    values = parse(
        "--agent.network.activation=gelu",
        "--agent.policy_optimiser.warm_up=5",
        "--agent.value_optimiser.clip=1",
    )
    chosen, plain = flags.read(iql.Config(), "agent.", values), iql.Config()
    assert chosen == dataclasses.replace(
        plain,
        network=dataclasses.replace(plain.network, activation="gelu"),
        policy_optimiser=dataclasses.replace(plain.policy_optimiser, warm_up=5),
        value_optimiser=dataclasses.replace(plain.value_optimiser, clip=1.0),
    )
    assert flags.present(iql.Config(), "agent.", values) == {
        "network.activation": "gelu",
        "policy_optimiser.warm_up": 5,
        "value_optimiser.clip": 1.0,
    }
    assert flags.with_fields(plain, dataclasses.asdict(chosen)) == chosen  # what a run's card holds
    dotted = {"network.dropout": 0.1, "network": {"activation": "tanh"}, "hidden": [8]}
    of_file = flags.with_fields(plain, dotted)
    assert (of_file.network.dropout, of_file.network.activation, of_file.hidden) == (0.1, "tanh", (8,))
    assert of_file.network.initialiser == plain.network.initialiser


def test_flags_as_they_are_written_give_the_same_settings() -> None:
    """Numbers, lists, switches either way, nested dataclasses, and NaN, which is not itself."""
    chosen = dataclasses.replace(
        offline.Settings(), seeds=3, clip_actions=True, tensorboard=False, reward_shift=-1e-7
    )
    config = flags.with_fields(iql.Config(), {"hidden": (8, 16), "network.activation": "gelu"})
    words = [
        *flags.written(chosen, offline.Settings()),
        *flags.written(config, iql.Config(), "agent."),
    ]
    assert len(words) == 6
    values = parse(*words)
    assert str(flags.read(offline.Settings(), values=values)) == str(chosen)
    assert flags.read(iql.Config(), "agent.", values) == config


def test_whole_numbers_may_have_an_exponent() -> None:
    chosen = flags.read(offline.Settings(), values=parse("--updates=1e6", "--agent.hidden=8"))
    assert chosen.updates == 1_000_000 and type(chosen.updates) is int


def test_an_agent_may_be_named_in_a_file_of_flags(tmp_path: Path) -> None:
    """Its hyper-parameters are flags then, too."""
    (tmp_path / "flags").write_text("--agent=cql\n--agent.weight=3\n")
    values = parse(f"--flagfile={tmp_path / 'flags'}")
    assert flags.read(agents.get("cql").Config(), "agent.", values).weight == 3


def test_a_number_that_no_program_can_count_to_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--batch_size=1e30")
    assert "--batch_size" in capsys.readouterr().err


def test_what_an_agent_refuses_is_named_by_its_flag() -> None:
    with pytest.raises(ValueError, match=r"^--agent.hidden=.*: a transformer has blocks of one width"):
        common.learner("iql", config("iql", hidden=(5,)), Spec((4, 3), 2), heads.make("scalar"))


def test_defaults_are_what_parsing_nothing_gives() -> None:
    values = parse()
    assert str(flags.read(offline.Settings(), values=values)) == str(offline.Settings())
    assert flags.read(iql.Config(), "agent.", values) == iql.Config()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--agnt=iql"], "did you mean --agent?"),
        (["--agent.expectil=0.9"], "did you mean --agent.expectile?"),
        (["--agent=cql", "--agent.expectile=0.9"], "--agent.expectile: there are --agent.discount, "),
        (["--agent.network.activatoin=gelu"], "did you mean --agent.network.activation?"),
        (["--agent.netwrk.activation=gelu"], "did you mean --agent.network.activation?"),
        (["--agent.network.width=3"], "--agent.network.width: there are --agent.network.activation, "),
        (["--agent=iqll"], "did you mean 'iql'"),
        (["--agent", "rebrak"], "did you mean 'rebrac'"),
        (["--agent=no.such.module"], "No module named 'no'"),
        (["--agent=no.such.module"], "is looked for from the current folder and in the Python path"),
        (["--agent=docs.example_agents"], "did you mean 'docs.example_agent'"),
        (["--agent=rl.statistics"], "needs a Config and a make"),
        (["--agent=docs/example_agent.py"], "not by its file, --agent=docs.example_agent, from"),
        (["--agent=./my_agent.py"], "not by its file, --agent=my_agent, from"),
        (["--updates=many"], "error: --updates=many is not a whole number\n"),
        (["--updates=1e-6"], "error: --updates=1e-6 is not a whole number\n"),
        (["--seed=-1e1"], "--seed=-1e1: -10 is not a non-negative integer\n"),
        (["--learning_rate=1e-3"], "did you mean --agent.learning_rate?"),
        (["--lerning_rate=1e-3"], "did you mean --agent.learning_rate?"),
        (["--agent.gamma=0.9"], "did you mean --agent.discount?"),
        (["--agent.tau=0.9"], "did you mean --agent.target_rate?"),
        (["--iql_tau=0.9"], "did you mean --agent.expectile?"),
        (["--n_steps=100"], "did you mean --updates?"),
        (["--network.activation=gelu"], "did you mean --agent.network.activation?"),
        (["--env=Hopper-v5"], "did you mean --environment?"),
        (["--steps=100"], "did you mean --updates?"),
        (["--head_low=deep"], "error: --head_low=deep is not a number\n"),
        (["--agent.hidden=8,x"], "--agent.hidden=['8', 'x']: must be whole numbers, such as 256,256"),
        (["--normalize_observations=perhaps"], "=perhaps is neither true nor false\n"),
        (["agent=iql"], "not a flag: agent=iql. Flags are written --name=value"),
    ],
)
def test_a_mistyped_command_ends_with_the_nearest_right_one(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    stderr = capsys.readouterr().err
    assert message in stderr and "--help" in stderr


@pytest.mark.parametrize(
    ("script", "name", "meant"),
    [
        (online, "environment", "env"),
        (online, "updates", "steps"),
        (online, "dataset", "offline_data"),
        (model_based, "batch_size", "agent.batch_size"),
        (model_based, "updates", "epochs"),
    ],
)
def test_a_flag_of_another_script_is_answered_with_what_means_the_same(
    script: Any, name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not with what is spelt alike: --n_step, --head_size, --model_updates."""
    with pytest.raises(SystemExit):
        flags.parser(script.Settings(), getattr(script, "config", common.config), absl_flags.FlagValues())(
            ["script", f"--{name}=1"]
        )
    assert f"unknown flag --{name}: did you mean --{meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"updates": 2.5}, "updates must be of type int, not 2.5"),
        ({"updates": True}, "updates must be of type int, not True"),
        ({"overwrite": 1}, "overwrite must be of type bool, not 1"),
        ({"head_lo": 1.0}, "no setting 'head_lo': did you mean 'head_low'?"),
    ],
)
def test_wrong_values_from_a_file_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        flags.with_fields(offline.Settings(), given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"network.activatoin": "gelu"},
            "no setting 'network.activatoin': did you mean 'network.activation'?",
        ),
        ({"network": {"dropot": 0.1}}, "no setting 'dropot': did you mean 'dropout'?"),
        ({"network": "gelu"}, "no setting 'network'"),
        ({"network.dropout": "much"}, "network.dropout must be of type float, not 'much'"),
        ({"network.activation": "relo"}, "network.activation='relo': did you mean 'relu'?"),
    ],
)
def test_wrong_settings_of_networks_from_a_file_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        flags.with_fields(iql.Config(), given)


@pytest.mark.parametrize("value", ["8,x", [8, 2.5], [8, 2.5, "a"], 8])
def test_widths_must_be_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="hidden must be a list of whole numbers"):
        flags.with_fields(iql.Config(), {"hidden": value})


@dataclasses.dataclass(frozen=True)
class Own:
    """What an agent of one's own may have in its Config."""

    expectiles: tuple[float, ...] = (0.5, 0.9)
    names: tuple[str, ...] = ("x",)
    clip: float | None = None
    count: int | None = 3
    tau: float = 1
    mode: Literal["a", "b"] = "a"


def test_fields_of_an_own_agent_are_read_by_their_annotations() -> None:
    values = absl_flags.FlagValues()
    flags.define(Own(), "agent.", values)
    argv = (
        "--agent.expectiles=0.25,0.75 --agent.names=a,b --agent.clip=0.5 --agent.count=none --agent.tau=0.5"
    )
    values(["script", *argv.split()])
    chosen = flags.read(Own(), "agent.", values)
    assert chosen == Own((0.25, 0.75), ("a", "b"), 0.5, None, 0.5)
    # As an agent of a wandb sweep has lists.
    values(["script", "--agent.expectiles=[0.25, 0.75]", "--agent.names=['a', 'b']", "--agent.clip=1"])
    assert flags.read(Own(), "agent.", values) == dataclasses.replace(chosen, clip=1.0)
    for config in (Own(), chosen):  # as a run's card has them
        assert flags.with_fields(Own(), json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("kind", "default", "shown"),
    [
        (dict, {}, "dict"),
        (tuple[int, str], (1, "a"), "tuple[int, str]"),
        (tuple[int, ...] | None, None, "tuple[int, ...] | None"),
    ],
)
def test_a_field_of_which_no_flag_can_be_made_is_named(kind: Any, default: Any, shown: str) -> None:
    config = dataclasses.make_dataclass(
        "Config", [("odd", kind, dataclasses.field(default_factory=lambda: default))]
    )
    message = re.escape(f"no flag can be made of the field 'odd', which is {shown}: fields are bool")
    for read in (flags.check, lambda config: flags.with_fields(config, {"odd": default})):
        with pytest.raises(ValueError, match=message):
            read(config())


def test_a_field_that_nobody_can_choose_is_refused_before_a_run_has_it_on_its_card() -> None:
    derived = dataclasses.field(init=False, default=0)
    config = dataclasses.make_dataclass("Config", [("area", int, derived)])
    with pytest.raises(ValueError, match=r"'area' has init=False, .* make it a property"):
        flags.check(config())


def test_help_whose_reader_has_closed_the_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``--help | head``."""

    class Help(absl_flags.FlagValues):
        def __call__(self, argv: Sequence[str], known_only: bool = False) -> list[str]:
            print("help " * 100_000)
            raise SystemExit(1)

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as stopped:
            flags.parser(values=Help())(["script", "--help"])
        monkeypatch.undo()
        assert stopped.value.code == 0  # and closing the file does not fail


def test_a_field_without_a_default_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.make_dataclass("Config", [("discount", float), ("scale", float, 1.0)])
    monkeypatch.setattr(agents, "get", lambda name: types.SimpleNamespace(Config=config))
    with pytest.raises(
        ValueError, match="--agent=mine: every field of its Config needs a default; discount has none"
    ):
        common.config("mine")


@pytest.mark.long
@pytest.mark.command
def test_at_the_command_line() -> None:
    """The wiring of the above: exit codes, streams, and no traceback."""
    wrong_flag = start("--agent.expectil=0.9")
    wrong_data = start("--dataset=hoper-medium-v2")
    code, _, stderr = end(wrong_flag)
    assert code == 2 and "agent.expectile" in stderr and "Traceback" not in stderr
    code, _, stderr = end(wrong_data)
    assert code == 1 and "did you mean hopper-medium-v2" in stderr and "Traceback" not in stderr


# A process of its own for all scripts: every one of them is started in a fork, after what all of them import.
HELP = """
import json, os, runpy, sys
import experiments.language, experiments.mbpo, experiments.model_based, experiments.online, experiments.studies

def helped(words, out):
    os.dup2(out.fileno(), 1)
    sys.argv = [words[0], *words[1:], "--help"]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    return 0

answers = {}
for words in json.loads(sys.argv[1]):
    with open(sys.argv[2], "w+") as out:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = helped(words, out)
                sys.stdout.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        answers[words[0]] = code, out.read()
print(json.dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.command
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_every_script_has_help(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    files = [
        path for folder in ("experiments", "benchmarks", "sweeps") for path in root.glob(f"{folder}/**/*.py")
    ]
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in files
        if '__name__ == "__main__"' in path.read_text()
    ]
    papers = [name for name in names if name.startswith("experiments.papers.")]
    assert len(papers) > 15 and len(names) > 30
    for name in papers:  # one command, tried with one of them
        assert "\n    studies.main(Settings(), run" in (root / f"{name.replace('.', '/')}.py").read_text(), (
            name
        )
    names = [name for name in names if name not in papers[1:]]
    commands = json.dumps(
        [[name, *(["--agent=cql"] if name == "experiments.offline" else [])] for name in names]
    )
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HELP, commands, str(tmp_path / "out")],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout)
    assert {name: code for name, (code, _) in answers.items() if code} == {}
    shown = {name: text for name, (_, text) in answers.items()}
    listing = shown.pop("experiments.studies")  # no command: it lists those that are studies
    assert all(f"python -m {name} " in listing for name in papers)
    for name, text in shown.items():
        assert re.search(r"^  --(\[no\])?\w+:", text, re.MULTILINE), name
    text = shown["experiments.offline"]
    assert "--agent.target_gap" in text and "--agent.expectile:" not in text and "--eval_episodes" in text
    main, heading, of_agent = text.partition(
        "\nhyper-parameters of --agent=cql:\n"
    )  # after the flags of the script
    assert (
        heading
        and "--dataset:" in main
        and "--agent.target_gap" in of_agent
        and "--agent." not in main[-2000:]
    )
    assert {"--[no]status:", "--budget:"} <= set(shown["sweeps.run"].split())
    layout = {"--set:", "--workdir:", "--count:", "--seed:", "--together:", "--finished:"}  # flags of both
    assert all(layout <= set(shown[name].split()) for name in ("sweeps.run", "experiments.report"))
    text = shown["experiments.collect"]
    assert "Examples:" in text and "--transitions" in text
    assert {*recipes.RECIPES, *recipes.LOCOMOTION} <= set(text.split())


# ---- settings that cannot be run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds=0 must be at least 1"),
        ({"updates": -3}, "--updates=-3 must be at least 1"),
        ({"eval_every": 0}, "--eval_every=0 must be at least 1"),
        ({"batch_size": 0}, "--batch_size=0 must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0, not -1"),
        ({"eval_episodes": 1}, "--eval_episodes=1: give 0 for none or at least 2"),
        ({"eval_every": 4}, "--updates=6 is not a multiple of --eval_every=4: .* at most 6"),
        ({"dataset": "synthetic-continous"}, "did you mean synthetic-continuous"),
        ({"head": "hlgauss"}, "choose one of scalar, two_hot, hl_gauss"),
        ({"agent": "dqn"}, "'dqn' cannot act in continuous actions: use sac, td3"),
        *(({"agent": name}, "have none: run it with python -m experiments.goals") for name in agents.GOALS),
        ({"mesh_seed": 3}, "devices do not divide into seed=3.*--mesh_seed and --mesh_data whose product is"),
        (
            {"split_data": True},
            "--split_data: one device holds all of the log here, .*: give --mesh_data above 1",
        ),
        ({"split_data": True, "chunk": 4}, "--split_data and --chunk=4 cannot be combined: the actions of a"),
        ({"split_data": True, "robust": "kl"}, "--split_data and --robust=kl cannot be combined: its model"),
        (
            {"split_data": True, "policy_estimates": 5},
            "--split_data and --policy_estimates=5 cannot be combined: they are fitted to all of the log",
        ),
        ({"head": "c51", "head_size": 1}, "--head_size=1: --head=c51 needs at least 2 outputs"),
        ({"head": "c51", "head_low": -math.inf, "head_high": 1.0}, "--head_low=-inf must be finite"),
        ({"head": "hl_gauss", "head_sigma": 0.0}, "--head_sigma=0: give a finite number of at least 0.5 bin"),
        ({"head": "hl_gauss", "head_sigma": math.inf}, "--head_sigma=inf: give a finite number"),
        (
            {"head": "hl_gauss", "head_sigma": 2.0, "head_size": 17},
            "needs at least 18 outputs with --head_sigma=2",
        ),
        (
            {"head": "c51", "head_low": 5.0, "head_high": -5.0},
            "--head_low=5 and --head_high=-5: the support of --head=c51 needs a --head_low that is below",
        ),
        (
            {"head": "c51", "head_low": 5.0, "head_high": -5.0, "dataset": "nowhere"},
            "--head_low=5 and --head_high=-5: the support",
        ),
        ({"head": "quantile", "head_kappa": -1.0}, "--head_kappa=-1 must be finite, and at least 1e-6"),
        ({"head": "c51", "head_low": 1e9}, r"--head_low=1e\+09 and --head_high=.* \(from the data\): "),
        (
            {"agent": "iql", "updates": 1_000_020, "eval_every": 20},
            "--agent.policy_optimiser.decay_updates=1000000: the learning rate is 0 from there on, .* 1000020",
        ),
        ({"chunk": 0}, "--chunk=0 must be at least 1"),
        ({"chunk": 4, "replan_every": 5}, "--replan_every=5 must lie between 0 and --chunk=4"),
        ({"chunk": 4, "robust": "kl"}, "--robust=kl and --chunk=4 cannot be combined"),
        ({"policy_estimates": -5}, "--policy_estimates must be at least 0, not -5"),
        ({"reward_scale": "0"}, "--reward_scale=0: all rewards would be the same"),
        ({"reward_shift": math.nan}, "--reward_shift=nan must be finite"),
        ({"reward_shift": -math.inf}, "--reward_shift=-inf must be finite"),
        ({"chunk": 4, "policy_estimates": 5}, "--policy_estimates=5 and --chunk=4 cannot be combined"),
        ({"n_step": 0}, "--n_step=0 must be at least 1"),
        (
            {"n_step": 3, "chunk": 4},
            "--n_step=3 and --chunk=4 cannot be combined: leave --n_step out, or give --chunk=1",
        ),
        ({"n_step": 3, "td_lambda": 1.5}, "--td_lambda=1.5 must be between 0"),
        ({"td_lambda": 0.5}, "--td_lambda=0.5 mixes returns over 1 to --n_step steps, and that is 1"),
        ({"n_step": 3, "td_lambda": 0.5, "split_data": True}, "--split_data and --td_lambda=0.5 cannot"),
        ({"n_step": 3, "robust": "kl"}, "--n_step=3 and --robust=kl cannot be combined"),
        ({"chunk": 4000}, "--chunk=4000 is longer than every episode of the data: the longest has"),
        ({"chunk": 4, "dataset": "synthetic-discrete"}, "--chunk=4: chunks are of continuous actions"),
        ({"reward_scale": "much"}, "--reward_scale=much is neither a number nor return_range"),
        # Most of its single steps have a next action, and few of its chunks.
        ({"agent": "rebrac", "chunk": 26}, "critic_cloning=0.01 compares .* only 27% .* or shorter chunks"),
        ({"agent": "rebrac", "n_step": 50}, "critic_cloning=0.01 compares .* only 0% .* over fewer steps"),
        (
            {"environment": "Pendulum-v1"},
            "'Pendulum-v1' does not fit the data: it has observations of 3 numbers and 1 continuous action, they have "
            "observations of 4 numbers and 2 continuous actions. Give the --environment",
        ),
        ({"environment": "Pendulm-v1"}, "the nearest names are Pendulum-v1"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_touched(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / log.CONFIG).write_text('{"config": {}, "resumed": []}')  # as of a run
    (tmp_path / log.METRICS).write_text('{"step": 3}\n')
    before = files(tmp_path)
    chosen = settings(tmp_path, **{"overwrite": True} | changes)
    with pytest.raises(ValueError, match=message):
        offline.run(chosen, config(chosen.agent))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("script", "changes", "why"),
    [
        (offline, {"robust": "kl"}, "the adversary could end no episode"),
        (offline, {"n_step": 3}, "with the discount of one"),
        (offline, {"chunk": 3}, "with the discount of one"),
        (online, {"n_step": 3}, "with the discount of one"),
        (online, {"chunk": 3}, "with the discount of one"),
    ],
)
def test_terminations_are_not_ignored_where_values_beyond_them_would_be_wrong(
    script: Any, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    nowhere = {"dataset": "nowhere"} if script is offline else {"env": "nowhere-v0"}
    chosen = script.Settings(agent="cqn", workdir=str(tmp_path / "run"), **nowhere, **changes)
    flags = " ".join(f"--{name}={value}" for name, value in changes.items())
    with pytest.raises(
        ValueError, match=f"--agent.ignore_terminals and {flags} cannot be combined: .*{why}; leave"
    ):
        script.run(chosen, agents.get("cqn").Config(ignore_terminals=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        *((offline, {"n_step": 3}), (offline, {"chunk": 3}), (offline, {"policy_estimates": 5})),
        *((offline, {"head": "c51"}), (online, {"n_step": 3}), (online, {"chunk": 3})),
    ],
)
def test_an_agent_without_a_discount_is_refused_where_there_are_returns(
    script: Any, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gamma may have another name. Cloning has none, and says so."""
    module = types.SimpleNamespace(Config=agents.get("bc").Config, make=agents.get("bc").make)
    monkeypatch.setitem(agents.AGENTS, "mine", module)
    nowhere = {"dataset": "nowhere"} if script is offline else {"env": "nowhere-v0"}
    chosen = script.Settings(agent="mine", workdir=str(tmp_path / "run"), **nowhere, **changes)
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"--{name}={value} is of discounted returns.* no field discount"):
        script.run(chosen, module.Config())
    module.IGNORES_REWARDS = True
    unused = "--head=c51: --agent=mine only clones and has no value" if name == "head" else "nowhere"
    with pytest.raises(ValueError, match=unused):
        script.run(chosen, module.Config())


@pytest.mark.slow
def test_a_sweep_of_discounts_has_a_support_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base's own discount, 0.5, is nobody's."""
    dataset = data.load("synthetic-continuous").dataset
    low, high = zip(*(value_bounds(dataset, discount) for discount in (0.9, 0.999)), strict=True)
    chosen = settings(tmp_path, agent="iql", head="two_hot", head_size=5, seeds=1, updates=1, eval_every=1)
    result = offline.run(chosen, config(discount=0.5), {"discount": [0.9, 0.999]})
    assert result["support"] == (min(low), max(high))
    assert (
        f"the support of all 2 runs of the sweep is [{min(low):g}, {max(high):g}]" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("sweep", "changes", "message"),
    [
        ({"temperature": [0.0, 3.0]}, {}, "sweep of temperature over .*: 0 may switch a term off"),
        (
            {"discount": [0.9, 0.99]},
            {"policy_estimates": 5},
            "--policy_estimates compares policies by one discount",
        ),
        ({"discount": [0.9], "expectile": [0.7, 0.9]}, {}, "equally many values"),
        (
            {"discount": [0.9, 0.99]},
            {"chunk": 4},
            "--chunk=4: returns over several steps are made with one discount",
        ),
        (
            {"deviations": [0.5, 2.0]},
            {"agent": "td3"},
            "sweep of deviations: it changes nothing, .* would be the same: it is of aggregation=pessimistic",
        ),
        ({"chunk_discount": [0.5, 0.9]}, {"agent": "deas"}, "sweep of chunk_discount: .* it is of --chunk"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(
    sweep: dict[str, list[float]], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """By the function, whoever calls it."""
    chosen = settings(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=message):
        offline.run(chosen, config(chosen.agent), sweep)
    assert not (tmp_path / "run").exists()


def test_the_flag_of_a_refused_file_is_one_that_scripts_have(tmp_path: Path) -> None:
    """Transitions in no order are refused with a flag, by which offline and online runs then read them."""
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    log = {
        "observations": rng.normal(size=(40, 3)),
        "next_observations": rng.normal(size=(40, 3)),
        "actions": rng.uniform(-1, 1, (40, 1)),
        "rewards": np.zeros(40),
        "terminals": np.zeros(40),
    }
    path = tmp_path / "log.hdf5"
    with h5py.File(path, "w") as file:
        file.update(log)
    for read in (
        lambda **fields: offline.problem(settings(tmp_path, dataset=str(path), **fields), [config()]).loaded,
        lambda **fields: online.mixture(online.Settings(offline_data=str(path), **fields), Spec((3,), 1)),
    ):
        with pytest.raises(DataError, match=r"for 39 of 39 steps .*--shuffled"):
            read()
        assert read(shuffled=True).dataset.last.all()
    of_log = settings(tmp_path, dataset=str(path), shuffled=True)
    with pytest.raises(ValueError, match=r"--policy_estimates=9 estimates .* in no order: leave it out"):
        offline.problem(dataclasses.replace(of_log, policy_estimates=9), [config()])
    shuffled = offline.problem(of_log, [config()]).dataset
    for flag in ("n_step", "chunk"):
        with pytest.raises(ValueError, match=rf"--{flag}=3 is of steps .* in no order: leave it out"):
            common.rows(dataclasses.replace(of_log, **{flag: 3}), config(), shuffled)
    with pytest.raises(ValueError, match=r"--chunk=3 is of steps .* in no order"):  # and not of one step
        common.value_bounds(shuffled, 3, 0.99, 0.9)


def test_supports_hold_the_ends_that_targets_add(tmp_path: Path) -> None:
    """Of a log without terminations: robust targets and rollouts end episodes by the task's rule, where it has one."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "hopper-mine.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((40, 11), np.float32)
        file["actions"] = np.zeros((40, 3), np.float32)
        file["rewards"] = np.linspace(2.5, 3.5, 40, dtype=np.float32)
        file["terminals"] = np.zeros(40, bool)
        file["timeouts"] = np.arange(40) % 20 == 19
    shutil.copy(path, tmp_path / "halfcheetah-mine.hdf5")

    def low(script: Any, task: str, of_agent: Any, **fields: Any) -> float:
        chosen = script.Settings(dataset=str(tmp_path / f"{task}-mine.hdf5"), head="hl_gauss", **fields)
        problem = script.problem(chosen, [of_agent] if script is offline else of_agent)
        return problem.support[0]

    plain, of_model = config(discount=0.99), model_based.config("mobile")
    without = dataclasses.replace(of_model, backup_entropy=False, uncertainty="")
    assert low(offline, "hopper", plain) > 200 and low(offline, "halfcheetah", plain, robust="tv") > 200
    assert low(offline, "hopper", plain, robust="tv") == pytest.approx(2.5)
    assert low(model_based, "halfcheetah", without) > 200
    assert low(model_based, "hopper", without) == pytest.approx(2.5)


def test_settings_of_images_are_noted_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = config("bc", network=Architecture(shift=4))
    for shape in ((3,), {"view": (8, 8, 3), "speed": (2,)}):
        notes.note_unused_by_agent("offline", offline.Settings(agent="bc"), chosen, "dataset", Spec(shape, 1))
    noted = [line for line in capsys.readouterr().err.splitlines() if "network" in line]
    assert noted == ["note: --agent.network.shift changes nothing: no observation is an image"]


def test_the_length_of_a_schedule_is_noted_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    falling = Adam(schedule="cosine", decay_updates=10)
    chosen = config("iql", critic_optimiser=Adam(decay_updates=10), value_optimiser=falling)
    notes.note_unused_by_agent("offline", offline.Settings(), chosen, "dataset", Spec((3,), 1))
    noted = [line for line in capsys.readouterr().err.splitlines() if "decay_updates" in line]
    assert noted == [
        "note: --agent.critic_optimiser.decay_updates changes nothing: it is of a cosine, and the schedule is constant"
    ]


def test_rollouts_in_a_model_have_no_next_actions_for_rebrac() -> None:
    row = mbpo.rolled_row(Spec((3,), 1))
    agents.check_data("rebrac", rebrac.Config(critic_cloning=0.0), row)
    with pytest.raises(ValueError, match=r"only 0% .* rollouts in a model, .*\): give critic_cloning=0"):
        agents.check_data("rebrac", rebrac.Config(critic_cloning=0.5), row)


@pytest.mark.parametrize(
    ("head", "sigma", "least"),
    [("two_hot", 0.75, 2), ("c51", 0.75, 2), ("quantile", 0.75, 1)]
    + [("hl_gauss", sigma, least) for sigma, least in ((0.5, 6), (0.75, 8), (1.1, 12))],
)
def test_the_smallest_head_is_that_of_the_library(head: str, sigma: float, least: int) -> None:
    assert checks.smallest_head(head, sigma) == least
    heads.make(head, 0.0, 1.0, size=least, sigma_ratio=sigma)
    with pytest.raises(ValueError, match="size"):
        heads.make(head, 0.0, 1.0, size=least - 1, sigma_ratio=sigma)


@pytest.mark.parametrize("episodes", [0, 2])
def test_where_to_evaluate_is_said_to_who_evaluates(
    episodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = data.load("synthetic-continuous")
    for note in ("no environment: name it (--environment=NAME)", "rewards are those of a recipe"):
        notes.show_note(offline.Settings(eval_episodes=episodes), loaded._replace(note=note))
    said = capsys.readouterr().err
    assert "note: rewards are" in said and ("--environment" in said) == bool(episodes)


@pytest.mark.parametrize(("length", "within"), [(1, 1.0), (2, 0.9)])
def test_a_discount_of_1_is_refused_by_its_flag(length: int, within: float) -> None:
    with pytest.raises(ValueError, match=r"--agent\.discount=1: .* give less than 1"):
        common.value_bounds(cut := data.load("synthetic-continuous").dataset, length, 1.0, within)
    alive = np.float32(~cut.last)
    ended = cut._replace(transitions=cut.transitions._replace(discount=alive))
    assert np.isfinite(common.value_bounds(ended, length, 1.0, within)).all()


def test_integer_actions_that_were_never_logged_are_no_mismatch() -> None:
    loaded = data.load("synthetic-discrete")
    checks.fit(loaded, Spec((8,), 5, True))
    assert online.mixture(online.Settings(offline_data="synthetic-discrete"), Spec((8,), 5, True)) is not None
    with pytest.raises(ValueError, match="does not fit"):
        checks.fit(loaded._replace(spec=Spec((8,), 6, True)), Spec((8,), 5, True))
    with pytest.raises(ValueError, match="does not fit"):
        checks.fit(loaded, Spec((8,), 2, False))


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("empty log"), 1, "DataError: empty log"),
        (checkpoint.CheckpointError("another run"), 1, "CheckpointError: another run"),
        (train.Diverged("q not finite"), 1, "Diverged: q not finite"),
        (IsolationError("nothing isolates"), 1, "IsolationError: nothing isolates"),
        (OSError("disk full"), 1, "OSError: disk full"),
        (train.Interrupted("stopped at update 3"), 130, "stopped at update 3"),
        (KeyboardInterrupt(), 130, "stopped; the same command"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "",
)
def test_errors_end_with_their_message(
    error: BaseException,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(_: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(os, "_exit", sys.exit)  # after Ctrl-C nothing waits for what runs on the device
    with pytest.raises(SystemExit) as stopped:
        flags.reporting(main)([])
    assert stopped.value.code == code
    assert capsys.readouterr().err.startswith(message)


def test_after_an_error_no_other_process_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are left wait in a step for this one; at the end of a run that went well all wait."""

    def said(error: Exception) -> str:
        left: list[int] = []

        def main(_: Sequence[str]) -> None:
            raise error

        monkeypatch.setattr(os, "_exit", left.append)
        with pytest.raises(SystemExit):
            flags.reporting(main)([])
        assert left == [1]
        return capsys.readouterr().err

    waited: list[str] = []
    monkeypatch.setattr(hosts, "several", lambda: True)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", waited.append)
    lost = said(RuntimeError("Gloo AllGather failed: Connection closed by peer\n  at a line of C++"))
    assert lost.startswith("lost a process of this run (Gloo AllGather failed: Connection closed by peer). ")
    assert "start the same command again on every host" in lost and "C++" not in lost
    assert said(ValueError("--seeds=0")) == "ValueError: --seeds=0\n"
    assert said(TypeError("mul got")).startswith("Traceback")
    assert not waited
    flags.reporting(lambda _: None)([])
    with pytest.raises(SystemExit, match="3"):
        flags.reporting(lambda _: sys.exit(3))([])
    assert len(waited) == 2


def test_a_mistake_in_the_code_keeps_its_traceback() -> None:
    def main(_: Sequence[str]) -> None:
        raise TypeError("mul got incompatible shapes")

    with pytest.raises(TypeError):
        flags.reporting(main)([])


def test_warnings_come_without_the_code_behind_them(capsys: pytest.CaptureFixture[str]) -> None:
    flags.reporting(lambda _: warnings.warn("look out", stacklevel=1))([])
    assert capsys.readouterr().err == "UserWarning: look out\n"


def test_the_end_says_where_everything_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"dataset": "mine.hdf5", "eval_episodes": 0, "policy_estimates": 0}
    result = {"scores": {}, "folder": str(tmp_path), "settings": settings, "environment": None}
    notes.show(result)
    stdout = capsys.readouterr().out
    assert "no episodes were played" in stdout and "see --eval_episodes" in stdout
    for estimates, flags_given in (
        (0, "--environment=NAME, or --policy_estimates=2000"),
        (9, "--environment=NAME\n"),
    ):
        notes.show(result | {"settings": settings | {"eval_episodes": 20, "policy_estimates": estimates}})
        assert f"mine.hdf5 names no environment: give {flags_given}" in capsys.readouterr().out
    assert f"Everything is in {tmp_path}; look at metrics.jsonl first." in stdout
    notes.show(result | {"fitted_q": {"mean": 1.5, "per_seed": [1.0, 2.0]}})
    assert "fitted_q: 1.5, estimated from the data" in capsys.readouterr().out


# ---- what a run leaves --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 30 epochs with an environment, never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, offline.run(long_run(folder), config())


def long_run(folder: Path, **changes: Any) -> offline.Settings:
    return settings(folder, **EVALUATED | {"updates": 60, "eval_every": 2} | changes)


@pytest.mark.slow
def test_result_says_what_was_run_and_how_good_it_is(evaluated: tuple[Path, dict[str, Any]]) -> None:
    folder, returned = evaluated
    result = json.loads((folder / log.RESULT).read_text())
    assert result["agent"] == "iql" and result["updates"] == 60 and result["settings"]["seeds"] == 2
    assert result["config"]["expectile"] == 0.7 and result["config"]["hidden"] == [8, 8]
    assert result["digest"] == data.load("synthetic-continuous").digest
    assert result["versions"]["jax"] == jax.__version__ and result["wall_seconds"] > 0
    assert "python" in result["command"] and result["hardware"]["cores"] >= 1
    logged = np.asarray([row["eval/return"] for row in log.read(folder)])  # [T, S, episodes]
    assert logged.shape == (30, 2, 2)
    for which, expected in {
        "last": logged[-1].mean(-1),
        "best": logged.mean(-1).max(0),
        "selected": logged[logged[..., 0].argmax(0), [0, 1], 1],
    }.items():
        score = result["scores"]["return"][which]
        np.testing.assert_allclose(score["per_seed"], expected, rtol=1e-6)
        np.testing.assert_allclose(score["mean"], np.mean(expected), rtol=1e-6)
        half = 12.706204736 * np.std(expected, ddof=1) / np.sqrt(2)  # Student's 97.5 % point, one degree
        np.testing.assert_allclose(
            score["ci95"], [np.mean(expected) - half, np.mean(expected) + half], rtol=1e-6
        )
    assert result["scores"].keys() == {"return", "success", "final_success"}
    assert returned["scores"]["return"]["last"]["mean"] == result["scores"]["return"]["last"]["mean"]
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_losses_on_held_out_data_are_logged_and_nobody_trains_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held out is one row, so that every batch of it has the same loss."""
    loaded = data.load("synthetic-continuous")
    row = jax.tree.map(lambda x: x[:1], loaded.dataset)
    both = {True: loaded._replace(validation=row), False: loaded}
    monkeypatch.setattr(data, "load", lambda *_, validation, **__: both[validation])
    for name in ("with", "without"):
        chosen = settings(tmp_path / name, agent="bc", reward_scale="2", validation=name == "with")
        offline.run(chosen, config("bc"))
    one, other = state(tmp_path / "with", 6), state(tmp_path / "without", 6)
    assert all(value.tobytes() == other[name].tobytes() for name, value in one.items())
    assert "validation/policy_loss" not in log.read(tmp_path / "without")[-1]
    params = checkpoint.nested(
        {name: value for name, value in one.items() if name.startswith("state/params")}
    )
    policy = mlp.behaviour_policy(loaded.spec, (8, 8))

    @jax.jit
    @jax.vmap
    def likelihood(weights: Any) -> jax.Array:
        return policy.apply(weights, row.transitions.observation).log_prob(row.transitions.action)

    expected = -np.asarray(likelihood(params["state"]["params"]["policy"]))[:, 0]
    np.testing.assert_allclose(log.read(tmp_path / "with")[-1]["validation/policy_loss"], expected, rtol=1e-5)


def test_a_policy_trained_on_standardised_observations_acts_on_them(tmp_path: Path) -> None:
    """`Countdown` pays 1 plus three times the action, and shows the steps that are left."""
    chosen = settings(tmp_path, normalize_observations=True, **EVALUATED)
    mean, deviation = np.array([4.0, 5.0, 0.5], np.float32), np.array([2.0, 3.0, 1.0], np.float32)
    loaded = data.load("synthetic-continuous", environment="toy_environments:Countdown-v0")
    task = common.Problem(
        loaded._replace(spec=Spec((3,), 1)),
        loaded.dataset,
        Transform(mean=mean, deviation=deviation),
        (0.0, 1.0),
        heads.scalar(),
    )
    act = lambda state, seen, keys: state.params * seen[..., :1]
    population = train.Population(None, None, act, acting.memoryless(act), None)
    with offline.scorer(chosen, task, population, 2, shard.mesh()) as score:
        metrics = score(State(jnp.float32(0.1), {}, {}, jnp.int32(0)), 1)
    steps = metrics["eval/length"]
    assert steps.shape == (2, 2)
    expected = [sum(1 + 3 * 0.1 * (left - 4) / 2 for left in range(1, n + 1)) for n in steps.ravel()]
    np.testing.assert_allclose(metrics["eval/return"].ravel(), expected, rtol=1e-5)


@pytest.mark.slow
def test_batches_of_several_steps_have_the_agents_discount() -> None:
    loaded = data.load("synthetic-continuous").dataset
    chosen, cloned = offline.Settings(n_step=3), config("iql", discount=0.5)
    several = common.rows(chosen, cloned, loaded).transitions
    whole = int(np.flatnonzero(loaded.last)[0]) - 3  # three steps from here on are of the first episode
    reward = loaded.transitions.reward[whole : whole + 3]
    np.testing.assert_allclose(several.reward[whole], reward @ [1, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(several.discount[whole], 0.25 * loaded.transitions.discount[whole + 2])
    assert common.rows(offline.Settings(), cloned, loaded) is loaded
    assert common.rows(chosen, cloned, None) is None
    # Where lengths are drawn, rows are single steps, and the source says with which discount it joins them.
    chosen = dataclasses.replace(chosen, td_lambda=0.5)
    assert common.rows(chosen, cloned, loaded) is loaded
    assert dict(common.source(chosen, cloned, 2).settings) == {"discount": 0.5}


def test_what_an_agent_asks_of_data_is_asked_of_the_chunks_that_are_drawn() -> None:
    """Demonstrations whose episodes are cut before a chunk is whole are in no batch."""
    last = np.arange(32) % 4 == 3  # eight episodes of four steps, the first five of which are one of 20
    last[:19] = False
    rows = np.arange(32.0, dtype=np.float32)
    steps = Transition(
        rows[:, None], rows[:, None], rows, rows * 0 + 1, rows[:, None], rows[:, None], rows * 0 + 1
    )
    steps = steps._replace(origin=np.int32(rows >= 20))
    drawn = offline._as_drawn(offline.Settings(chunk=5), chunks.make(Dataset(steps, last), 5, 0.9))
    assert {len(x) for x in jax.tree.leaves(drawn)} == {16} and not drawn.origin.any()
    flagged = common.config("arsq")
    with pytest.raises(ValueError, match="demonstrations"):
        agents.check_data("arsq", dataclasses.replace(flagged, demonstrations=1), drawn)


@pytest.mark.slow
def test_an_agent_of_chunks_is_trained_and_evaluated_in_single_actions(tmp_path: Path) -> None:
    """Five actions at once, one after another."""
    chosen = settings(tmp_path, agent="bc", chunk=5, dataset="synthetic-continuous", **EVALUATED)
    result = offline.run(chosen, config("bc"))
    assert result["settings"]["chunk"] == 5 and len(result["scores"]["return"]["last"]["per_seed"]) == 2
    name = "state/params/policy/log_std"
    assert state(tmp_path, 6)[name].shape == (2, 5 * 2)


@pytest.mark.slow
def test_policy_estimates_choose_the_policy_that_is_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = []

    def noted(act: Any, spec: Any, head: Any, fit: fitted_q.Config) -> Any:
        fits.append(fit)
        return estimator(act, spec, head, dataclasses.replace(fit, hidden=(8,)))

    estimator = fitted_q.estimator
    monkeypatch.setattr(fitted_q, "estimator", noted)
    result = offline.run(settings(tmp_path, policy_estimates=5, **EVALUATED), config(discount=0.9))
    assert [(fit.discount, fit.updates) for fit in fits] == [(0.9, 5)]
    estimates = log.series(tmp_path, "eval/fitted_q")[1]
    scores = log.series(tmp_path, "eval/return")[1].mean(-1)
    assert estimates.shape == scores.shape == (2, 2)
    np.testing.assert_allclose(result["fitted_q"]["per_seed"], estimates[-1])
    assert result["fitted_q"]["mean"] == pytest.approx(estimates[-1].mean())
    selected = [scores[estimates[:, s].argmax(), s] for s in range(2)]
    np.testing.assert_allclose(result["scores"]["return"]["selected"]["per_seed"], selected, rtol=1e-6)


# ---- runs that go on, and runs that must not be mixed ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "own", "difference"),
    [
        ({}, {"expectile": 0.9}, "config.expectile: 0.7 in the checkpoint, 0.9"),
        (
            {},
            {"policy_optimiser": Adam(schedule="cosine", decay_updates=8)},
            r"(?s)decay_updates: 1000000 in the checkpoint, 8 .* a longer run is another one .* a --workdir of its own",
        ),
        (
            {"updates": 3},
            {"policy_optimiser": Adam(schedule="cosine", decay_updates=3)},
            "holds a run of 6 updates, more than --updates=3: choose another",
        ),
        ({"reward_scale": "2"}, {}, "settings.reward_scale: '1' in the checkpoint, '2'"),
        ({"eval_episodes": 4}, {}, "settings.eval_episodes: 20 in the checkpoint, 4"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    changes: dict[str, Any],
    own: dict[str, Any],
    difference: str,
    finished_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = files(finished_run)
    monkeypatch.setattr(shard, "place_state", lambda *_: pytest.fail("made before it was refused"))
    with pytest.raises(checkpoint.CheckpointError, match=difference):
        offline.run(settings(finished_run, **changes), config(**own))
    assert files(finished_run) == before


@pytest.mark.parametrize(
    ("epochs", "agent", "message"),
    [
        (3, "sac", "decay_updates: 20 in the checkpoint, 30 .* a longer run is another one"),
        (1, "sac", "holds a run of 2 epochs, more than --epochs=1: choose another"),
        (3, "td3", "agent: 'sac' in the checkpoint, 'td3' .*decay_updates: 20 .*to start again.$"),
        (1, "td3", "agent: 'sac' in the checkpoint, 'td3' .*decay_updates: 20 .*to start again.$"),
    ],
)
def test_a_schedule_of_another_length_is_explained_beyond_offline_runs(
    epochs: int, agent: str, message: str, tmp_path: Path
) -> None:
    """In an environment, and where lengths are in epochs; not where it is no longer run, but another one."""

    def run(epochs: int, agent: str = "sac") -> run_folder.Run:
        chosen = online.Settings(workdir=str(tmp_path), tensorboard=False, agent=agent)
        to_the_end = config(policy_optimiser=Adam(schedule="cosine", decay_updates=10 * epochs))
        length: dict[str, Any] = {"unit": "epochs", "per_unit": 10}
        return common.run(chosen, to_the_end, 10 * epochs, task="t", identity=(), card={}, **length)

    earlier = run(2)
    with lifecycle.session(earlier, lifecycle.begin(earlier, {"state": np.zeros(2)})) as session:
        session.keep(20, {"state": np.ones(2)})
    trainer: Any = types.SimpleNamespace(saved=lambda: pytest.fail("made before it was refused"))
    learner: Any = None  # nothing is learned
    with pytest.raises(checkpoint.CheckpointError, match=f"(?s){message}"):
        interaction.train(online.Settings(), run(epochs, agent), trainer, learner, Transform())


@pytest.mark.parametrize(("script", "flag"), [(offline, "dataset"), (online, "offline_data")])
def test_a_run_goes_on_with_its_data_in_another_folder(script: Any, flag: str, tmp_path: Path) -> None:
    """A run and its file are copied to another machine: the digest, not the path, says that the data are the same."""

    def begin(path: str, digest: str = "a", **fields: Any) -> tuple[run_folder.Run, lifecycle.Start]:
        chosen = script.Settings(workdir=str(tmp_path), tensorboard=False, **{flag: path}, **fields)
        run = common.run(chosen, config(), 1, task="t", identity=(flag,), card={"digest": digest})
        common.check(run)
        return run, lifecycle.begin(run, {"state": np.zeros(2)})

    run, start = begin("/old/log.hdf5")
    with lifecycle.session(run, start) as session:
        session.keep(1, {"state": np.ones(2)})
    assert begin("/new/log.hdf5")[1].step == begin("log.hdf5")[1].step == 1
    assert begin("/new/log.hdf5", overwrite=True)[0].card["settings"] == {flag: "/new/log.hdf5"}
    for path, digest, difference in (
        ("/new/log.hdf5", "b", "digest: 'a' in the checkpoint, 'b'"),
        ("/old/other.hdf5", "a", f"settings.{flag}: '/old/log.hdf5' in the checkpoint, '/old/other.hdf5'"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=difference):
            begin(path, digest)


def test_a_run_of_an_edited_agent_of_ones_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file or one that it imports, but not for a comment; without a checkpoint nothing was trained by it."""
    monkeypatch.syspath_prepend(tmp_path)
    # Neither a file beside the folder nor one that is no Python and need not run is in the way.
    (tmp_path.parent / f"{tmp_path.name}.py").write_text("")
    (tmp_path / "broken.py").write_text("no Python")
    agent = "try:\n    import broken\nexcept SyntaxError:\n    pass\nimport edited_part\nRATE = 1"
    files = {"edited_agent": agent, "edited_part": "from rl import train\nX = 1"}

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        for module in files:
            sys.modules.pop(module, None)

    def begin(**fields: Any) -> tuple[run_folder.Run, lifecycle.Start]:
        importlib.invalidate_caches()
        importlib.import_module("edited_agent")
        chosen = offline.Settings(
            agent="edited_agent", workdir=str(tmp_path / "run"), tensorboard=False, **fields
        )
        run = common.run(chosen, config(), 2, task="t", identity=(), card={})
        common.check(run)
        return run, lifecycle.begin(run, {"state": np.zeros(2)})

    for name, text in files.items():
        write(name, text)
    with lifecycle.session(*begin()):
        pass
    write("edited_part", "X = 2")
    assert begin()[0].about["code"].keys() == {"broken.py", "edited_agent.py", "edited_part.py"}
    write("edited_part", files["edited_part"])
    with lifecycle.session(*begin()) as session:
        session.keep(1, {"state": np.ones(2)})
    write("edited_agent", f'"""Words."""\n{files["edited_agent"]}  # and more')
    run, start = begin()
    notes.note_changed_code("--run=mine", run.folder, run.card)
    assert start.step == 1 and "--run=mine" not in capsys.readouterr().err
    for name, text in (("edited_agent", files["edited_agent"] + "0"), ("edited_part", "X = 2")):
        write(name, text)
        with pytest.raises(
            checkpoint.CheckpointError,
            match=f"run: {name}.py has changed since this run began: choose another --workdir, or --overwrite",
        ):
            begin()
        notes.note_changed_code("--run=mine", run.folder, run.card)
        assert f"note: --run=mine: {name}.py has changed since this run began: " in capsys.readouterr().err
        assert begin(overwrite=True)[1].step == 0
        write(name, files[name])
    stored = log.read_json(tmp_path / "run" / log.CONFIG)
    del stored["config"]["code"]  # as of a run from before
    log.write_json(tmp_path / "run" / log.CONFIG, stored)
    write("edited_part", "X = 2")
    assert begin()[1].step == 1


def test_own_code_is_of_the_agent_the_head_and_the_environment() -> None:
    def names(**fields: Any) -> list[str]:
        return sorted(common.user_code(online.Settings(**fields)))

    example = {"agent": "docs.example_agent", "head": "docs.example_head.gaussian"}
    agents.get(example["agent"])
    heads.check_name(example["head"])
    assert names(**example) == ["docs/example_agent.py", "docs/example_head.py"]
    assert names(env="point_mass:PointMass-v0") == names(env="jax/point_mass.world") == ["point_mass.py"]
    assert names(agent="rl.agents.iql", head="rl.values.heads.scalar", env="jax/Pendulum-v1") == []


def test_an_agent_that_returns_no_learner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "get", lambda name: types.SimpleNamespace(make=lambda *_: None))
    with pytest.raises(
        ValueError, match=r"--agent=mine: its make must return a rl.types.Learner, not NoneType"
    ):
        common.learner("mine", None, Spec((3,), 1), heads.scalar())


def test_a_scale_below_0_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    for scale, noted in (("-1", True), ("1", False), ("return_range", False)):
        notes.note_negated_rewards(offline.Settings(reward_scale=scale))
        assert ("rewards are negated" in capsys.readouterr().err) == noted


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Pendulm-v1", ValueError, "unknown environment 'Pendulm-v1'; the nearest names are Pendulum-v1"),
        ("jax/Pendulm-v1", ValueError, "unknown environment 'jax/Pendulm-v1'"),
        (
            "point_mass:PointMess-v0",
            ValueError,
            "point_mass was imported and registers no such id: .*id='PointMess-v0'.*nearest .*PointMass",
        ),
        ("no_such_module:Mine-v0", ImportError, "--environment=no_such_module:Mine-v0: its module cannot"),
        ("CartPole-v1", ValueError, "environment 'CartPole-v1' does not fit the data"),
    ],
)
def test_where_to_evaluate_is_checked_before_a_run_is_begun(
    name: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "run", lambda *_, **__: pytest.fail("begun"))
    with pytest.raises(kind, match=message):
        offline.run(settings(tmp_path, environment=name), config())


def test_a_run_that_is_known_by_a_setting_of_earlier_versions_goes_on_with_it(tmp_path: Path) -> None:
    """Another run, and the same again from its start, is known by what there is now.

    It goes on without hyper-parameters that it did not have, as long as they have their defaults.
    """

    def begin(rate: float = 0.005, **fields: Any) -> tuple[run_folder.Run, lifecycle.Start]:
        chosen = offline.Settings(workdir=str(tmp_path), tensorboard=False, **fields)
        run = common.run(chosen, config(target_rate=rate), 2, task="t", identity=("seeds",), card={})
        common.check(run)
        return run, lifecycle.begin(run, {"state": np.zeros(2)})

    run, start = begin()
    former = dict.fromkeys(common.FORMER, 1)
    assert run.card["config"]["network"].pop("shift") == 0 and run.card["config"].pop("target_rate") == 0.005
    run = run._replace(card={**run.card, "settings": {"seeds": 4, **former}})
    with lifecycle.session(run, start) as session:
        session.keep(1, {"state": np.ones(2)})
    before = run.card
    run, start = begin()
    assert start.step == 1 and run.card["settings"] == {"seeds": 4, **former} and run.card == before
    again = begin(overwrite=True)[0].card
    assert again["settings"] == {"seeds": 4} and again["config"]["target_rate"] == 0.005
    with pytest.raises(
        checkpoint.CheckpointError, match=r"config.target_rate: nothing in the checkpoint, 0.1"
    ):
        begin(rate=0.1)
    with pytest.raises(checkpoint.CheckpointError, match=r"settings.seeds: 4 in the checkpoint, 5"):
        begin(seeds=5)
    # What a flag of the first command chose is not taken for the default of the second.
    known = common.known({"target_entropy": None}, {"target_entropy": None}, {"target_entropy": 0.0})
    assert known == {"target_entropy": None}


def test_a_head_starts_where_the_flag_says_and_the_run_is_known_by_it(tmp_path: Path) -> None:
    """Runs from before the flag go on: what is not given is not written down either."""
    chosen, bounds = settings(tmp_path, head="hl_gauss", head_start=-2.0), (-50.0, 0.0)
    for start, value in ((-2.0, 0.9 * -2 + 0.1 * -25), (math.nan, -25.0)):
        support, head = common.value_head(dataclasses.replace(chosen, head_start=start), bounds)
        assert support == bounds
        np.testing.assert_allclose(head.value(np.zeros(head.size)), value, rtol=1e-3)
    for changes, message in (
        ({"head_start": 1.0}, r"--head_start=1 lies outside the head's support, \[-50, 0\]"),
        ({"head": "quantile"}, "--head_start=-2 is of heads with a support; --head=quantile begins near 0"),
    ):
        with pytest.raises(ValueError, match=message):
            common.value_head(dataclasses.replace(chosen, **changes), bounds)
    with pytest.raises(ValueError, match="--head=hl_gauss needs --head_low and --head_high"):
        common.value_head(chosen, (-50.0, math.inf))
    _, sharp = common.value_head(
        dataclasses.replace(chosen, head="quantile", head_start=0.0, head_kappa=0.1), bounds
    )
    error = np.full((1, sharp.size), 2.0)
    np.testing.assert_allclose(
        sharp.loss(0 * error, error), heads.quantile(sharp.size, 0.1).loss(0 * error, error)
    )
    _, wide = common.value_head(dataclasses.replace(chosen, head_start=math.nan, head_sigma=2.0), bounds)
    at = heads.scalar_target(wide, np.float32([-20.0]))
    np.testing.assert_array_equal(
        at, heads.scalar_target(heads.hl_gauss(*bounds, wide.size, 2.0), np.float32([-20.0]))
    )
    for head in ("scalar", "quantile"):  # begin near 0 as they are: a sweep over heads may say so of all
        assert common.head_start(dataclasses.replace(chosen, head=head, head_start=0.0)) is None

    def known(start: float, **shape: float) -> Any:
        run_settings = dataclasses.replace(chosen, head_start=start, **shape)
        return common.run(run_settings, config(), 1, task="t", identity=("head",), card={}).card["settings"]

    assert known(-2.0) == {"head": "hl_gauss", "head_start": -2.0} and known(math.nan) == {"head": "hl_gauss"}
    assert known(math.nan, head_kappa=0.1) == {"head": "hl_gauss", "head_kappa": 0.1}
    assert known(math.nan, head_sigma=2.0) == {"head": "hl_gauss", "head_sigma": 2.0}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    offline.run(settings(folder), config())
    return folder


@pytest.mark.slow
def test_a_run_that_diverges_says_so_and_keeps_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(tmp_path, eval_every=1)  # the first update is finite, its step is not
    with pytest.raises(SystemExit) as stopped:
        flags.reporting(lambda _: offline.run(chosen, config(learning_rate=1e30)) and None)([])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "Diverged" in error and "critic_loss" in error and "not finite at update 1 (seeds [0, 1])" in error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    assert all(np.isfinite(value).all() for name, value in state(tmp_path, 1).items() if "params" not in name)
    assert [row["step"] for row in log.read(tmp_path)] == [1]
    assert not (tmp_path / log.RESULT).exists()


# ---- interruptions --------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> int:
    """The newest step that was saved, 0 for none."""
    paths = (folder / "checkpoints").glob("*[0-9]")
    return max((int(path.name) for path in paths), default=0)


@pytest.mark.long
def test_kill_and_ctrl_c_at_any_time_resume_to_the_same_bits(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """As a user meets them; `test_lifecycle.py` has the rest."""
    uninterrupted, _ = evaluated
    chosen = arguments(long_run(tmp_path, eval_processes=1), "--agent.hidden=8,8")
    process = start(*chosen)
    wait_for(lambda: checkpoints(tmp_path) > 0, process)
    time.sleep(random.Random().uniform(0, 1))  # another moment each time: any must do
    os.killpg(process.pid, signal.SIGKILL)
    end(process)
    killed = checkpoints(tmp_path)
    assert 0 < killed < 60, "it was not killed in the middle"
    process = start(*chosen)
    wait_for(lambda: checkpoints(tmp_path) > killed, process)
    os.killpg(process.pid, signal.SIGINT)
    code, _, stderr = end(process)
    assert code == 130 and "Traceback" not in stderr
    reached = checkpoints(tmp_path)
    assert killed < reached < 60 and f"stopped at update {reached}; the same command continues" in stderr
    assert log.read(tmp_path)[-1]["step"] == reached and not (tmp_path / log.RESULT).exists()
    assert offline.run(long_run(tmp_path), config())["updates"] == 60
    assert_same_bits(uninterrupted, tmp_path, 60)
    resumed = json.loads((tmp_path / log.CONFIG).read_text())["resumed"]
    assert [run["step"] for run in resumed] == [killed, reached]


# ---- several processes ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def two_processes(*flags: str, module: str = "experiments.offline") -> list[subprocess.Popen[str]]:
    """As on two hosts, of two devices each."""
    cluster = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    }
    return [start(*flags, module=module, JAX_PROCESS_ID=str(i), **cluster) for i in range(2)]


@pytest.mark.long
def test_two_processes_of_two_devices_train_what_one_trains(tmp_path: Path) -> None:
    """As on two hosts: the same command on each, seeds over the processes, batches over each one's devices.

    What they began, a single device continues.
    """
    chosen = settings(tmp_path / "two", mesh_seed=2, mesh_data=2, **EVALUATED)
    processes = two_processes(*arguments(chosen, "--agent.hidden=8,8"))
    try:
        ends = [end(process) for process in processes]
    finally:
        processes[1].kill()
    assert [code for code, _, _ in ends] == [0, 0], ends
    (_, first, _), (_, second, progress) = ends
    assert not any("sign of life" in stderr for _, _, stderr in ends)
    assert "return: " in first and "return: " not in second and "it/s" not in progress  # one of them speaks
    hardware = json.loads((tmp_path / "two" / log.RESULT).read_text())["hardware"]
    assert (hardware["processes"], hardware["devices"]) == (2, 4)

    for name in ("one", "two"):
        offline.run(settings(tmp_path / name, updates=9, **EVALUATED), config())
    one, two = state(tmp_path / "one", 9), state(tmp_path / "two", 9)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=2e-4, atol=1e-6, err_msg=name)
    for name in ("train/critic_loss", "eval/return"):
        steps, values = log.series(tmp_path / "two", name)
        assert steps.tolist() == [3, 6, 9]
        np.testing.assert_allclose(values, log.series(tmp_path / "one", name)[1], rtol=1e-3, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_preempted_process_stops_all_and_the_same_command_goes_on_to_the_same_bits(
    stopped: int, tmp_path: Path
) -> None:
    """A slice that is preempted may tell one of its hosts before the others."""

    def train(folder: Path, interrupt: bool = False) -> tuple[int, ...]:
        chosen = settings(folder, mesh_seed=2, mesh_data=2, updates=20, eval_every=1, eval_episodes=0)
        processes = two_processes(*arguments(chosen, "--agent.hidden=8,8"))
        try:
            if interrupt:
                wait_for(lambda: checkpoints(folder) > 0, processes[0])
                processes[stopped].send_signal(signal.SIGTERM)
            return tuple(end(process)[0] for process in processes)
        finally:
            processes[1].kill()

    assert train(tmp_path / "whole") == (0, 0)
    assert train(tmp_path / "cut", interrupt=True) == (130, 130)
    assert 0 < checkpoints(tmp_path / "cut") < 20
    assert train(tmp_path / "cut") == (0, 0)
    (_, whole), (_, cut) = (checkpoint.read(tmp_path / name / "checkpoints") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and len(whole) > 10
    for name in whole.keys() - {"seconds"}:
        assert np.asarray(whole[name]).tobytes() == np.asarray(cut[name]).tobytes(), name


@pytest.mark.slow
def test_what_does_not_divide_over_devices_removes_nothing(
    evaluated: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = types.SimpleNamespace(shape={"seed": 4, "data": 3})
    checks.mesh(6, mesh, seeds=8)
    with pytest.raises(ValueError, match="--batch_size=8 is not a multiple of the 3 devices that share each"):
        checks.mesh(8, mesh, seeds=8)
    with pytest.raises(
        ValueError, match="6 seeds, of all variants, are not a multiple of --mesh_seed=4: change"
    ):
        checks.mesh(6, mesh, seeds=6)
    checks.mesh(6, types.SimpleNamespace(shape={"data": 3, "model": 2}))  # of a language model

    shutil.copytree(evaluated[0], tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))

    def refuse(*_: Any) -> None:
        raise ValueError("does not divide")

    monkeypatch.setattr(checks, "mesh", refuse)
    with pytest.raises(ValueError, match="does not divide"):
        offline.run(long_run(tmp_path / "run", overwrite=True), config())
    assert sorted(tmp_path.rglob("*")) == before


def test_scripts_of_one_process_and_platforms_without_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(backend: str) -> Any:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # as mpirun says it
    with pytest.raises(ValueError, match="trains in one process, and this is one of 2: start it on a single"):
        online.check(online.Settings())
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE must be a number of processes, not 'two'"):
        online.check(online.Settings())
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="trains in one process, and this is one of 2: start it on a single"):
        online.check(online.Settings())
    monkeypatch.setattr(jax, "local_devices", missing)
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS=\w+ leaves out the CPU, .*: give \w+,cpu"):
        common.cpu()


def test_entropy_that_n_steps_leave_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A bonus b at every step is worth b / (1 - gamma), and b / (1 - gamma^3) where three steps are one row."""
    spec, soft = Spec((3,), 2), agents.get("sac").Config(discount=0.9)
    notes.note_n_step(offline.Settings(agent="sac", n_step=3), soft, spec)
    assert f"values of states hold {(1 - 0.9) / (1 - 0.9**3):.2f} of what" in capsys.readouterr().err
    undiscounted = dataclasses.replace(soft, discount=1.0)
    notes.note_n_step(offline.Settings(agent="sac", n_step=4), undiscounted, spec)
    assert "values of states hold 0.25 of what" in capsys.readouterr().err
    table = Spec((3,), 2, discrete=True)
    notes.note_n_step(offline.Settings(agent="dqn", n_step=4), agents.get("dqn").Config(discount=1.0), table)
    notes.note_n_step(offline.Settings(agent="sac"), soft, spec)
    notes.note_n_step(offline.Settings(agent="iql", n_step=3), agents.get("iql").Config(), spec)
    assert not capsys.readouterr().err


def test_flags_that_change_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("robust_scale", "robust_updates")
    notes.note_unused(offline.Settings(robust_scale=0.5), "robust", *names)
    assert capsys.readouterr().err == "note: --robust_scale changes nothing without --robust\n"
    notes.note_unused(offline.Settings(robust="kl", robust_scale=0.5), "robust", *names)
    notes.note_unused(offline.Settings(), "robust", *names)
    assert not capsys.readouterr().err
    for chosen in (
        {},
        {"head": "c51", "head_size": 5, "head_low": 0.0},
        {"head": "quantile", "head_kappa": 2.0},
        {"head": "hl_gauss", "head_sigma": 2.0},
    ):
        notes.note_unused_head(offline.Settings(**chosen))
    assert not capsys.readouterr().err
    notes.note_unused_head(offline.Settings(head_size=5), offline.Settings(head_size=5))  # a preset's
    assert not capsys.readouterr().err
    notes.note_unused_head(offline.Settings(head="quantile", head_high=1.0))
    assert "note: --head_high changes nothing with --head=quantile: it is of" in capsys.readouterr().err
    notes.note_unused_head(offline.Settings(head="c51", head_sigma=2.0))
    assert "--head_sigma changes nothing with --head=c51: it is of hl_gauss" in capsys.readouterr().err
    notes.note_unused_head(offline.Settings(head_size=5))
    assert "note: --head_size changes nothing with --head=scalar" in capsys.readouterr().err


def test_flags_of_an_agent_that_change_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that were given, and not those that a preset sets: crl's has none of these, hecrl's a radius of its own."""
    settings, hecrl = goals.Settings(agent="hecrl"), agents.get("hecrl").Config
    spec = Spec((3,), 1)
    note = lambda settings, config: notes.note_unused_by_agent("goals", settings, config, "dataset", spec)
    note(settings, hecrl(filtered=False))
    note(settings, hecrl(radius=-20.0))
    note(offline.Settings(agent="iql"), agents.get("iql").Config(expectile=0.9))
    task = "heavy-cube-double-ppp-v0+entities"
    published, chosen = presets.resolve(
        "goals",
        goals.Settings(agent="hecrl", preset="paper"),
        common.config,
        "dataset",
        {"dataset": task, "agent.subgoals": "none"},
    )
    assert published.preset == "paper" and chosen.candidates
    note(published, chosen)
    assert not capsys.readouterr().err
    note(settings, hecrl(radius=-20.0, filtered=False))
    said = "note: --agent.radius changes nothing: with filtered=False every candidate is feasible\n"
    assert capsys.readouterr().err == said
    config = agents.get("gcbc").Config()
    hindsight = dataclasses.replace(
        config.goals, mask=False, value=dataclasses.replace(config.goals.value, random=0.1)
    )
    note(goals.Settings(agent="gcbc"), dataclasses.replace(config, goals=hindsight))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["--agent.goals.value.random", "--agent.goals.mask"]


def test_flags_that_a_models_loss_does_not_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """VaGraM's published settings are those of its loss, and nobody gave them where another loss is chosen."""
    given = {
        "plain_steps": 5,
        "loss.normalise": False,
        "loss.samples": 4,
        "loss.clip_quantile": 0.5,
        "loss.floor": 0.1,
    }
    unread = {
        "mle": set(given),
        "standardised": set(given),
        "vagram": {"loss.samples"},
        "vaml": {"loss.samples", "loss.clip_quantile"},  # without normalise
        "calibrated": {"loss.clip_quantile"},
        "value_weighted": {"loss.samples", "loss.clip_quantile"},
    }
    for loss, expected in unread.items():
        overrides = {"env": "Hopper-v5", "model_loss": loss}
        settings, config = presets.resolve("mbpo", mbpo.PUBLISHED, common.config, "env", overrides)
        assert settings.preset == "paper" and settings.loss.normalise is False
        mbpo._print_notes(settings, config, Spec((11,), 3))
        assert not capsys.readouterr().err
        settings, config = presets.resolve("mbpo", mbpo.Settings(), common.config, "env", overrides | given)
        mbpo._print_notes(settings, config, Spec((11,), 3))
        lines = capsys.readouterr().err.splitlines()
        assert {line.split()[1] for line in lines} == {f"--{name}" for name in expected}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("hopper-medium-v2", "hopper-medium-v2"),
        ("/data/mine/log.hdf5", "log.hdf5"),
        ("minari:D4RL/pen/human-v2", "D4RL-pen-human-v2"),
        ("minari:mine/log-v0", "mine-log-v0"),
        ("minari:/data/D4RL/pen/human-v2", "D4RL-pen-human-v2"),
    ],
)
def test_every_dataset_has_a_run_folder_of_its_own(dataset: str, name: str) -> None:
    """All of Minari's that are called human-v2 shared one."""
    assert common.dataset_name(dataset) == name
