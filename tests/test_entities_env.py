"""Scenes of cubes as sets: features, ids, goals, and the same in an environment, in its data and in a run's batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("ogbench")

from experiments import goals
from rl import data, envs
from rl.agents import gciql, hecrl
from rl.envs import entities
from rl.nest import GOAL, OBSERVATION
from rl.replay.goals import Goals, Hindsight

CENTRE = np.array([0.425, 0.0, 0.0])  # of the table, in metres


def ids(sets: np.ndarray) -> np.ndarray:
    return sets[..., entities.FEATURES :].argmax(-1)


@pytest.fixture(scope="module")
def env() -> Iterator[Any]:
    env = envs.make("random-goals/heavy-cube-double-v0+entities")
    yield env
    env.close()


def test_an_environment_shows_its_cubes_as_a_set(env: Any) -> None:
    seen = []
    for seed in (0, 0, 1):
        observation, _ = env.reset(seed=seed)
        now, goal = observation[OBSERVATION], observation[GOAL]
        assert now.shape == goal.shape == (3, 15) == env.observation_space[OBSERVATION].shape
        assert now.dtype == np.float32 and env.observation_space.contains(observation)
        truth = env.unwrapped.compute_ob_info()
        np.testing.assert_allclose(now[0, :3], (truth["proprio/effector_pos"] - CENTRE) * 10, atol=1e-5)
        np.testing.assert_allclose(now[0, 5], truth["proprio/gripper_opening"][0] * 3, atol=1e-5)
        for i in range(2):
            yaw = truth[f"privileged/block_{i}_yaw"][0]
            position = (truth[f"privileged/block_{i}_pos"] - CENTRE) * 10
            np.testing.assert_allclose(now[1 + i, :6], [*position, np.cos(yaw), np.sin(yaw), 0], atol=1e-5)
        assert ids(now).tolist() == ids(goal).tolist() and ids(now)[0] == 0 and len({*ids(now)}) == 3
        seen.append(now)
    np.testing.assert_array_equal(*seen[:2])
    assert ids(seen[2]).tolist() != ids(seen[0]).tolist()
    density = env.unwrapped.model.body("object_0").mass[0] / 0.04**3
    np.testing.assert_allclose(density, 8000)


def test_a_goal_is_reached_where_every_cube_is_near_its_place(env: Any) -> None:
    env.reset(seed=0)
    task = env.unwrapped
    for far, expected in ((0.039, True), (0.041, False)):
        for i in range(2):
            place = task._data.mocap_pos[task._cube_target_mocap_ids[i]].copy()
            task._data.joint(f"object_joint_{i}").qpos[:3] = place + far * i * np.eye(3)[0]
        observed = (
            np.stack([task._data.joint(f"object_joint_{i}").qpos[:3] for i in range(2)]) - CENTRE
        ) * 10
        goal = (task._data.mocap_pos[task._cube_target_mocap_ids] - CENTRE) * 10
        assert all(task._compute_successes()) == entities.reached(observed, goal) == expected


def write(path: Path, cubes: int, episodes: int = 4, rows: int = 6) -> np.ndarray:
    """A file in OGBench's layout of cubes that stay, but for small steps, where an episode puts them."""
    rng = np.random.default_rng(0)
    n = episodes * rows
    place = np.repeat(rng.normal(size=(episodes, 19 + 9 * cubes)), rows, 0)
    observations = (place + 0.2 * rng.normal(size=place.shape)).astype(np.float32)
    actions = rng.uniform(-1, 1, (n, 5)).astype(np.float32)
    np.savez(
        path,
        observations=observations,
        actions=actions,
        terminals=np.arange(1, n + 1) % rows == 0,
        qpos=np.zeros((n, 3), np.float32),
    )
    return observations


