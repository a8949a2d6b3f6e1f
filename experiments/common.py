"""What the scripts share: settings that become flags, the problem that these describe, and the run that they make."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from experiments import flags
from rl import acting, agents, checkpoint, data, envs, evaluate, lifecycle, log, train
from rl.agents.optimisers import Adam
from rl.envs import entities
from rl.replay import chunks, transform
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.transform import Transform
from rl.types import Actor, Learner, Spec, State
from rl.values import heads
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Folder:
    """Settings: what a run leaves, and where."""

    workdir: str = ""  # run folder; by default runs/TASK/AGENT-HEAD
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True  # write TensorBoard events
    wandb: bool = False  # log to Weights & Biases too (extra: track)


SMALLEST = {
    "two_hot": 2,
    "hl_gauss": 8,
    "c51": 2,
    "quantile": 1,
}  # --head_size that `rl.values.heads.make` takes


@dataclasses.dataclass(frozen=True)
class Head:
    """Settings: how values are represented."""

    head: str = "scalar"  # value representation: scalar, two_hot, hl_gauss, c51 or quantile
    head_size: int = 101  # outputs of the head (the scalar head has one)
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: from the data
    head_high: float = float("nan")  # upper end of a categorical head's support; nan: from the data
    head_start: float = float("nan")  # value that untrained networks are near; nan: the support's middle
    head_kappa: float = 1.0  # of a quantile head, by which its value may be off: well below the values' range


@dataclasses.dataclass(frozen=True)
class Data:
    """Settings: what is learned from."""

    dataset: str = "synthetic-continuous"  # name (D4RL, OGBench, synthetic-...), minari:ID, or file
    data_folder: str = ""  # where named datasets lie, if not in their usual cache
    environment: str = ""  # where to evaluate, if not in the dataset's own environment
    clip_actions: bool = False  # clip logged actions that lie outside the action box; an error without it
    flatten_observations: bool = False  # concatenate the entries of observations that are dictionaries
    shuffled: bool = False  # the file holds single transitions in no order; an error without it


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Settings: how many actions an agent decides on at once."""

    chunk: int = 1  # actions in each decision, of agents with continuous ones; 1: single actions
    replan_every: int = 0  # actions of a chunk that are executed before the next decision; 0: all


class Problem(NamedTuple):
    """The data of a run as its agent sees them."""

    loaded: data.Loaded
    dataset: Dataset  # transformed
    transform: Transform
    support: tuple[float, float]  # values that a categorical head must represent
    head: ValueHead
    validation: Dataset | None = None  # held-out data, transformed


