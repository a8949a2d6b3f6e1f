"""Losses of a dynamics model that ask a value function which errors matter.

With ``e = m - (s' - s)`` a member's error, ``e_r`` that of its reward, ``V_c`` one of C value functions and
``g_c = dV_c/ds'`` at the TRUE next observation, the loss of a row is ``e_r^2`` plus, where O is the number of
observation dimensions,

    mse               sum_d e_d^2 / O
    standardised      sum_d w_d e_d^2 / O, w_d one over the variance of s' - s in a batch, over its mean: asks no value
    vagram            mean_c sum_d g_cd^2 e_d^2 / O             (Voelcker et al., ICLR 2022: bounded, diagonal)
    taylor            mean_c (g_c . e)^2 / O                    (the same paper: rank one, at most O times vagram)
    vaml              mean_c (V_c(s' + e) - V_c(s'))^2 / O      (Farahmand et al. 2017, by value difference)
    calibrated        vaml of sampled predictions, less the variance that sampling adds (arXiv 2505.22772)
    value_weighted    mean_c |V_c(s')| sum_d e_d^2 / O          (a variant in the official code of VaGraM)
    anisotropic       vagram, its weights moved to other dimensions by one permutation (`Context.permutation`)
    anisotropic_rows  vagram, the weights of every row permuted anew
    mle               the Gaussian likelihood (`rl.dynamics.loss.LIKELIHOOD`), which asks no value

The reward's error has weight 1 against the mean over dimensions of the weighted state errors, as in the official code
of VaGraM; ``mse`` is VaGraM with weights 1, so that the two differ in nothing else. Elsewhere that code has other
factors: no 1 / O in ``taylor``, the mean over all O + 1 outputs in the plain error of the first epoch, and
``value_weighted`` divided by the sum of |V| over a batch, its critics and members.

There are two states of that code. That of the paper's time takes gradients at ``s' - s`` in place of ``s'``. Today's
takes them at ``s'``, and has other faults: it adds up the gradients of the four critics, which makes the last of four
equal weights 16 times and their mean 7.5 times too large; after the first epoch it gives all members the gradients of
member 0's rows; it judges held-out rows by gradients of training rows; and its condition for clipping gradients is
hardly ever met. None of this is copied: gradients are those of each critic alone, at ``s'``, of each member's own rows,
and are clipped as in the paper's time (``clip_quantile``).

**Units.** Members predict ``s' - s`` in the units of the data, whatever their inputs are scaled by, and gradients are
with respect to ``s'`` in these units. ``g_d e_d`` is then in units of the value, and no rescaling of an observation
changes ``vagram``, ``taylor`` or ``vaml`` where nothing is clipped or normalised, nor, but for a factor,
``standardised``. It does change ``mse``, the norm by which gradients are clipped, and the mean by which weights are
normalised. So where dimensions have different scales, VaGraM may gain over ``mse`` by its units alone: compare it with
``standardised``, too.

**Cost.** Values and gradients at ``s'`` depend on no prediction. A fit computes them once for every row
(`rl.dynamics.loss.Loss.annotate`; C (O + 1) numbers a row), from the values that it is given and for the rows that
it has, and keeps none of them for the next fit. Members look them up by row. What depends on a batch, clipping and
normalising, is done for each member's own batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl import acting
from rl.dynamics import loss
from rl.dynamics.loss import Annotate, Cost, Loss, Prediction
from rl.dynamics.rows import Rows
from rl.settings import require_choice
from rl.types import Array, Key, Learner

# (state, observations [..., O]) -> [C, ...], C value functions, each of one row alone
Values = Callable[[Any, Array], Array]

_JUDGE_SAMPLES = 16  # of each prediction at a check


class Context(NamedTuple):
    """What a fit is given (`rl.dynamics.ensemble.make`). With a leading axis [S] for S keys; they may share ``plain``.

    All of it is traced: what changes between the fits of a run compiles nothing, as long as types and shapes stay.
    """

    state: Any  # what `Values` reads
    plain: Any = 0.0  # [] how much plain error is added: 1 in VaGraM's first epoch, 0 after it
    # [O] int32, of the loss anisotropic: whose weight each dimension gets; see `permutations`
    permutation: Any = None


class Annotation(NamedTuple):
    """What the value functions say of the true next observation of a row."""

    value: Array  # [..., C]
    gradient: Array  # [..., C, O], per unit of the observation


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of all losses that ask a value."""

    normalise: bool = True  # divide weights by their mean over a member's batch; VaGraM's code does not
    clip_quantile: float = 0.95  # gradients of norms beyond this quantile of the batch's get it; 1: none
    floor: float = 0.0  # how much plain error is always added; normalised weights are 1 on average
    samples: int = 2  # samples of each prediction by a Gaussian ensemble, for `calibrated` and `vaml`


