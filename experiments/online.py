r"""Train an agent in its environment, several seeds at once, and say how good it is.

    python -m experiments.online --agent=sac --env=HalfCheetah-v5 --steps=1000000

The run folder holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json, the policy of every
evaluation under actors/ and checkpoints; the same command continues an interrupted run, to the same bits where the
environment can be put back into the middle of an episode (classic control, MuJoCo and JAX can) and with new episodes
elsewhere. ``--agent=NAME --help`` lists an agent's own hyper-parameters.

Environments in JAX (`rl.envs.functional`) act and learn in one compiled program; eight seeds with eight copies each:

    python -m experiments.online --agent=dqn --env=gymnax/CartPole-v1 --seeds=8 --envs=8 --utd=0.25 --steps=100000 \
        --learning_starts=1000 --replay=50000 --agent.hidden=64,64 --agent.learning_rate=0.001

DQN on Atari games (extra: atari) by Dopamine's protocol, whose numbers then stand where no flag says otherwise. A
million steps are remembered in 7.07 GB, the frames once as uint8, stacked on the device when they are drawn:

    python -m experiments.online --agent=dqn --env=ALE/Pong-v5 --head=hl_gauss

A MuJoCo task from pixels, with DrQ's random shifts; 100,000 steps are remembered in 2.1 GB:

    python -m experiments.online --agent=cqn --env=pixels/InvertedPendulum-v5 --agent.network.shift=4 --replay=100000

Fine-tuning what `experiments.offline` trained, half of every batch from the log:

    python -m experiments.online --agent=iql --env=Hopper-v5 --init_from=runs/hopper-medium-v2/iql-scalar \
        --offline_data=hopper-medium-v2 --offline_ratio=0.5 --agent.policy_optimiser.schedule=constant

There the offline run must have had a constant schedule, too: IQL's published one falls to 0 over the run.
Runs with ``--chunk`` continue with chunks: the replay buffer holds single steps, batches are read from it in chunks.

From demonstrations, half of every batch, that successful episodes join; without ``--offline_data``, from scratch:

    python -m experiments.online --agent=sac --env=AdroitHandDoor-v1 --offline_data=door_human.hdf5 --clip_actions \
        --relabel_success=success
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import jax
from absl import app

from experiments import checks, common, flags, init_from, interaction, notes, presets
from rl import agents, buffers, data, envs, keys, on_device
from rl.envs import functional
from rl.envs.registry import is_functional, stacked_frames, time_limit
from rl.envs.stream import Stream
from rl.envs.world import World
from rl.interaction import FINAL_SUCCESS, SUCCESS, Trainer
from rl.replay import transform
from rl.replay.source import LOGGED
from rl.replay.transform import Transform
from rl.settings import require_share
from rl.types import Learner, Spec
from rl.values import heads

IDENTITY = (
    *interaction.IDENTITY,
    *("n_step", "init_from", "offline_data"),
    *("offline_ratio", "clip_actions", "relabel_success", "priority", "priority_correction"),
    *("chunk", "replan_every"),
)
# Settings that the run of --init_from decides where flags do not; a run writes down what that says.
LEFT_OPEN = ("head_start", "head_kappa", "head_sigma")


@dataclasses.dataclass(frozen=True)
class Settings(interaction.Settings, common.Chunk, common.Returns):
    """Everything about a run that is not the agent's own."""

    agent: str = (
        "sac"  # sac td3 dqn arsq cqn; to fine-tune: iql ifql deas fql cql td3_bc rebrac sac_n edac my.agent
    )
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: as --init_from has it
    head_high: float = float("nan")  # upper end of a categorical head's support; nan: as --init_from has it
    priority: float = 0.0  # draws by the distance from targets to this power (dqn, arsq, cqn); 0: uniform
    priority_correction: float = 0.5  # exponent of the importance weights of --priority
    reward_scale: str = ""  # factor on rewards, or return_range (of --offline_data); "": as --init_from, or 1
    reward_shift: float = float("nan")  # added to every reward after scaling; nan: as --init_from, or 0
    clip_rewards: bool = False  # clip scaled rewards to [-1, 1]; so does a run from --init_from that did
    init_from: str = ""  # run folder of experiments.offline or experiments.online to start from
    offline_data: str = ""  # dataset to mix into batches: name, minari:ID, or file
    offline_ratio: float = 0.5  # share of each batch that is drawn from --offline_data
    clip_actions: bool = False  # clip actions of --offline_data that lie outside their box; else an error
    shuffled: bool = False  # --offline_data holds single transitions in no order; an error without it
    relabel_success: str = (
        ""  # own episodes that become demonstrations: success, final_success or least last reward
    )


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and its result is returned. When an environment's process dies,
    all environments are built again and start new episodes; nothing that was collected is lost.

    Raises:
      ValueError: settings that cannot be run; the message names the flag. Or an environment whose observations or
        actions agents here cannot use.
      checkpoint.CheckpointError: the run folder holds another run.
      FloatingPointError: the environment returned a reward or an observation that is not finite. One in JAX does so
        without a new checkpoint, and the same command comes to the same step again.
      RuntimeError: an environment failed, or its process died twice at once. Whenever an environment ends the
        run, what was collected before is in the last checkpoint, and the same command goes on with new episodes.
      train.Diverged: a metric stopped being finite.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    checks.discount(settings, config)
    checks.terminations(settings, config)
    if stacked_frames(settings.env) and getattr(config, "ignore_terminals", False):
        raise ValueError(
            "--agent.ignore_terminals is not for ALE games and pixels/, of which single frames are kept: what was seen "
            "when an episode terminated is not there; leave it out"
        )
    settings = init_from.with_head(settings)  # written down, for runs that go on with this one
    before = init_from.updates(settings) if settings.init_from else 0
    checks.schedules(config, before + interaction.updates(settings))
    with ExitStack() as stack:
        world: World | Stream
        if is_functional(settings.env):
            world = functional.make(settings.env)
            note_no_processes(settings)
        else:
            world = stack.enter_context(interaction.stepper(settings))
        spec = world.spec
        if settings.init_from:
            init_from.check_spec(settings, spec)
        loaded = mixture(settings, spec)
        agents.check_data(settings.agent, config, loaded.dataset.transitions if loaded else None)
        preprocessing = init_from.transformation(settings, loaded)
        learner, replay = learner_and_replay(settings, config, spec)
        logged = demonstrations(settings, config, preprocessing, loaded) if loaded else None
        trainer = make_trainer(settings, world, learner, replay, preprocessing, logged)
        this = common.run(
            settings,
            config,
            settings.steps,
            task=settings.env,
            identity=IDENTITY,
            card={"transform": transform.to_json(preprocessing), "digest": loaded.digest if loaded else None},
            about={
                "preset": presets.stored("online", settings, config, "env"),
                "support": init_from.support(settings),
                **spec._asdict(),
            },
            unit="steps",
            axis="environment steps",
            leaves=(interaction.ACTORS,),
        )
        initial_state = lambda: (
            init_from.state(settings, config, learner, spec) if settings.init_from else None
        )
        notes.note_negated_rewards(settings)
        notes.note_n_step(settings, config, spec)
        notes.note_unused_by_agent("online", settings, config, "env", spec)
        notes.note_unused(settings, "offline_data", "offline_ratio", "clip_actions", "shuffled")
        notes.note_unused(settings, "priority", "priority_correction")
        note_relabelling(settings, config)
        exported = interaction.exported(config)
        return interaction.train(settings, this, trainer, learner, preprocessing, initial_state, **exported)


