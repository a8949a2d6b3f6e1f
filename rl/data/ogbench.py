"""OGBench's datasets: names, its npz layout, and rewards for its single tasks.

Files are looked for where the ``ogbench`` package (Park et al. 2025, arXiv 2410.20092) keeps them and where
``experiments.collect`` makes them; nothing here makes data. Rewards come from the ``ogbench`` package itself,
so that they are its rewards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl.data import download
from rl.data.steps import DataError, Loaded, finite, from_steps, loaded, require
from rl.replay.dataset import Dataset

_SERVER = "https://rail.eecs.berkeley.edu/datasets/ogbench"
_CACHE = "~/.ogbench/data"
_REQUIRED = ("observations", "actions", "terminals")
_STATE = ("qpos", "button_states")  # what rewards are computed from
_TASKS = ("", "-task1", "-task2", "-task3", "-task4", "-task5")
_NO_REWARDS = (
    "OGBench's plain datasets have no rewards: all are 0; a -singletask- name has its task's rewards"
)


def _names() -> Iterator[str]:
    maze = ("medium", "large", "giant", "teleport")
    explored = ("medium", "large", "teleport")
    cubes = ("single", "double", "triple", "quadruple")
    puzzles = ("3x3", "4x4", "4x5", "4x6")
    for robot, sizes in (
        ("pointmaze", maze),
        ("antmaze", maze),
        ("humanoidmaze", maze[:3]),
        ("antsoccer", ("arena", "medium")),
        ("visual-antmaze", maze),
        ("visual-humanoidmaze", maze[:3]),
    ):
        for size in sizes:
            yield from (f"{robot}-{size}-navigate-v0", f"{robot}-{size}-stitch-v0")
        if robot.endswith("antmaze"):
            yield from (f"{robot}-{size}-explore-v0" for size in explored)
    for scene in ("scene", *(f"cube-{n}" for n in cubes), *(f"puzzle-{n}" for n in puzzles)):
        for kind in ("play", "noisy"):
            yield from (f"{scene}-{kind}-v0", f"visual-{scene}-{kind}-v0")
    yield from ("cube-octuple-play-v0", "cube-octuple-noisy-v0")  # published only as 100M steps in many files
    yield from (f"powderworld-{level}-play-v0" for level in ("easy", "medium", "hard"))


DATASETS = tuple(_names())
"""Every dataset without a task, OGBench's 85 and two that only `experiments.collect` makes."""


def names() -> list[str]:
    """`DATASETS` and, for each that has them, the name of its default task (tasks 1 to 5 exist too)."""
    tasks = [_with_task(name, "") for name in DATASETS if not name.startswith("powderworld")]
    return [*DATASETS, *tasks]


def known(name: str) -> bool:
    """Whether ``name`` is one of OGBench's: plain, ``-singletask-``, or ``-singletask-task1-`` to ``5``."""
    return name in _ALL


def load(
    name_or_path: str,
    *,
    folder: str | Path | None = None,
    clip_actions: bool = False,
    environment: str | None = None,
    validation: bool = False,
) -> Loaded:
    """An OGBench dataset by its name, or any file in its layout by path.

    The layout: ``observations``, ``actions`` and ``terminals`` of equal length, where ``terminals`` marks the
    last state of a trajectory, which nobody terminated; beside them ``qpos`` and ``button_states``, from
    which rewards follow. Observations and actions are as `ogbench.make_env_and_datasets` gives them.

    The task is that of the environment: with a ``-singletask-`` one, each step has that task's reward and its
    discount is 0 where the task is done (OGBench's ``masks``) while the trajectory goes on; otherwise rewards
    are 0. A file is looked for in ``folder``, then in ``~/.ogbench/data``, then in ``$HEADWAY_HOME/ogbench``
    (``~/.headway/ogbench`` by default), and downloaded if it is in none. ``source`` tells OGBench's own file
    from one made again by ``experiments.collect``, which leaves a card ``<dataset>.json`` beside it.

    Args:
        name_or_path: a name that is `known`, or a path that ends in ``.npz``.
        folder: where to look first, and to download to.
        clip_actions: clip actions to [-1, 1] rather than refuse values outside.
        environment: to evaluate in and to take the rewards of, instead of the one that the name implies.
        validation: read the held-out trajectories in ``<dataset>-val.npz``, too, where that file lies beside it.

    Raises:
        DataError: the file cannot be had or is not usable; see `rl.data.steps.from_steps`.
        ImportError: rewards are asked for and ogbench is not installed.
    """
    implied: str | None
    if known(name_or_path):
        name, implied = _split(name_or_path)
        path = _find(name, folder)
        source = f"{_origin(path)}: {name_or_path}"
    else:
        path = Path(name_or_path).expanduser()
        published = path.stem in DATASETS
        implied = _split(path.stem)[1] if published else None
        source = f"{_origin(path) if published else 'OGBench layout'}: {path.name}"
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    environment = environment or implied
    held_out = path.with_name(f"{path.stem}-val.npz")
    with contextlib.ExitStack() as stack:
        # Both files have their rewards from one environment, which takes a second to build.
        build = functools.cache(lambda name: stack.enter_context(contextlib.closing(_build(name))))
        read = functools.partial(_dataset, environment=environment, build=build, clip_actions=clip_actions)
        steps = loaded(
            read(path),
            environment=environment,
            source=source,
            note="" if _has_task(environment) else _NO_REWARDS,
        )
        return steps._replace(validation=read(held_out) if validation and held_out.is_file() else None)


