"""The study of model quality, from data to report, on a tiny setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.papers import model_quality as paper

pytest.importorskip("mujoco")
pytest.importorskip("h5py")


@pytest.mark.slow
def test_the_study_from_end_to_end(tmp_path: Path) -> None:
    settings = paper.Settings(
        transitions=600,
        methods="base,ravl",
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
    assert rows == [("base", 0, (2,)), ("base", 1, (2,)), ("ravl", 0, (2,)), ("ravl", 1, (2,))]
    assert result["rows"][1]["reward_error"] == pytest.approx(
        0, abs=1e-5
    )  # the true world has the true rewards
    assert (result["rows"][0]["reward_error"] > 1e-3).all()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["rows"][0]["method"] == "base"
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"interpolation.png", "q_in_the_truth.png", "README.md"} <= left
