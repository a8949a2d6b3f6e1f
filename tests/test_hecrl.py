"""rl.agents.hecrl: its losses against NumPy, its selection by hand, and its memory against a loop over steps.

Networks of the learner are linear here; those that it has are rl.networks.entity's, of test_entity.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_agents import HIGH, LOW, SIZE, descend, float64, numpy_head, smallest

from rl import acting
from rl.agents import hecrl, subgoals
from rl.agents.optimisers import Adam
from rl.networks import entity
from rl.networks.base import Network
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION, GoalBatch
from rl.types import Spec, State, Transition
from rl.values import heads

COUNT, FEATURES, ACTIONS, ROWS = 3, 2, 2, 6
SPEC = goals.conditioned_spec(Spec((COUNT, FEATURES), ACTIONS))
KEY = jax.random.key(0)
TINY = entity.Shape(width=4, inner=4, heads=1, layers=1)


def batch_of(*shape: int) -> GoalBatch:
    """Observations [ROWS, *shape]."""
    rng = np.random.default_rng(0)
    states = lambda: rng.normal(size=(ROWS, *shape)).astype(np.float32)
    actions = lambda: rng.uniform(-1, 1, (ROWS, ACTIONS)).astype(np.float32)
    ones, goal = np.ones(ROWS, np.float32), states()
    reward = (np.arange(ROWS) % 3 == 0) - ones
    before, after = ({OBSERVATION: states(), GOAL: goal} for _ in range(2))
    steps = Transition(before, actions(), reward, ones, after, actions(), ones)
    return GoalBatch(steps, states(), states(), states())


# ---- losses -------------------------------------------------------------------------------------------------


def of_means(x: Any, s: Any, g: Any, action: Any = None) -> Any:
    """A linear function of mean entities, mean goal entities and the action: in NumPy and in JAX."""
    parts = [s.mean(-2), g.mean(-2)] + ([] if action is None else [action])
    lead = jnp.broadcast_shapes(*(part.shape[:-1] for part in parts))
    module = np if isinstance(s, np.ndarray) else jnp
    return module.concatenate([module.broadcast_to(p, lead + p.shape[-1:]) for p in parts], -1) @ x


def linear(outputs: int, call: Any = of_means) -> Network:
    def init(key: Any, s: Any, g: Any, action: Any = None) -> Any:
        return jnp.zeros((2 * FEATURES + (0 if action is None else ACTIONS), outputs))

    return Network(init, call)


def moved(x: Any, s: Any, g: Any) -> Any:
    """Entities, all shifted by the same."""
    return s + of_means(x, s, g)[..., None, :]


def linear_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the learner build such; the denoiser does not look at the time."""
    monkeypatch.setattr(entity, "state_value", lambda outputs, shape: linear(outputs))
    monkeypatch.setattr(entity, "critic", lambda outputs, shape: linear(outputs))
    tanh = lambda x, s, g: jnp.tanh(of_means(x, s, g))
    monkeypatch.setattr(entity, "deterministic_policy", lambda size, shape: linear(size, tanh))
    monkeypatch.setattr(entity, "regressor", lambda features, shape: linear(features, moved))
    denoise = lambda x, noisy, time, s, g: moved(x, s, g)
    start = lambda key, noisy, time, s, g: jnp.zeros((2 * FEATURES, FEATURES))
    monkeypatch.setattr(entity, "denoiser", lambda features, shape: Network(start, denoise))


