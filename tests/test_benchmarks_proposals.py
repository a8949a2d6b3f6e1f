"""FQL, QC and DEAS in `benchmarks.offline`: chunks that NumPy draws, and updates in PyTorch that are ours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmarks import SMALL, randomly_filled

from benchmarks import cases, offline, proposals_peer
from rl.replay import chunks
from rl.values import heads

ROWS, DRAWS = 6, 4


def subject(name: str, head: str = "scalar") -> cases.Subject:
    agent, config = offline._agent(name)
    sizes: dict[str, Any] = {"hidden": (8, 8), "candidates": DRAWS, "flow_steps": 3}
    small = dataclasses.replace(config, **sizes, learning_rate=1e-2, target_rate=0.5)
    chunk = 2 if name in offline.CHUNKED else 1
    return cases.subject(agent, small, heads.make(head, *cases.SUPPORT, 21), chunk=chunk)


def steps() -> Any:
    """Of 40 steps, some of which end by termination."""
    data = cases.synthetic(40)
    ended = np.float32(np.arange(40) % 7 != 6)
    last = (ended == 0) | (np.arange(40) == 39)
    return data._replace(transitions=data.transitions._replace(discount=ended), last=last)


def test_chunks_that_numpy_draws_are_those_of_the_library() -> None:
    of = subject("qc")
    data = cases.logged(of, steps())
    rows = np.asarray(data.starts)
    ours, theirs = (
        chunks.take(jax.device_put(data), rows),
        cases.chunks_on_host(data, rows, of.chunk),
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    drawn = cases.sampler_on_host(of, (500,), data)()
    assert drawn.action.shape == (500, 12) and 0 < (drawn.discount == 0).mean() < 1
    assert {tuple(x) for x in drawn.observation} <= {tuple(x) for x in theirs.observation}


def loaded_into(theirs: Any, ours: Any) -> None:
    """Our parameters in one of the peer's networks."""
    torch = pytest.importorskip("torch")
    tensor = lambda x: torch.tensor(np.asarray(x))
    for i, dense in enumerate([*theirs.dense, theirs.last]):
        params = ours[f"Dense_{i}"]
        dense.weight.data, dense.bias.data = tensor(params["kernel"].T), tensor(params["bias"])
    for i, norm in enumerate(theirs.norms or []):
        params = ours[f"LayerNorm_{i}"]
        norm.weight.data, norm.bias.data = tensor(params["scale"]), tensor(params["bias"])


def noise(name: str, key: jax.Array, width: int) -> list[jax.Array]:
    """What an update of ours draws with its key, in the order in which the peer draws."""
    draws, improved, policy_key = [], [], key
    if name != "deas":
        first, policy_key = jax.random.split(key)
        shape = (ROWS, DRAWS, width) if name == "qc" else (ROWS, width)
        draws = [jnp.moveaxis(jax.random.normal(first, shape), -2, 0 if name == "qc" else -2)]
    flow_key, _, last = jax.random.split(policy_key, 3)
    if name == "fql":
        improved = [jax.random.normal(jax.random.split(last)[0], (ROWS, width))]
    noise_key, time_key = jax.random.split(flow_key)
    of_flow = [jax.random.normal(noise_key, (ROWS, width)), jax.random.uniform(time_key, (ROWS,))[:, None]]
    return [*draws, *of_flow, *improved]


@pytest.mark.parametrize(
    ("name", "head"), [("fql", "scalar"), ("qc", "scalar"), ("deas", "scalar"), ("deas", "hl_gauss")]
)
@pytest.mark.slow
def test_pytorchs_updates_have_our_losses(name: str, head: str) -> None:
    """In two updates: the second sees what the first one moved, gradients and target networks included."""
    torch = pytest.importorskip("torch")
    of = subject(name, head)
    sample = cases.sampler_on_host(of, (ROWS,), cases.logged(of, steps()))
    batch, spec = sample(), cases._spec(of)
    learner, config = cases._learner(of), of.config
    state = jax.jit(learner.init)(jax.random.key(1), batch)
    filled = randomly_filled(learner, batch)
    state = state._replace(params=filled.params, target=filled.target)
    if name == "deas":
        theirs = proposals_peer.DEAS(config, spec, of.head.size, cases.SUPPORT, "cpu")
        networks = {"value": theirs.v, "flow": theirs.flow.velocity}
    else:
        theirs = proposals_peer.FQL(config, spec, "cpu")
        networks = {"flow": theirs.flow.velocity, "policy": theirs.policy}
    for part, network in networks.items():
        if network is not None:
            loaded_into(network, state.params[part])
    for members, ours in ((theirs.critics, state.params), (theirs.slow, state.target)):
        for i, member in enumerate(members):
            loaded_into(member, jax.tree.map(lambda x, i=i: x[i], ours["critic"]))
    update = jax.jit(learner.update)
    for key in jax.random.split(jax.random.key(2), 2):
        drawn = iter(noise(name, key, spec.action_size))
        take = lambda shape, drawn=drawn: torch.tensor(np.asarray(next(drawn))).view(*shape)
        theirs.flow.normal = theirs.flow.uniform = take
        state, metrics = update(state, batch, key)
        losses = theirs.update(batch)
        assert set(losses) == set(metrics) - {"clipped"}
        for label, value in losses.items():
            assert value == pytest.approx(float(metrics[label]), rel=1e-4, abs=1e-5), label


@pytest.mark.long
@pytest.mark.command
def test_the_table_has_blocks_of_chunks_and_how_long_acting_takes(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        SMALL, agents="fql,qc,deas", seeds=(1,), modes="scan,host,act", chunk=3, updates=1, no_d3rlpy=False
    )
    results = offline.run(dataclasses.replace(settings, out=str(tmp_path / "x.json")))
    labels = ["fql", "qc, chunks of 3", "deas, chunks of 3"]
    assert list(results["agents"]) == labels and all(row["retraces"] == 0 for row in results["rows"])
    loops = ["products", "scan", "host", *(["torch"] if results["torch"] else []), "act", "act"]
    assert [(row["agent"], row["loop"]) for row in results["rows"]] == [(a, b) for a in labels for b in loops]
    text = (tmp_path / "x.md").read_text()
    assert text.count("; actions for 64 at once take ") == 3
    assert json.loads((tmp_path / "x.json").read_text())["agents"]["qc, chunks of 3"]["candidates"] == 32
