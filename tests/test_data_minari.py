"""`rl.data.minari` on datasets made here with Minari's own tools."""

import warnings

import jax
import numpy as np
import pytest

from rl import data
from rl.agents import iql
from rl.data.steps import DataError
from rl.replay import dataset as replay
from rl.values import heads

minari = pytest.importorskip("minari")
gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
h5py = pytest.importorskip("h5py")


@pytest.fixture
def create(tmp_path, monkeypatch):
    """A function that stores episodes as a Minari dataset of the name ``test/log-v0``."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    def create(episodes, observation_space, action_space, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return minari.create_dataset_from_buffers(
                "test/log-v0",
                [minari.data_collector.EpisodeBuffer(**episode) for episode in episodes],
                observation_space=observation_space,
                action_space=action_space,
                **kwargs,
            )

    return create


def episode(length, actions, terminated, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    ends = np.arange(1, length + 1) == length
    return {
        "observations": rng.normal(size=(length + 1, 3)).astype(dtype),
        "actions": actions,
        "rewards": rng.normal(size=length),
        "terminations": ends & terminated,
        "truncations": ends & (not terminated),
    }


BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def test_reads_episodes_by_id_and_by_path(create, tmp_path):
    rng = np.random.default_rng(1)
    space = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
    logged = [rng.uniform(space.low, space.high, (n, 2)).astype(np.float32) for n in (4, 3)]
    episodes = [episode(4, logged[0], True, seed=1), episode(3, logged[1], False, seed=2)]
    create(episodes, BOX, space)
    loaded = data.load("minari:test/log-v0")
    transitions, last, _ = loaded.dataset
    np.testing.assert_array_equal(
        transitions.observation, np.concatenate([e["observations"][:-1] for e in episodes])
    )
    np.testing.assert_array_equal(
        transitions.next_observation, np.concatenate([e["observations"][1:] for e in episodes])
    )
    expected = (np.concatenate(logged) - [0, 0.5]) / [2, 0.5]
    np.testing.assert_allclose(transitions.action, expected, atol=1e-6)
    np.testing.assert_allclose(
        transitions.reward, np.concatenate([e["rewards"] for e in episodes]), rtol=1e-6
    )
    np.testing.assert_array_equal(transitions.discount, [1, 1, 1, 0, 1, 1, 1])
    np.testing.assert_array_equal(transitions.has_next_action, [1, 1, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(last, [0, 0, 0, 1, 0, 0, 1])
    assert loaded.source == "Minari test/log-v0"
    assert loaded.environment is None and loaded.reference is None and "none is recorded" in loaded.note
    for same in (
        "minari:test/log-v0",
        f"minari:{tmp_path}/test/log-v0",
        f"minari:{tmp_path}/test/log-v0/data",
    ):
        assert data.load(same, folder=tmp_path).digest == loaded.digest


def test_an_episode_ends_where_minari_ends_it(create):
    log = episode(3, np.zeros((3, 1), np.float32), False)
    log["truncations"] = np.zeros(3, bool)
    create([log], BOX, spaces.Box(-1, 1, (1,), np.float32))
    dataset = data.load("minari:test/log-v0").dataset
    np.testing.assert_array_equal(dataset.last, [0, 0, 1])
    np.testing.assert_array_equal(dataset.transitions.discount, np.ones(3))


def test_environment_and_reference_are_those_recorded(create):
    actions = np.zeros((3, 1), np.float32)
    create(
        [episode(3, actions, False)],
        BOX,
        spaces.Box(-2, 2, (1,), np.float32),
        env="Pendulum-v1",
        ref_min_score=-1500.0,
        ref_max_score=-150.0,
    )
    loaded = data.load("minari:test/log-v0")
    assert loaded.environment == "Pendulum-v1"
    assert loaded.reference == (-1500.0, -150.0) and loaded.note == ""
    assert data.load("minari:test/log-v0", environment="Pendulum-v0").reference == (-1500.0, -150.0)
    other = data.load("minari:test/log-v0", environment="Mine-v0")
    assert other.environment == "Mine-v0" and other.reference is None
    assert other.note.endswith("is of Pendulum-v1, and they are evaluated in Mine-v0")


def test_an_environment_that_is_more_than_its_name_has_a_note(create):
    """By its name it is another one: other arguments, another time limit, no wrappers."""
    usual = gymnasium.make("Pendulum-v1")
    scaled = gymnasium.wrappers.NormalizeReward(gymnasium.wrappers.RecordEpisodeStatistics(usual))
    changed = gymnasium.make("Pendulum-v1", g=2.0, max_episode_steps=50, render_mode="rgb_array")
    cases: list[tuple[dict, str, str]] = [
        ({"env": usual}, "Pendulum-v1", ""),
        ({"env": changed}, "Pendulum-v1", "other values of g, max_episode_steps than it is registered with"),
        ({"env": scaled}, "Pendulum-v1", "other values of wrappers (NormalizeReward) than"),
        (
            {"env": scaled, "eval_env": usual},
            "Pendulum-v1",
            "other values of wrappers (NormalizeReward) than",
        ),
        (
            {"env": usual, "eval_env": gymnasium.make("MountainCarContinuous-v0")},
            "MountainCarContinuous-v0",
            "the steps are of Pendulum-v1, and MountainCarContinuous-v0 is recorded to evaluate in",
        ),
    ]
    for recorded, name, note in cases:
        episodes = [episode(3, np.zeros((3, 1), np.float32), False)]
        create(episodes, BOX, spaces.Box(-2, 2, (1,), np.float32), **recorded)
        loaded = data.load("minari:test/log-v0")
        assert loaded.environment == name
        assert note in loaded.note if note else not loaded.note
        assert data.load("minari:test/log-v0", environment="Mine-v0").note == ""
        minari.delete_dataset("test/log-v0")


def test_scores_in_another_task_are_not_normalised(create):
    """The reference is of episodes of 50 steps; by its name the environment has 200."""
    create(
        [episode(3, np.zeros((3, 1), np.float32), False)],
        BOX,
        spaces.Box(-2, 2, (1,), np.float32),
        env=gymnasium.make("Pendulum-v1", max_episode_steps=50),
        ref_min_score=-400.0,
        ref_max_score=-50.0,
    )
    loaded = data.load("minari:test/log-v0")
    assert loaded.environment == "Pendulum-v1" and loaded.reference is None
    assert "max_episode_steps" in loaded.note and "returns are not normalised" in loaded.note


def test_discrete_actions_count_from_zero(create):
    create([episode(4, np.array([2, 3, 4, 2]), True)], BOX, spaces.Discrete(5, start=2))
    loaded = data.load("minari:test/log-v0")
    np.testing.assert_array_equal(loaded.dataset.transitions.action, [0, 1, 2, 0])
    assert loaded.spec == ((3,), 5, True)  # 5 choices, though only 3 were made


def test_dictionaries_stay_or_are_flattened_as_gymnasium_does(create):
    """And an agent learns from them as they are."""
    goal = spaces.Box(-1, 1, (2,), np.float64)
    space = spaces.Dict(
        [("observation", BOX), ("desired_goal", goal)]
    )  # not sorted: Minari sorts it when it is read
    log = episode(3, np.zeros((3, 1), np.float32), False)
    goals = np.random.default_rng(0).uniform(-1, 1, (4, 2))
    log["observations"] = {"observation": log["observations"], "desired_goal": goals}
    create([log], space, spaces.Box(-1, 1, (1,), np.float32))
    loaded = data.load("minari:test/log-v0")
    assert loaded.spec == ({"desired_goal": (2,), "observation": (3,)}, 1, False)
    steps = loaded.dataset.transitions
    for name, values in log["observations"].items():
        np.testing.assert_array_equal(steps.observation[name], values[:-1].astype(np.float32))
        np.testing.assert_array_equal(steps.next_observation[name], values[1:].astype(np.float32))
    learner = iql.make(iql.Config(hidden=(4,)), loaded.spec, heads.scalar())
    key, batch = jax.random.key(0), replay.sampler(5)(loaded.dataset, jax.random.key(0))
    state = jax.eval_shape(learner.init, key, batch)
    assert jax.eval_shape(learner.update, state, batch, key)[0].step.shape == ()
    with pytest.raises(DataError, match="only flat observations"):
        data.minari.write(loaded, "test/again-v0")

    flat = data.load("minari:test/log-v0", flatten_observations=True)
    for t in range(3):
        step = {name: values[t] for name, values in log["observations"].items()}
        np.testing.assert_allclose(
            flat.dataset.transitions.observation[t], spaces.utils.flatten(space, step), rtol=1e-6
        )
    assert flat.environment is None


def test_actions_outside_the_box_are_refused_or_clipped(create):
    actions = np.array([[0], [3], [0]], np.float32)
    create([episode(3, actions, False)], BOX, spaces.Box(-2, 2, (1,), np.float32))
    with pytest.raises(DataError, match=r"1 action values.*worst is 3 in step 1"):
        data.load("minari:test/log-v0")
    clipped = data.load("minari:test/log-v0", clip_actions=True)
    np.testing.assert_array_equal(clipped.dataset.transitions.action[:, 0], [0, 1, 0])


def test_observations_that_are_not_arrays_are_refused(create):
    log = episode(3, np.zeros((3, 1), np.float32), False)
    log["observations"] = np.zeros(4, np.int64)
    create([log], spaces.Discrete(4), spaces.Box(-1, 1, (1,), np.float32))
    with pytest.raises(DataError, match=r"observations are Discrete\(4\)"):
        data.load("minari:test/log-v0")


def test_actions_that_no_agent_takes_are_refused(create):
    log = episode(3, np.zeros((3, 2), np.int64), False)
    create([log], BOX, spaces.MultiDiscrete([3, 3]))
    with pytest.raises(DataError, match="actions are MultiDiscrete"):
        data.load("minari:test/log-v0")


@pytest.fixture
def stored(create, tmp_path):
    """A function that changes arrays of a stored dataset of two episodes of 4 steps, and gives its name."""
    log = episode(4, np.zeros((4, 1), np.float32), True)
    create([log, log], BOX, spaces.Box(-1, 1, (1,), np.float32))
    folder = tmp_path / "test" / "log-v0" / "data"

    def change(**replaced):
        with h5py.File(folder / "main_data.hdf5", "a") as file:
            for name, value in replaced.items():
                del file["episode_1"][name]
                file["episode_1"][name] = value
        return f"minari:{tmp_path}/test/log-v0"

    change.folder = folder
    return change


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"terminations": np.full(4, b"False")}, r"terminations are \|S5"),
        (
            {"terminations": np.array([0, 0, 0, 7])},
            "terminations must be 0 or 1, but 1 are not.* 7 in step 7",
        ),
        ({"truncations": np.array([0, 0, 0, np.nan])}, "1 values of truncations are NaN"),
        ({"rewards": np.zeros(0)}, "episode 1: it has 4 actions, 0 rewards"),
        ({"actions": np.zeros((4, 1), bool)}, "actions are float32 and bool in different episodes"),
        ({"actions": np.zeros((4, 2), np.float32)}, "cannot be read as a Minari dataset"),
        ({"observations": np.zeros((5, 2))}, r"episode 1: observations have shape \(5, 2\), but their space"),
        (
            {name: np.zeros(0) for name in ("actions", "rewards", "terminations", "truncations")}
            | {"observations": np.zeros((1, 3), np.float32)},
            "episode 1: it has 0 actions, .*without this episode",
        ),
    ],
)
def test_a_damaged_episode_is_refused(stored, replaced, message):
    with pytest.raises(DataError, match=f"^Minari .*log-v0.*{message}"):
        data.load(stored(**replaced))


def test_flags_that_are_numbers_are_read(stored):
    dataset = data.load(stored(terminations=np.array([0, 0, 0, 1.0]))).dataset
    np.testing.assert_array_equal(dataset.transitions.discount, [1, 1, 1, 0] * 2)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("main_data.hdf5", lambda content: content[:-400], "cannot be read as a Minari dataset"),
        (
            "metadata.json",
            lambda content: content[:-1],
            "cannot be read as a Minari dataset .*JSONDecodeError",
        ),
        (
            "metadata.json",
            lambda content: content.replace(b'"total_episodes": 2', b'"total_episodes": 1'),
            "its metadata counts 8 steps in 1 episodes, but they hold 4",
        ),
        (
            "metadata.json",
            lambda content: content.replace(b'"total_episodes": 2', b'"total_episodes": 3'),
            "cannot be read as a Minari dataset .*KeyError.*delete a damaged one and download it again",
        ),
    ],
)
def test_damage_is_told_at_opening_and_while_episodes_are_read(stored, file, damage, message):
    name, path = stored(), stored.folder / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"^Minari .*log-v0.*{message}"):
        data.load(name)


def test_an_absent_dataset_is_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*none; 'minari list local'"):
        data.load(f"minari:{tmp_path}/none")


@pytest.mark.parametrize(
    "name, made",
    [
        ("mujoco/hopper/medium-v0", r", or make one like it .*--dataset=hopper-medium-regen-v5"),
        ("D4RL/door/human-v2", r"datasets$"),
    ],
)
def test_a_server_that_cannot_be_reached_is_no_damage(name, made, tmp_path, monkeypatch):
    def load_dataset(*_, **__):
        try:
            raise ConnectionRefusedError("refused")
        except OSError as error:
            raise RuntimeError("some library") from error  # as those of HTTP do

    monkeypatch.setattr("minari.load_dataset", load_dataset)
    with pytest.raises(DataError, match=rf"cannot be reached \(refused\): .*minari download {name}.*{made}"):
        data.load(f"minari:{name}")
