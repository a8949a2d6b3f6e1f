"""Goals in hindsight: logged trajectories, relabelled with states that were reached.

Data without rewards say how to reach any state that they hold. Each row of a batch is a logged step with goals that are
drawn anew in every update, from four kinds (Andrychowicz et al. 2017; the probabilities are those of OGBench, Park et
al. 2025): the current state, a future state of the same episode whose distance is geometric or uniform, or any logged
state.

    OGBench            goals are states s_j, rows j of ``observation``; success is  j = i           (the current state)
    ``next_state``     goals are states s_{j+1}, rows j of ``next_observation``; success is  j = i  (the next state)

The second is HECRL's convention (Haramati et al. 2026), whose reward is that of the state a step leads to. In both a
future goal is at least one step after s_i where there is a later one, its row ``j`` lies between ``i`` and the last of
the episode, and nothing but index arithmetic finds it: no episode is ever gathered. Rewards and discounts that were
logged are not looked at.

A goal-conditioned agent sees {`OBSERVATION`: ..., `GOAL`: ...}, so that acting and evaluation know nothing new.

Differences from the two authors' code, neither of which changes a probability: one draw decides which kind a goal is,
where OGBench makes two conditional ones (with 1e-6 in a denominator); HECRL gives the next state as a goal to the first
fifth of each batch, here any row may get it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import nest
from rl.nest import GOAL, OBSERVATION
from rl.replay import images
from rl.replay.dataset import Dataset, episode_ends, require_single_steps, without_successor
from rl.replay.source import Configured, Source
from rl.settings import is_known
from rl.types import Array, Key, Spec, Transition

# (logged state [B, ...] that was reached, that of the goal) -> [B] bool: the goal is reached
Success = Callable[[Any, Any], Array]


@dataclasses.dataclass(frozen=True)
class Goals:
    """From where goals are drawn: three probabilities that sum to 1."""

    current: float = 0.2  # probability that a goal is the state itself
    future: float = 0.5  # probability that a goal is a later state of the same episode
    random: float = 0.3  # probability that a goal is any logged state
    geometric: bool = True  # steps to a later state: geometric, with mean 1 / (1 - discount); else uniform


@dataclasses.dataclass(frozen=True)
class Hindsight:
    """How a step is relabelled; defaults are OGBench's."""

    value: Goals = Goals()  # goals of values and critics
    actor: Goals = Goals(0.0, 1.0, 0.0, geometric=False)  # goals of policies
    negative: bool = True  # rewards are 0 where the goal is reached and -1 elsewhere; else 1 and 0
    mask: bool = True  # reaching the goal ends an episode: the discount is 0 there
    next_state: bool = False  # goals are next states, and reached by the step that leads there (HECRL)
    subgoal_steps: int = 0  # K, steps to a subgoal; 0: batches have none

    def __post_init__(self) -> None:
        if self.subgoal_steps < 0:
            raise ValueError(f"subgoal_steps={self.subgoal_steps} must be at least 1, or 0 for none")


OF_REWARDS = ("goals.negative", "goals.mask")
"""The fields of an agent's ``goals`` that make rewards and discounts, and change no goal."""
NO_SUBGOALS = {"goals.subgoal_steps": "the agent has no subgoals"}
"""What an agent without subgoals says of its ``goals``: see `rl.agents.unused`."""


def unused_without_rewards(agent: str, *drawn: Goals) -> dict[str, str]:
    """What such an agent says whose updates read neither rewards nor discounts; ``drawn`` is where goals are from."""
    unused = {**dict.fromkeys(OF_REWARDS, f"{agent} reads neither rewards nor discounts"), **NO_SUBGOALS}
    if not any(goals.geometric and goals.future > 0 for goals in drawn):
        unused["discount"] = "it is of goals at geometric distances, and none are drawn"
    return unused


class Trajectories(NamedTuple):
    """``N`` logged steps that know where their episode ends: NumPy arrays or the device's."""

    transitions: Transition  # [N, ...], episodes one after another
    end: Any  # [N] int32: the last row of each row's episode
    # [N, ...]: the simulator's state at the observation of each row (with ``next_state`` at its next observation), a
    # pytree, where success is to be computed from it
    state: Any = None


class GoalBatch(NamedTuple):
    """Steps with goals, [B] everywhere."""

    # {OBSERVATION, GOAL} before and after the step, with a goal for values; reward and discount are those of this goal
    value: Transition
    actor_goal: Any  # like an observation: a goal for policies
    # With ``subgoal_steps`` K: the state K steps later, the last of the episode where it is shorter
    subgoal: Any = None
    # The state K steps later on the way to ``actor_goal``: that goal itself where it is nearer
    actor_subgoal: Any = None


