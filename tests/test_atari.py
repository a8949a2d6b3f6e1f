"""Atari games as Dopamine shows them: what is seen against the console's own screen, and DQN on one of them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("ale_py")

from experiments import common, online, presets
from rl import checkpoint, envs
from rl.agents import dqn
from rl.envs import atari, snapshot
from rl.envs.stream import Stream
from rl.networks import mlp
from rl.types import Spec

PONG = "ALE/Pong-v5"


def test_a_picture_shrinks_to_the_means_of_its_parts() -> None:
    rng = np.random.default_rng(0)
    screen = rng.integers(0, 256, (210, 160)).astype(np.uint8)
    # 210 and 160 times 2 and 21 are multiples of 84: repeated pixels make the parts whole.
    large = np.repeat(np.repeat(screen.astype(float), 2, 0), 21, 1)
    expected = large.reshape(84, 5, 84, 40).mean((1, 3))
    assert np.abs(atari.shrink(screen) - expected).max() <= 0.5 + 1e-3
    assert atari.shrink(np.full((210, 160), 255, np.uint8)).min() == 255


def test_a_step_is_four_frames_of_sticky_actions_and_shows_the_brighter_of_the_last_two() -> None:
    env, other = envs.make(PONG), envs.make(PONG)
    seen, _ = env.reset(seed=3)
    other.reset(seed=3)
    bare = other.unwrapped  # the console: one frame a step
    assert seen.shape == (84, 84, 4) and seen.dtype == np.uint8
    assert not seen[..., :3].any() and seen[..., 3].any()
    chance, held, stuck = copy.deepcopy(env.unwrapped.np_random), 0, 0
    for action in (0, 2, 3, 0, 2, 3, 2):
        before = seen
        seen, reward, *_ = env.step(action)
        played = []
        for _ in range(4):
            held = held if chance.random() < 0.25 else action
            stuck += held != action
            played.append(bare.step(held))
        frames, rewards, *_ = zip(*played, strict=True)
        np.testing.assert_array_equal(seen[..., :3], before[..., 1:])
        np.testing.assert_array_equal(seen[..., 3], atari.shrink(np.maximum(frames[2], frames[3])))
        assert reward == sum(rewards)
    assert stuck


def test_the_console_sticks_to_no_action_itself_and_games_end_by_the_clock() -> None:
    console = envs.make(PONG).unwrapped.ale
    assert console.getFloat("repeat_action_probability") == 0
    assert console.getInt("max_num_frames_per_episode") == 108_000
    assert envs.spec(envs.make(PONG)) == Spec((84, 84, 4), 6, True)


@pytest.mark.slow
def test_a_game_goes_on_from_its_snapshot() -> None:
    with Stream(PONG, [(1,)], 0) as running, Stream(PONG, [(1,)], 0) as other:
        rng = np.random.default_rng(0)
        for _ in range(40):
            running.step(rng.integers(0, 6, 1))
        saved = running.snapshot()
        assert saved["reason"] == "" and other.restore(saved)
        for _ in range(40):
            action = rng.integers(0, 6, 1)
            one, two = running.step(action), other.step(action)
            np.testing.assert_array_equal(one.observation, two.observation)
            assert one.reward == two.reward


def test_a_sticky_action_is_a_part_of_the_snapshot() -> None:
    """Wherever it is taken: with one in four frames the action before counts."""
    env, other, rng = envs.make(PONG), envs.make(PONG), np.random.default_rng(0)
    env.reset(seed=0)
    other.reset(seed=9)
    for _ in range(20):
        for action in rng.integers(0, 6, 3):
            env.step(action)
            other.step(0)
        snapshot.put(other, snapshot.take(env))
        for action in rng.integers(0, 6, 2):
            np.testing.assert_array_equal(env.step(action)[0], other.step(action)[0])
    with pytest.raises(snapshot.NoSnapshot, match="repeats its last action"):
        snapshot.take(gymnasium.make(PONG))


def test_the_nature_network_has_the_papers_size() -> None:
    network = mlp.action_values(Spec((84, 84, 4), 6, True), 51, (512,))
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 84, 84, 4), jnp.uint8))
    sizes = {name: part["kernel"].shape for name, part in shapes["encoder"].items()}
    assert sizes == {"Conv_0": (8, 8, 4, 32), "Conv_1": (4, 4, 32, 64), "Conv_2": (3, 3, 64, 64)}
    assert shapes["dense"]["Dense_0"]["kernel"].shape == (11 * 11 * 64, 512)
    out = jax.eval_shape(network.apply, shapes, jax.ShapeDtypeStruct((2, 3, 84, 84, 4), jnp.uint8))
    assert out.shape == (2, 3, 6, 51)


def published(head: str) -> tuple[online.Settings, dqn.Config]:
    flags = {"agent": "dqn", "env": PONG, "head": head}
    return presets.resolve("online", online.PUBLISHED, common.config, "env", flags)


@pytest.mark.parametrize("head", ["scalar", "hl_gauss"])
def test_dopamines_numbers_stand_where_no_flag_says_otherwise(head: str) -> None:
    settings, config = published(head)
    assert (settings.utd, settings.batch_size, settings.learning_starts, settings.replay) == (
        0.25,
        32,
        20_000,
        10**6,
    )
    assert config.target_period / settings.utd == 8000 and config.epsilon_updates / settings.utd == 250_000
    assert (config.learning_rate, config.critic_optimiser.epsilon) == (
        (6.25e-5, 1.5e-4) if head == "scalar" else (2.5e-4, 3.125e-4)
    )
    online.check(settings)
    assert presets.find("online", "dqn", "CartPole-v1", "scalar") is None


@pytest.mark.long
@pytest.mark.command
def test_a_game_is_played_and_its_frames_are_kept_once(tmp_path: Path) -> None:
    settings, config = published("hl_gauss")
    chosen = dataclasses.replace(
        settings,
        steps=40,
        learning_starts=20,
        replay=50,
        batch_size=4,
        eval_every=20,
        save_every=20,
        eval_episodes=2,
        eval_processes=0,
        tensorboard=False,
        workdir=str(tmp_path),
    )
    shown = []
    step = Stream.step

    def watched(self: Stream, actions: np.ndarray):
        shown.append(self.observation[0, ..., -1:])
        return step(self, actions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "step", watched)
        # Whole games take minutes: what is scored is another test's business.
        patch.setattr(common.evaluate, "evaluator", short_evaluator)
        online.run(chosen, dataclasses.replace(config, hidden=(8,)))
    _, arrays = checkpoint.read(tmp_path / "checkpoints")
    assert arrays["state/step"] == 6
    np.testing.assert_array_equal(arrays["loop/memory/rows/frame"][0, :40], shown)
    with pytest.raises(ValueError, match="--learning_starts=5 is too early for stacked frames"):
        online.run(dataclasses.replace(chosen, learning_starts=5), config)


class short_evaluator:
    """Scores everything 0."""

    def __init__(self, *arguments, seeds: int, episodes: int, **options):
        self.shape = seeds, episodes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, state, index: int):
        return {"return": np.zeros(self.shape)}
