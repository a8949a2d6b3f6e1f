"""rl.networks.diffusion against closed forms: data N(m, s^2), for which the best denoiser is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.networks import diffusion
from rl.networks.diffusion import Process

MEAN, DEVIATION, DRAWS = 0.7, 0.4, 40_000
KEY = jax.random.key(0)


def best(process: Process) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """E[x_0 | x_t], or the noise that goes with it."""
    signal, noise = jnp.asarray(process.signal), jnp.asarray(process.noise)

    def predict(x: jax.Array, time: jax.Array) -> jax.Array:
        a, s = (y[time.astype(int)] for y in (signal, noise))
        gain = a * DEVIATION**2 / (a**2 * DEVIATION**2 + s**2)
        data = MEAN + gain * (x - a * MEAN)
        return data if process.prediction == "x0" else (x - a * data) / s

    return predict


def alphas(steps: int) -> np.ndarray:
    """[S], the share of variance that each step keeps, 1 - beta: Nichol & Dhariwal's equation 17, with its bound."""
    share = [np.cos((t / steps + 0.008) / 1.008 * np.pi / 2) ** 2 for t in range(steps + 1)]
    return np.array([1 - min(1 - share[t + 1] / share[t], 0.999) for t in range(steps)])


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_marginals_are_those_of_the_chain_of_steps(steps: int) -> None:
    process = diffusion.cosine(steps)
    mean, variance = np.full(3, MEAN), np.array([0.0, DEVIATION**2, 1.0])
    for t, alpha in enumerate(alphas(steps)):
        mean, variance = np.sqrt(alpha) * mean, alpha * variance + 1 - alpha
        a, s = process.signal[t], process.noise[t]
        np.testing.assert_allclose(a * MEAN, mean, rtol=1e-5)
        np.testing.assert_allclose(a**2 * np.array([0.0, DEVIATION**2, 1.0]) + s**2, variance, rtol=1e-5)


def test_rows_are_noised_each_for_its_own_time() -> None:
    process, rng = diffusion.cosine(10), np.random.default_rng(0)
    data, noise, time = (
        rng.normal(size=(2, 4, 3, 2)),
        rng.normal(size=(2, 4, 3, 2)),
        rng.integers(10, size=(2, 4)),
    )
    expected = process.signal[time][..., None, None] * data + process.noise[time][..., None, None] * noise
    np.testing.assert_allclose(diffusion.noised(process, data, time, noise), expected, rtol=1e-5, atol=1e-6)


def ddpm(steps: int) -> tuple[float, float]:
    """Mean and deviation of the last of Ho et al.'s steps (their equation 7), from N(0, 1) by the best denoiser."""
    alpha, mean, variance = alphas(steps), 0.0, 1.0
    total = np.cumprod(alpha)
    for t in reversed(range(steps)):
        before = total[t - 1] if t else 1.0
        gain = np.sqrt(total[t]) * DEVIATION**2 / (total[t] * DEVIATION**2 + 1 - total[t])
        of_data = np.sqrt(before) * (1 - alpha[t]) / (1 - total[t])
        slope = of_data * gain + np.sqrt(alpha[t]) * (1 - before) / (1 - total[t])
        mean = slope * mean + of_data * MEAN * (1 - gain * np.sqrt(total[t]))
        variance = slope**2 * variance + (1 - alpha[t]) * (1 - before) / (1 - total[t])
    return mean, np.sqrt(variance)


def draws(steps: int, etas: Any, prediction: str = "epsilon") -> np.ndarray:
    """[etas, DRAWS], all from the same start."""
    process = diffusion.cosine(steps, prediction)
    one = lambda eta: diffusion.sample(process, best(process), jnp.zeros((DRAWS, 1)), KEY, eta=eta)
    return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(etas)))[..., 0]


@pytest.mark.slow
def test_ddpm_and_ddim_reproduce_a_gaussian() -> None:
    """With many steps; four standard errors are 0.02 of the deviation for the mean, and 0.014 for the deviation."""
    for drawn in draws(400, [0.0, 0.5, 1.0]):
        assert abs(drawn.mean() - MEAN) < 0.02 * DEVIATION + 0.005
        assert abs(drawn.std() / DEVIATION - 1) < 0.014 + 0.01


def test_few_steps_of_ddpm_are_the_published_ones_whatever_is_predicted() -> None:
    """Far from the data's deviation, but where equation 7 of Ho et al. leads."""
    mean, deviation = ddpm(5)
    assert abs(deviation / DEVIATION - 1) > 0.1, "choose fewer steps, for which the samplers differ"
    (noise,), (data,) = draws(5, [1.0]), draws(5, [1.0], "x0")
    np.testing.assert_allclose(noise, data, atol=2e-4)
    assert abs(noise.mean() - mean) < 0.02 * deviation
    assert abs(noise.std() / deviation - 1) < 0.014


