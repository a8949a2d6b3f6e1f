"""Cubes and the arm as a set of entities, for networks that take any number of them (`rl.networks.entity`).

OGBench observes a scene of cubes as one vector, of 19 numbers for the arm and 9 for each cube. HECRL (Haramati et al.
2026) reads the same scene as a set [1 + cubes, 15]: the arm first, then the cubes, each with 6 features

    arm    position (3), cosine and sine of its yaw, opening of the gripper
    cube   position (3), cosine and sine of its yaw, 0

in OGBench's units (decimetres from the middle of the table), and a one-hot id of 9. The arm's id is 0; those of the
cubes are drawn anew for every episode from the 8 others, so that networks know them all where more cubes are met than
in training. Goals carry the ids of the observation. A goal from another episode would name other cubes: HECRL draws
none.

``goals/cube-double-v0+entities`` is such an environment (`rl.envs.make`), ``cube-double-play-v0+entities`` such a
dataset (`rl.data.load`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl import nest

SUFFIX = "+entities"
FEATURES, IDS = 6, 9
NEAR = 0.4  # decimetres from its goal at which a cube has reached it, however it is turned: OGBench's 4 cm
_ARM, _CUBE = 19, 9  # numbers of OGBench's vector
_OF_ARM = [12, 13, 14, 15, 16, 17]
_OF_CUBE = [0, 1, 2, 7, 8]


def cubes(observation_size: int) -> int:
    """How many cubes a vector of OGBench's describes.

    Raises:
      ValueError: none that it could.
    """
    count, rest = divmod(observation_size - _ARM, _CUBE)
    if rest or not 1 <= count < IDS:
        raise ValueError(
            f"{SUFFIX} reads OGBench's scenes of 1 to {IDS - 1} cubes, whose observations have {_ARM} numbers and "
            f"{_CUBE} for each cube: not vectors of {observation_size}"
        )
    return count


def check_name(name: str) -> None:
    """Raises ValueError for OGBench's puzzles: one of their vectors is as long as that of four cubes."""
    if re.search(r"\bpuzzle-\dx\d", name):
        raise ValueError(f"{name} has buttons, and {SUFFIX} reads cubes alone: leave {SUFFIX} out")


def draw_ids(count: int, generator: np.random.Generator) -> np.ndarray:
    """Ids [1 + count] of the arm and of ``count`` cubes, int64."""
    return np.append(0, 1 + generator.permutation(IDS - 1)[:count])


def of_vectors(observation: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Sets of entities [..., 1 + cubes, 15] float32.

    Args:
      observation: [..., 19 + 9 cubes], OGBench's.
      ids: [..., 1 + cubes], or of shape that broadcasts to it.
    """
    count = cubes(observation.shape[-1])
    features = np.zeros((*observation.shape[:-1], 1 + count, FEATURES), np.float32)
    features[..., 0, :] = observation[..., _OF_ARM]
    vectors = observation[..., _ARM:].reshape(*observation.shape[:-1], count, _CUBE)
    features[..., 1:, : len(_OF_CUBE)] = vectors[..., _OF_CUBE]
    one_hot = np.broadcast_to(np.eye(IDS, dtype=np.float32)[ids], (*features.shape[:-1], IDS))
    return np.concatenate([features, one_hot], -1)


def reached(position: Any, goal: Any) -> Any:
    """Whether all cubes are where the goal has them: positions [..., cubes, 3], both NumPy's or JAX's; bool [...]."""
    return (((position - goal) ** 2).sum(-1) <= NEAR**2).all(-1)


def positions(observation: Any) -> Any:
    """Of the cubes in sets of entities [..., 1 + cubes, 15]: [..., cubes, 3]."""
    return observation[..., 1:, :3]


class Entities(gymnasium.Wrapper):
    """An environment of OGBench's cubes whose observations, and the goals in them, are sets of entities."""

    def __init__(self, env: gymnasium.Env, name: str):
        """Wraps ``env``, which observes vectors or dicts of them.

        Raises:
          ValueError: they are not those of cubes.
        """
        super().__init__(env)
        check_name(name)
        sizes = {math.prod(box.shape) for box in nest.leaves(env.observation_space)}
        try:
            (self._count,) = {cubes(size) for size in sizes}
        except ValueError as error:
            raise ValueError(f"environment {name!r}: {error}") from None
        box = spaces.Box(-np.inf, np.inf, (1 + self._count, FEATURES + IDS), np.float32)
        theirs = env.observation_space
        self.observation_space = (
            spaces.Dict(dict.fromkeys(theirs.spaces, box)) if isinstance(theirs, spaces.Dict) else box
        )
        self._generator = np.random.default_rng()
        self._ids = draw_ids(self._count, self._generator)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode with ids of its own, a function of the seed where there is one."""
        if seed is not None:
            self._generator = np.random.default_rng((seed, 1))
        self._ids = draw_ids(self._count, self._generator)
        observation, info = self.env.reset(seed=seed, options=options)
        return self._sets(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Steps the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._sets(observation), reward, terminated, truncated, info

    def _sets(self, observation: Any) -> Any:
        if isinstance(observation, Mapping):
            return {key: of_vectors(x, self._ids) for key, x in observation.items()}
        return of_vectors(observation, self._ids)
