"""Recipes: what an episode holds, that it depends on its seed alone, and the files that come out."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ogbench")

from rl import envs
from rl.data.recipes import (
    RECIPES,
    Recipe,
    behaviour,
    collect,
    collector,
    find,
    manipulation,
    pointmaze,
    pool,
    read_card,
    scripted,
)
from rl.data.recipes.episode import Episode, Simulate
from rl.envs import directional_ant
from rl.envs.registry import time_limit

ANT = "antmaze-medium-stitch-v0"
MAZE, STITCH, CUBE, NOISY = (
    "pointmaze-medium-navigate-v0",
    "pointmaze-medium-stitch-v0",
    "cube-single-play-v0",
    "cube-single-noisy-v0",
)


# One antmaze of each kind: the four mazes are pointmaze's.
MADE = [
    name
    for name, recipe in RECIPES.items()
    if not recipe.is_walked or name in ("antmaze-giant-navigate-v0", ANT, "antmaze-teleport-explore-v0")
]
# In CI every family, every kind of data, a small and a large scene; the other sizes have the same code.
IN_CI = (
    *("pointmaze-medium-stitch-v0", "pointmaze-teleport-navigate-v0", ANT, "antmaze-teleport-explore-v0"),
    *("cube-single-noisy-v0", "cube-octuple-play-v0", "scene-noisy-v0", "scene-play-v0"),
    *("puzzle-3x3-play-v0", "puzzle-4x6-noisy-v0", "heavy-cube-single-ppp-v0", "heavy-cube-triple-stack-v0"),
)


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a walker with random weights."""
    from test_recipes_locomotion import make_actors

    path = tmp_path_factory.mktemp("walker") / "ant.npz"
    behaviour.save(path, make_actors(pointmaze.WALKER, 29, 8))
    return path


def simulator(dataset: str, rows: int, walker: Path | None = None) -> Simulate:
    if "maze" in dataset:
        return pointmaze.simulator(find(dataset), rows, walker and str(walker))
    return manipulation.simulator(find(dataset), rows)


