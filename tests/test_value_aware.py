"""rl.dynamics.value_aware on values whose gradients are known: each loss against its equation in NumPy."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.agents import fql, sac_n
from rl.dynamics import ensemble, loss, value_aware
from rl.dynamics.loss import Prediction
from rl.dynamics.rows import Rows
from rl.dynamics.value_aware import Context, Settings
from rl.replay import ring
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

pytestmark = pytest.mark.slow  # numbers, which another interpreter does not change

KEY = jax.random.key(0)
CRITICS, MEMBERS, BATCH, SIZE = 2, 3, 41, 4
RAW = Settings(normalise=False, clip_quantile=1.0)


def quadratic(state: tuple[Any, Any], observation: jax.Array) -> jax.Array:
    """``V_c(s) = b_c's - s'P_c s / 2`` of symmetric P [C, O, O] and b [C, O]: its gradient is ``b_c - P_c s``."""
    curvature, slope = state
    square = jnp.einsum("...i,cij,...j->c...", observation, curvature, observation)
    return jnp.einsum("ci,...i->c...", slope, observation) - square / 2


def random_state(seed: int = 0, critics: int = CRITICS, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(critics, size, size))
    return (half + half.swapaxes(1, 2)).astype(np.float32), rng.normal(size=(critics, size)).astype(
        np.float32
    )


def random_batch(seed: int = 1, variances: bool = False) -> tuple[Prediction, Rows]:
    """Rows of which each member has its own, without what values say of them."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=(MEMBERS, BATCH, *shape)).astype(np.float32)
    prediction = Prediction(normal(SIZE + 1), normal(SIZE + 1) if variances else None)
    return prediction, Rows(normal(SIZE + 1), normal(SIZE + 1), normal(SIZE))


def annotated(state: Any, batch: Rows, values: Any = quadratic) -> Rows:
    return batch._replace(annotation=value_aware.annotate(values, state, batch.next_observation))


@functools.cache
def costs(settings: Settings, names: tuple[str, ...]) -> Any:
    """All these losses as one compiled program (context, prediction, rows) -> {name: [E, B]}."""

    def every(context: Context, prediction: Prediction, batch: Rows) -> dict[str, jax.Array]:
        batch = annotated(context.state, batch)
        losses = {name: value_aware.make(name, quadratic, settings) for name in names}
        return {name: losses[name].train(context, prediction, batch, KEY) for name in names}

    return jax.jit(every)


# ---- the faults of the official code -----------------------------------------------------------------------


def test_members_and_judges_see_the_gradient_at_their_own_rows_in_every_fit() -> None:
    """The four faults: the point (s', not s' - s), sums over critics, rows of member 0, rows of another split.

    What the compiled updates and checks of a fit are given is compared with ``b - P s'``, of two seeds with values of
    their own, on a ring that is partly filled; and again for other values, without another compilation.
    """
    curvature, slope = (
        np.stack(x) for x in zip(*(random_state(seed, size=2) for seed in range(4)), strict=True)
    )
    seen: dict[str, list[Any]] = {"train": [], "judge": []}
    traces = []

    def values(state: Any, observation: jax.Array) -> jax.Array:
        traces.append(observation.shape)
        return quadratic(state, observation)

    def watch(role: str, cost: loss.Cost) -> loss.Cost:
        def watched(context: Context, prediction: Prediction, batch: Rows, key: jax.Array) -> jax.Array:
            record = lambda *arrays: seen[role].append(jax.tree.map(np.array, arrays))
            jax.debug.callback(record, context.state, batch.next_observation, batch.annotation.gradient)
            return cost(context, prediction, batch, key)

        return watched

    model_loss = value_aware.make("vagram", values)
    config = ensemble.Config(
        members=3, elites=1, hidden=(), decay=(0.0,), deterministic=True, batch_size=8, updates=40
    )
    world = ensemble.make(
        config,
        Spec((2,), 1),
        model_loss._replace(train=watch("train", model_loss.train), judge=watch("judge", model_loss.judge)),
    )
    rng = np.random.default_rng(0)
    column = lambda *shape: np.concatenate([rng.normal(size=(60, *shape)), np.full((40, *shape), np.nan)])
    steps = Transition(column(2), column(1), column(), np.ones(100), column(2), column(1), np.zeros(100))
    data = ring.Ring(jax.tree.map(jnp.float32, steps), jnp.int32(60), jnp.int32(60))
    count = 0
    for first, plain in ((0, 1.0), (2, 0.0)):
        chosen = (curvature[first : first + 2], slope[first : first + 2])
        world.fit(data, jax.random.split(KEY, 2), context=Context(chosen, plain))
        jax.effects_barrier()
        count = count or len(traces)
        assert len(traces) == count
        assert len(seen["train"]) == 2 * 40 and len(seen["judge"]) == 2 * 20
        for state, following, gradient in seen["train"] + seen["judge"]:
            assert any(np.array_equal(state[0], x) for x in chosen[0])
            expected = state[1] - np.einsum("cij,ebj->ebci", state[0], following)
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
        learned, judged = (
            {row.tobytes() for _, following, _ in seen[role] for row in following.reshape(-1, 2)}
            for role in ("train", "judge")
        )
        assert len(judged) == 12 and len(learned) > 40 and not learned & judged
        batches = seen["train"][0][1]
        assert not np.array_equal(batches[0], batches[1])
        seen["train"].clear(), seen["judge"].clear()


