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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rl.networks import attention
from rl.networks.base import Network, from_linen
from rl.networks.layers import MLP, Architecture, row_product
from rl.networks.rotary import ROPE, Rope, rotate, rotations
from rl.types import Array, Key, Params

ADAPTER = "_lora"  # after a dense layer's name: what `rl.language.adapters` adds to it, where it is there
# query [B, S, heads, head_size], key and value [B, M, kv_heads, head_size] -> [B, S, heads, head_size]
Attend = Callable[[Array, Array, Array], Array]


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
    rope: Rope | None = ROPE
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
    # As `apply`, for the S positions that follow those in the cache -> features, and the cache with them. Compiled code
    # cannot tell that a cache is full: more than M positions overwrite the last ones.
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
        inputs = (x, rotations(shape.rope, shape.head_size, position), lambda query, key, value: query)
        keys = jax.random.split(key, shape.layers)
        return {
            "blocks": jax.vmap(lambda k: block.init(k, *inputs))(keys),
            "norm": norm.init(key, x),
        }

    def apply(params: Params, x: Array, position: Array, segment: Array) -> Array:
        rotation = rotations(shape.rope, shape.head_size, position)

        def layer(x: Array, inputs: tuple[Params, _Layer]) -> tuple[Array, None]:
            p, setting = inputs
            attend = functools.partial(attention.causal, shape, setting.reach, segment)
            return block.apply(p, x, _where(setting.rotates, rotation), attend)[0], None

        saved = None if remat else attention.saveable
        layer = jax.checkpoint(layer, prevent_cse=False, policy=saved)
        x, _ = jax.lax.scan(layer, x.astype(dtype), (params["blocks"], _layers(shape)))
        return norm.apply(params["norm"], x)

    def cache(rows: int, slots: int) -> Cache:
        held = jnp.zeros((shape.layers, rows, slots, shape.kv_heads, shape.head_size), dtype)
        return Cache(held, held, jnp.zeros((rows, slots), jnp.int32), jnp.zeros((), jnp.int32))

    def through(
        every: bool, params: Params, x: Array, position: Array, segment: Array, cache: Cache
    ) -> tuple[Array, Any, Cache]:
        rotation = rotations(shape.rope, shape.head_size, position)
        segments = jax.lax.dynamic_update_slice(cache.segment, segment, (0, cache.used))
        slot = cache.used + jnp.arange(x.shape[1])

        def layer(carry, inputs):
            x, key, value = carry
            p, setting, index = inputs
            attend = functools.partial(
                attention.masked, shape, attention.Mask(setting.reach, slot, segment, segments)
            )
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


def _norm(shape: Shape, dtype: Any, name: str | None = None) -> nn.Module:
    make = nn.RMSNorm if shape.rms else nn.LayerNorm
    return make(epsilon=shape.epsilon, dtype=dtype, name=name)


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
        query, key = rotate(query, rotation), rotate(key, rotation)
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
