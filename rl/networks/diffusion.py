"""Diffusion: a network learns to undo Gaussian noise, and draws from the data by undoing it step by step.

DDPM (Ho, Jain & Abbeel 2020), the cosine schedule of Nichol & Dhariwal (2021), and DDIM (Song, Meng & Ermon 2021). With
signal ``a_t``, noise ``s_t``, ``a_t^2 + s_t^2 = 1``, and t = 1, ..., S:

    x_t     = a_t x_0 + s_t e,   e ~ N(0, I)                                                    the forward marginal
    L       = E[ |f(x_t, t) - e| ]   or   E[ |f(x_t, t) - x_0| ]                                 prediction of e, or x_0
    x_{t-1} = a_{t-1} x^_0 + sqrt(s_{t-1}^2 - w_t^2) e^ + w_t z,   z ~ N(0, I)                   equation 12 of DDIM
    w_t     = eta (s_{t-1} / s_t) sqrt(1 - a_t^2 / a_{t-1}^2)

``eta`` = 1 is DDPM's ancestral sampling with the posterior's variance, ``eta`` = 0 is DDIM, which draws nothing after
its start. The last step returns ``x^_0``, without noise.

What is drawn here may be held in part at known values (``free``), as inpainting does: such entries are never noised,
neither in training nor in sampling, and no loss is taken on them.

Nothing here knows a network: ``predict`` is a function of x and time, which closes over parameters and over what it is
conditioned on. `integrate` knows no schedule, and serves flow matching alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rl import masks
from rl.networks.layers import MLP, Architecture
from rl.settings import require_choice
from rl.types import Array, Key

PREDICTIONS = ("epsilon", "x0")
# (x [..., *event], time [...] float32 or any shape that broadcasts to it) -> a prediction like x
Predict = Callable[[Array, Array], Array]


class Process(NamedTuple):
    """How data become noise in ``S`` steps, and what a network predicts of it."""

    signal: np.ndarray  # [S] float32, a_t for t = 1, ..., S
    noise: np.ndarray  # [S] float32, s_t
    prediction: str = "epsilon"  # one of `PREDICTIONS`


def cosine(steps: int, prediction: str = "epsilon", offset: float = 0.008) -> Process:
    """The schedule ``a_t^2 ~ cos^2(pi / 2 (t / S + offset) / (1 + offset))``, no step keeping less than 0.1 % of it.

    Nichol & Dhariwal (2021), equation 17, with their bound of 0.999 on the noise ``beta_t`` of one step.

    Args:
      steps: ``S``.
      prediction: what networks predict, ``epsilon`` (the noise) or ``x0`` (the data).
      offset: keeps the first steps from being too small.

    Raises:
      ValueError: no step, or another prediction.
    """
    if steps < 1:
        raise ValueError(f"diffusion needs at least 1 step, not {steps}")
    require_choice("prediction", prediction, PREDICTIONS)
    share = np.cos((np.linspace(0, 1, steps + 1) + offset) / (1 + offset) * np.pi / 2) ** 2
    square = np.cumprod(np.maximum(share[1:] / share[:-1], 1e-3))
    signal, noise = (np.sqrt(x).astype(np.float32) for x in (square, 1 - square))
    return Process(signal, noise, prediction)


def noised(process: Process, data: Array, time: Array, noise: Array) -> Array:
    """``x_t`` of ``data`` [..., *event] and ``noise`` like it, at ``time`` [...] int32, counted from 0."""
    signal, deviation = (masks.expand(jnp.asarray(x)[time], data) for x in process[:2])
    return signal * data + deviation * noise


def loss(
    process: Process,
    predict: Predict,
    data: Array,
    key: Key,
    *,
    rank: int = 1,
    free: Any = True,
) -> Array:
    """The absolute error of a prediction, at one random time for each row, [...].

    Args:
      process: see `cosine`.
      predict: the network; it is told times 0, ..., S - 1.
      data: [..., *event].
      key: of times and noise.
      rank: number of axes of an event.
      free: bool, broadcast to ``data``: the entries that are noised, predicted, and averaged over; others are given.
    """
    time_key, noise_key = jax.random.split(key)
    time = jax.random.randint(time_key, data.shape[: data.ndim - rank], 0, len(process.signal))
    noise = jax.random.normal(noise_key, data.shape)
    x = hold(noised(process, data, time, noise), data, free)
    target = noise if process.prediction == "epsilon" else data
    error = jnp.abs(predict(x, time.astype(jnp.float32)) - target)
    return error.mean(tuple(range(-rank, 0)), where=jnp.broadcast_to(free, data.shape))


def sample(
    process: Process,
    predict: Predict,
    known: Array,
    key: Key,
    *,
    free: Any = True,
    eta: float | Array = 1.0,
) -> Array:
    """One draw for each row of ``known``, in one compiled loop.

    Args:
      process: the one that the network was trained on.
      predict: the network; it is told times S - 1, ..., 0, each one a scalar for all rows.
      known: [..., *event], the shape of the result, and its values where it is not free.
      key: of the start and of each step.
      free: bool, broadcast to ``known``: the entries that are drawn.
      eta: 1 draws as DDPM, 0 as DDIM, between them is between them.
    """
    time = np.arange(len(process.signal))[::-1]
    signal, noise = process.signal[::-1], process.noise[::-1]
    after = np.append(signal[1:], np.float32(1)), np.append(noise[1:], np.float32(0))
    spread = after[1] / noise * np.sqrt(np.maximum(1 - np.square(signal / after[0]), 0))  # w_t at eta 1

    def step(x: Array, at: tuple[Array, ...], key: Key) -> Array:
        time, signal, noise, next_signal, next_noise, spread = at
        x = hold(x, known, free)
        data, epsilon = _estimate(process, predict(x, time), x, signal, noise)
        width = eta * spread
        direction = jnp.sqrt(jnp.maximum(jnp.square(next_noise) - jnp.square(width), 0.0))
        return next_signal * data + direction * epsilon + width * jax.random.normal(key, x.shape)

    first, rest = jax.random.split(key)
    coefficients = (time.astype(np.float32), signal, noise, *after, spread)
    drawn = integrate(step, jax.random.normal(first, known.shape), coefficients, rest)
    return hold(drawn, known, free)


def integrate(
    step: Callable[[Array, Any, Any], Array], start: Array, times: Any, key: Key | None = None
) -> Array:
    """``start`` after a ``step`` (x, time, key) at each of ``times``, a pytree with leading axes [S].

    One loop, whose body is compiled once: ancestral sampling, whose steps have a key each, or the solution of a
    differential equation, whose steps are given None.
    """
    length = len(jax.tree.leaves(times)[0])
    keys = None if key is None else jax.random.split(key, length)
    return jax.lax.scan(lambda x, at: (step(x, *at), None), start, (times, keys))[0]


def hold(x: Array, known: Array, free: Any) -> Array:
    """``x`` where ``free``, else ``known``."""
    return x if free is True else jnp.where(free, x, known)


def sinusoid(time: Array, width: int) -> Array:
    """Sines and cosines [..., width] of ``time`` [...], at frequencies from 1 to 1/10,000 (Vaswani et al. 2017).

    Times should differ by about 1 from one step to the next: multiply those in [0, 1] by their number.
    """
    half = width // 2
    frequency = jnp.exp(-math.log(10_000) * jnp.arange(half) / max(1, half - 1))
    angle = time[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


class TimeEmbedding(nn.Module):
    """time [...] -> [..., W]: `sinusoid`, and a hidden layer of width 4 W."""

    width: int

    @nn.compact
    def __call__(self, time: Array) -> Array:
        dense = MLP((4 * self.width,), self.width, architecture=Architecture(activation="gelu"))
        return dense(sinusoid(time, self.width))


def _estimate(
    process: Process, predicted: Array, x: Array, signal: Array, noise: Array
) -> tuple[Array, Array]:
    """The data and the noise that a prediction at ``x`` stands for."""
    if process.prediction == "epsilon":
        return (x - noise * predicted) / signal, predicted
    return predicted, (x - signal * predicted) / noise
