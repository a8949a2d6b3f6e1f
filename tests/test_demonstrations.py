"""rl.replay.demonstrations against a deque of rows that a Python loop marks, episode by episode."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.replay import demonstrations


@pytest.mark.slow
def test_the_steps_of_an_episode_are_marked_until_they_are_overwritten() -> None:
    """Episodes of random lengths, some longer than the ring; half of them succeed, several at once too."""
    rng, capacity, environments = np.random.default_rng(0), 17, 3
    memory = demonstrations.empty(jnp.zeros(()), capacity)
    buffer: deque[dict[str, Any]] = deque(maxlen=capacity)
    episode, lengths = np.arange(environments) * 1000, np.zeros(environments, np.int32)
    ever, together, cut = 0, 0, 0

    @jax.jit
    def advance(memory: demonstrations.Memory, rows: Any, lengths: Any) -> Any:
        memory = demonstrations.mark(demonstrations.insert(memory, rows), lengths)
        return memory, demonstrations.draw(memory, jax.random.key(0), 64)

    for time in range(120):
        rows = np.float32(1 + time * environments + np.arange(environments))
        buffer.extend({"row": row, "episode": episode[e], "marked": False} for e, row in enumerate(rows))
        lengths += 1
        joins = (rng.random(environments) < 0.15) & (rng.random(environments) < 0.5)
        for e in np.flatnonzero(joins):
            steps = [step for step in buffer if step["episode"] == episode[e]]
            cut += len(steps) < lengths[e]
            for step in steps:
                step["marked"] = True
        memory, drawn = advance(memory, rows, np.where(joins, lengths, 0).astype(np.int32))
        lengths = np.where(joins | (rng.random(environments) < 0.05), 0, lengths)
        episode = episode + (lengths == 0)
        held = np.asarray(memory.ring.rows)
        slots = np.array([np.flatnonzero(held == step["row"])[0] for step in buffer])
        expected = [step["marked"] for step in buffer]
        assert np.asarray(demonstrations.is_marked(memory, slots)).tolist() == expected
        assert demonstrations.count(memory) == sum(expected)
        if any(expected):
            assert {*held[np.asarray(drawn)]} <= {step["row"] for step in buffer if step["marked"]}
        ever, together = ever + joins.sum(), together + (joins.sum() > 1)
    assert ever > 5 and cut > 0 and together > 0


@pytest.mark.slow
def test_draws_are_uniform_over_the_marked_rows() -> None:
    memory = demonstrations.insert(demonstrations.empty(jnp.zeros(()), 10), jnp.zeros(8))
    memory = demonstrations.mark(memory, jnp.array([0, 1, 1, 0, 0, 0, 0, 5]))  # of the last there is one only
    assert np.flatnonzero(demonstrations.is_marked(memory, jnp.arange(10))).tolist() == [1, 2, 7]
    slots = np.asarray(demonstrations.draw(memory, jax.random.key(0), 3000))
    values, counts = np.unique(slots, return_counts=True)
    assert values.tolist() == [1, 2, 7] and (np.abs(counts - 1000) < 5 * np.sqrt(1000 * 2 / 3)).all()