def test_data_are_sets_with_ids_of_their_episode(tmp_path: Path) -> None:
    vectors = write(tmp_path / "two.npz", 2)
    steps = data.load(f"{tmp_path}/two.npz+entities", environment="cube-double-v0")
    assert steps.environment == "cube-double-v0+entities" and steps.spec.observation_shape == (3, 15)
    now, after = steps.dataset.transitions.observation, steps.dataset.transitions.next_observation
    rows = np.flatnonzero(np.arange(len(vectors)) % 6 != 5)
    for sets, at in ((now, rows), (after, rows + 1)):
        np.testing.assert_array_equal(sets[:, 0, :6], vectors[at, 12:18])
        np.testing.assert_array_equal(sets[:, 2, :5], vectors[at][:, [28, 29, 30, 35, 36]])
    of_episode = ids(now).reshape(4, 5, 3)
    assert (of_episode == of_episode[:, :1]).all() and (ids(now) == ids(after)).all()
    assert len({tuple(row) for row in of_episode[:, 0]}) > 1
    write(tmp_path / "none.npz", 0)
    with pytest.raises(data.DataError, match=r"none\.npz\+entities: .* 1 to 8 cubes.* not vectors of 19"):
        data.load(f"{tmp_path}/none.npz+entities")


@pytest.mark.slow
def test_buttons_are_no_cubes(tmp_path: Path) -> None:
    """What OGBench's smallest puzzle shows is as long as what four cubes do."""
    write(tmp_path / "puzzle-3x3-play-v0.npz", 4)
    for make, name in (
        (envs.make, "goals/puzzle-3x3-v0"),
        (data.load, f"{tmp_path}/puzzle-3x3-play-v0.npz"),
    ):
        with pytest.raises(ValueError, match=r"has buttons, and \+entities reads cubes alone"):
            make(f"{name}+entities")


def test_agents_that_read_histories_are_not_given_sets(tmp_path: Path) -> None:
    """GCIQL built a causal transformer over the order of the cubes, without a word."""
    write(tmp_path / "two.npz", 2)
    config = gciql.Config()
    settings = goals.Settings(agent="gciql", dataset=f"{tmp_path}/two.npz+entities", eval_episodes=0)
    with pytest.raises(ValueError, match="--agent=gciql would take a set of entities for a history"):
        goals.problem(settings, config, [config])


@pytest.mark.slow
def test_a_run_rewards_the_step_after_which_all_cubes_are_near(tmp_path: Path) -> None:
    """Rewards come from positions as they were logged, while the agent sees standardised ones."""
    write(tmp_path / "two.npz", 2)
    settings = goals.Settings(
        agent="hecrl",
        dataset=f"{tmp_path}/two.npz+entities",
        normalize_observations=True,
        eval_episodes=0,
        batch_size=512,
    )
    elsewhere = hecrl.Config(goals=Hindsight(Goals(0.2, 0.4, 0.4, False), next_state=True, subgoal_steps=2))
    with pytest.raises(ValueError, match=r"name other cubes: give --agent.goals.value.random=0"):
        goals.problem(settings, elsewhere, [elsewhere])
    config = hecrl.Config(goals=Hindsight(Goals(0.2, 0.8, 0.0, False), next_state=True, subgoal_steps=2))
    task = goals.problem(settings, config, [config])
    batch = goals.source(settings, config)(task.trajectories, jax.random.key(0), 0)
    seen = task.data.transform
    raw = [
        np.asarray(x)[:, 1:, :3] * seen.deviation[:3] + seen.mean[:3]
        for x in (batch.value.next_observation[OBSERVATION], batch.value.next_observation[GOAL])
    ]
    near = (np.linalg.norm(raw[0] - raw[1], axis=-1) < 0.4).all(-1)
    assert 0.2 < near.mean() < 0.9
    np.testing.assert_array_equal(batch.value.reward, near - 1.0)
    features = np.asarray(task.trajectories.transitions.observation).reshape(-1, 15)
    assert abs(features.mean(0)).max() < 0.2 and features.max() <= 5
