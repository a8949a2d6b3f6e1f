r"""Train a goal-conditioned agent on logged trajectories, several seeds at once, and say which goals it reaches.

    python -m experiments.goals --agent=hiql --dataset=pointmaze-medium-navigate-v0 --preset=paper

The datasets are OGBench's without a task (Park et al. 2025), whose rewards are not used: goals are states that were
reached later, or elsewhere (`rl.replay.goals`, ``--agent.goals...``). ``--protocol`` says how policies are tested:

    ogbench  the environment's tasks, ``--eval_episodes`` of each, success at any step; the score of a run is its mean
             over the last three evaluations
    hecrl    ``--eval_episodes`` in all, random starts and goals, success at the last step (Haramati et al. 2026)

``--dataset=cube-double-play-v0+entities`` shows the scene as a set of objects (`rl.envs.entities`), which HECRL's
networks read; goals are then reached where every cube is within 4 cm, not only in exactly that state.

The run folder is that of `experiments.offline`, and the same command continues an interrupted run to the same bits.
``--render=3`` draws three episodes of each task in ``rollouts`` (`experiments.rollouts`), of a finished run, too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app

from experiments import checks, common, flags, logged, notes, presets, rollouts, studies
from rl import acting, agents, envs, lifecycle, log, outcomes, run_folder, shard, statistics, train
from rl.envs import entities
from rl.envs.goals import RANDOM, TASKS
from rl.replay import goals, transform
from rl.replay.dataset import Dataset
from rl.replay.goals import Trajectories
from rl.replay.source import Source
from rl.settings import require_choice
from rl.types import Actor, Key, Learner, Spec, State

# Of each protocol the environments, and the score that says whether a goal was reached.
PROTOCOLS = {"ogbench": (TASKS, "success"), "hecrl": (RANDOM, "final_success")}

EVALUATIONS = 3  # the last ones, over which a run's score is the mean

# Settings that another checkpoint in the same folder must agree on.
IDENTITY = (*logged.IDENTITY, "protocol", "normalize_observations")


@dataclasses.dataclass(frozen=True)
class Settings(logged.Settings):
    """Everything about a run that is not the agent's own."""

    agent: str = "hiql"  # crl, gcbc, gciql, gcivl, hecrl, hiql, qrl, or my.agent
    dataset: str = "synthetic-goals"  # OGBench's without a task (pointmaze-medium-navigate-v0), or file
    protocol: str = "ogbench"  # evaluation: ogbench (its tasks) or hecrl (random goals, held to the end)
    normalize_observations: bool = False  # standardise observations and goals by the data's moments
    eval_episodes: int = 20  # episodes per seed and evaluation (ogbench: and task), at least 2; 0: none
    render: int = 0  # episodes of each task to draw at the end, in rollouts/; of a finished run, too


class Problem(NamedTuple):
    """The data of a run as its agent sees them."""

    data: common.Problem  # its spec is that of an agent with goals
    trajectories: Trajectories
    validation: Trajectories | None
    environment: str | None  # to evaluate in, by its name for `rl.envs.make`


