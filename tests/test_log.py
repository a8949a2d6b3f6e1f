"""Run records: complete without an account, readable after a kill, equal after a resumption."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import log

ROOT = Path(__file__).parent.parent


def refuse(name: str):
    raise ValueError(f"{name} is not strict JSON")


def strict_lines(path: Path) -> list[dict]:
    """Parsed independently of rl.log; NaN and Infinity literals, which strict JSON has not, are refused."""
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def open_plain(folder: Path, **options):
    return log.open_run(folder, {"agent": "iql"}, tensorboard=False, **options)


# metrics.jsonl


def test_one_strict_json_line_per_write(tmp_path: Path):
    with open_plain(tmp_path / "a" / "run") as run:
        run.write(0, {"loss": jnp.float32(0.5), "score": np.array([1.0, 2.5]), "count": 3, "done": True})
        run.write(np.int32(10), {"loss": jnp.bfloat16(1.5), "score": jnp.array([3, 4])})
    assert strict_lines(tmp_path / "a" / "run" / "metrics.jsonl") == [
        {"step": 0, "loss": 0.5, "score": [1.0, 2.5], "count": 3, "done": True},
        {"step": 10, "loss": 1.5, "score": [3, 4]},
    ]


def test_not_finite_numbers_survive_strict_json(tmp_path: Path):
    with open_plain(tmp_path) as run:
        run.write(1, {"loss": math.nan, "score": np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)})
    line = strict_lines(tmp_path / "metrics.jsonl")[0]
    assert line == {"step": 1, "loss": "NaN", "score": ["Infinity", "-Infinity", "NaN", 1.0]}
    row = log.read(tmp_path)[0]
    assert math.isnan(row["loss"])
    np.testing.assert_array_equal(row["score"], [np.inf, -np.inf, np.nan, 1.0])


@pytest.mark.slow
def test_a_line_is_on_disk_when_write_returns(tmp_path: Path):
    """Killed right after write, with no chance to flush."""
    code = (
        "import os, signal, sys\nfrom rl import log\n"
        "with log.open_run(sys.argv[1], {}, tensorboard=False) as run:\n"
        "    run.write(7, {'loss': 1.0})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert log.read(tmp_path) == [{"step": 7, "loss": 1.0}]


def test_metrics_must_be_numbers_and_not_named_step(tmp_path: Path):
    with open_plain(tmp_path) as run:
        with pytest.raises(TypeError, match="metric 'loss'"):
            run.write(1, {"loss": "high"})
        with pytest.raises(ValueError, match="'step'"):
            run.write(1, {"step": 3})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_torn_last_line_is_left_out_of_reading_and_dropped_on_resuming(tmp_path: Path):
    with open_plain(tmp_path) as run:
        run.write(1, {"loss": 1.0})
        run.write(2, {"loss": 2.0})
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    assert [row["step"] for row in log.read(tmp_path)] == [1]
    with open_plain(tmp_path, resume_step=1) as run:
        run.write(2, {"loss": 2.5})
    assert strict_lines(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.5}]


@pytest.mark.parametrize("broken", ["{", "[1]", '{"loss": 1}', '{"step": null}'])
def test_a_broken_line_elsewhere_is_named(tmp_path: Path, broken: str):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + broken + '\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is damaged"):
        log.read(tmp_path)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path):
    def steps(run, start: int, stop: int) -> None:
        for step in range(start, stop, 10):
            run.write(step, {"loss": step / 3, "score": np.arange(2.0) + step})
            run.write(step, {"eval/success": step / 7})  # a second line of the same step

    with open_plain(tmp_path / "whole") as run:
        steps(run, 10, 110)
    with open_plain(tmp_path / "cut") as run:
        steps(run, 10, 80)  # killed at 70, the last checkpoint being of step 50
    with open_plain(tmp_path / "cut", resume_step=50) as run:
        steps(run, 60, 110)
    whole, cut = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    assert cut.read_bytes() == whole.read_bytes()


def test_without_a_checkpoint_the_file_starts_again(tmp_path: Path):
    for _ in range(2):  # the first was killed before its first checkpoint
        with open_plain(tmp_path) as run:
            run.write(0, {"score": 1.0})
    assert len(log.read(tmp_path)) == 1


def test_a_finished_run_is_not_overwritten(tmp_path: Path):
    with open_plain(tmp_path) as run:
        run.write(10, {"score": 1.0})
        run.result({"score": 1.0})
    with pytest.raises(FileExistsError, match=r"finished run.*--workdir.*--overwrite"), open_plain(tmp_path):
        pass
    assert log.read(tmp_path) == [{"step": 10, "score": 1.0}]
    with open_plain(tmp_path, resume_step=10):  # resuming it is no harm
        pass
    assert log.read(tmp_path) == [{"step": 10, "score": 1.0}]


def test_disk_full_leaves_whole_lines_only(tmp_path: Path):
    """A raw file whose disk takes 10 more bytes, then is full, then has space again."""

    class Disk(io.FileIO):
        space = 10**9

        def write(self, data) -> int:
            if not self.space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = super().write(data[: self.space])
            self.space -= taken
            return taken

    with Disk(tmp_path / "metrics.jsonl", "ab") as file:
        log._append(file, b'{"step": 1, "loss": 1.0}\n')
        file.space = 10
        with pytest.raises(OSError, match=r"No space.*free some space") as error:
            log._append(file, b'{"step": 2, "loss": 2.0}\n')
        assert error.value.errno == errno.ENOSPC
        assert error.value.filename == tmp_path / "metrics.jsonl"
        assert log.read(tmp_path) == [{"step": 1, "loss": 1.0}]
        file.space = 10**9
        log._append(file, b'{"step": 3, "loss": 3.0}\n')
    assert [row["step"] for row in log.read(tmp_path)] == [1, 3]


def test_reading_a_run_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        log.read(tmp_path / "nowhere")


def test_series(tmp_path: Path):
    with open_plain(tmp_path) as run:
        run.write(1, {"score": np.array([1.0, np.nan]), "loss": 5.0})
        run.write(2, {"loss": 6.0})
        run.write(3, {"score": np.array([3.0, 4.0])})
    steps, scores = log.series(tmp_path, "score")
    np.testing.assert_array_equal(steps, [1, 3])
    np.testing.assert_array_equal(scores, [[1.0, np.nan], [3.0, 4.0]])
    assert log.series(tmp_path, "loss")[1].shape == (2, 1)
    with pytest.raises(KeyError, match=r"'scores'.*it has: loss, score"):
        log.series(tmp_path, "scores")


# config.json, result.json


@dataclasses.dataclass(frozen=True)
class Config:
    expectile: float = 0.7
    layers: tuple[int, ...] = (256, 256)
    limit: float = math.inf


def test_config_holds_everything_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    config = {"agent": Config(), "dataset": Path("a/b"), "seeds": np.arange(2)}
    with log.open_run(tmp_path, config, tensorboard=False):
        pass
    record = json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)
    assert record["config"] == {
        "agent": {"expectile": 0.7, "layers": [256, 256], "limit": "Infinity"},
        "dataset": "a/b",
        "seeds": [0, 1],
    }
    assert record["command"] == "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 " + shlex.join(
        ["python", *sys.orig_argv[1:]]
    )
    assert record["versions"]["python"] == platform.python_version()
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"]["numpy"] == np.__version__
    assert record["hardware"]["backend"] == jax.default_backend()
    assert record["hardware"]["devices"] == jax.device_count()
    assert record["hardware"]["cores"] >= 1
    assert record["hardware"]["cpu"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record["started"])
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])
    assert record["resumed"] == []


def test_config_of_a_resumed_run_keeps_its_start(tmp_path: Path):
    with log.open_run(tmp_path, {"updates": 100}, tensorboard=False):
        pass
    first = json.loads((tmp_path / "config.json").read_text())
    for step in (0, 50, 70):  # also from the checkpoint of a model, before the first update
        with log.open_run(tmp_path, {"updates": 200}, tensorboard=False, resume_step=step, resumed=True):
            pass
    record = json.loads((tmp_path / "config.json").read_text())
    assert record | {"resumed": []} == first
    assert [(entry["step"], entry["config"]["updates"]) for entry in record["resumed"]] == [
        (0, 200),
        (50, 200),
        (70, 200),
    ]


def test_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("no git")
    file = tmp_path / "log.py"
    file.write_text("")
    monkeypatch.setattr(log, "__file__", str(file))
    assert log.commit() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "m")
    assert log.commit() is None  # in somebody else's checkout, as an installed package is
    stored = tmp_path / "results" / "README.md"
    stored.parent.mkdir()
    stored.write_text("")
    git("add", ".")
    git("commit", "-m", "m")
    stored.write_text("of a study that goes on")
    assert log.commit() == git("rev-parse", "HEAD")
    file.write_text("changed")
    assert log.commit() == git("rev-parse", "HEAD") + "-dirty"


def test_commit_is_that_which_pip_installed_from(tmp_path: Path, monkeypatch) -> None:
    """As in Colab. Another copy of the code beside it is not of that commit."""
    info = tmp_path / "headway-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headway\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(log, "__file__", str(tmp_path / "rl" / "log.py"))
    assert log.commit() is None
    origin = {"url": "https://example.org/x", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    assert log.commit() == "a" * 40
    monkeypatch.setattr(log, "__file__", str(tmp_path / "copy" / "rl" / "log.py"))
    assert log.commit() is None


def test_a_loaded_module_that_git_does_not_track_is_part_of_no_commit(tmp_path: Path, monkeypatch) -> None:
    """It was called clean, and the commit alone made nothing of what ran; files that nothing loads do not count."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    package = tmp_path / "rl"
    package.mkdir()
    (package / "log.py").write_text("")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for arguments in (["init"], ["add", "."], ["commit", "-m", "m"]):
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)
    names = ("mine.py", "ignored.py", "env/lib/python3.11/site-packages/installed.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(log, "__file__", str(package / "log.py"))
    monkeypatch.setattr(log, "_first_checkout", functools.cache(log._checkout))
    clean = log.commit()
    assert re.fullmatch("[0-9a-f]{40}", clean or "") and log.loaded_commit() == clean

    def load(name: str) -> None:
        module = types.ModuleType(Path(name).stem)
        module.__file__ = str(tmp_path / name)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    load("rl/log.py")
    load(names[1])
    load(names[2])
    assert log.commit() == log.loaded_commit() == clean
    load(names[0])  # as --agent=mine does, long after a script has started
    assert log.commit() == log.loaded_commit() == f"{clean}-dirty"


def test_result_is_replaced_whole(tmp_path: Path, monkeypatch):
    log.result(tmp_path, {"score": np.float32(0.5), "interval": (0.25, math.nan), "seeds": 2})
    before = (tmp_path / "result.json").read_text()
    assert json.loads(before, parse_constant=refuse) == {"score": 0.5, "interval": [0.25, "NaN"], "seeds": 2}

    def full(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=rf"No space left on device: .{tmp_path}/result.json"):
        log.result(tmp_path, {"score": 1.0})
    assert (tmp_path / "result.json").read_text() == before
    assert os.listdir(tmp_path) == ["result.json"]


# TensorBoard and wandb


def events(folder: Path) -> list:
    """Every event of the folder, decoded from the record format itself."""
    from tensorboardX.proto.event_pb2 import Event

    records = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:  # length 8 bytes, its checksum 4, the event, its checksum 4
            length = int.from_bytes(data[:8], "little")
            records.append(Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    return records


def test_tensorboard_has_the_mean_over_seeds(tmp_path: Path):
    with log.open_run(tmp_path, {}) as run:
        run.write(10, {"score": np.array([1.0, 2.0]), "loss": 0.5, "return": np.nan, "gap": np.inf})
    scalars = {(e.step, value.tag): value.simple_value for e in events(tmp_path) for value in e.summary.value}
    assert scalars == {(10, "score"): 1.5, (10, "loss"): 0.5}


def test_tensorboard_of_a_resumed_run_forgets_later_steps(tmp_path: Path):
    from tensorboardX.proto.event_pb2 import SessionLog

    with log.open_run(tmp_path, {}, resume_step=50) as run:
        run.write(60, {"loss": 0.5})
    assert [e.step for e in events(tmp_path) if e.session_log.status == SessionLog.START] == [51]


def test_a_run_goes_on_when_events_for_tensorboard_cannot_be_written(tmp_path: Path, monkeypatch):
    """What is in the buffer of the file when the disk is full fails once more when it is closed."""
    from tensorboardX.event_file_writer import EventsWriter

    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.warns(
            UserWarning, match=r"no more events for TensorBoard .*No space left.* metrics.jsonl has"
        ) as said,
        log.open_run(tmp_path, {}) as run,
    ):
        monkeypatch.setattr(EventsWriter, "flush", full)
        for step in range(30):
            run.write(step, {"loss": 1.0})
    assert len(said) == 1 and len(log.read(tmp_path)) == 30


def test_tensorboard_can_be_left_out(tmp_path: Path):
    with open_plain(tmp_path) as run:
        run.write(1, {"loss": 1.0})
    assert sorted(os.listdir(tmp_path)) == ["config.json", "metrics.jsonl"]


def test_wandb_gets_the_means_and_one_id_for_all_resumptions(tmp_path: Path, monkeypatch):
    """Every step once, and whether the run was interrupted."""
    calls = []

    def init(**arguments):
        calls.append(arguments)
        record = types.SimpleNamespace(id=arguments["id"] or "abc123", logged=[], ended=[])
        record.define_metric = lambda *_, **__: None
        record.log = record.logged.append
        record.finish = lambda exit_code=0: record.ended.append(exit_code)
        runs.append(record)
        return record

    runs = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for step, written in ((0, (10, 20)), (10, (20, 30))):
        with (
            contextlib.suppress(ZeroDivisionError),
            log.open_run(tmp_path, Config().__dict__, tensorboard=False, wandb=True, resume_step=step) as run,
        ):
            for each in written:
                run.write(each, {"score": np.array([1.0, 2.0])})
            1 / step  # the first is interrupted beyond its checkpoint of step 10
    assert [call["id"] for call in calls] == [None, "abc123"]
    assert calls[0]["resume"] == "allow"
    assert calls[0]["config"] == {"expectile": 0.7, "layers": [256, 256], "limit": "Infinity"}
    assert [[line["step"] for line in run.logged] for run in runs] == [[10, 20], [30]]
    assert runs[0].logged[0] == {"step": 10, "score": 1.5} and [run.ended for run in runs] == [[1], [0]]


def test_wandb_offline(tmp_path: Path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (0, 1):
        with log.open_run(tmp_path, {"a": 1}, tensorboard=False, wandb=True, resume_step=step) as run:
            run.write(step + 1, {"loss": 1.0})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2]


def test_wandb_without_a_login_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch):
    class Error(Exception): ...

    def init(**_):
        raise Error("No API key configured.\nMore of it.")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=Error))
    message = r"--wandb: No API key configured; run `wandb login`, or set WANDB_MODE=offline"
    with pytest.raises(ValueError, match=message), log.open_run(tmp_path, {}, wandb=True):
        pass
    assert not list(tmp_path.iterdir())


