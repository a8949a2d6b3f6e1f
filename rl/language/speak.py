"""Dialogues as tokens, and a language model as a policy in words, for the environments of `rl.envs.text`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.envs.text import Dialogue, Policy, Turn
from rl.language import generate, tokenizer
from rl.language.generate import Decoder
from rl.replay.tokens import Episode
from rl.types import Key, Params

_STEP = 64  # prompts are padded to a multiple of this, so that few lengths are compiled


class Words(NamedTuple):
    """What texts are to a model."""

    tokenizer: Any  # a `tokenizers.Tokenizer`
    stop: str  # what ends an action; whether a text has it or not, its tokens do, once
    end: int  # the token of that
    ends: tuple[int, ...] = ()  # tokens that end what the model says, too


def make(tokenizer: Any, stop: str, ends: Sequence[int] = ()) -> Words:
    """What texts are to the model of ``tokenizer``; actions end with ``stop``, or where it says one of ``ends``.

    Raises:
      ValueError: ``stop`` is not one token.
    """
    ids = tokenizer.encode(stop, add_special_tokens=False).ids
    if len(ids) != 1:
        raise ValueError(
            f"{stop!r} cannot end actions: it is {len(ids)} tokens to this model, and must be one"
        )
    return Words(tokenizer, stop, ids[0], tuple(ends))


def episode(words: Words, dialogue: Dialogue) -> Episode:
    """A dialogue in tokens.

    Raises:
      ValueError: as `rl.language.tokenizer.episode`.
    """
    turns = [
        turn._replace(text=turn.text.removesuffix(words.stop)) if turn.is_action else turn
        for turn in dialogue.turns
    ]
    return tokenizer.episode(words.tokenizer, turns, dialogue.terminated, float(dialogue.imitate), words.end)


def speaker(
    decoder: Decoder, words: Words, context: int, *, steps: int, temperature: float = 1.0
) -> Callable[[Params, Key], Policy]:
    """A function of the decoder's params and a key to what it says, compiled once for each length of what it has read.

    A dialogue is read as `episode` has it, so that a model reads what it was trained on. What does not fit is left out
    at the front, but behind the tokens that the tokenizer puts before every text.

    Args:
      decoder: what chooses each token.
      words: its texts. What ends an action is not part of what is said, and is read after what was cut off, too.
      context: the most tokens that the model reads and writes.
      steps: the most tokens of an action.
      temperature: 0 takes the likeliest token.

    Raises:
      ValueError: there is no room for ``steps`` in ``context``, or as `rl.language.generate.generator`.
    """
    room = context - steps
    if room < 1:
        raise ValueError(f"an action of {steps} tokens leaves no room to read in a context of {context}")
    stops = [words.end, *words.ends]
    sample = generate.generator(decoder, steps, temperature=temperature, stop=stops)

    def speak(params: Params, key: Key) -> Policy:
        moves = itertools.count()

        def policy(dialogues: list[Dialogue]) -> list[str]:
            read = [_fitting(words, one, room) for one in dialogues]
            length = min(-(-max(map(len, read)) // _STEP) * _STEP, room)
            prompts, segment = map(jnp.asarray, generate.pad_left(read, length))
            made = sample(params, prompts, segment, jax.random.fold_in(key, next(moves)))
            return generate.texts(made, words.tokenizer, stops)

        return policy

    return speak


def history(words: Words, dialogue: Dialogue) -> list[int]:
    """The tokens of a dialogue that the agent is about to go on with."""
    asked = dialogue._replace(turns=(*dialogue.turns, Turn("", is_action=True)))
    return episode(words, asked).tokens[:-1].tolist()


def _fitting(words: Words, dialogue: Dialogue, room: int) -> list[int]:
    """`history`, of which at most ``room`` tokens are left."""
    read = history(words, dialogue)
    before = tokenizer.before(words.tokenizer, dialogue.turns[0].text) if dialogue.turns else []
    if len(read) <= room or len(before) >= room:
        return read[-room:]
    return before + read[len(before) - room :]
