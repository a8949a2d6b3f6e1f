r"""Train an offline agent in a model of the logged world, several seeds at once, and say how good it is.

    python -m experiments.model_based --agent=ravl --dataset=walker2d-medium-expert-v2 --agent.critics=10

``--agent`` is a method of `rl.model_based`: base, mopo, mopo_disagreement, mobile or ravl, and sac_n or edac, which
use no model. They differ in settings only, which ``--agent=NAME --help`` lists. ``--truth`` moves the world from an
untrained model over the learned one to the true dynamics, where the environment has them. The run folder is that of
`experiments.offline`, and the same command continues an interrupted run to the same bits. The price is that a
checkpoint holds the model's rows, too: ``--agent.rollouts`` times ``--agent.length`` times ``--agent.retain`` of them
for each seed, 245 MB of halfcheetah's at the defaults, and two checkpoints are kept. ``--agent.rollouts=5000`` makes it
a tenth, ``--agent.retain=1`` a fifth.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from experiments import flags, offline
from rl import acting, checkpoint, envs, evaluate, keys, log, model_based, train
from rl.agents import sac_n
from rl.dynamics import base, ensemble, termination, truth
from rl.dynamics.termination import Rule
from rl.types import Key, Learner

# Settings of the dynamics ensemble that are flags.
_MODEL = ("updates", "deterministic", "patience", "min_epochs", "max_epochs")

# Settings that another checkpoint in the same folder must agree on.
_IDENTITY = (
    *("agent", "dataset", "environment", "clip_actions", "truth", *(f"model_{name}" for name in _MODEL)),
    *("head", "head_size", "seeds", "seed", "eval_every", "eval_episodes"),
)


@dataclasses.dataclass(frozen=True)
class Config(model_based.Config, sac_n.Config):
    """The agent's hyper-parameters and the loop's."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything about a run that is not the method's own."""

    agent: str = "ravl"  # base, mopo, mopo_disagreement, mobile, ravl, sac_n or edac
    dataset: str = "hopper-medium-v2"  # name or file of a task with a termination rule
    data_folder: str = ""  # where named datasets lie, if not in their usual cache
    environment: str = ""  # where to evaluate and what is true, if not the dataset's own environment
    clip_actions: bool = False  # clip logged actions that lie outside the action box; an error without it
    truth: float = 0.0  # of the world: -1 untrained model, 0 learned, 1 true dynamics; mixtures between
    model_updates: int = 0  # of the dynamics ensemble; 0: the paper's stopping rule, hours on a large log
    model_patience: int = ensemble.Config.patience  # of that rule: epochs without improvement of 1 %
    model_min_epochs: int = ensemble.Config.min_epochs  # before which it does not stop
    model_max_epochs: int = ensemble.Config.max_epochs  # after which it stops in any case
    model_deterministic: bool = False  # the ensemble predicts means only
    head: str = "scalar"  # value representation: scalar, two_hot, hl_gauss, c51 or quantile
    head_size: int = 101  # outputs of the head (the scalar head has one)
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: from the data
    head_high: float = float("nan")  # upper end; nan: from the data
    seeds: int = 1  # seeds trained at once, each with a model of its own
    seed: int = 0  # the run's own seed: another value gives other seeds
    epochs: int = 3000  # of rollouts and updates
    eval_every: int = 10  # epochs between evaluations, each with a checkpoint
    eval_episodes: int = 10  # episodes per seed and evaluation, at least 2
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none
    runaway: float = 10.0  # stop where mean Q is so many times what rewards and entropy allow; 0: never
    workdir: str = ""  # run folder; by default runs/DATASET/AGENT-HEAD
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True  # write TensorBoard events
    wandb: bool = False  # log to Weights & Biases too (extra: track)


class World(NamedTuple):
    """Where rollouts happen."""

    dynamics: base.Dynamics
    params: Callable[[ensemble.Model], Any]  # of the dynamics, from a model, fitted or not
    learns: bool  # whether a model must be fitted
    truth: base.Dynamics | None  # what rewards are compared with, where it is known


def config(method: str) -> Config:
    """The hyper-parameters of a method.

    Raises:
      ValueError: there is no such method.
    """
    if method not in model_based.METHODS:
        raise ValueError(
            f"unknown method {method!r}: known are {', '.join(model_based.METHODS)}; agents without a model "
            "are trained by experiments.offline"
        )
    of_agent, of_loop = model_based.METHODS[method]
    return Config(**of_agent, **of_loop)


