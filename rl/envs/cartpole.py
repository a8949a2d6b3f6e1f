"""The cart-pole of gymnasium's CartPole-v1 with a continuous force, its pole hanging at first: ``CartPoleSwingUp-v0``.

The equations of motion, the constants and the explicit Euler step of 0.02 s are CartPole-v1's. What differs:

- the force is any in [-10 N, 10 N], the action times 10;
- an episode starts with the pole hanging down, everything moved by up to 0.05, and lasts 250 steps (5 s);
- nothing ends it earlier: a cart at an end of the track, 2.4 m either way, stands still until it is pushed back;
- the reward in [0, 1] is that of dm_control's ``cartpole`` ``swingup``: how upright the pole is, times bonuses for a
  cart in the middle, a small force and a slow pole, all of where the step starts.

Angle 0 is upright. Everything the world remembers can be read off the observation (position, velocity, cos angle, sin
angle, angular velocity). `transit` is one step of NumPy's or JAX's arrays; this module imports no JAX, as workers hold
none. In pure JAX the task is `rl.envs.cartpole_swingup`.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

NAME = "CartPoleSwingUp-v0"
LIMIT = 250  # steps of an episode
NOISE = 0.05  # of starts

_GRAVITY, _CART, _POLE, _HALF = 9.8, 1.0, 0.1, 0.5  # m/s^2, kg, kg, m: half the pole's length
_FORCE, _STEP, _TRACK = 10.0, 0.02, 2.4  # N, s, m


def transit(observation: Any, action: Any, numpy: Any = np) -> tuple[Any, Any]:
    """Next observations [..., 5] and rewards [...] after actions [..., 1]; ``numpy`` is NumPy or `jax.numpy`."""
    position, velocity, cosine, sine, speed = (observation[..., i] for i in range(5))
    unit = action[..., 0].clip(-1, 1)
    mass = _CART + _POLE
    push = (_FORCE * unit + _POLE * _HALF * speed**2 * sine) / mass
    turn = (_GRAVITY * sine - cosine * push) / (_HALF * (4 / 3 - _POLE * cosine**2 / mass))
    accelerate = push - _POLE * _HALF * turn * cosine / mass
    moved = position + _STEP * velocity
    free = (numpy.abs(moved) < _TRACK) | (moved * (velocity + _STEP * accelerate) < 0)
    turn = numpy.where(free, turn, _GRAVITY * sine / (_HALF * 4 / 3))  # a rod about a pivot that stands still
    angle = numpy.arctan2(sine, cosine) + _STEP * speed
    following = observe(
        moved.clip(-_TRACK, _TRACK),
        numpy.where(free, velocity + _STEP * accelerate, 0.0),
        angle,
        speed + _STEP * turn,
        numpy,
    )
    middle = (1 + _near(position, 2.0, numpy)) / 2
    gentle = (4 + 1 - unit**2) / 5
    slow = (1 + _near(speed, 5.0, numpy)) / 2
    return following, (1 + cosine) / 2 * middle * gentle * slow


def observe(position: Any, velocity: Any, angle: Any, speed: Any, numpy: Any = np) -> Any:
    """Observations [..., 5] of states, [...] each: m, m/s, rad, rad/s."""
    return numpy.stack([position, velocity, numpy.cos(angle), numpy.sin(angle), speed], -1)


def _near(x: Any, margin: float, numpy: Any) -> Any:
    """1 at 0 and 0.1 at ``margin`` either way, a Gaussian between (dm_control's ``tolerance``)."""
    return numpy.exp(math.log(0.1) * (x / margin) ** 2)


class SwingUp(gymnasium.Env):
    """The task in gymnasium; the time limit is the registration's."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode with the pole hanging."""
        super().reset(seed=seed)
        position, velocity, angle, speed = self.np_random.uniform(-NOISE, NOISE, 4)
        self.state = observe(position, velocity, np.pi + angle, speed)  # float64
        return self.state.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Takes an action [1]; no step ends the episode."""
        self.state, reward = transit(self.state, np.asarray(action, np.float64))
        return self.state.astype(np.float32), float(reward), False, False, {}


gymnasium.register(NAME, f"{__name__}:SwingUp", max_episode_steps=LIMIT)
