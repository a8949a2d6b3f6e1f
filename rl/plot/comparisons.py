"""Final results beside each other: against a parameter, or a bar for each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from rl.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def lines(
    path: str | os.PathLike[str],
    curves: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]],
    xlabel: str,
    ylabel: str,
    *,
    published: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    title: str = "",
    note: str = "mean, 95 % interval",
    logarithmic: bool = False,
    rate: bool = False,
) -> None:
    """Draws results against a parameter, with intervals, and beside them what others reported.

    Args:
        path: the PNG, replaced as a whole.
        curves: {label: (x [T], value [T], low [T], high [T])}; NaN bounds draw no interval.
        xlabel: what the parameter is.
        ylabel: what the values are, with their unit or scale.
        published: {label: (x [T], value [T])}, drawn as crosses in the colour of the curve with that label.
        title: above the axes.
        note: what the lines and bands are, at the head of the legend.
        logarithmic: both axes.
        rate: the values are shares, and their axis goes from 0 to 1.

    Raises:
        ValueError: no curves, one whose arrays differ in length, or published values without a curve.
    """
    figure, axes = style.single((8.0, max(4.5, 1.2 + 0.27 * len(curves))))
    _parameter_lines(path, axes, curves, published or {})
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        places = np.unique(np.concatenate([np.asarray(curve[0], float) for curve in curves.values()]))
        if len(places) <= style.MARKED:
            axes.set_xticks(places, [f"{place:,g}" for place in places])
            axes.set_xticks([], minor=True)
        if len(places) == 1:
            axes.set_xlim(places[0] / 2, 2 * places[0])
    if rate:
        axes.set_ylim(style.RATE)
    axes.set_xlabel(xlabel, fontsize=12)
    axes.set_ylabel(ylabel, fontsize=12)
    axes.set_title(title, fontsize=13, loc="left")
    style.legend(axes, note, len(curves))
    style.save(figure, path)


def lines_in_panels(
    path: str | os.PathLike[str],
    panels: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]]],
    xlabel: str,
    ylabel: str,
    *,
    published: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]] | None = None,
    title: str = "",
    note: str = "mean, 95 % interval",
    shared: bool = True,
) -> None:
    """Draws results against a parameter as `lines`, side by side: too many for one picture, or of other data.

    Args:
        path: the PNG, replaced as a whole.
        panels: {title of a panel: {label: (x [T], value [T], low [T], high [T])}}.
        xlabel: what the parameter is.
        ylabel: what the values are, with their unit or scale.
        published: {title of a panel: {label: (x [T], value [T])}}, as in `lines`.
        title: above the panels.
        note: what the lines and bands are, at the head of the legends, if not in their labels.
        shared: one y axis for all; False where heights do not compare.

    Raises:
        ValueError: no panels or curves, one whose arrays differ in length, or published values without a curve.
    """
    if not panels:
        raise ValueError(f"nothing to draw in {path}: no panels")
    figure, row = style.panels(len(panels), len(panels), (4.6, 4.6))
    for axes, (name, curves) in zip(row, panels.items(), strict=True):
        _parameter_lines(path, axes, curves, (published or {}).get(name, {}))
        if shared and axes is not row[0]:
            axes.sharey(row[0])
        axes.set_xlabel(xlabel, fontsize=12)
        axes.set_ylabel(ylabel, fontsize=12)
        axes.set_title(name, fontsize=11)
        axes.legend(title=note or None, title_fontsize=8, alignment="left", fontsize=9, frameon=False)
    style.suptitle(figure, title)
    style.save(figure, path)


def _parameter_lines(
    path: str | os.PathLike[str],
    axes: Axes,
    curves: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]],
    published: Mapping[str, tuple[ArrayLike, ArrayLike]],
) -> None:
    """The curves of `lines`, with crosses in their colours."""
    if not curves:
        raise ValueError(f"nothing to draw in {path}: no curves")
    if unknown := sorted(published.keys() - curves.keys()):
        raise ValueError(f"published values of {', '.join(unknown)} have no curve in {path}")
    widths = style.widths(len(curves))
    for index, (label, curve) in enumerate(curves.items()):
        arrays = [np.asarray(array, float) for array in curve]
        if any(array.shape != arrays[0].shape or array.ndim != 1 for array in arrays):
            raise ValueError(
                f"{label!r}: x, value, low and high must be [T], got {[array.shape for array in arrays]}"
            )
        x, value, low, high = arrays
        colour, dashes = (
            style.COLOURS[index % len(style.COLOURS)],
            style.STYLES[index // len(style.COLOURS) % 4],
        )
        marks: dict[str, Any] = (
            {"marker": "o", "markersize": 3 + widths[index]} if len(x) <= style.MARKED else {}
        )
        axes.plot(x, value, color=colour, linestyle=dashes, linewidth=widths[index], label=label, **marks)
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        if len(x) == 1:  # of which the band has no width
            axes.plot([*x, *x], [*low, *high], color=colour, linewidth=1.4)
        if label in published:
            axes.plot(*published[label], color=colour, linestyle="", marker="x", markersize=7, zorder=3)
    if published:
        axes.plot([], [], color=style.INK, linestyle="", marker="x", markersize=7, label="published")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)


def bars(
    path: str | os.PathLike[str],
    scores: Mapping[str, tuple[float, float, float]],
    xlabel: str,
    *,
    title: str = "",
    rate: bool = False,
) -> None:
    """Draws final scores with their intervals, one row each, in the order given from the top.

    Args:
        path: the PNG, replaced as a whole.
        scores: {label: (score, low, high)}; NaN bounds draw no interval.
        xlabel: what the scores are, and what the interval is.
        title: above the axes.
        rate: the scores are shares, and their axis goes from 0 to 1.

    Raises:
        ValueError: no scores.
    """
    if not scores:
        raise ValueError(f"nothing to draw in {path}: no scores")
    figure, axes = style.single((7.2, 1.2 + 0.45 * len(scores)))
    for row, (value, low, high) in enumerate(scores.values()):
        axes.barh(row, value, height=0.62, color=style.COLOURS[0], alpha=0.85)
        axes.plot([low, high], [row, row], color=style.INK, linewidth=2, solid_capstyle="butt")
        edge = max(x for x in (value, high, 0.0) if np.isfinite(x))
        number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # without an exponent
        axes.annotate(
            number, (edge, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=11
        )
    axes.set_yticks(range(len(scores)), list(scores), fontsize=11)
    axes.invert_yaxis()
    if rate:
        axes.set_xlim(0, 1.1)  # with room for the number beside a bar of 1
        axes.set_xticks(np.linspace(0, 1, 6))
    else:
        axes.margins(x=0.1)
        axes.locator_params(axis="x", nbins=5)  # long numbers would run into each other
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    figure.supxlabel(xlabel, fontsize=12)  # under the whole figure: beside long labels the axes are narrow
    axes.set_title(title, fontsize=13, loc="left")
    style.save(figure, path)
