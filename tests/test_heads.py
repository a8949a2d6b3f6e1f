"""rl.values.heads against rlax, SciPy in float64 and the laws that every head must obey."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from scipy.stats import norm

from rl.values import heads

pytestmark = pytest.mark.slow

LOW, HIGH, SIZE, BATCH = -10.0, 10.0, 21, 7
HEADS = {name: heads.make(name, LOW, HIGH, SIZE) for name in heads.NAMES}
CATEGORICAL = tuple(name for name, head in HEADS.items() if not head.are_values)
SAMPLES_BF16 = (jnp.float32, jnp.bfloat16)

every_head = pytest.mark.parametrize("name", heads.NAMES)
every_categorical = pytest.mark.parametrize("name", CATEGORICAL)
# The same examples every time: a red run means that the code changed.
law = settings(deadline=None, max_examples=40, derandomize=True)

any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
inside = st.floats(LOW, HIGH, width=32)
batch = partial(hnp.arrays, np.float32, BATCH)
logits = partial(hnp.arrays, np.float32, elements=st.floats(-1e4, 1e4, width=32))
small_logits = partial(hnp.arrays, np.float32, elements=st.floats(-8, 8, width=32))
discounts = batch(elements=st.floats(0, 1, width=32))


def step_of(name: str, low: float, high: float, size: int) -> float:
    """The distance between neighbouring atoms."""
    return (high - low) / {"hl_gauss": size - 6, "two_hot": size - 1, "c51": size - 1}.get(name, np.inf)


def bias(name: str, low: float = LOW, high: float = HIGH, size: int = SIZE) -> float:
    """What target -> outputs -> value may lose: the stated bias, and float32's rounding."""
    stated = 1.2e-4 * step_of(name, low, high, size) if name == "hl_gauss" else 0.0
    return stated + 1e-6 * max(abs(low), abs(high))


def minimiser(name: str, target: jax.Array) -> jax.Array:
    """The outputs that minimise a head's loss (for `quantile` as kappa goes to 0)."""
    if name in CATEGORICAL:
        return jnp.log(target)
    return target[..., None] if name == "scalar" else jnp.sort(target)


def means(name: str, low: float, high: float, size: int) -> np.ndarray:
    """The atoms or bin centres in float64, written out a second time."""
    if name == "hl_gauss":
        width = (high - low) / (size - 6)
        return low + width * (np.arange(size) - 2.5)
    return np.linspace(low, high, size)