def trajectories(dataset: Dataset, hindsight: Hindsight, state: Any = None) -> Trajectories:
    """The trajectories in a dataset, on the host; `jax.device_put` moves them.

    Steps that terminated without a logged successor, where the dataset has their own observation
    (`rl.data.steps.from_steps`), are left out: reaching a goal and not the log says where values end, so that they
    would be learned as states that no action leaves.

    Args:
      dataset: of single steps.
      hindsight: what is going to be asked of them.
      state: `Trajectories.state`.

    Raises:
      ValueError: the data are not of single steps, no episode ends, an episode has a single step, none is as long as
        a subgoal is far, or ``state`` has not one row for each step.
    """
    require_single_steps(dataset, "goals")
    last = np.zeros(len(dataset.last), bool)
    last[episode_ends(dataset)] = True
    for name, rows in nest.named("state", state).items() if state is not None else ():
        if len(rows) != len(last):
            raise ValueError(f"{name} has {len(rows)} rows, and there are {len(last)} steps: one for each")
    kept = ~without_successor(dataset.transitions)
    if not kept.all():
        last = np.append(last[:-1] | ~kept[1:], True)[kept]  # episodes end one step earlier there
        dataset, state = jax.tree.map(lambda x: x[kept], (dataset, state))
    ends = np.flatnonzero(last)
    lengths = np.diff(ends, prepend=-1)
    if lengths.min() < 2:
        first = np.flatnonzero(kept)[ends[lengths.argmin()]]  # a row of the dataset as it was given
        raise ValueError(
            f"{(lengths < 2).sum()} of {len(ends)} trajectories have one step, the first at row {first}: they hold no "
            "later states to be goals; leave them out"
        )
    reach = lengths.max() - _nearest(hindsight)
    if hindsight.subgoal_steps > reach:
        raise ValueError(
            f"subgoal_steps={hindsight.subgoal_steps} is longer than every trajectory: the longest has a state at "
            f"most {reach} steps after its first; give at most that"
        )
    end = ends[np.searchsorted(ends, np.arange(len(last)))].astype(np.int32)
    return Trajectories(dataset.transitions, end, state)


def sampler(batch_size: int, hindsight: Hindsight, discount: float, success: Success | None = None) -> Source:
    """The source of `GoalBatch` [batch_size] from `Trajectories`: rows and goals uniform with replacement.

    Args:
      batch_size: ``B``.
      hindsight: which goals.
      discount: the agent's gamma; geometric distances have mean ``1 / (1 - discount)``. `rl.train.population` refuses
        agents with another, and those whose ``goals`` say otherwise what a reward is.
      success: of ``Trajectories.state``, which goals count as reached; by default those that are the very row.

    Raises:
      ValueError: probabilities that do not sum to 1, a discount outside (0, 1) with geometric distances, or, when it
        draws, success by a state that the trajectories do not have.
    """
    check_probabilities(hindsight)
    geometric = hindsight.value.geometric or hindsight.actor.geometric
    if geometric and not 0 < discount < 1:
        raise ValueError(
            f"discount={discount} must lie between 0 and 1: geometric goals are 1 / (1 - discount) steps away on "
            "average; or give geometric=False"
        )

    def sample(data: Trajectories, key: Key, step: Array | int = 0) -> GoalBatch:
        del step
        row_key, value_key, actor_key = jax.random.split(key, 3)
        row = jax.random.randint(row_key, (batch_size,), 0, data.end.shape[0])
        end = data.end[row]
        nearest = _nearest(hindsight)
        value, _ = _draw(hindsight.value, value_key, row, end, nearest, discount, data.end.shape[0])
        actor, anywhere = _draw(hindsight.actor, actor_key, row, end, nearest, discount, data.end.shape[0])

        steps = images.take(data.transitions, row)
        states = data.transitions.next_observation if hindsight.next_state else data.transitions.observation
        at = lambda index: images.take(states, index)
        goal = at(value)
        reached = row == value if success is None else success(*_states(data, row, value))
        reward = reached.astype(jnp.float32)
        batch = GoalBatch(
            steps._replace(
                observation=conditioned(steps.observation, goal),
                next_observation=conditioned(steps.next_observation, goal),
                reward=reward - 1.0 if hindsight.negative else reward,
                discount=1.0 - reward if hindsight.mask else jnp.ones_like(reward),
            ),
            at(actor),
        )
        if not hindsight.subgoal_steps:
            return batch
        ahead = jnp.minimum(row + hindsight.subgoal_steps - 1 + nearest, end)
        on_the_way = jnp.where(anywhere, ahead, jnp.minimum(ahead, actor))
        return batch._replace(subgoal=at(ahead), actor_subgoal=at(on_the_way))

    settings = [(f"goals.{name}", getattr(hindsight, name)) for name in ("negative", "mask", "next_state")]
    return Configured(sample, (*settings, *([("discount", discount)] if geometric else ())))


