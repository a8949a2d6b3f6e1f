"""rl.networks.autoregressive: every token against one plain network on its features and context."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.networks.autoregressive import autoregressive, soft_dueling
from rl.networks.layers import MLP, Architecture
from rl.types import Spec

KEY = jax.random.key(0)
FEATURES, SIZE, CHOICES = 5, 2, 3
TRUNKS = {
    "shared": np.zeros(4, np.int32),
    "level": np.array([0, 0, 1, 1]),
    "level, dimension by dimension": np.array([0, 1, 0, 1]),
    "token": np.arange(4),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(init: Any, *inputs: Any) -> Any:
    """Parameters that no initialiser would give, biases and scales among them."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: rng.normal(0.1, 0.5, x.shape).astype(np.float32), jax.eval_shape(init, KEY, *inputs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUNKS)
def test_side_by_side_and_one_after_another_every_token_is_its_block_of_a_plain_network(name: str) -> None:
    trunks, hidden = TRUNKS[name], (6, 6, 4)
    architecture = Architecture(activation="tanh", residual=True)
    network = autoregressive(trunks, SIZE, CHOICES, hidden, True, architecture)
    features, contexts = normal(7, FEATURES), normal(2, 7, 4, SIZE, seed=1)
    params = filled(network.init, features)
    plain = MLP(hidden, CHOICES * int((trunks == 0).sum()), True, architecture)

    expected = np.zeros((2, 7, 4, CHOICES), np.float32)
    for token, trunk in enumerate(trunks):
        block = list(np.flatnonzero(trunks == trunk)).index(token)
        x = np.concatenate([np.broadcast_to(features, (2, 7, FEATURES)), contexts[:, :, token]], -1)
        whole = plain.apply({"params": jax.tree.map(lambda leaf, i=trunk: leaf[i], params)}, x)
        expected[:, :, token] = whole[..., block * CHOICES : (block + 1) * CHOICES]

    begun = network.begin(params, features)
    np.testing.assert_allclose(network.every(params, begun, contexts), expected, rtol=1e-4, atol=1e-5)
    step = jax.jit(network.step)
    for token in range(4):
        outputs = step(params, begun, contexts[:, :, token], jnp.asarray(token))
        np.testing.assert_allclose(outputs, expected[:, :, token], rtol=1e-4, atol=1e-5)
    alone = step(params, network.begin(params, features[0]), contexts[0, 0, 1], jnp.asarray(1))
    np.testing.assert_allclose(alone, expected[0, 0, 1], rtol=1e-4, atol=1e-5)


def test_layer_norm_stands_after_the_activation_where_it_is_asked_to() -> None:
    """As in the value beside it, which is such an MLP."""
    architecture = Architecture(activation="tanh", norm_after=True)
    network = autoregressive(np.zeros(1, np.int32), SIZE, CHOICES, (4, 4), True, architecture)
    features, contexts = normal(FEATURES), normal(1, SIZE, seed=1)
    params = filled(network.init, features)
    one = jax.tree.map(lambda leaf: leaf[0], params)
    x = np.concatenate([features, contexts[0]])
    expected = MLP((4, 4), CHOICES, True, architecture).apply({"params": one}, x)
    every = network.every(params, network.begin(params, features), contexts)
    np.testing.assert_allclose(every[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_members_differ_and_one_encoder_of_each_serves_value_and_advantages() -> None:
    spec = Spec({"goal": (3,), "view": (8, 8, 1)}, SIZE)
    network = soft_dueling(spec, 5, TRUNKS["shared"], CHOICES, (4,), members=3)
    observation = {"goal": normal(2, 3), "view": np.full((2, 8, 8, 1), 200, np.uint8)}
    contexts = normal(2, 4, SIZE)
    params = filled(network.init, observation)
    v, u = network.both(params, observation, contexts)
    assert v.shape == (3, 2, 5) and u.shape == (3, 2, 4, CHOICES)
    np.testing.assert_allclose(network.values(params, observation), v, rtol=1e-5)
    begun = network.begin(params, observation)
    for token in range(4):
        outputs = network.step(params, begun, contexts[:, token], jnp.asarray(token))
        np.testing.assert_allclose(outputs, u[:, :, token], rtol=1e-3, atol=1e-4)
    assert (np.abs(np.diff(v, axis=0)).max((1, 2)) > 1e-3).all()
    # Its three convolutions, and no more, are in the program of both.
    program = str(jax.make_jaxpr(network.both)(params, observation, contexts))
    assert program.count("conv_general_dilated[") == 3
    assert "conv_general_dilated[" not in str(
        jax.make_jaxpr(network.step)(params, begun, contexts[:, 0], jnp.asarray(0))
    )


@pytest.mark.slow
def test_a_trunk_needs_a_layer_where_context_and_observation_meet() -> None:
    with pytest.raises(ValueError, match=r"hidden=\(\) leaves no layer"):
        autoregressive(TRUNKS["shared"], SIZE, CHOICES, ())
