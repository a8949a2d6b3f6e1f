"""The shapes that travel through the library. No logic lives here.

Shape letters used in every docstring: ``B`` batch, ``E`` ensemble members, ``K`` outputs of a value head,
``A`` discrete actions, ``T`` time, ``...`` any leading axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Array = jax.Array
Key = jax.Array
Params = Any
Metrics = Mapping[str, Array]


class Transition(NamedTuple):
    """One step of experience, or a batch of them with equal leading axes.

    ``discount`` is the environment's own: of a single step 0 where the episode *terminated*, 1 everywhere else, time
    limits included. The agent's gamma multiplies it; where a row stands for m steps (`rl.replay.dataset.n_step`,
    `rl.replay.chunks`), it is gamma^(m-1) in place of 1. ``next_action`` is the action that was logged at
    ``next_observation``; where none was (the last step of an episode) it repeats ``action`` and
    ``has_next_action`` is 0.
    """

    observation: Any  # [..., *observation shape] float32 or uint8: an array, or a nested dict of arrays
    action: Any  # [..., D] float32 in [-1, 1], or [...] int32
    reward: Any  # [...] float32
    discount: Any  # [...] float32 in [0, 1]
    next_observation: Any  # like observation
    next_action: Any  # like action
    has_next_action: Any  # [...] float32 in {0, 1}
    # [...] int32: the source that a row was drawn from, where a batch has several; 0 is logged data. Ask
    # `rl.replay.source.is_logged` which rows are demonstrations
    origin: Any = None


class TokenBatch(NamedTuple):
    """Rows of ``T`` tokens, each holding one or more episodes of a token MDP.

    The action at an action token is the token, its state all tokens of the episode before it. ``reward`` and
    ``discount`` are those of taking that action; other tokens have reward 0 and discount 1. ``discount`` is 0
    only at the last action of an episode that *terminated*. The agent's gamma multiplies it, per action token.
    """

    tokens: Any  # [..., T] int32
    segment: Any  # [..., T] int32: which episode of the row, counted from 1; 0 is padding
    is_action: Any  # [..., T] bool: the agent's own tokens
    reward: Any  # [..., T] float32
    discount: Any  # [..., T] float32 in {0, 1}
    imitate: Any  # [..., T] float32: weight of an action in likelihood losses


class Spec(NamedTuple):
    """What an agent must know of its environment before it sees any data."""

    # (O,), (H, W, C) or (T, O); of observations that are nested dicts of arrays, a dict of the same keys (`rl.nest`)
    observation_shape: Any
    action_size: int  # dimensions of a continuous action, or the number of discrete ones
    discrete: bool = False


class State(NamedTuple):
    """Everything a learner carries from one update to the next; the same shape for every agent.

    Targets live beside ``params``, never inside them: an optimiser must not hold moments for them.
    """

    params: Any  # {name: parameters}
    target: Any  # {name: parameters}, a subset of the names in params
    optimiser: Any  # {name: optax state}, the same names as params
    step: Any  # [] int32, updates done so far


class Actor(NamedTuple):
    """A policy with memory: chunks of actions, subgoals that hold for some steps.

    Memory is a pytree whose leaves have the leading axes of the observations that it goes with.
    """

    # (state, [..., *observation]) -> memory before the first step
    start: Callable[[State, Any], Any]
    # (state, memory, [..., *observation], first [...] bool, key) -> action, memory; where ``first`` an episode starts
    # and what the memory holds of the one before must not be used
    act: Callable[[State, Any, Any, Array, Key], tuple[Array, Any]]


class Learner(NamedTuple):
    """An algorithm, as three pure functions, and more for those that can do more."""

    # Batches are a `Transition`, or a `TokenBatch` for learners of language. Observations [..., *observation] are
    # arrays or nested dicts of arrays, as the `Spec` says.
    init: Callable[[Key, Any], State]  # the batch gives shapes only
    update: Callable[[State, Any, Key], tuple[State, Metrics]]
    act: Callable[[State, Any, Key], Array]  # (state, [..., *observation], key) -> [..., D] or [...] int32
    # (state, [..., *observation], key) -> [...]: the value of a state as the targets of `update` continue with it;
    # where they take it from target networks of V (gcivl, hiql), that of the networks themselves
    value: Callable[[State, Any, Key], Array] | None = None
    # (state, [..., *observation], key) -> like act: how it collects its own experience
    explore: Callable[[State, Any, Key], Array] | None = None
    # (state, batch [B], weights [B], key) -> state, metrics, priorities [B]: an update by weighted rows, and how much
    # each is worth another look, at least 0 (how far it was from its target: `rl.values.heads.divergence`)
    weighted: Callable[[State, Transition, Array, Key], tuple[State, Metrics, Array]] | None = None
    # (state, [..., *observation], action [..., D] or [...]) -> [E, ...]: what each critic says of an action
    critics: Callable[[State, Any, Array], Array] | None = None
    # Policies with memory, in place of `act` and `explore`
    actor: Actor | None = None
    explorer: Actor | None = None
    # (state, memory, [..., *observation], candidates [C, *goal]) -> [..., *goal]: what a policy with subgoals pursues,
    # after the action there; one of the candidates where its subgoals are no observations
    subgoal: Callable[[State, Any, Any, Array], Array] | None = None
