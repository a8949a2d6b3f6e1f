"""The inside of a sandbox: judges one program after another; standard library only.

A *zygote* forks two processes for every job, so that a job costs two forks and not an interpreter's start. One runs
the program and sees nothing else: not the tests, not the job, not what came before. The other, the *judge*, reads the
job, hands over the program's text, and executes the tests; to them the program's functions are stand-ins that put a
question and get data back (`rl.programs.wire`). The verdict is the judge's exit status. A program can therefore patch,
print and exit as it likes: all that reaches its tests are its answers, and they are compared where it is not.

What a call changed in its arguments and what it printed come back with its answer, and objects of the program can be
used as if they were here (`Remote`), with one exception: how they compare with the tests' own data is theirs to say
only where the problem asks for a class, because an object can be equal to everything. That is so of operators and of
their methods. Any other method says what the program likes: ``assert f(3).startswith("a")`` holds of an object whose
method says so, and only a test that compares what is answered, such as ``f(3)[:1] == "a"``, tells it from a text.
Tests cannot hand over functions or objects of their own (`UNTESTABLE`); those of the program and of importable modules
they can.

A *script*, a program that reads its input and prints, runs once for each input, as a file does that is given to an
interpreter; what it printed is the answer, and `MATCHES` says whether it is the expected one.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import functools
import gc
import importlib
import io
import itertools
import json
import math
import operator
import os
import random
import signal
import site
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, BinaryIO, NamedTuple, NoReturn

from rl.programs import kernel, threads, wire


class Verdict(enum.IntEnum):
    """What came of a program; a greater one came further."""

    COMPILE_ERROR = 0
    RUNTIME_ERROR = 1  # it raised, exited or crashed, or lacks what the tests ask for
    TIMEOUT = 2  # it, or its tests with its answers, took too long
    FAILED = 3  # it answered, and a test did not hold
    PASSED = 4


class Limits(NamedTuple):
    """What a program may use, and its tests again.

    Processor time is what counts, because a busy machine takes more real time for the same. The deadline is for
    programs that wait: each time it has passed, program and tests together must have used a fifth of ``seconds`` since
    the last time. By default, load decides no verdict unless it leaves a program less than a 25th of a core.
    """

    seconds: int = 3  # of processor time
    deadline: float = 15.0  # seconds of real time
    memory: int = 512 * kernel.MIB  # bytes of address space
    output: int = (
        16 * kernel.MIB
    )  # bytes of each answer, of what is printed, of each file and of the temporary folder

    @property
    def longest(self) -> float:
        """Seconds of real time after which a judge is done, as it and the program end a second beyond their own."""
        return self.deadline * (1 + 2 * _SHARES * (1 + 1 / self.seconds))


_SHARES = 5  # parts of the processor time, one of which is used before each deadline

# What programs import all the time is loaded before the fork.
_COMMON = "bisect collections copy datetime functools heapq itertools math operator random re string typing"
READY = b"R"
GOES_ON, RETIRES = 0, 1  # whether the worker takes another job
_END = 1  # the judge's exit status for "there are no more jobs"
_FIRST_VERDICT = 64  # and for the first verdict
_EXPANSION = 8  # more than a character grows as JSON, which writes six for a control character
_RUN = 0  # the handle of what runs the program's text
UNTESTABLE = len(Verdict)  # in place of a verdict: the tests hand over what cannot reach the program


def main(isolation: str, limits: str, packages: str) -> None:
    """Serve jobs, JSON objects of one line each on stdin, until stdin ends or `RETIRES` was said.

    A job has the program's ``text`` and statements to execute before it, ``imports``, the text of its ``tests``, the
    names that the tests take from the program, ``entry``, and whether its objects decide how they compare, ``decides``
    (`Remote`). Of a script it has instead of the last three its input, ``stdin``, the ``expected`` output and one of
    `MATCHES`, ``match``. stdout carries `READY`, then two bytes for each job: a `Verdict` or `UNTESTABLE`, and whether
    this goes on.

    Args:
        isolation: ``namespaces``: enter them first. Otherwise whoever started this has seen to it.
        limits: `Limits` as a JSON array.
        packages: the folder of `kernel.PACKAGES`; empty: none are there.
    """
    bounds = Limits(*json.loads(limits))
    confine = kernel.confinement(bounds.seconds, bounds.memory, bounds.output)
    if isolation == "namespaces":
        packages = kernel.enter_namespaces(bounds.output, packages)
    if packages:
        sys.meta_path.append(_Packages(packages))
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
    os.close(null)  # or every program would have it, with the flags that the last one gave it
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


class _Packages:
    """Finds `kernel.PACKAGES` in a folder, and nothing that lies beside them."""

    def __init__(self, folder: str):
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return (
            PathFinder.find_spec(name, [self._folder]) if path is None and name in kernel.PACKAGES else None
        )


def _run_job(limits: Limits, confine: Callable[[], None], verdicts: int) -> int | None:
    """The verdict on the next job or `UNTESTABLE`, or None if there is none."""
    questions, answers = os.pipe(), os.pipe()

    def program() -> None:
        for descriptor in (questions[1], answers[0], verdicts):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)  # a descriptor's flags are everyone's who shares it
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)
        random.seed(0)
        streams = os.fdopen(questions[0], "rb"), os.fdopen(answers[1], "wb")
        _run_program(limits, confine, *streams)

    def judge() -> None:
        for descriptor in (questions[0], answers[1], verdicts):
            os.close(descriptor)
        streams = os.fdopen(0, "rb"), os.fdopen(questions[1], "wb"), os.fdopen(answers[0], "rb")
        _judge(limits, confine, running, *streams)

    running = _fork(program)
    judging = _fork(judge)
    for descriptor in (*questions, *answers):
        os.close(descriptor)
    _, judged = os.waitpid(judging, 0)
    os.kill(running, signal.SIGKILL)
    _, ended, used = os.wait4(running, 0)
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
    late = -signal.SIGXCPU in (code, os.waitstatus_to_exitcode(ended))
    return Verdict.TIMEOUT if late or spent else Verdict.RUNTIME_ERROR


def _fork(body: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        kernel.die_with_parent()
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

    _remote: Remote | None = None  # the exception itself, where it is
    _text: str | None = None
    _ends = False  # whether it says that an iterator has no more items

    def __str__(self) -> str:
        return super().__str__() if self._text is None else self._text

    def __getattr__(self, name: str) -> Any:
        if self._remote is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._remote, name)


class HandOverError(BaseException):
    """The tests hand the program something that cannot be sent to it."""


class _Program:
    """The program, as its tests can reach it.

    Args:
        questions: to it.
        answers: from it.
        limit: bytes of the longest answer.
        decides: whether its objects say how they compare with the tests' data (`Remote`).
    """

    def __init__(self, questions: BinaryIO, answers: BinaryIO, limit: int, decides: bool):
        self._questions, self._answers, self._limit = questions, answers, limit
        self._stand_ins: dict[int, Any] = {}  # by handle
        self._entries: list[Any] = []  # what the tests asked for by name
        self.decides = decides
        self.error: ProgramError | None = None  # the last one raised
        self.is_gone = False  # or no longer to be understood

    def compiles(self, text: str, imports: list[str], stdin: str | None = None) -> bool:
        """Hand over the text and what a script is to read; it has not run when this returns."""
        self._put([text, imports, stdin])
        return bool(self._get())

    def run(self) -> None:
        self.ask(Remote(self, _RUN))

    def take(self, name: str) -> Any:
        """What the program calls by this name; if nothing, what fails as soon as it is used."""
        try:
            entry = self.ask(Remote(self, f"(lambda: {name})"))
        except ProgramError:
            entry = _remote_class(name, _EXPECTED)(self, name)
        self._entries.append(entry)
        return entry

    def ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the program, or there one that can be imported.

        Containers among the arguments are changed here as the call changed them there.

        Raises:
            ProgramError: it did not return, or not data that can be read; if it raised an exception of Python, this is
                one of that kind too.
            HandOverError: an argument is neither data, nor the program's, nor to be imported, and the program was asked
                for what is called. That it answers with an object where others answer with data is its own failure.
        """
        if self.is_gone:
            raise ProgramError("it is gone")
        try:
            known = wire.containers([arguments, keywords])
            try:
                self._put((function, arguments, keywords))
            except HandOverError:
                if self.decides or any(function is entry for entry in self._entries):
                    raise
                raise ProgramError("it answered with an object, which cannot be given this") from None
            returned, value, changes, printed = self._get(known)
            for number, items in changes:
                wire.refill(known[number], items)
            sys.stdout.write(printed)
            self.error = None if returned else _failure(*value)
        except Exception as error:  # it wrote what it liked, or ended, or is given what cannot reach it
            self.is_gone = True
            self.error = ProgramError(str(error))
            raise self.error from None
        if self.error:
            raise self.error
        return value

    def _put(self, value: Any) -> None:
        self._questions.write(wire.dumps(value, _handle, remote=Remote))
        self._questions.flush()

    def _get(self, known: Sequence[Any] = ()) -> Any:
        return wire.loads(self._answers.readline(self._limit), self._stand_in, known)

    def _stand_in(self, description: Any) -> Any:
        """For an object of the program: always the same, so that tests can tell by ``is``.

        Raises:
            Exception: of any kind, for a description that the program's side does not give of an object.
        """
        handle, name, operations, base = description
        if type(handle) is not int:
            raise TypeError(f"handles are integers, not {handle!r}")
        if handle not in self._stand_ins:
            remote = _remote_class(name, tuple(operations))(self, handle)
            self._stand_ins[handle] = remote if base is None else self._exception_class(remote, name, base)
        return self._stand_ins[handle]

    def _exception_class(self, remote: Remote, name: str, base: Any) -> type:
        """For a class of exceptions, so that tests can catch them: itself a class."""
        kind = _importable_exception(*base) if isinstance(base[0], str) else self._stand_in(base)
        return type(name, (_program_error(kind),), {"_remote": remote})


