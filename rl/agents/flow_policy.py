"""Policies of a flow that clones the data: the best of its draws, or a policy of one step that is distilled from it.

With noise z, z' ~ N(0, I), time t ~ U[0, 1], and the critics ``Q_i`` of the agent:

    L_flow = E_D[ (v(s, x_t, t) - (a - z))^2 ],   x_t = (1 - t) z + t a

    best_of      a(s) = argmax_j agg_i Q_i(s, a_j),   a_1, ..., a_N: draws of the flow
    distilled    a(s) = pi(s, z),   L_pi = E_D[ alpha (pi(s, z') - flow(s, z'))^2 - mean_i Q_i(s, pi(s, z')) ]

where flow(s, z) is where ``v`` carries z in a few steps (`rl.networks.flow`), and has no gradient. ``best_of`` is the
policy of IFQL and of QC, ``distilled`` that of FQL and of QC-FQL. No critic drives the flow in either.

Where FQL's paper (Park, Li & Levine, ICML 2025) and code differ, this is the code: squared distances are means over
action dimensions, which alpha has been tuned for (the paper's are sums); flow(s, z) is clipped to the box, and pi(s, z)
where a critic sees it, but not in the distance; the policy ascends the mean of the critics also where targets take the
minimum. ``normalize_q`` divides Q by its mean size, as the code offers, and advises for tasks without a tuned alpha
(0.03 to 10 then).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rl import nest
from rl.agents.optimisers import Optimiser, build
from rl.networks import flow
from rl.settings import require_choices
from rl.types import Array, Key, Metrics, Params, Spec, State, Transition
from rl.values import bellman, losses

EXTRACTIONS = ("distilled", "best_of")
_SETTINGS = {"distilled": ("alpha", "normalize_q", "policy_optimiser"), "best_of": ("candidates",)}
Values = Callable[[Array], Array]
"""Actions [..., D] at given observations -> the critics' values [M, ...], without a gradient for the critics."""


class FlowPolicy(NamedTuple):
    """How an agent learns and acts by a flow. Its networks are ``flow`` and, if distilled, ``policy`` in the params."""

    optimisers: dict[str, optax.GradientTransformation]
    init: Callable[[Key, Transition], dict[str, Params]]
    # params, the state before the update, batch, key, values at its observations -> loss [], what to report
    loss: Callable[[Params, State, Transition, Key, Values], tuple[Array, Metrics]]
    act: Callable[[State, Array, Key, Values], Array]  # observation [...] -> action [..., D] in the box


def require(config: Any) -> None:
    """Raises ValueError for settings of which no policy can be made."""
    require_choices(config, {"extraction": EXTRACTIONS})
    flow.require_steps(config.flow_steps, config.integrator)


def make(config: Any, spec: Spec, optimiser: Optimiser, aggregation: str) -> FlowPolicy:
    """The policy.

    Args:
      config: an agent's, with ``extraction``, ``alpha``, ``normalize_q``, ``candidates``, ``flow_steps``,
        ``integrator``, and networks and optimisers as `rl.agents.fql.Config` has them.
      spec: of observations and actions.
      optimiser: makes one of a learning rate.
      aggregation: of the critics, by which the best draw is chosen: mean or min.
    """
    velocity = flow.velocity(spec, config.hidden, config.network)
    policy = flow.one_step(spec, config.hidden, config.network)
    distilled = config.extraction == "distilled"
    optimisers = {"flow": build(config.flow_optimiser, config.learning_rate, optimiser)}
    if distilled:
        optimisers["policy"] = build(config.policy_optimiser, config.learning_rate, optimiser)

    def init(key: Key, batch: Transition) -> dict[str, Params]:
        networks = {"flow": velocity, "policy": policy}
        return {
            name: networks[name].init(one, batch.observation, batch.action)
            for name, one in zip(optimisers, jax.random.split(key), strict=False)
        }

    def loss(
        params: Params, state: State, batch: Transition, key: Key, values: Values
    ) -> tuple[Array, Metrics]:
        flow_key, dropout_key, policy_key = jax.random.split(key, 3)
        field = velocity.apply(params["flow"], batch.observation, key=dropout_key)
        flow_loss = flow.loss(field, batch.action, flow_key).mean()
        if not distilled:
            return flow_loss, {"flow_loss": flow_loss}
        policy_loss, metrics = improvement(params, state, batch, policy_key, values)
        return flow_loss + policy_loss, {"flow_loss": flow_loss, "policy_loss": policy_loss, **metrics}

    def improvement(
        params: Params, state: State, batch: Transition, key: Key, values: Values
    ) -> tuple[Array, Metrics]:
        """The loss of the distilled policy."""
        noise_key, dropout_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, batch.action.shape)
        field = velocity.apply(state.params["flow"], batch.observation)
        cloned = jnp.clip(flow.sample(field, noise, config.flow_steps, config.integrator), -1.0, 1.0)
        action = policy.apply(params["policy"], batch.observation, key=dropout_key)(noise)
        distillation = flow.distillation(action, cloned).mean()
        q = values(jnp.clip(action, -1.0, 1.0)).mean(0)
        scale = losses.q_scale(q) if config.normalize_q else 1.0
        loss = config.alpha * distillation - scale * q.mean()
        return loss, {"distillation": distillation, "policy_q": q.mean()}

    def act(state: State, observation: Array, key: Key, values: Values) -> Array:
        shape = (*nest.leading(observation, spec.observation_shape), spec.action_size)
        if distilled:
            noise = jax.random.normal(key, shape)
            return jnp.clip(policy.apply(state.params["policy"], observation)(noise), -1.0, 1.0)
        field = velocity.apply(state.params["flow"], observation)
        actions = flow.draws(field, key, config.candidates, shape, config.flow_steps, config.integrator)
        return flow.best_of(actions, bellman.aggregate_values(values(actions), aggregation))

    return FlowPolicy(optimisers, init, loss, act)


def unused(config: Any) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    return {
        name: f"it is of extraction={extraction}"
        for extraction, names in _SETTINGS.items()
        if extraction != config.extraction
        for name in names
    }
