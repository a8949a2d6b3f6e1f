"""Files that are there and can be read, or an error that names them. Nothing here knows what is in them.

Nothing but the standard library is imported: processes that make data or run programs use this too.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_AGAIN = (
    "it is cut short, damaged or in another format; if it was downloaded, delete it and load again by name; if it is "
    "yours, copy or write it again"
)


class DataError(ValueError):
    """A dataset that cannot be used as it is; the message names what is wrong and the remedy."""


class Row(NamedTuple):
    """One row of a file of JSON."""

    place: str  # where it is, in words: "log.jsonl, line 3"
    number: int  # of its line, or of the element of an array, from 1
    value: Any


def expanded(path: str | os.PathLike) -> Path:
    """``path`` with ``~`` replaced by the user's home folder.

    Raises:
        DataError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path}: no home folder is known for {Path(path).parts[0]!r}; give the whole path"
        ) from error


def existing(path: str | os.PathLike, remedy: str = "") -> Path:
    """``path``, expanded, if it is a file that may be read.

    Args:
        path: may start with ``~``.
        remedy: what to do where there is none, beside choosing one of the files there, which are listed.

    Raises:
        DataError: it is not.
    """
    path = expanded(path)
    with reading(path, "a path", "choose another path"):
        if path.is_file():
            if not os.access(path, os.R_OK):
                raise DataError(f"{path} may not be read by this user: change its permissions, or copy it")
            return path
        raise DataError(
            f"there is no file {path}{_instead(path)}; {remedy or 'give the path of one that is there'}"
        )


def _instead(path: Path) -> str:
    """What there is in its place, in words."""
    folder = path.parent.absolute()
    if path.is_dir():
        return ": that is a folder"
    if not folder.is_dir():
        return f" and no folder {folder}"
    names = [file.name for file in folder.iterdir() if file.suffix == path.suffix]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.0)
    return f"; {folder} holds {', '.join(near) if near else f'no {path.suffix} file'}"


def json_rows(path: str | os.PathLike, layout: str = "", arrays: bool = False) -> Iterator[Row]:
    """The rows of a file of JSON lines, one at a time: some files have gigabytes.

    Blank lines count and are no rows; a byte-order mark is skipped.

    Args:
        path: of the file, which is compressed by gzip if its name ends in ``.gz``.
        layout: what a row is, in words, for messages.
        arrays: the file may be one JSON array of rows, too.

    Raises:
        DataError: there is no such file, it has no row, or a line is not JSON in UTF-8, which the message names.
    """
    path, array, empty = existing(path), None, True
    lines = _raw_lines(path)
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.strip():
            continue
        if array is None:  # the first line that holds anything says what the file is
            array = arrays and text.lstrip().startswith(b"[")
            text += b"".join(lines) if array else b""
        place = str(path) if array else f"{path}, line {number}"
        value = _json(text, place, layout)
        empty &= array and not value
        if array:
            yield from (Row(f"{place}, row {i}", i, row) for i, row in enumerate(value, start=1))
        else:
            yield Row(place, number, value)
    if empty:
        raise DataError(f"{path} is empty{f': a row is {layout}' if layout else ''}")


def _raw_lines(path: Path) -> Iterator[bytes]:
    open_, kind = (gzip.open, "gzip") if path.name.endswith(".gz") else (open, "text")
    with reading(path, kind), open_(path, "rb") as file:
        yield from file


def _json(text: bytes, place: str, layout: str) -> Any:
    form = f". A row is {layout}" if layout else ""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: it is not in UTF-8 ({error}): save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: it is not JSON: {error}{form}: mend it, or leave the line out") from None


@contextlib.contextmanager
def reading(name: str | Path, kind: str, remedy: str = _AGAIN) -> Iterator[None]:
    """The guard around every library that reads data: its errors become a `DataError` with the file and a remedy.

    h5py, NumPy, zipfile, json and Minari raise errors of many types on a damaged file, and rarely say which file it is.

    Args:
        name: of the file.
        kind: what it should be, as in "cannot be read as HDF5".
        remedy: what may be wrong with it, and what to do.
    """
    try:
        yield
    except (DataError, ImportError):  # explained already
        raise
    except Exception as error:
        too_large = "it asks for more memory than there is, or " if isinstance(error, MemoryError) else ""
        raise DataError(f"{name} cannot be read as {kind} ({_reason(error)}): {too_large}{remedy}") from error


def _reason(error: Exception) -> str:
    """The error on one line, without the contents of the file that some libraries quote."""
    text = " ".join(str(error).split())
    short = text if len(text) <= 200 else f"{text[:200]} ..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__
