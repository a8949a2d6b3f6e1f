"""Finite Markov decision processes as arrays: made, sampled, estimated from samples, and evaluated exactly.

How to act in them belongs to the agents; what is random here is a function of a key. Letters: ``S`` states, ``A``
actions, ``K`` possible next states of one state and action, ``N`` episodes, ``T`` time. Precision is that of the
input, or JAX's default for what is made here: float64 inside ``jax.enable_x64(True)``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import linalg
from rl.types import Array, Key


class MDP(NamedTuple):
    """A finite Markov decision process; with equal leading axes on every field, a family of them.

    The reward is that of acting, whatever comes next; one that depends on the next state is paid a step later, on
    leaving that state.
    """

    transition: Any  # [S, A, K] probabilities of the next states
    successor: Any  # [S, A, K] int32: which states these are; or [S], all of them in order, with K = S
    reward: Any  # [S, A]
    discount: Any  # [S] of arriving there: 0 where the episode has ended, 1 elsewhere; gamma is the agent's
    start: Any  # [S] probabilities of the first state
    allowed: Any  # [S, A] bool: the actions that planning may choose, at least one in every state


class Episodes(NamedTuple):
    """Logged episodes; what follows the end of an episode is filler, with ``valid`` False."""

    state: Any  # [N, T] int32
    action: Any  # [N, T] int32
    next_state: Any  # [N, T] int32
    valid: Any  # [N, T] bool


# ---- made here -----------------------------------------------------------------------------------------------


def garnet(key: Key, states: int, actions: int, branching: int | None = None) -> MDP:
    """A random MDP that never ends (Archibald, McKinnon & Thomas 1995), for tests and for studies over many.

    Every state and action leads to ``branching`` distinct states (default: all) with probabilities uniform over the
    simplex. Rewards are uniform in [0, 1], the first state is uniform.
    """
    keys = jax.random.split(key, 3)
    weight = jax.random.exponential(keys[0], (states, actions, states))
    rank = jax.random.uniform(keys[1], weight.shape).argsort(-1).argsort(-1)
    weight = jnp.where(rank < (branching or states), weight, 0.0)
    return MDP(
        transition=weight / weight.sum(-1, keepdims=True),
        successor=jnp.arange(states),
        reward=jax.random.uniform(keys[2], (states, actions)),
        discount=jnp.ones(states),
        start=jnp.full(states, 1 / states),
        allowed=jnp.ones((states, actions), bool),
    )


# Two rows of three walls make three corridors; the wind blows to the west, in each corridor with its own power of
# alpha. The start S is north-west, the goal G north-east.
_WALK = (
    "S....G",
    ".###..",
    "......",
    ".###..",
    "......",
    "......",
)
_POWER = (1, 1, 3, 3, 6, 6)  # of alpha, by row
_MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # north, south, west, east


def windy_walk(alpha: float | Array) -> MDP:
    """The windy walk of IWOCS (Zouitine, Geist & Rachelson 2024): to the goal by one of three corridors, -1 a step.

    Six by six cells, six of them walls. An action moves as it says, or, with the wind's probability, one cell to the
    west; walls and borders hold. The wind blows with probability ``alpha`` in the north, ``alpha^3`` in the middle
    and ``alpha^6`` in the south: the shortest way suffers most. The paper shows its walls in a figure only; the
    layout here is ours.

    Args:
      alpha: the wind in the north, in [0, 1]; `jax.vmap` over it makes a family.
    """
    cells, intended = _grid(_WALK)
    marks = [_WALK[row][column] for row, column in cells]
    intended[marks.index("G")] = marks.index("G")
    west = np.broadcast_to(intended[:, 2:3], intended.shape)
    wind = jnp.asarray(alpha, float) ** np.array([_POWER[row] for row, _ in cells])
    ended = np.array([mark == "G" for mark in marks])
    one_hot = lambda states: jax.nn.one_hot(states, len(cells), dtype=wind.dtype)
    return MDP(
        transition=(1 - wind)[:, None, None] * one_hot(intended) + wind[:, None, None] * one_hot(west),
        successor=jnp.arange(len(cells)),
        reward=jnp.where(ended, 0.0, -1.0)[:, None] * jnp.ones(4),
        discount=jnp.where(ended, 0.0, 1.0),
        start=one_hot(marks.index("S")),
        allowed=jnp.ones(intended.shape, bool),
    )


_ROOMS = (  # the last cell is the goal
    "....#....",
    "....#....",
    ".........",
    "....#....",
    "##.###.##",
    "....#....",
    "....#....",
    ".........",
    "....#....",
)


def four_rooms(sticky: float = 0.0) -> tuple[MDP, np.ndarray]:
    """Four rooms without an end: leaving the goal pays 1 and leads to any cell, all equally likely.

    A state is a cell and the last move made; with probability ``sticky`` that is made again, whatever the action, as
    Atari's console does.

    Returns:
      the MDP [S, 4, S], and what an agent sees of its states [S, 6]: the cell in [-1, 1]^2, the move one-hot.
    """
    cells, intended = _grid(_ROOMS)
    count, moves = intended.shape
    last = np.arange(moves)
    arrival = np.zeros((count, moves, count, moves))  # cell, move -> cell, move
    arrival[np.arange(count)[:, None], last, intended, last] = 1.0
    arrival[-1] = np.eye(moves)[:, None] / count
    step = arrival.reshape(count, moves, -1)  # cell, move -> state
    # state (cell, last move), action -> state
    transition = (1 - sticky) * step[:, None] + sticky * step[:, last][:, :, None]
    states = count * moves
    reward = np.zeros((states, moves))
    reward[-moves:] = 1.0
    seen = np.zeros((count, moves, 2 + moves), np.float32)
    seen[..., :2] = np.array(cells)[:, None] / 4 - 1
    seen[..., 2:] = np.eye(moves)
    mdp = MDP(
        transition=np.broadcast_to(transition, (count, moves, moves, states)).reshape(states, moves, states),
        successor=np.arange(states),
        reward=reward,
        discount=np.ones(states),
        start=np.full(states, 1 / states),
        allowed=np.ones((states, moves), bool),
    )
    return mdp, seen.reshape(states, -1)


def _grid(rows: tuple[str, ...]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The cells of a map, where it has no ``#``, and the cell [S, 4] that each of `_MOVES` leads to from each."""
    cells = [(y, x) for y, row in enumerate(rows) for x, mark in enumerate(row) if mark != "#"]
    index = {cell: state for state, cell in enumerate(cells)}
    return cells, np.array(
        [[index.get((y + dy, x + dx), index[y, x]) for dy, dx in _MOVES] for y, x in cells]
    )


