"""Checkpoints: a run's state on disk, restored bit for bit, and parameters exported alone.

A checkpoint is the folder ``<folder>/<step>/``: the arrays as orbax writes them under ``arrays/``, and
``card.json``, which says whose they are (the caller's card), what they are (the name, dtype and shape of every
leaf) and what the files must be (size and CRC-32). The card is written last and the folder is renamed into place
after it, so that whatever kills the process, a checkpoint is either whole or known not to be. Orbax appears in
this file only; nothing here knows agents or the loop.

With several processes, all must call `save` and `restore`, and the folder must be on a file system they share.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rl.log import replacing

_CARD, _ARRAYS = "card.json", "arrays"
_KEYS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}  # what makes keys of a dtype
_LISTED = 8  # differences named in an error before the rest are counted
_REMEDY = "Choose another --workdir (folder=), or --overwrite (remove the folder) to start again."


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be used for this run; the message has the remedy."""

    differences: tuple[str, ...] = ()  # all of them, where the checkpoint is of another run


def save(
    folder: str | os.PathLike[str],
    step: int,
    tree: Any,
    card: Mapping[str, Any],
    *,
    notes: Any = None,
    keep: int = 2,
) -> None:
    """Writes ``<folder>/<step>/`` whole or not at all, then removes all but the newest ``keep`` up to it.

    Args:
        folder: the run's checkpoints; made if missing.
        step: updates done; a checkpoint of the same step is replaced.
        tree: any pytree of JAX arrays (typed keys included) and NumPy arrays.
        card: what identifies the run, as JSON: agent, config, head, dataset digest, seeds, versions.
        notes: JSON that goes with the arrays and has no fixed shape; `described` returns it.
        keep: how many checkpoints to leave, this one included.

    Raises:
        CheckpointError: the disk is full. What was written of this checkpoint is removed; the others stay.
        TypeError: a leaf is no array, or the card is not JSON.
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    folder = Path(folder).absolute()
    leaves = named(tree)
    record = {
        "step": int(step),
        "card": json.loads(json.dumps(card)),
        "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
        "notes": notes,
    }
    partial = folder / f"{step}.saving"
    try:
        with _removed_on_failure(partial):
            if jax.process_index() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                # One whose process was killed before it renamed it may be the only one.
                if _is_whole(partial):
                    _put_in_place(partial)
                shutil.rmtree(partial, ignore_errors=True)
            _wait_for_all(f"{partial} may be written")
            _write_arrays(partial / _ARRAYS, leaves)
            if jax.process_index() == 0:
                _seal(partial, record)
    except Exception as error:
        if _is_disk_full(error):
            raise CheckpointError(_disk_full(folder, step, leaves)) from error
        raise
    if jax.process_index() == 0:
        _put_in_place(partial)
        _prune(folder, step, keep)
        later = [number for number, path in _candidates(folder) if number > step]
        if later and _is_whole(folder / str(later[0])):
            warnings.warn(
                f"{folder} holds a checkpoint of step {later[0]}, too, which restore returns, and not this one of step "
                f"{step}: remove what is of an earlier training, or save each training in a folder of its own",
                stacklevel=2,
            )
    _wait_for_all(f"{partial} is in place")


def _remove(folder: Path) -> None:
    """Removes a folder in which Orbax's threads may write for a moment longer."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
        if not folder.exists():
            return


def restore(folder: str | os.PathLike[str], like: Any, card: Mapping[str, Any]) -> tuple[Any, int] | None:
    """The newest whole checkpoint, placed as ``like`` says; None where there is none.

    One that is half-written or damaged is skipped, with a warning that names it and what is used instead.

    Args:
        folder: as in `save`.
        like: a pytree of the structure, shapes and dtypes that were saved: arrays, or `jax.ShapeDtypeStruct`.
            Leaves with a sharding are restored onto it, however they were sharded when saved; those without
            go to the first local device. NumPy arrays come back as NumPy arrays.
        card: entries that must equal the saved ones. Only ``versions`` may differ, with a warning: then the run
            continues, but not necessarily bit for bit.

    Returns:
        (tree, step), or None.

    Raises:
        CheckpointError: the checkpoint is of another agent, card, structure, shape or dtype (the message lists
            the differences); or every checkpoint there is damaged; or processes see different ones.
    """
    wanted = named(like)
    newest = _newest(Path(folder).absolute())
    _agree(folder, -1 if newest is None else newest[1]["step"])
    if newest is None:
        return None
    path, record = newest
    _compare(path, record, wanted, json.loads(json.dumps(card)))
    arrays = _read_arrays(path / _ARRAYS, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted]), record["step"]


