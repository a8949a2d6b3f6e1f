"""rl.mbpo and experiments.mbpo: batches, rollouts, fits that compile nothing, resumption, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import shutil
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm

from benchmarks.model_based import compilations
from experiments import mbpo as script
from experiments import trained
from rl import agents, checkpoint, log, mbpo, online
from rl.dynamics import ensemble, termination, value_aware
from rl.dynamics.ensemble import Ensemble
from rl.replay import ring, source
from rl.types import Learner, Spec, State, Transition

TINY = {
    "env": "Pendulum-v1",
    "model_loss": "vagram",
    "seeds": 2,
    "steps": 60,
    "utd": 2.0,
    "learning_starts": 20,
    "replay": 64,
    "batch_size": 8,
    "eval_every": 20,
    "eval_episodes": 2,
    "eval_processes": 0,
    "env_processes": 0,
    "save_every": 20,
    "model_members": 2,
    "model_elites": 1,
    "model_hidden": (8,),
    "model_batch_size": 16,
    "model_max_epochs": 2,
    "plain_steps": 10,
    "retrain_every": 10,
    "rollouts": 8,
    "rollout_length": "0,30,1,4",
    "model_share": "23,24,0,1",
    "model_replay": 64,
    "tensorboard": False,
}


def settings(workdir: Path, **changes: Any) -> script.Settings:
    return script.Settings(**TINY | {"workdir": str(workdir)} | changes)


def config(agent: str = "sac", **changes: Any) -> Any:
    return dataclasses.replace(agents.get(agent).Config(), hidden=(8,), **changes)


# ---- schedules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ends",
    [(20_000, 150_000, 1, 5), (0, 7, 1, 25), (3, 3, 1, 4), (0, 0, 2, 2), (5, 50, 9, 1), (0, 22, 1, 23)],
)
def test_lengths_are_the_whole_part_of_a_truncated_line(ends: tuple[int, int, int, int]) -> None:
    """Against fractions: floats alone would make 2 of some 3."""
    start, end, first, last = ends
    schedule = mbpo.Schedule(*ends)
    for step in {*range(0, end + 10, max(1, end // 997)), start, start + 1, end - 1, end}:
        part = Fraction(step >= end) if end == start else Fraction(step - start, end - start)
        part = min(max(part, Fraction(0)), Fraction(1))
        exact = first + (last - first) * part
        assert mbpo.rollout_length(schedule, step) == exact.numerator // exact.denominator, step
        assert mbpo.value(schedule, step) == pytest.approx(float(exact))
    traced = jax.jit(lambda step: mbpo.value(schedule, step, jnp))(jnp.array([start - 1, end]))
    np.testing.assert_allclose(traced, [first, last])


@pytest.mark.parametrize(
    ("updates", "period", "environments", "starts"), [(2, 1, 1, 20), (1, 4, 3, 30), (3, 1, 2, 8)]
)
def test_the_share_follows_the_step_at_which_an_update_is_made(
    updates: int, period: int, environments: int, starts: int
) -> None:
    """Against the rule by which `rl.interaction.Trainer` makes updates, step by step."""
    expected = [
        step - starts
        for step in range(environments, 100, environments)
        if step > starts and step % (environments * period) == 0
        for _ in range(updates)
    ]
    rhythm = mbpo.Rhythm(updates, period, environments, starts)
    assert [mbpo._steps_learned(rhythm, number) for number in range(len(expected))] == expected


# ---- batches ---------------------------------------------------------------------------------------------------


def reporter() -> Learner:
    """A learner that reports where its batches come from."""

    def update(state: State, batch: Transition, key: Any) -> tuple[State, Any]:
        return state._replace(step=state.step + 1), {
            "mixed": (batch.origin.min() != batch.origin.max()) * 1.0,
            "model": (batch.origin == source.MODEL).mean(),
            "logged": source.is_logged(batch).mean(),
            "newest": jnp.where(batch.origin == source.MODEL, batch.reward, 9).min(),
            "other": jnp.where(batch.origin == source.MODEL, 0, jnp.abs(batch.reward)).max(),
        }

    def act(state: State, observation: Any, key: Any) -> Any:
        return observation[..., :1] / 100

    return Learner(lambda key, batch: State({}, {}, {}, jnp.zeros((), jnp.int32)), update, act, None, act)


SPEC = Spec((2,), 1)
SMALL = ensemble.Config(members=2, elites=1, hidden=(4,), decay=(0.0, 0.0))


def test_batches_are_wholly_of_one_source_with_the_share_asked_for_and_of_the_newest_rows() -> None:
    chosen = mbpo.Config(
        replay=10, model_replay=20, rollouts=4, batch_size=4, model_share=mbpo.Schedule(100, 200, 0.0, 1.0)
    )
    rhythm = mbpo.Rhythm(updates=4, period=1, environments=1, learning_starts=30)
    network = ensemble.make(SMALL, SPEC)
    replay = mbpo.replay(chosen, reporter(), network, rhythm)
    seen, scalar = np.zeros(2, np.float32), np.float32(0)
    row = ring.Row(seen, np.zeros(1, np.float32), scalar, scalar, seen, np.zeros((), bool))
    memory = replay.insert(replay.empty(row), jax.tree.map(lambda x: x[None], row))
    rewards = jnp.arange(10.0, 30.0)  # of the model's rows, in order of age
    rows = memory.rollouts.rows._replace(reward=rewards)
    memory = memory._replace(rollouts=ring.Ring(rows, jnp.int32(0), jnp.int32(20)), newest=jnp.int32(5))
    learn = jax.jit(replay.learn(400))
    at = lambda step: State({}, {}, {}, jnp.int32(4 * step))
    key = jax.random.key(0)
    early, midway, late = (learn(at(step), memory, None, None, key)[2].metrics for step in (0, 100, 200))
    for metrics in (early, midway, late):
        assert metrics["mixed"] == 0 and metrics["logged"] == 0 and metrics["other"] == 0
    # 400 updates are 100 steps of the schedule: none, from 0 to 1, all.
    assert early["model"] == 0 and late["model"] == 1
    assert abs(midway["model"] - 0.5) < 0.08
    # Of 20 rows with rewards 10 to 29 the last 5 may be drawn; the least of four such draws is 25.8 on average.
    assert 25 <= late["newest"] < 26.5


# ---- rollouts --------------------------------------------------------------------------------------------------


def counting_world() -> Ensemble:
    """s' = s + 1 in both dimensions, r = s_0; the second dimension becomes infinite beyond 100."""

    def step(model: Any, observation: Any, action: Any, key: Any) -> Any:
        following = observation + 1
        following = following.at[..., 1].set(jnp.where(following[..., 1] > 100, jnp.inf, following[..., 1]))
        return following, observation[..., 0]

    return stepping(step)


