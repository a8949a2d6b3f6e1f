"""Every agent with every value head on one task: the table of the README, by one command.

    python -m experiments.matrix

The data are OGBench's pointmaze-medium-navigate, regenerated on the spot; the task is to reach one place in the
maze. Results go to --out as JSON and as a Markdown table; the runs themselves to --workdir, and what is finished
there is not run again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from absl import app

from experiments import flags, offline
from rl import agents, log
from rl.data import recipes
from rl.values import heads

DATASET = "pointmaze-medium-navigate-v0"
TASK = "pointmaze-medium-navigate-singletask-v0"

_COMMON: dict[str, Any] = {"learning_rate": 1e-3, "target_rate": 0.05, "hidden": (128, 128)}

# Larger steps than the papers', so that values cross the maze in thousands of updates. The weights between value
# and cloning were chosen for this task with the scalar head (see results/README.md) and hold for every head.
CONFIGS: dict[str, dict[str, Any]] = {
    "bc": {"learning_rate": 1e-3, "hidden": (128, 128)},
    "iql": _COMMON | {"expectile": 0.9, "temperature": 4.0},
    "td3_bc": _COMMON | {"alpha": 40.0},
    "rebrac": _COMMON | {"policy_cloning": 0.02},
    "cql": _COMMON | {"policy_learning_rate": 1e-3, "weight": 1.0, "samples": 4},
    "sac_n": _COMMON | {"critics": 4},
    "edac": _COMMON | {"critics": 4},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about the table."""

    agents: str = ",".join(CONFIGS)  # rows, comma-separated
    heads: str = ",".join(heads.NAMES)  # columns, comma-separated
    transitions: int = 200_000  # steps of data to make
    seeds: int = 4  # seeds of each cell, trained at once
    updates: int = 10_000  # gradient steps of each seed
    eval_every: int = 5_000  # updates between evaluations
    eval_episodes: int = 20  # episodes per seed and evaluation
    seed: int = 0  # of data and agents
    workdir: str = "runs/matrix"  # the runs
    out: str = "results/matrix-pointmaze-medium"  # the table: OUT.json and OUT.md


def run(settings: Settings) -> list[dict[str, Any]]:
    """Trains every cell and returns their results, row by row; the table on disk grows with every cell."""
    workdir, out = Path(settings.workdir), Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    recipes.collect(DATASET, out=workdir / "data", transitions=settings.transitions, seed=settings.seed)
    cells: list[dict[str, Any]] = []
    for agent in settings.agents.split(","):
        # Behaviour cloning has no value: one column stands for all.
        for head in settings.heads.split(",") if agent != "bc" else ["scalar"]:
            config = agents.get(agent).Config(**CONFIGS[agent])
            cells.append(offline.run(_offline(settings, agent, head), config))
            log.write_json(out.with_suffix(".json"), {**log.provenance(), "task": TASK, "cells": cells})
            with log.replacing(out.with_suffix(".md")) as partial:
                partial.write_text(table(cells, "success") + "\n\n" + table(cells, "return") + "\n")
    return cells


def table(cells: list[dict[str, Any]], score: str) -> str:
    """Markdown: agents down, heads across, the last ``score`` with its 95 % interval over seeds."""
    columns = list(dict.fromkeys(cell["settings"]["head"] for cell in cells))
    lines = [f"| {score} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for agent in dict.fromkeys(cell["agent"] for cell in cells):
        found = {cell["settings"]["head"]: cell for cell in cells if cell["agent"] == agent}
        lines.append(
            f"| `{agent}` | "
            + " | ".join(_cell(found[c], score) if c in found else "" for c in columns)
            + " |"
        )
    return "\n".join(lines)


def _cell(result: dict[str, Any], score: str) -> str:
    last = result["scores"][score]["last"]
    low, high = last["ci95"]
    return f"{last['mean']:.3g} [{low:.3g}, {high:.3g}]"


def _offline(settings: Settings, agent: str, head: str) -> offline.Settings:
    return offline.Settings(
        agent=agent,
        dataset=TASK,
        data_folder=f"{settings.workdir}/data",
        normalize_observations=True,
        head=head,
        seeds=settings.seeds,
        seed=settings.seed,
        updates=settings.updates,
        eval_every=settings.eval_every,
        eval_episodes=settings.eval_episodes,
        workdir=f"{settings.workdir}/{agent}-{head}",
    )


def main(_: list[str]) -> None:
    cells = run(flags.read(Settings()))
    print(table(cells, "success"))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