class Remote:
    """Stands for an object of the program; has those of `_OPERATIONS` that the object has (`_remote_class`).

    Everything that is done with it is asked of the program, but for one thing: how it compares with the tests' data. An
    object may be equal to everything, or 0 when something is taken from it. So it is compared with the tests' data, or
    reckons with them, only where the problem asks for a class of the program (``decides``), which is to say how
    its instances compare; elsewhere only with other objects of the program, and by operators, not by their methods'
    names. Its other methods are the program's, whatever they are given.
    """

    def __init__(self, program: _Program, handle: int | str):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_handle", handle)

    def __getattribute__(self, name: str) -> Any:
        # An operator looks into the type. By name, what is there may answer NotImplemented, which is true.
        if name in _BINARY:
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        # NumPy asks for these, and would take an address in memory from the program.
        if name.startswith("__array"):
            raise AttributeError(name)
        if (name in _BINARY or name == "__contains__") and not self._program.decides:
            raise AttributeError(name)
        return self._program.ask(getattr, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask(setattr, self, name, value)

    def __delattr__(self, name: str) -> None:
        self._program.ask(delattr, self, name)


def _call(remote: Remote, *arguments: Any, **keywords: Any) -> Any:
    return remote._program.ask(remote, *arguments, **keywords)


def _next(remote: Remote) -> Any:
    try:
        return remote._program.ask(next, remote)
    except ProgramError as error:
        if error._ends:
            raise StopIteration(*error.args) from None
        raise


def _contains(remote: Remote, item: Any) -> bool:
    if remote._program.decides or isinstance(item, Remote):
        return remote._program.ask(operator.contains, remote, item)
    return any(item is other or item == other for other in iter(remote))


def _await(remote: Remote) -> Generator[Any, Any, Any]:
    yield from ()
    return _finished(remote)


def _send(remote: Remote, _: Any) -> Any:
    raise StopIteration(_finished(remote))


def _finished(coroutine: Remote) -> Any:
    """What a coroutine of the program returns; it runs there, at once and to its end."""
    import asyncio  # here, because few programs want it and it is slow to load

    return coroutine._program.ask(asyncio.run, coroutine)


def _exit(remote: Remote, *_: Any) -> Any:
    return Remote.__getattr__(remote, "__exit__")(None, None, None)


def _unary(function: Any) -> Callable[..., Any]:
    return lambda remote, *arguments: remote._program.ask(function, remote, *arguments)


def _binary(function: Any, swap: bool = False) -> Callable[..., Any]:
    def method(remote: Remote, other: Any) -> Any:
        if not (remote._program.decides or isinstance(other, Remote)):
            return NotImplemented
        return remote._program.ask(function, *((other, remote) if swap else (remote, other)))

    return method


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BITWISE = ("lshift", "rshift", "and", "or", "xor")
_BINARY: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _binary(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "__divmod__": _binary(divmod),
    "__rdivmod__": _binary(divmod, swap=True),
}
for _name in _ARITHMETIC + _BITWISE:
    _function = getattr(operator, f"__{_name}__")
    _BINARY[f"__{_name}__"] = _binary(_function)
    _BINARY[f"__r{_name}__"] = _binary(_function, swap=True)
    _BINARY[f"__i{_name}__"] = _binary(getattr(operator, f"__i{_name}__"))
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__call__": _call,
    "__next__": _next,
    "__contains__": _contains,
    "__await__": _await,
    "__enter__": lambda remote: Remote.__getattr__(remote, "__enter__")(),
    "__exit__": _exit,
    "__instancecheck__": lambda remote, item: remote._program.ask(isinstance, item, remote),
    "__subclasscheck__": lambda remote, item: remote._program.ask(issubclass, item, remote),
    **{
        f"__{function.__name__}__": _unary(function)
        for function in (len, bool, iter, reversed, hash, repr, str, format, int, float, complex, abs, round)
    },
    **{
        f"__{name}__": _unary(getattr(operator, name))
        for name in ("index", "neg", "pos", "invert", "getitem", "setitem", "delitem")
    },
    **{f"__{name}__": _unary(getattr(math, name)) for name in ("trunc", "floor", "ceil")},
    **_BINARY,
}
_EXPECTED = ("__call__", "__iter__", "__len__", "__getitem__")  # of what the tests take from a program
_COROUTINE = {"send": _send, "throw": _send, "close": lambda remote: None}


