"""Logs of dialogues, texts to be ranked and prompts: JSON lines in, tuples out. No tokens are known here.

What was said before an answer is told in turns, ``{"turns": [{"text": "2+2=", "is_action": false}]}``, as messages for
the model's chat template, ``{"messages": [{"role": "user", "content": "2+2?"}]}``, or as ``{"prompt": "2+2="}``, which
is one turn. A log may also have programs that were sampled for a problem. Lines that are blank count, and are no rows.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rl.envs.text import Chat, Dialogue, Turn
from rl.files import DataError, json_rows
from rl.programs.problems import Samples

T = TypeVar("T")

_TURNS = (
    '{"turns": [{"text": "...", "is_action": true, "reward": 0.0}, ...], "terminated": true, "imitate": 1}'
)
_MESSAGES = (
    '{"messages": [{"role": "user", "content": "..."}, ...], "reward": 0.0, "terminated": true, "imitate": 1}'
)
_SAMPLES = '{"task_id": "...", "prompt": "...", "samples": ["...", ...]}'
_DIALOGUE = f"{_TURNS} or {_MESSAGES} or {_SAMPLES}"
_ANSWERS = '"candidates": ["...", ...], "outcomes": [true, ...]}'
_CANDIDATES = f'{{"prompt": "...", {_ANSWERS} or {{"messages": [...], {_ANSWERS}'
_PROMPT = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
_NUMBER = (int, float)  # and so is true: 1
ASSISTANT = "assistant"
# What else a message may have: the names that chat templates read.
_OF_MESSAGES = {
    "content": (str, list, type(None)),
    **{name: (str, type(None)) for name in ("name", "tool_call_id", "reasoning_content")},
    "tool_calls": (list, type(None)),
    "reward": _NUMBER,
}


class Candidates(NamedTuple):
    """Texts that may follow what was said."""

    row: Mapping[str, Any]  # as it stands in the file
    dialogue: Dialogue | Chat
    candidates: tuple[str, ...]
    outcomes: tuple[bool, ...] = ()  # whether each is right; empty where nobody knows


class Prompt(NamedTuple):
    """What was said, and is to be gone on with."""

    line: int
    row: Mapping[str, Any]  # as it stands in the file
    dialogue: Dialogue | Chat


def read(path: str | Path) -> dict[int, Dialogue | Chat | Samples]:
    """The episodes of a file of JSON lines, by the number of their line::

        {"turns": [{"text": "2+2=", "is_action": false}, {"text": "4", "is_action": true, "reward": 1.0}],
         "terminated": true, "imitate": true}
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reward": 1.0}]}
        {"task_id": "HumanEval/0", "prompt": "def f():", "samples": ["    return 1", "    pass"]}

    They are the fields of `rl.envs.text.Dialogue` and of its turns, with the same defaults; ``imitate`` is a weight. Of
    messages those of the assistant are the agent's, and may have a ``reward``; a ``reward`` of the row is that of the
    last of them. Their ``content`` may be in parts, ``[{"type": "text", "text": "2+2?"}, ...]``, which are joined with
    nothing between them. ``tools`` of the row are given to the chat template. What samples earned their problem's tests
    have to say.

    Raises:
      DataError: a row that is not like that, or none at all; the message names its line. Or there is no such file.

    Warns:
      UserWarning: no row says ``imitate``, and some episodes went worse than others.
    """
    weighted = False

    def parse(row: Any) -> Dialogue | Chat | Samples:
        nonlocal weighted
        episode = _episode(row)
        weighted |= "imitate" in row
        return episode

    rows = dict(_rows(path, parse, _DIALOGUE))
    weighable = [one for one in rows.values() if not isinstance(one, Samples)]
    if not weighted and len({one.returned for one in weighable}) > 1:
        warnings.warn(
            f"{path}: no row says imitate, so that what failed is imitated like what did not: give it in each row, or "
            "imitate a share of the episodes by --best",
            stacklevel=2,
        )
    return rows


def read_candidates(path: str | Path) -> dict[int, Candidates]:
    """The rows ``{"prompt": "...", "candidates": ["...", ...], "outcomes": [true, ...]}`` of a file of JSON lines, by
    the number of their line; ``turns`` or ``messages`` may stand for the prompt, and ``outcomes`` may be left out.

    Raises:
      DataError: as `read`.
    """
    return dict(_rows(path, _candidates, _CANDIDATES))


def read_prompts(path: str | Path) -> list[Prompt]:
    """The rows ``{"prompt": "..."}``, ``{"messages": [...]}`` or ``{"turns": [...]}`` of a file of JSON lines.

    Raises:
      DataError: as `read`.
    """
    rows = _rows(path, lambda row: (row, _dialogue_or_chat(row, {})), _PROMPT)
    return [Prompt(line, row, prompt) for line, (row, prompt) in rows]


def _episode(row: Any) -> Dialogue | Chat | Samples:
    parsers: dict[str, Callable[[Any], Dialogue | Chat | Samples]] = {"messages": _chat, "samples": _samples}
    form = next((name for name in parsers if isinstance(row, dict) and name in row), "")
    return parsers.get(form, _dialogue)(row)


def _dialogue(row: Any) -> Dialogue:
    _check(row, {"turns": list}, {"terminated": bool, "imitate": _NUMBER})
    for turn in row["turns"]:
        _check(turn, {"text": str}, {"is_action": bool, "reward": _NUMBER})
        _check_reward(turn)
    _check_weight(row)
    return Dialogue(**row | {"turns": tuple(Turn(**turn) for turn in row["turns"])})


def _chat(row: dict[str, Any]) -> Chat:
    _check(
        row, {"messages": list}, {"terminated": bool, "imitate": _NUMBER, "reward": _NUMBER, "tools": list}
    )
    rewards = [_check_message(number, message) for number, message in enumerate(row["messages"], start=1)]
    answers = [number for number, message in enumerate(row["messages"]) if message["role"] == ASSISTANT]
    if not answers:
        raise ValueError("none of its messages is the assistant's, so that nothing can be learned from it")
    _check_weight(row)
    if "reward" in row:
        if any("reward" in message for message in row["messages"]):
            raise ValueError("it has a reward, and so have its messages: leave one of them out")
        _check_reward(row)
        rewards[answers[-1]] = row["reward"]
    others = {name: row[name] for name in ("terminated", "imitate") if name in row}
    return _messages(row)._replace(rewards=tuple(map(float, rewards)), **others)


def _samples(row: dict[str, Any]) -> Samples:
    _check(row, {"task_id": str, "prompt": str, "samples": list}, {})
    if not row["samples"] or not all(isinstance(text, str) for text in row["samples"]):
        raise ValueError("its samples are not texts")
    return Samples(row["task_id"], row["prompt"], tuple(row["samples"]))


def _messages(row: Mapping[str, Any]) -> Chat:
    """As templates are given them: without rewards, every content in one piece.

    A content of null stays, as transformers gives it to a template; other fields of null are as good as absent.
    """
    messages = tuple(
        {
            name: _joined(value) if name == "content" else value
            for name, value in message.items()
            if name != "reward" and (value is not None or name == "content")
        }
        for message in row["messages"]
    )
    return Chat(messages, tools=tuple(row.get("tools", ())))


def _joined(content: str | list[dict[str, Any]] | None) -> str | None:
    """A content whose parts, if it has some, follow one another."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _check_parts(content: list[Any]) -> None:
    """Raises ValueError where a part of a message's content is no text."""
    for number, part in enumerate(content, start=1):
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError(
                f"part {number} of its content is of type {json.dumps(part['type'])[:40]}, and models here read text "
                "alone: leave the part or the row out, or say in a text what it shows"
            )
        try:
            _check(part, {"type": str, "text": str}, {})
        except ValueError as error:
            raise ValueError(f"part {number} of its content: {error}") from None


