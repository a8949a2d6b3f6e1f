"""Whether what a script printed is what was expected; standard library only."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Mapping


def _same_words(printed: str, expected: str) -> bool:
    """CodeContests' rule: the same words, wherever lines end and whatever their case; numbers to 1e-5."""
    return printed == expected or _alike(printed.lower().split(), expected.lower().split(), 0.0, 1e-5)


def _same_lines(printed: str, expected: str) -> bool:
    """APPS' rule, as far as it keeps the order: the same lines but for space and empty ones; numbers as numpy's
    ``allclose`` has them.
    """
    if printed == expected:  # which is soon seen, also of more lines than a judge has time for
        return True
    # One by one: as lists of words, many lines would have more memory than a judge.
    one, other = (
        (line.split() for line in text.splitlines() if line.strip()) for text in (printed, expected)
    )
    missing: list[str] = []
    lines = itertools.zip_longest(one, other, fillvalue=missing)
    return all(_alike(line, wanted, 1e-5, 1e-8) for line, wanted in lines)


def _alike(words: list[str], expected: list[str], relative: float, absolute: float) -> bool:
    return len(words) == len(expected) and all(
        word == other or _close(word, other, relative, absolute)
        for word, other in zip(words, expected, strict=True)
    )


def _close(word: str, other: str, relative: float, absolute: float) -> bool:
    """Whether two words are numbers that are close or, if both are whole, the same.

    Python's own 1_000 is no number to others.
    """
    if "_" in word + other:
        return False
    try:
        return int(word) == int(other)
    except ValueError:
        pass
    try:
        one, expected = float(word), float(other)
    except (ValueError, OverflowError):
        return False
    return math.isfinite(expected) and abs(one - expected) <= absolute + relative * abs(expected)


MATCHES: Mapping[str, Callable[[str, str], bool]] = types.MappingProxyType(
    {"lines": _same_lines, "words": _same_words}
)
