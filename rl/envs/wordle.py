"""Wordle by the rules of LMRL-Gym (Abdulhai et al. 2023, section 4), many games at a time, and its scripted policies.

The hidden word is not fixed: for every guess one is drawn from the words that agree with all that was said so far, so
the state of a game is the set of those words, and the history in words is Markov. NumPy only. Letters: ``W`` words,
``B`` games played side by side, ``T`` = 6 tries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rl.envs.text import Dialogue, Game, Turn, draw

LETTERS, TRIES = 5, 6
NO_WORD = -1  # as a guess: something that is not in the list; as feedback: none
SOLVED = 3**LETTERS - 1  # the feedback of five greens
_FIRST = "Wordle:\n"
_COLOURS = "byg"  # black: nowhere in the word; yellow: elsewhere; green: here


class Wordle(NamedTuple):
    """The rules for one list of words."""

    words: tuple[str, ...]  # [W]
    # [W, W] uint8: of guessing row if the word is column; base 3, the first letter highest
    feedback: np.ndarray


class State(NamedTuple):
    """Games in progress."""

    consistent: np.ndarray  # [B, W] bool: the words that may still be the hidden one
    tries: np.ndarray  # [B] guesses made
    done: np.ndarray  # [B] bool


class Games(NamedTuple):
    """Games that were played to their end; `NO_WORD` fills the tries that were not needed."""

    guess: np.ndarray  # [B, T] int16 index of a word
    feedback: np.ndarray  # [B, T] int16

    @property
    def length(self) -> np.ndarray:
        """Guesses made, [B]; none of them may be a word that is not in the list."""
        return (self.guess != NO_WORD).sum(1)

    @property
    def success(self) -> np.ndarray:
        """Whether the word was found, [B]."""
        return (self.feedback == SOLVED).any(1)

    @property
    def returns(self) -> np.ndarray:
        """The sum of the rewards, [B], which is -1 for each guess but the one that finds the word."""
        return self.success - self.length.astype(float)


Policy = Callable[[Wordle, State, np.random.Generator], np.ndarray]  # -> [B] guesses


def read_words(path: str | Path) -> list[str]:
    """The words of a file, one to a line; those that do not have five letters are skipped."""
    return [word for word in Path(path).read_text().split() if len(word) == LETTERS]


def make(words: Sequence[str]) -> Wordle:
    """The rules for these words, which may all be guessed and all be hidden.

    A letter is yellow wherever the hidden word has it elsewhere, however often: duplicates are not counted.

    Raises:
        ValueError: no words, one twice, or one that is not five letters from a to z.
    """
    bad = [
        word for word in words if len(word) != LETTERS or not set(word) <= set("abcdefghijklmnopqrstuvwxyz")
    ]
    if bad or not words or len(set(words)) < len(words):
        raise ValueError(
            f"Wordle needs different words of five letters from a to z; wrong among them: {bad[:5]}"
        )
    letters = np.array([[ord(letter) for letter in word] for word in words], np.uint8)
    guess, hidden = letters[:, None], letters[None]
    feedback = np.zeros((len(words), len(words)), np.uint8)
    for i in range(LETTERS):
        here = guess[..., i] == hidden[..., i]
        somewhere = (guess[..., i, None] == hidden).any(-1)
        feedback = 3 * feedback + np.where(here, 2, somewhere).astype(np.uint8)
    return Wordle(tuple(words), feedback)


def reset(env: Wordle, games: int) -> State:
    """That many new games."""
    return State(np.ones((games, len(env.words)), bool), np.zeros(games, int), np.zeros(games, bool))


def step(
    env: Wordle, state: State, guess: np.ndarray, rng: np.random.Generator, *, bad_word: float = -1.0
) -> tuple[State, np.ndarray, np.ndarray]:
    """One guess in each game.

    Args:
        guess: [B] indices of words, or `NO_WORD`: that costs a try and changes nothing else. Not read where the game
            is over.
        bad_word: its reward; LMRL-Gym's data has -1, its ILQL evaluation -10.

    Returns:
        the new state, the feedback [B] (`NO_WORD` where there is none) and the reward [B]: 0 for finding the word and
        in games that were over, else -1.
    """
    playing = ~state.done
    legal = playing & (guess != NO_WORD)
    hidden = draw(state.consistent, rng)
    feedback = np.where(legal, env.feedback[guess, hidden].astype(np.int16), NO_WORD)
    agrees = env.feedback[guess] == feedback[:, None]
    consistent = state.consistent & (agrees | ~legal[:, None])
    tries = state.tries + playing
    solved = feedback == SOLVED
    reward = np.where(legal, -1.0, bad_word) * playing * ~solved
    return State(consistent, tries, state.done | solved | (tries == TRIES)), feedback, reward


def play(env: Wordle, policy: Policy, games: int, rng: np.random.Generator) -> Games:
    """Play games to their end with a policy that guesses words of the list."""
    state = reset(env, games)
    record = Games(*np.full((2, games, TRIES), NO_WORD, np.int16))
    for i in range(TRIES):
        guess = np.where(state.done, NO_WORD, policy(env, state, rng))
        state, feedback, _ = step(env, state, guess, rng)
        record.guess[:, i], record.feedback[:, i] = guess, feedback
    return record


# ---- policies -------------------------------------------------------------------------------------------------------


def uniform(env: Wordle, state: State, rng: np.random.Generator) -> np.ndarray:
    """Any word."""
    return rng.integers(len(env.words), size=len(state.done))


def consistent(env: Wordle, state: State, rng: np.random.Generator) -> np.ndarray:
    """Any word that may still be the hidden one."""
    return draw(state.consistent, rng)


def logged(env: Wordle, state: State, rng: np.random.Generator) -> np.ndarray:
    """The policy of LMRL-Gym's dataset: `consistent` with probability 1/3, else `uniform`."""
    careful = rng.random(len(state.done)) < 1 / 3
    return np.where(careful, consistent(env, state, rng), uniform(env, state, rng))