# ---- the equations -------------------------------------------------------------------------------------------


def reference(
    state: Any, permutation: np.ndarray, settings: Settings, prediction: Prediction, batch: Rows
) -> dict[str, np.ndarray]:
    """Every loss of a deterministic ensemble in float64, without what is plain."""
    curvature, slope = (np.asarray(x, np.float64) for x in state)
    following = np.asarray(batch.next_observation, np.float64)
    error = np.asarray(prediction.mean, np.float64) - batch.outputs
    error, reward = error[..., :-1], np.square(error[..., -1])

    def value(s: np.ndarray) -> np.ndarray:
        return s @ slope.T - np.einsum("ebi,cij,ebj->ebc", s, curvature, s) / 2

    gradient = slope - np.einsum("cij,ebj->ebci", curvature, following)
    for member in range(MEMBERS):
        for critic in range(CRITICS):
            norm = np.linalg.norm(gradient[member, :, critic], axis=-1)
            limit = np.quantile(norm, settings.clip_quantile)
            gradient[member, norm > limit, critic] *= (limit / norm[norm > limit])[:, None]
    weight = np.square(gradient).mean(2)
    absolute = np.abs(value(following)).mean(-1, keepdims=True) * np.ones(SIZE)
    unit = lambda w: w.mean((1, 2), keepdims=True) if settings.normalise else np.ones((MEMBERS, 1, 1))
    squared = np.square(error)
    inverse = 1 / np.asarray(batch.outputs, np.float64)[..., :-1].var(1, keepdims=True)
    state_errors = {
        "mse": squared,
        "standardised": inverse / inverse.mean(-1, keepdims=True) * squared,
        "vagram": weight / unit(weight) * squared,
        "taylor": np.square((gradient * error[:, :, None]).sum(-1)).mean(-1)[..., None] / unit(weight),
        "vaml": np.square(value(following + error) - value(following)).mean(-1)[..., None] / unit(weight),
        "value_weighted": absolute / unit(absolute) * squared,
        "anisotropic": weight[..., permutation] / unit(weight) * squared,
    }
    return {name: x.sum(-1) / SIZE + reward for name, x in state_errors.items()}


@pytest.mark.parametrize("settings", [RAW, Settings(clip_quantile=0.7)], ids=["raw", "normalised"])
def test_losses_are_their_equations(settings: Settings) -> None:
    """With the plain error of the first epoch and without it; a floor is the same thing."""
    state, (prediction, batch) = random_state(), random_batch()
    permutation = np.array([2, 0, 3, 1])
    expected = reference(state, permutation, settings, prediction, batch)
    every = costs(settings, tuple(expected))
    for plain in (0.0, 1.0):
        results = every(Context(state, plain, permutation), prediction, batch)
        for name, cost in results.items():
            extra = 0 if name in value_aware.VALUE_FREE else plain * expected["mse"]
            np.testing.assert_allclose(cost, expected[name] + extra, rtol=2e-4, atol=1e-5, err_msg=name)
    floored = value_aware.make("vagram", quadratic, Settings(settings.normalise, settings.clip_quantile, 0.3))
    cost = floored.train(Context(state), prediction, annotated(state, batch), KEY)
    np.testing.assert_allclose(cost, expected["vagram"] + 0.3 * expected["mse"], rtol=2e-4, atol=1e-5)


