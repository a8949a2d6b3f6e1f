"""Subgoals from a diffusion (HECRL, Haramati et al., ICLR 2026), in a world whose distances are known.

    python -m experiments.papers.hecrl
    python -m experiments.papers.hecrl --parts=subgoals

The world is `rl.envs.movers`: objects of which one moves at a time, logged without a goal. The agent, its subgoals and
their selection are `rl.agents.hecrl`'s. Sizes are a hundredth of the paper's.

- subgoals: models of the state ``K`` steps on the way to a goal, without a value. *diffusion* is the paper's,
  *regression* its other model of subgoals with equal weights (``awr`` with beta 0), *same network* a regression by the
  diffusion's network. How many objects a subgoal displaces says whether the model has understood that one moves after
  the other: a mean moves all of them a little. Pairs of state and goal are *logged*, from one held-out episode, or
  *unseen*, of two different ones.
- control: the whole agent with a scalar and an HL-Gauss value. Success against the radius R of competence, beside the
  baselines: no subgoals, random feasible subgoals, the best value of all candidates, and subgoals of AWR. And what the
  values say of goals and subgoals beside the truth: HECRL ranks subgoals by value and compares it with R, so that both
  the order and the scale of values matter.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from experiments import studies
from rl import acting, plot, train
from rl.agents import hecrl
from rl.envs import movers
from rl.networks import diffusion, entity
from rl.replay import goals
from rl.replay.dataset import Dataset
from rl.replay.goals import GOAL, OBSERVATION, Hindsight, Trajectories
from rl.types import Array, Key, State, Transition
from rl.values import heads

PARTS = ("subgoals", "control")
GAMMA = 0.99
OBJECTS, SLOTS = 3, 5  # in training; ids, so that there may be more objects later
MOVED = 0.2  # an object is displaced if it is farther away than this
DIFFUSION, REGRESSION, SAME = "diffusion", "regression", "same network"
MODELS = (DIFFUSION, REGRESSION, SAME)
LOGGED, UNSEEN, MORE = "logged", "unseen", "one more object"  # kinds of pairs
DATA, GOALS = "data", "the goal"  # beside the models
AWR = "awr"
HEADS = ("scalar", "hl_gauss")
BINS = 101  # of HL-Gauss, on [-1 / (1 - gamma), 0] as in OGBench's and HECRL's discounts
PIECES = 10  # steps of the progress bar in each training


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    parts: str = ",".join(PARTS)  # which to run, comma-separated
    seeds: int = 5
    episodes: int = 300  # logged ones of each seed
    steps: int = 240  # of an episode
    subgoal_steps: int = 20  # K
    pairs: int = 512  # of state and goal, on which subgoals and values are judged
    batch_size: int = 128
    learning_rate: float = 5e-4
    updates: int = 2_500  # of each model of subgoals
    width: int = 64  # of its entities; hidden layers are twice as wide
    layers: int = 3
    control_updates: int = 8_000  # of the agent
    control_width: int = 32
    control_layers: int = 2
    alpha: float = 0.1  # weight of cloning
    candidates: int = 32  # N
    replan_every: int = 10  # steps for which a subgoal is pursued
    radii: tuple[int, ...] = (-5, -10, -15, -20, -25, -30, -40, -50, -60)  # R
    radius: int = -20  # R at which baselines are compared: K steps
    trials: int = 50  # episodes in which an agent is judged
    limit: int = 120  # steps of such an episode
    seed: int = 0  # of all
    out: str = "results/papers/hecrl"


# {part: settings of the other one}
OTHERS = {
    "subgoals": (
        *("control_updates", "control_width", "control_layers", "alpha", "candidates", "replan_every"),
        *("radii", "radius", "trials", "limit"),
    ),
    "control": ("updates", "width", "layers"),
}


def run(settings: Settings) -> dict[str, Any]:
    """Runs the parts, and writes and returns what came out.

    Raises:
      ValueError: an unknown part, too few seeds, or updates that the steps of progress do not divide.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    studies.check_seeds(settings.seeds)
    for flag in ("updates", "control_updates"):
        if getattr(settings, flag) % PIECES:
            raise ValueError(f"--{flag}={getattr(settings, flag)} must be a multiple of {PIECES}")
    if settings.radius not in settings.radii:
        raise ValueError(
            f"--radius={settings.radius} must be one of --radii={','.join(map(str, settings.radii))}"
        )
    steps, work = settings.seeds * PIECES, dict[str, tuple[Callable[..., Any], int]]()
    if "subgoals" in parts:
        work["subgoals, data"] = (functools.partial(of_data, settings), 1)
        for model in MODELS:
            work[f"subgoals, {model}"] = (functools.partial(of_model, settings, model), steps)
    if "control" in parts:
        for head in HEADS:
            work[f"control, {head}"] = (functools.partial(of_agent, settings, head), steps)
        work[f"control, {AWR}"] = (functools.partial(of_awr, settings), steps)
    variants = {
        name: studies.Variant(function, studies.chosen(settings, *OTHERS[name.split(", ")[0]]), count)
        for name, (function, count) in work.items()
    }
    finished = studies.train(settings, variants, "HECRL")
    outcomes: dict[str, Any] = {part: {} for part in PARTS if part in parts}
    for name, outcome in finished.outcomes.items():
        part, what = name.split(", ")
        outcomes[part][what] = outcome
    result = studies.finish(settings, {"wall_seconds": finished.seconds, **outcomes}, report, claims)
    draw(Path(settings.out), result)
    return result


