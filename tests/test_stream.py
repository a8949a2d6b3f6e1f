"""Endless episodes, snapshots that put an environment back, and what happens when one fails."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque
from enum import IntFlag
from typing import Any

import gymnasium
import numpy as np
import pytest
import toy_environments

from rl import envs
from rl.envs import snapshot
from rl.envs.stream import Experience, Stream

COUNTDOWN = "toy_environments:Countdown-v0"


def stream(name: str, count: int = 2, processes: int = 0) -> Stream:
    return Stream(name, [(7, copy) for copy in range(count)], processes)


def actions(stream: Stream, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = len(stream.observation)
    if stream.spec.discrete:
        return rng.integers(0, stream.spec.action_size, size)
    return rng.uniform(-1, 1, (size, stream.spec.action_size))


def assert_same(one: Experience, other: Experience) -> None:
    for name, a, b in zip(Experience._fields, one, other, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


# ---- endless episodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 2])
def test_an_episode_follows_the_other_and_its_last_observation_is_not_lost(processes: int) -> None:
    with stream(COUNTDOWN, 2, processes) as running:
        seen, returns, lengths = running.observation.copy(), np.zeros(2), np.zeros(2, int)
        for _ in range(40):
            outcome = running.step(np.zeros((2, 1)))
            returns, lengths = returns + outcome.reward, lengths + 1
            np.testing.assert_array_equal(outcome.next_observation[:, 0], seen[:, 0] - 1)
            np.testing.assert_array_equal(outcome.terminated, outcome.next_observation[:, 0] == 0)
            np.testing.assert_array_equal(outcome.first, outcome.terminated)
            np.testing.assert_array_equal(outcome.length, lengths)
            np.testing.assert_array_equal(outcome.final_success, outcome.first & (lengths > 5))
            np.testing.assert_array_equal(outcome.success, outcome.final_success)
            for copy in np.flatnonzero(outcome.first):
                assert outcome.observation[copy, 0] == outcome.observation[copy, 1]  # all steps are left
                assert (int(copy), returns[copy], lengths[copy]) in running.finished
            returns[outcome.first], lengths[outcome.first] = 0, 0
            seen = outcome.observation.copy()
    assert len(running.finished) >= 8


def test_a_time_limit_is_no_termination() -> None:
    with stream("toy_environments:Limited-v0", 8) as running:
        outcomes = [running.step(np.zeros((8, 1))) for _ in range(4)]
    long = running.observation is not None and outcomes[0].next_observation[:, 1] > 4
    assert outcomes[3].first[long].all() and not outcomes[3].terminated[long].any()


def test_a_copys_episodes_depend_on_its_own_seed_alone() -> None:
    with stream(COUNTDOWN, 3) as three, Stream(COUNTDOWN, [(7, 2)], 0) as one:
        np.testing.assert_array_equal(three.observation[2:], one.observation)
        for _ in range(30):
            a, b = three.step(np.zeros((3, 1))), one.step(np.zeros((1, 1)))
            np.testing.assert_array_equal(a.observation[2:], b.observation)
        draws = {float(draw) for draw in three.observation[:, 2]}
    assert len(draws) == 3


# ---- snapshots -----------------------------------------------------------------------------------------------------

RESTORABLE = (
    *("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"),
    *("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", COUNTDOWN),
    *("CartPoleSwingUp-v0+distractors5", "Pendulum-v1+noise3"),
    pytest.param(
        "AdroitHandDoor-v1", marks=pytest.mark.slow
    ),  # each episode has its door elsewhere in the model
    pytest.param("antmaze-medium-singletask-task1-v0", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("name", RESTORABLE)
def test_a_stream_goes_on_from_its_snapshot_to_the_same_bits(name: str) -> None:
    if module := {"Adroit": "gymnasium_robotics", "antmaz": "ogbench"}.get(name[:6]):
        pytest.importorskip(module)
    with stream(name, 2) as running, stream(name, 2) as other:
        for time in range(60):
            running.step(actions(running, time))
        saved = json.loads(json.dumps(running.snapshot()))
        assert saved["reason"] == ""
        assert other.restore(saved)
        for time in range(60, 110):
            assert_same(running.step(actions(running, time)), other.step(actions(running, time)))
    assert [episode for episode in running.finished if episode in other.finished] == other.finished


def test_a_snapshot_travels_between_processes() -> None:
    with stream("CartPole-v1", 3, 2) as running, stream("CartPole-v1", 3, 0) as other:
        for time in range(30):
            running.step(actions(running, time))
        other.restore(json.loads(json.dumps(running.snapshot())))
        for time in range(30, 60):
            assert_same(running.step(actions(running, time)), other.step(actions(running, time)))


class Odd(gymnasium.Env):
    """Remembers what the test gives it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, memory: Any):
        self.memory = memory


