"""The life of a training run in its folder, from where it starts to its result.

    run = run_folder.Run(folder, card, total=100_000)
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
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rl import checkpoint, locks, log, outcomes, run_folder, shard, train
from rl.run_folder import Run


class Start(NamedTuple):
    """Where a run begins or goes on."""

    tree: Any  # as saved, or as given to `begin`
    step: int
    seconds: float  # wall time so far
    resumed: bool  # from a checkpoint
    result: dict[str, Any] | None  # what result.json says of a finished run
    # Steps of the checkpoints in the folder when it was read; None: not known
    checkpoints: tuple[int, ...] | None = None


def check(run: Run) -> tuple[int, ...]:
    """Raises what `begin` does by names and cards alone, before there are arrays of the run.

    Returns the steps of the checkpoints that are there.
    """
    _check_same(run)
    other = locks.holder(run.folder) if jax.process_index() == 0 else None
    if shard.any_process(other is not None):
        raise locks.in_use(run.folder, other)
    there = checkpoint.steps(run.folder / run_folder.CHECKPOINTS)
    if not run.overwrite:
        # By all processes: those that see no checkpoint find that others do.
        checkpoint.check_card(run.folder / run_folder.CHECKPOINTS, run.card)
        if there:
            run_folder.check_length(run, there[0])
    if run.overwrite or not there:
        run_folder.check_files(run)
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
    there, identity = check(run), {**run.card, "versions": run_folder.versions()}
    earlier = None
    if not run.overwrite:
        like = {**tree, "seconds": np.zeros(())}
        earlier = checkpoint.restore(run.folder / run_folder.CHECKPOINTS, like, identity)
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
        known = shard.from_first_process(result is not None)  # others may not see the file yet
        result = (result or {"folder": str(run.folder)}) if known else None
    return Start(saved, step, saved.pop("seconds").item(), True, result, there)


def _check_same(run: Run) -> None:
    """Raises ValueError if the processes of a run have other flags or code, or read other data."""
    if others := shard.unlike_first([run.card, run.alike, run.total, run.overwrite]):
        raise ValueError(
            f"processes {others} of this run have other settings, data, pretrained weights or modules of your own than "
            "process 0, and a run cannot be of both: start the same command on every host, with the same files in "
            "--data_folder, those of held-out data (NAME-val.npz) among them"
        )
    if others := shard.unlike_first([log.loaded_commit(), log.versions()]):
        raise ValueError(
            f"processes {others} of this run have another commit of this code (here it is {log.loaded_commit()}), or "
            "other versions of packages, than process 0: bring all hosts to the same"
        )


class Session:
    """An open run: records, checkpoints, progress, requests to stop, and what was ``prepared``; made by `session`."""

    def __init__(
        self,
        run: Run,
        record: log.Run,
        bar: Any,
        stopping: list[int],
        prepared: Any,
        lines: int,
        began: float,
    ):
        self.bar, self.stopping, self.prepared = bar, stopping, prepared
        self._run, self._record, self._began = run, record, began
        self._versions = run_folder.versions()
        self._lines = lines  # of metrics.jsonl that were ever written

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
        names = [name for name in (*outcomes.HEADLINE, "played") if f"eval/{name}" in scores]
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
            run.folder / run_folder.CHECKPOINTS,
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
        stop = shard.any_process(bool(self.stopping))
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
        lost = self._lines - run_folder.lines_held(run.folder, run.total)
        result = {
            **run.card,
            **run.about,
            **outcome,
            run.unit: run.total // run.per_unit,
            **outcomes.scores_of(run, each),
            **({"lost_lines": lost} if lost else {}),
            "wall_seconds": self.seconds(),
            **log.provenance(),
        }
        if run.follows and jax.process_index() == 0:
            (run.folder / run_folder.UNFINISHED).touch()
        self._record.result(result)
        if jax.process_index() == 0:
            outcomes.draw(run)
        shard.any_process(False)  # the others return when all is there
        return result | {"folder": str(run.folder)}


@contextlib.contextmanager
def session(run: Run, start: Start, prepare: Callable[[], Any] | None = None) -> Iterator[Session]:
    """Opens the run, in a folder that no other process has open.

    With ``run.overwrite`` what an earlier one left is removed: first try all that can be wrong. So is what one left
    that had no checkpoint yet.

    Args:
      run: the run.
      start: where it begins, from `begin`.
      prepare: what is to be made before the run begins and may take long, such as the fit of a model: its result is
        ``session.prepared``. The folder is held meanwhile, so that no second process makes the same. If it fails, what
        an earlier run left is still there, and Ctrl-C or SIGTERM ends it at once.

    Raises:
      ImportError, ValueError: Weights & Biases is asked for, and not installed, or nobody is logged in.
      InUse: another process has the folder open, or had it since ``start`` was read; the message says which.
      OSError: nothing can be written there.
      ValueError: a process of the run does not see the folder.
      train.Interrupted: the run is finished, and was asked to stop in its last epoch.
    """
    with contextlib.ExitStack() as stack:
        failure = None
        try:
            stack.enter_context(locks.alone(run.folder))
            if run.wandb and run.overwrite and jax.process_index() == 0:
                log.check_wandb()
        except (locks.InUse, OSError, ImportError, ValueError) as error:
            failure = error  # on the first process alone: the others would wait for it
        if shard.any_process(failure is not None):
            raise failure or locks.InUse(
                f"the first process could not open {run.folder}: its message says why"
            )
        _check_visible(run)
        _check_unchanged(run, start)
        began = time.monotonic() - start.seconds
        with train.interruptible():
            prepared = prepare() if prepare else None
        # A run that died before its first checkpoint left the rest.
        if run.overwrite or start.checkpoints == ():
            run_folder.clear(run, checkpoints=run.overwrite)
        elif start.step:
            run_folder.warn_of_lost_lines(run, start.step)
        yield stack.enter_context(_open(run, start, prepared, began))


def _check_visible(run: Run) -> None:
    """Raises ValueError if a process does not see the folder: checkpoints are written by all of them together."""
    if others := shard.blind_to_first(run.folder):
        raise ValueError(
            f"processes {others} of this run do not see what process 0 writes in its run folder, here {run.folder}: "
            "give every host the same --workdir, on a file system that all of them share"
        )


def _check_unchanged(run: Run, start: Start) -> None:
    """Raises InUse if another process has written to the run's checkpoints since ``start`` was read."""
    known = run.overwrite or start.checkpoints is None
    if shard.any_process(
        not known and checkpoint.steps(run.folder / run_folder.CHECKPOINTS) != start.checkpoints
    ):
        raise locks.InUse(
            f"another process went on with the run in {run.folder} while this one prepared to: start the same command "
            "again"
        )


