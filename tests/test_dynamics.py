"""rl.dynamics.ensemble and its parts against their equations in NumPy, known systems, and the stopping rule."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from rl.dynamics import base, ensemble, fit, loss, network, rows, value_aware
from rl.replay import ring
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


@functools.cache
def built(**fields: Any) -> ensemble.Ensemble:
    """One for all tests, as its compiled programs are."""
    return compiled(ensemble.make(change(**fields), SPEC))


def compiled(world: ensemble.Ensemble) -> ensemble.Ensemble:
    """``world`` with every function compiled as a whole."""
    return ensemble.Ensemble(jax.jit(world.init), world.fit, base.Dynamics(*map(jax.jit, world.dynamics)))


@functools.cache
def built_programs(config: ensemble.Config) -> fit.Programs:
    return fit.programs(config, SPEC)


@pytest.fixture(scope="module")
def fitted() -> tuple[ensemble.Ensemble, ensemble.Model]:
    return built(), built().fit(log(noise=0.3), KEY)


prepare = jax.jit(functools.partial(rows.prepare, SPEC))


def prepared(dataset: Dataset, filled: int | None = None) -> rows.Data:
    """As a fit reads them, in NumPy."""
    steps = dataset.transitions
    columns = (steps.observation, steps.action, steps.reward, steps.discount, steps.next_observation)
    return jax.device_get(prepare(*columns, np.int32(filled or len(steps.reward))))


def partly_filled(steps: Transition, count: int, rest: float = 0.0) -> ring.Ring:
    """A ring of as many places as there are ``steps``, the first ``count`` of them filled."""
    place = np.arange(len(steps.reward)) < count
    fill = lambda x: np.where(place.reshape(-1, *[1] * (x.ndim - 1)), x, np.float32(rest))
    return ring.Ring(jax.tree.map(fill, steps), np.int32(count), np.int32(count))


# ---- equations ------------------------------------------------------------------------------------------


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


@pytest.mark.parametrize("deterministic", [False, True])
def test_loss_is_the_published_one(deterministic: bool) -> None:
    """Member by member, with weights, decay and bounds, at parameters that no initialiser would give."""
    config = change(deterministic=deterministic, hidden=(4, 5), decay=(0.1, 0.2, 0.3))
    model = jax.eval_shape(ensemble.make(config, SPEC).init, KEY)
    rng = np.random.default_rng(1)
    random = lambda tree: jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)
    params = {"members": random(model.members), "bounds": random(model.bounds)}
    batch = rows.Rows(*(rng.normal(size=(3, 7, n)).astype(np.float32) for n in (3, 3, 2)))
    weight = rng.uniform(0.5, 2, (3, 7, 2)).astype(np.float32)
    scale = np.concatenate([weight / 2, np.ones((3, 7, 1))], -1)  # the mean over s', plus the reward

    expected = 0.0
    for e in range(3):
        x = batch.inputs[e]
        for number, layer in enumerate(params["members"]):
            x = x @ layer["kernel"][e] + layer["bias"][e]
            expected += config.decay[number] / 2 * (layer["kernel"][e] ** 2).sum()
            if number < 2:
                x = x * special.expit(x)
        if deterministic:
            expected += (scale[e] * (x - batch.outputs[e]) ** 2).sum(-1).mean()
            continue
        mean, raw = np.split(x, 2, -1)
        high, low = params["bounds"]["max"], params["bounds"]["min"]
        variance = low + softplus(high - softplus(high - raw) - low)
        error = (mean - batch.outputs[e]) ** 2
        expected += (scale[e] * (error * np.exp(-variance) + variance)).sum(-1).mean()
    if not deterministic:
        expected += 0.01 * (params["bounds"]["max"].sum() - params["bounds"]["min"].sum())
    objective = functools.partial(loss.objective, config, loss.weighted(lambda context, *_: context))
    result = jax.jit(objective)(params, batch, weight, KEY)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_initial_parameters_are_the_published_ones() -> None:
    model = built(hidden=(64, 64), decay=(0.0,) * 3).init(KEY)
    for layer, fan_in in zip(model.members, (3, 64, 64), strict=True):
        scaled = np.asarray(layer["kernel"]) * 2 * np.sqrt(fan_in)
        assert scaled.shape[0] == 3 and np.abs(scaled).max() <= 2 and 0.8 < scaled.std() < 0.96
        assert not np.asarray(layer["bias"]).any()
    assert (np.asarray(model.bounds["max"]) == 0.5).all() and (np.asarray(model.bounds["min"]) == -10).all()


def test_bootstraps_differ_and_never_touch_the_held_out_rows() -> None:
    data = prepared(log())
    sizes = rows.sizes(SMALL, data)
    _, sample, _ = built_programs(SMALL).begin(built().init(KEY), data, sizes, (), KEY)
    held, train = set(np.asarray(data.order[: sizes.held])), np.asarray(sample.places)[:, :320]
    assert sizes.held == 80 == len(held)
    assert not held & set(np.ravel(train))
    unique = [len(set(row)) for row in train]
    assert all(0.55 < n / 320 < 0.72 for n in unique), unique  # 1 - 1/e of the rows
    assert set(train[0]) != set(train[1])


# ---- what is learned -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_means_and_deviations(fitted: tuple[ensemble.Ensemble, ensemble.Model]) -> None:
    world, model = fitted
    held = log(200, seed=1).transitions
    mean, deviation = map(np.asarray, world.dynamics.predict(model, held.observation, held.action))
    assert mean.shape == deviation.shape == (2, 200, 3)
    expected = np.column_stack([held.next_observation, held.reward])
    assert np.sqrt(np.square(mean.mean(0) - expected).mean()) < 0.12
    spread = np.asarray(deviation).mean((0, 1))
    assert 0.2 < spread[0] < 0.45 and spread[1] < 0.15  # 0.3 and 0


@pytest.mark.slow
def test_error_is_that_of_the_parameters_that_are_returned(
    fitted: tuple[ensemble.Ensemble, ensemble.Model],
) -> None:
    """On the very rows that were held out; the best member first."""
    _, model = fitted
    data = prepared(log(noise=0.3))
    held = data.order[:80]
    inputs, outputs = (np.broadcast_to(x[held], (3, 80, 3)) for x in data.rows[:2])
    mean, _ = jax.jit(network.distribution)(model.members, model.bounds, inputs)
    error = np.square(mean - outputs).mean((1, 2))
    np.testing.assert_allclose(model.error, error, rtol=1e-4)
    assert (np.diff(model.error) >= 0).all()
    steps = log(noise=0.3).transitions
    columns = np.column_stack([steps.observation, steps.action])
    np.testing.assert_allclose(model.mean, columns.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.deviation, columns.std(0), rtol=1e-4)


@pytest.mark.slow
def test_deterministic_proposals_are_means() -> None:
    world = built(deterministic=True, updates=20)
    model = world.fit(log(), KEY)
    steps = log(5).transitions
    mean, deviation = world.dynamics.predict(model, steps.observation, steps.action)
    observations, rewards = map(
        np.asarray, world.dynamics.propose(model, steps.observation, steps.action, KEY)
    )
    assert not np.asarray(deviation).any() and model.bounds == {}
    np.testing.assert_array_equal(np.concatenate([observations, rewards[..., None]], -1), mean)


@pytest.mark.slow
def test_proposals_have_the_predicted_moments(fitted: tuple[ensemble.Ensemble, ensemble.Model]) -> None:
    world, model = fitted
    steps = jax.tree.map(lambda x: x[0], log(1).transitions)
    mean, deviation = world.dynamics.predict(model, steps.observation, steps.action)
    draw = jax.jit(jax.vmap(lambda key: world.dynamics.propose(model, steps.observation, steps.action, key)))
    observations, rewards = jax.device_get(draw(jax.random.split(KEY, 4000)))  # of one observation
    drawn = np.concatenate([observations, rewards[..., None]], -1)  # [4000, M, O + 1]
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(drawn.std(0), deviation, rtol=0.06)
    between = np.corrcoef(drawn.reshape(4000, -1).T)  # every number of every elite is a draw of its own
    assert np.abs(between - np.eye(len(between))).max() < 0.08


@pytest.mark.slow
def test_a_step_is_the_proposal_of_one_elite_drawn_for_each_row() -> None:
    world = built(deterministic=True, updates=20)
    model = world.fit(log(), KEY)
    steps = log(300).transitions
    observations, rewards = map(
        np.asarray, world.dynamics.propose(model, steps.observation, steps.action, KEY)
    )
    observation, reward = map(np.asarray, world.dynamics.step(model, steps.observation, steps.action, KEY))
    chosen = np.asarray([(observation == proposal).all(-1) for proposal in observations])
    assert (chosen.sum(0) == 1).all() and 0.4 < chosen[0].mean() < 0.6
    np.testing.assert_array_equal(reward, np.where(chosen[0], *rewards))


def test_the_elite_of_a_step_is_drawn_with_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it that of the noise, which elite is taken would depend on what it proposes. Traced, not compiled."""
    used = []
    for name in ("normal", "randint"):
        draw = getattr(jax.random, name)
        spy = lambda key, *rest, draw=draw, **named: used.append(key) or draw(key, *rest, **named)
        monkeypatch.setattr(jax.random, name, spy)
    world = ensemble.make(change(hidden=(4,)), SPEC)
    model = jax.eval_shape(world.init, KEY)
    jax.eval_shape(
        lambda model, o, a: world.dynamics.step(model, o, a, KEY), model, np.zeros((5, 2)), np.zeros((5, 1))
    )
    assert len({id(key) for key in used}) == len(used) == 2


