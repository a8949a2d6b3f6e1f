"""D4RL's locomotion tiers, made again on gymnasium's environments by this library's own behaviour policies.

The protocol is that of D4RL (Fu et al. 2020, arXiv 2004.07219, and its ``collect_data.py``): actions sampled from a
SAC policy (or uniformly), episodes one after another until there are enough steps. ``medium`` is a policy at about a
third of the expert's return, ``medium-expert`` the medium tier and then the expert tier. What differs:

- the environments are gymnasium's -v5, D4RL's were gym's -v2. Observations and actions are the same; Hopper and
  Walker2d no longer pay for being healthy in the step in which they fall, and Walker2d's right foot has the friction
  of its left one;
- ``medium-replay`` is no replay buffer but what snapshots of the training run up to the medium policy do, each for the
  steps of training nearest to it (`_replay`). Who has trained the policies has their replay buffer too:
  ``python -m experiments.actors --buffer=FILE`` writes it;
- the last episode of each policy is kept, cut at the number of transitions and marked as a timeout.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl.data.recipes import behaviour, storage
from rl.data.recipes.behaviour import Actors
from rl.data.recipes.catalogue import Locomotion
from rl.data.recipes.episode import draw_seed
from rl.log import loaded_commit, replacing

if TYPE_CHECKING:
    import gymnasium

TRANSITIONS = 1_000_000  # of random, medium and expert; medium-expert has both halves whole, as D4RL's has
CHUNK_ROWS = 10_000  # at least this many are made by one process and kept as one file; part of the recipe
RANDOM = -1  # the actor that draws uniformly from the action box

# D4RL's layout.
ARRAYS = {
    "observations": np.float32,
    "actions": np.float32,
    "rewards": np.float32,
    "terminals": np.bool_,
    "timeouts": np.bool_,
    "next_observations": np.float32,
    "infos/action_log_probs": np.float32,
    "infos/qpos": np.float32,
    "infos/qvel": np.float32,
}

Act = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, float]]


class Stage(NamedTuple):
    """Consecutive rows of a dataset that one policy made."""

    actor: int  # snapshot in the file of actors, or `RANDOM`
    rows: int
    replay: bool  # part of medium-replay, whose episodes are seeded apart from those of the other tiers


class Chunk(NamedTuple):
    """Whole episodes of one stage. Does not depend on how many others run."""

    environment: str
    actors: str | None  # file; None for those shipped
    stage: Stage
    seed: int
    number: int  # in its stage
    rows: int  # at least this many are made

    @property
    def total_rows(self) -> int:
        return self.rows

    def path(self, folder: Path) -> Path:
        actor, _, replay = self.stage
        return folder / f"{'replay' if replay else 'rollout'}-{actor}-{self.number:04d}-{self.rows}.npz"

    def make(self, folder: Path) -> None:
        """Simulate episodes until there are ``rows`` steps, and write the arrays of `ARRAYS` into ``folder``.

        Episode i is a function of (seed, tier, actor, number, i).
        """
        actor, _, replay = self.stage
        env, act = _environment(self.environment), _policy(self.environment, self.actors, actor)
        episodes: list[dict[str, np.ndarray]] = []
        rows = 0
        while rows < self.rows:
            key = (int(replay), actor + 1, self.number, len(episodes))
            episodes.append(rollout(env, act, np.random.SeedSequence(self.seed, spawn_key=key)))
            rows += len(episodes[-1]["rewards"])
        storage.save(
            self.path(folder),
            {name: np.concatenate([episode[name] for episode in episodes]) for name in ARRAYS},
        )


def rollout(env: gymnasium.Env, act: Act, seed: np.random.SeedSequence) -> dict[str, np.ndarray]:
    """Return the arrays `ARRAYS` [T, ...] of one episode, from its reset to where the environment ends it.

    The layout is that of D4RL's ``collect_data.py``; a step at the time limit that also terminates is both.
    """
    rng = np.random.default_rng(seed)
    state: Any = env.unwrapped.data  # type: ignore[attr-defined]
    observation, _ = env.reset(seed=draw_seed(rng))
    steps: list[tuple] = []
    ended = False
    while not ended:
        action, log_prob = act(observation, rng)
        qpos, qvel = state.qpos.copy(), state.qvel.copy()
        following, reward, terminated, truncated, _ = env.step(action)
        steps.append((observation, action, reward, terminated, truncated, following, log_prob, qpos, qvel))
        observation, ended = following, terminated or truncated
    columns = zip(*steps, strict=True)
    return {name: np.asarray(next(columns), dtype) for name, dtype in ARRAYS.items()}


def uniform(size: int) -> Act:
    """The policy of the random tier: uniform on [-1, 1]^size."""
    log_prob = -size * math.log(2)
    return lambda observation, rng: (rng.uniform(-1, 1, size).astype(np.float32), log_prob)


@functools.lru_cache(maxsize=1)
def _environment(name: str) -> gymnasium.Env:
    from rl.envs import make  # not above: reading data needs no simulator

    return make(name)


def _policy(environment: str, path: str | None, actor: int) -> Act:
    if actor == RANDOM:
        return uniform(math.prod(_environment(environment).action_space.shape or ()))
    return behaviour.load(path, environment).policy(actor)


class Plan(NamedTuple):
    """See `rl.data.recipes.collector.Plan`."""

    recipe: Locomotion
    seed: int
    stages: tuple[Stage, ...]
    path: str | None  # of the actors
    actors: Actors | None  # None where only the random tier needs none

    @property
    def packages(self) -> tuple[str, ...]:
        return ("h5py", "mujoco", "gymnasium", "numpy")

    @property
    def extra(self) -> str:
        return "d4rl"

    @property
    def dataset(self) -> str:
        return self.recipe.dataset

    @property
    def transitions(self) -> int:
        return sum(stage.rows for stage in self.stages)

    @property
    def settings(self) -> dict[str, Any]:
        settings = {"dataset": self.dataset, "seed": self.seed}
        if self.actors is None or self.recipe.tier == "random":
            return settings
        return settings | {"actors_sha256": behaviour.digest(self.actors)}

    @property
    def size(self) -> dict[str, Any]:
        return {"transitions": self.transitions}

    @property
    def files(self) -> Mapping[str, str]:
        return {"train": self.recipe.file}

    def chunks(self) -> list[Chunk]:
        return [chunk for stage in self.stages for chunk in self._chunks(stage)]

    def _chunks(self, stage: Stage) -> list[Chunk]:
        return [
            Chunk(
                self.recipe.env,
                self.path,
                stage,
                self.seed,
                number,
                min(CHUNK_ROWS, stage.rows - number * CHUNK_ROWS),
            )
            for number in range(math.ceil(stage.rows / CHUNK_ROWS))
        ]

    def join(self, work: Path, joined: Mapping[str, Path], versions: dict[str, str]) -> dict[str, Any]:
        """Write D4RL's layout; what the card says is in the file's attributes too."""
        import h5py

        with h5py.File(joined["train"], "w") as file:
            for name in ARRAYS:
                self._write(file, name, work)
            cut = _end_stages(file, [stage.rows for stage in self.stages])
            scores = _scores(file, cut, _references(self.recipe.env, self.actors))
            card = {**self._origin(), **scores, "sha256": _digest(file)}
            _annotate(file, {**self.settings, **card, "versions": versions})
        return card

    def _write(self, file: Any, name: str, work: Path) -> None:
        """Put the array ``name`` of all chunks into ``file``, each stage cut to its rows."""
        first = last = 0
        for stage in self.stages:
            last += stage.rows
            for chunk in self._chunks(stage):
                with np.load(chunk.path(work)) as arrays:
                    rows = arrays[name][: last - first]
                if name not in file:
                    file.create_dataset(name, (self.transitions, *rows.shape[1:]), rows.dtype)
                file[name][first : first + len(rows)] = rows
                first += len(rows)

    def _origin(self) -> dict[str, Any]:
        """The environment and the policies, and how to make the same file again."""
        command = (
            f"python -m experiments.collect --dataset={self.dataset} --transitions={self.transitions} "
            f"--seed={self.seed}"
        )
        return {
            "environment": self.recipe.env,
            "command": command if self.path is None else f"{command} --actors={self.path}",
            "commit": loaded_commit() or "unknown",
            "actors": {} if self.actors is None else self.actors.card,
            "stages": [self._describe(stage) for stage in self.stages],
        }

    def _describe(self, stage: Stage) -> dict[str, Any]:
        if stage.actor == RANDOM or self.actors is None:
            return {"policy": "uniform", "transitions": stage.rows}
        return {
            "policy": "snapshot",
            "training_steps": int(self.actors.steps[stage.actor]),
            "transitions": stage.rows,
        }


def plan(recipe: Locomotion, transitions: int | None, seed: int, path: str | os.PathLike | None) -> Plan:
    """Return what to make; ``transitions=None`` stands for the protocol's number.

    Raises:
      ValueError: a number out of range, or actors that do not fit; see `rl.data.recipes.behaviour.load`.
    """
    for name, value, least in (("transitions", transitions, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    file = None if path is None else str(Path(path).expanduser().absolute())
    needless = recipe.tier == "random" and file is None and not behaviour.shipped(recipe.env)
    policies = None if needless else behaviour.load(file, recipe.env)
    weights = _weights(recipe, policies)
    return Plan(recipe, seed, _stages(weights, transitions, recipe.tier == "medium-replay"), file, policies)


def write_buffer(path: Path, arrays: Mapping[str, np.ndarray], policies: Actors) -> None:
    """Write a training run's replay buffer as D4RL's medium-replay is: the layout without the ``infos``.

    Args:
      path: the HDF5 file, replaced as a whole.
      arrays: the arrays of `ARRAYS` but for ``infos``, one row per step of training in the order of training; the
        last one is marked as a timeout if no episode ends there.
      policies: of the same run: their card and references are recorded.
    """
    import h5py

    environment = policies.card["environment"]
    with replacing(path) as partial, h5py.File(partial, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        cut = _end_stages(file, [len(arrays["rewards"])])
        origin = {
            "dataset": path.stem,
            "environment": environment,
            "actors": policies.card,
            "stages": [{"policy": "replay buffer", "transitions": len(arrays["rewards"])}],
        }
        scores = _scores(file, cut, _references(environment, policies))
        _annotate(file, {**origin, **scores, "sha256": _digest(file)})


def _weights(recipe: Locomotion, policies: Actors | None) -> list[tuple[int, int]]:
    """(actor, transitions) of each stage at the protocol's size."""
    if recipe.tier == "random" or policies is None:
        return [(RANDOM, TRANSITIONS)]
    medium, expert = policies.card["medium"], policies.card["expert"]
    if recipe.tier == "medium-replay":
        return _replay(policies)
    if recipe.tier == "medium-expert" and medium == expert:
        raise ValueError("medium-expert needs two policies, but these actors are a single one")
    return {
        "medium": [(medium, TRANSITIONS)],
        "expert": [(expert, TRANSITIONS)],
        "medium-expert": [(medium, TRANSITIONS), (expert, TRANSITIONS)],
    }[recipe.tier]


