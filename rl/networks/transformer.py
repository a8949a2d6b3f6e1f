"""A causal transformer over vectors: the trunk of language models, and of any agent that reads a sequence.

One block covers the LLaMA family (RMSNorm, rotary positions, grouped queries, SwiGLU; Touvron et al. 2023), Gemma
(GeGLU, and in its second version norms after branches and soft caps; Riviere et al. 2024) and GPT-2 (LayerNorm, GELU;
Radford et al. 2019). Layers may differ in how far they see, and in whether they know positions. What goes in are
embeddings, what comes out are normalised features; tokens, vocabularies and value heads are not known here.

Blocks are stacked: every parameter of ``params["blocks"]`` has a leading axis of layers, and one compiled block is
scanned over it. The first ``n`` layers alone are ``jax.tree.map(lambda x: x[:n], params["blocks"])``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rl.networks.base import Network, from_linen
from rl.networks.layers import MLP, Architecture, row_product
from rl.types import Array, Key, Params

# Queries that attend at a time: what holds scores grows with this times the length, not with its square.
QUERIES = 128
ADAPTER = "_lora"  # after a dense layer's name: what `rl.language.adapters` adds to it, where it is there
_ATTENDED = "attended"
# query [B, S, heads, head_size], key and value [B, M, kv_heads, head_size] -> [B, S, heads, head_size]
Attend = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021), the two halves of a head rotated against each other."""

    base: float = 10_000.0
    # The stretch to longer contexts. Pairs that turn less than `low` times within `original` positions turn `factor`
    # times as slowly, those that turn more than `high` times stay, and between them it is blended in.
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    # Blended by turns (llama3: Llama 3.1), by the number of the pair (yarn: Peng et al. 2024, formula 13), or all is
    # stretched (linear: Chen et al. 2023).
    kind: str = "llama3"
    whole: bool = True  # yarn: the blend begins and ends at whole pairs
    gain: float = 1.0  # yarn: of rotated queries and keys


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that decides a trunk's parameters and arithmetic."""

    width: int  # D
    layers: int
    heads: int
    kv_heads: int  # key and value heads; each serves heads / kv_heads queries
    head_size: int
    inner: int  # width inside the feed-forward layers
    rms: bool = True  # RMSNorm; False: LayerNorm with bias
    gated: bool = True  # SwiGLU; False: GELU (its tanh approximation)
    rope: Rope | None = Rope()
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output
    inner_bias: bool = False  # of the feed-forward layers
    qk_norm: bool = False  # RMSNorm of each head's query and key (Qwen3)
    epsilon: float = 1e-5  # of the norms
    geglu: bool = False  # gated by GELU, in its tanh approximation, in place of SiLU
    post_norms: bool = False  # a norm of what each branch adds, too
    query_size: float | None = None  # scores are divided by its root; None: head_size
    score_cap: float = 0.0  # scores s become cap * tanh(s / cap); 0: they stay
    window: int = 0  # positions that attention reaches, its own the first; 0: all before it
    global_layers: tuple[int, ...] = ()  # that have no window
    nope_layers: tuple[int, ...] = ()  # that rotate nothing (NoPE; Kazemnejad et al. 2023)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.rope and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.head_size}")
        for name in ("global_layers", "nope_layers"):
            if not all(0 <= layer < self.layers for layer in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: there are {self.layers} layers, from 0 on")


class Cache(NamedTuple):
    """Keys and values of the ``M`` slots that a sequence may fill."""

    key: Array  # [layers, B, M, kv_heads, head_size]
    value: Array  # the same
    segment: Array  # [B, M] int32, 0 where nothing is, or padding
    used: Array  # [] int32, slots filled


class Trunk(NamedTuple):
    """The transformer as pure functions. ``segment`` says what may attend to what: equal numbers may."""

    shape: Shape
    init: Callable[[Key], Params]
    # params, x [B, S, D], position [B, S], segment [B, S] -> features [B, S, D]
    apply: Callable[[Params, Array, Array, Array], Array]
    cache: Callable[[int, int], Cache]  # (B, M) -> an empty one
    # As `apply`, for the S positions that follow those in the cache -> features, and the cache with them.
    extend: Callable[[Params, Array, Array, Array, Cache], tuple[Array, Cache]]
    # As `extend`, for what every block leaves on the residual path [layers, B, S, D].
    residuals: Callable[[Params, Array, Array, Array, Cache], tuple[Array, Cache]]


def trunk(shape: Shape, dtype: Any = jnp.float32, remat: bool = False) -> Trunk:
    """The transformer of ``shape``; its parameters are float32.

    Args:
      shape: see `Shape`.
      dtype: of the arithmetic, `jnp.bfloat16` for instance; norms' statistics and softmax stay float32.
      remat: recompute each block in the backward pass: memory for one block's activations and one vector per token
        and layer, for a third more arithmetic. Otherwise the outputs of dense layers and of attention are kept, and
        only what is cheap is computed again: norms, activations, and the scores of attention.
    """
    block, norm = from_linen(_Block(shape, dtype)), from_linen(_norm(shape, dtype))

    def init(key: Key) -> Params:
        x, position = jnp.zeros((1, 1, shape.width)), jnp.zeros((1, 1), jnp.int32)
        inputs = (x, rotations(shape, position), lambda query, key, value: query)
        keys = jax.random.split(key, shape.layers)
        return {
            "blocks": jax.vmap(lambda k: block.init(k, *inputs))(keys),
            "norm": norm.init(key, x),
        }

    def apply(params: Params, x: Array, position: Array, segment: Array) -> Array:
        rotation = rotations(shape, position)

        def layer(x: Array, inputs: tuple[Params, _Layer]) -> tuple[Array, None]:
            p, setting = inputs
            attend = functools.partial(_causal, shape, setting.reach, segment)
            return block.apply(p, x, _where(setting.rotates, rotation), attend)[0], None

        saved = None if remat else _saveable
        layer = jax.checkpoint(layer, prevent_cse=False, policy=saved)
        x, _ = jax.lax.scan(layer, x.astype(dtype), (params["blocks"], _layers(shape)))
        return norm.apply(params["norm"], x)

    def cache(rows: int, slots: int) -> Cache:
        held = jnp.zeros((shape.layers, rows, slots, shape.kv_heads, shape.head_size), dtype)
        return Cache(held, held, jnp.zeros((rows, slots), jnp.int32), jnp.zeros((), jnp.int32))

    def through(
        every: bool, params: Params, x: Array, position: Array, segment: Array, cache: Cache
    ) -> tuple[Array, Any, Cache]:
        rotation = rotations(shape, position)
        segments = jax.lax.dynamic_update_slice(cache.segment, segment, (0, cache.used))
        slot = cache.used + jnp.arange(x.shape[1])

        def layer(carry, inputs):
            x, key, value = carry
            p, setting, index = inputs
            attend = functools.partial(_attention, shape, _Mask(setting.reach, slot, segment, segments))
            turned = _where(setting.rotates, rotation)
            x, (key, value) = block.apply(p, x, turned, attend, (key, value, index, cache.used))
            return (x, key, value), x if every else None

        start = (x.astype(dtype), cache.key, cache.value)
        inputs = params["blocks"], _layers(shape), jnp.arange(shape.layers)
        (x, key, value), residuals = jax.lax.scan(layer, start, inputs)
        return x, residuals, Cache(key, value, segments, cache.used + x.shape[1])

    def extend(params: Params, *args: Any) -> tuple[Array, Cache]:
        x, _, held = through(False, params, *args)
        return norm.apply(params["norm"], x), held

    def residuals(params: Params, *args: Any) -> tuple[Array, Cache]:
        _, stacked, held = through(True, params, *args)
        return stacked, held

    return Trunk(shape, init, apply, cache, extend, residuals)


def history(hidden: Sequence[int], architecture: Architecture) -> Network:
    """The last ``T`` observations [..., T, D] -> features [..., W] of the last one.

    A network with memory, as in deep transformer Q-networks (Esslinger et al. 2022), of the blocks that language
    models have: one for each of ``hidden``, which all are the trunk's width ``W``.

    Raises:
      ValueError: ``hidden`` are not equal multiples of 8.
    """
    width = hidden[0] if hidden else 0
    if not width or width % 8 or set(hidden) != {width}:
        raise ValueError(f"hidden={tuple(hidden)}: a transformer has blocks of one width, a multiple of 8")
    heads = 4
    body = trunk(Shape(width, len(hidden), heads, heads, width // heads, 2 * width))
    into = from_linen(MLP((), width, architecture=architecture, last=width**-0.5))

    def init(key: Key, history: Array) -> Params:
        keys = jax.random.split(key)
        return {"into": into.init(keys[0], history), "trunk": body.init(keys[1])}

    def apply(params: Params, history: Array) -> Array:
        batch, length = history.shape[:-2], history.shape[-2]
        x = into.apply(params["into"], history).reshape(-1, length, width)
        position = jnp.broadcast_to(jnp.arange(length), x.shape[:2])
        features = body.apply(params["trunk"], x, position, jnp.ones_like(position))[:, -1]
        return features.reshape(*batch, width)

    return Network(init, apply)


def positions(segment: Array) -> Array:
    """Positions [B, T] counted from 0 in every run of equal numbers in ``segment`` [B, T]."""
    index = jnp.arange(segment.shape[1])
    first = jnp.diff(segment, axis=1, prepend=-1) != 0
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def rotations(shape: Shape, position: Array) -> tuple[Array, Array] | None:
    """Cosines and sines [B, S, 1, head_size / 2] float32 of the angles at ``position`` [B, S]; None without `Rope`."""
    rope = shape.rope
    if rope is None:
        return None
    half = shape.head_size // 2
    frequency = rope.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if rope.factor != 1.0:
        keep = _stretch(rope, frequency)
        frequency = frequency * (keep + (1 - keep) / rope.factor)
    angle = position[..., None, None].astype(jnp.float32) * frequency
    if rope.gain == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return rope.gain * jnp.cos(angle), rope.gain * jnp.sin(angle)


def _stretch(rope: Rope, frequency: Array) -> Array | float:
    """How much of each pair's ``frequency`` [head_size / 2] a stretch leaves as it is, from 0 to 1."""
    if rope.kind == "linear":
        return 0.0
    if rope.kind == "llama3":
        turns = rope.original * frequency / (2 * math.pi)  # of each pair within the original context
        return jnp.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
    pairs = len(frequency)
    # The pair, in between two as a rule, that turns so often within the original context.
    first, last = (
        pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.base)
        for turns in (rope.high, rope.low)
    )
    if rope.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last if last != first else first + 1e-3
    return 1 - jnp.clip((jnp.arange(pairs) - first) / (last - first), 0.0, 1.0)


class _Layer(NamedTuple):
    """What layers may differ in, [layers] each; None where they are alike."""

    reach: Any  # int32, positions that attention reaches
    rotates: Any  # bool


def _layers(shape: Shape) -> _Layer:
    layers = range(shape.layers)
    reach = [2**30 if n in shape.global_layers else shape.window for n in layers] if shape.window else None
    rotates = [n not in shape.nope_layers for n in layers] if shape.nope_layers and shape.rope else None
    return _Layer(
        None if reach is None else jnp.array(reach, jnp.int32),
        None if rotates is None else jnp.array(rotates),
    )


def _where(rotates: Array | None, rotation: tuple[Array, Array] | None) -> tuple[Array, Array] | None:
    """The rotation where a layer rotates, else none at all."""
    if rotates is None or rotation is None:
        return rotation
    return jnp.where(rotates, rotation[0], 1.0), jnp.where(rotates, rotation[1], 0.0)


def _rotate(x: Array, rotation: tuple[Array, Array] | None) -> Array:
    if rotation is None:
        return x
    cosine, sine = rotation
    one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], -1).astype(x.dtype)


