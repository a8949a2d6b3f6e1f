"""Recipes: datasets made on the spot, where none can be downloaded.

``catalogue`` says what each dataset is. OGBench's come from its own scripted behaviours: ``pointmaze`` and
``manipulation`` simulate one episode as a pure function of a seed, ``scripted`` plans them; antmaze is pointmaze with
a trained walker. D4RL's locomotion tiers
come from trained policies: ``behaviour`` holds those, ``locomotion`` plans and simulates. ``worker`` makes chunks of a
plan and ``pool`` runs many workers, ``collector`` resumes and publishes, ``storage`` writes files. Nothing here may
import JAX or anything that does (a simulating process must start fast), read a dataset for training, or render.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl.data.recipes import collector, locomotion, scripted
from rl.data.recipes.catalogue import LOCOMOTION, RECIPES, Locomotion, Recipe, find, instead
from rl.data.recipes.collector import default_folder, read_card
from rl.files import expanded

__all__ = [
    "LOCOMOTION",
    "RECIPES",
    "Locomotion",
    "Recipe",
    "collect",
    "default_folder",
    "find",
    "instead",
    "read_card",
]


def collect(
    dataset: str,
    *,
    out: str | os.PathLike | None = None,
    transitions: int | None = None,
    seed: int = 0,
    processes: int | None = None,
    episode_steps: int | None = None,
    actors: str | os.PathLike | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Make ``dataset`` and return the path of its training file.

    For a name in ``RECIPES``, writes ``<dataset>.npz``, ``<dataset>-val.npz`` (a further tenth of the episodes, at
    least one), which ``ogbench`` itself can load, and the card ``<dataset>.json`` into ``out``. For a name in
    ``LOCOMOTION``, writes ``<dataset>.hdf5`` in D4RL's layout, and the card.

    The files are a function of ``dataset``, ``transitions``, ``seed``, ``episode_steps`` and ``actors``: they do
    not depend on ``processes``, nor on how often the run was stopped and continued. Bits are equal on the same
    machine type with the same packages; the card names the latter. What is there already is not made again.

    Args:
      dataset: a name in ``RECIPES`` or ``LOCOMOTION``.
      out: folder of the files; `default_folder` if None.
      transitions: how many (for ``RECIPES`` rounded up to whole episodes); as published if None.
      seed: non-negative.
      processes: how many to run; the cores this process may use if None.
      episode_steps: transitions per episode; as published if None. Shorter is for trials. Not for ``LOCOMOTION``,
        whose episodes end where the environment ends them.
      actors: for ``LOCOMOTION`` and antmaze, the file of behaviour policies (`rl.data.recipes.behaviour`); those
        shipped if None.
      overwrite: replace files of other settings, and discard unfinished work of other settings.
      progress: show a bar with the time left.

    Raises:
      ValueError: unknown dataset, a number out of range, or actors that do not fit.
      FileExistsError: files or unfinished work of other settings are in the way.
      ImportError: a package that the recipe needs is not installed.
      RuntimeError: a process died, the disk is full, or another run works on the same dataset. Finished chunks
        are kept, and the same call continues.
    """
    recipe = find(dataset)
    plan: collector.Plan
    if isinstance(recipe, Locomotion):
        if episode_steps is not None:
            raise ValueError(f"episode_steps is not for {dataset}: its environment ends the episodes")
        plan = locomotion.plan(recipe, transitions, seed, actors)
    else:
        plan = scripted.plan(recipe, transitions, seed, episode_steps, actors)
    folder = expanded(out) if out is not None else default_folder(recipe.family)
    return collector.run(plan, folder, processes=processes, overwrite=overwrite, progress=progress)
