"""EDAC (An et al., NeurIPS 2021): SAC-N with the diversity loss on; see ``sac_n`` for the objective."""

from __future__ import annotations

import dataclasses

import optax

from rl.agents import sac_n
from rl.agents.optimisers import Optimiser
from rl.agents.requirements import require
from rl.types import Learner, Spec
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config(sac_n.Config):
    """Hyper-parameters; the paper uses N = 10 or 50 and eta = 1 or 5."""

    diversity: float = 1.0  # eta, weight of the term that makes the critics' gradients differ


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "edac", discrete=False)
    return sac_n.make(config, spec, head, optimiser)


target_range = sac_n.target_range
