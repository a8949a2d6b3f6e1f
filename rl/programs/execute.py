"""The process of a program that is judged: runs its text, and answers what the tests ask; standard library only.

A *script*, a program that reads its input and prints, runs once, as a file does that is given to an interpreter; what
it printed is the answer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import operator
import os
import site
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn

from rl.programs import remote, threads, wire
from rl.programs.verdicts import Limits


def run(limits: Limits, confine: Callable[[], None], questions: BinaryIO, answers: BinaryIO) -> None:
    """Compile the text that arrives, then do what is asked of it until no more is."""
    text, imports, stdin = json.loads(questions.readline())
    if threads.wanted(text):
        threads.provide(stack=limits.memory // 4 if threads.deep(text) else 0)
    execute: Callable[..., None] = exec
    if stdin is None:
        name, printed = "program", _captured(limits.output // wire.EXPANSION)
    else:
        name, printed = "__main__", _standard_streams(stdin, limits.output)
        execute = functools.partial(_run_script, lambda: answer((True, None, [], printed())))
    confine()
    module = types.ModuleType(name)
    module.__file__ = "program.py"
    sys.modules[name] = module
    objects = _Objects()

    def resolve(handle: int | str) -> Any:
        return objects[handle] if isinstance(handle, int) else eval(handle, module.__dict__)

    def answer(value: Any, known: Mapping[int, int] | None = None) -> None:
        answers.write(wire.dumps(value, objects.refer, known=known))
        answers.flush()

    try:
        code = compile(text.removeprefix("\ufeff"), "<program>", "exec", dont_inherit=True)
    except Exception:  # besides SyntaxError: null bytes, nesting too deep, integers too long
        answer(False)
        return
    for statement in imports:
        with contextlib.suppress(ImportError):
            exec(statement, module.__dict__)
    answer(True)
    assert objects.refer(functools.partial(execute, code, module.__dict__))[0] == remote.RUN
    for line in questions:
        known: list[Any] = []
        try:
            function, arguments, keywords = wire.loads(line, resolve, trusted=True)
            known = wire.containers([arguments, keywords])
            before = [_items(each) for each in known]
            numbers = {id(each): number for number, each in enumerate(known)}
            try:
                reply = True, function(*arguments, **keywords)
            except BaseException as error:
                reply = False, _described(error)
            changes = [
                (number, wire.contents(each))
                for number, (each, old) in enumerate(zip(known, before, strict=True))
                if not _same(_items(each), old)
            ]
            answer((*reply, changes, printed()), numbers)
        except BaseException as error:  # of an answer that is no data, or in what was to be its description
            answer((False, (error, type(error), (), ""), (), ""))


class _Objects:
    """What the tests hold of the program that is not data, by handle."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}  # by ``id``

    def refer(self, value: Any) -> list[Any]:
        """A description of an object: its handle, the name of its type, the operations that it has, and None.

        Of a class of exceptions: its own name, and at the end another description, that of the program's class from
        which it derives; or the module and the name of the first of its bases, or itself, that is not the program's.
        """
        operations = [name for name in remote.OPERATIONS if _overrides(type(value), name)]
        if not isinstance(value, type) or not issubclass(value, BaseException):
            return [self._number(value), type(value).__name__, operations, None]
        base = value
        if value.__module__ == "program":
            base = next(each for each in value.__mro__[1:] if issubclass(each, BaseException))
        of_base = self.refer(base) if base.__module__ == "program" else [base.__module__, base.__name__]
        return [self._number(value), value.__name__, operations, of_base]

    def __getitem__(self, handle: int) -> Any:
        return self._objects[handle]

    def _number(self, value: Any) -> int:
        number = self._handles.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number


def _overrides(kind: type, name: str) -> bool:
    """Whether instances have an operation that not every object has, or another one."""
    methods = (vars(each)[name] for each in type.mro(kind)[:-1] if name in vars(each))
    return next(methods, None) is not None  # a class takes it away by None


class _Printed(io.BytesIO):
    """What a program prints; what is more than ``limit`` bytes is lost."""

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self.tell() < self._limit:
            super().write(data)
        return len(data)


def _items(container: Any) -> list[Any] | bytes:
    """What is in it: objects, or the bytes of an array's numbers."""
    if isinstance(container, dict):
        return [each for item in container.items() for each in item]
    return container.tobytes() if wire.is_array(container) else list(container)


def _same(one: list[Any] | bytes, other: list[Any] | bytes) -> bool:
    if isinstance(one, bytes):
        return one == other
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _described(error: BaseException) -> tuple[BaseException, type, Any, str]:
    error.__traceback__ = None  # nor all that was on the stack
    try:
        return error, type(error), error.args, str(error)
    except BaseException:
        return error, type(error), (), ""


def _captured(limit: int) -> Callable[[], str]:
    """Replaces stdout; what is returned says what was printed since it was last called."""
    output = _Printed(limit)
    sys.stdout = stdout = io.TextIOWrapper(output, "utf-8", "backslashreplace", write_through=True)

    def drain() -> str:
        try:
            stdout.flush()
            printed = output.getvalue().decode(errors="replace")
            output.seek(0)
            output.truncate()
        except ValueError:  # the program closed it
            return ""
        return printed

    return drain


def _standard_streams(stdin: str, limit: int) -> Callable[[], str]:
    """Gives the process the standard files that a script has: fast ones read and write them without `sys.stdin`.

    What is returned says what was printed.
    """
    for standard, content in enumerate((stdin.encode("utf-8", "surrogatepass"), b"")):
        file = os.memfd_create("")
        with open(file, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, standard)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout  # type: ignore[misc]
    sys.argv = ["program.py"]
    site.setquit()
    output = os.dup(1)

    def printed() -> str:
        return os.pread(output, limit, 0).decode(errors="replace")

    return printed


def _run_script(finish: Callable[[], None], code: types.CodeType, names: dict[str, Any]) -> None:
    """Runs it as a file is run, to what an interpreter does in the end; a status other than 0 is an error.

    Args:
      finish: says that it ended well, for a script that leaves the process by ``os._exit(0)``. Nobody waits for threads
        then, and what was not flushed is lost.
      code: of the script.
      names: of its module.
    """
    stdout, leave = sys.stdout, os._exit

    def left(status: int) -> NoReturn:
        if status == 0:
            finish()
        leave(status)

    os._exit = left
    try:
        exec(code, names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    for ending in reversed(getattr(threading, "_threading_atexits", ())):  # the threads of executors
        ending()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    _flush(sys.stdout, stdout)
    sys.stdout = stdout
    names.clear()  # which closes files that only the script's globals hold
    gc.collect()
    _flush(stdout)


def _flush(*streams: Any) -> None:
    for stream in streams:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
