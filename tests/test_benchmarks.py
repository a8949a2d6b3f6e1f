"""The benchmark measures what it says: the right products, all of them, one copy of the data, every retrace.

No time is asserted.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases, coarse_peer, kernels, offline, peers, products, table
from rl import agents
from rl.agents import bc, iql
from rl.values import heads


def shape(*axes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(axes, jnp.float32)


def mlp_flops(rows: int, widths: tuple[int, ...], gradients: str = "") -> int:
    """By hand: forward; with respect to the parameters ("w"); to the input too ("wx"), or to it alone ("x")."""
    layers = [2 * rows * a * b for a, b in itertools.pairwise(widths)]
    total = sum(layers)
    if "w" in gradients:
        total += sum(layers)
    if gradients:
        total += sum(layers[1:]) + (layers[0] if "x" in gradients else 0)
    return total


# ---- finding products -------------------------------------------------------------------------------------


def test_a_gradient_has_two_products_per_layer_but_none_for_the_input() -> None:
    def loss(params, x):
        return jnp.square(jax.nn.relu(x @ params[0]) @ params[1]).sum()

    matmuls = products.find(jax.grad(loss), [shape(5, 16), shape(16, 3)], shape(8, 5))
    assert products.flops(matmuls) == mlp_flops(8, (5, 16, 3), "w")
    assert len(matmuls) == 5


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.slow
def test_products_of_iql_are_those_of_its_losses(seeds: int) -> None:
    population = cases._population(cases.subject(iql), 32, 1)
    keys, dataset = jax.random.split(jax.random.key(0), seeds), cases.synthetic(2)
    state = jax.eval_shape(population.init, keys, dataset.transitions)
    matmuls = products.find(population.epoch, state, dataset, keys)
    critic, value, policy = (23, 256, 256, 1), (17, 256, 256, 1), (17, 256, 256, 6)
    by_hand = (
        2 * mlp_flops(32, critic)  # the slow critics
        + mlp_flops(32, value)  # V(s')
        + 2 * mlp_flops(32, critic, "w")
        + mlp_flops(32, value, "w")
        + mlp_flops(32, policy, "w")
    )
    assert products.flops(matmuls) == seeds * by_hand


@pytest.mark.slow
def test_a_delayed_policy_has_its_products_in_the_updates_that_move_it() -> None:
    """TD3+BC with its policy's two directions through the first critic, and one of its own in every target."""
    config = agents.get("td3_bc").Config(hidden=(16,), policy_delay=3)
    limit = cases.limit(cases.subject(agents.get("td3_bc"), config), 1, 8, 4)
    critic, policy = (23, 16, 1), (17, 16, 6)
    every = mlp_flops(8, policy) + 2 * mlp_flops(8, critic) + 2 * mlp_flops(8, critic, "w")
    moved = mlp_flops(8, policy, "w") + mlp_flops(8, critic, "x")
    assert limit.updates == 6  # two periods
    assert limit.facts["flops_per_update"] == pytest.approx(every + moved / 3)


def test_repeats_count_once_and_unused_products_not_at_all() -> None:
    def function(x, w):
        dead = w @ w
        del dead
        inner = jax.jit(lambda a: a @ w)
        return inner(x) + jax.lax.stop_gradient(inner(x)) + (x @ w) * 2

    assert len(products.find(function, shape(4, 4), shape(4, 4))) == 1


def test_calls_are_followed_into() -> None:
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    plain = products.find(product, shape(4, 5), shape(5, 6))
    gradient = products.find(jax.grad(lambda w, x: product(x, w).sum()), shape(5, 6), shape(4, 5))
    again = products.find(jax.checkpoint(lambda x, w: x @ w), shape(4, 5), shape(5, 6))
    assert [p.flops for p in plain] == [240] == [p.flops for p in again]
    assert [p.flops for p in gradient] == [240]  # the loss itself is not asked for


def test_scan_counts_every_iteration_and_cond_its_largest_branch() -> None:
    def function(x, w, xs):
        y, _ = jax.lax.scan(lambda c, s: (c @ w + s, None), x, xs)
        return jax.lax.cond(y.sum() > 0, lambda a: a @ w @ w, lambda a: a @ w, y)

    arguments = shape(4, 4), shape(4, 4), shape(3, 4, 4)
    assert len(products.find(function, *arguments)) == 3 + 2
    assert len(products.find(function, *arguments, branch=min)) == 3 + 1