def _replay(policies: Actors) -> list[tuple[int, int]]:
    """As many transitions as training had seen when it reached the medium policy, by its snapshots on the way.

    Each step of training is made by the snapshot that is nearest in time, those of its warm-up by the uniform
    policy it had then. The replay buffer itself came from a policy that changed with every step; it cannot be made
    again without training.
    """
    if "random_steps" not in policies.card:
        raise ValueError(
            "medium-replay needs the snapshots of a training run, but these actors are a single policy"
        )
    steps = policies.steps[: policies.card["medium"] + 1]
    ends = np.array([0, *((steps[1:] + steps[:-1]) // 2), steps[-1]])
    rows = np.diff(np.maximum(ends, policies.card["random_steps"]), prepend=0)
    return [(actor, int(count)) for actor, count in enumerate(rows, start=RANDOM)]


def _stages(weights: list[tuple[int, int]], transitions: int | None, replay: bool) -> tuple[Stage, ...]:
    """The stages in proportion to ``weights``, with ``transitions`` rows in all."""
    ends = np.cumsum([rows for _, rows in weights])
    total = ends[-1] if transitions is None else transitions
    rows = np.diff(ends * total // ends[-1], prepend=0)
    return tuple(
        Stage(actor, int(count), replay) for (actor, _), count in zip(weights, rows, strict=True) if count
    )


def _end_stages(file: Any, rows: list[int]) -> np.ndarray:
    """Mark the last step of each stage as a timeout if no episode ends there; return those steps."""
    last = np.cumsum(rows) - 1
    cut = last[~(file["terminals"][()] | file["timeouts"][()])[last]]
    file["timeouts"][cut] = True
    return cut


def _scores(file: Any, cut: np.ndarray, references: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The mean return of the episodes that were not cut, and its place between random and expert."""
    ends = np.flatnonzero(file["terminals"][()] | file["timeouts"][()])
    starts = np.concatenate([[0], ends[:-1] + 1])
    returns = np.add.reduceat(file["rewards"][()].astype(np.float64), starts)[~np.isin(ends, cut)]
    scores: dict[str, Any] = {"episodes": len(ends), "episodes_cut": len(cut)}
    for source, (random, expert) in references.items():
        scores[f"reference_{source}"] = [random, expert]
        if len(returns):
            scores[f"normalized_return_{source}"] = 100 * (returns.mean() - random) / (expert - random)
    if len(returns):
        scores |= {"return_mean": returns.mean(), "return_std": returns.std()}
    return scores


def _references(environment: str, policies: Actors | None) -> dict[str, tuple[float, float]]:
    """(random, expert) return by source: D4RL's published ones, and those of this recipe's own policies."""
    from rl.data import d4rl  # not above: workers must start without JAX, which the readers import

    references = {"d4rl": d4rl.locomotion_reference(environment)}
    if policies is not None and policies.random_returns.size:
        expert = policies.returns[policies.card["expert"]]
        references["recipe"] = float(policies.random_returns.mean()), float(expert.mean())
    return references


def _annotate(file: Any, card: Mapping[str, Any]) -> None:
    """Write ``card`` into the attributes, by which readers know a regenerated file."""
    for name, value in {"regenerated": True, **card}.items():
        file.attrs[name] = json.dumps(value) if isinstance(value, dict | list) else value


def _digest(file: Any) -> str:
    """SHA-256 over name, dtype, shape and bytes of each array, in the order of `ARRAYS`."""
    result = hashlib.sha256()
    for name in filter(file.__contains__, ARRAYS):
        array = file[name][()]
        result.update(f"{name} {array.dtype.str} {array.shape}".encode())
        result.update(array.data)
    return result.hexdigest()
