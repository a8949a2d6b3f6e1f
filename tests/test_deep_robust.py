"""Robust targets for any agent: closed forms, the duals in expectation, and the flag that turns them on."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import offline
from experiments.papers import robust_deep
from rl import agents, checkpoint, locks, log
from rl.agents import relabel, robust
from rl.data import synthetic
from rl.dynamics import ensemble
from rl.replay import dataset as replay
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import heads
from rl.values.robust import REGULARISED

KEY = jax.random.key(0)
DIVERGENCES = sorted(REGULARISED)
CONTINUOUS = ("arsq", "cql", "cqn", "edac", "fql", "ifql", "iql", "rebrac", "sac", "sac_n", "td3", "td3_bc")
DISCRETE = ("cql", "dqn", "iql")


# ---- one backup, seen from the agent's side ---------------------------------------------------------------


def observer() -> Learner:
    """A learner that shows the batch it is given; the value of an observation is its first number."""

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        return state, batch._asdict()

    return Learner(lambda key, batch: None, update, lambda *_: None, lambda state, seen, key: seen[..., 0])


def rows(next_values: list[float], discount: float = 1.0) -> Transition:
    """A batch with these logged next values and actions that tell their rows apart."""
    count = len(next_values)
    numbers = np.arange(count, dtype=np.float32)
    return Transition(
        observation=np.zeros((count, 1), np.float32),
        action=numbers[:, None],
        reward=numbers,
        discount=np.full(count, discount, np.float32),
        next_observation=np.float32(next_values)[:, None],
        next_action=100 + numbers[:, None],
        has_next_action=np.ones(count, np.float32),
        origin=np.arange(count, dtype=np.int32),
    )


def proposals(*values: Array | float) -> robust.Propose:
    """The same next states for every row."""
    return lambda observation, action, key: jnp.broadcast_to(
        jnp.asarray(values)[:, None, None], (len(values), *observation.shape)
    )


@functools.partial(jax.jit, static_argnames=("divergence", "draws"))
def updates(
    batch: Transition, proposed: tuple[float, ...], divergence: str, scale: float, draws: int
) -> Metrics:
    """One program for all values, proposals and prices."""
    learner = robust.make(observer(), proposals(*proposed), divergence, scale, 0.9)
    return jax.vmap(lambda key: learner.update(None, batch, key)[1])(jax.random.split(KEY, draws))


def shown(
    batch: Transition, proposed: tuple[float, ...], divergence: str, scale: float, draws: int
) -> dict[str, np.ndarray]:
    """What the agent sees of ``batch`` in each of ``draws`` updates."""
    seen = jax.device_get(updates(batch, proposed, divergence, scale, draws))
    return {name: value.astype(np.float64) for name, value in seen.items()}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("scale", [0.3, 1.0, 20.0])
def test_the_expected_target_is_the_dual(divergence: str, scale: float) -> None:
    """reward + discount * V(next), averaged over draws, is the formula of `rl.values.robust`."""
    next_values, proposed = [0.5, -1.0, 3.0], (0.0, 2.0, 2.5)
    seen = shown(rows(next_values), proposed, divergence, scale, 4000)
    target = seen["reward"] + 0.9 * seen["next_observation"][..., 0]
    samples = np.float32([[*proposed, logged] for logged in next_values])
    dual = np.asarray(jax.jit(REGULARISED[divergence])(samples, np.full(4, 0.25, np.float32), scale))
    standard_error = target.std(0) / np.sqrt(4000)
    assert (np.abs(target.mean(0) - (np.arange(3) + 0.9 * dual)) < 4 * standard_error + 1e-5).all()
    loss = (samples.mean(-1) - dual).mean()  # reported without any noise of the draw
    np.testing.assert_allclose(seen["robust_loss"], np.full(4000, loss), atol=1e-5)
    price = (seen["reward"] - np.arange(3)).mean(-1) / 0.9
    np.testing.assert_allclose(seen["robust_price"], price, atol=1e-5)


@pytest.mark.slow
def test_a_proposal_that_ends_its_episode_is_worth_nothing() -> None:
    """The adversary finds the fall, whatever value the agent has for fallen states; rows that it draws it for end."""
    fallen = lambda seen: seen[..., 0] > 4.0
    learner = robust.make(observer(), proposals(2.0, 5.0), "tv", 0.5, 0.9, fallen)
    batch = rows([3.0, 9.0])  # the logged 9 did not end its episode: the row says so
    seen = jax.vmap(lambda key: learner.update(None, batch, key)[1])(jax.random.split(KEY, 3000))
    drawn, alive = seen["next_observation"][..., 0], seen["discount"]
    np.testing.assert_array_equal(alive, drawn != 5.0)
    target = seen["reward"] + 0.9 * alive * drawn
    samples = np.float32([[2.0, 0.0, 3.0], [2.0, 0.0, 9.0]])
    dual = np.asarray(REGULARISED["tv"](samples, np.full(3, 1 / 3, np.float32), 0.5))
    np.testing.assert_allclose(target.mean(0), [0.9 * dual[0], 1 + 0.9 * dual[1]], atol=0.05)


@pytest.mark.slow
def test_a_proposal_that_is_not_finite_is_an_end_where_the_rule_says_so() -> None:
    """As the rules of MuJoCo's robots do: the agent then sees numbers, of which a discount of 0 makes nothing."""
    lost = lambda seen: ~jnp.isfinite(seen[..., 0])
    learner = robust.make(observer(), proposals(jnp.nan), "tv", 0.5, 0.9, lost)
    seen = jax.vmap(lambda key: learner.update(None, rows([0.25]), key)[1])(jax.random.split(KEY, 100))
    assert {0.0, 1.0} == set(np.unique(seen["discount"])) and np.isfinite(seen["next_observation"]).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_price_that_none_can_pay_leaves_the_mean_over_proposals(divergence: str) -> None:
    seen = shown(rows([1.0]), (0.0, 5.0), divergence, 1e7, 3000)
    np.testing.assert_allclose(seen["reward"], 0.0, atol=1e-5)
    chosen = seen["next_observation"][:, 0, 0]
    assert all(abs((chosen == value).mean() - 1 / 3) < 0.04 for value in (0.0, 1.0, 5.0))


