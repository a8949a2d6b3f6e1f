"""rl.replay.goals: which goals are drawn and how often, what is rewarded, and which data cannot give any."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.data.steps import from_steps
from rl.replay import goals
from rl.replay.dataset import Dataset, n_step
from rl.replay.goals import GOAL, OBSERVATION, Goals, Hindsight
from rl.types import Spec, Transition

LENGTHS = (3, 9, 2, 6)  # steps of each episode
ROWS, BATCH, GAMMA, K = sum(LENGTHS), 40_000, 0.7, 3
EPISODE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
TIME = np.concatenate([np.arange(length) for length in LENGTHS])

OGBENCH = Hindsight(subgoal_steps=K)
# Random goals for policies, and rewards of 0 and 1 that end nothing
STITCH = Hindsight(
    value=Goals(0.0, 1.0, 0.0), actor=Goals(0.0, 0.5, 0.5, geometric=False), negative=False, mask=False
)
HECRL = Hindsight(
    value=Goals(0.2, 0.8, 0.0, geometric=False),
    actor=Goals(0.1, 0.6, 0.3),
    mask=False,
    next_state=True,
    subgoal_steps=K,
)
CONVENTIONS = {"ogbench": OGBENCH, "stitch": STITCH, "hecrl": HECRL}


def data() -> Dataset:
    """States are (episode, time); the log has rewards and an end that must not matter."""
    state = np.stack([EPISODE, TIME], -1).astype(np.float32)
    ones = np.ones(ROWS, np.float32)
    after = state + np.float32([0, 1])
    steps = Transition(state, TIME[:, None] * 1.0, 7 * ones, 0 * ones, after, TIME[:, None] * 1.0, ones)
    return Dataset(steps, np.append(EPISODE[1:] != EPISODE[:-1], True))


def placed(h: Hindsight) -> goals.Trajectories:
    return jax.device_put(goals.trajectories(data(), h))


@functools.cache
def drawn() -> dict[str, Any]:
    """A batch of each convention, and of success by simulator states, from one compiled program."""
    # Success where the position, here the number of the state modulo 2, is the goal's
    near = lambda reached, goal: (reached["position"] % 2 == goal["position"] % 2)[:, 0]
    column = {"position": jnp.asarray(data().transitions.observation[:, 1:])}

    @jax.jit
    def program(key: jax.Array) -> dict[str, Any]:
        def draw(h: Hindsight, state: Any = None, success: Any = None) -> Any:
            return goals.sampler(BATCH, h, GAMMA, success)(placed(h)._replace(state=state), key, 0)

        each = {name: draw(h) for name, h in CONVENTIONS.items()}
        return each | {"state": draw(OGBENCH, column, near)}

    return jax.device_get(program(jax.random.key(0)))


def future(length: int, t: int, h: Hindsight, how: Goals) -> dict[int, float]:
    """{time of the goal's state: probability} at time ``t`` of an episode of this many steps, by its definition."""
    final = length if h.next_state else length - 1  # OGBench never shows the state after the last step
    probability: dict[int, float] = dict.fromkeys(range(length + 1), 0.0)
    if how.geometric:
        for distance in range(1, 200):
            probability[min(t + distance, final)] += (1 - GAMMA) * GAMMA ** (distance - 1)
    else:
        fine = (np.arange(100_000) + 0.5) / 100_000
        first = min(t + 1, final)
        times, counts = np.unique(np.round(first * fine + final * (1 - fine)), return_counts=True)
        for time, count in zip(times, counts, strict=True):
            probability[int(time)] += count / len(fine)
    return probability


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["value", "actor"])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_goals_are_drawn_as_often_as_their_definition_says(name: str, kind: str) -> None:
    """By state, for each state: the joint distribution of a step and its goal, against enumeration in NumPy."""
    h, batch = CONVENTIONS[name], drawn()[name]
    how = getattr(h, kind)
    shift = int(h.next_state)
    expected = {}
    for row in range(ROWS):
        episode, t = EPISODE[row], TIME[row]
        of_row = dict.fromkeys(
            [(e, s + shift) for e, s in zip(EPISODE, TIME, strict=True)], how.random / ROWS
        )
        of_row[episode, t + shift] += how.current
        for time, probability in future(LENGTHS[episode], t, h, how).items():
            if probability:
                of_row[episode, time] += how.future * probability
        assert sum(of_row.values()) == pytest.approx(1)
        expected |= {(episode, t, *goal): p / ROWS for goal, p in of_row.items()}
    goal = batch.value.observation[GOAL] if kind == "value" else batch.actor_goal
    rows = np.concatenate([batch.value.observation[OBSERVATION], goal], -1).astype(int)
    pairs, counts = np.unique(rows, axis=0, return_counts=True)
    frequency = dict(zip(map(tuple, pairs.tolist()), counts / BATCH, strict=True))
    assert frequency.keys() <= {pair for pair, p in expected.items() if p}
    for pair, p in expected.items():
        assert abs(frequency.get(pair, 0.0) - p) < 5 * np.sqrt(p * (1 - p) / BATCH) + 1e-5, pair


