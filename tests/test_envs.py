"""rl.envs: one convention for every family, and copies of an environment in worker processes."""

from __future__ import annotations

import configparser
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from packaging.requirements import Requirement

from rl import envs, extras, nest
from rl.envs import goals, registry, two_rooms
from rl.types import Spec


def run_python(code: str) -> dict:
    """What a fresh Python prints as JSON."""
    return json.loads(subprocess.check_output([sys.executable, "-c", code]))


def episode(env: gymnasium.Env, seed: int, steps: int = 25) -> np.ndarray:
    """Everything observed and paid in a seeded episode under fixed pseudo-random actions."""
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=seed)
    seen = [observation]
    for _ in range(steps):
        action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(np.append(observation, reward))
        if terminated or truncated:
            break
    return np.concatenate(seen)


# ---- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("CartPole-v1", Spec((4,), 2, discrete=True)),
        ("Pendulum-v1", Spec((3,), 1)),
        ("Hopper-v4", Spec((11,), 3)),
        ("toy_environments:Countdown-v0", Spec((3,), 1)),
        ("CartPoleSwingUp-v0", Spec((5,), 1)),
        ("toy_environments:Countdown-v0+noise2", Spec((5,), 1)),
    ],
)
def test_gymnasium_names(name: str, spec: Spec) -> None:
    env = envs.make(name, seed=0)
    assert envs.spec(env) == spec
    observation, _ = env.reset()
    assert observation.dtype == np.float32
    assert observation.shape == spec.observation_shape


def test_robotics_names() -> None:
    pytest.importorskip("gymnasium_robotics")
    env = envs.make("AdroitHandDoor-v1", seed=0)
    assert envs.spec(env) == Spec((39,), 28)
    assert "success" in env.step(np.zeros(28, np.float32))[-1]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("pointmaze-medium-singletask-v0", Spec((2,), 2)),
        ("cube-single-singletask-task1-v0", Spec((28,), 5)),
    ],
)
def test_ogbench_names(name: str, spec: Spec) -> None:
    pytest.importorskip("ogbench")
    assert envs.spec(envs.make(name)) == spec


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("Hoper-v4", "Hopper-v4"), ("CartPole-v7", "CartPole-v1"), ("pendulum", "Pendulum-v1")],
)
def test_unknown_names_suggest_the_nearest(name: str, nearest: str) -> None:
    if name.islower():
        pytest.importorskip("ogbench")
    with pytest.raises(ValueError, match=f"unknown environment '{name}' .*nearest names are .*{nearest}"):
        envs.make(name)


def test_an_environment_of_a_script_is_told_to_move_into_a_module() -> None:
    """Workers do not run the script, and know nothing that it registered."""
    gymnasium.register("MineHere-v0", lambda: gymnasium.make("CartPole-v1"))
    try:
        envs.vector("MineHere-v0", 1, 0).close()
        with pytest.raises(
            ValueError, match=r"'MineHere-v0' .* name it module:MineHere-v0, or give processes=0"
        ):
            envs.vector("MineHere-v0", 1, 1)
    finally:
        gymnasium.registry.pop("MineHere-v0")


def test_unknown_ogbench_names_suggest_the_nearest() -> None:
    pytest.importorskip("ogbench")
    with pytest.raises(ValueError, match=r"nearest names are .*cube-single-singletask-task1-v0"):
        envs.make("cube-single-play-singletask-task1-v0")  # a dataset's name, not an environment's


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("cube-single-v0", "ogbench", "ogbench"), ("AdroitHandPen-v1", "gymnasium_robotics", "d4rl")],
)
def test_a_missing_package_names_its_extra(name: str, module: str, extra: str, monkeypatch) -> None:
    monkeypatch.delitem(gymnasium.registry, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # what Python does to make an import fail
    with pytest.raises(ImportError, match=rf"pip install -e '\.\[{extra}\]'"):
        envs.make(name)


def test_a_name_whose_module_is_missing_says_so() -> None:
    with pytest.raises(ImportError, match="No module named 'no_such_module'"):
        envs.make("no_such_module:Thing-v0")


def test_a_simulator_that_fails_names_what_to_pin(monkeypatch) -> None:
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr(registry, "_register", lambda name: None)
    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(RuntimeError, match=r"FetchReach-v4.*AssertionError.*mujoco==3\.11\.0"):
        envs.make("FetchReach-v4")
    with pytest.raises(RuntimeError) as error:
        envs.make("Hopper-v4")
    assert "mujoco==" not in str(error.value)


# ---- spaces --------------------------------------------------------------------------------------------


@pytest.fixture
def with_spaces(monkeypatch):
    """Makes an environment with the given spaces; its unwrapped ``received`` is the last action it got."""
    import toy_environments

    def make(observation_space: spaces.Space, action_space: spaces.Space) -> gymnasium.Env:
        raw = toy_environments.Spaces(observation_space, action_space)
        return registry._uniform(raw, "Toy-v0")

    return make


VECTOR, TWO = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)


