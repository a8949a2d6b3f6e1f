"""Files over HTTP: whole, checked, or not at all. Nothing here knows what is in them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from rl import log
from rl.files import DataError, reading

_CHUNK = 1 << 20  # bytes
_TIMEOUT = 30  # seconds without any data before an attempt counts as failed


def fetch(
    url: str,
    path: Path,
    sha256: str | None = None,
    retries: int = 3,
    *,
    check: Callable[[Path], None] | None = None,
    otherwise: str = "",
) -> None:
    """Downloads ``url`` to ``path``, which appears only once it is complete and checked.

    The length must be the announced one, and the SHA-256 ``sha256`` where one is given. The SHA-256 found is
    written beside the file as ``<path>.sha256``, in the format of the ``sha256sum`` tool; `verify` reads it.

    Args:
        url: the address.
        path: the target; missing folders are made.
        sha256: the published checksum in hexadecimal, if there is one.
        retries: attempts after the first, 1, 2, 4 ... seconds later, if the network or the server fails.
        check: called on the complete file before it takes its name; raises `DataError` if it is unusable.
        otherwise: what the user can do instead, for the error message of a failed download.

    Raises:
        DataError: no connection, a refusal by the server, a wrong checksum, a full disk; nothing is left
            behind.
    """
    by_hand = f"To continue, download it elsewhere and put it at {path}" + (
        f", or {otherwise}" if otherwise else ""
    )
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # its own: hosts may share the folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = _attempts(url, partial, retries, by_hand)
        if sha256 is not None and digest != sha256.lower():
            raise DataError(f"{url} has SHA-256 {digest}, but {sha256} was expected: not kept. {by_hand}")
        if check is not None:
            check(partial)
        # First: a kill between the two leaves a checksum without a file, which the next download replaces.
        noted = partial.with_name(f"{partial.name}.sha256")
        noted.write_text(f"{digest}  {path.name}\n")
        os.replace(noted, sidecar(path))
        os.replace(partial, path)
    except OSError as error:  # failures of the network have become DataErrors by now
        raise DataError(
            f"could not write to {path.parent}: {error.strerror or error}; nothing was kept. Free some space there, "
            "or choose another folder"
        ) from error
    finally:
        for left in (partial, partial.with_name(f"{partial.name}.sha256")):
            left.unlink(missing_ok=True)


def verify(path: Path, sha256: str | None = None) -> None:
    """Compares ``path`` with ``sha256`` and with the checksum recorded when it was downloaded, if any.

    Raises:
        DataError: the file has changed.
    """
    beside = sidecar(path)
    with reading(beside, "the checksum of its download", f"delete it if {path.name} is as it should be"):
        recorded = beside.read_text().split() if beside.exists() else []
        if beside.exists() and not (recorded and re.fullmatch("[0-9a-f]{64}", recorded[0])):
            raise ValueError("it holds no SHA-256")
    if sha256 is None and not recorded:
        return
    digest = _hash(path)
    if sha256 is not None and digest != sha256.lower():
        raise DataError(f"{path} has SHA-256 {digest}, but {sha256} was asked for")
    if recorded and digest != recorded[0]:
        raise DataError(
            f"{path} has SHA-256 {digest}, but {recorded[0]} when it was downloaded: the file has changed. "
            f"Delete it to download it again, or delete {beside.name} beside it if the change was meant"
        )


class _NetworkError(Exception):
    """The network or the server failed; ``again`` says whether another attempt may help."""

    def __init__(self, reason: object, again: bool):
        super().__init__(str(reason))
        self.again = again


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """Tells a failure of the network from one of the disk: Python reports both as OSError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        again = error.code in (408, 429) or error.code >= 500
        raise _NetworkError(f"the server answered {error.code} {error.reason}", again) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        unknown_host = isinstance(reason, socket.gaierror)  # offline, most often: waiting does not help
        raise _NetworkError(reason, not unknown_host) from error


def _attempts(url: str, partial: Path, retries: int, by_hand: str) -> str:
    """Transfers until it works or is hopeless; returns the SHA-256."""
    attempt = 0
    while True:
        try:
            return _transfer(url, partial)
        except _NetworkError as error:
            attempt += 1
            if not error.again or attempt > retries:
                raise DataError(
                    f"could not download {url}: {error} ({attempt} attempts). {by_hand}"
                ) from error
        time.sleep(2 ** (attempt - 1))


def _transfer(url: str, partial: Path) -> str:
    """One attempt; returns the SHA-256 of what was written."""
    digest, received = hashlib.sha256(), 0
    request = urllib.request.Request(url, headers={"User-Agent": "headway"})
    with _network():
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    announced = response.headers.get("Content-Length")
    total = int(announced) if (announced or "").isdecimal() else None  # some servers announce no number
    bar = log.progress(total, url.rsplit("/", 1)[-1], unit="B")
    with response, bar, partial.open("wb") as file:
        while chunk := _read(response):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            bar.update(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and received != total:
        raise _NetworkError(f"the connection closed after {received} of {total} bytes", True)
    return digest.hexdigest()


def _read(response: http.client.HTTPResponse) -> bytes:
    with _network():
        return response.read(_CHUNK)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        log.progress(size, "checksum", unit="B", delay=2) as bar,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def sidecar(path: Path) -> Path:
    """Where the checksum of a downloaded file is recorded."""
    return path.with_name(path.name + ".sha256")
