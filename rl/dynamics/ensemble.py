"""An ensemble of networks that predict the next observation and the reward.

Chua et al. (2018, PETS) and Janner et al. (2019, MBPO), in the form of RAVL (Sims et al., NeurIPS 2024).
Member ``i`` maps the standardised (s, a) to the mean ``m`` and log-variance ``v`` of (s' - s, r) and minimises

    L_i = mean_{batch, dims}[ w (m - y)^2 exp(-v) + w v ] + sum_layers decay / 2 |W|^2

plus, shared by all, ``0.01 (sum max v - sum min v)`` on the learned vectors between which ``v`` is clamped softly.
``w`` is 1, or the caller's weight of each sample and observation dimension (VaGraM, Voelcker et al. 2022). The
deterministic variant has no ``v`` and minimises ``w (m - y)^2``.

Every member learns from its own bootstrap sample of the training rows, and keeps the parameters of its best
check on the held-out rows; the bounds are kept from the last check that was any member's best. Fitting stops by
RAVL's rule: no member has improved its best holdout error by 1 % in ``patience`` checks, and ``min_epochs`` have
passed; the first time this happens earlier, the learning rate falls to 0.3 of itself. Or, with ``updates``, after a
fixed number.

Differences from RAVL's code: a batch is drawn uniformly from the member's bootstrap sample instead of by
permutations of it, and the statistics of the normaliser are those of the observations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm.auto import tqdm

from rl.replay.dataset import Dataset
from rl.types import Array, Key, Params, Spec

# next observations [E, B, O] of each member's batch -> [E, B, O]
Weight = Callable[[Array], Array]

_ADAM = optax.scale_by_adam()
_CLIP = 10.0  # standardised inputs end here
_IMPROVEMENT = 0.99  # a check counts if the error is below this fraction of the best
_LOWERED = 0.3  # the learning rate's factor once fitting has stalled early
_CHECKS = 20  # of the holdout error, where the number of updates is fixed
_HOLDOUT_ROWS = 1024  # evaluated at once


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of RAVL's code."""

    members: int = 7  # E
    elites: int = 5  # M, the members of smallest holdout error: they alone make proposals and steps
    hidden: tuple[int, ...] = (200, 200, 200, 200)  # widths of the SiLU layers
    decay: tuple[float, ...] = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)  # L2 of each layer's weights, by gradient
    deterministic: bool = False  # predict means only
    learning_rate: float = 1e-3  # Adam
    batch_size: int = 256  # rows per update and member
    holdout: float = 0.2  # share of the rows that no member learns from
    updates: int = 0  # > 0: about so many (rounded down to a multiple of 20) in place of the stopping rule
    patience: int = 5  # checks, one per epoch, without improvement
    min_epochs: int = 350  # before fitting may stop
    max_epochs: int = 2000  # after which it stops


class Model(NamedTuple):
    """A fitted ensemble. With a leading axis [S] on everything where it was fitted for several keys."""

    members: Params  # leading axis [E], the best first
    bounds: Params  # of the log-variance; empty if deterministic
    mean: Array  # [I] of the inputs
    deviation: Array  # [I]
    error: Array  # [E] squared error on the held-out rows, mean over dimensions, ascending


class Ensemble(NamedTuple):
    """An architecture, as pure functions of a fitted `Model`; ``fit`` alone runs on the host.

    Observations are [..., O] and actions [..., D], or [...] integers. Predictions are those of the elites, [M].
    """

    init: Callable[[Key], Model]  # parameters before fitting
    fit: Callable[..., Model]  # see `make`
    predict: Callable[[Model, Array, Array], tuple[Array, Array]]  # mean and deviation [M, ..., O + 1]
    propose: Callable[[Model, Array, Array, Key], tuple[Array, Array]]  # s' [M, ..., O], r [M, ...]
    step: Callable[
        [Model, Array, Array, Key], tuple[Array, Array]
    ]  # as propose, of one random elite each: no [M]