def test_actions_in_the_unit_box_reach_the_environments_own_box(with_spaces) -> None:
    box = spaces.Box(np.array([[0.0, -3.0]]), np.array([[10.0, 1.0]]), dtype=np.float64)
    env = with_spaces(VECTOR, box)
    assert env.action_space == spaces.Box(-1, 1, (2,), np.float32)
    for unit, theirs in [
        ([-1, -1], [[0, -3]]),
        ([1, 1], [[10, 1]]),
        ([0, 0.5], [[5, 0]]),
        ([-7, 2], [[0, 1]]),
    ]:
        env.step(np.array(unit, np.float32))
        np.testing.assert_array_equal(env.unwrapped.received, theirs)
        assert box.contains(env.unwrapped.received)


def test_actions_are_untouched_where_the_box_is_the_unit_box(with_spaces) -> None:
    env = with_spaces(VECTOR, spaces.Box(-1, 1, (100,), np.float32))
    action = np.random.default_rng(0).uniform(-1, 1, 100).astype(np.float32)
    env.step(action)
    np.testing.assert_array_equal(env.unwrapped.received, action)


def test_actions_in_the_units_of_a_narrow_box_are_told_from_mapped_ones(with_spaces) -> None:
    """Mapped from [-1, 1], as those of every log, they would be made smaller once more, without a word."""
    narrow, wide = (spaces.Box(-high, high, (2,), np.float32) for high in (0.4, 1.0))
    actions = np.array([[0.4, -0.4], [0.1, 0.2]], np.float32)
    told = [
        registry.in_own_units(with_spaces(VECTOR, box), x)
        for box in (narrow, wide)
        for x in (actions, 2 * actions)
    ]
    assert told == [True, False, False, False]
    assert not registry.in_own_units(with_spaces(VECTOR, TWO), actions)


def test_discrete_actions_count_from_zero(with_spaces) -> None:
    env = with_spaces(VECTOR, spaces.Discrete(3, start=5))
    assert envs.spec(env) == Spec((2,), 3, discrete=True)
    env.step(np.int32(2))
    assert env.unwrapped.received == 7
    assert envs.first_action(env) == 5 and envs.first_action(with_spaces(VECTOR, TWO)) == 0


def test_observations_become_float32_histories_keep_their_axes_and_images_stay(with_spaces) -> None:
    for shape, seen in (((), (1,)), ((2, 3), (2, 3)), ((2, 3, 4), (24,))):
        told = pytest.warns(UserWarning, match="see as a vector of 24 numbers: if these are images, return")
        with told if len(shape) == 3 else contextlib.nullcontext():
            env = with_spaces(spaces.Box(-1, 1, shape, np.float64), TWO)
        observation, _ = env.reset()
        assert (observation.shape, observation.dtype) == (seen, np.float32)
        assert env.observation_space.contains(observation)
    for high in (255, 1):  # bytes, and bits
        vector = with_spaces(spaces.Box(0, high, (64,), np.uint8), TWO)
        assert vector.reset()[0].dtype == np.float32
        np.testing.assert_array_equal(vector.observation(np.full(64, high, np.uint8)), np.ones(64))
    image = with_spaces(spaces.Box(0, 255, (8, 8, 3), np.uint8), TWO)
    observation, _ = image.reset()
    assert (observation.shape, observation.dtype) == ((8, 8, 3), np.uint8)
    assert envs.spec(image) == Spec((8, 8, 3), 2, discrete=True)
    for wrong in (
        np.ones((8, 8, 3), np.float32),
        np.ones((8, 8, 1), np.uint8),
    ):  # black, or spread over channels
        with pytest.raises(ValueError, match=r"is not of its space, .*which must return uint8 from 0 to 255"):
            image.observation(wrong)
    assert nest.agent_shape((6, 7, 8), np.uint8) == (6, 7, 8)  # a board of eight planes


