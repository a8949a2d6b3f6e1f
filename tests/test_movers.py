"""rl.envs.movers: its steps by hand, its distances against its steps, and its behaviour."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.envs import movers

KEY = jax.random.key(0)


def test_a_step_moves_the_object_nearest_to_the_place_at_most_so_far_and_not_off_the_table() -> None:
    position = np.float32([[0, 0], [0.5, 0.5], [-0.99, 0]])
    actions = np.float32([[0.1, 0, 0.6, 0.8], [0.4, 0.9, 0, -0.5], [0.5, 0.4, 1, 1], [-1, 0, -1, 0]])
    moved, to = [0, 1, 1, 2], [[0.048, 0.064], [0.5, 0.46], [0.5 + 0.08 / 2**0.5] * 2, [-1, 0]]
    after = movers.step(np.stack([position] * 4), actions)
    expected = np.stack([position] * 4)
    for row in range(4):
        expected[row, moved[row]] = to[row]
    np.testing.assert_allclose(after, expected, atol=1e-6)


def test_no_step_comes_nearer_by_more_than_one_and_the_straight_one_by_just_one() -> None:
    """So that the closed form is the fewest steps; at 0 the goal is reached."""
    count = 200

    @jax.jit
    def play(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        position, goal = (movers.reset(k, count, 3) for k in keys[:2])
        wild = jax.random.uniform(keys[2], (20, count, 4), minval=-1.0, maxval=1.0)
        wild = wild.at[:10, :, :2].set(position[:, 0])  # half of them at an object
        after = movers.steps_between(
            movers.step(jnp.broadcast_to(position, (20, *position.shape)), wild), goal
        )

        def straight(position: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            """The object that is farthest from its place moves toward that."""
            distance = jnp.linalg.norm(goal - position, axis=-1)
            far = jax.nn.one_hot(distance.argmax(-1), 3)[..., None]
            here, away = (far * position).sum(-2), (far * (goal - position)).sum(-2)
            position = movers.step(position, jnp.concatenate([here, away / distance.max(-1)[:, None]], -1))
            return position, (movers.steps_between(position, goal), movers.reached(position, goal))

        _, (left, reached) = jax.lax.scan(straight, position, None, length=100)
        return movers.steps_between(position, goal), after, left, reached

    before, after, left, reached = (np.asarray(x) for x in play(KEY))
    assert (after >= before - 1).all() and (after == before - 1).any()
    np.testing.assert_array_equal(left, np.maximum(before - np.arange(1, 101)[:, None], 0))
    np.testing.assert_array_equal(reached, left == 0)
    assert before.max() > 30


def test_behaviour_takes_one_object_after_another_all_the_way() -> None:
    @jax.jit
    def play(key: jax.Array) -> tuple[movers.Episodes, jax.Array]:
        episodes = movers.behave(key, movers.reset(KEY, 50, 3), 120)
        return episodes, movers.step(episodes.position[:, :-1], episodes.action)

    (position, action), after = jax.device_get(play(KEY))
    assert position.shape == (50, 121, 3, 2) and action.shape == (50, 120, 4)
    assert np.abs(position).max() <= 1 and np.abs(action).max() <= 1
    np.testing.assert_allclose(after, position[:, 1:], atol=1e-6)
    moved = np.linalg.norm(np.diff(position, axis=1), axis=-1)
    assert ((moved > 1e-6).sum(-1) <= 1).all()
    assert (np.abs(moved.max(-1) - movers.SPEED) < 1e-4).mean() > 0.85  # the last step to a place is shorter
    assert (moved.sum(1) > 0).mean() > 0.85  # of nine turns, one at least is each object's
    ends = position[:, -1].reshape(-1, 2)
    assert (np.abs(ends.mean(0)) < 0.15).all() and (np.abs(ends.std(0) - 3**-0.5) < 0.1).all()


def test_entities_have_ids_and_their_positions_come_back() -> None:
    position, ids = movers.reset(KEY, 4, 3), jnp.array([2, 0, 4])
    seen = movers.observe(position, ids, 5)
    assert seen.shape[1:] == movers.spec(3, 5).observation_shape
    np.testing.assert_allclose(movers.positions(seen), position, rtol=1e-6)
    np.testing.assert_array_equal(seen[2, :, 2:], np.eye(5)[ids])
    assert np.abs(np.std(movers.observe(movers.reset(KEY, 9999, 1), ids[:1], 5)[..., :2]) - 1) < 0.02
    with pytest.raises(ValueError, match="4 entities, but ids for 3 only"):
        movers.observe(movers.reset(KEY, 2, 4), jnp.arange(4), 3)
