"""experiments.papers.hecrl: its pairs and measures are what they say, its verdicts can fail, and the study runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import studies
from experiments.papers import hecrl as study
from rl import log
from rl.envs import movers

TINY = study.Settings(
    seeds=2,
    episodes=6,
    steps=30,
    subgoal_steps=5,
    pairs=40,
    batch_size=8,
    questions=16,
    candidates=4,
    farthest=9,
)


@pytest.mark.slow
def test_pairs_are_of_held_out_episodes_and_subgoals_on_the_way() -> None:
    pairs = study.pairs(TINY, 0)
    assert {name: x.state.shape[1] for name, x in pairs.items()} == {
        study.LOGGED: 3,
        study.UNSEEN: 3,
        study.MORE: 4,
    }
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
    measures = study.describe(pair, see([[0.34, 0], [0.5, -0.26], [0.05, 0.5]]))
    # away: ceil(0.24 / 0.08), ceil(0.16 / 0.08), 0; the goal: ceil(0.8 / 0.08) before, ceil(0.46 / 0.08) + 2 from there
    assert {name: float(x) for name, x in measures.items()} == {"displaced": 2, "steps": 5, "nearer": 10 - 8}


@pytest.mark.slow
def test_questions_are_what_they_say() -> None:
    questions = jax.device_get(study.questions(TINY, 0))
    assert questions.candidates.shape == (16, 4, 3, 7)
    ids = questions.state[..., 2:]
    np.testing.assert_array_equal(questions.goal[..., 2:], ids)
    np.testing.assert_array_equal(questions.candidates[..., 2:], np.broadcast_to(ids[:, None], (16, 4, 3, 5)))
    s, g, w = (movers.positions(x) for x in questions[:3])
    near = movers.steps_between(s[:, None], w)
    np.testing.assert_array_equal(questions.near, near)
    np.testing.assert_array_equal(questions.far, movers.steps_between(w, g[:, None]))
    np.testing.assert_array_equal(questions.steps, movers.steps_between(s, g))
    assert near.max() <= TINY.farthest and np.unique(near, axis=1).shape[1] > 1


# Fewest steps to three candidates, from there to the goal, and at once: for four questions
NEAR, FAR, AT_ONCE = (
    np.float32([[4, 12, 30]] * 4),
    np.float32([[40, 35, 10]] * 4),
    np.float32([44, 44, 8, 36]),
)


@pytest.mark.parametrize(
    ("radius", "gain", "beyond", "goal"),
    [
        # 12 steps away is allowed, 30 are not; the third goal is nearer than from there
        (-18.0, [9, 9, 8, 1], 0.0, 0.25),
        # The first candidate alone; the fourth goal is nearer than from there, but too far to be reached
        (-5.0, [4, 4, 8, 0], 0.25, 0.5),
        # The last candidate, which is too far
        (-90.0, [0, 0, 8, 0], 0.75, 0.25),
    ],
)
def test_selections_gain_what_a_low_level_can_reach(
    radius: float, gain: Any, beyond: float, goal: float
) -> None:
    """By true values."""
    questions = study.Questions(None, None, None, AT_ONCE, NEAR, FAR)  # type: ignore[arg-type]
    settings, truth = study.Settings(competence=20), study.truth(questions)
    measures = study.gained(settings, questions, truth, radius)  # type: ignore[arg-type]
    assert {name: float(x) for name, x in measures.items()} == {
        "gain": np.mean(gain),
        "beyond": beyond,
        "goal": goal,
    }


def test_values_are_compared_with_the_truth() -> None:
    assert study.true_value(np.array([0, 1, 2, 3])).tolist() == pytest.approx([0, 0, -1, -1.99], abs=1e-4)
    steps = np.array([[4.0, 2, 9], [5, 5, 5], [3, 8, 1]])
    questions = study.Questions(None, None, None, steps[:, 0], steps, steps)  # type: ignore[arg-type]
    exact = jax.device_get(study.truth(questions))
    measures = study.quality(questions, exact)
    perfect = {"ranking": 1, "order": 1, "bias": 0, "error": 0, "far_bias": 0}
    assert measures == pytest.approx(perfect, abs=1e-5)
    wrong = study.Answers(exact.value + 2, exact.near + np.array([3.0, 1, -1]), -exact.far)
    expected = perfect | {"ranking": -1, "bias": 1, "error": (11 / 3) ** 0.5, "far_bias": 2}
    assert study.quality(questions, wrong) == pytest.approx(expected, abs=1e-5)


def test_the_interval_of_a_share_knows_that_its_denominator_was_measured() -> None:
    """The ratio of both means, whose interval is a bootstrap's over seeds, and that of a constant has none."""
    rng = np.random.default_rng(0)
    at_best = rng.normal(5, 1, 200)
    gain = np.stack([at_best, 0.3 * at_best + rng.normal(0, 0.5, 200)], 1)
    each = study.share_of_best({"gain": gain})
    over_radii, best = gain.mean(1), study.best({"gain": gain})
    rows = rng.integers(200, size=(4000, 200))
    ratios = over_radii[rows].mean(1) / best[rows].mean(1)
    mean, low, high = studies.band(each)
    assert mean == pytest.approx(over_radii.mean() / best.mean())
    np.testing.assert_allclose([low, high], np.quantile(ratios, [0.025, 0.975]), atol=4e-3)
    np.testing.assert_allclose(study.share_of_best({"gain": at_best[:, None] * [1, 0.5]}), 0.75)


