"""HECRL on cubes: what is judged, what the numbers say, and once from data to report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ogbench")

from experiments import source_code, studies
from experiments.papers import hecrl_cubes as paper
from rl import log
from rl.agents import hecrl
from rl.data import recipes

SUCCESS = {paper.DIRECT: 0.4, paper.DIFFUSION: 0.8, paper.UNFILTERED: 0.5, paper.RANDOM: 0.6, paper.AWR: 0.3}


def of_success(
    settings: paper.Settings, of_run: paper.OfRun, way: paper.Judged, work: studies.Work
) -> dict[str, Any]:
    """In place of training: less success farther from R = -30, with HL-Gauss half as much less, and with more cubes."""
    slope = 0.01 if way.head == "scalar" else 0.005
    lost = slope * abs(way.radius + 30) + 0.2 * (way.cubes == paper.MORE)
    spread = 0.001 * (
        1 + SUCCESS[way.acts] - lost
    )  # another for each, so that no difference is the same for all
    success = np.array([SUCCESS[way.acts] - lost + spread * seed for seed in range(3)])
    return {"success": success, "once": success, "placed": success, "left": 1.2 - success}


def of_subgoals(
    settings: paper.Settings, of_run: paper.OfRun, head: str, kind: str, work: studies.Work
) -> dict[str, Any]:
    moved = 1.2 if kind == paper.DIFFUSION else 1.9
    return {"moved": [moved, moved, 1.001 * moved], "goals": [0.1] * 3, "logged": [1.1] * 3}


def test_the_whole_study_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "digest", lambda name, variant: name)
    monkeypatch.setattr(log, "provenance", lambda: {"command": "python", "hardware": {"cores": 2}})
    monkeypatch.setattr(recipes, "collect", lambda *_, **__: tmp_path / "data.npz")
    monkeypatch.setattr(paper, "of_success", of_success)
    monkeypatch.setattr(paper, "of_subgoals", of_subgoals)
    result = paper.run(paper.Settings(workdir=str(tmp_path / "runs"), out=str(tmp_path / "out")))
    assert len(result["rows"]) == 4 + 4 + 1 + 3 + 2 * 5
    verdicts = {claim["claim"].partition(" (")[0]: claim["verdict"] for claim in result["claims"]}
    assert len(verdicts) == 13
    assert {claim for claim, verdict in verdicts.items() if verdict != "holds"} == {
        "at its best R, HL-Gauss succeeds more often than a scalar"
    }
    report = (tmp_path / "out" / studies.REPORT).read_text()
    assert "| scalar, diffusion | 0.80 [" in report and "| scalar, awr | 0.30 [" in report
    assert " | 0.40 [0.40, 0.40] |" in report and "| hl_gauss, of the way left | " in report
    assert "| scalar, diffusion | 1.20 [1.20, 1.20] | 0.10 [0.10, 0.10] | 1.10 [1.10, 1.10] |" in report
    assert (tmp_path / "out" / "radius.png").exists()
    np.testing.assert_allclose(paper.over_radii(result, "scalar")[:, 0], [0.6, 0.7, 0.8, 0.7, 0.6, 0.5])


def test_runs_of_other_settings_or_code_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the ways to judge them are no part of them."""

    def digest(**changes: Any) -> str:
        return paper.run_digest(paper.Settings(**changes), "data.npz", "scalar", "awr")

    assert (
        digest() == digest(eval_episodes=2, radii=(-20,), radius=-20, candidates=8) != digest(updates=40_000)
    )
    before = digest()
    monkeypatch.setattr(source_code, "needed", lambda module, name: f"{module}.{name}, changed")
    assert digest() != before


def test_ways_to_act_differ_in_what_they_say() -> None:
    config = paper.agent_config(paper.Settings(), paper.DIFFUSION)
    others = paper.planning(paper.Settings(radius=-20, candidates=8), config)
    assert others == hecrl.Config(**{**vars(config), "radius": -20.0, "candidates": 8})
    at = lambda acts, radius=-30: paper.acting(config, paper.Judged("scalar", paper.DIFFUSION, acts, radius))
    assert at(paper.DIFFUSION, -50) == hecrl.Config(**{**vars(config), "radius": -50.0})
    assert at(paper.DIRECT).subgoals == "none" and at(paper.RANDOM).choice == "random"
    assert not at(paper.UNFILTERED).filtered and at(paper.UNFILTERED).direct
    regressed = paper.agent_config(paper.Settings(), paper.AWR)
    acts = paper.acting(regressed, paper.Judged("scalar", paper.AWR, paper.AWR, -30))
    assert (acts.subgoals, acts.filtered, acts.direct) == (
        "awr",
        False,
        False,
    )  # its table's EC-SGIQL with AWR
    assert paper.environment(paper.Settings()) == "heavy-cube-double-v0"
    assert paper.environment(paper.Settings(), 1) == "heavy-cube-triple-v0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dataset": "pointmaze-medium-navigate-v0"},
            "--dataset=pointmaze-medium-navigate-v0 is not one of cubes",
        ),
        ({"radius": -35}, "--radius=-35 must be one of --radii=-10,"),
        ({"radii": (-30, -150)}, "radius=-150.0 lies outside"),
        ({"dataset": "heavy-cube-quadruple-ppp-v0"}, "with one more cube, and no environment has it"),
        ({"updates": 3000}, "--updates=3000 is not a multiple of --eval_every=2000"),
        ({"seeds": 1}, "--seeds=1"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper.run(paper.Settings(**fields))


@pytest.mark.long
def test_from_data_to_report(tmp_path: Path) -> None:
    settings = paper.Settings(
        transitions=400,
        seeds=2,
        updates=4,
        eval_every=2,
        batch_size=8,
        width=8,
        layers=1,
        candidates=2,
        radii=(-30,),
        eval_episodes=2,
        pairs=4,
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "out"),
    )
    result = paper.run(settings)
    assert all(len(row[name]) == 2 for row in result["rows"] for name in paper.MEASURES)
    assert len(result["rows"]) == 12 and all(0 < x < 3 for row in result["rows"] for x in row["left"])
    assert set(result["moved"]) == {"scalar, diffusion", "hl_gauss, diffusion", "scalar, awr"}
    assert all(0 <= x <= 2 for row in result["moved"].values() for x in row["logged"])
