"""The model-based loop: what reaches the learner, what is kept, what is measured, and the edge of reach itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import keys, model_based, train
from rl.agents import mobile, sac_n
from rl.agents.state import delayed
from rl.dynamics import base, ensemble, termination
from rl.dynamics.rollout import Rollouts
from rl.envs import plane
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

KEY = jax.random.key(0)
SMALL = model_based.Config(rollouts=16, length=3, retain=2, updates=5, batch_size=20, real=0.3)
LOGGED = 1000.0  # every logged reward; those of the world are smaller


def logged(rows: int = 50) -> Dataset:
    point = np.asarray(plane.reset(jax.random.key(1), rows))
    one = np.ones(rows, np.float32)
    steps = Transition(point, 0.1 * point, LOGGED * one, one, point, 0.1 * point, 0 * one)
    return Dataset(steps, np.ones(rows, bool))


def change(**fields: Any) -> model_based.Config:
    return dataclasses.replace(SMALL, **fields)


def stub(**functions: Any) -> Learner:
    """A learner that learns nothing: it explores at random, and its metrics are rewards of logged and model rows."""

    def update(state: State, batch: Transition, key: Any) -> tuple[State, dict[str, Any]]:
        logged = batch.origin == 0 if batch.origin is not None else jnp.ones(batch.reward.shape, bool)
        return state._replace(step=state.step + 1), {
            "logged": logged.sum(),
            "logged_least": jnp.where(logged, batch.reward, jnp.inf).min(),
            "model_most": jnp.where(logged, -jnp.inf, batch.reward).max(),
        }

    explore = lambda state, observation, key: jax.random.uniform(key, observation.shape, minval=-1)
    learner = Learner(
        init=lambda key, batch: State({}, {}, {}, jnp.zeros((), jnp.int32)),
        update=update,
        act=explore,
        value=lambda state, observation, key: observation[..., 0],
        explore=explore,
        critics=lambda state, observation, action: observation[None, ..., 0],
    )
    return learner._replace(**functions)


def loop(config: model_based.Config = SMALL, learner: Learner | None = None, **more: Any) -> model_based.Loop:
    world = more.pop("world", base.true(plane.step))
    terminates = more.pop("terminates", termination.never)
    return model_based.make(config, learner or stub(), world, terminates, **more)


def sac(**fields: Any) -> Learner:
    config = sac_n.Config(**{"critics": 2, "hidden": (8,)} | fields)
    return sac_n.make(config, plane.SPEC, heads.scalar())


# ---- batches and buffer -----------------------------------------------------------------------------------


def run(
    training_loop: model_based.Loop, epochs: int, data: Dataset | None = None, world: Any = ()
) -> tuple[Any, list[Any]]:
    source = jax.device_put(model_based.Inputs(data or logged(), world))
    carry, reports = jax.jit(training_loop.init)(KEY, source.dataset), []
    step = jax.jit(training_loop.epoch)
    for _ in range(epochs):
        carry, report = step(carry, source, KEY)
        reports.append(report)
    return carry, reports


@pytest.mark.slow
def test_logged_rows_come_first_and_are_as_many_as_asked_for() -> None:
    """And every row says in ``origin`` which it is."""
    plain = stub()

    def update(state: State, batch: Transition, key: Any) -> tuple[State, dict[str, Any]]:
        state, metrics = plain.update(state, batch, key)
        return state, {**metrics, "misnamed": (batch.origin != (jnp.arange(20) >= 6)).sum()}

    data = logged()
    flagged = data._replace(transitions=data.transitions._replace(origin=np.zeros(50, np.int32)))
    _, [report] = run(loop(learner=stub(update=update)), 1, flagged)
    assert report.metrics["logged"] == 6 and report.metrics["misnamed"] == 0
    assert report.metrics["logged_least"] == LOGGED and report.metrics["model_most"] < 2


def test_shares_of_rows_are_not_rounded_by_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.29 of 100 is 28.999... in floats, and 29 rows."""
    asked, sampler = [], replay.sampler
    monkeypatch.setattr(replay, "sampler", lambda size: asked.append(size) or sampler(size))
    loop(change(real=0.29, batch_size=100))
    assert asked == [29]


