"""rl.networks.quasimetric: lengths of unions of intervals, and the laws of a quasimetric."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from rl.networks import quasimetric
from rl.types import Spec

LATENT, POINTS = 16, 12


def brute_force(start: np.ndarray, end: np.ndarray) -> float:
    """Length of the union of intervals [k], merged one after another."""
    total, reach = 0.0, -np.inf
    for a, b in sorted(zip(start, end, strict=True)):
        if b > max(a, reach):
            total += b - max(a, reach)
            reach = b
    return total


def between() -> np.ndarray:
    """Points of which no two numbers of a group are nearer than 0.01, so that a small step changes no order."""
    rng = np.random.default_rng(1)
    return (rng.permutation(POINTS * LATENT).reshape(POINTS, LATENT) / 50).astype(np.float32)


@functools.cache
def answers() -> tuple[np.ndarray, Any, Any]:
    """Latent points on a grid, so that ends coincide; lengths, distances of all pairs, gradients at some."""
    rng = np.random.default_rng(0)
    points = np.round(2 * rng.normal(size=(POINTS, LATENT)), 1).astype(np.float32)
    points[1] = points[0]
    metric = quasimetric.interval(Spec((2,), 1), LATENT, (4,))
    params = {"mixture": np.float32(0.3)}
    start, end = np.broadcast_arrays(points[:, None], points)
    apart = between()

    @jax.jit
    def program(start: Any, end: Any) -> Any:
        groups = lambda x: x.reshape(*x.shape[:-1], LATENT // 8, 8)
        at_itself = jax.grad(lambda x, y: metric.distance(params, x, y).sum(), (0, 1))(points, points)
        lengths = lambda x, y: quasimetric.union_length(groups(x), groups(y))
        return (
            lengths(start, end),
            metric.distance(params, start, end),
            (*at_itself, *jax.grad(lambda x, y: lengths(x, y).sum(), (0, 1))(apart, apart[::-1])),
        )

    length, distance, slope = jax.device_get(program(start, end))
    return points, length, (distance, slope)


def test_union_length_is_that_of_the_merged_intervals() -> None:
    points, length, _ = answers()
    for i, x in enumerate(points):
        for j, y in enumerate(points):
            for group in range(LATENT // 8):
                part = slice(8 * group, 8 * group + 8)
                expected = brute_force(x[part], np.maximum(x[part], y[part]))
                np.testing.assert_allclose(length[i, j, group], expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_union_is_that_of_its_ends() -> None:
    """Against differences of the merged intervals' length, which is linear between the points' orders."""
    (_, _, (_, slopes)), apart, step = answers(), between().astype(float), 1e-3
    length = lambda x, y: sum(
        brute_force(x[i, part], np.maximum(x[i, part], y[i, part]))
        for i in range(POINTS)
        for part in (slice(0, 8), slice(8, 16))
    )
    for which, slope in enumerate(slopes[2:]):
        for index in np.ndindex(apart.shape):
            moved = [apart.copy(), apart[::-1].copy()]
            moved[which][index] += step
            difference = (length(*moved) - length(apart, apart[::-1])) / step
            assert slope[index] == pytest.approx(difference, abs=1e-6)
    assert {-1.0, 0.0} == set(slopes[2].ravel().tolist()) and {0.0, 1.0} == set(slopes[3].ravel().tolist())


def test_it_is_a_quasimetric() -> None:
    """Zero at itself, never negative, one way is not the other, and no detour is shorter."""
    _, length, (distance, slopes) = answers()
    share = 1 / (1 + np.exp(-0.3))
    np.testing.assert_allclose(distance, share * length.max(-1) + (1 - share) * length.mean(-1), rtol=1e-5)
    assert (np.diag(distance) == 0).all() and distance[0, 1] == 0
    assert (distance >= 0).all()
    assert (np.abs(distance - distance.T) > 0.1).sum() > POINTS
    detour = distance[:, :, None] + distance[None]  # [from, over, to]
    assert (distance[:, None] <= detour + 1e-5).all()
    assert all((x == 0).all() for x in slopes[:2])  # no pull between points that coincide
