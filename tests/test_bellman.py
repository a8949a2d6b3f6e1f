"""rl.values.bellman against rlax, enumeration and literal loops in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import settings
from scipy import special, stats

from rl.values import bellman, heads

pytestmark = pytest.mark.slow

SIZE, BATCH, ACTIONS, MEMBERS = 21, 5, 4, 3
HEADS = {name: heads.make(name, -10, 10, SIZE) for name in heads.NAMES}
SCALAR = HEADS["scalar"]

every_head = pytest.mark.parametrize("name", heads.NAMES)
law = settings(deadline=None, max_examples=40, derandomize=True)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.float32(3 * np.random.default_rng(seed).normal(size=shape))


def compiled(function: Callable, *inputs: Any) -> Any:
    """What a function says of the inputs, in one program, as NumPy arrays."""
    return jax.device_get(jax.jit(function)(*inputs))


# ---- over actions ---------------------------------------------------------------------------------------


def test_at_action_is_a_lookup() -> None:
    outputs, action = (
        normal(0, 2, BATCH, ACTIONS, SIZE),
        np.random.default_rng(0).integers(ACTIONS, size=(2, BATCH)),
    )
    at_action = lambda outputs, action: (
        bellman.at_action(outputs, action),
        bellman.at_action(outputs[0, 0], jnp.asarray(2)),
    )
    chosen, alone = compiled(at_action, outputs, action)
    for i, j in np.ndindex(2, BATCH):
        np.testing.assert_array_equal(chosen[i, j], outputs[i, j, action[i, j]])
    np.testing.assert_array_equal(alone, outputs[0, 0, 2])


def test_an_action_that_does_not_exist_is_loud() -> None:
    outputs = normal(0, 1, ACTIONS, 1)
    assert np.isnan(compiled(bellman.at_action, outputs, np.array([ACTIONS]))).all()
    with pytest.raises(TypeError, match="integer"):
        bellman.at_action(outputs, jnp.array([1.0]))


@every_head
def test_max_action_takes_the_whole_outputs_of_the_best_action(name: str) -> None:
    head = HEADS[name]
    outputs = normal(1, BATCH, ACTIONS, head.size)
    value, chosen = compiled(lambda x: (head.value(x), bellman.max_action(head, x)), outputs)
    best = value.argmax(-1)
    assert len(set(best)) > 1, "the test needs different best actions"
    np.testing.assert_array_equal(chosen, outputs[np.arange(BATCH), best])


def test_q_learning_agrees_with_rlax() -> None:
    """Max and double backups with the scalar, c51 and quantile heads: rlax's own six functions."""
    inputs = (
        *normal(2, 3, BATCH, ACTIONS, SIZE),
        normal(3, BATCH),
        np.linspace(0, 1, BATCH, dtype=np.float32),
    )
    action = np.arange(BATCH) % ACTIONS
    levels = np.float32((np.arange(SIZE) + 0.5) / SIZE)
    atoms = np.linspace(-10, 10, SIZE, dtype=np.float32)

    def ours(now: jax.Array, following: jax.Array, selector: jax.Array, *backup: jax.Array) -> dict:
        losses = {}
        for name in ("scalar", "c51", "quantile"):
            head = HEADS[name]
            outputs = bellman.at_action(now[..., : head.size], action)
            slow, chooser = following[..., : head.size], selector[..., : head.size]
            for kind, backed_up in (
                ("max", bellman.max_action(head, slow)),
                ("double", bellman.double_q(head, slow, chooser)),
            ):
                losses[name, kind] = head.loss(outputs, head.target(*backup, backed_up))
        return losses

    @jax.vmap
    def theirs(q: Any, q_next: Any, s: Any, r: Any, d: Any, a: Any) -> dict:
        """Of one row; rlax knows neither batches nor our layout of quantiles."""
        quantile = lambda chooser: rlax.quantile_q_learning(q.T, levels, a, r, d, chooser.T, q_next.T, 1.0)
        double = rlax.double_q_learning(q[:, 0], a, r, d, q_next[:, 0], s[:, 0])
        return {
            ("scalar", "max"): jnp.square(rlax.q_learning(q[:, 0], a, r, d, q_next[:, 0])),
            ("scalar", "double"): jnp.square(double),
            ("c51", "max"): rlax.categorical_q_learning(atoms, q, a, r, d, atoms, q_next),
            ("c51", "double"): rlax.categorical_double_q_learning(
                atoms, q, a, r, d, atoms, q_next, jax.nn.softmax(s) @ atoms
            ),
            ("quantile", "max"): quantile(q_next),
            ("quantile", "double"): quantile(s),
        }

    actual, expected = compiled(ours, *inputs), compiled(theirs, *inputs, action)
    assert actual.keys() == expected.keys()
    for name, loss in actual.items():
        np.testing.assert_allclose(loss, expected[name], rtol=1e-5, err_msg=str(name))


