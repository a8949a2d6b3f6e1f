"""A ring of rows on the device: the newest ``C`` are kept and drawn uniformly; and views of several steps.

All functions are pure and have fixed shapes, so that they run inside the compiled call that learns: a ring that is
donated to it is written in place. Rows are any pytree. The views (`transitions`, `action_chunks`) read rows of
the type `Row`, inserted in blocks of one row for each of ``stride`` environments: the step after the one in slot
``i`` is then in slot ``i + stride``, unless ``first`` says that another episode starts there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl import masks
from rl.replay import traces
from rl.replay.source import Source
from rl.types import Array, Key, Transition


class Ring(NamedTuple):
    """The newest rows of a stream. Slots 0 to ``count - 1`` are filled."""

    rows: Any  # pytree of [C, ...]
    head: Any  # [] int32, the slot that the next row goes to
    count: Any  # [] int32, rows held, at most C


# Axes of rings over seeds that are written together.
STACKED = Ring(rows=0, head=None, count=None)


class Row(NamedTuple):
    """One step of one environment, or a batch of them."""

    observation: Any  # [..., *observation]
    action: Any  # [..., D] float32 or [...] int32
    reward: Any  # [...] float32
    discount: Any  # [...] float32: 0 where the episode terminated, 1 elsewhere, time limits included
    next_observation: Any  # [..., *observation], also where the episode ended
    first: Any  # [...] bool: the first step of its episode


def empty(example: Any, capacity: int) -> Ring:
    """A ring for ``capacity`` rows like ``example``, a pytree of one row's arrays (or their shapes and types).

    Raises:
      ValueError: ``capacity`` is not positive.
    """
    if capacity < 1:
        raise ValueError(f"a ring needs a capacity of at least 1 row, not {capacity}")
    rows = jax.tree.map(lambda x: jnp.zeros((capacity, *jnp.shape(x)), x.dtype), example)
    return Ring(rows, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def placeholder(row: Row) -> Transition:
    """A transition with the shapes and types of one that is made of ``row``, or of rows."""
    return Transition(
        row.observation, row.action, row.reward, row.discount, row.next_observation, row.action, row.discount
    )


def capacity(ring: Ring) -> int:
    """The most rows that it can hold, ``C``."""
    return jax.tree.leaves(ring.rows)[0].shape[0]


def insert(ring: Ring, rows: Any, valid: Array | None = None) -> Ring:
    """The ring with a block of rows [B, ...] added, the oldest ones overwritten where it is full.

    Args:
      ring: donate it, or all of it is copied.
      rows: in the order in which they count as written.
      valid: [B] bool, which of them to add; all by default. The others leave no gap.

    Raises:
      ValueError: a block larger than the ring.
    """
    size, block = capacity(ring), jax.tree.leaves(rows)[0].shape[0]
    if block > size:
        raise ValueError(f"a block of {block} rows does not fit into a ring of {size}")
    if valid is None:
        slots, added = (ring.head + jnp.arange(block)) % size, jnp.int32(block)
    else:
        place = jnp.cumsum(valid, dtype=jnp.int32)
        slots, added = jnp.where(valid, (ring.head + place - 1) % size, size), place[-1]  # `size` is dropped
    return Ring(
        rows=jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), ring.rows, rows),
        head=(ring.head + added) % size,
        count=jnp.minimum(ring.count + added, size),
    )


def draw(ring: Ring, key: Key, batch_size: int, newest: Array | int | None = None) -> Array:
    """Slots [batch_size] of rows, uniform with replacement. The ring must hold at least one.

    Args:
      ring: what to draw from.
      key: of the draw.
      batch_size: how many slots.
      newest: how many of its rows, those written last, may be drawn, at least 1; all by default.
    """
    if newest is None:
        return jax.random.randint(key, (batch_size,), 0, ring.count)
    age = jax.random.randint(key, (batch_size,), 1, jnp.minimum(ring.count, newest) + 1)
    return (ring.head - age) % capacity(ring)


def take(ring: Ring, slots: Array) -> Any:
    """The rows in ``slots`` [...], with those leading axes."""
    return jax.tree.map(lambda x: x[slots], ring.rows)


def row_sampler(batch_size: int) -> Source:
    """The source of ``batch_size`` rows of a ring as they are kept, uniform with replacement."""

    def sample(ring: Ring, key: Key, step: Array | int = 0) -> Any:
        del step
        return take(ring, draw(ring, key, batch_size))

    return sample


# ---- several steps -----------------------------------------------------------------------------------------------


def follow(ring: Ring, slots: Array, length: int, stride: int = 1) -> tuple[Array, Array]:
    """The steps that follow, in the same environment and episode.

    Args:
      ring: of `Row`, or of other rows with ``first``, written in blocks of ``stride``.
      slots: [B], where to start.
      length: steps, the one in ``slots`` included.
      stride: environments.

    Returns:
      their slots [B, length], and bool [B, length] that is False from the step on where the episode is over, or
      which is not yet in the ring.
    """
    ahead = stride * jnp.arange(length)
    newer = (ring.head - 1 - slots) % capacity(ring)  # rows written after it
    following = (slots[:, None] + ahead) % capacity(ring)
    unbroken = (ahead <= newer[:, None]) & ((ahead == 0) | ~ring.rows.first[following])
    return following, jnp.cumprod(unbroken, 1).astype(bool)


def transitions(
    ring: Ring,
    slots: Array,
    n: int = 1,
    discount: float | Array = 1.0,
    stride: int = 1,
    reward_discount: float | Array | None = None,
    lengths: Array | None = None,
) -> Transition:
    """Transitions [B] over ``n`` steps, fewer where the episode or the ring ends.

    The reward is ``r_0 + g r_1 + ... + g^(m-1) r_(m-1)`` over the ``m`` steps taken, and the discount
    ``g^(m-1) d``, so that an agent which multiplies it by its own gamma, ``g``, makes the m-step target of any
    one-step backup.

    Args:
      ring: of `Row`, written in blocks of ``stride``.
      slots: [B], where the transitions start.
      n: steps, at least 1.
      discount: the agent's gamma, ``g``.
      stride: environments.
      reward_discount: of rewards within the steps, in place of ``g``; by default ``g``.
      lengths: [B], steps of each transition, 1 to ``n`` (`rl.replay.traces`); by default ``n``.
    """
    following, unbroken = follow(ring, slots, n + 1, stride)
    taken = unbroken[:, :n] & traces.within(lengths, n)
    steps = taken.sum(1)
    row = jnp.arange(slots.shape[0])
    last, after = following[row, steps - 1], following[row, steps]
    known = unbroken[row, steps]
    rows = ring.rows
    action = rows.action[slots]
    gamma = discount if reward_discount is None else reward_discount
    weight = jnp.where(taken, gamma ** jnp.arange(n, dtype=jnp.float32), 0.0)
    return Transition(
        observation=jax.tree.map(lambda x: x[slots], rows.observation),
        action=action,
        reward=(weight * rows.reward[following[:, :n]]).sum(1),
        discount=discount ** (steps - 1).astype(jnp.float32) * rows.discount[last],
        next_observation=jax.tree.map(lambda x: x[last], rows.next_observation),
        next_action=jnp.where(masks.expand(known, action), rows.action[after], action),
        has_next_action=known.astype(jnp.float32),
    )


def action_chunks(
    ring: Ring,
    slots: Array,
    length: int,
    discount: float | Array = 1.0,
    stride: int = 1,
    reward_discount: float | Array | None = None,
) -> Transition:
    """`transitions` [B] over chunks of ``length`` actions, [B, length * D]; see `rl.replay.chunks`.

    Chunks should be `whole`. After the end of an episode its last action stands again. ``next_action`` is the chunk
    that follows, if that is whole, too.
    """
    following, unbroken = follow(ring, slots, 2 * length, stride)
    steps = transitions(ring, slots, length, discount, stride, reward_discount)
    count = unbroken.sum(1)

    def actions(start: int) -> Array:
        place = jnp.minimum(start + jnp.arange(length), count[:, None] - 1)
        rows = ring.rows.action[jnp.take_along_axis(following, place, 1)]
        return rows.reshape(len(slots), -1)

    action = actions(0)
    last = jnp.take_along_axis(following, count[:, None] - 1, 1)[:, 0]
    known = (count > length) & ((count == 2 * length) | (ring.rows.discount[last] == 0))
    return steps._replace(
        action=action,
        next_action=jnp.where(known[:, None], actions(length), action),
        has_next_action=known.astype(jnp.float32),
    )


def whole(ring: Ring, slots: Array, length: int, stride: int = 1) -> Array:
    """Whether the ring holds ``length`` steps from each slot [B] on, or all up to a termination, bool [B].

    The others are cut, by a time limit or because the steps that follow are still to come.
    """
    following, unbroken = follow(ring, slots, length, stride)
    last = jnp.take_along_axis(following, unbroken.sum(1)[:, None] - 1, 1)[:, 0]
    return unbroken.all(1) | (ring.rows.discount[last] == 0)


def draw_whole(ring: Ring, key: Key, batch_size: int, length: int, stride: int = 1) -> Array:
    """Slots [batch_size] where chunks are `whole`, uniform.

    They are the first of four times as many draws; where fewer of these are whole, they are repeated, and where none
    is, slots that are not whole are returned (`holds_whole`).
    """
    slots = draw(ring, key, 4 * batch_size)
    good = whole(ring, slots, length, stride)
    order = jnp.argsort(~good, stable=True)
    return slots[order[jnp.arange(batch_size) % jnp.maximum(good.sum(), 1)]]


def holds_whole(ring: Ring, length: int, stride: int = 1) -> Array:
    """Whether any of 65,536 draws is `whole`, a bool: what they miss, batches do not meet either."""
    return whole(ring, draw(ring, jax.random.key(0), 1 << 16), length, stride).any()


def sampler(batch_size: int, n: int = 1, discount: float | Array = 1.0, stride: int = 1) -> Source:
    """The source of `transitions` [batch_size] of a ring, uniform with replacement."""

    def sample(ring: Ring, key: Key, step: Array | int = 0) -> Transition:
        del step
        return transitions(ring, draw(ring, key, batch_size), n, discount, stride)

    return sample