@pytest.mark.slow
def test_a_price_of_next_to_nothing_leaves_the_worst_case() -> None:
    for divergence in DIVERGENCES:
        seen = shown(rows([1.0, -7.0]), (0.0, 5.0), divergence, 1e-6, 50)
        assert (seen["next_observation"][..., 0] == [0.0, -7.0]).all()
        np.testing.assert_allclose(seen["reward"], np.broadcast_to([0.0, 1.0], (50, 2)), atol=1e-4)


def test_terminated_rows_keep_everything() -> None:
    batch = rows([3.0, 4.0], discount=0.0)
    seen = shown(batch, (-9.0,), "tv", 0.1, 20)
    for name, value in batch._asdict().items():
        np.testing.assert_array_equal(seen[name], np.broadcast_to(value, seen[name].shape), err_msg=name)
    assert not seen["robust_loss"].any()


def test_a_next_state_that_was_not_logged_has_no_logged_action() -> None:
    seen = shown(rows([1.0, 1.0]), (0.0,), "tv", 1e7, 200)
    logged = seen["next_observation"][..., 0] == 1.0
    assert logged.any() and not logged.all()
    np.testing.assert_array_equal(seen["has_next_action"], logged)
    np.testing.assert_array_equal(
        seen["next_action"][..., 0], np.where(logged, [[100, 101]], [[0, 1]]).astype(np.float32)
    )


def test_two_states_learn_their_closed_form() -> None:
    """Both states lead to either with probability 1/2, and pay 0 and 1: V(1) = V(0) + 1.

    At price lambda < 1 in total variation, V(0) = gamma (V(0) + lambda / 2) = gamma lambda / (2 (1 - gamma)).
    """
    gamma, price = 0.8, 0.4

    def update(values: Array, batch: Transition, key: Key) -> tuple[Array, Metrics]:
        state, following = (x[:, 0].astype(int) for x in (batch.observation, batch.next_observation))
        error = batch.reward + gamma * batch.discount * values[following] - values[state]
        return values + 0.02 * jnp.zeros(2).at[state].add(error), {}

    def value(values: Array, observation: Array, key: Key) -> Array:
        return values[observation[..., 0].astype(int)]

    table = Learner(lambda key, batch: None, update, lambda *_: None, value)
    states = np.tile(np.float32([0, 1]), 8)
    batch = rows([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [1.0] * 4)
    batch = batch._replace(observation=states[:, None], reward=states)
    learner = robust.make(table, proposals(0.0, 1.0), "tv", price, gamma)

    def step(values: Array, key: Key) -> tuple[Array, Array]:
        values, _ = learner.update(values, batch, key)
        return values, values

    history = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(2), jax.random.split(KEY, 3000))[1])()
    zero = gamma * price / (2 * (1 - gamma))
    np.testing.assert_allclose(np.asarray(history)[1000:].mean(0), [zero, zero + 1], atol=0.03)


