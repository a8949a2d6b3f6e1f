"""rl.replay.prioritised against probabilities worked out in float64, and against a deque with priorities."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from rl import buffers
from rl.agents import dqn
from rl.networks.base import Network
from rl.replay import prioritised, ring
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
PUT, TOTAL, PRIORITIES = map(jax.jit, (prioritised.put, prioritised.total, prioritised.priorities))
UPDATE, WEIGHTS = map(jax.jit, (prioritised.update, prioritised.weights))
NUMBER = np.zeros((), np.float32)  # an example row
DRAW = jax.jit(prioritised.draw, static_argnums=2)
INSERT = jax.jit(prioritised.insert, static_argnums=(2, 3))


@partial(jax.jit, static_argnums=1)
def drawn_from(priority: jax.Array, count: int, key: jax.Array = KEY) -> jax.Array:
    return prioritised.draw(prioritised.filled(priority), key, count)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 100])
def test_every_node_is_the_sum_of_its_children(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, expected = prioritised.tree(size), np.zeros(size)
    for _ in range(5):
        index = rng.choice(size, min(size, 7), replace=False)
        value = rng.random(len(index)).astype(np.float32)
        expected[index] = value
        tree = PUT(tree, index, value)
    np.testing.assert_array_equal(PRIORITIES(tree, np.arange(size)), expected.astype(np.float32))
    np.testing.assert_allclose(TOTAL(tree), expected.sum(), rtol=1e-6)
    sums = np.asarray(tree.sums)
    np.testing.assert_array_equal(sums[1 : len(sums) // 2], sums[2::2] + sums[3::2])
    np.testing.assert_array_equal(jax.jit(prioritised.filled)(np.float32(expected)).sums, sums)


def test_equal_indices_leave_a_tree_that_adds_up() -> None:
    tree = PUT(prioritised.tree(4), np.array([1, 1, 1]), np.float32([1, 2, 3]))
    assert float(TOTAL(tree)) == float(PRIORITIES(tree, np.array(1))) > 0


def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    priority = np.array([0.0, 1.0, 2.0, 0.5, 0.0, 4.0, 0.25], np.float32)
    draws = 40_000
    index = np.asarray(drawn_from(priority, draws))
    counts, expected = np.bincount(index, minlength=7), draws * priority / priority.sum()
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize(
    "priority",
    [
        pytest.param(
            np.where(np.arange(4096) == 77, np.finfo(np.float32).tiny, 0.0), id="one, the smallest there is"
        ),
        pytest.param(np.where(np.arange(4096) % 2 == 0, 1.0, 0.0), id="every other one"),
        pytest.param(
            np.where(np.arange(4096) % 64 == 0, 10.0 ** (-(np.arange(4096) % 37)), 0.0), id="many sizes"
        ),
        pytest.param(
            np.where(np.arange(4096) == 4095, 1e-6, np.where(np.arange(4096) < 2048, 1e6, 0.0)),
            id="far apart",
        ),
    ],
)
def test_a_row_of_priority_zero_is_never_drawn(priority: np.ndarray) -> None:
    priority = priority.astype(np.float32)
    index = np.asarray(drawn_from(priority, 200_000))
    assert (priority[index] > 0).all()


@pytest.mark.optimised
def test_small_priorities_beside_large_ones_keep_their_share() -> None:
    """2^20 rows, half of which have a thousandth of the others' priority: their share is 0.0999 %."""
    size = 2**20
    priority = np.where(np.arange(size) % 2 == 0, 1.0, 1e-3).astype(np.float32)
    draws = 2**20
    index = np.asarray(drawn_from(priority, draws))
    expected = draws * 0.5 * 1e-3 / (0.5 + 0.5e-3)
    assert abs((priority[index] < 1).sum() - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("draw", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_random_numbers_reach_no_empty_row(draw: float, monkeypatch) -> None:
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, draw))
    draw_three = jax.jit(lambda priority: prioritised.draw(prioritised.filled(priority), KEY, 3))
    for place in range(8):
        for value in (1.0, np.finfo(np.float32).tiny, 3e38):
            priority = np.where(np.arange(8) == place, value, 0.0).astype(np.float32)
            assert (np.asarray(draw_three(priority)) == place).all()


def test_weights_undo_the_bias_of_the_draws() -> None:
    rng = np.random.default_rng(0)
    rows, priority = rng.normal(size=50).astype(np.float32), rng.uniform(0.1, 3, 50).astype(np.float32)
    memory = INSERT(prioritised.empty(NUMBER, 64), rows)
    memory = UPDATE(memory, np.arange(50), priority)
    slots = np.asarray(DRAW(memory.tree, KEY, 100_000))
    weight = np.asarray(WEIGHTS(memory, slots, 1.0))
    assert weight.max() == 1
    np.testing.assert_allclose((weight * rows[slots]).sum() / weight.sum(), rows.mean(), atol=0.02)
    np.testing.assert_array_equal(WEIGHTS(memory, slots, 0.0), np.ones(100_000))


@pytest.mark.parametrize(("lookahead", "lookback"), [(0, 0), (4, 0), (2, 6), (4, 4)])
def test_new_rows_come_first_and_only_those_that_can_be_read_come_at_all(
    lookahead: int, lookback: int
) -> None:
    capacity, block = 17, 2
    memory, stored = prioritised.empty(NUMBER, capacity), deque(maxlen=capacity)
    for time in range(25):
        rows = np.float32(block * time + np.arange(block))
        memory = INSERT(memory, rows, lookahead, lookback)
        stored.extend(rows)
        drawn = np.asarray(memory.ring.rows)[np.asarray(DRAW(memory.tree, KEY, 500))] if time > 5 else []
        allowed = set(list(stored)[: len(stored) - lookahead])
        if len(stored) == capacity:
            allowed &= set(list(stored)[lookback:])
        assert set(drawn) <= allowed
        if len(stored) == capacity or not lookback:
            assert time <= 5 or set(drawn) == allowed
    memory = UPDATE(memory, np.array([3]), np.float32([7.0]))
    memory = UPDATE(memory, np.array([4]), np.float32([2.0]))  # the highest so far, not the last
    memory = INSERT(memory, np.zeros(block, np.float32), lookahead, lookback)
    new = (int(memory.ring.head) - 1 - lookahead - np.arange(block)) % capacity
    assert (np.asarray(PRIORITIES(memory.tree, new)) == 7).all()


