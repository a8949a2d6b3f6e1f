"""A ring in which whole episodes can be marked as demonstrations after they ended, and drawn apart from the others.

What an online run needs that learns from its successes: an episode that ended well joins the logged demonstrations, as
in the replay of CQN and ARSQ on RLBench. Its rows stay where they are, so they are forgotten with the ring, and steps
that are overwritten before their episode ends never join. Marking takes time in proportion to the ring's size, and is
called only when an episode succeeded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.replay import prioritised, ring
from rl.types import Array, Key


class Memory(NamedTuple):
    """A ring of rows with a mark each."""

    ring: Any  # a `ring.Ring`, written in blocks of one row for each of ``N`` environments
    tree: Any  # a `prioritised.Tree`: leaf i is 1 where the row in slot i is a demonstration's, else 0


# Axes of memories over seeds that are written together.
STACKED = Memory(ring.STACKED, 0)


def empty(example: Any, capacity: int) -> Memory:
    """As `ring.empty`."""
    return Memory(ring.empty(example, capacity), prioritised.tree(capacity))


def insert(memory: Memory, rows: Any) -> Memory:
    """As `ring.insert` without a mask; new rows [N, ...] are no demonstrations. Donate the memory."""
    block = jnp.arange(jax.tree.leaves(rows)[0].shape[0])
    slots = (memory.ring.head + block) % ring.capacity(memory.ring)
    tree = prioritised.put(memory.tree, slots, jnp.zeros(block.shape))
    return Memory(ring.insert(memory.ring, rows), tree)


def mark(memory: Memory, lengths: Array) -> Memory:
    """Makes the newest ``lengths`` [N] int32 rows of each environment demonstrations, as far as the ring holds them.

    Args:
      memory: donate it.
      lengths: steps of the episode that ended with the newest row of each environment; 0 where none joins.
    """
    size, environments = ring.capacity(memory.ring), lengths.shape[0]
    newer = (memory.ring.head - 1 - jnp.arange(size)) % size  # rows written after the one in each slot
    steps = lengths[environments - 1 - newer % environments]
    joins = (newer < memory.ring.count) & (newer // environments < steps)
    marks = jnp.maximum(prioritised.priorities(memory.tree, jnp.arange(size)), joins)
    return memory._replace(tree=prioritised.filled(marks))


def is_marked(memory: Memory, slots: Array) -> Array:
    """Whether the rows in ``slots`` [...] are demonstrations, bool [...]."""
    return prioritised.priorities(memory.tree, slots) > 0


def count(memory: Memory) -> Array:
    """Rows that are demonstrations, [] float32."""
    return prioritised.total(memory.tree)


def draw(memory: Memory, key: Key, batch_size: int) -> Array:
    """Slots [batch_size] of demonstrations, uniform with replacement; any slots where there are none."""
    return prioritised.draw(memory.tree, key, batch_size)
