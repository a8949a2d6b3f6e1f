"""Packages that only some tasks need, the extras of setup.cfg: what installs them."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def command(extra: str) -> str:
    """What to type to install an extra, in a clone.

    On Python 3.13 and newer OGBench takes a second command: dm_control asks for labmaze, which has no wheels there and
    is not used.
    """
    alone = extra == "ogbench" and sys.version_info >= (3, 13)
    return (
        f"pip install -e '.[{extra}]'"
        + " && pip install --no-deps ogbench dm_control" * alone
        + " (in the clone)"
    )


def module(name: str, extra: str) -> Any:
    """The module of a package that an extra installs.

    Raises:
      ImportError: the package is missing; the message says what to type.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"the package {name.partition('.')[0]!r} is missing: {command(extra)}") from error