# ---- every agent ------------------------------------------------------------------------------------------


def small(agent: str, kind: str, **fields: Any) -> Any:
    values = {"hidden": (8,), "critics": 2, "samples": 2, "flow_steps": 2} | fields
    config = agents.get(agent).Config
    known = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in known})


load = functools.cache(synthetic.load)


def built(agent: str, kind: str, head: Any, **fields: Any) -> tuple[Learner, Transition]:
    loaded = load(f"synthetic-{kind}")
    learner = agents.get(agent).make(small(agent, kind, **fields), loaded.spec, head, optax.sgd)
    return learner, replay.take(loaded.dataset, np.arange(6))


AGENTS = [(agent, "continuous") for agent in CONTINUOUS] + [(agent, "discrete") for agent in DISCRETE]


def test_every_agent_but_cloning_has_a_value() -> None:
    assert {"bc", "deas", *CONTINUOUS, *DISCRETE, *agents.GOALS} == set(agents.AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "kind", "fields"),
    [(*pair, {}) for pair in AGENTS if pair[0] != "cqn"]
    + [(agent, "continuous", {"backup_entropy": True}) for agent in ("cql", "sac")]
    + [("dqn", "discrete", {"temperature": 0.7}), ("td3", "continuous", {"aggregation": "pessimistic"})],
)  # entropy is in the target of whoever chooses so; CQN has a target for every bin: tests/test_cqn.py
def test_value_is_what_targets_continue_with(agent: str, kind: str, fields: dict[str, Any]) -> None:
    """The targets that an update forms, caught at the head, are reward + discount * value(next observation)."""
    caught = []

    def target(reward: Array, discount: Array, outputs: Array) -> Array:
        caught.append(reward + discount * outputs[..., 0])
        return caught[-1]

    head = heads.scalar()._replace(target=target)
    # SAC moves policy and temperature first: at learning rate 0 it forms its target from the state it was given.
    still = {"learning_rate": 0.0, "policy_noise": 0.0, "critic_cloning": 0.0, "backup_entropy": False}
    still |= fields
    if agent == "arsq":
        still["critics"] = 1  # so that its value of s is the one from which its advantage of (s, a) is taken
    learner, batch = built(agent, kind, head, **still)
    number, of = {"cql": (1, 3), "edac": (1, 2), "sac": (1, 2), "sac_n": (1, 2)}.get(agent, (0, 2))

    @jax.jit
    def targets() -> tuple[Array, Array]:
        state = learner.init(KEY, batch)
        learner.update(state, batch, KEY)
        value = learner.value(state, batch.next_observation, jax.random.split(KEY, of)[number])
        expected = batch.reward + 0.99 * batch.discount * value
        if agent == "arsq":  # what its V has for a target is moved by the action's advantage
            q = learner.critics(state, batch.observation, batch.action)
            expected = expected - (q - learner.value(state, batch.observation, KEY))
        return caught[-1], expected

    np.testing.assert_allclose(*targets(), rtol=1e-5, atol=1e-6)


def crossed() -> list[Any]:
    """Every agent with every head; in CI each agent with one, and one agent with each."""
    rare = lambda agent, head: [pytest.mark.long] * (head != "hl_gauss" and agent != "iql")
    return [pytest.param(*pair, head, marks=rare(pair[0], head)) for pair in AGENTS for head in heads.NAMES]


