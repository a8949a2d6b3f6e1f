"""What all pictures have in common: colours, axes and panels, the legend of lines, and how a PNG is written."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.log import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color universal design": told apart with any colour vision. Yellow is left out (too pale
# for lines); line styles start to differ where colours repeat.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
INK = "#333333"
RATE = (-0.03, 1.03)  # the axis of success rates, so that figures compare; 0 and 1 are inside
MARKED = 8  # the most points of a line that are marked
_WIDTHS = (4.2, 1.8)  # of the first and the last of several curves: where they coincide, each still shows
_LABEL = 28  # characters of a line of a label in a legend
# Inches of a legend: a line of a label, the space between labels, a character; and what is above and below the axes.
_LINE, _BETWEEN, _CHARACTER, _AROUND = 0.19, 0.08, 0.09, 1.2
_OVERLAP = "widths only keep lines\nthat overlap visible"


def single(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """One pair of axes alone, with larger numbers than those of several."""
    figure, (axes,) = panels(1, 1, size, ticks=11)
    return figure, axes


def panels(count: int, columns: int, size: tuple[float, float], ticks: int = 10) -> tuple[Figure, list[Axes]]:
    """``count`` axes of ``size`` each, row by row; the last row may have fewer than ``columns``.

    Args:
        count: how many.
        columns: how many in a row.
        size: of each, in inches.
        ticks: the size of the numbers beside them.
    """
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=150, layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every[count:]:
        axes.remove()
    for axes in every[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=ticks, color=INK, labelcolor=INK)
    return figure, every[:count]


def widths(count: int) -> np.ndarray:
    """Of this many lines, in the order that they are drawn."""
    return np.linspace(*_WIDTHS, count) if count > 1 else np.array([2.2])


def suptitle(figure: Figure, title: str) -> None:
    """A title above all panels, which have titles of their own."""
    if title:
        figure.suptitle(f"{title}\n", fontsize=13, x=0.01, ha="left", linespacing=0.5)


def legend(axes: Axes, note: str, count: int) -> None:
    """The legend of this many lines, whose widths would look like emphasis; long labels are broken.

    It stands beside the axes, which are as much narrower as it is wide, and the figure grows until it has room for it.
    """
    handles, labels = axes.get_legend_handles_labels()
    labels = [textwrap.fill(label, _LABEL, break_long_words=False) for label in labels]
    title = "\n".join(filter(None, [note, _OVERLAP * (count > 1)]))
    _make_room(axes, labels, title)
    axes.legend(
        handles,
        labels,
        title=title,
        title_fontsize=9,
        alignment="left",
        fontsize=11,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
    )


def _make_room(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Makes the figure as high and as wide as a legend with these labels needs beside ``axes``."""
    figure: Any = axes.get_figure(root=True)
    place: Any = axes.get_subplotspec()
    rows = place.get_gridspec().nrows
    lines = [line for label in labels for line in label.split("\n")]
    height = _LINE * len(lines) + _BETWEEN * len(labels) + _LINE * len(title.split("\n")) + _AROUND
    beyond = max(map(len, lines), default=0) - _LABEL
    width, now = figure.get_size_inches()
    figure.set_size_inches(width + _CHARACTER * max(beyond, 0), max(now, rows * height))


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes the figure as a PNG, whole or not at all."""
    with replacing(path) as partial:
        figure.savefig(partial, format="png")