@functools.lru_cache(1024)
def _remote_class(name: str, operations: tuple[str, ...]) -> type[Remote]:
    """What an object is here whose type has this name and these of `_OPERATIONS`."""
    methods: dict[str, Any] = {each: _OPERATIONS[each] for each in operations}
    if "__eq__" in methods:
        methods.setdefault("__hash__", None)
    if "__await__" in methods:
        methods |= _COROUTINE
    return type(name, (Remote,), methods)


def _handle(value: Any) -> int | str:
    """How the program finds what is not data."""
    remote = value
    if isinstance(value, ProgramError) or (isinstance(value, type) and issubclass(value, ProgramError)):
        remote = vars(value).get("_remote")
    handle = object.__getattribute__(remote, "_handle") if isinstance(remote, Remote) else _importable(value)
    if handle is None:
        raise HandOverError
    return handle


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


def _importable_exception(module: str, name: str) -> type:
    return getattr(sys.modules.get(module), name, Exception)


@functools.lru_cache(256)
def _program_error(kind: type) -> type[ProgramError]:
    """A `ProgramError` that tests can catch as ``kind``, where that is an exception that ends nothing but the test."""
    if issubclass(kind, ProgramError):
        return kind
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return ProgramError  # `map` and `all` would take it for the end of their own items
    return type(kind.__name__, (ProgramError, kind), {})


