"""rl.evaluate: exact counting on environments with known returns, and fitted-Q against closed forms."""

from __future__ import annotations

import json
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import envs, evaluate
from rl.replay.dataset import Dataset, value_bounds
from rl.types import Spec, Transition
from rl.values import heads

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


def test_the_time_limit_ends_episodes() -> None:
    with evaluate.evaluator(
        act, "toy_environments:Limited-v0", seeds=1, episodes=20, processes=0
    ) as evaluator:
        lengths = [e[0] for e in episodes_of(COUNTDOWN, 0, 0, 0, 20)]
        np.testing.assert_array_equal(evaluator(jnp.zeros(1))["length"][0], np.minimum(lengths, 4))


def test_success_at_any_step_and_at_the_last_are_told_apart() -> None:
    fade = "toy_environments:CountdownFade-v0"  # succeeds before its last step only
    with evaluate.evaluator(act, fade, seeds=1, episodes=20, processes=0) as evaluator:
        scores = evaluator(jnp.zeros(1))
    np.testing.assert_array_equal(scores["success"], scores["length"] > 5)
    np.testing.assert_array_equal(scores["final_success"], 0)


def test_success_is_absent_where_it_is_not_reported() -> None:
    quiet = "toy_environments:CountdownQuiet-v0"
    with evaluate.evaluator(act, quiet, seeds=1, episodes=2, processes=0) as evaluator:
        assert set(evaluator(jnp.zeros(1))) == {"return", "length"}


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
    for seeds, episodes, copies in [(1, 10, 10), (8, 10, 2), (5, 10, 5), (40, 10, 1), (1, 100, 25)]:
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


def test_a_policy_that_returns_nan_is_named() -> None:
    with (
        evaluate.evaluator(act, COUNTDOWN, seeds=3, episodes=2, processes=0) as evaluator,
        pytest.raises(FloatingPointError, match=r"policies \[1\] \(of 3\)"),
    ):
        evaluator(jnp.array([0.0, jnp.nan, 0.0]))


