"""Losses that are not a head's own: weights, regularisers and policy objectives.

All are elementwise or reduce the axes they name. The mean over the batch is the agent's, but for `implicit_value`,
`critics` and `ddpg_bc`, which several agents share whole, and for `gumbel_weight`, `binary_nce` and
`symmetric_info_nce`, which compare the rows of a batch with each other.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from rl.types import Array
from rl.values import bellman
from rl.values.heads import ValueHead


def expectile_weight(error: Array, expectile: float | Array) -> Array:
    """``|expectile - 1(error < 0)|``, elementwise and without gradient, for ``error = target - prediction``.

    Times a squared error this is the expectile loss of IQL (Kostrikov et al. 2022, equation 5). Times the
    loss of *any* head that keeps expectations (all but ``quantile``, which is near) it has the same fixed
    point: the minimiser's value is the average of the targets under these weights, which is the
    definition of an expectile.
    """
    chex.assert_is_broadcastable(jnp.shape(expectile), error.shape)
    return jax.lax.stop_gradient(jnp.abs(expectile - (error < 0)))


def gumbel_weight(error: Array, temperature: float | Array, cap: float = 7.0) -> Array:
    """``(e^z - 1) / z`` with ``z = min(error / temperature, cap)``, over all of ``error`` and without gradient.

    Times a squared error this has the gradient of Extreme Q-learning's Gumbel regression, ``e^z - z - 1`` (Garg et al.
    2023), but for a constant factor. Times the loss of *any* head that keeps expectations (all but ``quantile``, which
    is near) it has the same fixed point on one batch, the soft maximum of the targets y, ``temperature * log mean
    exp(y / temperature)``, as long as no z is above the cap. As in the authors' code weights are divided by ``e^z`` of
    the batch's largest z (of -1, if that is larger), so that one row cannot blow up a step. Ratios stay within a
    batch; over random batches those with the largest targets count for less, and V comes to lie below the soft maximum
    over all data: for normal targets with a deviation of one temperature by 0.02 temperatures with batches of 256 and
    0.08 with 32, with a deviation of two by 0.19 and 0.57. In that code a row whose z is above the cap has no gradient
    at all; here it keeps the weight of the cap.
    """
    chex.assert_is_broadcastable(jnp.shape(temperature), error.shape)
    z = jnp.minimum(error / temperature, cap)
    ratio = jnp.where(z == 0, 1.0, jnp.expm1(z) / jnp.where(z == 0, 1.0, z))
    return jax.lax.stop_gradient(ratio * jnp.exp(-jnp.maximum(z.max(), -1.0)))


def implicit_value(
    head: ValueHead, outputs: Array, slow: Array, target: Array, weigh: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """``L_V = E[ w(u) loss_V(y) ]`` with ``u = Q - V``: IQL's (Kostrikov et al. 2022, equation 5), by any weights.

    Args:
      head: of the values.
      outputs: of V, [B, K].
      slow: outputs of the target critics at the logged actions, [B, K].
      target: of V, by any head's encoding of ``slow`` (`rl.values.heads.same_target`).
      weigh: w, [B] to [B]: `expectile_weight` or `gumbel_weight`.

    Returns:
      the loss [] and u [B].
    """
    advantage, each = head.value(slow) - head.value(outputs), head.loss(outputs, target)
    chex.assert_equal_shape([advantage, each])
    return (weigh(advantage) * each).mean(), advantage


def critics(head: ValueHead, outputs: Array, target: Array) -> Array:
    """``sum_i E[ loss_Qi(y) ]`` [] of an ensemble's outputs [E, B, K] with one target of the head for all."""
    each = jax.vmap(head.loss, (0, None))(outputs, target)
    chex.assert_shape(each, outputs.shape[:-1])
    return each.mean(1).sum()


def awr_weight(advantage: Array, temperature: float | Array, cap: float = 100.0) -> Array:
    """``min(exp(temperature * advantage), cap)``, elementwise and without gradient.

    Advantage-weighted regression (Peng et al. 2019) as IQL uses it (equation 7); the cap is that of its code.
    """
    chex.assert_is_broadcastable(jnp.shape(temperature), advantage.shape)
    # Capping the exponent, not the result, keeps inf out of the graph.
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(temperature * advantage, jnp.log(cap))))


def q_scale(q: Array) -> Array:
    """``1 / mean |Q|`` over all axes, without gradient: TD3+BC's normaliser (Fujimoto & Gu 2021, equation 5)."""
    return jax.lax.stop_gradient(1.0 / jnp.maximum(jnp.abs(q).mean(), 1e-6))


def ddpg_bc(q: Array, log_prob: Array, weight: float | Array) -> Array:
    """``- E[Q] / E|Q| - weight E[log pi(a | s)]``: DDPG with behaviour cloning, [].

    The policy extraction of Park et al. (2024, "Is value learning really the main bottleneck in offline RL?"), which is
    that of TD3+BC for a stochastic policy.

    Args:
      q: [B] values of the policy's own actions.
      log_prob: [B] its log probabilities of the logged ones.
      weight: of cloning.
    """
    chex.assert_equal_shape([q, log_prob])
    return -q_scale(q) * q.mean() - weight * log_prob.mean()


# ---- contrastive RL: logits [..., B, B] of row i's state and action with row j's goal -------------------------


def binary_nce(logits: Array) -> Array:
    """Logistic regression of "goal ``j`` is that of row ``i``", the mean over all pairs, [...].

    Binary noise-contrastive estimation (Eysenbach et al. 2022, equation 3) with all other goals of the batch as
    negatives, as in the code of OGBench.
    """
    is_pair = jnp.eye(logits.shape[-1], dtype=bool)
    return jax.nn.softplus(jnp.where(is_pair, -logits, logits)).mean((-2, -1))