def make(name: str, values: Values | None, settings: Settings = Settings()) -> Loss:
    """The loss of that name, for `rl.dynamics.ensemble.make`; its context is a `Context`.

    Args:
      name: one of `LOSSES`.
      values: that are asked; the losses in `VALUE_FREE` need none.
      settings: how.

    Raises:
      ValueError: an unknown name, a setting out of range, or no values where they are needed.
    """
    require_choice("model_loss", name, LOSSES)
    _check(name, settings)
    if name in VALUE_FREE:
        return VALUE_FREE[name]
    if values is None:
        raise ValueError(
            f"the model loss {name} asks a value function and was given none: pass values, as "
            f"value_aware.of_learner makes them, or choose {' or '.join(VALUE_FREE)}"
        )
    part = VALUE_AWARE[name](values, settings)
    train, judge = (
        _with_plain(cost, plain, settings.floor)
        for cost, plain in ((part.train, _PLAIN.train), (part.judge, _PLAIN.judge))
    )
    return Loss(train, judge, part.variances, _annotator(name, values))


def is_deterministic(name: str) -> bool:
    """Whether the loss of that name is meant for an ensemble that predicts means alone."""
    return name not in ("mle", "calibrated")


def permutations(key: Key, size: int) -> Array:
    """Of ``size`` dimensions, for `Context.permutation`: [O] int32, or [S, O] for keys [S]."""
    draw = lambda key: jax.random.permutation(key, size)
    return jax.vmap(draw)(key) if key.ndim else draw(key)


def of_learner(learner: Learner) -> Values:
    """The learner's critics, online and target ones, at the action that it would take; its state is that of `Values`.

    The paper's code has four value functions, two online and two target critics of SAC at the policy's mean action, and
    lets no gradient flow through the action. So does this: the action is ``learner.act``'s. An agent that draws it
    draws from the same noise in every row, or a row's value would depend on its place. Target critics are
    ``learner.critics`` of the state with its targets in place of its parameters; where the learner has no targets, its
    critics are all.

    Raises:
      ValueError: the learner has no critics.
    """
    critics = learner.critics
    if critics is None:
        raise ValueError(
            "this agent has no critics whose values could weigh a model's errors: choose another"
        )

    def values(state: Any, observation: Array) -> Array:
        act = lambda row: learner.act(state, row[None], jax.random.key(0))[0]
        rows = jax.vmap(act)(observation.reshape(-1, observation.shape[-1]))
        action = jax.lax.stop_gradient(rows.reshape(*observation.shape[:-1], *rows.shape[1:]))
        online = critics(state, observation, action)
        if not state.target:
            return online
        target = critics(acting.at_targets(state), observation, action)
        return jnp.concatenate([online, target])

    return values


# ---- what the values say of a row ---------------------------------------------------------------------------


def annotate(values: Values, state: Any, observation: Array) -> Annotation:
    """Values and their gradients at observations [..., O]; of each function and row alone.

    Raises:
      ValueError: the values have another shape than [C, ...].
    """

    def total(observation: Array) -> tuple[Array, Array]:
        value = values(state, observation)
        if value.ndim == 0 or value.shape[1:] != observation.shape[:-1]:
            wanted = ", ".join(["C", *map(str, observation.shape[:-1])])
            raise ValueError(
                f"values of observations {observation.shape} must have the shape [{wanted}], one row for each of C "
                f"value functions, not {list(value.shape)}"
            )
        return value.reshape(len(value), -1).sum(1), value

    gradient, value = jax.jacrev(total, has_aux=True)(observation)
    return Annotation(jnp.moveaxis(value, 0, -1), jnp.moveaxis(gradient, 0, -2))


