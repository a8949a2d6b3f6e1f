"""The processes of one run: how they find each other, which one writes, and what they agree on."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# How launchers that `jax.distributed` can read say that they started several processes.
_PROCESS_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_JAX_COUNT, _JAX_COORDINATOR = "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"

_SIGNS, _DONE = "headway/alive/", "done"
_PERIOD = 5.0  # seconds between two signs of life
_LOSS = re.compile(
    "closed by peer|reset by peer|heartbeat|barrier|unhealthy|Gloo context init", re.IGNORECASE
)
REMEDY = (
    "JAX ends the other processes, too, perhaps with a long report. Then start the same command again on every host, "
    "which continues from the last checkpoint"
)
_VISIBLE = 10.0  # seconds after which a file of another host's is said to be invisible
SILENCE = 20.0  # seconds without one after which a process is said to be lost; JAX waits longer


def initialize() -> None:
    """Joins this process to the others of its run; does nothing where there is only one.

    Call it first, before anything asks JAX for a device. Found without help: TPU pods (every host runs the
    same command), ``srun`` and ``mpirun`` (one process per accelerator, unless ``JAX_LOCAL_DEVICE_IDS`` says
    otherwise). Anywhere else set ``JAX_COORDINATOR_ADDRESS`` (host:port of process 0),
    ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` for each process.

    Raises:
      ValueError: if only some of the three variables are set, or one is not a number.
    """
    if jax.distributed.is_initialized():
        return
    # It would take SIGTERM for itself, before `rl.train.stop_requests` listens.
    jax.config.update("jax_enable_preemption_service", False)
    address = os.environ.get(_JAX_COORDINATOR)
    if address:
        jax.distributed.initialize(address, _number(_JAX_COUNT), _number("JAX_PROCESS_ID"))
    elif any(_count(name) > 1 for name in _PROCESS_COUNTS):
        jax.distributed.initialize()
    elif "tpu" in (getattr(jax.config, "jax_platforms", None) or ""):  # JAX writes it where it finds TPUs
        with contextlib.suppress(ValueError):  # a TPU in no cluster, as in a notebook
            jax.distributed.initialize()
    if jax.distributed.is_initialized():
        _watch()
    elif not address and _count(_JAX_COUNT) > 1:
        raise ValueError(
            "JAX_NUM_PROCESSES is set and JAX_COORDINATOR_ADDRESS is not, so that each process would train by itself: "
            "set it to host:port of process 0, or unset JAX_NUM_PROCESSES to run a single one"
        )


def lost(
    heard: dict[str, tuple[str, float]], signs: Mapping[str, str], now: float, silence: float = SILENCE
) -> list[str]:
    """The processes whose sign of life has not changed for ``silence`` seconds.

    Of those that said that they end, three times as long: the first one draws when the others have nothing left to do.

    Args:
      heard: {process: (its last sign, when it changed)}, which is brought up to date.
      signs: {process: its sign now}.
      now: the time.
      silence: see above.
    """
    for process, sign in signs.items():
        if heard.get(process, ("", 0.0))[0] != sign:
            heard[process] = sign, now
    patience = {_DONE: 3 * silence}
    return [process for process, (sign, since) in heard.items() if now - since >= patience.get(sign, silence)]


def several() -> bool:
    """Whether this is one of several processes of a run."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def started() -> int:
    """How many processes the run has: those that have joined, or are to, as JAX_NUM_PROCESSES or a launcher says."""
    return max(jax.process_count(), *map(_count, (_JAX_COUNT, *_PROCESS_COUNTS)))


def forget_launcher() -> None:
    """Takes what a launcher says of other processes from the environment: this one trains by itself.

    The launcher started something else, such as the workers of a Ray cluster, whose tasks know nothing of each other.
    """
    for name in (_JAX_COUNT, _JAX_COORDINATOR, *_PROCESS_COUNTS):
        os.environ.pop(name, None)


def wait() -> None:
    """Until all processes of the run are here: one that ends while another still draws would be thought lost."""
    if several():
        multihost_utils.sync_global_devices("headway/end")


def is_loss(error: BaseException) -> bool:
    """Whether the error, of a step or a barrier, means that another process of this run has gone."""
    return several() and bool(_LOSS.search(str(error)))


def _watch() -> None:
    """Gives signs of life, and says on stderr which other process gives none any more.

    JAX ends a run that has lost a process with a dump of its stack, up to two minutes later. This is to be read first.
    """
    client = _store()
    if client is None:
        print(
            "note: this version of JAX hides the store by which processes of a run hear of one another: if one is "
            "lost, JAX alone says so, minutes later",
            file=sys.stderr,
        )
        return
    ended = threading.Event()
    atexit.register(ended.set)
    arguments = (client, str(jax.process_index()), ended, _say)
    threading.Thread(target=_listen, args=arguments, daemon=True).start()


def _store() -> Any:
    """JAX's store of keys, which has no public name; None where this version of JAX has none that works as here."""
    try:
        from jax._src import distributed

        client: Any = distributed.global_state.client
        client.key_value_set(f"{_SIGNS}{jax.process_index()}", "", allow_overwrite=True)
        client.key_value_dir_get(_SIGNS)
    except (ImportError, AttributeError, TypeError):
        return None
    return client


def _listen(client: Any, index: str, ended: threading.Event, say: Callable[[str], None]) -> None:
    """Until the store of keys is gone: then the first process has, or this one is at its end."""
    heard: dict[str, tuple[str, float]] = {}
    known: set[str] = set()
    for count in itertools.count():
        sign = _DONE if ended.is_set() else str(count)
        try:
            client.key_value_set(f"{_SIGNS}{index}", sign, allow_overwrite=True)
            signs = {name.rpartition("/")[2]: sign for name, sign in client.key_value_dir_get(_SIGNS)}
        except Exception:  # of the connection, by whatever name
            if not ended.is_set() and index != "0":
                say("0")
            return
        for process in set(lost(heard, signs, time.monotonic())) - known - {index}:
            known.add(process)
            say(process)
        time.sleep(_PERIOD)


def _say(process: str) -> None:
    print(
        f"process {process} of this run has ended or gives no sign of life: see its log. {REMEDY}",
        file=sys.stderr,
        flush=True,
    )


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdigit():
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS is set, so {variable} must be a number, not {value!r}: set it for every "
            "process, or unset JAX_COORDINATOR_ADDRESS to run a single one"
        )
    return int(value)


def _count(variable: str) -> int:
    """How many processes the variable says there are; 1 where it is not set."""
    value = os.environ.get(variable) or "1"
    if not value.isdigit():
        raise ValueError(f"{variable} must be a number of processes, not {value!r}")
    return int(value)


def is_main() -> bool:
    """True in the one process that writes logs and result files."""
    return jax.process_index() == 0


def any_process(value: bool) -> bool:
    """Whether it is so on any host, so that all leave after the same epoch; all must call it."""
    return bool(np.any(multihost_utils.process_allgather(np.asarray(value))))


def from_first_process(value: bool) -> bool:
    """What the first process says, where others may see something else in a shared folder; all must call it."""
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def blind_to_first(folder: Path) -> list[int]:
    """The processes that do not see in ``folder`` what the first one writes there; all must call it."""
    if not several():
        return []
    mark = folder / f".seen-{int(multihost_utils.broadcast_one_to_all(np.asarray(os.getpid())))}"
    try:
        if jax.process_index() == 0:
            mark.touch()
        multihost_utils.sync_global_devices("headway/marked")
        last = time.monotonic() + _VISIBLE
        while not mark.exists() and time.monotonic() < last:
            time.sleep(0.2)
        seen = multihost_utils.process_allgather(np.asarray(mark.exists()))
    finally:
        if jax.process_index() == 0:
            mark.unlink(missing_ok=True)
    others: list[int] = np.flatnonzero(~seen.reshape(-1)).tolist()
    return others


def unlike_first(value: Any) -> list[int]:
    """The processes whose ``value``, of JSON, is not that of the first; all must call it."""
    digest = zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode())
    digests = multihost_utils.process_allgather(np.uint32(digest))
    others: list[int] = np.flatnonzero(digests != digests.flat[0]).tolist()
    return others
