"""Logged experience: names and files in, a `rl.replay.dataset.Dataset` of NumPy arrays out.

Each reader knows one layout and ends in `rl.data.steps.from_steps`, where steps become transitions. No
simulator runs here, except that OGBench's rewards need one; data is made in ``rl.data.recipes``. Nothing here
knows a device or an agent, and optional packages are imported only by the reader that needs them.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rl.data import d4rl, minari, ogbench, recipes, synthetic
from rl.data.steps import DataError, Loaded, digest, from_steps

__all__ = ["DataError", "Loaded", "digest", "from_steps", "load", "names"]


def load(
    name: str,
    *,
    folder: str | Path | None = None,
    clip_actions: bool = False,
    environment: str | None = None,
    validation: bool = False,
    flatten_observations: bool = False,
) -> Loaded:
    """The dataset called ``name``: one of `names`, or a file.

    - ``hopper-medium-v2`` …: D4RL (`rl.data.d4rl`); so is a path that ends in ``.hdf5`` or ``.h5``, and
      ``hopper-medium-regen-v5`` …, which `rl.data.recipes` makes.
    - ``cube-single-play-singletask-v0`` …: OGBench (`rl.data.ogbench`); so is a path that ends in ``.npz``.
    - ``minari:D4RL/door/human-v2``, ``minari:/path/to/dataset``: Minari (`rl.data.minari`).
    - ``synthetic-continuous``, ``synthetic-discrete``, ``synthetic-goals``: made on the spot (`rl.data.synthetic`).

    Args:
        name: see above.
        folder: where named files are, if not where their own packages keep them.
        clip_actions: clip actions that lie outside their box; without it they are an error.
        environment: to evaluate in, if not the dataset's own.
        validation: read what was published beside it as held-out data, too, if it is there (OGBench's -val.npz).
        flatten_observations: concatenate the entries of observations that are dictionaries (Minari has such).

    Raises:
        DataError: an unknown name (the nearest known ones are listed), or a log that cannot be used.
        ImportError: the optional package for this kind of data is not installed.
    """
    if name.startswith("minari:"):
        return minari.load(
            name.removeprefix("minari:"),
            folder=folder,
            clip_actions=clip_actions,
            environment=environment,
            flatten_observations=flatten_observations,
        )
    if name in d4rl.DATASETS or name in recipes.LOCOMOTION or name.endswith((".hdf5", ".h5")):
        return d4rl.load(name, folder=folder, clip_actions=clip_actions, environment=environment)
    if ogbench.known(name) or name.endswith(".npz"):
        return ogbench.load(
            name,
            folder=folder,
            clip_actions=clip_actions,
            environment=environment,
            validation=validation,
        )
    if name in synthetic.NAMES:
        result = synthetic.load(name)
        return result._replace(
            environment=environment or result.environment,
            validation=result.validation if validation else None,
        )
    nearest = difflib.get_close_matches(name, names(), n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "rl.data.names() lists them all."
    raise DataError(
        f"unknown dataset {name!r}: {hint} A path ends in .hdf5, .h5 or .npz; Minari's ids follow 'minari:'"
    )


def names() -> list[str]:
    """Every name that can be loaded without naming a file, sorted (Minari's ids are not among them)."""
    return sorted([*d4rl.DATASETS, *recipes.LOCOMOTION, *ogbench.names(), *synthetic.NAMES])
