"""Agents with value heads on one task: a table of docs/results.md, by one command.

    python -m experiments.matrix
    python -m experiments.matrix --dataset=pointmaze-medium-stitch-v0 --agents=bc,iql,rebrac --heads=scalar,hl_gauss

The data are one of OGBench's pointmazes, regenerated on the spot; the task is to reach one place in the maze. The
runs go to --workdir, and what is finished there is not run again unless its code or settings change. The table of all
that is finished there goes to --out, as JSON and as Markdown.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import app

from experiments import flags, offline, studies
from rl import agents, log
from rl.data import recipes
from rl.values import heads

_COMMON: dict[str, Any] = {"learning_rate": 1e-3, "target_rate": 0.05, "hidden": (128, 128)}

# Larger steps than the papers', so that values cross the maze in thousands of updates. The weights between value
# and cloning were chosen on medium-navigate with the scalar head and two seeds (results/README.md says among
# which), and hold for every head and dataset. Those of arsq, cqn, fql and ifql are not tuned.
CONFIGS: dict[str, dict[str, Any]] = {
    "bc": {"learning_rate": 1e-3, "hidden": (128, 128)},
    "iql": _COMMON | {"expectile": 0.9, "temperature": 4.0},
    "td3_bc": _COMMON | {"alpha": 320.0},
    "rebrac": _COMMON | {"policy_cloning": 0.002},
    "cql": _COMMON | {"policy_learning_rate": 1e-3, "weight": 0.1, "samples": 4},
    "sac_n": _COMMON | {"critics": 4},
    "edac": _COMMON | {"critics": 4},
    "arsq": _COMMON | {"bc_weight": 0.1},
    "fql": _COMMON | {"alpha": 1.0, "normalize_q": True},
    "ifql": _COMMON | {"expectile": 0.9},
    "cqn": _COMMON | {"dominance_weight": 0.1, "margin_weight": 0.1},
}

# The quantile loss compares all pairs of outputs, so fewer are usual than atoms.
QUANTILES = 25


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about the table."""

    dataset: str = "pointmaze-medium-navigate-v0"  # a pointmaze; its name as OGBench spells it
    agents: str = ",".join(CONFIGS)  # rows, comma-separated
    heads: str = ",".join(heads.NAMES)  # columns, comma-separated
    transitions: int = 200_000  # steps of data to make
    atoms: int = 51  # outputs of every categorical head: more of them take longer to fit
    seeds: int = 4  # seeds of each cell, trained at once
    updates: int = 10_000  # gradient steps of each seed
    eval_every: int = 5_000  # updates between evaluations
    eval_episodes: int = 20  # episodes per seed and evaluation
    seed: int = 0  # of data and agents
    workdir: str = ""  # the runs; by default runs/matrix/DATASET
    out: str = ""  # the table, OUT.json and OUT.md; by default results/matrix/DATASET


def run(settings: Settings) -> list[dict[str, Any]]:
    """Trains the cells asked for and returns all that are finished; the table on disk grows with every cell.

    Raises:
      ValueError: an agent, head or dataset that the table cannot have.
    """
    check(settings)
    workdir = settings.workdir or f"runs/matrix/{settings.dataset}"
    settings = dataclasses.replace(settings, workdir=workdir)
    out = Path(settings.out or f"results/matrix/{settings.dataset}")
    out.parent.mkdir(parents=True, exist_ok=True)
    data = Path(workdir) / "data"
    recipes.collect(settings.dataset, out=data, transitions=settings.transitions, seed=settings.seed)
    task = settings.dataset.replace("-v0", "-singletask-v0")
    grid = {
        f"{agent}-{head}": studies.Variant(
            functools.partial(train, settings, task, data, agent, head),
            {**studies.chosen(settings, "agents", "heads"), "config": CONFIGS[agent]},
        )
        for agent, head in pairs(CONFIGS, heads.NAMES)
    }
    names = [
        f"{agent}-{head}" for agent, head in pairs(settings.agents.split(","), settings.heads.split(","))
    ]

    def write() -> list[dict[str, Any]]:
        cells = list(studies.recall(settings, grid).outcomes.values())
        log.write_json(out.with_suffix(".json"), {**log.provenance(), "task": task, "cells": cells})
        with log.replacing(out.with_suffix(".md")) as partial:
            partial.write_text(table(cells, "success") + "\n\n" + table(cells, "return") + "\n")
        return cells

    studies.train(settings, {name: grid[name] for name in names}, "cells", write)
    return write()


def pairs(agents: Iterable[str], heads: Iterable[str]) -> list[tuple[str, str]]:
    """The cells of the table; behaviour cloning has no value, so that one column stands for all."""
    return [(agent, head) for agent in agents for head in (["scalar"] if agent == "bc" else heads)]


def train(
    settings: Settings, task: str, data: Path, agent: str, head: str, work: studies.Work
) -> dict[str, Any]:
    """One cell: what the run's result.json holds."""
    chosen = offline.Settings(
        agent=agent,
        dataset=task,
        data_folder=str(data),
        normalize_observations=True,
        validation=False,
        head=head,
        head_size={"scalar": 1, "quantile": QUANTILES}.get(head, settings.atoms),
        seeds=settings.seeds,
        seed=settings.seed,
        updates=settings.updates,
        eval_every=settings.eval_every,
        eval_episodes=settings.eval_episodes,
        workdir=str(work.folder),
    )
    return offline.run(chosen, agents.get(agent).Config(**CONFIGS[agent]))


def check(settings: Settings) -> None:
    """Raises ValueError on what `run` would find out only after an hour."""
    studies.names("agents", settings.agents, CONFIGS)
    studies.names("heads", settings.heads, heads.NAMES)
    if not settings.dataset.startswith("pointmaze-"):
        raise ValueError(f"--dataset={settings.dataset}: the weights in this file are for pointmaze-...")


def table(cells: Sequence[dict[str, Any]], score: str) -> str:
    """Markdown: agents down, heads across, the last ``score`` with its 95 % interval over seeds."""
    columns = list(dict.fromkeys(cell["settings"]["head"] for cell in cells))
    rows = []
    for agent in dict.fromkeys(cell["agent"] for cell in cells):
        of_head = {cell["settings"]["head"]: cell for cell in cells if cell["agent"] == agent}
        rows.append([f"`{agent}`", *(_cell(of_head[c], score) if c in of_head else "" for c in columns)])
    return studies.table([score, *columns], rows)


def _cell(result: dict[str, Any], score: str) -> str:
    each = result["scores"][score]["last"]["per_seed"]
    mean, low, high = (
        f"{x:.0f}" if abs(x) >= 10 else f"{x:.2f}" for x in studies.band(each, rate=score == "success")
    )
    return f"{mean} [{low}, {high}]"


def main(_: list[str]) -> None:
    cells = run(flags.read(Settings()))
    print(table(cells, "success"))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
