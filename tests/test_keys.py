"""rl.keys: in everything that a run does, no key is drawn from twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import buffers, evaluate, fitted_q, keys, mbpo, model_based, online, train
from rl.agents import bc
from rl.dynamics import base, ensemble, termination
from rl.replay.dataset import Dataset
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

COUNTDOWN = "toy_environments:Countdown-v0"
SPEC, SEEDS, SEED, UPDATES = Spec((3,), 1), 2, 5, 200
Note = Callable[[str, Any], None]


@pytest.fixture
def used() -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], set[str]], Note]:
    """How often each key was drawn from, for what, and a function that notes it from inside compiled code.

    The keys that it may be split into, and those again, count as well: that is what a learner does with its own.
    """
    often: Counter[tuple[int, ...]] = Counter()
    purposes: dict[tuple[int, ...], set[str]] = {}

    def note(purpose: str, key: Any) -> None:
        def one(data: Any) -> None:
            for row in np.asarray(data).reshape(-1, np.shape(data)[-1]).tolist():
                often[tuple(row)] += 1
                purposes.setdefault(tuple(row), set()).add(purpose)

        parts = jax.random.split(key, 3)
        smaller = jax.vmap(lambda part: jax.random.split(part, 2))(parts).reshape(-1)
        jax.debug.callback(one, jax.random.key_data(jnp.concatenate([key[None], parts, smaller])))

    return often, purposes, note


def learner(note: Note) -> Learner:
    def init(key: Any, batch: Any) -> State:
        note("init", key)
        return State({}, {}, {}, jnp.zeros((), jnp.int32))

    def update(state: State, batch: Any, key: Any) -> tuple[State, Any]:
        note("update", key)
        return state._replace(step=state.step + 1), {"q": batch.reward.mean()}

    def act(name: str) -> Any:
        def choose(state: State, observation: Any, key: Any) -> Any:
            note(name, key)
            return jnp.zeros((*observation.shape[:-1], 1))

        return choose

    return Learner(init, update, act("act"), None, act("explore"))


def log() -> Dataset:
    one = jnp.ones(20)
    seen, action = jnp.ones((20, 3)), jnp.ones((20, 1))
    return Dataset(Transition(seen, action, one, one, seen, action, one), jnp.ones(20, bool))


def sampler(note: Note) -> Any:
    def sample(data: Dataset, key: Any, step: Any) -> Any:
        note("sample", key)
        return jax.tree.map(lambda x: x[:2], data.transitions)

    return sample


def evaluated(note: Note) -> None:
    act = jax.vmap(learner(lambda _, key: note("evaluate", key)).act, (None, 0, 0))
    with evaluate.evaluator(
        act, COUNTDOWN, seeds=SEEDS, episodes=2, processes=0, base_seed=SEED
    ) as evaluator:
        for index in range(3):
            evaluator(State({}, {}, {}, jnp.zeros(())), index)


def trained(note: Note, updates: int) -> State:
    run_keys = keys.seeds(jax.random.key(SEED), SEEDS)
    runs = train.population(lambda _: learner(note), bc.Config(), sampler(note), updates)
    return jax.jit(runs.epoch)(runs.init(run_keys, None), log(), run_keys)[0]


def offline_run(note: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `experiments.offline` trains, evaluates, estimates and fits a model that all seeds share."""
    root = jax.random.key(SEED)
    run_keys = keys.seeds(root, SEEDS)
    note("dynamics", keys.of(root, "dynamics"))
    state = trained(note, UPDATES)
    evaluated(note)
    critic = fitted_q.mlp.critic

    def noted(*arguments: Any) -> Any:
        network = critic(*arguments)
        return network._replace(
            init=lambda key, *x: (note("critic of fitted Q", key), network.init(key, *x))[1]
        )

    monkeypatch.setattr(fitted_q.mlp, "critic", noted)
    policy = jax.vmap(learner(lambda _, key: note("policy of fitted Q", key)).act, (None, 0, 0))
    fit = fitted_q.estimator(policy, SPEC, heads.scalar(), fitted_q.Config(updates=20, hidden=(4,)))
    fit(state, log(), keys.of(run_keys, "fitted_q"))


