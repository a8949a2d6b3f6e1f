"""Random shifts of the images that any agent learns from (DrQ, Kostrikov et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from rl import nest
from rl.agents import relabel
from rl.networks.cnn import random_shift
from rl.networks.layers import Architecture
from rl.replay.goals import OBSERVATION, GoalBatch
from rl.types import Key, Learner, Spec


def augmented(learner: Learner, spec: Spec, architecture: Architecture) -> Learner:
    """``learner``, whose updates see images shifted at random by up to ``architecture.shift`` pixels.

    Each image on its own, that before a step and that after it, those of a dict, whose other entries stay, and goals.
    Without images, or with a shift of 0, so does the learner.
    """
    if not architecture.shift or all(len(shape) != 3 for shape in nest.leaves(spec.observation_shape)):
        return learner

    def shift(observation: Any, shape: Any, key: Key) -> Any:
        if isinstance(shape, Mapping):
            keys = jax.random.split(key, len(shape))
            return {
                name: shift(observation[name], shape[name], keys[i]) for i, name in enumerate(sorted(shape))
            }
        return random_shift(observation, key, architecture.shift) if len(shape) == 3 else observation

    def shifted(batch: Any, key: Key) -> Any:
        if isinstance(batch, GoalBatch):
            shape = spec.observation_shape[OBSERVATION]
            goals = {
                name: goal for name, goal in batch._asdict().items() if name != "value" and goal is not None
            }
            keys = jax.random.split(key, 1 + len(goals))
            moved = {name: shift(goals[name], shape, keys[1 + i]) for i, name in enumerate(goals)}
            return batch._replace(value=shifted(batch.value, keys[0]), **moved)
        keys = jax.random.split(key)
        return batch._replace(
            observation=shift(batch.observation, spec.observation_shape, keys[0]),
            next_observation=shift(batch.next_observation, spec.observation_shape, keys[1]),
        )

    return relabel.make(learner, lambda state, batch, key: (shifted(batch, key), {}))
