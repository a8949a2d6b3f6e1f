"""What is timed, and how: an agent in each loop, the matrix products of its update, and its peers.

Nothing here knows flags, files or tables.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import kernels, peers, products, timing
from experiments import common
from rl import train
from rl.replay import chunks, goals
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.goals import GoalBatch, Goals, Hindsight, Trajectories
from rl.replay.source import Source
from rl.types import Key, Learner, Metrics, Spec, State, Transition
from rl.values import heads
from rl.values.heads import ValueHead

LOOPS = ("scan", "host", "act")
LIMIT = "products"
ACT = "act"
ENVIRONMENTS = (1, 64)  # that are acted in at once

SPEC = Spec((17,), 6)  # halfcheetah's
ENTITIES = (4, 15)  # observations of an arm and three cubes as a set (`rl.envs.entities`)
EPISODE = 1000  # its steps
SUPPORT = -100.0, 100.0  # of value heads that have one

# Where nobody says how many, a call does as many updates as take the products alone this long.
SECONDS = 1.0
MOST = 0.8  # of the memory that a program may take: the rest is for the data and for what runs beside it


class Subject(NamedTuple):
    """What is trained."""

    agent: ModuleType
    config: Any
    head: ValueHead
    chunk: int = 1  # actions in each decision
    shape: tuple[int, ...] = (17,)  # of observations; halfcheetah's


class Case(NamedTuple):
    """One row of the table, compiled and ready to be timed; without updates, one that was left out."""

    loop: str
    seeds: int
    updates: int  # per call, of every seed
    call: Callable[[], Any]  # its work is done when it returns
    facts: dict[str, Any]  # what is known without timing it
    traces: list[None]  # as long as JAX has traced its program often


def subject(agent: ModuleType, config: Any = None, head: ValueHead | None = None, **others: Any) -> Subject:
    """An agent with its default hyper-parameters and a scalar head, but for what is given; others are fields."""
    return Subject(
        agent,
        agent.Config() if config is None else config,
        heads.scalar() if head is None else head,
        **others,
    )


def synthetic(transitions: int, shape: tuple[int, ...] = SPEC.observation_shape) -> Dataset:
    """Random steps in episodes of 1000, as NumPy arrays: an update takes as long on them as on real ones."""
    rng = np.random.default_rng(0)
    observation = rng.standard_normal((transitions, *shape), np.float32)
    action = rng.uniform(-1, 1, (transitions, SPEC.action_size)).astype(np.float32)
    last = np.arange(1, transitions + 1) % EPISODE == 0
    last[-1] = True
    steps = Transition(
        observation=observation,
        action=action,
        reward=rng.standard_normal(transitions, np.float32),
        discount=np.ones(transitions, np.float32),
        next_observation=np.roll(observation, -1, 0),
        next_action=np.roll(action, -1, 0),
        has_next_action=np.float32(~last),
    )
    return Dataset(steps, last)


def logged(subject: Subject, dataset: Dataset) -> Any:
    """What an agent's batches are drawn from: trajectories where it learns to reach goals, or chunks of actions."""
    hindsight = _hindsight(subject)
    if hindsight:
        return goals.trajectories(dataset, hindsight)
    if subject.chunk > 1:
        return chunks.make(dataset, subject.chunk, *common.discounts(subject.config))
    return dataset


