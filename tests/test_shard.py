"""rl.shard: eight devices, two hosts and one device compute the same.

What needs several devices or hosts runs in processes of its own, which import this file and call one of the
functions that start with ``on_``. Everything is trained by SGD, whose steps show a gradient that is summed
where it should be averaged; Adam's would not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from rl import agents, checkpoint, keys, shard, train
from rl.agents.optimisers import Adam
from rl.data import synthetic
from rl.networks import entity
from rl.replay import chunks, goals
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.source import Source
from rl.shard import hosts
from rl.types import Key, Learner, State, Transition
from rl.values import heads

BATCH, STEPS, SEEDS = 152, 3, 2  # 152 = 8 * 19 is the length of nothing else in these programs

# Every agent of `rl.agents.AGENTS`, and every head with some agent. Integer actions and a loss that compares the rows
# of a batch in CI. Agents of language are in test_shard_language.py, and linear ones have no updates.
CASES = [
    ("discrete", "dqn", "c51"),
    ("continuous", "iql", "hl_gauss"),
    ("continuous", "sac_n", "quantile"),
    ("continuous", "bc", "scalar"),
    ("continuous", "cql", "c51"),
    ("continuous", "edac", "scalar"),
    ("continuous", "rebrac", "two_hot"),
    ("continuous", "td3_bc", "scalar"),
    ("discrete", "cql", "hl_gauss"),
    ("discrete", "iql", "quantile"),
    ("continuous", "sac", "two_hot"),
    ("continuous", "td3", "hl_gauss"),
    ("continuous", "fql", "scalar"),
    ("continuous", "ifql", "c51"),
    ("chunks", "deas", "hl_gauss"),
    ("demonstrations", "arsq", "scalar"),
    ("demonstrations", "cqn", "c51"),
    ("goals", "crl", "scalar"),
    ("goals", "gcbc", "scalar"),
    ("goals", "gcivl", "hl_gauss"),
    ("goals", "gciql", "two_hot"),
    ("goals", "hiql", "scalar"),
    ("goals", "qrl", "scalar"),
    ("goals", "hecrl", "scalar"),
]
IN_CI = (("discrete", "iql"), ("goals", "crl"))
COMPARES_ROWS = ("crl",)  # each with every other one's goal, which must travel
# Its last layer starts at 0, where all bins are alike, a kink of its dominance loss: rounding would choose the side.
STARTS_AT_A_KINK = ("cqn",)

CHUNK, ORIGIN = 2, 1
FLOW: dict[str, Any] = {"flow_steps": 2, "candidates": 2}
# By SGD, which clips nothing.
UNCLIPPED = {f"{name}_optimiser": Adam() for name in ("critic", "value", "policy", "subgoal")}
SMALL: dict[str, dict[str, Any]] = {
    "arsq": {"demonstrations": ORIGIN},
    "cqn": {"demonstrations": ORIGIN, "features": 8},
    "crl": {"latent": 4, "loss": "symmetric"},
    "cql": {"samples": 2, "policy_learning_rate": 0.01},
    "deas": FLOW,
    "edac": {"critics": 2},
    "fql": FLOW | {"normalize_q": True},
    "hecrl": {"network": entity.Shape(width=8, inner=8, heads=1, layers=1), **UNCLIPPED},
    "hiql": {"representation": 4},
    "ifql": FLOW,
    "qrl": {"latent": 8},
    "sac_n": {"critics": 2},
}


def launch(
    program: str, devices: int, stderr: int | None = subprocess.STDOUT, **environment: str
) -> subprocess.Popen[str]:
    """A new process with that many devices, which finds the files of tests."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        # Eight devices on a busy machine with two cores may wait long for each other.
        " --xla_cpu_collective_call_terminate_timeout_seconds=600"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    )
    here = Path(__file__).parent
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=inherited
        | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}
        | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