def seed(episode: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(0, spawn_key=(0, episode))


def same(a: Episode, b: Episode) -> bool:
    return a[1:] == b[1:] and all(np.array_equal(a.data[name], b.data[name]) for name in a.data | b.data)


# Episodes.


@pytest.fixture(scope="module")
def built() -> dict[str, Callable[[str], Any]]:
    """What builds the environments of a family, each once: that takes longer than an episode of a few steps."""
    return {family.__name__: functools.cache(family._make_env) for family in (pointmaze, manipulation)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.long) for name in MADE]
)
def test_every_recipe_makes_an_episode_in_the_published_layout(
    dataset: str, walker: Path, built: dict[str, Callable[[str], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in (pointmaze, manipulation):
        monkeypatch.setattr(family, "_make_env", built[family.__name__])
    rows = 4
    data = simulator(dataset, rows, walker)(seed(0)).data
    assert {name: array.dtype.name for name, array in data.items() if name != "button_states"} == {
        "observations": "float32",
        "actions": "float32",
        "terminals": "bool",
        "qpos": "float32",
        "qvel": "float32",
    }
    assert all(len(array) == rows and np.isfinite(array).all() for array in data.values())
    assert data["terminals"].tolist() == [False] * (rows - 1) + [True]
    assert np.abs(data["actions"]).max() <= 1
    assert data["actions"].std() > 0
    if dataset.startswith("pointmaze"):
        assert np.array_equal(data["observations"], data["qpos"])
    elif dataset.startswith("antmaze"):
        assert data["actions"].shape[1] == 8
        assert np.array_equal(data["observations"], np.concatenate([data["qpos"], data["qvel"]], 1))
    else:
        # The arm's six joint angles open the observation and the state alike.
        assert np.array_equal(data["observations"][:, :6], data["qpos"][:, :6])
    buttons = {"s": 2, "puzzle-3x3": 9, "puzzle-4x4": 16, "puzzle-4x5": 20, "puzzle-4x6": 24}
    expected = buttons["s"] if dataset.startswith("scene") else buttons.get("-".join(dataset.split("-")[:2]))
    if expected is None:
        assert "button_states" not in data
    else:
        assert data["button_states"].shape == (rows, expected)
        assert data["button_states"].dtype == np.int64


@pytest.mark.parametrize(
    "dataset",
    [
        "pointmaze-teleport-navigate-v0",
        "scene-noisy-v0",
        pytest.param("puzzle-3x3-play-v0", marks=pytest.mark.long),  # the code of the scene
    ],
)
@pytest.mark.slow
def test_an_episode_does_not_depend_on_those_before_it(dataset: str) -> None:
    # Without the restoring of `manipulation._restorer`, episode 14 of scene-noisy changes at row 34.
    rows = 40
    alone = simulator(dataset, rows)(seed(14))
    after_others = simulator(dataset, rows)
    for earlier in (4, 7, 11):
        after_others(seed(earlier))
        assert same(after_others(seed(14)), alone)
    assert not same(after_others(seed(15)), alone)


@pytest.mark.parametrize("dataset", [MAZE, NOISY])
def test_an_episode_neither_reads_nor_moves_the_callers_global_generator(dataset: str) -> None:
    simulate = simulator(dataset, 10)
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = simulate(seed(0))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert same(simulate(seed(0)), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", ["scene-play-v0", pytest.param("puzzle-3x3-noisy-v0", marks=pytest.mark.long)]
)
def test_describing_a_state_once_changes_nothing(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = simulator(dataset, 120)(seed(0))
    assert fast.attempts > 0  # there was a second subtask
    monkeypatch.setattr(manipulation, "_DescribedOnce", type("Stock", (), {}))
    assert same(simulator(dataset, 120)(seed(0)), fast)


def test_remembering_the_way_through_the_maze_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = simulator(MAZE, 300)(seed(0))
    monkeypatch.setattr(pointmaze.functools, "cache", lambda function: function)
    assert same(simulator(MAZE, 300)(seed(0)), fast)


# Behaviour.


def test_navigate_reaches_goal_after_goal() -> None:
    simulate = simulator(MAZE, 400)
    episodes = [simulate(seed(i)) for i in range(4)]
    assert sum(episode.reached for episode in episodes) >= 6
    # Cells are 4 wide and a step is at most 0.2: no teleports in this maze, and no walking through walls.
    steps = np.concatenate([np.diff(episode.data["observations"], axis=0) for episode in episodes])
    assert 0.1 < np.linalg.norm(steps, axis=1).mean() < 0.3


def test_stitch_goes_to_a_goal_four_cells_away_and_stays() -> None:
    simulate = simulator(STITCH, 201)
    for index in range(4):
        episode = simulate(seed(index))
        path = episode.data["observations"]
        assert (episode.attempts, episode.reached) == (1, 1)
        assert np.linalg.norm(path[-40:] - path[-40:].mean(axis=0), axis=1).max() < 2
        assert 2 < np.abs(path[-40:].mean(axis=0) - path[0]).sum() < 20


def test_the_shipped_ant_walks_in_a_maze() -> None:
    """It was trained without one, on observations of another environment."""
    path = simulator("antmaze-medium-navigate-v0", 100, None)(seed(0)).data["observations"][:, :2]
    assert np.linalg.norm(path - path[0], axis=1).max() > 4  # metres: a cell of the maze


@pytest.mark.parametrize("kind", ["navigate", "explore"])
def test_an_ant_is_told_the_way_or_one_that_is_drawn_every_ten_steps(
    kind: str, walker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a policy that was asked again for every stored row, without the noise."""
    recipe, observations = find(f"antmaze-medium-{kind}-v0"), []
    policies = behaviour.load(walker, pointmaze.WALKER)
    policy = policies.policy(policies.card["expert"])

    class Recorder(behaviour.Policy):
        def mode(self, observation: np.ndarray) -> np.ndarray:
            observations.append(observation)
            return super().mode(observation)

    monkeypatch.setattr(behaviour, "Policy", Recorder)
    monkeypatch.setattr(pointmaze, "EXPLORE_NOISE", 0.0)
    monkeypatch.setitem(pointmaze.ACTION_NOISE, "antmaze", 0.0)
    goals = []
    maze = pointmaze._make_env(recipe.env)
    monkeypatch.setattr(pointmaze, "_make_env", lambda name: maze)
    reset = maze.reset
    monkeypatch.setattr(maze, "reset", lambda **inputs: (reset(**inputs), goals.append(maze.cur_goal_xy))[0])
    data = simulator(recipe.dataset, 35, walker)(seed(0)).data
    seen = np.stack(observations)
    np.testing.assert_allclose(seen[:, :27], data["observations"][:, 2:], atol=1e-6)
    np.testing.assert_allclose(data["actions"], [policy.mode(row) for row in seen], atol=1e-6)
    directions = seen[:, 27:]
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1, atol=1e-4)
    if kind == "explore":
        blocks = directions[:30].reshape(3, 10, 2)
        assert (blocks == blocks[:, :1]).all() and len(np.unique(directions, axis=0)) == 4
        return
    for row, direction in zip(data["observations"], directions, strict=True):
        way = maze.get_oracle_subgoal(row[:2], goals[0])[0] - row[:2]
        np.testing.assert_allclose(direction, way / np.linalg.norm(way), atol=1e-4)


def test_a_walkers_mode_is_its_action_without_noise(walker: Path) -> None:
    policy = behaviour.load(walker, pointmaze.WALKER).policy(0)
    seen = np.random.default_rng(0).standard_normal(29).astype(np.float32)
    still: Any = type("Still", (), {"standard_normal": lambda self, size, kind: np.zeros(size, kind)})()
    np.testing.assert_array_equal(policy.mode(seen), policy(seen, still)[0])


def test_the_task_of_walkers_pays_the_way_along_a_direction_that_turns() -> None:
    env = envs.make(pointmaze.WALKER)
    task: Any = env.unwrapped
    seen, rng = [env.reset(seed=0)[0]], np.random.default_rng(0)
    for _ in range(directional_ant.TURN + 5):
        before = task.data.qpos[:2].copy()
        observation, reward, terminated, _, _ = env.step(0.2 * rng.uniform(-1, 1, 8))
        assert reward == pytest.approx((task.data.qpos[:2] - before) @ seen[-1][27:], abs=1e-6)
        assert not terminated
        seen.append(observation)
    turns = np.flatnonzero((np.diff(np.stack(seen)[:, 27:], axis=0) != 0).any(1)) + 1
    assert turns.tolist() == [directional_ant.TURN] and time_limit(pointmaze.WALKER) == directional_ant.LIMIT
    np.testing.assert_array_equal(env.reset(seed=0)[0], seen[0])


def test_cells_at_a_distance_agree_with_all_pairs_shortest_paths() -> None:
    maze = np.array(
        [[int(c) for c in row] for row in ("11111111", "10000101", "10110101", "10000001", "11111111")]
    )
    free = pointmaze._free_cells(maze)
    steps = np.array(
        [[abs(a - c) + abs(b - d) if abs(a - c) + abs(b - d) < 2 else 99 for c, d in free] for a, b in free]
    )
    for k in range(len(free)):  # Floyd and Warshall
        steps = np.minimum(steps, steps[:, k : k + 1] + steps[k : k + 1])
    for index, cell in enumerate(free):
        expected = {free[j] for j in np.flatnonzero(steps[index] == 4)} or {cell}
        assert set(pointmaze._cells_at(maze, cell, 4)) == expected


def test_corridors_are_straight_passages_only() -> None:
    maze = np.array([[int(c) for c in row] for row in ("11111", "10001", "10101", "10001", "11111")])
    corridors = {cell for cell in pointmaze._free_cells(maze) if pointmaze._is_corridor(maze, cell)}
    assert corridors == {(1, 2), (2, 1), (2, 3), (3, 2)}


@pytest.mark.slow
def test_a_push_moves_a_cube_on_the_table_toward_its_target() -> None:
    """Nothing else would notice a gripper that misses, carries or runs over the cube."""
    recipe = find("heavy-cube-double-ppp-v0")
    env = manipulation._make_env(recipe.env)
    push = manipulation._make_oracles(env, recipe)["push"]
    gained, lengths = [], []
    observation, info = env.reset(seed=3)
    while len(gained) < 8:
        observation, info = env.set_new_target(p_stack=0.0)
        block, target = info["privileged/target_block"], info["privileged/target_block_pos"].copy()
        where = lambda info, block=block: info[f"privileged/block_{block}_pos"].copy()
        start = where(info)
        if not push.possible(info):
            continue
        push.reset(observation, info)
        steps = 0
        while not push.done:
            observation, _, _, _, info = env.step(push.select_action(observation, info))
            steps += 1
        lengths.append(steps)
        assert where(info)[2] < 0.05
        gained.append(np.linalg.norm(target - start) - np.linalg.norm(target - where(info)))
    assert max(lengths) <= 50 and np.median(lengths) < 35
    assert np.median(gained) > 0.03  # metres, in ten steps of pushing at most


@pytest.mark.slow
def test_play_solves_its_subtasks_smoothly_and_noisy_does_not_stay_smooth() -> None:
    play, noisy = simulator(CUBE, 251)(seed(0)), simulator(NOISY, 251)(seed(0))
    assert play.attempts >= 2
    assert play.reached == play.attempts
    roughness = [np.abs(np.diff(e.data["actions"][:, :3], axis=0)).mean() for e in (play, noisy)]
    assert roughness[1] > 2 * roughness[0]
    # The closed-loop oracle only ever opens or closes the gripper; noise takes about half of that off the bounds.
    assert 0.3 < (np.abs(noisy.data["actions"][:, 4]) == 1).mean() < 0.7


@pytest.mark.parametrize(
    ("y", "z", "visible"),
    [(0.0, 0.02, True), (0.29, 0.02, False), (-0.3, 0.02, False), (-0.3, 0.07, True), (-0.31, 0.09, False)],
)
def test_scene_health_check(y: float, z: float, visible: bool) -> None:
    qpos = np.zeros((3, 25))
    qpos[1, 15:17] = y, z
    assert manipulation._cube_is_visible(qpos) is visible


@pytest.mark.slow
def test_a_scene_episode_out_of_view_is_made_again_from_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def rollout(env: object, oracles: object, recipe: Recipe, rows: int, rng: np.random.Generator) -> Episode:
        seeds.append(rng.integers(2**62))
        return Episode({"qpos": np.full((1, 25), 0.3 if len(seeds) < 3 else 0.0)}, 0, 0)

    simulate = simulator("scene-play-v0", 2)
    monkeypatch.setattr(manipulation, "_rollout", rollout)
    assert simulate(seed(0)).data["qpos"].max() == 0
    assert len(set(seeds)) == 3


def test_catalogue() -> None:
    assert len(RECIPES) == 28 + 11 + 7
    assert find("antmaze-giant-navigate-v0")[3:] == (500, 2000)
    assert find("antmaze-teleport-explore-v0")[3:] == (10000, 500)
    assert find("pointmaze-giant-navigate-v0")[3:] == (500, 2000)
    assert find("pointmaze-large-stitch-v0")[3:] == (5000, 200)
    assert find("cube-quadruple-noisy-v0")[3:] == (5000, 1000)
    assert find("puzzle-4x5-play-v0")[3:] == (3000, 1000)
    with pytest.raises(ValueError, match="Did you mean cube-single-play-v0"):
        find("cube-single-play-singletask-v0")
    with pytest.raises(ValueError, match="scene-noisy-v0"):
        find("something else entirely")


# Files.


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npz")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", ["pointmaze-teleport-stitch-v0", pytest.param(NOISY, marks=pytest.mark.long)]
)
def test_the_number_of_processes_does_not_matter(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"transitions": 30, "episode_steps": 10, "progress": False}
    one = collect(dataset, out=tmp_path / "1", processes=1, **settings)
    monkeypatch.setattr(scripted, "CHUNK_ROWS", 24)  # chunks of two episodes
    two = collect(dataset, out=tmp_path / "2", processes=2, **settings)
    assert set(tree(one.parent)) == {f"{dataset}.npz", f"{dataset}-val.npz"}
    assert tree(one.parent) == tree(two.parent)
    other = collect(dataset, out=tmp_path / "3", processes=1, seed=1, **settings)
    assert not tree(other.parent).items() & tree(one.parent).items()
    assert not list(tmp_path.glob("*/.*"))


@pytest.mark.slow
def test_the_card_says_how_the_files_were_made(tmp_path: Path) -> None:
    path = collect(STITCH, out=tmp_path, transitions=105, episode_steps=10, seed=3, progress=False)
    card = read_card(path)
    assert card["regenerated"] is True
    assert (card["dataset"], card["seed"], card["transitions"]) == (STITCH, 3, 110)
    assert card["episodes"] == {"train": 11, "val": 1}
    assert card["versions"]["mujoco"] == importlib.metadata.version("mujoco")
    assert card["attempts"] == 11
    assert f"--dataset={STITCH} --transitions=110 --episode_steps=10 --seed=3" in card["command"]
    for split, file in (("train", path), ("val", tmp_path / f"{STITCH}-val.npz")):
        digest = hashlib.sha256()
        with np.load(file, allow_pickle=False) as arrays:
            for name in arrays.files:
                digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
                digest.update(arrays[name].tobytes())
        assert digest.hexdigest() == card["sha256"][split]


@pytest.mark.slow
def test_validation_is_a_further_tenth_with_other_seeds(tmp_path: Path) -> None:
    path = collect(STITCH, out=tmp_path, transitions=60, episode_steps=3, progress=False)
    train, val = (np.load(file)["observations"] for file in (path, tmp_path / f"{STITCH}-val.npz"))
    assert (len(train), len(val)) == (20 * 4, 2 * 4)
    starts = np.concatenate([train[::4], val[::4]])
    assert len(np.unique(starts, axis=0)) == 22


@pytest.mark.slow
def test_the_card_of_an_antmaze_names_its_walker(
    walker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as nothing_shipped:
        nothing_shipped.setattr(behaviour, "FOLDER", tmp_path)
        with pytest.raises(ValueError, match=r"no actors for DirectionalAnt-v0 are shipped.*--actors"):
            collect(ANT, out=tmp_path, transitions=6, episode_steps=3, progress=False)
    assert not list(tmp_path.iterdir())
    path = collect(ANT, out=tmp_path, transitions=6, episode_steps=3, actors=walker, progress=False)
    card = read_card(path)
    assert card["command"].endswith(f"--seed=0 --actors={walker}") and card["actors"]["seed"] == 7
    assert card["actors_sha256"] == behaviour.digest(behaviour.load(walker, pointmaze.WALKER))
    with np.load(path) as arrays:
        assert arrays["observations"].shape == (8, 29) and arrays["terminals"].sum() == 2


@pytest.mark.slow
def test_another_walker_under_the_same_name_is_read(walker: Path, tmp_path: Path) -> None:
    file, policies, actions = tmp_path / "ant.npz", behaviour.load(walker, pointmaze.WALKER), []
    for scale in (1.0, 0.0):
        behaviour.save(file, policies._replace(kernels=[scale * kernel for kernel in policies.kernels]))
        sizes = {"transitions": 3, "episode_steps": 3, "processes": 1}
        path = collect(ANT, out=tmp_path / str(scale), actors=file, progress=False, **sizes)
        actions.append(np.load(path)["actions"])
    assert not np.array_equal(*actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "pointmaze-large-navigate-v0",
        pytest.param("cube-single-play-singletask-v0", marks=pytest.mark.long),
        pytest.param("puzzle-3x3-noisy-v0", marks=pytest.mark.long),
    ],
)
def test_ogbench_itself_loads_the_files(name: str, tmp_path: Path) -> None:
    import ogbench

    path = collect(
        name.replace("-singletask", ""), out=tmp_path, transitions=36, episode_steps=12, progress=False
    )
    env, train, val = ogbench.make_env_and_datasets(name, dataset_path=str(path), add_info=True)
    with np.load(path) as arrays:
        observations = arrays["observations"].reshape(3, 13, -1)
        assert np.array_equal(train["observations"], observations[:, :-1].reshape(36, -1))
        assert np.array_equal(train["next_observations"], observations[:, 1:].reshape(36, -1))
    assert train["terminals"].reshape(3, 12).sum(axis=1).tolist() == [1, 1, 1]
    assert train["terminals"][11::12].all()
    assert len(val["actions"]) == 12
    assert train["observations"].shape[1:] == env.observation_space.shape
    assert train["actions"].shape[1:] == env.action_space.shape
    assert ("rewards" in train) == ("singletask" in name)
    assert ("button_states" in train) == ("puzzle" in name)


# What is there already.


@pytest.mark.slow
def test_the_same_again_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, progress=False)
    monkeypatch.setattr(collector, "_simulate_all", None)
    assert collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, progress=False) == path


@pytest.mark.slow
def test_files_of_other_settings_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, progress=False)
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"would be replaced.*'seed': 0.*'seed': 1.*--overwrite"):
        collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, seed=1, progress=False)
    assert tree(tmp_path) == before
    path = collect(
        STITCH, out=tmp_path, transitions=4, episode_steps=2, seed=1, overwrite=True, progress=False
    )
    assert tree(tmp_path) != before
    assert read_card(path)["seed"] == 1


@pytest.mark.slow
def test_a_file_that_nothing_here_made_is_kept(tmp_path: Path) -> None:
    (tmp_path / f"{STITCH}.npz").write_bytes(b"downloaded")
    with pytest.raises(FileExistsError, match="no card says how"):
        collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, progress=False)
    path = collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, progress=False, overwrite=True)
    path.write_bytes(path.read_bytes() + b"changed")
    with pytest.raises(FileExistsError, match="changed since"):
        collect(STITCH, out=tmp_path, transitions=4, episode_steps=2, progress=False)


class Stop(Exception):
    pass


def stop_after(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `collect` break off when that many chunks are done."""
    run = pool.run

    def stopping(*args, **kwargs):
        for number, chunk in enumerate(run(*args, **kwargs), 1):
            yield chunk
            if number == chunks:
                raise Stop

    monkeypatch.setattr(pool, "run", stopping)


def test_what_was_finished_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "CHUNK_ROWS", 1)
    settings = {"transitions": 40, "episode_steps": 10, "progress": False, "processes": 1}
    whole = collect(STITCH, out=tmp_path / "whole", **settings)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after(3, patch)
        collect(STITCH, out=tmp_path / "stopped", **settings)
    assert not list((tmp_path / "stopped").glob("*.npz"))
    partial = tmp_path / "stopped" / f".{STITCH}.partial"
    chunks = sorted(partial.glob("*.npz"))
    assert len(chunks) == 3
    chunks[0].write_bytes(chunks[0].read_bytes()[:-100])  # half-written, as after a power cut
    continued = collect(STITCH, out=tmp_path / "stopped", **settings)
    assert read_card(continued)["steps_resumed"] == 2 * 11
    assert tree(continued.parent) == tree(whole.parent)
    assert not partial.exists()


def test_stopped_while_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"transitions": 4, "episode_steps": 2, "progress": False, "processes": 1}
    whole = collect(STITCH, out=tmp_path / "whole", **settings)
    replace = os.replace

    def stopping(source: Path, target: Path) -> None:
        if Path(target).name == f"{STITCH}.npz":
            raise Stop
        replace(source, target)

    # There are files of the same size from another seed, which must not be taken for these.
    collect(STITCH, out=tmp_path / "stopped", seed=1, **settings)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(collector.os, "replace", stopping)
        collect(STITCH, out=tmp_path / "stopped", overwrite=True, **settings)
    assert tree(collect(STITCH, out=tmp_path / "stopped", **settings).parent) == tree(whole.parent)


def test_unfinished_work_of_other_settings_is_kept_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"out": tmp_path, "transitions": 4, "episode_steps": 2, "progress": False, "processes": 1}
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after(1, patch)
        collect(STITCH, **settings)
    with pytest.raises(FileExistsError, match="unfinished work of other settings"):
        collect(STITCH, **settings, seed=1)
    assert list((tmp_path / f".{STITCH}.partial").glob("train-*.npz"))
    assert read_card(collect(STITCH, **settings, seed=1, overwrite=True))["steps_resumed"] == 0


def test_two_runs_on_one_dataset_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"out": tmp_path, "transitions": 4, "episode_steps": 2, "progress": False, "processes": 1}
    messages = []

    def second_run(*args: object) -> int:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError) as caught:
            patch.undo()
            collect(STITCH, **settings)
        messages.append(str(caught.value))
        raise Stop

    with pytest.raises(Stop):
        monkeypatch.setattr(collector, "_simulate_all", second_run)
        collect(STITCH, **settings)
    assert "Another run is making" in messages[0]


# Errors.


@pytest.mark.parametrize("bad", [{"transitions": 0}, {"episode_steps": 0}, {"seed": -1}, {"processes": 0}])
def test_numbers_out_of_range(bad: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be at least"):
        collect(STITCH, out=tmp_path, **bad)


def test_without_ogbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=r"ogbench is needed.*\[ogbench\]"):
        collect(STITCH, out=tmp_path)


@pytest.mark.slow
def test_a_worker_that_dies_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"out": tmp_path, "transitions": 20, "episode_steps": 10, "progress": False, "processes": 2}
    monkeypatch.setattr(pool, "WORKER", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match=r"died with status -9 .*Finished chunks are kept"):
        collect(STITCH, **settings)
    monkeypatch.setattr(pool, "WORKER", "print('OSError: [Errno 28] No space left on device')")
    with pytest.raises(RuntimeError, match=r"No space left.*the same command continues"):
        collect(STITCH, **settings)
    monkeypatch.undo()
    assert json.loads(collect(STITCH, **settings).with_suffix(".json").read_text())["transitions"] == 20
