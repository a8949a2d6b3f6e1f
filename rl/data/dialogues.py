"""Logs of dialogues, and of texts to be ranked: JSON lines in, tuples out. No tokens are known here."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rl.data.files import DataError, existing, reading
from rl.envs.text import Dialogue, Turn

T = TypeVar("T")

_DIALOGUE = (
    '{"turns": [{"text": "...", "is_action": true, "reward": 0.0}, ...], "terminated": true, "imitate": 1}'
)
_CANDIDATES = '{"prompt": "...", "candidates": ["...", ...]}'
_NUMBER = (int, float)  # and so is true: 1


class Candidates(NamedTuple):
    """Texts that may follow a prompt."""

    prompt: str
    candidates: tuple[str, ...]


def read(path: str | Path) -> list[Dialogue]:
    """The dialogues of a file of JSON lines, one in each::

        {"turns": [{"text": "2+2=", "is_action": false}, {"text": "4", "is_action": true, "reward": 1.0}],
         "terminated": true, "imitate": true}

    They are the fields of `rl.envs.text.Dialogue` and of its turns, with the same defaults; ``imitate`` is a weight.

    Raises:
      DataError: a row that is not like that, or none at all; the message names its line. Or there is no such file.

    Warns:
      UserWarning: no row says ``imitate``, and some episodes went worse than others.
    """
    weighted = False

    def parse(row: dict[str, Any]) -> Dialogue:
        nonlocal weighted
        dialogue = _dialogue(row)
        weighted |= "imitate" in row
        return dialogue

    found = list(_rows(path, parse, _DIALOGUE))
    if not weighted and len({sum(turn.reward for turn in one.turns) for one in found}) > 1:
        warnings.warn(
            f"{path}: no row says imitate, so that what failed is imitated like what did not: give it in each row, or "
            "imitate a share of the episodes by --best",
            stacklevel=2,
        )
    return found


def read_candidates(path: str | Path) -> list[Candidates]:
    """The rows ``{"prompt": "...", "candidates": ["...", ...]}`` of a file of JSON lines.

    Raises:
      DataError: as `read`.
    """
    return list(_rows(path, _candidates, _CANDIDATES))


def _dialogue(row: dict[str, Any]) -> Dialogue:
    _check(row, {"turns": list}, {"terminated": bool, "imitate": _NUMBER})
    for turn in row["turns"]:
        _check(turn, {"text": str}, {"is_action": bool, "reward": _NUMBER})
        if not math.isfinite(turn.get("reward", 0.0)):
            raise ValueError(f"it has a reward of {turn['reward']}")
    if not 0 <= row.get("imitate", 1.0) < math.inf:
        raise ValueError(f"its imitate is {row['imitate']}, and must not be negative or endless")
    return Dialogue(**row | {"turns": tuple(Turn(**turn) for turn in row["turns"])})


def _candidates(row: dict[str, Any]) -> Candidates:
    _check(row, {"prompt": str, "candidates": list}, {})
    if not row["candidates"] or not all(isinstance(text, str) for text in row["candidates"]):
        raise ValueError("its candidates are not texts")
    return Candidates(row["prompt"], tuple(row["candidates"]))


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


def _rows(path: str | Path, parse: Callable[[Any], T], layout: str) -> Iterator[T]:
    path, count = existing(path), 0
    with reading(path, "JSON lines"), open(path, "rb") as file:
        for count, line in enumerate(file, start=1):
            try:
                yield parse(json.loads(line.decode("utf-8")))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {count}: it is not in UTF-8 ({error}): save the file as UTF-8"
                ) from None
            except (ValueError, OverflowError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {count}: {error}. A row is {layout}: mend it, or leave the line out"
                ) from None
    if not count:
        raise DataError(f"{path} is empty: a row is {layout}")
