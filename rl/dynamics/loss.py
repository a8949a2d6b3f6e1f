"""What the members of a dynamics ensemble minimise, and the error by which they are judged.

Member ``i`` predicts the mean ``m`` and the log-variance ``v`` of ``y = (s' - s, r)`` and minimises

    L_i = mean_{batch, dims}[ w (m - y)^2 exp(-v) + w v ] + sum_layers decay / 2 |W|^2

plus, shared by all, ``0.01 (sum max v - sum min v)`` on the learned vectors between which ``v`` is clamped softly.
``w`` is 1, or the caller's weight of each sample and observation dimension (VaGraM, Voelcker et al. 2022). The
deterministic variant has no ``v`` and minimises ``w (m - y)^2``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rl.dynamics import network
from rl.dynamics.config import Config
from rl.dynamics.rows import Data, Rows, Sizes, chunk_rows
from rl.types import Array, Params

# (context, next observations [E, B, O] of each member's batch) -> [E, B, O]
Weight = Callable[[Any, Array], Array]


def equal(context: Any, next_observation: Array) -> Array:
    """The `Weight` of an ordinary fit: 1."""
    return jnp.ones_like(next_observation)


def with_reward(weight: Weight, context: Any, next_observation: Array) -> Array:
    """Weights [E, B, O + 1]; that of the reward is 1."""
    given = jax.lax.stop_gradient(weight(context, next_observation))
    chex.assert_equal_shape([given, next_observation])
    return jnp.concatenate([given, jnp.ones_like(given[..., :1])], -1)


def objective(config: Config, params: Params, batch: Rows, weight: Array) -> Array:
    """The sum over members, whose gradients do not meet but in the bounds that they share; weight [E, B, O + 1]."""
    mean, log_variance = network.distribution(params["members"], params["bounds"], batch.inputs)
    error = weight * jnp.square(mean - batch.outputs)
    shared = sum(
        0.5 * rate * jnp.square(layer["kernel"]).sum()
        for rate, layer in zip(config.decay, params["members"], strict=True)
    )
    if log_variance is not None:
        error = error * jnp.exp(-log_variance) + weight * log_variance
        shared += 0.01 * (params["bounds"]["max"].sum() - params["bounds"]["min"].sum())
    return error.mean((1, 2)).sum() + shared


def holdout_error(
    config: Config, weight: Weight, params: Params, data: Data, sizes: Sizes, context: Any
) -> Array:
    """Weighted squared error [E] of every member, mean over the held-out rows and dimensions."""
    size = chunk_rows(config, len(data.order))

    def add(number: Array, total: Array) -> Array:
        place = number * size + jnp.arange(size)
        batch = jax.tree.map(lambda x: x[data.order[place]], data.rows)
        error = squared_error(weight, params, batch, context)
        return total + jnp.where((place < sizes.held)[:, None], error, 0.0).sum((1, 2))

    total = jax.lax.fori_loop(0, sizes.chunks, add, jnp.zeros(_members(params)))
    return total / (sizes.held * data.rows.outputs.shape[-1])


def squared_error(weight: Weight, params: Params, batch: Rows, context: Any) -> Array:
    """Weighted, [E, B, O + 1], of the rows [B, ...] that all members are judged by."""
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (_members(params), *x.shape)), batch)
    mean, _ = network.distribution(params["members"], params["bounds"], batch.inputs)
    return with_reward(weight, context, batch.next_observation) * jnp.square(mean - batch.outputs)


def _members(params: Params) -> int:
    return len(params["members"][0]["bias"])
