"""experiments.papers.ilql_maze: its log and its tables against plain Python, and the study on a tiny setting."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import ilql_maze as study
from rl.envs import double_t_maze as maze
from rl.envs.tabular import Episodes
from rl.replay import tokens as replay
from rl.values import heads

TINY = study.Settings(seeds=2, walks=20, updates=16, cloning=4, batch_size=4, width=8)


@pytest.fixture(scope="module")
def data() -> study.Log:
    return study.logged(np.random.default_rng(0), 1240, published=False)


def test_a_row_is_a_move_in_the_words_of_the_maze() -> None:
    walks = maze.logged(np.random.default_rng(3), 7)
    data = study.logged(np.random.default_rng(3), 7, published=False)
    episodes = []
    for walk in range(7):
        turns = [
            turn._replace(text=[study.VOCABULARY.index(word) for word in study.words(turn.text)])
            for turn in maze.dialogue(walks, walk).turns
        ]
        for start in range(0, len(turns) - 1, 2):
            arrived = turns[start + 1].reward == 0
            episodes.append(
                replay.episode([replay.Turn(*turn) for turn in turns[start : start + 3]], bool(arrived))
            )
    expected = replay.pack(episodes, study.TURN + study.SEEN.shape[1], together=False)
    assert data.valid == len(episodes)
    for actual, wanted in zip(data.rows, expected, strict=True):
        np.testing.assert_array_equal(actual[: data.valid], wanted)
    assert data.counts.sum() == data.valid


def test_returns_run_to_the_end_of_the_walk() -> None:
    goal = maze.GOAL
    walks = Episodes(
        np.zeros((2, 3), int), np.zeros((2, 3), int), np.array([[1, goal, goal], [1, 2, 3]]),
        np.array([[True, True, False], [True, True, True]]),
    )  # fmt: skip
    turn = 0.99**2
    np.testing.assert_allclose(
        study.returns_to_go(walks), [[-1, 0, 0], [-1 - turn - turn**2, -1 - turn, -1]], rtol=1e-6
    )


def test_values_in_a_table_are_expectiles(data: study.Log) -> None:
    often = data.counts.sum(-1)
    for tau in (0.5, 0.9):
        q, value = study.expectile_values(data, tau)
        for state in study.STARTS:
            pull = np.where(q[state] > value[state], tau, 1 - tau) * (q[state] - value[state])
            assert often[state] @ pull == pytest.approx(0, abs=1e-6 * often[state].sum())
        state, action = 0, 1  # one cell from the end of the bar, to the right
        after = maze.CELLS.index((1, 2))
        assert q[state, action] == pytest.approx(0.99 * (-1 + 0.99 * value[after]))
    # The largest expectile is the best logged move: all of them are logged.
    best = study.expectile_values(data, 1 - 1e-9)[1]
    distance = np.array([11, 10, 9, 10, 11])  # moves from the left bar to the last before the goal
    np.testing.assert_allclose(
        best[:5], [-0.99 * (1 - 0.99 ** (2 * d)) / (1 - 0.99**2) for d in distance], rtol=1e-4
    )


def test_monte_carlo_averages_what_was_earned(data: study.Log) -> None:
    walks = maze.logged(np.random.default_rng(0))
    returns = study.returns_to_go(walks)
    values = study.monte_carlo(data)
    for state, action in ((0, 1), (22, 3), (13, 2)):
        here = walks.valid & (walks.state == state) & (walks.action == action)
        assert values[state, action] == pytest.approx(0.99 * returns[here].mean(), rel=1e-6)


def test_expected_returns_are_those_of_walking() -> None:
    uniform = np.full((26, 4), 0.25)
    assert study.expected_return(uniform) == pytest.approx(-85.6, abs=0.7)
    rng = np.random.default_rng(0)
    towards = np.where(rng.random((26, 4)) < 0.5, 3.0, 0.1)
    policy = towards / towards.sum(-1, keepdims=True)

    def act(state: np.ndarray) -> np.ndarray:
        return (policy[state].cumsum(-1) > rng.random((len(state), 1))).argmax(-1)

    walked = maze.returns(act, np.tile(study.STARTS, 400))
    assert study.expected_return(policy) == pytest.approx(
        walked.mean(), abs=5 * walked.std() / len(walked) ** 0.5
    )


def test_only_a_backup_finds_the_way_unless_the_log_shows_it(data: study.Log) -> None:
    corrected = study.exact_returns(data)
    assert corrected["ILQL, tau 0.8, beta 4"] > -7.5
    assert corrected["BC, greedy"] < -90 and corrected["BC"] < -80
    assert -70 < corrected["MC, best beta"] < -20
    published = study.exact_returns(study.logged(np.random.default_rng(0), 1240, published=True))
    assert published["BC, greedy"] == pytest.approx(study.OPTIMUM)
    assert published[study.SHARP] > -30


@pytest.mark.parametrize("recipe", study.RECIPES.values())
def test_heads_start_alike(recipe: study.Recipe) -> None:
    for name in heads.NAMES:
        head = study.make_head(recipe, name)
        bias = recipe.start if head.are_values else 0.0  # as its learner gives it
        assert float(head.value(jnp.full(head.size, bias))) == pytest.approx(recipe.start, abs=1e-3)


@pytest.mark.slow
def test_the_model_reads_one_turn() -> None:
    lm = study.language_model(TINY)
    params = jax.jit(lm.init)(jax.random.key(0))
    row = np.concatenate([study.SEEN[3], study.SAID[1], study.SEEN[4]])[None]
    features = jax.jit(lm.features)
    whole = features(params, row, np.ones_like(row))
    alone = features(params, study.SEEN[4:5], np.ones((1, study.SEEN.shape[1]), int))
    np.testing.assert_allclose(whole[:, study.TURN :], alone, atol=1e-5)


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One learner of values on one design: each is a program to compile."""
    monkeypatch.setattr(study, "PUBLISHED", [(study.WORKS, "scalar")])
    monkeypatch.setattr(study, "STEERING", (4.0,))
    result = study.run(dataclasses.replace(TINY, parts="published", out=str(tmp_path / "new")))
    outcome = result["parts"]["published"]["ILQL, tau 0.8, scalar"]
    assert outcome["errors"].shape == (2, 16) and outcome["value"].shape == (2, 26)
    assert ((outcome["return"] >= -101) & (outcome["return"] <= study.OPTIMUM)).all()
    stored = json.loads((tmp_path / "new" / "result.json").read_text())
    assert stored["claims"] == result["claims"] and len(result["claims"]) == 3
    monkeypatch.setattr(study, "logged", lambda *_, **__: pytest.fail("a finished variant was trained again"))
    again = study.run(dataclasses.replace(TINY, parts="published", out=str(tmp_path / "new")))
    np.testing.assert_equal(again["parts"], result["parts"])
    report = (tmp_path / "new" / "README.md").read_text()
    assert "| BC, greedy |" in report and "values have 16" in report
    row = next(line for line in report.splitlines() if line.startswith("| ILQL, tau 0.8, scalar |"))
    assert row.endswith("| -6.97 |")  # beside ours
    assert (tmp_path / "new" / "returns_published.png").exists()


