"""A better model can make an offline agent worse: from a useless model over a learned one to the truth (RAVL).

    python -m experiments.papers.model_quality

Every method is trained in worlds between an untrained model (-1), the learned one (0) and MuJoCo itself (1), by
`experiments.model_based` with a short schedule, and its returns are drawn against the world. With the truth there is
no model error for a penalty to see: what then happens to Q is drawn against updates. Runs that exist are not repeated.

The paper does this on D4RL's walker2d-medium-expert with three million updates; the default here is a tier that is made
on the spot, networks of half the width and a three-hundredth of the updates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import model_based, studies
from rl import log, plot
from rl.data import recipes


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about this study."""

    dataset: str = (
        "hopper-medium-expert-regen-v5"  # name or file of a log; a regenerated one is made if missing
    )
    transitions: int = 200_000  # of data that are made
    methods: str = "base,mopo,ravl"  # of rl.model_based, comma-separated
    truths: str = "-1,-0.5,0,0.5,1"  # worlds, comma-separated
    seeds: int = 2  # of every run
    hidden: tuple[int, ...] = (128, 128)  # widths of the agents' layers
    epochs: int = 10  # of every run
    updates: int = 1000  # per epoch
    rollouts: int = 1000  # started per epoch
    length: int = 5  # k
    critics: int = 10  # RAVL's N
    diversity: float = 1.0  # RAVL's eta
    model_updates: int = 5_000  # of the learned model
    eval_every: int = 5  # epochs
    eval_episodes: int = 10  # of an evaluation
    seed: int = 0  # of everything
    workdir: str = "runs/model_quality"  # data and runs
    out: str = "results/papers/model_quality"  # where result.json, the figures and the table land


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing, and writes and returns what came out."""
    worlds = [float(word) for word in settings.truths.split(",")]
    methods = settings.methods.split(",")
    began, source = time.time(), settings.dataset
    if source in recipes.LOCOMOTION:
        folder = Path(settings.workdir) / "data"
        source = str(
            recipes.collect(source, out=folder, transitions=settings.transitions, seed=settings.seed)
        )
    rows = [_row(settings, source, method, world) for method in methods for world in worlds]
    result = {
        **log.provenance(),
        "settings": dataclasses.asdict(settings),
        "wall_seconds": time.time() - began,
        "rows": rows,
    }
    folder = Path(settings.out)
    studies.write(folder, result, table(result))
    draw(folder, settings, rows)
    return result


def _row(settings: Settings, source: str, method: str, world: float) -> dict[str, Any]:
    """One method in one world: its last return and Q, one number per seed."""
    workdir = Path(settings.workdir) / f"{method}-{world:g}"
    config = dataclasses.replace(
        model_based.config(method),
        updates=settings.updates,
        rollouts=settings.rollouts,
        length=settings.length,
        hidden=settings.hidden,
        **({"critics": settings.critics, "diversity": settings.diversity} if method == "ravl" else {}),
    )
    shared = {field.name for field in dataclasses.fields(model_based.Settings)}
    given = {name: value for name, value in dataclasses.asdict(settings).items() if name in shared}
    own: dict[str, Any] = {"agent": method, "dataset": source, "truth": world, "workdir": str(workdir)}
    model_based.run(model_based.Settings(**{**given, **own}, runaway=0.0), config)
    _, returns = log.series(workdir, "eval/return")
    _, q = log.series(workdir, "train/q")
    _, reward_error = log.series(workdir, "train/reward_error")
    return {
        "method": method,
        "world": world,
        "run": str(workdir),
        "return": returns[-1].reshape(settings.seeds, -1).mean(1),
        "q": q[-1],
        "reward_error": reward_error[-1],
    }


def draw(folder: Path, settings: Settings, rows: list[dict[str, Any]]) -> None:
    """Returns against worlds; and Q over training in the truth, if it was among them."""
    curves = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        returns = np.stack([row["return"] for row in own])
        curves[method] = ([row["world"] for row in own], returns.mean(1), returns.min(1), returns.max(1))
    plot.lines(
        folder / "interpolation.png",
        curves,
        "world: -1 untrained model, 0 learned model, 1 true dynamics",
        "return of an episode",
        title=Path(settings.dataset).stem,
        note="mean, worst and best seed",
    )
    true = {row["method"]: log.series(row["run"], "train/q") for row in rows if row["world"] == 1}
    if true:
        plot.learning_curve(
            folder / "q_in_the_truth.png", true, "mean Q on batches", title="True dynamics: what Q does"
        )


def table(result: dict[str, Any]) -> Iterator[str]:
    """The lines of a Markdown report."""
    settings = result["settings"]
    yield f"# {Path(settings['dataset']).stem}: from an untrained model to the truth"
    yield ""
    yield f"`{result['command']}`, {result['hardware']['cores']} cores."
    yield ""
    yield (
        f"After {settings['epochs'] * settings['updates']} updates, {settings['seeds']} seeds: mean return of an "
        "episode [worst, best seed], mean Q on batches, and how far the world's rewards are from the true ones."
    )
    yield ""
    yield "| method | world | return | Q | reward error |"
    yield "|---|---|---|---|---|"
    for row in result["rows"]:
        own = row["return"]
        yield (
            f"| {row['method']} | {row['world']:g} | {own.mean():.0f} [{own.min():.0f}, {own.max():.0f}] "
            f"| {np.mean(row['q']):.3g} | {np.mean(row['reward_error']):.3g} |"
        )


if __name__ == "__main__":
    studies.main(Settings(), run)
