"""Plots: what is drawn is read back from the figure; the file is a whole PNG or the old one."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rl import plot, statistics
from rl.plot import style

pytestmark = [pytest.mark.rendered, pytest.mark.slow]  # matplotlib is the same on both interpreters

STEPS = np.array([0, 100, 200, 300])
SCORES = np.array([[1.0, 2.0, 4.0], [2.0, 3.0, 7.0], [5.0, 5.5, 9.0], [6.0, 8.0, 9.5]])


@pytest.fixture
def figures(monkeypatch) -> list:
    """Figures as they were saved."""
    saved = []
    real = style.save

    def save(figure, path) -> None:
        saved.append(figure)
        real(figure, path)

    monkeypatch.setattr(style, "save", save)
    return saved


def image_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def lines(axes) -> dict[str, list]:
    curves: dict[str, list] = {"mean": [], "seed": []}
    for line in axes.get_lines():
        curves["seed" if line.get_label().startswith("_") else "mean"].append(line)
    return curves


def test_learning_curve_draws_mean_seeds_and_interval(tmp_path: Path, figures: list):
    plot.learning_curve(
        tmp_path / "curve.png",
        {"iql": (STEPS, SCORES), "bc": (STEPS, SCORES - 3)},
        "success rate",
        references={"behaviour": 0.5},
        title="maze",
    )
    width, height = image_size(tmp_path / "curve.png")
    assert width >= 1000
    assert height >= 600
    axes = figures[0].axes[0]
    iql, bc, behaviour = lines(axes)["mean"]
    np.testing.assert_allclose(iql.get_ydata(), [7 / 3, 4, 6.5, 23.5 / 3])
    np.testing.assert_allclose(bc.get_ydata(), [-2 / 3, 1, 3.5, 14.5 / 3])
    np.testing.assert_allclose(behaviour.get_ydata(), 0.5)
    assert len(lines(axes)["seed"]) == 6
    assert iql.get_color() != bc.get_color()
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["iql, 3 seeds", "bc, 3 seeds", "behaviour"]
    assert (axes.get_ylabel(), axes.get_title(loc="left")) == ("success rate", "maze")

    low, high = stats.t.interval(0.95, 2, SCORES[1].mean(), stats.sem(SCORES[1]))
    band = axes.collections[0].get_paths()[0].vertices
    at_100 = band[band[:, 0] == 100][:, 1]
    np.testing.assert_allclose([at_100.min(), at_100.max()], [low, high])


def test_intervals_of_success_rates_stay_within_0_and_1(tmp_path: Path, figures: list):
    scores = np.array([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    plot.learning_curve(tmp_path / "curve.png", {"iql": ([1, 2], scores)}, "success", rate=True)
    band = figures[0].axes[0].collections[0].get_paths()[0].vertices
    for step, row in enumerate(scores, start=1):
        at = band[band[:, 0] == step][:, 1]
        np.testing.assert_allclose([at.min(), at.max()], statistics.rate_interval(row))
    assert band[:, 1].min() >= 0 and band[:, 1].max() <= 1


def test_shares_have_the_axis_from_0_to_1(tmp_path: Path, figures: list):
    """Whatever they are, so that two figures compare; and the interval of a panel is that of a share, too."""
    low, panels = (
        np.array([[0.0, 0.0, 0.1], [0.1, 0.2, 0.3]]),
        {"a task": {"iql": ([1, 2], [[0.0, 0.0, 1.0]] * 2)}},
    )
    plot.learning_curve(tmp_path / "a.png", {"iql": ([1, 2], low)}, "success", rate=True)
    plot.learning_curves(tmp_path / "b.png", panels, rate=True)
    plot.lines(tmp_path / "c.png", {"iql": ([1, 2], *([[0.4, 0.5]] * 3))}, "x", "share", rate=True)
    plot.bars(tmp_path / "d.png", {"iql": (0.3, 0.2, 0.4)}, "success", rate=True)
    *curves, bars = (figure.axes[0] for figure in figures)
    for axes in curves:
        bottom, top = axes.get_ylim()
        assert -0.1 < bottom < 0 and 1 < top < 1.1
    assert bars.get_xlim()[0] == 0 and 1 < bars.get_xlim()[1] < 1.2
    band = curves[1].collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() >= 0 and band.max() <= 1


@pytest.mark.slow
def test_many_panels_are_drawn_in_rows_and_without_intervals_if_asked(tmp_path: Path, figures: list):
    panels = {f"task {i}": {"iql": ([1, 2], [[0.0, 1.0]] * 2)} for i in range(5)}
    plot.learning_curves(tmp_path / "a.png", panels, rate=True, columns=3, intervals=False)
    grid = [axes.get_subplotspec() for axes in figures[0].axes]
    assert [(place.rowspan.start, place.colspan.start) for place in grid] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
    assert not any(axes.collections for axes in figures[0].axes)
    assert figures[0].axes[2].get_legend().get_title().get_text() == "mean, each seed"
    plot.learning_curves(tmp_path / "b.png", panels, rate=True, ylabel="success rate")
    first = figures[1].axes[0]
    assert (first.get_title(), first.get_ylabel()) == ("task 0", "success rate")


def test_bands_of_scores_without_bounds_are_explained(tmp_path: Path, figures: list):
    """Student's interval does not know that a return cannot exceed 500."""
    runs = {"iql": (STEPS, SCORES)}
    plot.learning_curve(tmp_path / "a.png", runs, "return")
    plot.learning_curve(tmp_path / "b.png", runs, "return", intervals=False)
    with_bands, without = (figure.axes[0] for figure in figures)
    assert "beyond the scores that there are" in with_bands.get_legend().get_title().get_text()
    assert not without.collections and without.get_legend().get_title().get_text() == "mean, each seed"


