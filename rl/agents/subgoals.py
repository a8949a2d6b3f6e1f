"""Subgoals on the way to a goal, for sets of entities: models that propose them, the choice among them, a policy.

A model proposes candidates ``w_1, ..., w_N`` at entities ``s`` with goal entities ``g`` (`rl.networks.entity`), a value
selects among them, and the policy pursues what was selected until it is time to plan anew. `rl.agents.hecrl` has the
losses of the models and the rule of the choice. ``config`` is an agent's, with the settings of `rl.agents.hecrl.Config`
that are named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl import acting, masks
from rl.networks import diffusion, entity
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION
from rl.settings import is_known, require_choices
from rl.types import Actor, Array, Key, Params, Spec, State
from rl.values import losses

CHOICES = ("best", "random")
AWR_ERRORS = ("squared", "chamfer")
# Candidates that one seed plans with at the same time, so that many environments fit into memory.
AT_ONCE = 2048


# ---- proposals ----------------------------------------------------------------------------------------------


class Proposal(NamedTuple):
    """A model of subgoals ``w`` [..., N, F] on the way from entities ``s`` to goal entities ``g``, both like it."""

    init: Callable[[Key, Array, Array], Params]  # key, s, g
    # params, s, g, w, key, and what computes V(w, g) - V(s, g) [...] if it is asked for -> [...]
    loss: Callable[[Params, Array, Array, Array, Key, Callable[[], Array]], Array]
    draw: Callable[[Params, Array, Array, Key], Array]  # params, s, g, key -> candidates [..., C, N, F]


def by_diffusion(config: Any, features: int) -> Proposal:
    """Candidates from a diffusion model over the entities of a subgoal, all of which it changes together."""
    process = diffusion.cosine(config.diffusion_steps, config.prediction)
    network, free = entity.denoiser(features, config.network), _not_ids(config, features)

    def init(key: Key, s: Array, g: Array) -> Params:
        return network.init(key, s, jnp.zeros(()), s, g)

    def loss(params: Params, s: Array, g: Array, w: Array, key: Key, advantage: Callable[[], Array]) -> Array:
        del advantage
        predict = lambda x, t: network.apply(params, x, t, s, g)
        return diffusion.loss(process, predict, w, key, rank=2, free=free)

    def draw(params: Params, s: Array, g: Array, key: Key) -> Array:
        s, g = s[..., None, :, :], g[..., None, :, :]
        known = jnp.broadcast_to(s, (*s.shape[:-3], config.candidates, *s.shape[-2:]))
        predict = lambda x, t: network.apply(params, x, t, s, g)
        return diffusion.sample(process, predict, known, key, free=free, eta=config.eta)

    return Proposal(init, loss, draw)


def by_regression(config: Any, features: int) -> Proposal:
    """One candidate, the mean of subgoals weighted by how far they lead (advantage-weighted regression)."""
    network, free = entity.regressor(features, config.network), _not_ids(config, features)

    def mean(params: Params, s: Array, g: Array) -> Array:
        return diffusion.hold(network.apply(params, s, g), s, free)

    def loss(params: Params, s: Array, g: Array, w: Array, key: Key, advantage: Callable[[], Array]) -> Array:
        del key
        x = mean(params, s, g)
        if config.awr_error == "chamfer":
            error = entity.chamfer(x, w)
        else:
            error = jnp.square(x - w).mean((-2, -1), where=jnp.broadcast_to(free, x.shape))
        return losses.awr_weight(advantage(), config.awr_temperature) * error

    def draw(params: Params, s: Array, g: Array, key: Key) -> Array:
        del key
        return mean(params, s, g)[..., None, :, :]

    return Proposal(network.init, loss, draw)


def _not_ids(config: Any, features: int) -> Any:
    """The features of an entity that a subgoal may change: bool, all of them or [F]."""
    return jnp.arange(features) < features - config.ids if config.ids else True


PROPOSALS = {"diffusion": by_diffusion, "awr": by_regression}


def require(config: Any) -> None:
    """Raises ValueError for settings of subgoals that make no sense together."""
    choices = {"subgoals": (*PROPOSALS, "none"), "choice": CHOICES, "awr_error": AWR_ERRORS}
    require_choices(config, choices)
    if config.subgoals != "none" and config.goals.subgoal_steps < 1:
        raise ValueError(
            "goals.subgoal_steps=0 leaves batches without subgoals to learn from: give the steps to one, such as "
            "50, or subgoals=none"
        )
    swept = not (is_known(config.radius) and is_known(config.discount))
    low, high = goals.value_bounds(config.goals, config.discount)
    planned = config.subgoals != "none" and config.filtered
    if planned and not swept and not low - 1e-3 <= config.radius <= high:
        raise ValueError(
            f"radius={config.radius} lies outside of [{low:.4g}, {high:.4g}], all that values can be with this "
            "discount and these goals, so that it tells no candidates apart: give one inside, or filtered=False"
        )
    diffusion.cosine(config.diffusion_steps, config.prediction)


_DIFFUSION = ("candidates", "diffusion_steps", "prediction", "eta")
_AWR = ("awr_temperature", "awr_error")
_PLANNING = ("choice", "filtered", "direct", "radius", "replan_every", "max_subgoals")


def unused(config: Any) -> dict[str, str]:
    """{setting: why} of the settings of subgoals that do nothing beside the others."""
    if config.subgoals == "none":
        every = (*_DIFFUSION, *_AWR, *_PLANNING, "subgoal_optimiser")
        why = "with subgoals=none the goal is pursued at once"
        return dict.fromkeys((*every, *goals.NO_SUBGOALS), why)
    if config.subgoals == "awr":
        reasons = dict.fromkeys(_DIFFUSION, "it is of subgoals=diffusion; awr proposes one mean")
    else:
        reasons = dict.fromkeys(_AWR, "it is of subgoals=awr")
    if config.subgoals == "awr" or config.candidates == 1:
        reasons["choice"] = "there is one candidate to choose from"
    if not config.filtered:
        reasons["radius"] = "with filtered=False every candidate is feasible"
    return reasons


# ---- planning -----------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is pursued next."""

    subgoal: Array  # [..., N, F], the goal itself where `is_goal`
    is_goal: Array  # [...] bool