def test_a_product_that_cannot_be_counted_is_an_error() -> None:
    def function(x, w):
        return jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)

    with pytest.raises(ValueError, match="inside 'while'"):
        products.find(function, shape(4, 4), shape(4, 4))


# ---- the program of products ------------------------------------------------------------------------------


def test_program_chains_the_products_of_the_function() -> None:
    def function(x, w1, w2):
        return jax.nn.relu(x @ w1 + 1) @ w2

    matmuls = products.find(function, shape(8, 5), shape(5, 16), shape(16, 3))
    operands = products.operands(matmuls, jax.random.key(0))
    assert [x.shape for x in operands] == [(8, 5), (5, 16), (16, 3)]
    (changed,), (result,) = jax.jit(products.program(matmuls, 4))(operands)
    x, w1, w2 = map(np.asarray, operands)
    smallest = min(operands[:2], key=lambda a: a.size)
    assert changed.shape == smallest.shape
    x = x.copy()
    x[0, 0] = 3 / 4  # at the last of 4 steps
    np.testing.assert_allclose(changed, x, rtol=1e-6)
    np.testing.assert_allclose(result, x @ w1 @ w2, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the CPU compiler's output")
def test_compiler_keeps_every_product_in_the_loop() -> None:
    def loss(params, x):
        return jnp.square(jax.nn.relu(x @ params[0]) @ params[1]).sum()

    matmuls = products.find(jax.grad(loss), [shape(48, 64), shape(64, 32)], shape(40, 48))
    operands = products.operands(matmuls, jax.random.key(0))
    text = jax.jit(products.program(matmuls, 7)).lower(operands).compile().as_text()
    assert len(re.findall(r"\bdot\(", text)) == len(matmuls) == 5
    assert "dot_general" not in text[text.index("ENTRY") :]


@pytest.mark.slow
def test_products_of_products_stay_in_range() -> None:
    population = cases._population(cases.subject(iql), 16, 1)
    keys, dataset = jax.random.split(jax.random.key(0), 1), cases.synthetic(2)
    state = jax.eval_shape(population.init, keys, dataset.transitions)
    matmuls = products.find(population.epoch, state, dataset, keys)
    _, results = jax.jit(products.program(matmuls, 2))(products.operands(matmuls, jax.random.key(0)))
    assert all(1e-9 < np.abs(r).max() < 1e3 for r in results)


# ---- timing -----------------------------------------------------------------------------------------------


def fake_case(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    monkeypatch.setattr(cases.time, "perf_counter", lambda: clock[0])

    def make(loop: str, seeds: int, updates: int, durations: list[float]) -> cases.Case:
        left = iter([0.0, *durations])  # the first call warms up

        def call() -> None:
            clock[0] += next(left)

        return cases.Case(loop, seeds, updates, call, {"flops_per_update": 10}, [None])

    return make


def test_rows_are_medians_over_rounds_and_shares_are_taken_within_a_round(monkeypatch) -> None:
    make = fake_case(monkeypatch, [0.0])
    limit = make(cases.LIMIT, 2, 10, [1.0, 2.0, 4.0])
    agent = make("scan", 2, 10, [2.0, 5.0, 5.0])  # shares 0.5, 0.4, 0.8
    peer = make("d3rlpy", 1, 5, [1.0, 2.0, 4.0])  # one seed in the limit's time for two: 0.25 each
    rounds = []
    rows = cases.measure([limit, agent, peer], 3, rounds.append)
    assert [row["updates_per_second"] for row in rows] == pytest.approx([10.0, 4.0, 2.5])
    assert [row["of_limit"] for row in rows] == pytest.approx([1.0, 0.5, 0.25])
    assert sum(rounds) == 4 and [row["retraces"] for row in rows] == [0, 0, 0]


def test_a_program_that_is_traced_again_is_noticed() -> None:
    program, traces = cases._traced(lambda x: x + 1)
    length = iter((3, 3, 4))  # the third call has a new shape
    limit = cases.Case(cases.LIMIT, 1, 1, lambda: None, {"flops_per_update": 1}, [])
    case = cases.Case("scan", 1, 1, lambda: program(jnp.zeros(next(length))), {}, traces)
    assert [row["retraces"] for row in cases.measure([limit, case], 2, lambda _: None)] == [0, 1]


@pytest.mark.parametrize("loop", ["scan", "host"])
def test_a_call_returns_when_its_work_is_done(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX returns before that, and what was timed would be how long it takes to ask for updates."""
    monkeypatch.setattr(cases, "SECONDS", 1e-9)
    tiny = cases.subject(bc, bc.Config(hidden=(4,)))
    case = getattr(cases, loop)(tiny, 1, 2, 3, cases.synthetic(20))
    steps: list[int] = []  # of the state that was waited for

    def wait(x: Any) -> Any:
        (state, *_) = jax.tree.leaves(x, is_leaf=lambda y: hasattr(y, "step"))
        steps.append(int(np.max(state.step)))
        return x

    monkeypatch.setattr(jax, "block_until_ready", wait)
    for _ in range(2):
        case.call()
    assert len(steps) == 2 and steps[1] - steps[0] == case.updates  # once a call, for what it leaves


def test_kernels_of_a_trace_are_counted_per_update() -> None:
    """What a GPU leaves: its streams count, and neither the host nor what else is said of the device."""

    def named(kind: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}

    def ran(name: str, pid: int, tid: int, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}

    events = [
        *(named("process", "/device:GPU:0", 1), named("process", "/host:CPU", 2)),
        *(named("thread", "Stream #14(Compute)", 1, 5), named("thread", "XLA Modules", 1, 6)),
        *(ran("gemm", 1, 5, 10.0, 4.0), ran("gemm", 1, 5, 15.0, 4.0), ran("add", 1, 5, 20.0, 2.0)),
        *(ran("jit_epoch", 1, 6, 0.0, 99.0), ran("gemm", 2, 5, 0.0, 50.0)),
    ]
    ran_there = kernels.summary(events, 2)
    assert ran_there == {
        "kernels": 1.5,
        "busy_microseconds": 5.0,
        "span_microseconds": 6.0,
        "longest": [
            {"name": "gemm", "calls": 1.0, "microseconds": 4.0},
            {"name": "add", "calls": 0.5, "microseconds": 1.0},
        ],
    }
    assert (
        ran_there
        and kernels.text(ran_there)
        == "2 kernels and copies per update, 5 microseconds in 6, of which gemm takes 4"
    )
    assert kernels.summary(events[:4], 2) is None and kernels.profile(lambda: None, 1) is None


# ---- the whole ------------------------------------------------------------------------------------------


SMALL = offline.Settings(
    agents="bc", seeds=(1, 2), batch_size=8, updates=4, repeats=1, transitions=3000, no_d3rlpy=True
)


@pytest.mark.long
@pytest.mark.command
def test_run_measures_every_loop_and_writes_what_it_returns(tmp_path: Path) -> None:
    settings = offline.dataclasses.replace(
        SMALL, modes="scan,host,act", out=str(tmp_path / "new" / "small.json")
    )
    results = offline.run(settings)
    rows = [row for row in results["rows"] if row["loop"] != "act"]
    acting = [row for row in results["rows"] if row["loop"] == "act"]
    assert [(row["environments"], row["retraces"]) for row in acting] == [(1, 0), (64, 0)]
    assert all(row["seconds_per_call"][0] > 0 and "of_limit" not in row for row in acting)
    loops = ["products", "scan", "host"]
    assert [(row["seeds"], row["loop"]) for row in rows] == [(s, loop) for s in (1, 2) for loop in loops]
    assert all(row["retraces"] == 0 and math.isfinite(row["of_limit"]) for row in rows)
    assert all(row["flops_per_update"] == row["seeds"] * mlp_flops(8, (17, 256, 256, 6), "w") for row in rows)
    assert json.loads((tmp_path / "new" / "small.json").read_text())["rows"] == results["rows"]
    text = (tmp_path / "new" / "small.md").read_text()
    assert "1 and 2 seeds read one copy of the data" in text and text == table.render(results)
    assert "; actions for 64 at once take " in text and "| act" not in text

    used = 3000 * (17 + 6) * 4  # of all the fields behaviour cloning reads these two
    data = {row["data_bytes"] for row in rows if row["loop"] == "scan"}
    assert data == {used}
    one, two = (row["peak_bytes"] for row in rows if row["loop"] == "scan")
    state = 3 * 4 * (17 * 256 + 256 * 256 + 256 * 6 + 256 + 256 + 6 + 6)  # parameters and both moments
    assert used < one < two < one + 3 * state  # a second seed: its state, and room to work on one of the two
    one, two = (row["peak_bytes"] for row in rows if row["loop"] == "products")
    assert one == two  # operands of one seed, whose turn it is


def test_a_second_copy_of_the_data_is_reported() -> None:
    row = {"agent": "bc", "loop": "scan", "flops_per_update": 1, "products": 1}
    results = {"rows": [], "agents": {"bc": {"hidden": (4,)}}}
    results["rows"] = [row | {"seeds": 1, "data_bytes": 10}, row | {"seeds": 8, "data_bytes": 80}]
    assert "NOT one copy" in table._sizes("bc", results)


def test_grids_are_blocks_of_the_agents_that_cut_actions() -> None:
    settings = offline.dataclasses.replace(SMALL, grids="1x41,3x5", head="c51", head_size=7)
    subjects = offline._subjects(settings, ["bc", "cqn", "arsq"])
    assert list(subjects) == ["bc", "cqn 1x41", "cqn 3x5", "arsq 1x41", "arsq 3x5"]
    grids = [(one.config.levels, one.config.bins) for _, one in list(subjects.values())[1:]]
    assert grids == [(1, 41), (3, 5)] * 2
    assert {one.head.size for _, one in subjects.values()} == {7}


TINY = {"levels": 2, "bins": 3, "hidden": (8, 8), "learning_rate": 0.0}


def loaded_into(theirs: Any, ours: Any) -> None:
    """Our parameters of dense layers (and a trunk) in one of the peer's networks."""
    torch = pytest.importorskip("torch")
    dense, tensor = ours.get("dense", ours), lambda x: torch.tensor(np.asarray(x))
    pairs = [(theirs.last, dense["Dense_2"], "kernel")]
    pairs += [(theirs.dense[i], dense[f"Dense_{i}"], "kernel") for i in range(2)]
    pairs += [(theirs.norms[i], dense[f"LayerNorm_{i}"], "scale") for i in range(2) if theirs.norms]
    if theirs.trunk:
        pairs += [(theirs.trunk, ours["trunk"]["Dense_0"], "kernel")]
        pairs += [(theirs.trunk_norm, ours["trunk"]["LayerNorm_0"], "scale")]
    for layer, params, weight in pairs:
        layer.weight.data, layer.bias.data = tensor(params[weight].T), tensor(params["bias"])


def randomly_filled(learner: Any, batch: Any) -> Any:
    rng = np.random.default_rng(0)
    state = jax.eval_shape(learner.init, jax.random.key(0), batch)
    fill = lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype)
    params, target = jax.tree.map(fill, (state.params, state.target))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state.optimiser, state.step))
    return state._replace(params=params, target=target, optimiser=zeros[0], step=zeros[1])


