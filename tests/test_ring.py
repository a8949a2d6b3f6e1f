"""rl.replay.ring against a deque that holds the same rows, walked step by step in Python, and against flashbax."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from rl.replay import ring
from rl.types import Transition

GAMMA = 0.9
NUMBER = np.zeros((), np.float32)  # an example row
INSERT = jax.jit(ring.insert)
DRAW = jax.jit(ring.draw, static_argnums=2)
TRANSITIONS = jax.jit(ring.transitions, static_argnums=(2, 4))


def held(memory: ring.Ring) -> list[float]:
    """The rows of a ring of numbers in the order they were written."""
    count, size = int(memory.count), ring.capacity(memory)
    order = (int(memory.head) - count + np.arange(count)) % size
    return np.asarray(memory.rows)[order].tolist()


@pytest.mark.parametrize("capacity", [6, 7, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_it_keeps_the_newest_rows_as_a_deque_does(capacity: int, masked: bool) -> None:
    rng = np.random.default_rng(capacity)
    memory, expected = ring.empty(NUMBER, capacity), deque(maxlen=capacity)
    for time in range(12):
        rows = np.float32(10 * time + np.arange(4))
        valid = rng.random(4) < 0.6 if masked else np.ones(4, bool)
        memory = INSERT(memory, rows, valid) if masked else INSERT(memory, rows)
        expected.extend(rows[valid].tolist())
        assert held(memory) == list(expected)
        assert int(memory.count) == len(expected)


def test_a_block_may_fill_it_but_not_more() -> None:
    memory = ring.empty(NUMBER, 4)
    assert held(INSERT(memory, np.arange(4, dtype=np.float32))) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="block of 5 rows does not fit into a ring of 4"):
        ring.insert(memory, np.arange(5, dtype=np.float32))
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        ring.empty(NUMBER, 0)


def test_draws_are_uniform_over_what_is_held_and_nothing_else() -> None:
    numbers = np.arange(1, 5, dtype=np.float32)
    memory = INSERT(ring.empty(NUMBER, 100), numbers)
    rows = np.asarray(jax.jit(ring.take)(memory, DRAW(memory, jax.random.key(0), 4000)))
    values, counts = np.unique(rows, return_counts=True)
    assert values.tolist() == [1, 2, 3, 4]
    assert (np.abs(counts - 1000) < 5 * np.sqrt(1000 * 0.75)).all()
    full = INSERT(ring.empty(NUMBER, 4), numbers)
    assert set(np.asarray(DRAW(full, jax.random.key(0), 100))) == {0, 1, 2, 3}


def test_a_donated_ring_is_written_in_place() -> None:
    memory = ring.empty(np.zeros(1000, np.float32), 500)
    insert, rows = jax.jit(ring.insert, donate_argnums=0), np.ones((2, 1000), np.float32)
    memory = insert(memory, rows)
    before = memory.rows.unsafe_buffer_pointer()
    assert insert(memory, rows).rows.unsafe_buffer_pointer() == before


# ---- views of several steps ---------------------------------------------------------------------------------------


class Played(NamedTuple):
    """The same interaction in a ring and as a list."""

    memory: ring.Ring
    steps: list[dict[str, Any]]  # what the ring holds, the oldest first; "slot" is where
    environments: int


@functools.cache
def play(capacity: int, environments: int, times: int, seed: int = 0) -> Played:
    """Episodes of random lengths, half of which terminate and half of which are cut."""
    rng = np.random.default_rng(seed)
    observation, number = np.zeros(1, np.float32), np.float32(0)
    row = ring.Row(observation, number, number, number, observation, np.bool_(False))
    memory = ring.empty(row, capacity)
    steps: deque[dict[str, Any]] = deque(maxlen=capacity)
    first, episode, written = np.ones(environments, bool), np.arange(environments) * 1000, 0
    for time in range(times):
        ends, terminates = rng.random(environments) < 0.25, rng.random(environments) < 0.5
        block = []
        for e in range(environments):
            observation = 100 * e + time
            block.append(
                {
                    "environment": e,
                    "time": time,
                    "episode": int(episode[e]),
                    "slot": written % capacity,
                    "observation": [observation],
                    "action": observation + 0.25,
                    "reward": float(rng.normal()),
                    "discount": float(not (ends[e] and terminates[e])),
                    "next_observation": [observation + 0.5],
                    "first": bool(first[e]),
                }
            )
            written += 1
        rows = [
            np.array([step[name] for step in block], bool if name == "first" else np.float32)
            for name in ring.Row._fields
        ]
        memory = INSERT(memory, ring.Row(*rows))
        steps.extend(block)
        first, episode = ends, episode + ends
    return Played(memory, list(steps), environments)


def walk(played: Played, start: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """The step and those that follow it in its episode, at most ``length``."""
    later = [
        step
        for step in played.steps
        if step["episode"] == start["episode"] and start["time"] <= step["time"] < start["time"] + length
    ]
    return sorted(later, key=lambda step: step["time"])


CASES = [(24, 1, 10), (24, 1, 60), (25, 1, 60), (24, 3, 40), (25, 3, 40), (23, 3, 5)]


def test_parts_of_a_dictionary_stay_together() -> None:
    """What is read of them, over two steps, is what is read of one array."""
    memory = jax.device_get(play(24, 3, 40).memory)
    split = lambda x: {"goal": x, "inner": {"next": x + 1}}
    rows = memory.rows._replace(
        observation=split(memory.rows.observation), next_observation=split(memory.rows.next_observation)
    )
    slots = DRAW(memory, jax.random.key(0), 16)
    plain = jax.device_get(TRANSITIONS(memory, slots, 2, GAMMA, 3))
    transitions = TRANSITIONS(memory._replace(rows=rows), slots, 2, GAMMA, 3)
    expected = plain._replace(
        observation=split(plain.observation), next_observation=split(plain.next_observation)
    )
    jax.tree.map(np.testing.assert_array_equal, transitions, expected)


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize(("capacity", "environments", "times"), CASES)
def test_n_step_transitions_end_with_their_episode(
    capacity: int, environments: int, times: int, n: int
) -> None:
    played = play(capacity, environments, times)
    slots = np.array([step["slot"] for step in played.steps])
    transitions = jax.device_get(TRANSITIONS(played.memory, slots, n, GAMMA, environments))
    for i, start in enumerate(played.steps):
        taken, more = walk(played, start, n), walk(played, start, n + 1)
        known = len(more) > len(taken)
        expected = Transition(
            observation=start["observation"],
            action=start["action"],
            reward=sum(GAMMA**k * step["reward"] for k, step in enumerate(taken)),
            discount=GAMMA ** (len(taken) - 1) * taken[-1]["discount"],
            next_observation=taken[-1]["next_observation"],
            next_action=more[-1]["action"] if known else start["action"],
            has_next_action=float(known),
        )
        assert transitions.origin is None  # of one source
        for name, got, want in list(zip(Transition._fields, transitions, expected, strict=True))[:-1]:
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6, err_msg=f"{name} of {start}")


def test_sampled_transitions_are_those_of_the_slots_drawn() -> None:
    played = play(24, 3, 40)
    sampled = jax.jit(ring.sampler(64, 3, GAMMA, 3))(played.memory, jax.random.key(1))
    slots = DRAW(played.memory, jax.random.key(1), 64)
    for one, other in zip(sampled, TRANSITIONS(played.memory, slots, 3, GAMMA, 3), strict=True):
        np.testing.assert_array_equal(one, other)


# ---- flashbax ----------------------------------------------------------------------------------------------------


def test_it_holds_and_draws_what_flashbax_does() -> None:
    flashbax = pytest.importorskip("flashbax")
    blocks, environments, capacity = 30, 2, 16
    theirs = flashbax.make_flat_buffer(capacity, 1, 8, add_batch_size=environments)
    state, memory = jax.jit(theirs.init)({"x": NUMBER}), ring.empty(NUMBER, capacity)
    add = jax.jit(theirs.add)
    for time in range(blocks):
        rows = np.float32(time * environments + np.arange(environments))
        state, memory = add(state, {"x": rows}), INSERT(memory, rows)
    assert sorted(held(memory)) == sorted(np.asarray(state.experience["x"]).ravel().tolist())
    keys = jax.random.split(jax.random.key(0), 64)
    drawn = jax.jit(jax.vmap(lambda key: theirs.sample(state, key).experience))(keys)
    first, second = (np.asarray(x["x"]).ravel() for x in (drawn.first, drawn.second))
    np.testing.assert_array_equal(second, first + environments)  # its pairs are our steps of one environment
    # Both draw every pair that is held, none but those, and equally often.
    row = ring.Row(*[NUMBER] * 5, np.bool_(False))
    steps = ring.empty(row, capacity)
    for time in range(blocks):
        x = np.float32(time * environments + np.arange(environments))
        steps = INSERT(steps, ring.Row(x, x, x, np.ones_like(x), x + environments, np.zeros(2, bool)))
    slots = DRAW(steps, jax.random.key(0), 512)
    pairs = TRANSITIONS(steps, slots, 1, 1.0, environments)
    ours = np.asarray(pairs.observation)[np.asarray(pairs.has_next_action) > 0]
    assert set(ours) == set(first)
    assert abs(np.mean(ours) - np.mean(first)) < 5 * np.std(first) / np.sqrt(256)
