"""The online ordering of heads on small games: whole on a tiny setting, its games, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import stop_regressing_games as paper
from rl.envs import minatar

gymnax = pytest.importorskip("gymnax")

TINY = paper.Settings(
    games="Breakout-MinAtar", heads="scalar,hl_gauss", seeds=2, steps=256, evaluations=2, hidden=8
)


@pytest.mark.long
def test_the_study_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "EVALUATED", 4)
    result = paper.run(dataclasses.replace(TINY, out=str(tmp_path)))
    scores = result["scores"]["Breakout-MinAtar"]
    assert {head: x.shape for head, x in scores.items()} == {"scalar": (2, 2), "hl_gauss": (2, 2)}
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["scores"]["Breakout-MinAtar"]["scalar"] == scores["scalar"].tolist()
    monkeypatch.setattr(paper, "learn", lambda *_: pytest.fail("a finished variant was trained again"))
    np.testing.assert_equal(
        paper.run(dataclasses.replace(TINY, out=str(tmp_path)))["scores"], result["scores"]
    )
    assert {"games.png", "heads.png", "README.md"} <= {path.name for path in tmp_path.iterdir()}
    assert "| `hl_gauss` |" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_policy_is_scored_by_first_episodes() -> None:
    """One that never moves earns something from the balls that come to it, and less than its episodes' length."""
    from rl.types import Learner

    game = minatar.make("Breakout-MinAtar")
    still = Learner(None, None, lambda state, seen, key: jnp.zeros(len(seen), jnp.int32))  # type: ignore[arg-type]
    score = paper.evaluate(game, still, None, 1000, jax.random.key(0))  # type: ignore[arg-type]
    assert 0 < float(score) < 3


def test_heads_are_compared_in_shares_of_each_game() -> None:
    scores = {
        "one": {"a": np.array([[0.0, 0.0], [1.0, 3.0]]), "b": np.array([[9.0, 9.0], [4.0, 4.0]])},
        "two": {"a": np.array([[300.0, 300.0]]), "b": np.array([[100.0, 100.0]])},
    }
    ratios = paper.relative(scores)
    np.testing.assert_allclose(ratios["a"], [(1 / 3 + 1.5) / 2, (1 + 1.5) / 2])
    np.testing.assert_allclose(ratios["b"], [(4 / 3 + 0.5) / 2] * 2)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"games": "Pong"}, "--games: Pong is none of Asterix-MinAtar"),
        ({"heads": "hlgauss"}, "--heads: hlgauss is none of scalar"),
        ({"seeds": 1}, "--seeds=1: an interval"),
        ({"steps": 100}, "--steps=100 are fewer than 64 for each of --evaluations=2"),
        ({"steps": 300}, "--steps=300 must be a multiple of 128: between two of --evaluations=2"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper.run(dataclasses.replace(TINY, **wrong))


def test_without_gymnax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ImportError, match="pip install --no-deps gymnax"):
        paper.run(TINY)


@pytest.mark.slow
def test_breakout_was_learned_in_the_stored_runs() -> None:
    """A policy that does not see its cells earns less than 1."""
    stored = studies.load(Path(__file__).parents[1] / "results/papers/stop_regressing_games/result.json")
    assert all(scores[-1].min() > 2 for scores in stored["scores"]["Breakout-MinAtar"].values())
