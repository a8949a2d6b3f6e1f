"""ARSQ against enumeration: all sequences of bins, all tokens one after another, all rows one by one.

What one update computes is in test_agents.py; here is what its values and actions mean.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from rl.agents import arsq, check_data
from rl.networks.layers import Architecture
from rl.types import Learner, Spec, State, Transition
from rl.values import coarse, heads

KEY = jax.random.key(0)
SPEC = Spec((3,), 2)
ALPHA, GRID = 0.7, coarse.Grid(2, 3)
ROWS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "dimension": {"order": "dimension", "trunk": "level"},
    "no levels": {"see_levels": False, "trunk": "token"},
    "no dimensions": {"see_dimensions": False},
    "neither": {"see_levels": False, "see_dimensions": False, "trunk": "token"},
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def batch(rows: int = ROWS, **fields: Any) -> Transition:
    action = np.random.default_rng(1).uniform(-1, 1, (rows, 2)).astype(np.float32)
    one = np.ones(rows, np.float32)
    return Transition(
        normal(rows, 3), action, normal(rows, seed=2), one, normal(rows, 3, seed=3), action, one
    )._replace(**fields)


def filled(learner: Learner, scale: float = 1.0) -> State:
    """A state with random parameters, whose members and bins differ by much."""
    rng = np.random.default_rng(1)
    state = jax.eval_shape(learner.init, KEY, batch())
    fill = lambda x: jnp.asarray(rng.normal(0, scale, x.shape), jnp.float32)
    return State(
        jax.tree.map(fill, state.params),
        jax.tree.map(fill, state.target),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.optimiser),
        jnp.int32(0),
    )


def make(head: str = "scalar", optimiser: Any = optax.sgd, **fields: Any) -> Learner:
    small = {
        "levels": 2,
        "bins": 3,
        "hidden": (6,),
        "temperature": ALPHA,
        "network": Architecture(activation="tanh"),
    }
    return arsq.make(arsq.Config(**small | fields), SPEC, heads.make(head, -5.0, 5.0, 9), optimiser)


class Enumerated(NamedTuple):
    learner: Learner
    state: State
    tokens: coarse.Tokens
    observation: np.ndarray  # [ROWS, 3]
    sequences: np.ndarray  # [81, T] bins of all actions, in the order of tokens
    actions: np.ndarray  # [81, D]
    q: np.ndarray  # [E, 81, ROWS]
    v: np.ndarray  # [E, ROWS], by enumeration


@functools.cache
def enumerated(variant: str) -> Enumerated:
    fields = VARIANTS[variant]
    switches = {name: fields[name] for name in ("see_levels", "see_dimensions") if name in fields}
    tokens = coarse.tokens(GRID, 2, fields.get("order", "level"), **switches)
    learner = make(**fields)
    state = filled(learner)
    sequences = np.array(list(itertools.product(range(3), repeat=4)))
    bins = np.zeros((81, 2, 2), np.int32)
    bins[:, tokens.level, tokens.dimension] = sequences
    actions = np.asarray(coarse.decode(GRID, jnp.asarray(bins)))
    observation = normal(ROWS, 3)
    # All actions at all observations in one call: actions have a leading axis that observations lack.
    assert learner.critics is not None
    q = learner.critics(state, observation, jnp.broadcast_to(actions[:, None], (81, ROWS, 2)))
    q = np.asarray(q, np.float64)
    v = ALPHA * special.logsumexp(q / ALPHA, axis=1)
    return Enumerated(learner, state, tokens, observation, sequences, actions, q, v)


def advantages(e: Enumerated, prefix: list[int]) -> np.ndarray:
    """Of the token after ``prefix``, [E, B, ROWS], from enumerated Q alone: what its subtree is worth, softly."""
    t = len(prefix)
    within = (e.sequences[:, :t] == prefix).all(1)
    soft = [
        ALPHA * special.logsumexp(e.q[:, within & (e.sequences[:, t] == b)] / ALPHA, axis=1) for b in range(3)
    ]
    values = np.stack(soft, 1)
    return values - ALPHA * special.logsumexp(values / ALPHA, axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_soft_value_of_all_actions_is_v_and_acting_takes_the_best_bin_of_the_smaller_member(
    variant: str,
) -> None:
    """``alpha log sum_a exp(Q / alpha) = V``; and what is acted on, from Q's of all sequences and no network.

    The sum over all actions below a prefix of bins is what the prefix is worth, so that the advantages of its next
    token, and with them the greedy path of the members' minimum, follow from Q alone (theorem 4.3 of the paper).
    """
    e = enumerated(variant)
    slow = e.state._replace(target=e.state.params)
    assert e.learner.value is not None
    smallest = e.learner.value(slow, e.observation, KEY)
    np.testing.assert_allclose(smallest, e.v.min(0), rtol=1e-4, atol=1e-4)
    chosen = np.asarray(e.learner.act(e.state, e.observation, KEY))
    for row in range(ROWS):
        prefix: list[int] = []
        for _ in range(4):
            prefix.append(int(advantages(e, prefix).min(0)[:, row].argmax()))
        index = (e.sequences == prefix).all(1).argmax()
        np.testing.assert_allclose(chosen[row], e.actions[index], atol=1e-6)


@pytest.mark.slow
def test_without_conditioning_the_greedy_path_is_the_best_action_and_with_it_need_not_be() -> None:
    """One member, by enumeration in many states: independent tokens sum, and the best bins make the best sum.

    With conditioning a path is greedy in what its first bin is worth softly, over all that may follow, and at this
    temperature that is not the largest Q (the paper's tabular figure).
    """
    observation, apart = normal(100, 3, seed=4), {}
    for variant in ("paper", "neither"):
        e = enumerated(variant)
        learner = make(**VARIANTS[variant], critics=1)
        state = e.state._replace(params=jax.tree.map(lambda x: x[:1], e.state.params))
        assert learner.critics is not None
        q = learner.critics(state, observation, jnp.broadcast_to(e.actions[:, None], (81, 100, 2)))[0]
        best = e.actions[np.asarray(q).argmax(0)]
        apart[variant] = (np.abs(best - learner.act(state, observation, KEY)).max(1) > 1e-5).sum()
    assert apart["neither"] == 0
    assert 0 < apart["paper"] < 100


@pytest.mark.slow
def test_exploring_draws_bins_in_proportion_to_the_smaller_advantages() -> None:
    """Frequencies of all 81 actions against products of the enumerated probabilities."""
    e = enumerated("paper")
    draws = 20_000
    assert e.learner.explore is not None
    chosen = jax.jit(e.learner.explore)(e.state, jnp.broadcast_to(e.observation[0], (draws, 3)), KEY)
    cells = np.asarray(coarse.cell(GRID, chosen)) @ [9, 1]
    known = np.asarray(coarse.cell(GRID, jnp.asarray(e.actions))) @ [9, 1]
    expected = np.ones(81)
    for i, sequence in enumerate(e.sequences):
        for t in range(4):
            smallest = advantages(e, list(sequence[:t])).min(0)[:, 0] / ALPHA
            expected[i] *= special.softmax(smallest)[sequence[t]]
    frequencies = np.bincount(cells, minlength=81)[known] / draws
    np.testing.assert_allclose(expected.sum(), 1, rtol=1e-6)
    assert np.abs(frequencies - expected).max() < 4 * np.sqrt(0.25 / draws)


@pytest.mark.slow
def test_cloning_is_for_demonstrations_alone_and_is_divided_by_their_number() -> None:
    """Rows of other origins change what TD learns, and not the BC term; without origins all rows are logged."""
    learner, rows = make(demonstrations=2), batch(6)
    state, update = filled(learner), jax.jit(learner.update)
    # As the rows of a fixed dataset are: without an origin.
    logged = jax.tree.map(float, jax.jit(make().update)(state, rows, KEY)[1])
    assert arsq.Config().demonstrations == 0  # logged data, where there are several sources

    def metrics(origin: list[int], action: np.ndarray = rows.action) -> dict[str, float]:
        values = update(state, rows._replace(origin=np.int32(origin), action=action), KEY)[1]
        return {name: float(metric) for name, metric in values.items()}

    every, none = metrics([2] * 6), metrics([1] * 6)
    assert every["bc_loss"] == pytest.approx(logged["bc_loss"], rel=1e-6)
    assert none["bc_loss"] == 0
    for name in ("critic_loss", "advantage_loss"):
        assert none[name] == pytest.approx(logged[name], rel=1e-6)
    first, rest = metrics([2, 2, 0, 1, 0, 1])["bc_loss"], metrics([1, 0, 2, 2, 2, 2])["bc_loss"]
    assert (2 * first + 4 * rest) / 6 == pytest.approx(every["bc_loss"], rel=1e-5)
    elsewhere = rows.action.copy()
    elsewhere[2:] *= -1
    assert metrics([2, 2, 0, 1, 0, 1], elsewhere)["bc_loss"] == pytest.approx(first, rel=1e-6)
    assert metrics([1, 0, 2, 2, 2, 2], elsewhere)["bc_loss"] != pytest.approx(rest, rel=1e-3)


@pytest.mark.slow
def test_weights_stand_at_each_row_and_priorities_are_errors() -> None:
    learner = make()
    assert learner.weighted is not None
    state, rows = filled(learner), batch(6)
    weighted = jax.jit(learner.weighted)
    once, _, distance = weighted(state, rows, jnp.float32([6, 0, 0, 0, 0, 0]), KEY)
    alone = jax.jit(learner.update)(state, jax.tree.map(lambda x: x[:1], rows), KEY)[0]
    # The BC term is divided by all six demonstrations, of which one has the weight of six.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6), once.params, alone.params
    )
    assert learner.critics is not None and learner.value is not None
    y = rows.reward + 0.99 * rows.discount * learner.value(state, rows.next_observation, KEY)
    error = np.square(np.asarray(learner.critics(state, rows.observation, rows.action)) - y)
    np.testing.assert_allclose(distance, error.mean(0), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["scalar", "quantile", pytest.param("c51", marks=pytest.mark.long)])
def test_a_bandit_of_correlated_dimensions_is_solved_by_every_kind_of_head(head: str) -> None:
    """The best of three modes is rare, and its coordinates are each those of a worse one: V and the best action."""
    rng = np.random.default_rng(0)
    modes = np.float32([[0.8, 0.8], [-0.8, -0.8], [0.8, -0.8]])
    which = rng.choice(3, 100, p=[0.2, 0.4, 0.4])
    action = np.clip(modes[which] + rng.normal(0, 0.05, (100, 2)), -1, 1).astype(np.float32)
    reward = np.float32([1.0, 0.1, -1.0])[which]
    still, none = np.zeros((100, 3), np.float32), np.zeros(100, np.float32)
    rows = Transition(still, action, reward, none, still, action, none)
    config = arsq.Config(levels=1, bins=5, hidden=(16,), bc_weight=0.03, temperature=0.05, learning_rate=1e-2)
    learner = arsq.make(config, SPEC, heads.make(head, -2.0, 2.0, 21))

    @jax.jit
    def learned(key: Any) -> State:
        step = lambda state, _: (learner.update(state, rows, key)[0], None)
        return jax.lax.scan(step, learner.init(key, rows), length=400)[0]

    state = learned(KEY)
    best = np.asarray(learner.act(state, still[0], KEY))
    np.testing.assert_allclose(best, [0.8, 0.8], atol=1e-6)
    assert learner.critics is not None
    q = np.asarray(learner.critics(state, still[:3], jnp.asarray(modes))).mean(0)
    np.testing.assert_allclose(q, [1.0, 0.1, -1.0], atol=0.25)


@pytest.mark.slow
def test_contexts_are_of_the_logged_bins_and_an_action_at_a_bound_has_some() -> None:
    """Actions beyond the box count as its bounds, as policies with a tanh never leave it."""
    e = enumerated("paper")
    assert e.learner.critics is not None
    at, beyond = (
        e.learner.critics(e.state, e.observation, np.full((ROWS, 2), x, np.float32)) for x in (1.0, 1.5)
    )
    np.testing.assert_array_equal(at, beyond)
    np.testing.assert_allclose(at, e.q[:, -1], rtol=1e-5)


def test_demonstrations_that_no_row_is_are_an_error_before_anything_is_learned() -> None:
    flagged = arsq.Config(demonstrations=2)
    rows = batch()
    check_data("arsq", arsq.Config(), rows)
    check_data("arsq", arsq.Config(), None)
    check_data("arsq", flagged, rows._replace(origin=np.int32([0, 0, 2, 0])))
    check_data("arsq", arsq.Config(demonstrations=2, bc_weight=0.0), rows)
    check_data("iql", None, rows)
    message = (
        r"demonstrations=2 asks for rows of that origin .* and {}: give 0 for all logged rows, or bc_weight=0"
    )
    with pytest.raises(ValueError, match=message.format("the data do not say where their rows are from")):
        check_data("arsq", flagged, rows)
    with pytest.raises(ValueError, match=message.format("their rows are of 0, 1")):
        check_data("arsq", flagged, rows._replace(origin=np.int32([0, 0, 1, 0])))
    with pytest.raises(ValueError, match=message.format("there are no logged data")):
        check_data("arsq", flagged, None)
    with pytest.raises(ValueError, match="the data do not say"):
        jax.eval_shape(make(demonstrations=2).update, filled(make()), rows, KEY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0 must be positive: .* take 0.0001"),
        ({"temperature": -1.0}, "temperature=-1.0 must be positive"),
        ({"levels": 0}, "levels=0 must be at least 1"),
        ({"bins": 1}, "bins=1 must be at least 2"),
        ({"levels": 9}, r"levels=9 with bins=7 .* lower levels or bins"),
        ({"bc": "margins"}, "bc='margins': did you mean 'margin'"),
        ({"trunk": "dimension"}, "trunk='dimension': choose one of shared, level, token"),
        ({"order": "levels"}, "order='levels': did you mean 'level'"),
        ({"bc_weight": -1.0}, "bc_weight=-1.0 must be at least 0"),
        ({"bc_weight": float("inf")}, "bc_weight=inf must be at least 0, and finite"),
        ({"critics": 0}, "critics=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arsq.Config(**fields)


def test_integer_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="agent 'arsq' cannot act in integer actions: use dqn"):
        arsq.make(arsq.Config(), Spec((3,), 4, discrete=True), heads.scalar())
