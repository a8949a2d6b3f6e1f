"""Goal-conditioned agents: one update of each against its docstring's equations, written again in NumPy.

As in test_agents.py, whose networks, heads and central differences these are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special, stats
from test_agents import HIGH, LOW, SIZE, Head, descend, float64, follow, numpy_head, smallest
from test_agents import mlp as dense

from rl import agents
from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam
from rl.networks import entity
from rl.networks import mlp as networks
from rl.networks.layers import Architecture
from rl.replay import goals
from rl.replay.goals import GOAL, OBSERVATION, GoalBatch, Goals, Hindsight
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

Tree = Any

WIDTH, ACTIONS, ROWS = 3, 2, 6
SPEC = goals.conditioned_spec(Spec((WIDTH,), ACTIONS))
DISCRETE = goals.conditioned_spec(Spec((WIDTH,), ACTIONS, discrete=True))
CASES = [
    ("gcbc", "scalar", {}),
    ("gcivl", "scalar", {}),
    ("gcivl", "c51", {}),
    ("gciql", "scalar", {}),
    ("gciql", "hl_gauss", {"extraction": "awr", "alpha": 2.0}),
    ("crl", "scalar", {"latent": 3}),
    ("crl", "scalar", {"latent": 3, "loss": "symmetric", "extraction": "awr", "alpha": 2.0}),
    ("qrl", "scalar", {"latent": 16, "alpha": 0.3}),
    ("qrl", "scalar", {"latent": 16, "extraction": "awr", "alpha": 0.01}),
    ("hiql", "scalar", {"representation": 2}),
    ("hiql", "two_hot", {"representation": 2, "representation_gradient": True}),
]


def small(agent: str, **fields: Any) -> Any:
    relu = {"learning_rate": 0.1, "hidden": (4,), "network": Architecture()}
    return agents.get(agent).Config(**relu, **fields)


def random_batch(rows: int = ROWS) -> GoalBatch:
    rng = np.random.default_rng(0)
    states = lambda: rng.normal(size=(rows, WIDTH)).astype(np.float32)
    actions = lambda: rng.uniform(-1, 1, (rows, ACTIONS)).astype(np.float32)
    reached = np.arange(rows) % 3 == 0
    goal = states()
    steps = Transition(
        {OBSERVATION: states(), GOAL: goal},
        actions(),
        (reached - 1.0).astype(np.float32),
        (1.0 - reached).astype(np.float32),
        {OBSERVATION: states(), GOAL: goal},
        actions(),
        np.ones(rows, np.float32),
    )
    return GoalBatch(steps, states(), states(), states())


class Case(NamedTuple):
    """An update in float64, and what it is made of."""

    agent: str
    config: Any
    head: Head
    params: dict[str, Tree]
    target: dict[str, Tree]
    batch: GoalBatch
    after: State
    metrics: dict[str, Any]
    value: Any  # of what was observed; None where there is none
    critics: Any  # of what was done there


@functools.cache
def updated(index: int) -> Case:
    agent, head, fields = CASES[index]
    config = small(agent, **fields)
    learner = agents.get(agent).make(config, SPEC, heads.make(head, LOW, HIGH, SIZE), optax.sgd)
    batch, rng = random_batch(), np.random.default_rng(1)
    state = jax.eval_shape(learner.init, jax.random.key(0), batch)
    fill = lambda x: rng.normal(0, 0.7, x.shape).astype(np.float32)
    state = state._replace(
        params=jax.tree.map(fill, state.params),
        target=jax.tree.map(fill, state.target),
        optimiser=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.optimiser),
        step=np.int32(0),
    )

    @jax.jit
    def run(state: State, batch: GoalBatch, key: jax.Array) -> Any:
        seen, action = batch.value.observation, batch.value.action
        value = learner.value(state, seen, key) if learner.value else None
        critics = learner.critics(state, seen, action) if learner.critics else None
        return *learner.update(state, batch, key), value, critics

    found = jax.device_get(run(state, batch, jax.random.key(0)))
    params, target = float64(state.params), float64(state.target)
    return Case(agent, config, numpy_head(head), params, target, float64(batch), *found)


# ---- the oracle ---------------------------------------------------------------------------------------


def see(observation: dict[str, np.ndarray], goal: np.ndarray | None = None) -> np.ndarray:
    """What networks see of a state and a goal, in the order of the keys."""
    return np.concatenate([observation[GOAL] if goal is None else goal, observation[OBSERVATION]], -1)


def mlp(params: Tree, x: np.ndarray) -> np.ndarray:
    """Vectors of a dict go into the dense layers as they are."""
    return dense(params.get("dense", params), x)


def members(params: Tree, x: np.ndarray) -> np.ndarray:
    """Outputs [E, B, K]."""
    count = len(jax.tree.leaves(params)[0])
    return np.stack([mlp(jax.tree.map(lambda leaf, i=i: leaf[i], params), x) for i in range(count)])


def log_prob(policy: Tree, x: np.ndarray, action: np.ndarray) -> np.ndarray:
    return stats.norm.logpdf(action, mlp(policy, x), 1).sum(-1)


def ddpg_bc(scale: np.ndarray, alpha: float, q: np.ndarray, likelihood: np.ndarray) -> float:
    """``scale`` is Q before the policy moves."""
    return -q.mean() / np.abs(scale).mean() - alpha * likelihood.mean()


def awr(advantage: np.ndarray, alpha: float) -> np.ndarray:
    return np.minimum(np.exp(alpha * advantage), 100)


class Expected(NamedTuple):
    losses: dict[str, Callable[[Tree], float]]  # of each parameter that moves
    metrics: dict[str, Any]
    value: np.ndarray | None = None
    critics: np.ndarray | None = None


def gcbc(c: Case) -> Expected:
    x = see(c.batch.value.observation, c.batch.actor_goal)
    loss = lambda pi: -log_prob(pi, x, c.batch.value.action).mean()
    return Expected({"policy": loss}, {"policy_loss": loss(c.params["policy"])})


def implicit_v(c: Case, slow: np.ndarray, slow_next: np.ndarray) -> tuple[Callable[..., float], float]:
    """The loss of outputs [E, B, K], and the share that is clipped."""
    h, steps = c.head, c.batch.value
    backups = [(steps.reward, c.config.discount * steps.discount, member) for member in slow_next]
    smaller = np.minimum(*map(h.value, slow_next))
    lead = steps.reward + c.config.discount * steps.discount * smaller - h.value(slow).mean(0)
    weight = np.where(lead < 0, 1 - c.config.expectile, c.config.expectile)
    loss = lambda v: sum((weight * h.loss(v[i], h.target(*backups[i]))).mean() for i in range(2))
    return loss, np.mean([h.clipped(*backup) for backup in backups])


def gcivl(c: Case) -> Expected:
    h, steps, goal = c.head, c.batch.value, c.batch.actor_goal
    here, there = see(steps.observation), see(steps.next_observation)
    loss, clipped = implicit_v(c, members(c.target["value"], here), members(c.target["value"], there))
    mean = lambda x: h.value(members(c.params["value"], see(x, goal))).mean(0)
    lead = mean(steps.next_observation) - mean(steps.observation)
    weight = awr(lead, c.config.alpha)
    x = see(steps.observation, goal)
    losses = {
        "value": lambda v: loss(members(v, here)),
        "policy": lambda pi: -(weight * log_prob(pi, x, steps.action)).mean(),
    }
    metrics = {f"{name}_loss": of(c.params[name]) for name, of in losses.items()}
    value = h.value(members(c.params["value"], here)).mean(0)
    metrics |= {"clipped": clipped, "v": value.mean(), "advantage": lead.mean()}
    return Expected(losses, metrics, value)


def gciql(c: Case) -> Expected:
    h, steps, config = c.head, c.batch.value, c.config
    here, x = see(steps.observation), see(steps.observation, c.batch.actor_goal)
    joined = lambda state, action: np.concatenate([state, action], -1)
    slow = smallest(h, members(c.target["critic"], joined(here, steps.action)))
    lead = h.value(slow) - h.value(mlp(c.params["value"], here))
    y_value = h.target(0 * steps.reward, 1 + 0 * steps.reward, slow)
    backup = (
        steps.reward,
        config.discount * steps.discount,
        mlp(c.params["value"], see(steps.next_observation)),
    )
    y = h.target(*backup)
    weight = np.where(lead < 0, 1 - config.expectile, config.expectile)
    q = lambda action: h.value(members(c.params["critic"], joined(x, action))).min(0)
    if config.extraction == "awr":
        advantage = awr(q(steps.action) - h.value(mlp(c.params["value"], x)), config.alpha)
        policy = lambda pi: -(advantage * log_prob(pi, x, steps.action)).mean()
    else:
        act = lambda pi: np.clip(mlp(pi, x), -1, 1)
        before = q(act(c.params["policy"]))
        policy = lambda pi: ddpg_bc(before, config.alpha, q(act(pi)), log_prob(pi, x, steps.action))
    losses = {
        "value": lambda v: (weight * h.loss(mlp(v, here), y_value)).mean(),
        "critic": lambda p: sum(
            h.loss(member, y).mean() for member in members(p, joined(here, steps.action))
        ),
        "policy": policy,
    }
    metrics = {f"{name}_loss": of(c.params[name]) for name, of in losses.items()}
    value = h.value(mlp(c.params["value"], here))
    each = h.value(members(c.params["critic"], joined(here, steps.action)))
    return Expected(losses, metrics | {"clipped": h.clipped(*backup)}, value, each)


def crl(c: Case) -> Expected:
    steps, config = c.batch.value, c.config
    state, goal, other = steps.observation[OBSERVATION], steps.observation[GOAL], c.batch.actor_goal
    with_action = lambda action: np.concatenate([state, action], -1)
    scale = np.sqrt(config.latent)

    def logits(p: Tree, x: np.ndarray) -> np.ndarray:
        phi, psi = members(p["phi"], x), members(p["psi"], goal)
        return np.stack([a @ b.T for a, b in zip(phi, psi, strict=True)]) / scale

    def contrast(p: Tree, x: np.ndarray) -> float:
        every = []
        for f in logits(p, x):
            for j in range(ROWS):
                if config.loss == "symmetric":
                    rows, columns = special.log_softmax(f, 1)[j, j], special.log_softmax(f, 0)[j, j]
                    every.append(-(rows + columns) / 2)
                else:
                    sign = np.where(np.arange(ROWS) == j, 1, -1)
                    every.append(-np.log(special.expit(sign * f[j])).mean())
        return np.mean(every)

    def f(p: Tree, x: np.ndarray, goal: np.ndarray = other) -> np.ndarray:
        logit = (members(p["phi"], x) * members(p["psi"], goal)).sum(-1) / scale
        return np.maximum(logit.min(0), np.log(1e-6))

    x, critic = see(steps.observation, other), c.params["critic"]
    losses = {"critic": lambda p: contrast(p, with_action(steps.action))}
    if config.extraction == "awr":
        lead = f(critic, with_action(steps.action)) - f(c.params["value"], state)
        losses["value"] = lambda p: contrast(p, state)
        losses["policy"] = lambda pi: -(awr(lead, config.alpha) * log_prob(pi, x, steps.action)).mean()
    else:
        q = lambda pi: f(critic, with_action(np.clip(mlp(pi, x), -1, 1)))
        before = q(c.params["policy"])
        losses["policy"] = lambda pi: ddpg_bc(before, config.alpha, q(pi), log_prob(pi, x, steps.action))
    metrics = {
        "contrastive_loss": losses["critic"](critic),
        "policy_loss": losses["policy"](c.params["policy"]),
        "accuracy": np.mean(logits(critic, with_action(steps.action)).mean(0).argmax(1) == np.arange(ROWS)),
    }
    acted = np.clip(mlp(c.params["policy"], see(steps.observation)), -1, 1)
    return Expected(losses, metrics, f(critic, with_action(acted), goal))


def covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Length [...] of the union of intervals [..., k]: between neighbouring ends, is any of them open?"""
    points = np.sort(np.concatenate([start, end], -1), -1)
    middle = (points[..., 1:] + points[..., :-1]) / 2
    inside = (start[..., None] < middle[..., None, :]) & (middle[..., None, :] < end[..., None])
    return (np.diff(points) * inside.any(-2)).sum(-1)


