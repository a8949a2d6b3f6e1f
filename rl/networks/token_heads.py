"""Value heads on a transformer's features: one value per state, or one per state and token of a vocabulary.

They compute in float32 whatever the trunk's type, and know value heads only by their size ``K``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.networks import mlp
from rl.networks.base import Network
from rl.networks.layers import row_product, vocabulary_product
from rl.types import Array, Key, Params


class VocabularyValues(NamedTuple):
    """Q of every token, for ``E`` members that share the features."""

    init: Callable[[Key, Array], Params]  # key, example features [..., D]
    at: Callable[[Params, Array, Array], Array]  # params, features [..., D], token [...] -> [E, ..., K]
    all: Callable[[Params, Array], Array]  # params, features [..., D] -> [E, ..., A, K]


def state_values(outputs: int, inner: int, bias: float = 0.0) -> Network:
    """V: features [..., D] -> head outputs [..., K], through one hidden layer of ``inner``; see `vocabulary_values`."""
    body = mlp.state_value(outputs, (inner,))

    def apply(params: Params, features: Array) -> Array:
        return body.apply(params, features.astype(jnp.float32)) + bias

    return Network(body.init, apply)


def vocabulary_values(
    vocabulary: int, outputs: int, inner: int, members: int = 2, bias: float = 0.0
) -> VocabularyValues:
    """Q: a hidden layer of ``inner``, then one row of weights per token and output.

    `VocabularyValues.at` reads the rows of the tokens asked for and no others: [..., K, inner] numbers instead of
    a product with the whole vocabulary.

    Args:
      vocabulary: tokens ``A``.
      outputs: ``K`` of the value head. A large vocabulary times many outputs is a large layer: A * K * inner.
      inner: width of the hidden layer.
      members: ``E``, independent copies; 2 for a twin.
      bias: added to every output. With a scalar head near the mean return it keeps tokens that the data never
        show from looking good where rewards are negative (LMRL-Gym's Wordle: -4.4).
    """

    def init(key: Key, features: Array) -> Params:
        width = features.shape[-1]

        def one(key: Key) -> Params:
            first, last = jax.random.split(key)
            return {
                "inner": jax.random.uniform(first, (width, inner), minval=-1.0) / jnp.sqrt(width),
                "inner_bias": jnp.zeros(inner),
                "rows": jax.random.uniform(last, (vocabulary, outputs, inner), minval=-1.0) / jnp.sqrt(inner),
                "rows_bias": jnp.zeros((vocabulary, outputs)),
            }

        return jax.vmap(one)(jax.random.split(key, members))

    def hidden(params: Params, features: Array) -> Array:
        return jax.nn.relu(row_product(features.astype(jnp.float32), params["inner"]) + params["inner_bias"])

    def at(params: Params, features: Array, token: Array) -> Array:
        def one(p: Params) -> Array:
            picked = jnp.einsum("...h,...kh->...k", hidden(p, features), p["rows"][token])
            return picked + p["rows_bias"][token] + bias

        return jax.vmap(one)(params)

    def every(params: Params, features: Array) -> Array:
        def one(p: Params) -> Array:
            y = vocabulary_product(hidden(p, features), p["rows"].reshape(-1, inner))
            y += p["rows_bias"].reshape(-1) + bias
            return y.reshape(*y.shape[:-1], vocabulary, outputs)

        return jax.vmap(one)(params)

    return VocabularyValues(init, at, every)
