"""experiments.papers.proposals_chunks: its answers are right, its verdicts can fail, and it runs."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import studies
from experiments.papers import proposals
from experiments.papers import proposals_chunks as parts
from rl.replay import chunks

G = parts.GAMMA


def test_the_chain_has_all_chunks_and_its_values_are_those_of_their_bellman_equation() -> None:
    chunked = chunks.make(parts.chain(), parts.LENGTH, G)
    batch = parts.whole(chunked)
    rows = [
        (int(state.argmax()), tuple(int(x) for x in action))
        for state, action in zip(batch.observation, np.asarray(batch.action), strict=True)
    ]
    assert set(rows) == set(parts.every_chunk()) and len(parts.every_chunk()) == 6 * 16
    # The last state, to the right: it terminates in the first step. All chunks that begin so are worth what that pays.
    q = dict(zip(parts.every_chunk(), parts.enumerated(batch), strict=True))
    for rest in itertools.product((-1, 1), repeat=3):
        assert q[5, (1, *rest)] == pytest.approx(1.0)
    # From the first state all to the left: 0.5 in each step, and then a value that is the mean over what was logged.
    value = [np.mean([q[row] for row in rows if row[0] == state]) for state in range(6)]
    assert q[0, (-1,) * 4] == pytest.approx(0.5 * (1 - G**4) / (1 - G) + G**4 * value[0], abs=1e-6)
    # The same equation for every row of the batch, with the rewards and discounts that the library makes.
    after = np.asarray(batch.next_observation).argmax(-1)
    expected = np.asarray(batch.reward) + G * np.asarray(batch.discount) * np.array(value)[after]
    np.testing.assert_allclose([q[row] for row in rows], expected, atol=1e-5)


@pytest.mark.slow
def test_several_steps_without_chunks_are_biased_by_what_the_direction_pays() -> None:
    """By simulation: a policy that decides in each step, and one that keeps to a direction."""
    value, rng = parts.deciding(1), np.random.default_rng(0)
    total = 0.0
    for _ in range(1500):
        state, sign, weight = 2, 1, 1.0
        for _ in range(60):
            state = (state + sign) % parts.STATES
            total, weight, sign = total + weight * parts.ARRIVAL[state], weight * G, rng.choice([-1, 1])
    assert value[2, 1] == pytest.approx(total / 1500, abs=0.15)
    one = parts.fixed_point(parts.circle().transitions)
    np.testing.assert_allclose(one, value, atol=1e-6)
    assert np.abs(parts.deciding(4) - value).max() > 0.3  # keeping to a direction is worth something else


def test_the_corridor_is_worth_what_its_smdp_says() -> None:
    single = parts.smdp(1)
    expected = [-(1 - 0.999**n) / (1 - 0.999) for n in range(parts.CORRIDOR, 0, -1)]
    np.testing.assert_allclose(single, expected, rtol=1e-9)
    eight = parts.smdp(8)
    assert eight[-1] == -1 and eight[-8] == pytest.approx(-(1 - 0.9**8) / 0.1)
    assert eight[-9] == pytest.approx(-(1 - 0.9**8) / 0.1 - 0.999**8)


def outcome() -> dict[str, Any]:
    """Of a study in which everything holds."""
    two = lambda x: np.array([x, 1.001 * x])
    corridor = {str(n): {"error": two(0.001), "updates": two(1000.0 / n)} for n in parts.CHUNKS}
    return {
        "settings": {"chunk_updates": 2000},
        "chain": {"c51": {"early": two(1e-4), "others": two(1e-4)}},
        "n_step": {
            "one": two(1e-5),
            "several": two(0.5),
            "chunks": two(1e-5),
            "several, explained": two(1e-5),
            "bias": 0.5,
        },
        "discounts": {"c51": corridor},
        "aggregation": {"2 min": {"error": two(1e-8), "in the gap": two(0.5)}},
    }


@pytest.mark.parametrize(
    ("place", "value", "denied"),
    [
        (("chain", "c51", "early"), [1e-4, 0.01], 1),
        (("chain", "c51", "others"), [0.01, 0.01], 1),
        (("n_step", "several, explained"), [0.1, 0.1], 1),
        (("n_step", "several"), [1e-5, 1e-5], 1),
        (("n_step", "chunks"), [0.2, 0.2], 2),
        (("discounts", "c51", "4", "error"), [0.03, 0.001], 1),
        (("discounts", "c51", "8", "updates"), [np.inf, 2000.0], 1),
        (("discounts", "c51", "1", "updates"), [np.inf, np.inf], 0),  # single actions are never there
        (("aggregation", "2 min", "error"), [1e-5, 0.0], 1),
    ],
)
def test_each_claim_holds_of_what_it_says_and_fails_of_what_it_denies(
    place: tuple[str, ...], value: Any, denied: int
) -> None:
    result = outcome()
    assert {row["verdict"] for row in studies.judged(parts.claims(result))} == {studies.HOLDS}
    inner = changed = copy.deepcopy(result)
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = np.array(value)
    verdicts = [row["verdict"] for row in studies.judged(parts.claims(changed))]
    assert sum(verdict != studies.HOLDS for verdict in verdicts) == denied
    assert "| 2 min | 50% |" in "\n".join(parts.report(result))


@pytest.mark.long
def test_the_parts(tmp_path: Path) -> None:
    settings = proposals.Settings(
        parts="chain,n_step,discounts,aggregation",
        heads="c51",
        chunk_seeds=2,
        chunk_updates=10,
        out=str(tmp_path),
    )
    result = proposals.run(settings)
    assert result["chain"]["c51"]["early"].shape == (2,) and "bandit" not in result
    assert set(result["discounts"]["c51"]) == {"1", "4", "8"} and len(result["aggregation"]) == 6
    assert max(row["error"].max() for row in result["aggregation"].values()) < 1e-6
    text = (tmp_path / studies.REPORT).read_text()
    assert "## Sixteen chunks on a chain" in text and "## Aggregation" in text
