"""Train an agent on logged data, several seeds at once, and say how good it is.

    python -m experiments.offline --agent=iql --dataset=cube-single-play-singletask-v0 --head=hl_gauss \
        --agent.expectile=0.9 --seeds=8 --updates=1000000

The run folder holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json and checkpoints; the
same command continues an interrupted run, to the same bits. ``--agent=NAME --help`` lists an agent's own
hyper-parameters. Datasets that cannot be downloaded are made by ``python -m experiments.collect``.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app

from experiments import flags
from rl import agents, checkpoint, data, evaluate, log, plot, shard, statistics, train
from rl.replay import dataset as replay
from rl.types import Learner, State
from rl.values import heads

# Scores that are summarised, and those worth a curve, the most telling first.
_SCORES = ("return", "normalized_return", "success", "final_success")
_HEADLINE = ("normalized_return", "success", "return")

# Settings that another checkpoint in the same folder must agree on.
_IDENTITY = [
    "dataset",
    "environment",
    "clip_actions",
    "normalize_observations",
    "reward_scale",
    "reward_shift",
    "head",
    "head_size",
    "seeds",
    "seed",
    "eval_every",
    "batch_size",
    "unroll",
]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything about a run that is not the agent's own."""

    agent: str = "iql"  # algorithm: bc, cql, dqn, edac, iql, rebrac, sac_n or td3_bc
    dataset: str = "synthetic-continuous"  # name (D4RL, OGBench, synthetic-...), minari:ID, or file
    data_folder: str = ""  # where named datasets lie, if not in their usual cache
    environment: str = ""  # where to evaluate, if not in the dataset's own environment
    clip_actions: bool = False  # clip logged actions that lie outside the action box; an error without it
    normalize_observations: bool = False  # standardise observations by the dataset's mean and deviation
    reward_scale: str = "1"  # factor on rewards; return_range divides by the range of returns over 1000 (IQL)
    reward_shift: float = 0.0  # added to every reward after scaling; -1 is usual for antmaze
    head: str = "scalar"  # value representation: scalar, two_hot, hl_gauss, c51 or quantile
    head_size: int = 101  # outputs of the head (the scalar head has one)
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: from the data
    head_high: float = float("nan")  # upper end; nan: from the data
    seeds: int = 4  # seeds trained at once, sharing one copy of the data
    seed: int = 0  # the run's own seed: another value gives other seeds
    updates: int = 100_000  # gradient steps of each seed
    eval_every: int = 10_000  # updates per compiled epoch; evaluation, log and checkpoint follow each
    eval_episodes: int = 20  # episodes per seed and evaluation; 0 trains without an environment
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none
    batch_size: int = 256  # transitions per update
    unroll: int = 1  # updates per iteration of the compiled loop; more can help on accelerators
    policy_estimates: bool = False  # fitted-Q evaluation after each epoch, to select without an environment
    mesh_seed: int = 1  # devices over which seeds are spread
    mesh_data: int = -1  # devices over which each batch is split; -1: all that are left
    workdir: str = ""  # run folder; by default runs/DATASET/AGENT-HEAD
    overwrite: bool = False  # start again where the folder holds another run
    tensorboard: bool = True  # write TensorBoard events
    wandb: bool = False  # log to Weights & Biases too (extra: track)


