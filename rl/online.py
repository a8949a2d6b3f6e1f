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
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from rl import acting, keys, masks, nest, train
from rl.replay import chunks, demonstrations, frames, prioritised, ring, source, traces
from rl.replay import dataset as data
from rl.types import Actor, Array, Key, Learner, Metrics, Spec, State, Transition

# (state, rows, priorities, logged data or None, key) -> state, priorities, report
Learn = Callable[[State, Any, Any, Any, Key], tuple[State, Any, train.Report]]


class Replay(NamedTuple):
    """What one learner remembers, as pure functions of its memory."""

    empty: Callable[[ring.Row], Any]  # one row, for shapes -> memory
    insert: Callable[[Any, ring.Row], Any]  # memory, rows [N] -> memory
    # memory -> rows, which updates only read; priorities, which they change; None: there are none
    split: Callable[[Any], tuple[Any, Any]]
    join: Callable[[Any, Any], Any]  # rows, priorities -> memory
    learn: Callable[[int], Learn]  # how many updates -> these updates
    axes: Any  # of the memory over seeds
    # memory, lengths [N] -> memory: this many of the newest rows of each environment are demonstrations from now on
    relabel: Callable[[Any, Array], Any] | None = None
    chunk: int = 1  # actions in each transition (`chunked`)
    environments: int = 1  # whose rows come in turn, as of the view


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
    policy_memory: (
        Any  # [S, N, ...], what the policy that explores remembers of the episode (`rl.types.Actor`)
    )
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


class View(NamedTuple):
    """How rows are kept, and read as transitions."""

    encode: Callable[[ring.Row], Any]  # rows as the learner sees them -> as they are kept
    draw: Callable[[ring.Ring, Key, int], Array]  # -> slots [B]
    transitions: Callable[[ring.Ring, Array, Key], Transition]  # slots [B] -> [B]
    lookahead: int  # rows that must come after one before it can be read
    lookback: int  # how many of the oldest rows cannot be read
    chunk: int = 1  # actions in each transition
    environments: int = 1  # whose rows come in turn: the next step of an episode is so many rows later
    logged: Callable[[int], source.Source] = data.sampler  # how many -> the source of logged rows like these


def steps(n: int = 1, discount: float | None = None, environments: int = 1, td_lambda: float = 1.0) -> View:
    """Rows that hold both observations, read as transitions over ``n`` steps (`ring.transitions`).

    Args:
      n: steps, at least 1.
      discount: the agent's gamma, where there is more than one step. It must be the same, which nothing here can
        check.
      environments: ``N``, as of the `loop`.
      td_lambda: below 1, the lambda of TD(lambda) over at most ``n`` steps (`rl.replay.traces`). Logged data beside
        them are then single steps, too.

    Raises:
      ValueError: several steps without a discount, or a lambda outside of [0, 1].
    """
    gamma, lengths = _gamma(n, discount), _lengths(n, td_lambda)
    return View(
        encode=lambda row: row,
        draw=ring.draw,
        transitions=lambda memory, slots, key: ring.transitions(
            memory, slots, n, gamma, environments, lengths=lengths(key, len(slots))
        ),
        lookahead=0,
        lookback=0,
        environments=environments,
        logged=lambda size: (
            data.sampler(size) if td_lambda == 1 else data.lambda_sampler(size, n, gamma, td_lambda)
        ),
    )


def _lengths(n: int, td_lambda: float) -> Callable[[Key, int], Array | None]:
    """(key of a draw of rows, how many) -> steps of each transition; None where all have ``n``."""
    traces.check(td_lambda)
    if td_lambda == 1:
        return lambda key, size: None
    return lambda key, size: traces.lengths(keys.of(key, "lengths"), size, n, td_lambda)


def _gamma(steps: int, discount: float | None) -> float:
    """The discount of returns over this many steps. Raises ValueError if there is none, and they need one."""
    if discount is None and steps > 1:
        raise ValueError(
            f"transitions over {steps} steps hold returns, which are made with the agent's gamma: give "
            "discount=config.discount"
        )
    return 1.0 if discount is None else discount


def chunked(
    length: int, discount: float | None = None, environments: int = 1, reward_discount: float | None = None
) -> View:
    """Rows that hold both observations, read in chunks of ``length`` actions (`rl.replay.chunks`).

    Logged data beside them are `rl.replay.chunks.Chunks` of this length.

    Args:
      length: actions in a chunk.
      discount: the agent's gamma, of one step, as of `steps`.
      environments: ``N``, as of the `loop`.
      reward_discount: of rewards within a chunk; by default ``discount``.

    Raises:
      ValueError: chunks of several actions without a discount.
    """
    gamma = _gamma(length, discount)
    return steps(environments=environments)._replace(
        draw=lambda memory, key, size: ring.draw_whole(memory, key, size, length, environments),
        transitions=lambda memory, slots, key: ring.action_chunks(
            memory, slots, length, gamma, environments, reward_discount
        ),
        chunk=length,
        logged=lambda size: chunks.sampler(size, length),
    )