def test_curves_that_coincide_are_all_seen(tmp_path: Path, figures: list):
    """A later one is drawn on top of an earlier one: it has to be thinner."""
    names = ("bc", "td3_bc", "cql")
    plot.learning_curve(tmp_path / "a.png", dict.fromkeys(names, (STEPS, SCORES)), "score")
    plot.lines(tmp_path / "b.png", {name: ([1, 2], *([[0.4, 0.5]] * 3)) for name in names}, "x", "y")
    for figure in figures:
        drawn = lines(figure.axes[0])["mean"]
        assert [line.get_label().partition(",")[0] for line in drawn] == list(names)
        assert all(np.diff([line.get_linewidth() for line in drawn]) < -0.5)


def test_a_line_of_one_point_is_seen_with_its_interval(tmp_path: Path, figures: list):
    one, many = ([8], [0.5], [0.4], [0.7]), ([1, 2], *([[0.4, 0.5]] * 3))
    plot.lines(tmp_path / "a.png", {"mse": one}, "width", "error", logarithmic=True)
    panels = {"here": {"arsq": many, "cqn": one}, "theirs": {"arsq": many}}
    crosses = {"theirs": {"arsq": ([1, 2], [0.4, 0.6])}}
    plot.lines_in_panels(tmp_path / "b.png", panels, "x", "y", published=crosses)
    point, bar = figures[0].axes[0].get_lines()
    assert point.get_marker() == "o" and list(bar.get_ydata()) == [0.4, 0.7]
    here, theirs = figures[1].axes
    assert here.get_ylim() == theirs.get_ylim() and here.get_title() == "here"
    assert [line.get_marker() for line in theirs.get_lines()] == ["o", "x", "x"]
    with pytest.raises(ValueError, match="no panels"):
        plot.lines_in_panels(tmp_path / "c.png", {}, "x", "y")


def test_a_curve_of_one_evaluation_is_seen_with_its_interval_and_seeds(tmp_path: Path, figures: list):
    plot.learning_curve(tmp_path / "a.png", {"iql": ([8], [[0.4, 0.5, 0.6]])}, "score")
    *seeds, bar, mean = figures[0].axes[0].get_lines()
    assert [line.get_marker() for line in seeds] == ["."] * 3 and mean.get_marker() == "o"
    np.testing.assert_allclose(bar.get_ydata(), statistics.interval(np.array([0.4, 0.5, 0.6])))