def _check_message(number: int, message: Any) -> float:
    """The reward of a message. Raises ValueError where it is none."""
    try:
        _check(message, {"role": str}, _OF_MESSAGES)
        _check_reward(message)
        if isinstance(message.get("content"), list):
            _check_parts(message["content"])
        if message.get("content") is None and message.get("tool_calls") is None:
            raise ValueError("its content is missing")
        if message.get("reward") and message["role"] != ASSISTANT:
            raise ValueError(f"it is the {message['role']}'s and has a reward: give it to the assistant's")
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from None
    return message.get("reward", 0.0)


def _candidates(row: Any) -> Candidates:
    prompt = _dialogue_or_chat(row, {"candidates": list}, {"outcomes": list})
    texts, outcomes = row["candidates"], row.get("outcomes", [])
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("its candidates are not texts")
    if outcomes and (len(outcomes) != len(texts) or not all(isinstance(right, bool) for right in outcomes)):
        raise ValueError(f"its outcomes are not {len(texts)} of true and false, one for each candidate")
    return Candidates(row, prompt, tuple(texts), tuple(outcomes))


def _dialogue_or_chat(
    row: Any, needed: Mapping[str, Any], others: Mapping[str, Any] | None = None
) -> Dialogue | Chat:
    """What a prompt, turns or messages say, beside which a row has the fields ``needed`` and may have ``others``."""
    kinds = {"turns": list, "messages": list}
    form = next((name for name in kinds if isinstance(row, dict) and name in row), "prompt")
    _check(
        row,
        {form: kinds.get(form, str), **needed},
        {**(others or {}), **({"tools": list} if form == "messages" else {})},
    )
    if form == "prompt":
        return Dialogue((Turn(row["prompt"]),))
    if not row[form]:
        raise ValueError(f"its {form} are empty")
    if form == "turns":
        dialogue = _dialogue({"turns": row["turns"]})
        if dialogue.turns[-1].is_action:
            raise ValueError("its last turn is the agent's, who is to go on: leave that turn out")
        if not dialogue.turns[-1].text:
            raise ValueError("its last turn is empty: leave that turn out")
        return dialogue
    for number, message in enumerate(row["messages"], start=1):
        _check_message(number, message)
    if row["messages"][-1]["role"] == ASSISTANT:
        raise ValueError("its last message is the assistant's, who is to answer it: leave that message out")
    return _messages(row)


