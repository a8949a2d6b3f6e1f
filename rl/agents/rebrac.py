"""ReBRAC (Tarasov et al., NeurIPS 2023): TD3+BC with the pull to the data in actor and critic apart.

    y    = r + gamma d ( min_i Q'_i(s', a~) - beta_2 |a~ - a'|^2 ),   a~ the smoothed target policy
    L_Q  = E_D[ sum_i loss_Qi(y) ]
    L_pi = E_D[ beta_1 |pi(s) - a|^2 - lambda min_i Q_i(s, pi(s)) ],   lambda = 1 / E_D |min_i Q_i|

``a'`` is the action logged at ``s'``; where an episode was cut there is none and the critic's penalty is
left out. Deeper networks, LayerNorm in the critics and batches of 1024 (``--batch_size``) are part of
the method. The squared distance is summed over action dimensions, as in the authors' code (TD3+BC takes
their mean). beta_1 and beta_2 are tuned per dataset in the paper; the defaults are in the middle of its grid.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from rl.agents.state import Optimiser, descend, follow, require, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are the paper's for D4RL locomotion."""

    discount: float = 0.99  # gamma
    policy_cloning: float = 0.05  # beta_1; the paper's grid: 0.001, 0.01, 0.05, 0.1
    critic_cloning: float = 0.01  # beta_2; the paper's grid: 0, 0.001, 0.01, 0.1, 0.5
    policy_noise: float = 0.2  # sigma, of the target policy
    noise_clip: float = 0.5  # c
    policy_delay: int = 2  # critic updates per policy update
    target_rate: float = 0.005  # Polyak step
    learning_rate: float = 1e-3  # Adam, all networks
    hidden: tuple[int, ...] = (256, 256, 256)  # widths of every network's layers
    layer_norm: bool = True  # in the critics


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "rebrac", discrete=False)
    critic = ensemble(mlp.critic(spec, head.size, config.hidden, config.layer_norm), 2)
    policy = mlp.deterministic_policy(spec, config.hidden)
    optimisers = dict.fromkeys(("critic", "policy"), optimiser(config.learning_rate))

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "policy": policy.init(keys[1], batch.observation),
        }
        return start(params, optimisers, targets=["critic", "policy"])

    def bootstrap(state: State, observation: Array, key: Key) -> tuple[Array, Array]:
        """The outputs [..., K] with which a target continues, and their action [..., D]."""
        mode = policy.apply(state.target["policy"], observation)
        action = bellman.smooth_action(mode, key, config.policy_noise, config.noise_clip)
        return bellman.min_member(head, critic.apply(state.target["critic"], observation, action)), action

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        next_outputs, next_action = bootstrap(state, batch.next_observation, key)
        distance = jnp.square(next_action - batch.next_action).sum(-1) * batch.has_next_action
        discount = config.discount * batch.discount
        reward = batch.reward - discount * config.critic_cloning * distance
        target = head.target(reward, discount, next_outputs)

        def critic_loss(params):
            q = critic.apply(params, batch.observation, batch.action)
            return jax.vmap(head.loss, (0, None))(q, target).mean(1).sum(), head.value(q).mean()

        def policy_loss(params, critic_params):
            action = policy.apply(params, batch.observation)
            q = head.value(critic.apply(critic_params, batch.observation, action)).min(0)
            cloning = jnp.square(action - batch.action).sum(-1).mean()
            return config.policy_cloning * cloning - losses.q_scale(q) * q.mean(), cloning

        def improve(state: State) -> tuple[State, Metrics]:
            (loss, cloning), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
                state.params["policy"], state.params["critic"]
            )
            state = follow(descend(state, {"policy": gradient}, optimisers), config.target_rate)
            # Scaled so that the mean over an epoch is the mean over the updates that were made.
            return state, {
                "policy_loss": config.policy_delay * loss,
                "cloning": config.policy_delay * cloning,
            }

        def keep(state: State) -> tuple[State, Metrics]:
            return state, {"policy_loss": jnp.zeros(()), "cloning": jnp.zeros(())}

        (loss, q), gradient = jax.value_and_grad(critic_loss, has_aux=True)(state.params["critic"])
        state = descend(state, {"critic": gradient}, optimisers)
        due = (state.step + 1) % config.policy_delay == 0
        state, metrics = jax.lax.cond(due, improve, keep, state)
        return state._replace(step=state.step + 1), {"critic_loss": loss, "q": q, **metrics}

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return policy.apply(state.params["policy"], observation)

    def value(state: State, observation: Array, key: Key) -> Array:
        """Without the critic's penalty, which needs a logged action."""
        return head.value(bootstrap(state, observation, key)[0])

    return Learner(init, update, act, value)
