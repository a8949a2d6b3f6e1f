"""rl.envs.linear_mdp and rl.envs.american_put against closed forms, enumeration and sampling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from rl.envs import american_put, linear_mdp

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# ---- the linear MDP --------------------------------------------------------------------------------------

CLOSED_FORM = {  # (delta, |xi|): values of the aggressive and the conservative first action at q = 0, 0.5, 1
    (0.3, 0.1): ((1.4239, 1.0239, 0.6239), (1.2318, 1.0318, 0.8318)),
    (0.3, 0.2): ((1.6249, 1.1249, 0.6249), (1.3248, 1.2248, 1.1248)),
    (0.3, 0.3): ((1.7759, 1.1759, 0.5759), (1.4398, 1.4398, 1.4398)),
}


def policy_of(env: linear_mdp.LinearMDP, first: int) -> np.ndarray:
    """``first`` in the first state, and then the action of the highest p (the last)."""
    steps, states, actions = env.theta.shape[0], env.features.shape[0], env.features.shape[1]
    action = np.full((steps, states), actions - 1)
    action[0] = first
    return np.eye(actions)[action]


# Compiled once for all environments of a shape.
evaluate = jax.jit(linear_mdp.evaluate)
variance = jax.jit(linear_mdp.variance)
perturbed = jax.jit(linear_mdp.perturbed, static_argnames="every_step")
returns = jax.jit(linear_mdp.returns, static_argnums=2)
collect = jax.jit(linear_mdp.collect, static_argnums=2)


@pytest.mark.parametrize("parameters", list(CLOSED_FORM))
def test_exact_evaluation_is_the_closed_form(parameters: tuple[float, float]) -> None:
    delta, xi = parameters
    env = linear_mdp.make(delta, xi)
    high, epsilon = delta + xi, 0.001
    onward = high + (1 - high) * (1 - epsilon) * high + high
    for first, p, table in ((15, delta + xi, 0), (0, delta - xi, 1)):
        for q, rounded in zip((0.0, 0.5, 1.0), CLOSED_FORM[parameters][table], strict=True):
            ours = evaluate(perturbed(env, q), policy_of(env, first))
            np.testing.assert_allclose(ours, (1 - p) * onward + 2 * (1 - q) * p, atol=1e-12)
            np.testing.assert_allclose(ours, rounded, atol=5.1e-5)


@pytest.mark.parametrize(("horizon", "factors"), [(1, 3), (3, 4), (5, 4), (4, 7), (6, 3)])
def test_evaluation_is_the_sum_over_all_paths(horizon: int, factors: int) -> None:
    actions = np.array([[-1.0, 0.5], [0.0, 0.0], [1.0, 1.0]])
    env = linear_mdp.make(0.4, 0.3, horizon=horizon, factors=factors, actions=actions, epsilon=0.2)
    env = jax.device_get(env)
    rng = np.random.default_rng(0)
    policy = rng.dirichlet(np.ones(3), size=(horizon, factors + 1))
    np.testing.assert_allclose(env.kernel.sum(-1), 1)
    np.testing.assert_allclose(env.features.sum(-1), 1)
    features, kernel, theta = env.features, env.kernel, env.theta
    mass, expected = np.eye(factors + 1)[0], 0.0
    for h in range(horizon):  # forwards, by the distribution over states
        joint = mass[:, None] * policy[h]
        expected += (joint * (features @ theta[h])).sum()
        mass = np.einsum("sa,sad,dt->t", joint, features, kernel[h])
    np.testing.assert_allclose(evaluate(env, policy), expected, atol=1e-12)
    spread = variance(env, policy)
    if horizon < 4:  # or there are too many
        square, states = 0.0, range(factors + 1)
        for path in itertools.product(itertools.product(range(3), states), repeat=horizon):
            state, chance, earned = 0, 1.0, 0.0
            for h, (action, following) in enumerate(path):
                phi = features[state, action]
                chance *= policy[h][state, action] * (phi @ kernel[h])[following]
                state, earned = following, earned + phi @ theta[h]
            square += chance * earned**2
        np.testing.assert_allclose(spread, square - expected**2, atol=1e-12)
    sampled = np.asarray(returns(env, jax.random.key(1), 40_000, policy))
    np.testing.assert_allclose(sampled.mean(), expected, atol=5 * sampled.std() / 200)
    np.testing.assert_allclose(sampled.var(), spread, rtol=0.1)


def test_the_papers_states_and_features() -> None:
    env = jax.device_get(linear_mdp.make(0.3, 0.2))
    assert env.features.shape == (5, 16, 4)
    np.testing.assert_allclose(env.features[0, 15], [0.5, 0, 0, 0.5])
    np.testing.assert_allclose(env.features[1, 0], [0, 0.9, 0, 0.1])
    np.testing.assert_allclose(env.features[3, 4], [0, 0, 1, 0])
    np.testing.assert_allclose(env.features[4, 4], [0, 0, 0, 1])
    np.testing.assert_allclose(env.kernel[0, 0], [0, 0.999, 0, 0.001, 0])
    np.testing.assert_allclose(env.kernel[1, 1], [0, 0, 0.999, 0.001, 0])
    first = np.asarray(perturbed(env, 0.3).kernel)
    np.testing.assert_allclose(first[0, 3], [0, 0, 0, 0.3, 0.7])
    np.testing.assert_allclose(first[0, 0], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(first[1:], env.kernel[1:])
    every = np.asarray(perturbed(env, 0.3, every_step=True).kernel)
    np.testing.assert_allclose(every[:, 3], np.tile([0, 0, 0, 0.3, 0.7], (3, 1)))
    np.testing.assert_array_equal(every[:, :3], env.kernel[:, :3])
    slippery = np.asarray(jax.jit(linear_mdp.slippery)(env, 0.3).kernel)
    np.testing.assert_allclose(slippery[1, :2], [[0, 0.7, 0, 0.3, 0], [0, 0, 0.7, 0.3, 0]])
    np.testing.assert_array_equal(slippery[:, 2:], env.kernel[:, 2:])


def test_collection() -> None:
    env = linear_mdp.make(0.3, 0.2, epsilon=0.3)
    data = jax.device_get(collect(env, jax.random.key(0), 4000))
    linear_mdp.check(env, data)
    assert data.features.shape == (3, 4000, 4) and data.next_features.shape == (2, 4000, 16, 4)
    np.testing.assert_allclose(data.features[0].mean(0), [0.7, 0, 0, 0.3], atol=0.02)
    failed = (data.next_features[0] == 0).all((-1, -2))  # the fail state, whose value is 0
    np.testing.assert_allclose(failed.mean(), 0.7 * 0.3, atol=0.03)
    np.testing.assert_allclose(data.reward[1], data.features[1, :, 3])
    np.testing.assert_allclose(data.reward[0], 0)
    other = collect(env, jax.random.key(1), 4000)
    assert not np.array_equal(other.features, data.features)
    always = policy_of(env, 15)
    np.testing.assert_allclose(np.asarray(collect(env, jax.random.key(0), 9, always).features)[0, :, 3], 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_mdp.make(0.2, 0.3), r"delta - \|xi\|_1 >= 0 is violated .*would be -0.1"),
        (lambda: linear_mdp.make(0.8, 0.3), r"delta \+ \|xi\|_1 <= 1 is violated .*would be 1.1"),
        (lambda: linear_mdp.make(0.3, 0.1, epsilon=1.5), "0 <= epsilon <= 1 is violated"),
        (lambda: linear_mdp.make(actions=[[2.0]]), r"actions must be \[A, n\] vectors within \[-1, 1\]"),
        (lambda: linear_mdp.make(horizon=0), "horizon >= 1"),
        (lambda: linear_mdp.make(factors=2), "factors >= 3"),
        (lambda: linear_mdp.perturbed(linear_mdp.make(), 1.2), "0 <= q <= 1 is violated"),
        (lambda: linear_mdp.slippery(linear_mdp.make(), -0.1), "0 <= q <= 1 is violated"),
        (
            lambda: linear_mdp.evaluate(linear_mdp.make(), np.zeros((4, 5, 16))),
            r"policy must be .* = \(3, 5, 16\), not \(4, 5, 16\)",
        ),
        (
            lambda: linear_mdp.returns(linear_mdp.make(), jax.random.key(0), 1, np.zeros((3, 4, 16))),
            "policy must be",
        ),
    ],
)
def test_bad_parameters(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_data_of_another_environment() -> None:
    data = collect(linear_mdp.make(0.3, 0.2), jax.random.key(0), 20)
    with pytest.raises(ValueError, match="which no state has here: it was made with another feature map"):
        linear_mdp.check(linear_mdp.make(0.3, 0.1), data)
    with pytest.raises(ValueError, match="data has 3 steps, the environment's horizon is 4"):
        linear_mdp.check(linear_mdp.make(horizon=4), data)
    with pytest.raises(ValueError, match="data has 4 features and 16 actions, the environment 6 and 16"):
        linear_mdp.check(linear_mdp.make(factors=6), data)


# ---- the put option --------------------------------------------------------------------------------------

PAPER_START = 99.17022004702574
START = np.asarray(100.0)

worth = jax.jit(american_put.evaluate)
spread = jax.jit(american_put.variance)
hats = jax.jit(american_put.features)
payoffs = jax.jit(american_put.returns)
price_paths = jax.jit(american_put.path)
optimal = jax.jit(american_put.optimal)
held_paths = jax.jit(american_put.collect, static_argnums=2)


def test_hats() -> None:
    env = american_put.make()
    features = np.asarray(hats(env, np.array([80.0, 85.0, 99.17, 76.0, 79.0])))
    np.testing.assert_allclose(features[0], np.eye(30)[0], atol=1e-12)
    np.testing.assert_allclose(features[:3].sum(-1), 1)
    np.testing.assert_allclose(features[1, 1:3], [0.5, 0.5])
    np.testing.assert_allclose(features[3], 0)
    np.testing.assert_allclose(features[4].sum(), 0.7)


def test_optimal_values_from_the_papers_start() -> None:
    """By dynamic programming, with the probability known, or believed to be 0.6 (at 0.5 holding and exercising tie)."""
    nominal, start = american_put.make(0.6), np.asarray(PAPER_START)
    values = {0.2: (21.16, 4.76), 0.4: (8.83, 4.16), 0.6: (1.93, 1.93), 0.8: (0.83, 0.30), 1.0: (0.83, 0.0)}
    for p, (best, believed) in values.items():
        env = american_put.perturbed(nominal, p)
        known, fixed = optimal(env, start), optimal(nominal, start)
        np.testing.assert_allclose(worth(env, start, known), best, atol=6e-3)
        np.testing.assert_allclose(worth(env, start, fixed), believed, atol=6e-3)


def test_evaluation_is_the_mean_over_all_paths() -> None:
    env = american_put.make(0.3, horizon=6, factors=5)
    hold = np.random.default_rng(0).uniform(0, 3, size=(6, 6))
    total, square = 0.0, 0.0
    for rise in itertools.product((0, 1), repeat=5):
        rises = np.concatenate([[0], np.cumsum(rise)])
        price = np.asarray(price_paths(env, START, np.array(rise, bool)))
        paid = payoffs(env, price[:, None], hold[np.arange(6), rises][:, None])
        chance = 0.3 ** sum(rise) * 0.7 ** (5 - sum(rise))
        total, square = total + chance * np.asarray(paid)[0], square + chance * np.asarray(paid)[0] ** 2
    np.testing.assert_allclose(worth(env, START, hold), total, rtol=1e-9)
    np.testing.assert_allclose(spread(env, START, hold), square - total**2, rtol=1e-9)


def test_the_first_time_that_exercising_pays_more_counts() -> None:
    env = american_put.make(horizon=4, factors=5)
    price = np.array([[99.0, 101.0], [97.0, 102.0], [90.0, 103.0], [80.0, 101.0]])
    hold = np.array([2.0, 2.0, 9.0, 9.0])[:, None] * np.ones(2)
    np.testing.assert_allclose(payoffs(env, price, hold), [3.0, 0.0])


def test_paths_and_collection() -> None:
    env = american_put.make(0.5)
    data = jax.device_get(held_paths(env, jax.random.key(0), 3000, START))
    american_put.check(env, data)
    assert data.features.shape == (20, 3000, 30) and data.next_features.shape == (19, 3000, 1, 30)
    np.testing.assert_array_equal(data.features[1:], data.next_features[:, :, 0])
    np.testing.assert_allclose((data.stopping[0] > 0).mean(), 0.5, atol=0.04)
    np.testing.assert_allclose(data.stopping[0].max(), 2)
    lattice = np.asarray(jax.jit(american_put.lattice)(env, START))
    np.testing.assert_allclose(lattice[3, 2], 100 * 1.02**2 * 0.98)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: american_put.make(1.2), "0 <= p <= 1 is violated: the probability of a rise is 1.2"),
        (lambda: american_put.perturbed(american_put.make(), -0.1), "0 <= p <= 1 is violated"),
        (lambda: american_put.make(strike=0.0), "strike > 0"),
        (lambda: american_put.make(up=0.9), "0 < down <= up"),
        (lambda: american_put.make(horizon=0), "horizon >= 1"),
        (
            lambda: american_put.trajectories(american_put.make(), np.ones((19, 3))),
            r"\[20, N\], not \(19, 3\)",
        ),
        (lambda: american_put.trajectories(american_put.make(), np.zeros((20, 3))), "positive"),
        (
            lambda: american_put.evaluate(american_put.make(), START, np.zeros((19, 19))),
            r"hold must be .* \[20, 20\], not \(19, 19\)",
        ),
    ],
)
def test_bad_options(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_data_of_another_option() -> None:
    data = held_paths(american_put.make(), jax.random.key(0), 5, START)
    with pytest.raises(ValueError, match="data has 20 steps, the option 10 decisions"):
        american_put.check(american_put.make(horizon=10), data)
    with pytest.raises(ValueError, match="data has 30 features, the option 60"):
        american_put.check(american_put.make(factors=60), data)
    with pytest.raises(ValueError, match="another feature map or strike"):
        american_put.check(american_put.make(lowest=70.0), data)
    with pytest.raises(ValueError, match="another feature map or strike"):
        american_put.check(american_put.make(strike=110.0), data)
