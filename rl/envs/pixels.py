"""MuJoCo tasks from pixels: the last three pictures of the scene are seen instead of its state.

The observations of DrQ (Kostrikov, Yarats & Fergus 2021) and of CQN (Seo et al. 2024): 84 x 84 pixels in colour, three
pictures in view, oldest first, as channels. Before the first picture of an episode there is black, as in Atari games
here (`rl.envs.atari`); DrQ repeats the first. Actions last as long as the task says.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

PREFIX = "pixels/"  # of the names of such environments; the name of the task follows
STACK = 3  # pictures in view
_SIZE = 84
# What `show` expects of gymnasium.make. The camera follows a robot that walks; models without one have no such camera,
# and are seen by the free camera that their task has set up.
OPTIONS = {"render_mode": "rgb_array", "width": _SIZE, "height": _SIZE, "camera_name": "track"}


def show(env: gymnasium.Env) -> gymnasium.Env:
    """``env``, made with `OPTIONS`, observed as uint8 [84, 84, 9].

    Raises:
      ImportError: MuJoCo cannot draw on this machine.
    """
    env.reset(seed=0)  # a free camera looks at where bodies are when the first picture is drawn
    try:
        with _off_screen():
            env = wrappers.AddRenderObservation(_OwnContext(env))
    except Exception as error:  # every renderer fails in its own way
        raise ImportError(
            f"MuJoCo cannot draw pixels here ({error!r}, MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r}); without a "
            "screen set MUJOCO_GL=egl (Debian and Ubuntu: apt install libegl1, with the GPU's driver or Mesa's) or "
            "MUJOCO_GL=osmesa (apt install libosmesa6)"
        ) from error
    env.unwrapped.np_random = np.random.default_rng()  # an environment that is not seeded is random again
    stacked = wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    space = gymnasium.spaces.Box(0, 255, (_SIZE, _SIZE, 3 * STACK), np.uint8)
    return wrappers.TransformObservation(stacked, _channels, space)


class _OwnContext(gymnasium.Wrapper):
    """Draws in the OpenGL context of its own environment, also where another one in this process drew last."""

    def render(self) -> Any:
        viewer = getattr(self.unwrapped, "mujoco_renderer").viewer
        if viewer is not None:
            viewer.make_context_current()
        return self.env.render()


def _channels(pictures: np.ndarray) -> np.ndarray:
    """[STACK, H, W, 3] as [H, W, 3 * STACK]."""
    return np.concatenate(pictures, -1)


@contextlib.contextmanager
def _off_screen() -> Iterator[None]:
    """In here MuJoCo draws by EGL, unless the user chose a renderer or there is a screen."""
    chosen = any(os.environ.get(name) for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"))
    if chosen or sys.platform != "linux":
        yield
        return
    os.environ["MUJOCO_GL"] = "egl"
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]