def _failure(remote: Remote, kind: type, arguments: Sequence[Any], text: str) -> ProgramError:
    """What stands for an exception of the program."""
    if not isinstance(remote, Remote) or not isinstance(text, str):
        raise TypeError(f"an exception is an object with a text, not {remote!r} with {text!r}")
    error_class = _program_error(kind)
    try:
        error = error_class.__new__(error_class, *arguments)
    except TypeError:  # a few want other arguments
        error = error_class.__new__(error_class)
    error.args = tuple(arguments)
    error._remote, error._text, error._ends = remote, text, issubclass(kind, StopIteration)
    return error


def _judge(
    limits: Limits,
    confine: Callable[[], None],
    process: int,
    jobs: BinaryIO,
    questions: BinaryIO,
    answers: BinaryIO,
) -> None:
    """Read a job for the program in a process and end with its verdict as exit status."""
    line = jobs.readline()
    if not line:
        os._exit(_END)
    _end_if_idle(limits, process)
    confine()
    job = json.loads(line)
    is_script = "stdin" in job  # whose one answer is all that it printed
    longest = limits.output * (_EXPANSION if is_script else 1)
    program = _Program(questions, answers, longest, job.pop("decides", False))
    verdict = _test_script(program, **job) if is_script else _test(program, **job)
    os._exit(_FIRST_VERDICT + verdict)


def _end_if_idle(limits: Limits, process: int) -> None:
    """From now on, end this process by `Verdict.TIMEOUT` when it and another have mostly waited (`Limits`)."""
    before = time.process_time()

    def look(*_: object) -> None:
        nonlocal before
        used = time.process_time()
        with contextlib.suppress(OSError):  # the other one ended
            used += time.clock_gettime(~process << 3 | 2)  # as `clock_getcpuclockid` has it on Linux
        if used - before < limits.seconds / _SHARES:
            os._exit(_FIRST_VERDICT + Verdict.TIMEOUT)
        before = used

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limits.deadline, limits.deadline)