def run(settings: Settings, config: Any, sweep: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    Args:
      settings: the run.
      config: the agent's hyper-parameters.
      sweep: {float field of config: values}, all of one length V: trained together, ``settings.seeds`` seeds
        for each. Scores are then in the order of the variants, V * seeds in all.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      train.Diverged: a metric stopped being finite; the last checkpoint is of the epoch before.
      Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    if settings.updates % settings.eval_every:
        raise ValueError(
            f"--updates={settings.updates} is not a multiple of --eval_every={settings.eval_every}"
        )
    loaded = data.load(
        settings.dataset,
        folder=settings.data_folder or None,
        clip_actions=settings.clip_actions,
        environment=settings.environment or None,
    )
    dataset, mean, deviation = prepare(settings, loaded.dataset)
    low, high = support(settings, dataset, getattr(config, "discount", 0.99))
    head = heads.make(settings.head, low, high, settings.head_size)
    module = agents.get(settings.agent)
    variants = len(next(iter(sweep.values()))) if sweep else 1
    count = variants * settings.seeds

    def make(config: Any) -> Learner:
        return standardised(module.make(config, loaded.spec, head), mean, deviation)

    mesh = shard.mesh(settings.mesh_seed, settings.mesh_data)
    population = train.population(
        make,
        config,
        shard.data_parallel(replay.sampler(settings.batch_size), mesh),
        settings.eval_every,
        sweep={
            name: np.repeat(np.asarray(v, np.float32), settings.seeds) for name, v in (sweep or {}).items()
        },
        unroll=settings.unroll,
    )
    # Seed i has the same key in every variant and however many seeds run beside it.
    seeds = np.tile(np.arange(settings.seeds), variants)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(settings.seed)))(seeds)
    state = jax.jit(population.init)(keys, replay.take(dataset, np.arange(2)))

    workdir = Path(settings.workdir or f"runs/{Path(settings.dataset).name}/{settings.agent}-{settings.head}")
    card = {
        "agent": settings.agent,
        "settings": {name: getattr(settings, name) for name in _IDENTITY},
        "config": dataclasses.asdict(config),
        "sweep": {name: [float(x) for x in values] for name, values in (sweep or {}).items()},
        "digest": loaded.digest,
        "support": [low, high],
    }
    tree = {"learner": shard.place_state(state, mesh), "seconds": np.zeros(())}
    if settings.overwrite and workdir.exists():
        shutil.rmtree(workdir)
    found = checkpoint.restore(workdir / "checkpoints", tree, card)
    tree, step = found or (tree, 0)
    state, before = tree["learner"], float(tree["seconds"])
    started = time.time()

    environment = loaded.environment if settings.eval_episodes and shard.is_main() else None
    with ExitStack() as stack:
        record = stack.enter_context(
            log.open_run(
                workdir, card, tensorboard=settings.tensorboard, wandb=settings.wandb, resume_step=step
            )
        )
        scores_of = None
        if environment:
            scores_of = stack.enter_context(
                evaluate.evaluator(
                    population.act,
                    environment,
                    seeds=count,
                    episodes=settings.eval_episodes,
                    processes=None if settings.eval_processes < 0 else settings.eval_processes,
                    reference=loaded.reference,
                    base_seed=settings.seed,
                )
            )
        estimate = None
        if settings.policy_estimates:
            fitted = evaluate.FittedQ(discount=getattr(config, "discount", 0.99))
            estimate = evaluate.fitted_q(population.act, loaded.spec, head, fitted)
        bar = stack.enter_context(
            log.progress(settings.updates, f"{settings.agent} {settings.head}", initial=step)
        )
        stopping = stack.enter_context(stop_requests())
        device_data, keys = shard.place(dataset, mesh), shard.place_keys(keys, mesh)
        remaining = (settings.updates - step) // settings.eval_every
        for state, report in train.epochs(
            shard.over_mesh(population.epoch, mesh), state, device_data, keys, remaining
        ):
            step += settings.eval_every
            metrics = {f"train/{name}": np.asarray(value) for name, value in report.metrics.items()}
            with on_host(state, mesh) as host_state:
                scores = scores_of(host_state, step // settings.eval_every) if scores_of else {}
            metrics |= {f"eval/{name}": value for name, value in scores.items()}
            if scores:
                bar.set_postfix({name: f"{scores[name].mean():.4g}" for name in _HEADLINE if name in scores})
            if estimate:
                metrics["eval/fitted_q"] = np.asarray(estimate(state, device_data, keys).value)
            record.write(step, metrics)
            seconds = before + time.time() - started
            checkpoint.save(
                workdir / "checkpoints", step, {"learner": state, "seconds": np.asarray(seconds)}, card
            )
            bar.update(settings.eval_every)
            if stopping and step < settings.updates:
                raise Interrupted(f"stopped at update {step}; the same command continues from {workdir}")

        result = {
            **card,
            "dataset": settings.dataset,
            "source": loaded.source,
            "environment": environment,
            "seeds": settings.seeds,
            "updates": step,
            "scores": summary(workdir),
            "wall_seconds": before + time.time() - started,
            "command": shlex.join(sys.orig_argv),
            "versions": log.versions(),
            "hardware": log.hardware(),
        }
        record.result(result)
    draw(workdir, settings)
    return result


def prepare(settings: Settings, dataset: replay.Dataset) -> tuple[replay.Dataset, np.ndarray, np.ndarray]:
    """The dataset as the agent sees it, and the mean and deviation by which observations were standardised."""
    steps = dataset.transitions
    mean, deviation = np.zeros((), np.float32), np.ones((), np.float32)
    if settings.normalize_observations:
        mean, deviation = steps.observation.mean(0), steps.observation.std(0) + np.float32(1e-3)
        steps = steps._replace(
            observation=(steps.observation - mean) / deviation,
            next_observation=(steps.next_observation - mean) / deviation,
        )
    scale = settings.reward_scale
    if scale == "return_range":
        factor = 1000.0 / max(float(np.ptp(replay.episode_returns(dataset))), 1e-6)
    else:
        factor = _number("reward_scale", scale)
    reward = (steps.reward * factor + settings.reward_shift).astype(np.float32)
    return dataset._replace(transitions=steps._replace(reward=reward)), mean, deviation


def standardised(learner: Learner, mean: np.ndarray, deviation: np.ndarray) -> Learner:
    """The learner, acting on raw observations although it was trained on standardised ones."""
    if mean.ndim == 0:
        return learner
    return learner._replace(act=lambda state, x, key: learner.act(state, (x - mean) / deviation, key))


def support(settings: Settings, dataset: replay.Dataset, discount: float) -> tuple[float, float]:
    """The values that a categorical head must represent: the flags where given, else what the data suggest."""
    low, high = replay.value_bounds(dataset, discount)
    return (
        low if np.isnan(settings.head_low) else settings.head_low,
        high if np.isnan(settings.head_high) else settings.head_high,
    )


def summary(workdir: Path) -> dict[str, Any]:
    """Last, best and selected scores of every metric, with Student's 95 % intervals over seeds."""
    rows = [row for row in log.read(workdir) if any(name.startswith("eval/") for name in row)]
    scores: dict[str, Any] = {}
    for name in (n for n in _SCORES if rows and f"eval/{n}" in rows[-1]):
        history = np.asarray([row[f"eval/{name}"] for row in rows], float)
        estimates = (
            np.asarray([row["eval/fitted_q"] for row in rows]) if "eval/fitted_q" in rows[-1] else None
        )
        scores[name] = {
            which: {
                "mean": float(choice.score.mean()),
                "iqm": float(statistics.iqm(choice.score[:, None])),
                "ci95": list(statistics.interval(choice.score)),
                "per_seed": choice.score,
            }
            for which, choice in evaluate.select(history, estimates).items()
        }
    return scores


def draw(workdir: Path, settings: Settings) -> None:
    """The learning curve of the run's most telling score, if it was evaluated."""
    rows = log.read(workdir)
    name = next((n for n in _HEADLINE if rows and f"eval/{n}" in rows[-1]), None)
    if name:
        steps = np.asarray([row["step"] for row in rows])
        scores = np.asarray([np.mean(row[f"eval/{name}"], axis=1) for row in rows])
        label = f"{settings.agent}, {settings.head}"
        plot.learning_curve(
            workdir / "curve.png",
            {label: (steps, scores)},
            ylabel=name.replace("_", " "),
            title=settings.dataset,
        )


class Interrupted(Exception):
    """The run was asked to stop, and its checkpoint is written."""


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, so that an epoch in flight ends and is saved; a second Ctrl-C stops at once."""
    received: list[int] = []

    def remember(number: int, _: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        print("\nstopping after this epoch; press Ctrl-C again to stop at once and lose it", file=sys.stderr)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def on_host(state: State, mesh: jax.sharding.Mesh) -> Iterator[State]:
    """The state on the CPU, and computation there: evaluation need not wait for the accelerator's next epoch."""
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        yield jax.device_put(shard.gather(state, mesh), cpu)


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--{flag}={text} is neither a number nor one of its words; see --help") from None


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    try:
        result = run(settings, flags.read(agents.get(settings.agent).Config(), "agent."))
    except (
        ValueError,
        ImportError,
        OSError,
        train.Diverged,
        checkpoint.CheckpointError,
        Interrupted,
    ) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(130 if isinstance(error, Interrupted) else 1) from None
    for name, score in result["scores"].items():
        last = score["last"]
        print(
            f"{name}: {last['mean']:.4g}, 95 % interval [{last['ci95'][0]:.4g}, {last['ci95'][1]:.4g}] over seeds"
        )


if __name__ == "__main__":
    app.run(main, flags_parser=flags.parser(Settings(), lambda name: agents.get(name).Config()))