def make_trainer(
    settings: Settings,
    world: World | Stream,
    learner: Learner,
    replay: buffers.Replay,
    preprocessing: Transform,
    logged: Any,
) -> Trainer | on_device.Trainer:
    """The environments and the learners in them; with ``--init_from``, no action is drawn at random."""
    run_keys = keys.seeds(jax.random.key(settings.seed), settings.seeds)
    options: dict[str, Any] = {
        "rhythm": interaction.rhythm(settings),
        "learning_starts": settings.learning_starts,
        "random": 0 if settings.init_from else settings.learning_starts,
        "preprocessing": preprocessing,
        "logged": logged,
    }
    if isinstance(world, World):
        return on_device.Trainer(world, learner, replay, run_keys, **options)
    return Trainer(world, learner, replay, run_keys, success=success(settings), **options)


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    interaction.check(settings)
    checks.several_steps(settings)
    checks.not_negative(settings, "priority")
    require_share("priority_correction", settings.priority_correction, "--")
    checks.chunk(settings)
    frames = stacked_frames(settings.env)
    check_chunk(settings)
    if frames and settings.learning_starts <= settings.envs * (frames + settings.n_step):
        raise ValueError(
            f"--learning_starts={settings.learning_starts} is too early for stacked frames: it must be more than "
            f"--envs times ({frames} + --n_step)"
        )
    if frames and settings.replay <= settings.envs * (frames + settings.n_step):
        raise ValueError(
            f"--replay={settings.replay} holds no whole stack of frames: it must be more than --envs times ({frames} + "
            "--n_step)"
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
    if success(settings) is not None and is_functional(settings.env):
        raise ValueError(
            "--relabel_success is not for environments in pure JAX (gymnax/, jax/), which step on the device: leave it "
            "out"
        )
    if success(settings) is not None and frames:
        raise ValueError(
            "--relabel_success is not for ALE games and pixels/, of which single frames are kept: leave it out"
        )


def note_relabelling(settings: Settings, config: Any) -> None:
    """Prints where successful episodes join logged data, and nobody treats these differently."""
    if success(settings) is None or settings.offline_data or hasattr(config, "demonstrations"):
        return
    print(
        f"note: --relabel_success={settings.relabel_success} changes nothing: there is no --offline_data that episodes "
        f"could join, and {settings.agent} learns the same from demonstrations as from other steps",
        file=sys.stderr,
    )


def note_no_processes(settings: Settings) -> None:
    """Prints which flags of processes do nothing where environments step on the device."""
    for name in ("env_processes", "eval_processes"):
        if getattr(settings, name) != getattr(Settings, name):
            print(f"note: --{name} changes nothing: {settings.env} steps on the device", file=sys.stderr)


def check_chunk(settings: Settings) -> None:
    """Raises ValueError, naming the flags, where experience cannot be read in chunks of actions."""
    if settings.chunk == 1:
        return
    for name, usual in (("n_step", 1), ("priority", 0.0), ("relabel_success", "")):
        if getattr(settings, name) != usual:
            raise ValueError(
                f"--{name}={getattr(settings, name)} and --chunk={settings.chunk} cannot be combined: leave --{name} "
                "out, or give --chunk=1"
            )
    if stacked_frames(settings.env):
        raise ValueError(
            f"--chunk={settings.chunk} is not for ALE games and pixels/, of which single frames are kept: leave it out"
        )
    limit = time_limit(settings.env)
    if limit and settings.chunk > limit:
        raise ValueError(
            f"--chunk={settings.chunk} is longer than every episode of {settings.env}, whose time limit is {limit}"
        )
    first = settings.envs * settings.chunk
    if settings.learning_starts < first:
        raise ValueError(
            f"--learning_starts={settings.learning_starts} is too early: the first chunk is whole after --envs times "
            f"--chunk, {first} steps"
        )
    if settings.replay < first:
        raise ValueError(
            f"--replay={settings.replay} holds no whole chunk: give at least --envs times --chunk, {first} steps"
        )


def learner_and_replay(settings: Settings, config: Any, spec: Spec) -> tuple[Learner, buffers.Replay]:
    """The learner and its memory. Raises ValueError where a head needs a support that no flag gives."""
    if not settings.init_from:
        interaction.check_head(settings, config, spec)
    low, high = init_from.support(settings) or (0.0, 1.0)
    head = heads.make(*common.head_settings(settings, low, high))
    learner = common.learner(settings.agent, config, spec, head, settings.chunk, settings.replan_every)
    gamma, within = common.discounts(config)
    several = (settings.n_step, gamma, settings.envs, settings.td_lambda)
    frames = stacked_frames(settings.env)
    view = buffers.stacked_frames(frames, *several) if frames else buffers.steps(*several)
    if settings.chunk > 1:
        view = buffers.chunked(settings.chunk, gamma, settings.envs, within)
    if settings.priority:
        exponents = settings.priority, settings.priority_correction
        return learner, buffers.prioritised_memory(
            learner, view, settings.replay, settings.batch_size, *exponents
        )
    sizes, logged = (settings.replay, settings.batch_size), logged_rows(settings)
    if success(settings) is None:
        return learner, buffers.uniform(learner, view, *sizes, logged=logged)
    origin = getattr(config, "demonstrations", LOGGED)
    return learner, buffers.relabelling(learner, view, *sizes, logged=logged, origin=origin)


def logged_rows(settings: Settings) -> int:
    """How many rows of each batch are drawn from ``--offline_data``."""
    return round(settings.offline_ratio * settings.batch_size) if settings.offline_data else 0


def success(settings: Settings) -> str | float | None:
    """Which episodes join the demonstrations, as `rl.interaction.succeeded` takes it; None for none."""
    if settings.relabel_success in ("", SUCCESS, FINAL_SUCCESS):
        return settings.relabel_success or None
    return checks.number("relabel_success", settings.relabel_success, SUCCESS, FINAL_SUCCESS)


def demonstrations(settings: Settings, config: Any, preprocessing: Transform, loaded: data.Loaded) -> Any:
    """The logged data as the agent sees its own experience: rewards, observations and steps in each transition."""
    return common.rows(settings, config, transform.apply(preprocessing, loaded.dataset))


def mixture(settings: Settings, spec: Spec) -> data.Loaded | None:
    """The logged data of ``--offline_data``, with the rewards of the environment's task where logs have none."""
    if not settings.offline_data:
        return None
    loaded = data.load(
        settings.offline_data,
        clip_actions=settings.clip_actions,
        environment=settings.env,
        shuffled=settings.shuffled,
        # Of dictionaries the environment shows vectors where it is wrapped so.
        flatten_observations=not isinstance(spec.observation_shape, Mapping),
    )
    if not checks.fits(loaded.spec, spec):
        raise ValueError(
            f"--offline_data={settings.offline_data} does not fit {settings.env}: it has "
            f"{checks.in_words(loaded.spec)}, the environment {checks.in_words(spec)}"
        )
    if spec.discrete:
        with closing(envs.make(settings.env)) as env:
            checks.first_action(f"offline_data={settings.offline_data}", loaded, env)
    if loaded.note:
        print(f"note on --offline_data: {loaded.note}", file=sys.stderr)
    return loaded


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def main(_: list[str]) -> None:
    notes.show(run(*presets.from_flags("online", PUBLISHED, common.config, "env")))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, common.config))
