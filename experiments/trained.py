"""The policies of a run, of any script but `experiments.language`: to test in new episodes, or to act with.

    python -m experiments.trained --run=runs/hopper-medium-regen-v5/iql-scalar --episodes=100
    python -m experiments.trained --run=runs/hopper-medium-regen-v5/iql-scalar --environment=Hopper-v4
    python -m experiments.trained --run=runs/hopper-medium-regen-v5/iql-scalar --render=3

The last one draws three episodes, too: ``rollouts/frames.png`` and ``rollouts/episode1.gif`` in the run's folder.

All seeds of the run are played, by what its newest checkpoint holds. Training evaluates in other episodes than these,
so that a policy that was chosen by its scores is tested on new ones. Policies of `experiments.goals` are tested as
their run was: on each of the environment's tasks, or towards random goals. From Python:

    from experiments import trained
    from rl import envs

    policies = trained.load("runs/hopper-medium-regen-v5/iql-scalar")
    env, act = envs.make(policies.environment), trained.player(policies, member=0)
    observation, _ = env.reset(seed=0)
    action = act(observation, first=True)    # then act(observation) until the episode is over
    values = policies.critics(observation, action)    # [P, E]: of E critics in each of P policies

Observations are the environment's own; those of runs with goals are {"observation": ..., "goal": ...}. Actions lie in
[-1, 1], to which `rl.envs.make` scales those of an environment, or are integers. Values are discounted returns of
rewards as the agent saw them (``--reward_scale`` and the others); with ``--chunk``, of whole chunks [..., chunk * D].

Without an environment, fitted Q-evaluation (`rl.fitted_q`) estimates what the policies of a run of
`experiments.offline` are worth, from its dataset alone and with this many updates:

    python -m experiments.trained --run=runs/hopper-medium-regen-v5/iql-scalar --policy_estimates=20000

No episodes are played then. The estimates are those that training with the same ``--policy_estimates`` makes after its
last update. They are printed, and policy_estimates.json in the run's folder holds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from experiments import checks, common, flags, goals, logged, model_based, notes, offline, rollouts
from rl import acting, agents, checkpoint, envs, log, nest, online, outcomes, run_folder, statistics, train
from rl.agents import sac_n
from rl.data import d4rl
from rl.data.steps import same_task
from rl.files import expanded
from rl.replay import chunks, transform
from rl.replay.goals import GoalBatch
from rl.settings import require_at_least_one
from rl.types import Actor, Array, Learner, Spec, State, Transition
from rl.values import heads
from rl.values.heads import ValueHead

_NEW = 2**31 - 1  # number of an evaluation that no training gets to

# Scripts of which a setting tells that a run is theirs.
_SETTING = {"goals": "protocol", "model_based": "truth", "mbpo": "model_loss"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about a test."""

    run: str = ""  # the run's folder
    environment: str = ""  # where to play; "": where the run was evaluated
    episodes: int = 100  # of each seed's policy, and of each task of a run with goals
    seed: int = 0  # of the episodes
    eval_processes: int = -1  # worker processes for environments; -1: one per core, 0: none
    render: int = 0  # episodes of the first seed to draw, in rollouts/ of the run's folder
    policy_estimates: int = 0  # updates of fitted Q-evaluation, in place of episodes; 0: play episodes
    dataset: str = ""  # for --policy_estimates: the run's data file, if it lies elsewhere now
    data_folder: str = ""  # for --policy_estimates: where named datasets lie, if not in their usual cache


class Policies(NamedTuple):
    """The policies of all seeds of a run, and of all its variants if it was a sweep; those of one after another."""

    environment: str  # its name for `rl.envs.make`
    spec: Spec
    state: State  # [P, ...]
    actor: Actor  # of all at once, which sees the environment's own observations
    # (the environment's own observations [..., *observation], actions [..., *action]) -> [P, E, ...]: what each of E
    # critics says of them. Raises ValueError of an agent without critics
    critics: Callable[[Any, Any], Array]
    alone: Callable[[int], tuple[State, Actor]]  # of one of them, counted from 0: its state, and its actor
    labels: tuple[str, ...]  # of the variants, one for each; ("",) of a run that is no sweep
    count: int  # type: ignore[assignment]  # P, which is the number of seeds times that of variants
    step: int  # of the checkpoint
    reference: tuple[float, float] | None  # (random, expert) return, if the run's scores were normalised

    def __repr__(self) -> str:
        return f"Policies({self.environment}, {self.count} policies, step {self.step})"


