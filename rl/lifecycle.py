"""The life of a training run in its folder, from where it starts to its result.

    run = lifecycle.Run(folder, card, total=100_000)
    start = lifecycle.begin(run, {"state": state})  # of a fresh run, or of the newest checkpoint
    if start.result is not None:
        return start.result  # it is finished
    with lifecycle.session(run, start) as session:
        for state, report in epochs(start.tree["state"], start.step):
            session.write(step, scores, report)
            session.keep(step, {"state": state})  # a checkpoint; leaves here if asked to stop
        return session.finish(source=...)

The folder then holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json and checkpoints. Killed at
any moment, the same calls continue to the same bits. With several processes all must make the same calls, and only the
first writes. What is trained, and by which loop, is the caller's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from rl import checkpoint, log, plot, selection, statistics, train
from rl.data.files import expanded

CHECKPOINTS, CURVE, LOCK = "checkpoints", "curve.png", ".lock"
OVERWRITE = "overwrite"  # an empty file in a folder whose run a sweep is to overwrite, until that run starts
_ATTEMPTS = 4  # to lock a folder

# Scores that are summarised, and those worth a curve, the most telling first.
SCORES = ("return", "normalized_return", "success", "final_success")
HEADLINE = ("normalized_return", "success", "final_success", "return")
RATES = ("success", "final_success")

# What every run may leave in its folder, beside its config.json.
_LEAVES = (log.METRICS, log.RESULT, CURVE, CHECKPOINTS, "events.out.tfevents.*")
_NAMED = 5  # of the files that are in a run's way, how many a message names


class InUse(checkpoint.CheckpointError):
    """Another process has the run folder open."""


class Run(NamedTuple):
    """A run: where it lives, what identifies it, and how far it goes.

    Metrics of ``variants`` are logged as one array [V * S, ...], the seeds of the first variant first. Their curves,
    scores and intervals are apart: hyper-parameters are no seeds.
    """

    folder: Path
    card: Mapping[str, Any]  # JSON; what a checkpoint in the folder must agree on
    total: int  # steps
    about: Mapping[str, Any] = {}  # JSON; stored beside the card, and not compared
    alike: Mapping[str, Any] = {}  # JSON; what all processes must agree on, too; not stored
    unit: str = "updates"  # what --unit=... counts, and the entry in result.json
    per_unit: int = 1  # steps in one of them
    label: str = ""  # of the progress bar and the curve
    title: str = ""  # of the curve
    axis: str = "updates"  # name of the curve's x axis
    leaves: tuple[str, ...] = ()  # patterns of further files that the run leaves in its folder
    variants: tuple[Mapping[str, float], ...] = ()  # hyper-parameters of runs that are trained together
    task_episodes: int = 0  # of each task, where the episodes of an evaluation are of several; 0: of one
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True
    wandb: bool = False


class Start(NamedTuple):
    """Where a run begins or goes on."""

    tree: Any  # as saved, or as given to `begin`
    step: int
    seconds: float  # wall time so far
    resumed: bool  # from a checkpoint
    result: dict[str, Any] | None  # what result.json says of a finished run
    # Steps of the checkpoints in the folder when it was read; None: not known
    checkpoints: tuple[int, ...] | None = None


def folder(workdir: str, task: str, label: str) -> Path:
    """The run folder: as chosen, or by the run's id in a sweep of Weights & Biases, or runs/TASK/LABEL."""
    if workdir:
        return expanded(workdir)
    if "WANDB_SWEEP_ID" in os.environ:
        return Path("runs", "sweeps", os.environ["WANDB_SWEEP_ID"], os.environ["WANDB_RUN_ID"])
    return Path("runs", task, label)


