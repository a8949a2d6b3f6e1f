"""rl.acting: policies with memory, counted against Python loops where episodes end at different times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import acting, buffers, envs, evaluate, keys, train
from rl.agents import bc
from rl.envs.stream import Stream
from rl.interaction import Trainer
from rl.replay.transform import Transform
from rl.types import Actor, Learner, Spec, State
from rl.values import heads

COUNTDOWN = "toy_environments:Countdown-v0"  # observes (steps left, ...); pays 1 + 3 times the action
LENGTH = 3  # of a chunk


def counter() -> Actor:
    """Acts by how many steps it has made since it began to remember, and never looks at ``first``."""

    def act(state: Any, memory: Any, observation: Any, first: Any, key: Any) -> tuple[Any, Any]:
        return state.params["scale"] * memory[..., None] / 100, memory + 1

    return Actor(lambda state, observation: jnp.zeros(observation.shape[:-1], jnp.int32), act)


def plan(state: Any, observation: Any, key: Any) -> Any:
    """`LENGTH` actions from what it sees."""
    return state.params["scale"] * (observation[..., :1] + jnp.arange(LENGTH) / 10) / 100


def by_hand(which: str, seen: list[float]) -> list[float]:
    """Actions of either at scale 1 while it sees this many steps left, from where it begins to remember."""
    if which == "counter":
        return [time / 100 for time in range(len(seen))]
    period = 1 if which == "replanning" else LENGTH
    return [(seen[time - time % period] + time % period / 10) / 100 for time in range(len(seen))]


def learner(which: str) -> Learner:
    """Learns nothing; its scale is 1."""

    def init(key: Any, batch: Any) -> State:
        return State({"scale": jnp.ones(())}, {}, {}, jnp.zeros((), jnp.int32))

    def update(state: State, batch: Any, key: Any) -> tuple[State, Any]:
        return state._replace(step=state.step + 1), {"reward": batch.reward.mean()}

    if which == "counter":
        return Learner(init, update, plan, actor=counter(), explorer=counter())
    period = 1 if which == "replanning" else 0
    return acting.in_chunks(Learner(init, update, plan, explore=plan), Spec((2,), 1), LENGTH, period)


@pytest.mark.parametrize("which", ["counter", "chunks", "replanning"])
def test_memory_starts_anew_with_every_episode_of_every_environment(which: str) -> None:
    """Two policies of one population in three environments each, with episodes of 1 to 10 steps."""
    runs = train.population(lambda config: learner(which), bc.Config(), lambda *_: None, 1)
    states = runs.init(jax.random.split(jax.random.key(0), 2), None)
    states = states._replace(params={"scale": jnp.array([1.0, -2.0])})
    with evaluate.evaluator(runs.actor, COUNTDOWN, seeds=2, episodes=9, copies=3, processes=0) as evaluator:
        returns = evaluator(states)["return"]
        again = evaluator(states)["return"]
    env, expected = envs.make(COUNTDOWN), np.zeros((2, 9))
    for s, scale in enumerate((1.0, -2.0)):
        starts = np.random.SeedSequence((0, 0, s)).generate_state(9)
        for e, start in enumerate(starts):
            length = int(env.reset(seed=int(start))[0][0])
            actions = by_hand(which, [length - time for time in range(length)])
            expected[s, e] = sum(1 + 3 * scale * action for action in actions)
    np.testing.assert_allclose(returns, expected, rtol=1e-5)
    np.testing.assert_array_equal(returns, again)


@pytest.mark.parametrize("replan_every", [-1, LENGTH + 1])
def test_no_more_of_a_chunk_can_be_executed_than_it_has(replan_every: int) -> None:
    with pytest.raises(ValueError, match=rf"replan_every={replan_every} .* 0 and .* chunk, {LENGTH}"):
        acting.chunked(plan, Spec((2,), 1), LENGTH, replan_every)
    with pytest.raises(ValueError, match=rf"replan_every={replan_every} .* chunk, 1:"):
        acting.in_chunks(bc.make(bc.Config(), Spec((2,), 1), heads.scalar()), Spec((2,), 1), 1, replan_every)


def test_a_policy_with_memory_is_not_replaced_by_one_of_chunks() -> None:
    """Scores would be of another policy than the agent's."""
    still = Actor(lambda *_: (), lambda state, memory, seen, first, key: (jnp.zeros((1,)), memory))
    learner = bc.make(bc.Config(), Spec((2,), 2), heads.scalar())._replace(actor=still)
    assert acting.in_chunks(learner, Spec((2,), 1), 1) is learner
    with pytest.raises(ValueError, match=r"--chunk=2: the agent has a policy with memory .* leave it out"):
        acting.in_chunks(learner, Spec((2,), 1), 2)


