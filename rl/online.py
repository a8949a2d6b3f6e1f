"""Learning while acting, as two compiled calls per step: insert, then update and act.

The host steps the environments (`rl.envs.stream`) and says what came of it; everything else is on the device and
is donated from call to call. They are two because the replay is written in place by the first and only read by the
second; in one call XLA copies it, and a million rows are 100 MB in every step. ``S`` learners, which differ in seed,
advance together, each with its own replay and ``N`` environments.

The keys of update ``t`` and of action ``t`` depend on the run's key and ``t`` alone (`rl.keys`): a run that was stopped
continues bit for bit where the environments can be put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import acting, keys, nest, train
from rl.buffers import Replay
from rl.replay import chunks, ring, source
from rl.types import Actor, Array, Key, Learner, Spec, State, Transition


class MetricSums(NamedTuple):
    """Metrics of the updates since they were last read; see `train.Report`."""

    total: Mapping[str, Array]  # {name: [S]}, sums over calls of the mean over the call's updates
    bad_step: Mapping[str, Array]  # {name: [S] int32}
    calls: Array  # [] int32


class Carry(NamedTuple):
    """Everything on the device that one call hands to the next."""

    state: State  # stacked, [S, ...] but for the step
    memory: Any  # [S, ...]
    seen: Any  # [S, N, *observation]
    action: Array  # [S, N, ...], chosen for what is seen
    first: Array  # [S, N] bool, an episode starts with what is seen
    # [S, N, ...], what the policy that explores remembers of the episode (`rl.types.Actor`)
    policy_memory: Any
    time: Array  # [] int32, actions chosen so far
    tally: MetricSums


class Step(NamedTuple):
    """What the environments returned for the last action, from the host."""

    observation: Any  # [2, S, N, *observation]: where it led, and what is seen now
    scalar: Any  # [3, S, N] float32: reward, discount, whether a new episode started


class Loop(NamedTuple):
    """The compiled calls."""

    init: Callable[[], Carry]
    # (carry, observation [S, N, *observation], random) -> carry, action: new episodes start everywhere
    begin: Callable[[Carry, Any, bool], tuple[Carry, Array]]
    # (carry, step, logged data or None, updates, random) -> carry, action [S, N, ...]; `updates` and `random`, which
    # draws the next action uniformly, are static
    step: Callable[[Carry, Step, Any, int, bool], tuple[Carry, Array]]
    # (carry, lengths [S, N] int32) -> carry, whose last ``lengths`` steps are demonstrations; None where none can be
    relabel: Callable[[Carry, Any], Carry] | None


def loop(
    learner: Learner,
    spec: Spec,
    replay: Replay,
    run_keys: Key,
    environments: int = 1,
    observation_type: Any = jnp.float32,
) -> Loop:
    """The calls of one run.

    Args:
      learner: must know how to explore (`rl.acting.explorer`).
      spec: as the learner sees the environment.
      replay: its memory.
      run_keys: [S], one for each seed (`rl.keys.seeds`).
      environments: ``N``; the replay must be of as many.
      observation_type: float32 or uint8; of observations that are dicts, one for all arrays or a dict of them.

    Raises:
      ValueError: the learner cannot explore, the replay is of another number of environments, or keys are not one for
        each seed.
    """
    keys.count(run_keys)
    if replay.view.environments != environments:
        raise ValueError(
            f"the view of the replay is of environments={replay.view.environments}, and the loop has {environments} "
            f"for each seed, so that steps of different ones would be joined: give environments={environments} to "
            "rl.buffers.steps, chunked or stacked_frames"
        )
    explorer = acting.resetting(acting.explorer(learner))
    act = functools.partial(choose_actions, spec, explorer, keys.of(run_keys, "act"))

    def init() -> Carry:
        return initial_carry(learner, spec, replay, explorer, run_keys, environments, observation_type)

    def begin(carry: Carry, observation: Any, random: bool) -> tuple[Carry, Array]:
        first = jnp.ones_like(carry.first)
        return act(carry._replace(seen=jax.tree.map(jnp.asarray, observation), first=first), random)

    def store(memory: Any, seen: Any, action: Array, first: Array, outcome: Step) -> tuple[Any, Any, Array]:
        return insert(replay, memory, seen, action, first, outcome)

    def learn(
        carry: Carry, priorities: Any, rows: Any, logged: Any, updates: int, random: bool
    ) -> tuple[Carry, Any, Array]:
        if updates:
            carry, priorities = update_learners(replay, run_keys, carry, priorities, rows, logged, updates)
        carry, action = act(carry, random)
        return carry, priorities, action

    store_in_place = jax.jit(store, donate_argnums=0)
    learn_from = jax.jit(learn, static_argnums=(4, 5), donate_argnums=(0, 1))

    def step(carry: Carry, outcome: Step, logged: Any, updates: int, random: bool) -> tuple[Carry, Array]:
        memory, seen, first = store_in_place(carry.memory, carry.seen, carry.action, carry.first, outcome)
        rows, priorities = replay.split(memory)
        carry = carry._replace(memory=None, seen=seen, first=first)
        carry, priorities, action = learn_from(carry, priorities, rows, logged, updates, random)
        return carry._replace(memory=replay.join(rows, priorities)), action

    mark: Any = replay.relabel and jax.jit(
        jax.vmap(replay.relabel, (replay.axes, 0), replay.axes), donate_argnums=0
    )

    def relabel(carry: Carry, lengths: Array) -> Carry:
        return carry._replace(memory=mark(carry.memory, lengths))

    return Loop(
        init=jax.jit(init),
        begin=jax.jit(begin, static_argnums=2, donate_argnums=0),
        step=step,
        relabel=relabel if mark else None,
    )


def initial_carry(
    learner: Learner,
    spec: Spec,
    replay: Replay,
    explorer: Actor,
    run_keys: Key,
    environments: int,
    observation_type: Any,
) -> Carry:
    """What a run starts with: learners before their first update, and memories of nothing."""
    seeds, row = run_keys.shape[0], _blank(spec, observation_type)
    chunk = chunks.spec(spec, replay.view.chunk)
    batch = source.of_origin(example(chunk, observation_type), source.ONLINE)  # as those of the updates
    state = jax.vmap(learner.init, (0, None), train.STACKED)(keys.of(run_keys, "init"), batch)
    memory = replay.empty(row)
    one = jax.eval_shape(learner.init, run_keys[0], batch)
    metrics = jax.eval_shape(learner.update, one, batch, run_keys[0])[1]
    seen, action = jax.tree.map(
        lambda x: jnp.zeros((seeds, environments, *x.shape), x.dtype), (row.observation, row.action)
    )
    return Carry(
        state=state,
        memory=jax.vmap(lambda _: memory, out_axes=replay.axes)(run_keys),
        seen=seen,
        action=action,
        first=jnp.ones((seeds, environments), bool),
        policy_memory=jax.vmap(explorer.start, (train.STACKED, 0))(state, seen),
        time=jnp.zeros((), jnp.int32),
        tally=zero_sums(sorted(metrics), seeds),
    )


def choose_actions(
    spec: Spec, explorer: Actor, act_keys: Key, carry: Carry, random: bool
) -> tuple[Carry, Array]:
    """The next actions [S, N, ...], of the policy or uniformly ``random``."""

    def one(state: State, memory: Any, seen: Any, first: Array, key: Key) -> tuple[Array, Any]:
        key = jax.random.fold_in(key, carry.time)
        if not random:
            action, memory = explorer.act(state, memory, seen, first, key)
            # As environments clip them: what is stored is what was done.
            return action if spec.discrete else jnp.clip(action, -1.0, 1.0), memory
        # The policy, whose actions these are not, remembers nothing of them.
        memory = explorer.start(state, seen)
        shape = nest.leading(seen, spec.observation_shape)
        if spec.discrete:
            return jax.random.randint(key, shape, 0, spec.action_size), memory
        return jax.random.uniform(key, (*shape, spec.action_size), minval=-1.0, maxval=1.0), memory

    action, memory = jax.vmap(one, (train.STACKED, 0, 0, 0, 0))(
        carry.state, carry.policy_memory, carry.seen, carry.first, act_keys
    )
    stored = action.astype(carry.action.dtype)
    return carry._replace(action=stored, policy_memory=memory, time=carry.time + 1), action


def insert(
    replay: Replay, memory: Any, seen: Any, action: Array, first: Array, outcome: Step
) -> tuple[Any, Any, Array]:
    """The memory with the step that was made, what is seen now, and where an episode starts with it."""
    following, now = (jax.tree.map(lambda x, i=i: x[i], outcome.observation) for i in range(2))
    rows = ring.Row(seen, action, outcome.scalar[0], outcome.scalar[1], following, first)
    memory = jax.vmap(replay.insert, (replay.axes, 0), replay.axes)(memory, rows)
    return memory, now, outcome.scalar[2] > 0


def update_learners(
    replay: Replay, run_keys: Key, carry: Carry, priorities: Any, rows: Any, logged: Any, updates: int
) -> tuple[Carry, Any]:
    """Carry and priorities of the memory after this many ``updates``."""
    axes = replay.split(replay.axes)
    state, priorities, report = jax.vmap(
        replay.learn(updates), (train.STACKED, *axes, None, 0), (train.STACKED, axes[1], 0)
    )(carry.state, rows, priorities, logged, run_keys)
    return carry._replace(state=state, tally=_count(carry.tally, report)), priorities


def example(spec: Spec, observation_type: Any = jnp.float32) -> Transition:
    """A batch of one transition of zeros, for the shapes that an agent asks for."""
    return ring.placeholder(jax.tree.map(lambda x: x[None], _blank(spec, observation_type)))


def zero_sums(names: list[str], seeds: int) -> MetricSums:
    """Sums over no updates of metrics called ``names``."""
    return MetricSums(
        total={name: jnp.zeros(seeds) for name in names},
        bad_step={name: jnp.full(seeds, train.NEVER) for name in names},
        calls=jnp.zeros((), jnp.int32),
    )


def mean_report(sums: MetricSums) -> train.Report:
    """The mean of each metric over all updates since `zero_sums`; NaN if there were none."""
    calls = sums.calls.astype(jnp.float32)
    return train.Report({name: total / calls for name, total in sums.total.items()}, sums.bad_step)


def finite_metrics(report: train.Report) -> dict[str, np.ndarray]:
    """The metrics of a report as {"train/...": [S]}, without those of which there is nothing yet."""
    metrics = {f"train/{name}": np.asarray(value) for name, value in report.metrics.items()}
    return {name: value for name, value in metrics.items() if np.isfinite(value).all()}


def checked(sums: MetricSums, action: Any, step: int) -> train.Report:
    """`mean_report`, on the host.

    Args:
      sums: of the metrics.
      action: [S, N, ...], the next ones.
      step: their number, for the message.

    Raises:
      train.Diverged: a metric or an action is not finite. Actions tell it before the metrics do, of a gradient that was
        not.
    """
    report = jax.device_get(mean_report(sums))
    train.check_finite(report)
    if not np.isfinite(action).all():
        raise train.Diverged(
            f"the policy's actions are not finite after {step} steps: {train.AGAINST_DIVERGENCE}"
        )
    return report


def _count(sums: MetricSums, report: train.Report) -> MetricSums:
    return MetricSums(
        total={name: sums.total[name] + report.metrics[name] for name in sums.total},
        bad_step={name: jnp.minimum(sums.bad_step[name], report.bad_step[name]) for name in sums.total},
        calls=sums.calls + 1,
    )


def _blank(spec: Spec, observation_type: Any) -> ring.Row:
    """A row of zeros."""
    types = observation_type
    if not isinstance(types, Mapping):
        types = nest.map_structure(lambda _: observation_type, spec.observation_shape)
    observation = nest.map_structure(jnp.zeros, spec.observation_shape, types)
    action = jnp.zeros((), jnp.int32) if spec.discrete else jnp.zeros(spec.action_size)
    return ring.Row(observation, action, jnp.zeros(()), jnp.zeros(()), observation, jnp.zeros((), bool))