def check(run: Run) -> tuple[int, ...]:
    """Raises what `begin` does by names and cards alone, before there are arrays of the run.

    Returns the steps of the checkpoints that are there.
    """
    _check_same(run)
    other = holder(run.folder) if jax.process_index() == 0 else None
    if any_process(other is not None):
        raise _in_use(run.folder, other)
    there = checkpoint.steps(run.folder / CHECKPOINTS)
    if not run.overwrite:
        # By all processes: those that see no checkpoint find that others do.
        checkpoint.check_card(run.folder / CHECKPOINTS, run.card)
        if there:
            _check_length(run, there[0])
    if run.overwrite or not there:
        _check_folder(run)
    return there


def begin(run: Run, tree: Mapping[str, Any]) -> Start:
    """The newest checkpoint in the run's folder, or ``tree`` where there is none or the run overwrites.

    Nothing is written or removed. A checkpoint that was saved under other versions, on another kind of device or on
    another model of CPU is used, with a warning that names what changed.

    Args:
      run: the run.
      tree: {name: pytree of arrays, or of shapes}, as in `rl.checkpoint.restore`.

    Raises:
      InUse: another process has the folder open; `session` has the last word on that.
      CheckpointError: the folder holds another run, results without the checkpoints they came from, or files of
        something else that the run would replace.
      ValueError: the run there has gone beyond ``run.total``, or the processes of this run are not of the same run.
    """
    there, identity = check(run), {**run.card, "versions": versions()}
    earlier = None
    if not run.overwrite:
        like = {**tree, "seconds": np.zeros(())}
        earlier = checkpoint.restore(run.folder / CHECKPOINTS, like, identity)
    if earlier is None:
        if not run.overwrite and (run.folder / log.RESULT).exists():
            raise checkpoint.CheckpointError(
                f"{run.folder} holds a finished run without its checkpoints: choose another --workdir, or --overwrite "
                "to start again"
            )
        return Start(tree, 0, 0.0, False, None, there)
    saved, step = earlier
    result = _finished(run, step) if step >= run.total else None
    if step >= run.total:
        known = from_first_process(result is not None)  # others may not see the file yet
        result = (result or {"folder": str(run.folder)}) if known else None
    return Start(saved, step, saved.pop("seconds").item(), True, result, there)


def _check_same(run: Run) -> None:
    """Raises ValueError if the processes of a run were started with different flags, or read different data."""
    alike = run.card, run.alike, run.total, run.overwrite
    digest = zlib.crc32(json.dumps(alike, sort_keys=True, default=str).encode())
    digests = multihost_utils.process_allgather(np.uint32(digest))
    if others := np.flatnonzero(digests != digests.flat[0]).tolist():
        raise ValueError(
            f"processes {others} of this run have other settings or other data than process 0, and a run cannot be of "
            "both: start the same command on every host, with the same files in --data_folder, those of held-out data "
            "(NAME-val.npz) among them"
        )


def _check_folder(run: Run) -> None:
    """Raises CheckpointError if the folder has files of the names that this run leaves, and no run wrote them.

    Files of Weights & Biases are in no run's way: one that is killed before it has a config.json may leave them.
    """
    if log.is_config(run.folder / log.CONFIG):
        return
    # An empty folder holds nobody's files: checkpoints may be linked to one on another disk before a run begins.
    names = [path.name for path in _left(run) if not path.is_dir() or any(path.iterdir())]
    if names:
        listed = ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
        raise checkpoint.CheckpointError(
            f"{run.folder} holds files of something else ({listed}): give another --workdir, or remove them if they "
            f"are of a run that has lost its {log.CONFIG}"
        )


def _left(run: Run) -> list[Path]:
    """What a run has left in the folder: that is removed for another, and in its way where no run wrote it.

    Its config.json is the last, so that what is left by a process that dies as it removes them is still a run's.
    """
    patterns = (*_LEAVES, *run.leaves, log.CONFIG)
    return [path for pattern in patterns for path in run.folder.glob(pattern)]


def notes(run: Run, step: int) -> Any:
    """The notes of the checkpoint of ``step``, which `begin` has read; see `rl.checkpoint.save`."""
    return checkpoint.described(run.folder / CHECKPOINTS, step)["notes"]


