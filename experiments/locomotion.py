"""Offline agents on D4RL's locomotion tiers, made again here, beside the scores published on D4RL's own files.

    python -m experiments.locomotion
    python -m experiments.locomotion --datasets=hopper-expert-regen-v5 --agents=iql,edac --updates=100000

The data are regenerated (`rl.data.recipes.locomotion`): other policies, on gymnasium's -v5. A published number beside
ours is therefore the number of another dataset, and here it is one of a hundredth of the training, with smaller
networks and one setting of each agent for all tiers (published: up to one each). Scores are normalised by D4RL's
references. Finished runs are not run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import model_based, offline, studies
from rl import agents, log, plot
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

# Normalised scores on D4RL's -v2 files after 1M updates, mean and deviation over seeds: the last scores in CORL's
# README (Tarasov et al. 2023); MOPO's from OfflineRL-Kit's. Those of RAVL and its base are published as pictures only.
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "halfcheetah-medium": {
        "bc": (42.40, 0.19),
        "td3_bc": (48.10, 0.18),
        "cql": (47.04, 0.22),
        "iql": (48.31, 0.22),
        "rebrac": (64.04, 0.68),
        "edac": (67.70, 1.04),
        "mopo": (72.4, 4.2),
    },
    "halfcheetah-medium-replay": {
        "bc": (35.66, 2.33),
        "td3_bc": (44.84, 0.59),
        "cql": (45.04, 0.27),
        "iql": (44.46, 0.22),
        "rebrac": (51.18, 0.31),
        "edac": (62.06, 1.10),
        "mopo": (72.1, 3.8),
    },
    "halfcheetah-medium-expert": {
        "bc": (55.95, 7.35),
        "td3_bc": (90.78, 6.04),
        "cql": (95.63, 0.42),
        "iql": (94.74, 0.52),
        "rebrac": (103.80, 2.95),
        "edac": (104.76, 0.64),
        "mopo": (83.6, 12.5),
    },
    "hopper-medium": {
        "bc": (53.51, 1.76),
        "td3_bc": (60.37, 3.49),
        "cql": (59.08, 3.77),
        "iql": (67.53, 3.78),
        "rebrac": (102.29, 0.17),
        "edac": (101.70, 0.28),
        "mopo": (62.8, 38.1),
    },
    "hopper-medium-replay": {
        "bc": (29.81, 2.07),
        "td3_bc": (64.42, 21.52),
        "cql": (95.11, 5.27),
        "iql": (97.43, 6.39),
        "rebrac": (94.98, 6.53),
        "edac": (99.66, 0.81),
        "mopo": (92.7, 20.7),
    },
    "hopper-medium-expert": {
        "bc": (52.30, 4.01),
        "td3_bc": (101.17, 9.07),
        "cql": (99.26, 10.91),
        "iql": (107.42, 7.80),
        "rebrac": (109.45, 2.34),
        "edac": (105.19, 10.08),
        "mopo": (74.6, 44.2),
    },
    "walker2d-medium": {
        "bc": (63.23, 16.24),
        "td3_bc": (82.71, 4.78),
        "cql": (80.75, 3.28),
        "iql": (80.91, 3.17),
        "rebrac": (85.82, 0.77),
        "edac": (93.36, 1.38),
        "mopo": (84.1, 3.2),
    },
    "walker2d-medium-replay": {
        "bc": (21.80, 10.15),
        "td3_bc": (85.62, 4.01),
        "cql": (73.09, 13.22),
        "iql": (82.15, 3.03),
        "rebrac": (84.25, 2.25),
        "edac": (87.10, 2.78),
        "mopo": (85.9, 5.3),
    },
    "walker2d-medium-expert": {
        "bc": (98.96, 15.98),
        "td3_bc": (110.03, 0.36),
        "cql": (109.56, 0.39),
        "iql": (111.72, 0.86),
        "rebrac": (111.86, 0.43),
        "edac": (114.75, 0.74),
        "mopo": (108.2, 4.3),
    },
}


@dataclasses.dataclass(frozen=True)
class Settings:
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
    out: str = "results/locomotion"  # where result.json, the figures and the table land


def run(settings: Settings) -> dict[str, Any]:
    """Makes what is missing of data and runs; writes and returns what came out.

    Raises:
      ValueError: an unknown agent or dataset, or settings that a run refuses.
    """
    check(settings)
    cells, tiers = [], {}
    for name in settings.datasets.split(","):
        data = recipes.collect(
            name,
            out=Path(settings.workdir) / "data",
            transitions=settings.transitions or None,
            seed=settings.seed,
        )
        tiers[name] = d4rl.recorded(data)["normalized_return_d4rl"]
        for agent in settings.agents.split(","):
            cells.append(_cell(settings, name, data, agent))
            result = {
                **log.provenance(),
                "settings": dataclasses.asdict(settings),
                "data_scores": tiers,
                "cells": cells,
            }
            write(Path(settings.out), result)
    return result


def check(settings: Settings) -> None:
    """Raises ValueError on what `run` would find out only after an hour."""
    studies.names("agents", settings.agents, (*OFFLINE, *MODEL_BASED))
    studies.names("datasets", settings.datasets, recipes.LOCOMOTION)
    studies.check_seeds(settings.seeds)
    if settings.updates % 4:
        raise ValueError(f"--updates={settings.updates} must be a multiple of 4, the number of evaluations")


def _cell(settings: Settings, name: str, data: Path, agent: str) -> dict[str, Any]:
    """One agent on one dataset."""
    common: dict[str, Any] = {
        "agent": agent,
        "dataset": str(data),
        "seeds": settings.seeds,
        "seed": settings.seed,
        "eval_episodes": settings.eval_episodes,
        "workdir": str(Path(settings.workdir) / name / agent),
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
    task = name.removesuffix("-regen-v5")
    return {
        "agent": agent,
        "dataset": name,
        **{key: result[key] for key in ("command", "commit", "config", "wall_seconds")},
        **{
            score: {which: result["scores"][score][which] for which in ("last", "best")}
            for score in ("return", "normalized_return")
        },
        "published": PUBLISHED.get(task, {}).get(agent),
    }


def write(folder: Path, result: dict[str, Any]) -> None:
    """result.json, a figure for each dataset, and the table."""
    studies.write(folder, result, table(result))
    for name, score in result["data_scores"].items():
        bars = {"the data": (score, float("nan"), float("nan"))} | {
            cell["agent"]: (
                cell["normalized_return"]["last"]["mean"],
                *cell["normalized_return"]["last"]["ci95"],
            )
            for cell in result["cells"]
            if cell["dataset"] == name
        }
        plot.bars(
            folder / f"{name}.png", bars, "normalised return, 95 % interval over seeds", title=f"{name}, last"
        )


def table(result: dict[str, Any]) -> Iterator[str]:
    """The lines of a Markdown report."""
    settings = result["settings"]
    yield "# Offline agents on regenerated locomotion tiers"
    yield ""
    yield f"`{result['command']}`, {result['hardware']['cores']} cores."
    yield ""
    yield (
        f"{settings['updates']:,} updates, {settings['seeds']} seeds, layers of {list(settings['hidden'])}: last "
        "normalised return with its 95 % interval over seeds, and the best evaluation, chosen with hindsight. "
        "*Published* is of D4RL's own file, as CORL's README has it (MOPO: OfflineRL-Kit's), after 1,000,000 updates "
        "or more, with larger networks and settings for each tier: another dataset and another effort. "
        "RAVL's and its base's scores are published as pictures only."
    )
    for name, score in result["data_scores"].items():
        yield ""
        yield f"## {name} (the data: {score:.1f})"
        yield ""
        yield "| agent | last | best | published on D4RL's file |"
        yield "|---|---|---|---|"
        for cell in result["cells"]:
            if cell["dataset"] != name:
                continue
            last, best = (cell["normalized_return"][which] for which in ("last", "best"))
            published = "{:.1f} ± {:.1f}".format(*cell["published"]) if cell["published"] else "-"
            low, high = last["ci95"]
            yield (
                f"| `{cell['agent']}` | {last['mean']:.1f} [{low:.1f}, {high:.1f}] | {best['mean']:.1f} | {published} |"
            )
    run = {cell["agent"] for cell in result["cells"]}
    absent = [f"`{agent}`" for agent in (*OFFLINE, *MODEL_BASED) if agent not in run]
    tiers = [name for name in recipes.LOCOMOTION if name not in result["data_scores"]]
    yield ""
    yield f"Not run: {', '.join([*absent, *tiers])}."


if __name__ == "__main__":
    studies.main(Settings(), run)
