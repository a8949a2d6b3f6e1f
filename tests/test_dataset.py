"""`rl.replay.dataset`: sampling, returns-to-go and value supports against brute force."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.replay import chunks, goals, ring, transform
from rl.replay.dataset import (
    Dataset,
    episode_returns,
    lambda_sampler,
    n_step,
    returns_to_go,
    sampler,
    size,
    take,
    value_bounds,
)
from rl.types import Transition


def make(reward, discount, last):
    reward = np.asarray(reward, np.float32)
    rows = np.arange(len(reward), dtype=np.float32)
    transitions = Transition(
        observation=rows[:, None],
        action=rows[:, None],
        reward=reward,
        discount=np.asarray(discount, np.float32),
        next_observation=rows[:, None] + 1,
        next_action=rows[:, None],
        has_next_action=np.ones_like(reward),
    )
    return Dataset(transitions, np.asarray(last, bool))


def brute_force(reward, alive, last, discount, bootstrap):
    """The defining sum, from every step forwards."""
    result = []
    for start in range(len(reward)):
        total, weight = 0.0, 1.0
        for t in range(start, len(reward)):
            total += weight * reward[t]
            weight *= discount * alive[t]
            if last[t]:
                break
        total += weight * bootstrap / (1 - discount)
        result.append(total)
    return np.array(result)


steps = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.booleans(), st.booleans()),
    min_size=1,
    max_size=30,
)


def test_transitions_alone_are_no_dataset():
    alone = make([1, 2], [1, 1], [0, 1]).transitions
    for read in (lambda: sampler(2)(alone, jax.random.key(0)), lambda: n_step(alone, 2, 0.9)):
        with pytest.raises(
            ValueError, match=r"does not say where episodes end: .* Dataset\(transitions, last\)"
        ):
            read()


def test_what_reads_single_steps_refuses_transitions_over_several() -> None:
    """Rewards would count more than once: twice n steps, chunks of them, scales, supports."""
    several = n_step(make([1, 2, 4], [1, 1, 0], [0, 0, 1]), 2, 0.9)
    for read in (
        lambda: n_step(several, 2, 0.9),
        lambda: chunks.make(several, 2, 0.9),
        lambda: chunks.value_bounds(several, 2, 0.9, 0.9),
        lambda: value_bounds(several, 0.9),
        lambda: episode_returns(several),
        lambda: lambda_sampler(2, 2, 0.9, 0.5)(several, jax.random.key(0)),
        lambda: transform.fit(several, transform.RETURN_RANGE),
        lambda: transform.apply(transform.Transform(), several),
    ):
        with pytest.raises(ValueError, match=r"of transitions over 2 steps, .* make its n-step returns last"):
            read()


@pytest.mark.slow
@settings(deadline=None)
@given(steps, st.floats(0.0, 0.99), st.sampled_from([0.0, -1.0, 2.5]))
def test_returns_to_go_is_the_sum_of_discounted_rewards(log, discount, bootstrap):
    reward, alive, last = (np.array(column) for column in zip(*log, strict=True))
    last[-1] = True
    expected = brute_force(reward, alive, last, discount, bootstrap)
    returns = returns_to_go(make(reward, alive, last), discount, bootstrap)
    np.testing.assert_allclose(returns, expected, rtol=1e-9, atol=1e-9)
    assert returns.dtype == np.float64


def test_a_success_inside_an_episode_stops_the_return_but_not_the_episode():
    dataset = make([1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1])
    np.testing.assert_allclose(returns_to_go(dataset, 0.5), [1.5, 1.0, 1.5, 1.0])


def test_undiscounted_returns_need_no_bootstrap():
    dataset = make([1, 2, 3], [1, 1, 1], [0, 0, 1])
    np.testing.assert_allclose(returns_to_go(dataset, 1.0), [6, 5, 3])
    with pytest.raises(ValueError, match="no value at discount 1"):
        returns_to_go(dataset, 1.0, bootstrap=1.0)


def test_returns_to_go_accepts_device_arrays():
    dataset = make([1, 2, 3], [1, 1, 0], [0, 0, 1])
    np.testing.assert_allclose(returns_to_go(jax.device_put(dataset), 0.5), returns_to_go(dataset, 0.5))


@settings(deadline=None)
@given(steps, st.floats(0.5, 0.99))
def test_value_bounds_hold_every_return_and_stay_within_what_rewards_allow(log, discount):
    reward, alive, last = (np.array(column) for column in zip(*log, strict=True))
    last[-1] = True
    dataset = make(reward, alive, last)
    low, high = value_bounds(dataset, discount)
    returns = returns_to_go(
        dataset, discount, bootstrap=float(dataset.transitions.reward.mean(dtype=np.float64))
    )
    slack = 1e-6 * (1 + np.abs(returns).max())
    assert low < high
    assert low - slack <= returns.min() and returns.max() <= high + slack
    if reward.max() - reward.min() > 1e-3:
        assert low >= min(reward.min() / (1 - discount), reward.min()) - slack
        assert high <= max(reward.max() / (1 - discount), reward.max()) + slack


def test_value_bounds_by_hand():
    # One step of each reward; both end their episode, so that the returns are 0 and 1, and their span is 1.
    low, high = value_bounds(make([0, 1], [0, 0], [1, 1]), 0.9)
    assert (low, high) == (0.0, 2.0)
    # Nothing ends: with rewards 1 the only value is 10, and any support with an interior will do.
    low, high = value_bounds(make([1, 1], [1, 1], [0, 1]), 0.9)
    assert low < 10 < high and high - low <= 1
    # Unless targets end it: then a step may be worth its reward alone, 1, and no more than 10 go on.
    assert value_bounds(make([1, 1], [1, 1], [0, 1]), 0.9, ends=True) == pytest.approx((1.0, 10.0))
    # A log that shows ends knows what they are worth.
    assert value_bounds(make([0, 1], [0, 0], [1, 1]), 0.9, ends=True) == (0.0, 2.0)


def test_values_without_a_discount_are_bounded_where_every_episode_terminates():
    """It was a warning and NaN where rewards are 0 on average, and else an error about a bootstrap."""
    for reward in ([-1, 1, 1, -1], [1, 2, 3, 4]):
        cut = make(reward, [1, 1, 1, 0], [0, 1, 0, 1])
        for bounds in (value_bounds, lambda data, discount: chunks.value_bounds(data, 2, discount, 0.9)):
            with pytest.raises(
                ValueError, match=r"discount=1: episodes that a time limit cuts .* give less than 1"
            ):
                bounds(cut, 1.0)
    # Returns 3, 2, 2 and a span of 1; no sum of rewards that are all positive is below one of them.
    ended = make([1, 2, 2], [1, 0, 0], [0, 1, 1])
    assert value_bounds(ended, 1.0) == (1.0, 4.0)
    # Nothing pays: no value is above the least that a step costs.
    assert value_bounds(make([-1, -2, -2], [1, 0, 0], [0, 1, 1]), 1.0) == (-4.0, -1.0)
    # Whole chunks, or up to an end: the returns are 1 + 2 / 2, and 2, and any support around them will do.
    assert chunks.value_bounds(ended, 2, 1.0, 0.5) == (1.5, 2.5)


def test_a_log_that_stops_inside_an_episode_was_cut_there():
    """For all that reads episodes, as for who reads the file; an index beyond the last end was no message."""
    cut, marked = (make([1, 2, 4, 8], [1, 1, 1, 1], [0, 1, 0, end]) for end in (0, 1))
    np.testing.assert_array_equal(episode_returns(cut), [3, 12])
    for read in (
        lambda data: n_step(data, 3, 0.5)._replace(last=0),
        lambda data: chunks.make(data, 2, 0.5),
        lambda data: goals.trajectories(data, goals.Hindsight())._replace(state=0),
        lambda data: value_bounds(data, 0.5),
        lambda data: chunks.value_bounds(data, 2, 0.5, 0.25),
    ):
        jax.tree.map(np.testing.assert_array_equal, read(cut), read(marked))
    never = make([1, 2], [1, 1], [0, 0])
    for read in (
        lambda: n_step(never, 2, 0.5),
        lambda: chunks.make(never, 2, 0.5),
        lambda: goals.trajectories(never, goals.Hindsight()),
        lambda: episode_returns(never),
    ):
        with pytest.raises(ValueError, match=r"no episode ends in 2 rows: mark the last .* \(Dataset.last\)"):
            read()


def test_steps_in_no_order_tell_no_returns_and_the_support_is_what_rewards_allow():
    """Each is cut off at once: its bootstrapped return is nearly the mean's, and policies have very different ones."""
    reward = [0.0, 1.0, 2.0, 3.0]
    assert value_bounds(make(reward, [1, 1, 1, 1], [1, 1, 1, 1]), 0.9) == pytest.approx((0.0, 30.0))
    assert value_bounds(make(reward, [1, 0, 1, 1], [1, 1, 1, 1]), 0.9) == pytest.approx((0.0, 30.0))
    # Terminations are known ends.
    assert value_bounds(make(reward, [0, 0, 0, 0], [1, 1, 1, 1]), 0.9) == (0.0, 6.0)


