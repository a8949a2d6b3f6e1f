"""Behaviour cloning: the policy of maximum likelihood.

Pomerleau (1991). Objective: ``max_pi E_D[log pi(a | s)]``, with a normal (state-independent deviation) or
categorical policy; evaluation acts on the mode. It learns no value: `make` takes a head, as
every agent's does, and does not use it; scripts refuse one. Layers start as PyTorch's, as in CORL's code.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, start
from rl.networks import mlp
from rl.networks.layers import Architecture
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values.heads import ValueHead

IGNORES_REWARDS = True
"""It has no discount, whatever flags ask for one."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of CORL's code, whose policy is deterministic."""

    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of the policy's layers
    network: Architecture = Architecture()  # of every network
    policy_optimiser: Adam = Adam()  # of the policy

    def __post_init__(self) -> None:
        require_ranges(self)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError as `mlp.require_dense_layers`."""
    del head
    mlp.require_dense_layers(spec, config.network)
    policy = mlp.behaviour_policy(spec, config.hidden, config.network)
    optimisers = {"policy": build(config.policy_optimiser, config.learning_rate, optimiser)}

    def init(key: Key, batch: Transition) -> State:
        return start({"policy": policy.init(key, batch.observation)}, optimisers)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        def loss(params):
            return -policy.apply(params["policy"], batch.observation, key=key).log_prob(batch.action).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), {"policy_loss": value}

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return policy.apply(state.params["policy"], observation).mode()

    return augmented(Learner(init, update, act), spec, config.network)
