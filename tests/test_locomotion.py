"""experiments.locomotion: the table of regenerated tiers, and what it refuses before anything is trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import locomotion, model_based, studies
from rl import agents

pytest.importorskip("mujoco")
pytest.importorskip("h5py")


def test_every_agent_of_the_table_exists_with_the_fields_given() -> None:
    for name, (_, fields) in locomotion.OFFLINE.items():
        agents.get(name).Config(**fields, hidden=(8,))
    for name in locomotion.MODEL_BASED:
        dataclasses.replace(model_based.config(name), hidden=(8,))
    for published in studies.published("locomotion")["scores"].values():
        assert set(published) < {*locomotion.OFFLINE, *locomotion.MODEL_BASED}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"agents": "iql,sacn"}, "--agents: sacn is none of bc, iql"),
        ({"datasets": "hopper-medium-v2"}, "--datasets: hopper-medium-v2 is none of hopper-random-regen-v5"),
        ({"seeds": 1}, "--seeds=1: an interval"),
        ({"updates": 10}, "--updates=10 must be a multiple of 4"),
    ],
)
def test_what_the_table_cannot_have_is_refused_at_once(wrong: dict, message: str, tmp_path: Path) -> None:
    settings = locomotion.Settings(workdir=str(tmp_path / "runs"), out=str(tmp_path / "out"), **wrong)
    with pytest.raises(ValueError, match=message):
        locomotion.run(settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_table_from_collection_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = locomotion.Settings(
        datasets="hopper-medium-regen-v5",
        agents="bc,base",
        transitions=600,
        seeds=2,
        updates=8,
        hidden=(8,),
        rollouts=4,
        model_updates=20,
        eval_episodes=2,
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "out"),
    )
    result = locomotion.run(settings)
    assert [cell["agent"] for cell in result["cells"]] == ["bc", "base"]
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(stored["cells"]) == 2
    assert {"README.md", "hopper-medium-regen-v5.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    assert sum("| `bc` |" in line and "53.5 ± 1.8" in line for line in lines) == 1
    assert lines[-1].startswith("Not run: `iql`, ") and "`ravl`, hopper-random-regen-v5" in lines[-1]
    for script in (locomotion.offline, locomotion.model_based):
        monkeypatch.setattr(script, "run", lambda *_: pytest.fail("a finished run was trained again"))
    locomotion.run(settings)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["cells"] == stored["cells"]
