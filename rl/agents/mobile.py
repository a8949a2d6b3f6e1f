"""MOBILE's penalty for any agent, on a model's rows where its members disagree about the *value* of what follows.

Sun et al. (ICML 2023), model-Bellman inconsistency:

    r~ = r - beta std_m( mean_n V(s'_{m,n}) ),   s'_{m,n} ~ model m of the ensemble, n = 1..samples
    V(s') = min_i Q'_i(s', a'),   a' ~ pi(. | s')

for the rows that a model made; logged rows keep their reward. As in the authors' code, ``Q'`` are the target critics,
and the entropy bonus is no part of ``V``.

Members are compared by common random numbers: sample ``n`` of every member has the same noise, of the model and of
the policy, so that only a difference between members counts, and identical members leave none. The authors' code
draws all noise independently, which adds ``Var V / samples`` to the variance that it takes for disagreement.

Other differences from it: its targets hold no entropy bonus (here they are the agent's own, soft for SAC unless
``backup_entropy`` is off, as published settings have it) and are cut at 0 from below, and its deviation over M members
is that of a sample (larger by sqrt(M / (M - 1))). A world with one answer, such as the true one, is never penalised.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rl import acting
from rl.agents import relabel
from rl.replay.source import is_logged
from rl.types import Array, Key, Learner, Metrics, State, Transition

# (observation [B, O], action [B, ...]) -> mean and deviation [M, B, O + 1] of next observation and, last, reward
Predict = Callable[[Array, Array], tuple[Array, Array]]


def make(learner: Learner, predict: Predict, weight: float | Array, samples: int = 10) -> Learner:
    """``learner`` with penalised rewards; metrics gain ``uncertainty``, the mean deviation over the model's rows.

    Batches must tell logged rows (origin 0) from those of the model (any other) by `Transition.origin`.

    Args:
      learner: any with ``critics``; the next action is drawn as it explores, or as it acts if it has no ``explore``.
      predict: what each member says of the next observation, a normal distribution; see `rl.dynamics.base`.
      weight: beta, in units of reward per unit of value.
      samples: draws per member.

    Raises:
      ValueError: the learner has no critics, or ``samples`` is under 1; in an update, batches without origin.
    """
    if learner.critics is None:
        raise ValueError("this agent has no critics that members could disagree about: choose another")
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    critics, draw_action = learner.critics, learner.explore or learner.act

    def value(state: State, observation: Array, key: Key) -> Array:
        """V [samples, M, B] of observations [samples, M, B, O]; the noise of actions is that of [samples, B]."""
        action = jax.vmap(draw_action, (None, 1, None), 1)(state, observation, key)
        return critics(state, observation, action).min(0)

    def penalised(state: State, batch: Transition, key: Key) -> tuple[Transition, Metrics]:
        if batch.origin is None:
            raise ValueError(
                "MOBILE must know which rows a model made, and these batches have no origin: draw them from sources "
                "that set Transition.origin (0 for logged rows)"
            )
        noise_key, action_key = jax.random.split(key)
        mean, deviation = (x[..., :-1] for x in predict(batch.observation, batch.action))  # [M, B, O]
        noise = jax.random.normal(noise_key, (samples, 1, *mean.shape[1:]))
        values = value(acting.at_targets(state), mean + deviation * noise, action_key).mean(0)  # [M, B]
        # Less the first member's, so that rounding does not tell identical members apart.
        is_rollout = ~is_logged(batch)
        uncertainty = jnp.where(is_rollout, (values - values[0]).std(0), 0.0)
        rows = is_rollout.sum()
        return batch._replace(reward=batch.reward - weight * uncertainty), {
            "uncertainty": uncertainty.sum() / jnp.maximum(1, rows)
        }

    return relabel.make(learner, penalised)