# ---- from a package ---------------------------------------------------------------------------------------------


def icu_sepsis() -> tuple[MDP, np.ndarray]:
    """ICU-Sepsis (Choudhary et al. 2024): sepsis treatment in intensive care, estimated from MIMIC-III records.

    716 states (clusters of patients; 713 death, 714 survival, 715 the end) and 25 actions (five doses of fluids times
    five of vasopressors). An episode pays 1 if the patient survives, with gamma 1: the value is the probability of
    survival. ``allowed`` marks the admissible actions, those that clinicians took at least 20 times in that state;
    the others do what the admissible ones do on average. The package pays on arriving in 714; here leaving it pays.

    This is a benchmark, not medical advice.

    Returns:
      the MDP in NumPy float64, and the clinicians' policy [716, 25] as estimated from the records (uniform in the
      last three states, where no action matters).

    Raises:
      ImportError: the package ``icu-sepsis`` is not installed, or it is a version without the files used here.
    """
    # Its files are read without importing it: it imports the unmaintained `gym`.
    package = importlib.util.find_spec("icu_sepsis")
    if package is None or not package.submodule_search_locations:
        raise ImportError(
            "ICU-Sepsis needs the package icu-sepsis: pip install -e '.[robust]' (in the clone)"
        )
    assets = Path(package.submodule_search_locations[0]) / "envs" / "assets"
    try:
        arrays = np.load(assets / "dynamics.npz")
        _, *lines = (assets / "admissible_actions.txt").read_text().splitlines()
    except FileNotFoundError as error:
        raise ImportError(f"icu-sepsis has no {error.filename}: pip install 'icu-sepsis==2.0.1'") from error
    transition, clinicians = arrays["tx_mat"], arrays["expert_policy"].copy()
    states, actions = clinicians.shape
    allowed = np.zeros((states, actions), bool)
    for state, line in enumerate(lines[:states]):
        allowed[state, [int(action) for action in line.split()]] = True
    death, survival, end = range(states - 3, states)
    reward = np.zeros((states, actions))
    reward[survival] = 1.0
    discount = np.ones(states)
    discount[[death, end]] = 0.0
    clinicians[death:] = 1 / actions
    mdp = MDP(transition, np.arange(states), reward, discount, arrays["d_0"], allowed)
    check(mdp)
    return mdp, clinicians


# ---- samples and what they tell ------------------------------------------------------------------------------------


def rollout(mdp: MDP, policy: Array, key: Key, episodes: int, steps: int) -> Episodes:
    """``episodes`` episodes of at most ``steps`` steps under ``policy`` [S, A], probabilities of actions."""
    cumulative = jnp.cumsum(jnp.asarray(mdp.transition), -1)
    choice = jnp.cumsum(jnp.asarray(policy), -1)
    discount = jnp.asarray(mdp.discount)

    def step(carry: tuple[Array, Array], key: Key) -> tuple[tuple[Array, Array], Episodes]:
        state, valid = carry
        keys = jax.random.split(key)
        action = _draw(keys[0], choice[state])
        rank = _draw(keys[1], cumulative[state, action])
        next_state = _successors(mdp, (state, action), rank)
        return (next_state, valid & (discount[next_state] > 0)), Episodes(state, action, next_state, valid)

    key, first = jax.random.split(key)
    start = jnp.broadcast_to(jnp.cumsum(jnp.asarray(mdp.start)), (episodes, len(mdp.start)))
    carry = _draw(first, start), jnp.ones(episodes, bool)
    _, log = jax.lax.scan(step, carry, jax.random.split(key, steps))
    return jax.tree.map(lambda x: x.T, log)


