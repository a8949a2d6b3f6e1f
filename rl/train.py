"""The loop: many updates in one compiled call, many seeds and hyper-parameters in one program.

An epoch is ``steps`` updates under one `jax.lax.scan`: data, state and metrics stay on the device, and
nothing crosses to the host before it ends. The key of update ``t`` depends on the run's key and ``t`` alone
(`rl.keys`), so a run does not depend on how it is cut into epochs, and a resumed one continues bit for bit.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rl import acting, keys
from rl.replay.dataset import Dataset, Returns
from rl.replay.source import Configured, Source
from rl.types import Actor, Array, Key, Learner, Metrics, State, Transition

# Axes of a stacked state: one axis over seeds everywhere but in the step, which all share. With a shared
# step, `lax.cond` on it stays a branch under vmap, and delayed updates cost nothing when they are not due.
STACKED = State(params=0, target=0, optimiser=0, step=None)

NEVER = np.int32(np.iinfo(np.int32).max)  # the step of what did not happen
PATIENCE = 3.0  # seconds that Python has to stop by itself after a second Ctrl-C
_STOPS = (signal.SIGINT, signal.SIGTERM)

# Of any agent: some only clone, and some have such a head already.
AGAINST_DIVERGENCE = (
    "lower the learning rate, check the reward scale, or, where values have a scalar or quantile head, use one with a "
    "bounded support (--head=hl_gauss)"
)
_FROM_THE_START = (
    "nothing was learned before, so look at the data and at the spec: numbers that are not finite, a batch without "
    "rows, or actions that the spec does not have"
)


class Report(NamedTuple):
    """Metrics of one epoch. Leading axis [S] where seeds are stacked."""

    metrics: Metrics  # mean of each over the epoch
    bad_step: Mapping[str, Array]  # first step at which each was not finite, or `NEVER`
    measured: Mapping[str, Any] = {}  # of the state after it, as `epochs` was asked to


# The state of a learner, or a larger pytree with one in it.
Carried = TypeVar("Carried")
# (state, what batches are drawn from, key of the run or keys [S]) -> state after some updates, what to say of them
Epoch = Callable[[State, Any, Key], tuple[State, Report]]


class Diverged(ArithmeticError):
    """A metric stopped being finite."""


class Interrupted(RuntimeError):
    """The run was asked to stop, and its checkpoint is written."""


def scan_updates(
    update: Callable[[State, Transition, Key], tuple[State, Metrics]],
    sample: Source,
    steps: int,
) -> Callable[[State, Any, Key], tuple[State, Report]]:
    """``steps`` updates as one function of (state, dataset, key), to be jitted by the caller.

    Args:
      update: a learner's update.
      sample: draws one batch from the dataset: a source (`rl.replay.source`), told the number of the update.
      steps: updates per call.

    Raises:
      ValueError: ``sample`` is no source; or, when traced, an update that does not count itself, or a metric that is an
        array.
    """
    _check_source(sample)

    def epoch(state: State, dataset: Any, key: Key) -> tuple[State, Report]:
        run_key = keys.of(key, "update")

        @functools.partial(jax.jit, inline=True)  # traced once, for the names of the metrics and for the loop
        def one(state: State) -> tuple[State, Metrics]:
            sample_key, update_key = jax.random.split(jax.random.fold_in(run_key, state.step))
            after, metrics = update(state, sample(dataset, sample_key, state.step), update_key)
            if after.step is state.step:
                raise ValueError(
                    "update must return state._replace(step=state.step + 1): batches and keys are drawn by the step, "
                    "and with the one that it was given every update would draw the same"
                )
            # One that is compiled by itself returns another array of the same step: the loop counts in any case.
            count = lambda x: x._replace(step=state.step + 1) if _is_state(x) else x
            return jax.tree.map(count, after, is_leaf=_is_state), metrics

        shapes = {name: metric.shape for name, metric in jax.eval_shape(one, state)[1].items()}
        if arrays := {name: shape for name, shape in shapes.items() if shape}:
            raise ValueError(
                f"metrics are numbers, one for each update, and these are arrays, of shape: {arrays}"
            )
        names = sorted(shapes)

        def body(carry, count):
            state, mean, bad = carry
            step = state.step
            state, metrics = one(state)
            # One vector instead of a dozen scalars: a dozen times fewer kernels.
            values = jnp.array([metrics[name] for name in names], jnp.float32)
            bad = jnp.minimum(bad, jnp.where(jnp.isfinite(values), NEVER, step))
            return (state, mean + (values - mean) / count, bad), None  # a sum of 1e6 floats has 4 digits

        start = (state, jnp.zeros(len(names)), jnp.full(len(names), NEVER))
        counts = jnp.arange(1, steps + 1, dtype=jnp.float32)
        (state, mean, bad), _ = jax.lax.scan(body, start, counts)
        return state, Report(
            metrics={name: mean[i] for i, name in enumerate(names)},
            bad_step={name: bad[i] for i, name in enumerate(names)},
        )

    return epoch


def _check_source(sample: Source) -> None:
    """Raises ValueError for what cannot be called as a source is: what makes one, above all."""
    try:
        inspect.signature(sample).bind(None, None, None)
    except TypeError as error:
        raise ValueError(
            f"{getattr(sample, '__name__', sample)!r} does not draw a batch from (data, key, step) ({error}): give a "
            "source, as rl.replay.dataset.sampler(batch_size) returns one"
        ) from None


def member(stacked: Carried, index: Array | int) -> Carried:
    """One seed's part of a stacked state (`STACKED`), or of a pytree with one in it: [...] of arrays [S, ...].

    The step is that of all seeds. What the learner's functions take is such a state.

    Raises:
      IndexError: ``index`` is a number, and there are not so many seeds; one that is traced is not checked.
    """
    known = isinstance(index, int | np.integer)

    def of_seed(leaf: Array) -> Array:
        if known and not -len(leaf) <= index < len(leaf):  # JAX would take the nearest one
            raise IndexError(f"there is no seed {index} in a state of {len(leaf)} seeds: they count from 0")
        return leaf[index]

    def part(x: Any) -> Any:
        if _is_state(x):
            return jax.tree.map(of_seed, x._replace(step=None))._replace(step=x.step)
        return of_seed(x)

    return jax.tree.map(part, stacked, is_leaf=_is_state)


def in_turn(epoch: Callable[..., tuple[Carried, Report]]) -> Callable[..., tuple[Carried, Report]]:
    """An epoch of one seed as one of all, one after another, in place: no seed's arrays exist twice.

    Args:
      epoch: (a state or a pytree with one in it, further arguments) -> the same after it, and its report.

    Returns:
      The same of stacked states (`STACKED`) and of arguments [S, ...], of which there is at least one.
    """

    def run(stacked: Carried, *arguments: Any) -> tuple[Carried, Report]:
        def one(before: Carried, place: tuple[Any, ...]) -> tuple[Carried, Report]:
            index, *inputs = place
            # All start at the step that they share, which those before have counted on.
            start = jax.tree.map(_with_step, member(before, index), stacked, is_leaf=_is_state)
            trained, report = epoch(start, *inputs)
            put = lambda x, new: _put(x, index, new)
            return jax.tree.map(put, before, trained, is_leaf=_is_state), report

        count = jax.tree.leaves(arguments)[0].shape[0]
        return jax.lax.scan(one, stacked, (jnp.arange(count), *arguments))

    return run


def _is_state(x: Any) -> bool:
    return isinstance(x, State)


def _with_step(x: Any, like: Any) -> Any:
    """A state with the step of another; all else as it is."""
    return x._replace(step=like.step) if _is_state(x) else x


def _put(stacked: Any, index: Array, one: Any) -> Any:
    """``stacked`` with one seed's part in place of its own, and its step."""
    if not _is_state(stacked):
        return stacked.at[index].set(one)
    put = lambda x, new: x.at[index].set(new)
    return jax.tree.map(put, stacked._replace(step=None), one._replace(step=None))._replace(step=one.step)


