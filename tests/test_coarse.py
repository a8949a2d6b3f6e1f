"""Actions as bins of intervals within intervals: against loops that cut one interval after another."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.values import coarse
from rl.values.coarse import Grid

pytestmark = pytest.mark.slow

GRIDS = [Grid(1, 2), Grid(1, 41), Grid(2, 7), Grid(3, 5), Grid(2, 4), Grid(21, 2), Grid(2, 1448)]


def cut(low: float, high: float, bins: int, b: int) -> tuple[float, float]:
    """One level of the paper: bin ``b`` of the interval, in double precision."""
    width = (high - low) / bins
    return low + b * width, low + (b + 1) * width


@given(
    st.sampled_from(GRIDS),
    st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_round_trip_stays_within_half_of_the_last_interval(grid: Grid, values: list[float]) -> None:
    action = np.array(values, np.float32)
    bins = np.asarray(coarse.encode(grid, action))
    assert bins.dtype == np.int32 and bins.shape == (grid.levels, len(values))
    assert (bins >= 0).all() and (bins < grid.bins).all()
    back = np.asarray(coarse.decode(grid, bins))
    assert back.dtype == np.float32 and (np.abs(back) < 1).all()
    assert np.abs(back.astype(float) - action).max() <= grid.bins**-grid.levels + 2.0**-23
    for d, value in enumerate(values):  # the intervals of the paper, cut one after another, hold the value
        low, high = -1.0, 1.0
        for level in range(grid.levels):
            low, high = cut(low, high, grid.bins, bins[level, d])
        assert low - 2.0**-23 <= value <= high + 2.0**-23
        assert back[d] == pytest.approx((low + high) / 2, abs=2.0**-23)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_action_decoded_is_encoded_to_the_same_bins(grid: Grid) -> None:
    """Exhaustively, compiled and not, up to the largest grid that is allowed."""
    every = jnp.arange(grid.cells)
    np.testing.assert_array_equal(coarse.cell(grid, coarse.centre(grid, every)), every)
    np.testing.assert_array_equal(jax.jit(lambda x: coarse.cell(grid, coarse.centre(grid, x)))(every), every)
    bins = coarse.digits(grid, every[-50:])
    np.testing.assert_array_equal(coarse.encode(grid, coarse.decode(grid, bins)), bins)
    assert len(np.unique(bins, axis=1).T) == min(50, grid.cells)


def test_bins_of_single_values_by_hand() -> None:
    grid = Grid(2, 7)
    action = np.array([-1.0, 1.0, 0.0, -5.0, 5.0, -1 + 2 / 7 + 1e-3], np.float32)
    np.testing.assert_array_equal(coarse.encode(grid, action), [[0, 6, 3, 0, 6, 1], [0, 6, 3, 0, 6, 0]])
    worst = [coarse.decode(grid, coarse.encode(grid, np.float32([x]))) - x for x in (-1.0, 1.0)]
    np.testing.assert_allclose(np.abs(worst), 1 / 49, rtol=1e-5)


def test_zooming_level_by_level_ends_in_the_action_that_decodes_from_the_bins() -> None:
    """As CQN acts: all dimensions at a level, which sees the centres after the levels before it."""
    grid, random = Grid(3, 5), np.random.default_rng(0)
    bins = random.integers(0, 5, (4, 3, 2))
    low, high = np.full((4, 2), -1.0), np.full((4, 2), 1.0)
    cells = jnp.zeros((4, 2), jnp.int32)
    for level in range(3):
        np.testing.assert_allclose(coarse.centre(grid, cells, level), (low + high) / 2, atol=1e-6)
        low, high = cut(low, high, 5, bins[:, level])
        cells = coarse.set_bin(grid, cells, level, jnp.asarray(bins[:, level], jnp.int32))
    np.testing.assert_array_equal(
        coarse.centre(grid, cells), coarse.decode(grid, jnp.asarray(bins, jnp.int32))
    )
    np.testing.assert_allclose(coarse.decode(grid, jnp.asarray(bins, jnp.int32)), (low + high) / 2, atol=1e-6)


def loop(bins: np.ndarray, base: int, order: str, see_levels: bool, see_dimensions: bool) -> tuple:
    """Levels, dimensions and contexts of all tokens of one action [L, D], one token after another."""
    levels, size = bins.shape
    pairs = [(level, d) for level in range(levels) for d in range(size)]
    if order == "dimension":
        pairs = [(level, d) for d in range(size) for level in range(levels)]
    intervals, local, contexts = [(-1.0, 1.0)] * size, {}, []
    for level, d in pairs:
        whole = [(low + high) / 2 for low, high in intervals]
        seen = whole if see_levels else [local.get((level, other), 0.0) for other in range(size)]
        contexts.append([x if see_dimensions or other == d else 0.0 for other, x in enumerate(seen)])
        intervals[d] = cut(*intervals[d], base, bins[level, d])
        local[level, d] = sum(cut(-1.0, 1.0, base, bins[level, d])) / 2
    return pairs, np.array(contexts)


@pytest.mark.parametrize("order", coarse.ORDERS)
@pytest.mark.parametrize("see_levels", [True, False])
@pytest.mark.parametrize("see_dimensions", [True, False])
def test_contexts_are_those_of_a_loop_over_tokens(order: str, see_levels: bool, see_dimensions: bool) -> None:
    grid, random = Grid(3, 4), np.random.default_rng(0)
    tokens = coarse.tokens(grid, 2, order, see_levels=see_levels, see_dimensions=see_dimensions)
    bins = random.integers(0, 4, (5, 3, 2))
    action = coarse.decode(grid, jnp.asarray(bins, jnp.int32))
    cells = coarse.cell(grid, action)
    together, picked = np.asarray(coarse.contexts(tokens, cells)), np.asarray(coarse.chosen(tokens, cells))
    assert together.shape == (5, 6, 2) and together.dtype == np.float32
    assert tokens.size == 6
    for row in range(5):
        pairs, contexts = loop(bins[row], 4, order, see_levels, see_dimensions)
        assert pairs == list(zip(tokens.level, tokens.dimension, strict=True))
        np.testing.assert_allclose(together[row], contexts, atol=1e-6)
        np.testing.assert_array_equal(picked[row], [bins[row, level, d] for level, d in pairs])
    # One token after another, as actions are chosen, for which the tokens to come are not there yet.
    grown = jnp.zeros((5, 2), jnp.int32)
    for t in range(tokens.size):
        np.testing.assert_array_equal(coarse.context(tokens, t, grown), together[:, t])
        np.testing.assert_array_equal(coarse.context(tokens, jnp.asarray(t), cells), together[:, t])
        grown = coarse.append(tokens, jnp.asarray(t), grown, picked[:, t])
    np.testing.assert_array_equal(grown, cells)


def test_what_each_switch_leaves_to_see() -> None:
    """By the action's bins that move a context: of all pairs of tokens, exactly these."""
    grid = Grid(2, 3)

    def sees(**switches: bool) -> set[tuple[int, int]]:
        tokens, pairs = coarse.tokens(grid, 2, **switches), set()
        for t, other in itertools.product(range(4), range(4)):
            moved = [coarse.append(tokens, other, jnp.zeros(2, jnp.int32), jnp.asarray(b)) for b in (0, 1)]
            if (coarse.context(tokens, t, moved[0]) != coarse.context(tokens, t, moved[1])).any():
                pairs.add((t, other))
        return pairs

    # Tokens 0, 1 are the first level of dimensions 0, 1; tokens 2, 3 the second.
    assert sees() == {(t, other) for t in range(4) for other in range(t)}
    assert sees(see_levels=False) == {(1, 0), (3, 2)}
    assert sees(see_dimensions=False) == {(2, 0), (3, 1)}
    assert sees(see_levels=False, see_dimensions=False) == set()


def test_errors_name_the_setting_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"levels=0 must be at least 1"):
        Grid(0, 5)
    with pytest.raises(ValueError, match=r"bins=1 must be at least 2"):
        Grid(2, 1)
    with pytest.raises(
        ValueError, match=r"levels=8 with bins=7 .* 5764801 intervals, .*: lower levels or bins"
    ):
        Grid(8, 7)
    with pytest.raises(ValueError, match=r"levels=22 with bins=2"):
        Grid(22, 2)
    with pytest.raises(ValueError, match=r"actions of type int32 .* floats in \[-1, 1\]"):
        coarse.encode(Grid(1, 3), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="order='levels': did you mean 'level'"):
        coarse.tokens(Grid(1, 3), 2, "levels")
    with pytest.raises(ValueError, match="actions of 0 dimensions"):
        coarse.tokens(Grid(1, 3), 0)