def problem(
    settings: Any,
    configs: Sequence[Any],
    target_range: Callable[[Any, Spec, float, float], tuple[float, float]],
    reward_scale: float | str = 1.0,
    reward_shift: float = 0.0,
    *,
    clip_rewards: bool = False,
    normalize_observations: bool = False,
    validation: bool = False,
    begun: Path | None = None,
) -> Problem:
    """Loads and prepares the data, and chooses the head's support from them where no flag gives it.

    Args:
      settings: has the fields of `Data` and `Head`, and may have those of `Chunk`.
      configs: hyper-parameters of all agents that are trained together; the support is wide enough for each.
      target_range: (config, spec, low, high) -> what targets reach, where rewards alone give values in [low, high].
      reward_scale, reward_shift, clip_rewards, normalize_observations: as `rl.replay.transform.fit` takes them.
      validation: whether held-out data are read, where there are any.
      begun: the run's folder, where integer actions are those of the environment (`all_actions`); None: those logged.
    """
    if is_set(settings) and not getattr(agents.get(settings.agent), "READS_SETS", False):
        raise ValueError(
            f"--dataset={settings.dataset}: --agent={settings.agent} would take a set of entities for a history; "
            f"leave {entities.SUFFIX} out, or use hecrl"
        )
    if any(discount(config) == 1 for config in configs):
        raise ValueError(
            "--agent.discount=1: episodes that a time limit cuts go on for ever, and have no value with it: give less "
            "than 1"
        )
    from_data = math.isnan(settings.head_low) or math.isnan(settings.head_high)
    for config in configs:
        check_discount(settings, config, support=from_data and settings.head not in heads.UNBOUNDED)
    loaded = data.load(
        settings.dataset,
        folder=settings.data_folder or None,
        clip_actions=settings.clip_actions,
        environment=settings.environment or None,
        validation=validation,
        flatten_observations=settings.flatten_observations,
        shuffled=settings.shuffled,
    )
    if begun is not None and loaded.spec.discrete:
        loaded = all_actions(settings, loaded, begun)
    fitted = transform.fit(
        loaded.dataset,
        reward_scale,
        reward_shift,
        clip_rewards=clip_rewards,
        normalize_observations=normalize_observations,
        entities=is_set(settings),
    )
    dataset = transform.apply(fitted, loaded.dataset)
    length = getattr(settings, "chunk", 1)
    spec = chunks.spec(loaded.spec, length)
    of_rewards = {
        gammas: value_bounds(dataset, length, *gammas) for gammas in {discounts(c) for c in configs}
    }
    bounds = [target_range(of_decisions(c, length), spec, *of_rewards[discounts(c)]) for c in configs]
    support, head = value_head(settings, (min(low for low, _ in bounds), max(high for _, high in bounds)))
    if len(set(bounds)) > 1 and not head.are_values:
        print(
            f"the support of all {len(configs)} runs of the sweep is [{support[0]:g}, {support[1]:g}]",
            file=sys.stderr,
        )
    held_out = transform.apply(fitted, loaded.validation) if loaded.validation else None
    return Problem(loaded, dataset, fitted, support, head, held_out)


def all_actions(settings: Any, loaded: data.Loaded, folder: Path) -> data.Loaded:
    """``loaded`` with every integer action of the environment to evaluate in, of which a log may lack the largest.

    A run that has a checkpoint in the folder keeps the actions that it began with (``action_size`` in its card).

    Raises:
      ValueError: the log has the environment's own numbers of actions, which do not count from 0.
    """
    checkpoints = folder / lifecycle.CHECKPOINTS
    size = loaded.spec.action_size
    if not settings.overwrite and (there := checkpoint.steps(checkpoints)):
        size = checkpoint.described(checkpoints, there[0])["card"].get("action_size", size)
    elif loaded.environment and settings.eval_episodes:
        with contextlib.closing(envs.make(loaded.environment)) as env:
            environment = envs.spec(env)
            check_first_action(f"dataset={settings.dataset}", loaded, env)
        size = environment.action_size if fits(loaded.spec, environment) else size
    return loaded._replace(spec=loaded.spec._replace(action_size=size))


def check_spec(card: Mapping[str, Any], environment: Spec) -> None:
    """Raises ValueError if a run learned from other observations or actions; of older ones, from other actions."""
    if "discrete" in card:
        was = Spec(_shape(card["observation_shape"]), card["action_size"], card["discrete"])
        of_log = "dataset" in card["settings"]
        if was != environment and not (of_log and fits(was, environment)):
            raise ValueError(
                f"it was trained on {_in_words(was)}, here there are {_in_words(environment)}; give the environment of "
                "that run"
            )
    check_actions(card, environment)


def _shape(stored: Any) -> Any:
    """The shape of an observation from JSON."""
    if isinstance(stored, dict):
        return {name: _shape(shape) for name, shape in stored.items()}
    return tuple(stored)


