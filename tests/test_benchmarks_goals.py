"""The benchmark of goals measures what it says: the loops of every agent, their limit, and evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import cases, goals
from rl.agents import gcbc, gciql, hecrl
from rl.networks import entity
from rl.replay.goals import Goals, Hindsight


@pytest.mark.slow
@pytest.mark.parametrize(
    "hindsight",
    [
        Hindsight(subgoal_steps=3),
        Hindsight(Goals(0.2, 0.8, 0.0), mask=False, next_state=True, subgoal_steps=3),  # HECRL's convention
    ],
    ids=["ogbench", "hecrl"],
)
def test_batches_of_the_host_are_batches_of_the_sampler(hindsight: Hindsight) -> None:
    """Of the same shapes and types, with goals as often in each place: it is the loop that is compared."""
    subject = cases.subject(gciql, gciql.Config(goals=hindsight, discount=0.9))
    data = cases.logged(subject, cases.synthetic(2000))
    places = np.arange(2000, dtype=np.float32)
    rows = np.repeat(places[:, None], 17, 1)
    steps = data.transitions._replace(observation=rows, next_observation=rows + 0.5)
    data = data._replace(transitions=steps)
    theirs = cases.goals_on_host(data, hindsight, 0.9, np.random.default_rng(0), (4000,))
    ours = jax.jit(cases._source(subject, 4000))(data, jax.random.key(0), 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), theirs) == jax.tree.map(
        lambda x: (x.shape, x.dtype), ours
    )

    def distances(batch: Any) -> np.ndarray:
        here = np.asarray(batch.value.observation["observation"])[:, 0]
        of_value = np.asarray(batch.value.observation["goal"])[:, 0] - here
        others = [np.asarray(goal)[:, 0] - here for goal in batch[1:]]
        near = [((x > 0) & (x < 10)).mean() for x in (of_value, *others)]
        at_once = [(np.abs(of_value) < 1).mean(), (of_value % 1).mean()]
        return np.array([*near, *at_once, batch.value.reward.mean(), batch.value.discount.mean()])

    np.testing.assert_allclose(distances(theirs), distances(ours), atol=0.04)


@pytest.mark.long
@pytest.mark.command
def test_every_loop_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = cases.subject(gcbc, gcbc.Config(hidden=(8,)))
    monkeypatch.setattr(cases, "subject", lambda module: tiny)
    host = cases.host

    def too_large_for_two(subject: cases.Subject, seeds: int, *others: Any) -> cases.Case:
        if seeds == 2:
            raise MemoryError("its program needs 25 GB")
        return host(subject, seeds, *others)

    monkeypatch.setattr(cases, "host", too_large_for_two)
    out = tmp_path / "goals.json"
    results = goals.run(
        goals.Settings(
            agents="gcbc",
            batches=(4,),
            seeds=(1, 2),
            environments="TwoRooms-v0",
            updates=2,
            repeats=1,
            transitions=2000,
            out=str(out),
        )
    )
    assert json.loads(out.read_text())["rows"] == json.loads(json.dumps(results["rows"]))
    rows = [(row["agent"], row["seeds"], row["loop"]) for row in results["rows"]]
    loops = (cases.LIMIT, *goals.MODES)
    assert rows == [("gcbc, batches of 4", seeds, loop) for seeds in (1, 2) for loop in loops]
    text = out.with_suffix(".md").read_text()
    assert "gcbc, batches of 4, 1 at once: scan does" in text and "hecrl: " not in text
    assert "gcbc, batches of 4, 2 at once: host was left out, its program needs 25 GB" in text
    assert "2 at once: scan does" not in text
    assert (
        "evaluation in TwoRooms-v0, 10 at once" in text and results["evaluations"][0]["steps_per_second"] > 0
    )


@pytest.mark.long
@pytest.mark.command
def test_hecrl_is_measured_on_sets_and_says_how_long_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = hecrl.Config(network=entity.Shape(8, 8, 1, 1), candidates=4)
    monkeypatch.setattr(goals, "_subject", lambda name: cases.subject(hecrl, tiny, shape=cases.ENTITIES))
    sizes = {"batches": (4,), "seeds": (1,), "updates": 2, "repeats": 1, "transitions": 2000}
    out = tmp_path / "goals.json"
    results = goals.run(goals.Settings(agents="hecrl", environments="", out=str(out), **sizes))
    assert [row["loop"] for row in results["rows"]] == [cases.LIMIT, *goals.MODES]
    plans = [
        (row["environments"], row["candidates"], len(row["seconds"]["plan"])) for row in results["plans"]
    ]
    assert plans == [(1, 4, 1), (64, 4, 1)]
    text = out.with_suffix(".md").read_text()
    assert "width 8, inner 8, heads 1, layers 1, " in text
    assert "hecrl: 4 candidates for each of 64 at once take " in text


def test_a_program_larger_than_the_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """HECRL with eight seeds and batches of 1024 ended the whole benchmark."""
    monkeypatch.setattr(cases, "_memory", lambda: 1000)
    with pytest.raises(MemoryError, match="program needs"):
        cases._compile(jax.jit(lambda x: x + 1), np.zeros(1000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agents": "iql"}, "--agents: iql is none of crl"),
        ({"batches": (0,)}, "--batches needs numbers"),
        ({"repeats": 0}, "--repeats=0 must be at least 1"),
        ({"updates": -1}, "--updates=-1 must not be negative"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        goals.run(goals.Settings(**fields))
