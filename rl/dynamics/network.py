"""The networks of a dynamics ensemble: their parameters, and what they predict.

Member ``i`` maps the standardised (s, a) to the mean and the log-variance of (s' - s, r), as in PETS (Chua et al. 2018)
and MBPO (Janner et al. 2019); a deterministic ensemble has means alone.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.dynamics.config import Config
from rl.types import Array, Key, Params, Spec

CLIP = 10.0  # standardised inputs end here


class Model(NamedTuple):
    """A fitted ensemble. With a leading axis [S] on everything where it was fitted for several keys."""

    members: Params  # leading axis [E], the best first
    bounds: Params  # of the log-variance; empty if deterministic
    mean: Array  # [I] of the inputs
    deviation: Array  # [I]; infinite for an input that was constant, which is then ignored
    error: Array  # [E] squared error on the held-out rows, mean over dimensions, ascending; infinite before a fit


def init(config: Config, spec: Spec, key: Key) -> Model:
    """Parameters before fitting: kernels from N(0, 1 / (4 fan_in)) cut at two deviations, biases 0."""
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


# ---- predictions of the elites ------------------------------------------------------------------------------


def predict(
    config: Config, spec: Spec, model: Model, observation: Array, action: Array
) -> tuple[Array, Array]:
    """Mean and deviation [M, ..., O + 1] of the next observation and, last, the reward."""
    inputs = standardize(join(spec, observation, action), model.mean, model.deviation)
    elites = jax.tree.map(lambda x: x[: config.elites], model.members)
    shared = jnp.broadcast_to(inputs, (config.elites, *inputs.shape))
    mean, log_variance = distribution(elites, model.bounds, shared)
    mean = mean.at[..., :-1].add(observation)
    return mean, jnp.zeros_like(mean) if log_variance is None else jnp.exp(0.5 * log_variance)


def propose(
    config: Config, spec: Spec, model: Model, observation: Array, action: Array, key: Key
) -> tuple[Array, Array]:
    """Next observations [M, ..., O] and rewards [M, ...], one independent draw from each elite."""
    mean, deviation = predict(config, spec, model, observation, action)
    sample = mean + deviation * jax.random.normal(key, mean.shape)
    return sample[..., :-1], sample[..., -1]


def step(
    config: Config, spec: Spec, model: Model, observation: Array, action: Array, key: Key
) -> tuple[Array, Array]:
    """Next observations [..., O] and rewards [...], each the proposal of one random elite.

    All elites propose for every row. mbrl-lib gives each an equal share of the rows, which are then no longer
    independent in their choice. On one core that would save 6 % of an epoch of RAVL and nothing of MOPO's, whose
    penalty asks all elites; 30 % only of the method without either.
    """
    propose_key, elite_key = jax.random.split(key)
    observations, rewards = propose(config, spec, model, observation, action, propose_key)
    elite = jax.random.randint(elite_key, (1, *rewards.shape[1:]), 0, config.elites)
    chosen = jnp.take_along_axis(observations, elite[..., None], 0)[0]
    return chosen, jnp.take_along_axis(rewards, elite, 0)[0]


def distribution(members: Params, bounds: Params, inputs: Array) -> tuple[Array, Array | None]:
    """Means and log-variances [E, ..., O + 1] of standardised inputs [E, ..., I]; deterministic ones have no second.

    A log-variance is clamped softly between the learned vectors ``bounds``.
    """
    x = jax.vmap(_forward)(members, inputs)
    if not bounds:
        return x, None
    mean, raw = jnp.split(x, 2, -1)
    raw = bounds["max"] - jax.nn.softplus(bounds["max"] - raw)
    return mean, bounds["min"] + jax.nn.softplus(raw - bounds["min"])


def _forward(layers: Params, x: Array) -> Array:
    """One member's outputs [..., P] for standardised inputs [..., I]."""
    for layer in layers[:-1]:
        x = jax.nn.silu(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


# ---- inputs -------------------------------------------------------------------------------------------------


def join(spec: Spec, observation: Array, action: Array) -> Array:
    """Inputs [..., I]; integer actions enter one-hot."""
    if spec.discrete:
        action = jax.nn.one_hot(action, spec.action_size)
    return jnp.concatenate([observation, action], -1)


def standardize(inputs: Array, mean: Array, deviation: Array) -> Array:
    """Inputs [..., I] in units of their deviation, clipped at +-10."""
    return ((inputs - mean) / deviation).clip(-CLIP, CLIP)


def restandardize(model: Model, mean: Array, deviation: Array) -> Model:
    """The model with other statistics [I] of its inputs, and a first layer that undoes the change.

    With m, d the old statistics, m', d' the new ones and z = (x - m') / d',

        W^T (x - m) / d + b = (W d' / d)^T z + W^T (m' - m) / d + b

    so that predictions stay what they were where nothing is clipped. As no input counted for more than the clip allows,
    neither d' / d nor (m' - m) / d exceeds it: an input that hardly varied before and now does, does not swamp the
    others. An input that was constant was ignored: its weights start from 0.
    """
    first, *rest = model.members
    scale = jnp.minimum(jnp.where(jnp.isfinite(deviation), deviation, 0.0) / model.deviation, CLIP)
    shift = standardize(mean, model.mean, model.deviation)
    first = {
        "kernel": first["kernel"] * scale[:, None],
        "bias": first["bias"]
        + jnp.einsum("i,eij->ej", shift, first["kernel"], precision=jax.lax.Precision.HIGHEST),
    }
    return model._replace(members=[first, *rest], mean=mean, deviation=deviation)
