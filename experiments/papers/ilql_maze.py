"""Does token-level Q-learning find a way that no logged walk shows? ILQL on the double-T maze of LMRL-Gym.

    python -m experiments.papers.ilql_maze

A small transformer reads where it is (row, column, walls) and writes a move. Its log are walks that each stay in one
part of the maze. Two designs of that log:

- *corrected*: moves aim at random cells. The most frequent move is wrong almost everywhere, so that the way out has to
  be put together from pieces of different walks, by a backup ("stitching").
- *published*: moves aim at the goal, as LMRL-Gym describes its data. The most frequent move is the best one everywhere,
  so that greedy cloning is optimal and whatever sharpens cloning looks like reinforcement learning.

Which cells make a part is our choice, and so are the corrected design and all checks here. Compared are cloning
(sampled, four times sharpened, greedy, of successful walks only), Monte Carlo with the scalar head and ILQL with every
head. A head starts at one given value: scalars and quantiles by their bias, a categorical one by the middle of its
support, so that nothing but the representation differs. ILQL is run in three settings: one that was known to work (tau
0.8); one known to fail, although it had looked fine on the seed it was tuned on (tau 0.9, slow targets, another start);
and tau 0.9 with the targets and the start of the first, which tells tau from the rest. All were chosen on seed 0, which
is not reported.

LMRL-Gym's numbers stand beside the second design. Its log, its model (GPT-2 small) and its settings are others.

With 26 cells everything can be computed: the values and policies that each method has in a table, from the same log;
how far the network's V is from those; and the return of a policy, its expectation and not a sample. A move is one of
four words: the policy is renormalised over these, and the share that they had is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import plot, train
from rl.agents import ilql, lm_bc, optimisers
from rl.agents.optimisers import Adam, Optimiser
from rl.envs import double_t_maze as maze
from rl.envs.tabular import Episodes
from rl.language import model
from rl.language.model import LM
from rl.networks.transformer import Shape
from rl.replay import tokens as replay
from rl.replay.source import Source
from rl.types import Array, Key, Params, State, TokenBatch
from rl.values import heads
from rl.values.heads import ValueHead

LMRL = studies.published("lmrl_gym")


class Recipe(NamedTuple):
    """A way to learn values, and what was chosen for it on seed 0."""

    backup: str
    expectile: float = 0.7  # tau
    target_rate: float = 0.05  # Polyak step
    start: float = -15.0  # of every value; categorical heads represent [2 start, 0]


MC = "MC"
RECIPES = {
    MC: Recipe("mc", start=-22.5),
    "ILQL, tau 0.8": Recipe("expectile", 0.8),
    "ILQL, tau 0.9": Recipe("expectile", 0.9),
    "ILQL, tau 0.9, slow": Recipe("expectile", 0.9, 0.02, -10.0),
}
OUTPUTS = 31  # of all heads but the scalar
STEERING = (1.0, 4.0, 16.0)  # beta
REPORTED = 4.0  # the one chosen on seed 0
SHARPER = 4.0
SHARP = f"BC, sharpened x{SHARPER:g}"
WORKS, FAILED = "ILQL, tau 0.8", "ILQL, tau 0.9, slow"
CQL_WEIGHT = 0.01
OPTIMUM = -6.84
DISCOUNT = 0.99  # per token
PARTS = {"corrected": False, "published": True}
# Values learned on the design of the log that is there to be dismissed.
PUBLISHED = [(name, "scalar") for name in (MC, "ILQL, tau 0.8")]
# {method here: its name among the published returns}, from best to worst there
OF_LMRL = {f"{WORKS}, scalar": "ilql", f"{MC}, scalar": "mc", "BC of successes": "filtered_bc", "BC": "bc"}

STATES = len(maze.CELLS)
STARTS = np.array([state for state in range(STATES) if state != maze.GOAL])


def words(text: str) -> list[str]:
    """The tokens of a text of the maze: row, column, all walls; or a move and the newline that ends it."""
    return text.split(" ", 2) if " " in text else [text.strip(), "\n"]


_TEXTS = [maze.see(state) for state in range(STATES)] + [f"{action}\n" for action in maze.ACTIONS]
VOCABULARY = tuple(dict.fromkeys(word for text in _TEXTS for word in words(text)))
SEEN = np.array([[VOCABULARY.index(word) for word in words(maze.see(state))] for state in range(STATES)])
SAID = np.array([[VOCABULARY.index(word) for word in words(action + "\n")] for action in maze.ACTIONS])
TURN = SEEN.shape[1] + SAID.shape[1]  # tokens from one sight to the next


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    seeds: int = 4  # logs, each with its own agents
    seed: int = 1  # the first of them; all settings were chosen on seed 0
    walks: int = 1240  # in a log
    updates: int = 6000  # of values
    cloning: int = 1000  # updates of cloning
    batch_size: int = 64  # moves per update
    learning_rate: float = 1e-3  # falls to 0 along a cosine
    width: int = 32  # of the one-layer transformer
    parts: str = "corrected,published"  # designs of the log
    heads: str = ",".join(heads.NAMES)  # that ILQL learns with on the corrected one
    out: str = "results/papers/ilql_maze"


class Log(NamedTuple):
    """Logged moves, valid ones first; ``M`` rows of one move and what was seen next."""

    rows: TokenBatch  # [M, T]; the reward is the move's
    returns: np.ndarray  # [M] the discounted return from the move's last token to the end of its walk
    counts: np.ndarray  # [S, A, S] how often each move was made
    won: np.ndarray  # [M] bool: of a walk that reaches the goal
    moves: tuple[np.ndarray, np.ndarray]  # the state and the action of each valid row
    valid: int  # rows


# ---- the study ----------------------------------------------------------------------------------------------------


def run(settings: Settings) -> dict[str, Any]:
    """Logs, trains and evaluates everything; returns what result.json holds.

    Raises:
      ValueError: an unknown part or head, or too few seeds for an interval.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    chosen_heads = studies.names("heads", settings.heads, heads.NAMES)
    studies.check_seeds(settings.seeds)
    corrected = [(MC, "scalar"), *((name, head) for name in RECIPES if name != MC for head in chosen_heads)]
    learners = {part: PUBLISHED if PARTS[part] else corrected for part in parts}
    chosen = studies.chosen(settings, "heads", "seeds", "seed")
    seeds = range(settings.seed, settings.seed + settings.seeds)
    variants = {}
    for part, seed in itertools.product(parts, seeds):
        place = f"{part}, seed {seed}"
        variants[place] = studies.Variant(functools.partial(without_values, settings, part, seed), chosen)
        for name, head in learners[part]:
            variants[f"{place}: {name}, {head}"] = studies.Variant(
                functools.partial(with_values, settings, part, seed, name, head),
                {**chosen, "recipe": RECIPES[name]},
                settings.updates,
            )
    trained = studies.train(settings, variants, "maze")
    for cached in (cloned, cloner, value_learner):
        cached.cache_clear()

    def on_one_log(part: str, seed: int) -> dict[str, Any]:
        place = f"{part}, seed {seed}"
        learnt = [trained.outcomes[f"{place}: {name}, {head}"] for name, head in learners[part]]
        return functools.reduce(operator.or_, learnt, trained.outcomes[place])

    stacked = {part: studies.stacked([on_one_log(part, seed) for seed in seeds]) for part in parts}
    outcomes = {
        "recipes": {name: recipe._asdict() for name, recipe in RECIPES.items()},
        "wall_seconds": trained.seconds,
        "parts": stacked,
    }
    result = studies.finish(settings, outcomes, report, claims, trained=trained)
    draw(Path(settings.out), settings, stacked)
    return result