def check_first_action(flag: str, loaded: data.Loaded, env: gymnasium.Env) -> None:
    """Raises ValueError if the log of a flag has the environment's own numbers of integer actions, not those from 0.

    Each would be played as another action. Minari's logs say what theirs begin with, and are read accordingly.
    """
    first = envs.first_action(env)
    if not (first > 0 and loaded.spec.discrete) or "=minari:" in flag:
        return
    smallest = int(loaded.dataset.transitions.action.min())
    if smallest >= first:
        raise ValueError(
            f"--{flag}: its smallest action is {smallest}, as if they were numbered as in environment "
            f"{loaded.environment!r}, where the first is {first}; but in a log they count from 0: write actions minus "
            f"{first}"
        )


def check_actions(card: Mapping[str, Any], environment: Spec) -> None:
    """Raises ValueError if the networks of a run have other integer actions than the environment: those of its log."""
    size = card.get("action_size", environment.action_size)
    if environment.discrete and size != environment.action_size:
        raise ValueError(
            f"it has networks for the {size} actions of its log, here there are {environment.action_size}; train it "
            "again with --environment=NAME and --eval_episodes, by which it gets them all"
        )


def is_set(settings: Any) -> bool:
    """Whether the observations of ``--dataset`` are sets of entities."""
    return settings.dataset.endswith(entities.SUFFIX)


def value_head(settings: Any, bounds: tuple[float, float]) -> tuple[tuple[float, float], ValueHead]:
    """The support that the flags of `Head` give, or else ``bounds``, which the data do; and the head on it."""
    low, high = bounds
    low = low if math.isnan(settings.head_low) else settings.head_low
    high = high if math.isnan(settings.head_high) else settings.head_high
    start = head_start(settings)
    check_head_size(settings)
    if settings.head not in heads.UNBOUNDED and not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"--head={settings.head} needs --head_low and --head_high, the smallest and largest value it must "
            "represent: with these settings of the agent the data do not bound what targets reach"
        )
    check_support(settings, low, high)
    if start is not None and not low <= start <= high:
        raise ValueError(f"--head_start={start:g} lies outside the head's support, [{low:g}, {high:g}]")
    return (low, high), heads.make(settings.head, low, high, settings.head_size, start, settings.head_kappa)


def check_head_size(settings: Head) -> None:
    """Raises ValueError, naming the flag, on a size that the head cannot have."""
    least = SMALLEST.get(settings.head)
    if least is not None and settings.head_size < least:
        raise ValueError(
            f"--head_size={settings.head_size}: --head={settings.head} needs at least {least} outputs"
        )


def check_support(settings: Head, low: float, high: float) -> None:
    """Raises ValueError, naming the flags, if no value lies in the support; flags that are NaN did not choose it."""
    if settings.head in heads.UNBOUNDED or low < high:
        return
    chosen = {"head_low": (settings.head_low, low), "head_high": (settings.head_high, high)}
    ends = [
        f"--{name}={end:g}{' (from the data)' if math.isnan(flag) else ''}"
        for name, (flag, end) in chosen.items()
    ]
    raise ValueError(
        f"{' and '.join(ends)}: the support of --head={settings.head} needs a --head_low that is below --head_high"
    )


def head_start(settings: Head) -> float | None:
    """The value that untrained networks are near, as `rl.values.heads.make` takes it.

    A head without a support begins near 0 by itself, so that a sweep over all heads can have ``--head_start=0``.

    Raises:
      ValueError: another one is given, and the head has no support.
    """
    if math.isnan(settings.head_start):
        return None
    if settings.head in heads.UNBOUNDED:
        if settings.head_start == 0:
            return None
        raise ValueError(
            f"--head_start={settings.head_start:g} is of heads with a support; --head={settings.head} begins near 0 by "
            "itself: leave it out"
        )
    return settings.head_start


