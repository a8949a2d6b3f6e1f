"""experiments.papers.sac_mujoco: finished runs are read, not trained again, and stand at the right step."""

import json

import numpy as np
import pytest

from experiments.papers import sac_mujoco as study
from rl import log


def finished(folder, steps, returns) -> None:
    """A run folder of two seeds, five episodes to an evaluation."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "eval/return": [[value - 1] * 5, [value + 1] * 5]})
        for step, value in zip(steps, returns, strict=True)
    ]
    (folder / log.METRICS).write_text("\n".join(lines) + "\n")
    (folder / log.RESULT).write_text("{}")


@pytest.mark.rendered
def test_finished_runs_are_laid_beside_the_published_spread(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study, "train", lambda *_: pytest.fail("a finished run was trained again"))
    finished(tmp_path / "Hopper-v5", [40_000, 50_000, 100_000], [7.0, 600.0, 1718.0])
    result = study.run(study.Settings(runs=str(tmp_path), environments="Hopper-v5"))
    first, second = result["environments"]["Hopper-v5"]
    assert first["steps"] == 50_000 and first["within"] and first["mean"] == 600.0
    np.testing.assert_array_equal(first["ours"], [599, 601])
    assert second["steps"] == 100_000 and not second["within"]
    text = (tmp_path / "README.md").read_text()
    assert "| Hopper-v5 | 50,000 | 491 [10, 1,234] | 599, 601 | yes |" in text
    assert (tmp_path / "Hopper-v5.png").stat().st_size > 10_000


def test_what_is_missing_is_trained(tmp_path, monkeypatch) -> None:
    trained = []

    def train(settings: study.Settings, name: str, folder) -> None:
        trained.append((name, settings.steps))
        finished(folder, [50_000], [300.0])

    monkeypatch.setattr(study, "train", train)
    study.run(study.Settings(runs=str(tmp_path), steps=50_000, environments="Walker2d-v5"))
    assert trained == [("Walker2d-v5", 50_000)]


def test_an_environment_without_published_curves_is_refused() -> None:
    with pytest.raises(ValueError, match="--environments: Ant-v5 is none of HalfCheetah-v5, Hopper-v5"):
        study.run(study.Settings(environments="Hopper-v5,Ant-v5"))
