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
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app

from experiments import checks, common, flags, notes, presets
from rl import acting, data, keys, lifecycle, model_based, run_folder, train
from rl.agents import sac_n
from rl.dynamics import base, ensemble, termination, truth
from rl.dynamics.termination import Rule
from rl.envs import entities
from rl.envs.registry import time_limit
from rl.replay import dataset as replay
from rl.settings import require_at_least_one
from rl.types import Key, Spec

# Settings of the dynamics ensemble that are flags.
_MODEL = (
    "hidden",
    "decay",
    "updates",
    "deterministic",
    "learning_rate",
    "patience",
    "min_epochs",
    "max_epochs",
)
_UNTRAINED = ("model_hidden", "model_deterministic")  # what there is to an untrained model

# Settings that another checkpoint in the same folder must agree on.
IDENTITY = (
    *("dataset", "environment", "clip_actions", "truth", *(f"model_{name}" for name in _MODEL)),
    *("head", "head_size", "seeds", "seed", "eval_every", "eval_episodes"),
)


@dataclasses.dataclass(frozen=True)
class Config(model_based.Config, sac_n.Config):
    """The agent's hyper-parameters and the loop's."""


@dataclasses.dataclass(frozen=True)
class Settings(common.Data, common.Head, common.Folder):
    """Everything about a run that is not the method's own."""

    agent: str = "ravl"  # base, mopo, mopo_disagreement, mobile, ravl, sac_n or edac
    preset: str = "none"  # published settings, --epochs among them: paper or none; flags override it
    dataset: str = "hopper-medium-v2"  # name or file of a task with a termination rule
    truth: float = 0.0  # world of the rollouts: -1 an untrained model, 0 learned, 1 true dynamics; or between
    model_hidden: tuple[int, ...] = ensemble.Config.hidden  # widths of the layers of the model's networks
    model_decay: tuple[float, ...] = ensemble.Config.decay  # L2 of layers and output, or one rate for all
    model_updates: int = 0  # updates of the dynamics; 0: the paper's stopping rule, hours on a large log
    model_patience: int = ensemble.Config.patience  # the stopping rule's epochs without improvement of 1 %
    model_min_epochs: int = ensemble.Config.min_epochs  # epochs before which the stopping rule does not stop
    model_max_epochs: int = ensemble.Config.max_epochs  # epochs after which a fit stops in any case
    model_deterministic: bool = False  # the ensemble predicts means only
    model_learning_rate: float = ensemble.Config.learning_rate  # Adam, all networks of the model
    seeds: int = 1  # seeds trained at once, each with a model of its own
    seed: int = 0  # the run's own seed: another value gives other seeds
    epochs: int = 3000  # epochs, each of rollouts and updates
    eval_every: int = 10  # epochs between evaluations, each with a checkpoint
    eval_episodes: int = 10  # episodes per seed and evaluation, at least 2; 0 trains without an environment
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none
    runaway: float = 10.0  # stop where mean Q is this many times what rewards and entropy allow; 0: never


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

    A run that is finished is left as it is, and its result is returned.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      FloatingPointError: the model diverged.
      model_based.RunawayQ: see ``--runaway``; the last checkpoint is of an earlier epoch.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings, config)
    checks.schedules(config, settings.epochs * config.updates)
    task = problem(settings, config)
    if task.loaded.spec.discrete:
        raise ValueError(
            f"--agent={settings.agent} is a soft actor-critic, which cannot act by integers, as the actions of "
            f"--dataset={settings.dataset} are: of the agents of experiments.offline iql, cql and bc can"
        )
    bound = model_based.largest_value(task.dataset, config.discount)
    name = task.loaded.environment or settings.dataset
    terminates = _rule(config, name, task.loaded.environment)
    learner = sac_n.make(config, task.loaded.spec, task.head)
    run_keys = keys.seeds(jax.random.key(settings.seed), settings.seeds)
    this = _run(settings, config, task)
    common.check(this)
    network = make_ensemble(settings, config, task.loaded.spec)
    termination.check(terminates, task.loaded.spec)
    where = world(settings, config, network, run_keys, task.loaded.environment)
    diagnosis = model_based.diagnosis(learner, acting.critics(learner), where.dynamics, truth=where.truth)
    with checks.agent_flags(config):
        loop = model_based.make(config, learner, where.dynamics, terminates, diagnosis)
    dataset = jax.device_put(task.dataset)
    carry = jax.jit(jax.vmap(loop.init, (0, None), model_based.STACKED))(run_keys, dataset)
    unfitted = jax.vmap(network.init)(keys.of(run_keys, "dynamics"))
    start = lifecycle.begin(this, {"carry": carry, "world": where.params(unfitted)})
    if start.result is not None:
        return start.result
    _print_notes(settings, config, task.loaded, terminates)
    carry, params = start.tree["carry"], start.tree["world"]
    with ExitStack() as stack:
        episodes = None
        if task.loaded.environment and settings.eval_episodes:
            actor = acting.over_seeds(acting.actor(learner), train.STACKED)
            of_task = common.evaluator(settings, actor, task.loaded.environment, settings.seeds, task.loaded)
            episodes = common.on_cpu(stack.enter_context(of_task))
        fitting = where.learns and not start.resumed
        fit = lambda: where.params(network.fit(task.dataset, keys.of(run_keys, "dynamics")))
        session = stack.enter_context(lifecycle.session(this, start, fit if fitting else None))
        if fitting:  # which may have taken longer than anything that follows
            params = session.prepared
            session.keep(0, {"carry": carry, "world": params})
        epochs = train.epochs(
            model_based.over_seeds(loop.epoch, batched=jax.default_backend() != "cpu"),
            carry,
            model_based.Inputs(dataset, params),
            run_keys,
            (this.total - start.step) // config.updates,
        )
        for number, (carry, report) in enumerate(epochs, start.step // config.updates + 1):
            step, due = number * config.updates, number % settings.eval_every == 0
            due |= number == settings.epochs
            scores = episodes(carry.learner, number) if due and episodes else {}
            session.write(step, scores, report)
            model_based.check_rollouts(report, number)
            if settings.runaway:
                model_based.check_values(report, bound, settings.runaway)
            session.keep(step, {"carry": carry, "world": params}, due=due)
        return session.finish(
            source=task.loaded.source,
            transitions=replay.size(task.dataset),
            updates=this.total,
            note=task.loaded.note,
        )


def make_ensemble(settings: Settings, config: Config, spec: Spec) -> ensemble.Ensemble:
    """The model, as the flags say.

    Raises:
      ValueError: it cannot be built, or predict such observations; the message names the flag.
    """
    of_model = {name: getattr(settings, f"model_{name}") for name in _MODEL}
    layers = len(settings.model_hidden)
    if len(settings.model_decay) not in (1, layers + 1) and settings.truth != -1:
        raise ValueError(
            f"--model_decay={','.join(map(str, settings.model_decay))} has {len(settings.model_decay)} rates: give one "
            f"for all, or one for each of the {layers} layers of --model_hidden and one for the output"
        )
    if len(settings.model_decay) == 1 or settings.truth == -1:  # what is untrained has no decay
        of_model["decay"] = settings.model_decay[:1] * (len(settings.model_hidden) + 1)
    try:
        with checks.named("--model_"):
            ensemble.check(ensemble.Config(**of_model), Spec((1,), 1))  # of any vector
        return ensemble.make(ensemble.Config(**of_model), spec)
    except ValueError as error:
        hint = f": --agent={settings.agent} needs no model in experiments.offline" * (config.real == 1)
        raise ValueError(f"{error}{hint}") from None


def _print_notes(settings: Settings, chosen: Config, loaded: data.Loaded, terminates: Rule) -> None:
    """Prints what there is to know of the data, and which flags do nothing."""
    notes.show_note(settings, loaded)
    steps = loaded.dataset.transitions
    known = ~replay.without_successor(steps) & (chosen.real < 1)
    if against := termination.contradicted(
        terminates, steps.next_observation[known], steps.discount[known] == 0
    ):
        print(f"note: {against}", file=sys.stderr)
    usual, usual_config = presets.usual("model_based", settings, config(settings.agent), "dataset")
    notes.note_unused_head(settings, usual)
    of_run, of_method = unused(settings, chosen)
    of_agent = notes.unread(dataclasses.replace(settings, agent="sac_n"), chosen, loaded.spec)
    notes.note_unread(settings, usual, of_run)
    notes.note_unread(chosen, usual_config, of_method | of_agent, "agent.")


def unused(settings: Settings, config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """{field: why} of those that do nothing, of the run's settings and of the method's."""
    model = [f"model_{name}" for name in _MODEL]
    if config.real == 1:
        why = f"with --agent.real=1, as of {settings.agent}, nothing is rolled out in any model"
        return dict.fromkeys(model, why), dict.fromkeys(("rollouts", "length", "retain"), why)
    if settings.truth == 1:
        why = "with --truth=1 rollouts are in the true dynamics, and no model is fitted"
        certain = (
            f"with --truth=1 rollouts are in the true dynamics, whose {config.uncertainty} uncertainty is 0"
        )
        return dict.fromkeys(model, why), {"penalty": certain} if config.uncertainty else {}
    if settings.truth == -1:
        why = (
            "with --truth=-1 rollouts are in an untrained model, which takes only the units of its inputs from the "
            "fitted one: --model_updates=20 is enough"
        )
        read = (*_UNTRAINED, "model_updates") if settings.model_updates else _UNTRAINED
        return dict.fromkeys([name for name in model if name not in read], why), {}
    if settings.model_updates:
        why = "--model_updates says how long the model is fitted"
        return dict.fromkeys(("model_patience", "model_min_epochs", "model_max_epochs"), why), {}
    return {}, {}


def _run(settings: Settings, config: Config, task: common.Problem) -> run_folder.Run:
    """The run folder, and what its checkpoints must agree on."""
    return common.run(
        settings,
        config,
        settings.epochs * config.updates,
        task=common.dataset_name(settings.dataset),
        identity=IDENTITY,
        card={"digest": task.loaded.digest, "support": task.support},
        about={
            "preset": presets.stored("model_based", settings, config, "dataset"),
            "reference": task.loaded.reference,
            "environment": task.loaded.environment,
        },
        unit="epochs",
        per_unit=config.updates,
    )


def problem(settings: Settings, config: Config) -> common.Problem:
    """The data, with a support that holds the penalties and the ends of rollouts, too."""
    return common.problem(
        settings,
        [config],
        target_range,
        ends=lambda loaded: (
            _rule(config, loaded.environment or settings.dataset, loaded.environment) is not termination.never
        ),
    )


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """What targets reach with the entropy bonus and the penalty of model rows, where rewards give [low, high]."""
    low, high = sac_n.target_range(config, spec, low, high)
    return model_based.target_range(config, config.discount, spec, low, high)


def check(settings: Settings, config: Config) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    checks.one_process()
    require_at_least_one(settings, "seeds", "epochs", "eval_every", prefix="--")
    checks.not_negative(settings, "seed")
    checks.several_episodes(settings, none=True)
    checks.head(settings)
    if common.is_set(settings):
        raise ValueError(
            f"--dataset={settings.dataset}: models of dynamics predict vectors, and not sets of entities: leave "
            f"{entities.SUFFIX} out"
        )
    if not -1 <= settings.truth <= 1:
        raise ValueError(f"--truth={settings.truth} must be between -1 (untrained), 0 (learned) and 1 (true)")
    if settings.truth and config.real == 1:
        raise ValueError(
            f"--truth={settings.truth}: with --agent.real=1 nothing is rolled out in any world: leave it out, or give "
            "another --agent"
        )
    if config.discount == 1:
        raise ValueError(
            "--agent.discount=1: rollouts that are cut go on for ever, and have no value with it: give less than 1"
        )
    if config.real < 1 and config.rollouts < model_based.DIAGNOSABLE:
        raise ValueError(
            f"--agent.rollouts={config.rollouts}: the metrics of an epoch compare its rollouts with each other: give "
            f"at least {model_based.DIAGNOSABLE}"
        )
    if not settings.runaway >= 0:
        raise ValueError(f"--runaway={settings.runaway} must be a number that is not negative")
    if settings.model_deterministic and config.uncertainty == "aleatoric":
        raise ValueError(
            "--model_deterministic predicts no deviation for --agent.uncertainty=aleatoric to penalise: take "
            "--agent.uncertainty=disagreement or bellman"
        )


def world(
    settings: Settings,
    config: Config,
    network: ensemble.Ensemble,
    run_keys: Key,
    environment: str | None,
) -> World:
    """The dynamics that ``--truth`` asks for, for all seeds; the truth is that of the ``environment``.

    Raises:
      ValueError: true dynamics are asked for where there are none.
    """
    model = network.dynamics
    if config.real == 1:
        return World(model, lambda model: (), False, None)
    true = _truth(environment, needed=settings.truth > 0)
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


def _truth(environment: str | None, *, needed: bool) -> base.Dynamics | None:
    if environment is None:
        if needed:
            raise ValueError(
                "--truth above 0 needs true dynamics, and the data name no environment: give the --environment that "
                "they are of, such as --environment=Hopper-v5, or leave it at 0"
            )
        return None
    try:
        return truth.of(environment)
    except ValueError as error:
        if needed:
            raise ValueError(f"--truth above 0 needs true dynamics: {error}. Leave it at 0") from None
        return None


def _rule(config: Config, name: str, environment: str | None) -> Rule:
    """Where episodes of rollouts end; without rollouts there are none.

    Raises:
      ValueError: nobody knows, or rollouts would be longer than an episode of the environment can be.
    """
    if config.real == 1:
        return termination.never
    try:
        rule = termination.of_environment(environment) if environment else termination.of(name)
    except ValueError as error:
        if environment:  # the data's own, or the flag's
            raise
        raise ValueError(
            f"{error}. Give the --environment that the data are of, such as --environment=Hopper-v5; the agents of "
            "experiments.offline need no such rule"
        ) from None
    limit = time_limit(environment) if environment else 0
    if limit and config.length > limit:
        raise ValueError(f"--agent.length={config.length}: episodes of {environment} end after {limit} steps")
    return rule


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def main(_: list[str]) -> None:
    result = run(*presets.from_flags("model_based", PUBLISHED, config, "dataset"))
    notes.show(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, config))