# ---- an online run: a ring that fills up, a value function that changes, a model that goes on -------------


def squared_gradient(curvature: jax.Array, batch: rows.Rows, key: jax.Array) -> jax.Array:
    """VaGraM's weight for the value ``sum_d c_d s_d^2 / 2``."""
    value = lambda s: (curvature * jnp.square(s)).sum() / 2
    return jnp.square(jax.vmap(jax.vmap(jax.grad(value)))(batch.next_observation))


def swapped(rows: int = 400) -> Transition:
    """Steps after which the observation's dimensions are swapped, so that an error in either shows."""
    steps = log(rows).transitions
    return steps._replace(next_observation=steps.next_observation[:, ::-1].copy())


@pytest.mark.slow
def test_one_compilation_serves_a_whole_online_run(caplog: pytest.LogCaptureFixture) -> None:
    """A changed value function is the one that counts, by fits from nothing and by those that go on."""
    traced = []

    def weight(context: jax.Array, batch: rows.Rows, key: jax.Array) -> jax.Array:
        traced.append(batch.next_observation.shape)
        return squared_gradient(context, batch, key)

    world = compiled(ensemble.make(change(deterministic=True), SPEC, loss.weighted(weight)))
    first, second = np.float32([1, 0]), np.float32([0, 1])
    young, grown = partly_filled(swapped(), 150), partly_filled(swapped(), 390)
    keys = jax.random.split(KEY, 3)
    early = world.fit(young, keys[0], context=first)
    assert {(3, 32, 2), (3, 80, 2)} == set(traced)  # each member's own batch; those that judge
    count = len(traced)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        later = [
            world.fit(grown, keys[1], early, second),
            world.fit(grown, keys[1], early, first),
            world.fit(grown, keys[2], context=second),
        ]
    assert len(traced) == count
    assert not [record for record in caplog.records if "ompiling" in record.getMessage()]
    held = log(200, seed=1).transitions

    def errors(model: ensemble.Model) -> np.ndarray:
        mean = np.asarray(world.dynamics.predict(model, held.observation, held.action)[0])
        return np.square(mean.mean(0)[:, :2] - held.next_observation[:, ::-1]).mean(0)

    begun, changed, longer, late = map(errors, (early, *later))
    assert begun[0] < 0.04 and begun[1] > 0.3
    assert changed[1] < 0.04  # whatever it still knows of the other
    assert longer[0] < begun[0] and longer[1] > 0.3  # more rows, and a start
    assert late[1] < 0.04 and late[0] > 0.3


