"""A value head of one's own: a normal distribution, as a mean and a deviation (docs/heads.md).

    python -m experiments.offline --agent=iql --head=docs.example_head.gaussian

Its outputs are neither values nor logits, so that it brings its own `divergence`, by which prioritised replay draws.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rl.types import Array
from rl.values.heads import ValueHead

LEAST = 0.01  # deviation: the density of a value that never varies has no bound


def gaussian(low: float | None, high: float | None, size: int) -> ValueHead:
    """Two outputs; the target is the mean and the variance of ``r + d Z'``, the loss their KL divergence."""
    del low, high, size

    def moments(outputs: Array) -> tuple[Array, Array]:
        outputs = outputs.astype(jnp.float32)
        return outputs[..., 0], jnp.square(LEAST + jax.nn.softplus(outputs[..., 1]))

    def target(reward: Array, discount: Array, outputs: Array) -> Array:
        mean, variance = moments(outputs)
        shifted = reward + discount * mean, jnp.maximum(jnp.square(discount) * variance, LEAST**2)
        return jax.lax.stop_gradient(jnp.stack(shifted, -1))

    def loss(outputs: Array, target: Array) -> Array:
        mean, variance = moments(outputs)
        ratio = target[..., 1] / variance
        return (ratio - 1 - jnp.log(ratio) + jnp.square(target[..., 0] - mean) / variance) / 2

    def mix(outputs: Array, weights: Array) -> Array:
        mean, variance = moments(outputs)
        average = lambda x: (weights * x).sum(-1)
        centre = average(mean)
        deviation = jnp.sqrt(average(variance + jnp.square(mean - centre[..., None])))
        excess = deviation - LEAST  # of which softplus is undone, without overflow
        return jnp.stack([centre, excess + jnp.log(-jnp.expm1(-excess))], -1)

    def clipped(reward: Array, *_: Any) -> Array:
        return jnp.zeros(reward.shape, jnp.float32)

    return ValueHead(2, lambda outputs: moments(outputs)[0], target, loss, mix, clipped, divergence=loss)


gaussian.UNBOUNDED = True  # type: ignore[attr-defined]  # it has no support: no flag must give one