def test_dictionaries_stay_and_their_arrays_become_vectors_and_images(with_spaces) -> None:
    image, history = spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(-1, 1, (2, 3), np.float64)
    env = with_spaces(spaces.Dict({"task": spaces.Dict({"image": image}), "goal": history}), TWO)
    shape = {"goal": (2, 3), "task": {"image": (8, 8, 3)}}
    assert envs.spec(env) == Spec(shape, 2, discrete=True)
    for observation in (env.reset()[0], env.step(np.int32(0))[0]):
        assert type(observation) is dict and list(observation) == ["goal", "task"]
        assert nest.map_structure(np.shape, observation) == shape
        assert [x.dtype for x in nest.leaves(observation)] == [np.float32, np.uint8]
        assert env.observation_space.contains(observation)


def test_dictionaries_of_many_copies_are_dictionaries_of_rows() -> None:
    """In one process and in another; copies that are left alone keep theirs."""
    action = np.full((3, 2), 0.5, np.float32)
    for processes in (0, 1):
        with envs.vector("toy_environments:Goal-v0", 3, processes) as copies:
            assert copies.spec == Spec({"clock": (1,), "task": {"goal": (2,), "last": (2,)}}, 2)
            before = copies.reset([1, 2, 1])
            after = copies.step(action, np.array([True, False, True])).observation
        np.testing.assert_array_equal(before["task"]["goal"][0], before["task"]["goal"][2])
        assert (before["task"]["goal"][0] != before["task"]["goal"][1]).all()
        np.testing.assert_array_equal(before["clock"], np.zeros((3, 1), np.uint8))
        np.testing.assert_allclose(after["clock"][:, 0], np.float32([1, 0, 1]) / 255)  # of a byte
        np.testing.assert_array_equal(after["task"]["last"][:, 0], [0.5, 0, 0.5])


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (
            spaces.Dict({"goal": VECTOR, "room": spaces.Discrete(4)}),
            TWO,
            r"'Toy-v0' observes Dict\(.*observation\['room'\] is Discrete\(4\).*FlattenObservation",
        ),
        (
            spaces.Dict({"eye": spaces.Box(0, 255, (8, 8, 3), np.uint8), "room": spaces.Discrete(4)}),
            TWO,
            r"in which observation\['room'\] is an array \(one-hot, say\), as flattened pixels are not divided",
        ),
        (spaces.Discrete(4), TWO, r"observes Discrete\(4\)"),
        (spaces.Box(0, 255, (84, 84), np.uint8), TWO, r"\(84, 84\) is no image \[H, W, C\].*keep_dim=True"),
        (
            spaces.Dict({"eye": spaces.Box(0, 255, (4, 84, 84), np.uint8)}),
            TWO,
            r"observation\['eye'\] is .*\(4, 84, 84\) is an image with its channels first.*numpy.moveaxis",
        ),
        (VECTOR, spaces.MultiDiscrete([2, 3]), r"takes MultiDiscrete\(\[2 3\]\).*Discrete\(6\)"),
        (VECTOR, spaces.Box(-np.inf, 1, (2,)), r"between finite bounds.*Box\(-1.0, 1.0, \(2,\)\)"),
        (VECTOR, spaces.Box(0, 9, (2,), np.int64), r"between finite bounds.*Discrete\(len\(actions\)\)"),
    ],
)
def test_spaces_that_agents_cannot_use_are_refused(
    with_spaces, observation_space, action_space, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_spaces(observation_space, action_space)


@pytest.mark.parametrize(
    ("theirs", "action", "received"),
    [
        (spaces.MultiDiscrete([2, 3]), 5, [1, 2]),
        (spaces.MultiBinary((3, 1)), 6, [[1], [1], [0]]),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), np.float32([0.5, -1]), [0.5, -1]),
    ],
)
def test_the_wrapper_that_a_refusal_of_actions_names_makes_them_usable(
    with_spaces, theirs: spaces.Space, action: object, received: list
) -> None:
    """It is code to be copied: what the message says is run. RescaleAction, say, would fail on infinite bounds."""
    with pytest.raises(ValueError, match="wrapped in ") as refusal:
        with_spaces(VECTOR, theirs)
    code = str(refusal.value).partition("wrapped in ")[2].rpartition(", w")[0]
    import toy_environments

    inner = toy_environments.Spaces(VECTOR, theirs)
    wrapped = eval(code, {"gymnasium": gymnasium, "numpy": np, "env": inner})
    usable = registry._uniform(wrapped, "Toy-v0")
    usable.reset(seed=0)
    usable.step(action)
    np.testing.assert_allclose(inner.received, received)


