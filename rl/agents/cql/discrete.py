"""CQL for integer actions: ``dqn`` plus the exact penalty over all actions.

Equation 4 of the paper, at s and not at s'; see the agent released with "Stop Regressing".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl.agents.augmentation import augmented
from rl.agents.cql.penalty import Config, gap, weigh
from rl.agents.optimisers import Optimiser, build
from rl.agents.requirements import require_no_policy
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman
from rl.values.heads import ValueHead


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser) -> Learner:
    """The learner; see `rl.types.Learner`."""
    require_no_policy(config.network, "cql with integer actions")
    network = mlp.action_values(spec, head.size, config.hidden, config.layer_norm, config.network)
    optimisers = {
        "q": build(config.critic_optimiser, config.learning_rate, optimiser),
        "log_multiplier": optimiser(config.learning_rate),
    }

    def init(key: Key, batch: Transition) -> State:
        params = {
            "q": network.init(key, batch.observation),
            "log_multiplier": jnp.zeros(()),
        }
        return start(params, optimisers, targets=["q"])

    def bootstrap(state: State, observation: Array) -> Array:
        """The outputs [..., K] with which a target continues."""
        q = network.apply(state.target["q"], observation)
        selector = network.apply(state.params["q"], observation) if config.double else q
        return bellman.double_q(head, q, selector)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        del key
        next_outputs = bootstrap(state, batch.next_observation)
        target = head.target(batch.reward, config.discount * batch.discount, next_outputs)
        clipped = head.clipped(batch.reward, config.discount * batch.discount, next_outputs)

        def loss(params):
            outputs = network.apply(params["q"], batch.observation)
            q = bellman.at_action(outputs, batch.action)
            values = head.value(outputs)
            uniform = jnp.full_like(values, -jnp.log(spec.action_size))
            mean_gap = gap(config.variant, values, uniform, head.value(q)).mean()
            conservative, multiplier_loss, weight = weigh(config, mean_gap, params["log_multiplier"])
            critic_loss = head.loss(q, target).mean()
            metrics = {
                "critic_loss": critic_loss,
                "conservative_gap": mean_gap,
                "weight": weight,
                "q": head.value(q).mean(),
                "clipped": clipped.mean(),
            }
            return critic_loss + conservative + multiplier_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(network.apply(state.params["q"], observation)).argmax(-1)

    def value(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(bootstrap(state, observation))

    def critics(state: State, observation: Array, action: Array) -> Array:
        outputs = network.apply(state.params["q"], observation)
        return head.value(bellman.at_action(outputs, action))[None]

    return augmented(Learner(init, update, act, value, critics=critics), spec, config.network)
