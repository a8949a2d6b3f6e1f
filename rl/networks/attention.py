"""Causal attention in memory linear in the length: groups of queries, scores that are computed again, or cuDNN.

`causal` attends, `saveable` says what a transformer that computes its blocks again keeps of it.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rl.types import Array

if TYPE_CHECKING:
    from rl.networks.transformer import Shape

# Queries that attend at a time: what holds scores grows with this times the length, not with its square.
QUERIES = 128
_ATTENDED = "attended"


def causal(
    shape: Shape, reach: Array | None, segment: Array, query: Array, key: Array, value: Array
) -> Array:
    """Attention of all positions to those before them, in memory linear in their number.

    Where cuDNN can (`in_cudnn`), it does rows that hold one text each.
    """

    def parts(query: Array, key: Array, value: Array) -> Array:
        attended = []
        for first, start, end in _groups(shape, query.shape[1]):
            queries, keys = jnp.s_[:, start:end], jnp.s_[:, first:end]
            mask = Mask(reach, jnp.arange(start, end) - first, segment[queries], segment[keys])
            attended.append(masked(shape, mask, query[queries], key[keys], value[keys]))
        return jnp.concatenate(attended, 1)

    if not in_cudnn(shape, query.dtype, query.shape[1]):
        return parts(query, key, value)

    def flash(query: Array, key: Array, value: Array) -> Array:
        scale = None if shape.query_size is None else 1 / math.sqrt(shape.query_size)
        window = (shape.window - 1, 0) if shape.window else None
        return jax.nn.dot_product_attention(
            query, key, value, scale=scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )

    # What a text of the whole row sees is what came before; padding behind it sees the text, and means nothing.
    alone = ((segment == segment[:, :1]) | (segment == 0)).all()
    return checkpoint_name(jax.lax.cond(alone, flash, parts, query, key, value), _ATTENDED)


def saveable(primitive: Any, *inputs: Any, **settings: Any) -> bool:
    """What the backward pass finds as the forward pass left it: outputs of dense layers, and of attention."""
    policies = jax.checkpoint_policies
    return (
        policies.dots_with_no_batch_dims_saveable(primitive, *inputs, **settings)
        or policies.save_only_these_names(_ATTENDED)(primitive, *inputs, **settings)
        or primitive.name == "dot_product_attention_fwd_wrapper"  # cuDNN's, with its sums of exponentials
    )


def capped(x: Array, cap: float) -> Array:
    """``cap * tanh(x / cap)``, between -cap and cap; as it is where the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def _groups(shape: Shape, length: int) -> list[tuple[int, int, int]]:
    """(first key, first query, end of both) of groups of queries, each of which meets the keys that it may see.

    Without a window, four groups meet 5/8 of all pairs; many would meet half, but each is a program of its own.
    """
    size = QUERIES * math.ceil(length / (4 * QUERIES))
    before = length if shape.global_layers or not shape.window else shape.window - 1
    return [(max(start - before, 0), start, min(start + size, length)) for start in range(0, length, size)]


