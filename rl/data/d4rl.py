"""D4RL's datasets: names, addresses, reference scores, and its HDF5 layout.

The files and their cache folder are those of the ``d4rl`` package (Fu et al. 2020, arXiv 2004.07219), which
is not needed: it cannot be imported without mujoco_py. Addresses and scores are those of its
``d4rl/infos.py``. The versions that D4RL has deprecated (locomotion and antmaze -v0 and -v1) have no name
here but can be read by path. D4RL publishes no checksums: `rl.data.download` records one with the first
download and compares it at every later load.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl.data import download
from rl.data.steps import (
    Loaded,
    check_length,
    check_optional,
    from_steps,
    loaded,
    reference,
    reference_in,
    require,
    same_task,
)
from rl.files import DataError, existing, expanded, reading

_SERVER = "https://rail.eecs.berkeley.edu/datasets/offline_rl"
_REQUIRED = ("observations", "actions", "rewards", "terminals")
_OPTIONAL = ("timeouts", "next_observations")


class Task(NamedTuple):
    """What the datasets of one environment share."""

    reference: tuple[float, float] | None  # (random, expert) return
    environment: str | None
    note: str = ""


class Entry(NamedTuple):
    """One published dataset."""

    url: str
    task: Task


_ADROIT_NOTE = (
    "up to gymnasium-robotics 1.4.2 the reward of this environment has the distance from hand to object with "
    "the wrong sign (its pull request 220): returns differ slightly from those of the log and the reference"
)
_LOCOMOTION = {
    "halfcheetah": Task((-280.178953, 12135.0), "HalfCheetah-v4"),
    "hopper": Task((-20.272305, 3234.3), "Hopper-v4"),
    "walker2d": Task((1.629008, 4592.3), "Walker2d-v4"),
    "ant": Task(
        (-325.6, 3879.7),
        None,
        "no environment: D4RL's Ant observes 111 numbers, gymnasium's Ant-v4 observes 27 of them",
    ),
}
_ADROIT = {
    "pen": Task(
        (96.262799, 3076.8331017826877),
        "D4RLPen-v1",
        "evaluated in D4RLPen-v1, whose episodes are D4RL's: 100 steps, or until the pen is dropped. Those of "
        "gymnasium-robotics' AdroitHandPen-v1 have 200 steps and no such end: returns there are not comparable",
    ),
    "hammer": Task((-274.856578, 12794.134825156867), "AdroitHandHammer-v1", _ADROIT_NOTE),
    "relocate": Task((-6.425911, 4233.877797728884), "AdroitHandRelocate-v1", _ADROIT_NOTE),
    "door": Task((-56.512833, 2880.5693087298737), "AdroitHandDoor-v1", _ADROIT_NOTE),
}
_ANTMAZE = Task(
    (0.0, 1.0),
    None,
    "no environment: gymnasium-robotics' AntMaze observes a dictionary laid out differently. Rewards are 0 "
    "and 1 as logged; it is common (IQL, CQL) to subtract 1 from them (--reward_shift=-1)",
)
_ANTMAZE_FILES = {
    "umaze": "u-maze_noisy_multistart_False_multigoal_False",
    "umaze-diverse": "u-maze_noisy_multistart_True_multigoal_True",
    "medium-play": "big-maze_noisy_multistart_True_multigoal_False",
    "medium-diverse": "big-maze_noisy_multistart_True_multigoal_True",
    "large-play": "hardest-maze_noisy_multistart_True_multigoal_False",
    "large-diverse": "hardest-maze_noisy_multistart_True_multigoal_True",
}
_KITCHEN = Task(
    (0.0, 4.0),
    None,
    "no environment: gymnasium-robotics' FrankaKitchen observes a dictionary laid out differently",
)
_KITCHEN_FILES = {
    "complete": "mini_kitchen_microwave_kettle_light_slider",
    "partial": "kitchen_microwave_kettle_light_slider",
    "mixed": "kitchen_microwave_kettle_bottomburner_light",
}
_MAZE2D_NOTE = "no environment: gymnasium-robotics' PointMaze has other coordinates and observations"
_MAZE2D = {
    "open-v0": ("open-sparse", (0.01, 20.66)),
    "umaze-v1": ("umaze-sparse-v1", (23.85, 161.86)),
    "medium-v1": ("medium-sparse-v1", (13.13, 277.39)),
    "large-v1": ("large-sparse-v1", (6.7, 273.99)),
    "open-dense-v0": ("open-dense", (11.17817, 27.166538620695782)),
    "umaze-dense-v1": ("umaze-dense-v1", (68.537689, 193.66285642381482)),
    "medium-dense-v1": ("medium-dense-v1", (44.264742, 297.4552547777125)),
    "large-dense-v1": ("large-dense-v1", (30.569041, 303.4857382709002)),
}


def _entries() -> Iterator[tuple[str, Entry]]:
    for robot, task in _LOCOMOTION.items():
        for kind in ("random", "medium", "medium-replay", "medium-expert", "expert", "full-replay"):
            file = f"gym_mujoco_v2/{robot}_{kind.replace('-', '_')}-v2.hdf5"
            yield f"{robot}-{kind}-v2", Entry(f"{_SERVER}/{file}", task)
    for hand, task in _ADROIT.items():
        for kind in ("human", "cloned", "expert"):
            yield f"{hand}-{kind}-v1", Entry(f"{_SERVER}/hand_dapg_v1/{hand}-{kind}-v1.hdf5", task)
        for kind, file in (
            ("human", f"{hand}-v0_demos_clipped"),
            ("cloned", f"{hand}-demos-v0-bc-combined"),
            ("expert", f"{hand}-v0_expert_clipped"),
        ):
            yield f"{hand}-{kind}-v0", Entry(f"{_SERVER}/hand_dapg/{file}.hdf5", task)
    for maze, file in _ANTMAZE_FILES.items():
        yield (
            f"antmaze-{maze}-v2",
            Entry(f"{_SERVER}/ant_maze_v2/Ant_maze_{file}_sparse_fixed.hdf5", _ANTMAZE),
        )
    for kind, file in _KITCHEN_FILES.items():
        yield f"kitchen-{kind}-v0", Entry(f"{_SERVER}/kitchen/{file}-v0.hdf5", _KITCHEN)
    for maze, (file, returns) in _MAZE2D.items():
        yield (
            f"maze2d-{maze}",
            Entry(f"{_SERVER}/maze2d/maze2d-{file}.hdf5", Task(returns, None, _MAZE2D_NOTE)),
        )


DATASETS = dict(_entries())
"""Every dataset that can be asked for by name."""


def locomotion_reference(environment: str) -> tuple[float, float]:
    """D4RL's (random, expert) return of a gymnasium locomotion task of any version, ``Hopper-v5`` say.

    Raises:
        ValueError: it has none of this task.
    """
    task = _LOCOMOTION.get(environment.rpartition("-")[0].lower())
    if task is None or task.reference is None:
        raise ValueError(
            f"D4RL has no returns of {environment} by which data of it could be normalised, but of "
            f"{', '.join(_LOCOMOTION)} alone"
        )
    return task.reference


def load(
    name_or_path: str,
    *,
    folder: str | Path | None = None,
    sha256: str | None = None,
    clip_actions: bool = False,
    environment: str | None = None,
    shuffled: bool = False,
) -> Loaded:
    """A D4RL dataset by its name, downloaded if it is not in ``folder``, or any file in its layout by path.

    Locomotion tiers made again by ``experiments.collect`` (``hopper-medium-regen-v5``) are found in ``folder`` or
    where it puts them. Their files name the environment; the reference is D4RL's, the note gives the recipe's own.

    The layout: ``observations``, ``actions``, ``rewards``, ``terminals`` of equal length and optionally
    ``timeouts`` and ``next_observations``. Where the file holds next observations they are used, so that the
    step at a time limit is kept, unlike in d4rl's ``qlearning_dataset``. Rewards are as logged.

    The environments named are the nearest that current packages can build: gymnasium's -v4 for the -v2
    datasets of locomotion, gymnasium-robotics' -v1 for Adroit (`rl.envs.d4rl_pen` for its pen).

    Args:
        name_or_path: one of `DATASETS`, a regenerated tier, or a path that ends in ``.hdf5`` or ``.h5``.
        folder: where named files are; by default where the d4rl package keeps them: ``$D4RL_DATASET_DIR``,
            else ``~/.d4rl/datasets``; for regenerated tiers ``$HEADWAY_HOME/locomotion``.
        sha256: the checksum the file must have.
        clip_actions: clip actions to [-1, 1] rather than refuse values outside.
        environment: to evaluate in, instead of the dataset's own; the reference is of that one alone, in any version.
        shuffled: the file holds single transitions in no order, with their ``next_observations``.

    Raises:
        DataError: the file cannot be had or is not usable; see `rl.data.steps.from_steps`.
        ImportError: h5py is not installed.
    """
    if name_or_path in DATASETS:
        entry = DATASETS[name_or_path]
        path = _folder(folder) / _file(entry)
        source = f"D4RL {name_or_path}"
        if not path.exists():
            from rl.data import recipes

            otherwise = recipes.instead(str(name_or_path).rpartition("-")[0])
            download.fetch(entry.url, path, sha256, check=_check, otherwise=otherwise)
        task = entry.task
    else:
        path = _path(name_or_path, folder)
        card = _card(path)
        task = _task(path, card, environment)
        source = f"D4RL layout{', regenerated' if card else ''}: {path.name}"
    download.verify(path, sha256)
    steps = _read(path)
    dataset = from_steps(
        **steps,
        source=str(path),
        discrete=steps["actions"].dtype.kind in "iu",
        actions_outside="clip" if clip_actions else "error",
        shuffled=shuffled,
    )
    returns, other = reference_in(environment, task.environment, task.reference)
    note = task.note if environment in (None, task.environment) else other
    return loaded(
        dataset,
        environment=environment or task.environment,
        reference=returns,
        source=source,
        note=note,
    )


def _folder(folder: str | Path | None) -> Path:
    chosen = folder or os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets"
    return expanded(chosen)


def _file(entry: Entry) -> str:
    """The name of its file in the cache folder, where the d4rl package puts and finds it too."""
    return entry.url.rsplit("/", 1)[-1]


def recorded(path: str | Path) -> dict[str, Any]:
    """What a file says of itself in its attributes; nothing in D4RL's own, all of its card in a regenerated one.

    Raises:
        DataError: the file cannot be read as HDF5.
        ImportError: h5py is not installed.
    """
    with _open(expanded(path)) as file:
        return _attributes(file)


def _attributes(file: Any) -> dict[str, Any]:
    return {name: _parsed(value) for name, value in file.attrs.items()}


def _parsed(value: Any) -> Any:
    """JSON as what it stands for; a text that only begins like JSON as it is."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _card(path: Path) -> dict[str, Any]:
    """What a regenerated file records; nothing of others, whose attributes may be anything."""
    with _open(path) as file:
        return _attributes(file) if "regenerated" in file.attrs else {}


