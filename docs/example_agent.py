"""One-step RL (Brandfonbrener et al., NeurIPS 2021): evaluate the logged policy, then improve on it once."""

import dataclasses

import jax
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.layers import Architecture
from rl.types import Learner, Spec
from rl.values import losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    temperature: float = 3.0  # inverse, of the advantage weights
    target_rate: float = 0.005  # Polyak step
    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of every network's layers
    network: Architecture = Architecture()  # of every network
    value_optimiser: Adam = Adam()  # of the value
    policy_optimiser: Adam = Adam()  # of the policy


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; any value head serves."""
    value = mlp.state_value(head.size, config.hidden, architecture=config.network, spec=spec)
    policy = mlp.behaviour_policy(spec, config.hidden, config.network)
    optimisers = {
        "value": build(config.value_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser),
    }

    def init(key, batch):
        networks = {"value": value, "policy": policy}
        keys = dict(zip(networks, jax.random.split(key), strict=True))
        params = {name: network.init(keys[name], batch.observation) for name, network in networks.items()}
        return start(params, optimisers, targets=["value"])

    def update(state, batch, key):
        v_next = value.apply(state.target["value"], batch.next_observation)
        target = head.target(batch.reward, config.discount * batch.discount, v_next)
        v_now = value.apply(state.target["value"], batch.observation)
        advantage = batch.reward + config.discount * batch.discount * head.value(v_next) - head.value(v_now)

        def loss(params):
            value_loss = head.loss(value.apply(params["value"], batch.observation), target).mean()
            log_prob = policy.apply(params["policy"], batch.observation, key=key).log_prob(batch.action)
            policy_loss = -(losses.awr_weight(advantage, config.temperature) * log_prob).mean()
            return value_loss + policy_loss, {"value_loss": value_loss, "policy_loss": policy_loss}

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    def act(state, observation, key):
        return policy.apply(state.params["policy"], observation).mode()

    return augmented(Learner(init, update, act), spec, config.network)