def round_trip(name: str, head: heads.ValueHead) -> Callable[[jax.Array], jax.Array]:
    """target -> label -> outputs -> value, compiled."""
    return jax.jit(lambda y: head.value(minimiser(name, heads.scalar_target(head, y))))


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(name: str, outputs: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    return HEADS[name].loss(outputs, target), jax.grad(lambda x: HEADS[name].loss(x, target).sum())(outputs)


@partial(jax.jit, static_argnums=0)
def value_gradient(name: str, outputs: jax.Array) -> jax.Array:
    return jax.grad(lambda x: HEADS[name].value(x).sum())(outputs)


@partial(jax.jit, static_argnums=0)
def mix_and_gradient(name: str, outputs: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    head = HEADS[name]
    gradient = jax.grad(lambda x: head.value(head.mix(x, weights)).sum())(outputs)
    return head.mix(outputs, weights), gradient


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def evenly(low: float, high: float, count: int) -> np.ndarray:
    return np.linspace(low, high, count, dtype=np.float32)


@partial(jax.jit, static_argnums=0)
def same_target_and_its_value(name: str, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    target = heads.same_target(HEADS[name], outputs)
    return target, HEADS[name].value(minimiser(name, target))


TARGET = {name: jax.jit(head.target) for name, head in HEADS.items()}
SCALAR_TARGET = {name: jax.jit(partial(heads.scalar_target, head)) for name, head in HEADS.items()}
VALUE = {name: jax.jit(head.value) for name, head in HEADS.items()}
ROUND_TRIP = {name: round_trip(name, head) for name, head in HEADS.items()}


# ---- against other implementations ----------------------------------------------------------------------


def test_two_hot_labels_agree_with_rlax() -> None:
    y = evenly(LOW - 3, HIGH + 3, 137)
    theirs = jax.jit(rlax.transform_to_2hot, static_argnums=(1, 2, 3))(y, LOW, HIGH, SIZE)
    np.testing.assert_allclose(SCALAR_TARGET["two_hot"](y), theirs, atol=2e-5)


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0, 2.0])
def test_hl_gauss_labels_agree_with_the_normal_distribution_of_scipy(ratio: float) -> None:
    padding = int(np.ceil(4 * ratio))
    size = 20 + 2 * padding
    y = np.float64(np.linspace(LOW - 1, HIGH + 1, 301, dtype=np.float32))
    edges = LOW + (np.arange(size + 1) - padding) * 1.0  # the bins are 1 wide
    cdf = norm.cdf(edges, loc=np.clip(y, LOW, HIGH)[:, None], scale=ratio)
    expected = np.diff(cdf, axis=1) / (cdf[:, -1:] - cdf[:, :1])
    label = jax.jit(partial(heads.scalar_target, heads.hl_gauss(LOW, HIGH, size, ratio)))(np.float32(y))
    np.testing.assert_allclose(label, expected, atol=1e-6)


@jax.jit
@jax.vmap
def projection(reward: jax.Array, discount: jax.Array, outputs: jax.Array) -> jax.Array:
    atoms = jnp.linspace(LOW, HIGH, SIZE)
    return rlax.categorical_l2_project(reward + discount * atoms, jax.nn.softmax(outputs), atoms)


@law
@given(batch(elements=any_float32), discounts, logits((BATCH, SIZE)))
def test_c51_projection_agrees_with_rlax(
    reward: np.ndarray, discount: np.ndarray, outputs: np.ndarray
) -> None:
    ours = TARGET["c51"](reward, discount, outputs)
    np.testing.assert_allclose(ours, projection(reward, discount, outputs), atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_c51_loss_agrees_with_rlax(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form for CPUs, and in that for accelerators."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, **forms: forms[platform](*args))
    atoms = evenly(LOW, HIGH, SIZE)
    outputs, following = normal(0, 2, BATCH, SIZE)
    reward, discount = 5 * normal(1, BATCH), np.random.default_rng(2).uniform(size=BATCH).astype(np.float32)
    expected = jax.jit(jax.vmap(rlax.categorical_td_learning, (None, 0, 0, 0, None, 0)))(
        atoms, outputs, reward, discount, atoms, following
    )
    target = jax.jit(heads.c51(LOW, HIGH, SIZE).target)(reward, discount, following)
    loss, _ = loss_and_gradient("c51", outputs, target)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("kappa", [0.01, 1.0, 3.0])
def test_quantile_loss_and_its_gradient_agree_with_rlax(
    kappa: float, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form for CPUs, and in that for accelerators."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, **forms: forms[platform](*args))
    outputs, target = 3 * normal(1, 2, SIZE)
    levels = np.float32((2 * np.arange(SIZE) + 1) / (2 * SIZE))
    head = heads.quantile(SIZE, kappa)

    def theirs(x: jax.Array) -> jax.Array:  # theirs is not divided by kappa
        return rlax.quantile_regression_loss(x, levels, target, kappa) / kappa

    @jax.jit
    def both(outputs: jax.Array) -> tuple:
        return jax.value_and_grad(head.loss)(outputs, target), jax.value_and_grad(theirs)(outputs)

    (ours, our_gradient), (expected, gradient) = both(outputs)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(our_gradient, gradient, rtol=1e-4, atol=1e-6)


def test_scalar_loss_is_the_squared_td_error_of_rlax() -> None:
    value, reward, following = np.array([[1.0, -2.0], [3.0, 0.5], [2.0, -7.0]], np.float32)
    discount = np.full(2, 0.9, np.float32)
    error = jax.jit(jax.vmap(rlax.td_learning))(value, reward, discount, following)
    loss, _ = loss_and_gradient(
        "scalar", value[:, None], TARGET["scalar"](reward, discount, following[:, None])
    )
    np.testing.assert_allclose(loss, np.square(error), rtol=1e-6)


# ---- round trip and bias --------------------------------------------------------------------------------


@every_head
@law
@given(
    low=st.floats(-1e3, 1e3),
    span=st.floats(1e-1, 1e4),
    size=st.sampled_from([SIZE, 101]),
    share=batch(elements=st.floats(0, 1, width=32)),
)
def test_round_trip(name: str, low: float, span: float, size: int, share: np.ndarray) -> None:
    head = heads.make(name, low, low + span, size)
    y = np.clip(np.float32(low + span * share), np.float32(low), np.float32(low + span))
    value = head.value(minimiser(name, heads.scalar_target(head, jnp.asarray(y))))
    np.testing.assert_allclose(value, y, rtol=0, atol=bias(name, low, low + span, size))


@pytest.mark.parametrize("ratio", [0.5, 0.6, 0.75, 1.0, 1.3, 3.0])
def test_hl_gauss_keeps_its_stated_bias(ratio: float) -> None:
    bound = {0.5: 2.4e-3, 0.6: 2.4e-3, 0.75: 1.2e-4}.get(ratio, 1.5e-4 * ratio)
    head = heads.hl_gauss(0, 20, 20 + 2 * int(np.ceil(4 * ratio)), ratio)  # bins are 1 wide
    y = evenly(0, 20, 4001)
    error = np.abs(round_trip("hl_gauss", head)(y) - y).max()
    assert error < bound + 4e-6
    if ratio in (0.5, 0.75, 1.0):
        assert error > 0.8 * bound, "the stated bound is no longer the true one"


def test_hl_gauss_without_padding_is_biased_at_its_ends_as_stated() -> None:
    head = heads.hl_gauss(0, 40, 40, padding=0)
    value = round_trip("hl_gauss", head)(np.float32([0, 20, 40]))
    np.testing.assert_allclose(value, [0.69, 20, 39.31], atol=2e-3)


def test_sigma_under_one_half_would_be_biased_as_its_error_says() -> None:
    y, edges = np.linspace(0, 1, 101), np.arange(-20, 22)
    label = np.diff(norm.cdf(edges, y[:, None], 0.25))
    np.testing.assert_allclose(np.abs(label @ (edges[:-1] + 0.5) - y).max(), 0.09, atol=5e-3)


@pytest.mark.parametrize("ratio", [0.6, 0.75, 1.0, 2.0])
def test_hl_gauss_labels_have_the_stated_standard_deviation(ratio: float) -> None:
    """Sheppard: binning adds 1/12. Forgetting erf's sqrt(2) would give sqrt(ratio^2 / 2 + 1 / 12)."""
    head = heads.hl_gauss(0, 20, 20 + 2 * int(np.ceil(4 * ratio)), ratio)
    label = np.float64(jax.jit(partial(heads.scalar_target, head))(evenly(9, 11, 41)))
    index = np.arange(head.size)
    deviation = np.sqrt(label @ index**2 - (label @ index) ** 2)
    np.testing.assert_allclose(deviation, np.sqrt(ratio**2 + 1 / 12), rtol=0.01)


@every_head
@law
@given(batch(elements=inside))
def test_loss_is_least_at_the_target(name: str, y: np.ndarray) -> None:
    target = np.asarray(SCALAR_TARGET[name](y))
    if name in CATEGORICAL:
        target = np.float32(0.999 * target + 0.001 / SIZE)  # no empty bins: finite logits
    _, gradient = loss_and_gradient(name, minimiser(name, target), target)
    np.testing.assert_allclose(gradient, 0, atol=5e-6)


@every_categorical
def test_targets_beyond_the_support_are_clipped_to_its_ends(name: str) -> None:
    far = np.float32([-3.4e38, -1e6, LOW - 0.01, HIGH + 0.01, 1e6, 3.4e38])
    at_the_ends = SCALAR_TARGET[name](np.float32([LOW] * 3 + [HIGH] * 3))
    np.testing.assert_allclose(SCALAR_TARGET[name](far), at_the_ends, atol=1e-7)


@every_head
def test_the_share_of_a_target_beyond_the_support(name: str) -> None:
    """Counted by NumPy: of the expected target, and for C51 of the distribution's mass; ends are inside."""
    outputs = np.random.default_rng(0).normal(size=(6, HEADS[name].size)).astype(np.float32)
    reward = np.array([0.0, LOW, HIGH, 1.2 * LOW, 1.2 * HIGH, HIGH + 0.1], np.float32)
    discount = np.array([1.0, 0.0, 0.0, 0.5, 0.5, 0.0], np.float32)
    weight = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    atoms = means(name, LOW, HIGH, SIZE)
    if name == "c51":
        moved = reward[:, None] + discount[:, None] * atoms
        expected = (((moved < LOW - 1e-3) | (moved > HIGH + 1e-3)) * weight).sum(-1)
        assert 0 < expected[3] < 1
    elif name in CATEGORICAL:
        y = reward + discount * (weight * atoms).sum(-1)
        expected = ((y < LOW - 1e-3) | (y > HIGH + 1e-3)).astype(float)
        assert expected.tolist() == [0, 0, 0, 1, 1, 1]
    else:
        expected = np.zeros(6)
    np.testing.assert_allclose(jax.jit(HEADS[name].clipped)(reward, discount, outputs), expected, atol=1e-6)


@every_head
@law
@given(batch(elements=st.floats(-(2.0**119), 2.0**119, width=32)), batch(elements=inside))
def test_monotone_in_the_target(name: str, far: np.ndarray, near: np.ndarray) -> None:
    value = np.asarray(ROUND_TRIP[name](np.sort(np.concatenate([far, near]))))
    assert (np.diff(value) >= -4e-6 - 1e-6 * np.abs(value[1:])).all()


@every_categorical
def test_nearby_targets_are_told_apart(name: str) -> None:
    assert (np.diff(ROUND_TRIP[name](evenly(LOW, HIGH, 2001))) > 0).all()


# ---- expectations are kept ------------------------------------------------------------------------------


@every_categorical
@law
@given(batch(elements=any_float32), discounts, logits((BATCH, SIZE)))
def test_labels_are_probabilities(
    name: str, reward: np.ndarray, discount: np.ndarray, outputs: np.ndarray
) -> None:
    label = np.asarray(TARGET[name](reward, discount, outputs))
    assert (label >= 0).all()
    np.testing.assert_allclose(np.float64(label).sum(-1), 1, atol=1e-6)


def test_no_bin_gets_a_negative_mass() -> None:
    """As float32's erf would give it to one target in two hundred, outside of `jit`."""
    assert heads.scalar_target(HEADS["hl_gauss"], jnp.linspace(LOW, HIGH, 2001)).min() >= 0


@every_categorical
@pytest.mark.parametrize(("low", "high"), [(990, 1000), (-1e5, -1e5 + 100), (0, 1e-6)])
def test_labels_are_probabilities_on_supports_far_from_zero(name: str, low: float, high: float) -> None:
    head = heads.make(name, low, high, 201)
    label = jax.jit(partial(heads.scalar_target, head))(evenly(low, high, 101))
    np.testing.assert_allclose(np.float64(label).sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("name", ["two_hot", "c51"])
@law
@given(batch(elements=inside))
def test_two_hot_and_c51_labels_keep_the_target_exactly(name: str, y: np.ndarray) -> None:
    label = np.float64(SCALAR_TARGET[name](y))
    np.testing.assert_allclose(label @ means(name, LOW, HIGH, SIZE), y, atol=4e-6)
    assert ((label > 0).sum(-1) <= 2).all()


@every_head
@law
@given(batch(elements=st.floats(-2, 2, width=32)), discounts, small_logits((BATCH, SIZE)))
def test_backup_keeps_the_expectation_inside_the_support(
    name: str, reward: np.ndarray, discount: np.ndarray, outputs: np.ndarray
) -> None:
    outputs = outputs[:, : HEADS[name].size]
    discount = np.minimum(discount, 0.8)  # with |r| <= 2 no atom leaves [-10, 10]
    if name == "hl_gauss":
        outputs[:, [0, 1, 2, -3, -2, -1]] = -100  # nor does the value: nothing in the padding
    expected = reward + discount * np.asarray(VALUE[name](outputs))
    value = VALUE[name](minimiser(name, TARGET[name](reward, discount, outputs)))
    np.testing.assert_allclose(value, expected, atol=bias(name))


@every_head
def test_value_and_its_gradient_in_float64(name: str) -> None:
    outputs = 3 * normal(2, BATCH, HEADS[name].size)
    value, gradient = VALUE[name](outputs), value_gradient(name, outputs)
    if name in CATEGORICAL:
        probabilities = np.exp(np.float64(outputs))
        probabilities /= probabilities.sum(-1, keepdims=True)
        atoms = means(name, LOW, HIGH, SIZE)
        np.testing.assert_allclose(value, probabilities @ atoms, atol=4e-6)
        expected = probabilities * (atoms - (probabilities @ atoms)[:, None])
        np.testing.assert_allclose(gradient, expected, atol=4e-6)
    else:
        np.testing.assert_allclose(value, np.float64(outputs).mean(-1), atol=1e-6)
        np.testing.assert_allclose(gradient, np.full_like(outputs, 1 / HEADS[name].size), rtol=1e-6)


@every_head
@law
@given(logits((BATCH, 3, SIZE)), hnp.arrays(np.float32, (BATCH, 3), elements=st.floats(0, 1, width=32)))
def test_mix_keeps_the_expectation(name: str, outputs: np.ndarray, weights: np.ndarray) -> None:
    head = HEADS[name]
    outputs = outputs[..., : head.size]
    weights = weights + np.float32(1e-3) * (weights.sum(-1, keepdims=True) == 0)
    weights = weights / weights.sum(-1, keepdims=True)
    mixture, gradient = mix_and_gradient(name, outputs, weights)
    scale = 10 if name in CATEGORICAL else np.abs(outputs).max() + 1
    expected = (VALUE[name](outputs) * weights).sum(-1)
    np.testing.assert_allclose(VALUE[name](mixture), expected, atol=2e-6 * scale)
    if name in CATEGORICAL:
        probabilities = (special.softmax(np.float64(outputs), -1) * weights[..., None]).sum(-2)
        np.testing.assert_allclose(special.softmax(np.float64(mixture), -1), probabilities, atol=1e-6)
    assert np.isfinite(gradient).all()


@every_head
@law
@given(small_logits((BATCH, SIZE)))
def test_same_target_says_what_the_outputs_say(name: str, outputs: np.ndarray) -> None:
    outputs = outputs[:, : HEADS[name].size]
    target, value = same_target_and_its_value(name, outputs)
    if name == "c51":  # the whole distribution, not only its mean
        np.testing.assert_allclose(target, special.softmax(np.float64(outputs), -1), atol=4e-6)
    if name == "quantile":
        np.testing.assert_allclose(target, outputs, atol=1e-30)  # subnormals may be flushed to 0
    if name == "hl_gauss":
        return  # clipped where the value lies in the padding; the mean is tested above
    np.testing.assert_allclose(value, VALUE[name](outputs), atol=bias(name))


@every_categorical
@law
@given(
    scale=st.sampled_from([0.01, 0.5, 3.0, 1000.0]),
    shift=st.integers(-50, 50),
    y=batch(elements=st.floats(-12, 12)),
)
def test_supports_shift_and_scale(name: str, scale: float, shift: int, y: np.ndarray) -> None:
    moved = heads.make(name, scale * (LOW + shift), scale * (HIGH + shift), SIZE)
    label = heads.scalar_target(moved, jnp.asarray(np.float32(scale * (np.float64(y) + shift))))
    np.testing.assert_allclose(label, SCALAR_TARGET[name](np.float32(y)), atol=2e-5)
    outputs = np.sin(np.arange(SIZE, dtype=np.float32))
    value = scale * (np.asarray(VALUE[name](outputs)) + shift)
    np.testing.assert_allclose(moved.value(jnp.asarray(outputs)), value, rtol=1e-5, atol=1e-5 * scale)


# ---- numbers stay numbers -------------------------------------------------------------------------------


@every_categorical
@pytest.mark.parametrize("dtype", SAMPLES_BF16)
@law
@given(batch(elements=any_float32), discounts, logits((BATCH, SIZE)), logits((BATCH, SIZE)))
def test_categorical_heads_are_finite_for_any_finite_input(
    name: str,
    dtype: type,
    reward: np.ndarray,
    discount: np.ndarray,
    outputs: np.ndarray,
    following: np.ndarray,
) -> None:
    outputs, following = (x.astype(jnp.dtype(dtype)) for x in (outputs, following))
    target = TARGET[name](reward, discount, following)
    loss, gradient = loss_and_gradient(name, outputs, target)
    arrays = (np.asarray(x, np.float32) for x in (VALUE[name](outputs), target, loss, gradient))
    value, target, loss, gradient = arrays
    assert all(np.isfinite(x).all() for x in (value, target, loss, gradient))
    assert (np.abs(gradient) <= 1.01).all()  # of a cross-entropy: at most 1 for each logit
    assert (loss >= -1e-2).all()  # 0, but for the rounding of 1e4 * 1e-7


@pytest.mark.parametrize("name", ["scalar", "quantile"])
@law
@given(batch(elements=any_float32), discounts, logits((BATCH, SIZE)), logits((BATCH, SIZE)))
def test_heads_without_support_are_never_nan(
    name: str, reward: np.ndarray, discount: np.ndarray, outputs: np.ndarray, following: np.ndarray
) -> None:
    """Their loss grows with the error and may overflow to infinity, beyond 1e18, but it is never NaN."""
    outputs, following = outputs[:, : HEADS[name].size], following[:, : HEADS[name].size]
    target = TARGET[name](reward, discount, following)
    loss, gradient = map(np.asarray, loss_and_gradient(name, outputs, target))
    assert not any(np.isnan(x).any() for x in (target, loss, gradient))
    moderate = np.abs(reward) < 1e18
    assert np.isfinite(loss[moderate]).all() and np.isfinite(gradient[moderate]).all()
    if name == "quantile":  # Huber: the gradient is bounded whatever the error
        assert (np.abs(gradient) <= 1).all()


@every_head
@pytest.mark.parametrize("edge", [3.4e38, -3.4e38])
def test_the_largest_floats(name: str, edge: float) -> None:
    """Hypothesis seldom draws them, and 1.7e38 doubled is what used to be NaN in the quantile loss."""
    nothing, outputs = np.zeros(BATCH, np.float32), np.zeros((BATCH, HEADS[name].size), np.float32)
    target = TARGET[name](np.full(BATCH, edge, np.float32), nothing, outputs)
    loss, gradient = loss_and_gradient(name, outputs, target)
    assert not any(np.isnan(x).any() for x in (target, loss, gradient))


@every_head
def test_float32_whatever_comes_in(name: str) -> None:
    """bfloat16 in, float32 out, and the digits of the same numbers given as float32."""
    head = HEADS[name]
    bfloat16 = jnp.dtype(jnp.bfloat16)
    outputs, following = normal(3, 2, BATCH, head.size).astype(bfloat16)
    reward, discount = np.full(BATCH, 0.3, bfloat16), np.full(BATCH, 0.9, bfloat16)

    def everything(*inputs: jax.Array) -> list[jax.Array]:
        reward, discount, outputs, following = inputs
        target = head.target(reward, discount, following)
        mixture = head.mix(jnp.stack([outputs, following], 1), jnp.full((BATCH, 2), 0.5))
        return [head.value(outputs), target, head.loss(outputs, target), mixture]

    everything = jax.jit(everything)
    low = everything(reward, discount, outputs, following)
    high = everything(*(x.astype(np.float32) for x in (reward, discount, outputs, following)))
    for ours, expected in zip(low, high, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, expected)


@every_head
def test_no_matrix_product_that_an_accelerator_would_round(name: str) -> None:
    """float32 products run in bfloat16 on a TPU unless told otherwise: values would lose 16 bits there."""
    head, x = HEADS[name], jnp.zeros((BATCH, HEADS[name].size))

    def everything(x: jax.Array) -> tuple[jax.Array, ...]:
        target = head.target(x[:, 0], x[:, 0], x)
        gradient = jax.grad(lambda x: head.value(x).sum())(x)
        return head.value(x), gradient, head.loss(x, target), head.mix(x[:, None], jnp.ones((BATCH, 1)))

    program = str(jax.make_jaxpr(everything)(x))
    exact = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert program.count("dot_general[") == program.count(exact)


# ---- no gradient through targets, shapes, batching ------------------------------------------------------


@every_head
def test_no_gradient_through_the_target(name: str) -> None:
    head = HEADS[name]
    outputs, following = normal(4, 2, BATCH, head.size)
    reward, discount = evenly(-1, 1, BATCH), np.full(BATCH, 0.9, np.float32)

    @jax.jit
    def gradients(outputs: jax.Array, *backup: jax.Array) -> tuple:
        def objective(outputs: jax.Array, *backup: jax.Array) -> jax.Array:
            return head.loss(outputs, head.target(*backup)).sum()

        of_target = jax.grad(lambda *backup: (head.target(*backup) ** 2).sum(), argnums=(0, 1, 2))
        of_loss = jax.grad(lambda y: head.loss(outputs, y).sum())
        both = jax.grad(objective, argnums=(0, 1, 2, 3))(outputs, *backup)
        return both, of_target(*backup), of_loss(head.target(*backup))

    (to_outputs, *others), of_target, of_loss = gradients(outputs, reward, discount, following)
    assert np.abs(to_outputs).max() > 1e-3
    # Each half alone stops it too: a target, whatever it is used for, and a loss, whatever made its target.
    for gradient in (*others, *of_target, of_loss):
        np.testing.assert_array_equal(gradient, 0)


def wrong_shapes(head: heads.ValueHead) -> dict[str, Callable[[], jax.Array]]:
    zeros = partial(np.zeros, dtype=np.float32)
    flat, column, outputs, members = zeros(4), zeros((4, 1)), zeros((4, head.size)), zeros((4, 3, head.size))
    target = zeros(jax.eval_shape(head.target, flat, flat, outputs).shape)
    return {
        "reward [B, 1]": lambda: head.target(column, flat, outputs),
        "discount [B, 1]": lambda: head.target(flat, column, outputs),
        "reward and discount [B, 1]": lambda: head.target(column, column, outputs),
        "discount []": lambda: head.target(flat, zeros(()), outputs),
        "next outputs [B, 1, K]": lambda: head.target(flat, flat, outputs[:, None]),
        "next outputs [K]": lambda: head.target(flat, flat, outputs[0]),
        "next outputs of another K": lambda: head.target(flat, flat, zeros((4, head.size + 1))),
        "value of another K": lambda: head.value(zeros((4, head.size + 1))),
        "loss of another K": lambda: head.loss(zeros((4, head.size + 1)), target),
        "target with an axis too many": lambda: head.loss(outputs, target[..., None]),
        "target of another batch": lambda: head.loss(outputs, target[:1]),
        "outputs [B, 1, K]": lambda: head.loss(outputs[:, None], target),
        "mix of another K": lambda: head.mix(zeros((4, 3, head.size + 1)), zeros((4, 3))),
        "weights [N]": lambda: head.mix(members, zeros(3)),
        "weights [B, N, 1]": lambda: head.mix(members, zeros((4, 3, 1))),
        "weights [B, 1]": lambda: head.mix(members, column),
    }


@every_head
@pytest.mark.parametrize("case", wrong_shapes(HEADS["scalar"]))
def test_wrong_shapes_are_refused(name: str, case: str) -> None:
    with pytest.raises(AssertionError, match="Chex"):
        wrong_shapes(HEADS[name])[case]()


@every_head
def test_a_batch_is_its_elements_and_jit_changes_nothing(name: str) -> None:
    head = HEADS[name]
    rng = np.random.default_rng(5)
    outputs, following = jnp.asarray(3 * rng.normal(size=(2, 3, BATCH, head.size)), jnp.float32)
    reward, discount = jnp.asarray(rng.normal(size=(2, 3, BATCH)), jnp.float32)

    def everything(reward: jax.Array, discount: jax.Array, outputs: jax.Array, following: jax.Array) -> tuple:
        target = head.target(reward, discount, following)
        both = jnp.stack([outputs, following], -2)
        mixture = head.mix(both, jnp.broadcast_to(jnp.array([0.3, 0.7]), (*reward.shape, 2)))
        return head.value(outputs), target, head.loss(outputs, target), mixture

    inputs = (reward, discount, outputs, following)
    together = everything(*inputs)
    for other in (jax.jit(everything)(*inputs), jax.jit(jax.vmap(jax.vmap(everything)))(*inputs)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), other, together)


# ---- where untrained networks start ----------------------------------------------------------------------


@every_categorical
def test_a_start_is_what_outputs_of_zero_stand_for_and_nothing_else_changes(name: str) -> None:
    """A head with a start is the same head of shifted outputs, in all that it does and that is done with it."""
    starts = np.array([LOW, -3.3, 0.0, HIGH])
    outputs, following = 3 * normal(6, 2, BATCH, SIZE)
    reward, discount, shares = evenly(-1, 1, BATCH), np.full(BATCH, 0.9, np.float32), np.array([0.3, 0.7])

    def everything(head: heads.ValueHead, shift: jax.Array) -> tuple:
        here, there = outputs + shift, following + shift
        target = head.target(reward, discount, there)
        mixture = head.mix(jnp.stack([here, there], 1), jnp.broadcast_to(shares, (BATCH, 2)))
        return (
            *(head.value(here), target, head.loss(here, target), head.clipped(reward, discount, there)),
            *(head.value(mixture), head.loss(mixture, target)),
            *(heads.same_distribution(head, there), heads.same_target(head, there)),
            *(heads.divergence(head, here, target), heads.dominance(head, here, there)),
        )

    started = [heads.make(name, LOW, HIGH, SIZE, start) for start in starts]

    @jax.jit
    def program() -> list:
        rows, plain = [], HEADS[name]
        for start, shifted in zip(starts, started, strict=True):
            label = heads.scalar_target(plain, jnp.float32(start))
            shift = jnp.log(0.9 * label + 0.1 / SIZE)
            at_zero = shifted.value(jnp.zeros(SIZE)), shifted.probabilities(jnp.zeros(SIZE)).min()
            rows.append((at_zero, everything(shifted, jnp.zeros(SIZE)), everything(plain, shift)))
        return rows

    for start, ((value, least), ours, expected) in zip(starts, program(), strict=True):
        np.testing.assert_allclose(value, 0.9 * start, atol=0.01)  # the support's middle is 0
        np.testing.assert_allclose(least, 0.1 / SIZE, rtol=0.01)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, expected)


def test_a_start_outside_the_support_or_without_one_is_refused() -> None:
    for start in (-10.5, 11.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"must lie in the head's support"):
            heads.make("hl_gauss", LOW, HIGH, SIZE, start)
    for name in ("scalar", "quantile"):
        with pytest.raises(ValueError, match="begin near 0 by themselves"):
            heads.make(name, LOW, HIGH, SIZE, 1.0)


# ---- constructors ---------------------------------------------------------------------------------------


@every_head
def test_make_knows_every_name(name: str) -> None:
    head = heads.make(name, -3.0, 4.0, 33)
    assert head.size == (1 if name == "scalar" else 33)
    assert head.are_values == (name in heads.UNBOUNDED)
    y = np.float32([-3.0, 0.5, 4.0])
    np.testing.assert_allclose(round_trip(name, head)(y), y, atol=1e-4)
    assert heads.check(head) is head and head.about.startswith(name)
    wide = heads.make(
        name, -3.0, 4.0, 33, sigma_ratio=2.0
    )  # said where it is of the head, and not the default
    assert (wide.about == f"{head.about}, sigma 2 bins") if name == "hl_gauss" else (wide.about == head.about)
    if heads.has_support(name):
        with pytest.raises(ValueError, match=f"{name} needs low and high"):
            heads.make(name)
    else:
        assert heads.make(name).size >= 1  # the defaults are usable


def test_a_head_of_ones_own_is_checked() -> None:
    """Outputs of the example are neither values nor logits, so that no formula here says how far apart two of them are.

    Each broken member would train on without an error: on a mean over a wrong axis, on targets that move with what is
    learned, or on priorities that are no numbers.
    """
    own = heads.make("docs.example_head.gaussian")
    assert own.size == 2 and not heads.has_support("docs.example_head.gaussian")
    outputs = jax.random.normal(jax.random.key(1), (BATCH, 2))
    same = heads.divergence(own, outputs, heads.same_target(own, outputs))
    np.testing.assert_allclose(same, 0.0, atol=1e-6)
    for ask, member in ((heads.divergence, "divergence"), (heads.dominance, "dominance")):
        with pytest.raises(
            ValueError, match=f"asks for the head's {member}, .* give the ValueHead a member {member}"
        ):
            ask(own._replace(divergence=None), outputs, outputs)
    broken = {
        "value must return": {"value": lambda o: o[..., :1]},
        "loss must return": {"loss": lambda o, t: own.loss(o, t)[..., None]},
        "loss must be finite and at least 0": {"loss": lambda o, t: own.loss(o, t) - 100.0},
        "weighted mean of the values": {"mix": lambda o, w: o[..., 0, :]},
        "target must carry no gradient": {
            "target": lambda r, d, o: jnp.stack([r + d * o[..., 0], r + 1.0], -1)
        },
        "clipped must return": {"clipped": lambda r, d, o: jnp.zeros(r.shape, int)},
        "clipped must be a share": {"clipped": lambda r, d, o: jnp.full(r.shape, 5.0)},
        "mix of more axes must return": {"mix": lambda o, w: (o * w[..., None]).sum(1)},
        "size must be a whole number of outputs, not 2.0": {"size": 2.0},
        "divergence must be": {"divergence": lambda o, t: own.loss(o, t) - 100.0},
        "mix of outputs of several hundreds must be finite": {"mix": lambda o, w: jnp.log(jnp.exp(own.mix(o, w)))},
        "target, as its outputs are logits, must": {
            "target": lambda r, d, o: r, "loss": lambda o, t: jnp.square(o[..., 0] - t),
            "probabilities": lambda o: jax.nn.softmax(o, -1),
        },
        "target, as its outputs are logits, must sum to 1": {
            "target": lambda r, d, o: jax.lax.stop_gradient(2 * jax.nn.softmax(o, -1)),
            "probabilities": lambda o: jax.nn.softmax(o, -1),
        },
    }  # fmt: skip
    for message, members in broken.items():
        with pytest.raises(ValueError, match=message):
            heads.check(own._replace(**members))
    with jax.enable_x64(True):  # arrays that a head makes itself are float32, too
        heads.make("docs.example_head.gaussian")
        for name in heads.NAMES:
            reward, outputs = np.ones(2), np.ones((2, 33))[:, : 1 if name == "scalar" else 33]
            assert heads.make(name, 0, 1, 33).target(reward, reward, outputs).dtype == np.float32
    with pytest.raises(ValueError, match=r"docs\.example_head has no function 'nothing'"):
        heads.make("docs.example_head.nothing")
    with pytest.raises(ValueError, match=r"is a module: name its function, docs\.example_head\.FUNCTION"):
        heads.make("docs.example_head")
    missing = r"^value head 'docs\.no_such_module\.head': .* No module named 'docs\.no_such_module'"
    with pytest.raises(ImportError, match=missing):
        heads.make("docs.no_such_module.head")


def nothing(low: float, high: float, size: int) -> None:
    """A head whose return was forgotten."""


def unbounded(size: int) -> None:
    """A head that takes its size alone."""


def test_what_is_no_head_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^head 'test_heads.unbounded' must be a function \(low, high, size\): too"
    ):
        heads.make("test_heads.unbounded", 0.0, 1.0)
    with pytest.raises(ValueError, match=r"^head 'test_heads.nothing': a head must be .*ValueHead, not None"):
        heads.make("test_heads.nothing", 0.0, 1.0)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'hlgauss'.*scalar, two_hot, hl_gauss, c51, quantile"):
        heads.make("hlgauss")


@every_categorical
@pytest.mark.parametrize(
    ("low", "high"), [(1, 1), (1, 0), (np.nan, 1), (0, np.nan), (-np.inf, 0), (0, np.inf), (0, 1e39)]
)
def test_empty_and_infinite_supports_are_refused(name: str, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="finite low < high"):
        heads.make(name, low, high)


@every_categorical
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0 + 1e-9), (1e6, 1e6 + 1), (0, 1e-37)])
def test_supports_that_float32_cannot_resolve_are_refused(name: str, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="float32 cannot tell"):
        heads.make(name, low, high)


