"""benchmarks.parity: d3rlpy's learners with our settings make our updates; what is said of the differences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from benchmarks import cases, parity, parity_steps, peers
from experiments import studies
from rl import train
from rl.agents import get
from rl.data import recipes
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Spec
from rl.values import heads

TIER = "hopper-medium-regen-v5"


def small(agent: str, **changed: Any) -> Any:
    config = get(agent).Config()
    network = dataclasses.replace(config.network, norm_after=agent == "rebrac")
    return dataclasses.replace(config, hidden=(16, 16), network=network, **changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "changed", "tolerance"),
    [
        ("iql", {}, 1e-4),
        ("td3_bc", {"policy_noise": 0.0}, 1e-4),
        ("rebrac", {"policy_noise": 0.0}, 1e-4),
        ("cql", {}, 0.05),  # its targets, proposals and policy draw
    ],
)
def test_d3rlpy_makes_our_updates(agent: str, changed: dict[str, Any], tolerance: float) -> None:
    """From our weights, on our batches: losses and weights stay equal; CQL's losses as far as draws allow."""
    pytest.importorskip("d3rlpy")
    from benchmarks import d3rlpy_peer as peer

    config, batch_size = small(agent, **changed), 2048 if agent == "cql" else 64
    data = parity.usable(cases.synthetic(3000))
    spec = Spec(data.transitions.observation.shape[1:], data.transitions.action.shape[-1])
    learner = get(agent).make(config, spec, heads.scalar())
    sample = replay.sampler(batch_size)
    state = learner.init(jax.random.key(1), sample(data, jax.random.key(0)))
    peer_learner = peer.learner(agent, config, spec, batch_size, 0)
    start = jax.device_get(state.params)
    peer.load(peer_learner, start)
    parts = (
        peer_learner.impl.modules.get_torch_modules().values()
    )  # a difference that six updates do not show
    assert {m.eps for part in parts for m in part.modules() if hasattr(m, "normalized_shape")} <= {1e-6}
    blank = jax.tree.map(np.zeros_like, start)
    for name, weights in peer.weights(peer_learner, blank).items():
        if not name.startswith("log_"):
            jax.tree.map(np.testing.assert_array_equal, weights, start[name])
    update = jax.jit(learner.update)
    for i in range(6):
        batch = jax.device_get(sample(data, jax.random.key(i)))
        state, ours = update(state, batch, jax.random.key(100 + i))
        theirs = peer.update(peer_learner, agent, config, batch)
        due = i % 2 == 1 or agent in ("iql", "cql")
        assert set(theirs) == (set(parity.LOSSES[agent]) if due else {"critic_loss"})
        # Ours is scaled so that its mean over all updates is that over the updates in which the policy moved.
        scale = 1 if agent in ("iql", "cql") else 2
        for name, loss in theirs.items():
            expected = float(ours[name]) / (1 if name == "critic_loss" else scale)
            assert loss == pytest.approx(expected, rel=tolerance, abs=tolerance), (i, name)
    if agent != "cql":
        for name, weights in peer.weights(peer_learner, blank).items():
            moved = lambda x, y, z: np.testing.assert_allclose(x - z, y - z, atol=5e-6)
            jax.tree.map(moved, weights, jax.device_get(state.params[name]), start[name])


@pytest.mark.slow
def test_the_temperature_of_d3rlpy_moves_as_ours() -> None:
    """By Adam, along the gradient of its logarithm, after the policy's loss: where that gradient changes in size."""
    pytest.importorskip("d3rlpy")
    import torch

    from benchmarks import d3rlpy_peer as peer

    config = small("cql")
    impl = peer.learner("cql", config, Spec((11,), 3), 4, 0).impl
    log_temp = next(impl.modules.log_temp.parameters())
    rule = optax.adam(config.policy_learning_rate)
    expected = jnp.zeros(())
    memory = rule.init(expected)
    for log_prob in (5.0, -40.0, 3.5, 2.0, 3.01):
        before = float(log_temp)
        impl.update_temp(torch.full((4, 1), log_prob))
        assert float(log_temp) == before
        log_temp.grad = torch.full_like(log_temp, 7.0)  # what the policy's loss leaves
        peer._move_temperature(impl)
        step, memory = rule.update(jnp.asarray(-(log_prob - 3)), memory)
        expected = expected + step
        assert float(log_temp) == pytest.approx(float(expected), rel=1e-5)


def test_what_d3rlpy_does_not_have_is_refused() -> None:
    pytest.importorskip("d3rlpy")
    from benchmarks import d3rlpy_peer as peer

    peer.check("cql", small("cql"))
    with pytest.raises(ValueError, match=r"agent\.target_gap=5\.0: d3rlpy's cql has 0\.0 alone"):
        peer.check("cql", small("cql", target_gap=5.0))
    with pytest.raises(ValueError, match=r"norm_after=False: d3rlpy's rebrac has True alone"):
        peer.check("rebrac", get("rebrac").Config())


