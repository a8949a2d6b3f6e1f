"""Policies with memory: what evaluation and online collection act with (`rl.types.Actor`).

A policy without memory is one whose memory is empty, so that no loop tells the two apart. Episodes end at different
times in environments that are stepped together: `resetting` puts back the memory of each one where its episode starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl import masks, nest
from rl.types import Actor, Array, Key, Learner, Spec, State


def memoryless(act: Callable[[Any, Any, Key], Array]) -> Actor:
    """An actor with empty memory from ``act`` (state, [..., *observation], key) -> action."""

    def step(state: Any, memory: Any, observation: Any, first: Array, key: Key) -> tuple[Array, Any]:
        del first
        return act(state, observation, key), memory

    return Actor(lambda state, observation: (), step)


def actor(learner: Learner) -> Actor:
    """How a learner acts when it is evaluated."""
    return learner.actor or memoryless(learner.act)


def explorer(learner: Learner) -> Actor:
    """How a learner acts when it collects its own experience.

    Raises:
      ValueError: it does not say how.
    """
    if learner.explorer:
        return learner.explorer
    if learner.explore is None:
        raise ValueError(
            "this agent has no way to explore, since it learns from a log: choose another --agent, sac or td3 for "
            "continuous actions, dqn for integers; an agent of your own must return explore (docs/new_agent.md)"
        )
    return memoryless(learner.explore)


def critics(learner: Learner) -> Callable[[State, Any, Array], Array]:
    """What each critic of a learner says of an action.

    Raises:
      ValueError: it has none, or does not return them.
    """
    if learner.critics is None:
        raise ValueError(
            "this agent returns no critics, which say what an action is worth (docs/new_agent.md)"
        )
    return learner.critics


def resetting(actor: Actor) -> Actor:
    """``actor`` with its memory back at the start wherever an episode starts, whether it looks at ``first`` or not."""

    def act(state: Any, memory: Any, observation: Any, first: Array, key: Key) -> tuple[Array, Any]:
        memory = masks.select_rows(first, actor.start(state, observation), memory)
        return actor.act(state, memory, observation, first, key)

    return actor._replace(act=act)


def refresh(
    due: Array, compute: Callable[[Any, Key], Any], inputs: Any, held: Any, key: Key, *, at_once: int = 1
) -> Any:
    """``held`` with what ``compute`` makes of ``inputs`` where ``due``: for what a policy plans only now and then.

    Rows are computed in groups, one group after another, so that memory does not grow with their number; groups without
    a row that is due cost nothing. Under `jax.vmap` too, where such a condition alone would be computed in every step:
    a group then has the rows of all that are batched together.

    Args:
      due: [...] bool.
      compute: (one row of ``inputs``, key) -> one row of ``held``.
      inputs: leaves [..., *any].
      held: leaves [..., *any].
      key: each row has one of its own.
      at_once: rows of a group at most; groups are as few as can be, and equally large but for the last.
    """
    count = due.size
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(count, *x.shape[due.ndim :]), tree)

    def refreshed(row: tuple[Array, Any, Any, Key]) -> Any:
        due, inputs, held, key = row
        fresh = jax.lax.cond(_any(due), lambda: compute(inputs, key), lambda: held)
        return masks.select_rows(due, fresh, held)

    groups = -(-count // at_once)
    group = -(-count // groups)
    rows = due.reshape(count), flat(inputs), flat(held), jax.random.split(key, count)
    result = jax.lax.map(refreshed, rows, batch_size=group)
    return jax.tree.map(lambda x: x.reshape(*due.shape, *x.shape[1:]), result)


def chunked(act: Callable[[Any, Any, Key], Array], spec: Spec, length: int, replan_every: int = 0) -> Actor:
    """A policy of single actions from ``act``, which decides on ``length`` at once.

    Between decisions the policy does not look at what it observes (open loop), and nothing is computed.

    Args:
      act: (state, [..., *observation], key) -> [..., length * D], one action after another; see `rl.replay.chunks`.
      spec: of the environment.
      length: actions in a chunk.
      replan_every: how many of them are executed before the next decision; 0: all. 1 decides anew in every step.

    Raises:
      ValueError: a negative ``replan_every``, or one beyond ``length``.
    """
    if not 0 <= replan_every <= length:
        raise ValueError(
            f"replan_every={replan_every} must lie between 0 and the length of a chunk, {length}: it is how many of "
            "its actions are executed before the next decision"
        )
    period = replan_every or length

    def start(state: Any, observation: Any) -> Any:
        lead = nest.leading(observation, spec.observation_shape)
        return jnp.zeros((*lead, length, spec.action_size)), jnp.full(lead, period, jnp.int32)

    def step(state: Any, memory: Any, observation: Any, first: Array, key: Key) -> tuple[Array, Any]:
        plan, executed = memory
        due = first | (executed == period)
        fresh = lambda observation, key: act(state, observation, key).reshape(length, spec.action_size)
        plan = refresh(due, fresh, observation, plan, key, at_once=due.size)
        place = jnp.where(due, 0, executed)
        action = jnp.take_along_axis(plan, place[..., None, None], -2)[..., 0, :]
        return action, (plan, place + 1)

    return Actor(start, step)


def in_chunks(learner: Learner, spec: Spec, length: int, replan_every: int = 0) -> Learner:
    """``learner``, which knows the environment of ``spec`` in chunks of actions, as a policy of single ones.

    It acts and explores as `chunked` says; ``act``, ``explore`` and ``critics`` are still of chunks.

    Raises:
      ValueError: as `chunked`; or the learner has a policy with memory, in whose place that of chunks would act.
    """
    if length == 1 and replan_every in (0, 1):
        return learner
    if learner.actor or learner.explorer:
        raise ValueError(
            f"--chunk={length}: the agent has a policy with memory (actor, explorer), which decides on single actions: "
            "leave it out (length=1)"
        )
    policy = lambda act: act and chunked(act, spec, length, replan_every)
    return learner._replace(actor=policy(learner.act), explorer=policy(learner.explore))


def without_optimiser(state: State) -> State:
    """All of a state that acting needs, half of it or less where the optimiser is Adam: what evaluations copy."""
    return state._replace(optimiser={})


def at_targets(state: State) -> State:
    """A state whose networks are its target networks, where it has any."""
    return state._replace(params={**state.params, **state.target})


def over_seeds(actor: Actor, states: State | int) -> Actor:
    """``actor`` of stacked states: everything it takes and gives has one more axis in front, over seeds.

    Args:
      actor: of one state.
      states: axes of the states, `rl.train.STACKED` or 0.
    """
    return Actor(jax.vmap(actor.start, (states, 0)), jax.vmap(actor.act, (states, 0, 0, 0, 0)))


def observing(actor: Actor, see: Callable[[Any], Any]) -> Actor:
    """``actor`` that is shown ``see(observation)``: standardised ones, say."""
    return Actor(
        lambda state, observation: actor.start(state, see(observation)),
        lambda state, memory, observation, first, key: actor.act(state, memory, see(observation), first, key),
    )


@jax.custom_batching.custom_vmap
def _any(where: Array) -> Array:
    """Whether any row is true, of all that are batched together: one condition for all of them."""
    return where.any()


@_any.def_vmap
def _any_of_a_batch(size: int, batched: Any, where: Array) -> tuple[Array, bool]:
    del size, batched
    return _any(where), False