# ---- seeds ---------------------------------------------------------------------------------------------


def test_make_seeds_the_first_episode_and_the_action_space() -> None:
    first, again, other = (envs.make("Pendulum-v1", seed=s) for s in (3, 3, 4))
    a, b, c = (env.reset()[0] for env in (first, again, other))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    np.testing.assert_array_equal(first.action_space.sample(), again.action_space.sample())


@pytest.mark.parametrize("name", ["pointmaze-teleport-singletask-v0", "cube-single-singletask-task1-v0"])
def test_a_seeded_ogbench_episode_depends_on_its_seed_alone(name: str) -> None:
    """The authors' environments draw from NumPy's global generator and an unseeded action space."""
    pytest.importorskip("ogbench")
    used, fresh = envs.make(name), envs.make(name)
    episode(used, seed=1)
    np.random.seed(5)  # noqa: NPY002, the generator in question
    expected = np.random.get_state()[1].copy()  # noqa: NPY002
    np.testing.assert_array_equal(episode(used, seed=7), episode(fresh, seed=7))
    np.testing.assert_array_equal(np.random.get_state()[1], expected)  # noqa: NPY002, left as it was
    assert (episode(used, seed=8)[:2] != episode(used, seed=7)[:2]).any()


@pytest.mark.slow
def test_the_goal_of_a_seeded_ogbench_episode_depends_on_its_seed_alone() -> None:
    """Its authors' manipulation tasks reach it by random steps, from an action space that is new and unseeded."""
    pytest.importorskip("ogbench")
    used, fresh = envs.make("goals/cube-single-v0"), envs.make("goals/cube-single-v0")
    assert envs.spec(used) == Spec({"observation": (28,), "goal": (28,)}, 5)
    used.reset(seed=3)
    again, expected, other = (
        env.reset(seed=seed, options={"task_id": 2})[0] for env, seed in ((used, 7), (fresh, 7), (used, 8))
    )
    for part in ("observation", "goal"):
        np.testing.assert_array_equal(again[part], expected[part])
        assert (again[part] != other[part]).any()


# ---- goals -----------------------------------------------------------------------------------------------


def test_tasks_are_reached_along_the_shortest_way_and_end_there() -> None:
    """Each task of the two rooms has its own goal, success is observing it, and some ways lead through the door."""
    env = envs.make("goals/TwoRooms-v0")
    assert envs.spec(env) == Spec({"observation": (2,), "goal": (2,)}, 2)
    places, crossed = [], 0
    for task in range(1, 6):
        seen, _ = env.reset(seed=task, options={"task_id": task})
        places.append(seen["goal"])
        crossed += (seen["observation"][0] < 3) != (seen["goal"][0] < 3)
        over = success = False
        while not over:
            assert not success
            action = two_rooms.toward(seen["observation"], seen["goal"])
            seen, reward, terminated, truncated, info = env.step(action)
            near = np.linalg.norm(seen["observation"] - seen["goal"]) < two_rooms.TOLERANCE
            success, over = info["success"] == 1, terminated or truncated
            assert success == near == (reward == 1) and (seen["goal"] == places[-1]).all()
        assert success and terminated
    assert len(np.unique(np.rint(places), axis=0)) == 5 and crossed == 4