def _norm(shape: Shape, dtype: Any, name: str | None = None) -> nn.Module:
    make = nn.RMSNorm if shape.rms else nn.LayerNorm
    return make(epsilon=shape.epsilon, dtype=dtype, name=name)


def _saveable(primitive: Any, *inputs: Any, **settings: Any) -> bool:
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


def _causal(
    shape: Shape, reach: Array | None, segment: Array, query: Array, key: Array, value: Array
) -> Array:
    """Attention of all positions to those before them, in memory linear in their number.

    Where cuDNN can (`_in_cudnn`), it does rows that hold one text each.
    """

    def parts(query: Array, key: Array, value: Array) -> Array:
        attended = []
        for first, start, end in _groups(shape, query.shape[1]):
            queries, keys = jnp.s_[:, start:end], jnp.s_[:, first:end]
            mask = _Mask(reach, jnp.arange(start, end) - first, segment[queries], segment[keys])
            attended.append(_attention(shape, mask, query[queries], key[keys], value[keys]))
        return jnp.concatenate(attended, 1)

    if not _in_cudnn(shape, query.dtype, query.shape[1]):
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


def _groups(shape: Shape, length: int) -> list[tuple[int, int, int]]:
    """(first key, first query, end of both) of groups of queries, each of which meets the keys that it may see.

    Without a window, four groups meet 5/8 of all pairs; many would meet half, but each is a program of its own.
    """
    size = QUERIES * math.ceil(length / (4 * QUERIES))
    before = length if shape.global_layers or not shape.window else shape.window - 1
    return [(max(start - before, 0), start, min(start + size, length)) for start in range(0, length, size)]


