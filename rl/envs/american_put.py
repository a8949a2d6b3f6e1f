"""The American put option of the R2PVI paper: when to exercise, learned from price paths, evaluated exactly.

Before each of ``H`` decisions the holder sees the price ``s`` and either exercises, is paid ``max(0, K - s)`` and
stops, or holds; the price then moves up by a factor with probability ``p``, else down. Holding has ``d`` hat
functions of the price as features, whose values are learned; what exercising pays is known. Prices lie on a
lattice (the order of moves does not matter), on which a policy's value is exact. Everything is a pure function
of arrays; the price's path may also be given, from a market for example.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from rl.replay.linear import Trajectories
from rl.types import Array, Key


class AmericanPut(NamedTuple):
    """The contract, the dynamics and the features; defaults of `make` are the paper's."""

    strike: Array  # [] K
    up: Array  # [] factor of a rise
    down: Array  # [] factor of a fall
    probability: Array  # [] of a rise
    anchors: Array  # [d] where each hat is 1
    width: Array  # [] where a hat is 0 again
    time: Array  # [H] 0, ..., H-1: the decisions


def make(
    probability: float = 0.5,
    *,
    horizon: int = 20,
    factors: int = 30,
    strike: float = 100.0,
    up: float = 1.02,
    down: float = 0.98,
    lowest: float = 80.0,
    span: float = 100.0,
) -> AmericanPut:
    """The paper's option: hats at ``lowest + i span / factors``, each ``span / factors`` wide on either side.

    Raises:
      ValueError: a probability outside [0, 1], or a strike or price factor that is not positive.
    """
    _probability(probability)
    if horizon < 1 or factors < 1:
        raise ValueError(f"the option needs horizon >= 1 and factors >= 1, not {horizon} and {factors}")
    if not (strike > 0 and 0 < down <= up and span > 0):
        raise ValueError(
            f"prices need strike > 0, span > 0 and 0 < down <= up, not {strike=}, {span=}, {down=}, {up=}"
        )
    width = span / factors
    return AmericanPut(
        strike=jnp.asarray(float(strike)),
        up=jnp.asarray(float(up)),
        down=jnp.asarray(float(down)),
        probability=jnp.asarray(float(probability)),
        anchors=lowest + width * jnp.arange(factors),
        width=jnp.asarray(width),
        time=jnp.arange(horizon),
    )


def perturbed(env: AmericanPut, probability: ArrayLike) -> AmericanPut:
    """``env`` with another probability of a rise.

    Raises:
      ValueError: it lies outside [0, 1].
    """
    if not isinstance(probability, jax.core.Tracer):
        _probability(float(np.asarray(probability)))
    return env._replace(probability=jnp.asarray(probability, env.strike.dtype))


def features(env: AmericanPut, price: Array) -> Array:
    """Hats [..., d] at prices [...]; they sum to 1 between the outermost anchors."""
    return jnp.maximum(0.0, 1 - jnp.abs(price[..., None] - env.anchors) / env.width)


def payoff(env: AmericanPut, price: Array) -> Array:
    """What exercising pays at prices [...]."""
    return jnp.maximum(0.0, env.strike - price)


def collect(env: AmericanPut, key: Key, count: int, start: Array) -> Trajectories:
    """``count`` price paths from ``start`` ([] or [count]) that are never exercised."""
    rise = jax.random.bernoulli(key, env.probability, (env.time.shape[0] - 1, count))
    return trajectories(env, path(env, jnp.broadcast_to(start, (count,)), rise))


def path(env: AmericanPut, start: Array, rise: Array) -> Array:
    """Prices [T+1, ...] from ``start`` [...] and whether each move is a rise [T, ...]."""
    moves = jnp.where(rise, env.up, env.down)
    return start * jnp.concatenate([jnp.ones_like(moves[:1]), jnp.cumprod(moves, 0)])


def trajectories(env: AmericanPut, price: Array) -> Trajectories:
    """Price paths [H, N], however they came about, as data.

    Raises:
      ValueError: the paths do not have one price per decision, or a price is not positive.
    """
    steps = env.time.shape[0]
    if price.ndim != 2 or price.shape[0] != steps:
        raise ValueError(f"prices must be [decisions, paths] = [{steps}, N], not {price.shape}")
    if not isinstance(price, jax.core.Tracer) and not (np.asarray(price) > 0).all():
        raise ValueError("prices must be positive and finite")
    held = features(env, price)
    return Trajectories(
        features=held,
        reward=jnp.zeros(price.shape, held.dtype),
        next_features=held[1:, :, None],
        stopping=payoff(env, price[1:]),
        theta=jnp.zeros((steps, env.anchors.shape[0]), held.dtype),
    )


