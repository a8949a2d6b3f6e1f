"""Factorisations that several parts of one program may do at once, and products that are not rounded.

Everything else comes from `jax.numpy.linalg`.

Two batched LU, Cholesky or QR factorisations, or solutions by them, in one CPU program can wait for each other for
ever: each holds a thread of a pool while its parts wait for one (jaxlib 0.10.2, two cores; not seen with 0.12). Here
a batch is factorised one matrix after another on CPUs, which costs nothing there, and as a batch elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from rl.types import Array, Key

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _one_by_one_on_cpus(function: Callable[..., Array]) -> Callable[..., Array]:
    one_by_one = jax.custom_batching.sequential_vmap(function)

    @functools.wraps(function)
    def either(*arrays: Array) -> Array:
        return jax.lax.platform_dependent(*arrays, cpu=one_by_one, default=function)

    return either


@_one_by_one_on_cpus
def solve(matrix: Array, vector: Array) -> Array:
    """``x`` [n] with ``matrix`` [n, n] ``@ x = vector`` [n]; for a batch, `jax.vmap` it."""
    return jnp.linalg.solve(matrix, vector)


@_one_by_one_on_cpus
def positive_inverse(matrix: Array) -> Array:
    """The inverse [n, n] of a positive definite ``matrix`` [n, n]; for a batch, `jax.vmap` it."""
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), identity)


def exact(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``function`` with matrix products in the precision of their operands.

    By default GPUs round float32 operands to TF32 and TPUs to bfloat16: 11 and 8 bits, which networks do not mind, and
    regressions and dynamic programming do.
    """

    @functools.wraps(function)
    def precise(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        with jax.default_matmul_precision("highest"):
            return function(*arguments, **named)

    return precise


def orthogonal(gain: float) -> nn.initializers.Initializer:
    """Flax's initialiser of kernels that are ``gain`` times an orthogonal matrix, which is a QR factorisation."""
    initialiser = nn.initializers.orthogonal(gain)

    def init(key: Key, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
        return _one_by_one_on_cpus(lambda key: initialiser(key, shape, dtype))(key)

    return init
