"""Behaviour of the pointmaze datasets: follow the shortest path through the maze, with noise."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from rl.data.recipes.catalogue import Recipe
from rl.data.recipes.episode import Episode, Simulate, buffers, draw_seed, seeded

ACTION_NOISE = 0.5  # standard deviation, added to the unit direction
STITCH_DISTANCE = 4  # cells between start and goal

Cell = tuple[int, int]


def simulator(recipe: Recipe, rows: int) -> Simulate:
    """Return a function that makes one pointmaze episode of ``rows`` rows.

    Protocol (OGBench, Park et al. 2025, section on datasets, and the parameters published with its generator):
    start in a uniformly drawn free cell, follow the direction to the next cell of the shortest path, add
    N(0, 0.5) to it and clip to [-1, 1]. ``navigate`` draws goals from the cells that are not corridors, and a
    new one at each success; ``stitch`` has one goal four cells from the start and stays there.
    """
    env = _make_env(recipe.env)
    free = _free_cells(env.maze_map)
    corners = [cell for cell in free if not _is_corridor(env.maze_map, cell)]
    # The oracle searches the whole maze at every call, but its answer depends on the two cells alone.
    next_cell_xy = functools.cache(
        lambda here, goal: env.get_oracle_subgoal(env.ij_to_xy(here), env.ij_to_xy(goal))[0]
    )

    def episode(seed: np.random.SeedSequence) -> Episode:
        with seeded(seed) as rng:
            start = _pick(free, rng)
            goals = corners if recipe.kind == "navigate" else _cells_at(env.maze_map, start, STITCH_DISTANCE)
            task = {"init_ij": start, "goal_ij": _pick(goals, rng)}
            env.action_space.seed(draw_seed(rng))  # a maze takes random steps while it resets
            observation, _ = env.reset(seed=draw_seed(rng), options={"task_info": task})
            data = buffers(rows, observation=len(observation), action=2, qpos=env.model.nq, qvel=env.model.nv)
            attempts, reached = int(recipe.kind == "stitch"), 0
            for row in range(rows):
                xy = env.get_xy()
                to_next = next_cell_xy(env.xy_to_ij(xy), env.xy_to_ij(env.cur_goal_xy)) - xy
                direction = to_next / (np.linalg.norm(to_next) + 1e-6)
                action = np.clip(direction + rng.normal(0, ACTION_NOISE, 2), -1, 1)
                data["observations"][row] = observation
                data["actions"][row] = action
                observation, _, _, _, info = env.step(action)
                data["qpos"][row] = info["prev_qpos"]
                data["qvel"][row] = info["prev_qvel"]
                if recipe.kind == "stitch":
                    reached = max(reached, int(info["success"]))
                elif info["success"]:
                    attempts, reached = attempts + 1, reached + 1
                    env.set_goal(goal_xy=env.add_noise(env.ij_to_xy(_pick(corners, rng))))
            return Episode(data, attempts, reached)

    return episode


def _pick(cells: list[Cell], rng: np.random.Generator) -> Cell:
    return cells[rng.integers(len(cells))]


def _make_env(name: str) -> Any:
    import gymnasium
    import ogbench.locomaze  # noqa: F401  registers the environments

    env: Any = gymnasium.make(name, terminate_at_goal=False, disable_env_checker=True).unwrapped
    os.unlink(env.fullpath)  # the maze's XML, written to the temporary folder and never removed by ogbench
    return env


def _free_cells(maze: np.ndarray) -> list[Cell]:
    return [(int(i), int(j)) for i, j in np.argwhere(maze == 0)]


def _is_corridor(maze: np.ndarray, cell: Cell) -> bool:
    """Whether ``cell`` lies in a straight passage: open on two opposite sides, walled on the other two."""
    i, j = cell
    sides = [bool(maze[i - 1, j]), bool(maze[i + 1, j]), bool(maze[i, j - 1]), bool(maze[i, j + 1])]
    return sides in ([False, False, True, True], [True, True, False, False])


def _cells_at(maze: np.ndarray, start: Cell, distance: int) -> list[Cell]:
    """Return the cells whose shortest path from ``start`` has ``distance`` steps, or ``start`` if there are none."""
    seen, frontier = {start}, [start]
    for _ in range(distance):
        neighbours = {(i + di, j + dj) for i, j in frontier for di, dj in [(-1, 0), (1, 0), (0, -1), (0, 1)]}
        frontier = sorted(cell for cell in neighbours - seen if maze[cell] == 0)
        seen.update(frontier)
    return frontier or [start]
