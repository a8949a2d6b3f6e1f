"""Networks that choose one token after another, each given a context of what was chosen before it (ARSQ).

In training all contexts are known, and all tokens are computed side by side. When acting, `Autoregressive.step`
computes one token, and of the output layer only that token's block. The observation enters once in both: the first
layer's product with its features is shared by all tokens, which see it beside their contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rl.networks import mlp
from rl.networks.base import Network, from_linen
from rl.networks.layers import DEFAULT, MLP, Architecture, dense_product, hidden_units
from rl.types import Array, Key, Params, Spec


class Autoregressive(NamedTuple):
    """Outputs [..., T, B] of ``T`` tokens with ``B`` choices each, given contexts in R^D."""

    init: Callable[[Key, Array], Params]  # key, example features [..., F]
    begin: Callable[[Params, Array], Array]  # params, features [..., F] -> what all steps share
    # params, what `begin` returned, contexts [..., T, D] -> [..., T, B]; contexts may have more leading axes
    every: Callable[[Params, Array, Array], Array]
    # params, what `begin` returned, context [..., D], which token [] -> [..., B]
    step: Callable[[Params, Array, Array, Array], Array]


def autoregressive(
    trunks: np.ndarray,
    size: int,
    choices: int,
    hidden: Sequence[int],
    layer_norm: bool = False,
    architecture: Architecture = DEFAULT,
) -> Autoregressive:
    """Dense layers on features and context, whose last has one block of ``B`` outputs for each token.

    Args:
      trunks: [T], which trunk each token's block is the output of, from 0; all have equally many tokens.
      size: ``D``, that of a context.
      choices: ``B``.
      hidden: widths of a trunk's layers, at least one.
      layer_norm: before or after each activation, as the architecture says.
      architecture: activation, initialiser and residual connections, those of `rl.networks.layers.MLP`; but a first
        layer of the width of its input, features and context together, has that not added to it.

    Raises:
      ValueError: no hidden layer.
    """
    if not hidden:
        raise ValueError(
            "hidden=() leaves no layer in which a context could meet an observation: give widths"
        )
    count = int(trunks.max()) + 1
    blocks = len(trunks) // count  # of a trunk
    order = np.argsort(trunks, kind="stable")  # tokens, trunk by trunk
    place = np.argsort(order)
    trunk_of, block_of = (jnp.asarray(x, jnp.int32) for x in np.divmod(place, blocks))
    sorted_already = bool((order == np.arange(len(order))).all())
    norm = from_linen(nn.LayerNorm())
    body = from_linen(MLP(hidden, blocks * choices, layer_norm, architecture))

    def init(key: Key, features: Array) -> Params:
        x = jnp.zeros(features.shape[-1] + size)
        return jax.vmap(lambda k: body.init(k, x))(jax.random.split(key, count))

    def first(params: Params, features: Array) -> Array:
        """The part of one trunk's first layer that all its tokens share."""
        layer = params["Dense_0"]
        return dense_product(features, layer["kernel"][:-size], None) + layer["bias"]

    def normed(params: Params, layer: int, y: Array) -> Array:
        return norm.apply(params[f"LayerNorm_{layer}"], y) if layer_norm else y

    def last_hidden(params: Params, begun: Array, contexts: Array) -> Array:
        """One trunk but for its output layer, with the layers of its `rl.networks.layers.MLP`: [..., hidden]."""
        x = contexts
        for i in range(len(hidden)):
            layer = params[f"Dense_{i}"]
            if i == 0:
                y = begun + dense_product(x, layer["kernel"][-size:], None)
            else:
                y = dense_product(x, layer["kernel"], None) + layer["bias"]
            x = hidden_units(architecture, y, functools.partial(normed, params, i), x if i else None)
        return x

    def output(params: Params) -> tuple[Array, Array]:
        """The output layer's kernel [hidden, blocks, B] and bias [blocks, B]."""
        layer = params[f"Dense_{len(hidden)}"]
        return layer["kernel"].reshape(-1, blocks, choices), layer["bias"].reshape(blocks, choices)

    def begin(params: Params, features: Array) -> Array:
        return jax.vmap(first, (0, None))(params, features)

    def every(params: Params, begun: Array, contexts: Array) -> Array:
        def of_trunk(params: Params, begun: Array, contexts: Array) -> Array:
            kernel, bias = output(params)
            x = last_hidden(params, begun[..., None, :], contexts)
            return jnp.einsum("...mh,hmb->...mb", x, kernel) + bias

        x = contexts if sorted_already else contexts[..., order, :]
        x = x.reshape(*x.shape[:-2], count, blocks, size)
        u = jax.vmap(of_trunk, (0, 0, -3), -3)(params, begun, x)
        u = u.reshape(*u.shape[:-3], len(trunks), choices)
        return u if sorted_already else u[..., place, :]

    def step(params: Params, begun: Array, context: Array, token: Array) -> Array:
        trunk, block = trunk_of[token], block_of[token]
        params, begun = jax.tree.map(lambda x: x[trunk], (params, begun))
        kernel, bias = output(params)
        return last_hidden(params, begun, context) @ kernel[:, block] + bias[block]

    return Autoregressive(init, begin, every, step)


