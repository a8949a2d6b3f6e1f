"""rl.values.losses against rlax, SciPy, enumeration and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from rl.values import heads, losses

pytestmark = pytest.mark.slow

BATCH = 7
law = settings(deadline=None, max_examples=40, derandomize=True)
batch = partial(hnp.arrays, np.float32, BATCH)
any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
every_head = pytest.mark.parametrize("name", heads.NAMES)


def compiled(function: Callable, *inputs: Any) -> Any:
    """What a function says of the inputs, in one program, as NumPy arrays."""
    return jax.device_get(jax.jit(function)(*inputs))


def float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


# ---- huber ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.1, 1.0, 5.0])
def test_huber_agrees_with_scipy_and_rlax(delta: float) -> None:
    error = np.float32(np.concatenate([np.linspace(-9, 9, 181), [delta, -delta, 0.0]]))
    value, ours, theirs = compiled(
        lambda error: (
            heads.huber(error, delta),
            jax.vmap(jax.grad(partial(heads.huber, delta=delta)))(error),
            jax.vmap(jax.grad(partial(rlax.huber_loss, delta=delta)))(error),
        ),
        error,
    )
    np.testing.assert_allclose(value, special.huber(delta, error), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_huber_of_the_largest_errors() -> None:
    """The branch not taken, error^2, must not overflow into the gradient."""
    error = float32([3.4e38, -3.4e38, 1e20])
    value, gradient = compiled(jax.vmap(jax.value_and_grad(heads.huber)), error)
    assert np.isfinite(value).all()
    np.testing.assert_array_equal(gradient, [1, -1, 1])


# ---- expectiles -----------------------------------------------------------------------------------------


@jax.jit
def expectile_losses(error: jax.Array, expectile: float) -> tuple[jax.Array, jax.Array]:
    """Ours and that of rlax."""
    weight = losses.expectile_weight(error, expectile)
    return weight * error**2, rlax.expectile_loss(jnp.zeros(BATCH), error, expectile)


@law
@given(batch(elements=st.floats(-100, 100, width=32)), st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]))
def test_expectile_loss_agrees_with_rlax(error: np.ndarray, expectile: float) -> None:
    ours, theirs = expectile_losses(error, expectile)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-30)


LOW, HIGH, EXPECTILES = -4, 5, (0.1, 0.5, 0.7, 0.9)
SAMPLES = (  # normal, skewed, two-valued
    np.random.default_rng(0).normal(size=32),
    np.random.default_rng(1).exponential(size=32) / 2,
    np.array([-1.0, -1.0, -1.0, 2.0] * 8),
)
CASES = [(sample, expectile) for sample in SAMPLES for expectile in EXPECTILES]


def over_cases(f: Callable[[jax.Array, jax.Array], jax.Array]) -> np.ndarray:
    """``f(sample, expectile)`` of every case, compiled once."""
    samples, expectiles = map(float32, zip(*CASES, strict=True))
    return np.asarray(jax.jit(jax.vmap(f))(samples, expectiles))


def weighted_loss(head: heads.ValueHead, outputs: jax.Array, y: jax.Array, expectile: jax.Array) -> jax.Array:
    """An expectile regression of one state's outputs on many targets, as an agent writes it."""
    weight = losses.expectile_weight(y - head.value(outputs), expectile)
    target = heads.scalar_target(head, y)
    return (weight * head.loss(jnp.broadcast_to(outputs, (len(y), head.size)), target)).mean()