def test_plans_are_made_in_groups_where_one_is_due_and_nowhere_else() -> None:
    """Of two seeds with six environments each: which rows are computed, and that groups change no result."""
    due, key = np.zeros((2, 2, 3), bool), jax.random.split(jax.random.key(0))
    due[0, 1, 0] = due[0, 0, 1] = due[1, 0, 1] = True  # rows 3 and 1, and row 1
    rows = np.arange(12.0, dtype=np.float32).reshape(2, 2, 3)
    computed: list[int] = []

    def compute(row: Any, key: Any) -> Any:
        jax.debug.callback(lambda x: computed.append(int(x)), row)
        return {"plan": row + jax.random.uniform(key, (4,))}

    results = []
    for at_once, expected in ((1, [1, 3]), (2, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4, 5])):  # 5 becomes 3
        computed.clear()
        refresh = lambda due, rows, held, key, n=at_once: acting.refresh(
            due, compute, rows, held, key, at_once=n
        )
        results.append(
            jax.jit(jax.vmap(refresh))(due, rows, {"plan": np.full((2, 2, 3, 4), -1.0, np.float32)}, key)
        )
        jax.effects_barrier()
        assert sorted(computed) == [seed * 6 + row for seed in range(2) for row in expected]
    plan = np.asarray(results[0]["plan"])
    assert (plan[~due] == -1).all() and (plan[due] // 1 == rows[due][:, None]).all()
    assert len(np.unique(plan[due] % 1)) == 12  # each with a key of its own
    for other in results[1:]:
        np.testing.assert_array_equal(other["plan"], plan)


def test_groups_are_as_few_as_can_be_where_rows_do_not_divide() -> None:
    """17 environments in groups of 6, 6 and 5 where 8 may be planned for at once: not one by one."""
    rows, key = np.arange(17.0, dtype=np.float32), jax.random.key(0)
    computed: list[int] = []

    def compute(row: Any, key: Any) -> Any:
        jax.debug.callback(lambda x: computed.append(int(x)), row)
        return row + jax.random.uniform(key)

    plans = []
    for at_once, expected in ((8, [*range(6), *range(12, 17)]), (1, [3, 16])):
        computed.clear()
        due = np.isin(np.arange(17), [3, 16])
        plans.append(acting.refresh(due, compute, rows, np.zeros(17, np.float32), key, at_once=at_once))
        jax.effects_barrier()
        assert sorted(computed) == expected
    np.testing.assert_array_equal(*plans)


RANDOM, STEPS, STOP = 8, 40, 21  # of each environment


def trainer(which: str, stream: Stream) -> Trainer:
    toy = learner(which)
    return Trainer(
        stream,
        toy,
        buffers.uniform(toy, buffers.steps(environments=2), 200, 4),
        keys.seeds(jax.random.key(0), 2),
        rhythm=(2, 1),
        learning_starts=2 * RANDOM,
        random=2 * RANDOM,
        preprocessing=Transform(),
    )


@pytest.mark.slow
def test_a_trainer_by_default_updates_once_per_step_and_changes_nothing_that_it_sees() -> None:
    toy, states = learner("counter"), []
    told = {"rhythm": (1, 1), "preprocessing": Transform()}
    for settings in (told, {}):
        with Stream(COUNTDOWN, [(0,), (1,)], 0) as stream:
            replay = buffers.uniform(toy, buffers.steps(), 200, 4)
            seeds = keys.seeds(jax.random.key(0), 2)
            run = Trainer(stream, toy, replay, seeds, learning_starts=4, random=4, **settings)
            if settings:
                run.start(None)
                run.advance(10, SimpleNamespace(update=lambda _: None), [])
            else:
                run.start()
                run.advance(10)
                run.advance(12, stopping=[2])  # which ends it before the first step
            states.append(jax.device_get(run.carry))
            assert run.step == 10
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_the_states_that_a_trainer_starts_from_stay_the_callers() -> None:
    toy, run_keys = learner("counter"), keys.seeds(jax.random.key(0), 2)
    states = jax.vmap(toy.init, (0, None), train.STACKED)(run_keys, None)
    with Stream(COUNTDOWN, [(0,), (1,)], 0) as stream:
        replay = buffers.uniform(toy, buffers.steps(), 200, 4)
        run = Trainer(stream, toy, replay, run_keys, learning_starts=1, random=1)
        run.start(states)
        run.advance(2)
    assert not any(x.is_deleted() for x in jax.tree.leaves(states))
    assert (states.step, run.carry.state.step) == (0, 2)


@pytest.mark.parametrize("which", ["counter", "chunks"])
def test_memory_online_is_carried_and_resumed_to_the_bit(which: str) -> None:
    bar, copies = SimpleNamespace(update=lambda _: None), [(copy,) for copy in range(4)]
    with Stream(COUNTDOWN, copies, 0) as stream:
        whole = trainer(which, stream)
        whole.start(None)
        whole.advance(2 * STOP, bar, [])
        saved, notes = jax.device_get(whole.saved()), whole.notes()
        whole.advance(2 * STEPS, bar, [])
    with Stream(COUNTDOWN, copies, 0) as stream:
        parts = trainer(which, stream)
        parts.resume(jax.device_put(saved), 2 * STOP, notes)
        parts.advance(2 * STEPS, bar, [])
    jax.tree.map(np.testing.assert_array_equal, parts.carry, whole.carry)
    rows = jax.tree.map(lambda x: np.asarray(x)[:, : 2 * STEPS], whole.carry.memory.rows)
    for s in range(2):
        for copy in range(2):
            left, first = rows.observation[s, copy::2, 0], rows.first[s, copy::2]
            # It begins to remember at each episode's start, and where it takes over from random actions.
            begins = [t for t in range(RANDOM, STEPS) if first[t] or t == RANDOM]
            expected: list[float] = []
            for begin, end in zip(begins, [*begins[1:], STEPS], strict=True):
                expected += by_hand(which, list(left[begin:end]))
            np.testing.assert_allclose(rows.action[s, copy::2, 0][RANDOM:], expected, rtol=1e-5, atol=1e-7)


def test_a_policy_without_memory_has_nothing_to_carry() -> None:
    """Not an array more in programs and checkpoints; and its functions stand for `actor` and `explorer`."""
    act, explore = (lambda state, observation, key: observation + state), (lambda *_: jnp.ones(2))
    plain = Learner(None, None, act, explore=explore)  # type: ignore[arg-type]
    seen, first, key = jnp.arange(2.0), jnp.ones(2, bool), jax.random.key(0)
    assert jax.tree.leaves(acting.actor(plain).start(1.0, seen)) == []
    step = jax.make_jaxpr(acting.resetting(acting.actor(plain)).act)(seen, (), seen, first, key)
    assert [equation.primitive.name for equation in step.eqns] == ["add"]
    assert acting.explorer(plain).act(1.0, (), seen, first, key)[0].tolist() == [1, 1]
    remembers = acting.observing(Actor(lambda state, seen: seen, lambda *_: None), lambda x: x - 5)
    assert remembers.start(1.0, seen).tolist() == [-5, -4]
    shifted = acting.observing(acting.actor(plain), lambda x: x - 5)
    assert shifted.act(1.0, (), seen, first, key)[0].tolist() == [-4, -3]
    with pytest.raises(ValueError, match=r"no way to explore.* of your own must return explore"):
        acting.explorer(plain._replace(explore=None))
    with pytest.raises(ValueError, match="returns no critics"):
        acting.critics(plain)
