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
    keys, count = jax.random.split(KEY, 5), 200
    position, goal = (movers.reset(key, count, 3) for key in keys[:2])
    before = np.asarray(movers.steps_between(position, goal))
    wild = jax.random.uniform(keys[2], (20, count, 4), minval=-1.0, maxval=1.0)
    wild = wild.at[:10, :, :2].set(position[:, 0])  # half of them at an object
    after = movers.steps_between(movers.step(jnp.broadcast_to(position, (20, *position.shape)), wild), goal)
    assert (after >= before - 1).all() and (after == before - 1).any()
    straight = jax.jit(lambda x: movers.step(x, _towards(x, goal)))
    for left in range(int(before.max()), 0, -1):
        position = straight(position)
        now = np.asarray(movers.steps_between(position, goal))
        np.testing.assert_array_equal(now, np.maximum(before - (before.max() - left + 1), 0))
        np.testing.assert_array_equal(movers.reached(position, goal), now == 0)
    assert before.max() > 30


def _towards(position: jax.Array, goal: jax.Array) -> jax.Array:
    """At the object that is farthest from its place, in the direction of that."""
    away = goal - position
    distance = jnp.linalg.norm(away, axis=-1)
    far = distance.argmax(-1)[..., None, None]
    pick = lambda x: jnp.take_along_axis(x, far, -2)[..., 0, :]
    return jnp.concatenate([pick(position), pick(away) / jnp.maximum(pick(distance[..., None]), 1e-6)], -1)


def test_behaviour_takes_one_object_after_another_all_the_way() -> None:
    episodes = jax.jit(movers.behave, static_argnums=(1, 2, 3))(KEY, 50, 120, 3)
    position, action = np.asarray(episodes.position), np.asarray(episodes.action)
    assert position.shape == (50, 121, 3, 2) and action.shape == (50, 120, 4)
    assert np.abs(position).max() <= 1 and np.abs(action).max() <= 1
    np.testing.assert_allclose(movers.step(position[:, :-1], action), position[:, 1:], atol=1e-6)
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
