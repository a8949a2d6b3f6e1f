"""`rl.lifecycle` with a counter for a learner: what a run leaves, how it goes on, and what must not be mixed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.experimental import multihost_utils

from rl import checkpoint, lifecycle, locks, log, outcomes, run_folder, train

TOTAL = 6


def run(folder: Path, total: int = TOTAL, **changes: Any) -> run_folder.Run:
    fields = {"card": {"agent": "counter", "config": {"rate": 2}}, "tensorboard": False, "label": "counter"}
    return run_folder.Run(folder, total=total, **fields | changes)


def learn(
    this: run_folder.Run, *, each: Callable[[int], None] = lambda step: None, every: int = 1
) -> dict[str, Any]:
    """Counts by a number that depends on the step; its state is a function of the steps alone."""
    start = lifecycle.begin(this, {"state": np.zeros(3)})
    if start.result is not None:
        return start.result
    with lifecycle.session(this, start) as session:
        state = start.tree["state"]
        for step in range(start.step + 1, this.total + 1):
            state = state * 0.5 + np.sin(step + np.arange(3))
            report = train.Report({"loss": state[:2]}, {})
            session.write(step, {"eval/return": np.array([[step, step + 1.0], [2 * step, 3.0]])}, report)
            each(step)
            session.keep(step, {"state": state}, lambda at=step: {"seen": at}, due=step % every == 0)
        return session.finish(source="nowhere")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def arrays(folder: Path) -> np.ndarray:
    return checkpoint.read(folder / run_folder.CHECKPOINTS)[1]["state"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    learn(run(folder))
    return folder


def assert_same(one: Path, other: Path) -> None:
    np.testing.assert_array_equal(arrays(one), arrays(other))
    assert (one / log.METRICS).read_bytes() == (other / log.METRICS).read_bytes()


# ---- what it leaves -------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_records(tmp_path: Path) -> None:
    result = learn(run(tmp_path, about={"transform": {"reward_scale": 3.0}}, title="toy"))
    assert (result["updates"], result["source"], result["transform"]) == (6, "nowhere", {"reward_scale": 3.0})
    assert result["wall_seconds"] > 0 and result["versions"] == log.versions()
    written = json.loads((tmp_path / log.RESULT).read_text())
    assert written["agent"] == "counter" and written["scores"].keys() == {"return"}
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert np.shape(log.read(tmp_path)[0]["train/loss"]) == (2,)
    assert (tmp_path / run_folder.CURVE).read_bytes()[:4] == b"\x89PNG"
    config = json.loads((tmp_path / log.CONFIG).read_text())["config"]
    card = {"agent": "counter", "config": {"rate": 2}}
    assert config == {"transform": {"reward_scale": 3.0}, **card, "updates": 6}
    assert sorted(path.name for path in (tmp_path / run_folder.CHECKPOINTS).iterdir()) == ["5", "6"]
    assert run_folder.notes(run(tmp_path), 6) == {"seen": 6}


def test_a_length_counted_in_something_else_than_steps(tmp_path: Path) -> None:
    this = run(tmp_path, unit="epochs", per_unit=3)
    assert learn(this)["epochs"] == 2 and learn(this)["epochs"] == 2
    with pytest.raises(
        ValueError, match="holds a run of 2 epochs, more than --epochs=1: choose another --workdir"
    ):
        lifecycle.begin(this._replace(total=3), {"state": np.zeros(3)})


def test_where_a_run_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder.folder("", "door", "cql-c51") == Path("runs/door/cql-c51")
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    assert run_folder.folder("", "door", "cql-c51") == Path("runs/sweeps/abc/r1")
    assert run_folder.folder("~/x", "door", "cql-c51") == Path.home() / "x"


def test_an_estimate_that_diverged_selects_nothing(tmp_path: Path) -> None:
    rows = [("NaN", 5.0, [1.0, 1.0]), (2.0, 4.0, [2.0, 2.0]), ("Infinity", 9.0, [3.0, 3.0])]
    lines = [
        {"step": step, "eval/fitted_q": [first, second], "eval/return": [scores, scores]}
        for step, (first, second, scores) in enumerate(rows)
    ]
    (tmp_path / log.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes.summary(outcomes.scored_rows(tmp_path))["return"]["selected"]["per_seed"].tolist() == [
        2.0,
        3.0,
    ]


def test_a_score_of_nan_has_its_line_named(tmp_path: Path) -> None:
    """It would be the last score of its seed, and the best, and no result could be written."""
    scores = {0: float("nan"), 5: 1.0, 10: float("nan")}
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        for step, score in scores.items():
            record.write(step, {"eval/return": np.array([[1.0, score]])})
    with pytest.raises(ValueError, match=rf"{log.METRICS}: eval/return of step 10 is NaN.*remove this line"):
        outcomes.summary(outcomes.scored_rows(tmp_path))


def test_intervals_of_success_rates_stay_within_0_and_1(tmp_path: Path) -> None:
    scores = [[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]]  # of three seeds, two episodes each
    perfect = [[1.0, 1.0]] * 3  # of what the run started from, which is none of its scores
    lines = [
        {"step": step, "eval/success": each, "eval/return": each}
        for step, each in ((0, perfect), (5, scores))
    ]
    (tmp_path / log.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = outcomes.summary(outcomes.scored_rows(tmp_path))
    assert summary["return"]["best"]["per_seed"].tolist() == [1.0, 0.75, 1.0]
    assert summary["return"]["last"]["ci95"][1] > 1  # Student's
    low, high = summary["success"]["last"]["ci95"]
    assert 0 < low < 11 / 12 < high <= 1


def test_evaluations_without_a_report_of_success_had_none_where_others_have(tmp_path: Path) -> None:
    """An environment that reports success only where there is one; estimates are of all evaluations."""
    lines: list[dict[str, Any]] = [
        {"step": step, "eval/return": [[float(step)]] * 2, "eval/fitted_q": [estimate, -estimate]}
        for step, estimate in ((5, 2.0), (10, 1.0))
    ]
    lines[1]["eval/success"] = [[1.0], [0.5]]
    (tmp_path / log.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    success = outcomes.summary(outcomes.scored_rows(tmp_path))["success"]
    assert success["last"]["per_seed"].tolist() == [1.0, 0.5]
    assert success["selected"]["per_seed"].tolist() == [0.0, 0.5]  # by the estimates, seed by seed
    steps, curve = outcomes.series(tmp_path, "success")
    assert steps.tolist() == [5, 10] and curve.tolist() == [[[0.0], [0.0]], [[1.0], [0.5]]]
    with pytest.raises(KeyError, match="no metric 'eval/normalized_return'; it has: eval/fitted_q, eval/ret"):
        outcomes.series(tmp_path, "normalized_return")


def test_a_result_has_the_interquartile_mean_over_seeds(tmp_path: Path) -> None:
    """Of four seeds the middle two count, which is not their mean: first_run.md tells users to find it there."""
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        record.write(1, {"eval/return": np.array([[0.0, 2.0], [2.0, 4.0], [4.0, 6.0], [100.0, 300.0]])})
    last = outcomes.summary(outcomes.scored_rows(tmp_path))["return"]["last"]
    assert (last["mean"], last["iqm"]) == (52.25, 4.0)  # of 1, 3, 5 and 200


def test_tasks_that_take_turns_count_alike(tmp_path: Path) -> None:
    """Of 3 episodes of each of 5 tasks, half of the 15 would be more of some tasks than of others."""
    success = np.tile([1.0, 1.0, 0.0, 0.0, 0.0], 3)
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        record.write(1, {"eval/success": np.stack([success, success])})
    (scores,) = outcomes.summary(outcomes.scored_rows(tmp_path), task_episodes=3).values()
    assert scores["selected"]["per_seed"].tolist() == pytest.approx([0.4, 0.4])


def test_variants_are_no_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves, scores and intervals of runs that train together are apart; also of one that is read again."""
    drawn, draw = [], outcomes.plot.learning_curve
    monkeypatch.setattr(outcomes.plot, "learning_curve", lambda *args, **more: drawn.append((args, more)))
    this = run(tmp_path, variants=({"rate": 0.5}, {"rate": 2.0}), tensorboard=True, title="toy")
    result = learn(this)
    assert "scores" not in result
    for outcome in (result, log.read_json(tmp_path / log.RESULT), learn(this)):
        assert [one["parameters"] for one in outcome["variants"]] == [{"rate": 0.5}, {"rate": 2.0}]
        last = [one["scores"]["return"]["last"] for one in outcome["variants"]]
        assert [score["mean"] for score in last] == [6.5, 7.5]
        assert all(np.isnan(score["ci95"]).all() for score in last)  # of one seed each
    ((path, curves), more) = drawn[0]
    assert {label: scores.shape for label, (_, scores) in curves.items()} == {
        "rate=0.5": (6, 1),
        "rate=2": (6, 1),
    }
    assert more["title"] == "toy: counter"
    draw(path, curves, **more)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"eval/return/rate_0.5" in events.read_bytes() and b"train/loss/rate_2" in events.read_bytes()


