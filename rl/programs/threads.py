"""Threads for a process that may start none: some are started beforehand and wait; standard library only."""

from __future__ import annotations

import _thread
import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

COUNT = 8  # threads that a program may start in its life
_HINTS = ("thread", "concurrent", "executor", "multiprocessing.dummy")


def wanted(text: str) -> bool:
    """Whether a program's text mentions threads at all; most do not, and are spared the start of some."""
    return any(hint in text.lower() for hint in _HINTS)


def deep(text: str) -> bool:
    """Whether a program asks for larger stacks, as those do that recurse in a thread."""
    return "stack_size" in text


def provide(stack: int = 0) -> None:
    """Start threads, each of which waits for one function; from now on to start a thread is to wake one of them.

    Afterwards it is a RuntimeError to start more than `COUNT`, as it is where the system has no more.

    Args:
        stack: bytes of the stack of that which is woken first; 0: the usual ones. The others have the usual ones.
    """
    joinable = getattr(_thread, "start_joinable_thread", None)  # since Python 3.13
    waiting: list[tuple[queue.SimpleQueue, Any]] = []
    for number in range(COUNT):
        threading.stack_size(stack if number == COUNT - 1 else 0)
        tasks: queue.SimpleQueue = queue.SimpleQueue()
        serve = functools.partial(_serve, tasks)
        waiting.append((tasks, joinable(serve) if joinable else _thread.start_new_thread(serve, ())))

    threading.stack_size(0)

    def wake(function: Callable[[], Any]) -> Any:
        if not waiting:
            raise RuntimeError("can't start new thread")
        tasks, thread = waiting.pop()
        tasks.put(function)
        return thread

    def start(
        function: Callable[..., Any], arguments: tuple, keywords: Mapping[str, Any] | None = None
    ) -> int:
        thread = wake(functools.partial(function, *arguments, **(keywords or {})))
        return thread.ident if joinable else thread

    def start_joinable(function: Callable[[], Any], handle: Any = None, daemon: bool = True) -> Any:
        handle = _Handle() if handle is None else handle
        handle.thread = wake(function)
        return handle

    patched: dict[str, Any] = {"start_new_thread": start}
    if joinable:
        patched |= {"start_joinable_thread": start_joinable, "ThreadHandle": _Handle}
    for name, value in patched.items():
        setattr(threading, f"_{name}", value)
        setattr(_thread, f"_{name}" if name == "ThreadHandle" else name, value)


def _serve(tasks: queue.SimpleQueue) -> None:
    tasks.get()()


class _Handle:
    """What `threading.Thread` holds of its thread since Python 3.13."""

    thread: Any = None  # Python's handle, once a thread was woken

    @property
    def ident(self) -> int:
        return self.thread.ident

    def join(self, timeout: float | None = None) -> None:
        if self.thread is None:
            raise RuntimeError("thread not started")
        self.thread.join(timeout)

    def is_done(self) -> bool:
        return self.thread is not None and self.thread.is_done()

    def _set_done(self) -> None:
        if self.thread is not None:
            self.thread._set_done()
