"""Where things are: values on a plane or a grid, paths of episodes, and pictures of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rl.log import replacing
from rl.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        for (name, half), dashes in zip((squares or {}).items(), style.STYLES, strict=False):
            edge = [-half, half, half, -half, -half]
            axes.plot(
                edge, [-half, -half, half, half, -half], "w", linestyle=dashes, linewidth=1.3, label=name
            )
        axes.label_outer()
    if squares:
        handles, names = row[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower left", ncols=2, facecolor="#555555", labelcolor="white"
        )
    style.save(figure, path)


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
    style.save(figure, path)


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
    figure, row = style.panels(len(episodes), columns, (width, 3.2))
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
    style.suptitle(figure, title)
    style.save(figure, path)


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
    figure, panels = style.panels(len(rows) * columns, columns, (2.0, 2.3))
    for axes in panels:
        axes.set_axis_off()
    for number, (label, pictures) in enumerate(rows.items()):
        for place, (caption, picture) in enumerate(pictures.items()):
            axes = panels[number * columns + place]
            axes.imshow(np.asarray(picture))
            axes.set_title(caption if place else f"{label}\n{caption}", fontsize=9, loc="left")
    style.suptitle(figure, title)
    style.save(figure, path)


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
    figure, row = style.panels(len(pictures), min(columns, len(pictures)), size)
    for axes, (label, picture) in zip(row, pictures.items(), strict=True):
        drawn = axes.imshow(picture, vmin=limits[0], vmax=limits[1], cmap="viridis", **placed)
        axes.set_title(f"{label}\nfrom {np.nanmin(picture):.3g} to {np.nanmax(picture):.3g}", fontsize=10)
    figure.colorbar(drawn, ax=row, extend="both", shrink=0.8)
    style.suptitle(figure, title)
    return figure, row


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
        colour, path = style.COLOURS[number % len(style.COLOURS)], places[:, number]
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
