"""Behaviour policies: snapshots of one training run in one small npz, evaluated in NumPy.

A file holds, for ``S`` snapshots of a tanh-squashed Gaussian policy with ReLU layers (as
`rl.networks.mlp.squashed_policy` has it), ``kernel_0`` [S, O, H], ``bias_0`` [S, H], ... up to a last layer of 2 D
outputs (mean and log standard deviation), as float16 or float32; ``steps`` [S], the environment steps of training
behind each, increasing; ``returns`` [S, R], what R episodes of its sampled actions returned; ``random_returns`` [R];
and ``card``, JSON: the environment, which snapshots are the medium and the expert, and what made them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl.data.recipes import storage
from rl.files import expanded, reading

FOLDER = Path(__file__).parent / "actors"
_CARD = ("environment", "medium", "expert", "random_steps", "log_std", "command", "seed", "commit")


class Actors(NamedTuple):
    """The snapshots of a file."""

    kernels: list[np.ndarray]  # [S, inputs, outputs] of each layer
    biases: list[np.ndarray]  # [S, outputs]
    steps: np.ndarray  # [S] int64
    returns: np.ndarray  # [S, R] float32; R = 0 where nobody measured them
    random_returns: np.ndarray  # [R]
    card: dict[str, Any]  # environment, medium, expert: see `_CARD`

    def policy(self, index: int) -> Policy:
        """Snapshot ``index`` as a function."""
        layers = [
            (kernel[index].astype(np.float32), bias[index].astype(np.float32))
            for kernel, bias in zip(self.kernels, self.biases, strict=True)
        ]
        low, high = self.card["log_std"]
        return Policy(layers, low, high)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A tanh-squashed diagonal Gaussian on (-1, 1)^D."""

    layers: list[tuple[np.ndarray, np.ndarray]]  # (kernel, bias)
    low: float  # of the log standard deviation
    high: float

    def __call__(self, observation: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        """Draw an action [D] float32 for ``observation`` [O] float32; return it and its log density."""
        mean, log_std = self._outputs(observation)
        log_std = np.clip(log_std, self.low, self.high)
        noise = rng.standard_normal(len(mean), np.float32)
        before = mean + np.exp(log_std) * noise
        # log(1 - tanh(u)^2) in a form that does not cancel for large u.
        log_slope = 2 * (math.log(2) - before - np.logaddexp(0, -2 * before))
        log_prob = -noise * noise / 2 - log_std - math.log(2 * math.pi) / 2 - log_slope
        return np.tanh(before), float(log_prob.sum())

    def mode(self, observation: np.ndarray) -> np.ndarray:
        """The action [D] float32 at the mean of the Gaussian for ``observation`` [O] float32."""
        return np.tanh(self._outputs(observation)[0])

    def _outputs(self, observation: np.ndarray) -> list[np.ndarray]:
        """Mean and log standard deviation, [D] both."""
        x = observation
        for kernel, bias in self.layers[:-1]:
            x = np.maximum(_product(x, kernel) + bias, 0)
        kernel, bias = self.layers[-1]
        return np.split(_product(x, kernel) + bias, 2)


def _product(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """``x @ kernel``, without BLAS: its last bits depend on how many threads it finds."""
    return np.einsum("i,ij->j", x, kernel)


def shipped(environment: str) -> bool:
    """Whether the package holds actors of ``environment``."""
    return (FOLDER / f"{environment}.npz").exists()


def load(path: str | os.PathLike | None, environment: str) -> Actors:
    """Read the actors of ``environment`` from ``path``, or those shipped with the package if None.

    For development, the npz of a published stable-baselines3 SAC actor (``latent_pi.0.weight`` ... ``log_std.bias``)
    is read too, as the only snapshot; its card says that this library did not train it.

    Raises:
      ValueError: there are none, the file is damaged or of another layout, or they act in another environment.
    """
    file = FOLDER / f"{environment}.npz" if path is None else expanded(path)
    if path is None and not shipped(environment):
        raise ValueError(
            f"no actors for {environment} are shipped: train them (experiments/actors.py says how) and name "
            "the file with --actors"
        )
    remedy = "name another file with --actors"
    with reading(file, "npz", remedy), np.load(file, allow_pickle=False) as npz:
        arrays = {name: npz[name] for name in npz.files}
    if "mu.weight" not in arrays and "card" not in arrays:
        raise ValueError(
            f"{file} holds no actors: it has {', '.join(sorted(arrays))}. experiments/actors.py writes such files"
        )
    with reading(file, "actors", remedy):
        if "mu.weight" in arrays:
            actors = _from_stable_baselines(arrays, environment, file.name)
        else:
            actors = _from_arrays(arrays)
        known = actors.card["environment"]
    if known != environment:
        raise ValueError(f"the actors in {file} act in {known}, not in {environment}")
    return actors


def save(path: Path, actors: Actors) -> None:
    """Write ``actors`` at ``path``, whole or not at all; `load` gives the same back.

    Raises:
      ValueError: the card lacks an entry.
    """
    missing = [name for name in _CARD if name not in actors.card]
    if missing:
        raise ValueError(f"the card of {path.name} needs {', '.join(missing)}")
    layers = {
        f"{kind}_{i}": array
        for kind, arrays in (("kernel", actors.kernels), ("bias", actors.biases))
        for i, array in enumerate(arrays)
    }
    storage.save(
        path,
        {
            **layers,
            "steps": actors.steps,
            "returns": actors.returns,
            "random_returns": actors.random_returns,
            "card": np.array(json.dumps(actors.card)),
        },
    )


def digest(actors: Actors) -> str:
    """Return a SHA-256 over everything that decides an action."""
    result = hashlib.sha256(json.dumps([actors.card["environment"], actors.card["log_std"]]).encode())
    for array in (*actors.kernels, *actors.biases):
        result.update(f"{array.dtype.str} {array.shape}".encode())
        result.update(np.ascontiguousarray(array).data)
    return result.hexdigest()


def _from_arrays(arrays: dict[str, np.ndarray]) -> Actors:
    layers = sum(name.startswith("kernel_") for name in arrays)
    return Actors(
        kernels=[arrays[f"kernel_{i}"] for i in range(layers)],
        biases=[arrays[f"bias_{i}"] for i in range(layers)],
        steps=arrays["steps"],
        returns=arrays["returns"],
        random_returns=arrays["random_returns"],
        card=json.loads(str(arrays["card"])),
    )


def _from_stable_baselines(arrays: dict[str, np.ndarray], environment: str, file: str) -> Actors:
    """One snapshot, which serves as the medium and as the expert."""
    hidden = sorted(
        name.removesuffix(".weight") for name in arrays if name.startswith("latent_pi") and "weight" in name
    )
    weights = [arrays[f"{name}.weight"].T for name in hidden]
    biases = [arrays[f"{name}.bias"] for name in hidden]
    weights.append(np.concatenate([arrays["mu.weight"], arrays["log_std.weight"]]).T)
    biases.append(np.concatenate([arrays["mu.bias"], arrays["log_std.bias"]]))
    card = {
        "environment": environment,
        "medium": 0,
        "expert": 0,
        "log_std": [-20.0, 2.0],
        "origin": f"{file}: published actor in the layout of stable-baselines3, not trained by this library",
    }
    none = np.zeros(0, np.float32)
    return Actors(
        [weight[None] for weight in weights],
        [bias[None] for bias in biases],
        np.zeros(1, np.int64),
        none[None],
        none,
        card,
    )
