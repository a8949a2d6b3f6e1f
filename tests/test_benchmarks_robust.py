"""benchmarks.robust: what is timed side by side computes the same, and the table says where it is from."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import linear_peer, robust
from rl.agents import r2pvi
from rl.envs import american_put
from rl.replay.linear import Trajectories

ENV = american_put.make(horizon=4, factors=6)


@pytest.fixture(scope="module")
def log() -> Trajectories:
    return american_put.collect(ENV, jax.random.key(0), 40, jnp.asarray(100.0))


@pytest.mark.parametrize("method", robust.STRENGTHS)
def test_what_is_compared_fits_the_same_weights(method: str, log: Trajectories) -> None:
    ours = np.asarray(robust.fitter(method)(log).weights)
    theirs = linear_peer.fit(method, robust.STRENGTHS[method], log, robust.BETA, robust.RIDGE)
    assert np.abs(ours).max() > 0.1
    if method in ("tv", "kl"):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        return
    # Nelder-Mead may stop at a lower, local maximum: looked at where both search among the same values.
    first = len(ours) - 2
    assert (ours[first] > theirs[first] - 1e-3).all()
    assert (np.abs(ours[first] - theirs[first]) < 1e-3).mean() > 0.6


def test_a_fault_in_the_peer_would_be_seen(log: Trajectories) -> None:
    weaker = np.asarray(
        r2pvi.fit(r2pvi.Config("tv", scale=2.0, beta=robust.BETA, ridge=robust.RIDGE), log).weights
    )
    theirs = linear_peer.fit("tv", 1.0, log, robust.BETA, robust.RIDGE)
    assert np.abs(weaker - theirs).max() > 1e-2


@pytest.mark.slow
def test_the_table_is_written_with_its_command_and_grows_row_by_row(tmp_path: Path) -> None:
    settings = robust.Settings(
        methods="tv,tv_ball", samples=(20,), sizes=(5,), peer_samples=(20,), repeats=1, horizon=3,
        largest=1_900, out=str(tmp_path / "new" / "robust.json"),
    )  # fmt: skip
    results = robust.run(settings)
    assert [(row["method"], row["N"], row["d"]) for row in results["rows"]] == [
        ("tv", 20, 30),
        ("tv_ball", 20, 30),
    ]
    assert all(row["seconds"][0] > 0 and row["peer_seconds"][0] > 0 for row in results["rows"])
    stored = json.loads((tmp_path / "new" / "robust.json").read_text())
    assert stored["rows"] == results["rows"] and stored["commit"] == results["commit"]
    text = (tmp_path / "new" / "robust.md").read_text()
    assert text == robust.render(results) and "| tv_ball" in text
    assert "All 2 at N = 20: " in text


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="--methods: tvv is none of tv, kl"):
        robust.run(robust.Settings(methods="tv,tvv"))
