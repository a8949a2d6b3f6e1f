"""experiments.papers.stop_regressing: its world is one, its control is what it says, and its heads do learn."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import stop_regressing as study
from rl.agents import dqn
from rl.envs import tabular
from rl.networks import mlp
from rl.values import heads

SMALL = study.Settings(seeds=2, phase_steps=200, logged=3000, updates=1500, hidden=32)


def test_logs_follow_the_world() -> None:
    world, seen = tabular.four_rooms(0.25)
    log = study.logged(world, jnp.asarray(seen), jnp.float32(0.5), 4000, jax.random.key(0)).transitions
    index = {tuple(row): state for state, row in enumerate(seen)}
    state, following = (
        np.array([index[tuple(row)] for row in np.asarray(rows)])
        for rows in (log.observation, log.next_observation)
    )
    action = np.asarray(log.action)
    assert (world.transition[state, action, following] > 0).all()
    for seen_before in (action, state % 4, following % 4):  # the log's policy knows no state
        pairs = np.bincount(4 * seen_before + np.asarray(log.next_action), minlength=16) / len(action)
        expected = np.bincount(seen_before, minlength=4).repeat(4) / 4 / len(action)
        np.testing.assert_allclose(pairs, expected, atol=0.015)
    noise = np.asarray(log.reward) - world.reward[state, action]
    assert noise.min() >= 0 and noise.max() <= 0.5 and abs(noise.mean() - 0.25) < 0.01
    moved = seen[following, 2:].argmax(-1) == action
    inside = world.reward[state, action] == 0
    expected = (0.75 + 0.25 * (seen[state, 2:].argmax(-1) == action))[inside].mean()
    assert abs(moved[inside].mean() - expected) < 0.03


def test_the_control_regresses_the_mean_of_a_softmax() -> None:
    control, like = study.make(study.CONTROL, -1, 9, 31), heads.hl_gauss(-1, 9, 31)
    outputs = jax.random.normal(jax.random.key(0), (5, 31))
    target = control.target(jnp.arange(5.0), jnp.full(5, 0.9), outputs)
    np.testing.assert_allclose(target, np.arange(5) + 0.9 * np.asarray(like.value(outputs)), rtol=1e-6)
    error = np.square(np.asarray(like.value(outputs)) - np.asarray(target))
    np.testing.assert_allclose(control.loss(outputs, target), error, rtol=1e-6)


def test_features_are_what_the_last_layer_reads_and_sarsas_error_is_that_of_uniform_actions() -> None:
    world, seen = tabular.four_rooms(0.25)
    network = mlp.action_values(study.SPEC, 1, (8, 8), False, dqn.Config().network)
    params = network.init(jax.random.key(0), seen)
    last = params["Dense_2"]
    outputs = study.features(8, params, jnp.asarray(seen)) @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(outputs, network.apply(params, seen)[..., 0], atol=1e-6)

    q = np.zeros((len(seen), 4))
    for _ in range(300):
        q = world.reward + study.GAMMA * world.transition @ q.mean(-1)
    every = np.arange(len(q))
    learner = SimpleNamespace(critics=lambda state, seen, action: (q + state)[every, action][None])
    errors = [study._error(world, None, learner, 5.0 + wrong, seen, 5.0, sarsa=True) for wrong in (0.0, 0.3)]
    np.testing.assert_allclose(errors, [0.0, 0.3], atol=1e-5)


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads, and of everything else as little as a study can have."""
    for name, value in {
        "NAMES": ("scalar", "hl_gauss"), "NOISES": (0.0, 1.0), "STICKY": {"sticky": 0.25}, "BIN_COUNTS": (31,),
        "WIDTHS": (0.75,), "RATES": (1e-3, 3e-3), "PHASES": (0.0, 8.0), "TAIL": 20, "OFFSET_STEPS": 50,
        "LINEAR": (("sticky", 0.0),),
    }.items():  # fmt: skip
        monkeypatch.setattr(study, name, value)


@pytest.mark.long
def test_the_study(tmp_path, fewer) -> None:
    tiny = dataclasses.replace(SMALL, phase_steps=20, logged=100, updates=10, hidden=8)
    result = study.run(dataclasses.replace(tiny, out=str(tmp_path / "new")))
    for name in ("scalar", "hl_gauss"):
        assert len(result["plasticity"][name]["phases"]) == len(result["fresh"][name]["phases"]) == 2
        assert result["rates"][name]["rate"] in (1e-3, 3e-3)
    stored = json.loads((tmp_path / "new" / "result.json").read_text())
    assert stored["noise"]["sticky, eta 0"]["scalar"]["error"]["each"] == list(
        result["noise"]["sticky, eta 0"]["scalar"]["error"]["each"]
    )
    text = (tmp_path / "new" / "README.md").read_text()
    assert set(result["linear"]["sticky, eta 0, squared error"]) == {"scalar", "hl_gauss", "untrained"}
    assert "| hl_gauss |" in text and "## Sticky, eta 1" in text and "## The same without history" in text
    assert {path.name for path in (tmp_path / "new").glob("*.png")} == {
        "plasticity.png", "sticky_error.png", "sticky_return.png"
    }  # fmt: skip