@pytest.mark.parametrize(("agent", "kind", "head"), crossed())
def test_every_agent_with_every_head_takes_robust_targets(agent: str, kind: str, head: str) -> None:
    """Shapes and types only, so that nothing is compiled: the arithmetic is the same for all of them."""
    learner, batch = built(agent, kind, heads.make(head, -20.0, 1.0, 11))

    def propose(observation: Array, action: Array, key: Key) -> Array:
        return observation + jax.random.normal(key, (3, *observation.shape))

    plain: list[set[str]] = []  # the metrics of the learner itself

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        state, metrics = learner.update(state, batch, key)
        plain.append(set(metrics))
        return state, metrics

    wrapped = robust.make(learner._replace(update=update), propose, "tv", 0.5, 0.99)
    state = jax.eval_shape(wrapped.init, KEY, batch)
    after, metrics = jax.eval_shape(wrapped.update, state, batch, KEY)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), after
    )
    assert [metrics.keys() - {"robust_loss", "robust_price"}] == plain
    assert metrics.keys() >= {"robust_loss", "robust_price"}
    assert all((m.shape, m.dtype) == ((), jnp.float32) for m in metrics.values())
    assert wrapped.act is learner.act


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "kind"), [("iql", "continuous"), ("dqn", "discrete")])
def test_a_model_that_is_sure_changes_nothing(agent: str, kind: str) -> None:
    """Where all proposals are the logged next state: to the bit, for agents that use no randomness."""
    learner, batch = built(agent, kind, heads.scalar())
    certain = lambda observation, action, key: jnp.stack([batch.next_observation] * 3)
    # What its update is given, so that one compiled update serves both.
    handed_on = learner._replace(update=lambda *arguments: (arguments, {}))
    wrapped = robust.make(handed_on, certain, "kl", 0.1, 0.99)
    update, state = jax.jit(learner.update), jax.jit(learner.init)(KEY, batch)
    arguments, metrics = jax.jit(wrapped.update)(state, batch, KEY)
    jax.tree.map(np.testing.assert_array_equal, update(*arguments)[0], update(state, batch, KEY)[0])
    assert metrics["robust_loss"] == metrics["robust_price"] == 0


@pytest.mark.slow
def test_a_model_that_is_sure_costs_nothing_under_a_noisy_policy() -> None:
    """Equal next states have equal values, though soft actor-critic draws an action at each of them."""
    learner, batch = built("sac", "continuous", heads.scalar())
    certain = lambda observation, action, key: jnp.stack([batch.next_observation] * 3)
    wrapped = robust.make(learner, certain, "tv", 0.5, 0.99)
    metrics = jax.jit(lambda: wrapped.update(wrapped.init(KEY, batch), batch, KEY)[1])()
    assert metrics["robust_loss"] == metrics["robust_price"] == 0


def test_a_relabelling_and_the_update_after_it_have_draws_of_their_own() -> None:
    """Or the adversary would know which actions the targets draw."""
    told = lambda name, key: {name: tuple(jax.random.key_data(key).tolist())}
    learner = Learner(
        lambda *_: None,
        lambda state, batch, key: (state, told("update", key)),
        lambda *_: None,
        weighted=lambda state, batch, weight, key: (state, told("update", key), weight),
    )
    of = relabel.make(learner, lambda state, batch, key: (batch, told("relabel", key)))
    assert of.weighted is not None
    for metrics in (of.update((), (), KEY)[1], of.weighted((), (), (), KEY)[1]):
        assert len({*metrics.values(), tuple(jax.random.key_data(KEY).tolist())}) == 3


@pytest.mark.slow
def test_weighted_updates_have_robust_targets_too() -> None:
    """With weights of 1 they are those of ``update``, which is not the plain one."""
    learner, batch = built("dqn", "discrete", heads.scalar())
    wrapped = robust.make(learner, lambda o, a, key: batch.next_observation[None] + 5.0, "tv", 0.01, 0.99)

    @jax.jit
    def updates() -> tuple[Any, ...]:
        state, ones = learner.init(KEY, batch), jnp.ones_like(batch.reward)
        plain = learner.update(state, batch, KEY)[0]
        return plain, wrapped.update(state, batch, KEY), wrapped.weighted(state, batch, ones, KEY)

    plain, updated, (*weighed, _) = jax.device_get(updates())
    jax.tree.map(np.testing.assert_array_equal, updated, tuple(weighed))
    params = plain.params, updated[0].params
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, params), strict=True))


