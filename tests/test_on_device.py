"""rl.on_device beside the loop on the host: in a world without chance both must do the same, step for step."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import online as script
from rl import acting, agents, buffers, checkpoint, envs, interaction, keys, log, on_device, run_folder, train
from rl.envs import functional, snapshot
from rl.envs.functional import Outcome, World
from rl.envs.stream import Stream
from rl.replay.transform import Transform
from rl.types import Key, Spec, State
from rl.values import heads

LIMIT = 20
TASK = "jax/test_on_device.line"  # for whatever takes names
PREPROCESSING = Transform(reward_scale=0.5, reward_shift=0.25)


def line() -> World:
    """A point on a line, pushed by the action; it falls off at 1, and a time limit cuts after 20 steps."""

    def reset(keys: Key) -> tuple[Any, Any]:
        start = jnp.zeros((len(keys), 2))
        return start, start

    def step(keys: Key, state: Any, action: Any) -> Outcome:
        moved = jnp.stack([state[:, 0] + 0.2 * action[:, 0] + 0.01, state[:, 1] + 1 / LIMIT], -1)
        terminated = jnp.abs(moved[:, 0]) > 1
        first = terminated | (moved[:, 1] > 1 - 1e-3)
        now = jnp.where(first[:, None], 0.0, moved)
        return Outcome(moved, -jnp.abs(moved[:, 0]), terminated, now, first, now)

    return World(Spec((2,), 1), reset, step)


def screen() -> World:
    """`line` seen as bytes: an image [4, 4, 3], in all of whose pixels its place stands."""
    return seen_as(lambda x: jnp.broadcast_to(100 + 90 * x[:, :1, None, None], (len(x), 4, 4, 3)), (4, 4, 3))


def parts() -> World:
    """`line` in a dictionary of a dictionary, with an image and a history."""
    image = lambda x: jnp.broadcast_to(100 + 90 * x[:, :1, None, None], (len(x), 4, 4, 3)).astype(jnp.uint8)
    made = lambda x: {"task": {"place": x[:, :1], "past": x[:, None]}, "eye": image(x)}
    return seen_as(made, {"task": {"place": (1,), "past": (1, 2)}, "eye": (4, 4, 3)})


def keyed(scale: float = 1.0) -> World:
    """`line` that remembers a key, by which it pays."""

    def reset(keys: Key) -> tuple[Any, Any]:
        observation, state = line().reset(keys)
        return observation, (state, keys)

    def step(keys: Key, state: Any, action: Any) -> Outcome:
        made = line().step(keys, state[0], action)
        paid = scale * jax.vmap(jax.random.uniform)(state[1])
        return made._replace(reward=paid, state=(made.state, keys))

    return World(Spec((2,), 1), reset, step)


def seen_as(see: Callable[[Any], Any], shape: Any) -> World:
    """`line` with other observations; images are bytes."""
    inner = line()
    bytes_ = lambda x: x.astype(jnp.uint8) if x.ndim == 4 else x
    see_all = lambda x: jax.tree.map(bytes_, see(x))

    def reset(keys: Key) -> tuple[Any, Any]:
        first, state = inner.reset(keys)
        return see_all(first), state

    def step(keys: Key, state: Any, action: Any) -> Outcome:
        made = inner.step(keys, state, action)
        return made._replace(
            observation=see_all(made.observation), next_observation=see_all(made.next_observation)
        )

    return World(Spec(shape, 1), reset, step)


@functools.cache
def learner() -> Any:
    module = agents.get("td3")
    return module.make(module.Config(hidden=(8, 8)), line().spec, heads.make("scalar"))


def trainer(kind: str, rhythm: tuple[int, int], environments: int = 3, seeds: int = 2, **options: Any) -> Any:
    """With steps before learning that are no multiple of the environments'."""
    world: Any = line()
    if kind == "host":
        copies = [(seed, number) for seed in range(seeds) for number in range(environments)]
        world = Stream(TASK, copies, 0)
    replay = buffers.uniform(learner(), buffers.steps(environments=environments), 300, 16)
    make = on_device.Trainer if kind == "device" else interaction.Trainer
    run_keys = keys.seeds(jax.random.key(0), seeds)
    settings = {
        "rhythm": rhythm,
        "learning_starts": 40,
        "random": 25,
        "preprocessing": PREPROCESSING,
        **options,
    }
    return make(world, learner(), replay, run_keys, **settings)


