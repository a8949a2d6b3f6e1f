"""The inside of a sandbox: judges one program after another; standard library only.

A *zygote* forks two processes for every job, so that a job costs two forks and not an interpreter's start. One runs
the program and sees nothing else: not the tests, not the job, not what came before. The other, the *judge*, reads the
job, hands over the program's text, and executes the tests; to them the program's functions are stand-ins that put a
question and get data back (`rl.programs.wire`). The verdict is the judge's exit status. A program can therefore patch,
print and exit as it likes: all that reaches its tests are its answers, and they are compared where it is not.

The price is that arguments are copies, so that tests do not see what a program changed in place, and that tests cannot
hand over functions or objects of their own (`UNTESTABLE`); those of the program and of importable modules they can.
"""

from __future__ import annotations

import builtins
import enum
import functools
import gc
import importlib
import json
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from rl.programs import kernel, wire


class Verdict(enum.IntEnum):
    """What came of a program; a greater one came further."""

    COMPILE_ERROR = 0
    RUNTIME_ERROR = 1  # it raised, exited or crashed, or lacks what the tests ask for
    TIMEOUT = 2  # it, or its tests with its answers, took too long
    FAILED = 3  # it answered, and a test did not hold
    PASSED = 4


class Limits(NamedTuple):
    """What a program may use, and its tests again. Processor time is what counts, so that load decides no verdict;
    the deadline is for programs that wait.
    """

    seconds: int = 3  # of processor time
    deadline: float = 15.0  # seconds of real time
    memory: int = 512 * kernel.MIB  # bytes of address space
    output: int = 16 * kernel.MIB  # bytes of each answer, of each file and of the temporary folder


# What programs import all the time is loaded before the fork.
_COMMON = "bisect collections copy datetime functools heapq itertools math operator random re string typing"
READY = b"R"
GOES_ON, RETIRES = 0, 1  # whether the worker takes another job
_END = 1  # the judge's exit status for "there are no more jobs"
_FIRST_VERDICT = 64  # and for the first verdict
_RUN = 0  # the handle of what runs the program's text
UNTESTABLE = len(Verdict)  # in place of a verdict: the tests hand over what cannot reach the program


def main(isolation: str, limits: str) -> None:
    """Serve jobs, JSON objects of one line each on stdin, until stdin ends or `RETIRES` was said.

    A job has the program's ``text``, the text of its ``tests`` and the names that the tests take from the
    program, ``entry``. stdout carries `READY`, then two bytes for each job: a `Verdict` or `UNTESTABLE`, and whether
    this goes on.

    Args:
        isolation: ``namespaces``: enter them first. Otherwise whoever started this has seen to it.
        limits: `Limits` as a JSON array.
    """
    bounds = Limits(*json.loads(limits))
    confine = kernel.confinement(bounds.seconds, bounds.memory, bounds.output)
    if isolation == "namespaces":
        kernel.enter_namespaces(bounds.output)
    for name in _COMMON.split():
        importlib.import_module(name)
    for what in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(what, signal.SIG_DFL)  # a process that ignores them hands that on to what it starts
    sys.set_int_max_str_digits(0)
    null = os.open(os.devnull, os.O_RDWR)
    verdicts = os.dup(1)
    os.write(verdicts, READY)
    for standard in (1, 2):
        os.dup2(null, standard)
    gc.collect()
    gc.freeze()  # the garbage collector of a fork leaves the pages that it shares alone
    untouched = _times(".")
    while (verdict := _run_job(bounds, confine, verdicts)) is not None:
        # A program that left anything behind, if only a mode or a time, must not speak to the next one or hinder it:
        # that gets a new folder.
        state = GOES_ON if _times(".") == untouched else RETIRES
        os.write(verdicts, bytes([verdict, state]))
        if state == RETIRES:
            return


def _run_job(limits: Limits, confine: Callable[[], None], verdicts: int) -> int | None:
    """The verdict on the next job or `UNTESTABLE`, or None if there is none."""
    questions, answers = os.pipe(), os.pipe()

    def program() -> None:
        for descriptor in (questions[1], answers[0], verdicts):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)  # a descriptor's flags are everyone's who shares it
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        _run_program(confine, os.fdopen(questions[0], "rb"), os.fdopen(answers[1], "wb"))

    def judge() -> None:
        for descriptor in (questions[0], answers[1], verdicts):
            os.close(descriptor)
        streams = os.fdopen(0, "rb"), os.fdopen(questions[1], "wb"), os.fdopen(answers[0], "rb")
        _judge(limits, confine, *streams)

    processes = [_fork(program), _fork(judge)]
    for descriptor in (*questions, *answers):
        os.close(descriptor)
    _, judged = os.waitpid(processes[1], 0)
    os.kill(processes[0], signal.SIGKILL)
    _, ended, used = os.wait4(processes[0], 0)
    if os.waitstatus_to_exitcode(judged) == _END:
        return None
    return _verdict(judged, ended, used.ru_utime + used.ru_stime >= limits.seconds)


def _verdict(judged: int, ended: int, spent: bool) -> int:
    """What the judge found, unless time ran out.

    Args:
        judged: how the judge ended, as by ``waitpid``.
        ended: how the program ended.
        spent: whether the program had used up its processor time.
    """
    code = os.waitstatus_to_exitcode(judged)
    if code > _FIRST_VERDICT + Verdict.RUNTIME_ERROR or code == _FIRST_VERDICT + Verdict.COMPILE_ERROR:
        return code - _FIRST_VERDICT
    late = code == -signal.SIGALRM or -signal.SIGXCPU in (code, os.waitstatus_to_exitcode(ended))
    return Verdict.TIMEOUT if late or spent else Verdict.RUNTIME_ERROR


