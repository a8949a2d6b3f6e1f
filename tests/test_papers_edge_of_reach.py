"""The study of the edge of reach: whole on a tiny setting, and its verdicts on made-up outcomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers import edge_of_reach as paper
from rl.agents import sac_n
from rl.envs import plane
from rl.types import Learner, State, Transition
from rl.values import heads

TINY = paper.Settings(seeds=2, epochs=2, updates=3, rollouts=4, batch_size=8, hidden=(8,), parts="story")


@pytest.mark.slow
def test_the_story_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its five kinds of agents: each is a program to compile."""
    story = {"base": paper.BASE, "oracle": paper.Variant(patch="edge")}
    monkeypatch.setattr(paper, "STORY", story)
    monkeypatch.setitem(paper.PARTS, "story", list(story.values()))
    result = paper.run(dataclasses.replace(TINY, workdir=str(tmp_path / "runs"), out=str(tmp_path)))
    assert [row["name"] for row in result["variants"]] == ["N = 2, k = 10", "N = 2, k = 10, oracle (edge)"]
    assert np.shape(result["variants"][0]["return"]) == (2,)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["checks"] == result["checks"] and len(result["checks"]) == 2
    assert {"story.png", "landscape.png", "README.md"} <= {path.name for path in tmp_path.iterdir()}
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert sum(line.startswith("| N = ") for line in lines) == 2


def test_variants_of_several_parts_are_trained_once() -> None:
    every = paper.chosen(paper.Settings(parts=",".join(paper.PARTS)))
    assert len(every) == len(set(every)) == 5 + (5 - 2) + (5 - 2) + (12 - 2) + (4 - 2) + (6 - 2) + (5 - 2)
    assert paper.describe(paper.Variant(20, 10, 0.1, "hl_gauss")) == "N = 20, k = 10, eta = 0.1, hl_gauss"
    assert (
        paper.describe(paper.Variant(head="two_hot", support=10.0)) == "N = 2, k = 10, two_hot, support x 10"
    )


def test_initial_weights_are_those_of_the_start_asked_for() -> None:
    learner = sac_n.make(sac_n.Config(critics=3, hidden=(64, 64)), plane.SPEC, heads.scalar())
    example = Transition(
        *[jnp.zeros((2, 2))] * 2, *[jnp.zeros(2)] * 2, *[jnp.zeros((2, 2))] * 2, jnp.zeros(2)
    )
    biased, transposed = (
        paper.started(learner, start).init(jax.random.key(0), example) for start in ("biased", "transposed")
    )
    for state, first, slack in ((biased, 0.5, 0.01), (transposed, 0.125, 0.003)):
        critic, policy = state.params["critic"], state.params["policy"]
        assert first - slack < np.abs(critic["Dense_0"]["kernel"]).max() <= first
        assert (np.asarray(critic["Dense_1"]["bias"]) == np.float32(0.1)).all()
        assert 2.5e-3 < np.abs(critic["Dense_2"]["kernel"]).max() <= 3e-3
        assert 0.5e-3 < np.abs(policy["Dense_2"]["kernel"]).max() <= 1e-3
        assert len(np.unique(critic["Dense_2"]["bias"])) == 3
        jax.tree.map(np.testing.assert_array_equal, state.target["critic"], critic)
    assert paper.started(learner, "biased") is learner
    library = paper.started(learner, "library").init(jax.random.key(0), example)
    for name in ("critic", "policy"):
        assert not any(np.any(layer["bias"]) for layer in library.params[name].values())
        assert all(np.all(layer["kernel"]) for layer in library.params[name].values())
    jax.tree.map(np.testing.assert_array_equal, library.target["critic"], library.params["critic"])


def outcome(**last: Any) -> paper.Outcome:
    return paper.Outcome(
        {name: np.array([[7.0, 7.0], value]) for name, value in last.items()}, np.zeros((2, 2))
    )


def test_what_is_finished_is_recalled_if_settings_and_commit_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(TINY, workdir=str(tmp_path))
    made = paper.Outcome({"q": np.array([[1.0, 2.0]])}, np.ones((2, 2)), 7.0)
    monkeypatch.setattr(paper.log, "commit", lambda: "abc")
    assert paper.recall(settings, paper.BASE) is None
    paper.remember(settings, paper.BASE, made)
    found = paper.recall(dataclasses.replace(settings, parts="k", out="elsewhere"), paper.BASE)
    assert found and found.seconds == 7
    jax.tree.map(np.testing.assert_array_equal, found[:2], made[:2])
    assert paper.recall(settings, paper.RAVL) is None
    assert paper.recall(dataclasses.replace(settings, epochs=3), paper.BASE) is None
    for commit in ("def", "abc-dirty", None):
        monkeypatch.setattr(paper.log, "commit", lambda commit=commit: commit)
        paper.remember(settings, paper.WHOLE, made)
        assert paper.recall(settings, paper.BASE) is None
        assert (paper.recall(settings, paper.WHOLE) is None) == (commit != "def")


