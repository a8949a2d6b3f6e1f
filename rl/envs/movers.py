"""Movers: objects on a table that are moved one at a time, in pure JAX, with distances that are known.

``N`` objects lie in the square [-1, 1]^2. An action is a place and a direction: the object nearest to the place moves
by `SPEED` times the direction, whose length counts up to 1. Objects pass through each other. So the fewest steps from
one arrangement to another have a closed form (`steps_between`), and what a value function says of a goal, or a planner
of a subgoal, can be compared with the truth.

An observation is a set of entities (`rl.networks.entity`): positions in units of their deviation, then one-hot ids.
The idea is that of the push-style tasks of HECRL (2026); the world is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.networks import entity
from rl.types import Array, Key, Spec

SPEED = 0.08  # of an object, in a step
TOLERANCE = 0.1  # how far from its place of a goal an object may be
SCALE = 3**0.5  # of positions in observations: those drawn uniformly then have deviation 1

_POINTING = 0.05  # deviation of where behaviour points from the object that it moves


def spec(objects: int, slots: int) -> Spec:
    """Of observations [objects, 2 + slots]; see `observe`."""
    return Spec((objects, 2 + slots), 4)


def reset(key: Key, count: int, objects: int) -> Array:
    """Positions [count, objects, 2], uniform: starts and goals."""
    return jax.random.uniform(key, (count, objects, 2), minval=-1.0, maxval=1.0)


def step(position: Array, action: Array) -> Array:
    """Positions [..., N, 2] after actions [..., 4]."""
    place, direction = jnp.split(action, 2, -1)
    direction = direction / jnp.maximum(jnp.linalg.norm(direction, axis=-1, keepdims=True), 1.0)
    nearest = jnp.linalg.norm(position - place[..., None, :], axis=-1).argmin(-1)
    moves = jax.nn.one_hot(nearest, position.shape[-2])[..., None]
    return (position + SPEED * moves * direction[..., None, :]).clip(-1.0, 1.0)


def reached(position: Array, goal: Array) -> Array:
    """[...] bool: all objects are where the goal [..., N, 2] has them."""
    return (_steps(position, goal) == 0).all(-1)


def steps_between(position: Array, goal: Array) -> Array:
    """The fewest steps [...] float32 until the goal [..., N, 2] is reached: those of all objects, one after another."""
    return _steps(position, goal).sum(-1)


def _steps(position: Array, goal: Array) -> Array:
    """Of each object [..., N]; a little more than the tolerance is within it, for rounding."""
    away = jnp.linalg.norm(position - goal, axis=-1) - TOLERANCE
    return jnp.ceil(away / SPEED - 1e-4).clip(0.0)


def observe(position: Array, ids: Array, slots: int) -> Array:
    """Entities [..., N, 2 + slots] at positions [..., N, 2] with ids [..., N] int32 below ``slots``.

    Raises:
      ValueError: there are more objects than slots.
    """
    return entity.with_ids(SCALE * position, ids, slots)


def positions(entities: Array) -> Array:
    """Positions [..., N, 2] of entities [..., N, F]."""
    return entities[..., :2] / SCALE


class Episodes(NamedTuple):
    """``E`` logged episodes of ``T`` steps."""

    position: Array  # [E, T + 1, N, 2]
    action: Array  # [E, T, 4]


def behave(key: Key, start: Array, steps: int) -> Episodes:
    """Episodes of a behaviour without a goal, from positions [E, N, 2]: one random object after another is moved to a
    random place.
    """
    episodes, objects = start.shape[:2]

    def choose(key: Key) -> tuple[Array, Array]:
        keys = jax.random.split(key)
        place = jax.random.uniform(keys[0], (episodes, 2), minval=-1.0, maxval=1.0)
        return jax.random.randint(keys[1], (episodes,), 0, objects), place

    def one(
        carry: tuple[Array, Array, Array], key: Key
    ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        position, mover, target = carry
        keys, row = jax.random.split(key), jnp.arange(episodes)
        here = position[row, mover]
        away = target - here
        direction = away / jnp.maximum(jnp.linalg.norm(away, axis=-1, keepdims=True), SPEED)
        place = here + _POINTING * jax.random.normal(keys[0], here.shape)
        action = jnp.concatenate([place, direction], -1).clip(-1.0, 1.0)
        after = step(position, action)
        arrived = jnp.linalg.norm(after[row, mover] - target, axis=-1) < 1e-3
        new_mover, new_target = choose(keys[1])
        mover = jnp.where(arrived, new_mover, mover)
        target = jnp.where(arrived[:, None], new_target, target)
        return (after, mover, target), (after, action)

    keys = jax.random.split(key)
    _, (after, action) = jax.lax.scan(one, (start, *choose(keys[0])), jax.random.split(keys[1], steps))
    position = jnp.concatenate([start[None], after]).swapaxes(0, 1)
    return Episodes(position, action.swapaxes(0, 1))