# ---- runs that go on ------------------------------------------------------------------------------------------------


def test_a_finished_run_is_left_as_it_is(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(whole)
    again = learn(run(whole), each=lambda _: pytest.fail("trained"))
    assert files(whole) == before
    assert "finished: nothing to do; --overwrite starts again" in capsys.readouterr().err
    assert again["scores"]["return"]["last"]["per_seed"].tolist() == [6.5, 7.5]


def test_a_result_that_was_never_written_is_written(tmp_path: Path) -> None:
    learn(run(tmp_path))
    (tmp_path / log.RESULT).unlink()
    assert learn(run(tmp_path), each=lambda _: pytest.fail("trained"))["updates"] == 6
    assert json.loads((tmp_path / log.RESULT).read_text())["updates"] == 6


def test_a_longer_run_continues_to_the_bits_of_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(
        monotonic=functools.partial(next, itertools.count(0.0))
    )  # a second passes at each look
    monkeypatch.setattr(lifecycle, "time", clock)
    first = learn(run(tmp_path, 3))
    assert learn(run(tmp_path))["wall_seconds"] > first["wall_seconds"]
    assert_same(whole, tmp_path)
    with pytest.raises(ValueError, match="holds a run of 6 updates, more than --updates=3"):
        learn(run(tmp_path, 3))


def test_lines_beyond_the_end_are_of_a_longer_run(tmp_path: Path) -> None:
    """A finished run that is trained further and killed leaves them: they are none of its scores, nor of its curve."""
    first = learn(run(tmp_path, 3))

    def killed(step: int) -> None:
        if step == 5:
            raise BaseException("killed")

    with pytest.raises(BaseException, match="killed"):
        learn(run(tmp_path), each=killed, every=6)
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2, 3, 4, 5]
    for remove in ((), (log.RESULT,)):
        for name in remove:
            (tmp_path / name).unlink()
        again = learn(run(tmp_path, 3), each=lambda _: pytest.fail("trained"))
        assert again["updates"] == 3 and str(again["scores"]) == str(first["scores"])
    assert log.series(tmp_path, "eval/return", 3)[0].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_ctrl_c_is_answered_while_a_program_runs() -> None:
    """Python calls no handler then. It is said at once, and the second one ends the process."""
    script = """
import os, signal, time, jax, jax.numpy as jnp
from rl import train
forever = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, lambda x: x / 2, x)).lower(jnp.ones(())).compile()
with train.stop_requests() as received:
    child = os.fork()
    if not child:
        while not received:
            time.sleep(0.01)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):  # a signal that comes while it is being made is lost
        os.kill(child, signal.SIGTERM)  # is not taken for one of this process
        time.sleep(0.05)
    train.PATIENCE = 0.2
    print("begun", flush=True)
    forever(jnp.ones(())).block_until_ready()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    limit = threading.Timer(60, process.kill)
    limit.start()
    try:
        assert process.stdout and process.stderr and process.stdout.readline() == "begun\n"
        time.sleep(1)  # until the program runs
        process.send_signal(signal.SIGINT)
        said = ""
        while "stopping after this epoch" not in said:
            line = process.stderr.readline()
            assert line and "stopped" not in line, said
            said += line
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


def test_a_second_ctrl_c_that_python_answers_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long what it stops takes to end."""
    monkeypatch.setattr(train, "PATIENCE", 0.05)
    with train.stop_requests() as received:
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
        assert received == [signal.SIGINT]
        time.sleep(0.3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_is_granted_after_a_checkpoint(number: int, whole: Path, tmp_path: Path) -> None:
    """Although none is due; and what is then left is where the next one starts."""
    stop = lambda step: os.kill(os.getpid(), number) if step == 4 else None
    with pytest.raises(
        train.Interrupted, match=f"stopped at update 4; the same command continues from {tmp_path}"
    ):
        learn(run(tmp_path), each=stop, every=6)
    assert log.read(tmp_path)[-1]["step"] == 4 and not (tmp_path / log.RESULT).exists()
    learn(run(tmp_path), every=6)
    assert_same(whole, tmp_path)
    assert [one["step"] for one in json.loads((tmp_path / log.CONFIG).read_text())["resumed"]] == [4]


def test_a_request_at_the_last_step_is_for_what_comes_after_the_run(whole: Path, tmp_path: Path) -> None:
    """A sweep would go on with its next run."""
    stop = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 6 else None
    with pytest.raises(train.Interrupted, match=f"{tmp_path} is finished; stopped before"):
        learn(run(tmp_path), each=stop)
    assert_same(whole, tmp_path)


def test_a_run_that_died_before_its_first_checkpoint_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    this, other = (run(tmp_path, leaves=("actors/*.npz",), card={"agent": name}) for name in ("one", "two"))

    def die(step: int) -> None:
        (tmp_path / "actors").mkdir(exist_ok=True)
        (tmp_path / "actors" / f"{step}.npz").touch()
        (tmp_path / f".{'0a' * 16}.result.json").touch()  # killed as it was written
        if step == 2:
            raise KeyboardInterrupt

    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / run_folder.CHECKPOINTS).symlink_to(elsewhere)
    with pytest.raises(KeyboardInterrupt):
        learn(this, each=die, every=3)
    learn(other)
    assert not list(tmp_path.glob("actors/*")) and not list(tmp_path.glob(".*.json"))
    assert list(elsewhere.iterdir())  # where checkpoints go stays the user's choice


