"""Rows of pytrees, chosen by a mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rl.types import Array


def select_rows(mask: Array, one: Any, other: Any) -> Any:
    """The rows of ``one`` where the ``mask`` [...] is true, else those of ``other``: trees of leaves [..., *any]."""
    return jax.tree.map(lambda x, y: jnp.where(expand(mask, y), x, y), one, other)


def expand(x: Array, like: Array) -> Array:
    """``x`` [...] with axes of 1 behind it, up to those of ``like`` [..., *any]."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))
