"""Behaviour of the pointmaze and antmaze datasets: follow the shortest path through the maze, with noise.

A point goes where it is told. An ant is told the same direction, and what its joints do is a trained policy's
(`rl.data.recipes.behaviour`, in `rl.envs.directional_ant`). One is shipped; another is made by

    python -m experiments.online --agent=sac --env=DirectionalAnt-v0 --steps=400000 --workdir=runs/ant
    python -m experiments.actors --run=runs/ant --snapshots=1 --out=ant.npz
    python -m experiments.collect --dataset=antmaze-medium-navigate-v0 --actors=ant.npz
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rl.data.recipes import behaviour
from rl.data.recipes.catalogue import Recipe
from rl.data.recipes.episode import Episode, Simulate, buffers, draw_seed, seeded

ACTION_NOISE = {"pointmaze": 0.5, "antmaze": 0.2}  # standard deviation, added to the action
EXPLORE_NOISE = 1.0  # in its place where kind is explore
EXPLORE_STEPS = 10  # until another direction is drawn there
STITCH_DISTANCE = 4  # cells between start and goal

Cell = tuple[int, int]
WALKER = "DirectionalAnt-v0"  # the environment in which it is trained
Walk = Callable[[np.ndarray, np.ndarray], np.ndarray]  # observation [O], direction [2] -> action [D]


def simulator(recipe: Recipe, rows: int, actors: str | None = None) -> Simulate:
    """Return a function that makes one episode of ``rows`` rows.

    Protocol (OGBench, Park et al. 2025, section on datasets, and the parameters published with its generator):
    start in a uniformly drawn free cell, take the action toward the next cell of the shortest path, add N(0, 0.5)
    to it, or N(0, 0.2) for an ant, and clip to [-1, 1]. ``navigate`` draws goals from the cells that are not
    corridors, and a new one at each success; ``stitch`` has one goal four cells from the start and stays there;
    ``explore`` follows directions that are drawn every ten steps, with N(0, 1) added.

    Args:
      recipe: which dataset.
      rows: of an episode.
      actors: the file of the walker's policies; None for those shipped.

    Raises:
      ValueError: there is no walker; see `rl.data.recipes.behaviour.load`.
    """
    walk = _walk(recipe, actors)
    env = _make_env(recipe.env)
    noise = EXPLORE_NOISE if recipe.kind == "explore" else ACTION_NOISE[recipe.env.split("-")[0]]
    size = env.action_space.shape[0]
    free = _free_cells(env.maze_map)
    corners = [cell for cell in free if not _is_corridor(env.maze_map, cell)]
    # The oracle searches the whole maze at every call, but its answer depends on the two cells alone.
    next_cell_xy = functools.cache(
        lambda here, goal: env.get_oracle_subgoal(env.ij_to_xy(here), env.ij_to_xy(goal))[0]
    )

    def episode(seed: np.random.SeedSequence) -> Episode:
        with seeded(seed) as rng:
            start = _pick(free, rng)
            goals = _cells_at(env.maze_map, start, STITCH_DISTANCE) if recipe.kind == "stitch" else corners
            task = {"init_ij": start, "goal_ij": _pick(goals, rng)}
            env.action_space.seed(draw_seed(rng))  # a maze takes random steps while it resets
            observation, _ = env.reset(seed=draw_seed(rng), options={"task_info": task})
            data = buffers(
                rows, observation=len(observation), action=size, qpos=env.model.nq, qvel=env.model.nv
            )
            attempts, reached = int(recipe.kind == "stitch"), 0
            direction = np.zeros(2)
            for row in range(rows):
                if recipe.kind != "explore":
                    xy = env.get_xy()
                    direction = _unit(next_cell_xy(env.xy_to_ij(xy), env.xy_to_ij(env.cur_goal_xy)) - xy)
                elif row % EXPLORE_STEPS == 0:
                    direction = _unit(rng.standard_normal(2))
                action = np.clip(walk(observation, direction) + rng.normal(0, noise, size), -1, 1)
                data["observations"][row] = observation
                data["actions"][row] = action
                observation, _, _, _, info = env.step(action)
                data["qpos"][row] = info["prev_qpos"]
                data["qvel"][row] = info["prev_qvel"]
                if recipe.kind == "stitch":
                    reached = max(reached, int(info["success"]))
                elif recipe.kind == "navigate" and info["success"]:
                    attempts, reached = attempts + 1, reached + 1
                    env.set_goal(goal_xy=env.add_noise(env.ij_to_xy(_pick(corners, rng))))
            return Episode(data, attempts, reached)

    return episode


def _walk(recipe: Recipe, actors: str | None) -> Walk:
    """How the maze's robot moves in a direction: a point by that itself, an ant by the mode of its best policy."""
    if not recipe.is_walked:
        return lambda observation, direction: direction
    policies = behaviour.load(actors, WALKER)
    policy = policies.policy(policies.card["expert"])
    return lambda observation, direction: policy.mode(
        np.concatenate([observation[2:], direction]).astype(np.float32)
    )


def _unit(way: np.ndarray) -> np.ndarray:
    return way / (np.linalg.norm(way) + 1e-6)


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
