"""Pendulum-v1 of gymnasium in pure JAX: swing a pole up and hold it there, with too little force to lift it at once.

Everything the world remembers can be read off the observation (cos angle, sin angle, angular velocity), 0 being
upright, so that a step is a function of observations: true dynamics for model-based agents (`rl.dynamics.base.true`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl.types import Array, Key, Spec

SPEC = Spec((3,), 1)
LIMIT = 200  # steps of an episode

_GRAVITY, _STEP = 10.0, 0.05  # m/s^2, s; mass and length are 1
_MAX_SPEED, _MAX_TORQUE = 8.0, 2.0


def reset(key: Key, count: int) -> Array:
    """Starts [count, 3]: any angle, velocities in [-1, 1]."""
    keys = jax.random.split(key)
    angle = jax.random.uniform(keys[0], (count,), minval=-jnp.pi, maxval=jnp.pi)
    return _observe(angle, jax.random.uniform(keys[1], (count,), minval=-1.0, maxval=1.0))


def step(observation: Array, action: Array) -> tuple[Array, Array]:
    """Next observations [..., 3] and rewards [...] after actions [..., 1], of which 1 is the largest torque."""
    angle, speed = jnp.arctan2(observation[..., 1], observation[..., 0]), observation[..., 2]
    torque = _MAX_TORQUE * action[..., 0].clip(-1, 1)
    reward = -(jnp.square(angle) + 0.1 * jnp.square(speed) + 0.001 * jnp.square(torque))
    speed = speed + _STEP * (1.5 * _GRAVITY * jnp.sin(angle) + 3.0 * torque)
    speed = speed.clip(-_MAX_SPEED, _MAX_SPEED)
    return _observe(angle + _STEP * speed, speed), reward


def _observe(angle: Array, speed: Array) -> Array:
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], -1)
