"""`jax.pmap`, for those who ask for it; `rl.shard.batches` has none of its exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl.replay.dataset import Dataset
from rl.replay.source import Source
from rl.shard.placement import part_length
from rl.train import Epoch, Report, scan_updates
from rl.types import Array, Key, Learner, Metrics, State, Transition

Optimiser = Callable[[Any], optax.GradientTransformation]  # learning rate -> gradient transformation


def pmap_updates(
    make: Callable[[Optimiser], Learner],
    sample: Source,
    steps: int,
    *,
    optimiser: Optimiser = optax.adam,
) -> Epoch:
    """`rl.train.scan_updates` of a single learner over this host's devices by `jax.pmap`, already compiled.

    Every device draws the whole batch, keeps its own rows, and averages its gradients with the others in
    the optimiser. So it equals one device up to rounding for losses that are means over rows. ``td3_bc``, ``rebrac``
    and ``fql`` with ``normalize_q`` are not: they divide Q by its mean size over the batch, which here is that of
    the device's own rows; nor are ``arsq`` and ``cqn`` where only some rows of a batch are demonstrations. Agents that
    draw actions or noise draw other ones than one device would. `rl.shard.data_parallel` has no such
    exception; prefer it.

    Args:
      make: builds the learner from its optimiser, ``functools.partial(iql.make, config, spec, head)``.
      sample: draws the whole batch.
      steps: updates per call.
      optimiser: learning rate to gradient transformation.

    Returns:
      The function of (state, dataset, key) to (state, report). The state, which ``make(optimiser).init``
      starts, is consumed. A dataset that is not yet on all devices is copied there at every call: place it once, by
      `jax.device_put` with a replicated sharding.

    Raises:
      ValueError: in a run of several hosts; when traced, if the batch does not divide over the devices, or is one of
        tokens, whose losses are means over those that are actions.
    """
    if jax.process_count() > 1:
        raise ValueError("pmap_updates averages over one host only: use data_parallel with a mesh")
    devices = jax.local_devices()
    learner = make(averaged(optimiser, "data"))
    here = Mesh(devices, "data")

    def epoch(state: State, dataset: Dataset, key: Key, device: Array) -> tuple[State, Report]:
        def part(dataset: Dataset, key: Key, step: Array | int) -> Transition:
            batch = sample(dataset, key, step)
            if not isinstance(batch, Transition):
                raise ValueError(
                    f"pmap_updates averages means over each device's rows, which for a {type(batch).__name__} is not "
                    "the mean over all of them: use data_parallel with a mesh"
                )
            rows = part_length(batch.reward.shape[0], here, "data")
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, device * rows, rows), batch)

        def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
            state, metrics = learner.update(state, batch, jax.random.fold_in(key, device))
            return state, jax.lax.pmean(metrics, "data")

        return scan_updates(update, part, steps)(state, dataset, key)

    mapped = jax.pmap(
        epoch, "data", in_axes=(None, None, None, 0), out_axes=None, devices=devices, donate_argnums=0
    )
    return lambda state, dataset, key: mapped(
        *jax.device_put((state, dataset, key), NamedSharding(here, P())), np.arange(len(devices))
    )


def averaged(optimiser: Optimiser, axis: str) -> Optimiser:
    """``optimiser`` on gradients averaged over the mapped ``axis``; its state has the same structure."""

    def build(learning_rate: Any) -> optax.GradientTransformation:
        inner = optimiser(learning_rate)

        def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return inner.update(jax.lax.pmean(gradients, axis), state, params)

        return optax.GradientTransformation(inner.init, update)

    return build