def clip(gradient: Array, quantile: float) -> Array:
    """Gradients [..., B, C, O] of larger norm than that quantile of the batch's B norms are scaled down to it."""
    norm = jnp.linalg.norm(gradient, axis=-1, keepdims=True)
    limit = jnp.quantile(norm, quantile, axis=-3, keepdims=True)
    return gradient * jnp.where(norm > limit, limit / jnp.where(norm > 0, norm, 1.0), 1.0)


def _annotator(name: str, values: Values) -> Annotate:
    def of(context: Context, next_observation: Array) -> Annotation:
        if not isinstance(context, Context):
            raise ValueError(
                f"the model loss {name} asks a value function, whose state is missing: "
                f"fit(..., context=value_aware.Context(state)), not a context of type {type(context).__name__}"
            )
        return annotate(values, context.state, next_observation)

    return of


def _gradient(settings: Settings, rows: Rows) -> Array:
    """[E, B, C, O] of the batch, clipped."""
    gradient = rows.annotation.gradient
    return clip(gradient, settings.clip_quantile) if settings.clip_quantile < 1 else gradient


def _unit(settings: Settings, weight: Array) -> Array:
    """What weights [E, B, O] are divided by, [E, 1, 1]: each member's mean. 1 where there is nothing to divide."""
    mean = weight.mean((1, 2), keepdims=True)
    return jnp.where(mean > 0, mean, 1.0) if settings.normalise else jnp.ones_like(mean)


# ---- weighted squares ---------------------------------------------------------------------------------------


def squared_gradients(settings: Settings, context: Context, rows: Rows, key: Key) -> Array:
    """VaGraM's weights ``mean_c g_cd^2`` [E, B, O], of clipped gradients."""
    del context, key
    weight = jnp.square(_gradient(settings, rows)).mean(-2)
    return weight / _unit(settings, weight)


def permuted(settings: Settings, context: Context, rows: Rows, key: Key) -> Array:
    """VaGraM's, each given to another dimension, always the same: as uneven, and as constant, but not of the value.

    A model of little capacity is drawn to few dimensions as by VaGraM, only that chance chose them. This is the control
    that tells what a value knows from what uneven weights do. One permutation serves a whole run: with another in every
    fit a run would weigh all dimensions alike in the end. Draw one per seed, as a single one may be lucky.
    """
    if context.permutation is None:
        raise ValueError(
            "the model loss anisotropic needs one permutation of the dimensions for the whole run: "
            "Context(state, plain, value_aware.permutations(key, observation size))"
        )
    return jnp.take(squared_gradients(settings, context, rows, key), context.permutation, -1)


def permuted_by_row(settings: Settings, context: Context, rows: Rows, key: Key) -> Array:
    """VaGraM's, permuted anew for every row and update: on average all dimensions of a row weigh the same.

    What is left of VaGraM is how much a whole row counts, and the noise of uneven weights.
    """
    weight = squared_gradients(settings, context, rows, key)
    return jax.random.permutation(key, weight, -1, independent=True)


def inverse_variances(context: Any, rows: Rows, key: Key) -> Array:
    """One over the variance of each dimension of s' - s in a member's batch, on average 1; 0 where it is constant.

    That is, where it varies by no more than s' is rounded: else a clock would have all the weight.
    """
    del context, key
    variance = rows.outputs[..., :-1].var(-2, keepdims=True)
    rounding = jnp.finfo(variance.dtype).eps * jnp.abs(rows.next_observation).max(-2, keepdims=True)
    varies = variance > jnp.square(4 * rounding)
    weight = jnp.where(varies, 1 / jnp.where(varies, variance, 1.0), 0.0)
    weight /= jnp.maximum(weight.mean(-1, keepdims=True), jnp.finfo(weight.dtype).tiny)
    return jnp.broadcast_to(weight, rows.next_observation.shape)


