"""How the parameters of a network move: Adam with a schedule, clipping and weight decay, as settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl.agents.state import is_off
from rl.settings import require_choice
from rl.types import Array

# A learning rate becomes a gradient transformation: `optax.adam`, or `optax.sgd` in a test.
Optimiser = Callable[[float | Array], optax.GradientTransformation]

SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class Adam:
    """Settings of one network's optimiser.

    A cosine is to be as long as the run, since its network does not move after ``decay_updates``. Scripts refuse a
    longer run (`experiments.checks.schedules`); from Python, where nothing knows how long a run is going to be, it is
    for the caller to see to.
    """

    schedule: str = "constant"  # schedule of the learning rate: constant or cosine, which falls to 0
    decay_updates: int = 1_000_000  # updates until a cosine is 0, warm-up included; the rate then stays 0
    warm_up: int = 0  # updates of the agent over which the learning rate rises from 0
    clip: float = 0.0  # largest gradient norm (all critics together); larger ones are scaled down; 0: off
    weight_decay: float = 0.0  # AdamW's weight decay, of kernels only; of language models 0: the agent's
    epsilon: float = 1e-8  # Adam's epsilon
    learning_rate: float = 0.0  # learning rate of this network; 0: the agent's

    def __post_init__(self) -> None:
        require_choice("schedule", self.schedule, SCHEDULES)
        if self.warm_up < 0:
            raise ValueError(f"warm_up={self.warm_up} must be at least 0")
        if self.schedule == "cosine" and self.warm_up >= self.decay_updates:
            raise ValueError(f"warm_up={self.warm_up} must be less than decay_updates={self.decay_updates}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate={self.learning_rate} must be at least 0, and finite; 0 is the agent's"
            )
        for name in ("clip", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0; 0 turns it off")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon={self.epsilon} must be positive")


def build(
    settings: Adam, learning_rate: float | Array, optimiser: Optimiser = optax.adam, period: int = 1
) -> optax.GradientTransformation:
    """The optimiser of one network.

    Args:
      settings: see `Adam`.
      learning_rate: the agent's, where ``settings`` have none; its greatest value, where there is a schedule.
      optimiser: what to use in place of Adam; the schedule of ``settings`` scales its steps, too, so that a cosine ends
        at ``decay_updates``, and ``Adam()`` as settings leaves it as it is.
      period: the network moves on every ``period``-th update of its agent alone.

    Raises:
      ValueError: ``optimiser`` is not Adam, and ``settings`` ask for clipping, weight decay or another epsilon.
    """
    s, is_adam = settings, optimiser is optax.adam
    learning_rate = s.learning_rate or learning_rate
    if not is_adam:
        for name in ("clip", "weight_decay", "epsilon"):
            if getattr(s, name) != getattr(Adam(), name):
                raise ValueError(f"{name}={getattr(s, name)} is for Adam, and another optimiser was given")
        inner = optimiser(learning_rate)
    elif s.weight_decay:
        inner = optax.adamw(learning_rate, eps=s.epsilon, weight_decay=s.weight_decay, mask=_kernels)
    else:
        inner = optax.adam(learning_rate, eps=s.epsilon)
    return _clipped_and_scheduled(s, inner, period)


def adamw(
    settings: Adam, learning_rate: float | Array, weight_decay: float, optimiser: Optimiser | None = None
) -> optax.GradientTransformation:
    """The optimiser of one network of a language model: AdamW, which decays neither norms nor biases, but all else, the
    embedding too (Brown et al. 2020, and others since).

    Args:
      settings: see `Adam`.
      learning_rate: the agent's, as in `build`.
      weight_decay: the agent's, where ``settings`` have none.
      optimiser: what to use in place of AdamW, as in `build`; ``weight_decay`` is not for it.

    Raises:
      ValueError: as `build`.
    """
    s = settings
    if optimiser is not None:
        return build(s, learning_rate, optimiser)
    decay = s.weight_decay or weight_decay
    rate, mask = s.learning_rate or learning_rate, None if is_off(decay) else _matrices
    return _clipped_and_scheduled(s, optax.adamw(rate, eps=s.epsilon, weight_decay=decay, mask=mask))


def _clipped_and_scheduled(
    settings: Adam, inner: optax.GradientTransformation, period: int = 1
) -> optax.GradientTransformation:
    steps = [optax.clip_by_global_norm(settings.clip), inner] if settings.clip else [inner]
    if settings.warm_up or settings.schedule != "constant":
        steps.append(optax.scale_by_schedule(lambda count: share(settings, (count + 1) * period - 1)))
    return optax.chain(*steps) if len(steps) > 1 else inner


def share(settings: Adam, count: Array) -> Array:
    """The part of the learning rate, in [0, 1], with which update number ``count`` is made, counted from 0."""
    part = jnp.minimum(1.0, (count + 1) / settings.warm_up) if settings.warm_up else jnp.ones(())
    if settings.schedule == "constant":
        return part
    progress = (count - settings.warm_up) / (settings.decay_updates - settings.warm_up)
    return part * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0))) / 2


def _kernels(params: Any) -> Any:
    """True for the leaves of ``params`` that are kernels."""
    return jax.tree.map_with_path(lambda path, _: _last(path) == "kernel", params)


def _matrices(params: Any) -> Any:
    """True for the leaves of ``params`` that are neither the scale of a norm nor a bias."""
    return jax.tree.map_with_path(lambda path, _: not (_last(path) or "").endswith(("scale", "bias")), params)


def _last(path: tuple[Any, ...]) -> str | None:
    """The name of a leaf; None of a parameter that is all of its tree, such as a multiplier."""
    return getattr(path[-1], "key", None) if path else None