def test_errors_have_a_logarithmic_axis_where_bands_end(tmp_path: Path, figures: list):
    plot.learning_curve(tmp_path / "a.png", {"iql": (STEPS, SCORES)}, "error", logarithmic=True)
    axes = figures[0].axes[0]
    assert axes.get_yscale() == "log"
    np.testing.assert_allclose(axes.get_ylim(), [0.8, 1.25 * 9.5])
    diverged = np.geomspace(1e-3, 1e7, len(STEPS))[:, None] * np.ones(3)
    plot.learning_curve(tmp_path / "b.png", {"iql": (STEPS, diverged)}, "error", logarithmic=True)
    assert [label.get_text() for label in figures[1].axes[0].get_yticklabels() if label.get_text()]


def test_a_logarithmic_axis_has_room_for_references(tmp_path: Path, figures: list):
    runs, references = {"iql": (STEPS, SCORES)}, {"published": 0.02, "untrained": 50.0, "none": 0.0}
    plot.learning_curve(tmp_path / "a.png", runs, "error", references=references, logarithmic=True)
    np.testing.assert_allclose(figures[0].axes[0].get_ylim(), [0.8 * 0.02, 1.25 * 50])


def test_where_nothing_is_positive_the_axis_is_linear(tmp_path: Path, figures: list):
    """It has no logarithm; the least of no values raised, and errors that are all 0 had no picture."""
    for number, scores in enumerate((np.zeros((4, 2)), -SCORES, np.full((4, 2), np.nan))):
        plot.learning_curve(
            tmp_path / f"{number}.png",
            {"iql": (STEPS, scores)},
            "error",
            references={"published": 0.5},
            logarithmic=True,
        )
    assert [figure.axes[0].get_yscale() for figure in figures] == ["linear"] * 3


def test_a_score_that_is_not_finite_is_a_gap(tmp_path: Path, figures: list):
    scores = SCORES.copy()
    scores[2, 1] = np.nan
    plot.learning_curve(tmp_path / "curve.png", {"iql": (STEPS, scores)}, "score")
    (mean,) = lines(figures[0].axes[0])["mean"]
    np.testing.assert_allclose(mean.get_ydata(), [7 / 3, 4, np.nan, 23.5 / 3])


def test_one_seed_has_no_band(tmp_path: Path, figures: list):
    plot.learning_curve(tmp_path / "curve.png", {"iql": (STEPS, SCORES[:, :1])}, "score")
    axes = figures[0].axes[0]
    assert not axes.collections
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["iql, 1 seed"]


def test_wide_intervals_are_cut_and_references_are_seen(tmp_path: Path, figures: list):
    """Student's interval of two seeds is 12.7 times as wide as they are."""
    runs = {"two": (STEPS, SCORES[:, :2])}
    plot.learning_curve(tmp_path / "curve.png", runs, "return")
    low, high = figures[0].axes[0].get_ylim()
    assert (
        -3 < low < 1 and 8 < high < 12
    )  # the seeds are from 1 to 8, the interval at the last step from -6 to 20
    plot.learning_curve(tmp_path / "curve.png", runs, "return", references={"expert": 30.0})
    low, high = figures[1].axes[0].get_ylim()
    assert low < 1 and high > 30


def test_many_runs_stay_apart_and_inside_the_picture(tmp_path: Path, figures: list):
    runs = {f"agent {i}": (STEPS, SCORES + i) for i in range(20)}
    plot.learning_curve(tmp_path / "curve.png", runs, "score")
    axes = figures[0].axes[0]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines(axes)["mean"]}) == 20
    legend, picture = axes.get_legend().get_window_extent(), figures[0].bbox
    assert legend.y0 >= picture.y0
    assert legend.x1 <= picture.x1