def stacked_frames(
    depth: int, n: int = 1, discount: float | None = None, environments: int = 1, td_lambda: float = 1.0
) -> View:
    """Rows that hold the newest of the ``depth`` frames seen, stacked when they are read (`rl.replay.frames`).

    Args:
      depth: frames in each observation.
      n, discount, environments, td_lambda: as in `steps`.

    Raises:
      ValueError: as `steps`.
    """
    several = steps(n, discount, environments, td_lambda)
    gamma, lengths = _gamma(n, discount), _lengths(n, td_lambda)
    return several._replace(
        encode=lambda row: frames.compress(row, depth),
        draw=lambda memory, key, size: frames.draw(memory, key, size, depth, n, environments),
        transitions=lambda memory, slots, key: frames.transitions(
            memory, slots, depth, n, gamma, environments, lengths(key, len(slots))
        ),
        lookahead=environments * n,
        lookback=environments * depth,
    )


def uniform(learner: Learner, view: View, capacity: int, batch_size: int, *, logged: int = 0) -> Replay:
    """The newest ``capacity`` steps, drawn uniformly.

    Args:
      learner: whose updates are made.
      view: of the steps.
      capacity: steps that are kept.
      batch_size: transitions in each update.
      logged: how many of them, the first ones, are drawn from logged data instead, uniformly too.
    """

    def newest(memory: ring.Ring, key: Key, step: Array | int) -> Transition:
        del step
        batch = view.transitions(memory, view.draw(memory, key, batch_size - logged), key)
        return source.of_origin(batch, source.ONLINE)

    if not logged:
        return _read_only(learner, view, capacity, ring, newest, lambda log, rows: rows)
    sample = source.concatenated(view.logged(logged), newest)
    return _read_only(learner, view, capacity, ring, sample, lambda log, rows: (log, rows))


def _read_only(
    learner: Learner,
    view: View,
    capacity: int,
    kind: Any,
    sample: source.Source,
    together: Callable[[Any, Any], Any],
) -> Replay:
    """A replay from which updates only read.

    Args:
      learner, view, capacity: as in `uniform`.
      kind: the module of the memory, `rl.replay.ring` or one like it.
      sample: draws a batch.
      together: (logged data or None, memory) -> the data of ``sample``.
    """
    return Replay(
        empty=lambda row: kind.empty(view.encode(row), capacity),
        insert=lambda memory, rows: kind.insert(memory, view.encode(rows)),
        split=lambda memory: (memory, None),
        join=lambda memory, priorities: memory,
        learn=reading_only(learner, sample, together),
        axes=kind.STACKED,
        chunk=view.chunk,
        environments=view.environments,
    )


def reading_only(
    learner: Learner, sample: source.Source, together: Callable[[Any, Any], Any]
) -> Callable[[int], Learn]:
    """`Replay.learn` for updates that change nothing in the memory.

    Args:
      learner: whose updates are made.
      sample: draws a batch.
      together: (logged data or None, memory) -> the data of ``sample``.
    """

    def learn(updates: int) -> Learn:
        epoch = train.scan_updates(learner.update, sample, updates)

        def run(
            state: State, memory: Any, priorities: None, log: Any, key: Key
        ) -> tuple[State, None, train.Report]:
            state, report = epoch(state, together(log, memory), key)
            return state, priorities, report

        return run

    return learn


class _Prioritised(NamedTuple):
    """A learner's state and the priorities that its updates change."""

    state: State
    tree: prioritised.Tree
    highest: Array

    @property
    def step(self) -> Array:
        return self.state.step


