"""Cart-pole swing-up with a continuous force in pure JAX: what `rl.envs.cartpole` says, with steps on observations.

A step is a function of observations: true dynamics for model-based agents (`rl.dynamics.base.true`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl.envs import cartpole
from rl.envs.cartpole import LIMIT, NOISE
from rl.types import Array, Key, Spec

__all__ = ["LIMIT", "SPEC", "reset", "step"]

SPEC = Spec((5,), 1)


def reset(key: Key, count: int) -> Array:
    """Starts [count, 5]: the pole hangs down, everything is moved by up to 0.05."""
    position, velocity, angle, speed = jax.random.uniform(key, (4, count), minval=-NOISE, maxval=NOISE)
    return cartpole.observe(position, velocity, jnp.pi + angle, speed, jnp)


def step(observation: Array, action: Array) -> tuple[Array, Array]:
    """Next observations [..., 5] and rewards [...] after actions [..., 1], of which 1 is 10 N to the right."""
    return cartpole.transit(observation, action, jnp)
