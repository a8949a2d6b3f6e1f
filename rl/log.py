"""What a run leaves behind: metrics.jsonl, config.json, result.json, TensorBoard events, and a progress bar.

``metrics.jsonl`` is the record that plots and tables read; TensorBoard and Weights & Biases are copies of it, and a
run is complete without either. Nothing here knows agents, data or devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from rl.machine import usable_cores

METRICS, CONFIG, RESULT = "metrics.jsonl", "config.json", "result.json"
_WANDB_ID, _WANDB_STEP = "wandb_id.txt", "wandb_step.txt"
_PACKAGES = (
    *("headway", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "distrax", "numpy", "scipy"),
    *("mujoco", "gymnasium", "gymnasium-robotics", "ogbench", "minari"),
)
_TUNING = ("GLIBC_TUNABLES", "XLA_FLAGS")  # variables that change how fast a command is
_DIRTY = "-dirty"
_FLUSH = 5.0  # seconds until TensorBoard sees what was written
_REMEDY = "remove it, and run the same command again"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NOT_FINITE_NAMES = {str(value): name for name, value in _NOT_FINITE.items()}


class Run(NamedTuple):
    """An open run. On every process but the first, both functions do nothing."""

    write: Callable[[int, Mapping[str, Any]], None]  # (step, {name: number or [S] array, one entry per seed})
    result: Callable[[Mapping[str, Any]], None]  # see `result`


@contextlib.contextmanager
def open_run(
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    tensorboard: bool = True,
    wandb: bool = False,
    resume_step: int = 0,
    resume_lines: int | None = None,
    resumed: bool | None = None,
    variants: Sequence[str] = (),
) -> Iterator[Run]:
    """Opens the records of a run, to be closed on leaving the ``with`` block.

    ``write(step, metrics)`` appends one line to ``metrics.jsonl``, onto the disk itself; TensorBoard and wandb get the
    mean over seeds. A resumed run's file equals the uninterrupted one, provided that metrics hold no clock times and
    that everything of a step is written before the checkpoint of that step.

    Args:
        workdir: the run's folder; made if missing.
        config: everything that was chosen for this run; goes to ``config.json`` with the command, versions,
            commit, hardware and start time. A resumption is added to that file's ``resumed`` list.
        tensorboard: whether to write TensorBoard events into ``workdir``.
        wandb: whether to log to Weights & Biases, which reads its own environment (``WANDB_PROJECT``,
            ``WANDB_MODE``, ...).
        resume_step: the step that was restored. Lines of later steps are dropped; 0 starts the file again.
        resume_lines: how many lines had been written when that step was saved, if known. Lines beyond them are dropped,
            too: a line of that very step may have been written after it was saved.
        resumed: whether a run goes on; by default one that goes on from a later step than 0.
        variants: names of what was trained together, each an equal share of the seeds: TensorBoard and wandb get the
            mean of each as NAME/VARIANT.

    Raises:
        FileExistsError: ``workdir`` holds a finished run, and this one does not go on with it.
        ValueError: Weights & Biases refuses, most often because nobody is logged in.
    """
    import jax

    if jax.process_index() != 0:
        yield Run(write=lambda step, metrics: None, result=lambda values: None)
        return
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    resumed = bool(resume_step) if resumed is None else resumed
    if not resumed and (folder / RESULT).exists():
        raise FileExistsError(
            f"{folder} holds a finished run ({RESULT}): choose another --workdir, or --overwrite to start again"
        )
    with contextlib.ExitStack() as stack:
        copies = []
        if wandb:  # first: without a login, no run is begun here
            copies.append(stack.enter_context(_wandb(folder, config, resumed)))
        _record_config(folder, config, resume_step, resumed)
        drop_after(folder / METRICS, resume_step, resume_lines)
        file = stack.enter_context(open(folder / METRICS, "ab", buffering=0))
        if tensorboard:
            copies.append(stack.enter_context(_tensorboard(folder, resume_step)))

        def write(step: int, metrics: Mapping[str, Any]) -> None:
            values = {name: _numbers(name, value) for name, value in metrics.items()}
            _append(file, _to_json({"step": int(step), **values}).encode() + b"\n")
            # As checkpoints are, which count the lines: a power cut takes none of them.
            os.fsync(file.fileno())
            for copy in copies:
                copy(int(step), _means(values, variants))

        yield Run(write=write, result=lambda values: result(folder, values))


def read(workdir: str | os.PathLike[str], up_to: float = math.inf) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl``: one dict per line, with ``step``; numbers, or a list with one entry per seed.

    A last line that was cut short (the process was killed) is left out. So is what came after the step ``up_to``: a
    finished run that was trained further, and killed, leaves lines beyond its own end.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: another line is damaged; the message names it.
    """
    return [row for _, row in _rows(Path(workdir) / METRICS) if row["step"] <= up_to]


