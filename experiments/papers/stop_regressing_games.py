"""The online ordering of "Stop Regressing" (Farebrother et al., ICML 2024) on small games: which head makes DQN best?

    python -m experiments.papers.stop_regressing_games

The paper's figure 4: over 60 Atari games of 200 million frames, DQN with HL-Gauss is better than C51, that than
squared error, that than two-hot. Here the games are those of MinAtar (Young & Tian 2019), 10 x 10 cells, as gymnax
(``pip install --no-deps gymnax``) has them, cut off after 1,000 steps (Freeway after 2,500), with MinAtar's sticky
actions, which gymnax leaves out; the network reads the cells without convolutions; and the budget is a hundred
thousand steps. Everything but the head is the same: learning rate, support [-10, 10] and 51 outputs, the last two as
on Atari. There heads have learning rates of their own, targets take the greatest value of the slow network, and that
is copied every 8,000 steps; here targets are double DQN's, and slow networks follow by 0.01 in each update.

One program acts, remembers and learns: blocks of steps in all environments, then the updates that these allow. The
score is the mean return of whole episodes of the greedy policy, in new environments; for the ordering over games each
game's scores are divided by the mean over all heads, as no game should count more than another.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import online, plot, statistics, train
from rl.agents import dqn
from rl.envs import functional, minatar
from rl.envs.world import World
from rl.replay import ring
from rl.types import Array, Key, Learner, State, Transition
from rl.values import heads

GAMES = ("Breakout-MinAtar", "Asterix-MinAtar", "SpaceInvaders-MinAtar")
PUBLISHED: list[str] = studies.published("stop_regressing")["ordering"]  # from best to worst
OUTPUTS = 51
ENVIRONMENTS = 8  # stepped together
BLOCK = 8  # steps of each between updates
STEPS_PER_UPDATE = 4
EVALUATED = 64  # environments


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    games: str = ",".join(GAMES)  # of gymnax, comma-separated
    heads: str = ",".join(PUBLISHED)  # comma-separated
    seeds: int = 5  # of each game and head
    steps: int = 102_400  # environment steps of each
    evaluations: int = 4  # while learning
    learning_rate: float = 3e-4  # of every head
    hidden: int = 128  # width of its two layers
    low: float = -10.0  # of the support of heads that have one
    high: float = 10.0  # likewise; values on Space Invaders exceed 10
    seed: int = 0  # of all
    out: str = "results/papers/stop_regressing_games"


class Carry(NamedTuple):
    """What one block hands to the next."""

    learner: State
    memory: ring.Ring
    seen: Array  # [N, O]
    first: Array  # [N] bool, an episode starts with what is seen
    world: Any


def run(settings: Settings) -> dict[str, Any]:
    """Trains every head on every game; writes and returns what came out.

    Raises:
      ImportError: gymnax is not installed.
      ValueError: an unknown game or head, or settings that allow no interval or evaluation.
    """
    check(settings)
    names, tried = settings.games.split(","), settings.heads.split(",")
    variants = {
        f"{name}, {head}": studies.Variant(
            functools.partial(train_one, settings, name, head), studies.chosen(settings, "games", "heads")
        )
        for name in names
        for head in tried
    }
    finished = studies.train(settings, variants, "games x heads")
    scores = {name: {head: finished.outcomes[f"{name}, {head}"] for head in tried} for name in names}
    rows = {
        "wall_seconds": finished.seconds,
        "scores": scores,  # {game: {head: [evaluations, seeds]}}
        "relative": {head: statistics.summary(x) for head, x in relative(scores).items()},
    }
    result = studies.finish(settings, rows, report, claims, trained=finished)
    draw(settings, Path(settings.out), scores)
    return result


def check(settings: Settings) -> None:
    """Raises ValueError on what `run` would find out only after minutes."""
    studies.names("games", settings.games, minatar.names())
    studies.names("heads", settings.heads, heads.NAMES)
    studies.check_seeds(settings.seeds)
    if settings.evaluations < 1 or blocks(settings) < 1:
        raise ValueError(
            f"--steps={settings.steps} are fewer than {ENVIRONMENTS * BLOCK} for each of "
            f"--evaluations={settings.evaluations}, of which there must be one at least"
        )
    whole = ENVIRONMENTS * BLOCK * settings.evaluations
    if settings.steps % whole:
        raise ValueError(
            f"--steps={settings.steps} must be a multiple of {whole}: between two of --evaluations="
            f"{settings.evaluations} are whole blocks of {ENVIRONMENTS * BLOCK} steps"
        )


def blocks(settings: Settings) -> int:
    """Of steps, between two evaluations."""
    return settings.steps // (ENVIRONMENTS * BLOCK * settings.evaluations)


# ---- learning ---------------------------------------------------------------------------------------------------


def train_one(settings: Settings, name: str, head: str, work: studies.Work) -> np.ndarray:
    """Scores [evaluations, S] of one head in one game."""
    longest = functional.time_limit(functional.GYMNAX + name)
    return learn(settings, minatar.make(name), head, longest)


def learn(settings: Settings, game: World, name: str, longest: int) -> np.ndarray:
    """Scores [evaluations, S] of DQN with the head called ``name``; episodes end after ``longest`` steps."""
    head = heads.make(name, settings.low, settings.high, OUTPUTS)
    config = dqn.Config(
        target_rate=0.01,
        epsilon_updates=max(1, settings.steps // STEPS_PER_UPDATE // 4),
        learning_rate=settings.learning_rate,
        hidden=(settings.hidden,) * 2,
    )
    learner = dqn.make(config, game.spec, head)
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)

    @jax.jit
    def every(keys: Key) -> Array:
        return jax.lax.map(lambda key: one(settings, game, learner, longest, key), keys)

    return np.asarray(every(keys)).T


def sample(memory: ring.Ring, key: Key, step: Array | int = 0) -> Transition:
    """A batch of cells, which are kept as bytes, as numbers."""
    batch = ring.sampler(32)(memory, key, step)
    return batch._replace(
        observation=batch.observation.astype(jnp.float32),
        next_observation=batch.next_observation.astype(jnp.float32),
    )


def one(settings: Settings, game: World, learner: Learner, longest: int, key: Key) -> Array:
    """One seed's scores [evaluations]."""
    init_key, world_key, run_key = jax.random.split(key, 3)
    seen, world = game.reset(jax.random.split(world_key, ENVIRONMENTS))
    example = online.example(game.spec, jnp.uint8)
    cells, nothing = example.observation[0], jnp.zeros(())
    row = ring.Row(cells, example.action[0], nothing, nothing, cells, jnp.zeros((), bool))
    carry = Carry(
        learner=learner.init(init_key, example._replace(observation=example.observation.astype(jnp.float32))),
        memory=ring.empty(row, settings.steps),
        seen=seen,
        first=jnp.ones(ENVIRONMENTS, bool),
        world=world,
    )
    updates = train.scan_updates(learner.update, sample, ENVIRONMENTS * BLOCK // STEPS_PER_UPDATE)

    def block(carry: Carry, key: Key) -> tuple[Carry, None]:
        act_key, learn_key = jax.random.split(key)
        (seen, first, world), rows = jax.lax.scan(
            lambda state, key: act(game, learner, carry.learner, state, key),
            (carry.seen, carry.first, carry.world),
            jax.random.split(act_key, BLOCK),
        )
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        memory = ring.insert(carry.memory, flat)
        state, _ = updates(carry.learner, memory, learn_key)
        return Carry(state, memory, seen, first, world), None

    def stage(carry: Carry, key: Key) -> tuple[Carry, Array]:
        keys = jax.random.split(key, blocks(settings) + 1)
        carry, _ = jax.lax.scan(block, carry, keys[1:])
        return carry, evaluate(game, learner, carry.learner, longest, keys[0])

    return jax.lax.scan(stage, carry, jax.random.split(run_key, settings.evaluations))[1]


def act(
    game: World, learner: Learner, state: State, now: tuple[Array, Array, Any], key: Key
) -> tuple[Any, ring.Row]:
    """One step of all environments."""
    seen, first, world = now
    choice_key, step_key = jax.random.split(key)
    assert learner.explore is not None
    action = learner.explore(state, seen.astype(jnp.float32), choice_key)
    outcome = game.step(jax.random.split(step_key, ENVIRONMENTS), world, action)
    row = ring.Row(seen, action, outcome.reward, 1.0 - outcome.terminated, outcome.next_observation, first)
    return (outcome.observation, outcome.first, outcome.state), row


def evaluate(game: World, learner: Learner, state: State, longest: int, key: Key) -> Array:
    """Mean return of the first episode, of at most ``longest`` steps, of each of `EVALUATED` environments."""
    keys = jax.random.split(key, longest + 1)
    seen, world = game.reset(jax.random.split(keys[0], EVALUATED))

    def step(now: tuple[Array, Any, Array], key: Key) -> tuple[tuple[Array, Any, Array], Array]:
        seen, world, running = now
        action = learner.act(state, seen.astype(jnp.float32), key)
        outcome = game.step(jax.random.split(key, EVALUATED), world, action)
        return (outcome.observation, outcome.state, running & ~outcome.first), jnp.where(
            running, outcome.reward, 0.0
        )

    start = seen, world, jnp.ones(EVALUATED, bool)
    return jax.lax.scan(step, start, keys[1:])[1].sum(0).mean()


# ---- reports ----------------------------------------------------------------------------------------------------


def relative(scores: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Last scores over the mean of all heads' in the same game, averaged over games: {head: [S]}."""
    each = {}
    for name, by_head in scores.items():
        middle = max(np.mean([x[-1].mean() for x in by_head.values()]), 1e-9)
        each[name] = {head: x[-1] / middle for head, x in by_head.items()}
    return {
        head: np.mean([by_head[head] for by_head in each.values()], 0) for head in next(iter(each.values()))
    }


def draw(settings: Settings, out: Path, scores: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Every game's curves, and the heads over all games."""
    steps = settings.steps // settings.evaluations * np.arange(1, settings.evaluations + 1)
    plot.learning_curves(
        out / "games.png",
        {
            f"{name.removesuffix('-MinAtar')}: return": {head: (steps, x) for head, x in by_head.items()}
            for name, by_head in scores.items()
        },
        title="DQN by value head, greedy policy",
        xlabel="steps",
    )
    plot.bars(
        out / "heads.png",
        {head: studies.band(x) for head, x in relative(scores).items()},
        "return over the mean of all heads, 95 % interval over seeds",
        title=f"{len(scores)} games, {settings.steps:,} steps",
    )


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """Every neighbouring pair of the published ordering, where all of its heads were tried."""
    each = relative(result["scores"])
    if set(PUBLISHED) == set(each):
        source = studies.published("stop_regressing")["source"]
        for better, worse in itertools.pairwise(PUBLISHED):
            text = f"{better} > {worse}: difference of relative scores"
            yield studies.Claim(text, source, each[better] - each[worse], studies.positive)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    tried = settings["heads"].split(",")
    yield "# Value heads online, on small games"
    yield f"`{result['command']}`, {result['wall_seconds'] / 60:.0f} minutes on {result['hardware']['cores']} cores."
    yield (
        f"Return of the greedy policy after {settings['steps']:,} steps, {settings['seeds']} seeds, Student's 95 % "
        "intervals. *Relative* is divided by the mean over all heads in each game and averaged over games."
    )
    rows = []
    for head in tried:
        last = [by_head[head][-1] for by_head in result["scores"].values()]
        rows.append((f"`{head}`", *map(studies.between, [*last, result["relative"][head]])))
    yield studies.table(("head", *result["scores"], "relative"), rows)
    ours = f"Found: {' > '.join(sorted(tried, key=lambda head: -result['relative'][head]['mean']))}."
    published = f"\nPublished, on Atari: {' > '.join(PUBLISHED)}." if set(PUBLISHED) == set(tried) else ""
    yield ours + published


if __name__ == "__main__":
    studies.main(Settings(), run)