@pytest.mark.parametrize("name", CONVENTIONS)
def test_rows_stay_whole_and_success_is_the_same_row(name: str) -> None:
    h, (steps, actor_goal, subgoal, actor_subgoal) = CONVENTIONS[name], drawn()[name]
    here, there = steps.observation[OBSERVATION], steps.next_observation[OBSERVATION]
    np.testing.assert_array_equal(there - here, np.broadcast_to([0, 1], here.shape))
    np.testing.assert_array_equal(steps.action[:, 0], here[:, 1])
    np.testing.assert_array_equal(steps.observation[GOAL], steps.next_observation[GOAL])
    reached = (steps.observation[GOAL] == (there if h.next_state else here)).all(-1)
    assert reached.any() and not reached.all()
    np.testing.assert_array_equal(steps.reward, reached - 1.0 * h.negative)
    np.testing.assert_array_equal(steps.discount, 1.0 - reached * h.mask)
    assert (subgoal is None) == (actor_subgoal is None) == (h.subgoal_steps == 0)
    if subgoal is None:
        return
    episode, time = here.astype(int).T
    final = np.array(LENGTHS)[episode] - 1 + h.next_state
    ahead = np.minimum(time + K, final)
    np.testing.assert_array_equal(subgoal, np.stack([episode, ahead], -1))
    # A goal of the same episode that lies before the step was drawn as one of all states: nothing is on its way.
    elsewhere = (actor_goal[:, 0] != episode) | (actor_goal[:, 1] < time + h.next_state)
    np.testing.assert_array_equal(actor_subgoal[elsewhere], subgoal[elsewhere])
    nearer = ~elsewhere & (actor_goal[:, 1] < ahead)
    if not h.actor.random:
        np.testing.assert_array_equal(actor_subgoal[nearer], actor_goal[nearer])
    assert (actor_subgoal[nearer] == actor_goal[nearer]).all(-1).mean() > 0.8
    far = ~elsewhere & ~nearer
    np.testing.assert_array_equal(actor_subgoal[far], subgoal[far])


def test_goals_of_values_and_of_policies_are_drawn_apart() -> None:
    """Of one state: how far one goal is says nothing of the other."""
    steps, actor_goal, *_ = drawn()["ogbench"]
    goal = steps.observation[GOAL]
    first = (steps.observation[OBSERVATION] == [1, 0]).all(-1) & (goal[:, 0] == 1) & (goal[:, 1] > 0)
    assert first.sum() > 500
    assert abs(np.corrcoef(goal[first, 1], actor_goal[first, 1])[0, 1]) < 5 / np.sqrt(first.sum())


def test_success_can_be_a_function_of_the_simulators_states() -> None:
    steps = drawn()["state"].value
    same = steps.observation[OBSERVATION][:, 1] % 2 == steps.observation[GOAL][:, 1] % 2
    np.testing.assert_array_equal(steps.reward, same - 1.0)
    np.testing.assert_array_equal(steps.discount, 1.0 - same)


def test_an_end_without_a_logged_successor_is_no_step() -> None:
    """Such rows have their own observation for their next one; goals do not end there, and would never be left."""
    row = np.arange(10)
    ended = np.isin(row, (2, 3, 6))  # 3 is an episode of a single step
    steps = row[:, None].astype(np.float32), np.zeros((10, 1)), np.zeros(10), ended, row == 9
    dataset = from_steps(*steps, source="a log")
    logged = goals.trajectories(dataset, Hindsight(), row[:9])
    np.testing.assert_array_equal(logged.transitions.observation[:, 0], [0, 1, 4, 5, 7, 8])
    np.testing.assert_array_equal(logged.transitions.next_observation[:, 0], [1, 2, 5, 6, 8, 9])
    np.testing.assert_array_equal(logged.end, [1, 1, 3, 3, 5, 5])
    np.testing.assert_array_equal(logged.state, [0, 1, 4, 5, 7, 8])
    steps = row[:, None].astype(np.float32), np.zeros((10, 1)), np.zeros(10), np.isin(row, (2, 4)), row == 9
    with pytest.raises(
        ValueError, match="1 of 3 trajectories have one step, the first at row 3"
    ):  # of the log
        goals.trajectories(from_steps(*steps, source="a log"), Hindsight())


def test_no_episode_is_gathered() -> None:
    """Every array of the program but the data is as large as the batch, with one observation per row and use."""
    batch, width = 16, 1000
    rows = lambda *shape, of=jnp.float32: jax.ShapeDtypeStruct((64, *shape), of)
    state, action, number = rows(width), rows(2), rows()
    steps = Transition(state, action, number, number, state, action, number)
    like = goals.Trajectories(steps, rows(of=jnp.int32))
    sample = goals.sampler(batch, OGBENCH, GAMMA)
    program = jax.make_jaxpr(lambda data, key: sample(data, key, 0))(like, jax.random.key(0))
    sizes = [v.aval.size for equation in program.eqns for v in equation.outvars]
    assert max(sizes) == batch * width


