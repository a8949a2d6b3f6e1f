"""HECRL (Haramati et al., ICLR 2026): entities, a goal-conditioned value, and subgoals picked from a diffusion model.

Two things are learned from the same relabelled goals (`rl.replay.goals`) and meet only when acting. Observations ``s``
and goals ``g`` are sets of entities (`rl.networks.entity`); with twin critics ``Q_i``, target critics ``Q'_i`` and
expectile ``tau``, the low level is goal-conditioned IQL whose policy ascends a critic:

    L_V  = E[ |tau - 1(u < 0)| loss_V(min_i Q'_i(s, a, g)) ],   u = min_i Q'_i(s, a, g) - V(s, g)
    L_Q  = E[ sum_i loss_Qi(clip(r + gamma d V(s', g), -1 / (1 - gamma), 0)) ]
    L_pi = - lambda E[ Q_1(s, pi(s, g), g) ] + alpha E[ (pi(s, g) - a)^2 ],   lambda = 1 / E |Q_1|

where ``loss`` is the head's: squared error in the paper. Nothing ends at a goal (``d`` = 1 as published; with
``goals.mask`` it is 0 there). The high level imitates: ``w`` is the state ``K`` steps on the way to ``g``, or ``g``
where that is nearer, and a diffusion model over entities is fitted to it, or one mean with weights:

    L_w  = E[ |f(x_t, t, s, g) - e| ],   x_t = a_t w + s_t e                                            diffusion
           E[ min(exp(beta (V(w, g) - V(s, g))), 100) (f(s, g) - w)^2 ], or Chamfer's distance          awr

Every 25 steps, at most 32 times in an episode, the value selects among candidates ``w_1, ..., w_N`` from it
(`rl.agents.subgoals`):

    F  = { j : V(s, w_j) >= R }                     those that the value knows the way to
    j* = argmax_{j in F} V(w_j, g)                  the one nearest to the goal
    pursue g if F is empty, or V(s, g) > V(w_j*, g), else w_j*

| as published | settings |
|---|---|
| EC-SGIQL, which is HECRL | the defaults |
| EC-IQL, no subgoals | ``subgoals=none`` |
| EC-SGIQL with AWR subgoals | ``subgoals=awr filtered=False direct=False`` |
| a random subgoal | ``candidates=1 filtered=False direct=False`` |
| best value without filter | ``filtered=False direct=False`` |

The authors have one switch for the filter and the direct-goal rule; here each has its own. ``choice=random``, any
feasible candidate, is ours.

Paper and code. Where the two differ, this is the code: the policy ascends the first critic alone. Gradients are taken
at the same parameters and applied together, where the code updates V, Q and the policy one after another. The loss of
the diffusion model is that of the subgoal alone, where the code adds a constant for the observation and for the goal,
and so divides its gradient by 3. Weights of ``awr`` are not divided by 100, as the code does for images only. With
``ids``, which the code does not have, a candidate's entities keep the ids of the observation's. A vector in place of a
set of entities is a set of one. A head with a support clips targets to that; one of your own without a support does
not clip them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rl.agents import gcivl, subgoals
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_ranges
from rl.agents.state import descend, follow, start
from rl.networks import entity
from rl.networks.base import Network, ensemble, first_member
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION, GoalBatch, Goals, Hindsight
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition
from rl.values import bellman, heads, losses
from rl.values.heads import ValueHead

READS_SETS = True
"""Observations [N, F] are sets of entities. Agents that do not say so take them for histories [T, F]."""

CLIPPED = Adam(clip=20.0)
SHAPE = entity.Shape()
GOALS = Hindsight(Goals(0.2, 0.8, 0.0, geometric=False), mask=False, next_state=True, subgoal_steps=50)


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are the authors' for three cubes that are pushed, picked and placed."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    expectile: float = 0.9  # tau: towards 1 the maximum over logged actions
    alpha: float = 0.1  # weight of cloning in the policy's loss, to be tuned for each task
    target_rate: float = 0.005  # Polyak step of the target critics
    subgoals: str = "diffusion"  # what proposes them: diffusion, awr, or none to pursue the goal at once
    choice: str = "best"  # choice among feasible candidates: best (by value) or random
    filtered: bool = True  # only candidates with V(s, w) >= radius are feasible; False: all
    direct: bool = True  # pursue the goal itself where V(s, g) is above the candidate's V(w, g)
    radius: float = -30.0  # R, of competence, as a value; -30 is about 36 steps away at gamma 0.99
    candidates: int = 256  # N, subgoals drawn from the diffusion model each time
    replan_every: int = 25  # steps for which a subgoal is pursued
    max_subgoals: int = 32  # subgoals of an episode, replans to the goal included; then it is pursued
    diffusion_steps: int = 10  # S, steps of the diffusion
    prediction: str = "epsilon"  # what the diffusion model predicts: epsilon (the noise) or x0 (the subgoal)
    eta: float = 1.0  # noise in sampling: 1 is DDPM, 0 DDIM
    awr_temperature: float = 3.0  # beta, inverse temperature of awr's weights
    awr_error: str = "squared"  # squared, or chamfer, of sets of entities without ids (`rl.networks.entity`)
    ids: int = 0  # last features of an entity that are its one-hot id, for candidates to keep; 0: none
    learning_rate: float = 3e-4  # Adam, all networks
    network: entity.Shape = SHAPE  # widths of every network
    critic_optimiser: Adam = CLIPPED  # of the critics
    value_optimiser: Adam = CLIPPED  # of the value
    policy_optimiser: Adam = CLIPPED  # of the policy
    subgoal_optimiser: Adam = CLIPPED  # of what proposes subgoals
    goals: Hindsight = GOALS  # which goals a step is relabelled with, and K, the steps to a subgoal

    def __post_init__(self) -> None:
        require_ranges(self)
        subgoals.require(self)


class Networks(NamedTuple):
    """Functions of entities ``s`` and goal entities ``g``, [..., N, F] both."""

    value: Network  # (s, g) -> outputs [..., K]
    critic: Network  # (s, g, action [..., D]) -> outputs [..., K], of one of the twins
    policy: Network  # (s, g) -> action [..., D]
    proposal: subgoals.Proposal | None  # None: the goal is pursued at once


def networks(config: Config, spec: Spec, head: ValueHead) -> Networks:
    """All that is learned, by the names of `rl.types.State.params`; the proposal's is ``subgoal``."""
    shape, kind = goals.plain_spec(spec, "hecrl").observation_shape, subgoals.PROPOSALS.get(config.subgoals)
    if isinstance(shape, Mapping) or len(shape) not in (1, 2):
        raise ValueError(
            f"agent 'hecrl' reads sets of entities [N, F], or vectors, not observations of shape {shape}"
        )
    if config.ids and len(shape) == 1:
        raise ValueError(f"ids={config.ids} are of sets of entities [N, F]; for vectors give ids=0")
    if config.ids >= shape[-1]:
        raise ValueError(f"ids={config.ids} leaves nothing of an entity of {shape[-1]} features: give fewer")
    return Networks(
        value=entity.state_value(head.size, config.network),
        critic=entity.critic(head.size, config.network),
        policy=entity.deterministic_policy(spec.action_size, config.network),
        proposal=kind(config, shape[-1]) if kind else None,
    )