class Population(NamedTuple):
    """A learner stacked over ``S`` seeds (and hyper-parameters), on one shared dataset."""

    init: Callable[[Key, Transition], State]  # keys [S], one example batch -> stacked state
    epoch: Callable[[State, Dataset, Key], tuple[State, Report]]  # stacked state, dataset, keys [S]
    act: Callable[[State, Array, Key], Array]  # stacked state, observations [S, ...], keys [S]
    actor: Actor  # the same with memory, for learners that have one; empty memory for the others
    # stacked state, observations [S, ...], actions [S, ...] -> what each of E critics says of them, [S, E, ...]
    critics: Callable[[State, Any, Array], Array]


def population(
    make: Callable[[Any], Learner],
    config: Any,
    sample: Source,
    steps: int,
    *,
    sweep: Mapping[str, Any] | None = None,
    batched: bool = True,
) -> Population:
    """Learners that differ in seed and, if ``sweep`` is given, in hyper-parameters, as one program.

    Args:
      make: builds the learner of one config.
      config: the frozen dataclass that all share.
      sample: draws a batch.
      steps: updates per epoch.
      sweep: {field of config: [S] values}; fields that only enter the arithmetic (floats) can be swept,
        those that decide the program's structure (layers, ensemble sizes, switches) cannot.
      batched: whether seeds advance together, each array operation on all of them, as accelerators and meshes
        want it. False trains one after another inside the same program, which is faster on a CPU: one seed's
        products keep its cores busy, and its parameters stay in cache.

    Raises:
      ValueError: no update per epoch; a field that is unknown or no float, lists of different lengths, a value of 0, or
        one that the config refuses;
        a source that draws by other settings than the agent's (its discount, say), or by one that is swept; from
        ``init`` and ``epoch``, if keys are not one for each run; from ``epoch``, data made with another discount
        (`rl.replay.dataset.n_step`, chunks).
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: updates per epoch, at least 1")
    check_sweep(sweep or {})
    hypers = {name: jnp.asarray(values) for name, values in (sweep or {}).items()}
    for name in hypers:
        check_field(config, name)
    _check_values(config, sweep or {})
    if isinstance(sample, Configured):
        _check_settings(config, hypers, dict(sample.settings), "the source draws")

    def learner(hyper: Mapping[str, Array]) -> Learner:
        return make(dataclasses.replace(config, **hyper))

    def check(run_keys: Key) -> None:
        runs = keys.count(run_keys)
        for name, values in hypers.items():
            if len(values) != runs:
                raise ValueError(
                    f"a sweep of {name} over {len(values)} values with {runs} keys: each run has one value and one "
                    "key; for several seeds of each value, repeat the values, once for each key"
                )

    def init(run_keys: Key, batch: Transition) -> State:
        check(run_keys)
        init_keys = keys.of(run_keys, "init")
        return jax.vmap(lambda key, h: learner(h).init(key, batch), out_axes=STACKED)(init_keys, hypers)

    def epoch(state: State, dataset: Dataset, run_keys: Key) -> tuple[State, Report]:
        check(run_keys)
        for returns in jax.tree.leaves(dataset, is_leaf=_are_returns):
            if _are_returns(returns):
                _check_settings(config, hypers, _settings(returns, config), "the data hold returns made")

        def one(state: State, key: Key, hyper: Mapping[str, Array]) -> tuple[State, Report]:
            return scan_updates(learner(hyper).update, sample, steps)(state, dataset, key)

        if batched:
            return jax.vmap(one, (STACKED, 0, 0), (STACKED, 0), spmd_axis_name="seed")(
                state, run_keys, hypers
            )

        return in_turn(one)(state, run_keys, hypers)

    def over_seeds(part: Callable[[Learner], Callable[..., Any]]) -> Callable[..., Any]:
        """A function of a learner for all seeds, each with its hyper-parameters: `arsq` acts by a temperature, say."""

        def call(state: State, *arguments: Any) -> Any:
            one = lambda hyper, state, *arguments: part(learner(hyper))(state, *arguments)
            return jax.vmap(one, (0, STACKED, *(0 for _ in arguments)))(hypers, state, *arguments)

        return jax.jit(call)

    actor = Actor(over_seeds(lambda x: acting.actor(x).start), over_seeds(lambda x: acting.actor(x).act))
    # Compiled, because an initialiser or a policy alone is dozens of operations, each of which would be a program.
    return Population(jax.jit(init), epoch, over_seeds(lambda x: x.act), actor, over_seeds(acting.critics))


def can_be_swept(config: Any, name: str) -> bool:
    """Whether runs that differ in this field of a config can be one program: a float, or one that may be None."""
    value = getattr(config, name, None)
    return isinstance(value, float | np.floating) or (value is None and "float" in _declared(config, name))


def _declared(config: Any, name: str) -> str:
    """The type of a field, as it is written."""
    return {field.name: str(field.type) for field in dataclasses.fields(config)}.get(name, "")


def check_field(config: Any, name: str) -> None:
    """Raises ValueError if a field of the config cannot be swept in one program."""
    if can_be_swept(config, name):
        return
    value = getattr(config, name, None)
    declared = _declared(config, name)
    whole = (
        f", and its value is the int {value}: write {value}.0"
        if type(value) is int and "float" in declared
        else ""
    )
    raise ValueError(f"cannot sweep {name!r} in one program: only float fields of the config can be{whole}")


def _are_returns(x: Any) -> bool:
    return isinstance(x, Returns)


def _settings(returns: Returns, config: Any) -> dict[str, float]:
    """The agent's settings that data over several steps were made with; rewards within chunks may have their own."""
    if returns.steps == 1:  # in which nothing is discounted
        return {}
    settings, own = {"discount": returns.discount}, returns.within != returns.discount
    if hasattr(config, "chunk_discount") and (returns.are_chunks or own):
        return settings | {"chunk_discount": returns.within}
    if own:
        raise ValueError(
            f"the data hold rewards that are discounted by {returns.within:g} within their steps, and the agent has "
            f"one discount: make them with discount={returns.discount:g} alone"
        )
    return settings