def absolute_values(settings: Settings, context: Context, rows: Rows, key: Key) -> Array:
    """``mean_c |V_c(s')|`` in every dimension."""
    del context, key
    weight = jnp.abs(rows.annotation.value).mean(-1, keepdims=True)
    return jnp.broadcast_to(weight / _unit(settings, weight), rows.next_observation.shape)


def _by(weight: Callable[[Settings, Context, Rows, Key], Array]) -> Callable[[Values, Settings], Loss]:
    def build(values: Values, settings: Settings) -> Loss:
        del values
        return loss.weighted(lambda context, rows, key: weight(settings, context, rows, key))

    return build


# ---- squares of values --------------------------------------------------------------------------------------


def taylor(values: Values, settings: Settings) -> Loss:
    """``mean_c (g_c . e)^2 / O``: an error orthogonal to all gradients costs nothing."""
    del values

    def cost(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
        error = (prediction.mean - rows.outputs)[..., None, :-1]
        first_order = jnp.square((_gradient(settings, rows) * error).sum(-1)).mean(-1)
        return _per_dimension(settings, rows, first_order)

    return _with_reward(cost, cost, variances=False)


def vaml(values: Values, settings: Settings) -> Loss:
    """``mean_c E (V_c(s^) - V_c(s'))^2 / O``, s^ the mean of a deterministic member or a sample of a Gaussian one.

    Of a Gaussian member it is ``(E V_c(s^) - V_c(s'))^2 + Var V_c(s^)`` in expectation: its minimum has the variance of
    the value, not only the gap of its means, driven to 0.
    """

    def cost(samples: int) -> Cost:
        def of(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
            gap = value_gaps(values, context.state, prediction, rows, key, samples)
            return _per_dimension(settings, rows, jnp.square(gap).mean((0, 1)))

        return of

    return _with_reward(cost(settings.samples), cost(_JUDGE_SAMPLES))


def calibrated(values: Values, settings: Settings) -> Loss:
    """`vaml` of a Gaussian member less the variance of the value, so that its variance is not driven to 0.

    Its expectation is ``(E V_c(s^) - V_c(s'))^2 / O``: the least, over rows of one (s, a), where ``E V_c(s^)`` is the
    mean of ``V_c(s')``. See `without_variance`. It fits the mean value and nothing else. For a linear value the
    variance gets no gradient in expectation, and the likelihood of a `Settings.floor` must fit it.

    Judged by ``(mean_k V_c(s^_k) - V_c(s'))^2`` of 16 samples, which unlike the loss is never negative; it exceeds the
    loss by a sixteenth of the variance on average.
    """

    def cost(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
        gap = value_gaps(values, context.state, prediction, rows, key, settings.samples)
        return _per_dimension(settings, rows, without_variance(gap).mean(0))

    def judge(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
        gap = value_gaps(values, context.state, prediction, rows, key, _JUDGE_SAMPLES)
        return _per_dimension(settings, rows, jnp.square(gap.mean(1)).mean(0))

    return _with_reward(cost, judge, variances=True)


def value_gaps(
    values: Values, state: Any, prediction: Prediction, rows: Rows, key: Key, samples: int
) -> Array:
    """``V_c(s^_k) - V_c(s')`` [C, K, E, B] for K independent samples of the prediction, K = 1 of a deterministic one.

    Samples are reparameterised: their gradient reaches the mean and the log-variance.
    """
    predicted = (rows.next_observation + (prediction.mean - rows.outputs)[..., :-1])[None]
    if prediction.log_variance is not None:
        noise = jax.random.normal(key, (samples, *predicted.shape[1:]))
        predicted = predicted + jnp.exp(0.5 * prediction.log_variance[..., :-1]) * noise
    return values(state, predicted) - jnp.moveaxis(rows.annotation.value, -1, 0)[:, None]


def without_variance(gap: Array) -> Array:
    """``mean_k gap_k^2`` less the unbiased sample variance over k, of [C, K, ...]: [C, ...].

    It is the mean of ``gap_k gap_l`` over all pairs k != l, for two samples their product, and an unbiased estimate of
    ``(E gap)^2`` because samples are independent. A single value of it may be negative.
    """
    count = gap.shape[1]
    return (jnp.square(gap.sum(1)) - jnp.square(gap).sum(1)) / (count * (count - 1))


def _per_dimension(settings: Settings, rows: Rows, squared: Array) -> Array:
    """Squared differences of values [E, B] on the scale of VaGraM's: over O and, normalised, over its mean weight."""
    size = rows.next_observation.shape[-1]
    if not settings.normalise:
        return squared / size
    unit = _unit(settings, jnp.square(_gradient(settings, rows)).mean(-2))
    return squared / (size * unit[..., 0])


def _with_reward(cost: Cost, judge: Cost, variances: bool | None = None) -> Loss:
    """Plus the reward's error: the likelihood of a Gaussian member, judged by squares."""

    def train(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
        return cost(context, prediction, rows, key) + loss.errors(prediction, rows)[..., -1]

    def judge_all(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
        means = prediction._replace(log_variance=None)
        return judge(context, prediction, rows, key) + loss.errors(means, rows)[..., -1]

    return Loss(train, judge_all, variances)


# ---- all of them --------------------------------------------------------------------------------------------

_PLAIN = loss.weighted(lambda context, rows, key: jnp.ones_like(rows.next_observation))


def _with_plain(cost: Cost, plain: Cost, floor: float) -> Cost:
    """Plus ``floor + context.plain`` times the plain error: squares, or the likelihood of a Gaussian member."""

    def both(context: Context, prediction: Prediction, rows: Rows, key: Key) -> Array:
        share = floor + context.plain
        return cost(context, prediction, rows, key) + share * plain(context, prediction, rows, key)

    return both


VALUE_FREE: dict[str, Loss] = {
    "mle": loss.LIKELIHOOD._replace(variances=True),
    "mse": _PLAIN._replace(variances=False, reads_context=False),
    "standardised": loss.weighted(inverse_variances, variances=False)._replace(reads_context=False),
}

VALUE_AWARE: dict[str, Callable[[Values, Settings], Loss]] = {
    "vagram": _by(squared_gradients),
    "taylor": taylor,
    "vaml": vaml,
    "calibrated": calibrated,
    "value_weighted": _by(absolute_values),
    "anisotropic": _by(permuted),
    "anisotropic_rows": _by(permuted_by_row),
}

LOSSES = (*VALUE_FREE, *VALUE_AWARE)

# Which losses read a setting, of ensembles that they are meant for (`is_deterministic`): vaml draws no samples there.
_READERS: dict[str, tuple[str, ...]] = {
    "normalise": tuple(VALUE_AWARE),
    "clip_quantile": tuple(name for name in VALUE_AWARE if name != "value_weighted"),
    "floor": tuple(VALUE_AWARE),
    "samples": ("calibrated",),
}


def unused(name: str, settings: Settings = Settings()) -> dict[str, str]:
    """{field of `Settings`: why} of those that the loss of that name does not read, of the ensemble it is meant for."""
    reasons = {
        setting: f"the model loss {name} does not read it (read by: {', '.join(readers)})"
        for setting, readers in _READERS.items()
        if name not in readers
    }
    if name in ("vaml", "calibrated") and not settings.normalise:
        reasons["clip_quantile"] = f"the model loss {name} reads gradients only with normalise"
    return reasons


def _check(name: str, settings: Settings) -> None:
    """Raises ValueError, naming the setting, on what is out of range."""
    if not 0 < settings.clip_quantile <= 1:
        raise ValueError(
            f"clip_quantile={settings.clip_quantile} must be a quantile above 0 and at most 1, which clips nothing"
        )
    if not 0 <= settings.floor < math.inf:
        raise ValueError(
            f"floor={settings.floor} of the model loss must be a finite number that is not negative"
        )
    fewest = 2 if name == "calibrated" else 1
    if settings.samples < fewest:
        raise ValueError(f"samples={settings.samples} of the model loss {name} must be at least {fewest}")
