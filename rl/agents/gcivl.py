"""Goal-conditioned implicit V-learning: IQL's expectile without critics.

The value of HIQL (Park et al., NeurIPS 2023) with one level, as in OGBench (Park et al. 2025). With twin values
``V_i``, target networks ``V'_i``, goals ``g`` (`rl.replay.goals`), rewards ``r``, discounts ``d`` that are 0 at the
goal, expectile ``tau`` and inverse temperature ``alpha``:

    A'   = r + gamma d min_i V'_i(s', g) - mean_i V'_i(s, g)
    L_V  = E[ sum_i |tau - 1(A' < 0)| loss_Vi(r + gamma d V'_i(s', g)) ]
    L_pi = - E[ min(exp(alpha A), 100) log pi(a | s, g) ],   A = mean_i V_i(s', g) - mean_i V_i(s, g)

where ``loss`` is the head's: squared error in the paper. ``L_pi`` has goals of its own. A maximum over what may happen
rather than over actions, it is for dynamics that are nearly deterministic.

Paper and code. This is OGBench's code: its policies are normal with deviation 1, and targets follow the values *before*
each update. Here an image and its goal go through an encoder each, where OGBench stacks their channels.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, follow, start
from rl.networks import mlp
from rl.networks.base import ensemble
from rl.networks.layers import OGBENCH, Architecture
from rl.replay import goals
from rl.replay.goals import GoalBatch, Hindsight
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are OGBench's."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    expectile: float = 0.9  # tau: towards 1 the maximum over what was logged
    alpha: float = 10.0  # inverse temperature of the policy's weights: 0 is behaviour cloning
    target_rate: float = 0.005  # Polyak step of the target values
    learning_rate: float = 3e-4  # Adam, all networks
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in the values
    network: Architecture = OGBENCH  # of every network
    value_optimiser: Adam = Adam()  # of the values
    policy_optimiser: Adam = Adam()  # of the policy
    goals: Hindsight = Hindsight()  # which goals a step is relabelled with

    def __post_init__(self) -> None:
        require_ranges(self)


class Regression(NamedTuple):
    """What twin values are fitted to."""

    target: Array  # [E, B], or [E, B, K]: of each member
    weight: Array  # [B], the expectile's
    clipped: Array  # [], the share of the targets beyond the head's support

    def loss(self, head: ValueHead, outputs: Array) -> Array:
        """``L_V`` [] of the values' outputs [E, B, K] at ``s, g``."""
        return (self.weight * head.loss(outputs, self.target)).mean(1).sum()


def regression(
    head: ValueHead,
    steps: Transition,
    discount: float | Array,
    expectile: float | Array,
    slow: Array,
    slow_next: Array,
) -> Regression:
    """The targets and weights of ``L_V``.

    Args:
      head: of the values.
      steps: [B].
      discount: gamma.
      expectile: tau.
      slow: outputs [E, B, K] of the target networks at ``s, g``.
      slow_next: the same at ``s', g``.
    """
    discounts = discount * steps.discount
    q = steps.reward + discounts * head.value(slow_next).min(0)
    reward = bellman.per_member(steps.reward, len(slow))
    backup = (reward, bellman.per_member(discounts, len(slow)), slow_next)
    return Regression(
        target=head.target(*backup),
        weight=losses.expectile_weight(q - head.value(slow).mean(0), expectile),
        clipped=head.clipped(*backup).mean(),
    )


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner of `GoalBatch`; see `rl.types.Learner`. Raises ValueError for a spec without goals."""
    goals.plain_spec(spec, "gcivl")
    member = mlp.state_value(head.size, config.hidden, config.layer_norm, config.network, spec)
    value = ensemble(member, 2)
    policy = mlp.unit_policy(spec, config.hidden, config.network)
    optimisers = {
        "value": build(config.value_optimiser, config.learning_rate, optimiser),
        "policy": build(config.policy_optimiser, config.learning_rate, optimiser),
    }

    def init(key: Key, batch: GoalBatch) -> State:
        keys = jax.random.split(key)
        params = {
            "value": value.init(keys[0], batch.value.observation),
            "policy": policy.init(keys[1], batch.value.observation),
        }
        return start(params, optimisers, targets=["value"])

    def values(params, observation) -> Array:
        """The members' mean [...]."""
        return head.value(value.apply(params, observation)).mean(0)

    def update(state: State, batch: GoalBatch, key: Key) -> tuple[State, Metrics]:
        steps = batch.value
        slow, slow_next = (
            value.apply(state.target["value"], x) for x in (steps.observation, steps.next_observation)
        )
        fit = regression(head, steps, config.discount, config.expectile, slow, slow_next)
        here, there = (
            goals.with_goal(x, batch.actor_goal) for x in (steps.observation, steps.next_observation)
        )
        advantage = values(state.params["value"], there) - values(state.params["value"], here)

        def loss(params):
            v = value.apply(params["value"], steps.observation)
            value_loss = fit.loss(head, v)
            log_prob = policy.apply(params["policy"], here, key=key).log_prob(steps.action)
            policy_loss = -(losses.awr_weight(advantage, config.alpha) * log_prob).mean()
            metrics = {
                "value_loss": value_loss,
                "policy_loss": policy_loss,
                "clipped": fit.clipped,
                "v": head.value(v).mean(),
                "advantage": advantage.mean(),
                "log_prob": log_prob.mean(),
            }
            return value_loss + policy_loss, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        state = descend(follow(state, config.target_rate), gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return mlp.greedy(policy.apply(state.params["policy"], observation), spec)

    def continuation(state: State, observation: Array, key: Key) -> Array:
        del key
        return values(state.params["value"], observation)

    return augmented(Learner(init, update, act, continuation), spec, config.network)


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """All that steps to a goal can be worth, whatever rewards were logged."""
    del spec, low, high
    return goals.value_bounds(config.goals, config.discount)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    del config
    return goals.NO_SUBGOALS
