"""Offline agents on D4RL's locomotion tiers, made again here, beside the scores published on D4RL's own files.

    python -m experiments.locomotion
    python -m experiments.locomotion --datasets=hopper-expert-regen-v5 --agents=iql,edac --updates=100000

The data are regenerated (`rl.data.recipes.locomotion`): other policies, on gymnasium's -v5. A published number beside
ours is therefore the number of another dataset, and here it is one of a hundredth of the training, with smaller
networks and one setting of each agent for all tiers (published: up to one each). Scores are normalised by D4RL's
references. Finished runs are not run again unless their code or settings change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import model_based, offline, studies
from rl import agents, plot
from rl.data import d4rl, recipes

# What each agent's authors do to data or weights, one setting for all tiers; but CQL draws 4 actions of each kind
# (theirs are 10), which costs less than half. All else are the agents' defaults.
OFFLINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bc": ({}, {}),
    "iql": ({"reward_scale": "return_range"}, {}),
    "td3_bc": ({"normalize_observations": True}, {}),
    "rebrac": ({"batch_size": 1024}, {}),
    "cql": ({}, {"samples": 4}),
    "edac": ({}, {"critics": 10}),
}
MODEL_BASED = ("base", "mopo", "ravl")


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about the table."""

    datasets: str = "hopper-medium-regen-v5,hopper-medium-replay-regen-v5"  # comma-separated
    agents: str = ",".join((*OFFLINE, *MODEL_BASED))  # comma-separated
    transitions: int = 0  # steps of each dataset; 0: as D4RL's protocol has it
    seeds: int = 3  # of each run, trained at once
    updates: int = 10_000  # of each seed
    hidden: tuple[int, ...] = (128, 128)  # widths of every network's layers
    rollouts: int = 2_000  # started per 1,000 updates, by methods with a model
    model_updates: int = 3_000  # of the dynamics ensemble
    eval_episodes: int = 10  # per seed and evaluation, of which there are four
    seed: int = 0  # of data and agents
    workdir: str = "runs/locomotion"  # data and runs
    out: str = "results/locomotion"


def run(settings: Settings) -> dict[str, Any]:
    """Makes what is missing of data and runs; writes and returns what came out.

    Raises:
      ValueError: an unknown agent or dataset, or settings that a run refuses.
    """
    check(settings)
    variants, tiers = {}, {}
    for name in settings.datasets.split(","):
        data = recipes.collect(
            name,
            out=Path(settings.workdir) / "data",
            transitions=settings.transitions or None,
            seed=settings.seed,
        )
        tiers[name] = d4rl.recorded(data)["normalized_return_d4rl"]
        for agent in settings.agents.split(","):
            variants[f"{name}, {agent}"] = studies.Variant(
                functools.partial(train, settings, name, data, agent),
                {**studies.chosen(settings, "datasets", "agents"), "agent": OFFLINE.get(agent)},
            )

    def write() -> dict[str, Any]:
        cells = list(studies.recall(settings, variants).outcomes.values())
        result = studies.finish(settings, {"data_scores": tiers, "cells": cells}, report)
        draw(Path(settings.out), result)
        return result

    studies.train(settings, variants, "runs", write)
    return write()


def check(settings: Settings) -> None:
    """Raises ValueError on what `run` would find out only after an hour."""
    studies.names("agents", settings.agents, (*OFFLINE, *MODEL_BASED))
    studies.names("datasets", settings.datasets, recipes.LOCOMOTION)
    studies.check_seeds(settings.seeds)
    if settings.updates % 4:
        raise ValueError(f"--updates={settings.updates} must be a multiple of 4, the number of evaluations")


def train(settings: Settings, name: str, data: Path, agent: str, work: studies.Work) -> dict[str, Any]:
    """One agent on one dataset."""
    common: dict[str, Any] = {
        "agent": agent,
        "dataset": str(data),
        "seeds": settings.seeds,
        "seed": settings.seed,
        "eval_episodes": settings.eval_episodes,
        "workdir": str(work.folder),
    }
    if agent in MODEL_BASED:
        per_epoch = min(1000, settings.updates // 4)
        epochs = settings.updates // per_epoch
        config = dataclasses.replace(
            model_based.config(agent),
            hidden=settings.hidden,
            rollouts=settings.rollouts,
            updates=per_epoch,
        )
        result = model_based.run(
            model_based.Settings(
                **common,
                epochs=epochs,
                eval_every=epochs // 4,
                model_updates=settings.model_updates,
                runaway=0.0,
            ),
            config,
        )
    else:
        of_run, of_agent = OFFLINE[agent]
        result = offline.run(
            offline.Settings(**common, **of_run, updates=settings.updates, eval_every=settings.updates // 4),
            agents.get(agent).Config(**of_agent, hidden=settings.hidden),
        )
    return {
        "agent": agent,
        "dataset": name,
        **{key: result[key] for key in ("command", "commit", "config", "wall_seconds")},
        **{
            score: {which: result["scores"][score][which] for which in ("last", "best")}
            for score in ("return", "normalized_return")
        },
    }


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """A figure for each dataset."""
    for name, score in result["data_scores"].items():
        bars = {"the data": (score, float("nan"), float("nan"))} | {
            cell["agent"]: studies.band(cell["normalized_return"]["last"])
            for cell in result["cells"]
            if cell["dataset"] == name
        }
        plot.bars(
            folder / f"{name}.png", bars, "normalised return, 95 % interval over seeds", title=f"{name}, last"
        )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings, published = result["settings"], studies.published("locomotion")["scores"]
    yield "# Offline agents on regenerated locomotion tiers"
    yield f"`{result['command']}`, {result['hardware']['cores']} cores."
    yield (
        f"{settings['updates']:,} updates, {settings['seeds']} seeds, layers of {list(settings['hidden'])}: last "
        "normalised return with its 95 % interval over seeds, and the best evaluation, chosen with hindsight. "
        "*Published* is of D4RL's own file, as CORL's README has it (MOPO: OfflineRL-Kit's), after 1,000,000 updates "
        "or more, with larger networks and settings for each tier: another dataset and another effort. "
        "RAVL's and its base's scores are published as pictures only."
    )
    for name, score in result["data_scores"].items():
        yield f"## {name} (the data: {score:.1f})"
        rows = []
        for cell in (cell for cell in result["cells"] if cell["dataset"] == name):
            last, best = (cell["normalized_return"][which] for which in ("last", "best"))
            theirs = published.get(name.removesuffix("-regen-v5"), {}).get(cell["agent"])
            beside = "{:.1f} ± {:.1f}".format(*theirs) if theirs else "-"
            rows.append((f"`{cell['agent']}`", studies.between(last, ".1f"), f"{best['mean']:.1f}", beside))
        yield studies.table(("agent", "last", "best", "published on D4RL's file"), rows)
    run = {cell["agent"] for cell in result["cells"]}
    absent = [f"`{agent}`" for agent in (*OFFLINE, *MODEL_BASED) if agent not in run]
    tiers = [name for name in recipes.LOCOMOTION if name not in result["data_scores"]]
    yield f"Not run: {', '.join([*absent, *tiers])}."


if __name__ == "__main__":
    studies.main(Settings(), run)
