r"""Train an agent in its environment, several seeds at once, and say how good it is.

    python -m experiments.online --agent=sac --env=HalfCheetah-v5 --steps=1000000

The run folder holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json, the policy of every
evaluation under actors/ and checkpoints; the same command continues an interrupted run, to the same bits where the
environment can be put back into the middle of an episode (classic control and MuJoCo can) and with new episodes
elsewhere. ``--agent=NAME --help`` lists an agent's own hyper-parameters.

DQN on Atari games (extra: atari) by Dopamine's protocol, whose numbers then stand where no flag says otherwise. A
million steps are remembered in 7.07 GB, the frames once as uint8, stacked on the device when they are drawn:

    python -m experiments.online --agent=dqn --env=ALE/Pong-v5 --head=hl_gauss

A MuJoCo task from pixels, with DrQ's random shifts; 100,000 steps are remembered in 2.1 GB:

    python -m experiments.online --agent=cqn --env=pixels/InvertedPendulum-v5 --agent.network.shift=4 --replay=100000

Fine-tuning what `experiments.offline` trained, half of every batch from the log:

    python -m experiments.online --agent=iql --env=Hopper-v5 --init_from=runs/hopper-medium-v2/iql-scalar \
        --offline_data=hopper-medium-v2 --offline_ratio=0.5

From demonstrations, half of every batch, that successful episodes join; without ``--offline_data``, from scratch:

    python -m experiments.online --agent=sac --env=AdroitHandDoor-v1 --offline_data=door_human.hdf5 --clip_actions \
        --relabel_success=success
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from experiments import common, flags, presets
from rl import acting, agents, checkpoint, data, keys, lifecycle, online, train
from rl.envs.registry import stacked_frames
from rl.envs.stream import Stream
from rl.interaction import FINAL_SUCCESS, SUCCESS, Trainer
from rl.replay import dataset as replays
from rl.replay import transform
from rl.replay.dataset import Dataset
from rl.replay.transform import Transform
from rl.types import Learner, Spec, State
from rl.values import heads

_IDENTITY = (
    *("env", "head", "head_size", "head_low", "head_high", "seeds", "seed", "envs", "utd", "learning_starts"),
    *("replay", "batch_size", "n_step", "eval_every", "eval_episodes", "init_from", "offline_data"),
    *("offline_ratio", "clip_actions", "relabel_success", "priority", "priority_correction"),
)
_ACTORS = "actors"  # in the run folder: the policy of every evaluation
_SEEDS = 0x5EED0  # told from other uses of the run's seed by its first word


@dataclasses.dataclass(frozen=True)
class Settings(common.Head, common.Folder):
    """Everything about a run that is not the agent's own."""

    agent: str = "sac"  # sac, td3, dqn, arsq, cqn; or, to fine-tune: iql, cql, td3_bc, sac_n, edac, my.agent
    preset: str = "none"  # published settings where no flag says otherwise: paper, of the task's family; none
    env: str = "HalfCheetah-v5"  # environment to learn in, by its gymnasium name
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: as --init_from has it
    head_high: float = float("nan")  # upper end; nan: as --init_from has it
    seeds: int = 1  # seeds trained at once, each with its own environments and replay
    seed: int = 0  # the run's own seed: another value gives other seeds
    steps: int = 1_000_000  # environment steps of each seed
    envs: int = 1  # environments of each seed, stepped together
    env_processes: int = -1  # worker processes for them; -1: none for one environment, else one per core
    utd: float = 1.0  # updates per environment step; 0.25 is one in four steps
    learning_starts: int = 5_000  # steps with random actions, before the first update
    replay: int = 1_000_000  # steps that are remembered
    batch_size: int = 256  # transitions per update
    n_step: int = 1  # steps in each transition
    priority: float = 0.0  # exponent of a step's loss in its chance to be drawn (dqn, arsq, cqn); 0: alike
    priority_correction: float = 0.5  # exponent of the weights that take the bias out of such draws
    reward_scale: str = ""  # factor on rewards, or return_range (of --offline_data); "": as --init_from, or 1
    reward_shift: float = float("nan")  # added to every reward after scaling; nan: as --init_from, or 0
    clip_rewards: bool = False  # then clip them to [-1, 1]; so does a run that goes on with one that did
    eval_every: int = 10_000  # steps between evaluations; log and policy are written at each
    eval_episodes: int = 10  # episodes per seed and evaluation, at least 2
    eval_processes: int = -1  # worker processes for them; -1: one per core, 0: none
    save_every: int = 100_000  # steps between checkpoints, which hold the whole replay
    init_from: str = ""  # run folder of experiments.offline or experiments.online to start from
    offline_data: str = ""  # dataset to mix in: name, minari:ID, or file
    offline_ratio: float = 0.5  # share of each batch that is drawn from it
    clip_actions: bool = False  # clip its actions that lie outside the action box; an error without it
    relabel_success: str = ""  # episodes that join it: success, final_success, or the least last reward


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and its result is returned. When an environment's process dies,
    all environments are built again and start new episodes; nothing that was collected is lost.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      TypeError: an environment whose observations or actions agents here cannot use.
      checkpoint.CheckpointError: the run folder holds another run.
      FloatingPointError: the environment returned a reward or an observation that is not finite.
      RuntimeError: an environment failed, or its process died twice at once. Whenever an environment ends the
        run, what was collected before is in the last checkpoint, and the same command goes on with new episodes.
      train.Diverged: a metric stopped being finite.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    before = _source(settings)[1]["state/step"].item() if settings.init_from else 0
    common.check_schedules(config, before + int(settings.steps * settings.utd))
    with ExitStack() as stack:
        stream = stack.enter_context(stepper(settings))
        loaded = mixture(settings, stream.spec)
        agents.check_data(settings.agent, config, loaded.dataset.transitions if loaded else None)
        seen = transformation(settings, loaded)
        learner, replay = parts(settings, config, stream.spec)
        logged = demonstrations(settings, config, seen, loaded) if loaded else None
        trainer = make_trainer(settings, stream, learner, replay, seen, logged)
        this = common.run(
            settings,
            config,
            settings.steps,
            task=settings.env,
            identity=_IDENTITY,
            card={"transform": transform.to_json(seen)},
            about={"preset": presets.stored("online", settings, "env")},
            unit="steps",
            axis="environment steps",
            leaves=(_ACTORS,),
        )
        start = lifecycle.begin(this, trainer.saved())
        if start.result is not None:
            return start.result
        if start.resumed:
            trainer.resume(start.tree, start.step, lifecycle.notes(this))
        else:
            trainer.start(initial(settings, config, learner, stream.spec) if settings.init_from else None)
        score = stack.enter_context(scorer(settings, learner, seen))
        session = stack.enter_context(lifecycle.session(this, start))
        (this.folder / _ACTORS).mkdir(exist_ok=True)
        slow = getattr(config, "slow_policy", False)
        _learn(settings, trainer, score, session, this.folder, slow)
        return session.finish(updates=int(trainer.carry.state.step), deaths=trainer.deaths)


