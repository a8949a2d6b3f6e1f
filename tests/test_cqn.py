"""CQN: what one network says of all bins, by enumeration, and which rows are demonstrations.

One update is held against NumPy in test_agents.py, what every agent promises to the loop in test_contracts.py.
"""

from __future__ import annotations

import functools
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
    small = {"levels": 2, "bins": BINS, "features": 8, "hidden": (16,), "network": Architecture()}
    return cqn.Config(**small | fields)


def batch() -> Transition:
    draw = lambda *shape: RNG.normal(0, 2, shape).astype(np.float32)
    action = RNG.uniform(-1, 1, (ROWS, 2)).astype(np.float32)
    alive = np.float32([1, 0, 1, 1, 0, 1, 1, 1])
    return Transition(draw(ROWS, 3), action, draw(ROWS), alive, draw(ROWS, 3), action, alive)


BATCH = batch()


def random_state(learner: Learner) -> State:
    """With parameters that differ in every bin, and target networks that differ from them."""
    state = jax.eval_shape(learner.init, KEY, BATCH)
    rng = np.random.default_rng(1)
    fill = lambda x: jnp.asarray(rng.normal(0, 1.0 if x.ndim > 1 else 0.3, x.shape), x.dtype)
    return state._replace(
        params=jax.tree.map(fill, state.params),
        target=jax.tree.map(fill, state.target),
        optimiser=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.optimiser),
        step=jnp.int32(0),
    )


def build(**fields: Any) -> tuple[Learner, State]:
    learner = cqn.make(config(**fields), SPEC, HEAD)
    return learner, random_state(learner)


def expected_value(logits: np.ndarray) -> np.ndarray:
    return special.softmax(logits, -1) @ np.linspace(-3, 3, 7)


# ---- zooming in --------------------------------------------------------------------------------------------------


def test_one_level_acts_on_the_best_of_all_actions() -> None:
    """Dimensions are independent: of all B^D actions the greedy one has the greatest mean over dimensions."""
    learner, state = build(levels=1, slow_policy=False)
    centres = np.float32([-2 / 3, 0, 2 / 3])
    every = np.float32(list(itertools.product(centres, repeat=2)))  # [9, 2]
    assert learner.critics is not None
    values = jax.jit(learner.critics)(state, BATCH.observation, np.repeat(every[:, None], ROWS, 1))
    best = every[np.asarray(values[0]).argmax(0)]  # of [9, ROWS]
    np.testing.assert_allclose(jax.jit(learner.act)(state, BATCH.observation, KEY), best, atol=1e-6)
    assert len(np.unique(best)) > 1


def test_acting_zooms_into_the_best_bin_of_every_level() -> None:
    """Against NumPy, which cuts one interval after another; and the critic says of this action what was seen there."""
    learner, state = build()
    act = jax.jit(learner.act)
    choose = cqn_reference.greedy(expected_value)
    for params in (state.target["q"], state.params["q"]):
        exact = jax.tree.map(np.float64, params)
        every, bins, action = cqn_reference.walk(exact, BATCH.observation, choose, 2, 2)
        result = act(
            state._replace(target={"q": params}), BATCH.observation, KEY
        )  # acts by the target network
        np.testing.assert_allclose(result, action, atol=1e-6)
        assert len(np.unique(bins)) == BINS
    seen = expected_value(cqn_reference.picked(every, bins)).mean((0, 2))
    assert learner.critics is not None
    np.testing.assert_allclose(
        jax.jit(learner.critics)(state, BATCH.observation, result)[0], seen, rtol=1e-4, atol=1e-5
    )


def test_value_is_what_targets_continue_with() -> None:
    """The target network's values of the bins that the network itself zooms into, over all levels and dimensions."""
    learner, state = build()
    exact = jax.tree.map(np.float64, state)
    seen, choose = BATCH.next_observation, cqn_reference.greedy(expected_value)
    action = cqn_reference.walk(exact.params["q"], seen, choose, 2, 2)[2]
    every, bins, _ = cqn_reference.walk(exact.target["q"], seen, cqn_reference.follow(action), 2, 2)
    expected = expected_value(cqn_reference.picked(every, bins)).mean((0, 2))
    assert learner.value is not None
    np.testing.assert_allclose(jax.jit(learner.value)(state, seen, KEY), expected, rtol=1e-4, atol=1e-5)


