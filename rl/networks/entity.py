"""The entity interaction transformer: networks over sets of entities, each a vector, and sets of goal entities.

ECRL (Haramati, Daniel & Tamar 2024) and HECRL (2026). The inputs are ``N`` entities [..., N, F] (the agent, each
object), and ``M`` goal entities [..., M, F] as they should be. Entities attend to each other, to goal entities, and to
each other again; an output token that attends to all of them is what values and policies read. No network knows an
order or a number of entities: values and actions do not change under a permutation of entities or goal entities,
subgoals are permuted with the entities, and more entities than in training are no other program but for its shapes.

Which entity should become which goal entity, their features must say: `with_ids` gives each one a one-hot id, drawn at
random from more slots than there are entities, so that the slots of further entities have been seen, too.

The action enters a critic through the norms of all its blocks (adaptive layer norm, Peebles & Xie 2023), whose shifts,
scales and gates are linear in it and start at 0: blocks then start as the identity. In the authors' code of the
denoiser an initialisation of all layers comes after that of the norms, and undoes it; here each layer has its own.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from rl.networks.base import Network, from_linen
from rl.networks.diffusion import TimeEmbedding
from rl.networks.layers import MLP, Architecture, dense_product, row_product
from rl.types import Array, Key, Params

GELU = Architecture(activation="gelu")  # of embeddings and decoders, which start as PyTorch's
NORM_AFTER = Architecture(activation="gelu", norm_after=True)  # of the critic's decoder
_small = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of all entity networks; defaults are those of HECRL."""

    width: int = 64  # W, of an entity's features
    inner: int = 256  # of hidden layers: embeddings, feed-forward layers and decoders
    heads: int = 8  # of attention
    layers: int = 8  # blocks of the denoiser

    def __post_init__(self) -> None:
        if min(self.width, self.inner, self.heads, self.layers) < 1 or self.width % self.heads:
            raise ValueError(
                f"network.width={self.width} must be a multiple of network.heads={self.heads}, and all widths positive"
            )


# ---- entities ---------------------------------------------------------------------------------------------


def with_ids(entities: Array, ids: Array, slots: int) -> Array:
    """Entities [..., N, F] with the one-hot ids [..., N] int32 behind their features, [..., N, F + slots].

    Raises:
      ValueError: there are more entities than slots.
    """
    require_ids(entities.shape[-2], slots)
    one_hot = jax.nn.one_hot(ids, slots, dtype=entities.dtype)
    one_hot = jnp.broadcast_to(one_hot, (*entities.shape[:-1], slots))
    return jnp.concatenate([entities, one_hot], -1)


def random_ids(key: Key, count: int, slots: int, fixed: int = 1) -> Array:
    """Ids [count] int32, all different: the first ``fixed`` entities have 0, 1, ..., the others random ones.

    In HECRL the agent is the first entity, and each episode draws the ids of its objects anew.

    Raises:
      ValueError: there are more entities than slots.
    """
    require_ids(count, slots)
    drawn = fixed + jax.random.permutation(key, slots - fixed)[: count - fixed]
    return jnp.concatenate([jnp.arange(fixed), drawn])[:count].astype(jnp.int32)


def chamfer(entities: Array, others: Array) -> Array:
    """How far two sets are apart, [...], of entities [..., N, F] and [..., M, F], in whatever order.

    The mean absolute difference of each entity from the one of the other set that is nearest to it; the mean over the
    first set plus that over the second. HECRL's error of regressed subgoals where entities are particles without ids,
    but for a factor: its code sums over features, and takes the mean of both directions.
    """
    distance = jnp.abs(entities[..., :, None, :] - others[..., None, :, :]).mean(-1)
    return distance.min(-1).mean(-1) + distance.min(-2).mean(-1)


def require_ids(count: int, slots: int) -> None:
    """Raises ValueError if ``count`` entities cannot all have an id of their own."""
    if count > slots:
        raise ValueError(
            f"{count} entities, but ids for {slots} only: give entities more id slots when the data are made, or "
            "fewer objects at test time"
        )


# ---- networks ---------------------------------------------------------------------------------------------


def state_value(outputs: int, shape: Shape = Shape()) -> Network:
    """V: (entities [..., N, F], goal entities [..., M, F]) -> head outputs [..., K]."""
    return from_linen(Interaction(shape, outputs))