def _check_reward(row: Mapping[str, Any]) -> None:
    if not math.isfinite(row.get("reward", 0.0)):
        raise ValueError(f"it has a reward of {row['reward']}")


def _check_weight(row: Mapping[str, Any]) -> None:
    if not 0 <= row.get("imitate", 1.0) < math.inf:
        raise ValueError(f"its imitate is {row['imitate']}, and must not be negative or endless")


def _check(row: Any, needed: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raises ValueError where an object has not the fields ``needed``, or any but those and ``others``."""
    if not isinstance(row, dict):
        raise ValueError(f"{json.dumps(row)[:40]} is no object")
    if missing := [name for name in needed if name not in row]:
        raise ValueError(f"{', '.join(missing)} is missing")
    kinds = {**needed, **others}
    for name, value in row.items():
        if name not in kinds:
            raise ValueError(f"{name!r} is none of {', '.join(kinds)}")
        if not isinstance(value, kinds[name]):
            raise ValueError(f"its {name} is {json.dumps(value)[:40]}")


def _rows(path: str | Path, parse: Callable[[Any], T], layout: str) -> Iterator[tuple[int, T]]:
    for place, number, row in json_rows(path, layout):
        try:
            parsed = parse(row)
        except (ValueError, OverflowError) as error:
            raise DataError(f"{place}: {error}. A row is {layout}: mend it, or leave the line out") from None
        yield number, parsed