def _test(program: _Program, *, text: str, imports: list[str], tests: str, entry: list[str]) -> int:
    if not program.compiles(text, imports):
        return Verdict.COMPILE_ERROR
    try:
        program.run()
        random.seed(tests)  # which the program has not seen, or it could draw what they draw
        exec(tests, {"__name__": "tests", **{name: program.take(name) for name in entry}})
    except HandOverError:
        return UNTESTABLE
    except BaseException as error:
        return Verdict.RUNTIME_ERROR if error is program.error else Verdict.FAILED
    return Verdict.RUNTIME_ERROR if program.is_gone else Verdict.PASSED


def _test_script(
    program: _Program, *, text: str, imports: list[str], stdin: str, expected: str, match: str
) -> int:
    if not program.compiles(text, imports, stdin):
        return Verdict.COMPILE_ERROR
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            program.run()
    except ProgramError:
        return Verdict.RUNTIME_ERROR
    return Verdict.PASSED if MATCHES[match](printed.getvalue(), expected) else Verdict.FAILED


def _same_words(printed: str, expected: str) -> bool:
    """CodeContests' rule: the same words, wherever lines end and whatever their case; numbers to 1e-5."""
    return _alike(printed.lower().split(), expected.lower().split(), 0.0, 1e-5)


def _same_lines(printed: str, expected: str) -> bool:
    """APPS' rule, as far as it keeps the order: the same lines but for space and empty ones; numbers as numpy's
    ``allclose`` has them.
    """
    # One by one: as lists of words, many lines would have more memory than a judge.
    one, other = (
        (line.split() for line in text.splitlines() if line.strip()) for text in (printed, expected)
    )
    missing: list[str] = []
    lines = itertools.zip_longest(one, other, fillvalue=missing)
    return all(_alike(line, wanted, 1e-5, 1e-8) for line, wanted in lines)


def _alike(words: list[str], expected: list[str], relative: float, absolute: float) -> bool:
    return len(words) == len(expected) and all(
        word == other or _close(word, other, relative, absolute)
        for word, other in zip(words, expected, strict=True)
    )


def _close(word: str, other: str, relative: float, absolute: float) -> bool:
    """Whether two words are numbers that are close or, if both are whole, the same.

    Python's own 1_000 is no number to others.
    """
    if "_" in word + other:
        return False
    try:
        return int(word) == int(other)
    except ValueError:
        pass
    try:
        one, expected = float(word), float(other)
    except (ValueError, OverflowError):
        return False
    return math.isfinite(expected) and abs(one - expected) <= absolute + relative * abs(expected)


MATCHES: Mapping[str, Callable[[str, str], bool]] = types.MappingProxyType(
    {"lines": _same_lines, "words": _same_words}
)


# ---- the program --------------------------------------------------------------------------------------------


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
        operations = [name for name in _OPERATIONS if _overrides(type(value), name)]
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


def _run_program(limits: Limits, confine: Callable[[], None], questions: BinaryIO, answers: BinaryIO) -> None:
    """Compile the text that arrives, then do what is asked of it until no more is."""
    text, imports, stdin = json.loads(questions.readline())
    if threads.wanted(text):
        threads.provide(stack=limits.memory // 4 if threads.deep(text) else 0)
    execute: Callable[..., None] = exec
    if stdin is None:
        name, printed = "program", _captured(limits.output // _EXPANSION)
    else:
        name, printed = "__main__", _standard_streams(stdin, limits.output)
        execute = functools.partial(_run_script, lambda: answer((True, None, [], printed())))
    confine()
    module = types.ModuleType(name)
    sys.modules[name] = module
    objects = _Objects()

    def resolve(handle: int | str) -> Any:
        return objects[handle] if isinstance(handle, int) else eval(handle, module.__dict__)

    def answer(value: Any, known: Mapping[int, int] | None = None) -> None:
        answers.write(wire.dumps(value, objects.refer, known=known))
        answers.flush()

    try:
        code = compile(text, "<program>", "exec", dont_inherit=True)
    except Exception:  # besides SyntaxError: null bytes, nesting too deep, integers too long
        answer(False)
        return
    for statement in imports:
        with contextlib.suppress(ImportError):
            exec(statement, module.__dict__)
    answer(True)
    assert objects.refer(functools.partial(execute, code, module.__dict__))[0] == _RUN
    for line in questions:
        known: list[Any] = []
        try:
            function, arguments, keywords = wire.loads(line, resolve)
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
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, stdout):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