def count(episodes: Episodes, states: int, actions: int) -> Array:
    """How often each state and action led to each state, [S, A, S] float."""
    where = episodes.state, episodes.action, episodes.next_state
    return jnp.zeros((states, actions, states)).at[where].add(episodes.valid.astype(float))


def empirical(counts: Array, mdp: MDP, actions: int, successors: int) -> tuple[MDP, Array]:
    """The maximum-likelihood model of what was counted, kept small; rewards and ends are those of ``mdp``.

    Of each state it holds the ``actions`` most frequent actions, of each of these the ``successors`` most frequent
    next states: slots in that order. Only what was seen is allowed; a state that was never left may do anything, in
    the model it stays where it is.

    Args:
      counts: [S, A, S] from `count`.
      mdp: what is known: reward, discount and start.
      actions: slots per state; what was seen beyond them is forgotten.
      successors: slots per action; what was seen beyond them is forgotten, and the rest made to sum to 1.

    Returns:
      the model, with fields [S, actions, successors], and the action [S, actions] in each slot.
    """
    visits, action = jax.lax.top_k(counts.sum(-1), actions)
    frequency, successor = jax.lax.top_k(jnp.take_along_axis(counts, action[..., None], 1), successors)
    stay = jax.nn.one_hot(0, successors, dtype=frequency.dtype)
    seen = visits > 0
    states = jnp.arange(len(counts))[:, None, None]
    model = MDP(
        transition=jnp.where(
            seen[..., None], frequency / jnp.maximum(frequency.sum(-1, keepdims=True), 1), stay
        ),
        successor=jnp.where(seen[..., None], successor, states),
        reward=jnp.take_along_axis(jnp.asarray(mdp.reward), action, 1),
        discount=jnp.asarray(mdp.discount),
        start=jnp.asarray(mdp.start),
        allowed=seen | ~seen.any(-1, keepdims=True),
    )
    return model, action


# ---- exact answers ---------------------------------------------------------------------------------------------------


def evaluate(mdp: MDP, policy: Array, gamma: float) -> Array:
    """The value [S] of ``policy`` [S, A], by solving the linear system of its Bellman equation.

    With ``gamma`` 1 every state must reach the end of the episode with probability 1, or the result is not finite.
    """
    policy = jnp.asarray(policy)
    flow = policy[..., None] * mdp.transition
    if jnp.ndim(mdp.successor) == 1:
        chain = flow.sum(-2)
    else:
        rows = jnp.arange(len(policy))[:, None, None]
        chain = jnp.zeros((len(policy),) * 2, flow.dtype).at[rows, mdp.successor].add(flow)
    system = jnp.eye(len(policy), dtype=chain.dtype) - gamma * chain * mdp.discount
    return linalg.solve(system, (policy * mdp.reward).sum(-1))


def check(mdp: MDP, tolerance: float = 1e-5) -> None:
    """Raises ValueError unless ``mdp`` is one: shapes, probabilities, discounts and an allowed action everywhere."""
    transition, allowed = np.asarray(mdp.transition), np.asarray(mdp.allowed)
    states, actions = allowed.shape[-2:]
    shapes = {
        "transition": (transition.shape[-3:-1], (states, actions)),
        "reward": (np.shape(mdp.reward)[-2:], (states, actions)),
        "discount": (np.shape(mdp.discount)[-1:], (states,)),
        "start": (np.shape(mdp.start)[-1:], (states,)),
    }
    for name, (shape, wanted) in shapes.items():
        if shape != wanted:
            raise ValueError(f"{name} is for {shape}, but allowed for {wanted} states (and actions)")
    for name, rows in (("transition", transition), ("start", np.asarray(mdp.start))):
        wrong = (rows < 0).any(-1) | ~(np.abs(rows.sum(-1) - 1) <= tolerance)
        if wrong.any():
            raise ValueError(
                f"{name}{np.argwhere(wrong)[0].tolist()} is no distribution: it sums to {rows[wrong][0].sum():g} "
                f"and its smallest entry is {rows[wrong][0].min():g}"
            )
    discount = np.asarray(mdp.discount)
    if not ((discount >= 0) & (discount <= 1)).all():
        raise ValueError(f"discount must be in [0, 1], not {discount.min():g} to {discount.max():g}")
    if not allowed.any(-1).all():
        raise ValueError(f"state {np.argwhere(~allowed.any(-1))[0].tolist()} allows no action")


def _draw(key: Key, cumulative: Array) -> Array:
    """One index [N] for each row of cumulative probabilities [N, K]; never one of probability 0."""
    # A draw is below 1 by an ulp at least, and so is its product with the total below the total.
    threshold = jax.random.uniform(key, cumulative.shape[:1]) * cumulative[:, -1]
    return (cumulative > threshold[:, None]).argmax(-1)


def _successors(mdp: MDP, where: tuple[Array, Array], rank: Array) -> Array:
    successor = jnp.asarray(mdp.successor)
    return successor[rank] if successor.ndim == 1 else successor[(*where, rank)]
