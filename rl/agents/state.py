"""The moves every learner makes with its `rl.types.State`: start it, descend, let targets follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import optax

from rl.settings import is_known
from rl.types import Array, Metrics, Params, State


def start(
    params: Mapping[str, Params],
    optimisers: Mapping[str, optax.GradientTransformation],
    targets: Iterable[str] = (),
) -> State:
    """The state before the first update; ``targets`` names the parameters that have a target network."""
    return State(
        params=dict(params),
        target={name: jax.tree.map(jnp.copy, params[name]) for name in targets},
        optimiser={name: optimisers[name].init(params[name]) for name in params},
        step=jnp.zeros((), jnp.int32),
    )


def descend(
    state: State, gradients: Mapping[str, Params], optimisers: Mapping[str, optax.GradientTransformation]
) -> State:
    """One optimiser step for the parameters named in ``gradients``; the others stay as they are."""
    params, moments = dict(state.params), dict(state.optimiser)
    for name, gradient in gradients.items():
        updates, moments[name] = optimisers[name].update(gradient, moments[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
    return state._replace(params=params, optimiser=moments)


def follow(state: State, rate: float | Array, period: int = 1) -> State:
    """Every ``period`` updates, targets move the fraction ``rate`` of their way to the online parameters.

    ``period=1`` is Polyak averaging; ``rate=1`` copies, as DQN does.
    """
    online = {name: state.params[name] for name in state.target}
    moved = optax.incremental_update(online, state.target, rate)
    if period > 1:
        due = (state.step + 1) % period == 0
        moved = jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, state.target)
    return state._replace(target=moved)


def delayed(
    improve: Callable[[State], tuple[State, Metrics]], state: State, period: int
) -> tuple[State, Metrics]:
    """``improve(state)`` on every ``period``-th update; its metrics are 0 on the others.

    They are scaled by ``period``, so that their mean over an epoch of a multiple of it is that over the updates which
    were made; over other epochs it is too large or too small by up to one of these.
    """
    if period == 1:
        return improve(state)
    once = jax.jit(improve, inline=True)  # traced once, for its shapes and for itself

    def due(state: State) -> tuple[State, Metrics]:
        state, metrics = once(state)
        return state, jax.tree.map(lambda x: period * x, metrics)

    def keep(state: State) -> tuple[State, Metrics]:
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, state)[1])

    return jax.lax.cond((state.step + 1) % period == 0, due, keep, state)


def is_off(weight: float | Array) -> bool:
    """True for a term whose weight is 0 when the program is built, so that it need not be computed.

    A weight that is swept inside one program (a tracer) is never off.
    """
    return is_known(weight) and bool(weight == 0)
