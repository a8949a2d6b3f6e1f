"""What no run can have: flags that do not fit one another, the data or the devices. Each error names the flag."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import gymnasium
import jax

from experiments import flags
from rl import agents, data, envs, shard
from rl.agents.optimisers import Adam
from rl.envs.registry import in_own_units, shows_bytes
from rl.settings import require_at_least_one
from rl.types import Spec
from rl.values import heads


@contextlib.contextmanager
def named(prefix: str) -> Iterator[None]:
    """Errors meanwhile have this in front: one that begins with the name of a field then begins with its flag."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


@contextlib.contextmanager
def agent_flags(config: Any) -> Iterator[None]:
    """Errors meanwhile that begin with a hyper-parameter, as in ``latent=500 must be``, begin with its flag."""
    try:
        yield
    except ValueError as error:
        if str(error).partition("=")[0] in flags.names(config):
            raise ValueError(f"--agent.{error}") from None
        raise


def not_negative(settings: Any, *names: str) -> None:
    """Raises ValueError, naming the flag, on a number below 0, or NaN."""
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ValueError(f"--{name} must be at least 0, not {getattr(settings, name)}")


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


def head(settings: Any) -> None:
    """Raises ValueError, naming the flag, on a kappa, a sigma, a size or a support that the head cannot have."""
    if settings.head == "quantile" and not 1e-6 <= settings.head_kappa < math.inf:
        raise ValueError(f"--head_kappa={settings.head_kappa:g} must be finite, and at least 1e-6")
    for name in ("head_low", "head_high"):
        if math.isinf(getattr(settings, name)):
            raise ValueError(f"--{name}={getattr(settings, name):g} must be finite")
    if not (math.isnan(settings.head_low) or math.isnan(settings.head_high)):
        support(settings, settings.head_low, settings.head_high)
    gaussian = settings.head == "hl_gauss"
    if gaussian and not 0.5 <= settings.head_sigma < math.inf:
        raise ValueError(
            f"--head_sigma={settings.head_sigma:g}: give a finite number of at least 0.5 bin widths, below which the "
            f"labels of --head=hl_gauss are biased, or leave it out for {heads.SIGMA_RATIO}"
        )
    least = smallest_head(settings.head, settings.head_sigma)
    if least is not None and settings.head_size < least:
        because = f" with --head_sigma={settings.head_sigma:g}" * gaussian
        raise ValueError(
            f"--head_size={settings.head_size}: --head={settings.head} needs at least {least} outputs{because}"
        )


def smallest_head(name: str, sigma: float) -> int | None:
    """The least --head_size that `rl.values.heads.make` takes; None for a head that takes any."""
    if name == "hl_gauss":  # it adds bins at either end, for all of its Gaussian
        return 2 + 2 * math.ceil(4 * sigma)
    return {"two_hot": 2, "c51": 2, "quantile": 1}.get(name)


def head_of_values(settings: Any, agent: ModuleType) -> None:
    """Raises ValueError, naming the flag, on a head of an agent's module that only clones, and has no values."""
    if settings.head != "scalar" and getattr(agent, "IGNORES_REWARDS", False):
        raise ValueError(
            f"--head={settings.head}: --agent={settings.agent} only clones and has no value for it to represent; "
            "leave --head out"
        )


def support(settings: Any, low: float, high: float) -> None:
    """Raises ValueError, naming the flags, if no value lies in the support; flags that are NaN did not choose it."""
    if not heads.has_support(settings.head) or low < high:
        return
    chosen = {"head_low": (settings.head_low, low), "head_high": (settings.head_high, high)}
    ends = [
        f"--{name}={end:g}{' (from the data)' if math.isnan(flag) else ''}"
        for name, (flag, end) in chosen.items()
    ]
    raise ValueError(
        f"{' and '.join(ends)}: the support of --head={settings.head} needs a --head_low that is below --head_high"
    )


def chunk(settings: Any) -> None:
    """Raises ValueError, naming the flag, on chunks of actions that nobody can execute."""
    require_at_least_one(settings, "chunk", prefix="--")
    if not 0 <= settings.replan_every <= settings.chunk:
        raise ValueError(
            f"--replan_every={settings.replan_every} must lie between 0 and --chunk={settings.chunk}: it is how many "
            "of a chunk's actions are executed, 0 for all"
        )