def make(config: Config, spec: Spec) -> Ensemble:
    """The ensemble for observations and actions of ``spec``.

    ``fit(dataset, key, weight=None)`` learns it from a `Dataset` and returns a `Model`; with keys [S], S of them in
    one program. ``weight`` maps next observations [E, B, O], each member's own batch, to loss weights of the same
    shape. All updates between two checks are one compiled call; a progress bar shows the checks. Rows whose episode
    terminated with no successor logged (their own observation stands there) are left out. ``fit`` raises ValueError
    for rewards that are not finite or too few rows, and FloatingPointError if an elite diverged.

    Raises:
      ValueError: a configuration without sense, or observations that are images.
    """
    _check(config, spec)

    def fit(dataset: Dataset, key: Key, weight: Weight | None = None) -> Model:
        rows, mean, deviation = _prepare(dataset, spec)
        start, advance = _programs(config, spec, len(rows.inputs), weight or _equal, stacked=key.ndim > 0)
        state, split, update_key = start(key)
        checks = _plan(config, len(rows.inputs)).checks
        with tqdm(total=checks, desc="fit dynamics", delay=3, leave=False, disable=None) as bar:
            while not np.asarray(state.done).all():
                state = advance(state, rows, split, update_key)
                bar.set_postfix(error=f"{np.asarray(state.error).mean():.4g}", refresh=False)
                bar.update()
        return _ranked(config, state, mean, deviation)

    def predict(model: Model, observation: Array, action: Array) -> tuple[Array, Array]:
        inputs = _standard(_join(spec, observation, action), model.mean, model.deviation)
        elites = jax.tree.map(lambda x: x[: config.elites], model.members)
        shared = jnp.broadcast_to(inputs, (config.elites, *inputs.shape))
        mean, log_variance = _distribution(elites, model.bounds, shared)
        mean = mean.at[..., :-1].add(observation)
        return mean, jnp.zeros_like(mean) if log_variance is None else jnp.exp(0.5 * log_variance)

    def propose(model: Model, observation: Array, action: Array, key: Key) -> tuple[Array, Array]:
        mean, deviation = predict(model, observation, action)
        drawn = mean + deviation * jax.random.normal(key, mean.shape)
        return drawn[..., :-1], drawn[..., -1]

    def step(model: Model, observation: Array, action: Array, key: Key) -> tuple[Array, Array]:
        propose_key, elite_key = jax.random.split(key)
        observations, rewards = propose(model, observation, action, propose_key)
        elite = jax.random.randint(elite_key, (1, *rewards.shape[1:]), 0, config.elites)
        chosen = jnp.take_along_axis(observations, elite[..., None], 0)[0]
        return chosen, jnp.take_along_axis(rewards, elite, 0)[0]

    return Ensemble(functools.partial(_init, config, spec), fit, predict, propose, step)


# ---- one member's function, and what it minimises --------------------------------------------------------


def _init(config: Config, spec: Spec, key: Key) -> Model:
    inputs, outputs = spec.observation_shape[0] + spec.action_size, spec.observation_shape[0] + 1
    sizes = (inputs, *config.hidden, outputs if config.deterministic else 2 * outputs)
    keys = jax.random.split(key, len(sizes) - 1)
    bounds = {"max": jnp.full(outputs, 0.5, jnp.float32), "min": jnp.full(outputs, -10.0, jnp.float32)}

    def layer(key: Key, fan_in: int, width: int) -> Params:
        kernel = jax.random.truncated_normal(key, -2, 2, (config.members, fan_in, width)) / (2 * fan_in**0.5)
        return {"kernel": kernel, "bias": jnp.zeros((config.members, width))}

    return Model(
        members=[layer(k, *shape) for k, shape in zip(keys, itertools.pairwise(sizes), strict=True)],
        bounds={} if config.deterministic else bounds,
        mean=jnp.zeros(inputs),
        deviation=jnp.ones(inputs),
        error=jnp.full(config.members, jnp.inf, jnp.float32),
    )