@pytest.mark.parametrize(("name", "least"), [("two_hot", 2), ("c51", 2), ("hl_gauss", 8), ("quantile", 1)])
def test_the_least_size(name: str, least: int) -> None:
    assert heads.make(name, 0, 1, least).size == least
    with pytest.raises(ValueError, match="size"):
        heads.make(name, 0, 1, least - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: heads.hl_gauss(0, 1, sigma_ratio=0.49), "sigma_ratio 0.49"),
        (lambda: heads.hl_gauss(0, 1, sigma_ratio=np.nan, padding=3), "sigma_ratio nan"),
        (lambda: heads.hl_gauss(0, 1, sigma_ratio=np.inf, padding=3), "sigma_ratio inf must be finite"),
        (lambda: heads.hl_gauss(0, 1, padding=-1), "padding >= 0"),
        (lambda: heads.hl_gauss(0, 1, size=20, padding=10), "raise its size"),
        (lambda: heads.quantile(11, kappa=0), "a finite kappa >= 1e-6"),
        (lambda: heads.quantile(11, kappa=np.nan), "a finite kappa >= 1e-6"),
        (lambda: heads.quantile(11, kappa=np.inf), "a finite kappa >= 1e-6"),
    ],
)
def test_bad_parameters_are_refused(make: Callable[[], heads.ValueHead], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- stochastic dominance -------------------------------------------------------------------------------


@every_head
def test_dominance_is_the_area_where_one_cumulative_distribution_exceeds_the_other(name: str) -> None:
    """By a sum over a fine grid of values, in steps of the support or, without one, in units of value."""
    rng = np.random.default_rng(0)
    outputs = rng.normal(0, 3, (2, 5, HEADS[name].size)).astype(np.float32)
    if name in CATEGORICAL:
        step = step_of(name, LOW, HIGH, SIZE)
        mass = special.softmax(np.float64(outputs), -1)
        where = step * (np.arange(SIZE) + 0.5)  # of atoms; the areas do not depend on where they begin
        where = np.broadcast_to(where, mass.shape)
    else:
        step, where = 1.0, np.sort(np.float64(outputs), -1)
        mass = np.full(where.shape, 1 / where.shape[-1])
    grid = np.linspace(where.min() - 1e-3, where.max() + step, 4001)
    below, above = (  # F at every value of the grid
        np.array([[m[w <= x].sum() for x in grid] for m, w in zip(*of_one, strict=True)])
        for of_one in zip(mass[:, :2], where[:, :2], strict=True)
    )
    expected = np.maximum(below - above, 0).sum(-1) * (grid[1] - grid[0]) / step
    areas = np.asarray(jax.jit(partial(heads.dominance, HEADS[name]))(*outputs))
    np.testing.assert_allclose(areas[:2], expected, rtol=1e-2, atol=2e-2)
    assert (areas > 0).any()


@every_head
def test_what_is_moved_up_dominates_and_what_is_equal_does(name: str) -> None:
    head = HEADS[name]
    outputs = np.random.default_rng(0).normal(size=(5, head.size)).astype(np.float32)
    higher = outputs + (np.linspace(0, 4, head.size, dtype=np.float32) if name in CATEGORICAL else 0.5)
    dominance = jax.jit(partial(heads.dominance, head))
    assert not np.any(dominance(outputs, outputs))
    np.testing.assert_allclose(dominance(higher, outputs), 0.0, atol=2e-6)
    assert (np.asarray(dominance(outputs, higher)) > 0.1).all()
