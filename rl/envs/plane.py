"""A plane whose reward rises outwards until a cliff: the smallest world in which truncated rollouts mislead a critic.

The state is a point, the action moves it by at most 1 in each coordinate, and an episode lasts 30 steps from a start in
the square [-2, 2]^2. With ``m = max(|x|, |y|)`` of the point arrived at, the reward is

    min(0.07 m, 0.84) + exp(-|s' - (4, -3)|^2 / 8),   or -1 where m > 12.

The best is to go near (4, -3) and stay there, which earns about 36.5. Rollouts of 10 steps never see the cliff: points
with m > 11 appear as next states only, at the last step (`edge_of_reach`). The world is ours: that of RAVL's paper
(Sims et al., NeurIPS 2024) was known by captions and reviews alone, and its reward is not published.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rl.types import Array, Key, Spec

SPEC = Spec((2,), 2)
LIMIT = 30  # steps of an episode
START = 2.0  # half the side of the square of starts
CLIFF = 12.0

_PEAK = np.array([4.0, -3.0], np.float32)
_BEST = np.array([4.2828, -3.0], np.float32)  # where the reward is largest


def reset(key: Key, count: int) -> Array:
    """Starts [count, 2]."""
    return jax.random.uniform(key, (count, 2), minval=-START, maxval=START)


def step(observation: Array, action: Array) -> tuple[Array, Array]:
    """Next points [..., 2] and rewards [...]."""
    following = observation + action.clip(-1, 1)
    return following, reward(following)


def reward(point: Array) -> Array:
    """The reward [...] for arriving at points [..., 2]."""
    m = jnp.abs(point).max(-1)
    hill = jnp.exp(-jnp.square(point - _PEAK).sum(-1) / 8)
    return jnp.where(m > CLIFF, -1.0, jnp.minimum(0.07 * m, 0.84) + hill)


def edge_of_reach(point: Array, length: int) -> Array:
    """Whether no policy is at a point [..., 2] before the last step of rollouts of ``length``, [...] bool."""
    return jnp.abs(point).max(-1) > START + length - 1


def optimal_action(observation: Array) -> Array:
    """Straight to the best point, to stay there."""
    return (jnp.asarray(_BEST) - observation).clip(-1, 1)


def value(observation: Array, discount: float, steps: int = 24) -> Array:
    """Discounted return [...] of going to the best point and staying there for ever.

    It is within 2.5 % of the optimal value wherever the best point is less than ``steps`` away; what it misses is the
    slope on the way.
    """

    def walk(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        point, total = carry
        point, earned = step(point, optimal_action(point))
        return point, total + discount**number * earned

    _, total = jax.lax.fori_loop(0, steps, walk, (observation, jnp.zeros(observation.shape[:-1])))
    return total + discount**steps * reward(jnp.asarray(_BEST)) / (1 - discount)
