"""Does the robust backup help a deep agent when the pendulum is not the one that was logged?

    python -m experiments.papers.robust_deep

The task is MuJoCo's InvertedPendulum-v5 with the cart's force in five steps and a random force added to each, so
that one action has many outcomes: an f-divergence can only move mass between outcomes that the data show. For every
seed a clumsy scripted controller is logged, a dynamics ensemble fitted, and conservative Q-learning with an HL-Gauss
head trained from the same log several times: as it is; with next states drawn from the ensemble but no adversary (the
control: what changes with the model alone); and with adversaries of two divergences at two prices. Every policy is
then dropped into pendulums with another gravity, pole mass and joint friction. A seed is a log, a model, an agent
and its episodes, so that Student's intervals over seeds, and of differences within seeds, are honest.

The wrapper is the one behind ``experiments.offline --robust``; here it is called directly, to share each seed's log
and model between the variants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import data, envs, plot, statistics, train
from rl.agents import cql, robust
from rl.dynamics import ensemble, termination
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Array, Key, Learner, Spec, State
from rl.values import heads

ENVIRONMENT = "InvertedPendulum-v5"
# Observed: cart position, pole angle, and their velocities. Chosen: one of five forces, full left to full right.
SPEC = Spec((4,), 5, discrete=True)
BALANCING = np.array(
    [0.17, 2.7, 0.2, 0.5]
)  # gains, in units of the largest force, that just keep the pole up
CONFIG = cql.Config(discount=0.97, weight=0.5, target_rate=0.02, learning_rate=1e-3, hidden=(32, 32))
DYNAMICS = ensemble.Config(members=5, elites=5, hidden=(32, 32), decay=(0.0, 0.0, 0.0), updates=2000)

# The divergence and the price of a shift; at a price that no adversary pays, only the model is left.
VARIANTS: dict[str, tuple[str, float] | None] = {
    "plain": None,
    "model, no adversary": ("tv", 1e6),
    "TV, price 0.3": ("tv", 0.3),
    "TV, price 0.03": ("tv", 0.03),
    "KL, price 0.03": ("kl", 0.03),
}
WORLDS: dict[str, tuple[float, ...]] = {
    "gravity": (1.0, 2.0, 3.0, 4.0, 5.0),
    "pole mass": (1.0, 3.0, 6.0, 10.0, 15.0),
    "joint friction": (0.0, 1.0, 4.0, 16.0),
}


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    seeds: int = 16  # logs, each with its own model and agents
    steps: int = 5000  # logged steps of each
    updates: int = 4000  # gradient steps of each agent
    batch_size: int = 64  # transitions per update
    kick: float = 0.3  # deviation of the random force, in units of the largest force
    episodes: int = 4  # per policy and world
    limit: int = 300  # steps of an episode, here and in the log
    seed: int = 0  # of everything
    out: str = "results/papers/robust_deep"


def run(settings: Settings) -> dict[str, Any]:
    """Logs, fits, trains and evaluates; returns what result.json holds."""
    studies.check_seeds(settings.seeds)
    evaluations = sum(len(factors) for factors in WORLDS.values())
    depends_on = {**studies.chosen(settings), "worlds": WORLDS}
    variants = {"logs and models": studies.Variant(functools.partial(describe, settings), depends_on)}
    for name, adversary in VARIANTS.items():
        train_one = functools.partial(train_variant, settings, adversary)
        variants[name] = studies.Variant(train_one, {**depends_on, "adversary": adversary}, 1 + evaluations)
    finished = studies.train(settings, variants, "variants")
    prepared.cache_clear()
    returns = {name: finished.outcomes[name]["returns"] for name in VARIANTS}
    rows = {
        "agent": dataclasses.asdict(CONFIG),
        "dynamics": dataclasses.asdict(DYNAMICS),
        "worlds": WORLDS,
        **finished.outcomes["logs and models"],
        "metrics": {name: finished.outcomes[name]["metrics"] for name in VARIANTS},
        "returns": returns,
        "summary": summary(returns),
        "wall_seconds": finished.seconds,
    }
    result = studies.finish(settings, rows, report, claims, trained=finished)
    draw(Path(settings.out), returns)
    return result


@functools.cache
def prepared(settings: Settings) -> tuple[Dataset, ensemble.Ensemble, ensemble.Model, Key]:
    """The logs and the models of all seeds, stacked [S, ...], and their keys; the same for all variants."""
    logs = [collect(settings, seed) for seed in range(settings.seeds)]
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    network = ensemble.make(DYNAMICS, SPEC)
    models = [network.fit(dataset, key) for dataset, key in zip(logs, keys, strict=True)]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    return stack(logs), network, stack(models), keys


def describe(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """What the logged controllers earn, and how far the models are off, for each seed."""
    logs, _, models, _ = prepared(settings)
    each = (jax.tree.map(lambda x, i=i: x[i], logs) for i in range(settings.seeds))
    logged = [replay.episode_returns(dataset).mean() for dataset in each]
    return {"logged": logged, "model_error": models.error.reshape(settings.seeds, -1).mean(1)}


def train_variant(
    settings: Settings, adversary: tuple[str, float] | None, work: studies.Work
) -> dict[str, Any]:
    """All seeds of one variant: means of its metrics, and returns [factors, seeds] in every world."""
    logs, network, models, keys = prepared(settings)
    state, report = trainer(settings, network, adversary)(logs, models, keys)
    work.progress(1)
    returns: dict[str, list[np.ndarray]] = {world: [] for world in WORLDS}
    for world, factors in WORLDS.items():
        for factor in factors:
            returns[world].append(evaluate(settings, state, world, factor))
            work.progress(1)
    return {"metrics": {name: x.mean() for name, x in report.metrics.items()}, "returns": returns}


# ---- the pendulums ----------------------------------------------------------------------------------------


def build(world: str = "gravity", factor: float = 1.0) -> gymnasium.Env:
    """An inverted pendulum whose gravity, pole mass (and inertia) or joint friction is ``factor`` times its own."""
    env = envs.make(ENVIRONMENT)
    model: Any = env.unwrapped.model  # type: ignore[attr-defined]
    if world == "gravity":
        model.opt.gravity[:] *= factor
    elif world == "pole mass":
        model.body_mass[-1] *= factor
        model.body_inertia[-1] *= factor
    elif world == "joint friction":
        model.dof_damping[:] *= factor
    else:
        raise ValueError(f"unknown world {world!r}: known are {', '.join(WORLDS)}")
    return env


def force(settings: Settings, action: Any, rng: np.random.Generator) -> np.ndarray:
    """The forces of actions [...] and a kick each, in [-1, 1], [..., 1] float32."""
    wanted = 2.0 * np.asarray(action) / (SPEC.action_size - 1) - 1.0
    kicked = wanted + settings.kick * rng.normal(size=wanted.shape)
    return np.clip(kicked, -1.0, 1.0).astype(np.float32)[..., None]


def collect(settings: Settings, seed: int) -> Dataset:
    """One log of ``settings.steps`` steps by a balancing controller of random strength that errs at random."""
    rng = np.random.default_rng((settings.seed, seed))
    env, rows, age = build(), [], 0
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    for _ in range(settings.steps):
        if age == 0:
            strength = rng.uniform(0.3, 2.0)
        wanted = np.clip(strength * BALANCING @ observation + 0.4 * rng.normal(), -1.0, 1.0)
        action = round((wanted + 1) / 2 * (SPEC.action_size - 1))
        following, reward, failed, _, _ = env.step(force(settings, action, rng))
        age += 1
        rows.append((observation, action, reward, failed, age == settings.limit, following))
        observation = following
        if failed or age == settings.limit:
            observation, age = env.reset()[0], 0
    observations, actions, rewards, failures, cut, successors = map(np.asarray, zip(*rows, strict=True))
    cut[-1] = True  # the log ends inside an episode
    source = f"{ENVIRONMENT}, log {seed}"
    return data.from_steps(
        observations, actions, rewards, failures, cut, successors, source=source, discrete=True
    )


def evaluate(settings: Settings, state: State, world: str, factor: float) -> np.ndarray:
    """Mean return of each seed's policy, [S]; equal starts and kicks for every variant."""
    rng = np.random.default_rng((settings.seed, 10_000))
    count = settings.seeds * settings.episodes
    pendulums = [build(world, factor) for _ in range(count)]
    observation = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(pendulums)])
    alive, returns = np.ones(count, bool), np.zeros(count)
    for _ in range(settings.limit):
        action = np.asarray(_act(state, observation.reshape(settings.seeds, settings.episodes, -1)))
        forces = force(settings, action.reshape(-1), rng)
        for i in np.flatnonzero(alive):
            observation[i], reward, failed, _, _ = pendulums[i].step(forces[i])
            returns[i] += float(reward)
            alive[i] = not failed
        if not alive.any():
            break
    return returns.reshape(settings.seeds, settings.episodes).mean(1)