def test_random_goals_are_others_in_every_episode_and_do_not_end_it() -> None:
    env = envs.make("random-goals/TwoRooms-v0")
    starts = [env.reset(seed=seed)[0] for seed in range(8)]
    assert len(np.unique([np.rint(start["goal"]) for start in starts], axis=0)) > 4
    np.testing.assert_array_equal(env.reset(seed=7)[0]["goal"], starts[-1]["goal"])
    seen, steps, successes, truncated = starts[-1], 0, 0.0, False
    while not truncated:
        action = two_rooms.toward(seen["observation"], seen["goal"])
        seen, _, terminated, truncated, info = env.step(action)
        assert not terminated
        steps, successes = steps + 1, successes + info["success"]
    assert steps == two_rooms.LIMIT and successes > 10


def test_random_goals_have_a_random_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment says where a robot's arm begins, which told where the cubes should go."""
    drawn: list[np.ndarray] = []
    monkeypatch.setattr(goals, "random_task", lambda env, rng: drawn.append(rng.random(8)))
    envs.make("random-goals/TwoRooms-v0").reset(seed=3)
    assert not np.isin(drawn[-1], np.random.default_rng(3).random(100)).any()


def test_random_places_of_an_ant_its_ball_and_the_goal_are_three() -> None:
    pytest.importorskip("ogbench")
    env = envs.make("random-goals/antsoccer-arena-v0")
    env.reset(seed=0)
    ant, ball = env.unwrapped.get_agent_ball_xy()
    places = np.stack([ant, ball, env.unwrapped.cur_goal_xy])
    assert len({tuple(env.unwrapped.xy_to_ij(place)) for place in places}) == 3
    env.close()


def test_random_places_are_none_from_which_a_teleport_moves_an_agent() -> None:
    ogbench = pytest.importorskip("ogbench")
    maze = ogbench.locomaze.maze.make_maze_env("point", "maze", maze_type="teleport")
    moved = {(4, 6), (5, 1)}
    assert not maze.maze_map[4, 6] and not maze.maze_map[5, 1]
    drawn = [goals.random_task(maze, np.random.default_rng(seed))["task_info"] for seed in range(200)]
    assert len({task["goal_ij"] for task in drawn} - moved) == 43
    assert not moved & {place for task in drawn for place in task.values()}


def test_d4rls_pen_is_that_of_the_package_until_it_is_dropped() -> None:
    """The pen falls out of a hand that moves at random, and the package's episode goes on."""
    pytest.importorskip("gymnasium_robotics")
    ours, theirs = envs.make("D4RLPen-v1"), envs.make("AdroitHandPen-v1")
    np.testing.assert_array_equal(ours.reset(seed=0)[0], theirs.reset(seed=0)[0])
    generator, terminated = np.random.default_rng(0), False
    while not terminated:
        height = ours.unwrapped.data.xpos[ours.unwrapped.obj_body_id][2]
        assert height >= 0.075
        action = generator.uniform(-1, 1, 24)
        (*one, terminated, truncated, _), (*other, goes_on, _, _) = ours.step(action), theirs.step(action)
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1] == other[1] and not goes_on and not truncated
    assert other[1] < -4  # it has been fined


def test_a_scene_has_no_random_goals_and_starts_one_of_its_tasks() -> None:
    """It has a cube, and other things beside it, whose places nobody draws."""
    pytest.importorskip("ogbench")
    env = envs.make("random-goals/scene-v0")
    assert set(env.reset(seed=0)[0]) == {"goal", "observation"}


def test_random_cubes_do_not_overlap() -> None:
    class Table:
        _num_cubes, _target_sampling_bounds = 4, ((0.3, -0.3), (0.55, 0.3))

    for seed in range(20):
        task = goals.random_task(Table(), np.random.default_rng(seed))["task_info"]
        assert (task["init_xyzs"] != task["goal_xyzs"]).any()
        for places in task.values():
            gaps = np.linalg.norm(places[:, None] - places, axis=-1) + np.eye(4)
            assert places.shape == (4, 3) and gaps.min() > 0.04 * np.sqrt(2)


def test_an_environment_without_goals_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'toy_environments:Told-v0' has no goals: .*--eval_episodes=0"):
        envs.make("goals/toy_environments:Told-v0")