def run(
    settings: Any,
    config: Any,
    total: int,
    *,
    task: str,
    identity: Sequence[str],
    card: Mapping[str, Any],
    variant: str = "",
    **options: Any,
) -> lifecycle.Run:
    """The run that the settings describe.

    Args:
      settings: has the fields of `Folder`, ``agent`` and ``head``.
      config: the agent's hyper-parameters.
      total: steps.
      task: what is learned, the title of the curve and a part of the folder's name.
      identity: the settings that another checkpoint in the folder must agree on.
      card: what else it must agree on.
      variant: what tells it from other runs of the agent, another part of the folder's name.
      options: further fields of `rl.lifecycle.Run`.

    Raises:
      ValueError: a field of the agent's config is of a type that could not be read again from the run's card.
    """
    flags.check(config)
    # Only where they are given: checkpoints from before these flags go on.
    head = {} if head_start(settings) is None else {"head_start": settings.head_start}
    if settings.head_kappa != Head.head_kappa:
        head["head_kappa"] = settings.head_kappa
    place = folder(settings, task, variant)
    chosen = {name: getattr(settings, name) for name in identity}
    return lifecycle.Run(
        folder=place,
        card={
            "agent": settings.agent,
            "settings": chosen | head | ({} if settings.overwrite else _moved(place, chosen)),
            "config": dataclasses.asdict(config),
            **card,
        },
        total=total,
        label=", ".join(_words(settings, variant)),
        title=task,
        overwrite=settings.overwrite,
        tensorboard=settings.tensorboard,
        wandb=settings.wandb,
        **options,
    )


def _moved(place: Path, chosen: Mapping[str, Any]) -> dict[str, str]:
    """{setting: path} of data files that the run in the folder has read under another path.

    It goes on with them under the path that it knows: the digest of its card says whether they are the same data.
    """
    if not log.is_config(place / log.CONFIG) or not checkpoint.steps(place / lifecycle.CHECKPOINTS):
        return {}
    before = log.read_json(place / log.CONFIG)["config"].get("settings", {})
    return {
        name: before[name]
        for name in ("dataset", "offline_data")
        if chosen.get(name) and before.get(name) and Path(before[name]).name == Path(chosen[name]).name
    }


def begin(run: lifecycle.Run, tree: Mapping[str, Any]) -> lifecycle.Start:
    """`rl.lifecycle.begin`, whose message says more where the schedule of a learning rate has another length."""
    try:
        return lifecycle.begin(run, tree)
    except checkpoint.CheckpointError as error:
        if ".decay_updates: " not in str(error):
            raise
        done = checkpoint.steps(run.folder / lifecycle.CHECKPOINTS)[0]
        if done > run.total:
            raise checkpoint.CheckpointError(
                f"{run.folder} holds a run of {done} {run.unit}, more than --{run.unit}={run.total}: choose another "
                "--workdir, or --overwrite to start again"
            ) from None
        raise checkpoint.CheckpointError(
            f"{error}\nThe learning rate falls over decay_updates, which published settings make as long as the run: a "
            "longer run is another one from its first update on, and needs a --workdir of its own"
        ) from None


def folder(settings: Any, task: str, variant: str = "") -> Path:
    """The run folder."""
    return lifecycle.folder(settings.workdir, task.replace("/", "-"), "-".join(_words(settings, variant)))


def _words(settings: Any, variant: str) -> list[str]:
    return [settings.agent, settings.head, *([variant] if variant else [])]


def config(agent: str) -> Any:
    """The default hyper-parameters of an agent without a model.

    Raises:
      ValueError: an unknown agent, or a field without a default.
    """
    kind = agents.get(agent).Config
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING and field.init
    ]
    if required:
        raise ValueError(
            f"--agent={agent}: every field of its Config needs a default; {', '.join(required)} has none"
        )
    return kind()


def learner(
    agent: str, config: Any, spec: Spec, head: ValueHead, chunk: int = 1, replan_every: int = 0
) -> Learner:
    """An agent without a model, that decides on ``chunk`` actions at once and executes ``replan_every`` of them."""
    decides = agents.get(agent).make(config, chunks.spec(spec, chunk), head)
    return acting.in_chunks(decides, spec, chunk, replan_every)


