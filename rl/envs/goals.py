"""Environments in which goals are to be reached, as goal-conditioned agents see them and benchmarks test them.

Their interface is OGBench's (Park et al. 2025), which environments of your own may have, too: ``num_tasks`` tasks, of
which ``reset(options={"task_id": i})`` starts one, from 1, and a reset without it any; in the info of a reset ``goal``,
what is observed where the goal is reached; in that of a step ``success``. Where the options have
``"render_goal": True``, the info of the reset may have ``goal_rendered``, a picture of it.

    goals/pointmaze-medium-v0          an episode ends where it succeeds (OGBench)
    random-goals/pointmaze-medium-v0   none does, and starts and goals are drawn anew (HECRL, Haramati et al. 2026)

Observations are {`rl.nest.OBSERVATION`: ..., `rl.nest.GOAL`: ...}. Random are free cells of a maze, but for those where
a teleport begins, and places of cubes on the table; in other environments one of the tasks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from rl.nest import GOAL, OBSERVATION

TASKS, RANDOM = "goals/", "random-goals/"  # of the names of such environments; the name of the task follows
_STREAM = 2  # of random numbers, beside the environment's own of the same seed and that of `rl.envs.entities`
_APART = 0.06  # metres between two cubes, whose sides are 4 cm


class GoalConditioned(gymnasium.Wrapper):
    """``env`` with observations that hold the goal; see the module's docstring for ``prefix``."""

    def __init__(self, env: gymnasium.Env, prefix: str, name: str):
        super().__init__(env)
        self._random = prefix == RANDOM
        self.goal_picture: Any = None  # of the episode's goal, where the reset was asked for one
        self.num_tasks = getattr(env.unwrapped, "num_tasks", 0)
        goal = env.reset()[1].get("goal") if self.num_tasks else None
        if goal is None:
            raise ValueError(
                f"environment {name!r} has no goals: it needs num_tasks tasks and info['goal'] from reset "
                "(rl.envs.goals); evaluate in one that has them (--environment), or not at all (--eval_episodes=0)"
            )
        box = env.observation_space
        if isinstance(box, spaces.Dict):
            raise ValueError(
                f"environment {name!r} observes a dictionary ({', '.join(box)}): a goal is a whole observation, and "
                "agents with goals read arrays; give the name of a task without goals/ or random-goals/"
            )
        if np.shape(goal) != box.shape:
            raise ValueError(
                f"environment {name!r} has goals of shape {np.shape(goal)} and observations of shape {box.shape}: a "
                "goal must be a whole observation"
            )
        self.observation_space = spaces.Dict({OBSERVATION: box, GOAL: box})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode, with the goal that it is to reach."""
        if self._random:
            # Of the seed alone the environment draws the rest, where a robot begins for instance.
            rng = np.random.default_rng(None if seed is None else (seed, _STREAM))
            drawn = random_task(self.env.unwrapped, rng) or {}
            pictured = bool(options and options.get("render_goal"))
            options = {**drawn, **({"render_goal": True} if pictured else {})} or None
        observation, info = self.env.reset(seed=seed, options=options)
        self._goal, self.goal_picture = info["goal"], info.get("goal_rendered")
        return self._conditioned(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """A step toward the goal."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._conditioned(observation), reward, terminated and not self._random, truncated, info

    def _conditioned(self, observation: Any) -> dict[str, Any]:
        return {OBSERVATION: observation, GOAL: self._goal}


def random_task(env: Any, rng: np.random.Generator) -> dict[str, Any] | None:
    """The options of a reset to a start and a goal drawn at random; None where nobody knows how."""
    if hasattr(env, "maze_map"):
        # Whoever stands where a teleport begins is somewhere else in the next step.
        moved = (getattr(env, "_teleport_info", None) or {}).get("teleport_in_ijs", ())
        free = [(int(i), int(j)) for i, j in np.argwhere(env.maze_map == 0) if (i, j) not in moved]
        has_ball = hasattr(env, "get_agent_ball_xy")  # antsoccer
        names = ("agent_init_ij", "ball_init_ij", "goal_ij") if has_ball else ("init_ij", "goal_ij")
        cells = rng.choice(len(free), len(names), replace=False)
        return {"task_info": {name: free[cell] for name, cell in zip(names, cells, strict=True)}}
    if hasattr(env, "_num_cubes") and not hasattr(env, "_num_buttons"):  # which OGBench's scene has, too
        return {"task_info": {name: _cubes(env, rng) for name in ("init_xyzs", "goal_xyzs")}}
    return None


class TopView(NamedTuple):
    """A world as it looks from above."""

    walls: np.ndarray  # [W, 2] the middles of walls, which are squares; none where nothing is in the way
    side: float  # of a square


def top_view(env: gymnasium.Env) -> TopView | None:
    """Of a maze whose observations begin with x and y, or of cubes as a set of entities; None of anything else."""
    task: Any = env.unwrapped
    box = env.observation_space
    shape = (box[OBSERVATION] if isinstance(box, spaces.Dict) else box).shape or ()
    if hasattr(task, "maze_map") and hasattr(task, "ij_to_xy") and len(shape) == 1:
        walls = np.array([task.ij_to_xy(cell) for cell in np.argwhere(np.asarray(task.maze_map) == 1)], float)
        return TopView(
            walls, float(np.linalg.norm(np.subtract(task.ij_to_xy((0, 1)), task.ij_to_xy((0, 0)))))
        )
    if hasattr(task, "_num_cubes") and len(shape) == 2:
        return TopView(np.zeros((0, 2)), 0.0)
    return None


def places(observation: np.ndarray) -> np.ndarray:
    """Where everything is in observations with a `top_view`: [..., objects, 2] of sets or of vectors, one object."""
    return observation[..., :2] if observation.ndim > 2 else observation[..., None, :2]


def _cubes(env: Any, rng: np.random.Generator) -> np.ndarray:
    """Places [cubes, 3] on the table, none in another's way."""
    placed: list[np.ndarray] = []
    while len(placed) < env._num_cubes:
        place = np.append(rng.uniform(*env._target_sampling_bounds), 0.02)
        if all(np.linalg.norm(place - other) > _APART for other in placed):
            placed.append(place)
    return np.stack(placed)