def apart(value: float) -> np.ndarray:
    """Four seeds nearly at ``value``, whose differences from those at another one are not the same."""
    return value * (1 - 1e-4 * np.arange(4))


def made_up(**last: float) -> dict[str, Any]:
    """Outcomes of the corrected design that all predictions hold of, but for the returns given."""
    returns = {"BC": -90.0, "BC, greedy": -101.0, "exact: ILQL, tau 0.8, beta 4": -7.0, study.SHARP: -98.0}
    outcomes: dict[str, Any] = {name: {"return": apart(x)} for name, x in returns.items()}
    noise = np.array([0.0, 0.1, 0.2, 0.3])
    for name in study.RECIPES:
        for head in heads.NAMES:
            error = 1.0 + noise if head == "hl_gauss" else 3.0 + 1.1 * noise
            outcomes[f"{name}, {head}"] = {
                "return": apart(-55.0 if name == study.MC else -7.0),
                "by_steering": np.full((4, 3), -7.0),
                "legal": np.ones((4, 3)),
                "errors": np.stack([error + 5, error], 1),
                "value": np.linspace(-9, 0, 26) * np.ones((4, 1)),
                "exact_value": np.linspace(-10, 0, 26) * np.ones((4, 1)),
            }
    for name, value in last.items():
        outcomes[name.replace("_", " ")]["return"] = apart(value)
    return {"corrected": outcomes}


