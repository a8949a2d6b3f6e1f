"""experiments.matrix: the table, and what it refuses before anything is trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import matrix, offline
from rl import agents, statistics
from rl.values import heads

pytest.importorskip("ogbench")


def cell(agent: str, head: str, *each: float) -> dict:
    last = {"per_seed": np.array(each)}
    return {
        "agent": agent,
        "settings": {"head": head},
        "scores": {s: {"last": last} for s in ("success", "return")},
    }


def test_a_table_has_agents_down_heads_across_and_gaps_where_nothing_was_run() -> None:
    cells = [cell("bc", "scalar", 0.0, 0.0), cell("iql", "scalar", 0.5, 0.5), cell("iql", "c51", 0.7, 0.8)]
    assert matrix.table(cells, "return").splitlines() == [
        "| return | scalar | c51 |",
        "|---|---|---|",
        "| `bc` | 0.00 [0.00, 0.00] |  |",
        "| `iql` | 0.50 [0.50, 0.50] | 0.75 [0.11, 1.39] |",
    ]
    lines = matrix.table(cells, "success").splitlines()  # a rate
    low, high = statistics.rate_interval([0.7, 0.8])
    assert lines[3].endswith(f"| 0.75 [{low:.2f}, {high:.2f}] |") and high < 1
    assert lines[2] == "| `bc` | 0.00 [0.00, 0.99] |  |"


def test_every_offline_agent_for_continuous_actions_is_in_the_table_with_fields_of_its_own() -> None:
    assert set(matrix.CONFIGS) == set(agents.AGENTS) - {
        "deas",
        "dqn",
        "sac",
        "td3",
        *agents.GOALS,
    }  # deas is of chunks
    for name, fields in matrix.CONFIGS.items():
        agents.get(name).Config(**fields)
    assert matrix.Settings().heads.split(",") == list(heads.NAMES)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"agents": "iql,iqll"}, "--agents: iqll is none of bc, iql"),
        ({"heads": "scalar,hlgauss"}, "--heads: hlgauss is none of scalar"),
        ({"dataset": "cube-single-play-v0"}, "--dataset=cube-single-play-v0: .* pointmaze"),
    ],
)
def test_what_the_table_cannot_have_is_refused_at_once(wrong: dict, message: str, tmp_path: Path) -> None:
    settings = matrix.Settings(workdir=str(tmp_path / "runs"), out=str(tmp_path / "out"), **wrong)
    with pytest.raises(ValueError, match=message):
        matrix.run(settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.command
def test_the_table_is_made_and_made_again_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = matrix.Settings(
        agents="bc,iql",
        heads="hl_gauss",
        transitions=2000,
        seeds=2,
        updates=4,
        eval_every=4,
        eval_episodes=2,
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "new" / "table"),
    )
    cells = matrix.run(settings)
    assert [(c["agent"], c["settings"]["head"]) for c in cells] == [("bc", "scalar"), ("iql", "hl_gauss")]
    stored = json.loads((tmp_path / "new" / "table.json").read_text())
    assert stored["task"] == "pointmaze-medium-navigate-singletask-v0" and len(stored["cells"]) == 2
    text = (tmp_path / "new" / "table.md").read_text()
    assert matrix.table(cells, "success") in text and matrix.table(cells, "return") in text
    monkeypatch.setattr(offline, "run", lambda *_: pytest.fail("a finished cell was trained again"))
    again = matrix.run(dataclasses.replace(settings, agents="bc"))  # nothing is forgotten
    np.testing.assert_equal(again, cells)
