"""benchmarks.accelerator: flags that exist at both sizes, a budget that holds, parts that take no other down."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from absl import flags as absl_flags

from benchmarks import accelerator
from benchmarks.accelerator import Part, Settings
from experiments import collect, flags, report
from rl import log
from sweeps import layout
from sweeps import run as sweeps


@pytest.mark.parametrize("tiny", [False, True])
def test_every_part_is_a_command_that_exists_with_the_flags_it_is_given(tiny: bool, tmp_path: Path) -> None:
    """So that a chance on a machine is not lost to a typo at a size that no test can run."""
    listed = accelerator.parts(Settings(tiny=tiny, out=str(tmp_path)))
    names = ["offline", "language", "model_based", "goals", "on_device", "online", "data", "board", "report"]
    assert [part.name for part in listed] == names
    for part in listed:
        module, *argv = part.command
        values = absl_flags.FlagValues()
        if part.name in ("board", "report"):
            (sweeps if part.name == "board" else report).define(values)
            _, file = values([module, *argv])
            plan = layout.from_flags(str(accelerator._ROOT / file), {}, values)
            assert len(plan.programs) == (1 if tiny else 6)
            assert all(program.fixed["dataset"] == accelerator.TIER for program in plan.programs.values())
        elif part.name == "data":
            known = {flag.name for flag in absl_flags.FLAGS.flags_by_module_dict()[collect.__name__]}
            assert {word.partition("=")[0].lstrip("-") for word in argv} <= known
        else:
            settings = importlib.import_module(module).Settings()
            flags.parser(settings, values=values)([module, *argv])
            assert flags.read(settings, values=values).out == str(tmp_path / f"{part.name}.json")
    assert sum(part.share for part in listed if part.share < 1) <= 1.05


def quick(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    """These parts in place of all; they are of timeit, a command that runs what it is given."""
    monkeypatch.setattr(accelerator, "parts", lambda settings: parts)
    monkeypatch.setattr(accelerator, "_LEAST", 0.01)


def python(name: str, text: str, **more: Any) -> Part:
    return Part(name, ("timeit", "-n1", "-r1", text), **more)


@pytest.mark.slow
def test_a_part_that_fails_or_runs_out_of_time_takes_no_other_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    quick(
        monkeypatch,
        python("broken", "raise OSError('no space left')"),
        python("slow", deaf, share=0.5),
        python("after", "pass", needs="broken"),
        python("without", "pass", needs="slow"),
    )
    began = time.monotonic()
    result = accelerator.run(Settings(minutes=0.1, out=str(tmp_path / "out")))
    assert time.monotonic() - began < 6
    assert {row["name"]: row["outcome"] for row in result["parts"]} == {
        "broken": "failed with status 1, see broken.log",
        "slow": "out of time",
        "after": "done",
        "without": "not begun: slow ran out of time",
    }
    assert "no space left" in (tmp_path / "out" / "broken.log").read_text()
    assert (tmp_path / "out" / "slow.log").read_text() == "1\n"
    assert json.loads((tmp_path / "out" / log.RESULT).read_text())["parts"] == result["parts"]
    assert "| slow | out of time |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_parts_are_chosen_and_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "while True: pass"
    quick(
        monkeypatch, python("first", endless, reserve=1.0), python("second", "pass"), python("third", endless)
    )
    result = accelerator.run(Settings(minutes=0.05, parts="first,second", out=str(tmp_path)))
    assert [row["outcome"] for row in result["parts"]] == ["out of time", "done"]
    assert result["parts"][0]["seconds"] < 2.1
    monkeypatch.setattr(accelerator, "_LEAST", 0.5)
    result = accelerator.run(Settings(minutes=0.01, parts="third,second", out=str(tmp_path)))
    assert [row["outcome"] for row in result["parts"]] == ["out of time", "not begun: no time was left"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": "offline,bord"}, "--parts: bord is none of offline"),
        ({"minutes": 0}, "--minutes=0 must be"),
    ],
)
def test_what_cannot_be_run_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        accelerator.run(Settings(out=str(tmp_path / "out"), **fields))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.command
def test_the_smallest_session_brings_everything_home(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    result = accelerator.run(Settings(minutes=15, tiny=True, out=str(tmp_path)))
    outcomes = {row["name"]: row["outcome"] for row in result["parts"]}
    assert set(outcomes.values()) == {"done"}, {
        name: (tmp_path / f"{name}.log").read_text()[-2000:]
        for name, outcome in outcomes.items()
        if outcome != "done"
    }
    for name in ("offline", "language", "model_based", "goals", "on_device", "online"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert (tmp_path / f"{name}.md").stat().st_size > 0
    (cell,) = json.loads((tmp_path / "report" / log.RESULT).read_text())["cells"]
    assert (cell["variant"], cell["task"]) == ("bc", accelerator.TIER)
