"""The study of model quality, from data to report, on a tiny setting."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import studies
from experiments.papers import model_quality as paper
from rl import log, train

pytest.importorskip("mujoco")
pytest.importorskip("h5py")


@pytest.mark.long
def test_the_study_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = paper.Settings(
        transitions=600,
        methods="ravl",
        truths="0,1",
        hidden=(8,),
        epochs=2,
        updates=2,
        rollouts=4,
        length=2,
        critics=3,
        model_updates=20,
        eval_every=1,
        eval_episodes=2,
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "out"),
    )
    result = paper.run(settings)
    rows = [(row["method"], row["world"], row["return"].shape) for row in result["rows"]]
    assert rows == [("ravl", 0, (2,)), ("ravl", 1, (2,))]
    assert result["rows"][1]["reward_error"] == pytest.approx(
        0, abs=1e-5
    )  # the true world has the true rewards
    assert (result["rows"][0]["reward_error"] > 1e-3).all()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["rows"][0]["method"] == "ravl"
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"interpolation.png", "q_in_the_truth.png", "README.md"} <= left
    report = (tmp_path / "out" / "README.md").read_text()
    assert report.count("| ravl | 1 |") == 2
    assert "RAVL's Q stays below the largest value there can be (difference) | RAVL (Sims" in report
    monkeypatch.setattr(paper.model_based, "run", lambda *_: pytest.fail("a finished run was trained again"))
    np.testing.assert_equal(paper.run(settings)["rows"], result["rows"])


def row(method: str, world: float, returns: list[float], q: list[float]) -> dict[str, Any]:
    limit = np.array([300, 300])
    return {"method": method, "world": world, "return": np.array(returns), "q": np.array(q), "limit": limit}


def test_the_correlation_with_mopos_penalty_stands_beside_the_published() -> None:
    learned = row("ravl", 0, [1, 2], [1, 2]) | {"spread_aleatoric": np.array([0.4, 0.1])}
    (claim,) = studies.judged(paper.claims({"rows": [learned]}))
    assert claim["verdict"] == studies.HOLDS and "0.49 (hopper-medium-replay), 0.43" in claim["published"]
    for other, verdict in ((-0.4, studies.FAILS), (0.4, studies.OPEN)):
        none = learned | {"spread_aleatoric": np.array([other, -0.1])}
        assert studies.judged(paper.claims({"rows": [none]}))[0]["verdict"] == verdict


def verdicts(*rows: dict[str, Any]) -> list[str]:
    return [row["verdict"] for row in studies.judged(paper.claims({"rows": rows}))]


def test_predictions_are_of_every_seed_and_open_where_seeds_disagree() -> None:
    learned, true = row("base", 0, [50, 60], [200, 200]), row("base", 1, [8, 9], [2000, 400])
    ravl = row("ravl", 1, [70, 80], [150, 200])
    yes, no, undecided = studies.HOLDS, studies.FAILS, studies.OPEN
    assert verdicts(learned, true, ravl) == [yes] * 4
    assert verdicts(learned, true | {"limit": np.array([500, 500])}, ravl) == [undecided, yes, yes, yes]
    assert verdicts(learned, true | {"limit": np.array([5000, 5000])}, ravl) == [no, yes, yes, yes]
    assert verdicts(true, row("ravl", 1, [7, 80], [150, 350])) == [yes, undecided, undecided]
    assert verdicts(true | {"q": np.full(2, np.nan)}, ravl) == [undecided, yes, yes]


@pytest.mark.parametrize(
    "error", [train.Diverged("q is not finite"), FloatingPointError("the dynamics model diverged")]
)
def test_a_run_that_diverged_before_it_logged_anything_has_no_numbers(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the learner that diverges or the model."""

    def diverge(*_: Any) -> None:
        raise error

    monkeypatch.setattr(paper.model_based, "run", diverge)
    (tmp_path / log.METRICS).touch()
    settings, work = paper.Settings(hidden=(8,)), studies.Work(tmp_path, lambda _: None)
    outcome = paper.train_one(settings, "log.hdf5", "base", 1.0, work)
    assert outcome["diverged"] and np.isnan(outcome["return"]).all() and outcome["q"].shape == (2,)
    paper.draw(tmp_path, settings, [outcome])
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        record.write(5, {"train/q": np.array([1.0, 2.0]), "eval/return": np.ones((2, 3))})
    outcome = paper.train_one(settings, "log.hdf5", "base", 1.0, work)
    np.testing.assert_array_equal(outcome["q"], [1, 2])
    np.testing.assert_array_equal(outcome["return"], [1, 1])
    assert np.isnan(outcome["edge_q"]).all()
    monkeypatch.setattr(paper.model_based, "run", lambda *_: None)
    with pytest.raises(KeyError, match="has no metric 'train/alpha'"):
        paper.train_one(settings, "log.hdf5", "base", 1.0, work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": "base,iql"}, "--methods: iql is none of base, mopo"),
        ({"methods": "base,edac"}, "--methods: edac is none of base, mopo.*, ravl$"),
        ({"truths": "0,2"}, "--truths=0,2: worlds are numbers from -1"),
        ({"truths": "0,truth"}, "--truths=0,truth: worlds are numbers"),
        ({"seeds": 1}, "--seeds=1: an interval"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper.run(dataclasses.replace(paper.Settings(), **change))
