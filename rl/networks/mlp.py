"""Networks for values, critics and policies: an encoder chosen by the observation's shape, then dense layers.

Vectors [O] go into the dense layers as they are, images [H, W, C] through convolutions, histories of vectors [T, O]
through a causal transformer, whose blocks have the widths ``hidden``; after it there are no further hidden layers,
but for one that joins an action to its features: it alone has the activation and LayerNorm of dense layers. Of a dict
each entry goes through the encoder for its own shape, and the dense layers, all of them, take the features of all
entries side by side, in the order of their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rl.networks import cnn, transformer
from rl.networks.base import Network, from_linen
from rl.networks.layers import DEFAULT, MLP, Architecture
from rl.types import Array, Key, Params, Spec

if TYPE_CHECKING:
    import distrax  # takes a third of the time in which a script starts: imported by what builds a distribution

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
VECTOR = Spec((0,), 0)  # of networks over vectors, of any size


def encoder(shape: Any, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network | None:
    """observation [..., *shape] -> features [..., F]; None for vectors, which are their own features.

    Raises:
      ValueError: there is none for observations of this shape, ``hidden`` does not fit a transformer, or, for
        histories alone, dropout, residual connections or a policy's LayerNorm are given, which a transformer does not
        have.
    """
    if _is_history(shape):
        for name in ("dropout", "policy_layer_norm", "residual"):
            _refuse_in_transformer(f"network.{name}", getattr(architecture, name))
    return _encoder(shape, hidden, architecture)


def _encoder(shape: Any, hidden: Sequence[int], architecture: Architecture) -> Network | None:
    """`encoder`, whatever dense layers follow it."""
    if isinstance(shape, Mapping):
        return _side_by_side({key: _encoder(shape[key], hidden, architecture) for key in sorted(shape)})
    rank = len(shape)
    if rank == 1:
        return None
    if rank == 2:
        return transformer.history(hidden, architecture)
    if rank == 3:
        module = {"nature": cnn.Nature, "impala": cnn.Impala}[architecture.encoder]
        return from_linen(module(architecture.initialiser))
    raise ValueError(
        f"there is no network for observations of shape {shape}: they must be vectors [O], histories [T, O] or "
        "images [H, W, C], or dictionaries of these"
    )


def dense_widths(shape: Any, hidden: Sequence[int], *, joined: bool) -> Sequence[int]:
    """Of ``hidden``, the widths of the dense layers that come after the `encoder` of observations of this shape.

    All but for histories, where ``hidden`` are the widths of the transformer's blocks: the last one, if another vector
    is ``joined`` to the features, else none.
    """
    if not _is_history(shape):
        return hidden
    return hidden[-1:] if joined else ()


def _is_history(shape: Any) -> bool:
    return not isinstance(shape, Mapping) and len(shape) == 2


def require_dense_layers(spec: Spec, architecture: Architecture) -> None:
    """Raises ValueError for settings of dense layers where a network of the observation alone reads histories.

    No dense layer follows its transformer, so that all values of such a setting would train the same network.
    """
    if _is_history(spec.observation_shape):
        for name in ("activation", "norm_after"):
            _refuse_in_transformer(f"network.{name}", getattr(architecture, name) != getattr(DEFAULT, name))


def _refuse_in_transformer(name: str, given: bool) -> None:
    if given:
        raise ValueError(
            f"{name} is of dense layers, and histories are read by a transformer, which has none: leave it out"
        )


def _side_by_side(encoders: Mapping[str, Network | None]) -> Network:
    """observation {key: [..., *shape]} -> the features [..., F] of all entries; vectors have no parameters."""

    def init(key: Key, observation: Any) -> Params:
        keys = dict(zip(encoders, jax.random.split(key, len(encoders)), strict=True))
        return {
            name: encode.init(keys[name], observation[name])
            for name, encode in encoders.items()
            if encode is not None
        }

    def apply(params: Params, observation: Any) -> Array:
        features = [
            observation[name] if encode is None else encode.apply(params[name], observation[name])
            for name, encode in encoders.items()
        ]
        return jnp.concatenate(features, -1)

    return Network(init, apply)


def _body(
    spec: Spec,
    outputs: int,
    hidden: Sequence[int],
    layer_norm: bool,
    architecture: Architecture,
    *,
    joined: bool = False,
    last: float = 3e-3,
    dropout: float = 0.0,
    gain: float = 1.0,
) -> Network:
    """(observation, and with ``joined`` a vector [..., J]) -> [..., outputs].

    The vector may have more leading axes than the observation, which is encoded once then.
    """
    init, conditioned = _conditional(
        spec, outputs, hidden, layer_norm, architecture, joined, last, dropout, gain
    )
    return Network(
        init,
        lambda params, observation, *vector, key=None: conditioned(params, observation, key=key)(*vector),
    )


def _conditional(
    spec: Spec,
    outputs: int,
    hidden: Sequence[int],
    layer_norm: bool,
    architecture: Architecture,
    joined: bool,
    last: float,
    dropout: float,
    gain: float = 1.0,
) -> Network:
    """observation -> a function of what `_body` takes beside it, to [..., outputs]."""
    shape = spec.observation_shape
    encode = encoder(shape, hidden, architecture)
    hidden = dense_widths(shape, hidden, joined=joined)
    dense = from_linen(MLP(hidden, outputs, layer_norm, architecture, last, dropout, gain))

    def join(features: Array, vector: tuple[Array, ...]) -> Array:
        if not joined:
            return features
        features = jnp.broadcast_to(features, vector[0].shape[:-1] + features.shape[-1:])
        return jnp.concatenate([features, *vector], -1)

    def init(key: Key, observation: Any, *vector: Array) -> Params:
        if encode is None:
            return dense.init(key, join(observation, vector))
        keys = jax.random.split(key)
        params = encode.init(keys[0], observation)
        features = encode.apply(params, observation)
        return {"encoder": params, "dense": dense.init(keys[1], join(features, vector))}

    def apply(params: Params, observation: Any, key: Key | None = None) -> Callable[..., Array]:
        if encode is None:
            features, dense_params = observation, params
        else:
            features, dense_params = encode.apply(params["encoder"], observation), params["dense"]
        return lambda *vector: dense.apply(dense_params, join(features, vector), key=key)

    return Network(init, apply)


def state_value(
    outputs: int,
    hidden: Sequence[int],
    layer_norm: bool = False,
    architecture: Architecture = DEFAULT,
    spec: Spec = VECTOR,
) -> Network:
    """V: observation -> head outputs [..., K]."""
    return _body(spec, outputs, hidden, layer_norm, architecture)


def action_values(
    spec: Spec,
    outputs: int,
    hidden: Sequence[int],
    layer_norm: bool = False,
    architecture: Architecture = DEFAULT,
) -> Network:
    """Q of every discrete action: observation -> head outputs [..., A, K].

    Raises:
      ValueError: as `encoder`; or ``layer_norm`` or an activation for histories, after which there is no dense layer.
    """
    require_dense_layers(spec, architecture)
    if _is_history(spec.observation_shape):
        _refuse_in_transformer("layer_norm", layer_norm)
    body = _body(spec, spec.action_size * outputs, hidden, layer_norm, architecture)

    def apply(params: Params, observation: Array) -> Array:
        flat = body.apply(params, observation)
        return flat.reshape((*flat.shape[:-1], spec.action_size, outputs))

    return Network(body.init, apply)


def critic(
    spec: Spec,
    outputs: int,
    hidden: Sequence[int],
    layer_norm: bool = False,
    architecture: Architecture = DEFAULT,
) -> Network:
    """Q: (observation, action) -> head outputs [..., K].

    A discrete action [...] int enters one-hot, a continuous one [..., D] as it is. Actions may have more leading axes
    than observations: several actions at each.
    """
    body = _body(spec, outputs, hidden, layer_norm, architecture, joined=True)

    def vector(action: Array) -> Array:
        return jax.nn.one_hot(action, spec.action_size) if spec.discrete else action

    return Network(
        init=lambda key, observation, action: body.init(key, observation, vector(action)),
        apply=lambda params, observation, action: body.apply(params, observation, vector(action)),
    )


def _policy(
    spec: Spec, outputs: int, hidden: Sequence[int], architecture: Architecture, gain: float = 1.0
) -> Network:
    a = architecture
    return _body(spec, outputs, hidden, a.policy_layer_norm, a, last=1e-3, dropout=a.dropout, gain=gain)


def conditional_policy(
    spec: Spec, outputs: int, hidden: Sequence[int], architecture: Architecture = DEFAULT
) -> Network:
    """observation -> a function of vectors [..., J], to [..., outputs] without bounds; ``init`` takes both.

    The observation is encoded once, however often the function is called (`rl.networks.flow`). Vectors may have more
    leading axes than the observation: several at each.
    """
    a = architecture
    return _conditional(spec, outputs, hidden, a.policy_layer_norm, a, True, 1e-3, a.dropout)


def deterministic_policy(spec: Spec, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network:
    """observation -> action [..., D] in (-1, 1)."""
    body = _policy(spec, spec.action_size, hidden, architecture)

    def apply(params: Params, observation: Array, key: Key | None = None) -> Array:
        return jnp.tanh(body.apply(params, observation, key=key))

    return Network(body.init, apply)


def behaviour_policy(spec: Spec, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network:
    """observation -> a distribution with full support on logged actions, for likelihood fits (BC, AWR).

    Continuous: a normal with mean in (-1, 1) and a learned standard deviation that does not depend on the
    state, as in IQL's code; not squashed, so that logged actions at the bounds have a finite density.
    Discrete: categorical.
    """
    import distrax

    body = _policy(spec, spec.action_size, hidden, architecture)
    if spec.discrete:

        def categorical(params: Params, observation: Array, key: Key | None = None) -> distrax.Distribution:
            return distrax.Categorical(body.apply(params, observation, key=key))

        return Network(body.init, categorical)

    def init(key: Key, observation: Array) -> Params:
        return {"body": body.init(key, observation), "log_std": jnp.zeros(spec.action_size)}

    def normal(params: Params, observation: Array, key: Key | None = None) -> distrax.Distribution:
        mean = jnp.tanh(body.apply(params["body"], observation, key=key))
        std = jnp.exp(jnp.clip(params["log_std"], LOG_STD_MIN, LOG_STD_MAX))
        return distrax.Independent(distrax.Normal(mean, jnp.broadcast_to(std, mean.shape)), 1)

    return Network(init, normal)


def unit_policy(spec: Spec, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network:
    """observation -> a normal of deviation 1 around a mean without bounds, or for integer actions a categorical.

    OGBench's policies (Park et al. 2025): a likelihood fit is a regression of the mean. The last layer's kernel starts
    at a tenth of its size. What they act with is `greedy`.
    """
    import distrax

    body = _policy(spec, spec.action_size, hidden, architecture, gain=0.1)

    def apply(params: Params, observation: Array, key: Key | None = None) -> distrax.Distribution:
        outputs = body.apply(params, observation, key=key)
        if spec.discrete:
            return distrax.Categorical(outputs)
        return distrax.Independent(distrax.Normal(outputs, jnp.ones_like(outputs)), 1)

    return Network(body.init, apply)


def greedy(policy: distrax.Distribution, spec: Spec) -> Array:
    """The mode of a `unit_policy` as an action: [..., D] clipped to [-1, 1], or [...] int32."""
    mode = policy.mode()
    return mode if spec.discrete else jnp.clip(mode, -1.0, 1.0)


def squashed_policy(spec: Spec, hidden: Sequence[int], architecture: Architecture = DEFAULT) -> Network:
    """observation -> a tanh-squashed diagonal normal on (-1, 1)^D (SAC, Haarnoja et al. 2018).

    The bounds themselves have no density (NaN): for the likelihood of logged actions take `behaviour_policy`.
    """
    import distrax

    body = _policy(spec, 2 * spec.action_size, hidden, architecture)

    def apply(params: Params, observation: Array, key: Key | None = None) -> distrax.Distribution:
        mean, log_std = jnp.split(body.apply(params, observation, key=key), 2, axis=-1)
        normal = distrax.Normal(mean, jnp.exp(jnp.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)))
        return distrax.Transformed(distrax.Independent(normal, 1), distrax.Block(distrax.Tanh(), 1))

    return Network(body.init, apply)


def squashed_mode(policy: distrax.Distribution) -> Array:
    """The tanh of the underlying mean [..., D]: what is acted on when evaluating."""
    return jnp.tanh(policy.distribution.mean())
