"""experiments.expectile_chain: its exact answer is the fixed point, and the study runs from flags to table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import expectile_chain as chain


def test_the_exact_answer_is_where_the_weighted_residuals_of_both_equations_vanish() -> None:
    """Of V: sum_a n(s, a) |tau - 1(u < 0)| u = 0 for u = Q(s, a) - V(s); Q is the mean over logged rows."""
    dataset = chain.logged(3000, seed=0)
    v = np.append(chain.fixed_point(dataset), 0.0)
    steps = dataset.transitions
    state, following = steps.observation.argmax(-1), steps.next_observation.argmax(-1)
    targets = -1.0 + chain.CONFIG.discount * (following != chain.STATES - 1) * v[following]
    for s in range(chain.STATES - 1):
        residual = 0.0
        for a in (0, 1):
            rows = (state == s) & (steps.action == a)
            u = targets[rows].mean() - v[s] if rows.any() else 0.0
            residual += rows.sum() * abs(chain.CONFIG.expectile - (u < 0)) * u
        assert abs(residual) < 1e-6
    assert -75 < v.min() < -60 and v[-2] > -4


@pytest.mark.long
def test_from_flags_to_table(tmp_path: Path) -> None:
    settings = chain.Settings(
        heads="two_hot, 51 atoms",
        seeds=2,
        rows=200,
        updates=4,
        measure_every=2,
        batch_size=4,
        workdir=str(tmp_path / "work"),
        out=str(tmp_path / "out"),
    )
    result = chain.run(settings)
    assert np.shape(result["rmse"]["two_hot, 51 atoms"]) == (2, 2)
    assert "| two_hot, 51 atoms |" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "error.png").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": "two_hot"}, "--heads: two_hot is none of scalar; two_hot, 51 atoms"),
        ({"updates": 5, "measure_every": 2}, "--updates=5 is not a multiple of --measure_every=2"),
        ({"seeds": 1}, "--seeds=1"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain.run(chain.Settings(**changes))