# ---- many copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_workers_give_what_one_process_gives(processes: int) -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (6, 5, 1)).astype(np.float32)
    with (
        envs.vector("Pendulum-v1", 5, processes=0) as here,
        envs.vector("Pendulum-v1", 5, processes=processes) as there,
    ):
        assert here.spec == there.spec == Spec((3,), 1)
        np.testing.assert_array_equal(here.reset([1, 2, 3, 4, 5]), there.reset([1, 2, 3, 4, 5]))
        for t, action in enumerate(actions):
            for ours, theirs in zip(here.step(action), there.step(action), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            seeds = [None if i != t else 9 for i in range(5)]
            np.testing.assert_array_equal(here.reset(seeds), there.reset(seeds))


@pytest.mark.parametrize("processes", [0, 2])
def test_only_the_copies_named_are_reset_and_stepped(processes: int) -> None:
    with envs.vector("toy_environments:Countdown-v0", 3, processes) as vector:
        before = vector.reset([0, 1, 2])
        after = vector.reset([None, 5, None])
        np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
        assert (before[1] != after[1]).any()
        step = vector.step(np.zeros((3, 1), np.float32), np.array([True, False, True]))
        np.testing.assert_array_equal(step.observation[:, 0], after[:, 0] - [1, 0, 1])
        np.testing.assert_array_equal(step.reward, [1, 0, 1])
        np.testing.assert_array_equal(np.isnan(step.success), [False, True, False])


def test_results_are_not_overwritten_by_later_steps() -> None:
    with envs.vector("toy_environments:Countdown-v0", 2, processes=0) as vector:
        first = vector.reset([0, 1])
        snapshot = first.copy()
        vector.reset([2, 3])
        np.testing.assert_array_equal(first, snapshot)


def test_workers_are_separate_processes_without_jax() -> None:
    with envs.vector("toy_environments:Modules-v0", 4, processes=2) as vector:
        observed = vector.reset([0] * 4)
    np.testing.assert_array_equal(observed[:, 0], 0)
    assert len({*observed[:, 1], os.getpid() % 2**20}) == 3


def test_importing_the_package_is_cheap() -> None:
    modules = run_python("import sys, json, rl.envs; print(json.dumps(sorted(sys.modules)))")
    assert not {"jax", "mujoco", "ogbench", "gymnasium_robotics", "torch"} & set(modules)


# Who sets a variable of the environment, seen from where it is set: packages that are imported here do, too.
SETTERS = """
import contextlib, importlib, json, pkgutil, sys
setters = set()

def hear(event, arguments):
    if event in ("os.putenv", "os.unsetenv"):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        setters.add(frame.f_globals["__name__"])

sys.addaudithook(hear)
import rl

for module in pkgutil.walk_packages(rl.__path__, "rl."):
    with contextlib.suppress(ImportError):  # of a package that is not here
        importlib.import_module(module.name)
print(json.dumps(sorted(setters)))
"""


@pytest.mark.slow
def test_importing_any_of_it_sets_no_environment_variable() -> None:
    """Variables choose devices, precision and renderers, of the importing program's other parts and children, too."""
    setters = run_python(SETTERS)
    assert setters, "the hook hears nothing"
    assert not [name for name in setters if name.split(".")[0] == "rl"]


def test_it_works_from_a_script_without_a_main_guard() -> None:
    """Worker processes started by multiprocessing would run this script again, and fail."""
    code = "from rl import envs; v = envs.vector('CartPole-v1', 2, 2); print(v.reset([0, 1]).shape[0]); v.close()"
    assert run_python(code) == 2


@pytest.mark.parametrize("processes", [0, 2])
def test_errors_of_an_environment_arrive_with_their_cause(processes: int) -> None:
    with envs.vector("toy_environments:Raises-v0", 2, processes) as vector:
        vector.reset([0, 0])
        for _ in range(2):
            vector.step(np.zeros(2, int))
        with pytest.raises((RuntimeError, KeyError), match="the joint is missing"):
            vector.step(np.zeros(2, int))
        with pytest.raises(RuntimeError, match="closed"):
            vector.reset([0, 0])


def test_a_worker_outlives_a_request_to_stop_that_its_whole_job_gets() -> None:
    """Its parent asks it for a snapshot, for the last checkpoint."""
    with envs.vector("toy_environments:Countdown-v0", 1, processes=1) as vector:
        vector.reset([0])
        worker = vector._parts[0]._process.pid
        os.kill(worker, signal.SIGTERM)
        time.sleep(0.2)
        assert len(vector.snapshot()) == 1
        if (status := Path(f"/proc/{worker}/status")).exists():  # processes that it starts can be stopped
            (ignored,) = (line for line in status.read_text().splitlines() if line.startswith("SigIgn:"))
            assert not int(ignored.split()[1], 16) >> signal.SIGTERM - 1 & 1


def test_a_worker_that_is_killed_gives_a_clear_error() -> None:
    with envs.vector("toy_environments:Killed-v0", 2, processes=2) as vector:
        vector.reset([0, 0])
        for _ in range(2):
            vector.step(np.zeros(2, int))
        with pytest.raises(
            RuntimeError, match=r"worker \(process \d+\) died: killed by SIGKILL.*fewer copies"
        ):
            vector.step(np.zeros(2, int))
        with pytest.raises(
            envs.WorkerDied, match="SIGKILL"
        ):  # also to who asks after an error that was passed over
            vector.snapshot()


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Hoper-v4", ValueError, "nearest names"),
        ("toy_environments:Room-v0", ValueError, "observes Discrete"),
        ("no_such_module:Thing-v0", ImportError, "no_such_module"),
    ],
)
def test_names_that_cannot_be_made_fail_alike_everywhere(processes: int, name, kind, message: str) -> None:
    with pytest.raises(kind, match=message):
        envs.vector(name, 2, processes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: v.reset([0]), "one row for each of 2 copies, got 1"),
        (lambda v: v.step(np.zeros((3, 1))), "got 3"),
        (lambda v: v.step(np.zeros((2, 1)), np.ones(4, bool)), "got 4"),
        (lambda v: envs.vector("Pendulum-v1", 0), "count must be at least 1"),
        (lambda v: envs.vector("Pendulum-v1", 1, -1), "processes must be 0"),
    ],
)
def test_wrong_counts_are_refused(call, message: str) -> None:
    with envs.vector("Pendulum-v1", 2, 0) as vector, pytest.raises(ValueError, match=message):
        call(vector)