def test_ddim_is_a_function_of_its_start_alone() -> None:
    """An affine one here, known in closed form: what one step makes of a start tells what five make of it."""
    (once, _), (often, noisy) = (draws(steps, [0.0, 1.0], "x0") for steps in (1, 5))
    lines = []
    for steps in (1, 5):
        process = diffusion.cosine(steps)
        x = np.array([0.0, 1.0])  # two starts
        for t in reversed(range(steps)):
            a, s = process.signal[t], process.noise[t]
            next_a, next_s = (process.signal[t - 1], process.noise[t - 1]) if t else (1.0, 0.0)
            data = MEAN + a * DEVIATION**2 / (a**2 * DEVIATION**2 + s**2) * (x - a * MEAN)
            x = next_a * data + next_s * (x - a * data) / s
        lines.append((x[1] - x[0], x[0]))
    (slope, at_0), (long_slope, long_at_0) = lines
    np.testing.assert_allclose(often, long_at_0 + long_slope * (once - at_0) / slope, atol=5e-3)
    assert np.corrcoef(once, noisy)[0, 1] < 0.99


def test_what_is_not_free_is_seen_as_it_is_and_costs_nothing() -> None:
    free = np.array([[True, False], [True, False], [False, False]])
    known = np.random.default_rng(0).normal(size=(5, 3, 2)).astype(np.float32)
    process = diffusion.cosine(4, "x0")

    def predict(x: jax.Array, time: jax.Array) -> jax.Array:
        """The data, unless something that is given has another value; and nonsense where nothing is asked."""
        wrong = jnp.where(free, 0.0, jnp.abs(x - known)).sum((-2, -1), keepdims=True)
        return jnp.where(free, known + 0.25 + wrong, 7.0)

    drawn = diffusion.sample(process, predict, known, KEY, free=free)
    np.testing.assert_allclose(drawn, known + 0.25 * free, atol=1e-6)
    loss = diffusion.loss(process, predict, known, KEY, rank=2, free=free)
    np.testing.assert_allclose(loss, np.full(5, 0.25), rtol=1e-5)


def test_the_loss_of_what_predicts_the_noise_is_0_at_every_time() -> None:
    """Of a point, whose noise is known; times are drawn row by row, all of them equally often."""
    process = diffusion.cosine(10)
    at = lambda x, time: jnp.asarray(x)[time.astype(int)][:, None]
    exact = lambda x, time: (x - at(process.signal, time) * MEAN) / at(process.noise, time)
    data = jnp.full((2000, 3), MEAN)
    assert (diffusion.loss(process, exact, data, KEY) < 1e-4).all()
    process = diffusion.cosine(10, "x0")
    times = diffusion.loss(process, lambda x, time: time[:, None] + 0 * x, jnp.zeros((2000, 1)), KEY)
    counts = np.bincount(np.asarray(times).astype(int), minlength=10)
    assert len(counts) == 10 and (abs(counts - 200) < 60).all()


def test_one_loop_integrates_differential_equations_too() -> None:
    """Midpoint steps of x' = x, as a flow's policy takes them; and each step has a key of its own."""
    step = lambda x, time, key: x + (x + x / 16) / 8
    np.testing.assert_allclose(
        diffusion.integrate(step, jnp.ones(2), jnp.arange(8) / 8, KEY), np.full(2, np.e), rtol=3e-3
    )
    listed = diffusion.integrate(
        lambda x, i, key: x.at[i].set(jax.random.normal(key)), jnp.zeros(8), jnp.arange(8), KEY
    )
    assert len(np.unique(listed)) == 8


def test_times_are_embedded_by_sines_from_1_to_a_ten_thousandth() -> None:
    time = np.array([[0.0, 1.0], [7.0, 9.0]])
    wave = diffusion.sinusoid(time, 8)
    assert wave.shape == (2, 2, 8)
    expected = [np.sin(7.0), np.sin(7e-4), np.cos(7.0), np.cos(7e-4)]
    np.testing.assert_allclose(wave[1, 0, np.array([0, 3, 4, 7])], expected, atol=1e-6)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 step, not 0"):
        diffusion.cosine(0)
    with pytest.raises(ValueError, match="prediction='noise': choose one of epsilon, x0"):
        diffusion.cosine(3, "noise")
