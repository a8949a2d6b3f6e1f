"""Runs a recipe: many processes, one result. Episodes in, OGBench's files and a card that describes them out."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from rl.data.recipes import pool, storage
from rl.data.recipes.catalogue import Recipe, find
from rl.data.recipes.worker import SPLITS, Chunk

CHUNK_ROWS = 1000  # episodes are grouped into chunks of about this many rows; a chunk is what a stop can lose
PACKAGES = ("ogbench", "mujoco", "dm_control", "gymnasium", "numpy", "scipy")


class Plan(NamedTuple):
    """What is to be made; two equal plans make equal files."""

    recipe: Recipe
    seed: int
    episode_steps: int  # transitions per episode; one row more is stored
    episodes: dict[str, int]  # by split

    @property
    def rows(self) -> int:
        return self.episode_steps + 1

    @property
    def settings(self) -> dict[str, Any]:
        return {"dataset": self.recipe.dataset, "seed": self.seed, "episode_steps": self.episode_steps}

    @property
    def command(self) -> str:
        transitions = self.episodes["train"] * self.episode_steps
        return (
            f"python -m experiments.collect --dataset={self.recipe.dataset} --transitions={transitions}"
            f" --episode_steps={self.episode_steps} --seed={self.seed}"
        )

    def chunks(self) -> list[Chunk]:
        size, name = max(1, CHUNK_ROWS // self.rows), self.recipe.dataset
        return [
            Chunk(name, self.rows, self.seed, split, first, min(first + size, episodes))
            for split, episodes in self.episodes.items()
            for first in range(0, episodes, size)
        ]


def default_folder() -> Path:
    """Return where datasets are kept: ``$HEADWAY_HOME/ogbench``, by default ``~/.headway/ogbench``."""
    return Path(os.environ.get("HEADWAY_HOME") or "~/.headway").expanduser() / "ogbench"


def collect(
    dataset: str,
    *,
    out: str | os.PathLike | None = None,
    transitions: int | None = None,
    seed: int = 0,
    processes: int | None = None,
    episode_steps: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Make ``dataset`` and return the path of its training file, which ``ogbench`` itself can load.

    Writes ``<dataset>.npz``, ``<dataset>-val.npz`` (a further tenth of the episodes, at least one) and the card
    ``<dataset>.json`` into ``out``. Episode i of a split is a function of (seed, split, i) alone: the files do
    not depend on ``processes``, nor on how often the run was stopped and continued. Bits are equal on the same
    machine type with the same packages; the card names the latter. What is there already is not made again.

    Args:
      dataset: a name in ``RECIPES``.
      out: folder of the files; `default_folder` if None.
      transitions: training transitions, rounded up to whole episodes; as published if None.
      seed: non-negative.
      processes: how many to run; the cores this process may use if None.
      episode_steps: transitions per episode; as published if None. Shorter is for trials.
      overwrite: replace files of other settings, and discard unfinished work of other settings.
      progress: show a bar with the time left.

    Raises:
      ValueError: unknown dataset, or a number out of range.
      FileExistsError: files or unfinished work of other settings are in the way.
      ImportError: ``ogbench`` is not installed.
      RuntimeError: a process died, the disk is full, or another run works on the same dataset. Finished chunks
        are kept, and the same call continues.
    """
    plan = _plan(dataset, transitions, seed, episode_steps)
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    folder = Path(out).expanduser() if out is not None else default_folder()
    path = folder / f"{dataset}.npz"
    if _is_finished(plan, folder, overwrite):
        return path
    versions = _versions()
    with _work_folder(plan, folder, versions, overwrite) as work:
        try:
            started = time.perf_counter()
            new_rows = _simulate_all(plan, work, processes or _cores(), progress)
            seconds = time.perf_counter() - started
            _publish(plan, work, folder, versions, new_rows, seconds)
        except (OSError, pool.WorkerError) as error:
            raise RuntimeError(
                f"{error}. Finished chunks are kept in {work}; the same command continues."
            ) from error
        shutil.rmtree(work)
    return path


def read_card(path: Path) -> dict[str, Any]:
    """Return the card beside the training file ``path``, empty if there is none."""
    return _read_json(path.with_suffix(".json"))


