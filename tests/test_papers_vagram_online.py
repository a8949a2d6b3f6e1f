"""The study of VaGraM online: what it runs, what it makes of the numbers, and once from training to report."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags as absl_flags

from experiments import common, flags, mbpo, online, studies
from experiments.papers import vagram_online as paper
from rl import log, train

TRAINED: list[str] = []


def script(chosen: Any, config: Any) -> None:
    """In place of a training run: pendulum's returns, by whether the model is small for what it sees."""
    loss = getattr(chosen, "model_loss", "sac")
    TRAINED.append(f"{chosen.env} {loss}")
    small = len(getattr(chosen, "model_hidden", ())) < 4
    score = {"sac": 20 + 5 * chosen.utd}.get(loss, 60)
    score -= 30 * (small and "+distractors" in chosen.env and loss != "vagram")
    low, high = next(task.reference for task in paper.TASKS.values() if chosen.env.startswith(task.env))
    Path(chosen.workdir).mkdir(parents=True)
    rows = [
        {"step": step, "eval/return": [[low + (high - low) / 100 * (score + seed)] * 2 for seed in range(chosen.seeds)]}
        for step in range(chosen.eval_every, chosen.steps + 1, chosen.eval_every)
    ]  # fmt: skip
    if loss == "anisotropic":
        rows = rows[:3]
    (Path(chosen.workdir) / log.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if loss == "anisotropic":
        raise FloatingPointError("the dynamics model diverged")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes a second for every variant: a digest of all code, and git's word on the commit."""
    monkeypatch.setattr(studies, "digest", lambda name, variant: f"{name} {variant.settings}")
    monkeypatch.setattr(log, "provenance", lambda: {"command": "python", "hardware": {"cores": 2}})


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> dict[str, Any]:
    monkeypatch.setattr(mbpo, "run", script)
    monkeypatch.setattr(online, "run", script)
    TRAINED.clear()
    settings = paper.Settings(
        parts="pendulum,hopper", workdir=str(tmp_path / "runs"), out=str(tmp_path / "out")
    )
    return paper.run(settings)


@pytest.mark.slow
def test_the_whole_study_without_training(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs are planned, trained once each, scored, judged and reported; one that diverges has no score."""
    # With three kinds, three models and five losses, and two without a model; Hopper with two kinds and one model.
    assert len(TRAINED) == 3 * (3 * 5 + 2) + 2 * (5 + 2) == result["planned"]
    rows = paper.table(result)
    alone = rows[paper.Run("pendulum", "none", "-", "sac, as many updates")]
    np.testing.assert_allclose(alone["area"]["each"], 45 + np.arange(5))
    random = rows[paper.Run("hopper", "official", "3x64", "anisotropic")]
    assert random["diverged"] and random["curve"]["score"].shape == (20, 2)
    report = (tmp_path / "out" / studies.REPORT).read_text()
    assert "| 2x16 | `mse` | 62.0 ± 2.0 (62.0) | 32.0 ± 2.0 (32.0) | 62.0 ± 2.0 (62.0) |" in report
    assert "| 3x64 | `anisotropic` | diverged | diverged |" in report
    assert "3x64, anisotropic diverged: the dynamics model diverged" in report
    assert "*Diverged*: one of a run's seeds did" in report
    assert not any("anisotropic" in claim["claim"] for claim in result["claims"])
    assert "| - | `sac` | 27.0 ± 2.0 (27.0) |" in report
    # Two small models of the pendulum and one of Hopper, against three losses.
    assert f"| {paper.QUESTIONS['capacity']} | 9 | 0 | 0 |" in report
    for question in ("noise", "parity", "efficiency"):
        assert f"| {paper.QUESTIONS[question]} |" in report
    assert "--env=Hopper-v5+distractors10" in report
    figures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert figures == {"pendulum.png", "hopper.png"}
    stored = studies.load(tmp_path / "out" / log.RESULT)
    assert stored["claims"] == result["claims"] == studies.judged(paper.claims(stored))
    assert "\n\n".join(paper.report(stored)) in report
    trained = len(TRAINED)
    monkeypatch.setattr(paper, "draw", lambda *_: None)
    paper.run(paper.Settings(**{**result["settings"], "hidden": (64, 64), "hopper_hidden": (128, 128)}))
    assert len(TRAINED) == trained


def verdicts(scores: dict[tuple[str, str, str], list[float]]) -> dict[str, str]:
    """{claim: its verdict} of areas {(distractors, model, method): one per seed} of the pendulum."""
    rows = [
        {**paper.Run("pendulum", *key)._asdict(), "area": {"each": np.array(x)}} for key, x in scores.items()
    ]
    outcome = {"settings": {"parts": "pendulum"}, "rows": rows}
    marks = {studies.HOLDS: "Y", studies.FAILS: "N", studies.OPEN: "?"}
    return {
        row["claim"].replace("pendulum, ", ""): marks[row["verdict"]]
        for row in studies.judged(paper.claims(outcome))
    }


def test_a_run_that_diverged_enters_no_claim_and_has_no_interval() -> None:
    """Its seeds share a program: where one diverges the others stop, and their last scores are none of an end."""
    runs = [paper.Run("pendulum", "official", "3x64", method) for method in ("vagram", "mse")]
    rows = [
        {**run._asdict(), **paper.outcome(np.arange(2), np.array([[50.0, 60.0]] * 2) - 10 * number, "")}
        for number, run in enumerate(runs)
    ]
    result = {"settings": {"parts": "pendulum"}, "rows": rows}
    assert len(list(paper.claims(result))) == 1 and paper.area_last(rows[1]).startswith("45.0")
    rows[1]["diverged"] = "the dynamics model diverged"
    assert list(paper.claims(result)) == [] and paper.area_last(rows[1]) == "diverged"
    assert "".join(studies.about_diverged(result)) and not list(studies.about_diverged({"rows": rows[:1]}))


def test_nothing_is_claimed_before_both_sides_are_there() -> None:
    assert verdicts({("official", "3x64", "vagram"): [1, 2, 3], ("none", "4x200", "mle"): [1, 2, 3]}) == {}


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [
        # of vagram, mse and anisotropic: more than mse; more than anisotropic, which gains nothing over mse
        ("official", ([60, 61, 62], [40, 42, 41], [40, 41, 41]), "YYY"),
        ("official", ([60, 61, 62], [40, 42, 41], [60, 62, 61.5]), "Y?N"),
        ("official", ([40, 41, 42], [60, 62, 61], [50, 51, 51]), "NNY"),
        ("official", ([40, 61, 42], [50, 42, 51], [49, 47, 60]), "???"),
        # on noise vagram gains less than 5 points
        ("noise", ([60, 61, 62], [60, 62, 61], None), "Y"),
        ("noise", ([50, 51, 52], [60, 62, 61], None), "Y"),
        ("noise", ([60, 61, 62], [40, 42, 41], None), "N"),
        ("noise", ([60, 61, 62], [56, 57, 57], None), "?"),
    ],
)
def test_claims_are_of_differences_over_seeds(kind: str, scores: Any, expected: str) -> None:
    methods = dict(zip(("vagram", "mse", "anisotropic"), scores, strict=True))
    claims = verdicts({(kind, "3x64", method): x for method, x in methods.items() if x})
    assert "".join(claims.values()) == expected


def test_on_noise_the_gain_over_scaled_errors_is_judged_too() -> None:
    flat, high = [50.0, 51.0, 52.0], [70.0, 71.5, 72.0]
    for standardised, verdict in (([70.0, 71.0, 72.0], "Y"), (flat, "N")):
        scores = {"vagram": high, "standardised": standardised}
        assert verdicts({("noise", "3x64", method): x for method, x in scores.items()}) == {
            "noise: 3x64: vagram gains over standardised less than 5 points (difference)": verdict
        }


def test_the_stored_result_goes_on_with_the_loss_that_it_lacks() -> None:
    folder = Path(paper.__file__).parents[2] / "results/papers/vagram_online"
    settings = paper.Settings(stored=str(folder))
    studies.check_kept(settings, paper.Settings())
    earlier = studies.stored(settings, paper.Run._fields)
    missing = [run for run in paper.planned(settings) if run not in earlier.rows]
    assert {run.method for run in missing} == {"standardised"} and len(missing) == 9 + 9 + 2


def test_claims_across_kinds_and_sizes() -> None:
    """Differences of differences, what counts as nothing, and the comparison with SAC alone."""
    flat, high = [50.0, 51.0, 52.0], [70.0, 71.5, 72.0]
    claims = verdicts(
        {
            **{("noise", "2x16", method): x for method, x in (("vagram", flat), ("mse", [50.0, 51.0, 52.5]))},
            **{("official", "2x16", method): x for method, x in (("vagram", high), ("mse", flat))},
            **{("none", "4x200", method): x for method, x in (("vagram", high), ("mle", [70.0, 71.2, 72.0]))},
            **{("none", "2x16", method): x for method, x in (("vagram", high), ("mle", flat))},
            ("none", "-", "sac"): flat,
            ("none", "-", "sac, as many updates"): [80.0, 81.0, 83.0],
        }
    )
    assert claims == {
        "capacity: official distractors, 2x16: vagram scores more than mse (difference)": "Y",
        "noise: 2x16: vagram gains over mse less than 5 points (difference)": "Y",
        "noise: 2x16: vagram gains over mse less than with official distractors (difference of differences)": "Y",
        "size: 4x200 to 2x16: mle loses more than vagram (difference of differences)": "Y",
        "parity: 4x200: vagram is within 5 points of mle (difference)": "Y",
        "efficiency: 4x200: mle (MBPO) scores more than sac (difference)": "Y",
        "efficiency: 4x200: mle (MBPO) scores more than sac, as many updates (difference)": "N",
    }
    apart = {("none", "4x200", "vagram"): high, ("none", "4x200", "mle"): flat}
    assert list(verdicts(apart).values()) == ["N"]


def parsed(command: str) -> tuple[Any, Any]:
    """The settings and the agent's hyper-parameters that a command line gives."""
    module, *words = shlex.split(command)[2:]
    default = {"experiments.mbpo": mbpo.PUBLISHED, "experiments.online": online.PUBLISHED}[module]
    values = absl_flags.FlagValues()
    flags.parser(default, common.config, values)([module, *words])
    return flags.read(default, values=values), flags.read(common.config("sac"), "agent.", values)


@pytest.mark.slow
def test_runs_differ_in_what_is_compared_alone_and_a_command_repeats_each() -> None:
    settings, different = paper.Settings(learning_rate=3e-3), set()
    for task in paper.TASKS:
        runs = [run for run in paper.planned(settings) if run.task == task]
        every = {run: paper.training(settings, run) for run in runs}
        kinds: set[str] = set()  # of which one has been compared: kinds of task, models and losses
        for run, (_, chosen, config) in every.items():
            if not {*run} <= kinds:
                kinds |= {*run}
                assert repr((chosen, config)) == repr(parsed(paper.command(settings, run))), (
                    run
                )  # NaN is in both
            different.add(repr(paper.variant(settings, run).settings))
        changes = {"model_loss": "mle", "model_hidden": (200,) * 4, "env": paper.TASKS[task].env}
        with_model = [chosen for script, chosen, _ in every.values() if script is mbpo]
        assert len({repr(dataclasses.replace(chosen, **changes)) for chosen in with_model}) == 1
        assert len({repr(config) for _, _, config in every.values()}) == 1
        alone = [chosen for script, chosen, _ in every.values() if script is online]
        same = ("seeds", "seed", "steps", "learning_starts", "batch_size", "eval_every", "eval_episodes")
        for name in same:
            assert {getattr(chosen, name) for chosen in (*alone, *with_model)} == {getattr(alone[0], name)}
        assert [chosen.utd for chosen in alone[:2]] == [1.0, with_model[0].utd]
    assert len(different) == len(paper.planned(settings))  # nothing is taken for another


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": "pendulum,ant"}, "--parts: ant is none of pendulum, cartpole, hopper"),
        ({"distractors": "some"}, "--distractors: some is none of none, official, noise"),
        ({"models": "4x200,9x9"}, "--models: 9x9 is none of 4x200, 3x64, 2x16"),
        ({"losses": "vaml"}, "--losses: vaml is none of mle, mse, standardised, vagram"),
        ({"seeds": 1}, "--seeds=1: an interval"),
        ({"hopper_seeds": 1}, "--hopper_seeds=1: an interval"),
        ({"pendulum_steps": 50}, "--pendulum_steps=50 is not a multiple of --retrainings=20"),
        ({"parts": "cartpole", "cartpole_steps": 40, "evaluations": 3}, "--cartpole_steps=40 .* --evaluations=3"),
        ({"utd": 0}, "--utd=0 must be at least 1"),
        ({"eval_episodes": 1}, "--eval_episodes=1: give at least 2"),
        ({"model_members": 0}, "--model_members=0 must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_made(
    change: Any, message: str, tmp_path: Path
) -> None:
    settings = paper.Settings(workdir=str(tmp_path / "runs"), out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=message):
        paper.run(dataclasses.replace(settings, **change))
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_before_its_first_evaluation_is_drawn_as_random_actions(tmp_path: Path) -> None:
    def diverging(chosen: Any, config: Any) -> None:
        raise train.Diverged("critic_loss is not finite")

    chosen = paper.training(paper.Settings(), paper.Run("hopper", "none", "3x64", "mle"))[1]
    work = studies.Work(tmp_path / "run", lambda steps: None)
    scores = paper.trained(diverging, chosen, None, (0.0, 1.0), work)
    assert scores["diverged"] and not scores["curve"]["score"].any()


@pytest.mark.long
def test_from_training_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """The settings are those that the script with a model takes, and the report is of what it leaves."""
    monkeypatch.setattr(paper, "ALONE", ())
    settings = paper.Settings(
        parts="pendulum",
        distractors="official",
        models="2x16",
        losses="mse",
        seeds=2,
        pendulum_steps=40,
        utd=1,
        batch_size=8,
        hidden=(8,),
        retrainings=2,
        model_max_epochs=2,
        rollouts=8,
        evaluations=2,
        eval_episodes=2,
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "out"),
    )
    result = paper.run(settings)
    assert [row["curve"]["score"].shape for row in result["rows"]] == [(2, 2)]
    assert not any(row["diverged"] for row in result["rows"])
    assert "| 2x16 | `mse` |" in (tmp_path / "out" / studies.REPORT).read_text()
