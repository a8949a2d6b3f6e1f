"""Many devices, many hosts: the mesh, where arrays lie on it, and how a batch is split over it.

A mesh has two axes. Seeds of a population divide over ``seed`` and never talk to each other; the rows of
every batch divide over ``data``, whose devices hold equal copies of the parameters and average their
gradients. Learners and `rl.train` know neither: the same epoch runs on one device or on a pod, with the same
results up to rounding. No agent, file or logger is known here. Language models that are too large for that lie on a
`grid` instead, whose axes are ``data`` and ``model``: parameters and optimisers are split over both
(`place_language`). Every host runs the same program:

    shard.initialize()
    mesh = shard.mesh(seed=4)
    runs = train.population(make, config, shard.data_parallel(sampler(256), mesh), steps)
    state = shard.place_state(runs.init(keys, example), mesh)
    dataset, keys = shard.place(dataset, mesh), shard.place_keys(keys, mesh)
    for state, report in train.epochs(shard.over_mesh(runs.epoch, mesh), state, dataset, keys, count): ...
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.replay.source import Source
from rl.train import Report, scan_updates
from rl.types import Array, Key, Learner, Metrics, State, Transition

Tree = TypeVar("Tree")
Epoch = Callable[[State, Dataset, Key], tuple[State, Report]]
Optimiser = Callable[[Any], optax.GradientTransformation]

# How launchers that `jax.distributed` can read say that they started several processes.
_PROCESS_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def initialize() -> None:
    """Joins this process to the others of its run; does nothing where there is only one.

    Call it first, before anything asks JAX for a device. Found without help: TPU pods (every host runs the
    same command), ``srun`` and ``mpirun`` (one process per accelerator, unless ``JAX_LOCAL_DEVICE_IDS`` says
    otherwise). Anywhere else set ``JAX_COORDINATOR_ADDRESS`` (host:port of process 0),
    ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` for each process.

    Raises:
      ValueError: if only some of the three variables are set, or one is not a number.
    """
    if jax.distributed.is_initialized():
        return
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        jax.distributed.initialize(address, _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID"))
    elif any(int(os.environ.get(name, 1)) > 1 for name in _PROCESS_COUNTS):
        jax.distributed.initialize()
    elif "tpu" in (getattr(jax.config, "jax_platforms", None) or ""):  # JAX writes it where it finds TPUs
        with contextlib.suppress(ValueError):  # a TPU in no cluster, as in a notebook
            jax.distributed.initialize()


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdigit():
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS is set, so {variable} must be a number, not {value!r}: set it for every "
            "process, or unset JAX_COORDINATOR_ADDRESS to run a single one"
        )
    return int(value)


def is_main() -> bool:
    """True in the one process that writes logs and result files."""
    return jax.process_index() == 0


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
        asked = " times ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
        raise ValueError(f"{devices} devices do not divide into {asked}")
    # Explicit axes, the default since JAX 0.9, refuse `array[index]` on a sharded array.
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto, AxisType.Auto))


# ---- placement: arrays that every host holds in full become global ones -----------------------------------


def place(tree: Tree, mesh: Mesh, spec: P = P()) -> Tree:
    """Arrays (NumPy or on one device) as global arrays laid out by ``spec``; by default a copy per device.

    Every host passes the same values, and keeps only the parts that its own devices hold.

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
                _part(length, mesh, axis)
        host = jax.device_get(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: host[index])

    return jax.tree.map(globally, tree)


def place_state(state: State, mesh: Mesh) -> State:
    """A state stacked over seeds (as from `rl.train.population`), each seed on its part of the mesh."""
    return jax.tree.map(lambda spec, part: place(part, mesh, spec), _stacked(mesh), state)


def place_keys(keys: Key, mesh: Mesh) -> Key:
    """Keys [S] beside the seeds that they drive."""
    return place(keys, mesh, _seeds(mesh))


def place_split(dataset: Dataset, mesh: Mesh) -> Dataset:
    """A dataset in equal contiguous parts over ``data``, for `sharded_sampler`: no device holds all of it.

    Up to ``data - 1`` rows at the end are left out, so that the parts are equal.
    """
    parts = mesh.shape["data"]
    rows = replay.size(dataset) // parts * parts
    return place(jax.tree.map(lambda x: x[:rows], dataset), mesh, P("data"))


def gather(tree: Tree, mesh: Mesh) -> Tree:
    """Global arrays as NumPy arrays, whole on every host. All hosts must call it."""
    return jax.device_get(_everywhere(mesh)(tree))


@functools.cache
def _everywhere(mesh: Mesh) -> Callable[[Any], Any]:
    # One program for the whole tree. `jax.device_put` runs one for each array, and on CPUs, which start programs
    # in any order, two hosts then wait for each other in different ones.
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def _seeds(mesh: Mesh) -> P:
    # A split over one device comes back from XLA as no split: naming it would cost a second compile.
    return P("seed") if mesh.shape["seed"] > 1 else P()


def _stacked(mesh: Mesh) -> State:
    """As `rl.train.STACKED`: every array has one slice per seed, and all seeds share one step."""
    return State(params=_seeds(mesh), target=_seeds(mesh), optimiser=_seeds(mesh), step=P())


def _part(length: int, mesh: Mesh, axis: str) -> int:
    """The share of each device along ``axis``."""
    parts = mesh.shape[axis]
    if length % parts:
        raise ValueError(f"{length} does not divide over the {parts} devices of the mesh's {axis!r} axis")
    return length // parts


# ---- language models: parameters over two axes ------------------------------------------------------------

# Ends of parameters' names -> how their last axes are split. Along ``model`` each device has some heads, some of the
# feed-forward layer's units and some of the vocabulary's rows, so that a block needs two sums over devices
# (Shoeybi et al. 2019, "Megatron-LM"); along ``data`` what is left of each is split and gathered when it is needed
# (Rajbhandari et al. 2020, "ZeRO"). Optimisers' moments have the names of their parameters.
_SPLITS = (
    (r"(query|key|value|gate|up)/kernel", ("data", "model")),
    (r"(query|key|value|gate|up)/bias", ("model",)),
    (r"(out|down)/kernel", ("model", "data")),
    (r"(un)?embedding", ("model", "data")),
    (r"position", (None, "data")),
    (r"rows", ("model", None, "data")),  # of `rl.networks.token_heads.vocabulary_values`
    (r"rows_bias", ("model", None)),
)


def language_specs(tree: Tree, mesh: Mesh) -> Tree:
    """How the parameters of language models and their value heads, and all that is named after them, lie on a `grid`.

    What no rule names is whole on every device, and so is an axis that does not divide.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`: parameters, or a whole `rl.types.State`.
      mesh: from `grid`.
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