def _forward(layers: Params, x: Array) -> Array:
    """One member's outputs [..., P] for standardised inputs [..., I]."""
    for layer in layers[:-1]:
        x = jax.nn.silu(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def _distribution(members: Params, bounds: Params, inputs: Array) -> tuple[Array, Array | None]:
    """Means and log-variances [E, ..., O + 1] of standardised inputs [E, ..., I]; deterministic ones have no second."""
    x = jax.vmap(_forward)(members, inputs)
    if not bounds:
        return x, None
    mean, raw = jnp.split(x, 2, -1)
    raw = bounds["max"] - jax.nn.softplus(bounds["max"] - raw)
    return mean, bounds["min"] + jax.nn.softplus(raw - bounds["min"])


def _loss(config: Config, params: Params, batch: _Rows, weight: Array) -> Array:
    """Summed over members, whose gradients do not meet but in the bounds that they share."""
    mean, log_variance = _distribution(params["members"], params["bounds"], batch.inputs)
    loss = weight * jnp.square(mean - batch.outputs)
    shared = sum(
        0.5 * rate * jnp.square(layer["kernel"]).sum()
        for rate, layer in zip(config.decay, params["members"], strict=True)
    )
    if log_variance is not None:
        loss = loss * jnp.exp(-log_variance) + weight * log_variance
        shared += 0.01 * (params["bounds"]["max"].sum() - params["bounds"]["min"].sum())
    return loss.mean((1, 2)).sum() + shared


def _equal(next_observation: Array) -> Array:
    return jnp.ones_like(next_observation)


def _weigh(weight: Weight, next_observation: Array) -> Array:
    """Weights [E, B, O + 1]; that of the reward is 1."""
    given = jax.lax.stop_gradient(weight(next_observation))
    chex.assert_equal_shape([given, next_observation])
    return jnp.concatenate([given, jnp.ones_like(given[..., :1])], -1)


# ---- fitting ---------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Learnable rows, [N, ...] on the device or [E, B, ...] in a batch."""

    inputs: Array  # [..., I], standardised
    outputs: Array  # [..., O + 1]: s' - s and r
    next_observation: Array  # [..., O]


class _Split(NamedTuple):
    train: Array  # [E, N'] rows of each member's bootstrap sample
    holdout: Array  # [C, R] held-out rows in chunks


class _Plan(NamedTuple):
    updates: int  # between two checks
    checks: int  # at most


class _Fit(NamedTuple):
    """What fitting carries from one check to the next."""

    params: Params  # {"members", "bounds"}
    moments: Any  # Adam's
    best: Params  # members, each at its best check; bounds, at the last check that was any member's best
    error: Array  # [E] at that check
    checks: Array  # done
    stale: Array  # checks since a member improved
    lowered: Array  # whether the learning rate was lowered
    done: Array


def _plan(config: Config, rows: int) -> _Plan:
    if config.updates:
        checks = min(_CHECKS, config.updates)
        return _Plan(config.updates // checks, checks)
    return _Plan(-(-(rows - _held_out(config, rows)) // config.batch_size), config.max_epochs)


def _held_out(config: Config, rows: int) -> int:
    return max(1, int(config.holdout * rows))


def _split(config: Config, rows: int, key: Key) -> _Split:
    order_key, bootstrap_key = jax.random.split(key)
    held = _held_out(config, rows)
    chunk = min(held, _HOLDOUT_ROWS)
    order = jax.random.permutation(order_key, rows)
    drawn = jax.random.randint(bootstrap_key, (config.members, rows - held), held, rows)
    return _Split(order[drawn], order[: held // chunk * chunk].reshape(-1, chunk))


@functools.lru_cache(maxsize=8)  # another fit of the same kind compiles nothing
def _programs(
    config: Config, spec: Spec, rows: int, weight: Weight, *, stacked: bool
) -> tuple[Callable[..., Any], Callable[..., _Fit]]:
    """Compiled: key -> (fit, split, key of the updates); and `_advance`, which consumes the fit."""
    plan = _plan(config, rows)

    def start(key: Key) -> tuple[_Fit, _Split, Key]:
        init_key, split_key, update_key = jax.random.split(key, 3)
        return _begin(_init(config, spec, init_key)), _split(config, rows, split_key), update_key

    def advance(fit: _Fit, rows: _Rows, split: _Split, key: Key) -> _Fit:
        return _advance(config, plan, weight, fit, rows, split, key)

    if stacked:
        start, advance = jax.vmap(start), jax.vmap(advance, (0, None, 0, 0))
    return jax.jit(start), jax.jit(advance, donate_argnums=0)


def _begin(model: Model) -> _Fit:
    params = {"members": model.members, "bounds": model.bounds}
    zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    return _Fit(params, _ADAM.init(params), params, model.error, zero, zero, no, no)


def _advance(
    config: Config, plan: _Plan, weight: Weight, fit: _Fit, rows: _Rows, split: _Split, key: Key
) -> _Fit:
    """One check further; a fit that is done stays as it is."""
    rate = config.learning_rate * jnp.where(fit.lowered, _LOWERED, 1.0)
    members = jnp.arange(config.members)[:, None]

    def update(carry: tuple[Params, Any], number: Array) -> tuple[tuple[Params, Any], None]:
        params, moments = carry
        own_key = jax.random.fold_in(key, fit.checks * plan.updates + number)
        drawn = jax.random.randint(own_key, (config.members, config.batch_size), 0, split.train.shape[1])
        batch = jax.tree.map(lambda x: x[split.train[members, drawn]], rows)
        gradient = jax.grad(_loss, 1)(config, params, batch, _weigh(weight, batch.next_observation))
        steps, moments = _ADAM.update(gradient, moments)
        return (jax.tree.map(lambda x, step: x - rate * step, params, steps), moments), None

    (params, moments), _ = jax.lax.scan(update, (fit.params, fit.moments), jnp.arange(plan.updates))
    error = _holdout_error(params, rows, split, weight)
    better = error < _IMPROVEMENT * fit.error  # False for NaN

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    def keep_shared(new: Array, old: Array) -> Array:
        # A member that diverges takes the bounds with it at once, and the others one update later.
        return jnp.where(better.any() & jnp.isfinite(new).all(), new, old)

    best = {
        "members": jax.tree.map(keep, params["members"], fit.best["members"]),
        "bounds": jax.tree.map(keep_shared, params["bounds"], fit.best["bounds"]),
    }
    checks = fit.checks + 1
    stale = jnp.where(better.any(), 0, fit.stale + 1)
    stalled = (stale >= config.patience) & (config.updates == 0)
    late = checks >= config.min_epochs
    after = _Fit(
        params=params,
        moments=moments,
        best=best,
        error=keep(error, fit.error),
        checks=checks,
        stale=stale,
        lowered=fit.lowered | (stalled & ~late),
        done=(stalled & late) | (checks >= plan.checks),
    )
    return jax.tree.map(lambda new, old: jnp.where(fit.done, old, new), after, fit)


def _holdout_error(params: Params, rows: _Rows, split: _Split, weight: Weight) -> Array:
    """Weighted squared error [E]."""

    def add(total: Array, index: Array) -> tuple[Array, None]:
        chunk = jax.tree.map(lambda x: jnp.broadcast_to(x[index], (*total.shape, *x[index].shape)), rows)
        mean, _ = _distribution(params["members"], params["bounds"], chunk.inputs)
        error = _weigh(weight, chunk.next_observation) * jnp.square(mean - chunk.outputs)
        return total + error.mean((1, 2)), None

    members = len(params["members"][0]["bias"])
    total, _ = jax.lax.scan(add, jnp.zeros(members), split.holdout)
    return total / len(split.holdout)


def _standard(inputs: Array, mean: Array, deviation: Array) -> Array:
    return ((inputs - mean) / deviation).clip(-_CLIP, _CLIP)


def _join(spec: Spec, observation: Array, action: Array) -> Array:
    """Inputs [..., I]; integer actions enter one-hot."""
    if spec.discrete:
        action = jax.nn.one_hot(action, spec.action_size)
    return jnp.concatenate([observation, action], -1)


def _prepare(dataset: Dataset, spec: Spec) -> tuple[_Rows, Array, Array]:
    """The rows to learn from, and the mean and deviation that standardise the inputs."""
    steps = jax.tree.map(np.asarray, dataset.transitions)
    if not np.isfinite(steps.reward).all():
        raise ValueError("the dataset has rewards that are not finite: a dynamics model cannot learn them")
    successor_logged = (steps.discount > 0) | (steps.observation != steps.next_observation).any(-1)
    if successor_logged.sum() < 2:
        raise ValueError(
            f"the dataset has {successor_logged.sum()} rows with a next observation: a dynamics model needs 2 or more"
        )
    steps = jax.tree.map(lambda x: jnp.asarray(x[successor_logged]), steps)
    inputs = _join(spec, steps.observation, steps.action)
    mean, deviation = inputs.mean(0), inputs.std(0)
    deviation = jnp.where(deviation < 1e-6, 1.0, deviation)  # a constant input tells nothing, at any scale
    outputs = jnp.concatenate([steps.next_observation - steps.observation, steps.reward[:, None]], -1)
    return _Rows(_standard(inputs, mean, deviation), outputs, steps.next_observation), mean, deviation


def _ranked(config: Config, fit: _Fit, mean: Array, deviation: Array) -> Model:
    """The members in ascending order of their errors."""
    order = jnp.argsort(fit.error, -1)
    error = jnp.take_along_axis(fit.error, order, -1)
    if not np.isfinite(np.asarray(error)[..., : config.elites]).all():
        raise FloatingPointError(
            "the dynamics model diverged: its error on held-out rows was never finite; lower its learning rate, "
            "or look for extreme values in the data"
        )

    def arrange(x: Array) -> Array:
        pick = lambda leaf, index: leaf[index]
        return jax.vmap(pick)(x, order) if order.ndim == 2 else pick(x, order)

    seeds = order.shape[:-1]
    return Model(
        members=jax.tree.map(arrange, fit.best["members"]),
        bounds=fit.best["bounds"],
        mean=jnp.broadcast_to(mean, (*seeds, *mean.shape)),
        deviation=jnp.broadcast_to(deviation, (*seeds, *deviation.shape)),
        error=error,
    )


def _check(config: Config, spec: Spec) -> None:
    """Raises ValueError, naming the field, on what cannot be built."""
    if len(spec.observation_shape) != 1:
        raise ValueError(
            f"a dynamics ensemble predicts flat vectors, not observations of shape {spec.observation_shape}"
        )
    if not 1 <= config.elites <= config.members:
        raise ValueError(f"elites={config.elites} must be between 1 and members={config.members}")
    if len(config.decay) != len(config.hidden) + 1:
        raise ValueError(
            f"decay has {len(config.decay)} rates: give one for each of the {len(config.hidden)} hidden layers "
            "and one for the output"
        )
    if not 0 < config.holdout < 1:
        raise ValueError(f"holdout={config.holdout} must be a share between 0 and 1")
    for name, least in {"updates": 0, "patience": 1, "min_epochs": 0, "max_epochs": 1}.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)} of the dynamics model must be at least {least}")