# One process for all that needs eight devices: its start, and the programs that all share, take as long as a case.
SERVER = """
import importlib, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    module, call = json.loads(line)
    error = None
    try:
        eval(call, vars(importlib.import_module(module)))
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def on_eight_devices(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Calls one of the functions in the test's module in a process that has eight devices."""
    server = launch(SERVER, 8, stderr=None)

    def run(call: str) -> None:
        print(json.dumps([request.module.__name__, call]), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, "the process with eight devices ended"
        error = json.loads(answer)
        assert error is None, error

    yield run
    server.communicate(timeout=60)


def succeed(*processes: subprocess.Popen[str]) -> None:
    """Waits for them and shows what a failed one said."""
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, outputs, strict=True):
        assert process.returncode == 0, text


# ---- what one device computes, written out --------------------------------------------------------------


@jax.jit
def uniform(dataset: Dataset, key: Key, step: Any) -> Transition:
    rows = jax.random.randint(key, (BATCH,), 0, len(dataset.last))
    return jax.tree.map(lambda x: x[rows], dataset.transitions)


@functools.cache
def stratified(parts: int) -> Source:
    """An equal share of the batch from each of ``parts`` parts of the dataset."""

    @jax.jit
    def sample(dataset: Dataset, key: Key, step: Any) -> Transition:
        size, share = len(dataset.last) // parts, BATCH // parts
        rows = [
            size * part + jax.random.randint(jax.random.fold_in(key, part), (share,), 0, size)
            for part in range(parts)
        ]
        return jax.tree.map(lambda x: x[jnp.concatenate(rows)], dataset.transitions)

    return sample


def by_hand(
    update: Callable[..., Any], sample: Source, state: State, dataset: Dataset, key: Key, steps: int
) -> State:
    for step in range(steps):
        sample_key, update_key = jax.random.split(jax.random.fold_in(keys.of(key, "update"), step))
        state, _ = update(state, sample(dataset, sample_key, step), update_key)
    return state


# ---- helpers ------------------------------------------------------------------------------------------


def problem(kind: str, agent: str, head: str) -> tuple[Any, Any, Callable[..., Learner], Source]:
    """Data on the default device, a config, what makes its learner from (config, optimiser), and its batches."""
    module = agents.get(agent)
    hidden = {} if agent == "hecrl" else {"hidden": (8,)}
    config = module.Config(learning_rate=0.01, **hidden, **SMALL.get(agent, {}))
    loaded = synthetic.load(f"synthetic-{kind if kind in ('discrete', 'goals') else 'continuous'}")
    data, spec, sample = loaded.dataset, loaded.spec, replay.sampler(BATCH)
    if kind == "goals":
        data, spec = goals.trajectories(data, config.goals), goals.conditioned_spec(spec)
        sample = goals.sampler(BATCH, config.goals, getattr(config, "discount", 0.99))
    if kind == "chunks":
        data, spec = (
            chunks.make(data, CHUNK, config.discount, config.chunk_discount),
            chunks.spec(spec, CHUNK),
        )
        sample = chunks.sampler(BATCH)
    if kind == "demonstrations":  # a third of the rows: devices have unequal numbers of them
        origin = np.arange(len(data.last), dtype=np.int32) % 3 % 2
        data = data._replace(transitions=data.transitions._replace(origin=origin))

    def make(config: Any, optimiser: Any = optax.sgd) -> Learner:
        return module.make(config, spec, heads.make(head, -20.0, 1.0, 11), optimiser)

    return jax.device_put(data), config, make, sample


def seed(state: State, index: int) -> State:
    """One seed's state, on the host."""
    state = jax.device_get(state)
    return train.member(state, index)


def moved(params: Any) -> Any:
    """Parameters from which nothing is exactly 0 or alike."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)


def assert_close(one: Any, other: Any) -> None:
    """To 1e-6 of the largest entry of each array, or of 1."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        b = np.asarray(b)
        tolerance = 1e-6 * max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def lengths(program: str) -> set[int]:
    """The lengths of all axes of all arrays in a compiled program."""
    return {int(n) for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program) for n in shape.split(",")}


