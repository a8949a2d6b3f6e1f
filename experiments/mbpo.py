r"""Train an agent in its environment and in a model of it, several seeds at once, and say how good it is.

    python -m experiments.mbpo --agent=sac --env=Hopper-v5 --model_loss=vagram

is VaGraM (Voelcker et al., ICLR 2022), and ``--model_loss=mle`` is MBPO (Janner et al., NeurIPS 2019): see `rl.mbpo`. A
model of the environment is learned from all steps so far, again and again; short rollouts in it fill a second replay,
and most batches of the agent are drawn from that one. ``--model_loss`` is one of `rl.dynamics.value_aware`.

Schedules are four numbers, as in the papers: ``--rollout_length=20000,150000,1,5`` is rollouts of one step for the
first 20,000 environment steps after ``--learning_starts``, of five from 150,000 on, and on a straight line between. One
number alone is constant. ``--env=Hopper-v5+distractors10`` adds ten numbers to the observation that only a large model
can predict (`rl.envs.distractors`).

The run folder is that of `experiments.online`, and the same command continues an interrupted run to the same bits.
Checkpoints hold both replays and the model. With a categorical ``--head`` give ``--head_low`` and ``--head_high`` such
that they cover the values that updates see, the entropy bonus of soft agents included (`rl.agents.target_range`); the
message for a head without them says how much that is. Observations are not normalised.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app

from experiments import checks, common, flags, interaction, notes, presets
from rl import agents, keys, mbpo, online
from rl.dynamics import ensemble, termination, value_aware
from rl.dynamics.termination import Rule
from rl.envs.registry import time_limit
from rl.envs.stream import Stream
from rl.interaction import Trainer
from rl.replay.transform import Transform
from rl.settings import require_at_least_one, require_choice
from rl.types import Key, Learner, Spec, Transition

IDENTITY = (
    *interaction.IDENTITY,
    *("model_loss", "model_members", "model_elites", "model_hidden", "model_learning_rate", "model_decay"),
    *("model_batch_size", "model_patience", "model_max_epochs", "model_holdout", "plain_steps"),
    *("retrain_every", "rollouts", "rollout_length", "model_share", "model_replay"),
)


@dataclasses.dataclass(frozen=True)
class Settings(interaction.Settings):
    """Everything about a run that is not the agent's own; defaults are VaGraM's for Hopper."""

    agent: str = (
        "sac"  # sac, td3, dqn for integer actions, or any that explores; with critics if the loss asks them
    )
    env: str = "Hopper-v5"  # environment to learn in; +distractors10 or +noise10 behind it adds distractors
    steps: int = 260_000  # environment steps of each seed, a multiple of --eval_every
    utd: float = 20.0  # updates per environment step
    learning_starts: int = 10_000  # steps with random actions, before the first fit and the first update
    replay: int = mbpo.Config.replay  # steps that are remembered, and that the model learns from
    eval_every: int = 5_000  # steps between evaluations; log and policy are written at each
    save_every: int = 20_000  # steps between checkpoints, which hold both replays and the model
    model_loss: str = (
        "mle"  # mle, mse, standardised, vagram, taylor, vaml, calibrated, value_weighted, anisotropic(_rows)
    )
    loss: value_aware.Settings = value_aware.Settings()  # of those that ask the agent's critics
    plain_steps: int = 1_000  # steps, from where learning begins, in which value-aware losses add plain error
    model_members: int = 7  # networks of the model
    model_elites: int = 5  # best networks of the model, which make rollouts
    model_hidden: tuple[int, ...] = (200, 200, 200, 200)  # widths of the layers of the model's networks
    model_learning_rate: float = 1e-3  # Adam, all networks of the model
    model_decay: float = 5e-5  # L2 of all weights of the model, by gradient
    model_batch_size: int = 1024  # rows per update and network of the model
    model_patience: int = 10  # a fit of the model stops after this many epochs without improvement of 1 %
    model_max_epochs: int = ensemble.Config.max_epochs  # a fit stops after this many epochs in any case
    model_holdout: float = 0.2  # share of the steps that no network of the model learns from
    retrain_every: int = 250  # environment steps between two fits of the model
    rollouts: int = 100_000  # rollouts that are started after each fit of the model
    rollout_length: str = "20000,150000,1,5"  # steps of a rollout: from step, to step, first and last value
    model_share: str = "0,20000,0,0.95"  # share of a batch that is the model's: as --rollout_length
    model_replay: int = 2_000_000  # rows of rollouts that are kept when rollouts are longest


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and its result is returned. When an environment's process dies, all
    environments are built again and start new episodes; nothing that was collected is lost.

    Raises:
      ValueError: settings that cannot be run; the message names the flag. Or an environment whose observations or
        actions agents here cannot use.
      checkpoint.CheckpointError: the run folder holds another run.
      FloatingPointError: the environment returned what is not finite, or the model diverged. What there was before is
        in the last checkpoint.
      RuntimeError: as in `experiments.online.run`.
      train.Diverged: a metric stopped being finite.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    rule = termination.of_environment(settings.env)
    checks.schedules(config, interaction.updates(settings))
    agents.check_data(settings.agent, config, None)
    agents.check_data(settings.agent, config, rolled_row(Spec((1,), 1)))  # of any vectors
    with interaction.stepper(settings) as stream:
        loop = make_loop(settings, config, stream.spec, rule)
        this = common.run(
            settings,
            config,
            settings.steps,
            task=settings.env,
            identity=IDENTITY,
            card={"loss": dataclasses.asdict(settings.loss)},
            variant=settings.model_loss,
            about={"preset": presets.stored("mbpo", settings, config, "env")},
            unit="steps",
            axis="environment steps",
            leaves=(interaction.ACTORS,),
        )
        _print_notes(settings, config, stream.spec)
        trainer, exported = make_trainer(settings, stream, loop), interaction.exported(config)
        return interaction.train(settings, this, trainer, loop.learner, Transform(), **exported)


def _print_notes(settings: Settings, config: Any, spec: Spec) -> None:
    """Prints which flags do nothing."""
    notes.note_unused_by_agent("mbpo", settings, config, "env", spec)
    usual, _ = presets.usual("mbpo", settings, type(config)(), "env")
    notes.note_unread(settings, usual, unused(settings))
    share = schedule("model_share", settings.model_share)
    if share.first == share.last == 0:
        print(
            "note: --model_share=0 draws nothing from rollouts, and they and the model cost what they always do: "
            "experiments.online learns without them",
            file=sys.stderr,
        )


def unused(settings: Settings) -> dict[str, str]:
    """{field: why} of those that ``--model_loss`` does not read."""
    name = settings.model_loss
    reasons = {f"loss.{field}": why for field, why in value_aware.unused(name, settings.loss).items()}
    if name in value_aware.VALUE_FREE:
        reasons["plain_steps"] = f"the model loss {name} is a plain error from first to last"
    return reasons


def rolled_row(spec: Spec) -> Transition:
    """A row of the kind that rollouts in a model are: without the action that came next, and no demonstration."""
    row = online.example(spec)
    return row._replace(discount=jnp.ones(1), has_next_action=jnp.zeros(1))


def make_trainer(settings: Settings, stream: Stream, loop: mbpo.Loop) -> Trainer:
    """The environments, the learners in them, and their models."""
    return Trainer(
        stream,
        loop.learner,
        loop.replay,
        run_keys(settings),
        rhythm=interaction.rhythm(settings),
        learning_starts=settings.learning_starts,
        random=settings.learning_starts,
        preprocessing=Transform(),
        retraining=loop.retraining,
    )


def make_loop(settings: Settings, config: Any, spec: Spec, rule: Rule) -> mbpo.Loop:
    """The learner, its memory and its model.

    Raises:
      ValueError: they do not go together, or with the environment.
    """
    network_config = model_config(settings)
    with checks.named(f"--env={settings.env}: "):
        ensemble.check(network_config, spec)
        termination.check(rule, spec)
    learner = make_learner(settings, config, spec)
    asks = settings.model_loss not in value_aware.VALUE_FREE
    if asks and learner.critics is None:
        raise ValueError(
            f"--model_loss={settings.model_loss} asks the agent's critics for values, and --agent={settings.agent} "
            f"has none: choose another agent, sac say, or --model_loss={' or '.join(value_aware.VALUE_FREE)}"
        )
    loss = value_aware.make(
        settings.model_loss, value_aware.of_learner(learner) if asks else None, settings.loss
    )
    updates, period = interaction.rhythm(settings)
    seeds = run_keys(settings)
    return mbpo.make(
        loop_config(settings),
        learner,
        ensemble.make(network_config, spec, loss),
        rule,
        seeds,
        mbpo.Rhythm(updates, period, settings.envs, settings.learning_starts),
        mbpo.value_context(seeds, spec.observation_shape[0], settings.plain_steps) if asks else None,
    )


def make_learner(settings: Settings, config: Any, spec: Spec) -> Learner:
    """The agent; ``--head_low`` and ``--head_high`` are the ends of its head's support, as they are given.

    Raises:
      ValueError: the head needs them; the message says how far the targets reach beyond what rewards give.
    """
    interaction.check_head(settings, config, spec)
    _, head = common.value_head(settings, (0.0, 1.0))  # of heads without a support
    return common.learner(settings.agent, config, spec, head)


def run_keys(settings: Settings) -> Key:
    """Of the seeds, [S]."""
    return keys.seeds(jax.random.key(settings.seed), settings.seeds)


def model_config(settings: Settings) -> ensemble.Config:
    """The networks of the model, and how they are fitted."""
    hidden = settings.model_hidden
    return ensemble.Config(
        members=settings.model_members,
        elites=settings.model_elites,
        hidden=hidden,
        decay=(settings.model_decay,) * (len(hidden) + 1),
        deterministic=value_aware.is_deterministic(settings.model_loss),
        learning_rate=settings.model_learning_rate,
        batch_size=settings.model_batch_size,
        holdout=settings.model_holdout,
        patience=settings.model_patience,
        min_epochs=0,
        max_epochs=settings.model_max_epochs,
    )


def loop_config(settings: Settings) -> mbpo.Config:
    """The loop's settings, with the schedules read."""
    shared = {field.name for field in dataclasses.fields(mbpo.Config)} & {
        field.name for field in dataclasses.fields(settings)
    }
    chosen = {name: getattr(settings, name) for name in shared}
    schedules = {name: schedule(name, chosen[name]) for name in ("rollout_length", "model_share")}
    return mbpo.Config(**{**chosen, **schedules})


