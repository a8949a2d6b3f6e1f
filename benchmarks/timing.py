"""How long calls take: all of them in turn, round after round, so that what slows the machine slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Seconds = list[list[float]]  # [call][round]


def measure(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    after: Callable[[int, Seconds], Any] = lambda number, seconds: None,
) -> Seconds:
    """Seconds of every call in ``repeats`` rounds, which follow one that compiles programs and fills caches.

    Args:
      calls: each must have its result ready when it returns (`jax.block_until_ready`).
      repeats: rounds that count.
      after: is told of every round that is over by its number and all seconds so far; there are none after round 0.
    """
    seconds: Seconds = [[] for _ in calls]
    for number in range(1 + repeats):
        for call, times in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            call()
            if number:
                times.append(time.perf_counter() - began)
        after(number, seconds)
    return seconds
