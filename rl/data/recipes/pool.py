"""Chunks spread over worker processes, each a fresh interpreter that imports nothing but what simulating needs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from rl.data.recipes import worker

# A worker needs this package but not its parents, whose readers import JAX: a quarter of a second and 100 MB per
# process. They are put in place empty. (multiprocessing would import them, and the caller's main script as well.)
WORKER = """
import pathlib, sys, types
rl, folder, *sys.path = sys.argv[1:]
for name, path in {"rl": rl, "rl.data": f"{rl}/data"}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from rl.data.recipes import worker
worker.serve(pathlib.Path(folder))
"""


class Chunk(Protocol):
    """A piece of work for one process, kept as one file that does not depend on how many processes run.

    Each kind is a NamedTuple called ``Chunk`` in a module of its own, with fields that JSON can hold.
    """

    @property
    def total_rows(self) -> int:
        """What the progress bar counts."""

    def path(self, folder: Path) -> Path:
        """Where its file lies."""

    def make(self, folder: Path) -> None:
        """Simulate, and write the file whole or not at all."""


class WorkerError(Exception):
    """A worker could not make its chunk, or is gone."""


def run(todo: Sequence[Chunk], folder: Path, processes: int) -> Iterator[Chunk]:
    """Make each chunk of ``todo`` in ``folder`` and yield it when it is there, in any order.

    With one process, or one chunk, the calling process does the work.

    Raises:
      WorkerError: a worker could not make its chunk, or died.
    """
    if min(processes, len(todo)) > 1:
        yield from _run_in_workers(todo, folder, min(processes, len(todo)))
        return
    for chunk in todo:
        chunk.make(folder)
        yield chunk


def _run_in_workers(todo: Sequence[Chunk], folder: Path, processes: int) -> Iterator[Chunk]:
    waiting = iter(todo)
    workers = [_Worker.start(folder) for _ in range(processes)]
    try:
        with selectors.DefaultSelector() as busy:
            for one, chunk in zip(workers, waiting, strict=False):
                one.give(chunk)
                busy.register(one.answers, selectors.EVENT_READ, (one, chunk))
            while busy.get_map():
                for key, _ in busy.select():
                    one, chunk = key.data
                    one.check_answer()
                    following = next(waiting, None)
                    if following is None:
                        busy.unregister(one.answers)
                    else:
                        one.give(following)
                        busy.modify(one.answers, selectors.EVENT_READ, (one, following))
                    yield chunk
    finally:
        for one in workers:
            one.stop()


class _Worker(NamedTuple):
    """A process in `rl.data.recipes.worker.serve`."""

    process: subprocess.Popen[str]
    chunks: IO[str]
    answers: IO[str]

    @classmethod
    def start(cls, folder: Path) -> _Worker:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(Path(__file__).parents[2]), str(folder), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent; the process leads a group that can be killed whole
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # 6x6 systems need no pool of threads each
        )
        assert process.stdin is not None and process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    def stop(self) -> None:
        """End the process and its children, at any time: a chunk is written whole or not at all."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def give(self, chunk: Chunk) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died; `check_answer` will say so
            self.chunks.write(json.dumps([type(chunk).__module__, chunk]) + "\n")
            self.chunks.flush()

    def check_answer(self) -> None:
        answer = self.answers.readline().strip()
        if not answer:
            status = self.process.wait()
            raise WorkerError(f"A worker process died with status {status} (-9: for lack of memory?)")
        if answer != worker.DONE:
            raise WorkerError(answer)