@pytest.mark.slow
def test_without_logged_rows_every_row_is_the_models_and_with_them_alone_none_is() -> None:
    _, [report] = run(loop(change(real=0.0)), 1)
    assert report.metrics["logged"] == 0 and report.metrics["model_most"] < 2
    carry, [report] = run(loop(change(real=1.0)), 1)
    assert report.metrics["logged"] == 20 and report.metrics["logged_least"] == LOGGED
    assert carry.buffer == () and "rollout_length" not in report.metrics


@pytest.mark.slow
def test_real_data_alone_is_the_plain_offline_loop_bit_for_bit() -> None:
    """SAC-N and EDAC through this loop are those of `experiments.offline`."""
    learner, data = sac(), jax.device_put(logged())
    carry, _ = run(loop(change(real=1.0), learner), 2, data)
    plain = jax.jit(train.scan_updates(learner.update, replay.sampler(20), 5))
    state = jax.jit(learner.init)(keys.of(KEY, "init"), replay.take(logged(), np.arange(2)))
    for _ in range(2):
        state, _ = plain(state, data, KEY)
    jax.tree.map(np.testing.assert_array_equal, carry.learner, state)


@pytest.mark.slow
def test_the_buffer_keeps_the_newest_rows_and_none_after_an_episodes_end() -> None:
    """The epoch's number is the reward; half of all states end their episode."""
    learner = stub()
    ends = lambda following: following[..., 0] > 0
    numbered = base.Dynamics(
        predict=base.true(plane.step).predict,
        propose=base.true(plane.step).propose,
        step=lambda number, o, a, key: (plane.step(o, a)[0], jnp.broadcast_to(number, o.shape[:-1])),
    )
    training_loop = loop(learner=learner, world=numbered, terminates=ends)
    data = jax.device_put(logged())
    carry, step = jax.jit(training_loop.init)(KEY, data), jax.jit(training_loop.epoch)
    written = 0.0
    for number in range(12):
        carry, report = step(carry, model_based.Inputs(data, jnp.float32(number)), KEY)
        written += float(report.metrics["rollout_length"]) * SMALL.rollouts
    rows, count = jax.tree.map(np.asarray, carry.buffer.rows), int(carry.buffer.count)
    assert count == len(rows.reward) == 96 < written
    assert rows.reward.min() > 12 - 1 - 96 / 16 and (rows.reward == 11).sum() >= 16  # first steps are valid
    np.testing.assert_array_equal(rows.discount, rows.next_observation[:, 0] <= 0)
    continued = (rows.observation[:, None] == rows.next_observation[None, rows.discount == 0]).all(-1)
    assert not continued.any()  # nothing follows the end of an episode


def test_rollouts_start_from_logged_states_and_follow_the_policy() -> None:
    away = stub(explore=lambda state, observation, key: jnp.ones_like(observation))
    carry, _ = run(loop(learner=away), 1)
    rows, count = jax.tree.map(np.asarray, carry.buffer.rows), int(carry.buffer.count)
    assert (rows.action[:count] == 1).all() and count == 48
    starts = {tuple(x) for x in np.asarray(logged().transitions.observation)}
    assert {tuple(x) for x in rows.observation[:16]} <= starts
    assert len({tuple(x) for x in rows.observation[:16]}) > 8


@pytest.mark.slow
def test_an_epoch_depends_on_its_key_and_step_alone_and_epochs_differ() -> None:
    training_loop = loop(learner=stub(), world=base.true(plane.step))
    source = jax.device_put(model_based.Inputs(logged(), ()))
    step, start = jax.jit(training_loop.epoch), jax.jit(training_loop.init)(KEY, source.dataset)
    first, _ = step(start, source, KEY)
    again, _ = step(start, source, KEY)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    second, _ = step(first, source, KEY)
    rows = np.asarray(second.buffer.rows.observation)
    assert not np.array_equal(rows[48 : 48 + 16], rows[:16])  # the starts of either epoch
    actions = np.asarray(first.buffer.rows.action).reshape(-1, 16, rows.shape[-1])[:3]
    assert len(np.unique(actions)) == actions.size  # each step of a rollout has draws of its own


