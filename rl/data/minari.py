"""Minari datasets, read and written with Minari's own package: local ones, or downloaded by it.

Nothing here knows Minari's files; it walks the episodes the package gives, or hands episodes to it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl import log, nest
from rl.data.steps import Loaded, flags, from_steps, loaded, reference, reference_in
from rl.files import DataError, expanded, reading

_PER_STEP = ("actions", "rewards", "terminations", "truncations")
# Wrappers that leave the task as it is.
_ONLOOKERS = ("HumanRendering", "RecordEpisodeStatistics", "RecordVideo")
_REMEDY = "'minari list local' and 'minari list remote' show what there is; delete a damaged one and download it again"


def load(
    name_or_path: str,
    *,
    folder: str | Path | None = None,
    clip_actions: bool = False,
    environment: str | None = None,
    flatten_observations: bool = False,
) -> Loaded:
    """A Minari dataset by its id (``D4RL/door/human-v2``) or by the path of its folder.

    An id is looked for in ``folder``, or else where Minari keeps its datasets (``$MINARI_DATASETS_PATH`` or
    ``~/.minari/datasets``), and then downloaded there by Minari if it is absent.

    Continuous actions are mapped from the box of the action space to [-1, 1]. Observations are as those of
    `rl.envs.make`, or with ``flatten_observations`` vectors. The reference is Minari's; D4RL's for the same task may
    differ.

    Args:
        name_or_path: an id, or a path that starts with ``/``, ``.`` or ``~``.
        folder: holds datasets by id.
        clip_actions: clip actions to their box rather than refuse values outside.
        environment: to evaluate in, instead of the one recorded with the data, or of two the one recorded for that. Of
            it only the name is used: where more is recorded than it is registered with (arguments, a time limit,
            wrappers), the note says so. The reference is of the recorded one alone, in any version.
        flatten_observations: concatenate the entries of dictionaries in the order that the space had which was
            recorded, as `gymnasium.wrappers.FlattenObservation` does in the environment. The dataset then has no
            environment by default: the recorded one would show a dictionary.

    Raises:
        DataError: there is no such dataset, or it is not usable; see `rl.data.steps.from_steps`.
        ImportError: minari is not installed.
    """
    source = f"Minari {name_or_path}"
    minari = _minari()
    with reading(source, "a Minari dataset", f"there is none, or it is damaged; {_REMEDY}"):
        data = _open(minari, name_or_path, folder)
        low, high, choices = _box(data.action_space, source)
        steps = _steps(data, flatten_observations, source)
        recorded, note = _environment(data, flatten_observations)
        returns, other = reference_in(environment, recorded, _reference(data, source))
        if environment in (None, recorded) and recorded and returns and _other_arguments(_to_evaluate(data)):
            returns, note = (
                None,
                f"{note}; returns are not normalised: their reference is of the recorded ones",
            )
    terminals, timeouts = (
        flags(name, steps[name], len(steps["ends"]), source) for name in ("terminations", "truncations")
    )
    dataset = from_steps(
        steps["observations"],
        steps["actions"],
        steps["rewards"],
        terminals,
        timeouts | steps["ends"] & ~terminals,
        steps["next_observations"],
        source=source,
        discrete=choices or False,
        actions_outside="clip" if clip_actions else "error",
        low=low,
        high=high,
        continuing=True,  # episodes have their own last observations; D4RL's PointMaze goes on from them
    )
    return loaded(
        dataset,
        environment=environment or recorded,
        reference=returns,
        choices=len(choices) if choices else None,
        source=f"Minari {data.id}",
        note=other if environment else note,
    )


def write(data: Loaded, name: str) -> None:
    """Store ``data`` as the local Minari dataset ``name`` (``headway/hopper-medium-regen-v5``).

    Observations are float32 and actions lie in [-1, 1]; environment and reference go along if they are known (Minari
    keeps no reference without an environment). Rewards, ends and successors are those of ``data``: reading it back with
    `load` gives the same digest, with two exceptions. Where the last action of an episode was logged without what it
    led to (files without ``next_observations``), Minari has no place for it, and nobody knows then the next action of
    the step before it. And next observations that differ from what is logged next by rounding become equal to it.

    Raises:
        DataError: there is such a dataset, the name is not one for Minari, a step ends the task but not its episode,
            or the environment's own actions are not in [-1, 1].
        ImportError: minari is not installed.
    """
    minari = _minari()
    transitions, last, _ = data.dataset
    terminal = transitions.discount == 0
    shape = data.spec.observation_shape
    if data.spec.discrete or isinstance(shape, Mapping) or len(shape) != 1:
        raise DataError(f"{data.source}: only flat observations and continuous actions are converted")
    if (terminal & ~last).any():
        raise DataError(f"{data.source}: the log goes on after a terminal step, which Minari cannot say")
    reference = dict(zip(("ref_min_score", "ref_max_score"), data.reference or (), strict=False))
    try:
        with warnings.catch_warnings():  # that nobody is named as the author
            warnings.simplefilter("ignore")
            minari.create_dataset_from_buffers(
                name,
                log.progress(
                    int(last.sum()),
                    name,
                    over=_buffers(data, minari.data_collector.EpisodeBuffer),
                    unit="episode",
                    delay=2,
                ),
                env=_unit_environment(data),
                observation_space=_space(np.inf, data.spec.observation_shape),
                action_space=_space(1.0, (data.spec.action_size,)),
                description=f"{data.source}. {data.note}",
                **reference,
            )
    except ValueError as error:
        raise DataError(f"Minari cannot write {name!r}: {error}") from error


def _buffers(data: Loaded, buffer: Any) -> Iterator[Any]:
    transitions, last, _ = data.dataset
    first = 0
    for end in (np.flatnonzero(last) + 1).tolist():
        episode = slice(first, end)
        ends = np.arange(first + 1, end + 1) == end
        terminal = transitions.discount[episode] == 0
        yield buffer(
            observations=np.concatenate(
                [transitions.observation[episode], transitions.next_observation[end - 1 : end]]
            ),
            actions=transitions.action[episode],
            rewards=transitions.reward[episode],
            terminations=terminal,
            truncations=ends & ~terminal,
        )
        first = end


def _space(bound: float, shape: tuple[int, ...]) -> Any:
    from gymnasium import spaces

    return spaces.Box(-bound, bound, shape, np.float32)


def _unit_environment(data: Loaded) -> str | None:
    import gymnasium

    from rl.envs import registry

    if data.environment is None:
        return None
    registry.registered(data.environment)  # imports the package that knows the name
    box: Any = gymnasium.make(data.environment).action_space
    if not (np.all(box.low == -1) and np.all(box.high == 1)):
        raise DataError(f"{data.source}: {data.environment} takes {box}, but the actions here are in [-1, 1]")
    return data.environment


def _open(minari: Any, name_or_path: str, folder: str | Path | None) -> Any:
    if name_or_path.startswith(("/", ".", "~")):
        path = expanded(name_or_path)
    elif folder is not None:
        path = expanded(folder) / name_or_path
    else:
        return _downloaded(minari, name_or_path)
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; {_REMEDY}")
    return minari.MinariDataset(path / "data" if (path / "data").is_dir() else path)


def _downloaded(minari: Any, name: str) -> Any:
    """The dataset of that id, from where Minari keeps those that it has, or else from its server."""
    try:
        return minari.load_dataset(name, download=True)
    except Exception as error:
        if (reason := _network_error(error)) is None:
            raise
        from rl.data import recipes

        regenerated = recipes.instead(name.removeprefix("mujoco/").rpartition("-")[0].replace("/", "-"))
        raise DataError(
            f"Minari {name} is not here, and its server cannot be reached ({reason}): download it elsewhere "
            f"(minari download {name}) and copy its folder to ~/.minari/datasets{regenerated and f', or {regenerated}'}"
        ) from error


def _network_error(error: BaseException | None) -> BaseException | None:
    """What the system said of the network, if that is where an error came from: libraries wrap it in their own."""
    while error is not None and not isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        error = error.__cause__ or error.__context__
    return error


def _minari() -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError("Minari datasets need minari: pip install -e '.[minari]' (in the clone)") from error
    return minari


def _box(space: Any, source: str) -> tuple[Any, Any, range | None]:
    """(low, high, choices) of an action space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return -1.0, 1.0, range(int(space.start), int(space.start) + int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space.low, space.high, None
    raise DataError(
        f"{source}: actions are {space}; agents here take an integer (Discrete) or a real vector (Box)"
    )


def _steps(data: Any, flatten: bool, source: str) -> dict[str, Any]:
    """The arrays of all episodes, one after another: those of `_columns`."""
    space = _in_recorded_order(data) if flatten else data.observation_space
    read = functools.partial(_flat if flatten else _arrays, space)
    episodes = log.progress(len(data), data.id, over=data, unit="episode", delay=2)
    columns = [
        _columns(episode, read, f"{source}, episode {number}") for number, episode in enumerate(episodes)
    ]
    if not columns:
        raise DataError(f"{source}: the dataset has no episodes; {_REMEDY}")
    steps = sum(len(column["ends"]) for column in columns)
    if steps != data.total_steps:
        raise DataError(
            f"{source}: its metadata counts {data.total_steps} steps in {len(data)} episodes, but they hold {steps}: "
            f"episodes are missing, or the metadata is damaged; {_REMEDY}"
        )
    return {name: _joined(name, [column[name] for column in columns], source) for name in columns[0]}


def _joined(name: str, parts: list[Any], source: str) -> Any:
    """One array after another; those of a space must be of one kind, or they would become what holds them all."""
    kinds = {tuple(array.dtype.kind for array in nest.leaves(part)): part for part in parts}
    if len(kinds) > 1 and name in ("observations", "actions"):
        types = " and ".join(str(nest.map_structure(lambda x: x.dtype, part)) for part in kinds.values())
        raise DataError(
            f"{source}: {name} are {types} in different episodes; write the dataset again with one type"
        )
    return nest.concatenate(*parts)


def _columns(episode: Any, read: Callable[[Any, str], Any], source: str) -> dict[str, Any]:
    """The arrays of an episode of T steps, each with T rows; ``read`` makes those of its observations.

    Minari keeps T + 1 observations, and keeps episodes apart: the last step is an end, whether or not it is flagged.
    """
    observations = read(episode.observations, source)
    columns = {name: np.asarray(getattr(episode, name)) for name in _PER_STEP}
    lengths = {name: sum(array.shape[:1]) for name, array in columns.items()}
    lengths |= {
        name: sum(array.shape[:1]) - 1 for name, array in nest.named("observations", observations).items()
    }
    steps = lengths["actions"]
    if steps < 1 or set(lengths.values()) != {steps}:
        listed = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise DataError(
            f"{source}: it has {listed} (without the last observation), but needs equally many, and at least one; "
            "write the dataset again without this episode"
        )
    return {
        **columns,
        "observations": nest.map_structure(lambda x: x[:-1], observations),
        "next_observations": nest.map_structure(lambda x: x[1:], observations),
        "ends": np.arange(1, steps + 1) == steps,
    }


def _arrays(space: Any, values: Any, source: str) -> Any:
    """[T + 1, *shape] for a box; a dict of these for a dictionary of boxes."""
    from gymnasium import spaces

    def array(box: Any, values: Any) -> np.ndarray:
        if not isinstance(box, spaces.Box):
            raise DataError(
                f"{source}: observations are {space}; boxes and dictionaries of boxes can be read. "
                "Convert the dataset with a wrapper that gives one array"
            )
        values = np.asarray(values)
        if math.prod(values.shape[1:]) != math.prod(box.shape):
            raise DataError(
                f"{source}: observations have shape {values.shape}, but their space is {box}: the dataset is damaged; "
                f"{_REMEDY}"
            )
        return values if box.shape else values.reshape(-1, 1)

    return nest.map_structure(array, space, values)


def _in_recorded_order(data: Any) -> Any:
    """The space of observations, with the entries of dictionaries as they were recorded: Minari sorts what it reads."""
    from gymnasium import spaces

    def ordered(space: Any, written: Mapping[str, Any]) -> Any:
        if not isinstance(space, Mapping):
            return space
        return spaces.Dict([(key, ordered(space[key], part)) for key, part in written["subspaces"].items()])

    written = data.storage.read_raw_metadata(data.storage.data_path).get("observation_space")
    return data.observation_space if written is None else ordered(data.observation_space, json.loads(written))


def _flat(space: Any, values: Any, source: str) -> np.ndarray:
    """[T + 1, D] for a dictionary of real boxes."""
    if not isinstance(space, Mapping):
        return _arrays(space, values, source)
    parts = [_flat(part, values[key], source) for key, part in space.items()]
    if any(part.dtype == np.uint8 for part in parts):
        raise DataError(
            f"{source}: observations are {space}, and images are not flattened with the rest: load it without "
            "--flatten_observations (flatten_observations=True)"
        )
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _environment(data: Any, flatten: bool) -> tuple[str | None, str]:
    from gymnasium import spaces

    if data.env_spec is None:
        return None, "no environment: none is recorded with the data; give it to the run (--environment=NAME)"
    recorded = _to_evaluate(data)
    if flatten and isinstance(data.observation_space, spaces.Dict):
        return None, (
            f"no environment: {recorded.id} observes a dictionary; register a version of it wrapped in "
            "gymnasium.wrappers.FlattenObservation and choose that (environment=...)"
        )
    notes = [_not_as_registered(recorded, data.env_spec)]
    if recorded.id != data.env_spec.id:
        notes.append(f"the steps are of {data.env_spec.id}, and {recorded.id} is recorded to evaluate in")
    return recorded.id, "; ".join(filter(None, notes))


def _to_evaluate(data: Any) -> Any:
    """The spec of the environment that is recorded to evaluate in."""
    return getattr(data, "_eval_env_spec", None) or data.env_spec  # Minari has no public name for it


def _registered(recorded: Any) -> Any:
    from rl.envs import registry

    with contextlib.suppress(ImportError):  # of the package that registers it: nothing can be evaluated then
        return registry.registered(recorded.id)
    return None


def _other_arguments(recorded: Any) -> list[str]:
    """The arguments and time limit that are recorded of an environment and differ from those of its name."""
    if (usual := _registered(recorded)) is None:
        return []
    arguments = [{**spec.kwargs, "max_episode_steps": spec.max_episode_steps} for spec in (recorded, usual)]
    names = {name for name in (*arguments[0], *arguments[1]) if name != "render_mode"}
    return sorted(name for name in names if arguments[0].get(name) != arguments[1].get(name))


def _not_as_registered(recorded: Any, of_steps: Any) -> str:
    """What is recorded of the environment beyond its name, by which alone it is made to evaluate in; as a note.

    Args:
        recorded: the environment to evaluate in.
        of_steps: the one that the steps are of, whose wrappers shaped what the data show.
    """
    if (usual := _registered(recorded)) is None:
        return ""
    differing = _other_arguments(recorded)
    theirs, ours = (
        {wrapper.name for spec in specs for wrapper in spec.additional_wrappers}
        for specs in ((of_steps, recorded), (usual,))
    )
    if changing := sorted(theirs - ours - set(_ONLOOKERS)):
        differing.append(f"wrappers ({', '.join(changing)})")
    if not differing:
        return ""
    return (
        f"{recorded.id} is recorded with other values of {', '.join(differing)} than it is registered with, and by its "
        "name it has the latter: scores are of another task than the data. Register it with the recorded ones under a "
        "name of your own and choose that (environment=...)"
    )


def _reference(data: Any, source: str) -> tuple[float, float] | None:
    recorded = data.storage.metadata
    if recorded.get("ref_min_score") is None or recorded.get("ref_max_score") is None:
        return None
    return reference(recorded["ref_min_score"], recorded["ref_max_score"], source)
