"""Dialogues in messages as tokens, by the chat template of their model: a Jinja template in its files.

The whole dialogue is written and then split into tokens, as by the ``apply_chat_template`` of transformers, so that a
model is trained on what it will be asked in. Which tokens are the assistant's own, its actions, the template may say by
``{% generation %}``; where it does not, an answer begins where the template's prompt for it ends, and goes to the first
token that ends a text, because there the model would stop. An answer that begins with spaces or a blank line may share
its first token with the end of the prompt: that token is an action, after a prompt which is one token shorter than the
one that the model is asked with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rl import extras
from rl.envs.text import Chat
from rl.language.weights import WeightsError
from rl.replay.tokens import Episode, Turn
from rl.replay.tokens import episode as join

_MARKS = "\ufdd0", "\ufdd1"  # around an answer while a text is written; Unicode has no such characters
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE, _OLDER, _TOKENS = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"


class Template(NamedTuple):
    """How a model's chats are written."""

    # messages, tools, whether to end with the prompt for an answer -> the text, with `_MARKS` if `is_marked`
    write: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
    is_marked: bool  # the template says which text is the assistant's
    first: str  # the token that begins a text; empty: none
    asks_the_time: bool


def read(companions: Mapping[str, str], now: datetime | None = None) -> Template | None:
    """The template in a model's files, `rl.language.pretrained.Pretrained.companions`; None where there is none.

    Templates have what those of transformers have: ``messages``, ``tools``, ``add_generation_prompt``, the special
    tokens by their roles, ``raise_exception``, ``strftime_now``, ``tojson``, loop controls, and a sandbox around them.

    Args:
      companions: texts of the files, by name.
      now: what ``strftime_now`` tells; by default the time.

    Raises:
      WeightsError: a damaged file or template.
      ImportError: the package jinja2 is missing.
    """
    described_tokens = {
        name: _json(companions, name) for name in ("special_tokens_map.json", _TOKENS, _OLDER)
    }
    source = _source(companions, described_tokens)
    if not source:
        return None
    tokens = {
        role: token
        for described in described_tokens.values()
        for role, value in described.items()
        if role.endswith("_token")
        and isinstance(token := value.get("content") if isinstance(value, dict) else value, str)
    }
    written = {name: _compiled(text, now) for name, text in source.items()}

    def write(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], ask: bool) -> str:
        template = written["tool_use" if tools and "tool_use" in written else next(iter(written))]
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in _MARKS):
            raise ValueError(
                "a message has U+FDD0 or U+FDD1, which are no characters of Unicode: take them out"
            )
        variables = {"messages": list(messages), "tools": list(tools) or None, "add_generation_prompt": ask}
        try:
            return template.render(**{**tokens, **variables})
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(
                f"the model's chat template does not take its messages ({error}): change them, or leave the line out"
            ) from None

    texts = "".join(source.values())
    return Template(
        write,
        bool(_MARKED.search(texts)),
        tokens.get("bos_token", ""),
        "strftime_now" in texts and now is None,
    )


def episode(template: Template, tokenizer: Any, chat: Chat, ends: Sequence[int]) -> Episode:
    """A chat in tokens; an answer's reward is paid on its last one.

    Args:
      template: of the model.
      tokenizer: its `tokenizers.Tokenizer`.
      chat: the messages.
      ends: the tokens that end a text.

    Raises:
      ValueError: the template does not take the messages, or does not let tell where an answer begins and ends; or as
        `rl.replay.tokens.episode`.
    """
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    text = template.write(chat.messages, chat.tools, False)
    text, marked = _unmarked(text)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids, offsets = encoding.ids, encoding.offsets  # each makes a list of the whole text anew
    spans: list[tuple[int, int]] = []
    if template.is_marked:
        for begin, stop in (span for span in marked if span[0] < span[1]):
            spans.append(_tokens(offsets, begin, stop, _last(spans)))
        if len(spans) != len(answers):
            raise ValueError(
                f"the model's chat template marks {len(spans)} answers, and there are {len(answers)}: a reward would "
                "have no place. Leave the line out, or mark each answer in the template by {% generation %}"
            )
    else:
        for number in answers:
            spans.append(_answer(template, text, ids, offsets, chat, number, ends, _last(spans)))
    rewards = chat.rewards or (0.0,) * len(chat.messages)
    turns, last = [], 0
    for number, (start, end) in zip(answers, spans, strict=True):
        if start < last:
            raise ValueError(
                f"the answer in message {number + 1} begins before the one before it ends: leave the line out"
            )
        turns += [Turn(ids[last:start]), Turn(ids[start:end], True, rewards[number])]
        last = end
    turns.append(Turn(ids[last:]))
    return join(turns, chat.terminated, float(chat.imitate))


