"""Conservative Q-learning (Kumar, Zhou, Tucker & Levine, NeurIPS 2020), for continuous and integer actions.

    L_Q = E_D[ sum_i loss_Qi(y) ] + w E_D[ sum_i ( R(Q_i(s, .)) - Q_i(s, a) ) ]

``R`` is the variant (`losses.cql_h`, `cql_rho`, `cql_var`; for `var` the logged action's term has cancelled). With
``target_gap`` > 0 the weight w is the Lagrange multiplier that holds the gap at that value.

Continuous actions: soft actor-critic (see ``sac_n``) with two critics. ``R`` is estimated from ``samples``
actions each of the uniform distribution, pi(. | s) and pi(. | s'), all valued at s. ``y`` leaves the
entropy out unless ``backup_entropy``, or takes each critic's best of ``samples`` actions, and then the
smaller critic, with ``max_backup``, both as in the authors' code. All gradients are taken at the same
parameters; there the temperature moves first. Their behaviour-cloning warm start of the policy is not
included.

Integer actions: ``dqn`` plus the exact term over all actions (equation 4 of the paper, at s and not at
s', see "Stop Regressing"'s released agent).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from rl.agents.state import Optimiser, descend, follow, is_off, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead

VARIANTS = ("h", "rho", "var")


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of the paper's code for D4RL locomotion."""

    discount: float = 0.99  # gamma
    variant: str = "h"  # h, rho or var
    weight: float = 5.0  # w; its start where target_gap is on
    target_gap: float = 0.0  # tau of the Lagrange version; 0 turns it off
    samples: int = 10  # actions per proposal (continuous actions)
    backup_entropy: bool = False  # entropy in the target (continuous actions)
    max_backup: bool = False  # best of `samples` next actions in the target (continuous actions)
    double: bool = True  # double Q-learning (integer actions)
    target_rate: float = 0.005  # Polyak step
    learning_rate: float = 3e-4  # Adam, critics
    policy_learning_rate: float = 1e-4  # Adam, policy, temperature and multiplier
    hidden: tuple[int, ...] = (256, 256, 256)  # widths of every network's layers
    layer_norm: bool = False  # in the critics


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError on an unknown variant."""
    if config.variant not in VARIANTS:
        raise ValueError(f"unknown CQL variant {config.variant!r}: choose one of {', '.join(VARIANTS)}")
    return (_discrete if spec.discrete else _continuous)(config, spec, head, optimiser)


def _continuous(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser) -> Learner:
    critic = ensemble(mlp.critic(spec, head.size, config.hidden, config.layer_norm), 2)
    policy = mlp.squashed_policy(spec, config.hidden)
    optimisers = dict.fromkeys(("policy", "log_alpha", "log_weight"), optimiser(config.policy_learning_rate))
    optimisers["critic"] = optimiser(config.learning_rate)

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "policy": policy.init(keys[1], batch.observation),
            "log_alpha": jnp.zeros(()),
            "log_weight": jnp.log(jnp.asarray(config.weight, jnp.float32)),
        }
        return start(params, optimisers, targets=["critic"])

    def draw(params, observation: Array, key: Key, samples: int) -> tuple[Array, Array]:
        """Actions [N, B, D] of the policy and their log densities [N, B]."""
        return policy.apply(params, observation).sample_and_log_prob(seed=key, sample_shape=(samples,))

    def value_all(params, observation: Array, actions: Array) -> Array:
        """Outputs [E, N, B, K] of actions [N, B, D] at one observation each [B, O]."""
        repeated = jnp.broadcast_to(observation, actions.shape[:1] + observation.shape)
        return critic.apply(params, repeated, actions)

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
        q = value_all(state.target["critic"], observation, actions)
        best = bellman.max_action(head, jnp.moveaxis(q, 1, -2))  # of each critic
        bonus = jnp.zeros_like(log_prob[0])
        if config.backup_entropy and not config.max_backup:
            bonus = -jnp.exp(state.params["log_alpha"]) * log_prob[0]
        return bellman.min_member(head, best), bonus

    def backup(state: State, batch: Transition, key: Key) -> Array:
        outputs, bonus = bootstrap(state, batch.next_observation, key)
        discount = config.discount * batch.discount
        return head.target(batch.reward + discount * bonus, discount, outputs)

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        policy_key, next_key, proposal_key = jax.random.split(key, 3)
        target = backup(state, batch, next_key)
        actions, log_density = proposals(state.params["policy"], batch, proposal_key)

        def loss(params):
            frozen = jax.lax.stop_gradient(params)
            action, log_prob = policy.apply(params["policy"], batch.observation).sample_and_log_prob(
                seed=policy_key
            )
            q_policy = head.value(critic.apply(frozen["critic"], batch.observation, action)).min(0)
            policy_loss = (jnp.exp(frozen["log_alpha"]) * log_prob - q_policy).mean()
            entropy = -jax.lax.stop_gradient(log_prob).mean()
            alpha_loss = params["log_alpha"] * (entropy + spec.action_size)

            q = critic.apply(params["critic"], batch.observation, batch.action)
            critic_loss = jax.vmap(head.loss, (0, None))(q, target).mean(1).sum()
            values = head.value(
                value_all(params["critic"], batch.observation, jax.lax.stop_gradient(actions))
            )
            gap = _gap(config.variant, jnp.moveaxis(values, 1, -1), log_density.T, head.value(q)).mean(1)
            conservative, weight_loss = _weigh(config, gap, params["log_weight"])
            metrics = {
                "critic_loss": critic_loss,
                "policy_loss": policy_loss,
                "conservative_gap": gap.mean(),
                "weight": jnp.exp(params["log_weight"]),
                "q": head.value(q).mean(),
                "entropy": entropy,
                "alpha": jnp.exp(params["log_alpha"]),
            }
            return critic_loss + conservative + policy_loss + alpha_loss + weight_loss, metrics

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

    return Learner(init, update, act, value, explore)


def _discrete(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser) -> Learner:
    network = mlp.action_values(spec, head.size, config.hidden, config.layer_norm)
    optimisers = {
        "q": optimiser(config.learning_rate),
        "log_weight": optimiser(config.policy_learning_rate),
    }

    def init(key: Key, batch: Transition) -> State:
        params = {
            "q": network.init(key, batch.observation),
            "log_weight": jnp.log(jnp.asarray(config.weight, jnp.float32)),
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

        def loss(params):
            outputs = network.apply(params["q"], batch.observation)
            q = bellman.at_action(outputs, batch.action)
            values = head.value(outputs)
            uniform = jnp.full_like(values, -jnp.log(spec.action_size))
            gap = _gap(config.variant, values, uniform, head.value(q)).mean()
            conservative, weight_loss = _weigh(config, gap, params["log_weight"])
            critic_loss = head.loss(q, target).mean()
            metrics = {
                "critic_loss": critic_loss,
                "conservative_gap": gap,
                "weight": jnp.exp(params["log_weight"]),
                "q": head.value(q).mean(),
            }
            return critic_loss + conservative + weight_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(network.apply(state.params["q"], observation)).argmax(-1)

    def value(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(bootstrap(state, observation))

    return Learner(init, update, act, value)


def _gap(variant: str, values: Array, log_density: Array, q_data: Array) -> Array:
    """``R(Q(s, .)) - Q(s, a)`` [...] from values [..., N], log densities broadcast to them and Q [...]."""
    log_density = jnp.broadcast_to(log_density, values.shape)
    if variant == "h":
        return losses.cql_h(values, log_density) - q_data
    if variant == "rho":
        return losses.cql_rho(values, log_density) - q_data
    return losses.cql_var(values, log_density)


def _weigh(config: Config, gap: Array, log_weight: Array) -> tuple[Array, Array]:
    """The critics' penalty and the multiplier's loss, from the gap of each critic."""
    if is_off(config.target_gap):
        return config.weight * gap.sum(), jnp.zeros(())
    excess = gap - config.target_gap
    penalty = jax.lax.stop_gradient(jnp.exp(log_weight)) * excess
    return penalty.sum(), -jnp.exp(log_weight) * jax.lax.stop_gradient(excess).mean()
