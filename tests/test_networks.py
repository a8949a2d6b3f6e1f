"""rl.networks against NumPy and SciPy: what is computed, what it starts from, and what it does at extremes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import integrate, special, stats

from rl import checkpoint
from rl.agents import bc
from rl.networks import cnn, layers, mlp
from rl.networks.base import Network, ensemble, from_linen, from_nnx
from rl.networks.layers import INITIALISERS, OGBENCH, Architecture
from rl.types import Spec
from rl.values import heads

OBSERVATION, DIMENSIONS, ACTIONS, OUTPUTS, HIDDEN = 3, 2, 4, 5, (6, 7)
CONTINUOUS = Spec((OBSERVATION,), DIMENSIONS)
DISCRETE = Spec((OBSERVATION,), ACTIONS, discrete=True)
KEY = jax.random.key(0)
LEADING = pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense(params: Any, x: np.ndarray, layer_norm: bool = False) -> np.ndarray:
    """The layers written down one by one."""
    for i in range(len(HIDDEN)):
        x = x @ params[f"Dense_{i}"]["kernel"] + params[f"Dense_{i}"]["bias"]
        if layer_norm:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
            x = x * params[f"LayerNorm_{i}"]["scale"] + params[f"LayerNorm_{i}"]["bias"]
        x = np.maximum(x, 0)
    return x @ params[f"Dense_{len(HIDDEN)}"]["kernel"] + params[f"Dense_{len(HIDDEN)}"]["bias"]


def dense_jax(params: Any, x: jax.Array) -> jax.Array:
    """The layers written down one by one, for JAX to differentiate."""
    *layers, last = (params[f"Dense_{i}"] for i in range(len(HIDDEN) + 1))
    for layer in layers:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def random_params(network: Network, *inputs: np.ndarray) -> Any:
    """Parameters of the network's shapes, biases and scales among them that differ from 0 and 1."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, KEY, *inputs)
    return jax.tree.map(lambda x: rng.normal(0.1, 0.5, x.shape).astype(np.float32), shapes)


def linear(make: Callable[..., Network]) -> Network:
    """A policy over one-dimensional actions without hidden layers."""
    return make(Spec((1,), 1), ())


def constant(make: Callable[..., Network], **last: Any) -> Any:
    """Parameters of `linear` whose last layer says the same everywhere: ``last`` are its biases."""
    shapes = jax.eval_shape(linear(make).init, KEY, np.zeros((1, 1), np.float32))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    body = params.get("body", params)
    body["Dense_0"]["bias"] = np.float32(last.pop("bias"))
    return {**params, **{name: np.float32(x) for name, x in last.items()}}


# ---- layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_norm", [False, True])
@LEADING
def test_every_network_is_dense_layers_and_relus(leading: tuple[int, ...], layer_norm: bool) -> None:
    observation, action = normal(*leading, OBSERVATION), normal(*leading, DIMENSIONS, seed=1)
    integer = np.random.default_rng(2).integers(ACTIONS, size=leading).astype(np.int32)
    one_hot = np.eye(ACTIONS, dtype=np.float32)[integer]
    joined = np.concatenate([observation, action], -1)
    cases: list[tuple[Network, tuple, np.ndarray, Callable]] = [
        (mlp.state_value(OUTPUTS, HIDDEN, layer_norm), (observation,), observation, lambda x: x),
        (mlp.critic(CONTINUOUS, OUTPUTS, HIDDEN, layer_norm), (observation, action), joined, lambda x: x),
        (
            mlp.critic(DISCRETE, OUTPUTS, HIDDEN, layer_norm),
            (observation, integer),
            np.concatenate([observation, one_hot], -1),
            lambda x: x,
        ),
        (
            mlp.action_values(DISCRETE, OUTPUTS, HIDDEN, layer_norm),
            (observation,),
            observation,
            lambda x: np.stack(np.split(x, ACTIONS, -1), -2),
        ),
        (
            mlp.deterministic_policy(CONTINUOUS, HIDDEN, Architecture(policy_layer_norm=layer_norm)),
            (observation,),
            observation,
            np.tanh,
        ),
    ]
    parameters = [random_params(network, *inputs) for network, inputs, *_ in cases]

    @jax.jit
    def apply(parameters: list[Any]) -> list[jax.Array]:
        return [
            network.apply(params, *inputs)
            for (network, inputs, *_), params in zip(cases, parameters, strict=True)
        ]

    for (*_, joined_inputs, finish), params, output in zip(cases, parameters, apply(parameters), strict=True):
        assert {name.split("_")[0] for name in params} == (
            {"Dense", "LayerNorm"} if layer_norm else {"Dense"}
        )
        expected = finish(dense(params, joined_inputs, layer_norm))
        assert output.shape == expected.shape and output.dtype == jnp.float32
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


