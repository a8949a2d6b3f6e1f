"""rl.envs.distractors: what the recurrence is known to do, and the same numbers in gymnasium and in JAX."""

from __future__ import annotations

import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import envs
from rl.dynamics import truth
from rl.envs import distractors, pendulum
from rl.types import Spec

KEY = jax.random.key(0)


def followed(name: str, seed: int, actions: np.ndarray) -> np.ndarray:
    """Observations [T + 1, O + M] of an episode."""
    env = envs.make(name)
    return np.stack([env.reset(seed=seed)[0], *(env.step(action)[0] for action in actions)])


# ---- the recurrence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "share"), [(5, 0.21), (10, 0.39), (15, 0.48)])
def test_the_recurrence_does_what_was_measured_of_the_papers_code(count: int, share: float) -> None:
    """The share of components at their reset value, mean over maps; a loop of our own gives the same states."""
    at_reset = []
    for seed in range(30):
        rule = distractors.draw(count, seed)
        state = np.random.default_rng(seed).normal(0, 0.1, (20, count)).astype(np.float32)
        for time in range(100):
            before, state = state, distractors.advance(rule, state)
            if time >= 20:
                at_reset.append((state == rule.back).mean())
        expected = []  # one component after the other, in float64
        for row in before.astype(float):
            moved = [
                sum(a * d for a, d in zip(weights, row, strict=True)) for weights in rule.linear.astype(float)
            ]
            waved = [
                x + 0.1 * np.sin(sum(w * y for w, y in zip(frequency, moved, strict=True)))
                for x, frequency in zip(moved, rule.frequency.astype(float), strict=True)
            ]
            expected.append([c if abs(x) > 20 else x for x, c in zip(waved, rule.back, strict=True)])
        # The sine of an argument of thousands keeps three digits in float32.
        close = np.isclose(state, expected, atol=3e-3)
        assert close.mean() > 0.98  # a component may end on either side of 20
    assert abs(np.mean(at_reset) - share) < 0.06


def test_the_map_has_the_papers_distributions() -> None:
    rule = distractors.draw(200)
    assert abs(rule.linear.std() - 1) < 0.02 and abs(rule.back.std() - 1) < 0.15
    np.testing.assert_allclose(rule.frequency.mean(), 100, rtol=0.02)  # (10 N)^2: mean 100, deviation 141
    np.testing.assert_allclose(rule.frequency.std(), 100 * np.sqrt(2), rtol=0.03)
    assert not np.array_equal(rule.linear, distractors.draw(200, 1).linear)