def without_values(settings: Settings, part: str, seed: int, work: studies.Work) -> dict[str, Any]:
    """{method: what it did} on one log: all that has a table, and cloning."""
    data, clone = _log(settings, part, seed), cloned(settings, part, seed)
    filtered = cloner(settings)(data, data.won, _keys(seed)[0])
    logits, of_successes = word_logits(settings, clone), word_logits(settings, filtered)
    returns = {
        **{"exact: " + name: x for name, x in exact_returns(data).items()},
        "BC": expected_return(_softmax(logits)),
        SHARP: expected_return(_softmax(SHARPER * logits)),
        "BC, greedy": expected_return(_greedy(logits)),
        "BC of successes": expected_return(_softmax(of_successes)),
        "BC of successes, greedy": expected_return(_greedy(of_successes)),
    }
    return {name: {"return": x} for name, x in returns.items()}


def with_values(
    settings: Settings, part: str, seed: int, name: str, head: str, work: studies.Work
) -> dict[str, Any]:
    """{method: what it did} of one learner of values on one log."""
    learn = value_learner(settings, RECIPES[name], head)
    data, clone = _log(settings, part, seed), cloned(settings, part, seed)
    return {f"{name}, {head}": learn(data, clone, _keys(seed)[1], work.progress)}


@functools.cache
def cloned(settings: Settings, part: str, seed: int) -> Params:
    """The model that imitates a log, with which all learners of values on it start."""
    data = _log(settings, part, seed)
    return cloner(settings)(data, np.ones(len(data.won)), _keys(seed)[0])


