"""The study of ranking real programs: whole on a tiny model and made-up problems, and its numbers by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments import studies
from experiments.papers import bcoder_rank as paper
from rl.language import huggingface, model, tokenizer
from rl.language.cached import Reading
from rl.language.model import Config
from rl.networks.transformer import Shape
from rl.programs.pool import Verdict

BODIES = ["x + {n}", "{n} + x", "x - {n}", "x + {n} +", "y + {n}", "x + {n}", "x", "x" * 40]
TINY = paper.Settings(
    programs=7,
    length=24,
    layers=(1, 0),
    development=1,
    folds=2,
    seeds=2,
    value_updates=20,
    policy_updates=20,
    rows=1,
    inner=16,
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
    pytest.importorskip("tokenizers")
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
        "probe",
    } <= set(arms)
    assert all(0 <= row["pass@1"]["mean"] <= row["pass@5"]["mean"] <= 1 for row in arms.values())
    assert len(result["problems"]) == len(set(result["problems"])) == 4
    row = arms["B-Coder, hl_gauss, sum"]["told apart"]
    assert len(row["seeds"]) == 2 and len(row["problem"]) == 4
    assert row["mean"] == pytest.approx(np.mean(row["seeds"]))
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
    assert paper.run(settings)["claims"] == result["claims"] and len(result["claims"]) == 3 * (2 + 3 * 3)
    # What was read is not read again.
    read = sorted((tmp_path / "cache").iterdir())
    assert len(read) == 5
    before = [path.stat().st_mtime_ns for path in read]
    language_model = paper.pretrained.load(settings.model)
    again = paper.prepare(settings, language_model, language_model.config, language_model.params, [1, 2])
    assert [path.stat().st_mtime_ns for path in read] == before
    # Two of the reference solutions are candidates, too.
    assert len(again.verdict) == 30 + 2 and again.human[0] == -1
    assert [text in again.candidates for text in again.human] == [False, False, False, True, True]
    assert (again.verdict[again.human[1:]] == Verdict.PASSED.value).all()


def test_no_token_that_begins_a_text_stands_between_a_prompt_and_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose tokenizer puts one before every text; what reads and judges is made up."""
    package = pytest.importorskip("tokenizers")
    write_problems(tmp_path, 2)
    write_model(tmp_path / "model")
    base = paper.pretrained.load(tmp_path / "model")
    base.tokenizer.add_special_tokens(["<s>"])
    first = base.tokenizer.token_to_id("<s>")
    base.tokenizer.post_processor = package.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    prompts = []

    def read(params: Any, before: list[int], texts: list[list[int]]) -> list[Reading]:
        prompts.append(before)
        return [Reading(np.zeros((len(x) + 1, 1, 1)), np.zeros(len(x)), np.zeros(len(x) + 1)) for x in texts]

    monkeypatch.setattr(paper.cached, "reader", lambda *_: read)
    pool = SimpleNamespace(run=lambda programs: [RIGHT] * len(programs))
    monkeypatch.setattr(paper, "Pool", lambda **_: contextlib.nullcontext(pool))
    settings = dataclasses.replace(TINY, data=str(tmp_path), cache=str(tmp_path / "cache"))
    whole = paper.prepare(settings, base, base.config, {}, [1])
    assert [before[0] for before in prompts] == [first] * 2 and first not in whole.token
    text = base.tokenizer.decode(whole.token[whole.start[0] : whole.start[1]].tolist())
    assert text == "\n    return x + 1\n"  # behind the prompt's last token


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
        activation=np.zeros((2 * count, 1, 1)),
        log_prob=np.zeros(2 * count),
        best=np.zeros(2 * count, np.int32),
    )


RIGHT, WRONG = Verdict.PASSED, Verdict.FAILED


def test_an_outcome_by_hand() -> None:
    data = corpus([[RIGHT, WRONG, WRONG, WRONG, WRONG, WRONG], [RIGHT, RIGHT, WRONG, WRONG, WRONG, WRONG]])
    fold = paper.Fold(
        development=np.array([]), held_out=np.array([0, 1]), trained_on=np.array([0, 1]), probed=np.array([0])
    )
    scores = np.array([0.5, 0.9, 0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.25, 0.0, 0.0, 0.0])
    arms = paper.outcome(data, fold, {"ours": scores})
    assert arms["random"]["pass@1"] == pytest.approx([1 / 6, 2 / 6])
    assert list(arms["ours"]["pass@1"]) == [0, 1] and list(arms["ours"]["pass@5"]) == [1, 1]
    assert arms["ours"]["told apart"] == pytest.approx([4 / 5, 7 / 8])
    assert arms["ours"]["told apart, trained on"] == pytest.approx([4 / 5])
    alike = np.array([[True, True]])
    assert np.isnan(paper.told_apart(alike, np.ones((1, 2)))) and np.isnan(
        paper.told_apart(~alike, np.ones((1, 2)))
    )