@pytest.mark.optimised
@every_head
def test_every_head_descends_to_the_expectile(name: str) -> None:
    """The central claim: an agent's expectile regression is right whatever represents its values.

    SciPy knows nothing of heads. The quantile head cannot keep an expectation exactly; it must stay within
    its stated bias, ``range / 2K + kappa``.
    """
    size, kappa = 51, 0.01
    steps = 2000 if name == "quantile" else 4000  # of many times the work, for a wider tolerance
    head = heads.quantile(size, kappa) if name == "quantile" else heads.make(name, LOW, HIGH, 33)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, steps), b1=0.5)

    def descend(y: jax.Array, expectile: jax.Array) -> jax.Array:
        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            outputs, state = carry
            gradient = jax.grad(lambda x: weighted_loss(head, x, y, expectile))(outputs)
            update, state = optimiser.update(gradient, state)
            return (optax.apply_updates(outputs, update), state), None

        outputs = jnp.sin(jnp.arange(head.size, dtype=jnp.float32))
        return head.value(jax.lax.scan(step, (outputs, optimiser.init(outputs)), None, steps)[0][0])

    for value, (sample, expectile) in zip(over_cases(descend), CASES, strict=True):
        tolerance = np.ptp(sample) / (2 * size) + kappa if name == "quantile" else 3e-3
        np.testing.assert_allclose(value, stats.expectile(sample, expectile), atol=tolerance)


@pytest.mark.parametrize("name", ["two_hot", "hl_gauss", "c51"])
def test_the_fixed_point_of_categorical_heads_is_exact(name: str) -> None:
    """Where descent stops short: labels averaged under their weights, to float32 or the label's stated bias."""
    head = heads.make(name, LOW, HIGH, 33)

    def fixed_point(y: jax.Array, expectile: jax.Array) -> jax.Array:
        def minimise(_: int, outputs: jax.Array) -> jax.Array:
            weight = losses.expectile_weight(y - head.value(outputs), expectile)
            label = (weight[:, None] * heads.scalar_target(head, y)).sum(0) / weight.sum()
            return jnp.log(jnp.maximum(label, 1e-30))

        return jax.lax.fori_loop(0, 30, minimise, jnp.zeros(head.size))

    def gradient(y: jax.Array, expectile: jax.Array) -> jax.Array:
        return jax.grad(lambda x: weighted_loss(head, x, y, expectile))(fixed_point(y, expectile))

    values = over_cases(lambda y, expectile: head.value(fixed_point(y, expectile)))
    bias = 1.2e-4 * (HIGH - LOW) / 27 if name == "hl_gauss" else 0.0
    for value, (sample, expectile) in zip(values, CASES, strict=True):
        np.testing.assert_allclose(value, stats.expectile(sample, expectile), atol=bias + 3e-6)
    np.testing.assert_allclose(over_cases(gradient), 0, atol=1e-6)


