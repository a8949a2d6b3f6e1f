"""CQN's network, encoding and greedy zooming, written down again in NumPy: interval after interval, loop after loop.

It shares no line with `rl.agents.cqn`, `rl.networks.dueling` and `rl.values.coarse`. Networks have relu and LayerNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def standardised(x: np.ndarray, norm: Any) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * norm["scale"] + norm["bias"]


def stream(params: Any, seen: np.ndarray, centres: np.ndarray, one_hot: np.ndarray) -> np.ndarray:
    trunk, dense = params["trunk"], params["dense"]
    hidden = np.tanh(
        standardised(seen @ trunk["Dense_0"]["kernel"] + trunk["Dense_0"]["bias"], trunk["LayerNorm_0"])
    )
    x = np.concatenate([hidden, centres, np.broadcast_to(one_hot, (*hidden.shape[:-1], len(one_hot)))], -1)
    layers = sum(name.startswith("Dense") for name in dense)
    for i in range(layers - 1):
        x = x @ dense[f"Dense_{i}"]["kernel"] + dense[f"Dense_{i}"]["bias"]
        x = np.maximum(standardised(x, dense[f"LayerNorm_{i}"]), 0)
    return x @ dense[f"Dense_{layers - 1}"]["kernel"] + dense[f"Dense_{layers - 1}"]["bias"]


def outputs(params: Any, seen: np.ndarray, centres: np.ndarray, level: int, levels: int) -> np.ndarray:
    """Outputs [N, D, B, K] of all bins of the intervals with ``centres`` [N, D]."""
    rows, size = centres.shape
    one_hot = np.eye(levels)[level]
    value = stream(params["value"], seen, centres, one_hot).reshape(rows, size, 1, -1)
    advantage = stream(params["advantage"], seen, centres, one_hot)
    advantage = advantage.reshape(rows, size, -1, value.shape[-1])
    return value + advantage - advantage.mean(2, keepdims=True)


def walk(
    params: Any,
    seen: np.ndarray,
    choose: Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray],
    levels: int,
    size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zooms in as ``choose`` (outputs [N, D, B, K], low, high, level) -> bins [N, D] says.

    Returns outputs of all bins [L, N, D, B, K], the bins [L, N, D] and the action [N, D] in the end.
    """
    low, high = -np.ones((len(seen), size)), np.ones((len(seen), size))
    every, chosen = [], []
    for level in range(levels):
        every.append(outputs(params, seen, (low + high) / 2, level, levels))
        bins = choose(every[-1], low, high, level)
        width = (high - low) / every[-1].shape[2]
        low = low + bins * width
        high = low + width
        chosen.append(bins)
    return np.stack(every), np.stack(chosen), (low + high) / 2


def follow(action: np.ndarray) -> Callable[..., np.ndarray]:
    """Zooms to where ``action`` [N, D] lies."""

    def choose(output: np.ndarray, low: np.ndarray, high: np.ndarray, level: int) -> np.ndarray:
        bins = output.shape[2]
        return np.clip(np.floor((action - low) / ((high - low) / bins)), 0, bins - 1).astype(int)

    return choose


def greedy(value: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """Zooms into the bins whose outputs have the greatest ``value``."""
    return lambda output, low, high, level: value(output).argmax(-1)


def picked(output: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Of outputs [L, N, D, B, K] those [L, N, D, K] of ``bins`` [L, N, D]."""
    result = np.empty((*bins.shape, output.shape[-1]), output.dtype)
    for index in np.ndindex(bins.shape):
        result[index] = output[index][bins[index]]
    return result
