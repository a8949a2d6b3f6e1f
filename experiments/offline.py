r"""Train an agent on logged data, several seeds at once, and say how good it is.

    python -m experiments.offline --agent=iql --dataset=cube-single-play-singletask-v0 --head=hl_gauss \
        --agent.expectile=0.9 --seeds=8 --updates=1000000

The run folder holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json and checkpoints; the
same command continues an interrupted run, to the same bits. ``--agent=NAME --help`` lists an agent's own
hyper-parameters. Datasets that cannot be downloaded are made by ``python -m experiments.collect``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app
from jax.experimental import multihost_utils

from experiments import flags
from rl import (
    acting,
    agents,
    checkpoint,
    data,
    evaluate,
    fitted_q,
    keys,
    log,
    plot,
    selection,
    shard,
    statistics,
    train,
)
from rl.agents import robust
from rl.dynamics import ensemble
from rl.replay import dataset as replay
from rl.types import Key, Learner, Spec, State
from rl.values import heads
from rl.values.heads import ValueHead
from rl.values.robust import REGULARISED

# Scores that are summarised, and those worth a curve, the most telling first.
_SCORES = ("return", "normalized_return", "success", "final_success")
_HEADLINE = ("normalized_return", "success", "return")

# Settings that another checkpoint in the same folder must agree on.
_IDENTITY = (
    *("dataset", "environment", "clip_actions", "normalize_observations", "reward_scale", "reward_shift"),
    *("head", "head_size", "seeds", "seed", "eval_every", "eval_episodes", "batch_size", "unroll"),
    *("policy_estimates", "robust", "robust_scale", "robust_updates"),
)

# What a run leaves in its folder, and what --overwrite may therefore remove.
LEFT = (log.CONFIG, log.METRICS, log.RESULT, "curve.png", "checkpoints", "events.out.tfevents.*", "wandb*")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything about a run that is not the agent's own."""

    agent: str = "iql"  # bc, cql, dqn, edac, iql, rebrac, sac, sac_n, td3, td3_bc, or your own: my.agent
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
    eval_episodes: int = 20  # episodes per seed and evaluation, at least 2; 0 trains without an environment
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none
    batch_size: int = 256  # transitions per update
    unroll: int = 1  # updates per iteration of the compiled loop; more can help on accelerators
    robust: str = ""  # targets that withstand shifts of the dynamics by this divergence: tv, kl or chi2
    robust_scale: float = 1.0  # price of a shift, in units of value: lower is more robust
    robust_updates: int = 10_000  # updates of the dynamics ensemble that robust targets are made from
    policy_estimates: int = 0  # fitted-Q updates after each epoch, to select without an environment
    mesh_seed: int = 1  # devices over which seeds are spread
    mesh_data: int = -1  # devices over which each batch is split; -1: all that are left
    workdir: str = ""  # run folder; by default runs/DATASET/AGENT-HEAD
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True  # write TensorBoard events
    wandb: bool = False  # log to Weights & Biases too (extra: track)