def online_run(note: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 steps, every second one with an update."""
    del monkeypatch
    acting = learner(note)
    replay = buffers.uniform(acting, buffers.steps(), 50, 4)
    loop = online.loop(acting, SPEC, replay, keys.seeds(jax.random.key(SEED), SEEDS))
    carry, _ = loop.begin(loop.init(), np.zeros((SEEDS, 1, 3), np.float32), False)
    step = online.Step(np.zeros((2, SEEDS, 1, 3), np.float32), np.zeros((3, SEEDS, 1), np.float32))
    for time in range(40):
        carry, _ = loop.step(carry, step, None, time % 2, False)
    evaluated(note)


def model_based_run(note: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs, with a model of its own for each seed."""
    del monkeypatch
    config = model_based.Config(rollouts=4, length=2, retain=1, updates=20, batch_size=4, real=0.5)

    def step(observation: Any, action: Any) -> Any:
        return observation, observation[..., 0]

    loop = model_based.make(config, learner(note), base.true(step), termination.never)
    run_keys = keys.seeds(jax.random.key(SEED), SEEDS)
    for purpose in ("dynamics", "untrained_dynamics"):
        for key in keys.of(run_keys, purpose):
            note(purpose, key)
    epoch = jax.jit(model_based.over_seeds(loop.epoch, batched=True))
    carry = jax.vmap(loop.init, (0, None), model_based.STACKED)(run_keys, log())
    for _ in range(3):
        carry, _ = epoch(carry, model_based.Inputs(log(), jnp.zeros((SEEDS, 1))), run_keys)
    evaluated(note)


def mbpo_run(note: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 steps, of which 10 are random; four fits, each with rollouts of two steps."""
    del monkeypatch
    network = ensemble.make(ensemble.Config(members=2, elites=1, hidden=(4,), decay=(0.0, 0.0)), SPEC)

    def fit(data: Any, fit_keys: Any, model: Any, context: Any) -> Any:
        for key in fit_keys:
            note("dynamics", key)
        return jax.vmap(network.init)(fit_keys)

    def advance(model: Any, observation: Any, action: Any, key: Any) -> Any:
        note("rollout", key)
        return observation, observation[..., 0]

    config = mbpo.Config(
        replay=50,
        batch_size=4,
        retrain_every=8,
        rollouts=4,
        rollout_length=mbpo.Schedule(0, 0, 2, 2),
        model_share=mbpo.Schedule(0, 0, 0.5, 0.5),
        model_replay=16,
    )
    run_keys = keys.seeds(jax.random.key(SEED), SEEDS)
    noted = network._replace(fit=fit, dynamics=network.dynamics._replace(step=advance))
    rhythm = mbpo.Rhythm(updates=1, period=1, environments=1, learning_starts=10)
    mbpo_loop = mbpo.make(config, learner(note), noted, termination.never, run_keys, rhythm)
    loop = online.loop(mbpo_loop.learner, SPEC, mbpo_loop.replay, run_keys)
    carry, _ = loop.begin(loop.init(), np.zeros((SEEDS, 1, 3), np.float32), False)
    step = online.Step(np.zeros((2, SEEDS, 1, 3), np.float32), np.zeros((3, SEEDS, 1), np.float32))
    for time in range(40):
        if mbpo_loop.retraining.due(time):
            carry, _ = mbpo_loop.retraining.run(carry, time)
        carry, _ = loop.step(carry, step, None, int(time >= 10), False)
    evaluated(note)


RUNS = {
    mbpo_run: {"init", "update", "explore", "evaluate", "dynamics", "rollout"},
    offline_run: {
        "init",
        "update",
        "sample",
        "evaluate",
        "dynamics",
        "critic of fitted Q",
        "policy of fitted Q",
    },
    online_run: {"init", "update", "explore", "evaluate"},
    model_based_run: {"init", "update", "explore", "evaluate", "dynamics", "untrained_dynamics"},
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_two_parts_of_a_run_draw_from_the_same_key(run: Any, used: Any, monkeypatch: Any) -> None:
    often, purposes, note = used
    run(note, monkeypatch)
    jax.effects_barrier()
    assert set.union(*purposes.values()) == RUNS[run]
    twice = {key: purposes[key] for key, count in often.items() if count > 1}
    assert not twice, f"{len(twice)} of {len(often)} keys: {set(map(frozenset, twice.values()))}"
    assert len(often) > 5 * SEEDS * 20


def test_without_purposes_keys_would_be_drawn_from_twice(used: Any, monkeypatch: Any) -> None:
    """What the test above is for: the numbers of updates, seeds and parts of a split are the same small numbers."""
    often, purposes, note = used
    monkeypatch.setattr(keys, "of", lambda key, purpose: key)
    trained(note, 5)
    evaluated(note)
    jax.effects_barrier()
    together = {frozenset(purposes[key]) for key, count in often.items() if count > 1}
    assert any({"init", "sample"} <= one or {"init", "update"} <= one for one in together)
    assert any("evaluate" in one and len(one) > 1 for one in together), together


def test_a_seed_has_the_same_key_however_many_run_beside_it() -> None:
    root = jax.random.key(3)
    few, many = (jax.random.key_data(keys.seeds(root, count)) for count in (2, 50))
    np.testing.assert_array_equal(few, many[:2])
    assert len(np.unique(many, axis=0)) == 50
    each = [keys.of(key, "update") for key in keys.seeds(root, 2)]
    np.testing.assert_array_equal(
        jax.random.key_data(keys.of(keys.seeds(root, 2), "update")), jax.random.key_data(jnp.stack(each))
    )


def test_keys_that_draw_alike_beside_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match=r"JAX_DEFAULT_PRNG_IMPL=rbg: seeds .* all draw alike; leave it out"):
        keys.seeds(jax.random.key(0, impl="rbg"), 2)


def test_a_purpose_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown purpose 'updates': known are act, dynamics, .*update"):
        keys.of(jax.random.key(0), "updates")