@partial(jax.jit, static_argnums=0)
def soft_backup(name: str, outputs: jax.Array, temperature: float) -> tuple[jax.Array, ...]:
    """The values of the outputs and of their soft maximum, and its bonus."""
    mixture, bonus = bellman.soft_max_action(HEADS[name], outputs, temperature)
    return HEADS[name].value(outputs), HEADS[name].value(mixture), bonus


@every_head
@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_soft_backup_is_the_soft_maximum(name: str, temperature: float) -> None:
    outputs = normal(4, BATCH, ACTIONS, HEADS[name].size)
    values, mixture, bonus = map(np.asarray, soft_backup(name, outputs, temperature))
    q = np.float64(values) / temperature
    soft = temperature * np.log(np.exp(q - q.max()).sum(-1)) + temperature * q.max()
    np.testing.assert_allclose(mixture + bonus, soft, rtol=1e-5, atol=1e-4)
    policy = np.exp(q) / np.exp(q).sum(-1, keepdims=True)
    np.testing.assert_allclose(bonus, temperature * stats.entropy(policy, axis=-1), rtol=1e-4, atol=1e-5)


def test_soft_advantages_are_log_probabilities_and_keep_differences() -> None:
    outputs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    soft_advantage = jax.jit(bellman.soft_advantage)
    for temperature in (1e-4, 0.3, 10.0):
        advantage = np.asarray(soft_advantage(outputs, temperature))
        np.testing.assert_allclose(np.exp(advantage / np.float32(temperature)).sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(
            np.diff(advantage), np.diff(outputs), rtol=1e-5, atol=1e-6 * max(1, temperature)
        )
    bins = np.array([0, 3, 1, 2, 2])
    members = np.stack([outputs, -outputs])
    alone, together = compiled(
        lambda *x: [bellman.of_bins(of_one, x[2]) for of_one in x[:2]], outputs, members, bins
    )
    np.testing.assert_array_equal(alone, outputs[np.arange(5), bins])
    np.testing.assert_array_equal(together, members[:, np.arange(5), bins])


def test_soft_backup_between_its_limits() -> None:
    q = np.float32([[1, 3, 2], [-1e4, 1e4, 0], [7, 7, 7]])
    _, cold, bonus = map(np.asarray, soft_backup("scalar", q[..., None], 1e-3))
    np.testing.assert_allclose(cold + bonus, [3, 1e4, 7 + 1e-3 * np.log(3)], rtol=1e-6)
    _, hot, bonus = soft_backup("scalar", q[..., None], 1e9)
    np.testing.assert_allclose(hot, q.mean(-1), rtol=1e-4, atol=0.1)
    np.testing.assert_allclose(bonus, 1e9 * np.log(3), rtol=1e-6)


def test_smoothing_noise_is_a_clipped_normal() -> None:
    action = np.full((20_000, 2), 0.1, np.float32)
    noise, clip = 0.2, 0.3
    disturbance = compiled(bellman.smooth_action, action, jax.random.key(0), noise, clip) - 0.1
    assert np.abs(disturbance).max() <= clip + 1e-6
    at_the_clip = (np.abs(disturbance) > clip - 1e-6).mean()
    np.testing.assert_allclose(at_the_clip, 2 * stats.norm.sf(clip / noise), atol=0.008)
    free = disturbance[np.abs(disturbance) < clip - 1e-6]
    assert stats.kstest(free, stats.truncnorm(-clip / noise, clip / noise, scale=noise).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(disturbance.T)[0, 1]) < 0.03  # dimensions get noise of their own


def test_smoothed_actions_stay_in_the_box() -> None:
    action = np.float32([[-1.0, 1.0, 0.5]] * 100)
    smooth_action = jax.jit(bellman.smooth_action)
    assert np.abs(smooth_action(action, jax.random.key(1), 5.0, 3.0)).max() == 1.0
    np.testing.assert_array_equal(smooth_action(action, jax.random.key(1), 0.0, 0.5), action)


# ---- over ensemble members ------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("members", [1, 5])
def test_min_member_takes_the_whole_outputs_of_the_lowest_member(name: str, members: int) -> None:
    head, outputs = HEADS[name], normal(5, members, 2, BATCH, HEADS[name].size)

    def pick(outputs: jax.Array) -> tuple[jax.Array, ...]:
        picked = bellman.min_member(head, outputs)
        return head.value(outputs), picked, head.value(picked)

    values, picked, value = compiled(pick, outputs)
    lowest = values.argmin(0)
    for i, j in np.ndindex(2, BATCH):
        np.testing.assert_array_equal(picked[i, j], outputs[lowest[i, j], i, j])
    np.testing.assert_allclose(value, values.min(0), rtol=1e-6)


@every_head
def test_mean_member_is_the_equal_mixture(name: str) -> None:
    head, outputs = HEADS[name], normal(6, MEMBERS, BATCH, HEADS[name].size)

    def average(outputs: jax.Array) -> tuple[jax.Array, ...]:
        mean = bellman.mean_member(head, outputs)
        return mean, head.value(mean), head.value(outputs)

    mean, value, values = compiled(average, outputs)
    np.testing.assert_allclose(value, values.mean(0), rtol=1e-5, atol=1e-5)
    if name in ("two_hot", "hl_gauss", "c51"):  # probabilities are averaged, not logits
        of_mean, of_each = (special.softmax(np.float64(x), -1) for x in (mean, outputs))
        np.testing.assert_allclose(of_mean, of_each.mean(0), atol=1e-6)


@every_head
def test_pessimism_is_the_mean_less_so_many_deviations_in_targets_and_values(name: str) -> None:
    """The target of members that disagree, against the closed form in float64; see `bellman.aggregate`."""
    head, outputs = HEADS[name], normal(6, MEMBERS, BATCH, HEADS[name].size)
    reward, discount = normal(8, BATCH), np.full(BATCH, 0.5, np.float32)

    def ask(outputs: jax.Array) -> tuple[Any, ...]:
        aggregates = {}
        for aggregation in bellman.AGGREGATIONS:
            one, off = bellman.aggregate(head, outputs, aggregation, 0.7)
            aggregates[aggregation] = head.value(one) - off
        one, off = bellman.aggregate(head, outputs, "pessimistic", 0.7)
        values = head.value(outputs)
        direct = {a: bellman.aggregate_values(values, a, 0.7) for a in bellman.AGGREGATIONS}
        return aggregates, direct, values, head.target(reward - discount * off, discount, one)

    aggregates, direct, values, target = compiled(ask, outputs)
    values = np.float64(values)
    deviation = np.sqrt(((values - values.mean(0)) ** 2).mean(0))
    expected = {"min": values.min(0), "mean": values.mean(0), "pessimistic": values.mean(0) - 0.7 * deviation}
    for aggregation, value in expected.items():
        np.testing.assert_allclose(aggregates[aggregation], value, atol=2e-5, err_msg=aggregation)
        np.testing.assert_allclose(direct[aggregation], value, rtol=1e-6, atol=1e-6, err_msg=aggregation)
    if name == "scalar":
        np.testing.assert_allclose(target, reward + discount * expected["pessimistic"], atol=1e-6)


def test_members_that_agree_have_no_deviation_and_a_derivative() -> None:
    """Two critics coincide in float32 now and then; the member that is moved is worth its share of the mean."""
    values = np.float32([[2, 1], [2, 3]])  # [E, B]: a tie, and members that are one deviation from their mean
    pessimistic = lambda values: bellman.aggregate_values(values, "pessimistic", 0.5)
    value, gradient = compiled(
        lambda v: (pessimistic(v), jax.grad(lambda v: pessimistic(v).sum())(v)), values
    )
    np.testing.assert_array_equal(value, [2, 1.5])
    np.testing.assert_allclose(gradient, [[0.5, 0.75], [0.5, 0.25]], rtol=1e-6)


def test_subsets_are_drawn_evenly_and_once_for_the_whole_batch() -> None:
    """REDQ by enumeration: the members' values say which two of five were drawn."""
    values = np.float32([[1, 5], [2, 4], [3, 3], [4, 2], [5, 1]])  # [E, B], two orders
    outputs = jnp.asarray(values[..., None])
    draw = jax.jit(jax.vmap(lambda k: bellman.subset_min_member(SCALAR, outputs, k, 2)[..., 0]))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    pairs = list(itertools.combinations(range(5), 2))
    # Members i < j have minima i + 1 in the first column and 5 - j in the second: a pair has one name.
    counts = [((drawn[:, 0] == i + 1) & (drawn[:, 1] == 5 - j)).sum() for i, j in pairs]
    assert sum(counts) == 2000
    assert stats.chisquare(counts).pvalue > 1e-3


@every_head
def test_all_members_or_one(name: str) -> None:
    head, outputs, key = HEADS[name], normal(7, MEMBERS, BATCH, HEADS[name].size), jax.random.key(1)

    def ask(outputs: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        subsets = (bellman.subset_min_member(head, outputs, key, size) for size in (MEMBERS, 1))
        return *subsets, bellman.min_member(head, outputs)

    everyone, alone, lowest = compiled(ask, outputs, key)
    np.testing.assert_array_equal(everyone, lowest)
    assert sum(bool((alone == member).all()) for member in outputs) == 1


@pytest.mark.parametrize("subset", [0, -1, MEMBERS + 1])
def test_impossible_subsets_are_refused(subset: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {subset} of {MEMBERS} ensemble members"):
        bellman.subset_min_member(
            SCALAR, np.zeros((MEMBERS, BATCH, 1), np.float32), jax.random.key(0), subset
        )


# ---- composition, shapes, batching ----------------------------------------------------------------------


@every_head
def test_backups_compose_and_carry_no_gradient(name: str) -> None:
    """Clipped double Q, soft over actions: nothing flows into the networks that are backed up."""
    head = HEADS[name]
    outputs, slow = normal(8, 6, head.size), normal(9, MEMBERS, 6, ACTIONS, head.size)

    def objective(slow: jax.Array, outputs: jax.Array) -> jax.Array:
        mixture, bonus = bellman.soft_max_action(head, bellman.min_member(head, slow), 0.5)
        discount = jnp.full(6, 0.9)
        target = head.target(1.0 + discount * bonus, discount, mixture)
        return head.loss(outputs, target).sum()

    gradient, to_outputs = compiled(jax.grad(objective, argnums=(0, 1)), slow, outputs)
    np.testing.assert_array_equal(gradient, 0)
    assert np.abs(to_outputs).max() > 1e-3


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

    together = everything(jnp.asarray(by_action), jnp.asarray(by_member))
    for other in (
        jax.jit(everything)(by_action, by_member),
        jax.jit(jax.vmap(everything, in_axes=(1, 0)))(by_action, by_member),
    ):
        for ours, expected in zip(other, together, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


FLAT, COLUMN, OUTPUTS = (
    np.zeros(shape, np.float32) for shape in (ACTIONS, (ACTIONS, 1), (ACTIONS, ACTIONS, 1))
)
INTEGERS = np.zeros(ACTIONS, np.int32)


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
    ],
)
def test_wrong_shapes_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="Chex"):
        wrong()