def test_workers_end_with_close() -> None:
    vector = envs.vector("CartPole-v1", 2, 2)
    workers = [part._process for part in vector._parts]
    vector.close()
    vector.close()
    assert all(worker.returncode == 0 for worker in workers)


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "import os, signal; from rl import envs; v = envs.vector('CartPole-v1', 2, 2);"
        "print('ready', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    # The workers hold the parent's standard output too: run() returns when the last of them is gone.
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=False)
    assert (parent.returncode, parent.stdout) == (-signal.SIGKILL, b"ready\n")


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "CartPole", "pixels/CartPole-v1", "goals/CartPole-v1", "CartPole-v1+noise3"]
)
def test_what_stands_before_and_after_a_name_does_not_change_its_time_limit(name: str) -> None:
    assert registry.time_limit(name) == 500
    assert registry.time_limit("nowhere-v1") == 0


def test_the_time_limit_of_an_environment_in_a_module_that_nothing_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = 'import gymnasium\ngymnasium.register("Unseen-v0", "nowhere:Unseen", max_episode_steps=7)\n'
    (tmp_path / "unseen_environments.py").write_text(register)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.time_limit("unseen_environments:Unseen-v0") == 7
    assert registry.time_limit("unseen_environments:Unseen+noise3") == 7


def test_python_3_13_installs_ogbench_without_what_has_no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra lists what else ogbench and dm_control ask for, or an import would fail there."""
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parent.parent / "setup.cfg")
    newer = {"python_version": "3.13", "extra": ""}
    given = {
        one.name
        for line in parser["options.extras_require"]["ogbench"].split("\n")
        if line and (one := Requirement(line)).marker.evaluate(newer)
    }
    given |= {Requirement(line).name for line in parser["options"]["install_requires"].split("\n") if line}
    asked = [
        Requirement(line) for name in ("ogbench", "dm_control") for line in importlib.metadata.requires(name)
    ]
    needed = {one.name for one in asked if not one.marker or one.marker.evaluate(newer)}
    assert needed - given == {"dm_control", "labmaze"}
    assert extras.command("d4rl") == "pip install -e '.[d4rl]' (in the clone)"
    for version, second in (((3, 12), ""), ((3, 13), " && pip install --no-deps ogbench dm_control")):
        monkeypatch.setattr("sys.version_info", version)
        assert extras.command("ogbench") == f"pip install -e '.[ogbench]'{second} (in the clone)"
