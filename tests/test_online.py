"""experiments.online and the compiled step behind it: what is remembered, resumed, refused, restarted and learned."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import point_mass  # noqa: F401  (registers its environment)
import pytest
import toy_environments
import tqdm

from experiments import common, init_from, interaction, offline, online
from rl import agents, buffers, checkpoint, data, evaluate, log, train
from rl import online as compiled
from rl.agents.optimisers import Adam
from rl.envs import WorkerDied
from rl.envs.stream import Experience, Stream
from rl.interaction import Trainer, succeeded
from rl.networks.layers import Architecture
from rl.replay import dataset as replay
from rl.replay import ring, transform
from rl.replay.dataset import Dataset, n_step
from rl.replay.source import ONLINE
from rl.replay.transform import Transform
from rl.types import Learner, Spec, State
from rl.values import heads

POINT_MASS = "point_mass:PointMass-v0"
TINY = {
    "env": POINT_MASS,
    "steps": 40,
    "eval_every": 20,
    "eval_episodes": 2,
    "eval_processes": 0,
    "save_every": 20,
    "learning_starts": 8,
    "batch_size": 8,
    "replay": 64,
    "tensorboard": False,
}


def config(agent: str = "td3", **changes: Any) -> Any:
    fields = {field.name for field in dataclasses.fields(agents.get(agent).Config)}
    small = {"hidden": (8, 8), "critics": 2, "samples": 2} | changes
    return agents.get(agent).Config(**{name: value for name, value in small.items() if name in fields})


def settings(workdir: Path, **changes: Any) -> online.Settings:
    return online.Settings(**TINY | {"agent": "td3", "workdir": str(workdir)} | changes)


def saved(workdir: Path, step: int) -> dict[str, np.ndarray]:
    record, arrays = checkpoint.read(workdir / "checkpoints") or pytest.fail("there is no checkpoint")
    assert record["step"] == step
    return arrays


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Every array, every logged number and every policy, to the bit."""
    a, b = saved(one, step), saved(other, step)
    assert a.keys() == b.keys()
    for name in a.keys() - {"seconds"}:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert (one / log.METRICS).read_text() == (other / log.METRICS).read_text()


