"""Replay buffers of learners that act: how steps are kept, read as transitions, and drawn for updates.

A `View` says how rows are read: single steps, returns over several, chunks of actions, stacked frames. A `Replay` is
what one learner remembers of them, with the updates made from that: `uniform`, `relabelling`, `prioritised_memory`.
`rl.online` runs it beside the environments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from rl import keys, masks, train
from rl.replay import chunks, demonstrations, frames, prioritised, ring, source, traces
from rl.replay import dataset as data
from rl.settings import require_share
from rl.types import Array, Key, Learner, Metrics, State, Transition

# (state, rows, priorities, logged data or None, key) -> state, priorities, report
Learn = Callable[[State, Any, Any, Any, Key], tuple[State, Any, train.Report]]

_SINGLE_STEPS = data.Returns(1, 1.0, 1.0)


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
    returns: data.Returns = _SINGLE_STEPS  # what logged rows are made with


class Replay(NamedTuple):
    """What one learner remembers, as pure functions of its memory."""

    empty: Callable[[ring.Row], Any]  # one row, for shapes -> memory
    insert: Callable[[Any, ring.Row], Any]  # memory, rows [N] -> memory
    # memory -> rows, which updates only read; priorities, which they change; None: there are none
    split: Callable[[Any], tuple[Any, Any]]
    join: Callable[[Any, Any], Any]  # rows, priorities -> memory
    learn: Callable[[int], Learn]  # how many updates -> these updates
    axes: Any  # of the memory over seeds
    view: View  # of the steps
    # memory, lengths [N] -> memory: this many of the newest rows of each environment are demonstrations from now on
    relabel: Callable[[Any, Array], Any] | None = None


def steps(n: int = 1, discount: float | None = None, environments: int = 1, td_lambda: float = 1.0) -> View:
    """Rows that hold both observations, read as transitions over ``n`` steps (`ring.transitions`).

    Args:
      n: steps, at least 1.
      discount: the agent's gamma, where there is more than one step. It must be the same, which nothing here can
        check.
      environments: ``N``, as of `rl.online.loop`.
      td_lambda: below 1, the lambda of TD(lambda) over at most ``n`` steps (`rl.replay.traces`). Logged data beside
        them are then single steps, too.

    Raises:
      ValueError: several steps without a discount, or a discount or a lambda outside of [0, 1].
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
        returns=data.Returns(n if td_lambda == 1 else 1, gamma, gamma),
    )


def _lengths(n: int, td_lambda: float) -> Callable[[Key, int], Array | None]:
    """(key of a draw of rows, how many) -> steps of each transition; None where all have ``n``."""
    traces.check(td_lambda)
    if td_lambda == 1:
        return lambda key, size: None
    return lambda key, size: traces.lengths(keys.of(key, "lengths"), size, n, td_lambda)


def _gamma(steps: int, discount: float | None) -> float:
    """The discount of returns over so many steps.

    Raises ValueError if there is none and they need one, if it does not lie between 0 and 1, or if there is no step.
    """
    traces.check_steps(steps)
    if discount is None and steps > 1:
        raise ValueError(
            f"transitions over {steps} steps hold returns, which are made with the agent's gamma: give "
            "discount=config.discount"
        )
    if discount is not None:
        require_share("discount", discount)
    return 1.0 if discount is None else discount