# ---- the world -----------------------------------------------------------------------------------------------------

SPEC = goals.conditioned_spec(movers.spec(OBJECTS, SLOTS))
FEATURES = 2 + SLOTS


def seed_key(settings: Settings, purpose: str, seed: int) -> Key:
    """Another one for each purpose, the same for all models."""
    root = jax.random.fold_in(jax.random.key(settings.seed), np.uint32(zlib.crc32(purpose.encode())))
    return jax.random.fold_in(root, seed)


def hindsight(settings: Settings) -> Hindsight:
    """The paper's, but that reaching a goal ends an episode: values then have a closed form."""
    return dataclasses.replace(hecrl.GOALS, mask=True, subgoal_steps=settings.subgoal_steps)


def random_ids(key: Key, count: int, objects: int) -> Array:
    """Ids [count, objects]."""
    return jax.vmap(lambda key: entity.random_ids(key, objects, SLOTS, fixed=0))(jax.random.split(key, count))


@functools.partial(jax.jit, static_argnums=0)
def episodes_of(settings: Settings, seed: int) -> tuple[movers.Episodes, Array]:
    """The episodes of a seed, and their observations [E, T + 1, N, F], with ids that each episode has drawn."""
    key = seed_key(settings, "episodes", seed)
    episodes = movers.behave(key, settings.episodes, settings.steps, OBJECTS)
    ids = random_ids(seed_key(settings, "ids", seed), settings.episodes, OBJECTS)
    return episodes, movers.observe(episodes.position, ids[:, None], SLOTS)


def logged(settings: Settings, seed: int) -> Trajectories:
    """The episodes to learn from, and the positions after each step."""
    episodes, seen = episodes_of(settings, seed)
    rows = lambda x: np.asarray(x).reshape(-1, *x.shape[2:])
    action, count = rows(episodes.action), settings.episodes * settings.steps
    ones = np.ones(count, np.float32)
    steps = Transition(rows(seen[:, :-1]), action, 0 * ones, ones, rows(seen[:, 1:]), action, ones)
    last = np.arange(1, count + 1) % settings.steps == 0
    return goals.trajectories(Dataset(steps, last), hindsight(settings), rows(episodes.position[:, 1:]))


def sampler(settings: Settings) -> Callable[[Trajectories, Key, Any], goals.GoalBatch]:
    return goals.sampler(settings.batch_size, hindsight(settings), GAMMA, movers.reached)