# ---- eight devices ------------------------------------------------------------------------------------


def test_every_agent_and_head_is_a_case() -> None:
    """A new one would go without: nothing else compares what it computes on several devices."""
    assert {agent for _, agent, _ in CASES} == set(agents.AGENTS)
    assert {head for *_, head in CASES} == set(heads.NAMES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id="-".join(case),
            marks=[] if case[:2] in IN_CI else [pytest.mark.long],
        )
        for case in CASES
    ],
)
def test_eight_devices_compute_what_one_does(
    case: tuple[str, str, str], on_eight_devices: Callable[[str], None]
) -> None:
    on_eight_devices(f"check_eight_devices{case}")


def check_eight_devices(kind: str, agent: str, head: str) -> None:
    assert jax.device_count() == 8
    data, config, make, sample = problem(kind, agent, head)
    learner = make(config)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    init = jax.jit(jax.vmap(learner.init, (0, None), train.STACKED))
    start = init(keys, sample(data, keys[0], 0))  # shapes alone
    if agent in STARTS_AT_A_KINK:
        start = start._replace(params=moved(start.params))
    update = jax.jit(learner.update)

    # jit, every device with a share of the batch.
    mesh = shard.mesh()
    runs = train.population(make, config, shard.data_parallel(sample, mesh), STEPS)
    arguments = (
        shard.place_state(start, mesh),
        shard.place(data, mesh),
        shard.place_keys(keys, mesh),
    )
    epoch = jax.jit(shard.over_mesh(runs.epoch, mesh)).lower(*arguments).compile()
    after, _ = epoch(*arguments)
    after, report = epoch(after, *arguments[1:])  # refused if the state had come back laid out differently
    rows = uniform if isinstance(data, Dataset) else jax.jit(sample)
    for index, key in enumerate(keys):
        alone = by_hand(update, rows, seed(start, index), data, key, 2 * STEPS)
        assert_close(seed(after, index), alone)
    program = epoch.as_text()
    assert BATCH // 8 in lengths(program) and " all-reduce" in program
    if agent not in COMPARES_ROWS:
        assert BATCH not in lengths(program)
        assert not re.search(r" (all-gather|all-to-all|collective-permute)", program), "rows travel"
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(report))
    if not isinstance(data, Dataset):
        return

    # shard_map, every device with a share of the dataset; seeds over the other axis.
    mesh = shard.mesh(seed=2)
    parts = shard.place_split(data, mesh)
    assert parts.last.addressable_shards[0].data.shape == (len(data.last) // 4,)
    runs = train.population(make, config, shard.sharded_sampler(BATCH, mesh), STEPS)
    epoch = jax.jit(shard.over_mesh(runs.epoch, mesh))
    after, _ = epoch(shard.place_state(start, mesh), parts, shard.place_keys(keys, mesh))
    for index, key in enumerate(keys):
        alone = by_hand(update, stratified(4), seed(start, index), data, key, STEPS)
        assert_close(seed(after, index), alone)


@pytest.mark.long
def test_a_run_with_split_data_draws_from_each_part(
    tmp_path: Path, on_eight_devices: Callable[[str], None]
) -> None:
    """The script, of n-step returns too: no device has all rows, and parts are drawn from as `stratified` does."""
    on_eight_devices(f"on_split_data({str(tmp_path)!r})")


def on_split_data(folder: str) -> None:
    from experiments import common, offline

    chosen = offline.Settings(
        agent="td3_bc", dataset="synthetic-continuous", n_step=3, split_data=True, seeds=2, batch_size=BATCH
    )
    chosen = dataclasses.replace(chosen, updates=6, eval_every=3, eval_episodes=0, tensorboard=False)
    config = agents.get("td3_bc").Config(hidden=(8,), learning_rate=0.01)
    rows = len(synthetic.load(chosen.dataset).dataset.last)
    with mock.patch.object(train, "epochs", wraps=train.epochs) as epochs:
        offline.run(dataclasses.replace(chosen, workdir=f"{folder}/split"), config)
    held = jax.tree.map(lambda x: x.addressable_shards[0].data.shape[0], epochs.call_args.args[2])
    assert set(jax.tree.leaves(held)) == {rows // 8}
    with mock.patch.object(common, "source", lambda *_: stratified(8)):
        offline.run(dataclasses.replace(chosen, workdir=f"{folder}/whole", split_data=False), config)
    split, whole = (checkpoint.read(Path(folder, name, "checkpoints"))[1] for name in ("split", "whole"))
    assert split.keys() == whole.keys() and len(split) > 10
    for name in split.keys() - {"seconds"}:
        np.testing.assert_allclose(split[name], whole[name], rtol=2e-4, atol=1e-6, err_msg=name)
    with pytest.raises(checkpoint.CheckpointError, match="split_data: 8 in the checkpoint, None in this run"):
        offline.run(dataclasses.replace(chosen, workdir=f"{folder}/split", split_data=False), config)


@pytest.mark.slow
def test_seeds_spread_over_devices_train_as_on_one(on_eight_devices: Callable[[str], None]) -> None:
    on_eight_devices("on_a_device_per_seed()")


def on_a_device_per_seed() -> None:
    dataset, config, make, _ = problem("discrete", "iql", "scalar")
    keys = jax.random.split(jax.random.key(0), 16)
    runs = train.population(make, config, replay.sampler(BATCH), STEPS)
    start = jax.jit(runs.init)(keys, replay.take(dataset, jnp.arange(2)))
    together, report = jax.jit(runs.epoch)(start, dataset, keys)

    mesh = shard.mesh(seed=8)
    placed = shard.place_state(start, mesh)
    assert {x.addressable_shards[0].data.shape[0] for x in jax.tree.leaves(placed.params)} == {2}
    sharded = jax.jit(shard.over_mesh(runs.epoch, mesh))
    spread, spread_report = sharded(placed, shard.place(dataset, mesh), shard.place_keys(keys, mesh))
    assert_close(shard.gather(spread, mesh), together)
    assert_close(spread_report.metrics, report.metrics)


@pytest.mark.slow
def test_what_does_not_divide_is_refused(on_eight_devices: Callable[[str], None]) -> None:
    on_eight_devices("on_uneven_shares()")


def on_uneven_shares() -> None:
    dataset, *_ = problem("discrete", "dqn", "scalar")
    mesh = shard.mesh(seed=2)
    with pytest.raises(ValueError, match="8 devices do not divide into seed=3 times data=2"):
        shard.mesh(seed=3)
    with pytest.raises(ValueError, match="8 devices do not divide into seed=2 times data=2"):
        shard.mesh(seed=2, data=2)
    with pytest.raises(ValueError, match="3 does not divide over the 2 devices of the mesh's 'seed' axis"):
        shard.place_keys(jax.random.split(jax.random.key(0), 3), mesh)
    with pytest.raises(ValueError, match="30 does not divide over the 4 devices of the mesh's 'data' axis"):
        shard.sharded_sampler(30, mesh)
    with pytest.raises(ValueError, match="30 does not divide over the 4 devices"):
        jax.eval_shape(shard.data_parallel(replay.sampler(30), mesh), dataset, jax.random.key(0))


# ---- two hosts ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [
        launch(
            f"import test_shard; test_shard.on_two_hosts({str(tmp_path)!r})",
            2,
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]
    succeed(*processes)

    dataset, config, make, _ = problem("discrete", "dqn", "hl_gauss")
    learner = make(config)
    run_keys = jax.random.split(jax.random.key(0), SEEDS)
    example = replay.take(dataset, jnp.arange(2))
    init, update = jax.jit(learner.init), jax.jit(learner.update)
    for name, sample in {"rows": uniform, "parts": stratified(4), "seeds": uniform}.items():
        with np.load(tmp_path / f"{name}.npz") as file:
            leaves = [file[key] for key in file.files]
        for index, key in enumerate(run_keys):
            start = init(keys.of(key, "init"), example)
            alone = by_hand(update, sample, start, dataset, key, 2 * STEPS)
            assert_close([x[index] for x in leaves], jax.tree.leaves(alone.params))


def on_two_hosts(folder: str) -> None:
    shard.initialize()
    shard.initialize()  # a notebook's second run
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    assert shard.is_main() == (os.environ["JAX_PROCESS_ID"] == "0")
    dataset, config, make, _ = problem("discrete", "dqn", "hl_gauss")
    keys = jax.random.split(jax.random.key(0), SEEDS)
    rows, seeds = shard.mesh(), shard.mesh(seed=2)  # of the two, `rows` splits batches between the hosts
    sampler = replay.sampler(BATCH)
    for name, mesh, place, sample in (
        ("rows", rows, shard.place, shard.data_parallel(sampler, rows)),
        ("parts", rows, shard.place_split, shard.sharded_sampler(BATCH, rows)),
        ("seeds", seeds, shard.place, shard.data_parallel(sampler, seeds)),
    ):
        runs = train.population(make, config, sample, STEPS)
        start = shard.place_state(jax.jit(runs.init)(keys, replay.take(dataset, jnp.arange(2))), mesh)
        placed = place(dataset, mesh), shard.place_keys(keys, mesh)
        *_, (state, report) = train.epochs(shard.over_mesh(runs.epoch, mesh), start, *placed, 2)
        assert np.isfinite(np.asarray(report.metrics["critic_loss"])).all()  # readable on every host
        params = shard.gather(state.params, mesh)
        if shard.is_main():
            np.savez(Path(folder, f"{name}.npz"), *jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("environment", "platforms", "expected"),
    [
        ({}, None, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, "cpu", None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "cuda", ()),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None, ()),
        ({}, "tpu,cpu", ()),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"},
            None,
            ("a:1", 4, 3),
        ),
    ],
)
def test_initialize_joins_when_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], platforms: str | None, expected: Any
) -> None:
    calls = pretend(monkeypatch, environment, platforms)
    shard.initialize()
    assert calls == ([] if expected is None else [expected])


