"""What rollouts ask of a world, and worlds made of others: true dynamics, and mixtures.

A learned ensemble (`rl.dynamics.ensemble`) answers the same three questions, so that whatever rolls out in one rolls
out in any: a perfect model is `true`, a model on its way to perfection is `mix`. Rewards are predicted together with
next observations; whether an episode ends there is the caller's rule (`rl.dynamics.termination`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.types import Array, Key

# (observations [..., O], actions [..., D] or [...] int32) -> next observations [..., O], rewards [...]
Transit = Callable[[Array, Array], tuple[Array, Array]]


class Dynamics(NamedTuple):
    """A world as pure functions of its parameters: a fitted model, or whatever its maker says.

    Observations are [..., O] and actions [..., D], or [...] integers; ``M`` is how many answers the world has.
    """

    predict: Callable[[Any, Array, Array], tuple[Array, Array]]  # mean and deviation [M, ..., O + 1], r last
    propose: Callable[[Any, Array, Array, Key], tuple[Array, Array]]  # s' [M, ..., O], r [M, ...]
    step: Callable[[Any, Array, Array, Key], tuple[Array, Array]]  # one of the proposals: no [M]


class Mixed(NamedTuple):
    """Parameters of `mix`."""

    first: Any
    second: Any
    share: Array  # [] of the second, from 0 to 1


def true(transit: Transit) -> Dynamics:
    """The world as it is: one answer (M = 1) without any doubt. Its parameters are not looked at, ``()`` say."""

    def predict(params: Any, observation: Array, action: Array) -> tuple[Array, Array]:
        following, reward = transit(observation, action)
        mean = jnp.concatenate([following, reward[..., None]], -1)[None]
        return mean, jnp.zeros_like(mean)

    def propose(params: Any, observation: Array, action: Array, key: Key) -> tuple[Array, Array]:
        following, reward = transit(observation, action)
        return following[None], reward[None]

    def step(params: Any, observation: Array, action: Array, key: Key) -> tuple[Array, Array]:
        return transit(observation, action)

    return Dynamics(predict, propose, step)


def mix(first: Dynamics, second: Dynamics) -> Dynamics:
    """Next observations and rewards on the straight line from one world's to another's; parameters are `Mixed`.

    The interpolation of RAVL (Sims et al., NeurIPS 2024) between a useless model, a learned one and the truth. Answers
    of two worlds are paired; one that has a single answer gives it to all of the other's.
    """

    def between(share: Array, one: Any, other: Any) -> Any:
        return jax.tree.map(lambda a, b: (1 - share) * a + share * b, one, other)

    def predict(params: Mixed, observation: Array, action: Array) -> tuple[Array, Array]:
        means, deviations = zip(
            first.predict(params.first, observation, action),
            second.predict(params.second, observation, action),
            strict=True,
        )
        independent = jnp.hypot((1 - params.share) * deviations[0], params.share * deviations[1])
        return between(params.share, *means), independent

    def drawn(ask: str) -> Callable[[Mixed, Array, Array, Key], tuple[Array, Array]]:
        def draw(params: Mixed, observation: Array, action: Array, key: Key) -> tuple[Array, Array]:
            keys = jax.random.split(key)
            one = getattr(first, ask)(params.first, observation, action, keys[0])
            other = getattr(second, ask)(params.second, observation, action, keys[1])
            return between(params.share, one, other)

        return draw

    return Dynamics(predict, drawn("propose"), drawn("step"))


# ---- how sure a world is of its prediction: mean and deviation [M, ..., O + 1] -> [...] -------------------


def aleatoric(mean: Array, deviation: Array) -> Array:
    """``max_m |deviation_m|``, MOPO's penalty (Yu et al., NeurIPS 2020)."""
    del mean
    return jnp.linalg.norm(deviation, axis=-1).max(0)


def disagreement(mean: Array, deviation: Array) -> Array:
    """``max_m |mean_m - mean of all|`` over next observations: the ensemble penalty that MOPO's paper tries too."""
    del deviation
    next_observation = mean[..., :-1]
    return jnp.linalg.norm(next_observation - next_observation.mean(0), axis=-1).max(0)


UNCERTAINTY: dict[str, Callable[[Array, Array], Array]] = {
    "aleatoric": aleatoric,
    "disagreement": disagreement,
}