class Pairs(NamedTuple):
    """Entities and goals, [P, N, F] each."""

    state: Array
    goal: Array
    logged: Array | None = None  # the state K steps later on the way, where the data have one


@functools.partial(jax.jit, static_argnums=0)
def pairs(settings: Settings, seed: int) -> dict[str, Pairs]:
    """Of held-out episodes, one for each pair."""
    count, steps, ahead = settings.pairs, settings.steps, settings.subgoal_steps
    keys = jax.random.split(seed_key(settings, "pairs", seed), 6)
    position = movers.behave(keys[0], count, steps, OBJECTS).position
    ids, row = random_ids(keys[1], count, OBJECTS), jnp.arange(count)
    see = lambda x: movers.observe(x, ids, SLOTS)
    start = jax.random.randint(keys[2], (count,), 0, steps)
    later = start + 1 + jnp.floor(jax.random.uniform(keys[3], (count,)) * (steps - start)).astype(jnp.int32)
    at = lambda time: see(position[row, time])
    more = random_ids(keys[4], count, OBJECTS + 1)
    both = movers.reset(keys[5], 2 * count, OBJECTS + 1).reshape(2, count, OBJECTS + 1, 2)
    return {
        LOGGED: Pairs(at(start), at(later), at(jnp.minimum(start + ahead, later))),
        UNSEEN: Pairs(at(0), see(jnp.roll(position[:, -1], 1, 0))),
        MORE: Pairs(*(movers.observe(x, more, SLOTS) for x in both)),
    }


# ---- subgoals ------------------------------------------------------------------------------------------------------


def shape(width: int, layers: int) -> entity.Shape:
    return entity.Shape(width, 2 * width, 4, layers)


def model_config(settings: Settings) -> hecrl.Config:
    """One candidate, and equal weights of regressed subgoals."""
    return hecrl.Config(
        network=shape(settings.width, settings.layers),
        candidates=1,
        awr_temperature=0.0,
        ids=SLOTS,
        goals=hindsight(settings),
    )


def by_same_network(config: hecrl.Config, features: int) -> hecrl.Proposal:
    """The mean, by the diffusion's network, to which the present entities are shown in place of noisy ones."""
    network, free = entity.denoiser(features, config.network), jnp.arange(features) < features - config.ids

    def mean(params: Any, s: Array, g: Array) -> Array:
        return diffusion.hold(network.apply(params, s, jnp.zeros(()), s, g), s, free)

    def loss(params: Any, s: Array, g: Array, w: Array, key: Key, advantage: Any) -> Array:
        del key, advantage
        return jnp.square(mean(params, s, g) - w).mean((-2, -1))

    return hecrl.Proposal(
        lambda key, s, g: network.init(key, s, jnp.zeros(()), s, g),
        loss,
        lambda params, s, g, key: mean(params, s, g)[..., None, :, :],
    )


PROPOSALS: dict[str, Callable[[hecrl.Config, int], hecrl.Proposal]] = {
    DIFFUSION: hecrl.by_diffusion,
    REGRESSION: hecrl.by_regression,
    SAME: by_same_network,
}


def displaced(before: Array, after: Array) -> Array:
    """How many objects [...] of entities [..., N, F] are farther than `MOVED` from where they were."""
    away = jnp.linalg.norm(movers.positions(after) - movers.positions(before), axis=-1)
    return (away > MOVED).sum(-1).astype(jnp.float32)


def describe(pair: Pairs, subgoal: Array) -> dict[str, Array]:
    """Means over pairs: objects displaced, steps to the subgoal, and how many steps nearer the goal is from there."""
    state, goal, there = (movers.positions(x) for x in (pair.state, pair.goal, subgoal))
    return {
        "displaced": displaced(pair.state, subgoal).mean(),
        "steps": movers.steps_between(state, there).mean(),
        "nearer": (movers.steps_between(state, goal) - movers.steps_between(there, goal)).mean(),
    }


