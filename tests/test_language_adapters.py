"""Adapters on a frozen model: against plain weights, against the package peft, and what they cost."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import CONFIGS, random_params

from benchmarks.language import bytes_per_parameter
from rl.agents import bcoder, ilql, lm_bc
from rl.language import adapters, huggingface, model
from rl.language.model import LM, Config
from rl.networks.transformer import ADAPTER, Shape
from rl.replay import tokens as replay
from rl.replay.tokens import Turn, episode
from rl.types import Learner, State, TokenBatch
from rl.values import heads

RANK = 3
TOKENS = np.random.RandomState(0).randint(0, 61, (2, 12)).astype(np.int32)
ONE = np.ones_like(TOKENS)
AGENTS = {
    "bcoder": (bcoder, bcoder.Config(value_updates=1, inner=8, value_learning_rate=1e-3)),
    "ilql": (ilql, ilql.Config(inner=8, cql_weight=0.0, target_rate=0.5, learning_rate=1e-3)),
    "lm_bc": (lm_bc, lm_bc.Config(learning_rate=1e-3)),
}


@functools.cache
def base(name: str) -> Any:
    return adapters.frozen(random_params(CONFIGS[name]))


@functools.cache
def random_adapters(name: str) -> Any:
    """Adapters of which neither factor is zero."""
    generator = np.random.RandomState(1)
    shapes = jax.eval_shape(
        lambda key: adapters._on(model.make(CONFIGS[name]), None, RANK).init(key), jax.random.key(0)
    )
    return jax.tree.map(lambda leaf: (0.1 * generator.randn(*leaf.shape)).astype(np.float32), shapes)


def data() -> TokenBatch:
    generator = np.random.default_rng(0)
    episodes = []
    for number in range(4):
        turns = [Turn([3, 1]), Turn(generator.integers(0, 61, 5).tolist(), True, float(number))]
        episodes.append(episode(turns, terminated=True, imitate=1.0))
    return jax.tree.map(jnp.asarray, replay.pack(episodes, 8, together=False, bounds=(-9, 9)))


def make(agent: str, lm: LM) -> Learner:
    module, config = AGENTS[agent]
    return module.make(config, lm, heads.scalar())


@functools.partial(jax.jit, static_argnums=0)
def logits(lm: LM, params: Any) -> Any:
    return lm.logits(params, lm.features(params, TOKENS, ONE))


@functools.cache
def lm(name: str) -> LM:
    return model.make(CONFIGS[name])


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt2", marks=pytest.mark.long)])
def test_adapted_layers_compute_what_merged_weights_do(name: str) -> None:
    params = adapters.whole(random_adapters(name), base(name))
    outputs = logits(lm(name), params)
    head = {"inner": np.ones(2, np.float32)}
    state = adapters.merged(
        State({"value": {"lm": params, "head": head}}, {"policy": params}, {"value": ()}, 3)
    )
    assert state.optimiser == {} and state.step == 3
    np.testing.assert_array_equal(state.params["value"]["head"]["inner"], head["inner"])
    for plain in (adapters.merged(params), state.params["value"]["lm"], state.target["policy"]):
        assert not [layer for layer in plain["blocks"] if layer.endswith(ADAPTER)]
        np.testing.assert_allclose(outputs, logits(lm(name), plain), atol=1e-4)
    assert np.abs(outputs - logits(lm(name), base(name))).max() > 0.1


@pytest.mark.slow
def test_adapters_start_at_the_frozen_model_which_has_no_gradient() -> None:
    """ILQL's three models, to the bit at the start; an update moves adapters and heads, and holds nothing else."""
    config = Config(61, 16, Shape(width=16, layers=1, heads=2, kv_heads=1, head_size=10, inner=40))
    trunk, params = model.make(config), adapters.frozen(random_params(config))
    learner, batch = (
        adapters.learner(functools.partial(make, "ilql"), trunk, 1),
        adapters.Batch(data(), params),
    )
    start = jax.jit(learner.init)(jax.random.key(0), batch)
    leaves = jax.tree_util.tree_leaves_with_path(start.params)
    for a in (x for path, x in leaves if jax.tree_util.keystr(path).endswith("['a']")):  # U(+-1/sqrt(inputs))
        assert 0.6 < np.abs(a).max() * np.sqrt(a.shape[-2]) < 1
    whole = adapters.whole(start, params)
    expected = logits(trunk, params)
    for weights in (whole.params["policy"], whole.params["trunk"], whole.target["trunk"]):
        np.testing.assert_array_equal(logits(trunk, weights), expected)
    update = jax.jit(learner.update).lower(start, batch, jax.random.key(0)).compile()
    last, _ = update(start, batch, jax.random.key(0))
    for name, weights in adapters.whole(last, params).params.items():
        if name in ("policy", "trunk"):
            assert np.abs(np.asarray(logits(trunk, weights)) - expected).max() > 1e-4
    # Gradients of factors are products of their shapes; those of the frozen layers would be, too.
    shapes = re.findall(r"f32\[([\d,]+)\]\S* dot\(", update.as_text())
    products = {tuple(sorted(map(int, shape.split(",")))) for shape in shapes}
    assert (1, 16) in products and not {(16, 40), (16, 20), (10, 16)} & products