@pytest.mark.parametrize("kind", ["one pair of axes", "panels"])
def test_many_long_labels_leave_room_for_the_curves(kind: str, tmp_path: Path, figures: list):
    """As of a sweep of three hyper-parameters; without room matplotlib gives up, with a warning."""
    names = ("agent.critic_optimiser.learning_rate", "expectile", "temperature")
    labels = [", ".join(f"{name}={i}" for name in names) for i in range(16)]
    runs = dict.fromkeys(labels, (STEPS, SCORES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "panels":
            plot.learning_curves(tmp_path / "a.png", {"a": runs, "b": runs, "c": runs}, columns=2)
        else:
            plot.learning_curve(tmp_path / "a.png", runs, "score")
    picture, drawn = figures[0].bbox, figures[0].axes
    (legend,) = [axes.get_legend().get_window_extent() for axes in drawn if axes.get_legend()]
    assert legend.y0 >= picture.y0 and legend.x1 <= picture.x1
    assert min(axes.get_window_extent().width for axes in drawn) > 0.25 * picture.width


@pytest.mark.parametrize(
    "steps, scores",
    [(STEPS, SCORES[:2]), (STEPS, SCORES[:, 0]), (SCORES, SCORES)],
    ids=["T", "one axis", "steps"],
)
def test_wrong_shapes_are_named(tmp_path: Path, steps, scores):
    with pytest.raises(ValueError, match=r"'iql'.*\[T, S\], got shapes"):
        plot.learning_curve(tmp_path / "curve.png", {"iql": (steps, scores)}, "score")
    assert not os.listdir(tmp_path)


def test_nothing_to_draw(tmp_path: Path):
    with pytest.raises(ValueError, match="no runs"):
        plot.learning_curve(tmp_path / "a.png", {}, "score")
    with pytest.raises(ValueError, match="no scores"):
        plot.bars(tmp_path / "a.png", {}, "score")


def test_bars_draw_scores_and_intervals(tmp_path: Path, figures: list):
    plot.bars(
        tmp_path / "bars.png",
        {"iql": (71.25, 66.0, 76.0), "one seed": (12.0, np.nan, np.nan), "lost": (-5.0, -9.0, -1.0)},
        "success rate (%)",
    )
    image_size(tmp_path / "bars.png")
    axes = figures[0].axes[0]
    assert [bar.get_width() for bar in axes.patches] == [71.25, 12.0, -5.0]
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), [66.0, 76.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["iql", "one seed", "lost"]
    assert axes.yaxis_inverted()


def test_a_failed_drawing_leaves_the_old_picture(tmp_path: Path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "curve.png"
    plot.learning_curve(path, {"iql": (STEPS, SCORES)}, "score")
    before = path.read_bytes()

    def full(_, target, **__) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space"):
        plot.learning_curve(path, {"iql": (STEPS, SCORES)}, "score")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["curve.png"]


def test_pyplot_is_not_touched(tmp_path: Path):
    if "matplotlib.pyplot" in sys.modules:
        import matplotlib.pyplot as plt

        open_before = plt.get_fignums()
        plot.bars(tmp_path / "bars.png", {"iql": (1.0, 0.0, 2.0)}, "score")
        assert plt.get_fignums() == open_before
    else:
        plot.bars(tmp_path / "bars.png", {"iql": (1.0, 0.0, 2.0)}, "score")
        assert "matplotlib.pyplot" not in sys.modules


def test_lines_draw_curves_intervals_and_published_values(tmp_path: Path, figures: list) -> None:
    x = np.array([0.0, 0.5, 1.0])
    curves = {"ours": (x, x + 1, x, x + 2), "other": (x, 2 * x, x * np.nan, x * np.nan)}
    plot.lines(
        tmp_path / "a.png", curves, "q", "reward", published={"ours": (x[:2], x[:2] + 3)}, title="T", note="n"
    )
    assert min(image_size(tmp_path / "a.png")) > 300
    (axes,) = figures[0].axes
    drawn = [(line.get_color(), list(line.get_ydata())) for line in axes.get_lines()]
    assert [y for _, y in drawn[:3]] == [[1, 1.5, 2], [3, 3.5], [0, 1, 2]]
    assert drawn[0][0] == drawn[1][0] != drawn[2][0]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 0 and band[:, 1].max() == 3
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == ("q", "reward", "T")
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "other", "published"]
    assert legend.get_title().get_text() == "n\nwidths only keep lines\nthat overlap visible"
    plot.lines(tmp_path / "b.png", {"ours": (x + 1, x + 1, x + 1, x + 1)}, "N", "s", logarithmic=True)
    assert figures[1].axes[0].get_xscale() == figures[1].axes[0].get_yscale() == "log"


def test_lines_refuse_what_cannot_be_drawn(tmp_path: Path) -> None:
    x = np.arange(3.0)
    for curves, published, message in (
        ({}, {}, "no curves"),
        ({"a": (x, x, x, x[1:])}, {}, "'a': x, value, low and high must be"),
        ({"a": (x, x, x, x)}, {"b": (x, x)}, "published values of b have no curve"),
    ):
        with pytest.raises(ValueError, match=message):
            plot.lines(tmp_path / "a.png", curves, "x", "y", published=published)
    assert not list(tmp_path.iterdir())


def test_panels_show_the_same_runs_side_by_side(tmp_path: Path, figures: list):
    runs = {"iql": (STEPS, SCORES), "bc": (STEPS, SCORES - 3)}
    plot.learning_curves(
        tmp_path / "both.png",
        {"return": runs, "mean Q": {name: (x, 10 * y) for name, (x, y) in runs.items()}},
        title="maze",
    )
    image_size(tmp_path / "both.png")
    first, second = figures[0].axes
    np.testing.assert_allclose(lines(first)["mean"][1].get_ydata(), (SCORES - 3).mean(1))
    np.testing.assert_allclose(lines(second)["mean"][1].get_ydata(), 10 * (SCORES - 3).mean(1))
    assert (first.get_ylabel(), second.get_ylabel()) == ("return", "mean Q")
    assert first.get_legend() is None
    assert [text.get_text() for text in second.get_legend().get_texts()] == ["iql, 3 seeds", "bc, 3 seeds"]


@pytest.mark.parametrize(
    "panels", [{}, {"a": {}}, {"a": {"x": (STEPS, SCORES)}, "b": {"y": (STEPS, SCORES)}}]
)
def test_panels_of_different_runs_are_refused(tmp_path: Path, panels: dict):
    with pytest.raises(ValueError, match="must show the same runs"):
        plot.learning_curves(tmp_path / "x.png", panels)


def test_maps_share_their_colours_and_say_what_is_beyond_them(tmp_path: Path, figures: list):
    truth = np.arange(12.0).reshape(3, 4)
    plot.maps(
        tmp_path / "maps.png",
        {"truth": truth, "learned": 100 * truth},
        2.0,
        (0.0, 20.0),
        squares={"cliff": 1.0},
        columns=2,
    )
    image_size(tmp_path / "maps.png")
    one, other = figures[0].axes[:2]
    assert one.get_images()[0].get_clim() == other.get_images()[0].get_clim() == (0.0, 20.0)
    np.testing.assert_array_equal(other.get_images()[0].get_array(), 100 * truth)
    assert other.get_images()[0].origin == "lower"
    assert other.get_images()[0].get_extent() == [-2, 2, -2, 2]
    assert "from 0 to 1.1e+03" in other.get_title()
    assert max(one.get_lines()[0].get_xdata()) == 1.0


def test_cells_are_drawn_from_the_top_with_walls_left_out(tmp_path: Path, figures: list):
    grid = np.array([[np.nan, 1.0], [2.0, 3.0]])
    plot.cells(tmp_path / "cells.png", {"truth": grid, "learned": 2 * grid}, (0.0, 4.0), columns=2)
    image_size(tmp_path / "cells.png")
    one, other = figures[0].axes[:2]
    assert one.get_images()[0].get_clim() == other.get_images()[0].get_clim() == (0.0, 4.0)
    assert one.get_images()[0].origin == "upper"
    np.testing.assert_array_equal(np.ma.filled(one.get_images()[0].get_array(), np.nan), grid)
    assert other.get_title() == "learned\nfrom 2 to 6"


@pytest.mark.parametrize("images", [{}, {"flat": np.zeros(3)}])
def test_what_is_no_picture_is_refused(tmp_path: Path, images: dict):
    with pytest.raises(ValueError, match=r"needs pictures \[H, W\]"):
        plot.maps(tmp_path / "x.png", images, 1.0, (0.0, 1.0))
    with pytest.raises(ValueError, match=r"needs pictures \[H, W\]"):
        plot.cells(tmp_path / "x.png", images, (0.0, 1.0))


def test_a_long_label_leaves_room_for_the_curve(tmp_path: Path, figures: list) -> None:
    """Of a board whose rows differ in settings; the axes are as much narrower as the legend is wide."""
    label = "iql, unit_policy=True, slow_advantage=False (unfinished)"
    plot.learning_curve(tmp_path / "x.png", {label: (STEPS, SCORES)}, ylabel="success", title="a task")
    (axes,) = figures[0].axes
    assert axes.get_position().width > 0.45
    (text,) = axes.get_legend().get_texts()
    assert text.get_text().replace("\n", " ").startswith(label)
