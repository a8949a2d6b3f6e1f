"""Values on their way between a program and its tests: plain data as JSON, and a reference to everything else.

What a program answers is data to its tests, never code. With pickle an answer could redefine ``Counter.__eq__`` in the
process that compares it; here it can only be a value of the types below, made anew on the other side. Instances of
subclasses arrive as the type they derive from, so that no program brings its own ``__eq__``.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

EXPANSION = 8  # more than a character grows as JSON, which writes six for a control character
_ATOMS = (bool, int, float, str)
# What an instance of a class under one of them is as a plain value, whatever that class makes of `str()` and the like.
_PLAIN: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_COLLECTIONS = (tuple, set, frozenset, deque)
_MAPPINGS = (Counter, OrderedDict, dict)  # dict last: it is both others' base
_CHANGEABLE = (list, dict, set, deque, bytearray)
_VIEWS: dict[str, Any] = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
_ARRAYS = "biufc"  # numpy's kinds of numbers
_CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}


def dumps(
    value: Any,
    refer: Callable[[Any], Any],
    *,
    known: Mapping[int, int] | None = None,
    remote: type | None = None,
) -> bytes:
    """One line of JSON.

    Args:
        value: any Python value.
        refer: what stands for an object that is not plain data, as JSON; it may raise.
        known: of objects that the other side has, their number there by ``id``; they are not sent again.
        remote: the class of what stands for the other side's objects, which are referred to whatever they can do. With
            it iterators are sent as what is left of them; without they are referred to. With it what can be changed in
            place and is there several times, as in ``[[0]] * 2``, is so on the other side, too.
    """
    objects: dict[int, Any] = {}
    repeated: set[int] = set()
    if remote:
        _collect(value, objects, repeated)
    return json.dumps(_Encoder(refer, known or {}, remote, repeated).encode(value)).encode() + b"\n"


def loads(
    line: bytes, resolve: Callable[[Any], Any], known: Sequence[Any] = (), *, trusted: bool = False
) -> Any:
    """The value of one line.

    Args:
        line: of `dumps`.
        resolve: turns what `dumps` was given by ``refer`` into what stands for it here.
        known: what the other side may refer to by number.
        trusted: whether it may have one object in several places. A short line can then say a value of any size.

    Raises:
        Exception: of any kind, for a line that `dumps` did not write.
    """
    special = {"reference": resolve, "known": known.__getitem__}
    repeated: list[Any] = []

    def first(value: Any) -> Any:
        repeated.append(value)
        return value

    if trusted:
        special |= {"first": first, "again": repeated.__getitem__}

    def build(tagged: dict[str, Any]) -> Any:
        [(tag, body)] = tagged.items()
        return special[tag](body) if tag in special else _BUILD[tag](body)

    return json.loads(line, object_hook=build)


def containers(value: Any) -> list[Any]:
    """What can be changed in place in a value that is sent, each once, in an order that is the same on both sides."""
    objects: dict[int, Any] = {}
    _collect(value, objects, set())
    return list(objects.values())


def contents(container: Any) -> list[Any]:
    """The items of one of `containers`, for `refill`; of an array a copy of it alone."""
    if is_array(container):
        return [container.copy()]  # itself would be sent as what the other side has, by its number
    return (
        [[key, item] for key, item in container.items()] if isinstance(container, dict) else list(container)
    )


def refill(container: Any, items: list[Any]) -> None:
    """Change one of `containers` in place.

    Raises:
        Exception: of any kind, for items that `contents` does not give.
    """
    if isinstance(container, (list, bytearray)):
        container[:] = items
        return
    if is_array(container):
        (container[...],) = items
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(items)
    elif isinstance(container, dict):
        # Not its own `update`: a Counter's adds. And `dict`'s loses the order of an OrderedDict.
        set_item = (OrderedDict if isinstance(container, OrderedDict) else dict).__setitem__
        for key, item in items:
            set_item(container, key, item)
    else:
        container.update(items)


def _collect(value: Any, objects: dict[int, Any], repeated: set[int]) -> None:
    """Adds what can be changed in place to ``objects``, by its ``id``; what is there already goes to ``repeated``."""
    if isinstance(value, _CHANGEABLE) or is_array(value):
        if id(value) in objects:
            repeated.add(id(value))
            return
        objects[id(value)] = value
    if isinstance(value, (list, tuple, deque)):
        for item in value:
            _collect(item, objects, repeated)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, objects, repeated)


class _Encoder:
    def __init__(
        self,
        refer: Callable[[Any], Any],
        known: Mapping[int, int],
        remote: type | None,
        repeated: set[int],
    ):
        self._refer, self._known, self._remote, self._repeated = refer, known, remote, repeated
        self._sent: dict[int, int] = {}  # of the repeated ones that were sent: their number, by ``id``

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in _ATOMS:
            return value
        if self._remote and isinstance(value, self._remote):
            return {"reference": self._refer(value)}
        if id(value) in self._known:
            return {"known": self._known[id(value)]}
        if id(value) in self._sent:
            return {"again": self._sent[id(value)]}
        if id(value) in self._repeated:
            self._repeated.remove(id(value))
            first = {"first": self.encode(value)}
            self._sent[id(value)] = len(self._sent)  # after those inside, as the other side reads them
            return first
        if type(value) is list:
            return [self.encode(item) for item in value]
        for atom, plain in _PLAIN.items():
            if isinstance(value, atom):
                return plain(value)
        tagged = self._container(value) or _scalar(value) or _array(value)
        if tagged is None:
            return {"reference": self._refer(value)}
        tag, body = tagged
        return {tag: self.encode(body)} if tag else self.encode(body)

    def _container(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, list):
            return "", list(value)
        fields = getattr(type(value), "_fields", None) if isinstance(value, tuple) else None
        if isinstance(fields, tuple) and not any(name.startswith("_") for name in fields):
            return "namedtuple", [type(value).__name__, list(fields), list(value)]
        for kind in _COLLECTIONS:
            if isinstance(value, kind):
                return kind.__name__, list(value)
        if isinstance(value, defaultdict) and _scalar(value.default_factory):
            return "defaultdict", [value.default_factory, contents(value)]
        for mapping in _MAPPINGS:
            if isinstance(value, mapping):
                return mapping.__name__, contents(value)
        for name, view in _VIEWS.items():
            if type(value) is view:
                return name, [list(item) for item in value] if name == "items" else list(value)
        if self._remote and isinstance(value, Iterator):
            return "iterator", list(value)
        return None


def _scalar(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, type):
        name = type.__getattribute__(value, "__name__")
        return ("type", name) if vars(builtins).get(name) is value else None
    if isinstance(value, complex):
        return "complex", [value.real, value.imag]
    if isinstance(value, Fraction):
        return "fraction", [int(value.numerator), int(value.denominator)]
    if isinstance(value, Decimal):
        return "decimal", Decimal.__str__(value)
    if isinstance(value, bytearray):
        return "bytearray", value.hex()
    if isinstance(value, bytes):
        return "bytes", value.hex()
    if isinstance(value, slice):
        return "slice", [value.start, value.stop, value.step]
    for name, constant in _CONSTANTS.items():
        if value is constant:
            return "constant", name
    if isinstance(value, range):
        return "range", [value.start, value.stop, value.step]
    if isinstance(value, datetime):
        day = [value.year, value.month, value.day]
        return "datetime", [day, [*_clock(value)], _offset(value.tzinfo, value), value.fold]
    if isinstance(value, date):
        return "date", [value.year, value.month, value.day]
    if isinstance(value, time):
        return "time", [[*_clock(value)], _offset(value.tzinfo, None), value.fold]
    if isinstance(value, timedelta):
        return "timedelta", [value.days, value.seconds, value.microseconds]
    if isinstance(value, timezone):
        return "timezone", _offset(value, None)
    return None


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy that is sent as its numbers."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.ndarray)
        and value.dtype.kind in _ARRAYS
        and value.dtype.itemsize <= 16
    )


def _array(value: Any) -> tuple[str, Any] | None:
    """Numbers and arrays of numpy, if anything here has loaded it."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic) and isinstance(value.item(), (*_ATOMS, complex)):
        # A float32 is equal to 0.1 where it is the nearest to that, and the float that it is as a Python number is not.
        short = value.dtype.kind in "fc" and value.dtype.itemsize < numpy.dtype(type(value.item())).itemsize
        return ("scalar", [value.dtype.str, value.item()]) if short else ("", value.item())
    if is_array(value):
        numbers = value.astype("f8") if value.dtype == numpy.longdouble else value
        return "array", [numbers.dtype.str, list(numbers.shape), numbers.ravel().tolist()]
    return None


