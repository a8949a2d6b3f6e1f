"""The moves every learner makes with its `rl.types.State`: start it, descend, let targets follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl import nest
from rl.networks.cnn import random_shift
from rl.networks.layers import Architecture
from rl.replay.goals import OBSERVATION, GoalBatch
from rl.replay.source import LOGGED, is_logged
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition


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

    They are scaled, so that their mean over an epoch is that over the updates which were made.
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


def augmented(learner: Learner, spec: Spec, architecture: Architecture) -> Learner:
    """``learner``, whose updates see images shifted at random by up to ``architecture.shift`` pixels.

    Each image on its own, that before a step and that after it, those of a dict, whose other entries stay, and goals.
    Without images, or with a shift of 0, so does the learner.
    """
    if not architecture.shift or all(len(shape) != 3 for shape in nest.leaves(spec.observation_shape)):
        return learner

    def shift(observation: Any, shape: Any, key: Key) -> Any:
        if isinstance(shape, Mapping):
            keys = jax.random.split(key, len(shape))
            return {
                name: shift(observation[name], shape[name], keys[i]) for i, name in enumerate(sorted(shape))
            }
        return random_shift(observation, key, architecture.shift) if len(shape) == 3 else observation

    def shifted(batch: Any, key: Key) -> Any:
        if isinstance(batch, GoalBatch):
            shape = spec.observation_shape[OBSERVATION]
            goals = {
                name: goal for name, goal in batch._asdict().items() if name != "value" and goal is not None
            }
            keys = jax.random.split(key, 1 + len(goals))
            moved = {name: shift(goals[name], shape, keys[1 + i]) for i, name in enumerate(goals)}
            return batch._replace(value=shifted(batch.value, keys[0]), **moved)
        keys = jax.random.split(key)
        return batch._replace(
            observation=shift(batch.observation, spec.observation_shape, keys[0]),
            next_observation=shift(batch.next_observation, spec.observation_shape, keys[1]),
        )

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        keys = jax.random.split(key)
        return learner.update(state, shifted(batch, keys[0]), keys[1])

    by_weight = learner.weighted
    if by_weight is None:
        return learner._replace(update=update)

    def weighted(state: State, batch: Transition, weight: Array, key: Key) -> tuple[State, Metrics, Array]:
        keys = jax.random.split(key)
        return by_weight(state, shifted(batch, keys[0]), weight, keys[1])

    return learner._replace(update=update, weighted=weighted)


def require(spec: Spec, agent: str, *, discrete: bool) -> None:
    """Raises ValueError if ``agent`` cannot handle the kind of action in ``spec``."""
    if spec.discrete != discrete:
        have = "integer" if spec.discrete else "continuous"
        use = (
            "dqn, or from a log also cql, iql or bc"
            if spec.discrete
            else "sac, td3, arsq, cqn, or from a log also iql, cql, td3_bc, rebrac, sac_n, edac, fql, ifql, deas or bc"
        )
        raise ValueError(f"agent {agent!r} cannot act in {have} actions: use {use}")


def require_no_policy(architecture: Architecture, agent: str) -> None:
    """Raises ValueError for settings of policy networks, which ``agent`` does not have."""
    for name in ("dropout", "policy_layer_norm"):
        if getattr(architecture, name):
            raise ValueError(f"network.{name} is for policies, and {agent} has none: leave it out")


def demonstrated(batch: Transition, origin: int, off: str) -> Array:
    """[B], 1 in the rows of that ``origin``, which are demonstrations, else 0.

    Rows without an origin are a fixed dataset's, and logged (`rl.replay.source.is_logged`): all of origin 0.

    Args:
      batch: [B].
      origin: of demonstrations.
      off: as for `require_demonstrations`.

    Raises:
      ValueError: rows of another origin than 0 are asked for, and none has any.
    """
    if origin == LOGGED:
        return is_logged(batch).astype(jnp.float32)
    if batch.origin is None:
        require_demonstrations(batch, origin, off)
    return (batch.origin == origin).astype(jnp.float32)


def require_demonstrations(logged: Transition | None, origin: int, off: str) -> None:
    """Raises ValueError if no row of the ``logged`` data (None: there are none) is of the ``origin`` asked for.

    Args:
      logged: data [N], NumPy arrays.
      origin: of demonstrations; 0 where no row has an origin is all rows, or none where there are no data.
      off: settings that turn off what demonstrations are for, as a remedy to name.
    """
    flags = None if logged is None else logged.origin
    if (origin == LOGGED and flags is None) or (flags is not None and (np.asarray(flags) == origin).any()):
        return
    if logged is None:
        have = "there are no logged data"
    elif flags is None:
        have = "the data do not say where their rows are from"
    else:
        have = f"their rows are of {', '.join(map(str, np.unique(flags)))}"
    raise ValueError(
        f"demonstrations={origin} asks for rows of that origin (Transition.origin), and {have}: give 0 for all "
        f"logged rows, or {off} for none"
    )


_SHARES = ("discount", "chunk_discount", "expectile", "target_rate")
_COUNTS = (
    *("critics", "samples", "candidates", "policy_delay", "target_period", "replan_every"),
    *("hidden", "inner", "latent", "representation", "chunk"),
)
_NOT_NEGATIVE = (
    *("learning_rate", "policy_learning_rate", "value_learning_rate", "epsilon", "epsilon_updates"),
    *("temperature", "awr_temperature", "alpha", "initial_alpha", "low_alpha", "high_alpha"),
    *("weight", "target_gap", "weight_decay", "td_weight", "dominance_weight", "margin_weight", "margin"),
    *("munchausen", "bc_weight", "cql_weight", "advantage_weight", "imitation_weight"),
    *("policy_noise", "noise_clip", "exploration_noise", "deviations", "diversity"),
    *("policy_cloning", "critic_cloning"),
    *("eta", "max_subgoals"),
    *("subset", "features", "ids"),  # 0: all critics, all features, or no ids
)
_FINITE = ("steering", "bias", "target_entropy", "maximum")


def require_ranges(config: Any) -> None:
    """Raises ValueError, naming the field, for a hyper-parameter outside the range that its name has in all agents.

    One that is swept inside one program (a tracer) is not looked at.
    """
    for names, within, text in (
        (_SHARES, lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
        (_COUNTS, lambda x: x >= 1, "must be at least 1"),
        (_NOT_NEGATIVE, lambda x: x >= 0, "must be at least 0"),
        (_FINITE, math.isfinite, "must be finite"),
    ):
        for name in names:
            value = getattr(config, name, None)
            parts = value if isinstance(value, tuple) else (value,)
            if not all(within(x) for x in parts if isinstance(x, int | float)):
                raise ValueError(f"{name}={value} {text}")


def require_fixed_discount(config: Any) -> None:
    """Raises ValueError for a ``discount`` that is swept inside one program, where goals alone are drawn by it."""
    if isinstance(config.discount, jax.Array):
        raise ValueError(
            "a sweep of discount: this agent's updates know none, and the goals of all runs are drawn by one "
            "(rl.replay.goals.sampler), so that they would be the same: train every value as a run of its own"
        )


def is_off(weight: float | Array) -> bool:
    """True for a term whose weight is 0 when the program is built, so that it need not be computed.

    A weight that is swept inside one program (a tracer) is never off.
    """
    return isinstance(weight, int | float) and weight == 0
