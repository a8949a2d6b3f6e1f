"""rl.envs.tabular against closed forms, NumPy, sampled frequencies and published numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rl.envs import tabular
from rl.envs.tabular import MDP, Episodes

# Compiled whole: operation by operation each would be some dozens of programs.
evaluate = jax.jit(tabular.evaluate)
garnet = jax.jit(tabular.garnet, static_argnames=("states", "actions", "branching"))
rollout = jax.jit(tabular.rollout, static_argnames=("episodes", "steps"))
count = jax.jit(tabular.count, static_argnames=("states", "actions"))
empirical = jax.jit(tabular.empirical, static_argnames=("actions", "successors"))

needs_icu_sepsis = pytest.mark.skipif(
    importlib.util.find_spec("icu_sepsis") is None, reason="the package icu-sepsis is not installed"
)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def coin(p: float = 0.25) -> MDP:
    """From state 0, action 0 stays with probability 1 - p and ends with p; action 1 ends at once, for less."""
    return MDP(
        transition=np.array([[[1 - p, p], [0, 1]], [[0, 1], [0, 1]]]),
        successor=np.arange(2),
        reward=np.array([[1.0, 0.5], [0.0, 0.0]]),
        discount=np.array([1.0, 0.0]),
        start=np.array([1.0, 0.0]),
        allowed=np.ones((2, 2), bool),
    )


def sparse(mdp: MDP) -> MDP:
    """The same MDP with next states listed one by one, in an order of its own for every action."""
    order = np.random.default_rng(0).permuted(np.broadcast_to(mdp.successor, mdp.transition.shape), axis=-1)
    return mdp._replace(transition=np.take_along_axis(mdp.transition, order, -1), successor=order)


# ---- evaluate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_evaluate_sums_a_geometric_series(gamma: float) -> None:
    stay = np.array([[1.0, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(evaluate(coin(), stay, gamma), [1 / (1 - gamma * 0.75), 0])
    mixed = np.array([[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(evaluate(coin(), mixed, gamma), [0.75 / (1 - gamma * 0.375), 0])


def test_evaluate_is_the_limit_of_sweeps_in_both_forms() -> None:
    mdp = jax.tree.map(np.asarray, garnet(jax.random.key(1), 7, 3, branching=4))
    policy = np.random.default_rng(0).dirichlet(np.ones(3), 7)
    value = np.zeros(7)
    for _ in range(500):
        value = (policy * (mdp.reward + 0.9 * mdp.transition @ value)).sum(1)
    np.testing.assert_allclose(evaluate(mdp, policy, 0.9), value, rtol=1e-12)
    np.testing.assert_allclose(evaluate(sparse(mdp), policy, 0.9), value, rtol=1e-12)


# ---- what is made here ------------------------------------------------------------------------------------


def test_garnet_has_its_branches() -> None:
    mdp = garnet(jax.random.key(0), 20, 4, branching=3)
    tabular.check(mdp)
    assert ((np.asarray(mdp.transition) > 0).sum(-1) == 3).all()
    assert (garnet(jax.random.key(0), 5, 2).transition > 0).all()


def test_windy_walk_by_hand() -> None:
    alpha = 0.5
    mdp = jax.tree.map(np.asarray, tabular.windy_walk(alpha))
    tabular.check(mdp)
    cells = [(r, c) for r in range(6) for c in range(6) if not (r in (1, 3) and 1 <= c <= 3)]
    at = cells.index
    south, west, east = 1, 2, 3

    def move(cell: tuple[int, int], action: int) -> dict[tuple[int, int], float]:
        row = mdp.transition[at(cell), action]
        return {cells[s]: float(row[s]) for s in np.nonzero(row)[0]}

    assert len(cells) == 30 and mdp.start[at((0, 0))] == 1
    assert move((0, 2), east) == {(0, 3): 0.5, (0, 1): 0.5}
    assert move((0, 2), south) == {(0, 2): 0.5, (0, 1): 0.5}  # a wall
    assert move((0, 2), west) == {(0, 1): 1.0}
    assert move((2, 2), east) == {(2, 3): 1 - 0.5**3, (2, 1): 0.5**3}
    assert move((4, 2), south) == {(5, 2): 1 - 0.5**6, (4, 1): 0.5**6}
    assert move((5, 2), south) == {(5, 2): 1 - 0.5**6, (5, 1): 0.5**6}  # the border
    assert move((0, 5), west) == {(0, 5): 1.0} and mdp.discount[at((0, 5))] == 0  # the goal
    np.testing.assert_array_equal(
        mdp.reward, np.where(np.arange(30) == at((0, 5)), 0, -1)[:, None] * np.ones(4)
    )


def test_windy_walk_without_wind_is_five_steps_long() -> None:
    east = np.tile([0.0, 0, 0, 1], (30, 1))
    mdp = tabular.windy_walk(0.0)
    np.testing.assert_allclose(mdp.start @ evaluate(mdp, east, 0.95), -(1 - 0.95**5) / 0.05)


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_four_rooms_are_an_mdp_whose_states_agents_can_tell_apart(sticky: float) -> None:
    world, seen = tabular.four_rooms(sticky)
    tabular.check(world)
    assert len(np.unique(seen, axis=0)) == len(seen) == 4 * (81 - 13)  # walls
    likely = np.sort(world.transition[world.reward == 0], -1)
    assert (
        likely[:, -1].min() >= 1 - sticky - 1e-6
    )  # elsewhere than at the goal, an action mostly does what it says
    goal = world.reward[:, 0] == 1
    assert goal.sum() == 4 and np.count_nonzero(world.transition[goal][0, 0]) == len(seen) // 4


def test_in_four_rooms_a_wall_holds_and_a_sticky_action_repeats_the_last_move() -> None:
    world, seen = tabular.four_rooms(0.25)
    corner_after_north = 0  # cell (0, 0), last move north
    east = 3
    after = {tuple(seen[s]): p for s, p in enumerate(world.transition[corner_after_north, east]) if p > 0}
    assert after == {(-1, -0.75, 0, 0, 0, 1): 0.75, (-1, -1, 1, 0, 0, 0): 0.25}


# ---- samples --------------------------------------------------------------------------------------------


def test_rollout_follows_the_model() -> None:
    """Pearson's test of every state's and action's next states, and of the actions."""
    mdp = garnet(jax.random.key(2), 4, 3, branching=3)
    policy = np.random.default_rng(1).dirichlet(np.ones(3), 4)
    policy[0] = [0, 0.5, 0.5]
    log = rollout(mdp, policy, jax.random.key(0), 2000, 20)
    assert log.state.shape == (2000, 20) and np.asarray(log.valid).all()
    np.testing.assert_array_equal(log.state[:, 1:], log.next_state[:, :-1])
    counts = np.asarray(count(log, 4, 3))
    assert counts.sum() == 40_000
    expected = np.concatenate(
        [
            (counts.sum(-1, keepdims=True) * np.asarray(mdp.transition)).ravel(),
            (counts.sum((1, 2))[:, None] * policy).ravel(),
        ]
    )
    seen = np.concatenate([counts.ravel(), counts.sum(-1).ravel()])
    np.testing.assert_array_equal(seen[expected == 0], 0)
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = 11 * 2 + 3 * 2 + 1  # rows of three next states (one of them never visited), rows of actions
    assert stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), freedom) > 1e-3
    first = np.bincount(np.asarray(log.state)[:, 0], minlength=4)
    assert stats.chisquare(first).pvalue > 1e-3


