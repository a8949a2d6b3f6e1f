"""Observations with several parts: nested dicts of arrays (goals, entities, an image beside a vector).

An observation is one array or such a dict, and `rl.types.Spec.observation_shape` has the shape of each array in its
place. A shape is a tuple, which JAX takes for a tree of numbers. Here dicts alone are trees, so that the functions take
arrays, shapes, types and spaces alike. They import no JAX: processes that hold environments use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

OBSERVATION, GOAL = "observation", "goal"  # keys of what a goal-conditioned agent sees


def map_structure(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """``function`` of the leaves of one or more trees with the same keys; dicts come out sorted, as JAX sorts them."""
    if not isinstance(tree, Mapping):
        return function(tree, *others)
    return {
        key: map_structure(function, tree[key], *(other[key] for other in others)) for key in sorted(tree)
    }


def named(name: str, tree: Any) -> dict[str, Any]:
    """The leaves in the order of their keys, called as in Python: ``name`` alone, or ``name['goal']``."""
    if not isinstance(tree, Mapping):
        return {name: tree}
    return {
        place: leaf for key in sorted(tree) for place, leaf in named(f"{name}[{key!r}]", tree[key]).items()
    }


def leaves(tree: Any) -> list[Any]:
    """The leaves in the order of their keys."""
    return list(named("", tree).values())


def concatenate(*trees: Any) -> Any:
    """NumPy arrays, or dicts of them, one after another along their first axis."""
    return map_structure(lambda *arrays: np.concatenate(arrays), *trees)


def leading(observation: Any, shape: Any) -> tuple[int, ...]:
    """The axes [...] of an observation [..., *shape]."""
    first, axes = leaves(observation)[0], leaves(shape)[0]
    return tuple(first.shape[: len(first.shape) - len(axes)])


def agent_shape(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """The shape in which agents see an array of observations: vectors [D], histories [T, D], images [H, W, C] of uint8.

    Numbers with two axes are a history, all others become a vector; uint8 stays as it is.

    Raises:
        ValueError: an image without an axis for its channels, or with its channels first.
    """
    if np.dtype(dtype) != np.uint8:
        return shape if len(shape) == 2 else (math.prod(shape),)
    if len(shape) == 2:
        raise ValueError(
            f"uint8 of shape {shape} is no image [H, W, C]: add an axis for the channels "
            "(gymnasium.wrappers.GrayscaleObservation(env, keep_dim=True)), or make numbers that are no pixels float32"
        )
    # Boards may have more planes than rows, but then hardly as many as columns.
    if len(shape) == 3 and shape[0] < min(shape[1:]) and (shape[0] <= 4 or shape[1] == shape[2]):
        raise ValueError(
            f"uint8 of shape {shape} is an image with its channels first, and images here are [H, W, C]: make the "
            "channels the last axis (numpy.moveaxis); or, if they are, make these numbers a vector of float32"
        )
    return shape


def require_array(tree: Any, reader: str) -> None:
    """Raises ValueError, naming the ``reader`` of observations, if they (or their shapes) are a dict."""
    if isinstance(tree, Mapping):
        raise ValueError(
            f"{reader} takes one array as an observation, not a dictionary of {', '.join(sorted(tree))}: wrap the "
            "environment in gymnasium.wrappers.FlattenObservation, and load logged data with --flatten_observations "
            "(flatten_observations=True)"
        )