def test_wandb_missing_names_the_extra(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(ImportError, match=r"pip install -e '\.\[track\]'"),
        log.open_run(tmp_path, {}, tensorboard=False, wandb=True),
    ):
        pass


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with log.open_run(tmp_path / "run", {}) as run:
        run.write(1, {"loss": 1.0})
        run.result({"score": 1.0})
    assert not (tmp_path / "run").exists()


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_bar() -> None:
    with log.progress(100, "train", initial=20) as bar:
        for _ in range(8):
            bar.update(10)


def test_progress_prints_few_whole_lines_where_there_is_no_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run_bar()
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert len(lines) == 2  # the first and the last: the eight updates took less than 10 s
    assert lines[0].startswith("train:  20%")
    assert lines[1].startswith("train: 100%")


def test_progress_prints_again_after_ten_seconds(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with log.progress(100, "train") as bar:
        clock = bar._time()
        bar._time = lambda: clock + 11
        bar.update(10)
        assert len(stream.getvalue().splitlines()) == 2
        assert "train:  10%" in stream.getvalue()


def test_progress_redraws_in_a_terminal_but_not_in_continuous_integration(monkeypatch):
    for variable, redraws in (("", True), ("true", False)):
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("CI", variable)
        run_bar()
        assert ("\r" in stream.getvalue()) == redraws


def test_progress_counts_what_it_iterates_over_and_can_be_told_to_show_nothing(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(log.progress(3, "read", over=iter("abc"), unit="episode")) == ["a", "b", "c"]
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("read: 100%") and "3.00/3.00" in last and "episode" in last
    shown = len(stream.getvalue())
    with log.progress(3, "read", show=False) as bar:
        bar.update(3)
    assert len(stream.getvalue()) == shown


# The shared helper


def test_replacing_gives_all_or_nothing(tmp_path: Path):
    path = tmp_path / "a.txt"
    with log.replacing(path) as partial:
        partial.write_text("first")
        assert not path.exists()
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error), log.replacing(path) as partial:
            partial.write_text("sec")
            raise error
        assert path.read_text() == "first"
    with log.replacing(path) as one, log.replacing(path) as other:  # as of two hosts with one process id
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["a.txt"]


def test_importing_imports_no_extra():
    code = (
        "import sys, rl.log, rl.plot\n"
        "found = {'jax', 'wandb', 'tensorboardX', 'tqdm', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
