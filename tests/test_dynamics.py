"""rl.dynamics.ensemble against its equations in NumPy, known systems, and its own stopping rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from rl.dynamics import ensemble
from rl.replay.dataset import Dataset
from rl.types import Spec, Transition

SPEC = Spec((2,), 1)
SMALL = ensemble.Config(
    members=3, elites=2, hidden=(16,), decay=(0.0, 0.0), batch_size=32, learning_rate=3e-3, updates=400
)
KEY = jax.random.key(0)


def log(rows: int = 400, noise: float = 0.0, seed: int = 0, **changes: Any) -> Dataset:
    """s' = s + 0.5 a + noise in the first dimension, s' = 0.9 s in the second; r = s_1 - a."""
    rng = np.random.default_rng(seed)
    observation = rng.normal(size=(rows, 2)).astype(np.float32)
    action = rng.uniform(-1, 1, (rows, 1)).astype(np.float32)
    following = observation * [1, 0.9] + 0.5 * action * [1, 0] + noise * rng.normal(size=(rows, 2)) * [1, 0]
    columns = Transition(
        observation=observation,
        action=action,
        reward=observation[:, 0] - action[:, 0],
        discount=np.ones(rows, np.float32),
        next_observation=following.astype(np.float32),
        next_action=action,
        has_next_action=np.zeros(rows, np.float32),
    )
    return Dataset(columns._replace(**changes), np.ones(rows, bool))


def change(**fields: Any) -> ensemble.Config:
    return dataclasses.replace(SMALL, **fields)


@pytest.fixture(scope="module")
def fitted() -> tuple[ensemble.Ensemble, ensemble.Model]:
    network = ensemble.make(SMALL, SPEC)
    return network, network.fit(log(noise=0.3), KEY)


# ---- equations ------------------------------------------------------------------------------------------


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


@pytest.mark.parametrize("deterministic", [False, True])
def test_loss_is_the_published_one(deterministic: bool) -> None:
    """Member by member, with weights, decay and bounds, at parameters that no initialiser would give."""
    config = change(deterministic=deterministic, hidden=(4, 5), decay=(0.1, 0.2, 0.3))
    model = ensemble.make(config, SPEC).init(KEY)
    rng = np.random.default_rng(1)
    random = lambda tree: jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)
    params = {"members": random(model.members), "bounds": random(model.bounds)}
    batch = ensemble._Rows(*(rng.normal(size=(3, 7, n)).astype(np.float32) for n in (3, 3, 2)))
    weight = rng.uniform(0.5, 2, (3, 7, 3)).astype(np.float32)

    expected = 0.0
    for e in range(3):
        x = batch.inputs[e]
        for number, layer in enumerate(params["members"]):
            x = x @ layer["kernel"][e] + layer["bias"][e]
            expected += config.decay[number] / 2 * (layer["kernel"][e] ** 2).sum()
            if number < 2:
                x = x * special.expit(x)
        if deterministic:
            expected += (weight[e] * (x - batch.outputs[e]) ** 2).mean()
            continue
        mean, raw = np.split(x, 2, -1)
        high, low = params["bounds"]["max"], params["bounds"]["min"]
        variance = low + softplus(high - softplus(high - raw) - low)
        error = (mean - batch.outputs[e]) ** 2
        expected += (weight[e] * (error * np.exp(-variance) + variance)).mean()
    if not deterministic:
        expected += 0.01 * (params["bounds"]["max"].sum() - params["bounds"]["min"].sum())
    np.testing.assert_allclose(ensemble._loss(config, params, batch, weight), expected, rtol=1e-5)


def test_initial_parameters_are_the_published_ones() -> None:
    config = change(hidden=(64, 64), decay=(0.0,) * 3)
    model = ensemble.make(config, SPEC).init(KEY)
    for layer, fan_in in zip(model.members, (3, 64, 64), strict=True):
        scaled = np.asarray(layer["kernel"]) * 2 * np.sqrt(fan_in)
        assert scaled.shape[0] == 3 and np.abs(scaled).max() <= 2 and 0.8 < scaled.std() < 0.96
        assert not np.asarray(layer["bias"]).any()
    assert (np.asarray(model.bounds["max"]) == 0.5).all() and (np.asarray(model.bounds["min"]) == -10).all()


def test_bootstraps_differ_and_never_touch_the_held_out_rows() -> None:
    split = ensemble._split(SMALL, 400, KEY)
    held, train = set(np.ravel(split.holdout)), np.asarray(split.train)
    assert train.shape == (3, 320) and len(held) == 80
    assert not held & set(np.ravel(train))
    unique = [len(set(row)) for row in train]
    assert all(0.55 < n / 320 < 0.72 for n in unique), unique  # 1 - 1/e of the rows
    assert set(train[0]) != set(train[1])


# ---- what is learnt -------------------------------------------------------------------------------------


def test_it_learns_means_and_deviations(fitted: tuple[ensemble.Ensemble, ensemble.Model]) -> None:
    network, model = fitted
    held = log(200, seed=1).transitions
    mean, deviation = network.predict(model, held.observation, held.action)
    assert mean.shape == deviation.shape == (2, 200, 3)
    expected = np.column_stack([held.next_observation, held.reward])
    assert np.sqrt(np.square(mean.mean(0) - expected).mean()) < 0.12
    spread = np.asarray(deviation).mean((0, 1))
    assert 0.2 < spread[0] < 0.45 and spread[1] < 0.15  # 0.3 and 0


def test_error_is_that_of_the_parameters_that_are_returned(
    fitted: tuple[ensemble.Ensemble, ensemble.Model],
) -> None:
    """On the very rows that were held out; the best member first."""
    _, model = fitted
    split = ensemble._split(SMALL, 400, jax.random.split(KEY, 3)[1])
    rows, mean, deviation = ensemble._prepare(log(noise=0.3), SPEC)
    params = {"members": model.members, "bounds": model.bounds}
    error = ensemble._holdout_error(params, rows, split, ensemble._equal)
    np.testing.assert_allclose(model.error, error, rtol=1e-4)
    assert (np.diff(model.error) >= 0).all()
    np.testing.assert_allclose(model.mean, mean)
    np.testing.assert_allclose(model.deviation, deviation)


def test_deterministic_proposals_are_means() -> None:
    network = ensemble.make(change(deterministic=True, updates=20), SPEC)
    model = network.fit(log(), KEY)
    steps = log(5).transitions
    mean, deviation = network.predict(model, steps.observation, steps.action)
    observations, rewards = network.propose(model, steps.observation, steps.action, KEY)
    assert not np.asarray(deviation).any() and model.bounds == {}
    np.testing.assert_array_equal(jnp.concatenate([observations, rewards[..., None]], -1), mean)


def test_proposals_have_the_predicted_moments(fitted: tuple[ensemble.Ensemble, ensemble.Model]) -> None:
    network, model = fitted
    steps = jax.tree.map(lambda x: x[0], log(1).transitions)
    mean, deviation = network.predict(model, steps.observation, steps.action)
    draw = jax.vmap(lambda key: network.propose(model, steps.observation, steps.action, key)[0])
    drawn = np.asarray(draw(jax.random.split(KEY, 4000)))  # [4000, M, O], of one observation
    np.testing.assert_allclose(drawn.mean(0), mean[:, :-1], atol=0.03)
    np.testing.assert_allclose(drawn.std(0), deviation[:, :-1], rtol=0.06)


def test_a_step_is_the_proposal_of_one_elite_drawn_for_each_row() -> None:
    config = change(deterministic=True, updates=20)
    network = ensemble.make(config, SPEC)
    model = network.fit(log(), KEY)
    steps = log(300).transitions
    observations, rewards = network.propose(model, steps.observation, steps.action, KEY)
    observation, reward = network.step(model, steps.observation, steps.action, KEY)
    chosen = np.asarray([(observation == own).all(-1) for own in observations])
    assert (chosen.sum(0) == 1).all() and 0.4 < chosen[0].mean() < 0.6
    np.testing.assert_array_equal(reward, np.where(chosen[0], *rewards))


def test_weights_choose_what_is_learnt_from_each_members_own_batch() -> None:
    shapes = []

    def first_only(next_observation: jax.Array) -> jax.Array:
        shapes.append(next_observation.shape)
        return jnp.ones_like(next_observation) * jnp.array([1.0, 0.0])

    network = ensemble.make(change(deterministic=True), SPEC)
    steps = log(200, seed=1).transitions
    swapped = log()  # the second dimension must change for its error to show
    swapped = swapped._replace(
        transitions=swapped.transitions._replace(
            next_observation=swapped.transitions.next_observation[:, ::-1].copy()
        )
    )
    model = network.fit(swapped, KEY, first_only)
    mean, _ = network.predict(model, steps.observation, steps.action)
    error = np.square(mean.mean(0)[:, :2] - steps.next_observation[:, ::-1]).mean(0)
    assert error[0] < 0.02 < 0.3 < error[1]
    assert (3, 32, 2) in shapes and all(shape[0] == 3 and shape[-1] == 2 for shape in shapes)


def test_integer_actions_enter_one_hot() -> None:
    rng = np.random.default_rng(0)
    action = rng.integers(0, 3, 400)
    steps = log().transitions
    moved = steps.observation + np.array([[0, 1], [1, 0], [-1, 0]], np.float32)[action]
    dataset = log(action=action, next_action=action, next_observation=moved)
    network = ensemble.make(change(deterministic=True), Spec((2,), 3, discrete=True))
    model = network.fit(dataset, KEY)
    mean, _ = network.predict(model, steps.observation, action)
    assert np.square(mean[..., :2] - moved).mean() < 0.05


@pytest.mark.slow
def test_same_key_same_bits_and_a_seed_of_many_is_that_seed_alone() -> None:
    network, dataset = ensemble.make(change(updates=40), SPEC), log()
    keys = jax.random.split(KEY, 2)
    alone, again = (network.fit(dataset, keys[1]) for _ in range(2))
    many = network.fit(dataset, keys)
    for one, same, stacked in zip(*map(jax.tree.leaves, (alone, again, many)), strict=True):
        np.testing.assert_array_equal(one, same)
        np.testing.assert_allclose(one, stacked[1], rtol=1e-3, atol=1e-5)
    assert (np.asarray(many.error[0]) != np.asarray(many.error[1])).any()


# ---- when it stops --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "checks", "lowered"),
    [
        ({"patience": 3, "min_epochs": 2}, 4, False),  # the first check improves on nothing at all
        ({"patience": 3, "min_epochs": 9}, 9, True),
        ({"patience": 3, "min_epochs": 2, "max_epochs": 3}, 3, False),
        ({"patience": 1, "min_epochs": 0, "updates": 60}, 20, False),  # a fixed number looks at no rule
    ],
)
def test_it_stops_by_the_rule(fields: dict[str, Any], checks: int, lowered: bool) -> None:
    """At learning rate 0 nothing improves after the first check."""
    config = change(**{"learning_rate": 0.0, "updates": 0, "batch_size": 64} | fields)
    start, advance = ensemble._programs(config, SPEC, 400, ensemble._equal, stacked=False)
    rows, _, _ = ensemble._prepare(log(), SPEC)
    fit, split, key = start(KEY)
    count = 0
    while not fit.done:
        fit, count = advance(fit, rows, split, key), count + 1
    assert count == checks == fit.checks
    assert bool(fit.lowered) == lowered


def test_an_epoch_is_as_many_batches_as_there_are_rows_for_and_fixed_updates_are_split_in_twenty() -> None:
    assert ensemble._plan(change(updates=0, max_epochs=7), 400) == (10, 7)  # 320 rows of 32
    assert ensemble._plan(change(updates=410), 400) == (20, 20)
    assert ensemble._plan(change(updates=3), 400) == (1, 3)


# ---- bad input ------------------------------------------------------------------------------------------


def test_ends_of_episodes_without_a_successor_are_left_out() -> None:
    """A terminal row that repeats its observation says nothing of the dynamics; others that stand still do."""
    steps = log(6).transitions
    still = steps.next_observation.copy()
    still[:2] = steps.observation[:2]
    discount = np.array([0, 1, 0, 1, 1, 1], np.float32)
    rows, _, _ = ensemble._prepare(log(6, next_observation=still, discount=discount), SPEC)
    np.testing.assert_array_equal(rows.next_observation, still[1:])


def test_a_constant_observation_stays_finite() -> None:
    steps = log().transitions
    flat = [x * np.array([1, 0], np.float32) for x in (steps.observation, steps.next_observation)]
    network = ensemble.make(change(updates=20), SPEC)
    model = network.fit(log(observation=flat[0], next_observation=flat[1]), KEY)
    assert np.isfinite(model.error).all() and model.deviation[1] == 1
    left = np.array([[0.3, 0.0], [0.3, 5.0], [0.3, -1e6]], np.float32)  # where rollouts may go
    found = network.predict(model, left, left[:, :1]), network.step(model, left, left[:, :1], KEY)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elites": 4}, "elites=4 must be between 1 and members=3"),
        (
            {"decay": (0.0,)},
            "decay has 1 rates: give one for each of the 1 hidden layers and one for the out",
        ),
        ({"holdout": 0.0}, "holdout=0.0 must be a share between 0 and 1"),
        ({"max_epochs": 0}, "max_epochs=0 of the dynamics model must be at least 1"),
    ],
)
def test_a_configuration_without_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble.make(change(**fields), SPEC)


def test_data_that_cannot_be_learnt_are_refused() -> None:
    with pytest.raises(ValueError, match=r"flat vectors, not observations of shape \(8, 8, 3\)"):
        ensemble.make(SMALL, Spec((8, 8, 3), 1))
    network = ensemble.make(SMALL, SPEC)
    reward = log().transitions.reward.copy()
    reward[7] = np.nan
    with pytest.raises(ValueError, match="rewards that are not finite"):
        network.fit(log(reward=reward), KEY)
    with pytest.raises(ValueError, match="1 rows with a next observation: a dynamics model needs 2 or more"):
        network.fit(log(1), KEY)


def test_a_fit_that_diverges_says_so() -> None:
    with pytest.raises(FloatingPointError, match=r"diverged: .* lower its learning rate"):
        ensemble.make(change(learning_rate=1e30, updates=40), SPEC).fit(log(), KEY)


def test_what_diverges_after_a_good_check_leaves_the_model_of_that_check() -> None:
    """With the bounds of then, though those that members share are lost with the first of them."""
    start, advance = ensemble._programs(SMALL, SPEC, 400, ensemble._equal, stacked=False)
    rows, mean, deviation = ensemble._prepare(log(noise=0.3), SPEC)
    fit, split, key = start(KEY)
    fit = advance(fit, rows, split, key)
    good = jax.tree.map(np.array, ensemble._ranked(SMALL, fit, mean, deviation))
    np.testing.assert_array_equal(good.bounds["max"], fit.params["bounds"]["max"])
    broken = fit._replace(params=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), fit.params))
    left = ensemble._ranked(SMALL, advance(broken, rows, split, key), mean, deviation)
    jax.tree.map(np.testing.assert_array_equal, left, good)