# ---- in words -------------------------------------------------------------------------------------------------------


def game(env: Wordle, *, bad_word: float = -1.0) -> Game:
    """To be played in words, as in `dialogue`; ``bad_word`` as in `step`. Its data policy is `logged`."""

    def begin(episodes: int, rng: np.random.Generator) -> tuple[State, list[str]]:
        return reset(env, episodes), [_FIRST] * episodes

    def move(
        state: State, texts: list[str], rng: np.random.Generator
    ) -> tuple[State, list[str], np.ndarray, np.ndarray]:
        guess = np.array([parse(env, text) for text in texts])
        state, feedback, reward = step(env, state, guess, rng, bad_word=bad_word)
        return state, [feedback_text(one) for one in feedback], reward, state.done

    def log(episodes: int, rng: np.random.Generator) -> list[Dialogue]:
        games = play(env, logged, episodes, rng)
        return [dialogue(env, games, number) for number in range(episodes)]

    return Game(begin, move, TRIES, "\n", log)


def dialogue(env: Wordle, games: Games, game: int) -> Dialogue:
    """A game in LMRL-Gym's text form: letters and colours with spaces between them, a line each."""
    turns = [Turn(_FIRST)]
    for guess, feedback in zip(games.guess[game], games.feedback[game], strict=True):
        if guess != NO_WORD:
            turns += [
                Turn(action_text(env.words[guess]), True, float(feedback == SOLVED) - 1),
                Turn(feedback_text(feedback)),
            ]
    return Dialogue(tuple(turns))


def action_text(word: str) -> str:
    """``crane`` as an agent says it: ``c r a n e`` and a line end."""
    return " ".join(word) + "\n"


def feedback_text(feedback: int) -> str:
    """The environment's answer: ``g y b b b`` and a line end, or the line end alone for `NO_WORD`."""
    if feedback == NO_WORD:
        return "\n"
    return " ".join(_COLOURS[feedback // 3**i % 3] for i in reversed(range(LETTERS))) + "\n"


def parse(env: Wordle, text: str) -> int:
    """The guess that an agent's text says; `NO_WORD` for all that is not a word of the list."""
    return _index(env.words).get(text.strip().replace(" ", ""), NO_WORD)


@functools.cache
def _index(words: tuple[str, ...]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words)}