def test_a_ring_with_priorities_holds_what_a_ring_holds() -> None:
    row = np.zeros(2, np.float32)
    memory, plain, insert = prioritised.empty(row, 5), ring.empty(row, 5), jax.jit(ring.insert)
    for time in range(4):
        rows = np.full((3, 2), time, np.float32)
        memory, plain = INSERT(memory, rows), insert(plain, rows)
    jax.tree.map(np.testing.assert_array_equal, memory.ring, plain)


def test_the_loop_draws_by_powers_of_priorities_and_takes_their_bias_out() -> None:
    """A learner whose rows are worth their reward; after an update of all rows, weights are one over the power."""

    def weighted(state: State, batch: Transition, weight: Any, key: Any) -> tuple[State, Any, Any]:
        even = weight * batch.reward**0.5  # constant with exponent 0.5 and correction 1
        seen = {"least": even.min(), "most": even.max()}
        return state._replace(step=state.step + 1), seen, state.params["sign"] * batch.reward

    learner = Learner(lambda *_: None, lambda *_: None, lambda *_: None, weighted=weighted)
    replay = buffers.prioritised_memory(learner, buffers.steps(), 4, 64, exponent=0.5, correction=1.0)
    reward = np.float32([1, 4, 9, 16])
    row = np.zeros((4, 1), np.float32)
    rows = ring.Row(row, row, reward, np.ones(4, np.float32), row, np.ones(4, bool))

    @jax.jit
    def run(key: jax.Array, sign: int = 1) -> tuple[Any, Any]:
        memory = replay.insert(replay.empty(jax.tree.map(lambda x: x[0], rows)), rows)
        state = State({"sign": sign}, {}, {}, jnp.zeros((), jnp.int32))
        rest, marks = replay.split(memory)
        state, marks, _ = replay.learn(1)(state, rest, marks, None, key)
        report = replay.learn(1)(state, rest, marks, None, key)[2]
        return prioritised.priorities(marks[0], jnp.arange(4)), report.metrics

    priority, metrics = jax.device_get(run(KEY))
    np.testing.assert_allclose(priority, reward**0.5, rtol=1e-5)
    np.testing.assert_allclose(metrics["least"], metrics["most"], rtol=1e-5)
    assert np.isnan(jax.device_get(run(KEY, -1))[1]["least"])  # by which nothing can be drawn


def test_chunks_of_actions_are_refused() -> None:
    """They were drawn where they are cut, and the learner began with single actions."""
    learner = Learner(lambda *_: None, lambda *_: None, lambda *_: None, weighted=lambda *_: None)
    with pytest.raises(
        ValueError, match="draws single steps, not chunks of 3 actions: keep chunks in uniform"
    ):
        buffers.prioritised_memory(learner, buffers.chunked(3, 0.99), 10, 4, 0.5, 0.5)


# ---- what an update is worth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", heads.NAMES)
def test_the_priority_of_a_row_is_how_far_it_is_from_its_target(name: str, monkeypatch) -> None:
    """Row 0 is fitted perfectly, the others are off by 0.4 and 4; the loss itself includes the target's entropy."""
    head = heads.make(name, -10.0, 10.0, 21)
    reward, zeros = np.float32([1.2, 1.6, 5.2]), np.zeros(3, np.float32)
    nothing = np.zeros((3, head.size), np.float32)
    target = np.asarray(jax.jit(head.target)(reward, zeros, nothing), np.float64)
    fitted = np.float32(target[0] if head.are_values else np.log(np.maximum(target[0], 1e-30))).reshape(-1)
    table = Network(
        lambda key, seen: jnp.asarray(fitted),
        lambda params, seen: jnp.stack([jnp.stack([params] * 2)] * len(seen)),
    )
    monkeypatch.setattr(dqn.mlp, "action_values", lambda *_: table)
    learner = dqn.make(dqn.Config(), Spec((1,), 2, discrete=True), head)
    seen, action = np.zeros((3, 1), np.float32), np.zeros(3, np.int32)
    batch = Transition(seen, action, reward, zeros, seen, action, zeros)
    weighted = learner.weighted
    assert weighted is not None

    @jax.jit
    def update(key: jax.Array) -> tuple[Any, ...]:
        each = head.loss(jnp.stack([fitted] * 3), jnp.float32(target))
        return *weighted(learner.init(key, batch), batch, jnp.float32([2, 3, 5]), key)[1:], each

    metrics, priority, each = jax.device_get(update(KEY))
    np.testing.assert_allclose(metrics["critic_loss"], np.mean(np.float32([2, 3, 5]) * each), rtol=1e-5)
    if head.are_values:
        np.testing.assert_allclose(priority, each, rtol=1e-6)  # two programs, which may round differently
    else:
        output = softmax(np.float64(fitted))
        np.testing.assert_allclose(priority, rel_entr(target, output).sum(-1), rtol=1e-4, atol=1e-6)
        assert metrics["critic_loss"] > priority.mean() + 0.05  # what is minimised is still cross-entropy
    assert 0 <= priority[0] < 1e-6 and priority[1] > 0.01 and priority[2] > priority[1]
