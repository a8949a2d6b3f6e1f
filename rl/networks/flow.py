"""Flow matching: a network learns the velocity of a flow that carries Gaussian noise to the data.

Conditional flow matching (Lipman et al. 2023) along straight paths, as rectified flow has them (Liu, Gong & Liu 2023).
With noise z ~ N(0, I), data a, and time t ~ U[0, 1]:

    x_t  = (1 - t) z + t a                                                                       the path
    L    = E[ |v(x_t, t) - (a - z)|^2 ] / number of entries                                      the loss
    dx_t = v(x_t, t) dt from x_0 = z, at t = 1                                                   a draw from the data

A draw is found by Euler's method, with an error of order 1 / S after S steps, or by the midpoint rule, with two
velocities a step and an error of order 1 / S^2. It is a function of its noise, which a network of one step can learn:
`distillation`. From several draws `best_of` picks the one of greatest value.

What is drawn is an action [D]; a chunk of several is one that has all their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl.networks import diffusion, mlp
from rl.networks.base import Network
from rl.networks.layers import DEFAULT, Architecture
from rl.settings import require_choice
from rl.types import Array, Key, Params, Spec

Field = diffusion.Predict  # a velocity: a function of x [..., D] and a time that broadcasts to [...], like x
INTEGRATORS = ("euler", "midpoint")


def require_steps(steps: int, integrator: str) -> None:
    """Raises ValueError for a flow that cannot be integrated."""
    if steps < 1:
        raise ValueError(f"flow_steps={steps} must be at least 1: the steps that carry noise to an action")
    require_choice("integrator", integrator, INTEGRATORS)


def loss(field: Field, data: Array, key: Key) -> Array:
    """The squared error of a velocity, at one random time for each row, the mean over its entries [...].

    Args:
      field: the network's, at what it is conditioned on.
      data: [..., D].
      key: of noise and times.
    """
    noise_key, time_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, data.shape)
    time = jax.random.uniform(time_key, data.shape[:-1], minval=0.0, maxval=1.0)
    t = time[..., None]
    error = field((1 - t) * noise + t * data, time) - (data - noise)
    return jnp.square(error).mean(-1)


def sample(field: Field, noise: Array, steps: int, integrator: str = "euler") -> Array:
    """Where the flow carries ``noise`` [..., D], in one compiled loop.

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


def distillation(action: Array, target: Array) -> Array:
    """The squared distance of one step's ``action`` [..., D] from the flow's, both of the same noise, [...].

    The mean over its entries; ``target`` has no gradient.
    """
    return jnp.square(action - jax.lax.stop_gradient(target)).mean(-1)


def best_of(candidates: Array, values: Array) -> Array:
    """Of N ``candidates`` [N, ..., D] or [N, ...] at each place the one with the greatest of ``values`` [N, ...].

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


def velocity(spec: Spec, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network:
    """observation -> the `Field` of a policy there; ``init`` takes an observation and an action.

    The network is shown the time as it is, a number in [0, 1], as in FQL's code.

    Args:
      spec: of observations and actions.
      hidden: widths.
      architecture: see `rl.networks.layers.Architecture`.
    """
    init, apply = one_step(spec, hidden, architecture)
    return Network(lambda key, observation, x: init(key, observation, x, jnp.zeros(())), apply)


def one_step(spec: Spec, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network:
    """observation -> a function of noise [..., D] to an action like it, without bounds; see `velocity`."""
    body = mlp.conditional_policy(spec, spec.action_size, hidden, architecture)

    def rows(x: Array, time: tuple[Array, ...]) -> Array:
        return jnp.concatenate([x, *(jnp.broadcast_to(t, x.shape[:-1])[..., None] for t in time)], -1)

    def init(key: Key, observation: Any, x: Array, *time: Array) -> Params:
        return body.init(key, observation, rows(x, time))

    def apply(params: Params, observation: Any, key: Key | None = None) -> Callable[..., Array]:
        conditioned = body.apply(params, observation, key=key)
        return lambda x, *time: conditioned(rows(x, time))

    return Network(init, apply)
