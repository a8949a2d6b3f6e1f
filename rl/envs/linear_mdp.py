"""The simulated linear MDP of the R2PVI paper, for any horizon and dimensions, with exact evaluation.

A chain of states, from each of which an action leads on, or to an absorbing state that pays 1 a step, or (rarely)
to a fail state that pays nothing. With ``p(a) = delta + xi @ a``,

    phi(chain state i, a) = (1 - p) e_i + p e_d,   phi(fail) = e_{d-1},   phi(absorbing) = e_d

and factor ``i`` leads to chain state ``i + 1``, but with probability ``epsilon`` to the fail state, factor
``d - 1`` to the fail state and factor ``d`` to the absorbing one. Rewards are the last feature, from the second
step on. Three steps and four factors give the paper's five states, on which DRPVI was tried before. Everything is a
pure function of arrays; states are numbers from 0.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from rl import linalg
from rl.replay.linear import Trajectories
from rl.types import Array, Key


class LinearMDP(NamedTuple):
    """Any finite linear MDP with ``S`` states, ``A`` actions, ``d`` factors; episodes begin in state 0."""

    features: Array  # [S, A, d] phi(s, a)
    theta: Array  # [H, d]: the reward is phi @ theta_h
    kernel: Array  # [H, d, S] the distribution of the next state under each factor
    worthless: Array  # [S] bool: states whose value is known to be 0


def make(
    delta: float = 0.3,
    xi_norm: float = 0.2,
    *,
    horizon: int = 3,
    factors: int = 4,
    actions: ArrayLike | None = None,
    epsilon: float = 0.001,
) -> LinearMDP:
    """The paper's chain.

    Args:
      delta: mean of ``p`` over the actions.
      xi_norm: ``|xi|_1``; every entry of ``xi`` is equal.
      horizon: steps of an episode; 3 in the paper.
      factors: number of features ``d``, one less than there are states; 4 in the paper.
      actions: [A, n] vectors within [-1, 1]; by default {-1, 1}^4.
      epsilon: probability of a fall from the chain.

    Raises:
      ValueError: a probability lies outside [0, 1]; the message has the inequality that is violated.
    """
    actions = np.asarray(list(itertools.product((-1, 1), repeat=4)) if actions is None else actions, float)
    if actions.ndim != 2 or np.abs(actions).max() > 1:
        raise ValueError(
            f"actions must be [A, n] vectors within [-1, 1], not {actions.shape} up to {np.abs(actions).max():g}"
        )
    if horizon < 1 or factors < 3:
        raise ValueError(f"the chain needs horizon >= 1 and factors >= 3, not {horizon} and {factors}")
    p = delta + actions.mean(-1) * xi_norm
    _probability("delta - |xi|_1 >= 0", delta - abs(xi_norm), f"delta = {delta:g}, |xi|_1 = {xi_norm:g}")
    _probability("delta + |xi|_1 <= 1", delta + abs(xi_norm), f"delta = {delta:g}, |xi|_1 = {xi_norm:g}")
    _probability("0 <= epsilon <= 1", epsilon, f"epsilon = {epsilon:g}")
    states, chain, last = factors + 1, factors - 1, factors - 1
    fail, absorbing = states - 2, states - 1
    features = np.zeros((states, len(actions), factors))
    for state in range(chain):
        features[state, :, state] = 1 - p
        features[state, :, last] = p
    features[fail, :, chain - 1] = 1
    features[absorbing, :, last] = 1
    kernel = np.zeros((horizon, factors, states))
    for factor in range(chain - 1):
        kernel[:, factor, factor + 1] = 1 - epsilon
        kernel[:, factor, fail] += epsilon
    kernel[:, chain - 1, fail] = 1
    kernel[:, last, absorbing] = 1
    theta = np.zeros((horizon, factors))
    theta[1:, last] = 1
    return LinearMDP(*(jnp.asarray(x) for x in (features, theta, kernel, np.arange(states) == fail)))


def perturbed(env: LinearMDP, q: ArrayLike, *, every_step: bool = False) -> LinearMDP:
    """The paper's test dynamics: at the first step, the last factor leads to the fail state with probability ``q``.

    As in the authors' code, no action falls from the chain at that step.

    Args:
      env: from `make`.
      q: [] perturbation in [0, 1].
      every_step: perturb the last factor at every step, and leave the rest of the kernel as it is.

    Raises:
      ValueError: ``q`` outside [0, 1].
    """
    if not isinstance(q, jax.core.Tracer):
        _probability("0 <= q <= 1", float(np.asarray(q)), f"q = {np.asarray(q):g}")
    states = env.features.shape[0]
    fail, absorbing = states - 2, states - 1
    shifted = jnp.zeros(states, env.kernel.dtype).at[fail].set(q).at[absorbing].set(1 - jnp.asarray(q))
    if every_step:
        return env._replace(kernel=env.kernel.at[:, -1].set(shifted))
    first = env.kernel[0].at[-1].set(shifted).at[0].set(jax.nn.one_hot(1, states, dtype=env.kernel.dtype))
    return env._replace(kernel=env.kernel.at[0].set(first))


def slippery(env: LinearMDP, q: ArrayLike) -> LinearMDP:
    """Another shift: at every step the chain's factors lead to the fail state with probability ``q`` (from `make`).

    Raises:
      ValueError: ``q`` outside [0, 1].
    """
    if not isinstance(q, jax.core.Tracer):
        _probability("0 <= q <= 1", float(np.asarray(q)), f"q = {np.asarray(q):g}")
    states = env.features.shape[0]
    onward = jnp.eye(states, dtype=env.kernel.dtype)[1 : states - 2]
    fall = jnp.eye(states, dtype=env.kernel.dtype)[states - 2]
    return env._replace(
        kernel=env.kernel.at[:, : states - 3].set((1 - jnp.asarray(q)) * onward + jnp.asarray(q) * fall)
    )


def collect(env: LinearMDP, key: Key, count: int, policy: Array | None = None) -> Trajectories:
    """``count`` episodes of ``policy`` [H, S, A] (probabilities; by default uniform)."""
    state, action = rollout(env, key, count, uniform(env) if policy is None else policy)
    features = env.features[state[:-1], action]
    following = jnp.where(env.worthless[:, None, None], 0.0, env.features)[state[1:-1]]
    return Trajectories(
        features=features,
        reward=(features * env.theta[:, None]).sum(-1),
        next_features=following,
        stopping=jnp.full(following.shape[:2], -jnp.inf, features.dtype),
        theta=env.theta,
    )


@linalg.exact
def rollout(env: LinearMDP, key: Key, count: int, policy: Array) -> tuple[Array, Array]:
    """States [H+1, count] and actions [H, count] of episodes of ``policy`` [H, S, A], probabilities."""

    def step(state: Array, now: tuple[Array, Array, Key]) -> tuple[Array, tuple[Array, Array]]:
        kernel, policy, key = now
        of_action, of_state = jax.random.split(key)
        action = jax.random.categorical(of_action, jnp.log(policy[state]))
        distribution = env.features[state, action] @ kernel
        following = jax.random.categorical(of_state, jnp.log(distribution)).astype(state.dtype)
        return following, (state, action)

    start = jnp.zeros(count, jnp.int32)
    keys = jax.random.split(key, env.kernel.shape[0])
    last, (states, actions) = jax.lax.scan(step, start, (env.kernel, policy, keys))
    return jnp.concatenate([states, last[None]]), actions


@linalg.exact
def evaluate(env: LinearMDP, policy: Array) -> Array:
    """The exact expected return [] of ``policy`` [H, S, A], probabilities, by dynamic programming.

    Raises:
      ValueError: the policy is for another horizon, or other states or actions.
    """
    _matches(env, policy)

    def step(value: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        theta, kernel, policy = now
        return (policy * (env.features @ (theta + kernel @ value))).sum(-1), None

    value = jnp.zeros(env.features.shape[0], env.kernel.dtype)
    return jax.lax.scan(step, value, (env.theta, env.kernel, policy), reverse=True)[0][0]


@linalg.exact
def variance(env: LinearMDP, policy: Array) -> Array:
    """The exact variance [] of an episode's return under ``policy`` [H, S, A], probabilities.

    Raises:
      ValueError: as `evaluate`.
    """
    _matches(env, policy)

    def step(
        moments: tuple[Array, Array], now: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        theta, kernel, policy = now
        reward = env.features @ theta
        value, square = (env.features @ (kernel @ moment) for moment in moments)
        later = reward + value, reward**2 + 2 * reward * value + square
        return ((policy * later[0]).sum(-1), (policy * later[1]).sum(-1)), None

    zeros = jnp.zeros(env.features.shape[0], env.kernel.dtype)
    scanned = jax.lax.scan(step, (zeros, zeros), (env.theta, env.kernel, policy), reverse=True)
    mean, square = (moment[0] for moment in scanned[0])
    return jnp.maximum(square - mean**2, 0.0)  # rounding


def returns(env: LinearMDP, key: Key, count: int, policy: Array) -> Array:
    """Returns [count] of sampled episodes of ``policy`` [H, S, A], the paper's way to evaluate.

    Raises:
      ValueError: the policy is for another horizon, or other states or actions.
    """
    _matches(env, policy)
    state, action = rollout(env, key, count, policy)
    return (env.features[state[:-1], action] * env.theta[:, None]).sum((0, -1))


def uniform(env: LinearMDP) -> Array:
    """The policy [H, S, A] that the data of the paper comes from."""
    actions = env.features.shape[1]
    return jnp.full((env.theta.shape[0], *env.features.shape[:2]), 1 / actions, env.features.dtype)


def greedy(env: LinearMDP, q: Array) -> Array:
    """The policy [H, S, A] of values [H, S, A]; of equal ones the first."""
    return jax.nn.one_hot(q.argmax(-1), env.features.shape[1], dtype=env.features.dtype)


def check(env: LinearMDP, data: Trajectories) -> None:
    """Refuses trajectories of another environment or feature map.

    Raises:
      ValueError: another horizon or number of features or actions, or features that no state has here.
    """
    steps, size, actions = env.theta.shape[0], env.features.shape[-1], env.features.shape[1]
    if data.features.shape[0] != steps:
        raise ValueError(f"the data has {data.features.shape[0]} steps, the environment's horizon is {steps}")
    if data.features.shape[-1] != size or data.next_features.shape[2] != actions:
        raise ValueError(
            f"the data has {data.features.shape[-1]} features and {data.next_features.shape[2]} actions, "
            f"the environment {size} and {actions}: it was made with another feature map"
        )
    known = np.asarray(env.features).reshape(-1, size)
    seen = np.unique(np.asarray(data.features).reshape(-1, size).round(6), axis=0)
    away = np.abs(seen[:, None] - known).max(-1).min(-1)
    if away.max() > 1e-5:
        raise ValueError(
            f"the data has features {seen[away.argmax()].round(4)}, which no state has here: it was made with "
            "another feature map (another delta or xi?)"
        )


def _matches(env: LinearMDP, policy: Array) -> None:
    expected = (env.theta.shape[0], *env.features.shape[:2])
    if policy.shape != expected:
        raise ValueError(f"the policy must be [steps, states, actions] = {expected}, not {policy.shape}")


def _probability(inequality: str, value: float, parameters: str) -> None:
    if not -1e-12 <= value <= 1 + 1e-12:
        raise ValueError(f"{inequality} is violated ({parameters}): a probability would be {value:g}")