def test_take_and_sample_return_whole_rows():
    dataset = jax.device_put(make(np.arange(10), np.ones(10), np.ones(10)))
    rows = take(dataset, np.array([3, 7]))
    np.testing.assert_array_equal(rows.reward, [3, 7])
    np.testing.assert_array_equal(rows.next_observation, [[4], [8]])
    batch = sampler(256)(dataset, jax.random.key(0))
    assert batch.reward.shape == (256,)
    np.testing.assert_array_equal(batch.observation[:, 0], batch.reward)
    assert set(np.asarray(batch.reward).tolist()) == set(range(size(dataset)))  # 256 draws miss none of 10
    again = sampler(256)(dataset, jax.random.key(0))
    np.testing.assert_array_equal(batch.reward, again.reward)


@pytest.mark.parametrize("n", [1, 3])
def test_logged_transitions_over_several_steps_are_those_that_a_replay_reads(n) -> None:
    """Of the same steps in a ring, as long as no episode goes on after a discount of 0."""
    rng = np.random.default_rng(0)
    last = rng.random(40) < 0.3
    last[-1] = True
    discount = np.float32(~(last & (rng.random(40) < 0.5)))
    log = make(rng.normal(size=40), discount, last)
    steps = log.transitions._replace(has_next_action=np.float32(~last), origin=np.arange(40))
    following = np.float32(np.arange(40) + ~last)
    steps = steps._replace(next_action=following[:, None])
    held = ring.Ring(ring.Row(*steps[:5], np.r_[True, last[:-1]]), np.int32(0), np.int32(40))
    expected = ring.transitions(jax.device_put(held), np.arange(40), n, 0.9)._replace(origin=steps.origin)
    dataset = n_step(Dataset(steps, last), n, 0.9)
    np.testing.assert_array_equal(dataset.last, last)
    for name, a, b in zip(Transition._fields, dataset.transitions, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
        assert a.dtype == b.dtype, name


def test_nothing_counts_after_a_discount_of_0_inside_an_episode() -> None:
    """As in logs that go on after a success."""
    log = make([1, 2, 4, 8], [1, 0, 1, 1], [False, False, False, True])
    steps = n_step(log, 3, 0.5).transitions
    np.testing.assert_allclose(steps.reward, [2, 2, 8, 8])
    np.testing.assert_allclose(steps.discount, [0, 0, 0.5, 1])
    np.testing.assert_allclose(steps.next_observation[:, 0], [2, 2, 4, 4])


def test_there_is_nothing_to_draw_from_no_transitions() -> None:
    with pytest.raises(ValueError, match="without transitions"):
        sampler(2)(make([], [], []), jax.random.key(0))