def run(settings: Settings, config: Any, sweep: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    Args:
      settings: the run.
      config: the agent's hyper-parameters.
      sweep: {float field of config: values}, all of one length V: trained together, ``settings.seeds`` seeds
        for each. Scores are then in the order of the variants, V * seeds in all.

    A run that is finished is left as it is, and what it found is returned.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Diverged: a metric stopped being finite; the last checkpoint is of the epoch before.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    sweep = {name: [float(x) for x in values] for name, values in (sweep or {}).items()}
    workdir = folder(settings)
    task = problem(settings, _discount(config))
    mesh = shard.mesh(settings.mesh_seed, settings.mesh_data)
    world = blank_dynamics(settings, task)
    population, run_keys = learners(settings, config, sweep, task, mesh, world)
    card = {
        "agent": settings.agent,
        "settings": {name: getattr(settings, name) for name in _IDENTITY},
        "config": dataclasses.asdict(config),
        "sweep": sweep,
        "digest": task.loaded.digest,
        "support": task.support,
    }
    state = jax.jit(population.init)(run_keys, replay.take(task.dataset, np.arange(2)))
    start: dict[str, Any] = {
        "state": shard.place_state(state, mesh),
        "seconds": np.zeros(()),
        "dynamics": world,
    }
    earlier = None if settings.overwrite else checkpoint.restore(workdir / "checkpoints", start, card)
    saved, step = earlier or (start, 0)
    if step >= settings.updates and (result := finished(workdir, step, settings.updates)):
        return result
    started = time.time() - saved["seconds"].item()
    if task.loaded.note and shard.is_main():
        print(f"note: {task.loaded.note}", file=sys.stderr)
    if settings.robust:
        world = saved["dynamics"] if earlier else fit_dynamics(settings, task)
        population, _ = learners(settings, config, sweep, task, mesh, world)

    with ExitStack() as stack:
        score = stack.enter_context(
            scorer(settings, task, population, _discount(config), len(run_keys), mesh)
        )
        if settings.overwrite:  # not before everything that can be wrong with this run has been tried
            clear(workdir)
        record = stack.enter_context(
            log.open_run(
                workdir, card, tensorboard=settings.tensorboard, wandb=settings.wandb, resume_step=step
            )
        )
        bar = stack.enter_context(
            log.progress(settings.updates, f"{settings.agent} {settings.head}", initial=step)
        )
        stopping = stack.enter_context(train.stop_requests())
        epochs = train.epochs(
            shard.over_mesh(population.epoch, mesh),
            saved["state"],
            shard.place(task.dataset, mesh),
            shard.place_keys(run_keys, mesh),
            (settings.updates - step) // settings.eval_every,
        )
        for state, report in epochs:
            step += settings.eval_every
            scores = score(state, step // settings.eval_every)
            record.write(step, {f"train/{name}": value for name, value in report.metrics.items()} | scores)
            seconds = np.asarray(time.time() - started)
            tree = {"state": state, "seconds": seconds, "dynamics": world}
            checkpoint.save(workdir / "checkpoints", step, tree, card)
            shown = {n: f"{np.mean(scores[f'eval/{n}']):.4g}" for n in _HEADLINE if f"eval/{n}" in scores}
            bar.set_postfix(shown, refresh=False)
            bar.update(settings.eval_every)
            if _anywhere(bool(stopping)) and step < settings.updates:
                raise train.Interrupted(
                    f"stopped at update {step}; the same command continues from {workdir}"
                )
        result = {
            **card,
            "source": task.loaded.source,
            "note": task.loaded.note,
            "environment": task.loaded.environment,
            "updates": step,
            "scores": summary(workdir),
            "wall_seconds": time.time() - started,
            **log.provenance(),
        }
        record.result(result)
    if shard.is_main():
        draw(workdir, f"{settings.agent}, {settings.head}", Path(settings.dataset).name)
    return result


def folder(settings: Settings) -> Path:
    """The run folder: as chosen, or by the run's id in a sweep of Weights & Biases, or by what is trained."""
    if settings.workdir:
        return Path(settings.workdir).expanduser()
    if "WANDB_SWEEP_ID" in os.environ:
        return Path("runs", "sweeps", os.environ["WANDB_SWEEP_ID"], os.environ["WANDB_RUN_ID"])
    return Path("runs", Path(settings.dataset).name, f"{settings.agent}-{settings.head}")


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    for name in ("seeds", "updates", "eval_every", "batch_size", "unroll"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    if settings.eval_episodes == 1 or settings.eval_episodes < 0:
        raise ValueError(
            f"--eval_episodes={settings.eval_episodes}: give 0 for none or at least 2, since a policy is "
            "selected by one half of them and scored on the other"
        )
    if settings.robust and settings.robust not in REGULARISED:
        raise ValueError(f"--robust={settings.robust} is not one of {', '.join(REGULARISED)}")
    if settings.robust and (not settings.robust_scale > 0 or settings.robust_updates < 1):
        raise ValueError(
            f"--robust_scale={settings.robust_scale} and --robust_updates={settings.robust_updates} must be positive"
        )
    if settings.updates % settings.eval_every:
        raise ValueError(
            f"--updates={settings.updates} is not a multiple of --eval_every={settings.eval_every}: give an "
            f"--eval_every that divides it, at most {settings.updates}"
        )


def clear(workdir: Path, left: Sequence[str] = LEFT) -> None:
    """Removes what an earlier run left in its folder, and nothing else."""
    if shard.is_main():
        for path in [path for pattern in left for path in workdir.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    multihost_utils.sync_global_devices(f"{workdir} is clear")


def finished(workdir: Path, step: int, total: int, unit: str = "updates") -> dict[str, Any] | None:
    """What result.json says of the run in ``workdir``; None if it was stopped just before it was written.

    Args:
      workdir: the run's folder.
      step: how far it has come.
      total: how far it is to come.
      unit: what these count, the name of the flag and of the entry in result.json.

    Raises:
      ValueError: the run has gone beyond ``total``.
    """
    if step > total:
        raise ValueError(
            f"{workdir} holds a run of {step} {unit}, more than --{unit}={total}: choose another "
            "--workdir, or --overwrite to start again"
        )
    path = workdir / log.RESULT
    result = json.loads(path.read_text()) if path.exists() else {}
    if result.get(unit) != step:
        return None
    if shard.is_main():
        print(f"{workdir} holds this run, finished: nothing to do; --overwrite starts again", file=sys.stderr)
    return result | {"scores": summary(workdir)}  # JSON has no NaN: only these are numbers again


class Problem(NamedTuple):
    """The data of a run as its agent sees them."""

    loaded: data.Loaded
    dataset: replay.Dataset  # standardised and scaled as the settings say
    mean: np.ndarray  # of observations, [*observation] or []
    deviation: np.ndarray
    support: tuple[float, float]  # values that a categorical head must represent
    head: ValueHead


def problem(settings: Settings, discount: float) -> Problem:
    """Loads and prepares the data, and chooses the head's support from them where no flag gives it."""
    loaded = data.load(
        settings.dataset,
        folder=settings.data_folder or None,
        clip_actions=settings.clip_actions,
        environment=settings.environment or None,
    )
    dataset, mean, deviation = loaded.dataset, np.zeros((), np.float32), np.ones((), np.float32)
    if settings.normalize_observations:
        dataset, mean, deviation = replay.standardize(dataset)
    if settings.reward_scale == "return_range":
        scale = 1000.0 / max(float(np.ptp(replay.episode_returns(dataset))), 1e-6)
    else:
        scale = _number("reward_scale", settings.reward_scale)
    dataset = replay.scale_rewards(dataset, scale, settings.reward_shift)
    support, head = value_head(settings, replay.value_bounds(dataset, discount))
    return Problem(loaded, dataset, mean, deviation, support, head)


def value_head(settings: Settings, bounds: tuple[float, float]) -> tuple[tuple[float, float], ValueHead]:
    """The support that the flags give, or else ``bounds``, which the data do; and the head on it."""
    low, high = bounds
    low = low if math.isnan(settings.head_low) else settings.head_low
    high = high if math.isnan(settings.head_high) else settings.head_high
    return (low, high), heads.make(settings.head, low, high, settings.head_size)


def blank_dynamics(settings: Settings, task: Problem) -> ensemble.Model | None:
    """The dynamics model before it is fitted, as NumPy arrays; None where nothing needs one."""
    if not settings.robust:
        return None
    return jax.device_get(_ensemble(settings, task).init(jax.random.key(0)))


def fit_dynamics(settings: Settings, task: Problem) -> ensemble.Model:
    """The model that all seeds share, as they share the data; every host holds the main one's, as NumPy arrays.

    It is saved with every checkpoint, so that a resumed run continues with it bit for bit on any machine.
    """
    key = keys.of(jax.random.key(settings.seed), "dynamics")
    model = _ensemble(settings, task).fit(task.dataset, key)
    return jax.device_get(multihost_utils.broadcast_one_to_all(jax.device_get(model)))


def _ensemble(settings: Settings, task: Problem) -> ensemble.Ensemble:
    return ensemble.make(ensemble.Config(updates=settings.robust_updates), task.loaded.spec)


def learners(
    settings: Settings,
    config: Any,
    sweep: Mapping[str, list[float]],
    task: Problem,
    mesh: jax.sharding.Mesh,
    world: ensemble.Model | None = None,
) -> tuple[train.Population, Key]:
    """All variants times all seeds as one population, and their keys."""
    module = agents.get(settings.agent)

    def make(config: Any) -> Learner:
        learner = module.make(config, task.loaded.spec, task.head)
        if world is None:
            return learner
        propose = _ensemble(settings, task).propose
        return robust.make(
            learner,
            lambda observation, action, key: propose(world, observation, action, key)[0],
            settings.robust,
            settings.robust_scale,
            _discount(config),
        )

    population = train.population(
        make,
        config,
        shard.data_parallel(replay.sampler(settings.batch_size), mesh),
        settings.eval_every,
        sweep={
            name: np.repeat(np.asarray(values, np.float32), settings.seeds) for name, values in sweep.items()
        },
        unroll=settings.unroll,
        batched=mesh.size > 1 or jax.default_backend() != "cpu",
    )
    variants = max((len(values) for values in sweep.values()), default=1)
    # Seed i has the same key in every variant and however many seeds run beside it.
    seeds = np.tile(np.arange(settings.seeds), variants)
    return population, keys.seeds(jax.random.key(settings.seed), settings.seeds)[seeds]


@contextmanager
def scorer(
    settings: Settings,
    task: Problem,
    population: train.Population,
    discount: float,
    count: int,
    mesh: jax.sharding.Mesh,
) -> Iterator[Callable[[State, int], dict[str, np.ndarray]]]:
    """A function (state, number of the evaluation) -> {"eval/...": [S, ...]}; all hosts call it, one evaluates.

    Episodes are run with the policy on the CPU, so that they need not wait for the epoch that already runs on
    the accelerator.

    Raises:
      ValueError: the environment does not fit the data.
    """
    actor = population.actor
    if settings.normalize_observations:
        actor = acting.observing(actor, lambda observation: (observation - task.mean) / task.deviation)
    cpu = jax.local_devices(backend="cpu")[0]
    with ExitStack() as stack:
        episodes = estimate = None
        if task.loaded.environment and settings.eval_episodes and shard.is_main():
            episodes = stack.enter_context(
                evaluate.evaluator(
                    actor,
                    task.loaded.environment,
                    seeds=count,
                    episodes=settings.eval_episodes,
                    processes=None if settings.eval_processes < 0 else settings.eval_processes,
                    reference=task.loaded.reference,
                    base_seed=settings.seed,
                )
            )
            check_fit(task.loaded, episodes.spec)
        if settings.policy_estimates and shard.is_main():
            fit = fitted_q.Config(discount=discount, updates=settings.policy_estimates)
            estimate = fitted_q.estimator(population.act, task.loaded.spec, task.head, fit)

        def score(state: State, index: int) -> dict[str, np.ndarray]:
            local = shard.gather(state, mesh)
            scores: dict[str, np.ndarray] = {}
            with jax.default_device(cpu):
                if episodes:
                    found = episodes(jax.device_put(local, cpu), index)
                    scores |= {f"eval/{name}": value for name, value in found.items()}
            if estimate:
                fit_keys = keys.of(keys.seeds(jax.random.key(settings.seed), count), "fitted_q")
                scores["eval/fitted_q"] = np.asarray(estimate(local, task.dataset, fit_keys).value)
            return scores

        yield score


def summary(workdir: Path) -> dict[str, Any]:
    """Last, best and selected scores of every metric, with Student's 95 % intervals over seeds."""
    logged = log.read(workdir)
    scores: dict[str, Any] = {}
    for name in _SCORES:
        history = np.asarray([row[f"eval/{name}"] for row in logged if f"eval/{name}" in row], float)
        if not history.size:
            continue
        estimates = np.asarray([row["eval/fitted_q"] for row in logged if "eval/fitted_q" in row])
        estimates[~np.isfinite(estimates)] = -np.inf  # a fit that diverged recommends nothing
        scores[name] = {
            which: {
                "mean": float(choice.score.mean()),
                "iqm": float(statistics.iqm(choice.score[:, None])),
                "ci95": list(statistics.interval(choice.score)),
                "per_seed": choice.score,
            }
            for which, choice in selection.select(history, estimates if estimates.size else None).items()
        }
    return scores


def draw(workdir: Path, label: str, title: str, xlabel: str = "updates") -> None:
    """The learning curve of the run's most telling score, if it was evaluated."""
    for name in _HEADLINE:
        try:
            steps, scores = log.series(workdir, f"eval/{name}")
        except KeyError:
            continue
        plot.learning_curve(
            workdir / "curve.png",
            {label: (steps, scores.mean(-1))},
            ylabel=name.replace("_", " "),
            title=title,
            xlabel=xlabel,
        )
        return


def _discount(config: Any) -> float:
    """The agent's gamma, or the usual one if it has none (behaviour cloning)."""
    return getattr(config, "discount", 0.99)


def _anywhere(asked: bool) -> bool:
    """Whether any host was asked to stop: all must leave after the same epoch."""
    return bool(np.any(multihost_utils.process_allgather(np.asarray(asked))))


def check_fit(loaded: data.Loaded, environment: Spec) -> None:
    """Raises ValueError if policies trained on the data cannot act in the environment."""
    spec = loaded.spec
    if spec.discrete:  # the largest integer actions may never have been logged
        spec = spec._replace(action_size=max(spec.action_size, environment.action_size))
    if spec != environment:
        raise ValueError(
            f"environment {loaded.environment!r} does not fit the data: it has {environment}, they have {spec}"
        )


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--{flag}={text} is neither a number nor one of its words; see --help") from None


def show(result: Mapping[str, Any]) -> None:
    """Prints the last scores of a run."""
    for name, score in result["scores"].items():
        last = score["last"]
        print(
            f"{name}: {last['mean']:.4g}, 95 % interval [{last['ci95'][0]:.4g}, {last['ci95'][1]:.4g}] over seeds"
        )


def main(_: list[str]) -> None:
    shard.initialize()
    settings = flags.read(Settings())
    result = run(settings, flags.read(agents.get(settings.agent).Config(), "agent."))
    if shard.is_main():
        show(result)


if __name__ == "__main__":
    app.run(
        flags.reporting(main), flags_parser=flags.parser(Settings(), lambda name: agents.get(name).Config())
    )
