"""Rows drawn in proportion to their priorities, by a tree of sums on the device that float32 cannot mislead.

Two rules keep it right. A parent is always the sum of its two children, computed anew, so that errors do not
accumulate. And a draw goes down the tree by an independent choice at each node, right with probability
``right / (left + right)``: no prefix of sums is subtracted, so nothing cancels, and a child of sum 0 is never chosen.
Priorities under the smallest normal float32, 1.2e-38, may count as 0: many processors flush them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.replay import ring
from rl.types import Array, Key


class Tree(NamedTuple):
    """Priorities and their sums."""

    sums: Array  # [2 L], L the next power of two: node i has children 2 i and 2 i + 1, leaves start at L; 0 is unused


class Memory(NamedTuple):
    """A ring whose rows have priorities."""

    ring: Any  # a `ring.Ring`
    tree: Any  # a `Tree`; leaf i is the priority of the row in slot i
    highest: Any  # [] float32, of all priorities so far: what a new row gets


# Axes of memories over seeds that are written together.
STACKED = Memory(ring.STACKED, 0, 0)


def tree(size: int) -> Tree:
    """A tree of ``size`` priorities, all 0."""
    return Tree(jnp.zeros(2 * 2 ** max(math.ceil(math.log2(size)), 1)))


def filled(priority: Array) -> Tree:
    """The tree of ``priority`` [size], at least 0; it sums all, where `put` sums what lies above some."""
    size = priority.shape[0]
    levels = [jnp.zeros(_leaves(tree(size))).at[:size].set(priority)]
    while levels[0].shape[0] > 1:
        levels.insert(0, levels[0].reshape(-1, 2).sum(1))
    return Tree(jnp.concatenate([jnp.zeros(1), *levels]))


def priorities(tree: Tree, index: Array) -> Array:
    """The priorities at ``index`` [...]."""
    return tree.sums[_leaves(tree) + index]


def total(tree: Tree) -> Array:
    """Sum of all priorities, []."""
    return tree.sums[1]


def put(tree: Tree, index: Array, priority: Array) -> Tree:
    """The tree with priorities [B], at least 0, at ``index`` [B]; of repeated indices an unspecified one is kept."""
    node = _leaves(tree) + index
    sums = tree.sums.at[node].set(priority)
    for _ in range(_depth(tree)):
        node = node // 2
        sums = sums.at[node].set(sums[2 * node] + sums[2 * node + 1])
    return Tree(sums)


def draw(tree: Tree, key: Key, batch_size: int) -> Array:
    """Indices [batch_size] drawn with replacement in proportion to their priorities, one of which must be positive."""
    chance = jax.random.uniform(key, (_depth(tree), batch_size))
    node = jnp.ones(batch_size, jnp.int32)
    for level in range(_depth(tree)):
        left, right = tree.sums[2 * node], tree.sums[2 * node + 1]
        # Rounding may carry the product up to `left` where `right` is 0: only then does the second test matter.
        node = 2 * node + ((chance[level] * (left + right) >= left) & (right > 0))
    return node - _leaves(tree)


# ---- a ring with priorities ----------------------------------------------------------------------------------------


def empty(example: Any, capacity: int) -> Memory:
    """As `ring.empty`."""
    return Memory(ring.empty(example, capacity), tree(capacity), jnp.ones(()))


def insert(memory: Memory, rows: Any, lookahead: int = 0, lookback: int = 0) -> Memory:
    """As `ring.insert` without a mask; new rows get the highest priority so far, so that all are seen soon.

    Args:
      memory: donate it, or all of it is copied.
      rows: [B, ...], blocks of always the same size.
      lookahead: rows that must have come after one before it may be drawn, a multiple of B.
      lookback: how many of the oldest rows must not be drawn, a multiple of B.
    """
    held, size = memory.ring, ring.capacity(memory.ring)
    block = jnp.arange(jax.tree.leaves(rows)[0].shape[0])
    after = ring.insert(held, rows)
    # Oldest first: in a ring that is hardly larger than `lookahead` and `lookback`, what is too old is not drawn.
    tree = put(memory.tree, (held.head + block) % size, jnp.zeros(block.shape))
    ready = jnp.where(held.count >= lookahead, memory.highest, 0.0)
    tree = put(tree, (held.head - lookahead + block) % size, jnp.broadcast_to(ready, block.shape))
    tree = put(tree, (after.head + lookback - block - 1) % size, jnp.zeros(block.shape)) if lookback else tree
    return memory._replace(ring=after, tree=tree)


def update(memory: Memory, slots: Array, priority: Array) -> Memory:
    """The memory with new priorities [B] of the rows in ``slots`` [B]."""
    highest = jnp.maximum(memory.highest, priority.max())
    return memory._replace(tree=put(memory.tree, slots, priority), highest=highest)


def weights(memory: Memory, slots: Array, exponent: float | Array) -> Array:
    """Importance weights [B] of rows that were drawn: ``(count P(i))^-exponent``, the largest of them made 1.

    With exponent 1 a weighted mean over draws is proportional to the mean over all rows (Schaul et al. 2016, 3.4).
    """
    chance = priorities(memory.tree, slots) / total(memory.tree)
    weight = (memory.ring.count * chance) ** -exponent
    return weight / weight.max()


def _leaves(tree: Tree) -> int:
    return tree.sums.shape[0] // 2


def _depth(tree: Tree) -> int:
    return int(math.log2(_leaves(tree)))