def load(run: str | Path, environment: str = "") -> Policies:
    """The policies of the run in a folder, as its newest checkpoint has them.

    Args:
      run: the folder.
      environment: that they act in; "" for that of the run. Where that tests goals, this one does, too.

    Raises:
      ValueError: there is no checkpoint, it is of another script, or it does not fit the environment.
    """
    folder = expanded(str(run))
    record, arrays = _checkpoint(folder)
    card, trained_in = record["card"], run_environment(record["card"], folder)
    name = _prefix(card) + environment.removeprefix(_prefix(card)) if environment else trained_in
    if not name:
        raise ValueError(f"--run={run} does not say where it was evaluated: give --environment")
    spec, types = _shown(name)
    of_run = _shown(trained_in)[0] if trained_in and name != trained_in else spec
    if not _same(card, of_run, spec):
        raise ValueError(
            f"--environment={name} has {checks.in_words(spec)}; the run was trained in {trained_in}, which has "
            f"{checks.in_words(of_run)}"
        )
    sweep, labels, count = _sweep(card), _labels(card), _count(card)
    config, make = _config(card), _maker(card, spec)
    several = _population(card, make)
    like = _like(several, card, spec, types)
    try:
        checks.actions(card, spec)
        state = common.placed_state(arrays, like)
    except ValueError as error:
        raise ValueError(f"--run={run} does not fit {name}: {error}") from None
    seen = rollouts.transformed if _prefix(card) else transform.observations
    see = functools.partial(seen, _transform(card))

    values = jax.jit(several.critics)

    def critics(observation: Any, action: Any) -> Array:
        of_each = lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *np.shape(x)))
        return values(state, nest.map_structure(of_each, see(observation)), of_each(action))

    def alone(member: int) -> tuple[State, Actor]:
        variant = logged.variants(config, sweep)[member // card["settings"]["seeds"]]
        return train.member(state, member), acting.observing(acting.actor(make(variant)), see)

    actor = acting.observing(several.actor, see)
    scale = reference(folder, card, name, trained_in)
    return Policies(name, spec, state, actor, critics, alone, labels, count, record["step"], scale)


# ---- what a run says of itself ----------------------------------------------------------------------------


def _checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a run's newest checkpoint says, and its arrays. Raises ValueError where there is none of these scripts."""
    learners = ("state/", "carry/learner/")  # and no replay
    record, arrays = checkpoint.read(folder / run_folder.CHECKPOINTS, learners) or (None, {})
    if record is None:
        missing = "no checkpoint" if folder.is_dir() else "no such folder"
        raise ValueError(f"--run={folder}: there is {missing}{common.runs_below(folder)}")
    card = record["card"]
    if _script(card) is None:
        raise ValueError(
            f"--run={folder} is no run of experiments.offline, online, goals, model_based or mbpo, whose policies act"
        )
    if (
        _script(card) == "model_based"
    ):  # where a checkpoint holds the loop's carry, once with a step for each seed
        arrays = {name.replace("carry/learner/", "state/", 1): array for name, array in arrays.items()}
        arrays["state/step"] = arrays["state/step"].reshape(-1)[0]
    notes.note_changed_code(f"--run={folder}", folder, card)
    return record, arrays


def _script(card: Mapping[str, Any]) -> str | None:
    """Which script's run it is; "" of `experiments.offline` and `experiments.online`, None of any other."""
    for script, setting in _SETTING.items():
        if setting in card.get("settings", ()):
            return script
    return "" if {"transform", "support", "settings"} <= set(card) else None


def _prefix(card: Mapping[str, Any]) -> str:
    """Of the environment's name, in which policies with goals are tested; "" of those without."""
    return goals.PROTOCOLS[card["settings"]["protocol"]][0] if _script(card) == "goals" else ""


def _transform(card: Mapping[str, Any]) -> transform.Transform:
    """How the policies see observations; those of scripts with models, as they are."""
    return transform.from_json(card["transform"]) if "transform" in card else transform.Transform()


def run_environment(card: Mapping[str, Any], folder: Path) -> str:
    """Where a run was evaluated; "" where nothing says it."""
    if "environment" in card:
        return card["environment"] or ""
    # Of runs online, and of those whose checkpoints do not say it.
    settings = card["settings"]
    result = log.read_json(folder / log.RESULT) if (folder / log.RESULT).exists() else {}
    prefix = _prefix(card)
    return (
        settings.get("env")
        or (settings.get("environment") and prefix + settings["environment"])
        or result.get("environment")
        or ""
    )


def reference(
    folder: Path, card: Mapping[str, Any], environment: str, trained_in: str
) -> tuple[float, float] | None:
    """The (random, expert) return by which scores in an environment are normalised; None where they are not.

    It is that of the run, in any version of the environment that it was ``trained_in``. Of runs that do not say it, it
    is D4RL's of a locomotion task, if their scores were normalised.
    """
    if "reference" in card:
        return tuple(card["reference"]) if card["reference"] and same_task(environment, trained_in) else None
    with contextlib.suppress(FileNotFoundError, ValueError):
        if any("eval/normalized_return" in row for row in log.read(folder)):
            return d4rl.locomotion_reference(environment)
    return None


# ---- its learners -----------------------------------------------------------------------------------------


def _same(card: Mapping[str, Any], trained_in: Spec, here: Spec) -> bool:
    """Whether a run's policies can act here: of agents that read sets, among any number of entities."""
    return trained_in == here or (
        agents.reads_sets(card["agent"]) and checks.fits(trained_in, here, sets=True)
    )


def _shown(environment: str) -> tuple[Spec, Any]:
    """What an environment shows and takes, and the types of what it shows."""
    env = envs.make(environment)
    space, spec = env.observation_space, envs.spec(env)
    env.close()
    return spec, nest.map_structure(lambda box: np.uint8 if box.dtype == np.uint8 else np.float32, space)


def _config(card: Mapping[str, Any]) -> Any:
    """The hyper-parameters."""
    default = model_based.config if _script(card) == "model_based" else common.config
    return flags.with_fields(default(card["agent"]), card["config"])


def _labels(card: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the variants, one for each; ("",) of a run that is no sweep."""
    return tuple(outcomes.labels(logged.parameters(_sweep(card)))) or ("",)


def _sweep(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """{hyper-parameter: its value in each variant}."""
    return card.get("sweep") or {}


def _count(card: Mapping[str, Any]) -> int:
    """How many policies there are."""
    return int(card["settings"]["seeds"]) * len(_labels(card))


def _maker(card: Mapping[str, Any], spec: Spec) -> Callable[[Any], Learner]:
    """A learner of the run from its hyper-parameters."""
    settings = card["settings"]
    low, high = card.get("support") or (settings.get("head_low"), settings.get("head_high"))
    fields = {
        field.name: settings[field.name]
        for field in dataclasses.fields(common.Head)
        if field.name in settings
    }
    head = heads.make(*common.head_settings(common.Head(**fields), low, high))
    return functools.partial(_learner, card, spec, head)


def _population(card: Mapping[str, Any], make: Callable[[Any], Learner]) -> train.Population:
    """The learners of a run, to act with."""
    seeds = card["settings"]["seeds"]
    swept = {name: np.repeat(np.float32(values), seeds) for name, values in _sweep(card).items()}
    return train.population(make, _config(card), lambda *_: None, 1, sweep=swept)


def _like(several: train.Population, card: Mapping[str, Any], spec: Spec, types: Any) -> State:
    """The shapes of the learners' state; ``types`` are those of observations."""
    batch = _example(card, _config(card), spec, types)
    return jax.eval_shape(several.init, jax.random.split(jax.random.key(0), _count(card)), batch)


def _learner(card: Mapping[str, Any], spec: Spec, head: ValueHead, config: Any) -> Learner:
    settings = card["settings"]
    if _script(card) == "model_based":
        return sac_n.make(config, spec, head)
    decisions = settings.get("chunk", 1), settings.get("replan_every", 0)
    return common.learner(card["agent"], config, spec, head, *decisions)


def _example(card: Mapping[str, Any], config: Any, spec: Spec, types: Any) -> Transition | GoalBatch:
    """A batch of one row of zeros, for the shapes that the agent asks for."""
    steps = online.example(chunks.spec(spec, card["settings"].get("chunk", 1)), types)
    if _script(card) != "goals":
        return steps
    goal = steps.observation[nest.GOAL]
    return GoalBatch(steps, goal, *(goal, goal) if config.goals.subgoal_steps else ())


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
    state, actor = policies.alone(member)
    act = jax.jit(acting.resetting(actor).act)

    def step(observation: Any, first: bool = False) -> np.ndarray:
        nonlocal memory, key
        shown = nest.map_structure(lambda x: jnp.asarray(x)[None], observation)
        if memory is None:
            memory = actor.start(state, shown)
        key, now = jax.random.split(key)
        member_key = jax.random.split(now, policies.count)[member]
        action, memory = act(state, memory, shown, np.full(1, first), member_key)
        return np.asarray(action[0])[()]  # of an integer a number, which environments may look up

    return step


def scores(policies: Policies, settings: Settings, index: int = _NEW) -> dict[str, np.ndarray]:
    """{"return": [P, episodes], ...} of new episodes, as `rl.evaluate.Evaluator` gives them.

    Where an environment's tasks are tested, that many episodes are of each, and they take turns.

    Args:
      policies: as `load` gives them.
      settings: how many episodes, and of which seed.
      index: number of the evaluation, which decides its episodes. Those of training count from 0.
    """
    tasks = goals.tasks(policies.environment)
    playing = common.evaluator(
        settings,
        policies.actor,
        policies.environment,
        policies.count,
        tasks=tasks,
        count=settings.episodes,
        reference=policies.reference,
    )
    with playing as episodes:
        return goals.counted(policies.environment, episodes(policies.state, index))


# ---- what they are worth by the data alone ----------------------------------------------------------------


def estimates(settings: Settings) -> dict[str, Any]:
    """Estimated values of the policies of a run, from its dataset alone (`rl.fitted_q`).

    They are discounted returns, from the first states of the log, of rewards as the agent saw them. With the run's own
    ``--policy_estimates`` they are the last ones that its training made.

    Args:
      settings: which run, where its data lie, and how many updates (``policy_estimates``) of fitted Q-evaluation.

    Returns:
      what policy_estimates.json holds: the ``step`` of the checkpoint, the settings, and ``fitted_q`` with ``mean`` and
      ``per_seed`` [S] or, of a sweep, a list ``variants`` of the ``parameters`` and ``fitted_q`` of each.

    Raises:
      ValueError: a run of another script, or of chunks of actions, other data than it was trained on, or such whose
        observations are images or dictionaries or whose steps are in no order.
    """
    folder = expanded(settings.run)
    record, arrays = _checkpoint(folder)
    card = record["card"]
    if _script(card) or "dataset" not in card["settings"]:
        raise ValueError(
            f"--policy_estimates: --run={settings.run} is no run of experiments.offline, and those alone learn from a "
            "dataset by which policies can be estimated: leave it out, to play episodes"
        )
    of_run = _as_trained(card, settings, folder)
    offline.check(of_run)
    offline.check_sweep(of_run, _sweep(card))
    config = _config(card)
    task = offline.problem(of_run, logged.variants(config, _sweep(card)))
    if task.loaded.digest != card["digest"]:
        raise ValueError(
            f"--run={settings.run} was trained on other data than {of_run.dataset} has here, as their digests say: "
            "name its own by --dataset=FILE or --data_folder=FOLDER"
        )
    several = _population(card, _maker(card, task.loaded.spec))
    run_keys = logged.run_keys(of_run.seed, of_run.seeds, len(_labels(card)))
    estimate = offline.estimator(of_run, task, several, common.discount(config), run_keys)
    like = _like(several, card, task.loaded.spec, np.float32)
    parts = np.split(estimate(common.placed_state(arrays, like)), len(_labels(card)))
    values = [{"fitted_q": {"mean": float(part.mean()), "per_seed": part}} for part in parts]
    variants = logged.parameters(_sweep(card))
    each = [{"parameters": of, **value} for of, value in zip(variants, values, strict=False)]
    return {
        "step": record["step"],
        "settings": dataclasses.asdict(settings),
        "digest": task.loaded.digest,
        **({"variants": each} if each else values[0]),
    }


def _as_trained(card: Mapping[str, Any], settings: Settings, folder: Path) -> offline.Settings:
    """The settings of a run, of which its card has all that decide what its policies see and what values are."""
    fields = {field.name for field in dataclasses.fields(offline.Settings)}
    of_card = {name: value for name, value in card["settings"].items() if name in fields}
    low, high = card["support"]
    chosen = {
        "agent": card["agent"],
        "policy_estimates": settings.policy_estimates,
        "head_low": low,
        "head_high": high,
        "environment": card["settings"]["environment"] or card.get("environment") or "",
        "dataset": settings.dataset or card["settings"]["dataset"],
        "data_folder": settings.data_folder,
        # The card does not say whether a flag did it, but what came of it
        "flatten_observations": not isinstance(card.get("observation_shape"), Mapping),
        "validation": False,
        "updates": card["settings"]["eval_every"],  # any multiple: nothing is trained
        "workdir": str(folder),
    }
    return offline.Settings(**(of_card | chosen))


def show_estimates(estimates: Mapping[str, Any]) -> None:
    """Prints what `estimates` returns."""
    for label, part in notes.parts(estimates):
        each = " ".join(f"{value:.4g}" for value in part["fitted_q"]["per_seed"])
        name = f"{label}: fitted_q" if label else "fitted_q"
        print(f"{name}: {part['fitted_q']['mean']:.4g}; each: {each}")
    print(
        "Estimated from the data alone: the discounted return of rewards as the agent sees them, of the policies after "
        f"step {estimates['step']} of {estimates['settings']['run']}. Use it to rank policies; its level is biased "
        "where they leave the data."
    )


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    if not settings.run:
        raise ValueError("give the folder of a run: --run=runs/hopper-medium-regen-v5/iql-scalar")
    checks.not_negative(settings, "policy_estimates")
    if settings.policy_estimates:
        unused = ("environment", "episodes", "seed", "eval_processes", "render")
        if given := [name for name in unused if getattr(settings, name) != getattr(Settings, name)]:
            print(
                f"note: --{', --'.join(given)} are of episodes, and --policy_estimates plays none",
                file=sys.stderr,
            )
        values = estimates(settings)
        show_estimates(values)
        log.write_json(expanded(settings.run) / offline.ESTIMATES, values | log.provenance())
        return
    notes.note_unused(settings, "policy_estimates", "dataset", "data_folder")
    require_at_least_one(settings, "episodes", prefix="--")
    if not 0 <= settings.render <= rollouts.MOST:
        raise ValueError(f"--render={settings.render} must lie between 0 and {rollouts.MOST}")
    policies = load(settings.run, settings.environment)
    if settings.render and policies.environment.startswith(
        tuple(prefix for prefix, _ in goals.PROTOCOLS.values())
    ):
        raise ValueError(
            f"--render={settings.render}: episodes with goals are drawn by experiments.goals: give --render to the "
            "command of the run, which is then not trained again"
        )
    show(policies, scores(policies, settings), settings)
    render(policies, settings)


def render(policies: Policies, settings: Settings) -> None:
    """Draws new episodes of the first seed, and of that of each variant of a sweep."""
    seeds = policies.count // len(policies.labels)
    for number, label in enumerate(policies.labels if settings.render else ()):
        state, actor = policies.alone(number * seeds)
        for file in rollouts.film(
            expanded(settings.run) / run_folder.ROLLOUTS / label,
            state,
            actor,
            policies.environment,
            settings.render,
            index=_NEW,
            base_seed=settings.seed,
            processes=0 if settings.eval_processes == 0 else 1,
        ):
            print(f"drawn: {file}", file=sys.stderr)


def show(policies: Policies, played: Mapping[str, np.ndarray], settings: Settings) -> None:
    """Prints the scores of `scores`; success of every task apart, where an environment has several."""
    tasks = len(goals.tasks(policies.environment))
    for name, every in played.items():
        for label, each in zip(policies.labels, np.split(every, len(policies.labels)), strict=True):
            called = f"{label}: {name}" if label else name
            _show_score(called, name, each)
            if name == "success":
                for task in range(tasks):
                    _show_score(f"{called} of task {task + 1}", name, each[:, task::tasks])
    each_task = f", of each of its {tasks} tasks" if tasks else ""
    print(
        f"{settings.episodes} new episodes of {policies.environment}{each_task}, for each of {policies.count} "
        f"policies, as they are after step {policies.step} of {settings.run}."
    )


def _show_score(called: str, name: str, each: np.ndarray) -> None:
    """Prints the mean over seeds of a score [S, episodes], its interval, and that of each seed."""
    of = statistics.summary(each.mean(1), rate=name in outcomes.RATES)
    low, high = of["ci95"]
    spread = "" if np.isnan(low) else f", 95 % interval [{low:.4g}, {high:.4g}] over seeds"
    print(f"{called}: {of['mean']:.4g}{spread}; each: {' '.join(f'{x:.4g}' for x in of['each'])}")


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