@contextlib.contextmanager
def _open(run: Run, start: Start, prepared: Any, began: float) -> Iterator[Session]:
    lines = run_folder.lines_written(run, start.step)
    with (
        log.open_run(
            run.folder,
            {**run.about, **run.card, run.unit: run.total // run.per_unit},
            tensorboard=run.tensorboard,
            wandb=run.wandb,
            resume_step=start.step,
            resume_lines=lines,
            resumed=start.resumed,
            variants=outcomes.labels(run.variants),
        ) as record,
        log.progress(run.total, run.label, initial=start.step) as bar,
        train.stop_requests() as stopping,
    ):
        if lines is None:  # a checkpoint of a version that did not count them
            lines = run_folder.lines_held(run.folder, start.step)
        yield Session(run, record, bar, stopping, prepared, lines, began)
        stop = shard.any_process(bool(stopping))
    if stop:  # in the last epoch, and so for what comes after this run
        raise train.Interrupted(f"{run.folder} is finished; stopped before anything that follows it")


def _finished(run: Run, step: int) -> dict[str, Any] | None:
    """What result.json says; None if the run was stopped just before it was written."""
    run_folder.check_length(run, step)
    count = step // run.per_unit
    path = run.folder / log.RESULT
    result = log.read_json(path) if path.exists() else {}
    if result.get(run.unit) != count or len(result.get("variants", [])) != len(run.variants):
        return None
    if jax.process_index() == 0:
        print(
            f"{run.folder} holds this run, finished: nothing to do; --overwrite starts again", file=sys.stderr
        )
        lacks_curve = not (run.folder / run_folder.CURVE).exists()
        if lacks_curve and (run.folder / log.METRICS).exists() and os.access(run.folder, os.W_OK):
            outcomes.draw(run)  # it was killed before
    if not run_folder.warn_of_lost_lines(run, step):
        scores = outcomes.scores_of(run)
        each = zip(result.get("variants", []), scores.pop("variants", []), strict=True)
        result |= scores | ({"variants": [stored | fresh for stored, fresh in each]} if run.variants else {})
    return result | {"folder": str(run.folder)}
