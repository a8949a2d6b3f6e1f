"""What the scripts share: settings that become flags, the problem that these describe, and the run that they make."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import checks, flags, source_code
from rl import acting, agents, checkpoint, data, envs, evaluate, lifecycle, log, run_folder, shard
from rl.agents.optimisers import Adam
from rl.envs import entities
from rl.files import expanded
from rl.replay import chunks, transform
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.source import Source
from rl.replay.transform import Transform
from rl.types import Actor, Learner, Spec, State
from rl.values import heads
from rl.values.heads import HeadSettings, ValueHead

# Settings that there were once: runs that are identified by them keep them, and go on.
FORMER = ("unroll",)


@dataclasses.dataclass(frozen=True)
class Folder:
    """Settings: what a run leaves, and where."""

    workdir: str = ""  # run folder; by default runs/TASK/AGENT-HEAD
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True  # write TensorBoard events
    wandb: bool = False  # log to Weights & Biases too (extra: track)


@dataclasses.dataclass(frozen=True)
class Head:
    """Settings: how values are represented."""

    head: str = "scalar"  # value representation: scalar, two_hot, hl_gauss, c51, quantile or module.function
    head_size: int = 101  # outputs of the head (the scalar head has one)
    head_low: float = float("nan")  # lower end of a categorical head's support; nan: from the data
    head_high: float = float("nan")  # upper end of a categorical head's support; nan: from the data
    head_start: float = float("nan")  # value that untrained networks are near; nan: the support's middle
    head_kappa: float = 1.0  # Huber threshold of a quantile head; keep it well below the range of values
    head_sigma: float = heads.SIGMA_RATIO  # deviation of hl_gauss's Gaussian in bin widths; at least 0.5


@dataclasses.dataclass(frozen=True)
class Data:
    """Settings: what is learned from."""

    dataset: str = "synthetic-continuous"  # name (D4RL, OGBench, synthetic-...), minari:ID, or file
    data_folder: str = ""  # where named datasets lie, if not in their usual cache
    environment: str = ""  # where to evaluate, if not in the dataset's own; OGBench's tasks give rewards, too
    clip_actions: bool = False  # clip logged actions that lie outside the action box; an error without it
    flatten_observations: bool = False  # concatenate the entries of observations that are dictionaries
    shuffled: bool = False  # the file holds single transitions in no order; an error without it


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Settings: how many actions an agent decides on at once."""

    chunk: int = 1  # actions in each decision, of agents with continuous ones; 1: single actions
    replan_every: int = 0  # actions of a chunk that are executed before the next decision; 0: all