def test_rollout_of_the_sparse_form_is_as_likely() -> None:
    mdp = jax.tree.map(np.asarray, garnet(jax.random.key(2), 4, 2, branching=2))
    log = rollout(sparse(mdp), np.full((4, 2), 0.5), jax.random.key(0), 500, 20)
    counts = np.asarray(count(log, 4, 2))
    np.testing.assert_allclose(counts / counts.sum(-1, keepdims=True), mdp.transition, atol=0.06)


def test_episodes_end() -> None:
    stay = np.array([[1.0, 0.0], [1.0, 0.0]])
    log = rollout(coin(), stay, jax.random.key(0), 4000, 60)
    valid = np.asarray(log.valid)
    np.testing.assert_array_equal(valid, np.minimum.accumulate(valid, axis=1))  # once ended, always
    np.testing.assert_array_equal((np.asarray(log.next_state) == 1)[valid], ~valid[:, 1:][valid[:, :-1]])
    assert abs(valid.sum(1).mean() - 4) < 0.2  # geometric
    assert count(log, 2, 2)[1].sum() == 0  # filler is not counted


def test_drawing_never_finds_the_impossible() -> None:
    """Rounded sums below 1, impossible entries at both ends: float32, where the threshold is nearest the total."""
    weights = jnp.array([0.0, 0.1, 0.2, 0.0, 0.3, 0.4, 0.0], jnp.float32) * 0.9999998
    cumulative = jnp.broadcast_to(jnp.cumsum(weights), (100_000, 7))
    drawn = np.bincount(np.asarray(tabular._draw(jax.random.key(0), cumulative)), minlength=7)
    assert drawn[[0, 3, 6]].sum() == 0
    np.testing.assert_allclose(drawn / 1e5, weights, atol=0.01)


