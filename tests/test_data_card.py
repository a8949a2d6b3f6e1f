"""Dataset cards: statistics against a plain loop, the words, and the figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl import data, plot
from rl.data import card as cards
from rl.data.steps import Loaded, from_steps, loaded
from rl.plot import style


def log(discrete: bool = False) -> tuple[Loaded, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    steps = {
        "observations": rng.normal(size=(12, 3)).astype(np.float32),
        "actions": rng.integers(0, 3, 12) if discrete else rng.uniform(-1, 1, (12, 2)).astype(np.float32),
        "rewards": rng.normal(size=12).astype(np.float32),
        "terminals": np.isin(np.arange(12), [3]),
        "timeouts": np.isin(np.arange(12), [8, 11]),
    }
    dataset = from_steps(
        **steps, next_observations=np.roll(steps["observations"], -1, 0), source="test", discrete=discrete
    )
    return loaded(
        dataset, environment=None, source="a test", reference=(-1.0, 3.0), choices=4 if discrete else None
    ), steps


def test_episodes_are_those_of_the_log() -> None:
    logged, steps = log()
    card = cards.describe(logged)
    bounds = [(0, 4), (4, 9), (9, 12)]
    assert card.lengths.tolist() == [4, 5, 3]
    assert card.terminated.tolist() == [True, False, False]
    np.testing.assert_allclose(card.returns, [steps["rewards"][a:b].sum() for a, b in bounds], rtol=1e-6)


def test_coverage_is_a_histogram_of_every_dimension() -> None:
    logged, steps = log()
    card = cards.describe(logged)
    for column, share in zip(steps["actions"].T, card.coverage, strict=True):
        expected, _ = np.histogram(column, cards.BINS, (-1, 1))
        np.testing.assert_allclose(share, expected / 12)
    extremes = logged.dataset.transitions._replace(action=np.array([[-1, 1], [1, -1]] * 6, np.float32))
    coverage = cards.describe(logged._replace(dataset=logged.dataset._replace(transitions=extremes))).coverage
    assert coverage.shape == (2, cards.BINS)
    assert coverage[:, [0, -1]].tolist() == [[0.5, 0.5]] * 2


def test_discrete_actions_are_counted_with_those_never_taken() -> None:
    logged, steps = log(discrete=True)
    assert cards.describe(logged).coverage.tolist() == [np.mean(steps["actions"] == a) for a in range(4)]
    text = cards.text(cards.describe(logged), logged)
    assert "4 actions" in text
    assert "3: 0.0%" in text


def test_the_text_has_the_numbers() -> None:
    logged, steps = log()
    card = cards.describe(logged._replace(note="beware"))
    text = cards.text(card, logged._replace(note="beware"))
    assert text.startswith("a test\n")
    assert "12; observation [3], action [2]" in text
    assert "3: 1 terminated, 2 cut" in text
    assert f"mean {card.returns.mean():.6g}" in text
    assert f"normalised   mean {25 * (card.returns.mean() + 1):.1f} (0 is a return of -1, 100 of 3)" in text
    assert f"{steps['actions'][:, 1].std():.3f}" in text
    assert "beware" in text
    parts = logged._replace(spec=logged.spec._replace(observation_shape={"goal": (2,), "task": {"at": (1,)}}))
    assert "12; observation {'goal': [2], 'task': {'at': [1]}}, action [2]" in cards.text(card, parts)


@pytest.mark.parametrize("discrete", [False, True])
def test_the_figure(discrete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    save = style.save
    monkeypatch.setattr(style, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    card = cards.describe(log(discrete)[0])
    plot.dataset_card(
        tmp_path / "card.png",
        card.returns,
        card.lengths,
        card.coverage,
        references={"expert": 3.0},
        title="test",
    )
    assert (tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")
    returns, lengths, actions = figures[0].axes[:3]
    assert sum(bar.get_height() for bar in returns.patches) == 3
    assert sum(bar.get_height() for bar in lengths.patches) == 3
    assert returns.get_legend().get_texts()[0].get_text() == "expert, 3"
    if discrete:
        assert [bar.get_height() for bar in actions.patches] == card.coverage.tolist()
    else:
        shown = actions.images[0].get_array()
        np.testing.assert_array_equal(np.ma.filled(shown, 0), card.coverage)


def test_numbers_of_the_figure_are_written_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of 1,000 steps each were labelled "0.0 + 1e3"."""
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure))
    plot.dataset_card(tmp_path / "card.png", [2.5e6, 3e6], [1000, 1000], [[0.5, 0.5]])
    figures[0].canvas.draw()
    for axes, number in zip(figures[0].axes[:2], ("2,500,000", "1,000"), strict=True):
        assert number in [label.get_text() for label in axes.get_xticklabels()]
        assert not axes.xaxis.get_offset_text().get_text()
        counts = [label.get_text() for label in axes.get_yticklabels()]
        assert counts and all(count.isdigit() for count in counts)  # of episodes


def test_returns_that_differ_by_rounding_alone_are_drawn(tmp_path: Path) -> None:
    """Too close for the edges of bins."""
    plot.dataset_card(tmp_path / "card.png", [0.1 * 3, 0.3, 0.3], [2, 2, 2], [[0.5, 0.5]])
    assert (tmp_path / "card.png").stat().st_size > 0


def test_wrong_shapes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="returns and lengths must be"):
        plot.dataset_card(tmp_path / "card.png", [1.0, 2.0], [1], [[1.0]])


def test_every_reader_gives_what_a_card_needs() -> None:
    for name in ("synthetic-continuous", "synthetic-discrete"):
        logged = data.load(name)
        card = cards.describe(logged)
        assert card.lengths.sum() == len(logged.dataset.last)
        assert card.coverage.sum() == pytest.approx(1 if logged.spec.discrete else logged.spec.action_size)
        assert cards.text(card, logged)