def _plan(dataset: str, transitions: int | None, seed: int, episode_steps: int | None) -> Plan:
    recipe = find(dataset)
    steps = recipe.steps if episode_steps is None else episode_steps
    wanted = recipe.episodes * recipe.steps if transitions is None else transitions
    for name, value, least in (("transitions", wanted, 1), ("episode_steps", steps, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    episodes = math.ceil(wanted / steps)
    return Plan(recipe, seed, steps, {"train": episodes, "val": max(1, episodes // 10)})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> dict[str, str]:
    try:
        return {package: importlib.metadata.version(package) for package in PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{error.name} is needed to make data: pip install 'headway[ogbench]'") from error


# What is there already.


def _files(plan: Plan, folder: Path) -> dict[str, Path]:
    name = plan.recipe.dataset
    return {"train": folder / f"{name}.npz", "val": folder / f"{name}-val.npz"}


def _is_finished(plan: Plan, folder: Path, overwrite: bool) -> bool:
    """Whether the planned files are there; raises where others are and must not be overwritten."""
    files = _files(plan, folder)
    wanted = {**plan.settings, "episodes": plan.episodes}
    card = _read_json(folder / f"{plan.recipe.dataset}.json")
    same = all(card.get(key) == value for key, value in wanted.items())
    others = [
        str(file)
        for split, file in files.items()
        if file.exists() and not (same and file.stat().st_size == card["bytes"][split])
    ]
    if others and not overwrite:
        made = {key: card.get(key) for key in wanted}
        unknown = "no card says how they were made"
        differs = f"made with {made}, asked for {wanted}"
        why = "changed since they were made" if same else differs if card else unknown
        raise FileExistsError(
            f"{' and '.join(others)} would be replaced: {why}. Choose another folder with --out, or pass --overwrite."
        )
    return same and not others and all(file.exists() for file in files.values())


def _read_json(path: Path) -> dict[str, Any]:
    """Return what ``path`` holds; nothing where it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


@contextlib.contextmanager
def _work_folder(plan: Plan, folder: Path, versions: dict[str, str], overwrite: bool) -> Iterator[Path]:
    """Open the folder of finished chunks, locked against a second run on the same dataset."""
    work = folder / f".{plan.recipe.dataset}.partial"
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"Another run is making {plan.recipe.dataset} in {folder}. Wait for it."
            ) from error
        wanted = {**plan.settings, "versions": versions}
        note = work / "settings.json"
        begun = _read_json(note) or wanted
        if begun != wanted and not overwrite:
            raise FileExistsError(
                f"{work} holds unfinished work of other settings: {begun}. Asked for: {wanted}. Finish that first, "
                "choose another folder with --out, or discard it with --overwrite."
            )
        if begun != wanted:
            for file in work.iterdir():
                file.unlink()
        with storage.replacing(note) as stream:
            stream.write(json.dumps(wanted).encode())
        yield work
    finally:
        os.close(lock)


# Simulation.


def _simulate_all(plan: Plan, work: Path, processes: int, progress: bool) -> int:
    """Make the chunks that are missing from ``work``; return the rows made."""
    chunks = plan.chunks()
    todo = [chunk for chunk in chunks if not storage.is_whole(chunk.path(work))]
    rows_all, rows_todo = (sum(chunk.total_rows for chunk in group) for group in (chunks, todo))
    with tqdm(
        total=rows_all,
        initial=rows_all - rows_todo,
        desc=plan.recipe.dataset,
        unit="step",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for chunk in pool.run(todo, work, processes):
            bar.update(chunk.total_rows)
    return rows_todo


# The result.


def _publish(
    plan: Plan, work: Path, folder: Path, versions: dict[str, str], new_rows: int, seconds: float
) -> None:
    """Join the chunks into the two files and put them, with the card, into ``folder``."""
    joined, digests = {}, {}
    for split in SPLITS:
        pieces = [chunk.path(work) for chunk in plan.chunks() if chunk.split == split]
        with np.load(pieces[0]) as arrays:
            names = [name for name in arrays.files if name != "counts"]
        joined[split] = work / f"{split}.npz"
        digests[split] = storage.join(pieces, joined[split], names, plan.episodes[split] * plan.rows)
    attempts, reached = _counts([chunk.path(work) for chunk in plan.chunks() if chunk.split == "train"])
    card = {
        "regenerated": True,
        **plan.settings,
        "episodes": plan.episodes,
        "transitions": plan.episodes["train"] * plan.episode_steps,
        "attempts": attempts,
        "reached": reached,
        "command": plan.command,
        "versions": versions,
        "sha256": digests,
        "bytes": {split: path.stat().st_size for split, path in joined.items()},
        "wall_seconds": round(seconds, 3),
        "steps_per_second": round(new_rows / seconds, 1),
        "steps_resumed": sum(plan.episodes.values()) * plan.rows - new_rows,
    }
    # Old files go first and the card comes before the new ones: stopped anywhere in between, the card matches
    # the plan while a file is missing, and the next run continues here.
    files = _files(plan, folder)
    for file in files.values():
        file.unlink(missing_ok=True)
    with storage.replacing(folder / f"{plan.recipe.dataset}.json") as stream:
        stream.write((json.dumps(card, indent=2) + "\n").encode())
    for split in reversed(SPLITS):
        os.replace(joined[split], files[split])


def _counts(pieces: list[Path]) -> tuple[int, int]:
    """Return the attempts and the successes of all episodes in ``pieces``."""
    total = np.zeros(2, np.int64)
    for piece in pieces:
        with np.load(piece) as arrays:
            total += arrays["counts"].sum(axis=0)
    return int(total[0]), int(total[1])