@pytest.mark.parametrize(
    "memory",
    [
        *(None, True, 3, 0.1, "text", float("inf"), np.float32(0.1), np.arange(6).reshape(2, 3)[:, ::2]),
        *(
            [1, (2.5, None)],
            {"a": np.bool_(True)},
            {(0, 1): 2, 3: [4], "five": None, np.int64(6): 7},
            OrderedDict(b=1, a=2),
            deque([1, 2], 3),
            np.zeros((0, 2), np.uint8),
        ),
    ],
)
def test_every_plain_value_survives(memory: Any) -> None:
    saved, other = json.loads(json.dumps(snapshot.take(Odd(memory)))), Odd("something else")
    snapshot.put(other, saved)
    assert type(other.memory) is type(memory)
    np.testing.assert_equal(other.memory, memory)


def test_generators_go_on_where_they_were() -> None:
    for generator in (np.random.default_rng(3), np.random.Generator(np.random.MT19937(3))):
        generator.standard_normal(5)
        saved, other = json.loads(json.dumps(snapshot.take(Odd(generator)))), Odd(None)
        snapshot.put(other, saved)
        np.testing.assert_array_equal(other.memory.random(9), generator.random(9))


def test_pythons_generator_and_the_moments_of_a_normalising_wrapper_go_on() -> None:
    """Fresh moments would scale observations otherwise than those that a policy has learned from."""
    generator, env = random.Random(3), gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    generator.gauss(0, 1)
    env.reset(seed=0)
    env.step(1)
    other, fresh = Odd(None), gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    for one, another in ((Odd(generator), other), (env, fresh)):
        snapshot.put(another, json.loads(json.dumps(snapshot.take(one))))
    assert [other.memory.gauss(0, 1) for _ in range(3)] == [generator.gauss(0, 1) for _ in range(3)]
    np.testing.assert_array_equal(fresh.step(1)[0], env.step(1)[0])


def test_an_environment_inside_another_is_put_back_with_it() -> None:
    """One that is no wrapper holds it, and a wrapper around both another name of it: its state would start anew."""
    copies = [gymnasium.Wrapper(Odd(gymnasium.make("CartPole-v1"))) for _ in range(2)]
    for number, copy in enumerate(copies):
        copy.task = copy.env
        copy.unwrapped.memory.reset(seed=number)
    running, other = (copy.unwrapped.memory for copy in copies)
    running.step(1)
    snapshot.put(copies[1], json.loads(json.dumps(snapshot.take(copies[0]))))
    assert other is copies[1].task.memory
    np.testing.assert_array_equal(running.step(0)[0], other.step(0)[0])
    with pytest.raises(snapshot.NoSnapshot, match=r"Odd\.memory is .*CartPole"):
        snapshot.take(Odd([running.unwrapped]))


def test_an_object_in_two_places_and_the_generator_of_a_space_stay_what_they_were() -> None:
    """Two copies of one generator, or of one array, would part ways after the snapshot."""
    running, other = Odd(np.zeros(2)), Odd(None)
    running.bodies, running.random = [running.memory, [1.0]], running.np_random
    running.bodies.append(running.bodies)
    other.bodies = other.random = None
    for one in (running, other):
        parts = [gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(9)]
        one.observation_space = gymnasium.spaces.Tuple(parts)
    running.observation_space.seed(3)
    running.observation_space.sample()
    running.draw = running.action_space.sample  # spaces are put back in place, so that it is the same still
    snapshot.put(other, json.loads(json.dumps(snapshot.take(running))))
    assert other.bodies[0] is other.memory and other.bodies[2] is other.bodies
    assert other.random is other.np_random and other.random.random() == running.random.random()
    np.testing.assert_equal(other.observation_space.sample(), running.observation_space.sample())


