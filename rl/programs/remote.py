"""A program as its tests see it: functions and objects that put questions to it; standard library only.

The program runs in another process (`rl.programs.execute`). To the tests its functions are stand-ins that send a
question and get data back (`rl.programs.wire`). What a call changed in its arguments and what it printed come back with
its answer. An object that can be changed, and is in several places of a call's arguments, is one object there, too. The
next call is given a copy of its own, and all that an answer holds is a copy but for arguments of the call. Objects of
the program can be used as if they were here (`Remote`), with one exception: how they compare with the tests' own data
is theirs to say only where the problem asks for a class, because an object can be equal to everything. That is so of
operators and of their methods. Any other method says what the program likes: ``assert f(3).startswith("a")`` holds of
an object whose method says so, and only a test that compares what is answered, such as ``f(3)[:1] == "a"``, tells it
from a text. Tests cannot hand over functions or objects of their own (`HandOverError`); those of the program and of
importable modules they can.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, BinaryIO

from rl.programs import wire

RUN = 0  # the handle of what runs the program's text


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


class Program:
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
        self.ask(Remote(self, RUN))

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
    """Stands for an object of the program; has those of `OPERATIONS` that the object has (`_remote_class`).

    Everything that is done with it is asked of the program, but for one thing: how it compares with the tests' data. An
    object may be equal to everything, or 0 when something is taken from it. So it is compared with the tests' data, or
    reckons with them, only where the problem asks for a class of the program (``decides``), which is to say how
    its instances compare; elsewhere only with other objects of the program, and by operators, not by their methods'
    names. Its other methods are the program's, whatever they are given.
    """

    def __init__(self, program: Program, handle: int | str):
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
OPERATIONS: dict[str, Callable[..., Any]] = {
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
    """What an object is here whose type has this name and these of `OPERATIONS`."""
    methods: dict[str, Any] = {each: OPERATIONS[each] for each in operations}
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