def several_steps(settings: Any) -> None:
    """Raises ValueError, naming the flags, on returns over no number of steps, or a lambda of none."""
    require_at_least_one(settings, "n_step", prefix="--")
    if not 0 <= settings.td_lambda <= 1:
        raise ValueError(
            f"--td_lambda={settings.td_lambda} must be between 0 (one step) and 1 (all --n_step)"
        )
    if settings.td_lambda < 1 and settings.n_step == 1:
        raise ValueError(
            f"--td_lambda={settings.td_lambda} mixes returns over 1 to --n_step steps, and that is 1: give the most "
            "steps in one, --n_step=16 say"
        )


def sizes(settings: Any, last: int) -> None:
    """Raises ValueError, naming the flag, on sizes of no run; a score is of the last ``last`` evaluations."""
    require_at_least_one(settings, "updates", "evaluations", "batch_size", prefix="--")
    several_episodes(settings)
    multiple(settings, "updates", "evaluations")
    if settings.evaluations < last:
        raise ValueError(f"--evaluations={settings.evaluations}: a score is the mean of the last {last}")


def discount(settings: Any, config: Any, *, support: bool = False) -> None:
    """Raises ValueError, naming the flags, where returns are made with gamma and ``config`` has no field for it.

    Args:
      settings: the run's.
      config: the agent's hyper-parameters.
      support: whether the data give an end of the head's support.
    """
    usual = {"n_step": 1, "chunk": 1, "robust": "", "policy_estimates": 0}
    needed = [name for name, of_none in usual.items() if getattr(settings, name, of_none) != of_none]
    if needed or support:
        flag = (needed or ["head"])[0]
        has_discount(settings, config, f"--{flag}={getattr(settings, flag)} is of discounted returns")


def has_discount(settings: Any, config: Any, why: str) -> None:
    """Raises ValueError, beginning with ``why``, if an agent that does more than clone has no field for gamma."""
    if hasattr(config, "discount") or getattr(agents.get(settings.agent), "IGNORES_REWARDS", False):
        return
    raise ValueError(
        f"{why}, and the Config of --agent={settings.agent} has no field discount: call its gamma so, or write "
        "IGNORES_REWARDS = True in the module of an agent that only clones (docs/new_agent.md)"
    )


def schedules(config: Any, updates: int, stages: Mapping[str, int] = MappingProxyType({})) -> None:
    """Raises ValueError, naming the flag, if a learning rate falls to 0 before the last of this many updates.

    Args:
      config: the agent's.
      updates: of the run.
      stages: {optimiser: updates} of those whose networks move in a part of the run.
    """
    for field in dataclasses.fields(config):
        adam, last = getattr(config, field.name), stages.get(field.name, updates)
        if isinstance(adam, Adam) and adam.schedule == "cosine" and last > adam.decay_updates:
            whose = "its stage" if field.name in stages else "this run"
            raise ValueError(
                f"--agent.{field.name}.decay_updates={adam.decay_updates}: the learning rate is 0 from there on, and "
                f"{whose} goes up to update {last}: give at least that, or --agent.{field.name}.schedule=constant"
            )


def terminations(settings: Any, config: Any) -> None:
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


def one_process() -> None:
    """Raises ValueError in one of several processes, for scripts whose environments are all in one."""
    if (count := shard.started()) > 1:
        raise ValueError(
            f"this script trains in one process, and this is one of {count}: start it on a single host. For a sweep "
            "start one command on each, without what joins them (docs/sweeps.md)"
        )


def mesh(batch_size: int, mesh: jax.sharding.Mesh, seeds: int = 1) -> None:
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
            "give --mesh_seed and --mesh_data, whose product is the number of devices, or hide devices "
            "(CUDA_VISIBLE_DEVICES; docs/tpu_pod.md)"
        )
    if seeds % groups:
        raise ValueError(
            f"{seeds} seeds, of all variants, are not a multiple of --mesh_seed={groups}: change --seeds or --mesh_seed"
        )


