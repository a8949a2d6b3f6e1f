"""`sweeps.cluster`: a sweep on a Ray cluster outlives its workers and its driver, and trains nothing twice."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_sweeps import count_in_place_of_training, planned, seeds_sweep, start

from experiments import offline
from rl import lifecycle, locks, log, shard, train
from sweeps import cluster, records, training
from sweeps import run as sweeps
from sweeps.layout import Program

ROOT = Path(__file__).parent.parent


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    with pytest.raises(
        ValueError, match=r"--ray_address=127\.0\.0\.1:9: nothing answers .* `ray start --head`"
    ):
        cluster.connect("127.0.0.1:9")
    with pytest.raises(ValueError, match=r"--ray_address=ray://127\.0\.0\.1:port: nothing answers"):
        cluster.connect("ray://127.0.0.1:port")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="--engine=ray needs Ray: pip install"):
        cluster.connect("auto")


class Fake:
    """Ray, as far as `cluster.outcomes` needs it: a task runs when it is asked for."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

        class WorkerCrashedError(RayError):
            pass

        class OutOfMemoryError(RayError):
            pass

    def __init__(self, task: Callable[..., Any]):
        self.task, self.calls = task, []

    def remote(self, **options: Any) -> Any:
        self.calls.append(options)
        return lambda work: types.SimpleNamespace(
            options=lambda name: types.SimpleNamespace(remote=lambda *args: (name, *args[1:2]))
        )

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        return self.task(*reference)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_folder_that_is_in_use_is_asked_for_again_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not before; others go on meanwhile, and one whose workers die is given up."""
    calls: list[str] = []
    held = iter([True, True, False])

    def task(name: str, place: str) -> tuple[str, Any]:
        calls.append(name)
        if name == "lost":
            raise Fake.exceptions.WorkerCrashedError("The worker died\nand more")
        if name == "wrong":
            raise Fake.exceptions.RayTaskError("Traceback ...\n  x = None + 1\nTypeError: no such sum\n")
        first = calls.count(name) == 1
        return (cluster.IN_USE, "process 7") if name == "busy" and first else (cluster.ROWS, [name])

    fake: Any = Fake(task)
    monkeypatch.setattr(cluster, "PAUSE", 0.01)
    programs = {tmp_path / name: Program({}, {}) for name in ("busy", "lost", "wrong", "free")}
    monkeypatch.setattr(records, "holder", lambda program, place: calls.append("looked") or next(held))
    outcomes = list(cluster.outcomes(fake, programs, "eval/return", 0.0, 1.0, 2.0, math.inf))
    assert calls == ["busy", "lost", "wrong", "free", "looked", "looked", "looked", "busy"]
    assert outcomes == [
        (tmp_path / "lost", cluster.LOST, "its worker died 11 times: The worker died"),
        (tmp_path / "wrong", cluster.LOST, "TypeError: no such sum"),
        (tmp_path / "free", cluster.ROWS, ["free"]),
        (tmp_path / "busy", cluster.ROWS, ["busy"]),
    ]
    assert fake.calls == [{"num_cpus": 1.0, "num_gpus": 2.0, "max_calls": 1, "max_retries": 10}, "shutdown"]
    stderr = capsys.readouterr().err
    assert "waits for another process: process 7" in stderr and "x = None + 1" in stderr
    assert "no machine of the cluster has 1 CPUs and 2 GPUs for a program (they have 2 and 0)" in stderr


def test_a_folder_that_is_in_use_is_given_up_when_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: Any = Fake(lambda *_: (cluster.IN_USE, "process 7"))
    monkeypatch.setattr(cluster, "PAUSE", 0.01)
    programs = {tmp_path: Program({}, {})}
    monkeypatch.setattr(records, "holder", lambda program, place: "process 7")
    ended = cluster.outcomes(busy, programs, "eval/return", 0.0, 1.0, 0.0, time.time() + 0.05)
    assert list(ended) == [(tmp_path, cluster.OVER, None)]


def test_programs_whose_data_another_process_makes_start_few_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is an interpreter of its own, and nobody has their folder open."""
    tried: list[float] = []
    clock = [0.0]

    def task(name: str, place: str) -> tuple[str, Any]:
        tried.append(clock[0])
        return (cluster.IN_USE, "made elsewhere") if clock[0] < 1000 else (cluster.ROWS, [])

    def pause(seconds: float) -> None:
        clock[0] += seconds

    fake: Any = Fake(task)
    monkeypatch.setattr(cluster, "time", types.SimpleNamespace(time=lambda: clock[0], sleep=pause))
    programs = {tmp_path: Program({}, {})}
    ended = cluster.outcomes(fake, programs, "eval/return", 0.0, 1.0, 0.0, math.inf)
    assert [kind for _, kind, _ in ended] == [cluster.ROWS]
    assert tried == [0, 5, 15, 35, 75, 155, 315, 615, 915, 1215]
    assert capsys.readouterr().err.count("waits for another process: made elsewhere") == 1


class Working(Fake):
    """Runs the tasks themselves; again, as Ray does, where a worker was killed."""

    def remote(self, **options: Any) -> Any:
        return lambda work: types.SimpleNamespace(
            options=lambda name: types.SimpleNamespace(remote=lambda *args: functools.partial(work, *args))
        )

    def get(self, task: Callable[[], Any]) -> Any:
        with contextlib.suppress(train.Interrupted):
            return self.task(task())
        return self.task(task())


