"""What settings are refused for, with messages that name the field."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np


def is_known(value: Any) -> bool:
    """Whether ``value`` is one number, of Python, NumPy or JAX, and known when a program is built.

    One that is swept inside the program is a tracer, and not known.
    """
    if isinstance(value, jax.core.Tracer):
        return False
    return isinstance(value, numbers.Real) or (
        isinstance(value, np.number | np.ndarray | jax.Array) and np.ndim(value) == 0
    )


def require_choice(name: str, value: str, known: Collection[str], prefix: str = "") -> None:
    """Raises ValueError, saying which is near, if ``value`` is none of the ``known`` ones.

    Args:
      name: of what is chosen, for the message.
      value: what was chosen.
      known: what it may be.
      prefix: before the name in the message, as in its flag.
    """
    if value not in known:
        hint = did_you_mean(str(value), known)
        raise ValueError(f"{prefix}{name}={value!r}: {hint}choose one of {', '.join(known)}")


def require_choices(settings: Any, choices: Mapping[str, Collection[str]], prefix: str = "") -> None:
    """`require_choice` of each attribute of ``settings`` among ``choices``, {attribute: what it may be}."""
    for name, known in choices.items():
        require_choice(name, getattr(settings, name), known, prefix)


def require_at_least_one(settings: Any, *names: str, prefix: str = "") -> None:
    """Raises ValueError, naming the attribute of ``settings`` after the ``prefix``, on a count below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{prefix}{name}={getattr(settings, name)} must be at least 1")


def require_share(name: str, value: float, prefix: str = "") -> None:
    """Raises ValueError, naming it after the ``prefix``, on a number that does not lie between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{prefix}{name}={value:g} must be between 0 and 1")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for the ``known`` name that is nearest, and a space; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