@pytest.mark.parametrize(("extreme", "drawn"), [(0.0, 1), (1 - 2**-24, 2)])
def test_drawing_at_the_ends_of_the_unit_interval(
    extreme: float, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least and the largest float32 below 1, for totals that rounding left on either side of 1."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, extreme, jnp.float32))
    for total in np.linspace(0.9999990, 1.0000010, 18, dtype=np.float32):
        cumulative = jnp.array([[0.0, 0.5, total, total]], jnp.float32)
        assert tabular._draw(jax.random.key(0), cumulative).item() == drawn


def test_empirical_model_of_a_small_log() -> None:
    steps = [(0, 2, 1), (0, 2, 1), (0, 2, 3), (0, 0, 2), (1, 1, 0), (2, 0, 3), (2, 0, 3)]
    log = Episodes(*(np.array([column]) for column in zip(*steps, strict=True)), np.ones((1, 7), bool))
    counts = count(log._replace(valid=log.valid & (np.arange(7) != 5)), 4, 3)
    known = MDP(None, None, np.arange(12.0).reshape(4, 3), np.ones(4), np.eye(4)[0], None)
    model, action = empirical(counts, known, actions=2, successors=2)
    tabular.check(model)
    np.testing.assert_array_equal(action[0], [2, 0])  # by frequency
    np.testing.assert_allclose(model.transition[0], [[2 / 3, 1 / 3], [1, 0]])
    np.testing.assert_array_equal(model.successor[0, 0], [1, 3])
    assert model.successor[0, 1, 0] == 2 and model.successor[2, 0, 0] == 3
    np.testing.assert_array_equal(model.reward[0], [2, 0])
    np.testing.assert_array_equal(model.allowed, [[1, 1], [1, 0], [1, 0], [1, 1]])  # state 3 was never left
    np.testing.assert_array_equal(model.successor[3, :, 0], 3)
    narrow, _ = empirical(counts, known, actions=1, successors=1)
    np.testing.assert_allclose(narrow.transition, 1)  # what is forgotten leaves a distribution


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("transition", np.full((2, 2, 2), 0.6), r"transition\[0, 0\] is no distribution.* 1\.2"),
        ("transition", np.array([[[1.5, -0.5]] * 2] * 2), r"transition\[0, 0\].*smallest entry is -0\.5"),
        ("transition", np.full((2, 2, 2), np.nan), r"transition\[0, 0\] is no distribution"),
        ("start", np.array([0.2, 0.2]), r"start\[\] is no distribution"),
        ("discount", np.array([1.0, 1.5]), r"discount must be in \[0, 1\]"),
        ("allowed", np.array([[True, True], [False, False]]), r"state \[1\] allows no action"),
        ("reward", np.zeros((3, 2)), r"reward is for \(3, 2\)"),
    ],
)
def test_check_names_what_is_wrong(field: str, value: np.ndarray, message: str) -> None:
    tabular.check(coin())
    with pytest.raises(ValueError, match=message):
        tabular.check(coin()._replace(**{field: value}))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[robust\]'"):
        tabular.icu_sepsis()


# ---- ICU-Sepsis -----------------------------------------------------------------------------------------------


@needs_icu_sepsis
def test_icu_sepsis_has_its_published_baselines() -> None:
    """The package's page: returns 0.78 (random), 0.78 (clinicians), lengths 9.45 and 9.22, by simulation."""
    mdp, clinicians = tabular.icu_sepsis()
    assert clinicians.shape == (716, 25)
    np.testing.assert_allclose(clinicians.sum(1), 1)
    assert mdp.allowed[:713].sum() == 2238
    step = mdp._replace(reward=np.repeat(np.arange(716) < 713, 25).reshape(716, 25).astype(float))
    for policy, survival, length in ((np.full((716, 25), 0.04), 0.78, 9.45), (clinicians, 0.78, 9.22)):
        assert abs(mdp.start @ evaluate(mdp, policy, 1.0) - survival) < 0.005
        assert abs(step.start @ evaluate(step, policy, 1.0) - length) < 0.05


@needs_icu_sepsis
def test_icu_sepsis_does_not_import_its_package() -> None:
    import sys

    before = set(sys.modules)
    tabular.icu_sepsis()
    assert not {"icu_sepsis", "gym"} & (set(sys.modules) - before)
