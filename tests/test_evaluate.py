"""rl.evaluate: exact counting on environments with known returns."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import acting, envs, evaluate, train
from rl.types import Learner, State

COUNTDOWN = "toy_environments:Countdown-v0"


def act(states, observations, keys):
    """Each policy always takes its own state as its action; Countdown's box is [-3, 3]."""
    del keys
    return jnp.broadcast_to(states[:, None, None], (*observations.shape[:2], 1))


def episodes_of(name: str, base_seed: int, index: int, seed: int, episodes: int) -> list[tuple[int, float]]:
    """Length and first draw of the episodes that policy ``seed`` should meet, from the documented seeds."""
    starts = np.random.SeedSequence((base_seed, index, seed)).generate_state(episodes)
    env = envs.make(name)
    observations = [env.reset(seed=int(start))[0] for start in starts]
    return [(int(o[1]), float(o[2])) for o in observations]


@pytest.mark.parametrize("copies", [None, 1, 2, 3, 6])
def test_every_episode_is_counted_once_and_to_its_end(copies: int | None) -> None:
    """Lengths 1 to 10 on few copies: to stop after the first 6 finished would show as shorter episodes."""
    states = jnp.array([0.0, 0.5, -1.0])
    with evaluate.evaluator(act, COUNTDOWN, seeds=3, episodes=6, copies=copies, processes=0) as evaluator:
        scores = evaluator(states, index=4)
    lengths = np.array([[e[0] for e in episodes_of(COUNTDOWN, 0, 4, s, 6)] for s in range(3)])
    np.testing.assert_array_equal(scores["length"], lengths)
    np.testing.assert_allclose(scores["return"], lengths * (1 + 3 * np.array(states)[:, None]), rtol=1e-6)
    np.testing.assert_array_equal(scores["success"], lengths > 5)
    np.testing.assert_array_equal(scores["final_success"], lengths > 5)
    assert "normalized_return" not in scores


def test_a_policy_sees_every_part_of_a_dictionary() -> None:
    """One of two reaches for the goal that its own episode has."""

    def reach(states, observations, keys):
        del keys
        return states[:, None, None] * observations["task"]["goal"]

    with evaluate.evaluator(
        reach, "toy_environments:Goal-v0", seeds=2, episodes=4, copies=2, processes=0
    ) as episodes:
        scores = episodes(jnp.array([1.0, 0.5]))
    np.testing.assert_array_equal(scores["return"], [[5] * 4, [0] * 4])


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_episodes_take_turns_with_the_options_of_their_reset(copies: int) -> None:
    """Whichever copy runs them, in whichever round."""
    options = [{"pay": float(i)} for i in range(4)]
    with evaluate.evaluator(
        act, "toy_environments:Told-v0", seeds=2, episodes=6, copies=copies, processes=0, options=options
    ) as episodes:
        scores = episodes(jnp.zeros(2))
    np.testing.assert_array_equal(scores["return"], [[0, 1, 2, 3, 0, 1]] * 2)


def test_the_time_limit_ends_episodes() -> None:
    with evaluate.evaluator(
        act, "toy_environments:Limited-v0", seeds=1, episodes=20, processes=0
    ) as evaluator:
        lengths = [e[0] for e in episodes_of(COUNTDOWN, 0, 0, 0, 20)]
        np.testing.assert_array_equal(evaluator(jnp.zeros(1))["length"][0], np.minimum(lengths, 4))


