"""Pictures of results: curves and final comparisons, as PNG files. They read arrays, never run folders.

Figures are drawn without pyplot: no global state, no display, safe in threads and notebooks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rl import statistics
from rl.log import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color universal design": told apart with any colour vision. Yellow is left out (too pale
# for lines); line styles start to differ where colours repeat.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_INK = "#333333"
_WIDTHS = (4.2, 1.8)  # of the first and the last of several curves: where they coincide, each still shows
_OVERLAP = "widths only keep lines\nthat overlap visible"
_RATE = (-0.03, 1.03)  # the axis of success rates, so that figures compare; 0 and 1 are inside
_BAND = 3  # seeds from which on an interval is drawn
_MARKED = 8  # the most points of a line that are marked
_UNBOUNDED = "intervals of few seeds may reach\nbeyond the scores that there are"


def learning_curve(
    path: str | os.PathLike[str],
    runs: Mapping[str, tuple[ArrayLike, ArrayLike]],
    ylabel: str,
    *,
    references: Mapping[str, float] | None = None,
    title: str = "",
    xlabel: str = "updates",
    rate: bool = False,
    intervals: bool = True,
    logarithmic: bool = False,
) -> None:
    """Draws each run's mean over seeds, its 95 % interval (`rl.statistics.interval`) and every seed as a thin line.

    The interval of two seeds, ten times as wide as they are apart, would hide all else, and is left out.

    Args:
        path: the PNG, replaced as a whole.
        runs: {label: (steps [T], scores [T, S])}. Where a score is not finite the lines have a gap.
        ylabel: what the scores are, with their unit or scale.
        references: {label: score} drawn as horizontal dashed lines: a behaviour policy, a published result.
        title: above the axes.
        xlabel: what the steps count.
        rate: the scores are success rates, whose intervals stay within 0 and 1 (`rl.statistics.rate_interval`), as does
            the axis.
        intervals: False leaves them out: those of many runs with few seeds cover each other.
        logarithmic: the axis of scores, which are positive: errors, say.

    Raises:
        ValueError: no runs, or a run whose scores are not [T, S].
    """
    if not runs:
        raise ValueError(f"nothing to draw in {path}: no runs")
    from matplotlib.ticker import LogLocator

    references = references or {}
    figure, axes = _axes((8.0, max(4.5, 1.2 + 0.27 * (len(runs) + len(references)))))
    _curves(axes, runs, rate, list(references.values()), intervals)
    if logarithmic:
        scores = np.concatenate([np.ravel(scores) for _, scores in runs.values()])
        axes.set_yscale("log")  # which cuts bands at the end of the axis where they reach below 0
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_yticks([], minor=True)
        axes.set_ylim(0.8 * scores[scores > 0].min(), 1.25 * np.nanmax(scores))
    for label, score in references.items():
        axes.axhline(score, color=_INK, linewidth=1.4, linestyle=(0, (4, 2)), zorder=1.5, label=label)
    axes.set_xlabel(xlabel, fontsize=12)
    axes.set_ylabel(ylabel, fontsize=12)
    axes.set_title(title, fontsize=13, loc="left")
    _legend(axes, _what_is_drawn(runs.values(), rate, intervals), len(runs))
    _save(figure, path)


def learning_curves(
    path: str | os.PathLike[str],
    panels: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    *,
    title: str = "",
    xlabel: str = "updates",
    ylabel: str = "",
    rate: bool = False,
    columns: int = 4,
    intervals: bool = True,
) -> None:
    """Draws several scores of the same runs side by side, each panel as `learning_curve`.

    Args:
        path: the PNG, replaced as a whole.
        panels: {what the scores are: {label: (steps [T], scores [T, S])}}, with the same labels in all.
        title: above the panels.
        xlabel: what the steps count.
        ylabel: what the scores are in all panels, whose keys are their titles then: names of tasks, say.
        rate: all scores are success rates, as in `learning_curve`.
        columns: panels in a row, the legend beside the first row.
        intervals: False leaves them out: those of many runs with few seeds cover each other.

    Raises:
        ValueError: no panels, panels of different runs, or a run whose scores are not [T, S].
    """
    labels = [list(runs) for runs in panels.values()]
    if not labels or not labels[0] or any(names != labels[0] for names in labels):
        raise ValueError(f"the panels of {path} must show the same runs, at least one; got {labels}")
    columns = min(columns, len(panels))
    figure, row = _panels(len(panels), columns, (5.2, 4.4))
    for axes, (name, runs) in zip(row, panels.items(), strict=True):
        _curves(axes, runs, rate, intervals=intervals)
        axes.set_xlabel(xlabel, fontsize=12)
        axes.set_ylabel(ylabel or name, fontsize=12)
        if ylabel:
            axes.set_title(name, fontsize=11)
    _suptitle(figure, title)
    every = [run for runs in panels.values() for run in runs.values()]
    _legend(row[columns - 1], _what_is_drawn(every, rate, intervals), len(labels[0]))
    _save(figure, path)


def maps(
    path: str | os.PathLike[str],
    images: Mapping[str, ArrayLike],
    extent: float,
    limits: tuple[float, float],
    *,
    squares: Mapping[str, float] | None = None,
    title: str = "",
    columns: int = 3,
) -> None:
    """Draws functions on the square [-extent, extent]^2 as pictures in the same colours.

    Args:
        path: the PNG, replaced as a whole.
        images: {label: values [H, W]}; the first axis is y, upwards. What is beyond the colours is said in words.
        extent: half the side of the square.
        limits: values where the colours start and end.
        squares: {label: half the side} of squares around the origin, drawn as lines.
        title: above all.
        columns: pictures in a row.

    Raises:
        ValueError: no images, or one that is not [H, W].
    """
    figure, row = _pictures(
        path,
        images,
        limits,
        columns,
        (3.6, 3.5),
        title,
        origin="lower",
        extent=(-extent, extent, -extent, extent),
    )
    for axes in row:
        for (name, half), style in zip((squares or {}).items(), _STYLES, strict=False):
            edge = [-half, half, half, -half, -half]
            axes.plot(
                edge, [-half, -half, half, half, -half], "w", linestyle=style, linewidth=1.3, label=name
            )
        axes.label_outer()
    if squares:
        handles, names = row[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower left", ncols=2, facecolor="#555555", labelcolor="white"
        )
    _save(figure, path)


def cells(
    path: str | os.PathLike[str],
    images: Mapping[str, ArrayLike],
    limits: tuple[float, float],
    *,
    title: str = "",
    columns: int = 3,
) -> None:
    """Draws functions on the cells of a grid as pictures in the same colours.

    Args:
        path: the PNG, replaced as a whole.
        images: {label: values [H, W]}; row 0 is at the top. Where a value is NaN there is a wall.
        limits: values where the colours start and end.
        title: above all.
        columns: pictures in a row.

    Raises:
        ValueError: no images, or one that is not [H, W].
    """
    figure, row = _pictures(path, images, limits, columns, (3.2, 2.7), title)
    for axes in row:
        axes.set_axis_off()
    _save(figure, path)


class Route(NamedTuple):
    """What an episode looks like from above."""

    places: ArrayLike  # [T, objects, 2]
    goal: ArrayLike  # [objects, 2]
    times: ArrayLike = ()  # [K] at which a subgoal was pursued
    subgoals: ArrayLike = ()  # [K, objects, 2]


def routes(
    path: str | os.PathLike[str],
    episodes: Mapping[str, Route],
    walls: ArrayLike = (),
    side: float = 1.0,
    *,
    objects: Sequence[str] = (),
    title: str = "",
    columns: int = 5,
) -> None:
    """Draws the paths of objects from start to goal, and their subgoals, seen from above.

    Args:
        path: the PNG, replaced as a whole.
        episodes: {label: route}, a picture each. Subgoals are joined to the places from where they were pursued.
        walls: [W, 2], the middles of squares that are in the way.
        side: of these squares, the cells of a maze.
        objects: names of several objects, of which each has a colour.
        title: above all.
        columns: pictures in a row.

    Raises:
        ValueError: no episodes, or one whose arrays do not fit each other.
    """
    if not episodes:
        raise ValueError(f"nothing to draw in {path}: no episodes")
    columns, squares = min(columns, len(episodes)), np.asarray(walls, float).reshape(-1, 2)
    width = max(3.4, 1.8 * len(objects) / columns)  # of which the legend has a column for each object
    figure, row = _panels(len(episodes), columns, (width, 3.2))
    unit = " (cells)" if len(squares) and side == 1 else ""
    for axes, (label, episode) in zip(row, episodes.items(), strict=True):
        _walls(axes, squares, side)
        _route(axes, label, episode, objects, squares, side)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel(f"x{unit}", fontsize=10)
        axes.set_ylabel(f"y{unit}", fontsize=10)
        axes.set_aspect("equal")
    handles, names = row[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(objects) or 5, fontsize=9, frameon=False
    )
    _suptitle(figure, title)
    _save(figure, path)


def _walls(axes: Axes, squares: np.ndarray, side: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [Rectangle((x - side / 2, y - side / 2), side, side) for x, y in squares]
    axes.add_collection(PatchCollection(patches, facecolor="#BBBBBB", edgecolor="none"))


def _route(
    axes: Axes, label: str, episode: Route, objects: Sequence[str], squares: np.ndarray, side: float
) -> None:
    """One picture of `routes`, as large as the walls, paths and goals: a subgoal may lie anywhere."""
    places, goal = np.asarray(episode.places, float), np.asarray(episode.goal, float)
    times = np.asarray(episode.times, int)
    subgoals = np.asarray(episode.subgoals, float).reshape(len(times), *goal.shape)
    if places.ndim != 3 or not len(places) or places.shape[1:] != goal.shape or goal.shape[-1] != 2:
        raise ValueError(
            f"{label!r}: places must be [T, objects, 2] and the goal [objects, 2], got {places.shape} and {goal.shape}"
        )
    for number, end in enumerate(goal):
        colour, path = _COLOURS[number % len(_COLOURS)], places[:, number]
        name = f"{objects[number]}: " if objects else ""
        axes.plot(*path.T, color=colour, linewidth=1.4, label=f"{name}path")
        joined = f"{name}from a position to the subgoal pursued there"
        for index, (time, subgoal) in enumerate(zip(times, subgoals[:, number], strict=True)):
            dotted: dict[str, Any] = {"color": colour, "linewidth": 0.7, "linestyle": ":"}
            axes.plot(*np.stack([path[time], subgoal]).T, label=None if index else joined, **dotted)
            axes.plot(*path[time], color=colour, marker=".", markersize=5)
        line: dict[str, Any] = {"color": colour, "linestyle": "", "zorder": 3}
        axes.plot(*path[:1].T, marker="o", markersize=7, label=f"{name}start", **line)
        if len(times):
            axes.plot(*subgoals[:, number].T, marker="D", mfc="none", label=f"{name}subgoals", **line)
        axes.plot(*end[:, None], marker="*", markersize=13, label=f"{name}goal", **line)
    everything = np.concatenate([places.reshape(-1, 2), goal, squares - side / 2, squares + side / 2])
    low, high = everything.min(0), everything.max(0)
    margin = 0.05 * (high - low).max()
    axes.set_xlim(low[0] - margin, high[0] + margin)
    axes.set_ylim(low[1] - margin, high[1] + margin)


def strips(
    path: str | os.PathLike[str], rows: Mapping[str, Mapping[str, ArrayLike]], title: str = ""
) -> None:
    """Draws rows of pictures, such as those of an episode from its start to its end.

    Args:
        path: the PNG, replaced as a whole.
        rows: {label: {caption: picture [H, W, 3] uint8}}, at least one of each.
        title: above all.

    Raises:
        ValueError: no pictures.
    """
    columns = max((len(pictures) for pictures in rows.values()), default=0)
    if not columns:
        raise ValueError(f"nothing to draw in {path}: no pictures")
    figure, panels = _panels(len(rows) * columns, columns, (2.0, 2.3))
    for axes in panels:
        axes.set_axis_off()
    for number, (label, pictures) in enumerate(rows.items()):
        for place, (caption, picture) in enumerate(pictures.items()):
            axes = panels[number * columns + place]
            axes.imshow(np.asarray(picture))
            axes.set_title(caption if place else f"{label}\n{caption}", fontsize=9, loc="left")
    _suptitle(figure, title)
    _save(figure, path)


def animation(path: str | os.PathLike[str], frames: Sequence[np.ndarray]) -> None:
    """Writes pictures [H, W, 3] uint8 as a GIF that repeats, each shown for a tenth of a second.

    Raises:
        ValueError: no frames.
    """
    from PIL import Image

    if not len(frames):
        raise ValueError(f"nothing to show in {path}: no frames")
    first, *others = (Image.fromarray(frame) for frame in frames)
    with replacing(path) as partial:
        first.save(partial, format="GIF", save_all=True, append_images=others, duration=100, loop=0)


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
    figure, axes = _axes((8.0, max(4.5, 1.2 + 0.27 * len(curves))))
    _parameter_lines(path, axes, curves, published or {})
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        places = np.unique(np.concatenate([np.asarray(curve[0], float) for curve in curves.values()]))
        if len(places) <= _MARKED:
            axes.set_xticks(places, [f"{place:,g}" for place in places])
            axes.set_xticks([], minor=True)
        if len(places) == 1:
            axes.set_xlim(places[0] / 2, 2 * places[0])
    if rate:
        axes.set_ylim(_RATE)
    axes.set_xlabel(xlabel, fontsize=12)
    axes.set_ylabel(ylabel, fontsize=12)
    axes.set_title(title, fontsize=13, loc="left")
    _legend(axes, note, len(curves))
    _save(figure, path)


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
    figure, row = _panels(len(panels), len(panels), (4.6, 4.6))
    for axes, (name, curves) in zip(row, panels.items(), strict=True):
        _parameter_lines(path, axes, curves, (published or {}).get(name, {}))
        if shared and axes is not row[0]:
            axes.sharey(row[0])
        axes.set_xlabel(xlabel, fontsize=12)
        axes.set_ylabel(ylabel, fontsize=12)
        axes.set_title(name, fontsize=11)
        axes.legend(title=note or None, title_fontsize=8, alignment="left", fontsize=9, frameon=False)
    _suptitle(figure, title)
    _save(figure, path)


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
    widths = _widths(len(curves))
    for index, (label, curve) in enumerate(curves.items()):
        arrays = [np.asarray(array, float) for array in curve]
        if any(array.shape != arrays[0].shape or array.ndim != 1 for array in arrays):
            raise ValueError(
                f"{label!r}: x, value, low and high must be [T], got {[array.shape for array in arrays]}"
            )
        x, value, low, high = arrays
        colour, style = _COLOURS[index % len(_COLOURS)], _STYLES[index // len(_COLOURS) % 4]
        marks: dict[str, Any] = {"marker": "o", "markersize": 3 + widths[index]} if len(x) <= _MARKED else {}
        axes.plot(x, value, color=colour, linestyle=style, linewidth=widths[index], label=label, **marks)
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        if len(x) == 1:  # of which the band has no width
            axes.plot([*x, *x], [*low, *high], color=colour, linewidth=1.4)
        if label in published:
            axes.plot(*published[label], color=colour, linestyle="", marker="x", markersize=7, zorder=3)
    if published:
        axes.plot([], [], color=_INK, linestyle="", marker="x", markersize=7, label="published")
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
    figure, axes = _axes((7.2, 1.2 + 0.45 * len(scores)))
    for row, (value, low, high) in enumerate(scores.values()):
        axes.barh(row, value, height=0.62, color=_COLOURS[0], alpha=0.85)
        axes.plot([low, high], [row, row], color=_INK, linewidth=2, solid_capstyle="butt")
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
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    figure.supxlabel(xlabel, fontsize=12)  # under the whole figure: beside long labels the axes are narrow
    axes.set_title(title, fontsize=13, loc="left")
    _save(figure, path)


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
        axes.hist(values, bins=40, color=_COLOURS[0], alpha=0.85)
        axes.set_xlabel(f"{xlabel} of an episode", fontsize=12)
        axes.set_ylabel("episodes", fontsize=12)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=values is lengths))
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        for axis in (axes.xaxis, axes.yaxis):  # 1,000 in full, not as a sum of 0.0 and 1e3
            axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.10g}"))
        axes.spines[["top", "right"]].set_visible(False)
    for (label, value), style in zip((references or {}).items(), ("--", ":"), strict=False):
        left.axvline(value, color=_INK, linestyle=style, linewidth=1.4, label=f"{label}, {value:.0f}")
    if references:
        left.legend(fontsize=10, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _coverage(figure, right, coverage)
    _suptitle(figure, title)
    _save(figure, path)


def _coverage(figure: Figure, axes: Axes, coverage: np.ndarray) -> None:
    """A bar per discrete action, or a row per dimension, darker where more actions lie."""
    if coverage.ndim == 1:
        axes.bar(range(len(coverage)), coverage, color=_COLOURS[0], alpha=0.85)
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


def _pictures(
    path: str | os.PathLike[str],
    images: Mapping[str, ArrayLike],
    limits: tuple[float, float],
    columns: int,
    size: tuple[float, float],
    title: str,
    **placed: Any,
) -> tuple[Figure, list[Axes]]:
    """The images [H, W] in the same colours, each ``placed`` as `imshow` says; the axes that hold one."""
    pictures = {label: np.asarray(image, float) for label, image in images.items()}
    if not pictures or any(picture.ndim != 2 for picture in pictures.values()):
        raise ValueError(
            f"{path} needs pictures [H, W], got shapes {[picture.shape for picture in pictures.values()]}"
        )
    figure, row = _panels(len(pictures), min(columns, len(pictures)), size)
    for axes, (label, picture) in zip(row, pictures.items(), strict=True):
        drawn = axes.imshow(picture, vmin=limits[0], vmax=limits[1], cmap="viridis", **placed)
        axes.set_title(f"{label}\nfrom {np.nanmin(picture):.3g} to {np.nanmax(picture):.3g}", fontsize=10)
    figure.colorbar(drawn, ax=row, extend="both", shrink=0.8)
    _suptitle(figure, title)
    return figure, row


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11, color=_INK, labelcolor=_INK)
    return figure, axes


def _panels(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """``count`` axes of ``size`` each, row by row; the last row may have fewer than ``columns``."""
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=150, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=10, color=_INK, labelcolor=_INK)
    return figure, panels[:count]


def _widths(count: int) -> np.ndarray:
    """Of this many lines, in the order that they are drawn."""
    return np.linspace(*_WIDTHS, count) if count > 1 else np.array([2.2])


def _curves(
    axes: Axes,
    runs: Mapping[str, tuple[ArrayLike, ArrayLike]],
    rate: bool,
    references: Sequence[float] = (),
    intervals: bool = True,
) -> None:
    """The runs {label: (steps [T], scores [T, S])} of one panel, to which ``references`` will be added."""
    from matplotlib.ticker import EngFormatter

    interval = statistics.rate_interval if rate else statistics.interval
    widths = _widths(len(runs))
    for index, (label, run) in enumerate(runs.items()):
        steps, scores = np.asarray(run[0]), np.asarray(run[1], float)
        if steps.ndim != 1 or scores.ndim != 2 or len(steps) != len(scores):
            raise ValueError(
                f"{label!r}: steps must be [T] and scores [T, S], got shapes {steps.shape} and {scores.shape}"
            )
        colour, style = _COLOURS[index % len(_COLOURS)], _STYLES[index // len(_COLOURS) % 4]
        _curve(
            axes,
            steps,
            scores,
            interval if intervals else None,
            label,
            {"color": colour, "linestyle": style, "linewidth": widths[index]},
        )
    if rate:
        axes.set_ylim(_RATE)
    else:
        _cut_bands(axes, [*(np.asarray(scores, float) for _, scores in runs.values()), np.array(references)])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)


def _cut_bands(axes: Axes, scores: Sequence[np.ndarray]) -> None:
    """Limits the axis to the scores and half their range beside: the interval of two seeds is ten times as wide."""
    values = np.concatenate([x[np.isfinite(x)] for x in scores])
    if not values.size or values.min() == values.max():
        return
    least, most, (low, high) = values.min(), values.max(), axes.get_ylim()
    near, far = 0.05 * (most - least), 0.5 * (most - least)
    axes.set_ylim(max(min(low, least - near), least - far), min(max(high, most + near), most + far))


def _suptitle(figure: Figure, title: str) -> None:
    """A title above all panels, which have titles of their own."""
    if title:
        figure.suptitle(f"{title}\n", fontsize=13, x=0.01, ha="left", linespacing=0.5)


def _what_is_drawn(runs: Iterable[tuple[ArrayLike, ArrayLike]], rate: bool, intervals: bool) -> str:
    """The title of a legend of learning curves (steps [T], scores [T, S])."""
    most = max(np.shape(scores)[1] for _, scores in runs)
    if most == 1:
        return ""
    if not intervals or most < _BAND:
        return "mean, each seed"
    return "mean, 95 % interval, each seed" + (f"\n{_UNBOUNDED}" if not rate else "")


def _curve(
    axes: Axes, steps: np.ndarray, scores: np.ndarray, interval: Any, label: str, look: dict[str, Any]
) -> None:
    colour = look["color"]
    finite = np.isfinite(scores).all(1)
    count = scores.shape[1]
    if count > 1:
        axes.plot(steps, scores, color=colour, linewidth=0.7, alpha=0.35)
    if count >= _BAND and interval is not None:
        band = [interval(row) if ok else (np.nan, np.nan) for row, ok in zip(scores, finite, strict=True)]
        low, high = np.transpose(band) if band else (steps, steps)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        steps,
        np.where(finite, scores.mean(1), np.nan),
        **look,
        marker="o" if len(steps) == 1 else "",
        label=f"{label}, {count} seed{'s' * (count > 1)}",
    )


def _legend(axes: Axes, note: str, count: int) -> None:
    """The legend of this many lines, whose widths would look like emphasis."""
    axes.legend(
        title="\n".join(filter(None, [note, _OVERLAP * (count > 1)])),
        title_fontsize=9,
        alignment="left",
        fontsize=11,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
    )


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    with replacing(path) as partial:
        figure.savefig(partial, format="png")