# ---- claims --------------------------------------------------------------------------------------------------------


def rows() -> dict[str, Any]:
    """A result with which all claims hold; seeds differ, and so do differences and ratios."""
    two = lambda x: x * np.array([1.0, 1.01 + 1e-3 * np.sin(x)])

    def model(logged: float, unseen: float, more: float) -> dict[str, Any]:
        kinds = {study.LOGGED: logged, study.UNSEEN: unseen, study.MORE: more}
        return {kind: {"displaced": two(x), "nearer": two(9.0)} for kind, x in kinds.items()}

    def value(gain: tuple[float, ...], ranking: float, error: float) -> dict[str, Any]:
        gains = np.array([gain, gain]) * [[1.0, 1.0], [1.001, 1.001 + 1e-4 * np.sin(error)]]
        return {"gain": gains, "ranking": two(ranking), "error": two(error)}

    return {
        "subgoals": {
            "data": {study.DATA: {study.LOGGED: {"displaced": np.array([1.439, 1.441])}}},
            study.DIFFUSION: model(1.4, 1.5, 1.6),
            study.REGRESSION: model(1.8, 2.4, 3.0),
            study.SAME: model(1.7, 2.3, 2.9),
        },
        "values": {
            study.TRUTH: {"gain": value((9.0, 10.0), 1, 1)["gain"]},
            "scalar": value((3.0, 7.0), 0.5, 9.0),
            "hl_gauss": value((8.0, 9.0), 0.7, 5.0),
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
        (("values", "hl_gauss", "ranking"), [0.5, 0.5], ["ranks candidates"]),
        (("values", "scalar", "error"), [4.0, 4.1], ["smaller error"]),
        (("values", "scalar", "gain"), [[6.9, 7.0], [6.8, 7.0]], ["depends less on the choice of R"]),
        (("values", "hl_gauss", "gain"), [[6.5, 6.5], [6.51, 6.51]], ["at its best R, the selection gains more"]),
        (("values", "scalar", "gain"), [[2.0, 4.0], [2.001, 4.002]], ["scalar: at its best R"]),
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


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags to report."""
    monkeypatch.setattr(study, "PIECES", 2)
    settings = study.Settings(
        seeds=2, episodes=6, steps=30, subgoal_steps=5, pairs=8, batch_size=8, updates=4, width=4, layers=1,
        value_updates=4, value_width=4, questions=8, candidates=4, farthest=6, radii=(-5, -20),
        out=str(tmp_path / "new"),
    )  # fmt: skip
    result = study.run(settings)
    assert result["values"]["scalar"]["gain"].shape == (2, 2)
    stored = studies.load(tmp_path / "new" / log.RESULT)
    assert stored["claims"] == studies.judged(study.claims(stored)) == result["claims"]
    text = (tmp_path / "new" / studies.REPORT).read_text()
    assert all(f"## {part}" in text for part in ("Subgoals", "Values", "Claims"))
    assert {path.name for path in (tmp_path / "new").glob("*.png")} == {"displaced.png", "radius.png"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": "subgoal"}, "--parts: subgoal is none of subgoals, values"),
        ({"seeds": 1}, "--seeds=1: an interval over seeds needs at least 2"),
        ({"updates": 25}, "--updates=25 must be a multiple of 10"),
        ({"value_updates": 7}, "--value_updates=7 must be a multiple of 10"),
        ({"value_width": 30}, "--value_width=30 must be a multiple of 4"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.Settings(**fields))
