"""What one simulated episode is, and the seeding that makes it a function of its seed alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Episode(NamedTuple):
    """One episode in OGBench's layout: row t holds the state before action t; the last row is terminal.

    ``data`` maps observations [rows, O], actions [rows, D], qpos [rows, Q], qvel [rows, V] (float32), terminals
    [rows] (bool) and, where the environment has buttons, button_states [rows, buttons] (int64).
    """

    data: dict[str, np.ndarray]
    attempts: int  # goals or subtasks that came to an end within the episode, reached or given up
    reached: int  # how many of them the environment counted as a success


Simulate = Callable[[np.random.SeedSequence], Episode]


def buffers(rows: int, *, observation: int, action: int, qpos: int, qvel: int) -> dict[str, np.ndarray]:
    """Return the empty arrays of one episode; only ``terminals`` is filled in."""
    return {
        "observations": np.empty((rows, observation), np.float32),
        "actions": np.empty((rows, action), np.float32),
        "terminals": np.arange(rows) == rows - 1,
        "qpos": np.empty((rows, qpos), np.float32),
        "qvel": np.empty((rows, qvel), np.float32),
    }


@contextlib.contextmanager
def seeded(seed: np.random.SeedSequence) -> Iterator[np.random.Generator]:
    """Yield a generator for ``seed``, with NumPy's global one, from which OGBench draws, seeded too.

    The caller's global generator is put back afterwards.
    """
    rng = np.random.default_rng(seed)
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(rng.integers(2**32, size=4))  # noqa: NPY002
    try:
        yield rng
    finally:
        np.random.set_state(before)  # noqa: NPY002


def draw_seed(rng: np.random.Generator) -> int:
    """Return a seed for an environment or a space."""
    return int(rng.integers(2**31))
