"""The double-T maze of LMRL-Gym (Abdulhai et al. 2023): exactly as a tabular MDP, in words, and as logged walks.

From 25 cells to one, -1 a move; a walk is cut off after 100 moves and pays 1 more. The best policy returns -6.84 on
average over the starts. Logged walks stay in one of three parts of the maze, so that no walk shows the whole way: to
find it, a learner must put pieces of different walks together ("stitching").

States are indices of `CELLS`, actions of `ACTIONS`; ``B`` walks side by side, ``N`` of them logged, ``T`` = 100 moves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl.envs.tabular import MDP, Episodes
from rl.envs.text import Dialogue, Game, Turn, draw

MOVES = 100  # after which a walk is cut off
ACTIONS = ("left", "right", "up", "down")
NO_ACTION = -1  # something said that is none of them

_MAP = (
    "#############",
    "#.....#.....#",
    "###.#####.###",
    "###.#####.###",
    "###.#####.###",
    "###.......###",
    "######.######",
    "######.######",
    "######G######",
    "#############",
)
_STEPS = ((0, -1), (0, 1), (-1, 0), (1, 0))
CELLS = tuple(
    (y, x) for y, row in enumerate(_MAP) for x, mark in enumerate(row) if mark != "#"
)  # row, column
_INDEX = {cell: state for state, cell in enumerate(CELLS)}
GOAL = next(state for state, (y, x) in enumerate(CELLS) if _MAP[y][x] == "G")
_NEXT = np.array([[_INDEX.get((y + dy, x + dx), _INDEX[y, x]) for dy, dx in _STEPS] for y, x in CELLS])
# The parts that logged walks stay in: the left T, the bottom with the goal, the right T; they overlap.
_PARTS = np.array(
    [[x <= 6 and y <= 5 for y, x in CELLS], [y >= 3 for y, _ in CELLS], [x >= 6 and y <= 5 for y, x in CELLS]]
)


def mdp() -> MDP:
    """The maze without its limit on moves, in NumPy float64: 26 states, 4 actions, K = 1."""
    successor = _NEXT[..., None].copy()
    successor[GOAL] = GOAL
    there = np.arange(len(CELLS)) == GOAL
    return MDP(
        transition=np.ones(successor.shape),
        successor=successor.astype(np.int32),
        reward=np.where(there[successor[..., 0]], 0.0, -1.0),
        discount=np.where(there, 0.0, 1.0),
        start=~there / (len(CELLS) - 1),
        allowed=np.ones(_NEXT.shape, bool),
    )


def step(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One move in each walk: the next states and the rewards, [B]; reward 0 for arriving at `GOAL`, else -1.

    What is not an action (`NO_ACTION`) moves nothing and costs 4.
    """
    following = np.where(action == NO_ACTION, state, _NEXT[state, action])
    return following, np.where(following == GOAL, 0.0, np.where(action == NO_ACTION, -4.0, -1.0))


def returns(policy: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """The return [B] of one walk from each start by ``policy``, which maps states [B] to actions [B]."""
    state, total = start, np.zeros(len(start))
    for _ in range(MOVES):
        following, reward = step(state, policy(state))
        total += np.where(state == GOAL, 0.0, reward)
        state = np.where(state == GOAL, GOAL, following)
    return total - (state != GOAL)


# ---- logged walks ---------------------------------------------------------------------------------------------------


def logged(
    rng: np.random.Generator, episodes: int = 1240, *, published: bool = False, solving: float = 0.15
) -> Episodes:
    """Walks that each stay in one part of the maze; which cells make a part is our choice.

    A walk starts anywhere in its part and ends at the goal, or after 100 moves. With probability ``solving`` a move is
    one towards a random cell of the part, and on arrival another is drawn; else it is any that does not leave the part.

    Args:
        published: in the manner of the published data, moves with that probability go towards the goal, wherever the
            walk may go, and a move that would leave the part is logged but not made. This does not ask for stitching:
            the best move is the most frequent one everywhere, so that greedy cloning is optimal.

    Returns:
        [N, T] NumPy arrays.
    """
    part = rng.integers(len(_PARTS), size=episodes)
    state = draw(_PARTS[part] & (np.arange(len(CELLS)) != GOAL), rng)
    target = state
    over = np.zeros(episodes, bool)
    steps = []
    for _ in range(MOVES):
        target = np.where(state == target, draw(_PARTS[part], rng), target)
        if published:
            target = np.full(episodes, GOAL)
        stays = _PARTS[part[:, None], _NEXT[state]]
        aimed = (rng.random(episodes) < solving) & (state != target)
        action = draw(np.where(aimed[:, None], _CLOSER[state, :, target], published | stays), rng)
        following = np.where(stays[np.arange(episodes), action], _NEXT[state, action], state)
        steps.append((state, action, following, ~over))
        over |= following == GOAL
        state = following
    states, actions, followings, valid = (np.stack(column, 1) for column in zip(*steps, strict=True))
    return Episodes(states.astype(np.int32), actions.astype(np.int32), followings.astype(np.int32), valid)


# ---- in words -------------------------------------------------------------------------------------------------------


def game() -> Game:
    """To be walked in words, as in `dialogue`, from any cell but the goal. Its data policy is `logged`.

    What `returns` counts for a walk that is cut off, 1 more, no action is charged for: there is none that earned it.
    """

    def begin(episodes: int, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
        state = draw(np.tile(np.arange(len(CELLS)) != GOAL, (episodes, 1)), rng)
        return state, [see(cell) for cell in state]

    def move(
        state: np.ndarray, texts: list[str], rng: np.random.Generator
    ) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
        following, reward = step(state, np.array([parse(text) for text in texts]))
        following = np.where(state == GOAL, GOAL, following)
        return following, [see(cell) for cell in following], reward, following == GOAL

    def log(episodes: int, rng: np.random.Generator) -> list[Dialogue]:
        walks = logged(rng, episodes)
        return [dialogue(walks, number) for number in range(episodes)]

    return Game(begin, move, MOVES, "\n", log)


def dialogue(walks: Episodes, walk: int) -> Dialogue:
    """A logged walk in words: what is seen at each cell, and each move."""
    length = int(np.asarray(walks.valid[walk]).sum())
    turns = [Turn(see(walks.state[walk, 0]))]
    for action, following in zip(walks.action[walk, :length], walks.next_state[walk, :length], strict=True):
        turns += [Turn(ACTIONS[action] + "\n", True, -float(following != GOAL)), Turn(see(following))]
    return Dialogue(tuple(turns), terminated=bool(walks.next_state[walk, length - 1] == GOAL))


def see(state: int) -> str:
    """What an agent is told at a cell: row, column, and for each of `ACTIONS` ``#`` if a wall is there, else ``.``."""
    y, x = CELLS[state]
    return f"{y} {x} {' '.join('#' if following == state else '.' for following in _NEXT[state])}\n"


def parse(text: str) -> int:
    """The action that an agent's text says; `NO_ACTION` for all else."""
    return ACTIONS.index(text.strip()) if text.strip() in ACTIONS else NO_ACTION


def _distances() -> np.ndarray:
    """Moves from one cell to another, [from, to], by Floyd and Warshall; the maze has no loops."""
    distance = np.full((len(CELLS),) * 2, len(CELLS))
    distance[np.arange(len(CELLS))[:, None], _NEXT] = 1
    np.fill_diagonal(distance, 0)
    for via in range(len(CELLS)):
        distance = np.minimum(distance, distance[:, via, None] + distance[via])
    return distance


_CLOSER = _distances()[_NEXT] < _distances()[:, None]  # [state, action, target]