@LEADING
def test_gradients_are_those_of_matrix_products(leading: tuple[int, ...]) -> None:
    """First and second derivatives, of an ensemble: the networks replace JAX's rule by their own."""
    member = mlp.critic(CONTINUOUS, OUTPUTS, HIDDEN)
    network, observation, action = (
        ensemble(member, 2),
        normal(*leading, OBSERVATION),
        normal(*leading, DIMENSIONS),
    )
    params = random_params(network, observation, action)

    def plain(params, observation, action):
        return dense_jax(params, jnp.concatenate([observation, action], -1))

    def both(apply):
        def penalised(params, observation, action):
            slope = jax.grad(lambda a: jnp.sin(apply(params, observation, a)).sum())(action)
            return jnp.square(slope).sum() + jnp.cos(apply(params, observation, action)).sum()

        return jax.grad(penalised, (0, 1, 2))(params, observation, action)

    ours, theirs = jax.jit(lambda: (both(network.apply), both(jax.vmap(plain, (0, None, None)))))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), ours, theirs)


@pytest.mark.parametrize("product", [layers.row_product, layers.vocabulary_product], ids=lambda f: f.__name__)
def test_products_of_merged_axes_are_those_of_the_axes(product: Any) -> None:
    """Values and gradients, of an ensemble; no product contracts two axes, which XLA would move first."""
    x, weight, cotangent = (normal(*size) for size in ((2, 3, 4, 5), (2, 5, 6), (2, 3, 4, 6)))
    kernels = weight if product is layers.row_product else weight.swapaxes(1, 2)

    def gradients(x: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> Any:
        y, back = jax.vjp(product, x, kernel)
        return y, *back(cotangent)

    compiled = jax.jit(jax.vmap(gradients))
    y, to_x, to_kernel = map(np.asarray, compiled(x, kernels, cotangent))
    np.testing.assert_allclose(y, np.einsum("eabn,enm->eabm", x, weight), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_x, np.einsum("eabm,enm->eabn", cotangent, weight), rtol=1e-5, atol=1e-5)
    to_weight = to_kernel if kernels is weight else to_kernel.swapaxes(1, 2)
    np.testing.assert_allclose(to_weight, np.einsum("eabn,eabm->enm", x, cotangent), rtol=1e-5, atol=1e-5)
    contracted = re.findall(
        r"contracting_dims = \[([\d, ]+)\]", compiled.lower(x, kernels, cotangent).as_text()
    )
    assert len(contracted) == 3 and all("," not in axes for axes in contracted)


def test_a_single_width_is_refused() -> None:
    hidden: Any = 8
    with pytest.raises(ValueError, match=r"hidden=8 must be a tuple of widths, such as \(256, 256\)"):
        mlp.state_value(1, hidden).init(jax.random.key(0), jnp.zeros(3))


def test_without_hidden_layers_a_network_is_linear() -> None:
    network = mlp.state_value(OUTPUTS, ())
    params = random_params(network, normal(1, OBSERVATION))
    params["Dense_0"]["bias"][:] = 0
    assert set(params) == {"Dense_0"}
    np.testing.assert_allclose(
        jax.jit(network.apply)(params, normal(4, OBSERVATION)),
        normal(4, OBSERVATION) @ params["Dense_0"]["kernel"],
        rtol=1e-5,
    )


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "silu"])
def test_activations_and_residual_paths(activation: str, residual: bool) -> None:
    """The second hidden layer alone has the width of its input."""
    functions = {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "tanh": np.tanh,
        "silu": lambda x: x / (1 + np.exp(-x)),
    }
    network = mlp.state_value(
        OUTPUTS, (6, 6, 7), architecture=Architecture(activation=activation, residual=residual)
    )
    x = normal(4, OBSERVATION)
    params, expected = random_params(network, x), x
    for i in range(3):
        layer = params[f"Dense_{i}"]
        expected = functions[activation](expected @ layer["kernel"] + layer["bias"]) + (
            expected if residual and i == 1 else 0
        )
    expected = expected @ params["Dense_3"]["kernel"] + params["Dense_3"]["bias"]
    np.testing.assert_allclose(jax.jit(network.apply)(params, x), expected, rtol=1e-4, atol=1e-5)