def judged(parts: dict[str, Any]) -> list[dict[str, str]]:
    return studies.judged(study.claims({"parts": parts, "settings": {"cloning": 1000}}))


def test_predictions_hold_or_do_not() -> None:
    assert {row["verdict"] for row in judged(made_up())} == {studies.HOLDS}
    assert [row["claim"] for row in judged(made_up(BC=-40.0)) if row["verdict"] == studies.FAILS] == [
        "corrected: no kind of cloning (networks: 1,000 updates) gets half way to the optimum from -101, in every "
        "seed",
        "corrected: MC's return is above cloning's by 15 (difference)",
    ]
    corrected = made_up()["corrected"]
    some = {name: outcome for name, outcome in corrected.items() if "c51" in name or "ILQL" not in name}
    some["MC, scalar"] = corrected["MC, scalar"]
    some["exact: ILQL, tau 0.8, beta 4"] = corrected["exact: ILQL, tau 0.8, beta 4"]
    claims = [row["claim"] for row in judged({"corrected": some})]
    assert [claim for claim in claims if "c51" in claim or "HL-Gauss" in claim] == [
        "corrected, c51: ILQL's return (tau 0.8) is above MC's by 25 (difference)",
        "corrected, c51: the setting that failed has a mean return above -12",
    ]


def test_the_published_order_is_judged_on_the_published_design() -> None:
    returns = {
        "ILQL, tau 0.8, scalar": -11,
        "MC, scalar": -46,
        "BC of successes": -64,
        "BC": -60,
        "BC, greedy": -7,
    }
    noise = np.array([0.0, 0.1, 0.2, 0.3])
    methods = {
        name: {"return": x + noise * (1 + x / 1000)} for name, x in (returns | {study.SHARP: -20}).items()
    }
    rows = judged({"published": methods})
    assert [(row["claim"], row["verdict"]) for row in rows[:3]] == [
        ("published: ILQL, tau 0.8, scalar, returns more than MC, scalar (difference)", studies.HOLDS),
        ("published: MC, scalar, returns more than BC of successes (difference)", studies.HOLDS),
        ("published: BC of successes, returns more than BC (difference)", studies.FAILS),
    ]
    assert rows[0]["published"].startswith("-6.97 against -48.1, LMRL-Gym")
    assert len(judged({"published": {name: methods[name] for name in methods if "scalar" not in name}})) == 3


@pytest.mark.slow
def test_figures_and_table_of_the_corrected_design(tmp_path: Path) -> None:
    parts = made_up()
    study.draw(tmp_path, TINY, parts)
    assert {path.name for path in tmp_path.iterdir()} == {
        "returns_corrected.png", "propagation.png", "values.png"
    }  # fmt: skip
    drawn = study.picture(np.arange(26.0))
    assert np.isnan(drawn[0]).all() and drawn[maze.CELLS[5]] == 5 and np.isfinite(drawn).sum() == 26
    result = {
        "command": "c", "wall_seconds": 1, "hardware": {"cores": 2}, "settings": dataclasses.asdict(TINY),
        "parts": parts,
    }  # fmt: skip
    lines = "\n".join(study.report(result)).splitlines()
    assert sum(line.startswith("| ILQL, tau 0.9, slow, hl_gauss |") for line in lines) == 2


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="--parts: all is none of corrected, published"):
        study.run(dataclasses.replace(TINY, parts="all"))
    with pytest.raises(
        ValueError, match="--heads: dueling is none of scalar, two_hot, hl_gauss, c51, quantile"
    ):
        study.run(dataclasses.replace(TINY, heads="scalar,dueling"))
    with pytest.raises(ValueError, match="--seeds=1: an interval"):
        study.run(dataclasses.replace(TINY, seeds=1))