def test_a_prediction_holds_if_it_does_in_every_seed_at_the_end() -> None:
    good = {paper.BASE: outcome(**{"return": [-9.0, -8.0], "q": [200.0, 300.0]})}
    bad = {paper.BASE: outcome(**{"return": [-9.0, 8.0], "q": [200.0, 300.0]})}
    assert paper.checks(good) == {"base fails, its Q above 150": True}
    assert paper.checks(bad | {paper.RAVL: outcome(**{"return": [36.0, 35.5]})}) == {
        "base fails, its Q above 150": False,
        "RAVL works": True,
    }


@pytest.mark.optimised
@pytest.mark.slow
def test_two_critics_run_away_and_twenty_do_not() -> None:
    """The story's two ends, as far as a test has time for: one seed, fewer epochs."""
    settings = dataclasses.replace(paper.Settings(), seeds=1, epochs=35)
    base = paper.train_variant(settings, paper.BASE, lambda number: None).metrics
    assert base["return"][-1] < 0 and base["q"][-1] > 150
    assert base["edge_share"].max() > 0 and base["q"][-1] > 1.5 * base["q"][-10]  # still growing
    short = dataclasses.replace(settings, epochs=20)
    ravl = paper.train_variant(short, paper.RAVL, lambda number: None).metrics
    assert ravl["return"][-1] > 35 and ravl["q"][-1] < 90


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize(("patch", "mended"), [("edge, worth 0", True), ("random, worth 0", False)])
def test_targets_mend_it_at_the_edge_of_reach_alone(patch: str, mended: bool) -> None:
    settings = dataclasses.replace(paper.Settings(), seeds=1, epochs=30)
    found = paper.train_variant(settings, paper.Variant(patch=patch), lambda number: None).metrics
    assert (found["return"][-1] > 30) if mended else (found["return"][-1] < 0)


def patched_batch(patch: str, inner: float = 1.0) -> tuple[Transition, Transition]:
    """A batch before and after the oracle; every second next state is at the edge of reach."""
    seen = []

    def update(state: State, batch: Transition, key: Any) -> Any:
        seen.append(batch)
        return state, {}

    point = jnp.tile(jnp.array([[11.5, 0.0], [inner, 0.0]]), (32, 1))
    one = jnp.ones(64)
    batch = Transition(point, point, 0.5 * one, one, point, point, 0 * one)
    learner = paper.patched(Learner(None, update, None), paper.Variant(patch=patch))  # type: ignore[arg-type]
    learner.update(State({}, {}, {}, 0), batch, jax.random.key(0))
    return batch, seen[0]


def test_the_oracle_gives_the_values_of_states_at_the_edge_of_reach_alone() -> None:
    batch, found = patched_batch("edge")
    edge = np.arange(64) % 2 == 0
    np.testing.assert_array_equal(found.discount, ~edge)
    expected = 0.5 + 0.99 * np.asarray(plane.value(batch.next_observation, 0.99)) * edge
    np.testing.assert_allclose(found.reward, expected, rtol=1e-6)
    assert expected[0] > 100


def test_the_other_oracles_give_nothing_or_correct_more() -> None:
    _, found = patched_batch("edge, worth 0", inner=10.5)
    np.testing.assert_array_equal(found.discount, np.arange(64) % 2)
    np.testing.assert_array_equal(found.reward, 0.5)
    _, found = patched_batch("random, worth 0")
    assert (found.discount == 0).sum() == 32 and (found.reward == 0.5).all()
    assert 8 < (found.discount[::2] == 0).sum() < 24
    batch, found = patched_batch("last two steps", inner=10.5)
    assert not found.discount.any()
    expected = 0.5 + 0.99 * np.asarray(plane.value(batch.next_observation, 0.99))
    np.testing.assert_allclose(found.reward, expected, rtol=1e-6)
    assert patched_batch("last two steps", inner=9.5)[1].discount.sum() == 32


def test_the_random_oracle_gives_true_values_to_as_many_states() -> None:
    batch, found = patched_batch("random")
    where = np.asarray(found.discount) == 0
    assert where.sum() == 32 and 8 < where[::2].sum() < 24
    expected = 0.5 + 0.99 * np.asarray(plane.value(batch.next_observation, 0.99)) * where
    np.testing.assert_allclose(found.reward, expected, rtol=1e-6)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(
        ValueError, match="--parts has heads: choose from story, k, N, ablation, support, start, oracle"
    ):
        paper.run(dataclasses.replace(TINY, parts="story,heads"))
    with pytest.raises(ValueError, match="--seeds=1: an interval"):
        paper.run(dataclasses.replace(TINY, seeds=1))
