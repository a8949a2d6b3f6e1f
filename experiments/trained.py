"""The policies of a run of `experiments.offline` or `experiments.online`: to test in new episodes, or to act with.

    python -m experiments.trained --run=runs/hopper-medium-regen-v5/iql-scalar --episodes=100
    python -m experiments.trained --run=runs/hopper-medium-regen-v5/iql-scalar --environment=Hopper-v4

All seeds of the run are played, by what its newest checkpoint holds. Training evaluates in other episodes than these,
so that a policy that was chosen by its scores is tested on new ones. From Python:

    from experiments import trained
    from rl import envs

    policies = trained.load("runs/hopper-medium-regen-v5/iql-scalar")
    env, act = envs.make(policies.environment), trained.player(policies, member=0)
    observation, _ = env.reset(seed=0)
    action = act(observation, first=True)    # then act(observation) until the episode is over

Observations are the environment's own. Actions lie in [-1, 1], to which `rl.envs.make` scales those of an environment,
or are integers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from experiments import common, flags, logged
from rl import acting, checkpoint, envs, evaluate, lifecycle, log, nest, online, statistics, train
from rl.data import d4rl
from rl.data.files import expanded
from rl.data.steps import same_task
from rl.replay import chunks, transform
from rl.types import Actor, Spec, State
from rl.values import heads

_NEW = 2**31 - 1  # number of an evaluation that no training gets to


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about a test."""

    run: str = ""  # the run's folder
    environment: str = ""  # where to play; "": where the run was evaluated
    episodes: int = 100  # of each seed's policy
    seed: int = 0  # of the episodes
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none


class Policies(NamedTuple):
    """The policies of all seeds of a run, and of all its variants if it was a sweep; those of one after another."""

    environment: str
    spec: Spec
    state: State  # [P, ...]
    actor: Actor  # of all at once, which sees the environment's own observations
    labels: tuple[str, ...]  # of the variants, one for each; ("",) of a run that is no sweep
    count: int  # P, which is the number of seeds times that of variants
    step: int  # of the checkpoint
    reference: tuple[float, float] | None  # (random, expert) return, if the run's scores were normalised

    def __repr__(self) -> str:
        return f"Policies({self.environment}, {self.count} policies, step {self.step})"


def load(run: str | Path, environment: str = "") -> Policies:
    """The policies of the run in a folder, as its newest checkpoint has them.

    Args:
      run: the folder.
      environment: that they act in; "" for that of the run.

    Raises:
      ValueError: there is no checkpoint, it is of another script, or it does not fit the environment.
    """
    folder = expanded(str(run))
    record, arrays = _checkpoint(folder)
    card, own = record["card"], _environment(record["card"], folder)
    name = environment or own
    if not name:
        raise ValueError(f"--run={run} does not say where it was evaluated: give --environment")
    spec, types = _shown(name)
    if own and name != own and spec != (of_run := _shown(own)[0]):
        raise ValueError(f"--environment={name} has {spec}; the run was trained in {own}, which has {of_run}")
    sweep = card.get("sweep") or {}
    labels = tuple(lifecycle.labels(logged.parameters(sweep))) or ("",)
    count = card["settings"]["seeds"] * len(labels)
    several = _population(card, spec, sweep)
    example = online.example(chunks.spec(spec, card["settings"].get("chunk", 1)), types)
    like = jax.eval_shape(several.init, jax.random.split(jax.random.key(0), count), example)
    try:
        common.check_actions(card, spec)
        state = common.placed_state(arrays, like)
    except ValueError as error:
        raise ValueError(f"--run={run} does not fit {name}: {error}") from None
    how = transform.from_json(card["transform"])
    actor = acting.observing(several.actor, functools.partial(transform.observations, how))
    scale = reference(folder, card, name, own)
    return Policies(name, spec, state, actor, labels, count, record["step"], scale)


def _checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a run's newest checkpoint says, and its arrays. Raises ValueError where there is none of these scripts."""
    record, arrays = checkpoint.read(folder / lifecycle.CHECKPOINTS) or (None, {})
    if record is None:
        below = sorted(str(path.parent) for path in folder.glob(f"*/{lifecycle.CHECKPOINTS}"))
        hint = f"; runs below it are {', '.join(below[:5])}" if below else ""
        raise ValueError(f"--run={folder}: there is no checkpoint{hint}")
    if not {"transform", "support", "settings"} <= set(record["card"]):
        raise ValueError(f"--run={folder} is no run of experiments.offline or experiments.online")
    if "protocol" in record["card"]["settings"]:
        raise ValueError(
            f"--run={folder} is a run of experiments.goals, whose policies act towards a goal: the command that made "
            "it draws episodes of each task with --render=3"
        )
    return record, arrays


def _shown(environment: str) -> tuple[Spec, Any]:
    """What an environment shows and takes, and the types of what it shows."""
    env = envs.make(environment)
    space, spec = env.observation_space, envs.spec(env)
    env.close()
    return spec, nest.map_structure(lambda box: np.uint8 if box.dtype == np.uint8 else np.float32, space)