def test_dicts_of_arrays_are_goals_too() -> None:
    steps = data().transitions
    entities = lambda x: {"agent": x, "cubes": np.stack([x, x], 1)}
    dataset = data()._replace(
        transitions=steps._replace(
            observation=entities(steps.observation), next_observation=entities(steps.next_observation)
        )
    )
    plain = Spec({"agent": (2,), "cubes": (2, 2)}, 1)
    spec = goals.conditioned_spec(plain)
    assert goals.plain_spec(spec, "hecrl") == plain
    sample = goals.sampler(5, OGBENCH, GAMMA)
    batch = jax.eval_shape(
        lambda: sample(jax.device_put(goals.trajectories(dataset, OGBENCH)), jax.random.key(0), 0)
    )
    assert isinstance(batch.value, Transition)
    shapes = jax.tree.map(lambda x: x.shape[1:], batch.value.observation)
    assert shapes == spec.observation_shape


# ---- refusals ---------------------------------------------------------------------------------------


def changed(last: Any) -> Dataset:
    return data()._replace(last=np.asarray(last))


@pytest.mark.parametrize(
    ("dataset", "hindsight", "state", "match"),
    [
        (changed(np.zeros(ROWS, bool)), OGBENCH, None, "no episode ends in 20 rows.*Dataset.last"),
        (
            changed(np.ones(ROWS, bool)),
            OGBENCH,
            None,
            "20 of 20 trajectories have one step, the first at row 0",
        ),
        (data(), Hindsight(subgoal_steps=9), None, "subgoal_steps=9 is longer than every.*at most 8 steps"),
        (data(), OGBENCH, {"qpos": np.zeros((3, 2))}, r"state\['qpos'\] has 3 rows, and there are 20 steps"),
        (
            n_step(data(), 3, 0.9),
            OGBENCH,
            None,
            "goals of transitions over 3 steps, which would count rewards more",
        ),
    ],
)
def test_data_without_goals_are_refused(
    dataset: Dataset, hindsight: Hindsight, state: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        goals.trajectories(dataset, hindsight, state)


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"goals\.actor: .* not current=0\.2 \+ future=0\.5 \+ random=0\.5 = 1\.2"
    ):
        goals.sampler(4, Hindsight(actor=Goals(random=0.5)), GAMMA)
    with pytest.raises(ValueError, match=r"goals\.value: .* at least 0"):
        goals.sampler(4, Hindsight(value=Goals(-0.5, 1.0, 0.5)), GAMMA)
    with pytest.raises(ValueError, match=r"goals\.value: .* not current=nan"):
        goals.sampler(4, Hindsight(value=Goals(float("nan"), 0.5, 0.5)), GAMMA)
    with pytest.raises(ValueError, match="subgoal_steps=-1"):
        Hindsight(subgoal_steps=-1)
    with pytest.raises(ValueError, match=r"discount=1\.0 must lie between 0 and 1"):
        goals.sampler(4, OGBENCH, 1.0)
    with pytest.raises(ValueError, match="the trajectories have none"):
        sample = goals.sampler(4, OGBENCH, GAMMA, lambda reached, goal: reached == goal)
        jax.eval_shape(lambda key: sample(placed(OGBENCH), key, 0), jax.random.key(0))
    with pytest.raises(ValueError, match=r"a goal of shape \(3,\) for an observation of shape \(2,\)"):
        goals.conditioned(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match=r"agent 'gciql' learns to reach goals.*experiments\.goals"):
        goals.plain_spec(Spec((2,), 1), "gciql")
    # Subgoals and next states: the state after the last step counts there
    assert goals.trajectories(data(), Hindsight(subgoal_steps=9, next_state=True)).end[-1] == ROWS - 1


def test_supports_hold_every_value() -> None:
    assert goals.value_bounds(Hindsight(), 0.99) == pytest.approx((-100.0, 0.0))
    assert goals.value_bounds(Hindsight(negative=False), 0.99) == (0.0, 1.0)
    assert goals.value_bounds(Hindsight(negative=False, mask=False), 0.99) == pytest.approx((0.0, 100.0))
    # Where reaching a goal pays once and ends an episode, nothing goes on for ever.
    assert goals.value_bounds(Hindsight(negative=False), 1.0) == (0.0, 1.0)
    for hindsight, never in ((Hindsight(), "reached"), (Hindsight(negative=False, mask=False), "left")):
        with pytest.raises(ValueError, match=f"discount=1.0 must be below 1: .* never {never}"):
            goals.value_bounds(hindsight, 1.0)