def _fork(body: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        kernel.die_with_parent()
        random.seed(0)
        body()
    finally:
        os._exit(_FIRST_VERDICT + Verdict.RUNTIME_ERROR)


def _times(folder: str) -> tuple[int, int]:
    """When it was last read, and when it, its mode or anything else about it changed; zeros if it is inaccessible."""
    try:
        status = os.stat(folder)
    except OSError:
        return 0, 0
    return status.st_atime_ns, status.st_ctime_ns


# ---- the judge ----------------------------------------------------------------------------------------------


class ProgramError(Exception):
    """The program raised, is gone, or did not answer in the way that was agreed."""


class HandOverError(BaseException):
    """The tests hand the program something that cannot be sent to it."""


class _Program:
    """The program, as its tests can reach it."""

    def __init__(self, questions: BinaryIO, answers: BinaryIO, limit: int):
        self._questions, self._answers, self._limit = questions, answers, limit
        self.error: ProgramError | None = None  # the last one raised
        self.is_gone = False  # or no longer to be understood

    def compiles(self, text: str) -> bool:
        """Hand over the text; it has not run when this returns."""
        self._put(text)
        return bool(self._get())

    def run(self) -> None:
        self.ask(Remote(self, _RUN))

    def builtin(self, name: str, *arguments: Any) -> Any:
        """As `ask`, for a function of Python, whatever the program calls by that name."""
        return self.ask(Remote(self, _handle(getattr(builtins, name))), *arguments)

    def ask(self, function: Remote, *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the program.

        Raises:
            ProgramError: it did not return, or not data that can be read; if it raised an exception of Python, this is
                one of that kind too.
            HandOverError: an argument is neither data, nor the program's, nor to be imported.
        """
        try:
            self._put((function, arguments, keywords))
            returned, value = self._get()
        except Exception as error:  # it wrote what it liked, or ended
            self.is_gone = True
            self.error = ProgramError(str(error))
            raise self.error from None
        if returned:
            return value
        self.error = _raised(value)
        raise self.error

    def _put(self, value: Any) -> None:
        self._questions.write(wire.dumps(value, _handle))
        self._questions.flush()

    def _get(self) -> Any:
        line = self._answers.readline(self._limit)
        return wire.loads(line, lambda handle: Remote(self, handle))


class Remote:
    """Stands for an object of the program; equal to nothing but itself."""

    def __init__(self, program: _Program, handle: int | str):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._program.ask(self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._program.builtin("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.builtin("setattr", self, name, value)

    def __bool__(self) -> bool:
        return bool(self._program.builtin("bool", self))

    def __len__(self) -> int:
        return self._program.builtin("len", self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.builtin("list", self))


def _handle(value: Any) -> int | str:
    """How the program finds what is not data."""
    found = object.__getattribute__(value, "_handle") if isinstance(value, Remote) else _importable(value)
    if found is None:
        raise HandOverError
    return found


def _importable(value: Any) -> str | None:
    """An expression for a function or type of an imported module; None for anything else."""
    owner = getattr(value, "__objclass__", value)  # of `str.upper`: str
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        same = functools.reduce(getattr, name.split("."), sys.modules[module]) is value
    except AttributeError:
        return None
    return f"__import__('importlib').import_module({module!r}).{name}" if same else None


def _raised(name: Any) -> ProgramError:
    """What stands for an exception of the program, so that tests that expect its kind catch it."""
    kind = vars(builtins).get(name) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return type(name, (ProgramError, kind), {})(name)
        except TypeError:  # a few want more arguments
            pass
    return ProgramError(name)


def _judge(
    limits: Limits, confine: Callable[[], None], jobs: BinaryIO, questions: BinaryIO, answers: BinaryIO
) -> None:
    """Read a job and end with its verdict as exit status; or be ended by the alarm."""
    line = jobs.readline()
    if not line:
        os._exit(_END)
    signal.setitimer(signal.ITIMER_REAL, limits.deadline)
    confine()
    job = json.loads(line)
    verdict = _test(_Program(questions, answers, limits.output), **job)
    os._exit(_FIRST_VERDICT + verdict)


def _test(program: _Program, *, text: str, tests: str, entry: list[str]) -> int:
    if not program.compiles(text):
        return Verdict.COMPILE_ERROR
    try:
        program.run()
        exec(tests, {"__name__": "tests", **{name: Remote(program, name) for name in entry}})
    except HandOverError:
        return UNTESTABLE
    except BaseException as error:
        return Verdict.RUNTIME_ERROR if error is program.error else Verdict.FAILED
    return Verdict.RUNTIME_ERROR if program.is_gone else Verdict.PASSED


# ---- the program --------------------------------------------------------------------------------------------


def _run_program(confine: Callable[[], None], questions: BinaryIO, answers: BinaryIO) -> None:
    """Compile the text that arrives, then do what is asked of it until no more is."""
    confine()
    module = types.ModuleType("program")
    sys.modules["program"] = module
    objects: list[Any] = []  # by handle

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def resolve(handle: int | str) -> Any:
        return objects[handle] if isinstance(handle, int) else eval(handle, module.__dict__)

    def answer(value: Any) -> None:
        answers.write(wire.dumps(value, refer))
        answers.flush()

    text = wire.loads(questions.readline(), resolve)
    try:
        code = compile(text, "<program>", "exec", dont_inherit=True)
    except Exception:  # besides SyntaxError: null bytes, nesting too deep, integers too long
        answer(False)
        return
    answer(True)
    assert refer(functools.partial(exec, code, module.__dict__)) == _RUN
    for line in questions:
        try:
            function, arguments, keywords = wire.loads(line, resolve)
            answer((True, function(*arguments, **keywords)))
        except BaseException as error:
            answer((False, type(error).__name__))
