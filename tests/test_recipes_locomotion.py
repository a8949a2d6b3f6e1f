"""Locomotion tiers: the policies, what a tier holds, that nothing but its settings decides it, and its readers."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rl import data
from rl.data import d4rl
from rl.data.recipes import LOCOMOTION, behaviour, collect, find, locomotion, pool, read_card
from rl.data.steps import DataError

h5py = pytest.importorskip("h5py")

MEDIUM = "hopper-medium-regen-v5"
OBSERVATION, ACTION = 11, 3  # of Hopper-v5


def make_actors(
    environment: str = "Hopper-v5", observation: int = OBSERVATION, action: int = ACTION
) -> behaviour.Actors:
    """Three snapshots on the way to the medium one, and an expert, all with random weights."""
    rng = np.random.default_rng(0)
    sizes = [(observation, 8), (8, 8), (8, 2 * action)]
    return behaviour.Actors(
        kernels=[rng.normal(0, 0.3, (4, *size)).astype(np.float16) for size in sizes],
        biases=[rng.normal(0, 0.3, (4, size[1])).astype(np.float16) for size in sizes],
        steps=np.array([200, 400, 600, 5000]),
        returns=np.array([[20.0, 30.0], [40.0, 50.0], [60.0, 80.0], [200.0, 300.0]], np.float32),
        random_returns=np.array([10.0, 20.0], np.float32),
        card={
            "environment": environment,
            "medium": 2,
            "expert": 3,
            "random_steps": 50,
            "log_std": [-5.0, 2.0],
            "command": "python -m train",
            "seed": 7,
            "commit": "abc",
        },
    )


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("actors") / "hopper.npz"
    behaviour.save(path, make_actors())
    return path


def make(out: Path, dataset: str, policies: Path | None, **settings) -> Path:
    settings = {"transitions": 100, "processes": 1, "progress": False, **settings}
    return collect(dataset, out=out, actors=policies, **settings)


def arrays(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][()] for name in locomotion.ARRAYS}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a | b)


def check_episodes(log: dict[str, np.ndarray]) -> None:
    """Episodes follow one another whole: a step that ends none leads to the next, and no state comes twice."""
    ended = log["terminals"] | log["timeouts"]
    assert ended[-1]
    going_on = np.flatnonzero(~ended)
    assert np.array_equal(log["next_observations"][going_on], log["observations"][going_on + 1])
    assert len(np.unique(log["observations"], axis=0)) == len(ended)


# Policies.


@pytest.mark.slow
def test_a_policy_is_the_network_it_was_exported_from() -> None:
    import jax

    from rl.networks import mlp
    from rl.types import Spec

    network = mlp.squashed_policy(Spec((OBSERVATION,), ACTION), (16, 16))
    rng = np.random.default_rng(1)
    observation = rng.normal(0, 3, OBSERVATION).astype(np.float32)
    params = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape), network.init(jax.random.key(0), observation)
    )
    layers = [params[f"Dense_{i}"] for i in range(3)]
    policy = behaviour.Policy(
        [(np.asarray(layer["kernel"]), np.asarray(layer["bias"])) for layer in layers],
        mlp.LOG_STD_MIN,
        mlp.LOG_STD_MAX,
    )
    theirs = network.apply(params, observation)
    for seed in range(5):
        action, log_prob = policy(observation, np.random.default_rng(seed))
        assert action.dtype == np.float32
        noise = np.random.default_rng(seed).standard_normal(ACTION, np.float32)
        normal = theirs.distribution.distribution
        np.testing.assert_allclose(action, np.tanh(normal.loc + normal.scale * noise), atol=1e-5)
        inside = np.clip(action, -0.9999, 0.9999)  # at the bound their inverse of tanh has lost all digits
        if np.array_equal(inside, action):
            assert log_prob == pytest.approx(float(theirs.log_prob(action)), abs=1e-2)


def test_the_log_density_of_a_saturated_action_is_finite() -> None:
    policy = behaviour.Policy([(np.zeros((2, 2), np.float32), np.array([50, -9], np.float32))], -5, 2)
    action, log_prob = policy(np.zeros(2, np.float32), np.random.default_rng(0))
    assert action == 1
    # log N(u) - log(4 exp(-2 u)) for large u
    noise = np.random.default_rng(0).standard_normal(1, np.float32)[0]
    before = 50 + np.exp(-5) * noise
    assert log_prob == pytest.approx(
        -(noise**2) / 2 + 5 - np.log(2 * np.pi) / 2 - np.log(4) + 2 * before, rel=1e-4
    )


def test_actors_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    written = make_actors()
    behaviour.save(tmp_path / "a.npz", written)
    read = behaviour.load(tmp_path / "a.npz", "Hopper-v5")
    assert read.card == written.card
    assert behaviour.digest(read) == behaviour.digest(written)
    for one, other in zip(read[:5], written[:5], strict=True):
        assert (
            np.array_equal(one, other)
            if isinstance(one, np.ndarray)
            else all(map(np.array_equal, one, other))
        )
    changed = written._replace(biases=[bias + 1 for bias in written.biases])
    assert behaviour.digest(changed) != behaviour.digest(written)


def test_a_published_policy_is_the_single_snapshot(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {
        "latent_pi.0": (8, OBSERVATION),
        "latent_pi.2": (8, 8),
        "mu": (ACTION, 8),
        "log_std": (ACTION, 8),
    }
    theirs = {
        f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
    }
    theirs |= {
        f"{name}.bias": rng.normal(0, 0.3, shape[0]).astype(np.float32) for name, shape in shapes.items()
    }
    np.savez(tmp_path / "published.npz", **theirs)
    observation = rng.normal(size=OBSERVATION).astype(np.float32)
    loaded = behaviour.load(tmp_path / "published.npz", "Hopper-v5")
    action, _ = loaded.policy(0)(observation, np.random.default_rng(3))
    hidden = observation
    for name in ("latent_pi.0", "latent_pi.2"):
        hidden = np.maximum(theirs[f"{name}.weight"] @ hidden + theirs[f"{name}.bias"], 0)
    mean, log_std = (theirs[f"{name}.weight"] @ hidden + theirs[f"{name}.bias"] for name in ("mu", "log_std"))
    noise = np.random.default_rng(3).standard_normal(ACTION, np.float32)
    np.testing.assert_allclose(action, np.tanh(mean + np.exp(log_std) * noise), atol=1e-5)
    path = make(tmp_path, MEDIUM, tmp_path / "published.npz", transitions=20)
    assert "not trained by this library" in d4rl.recorded(path)["actors"]["origin"]
    with pytest.raises(ValueError, match="medium-replay needs the snapshots of a training run"):
        make(tmp_path, "hopper-medium-replay-regen-v5", tmp_path / "published.npz")
    with pytest.raises(ValueError, match="medium-expert needs two policies"):
        make(tmp_path, "hopper-medium-expert-regen-v5", tmp_path / "published.npz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as npz"),
        (b"not an npz", "cannot be read as npz"),
        ({"weights": np.zeros(3)}, "holds no actors: it has weights"),
        ({"card": np.array("[]")}, r"actors.npz cannot be read as actors .*--actors"),
        ("Walker2d-v5", "act in Walker2d-v5, not in Hopper-v5"),
    ],
)
def test_files_that_hold_no_actors_for_the_environment(content, message: str, tmp_path: Path) -> None:
    path = tmp_path / "actors.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, str):
        behaviour.save(path, make_actors(content))
    with pytest.raises(ValueError, match=message):
        make(tmp_path, MEDIUM, path)


def test_a_card_must_be_complete(tmp_path: Path) -> None:
    broken = make_actors()
    del broken.card["commit"]
    with pytest.raises(ValueError, match="needs commit"):
        behaviour.save(tmp_path / "a.npz", broken)


# What a tier holds.


@pytest.mark.parametrize(
    ("robot", "sizes"), [("hopper", (11, 3, 6)), ("halfcheetah", (17, 6, 9)), ("walker2d", (17, 6, 9))]
)
def test_the_layout_is_d4rls(robot: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    observation, action, state = sizes
    log = arrays(make(tmp_path, f"{robot}-random-regen-v5", None))
    expected = {
        "observations": ((100, observation), "float32"),
        "actions": ((100, action), "float32"),
        "rewards": ((100,), "float32"),
        "terminals": ((100,), "bool"),
        "timeouts": ((100,), "bool"),
        "next_observations": ((100, observation), "float32"),
        "infos/action_log_probs": ((100,), "float32"),
        "infos/qpos": ((100, state), "float32"),
        "infos/qvel": ((100, state), "float32"),
    }
    assert {name: (array.shape, array.dtype.name) for name, array in log.items()} == expected
    # The observation is the state without the position along the track.
    assert np.array_equal(log["observations"][:, : state - 1], log["infos/qpos"][:, 1:])
    limit = np.inf if robot == "halfcheetah" else 10
    assert np.array_equal(log["observations"][:, state - 1 :], np.clip(log["infos/qvel"], -limit, limit))
    assert np.allclose(log["infos/action_log_probs"], -action * np.log(2))
    assert np.abs(log["actions"]).max() <= 1
    assert 0.5 < log["actions"].std() < 0.65  # uniform: 0.577
    check_episodes(log)


def test_an_episode_is_what_gymnasium_itself_plays(policies: Path, tmp_path: Path) -> None:
    log = arrays(make(tmp_path, MEDIUM, policies, seed=5))
    env = gymnasium.make("Hopper-v5")
    policy = make_actors().policy(2)
    row = 0
    for episode in range(3):
        rng = np.random.default_rng(np.random.SeedSequence(5, spawn_key=(0, 3, 0, episode)))
        observation, _ = env.reset(seed=int(rng.integers(2**31)))
        ended = False
        while not ended and row < 100:
            assert np.array_equal(log["observations"][row], observation.astype(np.float32))
            action, log_prob = policy(observation.astype(np.float32), rng)
            assert np.array_equal(log["actions"][row], action)
            assert log["infos/action_log_probs"][row] == np.float32(log_prob)
            observation, reward, terminated, truncated, _ = env.step(action)
            assert log["rewards"][row] == np.float32(reward)
            assert log["terminals"][row] == terminated
            ended, row = terminated or truncated, row + 1


def test_medium_expert_is_both_one_after_the_other(policies: Path, tmp_path: Path) -> None:
    both = arrays(make(tmp_path, "hopper-medium-expert-regen-v5", policies, transitions=201))
    halves = [
        arrays(make(tmp_path, f"hopper-{tier}-regen-v5", policies, transitions=rows))
        for tier, rows in (("medium", 100), ("expert", 101))
    ]
    assert same(both, {name: np.concatenate([half[name] for half in halves]) for name in both})


def test_medium_replay_goes_through_training_from_random_to_medium(policies: Path, tmp_path: Path) -> None:
    path = make(tmp_path, "hopper-medium-replay-regen-v5", policies, transitions=None)
    # 50 of 600 steps by the warm-up, then each by the nearest snapshot of those at 200, 400 and 600.
    assert d4rl.recorded(path)["stages"] == [
        {"policy": "uniform", "transitions": 50},
        {"policy": "snapshot", "training_steps": 200, "transitions": 250},
        {"policy": "snapshot", "training_steps": 400, "transitions": 200},
        {"policy": "snapshot", "training_steps": 600, "transitions": 100},
    ]
    log = arrays(path)
    assert np.allclose(log["infos/action_log_probs"][:50], -3 * np.log(2))
    assert not np.allclose(log["infos/action_log_probs"][50:], -3 * np.log(2))
    cuts = [49, 299, 499, 599]
    assert (log["terminals"] | log["timeouts"])[cuts].all()
    # Its last stage is by the medium policy, but holds other episodes than the medium tier.
    medium = arrays(make(tmp_path, MEDIUM, policies))
    assert not np.isin(log["observations"][500], medium["observations"]).all()
    tenth = make(tmp_path / "tenth", "hopper-medium-replay-regen-v5", policies, transitions=60)
    assert [stage["transitions"] for stage in d4rl.recorded(tenth)["stages"]] == [5, 25, 20, 10]


def test_the_protocols_sizes() -> None:
    policies = make_actors()
    rows = {
        tier: [count for _, count in locomotion._weights(find(f"hopper-{tier}-regen-v5"), policies)]
        for tier in ("random", "medium", "expert", "medium-expert", "medium-replay")
    }
    million = 1_000_000
    assert rows == {
        "random": [million],
        "medium": [million],
        "expert": [million],
        "medium-expert": [million, million],
        "medium-replay": [50, 250, 200, 100],
    }
    assert len(LOCOMOTION) == 15


def test_the_scores_are_those_of_whole_episodes_by_both_references(policies: Path, tmp_path: Path) -> None:
    path = make(tmp_path, MEDIUM, policies)
    card, log = read_card(path), arrays(path)
    returns, total = [], 0.0
    for reward, terminal in zip(log["rewards"], log["terminals"], strict=True):
        total += float(reward)
        if terminal:
            returns.append(total)
            total = 0.0
    assert card["episodes"] == len(returns) + card["episodes_cut"]
    assert card["return_mean"] == pytest.approx(np.mean(returns))
    assert card["return_std"] == pytest.approx(np.std(returns))
    low, high = -20.272305, 3234.3  # D4RL's
    assert card["reference_d4rl"] == [low, high]
    assert card["normalized_return_d4rl"] == pytest.approx(100 * (np.mean(returns) - low) / (high - low))
    assert card["reference_recipe"] == [15, 250]
    assert card["normalized_return_recipe"] == pytest.approx(100 * (np.mean(returns) - 15) / 235)


def test_the_file_says_how_it_was_made(policies: Path, tmp_path: Path) -> None:
    path = make(tmp_path, MEDIUM, policies, seed=3)
    known = d4rl.recorded(path)
    assert known["regenerated"] is True
    assert known["dataset"] == MEDIUM
    assert (known["seed"], known["environment"]) == (3, "Hopper-v5")
    assert f"--dataset={MEDIUM} --transitions=100 --seed=3 --actors={policies}" in known["command"]
    assert known["actors"] == make_actors().card
    assert known["stages"] == [{"policy": "snapshot", "training_steps": 600, "transitions": 100}]
    assert "mujoco" in known["versions"]
    card = read_card(path)
    assert {name: card[name] for name in known} == known


# What decides it.


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter(policies: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(locomotion, "CHUNK_ROWS", 60)
    one = make(tmp_path / "1", MEDIUM, policies, transitions=200, processes=1)
    two = make(tmp_path / "2", MEDIUM, policies, transitions=200, processes=2)
    assert one.read_bytes() == two.read_bytes()
    check_episodes(arrays(one))
    other = make(tmp_path / "3", MEDIUM, policies, transitions=200, seed=1)
    assert not same(arrays(other), arrays(one))
    shorter = arrays(make(tmp_path / "4", MEDIUM, policies, transitions=130))
    ends = shorter.pop("timeouts")
    assert ends[-1]
    assert same(shorter, {name: array[:130] for name, array in arrays(one).items() if name != "timeouts"})


class Stop(Exception):
    pass


def test_what_was_finished_is_not_made_again(policies: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(locomotion, "CHUNK_ROWS", 30)
    whole = make(tmp_path / "whole", MEDIUM, policies)
    run = pool.run

    def stopping(*args):
        for number, chunk in enumerate(run(*args), 1):
            yield chunk
            if number == 2:
                raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(pool, "run", stopping)
        make(tmp_path / "stopped", MEDIUM, policies)
    assert not list((tmp_path / "stopped").glob("*.hdf5"))
    continued = make(tmp_path / "stopped", MEDIUM, policies)
    assert read_card(continued)["steps_resumed"] == 60
    assert continued.read_bytes() == whole.read_bytes()


def test_other_actors_make_another_file(policies: Path, tmp_path: Path) -> None:
    path = make(tmp_path, MEDIUM, policies)
    changed = make_actors()
    changed.biases[0][:] += 1
    behaviour.save(tmp_path / "other.npz", changed)
    with pytest.raises(FileExistsError, match=r"would be replaced.*--overwrite"):
        make(tmp_path, MEDIUM, tmp_path / "other.npz")
    before = arrays(path)
    make(tmp_path, MEDIUM, tmp_path / "other.npz", overwrite=True)
    assert not same(arrays(path), before)


# Readers.


def test_our_reader_knows_environment_and_reference(policies: Path, tmp_path: Path) -> None:
    path = make(tmp_path, MEDIUM, policies)
    loaded = data.load(str(path))
    assert loaded.environment == "Hopper-v5"
    assert loaded.reference == (-20.272305, 3234.3)
    assert "regenerated" in loaded.source
    assert "regenerated, not D4RL's file" in loaded.note
    assert "15.0 and 250.0" in loaded.note
    log = arrays(path)
    transitions, last, _ = loaded.dataset
    assert np.array_equal(transitions.next_observation, log["next_observations"])
    assert np.array_equal(transitions.discount, 1 - log["terminals"])
    assert np.array_equal(last, log["terminals"] | log["timeouts"])
    assert data.load(MEDIUM, folder=tmp_path).digest == loaded.digest


def test_a_tier_that_was_not_made_says_how_to_make_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    with pytest.raises(DataError, match=f"experiments.collect --dataset={MEDIUM}"):
        data.load(MEDIUM)


def test_minari_holds_the_same_data(policies: Path, tmp_path: Path, monkeypatch) -> None:
    minari = pytest.importorskip("minari")
    from rl.data import minari as ours

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    loaded = data.load(str(make(tmp_path, MEDIUM, policies)))
    ours.write(loaded, f"headway/{MEDIUM}")
    theirs = minari.load_dataset(f"headway/{MEDIUM}")
    assert (theirs.total_steps, theirs.total_episodes) == (100, int(loaded.dataset.last.sum()))
    assert theirs.recover_environment().spec.id == "Hopper-v5"
    terminal, last = loaded.dataset.transitions.discount == 0, loaded.dataset.last
    assert np.array_equal(np.concatenate([episode.terminations for episode in theirs]), terminal)
    assert np.array_equal(np.concatenate([episode.truncations for episode in theirs]), last & ~terminal)
    back = data.load(f"minari:headway/{MEDIUM}")
    assert back.digest == loaded.digest
    assert (back.environment, back.reference) == (loaded.environment, loaded.reference)
    with pytest.raises(DataError, match="Minari cannot write"):
        ours.write(loaded, f"headway/{MEDIUM}")
    with pytest.raises(DataError, match="Minari cannot write"):
        ours.write(loaded, "no such name!")


# Errors.


def test_without_shipped_actors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(behaviour, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"no actors for Hopper-v5 are shipped.*--actors"):
        make(tmp_path, MEDIUM, None)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"transitions": 0}, "transitions must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"episode_steps": 10}, "episode_steps is not for hopper-medium-regen-v5"),
    ],
)
def test_numbers_out_of_range(bad: dict[str, int], message: str, policies: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, MEDIUM, policies, **bad)


def test_actors_are_for_locomotion(policies: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="behaviour is scripted"):
        make(tmp_path, "cube-single-play-v0", policies)


def test_the_nearest_names_are_suggested() -> None:
    with pytest.raises(ValueError, match=MEDIUM):
        find("hopper-medium-v5")
