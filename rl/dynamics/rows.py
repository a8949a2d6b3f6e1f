"""What a dynamics ensemble learns from: the rows of a dataset or of a ring, and which of them are held out.

Shapes are those of the capacity. What depends on the number of rows is a number that compiled programs are given, so
that a ring that fills up needs no others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.dynamics import network
from rl.dynamics.config import Config
from rl.types import Array, Spec

_CHECKS = 20  # of the holdout error, where the number of updates is fixed
_HOLDOUT_ROWS = 1024  # evaluated at once
ANNOTATED_ROWS = 1024  # at once
_ROUNDING = 1e-6  # of its size: an input that varies by no more is constant
_LEAST_DEVIATION = 1e-6  # in units of the input: one that deviates by less is constant, too
_SPLIT_SEED = 0  # of the fixed order in which places of the data are held out


class Rows(NamedTuple):
    """Inputs and outputs, [C, ...] on the device or [E, B, ...] in a batch."""

    inputs: Array  # [..., I], standardised
    outputs: Array  # [..., O + 1]: s' - s and r
    next_observation: Array  # [..., O]
    annotation: Any = ()  # what the loss knows of each row before any prediction (`rl.dynamics.loss.Loss`)


class Data(NamedTuple):
    """Rows of a dataset or a ring as a fit reads them. With a leading axis [S] where every key has its own."""

    rows: Rows  # [C, ...]
    # [C] places: held-out rows first, then those to learn from; nothing is read from ``size`` on
    order: Array
    size: Array  # [] int32, rows that can be learned from
    mean: Array  # [I] of their inputs
    deviation: Array  # [I]; infinite where an input is constant
    finite: Array  # [] bool, whether all rewards are


class Sizes(NamedTuple):
    """What follows from the number of rows, as int32 numbers for compiled programs."""

    held: Any  # [] rows that are held out; [S] where every key has its own data
    updates: Any  # [] between two checks
    chunks: Any  # [] of a check
    row_chunks: Any  # [] of all rows, where the loss annotates them


def prepare(
    spec: Spec,
    observation: Array,
    action: Array,
    reward: Array,
    discount: Array,
    next_observation: Array,
    filled: Array,
) -> Data:
    """Columns [C, ...], the first ``filled`` rows of which hold anything.

    Rows whose episode terminated with no successor logged (their own observation stands there) are left out.
    Which places are held out is fixed, so that a fit that continues on the same ring holds out the same ones: those
    of lowest rank in a random order of all places, of which growing data move the margin alone.
    """
    capacity = reward.shape[0]
    exists = jnp.arange(capacity) < filled
    successor_logged = (discount > 0) | (observation != next_observation).any(-1)
    usable = exists & successor_logged
    count = usable.sum(dtype=jnp.int32)
    inputs = network.join(spec, observation, action)

    def average(x: Array) -> Array:
        return jnp.where(usable[:, None], x, 0.0).sum(0) / count

    mean = average(inputs)
    least = jnp.where(usable[:, None], inputs, jnp.inf).min(0)
    greatest = jnp.where(usable[:, None], inputs, -jnp.inf).max(0)
    size = jnp.maximum(jnp.abs(least), jnp.abs(greatest))
    deviation = jnp.sqrt(average(jnp.square(inputs - mean)))
    # A constant input tells nothing. The mean of a large one is rounded: its deviation is not 0 then, but its range is.
    varies = (greatest - least > _ROUNDING * size) & (deviation >= _LEAST_DEVIATION)
    deviation = jnp.where(varies, deviation, jnp.inf)
    rows = Rows(
        inputs=network.standardize(inputs, mean, deviation),
        outputs=jnp.concatenate([next_observation - observation, reward[:, None]], -1),
        next_observation=next_observation,
    )
    rank = jax.random.uniform(jax.random.key(_SPLIT_SEED), (capacity,))
    order = jnp.argsort(jnp.where(usable, rank, jnp.inf)).astype(jnp.int32)
    return Data(rows, order, count, mean, deviation, (jnp.isfinite(reward) | ~exists).all())


def sizes(config: Config, data: Data) -> Sizes:
    """What follows from the number of rows, which is read on the host.

    An epoch is as many batches as there are rows to learn from, of the largest of several data.

    Raises:
      ValueError: the data cannot be learned.
    """
    count, finite = jax.device_get((data.size, data.finite))
    if not finite.all():
        raise ValueError("the data have rewards that are not finite: a dynamics model cannot learn them")
    if count.min() < 2:
        raise ValueError(
            f"the data have {count.min()} rows with a next observation: a dynamics model needs 2 or more"
        )
    held = np.maximum(1, np.floor(config.holdout * count)).astype(np.int32)
    epoch = -(-(count - held).max() // config.batch_size)
    updates = config.updates // most_checks(config) if config.updates else epoch
    chunks = -(-held.max() // chunk_rows(config, data.order.shape[-1]))
    row_chunks = -(-count.max() // min(ANNOTATED_ROWS, data.order.shape[-1]))
    return Sizes(held, np.int32(updates), np.int32(chunks), np.int32(row_chunks))


def most_checks(config: Config) -> int:
    """Checks of the holdout error after which fitting stops in any case."""
    return min(_CHECKS, config.updates) if config.updates else config.max_epochs


def chunk_rows(config: Config, capacity: int) -> int:
    """Held-out rows that a check evaluates at once."""
    return min(_HOLDOUT_ROWS, max(1, int(config.holdout * capacity)))
