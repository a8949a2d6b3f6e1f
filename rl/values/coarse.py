"""Continuous actions as choices from few: every dimension is cut into ``B`` intervals, ``L`` times over.

At level 0 the interval [-1, 1] of each dimension is cut into ``B`` equal ones, of which a *bin* chooses one; at level
1 that one is cut again, and so on (CQN, Seo et al. 2024; ARSQ, Liu et al. 2025). After ``L`` levels an action stands
for the centre of its last interval, at most ``B^-L`` away from it.

All ``L`` bins of a dimension are the digits, in base ``B``, of one integer: its *cell*, the number of the last
interval, from 0 at -1 to ``B^L - 1`` at 1. Everything here is arithmetic of cells, so that an action decoded is
encoded to the same bins again, whatever ``L`` and ``B`` are; digits of levels that are still to come are 0.

An autoregressive value chooses one bin after another: ``T = L D`` *tokens*, each of which sees a *context* of the bins
chosen before it. `Tokens` says in which order, and what each sees.

Shape letters: ``D`` dimensions of an action, ``L`` levels, ``T = L D`` tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from rl.settings import require_choice
from rl.types import Array

ORDERS = ("level", "dimension")

# Beyond this many cells, rounding in float32 could carry the centre of one into the next.
_MOST_CELLS = 2**21


@dataclasses.dataclass(frozen=True)
class Grid:
    """How often, and into how many intervals, every dimension is cut.

    Raises:
      ValueError: fewer than 1 level or 2 bins, or more cells than float32 can tell apart on [-1, 1].
    """

    levels: int  # L
    bins: int  # B

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ValueError(f"levels={self.levels} must be at least 1: how often an interval is cut")
        if self.bins < 2:
            raise ValueError(f"bins={self.bins} must be at least 2: into how many intervals each is cut")
        if self.cells > _MOST_CELLS:
            raise ValueError(
                f"levels={self.levels} with bins={self.bins} cut each dimension into {self.cells} intervals, and "
                f"float32 tells at most {_MOST_CELLS} apart on [-1, 1]: lower levels or bins"
            )

    @property
    def cells(self) -> int:
        """Intervals of the last level, ``B^L``."""
        return self.bins**self.levels

    def place(self, level: int | np.ndarray | Array) -> Array:
        """Place value of the digit of ``level`` (from 0) in a cell: ``B^(L - 1 - level)``, int32."""
        powers = self.bins ** np.arange(self.levels)[::-1]
        return jnp.asarray(powers, jnp.int32)[level]


def cell(grid: Grid, action: Array) -> Array:
    """Actions [..., D] -> the cells [..., D] int32 that they lie in; what lies outside [-1, 1] is clipped to it.

    (Data is refused or clipped where it is read, see `rl.data`.)

    Raises:
      ValueError: actions are integers.
    """
    if not jnp.issubdtype(action.dtype, jnp.floating):
        raise ValueError(
            f"actions of type {action.dtype} cannot be cut into intervals: give floats in [-1, 1], or use an agent "
            "for integer actions (dqn)"
        )
    position = jnp.floor((action.astype(jnp.float32) + 1) * (grid.cells / 2))
    return jnp.clip(position, 0, grid.cells - 1).astype(jnp.int32)


def digits(grid: Grid, cells: Array) -> Array:
    """Cells [..., D] -> their bins [..., L, D] int32, the coarsest level first."""
    return cells[..., None, :] // grid.place(np.arange(grid.levels))[:, None] % grid.bins


def encode(grid: Grid, action: Array) -> Array:
    """Actions [..., D] -> bins [..., L, D] int32; see `cell` for actions outside [-1, 1] and errors."""
    return digits(grid, cell(grid, action))


def decode(grid: Grid, bins: Array) -> Array:
    """Bins [..., L, D] -> actions [..., D] float32 in (-1, 1): the centres of their last intervals."""
    return centre(grid, (bins * grid.place(np.arange(grid.levels))[:, None]).sum(-2))


def centre(grid: Grid, cells: Array, levels: int | None = None) -> Array:
    """Cells [..., D] -> centres [..., D] float32 of their intervals after ``levels`` cuts (default: all; 0: none).

    What CQN shows its network at a level: the centres after the levels before it.
    """
    levels = grid.levels if levels is None else levels
    count = grid.bins**levels
    return _centre(cells // (grid.cells // count), count)


def set_bin(grid: Grid, cells: Array, level: int | Array, bins: Array) -> Array:
    """Cells [..., D] with ``bins`` [..., D] chosen at ``level``, where the digits were still 0."""
    return cells + bins * grid.place(level)


def _centre(number: Array, count: int | Array) -> Array:
    """The centre of interval ``number`` of ``count`` equal ones on [-1, 1], from integers, so rounded once."""
    return (2 * number + 1 - count).astype(jnp.float32) / count


# ---- one bin after another -----------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """In which order the ``T = L D`` bins of an action are chosen, and what each sees; made by `tokens`."""

    grid: Grid
    level: np.ndarray  # [T] int32: the level at which a token chooses
    dimension: np.ndarray  # [T] int32: and the dimension
    # What a token sees of each dimension: digits of its cell, cell // divisor % intervals, as one of ``intervals``
    divisor: np.ndarray  # [T, D] int32
    intervals: np.ndarray  # [T, D] int32; where it is 1 nothing is seen

    @property
    def size(self) -> int:
        """``T``."""
        return len(self.level)


def tokens(
    grid: Grid, dimensions: int, order: str = "level", *, see_levels: bool = True, see_dimensions: bool = True
) -> Tokens:
    """The tokens of actions with ``D`` dimensions.

    The context of a token is a vector in R^D: of every dimension the centre of the interval that the tokens before
    it have cut out, 0 for one that is still whole. Two switches, the paper's ablations, leave parts of it out. Of
    what a token at level ``l`` of dimension ``d`` would see,

    - without ``see_levels`` other levels than ``l`` are left out: of a dimension whose bin at level ``l`` has been
      chosen, the context holds that bin's centre *within its interval*, scaled to [-1, 1], and 0 for all others;
    - without ``see_dimensions`` other dimensions than ``d`` are left out: 0 stands for them, and with the centre of
      dimension ``d`` after its coarser levels the dimensions are independent of each other;
    - without both there is nothing left, all contexts are 0 and all tokens independent.

    Args:
      grid: levels and bins.
      dimensions: ``D``.
      order: ``level`` chooses all dimensions at one level before the next level (the paper's); ``dimension`` chooses
        all levels of one dimension before the next dimension (its ablation).
      see_levels: see above.
      see_dimensions: see above.

    Raises:
      ValueError: an unknown order, or no dimensions.
    """
    require_choice("order", order, ORDERS)
    if dimensions < 1:
        raise ValueError(f"actions of {dimensions} dimensions have no tokens: they need at least 1")
    levels, base = grid.levels, grid.bins
    if order == "level":
        level, dimension = np.divmod(np.arange(levels * dimensions), dimensions)
    else:
        dimension, level = np.divmod(np.arange(levels * dimensions), levels)
    other, column, at = np.arange(dimensions), dimension[:, None], level[:, None]
    # [T, D]: how often the tokens before have cut each dimension
    depth = (
        at + (other < column)
        if order == "level"
        else np.where(other < column, levels, (other == column) * at)
    )
    if see_levels:
        divisor, intervals = base ** (levels - depth), base**depth
    else:
        divisor, intervals = base ** (levels - 1 - at) + 0 * depth, np.where(depth > at, base, 1)
    if not see_dimensions:
        intervals = np.where(other == column, intervals, 1)
    return Tokens(grid, *(x.astype(np.int32) for x in (level, dimension, divisor, intervals)))


def chosen(tokens: Tokens, cells: Array) -> Array:
    """Cells [..., D] -> the bin [..., T] int32 that each token chooses."""
    return cells[..., tokens.dimension] // tokens.grid.place(tokens.level) % tokens.grid.bins


def contexts(tokens: Tokens, cells: Array) -> Array:
    """Cells [..., D] -> the context [..., T, D] float32 of every token, from the bins of the tokens before it.

    A few integer operations, made where they are used: they take no measurable part of an update, while the contexts
    of a whole dataset would be ``T D`` numbers a row.
    """
    return _centre(cells[..., None, :] // tokens.divisor % tokens.intervals, jnp.asarray(tokens.intervals))


def context(tokens: Tokens, token: int | Array, cells: Array) -> Array:
    """The context [..., D] float32 of one token; digits that it cannot know yet make no difference."""
    intervals = jnp.asarray(tokens.intervals)[token]
    return _centre(cells // jnp.asarray(tokens.divisor)[token] % intervals, intervals)


def append(tokens: Tokens, token: int | Array, cells: Array, bins: Array) -> Array:
    """Cells [..., D] with the bin [...] that ``token`` chooses, whose digit was still 0."""
    place = tokens.grid.place(jnp.asarray(tokens.level)[token])
    mine = jnp.arange(cells.shape[-1]) == jnp.asarray(tokens.dimension)[token]
    return cells + mine * (bins.astype(cells.dtype) * place)[..., None]