def check_discount(settings: Any, config: Any, *, support: bool = False) -> None:
    """Raises ValueError, naming the flags, where returns are made with gamma and ``config`` has no field for it.

    Args:
      settings: the run's.
      config: the agent's hyper-parameters.
      support: whether the data give an end of the head's support.
    """
    if hasattr(config, "discount") or getattr(agents.get(settings.agent), "IGNORES_REWARDS", False):
        return
    usual = {"n_step": 1, "chunk": 1, "robust": "", "policy_estimates": 0}
    needed = [name for name, of_none in usual.items() if getattr(settings, name, of_none) != of_none]
    if needed or support:
        needed = needed or ["head"]
        raise ValueError(
            f"--{needed[0]}={getattr(settings, needed[0])} is of discounted returns, and the Config of "
            f"--agent={settings.agent} has no field discount: call its gamma so, or write IGNORES_REWARDS = True in "
            "the module of an agent that only clones (docs/new_agent.md)"
        )


def discount(config: Any) -> float:
    """The agent's gamma, or the usual one if it has none (behaviour cloning)."""
    return getattr(config, "discount", 0.99)


def discounts(config: Any) -> tuple[float, float]:
    """The agent's gamma, and that of rewards within a chunk of actions, the same but for agents with two."""
    return discount(config), getattr(config, "chunk_discount", discount(config))


def of_decisions(config: Any, length: int) -> Any:
    """``config`` with the discount from one decision to the next, where chunks have so many actions."""
    if length == 1 or not hasattr(config, "discount"):
        return config
    return dataclasses.replace(config, discount=config.discount**length)


def value_bounds(dataset: Dataset, length: int, gamma: float, within: float) -> tuple[float, float]:
    """The support that data give for values of chunks of so many actions.

    Raises:
      ValueError: ``gamma`` is 1, and values are without bounds.
    """
    if gamma >= 1:
        raise ValueError(
            f"--agent.discount={gamma:g}: episodes that a time limit cuts go on for ever, and so would their returns: "
            "give less than 1"
        )
    if length == 1 or within == gamma:
        return replay.value_bounds(dataset, gamma)
    return chunks.value_bounds(dataset, length, gamma, within)


def check_chunk(settings: Any) -> None:
    """Raises ValueError, naming the flag, on chunks of actions that nobody can execute."""
    at_least_one(settings, "chunk")
    if not 0 <= settings.replan_every <= settings.chunk:
        raise ValueError(
            f"--replan_every={settings.replan_every} must lie between 0 and --chunk={settings.chunk}: it is how many "
            "of a chunk's actions are executed, 0 for all"
        )


def rows(settings: Any, config: Any, dataset: Dataset | None) -> Any:
    """What batches are drawn from: single steps, ``n_step`` of them as one, or chunks of actions; None for no data."""
    if dataset is None:
        return None
    if settings.chunk > 1:  # where --n_step is 1
        return chunks.make(dataset, settings.chunk, *discounts(config))
    return replay.n_step(dataset, settings.n_step, discount(config))