def relabelling(learner: Learner, view: View, capacity: int, batch_size: int, *, logged: int = 0) -> Replay:
    """As `uniform`, except that episodes can join the logged data: those that succeeded, say (`Replay.relabel`).

    Rows of such episodes have the origin of logged data (`rl.replay.source.LOGGED`) wherever they are drawn. The
    ``logged`` rows of a batch are drawn from both, uniformly over all their rows; how many there are stays as it is.
    CQN (Seo et al. 2024) and ARSQ (Liu et al. 2025) do so on RLBench.

    Args:
      learner, view, capacity, batch_size, logged: as in `uniform`.

    Raises:
      ValueError: the view is one of video frames, or of chunks.
    """
    if view.chunk > 1:
        raise ValueError("demonstrations that join are drawn as single steps, not in chunks of actions")
    if view.lookahead:
        raise ValueError("steps kept as single video frames cannot join the demonstrations: keep whole steps")

    def marked(memory: demonstrations.Memory, slots: Array, key: Key) -> Transition:
        origin = jnp.where(demonstrations.is_marked(memory, slots), jnp.int32(source.LOGGED), source.ONLINE)
        return view.transitions(memory.ring, slots, key)._replace(origin=origin)

    def newest(memory: demonstrations.Memory, key: Key, step: Array | int) -> Transition:
        del step
        return marked(memory, view.draw(memory.ring, key, batch_size - logged), key)

    def demonstrated(data_and_memory: Any, key: Key, step: Array | int) -> Transition:
        dataset, memory = data_and_memory
        choice_key, log_key, ring_key = jax.random.split(key, 3)
        joined = marked(memory, demonstrations.draw(memory, ring_key, logged), ring_key)
        known = source.of_origin(view.logged(logged)(dataset, log_key, step), source.LOGGED)
        share = demonstrations.count(memory) / (demonstrations.count(memory) + data.size(dataset))
        which = jax.random.uniform(choice_key, (logged,)) < share
        return masks.select_rows(which, joined, known)

    sample: source.Source = source.concatenated(demonstrated, newest) if logged else newest
    together = (lambda log, memory: ((log, memory), memory)) if logged else (lambda log, memory: memory)
    replay = _read_only(learner, view, capacity, demonstrations, sample, together)
    return replay._replace(relabel=demonstrations.mark)


def prioritised_memory(
    learner: Learner, view: View, capacity: int, batch_size: int, exponent: float, correction: float
) -> Replay:
    """The newest ``capacity`` steps, drawn in proportion to ``priority^exponent`` (Schaul et al. 2016).

    The priority of a step is how far it was from its target when it was last drawn, as ``learner.weighted`` says.

    Args:
      learner: whose updates are made; must know how to make ``weighted`` ones.
      view: of the steps.
      capacity: steps that are kept.
      batch_size: transitions in each update.
      exponent: 0 is uniform; 0.5 in Dopamine's Rainbow. It is of the loss: with squared errors half of Schaul's alpha,
        which is of the absolute error.
      correction: beta, how far the bias of these draws is taken out of the updates; 0.5 there.

    Raises:
      ValueError: the learner makes no weighted updates.
    """
    weighted = learner.weighted
    if weighted is None:
        raise ValueError(
            "this agent's updates cannot be weighted, as prioritised replay asks: choose dqn, arsq or cqn"
        )

    def update(carried: _Prioritised, drawn: tuple[ring.Ring, Key], key: Key) -> tuple[_Prioritised, Metrics]:
        memory = prioritised.Memory(drawn[0], carried.tree, carried.highest)
        slots = prioritised.draw(memory.tree, drawn[1], batch_size)
        batch = source.of_origin(view.transitions(memory.ring, slots, drawn[1]), source.ONLINE)
        weight = prioritised.weights(memory, slots, correction)
        state, metrics, priority = weighted(carried.state, batch, weight, key)
        memory = prioritised.update(memory, slots, (priority + 1e-10) ** exponent)
        return _Prioritised(state, memory.tree, memory.highest), metrics

    def learn(updates: int) -> Learn:
        # The update draws by itself, since the one before it has changed the priorities.
        data_and_key: Any = lambda memory, key, step: (memory, key)
        epoch: Any = train.scan_updates(cast(Any, update), data_and_key, updates)

        def run(
            state: State, rows: ring.Ring, priorities: Any, log: Any, key: Key
        ) -> tuple[State, Any, train.Report]:
            del log
            after, report = epoch(_Prioritised(state, *priorities), rows, key)
            return after.state, (after.tree, after.highest), report

        return run

    return Replay(
        empty=lambda row: prioritised.empty(view.encode(row), capacity),
        insert=lambda memory, rows: prioritised.insert(
            memory, view.encode(rows), view.lookahead, view.lookback
        ),
        split=lambda memory: (memory.ring, (memory.tree, memory.highest)),
        join=lambda rows, priorities: prioritised.Memory(rows, *priorities),
        learn=learn,
        axes=prioritised.STACKED,
        environments=view.environments,
    )


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
    if replay.environments != environments:
        raise ValueError(
            f"the view of the replay is of environments={replay.environments}, and the loop has {environments} for "
            f"each seed, so that steps of different ones would be joined: give environments={environments} to "
            "rl.online.steps, chunked or stacked_frames"
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
    chunk = chunks.spec(spec, replay.chunk)
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
            return explorer.act(state, memory, seen, first, key)
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
            f"the policy's actions are not finite after {step} steps: lower the learning rate, check the "
            "reward scale, or use a head with a bounded support (--head=hl_gauss)"
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