def stepping(step: Any) -> Ensemble:
    """An ensemble whose rollouts are steps of another world."""
    network = ensemble.make(SMALL, SPEC)
    return network._replace(dynamics=network.dynamics._replace(step=step))


def test_rows_of_rollouts_obey_length_and_ends_and_are_finite() -> None:
    """One program for all lengths; against Python loops over the episodes that it must have seen."""
    chosen = mbpo.Config(rollouts=16, rollout_length=mbpo.Schedule(0, 0, 3, 3), model_replay=64)
    ends = lambda observation: observation[..., 0] >= 12
    network = counting_world()
    imagine = jax.jit(mbpo.imagination(chosen, reporter(), network, ends))
    seen = jnp.array([[0.0, 0.0], [10.0, 0.0], [20.0, 0.0], [0.0, 99.0]])  # the third starts beyond the end
    columns = (jnp.zeros((4, 1)), jnp.zeros(4), jnp.ones(4), seen, jnp.zeros(4, bool))
    steps = ring.Ring(ring.Row(seen, *columns), jnp.int32(0), jnp.int32(4))
    row = Transition(seen[0], jnp.zeros(1), *[jnp.zeros(())] * 2, seen[0], jnp.zeros(1), jnp.zeros(()))
    for length in (1, 2, 3):
        filled, metrics = imagine(
            ring.empty(row, 64), steps, (), State({}, {}, {}, 0), jax.random.key(0), length
        )
        count = int(filled.count)
        rows = jax.tree.map(lambda x, count=count: np.asarray(x[:count]), filled.rows)
        assert np.isfinite(rows.next_observation).all()
        starts = collections.Counter(map(tuple, rows.observation[rows.observation[:, 0] % 10 == 0]))
        expected, lost = collections.Counter(), 0
        for start, times in starts.items():
            observation = np.array(start)
            for _ in range(length):
                following = observation + 1
                if following[1] > 100:  # and whatever comes after it
                    break
                ended = following[0] >= 12
                expected[(*observation, observation[0], 1.0 - ended, *following, observation[0] / 100)] += (
                    times
                )
                observation = following
                if ended:
                    break
        stored = zip(
            rows.observation, rows.reward, rows.discount, rows.next_observation, rows.action, strict=True
        )
        actual = collections.Counter(
            (*map(float, o), float(r), float(d), *map(float, n), pytest.approx(float(a[0])).expected)
            for o, r, d, n, a in stored
        )
        rounded = lambda counter: {tuple(np.round(key, 4)): n for key, n in counter.items()}
        assert rounded(actual) == rounded(expected)
        assert sum(starts.values()) == 16 and len(starts) == 4
        assert metrics["rollout_length"] == count / 16
        # Rollouts from (0, 99) step to 100 once and are then infinite.
        lost = starts[0.0, 99.0] * (length - 1)
        assert metrics["lost"] == pytest.approx(lost / (lost + count))
        np.testing.assert_allclose(metrics["rollout_reward"], rows.reward.mean(), rtol=1e-5)