def of_data(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """What logged subgoals and the goals themselves displace, [S] each."""
    del work
    rows = []
    for seed in range(settings.seeds):
        of = pairs(settings, seed)
        rows.append(
            {
                DATA: {LOGGED: describe(of[LOGGED], of[LOGGED].logged)},
                GOALS: {name: describe(pair, pair.goal) for name, pair in of.items()},
            }
        )
    return studies.stacked(rows)


def of_model(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """What the subgoals of a model displace, [S] each; its loss, [S, PIECES]."""
    model, sample = PROPOSALS[name](model_config(settings), FEATURES), sampler(settings)
    optimiser = optax.adam(settings.learning_rate)

    def update(carry: tuple[Any, Any], key: Key, data: Trajectories) -> tuple[tuple[Any, Any], Array]:
        params, moments = carry
        batch_key, key = jax.random.split(key)
        batch = sample(data, batch_key, 0)
        state, even = batch.value.observation[OBSERVATION], lambda: jnp.zeros(settings.batch_size)

        def cost(params: Any) -> Array:
            return model.loss(params, state, batch.actor_goal, batch.actor_subgoal, key, even).mean()

        loss, gradient = jax.value_and_grad(cost)(params)
        steps, moments = optimiser.update(gradient, moments, params)
        return (optax.apply_updates(params, steps), moments), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(carry: tuple[Any, Any], data: Trajectories, key: Key) -> tuple[tuple[Any, Any], Array]:
        keys = jax.random.split(key, settings.updates // PIECES)
        carry, loss = jax.lax.scan(functools.partial(update, data=data), carry, keys)
        return carry, loss.mean()

    @jax.jit
    def start(key: Key, pair: Pairs) -> tuple[Any, Any]:
        params = model.init(key, pair.state[:2], pair.goal[:2])
        return params, optimiser.init(params)

    @jax.jit
    def judge(params: Any, of: dict[str, Pairs], key: Key) -> dict[str, Any]:
        return {name: describe(x, model.draw(params, x.state, x.goal, key)[:, 0]) for name, x in of.items()}

    rows = []
    for seed in range(settings.seeds):
        data, of, key = (
            jax.device_put(logged(settings, seed)),
            pairs(settings, seed),
            seed_key(settings, name, seed),
        )
        carry, losses = start(key, of[LOGGED]), []
        for piece in range(PIECES):
            carry, loss = advance(carry, data, jax.random.fold_in(key, piece))
            losses.append(float(loss))
            work.progress(1)
        rows.append({**jax.device_get(judge(carry[0], of, key)), "loss": losses})
    return studies.stacked(rows)


# ---- control -------------------------------------------------------------------------------------------------------


def value_head(settings: Settings, name: str) -> heads.ValueHead:
    return heads.make(name, *goals.value_bounds(hindsight(settings), GAMMA), BINS)


def agent_config(settings: Settings, **fields: Any) -> hecrl.Config:
    return hecrl.Config(
        **{
            "discount": GAMMA,
            "alpha": settings.alpha,
            "learning_rate": settings.learning_rate,
            "network": shape(settings.control_width, settings.control_layers),
            "candidates": settings.candidates,
            "replan_every": settings.replan_every,
            "max_subgoals": settings.limit,
            "radius": float(settings.radius),
            "ids": SLOTS,
            "goals": hindsight(settings),
            **fields,
        }
    )


def trained(
    settings: Settings, head: heads.ValueHead, name: str, config: hecrl.Config, work: studies.Work
) -> Iterator[State]:
    """The agent of each seed, one after another."""
    learner, count = hecrl.make(config, SPEC, head), settings.control_updates // PIECES
    epoch = jax.jit(train.scan_updates(learner.update, sampler(settings), count), donate_argnums=0)
    example = jax.jit(sampler(settings))
    for seed in range(settings.seeds):
        data, key = jax.device_put(logged(settings, seed)), seed_key(settings, f"agent, {name}", seed)
        state = jax.jit(learner.init)(key, example(data, key, 0))
        for _ in range(PIECES):
            state, report = epoch(state, data, key)
            train.check_finite(report)
            work.progress(1)
        yield state


def success(
    settings: Settings,
    head: heads.ValueHead,
    config: hecrl.Config,
    state: State,
    key: Key,
    objects: int = OBJECTS,
) -> dict[str, Array]:
    """Shares of episodes between random arrangements that succeed at any step, and at the last one."""
    actor = acting.actor(hecrl.make(config, SPEC, head))
    keys = jax.random.split(key, 4)
    start, goal = (movers.reset(k, settings.trials, objects) for k in keys[:2])
    ids = random_ids(keys[2], settings.trials, objects)
    see = lambda x: movers.observe(x, ids, SLOTS)
    conditioned = lambda position: {OBSERVATION: see(position), GOAL: see(goal)}

    def one(carry: tuple[Array, Any], clock: tuple[Array, Key]) -> tuple[tuple[Array, Any], Array]:
        (position, memory), (time, key) = carry, clock
        first = jnp.full(settings.trials, time == 0)
        action, memory = actor.act(state, memory, conditioned(position), first, key)
        position = movers.step(position, action)
        return (position, memory), movers.reached(position, goal)

    clocks = jnp.arange(settings.limit), jax.random.split(keys[3], settings.limit)
    _, reached = jax.lax.scan(one, (start, actor.start(state, conditioned(start))), clocks)
    return {"any": reached.any(0).mean(), "last": reached[-1].mean()}


BASELINES: dict[str, dict[str, Any]] = {
    "no subgoals": {"subgoals": "none"},
    "random feasible": {"choice": "random"},
    "best of all": {"filtered": False, "direct": False},
    "best of all, or the goal": {"filtered": False},
}


def of_agent(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """Success at each radius [S, R] and of baselines [S], and how far the values are from the truth [S]."""
    head = value_head(settings, name)
    chosen = functools.partial(agent_config, settings)

    @jax.jit
    def sweep(state: State, key: Key) -> dict[str, Array]:
        of = lambda radius: success(settings, head, dataclasses.replace(chosen(), radius=radius), state, key)
        return jax.lax.map(of, jnp.array(settings.radii, jnp.float32))

    baselines = {
        other: jax.jit(functools.partial(success, settings, head, chosen(**fields)))
        for other, fields in BASELINES.items()
    }
    one_more = {
        other: jax.jit(functools.partial(success, settings, head, config, objects=OBJECTS + 1))
        for other, config in (("subgoals", chosen()), ("no subgoals", chosen(subgoals="none")))
    }
    judge = jax.jit(functools.partial(asked, settings, head))
    rows = []
    for seed, state in enumerate(trained(settings, head, name, chosen(), work)):
        key = seed_key(settings, "trials", seed)  # the same starts and goals for all
        of = pairs(settings, seed)[UNSEEN]
        rows.append(
            {
                "radii": sweep(state, key),
                **{other: function(state, key) for other, function in baselines.items()},
                "one more": {other: function(state, key) for other, function in one_more.items()},
                "values": quality(jax.device_get(judge(state, of, key))),
            }
        )
    return studies.stacked(jax.device_get(rows))


def of_awr(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """Success [S] with one subgoal by advantage-weighted regression, which is always pursued, and a scalar value."""
    head, config = (
        value_head(settings, HEADS[0]),
        agent_config(settings, subgoals="awr", filtered=False, direct=False),
    )
    judge = jax.jit(functools.partial(success, settings, head, config))
    states = trained(settings, head, HEADS[0], config, work)
    rows = [judge(state, seed_key(settings, "trials", seed)) for seed, state in enumerate(states)]
    return studies.stacked(jax.device_get(rows))


class Answers(NamedTuple):
    """What an agent says of pairs and of candidates for their subgoals, and the fewest steps that it would take."""

    value: Array  # [P], V(s, g)
    steps: Array
    near: Array  # [P, C], V(s, w)
    near_steps: Array
    far: Array  # [P, C], V(w, g)
    far_steps: Array


def asked(settings: Settings, head: heads.ValueHead, state: State, of: Pairs, key: Key) -> Answers:
    config = agent_config(settings)
    nets = hecrl.networks(config, SPEC, head)
    plan = hecrl.plan(config, nets, head, state.params, of.state, of.goal, key)
    s, g, w = (movers.positions(x) for x in (of.state, of.goal, plan.candidates))
    between = movers.steps_between
    value = head.value(nets.value.apply(state.params["value"], of.state, of.goal))
    return Answers(
        value, between(s, g), plan.to_subgoal, between(s[:, None], w), plan.to_goal, between(w, g[:, None])
    )


def true_value(steps: Any) -> Any:
    """V* of a goal so many steps away: each costs 1, but the one that reaches it."""
    return -(1 - GAMMA ** np.maximum(steps - 1, 0)) / (1 - GAMMA)


def quality(of: Answers) -> dict[str, float]:
    """Rank correlations with the truth and mean errors: of values over pairs, and of subgoals.

    ``ranking``: of V(w, g) among the candidates of a pair, its mean over pairs, those without two distances left out;
    ``order``: of V(s, g) over pairs; ``bias`` and ``near_bias``: of V(s, g) and V(s, w) from `true_value`;
    ``near_error``: root of the mean square error of V(s, w).
    """
    rows = [
        stats.spearmanr(value, -steps).statistic
        for value, steps in zip(of.far, of.far_steps, strict=True)
        if np.ptp(steps) > 0 and np.ptp(value) > 0
    ]
    near = of.near - true_value(of.near_steps)
    return {
        "ranking": float(np.mean(rows)),
        "order": float(stats.spearmanr(of.value, -of.steps).statistic),
        "bias": float(np.mean(of.value - true_value(of.steps))),
        "near_bias": float(near.mean()),
        "near_error": float(np.sqrt(np.square(near).mean())),
    }


# ---- reports -------------------------------------------------------------------------------------------------------

PUBLISHED = studies.published("hecrl")
OURS = "ours; nothing is published"
PAPER = "HECRL (Haramati et al., ICLR 2026), "
PROTOTYPE = "our prototype, one seed: "
RATIO = 0.75  # of objects displaced by the diffusion, in those of a regression


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper says, what our prototype saw, and what we ask."""
    if "subgoals" in result:
        yield from _subgoal_claims(result["subgoals"])
    if "control" in result:
        yield from _control_claims(result["control"], result["settings"])


def _subgoal_claims(found: Mapping[str, Any]) -> Iterator[studies.Claim]:
    before, of = PUBLISHED["prototype"], lambda model, kind: found[model][kind]["displaced"]
    text = "logged subgoals displace 1.44 of 3 objects (within 0.05 in the mean)"
    data = found["data"][DATA][LOGGED]["displaced"]
    near = studies.summarised(lambda x: abs(x - before["data"][LOGGED]) <= 0.05)
    yield studies.Claim(text, f"{PROTOTYPE}{before['data'][LOGGED]}", data, near)
    below = studies.every(lambda x: x <= RATIO)
    for other in (REGRESSION, SAME):
        for kind in (UNSEEN, MORE):
            text = (
                f"{kind}: the diffusion displaces at most {RATIO} of what {other} does, in every seed (ratio)"
            )
            where = OURS
            if kind == UNSEEN and other == SAME:
                where = PROTOTYPE + " against ".join(str(before[model][kind]) for model in (DIFFUSION, SAME))
            elif kind == UNSEEN:
                shares = PUBLISHED["displaced"]
                where = f"{PAPER}cubes, weighted: {shares['diffusion']} against {shares['awr']}"
            yield studies.Claim(text, where, of(DIFFUSION, kind) / of(other, kind), below)
    text = "logged pairs: the diffusion displaces a number closer to the data's than regression (difference)"
    closer = np.abs(of(REGRESSION, LOGGED) - data) - np.abs(of(DIFFUSION, LOGGED) - data)
    yield studies.Claim(text, OURS, closer, studies.positive)
    text = "unseen pairs: subgoals of the diffusion are nearer to the goal than the state (fewest steps, difference)"
    yield studies.Claim(text, OURS, found[DIFFUSION][UNSEEN]["nearer"], studies.positive)


def _control_claims(found: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[studies.Claim]:
    rates, radius = PUBLISHED["success"]["PPP-Cube, state"], settings["radius"]
    place = list(settings["radii"]).index(radius)
    published = {"no subgoals": f"{PAPER}cubes: {rates['HECRL'][0]} against {rates['no subgoals'][0]} %"}
    for head in HEADS:
        agent = found[head]
        ours = agent["radii"]["any"][:, place]
        for other in BASELINES:
            text = f"{head}, R = {radius}: success is higher than with {other} (difference)"
            yield studies.Claim(
                text, published.get(other, OURS), ours - agent[other]["any"], studies.positive
            )
        text = f"{head}, one more object: success is higher with subgoals than without (difference)"
        gain = agent["one more"]["subgoals"]["any"] - agent["one more"]["no subgoals"]["any"]
        yield studies.Claim(text, f"{PAPER}in words: it generalises to more objects", gain, studies.positive)
    text = f"{HEADS[0]}, R = {radius}: success is higher than with subgoals of AWR (difference)"
    ours = found[HEADS[0]]["radii"]["any"][:, place]
    yield studies.Claim(text, f"{PAPER}in words", ours - found[AWR]["any"], studies.positive)
    one, other = (found[head] for head in HEADS)
    text = "HL-Gauss ranks candidates better by V(w, g) than a scalar (rank correlation with the truth, difference)"
    yield studies.Claim(text, OURS, other["values"]["ranking"] - one["values"]["ranking"], studies.positive)
    text = "HL-Gauss has a smaller error of V(s, w), which R is compared with (log of the ratio)"
    ratio = np.log(one["values"]["near_error"] / other["values"]["near_error"])
    yield studies.Claim(text, OURS, ratio, studies.positive)
    text = "R is less delicate with HL-Gauss: mean over R of success, in that of the best R (difference)"
    yield studies.Claim(text, OURS, kept(other) - kept(one), studies.positive)
    text = "at its best R, HL-Gauss has more success than a scalar (difference)"
    yield studies.Claim(text, OURS, best(other) - best(one), studies.positive)


def best(agent: Mapping[str, Any]) -> np.ndarray:
    """Success [S] at the radius that is best for each seed."""
    return agent["radii"]["any"].max(1)


def kept(agent: Mapping[str, Any]) -> np.ndarray:
    """How much of `best` [S] is left on average over radii: 1 if R does not matter."""
    return agent["radii"]["any"].mean(1) / np.maximum(best(agent), 1e-6)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """What came out, in tables."""
    settings = result["settings"]
    yield "# HECRL: subgoals from a diffusion"
    yield (
        f"`{result['command']}`, {result['wall_seconds'] / 60:.0f} minutes on {result['hardware']['cores']} cores. "
        f"[The program](../../../experiments/papers/hecrl.py) says what is compared. {settings['seeds']} seeds, each "
        f"with data of its own: {settings['episodes']} episodes of {settings['steps']} steps, {OBJECTS} objects. Mean "
        "and 95 % interval."
    )
    if "subgoals" in result:
        yield from _subgoal_report(result["subgoals"], settings)
    if "control" in result:
        yield from _control_report(result["control"], settings)


def _subgoal_report(found: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Subgoals"
    yield (
        f"{settings['updates']:,} updates of {settings['batch_size']} rows, {settings['layers']} layers of width "
        f"{settings['width']}. Objects displaced by more than {MOVED}, the fewest steps from the state to the subgoal "
        f"(K = {settings['subgoal_steps']}), and how many steps nearer the goal is from there; one candidate for each "
        f"of {settings['pairs']} pairs. *{MORE}*: {OBJECTS + 1} objects, which no model has seen."
    )
    kinds, before = (LOGGED, UNSEEN, MORE), PUBLISHED["prototype"]
    models = {**found["data"], **{name: row for name, row in found.items() if name != "data"}}
    for what, title in (
        ("displaced", "objects displaced"),
        ("steps", "steps to the subgoal"),
        ("nearer", "steps nearer to the goal"),
    ):
        rows = []
        for name, row in models.items():
            cells = [studies.between(row[kind][what]) if kind in row else "-" for kind in kinds]
            theirs = [str(before.get(name, {}).get(kind, "-")) for kind in (LOGGED, UNSEEN)]
            rows.append((name, *cells, *(theirs if what == "displaced" else [])))
        prototype = [f"prototype, {kind}" for kind in (LOGGED, UNSEEN)] if what == "displaced" else []
        yield f"### {title}"
        yield studies.table(("", *kinds, *prototype), rows)
    yield "![objects displaced](displaced.png)"


def _control_report(found: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Control"
    yield (
        f"{settings['control_updates']:,} updates of {settings['batch_size']} rows, width {settings['control_width']}; "
        f"{settings['trials']} episodes of {settings['limit']} steps between random arrangements for each seed, "
        f"{settings['candidates']} candidates every {settings['replan_every']} steps. Success at any step, and in "
        "brackets below at the last one (the paper's)."
    )
    radii = settings["radii"]
    rows = []
    for head in HEADS:
        agent = found[head]
        for when in ("any", "last"):
            cells = [f"{x:.2f}" for x in agent["radii"][when].mean(0)]
            rows.append(
                (f"{head}, {when} step", *cells, *(f"{agent[name][when].mean():.2f}" for name in BASELINES))
            )
    yield studies.table(("", *(f"R = {radius}" for radius in radii), *BASELINES), rows)
    yield (
        f"Subgoals of AWR, scalar value: {studies.between(found[AWR]['any'])} at any step, "
        f"{studies.between(found[AWR]['last'])} at the last one."
    )
    yield "![success against R](radius.png)"
    yield f"### {OBJECTS + 1} objects"
    yield studies.table(
        ("", "subgoals", "no subgoals"),
        [
            (head, *(studies.between(found[head]["one more"][x]["any"]) for x in ("subgoals", "no subgoals")))
            for head in HEADS
        ],
    )
    yield "### Values beside the truth"
    columns = {
        "ranking": "rank correlation of V(w, g), among candidates",
        "order": "of V(s, g), over pairs",
        "bias": "V(s, g) above V*",
        "near_bias": "V(s, w) above V*",
        "near_error": "its error",
    }
    yield studies.table(
        ("", *columns.values(), "success kept over R", "success at the best R"),
        [
            (
                head,
                *(studies.between(found[head]["values"][what]) for what in columns),
                studies.between(kept(found[head])),
                studies.between(best(found[head])),
            )
            for head in HEADS
        ],
    )


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Objects displaced by each model, and success against the radius."""
    if "subgoals" in result:
        found = result["subgoals"]
        scores = {
            f"{name}, {kind}": studies.band(row[kind]["displaced"])
            for name, row in {**found["data"], **{x: found[x] for x in MODELS}}.items()
            for kind in (LOGGED, UNSEEN)
            if kind in row
        }
        plot.bars(
            folder / "displaced.png", scores, "objects displaced, mean and 95 % interval", title="Subgoals"
        )
    if "control" in result:
        radii = result["settings"]["radii"]
        curves = {}
        for head in HEADS:
            rates = result["control"][head]["radii"]["any"]
            curves[head] = (radii, *studies.bands(rates.T))
            level = np.repeat(
                np.array([studies.band(result["control"][head]["no subgoals"]["any"])]).T, len(radii), 1
            )
            curves[f"{head}, no subgoals"] = (radii, *level)
        plot.lines(
            folder / "radius.png", curves, "R", "success", title="Success against the radius of competence"
        )


if __name__ == "__main__":
    studies.main(Settings(), run)