def _path(name_or_path: str, folder: str | Path | None) -> Path:
    """Where a file lies that nobody publishes."""
    from rl.data import recipes

    if name_or_path not in recipes.LOCOMOTION:
        return existing(name_or_path)
    recipe = recipes.LOCOMOTION[name_or_path]
    return existing(
        expanded(folder or recipes.default_folder(recipe.family)) / recipe.file,
        f"make it on this machine: python -m experiments.collect --dataset={name_or_path}"
        + (f" --out={folder}" if folder else ""),
    )


def _task(path: Path, card: Mapping[str, Any], environment: str | None) -> Task:
    """What is known of a file: what it records, or by its name if that is a published one, or by its environment."""
    if card:
        require(card, ("reference_d4rl", "environment"), f"{path}, attributes")
        with reading(path, "a regenerated tier", "make it again: python -m experiments.collect"):
            random, expert = card["reference_d4rl"]
            return Task(
                reference(random, expert, str(path)), str(card["environment"]), _regenerated_note(card)
            )
    for entry in DATASETS.values():
        if _file(entry) == path.name:
            return entry.task
    for task in (*_LOCOMOTION.values(), *_ADROIT.values()):
        if environment is not None and task.environment and same_task(task.environment, environment):
            return task._replace(environment=environment)
    return Task(None, None, "no environment: the file names none; give it to the run (--environment=NAME)")


