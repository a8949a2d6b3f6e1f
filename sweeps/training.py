"""One program of a sweep: its data made, its runs trained, its failure kept, and all of it stopped in time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from experiments import flags as config_flags
from rl import data, locks, log, run_folder, shard, train
from rl.data import recipes
from rl.files import expanded
from sweeps import layout, records, scripts
from sweeps.layout import Program
from sweeps.records import DIVERGED, FAILED, MetricError
from sweeps.scripts import SCRIPTS

# Memory or a disk may be full on one machine alone, or a package missing: others try again. Mistakes are made by all.
_LOCAL = (RuntimeError, MemoryError, OSError, ImportError)
_ALARM = 5.0  # seconds between two requests to stop, after the budget is spent
_print_once = functools.cache(print)  # of what is tried again after every pause


def collect(program: Program) -> None:
    """Makes the tier of locomotion that the program learns from, if it is one that is not there.

    One that is there and has not its published size is used as it is, with a warning.
    Other datasets are downloaded where they are read, or refused there with the command that makes them. SIGTERM stops
    it as Ctrl-C does, in the middle; what is made so far is kept.

    Raises:
      locks.InUse: another process is making it.
      data.DataError: it cannot be made.
      KeyboardInterrupt: it was stopped.
    """
    settings, *_ = layout.arguments(program, Path())
    name = getattr(settings, "dataset", "")
    if name not in recipes.LOCOMOTION:
        return
    recipe = recipes.LOCOMOTION[name]
    place = expanded(settings.data_folder or recipes.default_folder(recipe.family))
    if (place / recipe.file).exists():
        held = recipes.read_card(place / recipe.file).get("transitions")
        published = recipes.locomotion.plan(recipe, None, 0, None).transitions
        if held not in (None, published):
            warnings.warn(
                f"{place / recipe.file} has {held:,} transitions, and {name} at its published size {published:,}: "
                f"do not compare runs on both. python -m experiments.collect --dataset={name} --out={place} "
                "--overwrite makes it at that size in its place; another --out, and --set=data_folder with "
                "that folder here, keep both",
                stacklevel=2,
            )
        return
    _print_once(f"{name} is not in {place}: it is made now, at its published size", file=sys.stderr)
    try:
        with train.interruptible():
            recipes.collect(name, out=place)
    except RuntimeError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise locks.InUse(str(error)) from error
        raise data.DataError(str(error)) from error


def attempt(program: Program, place: Path, metric: str) -> list[dict[str, Any]]:
    """Makes the program's data and trains it, as far as neither is done; a row per run, with its score or its error.

    A run that fails leaves failed.json in its folder.

    Raises:
      MetricError: the runs do not log ``metric``.
      locks.InUse: another process has its folder open, or makes its data.
      train.Interrupted, KeyboardInterrupt: it was stopped.
    """

    def trained() -> list[dict[str, Any]]:
        with _claimed(program, place):
            return execute(program, place, metric)

    rows = _guarded(program, place, trained)
    explained = all(row.pop("explained", True) for row in rows)
    if not records.failures(rows):
        (place / FAILED).unlink(missing_ok=True)
    elif shard.is_main():
        with contextlib.suppress(OSError):  # a full disk has no room to say so, and the rows do
            place.mkdir(parents=True, exist_ok=True)
            failed = {
                "error": records.failures(rows)[0],
                "runs": len(records.failures(rows)),
                "explained": explained,
            }
            log.write_json(place / FAILED, failed)
    return rows


def _guarded(
    program: Program, place: Path, train_it: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The rows of a program that ``train_it`` gives, or of its error: ``explained`` where any process would have it."""
    try:
        return train_it()
    except (MetricError, locks.InUse, train.Interrupted):
        raise
    except Exception as error:  # of an environment say, memory that is full, or of an agent of one's own
        if jax.process_count() > 1:  # others may have gone on, and would wait for ever
            raise
        if not isinstance(error, config_flags.EXPLAINED):
            traceback.print_exc()
        explained = not isinstance(error, _LOCAL)
        what = {"error": f"{type(error).__name__}: {error}", "explained": explained}
        return [records.row_of(part, place) | what for part in program.single_runs()]


@contextlib.contextmanager
def _claimed(program: Program, place: Path) -> Iterator[None]:
    """Makes the program's data, and keeps other workers from it: data, compiling and models may take hours.

    Processes that train as one start it together, and would be in each other's way.
    """
    if jax.process_count() > 1:
        yield
        return
    if held := records.holder(program, place):
        raise locks.InUse(held)
    with locks.alone(place, layout.CLAIM):
        collect(program)
        (place / FAILED).unlink(missing_ok=True)
        yield


def execute(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """Trains one program, if it is not finished; one row per run, with its parameters and its last score or its error.

    If one of several runs diverges, all are trained again one by one, so that it takes only itself down, as does one
    that fails then. A folder that is marked (`layout.mark`) is overwritten.

    Raises:
      MetricError: the runs do not log ``metric``.
    """
    if shard.from_first_process(layout.finished(program, workdir)):
        return _read(program, workdir, metric)
    settings, config, sweep = layout.arguments(program, workdir)
    marked = shard.from_first_process((workdir / run_folder.OVERWRITE).exists())
    settings = dataclasses.replace(settings, overwrite=marked)
    if settings.overwrite and shard.is_main():
        (workdir / DIVERGED).unlink(missing_ok=True)
    if settings.overwrite or not shard.from_first_process((workdir / DIVERGED).exists()):
        try:
            run = scripts.module(program.script).run
            run(settings, config, sweep) if SCRIPTS[program.script].together else run(settings, config)
            return _read(program, workdir, metric)
        except train.Diverged as error:
            if program.runs == 1:
                return [records.row_of(program, workdir) | {"error": f"{records.DIVERGENCE}: {error}"}]
            if shard.is_main():
                log.write_json(workdir / DIVERGED, {"error": str(error)})
    parts = layout.single_run_folders(program, workdir).items()
    rows = (
        _guarded(part, folder, functools.partial(execute, part, folder, metric)) for folder, part in parts
    )
    return [row for of_run in rows for row in of_run]


def _read(program: Program, workdir: Path, metric: str) -> list[dict[str, Any]]:
    """`records.scored` in the first process; nothing in the others, which may not see yet what it has written."""
    return records.scored(program, workdir, metric) if shard.is_main() else []


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[Callable[[], bool]]:
    """Asks the run that is open to stop after ``seconds``, and any that opens later; yields whether they are over.

    The request is SIGTERM, which `rl.train.stop_requests` understands: the epoch ends with a checkpoint. Data that are
    being made, and models that are fitted before a run begins, end at once (`rl.train.interruptible`).
    """
    if math.isinf(seconds):
        yield lambda: False
        return
    end, usual = time.monotonic() + seconds, signal.getsignal(signal.SIGTERM)

    def ring(*_: Any) -> None:
        if signal.getsignal(signal.SIGTERM) is not usual:  # a run is open
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM)
    try:
        yield lambda: shard.any_process(time.monotonic() >= end)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
