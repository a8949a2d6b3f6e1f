"""experiments.papers.arsq: its problems are those it describes, its verdicts can fail, and the study runs."""

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import studies
from experiments.papers import arsq as study
from rl import log


@pytest.mark.slow
def test_logs_are_those_of_the_problems() -> None:
    """Rewards and shares of modes, and what of them a Q-function of one dimension can know."""
    bandit = study.bandit_log(jax.random.key(0), 20_000).transitions
    modes, rewards, shares = (np.array(x) for x in zip(*study.BANDIT, strict=True))
    near = (np.abs(np.asarray(bandit.action)[:, None] - modes).max(-1) < 0.3).argmax(-1)
    np.testing.assert_allclose(np.bincount(near) / len(near), shares, atol=0.02)
    np.testing.assert_allclose(bandit.reward, rewards[near], rtol=1e-6)
    assert not np.any(bandit.discount)
    deviation = (np.asarray(bandit.action) - modes[near])[near != 0].std()
    assert abs(deviation - study.NOISE) < 0.002
    toy = study.toy_log(jax.random.key(0), 20_000).transitions
    np.testing.assert_allclose(toy.reward, study.reward(toy.action))
    assert abs((np.abs(toy.action - 0.5).max(-1) < 0.25).mean() - (0.5 / 16 + 0.1 * 0.683**2)) < 0.01
    at_modes = study.reward(jnp.array([where for where, _ in study.MODES]))
    assert int(at_modes.argmax()) == 0 and float(jnp.abs(at_modes[0] - 10)) < 0.5
    # The second half of the pixels is above the first: rows are the second dimension.
    pixels = np.asarray(study._square(2))
    np.testing.assert_allclose(pixels, [[-0.5, -0.5], [0.5, -0.5], [-0.5, 0.5], [0.5, 0.5]])


def test_closed_forms_of_four_actions() -> None:
    q = studies.published("arsq")["tabular"]["joint"]
    design = np.array([[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]])
    np.testing.assert_allclose(study.additive(q), design @ np.linalg.lstsq(design, q, rcond=None)[0])
    means = [np.mean(np.array(q)[design[:, k] == 1]) for k in range(4)]
    np.testing.assert_allclose(study.marginal(q), design @ means / 2)