def limit(subject: Subject, seeds: int, batch_size: int, updates: int) -> Case:
    """The matrix products of ``updates`` updates, and nothing else.

    With ``updates`` 0 they are as many as take about `SECONDS`. A policy that moves on every ``policy_delay``-th
    update alone has its products there alone, and ``updates`` become a multiple of that.
    Where seeds take turns (`_population`), so do the products of one: those of all at once would hold the operands of
    all, which no loop does.
    """
    turns = 1 if _batched() else seeds
    population = _population(subject, batch_size, 1)
    keys = jax.random.split(jax.random.key(0), seeds // turns)
    dataset = logged(subject, synthetic(EPISODE, subject.shape))
    state = jax.eval_shape(population.init, keys, _example(subject))
    period = getattr(subject.config, "policy_delay", 1)
    branches = [min] * (period - 1) + [max]
    each = [products.find(population.epoch, state, dataset, keys, branch=branch) for branch in branches]
    matmuls = list(itertools.chain.from_iterable(each))  # of ``period`` updates
    operands = products.operands(matmuls, jax.random.key(0))
    if updates:
        periods = -(-updates // period)
    else:
        once = jax.jit(products.program(matmuls, turns))
        periods = _fitting(lambda: jax.block_until_ready(once(operands)))
    program, traces = _traced(products.program(matmuls, periods * turns))
    facts = {
        **_compile(program, operands),
        "flops_per_update": turns * products.flops(matmuls) / period,
        "products": len(matmuls) / period,
    }
    return Case(
        LIMIT, seeds, periods * period, lambda: jax.block_until_ready(program(operands)), facts, traces
    )


def scan(subject: Subject, seeds: int, batch_size: int, updates: int, dataset: Any) -> Case:
    """Epochs of ``updates`` updates as `rl.train.population` compiles them, on what is `logged`, on the device."""
    population = _population(subject, batch_size, updates)
    keys = jax.random.split(jax.random.key(0), seeds)
    state = jax.jit(population.init)(keys, _example(subject))
    program, traces = _traced(population.epoch, donate_argnums=0)
    facts = _compile(program, state, dataset, keys)
    facts["data_bytes"] = facts["argument_bytes"] - _nbytes(state) - _nbytes(jax.random.key_data(keys))

    def call() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(program(state, dataset, keys))

    return Case("scan", seeds, updates, call, facts, traces)


def host(subject: Subject, seeds: int, batch_size: int, most: int, dataset: Any) -> Case:
    """One compiled update per Python call, on batches that NumPy samples; at most ``most`` updates per call."""
    learner = _learner(subject)
    state, keys = _start(subject, seeds)
    program, traces = _traced(_update(learner, seeds), donate_argnums=0)
    sample = sampler_on_host(subject, _rows(seeds, batch_size), dataset)
    facts = _compile(program, state, sample(), keys)

    def update() -> State:
        nonlocal state
        state, _ = program(state, sample(), keys)
        return state

    updates = min(most, _fitting(lambda: jax.block_until_ready(update())))

    def call() -> None:
        for _ in range(updates):
            update()
        jax.block_until_ready(state)

    return Case("host", seeds, updates, call, facts | {"data_bytes": _nbytes(dataset)}, traces)


def sampler_on_host(
    subject: Subject, shape: tuple[int, ...], dataset: Any
) -> Callable[[], Transition | GoalBatch]:
    """Batches of this shape that NumPy draws from what is `logged`."""
    rng, hindsight = np.random.default_rng(0), _hindsight(subject)

    def sample() -> Transition | GoalBatch:
        if hindsight:
            return goals_on_host(dataset, hindsight, _discount(subject), rng, shape)
        if subject.chunk > 1:
            return chunks_on_host(dataset, rng.choice(dataset.starts, shape), subject.chunk)
        return replay.take(dataset, rng.integers(0, replay.size(dataset), shape))

    return sample


def chunks_on_host(data: chunks.Chunks, rows: np.ndarray, length: int) -> Transition:
    """`rl.replay.chunks.take` in NumPy."""
    steps = jax.tree.map(lambda x: x[rows], data.steps)
    last = data.last[rows][..., None]

    def actions(start: np.ndarray) -> np.ndarray:
        place = np.minimum(start[..., None] + np.arange(length), last)
        return data.steps.action[place].reshape(*rows.shape, -1)

    action, known = actions(rows), steps.has_next_action[..., None] > 0
    return steps._replace(action=action, next_action=np.where(known, actions(rows + length), action))


def goals_on_host(
    data: Trajectories,
    hindsight: Hindsight,
    discount: float,
    rng: np.random.Generator,
    shape: tuple[int, ...],
) -> GoalBatch:
    """A batch of goals, drawn by NumPy as OGBench's own code draws it, or by HECRL's convention (``next_state``)."""
    size, steps = len(data.end), data.transitions
    states, nearest = (steps.next_observation, 0) if hindsight.next_state else (steps.observation, 1)
    row = rng.integers(0, size, shape)
    end = data.end[row]

    def draw(kinds: Goals) -> tuple[np.ndarray, np.ndarray]:
        """Rows of goals, and which may be of any episode."""
        if kinds.geometric:
            future = np.minimum(row + rng.geometric(1 - discount, shape) - 1 + nearest, end)
        else:
            first, share = np.minimum(row + nearest, end), rng.random(shape)
            future = np.rint(first * share + end * (1 - share)).astype(int)
        kind, anywhere = rng.random(shape), rng.integers(0, size, shape)
        drawn = np.where(kind < kinds.current, row, np.where(kind < 1 - kinds.random, future, anywhere))
        return drawn, kind >= 1 - kinds.random

    (value, _), (actor, random) = draw(hindsight.value), draw(hindsight.actor)
    reached = (row == value).astype(np.float32)
    batch = jax.tree.map(lambda x: x[row], steps)
    goal = states[value]
    relabelled = batch._replace(
        observation=goals.conditioned(batch.observation, goal),
        next_observation=goals.conditioned(batch.next_observation, goal),
        reward=reached - 1 if hindsight.negative else reached,
        discount=1 - reached if hindsight.mask else np.ones_like(reached),
    )
    if not hindsight.subgoal_steps:
        return GoalBatch(relabelled, states[actor])
    ahead = np.minimum(row + hindsight.subgoal_steps - 1 + nearest, end)
    way = np.where(random, ahead, np.minimum(ahead, actor))
    return GoalBatch(relabelled, *(states[rows] for rows in (actor, ahead, way)))


def act(subject: Subject, environments: int) -> Case:
    """Actions of one seed in ``environments``: NumPy observations in, NumPy actions out, one compiled call each."""
    learner = _learner(subject)
    state, key = _start(subject, 1)
    program, traces = _traced(learner.act)
    seen = synthetic(environments, subject.shape).transitions.observation
    if _hindsight(subject):
        seen = goals.conditioned(seen, seen)
    facts = {"environments": environments, **_compile(program, state, seen, key)}
    once = lambda: np.asarray(program(state, seen, key))
    calls = _fitting(once)

    def call() -> None:
        for _ in range(calls):
            once()

    return Case(ACT, 1, calls, call, facts, traces)


def torch(
    transcribed: ModuleType, name: str, subject: Subject, batch_size: int, most: int, dataset: Dataset
) -> Case:
    """The agent's update in PyTorch; at most ``most`` updates per call.

    Args:
      transcribed: where its update is: `benchmarks.coarse_peer` or `benchmarks.proposals_peer`.
      name: the agent's name there.
      subject: the agent.
      batch_size: rows of an update.
      most: updates.
      dataset: of single steps.
    """
    sample = sampler_on_host(subject, (batch_size,), logged(subject, dataset))
    update = transcribed.updates(name, subject.config, subject.head.size, SUPPORT, _spec(subject), sample)
    times = min(most, _fitting(update))

    def call() -> None:
        for _ in range(times):
            update()

    return Case("torch", 1, times, call, {}, [])


def peer(name: str, hidden: Sequence[int], batch_size: int, most: int, data: Any) -> list[Case]:
    """The agent called ``name`` in d3rlpy, on ``data`` from `peers.buffer`; at most ``most`` updates per call."""

    def repeated(update: Callable[[], Any], times: int) -> None:
        for _ in range(times):
            update()

    cases = []
    for loop, update in peers.updates(name, hidden, batch_size, data).items():
        times = min(most, _fitting(update))
        cases.append(Case(loop, 1, times, functools.partial(repeated, update, times), {}, []))
    return cases


def unless_too_large(loop: str, seeds: int, make: Callable[[], Case]) -> Case:
    """What ``make`` makes, or a case without updates whose fact ``left_out`` says how much memory it needs."""
    try:
        return make()
    except MemoryError as error:
        return Case(loop, seeds, 0, lambda: None, {"left_out": str(error)}, [])


def measure(
    cases: Sequence[Case], rounds: int, finished: Callable[[int], Any], profile: bool = False
) -> list[dict[str, Any]]:
    """Times every case once per round, so that what slows the machine slows all of them; one row for each.

    Args:
      cases: `limit` first; those without updates are not timed.
      rounds: how many.
      finished: is told of every finished round (the first, which warms up, included) by the number 1.
      profile: call each once more for its kernels (`benchmarks.kernels`), where there is a GPU.
    """
    traced: list[int] = []

    def after(number: int, _: timing.Seconds) -> None:
        if not number:
            traced.extend(len(case.traces) for case in cases)
        finished(1)

    measured = timing.measure([case.call for case in cases], rounds, after)
    times = [
        [x / max(case.updates, 1) for x in seconds] for case, seconds in zip(cases, measured, strict=True)
    ]
    rows = []
    for case, seconds, before in zip(cases, times, traced, strict=True):
        if not case.updates:
            rows.append({"loop": case.loop, "seeds": case.seeds, "retraces": 0, **case.facts})
            continue
        shares = [limit / elapsed for limit, elapsed in zip(times[0], seconds, strict=True)]
        rows.append(
            {
                "loop": case.loop,
                "seeds": case.seeds,
                "updates_per_call": case.updates,
                "seconds_per_update": seconds,
                "updates_per_second": case.seeds / statistics.median(seconds),
                "of_limit": statistics.median(shares) * case.seeds / cases[0].seeds,
                "retraces": len(case.traces) - before,
                **case.facts,
            }
        )
        if case.loop == ACT:  # what is repeated is no update
            rows[-1]["seconds_per_call"] = rows[-1].pop("seconds_per_update")
            del rows[-1]["of_limit"], rows[-1]["updates_per_second"]
        elif case.traces:
            rows[-1]["flops_per_update"] = cases[0].facts["flops_per_update"]
            if profile and (ran := kernels.profile(case.call, case.updates)):
                rows[-1]["profile"] = ran
    return rows


def _hindsight(subject: Subject) -> Hindsight | None:
    return getattr(subject.config, "goals", None)


def _discount(subject: Subject) -> float:
    return getattr(subject.config, "discount", 0.99)


def _spec(subject: Subject) -> Spec:
    spec = SPEC._replace(observation_shape=subject.shape)
    return goals.conditioned_spec(spec) if _hindsight(subject) else chunks.spec(spec, subject.chunk)


def _learner(subject: Subject) -> Learner:
    return subject.agent.make(subject.config, _spec(subject), subject.head)


def _source(subject: Subject, batch_size: int) -> Source:
    hindsight = _hindsight(subject)
    if hindsight:
        return goals.sampler(batch_size, hindsight, _discount(subject))
    if subject.chunk > 1:
        return chunks.sampler(batch_size)
    return replay.sampler(batch_size)


def _example(subject: Subject) -> Transition | GoalBatch:
    """A batch of two rows."""
    data, source = logged(subject, synthetic(EPISODE, subject.shape)), _source(subject, 2)
    return jax.device_get(jax.jit(source)(data, jax.random.key(0), 0))


def _population(subject: Subject, batch_size: int, steps: int) -> train.Population:
    make = lambda config: _learner(subject._replace(config=config))
    return train.population(make, subject.config, _source(subject, batch_size), steps, batched=_batched())


def _batched() -> bool:
    """Whether seeds are updated together, as in experiments.offline; on a CPU they take turns."""
    return jax.default_backend() != "cpu"


def _rows(seeds: int, batch_size: int) -> tuple[int, ...]:
    """Leading axes of a batch; one seed has none of its own."""
    return (batch_size,) if seeds == 1 else (seeds, batch_size)


def _start(subject: Subject, seeds: int) -> tuple[State, Key]:
    learner = _learner(subject)
    example, key = _example(subject), jax.random.key(0)
    if seeds == 1:
        return jax.jit(learner.init)(key, example), key
    keys = jax.random.split(key, seeds)
    return jax.jit(jax.vmap(learner.init, (0, None), train.STACKED))(keys, example), keys


def _update(learner: Learner, seeds: int) -> Callable[[State, Transition, Key], tuple[State, Metrics]]:
    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        return learner.update(state, batch, jax.random.fold_in(key, state.step))

    return update if seeds == 1 else jax.vmap(update, (train.STACKED, 0, 0), (train.STACKED, 0))


def _traced(function: Callable[..., Any], **options: Any) -> tuple[Any, list[None]]:
    """The jitted function, and a list that grows by one whenever JAX traces it."""
    traces: list[None] = []

    def traced(*arguments: Any) -> Any:
        traces.append(None)  # Python comes by here while tracing only
        return function(*arguments)

    return jax.jit(traced, **options), traces


def _compile(program: Any, *arguments: Any) -> dict[str, Any]:
    """Compiles for these arguments; the time it took, tracing included, and the program's memory.

    Raises:
      MemoryError: with what JAX holds already, the program needs more than `MOST` of it.
    """
    start = time.perf_counter()
    compiled = program.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    # A donated argument and the result that takes its place are the same bytes.
    peak = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    # Its arguments, and what the other loops are timed with.
    held = sum(array.nbytes for array in jax.live_arrays())
    needed = peak - memory.argument_size_in_bytes
    if held + needed > MOST * _memory():
        raise MemoryError(
            f"its program needs {needed / 1e9:.1f} GB beside {held / 1e9:.1f} GB, of {_memory() / 1e9:.1f} GB"
        )
    return {
        "compile_seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak,
    }


def _memory() -> int:
    """Bytes of the accelerator, or of the machine where it is the CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fitting(once: Callable[[], Any]) -> int:
    """How often ``once`` can be called in `SECONDS`, but at least once."""
    once()
    start = time.perf_counter()
    once()
    return max(1, int(SECONDS / (time.perf_counter() - start)))


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
