"""Soft actor-critic (Haarnoja et al., 2018) with twin critics and a learned temperature.

It is SAC-N with N = 2, written by the same authors' rule: see ``sac_n`` for the objective. Differences from the
paper's second version, all shared with ``sac_n``: the temperature and the actor move before the critics, and the
policy's log standard deviation is kept in [-5, 2]. Layers start as Keras', in which the authors' code is written:
Glorot's uniform kernels and biases of 0.
"""

from __future__ import annotations

import dataclasses

import optax

from rl.agents import sac_n
from rl.agents.optimisers import Optimiser
from rl.agents.requirements import require
from rl.networks.layers import Architecture
from rl.types import Learner, Spec
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config(sac_n.Config):
    """Hyper-parameters; defaults are the paper's."""

    critics: int = 2  # N, members of the critic ensemble
    hidden: tuple[int, ...] = (256, 256)  # widths of every network's layers
    network: Architecture = Architecture(initialiser="glorot")  # of every network


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "sac", discrete=False)
    return sac_n.make(config, spec, head, optimiser)


target_range = sac_n.target_range