def placed_state(arrays: Mapping[str, np.ndarray], like: State) -> State:
    """The learners' state [S, ...] from the arrays of a checkpoint, of the structure and shapes of ``like``.

    Of more seeds the first are taken, and networks that ``like`` does not have are left. Raises ValueError, naming the
    first array that is missing, of another shape, or of a network of ``like`` that has no such array here.
    """
    leaves, wanted = [], checkpoint.named({"state": like})
    for name, leaf in wanted.items():
        array = arrays.get(name)
        array = array[: leaf.shape[0]] if array is not None and leaf.shape else array
        if array is None or array.shape != leaf.shape:
            raise ValueError(
                f"its {name} is {None if array is None else array.shape}, here it is {leaf.shape}"
            )
        leaves.append(jnp.asarray(array))
    network = lambda name: name.split("/")[:3]  # state/params/critic, say
    networks = [network(name) for name in wanted]
    more = [name for name in arrays if name not in wanted and network(name) in networks]
    if more:
        raise ValueError(
            f"its {more[0]} has no place here, and without it the network would be another function"
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def sizes(settings: Any) -> dict[str, Any]:
    """The flags of an offline run at the sizes of a study, whose ``evaluations`` are those of each run."""
    names = ("seeds", "seed", "updates", "eval_episodes", "batch_size")
    return {
        **{name: getattr(settings, name) for name in names},
        "eval_every": settings.updates // settings.evaluations,
        "agent.hidden": settings.hidden,
    }


def check_sizes(settings: Any, last: int) -> None:
    """Raises ValueError, naming the flag, on `sizes` of no run, whose score is of so many ``last`` evaluations."""
    at_least_one(settings, "updates", "evaluations", "batch_size")
    several_episodes(settings)
    multiple(settings, "updates", "evaluations")
    if settings.evaluations < last:
        raise ValueError(f"--evaluations={settings.evaluations}: a score is the mean of the last {last}")


def diverges(run: Callable[[Any, Any], Any], settings: Any, config: Any) -> bool:
    """Runs a script, and says whether that diverged: where it is a result, what was logged before stands."""
    try:
        run(settings, config)
    except train.Diverged:
        return True
    return False


def curve(
    folder: Path, name: str, settings: Any, diverged: bool, before: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """What a run logged of its evaluations: when they are due [T], and their means over episodes [T, S].

    Of a run that diverged the last evaluation stands for those that it did not reach, and ``before`` if there is none.
    """
    end = settings.steps if hasattr(settings, "steps") else settings.updates
    due = np.arange(settings.eval_every, end + 1, settings.eval_every)
    means = np.full((len(due), settings.seeds), before)
    try:
        logged = log.series(folder, name)[1].mean(-1)
    except (FileNotFoundError, KeyError):
        if not diverged:
            raise
    else:
        means[: len(logged)], means[len(logged) :] = logged, logged[-1]
    return due, means


def at_least_one(settings: Any, *names: str) -> None:
    """Raises ValueError, naming the flag, on a count below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(settings, name)}")


def not_negative(settings: Any, *names: str) -> None:
    """Raises ValueError, naming the flag, on a number below 0, or NaN."""
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ValueError(f"--{name} must be at least 0, not {getattr(settings, name)}")


def one_process() -> None:
    """Raises ValueError in one of several processes, for scripts whose environments are all in one."""
    if (count := jax.process_count()) > 1:
        raise ValueError(
            f"this script trains in one process, and this is one of {count}: start it on a single host. For a sweep "
            "start one command on each, without what joins them (docs/sweeps.md)"
        )


def check_mesh(batch_size: int, mesh: jax.sharding.Mesh, seeds: int = 1) -> None:
    """Raises ValueError, naming the flags, if a batch or the seeds do not divide over the devices.

    Args:
      batch_size: rows of a batch.
      mesh: of the run.
      seeds: of all variants.
    """
    data, groups = mesh.shape["data"], mesh.shape.get("seed", 1)
    if batch_size % data:
        raise ValueError(
            f"--batch_size={batch_size} is not a multiple of the {data} devices that share each batch: change it, or "
            "give another --mesh_data (docs/tpu_pod.md)"
        )
    if seeds % groups:
        raise ValueError(
            f"{seeds} seeds, of all variants, are not a multiple of --mesh_seed={groups}: change --seeds or --mesh_seed"
        )


def multiple(settings: Any, name: str, of: str) -> None:
    """Raises ValueError, naming both flags, if one does not divide the other."""
    whole, part = getattr(settings, name), getattr(settings, of)
    if whole % part:
        raise ValueError(
            f"--{name}={whole} is not a multiple of --{of}={part}: give an --{of} that divides it, at most {whole}"
        )


def several_episodes(settings: Any, *, none: bool = False) -> None:
    """Raises ValueError if --eval_episodes are too few to select by; 0 is allowed where there may be ``none``."""
    if settings.eval_episodes < (0 if none else 2) or settings.eval_episodes == 1:
        raise ValueError(
            f"--eval_episodes={settings.eval_episodes}: give {'0 for none or ' if none else ''}at least 2, since a "
            "policy is selected by one half of them and scored on the other"
        )


def check_schedules(config: Any, updates: int) -> None:
    """Raises ValueError, naming the flag, if a learning rate falls to 0 before the last of so many updates."""
    for field in dataclasses.fields(config):
        adam = getattr(config, field.name)
        if isinstance(adam, Adam) and adam.schedule == "cosine" and updates > adam.decay_updates:
            raise ValueError(
                f"--agent.{field.name}.decay_updates={adam.decay_updates}: the learning rate is 0 from there on, and "
                f"this run goes up to update {updates}: give at least that, or "
                f"--agent.{field.name}.schedule=constant"
            )


def check_terminations(settings: Any, config: Any) -> None:
    """Raises ValueError, naming the flags, where values beyond terminations (``ignore_terminals``) would be wrong ones.

    A termination leaves a discount of 0, which says neither how many steps led to it nor who ended the episode.
    """
    if not getattr(config, "ignore_terminals", False):
        return
    several = "an episode that ends within several steps would go on with the discount of one"
    adversary = "the adversary could end no episode"
    for name, usual, why in (("n_step", 1, several), ("chunk", 1, several), ("robust", "", adversary)):
        if getattr(settings, name, usual) != usual:
            raise ValueError(
                f"--agent.ignore_terminals and --{name}={getattr(settings, name)} cannot be combined: {why}; leave one "
                "of them out"
            )


def number(flag: str, text: str, *words: str) -> float:
    """The finite number in a flag's text, which might have been one of ``words``.

    Raises ValueError, naming the flag, if there is none.
    """
    try:
        value = float(text)
    except ValueError:
        known = " nor ".join(words) or "one of its words; see --help"
        raise ValueError(f"--{flag}={text} is neither a number nor {known}") from None
    if not math.isfinite(value):
        raise ValueError(f"--{flag}={text} must be finite")
    return value


def reward_scale(text: str) -> float | str:
    """What ``--reward_scale`` says, as `rl.replay.transform.fit` takes it. Raises ValueError if that is no factor."""
    if text == transform.RETURN_RANGE:
        return text
    if (scale := number("reward_scale", text, transform.RETURN_RANGE)) == 0:
        raise ValueError(
            f"--reward_scale={text}: all rewards would be the same, and nothing could be learned from them"
        )
    return scale


def cpu() -> jax.Device:
    """The device on which policies are evaluated. Raises ValueError if JAX was told to do without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise ValueError(
            f"JAX_PLATFORMS={platforms} leaves out the CPU, on which policies are evaluated: give {platforms},cpu"
        ) from None


@contextlib.contextmanager
def evaluator(
    settings: Any,
    actor: Actor,
    environment: str,
    seeds: int,
    loaded: data.Loaded | None = None,
    tasks: Sequence[Mapping[str, Any]] = (),
) -> Iterator[evaluate.Evaluator]:
    """Runs episodes of ``environment`` as the flags say; policies trained on ``loaded`` must fit it.

    With ``tasks``, options of the environment's reset, that many episodes are of each, and they take turns.

    Raises:
      ValueError: they do not.
    """
    with evaluate.evaluator(
        actor,
        environment,
        seeds=seeds,
        episodes=settings.eval_episodes * max(len(tasks), 1),
        processes=None if settings.eval_processes < 0 else settings.eval_processes,
        reference=loaded.reference if loaded else None,
        base_seed=settings.seed,
        options=tasks,
    ) as episodes:
        if loaded:
            check_fit(loaded, episodes.spec)
        yield episodes


def check_fit(loaded: data.Loaded, environment: Spec) -> None:
    """Raises ValueError if policies trained on the data cannot act in the environment."""
    if not fits(loaded.spec, environment):
        raise ValueError(
            f"environment {loaded.environment!r} does not fit the data: it has {_in_words(environment)}, they have "
            f"{_in_words(loaded.spec)}. Give the --environment that made the log, or train without one: "
            "--eval_episodes=0 (experiments.offline and experiments.goals)"
        )


def _in_words(spec: Spec) -> str:
    shape, size = spec.observation_shape, spec.action_size
    flat = isinstance(shape, tuple) and len(shape) == 1
    observations = _count(shape[0], "number") if flat else f"shape {shape}"
    actions = _count(size, "integer action" if spec.discrete else "continuous action")
    return f"observations of {observations} and {actions}"


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def fits(logged: Spec, environment: Spec) -> bool:
    """Whether logged data are of the environment, whose largest integer actions may never have been logged."""
    if logged.discrete:
        logged = logged._replace(action_size=max(logged.action_size, environment.action_size))
    return logged == environment


def parts(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What a result has ``scores`` of: itself without a label or, of a sweep, the variants with theirs."""
    variants = result.get("variants", [])
    labels = lifecycle.labels([variant["parameters"] for variant in variants])
    return list(zip(labels, variants, strict=True)) or [("", result)]


def note_unused(settings: Any, needed: str, *names: str) -> None:
    """Prints which flags do nothing, because the one that they are of was not given."""
    default = type(settings)()
    unused = [f"--{name}" for name in names if getattr(settings, name) != getattr(default, name)]
    if unused and not getattr(settings, needed):
        print(
            f"note: {', '.join(unused)} change{'s' * (len(unused) == 1)} nothing without --{needed}",
            file=sys.stderr,
        )


def show_note(settings: Any, loaded: data.Loaded) -> None:
    """Prints what there is to know of the data; where to evaluate only if anything is evaluated."""
    if loaded.note and (settings.eval_episodes or "--environment" not in loaded.note):
        print(f"note: {loaded.note}", file=sys.stderr)


def unscored(result: Mapping[str, Any]) -> str:
    """Why a run has no scores, and the flags that give it some."""
    settings = result["settings"]
    if result.get("environment") or not settings["eval_episodes"]:
        return "no episodes were played, so there are no scores: see --eval_episodes"
    estimates = ", or --policy_estimates=2000, say, to estimate values from the data alone"
    return (
        f"no episodes were played, so there are no scores: {settings['dataset']} names no environment: give "
        f"--environment=NAME{estimates if settings.get('policy_estimates') == 0 else ''}"
    )


def show(result: Mapping[str, Any]) -> None:
    """Prints the last scores and estimates of a run, and where everything lies."""
    scored = [(label, part["scores"]) for label, part in parts(result) if part["scores"]]
    for label, scores in scored:
        for name, score in scores.items():
            mean, (low, high) = score["last"]["mean"], score["last"]["ci95"]
            spread = f"95 % interval [{low:.4g}, {high:.4g}] over seeds"
            known = "one seed, so no interval" if math.isnan(low) else spread
            print(f"{label}: {name}: {mean:.4g}, {known}" if label else f"{name}: {mean:.4g}, {known}")
    for label, part in parts(result):
        if estimate := part.get("fitted_q"):
            name = f"{label}: fitted_q" if label else "fitted_q"
            print(
                f"{name}: {estimate['mean']:.4g}, estimated from the data: the discounted return of rewards as the "
                "agent sees them"
            )
    if not scored:
        print(unscored(result))
    show_folder(result)


def show_folder(result: Mapping[str, Any]) -> None:
    """Prints where everything of a run lies, and what to look at first."""
    first = lifecycle.CURVE if (Path(result["folder"]) / lifecycle.CURVE).exists() else log.METRICS
    print(f"Everything is in {result['folder']}; look at {first} first.")
