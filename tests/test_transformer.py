"""The trunk apart from language: long sequences, and agents that read histories."""

from __future__ import annotations

import dataclasses
import importlib
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.agents import dqn
from rl.networks import attention, transformer
from rl.networks.transformer import Shape
from rl.types import Spec, Transition
from rl.values import heads

KEY = jax.random.key(0)
SMALL = Shape(width=8, layers=1, heads=2, kv_heads=1, head_size=4, inner=8)


@pytest.mark.slow
def test_queries_in_parts_compute_what_all_at_once_do(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = transformer.trunk(SMALL)
    params = jax.jit(trunk.init)(KEY)
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype(np.float32)
    rows = [[1] * 4 + [2] * 7, [1] * 9 + [0] * 2]

    def both() -> Any:
        def loss(params: Any, x: Any) -> Any:
            segment = jnp.array(rows)
            return jnp.square(trunk.apply(params, x, transformer.positions(segment), segment)[:, ::2]).sum()

        def prefill(params: Any, x: Any) -> Any:
            """In two pieces, the second of which finds the first one in the cache."""
            segment, cache = jnp.array(rows), trunk.cache(2, 13)
            position, features = transformer.positions(segment), []
            for piece in (np.s_[:, :4], np.s_[:, 4:]):
                some, cache = trunk.extend(params, x[piece], position[piece], segment[piece], cache)
                features.append(some)
            return jnp.concatenate(features, 1)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x), jax.jit(prefill)(params, x)

    at_once = both()
    monkeypatch.setattr(attention, "QUERIES", 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both(), at_once)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_attention_and_its_gradient_are_those_of_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, cap: float
) -> None:
    """Head by head, with all weights at once and differentiated by JAX.

    There are four groups here of two parts, of which the last is short. With a window, groups leave out keys before it.
    """
    monkeypatch.setattr(attention, "QUERIES", 3)
    scores = {"score_cap": cap, "query_size": 3.0, "window": 8 if cap else 0}
    shape = dataclasses.replace(SMALL, heads=4, kv_heads=2, head_size=6, **scores)
    draw = np.random.default_rng(0).normal
    inputs = draw(size=(2, 23, 4, 6)), draw(size=(2, 23, 2, 6)), draw(size=(2, 23, 2, 6))
    segment = np.array([[1] * 4 + [2] * 19, [1] * 20 + [0] * 3])
    direction, reach = draw(size=(2, 23, 4, 6)), 8

    def plain(query: Any, key: Any, value: Any) -> Any:
        distance = np.arange(23)[:, None] - np.arange(23)
        seen = (distance >= 0) & (distance < reach) & (segment[:, :, None] == segment[:, None])
        heads = []
        for head in range(4):
            scores = jnp.einsum("bsh,bmh->bsm", query[:, :, head], key[:, :, head // 2]) / np.sqrt(3.0)
            scores = cap * jnp.tanh(scores / cap) if cap else scores
            weight = jax.nn.softmax(jnp.where(seen, scores, -np.inf))
            heads.append(weight @ value[:, :, head // 2])
        return jnp.stack(heads, 2)

    def ours(*inputs: Any) -> Any:
        return attention.causal(shape, jnp.array(reach), jnp.array(segment), *inputs)

    def both(attend: Any) -> Any:
        attended, pull_back = jax.vjp(attend, *map(jnp.float32, inputs))
        return attended, pull_back(jnp.float32(direction))

    for a, b in zip(
        jax.tree.leaves(jax.jit(both, static_argnums=0)(ours)), jax.tree.leaves(both(plain)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["training", "prefill"])
@pytest.mark.slow
def test_memory_is_linear_in_the_length(what: str) -> None:
    """Temporary bytes of one training step of the trunk, and of reading a prompt, as the compiler counts them."""
    trunk = transformer.trunk(SMALL)
    params = jax.eval_shape(trunk.init, KEY)

    def step(params: Any, x: Any) -> Any:
        one = jnp.ones(x.shape[:2], jnp.int32)
        return jax.grad(lambda p: trunk.apply(p, x, transformer.positions(one), one).sum())(params)

    def prefill(params: Any, x: Any) -> Any:
        one = jnp.ones(x.shape[:2], jnp.int32)
        return trunk.extend(params, x, transformer.positions(one), one, trunk.cache(1, x.shape[1] + 8))

    size = [
        jax.jit({"training": step, "prefill": prefill}[what])
        .lower(params, np.zeros((1, length, 8), np.float32))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for length in (2048, 4096)
    ]
    assert size[1] < 2.3 * size[0]


def test_attention_runs_forward_once_in_a_training_step() -> None:
    """Of products over heads, two are its forward pass and five its gradients, which compute the scores again."""
    trunk = transformer.trunk(dataclasses.replace(SMALL, layers=2))
    params = jax.eval_shape(trunk.init, KEY)

    def loss(params: Any, x: Any) -> Any:
        one = jnp.ones(x.shape[:2], jnp.int32)
        return jnp.square(trunk.apply(params, x, transformer.positions(one), one)).sum()

    compiled = jax.jit(jax.grad(loss)).lower(params, np.zeros((3, 17, 8), np.float32)).compile()
    assert len(re.findall(r" dot\(.*lhs_batch_dims=\{\d", compiled.as_text())) == 7


def test_rows_of_one_text_go_to_cudnn_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA stands in for it, with what it would be given; other rows, as packed ones, go another way to the same end."""
    shape = dataclasses.replace(SMALL, head_size=8, window=3, query_size=5.0)
    trunk, x = transformer.trunk(shape), np.random.default_rng(0).normal(size=(2, 11, 8)).astype(np.float32)
    params = jax.jit(trunk.init)(KEY)
    one_text, packed = np.array([[1] * 11, [2] * 7 + [0] * 4]), np.array([[1] * 11, [1] * 4 + [2] * 7])

    def ask() -> list[np.ndarray]:
        def features(segment: Any) -> Any:
            return trunk.apply(params, x, transformer.positions(segment), segment)

        run = jax.jit(features)
        return [np.asarray(run(segment)) for segment in (one_text, packed)]

    expected, in_full, implementations = ask(), jax.nn.dot_product_attention, []

    def stand_in(*inputs: Any, implementation: str | None = None, **settings: Any) -> Any:
        implementations.append(implementation)
        return in_full(*inputs, **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "devices", lambda: [SimpleNamespace()])  # a CPU, which has no capability
        assert not attention.in_cudnn(shape, jnp.bfloat16, 8)
        patched.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="8.0")])
        assert attention.in_cudnn(shape, jnp.bfloat16, 8)
        capped = dataclasses.replace(shape, score_cap=1.0)
        half = jnp.bfloat16
        for other in ((shape, jnp.float32, 8), (SMALL, half, 8), (capped, half, 8), (shape, half, 7)):
            assert not attention.in_cudnn(*other)
    monkeypatch.setattr(attention, "in_cudnn", lambda *_: True)
    of_one, of_packed = ask()
    text = one_text > 0
    np.testing.assert_allclose(of_one[text], expected[0][text], atol=1e-5)
    np.testing.assert_allclose(of_packed, expected[1], atol=1e-5)
    assert set(implementations) == {"cudnn"}


def test_cudnn_attends_once_forward_and_once_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program for GPUs, which takes none to be made. What its forward pass leaves is kept by JAX's name for it."""
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setattr(attention, "in_cudnn", lambda *_: True)
    trunk = transformer.trunk(dataclasses.replace(SMALL, layers=2, head_size=8, window=32), jnp.bfloat16)

    def loss(params: Any, x: Any) -> Any:
        one = jnp.ones(x.shape[:2], jnp.int32)
        return jnp.square(trunk.apply(params, x, transformer.positions(one), one)).sum().astype(jnp.float32)

    params, x = jax.eval_shape(trunk.init, KEY), jax.ShapeDtypeStruct((2, 64, 8), jnp.float32)
    text = jax.jit(jax.grad(loss)).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("__cudnn$fmhaSoftmax("), text.count("__cudnn$fmhaSoftmaxBackward(")) == (1, 1)


SPEC = Spec(observation_shape=(6, 3), action_size=2, discrete=True)


def cue(key: Any, rows: int) -> tuple[Transition, Any]:
    """Histories whose first observation alone says which of two actions is rewarded; the episode ends there."""
    keys = jax.random.split(key, 3)
    history = jax.random.normal(keys[0], (rows, *SPEC.observation_shape))
    right = jax.random.randint(keys[1], (rows,), 0, 2)
    history = history.at[:, :, 0].set(0).at[:, 0, 0].set(2.0 * right - 1)
    action = jax.random.randint(keys[2], (rows,), 0, 2)
    zero = jnp.zeros(rows)
    return Transition(history, action, 1.0 * (action == right), zero, history, action, zero), right


@pytest.mark.long
def test_dqn_remembers() -> None:
    config = dqn.Config(hidden=(16, 16), learning_rate=3e-3)
    learner = dqn.make(config, SPEC, heads.make("hl_gauss", -0.5, 1.5, 11))

    @jax.jit
    def trained(key: Any) -> Any:
        def one(state: Any, key: Any) -> Any:
            return learner.update(state, cue(key, 64)[0], key)

        state = learner.init(key, cue(key, 64)[0])
        return jax.lax.scan(one, state, jax.random.split(key, 150))[0]

    @jax.jit
    def correct(state: Any, key: Any) -> Any:
        batch, right = cue(key, 256)
        return (learner.act(state, batch.observation, key) == right).mean()

    assert correct(trained(KEY), jax.random.key(7)) > 0.97


@pytest.mark.parametrize("hidden", [(), (16, 32), (12,)])
def test_impossible_widths_are_refused(hidden: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a transformer has blocks of one width, a multiple of 8"):
        dqn.make(dqn.Config(hidden=hidden), SPEC, heads.scalar())