def test_layer_norm_can_stand_after_activations_and_unit_policies_start_near_zero() -> None:
    """OGBench's layers: Dense, GELU, LayerNorm; a policy's last kernel starts at a tenth of glorot's bound."""
    x, width = normal(5, OBSERVATION), 64
    value = mlp.state_value(OUTPUTS, (6,), layer_norm=True, architecture=OGBENCH)
    policy = mlp.unit_policy(Spec((OBSERVATION,), 40), (width,), OGBENCH)
    params = random_params(value, x)
    output, start = jax.jit(lambda key: (value.apply(params, x), policy.init(key, x)))(KEY)
    hidden = jax.nn.gelu(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    hidden = (hidden - hidden.mean(-1, keepdims=True)) / np.sqrt(hidden.var(-1, keepdims=True) + 1e-6)
    hidden = hidden * params["LayerNorm_0"]["scale"] + params["LayerNorm_0"]["bias"]
    expected = hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    assert_uniform(start["Dense_0"]["kernel"], np.sqrt(6 / (OBSERVATION + width)))
    assert_uniform(start["Dense_1"]["kernel"], 0.1 * np.sqrt(6 / (width + 40)))


def assert_uniform(x: jax.Array, bound: float) -> None:
    """U(-bound, bound), by its bounds and its first two moments."""
    assert np.abs(x).max() <= bound * (1 + 1e-6)
    np.testing.assert_allclose(np.mean(x), 0, atol=4 * bound / np.sqrt(3 * x.size))
    np.testing.assert_allclose(np.std(x), bound / np.sqrt(3), rtol=3 / np.sqrt(x.size))


def assert_starts(name: str, layer: Any, fan_in: int, last: float | None = None) -> None:
    """The published definition of each initialiser."""
    kernel, bias = layer["kernel"], layer["bias"]
    assert np.prod(kernel.shape[:-1]) == fan_in
    fan_out = kernel.shape[-1] * np.prod(kernel.shape[:-2])
    if name in ("pytorch", "rlkit"):
        bound = last if name == "rlkit" and last else fan_in**-0.5
        assert_uniform(kernel, bound)
        if name == "rlkit" and not last:
            np.testing.assert_array_equal(bias, np.float32(0.1))
        else:
            assert_uniform(bias, bound)
        return
    assert not bias.any()
    if name in ("orthogonal", "ppo"):
        flat = np.reshape(kernel, (fan_in, -1))
        square = 1e-4 if name == "ppo" and last else 2.0  # of the gain
        np.testing.assert_allclose(flat.T @ flat / square, np.eye(flat.shape[1]), atol=1e-4)
    elif name == "glorot":
        assert_uniform(kernel, np.sqrt(6 / (fan_in + fan_out)))
    else:
        np.testing.assert_allclose(np.std(kernel), fan_in**-0.5, rtol=3 / np.sqrt(kernel.size))


@pytest.mark.parametrize("name", INITIALISERS)
def test_layers_start_as_their_initialiser_says(name: str) -> None:
    """Critic, policy and convolutions: hidden layers, and the last ones, which rlkit scales."""
    architecture = Architecture(initialiser=name)
    x, action = np.zeros((1, 300), np.float32), np.zeros((1, 100), np.float32)
    spec = Spec((300,), 100)

    @jax.jit
    def init(key: Any) -> Any:
        return (
            mlp.critic(spec, 200, (256,), architecture=architecture).init(key, x, action),
            mlp.squashed_policy(spec, (256,), architecture).init(key, x),
            from_linen(cnn.Nature(name)).init(key, jnp.zeros((1, 8, 8, 4), jnp.uint8)),
        )

    critic, policy, convolutions = jax.device_get(init(KEY))
    assert_starts(name, critic["Dense_0"], 400)
    assert_starts(name, critic["Dense_1"], 256, last=3e-3)
    assert_starts(name, policy["Dense_0"], 300)
    assert_starts(name, policy["Dense_1"], 256, last=1e-3)
    for i, fan_in in enumerate((8 * 8 * 4, 4 * 4 * 32, 3 * 3 * 64)):
        assert_starts(name, convolutions[f"Conv_{i}"], fan_in)


def test_a_squashed_policy_of_rlkit_starts_near_the_middle_and_broad() -> None:
    policy = mlp.squashed_policy(CONTINUOUS, (256, 256), Architecture(initialiser="rlkit"))
    observation = normal(64, OBSERVATION)

    @jax.jit
    def start(key: Any) -> tuple[jax.Array, jax.Array]:
        distribution = policy.apply(policy.init(key, observation), observation).distribution
        return distribution.mean(), distribution.stddev()

    mean, deviation = map(np.asarray, start(KEY))
    assert np.abs(mean).max() < 0.016
    np.testing.assert_allclose(deviation, 1, atol=0.016)


def test_a_policy_drops_units_only_where_it_is_given_a_key() -> None:
    """The share, the scale of what stays, that masks differ between keys and rows; values drop nothing."""
    architecture = Architecture(dropout=0.25)
    policy = mlp.deterministic_policy(Spec((1,), 1), (400,), architecture)
    x = np.ones((50, 1), np.float32)
    params = jax.tree.map(np.zeros_like, random_params(policy, x))
    params["Dense_0"]["bias"] = np.ones(400, np.float32)
    params["Dense_1"]["kernel"] = np.full((400, 1), 1 / 800, np.float32)

    @jax.jit
    def apply(one: Any, other: Any) -> tuple[jax.Array, ...]:
        return policy.apply(params, x), *(policy.apply(params, x, key=key) for key in (one, other))

    without_key, one, other = map(np.arctanh, map(np.asarray, apply(jax.random.key(0), jax.random.key(1))))
    np.testing.assert_allclose(without_key, 0.5, rtol=1e-5)
    one, other = one * 800 * 0.75, other * 800 * 0.75
    np.testing.assert_allclose(one, np.round(one), atol=1e-2)  # units that stay, each 1 / 0.75 as large
    np.testing.assert_allclose(one.mean(), 300, atol=4 * np.sqrt(400 * 0.25 * 0.75 / 50))
    assert one.std() > 4 and (one != other).mean() > 0.8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "rleu"}, "network.activation='rleu': did you mean 'relu'"),
        ({"initialiser": "torch"}, "network.initialiser='torch': did you mean 'pytorch'"),
        ({"encoder": "resnet"}, "network.encoder='resnet': choose one of nature, impala"),
        ({"dropout": 1.0}, "network.dropout=1.0 must lie in"),
        ({"shift": -1}, "network.shift=-1 must be at least 0"),
    ],
)
def test_impossible_architectures_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture(**fields)