def test_what_is_not_filled_of_a_ring_is_not_read() -> None:
    """Neither drawn, nor held out, nor in the statistics: whatever stands there, the bits are the same."""
    steps = log().transitions
    world = built(updates=20)
    models = [world.fit(partly_filled(steps, 150, rest), KEY) for rest in (0.0, np.nan)]
    jax.tree.map(np.testing.assert_array_equal, *models)
    data = prepared(Dataset(partly_filled(steps, 150, np.nan).rows, None), 150)
    sizes = rows.sizes(SMALL, data)
    assert data.size == 150 and sizes.held == 30
    assert sorted(np.asarray(data.order[:150])) == list(range(150))
    columns = np.column_stack([steps.observation, steps.action])[:150]
    np.testing.assert_allclose(data.mean, columns.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(data.deviation, columns.std(0), rtol=1e-4)
    _, sample, _ = built_programs(SMALL).begin(built().init(KEY), data, sizes, (), KEY)
    assert set(np.ravel(sample.places)) <= set(np.asarray(data.order[30:150]))


def test_rows_that_judged_a_model_are_not_learned_from_when_it_goes_on() -> None:
    held = [set(np.asarray(prepared(log(), n).order[: n // 5])) for n in (150, 400)]
    assert len(held[0] - held[1]) <= 3 < len(held[0]) == 30  # but for the margin


def test_every_held_out_row_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chunks of 32, the last of which is not full; with weights that differ."""
    monkeypatch.setattr(rows, "_HOLDOUT_ROWS", 32)
    model, data = built().init(KEY), prepared(log())
    sizes = rows.sizes(SMALL, data)
    assert sizes.chunks == 3
    params = {"members": model.members, "bounds": model.bounds}
    error = jax.jit(functools.partial(loss.holdout_error, SMALL, loss.weighted(squared_gradient)))
    errors = error(params, data, sizes, np.float32([1, 3]))
    batch = jax.tree.map(lambda x: np.asarray(x)[np.asarray(data.order[:80])], data.rows)
    inputs = np.broadcast_to(batch.inputs, (3, 80, 3))
    mean, _ = jax.jit(network.distribution)(model.members, model.bounds, inputs)
    weight = np.column_stack([np.square(batch.next_observation * [1, 3]) / 2, np.ones(80)])
    np.testing.assert_allclose(errors, (weight * np.square(mean - batch.outputs)).sum(2).mean(1), rtol=1e-5)


def test_other_statistics_change_no_prediction(
    fitted: tuple[ensemble.Ensemble, ensemble.Model],
) -> None:
    world, model = fitted
    steps = log(50, seed=2).transitions
    again = jax.jit(network.restandardize)(model, np.float32([0.5, -1, 0.2]), np.float32([3, 0.4, 1]))
    for one, other in zip(
        world.dynamics.predict(model, steps.observation, steps.action),
        world.dynamics.predict(again, steps.observation, steps.action),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_inputs_that_begin_or_cease_to_vary_do_not_swamp_the_others(
    fitted: tuple[ensemble.Ensemble, ensemble.Model],
) -> None:
    _, model = fitted
    kernel = np.asarray(model.members[0]["kernel"])
    constant = model._replace(deviation=np.float32([np.inf, 1e-4, 1]))
    changed = jax.jit(network.restandardize)(constant, model.mean, np.float32([2, 1, np.inf]))
    changed_kernel = np.asarray(changed.members[0]["kernel"])
    assert not changed_kernel[:, 0].any() and not changed_kernel[:, 2].any()
    np.testing.assert_allclose(changed_kernel[:, 1], 10 * kernel[:, 1], rtol=1e-6)


@pytest.mark.slow
def test_a_fit_goes_on_from_the_model_and_its_first_check_is_better_whatever_it_is(
    fitted: tuple[ensemble.Ensemble, ensemble.Model],
) -> None:
    """An update that moves nothing leaves the predictions of before, in the statistics of the new data."""
    _, model = fitted
    other = log(noise=0.3, seed=5).transitions
    other = other._replace(observation=2 * other.observation + 1)
    still = ensemble.make(change(learning_rate=1e-12, updates=1), SPEC)
    again = still.fit(Dataset(other, None), jax.random.key(9), model)
    again, error = jax.device_get(again), np.asarray(model.error)
    np.testing.assert_allclose(again.mean[:2], other.observation.mean(0), rtol=1e-4)
    assert (np.diff(again.error) >= 0).all() and again.error[0] > 2 * error[2]  # of the new rows
    probe = log(50, seed=2).transitions
    everyone = built(elites=3)
    before, after = (everyone.dynamics.predict(m, probe.observation, probe.action)[0] for m in (model, again))
    distance = np.abs(np.asarray(before)[:, None] - np.asarray(after)).max((2, 3))
    assert ((distance < 1e-4).sum(0) == 1).all()  # in whatever order they now are
    harmful = ensemble.make(change(learning_rate=0.1, updates=1), SPEC)
    assert (np.asarray(harmful.fit(log(), KEY, model).error) > error.max()).all()
    with pytest.raises(ValueError, match="the model to continue from has parameters of shapes"):
        built(hidden=(4,)).fit(log(), KEY, model)


@pytest.mark.slow
def test_integer_actions_enter_one_hot() -> None:
    rng = np.random.default_rng(0)
    action = rng.integers(0, 3, 400)
    steps = log().transitions
    moved = steps.observation + np.array([[0, 1], [1, 0], [-1, 0]], np.float32)[action]
    dataset = log(action=action, next_action=action, next_observation=moved)
    world = compiled(ensemble.make(change(deterministic=True), Spec((2,), 3, discrete=True)))
    model = world.fit(dataset, KEY)
    mean = np.asarray(world.dynamics.predict(model, steps.observation, action)[0])
    assert np.square(mean[..., :2] - moved).mean() < 0.05


@pytest.mark.slow
def test_same_key_same_bits_and_a_seed_of_many_is_that_seed_alone() -> None:
    world, dataset = built(updates=20), log()
    keys = jax.random.split(KEY, 2)
    alone, again = (world.fit(dataset, keys[1]) for _ in range(2))
    many = world.fit(dataset, keys)
    pair = jax.tree.map(lambda x: np.stack([x[::-1], x]), dataset.transitions)
    with_own = world.fit(ring.Ring(pair, np.int32(0), np.int32(400)), keys)
    alone, again, many, with_own = jax.device_get((alone, again, many, with_own))
    for one, same, *stacked in zip(*map(jax.tree.leaves, (alone, again, many, with_own)), strict=True):
        np.testing.assert_array_equal(one, same)
        for two in stacked:
            np.testing.assert_allclose(one, two[1], rtol=1e-3, atol=1e-5)
    assert (many.error[0] != many.error[1]).any()


# ---- when it stops --------------------------------------------------------------------------------------


@pytest.mark.slow
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
    small = {"hidden": (), "decay": (0.0,), "deterministic": True, "batch_size": 64}
    config = change(**small | {"learning_rate": 0.0, "updates": 0} | fields)
    parts, data = fit.programs(config, SPEC), prepared(log())
    sizes = rows.sizes(config, data)
    state, sample, key = parts.begin(parts.init(KEY), data, sizes, (), KEY)
    count = 0
    while not state.done:
        state, count = parts.advance(state, data, sample, sizes, (), key), count + 1
    assert count == checks == state.checks
    assert bool(state.lowered) == lowered
    for worse, stale in ((1.005, 1), (1.02, 0)):  # an error counts as better if it is so by more than 1 %
        again = state._replace(error=state.error * worse, stale=jnp.int32(0), done=jnp.bool_(False))
        again = parts.advance(jax.tree.map(jnp.copy, again), data, sample, sizes, (), key)
        assert again.stale == stale


@pytest.mark.slow
def test_a_fit_that_stalled_early_goes_on_with_smaller_steps() -> None:
    """Adam's first step is as long as the learning rate: 0.3 of it where it was lowered."""
    parts, data = built_programs(SMALL), prepared(log())
    sizes = rows.sizes(SMALL, data)._replace(updates=np.int32(1))
    steps = []
    for lowered in (False, True):
        state, sample, key = parts.begin(parts.init(KEY), data, sizes, (), KEY)
        before = np.array(state.params["members"][0]["kernel"])
        after = parts.advance(state._replace(lowered=jnp.asarray(lowered)), data, sample, sizes, (), key)
        steps.append(np.abs(after.params["members"][0]["kernel"] - before))
    np.testing.assert_allclose(steps[1], 0.3 * steps[0], rtol=1e-3, atol=1e-7)


def test_an_epoch_is_as_many_batches_as_there_are_rows_for_and_fixed_updates_are_split_in_twenty() -> None:
    data = prepared(log())
    for fields, updates, checks in (
        ({"updates": 0, "max_epochs": 7}, 10, 7),  # 320 rows of 32
        ({"updates": 410}, 20, 20),
        ({"updates": 3}, 1, 3),
    ):
        config = change(**fields)
        assert (rows.sizes(config, data).updates, rows.most_checks(config)) == (updates, checks)
    assert rows.sizes(change(updates=0), prepared(log(), 10)) == (2, 1, 1, 1)


# ---- bad input ------------------------------------------------------------------------------------------


def test_ends_of_episodes_without_a_successor_are_left_out() -> None:
    """A terminal row that repeats its observation says nothing of the dynamics; others that stand still do."""
    steps = log(6).transitions
    still = steps.next_observation.copy()
    still[:2] = steps.observation[:2]
    discount = np.array([0, 1, 0, 1, 1, 1], np.float32)
    data = prepared(log(6, next_observation=still, discount=discount))
    assert data.size == 5 and sorted(np.asarray(data.order[:5])) == [1, 2, 3, 4, 5]
    columns = np.column_stack([steps.observation, steps.action])[1:]
    np.testing.assert_allclose(data.mean, columns.mean(0), rtol=1e-4, atol=1e-6)


# Means of the large ones are rounded: 1000.7's deviates from it by more than any absolute bound would allow.
@pytest.mark.parametrize("constant", [0.0, 6.6162, 8.9075, 123.4, -1000.7])
def test_a_constant_observation_stays_finite(constant: float) -> None:
    steps = log(3001).transitions
    flat = [
        x * np.array([1, 0], np.float32) + np.array([0, constant], np.float32)
        for x in (steps.observation, steps.next_observation)
    ]
    world = built(updates=20)
    model = world.fit(log(3001, observation=flat[0], next_observation=flat[1]), KEY)
    model = jax.device_get(model)
    assert np.isfinite(model.error).all() and np.isinf(model.deviation).tolist() == [False, True, False]
    left = np.array(
        [[0.3, constant], [0.3, constant + 5.0], [0.3, -1e6]], np.float32
    )  # where rollouts may go
    outputs = (
        world.dynamics.predict(model, left, left[:, :1]),
        world.dynamics.step(model, left, left[:, :1], KEY),
    )
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(outputs))
    mean = np.asarray(outputs[0][0])[..., [0, 2]]  # what never varied is ignored
    np.testing.assert_array_equal(mean, mean[:, :1].repeat(3, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elites": 4}, "elites=4 must be between 1 and members=3"),
        (
            {"decay": (0.0,)},
            r"decay=\(.*\) of the dynamics model has 1 rates: give one for each of the 1 hidden layers and one",
        ),
        ({"holdout": 0.0}, "holdout=0.0 must be a share between 0 and 1"),
        ({"max_epochs": 0}, "max_epochs=0 of the dynamics model must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 of the dynamics model must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 of the dynamics model must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate=nan of the dynamics model must be positive"),
        ({"decay": (0.0, -1.0)}, r"decay=\(0.0, -1.0\) of the dynamics model must be numbers from 0"),
        ({"hidden": (0,)}, r"hidden=\(0,\) of the dynamics model: a layer has at least one unit"),
    ],
)
def test_a_configuration_without_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble.make(change(**fields), SPEC)


def test_data_that_cannot_be_learned_are_refused() -> None:
    with pytest.raises(ValueError, match=r"flat vectors, not observations of shape \(8, 8, 3\)"):
        ensemble.make(SMALL, Spec((8, 8, 3), 1))
    reward = log().transitions.reward.copy()
    reward[7] = np.nan
    with pytest.raises(ValueError, match="rewards that are not finite"):
        built().fit(log(reward=reward), KEY)
    with pytest.raises(ValueError, match="1 rows with a next observation: a dynamics model needs 2 or more"):
        built().fit(log(1), KEY)
    with pytest.raises(ValueError, match="0 rows with a next observation: a dynamics model needs 2 or more"):
        built().fit(partly_filled(log().transitions, 0), KEY)
    plain = {
        name: ensemble.make(change(deterministic=value_aware.is_deterministic(name)), SPEC, each)
        for name, each in value_aware.VALUE_FREE.items()
    }
    for each in (built(), *plain.values()):
        with pytest.raises(ValueError, match="the ensemble's loss reads none: leave it out"):
            each.fit(log(), KEY, context=np.ones(2))
    pair = jax.tree.map(lambda x: np.stack([x, x]), log().transitions)
    with pytest.raises(ValueError, match=r"data of 2 rings .* need as many keys, not \(\)"):
        built().fit(ring.Ring(pair, np.int32(0), np.int32(400)), KEY)


def test_a_fit_that_diverges_says_so() -> None:
    with pytest.raises(FloatingPointError, match=r"diverged: .* lower the model's learning rate"):
        built(learning_rate=1e30, updates=20).fit(log(), KEY)


def test_what_diverges_after_a_good_check_leaves_the_model_of_that_check() -> None:
    """With the bounds of then, though those that members share are lost with the first of them."""
    parts, data = built_programs(SMALL), prepared(log(noise=0.3))
    sizes = rows.sizes(SMALL, data)
    state, sample, key = parts.begin(built().init(KEY), data, sizes, (), KEY)
    state = parts.advance(state, data, sample, sizes, (), key)
    good = jax.device_get(parts.finish(state, data))
    np.testing.assert_array_equal(good.bounds["max"], state.params["bounds"]["max"])
    broken = state._replace(params=jax.tree.map(lambda x: np.full_like(x, np.nan), state.params))
    left = parts.finish(parts.advance(broken, data, sample, sizes, (), key), data)
    jax.tree.map(np.testing.assert_array_equal, left, good)