def split_data(settings: Any, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError, naming the flag, if ``--split_data`` would leave all of the log on every device."""
    if settings.split_data and mesh.shape["data"] == 1:
        raise ValueError(
            "--split_data: one device holds all of the log here, as no other shares its batches: give --mesh_data "
            "above 1 where there are more devices, or leave it out (docs/tpu_pod.md)"
        )


def spec(card: Mapping[str, Any], environment: Spec) -> None:
    """Raises ValueError if a run learned from other observations or actions; of older ones, from other actions."""
    if "discrete" in card:
        was = Spec(_shape(card["observation_shape"]), card["action_size"], card["discrete"])
        of_log = "dataset" in card["settings"]
        if was != environment and not (of_log and fits(was, environment)):
            raise ValueError(
                f"it was trained on {in_words(was)}, here there are {in_words(environment)}; give the environment of "
                "that run"
            )
    actions(card, environment)


def _shape(stored: Any) -> Any:
    """The shape of an observation from JSON."""
    if isinstance(stored, dict):
        return {name: _shape(shape) for name, shape in stored.items()}
    return tuple(stored)


def actions(card: Mapping[str, Any], environment: Spec) -> None:
    """Raises ValueError if the networks of a run have other integer actions than the environment: those of its log."""
    size = card.get("action_size", environment.action_size)
    if environment.discrete and size != environment.action_size:
        raise ValueError(
            f"it has networks for the {size} actions of its log, here there are {environment.action_size}; train it "
            "again with --environment=NAME and --eval_episodes, by which it gets them all"
        )


def first_action(flag: str, loaded: data.Loaded, env: gymnasium.Env) -> None:
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


def environment(settings: Any) -> None:
    """Raises ValueError or ImportError if no ``--environment`` to evaluate in is called so; none is built.

    One whose package is not installed is refused where it is built: a run that is finished needs none.
    """
    name = settings.environment
    if not name or not settings.eval_episodes:
        return
    try:
        envs.check_name(name)
    except ImportError as error:
        if envs.user_module(name):
            raise ImportError(f"--environment={name}: its module cannot be imported: {error}") from error


def fit_early(settings: Any, loaded: data.Loaded, name: str | None) -> None:
    """`fit` of an ``--environment``, called ``name`` in full, before a run is begun; not of one that has to draw.

    One that cannot be built is refused where it is needed.
    """
    if not name or not settings.environment or not settings.eval_episodes or envs.draws(name):
        return
    with contextlib.suppress(ImportError, RuntimeError), contextlib.closing(envs.make(name)) as env:
        fit(loaded, envs.spec(env), sets=agents.reads_sets(settings.agent))
        if shows_bytes(env) and (loaded.dataset.transitions.observation > 1).any():
            warnings.warn(
                f"{name} observes bytes, which are divided by 255 where a policy acts, and {settings.dataset} has "
                "observations above 1: divide them by 255, too",
                stacklevel=2,
            )
        if not loaded.spec.discrete and in_own_units(env, loaded.dataset.transitions.action):
            warnings.warn(
                f"all actions of {settings.dataset} lie within the bounds of {name}, which are narrower than [-1, 1]. "
                "Actions of a log are mapped from [-1, 1] onto these bounds: if yours are in the environment's own "
                "units, subtract the middle of its bounds and divide by half their width",
                stacklevel=2,
            )


def fit(loaded: data.Loaded, environment: Spec, *, sets: bool = False) -> None:
    """Raises ValueError if policies trained on the data cannot act in the environment: see `fits`."""
    if not fits(loaded.spec, environment, sets=sets):
        raise ValueError(
            f"environment {loaded.environment!r} does not fit the data: it has {in_words(environment)}, they have "
            f"{in_words(loaded.spec)}. Give the --environment that made the log, or train without one: "
            "--eval_episodes=0"
        )


def fits(logged: Spec, environment: Spec, *, sets: bool = False) -> bool:
    """Whether logged data are of the environment, whose largest integer actions may never have been logged.

    With ``sets`` observations [N, F] are sets of entities, of which the environment may have another number.
    """
    if logged.discrete:
        logged = logged._replace(action_size=max(logged.action_size, environment.action_size))
    return logged == environment or (sets and _one_entity(logged) == _one_entity(environment))


def _one_entity(spec: Spec) -> Spec:
    """The spec with [F] in place of every observation [N, F]."""

    def last(shape: Any) -> Any:
        if isinstance(shape, Mapping):
            return {name: last(part) for name, part in shape.items()}
        return shape[-1:] if len(shape) == 2 else shape

    return spec._replace(observation_shape=last(spec.observation_shape))


def in_words(spec: Spec) -> str:
    """A spec in a message: ``observations of 11 numbers and 3 continuous actions``."""
    shape, size = spec.observation_shape, spec.action_size
    flat = isinstance(shape, tuple) and len(shape) == 1
    observations = _count(shape[0], "number") if flat else f"shape {shape}"
    actions = _count(size, "integer action" if spec.discrete else "continuous action")
    return f"observations of {observations} and {actions}"


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
