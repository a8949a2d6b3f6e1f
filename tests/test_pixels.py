"""MuJoCo tasks from pixels: the frames, their dependence on the seed, snapshots, and no renderer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import jax
import mujoco  # noqa: F401  (reads MUJOCO_GL when it is imported; some tests here change that)
import numpy as np
import pytest

from experiments import online
from rl import agents, envs, keys
from rl import online as compiled
from rl.envs.stream import Stream
from rl.networks.layers import Architecture
from rl.types import Spec

SHIFT = Architecture(shift=2)
PENDULUM = "pixels/InvertedPendulum-v5"


@pytest.fixture(scope="module")
def renderer() -> None:
    """Skips where MuJoCo itself cannot render without a screen."""
    try:
        from mujoco.egl import GLContext

        GLContext(84, 84).free()
    except Exception as error:  # it fails in many ways
        pytest.skip(f"EGL does not work here: {error!r}")


def test_observations_are_the_last_three_frames_of_this_episode(renderer: None) -> None:
    env = envs.make(PENDULUM)
    assert envs.spec(env) == Spec((84, 84, 9), 1)
    for seed in (3, 4):
        frames = [np.zeros((84, 84, 3), np.uint8)] * 2
        seen, _ = env.reset(seed=seed)
        for _ in range(4):
            frames.append(np.asarray(env.render()))
            assert seen.dtype == np.uint8 and seen.std() > 1
            np.testing.assert_array_equal(seen, np.concatenate(frames[-3:], -1))
            seen, *_ = env.step(np.ones(1))
    assert (frames[-1] != frames[-2]).any()


def test_frames_depend_on_the_seed_alone(renderer: None) -> None:
    """Not on when the environment was made, nor on others that render in the same process."""
    first = envs.make(PENDULUM)

    def episode(env: gymnasium.Env, between: Any = lambda: None) -> np.ndarray:
        seen = [env.reset(seed=1)[0]]
        for _ in range(5):
            between()
            seen.append(env.step(np.full(1, 0.5))[0])
        return np.stack(seen)

    alone = episode(first)
    second, other = envs.make(PENDULUM), envs.make("pixels/Reacher-v5")
    other.reset(seed=0)
    np.testing.assert_array_equal(episode(second, lambda: other.step(np.ones(2))), alone)
    states = [env.unwrapped.data.qpos for env in (envs.make(PENDULUM), envs.make(PENDULUM)) if env.reset()]
    assert (states[0] != states[1]).any()  # without a seed, episodes are random


@pytest.mark.slow
def test_a_run_goes_on_from_its_snapshot_in_another_process(renderer: None) -> None:
    seeds = [(1,), (2,)]
    with Stream(PENDULUM, seeds, 1) as running, Stream(PENDULUM, seeds, 0) as other:
        actions = np.random.default_rng(0).uniform(-1, 1, (40, 2, 1))
        for action in actions[:20]:
            running.step(action)
        saved = json.loads(json.dumps(running.snapshot()))
        assert saved["reason"] == "" and other.restore(saved)
        for action in actions[20:]:
            one, two = running.step(action), other.step(action)
            np.testing.assert_array_equal(one.next_observation, two.next_observation)
            np.testing.assert_array_equal(one.observation, two.observation)
            np.testing.assert_array_equal(one.reward, two.reward)
        assert len(running.finished) > 1


def test_an_action_is_repeated_until_the_episode_ends(
    renderer: None, tmp_path: Path, monkeypatch: Any
) -> None:
    """By the module that docs/online.md shows."""
    document = (Path(__file__).parent.parent / "docs/online.md").read_text()
    (module,) = (text for text in document.split("```python\n") if "MaxAndSkip" in text)
    (tmp_path / "repeated.py").write_text(module.split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    env, bare = envs.make("pixels/repeated:TwicePendulum-v0"), envs.make("InvertedPendulum-v5")
    for seed in range(6):
        env.reset(seed=seed)
        bare.reset(seed=seed)
        over, rewards, bare_rewards = False, [], []
        while not over:
            _, reward, over, *_ = env.step(np.ones(1))
            rewards.append(reward)
        over = False
        while not over:
            _, reward, over, *_ = bare.step(np.ones(1))
            bare_rewards.append(reward)
        assert rewards == [sum(bare_rewards[i : i + 2]) for i in range(0, len(bare_rewards), 2)]
        np.testing.assert_array_equal(env.unwrapped.data.qpos, bare.unwrapped.data.qpos)


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function OffScreenViewer"
)  # of gymnasium, half built
def test_without_a_screen_egl_renders_unless_mujoco_gl_is_set(renderer: None, monkeypatch: Any) -> None:
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert envs.make(PENDULUM).unwrapped.mujoco_renderer.viewer.backend == "egl"
    assert "MUJOCO_GL" not in os.environ
    monkeypatch.setenv("MUJOCO_GL", "paper")
    with pytest.raises(
        ImportError, match=r"cannot render pixels here .*'paper'\); .* MUJOCO_GL=egl .* libosmesa6"
    ):
        envs.make(PENDULUM)


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
@pytest.mark.parametrize("name", ["CartPole-v1", "toy_environments:Countdown-v0"])
def test_other_tasks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}' has no version pixels/{name}: it is no MuJoCo task"):
        envs.make(f"pixels/{name}")
    with pytest.raises(ValueError, match=r"the nearest names are .*Hopper-v5"):
        envs.make("pixels/Hoper-v5")


@pytest.mark.slow
def test_an_agent_trains_on_frames_that_are_kept_once() -> None:
    """The whole step of experiments.online, traced: frames are uint8 in the replay, and stacks in the update."""
    settings = online.Settings(agent="cqn", env=PENDULUM, replay=40, batch_size=4, envs=2, learning_starts=20)
    online.check(settings)
    spec, small = Spec((84, 84, 9), 1), agents.cqn.Config(levels=2, bins=3, hidden=(8,), network=SHIFT)
    learner, replay = online.learner_and_replay(settings, small, spec)
    loop = compiled.loop(learner, spec, replay, keys.seeds(jax.random.key(0), 1), 2, np.uint8)
    carry = jax.eval_shape(loop.init)
    frame = carry.memory.rows.frame
    assert frame.shape == (1, 40, 84, 84, 3) and frame.dtype == np.uint8
    observation = jax.ShapeDtypeStruct((2, 1, 2, 84, 84, 9), np.uint8)
    step = compiled.Step(observation, jax.ShapeDtypeStruct((3, 1, 2), np.float32))
    after, action = jax.eval_shape(lambda carry, step: loop.step(carry, step, None, 1, False), carry, step)
    assert after == carry and action.shape == (1, 2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_starts": 4}, r"--learning_starts=4 is too early .* --envs times \(3 \+ --n_step\)"),
        ({"relabel_success": "success"}, "--relabel_success is not for ALE games and pixels/"),
    ],
)
def test_settings_that_single_frames_cannot_serve_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        online.check(online.Settings(env=PENDULUM, **changes))
