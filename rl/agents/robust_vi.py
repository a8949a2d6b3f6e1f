"""Robust planning in finite MDPs: robust value iteration, and IWOCS for a family of static models.

Robust value iteration (Iyengar 2005; Nilim & El Ghaoui 2005) lets an adversary choose the next-state distribution
of every state and action anew (sa-rectangularity), from a set around the nominal one:

    V(s) = max_a r(s, a) + gamma inf_q { E_q[d V] + price(q) }

with ``d`` the environment's own discount. The operator is a contraction in ``gamma`` for every set here. The sets
are those of `rl.values.robust`: a ball of some radius, or any distribution at a price.

IWOCS (Zouitine, Geist & Rachelson 2024) solves ordinary MDPs instead, one per worst case found so far. Its
adversary is static: one member of a family, the same in all states and at all times.

These are no `rl.types.Learner`: a planner sees a model, not batches, and has no step to count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import linalg
from rl.envs import tabular
from rl.envs.tabular import MDP
from rl.settings import require_choice
from rl.types import Array
from rl.values import robust

_SWEEPS = 10_000  # of value iteration, at most


class Backup(NamedTuple):
    """What next states are worth: ``dual(values, weights, size)`` of values [S] or [S, A, K], weights [S, A, K]."""

    dual: robust.Dual  # -> [S, A]
    size: float | Array  # [] or [S, A]: a price or a radius


class Solution(NamedTuple):
    """What a planner found."""

    value: Array  # [S]
    q: Array  # [S, A], -inf where not allowed
    change: Array  # [] largest change of a value in the last sweep
    sweeps: Array  # [] int32


# ---- what the next states are worth ---------------------------------------------------------------------------


def _mean(values: Array, weights: Array, size: float | Array = 0.0) -> Array:
    del size
    return weights @ values if values.ndim == 1 else (weights * values).sum(-1)


NOMINAL = Backup(_mean, 0.0)  # the mean: no adversary
# The least mean over a family of models, chosen for every state and action: weights [M, S, A, K].
MEMBER = Backup(lambda values, weights, size: _mean(values, weights).min(0), 0.0)


def regularised(divergence: str, scale: float | Array) -> Backup:
    """Any distribution, at the price of ``scale`` [] or [S, A] times ``divergence``, a key of `robust.REGULARISED`."""
    return _backup("scale", robust.REGULARISED, divergence, scale)


def ball(divergence: str, radius: float | Array) -> Backup:
    """All distributions within ``radius`` [] or [S, A] of the nominal by ``divergence``, a key of `robust.BALLS`."""
    return _backup("radius", robust.BALLS, divergence, radius)


def _backup(name: str, duals: dict[str, robust.Dual], divergence: str, size: float | Array) -> Backup:
    require_choice("divergence", divergence, duals)
    if not isinstance(size, jax.core.Tracer):
        least = np.min(size)
        if not (least > 0 if name == "scale" else least >= 0):
            wanted = "positive" if name == "scale" else "0 or more"
            raise ValueError(f"the {name} must be {wanted}, not {least:g}")
    return Backup(duals[divergence], size)


# ---- fixed points -----------------------------------------------------------------------------------------------


@linalg.exact
def value_iteration(
    mdp: MDP,
    gamma: float,
    backup: Backup = NOMINAL,
    *,
    low: float = -np.inf,
    tolerance: float = 1e-6,
    evaluations: int = 20,
) -> Solution:
    """The optimal robust value.

    A sweep changes the value of every state to that of its best action. Between two sweeps come cheap ones over the
    best actions alone (modified policy iteration; its robust form: Kaufman & Schaefer 2013).

    For ``gamma < 1`` the value is within ``tolerance * gamma / (1 - gamma)`` of the fixed point. With ``gamma`` 1 there
    is no such bound; from its start at 0 it finds the least fixed point where rewards are not negative.

    Args:
      mdp: the nominal model; for `MEMBER` with transition [M, S, A, K].
      gamma: the agent's discount, in [0, 1].
      backup: what next states are worth: `NOMINAL`, `MEMBER`, or what `regularised` or `ball` returns.
      low: lower bound of all values: the known value of the worst outcome, where rewards carry a penalty and may
        promise less.
      tolerance: largest change of a value in the last sweep; below the precision of the values it is never reached.
      evaluations: cheap sweeps between two.

    Raises:
      ValueError: ``gamma`` outside [0, 1].
    """
    mdp = _arrays(mdp, gamma)
    states = jnp.arange(len(mdp.discount))

    def evaluate(solution: Solution) -> Array:
        action = solution.q.argmax(-1)
        pick = lambda x: x[..., states, action, :][..., None, :]
        size = jnp.asarray(backup.size)
        one = mdp._replace(
            transition=pick(mdp.transition),
            successor=mdp.successor if mdp.successor.ndim == 1 else pick(mdp.successor),
            reward=mdp.reward[states, action][:, None],
        )
        adversary = backup._replace(size=size[states, action][:, None] if size.ndim else size)
        sweep = lambda _, value: _q(one, value, gamma, adversary, low)[:, 0]
        return jax.lax.fori_loop(0, evaluations, sweep, solution.value)

    def improve(solution: Solution) -> Solution:
        before = evaluate(solution)
        q = jnp.where(mdp.allowed, _q(mdp, before, gamma, backup, low), -jnp.inf)
        value = q.max(-1)
        return Solution(value, q, jnp.abs(value - before).max(), solution.sweeps + 1)

    return _until_settled(mdp, improve, tolerance)


def greedy(q: Array) -> Array:
    """The policy [..., S, A] that takes the action of the largest value, the first of equals."""
    return jax.nn.one_hot(q.argmax(-1), q.shape[-1], dtype=q.dtype)


def _arrays(mdp: MDP, gamma: float) -> MDP:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], not {gamma}")
    return jax.tree.map(jnp.asarray, mdp)


def _q(mdp: MDP, value: Array, gamma: float, backup: Backup, low: float) -> Array:
    arriving = (mdp.discount * value)[mdp.successor]
    return jnp.maximum(mdp.reward + gamma * backup.dual(arriving, mdp.transition, backup.size), low)


def _until_settled(mdp: MDP, sweep: Callable[[Solution], Solution], tolerance: float) -> Solution:
    dtype = jnp.result_type(mdp.transition, mdp.reward)
    nothing = Solution(
        value=jnp.zeros(mdp.discount.shape, dtype),
        q=jnp.where(mdp.allowed, jnp.zeros((), dtype), -jnp.inf),
        change=jnp.full((), jnp.inf, dtype),
        sweeps=jnp.zeros((), jnp.int32),
    )
    return jax.lax.while_loop(lambda s: (s.change > tolerance) & (s.sweeps < _SWEEPS), sweep, nothing)


# ---- a family of static models --------------------------------------------------------------------------------


class Iwocs(NamedTuple):
    """What `iwocs` found, iteration by iteration (``I`` of them)."""

    q: np.ndarray  # [I, S, A] the least optimal Q over the members found so far; it never increases
    policy: np.ndarray  # [I, S, A] greedy on it
    member: list[int]  # [I] which was solved
    promised: list[float]  # [I] what Q says that its policy earns from the start
    worst: list[float]  # [I] what it earns in its worst member
    converged: bool  # whether the worst case is no less than promised; else its member was solved before


def iwocs(family: MDP, gamma: float, *, first: int = 0, tolerance: float = 1e-3) -> Iwocs:
    """Incremental worst-case search (algorithm 1 of the paper) over a finite family, with exact evaluation.

    Solve a member; act greedily on the least of the optimal Q found so far; find the member where that is worst;
    repeat until the worst case is no less than was promised. It can fall short: where the worst member has been solved
    already, another round would change nothing. Where all episodes start in one state, no deterministic policy's worst
    case exceeds the promise, so that a policy that keeps it is the best of these. Policies that draw their actions may
    do better, and so may others where episodes start in several states: the least Q of each may be of another member.

    It runs in float64 on the host: one compiled solution and one compiled evaluation of the family per round.

    Args:
      family: MDPs with a leading axis [M, ...] on every field.
      gamma: the agent's discount, in [0, 1].
      first: the member to begin with.
      tolerance: the gap between promise and worst case at which to stop.

    Raises:
      ValueError: no family, not of MDPs, or without the member ``first``.
    """
    tabular.check(family)
    if np.ndim(family.reward) != 3:
        raise ValueError(
            f"a family has a leading axis on every field; this reward is {np.shape(family.reward)}"
        )
    members = len(family.reward)
    if not 0 <= first < members:
        raise ValueError(f"there is no member {first} in a family of {members}")
    with jax.enable_x64(True):
        family = jax.tree.map(_widen, family)
        q, member = jnp.full(family.reward.shape[1:], jnp.inf), first
        solved: list[int] = []
        rounds = []
        for _ in range(members):
            q = jnp.minimum(q, _solve(family, member, gamma))
            policy = greedy(q)
            earned = _earned(family, policy, gamma)
            promised, worst = float(family.start[member] @ q.max(-1)), float(earned.min())
            solved.append(member)
            rounds.append((np.asarray(q), np.asarray(policy), promised, worst))
            converged = promised - worst <= tolerance
            member = int(earned.argmin())
            if converged or member in solved:
                break
    qs, policies, promises, worsts = zip(*rounds, strict=True)
    return Iwocs(np.stack(qs), np.stack(policies), solved, list(promises), list(worsts), converged)


@partial(jax.jit, static_argnames="gamma")
def _solve(family: MDP, member: Array, gamma: float) -> Array:
    return value_iteration(jax.tree.map(lambda x: x[member], family), gamma).q


@partial(jax.jit, static_argnames="gamma")
def _earned(family: MDP, policy: Array, gamma: float) -> Array:
    return jax.vmap(lambda mdp: mdp.start @ tabular.evaluate(mdp, policy, gamma))(family)


def _widen(x: Array) -> Array:
    return jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