def test_actions_of_a_wrong_shape_are_refused() -> None:
    with (
        evaluate.evaluator(
            lambda s, o, k: jnp.zeros((2, 1)), COUNTDOWN, seeds=2, episodes=2, processes=0
        ) as e,
        pytest.raises(ValueError, match=r"\[2, 2, ...\] actions, got shape \(2, 1\)"),
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
        with pytest.raises(RuntimeError, match="closed"):
            evaluator(jnp.zeros(2))


# ---- choosing what to report -----------------------------------------------------------------------------


def test_select_keeps_last_best_and_selected_apart() -> None:
    scores = np.array([[[1.0, 3.0]], [[9.0, 1.0]], [[4.0, 8.0]], [[0.0, 2.0]]])  # [T=4, S=1, episodes=2]
    by_halves = evaluate.select(scores)
    assert {name: (c.score[0], c.evaluation[0]) for name, c in by_halves.items()} == {
        "last": (1.0, 3),
        "best": (6.0, 2),
        "selected": (1.0, 1),  # 9 is the best first half; its other half scored 1
    }
    estimated = evaluate.select(scores, estimates=[[0.3], [0.1], [0.2], [0.0]])["selected"]
    assert (estimated.score[0], estimated.evaluation[0]) == (2.0, 0)


def test_select_works_on_each_run_apart() -> None:
    scores = np.random.default_rng(0).normal(size=(5, 3, 4))
    together = evaluate.select(scores)
    for s in range(3):
        for name, choice in evaluate.select(scores[:, s : s + 1]).items():
            assert together[name].score[s] == choice.score[0]
            assert together[name].evaluation[s] == choice.evaluation[0]


def test_best_is_optimistic_and_selected_is_not() -> None:
    """All evaluations are of equally good policies (mean 0), so any gain is selection bias."""
    scores = np.random.default_rng(0).normal(size=(20, 2000, 10))
    means = {name: choice.score.mean() for name, choice in evaluate.select(scores).items()}
    assert means["best"] > 0.5
    assert abs(means["last"]) < 0.03
    assert abs(means["selected"]) < 0.04


@pytest.mark.parametrize(
    ("scores", "estimates", "message"),
    [
        (np.ones((3, 2)), None, r"\[evaluations, seeds, episodes\], got shape \(3, 2\)"),
        (np.ones((0, 2, 4)), None, "got shape"),
        (np.ones((3, 2, 1)), None, "at least 2"),
        (np.ones((3, 2, 4)), np.ones((3, 1)), r"\(3, 2\), got \(3, 1\)"),
        (np.full((3, 2, 4), np.nan), None, "NaN"),
        (np.ones((3, 2, 4)), np.full((3, 2), np.nan), "NaN"),
    ],
)
def test_histories_that_cannot_be_compared_are_refused(scores, estimates, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate.select(scores, estimates)


# ---- fitted-Q evaluation ---------------------------------------------------------------------------------

GAMMA = 0.8


def tabular(steps: int = 3000) -> tuple[Dataset, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A logged 4-state, 2-action MDP whose state 3 ends episodes, and the model that its log implies.

    Returns:
        the dataset, and from its counts P [4, 2, 4] (rows sum to less than 1 where episodes end), r [4, 2]
        and the distribution of first states [4]; last, the logged states.
    """
    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.ones(4), size=(4, 2))
    reward = rng.normal(size=(4, 2, 4)) + np.array([[0.0], [1.0]])  # the second action pays more
    rows, state = [], 0
    for t in range(steps):
        action = int(rng.integers(2))
        following = int(rng.choice(4, p=transition[state, action]))
        last = following == 3 or t == steps - 1 or rng.random() < 0.05
        rows.append((state, action, reward[state, action, following], following != 3, following, last))
        state = int(rng.integers(3)) if last else following
    s, a, r, alive, s2, last = map(np.array, zip(*rows, strict=True))
    counts, total = np.zeros((4, 2, 4)), np.zeros((4, 2))
    np.add.at(counts, (s[alive], a[alive], s2[alive]), 1)
    np.add.at(total, (s, a), r)
    visits = np.zeros((4, 2))
    np.add.at(visits, (s, a), 1)
    visits = np.maximum(visits, 1)  # state 3 is never acted in
    first = s[np.concatenate([[True], last[:-1]])]
    one_hot = np.eye(4, dtype=np.float32)
    none = np.zeros(steps, np.float32)
    transitions = Transition(
        one_hot[s], a, r.astype(np.float32), alive.astype(np.float32), one_hot[s2], a, none
    )
    start = np.bincount(first, minlength=4) / len(first)
    return Dataset(transitions, last), counts / visits[..., None], total / visits, start, s


def exact_value(p: np.ndarray, r: np.ndarray, start: np.ndarray, policy: np.ndarray) -> float:
    """start . (I - gamma P_pi)^-1 r_pi for the deterministic ``policy`` [4]."""
    chosen = np.arange(4), policy
    return float(start @ np.linalg.solve(np.eye(4) - GAMMA * p[chosen], r[chosen]))


def table_act(states, observations, keys):
    """Policies as tables: states [S, 4] int32."""
    del keys
    return jax.vmap(lambda table, o: table[o.argmax(-1)])(states, observations)


@pytest.mark.optimised
@pytest.mark.parametrize("name", heads.NAMES)
def test_fitted_q_finds_the_exact_value_of_policies_in_a_tabular_mdp(name: str) -> None:
    dataset, p, r, start, _ = tabular()
    policies = np.array([[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], np.int32)
    head = heads.make(name, *value_bounds(dataset, GAMMA), size=51)
    config = evaluate.FittedQ(
        discount=GAMMA,
        updates=1500,
        target_rate=0.05,
        learning_rate=3e-3,
        hidden=(32,),
        layer_norm=False,
    )
    fit = evaluate.fitted_q(table_act, Spec((4,), 2, discrete=True), head, config)
    result = fit(jnp.asarray(policies), dataset, jax.random.split(jax.random.key(0), 3))
    exact = np.array([exact_value(p, r, start, policy) for policy in policies])
    assert np.ptp(exact) > 0.5  # the policies differ by more than what is tolerated
    # The mean of finitely many Huber quantiles is not quite the expectation.
    np.testing.assert_allclose(result.value, exact, atol=0.2 if name == "quantile" else 0.08)


@pytest.mark.slow
def test_fitted_q_finds_the_value_of_linear_feedback() -> None:
    """x' = 0.9 x + 0.5 u, r = -x^2 - 0.1 u^2, u = -k x: the value is -x^2 (1 + 0.1 k^2) / (1 - gamma c^2)."""
    rng = np.random.default_rng(0)
    n = 5000
    x, u = rng.uniform(-1, 1, (n, 1)), rng.uniform(-1, 1, (n, 1))
    following, reward = 0.9 * x + 0.5 * u, -(x[:, 0] ** 2) - 0.1 * u[:, 0] ** 2
    transitions = Transition(x, u, reward, np.ones(n), following, u, np.zeros(n))
    dataset = Dataset(jax.tree.map(lambda v: v.astype(np.float32), transitions), np.ones(n, bool))
    gains = np.array([0.0, 0.5, 1.0])

    def feedback(states, observations, keys):
        return -states[:, None, None] * observations

    config = evaluate.FittedQ(
        discount=GAMMA, updates=2000, target_rate=0.05, learning_rate=3e-3, hidden=(64, 64)
    )
    fit = evaluate.fitted_q(feedback, Spec((1,), 1), heads.scalar(), config)
    result = fit(jnp.asarray(gains, jnp.float32), dataset, jax.random.split(jax.random.key(1), 3))
    exact = -np.mean(x**2) * (1 + 0.1 * gains**2) / (1 - GAMMA * (0.9 - 0.5 * gains) ** 2)
    np.testing.assert_allclose(result.value, exact, rtol=0.05)
    spread = np.std(x**2) * (1 + 0.1 * gains**2) / (1 - GAMMA * (0.9 - 0.5 * gains) ** 2)
    np.testing.assert_allclose(result.spread, spread, rtol=0.1)
    assert (result.bellman_error < 0.1).all()


@pytest.mark.slow
def test_fitted_q_compiles_once_and_repeats_bit_for_bit() -> None:
    dataset, *_ = tabular(200)
    config = evaluate.FittedQ(updates=1100, hidden=(8,))  # two calls of the compiled loop, unequal in length
    counted = chex.assert_max_traces(table_act, n=4)  # in the loop, and twice in the estimate
    fit = evaluate.fitted_q(counted, Spec((4,), 2, discrete=True), heads.scalar(), config)
    keys = jax.random.split(jax.random.key(0), 2)
    results = [fit(jnp.zeros((2, 4), jnp.int32) + i, dataset, keys) for i in (0, 1, 0)]
    chex.assert_trees_all_equal(results[0], results[2])
    assert (results[0].value != results[1].value).all()


def test_first_steps_are_all_used_where_they_are_few_and_spread_where_they_are_many(monkeypatch) -> None:
    last = np.zeros(1000, bool)
    last[[9, 10, 499, 998, 999]] = True
    starts = [0, 10, 11, 500, 999]
    dataset = Dataset(Transition(*[np.zeros(1000)] * 7), jnp.asarray(last))
    index, weight = map(np.asarray, evaluate._first_steps(dataset))
    np.testing.assert_array_equal(index[weight > 0], starts)
    np.testing.assert_allclose(weight[weight > 0], 0.2)
    monkeypatch.setattr(evaluate, "_ROWS", 3)
    index, weight = map(np.asarray, evaluate._first_steps(dataset))
    np.testing.assert_array_equal(index, [0, 10, 500])
    np.testing.assert_allclose(weight, 1 / 3, rtol=1e-6)


def test_fitted_q_refuses_images() -> None:
    with pytest.raises(ValueError, match=r"flat observations, not shape \(64, 64, 3\)"):
        evaluate.fitted_q(table_act, Spec((64, 64, 3), 2, discrete=True), heads.scalar())


def test_importing_it_imports_no_optional_package() -> None:
    code = "import sys, json, rl.evaluate; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert not {"ogbench", "gymnasium_robotics", "mujoco", "torch", "h5py"} & set(modules)
