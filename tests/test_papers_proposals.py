"""experiments.papers.proposals: its bandit is what it says, its verdicts can fail, and the study runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import studies
from experiments.papers import proposals as study
from rl import log

TINY = study.Settings(seeds=2, batch_size=4000)


def test_the_bandit_is_logged_around_its_modes_with_their_shares() -> None:
    """The best mode, by reward, is the rarest; what a step pays is the reward with noise; nothing follows it."""

    @jax.jit
    def logged() -> tuple[Any, ...]:
        rows = study.batch(TINY, jax.random.key(0))
        return rows, study.describe(rows.action), rows.reward - study.reward(rows.action)

    rows, summary, noise = jax.device_get(logged())
    np.testing.assert_allclose(summary["modes"], study.SHARES, atol=0.03)
    assert summary["near"] > 0.995 and not np.any(rows.discount)
    assert abs(noise.mean()) < 0.07 and abs(noise.std() - study.NOISE) < 0.05
    assert study.WORTH.argmax() == study.SHARES.argmin() == study.BEST


def test_rewards_and_shares_by_hand() -> None:
    actions = np.float32([[0.5, 0.5], [-0.5, 0.25], [0, 0], [0.9, -0.9]])
    fourth = lambda distance: np.exp(-0.5 * (distance / 0.35) ** 4)
    paid = [10, 6 * fourth(0.25), 10 * fourth(np.sqrt(0.5)), 2 * fourth(np.sqrt(0.32))]
    assert study.reward(np.float32([0.5 + study.NEAR, 0.5])) > study.WORTH[1]  # the rim of the best mode
    np.testing.assert_allclose(study.reward(actions), paid, rtol=1e-4)
    drawn = np.float32([[0.5, 0.5], [0.4, 0.6], [-0.5, -0.31], [0, 0]])
    summary = study.describe(drawn)
    assert summary["modes"].tolist() == [0.5, 0, 0.25, 0] and summary["near"] == 0.75
    assert study.expected(0.1, 1) == pytest.approx(0.1)
    assert study.expected(0.1, 32) == pytest.approx(0.9657, abs=1e-4)


def rows() -> dict[str, Any]:
    """A result with which all claims hold."""
    two = lambda x: (
        np.array([x, x]) * np.array([[1.0], [1.001]]) if np.ndim(x) else x * np.array([1.0, 1.001])
    )
    flow = {
        str(n): {"modes": two([study.expected(0.1, n), 0.3, 0.3, 0.2]), "near": two(0.95), "reward": two(4.0)}
        for n in (1, 16)
    }
    return {
        "settings": {"candidates": [1, 16]},
        "bandit": {
            study.GAUSSIAN: {"distance": two(0.5), "near": two(0.2)},
            study.FLOW: {"c51": flow},
            study.DISTILLED: {"c51": {"reward": two(7.0)}},
        },
    }


@pytest.mark.parametrize(
    ("place", "value", "denied"),
    [
        ((study.GAUSSIAN, "distance"), [0.5, 0.19], ["the mean is between modes"]),
        ((study.GAUSSIAN, "near"), [0.95, 0.96], ["more of the flow's draws"]),
        ((study.FLOW, "c51", "1", "modes"), [[0.1, 0.3, 0.3, 0.3], [0.101, 0.3, 0.3, 0.1]], ["covers all four"]),
        ((study.FLOW, "c51", "1", "modes"), [[0.2, 0.3, 0.3, 0.2], [0.2, 0.31, 0.3, 0.19]],
         ["best of 1 is", "the flow's own share"]),
        ((study.FLOW, "c51", "16", "modes"), [[0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.11, 0.09]],
         ["best of 16 is", "the flow's own share"]),
        ((study.DISTILLED, "c51", "reward"), [3.9, 4.2], ["distilled policy earns more"]),
    ],
)  # fmt: skip
def test_each_claim_holds_of_what_it_says_and_fails_of_what_it_denies(
    place: tuple[str, ...], value: Any, denied: list[str]
) -> None:
    result = rows()
    assert {row["verdict"] for row in studies.judged(study.claims(result))} == {studies.HOLDS}
    changed = copy.deepcopy(result)
    inner = changed["bandit"]
    *path, what = place
    for step in path:
        inner = inner[step]
    inner[what] = np.array(value)
    failed = [
        row["claim"] for row in studies.judged(study.claims(changed)) if row["verdict"] != studies.HOLDS
    ]
    assert len(failed) == len(denied), failed
    assert all(re.search(text, claim) for text, claim in zip(denied, failed, strict=True)), failed


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags to report; what is finished is not trained again."""
    settings = study.Settings(
        parts="bandit", heads="c51", seeds=2, updates=10, batch_size=8, hidden=(8,), flow_steps=2, candidates=(1, 3),
        draws=50, out=str(tmp_path / "new"),
    )  # fmt: skip
    result = study.run(settings)
    assert result["bandit"][study.FLOW]["c51"]["3"]["modes"].shape == (2, 4)
    stored = studies.load(tmp_path / "new" / log.RESULT)
    assert stored["claims"] == studies.judged(study.claims(stored)) == result["claims"]
    text = (tmp_path / "new" / studies.REPORT).read_text()
    assert "| c51: the best of 3 |" in text and "| c51: distilled |" in text
    assert (tmp_path / "new" / "best_of.png").exists()
    monkeypatch.setattr(study, "trained", lambda *_: pytest.fail("a finished agent was trained again"))
    np.testing.assert_equal(study.run(settings)["bandit"], result["bandit"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": "bandits"}, "--parts: bandits is none of bandit"),
        ({"heads": "c52"}, "--heads: c52 is none of scalar"),
        ({"chunk_seeds": 1}, "--chunk_seeds=1: an interval over seeds needs at least 2"),
        ({"chunk_updates": 25}, "--chunk_updates=25 must be a multiple of 10"),
        ({"seeds": 1}, "--seeds=1: an interval over seeds needs at least 2"),
        ({"updates": 25}, "--updates=25 must be a multiple of 10"),
        ({"candidates": (0, 1)}, "--candidates=0,1 must be positive, with 1 among them"),
        ({"candidates": (4, 16)}, "--candidates=4,16 must be positive, with 1 among them"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.Settings(**fields))
