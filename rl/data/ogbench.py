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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl import extras
from rl.data import download
from rl.data.steps import Loaded, check_optional, finite, flags, from_steps, loaded, require
from rl.files import DataError, existing, expanded, reading
from rl.replay.dataset import Dataset

_SERVER = "https://rail.eecs.berkeley.edu/datasets/ogbench"
_CACHE = "~/.ogbench/data"
_REQUIRED = ("observations", "actions", "terminals")
_STATE = ("qpos", "button_states")  # what rewards are computed from
_ENDS = ("terminals", "timeouts")  # the second, not of the layout, may be in one's own logs, or alone
_ARRAYS = ("observations", "actions", *_ENDS, *_STATE, "rewards")
_DOWNLOADED = "OGBench (downloaded)"
_NO_TASKS = ("powderworld", "heavy-cube")  # environments without a -singletask- version
_ONLY_MADE = ("cube-octuple", "heavy-cube")  # datasets that no server has as one file
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
    yield from (f"heavy-cube-{number}-ppp-v0" for number in cubes)  # HECRL's, in OGBench's layout
    yield from (f"heavy-cube-{number}-stack-v0" for number in cubes[1:])
    yield from (f"powderworld-{level}-play-v0" for level in ("easy", "medium", "hard"))


DATASETS = tuple(_names())
"""Every dataset without a task, OGBench's 85 and those that only `experiments.collect` makes."""


