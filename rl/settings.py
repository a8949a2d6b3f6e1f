"""What settings are refused for, with messages that name the field."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def require_choices(settings: Any, choices: Mapping[str, Collection[str]], prefix: str = "") -> None:
    """Raises ValueError if an attribute of ``settings`` is none of its ``choices``, and says which is near.

    Args:
      settings: has the attributes.
      choices: {attribute: what it may be}.
      prefix: before the attribute in the message, as in its flag.
    """
    for name, known in choices.items():
        value = getattr(settings, name)
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise ValueError(f"{prefix}{name}={value!r}: {hint}choose one of {', '.join(known)}")


def require_at_least_one(settings: Any, *names: str, prefix: str = "") -> None:
    """Raises ValueError, naming the attribute of ``settings`` after the ``prefix``, on a count below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{prefix}{name}={getattr(settings, name)} must be at least 1")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for the ``known`` name that is nearest, and a space; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