@pytest.mark.slow
def test_a_deep_agent_turns_from_a_gamble_when_shifts_are_cheap() -> None:
    """Action 0 leads to a state worth 0.5; action 1 to one worth 1.2 or 0, at even odds: 0.6, or 0.2 at price 0.4."""
    start, safe, win, lose = np.eye(4, dtype=np.float32)
    steps = [(start, 0, safe, 0, 1), (start, 0, safe, 0, 1), (start, 1, win, 0, 1), (start, 1, lose, 0, 1)]
    steps += [(s, a, s, r, 0) for s, r in ((safe, 0.5), (win, 1.2), (lose, 0.0)) for a in (0, 1)]
    observation, action, following, reward, discount = map(np.asarray, zip(*steps, strict=True))
    batch = Transition(
        observation, action, reward.astype(np.float32), discount.astype(np.float32), following, action, 0 * reward
    )  # fmt: skip

    def propose(observation: Array, action: Array, key: Key) -> Array:
        gamble = (observation[:, :1] > 0) & (action[:, None] == 1)
        return jnp.stack([jnp.where(gamble, end, batch.next_observation) for end in (win, lose)])

    config = agents.get("dqn").Config(hidden=(32,), learning_rate=1e-2, target_rate=0.1, discount=0.9)
    plain = agents.get("dqn").make(config, Spec((4,), 2, discrete=True), heads.scalar())

    def trained(learner: Learner) -> tuple[Array, Array]:
        state, _ = jax.lax.scan(
            lambda state, key: (learner.update(state, batch, key)[0], None),
            learner.init(KEY, batch),
            jax.random.split(KEY, 1000),
        )
        return learner.value(state, start, KEY), learner.act(state, start, KEY)

    learners = plain, robust.make(plain, propose, "tv", 0.4, config.discount)
    values, chosen = zip(*jax.jit(lambda: [trained(learner) for learner in learners])(), strict=True)
    assert list(chosen) == [1, 0]
    np.testing.assert_allclose(values, [0.9 * 0.6, 0.9 * 0.5], atol=0.05)


@pytest.mark.parametrize(
    ("agent", "divergence", "scale", "message"),
    [
        ("bc", "tv", 1.0, "this agent has no value to be robust about"),
        ("iql", "wasserstein", 1.0, "divergence='wasserstein': choose one of tv, kl, chi2"),
        ("iql", "tv", 0.0, "the robust scale must be positive, not 0.0"),
        ("iql", "tv", float("nan"), "the robust scale must be positive, not nan"),
    ],
)
def test_what_cannot_be_robust_is_refused(agent: str, divergence: str, scale: float, message: str) -> None:
    learner, _ = built(agent, "continuous", heads.scalar())
    with pytest.raises(ValueError, match=message):
        robust.make(learner, proposals(0.0), divergence, scale, 0.99)


# ---- the flag -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small dynamics model, whose programs all runs of a test share."""
    tiny = functools.partial(ensemble.Config, members=2, elites=2, hidden=(8,), decay=(0.0, 0.0))
    monkeypatch.setattr(offline.ensemble, "Config", tiny)
    monkeypatch.setattr(offline.ensemble, "make", functools.cache(ensemble.make))


def chosen(workdir: Path, **changes: Any) -> offline.Settings:
    small = {"seeds": 2, "updates": 6, "eval_every": 3, "batch_size": 8, "tensorboard": False}
    robustly = {"robust": "tv", "robust_scale": 0.5, "robust_updates": 20}
    return offline.Settings(**small | robustly | {"workdir": str(workdir)} | changes)


CONFIG = agents.get("iql").Config(hidden=(8,))


def arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    from orbax.checkpoint import v1 as ocp

    leaves = ocp.load(workdir / "checkpoints" / str(step) / "arrays")
    return {name: np.asarray(value) for name, value in leaves.items() if name != "seconds"}