@pytest.mark.parametrize("expectile", [0.5, 0.9])
def test_expectile_of_backed_up_distributions(expectile: float) -> None:
    """IQL's V with a c51 Q: targets are whole distributions, the value the expectile of their means."""
    head = heads.c51(-4, 5, 33)
    q = float32(np.random.default_rng(2).normal(size=(16, 33)))

    def fixed_point(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        target, y = heads.same_target(head, q), head.value(q)

        def minimise(_: int, outputs: jax.Array) -> jax.Array:
            weight = losses.expectile_weight(y - head.value(outputs), expectile)
            return jnp.log((weight[:, None] * target).sum(0) / weight.sum())

        return head.value(jax.lax.fori_loop(0, 30, minimise, jnp.zeros(33))), y

    value, y = compiled(fixed_point, q)
    np.testing.assert_allclose(value, stats.expectile(np.float64(y), expectile), atol=1e-5)


# ---- soft maxima ----------------------------------------------------------------------------------------

TEMPERATURES = (0.5, 2.0)


def test_gumbel_weights_have_the_gradient_of_the_gumbel_regression() -> None:
    """X-QL's ``e^z - z - 1`` by numbers alone: its slope in V is that of the weighted square, but for a factor."""
    error = np.array([-200.0, -3.0, -1e-4, 0.0, 1e-4, 0.7, 9.0, 13.9])
    for temperature in TEMPERATURES:
        z = error / temperature
        weight = compiled(partial(losses.gumbel_weight, temperature=temperature, cap=30.0), float32(error))
        expected = temperature * np.expm1(z) * np.exp(-z.max())
        np.testing.assert_allclose(weight * error, expected, rtol=2e-4, atol=1e-30)
    capped = compiled(losses.gumbel_weight, float32([7.0, 50.0, -1e30]), 1.0)
    np.testing.assert_allclose(capped[:2], np.expm1(7) / 7 * np.exp(-7), rtol=1e-5)
    assert np.isfinite(capped).all()
    far = compiled(losses.gumbel_weight, float32([-500.0, -400.0]), 1.0)  # all far below: by e^-1, not e^-400
    np.testing.assert_allclose(far, np.e / np.array([500.0, 400.0]), rtol=1e-5)


@pytest.mark.parametrize("name", ["two_hot", "hl_gauss", "c51"])
def test_the_fixed_point_of_gumbel_weights_is_the_soft_maximum(name: str) -> None:
    """Whatever represents the value: SciPy's log-sum-exp knows nothing of heads or weights."""
    head = heads.make(name, LOW, HIGH, 33)
    samples = np.stack(SAMPLES)

    def fixed_point(y: jax.Array, temperature: jax.Array) -> jax.Array:
        def minimise(_: int, outputs: jax.Array) -> jax.Array:
            weight = losses.gumbel_weight(y - head.value(outputs), temperature)
            label = (weight[:, None] * heads.scalar_target(head, y)).sum(0) / weight.sum()
            return jnp.log(jnp.maximum(label, 1e-30))

        return head.value(jax.lax.fori_loop(0, 100, minimise, jnp.zeros(head.size)))

    over = jax.jit(jax.vmap(jax.vmap(fixed_point, (0, None)), (None, 0)))
    values = over(float32(samples), float32(TEMPERATURES))
    bias = 1.2e-4 * (HIGH - LOW) / 27 if name == "hl_gauss" else 0.0
    for value, temperature in zip(values, TEMPERATURES, strict=True):
        soft = special.logsumexp(samples / temperature, axis=1) - np.log(samples.shape[1])
        np.testing.assert_allclose(value, temperature * soft, atol=bias + 1e-5)


# ---- policy weights -------------------------------------------------------------------------------------


AWR_WEIGHT = jax.jit(losses.awr_weight)


@law
@given(batch(elements=any_float32), st.sampled_from([0.0, 0.5, 3.0, 1e4]), st.sampled_from([1.0, 100.0, 1e6]))
def test_awr_weight_is_the_capped_exponential(advantage: np.ndarray, temperature: float, cap: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.minimum(np.exp(np.float64(advantage) * temperature), cap)
    weight = AWR_WEIGHT(advantage, temperature, cap)
    # exp is as exact as its argument: 88 * 2^-24 is 5e-6.
    np.testing.assert_allclose(weight, expected, rtol=3e-5, atol=1e-37)


def test_awr_default_cap_is_that_of_iql() -> None:
    np.testing.assert_allclose(
        AWR_WEIGHT(float32([0.0, 1.0, 2.0, 1e30]), 3.0), [1, np.e**3, 100, 100], rtol=1e-5
    )


def test_q_scale_makes_the_mean_magnitude_one() -> None:
    q = float32(np.random.default_rng(3).normal(size=(4, 5)) * 37)
    scale, of_nothing = compiled(lambda q: (losses.q_scale(q), losses.q_scale(jnp.zeros(3))), q)
    np.testing.assert_allclose(scale, 1 / np.abs(np.float64(q)).mean(), rtol=1e-6)
    np.testing.assert_allclose(np.abs(scale * q).mean(), 1, rtol=1e-6)
    assert np.isfinite(of_nothing)


@pytest.mark.parametrize(
    "weight",
    [
        lambda x: losses.expectile_weight(x, 0.7),
        lambda x: losses.awr_weight(x, 3.0),
        lambda x: losses.q_scale(x),
    ],
)
def test_weights_carry_no_gradient(weight: Callable[[jax.Array], jax.Array]) -> None:
    gradient = compiled(jax.grad(lambda x: weight(x).sum()), np.linspace(-2, 3, 9, dtype=np.float32))
    np.testing.assert_array_equal(gradient, 0)


# ---- conservative regularisers --------------------------------------------------------------------------

CQL = {name: jax.jit(getattr(losses, f"cql_{name}")) for name in ("h", "rho", "var")}


def test_cql_h_of_all_discrete_actions_is_exact() -> None:
    q = np.random.default_rng(4).normal(size=(BATCH, 6)) * 5
    ours = CQL["h"](float32(q), np.full((BATCH, 6), -np.log(6), np.float32))
    np.testing.assert_allclose(ours, special.logsumexp(q, axis=-1), rtol=1e-6)


def test_cql_h_estimates_the_integral_of_a_gaussian() -> None:
    """Q = c - (a - m)^2 / 2 s^2, whose log-partition function is c + log(s sqrt(2 pi))."""
    m, s, c = 0.3, 0.7, 2.0
    exact = c + np.log(s * np.sqrt(2 * np.pi))
    rng = np.random.default_rng(5)

    def estimate(action: np.ndarray, log_density: np.ndarray) -> float:
        return float(CQL["h"](float32(c - (action - m) ** 2 / (2 * s**2)), float32(log_density)))

    for proposal in (stats.norm(0, 1.2), stats.uniform(-4, 8), stats.t(3)):
        action = proposal.rvs(100_000, random_state=rng)
        np.testing.assert_allclose(estimate(action, proposal.logpdf(action)), exact, atol=0.02)
    # Two proposals in one set of samples, as CQL draws them: each with its own density.
    halves = [(p, p.rvs(50_000, random_state=rng)) for p in (stats.norm(0, 1.2), stats.uniform(-4, 8))]
    density = np.concatenate([p.logpdf(a) for p, a in halves])
    np.testing.assert_allclose(estimate(np.concatenate([a for _, a in halves]), density), exact, atol=0.02)
    # A proposal in proportion to exp Q has no variance: one sample is enough.
    np.testing.assert_allclose(estimate(np.array([5.0]), stats.norm(m, s).logpdf([5.0])), exact, rtol=1e-5)


def kl_penalised_maximum(q: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """argmax over distributions mu of E_mu q - KL(mu, prior), by a general-purpose optimiser."""

    def negative(logits: np.ndarray) -> float:
        mu = special.softmax(logits)
        return float(-(mu @ q) + special.rel_entr(mu, prior).sum())

    result = optimize.minimize(negative, np.zeros(len(q)), tol=1e-14)
    return special.softmax(result.x)


def test_cql_rho_is_the_value_of_the_kl_penalised_maximiser() -> None:
    rng = np.random.default_rng(6)
    q, prior = rng.normal(size=(3, 5)) * 2, rng.dirichlet(np.ones(5), size=3)
    mu = np.stack([kl_penalised_maximum(*pair) for pair in zip(q, prior, strict=True)])
    values, log_prior = float32(q), float32(np.log(prior))
    np.testing.assert_allclose(CQL["rho"](values, log_prior), (mu * q).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(CQL["rho"](values, log_prior + 3), (mu * q).sum(-1), rtol=1e-4)
    # mu is held fixed while Q is pushed down: the gradient is mu itself.
    gradient = compiled(jax.grad(lambda v: losses.cql_rho(v, log_prior).sum()), values)
    np.testing.assert_allclose(gradient, mu, atol=1e-4)


def test_cql_rho_from_samples_of_the_prior() -> None:
    """Prior N(0, 1), Q = b a: the maximiser is N(b, 1), and its mean Q is b^2."""
    action, slope = np.random.default_rng(7).normal(size=200_000), 0.8
    ours = CQL["rho"](float32(slope * action), np.zeros(200_000, np.float32))
    np.testing.assert_allclose(ours, slope**2, atol=0.02)


def test_cql_var_is_the_deviation_under_the_prior() -> None:
    rng = np.random.default_rng(8)
    q, prior = rng.normal(size=(3, 5)) * 2, rng.dirichlet(np.ones(5), size=3)
    mean = (prior * q).sum(-1, keepdims=True)
    expected = np.sqrt((prior * (q - mean) ** 2).sum(-1))
    ours = CQL["var"](float32(q), float32(np.log(prior) - 2))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(CQL["var"](float32(q), np.zeros((3, 5), np.float32)), q.std(-1), rtol=1e-5)


def test_cql_var_of_equal_values() -> None:
    value, gradient = compiled(jax.value_and_grad(losses.cql_var), float32([7] * 4), float32([0] * 4))
    np.testing.assert_allclose(value, 0, atol=2e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize("regulariser", [losses.cql_h, losses.cql_rho, losses.cql_var])
@law
@given(batch(elements=st.floats(-1e4, 1e4, width=32)), batch(elements=st.floats(-100, 100, width=32)))
def test_regularisers_are_finite_shift_with_q_and_take_batches(
    regulariser: Callable[[jax.Array, jax.Array], jax.Array], values: np.ndarray, log_density: np.ndarray
) -> None:
    both = np.stack([values, values + np.float32(64)])
    ask = VALUE_AND_GRADIENT[regulariser]
    result, gradient, alone = map(np.asarray, ask(both, np.stack([log_density] * 2)))
    assert np.isfinite(result).all() and np.isfinite(gradient).all()
    shift, mass = (0, 0) if regulariser is losses.cql_var else (64, 1)
    np.testing.assert_allclose(result[1] - result[0], shift, atol=0.02)
    # Pushed down by a constant, everything falls by it: the gradient's entries sum to 1 (0 for a deviation).
    np.testing.assert_allclose(gradient.sum(-1), mass, atol=2e-3)
    np.testing.assert_allclose(alone, result[0], rtol=1e-5, atol=1e-3)


def value_and_gradient(regulariser: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable:
    """Of a batch [2, ...] its values, their gradient, and the value of its first element alone; compiled."""

    def ask(values: jax.Array, log_density: jax.Array) -> tuple[jax.Array, ...]:
        gradient = jax.grad(lambda v: regulariser(v, log_density).sum())(values)
        return regulariser(values, log_density), gradient, regulariser(values[0], log_density[0])

    return jax.jit(ask)


VALUE_AND_GRADIENT = {f: value_and_gradient(f) for f in (losses.cql_h, losses.cql_rho, losses.cql_var)}


# ---- diversity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 6])
def test_gradient_diversity_is_the_sum_over_pairs(members: int) -> None:
    gradients = np.random.default_rng(9).normal(size=(members, 4, 3)) * 10.0 ** np.arange(-3, 1)[:, None]
    expected = np.zeros(4)
    for b, i, j in np.ndindex(4, members, members):
        if i != j:
            g, h = gradients[i, b], gradients[j, b]
            expected[b] += g @ h / np.linalg.norm(g) / np.linalg.norm(h) / (members - 1)
    ours = compiled(losses.gradient_diversity, float32(gradients))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_gradient_diversity_at_its_extremes() -> None:
    same, opposite = float32(np.ones((5, 1, 2))), float32([[[1, 2]], [[-1, -2]]])
    orthogonal = float32(np.eye(3)[:, None])
    diversity = compiled(lambda *x: list(map(losses.gradient_diversity, x)), same, opposite, orthogonal)
    np.testing.assert_allclose(np.concatenate(diversity), [5, -2, 0], rtol=1e-5, atol=1e-6)


def test_a_member_without_gradient_does_not_poison_the_others() -> None:
    gradients = float32([[[0, 0]], [[1, 0]], [[1, 1]]])
    value, gradient = compiled(jax.value_and_grad(lambda g: losses.gradient_diversity(g).sum()), gradients)
    np.testing.assert_allclose(value, np.sqrt(0.5), rtol=1e-5)  # 2 <g_2, g_3> / 2
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.abs(gradient[1]).max() > 0.1


def test_one_member_has_no_diversity() -> None:
    with pytest.raises(ValueError, match="at least two"):
        losses.gradient_diversity(np.ones((1, 4, 3), np.float32))


# ---- contrastive RL --------------------------------------------------------------------------------------


def test_contrastive_losses_of_known_logits() -> None:
    """Nothing known: log 2, or log B. Own pairs ahead by ``c``: in closed form. Several [E, B, B] are each one's."""
    size, c = 4, 3.0
    logits = jnp.stack([jnp.zeros((size, size)), c * jnp.eye(size)])
    binary, symmetric = compiled(lambda x: (losses.binary_nce(x), losses.symmetric_info_nce(x)), logits)
    positives, negatives = np.log1p(np.exp(-c)) / size, np.log(2) * (size - 1) / size
    np.testing.assert_allclose(binary, [np.log(2), positives + negatives], rtol=1e-5)
    np.testing.assert_allclose(symmetric, [np.log(size), np.log(np.exp(c) + size - 1) - c], rtol=1e-5)
    # A goal that all rows expect: rows find theirs no better, goals theirs no worse
    column = jnp.zeros((size, size)).at[:, 0].set(c)
    rows = (size * np.log(np.exp(c) + size - 1) - c) / size
    np.testing.assert_allclose(
        compiled(losses.symmetric_info_nce, column), (rows + np.log(size)) / 2, rtol=1e-5
    )


# ---- shapes, batching -----------------------------------------------------------------------------------

FLAT, COLUMN, SQUARE = (np.zeros(shape, np.float32) for shape in (4, (4, 1), (4, 4)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: losses.expectile_weight(FLAT, COLUMN),
        lambda: losses.expectile_weight(COLUMN, FLAT),
        lambda: losses.awr_weight(FLAT, COLUMN),
        lambda: losses.awr_weight(COLUMN, FLAT),
        lambda: losses.cql_h(FLAT, COLUMN),
        lambda: losses.cql_h(COLUMN, FLAT),
        lambda: losses.cql_rho(FLAT, COLUMN),
        lambda: losses.cql_rho(SQUARE, FLAT),
        lambda: losses.cql_var(FLAT, COLUMN),
        lambda: losses.cql_var(SQUARE, FLAT),
    ],
)
def test_wrong_shapes_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="Chex"):
        wrong()


def test_advantages_of_cloned_bins_by_hand() -> None:
    """Three bins, the middle one logged; clips below 0 ask for a margin, above 0 they allow a lag."""
    advantage = float32([[-1.0, -2.0, 0.5], [-3.0, 0.0, -0.5]])
    logged = np.array([1, 1])
    margin, behind = jax.jit(losses.advantage_margin), jax.jit(losses.advantage_cql)
    for clip, first, second in ((-1.0, (1 + 2.5) / 2, (-1 - 0.5) / 2), (1.5, (1.5 + 2.5) / 2, 1.5)):
        np.testing.assert_allclose(margin(advantage, logged, clip), [first, second], rtol=1e-6)
    by_hand = [np.log(np.exp(-1.0) + np.exp(0.5)) + 2, np.log(np.exp(-3.0) + np.exp(-0.5))]
    np.testing.assert_allclose(behind(advantage, logged, -9.0), by_hand, rtol=1e-6)
    np.testing.assert_allclose(behind(advantage, logged, 0.0), [by_hand[0], 0.0], rtol=1e-6)
    for term in (losses.advantage_margin, losses.advantage_cql):
        ask = lambda x, term=term: (
            term(jnp.stack([x, 2 * x]), logged, -1.0),  # members share what was logged
            term(2 * x, logged, -1.0),
            jax.grad(lambda x: term(x, logged, -0.3).sum())(x),
        )
        members, alone, pull = compiled(ask, advantage)
        np.testing.assert_allclose(members[1], alone, rtol=1e-6)
        assert pull[0, 1] < 0 < pull[0, 0] and not pull[1].any()  # the second is ahead by enough
        with pytest.raises(AssertionError, match="Chex"):
            term(advantage, np.zeros(3, np.int32), 0.0)


def test_a_batch_is_its_elements_and_jit_changes_nothing() -> None:
    rng = np.random.default_rng(10)
    values, log_density = map(jnp.asarray, float32(rng.normal(size=(2, BATCH, 5))))
    gradients = jnp.asarray(float32(rng.normal(size=(BATCH, 3, 2))))

    def everything(values: jax.Array, log_density: jax.Array, gradients: jax.Array) -> tuple:
        return (
            losses.expectile_weight(values, 0.7),
            losses.awr_weight(values, 3.0),
            losses.cql_h(values, log_density),
            losses.cql_rho(values, log_density),
            losses.cql_var(values, log_density),
            losses.gradient_diversity(jnp.moveaxis(gradients, -2, 0)),
        )

    inputs = (values, log_density, gradients)
    together = everything(*inputs)
    for other in (jax.jit(everything)(*inputs), jax.jit(jax.vmap(everything))(*inputs)):
        for ours, expected in zip(other, together, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
