"""HIQL (Park et al., NeurIPS 2023): one value, and two policies that are taken from it.

With twin values ``V_i`` that see a goal through a representation ``phi(s, g)`` of length ``sqrt(n)``, fitted as in
`rl.agents.gcivl`, ``w`` the state ``k`` steps ahead on the logged way (the last one, where the episode ends before),
and inverse temperatures ``alpha``:

    L_low  = - E[ min(exp(alpha_l A(s', w)), 100) log pi_l(a | s, phi(s, w)) ]
    L_high = - E[ min(exp(alpha_h A(w, g)), 100) log pi_h(phi(s, w) | s, g) ]
    A(x, g) = mean_i V_i(x, phi(x, g)) - mean_i V_i(s, phi(s, g))

``L_high`` has goals ``g`` of its own, and there ``w`` is at most as far as ``g``.

In every step ``pi_h`` proposes a subgoal and ``pi_l`` acts towards it: for a far goal, values of neighbouring states
differ too little to rank actions. Policies are normal with deviation 1; the proposal is scaled to length ``sqrt(n)``.

Paper and code. This is OGBench's code (Park et al. 2025): a representation of size 10; the target values are of
what comes after ``phi``, which has no target network (the paper's own code has one of ``phi``, too); they follow the
values *before* each update. ``pi_l`` does not move ``phi`` unless ``representation_gradient`` says so (pixels there).
Here an image and its goal go through an encoder each, where OGBench stacks their channels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl.agents import gcivl
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION, GoalBatch, Hindsight
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State
from rl.values import losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are OGBench's."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    expectile: float = 0.7  # tau: towards 1 the maximum over what was logged
    low_alpha: float = 3.0  # inverse temperature of the low policy's weights
    high_alpha: float = 3.0  # inverse temperature of the high policy's weights
    representation: int = 10  # n, size of what a goal is represented by
    representation_gradient: bool = False  # whether the low policy's loss moves the representation
    target_rate: float = 0.005  # Polyak step of the target values
    learning_rate: float = 3e-4  # Adam, all networks
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in values and representation
    network: Architecture = OGBENCH  # of every network
    value_optimiser: Adam = Adam()  # of values and representation
    policy_optimiser: Adam = Adam()  # of both policies
    goals: Hindsight = Hindsight(subgoal_steps=25)  # which goals a step is relabelled with, and k

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.goals.subgoal_steps < 1:
            raise ValueError("goals.subgoal_steps=0: hiql needs subgoals, give the steps to one, such as 25")


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; see `rl.types.Learner`. Raises ValueError for a spec without goals."""
    plain = goals.plain_spec(spec, "hiql")
    body = (config.hidden, config.layer_norm, config.network)
    inner = spec._replace(
        observation_shape={OBSERVATION: plain.observation_shape, GOAL: (config.representation,)}
    )
    representation = mlp.state_value(config.representation, *body, spec)
    value = ensemble(mlp.state_value(head.size, *body, inner), 2)
    low = mlp.unit_policy(inner, config.hidden, config.network)
    proposal = spec._replace(action_size=config.representation, discrete=False)
    high = mlp.unit_policy(proposal, config.hidden, config.network)
    value_optimiser = build(config.value_optimiser, config.learning_rate, optimiser)
    policy_optimiser = build(config.policy_optimiser, config.learning_rate, optimiser)
    optimisers = {
        "value": value_optimiser,
        "representation": value_optimiser,
        "policy": policy_optimiser,
        "high_policy": policy_optimiser,
    }

    def scaled(x: Array) -> Array:
        """``x`` [..., n] with length sqrt(n); 0 stays 0."""
        # Networks that start without biases make it of zeros: it has no direction, and its length no derivative.
        is_zero = (x == 0).all(-1, keepdims=True)
        length = jnp.linalg.norm(jnp.where(is_zero, 1.0, x), axis=-1, keepdims=True)
        return x * (math.sqrt(config.representation) / length)

    def with_representation(params: Params, observation: Any) -> dict[str, Any]:
        """The observation with the representation [..., n] of its goal in place of that."""
        goal = scaled(representation.apply(params, observation))
        return {OBSERVATION: observation[OBSERVATION], GOAL: goal}

    def init(key: Key, batch: GoalBatch) -> State:
        keys, observation = jax.random.split(key, 4), batch.value.observation
        params = {"representation": representation.init(keys[0], observation)}
        near = with_representation(params["representation"], observation)
        params |= {
            "value": value.init(keys[1], near),
            "policy": low.init(keys[2], near),
            "high_policy": high.init(keys[3], observation),
        }
        return start(params, optimisers, targets=["value"])

    def values(params: Params, observation: Any) -> Array:
        """The members' mean [...]."""
        outputs = value.apply(params["value"], with_representation(params["representation"], observation))
        return head.value(outputs).mean(0)

    def subgoal_advantage(params: Params, subgoal: Any, observation: Any, goal: Any) -> Array:
        """A(subgoal, goal) [...] at an observation."""
        there = goals.conditioned(subgoal, goal)
        return values(params, there) - values(params, goals.with_goal(observation, goal))

    def value_objective(params: Params, observation: Any, fit: gcivl.Regression) -> tuple[Array, Array]:
        """The loss of `rl.agents.gcivl`, and the values [E, B]."""
        v = value.apply(params["value"], with_representation(params["representation"], observation))
        return fit.loss(head, v), head.value(v)

    def low_objective(params: Params, batch: GoalBatch, advantage: Array, key: Key) -> tuple[Array, Array]:
        """L_low, and log pi_l [B]."""
        toward = goals.with_goal(batch.value.observation, batch.subgoal)
        near = with_representation(params["representation"], toward)
        if not config.representation_gradient:
            near = jax.lax.stop_gradient(near)
        log_prob = low.apply(params["policy"], near, key=key).log_prob(batch.value.action)
        return -(losses.awr_weight(advantage, config.low_alpha) * log_prob).mean(), log_prob

    def high_objective(params: Params, online: Params, batch: GoalBatch, advantage: Array, key: Key) -> Array:
        """L_high; the representation that it proposes is the online one."""
        on_the_way, toward = (
            goals.with_goal(batch.value.observation, goal) for goal in (batch.actor_subgoal, batch.actor_goal)
        )
        subgoal = jax.lax.stop_gradient(with_representation(online["representation"], on_the_way)[GOAL])
        log_prob = high.apply(params["high_policy"], toward, key=key).log_prob(subgoal)
        return -(losses.awr_weight(advantage, config.high_alpha) * log_prob).mean()

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        steps, online = batch.value, state.params
        slow, slow_next = (
            value.apply(state.target["value"], with_representation(online["representation"], x))
            for x in (steps.observation, steps.next_observation)
        )
        fit = gcivl.regression(head, steps, config.discount, config.expectile, slow, slow_next)
        after = steps.next_observation[OBSERVATION]
        low_advantage = subgoal_advantage(online, after, steps.observation, batch.subgoal)
        high_advantage = subgoal_advantage(online, batch.actor_subgoal, steps.observation, batch.actor_goal)
        low_key, high_key = jax.random.split(key)

        def loss(params):
            value_loss, v = value_objective(params, steps.observation, fit)
            low_loss, log_prob = low_objective(params, batch, low_advantage, low_key)
            high_loss = high_objective(params, online, batch, high_advantage, high_key)
            metrics = {
                "value_loss": value_loss,
                "policy_loss": low_loss,
                "high_policy_loss": high_loss,
                "clipped": fit.clipped,
                "v": v.mean(),
                "advantage": low_advantage.mean(),
                "high_advantage": high_advantage.mean(),
                "log_prob": log_prob.mean(),
            }
            return value_loss + low_loss + high_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(online)
        state = descend(follow(state, config.target_rate), gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Any, key: Key) -> Array:
        del key
        subgoal = scaled(high.apply(state.params["high_policy"], observation).mode())
        near = {OBSERVATION: observation[OBSERVATION], GOAL: subgoal}
        return mlp.greedy(low.apply(state.params["policy"], near), spec)

    def continuation(state: State, observation: Any, key: Key) -> Array:
        del key
        return values(state.params, observation)

    def nearest(state: State, memory: Any, observation: Any, candidates: Any) -> Any:
        """The candidates that are represented most like what is proposed."""
        del memory
        proposed = scaled(high.apply(state.params["high_policy"], observation).mode())
        lead = proposed.shape[:-1]
        count = len(jax.tree.leaves(candidates)[0])
        beside = lambda x: jnp.broadcast_to(x, (*lead, count, *x.shape[len(lead) + 1 :]))
        here = jax.tree.map(lambda x: beside(jnp.expand_dims(x, len(lead))), observation[OBSERVATION])
        there = jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *x.shape)), candidates)
        pairs = {OBSERVATION: here, GOAL: there}
        represented = scaled(representation.apply(state.params["representation"], pairs))
        best = jnp.einsum("...cn,...n->...c", represented, proposed).argmax(-1)
        return jax.tree.map(lambda x: x[best], candidates)

    return augmented(Learner(init, update, act, continuation, subgoal=nearest), spec, config.network)


target_range = gcivl.target_range
