"""rl.values.bellman against rlax, enumeration and literal loops in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl.values import bellman, heads

pytestmark = pytest.mark.slow

SIZE, BATCH, ACTIONS, MEMBERS = 21, 5, 4, 3
HEADS = {name: heads.make(name, -10, 10, SIZE) for name in heads.NAMES}
SCALAR = HEADS["scalar"]

every_head = pytest.mark.parametrize("name", heads.NAMES)
law = settings(deadline=None, max_examples=40, derandomize=True)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ---- over actions ---------------------------------------------------------------------------------------


def test_at_action_is_a_lookup() -> None:
    outputs, action = (
        normal(0, 2, BATCH, ACTIONS, SIZE),
        np.random.default_rng(0).integers(ACTIONS, size=(2, BATCH)),
    )
    chosen = bellman.at_action(outputs, jnp.asarray(action))
    for i, j in np.ndindex(2, BATCH):
        np.testing.assert_array_equal(chosen[i, j], outputs[i, j, action[i, j]])
    np.testing.assert_array_equal(bellman.at_action(outputs[0, 0], jnp.asarray(2)), outputs[0, 0, 2])


def test_an_action_that_does_not_exist_is_loud() -> None:
    outputs = normal(0, 1, ACTIONS, 1)
    assert jnp.isnan(bellman.at_action(outputs, jnp.array([ACTIONS]))).all()
    with pytest.raises(TypeError, match="integer"):
        bellman.at_action(outputs, jnp.array([1.0]))


@every_head
def test_max_action_takes_the_whole_outputs_of_the_best_action(name: str) -> None:
    head = HEADS[name]
    outputs = normal(1, BATCH, ACTIONS, head.size)
    best = np.asarray(head.value(outputs)).argmax(-1)
    assert len(set(best)) > 1, "the test needs different best actions"
    np.testing.assert_array_equal(
        bellman.max_action(head, outputs), np.asarray(outputs)[np.arange(BATCH), best]
    )


def test_q_learning_agrees_with_rlax() -> None:
    """Max and double backups with the scalar, c51 and quantile heads: rlax's own six functions."""
    now, following, selector = normal(2, 3, BATCH, ACTIONS, SIZE)
    reward, discount = normal(3, BATCH), jnp.linspace(0, 1, BATCH)
    action = jnp.arange(BATCH) % ACTIONS
    levels = (jnp.arange(SIZE) + 0.5) / SIZE
    atoms = jnp.linspace(-10, 10, SIZE)

    def ours(name: str, backed_up: jax.Array) -> jax.Array:
        head = HEADS[name]
        outputs = bellman.at_action(now[..., : head.size], action)
        return head.loss(outputs, head.target(reward, discount, backed_up))

    def over_batch(f: Callable, *arguments: jax.Array) -> jax.Array:
        return jax.jit(jax.vmap(f))(*arguments)

    q = over_batch(rlax.q_learning, now[..., 0], action, reward, discount, following[..., 0])
    np.testing.assert_allclose(
        ours("scalar", bellman.max_action(SCALAR, following[..., :1])), q**2, rtol=1e-5
    )
    q = over_batch(
        rlax.double_q_learning, now[..., 0], action, reward, discount, following[..., 0], selector[..., 0]
    )
    picked = bellman.double_q(SCALAR, following[..., :1], selector[..., :1])
    np.testing.assert_allclose(ours("scalar", picked), q**2, rtol=1e-5)

    head = HEADS["c51"]
    expected = over_batch(
        lambda q, a, r, d, q_next: rlax.categorical_q_learning(atoms, q, a, r, d, atoms, q_next),
        now, action, reward, discount, following,
    )  # fmt: skip
    np.testing.assert_allclose(ours("c51", bellman.max_action(head, following)), expected, rtol=1e-5)
    expected = over_batch(
        lambda q, a, r, d, q_next, s: rlax.categorical_double_q_learning(
            atoms, q, a, r, d, atoms, q_next, jax.nn.softmax(s) @ atoms
        ),
        now, action, reward, discount, following, selector,
    )  # fmt: skip
    np.testing.assert_allclose(ours("c51", bellman.double_q(head, following, selector)), expected, rtol=1e-5)

    head = HEADS["quantile"]
    for chooser, backed_up in [
        (following, bellman.max_action(head, following)),
        (selector, bellman.double_q(head, following, selector)),
    ]:
        expected = over_batch(
            lambda q, a, r, d, s, q_next: rlax.quantile_q_learning(q.T, levels, a, r, d, s.T, q_next.T, 1.0),
            now, action, reward, discount, chooser, following,
        )  # fmt: skip
        np.testing.assert_allclose(ours("quantile", backed_up), expected, rtol=1e-5)