def schedule(flag: str, text: str) -> mbpo.Schedule:
    """The schedule in a flag's text: start, end, first value, last value; or one value.

    Raises:
      ValueError: it is neither; the message names the flag.
    """
    numbers = [checks.number(flag, word) for word in text.split(",")]
    if len(numbers) == 1:
        return mbpo.Schedule(0, 0, *numbers * 2)
    if len(numbers) != 4:
        raise ValueError(
            f"--{flag}={text}: a schedule is four numbers, from step, to step, first value, last value, or one value"
        )
    return mbpo.Schedule(int(numbers[0]), int(numbers[1]), *numbers[2:])


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    interaction.check(settings)
    checks.multiple(settings, "learning_starts", "envs")
    checks.multiple(settings, "retrain_every", "envs")
    require_at_least_one(settings, "model_members", "model_elites", "model_batch_size", prefix="--")
    require_choice("model_loss", settings.model_loss, value_aware.LOSSES, prefix="--")
    if settings.plain_steps < 0:
        raise ValueError(f"--plain_steps={settings.plain_steps} must not be negative")
    loop = loop_config(settings)
    with checks.named("--"):
        mbpo.check(loop)
    limit = time_limit(settings.env)
    if limit and mbpo.longest(loop) > limit:
        raise ValueError(
            f"--rollout_length={settings.rollout_length}: episodes of {settings.env} end after {limit} steps"
        )
    with checks.named("--model_"):
        ensemble.check(model_config(settings), Spec((1,), 1))  # of any vector


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def main(_: list[str]) -> None:
    notes.show(run(*presets.from_flags("mbpo", PUBLISHED, common.config, "env")))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, common.config))