@pytest.mark.parametrize("head", ["scalar", "c51"])
def test_pytorchs_cqn_has_our_losses(head: str) -> None:
    pytest.importorskip("torch")
    config = agents.get("cqn").Config(features=4, dominance_weight=0.7, **TINY)
    value_head = heads.make(head, *cases.SUPPORT, 11)
    learner = agents.get("cqn").make(config, cases.SPEC, value_head)
    batch = jax.tree.map(lambda x: x[:6], cases.synthetic(6).transitions)
    batch = batch._replace(discount=np.float32([1, 0, 1, 1, 0, 1]))
    state = randomly_filled(learner, batch)
    theirs = coarse_peer.CQN(config, cases.SPEC, value_head.size, cases.SUPPORT, "cpu")
    for networks, ours in ((theirs.network, state.params["q"]), (theirs.slow, state.target["q"])):
        for network, name in zip(networks, ("advantage", "value"), strict=True):
            loaded_into(network, ours[name])
    metrics = jax.jit(learner.update)(state, batch, jax.random.key(0))[1]
    losses = theirs.update(batch)
    assert set(losses) == set(metrics) - {"clipped"}
    for name, value in losses.items():
        assert value == pytest.approx(float(metrics[name]), rel=1e-4), name


@pytest.mark.parametrize("bc", ["cql", "margin"])
def test_pytorchs_arsq_has_our_losses(bc: str) -> None:
    pytest.importorskip("torch")
    config = agents.get("arsq").Config(bc=bc, temperature=0.5, **TINY)
    learner = agents.get("arsq").make(config, cases.SPEC, heads.scalar())
    batch = jax.tree.map(lambda x: x[:6], cases.synthetic(6).transitions)
    state = randomly_filled(learner, batch)
    theirs = coarse_peer.ARSQ(config, cases.SPEC, "cpu")
    for members, ours in ((theirs.members, state.params["q"]), (theirs.slow, state.target["q"])):
        for i, member in enumerate(members):
            loaded_into(member[0], jax.tree.map(lambda x, i=i: x[i], ours["value"]))
            loaded_into(member[1], jax.tree.map(lambda x, i=i: x[i, 0], ours["advantage"]))
    metrics = jax.jit(learner.update)(state, batch, jax.random.key(0))[1]
    losses = theirs.update(batch)
    for name in ("critic_loss", "bc_loss"):
        assert losses[f"{name}0"] + losses[f"{name}1"] == pytest.approx(float(metrics[name]), rel=1e-4), name
    assert (losses["q0"] + losses["q1"]) / 2 == pytest.approx(float(metrics["q"]), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_updates_per_call_follow_the_machine(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cases, "SECONDS", 1e-9)
    settings = offline.dataclasses.replace(
        SMALL, updates=0, seeds=(1,), modes="host", out=str(tmp_path / "x.json")
    )
    limit, host = offline.run(settings)["rows"]
    assert limit["updates_per_call"] == 1 and host["updates_per_call"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agents": "bcc"}, "unknown agent 'bcc'.*'bc'"),
        ({"agents": "dqn"}, "cannot act in continuous"),
        ({"modes": "scan,hots"}, "--modes has no 'hots'"),
        ({"batch_size": 0}, "--batch_size=0"),
        ({"repeats": 0}, "--repeats=0"),
        ({"seeds": (0,)}, "--seeds"),
        ({"updates": -1}, "--updates=-1"),
        ({"agents": "cqn", "grids": "3x5,7"}, "--grids has '7': give levels x bins"),
        ({"agents": "qc", "chunk": 0}, "--chunk=0 must be at least 1"),
        ({"agents": "cqn", "grids": "30x5"}, "levels=30 with bins=5"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path, change: dict, message: str) -> None:
    settings = offline.dataclasses.replace(SMALL, out=str(tmp_path / "x.json"), **change)
    with pytest.raises(ValueError, match=message):
        offline.run(settings)


@pytest.mark.slow
def test_command_line_says_what_is_wrong() -> None:
    command = [sys.executable, "-m", "benchmarks.offline", "--modes=fast"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False
    )
    assert done.returncode == 2 and "choose from scan, host" in done.stderr


def test_absent_d3rlpy_is_said_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "d3rlpy", None)
    assert "make bench" in peers.missing()


@pytest.mark.parametrize("name", peers.AGENTS)
def test_d3rlpy_trains_networks_of_the_same_sizes(name: str) -> None:
    d3rlpy = pytest.importorskip("d3rlpy")
    assert peers.missing() is None
    hidden = agents.get(name).Config().hidden
    data = peers.buffer(cases.synthetic(2500))
    for update in peers.updates(name, hidden, 8, data).values():
        assert all(math.isfinite(value) for value in update().values())
    learner = peers._learner(name, hidden, 8, data, "cpu", compile_graph=False)
    assert isinstance(learner, d3rlpy.algos.IQL if name == "iql" else d3rlpy.algos.CQL)
    state, _ = cases._start(cases.subject(agents.get(name)), 1)
    for theirs, ours in ((learner.impl.modules.q_funcs, "critic"), (learner.impl.modules.policy, "policy")):
        parameters = sum(x.size for x in jax.tree.leaves(state.params[ours]))
        assert sum(p.numel() for p in theirs.parameters()) == parameters