def _learn(
    settings: Settings,
    trainer: Trainer,
    score: Callable[[State, int], dict[str, np.ndarray]],
    session: lifecycle.Session,
    folder: Path,
    slow: bool,
) -> None:
    """From evaluation to evaluation until the end, or until asked to stop."""
    while trainer.evaluated < settings.steps:
        due = trainer.evaluated + settings.eval_every
        try:
            trainer.advance(due, session.bar, session.stopping)
            scores = score(trainer.carry.state, due // settings.eval_every) if trainer.step == due else None
        except Exception:
            if trainer.whole:
                session.save(trainer.step, trainer.saved(), trainer.notes())
            raise
        if scores is not None:
            session.write(due, trainer.read() | scores)
            export(folder / _ACTORS / f"{due}.npz", trainer.carry.state, slow=slow)
            trainer.evaluated = due
        saving = scores is not None and (due % settings.save_every == 0 or due == settings.steps)
        session.keep(trainer.step, trainer.saved(), trainer.notes, due=saving)


def make_trainer(
    settings: Settings,
    stream: Stream,
    learner: Learner,
    replay: online.Replay,
    seen: Transform,
    logged: Dataset | None,
) -> Trainer:
    """The environments and the learners in them; with ``--init_from``, no action is drawn at random."""
    return Trainer(
        stream,
        learner,
        replay,
        keys.seeds(jax.random.key(settings.seed), settings.seeds),
        rhythm=rhythm(settings),
        learning_starts=settings.learning_starts,
        random=0 if settings.init_from else settings.learning_starts,
        seen=seen,
        logged=logged,
        success=success(settings),
    )


def rhythm(settings: Settings) -> tuple[int, int]:
    """How many updates are made after every how many steps of the environments together.

    Raises:
      ValueError: the ratio of updates to steps does not come out even.
    """
    ratio = Fraction(settings.utd).limit_denominator(1000) * settings.envs
    if 1 not in (ratio.numerator, ratio.denominator) or abs(ratio / settings.envs - settings.utd) > 1e-9:
        raise ValueError(
            f"--utd={settings.utd} times --envs={settings.envs} must be a whole number, or one over a whole number"
        )
    return ratio.numerator, ratio.denominator


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    common.at_least_one(
        settings, "seeds", "steps", "envs", "replay", "batch_size", "n_step", "eval_every", "save_every"
    )
    common.several_episodes(settings)
    if settings.utd <= 0:
        raise ValueError(f"--utd must be positive, not {settings.utd}")
    rhythm(settings)
    for whole, part in (
        *(("steps", "envs"), ("eval_every", "envs")),
        *(("save_every", "eval_every"), ("steps", "eval_every")),
    ):
        common.multiple(settings, whole, part)
    if settings.learning_starts < 1:
        raise ValueError(
            "--learning_starts must be at least 1: there is nothing to draw before the first step"
        )
    frames = stacked_frames(settings.env)
    if frames and settings.learning_starts <= settings.envs * (frames + settings.n_step):
        raise ValueError(
            f"--learning_starts={settings.learning_starts} is too early for stacked frames: it must be more than "
            f"--envs times ({frames} + --n_step)"
        )
    if settings.priority and settings.offline_data:
        raise ValueError("--priority and --offline_data cannot be combined: logged steps have no priorities")
    if settings.offline_data and not 0 < settings.offline_ratio < 1:
        raise ValueError(f"--offline_ratio={settings.offline_ratio} must be between 0 and 1")
    if settings.offline_data and not 0 < logged_rows(settings) < settings.batch_size:
        raise ValueError(
            f"--offline_ratio={settings.offline_ratio} of --batch_size={settings.batch_size} is "
            f"{logged_rows(settings)} rows: a batch must have some of both kinds"
        )
    if success(settings) is not None and settings.priority:
        raise ValueError(
            "--priority and --relabel_success cannot be combined: draws of demonstrations are uniform"
        )
    if success(settings) is not None and frames:
        raise ValueError(
            "--relabel_success is not for ALE games and pixels/, of which single frames are kept: leave it out"
        )
    unbounded = math.isnan(settings.head_low) or math.isnan(settings.head_high)
    if settings.head not in ("scalar", "quantile") and unbounded and not settings.init_from:
        raise ValueError(
            f"--head={settings.head} needs --head_low and --head_high, the smallest and largest value it must "
            "represent: nothing tells them before there are data"
        )


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


def parts(settings: Settings, config: Any, spec: Spec) -> tuple[Learner, online.Replay]:
    """The learner and its memory."""
    low, high = support(settings)
    learner = agents.get(settings.agent).make(
        config, spec, heads.make(settings.head, low, high, settings.head_size)
    )
    several = (settings.n_step, common.discount(config), settings.envs)
    frames = stacked_frames(settings.env)
    view = online.video(frames, *several) if frames else online.steps(*several)
    if settings.priority:
        exponents = settings.priority, settings.priority_correction
        return learner, online.ranked(learner, view, settings.replay, settings.batch_size, *exponents)
    keep = online.uniform if success(settings) is None else online.relabelling
    return learner, keep(learner, view, settings.replay, settings.batch_size, logged=logged_rows(settings))


def logged_rows(settings: Settings) -> int:
    """How many rows of each batch are drawn from ``--offline_data``."""
    return round(settings.offline_ratio * settings.batch_size) if settings.offline_data else 0


def success(settings: Settings) -> str | float | None:
    """Which episodes join the demonstrations, as `rl.interaction.succeeded` takes it; None for none."""
    if settings.relabel_success in ("", SUCCESS, FINAL_SUCCESS):
        return settings.relabel_success or None
    return common.number("relabel_success", settings.relabel_success)


def demonstrations(settings: Settings, config: Any, seen: Transform, loaded: data.Loaded) -> Dataset:
    """The logged data as the agent sees its own experience: rewards, observations and steps in each transition."""
    return replays.n_step(transform.apply(seen, loaded.dataset), settings.n_step, common.discount(config))


def mixture(settings: Settings, spec: Spec) -> data.Loaded | None:
    """The logged data of ``--offline_data``, with the rewards of the environment's task where logs have none."""
    if not settings.offline_data:
        return None
    loaded = data.load(settings.offline_data, clip_actions=settings.clip_actions, environment=settings.env)
    if loaded.spec != spec:
        raise ValueError(
            f"--offline_data={settings.offline_data} does not fit {settings.env}: {loaded.spec} and {spec}"
        )
    if loaded.note:
        print(f"note on --offline_data: {loaded.note}", file=sys.stderr)
    return loaded


def transformation(settings: Settings, loaded: data.Loaded | None) -> Transform:
    """How the agent sees rewards and observations: as the flags say or, where they do not, as ``--init_from`` did.

    Raises:
      ValueError: the flags say otherwise than the run that is continued, whose values then mean something else.
    """
    chosen: dict[str, Any] = {}
    if settings.reward_scale == transform.RETURN_RANGE:
        if loaded is None:
            raise ValueError(
                f"--reward_scale={transform.RETURN_RANGE} is that of returns in the data: give --offline_data"
            )
        chosen["reward_scale"] = transform.fit(loaded.dataset, transform.RETURN_RANGE).reward_scale
    elif settings.reward_scale:
        chosen["reward_scale"] = common.number("reward_scale", settings.reward_scale)
    if not math.isnan(settings.reward_shift):
        chosen["reward_shift"] = settings.reward_shift
    if settings.clip_rewards:
        chosen["clip_rewards"] = True
    if not settings.init_from:
        return Transform(**chosen)
    source = transform.from_json(_source(settings)[0]["card"]["transform"])
    wrong = [name for name, value in chosen.items() if not math.isclose(value, getattr(source, name))]
    if wrong:
        there = " ".join(f"--{name}={getattr(source, name)}" for name in wrong)
        here = " ".join(f"--{name}={getattr(settings, name)}" for name in wrong)
        raise ValueError(
            f"--init_from={settings.init_from} was trained with {there}, and its values are of such rewards: leave "
            f"out {here}"
        )
    return source


def support(settings: Settings) -> tuple[float, float]:
    """The values that a categorical head must represent: as the flags say, or as the run that is continued had."""
    low, high = settings.head_low, settings.head_high
    if settings.init_from and (math.isnan(low) or math.isnan(high)):
        card = _source(settings)[0]["card"]
        low, high = card.get("support") or (card["settings"]["head_low"], card["settings"]["head_high"])
    return (0.0, 1.0) if math.isnan(low) or math.isnan(high) else (low, high)  # other heads have none


def initial(settings: Settings, config: Any, learner: Learner, spec: Spec) -> State:
    """The learners' state [S, ...] as the run ``--init_from`` left it: its first seeds.

    Raises:
      ValueError: there is no such run, or it trained something else.
    """
    record, arrays = _source(settings)
    card = record["card"]
    there = {"agent": card["agent"], "head": card["settings"]["head"], "seeds": card["settings"]["seeds"]}
    if (there["agent"], there["head"]) != (settings.agent, settings.head) or there["seeds"] < settings.seeds:
        raise ValueError(
            f"--init_from={settings.init_from} holds {there}: give --agent={there['agent']} --head={there['head']} "
            f"and at most --seeds={there['seeds']}"
        )
    swept = card.get("sweep", {}).get("discount")
    discount = swept[0] if swept else card["config"].get("discount")
    if discount != getattr(config, "discount", None):
        raise ValueError(
            f"--init_from={settings.init_from} was trained with --agent.discount={discount}, and its values are of "
            f"such returns: give --agent.discount={discount}, not {config.discount}"
        )
    like = jax.eval_shape(learner.init, jax.random.key(0), online.example(spec))
    leaves = []
    for name, leaf in checkpoint.named({"state": like}).items():
        array = arrays.get(name)
        array = array if array is None or name == "state/step" else array[: settings.seeds]
        shape = leaf.shape if name == "state/step" else (settings.seeds, *leaf.shape)
        if array is None or array.shape != shape:
            raise ValueError(
                f"--init_from={settings.init_from}: its {name} is {None if array is None else array.shape}, here "
                f"it is {shape}; give the same --agent.* flags as there"
            )
        leaves.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _source(settings: Settings) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    place = Path(settings.init_from).expanduser()
    place = place if place.name == lifecycle.CHECKPOINTS else place / lifecycle.CHECKPOINTS
    source = checkpoint.read(place)
    if source is None:
        raise ValueError(f"--init_from={settings.init_from}: there is no checkpoint")
    if "transform" not in source[0]["card"]:
        raise ValueError(
            f"--init_from={settings.init_from} does not say how its agent saw rewards: train it again"
        )
    return source


@contextmanager
def scorer(
    settings: Settings, learner: Learner, seen: Transform
) -> Iterator[Callable[[State, int], dict[str, np.ndarray]]]:
    """A function (state, number of the evaluation) -> {"eval/...": [S, episodes]}, on the CPU."""
    actor = acting.over_seeds(acting.actor(learner), train.STACKED)
    actor = acting.observing(actor, functools.partial(transform.observations, seen))
    cpu = jax.local_devices(backend="cpu")[0]
    with common.evaluator(settings, actor, settings.env, settings.seeds) as episodes:

        def score(state: State, index: int) -> dict[str, np.ndarray]:
            with jax.default_device(cpu):
                found = episodes(jax.device_put(state, cpu), index)
            return {f"eval/{name}": value for name, value in found.items()}

        yield score


def export(path: Path, state: State, *, slow: bool = False) -> None:
    """Writes what acts, alone: the policy's parameters or, where there is none, those of Q, [S, ...] each.

    With ``slow`` those of its slow copy, by which an agent acts whose config has ``slow_policy``.
    """
    acting = state.target if slow else state.params
    checkpoint.export(path, acting["policy" if "policy" in acting else "q"])


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def main(_: list[str]) -> None:
    common.show(run(*presets.from_flags("online", PUBLISHED, common.config, "env")))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, common.config))
