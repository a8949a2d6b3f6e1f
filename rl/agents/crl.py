"""Contrastive RL (Eysenbach et al., NeurIPS 2022): which futures go with which actions.

With representations ``phi`` of states and actions and ``psi`` of goals, of size ``n``, twin ``i``, and goals ``g`` from
the discounted future of each step (`rl.replay.goals`):

    f_i(s, a, g) = phi_i(s, a)' psi_i(g) / sqrt(n)
    L_f  = - mean over i and all pairs (j, k) of a batch:  log sigmoid(f_i(s_j, a_j, g_j)) where k = j,
                                                           log sigmoid(-f_i(s_j, a_j, g_k)) elsewhere
    L_pi = - lambda E[ min_i f_i(s, pi(s, g), g) ] - alpha E[ log pi(a | s, g) ],  lambda = 1 / E |min_i f_i|    ddpg_bc
           - E[ min(exp(alpha A), 100) log pi(a | s, g) ],  A = min_i f_i(s, a, g) - v(s, g)                     awr

At its minimum ``exp f`` is, up to a factor, how much likelier ``g`` is in the discounted future of ``s, a`` than among
all goals: ``f`` orders actions as their values do. ``L_pi`` has goals of its own; in ``awr`` ``v`` is an ``f`` without
actions, fitted alike. ``loss=symmetric`` has InfoNCE in both directions in place of the logistic loss.

No value is regressed on: `make` takes a head, as every agent's does, and does not use it; scripts refuse one.

Paper and code. This is OGBench's code (Park et al. 2025): twins, their smaller logit in the policy's loss, not below
log 1e-6 (there the logarithm of a clipped exponential), policies that are normal with deviation 1. Here an image and
its goal go through an encoder each in the policy, where OGBench stacks their channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl.agents import extraction
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_fixed_discount, require_ranges
from rl.agents.state import descend, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION, GoalBatch, Goals, Hindsight
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State
from rl.values import losses
from rl.values.heads import ValueHead

LOSSES: dict[str, Callable[[Array], Array]] = {
    "binary": losses.binary_nce,
    "symmetric": losses.symmetric_info_nce,
}
_SMALLEST = math.log(1e-6)  # of the logits in the policy's loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are OGBench's."""

    discount: float = 0.99  # gamma, of the future that goals are drawn from
    loss: str = "binary"  # loss of the pairs: binary (logistic) or symmetric (InfoNCE)
    extraction: str = "ddpg_bc"  # how the policy is extracted: ddpg_bc or awr (the one for integer actions)
    alpha: float = 0.1  # weight of cloning in ddpg_bc; inverse temperature in awr
    latent: int = 512  # n, size of the representations
    learning_rate: float = 3e-4  # Adam, all networks
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in the representations
    network: Architecture = OGBENCH  # of every network
    critic_optimiser: Adam = Adam()  # of the representations
    policy_optimiser: Adam = Adam()  # of the policy
    goals: Hindsight = Hindsight(value=Goals(0.0, 1.0, 0.0))  # which goals a step is relabelled with

    def __post_init__(self) -> None:
        require_ranges(self)
        require_fixed_discount(self)
        require_choices(self, {"extraction": extraction.EXTRACTIONS, "loss": LOSSES})


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; see `rl.types.Learner`.

    Raises:
      ValueError: a spec without goals, or an extraction that cannot handle integer actions.
    """
    del head
    plain = goals.plain_spec(spec, "crl")
    extraction.require(config, spec)
    awr = config.extraction == "awr"
    body = (config.latent, config.hidden, config.layer_norm, config.network)
    state_action_encoder = ensemble(mlp.critic(plain, *body), 2)
    state_encoder = ensemble(mlp.state_value(*body, plain), 1)
    goal_encoder = {members: ensemble(mlp.state_value(*body, plain), members) for members in (1, 2)}
    policy = mlp.unit_policy(spec, config.hidden, config.network)
    contrastive_optimiser = build(config.critic_optimiser, config.learning_rate, optimiser)
    optimisers = {
        "critic": contrastive_optimiser,
        "value": contrastive_optimiser,
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser),
    }

    def init(key: Key, batch: GoalBatch) -> State:
        keys, steps = jax.random.split(key, 5), batch.value
        here, goal = steps.observation[OBSERVATION], steps.observation[GOAL]
        params = {
            "critic": {
                "phi": state_action_encoder.init(keys[0], here, steps.action),
                "psi": goal_encoder[2].init(keys[1], goal),
            },
            "policy": policy.init(keys[2], steps.observation),
        }
        if awr:
            params["value"] = {
                "phi": state_encoder.init(keys[3], here),
                "psi": goal_encoder[1].init(keys[4], goal),
            }
        return start(params, optimisers)

    def critic(params: Params, observation: Any, action: Array) -> tuple[Array, Array]:
        """Representations [2, ..., n] of state and action, and of the goal."""
        phi = state_action_encoder.apply(params["phi"], observation[OBSERVATION], action)
        return phi, goal_encoder[2].apply(params["psi"], observation[GOAL])

    def value(params: Params, observation: Any) -> tuple[Array, Array]:
        """Representations [1, ..., n] of the state, and of the goal."""
        phi = state_encoder.apply(params["phi"], observation[OBSERVATION])
        return phi, goal_encoder[1].apply(params["psi"], observation[GOAL])

    def logit(phi: Array, psi: Array) -> Array:
        """The smaller logit [...] of each row with its own goal."""
        return jnp.maximum((phi * psi).sum(-1).min(0) / math.sqrt(config.latent), _SMALLEST)

    def contrast(phi: Array, psi: Array) -> tuple[Array, Array]:
        """The loss [], and the share of rows that find their own goal among all of the batch []."""
        logits = jnp.einsum("ejn,ekn->ejk", phi, psi) / math.sqrt(config.latent)
        right = logits.mean(0).argmax(-1) == jnp.arange(logits.shape[-1])
        return LOSSES[config.loss](logits).mean(), right.mean()

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        steps = batch.value
        toward = goals.with_goal(steps.observation, batch.actor_goal)
        f = lambda action: logit(*critic(state.params["critic"], toward, action))

        def loss(params):
            critic_loss, accuracy = contrast(*critic(params["critic"], steps.observation, steps.action))
            value_loss = contrast(*value(params["value"], steps.observation))[0] if awr else 0.0
            policy_loss, measured = extraction.policy_loss(
                config,
                spec,
                policy.apply(params["policy"], toward, key=key),
                steps.action,
                q=f,
                advantage=lambda: f(steps.action) - logit(*value(state.params["value"], toward)),
            )
            metrics = {**measured, "contrastive_loss": critic_loss, "accuracy": accuracy}
            return critic_loss + value_loss + policy_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Any, key: Key) -> Array:
        del key
        return mlp.greedy(policy.apply(state.params["policy"], observation), spec)

    def likelihood(state: State, observation: Any, key: Key) -> Array:
        """The logit [...] of the goal under the policy's own action: a logarithm, in no unit of reward."""
        return logit(*critic(state.params["critic"], observation, act(state, observation, key)))

    return augmented(Learner(init, update, act, likelihood), spec, config.network)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    return goals.unused_without_rewards("crl", config.goals.value, config.goals.actor)
