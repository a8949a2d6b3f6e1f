"""Images that are held once: the same batches, from half of the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from rl import shard
from rl.data.steps import from_steps
from rl.replay import chunks, dataset, goals, images
from rl.replay.dataset import Dataset

STEPS, EPISODES, BATCH, DISCOUNT = 12, 5, 64, 0.9
SHAPE = (6, 6, 3)
HINDSIGHT = goals.Hindsight(next_state=True)


def log(pictures: bool = True) -> Dataset:
    """Episodes that time limits end, of which one ends by termination; observations are dicts with an image."""
    rng = np.random.default_rng(0)
    ends = np.arange(1, EPISODES * STEPS + 1) % STEPS == 0
    terminals = ends & (np.arange(len(ends)) < STEPS)
    image = rng.integers(0, 256, (len(ends), *SHAPE), np.uint8)
    return from_steps(
        observations={
            "image": image if pictures else image / 255.0,
            "joints": rng.normal(size=(len(ends), 2)),
        },
        actions=rng.uniform(-1, 1, (len(ends), 2)),
        rewards=rng.normal(size=len(ends)),
        terminals=terminals,
        timeouts=ends & ~terminals,
        source="test",
    )


@pytest.mark.parametrize(
    ("read", "source"),
    [
        (lambda data: data, dataset.sampler(BATCH)),
        (lambda data: dataset.n_step(data, 3, DISCOUNT), dataset.sampler(BATCH)),
        (lambda data: data, dataset.lambda_sampler(BATCH, 3, DISCOUNT, 0.5)),
        (lambda data: chunks.make(data, 4, DISCOUNT), chunks.sampler(BATCH)),
        (lambda data: goals.trajectories(data, HINDSIGHT), goals.sampler(BATCH, HINDSIGHT, DISCOUNT)),
    ],
    ids=["single steps", "n steps", "TD(lambda)", "chunks", "goals"],
)
def test_batches_of_shared_images_are_the_same(read: Callable[[Dataset], Any], source: Any) -> None:
    data = read(log())
    shared = images.on_device(data)
    draw, key = jax.jit(source), jax.random.key(1)
    jax.tree.map(np.testing.assert_array_equal, draw(jax.device_put(data), key), draw(shared, key))
    steps = shared.steps if isinstance(shared, chunks.Chunks) else shared.transitions
    # None is there twice, not even those at ends of episodes, which n steps lead to n times.
    assert len(steps.observation["image"].array) <= EPISODES * STEPS


def test_shared_images_lie_on_a_device_once() -> None:
    mesh = shard.mesh()
    steps = images.on_device(log(), lambda tree: shard.place(tree, mesh)).transitions
    pair = [steps.observation["image"].array, steps.next_observation["image"].array]
    assert pair[0].unsafe_buffer_pointer() == pair[1].unsafe_buffer_pointer()
    assert isinstance(steps.observation["joints"], jax.Array)


def test_what_is_no_image_or_not_there_twice_stays_as_it_is() -> None:
    data = log()
    inverted = {
        **data.transitions.next_observation,
        "image": 255 - data.transitions.next_observation["image"],
    }
    apart = data._replace(transitions=data.transitions._replace(next_observation=inverted))
    for each in (log(pictures=False), apart):
        same = jax.tree.map(lambda a, b: a is b, each, images.on_device(each, lambda tree: tree))
        assert all(jax.tree.leaves(same))
