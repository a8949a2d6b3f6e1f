"""`experiments.rollouts`: what is drawn is what was played, by policies that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments import rollouts
from rl import acting, plot
from rl.envs import two_rooms
from rl.nest import GOAL, OBSERVATION
from rl.replay.transform import Transform
from rl.types import Actor, Learner, State

SEEN = Transform(mean=np.float32([3.0, 2.0]), deviation=np.float32([2.0, 0.5]))
STATE = State({"speed": jnp.float32(0.5)}, {}, {}, jnp.int32(0))
HERE = np.float32([[0.0, 0.0], [1.0, -1.0]])  # of the log, as the policy sees it


def straight() -> Learner:
    """Goes to the goal in a straight line, and says that it pursues its step's number and the goal's y."""

    def start(state: State, observation: Any) -> Any:
        return jnp.zeros(observation[GOAL].shape[:-1], jnp.int32)

    def act(state: State, memory: Any, observation: Any, first: Any, key: Any) -> Any:
        way = (observation[GOAL] - observation[OBSERVATION]) * SEEN.deviation
        speed = state.params["speed"]
        return speed * way / jnp.maximum(jnp.linalg.norm(way, axis=-1, keepdims=True), 1e-6), memory + 1

    def pursued(state: State, memory: Any, observation: Any, candidates: Any) -> Any:
        return jnp.stack([memory + candidates.shape[0], observation[GOAL][..., 1]], -1)

    policy = lambda state, observation, key: observation[GOAL]
    return Learner(None, None, policy, actor=Actor(start, act), subgoal=pursued)


def test_ways_and_subgoals_are_those_of_the_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a walk of the test's own; observations are standardised for the policy and raw in the picture."""
    drawn: dict[str, plot.Route] = {}
    real = plot.routes

    def routes(path: Path, episodes: Any, *rest: Any, **more: Any) -> None:
        drawn.update(episodes)
        real(path, episodes, *rest, **more)

    monkeypatch.setattr(plot, "routes", routes)
    policy = rollouts.Policy(straight(), STATE, SEEN, HERE)
    (file,) = rollouts.draw(tmp_path, policy, "goals/TwoRooms-v0", [{"task_id": 4}], 2, processes=0)
    assert file == tmp_path / "task4.png"
    assert file.read_bytes().startswith(b"\x89PNG") and len(drawn) == 2
    for label, route in drawn.items():
        places, (goal,) = np.asarray(route.places)[:, 0], np.asarray(route.goal)
        place, walk = np.float64(places[0]), [places[0]]
        while np.linalg.norm(place - goal) > two_rooms.TOLERANCE and len(walk) <= two_rooms.LIMIT:
            way = goal - place
            place = two_rooms.move(place, 0.5 * way / np.linalg.norm(way))
            walk.append(place)
        np.testing.assert_allclose(places, walk, atol=1e-4)
        assert label.endswith(f", {len(walk) - 1} steps: reached")
        times = np.asarray(route.times)
        assert times[0] == 0 and times[-1] == len(walk) - 2 and len(times) == 8
        x = (times + 1 + len(HERE)) * SEEN.deviation[0] + SEEN.mean[0]  # after the action, of two candidates
        expected = np.stack([x, np.full(8, goal[1])], -1)
        np.testing.assert_allclose(np.asarray(route.subgoals)[:, 0], expected, rtol=1e-5)


def still() -> Learner:
    return Learner(None, None, lambda state, observation, key: 0 * observation[OBSERVATION])


def test_frames_go_from_the_start_to_the_end_and_then_to_the_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours count the steps; episodes of two tasks end at different times."""
    strips: list[Any] = []
    real = plot.strips
    monkeypatch.setattr(
        plot, "strips", lambda path, rows, title: (strips.append(rows), real(path, rows, title))
    )
    policy = rollouts.Policy(still(), STATE, Transform(), np.zeros((3, 1), np.float32))
    tasks = [{"task_id": 1}, {"task_id": 2}]
    files = rollouts.draw(tmp_path, policy, "goals/toy_environments:Shown-v0", tasks, 2, processes=0)
    assert [file.name for file in files] == ["task1-frames.png", "task1.gif", "task2-frames.png", "task2.gif"]
    for rows, steps in zip(strips, (3, 5), strict=True):
        assert [*rows] == [f"episode {i}, {steps} steps: reached" for i in (1, 2)]
        for row in rows.values():
            assert [*row] == [*(f"step {t}" for t in range(steps + 1)), "goal"]
            assert [int(x[0, 0, 0]) for x in row.values()] == [*range(steps + 1), 100 + steps]
    with Image.open(files[1]) as movie:
        assert movie.n_frames == 4 and movie.size == (6, 4)


def test_episodes_without_goals_are_filmed_from_their_start_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Colours count the steps."""
    strips: list[Any] = []
    monkeypatch.setattr(plot, "strips", lambda path, rows, title: strips.append(rows))
    actor = acting.actor(Learner(None, None, lambda state, observation, key: 0 * observation))
    files = rollouts.film(tmp_path, STATE, actor, "toy_environments:Shown-v0", 2, processes=0)
    assert [file.name for file in files] == ["frames.png", "episode1.gif", "episode2.gif"]
    (rows,) = strips
    assert [*rows] == [f"episode {i}: return 0 in 3 steps" for i in (1, 2)]
    for row in rows.values():
        assert [(name, int(x[0, 0, 0])) for name, x in row.items()] == [(f"step {t}", t) for t in range(4)]
    with Image.open(files[2]) as movie:
        assert movie.n_frames == 4 and movie.size == (6, 4)
    # Of longer episodes there are as many, and the end.
    monkeypatch.setattr(rollouts, "_FRAMES", 2)
    files = rollouts.film(tmp_path, STATE, actor, "toy_environments:Shown-v0", 1, processes=0)
    assert [*strips[1]["episode 1: return 0 in 3 steps"]] == ["step 0", "step 2", "step 3"]
    assert not rollouts.film(tmp_path / "blind", STATE, actor, "toy_environments:Blind-v0", 1, processes=0)
    assert "no frames of toy_environments:Blind-v0: OSError" in capsys.readouterr().err


def test_without_a_renderer_that_is_said_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = rollouts.Policy(still(), STATE, Transform(), np.zeros((3, 1), np.float32))
    assert (
        rollouts.draw(tmp_path, policy, "goals/toy_environments:Blind-v0", [{"task_id": 1}], 1, processes=0)
        == []
    )
    message = capsys.readouterr().err
    assert "no frames of goals/toy_environments:Blind-v0: OSError('no screen')" in message
    assert "MUJOCO_GL=egl" in message and "the same command draws the frames" in message
