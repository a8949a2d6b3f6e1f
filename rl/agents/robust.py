"""Any agent made robust to shifts of the dynamics: the regularised robust backup, estimated from samples.

A robust target lets an adversary move the distribution ``p`` of the next state at a price (R2PVI, Tang, Liu & Xu,
ICML 2025, whose duals are `rl.values.robust`):

    y = r + gamma d min_q { E_q[V(s')] + lambda D(q, p) }

Here ``p`` is uniform over what a dynamics model proposes for (s, a), one next state per member, and the logged
next state as one more. `worst_case` gives the minimiser ``q`` in closed form. One next state is drawn from it to
stand in the batch for the logged one, and the price ``gamma d lambda D`` joins the reward: the target that the agent
forms from this batch has ``y`` for its expectation, whatever the agent and whatever represents its values. ``V`` is
the agent's own, as its targets use it. Where it draws actions or noise, all next states share one draw, so that equal
ones have equal values; ``q`` is chosen by it and the target made with another, so that the choice is not flattered by
luck.

A proposal that ends its episode is worth nothing, by the task's rule (`rl.dynamics.termination`), and where the
adversary draws it the row ends; without a rule no proposal ends, and there is no protection against what ends episodes.

What to know. Only dynamics that the proposals show can be prepared for: a divergence moves mass between next states
that ``p`` has, and where the model is sure of one next state, the robust target is the plain one. With few proposals
the minimum over them is that of the sample. The reward of a row is the logged one. A next state that was not logged
has no logged next action (`rl.types.Transition`), so that ReBRAC's critic penalty is off there. Rows whose episode
terminated keep everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rl.agents import relabel
from rl.settings import is_known, require_choice
from rl.types import Array, Key, Learner, Metrics, State, Transition
from rl.values.robust import REGULARISED, worst_case

# (observation [B, O], action [B, ...], key) -> next observations [M, B, O]
Propose = Callable[[Array, Array, Key], Array]


def make(
    learner: Learner,
    propose: Propose,
    divergence: str,
    scale: float | Array,
    discount: float | Array,
    terminates: Callable[[Array], Array] | None = None,
) -> Learner:
    """``learner`` with robust targets; parameters and policy are its own.

    Metrics gain ``robust_loss``, the mean value that the targets gave up against the plain mean over the
    proposals, and ``robust_price``, the part of it that the adversary was paid back, both before ``discount``.

    Args:
      learner: any with a ``value``.
      propose: draws next states; see `rl.dynamics.base.Dynamics`.
      divergence: a name in `rl.values.robust.REGULARISED`.
      scale: lambda > 0, in units of value: for "tv" nothing more than lambda above the worst proposal counts.
      discount: the learner's gamma.
      terminates: proposals [M, B, O] -> [M, B] bool, those that end their episode; None: none does. The logged next
        state ends it where the row says so.

    Raises:
      ValueError: the learner has no value, the divergence is unknown, or the scale is not positive.
    """
    if learner.value is None:
        raise ValueError(
            "this agent has no value to be robust about (behaviour cloning has none): choose another"
        )
    require_choice("divergence", divergence, REGULARISED)
    if is_known(scale) and not scale > 0:
        raise ValueError(f"the robust scale must be positive, not {scale}: it is the price of a shift")
    value = learner.value

    def shifted(state: State, batch: Transition, key: Key) -> tuple[Transition, Metrics]:
        propose_key, value_key, draw_key = jax.random.split(key, 3)
        proposals = propose(batch.observation, batch.action, propose_key)
        candidates = jnp.concatenate([proposals, batch.next_observation[None]])  # [M + 1, B, O]
        # One key for all candidates: a difference between two of them is never the noise of the policy.
        values = jax.vmap(value, (None, 0, None), -1)(state, candidates, value_key)  # [B, M + 1]
        ends = jnp.zeros(values.shape, bool)
        if terminates is not None:
            over = terminates(proposals)
            ends = ends.at[:, :-1].set(over.T)
            # Rules may end an episode where nothing is finite: no value follows, but 0 times NaN is NaN.
            lost = over & ~jnp.isfinite(proposals).all(-1)
            candidates = candidates.at[:-1].set(jnp.where(lost[..., None], batch.observation, proposals))
        values = jnp.where(ends, 0.0, values)
        weights, price = worst_case(
            divergence, values, jnp.full(values.shape[-1], 1 / values.shape[-1]), scale
        )
        drawn = jax.random.categorical(draw_key, jnp.log(weights))
        drawn = jnp.where(batch.discount > 0, drawn, len(proposals))
        alive = batch.discount
        given_up = values.mean(-1) - (weights * values).sum(-1) - price
        metrics = {"robust_loss": (alive * given_up).mean(), "robust_price": (alive * price).mean()}
        paid = batch.reward + discount * alive * price
        ended = jnp.take_along_axis(ends, drawn[:, None], -1)[:, 0]
        return _replaced(batch, candidates, drawn)._replace(reward=paid, discount=alive * ~ended), metrics

    return relabel.make(learner, shifted)


def _replaced(batch: Transition, candidates: Array, drawn: Array) -> Transition:
    """The batch with next observations ``candidates[drawn]``, the last of which are the logged ones."""
    logged = drawn == len(candidates) - 1
    chosen = drawn.reshape(1, -1, *[1] * (candidates.ndim - 2))
    action_logged = logged.reshape(-1, *[1] * (batch.action.ndim - 1))
    return batch._replace(
        next_observation=jnp.take_along_axis(candidates, chosen, 0)[0],
        next_action=jnp.where(action_logged, batch.next_action, batch.action),
        has_next_action=batch.has_next_action * logged,
    )


def target_range(
    divergence: str, scale: float, proposals: int, low: float, high: float
) -> tuple[float, float]:
    """The range [low, high] of values, raised by the largest price that joins a reward.

    Args:
      divergence: as for `make`.
      scale: as for `make`.
      proposals: next states between which the adversary chooses, the logged one included: ``n``.
      low, high: what rewards alone give.

    The divergence from the uniform distribution over ``n`` is at most 1 - 1/n (tv), log n (kl) or n - 1 (chi2), and no
    adversary pays more than the whole range.
    """
    largest = {"tv": 1 - 1 / proposals, "kl": math.log(proposals), "chi2": proposals - 1.0}[divergence]
    return low, high + min(scale * largest, high - low)
