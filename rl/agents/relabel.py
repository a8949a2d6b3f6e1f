"""Agents whose batches are changed before each update: other rewards, next observations, or views of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rl.types import Array, Key, Learner, Metrics, State

# (state, batch, key) -> the batch to learn from, and metrics of the change
Relabel = Callable[[State, Any, Key], tuple[Any, Metrics]]


def make(learner: Learner, relabel: Relabel) -> Learner:
    """``learner`` on relabelled batches, in ``weighted`` too where it has that; metrics gain those of the change.

    Args:
      learner: whose updates are made.
      relabel: changes a batch; it and the update have keys of their own.
    """

    def update(state: State, batch: Any, key: Key) -> tuple[State, Metrics]:
        relabel_key, update_key = jax.random.split(key)
        batch, changes = relabel(state, batch, relabel_key)
        state, metrics = learner.update(state, batch, update_key)
        return state, {**metrics, **changes}

    if learner.weighted is None:
        return learner._replace(update=update)
    plain = learner.weighted

    def weighted(state: State, batch: Any, weight: Array, key: Key) -> tuple[State, Metrics, Array]:
        relabel_key, update_key = jax.random.split(key)
        batch, changes = relabel(state, batch, relabel_key)
        state, metrics, priority = plain(state, batch, weight, update_key)
        return state, {**metrics, **changes}, priority

    return learner._replace(update=update, weighted=weighted)