@dataclasses.dataclass(frozen=True)
class Returns:
    """Settings: over how many steps the returns in targets are."""

    n_step: int = 1  # n of n-step returns; with --td_lambda the most steps in one
    td_lambda: float = 1.0  # lambda of TD(lambda): returns over 1 to --n_step steps, drawn; 1: all --n_step


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
    ends: Callable[[data.Loaded], bool] = lambda loaded: False,
    adversary: bool = False,
) -> Problem:
    """Loads and prepares the data, and chooses the head's support from them where no flag gives it.

    Args:
      settings: has the fields of `Data` and `Head`, and may have those of `Chunk`.
      configs: hyper-parameters of all agents that are trained together; the support is wide enough for each.
      target_range: (config, spec, low, high) -> what targets reach, where rewards alone give values in [low, high].
      reward_scale, reward_shift, clip_rewards, normalize_observations: as `rl.replay.transform.fit` takes them.
      validation: whether held-out data are read, where there are any.
      begun: the run's folder, where integer actions are those of the environment (`all_actions`); None: those logged.
      ends: whether targets end episodes of the loaded data where the log does not.
      adversary: whether targets are of the worst of many dynamics.
    """
    if is_set(settings) and not agents.reads_sets(settings.agent):
        raise ValueError(
            f"--dataset={settings.dataset}: --agent={settings.agent} would take a set of entities for a history; "
            f"leave {entities.SUFFIX} out, or use hecrl"
        )
    from_data = math.isnan(settings.head_low) or math.isnan(settings.head_high)
    for config in configs:
        checks.discount(settings, config, support=from_data and heads.has_support(settings.head))
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
    ended = ends(loaded)
    # Heads without a support have one in their runs' cards: it stays as it was, so that earlier runs go on.
    adversary = adversary and heads.has_support(settings.head)
    of_rewards = {
        gammas: value_bounds(dataset, length, *gammas, ended, adversary)
        for gammas in {discounts(c) for c in configs}
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
    checkpoints = folder / run_folder.CHECKPOINTS
    size = loaded.spec.action_size
    if not settings.overwrite and (there := checkpoint.steps(checkpoints)):
        size = checkpoint.described(checkpoints, there[0])["card"].get("action_size", size)
    elif loaded.environment and settings.eval_episodes:
        with contextlib.closing(envs.make(loaded.environment)) as env:
            environment = envs.spec(env)
            checks.first_action(f"dataset={settings.dataset}", loaded, env)
        size = environment.action_size if checks.fits(loaded.spec, environment) else size
    return loaded._replace(spec=loaded.spec._replace(action_size=size))


def is_set(settings: Any) -> bool:
    """Whether the observations of ``--dataset`` are sets of entities."""
    return settings.dataset.endswith(entities.SUFFIX)


def value_head(settings: Any, bounds: tuple[float, float]) -> tuple[tuple[float, float], ValueHead]:
    """The support that the flags of `Head` give, or else ``bounds``, which the data do; and the head on it."""
    low, high = bounds
    low = low if math.isnan(settings.head_low) else settings.head_low
    high = high if math.isnan(settings.head_high) else settings.head_high
    arguments = head_settings(settings, low, high)
    start = arguments.start
    checks.head(settings)
    if heads.has_support(settings.head) and not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"--head={settings.head} needs --head_low and --head_high, the smallest and largest value it must "
            "represent: with these settings of the agent the data do not bound what targets reach"
        )
    checks.support(settings, low, high)
    if start is not None and not low <= start <= high:
        raise ValueError(f"--head_start={start:g} lies outside the head's support, [{low:g}, {high:g}]")
    return (low, high), heads.make(*arguments)


def head_settings(settings: Head, low: float, high: float) -> HeadSettings:
    """The arguments of the head that the flags of `Head` describe, for values from ``low`` to ``high``."""
    shape = settings.head_kappa, settings.head_sigma
    return HeadSettings(settings.head, low, high, settings.head_size, head_start(settings), *shape)


