"""Locks on folders: of the processes that could write to one, a single one holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import jax

from rl import checkpoint

LOCK = ".lock"  # in the folder
_ATTEMPTS = 4  # to lock a folder


class InUse(checkpoint.CheckpointError):
    """Another process has the run folder open."""


@contextlib.contextmanager
def alone(folder: Path, lock: str = LOCK) -> Iterator[None]:
    """Holds the folder for this process; where the file system has no locks, so may others.

    Args:
      folder: made if missing.
      lock: the file in it that is locked; `rl.lifecycle.session` locks that of the default.

    Raises:
      InUse: another process holds it.
      OSError: nothing can be written there.
    """
    if jax.process_index() != 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / lock, "a+"))
        except OSError as error:
            remedy = f"{error.strerror}: choose a --workdir (a study: an --out) in which files can be written"
            raise OSError(error.errno, remedy, str(folder)) from error
        try:
            _lock(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise in_use(folder, file.read()) from None
        except OSError:
            warnings.warn(
                f"the file system of {folder} has no locks: nothing keeps another run out of it", stacklevel=4
            )
        # The file stays: removed, it could still be locked by one process while another locks a new one.
        since = datetime.now().isoformat(" ", "seconds")
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
            file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: free space, or choose another --workdir (a study: --out)",
                str(folder),
            ) from error
        yield


def holder(folder: Path, lock: str = LOCK) -> str | None:
    """Which process holds the folder (`alone`); None if none does, or where the file system has no locks."""
    with contextlib.suppress(OSError), open(folder / lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "another process"
    return None


def in_use(folder: Path, by: str | None) -> InUse:
    """The error of a folder that a process holds, which `holder` names; None: it is not known which."""
    return InUse(
        f"{folder} is in use by {(by or '').strip() or 'another process'}: wait until it ends, stop it, or choose "
        "another --workdir"
    )


def _lock(take: Callable[[], None]) -> None:
    """Takes a lock, trying a few times: a process that only asks whether there is one (`holder`) has it for a moment.

    Raises:
      BlockingIOError: another process has it.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            return take()
        time.sleep(0.05)
    take()
