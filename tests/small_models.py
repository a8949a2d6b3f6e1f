"""Small language models of every kind, with random parameters that take no compilation to make."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rl.language import model
from rl.language.model import Config
from rl.networks.rotary import Rope
from rl.networks.transformer import Shape

LLAMA = Shape(width=16, layers=2, heads=4, kv_heads=2, head_size=8, inner=24)
GPT2 = dataclasses.replace(
    LLAMA,
    kv_heads=4,
    head_size=4,
    rms=False,
    gated=False,
    rope=None,
    qkv_bias=True,
    out_bias=True,
    inner_bias=True,
)
STRETCHED = dataclasses.replace(
    LLAMA, rope=Rope(500.0, 8.0, 1.0, 4.0, 16), qkv_bias=True, out_bias=True, inner_bias=True
)
MISTRAL = dataclasses.replace(LLAMA, window=5, rope=Rope(500.0, 4.0, kind="linear"))
YARN = Rope(500.0, 4.0, 1.0, 8.0, 16, "yarn", gain=1.13)
SMOLLM3 = dataclasses.replace(LLAMA, layers=3, rope=YARN, nope_layers=(1,), window=6, global_layers=(0, 2))
GEMMA = dataclasses.replace(LLAMA, heads=2, kv_heads=1, head_size=12, geglu=True)
GEMMA2 = dataclasses.replace(
    GEMMA, kv_heads=2, post_norms=True, query_size=20, score_cap=3.0, window=7, global_layers=(1,)
)
CONFIGS = {
    "llama": Config(61, 64, LLAMA, tied=False),
    "llama3": Config(61, 64, STRETCHED),
    "qwen2": Config(61, 64, dataclasses.replace(LLAMA, qkv_bias=True)),
    "qwen3": Config(61, 64, dataclasses.replace(LLAMA, qk_norm=True)),
    "gpt2": Config(61, 64, GPT2),
    "mistral": Config(61, 64, MISTRAL, tied=False),
    "smollm3": Config(61, 64, SMOLLM3),
    "gemma": Config(61, 64, GEMMA, embedding_scale=4.0),
    "gemma2": Config(61, 64, GEMMA2, embedding_scale=4.0, logit_cap=2.0),
}


def random_params(config: Config, seed: int = 0) -> Any:
    """Parameters with choices far from uniform, and biases and norms that are not zeros and ones."""
    generator = np.random.RandomState(seed)
    shapes = jax.eval_shape(model.make(config).init, jax.random.key(0))

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + 0.3 * generator.randn(*leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
