"""Small language models of every kind, with random parameters that take no compilation to make."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rl.language import model
from rl.language.model import Config
from rl.networks.transformer import Rope, Shape

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
CONFIGS = {
    "llama": Config(61, 64, LLAMA, tied=False),
    "llama3": Config(61, 64, STRETCHED),
    "qwen2": Config(61, 64, dataclasses.replace(LLAMA, qkv_bias=True)),
    "qwen3": Config(61, 64, dataclasses.replace(LLAMA, qk_norm=True)),
    "gpt2": Config(61, 64, GPT2),
}


def random_params(config: Config, seed: int = 0) -> Any:
    """Parameters with choices far from uniform, and biases and norms that are not zeros and ones."""
    generator = np.random.RandomState(seed)
    shapes = jax.eval_shape(model.make(config).init, jax.random.key(0))

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + 0.3 * generator.randn(*leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