def test_what_is_trained_again_goes_on_where_its_worker_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not trained a third time if another process has finished it meanwhile."""
    steps: list[int] = []
    kill: list[int] = []
    others = ["process 7"]

    def note(settings: offline.Settings, session: lifecycle.Session) -> None:
        steps.append(session.bar.n)
        if session.bar.n == 2 and kill:
            session.stopping.append(kill.pop())

    def elsewhere(outcome: tuple[str, Any]) -> tuple[str, Any]:
        return (cluster.IN_USE, others.pop()) if others else outcome

    count_in_place_of_training(monkeypatch, note)
    file = seeds_sweep(tmp_path, 0)
    start(file, f"--workdir={tmp_path}")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="needs Ray"):
        start(file, f"--workdir={tmp_path}", "--overwrite", "--engine=ray")
    start(file, f"--workdir={tmp_path}")  # nothing was marked for training again
    kill.append(signal.SIGTERM)
    monkeypatch.setattr(cluster, "PAUSE", 0.01)
    monkeypatch.setattr(cluster, "connect", lambda address: Working(elsewhere))
    start(file, f"--workdir={tmp_path}", "--overwrite", "--engine=ray")
    assert steps == [1, 2, 3, 4] * 2 and not kill and not others


def test_a_metric_that_one_program_lacks_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_score, without = tmp_path / "with", tmp_path / "without"
    sweep = planned({place: Program({"seed": 0}, {}) for place in (with_score, without)})
    values = types.SimpleNamespace(cpus=1.0, gpus=0.0)
    stored: dict[Path, Any] = {}
    answers = [(with_score, cluster.ROWS, [{"score": 1.0}]), (without, cluster.METRIC, "no such metric")]
    monkeypatch.setattr(cluster, "outcomes", lambda *_: iter(answers))
    assert sweeps._submit(sys, sweep, stored.update, values, math.inf)
    assert [row["error"] for row in stored[without]] == ["no such metric"]
    answers.reverse()
    with pytest.raises(records.MetricError, match="no such metric"):
        sweeps._submit(sys, sweep, stored.update, values, math.inf)


def test_a_task_says_what_became_of_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def outcome(attempt: Callable[[], Any], seconds: float = 100.0) -> tuple[str, Any]:
        monkeypatch.setattr(training, "attempt", lambda *_: attempt())
        fields = {"fixed": {"seed": 3}, "swept": {}, "script": "offline"}
        return cluster.work(fields, "x", "eval/return", 0.0, time.time() + seconds, str(tmp_path))

    def fail(error: BaseException) -> Callable[[], Any]:
        def raised() -> Any:
            raise error

        return raised

    def late() -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.15)
        raise KeyboardInterrupt

    # `ray start` under srun leaves its tasks what says that there are several processes.
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert shard.started() == 4
    assert outcome(lambda: [shard.started()]) == (cluster.ROWS, [1])
    assert outcome(fail(locks.InUse("process 7"))) == (cluster.IN_USE, "process 7")
    assert outcome(fail(records.MetricError("no"))) == (cluster.METRIC, "no")
    assert outcome(late, 0.1) == (cluster.OVER, None) and outcome(lambda: [1], -1.0) == (cluster.OVER, None)
    with pytest.raises(KeyboardInterrupt):  # not by the deadline
        outcome(fail(KeyboardInterrupt()))


# ---- a cluster of this machine --------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A cluster of two processes."""
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2", f"--port={port}"]
    head = subprocess.Popen(
        [sys.executable, "-m", *command, "--include-dashboard=false", "--disable-usage-stats"],
        start_new_session=True,
        stdout=(tmp_path / "head.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        until(lambda: "Ray runtime started" in (tmp_path / "head.log").read_text())
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)


def until(what: Callable[[], Any], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@pytest.mark.long
def test_a_sweep_outlives_a_worker_and_its_driver(tmp_path: Path, address: str) -> None:
    updates, every = 40_000, 2000
    settings = {"agent": "iql", "dataset": "synthetic-continuous", "seeds": 1, "updates": updates}
    settings |= {"eval_every": every, "eval_episodes": 0, "batch_size": 64, "tensorboard": False}
    parameters = {name: {"value": value} for name, value in {**settings, "agent.hidden": "32,32"}.items()}
    parameters["seed"] = {"values": [0, 1]}
    sweep = {
        "method": "grid",
        "parameters": parameters,
        "metric": {"name": "train/critic_loss", "goal": "minimize"},
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep))
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "sweeps.run", str(tmp_path / "s.yaml"), "--engine=ray"]
    command += [f"--ray_address={address}", f"--workdir={runs}"]

    def driver() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def lines(place: Path) -> list[int]:
        return [row["step"] for row in log.read(place)] if (place / log.METRICS).exists() else []

    def resumed(place: Path) -> int:
        return len(log.read_json(place / log.CONFIG)["resumed"])

    first = driver()
    until(lambda: len([place for place in runs.glob("*") if len(lines(place)) > 1]) == 2)
    one, other = sorted(path for path in runs.glob("*") if path.is_dir())
    worker = int((locks.holder(one) or "").split()[1])
    os.kill(worker, signal.SIGKILL)
    until(lambda: resumed(one) == 1)
    before = resumed(other)
    first.kill()
    first.communicate()
    assert not (one / log.RESULT).exists()
    second = driver()
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert resumed(one) == 2 and before == 0 and f"{one}: done" in output
    for place in (one, other):
        assert lines(place) == list(range(every, updates + 1, every))
        assert log.read_json(place / log.RESULT)["updates"] == updates
    rows = json.loads((runs / records.SWEEP).read_text())["runs"]
    assert len(rows) == 2 and all("score" in row for row in rows)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "go to Ray" not in again.stdout