def series(
    workdir: str | os.PathLike[str], name: str, up_to: float = math.inf
) -> tuple[np.ndarray, np.ndarray]:
    """One metric of a run over time: steps [T] and values [T, S], S = 1 where it was logged as a plain number.

    Those of later steps than ``up_to`` are left out, as by `read`.

    Raises:
        KeyError: no line has the metric; the message lists those there are.
    """
    rows = read(workdir, up_to)
    points = [(row["step"], np.atleast_1d(np.asarray(row[name], float))) for row in rows if name in row]
    if not points:
        known = sorted({key for row in rows for key in row} - {"step"})
        raise KeyError(
            f"{Path(workdir) / METRICS} has no metric {name!r}; it has: {', '.join(known) or 'none'}"
        )
    steps, values = zip(*points, strict=True)
    return np.asarray(steps), np.stack(values)


def result(workdir: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Writes ``result.json``, whole or not at all."""
    write_json(Path(workdir) / RESULT, values)


def provenance() -> dict[str, Any]:
    """What a number must have beside it: the command, the commit, versions and hardware."""
    return {
        "command": _command(),
        "commit": loaded_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def commit() -> str | None:
    """The commit of this code, with '-dirty' where files differ from it; None where it is not known.

    It is known in a git checkout, and where pip installed the package from a repository (``git+https://...``).
    A module that is loaded and that git does not track is such a file. Files under ``results`` do not count: a study
    writes its own there, row by row.
    """
    return _commit_of(_checkout())


def loaded_commit() -> str | None:
    """`commit` as files were at the first call: scripts ask as they start, before their files can change.

    Modules count that have been loaded since.
    """
    return _commit_of(_first_checkout())


class _Checkout(NamedTuple):
    commit: str  # with '-dirty' where tracked files differ from it
    untracked: frozenset[str]  # Python files that git neither tracks nor ignores


def _commit_of(checkout: _Checkout | None) -> str | None:
    """The commit, and '-dirty' if code of none has been loaded."""
    if checkout is None or checkout.commit.endswith(_DIRTY):
        return checkout and checkout.commit
    files = [vars(module).get("__file__") for module in _loaded_modules()] if checkout.untracked else []
    loaded = {os.path.realpath(file) for file in files if isinstance(file, str)}
    return checkout.commit + _DIRTY * bool(loaded & checkout.untracked)


def _loaded_modules() -> list[types.ModuleType]:
    """Those that can be asked for their file: packages put objects of their own there, too."""
    return [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]


def _checkout() -> _Checkout | None:
    here = Path(__file__).parent
    if not _git(here, "ls-files", "--error-unmatch", Path(__file__).name):
        return _installed()
    head, top = _git(here, "rev-parse", "HEAD"), _git(here, "rev-parse", "--show-toplevel")
    code = ("--untracked-files=no", "--", ":(top)", ":(top,exclude)results")
    changed = _git(here, "--no-optional-locks", "status", "--porcelain", *code)
    if head is None or top is None or changed is None:
        return None
    # Of an environment in the clone that git does not ignore.
    installed = ":(exclude,glob)**/site-packages/**"
    others = _git(Path(top), "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py", installed)
    untracked = frozenset(os.path.realpath(Path(top, name)) for name in (others or "").split("\0") if name)
    return _Checkout(head + _DIRTY * bool(changed), untracked)


def _installed() -> _Checkout | None:
    """As pip wrote it down (PEP 610), if this code is what it installed."""
    try:
        distribution = importlib.metadata.distribution("headway")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(distribution.locate_file("rl/log.py"))).resolve() != Path(__file__).resolve():
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id")
    return _Checkout(commit, frozenset()) if commit else None


_first_checkout = functools.cache(_checkout)


def versions() -> dict[str, str]:
    """Versions of Python and of every package that can change a number; packages not installed are left out."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def hardware() -> dict[str, Any]:
    """The machine: processor, usable cores, memory, and what JAX runs on (starts JAX's backend)."""
    import jax

    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def progress(
    total: int | None,
    desc: str,
    *,
    over: Iterable[Any] | None = None,
    unit: str = "it",
    initial: int = 0,
    delay: float = 0.0,
    leave: bool = True,
    show: bool = True,
) -> Any:
    """A tqdm bar on stderr with rate and ETA; call ``update(n)``, and ``close()`` or use it in a ``with`` block.

    Where stderr is no terminal, or in continuous integration, it prints one line at most every 10 seconds. On
    every process but the first it shows nothing, and nowhere before ``delay`` seconds.

    Args:
        total: how many there are; None where that is not known.
        desc: what is done.
        over: what to iterate over instead, by ``for item in progress(..., over=items)``, without any ``update``.
        unit: of what is counted.
        initial: how many were there before.
        delay: seconds before it shows.
        leave: the bar stays on the screen when all is done.
        show: False: it shows nothing at all.
    """
    import jax
    from tqdm import tqdm

    live = sys.stderr.isatty() and not os.environ.get("CI")
    return tqdm(
        over,
        total=total,
        desc=desc,
        unit=unit,
        initial=initial,
        delay=delay,
        leave=leave,
        file=sys.stderr if live else _Lines(),
        # Asked in this order, since the second question starts JAX's backend, which readers of data do without.
        disable=not show or (jax.distributed.is_initialized() and jax.process_index() != 0),
        dynamic_ncols=live,
        mininterval=0.2 if live else 10.0,
        miniters=1,
        unit_scale=True,
    )


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary name beside ``path``; what is written there takes the place of ``path`` at the end.

    No other process has that name, on any machine that shares the folder. If the block fails, the temporary file is
    removed and ``path`` is as it was; what the system says, of a disk that is full say, names ``path``.
    """
    path = Path(path)
    partial = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class _Lines:
    """A stream for tqdm that turns each redrawn bar into a line of its own."""

    def write(self, text: str) -> None:
        if text := text.strip():
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def is_config(path: Path) -> bool:
    """Whether the file is a ``config.json`` as `open_run` writes it."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "config" in values and isinstance(values.get("resumed"), list)


def _record_config(folder: Path, config: Mapping[str, Any], resume_step: int, resumed: bool) -> None:
    now = {
        **provenance(),
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "config": config,
    }
    path = folder / CONFIG
    if not resumed or not path.exists():
        write_json(path, now | {"resumed": []})
        return
    first = read_json(path)
    if not isinstance(first.get("resumed"), list):
        raise ValueError(f"{path} is damaged (it has no list 'resumed'): {_REMEDY}")
    first["resumed"].append({"step": resume_step, **now})
    write_json(path, first)


def _means(values: Mapping[str, np.ndarray], variants: Sequence[str]) -> dict[str, float]:
    """The mean of every metric over seeds, apart for each variant that it has a share of."""
    means = {}
    for name, value in values.items():
        apart = variants if value.ndim and variants else [""]
        for variant, part in zip(apart, np.split(np.atleast_1d(value), len(apart)), strict=True):
            means[f"{name}/{variant}" if variant else name] = float(np.mean(part))
    return means


def drop_after(path: Path, step: int, most: int | None = None) -> None:
    """Keeps the lines up to ``step``, or none for step 0, so that a resumed run does not write them twice.

    Of these the first ``most``, if it is given.
    """
    if not path.exists():
        return
    lines = b"".join([line for line, row in _rows(path) if 0 < step >= row["step"]][:most])
    with replacing(path) as partial:
        partial.write_bytes(lines)


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows, each with its ``step``, to a file of JSON lines that a resumed run cuts by `drop_after`."""
    with open(path, "ab", buffering=0) as file:
        _append(file, b"".join(_to_json(row).encode() + b"\n" for row in rows))


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields (line, parsed line); a last line without its newline was cut short and is left out."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            row = {key: _from_json(value) for key, value in json.loads(line).items()}
            row["step"] = int(row["step"])
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged (not a JSON object with a step): remove it to read the rest"
            ) from error
        yield line, row


def _append(file: BinaryIO, line: bytes) -> None:
    """Appends a whole line or nothing: a line cut short would swallow the next one."""
    end = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        file.truncate(end)
        message = f"{error.strerror}; earlier lines are intact: free some space and resume the run"
        raise OSError(error.errno, message, file.name) from error


@contextlib.contextmanager
def _tensorboard(folder: Path, resume_step: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yields what writes scalars as events, and gives up with a warning where that fails.

    Not by ``SummaryWriter``: a disk that is full for a moment ends its thread, and then its queue blocks the run.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar

    writer = EventsWriter(str(folder / "events"))
    flushed, failed = -math.inf, False

    def record(events: Iterable[Event], flush_every: float = _FLUSH) -> None:
        nonlocal flushed, failed
        try:
            if not failed:
                for event in events:
                    event.wall_time = time.time()
                    writer.write_event(event)
                if time.monotonic() >= flushed + flush_every:
                    writer.flush()
                    flushed = time.monotonic()
        except OSError as error:  # a part of a record may be written, after which TensorBoard reads nothing
            failed = True
            warnings.warn(
                f"no more events for TensorBoard are written to {folder}: {error.strerror}. {METRICS} has everything",
                stacklevel=2,
            )

    def write(step: int, scalars: Mapping[str, float]) -> None:
        # Of numbers that are not finite it warns at every step, and shows a gap either way.
        finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
        record(Event(step=step, summary=scalar(name, value)) for name, value in finite.items())

    if resume_step:  # TensorBoard forgets what the interrupted run wrote beyond its last checkpoint
        record([Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))])
    try:
        yield write
    finally:
        record([], flush_every=0.0)
        with contextlib.suppress(OSError):
            writer.close()


def wandb_files(workdir: Path) -> list[Path]:
    """What `open_run` has left of Weights & Biases in a run's folder; nothing where it has not logged there.

    The file by which that is known is the last.
    """
    if not (workdir / _WANDB_ID).exists():
        return []
    return [path for name in ("wandb", _WANDB_STEP, _WANDB_ID) if (path := workdir / name).exists()]


def check_wandb() -> None:
    """Raises, as `open_run` would, if Weights & Biases is not installed or nobody is logged in."""
    with _wandb_package() as wandb:
        wandb.login()


@contextlib.contextmanager
def _wandb_package() -> Iterator[Any]:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "logging to Weights & Biases needs: pip install -e '.[track]' (in the clone)"
        ) from error
    try:
        yield wandb
    except wandb.Error as error:
        reason = str(error).partition("\n")[0].removesuffix(".")
        raise ValueError(f"--wandb: {reason}; run `wandb login`, or set WANDB_MODE=offline") from error


@contextlib.contextmanager
def _wandb(
    folder: Path, config: Mapping[str, Any], resumed: bool
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    saved_id = folder / _WANDB_ID
    known = saved_id.read_text() if resumed and saved_id.exists() else None
    with _wandb_package() as wandb:
        run = wandb.init(
            dir=str(folder),
            name=folder.name,
            config=_plain(config),
            id=known,
            resume="allow",
        )
    saved_id.write_text(run.id)
    # wandb's own step may only grow, a resumed run's goes back: it is logged as a value and used as the x axis.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    # What a run logged beyond the checkpoint that it goes on from stays there: those steps are not logged again.
    logged = folder / _WANDB_STEP
    last = int(logged.read_text()) if known and logged.exists() else -1

    def write(step: int, scalars: Mapping[str, float]) -> None:
        if step > last:
            run.log({"step": step, **scalars})
            with replacing(logged) as partial:
                partial.write_text(str(step))

    try:
        yield write
    except BaseException:
        run.finish(exit_code=1)  # shown as failed
        raise
    run.finish()


def _numbers(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if name == "step":
        raise ValueError("a metric cannot be named 'step': the line's own step has that name")
    if array.dtype.kind in "biu":
        return array
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} must be a number or an array of numbers, got {value!r}") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all; NaN and infinities as `read` understands them."""
    with replacing(path) as partial:
        partial.write_text(_to_json(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote, NaN and infinities as numbers again.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {_REMEDY}") from error
    return _from_json(values)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """What JSON can hold. NaN and infinities, which JSON has not, become the strings that `read` turns back."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE_NAMES[str(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return _plain(value.tolist())
    return str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _command() -> str:
    """The command line as typed, with ``python`` for the interpreter, wherever it lies, and what tunes it before it."""
    tuned = [f"{name}={shlex.quote(os.environ[name])}" for name in _TUNING if os.environ.get(name)]
    return " ".join([*tuned, shlex.join(["python", *sys.orig_argv[1:]])])


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            errors="surrogateescape",  # names of files are bytes
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
