"""Carries out a plan: many processes, one result. Chunks in, files and a card that describes them out."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl import extras, log
from rl.data import download
from rl.data.recipes import pool, storage
from rl.data.recipes.pool import Chunk
from rl.files import expanded
from rl.machine import usable_cores


class Plan(Protocol):
    """What is to be made; plans with equal ``settings`` and ``size`` make equal files."""

    @property
    def dataset(self) -> str:
        """The dataset's name, after which the card and the folder of unfinished work are called."""

    @property
    def settings(self) -> dict[str, Any]:
        """What every chunk depends on."""

    @property
    def size(self) -> dict[str, Any]:
        """How much is made: unfinished work of another size can be continued."""

    @property
    def files(self) -> Mapping[str, str]:
        """{split: file name}; a user is told of the first."""

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose versions decide the bits."""

    @property
    def extra(self) -> str:
        """The extra of this library that installs them."""

    def chunks(self) -> Sequence[Chunk]:
        """All the work."""

    def join(self, work: Path, joined: Mapping[str, Path], versions: dict[str, str]) -> dict[str, Any]:
        """Write the finished chunks in ``work`` as one file per split; return what the card says of them."""


def default_folder(family: str) -> Path:
    """Return where datasets of a family, ``ogbench`` or ``locomotion``, are kept.

    It is ``$HEADWAY_HOME/<family>``, by default ``~/.headway/<family>``.
    """
    return expanded(os.environ.get("HEADWAY_HOME") or "~/.headway") / family


def run(plan: Plan, folder: Path, *, processes: int | None, overwrite: bool, progress: bool) -> Path:
    """Make what ``plan`` says in ``folder``, unless it is there, and return the path of its first file.

    Args:
      plan: what to make.
      folder: made if missing.
      processes: how many to run; the cores this process may use if None.
      overwrite: replace files of other settings, and discard unfinished work of other settings.
      progress: show a bar with the time left.

    Raises:
      ValueError: ``processes`` is less than 1.
      FileExistsError: files or unfinished work of other settings are in the way.
      ImportError: a package that the plan needs is not installed.
      RuntimeError: a process died, the disk is full, or another run works on the same dataset. Finished chunks
        are kept, and the same call continues.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    files = {split: folder / name for split, name in plan.files.items()}
    path = next(iter(files.values()))
    if _is_finished(plan, files, overwrite):
        return path
    versions = _versions(plan)
    with _work_folder(plan, folder, versions, overwrite) as work:
        try:
            started = time.perf_counter()
            new_rows = _simulate_all(plan, work, processes or usable_cores(), progress)
            seconds = time.perf_counter() - started
            _publish(plan, work, files, versions, new_rows, seconds)
        except (OSError, pool.WorkerError) as error:
            raise RuntimeError(
                f"{error}. Finished chunks are kept in {work}; the same command continues."
            ) from error
        shutil.rmtree(work)
    return path


def read_card(path: Path) -> dict[str, Any]:
    """Return the card beside the training file ``path``, empty if there is none."""
    return _read_json(path.with_suffix(".json"))


def _versions(plan: Plan) -> dict[str, str]:
    try:
        return {package: importlib.metadata.version(package) for package in plan.packages}
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{error.name} is needed to make data: {extras.command(plan.extra)}") from error


# What is there already.


def _is_finished(plan: Plan, files: Mapping[str, Path], overwrite: bool) -> bool:
    """Whether the planned files are there; raises where others are and must not be overwritten."""
    wanted = {**plan.settings, **plan.size}
    card = read_card(next(iter(files.values())))
    same = all(card.get(key) == value for key, value in wanted.items())
    others = [
        str(file)
        for split, file in files.items()
        if file.exists() and not (same and file.stat().st_size == card["bytes"][split])
    ]
    if others and not overwrite:
        stored = {key: card.get(key) for key in wanted}
        unknown = "no card says how they were made"
        differs = f"made with {stored}, asked for {wanted}"
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
    work = folder / f".{plan.dataset}.partial"
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"Another run is making {plan.dataset} in {folder}. Wait for it.") from error
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
        with log.replacing(note) as partial:
            partial.write_text(json.dumps(wanted))
        yield work
    finally:
        os.close(lock)


# Simulation.


def _simulate_all(plan: Plan, work: Path, processes: int, progress: bool) -> int:
    """Make the chunks that are missing from ``work``; return the rows made."""
    chunks = plan.chunks()
    todo = [chunk for chunk in chunks if not storage.is_whole(chunk.path(work))]
    rows_all, rows_todo = (sum(chunk.total_rows for chunk in group) for group in (chunks, todo))
    done = rows_all - rows_todo
    with log.progress(rows_all, plan.dataset, unit="step", initial=done, show=progress) as bar:
        for chunk in pool.run(todo, work, processes):
            bar.update(chunk.total_rows)
    return rows_todo


# The result.


def _publish(
    plan: Plan, work: Path, files: Mapping[str, Path], versions: dict[str, str], new_rows: int, seconds: float
) -> None:
    """Join the chunks into files and put them, with the card, where they belong."""
    joined = {split: work / f"joined-{path.name}" for split, path in files.items()}
    card = {
        "regenerated": True,
        **plan.settings,
        **plan.size,
        **plan.join(work, joined, versions),
        "versions": versions,
        "bytes": {split: path.stat().st_size for split, path in joined.items()},
        "wall_seconds": round(seconds, 3),
        "steps_per_second": round(new_rows / seconds, 1),
        "steps_resumed": sum(chunk.total_rows for chunk in plan.chunks()) - new_rows,
    }
    # Old files go first and the card comes before the new ones: stopped anywhere in between, the card matches
    # the plan while a file is missing, and the next run continues here.
    for file in files.values():
        file.unlink(missing_ok=True)
        download.sidecar(file).unlink(missing_ok=True)  # of a download that it takes the place of
    first = next(iter(files.values()))
    with log.replacing(first.with_suffix(".json")) as partial:
        partial.write_text(json.dumps(card, indent=2) + "\n")
    for split in reversed(list(files)):
        os.replace(joined[split], files[split])