def distance(p: Tree, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """IQE of latent states [B, L] in groups of 8."""
    lengths = covered(*(z.reshape(len(z), -1, 8) for z in (x, y)))
    share = special.expit(p["mixture"])
    return share * lengths.max(-1) + (1 - share) * lengths.mean(-1)


def qrl(c: Case) -> Expected:
    steps, config, p = c.batch.value, c.config, c.params
    s, t, g = steps.observation[OBSERVATION], steps.next_observation[OBSERVATION], steps.observation[GOAL]
    x = see(steps.observation, c.batch.actor_goal)
    d = lambda of, a, b: distance(of, mlp(of["encoder"], a), mlp(of["encoder"], b))
    excess = lambda of: (np.maximum(d(of, s, t) - 1, 0) ** 2).mean()
    spread = lambda of: (100 * np.logaddexp(0, 5 - d(of, s, g) / 100)).mean()
    multiplier = np.exp(p["multiplier"])

    def step(of: Tree, dynamics: Tree, action: np.ndarray) -> np.ndarray:
        latent = mlp(of["encoder"], s)
        return latent + mlp(dynamics, np.concatenate([latent, action], -1))

    def dynamics_loss(of: Tree, dynamics: Tree) -> float:
        there, z = mlp(of["encoder"], t), step(of, dynamics, steps.action)
        return (distance(of, there, z) + distance(of, z, there)).mean() / 2

    losses = {"multiplier": lambda m: np.exp(m) * (config.epsilon - excess(p["distance"]))}
    metrics = {
        "distance_loss": spread(p["distance"]) + multiplier * excess(p["distance"]),
        "multiplier": multiplier,
        "excess": excess(p["distance"]),
        "distance": d(p["distance"], s, g).mean(),
        "step": d(p["distance"], s, t).mean(),
    }
    online = p["distance"]
    if config.extraction == "awr":
        lead = d(online, s, c.batch.actor_goal) - d(online, t, c.batch.actor_goal)
        losses["distance"] = lambda of: spread(of) + multiplier * excess(of)
        losses["policy"] = lambda pi: -(awr(lead, config.alpha) * log_prob(pi, x, steps.action)).mean()
    else:
        goal = mlp(online["encoder"], c.batch.actor_goal)
        q = lambda pi: -distance(online, step(online, p["dynamics"], np.clip(mlp(pi, x), -1, 1)), goal)
        before = q(p["policy"])
        losses["distance"] = lambda of: (
            spread(of) + multiplier * excess(of) + dynamics_loss(of, p["dynamics"])
        )
        losses["dynamics"] = lambda dynamics: dynamics_loss(online, dynamics)
        losses["policy"] = lambda pi: ddpg_bc(before, config.alpha, q(pi), log_prob(pi, x, steps.action))
        metrics["dynamics_loss"] = dynamics_loss(online, p["dynamics"])
    return Expected(losses, metrics | {"policy_loss": losses["policy"](p["policy"])}, -d(online, s, g))


def hiql(c: Case) -> Expected:
    h, steps, config, p = c.head, c.batch.value, c.config, c.params

    def phi(of: Tree, observation: dict[str, np.ndarray], goal: np.ndarray) -> np.ndarray:
        raw = mlp(of, see(observation, goal))
        return raw * np.sqrt(config.representation / (raw**2).sum(-1, keepdims=True))

    def inner(of: Tree, observation: dict[str, np.ndarray], goal: np.ndarray) -> np.ndarray:
        return see(observation, phi(of, observation, goal))

    here, there, rep = steps.observation, steps.next_observation, p["representation"]
    slow, slow_next = (members(c.target["value"], inner(rep, x, x[GOAL])) for x in (here, there))
    loss, clipped = implicit_v(c, slow, slow_next)
    value_loss = lambda v, of: loss(members(v, inner(of, here, here[GOAL])))
    mean = lambda x, goal: h.value(members(p["value"], inner(rep, x, goal))).mean(0)

    low_lead = mean(there, c.batch.subgoal) - mean(here, c.batch.subgoal)
    low = awr(low_lead, config.low_alpha)
    on_the_way = {OBSERVATION: c.batch.actor_subgoal}
    goal = c.batch.actor_goal
    high_lead = mean(on_the_way, goal) - mean(here, goal)
    high = awr(high_lead, config.high_alpha)
    proposed = phi(rep, here, c.batch.actor_subgoal)
    low_loss = lambda pi, of: -(low * log_prob(pi, inner(of, here, c.batch.subgoal), steps.action)).mean()
    losses = {
        "value": lambda v: value_loss(v, rep),
        "representation": lambda of: (
            value_loss(p["value"], of) + (low_loss(p["policy"], of) if config.representation_gradient else 0)
        ),
        "policy": lambda pi: low_loss(pi, rep),
        "high_policy": lambda pi: -(high * log_prob(pi, see(here, goal), proposed)).mean(),
    }
    metrics = {f"{name}_loss": losses[name](p[name]) for name in ("value", "policy", "high_policy")}
    value = mean(here, here[GOAL])
    metrics |= {"clipped": clipped, "v": value.mean()}
    metrics |= {"advantage": low_lead.mean(), "high_advantage": high_lead.mean()}
    return Expected(losses, metrics, value)


ORACLES = {f.__name__: f for f in (gcbc, gcivl, gciql, crl, qrl, hiql)}


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(CASES[i][:2]))
def test_one_update_is_the_docstrings_equations(index: int) -> None:
    """And what values and critics say of the batch's own goals, by the parameters of before the update."""
    c = updated(index)
    expected = ORACLES[c.agent](c)
    assert set(expected.losses) == set(c.params)
    params = descend(c.params, c.config.learning_rate, **expected.losses)
    rate = getattr(c.config, "target_rate", 0.0)
    # Targets follow the parameters before the update
    target = {name: follow(c.target[name], c.params[name], rate) for name in c.target}
    for before, after, wanted in (
        (c.params, float64(c.after.params), params),
        (c.target, float64(c.after.target), target),
    ):
        moves = [jax.tree.map(np.subtract, of, before) for of in (after, wanted)]
        jax.tree.map_with_path(
            lambda path, a, b: np.testing.assert_allclose(
                a, b, rtol=2e-3, atol=1e-5, err_msg=jax.tree_util.keystr(path)
            ),
            *moves,
        )
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(c.metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    for said, wanted in ((c.value, expected.value), (c.critics, expected.critics)):
        assert (said is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_allclose(said, wanted, rtol=1e-3, atol=1e-4)


def test_the_expectile_of_twins_is_by_the_smaller_next_value() -> None:
    """Of A' = r + gamma d min V'(s') - mean V'(s): with the mean of both, it would be above 0 in the first row."""
    steps = random_batch(3).value._replace(reward=np.full(3, -1, np.float32), discount=np.ones(3, np.float32))
    slow, following = np.float32([[0, 0, 0], [0, 0, 4]]), np.float32([[0.5, 2, 2.9], [3.5, 2, 2.9]])
    fit = agents.get("gcivl").regression(
        heads.scalar(), steps, 1.0, 0.9, slow[..., None], following[..., None]
    )
    np.testing.assert_allclose(fit.weight, [0.1, 0.9, 0.1], rtol=1e-5)


# ---- what can be asked without an update ----------------------------------------------------------------


def learner(agent: str, spec: Spec = SPEC, **fields: Any) -> Learner:
    return agents.get(agent).make(small(agent, **fields), spec, heads.scalar())


@pytest.mark.parametrize("agent", ORACLES)
def test_observations_without_goals_are_refused(agent: str) -> None:
    with pytest.raises(ValueError, match=rf"agent '{agent}' learns to reach goals"):
        learner(agent, Spec((WIDTH,), ACTIONS))


@pytest.mark.parametrize("agent", ORACLES)
def test_dropout_is_for_the_updates_of_every_policy(agent: str) -> None:
    """By the draws that traced programs make: without it there are none, and with it none where it acts."""
    batch, key, draws = random_batch(), jax.random.key(0), {}
    for share in (0.0, 0.5):
        config = dataclasses.replace(small(agent), network=Architecture(dropout=share))
        of = agents.get(agent).make(config, SPEC, heads.scalar())
        state = jax.eval_shape(of.init, key, batch)
        programs = (
            jax.make_jaxpr(of.update)(state, batch, key),
            jax.make_jaxpr(of.act)(state, batch.value.observation, key),
        )
        draws[share] = [str(program).count("random_bits") for program in programs]
    assert draws[0.0] == [0, 0] and draws[0.5][0] > 0 == draws[0.5][1]


SHARED = {  # the networks that the settings of one name are for, where they are several
    ("crl", "critic"): {"critic", "value"},
    ("qrl", "distance"): {"distance", "dynamics", "multiplier"},
    ("hiql", "value"): {"value", "representation"},
    ("hiql", "policy"): {"policy", "high_policy"},
}


@pytest.mark.parametrize("agent", (*ORACLES, pytest.param("hecrl", marks=pytest.mark.long)))
@pytest.mark.slow
def test_optimiser_settings_reach_their_networks(agent: str) -> None:
    """A warm-up counts updates: the states of those networks' optimisers, and no others, hold one number more."""
    fields = {"crl": {"extraction": "awr"}, "hecrl": {"network": entity.Shape(4, 4, 1, 1), "subgoals": "awr"}}
    config = agents.get(agent).Config(**fields.get(agent, {}))
    names = [field.name for field in dataclasses.fields(config) if field.name.endswith("_optimiser")]

    def count(warm: str = "") -> dict[str, int]:
        adams = {name: Adam(warm_up=3 * (name == warm)) for name in names}
        of = agents.get(agent).make(dataclasses.replace(config, **adams), SPEC, heads.scalar())
        state = jax.eval_shape(of.init, jax.random.key(0), random_batch())
        return {name: len(jax.tree.leaves(of_one)) for name, of_one in state.optimiser.items()}

    plain = count()
    for name in names:
        part = name.removesuffix("_optimiser")
        moved = SHARED.get((agent, part), {part})
        assert moved <= set(plain)
        assert count(name) == {network: number + (network in moved) for network, number in plain.items()}


@pytest.mark.parametrize("agent", ["gciql", "crl", "qrl"])
def test_integer_actions_need_awr(agent: str) -> None:
    with pytest.raises(ValueError, match=r"extraction=ddpg_bc needs a gradient.*use extraction=awr"):
        learner(agent, DISCRETE)
    with pytest.raises(ValueError, match="extraction='awt': did you mean 'awr'"):
        learner(agent, extraction="awt")


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="latent=12 must be a multiple of 8"):
        learner("qrl", latent=12)
    with pytest.raises(ValueError, match=r"goals\.subgoal_steps=0: hiql needs subgoals"):
        small("hiql", goals=Hindsight())
    with pytest.raises(ValueError, match="loss='infonce'"):
        small("crl", loss="infonce")


@pytest.mark.slow
def test_subgoals_of_hiql_are_the_candidates_represented_most_like_the_proposal() -> None:
    """By a loop over rows and candidates."""
    of, batch = learner("hiql", representation=2), random_batch()
    config, spec = small("hiql", representation=2), goals.conditioned_spec(Spec((WIDTH,), ACTIONS))
    state, observation = jax.jit(of.init)(jax.random.key(0), batch), batch.value.observation
    candidates = np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float32)
    chosen = jax.jit(of.subgoal)(state, (), observation, candidates)
    high = networks.unit_policy(spec._replace(action_size=2), config.hidden, config.network)
    body = networks.state_value(2, config.hidden, config.layer_norm, config.network, spec)
    proposed = np.asarray(high.apply(state.params["high_policy"], observation).mode())
    for i, proposal in enumerate(proposed):
        here = observation[OBSERVATION][i]
        each = [
            np.asarray(body.apply(state.params["representation"], {OBSERVATION: here, GOAL: candidate}))
            for candidate in candidates
        ]
        angle = [proposal @ x / np.linalg.norm(x) for x in each]
        np.testing.assert_array_equal(chosen[i], candidates[int(np.argmax(angle))])
    assert len(np.unique(np.asarray(chosen), axis=0)) > 1
    # The low policy knows subgoals of one length alone: only the direction of a proposal counts.
    last = lambda path, x: 3 * x if "Dense_1" in jax.tree_util.keystr(path) else x
    longer = state.params | {"high_policy": jax.tree.map_with_path(last, state.params["high_policy"])}
    act = jax.jit(of.act)
    action = act(state, observation, jax.random.key(0))
    again = act(state._replace(params=longer), observation, jax.random.key(0))
    np.testing.assert_allclose(action, again, rtol=1e-4, atol=1e-6)


