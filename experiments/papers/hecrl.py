"""Subgoals from a diffusion model (HECRL, Haramati et al., ICLR 2026), in a world whose distances are known.

    python -m experiments.papers.hecrl
    python -m experiments.papers.hecrl --parts=subgoals

The world is `rl.envs.movers`: objects of which one moves at a time, logged without a goal. The agent, its subgoals and
their selection are `rl.agents.hecrl`'s. Sizes are a hundredth of the paper's.

- subgoals: models of the state ``K`` steps on the way to a goal, without a value. *diffusion* is the paper's,
  *regression* its other model of subgoals with equal weights (``awr`` with beta 0), *same network* a regression by the
  diffusion model's network. How many objects a subgoal displaces says whether the model has understood that one moves
  after the other: a mean moves all of them a little. Pairs of state and goal are *logged*, from one held-out episode,
  or *unseen*, of two different ones.
- values: HECRL ranks candidates by V(w, g) and compares V(s, w) with a radius R, so that the order and the scale of
  values matter. A scalar and an HL-Gauss value learn goals by an expectile (no policy is learned); candidates are
  states that the behaviour reaches, most of them on no way to the goal. What the values say of them is compared with
  the truth, and HECRL's selection is judged at every R by the steps that it gains with a low level of known
  competence: one that reaches whatever is at most this many steps away, and gets nowhere else.
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
from rl import plot, statistics
from rl.agents import gcivl, hecrl, subgoals
from rl.envs import movers
from rl.networks import diffusion, entity
from rl.networks.base import ensemble
from rl.replay import goals
from rl.replay.dataset import Dataset
from rl.replay.goals import GOAL, OBSERVATION, Hindsight, Trajectories
from rl.types import Array, Key, Transition
from rl.values import heads

PARTS = ("subgoals", "values")
GAMMA = 0.99
OBJECTS, SLOTS = 3, 5  # in training; ids, so that there may be more objects later
MOVED = 0.2  # an object is displaced if it is farther away than this
DIFFUSION, REGRESSION, SAME = "diffusion", "regression", "same network"
MODELS = (DIFFUSION, REGRESSION, SAME)
LOGGED, UNSEEN, MORE = "logged", "unseen", "one more object"  # kinds of pairs
DATA, GOALS = "data", "the goal"  # beside the models
TRUTH = "truth"
HEADS = ("scalar", "hl_gauss")
BINS = 101  # of HL-Gauss, on [-1 / (1 - gamma), 0]
SLOW = 0.005  # of the copy that values continue with
PIECES = 10  # steps of the progress bar in each training
ATTENTION = 4  # heads of every attention


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
    width: int = 32  # of its entities; hidden layers are twice as wide
    layers: int = 3
    value_updates: int = 5_000  # of each value
    value_width: int = 32
    expectile: float = 0.9
    questions: int = 128  # pairs for which values select among candidates
    candidates: int = 32  # N
    farthest: int = 60  # steps of behaviour to a candidate, at most
    competence: int = 20  # steps that the low level can go
    radii: tuple[int, ...] = (-5, -10, -15, -20, -25, -30, -40, -50, -60)  # R
    seed: int = 0  # of all
    out: str = "results/papers/hecrl"


# {part: settings of the other one}
OTHERS = {
    "subgoals": (
        *("value_updates", "value_width", "expectile", "questions", "candidates", "farthest", "competence"),
        "radii",
    ),
    "values": ("updates", "width", "layers", "pairs"),
}


def run(settings: Settings) -> dict[str, Any]:
    """Runs the parts, and writes and returns what came out.

    Raises:
      ValueError: an unknown part, too few seeds, or updates or widths that something does not divide.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    studies.check_seeds(settings.seeds)
    divisors = {"updates": PIECES, "value_updates": PIECES, "width": ATTENTION, "value_width": ATTENTION}
    for flag, divisor in divisors.items():
        if getattr(settings, flag) % divisor:
            raise ValueError(f"--{flag}={getattr(settings, flag)} must be a multiple of {divisor}")
    steps, work = settings.seeds * PIECES, dict[str, tuple[Callable[..., Any], int]]()
    if "subgoals" in parts:
        work["subgoals, data"] = (functools.partial(of_data, settings), 1)
        for model in MODELS:
            work[f"subgoals, {model}"] = (functools.partial(of_model, settings, model), steps)
    if "values" in parts:
        work[f"values, {TRUTH}"] = (functools.partial(of_truth, settings), 1)
        for head in HEADS:
            work[f"values, {head}"] = (functools.partial(of_value, settings, head), steps)
    variants = {
        name: studies.Variant(function, studies.chosen(settings, *OTHERS[name.split(", ")[0]]), count)
        for name, (function, count) in work.items()
    }
    finished = studies.train(settings, variants, "HECRL")
    outcomes: dict[str, Any] = {part: {} for part in PARTS if part in parts}
    for name, outcome in finished.outcomes.items():
        part, what = name.split(", ")
        outcomes[part][what] = outcome
    result = studies.finish(
        settings, {"wall_seconds": finished.seconds, **outcomes}, report, claims, trained=finished
    )
    draw(Path(settings.out), result)
    return result


