"""Conservative Q-learning (Kumar, Zhou, Tucker & Levine, NeurIPS 2020), for continuous and integer actions.

    L_Q = E_D[ sum_i loss_Qi(y) ] + sum_i w gap_i,   gap_i = E_D[ R(Q_i(s, .)) - Q_i(s, a) ]

``R`` is the variant (`rl.values.losses.cql_h`, `rl.values.losses.cql_rho`, `rl.values.losses.cql_var`; for ``var``
the logged action's term has cancelled). With ``target_gap`` = tau > 0 the penalty is the paper's Lagrangian, as in its
code:

    L_Q       = E_D[ sum_i loss_Qi(y) ] + alpha' sum_i ( w gap_i - tau )
    L_alpha'  = - alpha' mean_i ( w gap_i - tau ),   0 <= alpha' <= 1e6, from 1

What ``y`` and the policy are is in `continuous` and `discrete`. All gradients are taken at the same parameters.
"""

from __future__ import annotations

import optax

from rl.agents import sac_n
from rl.agents.cql import continuous, discrete
from rl.agents.cql.penalty import VARIANTS, Config
from rl.agents.optimisers import Optimiser
from rl.types import Learner, Spec
from rl.values.heads import ValueHead

__all__ = ["VARIANTS", "Config", "make", "target_range"]


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`."""
    return (discrete if spec.discrete else continuous).make(config, spec, head, optimiser)


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of values, widened as for `sac_n` where targets hold the entropy."""
    if spec.discrete or not config.backup_entropy or config.max_backup:
        return low, high
    return sac_n.target_range(sac_n.Config(discount=config.discount), spec, low, high)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    if not config.max_backup:
        return {}
    return {"backup_entropy": "with max_backup targets leave the entropy out"}