def test_every_step_of_a_rollout_has_draws_of_its_own() -> None:
    """In a world whose rewards are its noise."""
    world = lambda model, observation, action, key: (observation, jnp.full(4, jax.random.uniform(key)))
    chosen = mbpo.Config(rollouts=4, rollout_length=mbpo.Schedule(0, 0, 3, 3), model_replay=12)
    never = lambda observation: jnp.zeros(len(observation), bool)
    network = stepping(world)
    imagine = jax.jit(mbpo.imagination(chosen, reporter(), network, never))
    seen, number = jnp.zeros(2), jnp.zeros(())
    steps = ring.Row(seen, jnp.zeros(1), number, number, seen, jnp.zeros((), bool))
    rows = Transition(seen, jnp.zeros(1), number, number, seen, jnp.zeros(1), number)
    held = ring.empty(steps, 4)._replace(count=jnp.int32(4))
    filled, _ = imagine(ring.empty(rows, 12), held, (), State({}, {}, {}, 0), jax.random.key(0), 3)
    assert len(np.unique(filled.rows.reward)) == 3


# ---- a run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course() -> Iterator[dict[str, Any]]:
    """A trainer that ran to step 60, with what it said, saved and compiled on its way, and what each fit was given."""
    chosen, make, fits = settings(Path()), ensemble.make, []

    def watched(*arguments: Any) -> Ensemble:
        network = make(*arguments)

        def fit(data: Any, key: Any, model: Any, context: Any) -> Any:
            fits.append((np.asarray(jax.random.key_data(key)), model, np.asarray(context.plain)))
            return network.fit(data, key, model, context)

        return network._replace(fit=fit)

    with script.interaction.stepper(chosen) as stream:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ensemble, "make", watched)
            loop = script.make_loop(chosen, config(), stream.spec, termination.of_environment(chosen.env))
        trainer = script.make_trainer(chosen, stream, loop)
        trainer.start(None)
        metrics: dict[int, Any] = {}
        states: dict[Any, Any] = {}
        compiled: dict[int, list[str]] = {}
        for step in (20, 21, 22, 40, 41, 43, 44, 60):
            with compilations() as compiled[step]:
                trainer.advance(step, tqdm.tqdm(disable=True), [])
            metrics[step] = trainer.read()
            states[step] = jax.tree.map(np.array, trainer.saved()), trainer.notes()
            if step == 40:  # where a run is left if its environment fails in the next step
                trainer._retrain()
                states["fitted"] = jax.tree.map(np.array, trainer.saved()), trainer.notes()
        yield {"trainer": trainer, "said": metrics, "kept": states, "compiled": compiled, "fits": list(fits)}


@pytest.mark.slow
def test_every_program_compiles_once_while_schedules_move(course: dict[str, Any]) -> None:
    """Four fits and rollouts of 1, 2, 3 and 4 steps; the first fit is made between steps 20 and 21."""
    lengths = [float(course["said"][step]["model/rollout_length"][0]) for step in (22, 40, 41, 60)]
    assert lengths == [1, 2, 3, 4]
    once = collections.Counter(course["compiled"][20] + course["compiled"][21])
    for name in ("store", "imagine", "prepare"):
        assert once[name] == 1, name
    assert once["call"] == 3  # of a fit: its beginning, what is between two checks, and its end
    assert once["learn"] == 3  # with random actions, without updates, with updates
    assert not [x for step in (22, 40, 41, 43, 44, 60) for x in course["compiled"][step]]