def in_cudnn(shape: Shape, dtype: Any, length: int) -> bool:
    """Whether cuDNN's flash attention knows such heads, types and lengths, on the device that programs are for."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return (
        re.fullmatch(r"\d+\.\d+", capability) is not None
        and float(capability) >= 8.0
        and dtype in (jnp.bfloat16, jnp.float16)
        and shape.head_size % 8 == 0
        and shape.head_size <= 128
        and length % 2 == 0
        and not (shape.score_cap or shape.global_layers)
    )


class Mask(NamedTuple):
    """Which of M keys S queries see: of their own text, those up to their own place."""

    reach: Array | None  # how far back attention goes, if not everywhere
    slot: Array  # [S], of the queries among the keys
    segment: Array  # [B, S], of the queries
    segments: Array  # [B, M], of the keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def masked(shape: Shape, mask: Mask, query: Array, key: Array, value: Array) -> Array:
    """Attention [B, S, heads, head_size] to M keys, in memory linear in S and M (Dao et al., FlashAttention, 2022).

    The backward pass computes the scores again, from one number for every query and head, the logarithm of what its
    weights sum to: that takes less time than writing and reading the weights of all layers.

    Args:
      shape: how scores are computed.
      mask: what is seen.
      query: [B, S, heads, head_size].
      key: [B, M, kv_heads, head_size].
      value: the same.
    """
    return _masked_forward(shape, mask, query, key, value)[0]


def _masked_forward(
    shape: Shape, mask: Mask, query: Array, key: Array, value: Array
) -> tuple[Array, tuple[Any, ...]]:
    """`masked`, and what its backward pass needs."""
    keys, values = _by_head(key), _by_head(value)

    def part(queries: tuple[Array, ...]) -> tuple[Array, Array]:
        slot, segment, query = queries
        query = _grouped(shape, query)
        scores, _ = _scores(shape, mask._replace(slot=slot, segment=segment), query, keys)
        most = scores.max(-1, keepdims=True)
        weight = jnp.exp(scores - most)
        total = weight.sum(-1, keepdims=True)
        attended = jnp.einsum(
            "bnrm,bnmh->bnrh", weight.astype(value.dtype), values, preferred_element_type=jnp.float32
        )
        flat = functools.partial(_flat, positions=len(slot))
        return flat((attended / total).astype(value.dtype)), flat(most + jnp.log(total))

    # Without the barrier, masks of all pairs of positions, which layers share, would be made once and kept.
    queries = jax.lax.optimization_barrier((mask.slot, mask.segment, query))
    attended, total = checkpoint_name(_joined(jax.lax.map(part, _parts(queries)), query.shape[1]), _ATTENDED)
    return attended, (mask, query, key, value, attended, total)


def _masked_backward(shape: Shape, kept: tuple[Any, ...], slope: Array) -> tuple[Array | None, ...]:
    mask, query, key, value, attended, total = kept
    # A slope of scores is weight * (slope of the weight - its mean over weights), and this is the mean.
    mean = (slope.astype(jnp.float32) * attended.astype(jnp.float32)).sum(-1, keepdims=True)
    keys, values = _by_head(key), _by_head(value)

    def part(slopes: tuple[Array, Array], queries: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        slot, segment, *by_position = queries
        query, total, mean, slope = (_grouped(shape, x) for x in by_position)
        scores, steepness = _scores(shape, mask._replace(slot=slot, segment=segment), query, keys)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        weight = jnp.exp(scores - total)
        of_weight = product("bnrh,bnmh->bnrm", slope, values)
        of_score = (weight * (of_weight - mean) * steepness).astype(query.dtype)
        of_key = product("bnrm,bnrh->bnmh", of_score, query)
        of_query = product("bnrm,bnmh->bnrh", of_score, keys)
        of_value = product("bnrm,bnrh->bnmh", weight.astype(slope.dtype), slope)
        return (slopes[0] + of_key, slopes[1] + of_value), _flat(of_query, len(slot))

    queries = jax.lax.optimization_barrier((mask.slot, mask.segment, query, total, mean, slope))
    start = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    of_keys, of_query = jax.lax.scan(part, start, _parts(queries))
    of_key, of_value = (jnp.moveaxis(x, 1, 2).astype(key.dtype) for x in of_keys)
    return None, _joined(of_query, query.shape[1]).astype(query.dtype), of_key, of_value


masked.defvjp(_masked_forward, _masked_backward)


def _scores(shape: Shape, mask: Mask, query: Array, key: Array) -> tuple[Array, Array | float]:
    """Scores [B, kv_heads, groups S, M], the lowest number where a query does not see; their slope by query times key.

    Args:
      shape, mask: as for `masked`.
      query: [B, kv_heads, groups S, head_size].
      key: [B, kv_heads, M, head_size].
    """
    distance = mask.slot[:, None] - jnp.arange(mask.segments.shape[1])
    seen = distance >= 0
    if mask.reach is not None:
        seen = seen & (distance < mask.reach)
    seen = seen & (mask.segment[:, :, None] == mask.segments[:, None, :])
    steepness: Array | float = 1 / math.sqrt(
        query.shape[-1] if shape.query_size is None else shape.query_size
    )
    scores = steepness * jnp.einsum("bnrh,bnmh->bnrm", query, key, preferred_element_type=jnp.float32)
    if shape.score_cap:
        scores = capped(scores, shape.score_cap)
        steepness = steepness * (1 - jnp.square(scores / shape.score_cap))
    seen = jnp.tile(seen[:, None], (1, 1, query.shape[2] // len(mask.slot), 1))
    return jnp.where(seen, scores, jnp.finfo(jnp.float32).min), steepness


def _grouped(shape: Shape, x: Array) -> Array:
    """[B, S, heads, n] -> [B, kv_heads, groups S, n]: the heads that share keys are rows of one product."""
    x = jnp.moveaxis(x.reshape(*x.shape[:2], shape.kv_heads, -1, x.shape[-1]), 1, 3)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _flat(x: Array, positions: int) -> Array:
    """The inverse of `_grouped`, for this many positions."""
    x = jnp.moveaxis(x.reshape(*x.shape[:2], -1, positions, x.shape[-1]), 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _by_head(x: Array) -> Array:
    """[B, M, kv_heads, head_size] -> [B, kv_heads, M, head_size]."""
    return jnp.moveaxis(x, 2, 1)


def _parts(queries: tuple[Array, ...]) -> tuple[Array, ...]:
    """The slots [S] and arrays [B, S, ...] as [parts, ..., `QUERIES`, ...]; what fills the last is cut off again."""
    length = len(queries[0])
    size = min(QUERIES, length)
    parts = -(-length // size)

    def split(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, parts * size - length) if i == axis else (0, 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :]), axis, 0)

    return split(queries[0], 0), *(split(x, 1) for x in queries[1:])


def _joined(parts: Any, length: int) -> Any:
    """[parts, B, size, ...] -> [B, length, ...], of each array."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, parts)