def _population(card: Mapping[str, Any], spec: Spec, sweep: Mapping[str, Any]) -> train.Population:
    """The learners of a run, to act with."""
    settings = card["settings"]
    decisions = settings.get("chunk", 1), settings.get("replan_every", 0)
    head = heads.make(
        settings["head"],
        *(card["support"] or ()),
        size=settings["head_size"],
        start=_start(settings),
        kappa=settings.get("head_kappa", 1.0),
    )
    make = lambda config: common.learner(card["agent"], config, spec, head, *decisions)
    swept = {name: np.repeat(np.float32(values), settings["seeds"]) for name, values in sweep.items()}
    config = flags.with_fields(common.config(card["agent"]), card["config"])
    return train.population(make, config, lambda *_: None, 1, sweep=swept)


def _environment(card: Mapping[str, Any], folder: Path) -> str:
    """Where a run was evaluated; "" where nothing says it."""
    if "environment" in card:
        return card["environment"] or ""
    # Of runs online, and of those whose checkpoints do not say it.
    settings = card["settings"]
    result = log.read_json(folder / log.RESULT) if (folder / log.RESULT).exists() else {}
    return settings.get("env") or settings.get("environment") or result.get("environment") or ""


def reference(
    folder: Path, card: Mapping[str, Any], environment: str, own: str
) -> tuple[float, float] | None:
    """The (random, expert) return by which scores in an environment are normalised; None where they are not.

    It is that of the run, in any version of its ``own`` environment. Of runs that do not say it, it is D4RL's of a
    locomotion task, if their scores were normalised.
    """
    if "reference" in card:
        return tuple(card["reference"]) if card["reference"] and same_task(environment, own) else None
    with contextlib.suppress(FileNotFoundError, ValueError):
        if any("eval/normalized_return" in row for row in log.read(folder)):
            return d4rl.locomotion_reference(environment)
    return None


def _start(settings: Mapping[str, Any]) -> float | None:
    """The value that the head's networks add to (`rl.values.heads.make`)."""
    start = settings.get("head_start")
    return None if start is None or np.isnan(start) or settings["head"] in common.UNBOUNDED else start


def player(policies: Policies, member: int = 0, seed: int = 0) -> Callable[..., np.ndarray]:
    """One of the policies as a function of what one environment shows: ``act(observation, first=False)``.

    Args:
      policies: as `load` gives them.
      member: which, from 0.
      seed: of the draws of a policy that is random, or plans by chance.

    ``first`` must be True at the first observation of each episode: agents that decide on several actions at once, or
    plan, remember.
    """
    if not 0 <= member < policies.count:
        raise ValueError(f"member={member}, but the run has {policies.count} policies, counted from 0")
    memory, key = None, jax.random.key(seed)
    act = jax.jit(acting.resetting(policies.actor).act)

    def step(observation: Any, first: bool = False) -> np.ndarray:
        nonlocal memory, key
        shown = nest.map_structure(
            lambda x: jnp.stack([jnp.asarray(x)] * policies.count)[:, None], observation
        )
        if memory is None:
            memory = policies.actor.start(policies.state, shown)
        key, now = jax.random.split(key)
        begins = np.full((policies.count, 1), first)
        action, memory = act(policies.state, memory, shown, begins, jax.random.split(now, policies.count))
        return np.asarray(action[member, 0])

    return step


def scores(policies: Policies, settings: Settings, index: int = _NEW) -> dict[str, np.ndarray]:
    """{"return": [P, episodes], ...} of new episodes, as `rl.evaluate.Evaluator` gives them.

    Args:
      policies: as `load` gives them.
      settings: how many episodes, and of which seed.
      index: number of the evaluation, which decides its episodes. Those of training count from 0.
    """
    with evaluate.evaluator(
        policies.actor,
        policies.environment,
        seeds=policies.count,
        episodes=settings.episodes,
        processes=None if settings.eval_processes < 0 else settings.eval_processes,
        reference=policies.reference,
        base_seed=settings.seed,
    ) as episodes:
        return episodes(policies.state, index)


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    if not settings.run:
        raise ValueError("give the folder of a run: --run=runs/hopper-medium-regen-v5/iql-scalar")
    common.at_least_one(settings, "episodes")
    policies = load(settings.run, settings.environment)
    for name, every in scores(policies, settings).items():
        for label, each in zip(policies.labels, np.split(every, len(policies.labels)), strict=True):
            of = statistics.summary(each.mean(1), rate=name in lifecycle.RATES)
            low, high = of["ci95"]
            spread = "" if np.isnan(low) else f", 95 % interval [{low:.4g}, {high:.4g}] over seeds"
            several = f"{label}: " if label else ""
            print(
                f"{several}{name}: {of['mean']:.4g}{spread}; each: {' '.join(f'{x:.4g}' for x in of['each'])}"
            )
    print(
        f"{settings.episodes} new episodes of {policies.environment} for each of {policies.count} policies, as they "
        f"are after step {policies.step} of {settings.run}."
    )


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