# ---- gymnasium ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["distractors4", "noise4"])
def test_distractors_depend_on_the_seed_alone(suffix: str) -> None:
    """Not on actions, nor on the environment; two environments, as of training and evaluation, have one map."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (2, 40, 1)).astype(np.float32)
    train = followed(f"Pendulum-v1+{suffix}", 3, actions[0])
    test = followed(f"Pendulum-v1+{suffix}", 3, actions[1])
    elsewhere = followed(f"CartPoleSwingUp-v0+{suffix}", 3, actions[0])
    np.testing.assert_array_equal(train[:, 3:], test[:, 3:])
    np.testing.assert_array_equal(train[:, 3:], elsewhere[:, 5:])
    np.testing.assert_array_equal(
        train[:, :3], followed("Pendulum-v1", 3, actions[0])
    )  # the task is what it was
    assert np.abs(train[:, :3] - test[:, :3]).max() > 0.1
    assert not np.array_equal(train[:, 3:], followed(f"Pendulum-v1+{suffix}", 4, actions[0])[:, 3:])


def test_an_episode_starts_with_the_state_advanced_once_and_follows_the_map() -> None:
    seen = followed("Pendulum-v1+distractors4-map7", 3, np.zeros((30, 1), np.float32))[:, 3:]
    rule = distractors.draw(4, 7)
    for before, after in itertools.pairwise(seen):
        np.testing.assert_array_equal(after, distractors.advance(rule, before))
    # N(0, 0.01) sent through A has variance 0.01 |A_i|^2, but for the wave.
    env = envs.make("Pendulum-v1+distractors4-map7")
    starts = np.stack([env.reset(seed=seed)[0][3:] for seed in range(400)])
    expected = np.sqrt(0.01 * np.square(rule.linear).sum(1) + 0.1**2 / 2)
    np.testing.assert_allclose(starts.std(0), expected, rtol=0.15)


def test_noise_is_standard_and_white() -> None:
    seen = followed("Pendulum-v1+noise3", 0, np.zeros((199, 1), np.float32))[:, 3:]
    assert np.abs(seen.mean(0)).max() < 0.25 and np.abs(seen.std(0) - 1).max() < 0.15
    assert np.abs((seen[1:] * seen[:-1]).mean(0)).max() < 0.25


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Pendulum-v1+distractors", ValueError, r"\+distractors names no .*; write Pendulum-v1\+distractors10"),
        ("Pendulum-v1+noise0", ValueError, "names no distractors"),
        ("Pendulm-v1+noise3", ValueError, "unknown environment 'Pendulm-v1'.*Pendulum-v1"),
        ("toy_environments:Goal-v0+noise3", ValueError, "distractors are added to observations that are vectors"),
    ],
)  # fmt: skip
def test_names_without_sense_are_refused(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        envs.make(name)


# ---- JAX ------------------------------------------------------------------------------------------------------------


def test_jax_follows_gymnasium_step_by_step() -> None:
    """From the same observation, as the state is all in it; through the world, and through its true dynamics."""
    env: gymnasium.Env = envs.make("Pendulum-v1+distractors6")
    world = distractors.around(pendulum, "distractors", 6)
    true = truth.of("Pendulum-v1+distractors6")
    assert world.SPEC == Spec((9,), 1) == envs.spec(env) and world.LIMIT == pendulum.LIMIT
    step = jax.jit(world.step)
    rng = np.random.default_rng(0)
    close, before = [], env.reset(seed=0)[0]
    for _ in range(60):
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        after, reward, *_ = env.step(action)
        following, paid = step(before, action)
        np.testing.assert_allclose(following[:3], after[:3], atol=2e-5)
        np.testing.assert_allclose(paid, reward, rtol=1e-4, atol=1e-4)
        close.append(np.isclose(following[3:], after[3:], atol=3e-3))
        before = after
    assert np.mean(close) > 0.995
    np.testing.assert_allclose(true.step((), before, action, KEY)[0], step(before, action)[0], atol=1e-3)


def test_jax_starts_and_noise_have_their_distributions() -> None:
    world = distractors.around(pendulum, "distractors", 4, 7)
    start = np.asarray(world.reset(KEY, 4000))
    rule = distractors.draw(4, 7)
    expected = np.sqrt(0.01 * np.square(rule.linear).sum(1) + 0.1**2 / 2)
    np.testing.assert_allclose(start[:, 3:].std(0), expected, rtol=0.05)
    noise = distractors.around(pendulum, "noise", 4)
    first = noise.reset(KEY, 4000)
    second, _ = noise.step(first, jnp.zeros((4000, 1)), jax.random.key(1))
    for seen in (first[:, 3:], second[:, 3:]):
        assert jnp.abs(seen.mean(0)).max() < 0.06 and jnp.abs(seen.std(0) - 1).max() < 0.05
    assert jnp.abs((first[:, 3:] * second[:, 3:]).mean(0)).max() < 0.06
    with pytest.raises(ValueError, match="give the step a key"):
        noise.step(first, jnp.zeros((4000, 1)))
    with pytest.raises(ValueError, match="unknown kind of distractors 'white'"):
        distractors.around(pendulum, "white", 4)
    with pytest.raises(ValueError, match="there are no true dynamics for 'Pendulum-v1\\+noise3'"):
        truth.of("Pendulum-v1+noise3")


def test_no_distractors_are_the_world_itself() -> None:
    world = distractors.around(pendulum, "noise", 0)
    assert world.SPEC == pendulum.SPEC
    observation, action = pendulum.reset(KEY, 5), jnp.full((5, 1), 0.3)
    for ours, theirs in zip(world.step(observation, action), pendulum.step(observation, action), strict=True):
        np.testing.assert_array_equal(ours, theirs)
