"""Short episodes inside a world: from logged observations, with a policy, for a fixed number of steps.

Shapes are fixed, so that rollouts compile: an episode that terminates early keeps its place, and its later rows are
marked as not valid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.dynamics.base import Dynamics
from rl.dynamics.termination import Rule
from rl.types import Array, Key, Transition

_TOLERATED = 1e-3  # share of the rollouts' rows that may be lost


class Rollouts(NamedTuple):
    """``B`` episodes of at most ``k`` steps; without the axis [k], one step of them."""

    transitions: Transition  # [k, B, ...]
    valid: Array  # [k, B] bool: False after the step that terminated the episode


class RolloutState(NamedTuple):
    """Where ``B`` rollouts are."""

    observation: Array  # [B, O]
    alive: Array  # [B] bool: the episode has not terminated


def roll(
    dynamics: Dynamics,
    terminates: Rule,
    act: Callable[[Array, Key], Array],
    length: int,
    params: Any,
    observation: Array,
    key: Key,
    penalty: Callable[[Array, Array], Array] | None = None,
) -> Rollouts:
    """Rolls ``act`` out in a world.

    The last step of a rollout is stored like any other, with discount 1 unless it terminated: that its next
    observation may be one which no rollout ever starts from is the edge-of-reach problem, and not hidden here. Where an
    episode ended in a next observation that is not finite, the row repeats its own observation in place of it.

    Args:
      dynamics: the world.
      terminates: which next observations end an episode.
      act: (observations [B, O], key) -> actions [B, D], clipped to [-1, 1], or [B] int32.
      length: ``k``.
      params: of the world.
      observation: [B, O] starts.
      key: of everything random.
      penalty: the world's prediction (mean and deviation [M, B, O + 1]) -> what is taken off the rewards [B].
    """

    one = step(dynamics, terminates, act, penalty)
    start = RolloutState(observation, jnp.ones(len(observation), bool))
    return jax.lax.scan(functools.partial(one, params), start, jax.random.split(key, length))[1]


def step(
    dynamics: Dynamics,
    terminates: Rule,
    act: Callable[[Array, Key], Array],
    penalty: Callable[[Array, Array], Array] | None = None,
) -> Callable[[Any, RolloutState, Key], tuple[RolloutState, Rollouts]]:
    """One step of all rollouts, (params, ongoing, key) -> ongoing, rows [B]; the arguments are those of `roll`."""

    def one(params: Any, ongoing: RolloutState, key: Key) -> tuple[RolloutState, Rollouts]:
        observation, alive = ongoing
        act_key, step_key = jax.random.split(key)
        action = act(observation, act_key)
        if jnp.issubdtype(action.dtype, jnp.floating):
            action = jnp.clip(action, -1.0, 1.0)  # as environments clip them: a model has seen no other ones
        following, reward = dynamics.step(params, observation, action, step_key)
        if penalty:
            reward = reward - penalty(*dynamics.predict(params, observation, action))
        ended = terminates(following)
        # Rules may end an episode where nothing is finite: no value follows, but 0 times NaN is NaN.
        lost = ended & ~jnp.isfinite(following).all(-1)
        following = jnp.where(lost[:, None], observation, following)
        rows = Transition(
            observation=observation,
            action=action,
            reward=reward,
            discount=1.0 - ended,
            next_observation=following,
            next_action=action,
            has_next_action=jnp.zeros_like(reward),
        )
        # An episode that is over stands still: a world need not know what follows its end.
        goes_on = alive & ~ended
        ongoing = RolloutState(jnp.where(goes_on[:, None], following, observation), goes_on)
        return ongoing, Rollouts(rows, alive)

    return one


def without_lost(rolled: Rollouts) -> tuple[Rollouts, Array]:
    """The rollouts in which rows that are not finite are not valid, and how many these are, [] int32."""
    rows = rolled.transitions
    finite = jnp.isfinite(rows.reward) & jnp.isfinite(rows.next_observation).all(-1)
    return rolled._replace(valid=rolled.valid & finite), (rolled.valid & ~finite).sum()


def check_lost(
    lost: np.ndarray, when: str, remedy: str, error: type[ArithmeticError] = FloatingPointError
) -> None:
    """Raises ``error`` if more than one in 1,000 rows of the rollouts was not finite.

    Fewer, as of a few rollouts that start where a model knows little, are left out, and the metric ``lost`` says how
    many they are: no update sees them, and they need not end a run of days.

    Args:
      lost: [S], the share of each seed.
      when: with which the message begins.
      remedy: with which it ends.
      error: what is raised.
    """
    seeds = np.flatnonzero(lost > _TOLERATED)
    if seeds.size:
        raise error(
            f"{when}: the dynamics diverged: a share of {lost.max():.2g} of the rollouts' rows is not finite (seeds "
            f"{seeds.tolist()}); {remedy}"
        )