def run(settings: Settings, config: Config) -> dict[str, Any]:
    """Fits the model, trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and what it found is returned.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      FloatingPointError: the model diverged.
      model_based.RunawayQ: see ``--runaway``; the last checkpoint is of an earlier epoch.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings, config)
    plain = _as_offline(settings, config)
    workdir = offline.folder(plain)
    task = offline.problem(plain, config.discount)
    bound = model_based.largest_value(task.dataset, config.discount)
    name = task.loaded.environment or settings.dataset
    terminates = _rule(config, name, task.loaded.environment)
    learner = sac_n.make(config, task.loaded.spec, task.head)
    run_keys = keys.seeds(jax.random.key(settings.seed), settings.seeds)
    card = {
        "settings": {key: getattr(settings, key) for key in _IDENTITY},
        "config": dataclasses.asdict(config),
        "digest": task.loaded.digest,
        "support": task.support,
    }
    of_model = {key: getattr(settings, f"model_{key}") for key in _MODEL}
    network = ensemble.make(ensemble.Config(**of_model), task.loaded.spec)
    where = world(settings, config, network, run_keys, name)
    loop = model_based.make(
        config,
        learner,
        where.dynamics,
        terminates,
        model_based.diagnosis(
            learner,
            sac_n.critics(config, task.loaded.spec, task.head),
            where.dynamics,
            truth=where.truth,
        ),
    )
    dataset = jax.device_put(task.dataset)
    carry = jax.jit(jax.vmap(loop.init, (0, None)))(run_keys, dataset)
    start = {
        "carry": carry,
        "world": where.params(jax.vmap(network.init)(keys.of(run_keys, "dynamics"))),
        "seconds": np.zeros(()),
    }
    earlier = None if settings.overwrite else checkpoint.restore(workdir / "checkpoints", start, card)
    saved, step = earlier or (start, 0)
    total, done = settings.epochs * config.updates, step // config.updates
    if step >= total and (result := offline.finished(workdir, done, settings.epochs, "epochs")):
        return result
    started = time.time() - saved["seconds"].item()
    params = saved["world"]

    def save(carry: model_based.Carry) -> None:
        tree = {"carry": carry, "world": params, "seconds": np.asarray(time.time() - started)}
        checkpoint.save(workdir / "checkpoints", step, tree, card)

    with ExitStack() as stack:
        episodes = (
            stack.enter_context(_evaluator(settings, learner, name, task))
            if task.loaded.environment
            else None
        )
        if episodes:
            offline.check_fit(task.loaded, episodes.spec)
        fitting = where.learns and not earlier
        if fitting:
            _check_new(workdir, settings)
            params = where.params(network.fit(task.dataset, keys.of(run_keys, "dynamics")))
        if settings.overwrite:  # not before everything that can be wrong with this run has been tried
            offline.clear(workdir)
        record = stack.enter_context(
            log.open_run(
                workdir, card, tensorboard=settings.tensorboard, wandb=settings.wandb, resume_step=step
            )
        )
        if fitting:  # which may have taken longer than anything that follows
            save(saved["carry"])
        bar = stack.enter_context(log.progress(total, settings.agent, initial=step))
        stopping = stack.enter_context(train.stop_requests())
        epoch = model_based.over_seeds(loop.epoch, batched=jax.default_backend() != "cpu")
        source = model_based.Inputs(dataset, params)
        for carry, report in train.epochs(
            epoch, saved["carry"], source, run_keys, (total - step) // config.updates
        ):
            step += config.updates
            number = step // config.updates
            metrics = {f"train/{key}": value for key, value in report.metrics.items()}
            due = number % settings.eval_every == 0 or step == total
            if due and episodes:
                metrics |= {f"eval/{key}": x for key, x in episodes(carry.learner, number).items()}
            record.write(step, metrics)
            bar.update(config.updates)
            if settings.runaway:
                model_based.check_values(report, bound, settings.runaway)
            if due or stopping:
                save(carry)
            if stopping and step < total:
                raise train.Interrupted(
                    f"stopped at update {step}; the same command continues from {workdir}"
                )
        result = {
            **card,
            "source": task.loaded.source,
            "environment": task.loaded.environment,
            "epochs": step // config.updates,
            "updates": step,
            "scores": offline.summary(workdir),
            "wall_seconds": time.time() - started,
            **log.provenance(),
        }
        record.result(result)
    offline.draw(workdir, f"{settings.agent}, {settings.head}", Path(settings.dataset).name)
    return result


def check(settings: Settings, config: Config) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    for name in ("seeds", "epochs", "eval_every"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    if settings.eval_episodes < 2:
        raise ValueError(f"--eval_episodes={settings.eval_episodes}: give at least 2")
    if not -1 <= settings.truth <= 1:
        raise ValueError(f"--truth={settings.truth} must be between -1 (untrained), 0 (learned) and 1 (true)")
    if settings.runaway < 0:
        raise ValueError(f"--runaway={settings.runaway} must not be negative")
    if settings.model_deterministic and config.uncertainty == "aleatoric":
        raise ValueError(
            "--model_deterministic predicts no deviation for --agent.uncertainty=aleatoric to doubt: take "
            "--agent.uncertainty=disagreement or bellman"
        )


def world(settings: Settings, config: Config, network: ensemble.Ensemble, run_keys: Key, name: str) -> World:
    """The dynamics that ``--truth`` asks for, for all seeds.

    Raises:
      ValueError: true dynamics are asked for where there are none.
    """
    model = base.learned(network)
    if config.real == 1:
        return World(model, lambda model: (), False, None)
    true = _truth(name, needed=settings.truth > 0)
    share = jnp.full(len(run_keys), abs(settings.truth))
    if true and settings.truth == 1:
        return World(true, lambda model: (), False, true)
    if true and settings.truth > 0:
        return World(base.mix(model, true), lambda model: base.Mixed(model, (), share), True, true)
    if settings.truth < 0:
        untrained = jax.vmap(network.init)(keys.of(run_keys, "untrained_dynamics"))

        def params(model: ensemble.Model) -> base.Mixed:
            # In the units of the fitted one.
            useless = untrained._replace(mean=model.mean, deviation=model.deviation)
            return base.Mixed(model, useless, share)

        return World(base.mix(model, model), params, True, true)
    return World(model, lambda model: model, True, true)


def _truth(name: str, *, needed: bool) -> base.Dynamics | None:
    try:
        return truth.of(name)
    except ValueError:
        if needed:
            raise
        return None


def _rule(config: Config, name: str, environment: str | None) -> Rule:
    """Where episodes of rollouts end; without rollouts there are none.

    Raises:
      ValueError: nobody knows, or rollouts would be longer than an episode of the environment can be.
    """
    if config.real == 1:
        return termination.never
    rule = termination.of(name)
    limit = envs.make(environment).spec.max_episode_steps if environment else None
    if limit and config.length > limit:
        raise ValueError(f"--agent.length={config.length}: episodes of {environment} end after {limit} steps")
    return rule


def _check_new(workdir: Path, settings: Settings) -> None:
    """Raises CheckpointError, before the model is fitted, if the results of another run would be in its way."""
    if not settings.overwrite and (workdir / log.RESULT).exists():
        raise checkpoint.CheckpointError(
            f"{workdir} holds a finished run without its checkpoints: choose another --workdir, or --overwrite to "
            "start again"
        )


def _evaluator(settings: Settings, learner: Learner, name: str, task: offline.Problem) -> evaluate.Evaluator:
    return evaluate.evaluator(
        acting.over_seeds(acting.actor(learner), 0),
        name,
        seeds=settings.seeds,
        episodes=settings.eval_episodes,
        processes=None if settings.eval_processes < 0 else settings.eval_processes,
        reference=task.loaded.reference,
        base_seed=settings.seed,
    )


def _as_offline(settings: Settings, config: Config) -> offline.Settings:
    """The settings that `experiments.offline` would have for this data, head and folder."""
    shared = {field.name for field in dataclasses.fields(offline.Settings)}
    given = {name: value for name, value in dataclasses.asdict(settings).items() if name in shared}
    return offline.Settings(
        **given | {"eval_every": config.updates, "updates": settings.epochs * config.updates}
    )


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    result = run(settings, flags.read(config(settings.agent), "agent."))
    offline.show(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings(), config))
