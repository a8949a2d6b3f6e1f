"""How fast does each value head fit a value that is known, in IQL? On a chain of 60 states.

    python -m experiments.expectile_chain

Tables of returns mix two questions: what a head can represent, and how many updates it needs to fit it. Here they
come apart. From each state of a chain one walks left or right, which goes wrong one time in five; every step costs 1
until the right end. The log is uniform over states and actions, so that the fixed point of IQL, the expectile over
logged actions of ``r + gamma V(s')``, is computed exactly from the logged rows. Each head then learns it with the same
agent, batches and network, and the root mean square error of V over states is measured as training goes on. Categorical
heads are compared with equal numbers of atoms on the same support; the quantile head with several thresholds ``kappa``
of its Huber loss, below which it estimates a mean and above which quantiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import checks, studies
from rl import plot, train
from rl.agents import iql
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Spec, Transition
from rl.values import heads
from rl.values.heads import ValueHead

STATES = 60  # the last one ends the episode
SPEC = Spec((STATES,), 2, discrete=True)  # observations are one-hot
SLIP = 0.2  # chance that a step goes the other way
CONFIG = iql.Config(discount=0.99, expectile=0.9, learning_rate=1e-3, target_rate=0.05, hidden=(64, 64))
SUPPORT = (-100.0, 0.0)  # all that rewards allow

HEADS: dict[str, ValueHead] = {
    "scalar": heads.scalar(),
    **{
        f"{name}, {size} atoms": heads.make(name, *SUPPORT, size)
        for name in ("two_hot", "hl_gauss", "c51")
        for size in (51, 101)
    },
    **{f"quantile, kappa {kappa:g}": heads.quantile(25, kappa) for kappa in (0.1, 1.0, 10.0)},
}


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    heads: str = ";".join(HEADS)  # which to train, separated by semicolons
    seeds: int = 3  # of each head, on one log
    rows: int = 40_000  # logged steps
    updates: int = 48_000  # gradient steps of each seed
    measure_every: int = 4_000  # updates between measurements
    batch_size: int = 128  # transitions per update
    seed: int = 0  # of everything
    workdir: str = "runs/expectile_chain"  # of what is finished
    out: str = "results/expectile_chain"


def run(settings: Settings) -> dict[str, Any]:
    """Trains every head and measures its error; returns what result.json holds.

    Raises:
      ValueError: an unknown head, too few seeds for an interval, or updates that measurements do not divide.
    """
    studies.check_seeds(settings.seeds)
    checks.multiple(settings, "updates", "measure_every")
    variants = {
        name: studies.Variant(
            functools.partial(errors, settings, name),
            studies.chosen(settings, "heads"),
            settings.updates // settings.measure_every,
        )
        for name in studies.names("heads", settings.heads, HEADS, ";")
    }
    trained = studies.train(settings, variants, "heads on a chain")
    result = studies.finish(
        settings, {"wall_seconds": trained.seconds, "rmse": trained.outcomes}, report, trained=trained
    )
    draw(Path(settings.out), settings, trained.outcomes)
    return result


def errors(settings: Settings, name: str, work: studies.Work) -> np.ndarray:
    """Root mean square errors of V over states [measurements, seeds]."""
    dataset = logged(settings.rows, settings.seed)
    exact = jnp.asarray(fixed_point(dataset))
    observations = jnp.eye(STATES)[:-1]
    learner = iql.make(CONFIG, SPEC, HEADS[name])
    assert learner.value is not None
    value = jax.jit(jax.vmap(learner.value, (train.STACKED, None, None)))
    population = train.population(
        lambda config: iql.make(config, SPEC, HEADS[name]),
        CONFIG,
        replay.sampler(settings.batch_size),
        settings.measure_every,
        batched=jax.default_backend() != "cpu",
    )
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    start = population.init(keys, replay.take(dataset, np.arange(2)))
    measured = []
    epochs = settings.updates // settings.measure_every
    for state, _ in train.epochs(population.epoch, start, jax.device_put(dataset), keys, epochs):
        error = value(state, observations, keys[0]) - exact
        measured.append(jnp.sqrt(jnp.square(error).mean(-1)))
        work.progress(1)
    return np.stack(measured)


def logged(rows: int, seed: int) -> Dataset:
    """Steps from uniform states with uniform actions; each is an episode of its own."""
    rng = np.random.default_rng(seed)
    state = rng.integers(0, STATES - 1, rows)
    action = rng.integers(0, 2, rows)
    slipped = rng.random(rows) < SLIP
    following = np.clip(state + np.where((action == 1) != slipped, 1, -1), 0, STATES - 1)
    one_hot = np.eye(STATES, dtype=np.float32)
    steps = Transition(
        observation=one_hot[state],
        action=action.astype(np.int32),
        reward=np.full(rows, -1.0, np.float32),
        discount=(following < STATES - 1).astype(np.float32),
        next_observation=one_hot[following],
        next_action=action.astype(np.int32),
        has_next_action=np.zeros(rows, np.float32),
    )
    return Dataset(steps, np.ones(rows, bool))


def fixed_point(dataset: Dataset) -> np.ndarray:
    """V [STATES - 1] that IQL's equations (5) and (6) have for the logged rows, by iteration to 1e-10."""
    steps = dataset.transitions
    state, following = steps.observation.argmax(-1), steps.next_observation.argmax(-1)
    count = np.zeros((STATES, 2))
    np.add.at(count, (state, steps.action), 1)
    value, change = np.zeros(STATES), np.inf
    while change > 1e-10:
        total = np.zeros((STATES, 2))
        target = steps.reward + CONFIG.discount * steps.discount.astype(float) * value[following]
        np.add.at(total, (state, steps.action), target)
        after = expectile(total / np.maximum(count, 1), count, CONFIG.expectile)
        change, value = np.abs(after - value).max(), after
    return value[:-1]


def expectile(q: np.ndarray, count: np.ndarray, tau: float) -> np.ndarray:
    """The expectile [S] of Q [S, A] over actions that were logged ``count`` [S, A] times; 0 where none was."""
    v = q.mean(-1)
    for _ in range(20):  # weights change at most once per action
        weight = np.where(q > v[:, None], tau, 1 - tau) * count
        v = (weight * q).sum(-1) / np.maximum(weight.sum(-1), 1e-30)
    return v


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    every, updates = settings["measure_every"], settings["updates"]
    shown = sorted({every, updates // 6 // every * every, updates // 3 // every * every, updates} - {0})
    yield "# Fitting speed of value heads: IQL on a chain whose answer is exact"
    yield (
        f"Root mean square error of V over {STATES - 1} states (values from -69 to -2), mean and Student's 95 % "
        f"interval over {settings['seeds']} seeds, after this many updates of {settings['batch_size']} rows."
    )
    yield studies.table(
        ["head", *(f"{n:,}" for n in shown)],
        (
            [name, *(studies.between(errors[n // every - 1]) for n in shown)]
            for name, errors in result["rmse"].items()
        ),
    )
    yield "![error against updates](error.png)"


def draw(folder: Path, settings: Settings, rmse: Mapping[str, np.ndarray]) -> None:
    """The errors of all heads against updates."""
    steps = settings.measure_every * (1 + np.arange(settings.updates // settings.measure_every))
    curves = {name: (steps, np.asarray(errors)) for name, errors in rmse.items()}
    plot.learning_curve(
        folder / "error.png",
        curves,
        ylabel="error of V (root mean square)",
        title="IQL on a chain of 60 states",
        logarithmic=True,
    )


if __name__ == "__main__":
    studies.main(Settings(), run)
