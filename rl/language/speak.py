"""Dialogues and chats as tokens, and a language model as a policy in words, for the environments of `rl.envs.text`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.envs.text import Chat, Dialogue, Turn
from rl.language import chat, generate, tokenizer
from rl.language.chat import Template
from rl.language.generate import Decoder
from rl.language.tokenizer import continuation
from rl.replay.tokens import Episode
from rl.types import Key, Params

_STEP = 64  # prompts are padded to a multiple of this, so that few lengths are compiled


class Words(NamedTuple):
    """What texts are to a model."""

    tokenizer: Any  # a `tokenizers.Tokenizer`
    stop: str  # what ends an action; whether a text has it or not, its tokens do, once
    end: int  # the token of that
    ends: tuple[int, ...] = ()  # tokens that end what the model says, too
    template: Template | None = None  # how it writes chats, if it does


def make(tokenizer: Any, stop: str, ends: Sequence[int] = (), template: Template | None = None) -> Words:
    """What texts are to the model of ``tokenizer``; actions end with ``stop``, or where it says one of ``ends``.

    Raises:
      ValueError: ``stop`` is not one token.
    """
    try:
        ids = continuation(tokenizer, stop)
    except Exception as error:  # of the package's own type, for a character that no token has
        raise ValueError(f"{stop!r} cannot end actions: this model has no token for it ({error})") from None
    if len(ids) != 1:
        raise ValueError(
            f"{stop!r} cannot end actions: it is {len(ids)} tokens to this model, and must be one"
        )
    return Words(tokenizer, stop, ids[0], tuple(ends), template)


def episode(words: Words, dialogue: Dialogue | Chat) -> Episode:
    """A dialogue or a chat in tokens.

    Raises:
      ValueError: as `rl.language.tokenizer.episode` and `rl.language.chat.episode`, or a chat and no chat template.
    """
    if isinstance(dialogue, Chat):
        return chat.episode(_template(words), words.tokenizer, dialogue, [words.end, *words.ends])
    turns = [
        turn._replace(text=turn.text.removesuffix(words.stop)) if turn.is_action else turn
        for turn in dialogue.turns
    ]
    return tokenizer.episode(words.tokenizer, turns, dialogue.terminated, float(dialogue.imitate), words.end)


def answered(dialogue: Dialogue | Chat, answer: str) -> Dialogue | Chat:
    """The dialogue or chat with one more turn, an answer of the agent."""
    if isinstance(dialogue, Chat):
        messages = (*dialogue.messages, {"role": "assistant", "content": answer})
        return dialogue._replace(messages=messages, rewards=dialogue.rewards and (*dialogue.rewards, 0.0))
    return dialogue._replace(turns=(*dialogue.turns, Turn(answer, is_action=True)))


def shortened(words: Words, dialogue: Dialogue | Chat, one: Episode, length: int) -> Episode:
    """The last ``length`` tokens of an episode, as `speaker` would read them: what is before a text stays in front.

    A token of the agent's that comes to stand first is not its action any more, because nothing is before it. What is
    cut off takes its rewards along: where several turns earn something, the rest has another return than the episode.
    """
    slots = _truncated(words, dialogue, one.tokens, length)
    is_action, reward = one.is_action[slots].copy(), one.reward[slots].copy()
    reward[0] = np.where(is_action[0], 0.0, reward[0])
    is_action[0] = False
    return one._replace(tokens=one.tokens[slots], is_action=is_action, reward=reward)


def speaker(
    decoder: Decoder, words: Words, context: int, *, steps: int, temperature: float = 1.0, top_p: float = 1.0
) -> Callable[[Params, Key], Callable[[Sequence[Dialogue | Chat]], list[str]]]:
    """A function of the decoder's params and a key to what it says, compiled once for each length of what it has read.

    A dialogue is read as `episode` has it, so that a model reads what it was trained on. So is what it said itself: as
    tokens of the text, which may be others than it sampled, and without special tokens that it sampled within an
    action. What does not fit is left out at the front, but behind the tokens that the tokenizer puts before every text.

    Args:
      decoder: what chooses each token.
      words: its texts. What ends an action is not part of what is said, and is read after what was cut off, too.
      context: the most tokens that the model reads and writes.
      steps: the most tokens of an action.
      temperature: 0 takes the likeliest token.
      top_p: as in `rl.language.generate.generator`.

    Raises:
      ValueError: there is no room for ``steps`` in ``context``, or as `rl.language.generate.generator`.
    """
    room = context - steps
    if room < 1:
        raise ValueError(f"an action of {steps} tokens leaves no room to read in a context of {context}")
    stops = [words.end, *words.ends]
    size = max(tokenizer.size(words.tokenizer), *(stop + 1 for stop in stops))
    sample = generate.generator(decoder, steps, temperature=temperature, top_p=top_p, stop=stops, tokens=size)

    def speak(params: Params, key: Key) -> Callable[[Sequence[Dialogue | Chat]], list[str]]:
        moves = itertools.count()

        def policy(dialogues: Sequence[Dialogue | Chat]) -> list[str]:
            read = [_fitting(words, one, room) for one in dialogues]
            length = min(-(-max(map(len, read)) // _STEP) * _STEP, room)
            prompts, segment = map(jnp.asarray, generate.pad_left(read, length))
            sampled = sample(params, prompts, segment, jax.random.fold_in(key, next(moves)))
            return generate.texts(sampled, words.tokenizer, stops)

        return policy

    return speak


def history(words: Words, dialogue: Dialogue | Chat) -> list[int]:
    """The tokens of a dialogue or a chat that the agent is about to go on with."""
    if isinstance(dialogue, Chat):
        return chat.prompt(_template(words), words.tokenizer, dialogue)
    return episode(words, answered(dialogue, "")).tokens[:-1].tolist()


def _template(words: Words) -> Template:
    if words.template is None:
        raise ValueError(
            "the model has no chat template, which makes texts of messages: take one that is made for chats, or put a "
            "chat_template.jinja into its folder"
        )
    return words.template


def before_text(words: Words, dialogue: Dialogue | Chat, read: np.ndarray) -> int:
    """How many of the tokens of a dialogue, ``read``, the model has before every text."""
    if isinstance(dialogue, Chat):
        first = words.tokenizer.encode(_template(words).first, add_special_tokens=False).ids
        return len(first) if read[: len(first)].tolist() == first else 0
    return len(tokenizer.before(words.tokenizer, dialogue.turns[0].text)) if dialogue.turns else 0


def _fitting(words: Words, dialogue: Dialogue | Chat, room: int) -> list[int]:
    """`history`, of which at most ``room`` tokens are left."""
    read = np.array(history(words, dialogue))
    return read[_truncated(words, dialogue, read, room)].tolist()


def _truncated(words: Words, dialogue: Dialogue | Chat, read: np.ndarray, room: int) -> np.ndarray:
    """Which of its tokens are left, the last ones and those that the model has before every text."""
    size, before = len(read), before_text(words, dialogue, read)
    before = before if before < room < size else 0
    return np.concatenate([np.arange(before), np.arange(max(size - room, 0) + before, size)])