def test_a_tpu_in_no_cluster_is_a_single_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend(monkeypatch, {}, "tpu,cpu", error=ValueError("coordinator_address should be defined."))
    shard.initialize()
    assert calls == [()]


@pytest.mark.parametrize("missing", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_half_a_description_of_the_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    whole = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    calls = pretend(monkeypatch, whole | {missing: "x"}, None)
    with pytest.raises(
        ValueError, match=f"{missing} must be a number, not 'x'.*unset JAX_COORDINATOR_ADDRESS"
    ):
        shard.initialize()
    assert not calls


def test_a_cluster_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would take itself for the only one, and train everything."""
    pretend(monkeypatch, {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, None)
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES is set and JAX_COORDINATOR_ADDRESS is not"):
        shard.initialize()


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    platforms: str | None,
    error: Exception | None = None,
) -> list[tuple[Any, ...]]:
    """Arguments of the calls that would have joined a cluster."""
    calls: list[tuple[Any, ...]] = []

    def initialize(*arguments: Any) -> None:
        calls.append(arguments)
        if error:
            raise error

    for name in (
        "JAX_COORDINATOR_ADDRESS",
        "JAX_NUM_PROCESSES",
        "SLURM_STEP_NUM_TASKS",
        "OMPI_COMM_WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed = SimpleNamespace(initialize=initialize, is_initialized=lambda: False)
    config = SimpleNamespace(jax_platforms=platforms, update=lambda *_: None)
    monkeypatch.setattr(shard.hosts, "jax", SimpleNamespace(distributed=distributed, config=config))
    return calls


def test_a_process_that_gives_no_sign_of_life_is_lost() -> None:
    """From the moment that it is silent for long enough, or that the others go on long after it has ended."""
    heard: dict[str, tuple[str, float]] = {}
    lost = functools.partial(hosts.lost, heard, silence=20.0)
    assert lost({"0": "0", "1": "0", "2": "0"}, 100.0) == []
    assert lost({"0": "1", "1": "1", "2": "done"}, 115.0) == []
    assert lost({"0": "2", "1": "1", "2": "done"}, 134.0) == []
    assert lost({"0": "3", "1": "1", "2": "done"}, 135.0) == ["1"]
    assert lost({"0": "4", "1": "2", "2": "done"}, 140.0) == []  # it was only slow
    assert lost({"0": "5", "1": "3", "2": "done"}, 174.0) == []
    assert lost({"0": "6", "1": "4", "2": "done"}, 175.0) == ["2"]


def test_errors_by_which_a_lost_process_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [
        "INTERNAL: Error dispatching computation: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:43949",
        "Timeout waiting at barrier '[op=3.state] save_and_finalize'. Barrier used process ids: [0, 1]",
        "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats)",
        "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out",
    ]
    assert not any(hosts.is_loss(RuntimeError(text)) for text in shown)  # of a single process
    monkeypatch.setattr(hosts, "several", lambda: True)
    assert all(hosts.is_loss(RuntimeError(text)) for text in shown)
    assert not hosts.is_loss(ValueError("--seeds=3 is not a multiple of --mesh_seed=2"))


@pytest.mark.parametrize(("index", "ends", "texts"), [("1", False, ["0"]), ("0", False, []), ("1", True, [])])
def test_who_has_lost_the_first_process_says_so_unless_it_ends_itself(
    index: str, ends: bool, texts: list[str]
) -> None:
    ended, heard = threading.Event(), list[str]()

    def fail(*_: object, **__: object) -> None:
        if ends:
            ended.set()
        raise RuntimeError("UNAVAILABLE")

    hosts._listen(SimpleNamespace(key_value_set=fail), index, ended, heard.append)
    assert heard == texts


def test_without_jaxs_private_store_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another version of JAX may have moved or changed it: a run would end at its start."""
    nothing, written = SimpleNamespace(), dict[str, str]()
    of_old = SimpleNamespace(key_value_set=lambda key, value: None)
    for private in (nothing, SimpleNamespace(global_state=SimpleNamespace(client=of_old))):
        monkeypatch.setattr("jax._src.distributed", private)
        hosts._watch()
        assert "this version of JAX hides the store" in capsys.readouterr().err
    usual = SimpleNamespace(
        key_value_set=lambda key, value, allow_overwrite: written.update({key: value}),
        key_value_dir_get=lambda prefix: list(written.items()),
    )
    monkeypatch.setattr("jax._src.distributed", SimpleNamespace(global_state=SimpleNamespace(client=usual)))
    assert hosts._store() is usual and list(written) == [f"{hosts._SIGNS}0"]


# ---- one device ---------------------------------------------------------------------------------------


def test_one_device_is_a_mesh_too() -> None:
    mesh = shard.mesh()
    assert dict(mesh.shape) == {"seed": 1, "data": 1}
    here = shard.place(np.arange(3), mesh)
    assert shard.place(here, mesh) is here  # and could not be read where other hosts have parts of it
    with pytest.raises(
        ValueError, match=r"1 devices do not divide into seed=2 times data=1.*seed= and data= from"
    ):
        shard.mesh(seed=2)
    keys = jax.random.split(jax.random.key(3), 3)
    tree = {"array": np.arange(6.0).reshape(3, 2), "scalar": jnp.float32(2), "keys": keys}
    placed = shard.place(tree, mesh, P())
    np.testing.assert_array_equal(placed["array"], tree["array"])
    np.testing.assert_array_equal(jax.random.key_data(placed["keys"]), jax.random.key_data(keys))
    assert isinstance(shard.gather(placed["array"], mesh), np.ndarray)
