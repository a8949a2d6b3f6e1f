"""How a dynamics ensemble is fitted: bootstrap samples, updates, checks, and when it stops.

Every member learns from its own bootstrap sample of the training rows, and keeps the parameters of its best
check on the held-out rows; the bounds are kept from the last check that was any member's best. Fitting stops by
RAVL's rule: no member has improved its best holdout error by 1 % in ``patience`` checks, and ``min_epochs`` have
passed; the first time this happens earlier, the learning rate falls to 0.3 of itself. Or, with ``updates``, after a
fixed number.

One set of compiled programs serves a ring that fills up. Which rows may be drawn, how many are held out, and how many
updates make an epoch are numbers that the programs are given (`rl.dynamics.rows`). The updates of an epoch and the
chunks of a check are `jax.lax.fori_loop` over that many, not scans over a fixed length: a ring that is nearly empty
costs no more than the rows in it.

Differences from RAVL's code: a batch is drawn uniformly from the member's bootstrap sample instead of by
permutations of it, the samples stay with their members where that code deals them out anew in every epoch, and the
statistics of the normaliser are those of the observations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl import log
from rl.dynamics import network, rows
from rl.dynamics.config import Config
from rl.dynamics.loss import LIKELIHOOD, Loss, annotated, holdout_error, objective
from rl.dynamics.network import Model
from rl.dynamics.rows import Data, Sizes
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.ring import Ring
from rl.types import Array, Key, Params, Spec

_ADAM = optax.scale_by_adam()
_IMPROVEMENT = 0.99  # a check counts if the error is below this fraction of the best
_LOWERED = 0.3  # the learning rate's factor once fitting has stalled early


class Progress(NamedTuple):
    """What fitting carries from one check to the next. With a leading axis [S] for several keys."""

    params: Params  # {"members", "bounds"}
    moments: Any  # Adam's
    best: Params  # members, each at its best check; bounds, at the last check that was any member's best
    error: Array  # [E] at that check
    checks: Array  # done
    stale: Array  # checks since a member improved
    lowered: Array  # whether the learning rate was lowered
    done: Array


class Sample(NamedTuple):
    """What does not change between the updates of a fit. With a leading axis [S] for several keys."""

    places: Array  # [E, C] of each member's bootstrap sample, of which the first ``size - held`` are used
    annotation: Any  # `rl.dynamics.rows.Rows.annotation` [C, ...]


class Programs(NamedTuple):
    """The jitted parts of a fit, of one key or of keys [S]; see the functions of these names."""

    init: Callable[[Key], Model]
    prepare: Callable[..., Data]
    begin: Callable[[Model, Data, Sizes, Any, Key], tuple[Progress, Sample, Key]]
    advance: Callable[[Progress, Data, Sample, Sizes, Any, Key], Progress]  # consumes its first argument
    finish: Callable[[Progress, Data], Model]


def fitter(config: Config, spec: Spec, loss: Loss = LIKELIHOOD) -> Callable[..., Model]:
    """The function ``fit(data, key, model=None, context=())`` of an ensemble; see `rl.dynamics.ensemble.make`."""
    parts = programs(config, spec, loss)

    def fit(data: Dataset | Ring, key: Key, model: Model | None = None, context: Any = ()) -> Model:
        if not loss.reads_context and jax.tree.leaves(context):
            raise ValueError("a context is given, but the ensemble's loss reads none: leave it out")
        initial = jax.eval_shape(parts.init, key)
        if model is not None:
            _check_model(model, initial)
        prepared = parts.prepare(*_columns(data, key))
        sizes = rows.sizes(config, prepared)
        start = parts.init(key) if model is None else model
        state, sample, update_key = parts.begin(start, prepared, sizes, context, key)
        checks = rows.most_checks(config)
        with log.progress(checks, "fit dynamics", delay=3, leave=False) as bar:
            while not np.asarray(state.done).all():
                state = parts.advance(state, prepared, sample, sizes, context, update_key)
                bar.set_postfix(error=f"{np.asarray(state.error).mean():.4g}", refresh=False)
                bar.update()
        fitted = parts.finish(state, prepared)
        if not np.isfinite(np.asarray(fitted.error)[..., : config.elites]).all():
            raise FloatingPointError(
                "the dynamics model diverged: its error on held-out rows was never finite; look for extreme values in "
                "the data, or lower the model's learning rate (--model_learning_rate of the scripts that have it)"
            )
        return fitted

    return fit


def programs(config: Config, spec: Spec, loss: Loss = LIKELIHOOD) -> Programs:
    """The jitted parts of a fit. They compile at their first call, and again for data of another shape alone."""

    def fresh(key: Key) -> Model:
        return network.init(config, spec, _keys(key)[0])

    def prepare(*columns: Array) -> Data:
        one = functools.partial(rows.prepare, spec)
        *steps, filled = columns
        if steps[2].ndim == 1:
            return one(*columns)
        return jax.vmap(one, (*[0] * len(steps), 0 if filled.ndim else None))(*columns)

    return Programs(
        init=jax.jit(lambda key: jax.vmap(fresh)(key) if key.ndim else fresh(key)),
        prepare=jax.jit(prepare),
        begin=jax.jit(_over_keys(functools.partial(begin, config, loss))),
        advance=jax.jit(_over_keys(functools.partial(advance, config, loss)), donate_argnums=0),
        finish=jax.jit(_over_keys(finish)),
    )


def begin(
    config: Config, loss: Loss, model: Model, data: Data, sizes: Sizes, context: Any, key: Key
) -> tuple[Progress, Sample, Key]:
    """Before the first update: the state, what the updates draw from, and the key of the updates.

    Whatever comes first is better, also where a model goes on: were it judged by its own error first, a fit that is
    short of patience would often end where it began.
    """
    _, sample_key, update_key = _keys(key)
    shape = (config.members, len(data.order))
    places = data.order[jax.random.randint(sample_key, shape, sizes.held, data.size)]
    data = annotated(loss, context, data, sizes)
    fitted = jnp.isfinite(model.error)
    continued = network.restandardize(model, data.mean, data.deviation).members
    members = jax.tree.map(lambda new, old: jnp.where(fitted.any(), new, old), continued, model.members)
    params = {"members": members, "bounds": model.bounds}
    error = jnp.full(config.members, jnp.inf, jnp.float32)
    zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    state = Progress(params, _ADAM.init(params), params, error, zero, zero, no, no)
    return state, Sample(places, data.rows.annotation), update_key


def advance(
    config: Config,
    loss: Loss,
    before: Progress,
    data: Data,
    sample: Sample,
    sizes: Sizes,
    context: Any,
    key: Key,
) -> Progress:
    """One check further; a fit that is done stays as it is."""
    rate = config.learning_rate * jnp.where(before.lowered, _LOWERED, 1.0)
    members = jnp.arange(config.members)[:, None]
    data = data._replace(rows=data.rows._replace(annotation=sample.annotation))

    def update(number: Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
        params, moments = carry
        update_key = jax.random.fold_in(key, before.checks * sizes.updates + number)
        place_key, loss_key = jax.random.split(update_key)
        shape = (config.members, config.batch_size)
        place = jax.random.randint(place_key, shape, 0, data.size - sizes.held)
        batch = jax.tree.map(lambda x: x[sample.places[members, place]], data.rows)
        gradient = jax.grad(objective, 2)(config, loss, params, batch, context, loss_key)
        steps, moments = _ADAM.update(gradient, moments)
        return jax.tree.map(lambda x, step: x - rate * step, params, steps), moments

    params, moments = jax.lax.fori_loop(0, sizes.updates, update, (before.params, before.moments))
    error = holdout_error(config, loss, params, data, sizes, context)
    better = error < _IMPROVEMENT * before.error  # False for NaN

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    def keep_shared(new: Array, old: Array) -> Array:
        # A member that diverges takes the bounds with it at once, and the others one update later.
        return jnp.where(better.any() & jnp.isfinite(new).all(), new, old)

    best = {
        "members": jax.tree.map(keep, params["members"], before.best["members"]),
        "bounds": jax.tree.map(keep_shared, params["bounds"], before.best["bounds"]),
    }
    checks = before.checks + 1
    stale = jnp.where(better.any(), 0, before.stale + 1)
    stalled = (stale >= config.patience) & (config.updates == 0)
    late = checks >= config.min_epochs
    after = Progress(
        params=params,
        moments=moments,
        best=best,
        error=keep(error, before.error),
        checks=checks,
        stale=stale,
        lowered=before.lowered | (stalled & ~late),
        done=(stalled & late) | (checks >= rows.most_checks(config)),
    )
    return jax.tree.map(lambda new, old: jnp.where(before.done, old, new), after, before)


def finish(state: Progress, data: Data) -> Model:
    """The members at their best, in ascending order of their errors."""
    order = jnp.argsort(state.error)
    members = jax.tree.map(lambda x: x[order], state.best["members"])
    return Model(members, state.best["bounds"], data.mean, data.deviation, state.error[order])


def _keys(key: Key) -> tuple[Key, Key, Key]:
    """Of the initial parameters, of the bootstrap samples, and of the updates."""
    init_key, sample_key, update_key = jax.random.split(key, 3)
    return init_key, sample_key, update_key


def _over_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, or, where its first argument (a `Model` or `Progress`) is of keys [S], mapped over them.

    Data are shared, or each key's own, and keys share the single numbers of a context; the number of loop iterations is
    shared, so that loops stay loops.
    """

    def axis(argument: Any) -> Any:
        if isinstance(argument, Data):
            return 0 if argument.size.ndim else None
        if isinstance(argument, Sizes):
            return Sizes(0 if argument.held.ndim else None, None, None, None)
        return jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, argument)

    def call(*arguments: Any) -> Any:
        if arguments[0].error.ndim == 1:
            return function(*arguments)
        return jax.vmap(function, tuple(axis(argument) for argument in arguments))(*arguments)

    return call


def _columns(data: Dataset | Ring, key: Key) -> tuple[Any, ...]:
    """The arguments of `Programs.prepare`."""
    if isinstance(data, Ring):
        steps, filled = data.rows, data.count
    else:
        steps, filled = data.transitions, np.int32(replay.size(data))
    if steps.reward.ndim > 1 and steps.reward.shape[0] != (len(key) if key.ndim else 0):
        raise ValueError(
            f"data of {steps.reward.shape[0]} rings (rewards {steps.reward.shape}) need as many keys, not {key.shape}"
        )
    return (
        steps.observation,
        steps.action,
        steps.reward,
        steps.discount,
        steps.next_observation,
        filled,
    )


def _check_model(model: Model, expected: Model) -> None:
    """Raises ValueError if ``model`` has other parameters than ``expected``."""
    shapes, wanted = (jax.tree.map(jnp.shape, tree) for tree in (model, expected))
    if shapes != wanted:
        raise ValueError(
            f"the model to continue from has parameters of shapes {shapes}, this ensemble of {wanted}: fit both with "
            "the same configuration, specification and number of keys"
        )