@pytest.mark.optimised
@pytest.mark.long
def test_its_heads_learn(tmp_path, fewer) -> None:
    result = study.run(dataclasses.replace(SMALL, out=str(tmp_path)))
    for name in ("scalar", "hl_gauss"):
        first, second = (x["mean"] for x in result["plasticity"][name]["phases"])
        assert first < 0.6 and second < 8.0  # from 0.5, if the offset is all it learns, and 64
        assert result["noise"]["sticky, eta 0"][name]["error"]["mean"] < 0.4  # from above 0.7, if it says 0


@pytest.mark.long
def test_without_history_a_phase_has_a_new_network_that_knows_the_offset_before(fewer, monkeypatch) -> None:
    """Its first phase needs no jump, and its errors in the second are those of a jump alone."""
    monkeypatch.setattr(study, "OFFSET_STEPS", 200)
    settings = study.Settings(seeds=2, phase_steps=40)
    work = studies.Work(Path("nowhere"), lambda steps: None)
    history, fresh = (study.plasticity(settings, "scalar", x, work)["curve"] for x in (True, False))
    assert history.shape == fresh.shape == (40, 2)
    np.testing.assert_allclose(
        fresh[0], 0.5, atol=0.2
    )  # the variance of a sine, about an offset of 0 that it knows
    for curve in (history, fresh):  # both have a jump of 8 to make
        np.testing.assert_allclose(curve[20], 64.0, atol=8)
    assert not np.allclose(history[20:], fresh[20:])


def test_a_history_costs_what_the_errors_say() -> None:
    """Scalars lose what they could, HL-Gauss does not."""
    row = lambda *each: {"phases": [{"each": np.array(each)}]}
    phases = {"scalar": row(0.2, 0.21, 0.19), "hl_gauss": row(0.01, 0.011, 0.009)}
    fresh = {"scalar": row(0.02, 0.02, 0.02), "hl_gauss": row(0.01, 0.01, 0.01)}
    result = {
        "plasticity": phases | {"two_hot": phases["scalar"]},
        "fresh": fresh | {"two_hot": fresh["scalar"]},
    }
    verdicts = {claim["claim"]: claim["verdict"] for claim in studies.judged(study.claims(result))}
    worse = "targets that jump: {} fits the last phase worse with a history than without (log of the ratio)"
    assert verdicts[worse.format("scalar")] == "holds" and verdicts[worse.format("hl_gauss")] == studies.OPEN
    assert (
        verdicts["targets that jump: a history costs a scalar more than HL-Gauss (difference of these logs)"]
        == "holds"
    )
    del result["fresh"]
    assert not any("history" in claim.claim for claim in study.claims(result))


def test_errors_under_noise_have_verdicts() -> None:
    """At the largest noise alone, and at rates of their own; returns may say something else."""
    row = lambda error: {"error": {"each": np.array(error)}, "return": {"each": np.zeros(3)}}
    by = {
        "scalar": row([0.3, 0.31, 0.32]),
        "hl_gauss": row([0.1, 0.12, 0.11]),
        "two_hot": row([0.2, 0.2, 0.2]),
    }
    result = {
        "noise": {f"{kind}, eta {eta:g}": by for kind in study.STICKY for eta in study.NOISES},
        "rates": {**by, "scalar": row([0.1, 0.12, 0.11])},
    }
    verdicts = [
        (claim["claim"].partition(": HL-Gauss has")[0], claim["verdict"])
        for claim in studies.judged(study.claims(result))
        if "smaller error" in claim["claim"]
    ]
    assert verdicts == [
        ("four rooms, deterministic, eta 1, one learning rate", studies.HOLDS),
        ("four rooms, sticky, eta 1, one learning rate", studies.HOLDS),
        ("four rooms, sticky, eta 1, each at its own learning rate", studies.OPEN),
    ]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--parts: toys is none of plasticity, noise, sarsa, linear, widths, rates"
    ):
        study.run(study.Settings(parts="toys"))


def test_one_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="--seeds=1: an interval over seeds needs at least 2"):
        study.run(study.Settings(seeds=1))
