"""Pictures of what a policy does, from the start of an episode to its end.

Without goals (`film`) ``rollouts/frames.png`` shows all episodes, and ``rollouts/episode1.gif`` the first of them.

With goals (`draw`) there is a file for each task. ``rollouts/task1.png`` shows a maze, or cubes as a set of entities,
from above: the ways, the goal, and the subgoals of agents that have some. That needs no renderer.
``rollouts/task1-frames.png`` shows frames of other environments from the start to the end, with the goal where the
environment can show it, and ``rollouts/task1.gif`` the first episode.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rl import acting, envs, evaluate, nest, plot
from rl.envs import pixels, workers
from rl.envs.goals import TopView, places, top_view
from rl.envs.registry import time_limit
from rl.nest import GOAL, OBSERVATION
from rl.replay import transform
from rl.replay.transform import Transform
from rl.types import Actor, Array, Learner, State

MOST = 20  # episodes of each task that are drawn: they are all played at once

_SUBGOALS = 8  # drawn in an episode
_CANDIDATES = 1000  # logged states that subgoals are looked for among, where they are no observations
_COLUMNS = 6  # frames in a strip, the goal not counted
_FRAMES = 100  # in a GIF, at most


class Episode(NamedTuple):
    """What was seen of one."""

    observations: np.ndarray  # [T + 1, *observation], the last of them not acted on
    goal: np.ndarray  # [*observation]
    times: np.ndarray  # [K] at which `subgoals` were pursued
    subgoals: np.ndarray  # [K, *observation]
    frames: dict[int, np.ndarray]  # pictures by step, from 0 to T; or none
    goal_frame: np.ndarray | None
    success: bool


class Policy(NamedTuple):
    """One policy, and how it sees the world."""

    learner: Learner
    state: State
    transform: Transform
    logged: np.ndarray  # [N, *observation], states as the policy sees them


def draw(
    folder: Path,
    policy: Policy,
    environment: str,
    tasks: Sequence[Mapping[str, Any]],
    count: int,
    *,
    index: int = 0,
    base_seed: int = 0,
    processes: int = 1,
    score: str = "success",
) -> list[Path]:
    """Plays ``count`` episodes of each task and draws them; returns the files.

    Where neither a top view nor pictures can be had, that is said, and nothing is drawn.

    Args:
      folder: where the files go.
      policy: who plays.
      environment: with goals (`rl.envs.goals`).
      tasks: options of its resets; none: any task.
      count: episodes of each.
      index, base_seed: as of `rl.evaluate.Evaluator`: which episodes.
      processes: worker processes, at most one; 0: none.
      score: that says whether a goal was reached.
    """
    env = envs.make(environment)
    view = top_view(env)
    env.close()
    with pixels.headless():
        missing = None if is_maze(view) else no_pictures(environment, processes)
        if missing:
            print(f"no frames of {environment}: {missing}", file=sys.stderr)
        if view is None and missing:
            return []
        pictured = {} if is_maze(view) or missing else {"render_goal": True}
        options = [{**task, **pictured} for task in tasks or [{}]]
        with evaluate.evaluator(
            acting.over_seeds(_observing(policy), 0),
            environment,
            seeds=1,
            episodes=count * len(options),
            copies=count * len(options),
            processes=min(processes, 1),
            base_seed=base_seed,
            options=options,
        ) as episodes:
            every = max(1, time_limit(environment) // _FRAMES) if pictured else 0
            played = record(episodes, policy, index, score, every)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(len(options)):
        name = f"task{tasks[number]['task_id']}" if tasks else "random"
        files += _files(folder, name, environment, played[number :: len(options)], view)
    return files


def film(
    folder: Path,
    state: State,
    actor: Actor,
    environment: str,
    count: int,
    *,
    index: int = 0,
    base_seed: int = 0,
    processes: int = 1,
) -> list[Path]:
    """Plays ``count`` episodes of one policy and draws their frames; returns the files.

    Where no pictures can be had, that is said, and nothing is drawn.

    Args:
      folder: where the files go.
      state, actor: of the policy.
      environment: without goals.
      count: episodes.
      index, base_seed: as of `rl.evaluate.Evaluator`: which episodes.
      processes: worker processes, at most one; 0: none.
    """
    reels = [_Reel() for _ in range(count)]
    time = itertools.count()
    with pixels.headless():
        if missing := no_pictures(environment, processes):
            print(f"no frames of {environment}: {missing}", file=sys.stderr)
            return []
        with evaluate.evaluator(
            acting.over_seeds(actor, 0),
            environment,
            seeds=1,
            episodes=count,
            copies=count,
            processes=min(processes, 1),
            base_seed=base_seed,
        ) as episodes:

            def watch(observation: Any, memory: Any, active: np.ndarray) -> None:
                now, last = next(time), not active.any()
                due = np.array(
                    [last or (on and reel.due(now)) for reel, on in zip(reels, active, strict=True)]
                )
                for reel, picture in zip(reels, episodes.render(due) if due.any() else (), strict=False):
                    if isinstance(picture, np.ndarray):
                        reel.frames[now] = picture

            scores = episodes(jax.tree.map(lambda x: x[None], state), index, watch)
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("episode*.gif"):
        earlier.unlink()
    strips, files = {}, [folder / "frames.png"]
    for number, (total, steps) in enumerate(
        zip(scores["return"][0], scores["length"][0], strict=True), start=1
    ):
        # The end of each is looked at when all are over.
        frames = {min(t, int(steps)): frame for t, frame in reels[number - 1].frames.items()}
        shown = _spread(len(frames), _COLUMNS)
        label = f"episode {number}: return {total:.4g} in {steps} steps"
        strips[label] = {f"step {t}": frames[t] for i, t in enumerate(frames) if i in shown}
        files.append(folder / f"episode{number}.gif")
        plot.animation(files[-1], list(frames.values()))
    plot.strips(files[0], strips, environment.rpartition("/")[2])
    return files


class _Reel:
    """Frames of one episode by their step, at most `_FRAMES` and its end: of a longer one every second is kept."""

    def __init__(self) -> None:
        self.frames: dict[int, np.ndarray] = {}
        self._every = 1

    def due(self, now: int) -> bool:
        """Whether this step is to be shown."""
        if len(self.frames) == _FRAMES:
            self._every *= 2
            self.frames = {t: frame for t, frame in self.frames.items() if t % self._every == 0}
        return now % self._every == 0


def is_maze(view: TopView | None) -> bool:
    """Whether the top view shows all there is to see."""
    return view is not None and len(view.walls) > 0


def no_pictures(environment: str, processes: int) -> str | None:
    """Why there are no pictures of an environment, with a remedy; None where there are."""
    try:
        with envs.vector(environment, 1, min(processes, 1)) as probe:
            probe.reset([0])
            (picture,) = probe.render(np.ones(1, bool))
    except (ImportError, RuntimeError, workers.WorkerDied) as error:
        picture = str(error)
    if not isinstance(picture, str):
        return None
    return (
        f"{picture.splitlines()[0]}. MuJoCo's pictures: {pixels.REMEDY}. Environments of your own: render() must give "
        "a picture [H, W, 3] (render_mode='rgb_array' where they are registered). The run is finished and stored; the "
        "same command draws the frames once they can be had"
    )


def _observing(policy: Policy) -> Actor:
    """The actor, which sees the environment as its data."""
    return acting.observing(acting.actor(policy.learner), functools.partial(transformed, policy.transform))


def transformed(how: Transform, observation: Mapping[str, Any]) -> dict[str, Any]:
    """An observation and its goal as the policy sees them."""
    return nest.map_structure(functools.partial(transform.observations, how), observation)


def record(episodes: evaluate.Evaluator, policy: Policy, index: int, score: str, every: int) -> list[Episode]:
    """One episode of each of the evaluator's environments, with a frame every ``every`` steps; 0: none."""
    moments: list[tuple[Any, Any, np.ndarray]] = []
    pictures: dict[int, list[Any]] = {}

    def watch(observation: Any, memory: Any, active: np.ndarray) -> None:
        time, last = len(moments), not active.any()
        moments.append((observation, memory, active.copy()))
        if every and (last or time % every == 0):
            pictures[time] = episodes.render(active | last)

    one_seed = jax.tree.map(lambda x: x[None], policy.state)
    scores = episodes(one_seed, index, watch)
    everyone = np.ones(len(moments[0][2]), bool)
    goals = episodes.render(everyone, goal=True) if every else [None] * len(everyone)
    pursued = _pursued(policy)
    recorded = []
    for i in range(len(everyone)):
        steps = sum(bool(active[i]) for _, _, active in moments)
        shown = [nest.map_structure(lambda x, i=i: x[i], seen) for seen, _, _ in moments[: steps + 1]]
        times = _spread(steps, _SUBGOALS) if pursued else []
        held = [jax.tree.map(lambda x, i=i: x[0, i], moments[t][1]) for t in times]
        frames = {t: row[i] for t, row in pictures.items() if t < steps}
        if every:
            frames[steps] = pictures[len(moments) - 1][i]
        recorded.append(
            Episode(
                np.stack([seen[OBSERVATION] for seen in shown]),
                np.asarray(shown[0][GOAL]),
                np.array(times, int),
                np.array(
                    [pursued(memory, shown[t]) for t, memory in zip(times, held, strict=True) if pursued]
                ),
                {t: frame for t, frame in frames.items() if isinstance(frame, np.ndarray)},
                goal if isinstance(goal := goals[i], np.ndarray) else None,
                bool(scores[score][0, i]),
            )
        )
    return recorded