def _log(settings: Settings, part: str, seed: int) -> Log:
    return logged(np.random.default_rng(seed), settings.walks, published=PARTS[part])


def _keys(seed: int) -> Key:
    return jax.random.split(jax.random.key(seed), 3)


# ---- the log ------------------------------------------------------------------------------------------------------


def logged(rng: np.random.Generator, walks: int, *, published: bool) -> Log:
    """A log of `maze.logged`, one row per move: what was seen, what was said, what was seen next."""
    episodes = maze.logged(rng, walks, published=published)
    returns = returns_to_go(episodes)
    won = np.repeat(((episodes.next_state == maze.GOAL) & episodes.valid).any(1), maze.MOVES)
    order = np.argsort(~episodes.valid.reshape(-1), kind="stable")
    state, action, following, returns = (
        x.reshape(-1)[order] for x in (episodes.state, episodes.action, episodes.next_state, returns)
    )
    tokens = np.concatenate([SEEN[state], SAID[action], SEEN[following]], 1).astype(np.int32)
    offset = np.arange(tokens.shape[1])[None] - SEEN.shape[1]
    is_action = np.broadcast_to((offset >= 0) & (offset < SAID.shape[1]), tokens.shape)
    last = np.zeros(tokens.shape, bool)
    last[:, TURN - 1] = True
    valid = int(episodes.valid.sum())
    counts = np.zeros((STATES, len(maze.ACTIONS), STATES))
    np.add.at(counts, (state[:valid], action[:valid], following[:valid]), 1)
    there = (following == maze.GOAL)[:, None]
    return Log(
        rows=TokenBatch(
            tokens=tokens,
            segment=np.ones_like(tokens),
            is_action=is_action,
            reward=np.where(last & ~there, -1.0, 0.0).astype(np.float32),
            discount=np.where(last & there, 0.0, 1.0).astype(np.float32),
            imitate=is_action.astype(np.float32),
        ),
        returns=returns,
        counts=counts,
        won=won[order],
        moves=(state[:valid], action[:valid]),
        valid=valid,
    )


def returns_to_go(episodes: Episodes) -> np.ndarray:
    """From the last token of each move, discounted per token, [N, T]; a walk that was cut off ends there."""
    total = np.zeros(episodes.state.shape)
    after = np.zeros(len(total))
    for t in reversed(range(total.shape[1])):
        after = (
            np.where(episodes.next_state[:, t] == maze.GOAL, 0.0, -1.0) + DISCOUNT ** SAID.shape[1] * after
        )
        after = np.where(episodes.valid[:, t], after, 0.0)
        total[:, t] = after
    return total


def sampler(batch_size: int) -> Source:
    """Draws from the valid rows of (rows, how many are valid); that number may differ without a recompilation."""

    def sample(data: tuple[TokenBatch, Array], key: Key, step: Array | int = 0) -> TokenBatch:
        del step
        rows, valid = data
        return replay.take(rows, jax.random.randint(key, (batch_size,), 0, valid))

    return sample


# ---- in a table ---------------------------------------------------------------------------------------------------


def exact_returns(data: Log) -> dict[str, float]:
    """What each method returns that has a table and the log's frequencies; MC at its best beta."""
    cloned = frequencies(data.counts.sum(-1))
    won = np.zeros_like(cloned)
    np.add.at(won, data.moves, data.won[: data.valid])
    of_successes = frequencies(won)
    with np.errstate(divide="ignore"):
        logits = np.log(cloned)
    q = {MC: monte_carlo(data)} | {f"ILQL, tau {tau:g}": expectile_values(data, tau)[0] for tau in (0.8, 0.9)}
    steer = lambda name, beta: expected_return(_softmax(logits + beta * q[name]))
    return {
        "BC": expected_return(cloned),
        SHARP: expected_return(_softmax(SHARPER * logits)),
        "BC, greedy": expected_return(_greedy(logits)),
        "BC of successes": expected_return(of_successes),
        "BC of successes, greedy": expected_return(most_frequent(of_successes)),
        f"{MC}, beta {REPORTED:g}": steer(MC, REPORTED),
        f"{MC}, best beta": max(steer(MC, beta) for beta in (0.25, *STEERING)),
        **{f"{name}, beta {REPORTED:g}": steer(name, REPORTED) for name in q if name != MC},
    }


