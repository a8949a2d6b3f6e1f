"""`rl.replay.transform`: what an agent sees, by hand, and as it is stored."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rl.replay import transform
from rl.replay.dataset import Dataset
from rl.replay.transform import Transform
from rl.types import Transition


@pytest.fixture
def dataset() -> Dataset:
    """Episodes with returns 3, -1 and 4, of which the second one terminates."""
    rng = np.random.default_rng(0)
    reward = np.float32([1, 2, -1, 4, 0])
    observation = rng.normal(3, 2, (5, 2)).astype(np.float32)
    observation[:, 1] = 7  # constant
    rows = Transition(
        *(observation, observation[:, :1], reward, np.float32([1, 1, 0, 1, 1])),
        *(observation + 1, observation[:, :1], np.ones(5, np.float32)),
    )
    return Dataset(rows, np.array([False, True, True, False, True]))


def test_everything_that_depends_on_the_data_becomes_numbers(dataset: Dataset) -> None:
    seen = transform.fit(dataset, transform.RETURN_RANGE, -1.0, normalize_observations=True)
    assert (seen.reward_scale, seen.reward_shift) == (200.0, -1.0)  # 1000 / (4 - -1)
    np.testing.assert_allclose(seen.deviation[1], 1e-3, rtol=1e-5)
    agent = transform.apply(seen, dataset).transitions
    np.testing.assert_array_equal(agent.reward, np.float32([199, 399, -201, 799, -1]))
    np.testing.assert_allclose(agent.observation.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(agent.observation[:, 0].std(), 1, rtol=1e-2)
    later = (dataset.transitions.observation[:, 0] + 1 - seen.mean[0]) / seen.deviation[0]
    np.testing.assert_allclose(agent.next_observation[:, 0], later, rtol=1e-5)


def test_steps_in_no_order_have_no_range_of_returns(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"--reward_scale=return_range is that .*\(reward_scale=1.0, say\)"):
        transform.fit(dataset._replace(last=np.ones(5, bool)), transform.RETURN_RANGE)
    alike = dataset._replace(last=np.arange(5) == 4)
    with pytest.raises(
        ValueError, match=r"the 1 episodes of the log all have a return of .* \(reward_scale=1.0, say\)"
    ):
        transform.fit(alike, transform.RETURN_RANGE)


@pytest.mark.parametrize("shape", [(2_000_000, 2), (1_000_000, 2, 2)])
def test_a_large_dataset_has_its_moments(shape: tuple[int, ...], dataset: Dataset) -> None:
    """Constants, whose mean over two million is 1 % off where they are added up in float32, one after another."""
    many = np.full(shape, 0.1, np.float32)
    seen = transform.fit(
        dataset._replace(transitions=dataset.transitions._replace(observation=many)),
        normalize_observations=True,
        entities=len(shape) == 3,
    )
    assert seen.mean.dtype == seen.deviation.dtype == np.float32
    np.testing.assert_allclose(seen.mean, 0.1, rtol=1e-6)
    np.testing.assert_allclose(seen.deviation, 1e-3, rtol=1e-3)


def test_rewards_are_clipped_last() -> None:
    seen = Transform(10.0, 0.5, True)
    np.testing.assert_array_equal(
        transform.rewards(seen, np.array([-1.0, 0.01, 1.0])), np.float32([-1, 0.6, 1])
    )


def test_nothing_changes_where_nothing_is_asked(dataset: Dataset) -> None:
    frames = np.arange(8, dtype=np.uint8)
    assert transform.observations(Transform(), frames) is frames
    same = transform.apply(transform.fit(dataset), dataset)
    np.testing.assert_array_equal(same.transitions.reward, dataset.transitions.reward)


def test_each_array_of_a_dictionary_has_its_own_moments_and_images_stay(dataset: Dataset) -> None:
    steps, image = dataset.transitions, np.arange(20, dtype=np.uint8).reshape(5, 2, 2, 1)
    split = lambda x: {"parts": {"first": x[:, :1], "second": x[:, 1:]}, "image": image}
    apart = dataset._replace(
        transitions=steps._replace(
            observation=split(steps.observation), next_observation=split(steps.next_observation)
        )
    )
    fitted = transform.fit(apart, normalize_observations=True)
    seen = transform.from_json(json.loads(json.dumps(transform.to_json(fitted))))
    transitions = transform.apply(seen, apart).transitions
    expected = transform.apply(transform.fit(dataset, normalize_observations=True), dataset).transitions
    for name in ("observation", "next_observation"):
        parts = getattr(transitions, name)["parts"]
        np.testing.assert_array_equal(
            np.concatenate([parts["first"], parts["second"]], 1), getattr(expected, name)
        )
        assert getattr(transitions, name)["image"] is image
    alone = dataset._replace(transitions=steps._replace(observation=image, next_observation=image))
    seen = transform.fit(alone, normalize_observations=True)
    assert transform.apply(seen, alone).transitions.observation is image


def test_entities_share_the_moments_of_a_feature_however_many_there_are_and_end_at_5(
    dataset: Dataset,
) -> None:
    sets = np.random.default_rng(0).normal(3, 2, (5, 4, 3)).astype(np.float32)
    sets[..., 2] = 0  # as the id of an object that no episode has
    steps = dataset.transitions._replace(observation=sets, next_observation=sets)
    seen = transform.fit(dataset._replace(transitions=steps), normalize_observations=True, entities=True)
    seen = transform.from_json(json.loads(json.dumps(transform.to_json(seen))))
    agent = transform.observations(seen, sets)
    np.testing.assert_allclose(agent.mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_allclose(agent.std((0, 1)), [1, 1, 0], atol=1e-2)
    more = np.concatenate([sets, np.float32([3, 99, 1]) + np.zeros((5, 1, 3), np.float32)], 1)
    np.testing.assert_array_equal(transform.observations(seen, more)[:, :4], agent)
    np.testing.assert_array_equal(transform.observations(seen, more)[:, 4, 1:], 5)
    assert transform.fit(dataset, entities=True) == Transform()
    with pytest.raises(ValueError, match=r"observation of shape \(2,\) is no set of entities"):
        transform.fit(dataset, normalize_observations=True, entities=True)


@pytest.mark.parametrize("normalize", [False, True])
def test_it_is_stored_to_the_bit(dataset: Dataset, normalize: bool) -> None:
    seen = transform.fit(dataset, 1 / 3, 0.1, normalize_observations=normalize)
    again = transform.from_json(json.loads(json.dumps(transform.to_json(seen))))
    assert again[:3] == seen[:3]
    for name in ("mean", "deviation"):
        one, other = getattr(seen, name), getattr(again, name)
        assert one is other is None or (one.tobytes(), one.dtype) == (other.tobytes(), other.dtype)
