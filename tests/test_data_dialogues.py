"""rl.data.dialogues: what a row says arrives, and a bad row is refused with its line."""

from __future__ import annotations

import codecs
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from rl.data import dialogues
from rl.data.steps import DataError
from rl.envs.text import Chat, Dialogue, Turn

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4", "reward": 1.0}
TEXT = {"type": "text", "text": "2+"}
GOOD = {"turns": [{"text": "2+2="}, {"text": "4", "is_action": True, "reward": 1}], "imitate": False}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_arrive(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.jsonl",
        GOOD,
        "\n",
        {"turns": [{"text": "ä"}], "terminated": False, "imitate": 0.5},
        " \n",
    )
    assert dialogues.read(path) == {
        1: Dialogue((Turn("2+2="), Turn("4", True, 1.0)), terminated=True, imitate=0.0),
        3: Dialogue((Turn("ä"),), terminated=False, imitate=0.5),
    }
    prompt = Dialogue((Turn("2+2="),))
    rows = [
        {"prompt": "2+2=", "candidates": ["4", "5"]},
        {"prompt": "2+2=", "candidates": ["4"], "outcomes": [True]},
    ]
    assert dialogues.read_candidates(write(tmp_path / "asked.jsonl", *rows)) == {
        1: (rows[0], prompt, ("4", "5"), ()),
        2: (rows[1], prompt, ("4",), (True,)),
    }
    prompts = [
        {"prompt": "2+2="},
        {"turns": [{"text": "2+2="}]},
        {"messages": [{"role": "user", "content": "2"}]},
    ]
    read = dialogues.read_prompts(write(tmp_path / "prompts.jsonl", prompts[0], "\n", *prompts[1:]))
    assert [one.line for one in read] == [1, 3, 4] and [one.row for one in read] == prompts
    assert [one.dialogue for one in read] == [prompt, prompt, Chat(({"role": "user", "content": "2"},))]


def test_messages_arrive(tmp_path: Path) -> None:
    """Without rewards and fields of null, but for a content's; parts of a content as one text."""
    in_parts = {"role": "user", "content": [TEXT, {"type": "text", "text": "2?"}]}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function"}],
        "name": None,
        "reward": 0.5,
    }
    rows = [
        {
            "messages": [in_parts, {"role": "assistant", "content": "4"}],
            "reward": 1,
            "terminated": False,
            "imitate": 0,
        },
        {
            "messages": [ASKED, called, {"role": "tool", "content": "4", "name": "add"}],
            "tools": [{"type": "function"}],
        },
    ]
    first, second = dialogues.read(write(tmp_path / "log.jsonl", *rows)).values()
    assert first == Chat((ASKED, {"role": "assistant", "content": "4"}), (0.0, 1.0), False, 0)
    del called["name"], called["reward"]
    assert second == Chat(
        (ASKED, called, {"role": "tool", "content": "4", "name": "add"}),
        (0.0, 0.5, 0.0),
        tools=({"type": "function"},),
    )
    assert (first.returned, second.returned) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{\n", "it is not JSON: Expecting property name"),
        ([], "[] is no object"),
        ({}, "turns is missing"),
        ({"turns": "hello"}, 'its turns is "hello"'),
        ({**GOOD, "truncated": False}, "'truncated' is none of turns, terminated, imitate"),
        ({**GOOD, "terminated": 1}, "its terminated is 1"),
        ({**GOOD, "imitate": -1}, "its imitate is -1, and must not be negative or endless"),
        ({**GOOD, "imitate": float("inf")}, "its imitate is inf"),
        ({"turns": ["hello"]}, '"hello" is no object'),
        ({"turns": [{"is_action": True}]}, "text is missing"),
        ({"turns": [{"text": 4}]}, "its text is 4"),
        ({"turns": [{"text": "4", "is_action": "yes"}]}, 'its is_action is "yes"'),
        ({"turns": [{"text": "4", "reward": "much"}]}, 'its reward is "much"'),
        ({"turns": [{"text": "4", "reward": float("nan")}]}, "it has a reward of nan"),
        ({"turns": [{"text": "4", "reward": 10**400}]}, "int too large"),
        ({"messages": []}, "none of its messages is the assistant's"),
        ({"messages": [ASKED]}, "none of its messages is the assistant's"),
        ({"messages": "hello"}, 'its messages is "hello"'),
        ({"messages": ["hello"]}, 'message 1: "hello" is no object'),
        ({"messages": [ASKED, {"content": "4"}]}, "message 2: role is missing"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2: its content is missing"),
        ({"messages": [ASKED, {"role": "assistant", "content": 4}]}, "message 2: its content is 4"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [4]}]},
            "message 2: part 1 of its content: 4 is no",
        ),
        (
            {"messages": [{"role": "user", "content": [TEXT, {"type": "text"}]}]},
            "message 1: part 2 of its content: text is missing",
        ),
        (
            {"messages": [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]}]},
            'message 1: part 2 of its content is of type "image_url", and models here read text alone: leave the part',
        ),
        ({"messages": [{**ASKED, "reward": 1.0}]}, "message 1: it is the user's and has a reward"),
        ({"messages": [{**ASKED, "rewards": 1.0}]}, "message 1: 'rewards' is none of role, content"),
        ({"messages": [ASKED, ANSWERED], "reward": 1.0}, "it has a reward, and so have its messages"),
        ({"messages": [ASKED, ANSWERED], "turns": []}, "'turns' is none of messages"),
        ({"messages": [ASKED, {**ANSWERED, "reward": float("nan")}]}, "message 2: it has a reward of nan"),
        ("1" * 5000 + "\n", "it is not JSON: Exceeds the limit"),
        ("[" * 100_000 + "\n", "it is not JSON: maximum recursion depth"),
    ],
)
def test_a_bad_row_is_named_with_its_line(bad: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD, bad, GOOD)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 2: {message}")) as refused:
        dialogues.read(path)
    assert 'A row is {"turns": [' in str(refused.value) and "leave the line out" in str(refused.value)


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD)
    plain = dialogues.read(path)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert dialogues.read(path) == plain


