"""Atari 2600 games as Dopamine plays them: sticky actions, four frames to a step, 84 x 84 grey pixels.

The protocol of Machado et al. (2018) and Castro et al. (2018): an action is repeated for four frames, and each time
the console sticks to the previous one with probability 0.25 (the -v5 environments do so by default); what is seen is
the brighter of the last two frames, pixel by pixel, because sprites flicker; an episode is a game, not a life, and
ends after 108,000 frames. Stacking is the agent's business (`rl.replay.frames`).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

OPTIONS = {"frameskip": 1, "obs_type": "grayscale"}  # what `Screen` expects of gymnasium.make
_SKIP, _SIZE = 4, 84


class Screen(gymnasium.Wrapper):
    """Four frames to a step, seen as uint8 [84, 84]."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        height, width = env.observation_space.shape or (0, 0)
        self.observation_space = gymnasium.spaces.Box(0, 255, (_SIZE, _SIZE), np.uint8)
        self._rows, self._columns = _averaging(height), _averaging(width).T

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        screen, info = self.env.reset(seed=seed, options=options)
        return self._shrink(screen), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        total, last, screen = 0.0, np.uint8(0), np.uint8(0)
        for _ in range(_SKIP):
            last = screen
            screen, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return self._shrink(np.maximum(last, screen)), total, terminated, truncated, info

    def _shrink(self, screen: np.ndarray) -> np.ndarray:
        return np.rint(self._rows @ screen.astype(np.float32) @ self._columns).astype(np.uint8)


def _averaging(size: int) -> np.ndarray:
    """[84, size]: row ``i`` averages the pixels that the ``i``-th of 84 equal parts covers, by their share in it."""
    edges = np.linspace(0, size, _SIZE + 1)
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(overlap, 0, None) * _SIZE / size).astype(np.float32)
