r"""Runs a sweep file without a server: every combination of a grid, or a number of random draws.

    python -m sweeps.run sweeps/iql_expectile.yaml
    python -m sweeps.run sweeps/rebrac_random.yaml --count=16 --set=updates=20000 --set=eval_every=10000
    python -m sweeps.run sweeps/heads_pointmaze.yaml --budget=2h
    python -m sweeps.run sweeps/heads_pointmaze.yaml --status

`experiments.report` makes tables and figures of it, finished or not.

The files are Weights & Biases' own (``wandb sweep FILE`` takes them as they are), for any script that trains:
experiments/offline.py, goals.py, online.py, mbpo.py, model_based.py and language.py. Runs of the first two that differ
only in float hyper-parameters of the agent, other than discounts and values of 0, are trained together as one program,
on one copy of the data, except where one run's value would widen another's support (of a categorical head).

Leaves a folder per program, named by its parameters, and sweep.json with every run's scores, the best first. The same
command continues a sweep that was stopped, at the epoch where it was stopped; what is finished is not trained again,
whatever else was added to the file since. Runs that are trained together are finished together: another value of one of
their hyper-parameters makes another program, which trains all of them. A run that fails leaves failed.json, and the
others go on; where one diverges, those that were trained with it are trained again, each alone. The same command may
run several times at once, also on several machines that share the folder: each takes what no other has open.
Tiers of locomotion that `experiments.collect` makes, and that are not there yet, are made before their first run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from absl import app, flags

from experiments import flags as config_flags
from rl import locks, log, shard, train
from sweeps import cluster, layout, records, training
from sweeps.layout import Program, Sweep
from sweeps.records import SWEEP, MetricError, Rows

RAY = "ray"  # an engine, beside this process
_PAUSE = 5.0  # seconds until programs whose data another process makes are tried again


def main(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> None:
    began = time.time()
    if len(argv) != 2:
        raise ValueError("give one sweep file: python -m sweeps.run sweeps/iql_expectile.yaml")
    if values.engine == RAY or values.status or values.dry_run:
        jax.config.update("jax_platforms", "cpu")  # accelerators are for those that train
    else:
        shard.initialize()
    budget = duration(values.budget) if values.budget else math.inf
    layout.check_draws(argv[1:2], values)
    sweep = layout.from_flags(argv[1], {"overwrite": True} if values.overwrite else {}, values)
    _check_folders(sweep)
    say = print if shard.is_main() else lambda _: None
    runs, programs = sweep.runs, len(sweep.programs)
    say(f"{runs} run{'s' * (runs > 1)} in {programs} program{'s' * (programs > 1)}, to {sweep.root}")
    if values.dry_run:
        for place, program in sweep.programs.items():
            say(json.dumps({"folder": place.name, **dataclasses.asdict(program)}))
        return
    if values.status:
        for line in (*records.status(sweep.programs), *records.other_data(sweep.programs)):
            say(line)
        return
    if jax.process_count() == 1:  # hosts of one slice must all train the same, whatever their clocks say
        sweep = sweep._replace(began=began)
    ray = None
    if values.engine == RAY and (values.overwrite or len(records.done(sweep)) < programs):
        ray = cluster.connect(values.ray_address)  # before anything is marked for training again
    if shard.is_main():
        layout.mark(sweep)
    shard.any_process(False)  # the others see the marks
    known: Rows = {}

    def store(rows: Rows) -> None:
        known.update(rows)
        if shard.is_main():
            known.update(records.done(sweep, known))  # other processes finish programs, too
            _write(sweep, known)

    if ray is not None:
        whole = _submit(ray, sweep, store, values, time.time() + budget)
    else:
        with training.alarm(budget) as over:
            whole = _train(sweep, store, over)
    store({})
    rows = _ranking(sweep, known)
    for line in (*records.table(rows, sweep.root / SWEEP), *_remaining(sweep, known, rows, whole, values)):
        say(line)
    # That a run diverged is a result of its hyper-parameters.
    if any(not error.startswith(records.DIVERGENCE) for error in records.failures(rows)):
        raise SystemExit(1)


def _check_folders(sweep: Sweep) -> None:
    """Raises CheckpointError or ValueError, naming the file, if a folder holds another run than is now meant."""
    try:
        for place, program in sweep.programs.items():
            layout.check_folder(program, place, sweep.root)
    except ValueError as error:
        raise ValueError(f"{sweep.file}: {error}") from None


def _ranking(sweep: Sweep, known: Rows) -> list[dict[str, Any]]:
    """The rows of all runs so far, the best first."""
    rows = [row for of_program in known.values() for row in of_program]
    return records.ranked(rows + records.trained_alone(sweep, known), sweep.goal)


def _write(sweep: Sweep, known: Rows) -> None:
    """Writes sweep.json. Raises OSError, with its remedy."""
    file = sweep.root / SWEEP
    try:
        sweep.root.mkdir(parents=True, exist_ok=True)
        log.write_json(file, {"file": sweep.file, "metric": sweep.metric, "runs": _ranking(sweep, known)})
    except OSError as error:
        remedy = (
            f"{error.strerror}: change that, and the same command goes on; what is finished stays as it is"
        )
        raise OSError(error.errno, remedy, str(file)) from error


def _remaining(
    sweep: Sweep, known: Rows, rows: Sequence[dict[str, Any]], whole: bool, values: flags.FlagValues
) -> Iterator[str]:
    """What is left or has failed, and what to do about it, in lines.

    Args:
      sweep: the sweep.
      known: the rows of the programs that have ended.
      rows: all rows, those of runs that were trained alone among them.
      whole: whether the budget was enough.
      values: the flags.
    """
    left = len(sweep.programs) - len(known)
    yield from records.other_data(sweep.programs)
    if whole and left:
        yield f"{left} of {len(sweep.programs)} programs are left to other processes: --status says how far they are"
    if left and not whole:
        command = "the same command" + " without --overwrite" * values.overwrite
        yield f"the budget of {values.budget} is spent; {command} continues, and --status says what is left"
    lost = len(records.failures([row for row in rows if records.is_finished(row, sweep.script)]))
    if again := len(records.failures(rows)) - lost:
        yield f"{again} of {sweep.runs} runs failed, see {sweep.root / SWEEP}; the same command tries them again"
    if lost:
        yield (
            f"{lost} of {sweep.runs} runs are finished without a score, see {sweep.root / SWEEP}; they are not trained "
            "again without --overwrite"
        )
    yield f"Everything is in {sweep.root}; look at {SWEEP} first."


def _train(sweep: Sweep, store: Callable[[Rows], None], over: Any) -> bool:
    """Trains what is not finished, one program after another; whether the budget was enough.

    Args:
      sweep: with its programs, all checked.
      store: is given the rows so far after every program.
      over: whether the budget is spent.
    """
    say = functools.cache(print)  # what is tried again is not said again
    rows = records.done(sweep) if shard.is_main() else {}
    rows = {place: rows.get(place, []) for place in sweep.programs if shard.from_first_process(place in rows)}
    store(rows)
    if len(rows) == len(sweep.programs) and shard.is_main():
        say(_nothing_left(sweep))
    for place in _left(sweep, rows):
        if over():
            return False
        program = sweep.programs[place]
        if shard.is_main():
            say(f"{place}: {program.fixed} x {program.swept}")
        judged = program, place, sweep.metric
        try:
            known = records.ended(*judged, sweep.began) if shard.is_main() else []
            rows[place] = known if shard.from_first_process(bool(known)) else training.attempt(*judged)
        except locks.InUse as error:
            say(f"left to another process: {error}", file=sys.stderr)
            continue
        except MetricError as error:
            rows[place] = _unscored(program, place, error, rows)
        except (train.Interrupted, KeyboardInterrupt):
            if over():
                return False
            raise
        if shard.is_main():
            for failure in records.failures(rows[place])[:1]:
                print(f"failed: {failure}", file=sys.stderr)
        store(rows)
    return True


def _nothing_left(sweep: Sweep) -> str:
    """Why a command trains nothing."""
    count = len(sweep.programs)
    return f"nothing to train: {count} of {count} programs finished earlier"


def _left(sweep: Sweep, rows: Rows) -> Iterator[Path]:
    """The programs without rows; after a pause again those that still have none and that no process has open.

    Another process makes their data, or it had them open and stopped. Several processes that train as one make no data,
    and do not wait.
    """
    left = list(sweep.programs)
    while left := [place for place in left if place not in rows]:
        yield from left
        left = [
            place for place in left if place not in rows and not records.holder(sweep.programs[place], place)
        ]
        if not left or jax.process_count() > 1:
            return
        time.sleep(_PAUSE)


def _unscored(program: Program, place: Path, error: MetricError, rows: Rows) -> list[dict[str, Any]]:
    """The rows of a program that does not log the metric. Raises the error if no run has a score yet."""
    if not any("score" in row for of_program in rows.values() for row in of_program):
        raise error  # before more is trained for a metric that no run may have
    return [records.row_of(part, place) | {"error": str(error)} for part in program.single_runs()]


def _submit(
    ray: ModuleType, sweep: Sweep, store: Callable[[Rows], None], values: flags.FlagValues, deadline: float
) -> bool:
    """`_train` on a Ray cluster, until a ``deadline`` by `time.time`."""
    rows, whole = records.done(sweep), True
    store(rows)
    left = {place: program for place, program in sweep.programs.items() if place not in rows}
    print(f"{len(left)} programs go to Ray; --status says how far they are")
    ended = cluster.outcomes(ray, left, sweep.metric, sweep.began, values.cpus, values.gpus, deadline)
    for place, kind, answer in ended:
        if kind == cluster.OVER:
            whole = False
            continue
        if kind == cluster.METRIC:
            rows[place] = _unscored(left[place], place, MetricError(answer), rows)
        else:
            lost = [records.row_of(part, place) | {"error": answer} for part in left[place].single_runs()]
            rows[place] = answer if kind == cluster.ROWS else lost
        print(f"{place}: {'; '.join(records.failures(rows[place])[:1]) or 'done'}")
        store(rows)
    return whole


def duration(text: str) -> float:
    """Seconds of ``90s``, ``10m``, ``2h``, ``1d`` or ``1h30m``.

    Raises:
      ValueError: it is none; the message names the flag.
    """
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        raise ValueError(f"--budget={text} is no duration: write 90s, 10m, 2h, 1d or 1h30m")
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(count) * unit[letter] for count, letter in re.findall(r"([\d.]+)([smhd])", text))


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """The runner's flags."""
    layout.define(values)
    flags.adopt_module_key_flags(layout, values)  # --help lists them here, too
    flags.DEFINE_string(
        "budget",
        "",
        "stop cleanly after this time (90s, 10m, 2h, 1h30m) and the epoch then in progress",
        values,
    )
    flags.DEFINE_bool(
        "status", False, "only say what is done, running, failed and how long the rest takes", values
    )
    flags.DEFINE_enum(
        "engine", "", ["", RAY], "ray: programs are tasks of a Ray cluster (extra: ray)", values
    )
    flags.DEFINE_string(
        "ray_address", "auto", "address of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT", values
    )
    flags.DEFINE_float("cpus", 1.0, "CPUs of each program on a Ray cluster", 0.0, flag_values=values)
    flags.DEFINE_float("gpus", 0.0, "GPUs of each program on a Ray cluster", 0.0, flag_values=values)
    flags.DEFINE_bool("overwrite", False, "train all of the sweep again, also what is finished", values)
    flags.DEFINE_bool("dry_run", False, "only print what would run together", values)


if __name__ == "__main__":
    define()
    app.run(config_flags.reporting(main), flags_parser=config_flags.parser(words=1))
