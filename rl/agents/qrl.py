"""Quasimetric RL (Wang et al., ICML 2023): the largest distance to goals under which a step is at most one long.

With a quasimetric ``d`` (`rl.networks.quasimetric`, IQE) of latent states ``phi``, random goals ``g``, a multiplier
``lambda`` and latent dynamics ``T``:

    L_d  = E[ 100 softplus(5 - d(s, g) / 100) ] + lambda C,   C = E[ max(d(s, s') - 1, 0)^2 ]        moves d and phi
    L_l  = lambda (eps - C)                                                                          moves lambda
    L_T  = E[ d(phi(s'), z) + d(z, phi(s')) ] / 2,   z = phi(s) + T(phi(s), a)                       moves T, d and phi
    L_pi = - mu E[ Q(s, pi(s, g), g) ] - alpha E[ log pi(a | s, g) ],   mu = 1 / E |Q|                        ddpg_bc
           Q(s, a, g) = - d(phi(s) + T(phi(s), a), phi(g))
           - E[ min(exp(alpha A), 100) log pi(a | s, g) ],   A = d(s, g) - d(s', g)                           awr

Triangle inequalities carry the bound on one step to all paths, so that ``d`` is pushed up until it is the number of
steps of the shortest path. ``L_pi`` has goals of its own; ``awr`` has no dynamics.

No value is regressed on: `make` takes a head, as every agent's does, and does not use it; scripts refuse one.

Paper and code. This is OGBench's code (Park et al. 2025): lambda is the exponential of a parameter that starts at 0
(paper: its softplus), all losses are taken at the same parameters and moved along at once, and policies are normal with
deviation 1. In one version of that code a step costs nothing where its random goal happens to be the very row that it
starts from; here, as in others, it always costs 1. An image and its goal go through an encoder each in the policy,
where OGBench stacks their channels. OGBench's other distance (MRN) is not offered.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl.agents import extraction
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_fixed_discount, require_ranges
from rl.agents.state import descend, start
from rl.networks import mlp, quasimetric
from rl.networks.layers import OGBENCH, Architecture
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION, GoalBatch, Goals, Hindsight
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are OGBench's."""

    epsilon: float = 0.05  # eps, the allowed mean of max(d(s, s') - 1, 0)^2
    extraction: str = "ddpg_bc"  # how the policy is extracted: ddpg_bc or awr (the one for integer actions)
    alpha: float = 0.003  # weight of cloning in ddpg_bc; inverse temperature in awr
    latent: int = 512  # size of the latent states, a multiple of 8
    discount: float = 0.99  # gamma of geometric goals, where these are asked for; the distance knows none
    learning_rate: float = 3e-4  # Adam, all networks and the multiplier
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in encoder and dynamics
    network: Architecture = OGBENCH  # of every network
    distance_optimiser: Adam = Adam()  # of the encoder, the multiplier and the dynamics
    policy_optimiser: Adam = Adam()  # of the policy
    goals: Hindsight = Hindsight(value=Goals(0.0, 0.0, 1.0))  # which goals a step is relabelled with

    def __post_init__(self) -> None:
        require_ranges(self)
        require_fixed_discount(self)
        require_choices(self, {"extraction": extraction.EXTRACTIONS})


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; see `rl.types.Learner`.

    Raises:
      ValueError: a spec without goals, an extraction that cannot handle integer actions, or a latent
        size that is no multiple of 8.
    """
    del head
    plain = goals.plain_spec(spec, "qrl")
    extraction.require(config, spec)
    has_dynamics = config.extraction == "ddpg_bc"
    body = (config.latent, config.hidden, config.layer_norm, config.network)
    metric = quasimetric.interval(plain, *body)
    dynamics = mlp.state_value(*body)
    policy = mlp.unit_policy(spec, config.hidden, config.network)
    distance_optimiser = build(config.distance_optimiser, config.learning_rate, optimiser)
    optimisers = dict.fromkeys(("distance", "multiplier", "dynamics"), distance_optimiser) | {
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser)
    }

    def init(key: Key, batch: GoalBatch) -> State:
        keys, steps = jax.random.split(key, 3), batch.value
        params = {
            "distance": metric.init(keys[0], steps.observation[OBSERVATION]),
            "multiplier": jnp.zeros(()),  # log lambda
            "policy": policy.init(keys[1], steps.observation),
        }
        if has_dynamics:
            latent = metric.embed(params["distance"], steps.observation[OBSERVATION])
            params["dynamics"] = dynamics.init(keys[2], jnp.concatenate([latent, steps.action], -1))
        return start(params, optimisers)

    def step(params: Params, latent: Array, action: Array) -> Array:
        """The latent state that an action leads to."""
        return latent + dynamics.apply(params, jnp.concatenate([latent, action], -1))

    def distance_objective(
        params: Params, here: Array, there: Array, goal: Array
    ) -> tuple[Array, dict[str, Array]]:
        """L_d + L_l of latent states, and what to report."""
        far = metric.distance(params["distance"], here, goal)
        near = metric.distance(params["distance"], here, there)
        spread = (100 * jax.nn.softplus(5 - far / 100)).mean()
        excess = jnp.square(jax.nn.relu(near - 1)).mean()
        multiplier = jnp.exp(params["multiplier"])
        distance_loss = spread + jax.lax.stop_gradient(multiplier) * excess
        multiplier_loss = multiplier * (config.epsilon - jax.lax.stop_gradient(excess))
        metrics = {
            "distance_loss": distance_loss,
            "excess": excess,
            "multiplier": multiplier,
            "distance": far.mean(),
            "step": near.mean(),
        }
        return distance_loss + multiplier_loss, metrics

    def dynamics_objective(params: Params, here: Array, there: Array, action: Array) -> Array:
        """L_T."""
        predicted = step(params["dynamics"], here, action)
        forth = metric.distance(params["distance"], there, predicted)
        back = metric.distance(params["distance"], predicted, there)
        return (forth + back).mean() / 2

    def policy_objective(
        params: Params, state: State, batch: GoalBatch, key: Key, s: Array, s_next: Array
    ) -> tuple[Array, Metrics]:
        """L_pi at latent states, and what to report; distance and dynamics are the state's."""
        online, action = state.params["distance"], batch.value.action
        g = metric.embed(online, batch.actor_goal)
        toward = goals.with_goal(batch.value.observation, batch.actor_goal)
        return extraction.policy_loss(
            config,
            spec,
            policy.apply(params, toward, key=key),
            action,
            q=lambda action: -metric.distance(online, step(state.params["dynamics"], s, action), g),
            advantage=lambda: metric.distance(online, s, g) - metric.distance(online, s_next, g),
        )

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        steps = batch.value
        states = (
            steps.observation[OBSERVATION],
            steps.next_observation[OBSERVATION],
            steps.observation[GOAL],
        )

        def loss(params):
            here, there, goal = (metric.embed(params["distance"], x) for x in states)
            total, metrics = distance_objective(params, here, there, goal)
            if has_dynamics:
                metrics["dynamics_loss"] = dynamics_objective(params, here, there, steps.action)
                total = total + metrics["dynamics_loss"]
            s, s_next = jax.lax.stop_gradient((here, there))  # the policy's loss moves nothing else
            policy_loss, measured = policy_objective(params["policy"], state, batch, key, s, s_next)
            return total + policy_loss, {**metrics, **measured}

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Any, key: Key) -> Array:
        del key
        return mlp.greedy(policy.apply(state.params["policy"], observation), spec)

    def minus_distance(state: State, observation: Any, key: Key) -> Array:
        """Minus the steps [...] to the goal."""
        del key
        params = state.params["distance"]
        here, goal = (metric.embed(params, observation[name]) for name in (OBSERVATION, GOAL))
        return -metric.distance(params, here, goal)

    return augmented(Learner(init, update, act, minus_distance), spec, config.network)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    return goals.unused_without_rewards("qrl", config.goals.value, config.goals.actor)