def prompt(template: Template, tokenizer: Any, chat: Chat) -> list[int]:
    """The tokens after which the assistant answers.

    Raises:
      ValueError: the template does not take the messages.
    """
    text, _ = _unmarked(template.write(chat.messages, chat.tools, True))
    return tokenizer.encode(text, add_special_tokens=False).ids


def _answer(
    template: Template,
    text: str,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    chat: Chat,
    number: int,
    ends: Sequence[int],
    place: int,
) -> tuple[int, int]:
    """Where the tokens of the answer in a message begin and end, not before ``place``."""
    before = template.write(chat.messages[:number], chat.tools, True)
    if not text.startswith(before) or len(before) == len(text):
        raise ValueError(
            f"the model's chat template writes what is before message {number + 1} in another way where nothing "
            "follows, so that the answer's place is unknown: mark it in the template by {% generation %}, or give a "
            "line for each answer"
        )
    start, _ = _tokens(offsets, len(before), len(text), place)
    end = next((place + 1 for place in range(start, len(ids)) if ids[place] in ends), None)
    if end is None:
        raise ValueError(
            f"the answer in message {number + 1} has no end: none of the tokens that end a text follows in the model's "
            "chat template. Give the one that does by --stop"
        )
    return start, end


def _last(spans: Sequence[tuple[int, int]]) -> int:
    """The last token of the last span, which the next one may not have, too; before it nothing need be looked at."""
    return max(spans[-1][1] - 1, 0) if spans else 0


def _tokens(offsets: Sequence[tuple[int, int]], start: int, end: int, place: int) -> tuple[int, int]:
    """The tokens of a part of the text, from ``place`` on, by where each begins and ends.

    Those that reach beyond the part belong to it.
    """
    # Spaces may be no part of any (tokenizers that trim offsets), and a character may be several tokens, its bytes.
    size = len(offsets)
    first = next((token for token in range(place, size) if offsets[token][1] > start), size)
    after = next((token for token in range(first, size) if offsets[token][0] >= end), size)
    return first, after


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without `_MARKS`, and where they were."""
    pieces = re.split("|".join(_MARKS), text)
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return "".join(pieces), list(zip(ends[1:-1:2], ends[2::2], strict=True))


def _compiled(source: str, now: datetime | None) -> Any:
    jinja2 = extras.module("jinja2", "lm")
    extension = extras.module("jinja2.ext", "lm")
    sandbox = extras.module("jinja2.sandbox", "lm")

    class Generation(extension.Extension):  # type: ignore[name-defined]
        """Marks what is between ``generation`` and ``endgeneration``."""

        tags = {"generation"}  # noqa: RUF012 (as in Jinja's own)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            return caller().join(_MARKS)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own would escape HTML

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise WeightsError(f"the model's chat template is damaged ({error}): download it again") from None


def _source(companions: Mapping[str, str], described: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The texts of the templates by name, the one for chats first."""
    if _TEMPLATE in companions:
        return {"default": companions[_TEMPLATE]}
    stated: Any = described[_TOKENS].get("chat_template") or described[_OLDER].get("chat_template")
    try:
        many = (
            {one["name"]: one["template"] for one in stated}
            if isinstance(stated, list)
            else {"default": stated}
        )
        many = {"default": many["default"], **many} if stated else {}
        if not all(isinstance(text, str) for text in many.values()):
            raise TypeError
    except (KeyError, TypeError):
        raise WeightsError(
            f"the chat_template of the model's {_TOKENS} is no template: download it again"
        ) from None
    return many


def _json(companions: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        values = json.loads(companions.get(name, "{}"))
        if not isinstance(values, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"the model's {name} is no JSON ({error}): download it again") from None
    return values