def test_rows_that_both_draw_are_those_of_d3rlpy() -> None:
    """Its own reader, on episodes that end and episodes that are cut."""
    pytest.importorskip("d3rlpy")
    data = cut(cases.synthetic(60))
    buffer = peers.buffer(data)
    ours = parity.usable(data).transitions
    pick = buffer.transition_picker
    theirs = [pick(e, i) for e in buffer.episodes for i in range(e.transition_count)]
    assert 40 < len(theirs) < 60 and len(theirs) == len(ours.reward)
    for name in ("observation", "action", "next_observation", "next_action"):
        column = getattr(ours, name)
        goes_on = ours.discount > 0 if name.startswith("next") else np.ones(len(column), bool)
        np.testing.assert_array_equal(np.stack([getattr(t, name) for t in theirs])[goes_on], column[goes_on])
    np.testing.assert_array_equal([t.terminal for t in theirs], 1 - ours.discount)
    np.testing.assert_array_equal(np.ravel([t.reward for t in theirs]), ours.reward)


def cut(data: Dataset) -> Dataset:
    """Episodes of 12 steps, every second of which terminates."""
    steps, last = data.transitions, np.arange(len(data.last)) % 12 == 11
    discount = np.where(last & (np.arange(len(last)) // 12 % 2 == 0), 0, 1).astype(np.float32)
    after = np.minimum(np.arange(len(last)) + 1, len(last) - 1)
    following = np.where(last, np.arange(len(last)), after)
    return Dataset(
        steps._replace(
            discount=discount,
            next_observation=np.where(last[:, None], steps.next_observation, steps.observation[following]),
            next_action=steps.action[following],
            has_next_action=(~last).astype(np.float32),
        ),
        last,
    )


def outcome(run: parity.Run) -> dict[str, Any]:
    """Numbers that are higher for d3rlpy, the more the larger the seed."""
    rng, shift = np.random.default_rng(run.seed), 0.5 * (run.seed + 1) * (run.library == parity.THEIRS)
    return {
        "updates": [500, 1000],
        "metrics": {"critic_loss": (rng.normal(2, 0.1, 2) + shift).tolist()},
        "returns": (rng.normal(40, 5, 2) + 30 * shift).tolist(),
        "data": "digest",
    }


def test_differences_are_taken_seed_by_seed_and_runs_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against scipy's paired test; pairs share their data; what is finished or stored is not trained."""
    runs = [parity.Run("iql", TIER, seed, library) for seed in range(4) for library in parity.STEPS]
    rows = [{**run._asdict(), **outcome(run)} for run in runs]
    (block,) = parity.compared(rows)
    ours, theirs = (
        np.array([row["returns"] for row in rows if row["library"] == x])
        for x in (parity.OURS, parity.THEIRS)
    )
    for w in range(2):
        t = stats.ttest_rel(theirs[:, w], ours[:, w]).confidence_interval(0.95)
        np.testing.assert_allclose(block["returns"]["difference"][w]["ci95"], t)
    t = stats.ttest_rel(theirs.mean(1), ours.mean(1)).confidence_interval(0.95)
    np.testing.assert_allclose(block["returns"]["whole"]["difference"]["ci95"], t)
    later, last = block["returns"]["later"]["difference"], block["returns"]["difference"][1]
    assert (later["mean"], later["ci95"]) == (last["mean"], last["ci95"])
    assert parity.compared([row for row in rows if row["seed"] == 0 or row["library"] == parity.OURS]) == []
    made_again = [
        row | {"data": "other"} if row["seed"] and row["library"] == parity.OURS else row for row in rows
    ]
    assert parity.compared(made_again) == []

    trained = []

    def fake(
        settings: Any, agent: str, tier: str, steps: Any, seed: int, data: str, work: Any
    ) -> dict[str, Any]:
        if len(trained) == 3:
            raise KeyboardInterrupt
        library = {parity.ours: parity.OURS, parity.theirs: parity.THEIRS}[steps]
        trained.append((library, seed))
        return outcome(parity.Run(agent, tier, seed, library))

    monkeypatch.setattr(parity, "train_one", fake)
    monkeypatch.setattr(parity, "check", lambda settings: (["iql"], [TIER]))
    monkeypatch.setattr(peers, "versions", lambda: {"d3rlpy": "0", "torch": "0"})
    monkeypatch.setattr(studies, "digest", lambda name, variant: name)
    settings = parity.Settings(
        agents="iql", tiers=TIER, seeds=2, updates=1000, eval_every=500, out=str(tmp_path / "first")
    )
    with pytest.raises(KeyboardInterrupt):
        parity.run(settings)
    assert "No agent has two seeds of both" in (tmp_path / "first" / studies.REPORT).read_text()
    assert trained == [(parity.OURS, 0), (parity.THEIRS, 0), (parity.OURS, 1)]
    elsewhere = dataclasses.replace(settings, stored=str(tmp_path / "first"), out=str(tmp_path / "second"))
    for change in (settings, elsewhere):
        trained[:] = ["again"]
        result = parity.run(change)
        assert trained == ["again", (parity.THEIRS, 1)][: 2 if change is settings else 1]
        text = (Path(change.out) / studies.REPORT).read_text()
        assert "## iql, hopper-medium-regen-v5, 2 seeds" in text and "Not finished" not in text
        assert len(result["rows"]) == 4 and result["d3rlpy"] == ["d3rlpy 0, torch 0"]
    more = dataclasses.replace(elsewhere, seeds=3, out=str(tmp_path / "third"))
    trained[:] = []
    assert len(parity.run(more)["rows"]) == 6 and trained == [(parity.OURS, 2), (parity.THEIRS, 2)]
    with pytest.raises(
        ValueError, match="was made with --set=, and this command has x=1, so that their rows do not compare"
    ):
        parity.run(dataclasses.replace(elsewhere, set="x=1"))


def test_other_published_settings_are_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a table that is no code: seeds of one version were paired with those of the other library's next."""
    run = parity.Run(
        **{**dict.fromkeys(parity.Run._fields, "iql"), "tier": TIER, "library": parity.OURS, "seed": 0}
    )

    def digest(settings: parity.Settings) -> str:
        return studies.digest("run", parity.variant(settings, run, "data"))

    usual = digest(parity.Settings())
    assert digest(parity.Settings(data_folder="elsewhere")) == usual
    resolved = parity.resolved
    changed = lambda *of: (resolved(*of)[0], dataclasses.replace(resolved(*of)[1], expectile=0.9))
    monkeypatch.setattr(parity, "resolved", changed)
    assert digest(parity.Settings()) != usual


def test_a_run_that_diverged_is_not_stored() -> None:
    parity.check_finite([{"q": 1.0}, {"q": 2.0}], "theirs of iql", 10)
    with pytest.raises(
        train.Diverged, match="theirs of iql on x, seed 3: loss, q not finite within 10 updates"
    ):
        parity.check_finite([{"q": 1.0, "loss": np.inf}, {"q": np.nan}], "theirs of iql on x, seed 3", 10)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"agents": "iql,edac"}, "--agents: edac is none of iql, td3_bc, cql, rebrac"),
        ({"tiers": "hopper"}, "--tiers: hopper is none of"),
        ({"seeds": 1}, "--seeds=1: an interval over seeds needs at least 2"),
        ({"updates": 700}, "--updates=700 is not a multiple of --eval_every=500"),
        ({"eval_every": 100, "updates": 1000}, "--eval_every=100 must be a multiple of 500"),
        ({"set": "agent.expectil=1"}, "no setting 'expectil': did you mean 'expectile'"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "missing", lambda: None)
    fields = {"agents": "iql", "tiers": TIER, "updates": 1000, "eval_every": 500} | changed
    with pytest.raises(ValueError, match=message):
        parity.check(parity.Settings(**fields))
    monkeypatch.setattr(peers, "missing", lambda: "d3rlpy is left out; `make bench` installs it")
    with pytest.raises(ValueError, match="nothing to compare with: d3rlpy is left out"):
        parity.check(parity.Settings())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"agents": "iql,cql"}, "--agents: cql is none of iql, td3_bc, rebrac"),
        ({"updates": 700}, "--updates=700 must be a multiple of 500"),
        ({"steps": 0}, "--steps=0 must be at least 1"),
    ],
)
def test_steps_that_cannot_be_compared_are_refused_by_name(
    changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "missing", lambda: None)
    with pytest.raises(ValueError, match=message):
        parity_steps.check(parity_steps.Settings(**changed))
    noisy = parity_steps.of_agent(parity_steps.Settings(set="batch_size=64"), "rebrac")
    assert noisy.set == "batch_size=64,agent.policy_noise=0.0"