@pytest.mark.slow
def test_every_seed_rolls_out_with_its_own_key_together_or_one_after_another() -> None:
    """Of a learner that only draws actions, which is quick to compile. Together, what its update does on every second
    step alone is a branch, as all seeds share their step: it was computed on every one, and thrown away.
    """

    def update(state: State, batch: Transition, key: Any) -> tuple[State, Any]:
        improve = lambda state: (state._replace(params={"w": state.params["w"] + 1}), {})
        state, _ = delayed(improve, state, 2)
        return state._replace(step=state.step + 1), {"w": state.params["w"]}

    init = lambda key, batch: State({"w": jnp.zeros(())}, {}, {}, jnp.zeros((), jnp.int32))
    training_loop = loop(change(updates=5), stub(init=init, update=update))
    source = jax.device_put(model_based.Inputs(logged(), np.zeros((2, 1), np.float32)))
    keys = jax.random.split(KEY)
    start = jax.jit(jax.vmap(training_loop.init, (0, None), model_based.STACKED))(keys, source.dataset)
    epochs = [model_based.over_seeds(training_loop.epoch, batched=batched) for batched in (True, False)]
    assert " cond[" in str(jax.make_jaxpr(epochs[0])(start, source, keys))
    together, in_turn = (jax.jit(epoch)(start, source, keys)[0] for epoch in epochs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), together, in_turn)
    assert together.learner.step == 5 and (together.learner.params["w"] == 2).all()
    actions = together.buffer.rows.action
    assert (actions[0] != actions[1]).any()


@pytest.mark.long
def test_a_seed_of_many_is_that_seed_alone() -> None:
    """Whether seeds advance together or one after another."""
    training_loop = loop(change(updates=3), sac())
    source = jax.device_put(model_based.Inputs(logged(), np.zeros((2, 1), np.float32)))

    @jax.jit
    def epoch_alone(keys: jax.Array) -> Any:
        start = training_loop.init(keys[1], source.dataset)
        return training_loop.epoch(start, model_based.Inputs(source.dataset, ()), keys[1])

    keys = jax.random.split(KEY, 2)
    alone, report = epoch_alone(keys)
    start = jax.jit(jax.vmap(training_loop.init, (0, None), model_based.STACKED))(keys, source.dataset)
    close = lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    for batched in (True, False):
        many, reports = jax.device_get(
            jax.jit(model_based.over_seeds(training_loop.epoch, batched=batched))(start, source, keys)
        )
        assert many.learner.step == alone.learner.step
        one = train.member(many, 1)
        jax.tree.map(close, (one.learner, one.buffer.rows), (alone.learner, alone.buffer.rows))
        close(reports.metrics["q"][1], report.metrics["q"])


# ---- methods ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["mobile", "ravl", "edac"]
)  # the others are these with less, or tested below
def test_every_method_is_a_setting(method: str) -> None:
    of_agent, of_loop = model_based.METHODS[method]
    network = ensemble.make(ensemble.Config(members=2, elites=2, hidden=(8,), decay=(0.0, 0.0)), plane.SPEC)
    learner = sac(**of_agent | {"critics": min(3, of_agent["critics"])})
    trained = loop(change(updates=2, **{"real": 0.3} | of_loop), learner, world=network.dynamics)
    data = jax.device_put(logged())
    carry, report = jax.jit(trained.epoch)(
        jax.jit(trained.init)(KEY, data), model_based.Inputs(data, network.init(KEY)), KEY
    )
    assert carry.learner.step == 2
    assert all(np.isfinite(value).all() for value in report.metrics.values())
    assert ("uncertainty" in report.metrics) == (method == "mobile")


