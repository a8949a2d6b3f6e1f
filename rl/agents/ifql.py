"""Implicit flow Q-learning (IFQL: Park, Li & Levine, ICML 2025, a baseline there; IDQL by a flow).

IQL's critics and value, the cloned policy of a flow, and the best of its draws. With twin critics ``Q_i``, target
critics ``Q'_i``, expectile ``tau``, noise z ~ N(0, I) and time t ~ U[0, 1]:

    L_V  = E_D[ |tau - 1(u < 0)| loss_V(min_i Q'_i(s, a)) ],   u = min_i Q'_i(s, a) - V(s)
    L_Q  = E_D[ sum_i loss_Qi(r + gamma d V(s')) ]
    L_pi = E_D[ (v(s, x_t, t) - (a - z))^2 ],   x_t = (1 - t) z + t a

    a(s) = argmax_j min_i Q_i(s, a_j),   a_1, ..., a_N: draws of the flow v (`rl.networks.flow`), clipped to the box

where ``loss`` is the head's: squared error in the paper. IDQL (Hansen-Estruch et al. 2023) has a diffusion model in
place of the flow. Nothing improves the policy but the choice among its draws, online and offline alike. With
``gumbel`` V is the soft maximum of X-QL (`rl.agents.iql`).

``extraction=distilled`` has FQL's policy in place of the choice (`rl.agents.flow_policy`): a step from noise to an
action, close to the flow's, that ascends ``mean_i Q_i``. That is no longer IFQL; V and Q are
still trained without the policy's actions.

Paper and code. Where they differ this is the code: ``L_pi`` is the mean over action dimensions, and targets follow the
critics *before* each update. The code's choice takes one observation at a time; here each of many has candidates of its
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import optax

from rl.agents import flow_policy, iql
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_ranges
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import heads
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of the authors' code."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    expectile: float = 0.9  # tau: 0.5 is SARSA, towards 1 the maximum over logged actions
    gumbel: float = 0.0  # b > 0: X-QL's soft maximum at this temperature, without an expectile; 0: IQL
    extraction: str = "best_of"  # the policy from the flow: best_of, the best of its draws, or distilled
    candidates: int = 32  # N, draws of the flow where extraction is best_of
    alpha: float = 10.0  # weight of distillation against Q, where distilled, to be tuned for each task
    normalize_q: bool = False  # divide Q by its mean size over the batch: alpha is then without a unit
    flow_steps: int = 10  # steps of the flow from noise to an action
    integrator: str = "euler"  # integrator of the flow: euler or midpoint
    target_rate: float = 0.005  # Polyak step of the target critics
    learning_rate: float = 3e-4  # Adam, all networks
    critics: int = 2  # members of the critic ensemble, combined by their minimum
    hidden: tuple[int, ...] = (512, 512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in critics and value
    network: Architecture = OGBENCH  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    value_optimiser: Adam = Adam()  # of the value
    flow_optimiser: Adam = Adam()  # of the flow
    policy_optimiser: Adam = Adam()  # of the policy of one step, if there is one

    def __post_init__(self) -> None:
        require_ranges(self)
        flow_policy.require(self)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "ifql", discrete=False)
    return learner(config, spec, head, optimiser, heads.same_target)


def learner(
    config: Config,
    spec: Spec,
    head: ValueHead,
    optimiser: Optimiser,
    imitated: Callable[[ValueHead, Array], Array],
) -> Learner:
    """IFQL with another target for its value, for agents that are IFQL but for that.

    Args:
      config, spec, head, optimiser: see `rl.agents`.
      imitated: (head, outputs [B, K] of the target critics) -> the target of V.
    """
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, config.critics)
    value = mlp.state_value(head.size, config.hidden, config.layer_norm, config.network, spec)
    policy = flow_policy.make(config, spec, optimiser, aggregation="min")
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "value": build(config.value_optimiser, config.learning_rate, optimiser),
        **policy.optimisers,
    }

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key, 3)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "value": value.init(keys[1], batch.observation),
            **policy.init(keys[2], batch),
        }
        return start(params, optimisers, targets=["critic"])

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        def loss(params):
            critic_and_value_loss, advantage, metrics = iql.value_losses(
                config, head, critic, value, params, state, batch, imitated
            )
            values = lambda action: critics(state, batch.observation, action)
            policy_loss, policy_metrics = policy.loss(params, state, batch, key, values)
            metrics = {**metrics, "advantage": advantage.mean(), **policy_metrics}
            return critic_and_value_loss + policy_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(follow(state, config.target_rate), gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        return policy.act(state, observation, key, lambda action: critics(state, observation, action))

    def continuation(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(value.apply(state.params["value"], observation))

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    built = Learner(init, update, act, continuation, explore=act, critics=critics)
    return augmented(built, spec, config.network)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    return iql.unused(config) | flow_policy.unused(config)
