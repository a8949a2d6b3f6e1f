"""The online agents solved classic control, as stored, and the study that says so runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import classic_control, online, studies
from rl import log

STORED = Path(__file__).parents[1] / "results" / "classic_control"


def test_every_agent_of_the_stored_runs_solves_its_task() -> None:
    """Trained by the command in the file; judged again here, with the settings that it has now."""
    stored = studies.load(STORED / log.RESULT)
    assert list(stored["runs"]) == list(classic_control.RUNS)
    for label, (settings, config) in classic_control.RUNS.items():
        run = stored["runs"][label]
        assert (run["env"], run["agent"]) == (settings.env, settings.agent)
        chosen = {name: run["settings"][name] for name in ("head", "batch_size", "n_step", "utd")}
        assert chosen == {name: getattr(settings, name) for name in chosen}
        assert run["config"]["learning_rate"] == config.learning_rate
    assert stored["claims"] == studies.judged(classic_control.claims(stored))
    assert {row["verdict"] for row in stored["claims"]} == {studies.HOLDS} and len(stored["claims"]) == 7
    text = (STORED / "table.md").read_text()
    assert all(
        block in text for block in (*classic_control.report(stored), *studies.claims_table(stored["claims"]))
    )
    stored["runs"]["td3"]["scores"]["return"]["last"]["per_seed"] -= 100
    verdicts = [row["verdict"] for row in studies.judged(classic_control.claims(stored))]
    assert verdicts == [studies.HOLDS] * 6 + [studies.FAILS]


@pytest.mark.long
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
    settings = classic_control.Settings(seeds=2, workdir=str(tmp_path / "runs"), out=str(tmp_path))
    result = classic_control.run(settings)
    assert set(result["runs"]) == set(few) and result["runs"]["td3"]["env"] == "Pendulum-v1"
    for name in ("CartPole-v1.png", "Pendulum-v1.png", log.RESULT):
        assert (tmp_path / name).stat().st_size > 0
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert rows[2].startswith("| CartPole-v1 | dqn, scalar | ")
    claims = [row["claim"] for row in result["claims"]]
    assert claims[0] == "CartPole-v1, dqn, scalar: mean return above 400" and len(claims) == 2
    monkeypatch.setattr(online, "run", lambda *_: pytest.fail("a finished run was trained again"))
    np.testing.assert_equal(classic_control.run(settings)["runs"], result["runs"])
