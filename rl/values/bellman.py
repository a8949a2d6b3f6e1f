"""Backups: what a value should equal.

A backup here picks or mixes the *outputs* of a value head, so that any representation can be backed up:
``head.target(reward, discount, backup(...))`` is then the regression target. ``discount`` is always the
product of the agent's gamma and the environment's own discount (0 at termination), as in rlax.

Expectile backups are a weighted loss and live in `rl.values.losses`; the one-step TD backup is ``head.target``
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rl.types import Array, Key
from rl.values.heads import ValueHead

# ---- over actions: outputs [..., A, K] -> [..., K] ------------------------------------------------------


def at_action(outputs: Array, action: Array) -> Array:
    """Outputs [..., A, K] of the actions [...] that were taken, [..., K]."""
    chex.assert_shape(action, outputs.shape[:-2])
    return jnp.take_along_axis(outputs, action[..., None, None], axis=-2)[..., 0, :]


def max_action(head: ValueHead, outputs: Array) -> Array:
    """Outputs of the action with the largest value: the Q-learning backup (Watkins & Dayan 1992)."""
    return at_action(outputs, head.value(outputs).argmax(-1))


def double_q(head: ValueHead, outputs: Array, selector: Array) -> Array:
    """``outputs`` of the action that ``selector``, both [..., A, K], values most.

    Double DQN (van Hasselt et al. 2016): select with the online network, evaluate with the target.
    """
    chex.assert_equal_shape([outputs, selector])
    return at_action(outputs, head.value(selector).argmax(-1))


def soft_max_action(head: ValueHead, outputs: Array, temperature: float | Array) -> tuple[Array, Array]:
    """The entropy-regularised backup over discrete actions (Haarnoja et al. 2017; soft Q-learning).

    Returns:
      the mixture [..., K] of ``outputs`` [..., A, K] under the Boltzmann policy, and the policy's entropy
      bonus [...], ``temperature * H``. Their value and bonus sum to ``temperature * logsumexp(Q / temperature)``.
    """
    chex.assert_rank(temperature, 0)
    log_policy = jax.nn.log_softmax(head.value(outputs) / temperature)
    policy = jnp.exp(log_policy)
    return head.mix(outputs, policy), -temperature * (policy * log_policy).sum(-1)


def soft_advantage(outputs: Array, temperature: float | Array) -> Array:
    """``u - temperature * log sum_b exp(u_b / temperature)``: outputs [..., B] as soft advantages [..., B].

    Their exponentials, divided by the temperature, are the probabilities of a policy (Liu et al. 2025, section 4.1).
    """
    return temperature * jax.nn.log_softmax(outputs / temperature)


def of_bins(values: Array, bins: Array) -> Array:
    """The value [...] or [E, ...] of the chosen bin, from ``values`` [..., B] or [E, ..., B]; ``bins`` [...] int32."""
    return at_action(values[..., None], jnp.broadcast_to(bins, values.shape[:-1]))[..., 0]


def smooth_action(action: Array, key: Key, noise: float | Array, clip: float | Array) -> Array:
    """``action`` [..., D] plus clipped normal noise, inside [-1, 1]: TD3's target policy smoothing (equation 14)."""
    chex.assert_is_broadcastable(jnp.shape(noise), action.shape)
    chex.assert_is_broadcastable(jnp.shape(clip), action.shape)
    disturbance = jnp.clip(noise * jax.random.normal(key, action.shape), -clip, clip)
    return jnp.clip(action + disturbance, -1.0, 1.0)


# ---- over ensemble members: outputs [E, ..., K] -> [..., K] ----------------------------------------------


def per_member(x: Any, members: int) -> Any:
    """``x``, a tree of leaves [...], once for each of an ensemble's members, [E, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (members, *leaf.shape)), x)


def min_member(head: ValueHead, outputs: Array) -> Array:
    """Outputs of the member with the smallest value: clipped double Q (Fujimoto et al. 2018) for any E."""
    return _member(outputs, head.value(outputs).argmin(0))


def mean_member(head: ValueHead, outputs: Array) -> Array:
    """The members' equal mixture; its value is the mean of their values."""
    members = outputs.shape[0]
    return head.mix(
        jnp.moveaxis(outputs, 0, -2), jnp.full((*outputs.shape[1:-1], members), 1 / members, jnp.float32)
    )


def subset_min_member(head: ValueHead, outputs: Array, key: Key, subset: int) -> Array:
    """The smallest of ``subset`` members drawn without replacement, one draw for all (REDQ, Chen et al. 2021).

    Raises:
      ValueError: if ``subset`` is not between 1 and the number of members.
    """
    if not 1 <= subset <= outputs.shape[0]:
        raise ValueError(f"cannot draw {subset} of {outputs.shape[0]} ensemble members")
    return min_member(head, outputs[jax.random.permutation(key, outputs.shape[0])[:subset]])


# How critics become one value, by the names that settings give them.
MEMBERS: dict[str, Callable[[ValueHead, Array], Array]] = {"min": min_member, "mean": mean_member}
AGGREGATIONS = (*MEMBERS, "pessimistic")


def aggregate(
    head: ValueHead, outputs: Array, aggregation: str, deviations: float | Array
) -> tuple[Array, Array]:
    """Members as one.

    ``min`` and ``mean`` are those of `MEMBERS`; ``pessimistic`` is the mean less some standard deviations of the
    members' values (of the population, not of a sample). Outputs cannot be shifted for every head, but targets can:
    ``head.target(reward - discount * penalty, discount, outputs)``.

    Args:
      head: of the members.
      outputs: [E, ..., K].
      aggregation: one of `AGGREGATIONS`.
      deviations: number of standard deviations, where it is ``pessimistic``.

    Returns:
      outputs [..., K], and a penalty [...] in units of value, to be taken off their value.

    Raises:
      KeyError: an unknown aggregation.
    """
    if aggregation == "pessimistic":
        return mean_member(head, outputs), deviations * _deviation(head.value(outputs))
    together = MEMBERS[aggregation](head, outputs)
    return together, jnp.zeros(together.shape[:-1], jnp.float32)


def aggregate_values(values: Array, aggregation: str, deviations: float | Array = 0.0) -> Array:
    """The value [...] of `aggregate`, from values [E, ...]."""
    if aggregation == "min":
        return values.min(0)
    return values.mean(0) - (deviations * _deviation(values) if aggregation == "pessimistic" else 0.0)


def _deviation(values: Array) -> Array:
    """The standard deviation [...] of members' values [E, ...]; where all are equal its derivative is 0."""
    variance = values.var(0)
    differ = variance > 0
    # The root has no derivative at 0, and a factor of 0 would not hide that: it is taken of 1 there.
    return jnp.where(differ, jnp.sqrt(jnp.where(differ, variance, 1.0)), 0.0)


def _member(outputs: Array, index: Array) -> Array:
    return jnp.take_along_axis(outputs, index[None, ..., None], axis=0)[0]