@pytest.mark.long
def test_a_resumed_robust_run_has_the_bits_of_one_that_was_not_stopped(
    small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the model of its checkpoint: nothing is fitted again. Another price is another run."""
    offline.run(chosen(tmp_path / "once", updates=6), CONFIG)
    offline.run(chosen(tmp_path / "twice", updates=3), CONFIG)
    monkeypatch.setattr(offline, "fit_dynamics", lambda *_: pytest.fail("it was fitted twice"))
    result = offline.run(chosen(tmp_path / "twice", updates=6), CONFIG)
    once, twice = arrays(tmp_path / "once", 6), arrays(tmp_path / "twice", 6)
    assert any("dynamics" in name for name in once)
    assert once.keys() == twice.keys()
    for name, value in once.items():
        assert value.tobytes() == twice[name].tobytes(), name
    log_of = [(tmp_path / name / log.METRICS).read_bytes() for name in ("once", "twice")]
    assert log_of[0] == log_of[1] and b"train/robust_loss" in log_of[0]
    assert result["settings"]["robust"] == "tv"
    with pytest.raises(checkpoint.CheckpointError, match=r"robust_scale: 0\.5 in the checkpoint, 2"):
        offline.run(chosen(tmp_path / "once", robust_scale=2.0), CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"robust": "l2"}, "--robust='l2': choose one of tv, kl, chi2"),
        ({"robust_scale": 0.0}, "--robust_scale=0.0 and --robust_updates=20 must be positive"),
        ({"robust_updates": 0}, "--robust_scale=0.5 and --robust_updates=0 must be positive"),
    ],
)
def test_settings_that_cannot_be_run_name_their_flag(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        offline.run(chosen(tmp_path, **changes), CONFIG)


def test_an_agent_without_a_value_is_refused_before_anything_is_fitted(
    small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "fit_dynamics", lambda *_: pytest.fail("too late"))
    with pytest.raises(ValueError, match="no value to be robust about"):
        offline.run(chosen(tmp_path, agent="bc"), agents.get("bc").Config(hidden=(8,)))


def test_the_folder_is_held_while_the_model_is_fitted(
    small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def fit(*_: Any) -> None:
        held.append(locks.holder(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "fit_dynamics", fit)
    with pytest.raises(KeyboardInterrupt):
        offline.run(chosen(tmp_path), CONFIG)
    assert len(held) == 1 and (held[0] or "").startswith("process ")


# ---- the study ----------------------------------------------------------------------------------------------


def test_worlds_change_what_they_say_and_nothing_else() -> None:
    names = ("gravity", "body_mass", "body_inertia", "dof_damping")

    def of(env: Any) -> dict[str, np.ndarray]:
        model = env.unwrapped.model
        return {
            name: np.array(model.opt.gravity if name == "gravity" else getattr(model, name)) for name in names
        }

    nominal = of(robust_deep.build())
    for world, changed in {
        "gravity": {"gravity"},
        "pole mass": {"body_mass", "body_inertia"},
        "joint friction": {"dof_damping"},
    }.items():
        perturbed = of(robust_deep.build(world, 3.0))
        assert {name for name in names if (perturbed[name] != nominal[name]).any()} == changed
        for name in changed:
            scaled, original = (
                x[-1] for x in (perturbed[name], nominal[name])
            )  # of the pole, where there are several
            np.testing.assert_allclose(scaled, 3 * original)
    np.testing.assert_array_equal(
        of(robust_deep.build("pole mass", 3.0))["body_mass"][:-1], nominal["body_mass"][:-1]
    )
    with pytest.raises(
        ValueError, match="unknown world 'wind': known are gravity, pole mass, joint friction"
    ):
        robust_deep.build("wind", 2.0)


def test_forces_are_the_five_steps_and_their_kicks() -> None:
    quiet = robust_deep.Settings(kick=0.0)
    forces = robust_deep.force(quiet, np.arange(5), np.random.default_rng(0))
    np.testing.assert_array_equal(forces[:, 0], [-1, -0.5, 0, 0.5, 1])
    kicked = robust_deep.force(robust_deep.Settings(kick=0.2), np.full(5000, 2), np.random.default_rng(0))
    assert abs(kicked.std() - 0.2) < 0.01 and kicked.dtype == np.float32 and kicked.shape == (5000, 1)


def test_equal_seeds_log_equal_data() -> None:
    chosen = robust_deep.Settings(steps=60)
    one, same, other = (robust_deep.collect(chosen, seed).transitions for seed in (1, 1, 2))
    assert one.reward.shape == (60,) and set(one.action) <= set(range(5)) and len(set(one.action)) > 1
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (one.observation != other.observation).any()


@pytest.mark.long
def test_the_study_compares_variants_within_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust_deep, "VARIANTS", {"plain": None, "TV": ("tv", 0.3)})
    monkeypatch.setattr(robust_deep, "WORLDS", {"gravity": (1.0, 3.0)})
    monkeypatch.setattr(robust_deep, "DYNAMICS", dataclasses.replace(robust_deep.DYNAMICS, updates=20))
    chosen = robust_deep.Settings(seeds=2, steps=200, updates=3, episodes=2, limit=10, out=str(tmp_path))
    result = robust_deep.run(chosen)
    assert result["returns"]["TV"]["gravity"].shape == (2, 2)
    assert "robust_loss" in result["metrics"]["TV"]
    row = result["summary"][-1]
    assert (row["variant"], row["world"], row["factor"]) == ("TV", "gravity", 3.0)
    gain = result["returns"]["TV"]["gravity"][1] - result["returns"]["plain"]["gravity"][1]
    np.testing.assert_allclose(row["gain"], gain.mean())
    assert (tmp_path / "gravity.png").read_bytes()[:4] == b"\x89PNG"
    assert "| TV | " in (tmp_path / "README.md").read_text() and (tmp_path / "result.json").exists()
    with pytest.raises(ValueError, match="--seeds=1: an interval over seeds needs at least 2"):
        robust_deep.run(dataclasses.replace(chosen, seeds=1))