def versions() -> dict[str, str]:
    """What the last bits depend on: versions of Python and packages, and the kind of device; of a CPU, its model."""
    hardware = log.hardware()
    # XLA compiles for the processor at hand, and JAX calls each of them "cpu".
    names = ("backend", "device", *["cpu"] * (hardware["backend"] == "cpu"))
    return log.versions() | {name: str(hardware[name]) for name in names}


class Session:
    """An open run: records, checkpoints, progress, requests to stop, and what was ``prepared``; made by `session`."""

    def __init__(
        self, run: Run, start: Start, record: log.Run, bar: Any, stopping: list[int], prepared: Any = None
    ):
        self.bar, self.stopping, self.prepared = bar, stopping, prepared
        self._run, self._record, self._began = run, record, time.monotonic() - start.seconds
        self._versions = versions()
        self._lines = _written(run, start.step) if start.step else 0

    def seconds(self) -> float:
        """Wall time of the run so far."""
        return time.monotonic() - self._began

    def write(self, step: int, scores: Mapping[str, Any], report: train.Report | None = None) -> None:
        """Logs what is known at ``step``: an epoch's ``report`` under train/, and other ``scores`` as they are named.

        Such are those that the report has ``measured``, too.
        """
        trained = {} if report is None else {f"train/{name}": x for name, x in report.metrics.items()}
        measured = {} if report is None else report.measured
        self._record.write(step, {**trained, **measured, **scores})
        self._lines += 1
        names = [name for name in (*HEADLINE, "played") if f"eval/{name}" in scores]
        self.bar.set_postfix({name: self._mean(scores[f"eval/{name}"]) for name in names}, refresh=False)
        self.bar.update(step - self.bar.n)

    def _mean(self, score: Any) -> str:
        """The mean over seeds in words; of several variants, the worst and the best."""
        means = [np.mean(part) for part in np.split(np.atleast_1d(score), len(self._run.variants) or 1)]
        return " to ".join(f"{mean:.4g}" for mean in sorted({min(means), max(means)}))

    def save(self, step: int, tree: Mapping[str, Any], notes: Any = None) -> None:
        """Writes a checkpoint; see `rl.checkpoint.save`."""
        run = self._run
        checkpoint.save(
            run.folder / CHECKPOINTS,
            step,
            {**tree, "seconds": np.asarray(self.seconds())},
            {**run.about, **run.card, "versions": self._versions, "lines": self._lines},
            notes=notes,
        )

    def keep(
        self,
        step: int,
        tree: Mapping[str, Any],
        notes: Callable[[], Any] = lambda: None,
        *,
        due: bool = True,
    ) -> None:
        """Writes a checkpoint if it is ``due`` or the run is to stop.

        Raises:
          train.Interrupted: Ctrl-C or SIGTERM before the last step, after the checkpoint.
        """
        stop = any_process(bool(self.stopping))
        if due or stop:
            self.save(step, tree, notes())
        if stop and step < self._run.total:
            where = f"{self._run.axis.split()[-1].removesuffix('s')} {step}"
            command = "the same command" + " without --overwrite" * self._run.overwrite
            raise train.Interrupted(f"stopped at {where}; {command} continues from {self._run.folder}")

    def finish(
        self, each: Callable[[int, int], Mapping[str, Any]] = lambda part, parts: {}, **outcome: Any
    ) -> dict[str, Any]:
        """Writes and returns result.json, with ``outcome`` among its entries, and draws the learning curve.

        It has the ``scores`` of the run (and its last ``fitted_q``, if values were estimated) or, of several
        variants, a list ``variants`` of the ``parameters`` and ``scores`` of each. Where lines of metrics.jsonl
        were lost, ``lost_lines`` says how many. What is returned says which ``folder`` it is in, too.

        Args:
          each: (number of the variant, how many there are) -> what else is known of it; (0, 1) of a single run.
          outcome: what is known of all.
        """
        run = self._run
        lost = self._lines - _lines(run.folder, run.total)
        result = {
            **run.card,
            **run.about,
            **outcome,
            run.unit: run.total // run.per_unit,
            **_scores(run, each),
            **({"lost_lines": lost} if lost else {}),
            "wall_seconds": self.seconds(),
            **log.provenance(),
        }
        self._record.result(result)
        if jax.process_index() == 0:
            draw(run)
        any_process(False)  # the others return when all is there
        return result | {"folder": str(run.folder)}


