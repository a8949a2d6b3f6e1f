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
        --offline_data=hopper-medium-v2 --offline_ratio=0.5 --agent.policy_optimiser.schedule=constant

There the offline run must have had a constant schedule, too: IQL's published one falls to 0 over the run.
What decides on several actions at once (``--chunk``) goes on so; single steps are remembered, and read in chunks.

From demonstrations, half of every batch, that successful episodes join; without ``--offline_data``, from scratch:

    python -m experiments.online --agent=sac --env=AdroitHandDoor-v1 --offline_data=door_human.hdf5 --clip_actions \
        --relabel_success=success
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app

from experiments import checks, common, flags, interaction, presets
from rl import agents, checkpoint, data, envs, keys, lifecycle, online
from rl.data.files import expanded
from rl.envs.registry import stacked_frames, time_limit
from rl.envs.stream import Stream
from rl.interaction import FINAL_SUCCESS, SUCCESS, Trainer
from rl.replay import chunks, transform
from rl.replay.transform import Transform
from rl.types import Learner, Spec, State
from rl.values import heads

_IDENTITY = (
    *interaction.IDENTITY,
    *("n_step", "init_from", "offline_data"),
    *("offline_ratio", "clip_actions", "relabel_success", "priority", "priority_correction"),
    *("chunk", "replan_every"),
)
# Hyper-parameters that change what networks compute, and not the shapes of their parameters.
_FUNCTION = (
    *(f"network.{name}" for name in ("activation", "norm_after", "residual", "policy_layer_norm", "encoder")),
    *("layer_norm", "levels", "bins", "order", "see_levels", "see_dimensions"),
)
# Those of one agent, whose name means something else in others: ARSQ's advantages are multiples of its temperature.
_FUNCTION_OF = {"arsq": ("temperature",)}
_MEMORY = ("schedule", "warm_up", "clip", "weight_decay")  # of an optimiser, that change what it remembers


@dataclasses.dataclass(frozen=True)
class Settings(interaction.Settings, common.Chunk):
    """Everything about a run that is not the agent's own."""

    agent: str = (
        "sac"  # sac td3 dqn arsq cqn; to fine-tune: iql ifql deas fql cql td3_bc rebrac sac_n edac my.agent
    )
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: as --init_from has it
    head_high: float = float("nan")  # upper end of a categorical head's support; nan: as --init_from has it
    n_step: int = 1  # steps in each transition: rewards are summed until the value takes over
    priority: float = 0.0  # exponent of a step's loss in its chance to be drawn (dqn, arsq, cqn); 0: equal
    priority_correction: float = 0.5  # exponent of the weights that take the bias out of --priority's draws
    reward_scale: str = ""  # factor on rewards, or return_range (of --offline_data); "": as --init_from, or 1
    reward_shift: float = float("nan")  # added to every reward after scaling; nan: as --init_from, or 0
    clip_rewards: bool = False  # clip scaled rewards to [-1, 1]; so does a run from --init_from that did
    init_from: str = ""  # run folder of experiments.offline or experiments.online to start from
    offline_data: str = ""  # dataset to mix into batches: name, minari:ID, or file
    offline_ratio: float = 0.5  # share of each batch that is drawn from --offline_data
    clip_actions: bool = False  # clip actions of --offline_data that lie outside their box; else an error
    shuffled: bool = False  # --offline_data holds single transitions in no order; an error without it
    relabel_success: str = ""  # episodes to join --offline_data: success, final_success, or least last reward


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and its result is returned. When an environment's process dies,
    all environments are built again and start new episodes; nothing that was collected is lost.

    Raises:
      ValueError: settings that cannot be run; the message names the flag. Or an environment whose observations or
        actions agents here cannot use.
      checkpoint.CheckpointError: the run folder holds another run.
      FloatingPointError: the environment returned a reward or an observation that is not finite.
      RuntimeError: an environment failed, or its process died twice at once. Whenever an environment ends the
        run, what was collected before is in the last checkpoint, and the same command goes on with new episodes.
      train.Diverged: a metric stopped being finite.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    checks.discount(settings, config)
    checks.terminations(settings, config)
    begins = start(settings)  # written down, for runs that go on with this one
    settings = dataclasses.replace(
        settings, head_start=math.nan if begins is None else begins, head_kappa=kappa(settings)
    )
    before = _source(settings, "state/step")[1]["state/step"].item() if settings.init_from else 0
    checks.schedules(config, before + int(settings.steps * settings.utd))
    with ExitStack() as stack:
        stream = stack.enter_context(interaction.stepper(settings))
        if settings.init_from:
            check_source(settings, stream.spec)
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
            card={"transform": transform.to_json(seen), "digest": loaded.digest if loaded else None},
            about={
                "preset": presets.stored("online", settings, "env"),
                "support": support(settings),
                **stream.spec._asdict(),
            },
            unit="steps",
            axis="environment steps",
            leaves=(interaction.ACTORS,),
        )
        initial_state = lambda: (
            initial(settings, config, learner, stream.spec) if settings.init_from else None
        )
        exported = interaction.exported(config)
        return interaction.train(settings, this, trainer, learner, seen, initial_state, **exported)


