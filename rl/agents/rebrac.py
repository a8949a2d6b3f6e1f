"""ReBRAC (Tarasov et al., NeurIPS 2023): TD3+BC with the pull to the data in actor and critic apart.

    y    = r + gamma d ( min_i Q'_i(s', a~) - beta_2 |a~ - a'|^2 ),   a~ the smoothed target policy
    L_Q  = E_D[ sum_i loss_Qi(y) ]
    L_pi = E_D[ beta_1 |pi(s) - a|^2 - lambda min_i Q_i(s, pi(s)) ],   lambda = 1 / E_D |min_i Q_i|

``a'`` is the action logged at ``s'``; where an episode was cut there is none and the critic's penalty is
left out. Deeper networks and LayerNorm in the critics are part of the method, and so are batches of 1024 on
locomotion. An agent draws no batches: their size is a published setting of the command line (``--preset=paper``, its
default), as are beta_1 and beta_2, which the paper tunes for each dataset; the defaults here are in the middle of its
grid. The squared distance is summed over action dimensions, as in the authors' code (TD3+BC takes their mean). Layers
start as there (`rl.networks.layers.Architecture`, ``rlkit``), but LayerNorm stands before each ReLU, where they have
it after: ``network.norm_after``, which published settings set. Their slow policy follows the actor from before its
update; here it follows the updated one, as in TD3.

The ReBRAC of a later comparison on OGBench (code of QAM) is not that of the first (FQL): it has ten critics, whose
mean less half a deviation stands for the minimum in targets and policy alike, no pull in the critic and, on most tasks,
no noise in targets. These are settings: ``critics``, ``aggregation``, ``deviations``, ``critic_cloning``,
``policy_noise``. In its code the policy moves on every update and only the target networks on every second, which no
setting does: ``policy_delay`` is of both.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

from rl.agents import td3
from rl.agents.optimisers import Optimiser
from rl.agents.requirements import require, require_next_actions
from rl.agents.state import is_off
from rl.networks.layers import Architecture
from rl.replay.dataset import for_ever
from rl.types import Array, Learner, Metrics, Spec, Transition
from rl.values import losses
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config(td3.Config):
    """Hyper-parameters; defaults are the paper's for D4RL locomotion, but for where LayerNorm stands (see above)."""

    policy_cloning: float = 0.05  # beta_1, in the policy's loss; the paper's grid: 0.001, 0.01, 0.05, 0.1
    critic_cloning: float = 0.01  # beta_2, in targets; the paper's grid: 0, 0.001, 0.01, 0.1, 0.5
    learning_rate: float = 1e-3  # Adam, all networks
    hidden: tuple[int, ...] = (256, 256, 256)  # widths of every network's layers
    layer_norm: bool = True  # LayerNorm in the critics
    network: Architecture = Architecture(initialiser="rlkit")  # of every network


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "rebrac", discrete=False)

    def objective(q: Array, action: Array, logged: Array) -> tuple[Array, Metrics]:
        cloning = jnp.square(action - logged).sum(-1).mean()
        return config.policy_cloning * cloning - losses.q_scale(q) * q.mean(), {"cloning": cloning}

    def penalty(next_action: Array, batch: Transition) -> Array:
        distance = jnp.square(next_action - batch.next_action).sum(-1) * batch.has_next_action
        return config.critic_cloning * distance

    return td3.learner(config, spec, head, optimiser, objective, penalty, by_all=True)


def check_data(config: Config, logged: Transition | None) -> None:
    """Raises ValueError if the ``logged`` data (None: there are none) lack next actions, which critics ask for."""
    if not is_off(config.critic_cloning):
        why = f"critic_cloning={config.critic_cloning} compares next actions with those of the data"
        require_next_actions(logged, why, "critic_cloning=0")


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of values, lowered by the critic's penalties to come, each at most 4 D beta_2.

    What a pessimistic aggregation takes off has no bound that is known beforehand: train/clipped says what is cut off.
    """
    penalty = 4 * spec.action_size * config.critic_cloning * config.discount
    return low - for_ever(penalty, config.discount), high


unused = td3.unused
