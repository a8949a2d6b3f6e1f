"""What one short session on an accelerator should bring home: speed tables, and board runs at full size.

    python -m benchmarks.accelerator --minutes=9
    python -m benchmarks.accelerator --tiny --minutes=10 --out=runs/accelerator_tiny

The most telling come first: the speed tables of `benchmarks.offline`, `language`, `model_based`, `goals` and `online`,
each with a share of the time, then the locomotion board on one tier, which `sweeps.run` and `experiments.report` make
in what is left. Every part is a process of its own, with its own log: one that fails or runs out of time takes no other
with it, and what it had written stays. All of it lies in one folder, README.md says what became of what, and the same
command with the same --out goes on with the board.

With --tiny every part runs at the smallest size: to be tried where nothing is scarce, before the one chance is taken.
Then a part that runs out of time has failed, too.
Nothing here is downloaded; the tier is made on the spot, by all cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app

from experiments import flags, studies
from rl import log
from rl.files import expanded

TIER = "hopper-medium-regen-v5"
BOARD = "sweeps/boards/locomotion.yaml"
_ROOT = Path(__file__).parents[1]
_REPORT = 30.0  # seconds that are kept for the report of the board
_GRACE = 20.0  # seconds between the request to stop and the end of a process
_LEAST = 1.0  # seconds that are worth beginning a part for


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run, and for how long."""

    minutes: float = 9.0  # for everything; parts are stopped so that it holds
    tiny: bool = False  # the smallest sizes: minutes on a CPU
    parts: str = ""  # names, comma-separated, in the order in which they run; "": all
    peak_tflops: float = 0.0  # of the hardware, for language models' share of it; 0: not stated
    out: str = "results/accelerator"  # the folder of everything


class Part(NamedTuple):
    """A command with a share of the time."""

    name: str
    command: Sequence[str]  # a module and its flags
    share: float = 1.0  # of all the time, at most
    needs: str = ""  # a part without which this one is not begun
    reserve: float = 0.0  # seconds of the time left that it leaves to those after it


def parts(settings: Settings) -> list[Part]:
    """All parts, the most telling first."""
    out = Path(settings.out)
    tables = [
        Part(name, (f"benchmarks.{name}", *sizes, f"--out={out / name}.json"), share)
        for name, (share, full, tiny) in _tables(settings).items()
        for sizes in [tiny if settings.tiny else full]
    ]
    # At full size the tier lies where it always does, and is there already the next time.
    tier = [f"--out={out / 'data'}", "--transitions=600", "--overwrite"] if settings.tiny else []
    board = [BOARD, f"--workdir={out / 'board'}", *_board(settings)]
    return [
        *tables,
        Part("data", ("experiments.collect", f"--dataset={TIER}", *tier), 0.3),
        Part("board", ("sweeps.run", *board), needs="data", reserve=_REPORT),
        Part("report", ("experiments.report", *board, f"--out={out / 'report'}"), needs="data"),
    ]


def _tables(settings: Settings) -> dict[str, tuple[float, list[str], list[str]]]:
    """{benchmark: (share of the time, flags at full size, flags at the smallest)}."""
    peak = f"--peak_tflops={settings.peak_tflops}"
    small_model = ["--part=0.002", "--transitions=400", "--steps=256", "--fit_epochs=1", "--rollouts=256"]
    return {
        "offline": (
            0.25,
            [
                *("--agents=iql,cql,edac", "--seeds=1,8,32,128", "--modes=scan", "--updates=200"),
                *("--repeats=3", "--no_d3rlpy", "--profile"),
            ],
            [
                *("--agents=bc", "--seeds=1,2", "--batch_size=8", "--updates=4", "--repeats=1"),
                *("--transitions=3000", "--no_d3rlpy"),
            ],
        ),
        "language": (
            0.15,
            [
                *("--size=135m", "--batch=64", "--length=512", "--bfloat16", "--cases=lm step", "--profile"),
                *("--repeats=3", "--notorch", peak),
            ],
            [
                *("--size=tiny", "--batch=2", "--length=8", "--steps=3", "--programs=0", "--repeats=1"),
                *("--notorch", peak),
            ],
        ),
        "model_based": (
            0.11,
            ["--part=0.2", "--seeds=1,8", "--repeats=2", "--no_torch"],
            ["--critics=2", "--diversity=0", *small_model, "--repeats=1", "--no_torch"],
        ),
        "goals": (
            0.11,
            ["--batches=1024", "--updates=200", "--repeats=2", "--environments=TwoRooms-v0"],
            [
                *("--agents=gcbc", "--batches=4", "--seeds=1", "--environments=TwoRooms-v0", "--updates=2"),
                *("--repeats=1", "--transitions=2000"),
            ],
        ),
        "on_device": (
            0.08,
            ["--environments=jax/Pendulum-v1", "--seeds=1,64", "--copies=256", "--repeats=2", "--nohost"],
            [
                "--environments=jax/Pendulum-v1",
                "--seeds=1",
                "--copies=1",
                "--steps=8",
                "--repeats=1",
                "--replay=100",
            ],
        ),
        "online": (
            0.05,
            ["--envs=Hopper-v5", "--repeats=3", "--nopeer"],
            [
                "--envs=Pendulum-v1",
                "--utds=1",
                "--steps=4",
                "--warm=8",
                "--replay=50",
                "--repeats=2",
                "--nopeer",
            ],
        ),
    }