def test_ties_are_drawn_from_what_is_within_a_ten_thousandth() -> None:
    values = jnp.asarray([[1.0, 1.00005, 0.9, 1.00009], [0.0, 2.0, 0.0, 0.0]])
    drawn = jax.vmap(lambda key: cqn.best(values, key))(jax.random.split(KEY, 200))
    assert set(drawn[:, 0].tolist()) == {0, 1, 3} and set(drawn[:, 1].tolist()) == {1}
    assert cqn.best(values).tolist() == [3, 1]


def test_exploration_is_noise_on_the_grid() -> None:
    """Centres of the last intervals, inside the box, and more than the greedy ones of the same observations."""
    learner, state = build(exploration_noise=0.5)
    assert learner.explore is not None
    explored = np.asarray(
        jax.jit(learner.explore)(state, np.tile(BATCH.observation, (50, 1)), KEY), np.float64
    )
    number = (explored + 1) / 2 * BINS**2 - 0.5
    np.testing.assert_allclose(number, number.round(), atol=1e-5)
    assert set(np.unique(number.round())) == set(range(BINS**2))


def test_it_explores_around_what_it_plays() -> None:
    """By the slow policy that both follow: without noise they are the same."""
    learner, state = build(exploration_noise=0.0)
    assert learner.explore is not None
    explore, act = (
        functools.partial(of, observation=BATCH.observation, key=KEY) for of in (learner.explore, learner.act)
    )
    np.testing.assert_allclose(*jax.jit(lambda state: (explore(state), act(state)))(state), atol=1e-6)


def test_all_bins_start_alike_and_ties_are_then_all_of_them() -> None:
    """As published, the last layers start at 0: the first actions that it collects are uniform."""
    learner, _ = build(exploration_noise=0.0, levels=1)
    state = jax.jit(learner.init)(KEY, BATCH)
    assert learner.explore is not None
    explored = jax.jit(learner.explore)(state, np.tile(BATCH.observation, (40, 1)), KEY)
    counts = np.unique(np.asarray(explored).round(3), return_counts=True)[1]
    assert len(counts) == BINS and counts.min() > 0.25 * counts.sum()


# ---- which rows count, and how --------------------------------------------------------------------------------------


@functools.cache
def updates() -> dict[str, Any]:
    """Compiled updates by weighted rows: as it is, without demonstration terms, and ignoring terminations."""
    fields = {
        "whole": {},
        "td": {"dominance_weight": 0.0, "margin_weight": 0.0},
        "endless": {"ignore_terminals": True},
    }
    return {name: jax.jit(build(**of_one)[0].weighted) for name, of_one in fields.items()}


def updated(which: str, weight: Any = None, **fields: Any) -> tuple[State, dict[str, Any], Any]:
    rows = BATCH._replace(**{"origin": np.zeros(ROWS, np.int32)} | fields)
    return updates()[which](build()[1], rows, np.ones(ROWS, np.float32) if weight is None else weight, KEY)


@pytest.mark.slow
def test_demonstration_terms_are_for_logged_rows_alone() -> None:
    """Their mean is over demonstrations; without any they are 0 and the update is that of TD alone."""
    origins = [np.int32([source.LOGGED] * n + [source.ONLINE] * (ROWS - n)) for n in (0, 2, ROWS)]
    (online, none, _), (_, some, _), (logged, every, _) = (updated("whole", origin=x) for x in origins)
    rest = updated("whole", origin=source.LOGGED + source.ONLINE - origins[1])[1]
    td = updated("td")[0]
    assert none["dominance_loss"] == none["margin_loss"] == 0
    differs = lambda one: jax.tree.leaves(
        jax.tree.map(lambda x, y: np.abs(x - y).max(), one.params, td.params)
    )
    assert max(differs(online)) < 1e-6 < 1e-5 < max(differs(logged))
    for name in ("dominance_loss", "margin_loss"):
        np.testing.assert_allclose((2 * some[name] + (ROWS - 2) * rest[name]) / ROWS, every[name], rtol=1e-5)
        assert every[name] > 0
    np.testing.assert_allclose(none["critic_loss"], every["critic_loss"], rtol=1e-6)


