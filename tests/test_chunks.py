"""rl.replay.chunks and what a ring reads in chunks, against a walk along the log step by step in Python."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl import acting, agents, buffers
from rl.replay import chunks, ring
from rl.replay.dataset import Dataset, value_bounds
from rl.types import Spec, Transition
from rl.values import heads

GAMMA, WITHIN = 0.9, 0.6  # of values, and of rewards within a chunk
TAKE = jax.jit(chunks.take)
INSERT = jax.jit(ring.insert)
READ = jax.jit(ring.action_chunks, static_argnums=(2, 4))
WHOLE = jax.jit(ring.whole, static_argnums=(2, 3))
DRAW = jax.jit(ring.draw_whole, static_argnums=(2, 3, 4))


def log(reward: Any, discount: Any, last: Any) -> Dataset:
    """Observations say which row they are of, and what comes after it; the actions of a row are 10 and 11 times it."""
    row = np.arange(len(last), dtype=np.float32)
    last = np.asarray(last, bool)
    action = row[:, None] * np.float32([10, 11])
    after = np.minimum(row + 1, len(row) - 1).astype(int)
    return Dataset(
        Transition(
            observation=row[:, None],
            action=action,
            reward=np.float32(reward),
            discount=np.float32(discount),
            next_observation=row[:, None] + 0.5,
            next_action=np.where(last[:, None], action, action[after]),
            has_next_action=np.float32(~last),
        ),
        last,
    )


def walk(dataset: Dataset, row: int, length: int) -> dict[str, Any] | None:
    """The chunk from a row on; None if a time limit cuts it."""
    steps, total, weight, end = dataset.transitions, 0.0, 1.0, row
    for taken in range(1, length + 1):
        total += weight * steps.reward[end]
        weight *= WITHIN
        if steps.discount[end] == 0 or taken == length:
            break
        if dataset.last[end]:
            return None
        end += 1
    actions, place = [], row
    for _ in range(length):
        actions.extend(steps.action[place])
        place += not dataset.last[place]
    return {
        "action": actions,
        "reward": total,
        "discount": GAMMA ** (end - row) * steps.discount[end],
        "next_observation": [end + 0.5],
        "whole": end - row == length - 1 and not dataset.last[end],
        "end": end,
    }


def check(batch: Transition, index: int, dataset: Dataset, row: int, length: int) -> None:
    chunk = walk(dataset, row, length)
    assert chunk is not None
    following = walk(dataset, chunk["end"] + 1, length) if chunk["whole"] else None
    expected = {
        **{name: chunk[name] for name in ("action", "reward", "discount", "next_observation")},
        "observation": [row],
        "next_action": following["action"] if following else chunk["action"],
        "has_next_action": float(following is not None),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(batch, name)[index], value, rtol=1e-5, atol=1e-6, err_msg=name)


logs = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0, 1, 1, 1]), st.booleans()), min_size=4)


@settings(deadline=None, max_examples=60)
@given(logs, st.integers(1, 5), st.booleans())
@pytest.mark.slow
def test_chunks_of_a_log_are_those_of_a_walk_along_it(rows: list[Any], length: int, cut: bool) -> None:
    """Successes inside episodes, terminations and time limits, with a discount of their own for rewards.

    Where ``cut``, the last step of an episode knows its next action, which was logged and left out.
    """
    reward, discount, last = (np.array(column) for column in zip(*rows, strict=True))
    last[-1] = True
    dataset = log(reward, discount, last)
    if cut:
        dataset.transitions.has_next_action[:] = 1
    longest = np.diff(np.flatnonzero(last), prepend=-1).max()
    if length > longest:
        with pytest.raises(ValueError, match=f"--chunk={length} is longer than every episode.* {longest} st"):
            chunks.make(dataset, length, GAMMA)
        return
    log_chunks = chunks.make(dataset, length, GAMMA, WITHIN)
    drawn = [row for row in range(len(last)) if walk(dataset, row, length)]
    assert log_chunks.starts.tolist() == drawn
    batch = chunks.take(log_chunks, np.array(drawn))  # not compiled: each log has another size
    for index, row in enumerate(drawn):
        check(batch, index, dataset, row, length)


def steps() -> Dataset:
    """Episodes of 7 steps: one is cut, one terminates, one goes on after a success."""
    last = np.arange(21) % 7 == 6
    discount = np.ones(21)
    discount[[13, 16]] = 0
    return log(np.arange(21), discount, last)


def test_draws_are_uniform_over_what_is_whole_and_nothing_else() -> None:
    log_chunks = jax.device_put(chunks.make(steps(), 3, GAMMA))
    batch = jax.jit(chunks.sampler(4000))(log_chunks, jax.random.key(0))
    rows, counts = np.unique(batch.observation[:, 0], return_counts=True)
    assert rows.tolist() == [row for row in range(21) if row not in (5, 6, 19, 20)]  # of time limits
    assert (np.abs(counts - 4000 / 17) < 5 * np.sqrt(4000 / 17)).all()


@pytest.mark.parametrize("stride", [1, 2])
def test_a_ring_reads_the_chunks_that_a_log_of_the_same_steps_has(stride: int) -> None:
    """Where no episode goes on after a success; the end of the ring cuts as a time limit does."""
    dataset, length = steps(), 3
    dataset.transitions.discount[16] = 1
    log_chunks = chunks.make(dataset, length, GAMMA, WITHIN)
    rows = ring.Row(*dataset.transitions[:5], np.r_[True, dataset.last[:-1]])
    memory = ring.empty(jax.tree.map(lambda x: x[0], rows), 21 * stride + 1)
    # Another environment beside it, if there is one, is one step behind.
    for time in range(21):
        block = jax.tree.map(lambda x, t=time: np.stack([np.roll(x, i, 0)[t] for i in range(stride)]), rows)
        memory = INSERT(memory, block)
    slots = stride * log_chunks.starts
    whole = WHOLE(memory, stride * np.arange(21), length, stride)
    assert np.flatnonzero(whole).tolist() == log_chunks.starts.tolist()
    batch = READ(memory, slots, length, GAMMA, stride, WITHIN)
    for name, a, b in zip(
        Transition._fields, batch, TAKE(jax.device_put(log_chunks), log_chunks.starts), strict=True
    ):
        if name != "origin":
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
    drawn = DRAW(memory, jax.random.key(0), 3000, length, stride)
    assert np.asarray(WHOLE(memory, drawn, length, stride)).all()
    slots, counts = np.unique(drawn, return_counts=True)
    expected = 3000 / len(slots)
    assert len(slots) >= len(log_chunks.starts) and (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_the_view_of_an_online_run_passes_on_all_that_it_is_told() -> None:
    """Of two environments by turns, whose episodes are of ten steps, with a discount of their own for rewards."""
    time = np.arange(20, dtype=np.float32)
    seen = np.stack([np.repeat(time, 2), np.tile([0.0, 1.0], 20)], 1).astype(np.float32)
    one, first = np.ones(40, np.float32), np.repeat(time % 10 == 0, 2)
    rows = ring.Row(seen, seen[:, :1], one, one, seen + np.float32([1, 0]), first)
    memory, slots, key = ring.Ring(rows, np.int32(0), np.int32(40)), np.array([0, 1, 5, 8]), jax.random.key(0)
    view = buffers.chunked(3, GAMMA, environments=2, reward_discount=WITHIN)
    both = jax.jit(view.transitions)(memory, slots, key), READ(memory, slots, 3, GAMMA, 2, WITHIN)
    jax.tree.map(np.testing.assert_array_equal, *both)
    drawn = jax.jit(view.draw, static_argnums=2)(memory, key, 20)
    np.testing.assert_array_equal(drawn, DRAW(memory, key, 20, 3, 2))


def test_a_memory_without_a_whole_chunk_is_an_error() -> None:
    """Of environments whose time limit nobody knows: both seeds are asked, and a termination makes a chunk whole."""
    time = np.arange(20)
    one, unended = np.zeros((2, 20, 1), np.float32), np.ones((2, 20), np.float32)
    rows = ring.Row(one, one, unended, unended, one, np.stack([time % 2 == 0, time % 4 == 0]))
    cut = ring.Ring(rows, np.int32(0), np.int32(20))  # after two steps, and after four
    buffers.check_chunks(buffers.chunked(2, GAMMA), cut)
    with pytest.raises(
        ValueError,
        match=r"none of the episodes that are remembered had 3 steps or terminated.* take shorter chunks",
    ):
        buffers.check_chunks(buffers.chunked(3, GAMMA), cut)
    terminated = unended.copy()
    terminated[0, 3] = 0
    ended = cut._replace(rows=rows._replace(discount=terminated))
    buffers.check_chunks(buffers.chunked(4, GAMMA), ended)
    with pytest.raises(ValueError, match="had 5 steps"):  # of the other seed
        buffers.check_chunks(buffers.chunked(5, GAMMA), ended)


def test_bounds_hold_the_fixed_point_of_two_discounts() -> None:
    """A reward of -1 for ever is worth -(1 - g1^H) / (1 - g1) / (1 - g2^H), wherever time limits cut it."""
    endless = log(-np.ones(40), np.ones(40), np.arange(40) % 20 == 19)
    low, high = chunks.value_bounds(endless, 8, 0.999, 0.9)
    exact = -(1 - 0.9**8) / (1 - 0.9) / (1 - 0.999**8)
    np.testing.assert_allclose((low, high), (exact - 0.5, exact + 0.5), rtol=1e-12)
    # With one discount for both they are those of single steps: here both logged returns, and their span.
    one = log([0, 0, 0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 0, 1])
    np.testing.assert_allclose(chunks.value_bounds(one, 2, 0.9, 0.9), value_bounds(one, 0.9), rtol=1e-6)
    with pytest.raises(ValueError, match=r"--chunk=7 is longer than every episode.* \(length=6\)"):
        chunks.value_bounds(one, 7, 0.999, 0.9)


def test_integer_actions_have_no_chunks() -> None:
    assert chunks.spec(Spec((3,), 2), 4).action_size == 8
    with pytest.raises(ValueError, match=r"--chunk=4: chunks are of continuous .* \(length=1\)"):
        chunks.spec(Spec((3,), 2, True), 4)


@pytest.mark.parametrize("agent", ["bc", "cqn", "fql", "ifql", "iql", "rebrac", "td3_bc"])
def test_agents_learn_from_chunks_and_act_in_single_actions(agent: str) -> None:
    """By shapes: of their networks, of what they are told, and of what they do."""
    module, spec, length = agents.get(agent), Spec((1,), 2), 3
    sizes = {"hidden": (8,), "flow_steps": 2, "candidates": 2, "levels": 1, "bins": 3, "features": 4}
    known = {field.name for field in dataclasses.fields(module.Config)}
    config = module.Config(**{name: value for name, value in sizes.items() if name in known})
    learner = module.make(config, chunks.spec(spec, length), heads.scalar())
    batch = chunks.take(chunks.make(steps(), length, GAMMA), np.arange(4))
    key, seen, first = jax.random.key(0), np.zeros((4, 1), np.float32), np.ones(4, bool)

    def everything() -> Any:
        state = learner.init(key, batch)
        after, _ = learner.update(state, batch, key)
        actor = acting.actor(acting.in_chunks(learner, spec, length))
        values = learner.critics(state, batch.observation, batch.action) if learner.critics else None
        return state, after, actor.act(state, actor.start(state, seen), seen, first, key), values

    state, after, (action, (plan, _)), values = jax.eval_shape(everything)
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, after)
    assert (action.shape, plan.shape) == ((4, 2), (4, length, 2))
    assert values is None or values.shape[1:] == (4,)
