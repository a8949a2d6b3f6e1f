"""SAC-N and EDAC (An, Moon, Kim & Song, NeurIPS 2021): soft actor-critic with a pessimistic ensemble.

    y     = r + gamma d ( min_{i<=N} Q'_i(s', a') - alpha log pi(a' | s') ),   a' ~ pi(. | s')
    L_Q   = E_D[ sum_i loss_Qi(y) ] + eta E_D[ sum_{i != j} <g_i, g_j> / (N - 1) ]                  (3)
    L_pi  = E_D[ alpha log pi(a | s) - min_{i<=N} Q_i(s, a) ],   a ~ pi(. | s)
    L_alpha = - E_D[ log alpha (log pi(a | s) + H) ],   H = - dim(A), or ``target_entropy``

``g_i`` is the unit gradient of ``Q_i(s, a)`` with respect to the logged action. eta = 0 is SAC-N; eta > 0
is EDAC, which reaches the same pessimism with fewer critics.

With ``subset`` = M the minimum in y is over M critics, drawn anew for each batch, and the policy ascends the mean of
all N: REDQ (Chen, Wang, Zhou & Ross, ICLR 2021), which has N = 10, M = 2 and 20 updates for each step. In its code
temperature and actor move on the last of the 20 alone: ``policy_delay``. Without ``backup_entropy`` y has no term of
the entropy, as in the code of MOBILE and on some tasks in that of RLPD.

Temperature, actor and critics move in this order, each seeing its predecessors' new parameters, as in CORL; the
authors' code takes all gradients at the old ones. Layers start as in that (`rl.networks.layers.Architecture`,
``rlkit``); for the policy's hidden kernels its initialiser takes the outputs of a layer for its inputs, which is not
copied.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_ranges
from rl.agents.state import delayed, descend, follow, is_off, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import Architecture
from rl.replay.dataset import for_ever
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; the paper tunes N (and eta) per dataset."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    critics: int = 10  # N, members of the critic ensemble; the paper's SAC-N needs up to 500 on hopper
    diversity: float = 0.0  # eta, weight of EDAC's term that makes the critics' gradients differ; 0: SAC-N
    subset: int = 0  # M, critics in the minimum of targets, drawn for each batch (REDQ: 2); 0: all
    target_rate: float = 0.005  # Polyak step of the target critics
    target_period: int = 1  # updates between two steps of the target critics
    policy_delay: int = 1  # critic updates per update of policy and temperature (REDQ: 20)
    backup_entropy: bool = True  # the policy's entropy is in the target
    target_entropy: float | None = None  # H, in nats; none: minus the number of action dimensions
    initial_alpha: float = 1.0  # the temperature at the start
    learning_rate: float = 3e-4  # Adam, all networks and the temperature
    hidden: tuple[int, ...] = (256, 256, 256)  # widths of every network's layers
    layer_norm: bool = False  # LayerNorm in the critics
    network: Architecture = Architecture(initialiser="rlkit")  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    policy_optimiser: Adam = Adam()  # of the policy
    temperature_optimiser: Adam = Adam()  # of the temperature's logarithm

    def __post_init__(self) -> None:
        require_ranges(self)
        if is_off(self.initial_alpha):
            raise ValueError("initial_alpha=0 would stay 0, because its logarithm is learned: give more")
        if self.subset > self.critics:
            raise ValueError(
                f"subset={self.subset} must be at most critics={self.critics}, or 0 for all of them"
            )
        if not is_off(self.diversity) and self.critics < 2:
            raise ValueError(
                f"critics={self.critics}: diversity is of gradients of at least 2 critics: give more, or diversity=0"
            )


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "sac_n", discrete=False)
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, config.critics)
    policy = mlp.squashed_policy(spec, config.hidden, config.network)
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser, config.policy_delay),
        "log_alpha": build(
            config.temperature_optimiser, config.learning_rate, optimiser, config.policy_delay
        ),
    }
    target_entropy = _target_entropy(config, spec)

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "policy": policy.init(keys[1], batch.observation),
            "log_alpha": jnp.log(jnp.asarray(config.initial_alpha, jnp.float32)),
        }
        return start(params, optimisers, targets=["critic"])

    def bootstrap(state: State, observation: Array, key: Key) -> tuple[Array, Array]:
        """The outputs [..., K] with which a target continues, and the entropy's bonus [...]."""
        action_key, subset_key = jax.random.split(key) if config.subset else (key, key)
        action, log_prob = policy.apply(state.params["policy"], observation).sample_and_log_prob(
            seed=action_key
        )
        q = critic.apply(state.target["critic"], observation, action)
        bonus = -jnp.exp(state.params["log_alpha"]) * log_prob * config.backup_entropy
        if config.subset:
            return bellman.subset_min_member(head, q, subset_key, config.subset), bonus
        return bellman.min_member(head, q), bonus

    def draw(params: Params, batch: Transition, keys: tuple[Key, Key]) -> tuple[Array, Array]:
        """Actions [B, D] of the policy and their log pi [B]; keys of the draw and of dropout."""
        chosen = policy.apply(params, batch.observation, key=keys[1])
        return chosen.sample_and_log_prob(seed=keys[0])

    def diversity(params: Params, batch: Transition) -> Array:
        """EDAC's term, without its weight."""

        def values(member_params, action):
            return head.value(member.apply(member_params, batch.observation, action)).sum()

        gradients = jax.vmap(lambda p: jax.grad(values, argnums=1)(p, batch.action))(params)
        return losses.gradient_diversity(gradients).mean()

    def critic_loss(params: Params, batch: Transition, target: Array) -> tuple[Array, Array]:
        """L_Q, and the critics' outputs [N, B, K]."""
        q = critic.apply(params, batch.observation, batch.action)
        loss = losses.critics(head, q, target)
        if is_off(config.diversity):  # a second derivative that SAC-N need not pay for
            return loss, q
        return loss + config.diversity * diversity(params, batch), q

    def policy_loss(params: Params, state: State, batch: Transition, keys: tuple[Key, Key]) -> Array:
        """L_pi, at the state's critics and temperature."""
        alpha = jnp.exp(state.params["log_alpha"])
        action, log_prob = draw(params, batch, keys)
        q = head.value(critic.apply(state.params["critic"], batch.observation, action))
        return (alpha * log_prob - (q.mean(0) if config.subset else q.min(0))).mean()

    def improve(state: State, batch: Transition, keys: tuple[Key, Key]) -> tuple[State, Metrics]:
        """A step of the temperature, then one of the policy."""
        entropy = -draw(state.params["policy"], batch, keys)[1]
        surplus = (entropy - target_entropy).mean()
        # L_alpha is linear in log alpha: its gradient is the entropy's surplus over H.
        state = descend(state, {"log_alpha": surplus}, optimisers)
        loss, gradient = jax.value_and_grad(policy_loss)(state.params["policy"], state, batch, keys)
        metrics = {"policy_loss": loss, "entropy": entropy.mean()}
        return descend(state, {"policy": gradient}, optimisers), metrics

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        policy_key, next_key, dropout_key = jax.random.split(key, 3)
        keys = (policy_key, dropout_key)
        state, improved = delayed(lambda state: improve(state, batch, keys), state, config.policy_delay)
        alpha = jnp.exp(state.params["log_alpha"])

        next_outputs, bonus = bootstrap(state, batch.next_observation, next_key)
        discount = config.discount * batch.discount
        backup = (batch.reward + discount * bonus, discount, next_outputs)
        (loss, q), gradient = jax.value_and_grad(critic_loss, has_aux=True)(
            state.params["critic"], batch, head.target(*backup)
        )
        state = descend(state, {"critic": gradient}, optimisers)
        state = follow(state, config.target_rate, config.target_period)

        metrics = {
            "critic_loss": loss,
            "q": head.value(q).mean(),
            "q_std": head.value(q).std(0).mean(),
            "clipped": head.clipped(*backup).mean(),
            "alpha": alpha,
            **improved,
        }
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


def _target_entropy(config: Config, spec: Spec) -> float:
    """H, in nats."""
    return -float(spec.action_size) if config.target_entropy is None else config.target_entropy


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of values, widened by the entropy bonus of all steps to come, if targets hold it.

    The bonus of a step is ``alpha`` times the policy's entropy, between the ``H`` nats that the temperature aims at and
    the ``D ln 2`` of uniform actions. ``alpha`` is taken as it starts, from where it usually falls, and as 1 if it
    starts below that.
    """
    if not config.backup_entropy:
        return low, high
    aimed = min(_target_entropy(config, spec), 0.0)
    reach = for_ever(max(config.initial_alpha, 1.0) * config.discount, config.discount)
    return low + (aimed * reach if aimed else 0.0), high + spec.action_size * math.log(2.0) * reach