def conditioned(observation: Any, goal: Any) -> dict[str, Any]:
    """What a goal-conditioned agent sees of ``observation`` [..., *observation] and a goal like it.

    Raises:
      ValueError: the goal has another shape.
    """
    shapes = (jax.tree.map(jnp.shape, observation), jax.tree.map(jnp.shape, goal))
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"a goal of shape {shapes[1]} for an observation of shape {shapes[0]}: a goal is an observation, with the "
            "same leading axes; give the whole one that is to be reached"
        )
    return {OBSERVATION: observation, GOAL: goal}


def with_goal(observation: Mapping[str, Any], goal: Any) -> dict[str, Any]:
    """A conditioned observation with another goal."""
    return conditioned(observation[OBSERVATION], goal)


def conditioned_spec(spec: Spec) -> Spec:
    """What an agent with goals must know of an environment without them."""
    return spec._replace(
        observation_shape={OBSERVATION: spec.observation_shape, GOAL: spec.observation_shape}
    )


def plain_spec(spec: Spec, agent: str) -> Spec:
    """The ``spec`` that `conditioned_spec` was given.

    Raises:
      ValueError: it has no goals, and ``agent`` needs them.
    """
    shape = spec.observation_shape
    if not isinstance(shape, Mapping) or set(shape) != {OBSERVATION, GOAL}:
        raise ValueError(
            f"agent {agent!r} learns to reach goals, and observations of shape {shape} have none: run it with "
            "python -m experiments.goals (rl.replay.goals.conditioned_spec)"
        )
    return spec._replace(observation_shape=shape[OBSERVATION])


def value_bounds(hindsight: Hindsight, discount: float) -> tuple[float, float]:
    """All that a value can be, given what success and other steps are rewarded with: a support for value heads.

    Raises:
      ValueError: ``discount`` is 1, and rewards may go on for ever.
    """
    if hindsight.mask and not hindsight.negative:
        return 0.0, 1.0
    if is_known(discount) and discount >= 1:
        never = "reached" if hindsight.negative else "left"
        raise ValueError(
            f"discount={discount} must be below 1: with it, a goal that is never {never} has no finite value"
        )
    forever = 1.0 / (1.0 - discount)
    return (-forever, 0.0) if hindsight.negative else (0.0, forever)


def check_probabilities(hindsight: Hindsight, prefix: str = "") -> None:
    """Raises ValueError, naming the field after the ``prefix``, on probabilities that do not sum to 1."""
    for name in ("value", "actor"):
        goals = getattr(hindsight, name)
        shares = (goals.current, goals.future, goals.random)
        if not all(share >= 0 for share in shares) or not abs(sum(shares) - 1) <= 1e-5:  # nor NaN
            raise ValueError(
                f"{prefix}goals.{name}: probabilities must be at least 0 and sum to 1, not current={goals.current} + "
                f"future={goals.future} + random={goals.random} = {sum(shares):g}"
            )


def _nearest(hindsight: Hindsight) -> int:
    """Rows from that of a state to that of the nearest goal in its future."""
    return 0 if hindsight.next_state else 1


def _draw(
    goals: Goals, key: Key, row: Array, end: Array, nearest: int, discount: float, size: int
) -> tuple[Array, Array]:
    """Rows [B] of goals for the steps in ``row``, and bool [B]: which may be of any episode."""
    kind_key, future_key, random_key = jax.random.split(key, 3)
    first = jnp.minimum(row + nearest, end)  # of a last state its own row: there is no later one
    if goals.geometric:
        steps = jax.random.geometric(future_key, 1.0 - discount, row.shape, dtype=jnp.int32)
        # Steps without end, of a discount near 1, are no row numbers.
        future = jnp.minimum(row + jnp.minimum(steps, size) - 1 + nearest, end)
    else:
        # Rounded as in OGBench: the first and the last state are half as likely as one between them. As a distance, for
        # row numbers beyond 2^24 are not in float32.
        share = jax.random.uniform(future_key, row.shape)
        future = first + jnp.round((end - first) * share).astype(jnp.int32)
    anywhere = jax.random.randint(random_key, row.shape, 0, size)
    kind = jax.random.uniform(kind_key, row.shape)
    is_random = kind >= 1.0 - goals.random
    return jnp.where(kind < goals.current, row, jnp.where(is_random, anywhere, future)), is_random


def _states(data: Trajectories, *rows: Array) -> list[Any]:
    """The logged simulator states in those rows."""
    if data.state is None:
        raise ValueError(
            "success is to be computed from the simulator's states, and the trajectories have none: give them to "
            "rl.replay.goals.trajectories, or leave success out, for equality of the row"
        )
    return [jax.tree.map(lambda x, row=row: x[row], data.state) for row in rows]
