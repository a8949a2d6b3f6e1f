r"""Train an agent in its environment and in a model of it, several seeds at once, and say how good it is.

    python -m experiments.mbpo --agent=sac --env=Hopper-v5 --model_loss=vagram

is VaGraM (Voelcker et al., ICLR 2022), and ``--model_loss=mle`` is MBPO (Janner et al., NeurIPS 2019): see `rl.mbpo`. A
model of the environment is learned from all steps so far, again and again; short rollouts in it fill a second replay,
and most batches of the agent are drawn from that one. ``--model_loss`` is one of `rl.dynamics.value_aware`.

Schedules are four numbers, as in the papers: ``--rollout_length=20000,150000,1,5`` is rollouts of one step for the first
20,000 environment steps after ``--learning_starts``, of five from 150,000 on, and between in between. One number alone
is constant. ``--env=Hopper-v5+distractors10`` adds ten numbers to the observation that only a large model can predict
(`rl.envs.distractors`).

The run folder is that of `experiments.online`, and the same command continues an interrupted run to the same bits.
Checkpoints hold both replays and the model. With a categorical ``--head`` give ``--head_low`` and ``--head_high`` such
that they cover the values that updates see, the entropy bonus of soft agents included (`rl.agents.target_range`); the
message for a head without them says how much that is. Observations are not normalised.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import jax
from absl import app

from experiments import common, flags, interaction, presets
from rl import agents, keys, lifecycle, mbpo
from rl.dynamics import ensemble, termination, value_aware
from rl.dynamics.termination import Rule
from rl.envs import distractors
from rl.envs.stream import Stream
from rl.interaction import Trainer
from rl.replay.transform import Transform
from rl.types import Key, Learner, Spec
from rl.values import heads

_IDENTITY = (
    *interaction.IDENTITY,
    *("model_loss", "model_members", "model_elites", "model_hidden", "model_learning_rate", "model_decay"),
    *("model_batch_size", "model_patience", "model_max_epochs", "model_holdout", "plain_steps"),
    *("retrain_every", "rollouts", "rollout_length", "model_share", "model_replay"),
)


@dataclasses.dataclass(frozen=True)
class Settings(interaction.Settings):
    """Everything about a run that is not the agent's own; defaults are VaGraM's for Hopper."""

    agent: str = "sac"  # sac, td3, dqn for integer actions, or any that explores; with critics if the loss asks them
    env: str = "Hopper-v5"  # environment to learn in; +distractors10 or +noise10 behind it adds distractors
    steps: int = 260_000  # environment steps of each seed
    utd: float = 20.0  # updates per environment step
    learning_starts: int = 10_000  # steps with random actions, before the first fit and the first update
    replay: int = 260_000  # steps that are remembered, and that the model learns from
    eval_every: int = 5_000  # steps between evaluations; log and policy are written at each
    save_every: int = 20_000  # steps between checkpoints, which hold both replays and the model
    model_loss: str = "mle"  # mle, mse, vagram, taylor, vaml, calibrated, value_weighted, anisotropic, ...
    loss: value_aware.Settings = value_aware.Settings()  # of those that ask the agent's critics
    plain_steps: int = 1_000  # steps in which these add plain error, from where learning begins
    model_members: int = 7  # networks of the model
    model_elites: int = 5  # of which the best make rollouts
    model_hidden: tuple[int, ...] = (200, 200, 200, 200)  # widths of their layers
    model_learning_rate: float = 1e-3  # Adam
    model_decay: float = 5e-5  # L2 of all weights, by gradient
    model_batch_size: int = 1024  # rows per update and network
    model_patience: int = 10  # a fit stops after so many epochs without improvement of 1 %
    model_max_epochs: int = ensemble.Config.max_epochs  # or after so many in any case
    model_holdout: float = 0.2  # share of the steps that no network learns from
    retrain_every: int = 250  # environment steps between two fits
    rollouts: int = 100_000  # started after each
    rollout_length: str = "20000,150000,1,5"  # their steps: from step, to step, first value, last value
    model_share: str = "0,20000,0,0.95"  # of batches that are the model's: a schedule as --rollout_length
    model_replay: int = 2_000_000  # rows of rollouts that are kept when these are longest


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and its result is returned. When an environment's process dies, all
    environments are built again and start new episodes; nothing that was collected is lost.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      TypeError: an environment whose observations or actions agents here cannot use.
      checkpoint.CheckpointError: the run folder holds another run.
      FloatingPointError: the environment returned what is not finite, or the model diverged. What there was before is
        in the last checkpoint.
      RuntimeError: as in `experiments.online.run`.
      train.Diverged: a metric stopped being finite.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    rule = termination_rule(settings.env)
    common.check_schedules(config, int(settings.steps * settings.utd))
    run_keys = keys.seeds(jax.random.key(settings.seed), settings.seeds)
    with ExitStack() as stack:
        stream = stack.enter_context(interaction.stepper(settings))
        learner = make_learner(settings, config, stream.spec)
        trainer = make_trainer(settings, stream, learner, rule, run_keys)
        this = common.run(
            settings,
            config,
            settings.steps,
            task=settings.env,
            identity=_IDENTITY,
            card={"loss": dataclasses.asdict(settings.loss)},
            about={"preset": presets.stored("mbpo", settings, "env")},
            unit="steps",
            axis="environment steps",
            leaves=(interaction.ACTORS,),
            label=f"{settings.agent}, {settings.head}, {settings.model_loss}",
            suffix=f"-{settings.model_loss}",
        )
        return interaction.train(settings, this, trainer, learner, Transform(), ...)
