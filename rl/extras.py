"""Packages that only some tasks need, the extras of setup.cfg: what installs them."""

from __future__ import annotations

import sys


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