@contextlib.contextmanager
def session(run: Run, start: Start, prepare: Callable[[], Any] | None = None) -> Iterator[Session]:
    """Opens the run, in a folder that no other process has open.

    With ``run.overwrite`` what an earlier one left is removed: first try all that can be wrong.

    Args:
      run: the run.
      start: where it begins, from `begin`.
      prepare: what is to be made before the run begins and may take long, such as the fit of a model: its result is
        ``session.prepared``. The folder is held meanwhile, so that no second process makes the same. If it fails, what
        an earlier run left is still there, and Ctrl-C ends it at once.

    Raises:
      ImportError, ValueError: Weights & Biases is asked for, and not installed, or nobody is logged in.
      InUse: another process has the folder open, or had it since ``start`` was read; the message says which.
      OSError: nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        failure = None
        try:
            stack.enter_context(alone(run.folder))
            if run.wandb and run.overwrite and jax.process_index() == 0:
                log.check_wandb()
        except (InUse, OSError, ImportError, ValueError) as error:
            failure = error  # on the first process alone: the others would wait for it
        if any_process(failure is not None):
            raise failure or InUse(f"the first process could not open {run.folder}: its message says why")
        _check_unchanged(run, start)
        prepared = prepare() if prepare else None
        if run.overwrite:
            clear(run)
        elif start.step:
            _warn_of_lost_lines(run, start.step)
        yield stack.enter_context(_open(run, start, prepared))


def _check_unchanged(run: Run, start: Start) -> None:
    """Raises InUse if another process has written to the run's checkpoints since ``start`` was read."""
    known = run.overwrite or start.checkpoints is None
    if any_process(not known and checkpoint.steps(run.folder / CHECKPOINTS) != start.checkpoints):
        raise InUse(
            f"another process went on with the run in {run.folder} while this one prepared to: start the same command "
            "again"
        )


@contextlib.contextmanager
def _open(run: Run, start: Start, prepared: Any) -> Iterator[Session]:
    with (
        log.open_run(
            run.folder,
            {**run.about, **run.card},
            tensorboard=run.tensorboard,
            wandb=run.wandb,
            resume_step=start.step,
            variants=labels(run.variants),
        ) as record,
        log.progress(run.total, run.label, initial=start.step) as bar,
        train.stop_requests() as stopping,
    ):
        yield Session(run, start, record, bar, stopping, prepared)