def make_trainer(
    settings: Settings,
    stream: Stream,
    learner: Learner,
    replay: online.Replay,
    seen: Transform,
    logged: Any,
) -> Trainer:
    """The environments and the learners in them; with ``--init_from``, no action is drawn at random."""
    return Trainer(
        stream,
        learner,
        replay,
        keys.seeds(jax.random.key(settings.seed), settings.seeds),
        rhythm=interaction.rhythm(settings),
        learning_starts=settings.learning_starts,
        random=0 if settings.init_from else settings.learning_starts,
        seen=seen,
        logged=logged,
        success=success(settings),
    )


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    interaction.check(settings)
    checks.at_least_one(settings, "n_step")
    checks.not_negative(settings, "priority", "priority_correction")
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
    if success(settings) is not None and frames:
        raise ValueError(
            "--relabel_success is not for ALE games and pixels/, of which single frames are kept: leave it out"
        )


def check_chunk(settings: Settings) -> None:
    """Raises ValueError, naming the flags, where experience cannot be read in chunks of actions."""
    if settings.chunk == 1:
        return
    for name, usual in (("n_step", 1), ("priority", 0.0), ("relabel_success", "")):
        if getattr(settings, name) != usual:
            raise ValueError(
                f"--{name}={getattr(settings, name)} and --chunk={settings.chunk} cannot be combined: leave one of "
                "them out"
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


def parts(settings: Settings, config: Any, spec: Spec) -> tuple[Learner, online.Replay]:
    """The learner and its memory. Raises ValueError where a head needs a support that no flag gives."""
    if not settings.init_from:
        interaction.check_head(settings, config, spec)
    low, high = support(settings) or (0.0, 1.0)
    head = heads.make(
        settings.head,
        low,
        high,
        size=settings.head_size,
        start=start(settings),
        kappa=kappa(settings),
    )
    learner = common.learner(settings.agent, config, spec, head, settings.chunk, settings.replan_every)
    gamma, within = common.discounts(config)
    several = (settings.n_step, gamma, settings.envs)
    frames = stacked_frames(settings.env)
    view = online.video(frames, *several) if frames else online.steps(*several)
    if settings.chunk > 1:
        view = online.chunked(settings.chunk, gamma, settings.envs, within)
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
    return checks.number("relabel_success", settings.relabel_success, SUCCESS, FINAL_SUCCESS)


def demonstrations(settings: Settings, config: Any, seen: Transform, loaded: data.Loaded) -> Any:
    """The logged data as the agent sees its own experience: rewards, observations and steps in each transition."""
    return common.rows(settings, config, transform.apply(seen, loaded.dataset))


def mixture(settings: Settings, spec: Spec) -> data.Loaded | None:
    """The logged data of ``--offline_data``, with the rewards of the environment's task where logs have none."""
    if not settings.offline_data:
        return None
    loaded = data.load(
        settings.offline_data,
        clip_actions=settings.clip_actions,
        environment=settings.env,
        shuffled=settings.shuffled,
    )
    if not checks.fits(loaded.spec, spec):
        raise ValueError(
            f"--offline_data={settings.offline_data} does not fit {settings.env}: {loaded.spec} and {spec}"
        )
    if spec.discrete:
        with closing(envs.make(settings.env)) as env:
            checks.first_action(f"offline_data={settings.offline_data}", loaded, env)
    if loaded.note:
        print(f"note on --offline_data: {loaded.note}", file=sys.stderr)
    return loaded


def transformation(settings: Settings, loaded: data.Loaded | None) -> Transform:
    """How the agent sees rewards and observations: as the flags say or, where they do not, as ``--init_from`` did.

    Raises:
      ValueError: the flags say otherwise than the run that is continued, whose values then mean something else.
    """
    chosen: dict[str, Any] = {}
    if settings.reward_scale:
        scale = common.reward_scale(settings.reward_scale)
        if scale == transform.RETURN_RANGE:
            if loaded is None:
                raise ValueError(
                    f"--reward_scale={transform.RETURN_RANGE} is that of returns in the data: give --offline_data"
                )
            scale = transform.fit(loaded.dataset, transform.RETURN_RANGE).reward_scale
        chosen["reward_scale"] = scale
    if not math.isnan(settings.reward_shift):
        chosen["reward_shift"] = checks.number("reward_shift", str(settings.reward_shift))
    if settings.clip_rewards:
        chosen["clip_rewards"] = True
    if not settings.init_from:
        return Transform(**chosen)
    source = transform.from_json(_source_card(settings)["transform"])
    wrong = [name for name, value in chosen.items() if not math.isclose(value, getattr(source, name))]
    if wrong:
        there = " ".join(f"--{name}={getattr(source, name)}" for name in wrong)
        here = " ".join(f"--{name}={getattr(settings, name)}" for name in wrong)
        raise ValueError(
            f"--init_from={settings.init_from} was trained with {there}, and its values are of such rewards: leave "
            f"out {here}"
        )
    return source


def _card_of_head(settings: Settings) -> dict[str, Any] | None:
    """The card of the run that is continued; None without one, and for one of another head, which `initial` refuses."""
    card = _source_card(settings) if settings.init_from else None
    return card if card and card["settings"]["head"] == settings.head else None


def start(settings: Settings) -> float | None:
    """The value that untrained networks are near: as the flag says, or as the run that is continued had.

    Raises:
      ValueError: the flag says otherwise than that run.
    """
    chosen = common.head_start(settings)
    card = _card_of_head(settings)
    if card is None:
        return chosen
    there = card["settings"].get("head_start")
    if chosen not in (None, there):
        raise ValueError(
            f"--init_from={settings.init_from} was trained with "
            f"{'no --head_start' if there is None else f'--head_start={there:g}'}, and its networks add to that: leave "
            f"out --head_start={chosen:g}"
        )
    return there


def kappa(settings: Settings) -> float:
    """The threshold of a quantile head's loss: as the flag says or, where it is left alone, as the continued run had.

    Raises:
      ValueError: the flag says otherwise than that run.
    """
    chosen = settings.head_kappa
    card = _card_of_head(settings)
    if card is None:
        return chosen
    there = card["settings"].get("head_kappa", 1.0)
    if chosen not in (Settings.head_kappa, there):
        raise ValueError(
            f"--init_from={settings.init_from} was trained with --head_kappa={there:g}, by which the values of its "
            f"quantiles are off: leave out --head_kappa={chosen:g}"
        )
    return there


def support(settings: Settings) -> tuple[float, float] | None:
    """The values that a categorical head must represent: as the flags say, or as the run that is continued had.

    None for other heads, which have no support.

    Raises:
      ValueError: the flags say otherwise than that run, whose networks are over its support, or it says nothing.
    """
    if settings.head in heads.UNBOUNDED:
        return None
    chosen = settings.head_low, settings.head_high
    card = _card_of_head(settings)
    if card is None:
        return (0.0, 1.0) if any(map(math.isnan, chosen)) else chosen
    low, high = card.get("support") or (card["settings"]["head_low"], card["settings"]["head_high"])
    if math.isnan(low) or math.isnan(high):
        # It went on with another run, before runs wrote their support down.
        if any(map(math.isnan, chosen)):
            raise ValueError(
                f"--init_from={settings.init_from} does not say which support its head has: give --head_low and "
                "--head_high, those of the run that it went on with itself"
            )
        return chosen
    flags = zip(("head_low", "head_high"), chosen, (low, high), strict=True)
    wrong = [
        (n, here, there) for n, here, there in flags if not (math.isnan(here) or math.isclose(here, there))
    ]
    if wrong:
        raise ValueError(
            f"--init_from={settings.init_from} was trained with {' '.join(f'--{n}={x:g}' for n, _, x in wrong)}, over "
            f"which its networks say their values: leave out {' '.join(f'--{n}={x:g}' for n, x, _ in wrong)}"
        )
    return low, high


def check_source(settings: Settings, spec: Spec) -> None:
    """Raises ValueError if the run ``--init_from`` was of other observations or actions than the environment's."""
    try:
        checks.spec(_source_card(settings), spec)
    except ValueError as error:
        raise ValueError(
            f"--init_from={settings.init_from} does not fit --env={settings.env}: {error}"
        ) from None


def initial(settings: Settings, config: Any, learner: Learner, spec: Spec) -> State:
    """The learners' state [S, ...] as the run ``--init_from`` left it: its first seeds.

    Raises:
      ValueError: there is no such run, or it trained something else.
    """
    card, arrays = _source(settings)
    length = card["settings"].get("chunk", 1)
    if length != settings.chunk:
        raise ValueError(
            f"--init_from={settings.init_from} decides on {length} actions at once: give --chunk={length}, not "
            f"{settings.chunk}"
        )
    there = {"agent": card["agent"], "head": card["settings"]["head"], "seeds": card["settings"]["seeds"]}
    if (there["agent"], there["head"]) != (settings.agent, settings.head) or there["seeds"] < settings.seeds:
        raise ValueError(
            f"--init_from={settings.init_from} holds {there}: give --agent={there['agent']} --head={there['head']} "
            f"and at most --seeds={there['seeds']}"
        )
    was, now = _hyper_parameters(card), checkpoint.flat(dataclasses.asdict(config))
    for name in ("discount", "chunk_discount") if length > 1 else ("discount",):
        if was.get(name) != now.get(name):
            raise ValueError(
                f"--init_from={settings.init_from} was trained with --agent.{name}={was.get(name)}, and its values are "
                f"of such returns: give --agent.{name}={was.get(name)}, not {now.get(name)}"
            )
    function = _FUNCTION + _FUNCTION_OF.get(settings.agent, ())
    if wrong := [name for name in function if name in was and was[name] != now[name]]:
        flags = " ".join(f"--agent.{name}={was[name]}" for name in wrong)
        raise ValueError(
            f"--init_from={settings.init_from} has networks of other functions, whose parameters mean something else "
            f"here: give {flags}"
        )
    like = jax.eval_shape(learner.init, jax.random.key(0), online.example(chunks.spec(spec, settings.chunk)))
    several = lambda x: jax.ShapeDtypeStruct((settings.seeds, *x.shape), x.dtype)
    try:
        state = common.placed_state(arrays, jax.tree.map(several, like)._replace(step=like.step))
    except ValueError as error:
        raise ValueError(
            f"--init_from={settings.init_from}: {error}; {_remedy(was, now, str(error))}"
        ) from None
    print(
        f"starts after update {state.step.item():,} of {settings.init_from}, with {settings.seeds} of its "
        f"{card['settings']['seeds']} seeds; no action is drawn at random",
        file=sys.stderr,
    )
    return state


def _remedy(was: Mapping[str, Any], now: Mapping[str, Any], error: str) -> str:
    """What to do about networks or optimisers that do not fit, from the hyper-parameters there and here."""
    of_optimisers = [name for name in was if re.fullmatch(rf"\w+_optimiser\.({'|'.join(_MEMORY)})", name)]
    wrong = [name for name in of_optimisers if was[name] != now.get(name)]
    if not wrong or "its state/optimiser/" not in error:
        return "give the same --agent.* flags as there"
    there, here = (" ".join(f"--agent.{name}={of.get(name)}" for name in wrong) for of in (was, now))
    return f"give {there}, as there, or train that run again with {here}"


def _hyper_parameters(card: dict[str, Any]) -> dict[str, Any]:
    """{name: value} of the first seeds of a run; those that it swept are its first variant's."""
    return checkpoint.flat(card["config"]) | {name: of[0] for name, of in card.get("sweep", {}).items()}


def _source_folder(settings: Settings) -> Path:
    """Where the checkpoints of the run that is continued are."""
    place = expanded(settings.init_from)
    return place if place.name == lifecycle.CHECKPOINTS else place / lifecycle.CHECKPOINTS


def _source(settings: Settings, part: str = "state/") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The card of the run that is continued, and the arrays of its learners whose names begin with ``part``."""
    record, arrays = checkpoint.read(_source_folder(settings), (part,)) or (None, {})
    return _checked_card(settings, record), arrays


def _source_card(settings: Settings) -> dict[str, Any]:
    """`_source` without the arrays, whose files are not read."""
    folder = _source_folder(settings)
    steps = checkpoint.steps(folder)
    return _checked_card(settings, checkpoint.described(folder, steps[0]) if steps else None)


def _checked_card(settings: Settings, record: dict[str, Any] | None) -> dict[str, Any]:
    """The card of a checkpoint's record. Raises ValueError where there is none, or it lacks what must be known."""
    if record is None:
        raise ValueError(f"--init_from={settings.init_from}: there is no checkpoint")
    if "transform" not in record["card"]:
        raise ValueError(
            f"--init_from={settings.init_from} does not say how its agent saw rewards: it is no run of "
            "experiments.offline or experiments.online, or an old one; train it again by one of these"
        )
    return record["card"]


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def main(_: list[str]) -> None:
    common.show(run(*presets.from_flags("online", PUBLISHED, common.config, "env")))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, common.config))