def symmetric_info_nce(logits: Array) -> Array:
    """Cross-entropy of finding each row's goal, and each goal's row, among all of the batch: their mean, [...].

    InfoNCE (van den Oord et al. 2018) in both directions, as JaxGCRL (Bortkiewicz et al. 2025) has it but for a factor.
    """
    pair = jnp.diagonal(logits, axis1=-2, axis2=-1)
    among = jax.nn.logsumexp(logits, -1) + jax.nn.logsumexp(logits, -2)
    return (0.5 * among - pair).mean(-1)


# ---- CQL (Kumar et al. 2020): each returns the term that is pushed down, before ``- Q(s, a_data)`` --------


def cql_h(values: Array, log_proposal: Array) -> Array:
    """CQL(H), equation 4, from sampled actions: ``log mean_i exp(Q_i - log_proposal_i)``, [...].

    The importance-sampled ``log integral exp Q`` of the paper's appendix F. Its code takes the sum over
    the samples, not the mean: a constant, without effect on gradients, that shifts the Lagrange threshold.

    Args:
      values: [..., N] values of the sampled actions.
      log_proposal: [..., N] log density of each under what drew it. All ``A`` discrete actions with
        ``-log A`` give the exact ``log sum_a exp Q``.
    """
    chex.assert_equal_shape([values, log_proposal])
    return jax.nn.logsumexp(values - log_proposal, axis=-1) - jnp.log(values.shape[-1])


def cql_rho(values: Array, log_prior: Array) -> Array:
    """CQL(rho): the mean of Q under ``prior * exp Q``, normalised, over the last axis of ``values`` [..., N].

    The maximiser of ``E_mu Q - KL(mu, prior)`` (appendix A of the paper, the variant for large action
    spaces with the previous policy as prior). The weights carry no gradient: mu is held fixed while Q is
    pushed down. Samples drawn from the prior have ``log_prior`` 0.
    """
    chex.assert_equal_shape([values, log_prior])
    weights = jax.lax.stop_gradient(jax.nn.softmax(values + log_prior, axis=-1))
    return (weights * values).sum(-1)


def cql_var(values: Array, log_prior: Array) -> Array:
    """CQL(var): the standard deviation of Q under the prior, over the last axis of ``values`` [..., N].

    The variance-regularised variant of the paper's appendix A; the state density in its denominator is
    folded into the agent's weight. Here the data's own Q is *not* subtracted: it has cancelled already.
    """
    chex.assert_equal_shape([values, log_prior])
    prior = jax.nn.softmax(log_prior, axis=-1)
    mean = (prior * values).sum(-1, keepdims=True)
    # The root has no gradient at 0; all-equal values need none.
    return jnp.sqrt((prior * jnp.square(values - mean)).sum(-1) + 1e-12)


# ---- ARSQ (Liu et al. 2025): behaviour cloning by the advantages of one token's bins ----------------------------


def advantage_margin(advantage: Array, logged: Array, clip: float | Array) -> Array:
    """The mean of ``max(A(o) - A(b), clip)`` over all bins ``o`` but the logged ``b``, [...].

    Equation 15, whose sum is a mean in the authors' code. Where ``A(b)`` leads by at least ``-clip`` the gradient is 0.

    Args:
      advantage: [..., B] of all bins, or [E, ..., B].
      logged: [...] int32, the bin ``b`` that was logged.
      clip: the least value of each difference.
    """
    other, logged_advantage = _other_bins(advantage, logged)
    behind = jnp.maximum(advantage - logged_advantage[..., None], clip)
    return jnp.where(other, behind, 0.0).sum(-1) / (advantage.shape[-1] - 1)


def advantage_cql(advantage: Array, logged: Array, clip: float | Array) -> Array:
    """``max(log sum_o exp A(o) - A(b), clip)`` over all bins ``o`` but the logged ``b``, [...] (equation 22).

    The arguments are those of `advantage_margin`. The sum's temperature is 1, whatever that of the advantages is.
    """
    other, logged_advantage = _other_bins(advantage, logged)
    return jnp.maximum(jax.nn.logsumexp(advantage, axis=-1, where=other) - logged_advantage, clip)


def _other_bins(advantage: Array, logged: Array) -> tuple[Array, Array]:
    """Which bins [..., B] were not logged, and the value [...] of the one that was."""
    chex.assert_is_broadcastable(logged.shape, advantage.shape[:-1])
    other = jnp.arange(advantage.shape[-1]) != jnp.broadcast_to(logged, advantage.shape[:-1])[..., None]
    return other, bellman.of_bins(advantage, logged)


def gradient_diversity(gradients: Array) -> Array:
    """EDAC's diversity loss [...] from action gradients [E, ..., D] of the members (An et al. 2021, equation 3).

    ``sum_{i != j} <g_i, g_j> / (E - 1)`` over unit gradients, both orders counted, as in the paper's code.

    Raises:
      ValueError: fewer than two members.
    """
    members = gradients.shape[0]
    if members < 2:
        raise ValueError("gradient diversity needs at least two ensemble members")
    # A gradient of length 0 has no direction, and its length no derivative.
    square = jnp.square(gradients).sum(-1, keepdims=True)
    unit = jnp.where(square > 1e-20, gradients * jax.lax.rsqrt(jnp.maximum(square, 1e-20)), 0.0)
    # sum_{i != j} <g_i, g_j> = |sum_i g_i|^2 - sum_i |g_i|^2: no [E, E] matrix.
    together = jnp.square(unit.sum(0)).sum(-1)
    return (together - jnp.square(unit).sum((0, -1))) / (members - 1)
