"""TD(lambda) by drawn lengths: their weights, the rows they make, and in the mean the lambda-returns of rlax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from rl import buffers
from rl.replay import dataset as replay
from rl.replay import frames, ring, traces
from rl.replay.dataset import Dataset
from rl.types import Transition
from rl.values import heads

GAMMA, LAMBDA, N = 0.9, 0.7, 4
LENGTHS = np.arange(1, N + 1)
WEIGHTS = np.where(LENGTHS < N, (1 - LAMBDA) * LAMBDA ** (LENGTHS - 1), LAMBDA ** (LENGTHS - 1))


def log(rows: int = 40) -> Dataset:
    """Episodes that terminate, that time limits cut, and that go on after a termination."""
    rng = np.random.default_rng(0)
    last = rng.random(rows) < 0.25
    last[-1] = True
    state = np.arange(rows, dtype=np.float32)[:, None]
    return Dataset(
        Transition(
            observation=state,
            action=-state,
            reward=rng.normal(size=rows).astype(np.float32),
            discount=np.float32(rng.random(rows) < 0.85),
            next_observation=state + 1,
            next_action=np.where(last[:, None], -state, -state - 1),
            has_next_action=np.float32(~last),
        ),
        last,
    )


def in_ring(dataset: Dataset) -> ring.Ring:
    """Its rows, in a ring that is full."""
    steps = dataset.transitions
    first = np.append(True, dataset.last[:-1] | (steps.discount[:-1] == 0))
    rows = ring.Row(*steps[:5], first)
    return jax.device_put(ring.Ring(rows, np.int32(0), np.int32(len(first))))


def test_lengths_have_the_weights_of_the_lambda_return() -> None:
    draw = jax.jit(traces.lengths, static_argnums=(1, 2, 3))
    drawn = np.asarray(draw(jax.random.key(0), 20_000, N, LAMBDA))
    share = np.bincount(drawn, minlength=N + 1)[1:] / len(drawn)
    np.testing.assert_allclose(share, WEIGHTS, atol=5 * 0.5 / np.sqrt(len(drawn)))
    assert set(np.asarray(draw(jax.random.key(0), 100, N, 0.0))) == {1}
    assert set(np.asarray(draw(jax.random.key(0), 100, N, 1.0))) == {N}


@pytest.mark.slow
def test_rows_over_drawn_lengths_are_those_over_so_many_steps() -> None:
    """Read from a log, a ring and a ring of video frames, each against what it makes of one length for all rows."""
    dataset = jax.device_put(log())
    memory, slots = in_ring(log()), jnp.arange(40)
    video = memory._replace(
        rows=frames.Row(jnp.zeros((40, 2, 2, 1), jnp.uint8), *memory.rows[1:4], memory.rows.first)
    )

    @jax.jit
    def read(lengths: Any) -> tuple[Transition, Transition, Transition]:
        several = replay.over_steps(dataset, slots, lengths, N, GAMMA)
        kept = ring.transitions(memory, slots, N, GAMMA, lengths=lengths)
        return several, kept, frames.transitions(video, slots, 1, N, GAMMA, lengths=lengths)

    for length in LENGTHS.tolist():
        expected = (
            replay.n_step(log(), length, GAMMA).transitions,
            ring.transitions(memory, slots, length, GAMMA),
            frames.transitions(video, slots, 1, length, GAMMA),
        )
        for one, other in zip(read(jnp.full(40, length)), expected, strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@functools.partial(jax.jit, static_argnums=1)
def targets(outputs: Any, head: heads.ValueHead) -> list[heads.Target]:
    """Of every row's returns over 1 to N steps; ``outputs`` [41, K] are the head's of each state."""
    dataset, rows, made = jax.device_put(log()), jnp.arange(40), []
    for length in LENGTHS.tolist():
        steps = replay.over_steps(dataset, rows, jnp.full(40, length), N, GAMMA)
        following = outputs[steps.next_observation[:, 0].astype(int)]
        made.append(head.target(steps.reward, GAMMA * steps.discount, following))
    return made


def lambda_returns(value: np.ndarray) -> np.ndarray:
    """Those of rlax, of the steps from each row on up to N or to the end of its episode, [40].

    After that end steps without a reward stay where they are.
    """
    dataset = log()
    steps, end = dataset.transitions, replay.reach(dataset, N)[:, None]
    row = np.arange(40)[:, None] + np.arange(N)
    inside, row = row <= end, np.minimum(row, end)
    reward, discount = (
        np.where(inside, steps.reward[row], 0),
        np.where(inside, GAMMA * steps.discount[row], 1),
    )
    returns = jax.vmap(lambda *x: rlax.lambda_returns(*x, LAMBDA)[0])
    # What follows a termination is worth nothing, also where it stands for the steps after it.
    return np.asarray(
        returns(reward, discount, np.where(inside | (steps.discount[end] > 0), value[row + 1], 0))
    )


@pytest.mark.slow
def test_labels_have_the_lambda_return_as_their_mean() -> None:
    """The gradient of cross entropy is linear in the label: in the mean over draws it is that of the mean label."""
    for name in ("two_hot", "hl_gauss", "c51"):
        head = heads.make(name, -30.0, 30.0, size=201)
        outputs = 3 * jax.random.normal(jax.random.key(1), (41, head.size))
        label = sum(w * target for w, target in zip(WEIGHTS, targets(outputs, head), strict=True))
        expected = lambda_returns(np.asarray(head.value(outputs)))
        np.testing.assert_allclose(head.value(jnp.log(label + 1e-30)), expected, atol=1e-3, err_msg=name)


def test_the_gradient_of_squared_errors_is_that_of_the_lambda_return() -> None:
    head = heads.make("scalar", 0.0, 1.0)
    outputs = jax.random.normal(jax.random.key(1), (41, 1))
    gradient = jax.jit(jax.grad(lambda q, target: head.loss(q, target).sum()))
    each = [gradient(outputs[:-1], target) for target in targets(outputs, head)]
    expected = gradient(outputs[:-1], lambda_returns(np.asarray(head.value(outputs))))
    np.testing.assert_allclose(sum(w * g for w, g in zip(WEIGHTS, each, strict=True)), expected, atol=1e-5)


def test_views_and_sources_draw_lengths_that_differ_from_row_to_row() -> None:
    """An online run's own rows, and the logged ones beside them; rewards of 1 count the steps."""
    rows = 400
    endless = log(rows)
    ones, never = np.ones(rows, np.float32), np.zeros(rows, bool)
    steps = endless.transitions._replace(reward=ones, discount=ones, has_next_action=ones)
    dataset = jax.device_put(Dataset(steps, never))
    view = buffers.steps(N, 1.0, td_lambda=LAMBDA)
    slots = jnp.arange(rows - N)
    own = jax.jit(view.transitions)(in_ring(Dataset(steps, never)), slots, jax.random.key(0))
    logged = jax.jit(view.logged(rows))(dataset, jax.random.key(0), 0)
    for drawn in (own, logged):
        share = np.bincount(np.asarray(drawn.reward, int), minlength=N + 1)[1:] / len(drawn.reward)
        np.testing.assert_allclose(share, WEIGHTS, atol=5 * 0.5 / np.sqrt(rows))
        np.testing.assert_array_equal(drawn.next_observation[:, 0] - drawn.observation[:, 0], drawn.reward)


def test_a_lambda_of_none_is_refused() -> None:
    for make in (
        lambda: buffers.steps(3, 0.9, td_lambda=1.5),
        lambda: replay.lambda_sampler(2, 3, 0.9, -0.1),
    ):
        with pytest.raises(ValueError, match="must be between 0"):
            make()
