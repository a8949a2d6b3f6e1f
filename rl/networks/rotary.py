"""Rotary positions of attention (Su et al. 2021), and how models stretch them to longer contexts."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from rl.types import Array


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021), the two halves of a head rotated against each other."""

    base: float = 10_000.0
    # The stretch to longer contexts. Pairs that turn less than `low` times within `original` positions turn `factor`
    # times as slowly, those that turn more than `high` times stay, and between them it is blended in.
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    # Blended by turns (llama3: Llama 3.1), by the number of the pair (yarn: Peng et al. 2024, formula 13), or all is
    # stretched (linear: Chen et al. 2023).
    kind: str = "llama3"
    whole: bool = True  # yarn: the blend begins and ends at whole pairs
    gain: float = 1.0  # yarn: of rotated queries and keys


ROPE = Rope()  # as in the first LLaMA


def rotations(rope: Rope | None, head_size: int, position: Array) -> tuple[Array, Array] | None:
    """Cosines and sines [B, S, 1, head_size / 2] float32 of the angles at ``position`` [B, S]; None without `Rope`."""
    if rope is None:
        return None
    half = head_size // 2
    frequency = rope.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if rope.factor != 1.0:
        keep = _stretch(rope, frequency)
        frequency = frequency * (keep + (1 - keep) / rope.factor)
    angle = position[..., None, None].astype(jnp.float32) * frequency
    if rope.gain == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return rope.gain * jnp.cos(angle), rope.gain * jnp.sin(angle)


def rotate(x: Array, rotation: tuple[Array, Array] | None) -> Array:
    """Queries or keys [B, S, heads, head_size] turned by `rotations`; as they are where these are None."""
    if rotation is None:
        return x
    cosine, sine = rotation
    one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], -1).astype(x.dtype)


def _stretch(rope: Rope, frequency: Array) -> Array | float:
    """How much of each pair's ``frequency`` [head_size / 2] a stretch leaves as it is, from 0 to 1."""
    if rope.kind == "linear":
        return 0.0
    if rope.kind == "llama3":
        turns = rope.original * frequency / (2 * math.pi)  # of each pair within the original context
        return jnp.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
    pairs = len(frequency)
    # The pair, in between two as a rule, that turns so often within the original context.
    first, last = (
        pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.base)
        for turns in (rope.high, rope.low)
    )
    if rope.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last if last != first else first + 1e-3
    return 1 - jnp.clip((jnp.arange(pairs) - first) / (last - first), 0.0, 1.0)
