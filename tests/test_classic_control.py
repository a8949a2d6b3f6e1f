"""The online agents solve classic control, with the settings that `experiments.classic_control` shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from experiments import classic_control, online
from rl import log


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize("label", classic_control.RUNS)
def test_it_is_solved(label: str, tmp_path: Path) -> None:
    """From 20 steps of balance at random to 400 of 500, and from -1200 to a swing-up that stays up; two seeds."""
    settings, config = classic_control.RUNS[label]
    once = {"eval_every": settings.steps, "tensorboard": False, "workdir": str(tmp_path), "seeds": 2}
    result = online.run(dataclasses.replace(settings, **once), config)
    score = result["scores"]["return"]["last"]["mean"]
    solved = {"CartPole-v1": 400, "Pendulum-v1": -250}
    assert score > solved[settings.env]


@pytest.mark.slow
def test_the_study_draws_every_environment_and_writes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {
        "learning_starts": 8,
        "batch_size": 4,
        "envs": 1,
        "utd": 1.0,
        "steps": 16,
        "eval_every": 16,
        "save_every": 16,
    }
    few = {
        label: (dataclasses.replace(settings, **small, eval_episodes=2, eval_processes=0), config)
        for label, (settings, config) in classic_control.RUNS.items()
        if label in ("dqn, scalar", "td3")
    }
    monkeypatch.setattr(classic_control, "RUNS", few)
    result = classic_control.run(classic_control.Settings(seeds=2, workdir=str(tmp_path)))
    assert set(result["runs"]) == set(few) and result["runs"]["td3"]["env"] == "Pendulum-v1"
    for name in ("CartPole-v1.png", "Pendulum-v1.png", log.RESULT):
        assert (tmp_path / name).stat().st_size > 0
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert len(rows) == 4 and rows[2].startswith("| CartPole-v1 | dqn, scalar | ")
