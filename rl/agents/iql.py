"""Implicit Q-learning (Kostrikov, Nair & Levine, ICLR 2022).

With twin critics ``Q_i``, target critics ``Q'_i``, expectile ``tau`` and inverse temperature ``beta``:

    L_V  = E_D[ |tau - 1(u < 0)| loss_V(min_i Q'_i(s, a)) ],   u = min_i Q'_i(s, a) - V(s)        (5)
    L_Q  = E_D[ sum_i loss_Qi(r + gamma d V(s')) ]                                              (6)
    L_pi = - E_D[ min(exp(beta u), 100) log pi(a | s) ]                                         (7)

where ``loss`` is the head's: squared error in the paper. Weighting any other head's loss by the same
factor keeps the expectile as the fixed point of its expected value (`losses.expectile_weight`).

Extreme Q-learning (X-QL: Garg, Hejna, Geist & Ermon, ICLR 2023) has the soft maximum of logged actions in place of the
expectile, ``V(s) = b log E_D[exp(min_i Q'_i(s, a) / b)]``: with ``gumbel`` = b (5) has the weights of its Gumbel
regression (`losses.gumbel_weight`). Its code has b = 2 on all of D4RL's locomotion and b tuned for each task in another
column, a Huber loss of the critics that is squared up to errors of 20, and LayerNorm in V alone; all else is IQL's.

Differences. The three gradients are taken at the same parameters and applied together, while the
authors' code updates V first and uses the new one in the other two. Integer actions are accepted: they
enter the critics one-hot and the policy is categorical. As in that code layers start orthogonal with gain sqrt(2)
and biases of 0, and the policy's learning rate falls along a cosine, which is as long as the run with
``--preset=paper``. It acts with the policy's mode, or, with ``candidates``, with the best of several draws
(Hansen-Estruch et al. 2023 do so with a diffusion model, see `rl.agents.ifql`).

FQL's code (Park, Li & Levine 2025) has another IQL as its baseline on OGBench: with ``unit_policy`` (7) is a weighted
regression, and without ``slow_advantage`` its weights are by the critics, and not by the target critics as (5) is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, follow, is_off, start
from rl.networks import flow, mlp
from rl.networks.base import Network, ensemble
from rl.networks.layers import Architecture
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition
from rl.values import bellman, heads, losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are the paper's for D4RL locomotion.

    The cosine of ``policy_optimiser`` is among them: after ``decay_updates``, 1,000,000, the policy does not move any
    more, also with an ``optimiser`` of one's own. From Python give it the length of the run, or take ``Adam()``.
    """

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    expectile: float = 0.7  # tau: 0.5 is SARSA, towards 1 the maximum over logged actions
    gumbel: float = 0.0  # b > 0: X-QL's soft maximum at this temperature, without an expectile; 0: IQL
    temperature: float = 3.0  # beta, inverse temperature of the policy's weights: 0 is behaviour cloning
    target_rate: float = 0.005  # Polyak step of the target critics
    learning_rate: float = 3e-4  # Adam, all networks
    critics: int = 2  # members of the critic ensemble, combined by their minimum
    unit_policy: bool = False  # standard deviation 1, and no tanh on the mean; False: a learned one
    slow_advantage: bool = True  # advantages are by the target critics; False: by the critics
    candidates: int = 1  # actions drawn at each step, whose best by the critics is taken; 1: the mode
    hidden: tuple[int, ...] = (256, 256)  # widths of every network's layers
    layer_norm: bool = False  # LayerNorm in critics and value
    network: Architecture = Architecture(initialiser="orthogonal")  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    value_optimiser: Adam = Adam()  # of the value
    policy_optimiser: Adam = Adam(schedule="cosine")  # of the policy, which does not move after decay_updates

    def __post_init__(self) -> None:
        require_ranges(self)


def weigh(config: Any) -> Callable[[Array], Array]:
    """The weights [B] of V's loss, of advantages [B]: X-QL's where ``gumbel`` is on, or IQL's."""
    if is_off(config.gumbel):
        return functools.partial(losses.expectile_weight, expectile=config.expectile)
    return functools.partial(losses.gumbel_weight, temperature=config.gumbel)