# ---- the world -----------------------------------------------------------------------------------------------------

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
    keys = jax.random.split(seed_key(settings, "episodes", seed), 3)
    episodes = movers.behave(keys[0], movers.reset(keys[1], settings.episodes, OBJECTS), settings.steps)
    ids = random_ids(keys[2], settings.episodes, OBJECTS)
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
    keys = jax.random.split(seed_key(settings, "pairs", seed), 7)
    position = movers.behave(keys[0], movers.reset(keys[6], count, OBJECTS), steps).position
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


def shape(width: int, layers: int = 1) -> entity.Shape:
    """Layers are those of a diffusion model alone."""
    return entity.Shape(width, 2 * width, ATTENTION, layers)


def model_config(settings: Settings) -> hecrl.Config:
    """One candidate, and equal weights of regressed subgoals."""
    return hecrl.Config(
        network=shape(settings.width, settings.layers),
        candidates=1,
        awr_temperature=0.0,
        ids=SLOTS,
        goals=hindsight(settings),
    )


def by_same_network(config: hecrl.Config, features: int) -> subgoals.Proposal:
    """The mean, by the diffusion model's network, to which the present entities are shown in place of noisy ones."""
    network, free = entity.denoiser(features, config.network), jnp.arange(features) < features - config.ids

    def mean(params: Any, s: Array, g: Array) -> Array:
        return diffusion.hold(network.apply(params, s, jnp.zeros(()), s, g), s, free)

    def loss(params: Any, s: Array, g: Array, w: Array, key: Key, advantage: Any) -> Array:
        del key, advantage
        return jnp.square(mean(params, s, g) - w).mean((-2, -1))

    return subgoals.Proposal(
        lambda key, s, g: network.init(key, s, jnp.zeros(()), s, g),
        loss,
        lambda params, s, g, key: mean(params, s, g)[..., None, :, :],
    )


