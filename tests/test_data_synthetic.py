"""`rl.data.synthetic`: the same tiny data every time, with every kind of episode end."""

import numpy as np
import pytest

from rl import data
from rl.envs import two_rooms


@pytest.mark.parametrize("name", ["synthetic-continuous", "synthetic-discrete"])
def test_is_deterministic_and_has_both_kinds_of_ends(name):
    loaded = data.load(name)
    assert loaded.digest == data.load(name).digest == data.digest(loaded.dataset)
    transitions, last, _ = loaded.dataset
    assert last.sum() == 20
    ended = transitions.discount == 0
    assert 0 < ended.sum() < 20 and last[ended].all()
    assert loaded.environment is None and loaded.note


def test_continuous():
    loaded = data.load("synthetic-continuous")
    assert loaded.spec == ((4,), 2, False)
    transitions = loaded.dataset.transitions
    assert transitions.action.dtype == np.float32 and np.abs(transitions.action).max() <= 1
    arrived = np.linalg.norm(transitions.next_observation[:, :2], axis=1) < 0.1
    np.testing.assert_array_equal(arrived, transitions.discount == 0)


def test_discrete():
    loaded = data.load("synthetic-discrete")
    assert loaded.spec == ((8,), 2, True)
    transitions = loaded.dataset.transitions
    assert transitions.action.dtype == np.int32
    moved = transitions.next_observation.argmax(axis=1) - transitions.observation.argmax(axis=1)
    np.testing.assert_array_equal(moved[transitions.action == 1], 1)
    assert set(moved[transitions.action == 0].tolist()) == {-1, 0}
    np.testing.assert_array_equal(transitions.reward, 1 - transitions.discount)


def test_goals():
    """Walks go all over both rooms, a step is what the environment makes of it, and held-out ones are others."""
    loaded = data.load("synthetic-goals", validation=True)
    assert loaded.spec == ((2,), 2, False) and loaded.digest == data.load("synthetic-goals").digest
    transitions, last, _ = loaded.dataset
    assert last.sum() == 60 and len(last) == 6000 and loaded.validation.last.sum() == 6
    np.testing.assert_allclose(
        two_rooms.move(transitions.observation, transitions.action), transitions.next_observation, atol=1e-6
    )
    cells = np.rint(transitions.observation).astype(int)[:, ::-1]
    assert {tuple(cell) for cell in cells.tolist()} == {tuple(cell) for cell in two_rooms.CELLS.tolist()}
    each = loaded.validation.transitions.observation[::100]
    assert not (each[:, None] == transitions.observation[::100]).all(-1).any()
    assert data.load("synthetic-goals").validation is None
    assert loaded.environment == "TwoRooms-v0" and "no rewards" in loaded.note


def test_an_environment_can_be_named():
    assert data.load("synthetic-continuous", environment="Mine-v0").environment == "Mine-v0"