def critic(outputs: int, shape: Shape = Shape()) -> Network:
    """Q: (entities [..., N, F], goal entities [..., M, F], action [..., D]) -> head outputs [..., K].

    Actions may have more leading axes than entities: several actions at each.
    """
    return from_linen(Interaction(shape, outputs, layer_norm=True))


def deterministic_policy(action_size: int, shape: Shape = Shape()) -> Network:
    """(entities [..., N, F], goal entities [..., M, F]) -> action [..., D] in (-1, 1)."""
    body = from_linen(Interaction(shape, action_size))
    return Network(body.init, lambda params, entities, goal: jnp.tanh(body.apply(params, entities, goal)))


def regressor(features: int, shape: Shape = Shape()) -> Network:
    """(entities [..., N, F], goal entities [..., M, F]) -> as many entities [..., N, F]: one subgoal, as a mean."""
    return from_linen(Interaction(shape, features, pooled=False))


def denoiser(features: int, shape: Shape = Shape()) -> Network:
    """(noisy [..., N, F], time [...], entities [..., N, F], goal entities [..., M, F]) -> prediction [..., N, F].

    A diffusion model's network (`rl.networks.diffusion`) for entities of a subgoal, between where they are and where
    they should be. All three sets attend to each other in every block, which the time modulates; each set has an
    embedding of its own, and of the last two nothing is predicted. Leading axes broadcast: several noisy sets
    for one pair, one time for all.
    """
    embed = from_linen(MLP((shape.inner,), shape.width, architecture=GELU))
    clock = from_linen(TimeEmbedding(shape.width))
    block = from_linen(Block(shape.heads, (4 * shape.width,)))
    decode = from_linen(_Decoder(shape, features))

    def init(key: Key, noisy: Array, time: Array, entities: Array, goal: Array) -> Params:
        del time, goal
        keys = jax.random.split(key, 5)
        x, condition = jnp.zeros((noisy.shape[-2], shape.width)), jnp.zeros(shape.width)
        return {
            "embed": embed.init(keys[0], entities),
            "time": clock.init(keys[1], jnp.zeros(())),
            "sets": _small(keys[2], (3, shape.width)),
            "blocks": jax.vmap(lambda k: block.init(k, x, None, condition))(
                jax.random.split(keys[3], shape.layers)
            ),
            "decode": decode.init(keys[4], x, condition),
        }

    def apply(params: Params, noisy: Array, time: Array, entities: Array, goal: Array) -> Array:
        condition = clock.apply(params["time"], time)
        sets = [
            embed.apply(params["embed"], x) + which
            for x, which in zip((noisy, entities, goal), params["sets"], strict=True)
        ]
        leading = jnp.broadcast_shapes(*(x.shape[:-2] for x in sets), condition.shape[:-1])
        x = jnp.concatenate([jnp.broadcast_to(x, leading + x.shape[-2:]) for x in sets], -2)
        x, _ = jax.lax.scan(
            lambda x, p: (block.apply(p, x, None, condition), None),
            x + condition[..., None, :],
            params["blocks"],
            unroll=True,  # the gradient takes less than half as long on a CPU as that of a loop
        )
        return decode.apply(params["decode"], x[..., : noisy.shape[-2], :], condition)

    return Network(init, apply)


class AdaptiveNorm(nn.Module):
    """LayerNorm of x [..., N, W], and the gate [..., N, W] of the layers behind it.

    Without a condition, scale and shift are learned and the gate is 1. With one, [..., W], all three are linear in it
    and start at scale 1, shift 0 and gate 0 (adaLN-Zero, Peebles & Xie 2023).
    """

    gated: bool = True  # False: the gate is 1

    @nn.compact
    def __call__(self, x: Array, condition: Array | None) -> tuple[Array, Array | float]:
        if condition is None:
            return nn.LayerNorm(epsilon=1e-6)(x), 1.0
        zeros = nn.initializers.zeros_init()
        parts = 3 if self.gated else 2
        linear = nn.Dense(parts * x.shape[-1], kernel_init=zeros, dot_general=dense_product)(condition)
        # One copy for each entity, not an axis of length 1: its gradient is a sum of slices then. The reduction over
        # so short an axis that broadcasting leaves took a third of HECRL's updates on a CPU with three entities.
        shift, scale, *gate = jnp.split(jnp.stack([linear] * x.shape[-2], -2), parts, -1)
        norm = nn.LayerNorm(epsilon=1e-6, use_bias=False, use_scale=False)
        return norm(x) * (1 + scale) + shift, gate[0] if gate else 1.0


