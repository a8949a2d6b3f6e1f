"""rl.data.dialogues: what a row says arrives, and a bad row is refused with its line."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from rl.data import dialogues
from rl.data.steps import DataError
from rl.envs.text import Dialogue, Turn

GOOD = {"turns": [{"text": "2+2="}, {"text": "4", "is_action": True, "reward": 1}], "imitate": False}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_arrive(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.jsonl", GOOD, {"turns": [{"text": "ä"}], "terminated": False, "imitate": 0.5}
    )
    assert dialogues.read(path) == [
        Dialogue((Turn("2+2="), Turn("4", True, 1.0)), terminated=True, imitate=0.0),
        Dialogue((Turn("ä"),), terminated=False, imitate=0.5),
    ]
    asked = write(tmp_path / "asked.jsonl", {"prompt": "2+2=", "candidates": ["4", "5"]})
    assert dialogues.read_candidates(asked) == [("2+2=", ("4", "5"))]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{\n", "Expecting property name"),
        ("\n", "Expecting value"),
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
        ("1" * 5000 + "\n", "Exceeds the limit"),
        ("[" * 100_000 + "\n", "maximum recursion depth"),
    ],
)
def test_a_bad_row_is_named_with_its_line(bad: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD, bad, GOOD)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 2: {message}")) as refused:
        dialogues.read(path)
    assert 'A row is {"turns": [' in str(refused.value) and "leave the line out" in str(refused.value)


def test_another_encoding_and_no_file_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD)
    path.write_bytes(path.read_bytes() + b'{"turns": "\xe4"}')
    with pytest.raises(DataError, match=r"log.jsonl, line 2: it is not in UTF-8 .*save the file as UTF-8"):
        dialogues.read(path)
    with pytest.raises(DataError, match=r"there is no file .*lag.jsonl; .* holds log.jsonl"):
        dialogues.read(tmp_path / "lag.jsonl")


@pytest.mark.parametrize(
    "bad", [{"prompt": "a"}, {"prompt": "a", "candidates": []}, {"prompt": 1, "candidates": ["b"]}]
)
def test_candidates_that_are_none(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: .* A row is \{\"prompt\""):
        dialogues.read_candidates(write(tmp_path / "asked.jsonl", bad))


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty: a row is"):
        dialogues.read(write(tmp_path / "log.jsonl"))


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
