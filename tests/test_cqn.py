"""CQN: what one network says of all bins, by enumeration, and which rows are demonstrations.

One update is held against NumPy in test_agents.py, what every agent promises to the loop in test_contracts.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import cqn_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from rl import agents
from rl.agents import cqn
from rl.networks.layers import Architecture
from rl.replay import source
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

KEY = jax.random.key(0)
SPEC, BINS = Spec((3,), 2), 3
HEAD = heads.c51(-3.0, 3.0, 7)
RNG = np.random.default_rng(0)
ROWS = 8


def config(**fields: Any) -> cqn.Config:
    return cqn.Config(
        **{"levels": 2, "bins": BINS, "features": 3, "hidden": (8,), "network": Architecture()} | fields
    )


def batch() -> Transition:
    draw = lambda *shape: RNG.normal(0, 2, shape).astype(np.float32)
    action = RNG.uniform(-1, 1, (ROWS, 2)).astype(np.float32)
    alive = np.float32([1, 0, 1, 1, 0, 1, 1, 1])
    return Transition(draw(ROWS, 3), action, draw(ROWS), alive, draw(ROWS, 3), action, alive)


BATCH = batch()


def random_state(learner: Learner) -> State:
    """With parameters that differ in every bin, and slow copies that differ from them."""
    state = jax.eval_shape(learner.init, KEY, BATCH)
    rng = np.random.default_rng(1)
    fill = lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), x.dtype)
    return state._replace(
        params=jax.tree.map(fill, state.params),
        target=jax.tree.map(fill, state.target),
        optimiser=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.optimiser),
        step=jnp.int32(0),
    )


def made(**fields: Any) -> tuple[Learner, State]:
    learner = cqn.make(config(**fields), SPEC, HEAD)
    return learner, random_state(learner)


def expected_value(logits: np.ndarray) -> np.ndarray:
    return special.softmax(logits, -1) @ np.linspace(-3, 3, 7)


# ---- zooming in --------------------------------------------------------------------------------------------------


def test_one_level_acts_on_the_best_of_all_actions() -> None:
    """Dimensions are independent: of all B^D actions the greedy one has the greatest mean over dimensions."""
    learner, state = made(levels=1, slow_policy=False)
    centres = np.float32([-2 / 3, 0, 2 / 3])
    every = np.float32(list(itertools.product(centres, repeat=2)))  # [9, 2]
    assert learner.critics is not None
    values = learner.critics(state, BATCH.observation, np.repeat(every[:, None], ROWS, 1))[0]  # [9, ROWS]
    best = every[np.asarray(values).argmax(0)]
    np.testing.assert_allclose(learner.act(state, BATCH.observation, KEY), best, atol=1e-6)
    assert len(np.unique(best)) > 1


@pytest.mark.parametrize("slow", [True, False])
def test_acting_zooms_into_the_best_bin_of_every_level(slow: bool) -> None:
    """Against NumPy, which cuts one interval after another; and the critic says of this action what was seen there."""
    learner, state = made(slow_policy=slow)
    params = jax.tree.map(np.float64, (state.target if slow else state.params)["q"])
    choose = cqn_reference.greedy(expected_value)
    every, bins, action = cqn_reference.walk(params, BATCH.observation, choose, 2, 2)
    found = learner.act(state, BATCH.observation, KEY)
    np.testing.assert_allclose(found, action, atol=1e-6)
    assert len(np.unique(bins)) == BINS
    seen = expected_value(cqn_reference.picked(every, bins)).mean((0, 2))
    assert learner.critics is not None
    said = learner.critics(
        state._replace(params={"q": jax.tree.map(jnp.float32, params)}), BATCH.observation, found
    )
    np.testing.assert_allclose(said[0], seen, rtol=1e-5, atol=1e-5)


def test_ties_are_drawn_from_what_is_within_a_ten_thousandth() -> None:
    values = jnp.asarray([[1.0, 1.00005, 0.9, 1.00009], [0.0, 2.0, 0.0, 0.0]])
    drawn = jax.vmap(lambda key: cqn.best(values, key))(jax.random.split(KEY, 200))
    assert set(drawn[:, 0].tolist()) == {0, 1, 3} and set(drawn[:, 1].tolist()) == {1}
    assert cqn.best(values).tolist() == [3, 1]


def test_exploration_is_noise_on_the_grid() -> None:
    """Noise of 0 leaves the greedy action; other noise stays on centres of the last intervals, inside the box."""
    learner, state = made(exploration_noise=0.0)
    assert learner.explore is not None
    greedy = learner.act(state, BATCH.observation, KEY)
    np.testing.assert_allclose(learner.explore(state, BATCH.observation, KEY), greedy, atol=1e-6)
    noisy = made(exploration_noise=0.5)[0]
    assert noisy.explore is not None
    explored = np.asarray(noisy.explore(state, np.tile(BATCH.observation, (50, 1)), KEY), np.float64)
    number = (explored + 1) / 2 * 9 - 0.5
    np.testing.assert_allclose(number, number.round(), atol=1e-5)
    assert set(np.unique(number.round())) == set(range(9))


# ---- which rows count, and how --------------------------------------------------------------------------------------


def test_demonstration_terms_are_for_logged_rows_alone() -> None:
    """Their mean is over demonstrations; without any they are 0 and the update is that of TD alone."""
    learner, state = made()
    update = jax.jit(learner.update)
    flagged = lambda *origin: update(state, BATCH._replace(origin=np.int32(origin)), KEY)
    td_alone = jax.jit(made(dominance_weight=0.0, margin_weight=0.0)[0].update)(state, BATCH, KEY)[0]

    online, none = flagged(*[source.ONLINE] * ROWS)
    assert none["dominance_loss"] == none["margin_loss"] == 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), online.params, td_alone.params)
    logged, every = flagged(*[source.LOGGED] * ROWS)
    assert every["dominance_loss"] > 0 and every["margin_loss"] > 0
    assert not all(
        jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), logged.params, td_alone.params))
    )
    parts = [flagged(*[0] * 2, *[1] * 6)[1], flagged(*[1] * 2, *[0] * 6)[1]]
    for name in ("dominance_loss", "margin_loss"):
        np.testing.assert_allclose((2 * parts[0][name] + 6 * parts[1][name]) / ROWS, every[name], rtol=1e-5)
    assert none["critic_loss"] == every["critic_loss"]


def test_terminations_are_ignored_only_where_asked_for() -> None:
    same = []
    for ignore in (False, True):
        update = jax.jit(made(ignore_terminals=ignore)[0].update)
        state = made()[1]
        ends, goes_on = (
            update(state, BATCH._replace(discount=discount), KEY)[1]["critic_loss"]
            for discount in (BATCH.discount, np.ones(ROWS, np.float32))
        )
        same.append(bool(ends == goes_on))
    assert same == [False, True]


def test_weights_scale_rows_and_priorities_are_the_rows_own() -> None:
    learner, state = made(dominance_weight=0.0, margin_weight=0.0)
    assert learner.weighted is not None
    weighted = jax.jit(learner.weighted)
    ones = np.ones(ROWS, np.float32)
    _, every, priority = weighted(state, BATCH, ones, KEY)
    assert priority.shape == (ROWS,) and (priority > 0).all()
    alone = [weighted(state, BATCH, ROWS * np.eye(ROWS, dtype=np.float32)[i], KEY) for i in range(ROWS)]
    np.testing.assert_allclose(
        np.mean([metrics["critic_loss"] for _, metrics, _ in alone]), every["critic_loss"], rtol=1e-5
    )
    np.testing.assert_allclose(alone[2][2], priority, rtol=1e-5)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"levels": 0}, "levels=0"),
        ({"bins": 1}, "bins=1"),
        ({"levels": 12, "bins": 5}, "levels=12 with bins=5"),
        ({"margin_weight": -1.0}, "margin_weight=-1.0 must be at least 0"),
        ({"exploration_noise": float("nan")}, "exploration_noise=nan must be at least 0"),
        ({"features": -1}, "features=-1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agents.get("cqn").make(config(**fields), SPEC, HEAD)