class Attention(nn.Module):
    """Queries of x [..., N, W], keys and values of ``context`` [..., M, W] -> [..., N, W]; leading axes broadcast."""

    heads: int

    @nn.compact
    def __call__(self, x: Array, context: Array) -> Array:
        width = x.shape[-1]

        def heads(name: str, x: Array) -> Array:
            y = _dense(width, bias=False, name=name)(x)
            return y.reshape(*y.shape[:-1], self.heads, width // self.heads)

        query, key, value = heads("query", x), heads("key", context), heads("value", context)
        scores = jnp.einsum("...nhd,...mhd->...hnm", query, key) / (width // self.heads) ** 0.5
        attended = jnp.einsum("...hnm,...mhd->...nhd", jax.nn.softmax(scores), value)
        return _dense(width, bias=False, name="out")(attended.reshape(*attended.shape[:-2], width))


class Block(nn.Module):
    """Attention, then feed-forward layers of widths ``inner``, each on a residual path behind its norm."""

    heads: int
    inner: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Array, context: Array | None = None, condition: Array | None = None) -> Array:
        """x [..., N, W] attends to ``context`` [..., M, W], or to itself; of ``condition`` see `AdaptiveNorm`."""
        y, gate = AdaptiveNorm(name="attention_norm")(x, condition)
        context = y if context is None else nn.LayerNorm(epsilon=1e-6, name="context_norm")(context)
        x = x + gate * Attention(self.heads, name="attention")(y, context)
        y, gate = AdaptiveNorm(name="inner_norm")(x, condition)
        for i, width in enumerate(self.inner):
            y = nn.gelu(_dense(width, name=f"inner_{i}")(y))
        return x + gate * _dense(x.shape[-1], name="inner_out")(y)


class Interaction(nn.Module):
    """Entities, goal entities, and perhaps an action -> outputs [..., K] of all, or [..., N, K] of each entity.

    Self-attention, attention to goal entities, self-attention; then an output token that attends to the entities, or
    if not ``pooled`` self-attention once more, and a decoder of three hidden layers.
    """

    shape: Shape
    outputs: int
    pooled: bool = True
    layer_norm: bool = False  # in the decoder, after each activation

    @nn.compact
    def __call__(self, entities: Array, goal: Array, action: Array | None = None) -> Array:
        s = self.shape
        block = lambda name: Block(s.heads, (s.inner, s.inner), name=name)
        embed = MLP((s.inner,), s.width, layer_norm=True, architecture=GELU, name="embed")
        x, g = embed(entities), embed(goal)
        c = None
        if action is not None:
            c = MLP((s.inner,), s.width, architecture=GELU, name="action")(action)
        x = block("self_0")(x, condition=c)
        x = block("goal")(x, g, c)
        x = block("self_1")(x, condition=c)
        if self.pooled:
            token = self.param("token", _small, (1, s.width))
            x = block("pool")(token, x, c)
        else:
            x = block("self_2")(x, condition=c)
        x, _ = AdaptiveNorm(gated=False, name="norm")(x, c)
        x = x[..., 0, :] if self.pooled else x
        return MLP((s.inner,) * 3, self.outputs, self.layer_norm, NORM_AFTER, name="decode")(x)


class _Decoder(nn.Module):
    """x [..., N, W], condition [..., W] -> [..., N, outputs]."""

    shape: Shape
    outputs: int

    @nn.compact
    def __call__(self, x: Array, condition: Array) -> Array:
        x = _dense(self.shape.width, bias=False, name="head")(
            AdaptiveNorm(gated=False, name="norm")(x, condition)[0]
        )
        return MLP((self.shape.inner,), self.outputs, architecture=GELU, name="decode")(x)


def _dense(width: int, *, bias: bool = True, name: str) -> nn.Dense:
    """Of blocks, which start small. Call it in a compact module only."""
    return nn.Dense(width, bias, kernel_init=_small, dot_general=row_product, name=name)
