"""Which part of a run draws from which key, so that no two ever draw from the same one.

``jax.random.split(key)[i]`` may be ``fold_in(key, i)``: a key that is split in one place and folded with the number of
an update, a seed or an evaluation in another gives the same randomness twice. So every key of a run comes from its
root by way of a purpose, and a key that has purposes is used for nothing else:

    jax.random.key(seed)
    ├── evaluate: evaluation, step of its episodes, policy; in `rl.on_device` evaluation, policy, step
    ├── dynamics: of a model that all seeds share
    └── seed: i = 0, 1, ..., the key of seed i, however many run beside it
        ├── init
        ├── update: number of the update, and there one key to draw the batch and one to learn from it
        │   └── lengths: beside the rows of the batch, of returns over several steps (`rl.buffers`)
        ├── act: number of the step
        ├── world: number of the step, of environments that are JAX (`rl.on_device`)
        ├── rollout: number of the update before, or of the fit (`rl.mbpo`)
        ├── dynamics, untrained_dynamics: of a model of its own; online, number of the fit
        ├── permutation: of the dimensions that a model's loss weighs, as a control
        ├── validate: number of the batch, as below update
        └── fitted_q

`rl.train`, `rl.online`, `rl.on_device`, `rl.model_based` and `rl.mbpo` take the keys of seeds and find these purposes
themselves.
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from rl.types import Key

PURPOSES = (
    "act",
    "dynamics",
    "evaluate",
    "fitted_q",
    "init",
    "lengths",
    "permutation",
    "rollout",
    "seed",
    "untrained_dynamics",
    "update",
    "validate",
    "world",
)


def of(key: Key, purpose: str) -> Key:
    """The key for ``purpose``, one of `PURPOSES`, of each key in ``key`` [...].

    Raises:
      ValueError: there is no such purpose.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}: known are {', '.join(PURPOSES)}")
    # A number that no counter reaches, and that stays the same when purposes are added.
    number = np.uint32(zlib.crc32(purpose.encode()))
    fold = lambda key: jax.random.fold_in(key, number)
    for _ in range(key.ndim):
        fold = jax.vmap(fold)
    return fold(key)


def seeds(root: Key, count: int) -> Key:
    """Keys [count] of the seeds 0, 1, ... of a run with the key ``root`` [].

    Raises:
      ValueError: JAX was told to draw by the generator "rbg", whose keys all draw as the first does under ``jax.vmap``.
    """
    if "rbg" in str(jax.random.key_impl(root)):
        raise ValueError(
            f"JAX_DEFAULT_PRNG_IMPL={jax.random.key_impl(root)}: seeds that are trained together would all draw alike; "
            "leave it out"
        )
    parent = of(root, "seed")
    return jax.vmap(lambda number: jax.random.fold_in(parent, number))(jnp.arange(count))


def count(run_keys: Key) -> int:
    """How many runs these keys [S] are of.

    Raises:
      ValueError: they are no such array of typed keys: a single one, say.
    """
    if not jax.dtypes.issubdtype(run_keys.dtype, jax.dtypes.prng_key) or run_keys.ndim != 1:
        raise ValueError(
            f"the keys of runs are one for each seed, [S], and these are {run_keys.dtype}{list(run_keys.shape)}: give "
            "rl.keys.seeds(jax.random.key(0), S)"
        )
    return run_keys.shape[0]