def plan(
    config: Any,
    propose: Callable[[Array, Array, Key], Array],
    value: Callable[[Array, Array], Array],
    s: Array,
    g: Array,
    key: Key,
) -> Plan:
    """A subgoal for entities ``s`` and goal entities ``g``, [..., N, F] both.

    Args:
      config: as for `select`.
      propose: (s, g, key) -> candidates [..., C, N, F].
      value: (s, g) -> [...].
      s: entities.
      g: goal entities.
      key: of candidates and choice.
    """
    draw_key, choice_key = jax.random.split(key)
    candidates = propose(s, g, draw_key)
    to_subgoal, to_goal = value(s[..., None, :, :], candidates), value(candidates, g[..., None, :, :])
    index, is_goal = select(config, to_subgoal, to_goal, value(s, g), choice_key)
    chosen = jnp.take_along_axis(candidates, index[..., None, None, None], -3)[..., 0, :, :]
    return Plan(jnp.where(is_goal[..., None, None], g, chosen), is_goal)


def select(config: Any, to_subgoal: Array, to_goal: Array, at_once: Array, key: Key) -> tuple[Array, Array]:
    """The number [...] of the candidate to pursue, and bool [...]: pursue the goal instead.

    Args:
      config: ``choice``, ``filtered``, ``direct`` and ``radius``.
      to_subgoal: [..., C], V(s, w) of each candidate.
      to_goal: [..., C], V(w, g).
      at_once: [...], V(s, g).
      key: of a random choice.
    """
    feasible = to_subgoal >= config.radius if config.filtered else jnp.ones(to_subgoal.shape, bool)
    score = to_goal if config.choice == "best" else jax.random.uniform(key, to_goal.shape)
    index = jnp.where(feasible, score, -jnp.inf).argmax(-1)
    is_goal = ~feasible.any(-1)
    if config.direct:
        is_goal |= at_once > jnp.take_along_axis(to_goal, index[..., None], -1)[..., 0]
    return index, is_goal


# ---- acting -------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Of the policy within an episode."""

    step: Array  # [...] int32, steps since the episode started
    subgoal: Array  # [..., *observation], what is pursued


def pursuit(
    config: Any,
    spec: Spec,
    entities: Callable[[Array], Array],
    replan: Callable[[State, Array, Array, Key], Array],
    act: Callable[[State, Any, Key], Array],
) -> Actor:
    """The policy that pursues subgoals, each for ``replan_every`` steps, and after ``max_subgoals`` the goal.

    Args:
      config: ``replan_every``, ``max_subgoals`` and ``candidates``.
      spec: of the environment, with goals.
      entities: part of an observation -> [..., N, F].
      replan: (state, s [N, F], g [N, F], key) -> the subgoal to pursue next [N, F].
      act: (state, observation with the subgoal as its goal, key) -> action.
    """

    def start(state: State, observation: Any) -> Memory:
        goal = observation[GOAL]
        lead = goal.shape[: goal.ndim - len(spec.observation_shape[GOAL])]
        return Memory(jnp.zeros(lead, jnp.int32), goal)

    def step(state: State, memory: Memory, observation: Any, first: Array, key: Key) -> tuple[Array, Memory]:
        goal, time = observation[GOAL], jnp.where(first, 0, memory.step)
        over = time >= config.max_subgoals * config.replan_every
        due = ~over & (time % config.replan_every == 0)
        sets = entities(observation[OBSERVATION]), entities(goal)
        fresh = lambda pair, key: replan(state, pair[0], pair[1], key)
        group = max(1, AT_ONCE // config.candidates)
        subgoal = acting.refresh(due, fresh, sets, entities(memory.subgoal), key, at_once=group)
        subgoal = masks.select_rows(over, goal, subgoal.reshape(goal.shape))
        return act(state, {**observation, GOAL: subgoal}, key), Memory(time + 1, subgoal)

    return Actor(start, step)
