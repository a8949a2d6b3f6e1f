"""Settings of a dynamics ensemble, and what is refused."""

from __future__ import annotations

import dataclasses
import math

from rl import nest
from rl.types import Spec


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
    updates: int = 0  # > 0: about this many (rounded down to a multiple of 20) in place of the stopping rule
    patience: int = 5  # checks, one per epoch, without improvement
    min_epochs: int = 350  # before fitting may stop
    max_epochs: int = 2000  # after which it stops


def check(config: Config, spec: Spec) -> None:
    """Raises ValueError, naming the field, on what cannot be built."""
    nest.require_array(spec.observation_shape, "a dynamics ensemble")
    if len(spec.observation_shape) != 1:
        raise ValueError(
            f"a dynamics ensemble predicts flat vectors, not observations of shape {spec.observation_shape}"
        )
    if not 1 <= config.elites <= config.members:
        raise ValueError(f"elites={config.elites} must be between 1 and members={config.members}")
    if len(config.decay) != len(config.hidden) + 1:
        raise ValueError(
            f"decay={config.decay} of the dynamics model has {len(config.decay)} rates: give one for each of the "
            f"{len(config.hidden)} hidden layers and one for the output"
        )
    if not 0 < config.holdout < 1:
        raise ValueError(f"holdout={config.holdout} must be a share between 0 and 1")
    if min(config.hidden, default=1) < 1:
        raise ValueError(f"hidden={config.hidden} of the dynamics model: a layer has at least one unit")
    if not all(0 <= rate < math.inf for rate in config.decay):
        raise ValueError(f"decay={config.decay} of the dynamics model must be numbers from 0")
    if not 0 < config.learning_rate < math.inf:
        raise ValueError(f"learning_rate={config.learning_rate} of the dynamics model must be positive")
    for name, least in {
        "batch_size": 1,
        "updates": 0,
        "patience": 1,
        "min_epochs": 0,
        "max_epochs": 1,
    }.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)} of the dynamics model must be at least {least}")