PROPOSALS: dict[str, Callable[[hecrl.Config, int], subgoals.Proposal]] = {
    DIFFUSION: subgoals.by_diffusion,
    REGRESSION: subgoals.by_regression,
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
        data, of = jax.device_put(logged(settings, seed)), pairs(settings, seed)
        key = seed_key(settings, name, seed)
        carry, losses = start(key, of[LOGGED]), []
        for piece in range(PIECES):
            carry, loss = advance(carry, data, jax.random.fold_in(key, piece))
            losses.append(float(loss))
            work.progress(1)
        rows.append({**jax.device_get(judge(carry[0], of, key)), "loss": losses})
    return studies.stacked(rows)


# ---- values --------------------------------------------------------------------------------------------------------


class Questions(NamedTuple):
    """Entities, goals and candidates for subgoals; and the fewest steps between them."""

    state: Array  # [Q, N, F]
    goal: Array  # [Q, N, F]
    candidates: Array  # [Q, C, N, F]
    steps: Array  # [Q]
    near: Array  # [Q, C], from the state to each candidate
    far: Array  # [Q, C], from there to the goal


class Answers(NamedTuple):
    """Values: like the steps of `Questions`."""

    value: Array  # V(s, g)
    near: Array  # V(s, w)
    far: Array  # V(w, g)


@functools.partial(jax.jit, static_argnums=0)
def questions(settings: Settings, seed: int) -> Questions:
    """Random arrangements, and where behaviour leads from the first ones in up to ``farthest`` steps."""
    count, several = settings.questions, settings.candidates
    keys = jax.random.split(seed_key(settings, "questions", seed), 4)
    start, goal = movers.reset(keys[0], 2 * count, OBJECTS).reshape(2, count, OBJECTS, 2)
    ids = random_ids(keys[1], count, OBJECTS)
    ways = movers.behave(keys[2], jnp.repeat(start, several, 0), settings.farthest).position
    time = jax.random.randint(keys[3], (count * several,), 1, settings.farthest + 1)
    there = ways[jnp.arange(len(time)), time].reshape(count, several, OBJECTS, 2)
    see = functools.partial(movers.observe, slots=SLOTS)
    return Questions(
        see(start, ids),
        see(goal, ids),
        see(there, ids[:, None]),
        movers.steps_between(start, goal),
        movers.steps_between(start[:, None], there),
        movers.steps_between(there, goal[:, None]),
    )


def true_value(steps: Any) -> Any:
    """V* of a goal this many steps away: each costs 1, but the one that reaches it."""
    return -(1 - GAMMA ** jnp.maximum(steps - 1, 0)) / (1 - GAMMA)


def truth(queries: Questions) -> Answers:
    return Answers(*(true_value(x) for x in (queries.steps, queries.near, queries.far)))


def gained(settings: Settings, queries: Questions, answers: Answers, radius: Array) -> dict[str, Array]:
    """What HECRL's selection is worth, means over questions.

    ``gain``: steps by which the low level comes nearer to the goal; ``beyond``: the share of selections that it cannot
    reach; ``goal``: the share that are the goal itself.
    """
    config = hecrl.Config(radius=radius, candidates=settings.candidates)
    index, is_goal = subgoals.select(config, answers.near, answers.far, answers.value, jax.random.key(0))
    pick = lambda x: jnp.take_along_axis(x, index[:, None], 1)[:, 0]
    away = jnp.where(is_goal, queries.steps, pick(queries.near))
    left = jnp.where(is_goal, 0.0, pick(queries.far))
    beyond = away > settings.competence
    return {
        "gain": jnp.where(beyond, 0.0, queries.steps - left).mean(),
        "beyond": beyond.mean(),
        "goal": is_goal.mean(),
    }


def over_radii(settings: Settings, queries: Questions, answers: Answers) -> dict[str, Array]:
    """`gained` at each radius, [R] each."""
    return jax.lax.map(
        functools.partial(gained, settings, queries, answers), jnp.array(settings.radii, jnp.float32)
    )


def of_truth(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """What the selection gains at each radius by the true values, [S, R]."""
    del work
    judge = jax.jit(lambda queries: over_radii(settings, queries, truth(queries)))
    return studies.stacked(
        [jax.device_get(judge(questions(settings, seed))) for seed in range(settings.seeds)]
    )


def of_value(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """What the selection gains at each radius by learned values, [S, R]; `quality` [S]; the loss, [S, PIECES]."""
    head = heads.make(name, *goals.value_bounds(hindsight(settings), GAMMA), BINS)
    network = ensemble(entity.state_value(head.size, shape(settings.value_width)), 1)
    sample, optimiser = sampler(settings), optax.adam(settings.learning_rate)

    def update(
        carry: tuple[Any, Any, Any], key: Key, data: Trajectories
    ) -> tuple[tuple[Any, Any, Any], Array]:
        params, slow, moments = carry
        steps = sample(data, key, 0).value
        before, after = ((x[OBSERVATION], x[GOAL]) for x in (steps.observation, steps.next_observation))
        of_slow = (network.apply(slow, *x) for x in (before, after))
        fit = gcivl.regression(head, steps, GAMMA, settings.expectile, *of_slow)
        cost = lambda params: (fit.weight * head.loss(network.apply(params, *before), fit.target)).mean()
        loss, gradient = jax.value_and_grad(cost)(params)
        change, moments = optimiser.update(gradient, moments, params)
        params = optax.apply_updates(params, change)
        return (params, optax.incremental_update(params, slow, SLOW), moments), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(carry: Any, data: Trajectories, key: Key) -> tuple[Any, Array]:
        keys = jax.random.split(key, settings.value_updates // PIECES)
        carry, loss = jax.lax.scan(functools.partial(update, data=data), carry, keys)
        return carry, loss.mean()

    @jax.jit
    def start(key: Key, queries: Questions) -> tuple[Any, Any, Any]:
        params = network.init(key, queries.state, queries.goal)
        return params, jax.tree.map(jnp.copy, params), optimiser.init(params)

    @jax.jit
    def judge(params: Any, queries: Questions) -> tuple[Answers, dict[str, Array]]:
        value = lambda s, g: head.value(network.apply(params, s, g))[0]
        s, g, w = queries.state, queries.goal, queries.candidates
        answers = Answers(value(s, g), value(s[:, None], w), value(w, g[:, None]))
        return answers, over_radii(settings, queries, answers)

    rows = []
    for seed in range(settings.seeds):
        data, key = jax.device_put(logged(settings, seed)), seed_key(settings, "value", seed)
        queries = questions(settings, seed)
        carry, losses = start(key, queries), []
        for piece in range(PIECES):
            carry, loss = advance(carry, data, jax.random.fold_in(key, piece))
            losses.append(float(loss))
            work.progress(1)
        answers, gains = jax.device_get(judge(carry[0], queries))
        rows.append({**gains, **quality(jax.device_get(queries), answers), "loss": losses})
    return studies.stacked(rows)


def quality(queries: Questions, answers: Answers) -> dict[str, float]:
    """How well values know the truth.

    ``ranking``: rank correlation of V(w, g) with the fewest steps among the candidates of a question, its mean over
    questions; ``order``: that of V(s, g) over questions; ``bias`` and ``error``: mean of V(s, w) - V*(s, w), and root
    of its mean square; ``far_bias``: that mean of V(s, g).
    """
    rows = [
        stats.spearmanr(value, -steps).statistic
        for value, steps in zip(answers.far, queries.far, strict=True)
        if np.ptp(steps) > 0 and np.ptp(value) > 0  # else there is no order
    ]
    near = answers.near - np.asarray(true_value(queries.near))
    return {
        "ranking": float(np.mean(rows)),
        "order": float(stats.spearmanr(answers.value, -queries.steps).statistic),
        "bias": float(near.mean()),
        "error": float(np.sqrt(np.square(near).mean())),
        "far_bias": float(np.mean(answers.value - np.asarray(true_value(queries.steps)))),
    }


# ---- reports -------------------------------------------------------------------------------------------------------

PUBLISHED = studies.published("hecrl")
PAPER = "HECRL (Haramati et al., ICLR 2026), "
PROTOTYPE = "our prototype, one seed: "
RATIO = 0.75  # of objects displaced by the diffusion, in those of a regression


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper says, what our prototype saw, and what we ask."""
    if "subgoals" in result:
        yield from _subgoal_claims(result["subgoals"])
    if "values" in result:
        yield from _value_claims(result["values"])


def _subgoal_claims(subgoals: Mapping[str, Any]) -> Iterator[studies.Claim]:
    before, of = PUBLISHED["prototype"], lambda model, kind: subgoals[model][kind]["displaced"]
    text = "logged subgoals displace 1.44 of 3 objects (within 0.05 in the mean)"
    data = subgoals["data"][DATA][LOGGED]["displaced"]
    expected = before["data"][LOGGED]
    near = studies.mean_within(expected - 0.05, expected + 0.05)
    yield studies.Claim(text, f"{PROTOTYPE}{expected}", data, near)
    below = studies.every(lambda x: x <= RATIO)
    for other in (REGRESSION, SAME):
        for kind in (UNSEEN, MORE):
            text = (
                f"{kind}: the diffusion displaces at most {RATIO} of what {other} does, in every seed (ratio)"
            )
            where = studies.OURS
            if kind == UNSEEN and other == SAME:
                where = PROTOTYPE + " against ".join(str(before[model][kind]) for model in (DIFFUSION, SAME))
            elif kind == UNSEEN:
                mixed, stacked = (
                    f"{x['diffusion']} against {x['awr']}" for x in PUBLISHED["displaced"].values()
                )
                where = f"{PAPER}cubes, weighted: {mixed}; cubes that are stacked: {stacked}"
            yield studies.Claim(text, where, of(DIFFUSION, kind) / of(other, kind), below)
    text = "logged pairs: the diffusion displaces a number closer to the data's than regression (difference)"
    closer = np.abs(of(REGRESSION, LOGGED) - data) - np.abs(of(DIFFUSION, LOGGED) - data)
    yield studies.Claim(text, studies.OURS, closer, studies.positive)
    text = "unseen pairs: subgoals of the diffusion are nearer to the goal than the state (fewest steps, difference)"
    yield studies.Claim(text, studies.OURS, subgoals[DIFFUSION][UNSEEN]["nearer"], studies.positive)


def _value_claims(values: Mapping[str, Any]) -> Iterator[studies.Claim]:
    one, other = (values[head] for head in HEADS)
    text = "HL-Gauss ranks candidates better by V(w, g) than a scalar (rank correlation with the truth, difference)"
    yield studies.Claim(text, studies.OURS, other["ranking"] - one["ranking"], studies.positive)
    text = "HL-Gauss has a smaller error of V(s, w), which R is compared with (log of the ratio)"
    yield studies.Claim(text, studies.OURS, np.log(one["error"] / other["error"]), studies.positive)
    text = "at its best R, the selection gains more steps with HL-Gauss than with a scalar (difference)"
    yield studies.Claim(text, studies.OURS, best(other) - best(one), studies.positive)
    text = "HL-Gauss depends less on the choice of R: mean gain over R, in that of the best R (difference)"
    yield studies.Claim(text, studies.OURS, share_of_best(other) - share_of_best(one), studies.positive)
    for head in HEADS:
        text = f"{head}: at its best R, the selection gains at least half of what it gains by true values (ratio)"
        share = best(values[head]) / best(values[TRUTH])
        yield studies.Claim(text, studies.OURS, share, studies.mean_within(low=0.5))


def best(row: Mapping[str, Any]) -> np.ndarray:
    """Steps gained [S] by each seed at the radius that is best for the others."""
    return statistics.held_out_best(row["gain"])


def share_of_best(row: Mapping[str, Any]) -> np.ndarray:
    """The mean gain over radii in the mean gain at the `best`: 1 if R does not matter.

    One number for each seed [S], whose mean is the ratio of both means over seeds and whose spread is that of this
    ratio (the delta method), to which the denominator contributes, too. A seed's own ratio has a denominator near 0.
    """
    over_radii, at_best = row["gain"].mean(1), best(row)
    gained = max(at_best.mean(), 1e-6)
    ratio = over_radii.mean() / gained
    return ratio + (over_radii - ratio * at_best) / gained


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """What came out, in tables."""
    settings = result["settings"]
    yield "# HECRL: subgoals from a diffusion model"
    yield (
        f"`{result['command']}`, {result['wall_seconds'] / 60:.0f} minutes on {result['hardware']['cores']} cores. "
        f"{studies.program(result, __file__)} says what is compared. {settings['seeds']} seeds, each "
        f"with data of its own: {settings['episodes']} episodes of {settings['steps']} steps, {OBJECTS} objects. Mean "
        "and 95 % interval."
    )
    if "subgoals" in result:
        yield from _subgoal_report(result["subgoals"], settings)
    if "values" in result:
        yield from _value_report(result["values"], settings)


def _subgoal_report(subgoals: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Subgoals"
    yield (
        f"{settings['updates']:,} updates of {settings['batch_size']} rows, {settings['layers']} layers of width "
        f"{settings['width']}. Objects displaced by more than {MOVED}, the fewest steps from the state to the subgoal "
        f"(K = {settings['subgoal_steps']}), and how many steps nearer the goal is from there; one candidate for each "
        f"of {settings['pairs']} pairs. *{MORE}*: {OBJECTS + 1} objects, which no model has seen."
    )
    kinds, before = (LOGGED, UNSEEN, MORE), PUBLISHED["prototype"]
    models = {**subgoals["data"], **{name: row for name, row in subgoals.items() if name != "data"}}
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


def _value_report(values: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Values"
    yield (
        f"{settings['value_updates']:,} updates of {settings['batch_size']} rows, width {settings['value_width']}; "
        f"{settings['questions']} pairs of random arrangements with {settings['candidates']} candidates each, up to "
        f"{settings['farthest']} steps of behaviour away. Steps gained by HECRL's selection, with a low level that "
        f"reaches what is at most {settings['competence']} steps away; in brackets the share of selections that are "
        f"farther. By the truth that is R = {float(true_value(settings['competence'])):.1f}. *Best R*: each seed at "
        "the radius that is best on average for the others."
    )
    rows = [
        (
            name,
            *(f"{x:.2f} ({y:.2f})" for x, y in zip(row["gain"].mean(0), row["beyond"].mean(0), strict=True)),
            studies.between(best(row)),
            studies.between(share_of_best(row)),
        )
        for name, row in values.items()
    ]
    yield studies.table(
        ("", *(f"R = {radius}" for radius in settings["radii"]), "best R", "mean over R / best"), rows
    )
    yield "![steps gained against R](radius.png)"
    columns = {
        "ranking": "rank correlation of V(w, g) among candidates",
        "order": "of V(s, g) over pairs",
        "bias": "V(s, w) above the truth",
        "error": "its error",
        "far_bias": "V(s, g) above the truth",
    }
    yield studies.table(
        ("", *columns.values()),
        [(head, *(studies.between(values[head][what]) for what in columns)) for head in HEADS],
    )


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Objects displaced by each model, and success against the radius."""
    if "subgoals" in result:
        subgoals = result["subgoals"]
        scores = {
            f"{name}, {kind}": studies.band(row[kind]["displaced"])
            for name, row in {**subgoals["data"], **{x: subgoals[x] for x in MODELS}}.items()
            for kind in (LOGGED, UNSEEN)
            if kind in row
        }
        plot.bars(
            folder / "displaced.png", scores, "objects displaced, mean and 95 % interval", title="Subgoals"
        )
    if "values" in result:
        radii = result["settings"]["radii"]
        curves = {name: (radii, *studies.bands(row["gain"].T)) for name, row in result["values"].items()}
        plot.lines(folder / "radius.png", curves, "R", "steps gained", title="HECRL's selection")


if __name__ == "__main__":
    studies.main(Settings(), run)
