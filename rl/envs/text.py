"""What an episode in words is: turns of an agent and of its environment, as `rl.replay.tokens` has them in tokens.

And how environments in words are played, many episodes at a time, by whatever can answer: NumPy and strings only.
Models that answer are made by `rl.language.speak`. Letter: ``B`` episodes side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Turn(NamedTuple):
    """Something said, by the environment or, as an action, by the agent."""

    text: str
    is_action: bool = False
    reward: float = 0.0  # of the action; 0 for the environment's turns


class Dialogue(NamedTuple):
    """A whole episode. The environment says the first turn, and the last one too if it answers the last action."""

    turns: tuple[Turn, ...]
    terminated: bool = True  # False: it was cut off, and might have gone on
    imitate: float = 1.0  # weight of its actions in likelihood losses

    @property
    def returned(self) -> float:
        """The sum of its rewards."""
        return sum(turn.reward for turn in self.turns)


class Chat(NamedTuple):
    """A whole episode in messages, which the chat template of a model makes a text of (`rl.language.chat`)."""

    messages: tuple[Mapping[str, Any], ...]  # role, content and what else the template reads
    rewards: tuple[float, ...] = ()  # of each message, 0 for all but the assistant's; none: 0 for all
    terminated: bool = True
    imitate: float = 1.0
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas that the template writes into the text

    @property
    def returned(self) -> float:
        """The sum of its rewards."""
        return sum(self.rewards)


class Game(NamedTuple):
    """An environment in words. What it knows of ``B`` episodes is its own, and what it is told of those that are over
    it does not read.
    """

    reset: Callable[[int, np.random.Generator], tuple[Any, list[str]]]  # B -> state, what is said first
    # state, what the agent says [B] -> state, the answers [B], the rewards [B], and whether each is over [B]
    step: Callable[[Any, list[str], np.random.Generator], tuple[Any, list[str], np.ndarray, np.ndarray]]
    moves: int  # after which an episode is cut off
    end: str | None = None  # what an action ends with, if that is the environment's to say
    # Episodes of its data policy, if it has one.
    logged: Callable[[int, np.random.Generator], list[Dialogue]] | None = None


Policy = Callable[[list[Dialogue]], list[str]]  # what to say next in each of ``B`` dialogues


def play(game: Game, policy: Policy, episodes: int, rng: np.random.Generator) -> list[Dialogue]:
    """Plays that many episodes to their end, side by side.

    The policy is always asked about all of them, so that a compiled one has one shape; what it says in those that are
    over is ignored.
    """
    state, openings = game.reset(episodes, rng)
    turns = [[Turn(text)] for text in openings]
    over = np.zeros(episodes, bool)
    for _ in range(game.moves):
        actions = policy([Dialogue(tuple(spoken), terminated=False) for spoken in turns])
        state, answers, rewards, done = game.step(state, actions, rng)
        for i in np.flatnonzero(~over):
            turns[i].append(Turn(actions[i], True, float(rewards[i])))
            if answers[i]:
                turns[i].append(Turn(answers[i]))
        over = over | done
        if over.all():
            break
    return [Dialogue(tuple(spoken), bool(done)) for spoken, done in zip(turns, over, strict=True)]


def draw(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One uniformly random True column in each row of ``mask`` [B, N], [B]: a word, a cell or an action."""
    rank = rng.integers(mask.sum(1))
    return (mask.cumsum(1) > rank[:, None]).argmax(1)