def test_methods_differ_as_the_table_says() -> None:
    """The table of the module's docstring; a method that is one of the others would pass every test of its parts."""
    chosen = {
        name: (of_agent["critics"], of_agent.get("diversity", 0.0), of_loop.get("uncertainty", ""))
        for name, (of_agent, of_loop) in model_based.METHODS.items()
    }
    assert chosen == {
        "base": (2, 0.0, ""),
        "mopo": (2, 0.0, "aleatoric"),
        "mopo_disagreement": (2, 0.0, "disagreement"),
        "mobile": (2, 0.0, "bellman"),
        "ravl": (10, 1.0, ""),
        "sac_n": (10, 0.0, ""),
        "edac": (10, 1.0, ""),
    }
    without_model = {name for name, (_, of_loop) in model_based.METHODS.items() if of_loop.get("real") == 1}
    penalised = {name for name, (_, of_loop) in model_based.METHODS.items() if of_loop.get("penalty", 0) > 0}
    assert without_model == {"sac_n", "edac"} and penalised == {"mopo", "mopo_disagreement", "mobile"}


def doubtful() -> base.Dynamics:
    """Two answers: a deviation of |x| for each of two dimensions and the reward, and means 2 apart in x."""

    def predict(params: Any, observation: Any, action: Any) -> tuple[Any, Any]:
        following, reward = plane.step(observation, action)
        mean = jnp.concatenate([following, reward[..., None]], -1)
        deviation = jnp.abs(observation[..., :1]) * jnp.ones(3)
        apart = jnp.array([1.0, 0.0, 0.0])
        return jnp.stack([mean - apart, mean + apart]), jnp.stack([deviation, 0 * deviation])

    real = base.true(plane.step)
    propose = lambda params, o, a, key: (
        predict(params, o, a)[0][..., :-1],
        jnp.stack([plane.step(o, a)[1]] * 2),
    )
    return base.Dynamics(predict, propose, real.step)


@pytest.mark.parametrize(
    ("kind", "uncertainty"),
    [("aleatoric", lambda o: np.sqrt(3) * np.abs(o[:, 0])), ("disagreement", lambda o: np.ones(len(o)))],
)
@pytest.mark.slow
def test_mopo_takes_its_penalty_off_model_rewards(kind: str, uncertainty: Callable[..., Any]) -> None:
    config = change(uncertainty=kind, penalty=0.5)
    carry, _ = run(loop(config, world=doubtful()), 1)
    rows = jax.tree.map(lambda x: np.asarray(x)[:48], carry.buffer.rows)
    expected = np.asarray(jax.jit(plane.reward)(rows.next_observation)) - 0.5 * uncertainty(rows.observation)
    np.testing.assert_allclose(rows.reward, expected, rtol=1e-5, atol=1e-6)


def marked(rows: int = 12) -> Transition:
    """A batch whose rows are logged ones and the model's by turns."""
    steps = jax.tree.map(lambda x: x[:rows], logged().transitions)
    return steps._replace(reward=np.zeros(rows, np.float32), origin=np.arange(rows, dtype=np.int32) % 2)


def members(count: int, identical: bool = False) -> tuple[ensemble.Ensemble, ensemble.Model]:
    """An ensemble that was not fitted."""
    config = ensemble.Config(members=count, elites=count, hidden=(8,), decay=(0.0, 0.0))
    network = ensemble.make(config, plane.SPEC)
    model = jax.device_get(jax.jit(network.init)(KEY))
    if identical:
        model = model._replace(members=jax.tree.map(lambda x: np.repeat(x[:1], count, 0), model.members))
    return network, model


def rewards() -> Learner:
    """Soft actor-critic whose updates say which rewards they were given."""

    def update(state: State, batch: Transition, key: Any) -> tuple[State, Any]:
        return state, {"reward": batch.reward}

    def weighted(state: State, batch: Transition, weight: Any, key: Any) -> tuple[State, Any, Any]:
        return *update(state, batch, key), batch.reward

    return sac()._replace(update=update, weighted=weighted)