def rows() -> dict[str, Any]:
    """A result with which all claims hold."""
    joint = np.array(studies.published("arsq")["tabular"]["joint"])
    tiny, none = np.array([1e-6, 2e-6]), np.zeros(2)
    identity = {"value": tiny, "advantage": tiny, "sum": tiny, "path": none, "apart": none}
    best, majority = [[4, 4], [4, 4]], [[4, 4], [0, 0]]
    unseen = np.array([[[0, 4], [0, 4]]] * 5)
    errors = {study.JOINT: 0.2, study.FLAT: 0.6, study.INDEPENDENT: 14, study.PER_DIMENSION: 15, "cqn": 9}
    return {
        "identities": {
            name: {**identity, "apart": np.array([0.01, 0.05])} if name == "all before" else identity
            for name in study.IDENTITIES
        },
        "tabular": {
            name: {"q": np.stack([exact(joint)] * 2), "greedy": np.array([2, 2] if name == study.JOINT else [0, 0])}
            for name, (_, exact) in study.EXACT.items()
        },
        "toy": {
            name: {"error": error * np.array([1, 1.05]), "early": 3 * error * np.array([1, 1.05])}
            for name, error in errors.items()
        },
        "bandit": {
            name: {"greedy": np.array([best] * 4 + [majority]) if name.startswith(study.JOINT) else unseen}
            for name in study.METHODS
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value", "fails"),
    [
        (("identities", "nothing", "value"), np.array([0.0, 2e-4]), ["is V"]),
        (("identities", "no coarser levels", "sum"), np.array([0.0, 2e-4]), ["sum to"]),
        (("identities", "no other dimensions", "advantage"), np.array([2e-4, 0.0]), ["each token's"]),
        (("identities", "all before", "path"), np.array([0.0, 0.01]), ["acting follows"]),
        (("identities", "nothing", "apart"), np.array([0.0, 0.01]), ["independent tokens"]),
        (("identities", "all before", "apart"), np.array([0.0, 0.01]), ["need not be"]),
        (("tabular", study.JOINT, "q"), np.zeros((2, 4)), ["learns the joint Q"]),
        (("tabular", study.INDEPENDENT, "greedy"), np.array([0, 2]), ["independent dimensions acts (0, 0)"]),
        (("toy", study.JOINT, "error"), np.array([0.7, 0.7]), ["coarse-to-fine (diff", *["in errors of"] * 2]),
        (("toy", study.FLAT, "early"), np.array([0.5, 0.7]), ["after a quarter"]),
        (("toy", study.FLAT, "error"), np.array([16.0, 15.8]), ["smaller"] * 2),
        (("toy", study.INDEPENDENT, "error"), np.array([0.9, 0.9]), ["independent dimensions, in errors of"]),
        (("bandit", "arsq, cql", "greedy"), np.array([[[4, 4], [0, 4]]] * 5), ["every seed at BC weight 0.1"]),
        (("bandit", "arsq, margin", "greedy"), np.array([[[4, 4]] * 2] * 5), ["every seed at BC weight 1"]),
        (("bandit", study.PER_DIMENSION, "greedy"), np.array([[[4, 4], [0, 4]]] * 5), ["no seed at BC"]),
    ],
)  # fmt: skip
def test_each_claim_holds_of_what_it_says_and_fails_of_what_it_denies(
    place: tuple[str, str, str], value: np.ndarray, fails: list[str]
) -> None:
    """Every claim is of a number that decides it, and of no other."""
    result = rows()
    assert {row["verdict"] for row in studies.judged(study.claims(result))} == {studies.HOLDS}
    changed = copy.deepcopy(result)
    part, name, what = place
    changed[part][name][what] = value
    failed = [
        row["claim"] for row in studies.judged(study.claims(changed)) if row["verdict"] != studies.HOLDS
    ]
    assert len(failed) == len(fails) and all(text in claim for text, claim in zip(fails, failed, strict=True))


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags to report, each part with what it compares at least, and numbers that say that agents learned."""
    for table, names in {
        "IDENTITIES": ("all before", "nothing"),
        "TABULAR": (study.INDEPENDENT,),
        "TOY": (study.JOINT,),
        "METHODS": ("arsq, cql", study.PER_DIMENSION),
    }.items():
        monkeypatch.setattr(study, table, {name: getattr(study, table)[name] for name in names})
    for name, value in {"PIECES": 2, "OBSERVATIONS": 60, "PIXELS": 4, "WEIGHTS": (0.1, 1.0)}.items():
        monkeypatch.setattr(study, name, value)
    settings = study.Settings(
        seeds=2, points=300, test_points=100, levels=1, updates=300, batch_size=64, hidden=(16,), learning_rate=1e-2,
        bandit_seeds=2, bandit_points=200, bandit_updates=300, bandit_batch_size=64, bandit_hidden=(16,),
        out=str(tmp_path / "new"),
    )  # fmt: skip
    result = study.run(settings)
    verdicts = {row["claim"]: row["verdict"] for row in result["claims"]}
    denied = [claim for claim, verdict in verdicts.items() if verdict != studies.HOLDS]
    # Too few updates for the majority to win.
    assert len(verdicts) == 11
    assert all("at BC weight 1" in claim for claim in denied)
    assert result["toy"][study.JOINT]["unexplained"].mean() < 0.5
    assert study.optimal(result["bandit"]["arsq, cql"], 0.1).all()
    # A dimension at a time the never logged corner (0, 4) is the best.
    assert (result["bandit"][study.PER_DIMENSION]["greedy"][0] == [0, 4]).all()
    stored = studies.load(tmp_path / "new" / log.RESULT)
    assert stored["claims"] == studies.judged(study.claims(stored)) == result["claims"]
    text = (tmp_path / "new" / studies.REPORT).read_text()
    assert "## Claims" in text and "| published: joint | 0.11 | -0.52 | 0.42 | -1.00 | (1, 0) |" in text
    drawn = {path.name for path in (tmp_path / "new").glob("*.png")}
    assert drawn == {"toy_error.png", "toy_q.png", "bandit.png"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": "toys"}, "--parts: toys is none of identities, tabular, toy, bandit"),
        ({"seeds": 1}, "--seeds=1: an interval over seeds needs at least 2"),
        ({"bandit_seeds": 1}, "--bandit_seeds=1: a share of seeds needs at least 2"),
        ({"updates": 30}, "--updates=30 must be a multiple of 20"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.Settings(**fields))
