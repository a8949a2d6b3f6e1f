"""``python -m experiments.collect`` as a user meets it: its own process, its exit status, its messages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ogbench")

from rl.data.recipes import collect, pool, read_card

pytestmark = [pytest.mark.command, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
DATASET = "pointmaze-medium-navigate-v0"
LONG = (
    "--transitions=20000",
    "--episode_steps=500",
)  # a second or two: long enough to be stopped in the middle


Ask = Callable[..., tuple[int, str, str]]


def headless() -> dict[str, str]:
    """The environment of a machine without a screen."""
    return {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MUJOCO_GL")}


def start(out: Path, *flags: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.collect", f"--out={out}", *flags],
        cwd=ROOT,
        env=headless() | {"HEADWAY_HOME": str(out / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@contextlib.contextmanager
def as_from_a_terminal() -> Iterator[None]:
    """A suite in the background ignores SIGINT, and so would what it starts; a terminal's programs do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(out: Path, *flags: str, **options) -> tuple[int, str, str]:
    process = start(out, *flags, **options)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


# One process for all commands that nothing interrupts, as starting one takes longer than what it is asked.
SERVER = """
import contextlib, io, json, os, sys
from absl import app
from absl.testing import flagsaver
from experiments import collect, flags as config_flags

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    flags, environment = json.loads(line)
    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    os.environ.update(environment)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), flagsaver.flagsaver():
        try:
            app.run(
                config_flags.reporting(collect.main), ["collect", *flags], flags_parser=config_flags.parser()
            )
        except SystemExit as stopped:
            status = stopped.code or 0
            if isinstance(status, str):  # Python would print it, and end with 1
                err.write(status)
                status = 1
    os.environ.clear()
    os.environ.update(before)
    print(json.dumps([status, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env=headless(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def ask(server: subprocess.Popen[str], tmp_path: Path) -> Ask:
    """(flags, environment) -> exit status, standard output and error of a command that works in ``tmp_path``."""

    def ask(*flags: str, **environment: str) -> tuple[int, str, str]:
        command = [f"--out={tmp_path}", *flags], {"HEADWAY_HOME": str(tmp_path / "home")} | environment
        print(json.dumps(command), file=server.stdin, flush=True)
        return tuple(json.loads(server.stdout.readline()))

    return ask


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def chunks(out: Path, dataset: str = DATASET, kind: str = "train") -> list[Path]:
    return list((out / f".{dataset}.partial").glob(f"{kind}-*.npz"))


def workers(out: Path, dataset: str = DATASET) -> list[str]:
    """Return the ids of worker processes that work in ``out``."""
    ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "-c" in words and str(out / f".{dataset}.partial") in words:
            ids.append(folder.name)
    return ids


def test_makes_the_files_and_then_leaves_them_alone(ask: Ask, tmp_path: Path) -> None:
    flags = (f"--dataset={DATASET}", "--transitions=45", "--episode_steps=20", "--processes=2")
    status, stdout, stderr = ask(*flags)
    assert status == 0, stderr
    assert "60 transitions, 3 episodes of 20" in stdout
    assert "100%" in stderr
    modified = (tmp_path / f"{DATASET}.npz").stat().st_mtime_ns
    status, stdout, _ = ask(*flags)
    assert status == 0
    assert stdout.startswith("Already there.")
    assert (tmp_path / f"{DATASET}.npz").stat().st_mtime_ns == modified


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--describe=x.npz", "--transitions=9", "--seed=0"],
            "--describe does not read --seed, --transitions:",
        ),
        (["--to_minari=x.npz", "--nooverwrite"], "--to_minari does not read --overwrite:"),
        ([f"--dataset={DATASET}", "--shuffled"], "--dataset does not read --shuffled:"),
    ],
)
def test_flags_of_another_job_are_refused(flags: list[str], message: str, ask: Ask, tmp_path: Path) -> None:
    """They were ignored, and the data were not what had been asked for."""
    status, _, stderr = ask(*flags)
    assert status != 0 and message in stderr and "leave out what belongs to another" in stderr
    assert not any(tmp_path.iterdir())


def test_the_default_folder(ask: Ask, tmp_path: Path) -> None:
    assert ask(f"--dataset={DATASET}", "--transitions=2", "--episode_steps=2", "--out=")[0] == 0
    assert (tmp_path / "home" / "ogbench" / f"{DATASET}.npz").exists()


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_killed_and_continued_is_uninterrupted(tmp_path: Path) -> None:
    whole = collect(DATASET, out=tmp_path / "whole", transitions=20000, episode_steps=500, progress=False)
    out = tmp_path / "killed"
    process = start(out, f"--dataset={DATASET}", "--processes=2", *LONG)
    wait_for(lambda: len(chunks(out)) >= 3)
    process.kill()
    process.communicate()
    assert 3 <= len(chunks(out)) < 40
    wait_for(lambda: not workers(out))  # none is left behind
    status, _, stderr = run(out, f"--dataset={DATASET}", "--processes=1", *LONG)
    assert status == 0, stderr
    for name in (f"{DATASET}.npz", f"{DATASET}-val.npz"):
        assert (out / name).read_bytes() == (whole.parent / name).read_bytes()
    assert not chunks(out)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_locomotion_killed_and_continued_is_uninterrupted(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    dataset = "hopper-random-regen-v5"
    flags = (f"--dataset={dataset}", "--transitions=40000")
    whole = collect(dataset, out=tmp_path / "whole", transitions=40_000, progress=False)
    out = tmp_path / "killed"
    process = start(out, *flags, "--processes=2")
    wait_for(lambda: chunks(out, dataset, "rollout"))
    process.kill()
    process.communicate()
    assert 1 <= len(chunks(out, dataset, "rollout")) < 4
    wait_for(lambda: not workers(out, dataset))
    status, stdout, stderr = run(out, *flags, "--processes=1")
    assert status == 0, stderr
    assert "40,000 transitions" in stdout
    assert "random and expert returns of D4RL, -20.3 and 3234.3" in stdout
    assert read_card(out / whole.name)["sha256"] == read_card(whole)["sha256"]
    assert read_card(out / whole.name)["steps_resumed"] > 0


def test_describes_and_converts(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("minari")
    dataset = "hopper-random-regen-v5"
    collect(dataset, out=tmp_path, transitions=200, progress=False)
    status, stdout, stderr = ask(f"--describe={dataset}")
    assert status == 0, stderr
    assert "200; observation [11], action [3]" in stdout
    assert f"--dataset={dataset} --transitions=200 --seed=0" in stdout
    assert (tmp_path / f"{dataset}-card.txt").read_text() in stdout
    assert (tmp_path / f"{dataset}-card.png").stat().st_size > 10_000
    status, stdout, stderr = ask(f"--to_minari={dataset}", MINARI_DATASETS_PATH=str(tmp_path / "minari"))
    assert status == 0, stderr
    assert f"minari.load_dataset('headway/{dataset}'): 200 transitions" in stdout


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    # Ten times as long: on a fast machine the usual size can be over before the signal arrives.
    with as_from_a_terminal():
        process = start(tmp_path, f"--dataset={DATASET}", "--processes=2", "--transitions=200000", LONG[1])
    wait_for(lambda: chunks(tmp_path))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run the same command again to continue" in stderr
    assert "Traceback" not in stderr
    assert chunks(tmp_path)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, f"--dataset={DATASET}", "--processes=2", "--transitions=200000", LONG[1])
    wait_for(lambda: chunks(tmp_path))
    os.kill(int(workers(tmp_path)[0]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "A worker process died with status -9" in stderr
    assert "Finished chunks are kept" in stderr
    assert chunks(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_disk_full(processes: int, tmp_path: Path) -> None:
    # A limit on the size of a file stands for a full disk: the first chunk fits, the joined file does not.
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    flags = (f"--dataset={DATASET}", "--transitions=2000", "--episode_steps=400", f"--processes={processes}")
    status, _, stderr = run(tmp_path, *flags, preexec_fn=limit)
    assert status == 1
    assert re.search(r"File too large: '.*'\. Finished chunks are kept in ", stderr)
    assert "Traceback" not in stderr
    assert not (tmp_path / f"{DATASET}.npz").exists()
    status, _, stderr = run(tmp_path, *flags)
    assert status == 0, stderr


WRONG_FLAGS = [
    ([], 1, "ValueError: give one of --dataset=NAME to make, --describe=NAME and --to_minari=NAME"),
    ([f"--dataset={DATASET}", "--describe=x.hdf5"], 1, "ValueError: give one of --dataset=NAME to make"),
    (["--dataset=hopper-medium-v5"], 1, "Did you mean hopper-medium-regen-v5"),
    (["--dataset=hopper-medium-regen-v5", "--episode_steps=5"], 1, "episode_steps is not for hopper-medium"),
    ([f"--dataset={DATASET}", "--actors=x.npz"], 1, "behaviour is scripted"),
    (["--describe=nothing.hdf5"], 1, "there is no file nothing.hdf5; "),
    (["--describe=nothing.hdf5", "--shuffled"], 1, "--dataset=NAME makes one"),
    (["--describe=~nouser/log.npz"], 1, "no home folder is known for '~nouser'"),
    (
        ["--describe=hopper-medium-regen-v5"],
        1,
        "python -m experiments.collect --dataset=hopper-medium-regen-v5",
    ),
    (
        ["--to_minari=hopper-medium-regen-v5"],
        1,
        "or make it with python -m experiments.collect --dataset=hopper-medium-regen-v5",
    ),
    (["--dataset=cube-singel-play-v0"], 1, "Did you mean cube-single-play-v0"),
    (
        ["--dataset=cube-single-play-singletask-v0"],
        1,
        "Drop singletask: --dataset=cube-single-play-v0",
    ),
    (
        ["--dataset=cube-single-play-singletask-task2-v0"],
        1,
        "Drop singletask: --dataset=cube-single-play-v0",
    ),
    (
        [f"--dataset={DATASET}", "--transition=5"],
        2,
        "error: unknown flag --transition: did you mean --transitions?",
    ),
    ([f"--dataset={DATASET}", "--transitions=0"], 2, "error: flag --transitions=0"),
    ([f"--dataset={DATASET}", "--transitions=x"], 2, "error: --transitions=x is not a whole number"),
    ([DATASET, f"--dataset={DATASET}"], 2, f"error: not a flag: {DATASET}. Flags are written --name=value."),
]


def test_wrong_flags(ask: Ask, tmp_path: Path) -> None:
    status, stdout, stderr = run(tmp_path)
    assert (status, stdout) == (1, "")
    assert WRONG_FLAGS[0][2] in stderr
    assert "Traceback" not in stderr
    for flags, expected, message in WRONG_FLAGS:
        status, _, stderr = ask(*flags)
        assert (status, message in stderr) == (expected, True), (flags, stderr)


def test_other_settings_are_refused_with_the_remedy(ask: Ask, tmp_path: Path) -> None:
    flags = (f"--dataset={DATASET}", "--transitions=2", "--episode_steps=2")
    collect(DATASET, out=tmp_path, transitions=2, episode_steps=2, progress=False)
    status, _, stderr = ask(*flags, "--seed=1")
    assert status == 1
    assert "pass --overwrite" in stderr
    assert ask(*flags, "--seed=1", "--overwrite")[0] == 0


def test_a_worker_starts_without_jax(tmp_path: Path) -> None:
    program = pool.WORKER.replace(
        "worker.serve(",
        "import rl.data.recipes.locomotion; print('jax' in sys.modules, 'numpy' in sys.modules, ",
    )
    command = [sys.executable, "-c", program, str(ROOT / "rl"), str(tmp_path), *sys.path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("False True")