def _pursued(policy: Policy) -> Callable[[Any, Any], np.ndarray] | None:
    """(memory, observation) -> the subgoal [*observation] that is pursued there; None of agents without."""
    ask = policy.learner.subgoal
    if ask is None:
        return None
    rows = np.random.default_rng(0).permutation(len(policy.logged))[:_CANDIDATES]
    candidates = jax.numpy.asarray(policy.logged[np.sort(rows)])

    @jax.jit
    def subgoal(state: State, memory: Any, observation: Any) -> Array:
        return ask(state, memory, transformed(policy.transform, observation), candidates)

    def restored(memory: Any, observation: Any) -> np.ndarray:
        return np.asarray(transform.restored(policy.transform, subgoal(policy.state, memory, observation)))

    return restored


def _files(
    folder: Path, name: str, environment: str, played: Sequence[Episode], view: TopView | None
) -> list[Path]:
    """The pictures of one task."""
    files, named = [], {_label(i, episode): episode for i, episode in enumerate(played)}
    title = f"{environment.rpartition('/')[2]}, {name}"
    if view is not None:
        files.append(folder / f"{name}.png")
        routes = {label: _route(episode) for label, episode in named.items()}
        count = len(np.asarray(routes[next(iter(routes))].goal))
        objects = ("arm", *(f"cube {i}" for i in range(1, count))) if count > 1 else ()
        plot.routes(files[-1], routes, view.walls, view.side, objects=objects, title=title)
    if played[0].frames:
        files += [folder / f"{name}-frames.png", folder / f"{name}.gif"]
        plot.strips(files[-2], {label: _strip(episode) for label, episode in named.items()}, title)
        plot.animation(files[-1], list(played[0].frames.values()))
    return files


def _label(number: int, episode: Episode) -> str:
    steps = len(episode.observations) - 1
    # No more is known: where an episode goes on at its goal, it was there sooner than after all of these.
    return f"episode {number + 1}, {steps} steps: {'reached' if episode.success else 'not reached'}"


def _route(episode: Episode) -> plot.Route:
    subgoals = places(episode.subgoals) if len(episode.times) else ()
    return plot.Route(places(episode.observations), places(episode.goal[None])[0], episode.times, subgoals)


def _strip(episode: Episode) -> dict[str, np.ndarray]:
    """{caption: picture} from the start to the end, and then the goal."""
    times = list(episode.frames)
    strip = {f"step {times[i]}": episode.frames[times[i]] for i in _spread(len(times), _COLUMNS)}
    return strip if episode.goal_frame is None else {**strip, "goal": episode.goal_frame}


def _spread(count: int, most: int) -> list[int]:
    """Numbers from 0 to ``count - 1``, both included, at most ``most`` of them."""
    return np.unique(np.linspace(0, count - 1, most).astype(int)).tolist()
