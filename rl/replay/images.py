"""Images of a log, held once: almost every one is there twice, after one step and before the next.

A million images of 64 x 64 x 3 bytes are 12 GB, and as many again after their steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from rl.types import Transition

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows ``array[index]`` [N, ...] of an array that others have rows of, too."""

    array: Any  # [M, ...]
    index: Any  # [N] int32

    def __getitem__(self, rows: Any) -> Any:
        return self.array[self.index[rows]]


def take(tree: Tree, rows: Any) -> Tree:
    """The ``rows`` [...] of all arrays [N, ...] and `Rows` in a tree, as arrays with those leading axes."""
    return jax.tree.map(lambda x: x[rows], tree, is_leaf=_is_rows)


def on_device(data: Tree, place: Callable[[Any], Any] = jax.device_put) -> Tree:
    """Data on the device; images before and after the `Transition` steps in them are `Rows` of one array there.

    Images that are on a device already stay as they are, and so do those of which most would be held again all the
    same. While it runs the host holds the images a third time.

    Args:
      data: of which steps on the host are looked through.
      place: tree of arrays -> the same on the device.
    """
    shared = jax.tree.map(
        lambda x: _shared(x, place) if isinstance(x, Transition) else x,
        data,
        is_leaf=lambda x: isinstance(x, Transition),
    )
    return place(shared)


def _is_rows(x: Any) -> bool:
    return isinstance(x, Rows)


def _shared(steps: Transition, place: Callable[[Any], Any]) -> Transition:
    before, structure = jax.tree.flatten(steps.observation)
    after = jax.tree.leaves(steps.next_observation)
    pairs = [_pair(*pair, place) for pair in zip(before, after, strict=True)]
    observation, following = (jax.tree.unflatten(structure, leaves) for leaves in zip(*pairs, strict=True))
    return steps._replace(observation=observation, next_observation=following)


def _pair(before: Any, after: Any, place: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Two arrays [N, ...] as they are or, if they are images that are mostly the same, as `Rows` of one array."""
    on_host = isinstance(before, np.ndarray) and isinstance(after, np.ndarray)
    if not on_host or before.dtype != np.uint8 or before.ndim < 4:
        return before, after
    known = {digest: row for row, digest in enumerate(_digests(before))}
    index = np.zeros(len(after), np.int32)
    new: list[int] = []  # rows that show what no step begins with
    for row, digest in enumerate(_digests(after)):
        if digest not in known:
            known[digest] = len(before) + len(new)
            new.append(row)
        index[row] = known[digest]
    if len(new) > len(after) / 2:
        return before, after
    array = place(np.concatenate([before, after[new]]))
    return Rows(array, np.arange(len(before), dtype=np.int32)), Rows(array, index)


def _digests(images: np.ndarray) -> list[bytes]:
    return [hashlib.blake2b(image, digest_size=16).digest() for image in np.ascontiguousarray(images)]