def plan(
    config: Config, nets: Networks, head: ValueHead, params: Params, s: Array, g: Array, key: Key
) -> subgoals.Plan:
    """A subgoal for entities ``s`` and goal entities ``g``, [..., N, F] both.

    Args:
      config: see `Config`.
      nets: `networks`, with a proposal.
      head: of the values.
      params: `rl.types.State.params`.
      s: entities.
      g: goal entities.
      key: of candidates and choice.

    Raises:
      ValueError: the networks have no proposal.
    """
    if nets.proposal is None:
        raise ValueError("subgoals=none: there is nothing to plan with; choose diffusion or awr")
    propose = functools.partial(nets.proposal.draw, params["subgoal"])
    value = lambda s, g: head.value(nets.value.apply(params["value"], s, g))
    return subgoals.plan(config, propose, value, s, g, key)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; ``act`` pursues the goal at once, ``actor`` subgoals. See `rl.types.Learner`.

    Raises:
      ValueError: integer actions, a spec without goals, or observations that are neither entities nor vectors.
    """
    require(spec, "hecrl", discrete=False, instead="gcbc, gcivl or hiql")
    nets = networks(config, spec, head)
    value, member, policy, proposal = nets
    critic = ensemble(member, 2)
    is_set = len(spec.observation_shape[GOAL]) == 2
    settings = {
        "critic": config.critic_optimiser,
        "value": config.value_optimiser,
        "policy": config.policy_optimiser,
        "subgoal": config.subgoal_optimiser,
    }
    if proposal is None:
        del settings["subgoal"]
    optimisers = {name: build(adam, config.learning_rate, optimiser) for name, adam in settings.items()}

    def entities(observation: Array) -> Array:
        """[..., N, F] of one part of an observation. Raises ValueError if there are more than ids."""
        if config.ids and is_set:
            entity.require_ids(observation.shape[-2], config.ids)
        return observation if is_set else observation[..., None, :]

    def sets(observation: Mapping[str, Array]) -> tuple[Array, Array]:
        return entities(observation[OBSERVATION]), entities(observation[GOAL])

    def values(params: Params, s: Array, g: Array) -> Array:
        return head.value(value.apply(params["value"], s, g))

    def init(key: Key, batch: GoalBatch) -> State:
        keys, (s, g) = jax.random.split(key, 4), sets(batch.value.observation)
        params = {
            "critic": critic.init(keys[0], s, g, batch.value.action),
            "value": value.init(keys[1], s, g),
            "policy": policy.init(keys[2], s, g),
        }
        if proposal is not None:
            params["subgoal"] = proposal.init(keys[3], s, g)
        return start(params, optimisers, targets=["critic"])

    def backup(state: State, steps: Transition, s_next: Array, g: Array) -> tuple[Array, Array]:
        """The critics' target [B, ...], and where it is clipped, [B]."""
        v_next = value.apply(state.params["value"], s_next, g)
        step = (steps.reward, config.discount * steps.discount, v_next)
        target = head.target(*step)
        if not head.are_values:  # it clips by itself, if it has a support
            return target, head.clipped(*step)
        low, high = goals.value_bounds(config.goals, config.discount)
        return jnp.clip(target, low, high), (target < low) | (target > high)

    def policy_objective(
        params: Params, state: State, s: Array, g: Array, logged: Array
    ) -> tuple[Array, Array]:
        """L_pi, and the squared distance [] from the logged actions."""
        action = policy.apply(params, s, g)
        q = head.value(member.apply(first_member(state.params["critic"]), s, g, action))
        cloning = jnp.square(action - logged).mean()
        return config.alpha * cloning - losses.q_scale(q) * q.mean(), cloning

    def subgoal_objective(params: Params, state: State, s: Array, g: Array, w: Array, key: Key) -> Array:
        """L_w."""
        assert proposal is not None
        advantage = lambda: values(state.params, w, g) - values(state.params, s, g)
        return proposal.loss(params, s, g, w, key, advantage).mean()

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        steps = batch.value
        (s, g), (s_next, _) = sets(steps.observation), sets(steps.next_observation)
        g_actor = entities(batch.actor_goal)
        q_slow = bellman.min_member(head, critic.apply(state.target["critic"], s, g, steps.action))
        v_target = heads.same_target(head, q_slow)
        q_target, clipped = backup(state, steps, s_next, g)

        weigh = functools.partial(losses.expectile_weight, expectile=config.expectile)

        def loss(params):
            v = value.apply(params["value"], s, g)
            value_loss, _ = losses.implicit_value(head, v, q_slow, v_target, weigh)
            q = critic.apply(params["critic"], s, g, steps.action)
            critic_loss = losses.critics(head, q, q_target)
            policy_loss, cloning = policy_objective(params["policy"], state, s, g_actor, steps.action)
            metrics = {
                "critic_loss": critic_loss,
                "value_loss": value_loss,
                "policy_loss": policy_loss,
                "cloning": cloning,
                "clipped": clipped.mean(),
                "q": head.value(q).mean(),
                "v": head.value(v).mean(),
            }
            total = critic_loss + value_loss + policy_loss
            if proposal is not None:
                w = entities(batch.actor_subgoal)
                metrics["subgoal_loss"] = subgoal_objective(params["subgoal"], state, s, g_actor, w, key)
                total = total + metrics["subgoal_loss"]
            return total, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Any, key: Key) -> Array:
        del key
        return policy.apply(state.params["policy"], *sets(observation))

    def continuation(state: State, observation: Any, key: Key) -> Array:
        del key
        return values(state.params, *sets(observation))

    def critics(state: State, observation: Any, action: Array) -> Array:
        return head.value(critic.apply(state.params["critic"], *sets(observation), action))

    learner = Learner(init, update, act, continuation, critics=critics)
    if proposal is None:
        return learner
    replan = lambda state, s, g, key: plan(config, nets, head, state.params, s, g, key).subgoal
    return learner._replace(
        actor=subgoals.pursuit(config, spec, entities, replan, act),
        subgoal=lambda state, memory, observation, candidates: memory.subgoal,
    )


target_range = gcivl.target_range
unused = subgoals.unused