# ---- the agents -------------------------------------------------------------------------------------------


def agent() -> Learner:
    """Conservative Q-learning; a pole that never falls is worth ``1 / (1 - gamma)``."""
    return cql.make(CONFIG, SPEC, heads.hl_gauss(0.0, 1 / (1 - CONFIG.discount), 41))


@jax.jit
def _act(state: State, observation: Array) -> Array:
    """Actions [S, n] of stacked states at observations [S, n, 4]; greedy, so that the key is not used."""
    return jax.vmap(agent().act, (0, 0, None))(state, observation, jax.random.key(0))


def trainer(
    settings: Settings, network: ensemble.Ensemble, adversary: tuple[str, float] | None
) -> Callable[[Dataset, ensemble.Model, Key], tuple[State, train.Report]]:
    """Trains one variant on every seed's log and model, all stacked [S, ...]."""

    def one(seed_inputs: tuple[Dataset, ensemble.Model, Key]) -> tuple[State, train.Report]:
        logged, model, key = seed_inputs
        learner = agent()
        if adversary:
            propose = lambda observation, action, key: network.dynamics.propose(
                model, observation, action, key
            )[0]
            ends = termination.inverted_pendulum
            learner = robust.make(learner, propose, *adversary, CONFIG.discount, ends)
        state = learner.init(key, replay.take(logged, jnp.arange(2)))
        epoch = train.scan_updates(learner.update, replay.sampler(settings.batch_size), settings.updates)
        return epoch(state, logged, key)

    # One seed after another: on a CPU faster than all at once.
    return jax.jit(lambda *inputs: jax.lax.map(one, inputs))