@pytest.mark.slow
def test_identical_members_leave_no_doubt_whatever_the_noise_of_policy_and_model() -> None:
    network, model = members(5, identical=True)
    # 5 members times 4 samples times 12 rows fill whole vectors: what is left over may be rounded differently.
    penalised = mobile.make(rewards(), lambda o, a: network.dynamics.predict(model, o, a), 1.0, samples=4)
    batch = marked()
    metrics = jax.jit(lambda: penalised.update(penalised.init(KEY, batch), batch, KEY)[1])()
    assert metrics["uncertainty"] == 0
    np.testing.assert_array_equal(metrics["reward"], batch.reward)


@pytest.mark.slow
def test_mobile_doubts_model_rows_wherever_they_stand_by_brute_force() -> None:
    """One member and sample at a time; in a weighted update the same."""
    network, model = members(3)
    learner = rewards()
    penalised = mobile.make(learner, lambda o, a: network.dynamics.predict(model, o, a), 0.5, samples=4)
    batch = marked()
    state = jax.device_get(jax.jit(learner.init)(KEY, batch))
    # Target critics that differ from the others tell which of them were asked; these are less flat.
    state = state._replace(target=jax.tree.map(lambda x: 10 * x, state.target))
    _, metrics = jax.jit(penalised.update)(state, batch, KEY)
    noise_key, action_key = jax.random.split(jax.random.split(KEY)[0])
    noise = np.asarray(jax.random.normal(noise_key, (4, 1, 12, 2)))[:, 0]
    mean, deviation = map(
        np.asarray, jax.jit(network.dynamics.predict)(model, batch.observation, batch.action)
    )
    slow = state._replace(params={**state.params, "critic": state.target["critic"]})
    explore, critics = jax.jit(learner.explore), jax.jit(learner.critics)
    values = np.zeros((3, 12))
    for m in range(3):
        following = mean[m, :, :-1] + deviation[m, :, :-1] * noise  # [4, 12, O]
        action = np.asarray(explore(state, following, action_key))
        for n in range(4):
            values[m] += np.min(critics(slow, following[n], action[n]), 0) / 4
    uncertainty = values.std(0) * batch.origin
    assert (uncertainty[1::2] > 1e-4).all()
    np.testing.assert_allclose(metrics["reward"], -0.5 * uncertainty, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["uncertainty"], uncertainty[1::2].mean(), rtol=1e-3)
    *_, priority = jax.jit(penalised.weighted)(state, batch, np.ones(12, np.float32), KEY)
    np.testing.assert_array_equal(priority, metrics["reward"])


def test_the_loop_gives_mobile_its_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, above 0 for doubt to cost something; traced, not compiled."""
    given = []
    make = lambda learner, predict, weight, **_: given.append(weight) or learner
    monkeypatch.setattr(model_based.mobile, "make", make)
    training_loop, data = loop(change(uncertainty="bellman", penalty=0.5)), jax.device_put(logged())
    epoch = lambda: training_loop.epoch(training_loop.init(KEY, data), model_based.Inputs(data, ()), KEY)
    jax.eval_shape(epoch)
    assert set(given) == {0.5}


# ---- what goes wrong --------------------------------------------------------------------------------------


def rolled() -> Rollouts:
    """Three rollouts of two steps; the second ends at once. Actions are the critics' spread, x their value."""
    x = np.array([[0, 1, 2], [3, 9, 5]], np.float32)  # [k, B]
    following = np.array([[3, 7, 5], [20, 9, 30]], np.float32)
    spread = np.array([[1, 2, 3], [4, 99, 5]], np.float32)
    two = lambda array: np.stack([array] * 2, -1)
    rows = Transition(
        observation=two(x),
        action=two(spread),
        reward=x,
        discount=np.array([[1, 0, 1], [1, 1, 1]], np.float32),
        next_observation=two(following),
        next_action=two(spread),
        has_next_action=np.zeros((2, 3), np.float32),
    )
    return Rollouts(rows, np.array([[True, True, True], [True, False, True]]))