def test_another_encoding_and_no_file_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD)
    path.write_bytes(path.read_bytes() + b'{"turns": "\xe4"}')
    with pytest.raises(DataError, match=r"log.jsonl, line 2: it is not in UTF-8 .*save the file as UTF-8"):
        dialogues.read(path)
    with pytest.raises(DataError, match=r"there is no file .*lag.jsonl; .* holds log.jsonl"):
        dialogues.read(tmp_path / "lag.jsonl")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "a"}, "candidates is missing"),
        ({"prompt": "a", "candidates": []}, "its candidates are not texts"),
        ({"prompt": 1, "candidates": ["b"]}, "its prompt is 1"),
        ({"prompt": "a", "candidates": ["b"], "outcomes": [1]}, "its outcomes are not 1 of true and false"),
        (
            {"prompt": "a", "candidates": ["b", "c"], "outcomes": [True]},
            "its outcomes are not 2 of true and false",
        ),
        ({"messages": [ASKED, ANSWERED], "candidates": ["b"]}, "its last message is the assistant's"),
        (
            {"turns": [{"text": "a"}, {"text": "b", "is_action": True}], "candidates": ["c"]},
            "its last turn is the agent's",
        ),
        (
            {
                "turns": [{"text": "a"}, {"text": "b", "is_action": True}, {"text": ""}],
                "candidates": ["c"],
            },
            "its last turn is empty",
        ),
        ({"messages": [], "candidates": ["b"]}, "its messages are empty"),
        ({"turns": [{"text": 1}], "candidates": ["b"]}, "its text is 1"),
        ([], "[] is no object"),
    ],
)
def test_candidates_that_are_none(bad: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"line 1: {re.escape(message)}.* A row is \{{\"prompt\""):
        dialogues.read_candidates(write(tmp_path / "asked.jsonl", bad))


@pytest.mark.parametrize(
    "bad", [{"prompt": 1}, {"messages": [ASKED, ANSWERED]}, {"prompt": "a", "turns": []}, []]
)
def test_prompts_that_are_none(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: .* A row is \{\"prompt\""):
        dialogues.read_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "a"}, bad))


def test_an_empty_file(tmp_path: Path) -> None:
    for lines in ((), ("\n", " \n")):
        with pytest.raises(DataError, match="is empty: a row is"):
            dialogues.read(write(tmp_path / "log.jsonl", *lines))


def test_a_log_that_does_not_say_what_to_imitate_warns(tmp_path: Path) -> None:
    """Only where some episodes went worse than others."""
    path = tmp_path / "log.jsonl"
    rows = [{"turns": [{"text": "4", "is_action": True, "reward": reward}]} for reward in (1.0, -1.0)]
    with pytest.warns(UserWarning, match=r"log\.jsonl: no row says imitate, so that what failed is imitated"):
        dialogues.read(write(path, *rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dialogues.read(write(path, rows[0], rows[0]))
        dialogues.read(write(path, rows[0], rows[1] | {"imitate": 0}))
