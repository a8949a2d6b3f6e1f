"""What the members of a dynamics ensemble minimise, and the error by which they are judged.

Member ``i`` predicts the mean ``m`` and the log-variance ``v`` of ``y = (s' - s, r)`` and minimises

    L_i = mean_batch[ loss(m, v, y) ] + sum_layers decay / 2 |W|^2

plus, shared by all, ``0.01 (sum max v - sum min v)`` on the learned vectors between which ``v`` is clamped softly.
By default the loss of a row is the Gaussian likelihood, ``mean_dims[ (m - y)^2 exp(-v) + v ]``. The deterministic
variant has no ``v`` and minimises ``mean_dims[ (m - y)^2 ]``. Losses that ask a value function are in
`rl.dynamics.value_aware`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rl.dynamics import network
from rl.dynamics.config import Config
from rl.dynamics.rows import ANNOTATED_ROWS, Data, Rows, Sizes, chunk_rows
from rl.types import Array, Key, Params

_JUDGE_SEED = 1  # of what a check draws: the same at every check, so that they compare models alone


class Prediction(NamedTuple):
    """What each member says of its own rows."""

    mean: Array  # [E, B, O + 1] of (s' - s, r), in the units of the data
    log_variance: Array | None  # [E, B, O + 1]; None of a deterministic ensemble


# (context, predictions, rows [E, B, ...], key) -> [E, B], what each member pays for each of its rows
Cost = Callable[[Any, Prediction, Rows, Key], Array]

# (context, rows [E, B, ...] of each member's own batch, key) -> [E, B, O]
Weight = Callable[[Any, Rows, Key], Array]

# (context, next observations [N, O]) -> any arrays [N, ...]
Annotate = Callable[[Any, Array], Any]


class Loss(NamedTuple):
    """What is minimised, and what tells which of a member's checks was its best."""

    train: Cost  # its mean over a batch is minimised
    judge: Cost  # its mean over the held-out rows is the error of `rl.dynamics.network.Model`
    variances: bool | None = None  # whether members must predict them; None: as the configuration says
    # What follows from a row and the context alone: computed once in a fit, and given to the costs as `Rows.annotation`
    annotate: Annotate | None = None
    reads_context: bool = True


def errors(prediction: Prediction, rows: Rows) -> Array:
    """``(m - y)^2 exp(-v) + v``, or ``(m - y)^2`` of a deterministic ensemble, [E, B, O + 1]."""
    squared = jnp.square(prediction.mean - rows.outputs)
    if prediction.log_variance is None:
        return squared
    return squared * jnp.exp(-prediction.log_variance) + prediction.log_variance


def annotated(loss: Loss, context: Any, data: Data, sizes: Sizes) -> Data:
    """The data with `Rows.annotation` of all rows that can be learned from; zeros stand in the others."""
    annotate = loss.annotate
    if annotate is None:
        return data
    capacity = len(data.order)
    size = min(ANNOTATED_ROWS, capacity)
    example = jax.eval_shape(annotate, context, data.rows.next_observation[:size])
    blank = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype), example)

    def add(number: Array, annotation: Any) -> Any:
        place = data.order[(number * size + jnp.arange(size)) % data.size]
        new = annotate(context, data.rows.next_observation[place])
        return jax.tree.map(lambda x, y: x.at[place].set(y), annotation, new)

    annotation = jax.lax.fori_loop(0, sizes.row_chunks, add, blank)
    return data._replace(rows=data.rows._replace(annotation=annotation))


def judged_by_means(train: Cost, variances: bool | None = None, annotate: Annotate | None = None) -> Loss:
    """The loss that is minimised, and judged as if the predicted means were all there is.

    So are PETS, MBPO and RAVL: by the squared error. A likelihood would prefer whoever is surest of its variance.
    """

    def judge(context: Any, prediction: Prediction, rows: Rows, key: Key) -> Array:
        return train(context, prediction._replace(log_variance=None), rows, key)

    return Loss(train, judge, variances, annotate)


def _mean_error(context: Any, prediction: Prediction, rows: Rows, key: Key) -> Array:
    del context, key
    return errors(prediction, rows).mean(-1)


LIKELIHOOD = judged_by_means(_mean_error)._replace(reads_context=False)  # of an ordinary fit


def weighted(weight: Weight, variances: bool | None = None, annotate: Annotate | None = None) -> Loss:
    """The mean over state dimensions of weighted errors, plus the error of the reward, whose weight is 1.

    The sum of VaGraM's code (Voelcker et al. 2022): ``mean_d[ w_d e_d ] + e_r``. Weights depend on no prediction.
    """

    def train(context: Any, prediction: Prediction, rows: Rows, key: Key) -> Array:
        factor = weight(context, rows, key)
        chex.assert_equal_shape([factor, rows.next_observation])
        error = errors(prediction, rows)
        return (factor * error[..., :-1]).mean(-1) + error[..., -1]

    return judged_by_means(train, variances, annotate)


def objective(config: Config, loss: Loss, params: Params, batch: Rows, context: Any, key: Key) -> Array:
    """The sum over members, whose gradients do not meet but in the bounds that they share."""
    prediction = Prediction(*network.distribution(params["members"], params["bounds"], batch.inputs))
    shared = sum(
        0.5 * rate * jnp.square(layer["kernel"]).sum()
        for rate, layer in zip(config.decay, params["members"], strict=True)
    )
    if prediction.log_variance is not None:
        shared += 0.01 * (params["bounds"]["max"].sum() - params["bounds"]["min"].sum())
    return loss.train(context, prediction, batch, key).mean(1).sum() + shared


def holdout_error(
    config: Config, loss: Loss, params: Params, data: Data, sizes: Sizes, context: Any
) -> Array:
    """The error [E] by which every member is judged, mean over the held-out rows."""
    size = chunk_rows(config, len(data.order))
    key = jax.random.key(_JUDGE_SEED)

    def add(number: Array, total: Array) -> Array:
        place = number * size + jnp.arange(size)
        # The last chunk is filled with held-out rows that were counted: a loss may look at a batch as a whole.
        batch = jax.tree.map(lambda x: x[data.order[place % sizes.held]], data.rows)
        error = judged(loss, params, batch, context, jax.random.fold_in(key, number))
        return total + jnp.where(place < sizes.held, error, 0.0).sum(1)

    return jax.lax.fori_loop(0, sizes.chunks, add, jnp.zeros(_members(params))) / sizes.held


def judged(loss: Loss, params: Params, batch: Rows, context: Any, key: Key) -> Array:
    """What each member is judged by, [E, B], on rows [B, ...] that are the same for all of them."""
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (_members(params), *x.shape)), batch)
    prediction = Prediction(*network.distribution(params["members"], params["bounds"], batch.inputs))
    return loss.judge(context, prediction, batch, key)


def _members(params: Params) -> int:
    return len(params["members"][0]["bias"])
