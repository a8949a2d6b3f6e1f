"""Values in a token MDP: which state an action token leads to, and sums over a vocabulary in small pieces.

With a causal model, the features at index ``i`` have seen the tokens up to ``i``: they describe the state in which
token ``i + 1`` is the action. Everything here is therefore indexed by *state*, ``S = T - 1`` columns of them, and
``next`` may also be the last index, ``T - 1``: the state after an episode that was cut off.

Nothing here is quadratic in the tokens, and nothing holds [B, T, A] for a vocabulary of ``A``, or computes it for
columns that no loss asks about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rl.types import Array, TokenBatch
from rl.values.heads import ValueHead

# ---- the token MDP -----------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """The decisions in a `TokenBatch`, one column [B, S] per state; only where ``taken`` do they mean anything."""

    action: Array  # int32, the token that follows
    taken: Array  # bool, whether it was the agent's
    reward: Array  # float32
    discount: Array  # float32 in {0, 1}
    imitate: Array  # float32
    next: Array  # int32 in [0, T): the next state, that of the episode's next action or of its end
    has_next: Array  # bool: an action was logged in the next state


def steps(batch: TokenBatch) -> Steps:
    """The decisions of ``batch`` [B, T], found by one reverse scan over its columns.

    The state that follows an action is that of the episode's next action, with all that was read in between
    (section 2 of Snell et al. 2022); after the last action it is the end of the episode, which a target needs
    only where the episode was cut off. An episode's first token is never an action: it has no state.
    """
    length = batch.tokens.shape[1]
    index = jnp.arange(length)
    same = (batch.segment[:, 1:] == batch.segment[:, :-1]) & (batch.segment[:, 1:] > 0)
    taken = batch.is_action[:, 1:] & same
    no = jnp.zeros_like(taken[:, :1])
    decides = jnp.concatenate([taken, no], 1)
    ends = jnp.concatenate([~same, ~no], 1)
    state = jax.lax.cummin(jnp.where(decides | ends, index, length - 1), axis=1, reverse=True)[:, 1:]
    return Steps(
        action=batch.tokens[:, 1:],
        taken=taken,
        reward=batch.reward[:, 1:],
        discount=batch.discount[:, 1:],
        imitate=batch.imitate[:, 1:],
        next=state,
        has_next=jnp.take_along_axis(decides, state, 1),
    )


def visited(steps: Steps) -> Array:
    """The states [B, T] that a loss asks about: those of decisions, and those where an episode was cut off."""
    decides = jnp.pad(steps.taken, ((0, 0), (0, 1)))
    row = jnp.arange(len(decides))[:, None]
    return decides.at[row, steps.next].max(steps.taken & (steps.discount > 0))


def at(values: Array, index: Array) -> Array:
    """``values`` [B, T, ...] at the columns ``index`` [B, S], as [B, S, ...]."""
    return jnp.take_along_axis(values, index.reshape(*index.shape, *(1,) * (values.ndim - 2)), axis=1)


def mean(values: Array, weight: Array) -> Array:
    """The mean of ``values`` under ``weight``, both [B, S]: [], 0 where there is no weight."""
    chex.assert_equal_shape([values, weight])
    weight = weight.astype(jnp.float32)
    return jnp.where(weight > 0, values * weight, 0.0).sum() / jnp.maximum(weight.sum(), 1e-8)


def returns_to_go(steps: Steps, discount: float | Array) -> Array:
    """The discounted return from every decision to the end of its episode, [B, S]; 0 elsewhere.

    One reverse scan. An episode that was cut off counts as if nothing followed.
    """

    def backward(future: Array, step: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, gamma, taken, goes_on = step
        total = reward + gamma * jnp.where(goes_on, future, 0.0)
        return jnp.where(taken, total, future), jnp.where(taken, total, 0.0)

    columns = (steps.reward, discount * steps.discount, steps.taken, steps.has_next)
    start = jnp.zeros(steps.reward.shape[0])
    _, totals = jax.lax.scan(backward, start, jax.tree.map(jnp.transpose, columns), reverse=True)
    return totals.T


def at_tokens(steps: Steps, values: Array) -> Array:
    """``values`` [B, S] of decisions at the tokens that were decided on, [B, T]; 0 at all others."""
    return jnp.pad(jnp.where(steps.taken, values, 0.0), ((0, 0), (1, 0)))


def per_episode(values: Array, segment: Array, episodes: int) -> Array:
    """Sums of ``values`` [B, T] over each of the row's ``episodes`` (a Python number), [B, episodes]."""
    chex.assert_equal_shape([values, segment])
    number = 1 + jnp.arange(episodes)
    return jnp.where(segment[:, None] == number[:, None], values[:, None], 0.0).sum(-1)


