"""Values on their way between a program and its tests: plain data as JSON, and a reference to everything else.

What a program answers is data to its tests, never code. With pickle an answer could redefine ``Counter.__eq__`` in the
process that compares it; here it can only be a value of the types below, made anew on the other side. Instances of
subclasses arrive as the type they derive from, so that no program brings its own ``__eq__``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from decimal import Decimal
from fractions import Fraction
from typing import Any

_ATOMS = (bool, int, float, str)  # bool first: it is an int
_COLLECTIONS = (tuple, set, frozenset, deque)
_STREAMS = (Iterator, KeysView, ValuesView, ItemsView)


def dumps(value: Any, refer: Callable[[Any], int | str]) -> bytes:
    """One line of JSON.

    Args:
        value: any Python value; iterators are exhausted.
        refer: the handle of an object that is not plain data; it may raise.
    """
    return json.dumps(_encode(value, refer)).encode() + b"\n"


def loads(line: bytes, resolve: Callable[[Any], Any]) -> Any:
    """The value of one line; ``resolve`` turns a handle into what stands for it here.

    Raises:
        Exception: of any kind, for a line that `dumps` did not write.
    """

    def build(tagged: dict[str, Any]) -> Any:
        [(tag, body)] = tagged.items()
        return resolve(body) if tag == "reference" else _BUILD[tag](body)

    return json.loads(line, object_hook=build)


def _encode(value: Any, refer: Callable[[Any], int | str]) -> Any:
    if value is None or type(value) in _ATOMS:
        return value
    for atom in _ATOMS:
        if isinstance(value, atom):
            return atom(value)
    if isinstance(value, list):
        return [_encode(item, refer) for item in value]
    for kind in _COLLECTIONS:
        if isinstance(value, kind):
            return {kind.__name__: [_encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, refer), _encode(item, refer)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Fraction):
        return {"fraction": [int(value.numerator), int(value.denominator)]}
    if isinstance(value, Decimal):
        return {"decimal": Decimal.__str__(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, _STREAMS):
        return {"iterator": [_encode(item, refer) for item in value]}
    return {"reference": refer(value)}


_BUILD: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
    "complex": lambda parts: complex(*parts),
    "fraction": lambda parts: Fraction(*parts),
    "decimal": Decimal,
    "bytes": bytes.fromhex,
    "range": lambda parts: range(*parts),
    "iterator": iter,
}
