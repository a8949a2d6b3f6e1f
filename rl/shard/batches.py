"""The main path: one program, whose batches the compiler divides over the axis ``data``."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.source import Source, with_settings_of
from rl.shard.placement import part_length, stacked
from rl.train import Epoch, Report
from rl.types import Array, Key, State, Transition


def over_mesh(epoch: Epoch, mesh: Mesh) -> Epoch:
    """A population's epoch that leaves its state where `rl.shard.place_state` puts it, and its report on every host."""

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (stacked(mesh), P()))

    def placed(state: State, dataset: Dataset, keys: Key) -> tuple[State, Report]:
        return jax.lax.with_sharding_constraint(epoch(state, dataset, keys), shardings)

    return placed


def data_parallel(sample: Source, mesh: Mesh) -> Source:
    """``sample`` with its batch split over ``data``; the dataset lies on every device (`rl.shard.place`).

    The rows are those that one device would draw. The compiler takes it from there: each device gathers
    and works on its own rows, and every mean over the batch, gradients and the normalisers inside losses
    included, is the mean over all devices.

    Raises:
      ValueError: when traced, if the batch does not divide over ``data``.
    """
    rows = NamedSharding(mesh, P("data"))

    def split(dataset: Dataset, key: Key, step: Array | int = 0) -> Transition:
        batch = sample(dataset, key, step)
        part_length(jax.tree.leaves(batch)[0].shape[0], mesh, "data")
        return jax.lax.with_sharding_constraint(batch, rows)

    return with_settings_of([sample], split)


def sharded_sampler(batch_size: int, mesh: Mesh) -> Source:
    """Uniform sampling from a dataset that is itself split over ``data`` (`rl.shard.place_split`).

    Device ``i`` draws ``batch_size / data`` of its own rows with ``fold_in(key, i)``, and no row ever
    travels. All rows are still equally likely, but each device's part of the dataset gives exactly its
    share of every batch: sampling stratified by position in the log, whose batch means have the same
    expectation as those of `rl.replay.dataset.sampler` and no larger variance. A single device draws the same
    batches with one such sampler per part.

    Raises:
      ValueError: if ``batch_size`` does not divide over ``data``.
    """
    sample = replay.sampler(part_length(batch_size, mesh, "data"))

    # Only the drawing is code per device: the update stays in the surrounding program. Inside `shard_map`
    # the gradient of a local mean, averaged afterwards, would come out as a sum.
    def draw(part: Dataset, key: Key, step: Array | int) -> Transition:
        return sample(part, jax.random.fold_in(key, jax.lax.axis_index("data")), step)

    return jax.shard_map(draw, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
