"""True dynamics of environments whose state can be read off the observation: what a perfect model would predict.

The pendulum and the cart-pole's swing-up are pure JAX, and so are distractors beside them (`rl.envs.distractors`), but
for noise, which has no true next value. MuJoCo's planar robots are simulated on the host, many states at once on
threads (`mujoco.rollout`), from inside compiled code: their observations are all of the state but the distance covered,
on which nothing depends. Two things make a step inexact there. Hopper and Walker2d clip the velocities they show to 10
either way; and the contact solver starts cold at every step.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import jax
import numpy as np

from rl.dynamics.base import Dynamics, true
from rl.envs import distractors, registry
from rl.machine import usable_cores
from rl.types import Array

ROBOTS = ("halfcheetah", "hopper", "walker2d")


def of(environment: str, threads: int = 0) -> Dynamics:
    """The true dynamics of ``environment``, a gymnasium name such as ``Hopper-v5``; parameters are ``()``.

    Rewards are the environment's own. Whether an episode ends is `rl.dynamics.termination`'s to say.

    Args:
      environment: Pendulum-v1 or CartPoleSwingUp-v0, also with ``+distractors10``; or a version of HalfCheetah, Hopper
        or Walker2d.
      threads: that simulate MuJoCo; 0 is one per core.

    Raises:
      ValueError: there are none for this environment. `rl.dynamics.base.true` makes them from any function of
        observations and actions.
    """
    name = distractors.parse(environment)
    # Nothing but these names: what others register may move or reward otherwise, whatever it is called.
    task = re.sub(r"-v\d+$", "", name.base.lower().removeprefix(registry.OURS))
    if task in ("pendulum", "cartpoleswingup") and name.kind != "noise":
        from rl.envs import cartpole_swingup, pendulum

        world: Any = {"pendulum": pendulum, "cartpoleswingup": cartpole_swingup}[task]
        if name.kind:
            world = distractors.around(world, name.kind, name.size, name.map_seed)
        return true(world.step)
    if task not in ROBOTS or name.kind:
        raise ValueError(
            f"there are no true dynamics for {environment!r}: its state cannot be read off its observations, or nobody "
            f"has written how. There are some for Pendulum-v1, CartPoleSwingUp-v0, {', '.join(ROBOTS)}, and "
            "rl.dynamics.base.true makes them of a function of your own"
        )
    simulator = _Simulator(environment, threads or usable_cores())

    def transit(observation: Array, action: Array) -> tuple[Array, Array]:
        shape = jax.ShapeDtypeStruct((*observation.shape[:-1], observation.shape[-1] + 1), np.float32)
        outcome = jax.pure_callback(simulator, shape, observation, action, vmap_method="broadcast_all")
        return outcome[..., :-1], outcome[..., -1]

    return true(transit)


class _Simulator:
    """One step of a planar robot from any number of observations; threads that call it wait for each other."""

    def __init__(self, environment: str, threads: int):
        import mujoco
        from mujoco import rollout

        from rl import envs

        env: Any = envs.make(environment)
        self._env = env.unwrapped
        # -v4 pays the reward for health at the step that ends the episode, too. ``environment`` may name no version.
        self._always_healthy = not self._env.spec.id.endswith("-v5")
        self._model = self._env.model
        self._pool = rollout.Rollout(nthread=threads)
        self._data = [mujoco.MjData(self._model) for _ in range(threads)]
        self._lock = threading.Lock()

    def __call__(self, observation: Array, action: Array) -> np.ndarray:
        """Next observations and rewards [..., O + 1] of observations [..., O] and actions [..., D]."""
        leading = np.shape(observation)[:-1]
        states = np.asarray(observation, np.float64).reshape(-1, np.shape(observation)[-1])
        actions = np.asarray(action, np.float64).reshape(len(states), -1).clip(-1, 1)
        zero = np.zeros((len(states), 1))
        full = np.concatenate([zero, zero, states], 1)  # the time, and the distance that is not observed
        with self._lock:
            ended, _ = self._pool.rollout(
                self._model, self._data, full, actions[:, None], nstep=self._env.frame_skip
            )
        distance, following = ended[:, -1, 1], ended[:, -1, 2:]
        shown, healthy = self._shown(following)
        reward = (
            self._env._forward_reward_weight * distance / self._env.dt
            + healthy
            - self._env._ctrl_cost_weight * np.square(actions).sum(1)
        )
        return np.concatenate([shown, reward[:, None]], 1, dtype=np.float32).reshape(*leading, -1)

    def _shown(self, following: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the environment shows of states without distance [B, O], and what it pays for health [B]."""
        if not hasattr(self._env, "_healthy_reward"):  # a cheetah cannot fall
            return following, np.zeros(len(following))
        positions = self._model.nq - 1
        shown = following.copy()
        shown[:, positions:] = shown[:, positions:].clip(-10, 10)
        height, angle = following[:, 0], following[:, 1]
        (low, high), (left, right) = self._env._healthy_z_range, self._env._healthy_angle_range
        healthy = (low < height) & (height < high) & (left < angle) & (angle < right)
        bounds = getattr(self._env, "_healthy_state_range", (-np.inf, np.inf))
        healthy &= ((bounds[0] < following[:, 1:]) & (following[:, 1:] < bounds[1])).all(1)
        return shown, self._env._healthy_reward * (healthy | self._always_healthy)