SOFT = {name: jax.jit(partial(bellman.soft_max_action, head)) for name, head in HEADS.items()}


@every_head
@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_soft_backup_is_the_soft_maximum(name: str, temperature: float) -> None:
    head, outputs = HEADS[name], normal(4, BATCH, ACTIONS, HEADS[name].size)
    mixture, bonus = SOFT[name](outputs, temperature)
    q = np.float64(head.value(outputs)) / temperature
    soft = temperature * np.log(np.exp(q - q.max()).sum(-1)) + temperature * q.max()
    np.testing.assert_allclose(head.value(mixture) + bonus, soft, rtol=1e-5, atol=1e-4)
    policy = np.exp(q) / np.exp(q).sum(-1, keepdims=True)
    np.testing.assert_allclose(bonus, temperature * stats.entropy(policy, axis=-1), rtol=1e-4, atol=1e-5)


def test_soft_advantages_are_log_probabilities_and_keep_differences() -> None:
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    for temperature in (1e-4, 0.3, 10.0):
        advantage = bellman.soft_advantage(outputs, temperature)
        np.testing.assert_allclose(jnp.exp(advantage / temperature).sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(
            jnp.diff(advantage), jnp.diff(outputs), rtol=1e-5, atol=1e-6 * max(1, temperature)
        )
    bins = jnp.asarray([0, 3, 1, 2, 2])
    np.testing.assert_array_equal(bellman.of_bins(outputs, bins), outputs[jnp.arange(5), bins])
    members = jnp.stack([outputs, -outputs])
    np.testing.assert_array_equal(bellman.of_bins(members, bins), members[:, jnp.arange(5), bins])


def test_soft_backup_between_its_limits() -> None:
    q = jnp.array([[1.0, 3.0, 2.0], [-1e4, 1e4, 0.0], [7.0, 7.0, 7.0]])
    cold, bonus = bellman.soft_max_action(SCALAR, q[..., None], 1e-3)
    np.testing.assert_allclose(cold[:, 0] + bonus, [3, 1e4, 7 + 1e-3 * np.log(3)], rtol=1e-6)
    hot, bonus = bellman.soft_max_action(SCALAR, q[..., None], 1e9)
    np.testing.assert_allclose(hot[:, 0], q.mean(-1), rtol=1e-4, atol=0.1)
    np.testing.assert_allclose(bonus, 1e9 * np.log(3), rtol=1e-6)


def test_smoothing_noise_is_a_clipped_normal() -> None:
    action = jnp.full((20_000, 2), 0.1)
    noise, clip = 0.2, 0.3
    disturbance = np.asarray(bellman.smooth_action(action, jax.random.key(0), noise, clip)) - 0.1
    assert np.abs(disturbance).max() <= clip + 1e-6
    at_the_clip = (np.abs(disturbance) > clip - 1e-6).mean()
    np.testing.assert_allclose(at_the_clip, 2 * stats.norm.sf(clip / noise), atol=0.008)
    free = disturbance[np.abs(disturbance) < clip - 1e-6]
    assert stats.kstest(free, stats.truncnorm(-clip / noise, clip / noise, scale=noise).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(disturbance.T)[0, 1]) < 0.03  # dimensions get noise of their own


def test_smoothed_actions_stay_in_the_box() -> None:
    action = jnp.array([[-1.0, 1.0, 0.5]] * 100)
    smooth = bellman.smooth_action(action, jax.random.key(1), 5.0, 3.0)
    assert jnp.abs(smooth).max() == 1.0
    np.testing.assert_array_equal(bellman.smooth_action(action, jax.random.key(1), 0.0, 0.5), action)


# ---- over ensemble members ------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("members", [1, 5])
def test_min_member_takes_the_whole_outputs_of_the_lowest_member(name: str, members: int) -> None:
    head, outputs = HEADS[name], normal(5, members, 2, BATCH, HEADS[name].size)
    lowest = np.asarray(head.value(outputs)).argmin(0)
    picked = bellman.min_member(head, outputs)
    for i, j in np.ndindex(2, BATCH):
        np.testing.assert_array_equal(picked[i, j], outputs[lowest[i, j], i, j])
    np.testing.assert_allclose(head.value(picked), head.value(outputs).min(0), rtol=1e-6)


@every_head
def test_mean_member_is_the_equal_mixture(name: str) -> None:
    head, outputs = HEADS[name], normal(6, MEMBERS, BATCH, HEADS[name].size)
    mean = bellman.mean_member(head, outputs)
    np.testing.assert_allclose(head.value(mean), head.value(outputs).mean(0), rtol=1e-5, atol=1e-5)
    if name in ("two_hot", "hl_gauss", "c51"):  # probabilities are averaged, not logits
        np.testing.assert_allclose(jax.nn.softmax(mean), jax.nn.softmax(outputs).mean(0), atol=1e-6)


def test_subsets_are_drawn_evenly_and_once_for_the_whole_batch() -> None:
    """REDQ by enumeration: the members' values say which two of five were drawn."""
    values = jnp.asarray([[1.0, 5.0], [2.0, 4.0], [3.0, 3.0], [4.0, 2.0], [5.0, 1.0]])  # [E, B], two orders
    draw = jax.jit(jax.vmap(lambda k: bellman.subset_min_member(SCALAR, values[..., None], k, 2)[..., 0]))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    pairs = list(itertools.combinations(range(5), 2))
    # Members i < j have minima i + 1 in the first column and 5 - j in the second: a pair has one name.
    counts = [((drawn[:, 0] == i + 1) & (drawn[:, 1] == 5 - j)).sum() for i, j in pairs]
    assert sum(counts) == 2000
    assert stats.chisquare(counts).pvalue > 1e-3


@every_head
def test_all_members_or_one(name: str) -> None:
    head, outputs, key = HEADS[name], normal(7, MEMBERS, BATCH, HEADS[name].size), jax.random.key(1)
    everyone = bellman.subset_min_member(head, outputs, key, MEMBERS)
    np.testing.assert_array_equal(everyone, bellman.min_member(head, outputs))
    alone = bellman.subset_min_member(head, outputs, key, 1)
    assert sum(bool((alone == member).all()) for member in outputs) == 1


@pytest.mark.parametrize("subset", [0, -1, MEMBERS + 1])
def test_impossible_subsets_are_refused(subset: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {subset} of {MEMBERS} ensemble members"):
        bellman.subset_min_member(SCALAR, jnp.zeros((MEMBERS, BATCH, 1)), jax.random.key(0), subset)


# ---- over time ------------------------------------------------------------------------------------------


def trajectory(seed: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    discount = 0.9 * (rng.random(length) > 0.2)  # terminates now and then
    return rng.normal(size=length), discount, rng.normal(size=length)


N_STEP = jax.jit(bellman.n_step, static_argnums=2)


@law
@given(seed=st.integers(0, 1000), length=st.sampled_from([1, 7]), n=st.sampled_from([1, 3, 7, 10]))
def test_n_step_is_the_literal_sum(seed: int, length: int, n: int) -> None:
    reward, discount, _ = trajectory(seed, length)
    returns, discounts, steps = map(np.asarray, N_STEP(reward, discount, n))
    assert steps.dtype == np.int32
    for t in range(length):
        total, product, taken = 0.0, 1.0, 0
        while taken < n and t + taken < length:
            total += product * reward[t + taken]
            product *= discount[t + taken]
            taken += 1
        np.testing.assert_allclose([returns[t], discounts[t], steps[t]], [total, product, taken], atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 9, 12])
def test_n_step_returns_agree_with_rlax(n: int) -> None:
    reward, discount, next_value = (jnp.asarray(x, jnp.float32) for x in trajectory(0, 9))
    returns, discounts, steps = bellman.n_step(reward, discount, n)
    bootstrap = next_value[jnp.arange(9) + steps - 1]
    expected = rlax.n_step_bootstrapped_returns(reward, discount, next_value, n)
    np.testing.assert_allclose(returns + discounts * bootstrap, expected, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_lambda_returns_agree_with_rlax_and_with_the_mixture_of_n_step_returns(lambda_: float) -> None:
    length = 9
    reward, discount, next_value = trajectory(3, length)
    ours = bellman.lambda_return(
        *(jnp.asarray(x, jnp.float32) for x in (reward, discount, next_value)), lambda_
    )
    expected = rlax.lambda_returns(
        *(jnp.asarray(x, jnp.float32) for x in (reward, discount, next_value)), lambda_
    )
    np.testing.assert_allclose(ours, expected, atol=1e-5)

    # Sutton & Barto, equation 12.3: (1 - lambda) sum_n lambda^(n-1) G_n, all that is left on the last.
    for t in range(length):
        left = length - t
        forward = 0.0
        for n in range(1, left + 1):
            weights = np.cumprod(np.concatenate([[1.0], discount[t : t + n]]))
            g = weights[:n] @ reward[t : t + n] + weights[n] * next_value[t + n - 1]
            forward += g * (lambda_ ** (left - 1) if n == left else (1 - lambda_) * lambda_ ** (n - 1))
        np.testing.assert_allclose(ours[t], forward, atol=1e-5)


def test_lambda_return_carries_no_gradient() -> None:
    inputs = tuple(jnp.asarray(x, jnp.float32) for x in trajectory(1, 6))
    for gradient in jax.grad(lambda *x: bellman.lambda_return(*x, 0.9).sum(), argnums=(0, 1, 2))(*inputs):
        np.testing.assert_array_equal(gradient, 0)


def test_time_is_summed_in_float32() -> None:
    """300 rewards of 0.1 in bfloat16 would stop at 32: its neighbour is 32.25."""
    reward, discount = jnp.full(300, 0.1, jnp.bfloat16), jnp.ones(300, jnp.bfloat16)
    returns, discounts, _ = bellman.n_step(reward, discount, 300)
    assert returns.dtype == discounts.dtype == jnp.float32
    np.testing.assert_allclose(returns[0], 300 * float(reward[0]), rtol=1e-5)
    returns = bellman.lambda_return(reward.astype(jnp.float32), discount, jnp.zeros(300, jnp.bfloat16), 1.0)
    assert returns.dtype == jnp.float32
    np.testing.assert_allclose(returns[0], 300 * float(reward[0]), rtol=1e-5)


@every_head
def test_a_lambda_return_is_a_target_of_every_head(name: str) -> None:
    head = HEADS[name]
    returns = bellman.lambda_return(*(jnp.asarray(x, jnp.float32) for x in trajectory(2, 8)), 0.9)
    target = heads.scalar_target(head, returns)
    outputs = target[:, None] if name == "scalar" else target if name == "quantile" else jnp.log(target)
    np.testing.assert_allclose(head.value(outputs), returns, atol=3e-4)


# ---- composition, shapes, batching ----------------------------------------------------------------------


@every_head
def test_backups_compose_and_carry_no_gradient(name: str) -> None:
    """n steps of clipped double Q, soft over actions: nothing flows into the networks that are backed up."""
    head = HEADS[name]
    outputs, slow = normal(8, 6, head.size), normal(9, MEMBERS, 6, ACTIONS, head.size)

    def objective(slow: jax.Array, outputs: jax.Array) -> jax.Array:
        returns, discounts, steps = bellman.n_step(jnp.ones(6), jnp.full(6, 0.9), 3)
        mixture, bonus = bellman.soft_max_action(head, bellman.min_member(head, slow), 0.5)
        there = jnp.arange(6) + steps - 1
        target = head.target(returns + discounts * bonus[there], discounts, mixture[there])
        return head.loss(outputs, target).sum()

    gradient, own = jax.jit(jax.grad(objective, argnums=(0, 1)))(slow, outputs)
    np.testing.assert_array_equal(gradient, 0)
    assert jnp.abs(own).max() > 1e-3


@pytest.mark.parametrize("name", ["c51", "quantile"])  # the two ways to mix
def test_a_batch_is_its_elements_and_jit_changes_nothing(name: str) -> None:
    head, key = HEADS[name], jax.random.key(2)
    by_action, by_member = normal(10, 2, BATCH, ACTIONS, head.size), normal(11, BATCH, MEMBERS, head.size)

    def everything(by_action: jax.Array, by_member: jax.Array) -> tuple:
        outputs, selector = by_action
        members = jnp.moveaxis(by_member, -2, 0)
        return (
            bellman.max_action(head, outputs),
            bellman.double_q(head, outputs, selector),
            *bellman.soft_max_action(head, outputs, 0.7),
            bellman.min_member(head, members),
            bellman.mean_member(head, members),
            bellman.subset_min_member(head, members, key, 2),
        )

    together = everything(by_action, by_member)
    for other in (
        jax.jit(everything)(by_action, by_member),
        jax.jit(jax.vmap(everything, in_axes=(1, 0)))(by_action, by_member),
    ):
        for ours, expected in zip(other, together, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


FLAT, COLUMN, OUTPUTS = jnp.zeros(ACTIONS), jnp.zeros((ACTIONS, 1)), jnp.zeros((ACTIONS, ACTIONS, 1))
INTEGERS = jnp.zeros(ACTIONS, jnp.int32)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: bellman.at_action(OUTPUTS, INTEGERS[:, None]),
        lambda: bellman.at_action(OUTPUTS, INTEGERS[0]),
        lambda: bellman.max_action(SCALAR, OUTPUTS[..., 0, :].repeat(2, -1)),
        lambda: bellman.double_q(SCALAR, OUTPUTS, OUTPUTS[0]),
        lambda: bellman.double_q(SCALAR, OUTPUTS, OUTPUTS[:, :1]),
        lambda: bellman.soft_max_action(SCALAR, OUTPUTS, FLAT),  # would divide actions by it, not states
        lambda: bellman.soft_max_action(SCALAR, OUTPUTS, COLUMN),
        lambda: bellman.smooth_action(FLAT, jax.random.key(0), COLUMN, 0.5),
        lambda: bellman.smooth_action(FLAT, jax.random.key(0), 0.5, COLUMN),
        lambda: bellman.min_member(HEADS["c51"], OUTPUTS),
        lambda: bellman.mean_member(HEADS["c51"], OUTPUTS),
        lambda: bellman.n_step(COLUMN, COLUMN, 2),
        lambda: bellman.n_step(FLAT, COLUMN, 2),
        lambda: bellman.n_step(FLAT, FLAT[:2], 2),
        lambda: bellman.lambda_return(COLUMN, COLUMN, COLUMN, 0.9),
        lambda: bellman.lambda_return(FLAT, FLAT, COLUMN, 0.9),
        lambda: bellman.lambda_return(FLAT, FLAT, FLAT[:2], 0.9),
        lambda: bellman.lambda_return(FLAT, FLAT, FLAT, FLAT),
    ],
)
def test_wrong_shapes_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="Chex"):
        wrong()


@pytest.mark.parametrize("n", [0, -2])
def test_n_step_needs_a_step(n: int) -> None:
    with pytest.raises(ValueError, match=f"n >= 1, not {n}"):
        bellman.n_step(FLAT, FLAT, n)
