"""MOBILE's penalty for any agent: doubt a model's rows where its members disagree about the *value* of what follows.

Sun et al. (ICML 2023), model-Bellman inconsistency:

    r~ = r - beta std_m( mean_n V(s'_{m,n}) ),   s'_{m,n} ~ model m of the ensemble, n = 1..samples

for the rows that a model made; logged rows keep their reward. ``V`` is the agent's own, as its targets use it.

Differences from the authors' code: their V leaves the policy's entropy out, their targets are cut at 0 from below, and
their deviation over M members is that of a sample (larger by sqrt(M / (M - 1))). A world with one answer, such as the
true one, is never doubted.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rl.types import Array, Key, Learner, Metrics, State, Transition

# (observation [B, O], action [B, ...], key) -> next observations [M, B, O]
Propose = Callable[[Array, Array, Key], Array]


def make(
    learner: Learner, propose: Propose, weight: float | Array, logged: int, samples: int = 10
) -> Learner:
    """``learner`` with doubted rewards; metrics gain ``doubt``, the mean deviation over the model's rows.

    Args:
      learner: any with a ``value``.
      propose: draws next states, one per member.
      weight: beta, in units of reward per unit of value.
      logged: how many rows at the head of every batch are not the model's.
      samples: draws per member.

    Raises:
      ValueError: the learner has no value, or ``samples`` is under 1.
    """
    if learner.value is None:
        raise ValueError("this agent has no value that members could disagree about: choose another")
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    value = learner.value

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        propose_key, value_key, update_key = jax.random.split(key, 3)
        draw = lambda key: propose(batch.observation, batch.action, key)
        proposals = jax.vmap(draw)(jax.random.split(propose_key, samples))  # [samples, M, B, O]
        deviation = value(state, proposals, value_key).mean(0).std(0)
        doubt = jnp.where(jnp.arange(len(deviation)) < logged, 0.0, deviation)
        state, metrics = learner.update(
            state, batch._replace(reward=batch.reward - weight * doubt), update_key
        )
        return state, {**metrics, "doubt": doubt.sum() / max(1, len(doubt) - logged)}

    return learner._replace(update=update)
