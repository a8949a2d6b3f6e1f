"""Flow matching: a network learns the velocity of a flow that carries Gaussian noise to the data.

Conditional flow matching (Lipman et al. 2023) along straight paths, as rectified flow has them (Liu, Gong & Liu 2023).
With noise z ~ N(0, I), data a, and time t ~ U[0, 1]:

    x_t  = (1 - t) z + t a                                                                       the path
    L    = E[ |v(x_t, t) - (a - z)|^2 ] / number of entries                                      the loss
    dx_t = v(x_t, t) dt from x_0 = z, at t = 1                                                   a draw from the data

A draw is found by Euler's method, with an error of order 1 / S after S steps, or by the midpoint rule, with two
velocities a step and an error of order 1 / S^2. It is a function of its noise, which a network of one step can learn:
`distillation`. From several draws `best_of` picks the one of greatest value.

An event is what is drawn: an action [D], or a chunk of actions [H, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl.networks import diffusion, mlp
from rl.networks.base import Network
from rl.networks.layers import DEFAULT, Architecture
from rl.types import Array, Key, Params, Spec

Field = (
    diffusion.Predict
)  # a velocity: a function of x [..., *event] and a time that broadcasts to [...], like x
INTEGRATORS = ("euler", "midpoint")


def require_steps(steps: int, integrator: str) -> None:
    """Raises ValueError for a flow that cannot be integrated."""
    if steps < 1:
        raise ValueError(f"flow_steps={steps} must be at least 1: the steps that carry noise to an action")
    if integrator not in INTEGRATORS:
        raise ValueError(f"integrator={integrator!r}: choose one of {', '.join(INTEGRATORS)}")


def loss(field: Field, data: Array, key: Key, *, rank: int = 1) -> Array:
    """The squared error of a velocity, at one random time for each row, the mean over entries of an event [...].

    Args:
      field: the network's, at what it is conditioned on.
      data: [..., *event].
      key: of noise and times.
      rank: number of axes of an event.
    """
    noise_key, time_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, data.shape)
    time = jax.random.uniform(time_key, data.shape[: data.ndim - rank], minval=0.0, maxval=1.0)
    t = time.reshape(time.shape + (1,) * rank)
    error = field((1 - t) * noise + t * data, time) - (data - noise)
    return jnp.square(error).mean(tuple(range(-rank, 0)))


def sample(field: Field, noise: Array, steps: int, integrator: str = "euler") -> Array:
    """Where the flow carries ``noise`` [..., *event], in one compiled loop.

    Args:
      field: the velocity; it is told times in [0, 1), each one a scalar for all rows.
      noise: draws from N(0, I).
      steps: equal ones, ``S``.
      integrator: one of `INTEGRATORS`.

    Raises:
      ValueError: no step, or another integrator.
    """
    require_steps(steps, integrator)
    width = 1 / steps

    def step(x: Array, time: Array, no_key: None) -> Array:
        if integrator == "midpoint":
            return x + width * field(x + 0.5 * width * field(x, time), time + 0.5 * width)
        return x + width * field(x, time)

    return diffusion.integrate(step, noise, np.arange(steps, dtype=np.float32) * np.float32(width))


def distillation(action: Array, target: Array, *, rank: int = 1) -> Array:
    """The squared distance of one step's ``action`` [..., *event] from the flow's, both of the same noise, [...].

    The mean over entries of an event; ``target`` has no gradient.
    """
    error = action - jax.lax.stop_gradient(target)
    return jnp.square(error).mean(tuple(range(-rank, 0)))


def best_of(candidates: Array, values: Array) -> Array:
    """Of N ``candidates`` [N, ..., *event] at each place the one with the greatest of ``values`` [N, ...].

    Raises:
      ValueError: there is none.
    """
    if not len(candidates):
        raise ValueError("candidates=0 must be at least 1: how many actions the best is chosen from")
    index = values.argmax(0)
    index = index.reshape(1, *index.shape, *(1,) * (candidates.ndim - values.ndim))
    return jnp.take_along_axis(candidates, index, 0)[0]


def draws(
    field: Field, key: Key, count: int, shape: tuple[int, ...], steps: int, integrator: str = "euler"
) -> Array:
    """``count`` actions [count, *shape] that the flow makes of noise, clipped to the box [-1, 1].

    Args:
      field: the velocity at observations [...].
      key: of the noise.
      count: candidates at each observation.
      shape: of one action for each, [..., D].
      steps, integrator: as in `sample`.
    """
    noise = jax.random.normal(key, (*shape[:-1], count, shape[-1]))
    return jnp.clip(sample(field, jnp.moveaxis(noise, -2, 0), steps, integrator), -1.0, 1.0)


def velocity(
    spec: Spec,
    hidden: Sequence[int],
    architecture: Architecture = DEFAULT,
    event: tuple[int, ...] | None = None,
) -> Network:
    """observation -> the `Field` of a policy there; ``init`` takes an observation and an event.

    The network is shown the time as it is, a number in [0, 1], as in FQL's code.

    Args:
      spec: of observations, and of one action.
      hidden: widths.
      architecture: see `rl.networks.layers.Architecture`.
      event: shape of what is drawn; None: that of an action.
    """
    init, apply = one_step(spec, hidden, architecture, event)
    return Network(lambda key, observation, x: init(key, observation, x, jnp.zeros(())), apply)


def one_step(
    spec: Spec,
    hidden: Sequence[int],
    architecture: Architecture = DEFAULT,
    event: tuple[int, ...] | None = None,
) -> Network:
    """observation -> a function of noise [..., *event] to an event like it, without bounds; see `velocity`."""
    event = event or (spec.action_size,)
    body = mlp.conditional_policy(spec, math.prod(event), hidden, architecture)

    def rows(x: Array, time: tuple[Array, ...]) -> Array:
        flat = x.reshape(*x.shape[: x.ndim - len(event)], -1)
        return jnp.concatenate([flat, *(jnp.broadcast_to(t, flat.shape[:-1])[..., None] for t in time)], -1)

    def init(key: Key, observation: Any, x: Array, *time: Array) -> Params:
        return body.init(key, observation, rows(x, time))

    def apply(params: Params, observation: Any, key: Key | None = None) -> Callable[..., Array]:
        conditioned = body.apply(params, observation, key=key)
        return lambda x, *time: conditioned(rows(x, time)).reshape(x.shape)

    return Network(init, apply)