def test_what_was_being_written_is_in_no_runs_way(tmp_path: Path) -> None:
    (tmp_path / f".{'0a' * 16}.config.json").touch()
    assert learn(run(tmp_path))


def test_a_finished_run_without_its_curve_gets_one(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    shutil.copytree(whole, folder)
    (folder / run_folder.CURVE).unlink()
    assert learn(run(folder)) and (folder / run_folder.CURVE).exists()
    for name in (run_folder.CURVE, log.METRICS):
        (folder / name).unlink()
    with pytest.warns(UserWarning, match="holds 0 of the 6 lines"):
        assert learn(run(folder))["updates"] == 6


def test_a_stop_of_any_process_stops_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts leave after the same epoch: nobody asked this one."""

    def another_is_asked(step: int) -> None:
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.array([x, True]))

    with pytest.raises(train.Interrupted, match="stopped at update 1;"):
        learn(run(tmp_path), each=another_is_asked)


def test_an_error_keeps_the_checkpoint_before_it(whole: Path, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 5:
            raise train.Diverged("loss not finite")

    with pytest.raises(train.Diverged):
        learn(run(tmp_path), each=fail, every=2)
    assert not (tmp_path / log.RESULT).exists()
    assert lifecycle.begin(run(tmp_path), {"state": np.zeros(3)}).step == 4
    learn(run(tmp_path), every=2)  # the line of step 5 is not there twice
    assert_same(whole, tmp_path)


def test_a_line_that_follows_the_checkpoint_of_its_step_is_not_there_twice(tmp_path: Path) -> None:
    """Where an evaluation fails, the learners are saved first; the line comes when the run goes on."""
    for write in (False, True, True):
        start = lifecycle.begin(run(tmp_path, 2), {"state": np.zeros(3)})
        with lifecycle.session(run(tmp_path, 2), start) as session:
            if not write:
                session.save(1, start.tree)
                continue
            session.write(1, {"eval/return": np.zeros((2, 2))})
    assert [row["step"] for row in log.read(tmp_path)] == [1]
    assert "lost_lines" not in learn(run(tmp_path, 2))


@pytest.mark.slow
def test_killed_at_any_time_it_continues_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    """A process of its own, by SIGKILL between the line of a step and its checkpoint."""
    code = (
        "import os, pathlib, test_lifecycle as t\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def die(step):\n"
        "    if step == 3: os.kill(os.getpid(), 9)\n"
        "t.learn(t.run(folder), each=die)\n"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2, 3]  # and a checkpoint of step 2
    learn(run(tmp_path))
    assert_same(whole, tmp_path)


# ---- runs that must not be mixed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "difference"),
    [
        (
            {"agent": "other", "config": {"rate": 2}},
            "agent: 'counter' in the checkpoint, 'other' in this run",
        ),
        ({"agent": "counter", "config": {"rate": 3}}, "config.rate: 2 in the checkpoint, 3 in this run"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    card: dict[str, Any], difference: str, whole: Path
) -> None:
    before = files(whole)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(difference)):
        learn(run(whole, card=card))
    assert files(whole) == before


def test_what_is_only_about_a_run_may_change(whole: Path) -> None:
    assert learn(run(whole, about={"transform": {"mean": 0.1 + 0.2}}))["updates"] == 6


def test_results_without_checkpoints_are_in_the_way(tmp_path: Path) -> None:
    learn(run(tmp_path))
    shutil.rmtree(tmp_path / run_folder.CHECKPOINTS)
    with pytest.raises(
        checkpoint.CheckpointError, match="a finished run without its checkpoints: choose another"
    ):
        lifecycle.begin(run(tmp_path), {"state": np.zeros(3)})


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (log.CONFIG, '{"theme": "dark"}'),
        (log.CONFIG, "not JSON"),
        (log.METRICS, '{"epoch": 1}'),
        (log.RESULT, '{"claims": []}'),
        (run_folder.CURVE, "a picture"),
        ("events.out.tfevents.1.host", "of another program"),
        (f"{run_folder.CHECKPOINTS}/model.pt", "weights"),
        (f"{run_folder.CHECKPOINTS}/5/card.json", "another program's, which counts its checkpoints, too"),
        ("ranking.json", "a leaf of this run alone"),
    ],
)
def test_files_of_something_else_are_not_replaced(
    name: str, text: str, overwrite: bool, tmp_path: Path
) -> None:
    if name.endswith("card.json") and not overwrite:
        pytest.skip("a run that goes on reads the card, and refuses it")
    this = run(tmp_path, overwrite=overwrite, leaves=("ranking.json",))
    (tmp_path / "page.md").write_text("a page")  # is in no run's way
    lifecycle.begin(this, {"state": np.zeros(3)})
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=rf"something else \({name.partition('/')[0]}\): give another --workdir, or remove them if they are of",
    ):
        learn(this)
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("name", ["wandb/run-1/files.yaml", "wandb-notes.txt", "wandb_id.txt"])
def test_files_of_weights_and_biases_are_in_no_runs_way(name: str, tmp_path: Path) -> None:
    """A run that dies as it logs in leaves them without a config.json, and those of no run are kept."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    learn(run(tmp_path, overwrite=True))
    assert (tmp_path / name).read_text() == "mine"
    assert json.loads((tmp_path / log.RESULT).read_text())["updates"] == TOTAL


@pytest.mark.parametrize("logged", [False, True])
def test_overwrite_removes_the_files_of_weights_and_biases_where_the_run_logged_there(
    logged: bool, tmp_path: Path
) -> None:
    learn(run(tmp_path))
    names = ["wandb/run-1/files.yaml", *["wandb_id.txt", "wandb_step.txt"] * logged]
    for name in (*names, "wandb-notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    learn(run(tmp_path, overwrite=True))
    assert (tmp_path / "wandb").exists() != logged and (tmp_path / "wandb-notes.txt").exists()
    assert not list(tmp_path.glob("wandb_*"))


def test_a_sweeps_marks_and_an_empty_folder_of_checkpoints_are_in_no_runs_way(tmp_path: Path) -> None:
    """A sweep claims a folder, and may mark it before a run in it has a config.json."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    for name in (run_folder.OVERWRITE, locks.LOCK, ".claim"):
        (folder / name).touch()
    (folder / run_folder.CHECKPOINTS).symlink_to(disk)  # made before the run, for lack of room
    assert learn(run(folder, overwrite=True))["updates"] == TOTAL
    assert list(disk.iterdir()) and not (folder / run_folder.OVERWRITE).exists()


def test_a_process_that_dies_as_it_removes_an_earlier_run_leaves_the_rest_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its config.json the rest would be files of something else."""
    learn(run(tmp_path))

    def die(*_: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(run_folder.shutil, "rmtree", die)
    with pytest.raises(OSError, match="killed"):
        learn(run(tmp_path, overwrite=True))
    monkeypatch.undo()
    assert learn(run(tmp_path, 2, overwrite=True))["updates"] == 2


def test_overwrite_removes_only_what_runs_leave_and_only_when_it_begins(tmp_path: Path) -> None:
    learn(run(tmp_path, tensorboard=True))
    (tmp_path / "actors").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    again = run(tmp_path, 2, overwrite=True, leaves=("actors",), card={"agent": "other"})
    before = files(tmp_path)
    assert not lifecycle.begin(again, {"state": np.zeros(3)}).resumed
    assert files(tmp_path) == before  # everything else can still go wrong
    learn(again)
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2]
    assert sorted(path.name for path in (tmp_path / run_folder.CHECKPOINTS).iterdir()) == ["1", "2"]
    assert json.loads((tmp_path / log.RESULT).read_text())["agent"] == "other"
    assert not (tmp_path / "actors").exists() and not list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwrite_removes_nothing_where_nobody_is_logged_in_to_what_it_logs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Error(Exception): ...

    def login() -> None:
        raise Error("No API key configured.")

    learn(run(tmp_path))
    before = files(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(login=login, Error=Error))
    with pytest.raises(
        ValueError, match="--wandb: No API key configured; run `wandb login`, or set WANDB_MODE"
    ):
        learn(run(tmp_path, overwrite=True, wandb=True))
    after, lock = files(tmp_path), str(tmp_path / locks.LOCK)
    assert after.pop(lock) and before.pop(lock) and after == before


def test_overwrite_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    """Checkpoints may lie on another disk, or be those of another run."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    learn(run(folder))
    (folder / run_folder.CHECKPOINTS).rename(elsewhere)
    (folder / run_folder.CHECKPOINTS).symlink_to(elsewhere)
    before = files(elsewhere)
    learn(run(folder, 2, overwrite=True))
    assert checkpoint.steps(folder / run_folder.CHECKPOINTS) == (2, 1) and files(elsewhere) == before


def test_two_processes_cannot_have_a_folder_open(whole: Path, tmp_path: Path) -> None:
    start = lifecycle.begin(run(tmp_path), {"state": np.zeros(3)})
    with lifecycle.session(run(tmp_path), start):
        with (
            pytest.raises(
                checkpoint.CheckpointError,
                match=rf"{tmp_path} is in use by process {os.getpid()} on .* since",
            ),
            lifecycle.session(run(tmp_path, overwrite=True), start),
        ):
            pytest.fail("it was opened")
        assert (tmp_path / log.METRICS).exists()  # nothing was overwritten
    assert locks.holder(tmp_path) is None
    learn(run(tmp_path))
    assert_same(whole, tmp_path)


def test_a_run_that_another_process_went_on_with_in_between_is_left_alone(
    whole: Path, tmp_path: Path
) -> None:
    """Between reading the newest checkpoint and opening the folder nothing was checked: the other lost lines."""
    first = lifecycle.begin(run(tmp_path), {"state": np.zeros(3)})
    learn(run(tmp_path))
    for late in (first, first._replace(step=5, checkpoints=(5, 4))):
        with (
            pytest.raises(locks.InUse, match="another process went on"),
            lifecycle.session(run(tmp_path), late),
        ):
            pytest.fail("it was opened")
    assert_same(whole, tmp_path)


def test_processes_that_mean_different_runs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other flags or other data they would train a mixture, which is stored as the run of the first."""
    others = np.array([0, 0, 1], np.uint32)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: x + others)
    with pytest.raises(
        ValueError,
        match=r"processes \[2\] of this run have other settings, data, pretrained weights or modules",
    ):
        lifecycle.begin(run(tmp_path), {"state": np.zeros(3)})


def test_what_processes_must_agree_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one finds held-out data and others do not, or trains longer, they would wait for each other for ever."""
    digests: list[int] = []

    def gather(x: np.ndarray) -> np.ndarray:
        digests.append(int(x))
        return np.array([x, x])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    this = run(tmp_path, alike={"held_out": 0})
    for other in (
        this,
        this._replace(alike={"held_out": 5}),
        this._replace(total=this.total + 1),
        this._replace(overwrite=True),
        this._replace(card={**this.card, "agent": "other"}),
    ):
        lifecycle._check_same(other)
    of_run, of_code = digests[::2], digests[1::2]
    assert len(set(of_run)) == len(of_run) and len(set(of_code)) == 1
    lifecycle._check_same(run(tmp_path, alike={"held_out": 0}))
    assert digests[-2] == digests[0]
    monkeypatch.setattr(log, "versions", lambda: {"jax": "0.0"})
    lifecycle._check_same(this)
    assert digests[-1] != digests[1]


def test_a_result_that_another_process_cannot_see_yet_is_there(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All go by what the first says: one that trained alone would wait for the others for ever."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / log.RESULT).unlink()
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: np.array(True))
    start = lifecycle.begin(run(tmp_path / "run"), {"state": np.zeros(3)})
    assert start.result == {"folder": str(tmp_path / "run")}


def test_what_the_first_process_cannot_open_no_process_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = lifecycle.begin(run(tmp_path), {"state": np.zeros(3)})
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.array([True, x]))
    with (
        pytest.raises(locks.InUse, match="the first process could not"),
        lifecycle.session(run(tmp_path), start),
    ):
        pytest.fail("it was opened")


def test_a_folder_that_is_open_is_refused_before_it_is_read(tmp_path: Path) -> None:
    this = run(tmp_path)
    with (
        lifecycle.session(this, lifecycle.begin(this, {"state": np.zeros(3)})),
        pytest.raises(locks.InUse, match="is in use by process"),
    ):
        lifecycle.begin(this, {"state": np.zeros(3)})


def test_what_is_prepared_is_prepared_once(tmp_path: Path) -> None:
    """While a model is fitted, for hours perhaps, the folder is held: the same command elsewhere is refused."""
    this = run(tmp_path)
    start = lifecycle.begin(this, {"state": np.zeros(3)})

    def prepare() -> str:
        assert signal.getsignal(signal.SIGINT) is usual  # Ctrl-C ends it at once, and so does SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(locks.InUse, match="is in use by process"), lifecycle.session(this, start):
            pytest.fail("it was opened")
        assert not (tmp_path / log.CONFIG).exists()
        return "a model"

    usual = signal.getsignal(signal.SIGINT)
    with lifecycle.session(this, start, prepare) as session:
        assert session.prepared == "a model" and signal.getsignal(signal.SIGINT) is not usual
    with lifecycle.session(this, start) as session:
        assert session.prepared is None


def test_a_preparation_that_fails_leaves_an_earlier_run(tmp_path: Path) -> None:
    learn(run(tmp_path))
    before, again = files(tmp_path), run(tmp_path, overwrite=True)
    start = lifecycle.begin(again, {"state": np.zeros(3)})

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lifecycle.session(again, start, fail):
        pytest.fail("it was opened")
    after, lock = files(tmp_path), str(tmp_path / locks.LOCK)
    assert after.pop(lock) and before.pop(lock) and after == before
    assert locks.holder(tmp_path) is None


def test_a_process_that_asks_who_has_a_folder_keeps_no_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds a lock itself, for a moment; a status beside a sweep made a worker leave a program that was free."""
    with open(tmp_path / locks.LOCK, "a+") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(locks.time, "sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
        with lifecycle.session(run(tmp_path), lifecycle.begin(run(tmp_path), {"state": np.zeros(3)})):
            assert (locks.holder(tmp_path) or "").startswith(f"process {os.getpid()} on ")


def test_a_folder_of_nobody_has_a_remedy() -> None:
    with pytest.raises(ValueError, match="no home folder is known for '~nouser-here'; give the whole path"):
        run_folder.folder("~nouser-here/run", "task", "label")


def test_a_folder_that_cannot_be_written_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    this = run(tmp_path / "file" / "run")
    with (
        pytest.raises(OSError, match=r"choose a --workdir .* in which files can be written"),
        lifecycle.session(this, lifecycle.Start({}, 0, 0.0, False, None)),
    ):
        pytest.fail("it was opened")


def lose_lines(folder: Path) -> None:
    path = folder / log.METRICS
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("lose", "held"), [(lose_lines, 1), (lambda folder: (folder / log.METRICS).unlink(), 0)]
)
def test_lost_lines_are_said_and_change_no_score(
    lose: Callable[[Path], None], held: int, tmp_path: Path
) -> None:
    scores = learn(run(tmp_path))["scores"]["return"]["last"]
    lose(tmp_path)
    with pytest.warns(UserWarning, match=f"holds {held} of the 6 lines that were written up to updates 6"):
        again = learn(run(tmp_path), each=lambda _: pytest.fail("trained"))
    assert again["scores"]["return"]["last"]["mean"] == scores["mean"]
    with pytest.warns(UserWarning, match=f"holds {held} of the 6 lines"):
        longer = learn(run(tmp_path, 8))
    assert [row["step"] for row in log.read(tmp_path)] == [*range(1, held + 1), 7, 8]
    assert longer["lost_lines"] == log.read_json(tmp_path / log.RESULT)["lost_lines"] == 6 - held
    with pytest.warns(UserWarning, match=f"holds {held + 2} of the 8 lines"):  # it is not forgotten
        learn(run(tmp_path, 8))


def test_checkpoints_that_count_no_lines_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an older version: the first resumption counts what is there, and the second drops nothing."""
    learn(run(tmp_path, 3))
    with monkeypatch.context() as older:
        older.setattr(run_folder, "lines_written", lambda *_: None)
        assert "lost_lines" not in learn(run(tmp_path, 5))
    assert "lost_lines" not in learn(run(tmp_path))
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_config_is_named_with_the_remedy(tmp_path: Path) -> None:
    learn(run(tmp_path, 3))
    for text in ("{", "{}", "[]"):
        (tmp_path / log.CONFIG).write_text(text)
        with pytest.raises(
            ValueError, match=r"config.json is damaged .*: remove it, and run the same command"
        ):
            learn(run(tmp_path))
    (tmp_path / log.CONFIG).unlink()
    learn(run(tmp_path))


# ---- versions -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_says_what_it_was_made_with(whole: Path) -> None:
    saved = checkpoint.read(whole / run_folder.CHECKPOINTS)[0]["card"]["versions"]
    assert {
        "python",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "numpy",
        "headway",
        "backend",
        "device",
    } <= saved.keys()


def test_a_resume_under_other_versions_warns_once_and_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(run(tmp_path, 3))
    now = run_folder.versions()
    monkeypatch.setattr(run_folder, "versions", lambda: now | {"jax": "0.1", "device": "H100"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(run(tmp_path))
    (message,) = [str(one.message) for one in caught if "other versions" in str(one.message)]
    assert f"jax: '{now['jax']}' in the checkpoint, '0.1'" in message and "device: " in message
    assert "numpy" not in message
    assert_same(whole, tmp_path)
    warnings.simplefilter("error")
    assert learn(run(tmp_path))["updates"] == 6  # it is now of these


@pytest.mark.slow
def test_another_model_of_cpu_is_warned_of_and_older_cards_do_not_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX calls every processor "cpu", and XLA compiles for the one at hand: on the next the last bits may differ."""
    machine = log.hardware() | {"backend": "cpu", "device": "cpu", "cpu": "AMD EPYC"}

    def warned(total: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learn(run(tmp_path, total))
        return [str(one.message) for one in caught if "other versions" in str(one.message)]

    monkeypatch.setattr(log, "hardware", lambda: machine)
    assert not warned(1) and not warned(2)
    machine["cpu"] = "Intel Xeon"
    (message,) = warned(3)
    assert message.endswith("differ: cpu: 'AMD EPYC' in the checkpoint, 'Intel Xeon' in this run")
    (path,) = tmp_path.glob(f"{run_folder.CHECKPOINTS}/3/card.json")
    record = json.loads(path.read_text())
    del record["card"]["versions"]["cpu"]
    path.write_text(json.dumps(record))
    assert not warned(4)
    machine |= {"backend": "gpu", "device": "H100"}
    assert "cpu" not in run_folder.versions()


def test_a_session_counts_time_over_interruptions_and_what_is_prepared(tmp_path: Path) -> None:
    start = lifecycle.Start({}, 0, 100.0, True, None)
    with lifecycle.session(run(tmp_path), start, lambda: time.sleep(0.01)) as session:
        assert session.seconds() > 100.01