def _in_cudnn(shape: Shape, dtype: Any, length: int) -> bool:
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


class _Mask(NamedTuple):
    """Which of M keys S queries see: of their own text, those up to their own place."""

    reach: Array | None  # how far back attention goes, if not everywhere
    slot: Array  # [S], of the queries among the keys
    segment: Array  # [B, S], of the queries
    segments: Array  # [B, M], of the keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(shape: Shape, mask: _Mask, query: Array, key: Array, value: Array) -> Array:
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
    return _attention_forward(shape, mask, query, key, value)[0]


def _attention_forward(
    shape: Shape, mask: _Mask, query: Array, key: Array, value: Array
) -> tuple[Array, tuple[Any, ...]]:
    """`_attention`, and what its backward pass needs."""
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


def _attention_backward(shape: Shape, kept: tuple[Any, ...], slope: Array) -> tuple[Array | None, ...]:
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


_attention.defvjp(_attention_forward, _attention_backward)


def _scores(shape: Shape, mask: _Mask, query: Array, key: Array) -> tuple[Array, Array | float]:
    """Scores [B, kv_heads, groups S, M], the lowest number where a query does not see; their slope by query times key.

    Args:
      shape, mask: as for `_attention`.
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


class _Block(nn.Module):
    """Attention, then the feed-forward layers, each on a residual path."""

    shape: Shape
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Array, rotation, attend: Attend, held=None
    ) -> tuple[Array, tuple[Array, Array] | None]:
        s = self.shape
        residual = 0.02 / math.sqrt(2 * s.layers)  # GPT-2: the sum of all branches has the scale of one

        def dense(x: Array, name: str, size: int, bias: bool, scale: float = 0.02) -> Array:
            init = nn.initializers.normal(scale)
            layer = nn.Dense(size, bias, self.dtype, kernel_init=init, dot_general=row_product, name=name)
            y = layer(x)
            adapter: Any = self.get_variable("params", name + ADAPTER)
            if adapter is None:
                return y
            a, b = adapter["a"].astype(y.dtype), adapter["b"].astype(y.dtype)
            return y + row_product(row_product(x.astype(y.dtype), a), b)

        def heads(x: Array, name: str, count: int) -> Array:
            y = dense(x, name, count * s.head_size, s.qkv_bias)
            return y.reshape(*y.shape[:-1], count, s.head_size)

        def after(name: str, y: Array) -> Array:
            return _norm(s, self.dtype, name)(y) if s.post_norms else y

        h = _norm(s, self.dtype, "attention_norm")(x)
        query, key, value = (
            heads(h, "query", s.heads),
            heads(h, "key", s.kv_heads),
            heads(h, "value", s.kv_heads),
        )
        if s.qk_norm:
            query, key = _norm(s, self.dtype, "query_norm")(query), _norm(s, self.dtype, "key_norm")(key)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        if held is not None:
            key, value, held = _hold(key, value, *held)
        attended = attend(query, key, value).reshape(*x.shape[:-1], -1)
        x = x + after("out_norm", dense(attended, "out", s.width, s.out_bias, residual))

        h = _norm(s, self.dtype, "inner_norm")(x)
        up = dense(h, "up", s.inner, s.inner_bias)
        gate = nn.gelu if s.geglu else nn.silu
        h = gate(dense(h, "gate", s.inner, s.inner_bias)) * up if s.gated else nn.gelu(up)
        return x + after("down_norm", dense(h, "down", s.width, s.inner_bias, residual)), held


def _hold(
    key: Array, value: Array, keys: Array, values: Array, layer: Array, used: Array
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Writes one layer's new keys and values into all layers' cache; returns the layer's, and the cache."""

    def write(all_layers: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(all_layers, new[None], (layer, 0, used, 0, 0))

    keys, values = write(keys, key), write(values, value)
    return keys[layer], values[layer], (keys, values)
