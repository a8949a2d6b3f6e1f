"""Atari 2600 games as Dopamine plays them: sticky actions, four frames to a step, the last four steps in view.

The protocol of Machado et al. (2018) and Castro et al. (2018): an action is repeated for four frames, and each time
the previous one stays with probability 0.25; a step shows the brighter of its last two frames, pixel by pixel, because
sprites flicker, as 84 x 84 grey pixels; an episode is a game, not a life, and ends after 108,000 frames.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np

# What `Screen` expects of gymnasium.make. It repeats actions itself: the console can, too, but its state, as a run
# saves it, does not hold the action that it would repeat.
OPTIONS = {"frameskip": 1, "obs_type": "grayscale", "repeat_action_probability": 0.0}
STACK = 4  # steps in view
STICKY = 0.25  # probability with which a frame has the action of the frame before
_SKIP, _SIZE = 4, 84


class Screen(gymnasium.Wrapper):
    """Four frames to a step; seen are the last four steps, uint8 [84, 84, 4], black before the first."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        shape = (_SIZE, _SIZE, STACK)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._seen = np.zeros(shape, np.uint8)
        self._action = 0  # of the last frame

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        screen, info = self.env.reset(seed=seed, options=options)
        self._seen, self._action = np.zeros_like(self._seen), 0
        return self._see(screen), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        total, last, screen = 0.0, np.uint8(0), np.uint8(0)
        for _ in range(_SKIP):
            last = screen
            if self.np_random.random() >= STICKY:
                self._action = action
            screen, reward, terminated, truncated, info = self.env.step(self._action)
            total += float(reward)
            if terminated or truncated:
                break
        return self._see(np.maximum(last, screen)), total, terminated, truncated, info

    def _see(self, screen: np.ndarray) -> np.ndarray:
        self._seen = np.concatenate([self._seen[..., 1:], shrink(screen)[..., None]], -1)
        return self._seen


def shrink(screen: np.ndarray) -> np.ndarray:
    """A picture [H, W] as [84, 84]: each pixel is the mean over the area that it covers, rounded."""
    rows, columns = (_averaging(size) for size in screen.shape)
    return np.rint(rows @ screen.astype(np.float32) @ columns.T).astype(np.uint8)


@functools.cache
def _averaging(size: int) -> np.ndarray:
    """[84, size]: row ``i`` averages the pixels that the ``i``-th of 84 equal parts covers, by their share in it."""
    edges = np.linspace(0, size, _SIZE + 1)
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(overlap, 0, None) * _SIZE / size).astype(np.float32)