def frequencies(often: np.ndarray) -> np.ndarray:
    """The share of each move in every cell, of their numbers [S, A]; uniform where there are none."""
    total = often.sum(-1, keepdims=True)
    return np.where(total > 0, often / np.maximum(total, 1), 1 / often.shape[-1])


def most_frequent(policy: np.ndarray) -> np.ndarray:
    """The most frequent moves of a policy [S, A], each as often as the others of them: all, where nothing is known."""
    best = policy == policy.max(-1, keepdims=True)
    return best / best.sum(-1, keepdims=True)


def exact_value(data: Log, recipe: Recipe) -> np.ndarray:
    """V [S] that ``recipe`` has in a table; of MC the values of the logged moves are averaged."""
    if recipe.backup == "mc":
        often = data.counts.sum(-1)
        return (often * monte_carlo(data)).sum(-1) / np.maximum(often.sum(-1), 1)
    return expectile_values(data, recipe.expectile)[1]


def expectile_values(data: Log, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Q [S, A] of the first word of a move and V [S], by iteration on the log's frequencies; 0 at the goal."""
    often = data.counts.sum(-1)
    chance = data.counts / np.maximum(often[..., None], 1)
    reward = -(1 - chance[..., maze.GOAL])
    value, change = np.zeros(STATES), 1.0
    while change > 1e-10:
        q = DISCOUNT * (reward + DISCOUNT * chance @ value)
        # The expectile is a mean under weights that depend on it.
        weight = often * np.where(q > value[:, None], tau, 1 - tau)
        following = (weight * q).sum(-1) / np.maximum(weight.sum(-1), 1e-12)
        following[maze.GOAL] = 0.0
        value, change = following, np.abs(following - value).max()
    return q, value


def monte_carlo(data: Log) -> np.ndarray:
    """Mean discounted return after the first word of each move, [S, A]; 0 where it was never made."""
    total = np.zeros((STATES, len(maze.ACTIONS)))
    np.add.at(total, data.moves, DISCOUNT * data.returns[: data.valid])
    return total / np.maximum(data.counts.sum(-1), 1)


def expected_return(policy: np.ndarray) -> float:
    """The mean over the 25 starts of the return that a policy [S, A] expects, with the limit on moves."""
    following, reward = maze.step(np.arange(STATES)[:, None], np.arange(len(maze.ACTIONS)))
    alive = np.arange(STATES) != maze.GOAL
    value = -1.0 * alive
    for _ in range(maze.MOVES):
        value = np.where(alive, (policy * (reward + value[following])).sum(-1), 0.0)
    return float(value[STARTS].mean())


# ---- by networks --------------------------------------------------------------------------------------------------


def language_model(settings: Settings) -> LM:
    """A transformer that reads one turn at a time: where it is says all, so that it need not remember."""
    size = settings.width // 2
    shape = Shape(settings.width, layers=1, heads=2, kv_heads=2, head_size=size, inner=2 * settings.width)
    whole = model.make(model.Config(len(VOCABULARY), 2 * TURN, shape))

    def features(params: Params, tokens: Array, segment: Array) -> Array:
        turn = 1 + jnp.arange(tokens.shape[1]) // TURN
        return whole.features(params, tokens, jnp.where(segment > 0, turn, 0))

    return whole._replace(features=features)


@functools.cache
def cloner(settings: Settings) -> Callable[[Log, np.ndarray, Key], Params]:
    """A function of (log, weights [M] of its rows, key) to the parameters of a model that imitates them."""
    config = lm_bc.Config(learning_rate=settings.learning_rate)
    learner = lm_bc.make(config, language_model(settings), heads.scalar(), optimiser(settings.cloning))
    update = train.scan_updates(learner.update, sampler(settings.batch_size), settings.cloning)
    epoch, init = jax.jit(update), jax.jit(learner.init)

    def clone(data: Log, weight: np.ndarray, key: Key) -> Params:
        rows = data.rows._replace(imitate=data.rows.imitate * weight[:, None].astype(np.float32))
        rows = jax.device_put(rows)
        keys = jax.random.split(key)
        state = init(keys[0], replay.take(rows, jnp.arange(2)))
        return epoch(state, (rows, data.valid), keys[1])[0].params["policy"]

    return clone


@functools.cache
def value_learner(
    settings: Settings, recipe: Recipe, head_name: str
) -> Callable[[Log, Params, Key, Callable[[int], Any]], dict[str, Any]]:
    """A function of (log, parameters of its clone, key, what is told of updates by their number).

    It says what was learned: returns and the share of the probability that moves have among all words, by beta; V [S],
    0 at the goal, and the exact one; the largest distance of the two over the cells, over time.
    """
    lm, head = language_model(settings), make_head(recipe, head_name)
    config = ilql.Config(
        discount=DISCOUNT,
        backup=recipe.backup,
        expectile=recipe.expectile,
        cql_weight=CQL_WEIGHT,
        bc_weight=0.0,
        target_rate=recipe.target_rate,
        learning_rate=settings.learning_rate,
        inner=2 * settings.width,
        bias=recipe.start if head.are_values else 0.0,
        chunk=SAID.shape[1],  # a row has no more decisions
    )
    learner = ilql.make(config, lm, head, optimiser(settings.updates))
    steps = max(1, settings.updates // 16)
    epoch = jax.jit(train.scan_updates(learner.update, sampler(settings.batch_size), steps), donate_argnums=0)
    init, value = jax.jit(learner.init), jax.jit(learner.value)
    policies = [
        jax.jit(functools.partial(_steered, dataclasses.replace(config, steering=beta), lm, head))
        for beta in STEERING
    ]

    def learn(data: Log, clone: Params, key: Key, finished: Callable[[int], Any]) -> dict[str, Any]:
        target = exact_value(data, recipe)
        reward = data.rows.reward
        if recipe.backup == "mc":  # the row holds one move: the rest of its walk is paid at once
            reward = np.where(reward != 0, data.returns[:, None], 0.0).astype(np.float32)
        rows = jax.device_put(data.rows._replace(reward=reward))
        keys = jax.random.split(key)
        state = init(keys[0], replay.take(rows, jnp.arange(2)))
        state = state._replace(params={**state.params, "policy": jax.tree.map(jnp.array, clone)})
        errors = []
        for _ in range(settings.updates // steps):
            state, report = epoch(state, (rows, data.valid), keys[1])
            train.check_finite(report)
            v = np.where(np.arange(STATES) == maze.GOAL, 0.0, value(state, jnp.asarray(SEEN), keys[1]))
            errors.append(np.abs(v - target).max())
            finished(steps)
        logits = [np.asarray(policy(state)) for policy in policies]
        returns = [expected_return(_softmax(x[:, SAID[:, 0]])) for x in logits]
        return {
            "return": returns[STEERING.index(REPORTED)],
            "by_steering": returns,
            "legal": [float(_softmax(x)[STARTS][:, SAID[:, 0]].sum(-1).mean()) for x in logits],
            "value": v,
            "exact_value": target,
            "errors": np.array(errors),
        }

    return learn


def make_head(recipe: Recipe, name: str) -> ValueHead:
    """The head called ``name``; a categorical one starts in the middle of its support, at ``recipe.start``."""
    return heads.make(name, 2 * recipe.start, 0.0, OUTPUTS)


def optimiser(updates: int) -> Optimiser:
    """Adam with clipped gradients and a learning rate that falls to 0."""
    return functools.partial(optimisers.build, Adam("cosine", decay_updates=updates, clip=1.0))


def word_logits(settings: Settings, params: Params) -> np.ndarray:
    """The model's logits [S, A] of the first words of moves, in every cell."""
    return np.asarray(_cell_logits(language_model(settings), params))[:, SAID[:, 0]]


def _cell_logits(lm: LM, params: Params) -> Array:
    return lm.logits(params, lm.features(params, jnp.asarray(SEEN), jnp.ones(SEEN.shape, jnp.int32))[:, -1])


def _steered(config: ilql.Config, lm: LM, head: ValueHead, state: State) -> Array:
    """The logits [S, V] that the learner samples from, in every cell."""
    decoder = ilql.decoder(config, lm, head)
    segment = jnp.ones(SEEN.shape, jnp.int32)
    return decoder.extend(
        ilql.decoder_params(state), jnp.asarray(SEEN, jnp.int32), segment, decoder.cache(*SEEN.shape)
    )[0].logits


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis; uniform where nothing is known."""
    top = logits.max(-1, keepdims=True)
    weight = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    weight = np.where(weight.sum(-1, keepdims=True) > 0, weight, 1.0)
    return weight / weight.sum(-1, keepdims=True)


def _greedy(logits: np.ndarray) -> np.ndarray:
    return np.eye(logits.shape[-1])[logits.argmax(-1)]


# ---- what came out ------------------------------------------------------------------------------------------------


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the argument predicts, of those parts that were run."""
    parts, ours = result["parts"], "ours: our choice of design and thresholds"
    above = lambda least: studies.mean_within(low=least)
    near = studies.every(lambda x: x > OPTIMUM - 0.5)
    if methods := parts.get("corrected"):
        carlo, exact = methods[f"{MC}, scalar"]["return"], methods["exact: ILQL, tau 0.8, beta 4"]["return"]
        cloning = {
            name: row["return"]
            for name, row in methods.items()
            if name.removeprefix("exact: ").startswith("BC")
        }
        updates = result["settings"]["cloning"]
        text = "corrected: in a table ILQL is within 0.5 of the optimum, in every seed"
        yield studies.Claim(text, ours, exact, near)
        text = (
            f"corrected: no kind of cloning (networks: {updates:,} updates) gets half way to the optimum from -101, in "
            "every seed"
        )
        half_way = studies.every(lambda x: x < (OPTIMUM - 101) / 2)
        yield studies.Claim(text, ours, np.stack(list(cloning.values())), half_way)
        text = "corrected: MC's return is above cloning's by 15 (difference)"
        yield studies.Claim(text, ours, carlo - cloning["BC"], above(15))
        used = heads_of(methods)
        for head in used:
            text = f"corrected, {head}: ILQL's return (tau 0.8) is above MC's by 25 (difference)"
            values = methods[f"{WORKS}, {head}"]["return"] - carlo
            yield studies.Claim(text, ours, values, above(25))
            text = f"corrected, {head}: the setting that failed has a mean return above -12"
            yield studies.Claim(text, ours, methods[f"{FAILED}, {head}"]["return"], above(-12))
        if {"hl_gauss", "scalar"} <= set(used):
            for name in (name for name in RECIPES if name != MC):
                hl_gauss, scalar = (
                    methods[f"{name}, {head}"]["errors"][:, -1] for head in ("hl_gauss", "scalar")
                )
                text = f"corrected, {name}: V is nearer to the exact one with HL-Gauss than with a scalar"
                yield studies.Claim(text, ours, scalar - hl_gauss, studies.positive)
    if methods := parts.get("published"):
        for better, worse in itertools.pairwise(OF_LMRL):
            if better in methods and worse in methods:
                text = f"published: {better}, returns more than {worse} (difference)"
                high, low = (LMRL["returns"][OF_LMRL[name]] for name in (better, worse))
                source = f"{high} against {low}, LMRL-Gym (Abdulhai et al. 2023), table 4"
                gain = methods[better]["return"] - methods[worse]["return"]
                yield studies.Claim(text, source, gain, studies.positive)
        text = "published: greedy cloning is within 0.5 of the optimum, in every seed"
        yield studies.Claim(text, ours, methods["BC, greedy"]["return"], near)
        text = "published: cloning, sharpened, is above cloning by 25 (difference)"
        yield studies.Claim(text, ours, methods[SHARP]["return"] - methods["BC"]["return"], above(25))


def heads_of(methods: Mapping[str, Any]) -> list[str]:
    """The heads that ILQL was run with."""
    return [head for head in heads.NAMES if f"{WORKS}, {head}" in methods]


def draw(
    folder: Path, settings: Settings, parts: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
) -> None:
    """Returns of every method; on the corrected design the values over the maze, and how fast they come right."""
    for part, methods in parts.items():
        plot.bars(
            folder / f"returns_{part}.png",
            {name: studies.band(outcome["return"]) for name, outcome in methods.items()},
            f"mean return (95 % interval; optimum {OPTIMUM})",
            title=f"Double-T maze, {part} design of the log",
        )
    if "corrected" not in parts:
        return
    methods = parts["corrected"]
    learnt = [name for name in RECIPES if name != MC]
    used = heads_of(methods)
    times = len(methods[f"{WORKS}, {used[0]}"]["errors"][0])
    updates = settings.updates // times * np.arange(1, times + 1)
    plot.learning_curves(
        folder / "propagation.png",
        {
            f"largest |V - exact V|: {name}": {
                head: (updates, methods[f"{name}, {head}"]["errors"].T) for head in used
            }
            for name in learnt
        },
        title="How fast values come right",
    )
    pictures = {}
    for name in learnt:
        pictures[f"{name}: exact"] = methods[f"{name}, {used[0]}"]["exact_value"][0]
        pictures |= {f"{name}: {head}": methods[f"{name}, {head}"]["value"][0] for head in used}
    plot.cells(
        folder / "values.png",
        {label: picture(value) for label, value in pictures.items()},
        (-25.0, 0.0),
        title=f"V of every cell, log {settings.seed}: in a table, and learned",
        columns=1 + len(used),
    )


def picture(value: np.ndarray) -> np.ndarray:
    """Values [S] on the map, NaN in walls."""
    rows, columns = np.transpose(maze.CELLS)
    grid = np.full((rows.max() + 2, columns.max() + 2), np.nan)
    grid[rows, columns] = value
    return grid


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    last = settings["seed"] + settings["seeds"] - 1
    yield "# ILQL on the double-T maze"
    yield (
        f"`{result['command']}`, {result['wall_seconds']:.0f} s on {result['hardware']['cores']} cores; logs "
        f"{settings['seed']} to {last}. Mean return over the 25 starts (optimum {OPTIMUM}, at worst -101), its mean "
        f"over logs and Student's 95 % interval. {studies.program(result, __file__)} says what is compared."
    )
    text = functools.partial(studies.plus_minus, style=".1f")
    for part, methods in result["parts"].items():
        yield f"## The {part} design"
        beside = [LMRL["returns"]] if PARTS[part] else []
        yield studies.table(
            ("", "return", "each log", *("LMRL-Gym" for _ in beside)),
            [
                (
                    name,
                    text(outcome["return"]),
                    _each(outcome["return"]),
                    *(theirs.get(OF_LMRL.get(name), "") for theirs in beside),
                )
                for name, outcome in methods.items()
            ],
        )
        if beside:
            yield _what_differs(settings)
        yield (
            "Networks: the return by beta, the share of the probability on moves, and the largest distance of V from "
            "the exact one over the cells, at the end."
        )
        rows = []
        for name, outcome in methods.items():
            if "errors" in outcome:
                off = outcome["errors"][:, -1]
                cells = [text(outcome["by_steering"][:, i]) for i in range(len(STEERING))]
                cells += [" ".join(f"{share:.2f}" for share in outcome["legal"].mean(0))]
                rows.append((name, *cells, *((text(off), _each(off)) if MC not in name else ("", ""))))
        steering = (f"beta {beta:g}" for beta in STEERING)
        yield studies.table(("", *steering, "moves, by beta", "distance", "each log"), rows)


def _what_differs(settings: Mapping[str, Any]) -> str:
    """How the study is unlike the one whose returns stand beside it."""
    theirs, ours = LMRL["settings"], RECIPES[WORKS]
    return (
        "*LMRL-Gym*: its returns in the fully observed maze (Abdulhai et al. 2023, table 4). What differs: our log is "
        "made here, by the paper's description; the model is a transformer of one layer and width "
        f"{settings['width']} (there {theirs['model']}); cloning has {settings['cloning']:,} updates and values have "
        f"{settings['updates']:,}, of {settings['batch_size']} moves; tau is {ours.expectile} ({theirs['expectile']}), "
        f"beta {REPORTED:g} ({theirs['steering']}) and the weight of CQL's term {CQL_WEIGHT} "
        f"({theirs['cql_weight']}); a return is computed exactly (there from 32 walks for each start)."
    )


def _each(values: np.ndarray) -> str:
    return " ".join(f"{x:.1f}" for x in values)


if __name__ == "__main__":
    studies.main(Settings(), run)