def names() -> list[str]:
    """`DATASETS` and, for each that has them, the name of its default task (tasks 1 to 5 exist too)."""
    tasks = [_with_task(name, "") for name in DATASETS if not name.startswith(_NO_TASKS)]
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
    last state of a trajectory, which nobody terminated, as ``timeouts`` do if there are any; beside them ``qpos`` and
    ``button_states``, from which rewards follow. Observations and actions are as
    `ogbench.make_env_and_datasets` gives them.

    The task is that of the environment: with a ``-singletask-`` one, each step has that task's reward and its
    discount is 0 where the task is done (OGBench's ``masks``) while the trajectory goes on; otherwise rewards
    are 0. A file is looked for in ``folder``, then in ``~/.ogbench/data``, then in ``$HEADWAY_HOME/ogbench``
    (``~/.headway/ogbench`` by default), and downloaded if it is in none. ``source`` tells OGBench's own file
    from one made again by ``experiments.collect``, which leaves a card ``<dataset>.json`` beside it.

    Args:
        name_or_path: a name that is `known`, or a path that ends in ``.npz``.
        folder: where to look first, and to download to.
        clip_actions: clip actions to [-1, 1] rather than refuse values outside.
        environment: to evaluate in, instead of the one that the name implies. Rewards are of its task, if it is a
            single task; else of the task in the name, if there is one.
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
        path = existing(name_or_path)
        published = path.stem in DATASETS
        implied = _split(path.stem)[1] if published else None
        source = f"{_origin(path) if published else 'OGBench layout'}: {path.name}"
    environment = environment or implied
    rewarding = implied if _has_task(implied) and not _has_task(environment) else environment
    held_out = path.with_name(f"{path.stem}-val.npz")
    with contextlib.ExitStack() as stack:
        # Both files have their rewards from one environment, which takes a second to build.
        build = functools.cache(lambda name: stack.enter_context(contextlib.closing(_build(name))))
        read = functools.partial(_dataset, environment=rewarding, build=build, clip_actions=clip_actions)
        steps = loaded(
            read(path),
            environment=environment,
            source=source,
            note="" if _has_task(rewarding) else _NO_REWARDS,
        )
        return steps._replace(validation=read(held_out) if validation and held_out.is_file() else None)


def _has_task(environment: str | None) -> bool:
    return environment is not None and "singletask" in environment


def _dataset(path: Path, environment: str | None, build: Callable[[str], Any], clip_actions: bool) -> Dataset:
    """The steps in a file, with the rewards of the environment's task."""
    download.verify(path)
    arrays = _read(path)
    if np.count_nonzero(arrays.get("rewards", 0)):
        task = f", whose rewards are those of {environment}" if _has_task(environment) else ""
        raise DataError(
            f"{path} holds 'rewards', but OGBench's layout has none{task}, and they would be ignored: save the log as "
            ".hdf5 in D4RL's layout (docs/own_data.md), or leave them out"
        )
    rows = sum(arrays["observations"].shape[:1])
    ends = np.zeros(rows, bool)
    for name in [name for name in _ENDS if name in arrays]:
        ends |= flags(name, arrays[name], rows, str(path))
    if not ends.any():
        raise DataError(
            f"{path}: no trajectory ends in {rows} steps; write 1 into 'terminals' at the last state of each"
        )
    if environment is not None and _has_task(environment):
        steps = _label(arrays, environment, build, str(path))
    else:
        steps = {"rewards": np.zeros(rows, np.float32)}
    return from_steps(
        observations=arrays["observations"],
        actions=arrays["actions"],
        terminals=np.zeros(rows, bool),
        timeouts=ends,
        source=str(path),
        discrete=arrays["actions"].dtype.kind in "iu",
        actions_outside="clip" if clip_actions else "error",
        **steps,
    )


def _with_task(name: str, task: str) -> str:
    return f"{name.removesuffix('-v0')}-singletask{task}-v0"


_ALL = {
    *DATASETS,
    *(_with_task(name, task) for name in DATASETS if not name.startswith(_NO_TASKS) for task in _TASKS),
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

    cache = expanded(_CACHE)
    chosen = expanded(folder) if folder else cache
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
    if name.startswith(_ONLY_MADE):
        raise DataError(f"there is no file {path}, nor one to download; {otherwise}")
    download.fetch(f"{_SERVER}/{name}.npz", path, check=_check, otherwise=otherwise)
    return path


def _origin(path: Path) -> str:
    card = path.with_suffix(".json")
    # Beside a checksum the card is that of a file which the download took the place of.
    if not card.exists() or download.sidecar(path).exists():
        return _DOWNLOADED
    with reading(card, f"the card that says whether {path.name} was regenerated", "repair or delete it"):
        return "OGBench layout, regenerated" if json.loads(card.read_text())["regenerated"] else _DOWNLOADED


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the layout that are in the file; pickled objects, which could run code, are refused."""
    with reading(path, "npz"):
        try:
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{path} is a single array, not an npz archive: save several with numpy.savez"
                )
            with file:
                required = [name for name in _REQUIRED if not (name in _ENDS and "timeouts" in file)]
                require(file, required, str(path))
                check_optional(file, _ENDS, str(path))
                return {name: np.asarray(file[name]) for name in _ARRAYS if name in file}
        except ValueError as error:
            if "allow_pickle" not in str(error):
                raise
            raise DataError(
                f"{path} holds pickled Python objects, which can run any code when read: refused. Save plain "
                "numeric arrays with numpy.savez"
            ) from error


def _check(path: Path) -> None:
    """A download must be a zip archive with the right arrays; their values are checked when it is loaded."""
    with (
        reading("the download", "npz", "the server sent something else"),
        zipfile.ZipFile(path) as archive,
    ):
        require(
            {name.removesuffix(".npy"): None for name in archive.namelist()},
            _REQUIRED,
            "the downloaded file",
        )


def _build(environment: str) -> Any:
    """The environment, to ask for its task."""
    try:
        import gymnasium
        import ogbench  # noqa: F401  (registers its environments)
    except ImportError as error:
        needed = extras.command("ogbench")
        raise ImportError(f"the rewards of OGBench's tasks need ogbench: {needed}") from error
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
        if state.ndim != 2 or len(state) != len(arrays["observations"]) or state.dtype.kind not in "fiub":
            raise DataError(
                f"{source}: {name} have shape {state.shape}, but one row per step is needed, of numbers "
                f"({state.dtype} here)"
            )
        finite(name, state, source)
    remedy = "choose the environment that its states are of with --environment (environment=...)"
    with reading(source, f"a log of {environment}", remedy):
        env = build(environment)  # this imports ogbench, or says what to install
        from ogbench.relabel_utils import relabel_dataset

        relabel_dataset(environment, env, states)
    return {"rewards": states["rewards"], "discounts": states["masks"]}