@contextlib.contextmanager
def alone(folder: Path, lock: str = LOCK) -> Iterator[None]:
    """Holds the folder for this process; where the file system has no locks, so may others.

    Args:
      folder: made if missing.
      lock: the file in it that is locked; `session` locks that of the default.

    Raises:
      InUse: another process holds it.
      OSError: nothing can be written there.
    """
    if jax.process_index() != 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / lock, "a+"))
        except OSError as error:
            remedy = f"{error.strerror}: choose a --workdir in which files can be written"
            raise OSError(error.errno, remedy, str(folder)) from error
        try:
            _lock(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise _in_use(folder, file.read()) from None
        except OSError:
            warnings.warn(
                f"the file system of {folder} has no locks: nothing keeps another run out of it", stacklevel=4
            )
        # The file stays: removed, it could still be locked by one process while another locks a new one.
        file.truncate(0)
        since = datetime.now().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        yield


def _in_use(folder: Path, by: str | None) -> InUse:
    return InUse(
        f"{folder} is in use by {(by or '').strip() or 'another process'}: wait until it ends, stop it, or choose "
        "another --workdir"
    )


def _lock(take: Callable[[], None]) -> None:
    """Takes a lock, trying a few times: a process that only asks whether there is one (`holder`) has it for a moment.

    Raises:
      BlockingIOError: another process has it.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            return take()
        time.sleep(0.05)
    take()


def holder(folder: Path, lock: str = LOCK) -> str | None:
    """Which process holds the folder (`alone`); None if none does, or where the file system has no locks."""
    with contextlib.suppress(OSError), open(folder / lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "another process"
    return None


def clear(run: Run) -> None:
    """Removes what an earlier run left in its folder, and nothing else: of a symbolic link the link alone."""
    if jax.process_index() == 0:
        if log.is_config(run.folder / log.CONFIG):
            for path in (*log.wandb_files(run.folder), *_left(run)):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # Last, so that what is left by a process that dies here is still to be overwritten.
        (run.folder / OVERWRITE).unlink(missing_ok=True)
    multihost_utils.sync_global_devices(f"{run.folder} is clear")


def labels(variants: Sequence[Mapping[str, float]]) -> list[str]:
    """What tells the variants of a run apart, in words: ``expectile=0.7, temperature=3``."""
    return [", ".join(f"{name}={value:g}" for name, value in variant.items()) for variant in variants]


def scored_rows(folder: Path) -> list[dict[str, Any]]:
    """What a run logged after step 0: an evaluation before, of what it started from, is none of its scores.

    Raises:
      ValueError: a score is NaN; the message names its line.
    """
    rows = [row for row in log.read(folder) if row["step"] > 0]
    for row in rows:
        for name in [name for name in SCORES if np.isnan(row.get(f"eval/{name}", 0.0)).any()]:
            raise ValueError(
                f"{folder / log.METRICS}: eval/{name} of step {row['step']} is NaN, so that nothing can be summed up: "
                "remove this line, and run the same command again"
            )
    return rows


def summary(
    rows: Sequence[Mapping[str, Any]], part: int = 0, parts: int = 1, task_episodes: int = 0
) -> dict[str, Any]:
    """Last, best and selected scores of every metric that a run logged, with 95 % intervals over seeds.

    Intervals are Student's, and `rl.statistics.rate_interval`'s of success rates, which stay within 0 and 1.

    Args:
      rows: of the run's log, as `scored_rows` reads them.
      part, parts: which of how many equal shares of the logged seeds, such as those of a variant.
      task_episodes: as of `Run`.
    """
    scores: dict[str, Any] = {}
    for name in SCORES:
        history = np.asarray([row[f"eval/{name}"] for row in rows if f"eval/{name}" in row], float)
        if not history.size:
            continue
        history = np.split(history, parts, 1)[part]
        estimates = np.asarray([row["eval/fitted_q"] for row in rows if "eval/fitted_q" in row])
        estimates[~np.isfinite(estimates)] = -np.inf  # a fit that diverged recommends nothing
        estimates = np.split(estimates, parts, 1)[part] if estimates.size else estimates
        interval = statistics.rate_interval if name in RATES else statistics.interval
        tasks = history.shape[-1] // task_episodes if task_episodes else 1
        choices = selection.select(history, estimates if estimates.size else None, tasks)
        scores[name] = {
            which: {
                "mean": float(score.mean()),
                "iqm": float(statistics.iqm(score[:, None])),
                "ci95": list(interval(score)),
                "per_seed": score,
            }
            for which, score in choices.items()
        }
    return scores


def _estimates(rows: Sequence[Mapping[str, Any]], part: int, parts: int) -> dict[str, Any]:
    """The last values that `rl.fitted_q` estimated, as an entry of result.json; none where it was not asked for."""
    history = [row["eval/fitted_q"] for row in rows if "eval/fitted_q" in row]
    if not history:
        return {}
    values = np.split(np.asarray(history[-1], float), parts)[part]
    return {"fitted_q": {"mean": float(values.mean()), "per_seed": values}}


def _scores(
    run: Run, each: Callable[[int, int], Mapping[str, Any]] = lambda part, parts: {}
) -> dict[str, Any]:
    """The entries of result.json on scores; see `Session.finish`."""
    rows, parts = scored_rows(run.folder), max(len(run.variants), 1)

    def entries(part: int) -> dict[str, Any]:
        scores = {"scores": summary(rows, part, parts, run.task_episodes)}
        return {**scores, **_estimates(rows, part, parts), **each(part, parts)}

    if not run.variants:
        return entries(0)
    return {"variants": [{"parameters": variant, **entries(i)} for i, variant in enumerate(run.variants)]}


def draw(run: Run) -> None:
    """The learning curve of the run's most telling score, if it was evaluated; of several variants, one for each."""
    for name in HEADLINE:
        try:
            steps, scores = log.series(run.folder, f"eval/{name}")
        except KeyError:
            continue
        parts = np.split(scores.mean(-1), len(run.variants) or 1, 1)
        plot.learning_curve(
            run.folder / CURVE,
            {
                label: (steps, part)
                for label, part in zip(labels(run.variants) or [run.label], parts, strict=True)
            },
            ylabel=name.replace("_", " "),
            title=f"{run.title}: {run.label}" if run.variants else run.title,
            xlabel=run.axis,
            rate=name in RATES,
        )
        return


def _check_length(run: Run, step: int) -> None:
    """Raises ValueError if ``step`` is one that the run does not get to."""
    count, total = step // run.per_unit, run.total // run.per_unit
    if count > total:
        raise ValueError(
            f"{run.folder} holds a run of {count} {run.unit}, more than --{run.unit}={total}: choose another "
            "--workdir, or --overwrite to start again"
        )


def _finished(run: Run, step: int) -> dict[str, Any] | None:
    """What result.json says; None if the run was stopped just before it was written."""
    _check_length(run, step)
    count = step // run.per_unit
    path = run.folder / log.RESULT
    result = log.read_json(path) if path.exists() else {}
    if result.get(run.unit) != count or len(result.get("variants", [])) != len(run.variants):
        return None
    if jax.process_index() == 0:
        print(
            f"{run.folder} holds this run, finished: nothing to do; --overwrite starts again", file=sys.stderr
        )
    if not _warn_of_lost_lines(run, step):
        scores = _scores(run)
        each = zip(result.get("variants", []), scores.pop("variants", []), strict=True)
        result |= scores | ({"variants": [stored | fresh for stored, fresh in each]} if run.variants else {})
    return result | {"folder": str(run.folder)}


def _warn_of_lost_lines(run: Run, step: int) -> bool:
    """Whether metrics.jsonl has fewer lines than were written up to the checkpoint of ``step``; with a warning."""
    held, written = _lines(run.folder, step), _written(run, step)
    if held < written:
        warnings.warn(
            f"{run.folder / log.METRICS} holds {held} of the {written} lines that were written up to {run.unit} "
            f"{step // run.per_unit}: curves lack the others, and a {log.RESULT} that is written from now on "
            "chooses the best evaluation among those that are left",
            stacklevel=4,
        )
    return held < written


def _written(run: Run, step: int) -> int:
    """Lines that were ever written to metrics.jsonl up to the checkpoint of ``step``, as it says itself."""
    return checkpoint.described(run.folder / CHECKPOINTS, step)["card"].get("lines", 0)


def _lines(folder: Path, step: int) -> int:
    """Lines of metrics.jsonl up to ``step``."""
    with contextlib.suppress(FileNotFoundError):
        return sum(row["step"] <= step for row in log.read(folder))
    return 0


def from_first_process(value: bool) -> bool:
    """What the first process says, where others may see something else in a shared folder; all must call it."""
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def any_process(stop: bool) -> bool:
    """Whether it is so on any host, so that all leave after the same epoch; all must call it."""
    return bool(np.any(multihost_utils.process_allgather(np.asarray(stop))))
