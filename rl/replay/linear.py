"""Trajectories of a finite-horizon problem as an agent with known linear features sees them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from rl.types import Array

_TOLERANCE = 1e-5


class Trajectories(NamedTuple):
    """``N`` episodes of ``H`` steps, ``d`` features, ``A`` actions to choose from; steps lead, for `jax.lax.scan`.

    Rewards are ``phi(s, a) @ theta`` with ``theta`` known (methods that estimate them use ``reward``). A state
    whose value is known to be 0 (the fail state) has features 0.
    """

    features: Array  # [H, N, d] phi(s_h, a_h) of what was done
    reward: Array  # [H, N]
    next_features: Array  # [H-1, N, A, d] phi(s_{h+1}, a) of every action
    stopping: Array  # [H-1, N] what ending the episode in s_{h+1} pays; -inf where it cannot be ended
    theta: Array  # [H, d]


def check(data: Trajectories) -> None:
    """Refuses trajectories that no linear MDP can have made.

    Features lie in the simplex, or below it: a sum less than 1 means that the missing mass leads to a state
    of value 0. Under `jax.jit` or `jax.vmap` only shapes can be checked.

    Raises:
      ValueError: the fields disagree about the horizon, the number of trajectories or of features; a feature
        is negative or not finite, or a feature vector sums to more than 1.
    """
    if data.features.ndim != 3 or 0 in data.features.shape:
        raise ValueError(f"features must be [steps, trajectories, features], not {data.features.shape}")
    steps, count, size = data.features.shape
    expected = {
        "reward": (steps, count),
        "next_features": (steps - 1, count, *data.next_features.shape[2:3], size),
        "stopping": (steps - 1, count),
        "theta": (steps, size),
    }
    for name, shape in expected.items():
        if getattr(data, name).shape != shape:
            raise ValueError(
                f"{name} has shape {getattr(data, name).shape}; with {steps} steps of {count} trajectories and "
                f"{size} features (the shape of features) it must be {shape}"
            )
    for name in ("features", "next_features"):
        _check_simplex(name, getattr(data, name))


def _check_simplex(name: str, features: Array) -> None:
    if isinstance(features, jax.core.Tracer) or features.size == 0:
        return
    values = np.asarray(features)
    lowest, highest = float(values.min()), float(values.sum(-1).max())
    if not lowest >= -_TOLERANCE:  # NaN included
        raise ValueError(
            f"{name} are not on the simplex: one is {lowest:.4g}. Features of a linear MDP are the weights of its "
            "factors: not negative, with a sum of at most 1"
        )
    if not highest <= 1 + _TOLERANCE:
        raise ValueError(
            f"{name} are not on the simplex: one vector sums to {highest:.6g}, more than 1. Divide by the sum, "
            "or use another feature map"
        )
