"""PEVI, pessimistic value iteration for linear MDPs (Jin, Yang & Wang, ICML 2021): the agent that is not robust.

From the last step to the first, with ``z`` and ``Lambda`` of `rl.agents.linear`,

    w_h = z(r_h + V_{h+1}),   Q_h = min{phi @ w_h - beta sqrt(phi' Lambda^-1 phi), H - h + 1},   V_h = max_a Q_h

Rewards are estimated with the values. Not a `rl.types.Learner`: see `rl.agents.linear`.
"""

from __future__ import annotations

import dataclasses

from rl.agents import linear
from rl.agents.linear import Fit
from rl.replay.linear import Trajectories


@dataclasses.dataclass(frozen=True)
class Config(linear.Config):
    """Hyper-parameters; defaults are the R2PVI paper's for the simulated linear MDP."""

    penalty: str = "ellipsoid"  # one of linear.PENALTIES


def fit(config: Config, data: Trajectories) -> Fit:
    """One backward pass; see `rl.agents.linear.backward` for errors."""
    return linear.backward(
        config, data, lambda regression, target, *_: regression.z(target), known_reward=False
    )