class Own(nnx.Module):
    """Two dense layers with a LayerNorm between them, and whatever ``more`` adds."""

    def __init__(self, rngs: nnx.Rngs, more: Callable[[nnx.Rngs], Any] = lambda rngs: None) -> None:
        self.layers = nnx.List([nnx.Linear(OBSERVATION, 6, rngs=rngs), nnx.Linear(6, OUTPUTS, rngs=rngs)])
        self.norm, self.more = nnx.LayerNorm(6, rngs=rngs), more(rngs)

    def __call__(self, observation: jax.Array) -> jax.Array:
        return self.layers[1](jnp.tanh(self.norm(self.layers[0](observation))))


def test_an_nnx_module_is_two_pure_functions_of_plain_dictionaries() -> None:
    """Optimisers, checkpoints and ensembles walk through what ``init`` gives, and gradients through ``apply``."""
    network, x = from_nnx(Own), normal(3, OBSERVATION)
    members = ensemble(network, 2)
    params = jax.jit(members.init)(KEY, x)
    assert not [leaf for leaf in jax.tree.leaves(params) if not isinstance(leaf, jax.Array)]
    assert checkpoint.named(params)["layers/1/kernel"].shape == (2, 6, OUTPUTS)
    first, second = params["layers"][0]["kernel"]
    assert (first != second).any()

    @jax.jit
    def ask(params: Any) -> tuple[jax.Array, Any]:
        loss = lambda params: (members.apply(params, x) ** 2).sum()
        return members.apply(params, x), jax.grad(loss)(params)

    outputs, gradient = ask(params)
    for index, key in enumerate(jax.random.split(KEY, 2)):
        np.testing.assert_allclose(outputs[index], Own(nnx.Rngs(key))(x), rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    one = jax.tree.map(lambda x: x[0], params)
    np.testing.assert_allclose(
        network.apply(one, x, key=KEY), outputs[0], rtol=1e-5
    )  # as agents ask policies
    assert all((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradient))
    for more, kept in (
        (lambda rngs: nnx.BatchNorm(6, rngs=rngs), "more.mean"),
        (lambda rngs: nnx.Dropout(0.1, rngs=rngs), "more.rngs"),
    ):
        with pytest.raises(ValueError, match=f"parameters only, and this one keeps .*{kept}"):
            from_nnx(lambda rngs, more=more: Own(rngs, more))


# ---- encoders -----------------------------------------------------------------------------------------------


def test_images_are_shifted_by_whole_pixels_alike_in_all_directions() -> None:
    """Against a loop in NumPy: every shift is a crop of the image with repeated edges, and all are as frequent."""
    pad, count = 2, 5000
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (6, 5, 2)).astype(np.uint8)
    shifted = np.asarray(jax.jit(cnn.random_shift, static_argnums=2)(np.stack([image] * count), KEY, pad))
    assert shifted.dtype == np.uint8 and shifted.shape == (count, *image.shape)
    counts = np.zeros((2 * pad + 1, 2 * pad + 1))
    for down in range(-pad, pad + 1):
        for right in range(-pad, pad + 1):
            moved = np.empty_like(image)
            for i in range(6):
                for j in range(5):
                    moved[i, j] = image[np.clip(i + down, 0, 5), np.clip(j + right, 0, 4)]
            counts[down + pad, right + pad] = (shifted == moved).all((1, 2, 3)).sum()
    assert counts.sum() == count
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3