@pytest.mark.parametrize(
    ("head", "subgoals"), [("scalar", "none"), ("quantile", "awr"), ("c51", "diffusion")]
)
def test_one_update_is_the_docstrings_equations(
    head: str, subgoals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A diffusion that predicts the subgoal and does not look at the noise has a loss without chance."""
    linear_networks(monkeypatch)
    config = hecrl.Config(
        discount=0.7,
        radius=-1.0,
        alpha=0.3,
        target_rate=0.3,
        learning_rate=0.1,
        subgoals=subgoals,
        prediction="x0",
        awr_temperature=4.0,
        **dict.fromkeys(
            ("critic_optimiser", "value_optimiser", "policy_optimiser", "subgoal_optimiser"), Adam()
        ),
    )
    learner = hecrl.make(config, SPEC, heads.make(head, LOW, HIGH, SIZE), optax.sgd)
    batch, rng = batch_of(COUNT, FEATURES), np.random.default_rng(1)
    state = jax.eval_shape(learner.init, KEY, batch)
    fill = lambda x: rng.normal(0, 3.0, x.shape).astype(np.float32)
    state = state._replace(
        params=jax.tree.map(fill, state.params), target=jax.tree.map(fill, state.target), step=np.int32(0)
    )
    after, metrics = jax.device_get(jax.jit(learner.update)(state, batch, KEY))

    h, online, slow, b = numpy_head(head), float64(state.params), float64(state.target), float64(batch)
    s, g, a = b.value.observation[OBSERVATION], b.value.observation[GOAL], b.value.action
    s_next = b.value.next_observation[OBSERVATION]
    members = lambda x, *inputs: np.stack([of_means(member, *inputs) for member in x])
    q_slow = smallest(h, members(slow["critic"], s, g, a))
    weight = np.where(h.value(q_slow) < h.value(of_means(online["value"], s, g)), 0.1, 0.9)
    v_target = h.target(np.zeros(ROWS), np.ones(ROWS), q_slow)
    q_target = h.target(b.value.reward, np.full(ROWS, 0.7), of_means(online["value"], s_next, g))
    clipped = h.clipped(b.value.reward, np.full(ROWS, 0.7), of_means(online["value"], s_next, g))
    if head in ("scalar", "quantile"):
        clipped = ((q_target > 0) | (q_target < -1 / 0.3)).mean()
        assert (q_target > 0).any() and (q_target < -1 / 0.3).any(), (
            "choose parameters for which it is clipped"
        )
        q_target = np.clip(q_target, -1 / 0.3, 0)
    act = lambda x: np.tanh(of_means(x, s, b.actor_goal))
    q = lambda action: h.value(of_means(online["critic"][0], s, b.actor_goal, action))
    scale = 1 / np.abs(q(act(online["policy"]))).mean()
    losses = {
        "value": lambda x: (weight * h.loss(of_means(x, s, g), v_target)).mean(),
        "critic": lambda x: sum(h.loss(m, q_target).mean() for m in members(x, s, g, a)),
        "policy": lambda x: 0.3 * ((act(x) - a) ** 2).mean() - scale * q(act(x)).mean(),
    }
    error = lambda x: moved(x, s, b.actor_goal) - b.actor_subgoal
    if subgoals == "awr":
        v = lambda x: h.value(of_means(online["value"], x, b.actor_goal))
        gain = np.minimum(np.exp(4.0 * (v(b.actor_subgoal) - v(s))), 100)
        assert gain.max() == 100 > gain.min(), "choose parameters for which some weights are capped"
        losses["subgoal"] = lambda x: (gain * (error(x) ** 2).mean((1, 2))).mean()
    elif subgoals == "diffusion":
        losses["subgoal"] = lambda x: np.abs(error(x)).mean()
    assert set(after.params) == set(losses)
    expected = descend(online, 0.1, **losses)
    for name, x in expected.items():
        np.testing.assert_allclose(after.params[name], x, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(metrics[f"{name}_loss"], losses[name](online[name]), rtol=1e-4)
    reported = {
        "cloning": ((act(online["policy"]) - a) ** 2).mean(),
        "clipped": clipped,
        "q": h.value(members(online["critic"], s, g, a)).mean(),
        "v": h.value(of_means(online["value"], s, g)).mean(),
    }
    for name, number in reported.items():
        np.testing.assert_allclose(metrics[name], number, rtol=1e-4, atol=1e-5, err_msg=name)
    critic = 0.7 * slow["critic"] + 0.3 * expected["critic"]
    np.testing.assert_allclose(after.target["critic"], critic, rtol=1e-4, atol=1e-4)

    seen, taken = batch.value.observation, batch.value.action
    value, q_now = jax.jit(lambda: (learner.value(state, seen, KEY), learner.critics(state, seen, taken)))()
    np.testing.assert_allclose(value, h.value(of_means(online["value"], s, g)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(q_now, h.value(members(online["critic"], s, g, a)), rtol=1e-4, atol=1e-4)
    if subgoals == "diffusion":  # which ends at what it predicts, the same for all noises here
        proposal = hecrl.networks(config, SPEC, heads.make(head, LOW, HIGH, SIZE)).proposal
        assert proposal is not None
        drawn = jax.jit(proposal.draw)(state.params["subgoal"], seen[OBSERVATION], batch.actor_goal, KEY)
        proposed = moved(online["subgoal"], s, b.actor_goal)[:, None]
        np.testing.assert_allclose(drawn, np.broadcast_to(proposed, drawn.shape), rtol=1e-3, atol=1e-3)


# ---- selection ----------------------------------------------------------------------------------------------

NEAR, FAR = [-10.0, -40.0, -29.0], [-50.0, -1.0, -20.0]  # V(s, w) and V(w, g) of three candidates


@pytest.mark.parametrize(
    ("settings", "near", "at_once", "index", "is_goal"),
    [
        ({}, NEAR, -60.0, 2, False),  # the best of those that are near enough
        ({}, [-30.0, -40.0, -30.1], -60.0, 0, False),  # the radius itself is near enough
        ({}, NEAR, -20.0, 2, False),  # as good as the candidate
        ({}, NEAR, -19.0, 2, True),  # better than the candidate
        ({"direct": False}, NEAR, -19.0, 2, False),
        ({}, [-31.0, -40.0, -99.0], -60.0, None, True),  # nothing is feasible
        ({"direct": False}, [-31.0, -40.0, -99.0], -60.0, None, True),
        ({"filtered": False}, NEAR, -2.0, 1, False),
        ({"filtered": False}, NEAR, -0.5, 1, True),
        ({"filtered": False, "direct": False}, NEAR, -0.5, 1, False),
        ({"radius": -9.0}, NEAR, -60.0, None, True),
    ],
)
def test_selection(settings: Any, near: Any, at_once: float, index: int | None, is_goal: bool) -> None:
    """In a row of its own, beside another one."""
    config = hecrl.Config(**settings)
    rows = (
        jnp.array([[0.0, 0.0, 0.0], near]),
        jnp.array([[-5.0, -4.0, -6.0], FAR]),
        jnp.array([-60.0, at_once]),
    )
    candidate, whether = subgoals.select(config, *rows, KEY)
    assert (candidate[0], whether[0]) == (1, False)
    assert whether[1] == is_goal and index in (None, candidate[1])


def test_a_random_choice_is_among_all_that_are_feasible() -> None:
    choose = lambda key: subgoals.select(
        hecrl.Config(choice="random"), jnp.array([*NEAR, 0.0]), jnp.array([*FAR, -9.0]), jnp.array(-60.0), key
    )
    index, is_goal = jax.vmap(choose)(jax.random.split(KEY, 300))
    counts = np.bincount(index, minlength=4)
    assert not is_goal.any() and counts[1] == 0 and (counts[[0, 2, 3]] > 60).all()


# ---- acting -------------------------------------------------------------------------------------------------

SHARES = np.array([0.25, 0.6, 0.9, 1.3], np.float32)  # of the way to the goal: candidates
PLAY = {"candidates": len(SHARES), "replan_every": 3, "max_subgoals": 2, "radius": -6.0}


def values(s: Any, g: Any) -> Any:
    """[...]: minus the distance of all entities; away from the origin it is five times as far as back to it."""
    return -4 * abs(s - g).mean((-2, -1)) + 6 * (abs(s).mean((-2, -1)) - abs(g).mean((-2, -1)))


def by_hand(*_: Any) -> hecrl.Networks:
    def draw(params: Any, s: Any, g: Any, key: Any) -> Any:
        return s[..., None, :, :] + SHARES[:, None, None] * (g - s)[..., None, :, :]

    return hecrl.Networks(
        value=Network(lambda *_: {}, lambda params, s, g: values(s, g)[..., None]),
        critic=linear(1),
        policy=Network(lambda *_: {}, lambda params, s, g: jnp.tanh(g.mean(-2) - s.mean(-2))),
        proposal=subgoals.Proposal(lambda *_: {}, lambda *_: 0, draw),
    )


def loop(seen: np.ndarray, goal: np.ndarray, first: np.ndarray) -> list[np.ndarray]:
    """What one environment pursues in every step, by the algorithm box."""
    pursued, time = [], 0
    for s, starts in zip(seen, first, strict=True):
        time = 0 if starts else time
        if time % 3 == 0:
            candidates = [s + share * (goal - s) for share in SHARES]
            feasible = [w for w in candidates if values(s, w) >= -6]
            best = max(feasible, key=lambda w: values(w, goal), default=None)
            over = time // 3 >= 2
            subgoal = goal if over or best is None or values(s, goal) > values(best, goal) else best
        pursued.append(subgoal)
        time += 1
    return pursued


def test_subgoals_hold_are_replaced_run_out_and_start_anew_in_every_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four environments, whose episodes end at different times and whose goals differ in how far they are."""
    monkeypatch.setattr(hecrl, "networks", by_hand)
    monkeypatch.setattr(subgoals, "AT_ONCE", 2 * len(SHARES))  # two groups
    spec = goals.conditioned_spec(Spec((COUNT, FEATURES), FEATURES))
    of = hecrl.make(hecrl.Config(**PLAY), spec, heads.scalar())
    actor, subgoal = of.actor, of.subgoal
    assert actor is not None and subgoal is not None
    state = State({"value": {}, "policy": {}, "subgoal": {}, "critic": {}}, {}, {}, jnp.zeros((), jnp.int32))
    steps, rng = 24, np.random.default_rng(0)
    seen = rng.normal(0, 0.1, (steps, 4, COUNT, FEATURES)).astype(np.float32)
    far = np.float32([0.02, 0.3, 1.0, 30.0])[:, None, None]  # none, some or all candidates are too far
    goal = far * rng.normal(size=(4, COUNT, FEATURES)).astype(np.float32)
    first = np.zeros((steps, 4), bool)
    first[0] = first[4, 1] = first[10, 2] = first[11, 2] = first[17, 3] = True
    act = jax.jit(actor.act)
    memory = actor.start(state, {OBSERVATION: seen[0], GOAL: goal})
    actions, pursued = [], []
    for time in range(steps):
        observation = {OBSERVATION: seen[time], GOAL: goal}
        action, memory = act(state, memory, observation, first[time], KEY)
        actions.append(action)
        pursued.append(subgoal(state, memory, observation, goal[:1]))
    expected = np.stack([loop(seen[:, i], goal[i], first[:, i]) for i in range(4)], 1)
    np.testing.assert_allclose(np.stack(pursued), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.stack(actions), np.tanh(expected.mean(-2) - seen.mean(-2)), rtol=1e-4, atol=1e-6
    )
    at_goal = (expected == goal).all((2, 3))
    assert at_goal[:, 0].mean() > 0.3 and at_goal[:3, 3].all() and not at_goal[:4, 1].any()


def test_planning_waits_until_it_is_due_and_takes_no_more_memory_for_more_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a population of seeds; traced, not compiled."""
    monkeypatch.setattr(hecrl, "networks", by_hand)
    monkeypatch.setattr(subgoals, "AT_ONCE", 10 * len(SHARES))
    spec = goals.conditioned_spec(Spec((COUNT, FEATURES), FEATURES))
    learner = hecrl.make(hecrl.Config(**PLAY), spec, heads.scalar())
    assert learner.actor is not None
    actor, largest = acting.over_seeds(learner.actor, 0), []
    states = State({"value": {}, "policy": {}, "subgoal": {}, "critic": {}}, {}, {}, jnp.zeros(2, jnp.int32))
    for count in (20, 60):
        seen = np.zeros((2, count, COUNT, FEATURES), np.float32)
        observation, first = {OBSERVATION: seen, GOAL: seen}, np.zeros((2, count), bool)
        memory = jax.eval_shape(actor.start, states, observation)
        program = str(jax.make_jaxpr(actor.act)(states, memory, observation, first, jax.random.split(KEY)))
        assert " cond[" in program
        shapes = re.findall(rf"f32\[([\d,]+),{len(SHARES)},{COUNT},{FEATURES}\]", program)
        largest.append(max(math.prod(map(int, shape.split(","))) for shape in shapes))
    assert largest == [20, 20]  # candidates of two seeds and ten environments


# ---- with its own networks ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_candidates_keep_the_ids_of_the_entities() -> None:
    config = hecrl.Config(candidates=5, diffusion_steps=2, ids=3, network=TINY)
    s = entity.with_ids(jnp.zeros((2, COUNT, FEATURES)), jnp.array([0, 2, 1]), 3)
    proposal = subgoals.by_diffusion(config, FEATURES + 3)
    g = entity.with_ids(jnp.ones((2, COUNT, FEATURES)), jnp.array([2, 1, 0]), 3)  # of another episode
    draw = jax.jit(lambda: proposal.draw(proposal.init(KEY, s, g), s, g, KEY))
    candidates = draw()
    assert candidates.shape == (2, 5, COUNT, FEATURES + 3)
    np.testing.assert_array_equal(
        candidates[..., FEATURES:], jnp.broadcast_to(s[:, None, :, FEATURES:], (2, 5, 3, 3))
    )
    assert len(np.unique(candidates[..., 0])) == 2 * 5 * COUNT


def test_regressed_subgoals_keep_ids_and_may_be_compared_as_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entity, "regressor", lambda features, shape: linear(features, moved))
    s = batch_of(COUNT, 2 * FEATURES).value.observation[OBSERVATION]
    g, w = s[::-1], s[:, ::-1]
    params = np.random.default_rng(0).normal(size=(4 * FEATURES, 2 * FEATURES)).astype(np.float32)
    by_sets = hecrl.Config(subgoals="awr", awr_error="chamfer", awr_temperature=2.0)
    whole = moved(params, s, g)
    for config in (by_sets, dataclasses.replace(by_sets, awr_error="squared", ids=FEATURES)):
        proposal = subgoals.by_regression(config, 2 * FEATURES)
        drawn = np.array(proposal.draw(params, s, g, KEY))
        expected = np.concatenate([whole[..., :FEATURES], s[..., FEATURES:]], -1) if config.ids else whole
        np.testing.assert_allclose(drawn, expected[:, None], rtol=1e-5)
        square = np.square(whole - w)[..., :FEATURES].mean((1, 2))
        error = square if config.ids else entity.chamfer(expected, w)
        loss = proposal.loss(params, s, g, w, KEY, lambda: jnp.arange(ROWS) / 10.0)
        np.testing.assert_allclose(loss, error * np.exp(np.arange(ROWS) / 5), rtol=1e-4)


@pytest.mark.slow
def test_updates_of_its_networks_keep_every_shape_and_type() -> None:
    """Of vectors, down to weak types; traced, not compiled."""
    config, spec = hecrl.Config(network=TINY), goals.conditioned_spec(Spec((5,), ACTIONS))
    learner = hecrl.make(config, spec, heads.hl_gauss(-9.0, 0.0, 11))
    before = jax.eval_shape(learner.init, KEY, batch_of(5))
    after, metrics = jax.eval_shape(learner.update, before, batch_of(5), KEY)
    assert set(before.params) == {"critic", "value", "policy", "subgoal"} and set(before.target) == {"critic"}
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
    assert all((x.shape, x.dtype) == ((), jnp.float32) for x in metrics.values()) and "clipped" in metrics


@pytest.mark.slow
def test_it_acts_among_more_entities_than_in_training_but_not_than_ids() -> None:
    """Traced, not compiled."""
    width = FEATURES + 4
    learner = hecrl.make(
        hecrl.Config(candidates=3, network=TINY, ids=4, choice="random"),
        goals.conditioned_spec(Spec((COUNT, width), ACTIONS)),
        heads.scalar(),
    )
    state = jax.eval_shape(learner.init, KEY, batch_of(COUNT, width))

    def life(state: State, observation: Any) -> Any:
        actor, first = acting.actor(learner), jnp.zeros(2, bool)
        return actor.act(state, actor.start(state, observation), observation, first, KEY)

    seen = lambda count: {name: np.zeros((2, count, width), np.float32) for name in (OBSERVATION, GOAL)}
    action, memory = jax.eval_shape(life, state, seen(COUNT + 1))
    assert (action.shape, memory.step.shape, memory.subgoal.shape) == ((2, ACTIONS), (2,), (2, 4, width))
    with pytest.raises(ValueError, match="5 entities, but ids for 4 only"):
        jax.eval_shape(life, state, seen(5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subgoals": "difusion"}, "subgoals='difusion': did you mean 'diffusion'"),
        ({"choice": "max"}, "choice='max': choose one of best, random"),
        ({"awr_error": "l1"}, "awr_error='l1': choose one of squared, chamfer"),
        ({"diffusion_steps": 0}, "at least 1 step, not 0"),
        ({"goals": dataclasses.replace(hecrl.GOALS, subgoal_steps=0)}, "batches without subgoals"),
        ({"discount": 1.0}, "discount=1.0 must be below 1: with it, a goal that is never reached"),
        ({"discount": 0.95}, r"radius=-30.0 lies outside of \[-20, 0\]"),
        (
            {"goals": dataclasses.replace(hecrl.GOALS, negative=False)},
            r"radius=-30.0 lies outside of \[0, 100\]",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hecrl.Config(**fields)


def test_environments_it_cannot_be_for_are_refused() -> None:
    make = lambda spec, **fields: hecrl.make(hecrl.Config(**fields), spec, heads.scalar())
    with pytest.raises(ValueError, match="'hecrl' learns to reach goals"):
        make(Spec((COUNT, FEATURES), ACTIONS))
    with pytest.raises(ValueError, match="'hecrl' cannot act in integer actions: use gcbc"):
        make(SPEC._replace(discrete=True))
    with pytest.raises(
        ValueError, match=r"sets of entities \[N, F\], or vectors, not observations of shape \(8, 8, 3\)"
    ):
        make(goals.conditioned_spec(Spec((8, 8, 3), ACTIONS)))
    with pytest.raises(ValueError, match="ids=2 leaves nothing of an entity of 2 features"):
        make(SPEC, ids=2)
    with pytest.raises(ValueError, match="ids=2 are of sets of entities"):
        make(goals.conditioned_spec(Spec((5,), ACTIONS)), ids=2)
    nets = hecrl.networks(hecrl.Config(subgoals="none"), SPEC, heads.scalar())
    with pytest.raises(ValueError, match="subgoals=none: there is nothing to plan with"):
        hecrl.plan(hecrl.Config(subgoals="none"), nets, heads.scalar(), {}, jnp.zeros(()), jnp.zeros(()), KEY)


# ---- settings that do nothing ---------------------------------------------------------------------------------

OTHERS = {
    "choice": "random",
    "filtered": False,
    "direct": False,
    "radius": -20.0,
    "candidates": 5,
    "replan_every": 7,
    "max_subgoals": 3,
    "diffusion_steps": 4,
    "prediction": "x0",
    "eta": 0.5,
    "awr_temperature": 9.0,
    "awr_error": "chamfer",
}


def program(config: hecrl.Config) -> str:
    """All that an update and a step of the policy compute, but for where functions lie in memory."""
    learner = hecrl.make(config, SPEC, heads.make("scalar"))
    actor = acting.actor(learner)

    def everything(key: Any, batch: GoalBatch) -> Any:
        seen = batch.value.observation
        state = learner.init(key, batch)
        state, _ = learner.update(state, batch, key)
        return actor.act(state, actor.start(state, seen), seen, jnp.zeros(ROWS, bool), key)

    traced = jax.make_jaxpr(everything)(KEY, batch_of(COUNT, FEATURES))
    return re.sub("0x[0-9a-f]+", "", f"{traced} {[np.asarray(x).tolist() for x in traced.consts]}")


@pytest.mark.parametrize(
    "chosen",
    [{"subgoals": "none"}, {"subgoals": "awr", "filtered": False}, {"filtered": False}, {"candidates": 1}],
)
def test_settings_that_are_said_to_do_nothing_change_no_program(
    chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The users of an agent that reads them are told to leave them out. Linear networks are traced quickly."""
    linear_networks(monkeypatch)
    config = hecrl.Config(**chosen)
    unused = hecrl.unused(config)
    assert unused.keys() <= {*OTHERS, "subgoal_optimiser", "goals.subgoal_steps"}
    # Programs differ, and what they compute does not, where a choice among one is drawn, and where as many seeds plan
    # at once as candidates leave room for.
    silent = unused.keys() & OTHERS.keys() - {"choice", "candidates"}
    changed = {name: OTHERS[name] for name in silent}
    assert changed and program(dataclasses.replace(config, **changed)) == program(config)
