"""TD3 (Fujimoto, van Hoof & Meger, ICML 2018): twin critics, smoothed targets, delayed policy updates.

    y    = r + gamma d min_i Q'_i(s', a~),   a~ = clip(pi'(s') + clip(N(0, sigma), -c, c), -1, 1)      (14)
    L_Q  = E_D[ sum_i loss_Qi(y) ]
    L_pi = - E_D[ Q_1(s, pi(s)) ]

The actor and all targets move on every ``policy_delay``-th update. Layers start as PyTorch's, as in the authors'
code. There may be more critics, and another ``aggregation`` of them than the minimum (`rl.values.bellman.aggregate`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_ranges
from rl.agents.state import delayed, descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble, first_member
from rl.networks.layers import Architecture
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead

# (Q [B] of the policy's actions, these [B, D], the batch's [B, D]) -> the policy's loss, and what else to report
Objective = Callable[[Array, Array, Array], tuple[Array, Metrics]]
# (action [B, D] with which a target continues, batch) -> [B], taken off the value there
Penalty = Callable[[Array, Transition], Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of the authors' code."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    policy_noise: float = 0.2  # sigma, deviation of the target policy's noise
    noise_clip: float = 0.5  # c, where the target policy's noise is clipped
    exploration_noise: float = 0.1  # deviation of the normal noise with which it collects experience
    policy_delay: int = 2  # critic updates per policy update
    critics: int = 2  # members of the critic ensemble
    aggregation: str = "min"  # of the critics: min, mean, or pessimistic, the mean less some deviations
    deviations: float = 0.5  # deviations below the mean, where aggregation is pessimistic
    target_rate: float = 0.005  # Polyak step of the target networks
    learning_rate: float = 3e-4  # Adam, all networks
    hidden: tuple[int, ...] = (256, 256)  # widths of every network's layers
    layer_norm: bool = False  # LayerNorm in the critics
    network: Architecture = Architecture()  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    policy_optimiser: Adam = Adam()  # of the policy

    def __post_init__(self) -> None:
        require_ranges(self)
        require_choices(self, {"aggregation": bellman.AGGREGATIONS})
        if self.aggregation == "pessimistic" and self.critics < 2:
            raise ValueError(
                f"aggregation=pessimistic takes deviations between critics off their mean, and critics={self.critics} "
                "has none: give at least 2, or another aggregation"
            )


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "td3", discrete=False)
    return learner(config, spec, head, optimiser, lambda q, action, logged: (-q.mean(), {}))


def learner(
    config: Config,
    spec: Spec,
    head: ValueHead,
    optimiser: Optimiser,
    objective: Objective,
    penalty: Penalty | None = None,
    *,
    by_all: bool = False,
) -> Learner:
    """TD3 with another objective for its policy, and a penalty in its targets, for agents that are TD3 but for that.

    Args:
      config, spec, head, optimiser: see `rl.agents`.
      objective: what the policy minimises, see ``Objective``.
      penalty: taken off the next value in targets, see ``Penalty``; None: nothing.
      by_all: whether all critics judge the policy, aggregated as in targets, and not the first alone.
    """
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, config.critics)
    policy = mlp.deterministic_policy(spec, config.hidden, config.network)
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser, config.policy_delay),
    }

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "policy": policy.init(keys[1], batch.observation),
        }
        return start(params, optimisers, targets=["critic", "policy"])

    def bootstrap(state: State, observation: Array, key: Key) -> tuple[Array, Array, Array]:
        """The outputs [..., K] with which a target continues, what to take off [...], and their action [..., D]."""
        mode = policy.apply(state.target["policy"], observation)
        action = bellman.smooth_action(mode, key, config.policy_noise, config.noise_clip)
        outputs = critic.apply(state.target["critic"], observation, action)
        return *bellman.aggregate(head, outputs, config.aggregation, config.deviations), action

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        next_key, dropout_key = jax.random.split(key)
        next_outputs, off, next_action = bootstrap(state, batch.next_observation, next_key)
        discount = config.discount * batch.discount
        reward = batch.reward - discount * (off + penalty(next_action, batch) if penalty else off)
        target = head.target(reward, discount, next_outputs)
        clipped = head.clipped(reward, discount, next_outputs).mean()

        def critic_loss(params):
            q = critic.apply(params, batch.observation, batch.action)
            return losses.critics(head, q, target), head.value(q).mean()

        def judge(params, action):
            if by_all:
                q = head.value(critic.apply(params, batch.observation, action))
                return bellman.aggregate_values(q, config.aggregation, config.deviations)
            return head.value(member.apply(first_member(params), batch.observation, action))

        def policy_loss(params, critic_params):
            action = policy.apply(params, batch.observation, key=dropout_key)
            return objective(judge(critic_params, action), action, batch.action)

        def improve(state: State) -> tuple[State, Metrics]:
            (loss, metrics), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
                state.params["policy"], state.params["critic"]
            )
            state = follow(descend(state, {"policy": gradient}, optimisers), config.target_rate)
            return state, {"policy_loss": loss, **metrics}

        (loss, q), gradient = jax.value_and_grad(critic_loss, has_aux=True)(state.params["critic"])
        state = descend(state, {"critic": gradient}, optimisers)
        state, metrics = delayed(improve, state, config.policy_delay)
        metrics = {"critic_loss": loss, "q": q, "clipped": clipped, **metrics}
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return policy.apply(state.params["policy"], observation)

    def explore(state: State, observation: Array, key: Key) -> Array:
        mode = policy.apply(state.params["policy"], observation)
        noise = config.exploration_noise * jax.random.normal(key, mode.shape)
        return jnp.clip(mode + noise, -1.0, 1.0)

    def value(state: State, observation: Array, key: Key) -> Array:
        """Without a penalty, which needs a batch."""
        outputs, off, _ = bootstrap(state, observation, key)
        return head.value(outputs) - off

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    return augmented(Learner(init, update, act, value, explore, critics=critics), spec, config.network)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    if config.aggregation == "pessimistic":
        return {}
    return {"deviations": "it is of aggregation=pessimistic"}