@pytest.mark.parametrize("agent", AGENTS)
def test_bytes_of_a_parameter(agent: str) -> None:
    """SmolLM2's architecture, counted in the arrays: the model is there once, in bfloat16, whatever the agent."""
    smollm2 = Config(49_152, 8192, Shape(576, 30, heads=9, kv_heads=3, head_size=64, inner=1536))
    shapes = jax.eval_shape(lambda: adapters.frozen(model.make(smollm2).init(jax.random.key(0))))

    def per_parameter(learner: Learner, batch: Any) -> float:
        held = jax.eval_shape(learner.init, jax.random.key(0), batch), batch
        return bytes_per_parameter(held, smollm2)

    build = functools.partial(make, agent)
    adapted = adapters.learner(build, model.make(smollm2), 8)
    sizes = [
        per_parameter(build(model.make(smollm2)), data()),
        per_parameter(adapted, adapters.Batch(data(), shapes)),
    ]
    assert sizes == pytest.approx([12, 2.22] if agent == "lm_bc" else [28, 2.51], abs=0.01)


def test_the_same_numbers_as_peft(tmp_path: Path) -> None:
    """The forward pass, and gradients of both factors of every layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    huggingface.save(
        tmp_path, CONFIGS["qwen2"], jax.tree.map(lambda x: np.asarray(x, np.float32), base("qwen2"))
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    theirs = peft.get_peft_model(
        theirs, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets)
    ).eval()
    ours = random_adapters("qwen2")
    names = dict(zip(targets, ("query", "key", "value", "out", "gate", "up", "down"), strict=True))
    layers = {}  # by name, each with its place in ours
    for path, layer in theirs.named_modules():
        parts = path.split(".")
        if parts[-1] in targets:
            place = names[parts[-1]] + ADAPTER, int(parts[parts.index("layers") + 1])
            factors = {"a": layer.lora_A["default"].weight, "b": layer.lora_B["default"].weight}
            layers |= {(*place, factor): weight for factor, weight in factors.items()}
    assert len(layers) == 2 * 2 * len(targets)
    with torch.no_grad():
        for (name, index, factor), weight in layers.items():
            weight.copy_(torch.tensor(ours["blocks"][name][factor][index].T))
    out = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits
    out.square().mean().backward()

    @jax.jit
    def ask(params: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs = logits(lm("qwen2"), adapters.whole(params, base("qwen2")))
            return jnp.square(outputs).mean(), outputs

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, outputs), gradient = ask(ours)
    np.testing.assert_allclose(outputs, out.detach().numpy(), atol=1e-4)
    for (name, index, factor), weight in layers.items():
        expected = weight.grad.numpy().T
        np.testing.assert_allclose(
            gradient["blocks"][name][factor][index], expected, atol=1e-4 * max(1, np.abs(expected).max())
        )
