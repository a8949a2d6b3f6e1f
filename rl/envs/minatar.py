"""MinAtar's games (Young & Tian 2019) as pure functions of many copies, with sticky actions (package: gymnax).

Gymnax has the games without MinAtar's own sticky actions; here an action is, with some probability, the one before,
whatever was chosen. What is seen are the cells, 10 x 10 by kinds of object, as one vector of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.types import Array, Key, Spec


class Game(NamedTuple):
    """An environment as pure functions of many copies; see gymnax for its state."""

    spec: Spec
    reset: Callable[[Key], tuple[Array, Any]]  # keys [N] -> observations [N, O] uint8, states
    # keys [N], states, actions [N] -> rows without `first`, what is seen next, states, whether episodes ended
    step: Callable[[Key, Any, Array], tuple[dict[str, Array], Array, Any, Array]]


def names() -> list[str]:
    """The games that there are.

    Raises:
      ImportError: gymnax is not installed.
    """
    return [name for name in _gymnax().registered_envs if "MinAtar" in name]


def make(name: str, sticky: float = 0.1) -> Game:
    """A game; after the end of an episode the next one begins.

    Args:
      name: one of `names`.
      sticky: how often an action is the one before.

    Raises:
      ImportError: gymnax is not installed.
    """
    environment, params = _gymnax().make(name)

    def flat(observation: Array) -> Array:
        return observation.reshape(observation.shape[0], -1).astype(jnp.uint8)

    def reset(keys: Key) -> tuple[Array, Any]:
        observation, state = jax.vmap(environment.reset, (0, None))(keys, params)
        return flat(observation), (state, jnp.zeros(len(keys), jnp.int32))

    def step(keys: Key, world: Any, chosen: Array) -> tuple[dict[str, Array], Array, Any, Array]:
        state, before = world
        stuck = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 1), sticky))(keys)
        action = jnp.where(stuck, before, chosen)
        seen, state, reward, terminated, truncated, info = jax.vmap(environment.step, (0, 0, 0, None))(
            keys, state, action, params
        )
        row = {
            "reward": reward.astype(jnp.float32),
            "discount": 1.0 - terminated,
            "next_observation": flat(info["final_observation"]),
        }
        ended = terminated | truncated
        return row, flat(seen), (state, jnp.where(ended, 0, action)), ended

    size = int(np.prod(environment.observation_space(params).shape))
    return Game(Spec((size,), environment.action_space(params).n, discrete=True), reset, step)


def _gymnax() -> ModuleType:
    try:
        import gymnax
    except ImportError as error:
        raise ImportError("MinAtar's games need gymnax: pip install --no-deps gymnax") from error
    return gymnax