def test_an_episode_that_may_never_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a policy that stands still in an environment without a time limit looks like a program that hangs."""
    monkeypatch.setattr(evaluate, "LONG_EPISODE", 7)
    with (
        evaluate.evaluator(act, COUNTDOWN, seeds=1, episodes=20, processes=0) as evaluator,
        pytest.warns(UserWarning, match=r"Countdown-v0 has lasted 7 steps.*max_episode_steps") as warned,
    ):
        lengths = evaluator(jnp.zeros(1))["length"]
    assert len(warned) <= (lengths >= 7).sum()  # and not at every step


@pytest.mark.parametrize("name", ["CountdownFade-v0", "CountdownIs-v0"])
def test_success_at_any_step_and_at_the_last_are_told_apart(name: str) -> None:
    """It succeeds before its last step only; one says ``is_success``, as the Fetch and Hand tasks do."""
    fade = f"toy_environments:{name}"
    with evaluate.evaluator(act, fade, seeds=1, episodes=20, processes=0) as evaluator:
        scores = evaluator(jnp.zeros(1))
    np.testing.assert_array_equal(scores["success"], scores["length"] > 5)
    np.testing.assert_array_equal(scores["final_success"], 0)


def test_success_is_absent_where_it_is_not_reported() -> None:
    quiet = "toy_environments:CountdownQuiet-v0"
    with evaluate.evaluator(act, quiet, seeds=1, episodes=2, processes=0) as evaluator:
        assert set(evaluator(jnp.zeros(1))) == {"return", "length"}


def test_success_that_is_reported_only_where_it_is_true_counts_as_none_elsewhere() -> None:
    """The share of episodes that succeed would be of those alone that did, or NaN when the run is summed up."""
    rare = "toy_environments:CountdownRare-v0"
    with (
        evaluate.evaluator(act, rare, seeds=1, episodes=20, processes=0) as evaluator,
        pytest.warns(UserWarning, match=r"CountdownRare-v0' reports .* that counts as no success"),
    ):
        scores = evaluator(jnp.zeros(1))
    with evaluate.evaluator(act, COUNTDOWN, seeds=1, episodes=20, processes=0) as evaluator:
        expected = evaluator(jnp.zeros(1))
    assert 0 < scores["final_success"].sum() < 20
    for name in ("success", "final_success"):
        np.testing.assert_array_equal(scores[name], expected[name])


def test_two_processes_give_what_one_gives() -> None:
    def noisy(states, observations, keys):
        return act(states, observations, keys) + jax.vmap(lambda k: jax.random.normal(k, (3, 1)))(keys)

    results = []
    for processes in (0, 2):
        with evaluate.evaluator(
            noisy, COUNTDOWN, seeds=3, episodes=6, copies=3, processes=processes
        ) as evaluator:
            results.append(evaluator(jnp.zeros(3)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_an_evaluation_can_be_repeated_and_another_one_differs() -> None:
    with evaluate.evaluator(act, COUNTDOWN, seeds=2, episodes=20, processes=0) as evaluator:
        first, other, again = (evaluator(jnp.zeros(2), index)["length"] for index in (1, 2, 1))
    with evaluate.evaluator(act, COUNTDOWN, seeds=2, episodes=20, processes=0, base_seed=1) as evaluator:
        reseeded = evaluator(jnp.zeros(2), 1)["length"]
    np.testing.assert_array_equal(first, again)
    for different in (other, reseeded, first[::-1]):  # the last: policies do not share their episodes
        assert (first != different).any()


def test_no_key_is_used_twice_and_an_evaluation_repeats_its_keys() -> None:
    seen: list[np.ndarray] = []

    def record(states, observations, keys):
        jax.debug.callback(lambda data: seen.append(np.asarray(data)), jax.random.key_data(keys))
        return act(states, observations, keys)

    def keys_of(evaluator: evaluate.Evaluator, index: int) -> list[tuple[int, ...]]:
        seen.clear()
        evaluator(jnp.zeros(2), index)
        jax.effects_barrier()
        return sorted(tuple(row) for keys in seen for row in keys.tolist())

    with evaluate.evaluator(record, COUNTDOWN, seeds=2, episodes=4, processes=0) as evaluator:
        first, again, other = (keys_of(evaluator, index) for index in (0, 0, 1))
    assert len(first) > 2  # several steps of two policies
    assert first == again
    assert len({*first, *other}) == len(first) + len(other)


def test_it_traces_once_and_works_under_a_transfer_guard() -> None:
    def everything(states, observations, keys):  # jit drops, and so never transfers, what is not used
        noise = jax.vmap(jax.random.uniform)(keys)[:, None, None] + observations[..., :1]
        return act(states, observations, keys) + 1e-3 * noise

    with evaluate.evaluator(
        chex.assert_max_traces(everything, n=1), COUNTDOWN, seeds=2, episodes=4, processes=0
    ) as evaluator:
        states = [jax.device_put(np.array([0.0, 0.1 * i], np.float32)) for i in range(3)]
        with jax.transfer_guard("disallow"):
            for index, state in enumerate(states):
                evaluator(state, index)


def test_it_keeps_no_reference_to_a_state() -> None:
    states = jnp.zeros(2)
    with evaluate.evaluator(act, COUNTDOWN, seeds=2, episodes=2, processes=0) as evaluator:
        evaluator(states)
        before = len(jax.live_arrays())
        del states
        assert len(jax.live_arrays()) == before - 1


def test_discrete_actions_and_a_learners_act() -> None:
    def upright(state, observation, key):
        del state, key
        return (observation[..., 2] > 0).astype(jnp.int32)

    with evaluate.evaluator(jax.vmap(upright), "CartPole-v1", seeds=2, episodes=3, processes=0) as evaluator:
        scores = evaluator(jnp.zeros(2))
    assert (scores["return"] == scores["length"]).all()
    assert (scores["length"] > 20).all()


def test_normalized_return_is_on_the_scale_of_the_reference() -> None:
    with evaluate.evaluator(
        act, COUNTDOWN, seeds=1, episodes=4, processes=0, reference=(2.0, 12.0)
    ) as evaluator:
        scores = evaluator(jnp.zeros(1))
    np.testing.assert_allclose(scores["normalized_return"], (scores["return"] - 2) * 10)
    np.testing.assert_allclose(evaluate.normalize([-20.0, 90.0, 200.0], (-20, 200)), [0, 50, 100])


@pytest.mark.slow
def test_an_experts_door_opening_is_seen_as_success(data_file) -> None:
    """The authors' own policy for the task opens the door every time."""
    pytest.importorskip("gymnasium_robotics")
    with np.load(data_file("policies/dapg_door.npz")) as file:
        expert = {name: jnp.asarray(file[name]) for name in file.files}

    def policy(p, observations, keys):
        del keys
        x = (observations - p["in_shift"]) / (p["in_scale"] + 1e-8)
        for layer in range(3):
            x = jnp.tanh(x) if layer else x
            x = x @ p[f"fc_layers.{layer}.weight"].T + p[f"fc_layers.{layer}.bias"]
        return x * p["out_scale"] + p["out_shift"]

    with evaluate.evaluator(policy, "AdroitHandDoor-v1", seeds=1, episodes=4, processes=0) as evaluator:
        scores = evaluator(expert)
    assert scores["success"].mean() == 1
    assert (scores["return"] > 1000).all()
    assert (scores["length"] == 200).all()


