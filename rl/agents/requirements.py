"""What agents refuse before they train: actions of another kind, settings that they do not have or cannot use."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rl.networks.layers import Architecture
from rl.settings import is_known
from rl.types import Spec, Transition

_SHARES = ("discount", "chunk_discount", "expectile", "target_rate")
_COUNTS = (
    *("critics", "samples", "candidates", "policy_delay", "target_period", "replan_every"),
    *("hidden", "inner", "latent", "representation", "chunk"),
)
_AMOUNTS = (
    *("learning_rate", "policy_learning_rate", "value_learning_rate"),
    *("epsilon", "epsilon_updates"),
    *("temperature", "awr_temperature", "alpha", "initial_alpha", "low_alpha", "high_alpha"),
    *("weight", "target_gap", "weight_decay", "td_weight", "dominance_weight", "margin_weight", "margin"),
    *("munchausen", "bc_weight", "cql_weight", "advantage_weight", "imitation_weight"),
    *("policy_noise", "exploration_noise", "deviations", "diversity"),
    *("policy_cloning", "critic_cloning"),
    *("eta", "max_subgoals", "gumbel"),
    *("subset", "features", "ids"),  # 0: all critics, all features, or no ids
)
_BOUNDS = ("noise_clip",)  # infinite: none
_FINITE = ("steering", "bias", "target_entropy", "maximum")


def require(spec: Spec, agent: str, *, discrete: bool, instead: str = "") -> None:
    """Raises ValueError if ``agent`` cannot handle the kind of action in ``spec``.

    Args:
      spec: of observations and actions.
      agent: its name.
      discrete: whether it acts in integers.
      instead: agents to recommend, where those that learn from rewards will not do.
    """
    if spec.discrete != discrete:
        have = "integer" if spec.discrete else "continuous"
        use = instead or (
            "dqn, or from a log also cql, iql or bc"
            if spec.discrete
            else "sac, td3, arsq, cqn, or from a log also iql, cql, td3_bc, rebrac, sac_n, edac, fql, ifql, deas or bc"
        )
        raise ValueError(f"agent {agent!r} cannot act in {have} actions: use {use}")


def require_no_policy(architecture: Architecture, agent: str) -> None:
    """Raises ValueError for settings of policy networks, which ``agent`` does not have."""
    for name in ("dropout", "policy_layer_norm"):
        if getattr(architecture, name):
            raise ValueError(f"network.{name} is for policies, and {agent} has none: leave it out")


def require_ranges(config: Any) -> None:
    """Raises ValueError, naming the field, for a hyper-parameter outside the range that its name has in all agents.

    One that is swept inside one program (a tracer) is not looked at.
    """
    for names, within, text in (
        (_SHARES, lambda x: 0 <= x <= 1, "must lie in [0, 1]"),
        (_COUNTS, lambda x: x >= 1, "must be at least 1"),
        (_AMOUNTS, lambda x: 0 <= x < math.inf, "must be at least 0, and finite"),
        (_BOUNDS, lambda x: x >= 0, "must be at least 0"),
        (_FINITE, math.isfinite, "must be finite"),
    ):
        for name in names:
            value = getattr(config, name, None)
            parts = value if isinstance(value, tuple) else (value,)
            if not all(within(x) for x in parts if is_known(x)):
                raise ValueError(f"{name}={value} {text}")


def require_next_actions(logged: Transition | None, why: str, instead: str) -> None:
    """Raises ValueError if few steps of ``logged`` data (None: there are none) say which action came next.

    Args:
      logged: as batches are drawn.
      why: what asks for next actions.
      instead: the setting that does not.
    """
    if logged is None:
        return
    continued = np.asarray(logged.discount) > 0
    share = np.asarray(logged.has_next_action)[continued].mean() if continued.any() else 1.0
    if share < 0.5:
        raise ValueError(
            f"{why}, and only {share:.0%} of the steps have one (those in no order have none, nor have rollouts in a "
            f"model, nor chunks after which no whole chunk follows): give {instead}, or steps in order, or shorter "
            "chunks or returns over fewer steps"
        )


def require_fixed_discount(config: Any) -> None:
    """Raises ValueError for a ``discount`` that is swept inside one program, where goals alone are drawn by it."""
    if not is_known(config.discount):
        raise ValueError(
            "a sweep of discount: this agent's updates know none, and the goals of all runs are drawn by one "
            "(rl.replay.goals.sampler), so that they would be the same: train every value as a run of its own"
        )
