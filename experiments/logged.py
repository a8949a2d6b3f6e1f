"""What scripts share that learn from logged data alone: settings, seeds and sweeps, held-out losses, the loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from experiments import checks, common
from rl import acting, keys, shard, train
from rl.data import Loaded
from rl.lifecycle import Session, Start
from rl.replay import images
from rl.replay.source import Source
from rl.settings import require_at_least_one
from rl.types import Actor, Key, Learner, Metrics, State

# Settings that another checkpoint in the same folder must agree on.
IDENTITY = (
    *("dataset", "environment", "clip_actions", "head", "head_size", "seeds", "seed"),
    *("eval_every", "eval_episodes", "batch_size"),
)

_VALIDATION = 10  # batches of held-out data


@dataclasses.dataclass(frozen=True)
class Settings(common.Data, common.Head, common.Folder):
    """Settings: what is learned from what, how long, and how often that is evaluated."""

    agent: str = "iql"  # which agent learns
    preset: str = "none"  # published settings: paper or none; offline also ogbench-fql or ogbench-qc
    seeds: int = 4  # seeds trained at once, sharing one copy of the data
    seed: int = 0  # the run's own seed: another value gives other seeds
    updates: int = 100_000  # gradient steps of each seed, a multiple of --eval_every
    eval_every: int = 10_000  # updates per compiled epoch; evaluation, log and checkpoint follow each
    eval_episodes: int = 20  # episodes per seed and evaluation, at least 2; 0 trains without an environment
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none
    batch_size: int = 256  # transitions per update
    validation: bool = True  # log losses on held-out data, too, where there are any (OGBench's -val.npz)
    mesh_seed: int = 1  # devices over which seeds are spread
    mesh_data: int = -1  # devices over which each batch is split; -1: all that are left
    split_data: bool = False  # each device of --mesh_data holds a part of the log (experiments.offline alone)


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    require_at_least_one(settings, "seeds", "updates", "eval_every", "batch_size", prefix="--")
    checks.not_negative(settings, "seed")
    checks.several_episodes(settings, none=True)
    checks.multiple(settings, "updates", "eval_every")
    checks.head(settings)


def floats(sweep: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """A sweep as {field: values}.

    Raises:
      ValueError: values that cannot be trained together.
    """
    values = {name: [float(x) for x in column] for name, column in (sweep or {}).items()}
    train.check_sweep(values)
    return values


def variants(config: Any, sweep: Mapping[str, Sequence[float]]) -> list[Any]:
    """The hyper-parameters of every run of a sweep.

    Raises:
      ValueError: a field that cannot be swept.
    """
    for name in sweep:
        train.check_field(config, name)
    return [dataclasses.replace(config, **values) for values in parameters(sweep) or ({},)]


def parameters(sweep: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], ...]:
    """What tells the runs of a sweep apart, as `rl.run_folder.Run` takes it; nothing without a sweep."""
    columns = sweep.values()
    return tuple(dict(zip(sweep, row, strict=True)) for row in zip(*columns, strict=True))


def population(
    settings: Settings,
    config: Any,
    sweep: Mapping[str, Sequence[float]],
    make: Callable[[Any], Learner],
    sample: Source,
    mesh: jax.sharding.Mesh,
) -> tuple[train.Population, Key]:
    """All variants times all seeds as one population, and their keys.

    With ``split_data`` each device draws single steps from its own part of the data, and ``sample`` is not used.

    Raises:
      ValueError: a sweep of what does nothing beside the other settings.
    """
    unread = [common.unread(settings, variant) for variant in variants(config, sweep)]
    for name in sweep:
        if all(name in of_run for of_run in unread):
            raise ValueError(
                f"a sweep of {name}: it changes nothing, so that its runs would be the same: {unread[0][name]}"
            )
    runs = train.population(
        make,
        config,
        shard.sharded_sampler(settings.batch_size, mesh)
        if settings.split_data
        else shard.data_parallel(sample, mesh),
        settings.eval_every,
        sweep={
            name: np.repeat(np.asarray(values, np.float32), settings.seeds) for name, values in sweep.items()
        },
        batched=mesh.size > 1 or jax.default_backend() != "cpu",
    )
    count = max((len(values) for values in sweep.values()), default=1)
    return runs, run_keys(settings.seed, settings.seeds, count)


def run_keys(seed: int, seeds: int, variants: int) -> Key:
    """[V * S] keys: seed i has the same in every variant, and however many seeds run beside it."""
    return keys.seeds(jax.random.key(seed), seeds)[np.tile(np.arange(seeds), variants)]


def _placed(settings: Settings, data: Any, mesh: jax.sharding.Mesh) -> Any:
    """The data on the devices: all of them on each, every image once, or a part."""
    if settings.split_data:
        return shard.place_split(data, mesh)
    return images.on_device(data, lambda tree: shard.place(tree, mesh))


@contextmanager
def scorer(
    settings: Settings,
    actor: Actor,
    environment: str | None,
    seeds: int,
    loaded: Loaded,
    mesh: jax.sharding.Mesh,
    tasks: Callable[[str], Sequence[Mapping[str, Any]]] = lambda environment: (),
) -> Iterator[Callable[[State, int], dict[str, np.ndarray]]]:
    """A function (state, number of the evaluation) -> {"eval/...": [S, episodes]}; all hosts call it, one evaluates.

    Episodes are run with the policy on the CPU, so that they need not wait for the epoch that already runs on
    the accelerator. Where there is no environment, or ``settings`` ask for no episodes, nothing is scored.

    Args:
      settings: the run's.
      actor: acts for all of the run's learners.
      environment: where, by its name for `rl.envs.make`.
      seeds: S, the number of learners.
      loaded: the data, which the environment must fit.
      mesh: the run's.
      tasks: environment -> options of its reset that take turns, as `experiments.common.evaluator` takes them.

    Raises:
      ValueError: the environment does not fit the data.
    """
    if not (environment and settings.eval_episodes and shard.is_main()):
        yield on_main(None, mesh)
        return
    with common.evaluator(settings, actor, environment, seeds, loaded, tasks(environment)) as episodes:
        yield on_main(common.on_cpu(episodes), mesh)


def on_main(
    compute: Callable[..., dict[str, np.ndarray]] | None, mesh: jax.sharding.Mesh
) -> Callable[..., dict[str, np.ndarray]]:
    """``compute``, whose first argument is the state; all hosts call it, and those where it is None get nothing.

    The state is gathered from the mesh, without the optimisers' part.
    """

    def gathered(state: State, *others: Any) -> dict[str, np.ndarray]:
        local = shard.gather(acting.without_optimiser(state), mesh)  # by all hosts, or it would wait for ever
        return compute(local, *others) if compute else {}

    return gathered


def validator(
    settings: Settings,
    held_out: Any,
    learners: Callable[[Any, Callable[[Learner], Learner]], tuple[train.Population, Key]],
    mesh: jax.sharding.Mesh,
    period: int = 1,
) -> Callable[[State], dict[str, np.ndarray]]:
    """A function of the state -> {"validation/...": [S]}: the metrics of training on held-out data, without training.

    They are means over `_VALIDATION` batches, or as many more as make whole periods.

    Args:
      settings: the run's.
      held_out: what batches are drawn from, as in training; None gives a function that says nothing.
      learners: (settings, what to make of every learner) -> the run's population and keys.
      mesh: the run's.
      period: updates between those that report the metrics of a delayed policy; others report 0.
    """
    if held_out is None:
        return lambda state: {}
    batches = dataclasses.replace(settings, eval_every=math.ceil(_VALIDATION / period) * period)
    runs, run_keys = learners(batches, _frozen)
    # The state would come back as it went in, a copy of it.
    report = jax.jit(lambda *inputs: shard.over_mesh(runs.epoch, mesh)(*inputs)[1])
    data, placed = _placed(settings, held_out, mesh), shard.place_keys(keys.of(run_keys, "validate"), mesh)

    def validate(state: State) -> dict[str, np.ndarray]:
        metrics = report(state, data, placed).metrics
        return {f"validation/{name}": value for name, value in metrics.items()}

    return validate


def _frozen(learner: Learner) -> Learner:
    """A learner whose updates leave all as it is but for their number."""

    def update(state: State, batch: Any, key: Key) -> tuple[State, Metrics]:
        return state._replace(step=state.step + 1), learner.update(state, batch, key)[1]

    return learner._replace(update=update)


def loop(
    settings: Settings,
    session: Session,
    start: Start,
    runs: train.Population,
    data: Any,
    run_keys: Key,
    mesh: jax.sharding.Mesh,
    score: Callable[[State, int], Mapping[str, Any]],
    measure: Callable[[State], Mapping[str, Any]],
    **parts: Any,
) -> State:
    """All epochs that are left, each followed by its scores, its log and a checkpoint; returns the last state.

    Args:
      settings: the run's.
      session, start: of the run; ``start.tree["state"]`` is placed on the mesh.
      runs: the population.
      data: what batches are drawn from, on the host.
      run_keys: [S].
      mesh: the run's.
      score: (state, number of the epoch, from 1) -> what to log beside its report; called while the next one runs.
      measure: state -> more to log, which is computed where the epochs are, and so between them.
      parts: what checkpoints hold beside the state.
    """
    done, last = start.step // settings.eval_every, start.tree["state"]
    epochs = train.epochs(
        shard.over_mesh(runs.epoch, mesh),
        last,
        _placed(settings, data, mesh),
        shard.place_keys(run_keys, mesh),
        settings.updates // settings.eval_every - done,
        measure,
    )
    for number, (state, report) in enumerate(epochs, done + 1):
        step, last = number * settings.eval_every, state
        session.write(step, score(state, number), report)
        session.keep(step, {"state": state, **parts})
    return last