def test_hiql_learns_from_a_state_of_zeros_with_itself_as_a_goal() -> None:
    """Networks that start without biases represent it by zeros: no direction, which was NaN in all parameters."""
    config = agents.get("hiql").Config(hidden=(4,))
    of = agents.get("hiql").make(config, SPEC, heads.make("scalar"), optax.sgd)
    state = jax.eval_shape(of.init, jax.random.key(0), random_batch())
    params = jax.tree.map(lambda x: np.full(x.shape, x.ndim > 1, np.float32), state.params)
    zeros = np.zeros((ROWS, WIDTH), np.float32)

    def total(params: Tree) -> jax.Array:
        return of.value(state._replace(params=params), goals.conditioned(zeros, zeros), None).sum()

    results = jax.jit(jax.value_and_grad(total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


@pytest.mark.slow
@pytest.mark.parametrize("agent", ORACLES)
def test_integer_actions_and_entities_have_shapes(agent: str) -> None:
    """Types and shapes alone: integer actions, observations of several arrays, and once an image beside a vector."""
    fields = {"extraction": "awr"} if agent in ("gciql", "crl", "qrl") else {}
    if agent == "hiql":
        other, kind = (32, 32, 3), jnp.uint8
    else:
        other, kind = (3,), jnp.float32
    plain = Spec({"other": other, "position": (2,)}, ACTIONS, discrete=True)
    of = learner(agent, goals.conditioned_spec(plain), **fields)
    state = {"other": jnp.zeros((ROWS, *other), kind), "position": jnp.zeros((ROWS, 2))}
    both = goals.conditioned(state, state)
    numbers = jnp.zeros(ROWS)
    action = jnp.zeros(ROWS, jnp.int32)
    batch = GoalBatch(Transition(both, action, numbers, numbers, both, action, numbers), state, state, state)

    def run(key: jax.Array) -> Any:
        start = of.init(key, batch)
        after, _ = of.update(start, batch, key)
        value = of.value(after, both, key) if of.value else numbers
        return start, after, of.act(after, both, key), value

    start, after, acts, value = jax.eval_shape(run, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), start) == jax.tree.map(
        lambda x: (x.shape, x.dtype), after
    )
    assert (acts.shape, acts.dtype) == ((ROWS,), jnp.int32)
    assert value.shape == (ROWS,)


def test_images_of_goals_are_shifted_too() -> None:
    """Each on its own: what the update sees differs from the batch, in goals as in observations."""
    spec = goals.conditioned_spec(Spec((8, 8, 1), ACTIONS))
    image = jnp.broadcast_to(jnp.arange(64.0).reshape(8, 8, 1), (ROWS, 8, 8, 1))
    steps = random_batch().value._replace(
        observation=goals.conditioned(image, image), next_observation=goals.conditioned(image, image)
    )
    plain = Learner(None, lambda state, batch, key: (batch, {}), None)  # type: ignore
    update = augmented(plain, spec, Architecture(shift=2)).update
    batch = jax.device_get(jax.jit(update)(None, GoalBatch(steps, image, image), jax.random.key(0))[0])  # type: ignore
    assert batch.actor_subgoal is None
    images = [
        batch.value.observation[OBSERVATION],
        batch.value.observation[GOAL],
        batch.value.next_observation[OBSERVATION],
        batch.actor_goal,
        batch.subgoal,
    ]
    for index, one in enumerate(images):
        assert one.shape == image.shape and (one != image).any()
        assert all((one != other).any() for other in images[:index])


def test_supports_are_those_of_steps_to_a_goal() -> None:
    for agent in ("gcivl", "gciql", "hiql"):
        config = agents.get(agent).Config(discount=0.9)
        assert agents.target_range(agent, config, SPEC, 0.0, 0.0) == pytest.approx((-10.0, 0.0))


@pytest.mark.parametrize("agent", ["crl", "qrl", "gcbc"])
def test_agents_that_say_that_they_read_no_rewards_read_none(agent: str) -> None:
    """Updates are traced without any; gciql, whose losses have them, fails there."""
    none = random_batch()
    none = none._replace(value=none.value._replace(reward=None, discount=None))

    def traced(agent: str) -> None:
        one = learner(agent)
        state = jax.eval_shape(one.init, jax.random.key(0), none)
        jax.eval_shape(one.update, state, none, jax.random.key(0))

    assert set(goals.OF_REWARDS) <= agents.unused(agent, small(agent)).keys()
    traced(agent)
    assert agents.unused("gciql", small("gciql")) == goals.NO_SUBGOALS
    # The discount is one of goals at geometric distances alone.
    geometric, uniform = (Goals(0.0, 1.0, 0.0, geometric=drawn) for drawn in (True, False))
    for drawn in (
        {"value": geometric},
        {"actor": geometric},
        {"value": Goals(1.0, 0.0, 0.0), "actor": uniform},
    ):
        unused = agents.unused(agent, small(agent, goals=Hindsight(**{"value": uniform, **drawn})))
        assert ("discount" in unused) == (agent != "gcbc" and geometric not in drawn.values())
    with pytest.raises(TypeError):
        traced("gciql")