def run(settings: Settings, config: Any, sweep: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    Args:
      settings: the run.
      config: the agent's hyper-parameters.
      sweep: as `experiments.offline.run` takes it.

    A run that is finished is left as it is, and its result is returned.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Diverged: a metric stopped being finite; the last checkpoint is of the epoch before.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    checks.environment(settings)
    sweep = logged.floats(sweep)
    if "discount" in sweep:
        raise ValueError(
            "a sweep of discount: all runs of one program draw their goals by one, --agent.discount; train each as a "
            "run of its own"
        )
    checks.schedules(config, settings.updates)
    task = problem(settings, config, logged.variants(config, sweep))
    checks.fit_early(settings, task.data.loaded, task.environment)
    mesh = shard.mesh(settings.mesh_seed, settings.mesh_data)
    population, run_keys = learners(settings, config, sweep, task, mesh)
    checks.mesh(settings.batch_size, mesh, len(run_keys))
    this = _run(settings, config, sweep, task)
    common.check(this)
    state = jax.jit(population.init)(run_keys, example(settings, config, task.trajectories))
    start = lifecycle.begin(this, {"state": shard.place_state(state, mesh)})
    if start.result is not None:
        render(settings, config, sweep, this, task, start.tree["state"], mesh)
        run_folder.complete(this.folder)
        return start.result
    if shard.is_main():
        _print_notes(settings, config, task)
    with (
        scorer(settings, task, population, len(run_keys), mesh) as score,
        lifecycle.session(this, start) as session,
    ):
        validate = logged.validator(
            settings,
            task.validation,
            lambda chosen, wrap: learners(chosen, config, sweep, task, mesh, wrap),
            mesh,
        )
        state = logged.loop(
            settings,
            session,
            start,
            population,
            task.trajectories,
            run_keys,
            mesh,
            score,
            validate,
        )
        result = session.finish(
            lambda part, parts: {"reached": reached(settings, this.folder, task.environment, part, parts)},
            source=task.data.loaded.source,
            environment=task.environment,
        )
    render(settings, config, sweep, this, task, state, mesh)
    run_folder.complete(this.folder)
    return result


def _run(settings: Settings, config: Any, sweep: Mapping[str, list[float]], task: Problem) -> run_folder.Run:
    """The run folder, and what its checkpoints must agree on."""
    return common.run(
        settings,
        config,
        settings.updates,
        task=common.dataset_name(settings.dataset),
        identity=IDENTITY,
        card={
            "sweep": sweep,
            "digest": task.data.loaded.digest,
            "support": task.data.support,
            "transform": transform.to_json(task.data.transform),
        },
        about={
            "preset": presets.stored("goals", settings, config, "dataset"),
            "action_size": task.data.loaded.spec.action_size,
            "environment": task.environment,
        },
        alike={"held_out": len(task.validation.end) if task.validation else 0},
        variants=logged.parameters(sweep),
        leaves=(run_folder.ROLLOUTS,),
        follows=bool(settings.render),
        task_episodes=settings.eval_episodes,
    )


def _print_notes(settings: Settings, config: Any, task: Problem) -> None:
    """Prints which flags do nothing, and why nothing will be evaluated."""
    notes.note_unused_by_agent("goals", settings, config, "dataset", task.data.loaded.spec)
    if settings.eval_episodes and not task.environment:
        print(
            f"note: {settings.dataset} names no environment to evaluate in: give --environment=NAME",
            file=sys.stderr,
        )


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    logged.check(settings)
    if settings.split_data:
        raise ValueError(
            "--split_data: goals are later states of an episode, or any of the log, which other devices would hold: "
            "leave it out, and each device holds all of the data"
        )
    require_choice("protocol", settings.protocol, PROTOCOLS, prefix="--")
    if not 0 <= settings.render <= rollouts.MOST:
        raise ValueError(
            f"--render={settings.render} must lie between 0 and {rollouts.MOST}, episodes of each task"
        )


def check_agent(settings: Settings, config: Any) -> None:
    """Raises ValueError, naming the flag, on an agent that cannot learn to reach goals, or not by its settings."""
    if not isinstance(getattr(config, "goals", None), goals.Hindsight):
        raise ValueError(
            f"--agent={settings.agent} learns from rewards and not from goals: run it with python -m "
            f"experiments.offline; agents with goals are {', '.join(agents.GOALS)}"
        )
    goals.check_probabilities(config.goals, "--agent.")
    checks.has_discount(settings, config, "goals are drawn by discounted distances")
    if common.discount(config) >= 1:
        raise ValueError(
            f"--agent.discount={common.discount(config)} must be below 1: with it, a goal that is never reached has no "
            "finite value, and distances of goals are drawn without end"
        )
    if settings.head != "scalar" and not hasattr(agents.get(settings.agent), "target_range"):
        raise ValueError(
            f"--head={settings.head}: {settings.agent} regresses no value for it to represent; leave --head=scalar"
        )


def problem(settings: Settings, config: Any, configs: Sequence[Any]) -> Problem:
    """The data, and where policies are tested.

    Args:
      settings: the run's.
      config: the agent's hyper-parameters.
      configs: those of every run of a sweep.

    Raises:
      ValueError: data or an agent that goals cannot be learned from or by.
    """
    check_agent(settings, config)

    def target_range(config: Any, spec: Spec, low: float, high: float) -> tuple[float, float]:
        return agents.target_range(settings.agent, config, spec, low, high)

    task = common.problem(
        settings,
        configs,
        target_range,
        normalize_observations=settings.normalize_observations,
        validation=settings.validation,
        begun=common.folder(settings, common.dataset_name(settings.dataset)),
    )
    drawn = {f"goals.{name}": getattr(config.goals, name).random for name in ("value", "actor")}
    read = drawn.keys() - agents.unused(settings.agent, config).keys()
    if common.is_set(settings) and (others := [name for name in drawn if name in read and drawn[name]]):
        raise ValueError(
            f"--dataset={settings.dataset}: the ids of its cubes are of one episode, and goals of another name other "
            f"cubes: give {' and '.join(f'--agent.{name}.random=0' for name in others)}"
        )
    prefix = PROTOCOLS[settings.protocol][0]
    environment = (task.loaded.environment or "").removeprefix(prefix)
    if environment.startswith((TASKS, RANDOM)):
        raise ValueError(
            f"--environment={environment}: --protocol={settings.protocol} says which goals are tested, those of "
            f"{prefix}: leave {environment.partition('/')[0]}/ out, or give the other --protocol"
        )
    if "singletask" in environment:
        raise ValueError(
            f"{environment} has one goal, and rewards for it: run --dataset={settings.dataset} with python -m "
            "experiments.offline, or give names without -singletask-"
        )
    if settings.render and not environment:
        raise ValueError(
            f"--render={settings.render}: {settings.dataset} does not say where to act: give --environment, or leave "
            "--render out"
        )
    agents.check_data(settings.agent, config, task.dataset.transitions)
    return Problem(
        task._replace(loaded=task.loaded._replace(spec=goals.conditioned_spec(task.loaded.spec))),
        trajectories(settings, config, task.dataset, task.loaded.dataset),
        _held_out(settings, config, task),
        f"{prefix}{environment}" if environment else None,
    )


def trajectories(settings: Settings, config: Any, transformed: Dataset, as_logged: Dataset) -> Trajectories:
    """The trajectories as the agent sees them; where a scene is a set, with the positions that say what is reached."""
    steps = as_logged.transitions
    logged_at = steps.next_observation if config.goals.next_state else steps.observation
    return goals.trajectories(
        transformed,
        hindsight(settings, config),
        entities.positions(logged_at) if common.is_set(settings) else None,
    )


def _held_out(settings: Settings, config: Any, task: common.Problem) -> Trajectories | None:
    """The trajectories that losses are also measured on. Raises ValueError if they are too short for the goals."""
    if task.validation is None or task.loaded.validation is None:
        return None
    try:
        return trajectories(settings, config, task.validation, task.loaded.validation)
    except ValueError as error:
        raise ValueError(
            f"held-out data of {settings.dataset} (NAME-val): {error}; or leave these data out: --validation=false"
        ) from None


def source(settings: Settings, config: Any) -> Source:
    """Batches of the agent's."""
    success = entities.reached if common.is_set(settings) else None
    return goals.sampler(settings.batch_size, hindsight(settings, config), common.discount(config), success)


def hindsight(settings: Settings, config: Any) -> goals.Hindsight:
    """The agent's, without subgoals if it reads none: then no episode is too short to have one."""
    unread = goals.NO_SUBGOALS.keys() & agents.unused(settings.agent, config).keys()
    return dataclasses.replace(config.goals, subgoal_steps=0) if unread else config.goals


def example(settings: Settings, config: Any, data: Trajectories) -> goals.GoalBatch:
    """A batch that says what shapes they have, and nothing else."""
    draw = source(dataclasses.replace(settings, batch_size=2), config)
    shapes = jax.eval_shape(draw, data, jax.random.key(0), 0)
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def learners(
    settings: Settings,
    config: Any,
    sweep: Mapping[str, list[float]],
    task: Problem,
    mesh: jax.sharding.Mesh,
    wrap: Callable[[Learner], Learner] = lambda learner: learner,
) -> tuple[train.Population, Key]:
    """All variants times all seeds as one population, and their keys; every learner is what ``wrap`` makes of it."""
    return logged.population(
        settings,
        config,
        sweep,
        lambda config: wrap(common.learner(settings.agent, config, task.data.loaded.spec, task.data.head)),
        source(settings, config),
        mesh,
    )


@contextmanager
def scorer(
    settings: Settings, task: Problem, population: train.Population, count: int, mesh: jax.sharding.Mesh
) -> Iterator[Callable[[State, int], dict[str, np.ndarray]]]:
    """A function (state, number of the evaluation) -> {"eval/...": [S, episodes]}; all hosts call it, one evaluates.

    Episodes of an environment's tasks take turns: episode ``e`` is of task ``e`` modulo their number.

    Raises:
      ValueError: the environment has no goals, or does not fit the data.
    """
    actor = observing(population.actor, task)
    playing = logged.scorer(settings, actor, task.environment, count, task.data.loaded, mesh, tasks)
    with playing as episodes:

        def score(state: State, index: int) -> dict[str, np.ndarray]:
            scores = episodes(state, index)
            if scores and f"eval/{PROTOCOLS[settings.protocol][1]}" not in scores:
                raise ValueError(
                    f"environment {task.environment} does not say whether a goal is reached: the info of each step "
                    "needs success (rl.envs.goals); evaluate in one that has it (--environment), or not at all "
                    "(--eval_episodes=0)"
                )
            return counted(task.environment or "", scores)

        yield score


def observing(actor: Actor, task: Problem) -> Actor:
    """The actor in the environment, whose observations and goals it sees as in its data."""
    return acting.observing(actor, functools.partial(rollouts.transformed, task.data.transform))


def counted(environment: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    """``scores`` of an environment, but for success where its protocol scores the end: what is lost does not count."""
    others = tuple(prefix for prefix, score in PROTOCOLS.values() if score != "success")
    if not environment.startswith(others):
        return dict(scores)
    return {name: score for name, score in scores.items() if name.removeprefix("eval/") != "success"}


def tasks(environment: str) -> list[dict[str, int]]:
    """Options of a reset for each task that is tested; none where goals are drawn at random, or there are none."""
    if not environment.startswith(TASKS):
        return []
    env = envs.make(environment)
    count = env.get_wrapper_attr("num_tasks")
    env.close()
    return [{"task_id": i + 1} for i in range(count)]


def render(
    settings: Settings,
    config: Any,
    sweep: Mapping[str, list[float]],
    this: run_folder.Run,
    task: Problem,
    state: State,
    mesh: jax.sharding.Mesh,
) -> None:
    """Draws episodes of the first seed of a finished run, and of each variant of a sweep; all hosts call it.

    Args:
      settings, config, sweep: of the run.
      this: the run, in whose folder the pictures go.
      task: its data and environment.
      state: at its end.
      mesh: of the run.
    """
    if not settings.render or task.environment is None:
        return
    local = shard.gather(acting.without_optimiser(state), mesh)
    if not shard.is_main():
        return
    cpu = common.cpu()
    labels = outcomes.labels(this.variants) or [""]
    with jax.default_device(cpu):
        for number, (label, variant) in enumerate(zip(labels, logged.variants(config, sweep), strict=True)):
            first = train.member(local, number * settings.seeds)
            learner = agents.get(settings.agent).make(variant, task.data.loaded.spec, task.data.head)
            policy = rollouts.Policy(
                learner,
                jax.device_put(first, cpu),
                task.data.transform,
                np.asarray(task.data.dataset.transitions.observation),
            )
            files = rollouts.draw(
                this.folder / run_folder.ROLLOUTS / label,
                policy,
                task.environment,
                tasks(task.environment),
                settings.render,
                index=settings.updates // settings.eval_every,
                base_seed=settings.seed,
                processes=0 if settings.eval_processes == 0 else 1,
                score=PROTOCOLS[settings.protocol][1],
            )
            for file in files:
                print(f"drawn: {file}", file=sys.stderr)


def reached(
    settings: Settings, folder: Path, environment: str | None, part: int = 0, parts: int = 1
) -> dict[str, Any]:
    """How often goals were reached in the last evaluations: of each task, and the mean over tasks.

    Args:
      settings: of the run.
      folder: of the run.
      environment: where it was evaluated, if anywhere.
      part, parts: which of how many equal shares of the logged seeds, such as those of a variant of a sweep.

    Returns:
      ``updates`` of the evaluations, and {task: summary over seeds} as ``tasks`` ("all" is their mean); nothing where
      nothing was evaluated, or no line of it is left.
    """
    if not environment or not settings.eval_episodes:
        return {}
    try:
        steps, scores = log.series(folder, f"eval/{PROTOCOLS[settings.protocol][1]}", settings.updates)
    except KeyError:
        return {}
    last = np.split(scores[-EVALUATIONS:], parts, 1)[part]
    each = last.reshape(*last.shape[:2], settings.eval_episodes, -1).mean((0, 2))  # [S, tasks]
    named = {f"task{i + 1}": x for i, x in enumerate(each.T)} if each.shape[1] > 1 else {}
    columns = {**named, "all": each.mean(1)}
    return {
        "updates": steps[-EVALUATIONS:],
        "tasks": {name: statistics.summary(x, rate=True) for name, x in columns.items()},
    }


PUBLISHED = Settings(preset=presets.PAPER)
"""The defaults of the command line, where published settings stand unless a flag says otherwise."""


def _with_interval(scores: Sequence[float]) -> str:
    if len(scores) == 1:
        return f"{scores[0]:.3f} (one seed, so no interval)"
    return studies.between(scores, ".3f")


def show(result: Mapping[str, Any]) -> None:
    """Prints how often the goals of each task were reached, and where everything lies."""
    score = PROTOCOLS[result["settings"]["protocol"]][1].replace("_", " ")
    parts = [(label, part["reached"]) for label, part in notes.parts(result) if part["reached"]]
    rows = [
        (f"{label}: {name}" if label else name, _with_interval(scores))
        for label, part in parts
        for name, scores in part["tasks"].items()
    ]
    if rows:
        count = len(parts[0][1]["updates"])
        mean = f"mean of {count} evaluations" if count > 1 else "one evaluation"
        print(studies.table(("goals", f"{score}, {mean} [95 % interval]"), rows))
    else:
        print(notes.unscored(result))
    notes.show_folder(result)


def main(_: list[str]) -> None:
    shard.initialize()
    result = run(*presets.from_flags("goals", PUBLISHED, common.config, "dataset"))
    if shard.is_main():
        show(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(PUBLISHED, common.config))
