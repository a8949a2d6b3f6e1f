"""experiments.papers.hecrl: its pairs and measures are what they say, its verdicts can fail, and the study runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import hecrl as study
from rl import log
from rl.envs import movers
from rl.replay import goals

TINY = study.Settings(seeds=2, episodes=6, steps=30, subgoal_steps=5, pairs=40, batch_size=8)


def test_pairs_are_of_held_out_episodes_and_subgoals_on_the_way() -> None:
    pairs = study.pairs(TINY, 0)
    assert [x.state.shape[1] for x in pairs.values()] == [3, 3, 4]
    for pair in pairs.values():  # the same objects in both
        np.testing.assert_array_equal(pair.state[..., 2:], pair.goal[..., 2:])
        assert (pair.state[..., 2:].sum((1, 2)) == pair.state.shape[1]).all()
    s, g, w = (movers.positions(x) for x in pairs[study.LOGGED])
    assert (movers.steps_between(s, w) <= TINY.subgoal_steps).all()
    direct = movers.steps_between(s, g) <= 1
    assert direct.any() and not direct.all()
    moved = np.linalg.norm(s - w, axis=-1) > 1e-6
    assert moved.any(1).all() and moved.sum(1).mean() < 2  # at most a few objects in five steps
    s, g = (movers.positions(x) for x in pairs[study.UNSEEN][:2])
    assert (np.linalg.norm(s - g, axis=-1) > 1e-3).all()
    data = study.logged(TINY, 0)
    assert len(data.end) == 6 * 30
    np.testing.assert_allclose(data.state, movers.positions(data.transitions.next_observation), atol=1e-6)
    other = study.logged(TINY, 1)
    assert not np.allclose(other.state, data.state)


def test_measures_by_hand() -> None:
    """Two objects of three displaced, one of them on its way."""
    see = lambda x: movers.observe(np.float32(x)[None], np.arange(3), study.SLOTS)
    pair = study.Pairs(see([[0, 0], [0.5, 0], [0, 0.5]]), see([[0.9, 0], [0.5, 0], [0, 0.5]]))
    found = study.describe(pair, see([[0.34, 0], [0.5, -0.26], [0.05, 0.5]]))
    # away: ceil(0.24 / 0.08), ceil(0.16 / 0.08), 0; the goal: ceil(0.8 / 0.08) before, ceil(0.46 / 0.08) + 2 from there
    assert {name: float(x) for name, x in found.items()} == {"displaced": 2, "steps": 5, "nearer": 10 - 8}


def test_values_are_compared_with_the_truth() -> None:
    assert study.true_value(np.array([0, 1, 2, 3])).tolist() == pytest.approx([0, 0, -1, -1.99])
    steps = np.array([[4.0, 2, 9], [5, 5, 5], [3, 8, 1]])
    exact = study.Answers(
        *(f(x) for x in (steps[:, 0], steps, steps) for f in (study.true_value, lambda x: x))
    )
    found = study.quality(exact)
    assert found == pytest.approx({"ranking": 1, "order": 1, "bias": 0, "near_bias": 0, "near_error": 0})
    wrong = exact._replace(far=-exact.far, near=exact.near + np.array([3.0, 1, -1]), value=exact.value + 2)
    found = study.quality(wrong)
    assert found == pytest.approx(
        {"ranking": -1, "order": 1, "bias": 2, "near_bias": 1, "near_error": (11 / 3) ** 0.5}
    )


# ---- claims --------------------------------------------------------------------------------------------------------


def rows() -> dict[str, Any]:
    """A result with which all claims hold."""
    two = lambda x: x * np.array([1.0, 1.01])

    def model(logged: float, unseen: float, more: float) -> dict[str, Any]:
        kinds = {study.LOGGED: logged, study.UNSEEN: unseen, study.MORE: more}
        return {kind: {"displaced": two(x), "nearer": two(9.0)} for kind, x in kinds.items()}

    def agent(success: tuple[float, ...], ranking: float, error: float) -> dict[str, Any]:
        rates = np.array([success, success]) * np.array([[1.0], [1.001]])
        values = {"ranking": two(ranking), "near_error": two(error)}
        return {
            "radii": {"any": rates},
            **{name: {"any": two(0.3)} for name in study.BASELINES},
            "one more": {"subgoals": {"any": two(0.5)}, "no subgoals": {"any": two(0.2)}},
            "values": values,
        }

    return {
        "settings": {"radius": -20, "radii": [-10, -20]},
        "subgoals": {
            "data": {study.DATA: {study.LOGGED: {"displaced": np.array([1.43, 1.45])}}},
            study.DIFFUSION: model(1.4, 1.5, 1.6),
            study.REGRESSION: model(1.8, 2.4, 3.0),
            study.SAME: model(1.7, 2.3, 2.9),
        },
        "control": {
            "scalar": agent((0.4, 0.8), 0.5, 9.0),
            "hl_gauss": agent((0.8, 0.9), 0.7, 5.0),
            study.AWR: {"any": two(0.3)},
        },
    }


@pytest.mark.parametrize(
    ("place", "value", "denied"),
    [
        (("subgoals", "data", study.DATA, study.LOGGED, "displaced"), [1.5, 1.6], ["1.44", "closer to the data"]),
        (("subgoals", study.DIFFUSION, study.UNSEEN, "displaced"), [1.5, 1.9], ["unseen.*regression", "unseen.*same"]),
        (("subgoals", study.SAME, study.MORE, "displaced"), [1.7, 3.0], ["one more object.*same network"]),
        (("subgoals", study.REGRESSION, study.LOGGED, "displaced"), [1.44, 1.45], ["closer to the data"]),
        (("subgoals", study.DIFFUSION, study.UNSEEN, "nearer"), [-1.0, 1.0], ["nearer to the goal"]),
        (("control", "scalar", "no subgoals", "any"), [0.8, 0.9], ["scalar, R = -20.*no subgoals"]),
        (("control", "hl_gauss", "random feasible", "any"), [0.9, 0.95], ["hl_gauss.*random feasible"]),
        (("control", "scalar", "one more", "subgoals", "any"), [0.2, 0.2], ["scalar, one more"]),
        (("control", study.AWR, "any"), [0.8, 0.81], ["AWR"]),
        (("control", "hl_gauss", "values", "ranking"), [0.5, 0.5], ["ranks candidates"]),
        (("control", "scalar", "values", "near_error"), [4.0, 4.1], ["smaller error"]),
        (("control", "scalar", "radii", "any"), [[0.79, 0.8], [0.78, 0.8]], ["less delicate"]),
        (("control", "hl_gauss", "radii", "any"), [[0.7, 0.7], [0.71, 0.71]], ["at its best"]),
    ],
)  # fmt: skip
def test_each_claim_holds_of_what_it_says_and_fails_of_what_it_denies(
    place: tuple[str, ...], value: Any, denied: list[str]
) -> None:
    result = rows()
    assert {row["verdict"] for row in studies.judged(study.claims(result))} == {studies.HOLDS}
    changed = inner = copy.deepcopy(result)
    *path, what = place
    for step in path:
        inner = inner[step]
    inner[what] = np.array(value)
    failed = [
        row["claim"] for row in studies.judged(study.claims(changed)) if row["verdict"] != studies.HOLDS
    ]
    assert len(failed) == len(denied), failed
    assert all(re.search(text, claim) for text, claim in zip(denied, failed, strict=True)), failed


# ---- the study -----------------------------------------------------------------------------------------------------


def test_an_agent_that_knows_the_way_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's loop: goals are shown, memory is carried, success at any step and at the last one is told apart."""

    def act(state: Any, observation: Any, key: Any) -> Any:
        """Straight to the goal, and away from it once it is reached."""
        position, goal = (movers.positions(observation[name]) for name in (goals.OBSERVATION, goals.GOAL))
        far = jax.nn.one_hot(jnp.linalg.norm(goal - position, axis=-1).argmax(-1), 3)[..., None]
        here, away = (far * position).sum(-2), (far * (goal - position)).sum(-2)
        sign = jnp.where(movers.reached(position, goal), -1.0, 1.0)[:, None]
        return jnp.concatenate([here, sign * away / jnp.linalg.norm(away, axis=-1, keepdims=True)], -1)

    learner = SimpleNamespace(actor=None, act=act)
    monkeypatch.setattr(study.hecrl, "make", lambda *_: learner)
    settings = study.Settings(trials=20, limit=120)
    trial = jax.jit(lambda key: study.success(settings, None, None, None, key))  # type: ignore[arg-type]
    found = trial(jax.random.key(0))
    assert float(found["any"]) == 1 and float(found["last"]) < 1


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags to report."""
    monkeypatch.setattr(study, "PIECES", 2)
    settings = study.Settings(
        seeds=2, episodes=6, steps=30, subgoal_steps=5, pairs=8, batch_size=8, updates=4, width=4, layers=1,
        control_updates=4, control_width=4, control_layers=1, candidates=2, radii=(-5, -20), trials=3, limit=12,
        out=str(tmp_path / "new"),
    )  # fmt: skip
    result = study.run(settings)
    assert result["control"]["scalar"]["radii"]["any"].shape == (2, 2)
    stored = studies.load(tmp_path / "new" / log.RESULT)
    assert stored["claims"] == studies.judged(study.claims(stored)) == result["claims"]
    text = (tmp_path / "new" / studies.REPORT).read_text()
    assert all(f"## {part}" in text for part in ("Subgoals", "Control", "Claims"))
    assert {path.name for path in (tmp_path / "new").glob("*.png")} == {"displaced.png", "radius.png"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": "subgoal"}, "--parts: subgoal is none of subgoals, control"),
        ({"seeds": 1}, "--seeds=1: an interval over seeds needs at least 2"),
        ({"updates": 25}, "--updates=25 must be a multiple of 10"),
        ({"radius": -7}, "--radius=-7 must be one of --radii=-5,-10"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.Settings(**fields))
