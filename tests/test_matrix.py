"""experiments.matrix: the table, and what it refuses before anything is trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import matrix
from rl import agents
from rl.values import heads

pytest.importorskip("ogbench")


def cell(agent: str, head: str, mean: float) -> dict:
    last = {"mean": mean, "ci95": [mean - 0.25, mean + 123.4]}
    return {"agent": agent, "settings": {"head": head}, "scores": {"success": {"last": last}}}


def test_a_table_has_agents_down_heads_across_and_gaps_where_nothing_was_run() -> None:
    cells = [cell("bc", "scalar", 0.25), cell("iql", "scalar", 0.5), cell("iql", "c51", 0.75)]
    assert matrix.table(cells, "success").splitlines() == [
        "| success | scalar | c51 |",
        "|---|---|---|",
        "| `bc` | 0.25 [0.00, 124] |  |",
        "| `iql` | 0.50 [0.25, 124] | 0.75 [0.50, 124] |",
    ]


def test_every_offline_agent_for_continuous_actions_is_in_the_table_with_fields_of_its_own() -> None:
    assert set(matrix.CONFIGS) == set(agents.AGENTS) - {"dqn", "sac", "td3"}
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


@pytest.mark.slow
def test_the_table_is_made_and_made_again_without_training(tmp_path: Path) -> None:
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
    again = matrix.run(dataclasses.replace(settings, agents="bc"))  # nothing is trained, nothing is forgotten
    assert again == cells
