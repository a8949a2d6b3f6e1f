"""Deep Q-learning for integer actions (Mnih et al., 2015), double by default (van Hasselt et al., 2016).

    y   = r + gamma d Q'(s', argmax_a Q(s', a))
    L_Q = E_D[ loss_Q(s, a)(y) ]

With the `c51` head this is C51, with `quantile` QR-DQN, with `hl_gauss` the agent of "Stop Regressing"
(each with the double estimator unless ``double=False``). The `scalar` head's squared error stands where
the 2015 paper clips the error's gradient.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from rl.agents.state import Optimiser, descend, follow, require, start
from rl.networks import mlp
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters."""

    discount: float = 0.99  # gamma
    double: bool = True  # choose the next action with the online network
    target_rate: float = 0.005  # the step of the slow copy; 1 copies
    target_period: int = 1  # updates between steps of the slow copy (Dopamine: 2000 with target_rate 1)
    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of the layers
    layer_norm: bool = False  # in the network


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for continuous actions."""
    require(spec, "dqn", discrete=True)
    network = mlp.action_values(spec, head.size, config.hidden, config.layer_norm)
    optimisers = {"q": optimiser(config.learning_rate)}

    def init(key: Key, batch: Transition) -> State:
        return start({"q": network.init(key, batch.observation)}, optimisers, targets=["q"])

    def bootstrap(state: State, observation: Array) -> Array:
        """The outputs [..., K] with which a target continues."""
        q = network.apply(state.target["q"], observation)
        selector = network.apply(state.params["q"], observation) if config.double else q
        return bellman.double_q(head, q, selector)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        del key
        next_outputs = bootstrap(state, batch.next_observation)
        target = head.target(batch.reward, config.discount * batch.discount, next_outputs)

        def loss(params):
            q = bellman.at_action(network.apply(params["q"], batch.observation), batch.action)
            return head.loss(q, target).mean(), head.value(q).mean()

        (value, q), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate, config.target_period)
        return state._replace(step=state.step + 1), {"critic_loss": value, "q": q}

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(network.apply(state.params["q"], observation)).argmax(-1)

    def value(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(bootstrap(state, observation))

    return Learner(init, update, act, value)