def _regenerated_note(card: Mapping[str, Any]) -> str:
    policies = ""
    if "reference_recipe" in card:
        policies = " (those of the policies that made it: {:.1f} and {:.1f})".format(
            *card["reference_recipe"]
        )
    return (
        "regenerated, not D4RL's file: normalised by D4RL's random and expert returns, "
        "{:.1f} and {:.1f}".format(*card["reference_d4rl"])
        + policies
    )


def _read(path: Path) -> dict[str, Any]:
    """The arrays `from_steps` takes, as they are in the file."""
    h5py = _h5py()
    with _open(path) as file:
        require(file, _REQUIRED, str(path), {"terminals": _without_terminals(file)})
        check_optional(file, _OPTIONAL, str(path))
        arrays = {name: file[name] for name in (*_REQUIRED, *_OPTIONAL) if name in file}
        for name, array in arrays.items():
            if not isinstance(array, h5py.Dataset):
                remedy = "the arrays of D4RL's layout lie at the top"
                if isinstance(array, h5py.Group) and name.endswith("observations"):
                    remedy = (
                        "of observations that are dictionaries concatenate the entries, or save the log as Minari "
                        "does, and read it as minari:ID (docs/own_data.md)"
                    )
                raise DataError(f"{path}: {name!r} is a group or a type, not an array; {remedy}")
        # Before they are read: a damaged length may be one that no memory holds.
        observations = arrays["observations"].shape
        for name, array in arrays.items():
            check_length(name, array.shape, observations[0] if observations else 0, str(path))
        return {name: np.asarray(array[()]) for name, array in arrays.items()}


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    h5py = _h5py()
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        yield file


def _without_terminals(file: Mapping[str, Any]) -> str:
    """What to do about a log that has none, and nothing by a name like that."""
    if done := next((name for name in ("dones", "done") if name in file), None):
        return f"split {done!r} into 'terminals', where the task ended the episode, and 'timeouts', where it was cut"
    return "give 'terminals' of zeros if no episode ended by the task"


def _check(path: Path) -> None:
    h5py = _h5py()
    with reading("the download", "HDF5", "the server sent something else"), h5py.File(path, "r") as file:
        require(file, _REQUIRED, "the downloaded file")


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("reading HDF5 needs h5py: pip install -e '.[d4rl]' (in the clone)") from error
    return h5py
