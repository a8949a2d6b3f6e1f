"""rl.envs.minatar: the games are those of gymnax, and their actions stick."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import envs
from rl.envs import minatar

gymnax = pytest.importorskip("gymnax")


def test_a_game_is_the_one_of_gymnax_seen_as_a_vector() -> None:
    game = minatar.make("Breakout-MinAtar")
    environment, params = gymnax.make("Breakout-MinAtar")
    assert game.spec == ((400,), 3, True)
    keys = jax.random.split(jax.random.key(0), 2)
    seen, state = game.reset(keys)
    plain = environment.reset(keys[1], params)[0]
    assert seen.dtype == jnp.uint8
    np.testing.assert_array_equal(seen[1], np.asarray(plain).ravel())
    stepping = jax.jit(game.step)
    ended = 0
    for number in range(40):  # nobody moves: the ball is lost before that
        keys = jax.random.split(jax.random.key(number), 2)
        made = stepping(keys, state, jnp.zeros(2, jnp.int32))
        state = made.state
        np.testing.assert_array_equal(made.terminated, made.first)  # far from the time limit
        same = (made.next_observation == made.observation).all(1)
        assert (same | made.first).all()  # what is remembered is not the next episode's start
        ended += int(made.first.sum())
    assert ended


def test_a_game_on_the_host_shows_the_cells_that_learners_on_the_device_see() -> None:
    """And not a 255th of them, as of bytes."""
    env = envs.make("gymnax/Breakout-MinAtar")
    observation, _ = env.reset(seed=0)
    assert observation.dtype == np.float32 and np.unique(observation).tolist() == [0.0, 1.0]


@pytest.mark.slow
def test_actions_are_sticky() -> None:
    """The paddle of Breakout goes where it is told to, but for one step in ten."""
    game = minatar.make("Breakout-MinAtar")
    count = 4000
    seen, world = game.reset(jax.random.split(jax.random.key(0), count))
    keys = jax.random.split(jax.random.key(1), count)
    right = jnp.full(count, 2, jnp.int32)
    made = game.step(keys, world, right)
    after, ended = made.observation, made.first
    paddle = lambda cells: np.asarray(cells).reshape(count, 10, 10, -1)[..., 0].argmax(2)[:, -1]
    moved = (paddle(after) != paddle(seen))[~np.asarray(ended)]
    assert abs(moved.mean() - (1 - 0.1)) < 0.02
