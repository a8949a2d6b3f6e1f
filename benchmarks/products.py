"""The matrix products of a function, and a program that does them and nothing else: the limit of its speed.

The products are read off the function's jaxpr, not written down by hand, so the limit follows the agent. What
every compiler drops or merges is left out: products that nothing uses, and repeats of one on the same arrays.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from rl.types import Array, Key

# Primitives that only call the function in their parameters, and those that return their argument.
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
_SAME = ("stop_gradient", "copy", "optimization_barrier")
_Choice = Callable[..., Any]  # `max` or `min`


class Product(NamedTuple):
    """One ``dot_general``."""

    operands: tuple[
        Hashable, Hashable
    ]  # names; the same name is the same array, an `_Computed` one is no input
    shapes: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]  # theirs
    settings: Mapping[str, Any]  # dimension numbers, precision, ...
    result: jax.ShapeDtypeStruct
    flops: int  # two per multiply-add


def find(function: Callable[..., Any], *arguments: Any, branch: _Choice = max) -> list[Product]:
    """The matrix products that ``function(*arguments)`` does, in its order.

    One inside `jax.lax.scan` is listed once per iteration. Of the branches of `jax.lax.cond` only one counts.

    Args:
      function: anything that JAX can trace.
      *arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`.
      branch: which one: that with the most arithmetic (`max`) or with the least (`min`).

    Raises:
      ValueError: if a product is where it cannot be counted, in `jax.lax.while_loop` say.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return _inside(closed, [("input", i) for i in range(len(closed.jaxpr.invars))], branch)


def flops(products: Sequence[Product]) -> int:
    """Floating-point operations of all ``products``."""
    return sum(product.flops for product in products)


def program(products: Sequence[Product], steps: int) -> Callable[[Sequence[Array]], Any]:
    """``steps`` times all ``products`` as a function of `operands`: their function without its elementwise work.

    An operand that the function computes is taken, unchanged, from the last earlier result of its shape that nothing
    else has taken, so that products depend on each other and find their operands in cache about as they do there.
    Results that nothing takes are written out. One number in the inputs changes with every step, so that no compiler
    can move a product out of the loop.
    """
    flow = _flow(products)

    def multiply(values: Sequence[Array]) -> Any:
        inputs = dict(zip(flow.inputs, values, strict=True))

        def once(carry, step):
            changing = [x.at[(0,) * x.ndim].set(step.astype(x.dtype)) for x in carry[0]]
            arrays = inputs | dict(zip(flow.changing, changing, strict=True))
            results: list[Array] = []
            for product in products:
                left, right = (
                    results[flow.taken[name]] if name in flow.taken else arrays[name]
                    for name in product.operands
                )
                results.append(jax.lax.dot_general_p.bind(left, right, **product.settings))
            return (changing, [results[i] for i in flow.left]), None

        left = [jnp.zeros(products[i].result.shape, products[i].result.dtype) for i in flow.left]
        start = [inputs[name] for name in flow.changing]
        return jax.lax.scan(once, (start, left), jnp.arange(steps) / steps)[0]

    return multiply


def operands(products: Sequence[Product], key: Key) -> list[Array]:
    """Random inputs of `program`, scaled so that products of products neither overflow nor vanish.

    One after another: a program that makes all of them takes minutes to compile where there are hundreds.
    """
    shapes = _flow(products).inputs.values()
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, s.shape, s.dtype) / 16 for k, s in zip(keys, shapes, strict=True)]


class _Flow(NamedTuple):
    """Where operands come from and results go to."""

    inputs: dict[Hashable, jax.ShapeDtypeStruct]  # operands that are no result
    taken: dict[Hashable, int]  # operands that are: of which product
    left: list[int]  # products whose results are no operand
    changing: list[Hashable]  # inputs such that every product depends on one of them


def _flow(products: Sequence[Product]) -> _Flow:
    inputs: dict[Hashable, jax.ShapeDtypeStruct] = {}
    taken: dict[Hashable, int] = {}
    changing: list[Hashable] = []
    free: dict[Any, list[int]] = collections.defaultdict(list)
    for i, product in enumerate(products):
        for name, shape in zip(product.operands, product.shapes, strict=True):
            if name in inputs or name in taken:
                continue
            candidates = free[shape.shape, shape.dtype]
            if isinstance(name, _Computed) and candidates:
                taken[name] = candidates.pop()
            else:
                inputs[name] = shape
        if all(name in inputs for name in product.operands) and not set(product.operands) & set(changing):
            changing.append(min(product.operands, key=lambda name: math.prod(inputs[name].shape)))
        free[product.result.shape, product.result.dtype].append(i)
    return _Flow(inputs, taken, sorted(i for rest in free.values() for i in rest), changing)


# ---- reading a jaxpr --------------------------------------------------------------------------------------


class _Computed:
    """The name of an array that an operation made; every instance is another one."""


class _Operation(NamedTuple):
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    products: Sequence[Product]


def _inside(closed: core.ClosedJaxpr, inputs: Sequence[Hashable], branch: _Choice) -> list[Product]:
    """The products of a jaxpr whose inputs have these names, without those that no output needs."""
    operations: dict[Hashable, _Operation] = {}
    needed = set(_read(closed, inputs, operations, branch))
    groups: list[Sequence[Product]] = []
    for operation in reversed(operations.values()):
        if not needed.isdisjoint(operation.outputs):
            needed.update(operation.inputs)
            groups.append(operation.products)
    return [product for products in reversed(groups) for product in products]


def _read(
    closed: core.ClosedJaxpr,
    inputs: Sequence[Hashable],
    operations: dict[Hashable, _Operation],
    branch: _Choice,
) -> list[Hashable]:
    """Adds the operations of a jaxpr, calls inlined and repeats merged; returns the names of its outputs."""
    jaxpr = closed.jaxpr
    names: dict[Any, Hashable] = dict(zip(jaxpr.invars, inputs, strict=True))
    names.update((var, ("constant", id(x))) for var, x in zip(jaxpr.constvars, closed.consts, strict=True))

    def name(atom: Any) -> Hashable:
        return ("literal", str(atom.aval), repr(atom.val)) if isinstance(atom, core.Literal) else names[atom]

    for equation in jaxpr.eqns:
        kind, settings = equation.primitive.name, equation.params
        read = [name(atom) for atom in equation.invars]
        if kind in _CALLS:
            callee = settings["jaxpr"] if "jaxpr" in settings else settings["call_jaxpr"]
            written = _read(_close(callee), read, operations, branch)
        elif kind in _SAME:
            written = read
        else:
            key = (kind, repr(settings), tuple(read))
            if key not in operations:
                written = [_Computed() for _ in equation.outvars]
                operations[key] = _Operation(read, written, _products(equation, read, branch))
            written = list(operations[key].outputs)
        names.update(zip(equation.outvars, written, strict=True))
    return [name(atom) for atom in jaxpr.outvars]


def _products(equation: core.JaxprEqn, read: Sequence[Hashable], branch: _Choice) -> list[Product]:
    """The products in one operation that is no call."""
    kind, settings = equation.primitive.name, equation.params
    if kind == "dot_general":
        left, right, result = map(_shape, (*equation.invars, *equation.outvars))
        contracted = math.prod(left.shape[axis] for axis in settings["dimension_numbers"][0][0])
        work = 2 * contracted * math.prod(result.shape)
        return [Product((read[0], read[1]), (left, right), settings, result, work)]
    if kind == "scan":
        return _repeated(equation, read, branch)
    if kind == "cond":
        branches = [_inside(one, read[1:], branch) for one in settings["branches"]]
        return list(branch(branches, key=flops))
    for value in settings.values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                jaxpr = _close(inner)
                if _inside(jaxpr, [_Computed() for _ in jaxpr.jaxpr.invars], branch):
                    raise ValueError(f"cannot count the matrix products inside {kind!r}")
    return []


def _shape(atom: Any) -> jax.ShapeDtypeStruct:
    """The shape and the type of an input or a result."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _repeated(scan: core.JaxprEqn, read: Sequence[Hashable], branch: _Choice) -> list[Product]:
    """The products of all iterations. Inputs of the body are, in this order, constants, carry and slices."""
    body = _close(scan.params["jaxpr"])
    # What is sliced or stacked has one axis more outside. The names of these numbers depend on JAX's version.
    axes = lambda atom: _shape(atom).ndim
    outside = sum(axes(a) == axes(b) for a, b in zip(scan.invars, body.jaxpr.invars, strict=True))
    carry = sum(axes(a) == axes(b) for a, b in zip(scan.outvars, body.jaxpr.outvars, strict=True))
    names, products = list(read[:outside]), []
    for _ in range(scan.params["length"]):
        slices = [("slice", _Computed()) for _ in read[outside:]]
        products += _inside(body, [*names, *slices], branch)
        names[outside - carry :] = [_Computed() for _ in range(carry)]
    return products


def _close(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())