@pytest.mark.long
def test_both_libraries_learn_the_same_from_a_small_tier(tmp_path: Path) -> None:
    """From data to report: with the same weights and batches, IQL's losses differ by rounding alone."""
    pytest.importorskip("d3rlpy")
    recipes.collect(TIER, out=tmp_path, transitions=2000)
    result = parity.run(
        parity.Settings(
            agents="iql",
            tiers=TIER,
            seeds=2,
            updates=500,
            eval_every=500,
            eval_episodes=2,
            probe=200,
            hidden=(16, 16),
            data_folder=str(tmp_path),
            out=str(tmp_path / "out"),
        )
    )
    (block,) = parity.compared(result["rows"])
    for name, of in block["metrics"].items():
        np.testing.assert_allclose(
            of["difference"][0]["each"], 0, atol=0.02 * abs(of[parity.OURS][0]["mean"]), err_msg=name
        )
    result = parity_steps.run(
        parity_steps.Settings(
            tiers=TIER,
            updates=500,
            hidden=(16, 16),
            set="batch_size=64",
            data_folder=str(tmp_path),
            out=str(tmp_path / "steps"),
        )
    )
    for row in result["rows"]:
        assert row["steps"][-1] == 50 and row["losses"] < 1e-4, row
        assert max(max(shares) for shares in row["apart"].values()) < 1e-2, row
