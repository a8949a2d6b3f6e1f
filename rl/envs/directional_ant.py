"""``DirectionalAnt-v0``: OGBench's ant, paid for every metre in a direction that it is told: who walks its mazes.

The task by which OGBench (Park et al. 2025) trains the walkers of antmaze, its ``online-ant-xy-v0``, with a generator
of its own in place of NumPy's global one. Observations [29] are the joints and their velocities without x and y, and
the direction, a unit vector, drawn anew every 100 steps. The reward of a step is the way along the direction, in
metres. An episode ends after 1000 steps, or where the ant falls.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from ogbench.online_locomotion.ant import AntEnv

NAME = "DirectionalAnt-v0"
LIMIT = 1000  # steps of an episode
TURN = 100  # steps until another direction is drawn


class DirectionalAntEnv(AntEnv):
    """The task in gymnasium; the time limit is the registration's."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (29,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode, and draws a direction."""
        observation, info = super().reset(seed=seed, options=options)
        self._time, self._direction = 0, unit(self.np_random)
        return np.concatenate([observation, self._direction]), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Steps the ant; a new direction is seen after the step that it is drawn in."""
        before = self.data.qpos[:2].copy()
        observation, _, terminated, truncated, info = super().step(action)
        reward = float((self.data.qpos[:2] - before) @ self._direction)
        self._time += 1
        if self._time % TURN == 0:
            self._direction = unit(self.np_random)
        return np.concatenate([observation, self._direction]), reward, terminated, truncated, info


def unit(generator: np.random.Generator) -> np.ndarray:
    """A direction [2] drawn uniformly."""
    way = generator.standard_normal(2)
    return way / np.linalg.norm(way)


gymnasium.register(NAME, f"{__name__}:DirectionalAntEnv", max_episode_steps=LIMIT)
