"""A run and its folder: what identifies the run, what it leaves there, and what may be removed or gone on with."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from rl import checkpoint, log
from rl.files import expanded

CHECKPOINTS, CURVE, ROLLOUTS = "checkpoints", "curve.png", "rollouts"
OVERWRITE = "overwrite"  # an empty file in a folder whose run a sweep is to overwrite, until that run starts
UNFINISHED = "unfinished"  # one in a folder that has a result, until what is made after that is there, too

# What every run may leave in its folder, beside its config.json.
_LEAVES = (
    *(log.METRICS, log.RESULT, UNFINISHED, CURVE, CHECKPOINTS, "events.out.tfevents.*"),
    *(f"{ROLLOUTS}/{name}" for name in ("frames.png", "episode*.gif", "*/frames.png", "*/episode*.gif")),
)
_PARTIAL = f".{'[0-9a-f]' * 32}.*"  # what was being written when a process was killed (`log.replacing`)
_NAMED = 5  # of the files that are in a run's way, how many a message names


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
    follows: bool = False  # something is made after the result, pictures say, which ends with `complete`
    task_episodes: int = 0  # of each task, where the episodes of an evaluation are of several; 0: of one
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True
    wandb: bool = False


def folder(workdir: str, task: str, label: str) -> Path:
    """The run folder: as chosen, or by the run's id in a sweep of Weights & Biases, or runs/TASK/LABEL."""
    if workdir:
        return expanded(workdir)
    if "WANDB_SWEEP_ID" in os.environ:
        return Path("runs", "sweeps", os.environ["WANDB_SWEEP_ID"], os.environ["WANDB_RUN_ID"])
    return Path("runs", task, label)


def check_files(run: Run) -> None:
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


def clear(run: Run, *, checkpoints: bool = True) -> None:
    """Removes what an earlier run left in its folder, and nothing else: of a symbolic link the link alone.

    Where there are no ``checkpoints``, their folder stays: it may be a link to another disk.
    """
    if jax.process_index() == 0:
        if log.is_config(run.folder / log.CONFIG):
            kept = () if checkpoints else (run.folder / CHECKPOINTS,)
            left = (*log.wandb_files(run.folder), *run.folder.glob(_PARTIAL), *_left(run))
            for path in (path for path in left if path not in kept):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # Last, so that what is left by a process that dies here is still to be overwritten.
        (run.folder / OVERWRITE).unlink(missing_ok=True)
    multihost_utils.sync_global_devices(f"{run.folder} is clear")


def complete(folder: Path) -> None:
    """All that the run there was asked for has been made; see `Run.follows`."""
    if jax.process_index() == 0:
        (folder / UNFINISHED).unlink(missing_ok=True)


def check_length(run: Run, step: int) -> None:
    """Raises ValueError if ``step`` is one that the run does not get to."""
    count, total = step // run.per_unit, run.total // run.per_unit
    if count > total:
        raise ValueError(
            f"{run.folder} holds a run of {count} {run.unit}, more than --{run.unit}={total}: choose another "
            "--workdir, or --overwrite to start again"
        )


def notes(run: Run, step: int) -> Any:
    """The notes of the checkpoint of ``step``, which has been read; see `rl.checkpoint.save`."""
    return checkpoint.described(run.folder / CHECKPOINTS, step)["notes"]


def versions() -> dict[str, str]:
    """What the last bits depend on: versions of Python and packages, how many devices, of what kind; a CPU's model."""
    hardware = log.hardware()
    # XLA compiles for the processor at hand, and JAX calls each of them "cpu".
    names = ("backend", "device", *["cpu"] * (hardware["backend"] == "cpu"))
    kind = {name: str(hardware[name]) for name in names}
    return log.versions() | kind | {"devices": str(jax.device_count())}


def warn_of_lost_lines(run: Run, step: int) -> bool:
    """Whether metrics.jsonl has fewer lines than were written up to the checkpoint of ``step``; with a warning."""
    held, written = lines_held(run.folder, step), lines_written(run, step) or 0
    if held < written:
        warnings.warn(
            f"{run.folder / log.METRICS} holds {held} of the {written} lines that were written up to {run.unit} "
            f"{step // run.per_unit}: curves lack the others, and a {log.RESULT} that is written from now on "
            "takes the last and the best evaluation from those that are left",
            stacklevel=4,
        )
    return held < written


def lines_written(run: Run, step: int) -> int | None:
    """Lines that were ever written to metrics.jsonl up to the checkpoint of ``step``, if it says so itself.

    None of step 0, at which the file begins again.
    """
    if step == 0:
        return None
    lines: int | None = checkpoint.described(run.folder / CHECKPOINTS, step)["card"].get("lines")
    return lines


def lines_held(folder: Path, step: int) -> int:
    """Lines of metrics.jsonl up to ``step``."""
    with contextlib.suppress(FileNotFoundError):
        return sum(row["step"] <= step for row in log.read(folder))
    return 0
