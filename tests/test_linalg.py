"""Factorisations: equal to NumPy's, and two batches at once come to an end."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import linalg

TWO_AT_ONCE = """
import jax, jax.numpy as jnp
from rl import linalg
matrices = 200 * jnp.eye(200) + jnp.sin(jnp.arange(7.0))[:, None, None]
for call in (
    lambda a: linalg.solve(a, a[0]),
    linalg.positive_inverse,
    lambda a: linalg.orthogonal(1.0)(jax.random.key(a[0, 1].astype(int)), (64, 64)),  # from a matrix to a key
):
    both = jax.jit(lambda a, b: jax.vmap(call)(a).sum() + jax.vmap(call)(b).sum())
    print("next", flush=True)  # shown where it does not come to an end
    for _ in range(30):
        both(matrices, 2 * matrices[:5]).block_until_ready()
"""


def _matrices(count: int = 5, size: int = 7) -> np.ndarray:
    roots = np.random.default_rng(0).normal(size=(count, size, size)).astype(np.float32)
    return roots @ np.swapaxes(roots, -1, -2) + np.eye(size, dtype=np.float32)


def test_a_batch_is_solved_and_factorised_as_numpy_does():
    matrices = _matrices()
    vectors = matrices[:, 0]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(linalg.solve))(matrices, vectors),
        np.linalg.solve(matrices, vectors[..., None])[..., 0],
        atol=1e-4,
    )
    inverses = jax.vmap(linalg.positive_inverse)(matrices)
    np.testing.assert_allclose(inverses, np.linalg.inv(matrices), atol=1e-4)


def test_a_shared_matrix_is_solved_for_a_batch_of_vectors():
    matrix = _matrices(1)[0]
    inverse = jax.vmap(linalg.solve, (None, 0))(matrix, jnp.eye(len(matrix)))
    np.testing.assert_allclose(inverse @ matrix, np.eye(len(matrix)), atol=1e-4)


def test_orthogonal_kernels_are_those_of_flax():
    keys = jax.random.split(jax.random.key(0), 3)
    for shape in ((5, 5), (7, 4), (3, 3, 2, 6)):
        kernels = jax.vmap(lambda key, shape=shape: linalg.orthogonal(2.0)(key, shape))(keys)
        for key, kernel in zip(keys, kernels, strict=True):
            np.testing.assert_allclose(kernel, nn.initializers.orthogonal(2.0)(key, shape), atol=1e-6)


@pytest.mark.slow
def test_two_batches_at_once_come_to_an_end():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # several devices would hide it
    subprocess.run([sys.executable, "-c", TWO_AT_ONCE], env=environment, timeout=240, check=True)
