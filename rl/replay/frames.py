"""A ring of single video frames, stacked when they are drawn: one byte per pixel and step, not eight.

Stacked observations share all but one frame with their neighbours, and the next observation is the observation of
the row after. So a row keeps only the newest frame, and `transitions` gathers what a stack needs from the rows
around it. One million steps of 84 x 84 take 7.07 GB for each channel: 1 of grey frames, 3 of RGB.

Rows are written in blocks of ``stride`` environments, as `rl.replay.ring` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl import masks
from rl.replay import ring, traces
from rl.types import Array, Key, Transition


class Row(NamedTuple):
    """One step of one environment, or a batch of them."""

    frame: Any  # [..., H, W, C] uint8, the newest; C is 1 for grey and 3 for RGB
    action: Any  # [..., D] float32 or [...] int32
    reward: Any  # [...] float32
    discount: Any  # [...] float32: 0 where the episode terminated
    first: Any  # [...] bool: the first step of its episode


def compress(row: ring.Row, depth: int) -> Row:
    """What is kept of a step whose observations [..., H, W, depth * C] are ``depth`` frames, the newest last.

    Raises:
      ValueError: the observation is a dict of arrays, or no stack of ``depth`` frames.
    """
    if isinstance(row.observation, Mapping):
        raise ValueError(
            "a replay of video frames keeps the newest of one stack of images, not of the dictionary "
            f"{', '.join(sorted(row.observation))}: keep whole steps (rl.buffers.steps)"
        )
    channels, rest = divmod(row.observation.shape[-1], depth)
    if rest:
        raise ValueError(f"observations of shape {row.observation.shape} are not stacks of {depth} frames")
    return Row(row.observation[..., -channels:], row.action, row.reward, row.discount, row.first)


def stacks(memory: ring.Ring, slots: Array, depth: int, stride: int = 1) -> Array:
    """Observations [B, H, W, depth * C] at ``slots`` [B]: black before the start of the episode."""
    size = ring.capacity(memory)
    back = (slots[:, None] - stride * jnp.arange(depth)) % size  # the newest first
    # firsts between it and the slot
    started = jnp.cumsum(memory.rows.first[back], 1) - memory.rows.first[back]
    frames = jnp.where((started > 0)[..., None, None, None], 0, memory.rows.frame[back])
    stacked = jnp.moveaxis(frames[:, ::-1], 1, -2)
    return stacked.reshape(*stacked.shape[:-2], -1)


def transitions(
    memory: ring.Ring,
    slots: Array,
    depth: int,
    n: int = 1,
    discount: float | Array = 1.0,
    stride: int = 1,
    lengths: Array | None = None,
) -> Transition:
    """Transitions [B] over ``n`` steps, as `ring.transitions`, with observations [B, H, W, depth * C].

    Where a time limit cuts the episode within these steps, the last observation was never kept: they end one step
    earlier. From a row at which it is cut at once they start one step earlier, too. An episode cut after its only
    step counts as terminated.

    Args:
      memory: of `Row`, written in blocks of ``stride``.
      slots: [B] from `draw`.
      depth: frames in a stack.
      n: steps, at least 1.
      discount: the agent's gamma.
      stride: environments.
      lengths: [B], steps of each transition; by default ``n``.
    """
    slots = _before_cut(memory, slots, stride)
    rows, row = memory.rows, jnp.arange(slots.shape[0])
    following, unbroken = ring.follow(memory, slots, n + 1, stride)
    length = (unbroken[:, :n] & traces.within(lengths, n)).sum(1)
    last = following[row, length - 1]
    cut = ~unbroken[row, length] & (rows.discount[last] > 0)
    steps = jnp.where(cut, jnp.maximum(length - 1, 1), length)
    weight = jnp.where(jnp.arange(n) < steps[:, None], discount ** jnp.arange(n, dtype=jnp.float32), 0.0)
    after = following[row, jnp.where(cut, length - 1, length)]
    alive = jnp.where(cut, length > 1, rows.discount[last] > 0)
    action = rows.action[slots]
    return Transition(
        observation=stacks(memory, slots, depth, stride),
        action=action,
        reward=(weight * rows.reward[following[:, :n]]).sum(1),
        discount=jnp.where(alive, discount ** (steps - 1).astype(jnp.float32), 0.0),
        next_observation=stacks(memory, after, depth, stride),
        next_action=jnp.where(masks.expand(alive, action), rows.action[after], action),
        has_next_action=alive.astype(jnp.float32),
    )


def draw(memory: ring.Ring, key: Key, batch_size: int, depth: int, n: int = 1, stride: int = 1) -> Array:
    """Slots [batch_size], uniform over rows whose stack is whole and whose ``n`` next rows are there.

    The ring must hold more than ``stride * (depth + n)`` rows.
    """
    age = jax.random.randint(key, (batch_size,), stride * n, memory.count - stride * depth)
    return (memory.head - 1 - age) % ring.capacity(memory)


def _before_cut(memory: ring.Ring, slots: Array, stride: int) -> Array:
    """``slots``, but where a time limit cut the episode, the row before if it is of the same episode."""
    size = ring.capacity(memory)
    cut = memory.rows.first[(slots + stride) % size] & (memory.rows.discount[slots] > 0)
    return jnp.where(cut & ~memory.rows.first[slots], (slots - stride) % size, slots)
