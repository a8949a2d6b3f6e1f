"""The matrix products of a function, and a program that does them and nothing else: the limit of its speed.

The products are read off the function's jaxpr, not written down by hand, so the limit follows the agent. What
every compiler drops or merges is left out: products that nothing uses, and repeats of one on the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from rl.types import Array

# Primitives that only call the function in their parameters.
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat2",
)

# Primitives that return their argument.
_SAME = ("stop_gradient", "copy")


class Product(NamedTuple):
    """One ``dot_general``."""

    operands: tuple[Hashable, Hashable]  # names of the two arrays; the same name is the same array
    shapes: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]  # theirs
    settings: Mapping[str, Any]  # dimension numbers, precision, ...
    result: jax.ShapeDtypeStruct
    flops: int  # two per multiply-add


def find(function: Callable[..., Any], *arguments: Any) -> list[Product]:
    """The matrix products that ``function(*arguments)`` does, in its order.

    One inside `jax.lax.scan` is listed once per iteration. Of the branches of `jax.lax.cond` only the one with
    the most arithmetic counts.

    Args:
      function: anything that JAX can trace.
      *arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: if a product is where it cannot be counted, in `jax.lax.while_loop` say.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return _inside(closed, [object() for _ in closed.jaxpr.invars])


def flops(products: Sequence[Product]) -> int:
    """Floating-point operations of all ``products``."""
    return sum(product.flops for product in products)


def program(products: Sequence[Product], steps: int) -> Callable[[Sequence[Array]], Any]:
    """``steps`` times all ``products``, one after another, as a function of `operands`.

    Nothing else is computed. Barriers make every product wait for the one before it, and the first for its
    iteration, so that none can be merged with another or moved out of the loop. Every result is written out, as
    the update writes its own.
    """
    index = {name: i for i, name in enumerate(_shapes(products))}

    def multiply(arrays: Sequence[Array]) -> Any:
        def once(carry, _):
            done = [carry[0]]
            for product in products:
                left, right = (arrays[index[name]] for name in product.operands)
                left, right, done[-1] = jax.lax.optimization_barrier((left, right, done[-1]))
                done.append(jax.lax.dot_general_p.bind(left, right, **product.settings))
            return (done[0] + 1, *done[1:]), None

        start = [jnp.zeros(product.result.shape, product.result.dtype) for product in products]
        return jax.lax.scan(once, (jnp.zeros((), jnp.int32), *start), None, length=steps)[0]

    return multiply


def operands(products: Sequence[Product], key: Array) -> list[Array]:
    """One random array for every distinct operand, as `program` takes them; small, so that nothing overflows."""
    shapes = _shapes(products).values()
    keys = jax.random.split(key, len(shapes))
    return [0.1 * jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, shapes, strict=True)]


def _shapes(products: Sequence[Product]) -> dict[Hashable, jax.ShapeDtypeStruct]:
    return {name: shape for p in products for name, shape in zip(p.operands, p.shapes, strict=True)}


class _Operation(NamedTuple):
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    products: Sequence[Product]


def _inside(closed: core.ClosedJaxpr, inputs: Sequence[Hashable]) -> list[Product]:
    """The products of a jaxpr whose inputs have these names, without those that no output needs."""
    operations: dict[Hashable, _Operation] = {}
    needed = set(_read(closed, inputs, operations))
    kept: list[Sequence[Product]] = []
    for operation in reversed(operations.values()):
        if not needed.isdisjoint(operation.outputs):
            needed.update(operation.inputs)
            kept.append(operation.products)
    return [product for products in reversed(kept) for product in products]


def _read(
    closed: core.ClosedJaxpr, inputs: Sequence[Hashable], operations: dict[Hashable, _Operation]
) -> list[Hashable]:
    """Adds the operations of a jaxpr, calls inlined and repeats merged; returns the names of its outputs."""
    jaxpr = closed.jaxpr
    names: dict[Any, Hashable] = dict(zip(jaxpr.invars, inputs, strict=True))
    names.update(
        (var, ("constant", id(value))) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
    )

    def name(atom: Any) -> Hashable:
        return ("literal", str(atom.aval), repr(atom.val)) if isinstance(atom, core.Literal) else names[atom]

    for equation in jaxpr.eqns:
        read = [name(atom) for atom in equation.invars]
        kind = equation.primitive.name
        if kind in _CALLS:
            callee = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            written = _read(_close(callee), read, operations)
        elif kind in _SAME:
            written = read
        else:
            key = (kind, repr(equation.params), tuple(read))
            if key not in operations:
                operations[key] = _Operation(
                    read, [object() for _ in equation.outvars], _products(equation, read)
                )
            written = operations[key].outputs
        names.update(zip(equation.outvars, written, strict=True))
    return [name(atom) for atom in jaxpr.outvars]


def _products(equation: core.JaxprEqn, read: Sequence[Hashable]) -> list[Product]:
    """The products in one operation that is no call."""
    kind, settings = equation.primitive.name, equation.params
    if kind == "dot_general":
        left, right, result = (
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
            for var in (*equation.invars, *equation.outvars)
        )
        contracted = math.prod(left.shape[axis] for axis in settings["dimension_numbers"][0][0])
        work = 2 * contracted * math.prod(result.shape)
        return [Product((read[0], read[1]), (left, right), settings, result, work)]
    if kind == "scan":
        constants = read[: settings["num_consts"]]
        others = [object() for _ in read[len(constants) :]]
        return settings["length"] * _inside(settings["jaxpr"], [*constants, *others])
    if kind == "cond":
        return max((_inside(branch, read[1:]) for branch in settings["branches"]), key=flops)
    for value in settings.values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                jaxpr = _close(inner)
                if _inside(jaxpr, [object() for _ in jaxpr.jaxpr.invars]):
                    raise ValueError(f"cannot count the matrix products inside {kind!r}")
    return []


def _close(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())