def _has_task(environment: str | None) -> bool:
    return environment is not None and "singletask" in environment


def _dataset(path: Path, environment: str | None, build: Callable[[str], Any], clip_actions: bool) -> Dataset:
    """The steps in a file, with the rewards of the environment's task."""
    download.verify(path)
    arrays = _read(path)
    steps = {"rewards": np.zeros(len(arrays["observations"]), np.float32)}
    if environment is not None and _has_task(environment):
        steps = _label(arrays, environment, build, str(path))
    return from_steps(
        observations=arrays["observations"],
        actions=arrays["actions"],
        terminals=np.zeros(len(arrays["observations"]), bool),
        timeouts=arrays["terminals"],
        source=str(path),
        discrete=arrays["actions"].dtype.kind in "iu",
        actions_outside="clip" if clip_actions else "error",
        **steps,
    )


def _with_task(name: str, task: str) -> str:
    return f"{name.removesuffix('-v0')}-singletask{task}-v0"


_ALL = {
    *DATASETS,
    *(_with_task(name, task) for name in DATASETS if not name.startswith("powderworld") for task in _TASKS),
}


def _split(name: str) -> tuple[str, str]:
    """The dataset and the environment behind a known name.

    ``cube-single-play-singletask-task1-v0``: ``cube-single-play-v0`` and ``cube-single-singletask-task1-v0``.
    """
    plain, singletask, task = name.removesuffix("-v0").partition("-singletask")
    return f"{plain}-v0", f"{plain.rsplit('-', 1)[0]}{singletask}{task}-v0"


def _find(name: str, folder: str | Path | None) -> Path:
    """Where the dataset lies; it is downloaded if it lies nowhere."""
    from rl.data import recipes

    cache = Path(_CACHE).expanduser()
    chosen = Path(folder).expanduser() if folder else cache
    for place in (chosen, cache, recipes.default_folder("ogbench")):
        if (place / f"{name}.npz").is_file():
            return place / f"{name}.npz"
    path = chosen / f"{name}.npz"
    otherwise = ""
    if name in recipes.RECIPES:
        recipe = recipes.RECIPES[name]
        otherwise = (
            f"make it on this machine: python -m experiments.collect --dataset={name} --transitions=100000 "
            f"({recipe.episodes * recipe.steps} as published)"
        )
    download.fetch(f"{_SERVER}/{name}.npz", path, check=_check, otherwise=otherwise)
    return path


def _origin(path: Path) -> str:
    card = path.with_suffix(".json")
    if not card.exists():
        return "OGBench (downloaded)"
    try:
        made_again = json.loads(card.read_text())["regenerated"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{card} does not say whether {path.name} was regenerated ({error!r}); repair or delete it"
        ) from error
    return "OGBench layout, regenerated" if made_again else "OGBench (downloaded)"


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the layout that are in the file; pickled objects, which could run code, are refused."""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is a single array, not an npz archive")
        with file:
            require(file, _REQUIRED, str(path))
            return {name: file[name] for name in (*_REQUIRED, *_STATE) if name in file}
    except DataError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path} holds pickled Python objects, which can run any code when read: refused. Save plain "
                "numeric arrays with numpy.savez"
            ) from error
        raise DataError(
            f"{path} cannot be read as npz ({error}): cut short, or another format; delete it and load "
            "again by name, or copy it again"
        ) from error


def _check(path: Path) -> None:
    """A download must be a zip archive with the right arrays; their values are checked when it is loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            require(
                {name.removesuffix(".npy"): None for name in archive.namelist()},
                _REQUIRED,
                "the downloaded file",
            )
    except zipfile.BadZipFile as error:
        raise DataError(
            f"the download is not an npz archive ({error}): the server sent something else"
        ) from error


def _build(environment: str) -> Any:
    """The environment, to ask for its task."""
    try:
        import gymnasium
        import ogbench  # noqa: F401  (registers its environments)
    except ImportError as error:
        raise ImportError(
            "the rewards of OGBench's tasks need ogbench: pip install 'headway[ogbench]'"
        ) from error
    # The pixel variant of a task has the same goal, and would need a renderer to be built.
    return gymnasium.make(environment.removeprefix("visual-"), disable_env_checker=True)


def _label(
    arrays: dict[str, np.ndarray], environment: str, build: Callable[[str], Any], source: str
) -> dict[str, Any]:
    """The rewards and discounts of the single task of ``environment``, by OGBench's own rule."""
    needed = _STATE if "puzzle" in environment or "scene" in environment else _STATE[:1]
    require(arrays, needed, source)
    states = {name: arrays[name] for name in needed}
    for name, state in states.items():
        if state.ndim != 2 or len(state) != len(arrays["observations"]):
            raise DataError(f"{source}: {name} have shape {state.shape}, but one row per step is needed")
        finite(name, state, source)
    env = build(environment)  # this imports ogbench, or says what to install
    from ogbench.relabel_utils import relabel_dataset

    relabel_dataset(environment, env, states)
    return {"rewards": states["rewards"], "discounts": states["masks"]}
