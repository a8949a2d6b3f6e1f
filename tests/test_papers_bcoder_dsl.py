"""experiments.papers.bcoder_dsl: its rows and samples by hand, its verdicts on made-up outcomes, and a tiny run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import bcoder_dsl as study
from rl.language import model
from rl.programs import dsl
from rl.programs.pool import Pool, Verdict
from rl.programs.problems import Problem

TINY = study.Settings(
    seeds=2, seed=0, tasks="easy", pretraining=2, samples=2, value_updates=2, updates=2, batch_size=4, width=8
)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [dsl.problem(one, np.random.default_rng(0)) for one in dsl.compositions()[:6]]


def test_rows_are_descriptions_and_programs_with_what_they_earned(problems: list[Problem]) -> None:
    verdicts = np.array([Verdict.PASSED, Verdict.FAILED, Verdict.TIMEOUT, Verdict.COMPILE_ERROR])
    texts = [study.expression(problems[0]), "sum (", "x", "list ( x )"]
    data = jax.tree.map(np.asarray, study.rows(problems[:4], texts, 24, verdicts, imitate=0.5))
    for row, (problem, text, reward) in enumerate(zip(problems, texts, (1, -0.3, -0.6, -1), strict=False)):
        words = [study.WORDS[t] for t in data.tokens[row][data.segment[row] > 0]]
        assert words == [*problem.prompt.split(), "<program>", *text.split(), "<end>"]
        assert data.is_action[row].sum() == len(text.split()) + 1 and not data.is_action[row, :4].any()
        last = len(words) - 1
        assert data.reward[row, last] == np.float32(reward) and data.reward[row].sum() == np.float32(reward)
        assert data.discount[row, last] == 0 and data.imitate[row].max() == 0.5
    assert study.prompts(problems).shape == (6, 4)


def test_a_problems_own_program_passes_and_what_is_no_code_does_not(problems: list[Problem]) -> None:
    with Pool(1, isolation="none") as pool:  # nothing that these words can say does harm
        chosen = [problems[0], problems[0], problems[1]]
        texts = [study.expression(problems[0]), "sum ( <program> )", "x"]
        assert study.judge(pool, chosen, texts).tolist() == [
            Verdict.PASSED, Verdict.COMPILE_ERROR, Verdict.FAILED
        ]  # fmt: skip


def test_half_of_a_batch_is_of_programs_that_passed(problems: list[Problem]) -> None:
    verdicts = np.array([Verdict.FAILED, Verdict.PASSED, Verdict.FAILED, Verdict.FAILED, Verdict.PASSED] * 4)
    chosen = [problems[i % 6] for i in range(20)]
    texts = ["x " * (1 + i) for i in range(20)]  # told apart by their length
    everything = study.rows(chosen, texts, 30, verdicts, imitate=0.0)
    anchors, count = study.passing(study.rows(chosen, texts, 30, verdicts), verdicts)
    assert count == 8
    batch = study.halves(400)(((anchors, count), everything), jax.random.key(0), 0)
    length = np.asarray(batch.is_action.sum(1)) - 2
    passed = np.flatnonzero(verdicts == Verdict.PASSED)
    assert set(length[:200].tolist()) == set(passed.tolist())
    assert set(length[200:].tolist()) == set(range(20))
    assert (np.asarray(batch.imitate.max(1)) == (np.arange(400) < 200)).all()
    with pytest.raises(ValueError, match="none of 20 programs passed: raise --samples"):
        study.passing(anchors, np.full(20, Verdict.FAILED))


def test_a_sharpened_model_has_its_temperature() -> None:
    lm = model.make(model.Config(7, 5, study.Shape(8, 1, 2, 2, 4, 8)))
    params = jax.jit(lm.init)(jax.random.key(0))
    features = jnp.ones((2, 8))
    np.testing.assert_allclose(
        study.sharpened(lm).logits(params, features), 4 * lm.logits(params, features), rtol=1e-6
    )


def test_mean_scores_by_kind() -> None:
    scores = np.array([[1.0, 2.0], [3.0, -1.0]])
    verdicts = np.array([[Verdict.PASSED, Verdict.TIMEOUT], [Verdict.PASSED, Verdict.RUNTIME_ERROR]])
    means = study.class_means(scores, verdicts)
    assert (means["pass"], means["runtime error"]) == (2.0, 0.5)
    assert np.isnan(means["fail"]) and np.isnan(means["compile error"])


def made_up() -> dict[str, Any]:
    """Outcomes that all predictions hold of."""
    noise = np.array([0.0, 0.01, 0.02])
    tasks: dict[str, Any] = {}
    for name, random, controls, learnt in (("easy", 0.4, 0.9, 0.9), ("hard", 0.005, 0.2, 0.4)):
        scores = {"random": random + 0.9 * noise, "oracle": 0.95 + 0 * noise}
        scores |= dict.fromkeys(study.CONTROLS, controls + noise[::-1])
        scores |= {coder: learnt + noise for coder in study.MAIN if coder.startswith("B-Coder")}
        kinds = {kind: -float(i) + noise for i, kind in enumerate(study.CLASSES)}
        tasks[name] = {
            "learnt_from": {kind: np.array([1, 2, 3]) for kind in study.CLASSES},
            "ranked": {who: dict(scores) for who in ("own", "another")},
            "class_means": {who: {study.BCODER: dict(kinds)} for who in ("own", "another")},
            "policies": {
                study.MODEL: {"greedy": 0.5 + noise, "sampled": 0.4 + noise},
                study.BCODER: {"greedy": 0.9 + noise, "sampled": 0.4 + noise},
                study.CODER_OF_PASSES: {"greedy": 0.9 + noise, "sampled": 0.6 + noise},
                study.RFT: {"greedy": 0.9 + noise, "sampled": 0.5 + noise[::-1]},
                study.SFT: {"greedy": 0.9 + noise, "sampled": 0.5 + noise[::-1]},
            },
        }
    return tasks


def failing(tasks: dict[str, Any]) -> list[str]:
    rows = studies.judged(study.claims({"tasks": tasks}))
    assert len(rows) == 3 + 2 + 2 * (1 + len(study.CONTROLS)) + 2
    return [f"{row['claim']}: {row['verdict']}" for row in rows if row["verdict"] != studies.HOLDS]


def test_predictions_hold_or_do_not() -> None:
    tasks = made_up()
    assert not failing(tasks)
    tasks["hard"]["ranked"]["another"][study.RFT] = np.array([0.3, 0.5, 0.4])
    tasks["easy"]["class_means"]["own"][study.BCODER]["fail"] = np.array([-1.0, -1.0, 9.0])
    tasks["hard"]["policies"][study.CODER_OF_PASSES]["sampled"] = np.array([0.3, 0.31, 0.32])
    tasks["hard"]["ranked"]["own"]["random"] = np.array([0.4, 0.3, 0.5])
    solves_more = f"hard: one sample of {study.CODER_OF_PASSES}, solves more than one of"
    assert failing(tasks) == [
        "easy: mean scores are ordered pass > fail > runtime error > compile error, in every seed (least step): "
        + studies.FAILS,
        f"hard, own programs: fewer than 5 % pass: {studies.FAILS}",
        f"hard, own programs: {study.CODER_OF_PASSES}, ranks better than random (pass@1): {studies.OPEN}",
        f"hard, another programs: {study.CODER_OF_PASSES}, ranks better than RFT (pass@1): {studies.OPEN}",
        f"{solves_more} {study.RFT} (difference): {studies.FAILS}",
        f"{solves_more} {study.SFT} (difference): {studies.FAILS}",
    ]
    difference = study.differences(tasks["hard"]["ranked"])["own"][study.BCODER][study.SFT]
    assert difference["mean"] == pytest.approx(0.2) and difference["ci95"][0] < 0.2 < difference["ci95"][1]


def test_the_papers_ladder_has_verdicts() -> None:
    outcome = made_up()["hard"]
    for ranked in outcome["ranked"].values():
        ranked |= {name: np.array([0.3, 0.31, 0.32]) * (1 - 0.07 * i) for i, name in enumerate(study.LADDER)}
    outcome["ranked"]["own"][study.TD] = np.array([0.0, 0.01, 0.02])
    rows = studies.judged(study.claims({"tasks": {"ablations": outcome}}))
    assert len(rows) == 2 * 6 and sum("figure 1" in row["published"] for row in rows) == 2 * 4
    assert [row["claim"] for row in rows if row["verdict"] != studies.HOLDS] == [
        f"ablations, own programs: {study.TD}, ranks better than {study.TD_MAX} (pass@1)"
    ]


@pytest.mark.parametrize("operator", ["conservative", "max"])
@pytest.mark.slow
def test_random_weights_know_the_model_by_its_choices_alone(operator: str, problems: list[Problem]) -> None:
    """The frozen model, which a conservative operator asks, is the model; all else is as if there were none."""
    shape = study.Shape(8, 1, 2, 2, 4, 8)
    lm = model.make(model.Config(len(study.WORDS), 32, shape))
    data = study.rows(problems, [study.expression(one) for one in problems], 32)
    settings = dataclasses.replace(TINY, value_updates=0, updates=0)
    learner = study._learnt(settings, lm, study.Variant("passed", operator, pretrained=False))
    state = learner.learn(lm.init(jax.random.key(1)), ((data, 6), data), jax.random.key(0))
    same = lambda one, other: np.array_equal(one["embedding"], other["embedding"])
    assert same(state.target["policy"], lm.init(jax.random.key(1))) == (operator == "conservative")
    assert same(state.params["value"]["lm"], state.params["policy"])
    assert not same(state.params["policy"], lm.init(jax.random.key(1)))


def test_figures_and_table(tmp_path: Path) -> None:
    tasks = made_up()
    study.draw(tmp_path, tasks)
    assert {path.stem for path in tmp_path.iterdir()} == {
        f"{name}_{who}" for name in tasks for who in ("own", "another")
    }
    result = {
        "command": "c", "wall_seconds": 1, "hardware": {"cores": 2}, "settings": dataclasses.asdict(TINY),
        "tasks": tasks, "differences": {name: study.differences(task["ranked"]) for name, task in tasks.items()},
    }  # fmt: skip
    lines = "\n".join(study.report(result)).splitlines()
    assert sum(line.startswith(f"| {study.RFT} | 0.9") for line in lines) == 1
    assert any("**+0.200" in line for line in lines)


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its ten learners, with verdicts that cost nothing."""

    def judge(pool: Pool, problems: Sequence[Problem], expressions: Sequence[str]) -> np.ndarray:
        kinds = (Verdict.PASSED, Verdict.FAILED, Verdict.RUNTIME_ERROR, Verdict.COMPILE_ERROR)
        return np.array([kinds[i % 4] for i, _ in enumerate(zip(problems, expressions, strict=True))])

    variants = {study.BCODER: study.MAIN[study.BCODER], study.RFT: study.MAIN[study.RFT]}
    monkeypatch.setitem(study.VARIANTS, "easy", variants)
    monkeypatch.setitem(study.TASKS, "easy", study.TASKS["easy"]._replace(learnt=6, held_out=3, candidates=4))
    monkeypatch.setattr(study, "LESSONS", 8)
    monkeypatch.setattr(study, "CONTROLS", (study.MODEL, study.RFT))
    monkeypatch.setattr(study, "judge", judge)
    result = study.run(dataclasses.replace(TINY, out=str(tmp_path / "new")))
    task = result["tasks"]["easy"]
    assert task["learnt_from"]["pass"].tolist() == [3, 3]
    assert list(task["ranked"]["own"]) == [
        "random", "oracle", study.MODEL, study.SHARPENED, study.BCODER, study.RFT
    ]  # fmt: skip
    assert task["ranked"]["another"]["random"].tolist() == [0.25, 0.25]
    stored = json.loads((tmp_path / "new" / "result.json").read_text())
    assert stored["differences"]["easy"]["own"].keys() == {study.BCODER}
    assert "| RFT |" in (tmp_path / "new" / "README.md").read_text()
    monkeypatch.setattr(study, "judge", lambda *_: pytest.fail("a finished seed was run again"))
    again = study.run(dataclasses.replace(TINY, out=str(tmp_path / "new")))
    np.testing.assert_equal(again["tasks"], result["tasks"])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="--tasks: medium is none of easy, hard"):
        study.run(dataclasses.replace(TINY, tasks="medium"))
    with pytest.raises(ValueError, match="--batch_size=3 must be even"):
        study.run(dataclasses.replace(TINY, batch_size=3))
    with pytest.raises(ValueError, match="--seeds=1: an interval"):
        study.run(dataclasses.replace(TINY, seeds=1))