@pytest.mark.slow
def test_terminations_are_ignored_only_where_asked_for() -> None:
    alive = np.ones(ROWS, np.float32)
    for which, ignores in (("whole", False), ("endless", True)):
        losses = [updated(which, discount=x)[1]["critic_loss"] for x in (BATCH.discount, alive)]
        assert (losses[0] == losses[1]) == ignores


@pytest.mark.slow
def test_weights_scale_rows_and_priorities_are_the_rows_own() -> None:
    _, every, priority = updated("td")
    assert priority.shape == (ROWS,) and (priority > 0).all()
    alone = [updated("td", row) for row in ROWS * np.eye(ROWS, dtype=np.float32)]
    mean = np.mean([metrics["critic_loss"] for _, metrics, _ in alone])
    np.testing.assert_allclose(mean, every["critic_loss"], rtol=1e-5)
    np.testing.assert_allclose(alone[2][2], priority, rtol=1e-5)
    whole, *each = [updated("whole", row)[1] for row in (None, *ROWS * np.eye(ROWS, dtype=np.float32))]
    for name in ("critic_loss", "dominance_loss", "margin_loss"):
        values = [metrics[name] for metrics in each]
        np.testing.assert_allclose(np.mean(values), whole[name], rtol=1e-5)
        assert np.ptp(values) > 1e-3 * whole[name]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"levels": 0}, "levels=0"),
        ({"bins": 1}, "bins=1"),
        ({"levels": 12, "bins": 5}, "levels=12 with bins=5"),
        ({"exploration_noise": float("nan")}, "exploration_noise=nan must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_what_comes_after_terminations_must_be_logged_to_be_bootstrapped_from() -> None:
    """And no support follows from the data, whose episodes end."""
    endless = config(ignore_terminals=True)
    unknown = BATCH._replace(next_observation=BATCH.observation)
    ended = int((BATCH.discount == 0).sum())
    agents.check_data("cqn", endless, BATCH)
    agents.check_data("cqn", config(), unknown)
    with pytest.raises(
        ValueError, match=f"what was observed after {ended} of them: give data with next_observations"
    ):
        agents.check_data("cqn", endless, unknown)
    assert agents.target_range("cqn", config(), SPEC, -1.0, 2.0) == (-1.0, 2.0)
    assert agents.target_range("cqn", endless, SPEC, -1.0, 2.0) == (-np.inf, np.inf)


def test_demonstrations_that_no_row_is_are_refused() -> None:
    """Before a run, where agents are asked about its data; and in an update whose rows have no origin."""
    rows = BATCH._replace(origin=np.int32([0] * 3 + [2] * 5))
    agents.check_data("cqn", config(demonstrations=2), rows)
    agents.check_data("cqn", config(), None)  # online from nothing: no demonstrations are looked for
    with pytest.raises(ValueError, match=r"demonstrations=1 asks for rows .* their rows are of 0, 2: give 0"):
        agents.check_data("cqn", config(demonstrations=1), rows)
    with pytest.raises(ValueError, match=r"there are no logged data: .* margin_weight=0 for none"):
        agents.check_data("cqn", config(demonstrations=1), None)
    agents.check_data("cqn", config(demonstrations=1, dominance_weight=0.0, margin_weight=0.0), None)
    learner, state = build(demonstrations=1)
    with pytest.raises(ValueError, match="the data do not say where their rows are from"):
        jax.eval_shape(learner.update, state, BATCH, KEY)