def check_card(folder: str | os.PathLike[str], card: Mapping[str, Any]) -> None:
    """Raises CheckpointError, as `restore` does, if the newest checkpoint is of another card; no arrays are read.

    One whose card is damaged is passed over, as there. All processes must call it.
    """
    records = ((path, _record(path)) for _, path in _candidates(Path(folder).absolute()))
    newest = next(((path, record) for path, record in records if not isinstance(record, str)), None)
    _agree(folder, -1 if newest is None else newest[1]["step"])
    if newest is not None:
        _refuse(newest[0], _other_card(newest[1], json.loads(json.dumps(card))))


def described(folder: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """What the checkpoint of ``step``, which is known to be whole, says of itself: its files are not read again.

    Raises:
        CheckpointError: it has been removed, or its card is damaged.
    """
    # In the order in which `_newest` takes them: what is being put in place goes before what it replaces.
    records = [_record(path) for number, path in _candidates(Path(folder)) if number == step]
    if not records:
        raise CheckpointError(
            f"{folder} has no checkpoint of step {step} any more: start the same command again"
        )
    record = next((record for record in records if not isinstance(record, str)), None)
    if record is None:
        raise CheckpointError(f"the checkpoint of step {step} in {folder} is {records[0]}. {_REMEDY}")
    return record


def steps(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """The steps of all checkpoints that were written to their end, the newest first; their files are not read."""
    return tuple(step for step, path in _candidates(Path(folder)) if (path / _CARD).exists())


def read(
    folder: str | os.PathLike[str], parts: tuple[str, ...] = ("",)
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What the newest whole checkpoint says of itself, and its arrays by their names ('state/params/critic/...').

    It may be of any run. The arrays are NumPy's, but for typed keys, which are JAX's on the first local device.

    Args:
        folder: of the checkpoints.
        parts: how the names of the arrays begin that are loaded; others, a replay of gigabytes say, take no memory.

    Raises:
        CheckpointError: every checkpoint there is damaged.
    """
    newest = _newest(Path(folder).absolute())
    if newest is None:
        return None
    path, record = newest
    like = {name: _parse(leaf) for name, leaf in record["leaves"].items() if name.startswith(parts)}
    return record, _read_arrays(path / _ARRAYS, like, partly=True)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each entry, by its name 'config.expectile', that only one card has or whose values differ."""
    saved, now = flat(saved), flat(now)

    def say(side: Mapping[str, Any], name: str) -> str:
        return repr(side[name]) if name in side else "nothing"

    names = [*saved, *(name for name in now if name not in saved)]
    return [
        f"{name}: {say(saved, name)} in the checkpoint, {say(now, name)} in this run"
        for name in names
        if say(saved, name) != say(now, name)
    ]


def flat(card: Any, prefix: str = "") -> dict[str, Any]:
    """Entries of nested dicts by their names: {'config.expectile': 0.9} of {'config': {'expectile': 0.9}}."""
    if not isinstance(card, dict):
        return {prefix.rstrip("."): card}
    return {name: value for key in card for name, value in flat(card[key], f"{prefix}{key}.").items()}


def export(path: str | os.PathLike[str], params: Any) -> None:
    """Writes parameters alone as one .npz that NumPy reads anywhere: names 'a/b/c', no pickles.

    bfloat16 and other types that NumPy has not are stored as float32, which holds them exactly.

    Raises:
        ValueError: a name contains '/', or ``params`` is a single array.
    """
    arrays: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = _name(keys)
        if name.count("/") != len(keys) - 1:
            raise ValueError(f"cannot export {name!r}: parameters need names, and no name may contain '/'")
        array = np.asarray(leaf)
        arrays[name] = array.astype(np.float32) if array.dtype.kind == "V" else array
    with replacing(path) as partial, open(partial, "wb") as file:
        np.savez(file, **arrays)


def load_params(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what `export` wrote, as nested dicts of NumPy arrays; tuples come back as dicts by index.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the file is damaged or holds pickles.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return nested({name: file[name] for name in file.files})
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(
            f"{path} is no parameter file, or is damaged ({error}): export it again"
        ) from error


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by their names 'a/b/c' as nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def named(tree: Any) -> dict[str, Any]:
    """{name: leaf} in the tree's own order, with names 'a/b/c'.

    Raises:
        TypeError: a leaf that is no array.
        ValueError: two leaves of one name.
    """
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(keys)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
            raise TypeError(
                f"checkpoint leaf {name!r} is {type(leaf).__name__}: make it a JAX or NumPy array"
            )
        if name in leaves:
            raise ValueError(f"two leaves of the checkpoint are named {name!r}")
        leaves[name] = leaf
    return leaves


def _name(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _parse(described: str) -> np.ndarray | jax.ShapeDtypeStruct:
    """An array of the dtype and shape that `_describe` wrote; of typed keys, which NumPy has not, their shape."""
    dtype, _, sizes = described.rstrip("]").partition("[")
    shape = tuple(int(size) for size in sizes.split(",") if size)
    if dtype in _KEYS:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=_KEYS[dtype]))
        return jax.ShapeDtypeStruct(shape, key.dtype)
    return np.zeros(shape, jnp.dtype(dtype))


def _write_arrays(path: Path, leaves: Mapping[str, Any]) -> None:
    from orbax.checkpoint import v1 as ocp

    ocp.save(path, {name: leaf for name, leaf in leaves.items() if leaf.size})


def _read_arrays(path: Path, wanted: Mapping[str, Any], *, partly: bool = False) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    abstract = {name: _abstract(leaf) for name, leaf in wanted.items()}
    # Orbax refuses arrays without elements: they are not in the files. And it reads no part that is empty.
    stored = {name: leaf for name, leaf in abstract.items() if leaf.size}
    options = ocp.Context()
    options.pytree.loading.partial_load = partly
    with options:
        arrays = ocp.load(path, stored) if stored else {}
    return {name: arrays[name] if leaf.size else _empty(leaf) for name, leaf in abstract.items()}


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _empty(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    """Removes ``partial`` if its writing fails, and hides what Orbax logs meanwhile.

    That is a traceback once per thread which saw the failure, or which finds its folder gone a moment later; the
    exception says it once.
    """
    logger = logging.getLogger("absl")

    def below_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger.addFilter(below_error)
    try:
        yield
    except BaseException:
        if jax.process_index() == 0:
            _remove(partial)
        raise
    finally:
        logger.removeFilter(below_error)


def _seal(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the card, once every file is on the disk itself; from here on the checkpoint is whole."""
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            files[file.relative_to(path).as_posix()] = _digest(file)
    with replacing(path / _CARD) as partial:
        partial.write_text(json.dumps({**record, "files": files}, indent=1))


def _digest(path: Path) -> list[int]:
    """[size, CRC-32] of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _put_in_place(partial: Path) -> None:
    """Renames ``STEP.saving`` to ``STEP``, in place of one that is there."""
    final = partial.with_suffix("")
    # Killed between these two, `partial` is the only one left: `_newest` takes it as it is.
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Leaves the newest ``keep`` up to ``step``; damaged ones and what interrupted saves left do not count, and go."""
    up_to = [path for number, path in _candidates(folder) if number <= step]
    kept: list[Path] = []
    for path in up_to:
        # The one that was saved just now need not be read again.
        if len(kept) < keep and path.suffix == "" and (path.name == str(step) or _is_whole(path)):
            kept.append(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything that is or was to become a checkpoint, the newest first."""
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"(\d+)(\.saving)?", path.name), path) for path in folder.iterdir()]
    numbered = [(int(match[1]), path) for match, path in matches if match]
    return sorted(numbered, key=lambda item: (item[0], item[1].suffix), reverse=True)


def _newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    skipped: list[tuple[Path, str]] = []
    for _, path in _candidates(folder):
        record = _inspect(path)
        if not isinstance(record, str):
            _warn_skipped(skipped, f"using {path} instead")
            return path, record
        skipped.append((path, record))
    if any(path.suffix == "" for path, _ in skipped):
        listed = "; ".join(f"{path} is {fault}" for path, fault in skipped)
        raise CheckpointError(f"no checkpoint is whole: {listed}. {_REMEDY}")
    _warn_skipped(skipped, "there is no earlier one, so the run starts from the beginning")
    return None


def _warn_skipped(skipped: list[tuple[Path, str]], instead: str) -> None:
    for path, fault in skipped:
        warnings.warn(f"checkpoint {path} is {fault}; {instead}", stacklevel=4)


def _record(path: Path) -> dict[str, Any] | str:
    """What the card of a checkpoint says, or what is wrong with it; the other files are not read."""
    try:
        record: dict[str, Any] = json.loads((path / _CARD).read_text())
    except (OSError, ValueError):
        return "half-written: it has no readable card.json"
    missing = {"step", "card", "leaves", "files"} - set(record if isinstance(record, dict) else ())
    if missing:
        return f"damaged: card.json lacks {', '.join(sorted(missing))}"
    return record


def _inspect(path: Path) -> dict[str, Any] | str:
    """The record of a whole checkpoint, or what is wrong with it."""
    record = _record(path)
    if isinstance(record, str):
        return record
    for name, (size, crc) in record["files"].items():
        file = path / name
        if not file.is_file():
            return f"damaged: {name} is missing"
        if file.stat().st_size != size:
            return f"damaged: {name} has {file.stat().st_size} of {size} bytes"
        if _digest(file) != [size, crc]:
            return f"damaged: the bytes of {name} have changed"
    return record


def _is_whole(path: Path) -> bool:
    """Whether there is a checkpoint in which nothing is damaged."""
    return not isinstance(_inspect(path), str)


def _compare(path: Path, record: Mapping[str, Any], wanted: Mapping[str, Any], card: dict[str, Any]) -> None:
    card = dict(card)
    now = card.pop("versions", None)
    saved = record["card"].get("versions")
    for name in ("cpu", "devices"):  # older cards do not say which processor it was, and how many devices
        if now and saved and name not in saved:
            now.pop(name, None)
    if saved is not None and now is not None and saved != now:
        changed = "; ".join(differences(saved, now))
        warnings.warn(
            f"{path} was saved with other versions, the last bits may differ: {changed}", stacklevel=3
        )
    wrong = _other_card(record, card) or differences(
        record["leaves"], {name: _describe(leaf) for name, leaf in wanted.items()}
    )
    _refuse(path, wrong)


def _other_card(record: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """`differences` between what a checkpoint's record has of a card, and that card."""
    return differences({name: record["card"].get(name) for name in card}, card)


def _refuse(path: Path, wrong: list[str]) -> None:
    """Raises CheckpointError if there are differences."""
    if wrong:
        more = len(wrong) - _LISTED
        listed = wrong[:_LISTED] + ([f"and {more} more"] if more > 0 else [])
        error = CheckpointError("\n  ".join([f"{path} is of another run:", *listed]) + f"\n{_REMEDY}")
        error.differences = tuple(wrong)
        raise error


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _agree(folder: str | os.PathLike[str], step: int) -> None:
    if jax.process_count() == 1:
        return
    steps = multihost_utils.process_allgather(np.int32(step)).tolist()
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"the processes see different checkpoints in {folder} (newest step of each, -1 for none: {steps}): "
            "--workdir must be on a file system that all hosts share"
        )


def _is_disk_full(error: BaseException) -> bool:
    # Orbax passes on tensorstore's errors, which are ValueErrors with the system's words in them.
    full = {errno.ENOSPC, errno.EDQUOT}
    return getattr(error, "errno", None) in full or any(os.strerror(code) in str(error) for code in full)


def _disk_full(folder: Path, step: int, leaves: Mapping[str, Any]) -> str:
    needed, free = sum(leaf.nbytes for leaf in leaves.values()), shutil.disk_usage(folder).free
    tenths = math.ceil(10 * needed / 2**20)  # rounded up, so that no checkpoint needs 0.0
    return (
        f"disk full: the checkpoint of step {step} needs up to {tenths / 10} MiB in {folder}, and "
        f"{free / 2**20:.1f} MiB are free. Earlier checkpoints are untouched: free some space and start the same "
        "command again, without --overwrite, which would remove them; it resumes from the newest."
    )
