"""Export of behaviour policies: which snapshots are chosen, and what goes from a run into the file."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import actors
from rl import checkpoint
from rl.data.recipes import behaviour, locomotion
from rl.envs import make
from rl.networks import mlp
from rl.types import Spec


def test_medium_is_nearest_to_a_third_of_the_expert_before_it_is_passed() -> None:
    returns = np.array([0, 100, 250, 320, 900, 290, 600, 1000, 800], float)
    # A third is 333: 900 is the first beyond it, 320 the nearest up to there; 290 comes too late.
    assert actors.choose(returns, 4) == (pytest.approx([0, 1, 2, 3]), 7)
    assert actors.choose(returns, 2) == (pytest.approx([0, 3]), 7)
    assert actors.choose(np.array([400.0, 1000.0]), 5) == (pytest.approx([0]), 1)


def test_an_expert_out_of_nowhere_has_no_medium() -> None:
    with pytest.raises(ValueError, match="save snapshots more often"):
        actors.choose(np.array([1000.0, 0.0]), 3)


def write_run(folder: Path, steps: list[int], seeds: int = 2) -> list[dict]:
    """A run folder as ``experiments.online`` leaves it; returns the parameters of each snapshot."""
    network = mlp.squashed_policy(Spec((11,), 3), (8, 8))
    (folder / "actors").mkdir(parents=True)
    snapshots = []
    for step in steps:
        keys = jax.random.split(jax.random.key(step), seeds)
        params = jax.vmap(lambda key: network.init(key, np.zeros(11, np.float32)))(keys)
        checkpoint.export(folder / "actors" / f"{step:09d}.npz", params)
        snapshots.append(params)
    settings = {"env": "Hopper-v5", "seed": 4, "learning_starts": 100}
    config = {"command": "python -m experiments.online", "commit": "abc", "versions": {"jax": "0"}}
    (folder / "config.json").write_text(json.dumps(config | {"config": {"settings": settings}}))
    return snapshots


def test_reads_one_seed_of_a_run_without_its_warm_up(tmp_path: Path) -> None:
    snapshots = write_run(tmp_path, [100, 200, 1300])
    found = actors.read(tmp_path, 1)
    assert found.steps.tolist() == [200, 1300]
    for layer, (kernel, bias) in enumerate(zip(found.kernels, found.biases, strict=True)):
        expected = snapshots[2][f"Dense_{layer}"]
        np.testing.assert_array_equal(kernel[1], np.asarray(expected["kernel"][1], np.float16))
        np.testing.assert_array_equal(bias[1], np.asarray(expected["bias"][1], np.float16))
    assert (found.card["seed"], found.card["member"], found.card["random_steps"]) == (4, 1, 100)


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
    write_run(tmp_path, [50])
    with pytest.raises(ValueError, match="holds no snapshots"):
        actors.read(tmp_path, 0)
    with pytest.raises(ValueError, match="--run and --out"):
        actors.run(actors.Settings(run=str(tmp_path)))


def test_a_seed_that_was_not_trained(tmp_path: Path) -> None:
    write_run(tmp_path, [200])
    with pytest.raises(ValueError, match="--member=2, but the run has 2 seeds"):
        actors.read(tmp_path, 2)


def test_a_network_that_numpy_cannot_play(tmp_path: Path) -> None:
    write_run(tmp_path, [200])
    checkpoint.export(tmp_path / "actors" / "000000200.npz", {"LayerNorm_0": {"scale": np.ones(3)}})
    with pytest.raises(ValueError, match="no plain multi-layer perceptron: it has LayerNorm_0"):
        actors.read(tmp_path, 0)
