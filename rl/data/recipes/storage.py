"""Files of the recipes: npz archives written piece by piece, whole or not at all, and their content digests."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rl.log import replacing


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` as an uncompressed npz at ``path``."""
    with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def is_whole(path: Path) -> bool:
    """Whether ``path`` is there and was written to its end."""
    return zipfile.is_zipfile(path)


def join(pieces: Sequence[Path], path: Path, names: Sequence[str], rows: int) -> str:
    """Concatenate the arrays ``names`` of the npz files ``pieces`` along axis 0 into the npz ``path``.

    One piece is in memory at a time. The bytes of the result depend on the arrays alone: entries carry no time
    and are not compressed (compression would save about a tenth, and differs between versions of zlib).

    Args:
      rows: what the pieces have together.

    Returns:
      SHA-256 over name, dtype, shape and bytes of each array, in the order of ``names``.
    """
    digest = hashlib.sha256()
    with replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name in names:
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                for number, piece in enumerate(pieces):
                    with np.load(piece) as arrays:
                        array = np.ascontiguousarray(arrays[name])
                    if number == 0:
                        shape = (rows, *array.shape[1:])
                        entry.write(_header(array.dtype, shape))
                        digest.update(f"{name} {array.dtype.str} {shape}".encode())
                    entry.write(array.data)
                    digest.update(array.data)
    return digest.hexdigest()


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    description = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, description)
    return stream.getvalue()
