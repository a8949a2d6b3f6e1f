"""MuJoCo tasks from pixels: observations are the last three rendered frames instead of the state.

The observations of DrQ (Kostrikov, Yarats & Fergus 2021) and CQN (Seo et al. 2024): RGB frames of 84 x 84 pixels, the
last three stacked as channels, the newest last. Before the first frame of an episode there is black, as in Atari games
here (`rl.envs.atari`); DrQ repeats the first frame. Actions are not repeated beyond the task's own ``frame_skip``.
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
STACK = 3  # frames in an observation
_SIZE = 84
REMEDY = (  # where MuJoCo cannot render
    "without a screen set MUJOCO_GL=egl (Debian and Ubuntu: apt install libegl1, and the GPU's driver or Mesa's) or "
    "MUJOCO_GL=osmesa (apt install libosmesa6)"
)
# What `from_pixels` expects of gymnasium.make. The camera "track" of gymnasium's models follows a robot that walks;
# models without it are seen by the free camera as the task sets it up.
OPTIONS = {"render_mode": "rgb_array", "width": _SIZE, "height": _SIZE, "camera_name": "track"}


def from_pixels(env: gymnasium.Env) -> gymnasium.Env:
    """``env``, made with `OPTIONS`, with observations [84, 84, 9] of uint8.

    Raises:
      ImportError: MuJoCo cannot render on this machine.
    """
    task: Any = env.unwrapped
    env.reset(seed=0)  # a free camera looks at where the bodies are when the first frame is rendered
    try:
        with headless():
            env = wrappers.AddRenderObservation(_CurrentContext(env))
    except Exception as error:  # every renderer fails in its own way
        raise ImportError(
            f"MuJoCo cannot render pixels here ({error!r}, MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r}); {REMEDY}"
        ) from error
    task.np_random = np.random.default_rng()  # without a seed, episodes are random again
    env = wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    space = gymnasium.spaces.Box(0, 255, (_SIZE, _SIZE, 3 * STACK), np.uint8)
    return wrappers.TransformObservation(env, lambda frames: np.concatenate(frames, -1), space)


class _CurrentContext(gymnasium.Wrapper):
    """Renders in this environment's OpenGL context, also where another one in the process rendered last.

    Gymnasium 1.4 renders in whatever context is current: the scene is then shown with another scene's textures.
    """

    def render(self) -> Any:
        task: Any = self.unwrapped
        if task.mujoco_renderer.viewer is not None:
            task.mujoco_renderer.viewer.make_context_current()
        return self.env.render()


@contextlib.contextmanager
def headless() -> Iterator[None]:
    """Renderers of gymnasium made in here use EGL on Linux, unless MUJOCO_GL is set or there is a screen.

    So do those of MuJoCo itself, and with them OGBench's, in worker processes that are started in here.
    """
    chosen = any(os.environ.get(name) for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"))
    if chosen or sys.platform != "linux":
        yield
        return
    os.environ["MUJOCO_GL"] = "egl"
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]
