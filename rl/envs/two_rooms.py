"""Two rooms with a door between them: ``TwoRooms-v0``, the smallest world in which the way to a goal is not straight.

A point on a grid of unit cells moves by at most 0.25 in each direction per step; a wall stops what would lead into it.
The goal is another point, reached within 0.5. The interface is that of OGBench's mazes (Park et al. 2025): see
`rl.envs.goals`. `move` and `toward` are of many points at once; this module imports no JAX, as workers hold none.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

NAME = "TwoRooms-v0"
LIMIT = 50  # steps of an episode
TOLERANCE = 0.5  # distance to a goal that is reached
MAZE = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 0, 0, 1, 0, 0, 1],
        [1, 0, 0, 0, 0, 0, 1],
        [1, 0, 0, 1, 0, 0, 1],
        [1, 1, 1, 1, 1, 1, 1],
    ]
)  # 1: wall; cell (i, j) has its middle at x = j, y = i
CELLS = np.argwhere(MAZE == 0)

_STEP = 0.25
_NOISE = 0.3  # of starts and goals around the middle of their cells, at most
_DOOR = np.array([3.0, 2.0])
_TASKS = (((1, 1), (3, 5)), ((3, 5), (1, 1)), ((3, 1), (1, 5)), ((2, 5), (2, 1)), ((1, 1), (3, 2)))


def move(place: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Where points [..., 2] are after actions [..., 2] in [-1, 1]: x first, then y, and neither into a wall."""
    place = np.array(place, np.float64)
    for axis in (0, 1):
        moved = place.copy()
        moved[..., axis] += _STEP * np.clip(action[..., axis], -1, 1)
        column, row = np.moveaxis(np.rint(moved).astype(int), -1, 0)
        place = np.where(MAZE[row, column][..., None] == 0, moved, place)
    return place


def toward(place: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Unit vectors [..., 2] along the shortest way from points to goals [..., 2]."""
    apart = (place[..., :1] < _DOOR[0] - 0.5) & (goal[..., :1] > _DOOR[0] + 0.5)
    apart |= (place[..., :1] > _DOOR[0] + 0.5) & (goal[..., :1] < _DOOR[0] - 0.5)
    way = np.where(apart, _DOOR, goal) - place
    return way / np.maximum(np.linalg.norm(way, axis=-1, keepdims=True), 1e-6)


def around(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Points [..., 2] near the middles of cells [..., 2], which are (row, column)."""
    middle = np.asarray(cells, np.float64)[..., ::-1]
    return middle + rng.uniform(-_NOISE, _NOISE, middle.shape)


class TwoRooms(gymnasium.Env):
    """The task in gymnasium; the time limit is the registration's."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    maze_map = MAZE
    num_tasks = len(_TASKS)

    def ij_to_xy(self, cell: Any) -> tuple[float, float]:
        """The middle of cell (row, column)."""
        return float(cell[1]), float(cell[0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts task ``task_id`` of the options, their ``task_info``, or any task; the goal is in the info."""
        super().reset(seed=seed)
        options = options or {}
        number = options.get("task_id") or int(self.np_random.integers(self.num_tasks)) + 1
        start, goal = _TASKS[number - 1]
        if "task_info" in options:
            start, goal = (options["task_info"][name] for name in ("init_ij", "goal_ij"))
        self.place, self.goal = (around(np.array(cell), self.np_random) for cell in (start, goal))
        return self.place.astype(np.float32), {"goal": self.goal.astype(np.float32)}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Takes an action [2]; the reward is 1 at the goal, where the episode ends, and 0 elsewhere."""
        self.place = move(self.place, np.asarray(action, np.float64))
        success = bool(np.linalg.norm(self.place - self.goal) <= TOLERANCE)
        return self.place.astype(np.float32), float(success), success, False, {"success": float(success)}


gymnasium.register(NAME, f"{__name__}:TwoRooms", max_episode_steps=LIMIT)
