"""The study of ranking real programs: whole on a tiny model and made-up problems, and its numbers by hand."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import studies
from experiments.papers import bcoder_rank as paper
from rl.language import huggingface, model, tokenizer
from rl.language.model import Config
from rl.networks.transformer import Shape
from rl.programs.pool import Verdict

BODIES = ["x + {n}", "{n} + x", "x - {n}", "x + {n} +", "y + {n}", "x + {n}", "x", "x" * 40]
TINY = paper.Settings(
    programs=7, length=24, development=1, folds=2, value_updates=20, policy_updates=20, rows=1, inner=16
)


def write_problems(folder: Path, count: int) -> None:
    """Problems "add n", each with right, wrong, crashing and ill-formed programs, one twice, one too long."""
    problems, samples = [], []
    for n in range(1, count + 1):
        prompt = f"def add(x):\n    '{n}'\n"
        test = f"def check(f):\n    assert f(1) == {1 + n}\n"
        problems.append({"task_id": f"T/{n}", "prompt": prompt, "entry_point": "add", "test": test})
        if n > 1:
            problems[-1]["canonical_solution"] = (
                f"    return {n} - (-x)\n" if n < 4 else f"    return x + {n}\n"
            )
        bodies = [f"    return {body.format(n=n)}\n" for body in BODIES]
        samples.append({"task_id": f"T/{n}", "prompt": prompt, "samples": bodies})
    for name, rows in ((paper.PROBLEMS, problems), (paper.SAMPLES, samples)):
        with gzip.open(folder / name, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def write_model(folder: Path) -> None:
    import jax

    words = tokenizer.characters(["def add(x):\n    '123456789'\n    return x + y - 0"])
    shape = Shape(width=16, layers=2, heads=2, kv_heads=1, head_size=8, inner=16)
    config = Config(max(words.get_vocab().values()) + 1, 64, shape)
    params = jax.jit(model.make(config).init)(jax.random.key(0))
    huggingface.save(folder, config, params, words, ends=[0])


@pytest.mark.long
def test_the_study_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of its two heads: each arm is a program to compile."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(paper, "HEADS", ("hl_gauss",))
    write_problems(tmp_path, 5)
    write_model(tmp_path / "model")
    settings = dataclasses.replace(
        TINY,
        data=str(tmp_path),
        model=str(tmp_path / "model"),
        cache=str(tmp_path / "cache"),
        out=str(tmp_path / "out"),
    )
    result = paper.run(settings)
    corpus = result["corpus"]
    assert (corpus["problems"], corpus["candidates"], corpus["distinct"]) == (5, 35, 30)
    assert corpus["human"] == 4
    shares = {name: round(7 * share) for name, share in corpus["verdicts"].items()}
    assert shares == {"compile_error": 1, "runtime_error": 1, "timeout": 0, "failed": 2, "passed": 3}
    arms = result["arms"]
    assert arms["random"]["pass@1"]["mean"] == pytest.approx(3 / 7)
    assert arms["oracle"]["pass@1"]["mean"] == 1
    assert {
        "V-only, hl_gauss",
        "B-Coder, hl_gauss, sum",
        "rejection, per token",
        "human, sum",
        "log-probability, sum",
    } <= set(arms)
    assert all(0 <= row["pass@1"]["mean"] <= row["pass@5"]["mean"] <= 1 for row in arms.values())
    held_out = np.concatenate([fold["held_out"] for fold in result["folds"]])
    assert len(held_out) == len(set(held_out)) == 4
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {
        "result.json",
        "README.md",
        "pass_at_1.png",
        "pass_at_5.png",
        "told_apart.png",
        "variants",
    }
    monkeypatch.setattr(paper._Bench, "scores", lambda *_: pytest.fail("a finished arm was trained again"))
    assert paper.run(settings)["claims"] == result["claims"] and len(result["claims"]) == 3 * 3 * 2
    # What was read is not read again.
    read = sorted((tmp_path / "cache").iterdir())
    assert len(read) == 5
    before = [path.stat().st_mtime_ns for path in read]
    found = paper.pretrained.load(settings.model)
    again = paper.prepare(settings, found, found.config, found.params)
    assert [path.stat().st_mtime_ns for path in read] == before
    # Two of the reference solutions are candidates, too.
    assert len(again.verdict) == 30 + 2 and again.human[0] == -1
    assert [text in again.candidates for text in again.human] == [False, False, False, True, True]
    assert (again.verdict[again.human[1:]] == Verdict.PASSED.value).all()


def corpus(verdicts: list[list[Verdict]]) -> paper.Corpus:
    """Problems whose every candidate is a text of its own, of two places."""
    count = sum(map(len, verdicts))
    return paper.Corpus(
        names=np.array([f"T/{n}" for n in range(len(verdicts))]),
        candidates=np.arange(count).reshape(len(verdicts), -1),
        human=np.full(len(verdicts), -1),
        verdict=np.array([one.value for row in verdicts for one in row]),
        start=2 * np.arange(count + 1),
        token=np.zeros(2 * count, np.int32),
        activation=np.zeros((2 * count, 1)),
        log_prob=np.zeros(2 * count),
        best=np.zeros(2 * count, np.int32),
    )


RIGHT, WRONG = Verdict.PASSED, Verdict.FAILED


def test_an_outcome_by_hand() -> None:
    made = corpus([[RIGHT, WRONG, WRONG, WRONG, WRONG, WRONG], [RIGHT, RIGHT, WRONG, WRONG, WRONG, WRONG]])
    fold = paper.Fold(held_out=np.array([0, 1]), trained_on=np.array([0, 1]), probed=np.array([0]))
    scores = np.array([0.5, 0.9, 0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.25, 0.0, 0.0, 0.0])
    arms = paper.outcome(made, fold, {"ours": scores})["arms"]
    assert arms["random"]["pass@1"] == pytest.approx([1 / 6, 2 / 6])
    assert arms["ours"]["pass@1"] == [0, 1] and arms["ours"]["pass@5"] == [1, 1]
    assert arms["ours"]["told apart"] == pytest.approx((4 / 5 + 7 / 8) / 2)
    assert arms["ours"]["told apart, trained on"] == pytest.approx(4 / 5)
    assert arms["ours"]["mean score"]["passed"] == pytest.approx(1 / 3)


def test_differences_are_paired_and_checked() -> None:
    def fold(ours: list[int], theirs: list[int]) -> dict[str, Any]:
        def both(values: list[int]) -> dict[str, Any]:
            return {"pass@1": values, "pass@5": values}

        return {"arms": {"random": both([0, 0]), "log-probability, sum": both(theirs), "V": both(ours)}}

    found = paper.differences([fold([1, 1], [0, 1]), fold([1, 0], [0, 0]), fold([1, 1], [1, 0])])
    row = found["V - log-probability, sum, pass@1"]
    assert row["mean"] == 0.5 and row["ci95"] == [0.5, 0.5] and row["problems"][0] >= 0


def test_a_claim_needs_every_way_of_ranking_by_likelihood_to_be_beaten() -> None:
    def fold(sum_: float, noise: float) -> dict[str, Any]:
        ours, theirs = ({f"pass@{k}": [x + noise] for k in paper.KS} for x in (0.5, 0.1))
        arms: dict[str, Any] = {f"{name}, per token": theirs for name in paper.OTHERS}
        arms |= {f"{name}, sum": {f"pass@{k}": [sum_] for k in paper.KS} for name in paper.OTHERS}
        return {"arms": {"B-Coder, sum": ours, **arms}}

    for sum_, verdict in ((0.2, studies.HOLDS), (0.5, studies.OPEN), (0.8, studies.FAILS)):
        folds = [fold(sum_, noise) for noise in (-0.01, 0.0, 0.01)]
        rows = studies.judged(paper.claims({"folds": folds, "arms": folds[0]["arms"]}))
        assert [row["verdict"] for row in rows] == [verdict] * 6


def test_problems_without_reference_solutions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    write_model(tmp_path / "model")
    monkeypatch.setattr(paper, "prepare", lambda *_: corpus([[RIGHT, WRONG]] * 5))
    settings = dataclasses.replace(TINY, model=str(tmp_path / "model"))
    with pytest.raises(
        ValueError, match=r"no problem to train on whose reference .* at most --length=24 tokens"
    ):
        paper.run(settings)


def test_folds_share_nothing_and_leave_development_out() -> None:
    settings = paper.Settings(development=6, folds=4)
    folds = paper.divide(settings, 26)
    held_out = np.concatenate([fold.held_out for fold in folds])
    assert len(held_out) == len(set(held_out)) == 20
    for fold in folds:
        assert len(fold.trained_on) == 21 and not set(fold.trained_on) & set(fold.held_out)
        assert len(fold.probed) == 5 and set(fold.probed) <= set(fold.trained_on)
    (tuned,) = paper.divide(dataclasses.replace(settings, tune=True), 26)
    assert len(tuned.held_out) == 6 and not set(tuned.held_out) & set(held_out)
    with pytest.raises(ValueError, match="8 problems do not divide into --development=6 and --folds=4"):
        paper.divide(settings, 8)


def test_scores_by_likelihood_leave_the_end_out() -> None:
    assert paper.likelihoods(np.array([-1.0, -2.0, -9.0])) == {", per token": -1.5, ", sum": -3.0}


def test_episodes_are_rewarded_at_their_end() -> None:
    made = corpus([[RIGHT, WRONG], [Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR]])
    rows, owner = paper.pack(made, made.candidates)
    np.testing.assert_array_equal(owner, [0, 1])
    np.testing.assert_allclose(rows.reward[:, :4], [[0, 1, 0, -0.3], [0, -1, 0, -0.6]])
    np.testing.assert_array_equal(rows.imitate[:, :4], [[0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(np.sort(rows.tokens[0, :4]), [0, 1, 2, 3])
    rows, owner = paper.pack(made, np.array([[-1], [2]]))
    np.testing.assert_array_equal(owner, [1])
    np.testing.assert_array_equal(rows.tokens[0, :3], [4, 5, 0])


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    for change, message in (
        ({"folds": 1}, "--folds=1: an interval"),
        ({"programs": 4}, "--programs=4: pass@5 needs at least 5"),
        ({"value_updates": 30}, "--value_updates=30 must be a multiple of 20"),
    ):
        with pytest.raises(ValueError, match=message):
            paper.run(dataclasses.replace(TINY, **change))
    with pytest.raises(
        FileNotFoundError, match=r"no HumanEval.jsonl.gz and no humaneval_codegen16b.* --data"
    ):
        paper.folder_of(str(tmp_path))
    config = Config(8, 8, Shape(width=8, layers=2, heads=1, kv_heads=1, head_size=8, inner=8))
    with pytest.raises(ValueError, match="--layers=3: the model has 2"):
        paper._lower(config, {}, 3)
