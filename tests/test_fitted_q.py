"""rl.fitted_q against closed forms."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import fitted_q
from rl.replay.dataset import Dataset, value_bounds
from rl.types import Spec, Transition
from rl.values import heads

GAMMA = 0.8


def tabular(steps: int = 3000) -> tuple[Dataset, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A logged 4-state, 2-action MDP whose state 3 ends episodes, and the model that its log implies.

    Returns:
        the dataset, and from its counts P [4, 2, 4] (rows sum to less than 1 where episodes end), r [4, 2]
        and the distribution of first states [4]; last, the logged states.
    """
    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.ones(4), size=(4, 2))
    reward = rng.normal(size=(4, 2, 4)) + np.array([[0.0], [1.0]])  # the second action pays more
    rows, state = [], 0
    for t in range(steps):
        action = int(rng.integers(2))
        following = int(rng.choice(4, p=transition[state, action]))
        last = following == 3 or t == steps - 1 or rng.random() < 0.05
        rows.append((state, action, reward[state, action, following], following != 3, following, last))
        state = int(rng.integers(3)) if last else following
    s, a, r, alive, s2, last = map(np.array, zip(*rows, strict=True))
    counts, total = np.zeros((4, 2, 4)), np.zeros((4, 2))
    np.add.at(counts, (s[alive], a[alive], s2[alive]), 1)
    np.add.at(total, (s, a), r)
    visits = np.zeros((4, 2))
    np.add.at(visits, (s, a), 1)
    visits = np.maximum(visits, 1)  # state 3 is never acted in
    first = s[np.concatenate([[True], last[:-1]])]
    one_hot = np.eye(4, dtype=np.float32)
    none = np.zeros(steps, np.float32)
    transitions = Transition(
        one_hot[s], a, r.astype(np.float32), alive.astype(np.float32), one_hot[s2], a, none
    )
    start = np.bincount(first, minlength=4) / len(first)
    return Dataset(transitions, last), counts / visits[..., None], total / visits, start, s


def exact_value(p: np.ndarray, r: np.ndarray, start: np.ndarray, policy: np.ndarray) -> float:
    """start . (I - gamma P_pi)^-1 r_pi for the deterministic ``policy`` [4]."""
    chosen = np.arange(4), policy
    return float(start @ np.linalg.solve(np.eye(4) - GAMMA * p[chosen], r[chosen]))


