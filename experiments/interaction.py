"""What scripts share that learn while they act: settings, environments, the loop from evaluation to evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks, common
from rl import acting, agents, checkpoint, lifecycle, on_device, run_folder
from rl.envs import functional, registry
from rl.envs.stream import Stream
from rl.interaction import Trainer
from rl.replay import chunks, transform
from rl.replay.transform import Transform
from rl.settings import require_at_least_one
from rl.train import STACKED, Diverged
from rl.types import Learner, Spec, State
from rl.values import heads

# Settings that another checkpoint in the same folder must agree on.
IDENTITY = (
    *("env", "head", "head_size", "head_low", "head_high", "seeds", "seed", "envs", "utd", "learning_starts"),
    *("replay", "batch_size", "eval_every", "eval_episodes"),
)
ACTORS = "actors"  # in the run folder: the policy of every evaluation
_SEEDS = 0x5EED0  # told from other uses of the run's seed by its first word


@dataclasses.dataclass(frozen=True)
class Settings(common.Head, common.Folder):
    """Settings: what is learned, where and how long, and how often that is evaluated."""

    agent: str = "sac"  # which agent learns
    preset: str = "none"  # published settings, --steps among them: paper or none; flags override it
    env: str = "HalfCheetah-v5"  # environment to learn in, by its gymnasium name
    head_low: float = float("nan")  # lower end of a categorical head's support
    head_high: float = float("nan")  # upper end of a categorical head's support
    seeds: int = 1  # seeds trained at once, each with its own environments and replay
    seed: int = 0  # the run's own seed: another value gives other seeds
    steps: int = 1_000_000  # environment steps of each seed, a multiple of --eval_every
    envs: int = 1  # environments of each seed, stepped together
    env_processes: int = -1  # worker processes of environments; -1: none for one, else one per core
    utd: float = 1.0  # updates per environment step; 0.25 is one in four steps
    learning_starts: int = 5_000  # steps with random actions, before the first update
    replay: int = 1_000_000  # environment steps that are remembered
    batch_size: int = 256  # transitions per update
    eval_every: int = 10_000  # steps between evaluations; log and policy are written at each
    eval_episodes: int = 10  # episodes per seed and evaluation, at least 2
    eval_processes: int = -1  # worker processes of evaluations; -1: one per core, 0: none
    save_every: int = 100_000  # steps between checkpoints, which hold the whole replay


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    checks.one_process()
    require_at_least_one(
        settings, "seeds", "steps", "envs", "replay", "batch_size", "eval_every", "save_every", prefix="--"
    )
    checks.not_negative(settings, "seed")
    checks.head(settings)
    checks.several_episodes(settings)
    if not 0 < settings.utd < math.inf:
        raise ValueError(f"--utd must be positive and finite, not {settings.utd}")
    rhythm(settings)
    for whole, part in (("steps", "envs"), ("eval_every", "envs"), ("steps", "eval_every")):
        checks.multiple(settings, whole, part)
    if settings.save_every < settings.steps:  # else there is a checkpoint at the end alone
        checks.multiple(settings, "save_every", "eval_every")
    if settings.replay < settings.envs:
        raise ValueError(
            f"--replay={settings.replay} does not hold one step of --envs={settings.envs}: give at least that"
        )
    if settings.learning_starts < 1:
        raise ValueError(
            "--learning_starts must be at least 1: there is nothing to draw before the first step"
        )
    if settings.learning_starts >= settings.steps:
        raise ValueError(
            f"--learning_starts={settings.learning_starts} leaves nothing of --steps={settings.steps} to learn in: "
            "give fewer steps of random actions, a tenth say, or a longer run"
        )


def check_head(settings: Settings, config: Any, spec: Spec) -> None:
    """Raises ValueError, naming the flags, if the head's support is missing.

    The message says how far targets reach beyond what rewards give.
    """
    given = not (math.isnan(settings.head_low) or math.isnan(settings.head_high))
    if given or not heads.has_support(settings.head):
        return
    length = getattr(settings, "chunk", 1)
    decides = common.of_decisions(config, length), chunks.spec(spec, length)
    below, above = agents.target_range(settings.agent, *decides, 0.0, 0.0)
    beyond = ""
    if above > below and math.isfinite(above - below):
        beyond = (
            f"; what {settings.agent} adds to rewards, such as entropy, can shift targets by {below:.4g} to "
            f"{above:+.4g}"
        )
    raise ValueError(
        f"--head={settings.head} needs --head_low and --head_high, the smallest and largest value it must "
        f"represent: online they cannot be taken from data{beyond}"
    )


def rhythm(settings: Settings) -> tuple[int, int]:
    """How many updates are made after every how many steps of the environments together.

    Raises:
      ValueError: the ratio of updates to steps does not come out even.
    """
    exact = Fraction(settings.utd) * settings.envs
    ratio = exact.limit_denominator(1_000_000)
    if 1 not in (ratio.numerator, ratio.denominator) or abs(ratio / exact - 1) > 1e-6:
        raise ValueError(
            f"--utd={settings.utd} times --envs={settings.envs} must be a whole number, or one over a whole number"
        )
    return ratio.numerator, ratio.denominator


def updates(settings: Settings) -> int:
    """How many updates a run makes."""
    (count, period), first = rhythm(settings), max(settings.learning_starts, 1)
    steps = settings.envs * period  # from one time of updates to the next
    return count * (settings.steps // steps - (first - 1) // steps)


def stepper(settings: Settings) -> Stream:
    """The environments to learn in."""
    processes = settings.env_processes if settings.env_processes >= 0 else None
    alone = settings.seeds * settings.envs == 1
    return Stream(
        settings.env,
        [
            (_SEEDS, settings.seed, seed, number)
            for seed in range(settings.seeds)
            for number in range(settings.envs)
        ],
        0 if processes is None and alone else processes,
    )


def train(
    settings: Settings,
    run: run_folder.Run,
    trainer: Trainer | on_device.Trainer,
    learner: Learner,
    preprocessing: Transform,
    initial: Callable[[], State | None] = lambda: None,
    *,
    slow: bool = False,
    whole: bool = False,
) -> dict[str, Any]:
    """Trains, evaluates and reports from wherever the run is; returns what result.json holds.

    Args:
      settings: of the script.
      run: where it lives.
      trainer: not yet started.
      learner: that it trains.
      preprocessing: how the learner sees observations.
      initial: the state that a run begins with, if not a fresh one: it is evaluated first, at step 0.
      slow: whether the policies that are exported are the slow ones (`export`).
      whole: whether all networks are exported with them.
    """
    common.check(run)
    start = lifecycle.begin(run, trainer.saved())
    if start.result is not None:
        return start.result
    trained = initial() if start.step == 0 else None  # also where the run was stopped before its first step
    if start.resumed:
        trainer.resume(start.tree, start.step, run_folder.notes(run, start.step))
    else:
        trainer.start(trained)
    with (
        scorer(settings, learner, preprocessing) as score,
        lifecycle.session(run, start) as session,
    ):
        (run.folder / ACTORS).mkdir(exist_ok=True)
        write = functools.partial(export, slow=slow, whole=whole)
        if trained is not None:
            session.write(0, score(trainer.carry.state, 0))
            write(run.folder / ACTORS / "0.npz", trainer.carry.state)
        _learn(settings, trainer, score, session, run.folder, write)
        return session.finish(updates=int(trainer.carry.state.step), deaths=trainer.deaths)


def _learn(
    settings: Settings,
    trainer: Trainer | on_device.Trainer,
    score: Callable[[State, int], dict[str, np.ndarray]],
    session: lifecycle.Session,
    folder: Path,
    write: Callable[[Path, State], None],
) -> None:
    """From evaluation to evaluation until the end, or until asked to stop."""
    while trainer.evaluated < settings.steps:
        due = trainer.evaluated + settings.eval_every
        try:
            trainer.advance(due, session.bar, session.stopping)
            trainer.check()  # first: actions of a policy that diverged would be an environment's fault
            scores = score(trainer.carry.state, due // settings.eval_every) if trainer.step == due else None
        except Exception as error:
            if trainer.whole and not isinstance(error, Diverged):
                _check(trainer, error)
                session.save(trainer.step, trainer.saved(), trainer.notes())
            raise
        if scores is not None:
            session.write(due, trainer.read() | scores)
            write(folder / ACTORS / f"{due}.npz", trainer.carry.state)
            trainer.evaluated = due
        saving = scores is not None and (due % settings.save_every == 0 or due == settings.steps)
        session.keep(trainer.step, trainer.saved(), trainer.notes, due=saving)


def _check(trainer: Trainer | on_device.Trainer, error: Exception) -> None:
    """Raises `Diverged` from ``error`` if the learners have: what was not finite is theirs, and must not be saved."""
    try:
        trainer.check()
    except Diverged as cause:
        raise cause from error


@contextmanager
def scorer(
    settings: Settings, learner: Learner, preprocessing: Transform
) -> Iterator[Callable[[State, int], dict[str, np.ndarray]]]:
    """A function (state, number of the evaluation) -> {"eval/...": [S, episodes]}.

    On the CPU, or where the learner is if the environment is JAX, too.
    """
    actor = acting.over_seeds(acting.actor(learner), STACKED)
    actor = acting.observing(actor, functools.partial(transform.observations, preprocessing))
    if registry.is_functional(settings.env):
        world = functional.make(settings.env)
        play = on_device.evaluator(world, actor, settings.eval_episodes, settings.seeds, settings.seed)
        yield lambda state, index: {f"eval/{name}": x for name, x in play(state, index).items()}
        return
    with common.evaluator(settings, actor, settings.env, settings.seeds) as episodes:
        yield common.on_cpu(episodes)


def export(path: Path, state: State, *, slow: bool = False, whole: bool = False) -> None:
    """Writes what acts, alone: the policy's parameters or, where there is none, those of Q, [S, ...] each.

    An agent that has neither acts by several networks (``fql`` by the best draws of its flow): those of all. With
    ``slow`` those of the target network, by which an agent acts whose config has ``slow_policy``; with ``whole`` of
    all networks (`acts_by_critics`).
    """
    acting = state.target if slow else state.params
    checkpoint.export(path, acting if whole else acting.get("policy", acting.get("q", acting)))


def exported(config: Any) -> dict[str, Any]:
    """Which networks `export` must write of an agent with this config: its arguments ``slow`` and ``whole``."""
    return {"slow": getattr(config, "slow_policy", False), "whole": acts_by_critics(config)}


def acts_by_critics(config: Any) -> bool:
    """Whether an agent acts by the best of several draws of its policy (``ifql``), which its critics choose."""
    chooses = getattr(config, "extraction", "best_of") == "best_of"
    return chooses and getattr(config, "candidates", 1) > 1