def _clock(value: datetime | time) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def _offset(zone: tzinfo | None, when: datetime | None) -> timedelta | None:
    return None if zone is None else zone.utcoffset(when)


def _zone(offset: timedelta | None) -> timezone | None:
    return None if offset is None else timezone(offset)


@functools.lru_cache(256)
def _named(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple(name, fields)


def _type(name: str) -> type:
    kind = vars(builtins)[name]
    if not isinstance(kind, type):
        raise TypeError(name)
    return kind


def _numbers(parts: Any) -> Any:
    kind, shape, flat = parts
    if kind[1] not in _ARRAYS or not kind[2:].isdigit():
        raise TypeError(kind)
    # Of anything else NumPy would ask where its data are, and believe it.
    plain = type(flat) is list and {type(x) for x in flat} <= {bool, int, float, complex}
    if not plain or type(shape) is not list or {type(x) for x in shape} - {int}:
        raise TypeError("an array is made of a list of numbers")
    return importlib.import_module("numpy").array(flat, kind).reshape(shape)


_BUILD: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "namedtuple": lambda parts: _named(parts[0], tuple(parts[1]))(*parts[2]),
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
    "Counter": lambda items: Counter(dict(items)),
    "OrderedDict": OrderedDict,
    "defaultdict": lambda parts: defaultdict(*parts),
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
    "complex": lambda parts: complex(*parts),
    "fraction": lambda parts: Fraction(*parts),
    "decimal": Decimal,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "constant": _CONSTANTS.__getitem__,
    "iterator": iter,
    "type": _type,
    "date": lambda parts: date(*parts),
    "time": lambda parts: time(*parts[0]).replace(tzinfo=_zone(parts[1]), fold=parts[2]),
    "datetime": lambda parts: datetime(*parts[0], *parts[1]).replace(tzinfo=_zone(parts[2]), fold=parts[3]),
    "timedelta": lambda parts: timedelta(*parts),
    "timezone": _zone,
    "array": _numbers,
    "scalar": lambda parts: _numbers([parts[0], [], [parts[1]]])[()],
}
