"""Environments with returns known in advance, registered on import: ``toy_environments:Countdown-v0``.

Worker processes import this file, so it must not import JAX or pytest.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Countdown(gymnasium.Env):
    """An episode lasts as many steps (1 to 10) as its seed decides; its reward is 1 a step plus the action.

    It observes (steps left, length, first draw of the episode). With ``fade`` success holds only before the
    last step; with ``report=False`` it is not reported, and with ``rare`` only where it is true. ``key`` is its name.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-3.0, 3.0, (1,), np.float64)

    def __init__(self, report: bool = True, fade: bool = False, rare: bool = False, key: str = "success"):
        self.report, self.fade, self.rare, self.key = report, fade, rare, key

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.length = self.left = int(self.np_random.integers(1, 11))
        self.draw = self.np_random.random()
        return self._observation(), {}

    def step(self, action: np.ndarray):
        assert self.left > 0, "stepped after the end"
        self.left -= 1
        long = self.length > 5
        success = long and self.left == 1 if self.fade else long and self.left == 0
        info = {self.key: success} if self.report and (success or not self.rare) else {}
        return self._observation(), 1.0 + float(action[0]), self.left == 0, False, info

    def _observation(self) -> np.ndarray:
        return np.array([self.left, self.length, self.draw])


class Mortal(gymnasium.Env):
    """Kills its process at its third step, if the file that MORTAL names exists, and removes that file first."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int):
        self.time += 1
        if self.time == 3 and os.path.exists(os.environ["MORTAL"]):
            os.remove(os.environ["MORTAL"])
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(1, self.time / 10, np.float32), float(action), False, False, {}


class Poisoned(gymnasium.Env):
    """At its second step ``part``, reward or observation, is NaN; or the reward or success is wrong in its shape,
    or success in its range.
    """

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, part: str):
        self.part = part

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray):
        self.time += 1
        ill = np.float32(np.nan if self.time == 2 else 0.0)
        observation = np.full(1, ill if self.part == "observation" else 0.0, np.float32)
        reward = np.zeros(1) if self.part == "shape" else float(ill if self.part == "reward" else 0.0)
        success = {"success": {"success": [False]}, "count": {"success": 2}}
        return observation, reward, False, False, success.get(self.part, {})


class Spaces(gymnasium.Env):
    """An environment whose spaces are given, which remembers the action it received and observes zeros."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return _zeros(self.observation_space), {}

    def step(self, action: Any):
        self.received = action
        return _zeros(self.observation_space), 0.0, False, False, {}


def _zeros(space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _zeros(part) for name, part in space.items()}
    return np.zeros(space.shape, space.dtype)


class Goal(gymnasium.Env):
    """Pays 1 for an action that is the goal, which every episode of 5 steps draws anew.

    It observes a dictionary in a dictionary: the steps taken, and beside them the goal and the last action.
    """

    observation_space = spaces.Dict(
        {
            "task": spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float64) for name in ("last", "goal")}),
            "clock": spaces.Box(0, 255, (1,), np.uint8),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.time, self.last = 0, np.zeros(2)
        self.goal = self.np_random.uniform(-1, 1, 2)
        return self._observation(), {}

    def step(self, action: np.ndarray):
        self.time, self.last = self.time + 1, action
        reward = float(np.allclose(action, self.goal, atol=1e-5))
        return self._observation(), reward, self.time == 5, False, {}

    def _observation(self) -> dict[str, Any]:
        clock = np.array([self.time], np.uint8)
        return {"task": {"last": np.float64(self.last), "goal": self.goal}, "clock": clock}


class Told(gymnasium.Env):
    """Lasts three steps, and pays in the last what the options of its reset say; it observes 0."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.pay, self.time = (options or {}).get("pay", -1.0), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray):
        self.time += 1
        over = self.time == 3
        return np.zeros(1, np.float32), self.pay * over, over, False, {}


class Shown(gymnasium.Env):
    """Two tasks, to count to 3 and to 5; its pictures have the count as their colour, those of goals 100 more."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    num_tasks = 2

    def __init__(self, blind: bool = False):
        self.blind = blind

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        options = options or {}
        self.count, self.end = 0, 1 + 2 * options.get("task_id", 1)
        shown = {"goal_rendered": _grey(100 + self.end)} if options.get("render_goal") else {}
        return np.zeros(1, np.float32), {"goal": np.full(1, self.end, np.float32), **shown}

    def step(self, action: np.ndarray):
        self.count += 1
        over = self.count == self.end
        return np.full(1, self.count, np.float32), 0.0, over, False, {"success": float(over)}

    def render(self):
        if self.blind:
            raise OSError("no screen")
        return _grey(self.count)


def _grey(level: int) -> np.ndarray:
    return np.full((4, 6, 3), level, np.uint8)


class Unhealthy(gymnasium.Env):
    """At its third step it does what ``ill`` says: dies, raises, or hangs on to nothing."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ill: str):
        self.ill = ill

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int):
        self.time += 1
        if self.time == 3 and self.ill == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.time == 3 and self.ill == "raises":
            raise KeyError("the joint is missing")
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Modules(gymnasium.Env):
    """Observes whether JAX is imported in its process, and the process's id."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return np.array([float("jax" in sys.modules), os.getpid() % 2**20]), {}

    def step(self, action: int):
        return self.reset()[0], 0.0, True, False, {}


gymnasium.register("Countdown-v0", Countdown)
gymnasium.register("CountdownQuiet-v0", Countdown, kwargs={"report": False})
gymnasium.register("CountdownFade-v0", Countdown, kwargs={"fade": True})
gymnasium.register("CountdownIs-v0", Countdown, kwargs={"fade": True, "key": "is_success"})
gymnasium.register("CountdownRare-v0", Countdown, kwargs={"rare": True})
gymnasium.register("Spaces-v0", Spaces)
gymnasium.register("Shown-v0", Shown)
gymnasium.register("Blind-v0", Shown, kwargs={"blind": True})
gymnasium.register("Killed-v0", Unhealthy, kwargs={"ill": "killed"})
gymnasium.register("Raises-v0", Unhealthy, kwargs={"ill": "raises"})
gymnasium.register("NanReward-v0", Poisoned, max_episode_steps=3, kwargs={"part": "reward"})
gymnasium.register("NanObservation-v0", Poisoned, max_episode_steps=3, kwargs={"part": "observation"})
gymnasium.register("ArrayReward-v0", Poisoned, kwargs={"part": "shape"})
gymnasium.register("ArraySuccess-v0", Poisoned, kwargs={"part": "success"})
gymnasium.register("CountSuccess-v0", Poisoned, kwargs={"part": "count"})
gymnasium.register("Mortal-v0", Mortal, max_episode_steps=5)
gymnasium.register("Modules-v0", Modules)
gymnasium.register("Goal-v0", Goal)
gymnasium.register("Told-v0", Told)
gymnasium.register(
    "Room-v0", Spaces, kwargs={"observation_space": spaces.Discrete(4), "action_space": Goal.action_space}
)
gymnasium.register("Limited-v0", Countdown, max_episode_steps=4)
