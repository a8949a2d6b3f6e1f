"""Logged experience: names and files in, a `rl.replay.dataset.Dataset` of NumPy arrays out.

Each reader knows one layout and ends in `rl.data.steps.from_steps`, where steps become transitions; what a library
raises while it reads a file, `rl.files.reading` turns into a `DataError` with the file and a remedy. No
simulator runs here, except that OGBench's rewards need one; data is made in ``rl.data.recipes``. Nothing here
knows a device or an agent, and optional packages are imported only by the reader that needs them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl.data import d4rl, minari, ogbench, recipes, synthetic
from rl.data.steps import Loaded, digest, from_steps, loaded
from rl.files import DataError, expanded
from rl.replay.dataset import Dataset

__all__ = ["DataError", "Loaded", "check_name", "digest", "from_steps", "load", "names"]


def load(
    name: str,
    *,
    folder: str | Path | None = None,
    clip_actions: bool = False,
    environment: str | None = None,
    validation: bool = False,
    flatten_observations: bool = False,
    shuffled: bool = False,
) -> Loaded:
    """The dataset called ``name``: one of `names`, or a file.

    - ``hopper-medium-v2`` …: D4RL (`rl.data.d4rl`); so is a path that ends in ``.hdf5`` or ``.h5``, and
      ``hopper-medium-regen-v5`` …, which `rl.data.recipes` makes.
    - ``cube-single-play-singletask-v0`` …: OGBench (`rl.data.ogbench`); so is a path that ends in ``.npz``.
    - ``cube-double-play-v0+entities``: one of these, OGBench's cubes, as sets (`rl.envs.entities`).
    - ``minari:D4RL/door/human-v2``, ``minari:/path/to/dataset``: Minari (`rl.data.minari`).
    - ``synthetic-continuous``, ``synthetic-discrete``, ``synthetic-goals``: made on the spot (`rl.data.synthetic`).

    Args:
        name: see above.
        folder: where named files are, if not where their own packages keep them.
        clip_actions: clip actions that lie outside their box; without it they are an error.
        environment: to evaluate in, if not the dataset's own.
        validation: read what was published beside it as held-out data, too, if it is there (OGBench's -val.npz).
        flatten_observations: concatenate the entries of observations that are dictionaries (Minari has such).
        shuffled: a file in D4RL's layout holds single transitions in no order (with ``next_observations``); without it
            such a log is an error, as one whose next observations are wrong looks the same.

    Raises:
        DataError: an unknown name (the nearest known ones are listed), or a log that cannot be used.
        ImportError: the optional package for this kind of data is not installed.
    """
    if "+" in name:
        from rl.envs import entities  # which imports gymnasium; to read data, nobody else needs it

        if name.endswith(entities.SUFFIX):
            vectors = load(
                name.removesuffix(entities.SUFFIX),
                folder=folder,
                clip_actions=clip_actions,
                environment=environment and environment.removesuffix(entities.SUFFIX),
                validation=validation,
                shuffled=shuffled,
            )
            return _as_entities(name, vectors)
    reader = _reader(name)
    if shuffled and reader != "d4rl":
        raise DataError(
            f"--shuffled (shuffled=True) is for logs in D4RL's layout, which may hold next observations, and {name} is "
            "none: its steps are read in their order; leave it out, or save the log as .hdf5"
        )
    if reader == "synthetic":
        return _synthetic(name, environment, validation)
    readers: dict[str, tuple[Callable[..., Loaded], dict[str, bool]]] = {
        "minari": (minari.load, {"flatten_observations": flatten_observations}),
        "d4rl": (d4rl.load, {"shuffled": shuffled}),
        "ogbench": (ogbench.load, {"validation": validation}),
    }
    read, options = readers[reader]
    return read(
        name.removeprefix("minari:"),
        folder=folder,
        clip_actions=clip_actions,
        environment=environment,
        **options,
    )


def check_name(name: str) -> None:
    """Raises DataError, as `load` does, if no reader knows ``name``; what there is under it is not looked at."""
    if "+" in name:
        from rl.envs import entities  # as in `load`

        name = name.removesuffix(entities.SUFFIX)
    _reader(name)


def _reader(name: str) -> str:
    """Who reads the dataset. Raises DataError on a name that nobody knows, with the nearest ones."""
    if name.startswith("minari:"):
        return "minari"
    if name in d4rl.DATASETS or name in recipes.LOCOMOTION or name.endswith((".hdf5", ".h5")):
        return "d4rl"
    if ogbench.known(name) or name.endswith(".npz"):
        return "ogbench"
    if name in synthetic.NAMES:
        return "synthetic"
    if expanded(name).is_file():
        raise DataError(
            f"{name} is a file, but no .hdf5, .h5 or .npz: docs/own_data.md says what such files hold"
        )
    if expanded(name).is_dir():
        raise DataError(
            f"{name} is a folder: give the file of steps in it, or 'minari:{name}' for a dataset of Minari"
        )
    nearest = difflib.get_close_matches(name, names(), n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "rl.data.names() lists them all."
    raise DataError(
        f"unknown dataset {name!r}: {hint} A path ends in .hdf5, .h5 or .npz; Minari's ids follow 'minari:'"
    )


def _synthetic(name: str, environment: str | None, validation: bool) -> Loaded:
    result = synthetic.load(name)
    return result._replace(
        environment=environment or result.environment,
        note=result.note if result.environment or not environment else "",
        validation=result.validation if validation else None,
    )


def _as_entities(name: str, vectors: Loaded) -> Loaded:
    """OGBench's cubes as sets of entities, with ids that are drawn for each episode."""
    from rl.envs import entities

    try:
        entities.check_name(vectors.environment or name)
        (size,) = vectors.spec.observation_shape
        count = entities.cubes(size)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: {error}") from error
    generator = np.random.default_rng(0)

    def sets(dataset: Dataset) -> Dataset:
        steps, last = dataset.transitions, np.asarray(dataset.last)
        episode = np.cumsum(last) - last
        ids = np.stack([entities.draw_ids(count, generator) for _ in range(int(episode[-1]) + 1)])[episode]
        return dataset._replace(
            transitions=steps._replace(
                observation=entities.of_vectors(steps.observation, ids),
                next_observation=entities.of_vectors(steps.next_observation, ids),
            )
        )

    result = loaded(
        sets(vectors.dataset),
        environment=f"{vectors.environment}{entities.SUFFIX}" if vectors.environment else None,
        source=vectors.source,
        note=vectors.note,
    )
    return result._replace(validation=sets(vectors.validation) if vectors.validation else None)


def names() -> list[str]:
    """Every name that can be loaded without naming a file, sorted (Minari's ids are not among them)."""
    return sorted([*d4rl.DATASETS, *recipes.LOCOMOTION, *ogbench.names(), *synthetic.NAMES])