def test_a_clock_has_no_weight_among_inverse_variances() -> None:
    """Its steps differ by rounding alone: their variance is not 0, and one over it would leave the others nothing."""
    rng = np.random.default_rng(2)
    state = rng.normal(size=(1, 400, 3)).astype(np.float32)
    state[..., 2] = np.arange(400, dtype=np.float32) * np.float32(0.001)
    following = state + rng.normal(size=state.shape).astype(np.float32) * np.float32([0.1, 1e-3, 0])
    following[..., 2] = state[..., 2] + np.float32(0.001)
    change = np.concatenate([following - state, rng.normal(size=(1, 400, 1))], -1).astype(np.float32)
    assert 0 < change[..., 2].var() < 1e-12
    weight = value_aware.inverse_variances(None, Rows(state, change, following), KEY)
    inverse = np.append(1 / change[..., :2].var((0, 1), dtype=np.float64), 0)
    np.testing.assert_allclose(weight[0, 0], inverse / inverse.mean(), rtol=1e-4)


def test_first_order_losses_are_exact_for_a_linear_value_and_bounded_by_vagram() -> None:
    (curvature, slope), (prediction, batch) = random_state(), random_batch()
    names = ("mse", "vagram", "taylor", "vaml", "value_weighted", "anisotropic")
    every, order = costs(RAW, names), np.arange(SIZE)
    linear = every(Context((0 * curvature, slope), 0.0, order), prediction, batch)
    np.testing.assert_allclose(linear["taylor"], linear["vaml"], rtol=1e-3, atol=1e-4)
    reward = np.square(prediction.mean - batch.outputs)[..., -1]
    bent = every(Context((curvature, slope), 0.0, order), prediction, batch)
    ratio = (bent["taylor"] - reward) / (bent["vagram"] - reward)
    assert 1 < ratio.max() <= SIZE * (1 + 1e-4)
    # Errors e_d = 1 / g_d make both ends meet.
    inverse = np.concatenate([np.broadcast_to(1 / slope[0], (MEMBERS, BATCH, SIZE)), reward[..., None]], -1)
    twins = 0 * curvature, np.stack([slope[0]] * 2)
    tight = every(
        Context(twins, 0.0, order), Prediction(inverse, None), batch._replace(outputs=0 * batch.outputs)
    )
    reward = np.square(reward)
    np.testing.assert_allclose(tight["taylor"] - reward, SIZE * (tight["vagram"] - reward), rtol=1e-3)


def test_another_unit_of_an_observation_changes_no_loss_that_counts_in_values() -> None:
    (curvature, slope), (prediction, batch) = random_state(), random_batch()
    names = ("mse", "vagram", "taylor", "vaml", "value_weighted", "anisotropic")
    unit = np.array([10, 0.1, 3, 1], np.float32)
    scaled = np.append(unit, 1).astype(np.float32)
    every, order = costs(RAW, names), np.arange(SIZE)
    before = every(Context((curvature, slope), 0.0, order), prediction, batch)
    after = every(
        Context((curvature / unit / unit[:, None], slope / unit), 0.0, order),
        Prediction(prediction.mean * scaled, None),
        batch._replace(outputs=batch.outputs * scaled, next_observation=batch.next_observation * unit),
    )
    for name in ("vagram", "taylor", "vaml"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-3, atol=1e-3)
    assert not np.allclose(after["mse"], before["mse"], rtol=0.1)