@pytest.mark.slow
def test_the_share_is_that_of_the_schedule_to_the_step(course: dict[str, Any]) -> None:
    share = {
        step: metrics["train/model_share"]
        for step, metrics in course["said"].items()
        if "train/model_share" in metrics
    }
    for step in (21, 22, 40, 41, 43):  # up to 23 steps after learning began
        np.testing.assert_array_equal(share[step], 0.0)
    for step in (44, 60):
        np.testing.assert_array_equal(share[step], 1.0)


@pytest.mark.slow
def test_older_rows_of_rollouts_are_left_out_while_rollouts_are_short(course: dict[str, Any]) -> None:
    """Of 64 rows that are kept when rollouts have 4 steps, 16 for each step that they have."""
    newest = [course["kept"][step][0]["loop"].memory.newest for step in (21, 40, 41, 60)]
    assert newest == [16, 32, 48, 64]
    counts = [course["kept"][step][0]["loop"].memory.rollouts.count.tolist() for step in (21, 40, 41, 60)]
    assert counts == [[8, 8], [24, 24], [48, 48], [64, 64]]


@pytest.mark.slow
def test_a_fit_goes_on_from_the_last_with_keys_and_values_of_its_own(course: dict[str, Any]) -> None:
    """Four fits of two seeds; plain error is added in the first 10 steps, that is by the first."""
    fit_keys, models, plain = zip(*course["fits"], strict=True)
    assert len(models) == 4 and models[0] is None
    for model, step in zip(models[1:], (22, 40, 41), strict=True):  # those of steps 20, 30 and 40
        jax.tree.map(np.testing.assert_array_equal, model, course["kept"][step][0]["loop"].memory.model)
    assert len(np.unique(np.concatenate(fit_keys), axis=0)) == 8
    np.testing.assert_array_equal(plain, [[1, 1], [0, 0], [0, 0], [0, 0]])
    kernel = models[1].members[0]["kernel"]
    assert (kernel[0] != kernel[1]).any()


