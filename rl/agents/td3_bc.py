"""TD3+BC (Fujimoto & Gu, NeurIPS 2021): TD3 whose actor is also pulled to the logged action.

    L_pi = E_D[ - lambda Q_1(s, pi(s)) + (pi(s) - a)^2 ],   lambda = alpha / E_D |Q_1(s, pi(s))|     (5)

Everything else is TD3's: see ``td3``. Observations are standardised by the paper; that is a property of the data
here (``--normalize_observations``).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

from rl.agents import td3
from rl.agents.optimisers import Optimiser
from rl.agents.requirements import require
from rl.types import Array, Learner, Metrics, Spec
from rl.values import losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config(td3.Config):
    """Hyper-parameters; defaults are the paper's."""

    alpha: float = 2.5  # weight of Q against cloning


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "td3_bc", discrete=False)

    def objective(q: Array, action: Array, logged: Array) -> tuple[Array, Metrics]:
        cloning = jnp.square(action - logged).mean()
        return cloning - config.alpha * losses.q_scale(q) * q.mean(), {"cloning": cloning}

    return td3.learner(config, spec, head, optimiser, objective)


unused = td3.unused