@pytest.mark.parametrize("encoder", ["nature", "impala"])
def test_several_actions_at_an_image_share_its_features(encoder: str) -> None:
    """Actions [N, B, D] at images [B, H, W, C]: the values of the repeated images, without encoding them again."""
    network = mlp.critic(
        Spec((8, 8, 3), DIMENSIONS), OUTPUTS, (6,), architecture=Architecture(encoder=encoder)
    )
    image = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    action = normal(3, 4, DIMENSIONS)
    params = jax.jit(network.init)(KEY, image, action[0])
    apply = jax.jit(network.apply)
    output, others = np.asarray(apply(params, image, action)), np.asarray(apply(params, image[::-1], action))
    assert output.shape == (3, 4, OUTPUTS)
    again = apply(params, np.broadcast_to(image, (3, *image.shape)), action)
    np.testing.assert_allclose(output, again, rtol=1e-5, atol=1e-6)
    assert np.abs(output - others).max() > 1e-4


@LEADING
def test_a_dictionary_of_vectors_is_their_concatenation(leading: tuple[int, ...]) -> None:
    """Of the sorted keys, whatever the order in which they are written, and with the same parameters."""
    shape = {"position": (2,), "goals": {"second": (1,), "first": (3,)}}
    parts = {name: normal(*leading, size, seed=size) for name, size in (("a", 3), ("b", 1), ("c", 2))}
    observation = {"position": parts["c"], "goals": {"second": parts["b"], "first": parts["a"]}}
    vector, action = np.concatenate(list(parts.values()), -1), normal(*leading, DIMENSIONS)
    networks = [
        (lambda spec: mlp.critic(spec, OUTPUTS, HIDDEN), (action,)),
        (lambda spec: mlp.state_value(OUTPUTS, HIDDEN, spec=spec), ()),
        (lambda spec: mlp.deterministic_policy(spec, HIDDEN), ()),
    ]
    for make, more in networks:
        plain, network = make(Spec((6,), DIMENSIONS)), make(Spec(shape, DIMENSIONS))
        params = random_params(plain, vector, *more)
        like = jax.eval_shape(network.init, KEY, observation, *more)
        assert jax.tree.map(jnp.shape, like["dense"]) == jax.tree.map(jnp.shape, params)
        output = jax.jit(network.apply)({**like, "dense": params}, observation, *more)
        np.testing.assert_array_equal(output, jax.jit(plain.apply)(params, vector, *more))


