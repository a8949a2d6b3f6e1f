"""A causal language model as pure functions: tokens in, features and logits out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.networks import attention, transformer
from rl.networks.layers import vocabulary_product
from rl.networks.transformer import Cache, Shape
from rl.types import Array, Key, Params
from rl.values.tokens import vocabulary_stats


@dataclasses.dataclass(frozen=True)
class Config:
    """A language model's architecture."""

    vocabulary: int  # rows of the embedding, A
    context: int  # the most tokens it can read
    shape: Shape
    tied: bool = True  # logits from the embedding's own rows
    embedding_scale: float = 1.0  # of the embeddings that are read
    logit_cap: float = 0.0  # logits l become cap * tanh(l / cap); 0: they stay


class LM(NamedTuple):
    """A language model with parameters ``{"embedding", "blocks", "norm"[, "position"][, "unembedding"]}``.

    Rows may hold several texts: ``segment`` numbers them from 1, 0 is padding, and no text sees another.
    """

    config: Config
    init: Callable[[Key], Params]  # random, float32
    # params, tokens [B, T], segment [B, T] -> features [B, T, D]: row t has seen the tokens up to t
    features: Callable[[Params, Array, Array], Array]
    logits: Callable[[Params, Array], Array]  # params, features [..., D] -> [..., A] float32
    cache: Callable[[int, int], Cache]  # (B, M) -> an empty one
    # As `features`, for the S tokens that follow those in the cache -> features [B, S, D], and the cache with them
    extend: Callable[[Params, Array, Array, Cache], tuple[Array, Cache]]
    # As `extend`, for what every block leaves on the residual path [layers, B, S, D]: features before their norm
    residuals: Callable[[Params, Array, Array, Cache], tuple[Array, Cache]]


def make(config: Config, dtype: Any = jnp.float32, remat: bool = False) -> LM:
    """The model of ``config``; ``dtype`` and ``remat`` as in `transformer.trunk`.

    Logits are float32 always: sums in float32 of products of ``dtype``.

    Its functions raise ValueError for sequences longer than the context.
    """
    body = transformer.trunk(config.shape, dtype, remat)
    learned_positions = config.shape.rope is None

    def init(key: Key) -> Params:
        keys = jax.random.split(key, 4)

        def table(key: Key, rows: int) -> Array:
            return 0.02 * jax.random.normal(key, (rows, config.shape.width))

        params = {"embedding": table(keys[0], config.vocabulary), **body.init(keys[1])}
        if learned_positions:
            params["position"] = table(keys[2], config.context)
        if not config.tied:
            params["unembedding"] = table(keys[3], config.vocabulary)
        return params

    def embed(params: Params, tokens: Array, position: Array) -> Array:
        x = params["embedding"][tokens]
        x = x if config.embedding_scale == 1.0 else x * config.embedding_scale
        return x + params["position"][position] if learned_positions else x

    def check(length: int) -> None:
        if length > config.context:
            raise ValueError(
                f"{length} tokens are more than the model's context of {config.context}: shorten the sequence"
            )

    def features(params: Params, tokens: Array, segment: Array) -> Array:
        check(tokens.shape[1])
        position = transformer.positions(segment)
        return body.apply(params, embed(params, tokens, position), position, segment)

    def logits(params: Params, features: Array) -> Array:
        rows = params["embedding" if config.tied else "unembedding"]
        return attention.capped(vocabulary_product(features, rows), config.logit_cap)

    def cache(rows: int, slots: int) -> Cache:
        check(slots)
        return body.cache(rows, slots)

    def following(
        through: Callable[..., tuple[Array, Cache]],
        params: Params,
        tokens: Array,
        segment: Array,
        cache: Cache,
    ) -> tuple[Array, Cache]:
        seen = (cache.segment > 0).sum(1, keepdims=True)
        position = jnp.maximum(seen + jnp.cumsum(segment > 0, 1) - 1, 0)
        return through(params, embed(params, tokens, position), position, segment, cache)

    extend, residuals = (functools.partial(following, one) for one in (body.extend, body.residuals))
    return LM(config, init, features, logits, cache, extend, residuals)


def pretrained(lm: LM, params: Params) -> LM:
    """The model whose ``init`` gives a copy of ``params``: what an agent made from it then starts with."""
    return lm._replace(init=lambda key: jax.tree.map(jnp.array, params))


def accumulated(lm: LM, rows: int) -> LM:
    """The model whose features are computed ``rows`` rows at a time, and again in the backward pass.

    This is gradient accumulation, for any loss: the gradient of the parameters is summed over groups of rows, while the
    loss still sees the features of the whole batch, so that its means are over all of its tokens. Memory is that of
    ``rows`` rows and of the features; of logits, see `rl.values.tokens.vocabulary_stats`. Rows of one group are taken
    at equal distances, so that a batch split over devices stays so.

    Whatever reads texts with an agent made from it must be given a multiple of ``rows``, judging, valuing and acting
    too; do these with the model that is not split, whose parameters are the same.

    Raises:
      ValueError: when traced, if a batch does not divide into groups of ``rows``.
    """

    def features(params: Params, tokens: Array, segment: Array) -> Array:
        if tokens.shape[0] % rows:
            raise ValueError(
                f"{tokens.shape[0]} rows do not divide into groups of {rows}: give a multiple, or a model that is not "
                "split"
            )

        def split(x: Array) -> Array:
            return jnp.swapaxes(x.reshape(rows, -1, *x.shape[1:]), 0, 1)

        @jax.checkpoint
        def some(group: tuple[Array, Array]) -> Array:
            return lm.features(params, *group)

        outputs = jax.lax.map(some, (split(tokens), split(segment)))
        return jnp.swapaxes(outputs, 0, 1).reshape(*tokens.shape, -1)

    return lm._replace(features=features)


def log_probabilities(
    lm: LM, params: Params, tokens: Array, segment: Array, chunk: int = 128, needed: Array | None = None
) -> Array:
    """log p(token | the tokens before it) of tokens [B, T], [B, T] float32; 0 at column 0.

    The first token of a later segment is predicted from another text: mask it. ``chunk`` as in `vocabulary_stats`, and
    ``needed`` [B, T] too: the tokens that are asked about.
    """
    features = lm.features(params, tokens, segment)[:, :-1]
    predicted = None if needed is None else needed[:, 1:]
    summary = vocabulary_stats(
        functools.partial(lm.logits, params), features, tokens[:, 1:, None], chunk, predicted
    )
    return jnp.pad(summary.chosen[..., 0] - summary.total, ((0, 0), (1, 0)))