def once(make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, called once for all arguments of which ``key`` says the same."""
    cache: dict[Any, Any] = {}

    def of(*arguments: Any) -> Any:
        which = key(*arguments)
        if which not in cache:
            cache[which] = (
                arguments,
                make(*arguments),
            )  # the arguments are kept, as keys may be their addresses
        return cache[which][1]

    return of


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """Runs that differ only in their folder and length share their compiled calls: each would compile them anew."""
    with pytest.MonkeyPatch.context() as patch:
        by_settings = lambda settings, *rest: repr(
            (dataclasses.replace(settings, workdir="", steps=1), *rest)
        )
        by_identity = lambda learner, spec, replay, run_keys, *rest: (
            *(id(learner), id(replay), repr((spec, rest))),
            np.asarray(jax.random.key_data(run_keys)).tobytes(),
        )
        patch.setattr(online, "learner_and_replay", once(online.learner_and_replay, by_settings))
        patch.setattr(compiled, "loop", once(compiled.loop, by_identity))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    workdir = tmp_path_factory.mktemp("online")
    return workdir, online.run(settings(workdir), config())


# ---- the compiled step -------------------------------------------------------------------------------------------


def counter() -> Learner:
    """A learner that counts updates, explores with its count, and reports the batch's rewards."""

    def update(state: State, batch: Any, key: Any) -> tuple[State, Any]:
        return state._replace(step=state.step + 1), {"reward": batch.reward.mean()}

    def act(state: State, observation: Any, key: Any) -> Any:
        return jnp.zeros((*observation.shape[:-1], 1)) + state.step / 100

    return Learner(lambda key, batch: State({}, {}, {}, jnp.zeros((), jnp.int32)), update, act, None, act)


def test_what_happened_is_what_the_replay_holds() -> None:
    """Two seeds of two environments against deques that a Python loop fills."""
    spec, capacity = Spec((3,), 1), 10
    learner = counter()
    replay = buffers.uniform(learner, buffers.steps(environments=2), capacity, 4)
    loop = compiled.loop(learner, spec, replay, jax.random.split(jax.random.key(0), 2), 2)
    expected, rewards = [deque(maxlen=capacity) for _ in range(2)], []
    with Stream("toy_environments:Countdown-v0", [(copy,) for copy in range(4)], 0) as stream:
        carry, action = loop.begin(loop.init(), stream.observation.reshape(2, 2, 3), False)
        seen, first = stream.observation, np.ones(4, bool)
        for time in range(15):
            action = np.asarray(action)
            outcome = stream.step(action.reshape(4, 1))
            for copy in range(4):
                values = (action[copy // 2, copy % 2, 0], outcome.reward[copy], not outcome.terminated[copy])
                row = [*seen[copy], *values, *outcome.next_observation[copy], first[copy]]
                expected[copy // 2].append(row)
                rewards.append(outcome.reward[copy])
            seen, first = outcome.observation, outcome.first
            both = np.stack([outcome.next_observation, outcome.observation]).reshape(2, 2, 2, 3)
            scalar = np.float32([outcome.reward, ~outcome.terminated, outcome.first]).reshape(3, 2, 2)
            carry, action = loop.step(carry, compiled.Step(both, scalar), None, time % 3, False)
    assert carry.state.step == sum(time % 3 for time in range(15)) and carry.time == 16
    order = (int(carry.memory.head) + np.arange(capacity)) % capacity
    for s in range(2):
        rows = carry.memory.rows
        columns = [
            rows.observation,
            rows.action,
            rows.reward,
            rows.discount,
            rows.next_observation,
            rows.first,
        ]
        held = np.concatenate([np.float32(x[s]).reshape(capacity, -1) for x in columns], 1)[order]
        np.testing.assert_allclose(held, np.float32(expected[s]), rtol=1e-6)
    means = np.asarray(compiled.mean_report(carry.tally).metrics["reward"])
    assert means[0] != means[1] and (min(rewards) < means).all() and (means < max(rewards)).all()


def test_logged_rows_come_first_in_every_batch() -> None:
    """As in the model-based loop; their rewards are 5, those of the replay 0."""

    def update(state: State, batch: Any, key: Any) -> tuple[State, Any]:
        rewards = {"logged": batch.reward[:3].min(), "new": batch.reward[3:].max()}
        return state._replace(step=state.step + 1), rewards | {
            "from": (batch.origin == ONLINE) @ 2 ** jnp.arange(5)
        }

    learner = counter()._replace(update=update)
    replay = buffers.uniform(learner, buffers.steps(), 10, 5, logged=3)
    row = jax.tree.map(np.asarray, compiled.example(Spec((3,), 1)))
    log = jax.tree.map(lambda x: np.repeat(x, 4, 0), row._replace(reward=np.full(1, 5.0), origin=None))
    alone = buffers.uniform(learner, buffers.steps(), 10, 5)

    @jax.jit
    def metrics(log: Any) -> tuple[dict[str, Any], Any]:
        rows = ring.Row(*row[:5], jnp.ones(1, bool))
        memory = replay.insert(replay.empty(jax.tree.map(lambda x: x[0], rows)), rows)
        state, key = learner.init(jax.random.key(0), None), jax.random.key(0)
        _, _, mixed = replay.learn(2)(state, memory, None, Dataset(log, None), key)
        _, _, report = alone.learn(1)(state, memory, None, None, key)
        return mixed.metrics, report.metrics["from"]

    mixed, origin = metrics(log)
    assert jax.tree.map(float, mixed) == {"logged": 5, "new": 0, "from": 0b11000}
    assert origin == 0b11111  # no demonstrations


@pytest.mark.parametrize("logged", [-1, 5])
@pytest.mark.parametrize("keep", [buffers.uniform, buffers.relabelling])
def test_no_more_logged_rows_than_a_batch_has_are_asked_for(keep: Any, logged: int) -> None:
    with pytest.raises(ValueError, match=rf"logged={logged} must lie between 0 and batch_size=4"):
        keep(counter(), buffers.steps(), 10, 4, logged=logged)


@pytest.mark.parametrize("keep", [buffers.uniform, buffers.relabelling])
def test_the_replay_is_written_in_place(keep: Any) -> None:
    learner = counter()
    replay = keep(learner, buffers.steps(), 100_000, 4)
    loop = compiled.loop(learner, Spec((3,), 1), replay, jax.random.split(jax.random.key(0), 1))
    carry, _ = loop.begin(loop.init(), np.zeros((1, 1, 3), np.float32), False)
    step = compiled.Step(np.zeros((2, 1, 1, 3), np.float32), np.zeros((3, 1, 1), np.float32))
    rows = lambda carry: getattr(carry.memory, "ring", carry.memory).rows.observation
    for updates in (0, 2, 0, 2):
        before = rows(carry).unsafe_buffer_pointer()
        carry, _ = loop.step(carry, step, None, updates, False)
        if loop.relabel:
            carry = loop.relabel(carry, np.full((1, 1), updates, np.int32))
        assert rows(carry).unsafe_buffer_pointer() == before


@pytest.mark.parametrize("random", [False, True])
def test_every_action_has_draws_of_its_own(random: bool) -> None:
    """Those of each step, seed and environment, whether the policy draws them or nobody does."""
    noisy = lambda state, seen, key: 0.1 * jax.random.normal(key, (*seen.shape[:-1], 1))
    learner = counter()._replace(explore=noisy)
    replay = buffers.uniform(learner, buffers.steps(environments=2), 10, 4)
    loop = compiled.loop(learner, Spec((3,), 1), replay, jax.random.split(jax.random.key(0), 2), 2)
    step = compiled.Step(np.zeros((2, 2, 2, 3), np.float32), np.zeros((3, 2, 2), np.float32))
    carry, action = loop.begin(loop.init(), np.zeros((2, 2, 3), np.float32), random)
    actions = [np.asarray(action)]
    for _ in range(2):
        carry, action = loop.step(carry, step, None, 0, random)
        actions.append(np.asarray(action))
    assert len(np.unique(actions)) == 3 * 2 * 2


def test_actions_beyond_their_box_are_remembered_as_the_environment_takes_them() -> None:
    far = lambda state, seen, key: jnp.full((*seen.shape[:-1], 2), jnp.array([50.0, -50.0]))
    replay = buffers.uniform(counter(), buffers.steps(), 10, 4)
    loop = compiled.loop(
        counter()._replace(explore=far), Spec((3,), 2), replay, jax.random.split(jax.random.key(0), 1)
    )
    carry, action = loop.begin(loop.init(), np.zeros((1, 1, 3), np.float32), False)
    np.testing.assert_array_equal(action, [[[1.0, -1.0]]])
    np.testing.assert_array_equal(carry.action, action)


@pytest.mark.parametrize(
    "view",
    [
        buffers.steps(3, 0.99),
        buffers.chunked(2, 0.99),
        buffers.stacked_frames(2),
        buffers.steps(environments=4),
    ],
)
def test_a_view_of_another_number_of_environments_is_refused(view: compiled.View) -> None:
    """It would add up rewards of different ones."""
    learner = counter()._replace(weighted=lambda *_: None)
    replays = [buffers.uniform(learner, view, 10, 4)]
    if view.chunk == 1:
        replays.append(buffers.prioritised_memory(learner, view, 10, 4, 0.5, 0.5))
    if view.chunk == 1 and not view.lookahead:
        replays.append(buffers.relabelling(learner, view, 10, 4))
    for kept in replays:
        with pytest.raises(
            ValueError, match=r"environments=[14], and the loop has 2 .* give environments=2 to"
        ):
            compiled.loop(learner, Spec((3,), 1), kept, jax.random.split(jax.random.key(0), 3), 2)


def test_returns_over_several_steps_ask_for_a_discount() -> None:
    """It was 1 where it was forgotten, whatever the agent's."""
    for view in (
        lambda **fields: buffers.steps(3, **fields),
        lambda **fields: buffers.chunked(3, **fields),
        lambda **fields: buffers.stacked_frames(2, 3, **fields),
    ):
        with pytest.raises(ValueError, match=r"over 3 steps .* give discount=config\.discount"):
            view()
        view(discount=0.9)
    buffers.stacked_frames(2)  # single steps hold none


def test_a_trainer_of_unequal_seeds_or_without_learners_is_refused() -> None:
    learner = counter()
    replay = buffers.uniform(learner, buffers.steps(), 10, 4)
    rhythm = {"rhythm": (1, 1), "learning_starts": 1, "random": 0, "preprocessing": Transform()}
    with Stream("toy_environments:Countdown-v0", [(copy,) for copy in range(3)], 0) as stream:
        for keys, message in (
            (
                jax.random.split(jax.random.key(0), 2),
                "3 environments for 2 seeds: give each seed as many, say 4 in all",
            ),
            (jax.random.key(0), r"these are key<fry>\[\]: give rl.keys.seeds"),
        ):
            with pytest.raises(ValueError, match=message):
                Trainer(stream, learner, replay, keys, **rhythm)
        trainer = Trainer(stream, learner, replay, jax.random.split(jax.random.key(0), 3), **rhythm)
        with pytest.raises(
            RuntimeError, match=r"no learners yet: call start\(None\), or resume, before advance"
        ):
            trainer.advance(4, tqdm.tqdm(disable=True), [])


# ---- successes among the demonstrations ----------------------------------------------------------------------------


class Demonstrated:
    """Two seeds of two environments, whose successes join a log of 3 rows.

    Transitions are over two steps and rewards are transformed. The replay holds 6 steps of each environment, successful
    episodes last 6 to 10: some have lost their beginning when they end.
    """

    LOGGED, BATCH, CAPACITY, GAMMA = 6, 16, 12, 0.9
    PREPROCESSING = Transform(2.0, -1.0, False, np.float32([1, 2, 3]), np.float32([2, 2, 2]))

    def __init__(self, name: str = "toy_environments:CountdownFade-v0", keep: Any = buffers.relabelling):
        def update(state: State, batch: Any, key: Any) -> tuple[State, Any]:
            return state._replace(params=batch, step=state.step + 1), {"logged": batch.origin.mean()}

        def init(key: Any, batch: Any) -> State:
            blank = jax.tree.map(lambda x: jnp.zeros((self.BATCH, *x.shape[1:]), x.dtype), batch)
            return State(
                blank._replace(origin=jnp.zeros(self.BATCH, jnp.int32)), {}, {}, jnp.zeros((), jnp.int32)
            )

        def explore(state: State, observation: Any, key: Any) -> Any:
            return jax.random.uniform(key, (*observation.shape[:-1], 1), minval=-1.0)

        learner = Learner(init, update, explore, None, explore)
        view = buffers.steps(2, self.GAMMA, environments=2)
        replay = keep(learner, view, self.CAPACITY, self.BATCH, logged=self.LOGGED)
        row = np.arange(3, dtype=np.float32)
        log = compiled.example(Spec((3,), 1))._replace(observation=-row[:, None] - np.ones(3, np.float32))
        log = jax.tree.map(lambda x: np.resize(x, (3, *x.shape[1:])), log)
        self.stream = Stream(name, [(copy,) for copy in range(4)], 0)
        self.trainer = Trainer(
            self.stream,
            learner,
            replay,
            jax.random.split(jax.random.key(0), 2),
            rhythm=(1, 1),
            learning_starts=1,
            random=0,
            preprocessing=self.PREPROCESSING,
            logged=n_step(Dataset(log, np.ones(3, bool)), 2, self.GAMMA),
            success="success",
        )

    def step(self) -> tuple[np.ndarray, Experience]:
        """One step of all, and what was seen before it."""
        before, outcomes, step = self.stream.observation.copy(), [], self.stream.step
        self.stream.step = lambda actions: outcomes.append(step(actions)) or outcomes[-1]
        try:
            self.trainer.advance(self.trainer.step + 2, tqdm.tqdm(disable=True), [])
        finally:
            self.stream.step = step
        return before, outcomes[0]


@pytest.mark.slow
def test_successful_episodes_join_the_demonstrations() -> None:
    """Row by row of every batch: where it is from, and over two steps the reward, discount and what follows."""
    runs = Demonstrated(
        keep=functools.partial(buffers.relabelling, origin=7)
    )  # as the agent knows demonstrations
    runs.trainer.start(None)
    steps: list[deque[dict[str, Any]]] = [deque(maxlen=runs.CAPACITY) for _ in range(2)]
    joined, drawn, expected_draws, variance = [0, 0], 0, 0.0, 0.0
    see = lambda x: np.float32((x - runs.PREPROCESSING.mean) / runs.PREPROCESSING.deviation)
    for _ in range(80):
        before, outcome = runs.step()
        for copy in range(4):
            steps[copy // 2].append(
                {
                    "copy": copy,
                    "observation": tuple(see(before[copy])),
                    "reward": 2 * outcome.reward[copy] - 1,
                    "alive": not outcome.terminated[copy],
                    "next": see(outcome.next_observation[copy]),
                    "last": outcome.first[copy],
                    "demonstration": False,
                }
            )
        batch = jax.device_get(runs.trainer.carry.state.params)
        for seed in range(2):
            rows = {step["observation"]: step for step in steps[seed]}
            shares = [step["demonstration"] for step in steps[seed]]
            share = sum(shares) / (sum(shares) + 3)
            expected_draws += runs.LOGGED * share
            variance += runs.LOGGED * share * (1 - share)
            for place in range(runs.BATCH):
                sample = jax.tree.map(lambda x: x[seed, place], batch)  # noqa: B023
                if sample.observation[0] < -0.99 and sample.observation[1] == sample.observation[0]:
                    assert place < runs.LOGGED and sample.origin == 0 and sample.reward == 0
                    continue
                step = rows[tuple(sample.observation)]
                drawn += place < runs.LOGGED
                assert step["demonstration"] or place >= runs.LOGGED
                assert sample.origin == (7 if step["demonstration"] else ONLINE)
                later = [other for other in steps[seed] if other["copy"] == step["copy"]]
                later = later[later.index(step) :][: 1 if step["last"] else 2]
                reward = sum(runs.GAMMA**k * other["reward"] for k, other in enumerate(later))
                np.testing.assert_allclose(sample.reward, reward, rtol=1e-5, atol=1e-5)
                weight = runs.GAMMA ** (len(later) - 1) * later[-1]["alive"]
                np.testing.assert_allclose(sample.discount, weight, rtol=1e-6)
                np.testing.assert_array_equal(sample.next_observation, later[-1]["next"])
        # Learning comes first: an episode is a demonstration from the next step on.
        for copy in np.flatnonzero(outcome.first):
            length = int(outcome.length[copy])
            good = length > 5
            joined[copy // 2] += good
            episode = [step for step in steps[copy // 2] if step["copy"] == copy][-length:]
            for step in episode:
                step["demonstration"] |= bool(good)
    runs.stream.close()
    assert min(joined) > 3 and runs.trainer.read()["train/relabelled_episodes"].tolist() == joined
    assert abs(drawn - expected_draws) < 5 * np.sqrt(variance)


def test_a_time_limit_ends_an_episode_and_not_its_values() -> None:
    """What the learners are told of four environments: two end, of which one terminates."""
    runs = Demonstrated()
    runs.stream.close()
    seen, number = np.zeros((4, 3)), np.zeros(4)
    terminated, first = np.array([True, False, False, False]), np.array([True, True, False, False])
    told = runs.trainer._step(
        Experience(seen, np.arange(4.0), terminated, seen, first, number, number, number)
    )
    np.testing.assert_array_equal(told.scalar, [[[-1, 1], [3, 5]], [[0, 1], [1, 1]], [[1, 1], [0, 0]]])


def test_success_is_what_is_asked_for() -> None:
    """Of four episodes that end and one that does not: reported at some step, at the last one, or by its reward."""
    outcome = Experience(
        next_observation=None,
        reward=np.array([0.0, 1.0, 0.5, 2.0, 2.0]),
        terminated=np.zeros(5, bool),
        observation=None,
        first=np.array([True, True, True, True, False]),
        length=np.ones(5, int),
        success=np.array([1.0, 1.0, 0.0, 0.0, np.nan]),
        final_success=np.array([0.0, 1.0, 0.0, 0.0, np.nan]),
    )
    expected = {"success": [0, 1], "final_success": [1], 0.5: [1, 2, 3], 2.0: [3]}
    for success, episodes in expected.items():
        assert np.flatnonzero(succeeded(outcome, success)).tolist() == episodes


@pytest.mark.slow
def test_a_run_with_successes_goes_on_to_the_same_bits() -> None:
    """In the middle of episodes, from a checkpoint's notes as JSON."""
    whole, rest = Demonstrated(), Demonstrated()
    whole.trainer.start(None)
    for step in range(40):
        if step == 17:
            saved = jax.tree.map(np.array, whole.trainer.saved())
            notes = json.loads(json.dumps(whole.trainer.notes()))
        whole.step()
    assert 0 < sum(notes["relabelled"]) < whole.trainer.relabelled.sum()
    assert np.nanmax(notes["stream"]["success"]) > 0  # one episode has succeeded and is not over
    rest.trainer.resume(saved, 2 * 17, notes)
    for _ in range(40 - 17):
        rest.step()
    one, other = (jax.device_get(runs.trainer.saved()) for runs in (whole, rest))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    np.testing.assert_array_equal(whole.trainer.relabelled, rest.trainer.relabelled)
    whole.stream.close()
    rest.stream.close()


def test_an_environment_that_does_not_report_success_is_refused() -> None:
    """At the end of its first episode, and nothing of that step is remembered."""
    runs = Demonstrated("toy_environments:CountdownQuiet-v0")
    runs.trainer.start(None)
    with pytest.raises(
        ValueError, match=r'does not report info\["success"\].*--relabel_success=1, say \(success=1.0\)'
    ):
        for _ in range(10):
            runs.step()
    assert runs.trainer.whole and runs.trainer.notes()["stream"]["copies"] == []
    assert runs.trainer.carry.memory.ring.count == runs.trainer.step
    runs.stream.close()


def test_only_a_replay_of_whole_steps_that_can_relabel_takes_demonstrations() -> None:
    with pytest.raises(ValueError, match=r"cannot relabel .* rl.buffers.relabelling"):
        Demonstrated(keep=buffers.uniform)
    with pytest.raises(ValueError, match="single video frames cannot join"):
        buffers.relabelling(counter(), buffers.stacked_frames(4), 100, 4)


@pytest.mark.parametrize(
    ("utd", "envs", "expected"),
    [
        (1, 1, (1, 1)),
        (4, 2, (8, 1)),
        (0.25, 1, (1, 4)),
        (0.25, 4, (1, 1)),
        (0.1, 1, (1, 10)),
        (0.5, 4, (2, 1)),
        (2.0**-12, 4096, (1, 1)),
        (0.0005, 1, (1, 2000)),
    ],
)
def test_updates_per_step(utd: float, envs: int, expected: tuple[int, int]) -> None:
    settings = online.Settings(utd=utd, envs=envs, steps=8192, learning_starts=101)
    count, period = interaction.rhythm(settings)
    assert (count, period) == expected
    due = [step for step in range(envs, 8193, envs) if step % (envs * period) == 0 and step >= 101]
    assert interaction.updates(settings) == count * len(due)


# ---- a run --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_says_what_it_did(finished: tuple[Path, dict[str, Any]]) -> None:
    workdir, result = finished
    assert (result["steps"], result["updates"], result["deaths"]) == (40, 40 - 8 + 1, 0)
    assert (workdir / "curve.png").stat().st_size > 0
    rows = log.read(workdir)
    assert [row["step"] for row in rows] == [20, 40]
    for row in rows:
        assert np.shape(row["eval/return"]) == (1, 2) and np.shape(row["train/critic_loss"]) == (1,)
        assert row["train/length"] == [10]
    assert result["scores"]["return"]["last"]["mean"] == np.mean(rows[-1]["eval/return"])


@pytest.mark.slow
def test_actions_are_random_until_learning_starts(finished: tuple[Path, dict[str, Any]]) -> None:
    arrays = saved(finished[0], 40)
    action = arrays["loop/memory/rows/action"][0]
    assert arrays["loop/memory/count"] == 40 and (np.abs(action[:40]) <= 1).all()
    # Uniform at first; afterwards a policy that is still near 0, with noise of 0.1.
    assert np.abs(action[:8]).mean() > 0.35 > np.abs(action[9:40]).mean()


def test_the_policy_of_every_evaluation_can_be_read(finished: tuple[Path, dict[str, Any]]) -> None:
    workdir, _ = finished
    assert sorted(path.name for path in (workdir / "actors").iterdir()) == ["20.npz", "40.npz"]
    params = checkpoint.load_params(workdir / "actors" / "40.npz")
    arrays = saved(workdir, 40)
    np.testing.assert_array_equal(params["Dense_0"]["kernel"], arrays["state/params/policy/Dense_0/kernel"])


def test_demonstrations_are_seen_as_the_agent_sees_its_own_steps(tmp_path: Path, capsys: Any) -> None:
    """Rewards transformed first, then summed over three steps; actions clipped where that is asked for."""
    h5py = pytest.importorskip("h5py")
    log = {
        "observations": np.arange(18.0, dtype=np.float32).reshape(6, 3),
        "actions": np.float32([[0.5], [1.5], [0], [0], [0], [0]]),
        "rewards": np.float32([1, 2, 3, 4, 5, 6]),
        "terminals": np.array([0, 0, 0, 0, 0, 1], bool),
    }
    with h5py.File(tmp_path / "log.hdf5", "w") as file:
        for name, array in log.items():
            file[name] = array
    chosen = settings(tmp_path, offline_data=str(tmp_path / "log.hdf5"), n_step=3, reward_shift=-1.0)
    with pytest.raises(ValueError, match="--clip_actions"):
        online.mixture(chosen, Spec((3,), 1))
    chosen = dataclasses.replace(chosen, clip_actions=True, reward_scale="2", env="AdroitHandDoor-v1")
    loaded = online.mixture(chosen, Spec((3,), 1))
    assert "note on --offline_data: up to gymnasium-robotics 1.4.2" in capsys.readouterr().err
    steps = online.demonstrations(
        chosen, config(discount=0.5), init_from.transformation(chosen, loaded), loaded
    ).transitions
    assert steps.action[1] == 1
    np.testing.assert_allclose(steps.reward, [3.75, 7.25, 10.75, 14.25, 14.5, 11.0])  # of 2 r - 1
    np.testing.assert_allclose(steps.discount, [0.25, 0.25, 0.25, 0, 0, 0])
    np.testing.assert_array_equal(steps.next_observation[:4, 0], [9, 12, 15, 15])
    with h5py.File(tmp_path / "log.hdf5", "a") as file:
        for name, array in log.items():
            del file[name]
            file[name] = array[:0]
    with pytest.raises(ValueError, match="no steps"):
        online.mixture(chosen, Spec((3,), 1))


@pytest.mark.parametrize(
    ("agent", "changes"),
    [
        pytest.param("sac", {"utd": 0.5, "n_step": 3}, id="sac, every second step", marks=pytest.mark.long),
        pytest.param(
            "td3",
            {"utd": 2, "envs": 2, "seeds": 2, "env_processes": 1},
            id="td3, two seeds in a worker",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "td3",
            {"env": "toy_environments:Goal-v0", "envs": 2},
            id="td3, dictionaries",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dqn",
            {"env": "CartPole-v1", "priority": 0.5, "n_step": 2, "td_lambda": 0.8, "utd": 0.5},
            id="dqn, prioritised, every second step",
        ),
    ],
)
def test_a_run_that_goes_on_is_the_uninterrupted_one_to_the_bit(
    agent: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    for folder, steps in (("whole", 40), ("parts", 20), ("parts", 40)):
        online.run(settings(tmp_path / folder, agent=agent, **changes | {"steps": steps}), config(agent))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 40)


@pytest.mark.slow
def test_the_parts_of_a_dictionary_are_remembered_together(tmp_path: Path) -> None:
    """Of two environments; the toy observes its last action and its clock beside the goal of its episode."""
    online.run(settings(tmp_path, env="toy_environments:Goal-v0", envs=2, steps=20), config())
    rows = {
        name.removeprefix("loop/memory/rows/"): value[0, :20].reshape(10, 2, *value.shape[2:])
        for name, value in saved(tmp_path, 20).items()
        if name.startswith("loop/memory/rows/")
    }
    seen, following = (
        {key.removeprefix(name): x for key, x in rows.items() if key.startswith(name)}
        for name in ("observation/", "next_observation/")
    )
    assert seen.keys() == following.keys() == {"clock", "task/goal", "task/last"}
    clock, next_clock = 255 * seen["clock"], 255 * following["clock"]  # of a byte
    np.testing.assert_allclose(clock[:, 0, 0], np.arange(10) % 5, rtol=1e-6)
    np.testing.assert_allclose(next_clock, clock + 1, rtol=1e-6)
    np.testing.assert_array_equal(following["task/last"], rows["action"])
    np.testing.assert_array_equal(following["task/goal"], seen["task/goal"])
    assert (seen["task/goal"][:, 0] != seen["task/goal"][:, 1]).any()


@pytest.mark.slow
def test_a_run_stopped_in_the_middle_of_an_episode_goes_on_to_the_same_bits(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stream.step

    def interrupted(self: Stream, actions: np.ndarray) -> Any:
        if self.finished and int(self._length[0]) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.undo()
        return step(self, actions)

    monkeypatch.setattr(Stream, "step", interrupted)
    with pytest.raises(train.Interrupted, match="stopped at step 14; the same command continues"):
        online.run(settings(tmp_path), config())
    assert saved(tmp_path, 14)["loop/memory/count"] == 14
    online.run(settings(tmp_path), config())
    assert_same_run(finished[0], tmp_path, 40)


@pytest.mark.slow
def test_a_run_stopped_at_an_evaluation_is_evaluated(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to stop in the very step that ends at it."""
    step, count = Stream.step, 0

    def interrupted(self: Stream, actions: np.ndarray) -> Any:
        nonlocal count
        count += 1
        if count == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, actions)

    monkeypatch.setattr(Stream, "step", interrupted)
    with pytest.raises(train.Interrupted, match="stopped at step 20"):
        online.run(settings(tmp_path), config())
    assert [row["step"] for row in log.read(tmp_path)] == [20]
    online.run(settings(tmp_path), config())
    assert_same_run(finished[0], tmp_path, 40)


@pytest.mark.slow
def test_an_evaluation_that_fails_loses_nothing(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(evaluate.Evaluator, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            online.run(settings(tmp_path), config())
    assert saved(tmp_path, 20)["loop/memory/count"] == 20
    online.run(settings(tmp_path), config())
    assert_same_run(finished[0], tmp_path, 40)


@pytest.mark.slow
def test_a_seed_among_others_is_that_seed_alone(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    online.run(settings(tmp_path, seeds=2), config())
    one, two = log.read(finished[0]), log.read(tmp_path)
    np.testing.assert_allclose(two[0]["train/return"][0], one[0]["train/return"][0], rtol=1e-4)
    assert two[0]["train/return"][0] != two[0]["train/return"][1]


def test_a_finished_run_is_left_as_it_is(finished: tuple[Path, dict[str, Any]], capsys) -> None:
    workdir, result = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    again = online.run(settings(workdir), config())
    assert "nothing to do" in capsys.readouterr().err
    assert again["scores"]["return"]["last"] == result["scores"]["return"]["last"] | {
        "per_seed": again["scores"]["return"]["last"]["per_seed"]
    }
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before


# ---- fine-tuning ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fine_tuning_starts_from_what_was_trained_and_mixes_the_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = offline.Settings(
        agent="iql",
        dataset="synthetic-continuous",
        seeds=2,
        updates=6,
        eval_every=3,
        eval_episodes=0,
        batch_size=8,
        tensorboard=False,
        workdir=str(tmp_path / "offline"),
    )
    trained = dataclasses.replace(
        trained, reward_scale="return_range", reward_shift=-1.0, normalize_observations=True
    )
    offline.run(trained, config("iql"))
    raw: list[Experience] = []
    logged: list[Any] = []
    step, begin = Stream.step, online.make_trainer

    def watched(self: Stream, actions: np.ndarray) -> Experience:
        raw.append(step(self, actions))
        return raw[-1]

    def begun(*arguments: Any) -> Trainer:
        logged.append(arguments[-1])
        return begin(*arguments)

    monkeypatch.setattr(Stream, "step", watched)
    monkeypatch.setattr(online, "make_trainer", begun)
    chosen = settings(
        tmp_path / "online",
        agent="iql",
        init_from=str(tmp_path / "offline"),
        offline_data="synthetic-continuous",
        steps=20,
        learning_starts=19,
    )
    online.run(chosen, config("iql"))
    record, arrays = checkpoint.read(tmp_path / "offline" / "checkpoints")
    after = saved(tmp_path / "online", 20)
    name = "state/params/policy/body/Dense_0/kernel"
    assert after["state/step"] == record["step"] + 2  # updates at the last two steps
    moved = np.abs(after[name][0] - arrays[name][0])
    assert 0 < moved.max() < 1e-3 and np.abs(arrays[name][1] - arrays[name][0]).max() > 0.1
    # What it started from is evaluated, too.
    assert [row["step"] for row in log.read(tmp_path / "online") if "eval/return" in row] == [0, 20]
    first = np.load(tmp_path / "online" / "actors" / "0.npz")
    np.testing.assert_array_equal(first["body/Dense_0/kernel"], arrays[name][:1])
    # The environment's rewards and observations, and those of the log, are what they were offline.
    data = offline.problem(trained, [0.99]).loaded.dataset
    scale = 1000 / np.ptp(replay.episode_returns(data))
    mean, deviation = data.transitions.observation.mean(0), data.transitions.observation.std(0) + 1e-3
    rows = {name: after[f"loop/memory/rows/{name}"][0, :20] for name in ("reward", "next_observation")}
    expected = (
        np.concatenate([one.reward for one in raw]),
        np.concatenate([one.next_observation for one in raw]),
    )
    np.testing.assert_allclose(rows["reward"], scale * expected[0] - 1, rtol=1e-5)
    np.testing.assert_allclose(
        rows["next_observation"], (expected[1] - mean) / deviation, rtol=1e-3, atol=1e-4
    )
    (mixed,) = logged
    np.testing.assert_allclose(
        mixed.transitions.reward, scale * data.transitions.reward - 1, rtol=1e-4, atol=1e-5
    )
    assert record["card"]["transform"]["reward_scale"] == pytest.approx(scale)
    # Asked to stop before the first step, it has that evaluation all the same.
    evaluated = evaluate.Evaluator.__call__

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(*arguments)

    stopped = dataclasses.replace(chosen, workdir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch, pytest.raises(train.Interrupted, match="stopped at step 0"):
        patch.setattr(evaluate.Evaluator, "__call__", interrupted)
        online.run(stopped, config("iql"))
    # the same folder, as a shell completes it
    online.run(dataclasses.replace(stopped, init_from=f"{stopped.init_from}/"), config("iql"))
    assert_same_run(tmp_path / "online", tmp_path / "stopped", 20)


@pytest.mark.long
def test_an_agent_of_chunks_is_trained_offline_and_goes_on_online(tmp_path: Path) -> None:
    """Half of every batch is logged chunks."""
    chosen = {"agent": "iql", "chunk": 3, "seeds": 1}
    small = {"updates": 2, "eval_every": 2, "eval_episodes": 2, "eval_processes": 0, "batch_size": 8}
    where = {"environment": POINT_MASS, "workdir": str(tmp_path / "offline"), "tensorboard": False}
    offline.run(offline.Settings(**chosen, **small, **where), config("iql", candidates=2))
    source = {"init_from": str(tmp_path / "offline"), "offline_data": "synthetic-continuous"}
    again = settings(tmp_path / "online", **chosen, **source, steps=20, replan_every=2)
    online.run(again, config("iql", candidates=2))
    arrays = saved(tmp_path / "online", 20)
    assert arrays["loop/memory/rows/action"].shape[2:] == (2,) and arrays["state/step"] == 2 + 13


@pytest.mark.slow
def test_networks_are_of_chunks_and_what_is_remembered_is_single_steps() -> None:
    """By shapes: logged chunks and those of the ring in one batch, and single actions out."""
    chosen = online.Settings(
        agent="iql", chunk=3, replan_every=2, offline_data="logged", batch_size=8, replay=64
    )
    spec, agent_config = Spec((4,), 2), config("iql", candidates=2)
    learner, memory = online.learner_and_replay(chosen, agent_config, spec)
    logged = online.demonstrations(chosen, agent_config, Transform(), data.load("synthetic-continuous"))
    loop = compiled.loop(learner, spec, memory, jax.random.split(jax.random.key(0), 2))
    carry = jax.eval_shape(loop.init)
    assert carry.state.params["policy"]["log_std"].shape == (2, 6)
    assert carry.memory.rows.action.shape == (2, 64, 2) and carry.action.shape == (2, 1, 2)
    alone = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    rows = ring.Ring(alone(carry.memory.rows), carry.memory.head, carry.memory.count)
    state = alone(carry.state._replace(step=None))._replace(step=carry.state.step)
    after = jax.eval_shape(memory.learn(1), state, rows, None, logged, jax.random.key(0))[0]
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    step = lambda: loop.begin(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry), np.zeros((2, 1, 4)), False
    )
    assert jax.eval_shape(step)[1].shape == (2, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "hidden", "message"),
    [
        ({"agent": "td3"}, (8, 8), "holds {'agent': 'iql', 'head': 'scalar', 'seeds': 1}: give --agent=iql"),
        ({"seeds": 2}, (8, 8), "at most --seeds=1"),
        ({"reward_scale": "2"}, (8, 8), "trained with --reward_scale=3.0.*: leave out --reward_scale=2"),
        (
            {"reward_shift": -1.0, "clip_rewards": True},
            (8, 8),
            "trained with --reward_shift=0.0 --clip_rewards=False.*: leave out --reward_shift=-1.0 --clip_rewards=True",
        ),
        (
            {"discount": 0.9},
            (8, 8),
            "trained with --agent.discount=0.99.*: give --agent.discount=0.99, not 0.9",
        ),
        (
            {"network": Architecture("gelu", "orthogonal", norm_after=True)},
            (8, 8),
            "give --agent.network.activation=relu --agent.network.norm_after=False",
        ),
        ({"chunk": 2}, (8, 8), "decides on 1 actions at once: give --chunk=1, not 2"),
        (
            {"policy_optimiser": Adam()},
            (8, 8),
            "its state/optimiser/policy/.*; give --agent.policy_optimiser.schedule=cosine, as there, or train that "
            "run again with --agent.policy_optimiser.schedule=constant",
        ),
        (
            {"env": "Pendulum-v1"},
            (8, 8),
            "--init_from=.* does not fit --env=Pendulum-v1: it was trained on observations of 4 numbers and 2 "
            "continuous actions, here there are observations of 3 numbers and 1 continuous action; give the env",
        ),
        (
            {"env": "CartPole-v1"},
            (8, 8),
            "trained on .* 2 continuous actions, here there are observations of 4 numbers and 2 integer actions",
        ),
        ({}, (8, 9), r"its state/params/critic/Dense_1/bias is \(1, 2, 8\), here it is \(1, 2, 9\)"),
        ({"init_from": "nowhere"}, (8, 8), "--init_from=nowhere: there is no checkpoint"),
        (
            {"env": "Pendulum-v1", "init_from": "", "offline_data": "synthetic-continuous"},
            (8, 8),
            "does not fit Pendulum-v1: it has observations of .*, the environment observations of 3 numbers and 1 cont",
        ),
    ],
)
def test_what_does_not_fit_what_was_trained_is_refused(
    changes: dict[str, Any], hidden: tuple[int, int], message: str, tmp_path_factory, request
) -> None:
    if not hasattr(request.module, "trained"):  # once for all cases
        request.module.trained = tmp_path_factory.mktemp("trained")
        one = offline.Settings(
            agent="iql",
            dataset="synthetic-continuous",
            seeds=1,
            updates=1,
            eval_every=1,
            eval_episodes=0,
            batch_size=8,
            reward_scale="3",
            normalize_observations=True,
            tensorboard=False,
            workdir=str(request.module.trained),
        )
        offline.run(one, config("iql"))
    of_agent = ("discount", "network", "policy_optimiser")
    agent_changes = {"hidden": hidden} | {name: changes[name] for name in of_agent if name in changes}
    changes = {name: value for name, value in changes.items() if name not in of_agent}
    chosen = settings(
        tmp_path_factory.mktemp("run"), **{"agent": "iql", "init_from": str(request.module.trained)} | changes
    )
    with pytest.raises(ValueError, match=message):
        online.run(chosen, config(chosen.agent, **agent_changes))


def test_a_run_goes_on_with_what_its_source_saw(tmp_path: Path) -> None:
    """Settings that are left alone are the source's; the same ones, given again, are no mismatch."""
    seen = Transform(2.0, -1.0, True, np.float32([0.1, 0.2]), np.float32([3.0, 0.7]))
    card = {"transform": transform.to_json(seen)}
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": np.zeros(1)}, card)
    for changes in ({}, {"reward_scale": "2", "reward_shift": -1.0, "clip_rewards": True}):
        transformation = init_from.transformation(online.Settings(init_from=str(tmp_path), **changes), None)
        assert transformation[:3] == seen[:3]
        np.testing.assert_array_equal(transformation.mean, seen.mean)
        np.testing.assert_array_equal(transformation.deviation, seen.deviation)
    for wrong in ({"reward_scale": "0"}, {"reward_shift": -math.inf}):
        with pytest.raises(ValueError, match="--reward_"):
            init_from.transformation(online.Settings(**wrong), None)
    chosen = online.Settings(reward_scale="0.5", reward_shift=2.0)
    assert init_from.transformation(chosen, None) == Transform(0.5, 2.0)
    assert init_from.transformation(online.Settings(), None) == Transform()
    checkpoint.save(tmp_path / "mbpo" / "checkpoints", 1, {"x": np.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"it is no run of experiments\.offline or experiments\.online"):
        init_from.transformation(online.Settings(init_from=str(tmp_path / "mbpo")), None)
    with pytest.raises(ValueError, match=r"--reward_scale=return_range .* give --offline_data"):
        init_from.transformation(online.Settings(reward_scale="return_range"), None)


def test_a_support_is_that_of_the_run_that_is_continued_however_many_there_were_before(
    tmp_path: Path,
) -> None:
    """An online run that was itself continued has no flags of its own to say it."""

    def card(name: str, **entries: Any) -> str:
        unset = {"head": "hl_gauss", "head_low": math.nan, "head_high": math.nan}
        about = {"settings": unset, "transform": {}} | entries
        checkpoint.save(tmp_path / name / "checkpoints", 1, {"x": np.zeros(1)}, about)
        return str(tmp_path / name)

    source = card("offline", support=(-5.0, 10.0))
    chosen = online.Settings(init_from=source, head="hl_gauss")
    assert (
        init_from.support(chosen) == init_from.support(dataclasses.replace(chosen, head_low=-5.0)) == (-5, 10)
    )
    assert init_from.support(dataclasses.replace(chosen, head="scalar")) is None
    with pytest.raises(ValueError, match=r"trained with --head_high=10, .*: leave out --head_high=100"):
        init_from.support(dataclasses.replace(chosen, head_high=100.0))
    silent = dataclasses.replace(chosen, init_from=card("silent"))
    with pytest.raises(ValueError, match="does not say which support its head has: give --head_low"):
        init_from.support(silent)
    assert init_from.support(dataclasses.replace(silent, head_low=-1.0, head_high=1.0)) == (-1, 1)
    # What the networks' outputs are added to is that run's as well.
    has = lambda **fields: init_from.with_head(dataclasses.replace(chosen, **fields))
    assert math.isnan(has().head_start) and (has().head_kappa, has().head_sigma) == (1.0, 0.75)
    begun = card("begun", settings={"head": "hl_gauss", "head_start": -2.0})
    assert has(init_from=begun).head_start == -2.0
    assert math.isnan(has(init_from=begun, head="scalar").head_start)
    for folder, there in ((begun, "--head_start=-2"), (source, "no --head_start")):
        with pytest.raises(ValueError, match=rf"trained with {there}, .*: leave out --head_start=1"):
            has(init_from=folder, head_start=1.0)
    sharp = card("sharp", settings={"head": "hl_gauss", "head_kappa": 0.1})
    assert has(init_from=sharp).head_kappa == has(init_from=sharp, head_kappa=0.1).head_kappa == 0.1
    with pytest.raises(ValueError, match=r"with --head_kappa=0.1, .*: leave out --head_kappa=2"):
        has(init_from=sharp, head_kappa=2.0)
    wide = card("wide", settings={"head": "hl_gauss", "head_sigma": 2.0})
    assert has(init_from=wide).head_sigma == 2.0
    with pytest.raises(ValueError, match=r"with --head_sigma=2, .*: leave out --head_sigma=1"):
        has(init_from=wide, head_sigma=1.0)


def test_a_support_of_a_log_without_ends_is_told_where_episodes_may_end() -> None:
    card = {"settings": {"head_low": math.nan}, "terminates": False, "support": (278.0, 314.0)}
    told = lambda card, env="Hopper-v5", head="hl_gauss": init_from.unknown_ends(
        online.Settings(init_from="there", env=env, head=head), card
    )
    assert "values from 278 to 314. A step that ends an episode is worth its reward alone" in told(card)
    assert told(card, env="tests.point_mass:PointMass-v0")  # whose rule nobody knows
    assert not told(card, env="HalfCheetah-v5") and not told(card, head="scalar")
    assert not told(card | {"terminates": True}) and not told(card | {"settings": {"head_low": 0.0}})
    assert not told({"settings": {}})  # an older run, which does not say


def test_a_run_is_known_by_the_log_that_it_mixes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the log holds, as offline: a file that was made again in between is another run's."""
    monkeypatch.setattr(interaction, "train", lambda settings, run, *_, **__: run.card)
    mixed = settings(tmp_path / "mixed", offline_data="synthetic-continuous")
    assert online.run(mixed, config())["digest"] == data.load("synthetic-continuous").digest
    assert online.run(settings(tmp_path / "alone"), config())["digest"] is None


def test_both_discounts_of_chunks_are_those_of_the_run_that_is_continued(tmp_path: Path) -> None:
    """Its values are of returns with both: DEAS has one within a chunk and one from chunk to chunk."""
    there = {"agent": "deas", "config": {"discount": 0.999, "chunk_discount": 0.9}, "transform": {}}
    there["settings"] = {"head": "scalar", "seeds": 1, "chunk": 2}
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": np.zeros(1)}, there)
    chosen = online.Settings(agent="deas", chunk=2, init_from=str(tmp_path))
    with pytest.raises(ValueError, match=r"give --agent.chunk_discount=0.9, not 0.99"):
        init_from.state(chosen, config("deas", chunk_discount=0.99), counter(), Spec((4,), 2))


@pytest.mark.parametrize(
    ("agent", "there", "here", "message"),
    [
        ("iql", {"layer_norm": True}, {}, "give --agent.layer_norm=True"),
        ("arsq", {"levels": 3, "bins": 4}, {"bins": 6}, "give --agent.levels=3 --agent.bins=4"),
        ("arsq", {"temperature": 0.1}, {}, "give --agent.temperature=0.1"),
        ("arsq", {"sweep": {"temperature": [0.2, 0.01]}}, {}, "give --agent.temperature=0.2"),
        ("iql", {"temperature": 0.1}, {}, "its state/step is None"),
    ],
)
def test_networks_of_another_function_are_refused_whose_parameters_fit(
    agent: str, there: dict[str, Any], here: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """And not another temperature of IQL, whose checkpoint is looked at: here it is empty."""
    fields = {name: value for name, value in there.items() if name != "sweep"}
    card = {"agent": agent, "transform": {}, "settings": {"head": "scalar", "seeds": 1}, **there}
    card["config"] = dataclasses.asdict(config(agent, **fields))
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": np.zeros(1)}, card)
    chosen = online.Settings(agent=agent, init_from=str(tmp_path))
    with pytest.raises(ValueError, match=message):
        init_from.state(chosen, config(agent, **here), counter(), Spec((4,), 2))


def test_layers_that_a_network_does_not_have_here_are_not_lost_without_a_word() -> None:
    """A network that is not here at all is nobody's loss."""

    def state(layer_norm: bool) -> State:
        learner = common.learner("iql", config("iql", layer_norm=layer_norm), Spec((4,), 2), heads.scalar())
        return jax.eval_shape(learner.init, jax.random.key(0), compiled.example(Spec((4,), 2)))

    arrays = {name: np.zeros(x.shape) for name, x in checkpoint.named({"state": state(True)}).items()}
    arrays["state/params/flow/Dense_0/bias"] = arrays["loop/memory/count"] = np.zeros(())
    common.placed_state(arrays, state(True))
    with pytest.raises(ValueError, match="its state/params/critic/LayerNorm_0/bias has no place here"):
        common.placed_state(arrays, state(False))


def test_what_acts_is_exported_of_an_agent_without_a_policy_of_its_own(tmp_path: Path) -> None:
    """FQL acts by the best draws of its flow (QC): neither "policy" nor "q" is among its networks."""
    both = {"critic": {"kernel": np.ones((1, 2))}, "flow": {"kernel": np.zeros((1, 3))}}
    state = State(both, {}, {}, 0)
    interaction.export(tmp_path / "1.npz", state)
    with np.load(tmp_path / "1.npz") as file:
        assert {name: file[name].shape for name in file} == {"critic/kernel": (1, 2), "flow/kernel": (1, 3)}
    interaction.export(
        tmp_path / "2.npz", state._replace(params=both | {"policy": {"kernel": np.ones((1, 4))}})
    )
    with np.load(tmp_path / "2.npz") as file:
        assert list(file) == ["kernel"]


def test_critics_are_exported_with_a_policy_of_whose_draws_they_choose_one(tmp_path: Path) -> None:
    """IFQL's policy is a flow: alone it clones."""
    params = {name: {"kernel": np.ones((1, 2))} for name in ("critic", "flow")}
    interaction.export(tmp_path / "1.npz", State(params, {}, {}, 0), whole=True)
    with np.load(tmp_path / "1.npz") as file:
        assert set(file) == {"critic/kernel", "flow/kernel"}
    choose = {("ifql", 32), ("deas", 32), ("iql", 4)}
    for agent, candidates in [*choose, ("ifql", 1), ("iql", 1), ("fql", 32)]:
        chosen = config(agent, candidates=candidates)
        assert interaction.acts_by_critics(chosen) == ((agent, candidates) in choose), agent
    assert not interaction.acts_by_critics(config("sac"))


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"envs": 0}, "--envs=0 must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0, not -1"),
        ({"priority": -0.5}, "--priority must be at least 0, not -0.5"),
        ({"priority_correction": math.nan}, "--priority_correction=nan must be between 0 and 1"),
        ({"eval_episodes": 1}, "--eval_episodes=1: give at least 2"),
        ({"utd": 0.0}, "--utd must be positive"),
        ({"utd": math.inf}, "--utd must be positive and finite, not inf"),
        ({"head": "quantile", "head_kappa": -1.0}, "--head_kappa=-1 must be finite, and at least 1e-6"),
        ({"utd": 0.3}, "--utd=0.3 times --envs=1 must be a whole number, or one over"),
        ({"envs": 3}, "--steps=40 is not a multiple of --envs=3"),
        ({"steps": 50}, "--steps=50 is not a multiple of --eval_every=20"),
        ({"save_every": 30}, "--save_every=30 is not a multiple of --eval_every=20"),
        ({"learning_starts": 0}, "--learning_starts must be at least 1"),
        ({"learning_starts": 10**9}, "leaves nothing of --steps=.* to learn in"),
        ({"offline_data": "x", "offline_ratio": 1.0}, "--offline_ratio=1.0 must be between 0 and 1"),
        ({"offline_data": "x", "offline_ratio": 0.05}, "--offline_ratio=0.05 of --batch_size=8 is 0 rows"),
        ({"offline_data": "x", "offline_ratio": 0.95}, "--offline_ratio=0.95 of --batch_size=8 is 8 rows"),
        (
            {"relabel_success": "often"},
            "--relabel_success=often is neither a number nor success nor final_success",
        ),
        ({"relabel_success": "1", "priority": 0.5}, "--priority and --relabel_success cannot be combined"),
        ({"relabel_success": "success", "env": "ALE/Pong-v5"}, "--relabel_success is not for ALE games"),
        ({"chunk": 2, "n_step": 3}, "--n_step=3 and --chunk=2 cannot be combined"),
        ({"chunk": 2, "priority": 0.5}, "--priority=0.5 and --chunk=2 cannot be combined"),
        ({"chunk": 2, "relabel_success": "1"}, "--relabel_success=1 and --chunk=2 cannot be combined"),
        ({"chunk": 2, "env": "ALE/Pong-v5"}, "--chunk=2 is not for ALE games"),
        ({"chunk": 8, "learning_starts": 5}, "--learning_starts=5 is too early: .* 8 steps"),
        ({"chunk": 5, "learning_starts": 20, "replay": 4}, r"--replay=4 holds no whole chunk: .* 5 steps"),
        (
            {"chunk": 11, "env": POINT_MASS, "learning_starts": 5},
            "longer than every episode of point_mass.*limit is 10",
        ),
        (
            {"chunk": 201, "env": "jax/Pendulum-v1", "steps": 400, "learning_starts": 300},
            "longer than every .* limit is 200",
        ),
        ({"envs": 4, "replay": 3}, "--replay=3 does not hold one step of --envs=4"),
        (
            {"env": "ALE/Pong-v5", "learning_starts": 12, "replay": 5},
            "--replay=5 holds no whole stack of frames: .* --envs times .4 ",
        ),
        ({"head": "hl_gauss"}, "--head=hl_gauss needs --head_low and --head_high"),
        ({"head": "hl_gauss", "head_size": 7}, "--head_size=7: --head=hl_gauss needs at least 8 outputs"),
        (
            {"head": "hl_gauss", "head_low": 5.0, "head_high": -5.0},
            "--head_low=5 and --head_high=-5: the support of --head=hl_gauss",
        ),
        ({"agent": "bc"}, "no way to explore, since it learns from a log: choose another --agent, sac"),
        ({"priority": 0.5}, "cannot be weighted, as prioritised replay asks: choose dqn"),
        ({"agent": "dqn"}, "'dqn' cannot act in continuous actions"),
        (
            {"agent": "sac", "env": "CartPole-v1"},
            "'sac' cannot act in integer actions: use dqn, or from a log",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_touched(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    chosen = settings(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=message):
        online.run(chosen, config(chosen.agent))
    assert not (tmp_path / "run").exists()


def test_terminations_are_ignored_only_where_what_follows_them_is_kept(tmp_path: Path) -> None:
    """A replay of single frames has the first frame of the next episode there."""
    chosen = settings(tmp_path, agent="cqn", env="pixels/InvertedPendulum-v5")
    with pytest.raises(ValueError, match=r"--agent\.ignore_terminals is not for ALE games and pixels/"):
        online.run(chosen, agents.get("cqn").Config(ignore_terminals=True))


@pytest.mark.slow
def test_a_reward_that_is_not_a_number_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """It comes at the 14th step, say, and not when the run goes on."""
    step = toy_environments.Countdown.step
    count = 0

    def poisoned(self: Any, action: np.ndarray) -> Any:
        nonlocal count
        count += 1
        observation, reward, *rest = step(self, action)
        return observation, np.nan if count == 14 else reward, *rest

    monkeypatch.setattr(toy_environments.Countdown, "step", poisoned)
    chosen = settings(tmp_path, env="toy_environments:Countdown-v0")
    with pytest.raises(FloatingPointError, match=r"returned the reward nan at step \d+ of its episode \d"):
        online.run(chosen, config())
    assert saved(tmp_path, 13)["loop/memory/count"] == 13
    assert online.run(chosen, config())["steps"] == 40
    assert "new episodes start here: the environments failed" in capsys.readouterr().err
    rows = saved(tmp_path, 40)
    assert rows["loop/memory/count"] == 40 and rows["loop/memory/rows/first"][0, 13]


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "mortal"))
    (tmp_path / "mortal").touch()
    chosen = settings(
        tmp_path / "run",
        agent="dqn",
        env="toy_environments:Mortal-v0",
        env_processes=1,
        steps=20,
        learning_starts=4,
    )
    result = online.run(chosen, config("dqn"))
    assert (result["steps"], result["deaths"]) == (20, 1)
    assert "killed by SIGKILL" in (stderr := capsys.readouterr().err) and "nothing is lost" in stderr
    rows = saved(tmp_path / "run", 20)
    assert rows["loop/memory/count"] == 20
    # Two steps, and then episodes of five.
    assert np.flatnonzero(rows["loop/memory/rows/first"][0, :20]).tolist() == [0, 2, 7, 12, 17]
    np.testing.assert_allclose(rows["loop/memory/rows/observation"][0, 1:4, 0], [0.1, 0.0, 0.1], atol=1e-6)


@pytest.mark.slow
def test_a_policy_that_diverges_is_not_blamed_on_the_environment_and_not_saved(tmp_path: Path) -> None:
    """Its actions reach the environment before anybody reads its metrics."""
    advice = "lower the learning rate, .* or, where values have a scalar or quantile head, use"
    with pytest.raises(train.Diverged, match=rf"not finite at update \d+ \(seeds \[0\]\): {advice}"):
        online.run(settings(tmp_path), config(learning_rate=1e30))
    assert checkpoint.steps(tmp_path / "checkpoints") == ()


def test_a_policy_that_no_metric_knows_to_have_diverged_is_not_saved_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics are of before an update: after its gradient, the policy's action is the first that is not finite."""

    def advance(self: Trainer, *_: Any) -> None:
        self.action = np.full_like(self.action, math.nan)
        raise FloatingPointError("the environment returned the reward nan")

    monkeypatch.setattr(Trainer, "advance", advance)
    with pytest.raises(train.Diverged, match="the policy's actions are not finite after 0 steps: lower the"):
        online.run(settings(tmp_path), config())
    assert checkpoint.steps(tmp_path / "checkpoints") == ()


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["restart", "snapshot"])
def test_where_the_environments_are_gone_what_was_collected_is_saved(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that died, and cannot be replaced; or whose loss the last checkpoint of a stopped run finds out."""
    step = Stream.step

    def dead(self: Stream, *_: Any) -> Any:
        self.close()
        raise WorkerDied("an environment worker died")

    def ending(self: Stream, actions: np.ndarray) -> Any:
        if self._episode.sum() < 2:
            return step(self, actions)
        if failing == "snapshot":
            os.kill(os.getpid(), signal.SIGTERM)
            return step(self, actions)
        return dead(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "step", ending)
        patch.setattr(Stream, failing, dead)
        with pytest.raises(WorkerDied if failing == "restart" else train.Interrupted):
            online.run(settings(tmp_path), config())
    (at,) = checkpoint.steps(tmp_path / "checkpoints")
    assert 0 < at < 20 and saved(tmp_path, at)["loop/memory/count"] == at
    assert online.run(settings(tmp_path), config())["steps"] == 40


def test_a_process_that_dies_again_at_once_ends_the_run(tmp_path: Path, monkeypatch) -> None:
    def dead(self: Stream, actions: np.ndarray) -> Any:
        raise WorkerDied("an environment worker died")

    monkeypatch.setattr(Stream, "step", dead)
    with pytest.raises(WorkerDied):
        online.run(settings(tmp_path), config())
