"""Offline planning from logged intensive care: who is robust when the hospital is not the one that was logged?

    python -m experiments.papers.icu_sepsis

ICU-Sepsis (Choudhary et al. 2024) is a tabular MDP estimated from MIMIC-III records; it ships the clinicians' policy.
Each replication logs episodes of that policy, estimates the model from them, and plans in it: as it is (nominal),
with the reward of every action lowered by beta / sqrt(times seen) (pessimistic: VI-LCB, Rashidinejad et al. 2021),
against an adversary who shifts next states at a price (robust, `rl.agents.robust_vi`), and with both (the tabular
R2PVI of Tang, Liu & Xu 2025). States that the log never left are treated as the clinicians most often do.

Every policy is then evaluated exactly, by its probability of survival under the true dynamics and under shifted ones:

- sicker: every step kills with an additional probability
- weaker: the outcome of a treatment is, with some probability, that of the clinicians' usual mixture
- elsewhere: every distribution over next states is redrawn from a Dirichlet around it, of which the size is 1 / its
  concentration; the mean over several draws
- adversary: next states are tilted against this very policy, by exp(-V / price), the size being 1 / price

A benchmark, not medical advice. No parameter is selected: each method is shown at each price and penalty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import log, plot, statistics
from rl.agents import robust_vi
from rl.envs import tabular
from rl.envs.tabular import MDP
from rl.types import Array
from rl.values import robust

GAMMA = 1.0
STEPS = 60  # of an episode at most; one in some five hundred is longer
DRAWS = 2  # hospitals of each kind "elsewhere"
ROUNDS = 4  # of the adversary's policy iteration, for seven digits
WORLDS: dict[str, tuple[float, ...]] = {
    "sicker": (0.01, 0.02, 0.05),
    "weaker": (0.25, 0.5, 0.75),
    "elsewhere": (0.01, 0.03, 0.1),
    "adversary": (0.5, 1.0, 2.0),
}
PENALTY = 0.3  # beta of the robust methods that are pessimistic too


class Method(NamedTuple):
    """How to plan in an estimated model."""

    divergence: str = ""  # of the adversary; none if empty
    scale: float = 1.0  # its price, in probability of survival
    beta: float = 0.0  # penalty of an action seen once


PESSIMISTIC = f"pessimistic, beta {PENALTY:g}"
ROBUST = {f"{d}, price {scale:g}": Method(d, scale) for d in robust.REGULARISED for scale in (0.1, 0.3)}
METHODS = {
    "nominal": Method(),
    **{f"pessimistic, beta {beta:g}": Method(beta=beta) for beta in (0.1, PENALTY, 1.0)},
    **ROBUST,
    **{f"{name}, beta {PENALTY:g}": method._replace(beta=PENALTY) for name, method in ROBUST.items()},
}
DRAWN = ("clinicians", "nominal", PESSIMISTIC, *(f"{d}, price 0.3" for d in robust.REGULARISED))
DRAWN = (*DRAWN, f"kl, price 0.3, beta {PENALTY:g}")
BASELINES = ("clinicians", "nominal", PESSIMISTIC)
REPORT = "table.md"


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    replications: int = 20  # logs
    episodes: int = 5000  # of each log
    seed: int = 0  # of the logs and of the redrawn hospitals
    out: str = "results/papers/icu_sepsis"


def run(settings: Settings) -> dict[str, Any]:
    """Logs, plans, evaluates, and writes everything to ``settings.out``; returns what result.json holds."""
    chosen = {**studies.chosen(settings), "methods": METHODS}
    planning = studies.Variant(partial(plan, settings), chosen)
    planned = studies.train(settings, {"planning": planning}, "planning")
    policies = planned.outcomes["planning"]
    chosen["planning"] = studies.digest("planning", planning)
    places = [("as logged", 0.0), *((kind, size) for kind, sizes in WORLDS.items() for size in sizes)]
    variants = {
        _name(kind, size): studies.Variant(partial(evaluate, settings, policies, kind, size), chosen)
        for kind, size in places
    }
    evaluated = studies.train(settings, variants, "evaluation")
    survival = evaluated.outcomes
    summary = {
        "methods": {name: method._asdict() for name, method in METHODS.items()},
        "survival": {
            place: {name: statistics.summary(x, rate=True) for name, x in by.items()}
            for place, by in survival.items()
        },
        "gain_over": {
            baseline: {
                place: {
                    name: statistics.summary(by[name] - by[baseline]) for name in METHODS if name != baseline
                }
                for place, by in survival.items()
            }
            for baseline in BASELINES
        },
    }
    trained = studies.Finished(
        planned.outcomes | survival, planned.seconds + evaluated.seconds, planned.others | evaluated.others
    )
    result = studies.finish(settings, summary, report, claims, REPORT, trained)
    for kind, sizes in WORLDS.items():
        _draw(Path(settings.out) / f"{kind}.png", kind, sizes, result["survival"])
    return result


# ---- planning from logs -----------------------------------------------------------------------------------------


def plan(settings: Settings, work: studies.Work) -> dict[str, np.ndarray]:
    """The actions [R, S] that every method takes, one row per log, and those of the optimum [1, S]."""
    world, clinicians = tabular.icu_sepsis()
    policies = _plan_all(world, clinicians, settings)
    with jax.enable_x64(True):
        policies["optimum of the true model"] = np.asarray(jax.jit(_optimum)(world))
    return policies


def _plan_all(world: MDP, clinicians: np.ndarray, settings: Settings) -> dict[str, np.ndarray]:
    """{method: the action [R, S] that it takes in every state, one row per log}."""
    states, actions = clinicians.shape
    keys = jax.random.split(jax.random.key(settings.seed), settings.replications)
    collect = jax.jit(tabular.rollout, static_argnums=(3, 4))
    count = jax.jit(lambda episodes: tabular.count(episodes, states, actions))
    with log.progress(2 * settings.replications + len(METHODS), "planning") as bar:
        logs, widths = [], []
        for key in keys:
            logs.append(collect(world, clinicians, key, settings.episodes, STEPS))
            seen = count(logs[-1])[: states - 3] > 0  # what is done after the end does not matter
            widths.append((int(seen.any(-1).sum(-1).max()), int(seen.sum(-1).max())))
            bar.update()
        width, successors = map(max, zip(*widths, strict=True))
        learn = jax.jit(lambda episodes: _learn(world, count(episodes), width, successors))
        models = []
        for episodes in logs:
            models.append(jax.tree.map(np.asarray, learn(episodes)))
            bar.update()
        model, action, visits = jax.tree.map(lambda *xs: np.stack(xs), *models)
        policies = {}
        for name, method in METHODS.items():
            slot = np.asarray(_plan(method.divergence, model, visits, method.scale, method.beta))
            chosen = np.take_along_axis(action, slot[..., None], -1)[..., 0]
            policies[name] = np.where(visits.sum(-1) > 0, chosen, clinicians.argmax(-1))
            bar.update()
    return policies


def _learn(world: MDP, counts: Array, actions: int, successors: int) -> tuple[MDP, Array, Array]:
    """The model, the action in each of its slots, and how often that was seen."""
    model, action = tabular.empirical(counts, world, actions, successors)
    return model, action, jnp.take_along_axis(counts.sum(-1), action, 1)


@partial(jax.jit, static_argnames="divergence")
def _plan(divergence: str, models: MDP, visits: Array, scale: Array, beta: Array) -> Array:
    """The best slot [R, S] in each model, four models at a time."""

    def one(inputs: tuple[MDP, Array]) -> Array:
        model, visits = inputs
        penalty = jnp.where(visits > 0, beta / jnp.sqrt(jnp.maximum(visits, 1)), 0.0)
        penalty = penalty.at[-3:].set(0.0)  # what follows survival or death is known
        backup = robust_vi.regularised(divergence, scale) if divergence else robust_vi.NOMINAL
        model = model._replace(reward=model.reward - penalty)
        return robust_vi.value_iteration(model, GAMMA, backup, low=0.0, tolerance=1e-5).q.argmax(-1)

    return jax.lax.map(one, (models, visits), batch_size=4)


def _optimum(world: MDP) -> Array:
    return robust_vi.value_iteration(world, GAMMA, tolerance=1e-9).q.argmax(-1)[None]


# ---- survival, here and elsewhere -------------------------------------------------------------------------------


def evaluate(
    settings: Settings, policies: Mapping[str, np.ndarray], kind: str, size: float, work: studies.Work
) -> dict[str, np.ndarray]:
    """{policy: [R] probability of survival in a place}; of the clinicians, who need no log, R = 1."""
    world, clinicians = tabular.icu_sepsis()
    rows = np.concatenate(list(policies.values()))
    splits = np.cumsum([len(x) for x in policies.values()])[:-1]
    price, draws = 1 / size if kind == "adversary" else np.inf, []
    with jax.enable_x64(True):
        for place in _shifted(world, clinicians, kind, size, settings.seed):
            of_clinicians = _earned_by_mixture(place, clinicians, price)
            draws.append((np.asarray(_earned_by_actions(place, rows, price)), np.atleast_1d(of_clinicians)))
    earned, of_clinicians = (np.mean(x, axis=0) for x in zip(*draws, strict=True))
    return {"clinicians": of_clinicians, **dict(zip(policies, np.split(earned, splits), strict=True))}


def _shifted(world: MDP, clinicians: np.ndarray, kind: str, size: float, seed: int) -> Iterator[MDP]:
    """The MDPs over which the survival in a place is averaged."""
    alive = np.arange(len(world.start)) < len(world.start) - 3
    p = world.transition

    def moved(other: np.ndarray) -> MDP:
        return world._replace(transition=np.where(alive[:, None, None], other, p))

    if kind == "sicker":
        yield moved((1 - size) * p + size * np.eye(len(p))[-3])
    elif kind == "weaker":
        yield moved((1 - size) * p + size * np.einsum("sa,sat->st", clinicians, p)[:, None])
    elif kind == "elsewhere":
        rng = np.random.default_rng(seed)
        for _ in range(DRAWS):
            drawn = rng.standard_gamma(p / size)
            total = drawn.sum(-1, keepdims=True)
            yield moved(np.where(total > 0, drawn / np.where(total > 0, total, 1), p))
    else:
        yield world


@jax.jit
def _earned_by_actions(world: MDP, actions: Array, price: Array) -> Array:
    """Survival [P] of deterministic policies [P, S]."""

    def one(action: Array) -> Array:
        states = jnp.arange(len(action))
        chosen = world._replace(
            transition=world.transition[states, action][:, None], reward=world.reward[states, action][:, None]
        )
        return _earned(chosen, jnp.ones((len(action), 1)), price)

    return jax.lax.map(one, actions, batch_size=4)


@jax.jit
def _earned_by_mixture(world: MDP, policy: Array, price: Array) -> Array:
    return _earned(world, policy, price)


def _earned(world: MDP, policy: Array, price: Array) -> Array:
    """Survival where an adversary, who sees the action and pays ``price`` per unit of KL, tilts the next states.

    Policy iteration for the adversary: the exact value of its last kernel, then the kernel worst for that value.
    """

    def tilted(value: Array) -> tuple[Array, Array]:
        return robust.worst_case("kl", value * world.discount, world.transition, price)

    def improve(_: int, value: Array) -> Array:
        kernel, cost = tilted(value)
        return tabular.evaluate(world._replace(transition=kernel, reward=world.reward + cost), policy, GAMMA)

    def worst(value: Array) -> Array:
        value = jax.lax.fori_loop(0, ROUNDS, improve, value)
        return tabular.evaluate(world._replace(transition=tilted(value)[0]), policy, GAMMA)

    value = tabular.evaluate(world, policy, GAMMA)
    return world.start @ jax.lax.cond(jnp.isinf(price), lambda v: v, worst, value)


# ---- reports -------------------------------------------------------------------------------------------------------


def _name(kind: str, size: float) -> str:
    return f"{kind} {size:g}" if size else kind


def _draw(path: Path, kind: str, sizes: tuple[float, ...], survival: Mapping[str, Any]) -> None:
    places = ["as logged", *(_name(kind, size) for size in sizes)]
    plot.lines(
        path,
        {name: ((0.0, *sizes), *studies.bands(survival[place][name] for place in places)) for name in DRAWN},
        xlabel=f"{kind}: size of the shift",
        ylabel="probability of survival",
        title=f"ICU-Sepsis, {kind}",
    )


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """That who plans against an adversary survives where the hospital is another, within each log."""
    for name in (name for name in METHODS if name in ROBUST):
        for kind, sizes in WORLDS.items():
            yield studies.Claim(
                f"{name}: more survive than with the nominal plan, {_name(kind, sizes[-1])}",
                "ours: what robust planning is for",
                result["gain_over"]["nominal"][_name(kind, sizes[-1])][name]["each"],
                studies.positive,
            )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings, survival, gains = result["settings"], result["survival"], result["gain_over"]
    places = ["as logged", *(_name(kind, sizes[1]) for kind, sizes in WORLDS.items())]
    paired = {
        f"{name} over {baseline}": gains[baseline]
        for name in METHODS
        for baseline in BASELINES
        if (baseline == PESSIMISTIC) == bool(METHODS[name].divergence and METHODS[name].beta)
        and name != baseline
    }
    yield "# ICU-Sepsis: planning from the clinicians' log"
    yield (
        f"Probability of survival in percent, exact for each policy: mean over {settings['replications']} logs of "
        f"{settings['episodes']:,} episodes, and half the width of its 95 % interval. The clinicians' policy and the "
        "optimum need no log. Every size of every shift is in result.json; experiments/papers/icu_sepsis.py says what "
        "the shifts are."
    )
    yield studies.table(
        ("policy", *places),
        [(name, *(_percent(survival[place][name]) for place in places)) for name in survival[places[0]]],
    )
    yield "What is gained within each log, in percentage points:"
    yield studies.table(
        ("policy", *places),
        [
            (label, *(_percent(by[place][label.partition(" over ")[0]]) for place in places))
            for label, by in paired.items()
        ],
    )


def _percent(summary: Mapping[str, Any]) -> str:
    return studies.plus_minus({name: 100 * np.asarray(summary[name]) for name in ("mean", "ci95")}, ".2f")


if __name__ == "__main__":
    studies.main(Settings(), run, REPORT)