def test_what_a_gaussian_ensemble_pays_is_a_likelihood_and_it_is_judged_by_its_means() -> None:
    prediction, batch = random_batch(variances=True)
    batch = annotated(random_state(), batch)
    means, squared = prediction._replace(log_variance=None), np.square(prediction.mean - batch.outputs)
    error = squared * np.exp(-prediction.log_variance) + prediction.log_variance
    mle = value_aware.make("mle", None)
    context = Context(random_state(), 0.5)
    np.testing.assert_allclose(mle.train(context, prediction, batch, KEY), error.mean(-1), rtol=1e-5)
    np.testing.assert_allclose(mle.judge(context, prediction, batch, KEY), squared.mean(-1), rtol=1e-5)
    vagram = value_aware.make("vagram", quadratic, RAW)
    weight = np.square(batch.annotation.gradient).mean(-2) + 0.5
    expected = (weight * error[..., :-1]).mean(-1) + 1.5 * error[..., -1]
    np.testing.assert_allclose(vagram.train(context, prediction, batch, KEY), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(
        vagram.judge(context, prediction, batch, KEY), vagram.train(context, means, batch, KEY)
    )


# ---- weights -------------------------------------------------------------------------------------------------


def test_clipping_rescales_the_largest_norms_of_a_critic_and_member_and_no_others() -> None:
    gradient = np.random.default_rng(0).normal(size=(2, 100, 2, 3)).astype(np.float32)
    gradient[1] *= 100  # neither member shows in the other
    gradient[:, :, 1] *= 7
    gradient[0, :3] = 0
    norm = np.linalg.norm(gradient, axis=-1)
    limit = np.quantile(norm, 0.95, axis=1, keepdims=True)
    clipped = np.asarray(value_aware.clip(gradient, 0.95))
    large = norm > limit
    assert (large.sum(1) == 5).all()
    np.testing.assert_array_equal(clipped[~large], gradient[~large])
    expected = np.broadcast_to(limit, norm.shape)[large]
    np.testing.assert_allclose(np.linalg.norm(clipped[large], axis=-1), expected, rtol=1e-5)
    cosine = (clipped[large] * gradient[large]).sum(-1) / (expected * norm[large])
    np.testing.assert_allclose(cosine, 1, rtol=1e-5)


def test_normalised_weights_are_one_on_average_for_every_member_and_zero_where_no_value_changes() -> None:
    batch, scale = annotated(random_state(), random_batch()[1]), np.array([1, 1e3, 0])
    annotation = jax.tree.map(lambda x: jnp.einsum("e...,e->e...", x, scale), batch.annotation)
    batch = batch._replace(annotation=annotation)
    context = Context(None, 0.0, np.array([1, 2, 3, 0]))
    for weights in (value_aware.squared_gradients, value_aware.absolute_values, value_aware.permuted):
        weight = np.asarray(weights(Settings(), context, batch, KEY))
        np.testing.assert_allclose(weight[:2].mean((1, 2)), 1, rtol=1e-5)
        assert weight.shape == (MEMBERS, BATCH, SIZE) and not weight[2].any()


def test_anisotropic_weights_are_those_of_vagram_in_other_places() -> None:
    """Always in the same other places, or in others for every row and key, so that they average to none at all."""
    batch = annotated(random_state(), random_batch()[1])
    order = value_aware.permutations(jax.random.key(3), SIZE)
    context = Context(None, 0.0, order)
    vagram = np.asarray(value_aware.squared_gradients(Settings(), context, batch, KEY))
    fixed = np.asarray(value_aware.permuted(Settings(), context, batch, KEY))
    np.testing.assert_array_equal(fixed, vagram[..., order])
    draw = jax.jit(jax.vmap(lambda key: value_aware.permuted_by_row(Settings(), context, batch, key)))
    drawn = np.asarray(draw(jax.random.split(KEY, 500)))
    np.testing.assert_allclose(
        np.sort(drawn, -1), np.broadcast_to(np.sort(vagram, -1), drawn.shape), rtol=1e-5
    )
    ranks = np.argsort(np.argsort(drawn[0], -1), -1) != np.argsort(np.argsort(vagram, -1), -1)
    assert 0.8 < ranks.any(-1).mean() < 1  # all but 1 of 24 orders
    average = drawn.mean(0) / vagram.mean(-1, keepdims=True)
    np.testing.assert_allclose(average, 1, atol=0.35)  # 0.08 is the largest standard error
    many = value_aware.permutations(jax.random.split(KEY, 50), SIZE)
    assert (np.sort(many, -1) == np.arange(SIZE)).all() and len(np.unique(many, axis=0)) > 12


# ---- samples of a Gaussian member -------------------------------------------------------------------------------


def test_without_variance_is_the_mean_product_of_pairs() -> None:
    gap = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    expected = np.square(gap).mean(1) - gap.var(1, ddof=1)
    np.testing.assert_allclose(value_aware.without_variance(gap), expected, rtol=1e-4, atol=1e-5)
    product = gap[:, 0] * gap[:, 1]
    np.testing.assert_allclose(value_aware.without_variance(gap[:, :2]), product, rtol=1e-4, atol=1e-5)


def test_calibrated_vaml_has_the_expectation_that_vaml_exceeds_by_the_variance_of_the_value() -> None:
    """Two outcomes, +1 with probability 0.7 and -1, of one state; V(s) = a s^2 + b s; a member N(m, v) of them.

    E V(s^) = a (m^2 + v) + b m and Var V(s^) = 2 a^2 v^2 + v (2 a m + b)^2; gradients in m and log v, too. Of a linear
    value nothing but raw VAML moves the variance, which it shrinks.
    """
    outcome, share = np.array([1.0, -1.0], np.float32), np.array([0.7, 0.3], np.float32)
    outputs = jnp.stack([outcome, 0 * outcome], -1)[None]  # from s = 0, without reward
    batch = Rows(outputs, outputs, jnp.asarray(outcome)[None, :, None])
    at, draws = jnp.array([0.4, -0.7]), 30_000
    roles = {("vaml", "train"): 1.0, ("calibrated", "train"): 0.0, ("calibrated", "judge"): 1 / 16}

    def sampled(state: Any, parameters: jax.Array, key: jax.Array) -> jax.Array:
        rows_of = annotated(state, batch)
        pair = jnp.zeros((1, 2))
        prediction = Prediction(*(jnp.stack([pair + number, pair], -1) for number in parameters))
        results = [
            getattr(value_aware.make(name, quadratic, RAW), role)(Context(state), prediction, rows_of, key)
            for name, role in roles
        ]
        return jnp.stack(results)[:, 0] @ share

    def each(state: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sampled(state, at, key), jax.jacrev(sampled, 1)(state, at, key)

    many = jax.jit(jax.vmap(each, (None, 0)))
    for curvature, slope in ((0.0, 0.8), (-1.4, 0.8)):

        def closed(parameters: jax.Array, a: float = -curvature / 2, b: float = slope) -> jax.Array:
            m, v = parameters[0], jnp.exp(parameters[1])
            gap = a * (m**2 + v) + b * m - (a * outcome**2 + b * outcome)
            return jnp.stack([(share * gap**2).sum(), 2 * a**2 * v**2 + v * (2 * a * m + b) ** 2])

        exact = np.column_stack([closed(at), jax.jacrev(closed)(at)])  # of (gap, variance): value, slopes
        state = np.full((1, 1, 1), curvature, np.float32), np.full((1, 1), slope, np.float32)
        value, gradient = many(state, jax.random.split(KEY, draws))
        drawn = np.concatenate([value[..., None], gradient], -1)
        deviation = drawn.std(0) / draws**0.5
        expected = np.stack([exact[0] + part * exact[1] for part in roles.values()])
        assert (np.abs(drawn.mean(0) - expected) < 4 * deviation + 1e-4).all(), (drawn.mean(0), expected)
        if not curvature:
            assert exact[0, 2] == 0 < exact[1, 2]


# ---- values of a learner ----------------------------------------------------------------------------------------


def state_of(online: float, target: float | None) -> State:
    params = {"critic": jnp.float32(online), "policy": jnp.float32(2.0)}
    return State(params, {} if target is None else {"critic": jnp.float32(target)}, {}, jnp.int32(0))


def test_a_learners_values_are_its_critics_and_targets_at_an_action_that_stays_where_it_is() -> None:
    """``Q_c = c w s a`` and ``a = 2 s``: dQ/ds is ``c w a``, not the ``2 c w a`` of a policy that gradients enter."""

    def critics(state: State, observation: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.array([1.0, 3.0])[:, None] * state.params["critic"] * (observation * action)[..., 0]

    act = lambda state, observation, key: state.params["policy"] * observation
    blank: Any = None
    values = value_aware.of_learner(Learner(blank, blank, act, critics=critics))
    observation = jnp.array([[0.5], [-1.0]])
    for target, weights in ((10.0, [1, 3, 10, 30]), (None, [1, 3])):
        state = state_of(1.0, target)
        annotation = value_aware.annotate(values, state, observation)
        np.testing.assert_allclose(annotation.value, np.outer([0.5, 2.0], weights))
        np.testing.assert_allclose(annotation.gradient[..., 0], np.outer([1.0, -2.0], weights))
    with pytest.raises(ValueError, match="this agent has no critics"):
        value_aware.of_learner(Learner(blank, blank, act))


def test_the_value_of_a_row_does_not_depend_on_its_place_where_the_agent_draws_its_action() -> None:
    """FQL does; a model that predicts every row exactly would else have a loss."""
    learner = fql.make(fql.Config(hidden=(8,)), Spec((3,), 1), heads.make("scalar"))
    row = lambda *shape: jnp.zeros((5, *shape))
    batch = Transition(row(3), row(1), row(), row(), row(3), row(1), row())
    values, state = value_aware.of_learner(learner), learner.init(KEY, batch)
    observation = jax.random.normal(KEY, (4, 3))
    many = values(state, jnp.broadcast_to(observation[::-1], (2, 4, 3)))
    np.testing.assert_allclose(many[:, 1, ::-1], values(state, observation), atol=1e-6)
    assert jnp.ptp(jax.jit(learner.act)(state, jnp.zeros((4, 3)), KEY)) > 1e-3


def test_soft_actor_critic_has_two_values_for_each_critic() -> None:
    learner = sac_n.make(sac_n.Config(critics=2, hidden=(8,)), Spec((3,), 1), heads.make("scalar"))
    row = lambda *shape: jnp.zeros((5, *shape))
    batch = Transition(row(3), row(1), row(), row(), row(3), row(1), row())
    state = jax.eval_shape(learner.init, KEY, batch)
    ask = functools.partial(value_aware.annotate, value_aware.of_learner(learner))
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(ask, state, batch.observation))
    assert shapes == value_aware.Annotation((5, 4), (5, 4, 3))


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "fields", "message"),
    [
        (
            "vagrom",
            quadratic,
            {},
            r"model_loss='vagrom': did you mean 'vagram'\? choose one of mle, mse, standardised, vagram",
        ),
        ("taylor", None, {}, "taylor asks a value function and was given none: .* or choose mle or mse"),
        (
            "vagram",
            quadratic,
            {"clip_quantile": 0.0},
            r"clip_quantile=0.0 must be a quantile above 0 and at most 1",
        ),
        ("vagram", quadratic, {"clip_quantile": 1.1}, r"clip_quantile=1.1 must be"),
        ("vagram", quadratic, {"floor": -0.1}, r"floor=-0.1 of the model loss must be a finite number"),
        ("vagram", quadratic, {"floor": math.inf}, "floor=inf of the model loss must be a finite number"),
        (
            "calibrated",
            quadratic,
            {"samples": 1},
            r"samples=1 of the model loss calibrated must be at least 2",
        ),
        ("vaml", quadratic, {"samples": 0}, r"samples=0 of the model loss vaml must be at least 1"),
    ],
)
def test_losses_that_cannot_be_are_refused(
    name: str, values: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        value_aware.make(name, values, Settings(**fields))


@pytest.mark.parametrize("name", value_aware.LOSSES)
def test_a_loss_is_refused_by_an_ensemble_that_it_cannot_fit(name: str) -> None:
    """Variances that are asked for and not predicted, or predicted and never learned."""
    model_loss = value_aware.make(name, quadratic)
    meant = ensemble.Config(deterministic=value_aware.is_deterministic(name))
    ensemble.make(meant, Spec((2,), 1), model_loss)
    other = ensemble.Config(deterministic=not meant.deterministic)
    if name in ("mle", "calibrated", "mse", "standardised", "taylor"):
        remedy = (
            "a deterministic ensemble does not have" if other.deterministic else "without ever learning them"
        )
        with pytest.raises(ValueError, match=remedy):
            ensemble.make(other, Spec((2,), 1), model_loss)
    else:
        ensemble.make(other, Spec((2,), 1), model_loss)


def test_a_context_that_no_value_can_read_is_refused() -> None:
    config = ensemble.Config(members=1, elites=1, hidden=(), decay=(0.0,), deterministic=True, updates=1)
    column = lambda *shape: jnp.ones((10, *shape))
    steps = Transition(column(2), column(1), column(), column(), column(2), column(1), column())
    data = ring.Ring(steps, jnp.int32(0), jnp.int32(10))
    fit = lambda name, values=quadratic: (
        ensemble.make(config, Spec((2,), 1), value_aware.make(name, values)).fit
    )
    with pytest.raises(
        ValueError, match=r"vagram asks a value function, whose state is missing: fit\(..., context="
    ):
        fit("vagram")(data, KEY)
    state = random_state(size=2)
    with pytest.raises(
        ValueError, match="anisotropic needs one permutation of the dimensions for the whole run"
    ):
        fit("anisotropic")(data, KEY, context=Context(state))
    single = lambda state, observation: observation.sum(-1)
    with pytest.raises(ValueError, match=r"must have the shape \[C, 10\], .* not \[10\]"):
        fit("vagram", single)(data, KEY, context=Context(()))
