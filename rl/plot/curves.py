"""Learning curves: the mean over seeds against steps, with its interval and every seed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from rl import statistics
from rl.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_DECADES = 3  # of a logarithmic axis up to which it has numbers within a decade
_BAND = 3  # seeds from which on an interval is drawn
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
        logarithmic: the axis of scores, which are positive: errors, say. It is linear where none is.

    Raises:
        ValueError: no runs, or a run whose scores are not [T, S].
    """
    if not runs:
        raise ValueError(f"nothing to draw in {path}: no runs")
    references = references or {}
    figure, axes = style.single((8.0, 4.5))
    _curves(axes, runs, rate, list(references.values()), intervals)
    if logarithmic:
        scores = np.concatenate([np.ravel(np.asarray(scores, float)) for _, scores in runs.values()])
        _logarithmic(axes, scores, np.array(list(references.values()), float))
    for label, score in references.items():
        axes.axhline(score, color=style.INK, linewidth=1.4, linestyle=(0, (4, 2)), zorder=1.5, label=label)
    axes.set_xlabel(xlabel, fontsize=12)
    axes.set_ylabel(ylabel, fontsize=12)
    axes.set_title(title, fontsize=13, loc="left")
    style.legend(axes, _what_is_drawn(runs.values(), rate, intervals), len(runs))
    style.save(figure, path)


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
    figure, row = style.panels(len(panels), columns, (5.2, 4.4))
    for axes, (name, runs) in zip(row, panels.items(), strict=True):
        _curves(axes, runs, rate, intervals=intervals)
        axes.set_xlabel(xlabel, fontsize=12)
        axes.set_ylabel(ylabel or name, fontsize=12)
        if ylabel:
            axes.set_title(name, fontsize=11)
    style.suptitle(figure, title)
    every = [run for runs in panels.values() for run in runs.values()]
    style.legend(row[columns - 1], _what_is_drawn(every, rate, intervals), len(labels[0]))
    style.save(figure, path)


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
    widths = style.widths(len(runs))
    for index, (label, run) in enumerate(runs.items()):
        steps, scores = np.asarray(run[0]), np.asarray(run[1], float)
        if steps.ndim != 1 or scores.ndim != 2 or len(steps) != len(scores):
            raise ValueError(
                f"{label!r}: steps must be [T] and scores [T, S], got shapes {steps.shape} and {scores.shape}"
            )
        colour, dashes = (
            style.COLOURS[index % len(style.COLOURS)],
            style.STYLES[index // len(style.COLOURS) % 4],
        )
        _curve(
            axes,
            steps,
            scores,
            interval if intervals else None,
            label,
            {"color": colour, "linestyle": dashes, "linewidth": widths[index]},
        )
    if rate:
        axes.set_ylim(style.RATE)
    else:
        _cut_bands(axes, [*(np.asarray(scores, float) for _, scores in runs.values()), np.array(references)])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)


def _curve(
    axes: Axes, steps: np.ndarray, scores: np.ndarray, interval: Any, label: str, look: dict[str, Any]
) -> None:
    colour = look["color"]
    finite = np.isfinite(scores).all(1)
    count, once = scores.shape[1], len(steps) == 1
    if count > 1:
        axes.plot(steps, scores, color=colour, linewidth=0.7, alpha=0.35, marker="." if once else "")
    if count >= _BAND and interval is not None:
        band = [interval(row) if ok else (np.nan, np.nan) for row, ok in zip(scores, finite, strict=True)]
        low, high = np.transpose(band) if band else (steps, steps)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        if once:  # of which the band has no width
            axes.plot([*steps, *steps], [*low, *high], color=colour, linewidth=1.4)
    axes.plot(
        steps,
        np.where(finite, scores.mean(1), np.nan),
        **look,
        marker="o" if once else "",
        label=f"{label}, {count} seed{'s' * (count > 1)}",
    )


def _cut_bands(axes: Axes, scores: Sequence[np.ndarray]) -> None:
    """Limits the axis to the scores and half their range beside: the interval of two seeds is ten times as wide."""
    values = np.concatenate([x[np.isfinite(x)] for x in scores])
    if not values.size or values.min() == values.max():
        return
    least, most, (low, high) = values.min(), values.max(), axes.get_ylim()
    near, far = 0.05 * (most - least), 0.5 * (most - least)
    axes.set_ylim(max(min(low, least - near), least - far), min(max(high, most + near), most + far))


def _logarithmic(axes: Axes, scores: np.ndarray, references: np.ndarray) -> None:
    """Makes the axis of scores logarithmic, which cuts bands at its end where they reach below 0.

    It has no room for scores that are not positive, and stays as it is where all are such.
    """
    from matplotlib.ticker import LogLocator

    values = np.concatenate([scores, references])
    positive = np.isfinite(values) & (values > 0)
    if not positive[: len(scores)].any():
        return
    axes.set_yscale("log")
    decades = np.log10(values[positive].max() / values[positive].min())
    # Matplotlib shows no numbers at all where there would be too many.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < _DECADES else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_yticks([], minor=True)
    axes.set_ylim(0.8 * values[positive].min(), 1.25 * values[positive].max())


def _what_is_drawn(runs: Iterable[tuple[ArrayLike, ArrayLike]], rate: bool, intervals: bool) -> str:
    """The title of a legend of learning curves (steps [T], scores [T, S])."""
    most = max(np.shape(scores)[1] for _, scores in runs)
    if most == 1:
        return ""
    if not intervals or most < _BAND:
        return "mean, each seed"
    return "mean, 95 % interval, each seed" + (f"\n{_UNBOUNDED}" if not rate else "")
