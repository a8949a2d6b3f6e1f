"""Minari datasets, read with Minari's own package: local ones, or downloaded by it.

Nothing here knows Minari's files; it walks the episodes the package gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl.data.steps import DataError, Loaded, from_steps, loaded


def load(
    name_or_path: str,
    *,
    folder: str | Path | None = None,
    clip_actions: bool = False,
    environment: str | None = None,
) -> Loaded:
    """A Minari dataset by its id (``D4RL/door/human-v2``) or by the path of its folder.

    An id is looked for in ``folder``, or else where Minari keeps its datasets (``$MINARI_DATASETS_PATH`` or
    ``~/.minari/datasets``), and then downloaded there by Minari if it is absent.

    Continuous actions are mapped from the box of the action space to [-1, 1]. Observations are flat vectors
    (images keep their shape); dictionaries are concatenated entry by entry in the order of their space, as
    `gymnasium.wrappers.FlattenObservation` does, and the dataset then has no environment by default: the
    recorded one would show a dictionary. The reference is Minari's; D4RL's for the same task may differ.

    Args:
        name_or_path: an id, or a path that starts with ``/``, ``.`` or ``~``.
        folder: holds datasets by id.
        clip_actions: clip actions to their box rather than refuse values outside.
        environment: to evaluate in, instead of the one recorded with the data.

    Raises:
        DataError: there is no such dataset, or it is not usable; see `rl.data.steps.from_steps`.
        ImportError: minari is not installed.
    """
    data = _open(name_or_path, folder)
    low, high, choices, first = _box(data.action_space, data.id)
    columns = [_columns(episode, data) for episode in tqdm(data, total=len(data), desc=data.id, delay=2)]
    if not columns:
        raise DataError(f"Minari {data.id}: the dataset has no episodes")
    observations, actions, rewards, terminals, timeouts, successors = map(
        np.concatenate, zip(*columns, strict=True)
    )
    dataset = from_steps(
        observations,
        actions - first if first else actions,
        rewards,
        terminals,
        timeouts,
        successors,
        source=f"Minari {data.id}",
        discrete=choices is not None,
        actions_outside="clip" if clip_actions else "error",
        low=low,
        high=high,
    )
    recorded, note = _environment(data)
    return loaded(
        dataset,
        environment=environment or recorded,
        reference=_reference(data),
        choices=choices,
        source=f"Minari {data.id}",
        note="" if environment else note,
    )


def _open(name_or_path: str, folder: str | Path | None) -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError("Minari datasets need minari: pip install 'headway[minari]'") from error
    try:
        if name_or_path.startswith(("/", ".", "~")):
            path = Path(name_or_path).expanduser()
        elif folder is not None:
            path = Path(folder).expanduser() / name_or_path
        else:
            return minari.load_dataset(name_or_path, download=True)
        return minari.MinariDataset(path / "data" if (path / "data").is_dir() else path)
    except Exception as error:  # Minari passes on whatever its storage, its remotes and HDF5 raise
        raise DataError(
            f"Minari cannot load {name_or_path} ({type(error).__name__}: {error}); 'minari list local' and "
            "'minari list remote' show what there is"
        ) from error


def _box(space: Any, source: str) -> tuple[Any, Any, int | None, int]:
    """(low, high, number of choices, first choice) of an action space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return -1.0, 1.0, int(space.n), int(space.start)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space.low, space.high, None, 0
    raise DataError(
        f"Minari {source}: actions are {space}; agents here take an integer (Discrete) or a real vector (Box)"
    )


def _columns(episode: Any, data: Any) -> tuple[np.ndarray, ...]:
    """The arrays of one episode of T steps, as `from_steps` takes them: it has T + 1 observations."""
    observations = _flat(data.observation_space, episode.observations, data.id)
    terminals = np.asarray(episode.terminations, bool)
    timeouts = np.asarray(episode.truncations, bool).copy()
    timeouts[-1:] |= ~terminals[-1:]  # Minari keeps episodes apart, whether or not their end is flagged
    return (
        observations[:-1],
        np.asarray(episode.actions),
        np.asarray(episode.rewards),
        terminals,
        timeouts,
        observations[1:],
    )


def _flat(space: Any, values: Any, source: str) -> np.ndarray:
    """[T + 1, D] for a box or a dictionary of boxes; images are left as they are."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and isinstance(values, Mapping):
        parts = [_flat(part, values[key], source) for key, part in space.spaces.items()]
        if all(part.dtype.kind == "f" for part in parts):
            return np.concatenate(parts, axis=1)
    elif isinstance(space, spaces.Box):
        values = np.asarray(values)
        return values if values.dtype == np.uint8 else values.reshape(len(values), math.prod(space.shape))
    raise DataError(
        f"Minari {source}: observations are {space}; boxes and dictionaries of real boxes can be read. "
        "Convert the dataset with a wrapper that gives one array"
    )


def _environment(data: Any) -> tuple[str | None, str]:
    from gymnasium import spaces

    if data.env_spec is None:
        return None, "no environment: none is recorded with the data; choose it (environment=...)"
    if isinstance(data.observation_space, spaces.Dict):
        return None, (
            f"no environment: {data.env_spec.id} observes a dictionary; register a version of it wrapped in "
            "gymnasium.wrappers.FlattenObservation and choose that (environment=...)"
        )
    return data.env_spec.id, ""


def _reference(data: Any) -> tuple[float, float] | None:
    recorded = data.storage.metadata
    if recorded.get("ref_min_score") is None or recorded.get("ref_max_score") is None:
        return None
    return float(recorded["ref_min_score"]), float(recorded["ref_max_score"])