def windows(x: np.ndarray, size: int, stride: int, fill: float) -> np.ndarray:
    """Of an image [H, W, C], padded as TensorFlow's "SAME" does: [H', W', C, size, size]."""
    pads = []
    for length in x.shape[:2]:
        total = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((total // 2, total - total // 2))
    padded = np.pad(x, [*pads, (0, 0)], constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(0, 1))[::stride, ::stride]


def convolved(x: np.ndarray, layer: Any, stride: int = 1) -> np.ndarray:
    kernel, bias = (np.float64(layer[name]) for name in ("kernel", "bias"))
    return np.einsum("hwcij,ijco->hwo", windows(x, len(kernel), stride, 0.0), kernel) + bias


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_an_encoder_of_images_is_the_papers(name: str) -> None:
    """In float64, of windows: bytes become numbers up to 1, and what comes out is never below 0."""
    image = np.random.default_rng(0).integers(0, 256, (13, 10, 2)).astype(np.uint8)
    encoder = {"nature": cnn.Nature, "impala": cnn.Impala}[name]("lecun")
    params = random_params(from_linen(encoder), image)
    layer = lambda number: params[f"Conv_{number}"]
    x, relu = image / 255, lambda x: np.maximum(x, 0)
    if name == "nature":
        for number, stride in enumerate((4, 2, 1)):
            x = relu(convolved(x, layer(number), stride))
    else:
        for block in range(0, 15, 5):
            x = windows(convolved(x, layer(block)), 3, 2, -np.inf).max((-2, -1))
            for number in (block + 1, block + 3):
                x = x + convolved(relu(convolved(relu(x), layer(number))), layer(number + 1))
        x = relu(x)
    output = jax.jit(encoder.apply)({"params": params}, image)
    np.testing.assert_allclose(output, x.reshape(-1), rtol=1e-4, atol=1e-4 * x.max())


def test_every_entry_of_a_dictionary_has_its_own_encoder() -> None:
    """The dense layers take what the encoders of an image and of a history alone say, and the vector between them."""
    shape = {"b": (3,), "c": (5, 2), "a": (8, 8, 1)}
    image = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1)).astype(np.uint8)
    observation = {"a": image, "b": normal(4, 3), "c": normal(4, 5, 2)}
    network = mlp.state_value(OUTPUTS, (8,), spec=Spec(shape, 1))
    params = random_params(network, observation)
    assert params["encoder"].keys() == {"a", "c"}

    @jax.jit
    def by_parts(params: Any, observation: Any) -> jax.Array:
        a, c = (
            mlp.encoder(shape[name], (8,)).apply(params["encoder"][name], observation[name]) for name in "ac"
        )
        features = jnp.concatenate([a, observation["b"], c], -1)
        return mlp.state_value(OUTPUTS, (8,)).apply(params["dense"], features)

    ask = jax.jit(network.apply)
    output = ask(params, observation)
    np.testing.assert_allclose(output, by_parts(params, observation), rtol=1e-5)
    for step in (0, -1):  # of the history the newest observation counts, and so does the oldest
        changed = observation["c"].copy()
        changed[:, step] += 1
        assert (np.abs(ask(params, {**observation, "c": changed}) - output) > 1e-6).all()


def test_observations_of_no_known_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no network for observations of shape \(2, 3, 4, 5\)"):
        mlp.critic(Spec((2, 3, 4, 5), 1), 1, (8,))
    with pytest.raises(ValueError, match=r"observations of shape \(\)"):
        mlp.critic(Spec({"goal": (2,), "score": ()}, 1), 1, (8,))


# ---- ensembles ----------------------------------------------------------------------------------------------


@LEADING
def test_a_member_of_an_ensemble_is_the_network_alone(leading: tuple[int, ...]) -> None:
    network = mlp.critic(CONTINUOUS, OUTPUTS, HIDDEN, layer_norm=True)
    observation, action = normal(*leading, OBSERVATION), normal(*leading, DIMENSIONS, seed=1)
    together = ensemble(network, 3)
    params = random_params(together, observation, action)
    outputs = np.asarray(jax.jit(together.apply)(params, observation, action))
    assert outputs.shape == (3, *leading, OUTPUTS)
    apply = jax.jit(network.apply)
    for i in range(3):
        alone = jax.tree.map(lambda x, i=i: x[i], params)
        np.testing.assert_allclose(outputs[i], apply(alone, observation, action), rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"critics=0.*give at least 1"):
        ensemble(mlp.critic(CONTINUOUS, OUTPUTS, HIDDEN), 0)


def test_members_of_an_ensemble_start_apart() -> None:
    init = jax.jit(ensemble(mlp.critic(CONTINUOUS, OUTPUTS, HIDDEN), 5).init)
    params = init(KEY, normal(1, OBSERVATION), normal(1, DIMENSIONS))
    for layer in params.values():
        rows = np.reshape(layer["kernel"], (5, -1))
        correlation = np.corrcoef(rows) - np.eye(5)
        assert np.abs(correlation).max() < 0.8
        assert len(np.unique(rows)) == rows.size


# ---- policies over logged actions ---------------------------------------------------------------------------


def log_prob_and_mode(policy: Network, mode: Callable[[Any], jax.Array]) -> Callable[..., Any]:
    """(parameters, observations, actions) -> log density of the actions, and the mode; compiled."""

    def ask(params: Any, observation: Any, action: Any) -> tuple[jax.Array, jax.Array]:
        distribution = policy.apply(params, observation)
        return distribution.log_prob(action), mode(distribution)

    return jax.jit(ask)


