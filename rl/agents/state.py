"""The moves every learner makes with its `rl.types.State`: start it, descend, let targets follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import optax

from rl.types import Array, Params, Spec, State

# A learning rate becomes a gradient transformation: `optax.adam`, or `optax.sgd` in a test.
Optimiser = Callable[[float | Array], optax.GradientTransformation]


def start(
    params: Mapping[str, Params],
    optimisers: Mapping[str, optax.GradientTransformation],
    targets: Iterable[str] = (),
) -> State:
    """The state before the first update; ``targets`` names the parameters that have a slow copy."""
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


def require(spec: Spec, agent: str, *, discrete: bool) -> None:
    """Raises ValueError if ``agent`` cannot handle the kind of action in ``spec``."""
    if spec.discrete != discrete:
        have = "integer" if spec.discrete else "continuous"
        use = (
            "dqn, cql, iql or bc"
            if spec.discrete
            else "sac, td3, iql, td3_bc, rebrac, cql, sac_n, edac or bc"
        )
        raise ValueError(f"agent {agent!r} cannot act in {have} actions: use {use}")


def require_share(name: str, value: float | Array) -> None:
    """Raises ValueError for a hyper-parameter outside [0, 1]; one that is swept inside one program is not looked at."""
    if isinstance(value, int | float) and not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie in [0, 1]")


def is_off(weight: float | Array) -> bool:
    """True for a term whose weight is 0 when the program is built, so that it need not be computed.

    A weight that is swept inside one program (a tracer) is never off.
    """
    return isinstance(weight, int | float) and weight == 0
