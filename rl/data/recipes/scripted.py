"""Plans and chunks of OGBench's datasets: episodes of a fixed length, by scripted behaviours."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl.data.recipes import behaviour, manipulation, pointmaze, storage
from rl.data.recipes.behaviour import Actors
from rl.data.recipes.catalogue import RECIPES, Recipe
from rl.data.recipes.episode import Simulate
from rl.files import expanded

SPLITS = ("train", "val")
CHUNK_ROWS = 1000  # episodes are grouped into chunks of about this many rows; a chunk is what a stop can lose


class Chunk(NamedTuple):
    """Consecutive episodes that one process makes and keeps as one file. Does not depend on how many others run."""

    dataset: str
    rows: int  # per episode
    seed: int
    split: str
    first: int  # episode
    last: int  # episode, exclusive
    actors: str | None = None  # file of the walker's policies, in mazes with one; None for those shipped

    @property
    def total_rows(self) -> int:
        return (self.last - self.first) * self.rows

    def path(self, folder: Path) -> Path:
        return folder / f"{self.split}-{self.first:06d}-{self.last:06d}.npz"

    def make(self, folder: Path) -> None:
        """Simulate and write into ``folder``: the arrays of the episodes, and ``counts`` [episodes, 2].

        Episode i of a split is a function of (seed, split, i): neither other episodes nor the process matter.
        """
        simulate = _simulator(self.dataset, self.rows, self.actors)
        split = SPLITS.index(self.split)
        episodes = [
            simulate(np.random.SeedSequence(self.seed, spawn_key=(split, index)))
            for index in range(self.first, self.last)
        ]
        arrays = {
            name: np.concatenate([episode.data[name] for episode in episodes]) for name in episodes[0].data
        }
        counts = np.array([[episode.attempts, episode.reached] for episode in episodes])
        storage.save(self.path(folder), {**arrays, "counts": counts})


@functools.lru_cache(maxsize=1)
def _simulator(dataset: str, rows: int, actors: str | None) -> Simulate:
    """Return this process's simulator: building one takes up to a second."""
    recipe = RECIPES[dataset]
    if "maze" in recipe.env:
        return pointmaze.simulator(recipe, rows, actors)
    return manipulation.simulator(recipe, rows)


class Plan(NamedTuple):
    """See `rl.data.recipes.collector.Plan`."""

    recipe: Recipe
    seed: int
    episode_steps: int  # transitions per episode; one row more is stored
    episodes: dict[str, int]  # by split
    path: str | None = None  # of the walker's policies
    actors: Actors | None = None  # these; None of mazes without a walker, and elsewhere

    @property
    def packages(self) -> tuple[str, ...]:
        return ("ogbench", "mujoco", "dm_control", "gymnasium", "numpy", "scipy")

    @property
    def extra(self) -> str:
        return "ogbench"

    @property
    def dataset(self) -> str:
        return self.recipe.dataset

    @property
    def rows(self) -> int:
        return self.episode_steps + 1

    @property
    def transitions(self) -> int:
        return self.episodes["train"] * self.episode_steps

    @property
    def settings(self) -> dict[str, Any]:
        settings = {"dataset": self.dataset, "seed": self.seed, "episode_steps": self.episode_steps}
        return (
            settings if self.actors is None else settings | {"actors_sha256": behaviour.digest(self.actors)}
        )

    @property
    def size(self) -> dict[str, Any]:
        return {"episodes": self.episodes}

    @property
    def files(self) -> Mapping[str, str]:
        return {"train": self.recipe.file, "val": f"{self.dataset}-val.npz"}

    def chunks(self) -> list[Chunk]:
        size = max(1, CHUNK_ROWS // self.rows)
        return [
            Chunk(self.dataset, self.rows, self.seed, split, first, min(first + size, episodes), self.path)
            for split, episodes in self.episodes.items()
            for first in range(0, episodes, size)
        ]

    def join(self, work: Path, joined: Mapping[str, Path], versions: dict[str, str]) -> dict[str, Any]:
        digests = {}
        for split in SPLITS:
            pieces = [chunk.path(work) for chunk in self.chunks() if chunk.split == split]
            with np.load(pieces[0]) as arrays:
                names = [name for name in arrays.files if name != "counts"]
            digests[split] = storage.join(pieces, joined[split], names, self.episodes[split] * self.rows)
        attempts, reached = _counts([chunk.path(work) for chunk in self.chunks() if chunk.split == "train"])
        command = (
            f"python -m experiments.collect --dataset={self.dataset} --transitions={self.transitions}"
            f" --episode_steps={self.episode_steps} --seed={self.seed}"
        )
        return {
            "transitions": self.transitions,
            "attempts": attempts,
            "reached": reached,
            "command": command if self.path is None else f"{command} --actors={self.path}",
            **({} if self.actors is None else {"actors": self.actors.card}),
            "sha256": digests,
        }


def plan(
    recipe: Recipe,
    transitions: int | None,
    seed: int,
    episode_steps: int | None,
    path: str | os.PathLike | None = None,
) -> Plan:
    """Return what to make; None stands for the published size, and for the actors shipped.

    Raises:
      ValueError: a number out of range, actors where nobody walks, or that do not fit (`behaviour.load`).
    """
    if path is not None and not recipe.is_walked:
        raise ValueError(f"actors are not for {recipe.dataset}: its behaviour is scripted")
    steps = recipe.steps if episode_steps is None else episode_steps
    wanted = recipe.episodes * recipe.steps if transitions is None else transitions
    for name, value, least in (("transitions", wanted, 1), ("episode_steps", steps, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    episodes = math.ceil(wanted / steps)
    splits = {"train": episodes, "val": max(1, episodes // 10)}
    if not recipe.is_walked:
        return Plan(recipe, seed, steps, splits)
    file = None if path is None else str(expanded(path).absolute())
    _simulator.cache_clear()  # another walker may lie in the file than before
    return Plan(recipe, seed, steps, splits, file, behaviour.load(file, pointmaze.WALKER))


def _counts(pieces: list[Path]) -> tuple[int, int]:
    """Return the attempts and the successes of all episodes in ``pieces``."""
    total = np.zeros(2, np.int64)
    for piece in pieces:
        with np.load(piece) as arrays:
            total += arrays["counts"].sum(axis=0)
    return int(total[0]), int(total[1])
