"""The environment behind ``synthetic-continuous``, registered on import: ``point_mass:PointMass-v0``.

Worker processes import this file, so it must not import JAX or pytest.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class PointMass(gymnasium.Env):
    """Observes position and velocity on a plane; the reward is minus the distance to the origin."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform(-1, 1, 2), np.zeros(2)
        return self._observation(), {}

    def step(self, action: np.ndarray):
        self.velocity = 0.9 * self.velocity + 0.1 * action
        self.position = self.position + 0.2 * self.velocity
        distance = float(np.linalg.norm(self.position))
        return self._observation(), -distance, False, False, {"success": distance < 0.5}

    def _observation(self) -> np.ndarray:
        return np.concatenate([self.position, self.velocity]).astype(np.float32)


gymnasium.register("PointMass-v0", PointMass, max_episode_steps=10)