class SoftDueling(NamedTuple):
    """A state's value, and the outputs of all tokens of an action, by ``E`` members of one encoder each."""

    init: Callable[[Key, Any], Params]  # key, example observation [..., *observation]
    values: Callable[[Params, Any], Array]  # params, observation [..., *observation] -> [E, ..., K]
    # params, observation, contexts [..., T, D] -> values [E, ..., K] and outputs [E, ..., T, B]; contexts may have more
    # leading axes than observations
    both: Callable[[Params, Any, Array], tuple[Array, Array]]
    begin: Callable[[Params, Any], Array]  # params, observation -> what all steps share
    # params, what `begin` returned, context [..., D], which token [] -> [E, ..., B]
    step: Callable[[Params, Array, Array, Array], Array]


def soft_dueling(
    spec: Spec,
    outputs: int,
    trunks: np.ndarray,
    choices: int,
    hidden: Sequence[int],
    layer_norm: bool = False,
    architecture: Architecture = DEFAULT,
    members: int = 2,
) -> SoftDueling:
    """The networks of ARSQ: V with ``K`` outputs, and `autoregressive` advantages beside it.

    Vectors go into both as they are; of images, histories and dictionaries both take the features of one encoder,
    computed once per observation.

    Args:
      spec: of observations and the ``D`` dimensions of an action.
      outputs: ``K``, the size of V's value head.
      trunks: see `autoregressive`.
      choices: ``B``.
      hidden: widths of the layers of V and of a trunk; of a history they are the transformer's (`rl.networks.mlp`),
        and a trunk has the last of them.
      layer_norm: in V and trunks.
      architecture: of all.
      members: ``E``.
    """
    shape = spec.observation_shape
    encode = mlp.encoder(shape, hidden, architecture)
    value_hidden, trunk_hidden = (mlp.dense_widths(shape, hidden, joined=joined) for joined in (False, True))
    value = mlp.state_value(outputs, value_hidden, layer_norm, architecture)
    advantage = autoregressive(trunks, spec.action_size, choices, trunk_hidden, layer_norm, architecture)
    encode = (
        Network(lambda key, observation: {}, lambda params, observation: observation)
        if encode is None
        else encode
    )

    def features(params: Params, observation: Any) -> Array:
        return encode.apply(params["encoder"], observation)

    def init(key: Key, observation: Any) -> Params:
        def one(key: Key) -> Params:
            keys = jax.random.split(key, 3)
            encoder = encode.init(keys[0], observation)
            x = encode.apply(encoder, observation)
            return {
                "encoder": encoder,
                "value": value.init(keys[1], x),
                "advantage": advantage.init(keys[2], x),
            }

        return jax.vmap(one)(jax.random.split(key, members))

    def values(params: Params, observation: Any) -> Array:
        return jax.vmap(lambda p: value.apply(p["value"], features(p, observation)))(params)

    def both(params: Params, observation: Any, contexts: Array) -> tuple[Array, Array]:
        def one(p: Params) -> tuple[Array, Array]:
            x = features(p, observation)
            begun = advantage.begin(p["advantage"], x)
            return value.apply(p["value"], x), advantage.every(p["advantage"], begun, contexts)

        return jax.vmap(one)(params)

    def begin(params: Params, observation: Any) -> Array:
        return jax.vmap(lambda p: advantage.begin(p["advantage"], features(p, observation)))(params)

    def step(params: Params, begun: Array, context: Array, token: Array) -> Array:
        return jax.vmap(lambda p, b: advantage.step(p["advantage"], b, context, token))(params, begun)

    return SoftDueling(init, values, both, begin, step)
