"""Meshes of devices, and where arrays lie on them: what every host holds in full becomes global arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Array, Key, State

Tree = TypeVar("Tree")


def mesh(seed: int = 1, data: int = -1) -> Mesh:
    """All devices of all hosts, as ``seed`` groups of ``data`` devices each; -1 takes what is left.

    Raises:
      ValueError: if ``seed * data`` is not the number of devices.
    """
    return _mesh(("seed", "data"), seed, data)


def grid(data: int = -1, model: int = 1) -> Mesh:
    """All devices of all hosts, as ``data`` groups of ``model`` devices each; -1 takes what is left.

    Devices of one group share every product, so they must be near each other: those of one host, as a rule.

    Raises:
      ValueError: if ``data * model`` is not the number of devices.
    """
    return _mesh(("data", "model"), model, data)


def _mesh(axes: tuple[str, str], other: int, data: int) -> Mesh:
    """A mesh of ``data`` devices along that axis by ``other`` along the one beside it."""
    devices = jax.device_count()
    if data == -1 and other > 0:
        data = max(devices // other, 1)
    sizes = tuple(data if axis == "data" else other for axis in axes)
    if other < 1 or data < 1 or data * other != devices:
        requested = " times ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
        raise ValueError(
            f"{devices} devices do not divide into {requested}: give --mesh_{axes[0]} and --mesh_{axes[1]} whose "
            f"product is the number of devices, {devices} ({axes[0]}= and {axes[1]}= from Python)"
        )
    # Explicit axes, the default since JAX 0.9, refuse `array[index]` on a sharded array.
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto, AxisType.Auto))


def place(tree: Tree, mesh: Mesh, spec: P = P()) -> Tree:
    """Arrays (NumPy or on one device) as global arrays laid out by ``spec``; by default a copy per device.

    Every host passes the same values, and keeps only the parts that its own devices hold. Arrays that were placed so
    before are returned as they are.

    Raises:
      ValueError: if an axis does not divide over the devices it is split over.
    """
    sharding = NamedSharding(mesh, spec)

    def globally(x: Any) -> Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = globally(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        for length, axis in zip(x.shape, spec, strict=False):
            if axis is not None:
                part_length(length, mesh, axis)
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        host = jax.device_get(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: host[index])

    return jax.tree.map(globally, tree)


def place_state(state: State, mesh: Mesh) -> State:
    """A state stacked over seeds (as from `rl.train.population`), each seed on its part of the mesh."""
    return jax.tree.map(lambda spec, part: place(part, mesh, spec), stacked(mesh), state)


def place_keys(keys: Key, mesh: Mesh) -> Key:
    """Keys [S] beside the seeds that they drive."""
    return place(keys, mesh, over_seeds(mesh))


def place_split(dataset: Dataset, mesh: Mesh) -> Dataset:
    """A dataset in equal contiguous parts over ``data``, for `rl.shard.sharded_sampler`: no device holds all of it.

    Up to ``data - 1`` rows at the end are left out, so that the parts are equal.
    """
    parts = mesh.shape["data"]
    rows = replay.size(dataset) // parts * parts
    return place(jax.tree.map(lambda x: x[:rows], dataset), mesh, P("data"))


def gather(tree: Tree, mesh: Mesh) -> Tree:
    """Global arrays as NumPy arrays, whole on every host. All hosts must call it."""
    if all(map(_is_here, jax.tree.leaves(tree))):
        # Without a program, which an accelerator would start after the epoch that runs.
        return jax.device_get(tree)
    return jax.device_get(_everywhere(mesh)(tree))


def _is_here(leaf: Any) -> bool:
    """Whether this host holds the whole array, by itself or as every other does; the same on all hosts."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


@functools.cache
def _everywhere(mesh: Mesh) -> Callable[[Any], Any]:
    # One program for the whole tree. `jax.device_put` runs one for each array, and on CPUs, which start programs
    # in any order, two hosts then wait for each other in different ones.
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def over_seeds(mesh: Mesh) -> P:
    """How an axis over seeds is split."""
    # A split over one device comes back from XLA as no split: naming it would cost a second compile.
    return P("seed") if mesh.shape["seed"] > 1 else P()


def stacked(mesh: Mesh) -> State:
    """As `rl.train.STACKED`: every array has one slice per seed, and all seeds share one step."""
    return State(params=over_seeds(mesh), target=over_seeds(mesh), optimiser=over_seeds(mesh), step=P())


def part_length(length: int, mesh: Mesh, axis: str) -> int:
    """The share of each device along ``axis``.

    Raises:
      ValueError: it does not divide.
    """
    parts = mesh.shape[axis]
    if length % parts:
        raise ValueError(f"{length} does not divide over the {parts} devices of the mesh's {axis!r} axis")
    return length // parts