def _board(settings: Settings) -> list[str]:
    """What of the board is run: one tier with all agents and the board's own sizes; the smallest with one agent."""
    one = [f"--set=dataset={TIER}"]
    if not settings.tiny:
        return one
    small = {"agent": "bc", "seeds": 2, "updates": 4, "eval_every": 2, "eval_episodes": 2, "batch_size": 8}
    data = f"--set=data_folder={Path(settings.out) / 'data'}"
    return [*one, data, *(f"--set={name}={value}" for name, value in small.items())]


def run(settings: Settings) -> dict[str, Any]:
    """Runs all parts within the time; returns what became of them, which is stored after each.

    Raises:
      ValueError: an unknown part, or no time.
    """
    if not settings.minutes > 0:
        raise ValueError(f"--minutes={settings.minutes:g} must be more than 0")
    out = expanded(settings.out)
    settings = dataclasses.replace(settings, out=str(out.absolute()))
    known = {part.name: part for part in parts(settings)}
    names = studies.names("parts", settings.parts or ",".join(known), known)
    out.mkdir(parents=True, exist_ok=True)
    # No hardware in it: to ask JAX for that would take the accelerator's memory from the parts, whose results have it.
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": log.loaded_commit(),
        "versions": log.versions(),
        "settings": dataclasses.asdict(settings),
        "parts": [],
    }
    end = time.monotonic() + 60 * settings.minutes
    for name in names:
        row = _run(known[name], result["parts"], end, settings)
        result["parts"].append(row)
        log.write_json(out / log.RESULT, result)
        studies.write_blocks(out / studies.REPORT, report(result))
        print(f"{name}: {row['outcome']} after {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    return result


def _run(part: Part, before: Sequence[dict[str, Any]], end: float, settings: Settings) -> dict[str, Any]:
    """One part, which ends before ``end``; what became of it."""
    outcomes = {row["name"]: row["outcome"] for row in before}
    left = end - time.monotonic() - part.reserve
    limit = min(part.share * 60 * settings.minutes, left)
    budget = [f"--budget={max(_LEAST, limit - _GRACE):.0f}s"] if part.command[0] == "sweeps.run" else []
    command = [sys.executable, "-m", *part.command, *budget]
    row = {"name": part.name, "command": shlex.join(["python", *command[1:]]), "limit": limit, "seconds": 0.0}
    # Data that were there already, of another size, are an error of the part that makes them and no other's.
    if part.needs and outcomes.get(part.needs) == "out of time":
        return row | {"outcome": f"not begun: {part.needs} ran out of time"}
    if limit < _LEAST:
        return row | {"outcome": "not begun: no time was left"}
    began = time.monotonic()
    outcome = _process(command, Path(settings.out) / f"{part.name}.log", limit)
    return row | {"outcome": outcome, "seconds": time.monotonic() - began}


def _process(command: Sequence[str], file: Path, limit: float) -> str:
    """Runs a command with its output in ``file``; "done", or what went wrong.

    After ``limit`` seconds, or a little before, it is asked to stop, and soon after that it is killed with all that it
    has started.
    """
    grace = min(_GRACE, limit / 4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *_paths()])}
    with open(file, "w") as stream:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its workers end with it
        )
        try:
            status = process.wait(limit - grace)
            return "done" if status == 0 else f"failed with status {status}, see {file.name}"
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def report(result: dict[str, Any]) -> Iterator[str]:
    """What became of the parts, as blocks of Markdown."""
    yield "# A session on an accelerator"
    yield f"`{result['command']}`, commit {result['commit']}. Each table and run names the hardware itself."
    rows = [
        (row["name"], row["outcome"], f"{row['seconds']:.0f}", f"`{row['command']}`")
        for row in result["parts"]
    ]
    yield studies.table(("part", "outcome", "seconds", "command"), rows)


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    result = run(settings)
    print((expanded(settings.out) / studies.REPORT).read_text())
    print(f"Everything is in {settings.out}; look at {studies.REPORT} first.")
    faults = ("failed", "out of time", "not begun") if settings.tiny else ("failed",)
    failed = [row["name"] for row in result["parts"] if row["outcome"].startswith(faults)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; each has a .log there")


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
