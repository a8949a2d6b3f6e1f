"""The figure of a dataset: how its episodes score and last, and which actions they take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from rl.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def dataset_card(
    path: str | os.PathLike[str],
    returns: ArrayLike,
    lengths: ArrayLike,
    coverage: ArrayLike,
    *,
    references: Mapping[str, float] | None = None,
    title: str = "",
) -> None:
    """Draws how the episodes of a dataset score and last, and which actions they take.

    Args:
        path: the PNG, replaced as a whole.
        returns: [E], one per episode.
        lengths: [E].
        coverage: [D, bins] shares of each action dimension on [-1, 1], or [A] of each discrete action.
        references: {label: return} drawn as vertical lines.
        title: above it all.

    Raises:
        ValueError: returns and lengths are not [E] with E > 0, or coverage has other axes.
    """
    returns, lengths, coverage = (np.asarray(array, float) for array in (returns, lengths, coverage))
    if returns.ndim != 1 or returns.shape != lengths.shape or not returns.size or coverage.ndim not in (1, 2):
        raise ValueError(
            f"returns and lengths must be [E], coverage [D, bins] or [A]: got {returns.shape}, {lengths.shape}, "
            f"{coverage.shape}"
        )
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(13.0, 4.2), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, values, xlabel in ((left, returns, "return"), (middle, lengths, "steps")):
        low, high = np.min(values), np.max(values)
        # The same but for rounding: too close for bins.
        if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
            low, high = low - 0.5, high + 0.5
        axes.hist(values, bins=40, range=(low, high), color=style.COLOURS[0], alpha=0.85)
        axes.set_xlabel(f"{xlabel} of an episode", fontsize=12)
        axes.set_ylabel("episodes", fontsize=12)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=values is lengths))
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        for axis in (axes.xaxis, axes.yaxis):  # 1,000 in full, not as a sum of 0.0 and 1e3
            axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.10g}"))
        axes.spines[["top", "right"]].set_visible(False)
    for (label, value), dashes in zip((references or {}).items(), ("--", ":"), strict=False):
        left.axvline(value, color=style.INK, linestyle=dashes, linewidth=1.4, label=f"{label}, {value:.0f}")
    if references:
        left.legend(fontsize=10, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _coverage(figure, right, coverage)
    style.suptitle(figure, title)
    style.save(figure, path)


def _coverage(figure: Figure, axes: Axes, coverage: np.ndarray) -> None:
    """A bar per discrete action, or a row per dimension, darker where more actions lie."""
    if coverage.ndim == 1:
        axes.bar(range(len(coverage)), coverage, color=style.COLOURS[0], alpha=0.85)
        axes.set_xlabel("action", fontsize=12)
        axes.set_ylabel("share of steps", fontsize=12)
        return
    seen = np.where(coverage > 0, coverage, np.nan)
    image = axes.imshow(
        seen, aspect="auto", norm="log", cmap="viridis", extent=(-1, 1, len(seen) - 0.5, -0.5)
    )
    axes.set_yticks(range(len(seen)))
    axes.set_xticks((-1, -0.5, 0, 0.5, 1))
    axes.set_xlabel("action (white: never taken)", fontsize=12)
    axes.set_ylabel("dimension", fontsize=12)
    figure.colorbar(image, ax=axes, label="share of steps")
