"""``D4RLPen-v1``: Adroit's pen with the episodes of D4RL, which its scores are of (Fu et al. 2020).

gymnasium-robotics' ``AdroitHandPen-v1`` cuts them after 200 steps and goes on where the pen has been dropped. In D4RL
they have 100 steps, and end where it is: returns there are about half as large. Rewards and observations are the same.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium_robotics.envs.adroit_hand.adroit_pen import AdroitHandPenEnv

NAME = "D4RLPen-v1"
LIMIT = 100  # steps of an episode
DROPPED = 0.075  # metres, below which the pen has been dropped


class PenEnv(AdroitHandPenEnv):
    """The task in gymnasium; the time limit is the registration's."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Steps the hand; the episode ends with the step that drops the pen, which is paid 5 less."""
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, bool(self.data.xpos[self.obj_body_id][2] < DROPPED), truncated, info


gymnasium.register(NAME, f"{__name__}:PenEnv", max_episode_steps=LIMIT)
