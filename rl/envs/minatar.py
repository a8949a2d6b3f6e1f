"""MinAtar's games (Young & Tian 2019) as pure functions of many copies, with sticky actions (package: gymnax).

Gymnax has the games without MinAtar's own sticky actions; here an action is, with some probability, the one before,
whatever was chosen. What is seen are the cells, 10 x 10 by kinds of object, as one vector of 0 and 1. Gymnax cuts games
off after 1,000 steps, which MinAtar plays to their end (both end Freeway's after 2,500, here as a time limit), so that
returns of strong policies are not comparable.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl.envs.world import Outcome, World
from rl.types import Array, Key, Spec


def names() -> list[str]:
    """The games that there are.

    Raises:
      ImportError: gymnax is not installed.
    """
    return [name for name in gymnax().registered_envs if "MinAtar" in name]


def make(name: str, sticky: float = 0.1) -> World:
    """A game; after the end of an episode the next one begins.

    Args:
      name: one of `names`.
      sticky: how often an action is the one before.

    Raises:
      ImportError: gymnax is not installed.
    """
    environment, params = gymnax().make(name)

    def flat(observation: Array) -> Array:
        return observation.reshape(observation.shape[0], -1).astype(jnp.uint8)

    def reset(keys: Key) -> tuple[Array, Any]:
        observation, state = jax.vmap(environment.reset, (0, None))(keys, params)
        return flat(observation), (state, jnp.zeros(len(keys), jnp.int32))

    def step(keys: Key, world: Any, chosen: Array) -> Outcome:
        state, before = world
        keys, of_sticking = jax.vmap(jax.random.split, out_axes=1)(keys)
        stuck = jax.vmap(lambda key: jax.random.bernoulli(key, sticky))(of_sticking)
        action = jnp.where(stuck, before, chosen)
        seen, state, reward, terminated, truncated, info = jax.vmap(environment.step, (0, 0, 0, None))(
            keys, state, action, params
        )
        ended = terminated | truncated
        world = state, jnp.where(ended, 0, action)
        return Outcome(
            flat(info["final_observation"]), reward.astype(jnp.float32), terminated, flat(seen), ended, world
        )

    size = int(np.prod(environment.observation_space(params).shape))
    return World(Spec((size,), environment.action_space(params).n, discrete=True), reset, step)


def gymnax() -> ModuleType:
    """The package. Raises ImportError, saying how to install it, where it is not."""
    try:
        import gymnax
    except ImportError as error:
        raise ImportError("these environments need gymnax: pip install --no-deps gymnax") from error
    return gymnax