class TokenValues(NamedTuple):
    """What an agent thinks of the actions in a batch, [B, T] at the tokens themselves, 0 at all others."""

    score: Array  # what an action adds to its text's score, by which texts are ranked
    q: Array
    v: Array  # of the state in which the token was chosen


# ---- over a vocabulary -------------------------------------------------------------------------------------------


class VocabularyStats(NamedTuple):
    """What a loss needs of the logits [B, S, A] over a vocabulary, float32."""

    chosen: Array  # [B, S, N], of N tokens
    top: Array  # [B, S], the largest
    best: Array  # [B, S] int32, which token has it
    total: Array  # [B, S], logsumexp of all


def vocabulary_stats(
    logits: Callable[[Array], Array],
    features: Array,
    token: Array,
    chunk: int = 128,
    needed: Array | None = None,
) -> VocabularyStats:
    """`VocabularyStats` of ``logits(features)``, never held for more than ``chunk`` columns.

    The backward pass computes each chunk's logits again. Peak memory is B * chunk * A floats instead of
    B * S * A for each array that the plain form keeps (logits, softmax and their gradients).

    Args:
      logits: features [B, C, D] -> [B, C, A].
      features: [B, S, D].
      token: [B, S, N] int32, the tokens whose logits are ``chosen``.
      chunk: columns at a time.
      needed: [B, S] bool, the columns that are asked about, as in `in_chunks`.
    """

    def statistics(features: Array, token: Array) -> VocabularyStats:
        all_logits = logits(features)
        # What a caller does not use of these is not computed.
        return VocabularyStats(
            chosen=jnp.take_along_axis(all_logits, token, -1),
            top=all_logits.max(-1),
            best=all_logits.argmax(-1).astype(jnp.int32),
            total=jax.nn.logsumexp(all_logits, -1),
        )

    return in_chunks(statistics, chunk, features, token, needed=needed)


def in_chunks(function: Callable[..., Any], chunk: int, *arrays: Array, needed: Array | None = None) -> Any:
    """``function(*arrays)`` for a function that treats columns alike, computed ``chunk`` columns at a time.

    Its intermediate results are computed again in the backward pass. Rows stay whole, so that a batch split over
    devices stays split.

    Args:
      function: of arrays [B, C, ...] to a pytree of arrays [B, C, ...].
      chunk: columns at a time.
      *arrays: [B, S, ...].
      needed: [B, S] bool, the columns that are asked about; what is returned for others means nothing. They are
        computed first, and pieces that hold no more of them are left out: the work is that of the row with most of
        them, rounded up to ``chunk``. By default all columns are.
    """
    function = jax.checkpoint(function)
    length = arrays[0].shape[1]
    if length <= chunk:
        return function(*arrays)
    count = -(-length // chunk)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, count * chunk - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * chunk, *x.shape[3:])[:, :length]

    def run(function: Callable[..., Any], *arrays: Array) -> Any:
        return jax.tree.map(join, jax.lax.map(lambda pieces: function(*pieces), jax.tree.map(split, arrays)))

    if needed is None:
        return run(function, *arrays)

    # Without this outer checkpoint the branch would keep what it closes over, parameters too, once for every piece.
    @jax.checkpoint
    def unless_idle(needed: Array, *pieces: Array) -> Any:
        def nothing(*pieces: Array) -> Any:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(function, *pieces))

        return jax.lax.cond(needed.any(), function, nothing, *pieces)

    first = jnp.argsort(~needed, axis=1, stable=True)
    outputs = run(unless_idle, *(at(x, first) for x in (needed, *arrays)))
    back = jnp.argsort(first, axis=1)
    return jax.tree.map(lambda x: at(x, back), outputs)


# ---- values from logits ------------------------------------------------------------------------------------------


def dueling_loss(
    head: ValueHead, outputs: Array, advantage: Array, reward: Array, discount: Array, next_outputs: Array
) -> Array:
    """The loss [...] of ``Q = A + V`` against ``r + d V'``, for a V in any representation.

    V's head learns the target ``r - A + d V'``, and A the squared error of ``A + V``; each takes the other as
    given. For the scalar head this has exactly the gradient of ``(A + V - r - d V')^2``, and for a categorical one
    the values lie where V's distribution can represent them. The number returned is V's loss alone.

    Args:
      head: V's.
      outputs: [..., K] of the state.
      advantage: [...].
      reward: [...]; an advantage at the next state, times the discount, belongs in it.
      discount: [...].
      next_outputs: [..., K].
    """
    target = head.target(reward - jax.lax.stop_gradient(advantage), discount, next_outputs)
    scalar = reward + discount * head.value(next_outputs)
    error = advantage + jax.lax.stop_gradient(head.value(outputs) - scalar)
    # It adds its gradient and not its number, which V's loss holds already.
    square = jnp.square(error)
    return head.loss(outputs, target) + square - jax.lax.stop_gradient(square)