def test_problems_of_all_folds_stand_in_a_row_and_differences_are_paired() -> None:
    def fold(ours: list[int], theirs: list[int]) -> dict[str, Any]:
        def all_metrics(values: list[int]) -> dict[str, Any]:
            return {metric: np.array(values, float) for metric in paper.METRICS}

        return {"log-probability, sum": all_metrics(theirs), "V-only": all_metrics(ours)}

    # Two folds of two problems, two seeds: of the difference the problems' means over seeds are 1, 0, 0.5 and 1.
    every = paper.joined([
        [fold([1, 1], [0, 1]), fold([1, 1], [0, 1])],
        [fold([1, 1], [0, 0]), fold([0, 1], [0, 0])],
    ])  # fmt: skip
    row = paper.differences(every)["V-only - log-probability, sum, pass@1"]
    np.testing.assert_array_equal(row["problem"], [1, 0, 0.5, 1])
    np.testing.assert_array_equal(row["seeds"], [0.75, 0.5])
    expected = scipy.stats.t.interval(0.95, 3, 0.625, np.std([1, 0, 0.5, 1], ddof=1) / 2)
    assert row["mean"] == 0.625 and row["ci95"] == pytest.approx(expected)
    assert row["p"] == pytest.approx(
        2 / 8
    )  # of the signs of three numbers other than 0, two ways are as far from 0
    assert paper.paired(paper.differences(every)).keys() == {("V-only", "log-probability, sum")}


def test_a_problem_without_both_kinds_of_programs_counts_in_no_telling_apart() -> None:
    row = paper.summary({"ours": {"told apart": np.array([[0.5, np.nan, 0.7], [0.7, np.nan, 0.9]])}})["ours"]
    assert row["told apart"]["mean"] == pytest.approx(0.7)
    np.testing.assert_allclose(row["told apart"]["seeds"], [0.6, 0.8])


def test_ranking_is_compared_with_programs_as_they_were_sampled() -> None:
    """The paper's own claim stands first, beside its gains, and in points in the report."""
    random = np.array([0.2, 0.3, 0.4])
    gains = {"V-only, scalar": [0.1, 0.11, 0.12], "B-Coder, scalar, sum": [-0.2, -0.1, -0.15]}
    arms = {"random": {f"pass@{k}": {"problem": random} for k in paper.KS}}
    for name, gain in gains.items():
        arms[name] = {metric: {"problem": random + gain} for metric in paper.METRICS}
    for name in paper.OTHERS:
        arms[f"{name}, sum"] = arms["V-only, scalar"]
    first, *_, last = studies.judged(paper.claims({"arms": arms}))[:4]
    assert first == {
        "claim": "V-only, scalar ranks better than random, pass@1 (difference)",
        "published": "+6.61 to +7.34 points on MBPP (table 4), +0.68 to +0.75 points on APPS (table 3): B-Coder "
        "(Yu et al., ICLR 2024)",
        "here": "0.11 [0.0852, 0.135]",
        "verdict": studies.HOLDS,
    }
    assert last["claim"].startswith("B-Coder, scalar, sum ranks better than random, pass@5")
    assert "+5.61 to +8.58" in last["published"] and last["verdict"] == studies.FAILS
    np.testing.assert_allclose(paper.over_random(arms, "V-only, scalar", 1), gains["V-only, scalar"])


def test_a_claim_needs_every_way_of_ranking_by_likelihood_to_be_beaten() -> None:
    noise = np.array([-0.01, 0.0, 0.01])

    def row(value: float, sign: float = 1.0) -> dict[str, Any]:
        return {metric: {"problem": value + sign * noise} for metric in paper.METRICS}

    for sum_, verdict in ((0.2, studies.HOLDS), (0.5, studies.OPEN), (0.8, studies.FAILS)):
        arms = {"random": row(0.1), "B-Coder, sum": row(0.5)}
        for name in paper.OTHERS:
            arms |= {f"{name}, per token": row(0.1), f"{name}, sum": row(sum_, -1.0)}
        rows = studies.judged(paper.claims({"arms": arms}))
        assert [row["verdict"] for row in rows[2:]] == [verdict] * 9


