"""One simulating process: chunks of episodes in, one file per chunk out. Also usable in the calling process."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rl.data.recipes import manipulation, pointmaze, storage
from rl.data.recipes.catalogue import find
from rl.data.recipes.episode import Simulate

DONE = "done"
SPLITS = ("train", "val")


class Chunk(NamedTuple):
    """Consecutive episodes that one process makes and keeps as one file. Does not depend on how many others run."""

    dataset: str
    rows: int  # per episode
    seed: int
    split: str
    first: int  # episode
    last: int  # episode, exclusive

    @property
    def total_rows(self) -> int:
        return (self.last - self.first) * self.rows

    def path(self, folder: Path) -> Path:
        return folder / f"{self.split}-{self.first:06d}-{self.last:06d}.npz"


def make(chunk: Chunk, folder: Path) -> None:
    """Simulate ``chunk`` and write it into ``folder``: the arrays of its episodes, and ``counts`` [episodes, 2].

    Episode i of a split is a function of (seed, split, i): neither other episodes nor the process matter.
    """
    simulate = _simulator(chunk.dataset, chunk.rows)
    split = SPLITS.index(chunk.split)
    episodes = [
        simulate(np.random.SeedSequence(chunk.seed, spawn_key=(split, index)))
        for index in range(chunk.first, chunk.last)
    ]
    arrays = {name: np.concatenate([episode.data[name] for episode in episodes]) for name in episodes[0].data}
    counts = np.array([[episode.attempts, episode.reached] for episode in episodes])
    storage.save(chunk.path(folder), {**arrays, "counts": counts})


@functools.lru_cache(maxsize=1)
def _simulator(dataset: str, rows: int) -> Simulate:
    """Return this process's simulator: building one takes up to a second."""
    recipe = find(dataset)
    family = pointmaze if recipe.env.startswith("pointmaze") else manipulation
    return family.simulator(recipe, rows)


def serve(folder: Path) -> None:
    """Make each chunk read as JSON from a line of stdin, answering each with a line: ``DONE`` or what went wrong.

    Ends when stdin does, and so also when the parent process was killed.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(
        sys.stderr.fileno(), sys.stdout.fileno()
    )  # what a simulator prints must not be taken for an answer
    for line in sys.stdin:
        try:
            make(Chunk(*json.loads(line)), folder)
            answer = DONE
        except Exception as error:
            if not isinstance(error, OSError):  # a full disk needs no traceback
                traceback.print_exc()
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, file=answers, flush=True)
