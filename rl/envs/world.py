"""What an environment of pure functions is (`rl.envs.functional`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rl.types import Array, Key, Spec


class Outcome(NamedTuple):
    """One step of ``N`` copies."""

    next_observation: Any  # [N, *observation] where the actions led, also where the episode ended there
    reward: Array  # [N] float32
    terminated: Array  # [N] bool; an episode that ended by a time limit has not
    observation: Any  # [N, *observation] what is seen now: the same, or the first of a new episode
    first: Array  # [N] bool, a new episode starts with it: always where one terminated
    state: Any  # pytree of [N, ...]


class World(NamedTuple):
    """An environment as pure functions of many copies; where an episode is over the next one begins."""

    spec: Spec
    reset: Callable[[Key], tuple[Any, Any]]  # keys [N] -> observations [N, *observation], states [N, ...]
    # keys [N], states, actions [N, D] in [-1, 1] or [N] int32 -> outcome
    step: Callable[[Key, Any, Array], Outcome]