def table_act(states, observations, keys):
    """Policies as tables: states [S, 4] int32."""
    del keys
    return jax.vmap(lambda table, o: table[o.argmax(-1)])(states, observations)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    "name",
    [
        "scalar",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("two_hot", "hl_gauss", "c51", "quantile")),
    ],
)
def test_fitted_q_finds_the_exact_value_of_policies_in_a_tabular_mdp(name: str) -> None:
    dataset, p, r, start, _ = tabular()
    policies = np.array([[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], np.int32)
    head = heads.make(name, *value_bounds(dataset, GAMMA), size=51)
    config = fitted_q.Config(
        discount=GAMMA,
        updates=1500,
        target_rate=0.05,
        learning_rate=3e-3,
        hidden=(32,),
        layer_norm=False,
    )
    fit = fitted_q.estimator(table_act, Spec((4,), 2, discrete=True), head, config)
    value = fit(policies, dataset, jax.random.split(jax.random.key(0), 3))
    exact = np.array([exact_value(p, r, start, policy) for policy in policies])
    assert np.ptp(exact) > 0.5  # the policies differ by more than what is tolerated
    # The mean of finitely many Huber quantiles is not quite the expectation.
    np.testing.assert_allclose(value, exact, atol=0.2 if name == "quantile" else 0.08)


@pytest.mark.optimised
@pytest.mark.long
def test_fitted_q_finds_the_value_of_linear_feedback() -> None:
    """x' = 0.9 x + 0.5 u, r = -x^2 - 0.1 u^2, u = -k x: the value is -x^2 (1 + 0.1 k^2) / (1 - gamma c^2)."""
    rng = np.random.default_rng(0)
    n = 5000
    x, u = rng.uniform(-1, 1, (n, 1)), rng.uniform(-1, 1, (n, 1))
    following, reward = 0.9 * x + 0.5 * u, -(x[:, 0] ** 2) - 0.1 * u[:, 0] ** 2
    transitions = Transition(x, u, reward, np.ones(n), following, u, np.zeros(n))
    dataset = Dataset(jax.tree.map(lambda v: v.astype(np.float32), transitions), np.ones(n, bool))
    gains = np.array([0.0, 0.5, 1.0])

    def feedback(states, observations, keys):
        return -states[:, None, None] * observations

    config = fitted_q.Config(
        discount=GAMMA, updates=2000, target_rate=0.05, learning_rate=3e-3, hidden=(64, 64)
    )
    fit = fitted_q.estimator(feedback, Spec((1,), 1), heads.scalar(), config)
    value = fit(np.float32(gains), dataset, jax.random.split(jax.random.key(1), 3))
    exact = -np.mean(x**2) * (1 + 0.1 * gains**2) / (1 - GAMMA * (0.9 - 0.5 * gains) ** 2)
    np.testing.assert_allclose(value, exact, rtol=0.05)


def test_actions_are_taken_as_environments_take_them() -> None:
    """Clipped: two policies that do the same have the same value, though a critic can tell their actions apart."""
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    steps = Transition(x, x, x[:, 0], np.ones(40, np.float32), x, x, np.zeros(40, np.float32))
    act = lambda states, observations, keys: jnp.broadcast_to(states[:, None, None], observations.shape)
    config = fitted_q.Config(updates=20, hidden=(8,))
    fit = fitted_q.estimator(act, Spec((1,), 1), heads.scalar(), config)
    one, four, half = fit(
        np.float32([1, 4, 0.5]),
        Dataset(steps, np.ones(40, bool)),
        jax.random.split(jax.random.key(0), 1)[np.zeros(3, int)],
    )
    assert one == four != half


@pytest.mark.slow
def test_fitted_q_compiles_once_and_repeats_bit_for_bit() -> None:
    dataset, *_ = tabular(200)
    config = fitted_q.Config(updates=1100, hidden=(8,))  # two calls of the compiled loop, unequal in length
    counted = chex.assert_max_traces(table_act, n=3)  # in the loop, and once in the estimate
    fit = fitted_q.estimator(counted, Spec((4,), 2, discrete=True), heads.scalar(), config)
    keys = jax.random.split(jax.random.key(0), 2)
    results = jax.device_get([fit(np.full((2, 4), i, np.int32), dataset, keys) for i in (0, 1, 0)])
    np.testing.assert_array_equal(results[0], results[2])
    assert (results[0] != results[1]).all()


def test_first_steps_are_all_used_where_they_are_few_and_spread_where_they_are_many(monkeypatch) -> None:
    last = np.zeros(1000, bool)
    last[[9, 10, 499, 998, 999]] = True
    starts = [0, 10, 11, 500, 999]
    dataset = Dataset(Transition(*[np.zeros(1000)] * 7), last)
    index, weight = map(np.asarray, jax.jit(lambda: fitted_q._first_steps(dataset))())
    np.testing.assert_array_equal(index[weight > 0], starts)
    np.testing.assert_allclose(weight[weight > 0], 0.2)
    monkeypatch.setattr(fitted_q, "_ROWS", 3)
    index, weight = map(np.asarray, jax.jit(lambda: fitted_q._first_steps(dataset))())
    np.testing.assert_array_equal(index, [0, 10, 500])
    np.testing.assert_allclose(weight, 1 / 3, rtol=1e-6)


def test_fitted_q_refuses_images() -> None:
    with pytest.raises(ValueError, match=r"flat observations, not shape \(64, 64, 3\)"):
        fitted_q.estimator(table_act, Spec((64, 64, 3), 2, discrete=True), heads.scalar())