def value_losses(
    config: Any,
    head: ValueHead,
    critic: Network,
    value: Network,
    params: Mapping[str, Params],
    state: State,
    batch: Transition,
    encode: Callable[[ValueHead, Array], Array] = heads.same_target,
) -> tuple[Array, Array, Metrics]:
    """``L_V + L_Q`` (5 and 6), for all agents whose values are IQL's.

    Args:
      config: an agent's, with ``discount``, ``expectile`` and ``gumbel``.
      head: of the values.
      critic: an ensemble.
      value: V.
      params: of critic and value, by which the losses are differentiated.
      state: whose parameters, held fixed, and target critics make the targets.
      batch: [B].
      encode: (head, outputs [B, K] of the target critics) -> the target of V.

    Returns:
      the loss [], the advantage u [B], and what to report.
    """
    q_slow = bellman.min_member(head, critic.apply(state.target["critic"], batch.observation, batch.action))
    v_next = value.apply(state.params["value"], batch.next_observation)
    backup = (batch.reward, config.discount * batch.discount, v_next)

    v = value.apply(params["value"], batch.observation)
    value_loss, advantage = losses.implicit_value(head, v, q_slow, encode(head, q_slow), weigh(config))
    q = critic.apply(params["critic"], batch.observation, batch.action)
    critic_loss = losses.critics(head, q, head.target(*backup))
    metrics = {
        "critic_loss": critic_loss,
        "value_loss": value_loss,
        "q": head.value(q).mean(),
        "clipped": head.clipped(*backup).mean(),
        "v": head.value(v).mean(),
    }
    return critic_loss + value_loss, advantage, metrics


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`."""
    member = mlp.critic(spec, head.size, config.hidden, config.layer_norm, config.network)
    critic = ensemble(member, config.critics)
    value = mlp.state_value(head.size, config.hidden, config.layer_norm, config.network, spec)
    kind = mlp.unit_policy if config.unit_policy else mlp.behaviour_policy
    policy = kind(spec, config.hidden, config.network)
    optimisers = {
        "critic": build(config.critic_optimiser, config.learning_rate, optimiser),
        "value": build(config.value_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser),
    }

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key, 3)
        params = {
            "critic": critic.init(keys[0], batch.observation, batch.action),
            "value": value.init(keys[1], batch.observation),
            "policy": policy.init(keys[2], batch.observation),
        }
        return start(params, optimisers, targets=["critic"])

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        def loss(params):
            critic_and_value_loss, advantage, metrics = value_losses(
                config, head, critic, value, params, state, batch
            )
            if not config.slow_advantage:
                q = critics(state, batch.observation, batch.action).min(0)
                advantage = q - continuation(state, batch.observation, key)
            chosen = policy.apply(params["policy"], batch.observation, key=key)
            log_prob = chosen.log_prob(batch.action)
            policy_loss = -(losses.awr_weight(advantage, config.temperature) * log_prob).mean()
            metrics = {**metrics, "policy_loss": policy_loss, "advantage": advantage.mean()}
            return critic_and_value_loss + policy_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        if config.candidates == 1:
            return mlp.greedy(policy.apply(state.params["policy"], observation), spec)
        actions = draw(state, observation, key, (config.candidates,))
        return flow.best_of(actions, critics(state, observation, actions).min(0))

    def explore(state: State, observation: Array, key: Key) -> Array:
        return draw(state, observation, key)

    def draw(state: State, observation: Array, key: Key, count: tuple[int, ...] = ()) -> Array:
        action = policy.apply(state.params["policy"], observation).sample(seed=key, sample_shape=count)
        return action if spec.discrete else jnp.clip(action, -1.0, 1.0)

    def continuation(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(value.apply(state.params["value"], observation))

    def critics(state: State, observation: Array, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], observation, action))

    learner = Learner(init, update, act, continuation, explore, critics=critics)
    return augmented(learner, spec, config.network)


def unused(config: Any) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    return {} if is_off(config.gumbel) else {"expectile": "gumbel has the soft maximum in its place"}