# ---- what came out ----------------------------------------------------------------------------------------


def summary(returns: Mapping[str, Mapping[str, np.ndarray]]) -> list[dict[str, Any]]:
    """One row per variant, world and factor: mean, its interval, and the difference to plain within seeds."""
    return [
        {
            "variant": variant,
            "world": world,
            "factor": factor,
            "mean": float(scores.mean()),
            "ci95": list(statistics.interval(scores)),
            "gain": float((scores - plain).mean()),
            "gain_ci95": list(statistics.interval(scores - plain)),
        }
        for variant, worlds in returns.items()
        for world, rows in worlds.items()
        for factor, scores, plain in zip(WORLDS[world], rows, returns["plain"][world], strict=True)
    ]


def draw(folder: Path, returns: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """One figure per kind of world."""
    for world, factors in WORLDS.items():
        plot.lines(
            folder / f"{world.replace(' ', '_')}.png",
            {name: (factors, *studies.bands(worlds[world])) for name, worlds in returns.items()},
            f"{world}, times the nominal",
            "steps upright",
            title=f"{ENVIRONMENT} with kicks, trained at nominal {world}",
        )


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """That the robust backup helps where the pendulum is not the logged one: over all other factors of a world."""
    plain = result["returns"]["plain"]
    for name, worlds in result["returns"].items():
        for world, rows in worlds.items():
            if name != "plain" and VARIANTS.get(name, ("", 1e6)) != ("tv", 1e6):
                gain = (rows - plain[world])[np.array(WORLDS[world]) != 1].mean(0)
                yield studies.Claim(
                    f"{name}: upright for longer than plain where {world} is not the logged one (steps)",
                    "ours: what robust backups are for",
                    gain,
                    studies.positive,
                )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield "# The robust backup on an inverted pendulum that changes"
    yield f"`{result['command']}`, {result['wall_seconds']:.0f} s on {result['hardware']['cores']} cores."
    yield (
        f"Mean steps upright (at most {settings['limit']}) over {settings['seeds']} seeds, Student's 95 % interval; "
        "in brackets the gain over the plain agent within seeds, bold where its interval leaves out 0. "
        f"The logged controllers stay upright for {np.mean(result['logged']):.0f} steps."
    )
    # A factor of 1 is the logged world, whatever it scales: it counts once.
    distinct = {
        (row["variant"], row["factor"] == 1 or row["world"], row["factor"]): row["gain_ci95"]
        for row in result["summary"]
        if row["variant"] != "plain"
    }
    gains = distinct.values()
    yield (
        f"Of {len(gains)} comparisons with the plain agent, {sum(low > 0 for low, _ in gains)} gain and "
        f"{sum(high < 0 for _, high in gains)} lose by an interval that leaves out 0; chance alone would give about "
        f"{len(gains) / 20:.0f}. The adversary does bite: the values that agents learn (mean over training) are "
        + ", ".join(f"{metrics['q']:.1f} ({name})" for name, metrics in result["metrics"].items())
        + "."
    )
    for world, factors in WORLDS.items():
        rows = [row for row in result["summary"] if row["world"] == world]
        yield studies.table(
            (world, *(f"x {factor:g}" for factor in factors)),
            [(name, *(_cell(row) for row in rows if row["variant"] == name)) for name in VARIANTS],
        )


def _cell(row: dict[str, Any]) -> str:
    text = studies.plus_minus(row, ".0f")
    if row["variant"] == "plain":
        return text
    return f"{text} ({studies.difference({'mean': row['gain'], 'ci95': row['gain_ci95']}, '.0f')})"


if __name__ == "__main__":
    studies.main(Settings(), run)