def head_start(settings: Head) -> float | None:
    """The value that untrained networks are near, as `rl.values.heads.make` takes it.

    A head without a support begins near 0 by itself, so that a sweep over all heads can have ``--head_start=0``.

    Raises:
      ValueError: another one is given, and the head has no support.
    """
    if math.isnan(settings.head_start):
        return None
    if not heads.has_support(settings.head):
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
) -> run_folder.Run:
    """The run that the settings describe.

    Args:
      settings: has the fields of `Folder`, ``agent`` and ``head``.
      config: the agent's hyper-parameters.
      total: steps.
      task: what is learned, the title of the curve and a part of the folder's name.
      identity: the settings that another checkpoint in the folder must agree on.
      card: what else it must agree on.
      variant: what tells it from other runs of the agent, another part of the folder's name.
      options: further fields of `rl.run_folder.Run`.

    Raises:
      ValueError: a field of the agent's config is of a type that could not be read again from the run's card.
    """
    flags.check(config)
    # Only where they are given: checkpoints from before these flags go on.
    given = {} if head_start(settings) is None else {"head_start": settings.head_start}
    for name, usual in (("head_kappa", Head.head_kappa), ("head_sigma", Head.head_sigma), ("td_lambda", 1.0)):
        if getattr(settings, name, usual) != usual:
            given[name] = getattr(settings, name)
    place, code = folder(settings, task, variant), user_code(settings)
    options["about"] = {**options.get("about", {}), **({"code": code} if code else {})}
    # Names may differ, of folders above all.
    numbers = {name: x for name, x in dataclasses.asdict(settings).items() if not isinstance(x, str)}
    options["alike"] = numbers | {"code": sorted(code.values())} | options.get("alike", {})
    before = {} if settings.overwrite else _before(place)
    chosen = _identity(settings, identity, before.get("settings"))
    return run_folder.Run(
        folder=place,
        card={
            "agent": settings.agent,
            "settings": chosen | given | _kept(before, chosen),
            "config": known(
                dataclasses.asdict(config), dataclasses.asdict(type(config)()), before.get("config")
            ),
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


def _identity(settings: Any, names: Sequence[str], before: Any) -> dict[str, Any]:
    """{name: setting} without those that a run ``before`` did not know, where they are as by default.

    So a run goes on with a version that has new settings: what they do it did without them.
    """
    usual = type(settings)()
    is_new = lambda name: isinstance(before, dict) and name not in before
    return {
        name: getattr(settings, name)
        for name in names
        if not is_new(name) or str(getattr(settings, name)) != str(getattr(usual, name))
    }


def _before(place: Path) -> dict[str, Any]:
    """The card of the run in the folder, as it began; {} where there is none."""
    if not log.is_config(place / log.CONFIG) or not checkpoint.steps(place / run_folder.CHECKPOINTS):
        return {}
    return log.read_json(place / log.CONFIG)["config"]


def known(chosen: dict[str, Any], usual: dict[str, Any], before: Any) -> dict[str, Any]:
    """The hyper-parameters ``chosen`` by flags, as a run ``before`` has them where flags leave them as ``usual``.

    Those that it did not have are left out. So a run goes on with a version that has new ones.
    """
    if not isinstance(before, dict):
        return chosen
    of_run = {}
    for name, value in chosen.items():
        if isinstance(value, dict) and usual.get(name) and name in before:
            of_run[name] = known(value, usual[name], before[name])
        elif value != usual[name] or name in before:
            of_run[name] = value
    return of_run


def _kept(card: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """{setting: value} of what a run with this card goes on with as it is there, whatever is ``chosen``.

    Data files that it has read under another path: the digest of its card says whether they are the same data. The
    folder that it began from, if that is written otherwise (``runs/iql/``). And `FORMER` settings.
    """
    before = card.get("settings", {})
    place = {
        "dataset": dataset_name,
        "offline_data": dataset_name,
        "init_from": lambda path: expanded(path).resolve(),
    }
    moved = [
        name
        for name, of in place.items()
        if chosen.get(name) and before.get(name) and of(before[name]) == of(chosen[name])
    ]
    return {name: before[name] for name in (*moved, *FORMER) if name in before}


def user_code(settings: Any) -> dict[str, str]:
    """`source_code.user_code` of the user's modules that the flags name: of the agent, the head and the environment."""
    ours = (*agents.AGENTS, *agents.SCRIPTS)
    environments = [envs.user_module(getattr(settings, name, "")) for name in ("env", "environment")]
    named = [settings.agent if settings.agent not in ours else "", settings.head.rpartition(".")[0]]
    return {
        file: digest
        for name in (*named, *environments)
        if name
        for file, digest in source_code.user_code(name).items()
    }


def changed_code(place: Path, code: Mapping[str, str]) -> str:
    """Which files of the `user_code` with which the run in the folder was trained are others now; "" if none is.

    A run without a checkpoint begins anew, and one from before code was stored goes on.
    """
    trained = checkpoint.steps(place / run_folder.CHECKPOINTS) or (place / log.RESULT).exists()
    if not code or not trained or not log.is_config(place / log.CONFIG):
        return ""
    stored = log.read_json(place / log.CONFIG)
    sessions = [one.get("config", {}) for one in (stored, *stored["resumed"])]
    before = next((one["code"] for one in sessions if "code" in one), code)
    changed = sorted(file for file in {**before, **code} if before.get(file) != code.get(file))
    have = "has" if len(changed) == 1 else "have"
    return f"{', '.join(changed)} {have} changed since this run began" if changed else ""


def check(run: run_folder.Run) -> None:
    """`rl.lifecycle.check`, to be called before the arrays of a run are made, which takes time.

    It also refuses a run of other code of one's own (`user_code`). Its message says more where nothing but the schedule
    of a learning rate has another length.
    """
    changed = "" if run.overwrite else changed_code(run.folder, run.about.get("code", {}))
    if shard.any_process(bool(changed)):
        raise checkpoint.CheckpointError(
            f"{run.folder}: {changed or 'the code of one process has changed since this run began'}: choose another "
            "--workdir, or --overwrite to start again"
        )
    try:
        lifecycle.check(run)
    except checkpoint.CheckpointError as error:
        if not error.differences or not all(".decay_updates: " in line for line in error.differences):
            raise
        newest = checkpoint.steps(run.folder / run_folder.CHECKPOINTS)[0]
        if newest > run.total:
            done, asked = newest // run.per_unit, run.total // run.per_unit
            raise checkpoint.CheckpointError(
                f"{run.folder} holds a run of {done} {run.unit}, more than --{run.unit}={asked}: choose another "
                "--workdir, or --overwrite to start again"
            ) from None
        raise checkpoint.CheckpointError(
            f"{error}\nThe learning rate falls over decay_updates, which published settings make as long as the run: a "
            "longer run is another one from its first update on, and needs a --workdir of its own"
        ) from None


def dataset_name(dataset: str) -> str:
    """What a dataset is called in titles and folders: its file, or the whole id of one of Minari's.

    ``minari:D4RL/pen/human-v2`` is ``D4RL-pen-human-v2``: other tasks of Minari have a ``human-v2``, too.
    """
    if dataset.startswith("minari:"):  # of an id all parts, of a path the last
        return "-".join(Path(dataset.removeprefix("minari:")).parts[-3:])
    return Path(dataset).name


def folder(settings: Any, task: str, variant: str = "") -> Path:
    """The run folder."""
    return run_folder.folder(settings.workdir, task.replace("/", "-"), "-".join(_words(settings, variant)))


def runs_below(folder: Path) -> str:
    """Up to five runs in the folders of a folder, as a message that it is no run goes on; "" if there are none."""
    below = sorted(str(path.parent) for path in folder.glob(f"*/{run_folder.CHECKPOINTS}"))
    return f"; runs below it are {', '.join(below[:5])}" if below else ""


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
    with checks.agent_flags(config):
        decides = agents.get(agent).make(config, chunks.spec(spec, chunk), head)
    if not isinstance(decides, Learner):
        raise ValueError(
            f"--agent={agent}: its make must return a rl.types.Learner, not {type(decides).__name__} "
            "(docs/new_agent.md)"
        )
    return acting.in_chunks(decides, spec, chunk, replan_every)


def discount(config: Any) -> float:
    """The agent's gamma, or the usual one if it has none (behaviour cloning)."""
    return getattr(config, "discount", 0.99)


def discounts(config: Any) -> tuple[float, float]:
    """The agent's gamma, and that of rewards within a chunk of actions, the same but for agents with two."""
    return discount(config), getattr(config, "chunk_discount", discount(config))


def of_decisions(config: Any, length: int) -> Any:
    """``config`` with the discount from one decision to the next, where chunks have ``length`` actions."""
    if length == 1 or not hasattr(config, "discount"):
        return config
    return dataclasses.replace(config, discount=config.discount**length)


def value_bounds(
    dataset: Dataset, length: int, gamma: float, within: float, ends: bool = False, adversary: bool = False
) -> tuple[float, float]:
    """The support that data give for values of chunks of ``length`` actions.

    ``ends`` and ``adversary``, as `rl.replay.dataset.value_bounds` takes them, are of single ones only.

    Raises:
      ValueError: ``gamma`` is 1, and an episode does not terminate; or chunks of single transitions in no order.
    """
    replay.require_finite_values(dataset, gamma, prefix="--agent.")
    if length == 1 or within == gamma:
        return replay.value_bounds(dataset, gamma, ends, adversary)
    _require_order(dataset, "chunk", length)
    return chunks.value_bounds(dataset, length, gamma, within)


def _require_order(dataset: Dataset, flag: str, length: int) -> None:
    """Raises ValueError if several steps are asked for of a log that holds single transitions in no order."""
    if length > 1 and replay.is_shuffled(dataset):
        raise ValueError(
            f"--{flag}={length} is of steps that follow each other, and the log holds single transitions in no order: "
            "leave it out"
        )


def unread(settings: Any, config: Any) -> dict[str, str]:
    """{field: why} of the agent's hyper-parameters that do nothing beside others (`rl.agents.unused`) and flags."""
    of_flags = {"chunk_discount": "it is of --chunk"} if getattr(settings, "chunk", 1) == 1 else {}
    of_schedules = {
        f"{field.name}.decay_updates": "it is of a cosine, and the schedule is constant"
        for field in dataclasses.fields(config)
        if isinstance(adam := getattr(config, field.name), Adam) and adam.schedule == "constant"
    }
    return {**agents.unused(settings.agent, config), **of_flags, **of_schedules}


def rows(settings: Any, config: Any, dataset: Dataset | None) -> Any:
    """What batches are drawn from: single steps, ``n_step`` of them as one, or chunks of actions; None for no data.

    Where the steps in a return are drawn (``td_lambda``) it is single steps, which `source` reads.
    """
    if dataset is None:
        return None
    for flag in ("chunk", "n_step"):
        _require_order(dataset, flag, getattr(settings, flag))
    if settings.chunk > 1:  # where --n_step is 1
        return chunks.make(dataset, settings.chunk, *discounts(config))
    return replay.n_step(dataset, settings.n_step if settings.td_lambda == 1 else 1, discount(config))


def source(settings: Any, config: Any, batch_size: int) -> Source:
    """The source of batches of what `rows` returns."""
    if settings.chunk > 1:
        return chunks.sampler(batch_size)
    if settings.td_lambda == 1:
        return replay.sampler(batch_size)
    return replay.lambda_sampler(batch_size, settings.n_step, discount(config), settings.td_lambda)


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


def reward_scale(text: str) -> float | str:
    """What ``--reward_scale`` says, as `rl.replay.transform.fit` takes it. Raises ValueError if that is no factor."""
    if text == transform.RETURN_RANGE:
        return text
    if (scale := checks.number("reward_scale", text, transform.RETURN_RANGE)) == 0:
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


def on_cpu(episodes: Callable[[Any, int], dict[str, np.ndarray]]) -> Callable[[State, int], dict[str, Any]]:
    """``episodes`` of policies on the CPU, as {"eval/...": [S, ...]}.

    They need not wait for the epoch that already runs on the accelerator.
    """
    device = cpu()

    def score(state: State, index: int) -> dict[str, np.ndarray]:
        with jax.default_device(device):
            scores = episodes(jax.device_put(acting.without_optimiser(state), device), index)
        return {f"eval/{name}": value for name, value in scores.items()}

    return score


@contextlib.contextmanager
def evaluator(
    settings: Any,
    actor: Actor,
    environment: str,
    seeds: int,
    loaded: data.Loaded | None = None,
    tasks: Sequence[Mapping[str, Any]] = (),
    *,
    count: int | None = None,
    reference: tuple[float, float] | None = None,
) -> Iterator[evaluate.Evaluator]:
    """Runs episodes of ``environment`` as the flags say; policies trained on ``loaded`` must fit it.

    With ``tasks``, options of the environment's reset, that many episodes are of each, and they take turns. By default
    there are ``settings.eval_episodes`` episodes, and scores are normalised by the reference of ``loaded``.

    Raises:
      ValueError: they do not.
    """
    with evaluate.evaluator(
        actor,
        environment,
        seeds=seeds,
        episodes=(settings.eval_episodes if count is None else count) * max(len(tasks), 1),
        processes=None if settings.eval_processes < 0 else settings.eval_processes,
        reference=reference or (loaded.reference if loaded else None),
        base_seed=settings.seed,
        options=tasks,
    ) as episodes:
        if loaded:
            checks.fit(loaded, episodes.spec, sets=agents.reads_sets(settings.agent))
        yield episodes