@pytest.mark.slow
def test_rollouts_after_each_fit_start_from_draws_of_their_own(course: dict[str, Any]) -> None:
    """From one memory, as if it were that of two fits: their numbers differ, and so do the steps they start from."""
    trainer, starts = course["trainer"], []
    for step in (30, 40):
        saved, notes = course["kept"][40]
        trainer.resume(jax.tree.map(jnp.array, saved), 40, notes)
        before = trainer.carry.memory.rollouts.head[0]
        carry, _ = trainer._retraining.run(trainer.carry, step)
        rows = carry.memory.rollouts.rows.observation[0]
        starts.append(np.asarray(rows)[(int(before) + np.arange(8)) % len(rows)])
    assert (starts[0] != starts[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("where", [22, 40, "fitted", 41])
def test_it_goes_on_to_the_same_bits_from_either_side_of_a_fit(where: Any, course: dict[str, Any]) -> None:
    """The fit of step 40 is made before step 41, or was made already."""
    trainer = course["trainer"]
    saved, notes = course["kept"][where]
    trainer.retrained, trainer.model_metrics = -1, {}
    trainer.resume(saved, 22 if where == 22 else 41 if where == 41 else 40, notes)
    trainer.advance(60, tqdm.tqdm(disable=True), [])
    # What was said on the way was not read here.
    again, before = trainer.saved(), course["kept"][60][0]
    fresh = before["loop"].tally
    jax.tree.map(
        np.testing.assert_array_equal,
        (again["state"], again["loop"]._replace(tally=fresh), again["action"]),
        (before["state"], before["loop"], before["action"]),
    )
    metrics = {f"model/{name}": value for name, value in trainer.model_metrics.items()}
    assert metrics and all((course["said"][60][name] == value).all() for name, value in metrics.items())


def test_a_model_that_diverged_is_named_with_its_step() -> None:
    """Not one that lost a few rows of many, which no update sees."""
    mbpo.check_rollouts({"lost": np.array([0.0, 1e-3])}, 300)
    with pytest.raises(
        FloatingPointError, match=r"step 300: the dynamics diverged: a share of 0.25.*seeds \[1\]"
    ):
        mbpo.check_rollouts({"lost": np.array([5e-4, 0.25])}, 300)


@pytest.mark.parametrize("where", ["run", "check"])
def test_a_model_whose_rollouts_diverged_is_not_saved(where: str) -> None:
    """Else the same command would fit it on, and fill the ring of rollouts twice; a fit that failed left no trace."""

    def fail(*_: Any) -> Any:
        raise FloatingPointError("the dynamics model diverged")

    chosen = settings(Path(), model_loss="mle", seeds=1)
    with script.interaction.stepper(chosen) as stream:
        loop = script.make_loop(chosen, config(), stream.spec, termination.never)
        run = fail if where == "run" else lambda carry, step: ("diverged", {})
        retraining = loop.retraining._replace(due=lambda step: True, run=run, check=fail)
        trainer = script.make_trainer(chosen, stream, loop._replace(retraining=retraining))
        trainer.carry = types.SimpleNamespace(time=0)  # as if it had begun, without compiling a learner
        with pytest.raises(FloatingPointError):
            trainer.advance(20, tqdm.tqdm(disable=True), [])
    assert trainer.whole == (where == "run") and (trainer.carry == "diverged") == (where == "check")


# ---- the script --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_ends_by_a_model_is_saved_and_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step at which the model diverges, in the middle; with a head and beside distractors."""
    changes = {
        "env": "Pendulum-v1+noise2",
        "model_loss": "mle",
        "seeds": 1,
        "head": "hl_gauss",
        "head_low": -50.0,
        "head_high": 9.0,
    }
    make = ensemble.make

    def failing(*arguments: Any) -> Ensemble:
        def fit(*_: Any) -> Any:
            raise FloatingPointError("the dynamics model diverged: lower its learning rate")

        return make(*arguments)._replace(fit=fit)

    whole = script.run(settings(tmp_path / "whole", **changes), config())
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "60")
    (tmp_path / "cut" / log.RESULT).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(ensemble, "make", failing)
        with pytest.raises(FloatingPointError, match="at environment step 40: the dynamics model diverged"):
            script.run(settings(tmp_path / "cut", **changes), config())
    assert checkpoint.read(tmp_path / "cut" / "checkpoints")[0]["step"] == 40
    again = script.run(settings(tmp_path / "cut", **changes), config())
    assert again["updates"] == whole["updates"] == 80
    assert (tmp_path / "cut" / log.METRICS).read_text() == (tmp_path / "whole" / log.METRICS).read_text()
    one, other = (checkpoint.read(tmp_path / name / "checkpoints")[1] for name in ("whole", "cut"))
    for name in one.keys() - {"seconds"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    last = log.read(tmp_path / "whole")[-1]
    assert {"eval/return", "train/model_share", "model/error", "model/rollout_reward"} <= set(last)
    assert (tmp_path / "whole" / "curve.png").stat().st_size > 0
    assert len(list((tmp_path / "whole" / "actors").iterdir())) == 3
    chosen = trained.Settings(episodes=len(last["eval/return"][0]), eval_processes=0)
    played = trained.scores(trained.load(tmp_path / "whole"), chosen, 3)
    np.testing.assert_array_equal(played["return"], last["eval/return"])
    with pytest.raises(
        checkpoint.CheckpointError, match="model_loss: 'mle' in the checkpoint, 'mse' in this"
    ):
        script.run(settings(tmp_path / "whole", **changes | {"model_loss": "mse"}), config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout_length": "30,10,1,4"},
            "--rollout_length: the schedule runs backwards, from step 30 to step 10",
        ),
        ({"model_share": "30,10,0,1"}, "--model_share: the schedule runs backwards"),
        ({"model_share": "0,10,0,1.5"}, "--model_share: 0 and 1.5 must be shares between 0 and 1"),
        (
            {"rollout_length": "201", "model_replay": 9999},
            "--rollout_length=201: episodes of Pendulum-v1 end after 200 steps",
        ),
        ({"rollout_length": "0"}, "--rollout_length: rollouts must have at least 1 step"),
        ({"rollout_length": "1,2,3"}, "--rollout_length=1,2,3: a schedule is four numbers"),
        ({"rollout_length": "long"}, "--rollout_length=long is neither a number"),
        ({"rollout_length": "inf,1,2,3"}, "--rollout_length=inf must be finite"),
        (
            {"model_replay": 31},
            "--model_replay=31 cannot hold the 8 rollouts of 4 steps .*: give at least 32",
        ),
        ({"rollouts": 0}, "--rollouts=0 must be at least 1"),
        ({"learning_starts": 1}, "learning_starts=1: a model needs 2 steps"),
        ({"envs": 2, "retrain_every": 5}, "--retrain_every=5 is not a multiple of --envs=2"),
        ({"plain_steps": -1}, "--plain_steps=-1 must not be negative"),
        ({"model_elites": 3}, "--model_elites=3 must be between 1 and members=2"),
        ({"model_patience": 0}, "--model_patience=0 of the dynamics model must be at least 1"),
        ({"model_loss": "vagran"}, r"--model_loss='vagran': did you mean 'vagram'"),
        ({"env": "MountainCarContinuous-v0"}, "no termination rule for 'MountainCarContinuous-v0'"),
        ({"env": "Pendulum-v1+distractors"}, r"\+distractors names no distractors"),
        (
            {"agent": "bc"},
            "--model_loss=vagram asks the agent's critics .* --agent=bc has none: .* mse or standardised",
        ),
        ({"agent": "bc", "model_loss": "mle"}, "cannot act in rollouts: it has no explore"),
        ({"agent": "dqn"}, "agent 'dqn' cannot act in continuous actions"),
        (
            {"head": "hl_gauss"},
            r"--head=hl_gauss needs --head_low .*sac adds to rewards, .* can shift targets by -99 to \+68.62",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_compiles(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.interaction, "train", lambda *_: pytest.fail("it would have run"))
    chosen = settings(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        script.run(chosen, agents.get(chosen.agent).Config())


def test_the_policy_that_is_exported_is_the_one_that_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CQN acts by its target network, unless it is told not to."""
    monkeypatch.setattr(script.interaction, "train", lambda *_, slow=False, whole=False: {"slow": slow})
    monkeypatch.setattr(script, "make_trainer", lambda *_: None)
    chosen = settings(tmp_path, agent="cqn", model_loss="mle")
    for slow in (True, False):
        config = dataclasses.replace(agents.get("cqn").Config(), slow_policy=slow)
        assert script.run(chosen, config)["slow"] == slow


@pytest.mark.parametrize(
    ("origin", "why"),
    [
        (1, "there are no logged data"),
        (source.ONLINE, "must be at least 0"),
        (source.MODEL, "must be at least 0"),
    ],
)
def test_no_row_is_a_demonstration(
    origin: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the agent's steps, which have an origin here, too, nor the model's rows."""
    monkeypatch.setattr(script.interaction, "stepper", lambda *_: pytest.fail("it would have run"))
    for agent in ("arsq", "cqn"):
        demonstrations = dataclasses.replace(agents.get(agent).Config(), demonstrations=origin)
        with pytest.raises(ValueError, match=rf"demonstrations={origin} .*{why}"):
            script.run(settings(tmp_path, agent=agent), demonstrations)


def test_observations_that_are_no_vectors_are_refused() -> None:
    """Images, and dictionaries; no environment with a rule has any."""
    for shape in ((84, 84, 3), {"task": (2,), "clock": (1,)}):
        with pytest.raises(ValueError, match="--env=Pendulum-v1: "):
            script.make_loop(settings(Path()), config(), Spec(shape, 1), lambda observation: observation)


@pytest.mark.parametrize(("agent", "loss"), [("dqn", "vagram"), ("dqn", "mle"), ("td3", "taylor")])
def test_other_agents_and_integer_actions_go_as_well(agent: str, loss: str) -> None:
    """The model takes integer actions one-hot; V(s) of an agent without a policy is the value of its best action."""
    spec, key = Spec((4,), 2, discrete=agent == "dqn"), jax.random.key(0)
    chosen = settings(Path(), agent=agent, model_loss=loss)
    rule = lambda observation: observation[..., 0] > 1
    loop = script.make_loop(chosen, config(agent), spec, rule)
    network = ensemble.make(dataclasses.replace(script.model_config(chosen), deterministic=False), spec)
    batch = online.example(spec)._replace(origin=jnp.ones(1, jnp.int32))
    row = ring.Row(*jax.tree.map(lambda x: x[0], batch[:5]), first=jnp.zeros((), bool))

    def everything() -> Any:
        state, memory = loop.learner.init(key, batch), loop.replay.empty(row)
        imagine = mbpo.imagination(script.loop_config(chosen), loop.learner, network, rule)
        rollouts, _ = imagine(memory.rollouts, memory.environment, memory.model, state, key, 2)
        state, *_ = loop.replay.learn(1)(state, memory._replace(rollouts=rollouts), None, None, key)
        return rollouts, value_aware.of_learner(loop.learner)(state, row.observation)

    rollouts, values = jax.eval_shape(everything)
    assert rollouts.rows.action.dtype == (jnp.int32 if spec.discrete else jnp.float32)
    assert values.shape == ((2,) if spec.discrete else (4,))  # online and target critics
