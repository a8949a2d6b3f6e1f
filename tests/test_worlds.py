"""True dynamics, termination rules, mixtures and rollouts: against gymnasium, NumPy and hand-made cases."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import envs
from rl.dynamics import base, ensemble, rollout, termination, truth
from rl.envs import cartpole, cartpole_swingup, pendulum, plane
from rl.types import Spec

KEY = jax.random.key(0)


# ---- environments in JAX ----------------------------------------------------------------------------------


def test_the_pendulum_is_gymnasiums() -> None:
    env, step = envs.make("Pendulum-v1"), jax.jit(pendulum.step)
    rng = np.random.default_rng(0)
    for angle, speed in rng.uniform([-np.pi, -8], [np.pi, 8], (50, 2)):
        env.reset(seed=0)
        env.unwrapped.state = np.array([angle, speed])  # type: ignore[attr-defined]
        observation = np.array([np.cos(angle), np.sin(angle), speed], np.float32)
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        expected, expected_reward, *_ = env.step(action)
        following, reward = step(observation, action)
        np.testing.assert_allclose(following, expected, atol=2e-5)
        np.testing.assert_allclose(reward, expected_reward, rtol=1e-4, atol=1e-4)


def test_the_cart_pole_is_gymnasiums_with_any_force() -> None:
    """Step by step; CartPole-v1 pushes with one force to either side, which is set to the one that is wanted."""
    env: Any = envs.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    start, action = rng.uniform([-2, -3, -np.pi, -8], [2, 3, np.pi, 8], (50, 4)), rng.uniform(-1, 1, (50, 1))
    expected = []
    for state, force in zip(start, 10 * action[:, 0], strict=True):
        env.state, env.force_mag, env.steps_beyond_terminated = state, abs(force), None
        expected.append(env.step(int(force > 0))[0])
    seen = lambda x: np.stack([x[:, 0], x[:, 1], np.cos(x[:, 2]), np.sin(x[:, 2]), x[:, 3]], -1)
    following, reward = cartpole_swingup.step(jnp.asarray(seen(start)), jnp.asarray(action))
    np.testing.assert_allclose(following, seen(np.array(expected)), atol=2e-5)
    assert reward.min() >= 0 and reward.max() <= 1
    # gymnasium's own episodes of it are the same step, in float64; action 3 is 1.
    task: Any = envs.make("CartPoleSwingUp-v0", seed=0)
    task.reset()
    for state, push in zip(seen(start), 3 * action, strict=True):
        task.unwrapped.state = state
        row = cartpole_swingup.step(jnp.asarray(state), jnp.asarray(push))
        observation, paid, *ended, _ = task.step(push)
        np.testing.assert_allclose(observation, row[0], atol=2e-5)
        np.testing.assert_allclose(paid, row[1], atol=1e-6)
        assert ended == [False, False]


def test_the_swing_ups_reward_starts_and_track() -> None:
    from dm_control.utils import rewards

    rng = np.random.default_rng(0)
    position, speed, angle = rng.uniform(-4, 4, 30), rng.uniform(-9, 9, 30), rng.uniform(-4, 4, 30)
    force = rng.uniform(-1, 1, (30, 1))
    seen = np.stack([position, np.zeros(30), np.cos(angle), np.sin(angle), speed], -1)
    expected = (1 + np.cos(angle)) / 2  # dm_control's suite/cartpole.py, with its smooth reward
    expected *= (1 + rewards.tolerance(position, margin=2)) / 2
    expected *= (4 + rewards.tolerance(force[:, 0], margin=1, value_at_margin=0, sigmoid="quadratic")) / 5
    expected *= (1 + rewards.tolerance(speed, margin=5)) / 2
    reward = cartpole_swingup.step(jnp.asarray(seen), jnp.asarray(force))[1]
    np.testing.assert_allclose(reward, expected, rtol=1e-4, atol=1e-6)
    start = np.asarray(cartpole_swingup.reset(KEY, 1000))
    moved = np.stack([start[:, 0], start[:, 1], start[:, 3], start[:, 4]])
    assert (
        (start[:, 2] < -0.99).all() and np.abs(moved).max(1).min() > 0.045 and np.abs(moved).max() <= 0.0501
    )
    assert np.abs(moved.mean(1)).max() < 0.005  # no start is shared by all
    following, _ = cartpole_swingup.step(jnp.array([2.39, 3.0, -1.0, 0.0, 0.0]), jnp.ones(1))
    np.testing.assert_allclose(following[:2], [2.4, 0.0], rtol=1e-6)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_cart_at_the_end_of_its_track_can_be_pushed_back(side: float) -> None:
    """Held there, its pole is a rod of a metre about a fixed pivot; pushed inwards it leaves."""
    held = np.array([side * 2.4, 0.0, np.cos(2.0), np.sin(2.0), 0.0])
    for step in range(10):
        held, _ = cartpole.transit(held, np.array([side]))
        assert held[0] == side * 2.4 and held[1] == 0
        if not step:
            np.testing.assert_allclose(held[4], 0.02 * 1.5 * 9.8 * np.sin(2.0))
    for _ in range(30):
        held, _ = cartpole.transit(held, np.array([-side]))
    assert abs(held[0]) < 1.5 and held[1] * side < -1


def test_the_planes_reward_by_hand() -> None:
    hill = lambda x, y: np.exp(-((x - 4) ** 2 + (y + 3) ** 2) / 8)
    points = np.array([(0, 0), (4, -3), (-5, 2), (12, 0), (12.01, 0), (3, -13)], np.float32)
    expected = [hill(0, 0), 0.28 + 1, 0.35 + hill(-5, 2), 0.84 + hill(12, 0), -1, -1]
    reward_of = jax.jit(plane.reward)
    np.testing.assert_allclose(reward_of(points), expected, rtol=1e-5)
    following, reward = jax.jit(plane.step)(np.float32([3.5, -2.5]), np.float32([0.5, -3.0]))
    np.testing.assert_allclose(following, [4.0, -3.5])  # actions end at 1
    assert float(reward) == float(reward_of(following))


def test_no_policy_is_at_the_edge_of_reach_before_the_last_step() -> None:
    """The fastest way out, from the outermost start."""
    point = np.array([2.0, -2.0])
    reached = [point := point + np.array([1.0, -1.0]) for _ in range(10)]
    edge = [bool(plane.edge_of_reach(point, 10)) for point in reached]
    assert edge == [False] * 9 + [True]


@pytest.mark.slow
def test_the_planes_value_is_that_of_a_discretised_optimal_policy() -> None:
    """Value iteration on a grid of half steps: the oracle may be worse by what its straight way gives away."""
    axis = np.arange(-14, 14.5, 0.5)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    reward, value = np.asarray(jax.jit(plane.reward)(grid)), np.full(grid.shape[:2], 120.0)
    moves = [(i, j) for i in range(-2, 3) for j in range(-2, 3)]
    size = np.arange(len(axis))

    def arrive(x: np.ndarray, move: tuple[int, int]) -> np.ndarray:
        return x[np.ix_(*((size + step).clip(0, len(axis) - 1) for step in move))]

    for _ in range(400):
        value = np.max([arrive(reward + 0.99 * value, move) for move in moves], 0)
    oracle = np.asarray(jax.jit(plane.value)(grid, 0.99))
    inside = np.abs(grid).max(-1) <= 12
    assert 120 < value.max() < 129
    assert np.abs(oracle - value)[inside].max() < 0.025 * value.max()


# ---- when episodes end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("Hopper-v5", "Walker2d-v5", "Ant-v5", "HalfCheetah-v5", "InvertedPendulum-v5", "Humanoid-v5"),
        "CartPole-v1",
    ],
)
def test_termination_rules_are_those_of_gymnasium(name: str) -> None:
    env, rule = envs.make(name, seed=0), termination.of(name)
    env.reset()
    observations, terminations = [], []
    for _ in range(300):
        observation, _, terminated, _, _ = env.step(env.action_space.sample())
        observations.append(observation)
        terminations.append(terminated)
        if terminated:
            env.reset()
    np.testing.assert_array_equal(jax.jit(jax.vmap(rule))(np.stack(observations)), terminations)
    assert any(terminations) or name in ("Ant-v5", "HalfCheetah-v5")


BOUNDS = {  # of gymnasium's tasks: how many numbers are observed, and between which bounds some of them stay
    "hopper": (11, {0: (0.7, math.inf), 1: (-0.2, 0.2), 2: (-100, 100)}),
    "walker2d": (17, {0: (0.8, 2.0), 1: (-1, 1)}),
    "ant": (27, {0: (0.2, 1.0)}),
    "humanoid": (45, {0: (1.0, 2.0)}),
    "invertedpendulum": (4, {1: (-0.2, 0.2)}),
    "cartpole": (4, {0: (-2.4, 2.4), 2: (-math.radians(12), math.radians(12))}),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_an_episode_ends_where_a_number_leaves_its_bounds(name: str) -> None:
    """A thousandth inside and outside of each: episodes of random actions, as above, come close to few of them."""
    size, bounds = BOUNDS[name]
    well = np.zeros(size, np.float32)
    for place, (low, high) in bounds.items():
        well[place] = min(low + 0.3, (low + high) / 2)
    states, ends = [well], [False]
    for place, sides in bounds.items():
        for bound, outward in zip(sides, (-1e-3, 1e-3), strict=True):
            for step in (-outward, outward) if math.isfinite(bound) else ():
                states.append(well.copy())
                states[-1][place] = bound + step
                ends.append(step == outward)
    assert np.asarray(termination.RULES[name](np.stack(states))).tolist() == ends


def test_what_is_not_finite_ends_an_episode() -> None:
    broken = np.float32([[1.2, 0, 0, np.nan] + [0] * 7, [1.2, 0, 0, 101] + [0] * 7, [1.2] + [0] * 10])
    assert jax.jit(termination.hopper)(broken).tolist() == [True, True, False]
    assert jax.jit(termination.walker2d)(np.full(17, np.nan, np.float32))


@pytest.mark.parametrize(
    "name",
    [
        "walker2d-medium-v2",
        "minari:mujoco/walker2d/expert-v0",
        "Walker2d-v4",
        "/home/ant/walker2d-mine.hdf5",
        "minari:/home/ant/walker2d-mine-v0",
        "minari:~/hopper/mujoco/walker2d/expert-v0/data",
        "minari:/data/mujoco/walker2d/expert-v0/",
    ],
)
def test_rules_are_found_by_the_task_that_a_name_begins_with(name: str) -> None:
    assert termination.of(name) is termination.walker2d


def test_the_longest_beginning_of_a_name_is_the_task() -> None:
    """``inverted_pendulum`` has the word pendulum, whose episodes never end, and ``cartpole_swingup`` cartpole."""
    assert termination.of("data/inverted_pendulum.hdf5") is termination.inverted_pendulum
    assert termination.of("cartpole_swingup-mine.npz") is termination.never


def test_distractors_end_no_episode() -> None:
    rule = termination.of_environment("Hopper-v5+noise2")
    standing = np.array([1.2, 0.0, *[0.5] * 9, 1e3, np.nan])
    assert not rule(standing) and rule(np.array([0.6, *standing[1:]]))
    assert termination.of_environment("Hopper-v5") is termination.hopper


def test_an_environment_of_ones_own_brings_its_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_a_rule.py").write_text("def terminates(observation): return observation[..., 0] < 0")
    monkeypatch.syspath_prepend(tmp_path)
    rule = termination.of_environment("with_a_rule:Fall-v0+noise2")
    assert rule(np.array([[-1.0, 5, np.nan, 2], [1.0, 5, 0, -2]])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        (
            "(observation[..., 0] < 0).any()",
            r"bool\[\] for observations \[2, 3\]: .* each of them, bool\[2\]",
        ),
        ("observation[..., :1] < 0", r"bool\[2, 1\] for observations"),
        ("1.0 * (observation[..., 0] < 0)", r"float32\[2\] for observations"),
    ],
)
def test_a_rule_of_ones_own_says_of_each_state_whether_it_ends(
    rule: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer for all would be taken for each, and would end every rollout."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"rule_{abs(hash(rule))}"
    (tmp_path / f"{name}.py").write_text(f"def terminates(observation): return {rule}")
    with pytest.raises(ValueError, match=rf"terminates\(observation\) of {name} gives {given}"):
        jax.eval_shape(termination.of(f"{name}:Fall-v0"), jnp.zeros((2, 3)))


def test_recorded_ends_may_contradict_a_rule() -> None:
    seen, ended = np.linspace(-1, 1, 200)[:, None], np.arange(200) < 2
    assert termination.contradicted(lambda x: x[..., 0] < -0.985, seen, ended) == ""
    for rule, wrong, missed in (
        (lambda x: x[..., 0] > -0.985, 198, 2),
        (termination.never, 0, 2),
        (lambda x: x[..., 0] < -0.95, 3, 0),
    ):
        said = rf"{wrong} of 198 recorded steps .* and {missed} of 2 that ended one would not"
        assert re.search(said, termination.contradicted(rule, seen, ended))


def test_a_rule_that_cannot_be_compiled_is_refused_before_a_model_is_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy takes concrete observations, so that recorded ones say nothing against it."""
    text = "import numpy as np\ndef terminates(observation): return np.abs(observation[..., 0]) > 1\n"
    (tmp_path / "numpy_world.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    rule = termination.of("numpy_world:X-v0")
    assert rule(np.array([[2.0], [0.0]])).tolist() == [True, False]
    with pytest.raises(
        ValueError, match=r"terminates\(observation\) of numpy_world cannot be compiled.*jax\.numpy"
    ):
        termination.check(rule, Spec((1,), 1))
    termination.check(termination.hopper, Spec((11,), 3))


def test_an_environment_without_a_rule_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no termination rule for 'hoper-medium-v2': did you mean 'hopper'"):
        termination.of("hoper-medium-v2")
    with pytest.raises(ValueError, match="there are rules for ant, cartpole"):
        termination.of("antmaze-medium-v0")
    for name in (
        "/home/ant/mydata.hdf5",
        "minari:/home/ant/mine-v0",
        "minari:/data/hopper_project/pen/human-v2",
        "inverted-double-pendulum.npz",
        "my_module:Hopper-NoFall-v0",
        "my-hopper.h5",
        "ant-maze-mine.hdf5",
        "humanoid_standup.h5",
        "jax/hopper_of_mine.world",
        "dm_control/hopper-hop-v0",
    ):
        with pytest.raises(ValueError, match="no termination rule"):
            termination.of(name)
    with pytest.raises(ValueError, match=r"'point_mass:X-v0': give point_mass a function terminates\(obs"):
        termination.of("point_mass:X-v0")
    assert termination.of("jax/Pendulum-v1") is termination.never
    (tmp_path / "broken_world.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="not_there_either"):
        termination.of("broken_world:X-v0")
    assert termination.of("jax/hopper.hdf5") is termination.hopper


# ---- true dynamics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Hopper-v5", "Walker2d-v5", "HalfCheetah-v5", "Hopper-v4", "Hopper"])
def test_true_dynamics_are_the_simulators(name: str) -> None:
    """Along real episodes, their terminal steps included, where no velocity was clipped."""
    env: Any = envs.make(name, seed=0)
    inner = env.unwrapped
    rows = []
    observation, _ = env.reset()
    for _ in range(60):
        # From the observation alone, as the model is: the solver starts cold.
        position = np.concatenate([[0.0], observation[: inner.model.nq - 1]])
        inner.set_state(position, inner.data.qvel.copy())
        inner.data.qacc_warmstart[:] = 0
        action = env.action_space.sample()
        calm = np.abs(inner.data.qvel).max() < 10
        following, reward, terminated, *_ = env.step(action)
        rows.append((observation, action, following, reward, calm))
        observation = env.reset()[0] if terminated else following
    observations, actions, followings, rewards, calm = map(np.asarray, zip(*rows, strict=True))
    step = jax.jit(lambda *x: truth.of(name).step((), *x, KEY))
    predictions, reward = jax.device_get(step(observations, actions))
    assert calm.sum() >= 10
    np.testing.assert_allclose(predictions[calm], followings[calm], atol=2e-3)
    np.testing.assert_allclose(reward[calm], rewards[calm], atol=2e-3)


def test_the_simulator_takes_any_leading_axes() -> None:
    world = truth.of("Hopper-v5", threads=2)
    rng = np.random.default_rng(0)
    observation = np.float32(np.array([1.25] + [0.0] * 10) + 0.01 * rng.normal(size=(2, 3, 11)))
    action = rng.uniform(-1, 1, (2, 3, 3)).astype(np.float32)
    step = lambda o, a: world.step((), o, a, KEY)
    together, alone = jax.jit(step)(observation, action), jax.jit(jax.vmap(step))(observation, action)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    one = jax.jit(step)(observation[1, 2], action[1, 2])[0]
    np.testing.assert_array_equal(one, np.asarray(together[0])[1, 2])


def test_true_dynamics_that_nobody_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no true dynamics for 'Ant-v5'.* There are some for Pendulum-v1"):
        truth.of("Ant-v5")
    # Of one's own, whose dynamics are those of no built-in task, however they are called.
    for own in ("pendulum_heavy:Heavy-v0", "hopper:Own-v0", "Hopper-Heavy-v0"):
        with pytest.raises(ValueError, match=f"no true dynamics for '{own}'"):
            truth.of(own)


# ---- one interface ----------------------------------------------------------------------------------------


def test_the_truth_is_one_answer_without_doubt() -> None:
    world = truth.of("Pendulum-v1")
    observation, action = jax.jit(pendulum.reset, static_argnums=1)(KEY, 4), np.full((4, 1), 0.3, np.float32)

    @jax.jit
    def ask(observation: Any) -> Any:
        predicted = world.predict((), observation, action)
        doubts = base.aleatoric(*predicted), base.disagreement(*predicted)
        proposed = world.propose((), observation, action, KEY)[0]
        return pendulum.step(observation, action), predicted, proposed, doubts

    (following, reward), (mean, deviation), proposed, doubts = jax.device_get(ask(observation))
    np.testing.assert_array_equal(mean, np.concatenate([following, reward[:, None]], -1)[None])
    assert deviation.shape == mean.shape and not deviation.any()
    np.testing.assert_array_equal(proposed, following[None])
    assert not any(doubt.any() for doubt in doubts)


def small_ensemble() -> tuple[base.Dynamics, ensemble.Model]:
    config = ensemble.Config(members=3, elites=2, hidden=(8,), decay=(0.0, 0.0))
    network = ensemble.make(config, Spec((3,), 1))
    return network.dynamics, jax.jit(network.init)(KEY)


@pytest.mark.slow
def test_a_mixture_is_on_the_line_between_its_worlds() -> None:
    model, params = small_ensemble()
    real = truth.of("Pendulum-v1")
    world = base.mix(model, real)

    @jax.jit
    def ask(share: Any) -> Any:
        """The answers of the model, of the truth and of the mixture to each question."""
        observation, action = pendulum.reset(KEY, 4), jnp.full((4, 1), 0.3)
        keys, mixed = jax.random.split(KEY), base.Mixed(params, (), share)
        inputs = observation, action
        answers = {
            question: (
                getattr(model, question)(params, *inputs, keys[0]),
                getattr(real, question)((), *inputs, keys[1]),
                getattr(world, question)(mixed, *inputs, KEY),
            )
            for question in ("step", "propose")
        }
        predictions = model.predict(params, *inputs), real.predict((), *inputs), world.predict(mixed, *inputs)
        return answers, predictions

    for share in np.float32([0.0, 0.25, 1.0]):
        answers, ((mean, deviation), (other, _), (mixed_mean, spread)) = jax.device_get(ask(share))
        np.testing.assert_allclose(mixed_mean, (1 - share) * mean + share * other, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(spread, (1 - share) * deviation, rtol=1e-5)
        for of_all in answers.values():
            for a, b, c in zip(*of_all, strict=True):
                np.testing.assert_allclose(c, (1 - share) * a + share * b, rtol=1e-5, atol=1e-5)


def test_doubts_of_mixed_worlds_are_independent() -> None:
    """Their variances add up; one world without any leaves the other's alone, see above."""
    sure = base.true(lambda observation, action: (observation, observation[..., 0]))
    of = lambda deviation: sure._replace(
        predict=lambda params, *inputs: (sure.predict(params, *inputs)[0], jnp.full((1, 2, 4), deviation))
    )
    mixed = base.Mixed((), (), jnp.float32(0.5))
    _, deviation = base.mix(of(6.0), of(8.0)).predict(mixed, jnp.zeros((2, 3)), jnp.zeros((2, 1)))
    np.testing.assert_allclose(deviation, 5.0)


def test_uncertainty_by_hand() -> None:
    mean = np.float32([[[0, 0, 9]], [[6, 8, -9]], [[0, 4, 0]]])  # [M=3, B=1, O + 1 = 3]
    deviation = np.float32([[[3, 4, 0]], [[1, 2, 2]], [[0, 0, 4.9]]])
    assert jax.jit(base.aleatoric)(mean, deviation).tolist() == [5.0]
    np.testing.assert_allclose(jax.jit(base.disagreement)(mean, deviation), [np.hypot(4, 4)], rtol=1e-6)


# ---- rollouts ---------------------------------------------------------------------------------------------

# A counter: the action is added to it, the reward is where it arrives.
COUNTER = base.true(lambda observation, action: (observation + action, (observation + action)[..., 0]))


def test_rollouts_by_hand() -> None:
    """Over 3 the episode is terminated: that row is kept, later ones are not, and the state stands still.

    An action of 5 is clipped to 1, in the row, too.
    """
    over = lambda following: following[..., 0] > 3
    act = lambda observation, key: 5 * jnp.ones_like(observation)
    steps, valid = rollout.roll(COUNTER, over, act, 4, (), jnp.array([[0.0], [2.0], [5.0]]), KEY)
    assert valid.T.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]
    assert (steps.action == 1).all()
    assert steps.observation[..., 0].T.tolist() == [[0, 1, 2, 3], [2, 3, 3, 3], [5, 5, 5, 5]]
    assert steps.next_observation[:, 0, 0].tolist() == [1, 2, 3, 4]
    assert steps.reward[:2, 1].tolist() == [3, 4]
    assert steps.discount[:, 0].tolist() == [1, 1, 1, 0] and steps.discount[:2, 1].tolist() == [1, 0]
    assert not steps.has_next_action.any()


def test_what_has_ended_never_goes_on() -> None:
    """Also where the next action would not end it."""
    over = lambda following: following[..., 0] > 3
    act = lambda observation, key: jax.random.choice(key, jnp.float32([1, -1]), observation.shape)
    steps, valid = rollout.roll(COUNTER, over, act, 9, (), jnp.full((8, 1), 3.0), KEY)
    ended = np.asarray(~valid)
    assert (ended[1:] >= ended[:-1]).all()
    assert (ended & (np.asarray(steps.action[..., 0]) == -1)).any()


def test_a_world_that_breaks_down_leaves_no_nan_in_a_row_that_has_ended() -> None:
    """Hopper's rule ends an episode in a state that is not finite, and 0 times the value of NaN is NaN."""
    broken = lambda observation, action: (jnp.full_like(observation, jnp.nan), observation[..., 0])
    act = lambda observation, key: jnp.zeros(observation.shape[:-1])
    start = jnp.array([[1.25, 0.0, 0.0]])
    steps, valid = rollout.roll(base.true(broken), termination.hopper, act, 2, (), start, KEY)
    assert valid[:, 0].tolist() == [True, False] and steps.discount[0, 0] == 0
    np.testing.assert_array_equal(steps.next_observation[0], start)
    steps, _ = rollout.roll(base.true(broken), termination.never, act, 1, (), start, KEY)
    assert np.isnan(steps.next_observation).all()  # what goes on must not hide it


def test_rows_that_are_not_finite_are_not_valid_and_counted() -> None:
    """Rewards, or states where the rule ends nothing; rows after the end of an episode are not counted."""
    nan = jnp.nan

    def step(observation: Any, action: Any) -> tuple[Any, Any]:
        following = observation + 1
        return jnp.where(following == 12, nan, following), jnp.where(observation[..., 0] == 20, nan, 1.0)

    act = lambda observation, key: jnp.zeros(observation.shape[:-1])
    start = jnp.array(
        [[0.0], [10.0], [20.0], [99.0]]
    )  # sound; a state is lost; a reward is lost; ends at once
    rule = lambda observation: observation[..., 0] == 100
    rolled = rollout.roll(base.true(step), rule, act, 3, (), start, KEY)
    kept, lost = rollout.without_lost(rolled)
    assert kept.valid.T.tolist() == [
        [True] * 3,
        [True, False, False],
        [False, True, True],
        [True, False, False],
    ]
    assert lost == 3
    usable = jax.tree.map(lambda x: x[kept.valid], kept.transitions)
    assert all(np.isfinite(x).all() for x in (usable.reward, usable.observation, usable.next_observation))


def test_a_rollout_cut_by_its_length_is_not_terminated() -> None:
    steps, _ = rollout.roll(
        COUNTER, termination.never, lambda o, k: jnp.ones_like(o), 2, (), jnp.zeros((3, 1)), KEY
    )
    assert (np.asarray(steps.discount) == 1).all()


def test_the_penalty_is_taken_off_the_reward_of_the_state_it_was_asked_about() -> None:
    act = lambda observation, key: jnp.ones_like(observation)
    seen = lambda mean, deviation: 10 * mean[0, :, 0]
    start = jnp.array([[0.0], [2.0]])
    plain, _ = rollout.roll(COUNTER, termination.never, act, 3, (), start, KEY)
    doubted, _ = rollout.roll(COUNTER, termination.never, act, 3, (), start, KEY, seen)
    np.testing.assert_allclose(doubted.reward, plain.reward - 10 * plain.next_observation[..., 0])
    np.testing.assert_array_equal(doubted.next_observation, plain.next_observation)


def test_every_step_and_row_of_a_rollout_has_its_own_randomness() -> None:
    act = lambda observation, key: jax.random.uniform(key, observation.shape)
    steps, _ = rollout.roll(COUNTER, termination.never, act, 5, (), jnp.zeros((6, 1)), KEY)
    assert len(set(np.ravel(steps.action))) == 30
