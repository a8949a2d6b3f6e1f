"""EDAC (An et al., NeurIPS 2021): SAC-N with the diversity loss on; see ``sac_n`` for the objective."""

from __future__ import annotations

import dataclasses

from rl.agents import sac_n

make, target_range = sac_n.make, sac_n.target_range


@dataclasses.dataclass(frozen=True)
class Config(sac_n.Config):
    """Hyper-parameters; the paper uses N = 10 or 50 and eta = 1 or 5."""

    diversity: float = 1.0  # eta
