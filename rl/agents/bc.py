"""Behaviour cloning: the policy of maximum likelihood.

Pomerleau (1991). Objective: ``max_pi E_D[log pi(a | s)]``, with a normal (state-independent deviation) or
categorical policy; evaluation acts on the mode. It learns no value: a head is accepted, so that the
baseline runs under the same flags as the rest, and unused.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from rl.agents.state import Optimiser, descend, start
from rl.networks import mlp
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters."""

    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of the policy's layers


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`."""
    del head
    policy = mlp.behaviour_policy(spec, config.hidden)
    optimisers = {"policy": optimiser(config.learning_rate)}

    def init(key: Key, batch: Transition) -> State:
        return start({"policy": policy.init(key, batch.observation)}, optimisers)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        del key

        def loss(params):
            return -policy.apply(params["policy"], batch.observation).log_prob(batch.action).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), {"policy_loss": value}

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return policy.apply(state.params["policy"], observation).mode()

    return Learner(init, update, act)