@pytest.mark.parametrize(
    ("memory", "what"),
    [
        *((object(), "is builtins.object"), ({1, 2}, "is builtins.set"), (np.array([None]), "is an array")),
        *((Counter(a=2), "is collections.Counter"), (IntFlag("Phase", "A")(1), r"is .*\.Phase")),
        (np.random.default_rng(0).normal, "is builtins.method"),
        ([parts := np.zeros(4), parts[2:]], r"shares memory with Odd\.memory"),
    ],
    ids=["object", "set", "array", "counter", "enum", "method", "view"],
)
def test_what_cannot_be_written_down_is_named(memory: Any, what: str) -> None:
    with pytest.raises(snapshot.NoSnapshot, match=rf"Odd\.memory {what}"):
        snapshot.take(Odd(memory))


def test_a_snapshot_of_another_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="of 2 layers, the environment has 1"):
        snapshot.put(Odd(1), [{}, {}])


def test_where_there_is_no_snapshot_new_episodes_start() -> None:
    gymnasium.register("Stateful-v0", lambda: toy_environments.Unhealthy(ill=object()))
    with stream("Stateful-v0", 2) as running, stream("Stateful-v0", 2) as other:
        running.step(np.zeros(2, int))
        saved = json.loads(json.dumps(running.snapshot()))
        assert saved["reason"] == "Unhealthy.ill is builtins.object" and saved["episode"] == [1, 1]
        assert not other.restore(saved)
        assert other.snapshot()["episode"] == [2, 2] and other.snapshot()["length"] == [0, 0]


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_replaced_and_new_episodes_start() -> None:
    with stream("toy_environments:Killed-v0", 2, 1) as running:
        for _ in range(2):
            running.step(np.zeros(2, int))
        with pytest.raises(envs.WorkerDied, match="killed by SIGKILL"):
            running.step(np.zeros(2, int))
        assert running.restart().shape == (2, 1)
        assert not running.step(np.zeros(2, int)).first.any()
        assert running.snapshot()["episode"] == [2, 2] and running.snapshot()["length"] == [1, 1]


def test_a_reward_that_is_not_finite_is_an_error_that_says_where() -> None:
    with stream("toy_environments:NanReward-v0", 2) as running:
        running.step(np.zeros((2, 1)))
        with pytest.raises(
            FloatingPointError, match=r"\(copy 0\) returned the reward nan at step 2 of its episode 0"
        ):
            running.step(np.zeros((2, 1)))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ArrayReward", r"returned a reward of shape \(1,\)"),
        ("ArraySuccess", r"reported a success of shape \(1,\)"),
        ("CountSuccess", "reported a success of 2: it must lie between 0 and 1"),
    ],
)
def test_a_reward_or_a_success_that_is_no_number_in_its_range_is_named(name: str, what: str) -> None:
    with (
        stream(f"toy_environments:{name}-v0", 1) as running,
        pytest.raises(ValueError, match=f"environment 'toy_environments:{name}-v0' {what}"),
    ):
        running.step(np.zeros((1, 1)))


def test_an_observation_that_is_not_finite_is_one_too() -> None:
    with (
        stream("toy_environments:NanObservation-v0", 1) as running,
        pytest.raises(FloatingPointError, match="returned the observation"),
    ):
        for _ in range(2):
            running.step(np.zeros((1, 1)))


def test_of_a_dictionary_the_part_that_is_not_finite_is_named() -> None:
    """The toy observes its last action."""
    with (
        stream("toy_environments:Goal-v0", 1) as running,
        pytest.raises(
            FloatingPointError, match=r"the observation\['task'\]\['last'\] \[ 0\. nan\] at step 1"
        ),
    ):
        running.step(np.array([[0, np.nan]]))
