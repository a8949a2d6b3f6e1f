"""Export of behaviour policies: which snapshots are chosen, and what goes from a run into the file."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import actors
from rl import checkpoint, data
from rl.data.recipes import behaviour, locomotion
from rl.envs import make
from rl.networks import mlp
from rl.replay import transform
from rl.replay.transform import Transform
from rl.types import Spec


def test_medium_is_nearest_to_a_third_of_the_expert_before_it_is_passed() -> None:
    returns = np.array([0, 100, 250, 320, 900, 290, 600, 1000, 800], float)
    # A third is 333: 900 is the first beyond it, 320 the nearest up to there; 290 comes too late.
    assert actors.choose(returns, 4) == (pytest.approx([0, 1, 2, 3]), 7)
    assert actors.choose(returns, 2) == (pytest.approx([0, 3]), 7)
    assert actors.choose(returns, 1) == (pytest.approx([3]), 7)
    assert actors.choose(np.array([400.0, 1000.0]), 5) == (pytest.approx([0]), 1)


def test_an_expert_out_of_nowhere_has_no_medium() -> None:
    with pytest.raises(ValueError, match="save snapshots more often"):
        actors.choose(np.array([1000.0, 0.0]), 3)


def write_run(
    folder: Path,
    steps: list[int],
    seeds: int = 2,
    size: int = 3,
    env: str = "Hopper-v5",
    init_from: str = "",
    **entries,
) -> list[dict]:
    """A run folder as ``experiments.online`` leaves it; returns the parameters of each snapshot."""
    network = mlp.squashed_policy(Spec((11,), size), (8, 8))
    (folder / "actors").mkdir(parents=True)
    snapshots = []
    for step in steps:
        keys = jax.random.split(jax.random.key(step), seeds)
        params = jax.vmap(lambda key: network.init(key, np.zeros(11, np.float32)))(keys)
        checkpoint.export(folder / "actors" / f"{step}.npz", params)
        snapshots.append(params)
    settings = {"env": env, "seed": 4, "learning_starts": 100, "init_from": init_from}
    config = {"command": "python -m experiments.online", "commit": "abc", "versions": {"jax": "0"}}
    (folder / "config.json").write_text(json.dumps(config | {"config": {"settings": settings, **entries}}))
    return snapshots


def test_reads_one_seed_of_a_run_without_its_warm_up(tmp_path: Path) -> None:
    snapshots = write_run(tmp_path, [100, 200, 1300])
    policies = actors.read(tmp_path, 1)
    assert policies.steps.tolist() == [200, 1300]
    for layer, (kernel, bias) in enumerate(zip(policies.kernels, policies.biases, strict=True)):
        expected = snapshots[2][f"Dense_{layer}"]
        np.testing.assert_array_equal(kernel[1], np.asarray(expected["kernel"][1], np.float16))
        np.testing.assert_array_equal(bias[1], np.asarray(expected["bias"][1], np.float16))
    assert (policies.card["seed"], policies.card["member"], policies.card["random_steps"]) == (4, 1, 100)


def test_a_run_that_goes_on_with_another_has_no_random_actions(tmp_path: Path) -> None:
    write_run(tmp_path, [50, 200], init_from="runs/offline")
    policies = actors.read(tmp_path, 0)
    assert policies.steps.tolist() == [50, 200] and policies.card["random_steps"] == 0


def test_writes_what_the_recipes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", [200, 300, 400, 500])
    monkeypatch.setattr(actors, "choose", lambda returns, snapshots: actors.Choice(np.array([0, 1]), 3))
    out = tmp_path / "Hopper-v5.npz"
    written = actors.run(actors.Settings(run=str(tmp_path / "run"), out=str(out), episodes=1))
    read = behaviour.load(out, "Hopper-v5")
    assert behaviour.digest(read) == behaviour.digest(written)
    assert read.steps.tolist() == [200, 300, 500]
    assert (read.card["medium"], read.card["expert"], read.card["commit"]) == (1, 2, "abc")
    assert (read.returns.shape, read.random_returns.shape) == ((3, 10), (10,))
    # The returns are those of the weights as they are stored, in episodes of their own.
    env = make("Hopper-v5")
    again = locomotion.rollout(env, read.policy(2), np.random.SeedSequence((0, 1, 7)))["rewards"].sum()
    assert read.returns[2, 7] == np.float32(again)


def test_a_folder_without_snapshots(tmp_path: Path) -> None:
    """One that was killed while it wrote leaves a hidden file."""
    write_run(tmp_path, [50])
    (tmp_path / "actors" / ".0f1e.200.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="holds no snapshots"):
        actors.read(tmp_path, 0)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"settings": {"dataset": "x"}}}))
    with pytest.raises(
        ValueError, match=rf"--run={tmp_path} is no run of experiments\.online or experiments\.mbpo"
    ):
        actors.read(tmp_path, 0)
    (tmp_path / "below" / "checkpoints").mkdir(parents=True)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        ValueError, match=f"--run={tmp_path} holds no run: .* below it are {tmp_path / 'below'}"
    ):
        actors.read(tmp_path, 0)
    with pytest.raises(ValueError, match="--run and --out"):
        actors.run(actors.Settings(run=str(tmp_path)))


def write_checkpoint(folder: Path, count: int, capacity: int = 60, **settings) -> dict[str, np.ndarray]:
    """A checkpoint with the replay of two seeds after ``count`` steps; returns the rows of the second."""
    rng = np.random.default_rng(0)
    rows = {
        "observation": rng.normal(size=(2, capacity, 11)).astype(np.float32),
        "action": rng.uniform(-1, 1, (2, capacity, 3)).astype(np.float32),
        "reward": rng.normal(size=(2, capacity)).astype(np.float32),
        "discount": np.tile(np.arange(capacity) % 20 != 9, (2, 1)).astype(np.float32),
        "next_observation": rng.normal(size=(2, capacity, 11)).astype(np.float32),
        "first": np.tile(np.arange(capacity) % 10 == 0, (2, 1)),
    }
    memory = {"rows": rows, "head": np.array(count % capacity), "count": np.array(min(count, capacity))}
    seen = Transform(reward_scale=settings.pop("reward_scale", 1.0))
    card = {"settings": {"envs": 1, **settings}, "transform": transform.to_json(seen)}
    checkpoint.save(folder / "checkpoints", count, {"loop": {"memory": memory}}, card)
    return {name: array[1] for name, array in rows.items()}


def test_the_replay_buffer_is_written_as_d4rl_writes_it(tmp_path: Path) -> None:
    rows = write_checkpoint(tmp_path, 50)
    arrays = actors.read_buffer(tmp_path, 1, 35)
    # Episodes of ten steps; the first of every two ends in a terminal step, the other in a time limit.
    assert np.flatnonzero(arrays["terminals"]).tolist() == [9, 29]
    assert np.flatnonzero(arrays["timeouts"]).tolist() == [19]
    policies = behaviour.Actors(
        [],
        [],
        np.array([35]),
        np.ones((1, 2), np.float32),
        np.zeros(2),
        {"environment": "Hopper-v5", "expert": 0},
    )
    locomotion.write_buffer(tmp_path / "hopper-medium-replay-buffer-v5.hdf5", arrays, policies)
    loaded = data.load(
        str(tmp_path / "hopper-medium-replay-buffer-v5.hdf5"), shuffled=True
    )  # rows are random
    transitions, last, _ = loaded.dataset
    np.testing.assert_array_equal(transitions.observation, rows["observation"][:35])
    np.testing.assert_array_equal(transitions.next_observation, rows["next_observation"][:35])
    np.testing.assert_array_equal(transitions.reward, rows["reward"][:35])
    np.testing.assert_array_equal(transitions.action, rows["action"][:35])
    assert np.flatnonzero(transitions.discount == 0).tolist() == [9, 29]
    assert np.isin([9, 19, 29, 34], np.flatnonzero(last)).all()
    assert (loaded.environment, loaded.reference) == ("Hopper-v5", (-20.272305, 3234.3))
    whole = rows["reward"][:30].reshape(3, 10).sum(1)
    card = data.d4rl.recorded(tmp_path / "hopper-medium-replay-buffer-v5.hdf5")
    assert card["return_mean"] == pytest.approx(whole.mean())
    assert card["stages"] == [{"policy": "replay buffer", "transitions": 35}]


def test_a_replay_that_is_just_full_has_kept_all(tmp_path: Path) -> None:
    """As the defaults leave it: --replay is --steps."""
    rows = write_checkpoint(tmp_path, 60)
    np.testing.assert_array_equal(actors.read_buffer(tmp_path, 1, 60)["rewards"], rows["reward"])


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (120, {}, "holds 60 steps and has not kept the first"),
        (30, {}, "holds 30 steps and has kept the first"),
        (70, {}, "holds 60 steps and has not kept the first"),
        (50, {"envs": 2}, "--envs=1"),
        (50, {"reward_scale": 0.1}, "without --reward_scale"),
    ],
)
def test_a_replay_that_is_no_log_of_training(
    count: int, settings: dict, message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, count, **settings)
    with pytest.raises(ValueError, match=message):
        actors.read_buffer(tmp_path, 0, 35)


def test_a_run_without_a_checkpoint_or_with_another_replay(tmp_path: Path) -> None:
    """Runs of `experiments.mbpo` have two rings, and say nothing of how rewards were seen."""
    with pytest.raises(ValueError, match="has no checkpoint"):
        actors.read_buffer(tmp_path, 0, 35)
    memory = {"environment": {"head": np.zeros(()), "count": np.zeros(())}}
    checkpoint.save(tmp_path / "checkpoints", 1, {"loop": {"memory": memory}}, {"settings": {"envs": 1}})
    with pytest.raises(ValueError, match=r"holds no replay as experiments\.online keeps it"):
        actors.read_buffer(tmp_path, 0, 35)


def test_a_seed_that_was_not_trained(tmp_path: Path) -> None:
    write_run(tmp_path, [200])
    with pytest.raises(ValueError, match="--member=2, but the run has 2 seeds"):
        actors.read(tmp_path, 2)


def test_a_network_that_numpy_cannot_play(tmp_path: Path) -> None:
    write_run(tmp_path, [200])
    checkpoint.export(tmp_path / "actors" / "200.npz", {"LayerNorm_0": {"scale": np.ones(3)}})
    with pytest.raises(ValueError, match="no plain multi-layer perceptron: it has LayerNorm_0"):
        actors.read(tmp_path, 0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"config": {"network": {"activation": "tanh"}}},
            "network.activation=tanh, but actors are plain layers",
        ),
        ({"config": {"network": {"activation": "relu", "residual": True}}}, "network.residual=True"),
        ({"transform": {"mean": [0.0] * 11, "deviation": [1.0] * 11}}, "--normalize_observations"),
    ],
)
def test_a_policy_that_only_looks_like_plain_layers(entries: dict, message: str, tmp_path: Path) -> None:
    """Its parameters have the usual names and shapes, so it would be played as another policy."""
    write_run(tmp_path, [200], **entries)
    with pytest.raises(ValueError, match=message):
        actors.read(tmp_path, 0)


def test_a_policy_of_chunks_of_actions(tmp_path: Path) -> None:
    write_run(tmp_path, [200], size=6)
    with pytest.raises(ValueError, match=r"have 12 outputs, but actors .* of which there are 3"):
        actors.run(actors.Settings(run=str(tmp_path), out=str(tmp_path / "out.npz")))


def test_a_buffer_that_the_run_does_not_hold_is_refused_before_episodes_are_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, [200])
    write_checkpoint(tmp_path, 250, capacity=250, envs=2)
    monkeypatch.setattr(actors, "play", lambda *_: pytest.fail("episodes were played"))
    settings = actors.Settings(
        run=str(tmp_path), out=str(tmp_path / "x.npz"), buffer=str(tmp_path / "x.hdf5")
    )
    with pytest.raises(ValueError, match="with --envs=1 only"):
        actors.run(settings)


def test_a_buffer_of_a_task_that_d4rl_does_not_have(tmp_path: Path) -> None:
    write_run(tmp_path, [200], size=2, env="Swimmer-v5")
    settings = actors.Settings(
        run=str(tmp_path), out=str(tmp_path / "x.npz"), buffer=str(tmp_path / "x.hdf5")
    )
    with pytest.raises(ValueError, match=r"D4RL has no returns of Swimmer-v5 .* but of halfcheetah"):
        actors.run(settings)