def chunked(
    length: int, discount: float | None = None, environments: int = 1, reward_discount: float | None = None
) -> View:
    """Rows that hold both observations, read in chunks of ``length`` actions (`rl.replay.chunks`).

    Logged data beside them are `rl.replay.chunks.Chunks` of this length.

    Args:
      length: actions in a chunk.
      discount: the agent's gamma, of one step, as of `steps`.
      environments: ``N``, as of `rl.online.loop`.
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
        logged=chunks.sampler,
        returns=data.Returns(length, gamma, gamma if reward_discount is None else reward_discount, True),
    )


def check_logged(view: View, logged: Any) -> None:
    """Raises ValueError if logged data, where there are any, are returns that rows of the ``view`` are not.

    Both are in one batch, whose targets would be those of two discounts, or of two lengths of returns.
    """
    returns = getattr(logged, "returns", None) or _SINGLE_STEPS
    if logged is None or max(returns.steps, view.returns.steps) == 1:  # of one step, which is not discounted
        return
    if not np.allclose(dataclasses.astuple(returns), dataclasses.astuple(view.returns)):
        gammas = lambda r: f"discount={r.discount:g}, {r.within:g} within"
        kind = lambda r: f"{'chunks' if r.are_chunks else 'returns'} of {r.steps} steps ({gammas(r)})"
        raise ValueError(
            f"the logged data are {kind(returns)}, and the replay reads its rows as {kind(view.returns)}: make both "
            "alike (rl.replay.dataset.n_step, rl.replay.chunks.make; beside a td_lambda below 1, single steps)"
        )


def check_chunks(view: View, memory: ring.Ring) -> None:
    """Raises ValueError if some seed's memory, of an array [S, ...] of rings, holds no whole chunk of the ``view``.

    Batches would then be of chunks that a time limit has cut, which repeat their last action. Environments do not
    always say how long their episodes are, so that this is known only after some of them.
    """
    whole = jax.vmap(lambda one: ring.holds_whole(one, view.chunk, view.environments), (ring.STACKED,))
    if view.chunk > 1 and not jax.jit(whole)(memory).all():
        raise ValueError(
            f"none of the episodes that are remembered had {view.chunk} steps or terminated, so that there is no chunk "
            f"of {view.chunk} actions to learn from: take shorter chunks, or begin to learn later"
        )


def stacked_frames(
    depth: int, n: int = 1, discount: float | None = None, environments: int = 1, td_lambda: float = 1.0
) -> View:
    """Rows that hold the newest of the ``depth`` frames seen, stacked when they are read (`rl.replay.frames`).

    Args:
      depth: frames in each observation; before an episode's first frame they must be 0, as
        ``gymnasium.wrappers.FrameStackObservation(env, depth, padding_type="zero")`` has them.
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

    Raises:
      ValueError: ``logged`` is negative, or more than ``batch_size``.
    """
    _check_logged(logged, batch_size)

    def newest(memory: ring.Ring, key: Key, step: Array | int) -> Transition:
        del step
        batch = view.transitions(memory, view.draw(memory, key, batch_size - logged), key)
        return source.of_origin(batch, source.ONLINE)

    if not logged:
        return _without_priorities(learner, view, capacity, ring, newest, lambda log, rows: rows)
    sample = source.concatenated(view.logged(logged), newest)
    return _without_priorities(learner, view, capacity, ring, sample, lambda log, rows: (log, rows))


def relabelling(
    learner: Learner,
    view: View,
    capacity: int,
    batch_size: int,
    *,
    logged: int = 0,
    origin: int = source.LOGGED,
) -> Replay:
    """As `uniform`, except that episodes can join the logged data: those that succeeded, say (`Replay.relabel`).

    Rows of such episodes have the ``origin`` of demonstrations wherever they are drawn, by default that of logged data.
    The ``logged`` rows of a batch are drawn from both, uniformly over all their rows; their number stays as it is. CQN
    (Seo et al. 2024) and ARSQ (Liu et al. 2025) do so on RLBench.

    Args:
      learner, view, capacity, batch_size, logged: as in `uniform`.
      origin: what the learner takes for demonstrations (its ``demonstrations``).

    Raises:
      ValueError: the view is one of video frames, or of chunks; or ``logged`` is as `uniform` refuses it.
    """
    _check_logged(logged, batch_size)
    if view.chunk > 1:
        raise ValueError("demonstrations that join are drawn as single steps, not in chunks of actions")
    if view.lookahead:
        raise ValueError("steps kept as single video frames cannot join the demonstrations: keep whole steps")

    def marked(memory: demonstrations.Memory, slots: Array, key: Key) -> Transition:
        origins = jnp.where(demonstrations.is_marked(memory, slots), jnp.int32(origin), source.ONLINE)
        return view.transitions(memory.ring, slots, key)._replace(origin=origins)

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
    replay = _without_priorities(learner, view, capacity, demonstrations, sample, together)
    return replay._replace(relabel=demonstrations.mark)


def _check_logged(logged: int, batch_size: int) -> None:
    """Raises ValueError if a batch cannot have so many logged rows."""
    if not 0 <= logged <= batch_size:
        raise ValueError(
            f"logged={logged} must lie between 0 and batch_size={batch_size}: it is how many rows of a batch are logged"
        )


def _without_priorities(
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
        view=view,
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


def prioritised_memory(
    learner: Learner, view: View, capacity: int, batch_size: int, exponent: float, correction: float
) -> Replay:
    """The newest ``capacity`` steps, drawn in proportion to ``priority^exponent`` (Schaul et al. 2016).

    The priority of a step is how far it was from its target when it was last drawn, as ``learner.weighted`` says.

    Before the first update the memory must hold more than ``view.lookahead`` steps, as while none can be drawn the
    weights are NaN. Once it is full, all but ``view.lookahead + view.lookback`` of its steps can be drawn.

    Args:
      learner: whose updates are made; must know how to make ``weighted`` ones.
      view: of the steps.
      capacity: steps that are kept.
      batch_size: transitions in each update.
      exponent: 0 is uniform; 0.5 in Dopamine's Rainbow, where it is of the cross-entropy, from which the entropy of the
        target is taken here (`rl.values.heads.divergence`). With squared errors it is half of Schaul's alpha, which is
        of the absolute error.
      correction: beta, how far the bias of these draws is taken out of the updates; 0.5 there.

    Raises:
      ValueError: the learner makes no weighted updates, the view is one of chunks, ``exponent`` is below 0, or
        ``correction`` is outside of [0, 1].
    """
    if not exponent >= 0:
        raise ValueError(f"exponent={exponent} must be at least 0, which draws uniformly")
    require_share("correction", correction)
    if view.chunk > 1:
        raise ValueError(
            f"prioritised replay draws single steps, not chunks of {view.chunk} actions: keep chunks in uniform"
        )
    weighted = learner.weighted
    if weighted is None:
        raise ValueError(
            "this agent's updates cannot be weighted, as prioritised replay asks: choose dqn, arsq or cqn"
        )

    def update(carried: _Prioritised, drawn: tuple[ring.Ring, Key], key: Key) -> tuple[_Prioritised, Metrics]:
        memory = prioritised.Memory(drawn[0], carried.tree, carried.highest)
        slots = prioritised.draw(memory.tree, drawn[1], batch_size)
        batch = source.of_origin(view.transitions(memory.ring, slots, drawn[1]), source.ONLINE)
        # A priority that was negative or no number shows in the metrics of the next update: else nobody would see it.
        sound = jnp.isfinite(prioritised.total(memory.tree))
        weight = jnp.where(sound, prioritised.weights(memory, slots, correction), jnp.nan)
        state, metrics, priority = weighted(carried.state, batch, weight, key)
        priority = jnp.where(priority >= 0, priority, jnp.nan)
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
        view=view,
    )