def over_grid(epoch: Epoch, mesh: Mesh) -> Epoch:
    """An epoch of `rl.train.scan_updates` that leaves its state where `place_language` puts it."""

    def placed(state: State, dataset: Any, key: Key) -> tuple[State, Report]:
        state, report = epoch(state, dataset, key)
        specs = language_specs(state, mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, P()))
        return jax.lax.with_sharding_constraint((state, report), shardings)

    return placed


# ---- the main path: one program, partitioned by the compiler ---------------------------------------------


def over_mesh(epoch: Epoch, mesh: Mesh) -> Epoch:
    """A population's epoch that leaves its state where `place_state` puts it, and its report on every host."""

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (_stacked(mesh), P()))

    def placed(state: State, dataset: Dataset, keys: Key) -> tuple[State, Report]:
        return jax.lax.with_sharding_constraint(epoch(state, dataset, keys), shardings)

    return placed


def data_parallel(sample: Source, mesh: Mesh) -> Source:
    """``sample`` with its batch split over ``data``; the dataset lies on every device (`place`).

    The rows are those that one device would draw. The compiler takes it from there: each device gathers
    and works on its own rows, and every mean over the batch, gradients and the normalisers inside losses
    included, is the mean over all devices.

    Raises:
      ValueError: when traced, if the batch does not divide over ``data``.
    """
    rows = NamedSharding(mesh, P("data"))

    def split(dataset: Dataset, key: Key, step: Array | int = 0) -> Transition:
        batch = sample(dataset, key, step)
        _part(batch.reward.shape[0], mesh, "data")
        return jax.lax.with_sharding_constraint(batch, rows)

    return split


def sharded_sampler(batch_size: int, mesh: Mesh) -> Source:
    """Uniform sampling from a dataset that is itself split over ``data`` (`place_split`).

    Device ``i`` draws ``batch_size / data`` of its own rows with ``fold_in(key, i)``, and no row ever
    travels. All rows are still equally likely, but each device's part of the dataset gives exactly its
    share of every batch: sampling stratified by position in the log, whose batch means have the same
    expectation as those of `replay.dataset.sampler` and no larger variance. A single device draws the same
    batches with one such sampler per part.

    Raises:
      ValueError: if ``batch_size`` does not divide over ``data``.
    """
    sample = replay.sampler(_part(batch_size, mesh, "data"))

    # Only the drawing is code per device: the update stays in the surrounding program. Inside `shard_map`
    # the gradient of a local mean, averaged afterwards, would come out as a sum.
    def draw(part: Dataset, key: Key, step: Array | int) -> Transition:
        return sample(part, jax.random.fold_in(key, jax.lax.axis_index("data")), step)

    return jax.shard_map(draw, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))


# ---- jax.pmap, for those who ask for it ---------------------------------------------------------------


def pmap_updates(
    make: Callable[[Optimiser], Learner],
    sample: Source,
    steps: int,
    *,
    optimiser: Optimiser = optax.adam,
    unroll: int = 1,
) -> Epoch:
    """`train.scan_updates` of a single learner over this host's devices by `jax.pmap`, already compiled.

    Every device draws the whole batch, keeps its own rows, and averages its gradients with the others in
    the optimiser. So it equals one device up to rounding for losses that are means over rows. `td3_bc` and
    `rebrac` are not: they divide Q by its mean size over the batch, which here is that of the device's own
    rows. Agents that draw actions or noise draw other ones than one device would. `data_parallel` has
    neither exception; prefer it.

    Args:
      make: builds the learner from its optimiser, ``functools.partial(iql.make, config, spec, head)``.
      sample: draws the whole batch.
      steps: updates per call.
      optimiser: learning rate to gradient transformation.
      unroll: see `train.scan_updates`.

    Returns:
      The function of (state, dataset, key) to (state, report). The state, which ``make(optimiser).init``
      starts, is consumed.

    Raises:
      ValueError: in a run of several hosts; when traced, if the batch does not divide over the devices.
    """
    if jax.process_count() > 1:
        raise ValueError("pmap_updates averages over one host only: use data_parallel with a mesh")
    devices = jax.local_devices()
    learner = make(averaged(optimiser, "data"))
    here = Mesh(devices, "data")

    def epoch(state: State, dataset: Dataset, key: Key, device: Array) -> tuple[State, Report]:
        def part(dataset: Dataset, key: Key, step: Array | int) -> Transition:
            batch = sample(dataset, key, step)
            rows = _part(batch.reward.shape[0], here, "data")
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, device * rows, rows), batch)

        def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
            state, metrics = learner.update(state, batch, jax.random.fold_in(key, device))
            return state, jax.lax.pmean(metrics, "data")

        return scan_updates(update, part, steps, unroll=unroll)(state, dataset, key)

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