def _check_settings(config: Any, swept: Container[str], given: Mapping[str, Any], batches: str) -> None:
    """Raises ValueError if ``batches`` depend on other settings than an agent's, or on one where it has several."""
    for name, value in given.items():
        if name in swept:
            raise ValueError(
                f"a sweep of {name}: {batches} with {name}={value} for all runs: train every value as a run of its own"
            )
        *within, field = name.split(".")
        owner = functools.reduce(lambda x, part: getattr(x, part, None), within, config)
        expected = getattr(owner, field, value)
        if expected != value:
            raise ValueError(
                f"{batches} with {name}={value}, and the agent has {name}={expected}: give both the same"
            )


def _check_values(config: Any, sweep: Mapping[str, Any]) -> None:
    """Raises what the config says of values that it refuses: in the program they are traced, and it cannot see them."""
    known = {name: values for name, values in sweep.items() if not isinstance(values, jax.core.Tracer)}
    for values in zip(*(np.asarray(column).tolist() for column in known.values()), strict=True):
        dataclasses.replace(config, **dict(zip(known, map(float, values), strict=True)))


def check_sweep(sweep: Mapping[str, Any]) -> None:
    """Raises ValueError for {field: values} that cannot be trained in one program; traced values are not looked at."""
    known = {name: values for name, values in sweep.items() if not isinstance(values, jax.core.Tracer)}
    for name, values in known.items():
        if np.ndim(values) != 1 or np.asarray(values).dtype.kind not in "iuf":
            raise ValueError(f"a sweep of {name} needs a list of numbers, one for each run, not {values!r}")
    columns = {name: np.asarray(values).tolist() for name, values in known.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError(f"the fields of a sweep need equally many values: {columns}")
    for name, column in columns.items():
        if 0 in column:
            raise ValueError(
                f"a sweep of {name} over {column}: 0 may switch a term off, which one program cannot do for some of "
                "its runs; train 0 as a run of its own, as sweeps/run.py does"
            )


def epochs(
    epoch: Callable[[Carried, Any, Key], tuple[Carried, Report]],
    state: Carried,
    dataset: Any,
    run_keys: Key,
    count: int,
    measure: Callable[[Carried], Mapping[str, Any]] = lambda state: {},
    *,
    ahead: bool = True,
) -> Iterator[tuple[Carried, Report]]:
    """Runs ``count`` epochs and yields the state after each, with its report.

    While the caller evaluates, logs and saves what was yielded, the next epoch already runs on the device, which holds
    the state twice. What the device itself is to compute of a state would wait there for the end of that epoch, and all
    that follows with it: ``measure`` comes before.

    Args:
      epoch: as from `population`; compiled here, once, with its state donated.
      state: where to start; consumed.
      dataset: arrays, shared by all epochs; those of NumPy are copied to the device once, before the first.
      run_keys: [S] keys of the run, not of the epoch.
      count: how many.
      measure: what is computed of each state, for its report; it must not keep it, as the next epoch consumes it.
      ahead: False for models that fill the device: the next epoch begins when the caller asks for it, and consumes the
        state that was yielded.

    Raises:
      Diverged: after an epoch in which a metric was not finite; says which, when, and for which seeds.
    """
    compiled = jax.jit(epoch, donate_argnums=0)
    # Arrays of JAX stay as they are: `jax.device_put` refuses those that lie on the devices of several hosts.
    dataset = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), dataset)
    for remaining in range(count, 0, -1):
        if remaining == count or not ahead:
            state, report = compiled(state, dataset, run_keys)
        finished = state
        finished_report = report._replace(measured=jax.device_get(measure(state)))
        if ahead and remaining > 1:
            # The epoch that is about to start consumes its input: the caller gets a copy.
            finished = jax.tree.map(jnp.copy, state)
            state, report = compiled(state, dataset, run_keys)
            if jax.process_count() > 1 and jax.default_backend() == "cpu":
                # CPUs start programs in any order: on one host what the caller gathers could wait for the other
                # host, which is in the next epoch and waits for the first.
                jax.block_until_ready(state)
        check_finite(finished_report)
        yield finished, finished_report


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, so that the epoch in flight ends and is saved; a second Ctrl-C stops at once.

    Yields the list of signals received, empty while there is none. Elsewhere than in the main thread, where
    Python allows no handlers, nothing is collected.

    While a compiled program runs, or is compiled, Python calls no handler. So a thread answers each signal. Where
    Python has not done so within `PATIENCE` seconds of the second Ctrl-C, it ends the process; in a notebook or a
    prompt it does not, as all that is in memory would be lost.
    """
    received: list[int] = []
    answers = _Answers()

    def remember(number: int, _: Any) -> None:
        answers.handled += 1
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=answers.serve, args=(reader,), daemon=True).start()
    before = {number: signal.signal(number, remember) for number in _STOPS}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield received
    finally:
        answers.ended.set()
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, by KeyboardInterrupt; in the main thread, where Python allows handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Answers:
    """What `stop_requests` says of signals, from a thread that hears of them at once."""

    def __init__(self) -> None:
        self.handled = 0  # how many Python's own handler has had
        self.ended = threading.Event()

    def serve(self, reader: socket.socket) -> None:
        """Answers each signal, a byte, until the other end is closed."""
        count = 0
        with reader:
            while number := reader.recv(1):
                if number[0] not in _STOPS:
                    continue
                count += 1
                if count == 1:
                    text = "\nstopping after this epoch; Ctrl-C again stops at once and loses it"
                    print(text, file=sys.stderr, flush=True)
                elif number[0] == signal.SIGINT and not self.ended.wait(PATIENCE) and self.handled < count:
                    if hasattr(builtins, "__IPYTHON__") or hasattr(sys, "ps1"):
                        print(
                            "stopping as soon as the program that runs has ended", file=sys.stderr, flush=True
                        )
                    else:
                        print("stopped", file=sys.stderr, flush=True)
                        os._exit(128 + signal.SIGINT)


def _be_deaf() -> None:
    """In a forked process, which has inherited the other end: its signals are none of its parent's."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_be_deaf)


def check_finite(report: Report) -> None:
    """Raises `Diverged` if any metric was not finite, naming the first step, the metrics and the seeds.

    Before its first update nothing has grown yet: then data or the spec are named as the likely cause.
    """
    bad = {name: np.atleast_1d(np.asarray(steps)) for name, steps in report.bad_step.items()}
    first = min((int(steps.min()) for steps in bad.values()), default=NEVER)
    if first == NEVER:
        return
    names = sorted(name for name, steps in bad.items() if steps.min() == first)
    seeds = sorted({int(s) for steps in bad.values() for s in np.flatnonzero(steps != NEVER)})
    remedy = AGAINST_DIVERGENCE if first else _FROM_THE_START
    raise Diverged(f"{', '.join(names)} not finite at update {first} (seeds {seeds}): {remedy}")