def test_diagnosis_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(params: Any, observation: Any, action: Any) -> tuple[Any, Any]:
        deviation = jnp.zeros((1, len(action), 3)).at[0, :, 0].set(2 * action[:, 0])
        return jnp.full((1, len(action), 3), 7.0), deviation

    # What is drawn is not what is predicted: rollouts hold the former.
    drawn = lambda params, observation, action, key: (observation, observation[:, 0] ** 2)
    world = base.Dynamics(predict, lambda *x: None, drawn)  # type: ignore[arg-type, return-value]
    critics = lambda state, observation, action: jnp.stack(
        [observation[:, 0], observation[:, 0] + 2 * action[:, 0]]
    )
    truth = base.true(lambda observation, action: (observation, observation[:, 0]))

    def diagnosed(edge: Any) -> dict[str, Any]:
        diagnose = model_based.diagnosis(stub(), critics, world, edge, truth)
        return jax.jit(lambda: diagnose(stub().init(KEY, None), (), rolled(), KEY))()

    metrics = diagnosed(lambda following: following[:, 0] > 15)
    valid = {0: 3, 1: 7, 2: 5, 3: 20, 5: 30}  # x: where it leads
    np.testing.assert_allclose(metrics["edge_share"], 2 / 5)
    np.testing.assert_allclose(metrics["edge_q"], 25)
    np.testing.assert_allclose(metrics["elsewhere_q"], 4)  # the episode that leads to 7 ends there
    np.testing.assert_allclose(metrics["spread"], 3)
    np.testing.assert_allclose(metrics["aleatoric"], 6)
    np.testing.assert_allclose(metrics["spread_aleatoric"], 1, rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_error"], np.mean([x**2 - x for x in valid]))

    seen = []

    def estimate(following: Any, final: Any, others: Any) -> Any:
        jax.debug.callback(lambda *x: seen.extend(x), following[:, 0], final, others[:, 0])
        return final

    monkeypatch.setattr(model_based, "out_of_distribution", estimate)
    np.testing.assert_allclose(diagnosed(None)["edge_share"], 1 / 2)
    following, final, others = (x.tolist() for x in seen)
    assert (following, final) == ([3, 20], [False, True])  # of the first rollout
    # The other two, one after the other; what follows the end of one is not trained.
    assert others == [1, 1, 2, 5]


def test_a_perfect_model_is_correlated_with_nothing() -> None:
    world = base.true(plane.step)
    critics = lambda state, observation, action: jnp.stack([observation[:, 0], action[:, 0]])
    diagnose = model_based.diagnosis(stub(), critics, world)
    metrics = jax.jit(lambda: diagnose(stub().init(KEY, None), (), rolled(), KEY))()
    assert metrics["aleatoric"] == 0 == metrics["spread_aleatoric"] and "reward_error" not in metrics


def test_final_states_unlike_all_that_was_trained_are_unfamiliar() -> None:
    trained = np.random.default_rng(0).normal(size=(400, 4)) * [1, 1, 100, 0]
    like, unlike = [0, 0, 0, 0.1], [0, 6, 0, 0]
    points = np.float32([like, unlike, unlike, [0, 0, 90, 0]])
    final = np.array([True, True, False, True])
    assert jax.jit(model_based.out_of_distribution)(points, final, np.float32(trained)).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_unfamiliar_is_what_lies_farther_off_than_99_of_100_trained_states() -> None:
    """By NumPy, of twice as wide a cloud of states: many are on either side."""
    rng = np.random.default_rng(0)
    trained, points = (np.float32(rng.normal(size=(400, 2)) * [1, 100]) for _ in range(2))
    known = trained[:200] / trained.std(0)
    distance = lambda x: ((x[:, None] / trained.std(0) - known) ** 2).sum(-1).min(1)
    expected = distance(2 * points) > np.quantile(distance(trained[200:]), 0.99)
    found = np.asarray(jax.jit(model_based.out_of_distribution)(2 * points, np.ones(400, bool), trained))
    assert 20 < expected.sum() < 380 and (found != expected).sum() <= 1


def report(q: Any, **metrics: Any) -> train.Report:
    return train.Report({"q": np.asarray(q), **metrics}, {})


def rewarded(*reward: float) -> Dataset:
    return logged()._replace(transitions=logged().transitions._replace(reward=np.array(reward)))


def test_a_run_stops_where_q_runs_away() -> None:
    largest = model_based.largest_value(rewarded(-2.0, 1.0), 0.99)
    np.testing.assert_allclose(largest, [200, 200 * np.log(2)])  # two action dimensions
    model_based.check_values(report([150.0, 1900.0]), largest)
    with pytest.raises(
        model_based.RunawayQ, match=r"Q averages 2.1e\+03.* at most 200 \(seeds \[1\]\).*rollouts.*RAVL"
    ):
        model_based.check_values(report([150.0, 2100.0], rollout_length=np.full(2, 5.0)), largest)
    with pytest.raises(model_based.RunawayQ, match=r"actions that the data do not have((?!rollouts).)*$"):
        model_based.check_values(report([150.0, 2100.0]), largest)
    for bad in (np.nan, -np.inf):
        with pytest.raises(train.Diverged, match=r"seeds \[0\]"):
            model_based.check_values(report(bad), largest)


def test_penalties_and_entropy_are_no_runaway() -> None:
    """The best policy of a log without rewards is as random as can be, and a penalty knows no bound."""
    largest = model_based.largest_value(rewarded(0.0, 0.0), 0.99)
    alpha = np.array([0.5, 0.01])
    model_based.check_values(report([-1e6, 1.0], alpha=alpha), largest)
    model_based.check_values(report(alpha * 200 * np.log(2), alpha=alpha), largest, factor=1.001)
    with pytest.raises(model_based.RunawayQ, match=r"entropy allow at most 1.39 \(seeds \[1\]\)"):
        model_based.check_values(report([600.0, 14.0], alpha=alpha), largest)


def test_rewards_that_are_not_finite_are_not_blamed_on_the_edge_of_reach() -> None:
    with pytest.raises(ValueError, match="2 rewards of the dataset are not finite, the first in row 1"):
        model_based.largest_value(rewarded(0.0, np.nan, np.inf), 0.99)


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 0}, "length=0 must be at least 1"),
        ({"rollouts": -1}, "rollouts=-1 must be at least 1"),
        ({"real": 1.5}, r"real=1.5 must be a share between 0 and 1"),
        (
            {"uncertainty": "epistemic", "penalty": 1.0},
            "uncertainty='epistemic': choose one of aleatoric",
        ),
        ({"uncertainty": "aleatoric"}, r"uncertainty='aleatoric' and penalty=0.0: give both"),
        ({"penalty": 2.0}, r"uncertainty='' and penalty=2.0: give both"),
        (
            {"real": 1.0, "uncertainty": "bellman", "penalty": 1.0},
            "real=1 leaves no model rows that uncertainty='bellman' could penalise",
        ),
    ],
)
def test_settings_without_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loop(change(**fields))


def test_agents_that_lack_what_the_loop_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot draw actions"):
        loop(learner=stub(explore=None))
    with pytest.raises(ValueError, match="no critics that members could disagree about"):
        mobile.make(stub(critics=None), lambda *x: x, 1.0)
    with pytest.raises(ValueError, match="samples=0"):
        mobile.make(stub(), lambda *x: x, 1.0, samples=0)
    with pytest.raises(ValueError, match="these batches have no origin"):
        mobile.make(stub(), lambda *x: x, 1.0).update(stub().init(KEY, None), logged().transitions, KEY)


@pytest.mark.slow
def test_a_single_logged_episode_is_enough() -> None:
    data = logged(7)._replace(last=np.arange(7) == 6)
    config = ensemble.Config(members=2, elites=2, hidden=(8,), decay=(0.0, 0.0), updates=20)
    network = ensemble.make(config, Spec((2,), 2))
    carry, [report] = run(loop(world=network.dynamics), 1, data, network.fit(data, KEY))
    assert int(carry.buffer.count) == 48 and np.isfinite(report.metrics["rollout_reward"])
