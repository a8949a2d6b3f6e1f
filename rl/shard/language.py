"""Language models that are too large for one device: parameters and optimisers over both axes of a `rl.shard.grid`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl.shard.placement import Tree, gather, place
from rl.train import Epoch, Report
from rl.types import Key, State

# Ends of parameters' names -> how their last axes are split. Along ``model`` each device has some heads, some of the
# feed-forward layer's units and some of the vocabulary's rows, so that a block needs two sums over devices
# (Shoeybi et al. 2019, "Megatron-LM"); along ``data`` what is left of each is split and gathered when it is needed
# (Rajbhandari et al. 2020, "ZeRO"). Optimisers' moments have the names of their parameters.
_SPLITS = (
    (r"(query|key|value|gate|up)/kernel", ("data", "model")),
    (r"(query|key|value|gate|up)/bias", ("model",)),
    (r"(out|down)/kernel", ("model", "data")),
    (r"(query|key|value|gate|up)_lora/a", ("data", None)),  # of `rl.language.adapters`
    (r"(query|key|value|gate|up)_lora/b", (None, "model")),
    (r"(out|down)_lora/a", ("model", None)),
    (r"(out|down)_lora/b", (None, "data")),
    (r"(un)?embedding", ("model", "data")),
    (r"position", (None, "data")),
    (r"rows", ("model", None, "data")),  # of `rl.networks.token_heads.vocabulary_values`
    (r"rows_bias", ("model", None)),
)


def language_specs(tree: Tree, mesh: Mesh) -> Tree:
    """How parameters of language models and value heads, and all that is named after them, lie on a `rl.shard.grid`.

    What no rule names is whole on every device, and so is an axis that does not divide.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`: parameters, or a whole `rl.types.State`.
      mesh: from `rl.shard.grid`.
    """

    def spec(keys: tuple[Any, ...], leaf: Any) -> P:
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        for pattern, axes in _SPLITS:
            if re.search(rf"(^|/){pattern}$", name) and leaf.ndim >= len(axes):
                sizes = leaf.shape[leaf.ndim - len(axes) :]
                fit = [a if a and n % mesh.shape[a] == 0 else None for a, n in zip(axes, sizes, strict=True)]
                return P(*(None,) * (leaf.ndim - len(axes)), *fit)
        return P()

    return jax.tree_util.tree_map_with_path(spec, tree)


def place_language(state: Tree, mesh: Mesh) -> Tree:
    """A language learner's state, laid out by `language_specs`."""
    return jax.tree.map(lambda part, spec: place(part, mesh, spec), state, language_specs(state, mesh))


def init_language(init: Callable[..., Tree], mesh: Mesh, *arguments: Any) -> Tree:
    """``init(*arguments)`` laid out by `language_specs` from the start: no device ever holds all of it.

    Args:
      init: a language learner's, a function of parameters for instance, placed by `place_language`, and a key.
      mesh: from `rl.shard.grid`.
      *arguments: its own.
    """
    specs = language_specs(jax.eval_shape(init, *arguments), mesh)
    return jax.jit(init, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))(
        *arguments
    )


def fetch_language(tree: Tree, mesh: Mesh) -> Tree:
    """As `rl.shard.gather`, but no device holds more than a layer's matrix, an embedding, or one member of a head.

    All hosts must call it.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return jax.device_get(leaf)
        if leaf.ndim < 3:
            return gather(leaf, mesh)
        return np.stack([gather(leaf[layer], mesh) for layer in range(len(leaf))])

    return jax.tree.map(whole, tree)


def on_all_hosts(function: Callable[..., Tree], mesh: Mesh) -> Callable[..., Tree]:
    """``function``, whose answer is whole on every host; all hosts must call it."""
    if jax.process_count() == 1:
        return function
    return lambda *arguments: fetch_language(function(*arguments), mesh)


def over_grid(epoch: Epoch, mesh: Mesh) -> Epoch:
    """An epoch of `rl.train.scan_updates` that leaves its state where `place_language` puts it."""

    def placed(state: State, dataset: Any, key: Key) -> tuple[State, Report]:
        state, report = epoch(state, dataset, key)
        specs = language_specs(state, mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, P()))
        return jax.lax.with_sharding_constraint((state, report), shardings)

    return placed