# ---- evaluation ------------------------------------------------------------------------------------------
# A policy is given by its values of holding [H, ...] at the prices asked about: it exercises where that pays more.


def lattice(env: AmericanPut, start: Array) -> Array:
    """Prices [H, H] from ``start`` []: ``[t, j]`` after ``j`` rises among ``t`` moves; what ``j > t`` has is unused."""
    rises = env.time[None, :]
    return start * env.up**rises * env.down ** (env.time[:, None] - rises)


def evaluate(env: AmericanPut, start: Array, hold: Array) -> Array:
    """The exact expected payoff [] from price ``start`` [] of a policy.

    Args:
      env: the option.
      start: [] first price.
      hold: [H, H] values of holding on the `lattice` of ``start``.

    Raises:
      ValueError: ``hold`` is of another horizon.
    """
    return _moments(env, start, hold)[0]


def variance(env: AmericanPut, start: Array, hold: Array) -> Array:
    """The exact variance [] of an episode's payoff; arguments and errors are those of `evaluate`."""
    mean, square = _moments(env, start, hold)
    return jnp.maximum(square - mean**2, 0.0)  # rounding


def _moments(env: AmericanPut, start: Array, hold: Array) -> Array:
    """The expected payoff and its expected square, [2]."""
    _square(env, hold)

    def step(moments: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        price, hold = now
        rise = jnp.concatenate([moments[:, 1:], moments[:, -1:]], 1)
        onward = env.probability * rise + (1 - env.probability) * moments
        paid = payoff(env, price)
        return jnp.where(paid > hold, jnp.stack([paid, paid**2]), onward), None

    zeros = jnp.zeros((2, env.time.shape[0]), hold.dtype)
    return jax.lax.scan(step, zeros, (lattice(env, start), hold), reverse=True)[0][:, 0]


def optimal(env: AmericanPut, start: Array) -> Array:
    """Values [H, H] of holding on the lattice under the best policy for this environment's probability."""

    def step(value: Array, price: Array) -> tuple[Array, Array]:
        hold = env.probability * jnp.concatenate([value[1:], value[-1:]]) + (1 - env.probability) * value
        return jnp.maximum(payoff(env, price), hold), hold

    prices = lattice(env, start)
    return jax.lax.scan(step, jnp.zeros(env.time.shape[0], prices.dtype), prices, reverse=True)[1]


def returns(env: AmericanPut, price: Array, hold: Array) -> Array:
    """Payoffs [N] of a policy on given paths: prices [H, N] and its values of holding there [H, N]."""
    paid = payoff(env, price)
    exercised = paid > hold
    first = exercised & (jnp.cumsum(exercised, 0) == 1)
    return jnp.where(first, paid, 0.0).sum(0)


def check(env: AmericanPut, data: Trajectories) -> None:
    """Refuses trajectories of another horizon or feature map.

    Raises:
      ValueError: another number of steps or features, or features that are not those of the price that the payoff
        tells, where it tells one.
    """
    steps, size = env.time.shape[0], env.anchors.shape[0]
    if data.features.shape[0] != steps:
        raise ValueError(f"the data has {data.features.shape[0]} steps, the option {steps} decisions")
    if data.features.shape[-1] != size:
        raise ValueError(
            f"the data has {data.features.shape[-1]} features, the option {size}: it was made with another feature map"
        )
    paid = np.asarray(data.stopping)
    expected = np.asarray(features(env, env.strike - data.stopping))
    if np.abs(expected - np.asarray(data.next_features[:, :, 0]))[paid > 0].max(initial=0.0) > 1e-3:
        raise ValueError(
            "the data's features are not those that its payoffs have here: it was made with another feature map or "
            "strike"
        )


def _square(env: AmericanPut, hold: Array) -> None:
    steps = env.time.shape[0]
    if hold.shape != (steps, steps):
        raise ValueError(f"hold must be [decisions, rises] = [{steps}, {steps}], not {hold.shape}")


def _probability(value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"0 <= p <= 1 is violated: the probability of a rise is {value:g}")
