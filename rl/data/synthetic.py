"""Tiny deterministic datasets that need no simulator and no file, for tests and smoke runs.

They have what real logs have: terminations and time limits, good and bad behaviour. No score is claimed on
them.
"""

from __future__ import annotations

import numpy as np

from rl.data.steps import Loaded, from_steps, loaded
from rl.replay.dataset import Dataset

_EPISODES = 20
_LIMIT = 50  # steps
_STATES = 8
_WALKS, _WALK = 60, 100  # episodes between rooms, and steps of each


def load(name: str) -> Loaded:
    """The dataset called ``name``, one of `NAMES`.

    ``synthetic-continuous``: a point mass on a plane (position and velocity) that a noisy controller pushes
    to the origin; the episode terminates there. The reward is minus the distance to it.

    ``synthetic-discrete``: a walk left (0) or right (1) along a chain of 8 states, one-hot; the right end
    pays 1 and terminates.

    ``synthetic-goals``: walks between the cells of `rl.envs.two_rooms`, without rewards, by the protocol of OGBench's
    pointmaze-navigate: along the shortest way, with much noise, to a new cell as soon as one is reached. A tenth as
    many are held out.
    """
    return NAMES[name]()


def _point_mass() -> Loaded:
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(_EPISODES):
        position, velocity = rng.uniform(-1, 1, 2), np.zeros(2)
        skill = rng.uniform(0, 1)
        for t in range(_LIMIT):
            wanted = skill * (-2 * position - 2 * velocity) + 0.3 * rng.normal(size=2)
            action = np.clip(wanted, -1, 1)
            observation = np.concatenate([position, velocity])
            velocity = 0.9 * velocity + 0.1 * action
            position = position + 0.2 * velocity
            distance = np.linalg.norm(position)
            arrived = distance < 0.1
            successor = np.concatenate([position, velocity])
            steps.append((observation, action, -distance, arrived, t == _LIMIT - 1, successor))
            if arrived:
                break
    return _finish(steps, discrete=False, source="synthetic point mass")


def _chain() -> Loaded:
    rng = np.random.default_rng(0)
    one_hot = np.eye(_STATES)
    steps = []
    for _ in range(_EPISODES):
        state, skill = 0, rng.uniform(0.4, 0.9)
        for t in range(_LIMIT):
            action = int(rng.uniform() < skill)
            successor = min(max(state + (1 if action else -1), 0), _STATES - 1)
            arrived = successor == _STATES - 1
            steps.append(
                (one_hot[state], action, float(arrived), arrived, t == _LIMIT - 1, one_hot[successor])
            )
            state = successor
            if arrived:
                break
    return _finish(steps, discrete=True, source="synthetic chain")


def _rooms() -> Loaded:
    walks = loaded(
        _walks(0, _WALKS),
        environment="TwoRooms-v0",
        source="synthetic walks between two rooms",
        note="there are no rewards: all are 0",
    )
    return walks._replace(validation=_walks(1, _WALKS // 10))


def _walks(seed: int, episodes: int) -> Dataset:
    from rl.envs import two_rooms  # which imports gymnasium; to read data, nobody else needs it

    rng = np.random.default_rng(seed)

    def cells() -> np.ndarray:
        return two_rooms.around(two_rooms.CELLS[rng.integers(len(two_rooms.CELLS), size=episodes)], rng)

    place, goal, observations, actions = cells(), cells(), [], []
    for _ in range(_WALK + 1):
        reached = np.linalg.norm(place - goal, axis=-1, keepdims=True) <= two_rooms.TOLERANCE
        goal = np.where(reached, cells(), goal)
        noise = rng.normal(0, 0.5, place.shape)
        observations.append(place)
        actions.append(np.clip(two_rooms.toward(place, goal) + noise, -1, 1))
        place = two_rooms.move(place, actions[-1])
    rows = episodes * (_WALK + 1)
    flat = lambda steps: np.stack(steps, 1).reshape(rows, 2)
    return from_steps(
        flat(observations),
        flat(actions),
        rewards=np.zeros(rows),
        terminals=np.zeros(rows, bool),
        timeouts=np.arange(1, rows + 1) % (_WALK + 1) == 0,
        source="synthetic walks",
    )


def _finish(steps: list[tuple], *, discrete: bool, source: str) -> Loaded:
    observations, actions, rewards, terminals, timeouts, successors = map(np.array, zip(*steps, strict=True))
    dataset = from_steps(
        observations, actions, rewards, terminals, timeouts, successors, source=source, discrete=discrete
    )
    return loaded(
        dataset,
        environment=None,
        source=source,
        choices=2 if discrete else None,  # left and right
        note="there is no environment to evaluate in",
    )


NAMES = {"synthetic-continuous": _point_mass, "synthetic-discrete": _chain, "synthetic-goals": _rooms}