def test_the_default_number_of_copies_divides_and_is_bounded() -> None:
    for seeds, episodes, copies in [(1, 10, 10), (8, 10, 2), (5, 10, 2), (40, 10, 1), (1, 100, 10)]:
        with evaluate.evaluator(act, COUNTDOWN, seeds=seeds, episodes=episodes, processes=0) as evaluator:
            assert evaluator._copies == copies


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 0}, "at least 1, got 2 and 0"),
        ({"copies": 3}, "must divide the 4 episodes"),
        ({"reference": (5.0, 5.0)}, "random < expert"),
        ({"name": "Countup-v0"}, "unknown environment 'Countup-v0'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    arguments = {"name": COUNTDOWN, "seeds": 2, "episodes": 4, "processes": 0} | changes
    with pytest.raises(ValueError, match=message):
        evaluate.evaluator(act, **arguments)


def test_a_learner_acts_for_stacked_states_as_the_docstring_says() -> None:
    """Which share their step, so that jax.vmap alone cannot be used."""
    choose = lambda state, seen, key: jnp.broadcast_to(state.params, (*seen.shape[:-1], 1))
    learner = Learner(lambda *_: None, lambda *_: None, choose)
    states = State(jnp.array([0.0, 0.5]), {}, {}, jnp.zeros((), int))
    each = (
        jax.vmap(learner.act, (train.STACKED, 0, 0)),
        acting.over_seeds(acting.actor(learner), train.STACKED),
    )
    for policy in each:
        with evaluate.evaluator(policy, COUNTDOWN, seeds=2, episodes=2, processes=0) as evaluator:
            scores = evaluator(states)
        np.testing.assert_allclose(scores["return"], scores["length"] * np.array([[1.0], [2.5]]))
    for words in (
        "jax.vmap(learner.act, (rl.train.STACKED, 0, 0))",
        "rl.acting.actor(learner), rl.train.STACKED",
    ):
        assert words in evaluate.evaluator.__doc__


def test_a_policy_that_returns_nan_is_named() -> None:
    with (
        evaluate.evaluator(act, COUNTDOWN, seeds=3, episodes=2, processes=0) as evaluator,
        pytest.raises(FloatingPointError, match=r"policies \[1\] \(of 3\)"),
    ):
        evaluator(jnp.array([0.0, jnp.nan, 0.0]))


@pytest.mark.parametrize("part", ["reward", "observation"])
def test_an_environment_that_returns_nan_is_named_and_not_the_policy(part: str) -> None:
    name = f"toy_environments:Nan{part.title()}-v0"
    with (
        evaluate.evaluator(act, name, seeds=1, episodes=2, copies=1, processes=0) as evaluator,
        pytest.raises(
            FloatingPointError, match=rf"{name}' .*copy 0.* the {part} .*nan.* at step 2 of its episode 0"
        ),
    ):
        evaluator(jnp.zeros(1))


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (2, 2, 3)])
def test_actions_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Also of environments whose actions are one number, where an axis too few would do."""
    act = lambda states, observations, keys: jnp.zeros(shape)
    with (
        evaluate.evaluator(act, COUNTDOWN, seeds=2, episodes=2, processes=0) as e,
        pytest.raises(ValueError, match=rf"actions \[2, 2, 1\] .*: it returns {re.escape(str(list(shape)))}"),
    ):
        e(jnp.zeros(2))


def test_a_worker_that_dies_ends_the_evaluation_with_a_clear_error() -> None:
    def still(states, observations, keys):
        return jnp.zeros(observations.shape[:2], jnp.int32)

    with evaluate.evaluator(
        still, "toy_environments:Killed-v0", seeds=2, episodes=2, processes=2
    ) as evaluator:
        with pytest.raises(RuntimeError, match=r"worker .* died: killed by SIGKILL"):
            evaluator(jnp.zeros(2))
        with pytest.raises(envs.WorkerDied, match="killed by SIGKILL"):
            evaluator(jnp.zeros(2))


@pytest.mark.slow
def test_importing_it_imports_no_optional_package() -> None:
    code = "import sys, json, rl.evaluate; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert not {"ogbench", "gymnasium_robotics", "mujoco", "torch", "h5py"} & set(modules)
