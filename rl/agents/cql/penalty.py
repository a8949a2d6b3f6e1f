"""CQL's settings, and its penalty: what continuous and integer actions have in common."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rl.agents.optimisers import Adam
from rl.agents.requirements import require_ranges
from rl.agents.state import is_off
from rl.networks.layers import Architecture
from rl.settings import require_choices
from rl.types import Array
from rl.values import losses

VARIANTS = ("h", "rho", "var")
GREATEST = 1e6  # of alpha'


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of the paper's code for D4RL locomotion."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    variant: str = "h"  # form of the penalty: h, rho or var
    weight: float = 5.0  # w, weight of the penalty
    target_gap: float = 0.0  # tau of the Lagrange version, in units of weight times gap; 0 turns it off
    samples: int = 10  # actions drawn from each proposal (continuous actions)
    backup_entropy: bool = False  # entropy in the target, unless max_backup (continuous actions)
    max_backup: bool = False  # best of `samples` next actions in the target (continuous actions)
    double: bool = True  # double Q-learning (integer actions)
    target_rate: float = 0.005  # Polyak step of the target critics
    learning_rate: float = 3e-4  # Adam, critics and multiplier
    policy_learning_rate: float = 1e-4  # Adam, policy and temperature (continuous actions)
    hidden: tuple[int, ...] = (256, 256, 256)  # widths of every network's layers
    layer_norm: bool = False  # LayerNorm in the critics
    network: Architecture = Architecture(initialiser="rlkit")  # of every network
    critic_optimiser: Adam = Adam()  # of the critics
    policy_optimiser: Adam = Adam()  # of the policy (continuous actions)

    def __post_init__(self) -> None:
        require_ranges(self)
        require_choices(self, {"variant": VARIANTS})


def gap(variant: str, values: Array, log_density: Array, q_data: Array) -> Array:
    """``R(Q(s, .)) - Q(s, a)`` [...] from values [..., N], log densities broadcast to them and Q [...]."""
    log_density = jnp.broadcast_to(log_density, values.shape)
    if variant == "h":
        return losses.cql_h(values, log_density) - q_data
    if variant == "rho":
        return losses.cql_rho(values, log_density) - q_data
    return losses.cql_var(values, log_density)


def weigh(config: Config, gap: Array, log_multiplier: Array) -> tuple[Array, Array, Array]:
    """The critics' penalty, the multiplier's loss, and the weight that gaps have, from the gap of each critic."""
    if is_off(config.target_gap):
        return config.weight * gap.sum(), jnp.zeros(()), jnp.asarray(config.weight, jnp.float32)
    multiplier = jnp.clip(jnp.exp(log_multiplier), 0.0, GREATEST)
    excess = config.weight * gap - config.target_gap
    penalty = (jax.lax.stop_gradient(multiplier) * excess).sum()
    return penalty, -(multiplier * jax.lax.stop_gradient(excess)).mean(), multiplier * config.weight
