"""Adapters of low rank on one frozen language model (LoRA; Hu et al., ICLR 2022).

Beside each dense layer ``x W + b`` of the blocks, which stays as it is, two thin matrices learn:

    y = x W + b + x A B        A [in, r] uniform as in a linear layer, B [r, out] zero

so that training starts at the frozen model. This is the paper's form with alpha = r; its factor alpha / r is one on the
learning rate. All models of an agent are such adapters on one *base*: policy, Q, V and their target networks, of
which ILQL has three. The base has no gradient and no moments, is in bfloat16 and lies in no checkpoint. Target networks
follow A and B, not their product.

Agents know nothing of this: `learner` gives them a model whose parameters are adapters alone, and `whole` turns a state
into that of an agent without adapters, for all that reads, plays or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.language import model
from rl.language.model import LM
from rl.networks.transformer import ADAPTER
from rl.replay.source import Source
from rl.types import Array, Key, Learner, Metrics, Params, State


class Batch(NamedTuple):
    """What an agent learns from, a batch or all data, and the frozen model."""

    tokens: Any  # [B, T], a `rl.types.TokenBatch`
    base: Params


def learner(make: Callable[[LM], Learner], lm: LM, rank: int) -> Learner:
    """The learner of `Batch` that ``make`` gives for adapters of ``lm``; it acts and values as `whole` says.

    Args:
      make: an agent's learner of a model, ``lambda lm: ilql.make(config, lm, head)``.
      lm: the model; its own parameters, which ``init`` gives, are not used.
      rank: ``r``.

    Raises:
      ValueError: a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"adapters need a rank of at least 1, not {rank}")

    def init(key: Key, batch: Batch) -> State:
        return make(_on(lm, None, rank)).init(key, batch.tokens)

    def update(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
        return make(_on(lm, batch.base, rank)).update(state, batch.tokens, key)

    return Learner(init, update, _not_alone, _not_alone)


def sampler(sample: Source) -> Source:
    """The source of `Batch` whose tokens ``sample`` draws."""

    def draw(data: Batch, key: Key, step: Array | int = 0) -> Batch:
        return Batch(sample(data.tokens, key, step), data.base)

    return draw


def frozen(params: Params) -> Params:
    """A base: matrices in bfloat16, norms and biases, which are small, in float32; NumPy stays NumPy."""

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf.astype(jnp.float32 if path[-1].key in ("scale", "bias") else jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(cast, params)


def whole(tree: Any, base: Params) -> Any:
    """``tree``, a state for instance, where each model's adapters stand among the base's own parameters.

    Nothing is copied. What takes an agent's state or a model's parameters takes these as well, with the same ``lm``.
    """
    if isinstance(tree, State):
        return tree._replace(params=whole(tree.params, base), target=whole(tree.target, base))
    if not isinstance(tree, Mapping):
        return tree
    if "blocks" in tree:
        return {**base, "blocks": {**base["blocks"], **tree["blocks"]}}
    return {name: whole(part, base) for name, part in tree.items()}


def merged(tree: Any) -> Any:
    """What `whole` returned, with plain weights ``W + A B`` in place of each model's layers and adapters.

    NumPy, float32, and the optimisers left out of a state: as it is exported.
    """
    if isinstance(tree, State):
        return tree._replace(params=merged(tree.params), target=merged(tree.target), optimiser={})
    if not isinstance(tree, Mapping):
        return _plain(tree)
    if "blocks" not in tree:
        return {name: merged(part) for name, part in tree.items()}
    blocks = {}
    for name, layer in tree["blocks"].items():
        if name.endswith(ADAPTER):
            continue
        blocks[name] = jax.tree.map(_plain, layer)
        if adapter := tree["blocks"].get(name + ADAPTER):
            blocks[name]["kernel"] += np.matmul(_plain(adapter["a"]), _plain(adapter["b"]))
    others = {name: part for name, part in tree.items() if name != "blocks"}
    return {**jax.tree.map(_plain, others), "blocks": blocks}


def _on(lm: LM, base: Params | None, rank: int) -> LM:
    """The model whose parameters are adapters alone."""

    def init(key: Key) -> Params:
        shapes = jax.eval_shape(model.make(lm.config).init, key)["blocks"]
        layers = {name: layer["kernel"].shape for name, layer in shapes.items() if "kernel" in layer}
        blocks = {}
        for number, (name, (count, inputs, outputs)) in enumerate(sorted(layers.items())):
            layer_key = jax.random.fold_in(key, number)
            a = jax.random.uniform(layer_key, (count, inputs, rank), minval=-1.0) / jnp.sqrt(inputs)
            blocks[name + ADAPTER] = {"a": a, "b": jnp.zeros((count, rank, outputs))}
        return {"blocks": blocks}

    def on_base(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *inputs: function(whole(params, base), *inputs)

    return lm._replace(
        init=init,
        features=on_base(lm.features),
        logits=on_base(lm.logits),
        extend=on_base(lm.extend),
        residuals=on_base(lm.residuals),
    )


def _plain(leaf: Any) -> np.ndarray:
    return np.array(leaf, np.float32)


def _not_alone(*_: object) -> Any:
    raise NotImplementedError(
        "adapters alone do not act: ask the agent's own learner, with the `whole` state"
    )