def close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@pytest.mark.parametrize("rhythm", [(2, 1), pytest.param((1, 4), marks=pytest.mark.long)])
@pytest.mark.slow
def test_it_does_what_the_loop_on_the_host_does(
    rhythm: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, updates, actions, metrics and episodes, before learning and after; chunks are checked when it begins.

    A trainer is not whole then, so that nobody saves what was learned from chunks that are refused.
    """
    checked: list[Any] = []

    def check(view: Any, memory: Any) -> None:
        checked.append(int(memory.count))
        assert not (host.whole and device.whole)

    monkeypatch.setattr(buffers, "check_chunks", check)
    host, device = trainer("host", rhythm), trainer("device", rhythm)
    for each in (host, device):
        each.start()
        each.advance(60)
        each.advance(240)
    assert device.step == host.step == 240
    assert int(host.carry.state.step) == int(device.carry.state.step) > 10
    assert len(checked) == 2 and min(checked) >= 39
    close(device.carry, host.carry)
    metrics, expected = device.read(), host.read()
    assert set(metrics) == set(expected)
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_however_it_is_cut_into_calls_it_is_the_same_run() -> None:
    whole, parts = trainer("device", (1, 4)), trainer("device", (1, 4))
    whole.start()
    whole.advance(150)
    parts.start()
    parts.advance(36)
    other = trainer("device", (1, 4))
    other.resume(jax.device_get(parts.saved()), parts.step, parts.notes())
    assert not other.notes()[
        "learning"
    ]  # chunks are checked once, when it begins, and not again after a resume
    other.advance(99)
    last = trainer("device", (1, 4))
    last.resume(jax.device_get(other.saved()), other.step, other.notes())
    assert last.notes()["learning"]
    other.advance(150)
    jax.tree.map(np.testing.assert_array_equal, whole.saved(), other.saved())
    assert not parts.advance(60, stopping=[15]) and parts.step == 36


def test_the_memory_is_written_in_place() -> None:
    """XLA makes no copy of it, as it did of integer actions: a million of them in every step."""
    push = lambda keys, state, action: line().step(keys, state, 2.0 * action[:, None] - 1)
    world = World(Spec((2,), 2, discrete=True), line().reset, push)
    module = agents.get("dqn")
    dqn = module.make(module.Config(hidden=(8, 8)), world.spec, heads.make("scalar"))
    replay, run_keys = buffers.uniform(dqn, buffers.steps(), 7919, 16), keys.seeds(jax.random.key(0), 1)
    one = on_device.Trainer(world, dqn, replay, run_keys, learning_starts=40, random=40)
    one.start()
    program = one._run.lower(one._carry, None, 5, True, False).compile().as_text()
    assert "s32[1,7919]" in program
    copies = [x for x in program.splitlines() if " copy(" in x and re.search(r"\[1,7919[],]", x)]
    assert not copies


@pytest.mark.slow
def test_it_begins_with_the_learners_that_it_is_given() -> None:
    """Who choose its first actions, too."""
    device, host = (trainer(kind, (1, 1), random=0) for kind in ("device", "host"))
    with pytest.raises(RuntimeError, match="no learners yet"):
        device.advance(3)
    device.start()
    given = jax.device_get(jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, device.carry.state))
    for each in (device, host):
        each.start(jax.device_put(given))
    close(device.carry, host.carry)


def test_what_is_not_finite_ends_the_run_before_it_is_saved() -> None:
    def step(keys: Key, state: Any, action: Any) -> Outcome:
        made = line().step(keys, state, action)
        return made._replace(reward=jnp.where(state[:, 1] > 0.5, jnp.nan, made.reward))

    module = agents.get("td3")
    replay = buffers.uniform(learner(), buffers.steps(environments=2), 300, 16)
    broken = on_device.Trainer(
        line()._replace(step=step),
        module.make(module.Config(hidden=(8, 8)), line().spec, heads.make("scalar")),
        replay,
        keys.seeds(jax.random.key(0), 1),
        learning_starts=10,  # so that updates draw it, within the same call: it stays the environment's fault
        random=400,
    )
    broken.start()
    broken.advance(8)
    assert broken.whole
    with pytest.raises(FloatingPointError, match="reward or an observation that is not finite"):
        broken.advance(40)
    assert not broken.whole


def test_evaluations_play_whole_episodes() -> None:
    """Of two policies, which always push right or left: one falls off after five steps, one after six.

    A push of 5 is clipped to 1, as in training.
    """
    act = lambda state, observation, key: jnp.broadcast_to(state.params, (*observation.shape[:-1], 1))
    actor = acting.over_seeds(acting.memoryless(act), train.STACKED)
    states = State(jnp.float32([5.0, -1.0]), {}, {}, 0)
    scores = on_device.evaluator(line(), actor, 3, 2, 0)(states, 1)
    assert scores["length"].tolist() == [[5] * 3, [6] * 3]
    push = [0.21 * np.arange(1, 6), 0.19 * np.arange(1, 7)]
    np.testing.assert_allclose(scores["return"], [[-x.sum()] * 3 for x in push], rtol=1e-5)


def test_a_reward_counts_until_its_episode_is_over() -> None:
    """And what is not finite is no score: what an environment returns while others are still played is none."""
    act = lambda state, observation, key: jnp.broadcast_to(state.params, (*observation.shape[:-1], 1))
    actor = acting.over_seeds(acting.memoryless(act), train.STACKED)
    states = State(jnp.float32([1.0, -1.0]), {}, {}, 0)

    def returns(after: float) -> Any:
        """Rewards are NaN where the second number of the state is above ``after``: 10 once an episode is over."""

        def step(keys: Key, state: Any, action: Any) -> Outcome:
            made = line().step(keys, state, action)
            reward = jnp.where(state[:, 1] > after, jnp.nan, made.reward)
            return made._replace(reward=reward, state=jnp.where(made.first[:, None], 10.0, made.state))

        return on_device.evaluator(line()._replace(step=step), actor, 1, 2, 0)(states, 4)["return"]

    np.testing.assert_array_equal(
        returns(5.0), on_device.evaluator(line(), actor, 1, 2, 0)(states, 4)["return"]
    )
    with pytest.raises(FloatingPointError, match="a reward that is not finite, in evaluation 4"):
        returns(0.01)


@pytest.mark.parametrize(
    ("blind", "params", "message"),
    [
        (False, [1.0, np.nan], r"policies \[1\] \(of 2\) returned an action"),
        (False, [np.inf, -1.0], r"policies \[0\] \(of 2\) returned an action"),
        (True, [1.0, -1.0], "the environment returned an observation that is not finite, in evaluation 4"),
    ],
)
def test_whose_fault_it_is_that_an_evaluation_is_not_finite(
    blind: bool, params: list[float], message: str
) -> None:
    """Actions follow from observations, observations from actions, and rewards from both."""

    def step(keys: Key, state: Any, action: Any) -> Outcome:
        made = line().step(keys, state, action)
        return made._replace(observation=jnp.where(blind, jnp.nan, made.observation))

    act = lambda state, observation, key: state.params + 0 * observation[..., :1]
    actor = acting.over_seeds(acting.memoryless(act), train.STACKED)
    score = on_device.evaluator(line()._replace(step=step), actor, 1, 2, 0)
    with pytest.raises(FloatingPointError, match=message):
        score(State(jnp.float32(params), {}, {}, 0), 4)


def test_episodes_that_are_cut_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a policy that falls off at the very last step are over, and those of one that is a step behind are not.

    Scores alone do not tell them apart: both have that many steps.
    """
    act = lambda state, observation, key: jnp.broadcast_to(state.params, (*observation.shape[:-1], 1))
    actor = acting.over_seeds(acting.memoryless(act), train.STACKED)
    states = State(jnp.float32([1.0, -1.0]), {}, {}, 0)
    monkeypatch.setattr(on_device, "LONG_EPISODE", 5)
    with pytest.warns(UserWarning, match="^3 of 6 episodes were cut after 5 steps"):
        scores = on_device.evaluator(line(), actor, 3, 2, 0)(states, 1)
    assert (scores["length"] == 5).all()


def broken(**parts: Any) -> World:
    """`line` with other members of what its steps return, or of itself."""
    step = line().step
    made = lambda *arguments: step(*arguments)._replace(
        **{name: f(step(*arguments)) for name, f in parts.items()}
    )
    return line()._replace(step=made)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (
            line()._replace(spec=Spec((3,), 1)),
            r"first observation is float32\[2, 2\] .* float32 or uint8\[2, 3\]",
        ),
        (
            broken(reward=lambda x: x.reward[:, None]),
            r"reward is float32\[2, 1\] .* by its spec float32\[2\]",
        ),
        (broken(terminated=lambda x: x.reward), r"terminated is float32\[2\] .* bool\[2\]"),
        (broken(next_observation=lambda x: x.reward), r"next_observation is float32\[2\]"),
        (broken(observation=lambda x: {"seen": x.observation}), r"its observation is missing .*"),
        (broken(state=lambda x: (x.state,)), "its state is .* after a reset and .* after a step"),
        (line()._replace(spec=Spec((2,), 2, True)), "its step fails: "),
        (line()._replace(step=lambda *_: None), r"step must return a rl.envs.world.Outcome, not NoneType"),
        (
            broken(terminated=lambda x: x.first, first=lambda x: x.terminated & ~x.terminated),
            r"in \d+ of 100 steps with random actions terminated is true and first is not\. .*return the observation",
        ),
        (
            seen_as(lambda x: jnp.zeros((len(x), 2, 3, 4, 1)), (2, 3, 4, 1)),
            r"observation is float32\[2, 3, 4, 1\], but .* or else return it as a vector \[24\]",
        ),
        (seen_as(lambda x: x.astype(jnp.uint8), (2,)), r"uint8\[2, 2\], and networks scale only images"),
    ],
)
def test_a_world_that_is_not_as_its_spec_says_is_named(
    world: World, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert functional.make(TASK).spec == line().spec
    monkeypatch.setattr(sys.modules[__name__], "line", lambda: world)
    with pytest.raises(ValueError, match=f"^environment '{TASK}': .*{message}"):
        functional.make(TASK)


@jax.tree_util.register_pytree_node_class
class Held:
    """A state of a class that has no equality."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Held:
        return cls(*children)


def test_a_state_may_be_of_any_class(monkeypatch: pytest.MonkeyPatch) -> None:
    world = line()

    def reset(keys: Key) -> tuple[Any, Held]:
        observation, state = world.reset(keys)
        return observation, Held(state)

    def step(keys: Key, state: Held, action: Any) -> Outcome:
        outcome = world.step(keys, state.x, action)
        return outcome._replace(state=Held(outcome.state))

    monkeypatch.setattr(sys.modules[__name__], "line", lambda: World(world.spec, reset, step))
    assert functional.make(TASK).step is step


def test_one_copy_is_an_environment_of_gymnasium() -> None:
    with_name = envs.make(TASK, seed=0)
    observation, _ = with_name.reset(seed=1)
    assert observation.dtype == np.float32 and with_name.observation_space.contains(observation)
    seen = [with_name.step(np.zeros(1, np.float32)) for _ in range(LIMIT)]
    assert [x[2:4] for x in seen] == [(False, False)] * (LIMIT - 1) + [(False, True)]
    np.testing.assert_allclose(
        seen[-1][0], [0.01 * LIMIT, 1.0], rtol=1e-5
    )  # where it led, not the next start
    with envs.vector(TASK, 2, 4) as both:  # in this process, since workers hold no JAX
        both.reset([0, 1])
        assert both.step(np.ones((2, 1))).reward.tolist() == pytest.approx([-0.21] * 2)
        there = both.snapshot()
        following = both.step(np.ones((2, 1)))
        both.reset([3, 4])
        both.restore(there)
        np.testing.assert_array_equal(both.step(np.ones((2, 1))).observation, following.observation)


def test_bytes_and_dictionaries_are_the_same_on_the_host_as_on_the_device() -> None:
    """Images were vectors of floats on the host, where a network for images is then refused; dictionaries failed."""
    for name in ("screen", "parts"):
        world, host = functional.make(f"jax/test_on_device.{name}"), envs.make(f"jax/test_on_device.{name}")
        assert envs.spec(host) == world.spec
        key = lambda time: jax.random.fold_in(jax.random.key(3), time)[None]
        expected, state = world.reset(key(1))
        seen = [host.reset(seed=3)[0], host.step(np.ones(1, np.float32))[0]]
        expected = [expected, world.step(key(2), state, jnp.ones((1, 1))).next_observation]
        for one, other in zip(seen, expected, strict=True):
            assert host.observation_space.contains(one)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0], strict=True), one, other)
        image = seen[1] if name == "screen" else seen[1]["eye"]
        assert image.dtype == np.uint8 and (image == 118).all()


def test_the_host_steps_a_world_as_it_is_now_and_remembers_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was reloaded, in a notebook say, stayed the old one there; keys could not be put back."""

    def play() -> tuple[float, float]:
        env = envs.make("jax/test_on_device.keyed")
        env.reset(seed=0)
        there, action = snapshot.take(env), np.ones(1, np.float32)
        first = env.step(action)[1]
        snapshot.put(env, there)
        return first, env.step(action)[1]

    before = play()
    monkeypatch.setattr(sys.modules[__name__], "keyed", functools.partial(keyed, 100.0))
    after = play()
    assert before[0] == before[1] and after[0] == after[1] == pytest.approx(100 * before[0])


def test_pendulum_and_cart_pole_start_anew_after_their_time_limit() -> None:
    for name, limit in (("jax/Pendulum-v1", 200), ("jax/CartPoleSwingUp-v0", 250)):
        world = functional.make(name)
        run_keys = jax.random.split(jax.random.key(0), (limit + 1, 2))

        @jax.jit
        def play(run_keys: Any, world: World = world) -> tuple[Any, Any]:
            start, state = world.reset(run_keys[0])

            def step(state: Any, keys: Any) -> tuple[Any, Any]:
                made = world.step(keys, state, jnp.zeros((2, 1)))
                return made.state, made._replace(state=())

            return start, jax.lax.scan(step, state, run_keys[1:])[1]

        start, made = play(run_keys)
        assert not made.terminated.any() and made.first.all(1).tolist() == [False] * (limit - 1) + [True]
        np.testing.assert_array_equal(made.observation[:-1], made.next_observation[:-1])
        assert (made.observation[-1] != made.next_observation[-1]).any()
        assert start.shape == (2, *world.spec.observation_shape)


def test_games_of_gymnax_by_name() -> None:
    pytest.importorskip("gymnax")
    for name, spec in (("CartPole-v1", ((4,), 2, True)), ("Breakout-MinAtar", ((400,), 3, True))):
        assert functional.make(f"gymnax/{name}").spec == spec
    pendulum = functional.make("gymnax/Pendulum-v1")  # whose torque is in [-2, 2]
    assert pendulum.spec == ((3,), 1, False)
    one = jax.random.split(jax.random.key(0), 1)
    start, state = pendulum.reset(one)
    for action, torque in ((1.0, 2.0), (-0.5, -1.0), (7.0, 2.0)):
        made = pendulum.step(one, state, jnp.full((1, 1), action))
        sine, speed = start[0, 1], start[0, 2]
        np.testing.assert_allclose(
            made.next_observation[0, 2], speed + 0.05 * (15 * sine + 3 * torque), rtol=1e-4, atol=1e-4
        )
    for name, message in (
        ("gymnax/CartPole-v7", "unknown environment .*: gymnax has CartPole-v1"),
        ("jax/CartPole-v7", "unknown environment .*gymnax/CartPole-v1"),
        ("jax/test_on_device.nothing", "unknown environment"),
        ("jax/Pendulum-v1+noise3", "distractors are added on the host"),
        ("jax/test_on_device.close", "must be callable without arguments"),
        ("jax/builtins.dict", "must return a rl.envs.world.World, not dict"),
    ):
        with pytest.raises(ValueError, match=message):
            functional.make(name)
    with pytest.raises(ImportError, match="is a function of no_such_module"):
        functional.make("jax/no_such_module.make")


@pytest.mark.slow
def test_a_run_of_the_script_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    config = agents.get("td3").Config(hidden=(8, 8))
    chosen = script.Settings(
        agent="td3",
        env=TASK,
        envs=2,
        seeds=2,
        utd=0.25,
        learning_starts=40,
        eval_every=60,
        eval_episodes=2,
        save_every=60,
        replay=200,
        batch_size=16,
        tensorboard=False,
    )
    for folder, steps in (("whole", 240), ("parts", 120), ("parts", 240)):
        script.run(dataclasses.replace(chosen, steps=steps, workdir=str(tmp_path / folder)), config)
    whole, parts = (
        (tmp_path / x, checkpoint.read(tmp_path / x / run_folder.CHECKPOINTS)) for x in ("whole", "parts")
    )
    assert whole[1] and parts[1]
    for name in whole[1][1].keys() - {"seconds"}:
        np.testing.assert_array_equal(whole[1][1][name], parts[1][1][name], err_msg=name)
    assert (whole[0] / log.METRICS).read_text() == (parts[0] / log.METRICS).read_text()
    with pytest.raises(ValueError, match="relabel_success is not for environments in pure JAX"):
        script.run(dataclasses.replace(chosen, steps=240, relabel_success="success"), config)
