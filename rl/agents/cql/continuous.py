"""CQL for continuous actions: soft actor-critic (see ``sac_n``) with two critics and the penalty.

``R`` of CQL(H) is estimated from ``samples`` actions each of the uniform distribution, pi(. | s) and pi(. | s'), all
valued at s, and that of other variants from pi(. | s) alone. For CQL(H) it is the logarithm of the sum over the samples
of exp(Q) over their densities, not of the mean, as in the authors' code, where thresholds of the Lagrange version come
from. ``y`` leaves the entropy out unless
``backup_entropy``, or takes each critic's best of ``samples`` actions, and then the smaller critic, with
``max_backup``, both as there. Layers start as there, in rlkit, but for its taking a layer's outputs for its inputs.
Differences: there the temperature moves first, the policy may be warmed up by behaviour cloning, and its log deviation
stops at -20, here at -5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl.agents.augmentation import augmented
from rl.agents.cql.penalty import Config, gap, weigh
from rl.agents.optimisers import Optimiser, build
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser) -> Learner:
    """The learner; see `rl.types.Learner`."""
    critic = ensemble(mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network), 2)
    policy = mlp.squashed_policy(spec, config.hidden, config.network)
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.policy_learning_rate, optimiser),
        "log_alpha": optimiser(config.policy_learning_rate),
        "log_multiplier": optimiser(config.learning_rate),
    }

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "policy": policy.init(keys[1], batch.observation),
            "log_alpha": jnp.zeros(()),
            "log_multiplier": jnp.zeros(()),
        }
        return start(params, optimisers, targets=["critic"])

    def draw(params, observation: Array, key: Key, samples: int) -> tuple[Array, Array]:
        """Actions [N, B, D] of the policy and their log densities [N, B]."""
        return policy.apply(params, observation).sample_and_log_prob(seed=key, sample_shape=(samples,))

    def proposals(params, batch: Transition, key: Key) -> tuple[Array, Array]:
        """The actions [N', B, D] that are pushed down and the log densities [N', B] to divide by."""
        here, there, uniform = jax.random.split(key, 3)
        actions, log_prob = draw(params, batch.observation, here, config.samples)
        if config.variant != "h":  # the prior is the policy itself
            return actions, jnp.zeros_like(log_prob)
        next_actions, next_log_prob = draw(params, batch.next_observation, there, config.samples)
        random = jax.random.uniform(uniform, actions.shape, minval=-1.0, maxval=1.0)
        density = jnp.full_like(log_prob, -spec.action_size * jnp.log(2.0))
        return jnp.concatenate([actions, next_actions, random]), jnp.concatenate(
            [log_prob, next_log_prob, density]
        )

    def bootstrap(state: State, observation: Array, key: Key) -> tuple[Array, Array]:
        """The outputs [..., K] with which a target continues, and the entropy's bonus [...]."""
        samples = config.samples if config.max_backup else 1
        actions, log_prob = draw(state.params["policy"], observation, key, samples)
        q = critic.apply(state.target["critic"], observation, actions)
        best = bellman.max_action(head, jnp.moveaxis(q, 1, -2))  # of each critic
        bonus = jnp.zeros_like(log_prob[0])
        if config.backup_entropy and not config.max_backup:
            bonus = -jnp.exp(state.params["log_alpha"]) * log_prob[0]
        return bellman.min_member(head, best), bonus

    def backup(state: State, batch: Transition, key: Key) -> tuple[Array, Array]:
        """The target, and the share of it beyond the head's support [B]."""
        outputs, bonus = bootstrap(state, batch.next_observation, key)
        discount = config.discount * batch.discount
        target = (batch.reward + discount * bonus, discount, outputs)
        return head.target(*target), head.clipped(*target)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        policy_key, next_key, proposal_key, dropout_key = jax.random.split(key, 4)
        target, clipped = backup(state, batch, next_key)
        actions, log_density = proposals(state.params["policy"], batch, proposal_key)

        def loss(params):
            frozen = jax.lax.stop_gradient(params)
            chosen = policy.apply(params["policy"], batch.observation, key=dropout_key)
            action, log_prob = chosen.sample_and_log_prob(seed=policy_key)
            q_policy = head.value(critic.apply(frozen["critic"], batch.observation, action)).min(0)
            policy_loss = (jnp.exp(frozen["log_alpha"]) * log_prob - q_policy).mean()
            entropy = -jax.lax.stop_gradient(log_prob).mean()
            alpha_loss = params["log_alpha"] * (entropy + spec.action_size)

            q = critic.apply(params["critic"], batch.observation, batch.action)
            critic_loss = losses.critics(head, q, target)
            proposed = jax.lax.stop_gradient(actions)
            values = head.value(critic.apply(params["critic"], batch.observation, proposed))
            gaps = sampled_gap(
                config.variant, jnp.moveaxis(values, 1, -1), log_density.T, head.value(q)
            ).mean(1)
            conservative, multiplier_loss, weight = weigh(config, gaps, params["log_multiplier"])
            metrics = {
                "critic_loss": critic_loss,
                "policy_loss": policy_loss,
                "conservative_gap": gaps.mean(),
                "weight": weight,
                "q": head.value(q).mean(),
                "clipped": clipped.mean(),
                "entropy": entropy,
                "alpha": jnp.exp(params["log_alpha"]),
            }
            return critic_loss + conservative + policy_loss + alpha_loss + multiplier_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return mlp.squashed_mode(policy.apply(state.params["policy"], observation))

    def explore(state: State, observation: Array, key: Key) -> Array:
        return policy.apply(state.params["policy"], observation).sample(seed=key)

    def value(state: State, observation: Array, key: Key) -> Array:
        outputs, bonus = bootstrap(state, observation, key)
        return head.value(outputs) + bonus

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    return augmented(Learner(init, update, act, value, explore, critics=critics), spec, config.network)


def sampled_gap(variant: str, values: Array, log_density: Array, q_data: Array) -> Array:
    """`penalty.gap` [E, B] from values [E, B, N] of samples; that of CQL(H) from their sum, not their mean."""
    return gap(variant, values, log_density, q_data) + (jnp.log(values.shape[-1]) if variant == "h" else 0.0)
