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

from rl.shard.batches import data_parallel, over_mesh, sharded_sampler
from rl.shard.hosts import (
    any_process,
    blind_to_first,
    forget_launcher,
    from_first_process,
    initialize,
    is_loss,
    is_main,
    started,
    unlike_first,
)
from rl.shard.language import (
    fetch_language,
    init_language,
    language_specs,
    on_all_hosts,
    over_grid,
    place_language,
)
from rl.shard.placement import gather, grid, mesh, place, place_keys, place_split, place_state

__all__ = [
    "any_process",
    "blind_to_first",
    "data_parallel",
    "fetch_language",
    "forget_launcher",
    "from_first_process",
    "gather",
    "grid",
    "init_language",
    "initialize",
    "is_loss",
    "is_main",
    "language_specs",
    "mesh",
    "on_all_hosts",
    "over_grid",
    "over_mesh",
    "place",
    "place_keys",
    "place_language",
    "place_split",
    "place_state",
    "sharded_sampler",
    "started",
    "unlike_first",
]
