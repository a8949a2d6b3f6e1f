"""How a policy is taken from what a goal-conditioned agent has learned: two losses that several agents choose from.

    ddpg_bc    - lambda E[ Q(s, pi(s, g), g) ] - alpha E[ log pi(a | s, g) ],   lambda = 1 / E |Q|
    awr        - E[ min(exp(alpha A(s, a, g)), 100) log pi(a | s, g) ]

Park et al. (2024, "Is value learning really the main bottleneck in offline RL?") compare them. ``pi(s, g)`` is the mean
of a `rl.networks.mlp.unit_policy`, clipped to the box of actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl.networks import mlp
from rl.types import Array, Metrics, Spec
from rl.values import losses

if TYPE_CHECKING:
    import distrax

EXTRACTIONS = ("ddpg_bc", "awr")


def require(config: Any, spec: Spec) -> None:
    """Raises ValueError if ``config.extraction`` cannot handle the actions."""
    if config.extraction == "ddpg_bc" and spec.discrete:
        raise ValueError(
            "extraction=ddpg_bc needs a gradient by actions, and these are integers: use extraction=awr"
        )


def policy_loss(
    config: Any,
    spec: Spec,
    policy: distrax.Distribution,
    action: Array,
    q: Callable[[Array], Array],
    advantage: Callable[[], Array],
) -> tuple[Array, Metrics]:
    """The loss [] of ``config.extraction`` with weight ``config.alpha``, and what to report.

    Args:
      config: an agent's.
      spec: of its actions.
      policy: [B], at states and goals.
      action: [B, D] or [B], the logged ones.
      q: action -> [B], its value there, without a gradient for the critic.
      advantage: -> [B], that of the logged actions; asked by ``awr`` alone.
    """
    log_prob = policy.log_prob(action)
    if config.extraction == "ddpg_bc":
        policy_q = q(mlp.greedy(policy, spec))
        loss, measured = losses.ddpg_bc(policy_q, log_prob, config.alpha), {"policy_q": policy_q.mean()}
    else:
        advantages = advantage()
        loss = -(losses.awr_weight(advantages, config.alpha) * log_prob).mean()
        measured = {"advantage": advantages.mean()}
    return loss, {"policy_loss": loss, "log_prob": log_prob.mean(), **measured}