def test_a_behaviour_policy_is_a_diagonal_normal() -> None:
    policy = mlp.behaviour_policy(CONTINUOUS, HIDDEN)
    observation, action = normal(8, OBSERVATION), np.tanh(normal(8, DIMENSIONS, seed=1))
    params = random_params(policy, observation)
    ask = log_prob_and_mode(policy, lambda distribution: distribution.mode())
    log_prob, mode = ask(params, observation, action)
    mean = np.tanh(dense(params["body"], observation))
    expected = stats.norm.logpdf(action, mean, np.exp(params["log_std"])).sum(-1)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mode, mean, rtol=1e-5, atol=1e-6)


def test_a_discrete_behaviour_policy_is_a_softmax() -> None:
    policy = mlp.behaviour_policy(DISCRETE, HIDDEN)
    observation = normal(8, OBSERVATION)
    params = random_params(policy, observation)
    logits = dense(params, observation)
    ask = log_prob_and_mode(policy, lambda distribution: distribution.mode())
    for action in range(ACTIONS):
        expected = special.log_softmax(logits, -1)[:, action]
        log_prob, mode = ask(params, observation, np.full(8, action))
        np.testing.assert_allclose(log_prob, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(mode, logits.argmax(-1))


@jax.jit
def behaviour_log_prob(params: Any, action: float) -> tuple[jax.Array, Any]:
    """Of one action under `linear`, and its gradient by the parameters."""
    policy = linear(mlp.behaviour_policy)
    log_prob = lambda params: policy.apply(params, jnp.zeros((1, 1))).log_prob(jnp.full((1, 1), action)).sum()
    return jax.value_and_grad(log_prob)(params)


@pytest.mark.parametrize("action", [-1.0, 1.0])
@pytest.mark.parametrize("mean", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("log_std", [0.0, 30.0, -30.0])
def test_a_behaviour_policy_is_finite_on_saturated_actions(
    action: float, mean: float, log_std: float
) -> None:
    params = constant(mlp.behaviour_policy, bias=[mean], log_std=[log_std])
    value, gradient = behaviour_log_prob(params, action)
    expected = stats.norm.logpdf(action, np.tanh(mean), np.exp(np.clip(log_std, -5, 2)))
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


# ---- squashed policies --------------------------------------------------------------------------------------


def test_a_squashed_policys_density_is_the_change_of_variables() -> None:
    policy = mlp.squashed_policy(CONTINUOUS, HIDDEN)
    observation, action = normal(8, OBSERVATION), np.tanh(normal(8, DIMENSIONS, seed=1))
    params = random_params(policy, observation)
    mean, log_std = np.split(dense(params, observation), 2, -1)
    expected = stats.norm.logpdf(np.arctanh(action), mean, np.exp(log_std)) - np.log(1 - action**2)
    log_prob, mode = log_prob_and_mode(policy, mlp.squashed_mode)(params, observation, action)
    np.testing.assert_allclose(log_prob, expected.sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mode, np.tanh(mean), rtol=1e-5, atol=1e-6)


@jax.jit
def squashed_samples(params: Any, grid: Any) -> tuple[jax.Array, ...]:
    """Log densities of `linear` on a grid, samples, and their log densities as they are drawn and asked for."""
    distribution = linear(mlp.squashed_policy).apply(params, jnp.zeros(1))
    samples, log_prob = distribution.sample_and_log_prob(seed=KEY, sample_shape=(4000,))
    return jax.vmap(distribution.log_prob)(grid[:, None]), samples, log_prob, distribution.log_prob(samples)


@jax.jit
def squashed_deviation(params: Any) -> jax.Array:
    return linear(mlp.squashed_policy).apply(params, jnp.zeros(1)).distribution.stddev()


@jax.jit
def squashed_draws(params: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """Gradient of the sum of 64 samples of `linear` and their log densities, and both."""

    def draw(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        distribution = linear(mlp.squashed_policy).apply(params, jnp.zeros(1))
        action, log_prob = distribution.sample_and_log_prob(seed=KEY, sample_shape=(64,))
        return log_prob.sum() + action.sum(), (action, log_prob)

    return jax.grad(draw, has_aux=True)(params)


@jax.jit
def deterministic_action(params: Any) -> tuple[jax.Array, Any]:
    """The action of `linear`, and its gradient by the parameters."""
    policy = linear(mlp.deterministic_policy)
    return jax.value_and_grad(lambda params: policy.apply(params, jnp.ones(1)).sum())(params)


@pytest.mark.parametrize("mean, log_std", [(0.0, 0.0), (0.8, -1.0), (-0.3, 0.4)])
def test_a_squashed_policys_density_integrates_to_one_and_its_samples_follow_it(
    mean: float, log_std: float
) -> None:
    params = constant(mlp.squashed_policy, bias=[mean, log_std])
    grid = np.tanh(np.linspace(-6, 6, 4001))
    of_grid, samples, log_prob, again = map(np.asarray, squashed_samples(params, np.float32(grid)))
    cumulative = integrate.cumulative_trapezoid(np.exp(of_grid), grid, initial=0)
    np.testing.assert_allclose(cumulative[-1], 1, atol=2e-3)

    assert samples.shape == (4000, 1) and log_prob.shape == (4000,)
    assert stats.kstest(samples[:, 0], lambda x: np.interp(x, grid, cumulative)).pvalue > 1e-3
    inner = np.abs(samples[:, 0]) < 0.99  # closer to the bounds float32 cannot undo the tanh
    np.testing.assert_allclose(log_prob[inner], again[inner], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("output, log_std", [(30.0, 2.0), (-30.0, -5.0)])
def test_a_squashed_policys_deviation_is_bounded(output: float, log_std: float) -> None:
    params = constant(mlp.squashed_policy, bias=[0.0, output])
    np.testing.assert_allclose(squashed_deviation(params), np.exp(log_std), rtol=1e-6)


@pytest.mark.parametrize("mean", [0.0, 9.0, -30.0, 1e6])
@pytest.mark.parametrize("log_std", [-9.0, 0.0, 9.0])
def test_a_squashed_policy_is_finite_where_its_samples_saturate(mean: float, log_std: float) -> None:
    """At means of 9 and beyond float32's tanh is 1 exactly, and a density taken from the action is lost."""
    params = constant(mlp.squashed_policy, bias=[mean, log_std])
    gradient, (action, log_prob) = jax.device_get(squashed_draws(params))
    assert (np.abs(action) <= 1).all()
    if abs(mean) >= 30:
        assert (np.abs(action) == 1).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradient, log_prob)))


@pytest.mark.parametrize("mean", [20.0, -1e6])
def test_a_deterministic_policy_is_finite_where_it_saturates(mean: float) -> None:
    action, gradient = deterministic_action(constant(mlp.deterministic_policy, bias=[mean]))
    assert action == np.sign(mean)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@LEADING
def test_policies_take_any_leading_axes(leading: tuple[int, ...]) -> None:
    for make, spec, event in (
        (mlp.behaviour_policy, CONTINUOUS, (DIMENSIONS,)),
        (mlp.behaviour_policy, DISCRETE, ()),
        (mlp.squashed_policy, CONTINUOUS, (DIMENSIONS,)),
    ):
        policy = make(spec, HIDDEN)
        observation = normal(*leading, OBSERVATION)
        draw = lambda params, x, policy=policy: policy.apply(params, x).sample_and_log_prob(
            seed=KEY, sample_shape=(5,)
        )
        sample, log_prob = jax.eval_shape(draw, random_params(policy, observation), observation)
        assert sample.shape == (5, *leading, *event) and log_prob.shape == (5, *leading)


@pytest.mark.parametrize("field", ["dropout", "policy_layer_norm", "residual"])
def test_settings_that_a_transformer_does_not_have_are_refused(field: str) -> None:
    """Else a sweep over them on histories would compare equal programs."""
    architecture = Architecture(**{field: 0.5 if field == "dropout" else True})
    with pytest.raises(ValueError, match=f"network.{field} is of dense layers, and histories"):
        mlp.encoder((4, 3), (8, 8), architecture)
    mlp.encoder({"past": (4, 3), "now": (3,)}, (8, 8), architecture)  # dense layers follow


@pytest.mark.parametrize("field", ["layer_norm", "network.activation", "network.norm_after"])
def test_settings_are_refused_where_no_dense_layer_follows_a_transformer(field: str) -> None:
    """And taken where a layer joins an action, or a vector beside the history."""
    network = {
        "network.activation": Architecture("gelu"),
        "network.norm_after": Architecture(norm_after=True),
    }
    body = (OUTPUTS, (8, 8), field == "layer_norm", network.get(field, Architecture()))
    with pytest.raises(ValueError, match=f"^{field} is of dense layers, and histories"):
        mlp.action_values(Spec((4, 3), 2, True), *body)
    if field in network:
        with pytest.raises(ValueError, match=f"^{field} is of dense layers, and histories"):
            bc.make(bc.Config(network=network[field]), Spec((4, 3), 2), heads.make("scalar"))
    mlp.critic(Spec((4, 3), 2, True), *body)
    mlp.action_values(Spec({"past": (4, 3), "now": (3,)}, 2, True), *body)