def test_the_probe_finds_what_tells_the_programs_of_a_problem_apart() -> None:
    """One direction decides within a problem, while problems differ more than their programs."""
    generator = np.random.default_rng(0)
    data = corpus(
        [[RIGHT if passed else WRONG for passed in row] for row in generator.random((12, 10)) < 0.5]
    )
    right = (data.verdict == RIGHT.value).astype(float)
    activation = generator.normal(size=(240, 1, 4)) + np.repeat(5 * generator.normal(size=(12, 1, 4)), 20, 0)
    activation[:, 0, 2] += np.repeat(2 * right, 2)
    data = data._replace(activation=activation)
    features = paper.centred(data)
    assert np.allclose(features[data.candidates].mean(1), 0, atol=1e-6)
    weights = paper.logistic(features[:80], right[:80], 0.01)
    reference = newton(features[:80], right[:80], 0.01)
    np.testing.assert_allclose(weights, reference, atol=2e-3)
    auc = paper.told_apart(right[data.candidates][8:].astype(bool), (features @ weights)[data.candidates][8:])
    assert np.nanmean(auc) > 0.75


def newton(features: np.ndarray, labels: np.ndarray, decay: float) -> np.ndarray:
    """Newton's method, which shares nothing with the quasi-Newton steps of the study."""
    x = np.concatenate([np.ones((len(features), 1)), features], 1)
    penalty = decay * np.diag([0.0, *np.ones(features.shape[1])])
    parameters = np.zeros(x.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ parameters))
        slope = x.T @ (p - labels) / len(x) + penalty @ parameters
        parameters -= np.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]) / len(x) + penalty, slope)
    return parameters[1:]


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
        np.testing.assert_array_equal(fold.probed, folds[0].probed)
    (tuned,) = paper.divide(dataclasses.replace(settings, tune=True), 26)
    assert len(tuned.held_out) == 6 and not set(tuned.held_out) & set(held_out)
    with pytest.raises(ValueError, match="8 problems do not divide into --development=6 and --folds=4"):
        paper.divide(settings, 8)


def test_problems_of_all_folds_count_once_where_they_are_the_same() -> None:
    """Two folds of two seeds: other problems are held out, and the same two were trained on."""
    row = lambda out, on: {"arm": {"told apart": np.array(out), paper.TRAINED_ON: np.array(on)}}
    folds = [[row([0.1], [0.0, 1]), row([0.2], [0.5, 1])], [row([0.3], [1.0, 1]), row([0.4], [0.5, 1])]]
    metrics = paper.joined(folds)["arm"]
    np.testing.assert_allclose(metrics["told apart"], [[0.1, 0.3], [0.2, 0.4]])
    np.testing.assert_allclose(metrics[paper.TRAINED_ON], [[0.5, 1], [0.5, 1]])


def test_scores_by_likelihood_leave_the_end_out() -> None:
    assert paper.likelihoods(np.array([-1.0, -2.0, -9.0])) == {", per token": -1.5, ", sum": -3.0}


def test_episodes_are_rewarded_at_their_end() -> None:
    data = corpus([[RIGHT, WRONG], [Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR]])
    rows, owner = paper.pack(data, data.candidates, 25)
    np.testing.assert_array_equal(owner, [0, 1])
    np.testing.assert_allclose(rows.reward[:, :4], [[0, 1, 0, -0.3], [0, -1, 0, -0.6]])
    np.testing.assert_array_equal(rows.imitate[:, :4], [[0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(np.sort(rows.tokens[0, :4]), [0, 1, 2, 3])
    rows, owner = paper.pack(data, np.array([[-1], [2]]), 25)
    np.testing.assert_array_equal(owner, [1])
    np.testing.assert_array_equal(rows.tokens[0, :3], [4, 5, 0])


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    for change, message in (
        ({"folds": 1}, "--folds=1: an interval"),
        ({"programs": 4}, "--programs=4: pass@5 needs at least 5"),
        ({"heads": "hl_gaus"}, "--heads: hl_gaus is none of"),
        ({"value_updates": 30}, "--value_updates=30 must be a multiple of 20"),
    ):
        with pytest.raises(ValueError, match=message):
            paper.run(dataclasses.replace(TINY, **change))
    with pytest.raises(
        FileNotFoundError, match=r"no HumanEval.jsonl.gz and no humaneval_codegen16b.* --data"
    ):
        paper.folder_of(str(tmp_path))
    config = Config(8, 8, Shape(width=8, layers=2, heads=1, kv_heads=1, head_size=8, inner=8))
    for layers in ((3,), (2, 1), (-1, 0), (1, 1), ()):
        with pytest.raises(
            ValueError, match=r"--layers=.*: name blocks in their order, of which the model has 2"
        ):
            paper._lower(config, {}, layers)
