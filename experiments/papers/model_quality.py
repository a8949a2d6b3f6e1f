"""A better model can make an offline agent worse: from a useless model over a learned one to the truth (RAVL).

    python -m experiments.papers.model_quality

Every method is trained in worlds between an untrained model (-1), the learned one (0) and MuJoCo itself (1), by
`experiments.model_based` with a short schedule, and its returns are drawn against the world. With the truth there is
no model error for a penalty to see: what then happens to Q is drawn against updates. Runs that exist are not repeated.

The paper does this on D4RL's walker2d-medium-expert with rollouts of 5 steps and three million updates. The default
here is a tier that is made on the spot, networks of half the width and 15,000 updates, which is not enough for any
method to control a robot. Rollouts have 1 step, so that the collapse fits into them: on another seed, base with 5
steps still had sound values after 20,000 updates (223, with returns below the data's; not stored).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import model_based, studies, study_runs
from rl import data, log, plot
from rl import model_based as rl_model_based
from rl.data import recipes

# What is reported of every run's last epoch beside its return; see `rl.model_based.diagnosis`.
DIAGNOSES = ("edge_share", "edge_q", "elsewhere_q", "spread", "aleatoric", "spread_aleatoric", "reward_error")


# Those that roll out in a world: the others have no diagnoses.
METHODS = [name for name, (_, of_loop) in rl_model_based.METHODS.items() if of_loop.get("real") != 1]


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    dataset: str = "hopper-medium-expert-regen-v5"  # name or file of a log; a regenerated one is made
    transitions: int = 200_000  # of data that are made
    methods: str = "base,mopo,ravl"  # of rl.model_based, those with a model, comma-separated
    truths: str = "-1,0,0.5,1"  # worlds, comma-separated
    seeds: int = 2  # of every run
    hidden: tuple[int, ...] = (128, 128)  # widths of the agents' layers
    epochs: int = 15  # of every run
    updates: int = 1000  # per epoch
    rollouts: int = 1000  # started per epoch
    length: int = 1  # k
    critics: int = 10  # RAVL's N
    diversity: float = 1.0  # RAVL's eta
    model_updates: int = 5_000  # of the learned model
    eval_every: int = 5  # epochs
    eval_episodes: int = 10  # of an evaluation
    seed: int = 0  # of everything
    workdir: str = "runs/model_quality"  # data and runs
    out: str = "results/papers/model_quality"


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing, and writes and returns what came out.

    Raises:
      ValueError: an unknown method, a world outside [-1, 1], too few seeds, or settings that a run refuses.
    """
    methods = studies.names("methods", settings.methods, METHODS)
    worlds = _worlds(settings.truths)
    studies.check_seeds(settings.seeds)
    source = settings.dataset
    if source in recipes.LOCOMOTION:
        folder = Path(settings.workdir) / "data"
        source = str(
            recipes.collect(source, out=folder, transitions=settings.transitions, seed=settings.seed)
        )
    loaded = data.load(source)
    variants = {
        f"{method}-{world:g}": studies.Variant(
            functools.partial(train_one, settings, source, method, world),
            {**studies.chosen(settings, "methods", "truths"), "data": loaded.digest},
        )
        for method in methods
        for world in worlds
    }
    finished = studies.train(settings, variants, "runs")
    rows = list(finished.outcomes.values())
    largest = rl_model_based.largest_value(loaded.dataset, model_based.config(methods[0]).discount)
    for row in rows:
        row["limit"] = largest.reward + row["alpha"] * largest.entropy
    result = studies.finish(
        settings, {"wall_seconds": finished.seconds, "rows": rows}, report, claims, trained=finished
    )
    draw(Path(settings.out), settings, rows)
    return result


def _worlds(text: str) -> list[float]:
    try:
        worlds = [float(word) for word in text.split(",")]
    except ValueError:
        worlds = [math.nan]
    if not all(-1 <= world <= 1 for world in worlds):
        raise ValueError(
            f"--truths={text}: worlds are numbers from -1 (untrained) over 0 (learned) to 1 (the truth)"
        )
    return worlds


def train_one(
    settings: Settings, source: str, method: str, world: float, work: studies.Work
) -> dict[str, Any]:
    """One method in one world: its last return, Q and diagnoses, one number per seed, and Q over updates."""
    config = dataclasses.replace(
        model_based.config(method),
        updates=settings.updates,
        rollouts=settings.rollouts,
        length=settings.length,
        hidden=settings.hidden,
        **({"critics": settings.critics, "diversity": settings.diversity} if method == "ravl" else {}),
    )
    shared = {field.name for field in dataclasses.fields(model_based.Settings)}
    flags = {name: value for name, value in dataclasses.asdict(settings).items() if name in shared}
    flags |= {"agent": method, "dataset": source, "truth": world, "workdir": str(work.folder)}
    diverged = bool(
        study_runs.divergence(model_based.run, model_based.Settings(**flags, runaway=0.0), config)
    )
    logged = functools.partial(_logged, work.folder, settings.seeds, diverged)
    steps, q = logged("train/q")
    return {
        "method": method,
        "world": world,
        "q_curve": {"step": steps, "q": q},
        "diverged": diverged,
        "return": logged("eval/return")[1][-1].reshape(settings.seeds, -1).mean(1),
        **{name: logged(f"train/{name}")[1][-1] for name in ("q", "alpha", *DIAGNOSES)},
    }


def _logged(folder: Path, seeds: int, diverged: bool, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric over updates, as `rl.log.series` gives it; of a run that diverged before it logged any, NaN at 0."""
    try:
        return log.series(folder, name)
    except (FileNotFoundError, KeyError):
        if not diverged:
            raise
    return np.zeros(1, int), np.full((1, seeds), np.nan)


PUBLISHED = studies.published("ravl")


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper's argument predicts, as far as it was run: in every seed, not on average."""
    rows = {(row["method"], row["world"]): row for row in result["rows"]}
    base, ravl, learned = rows.get(("base", 1)), rows.get(("ravl", 1)), rows.get(("base", 0))
    source = "RAVL (Sims et al., NeurIPS 2024), on walker2d-medium-expert"
    if base:
        text = "true dynamics: base's Q ends above the largest value there can be (difference)"
        yield studies.Claim(text, source, base["q"] - base["limit"], _above)
    if ravl:
        text = "true dynamics: RAVL's Q stays below the largest value there can be (difference)"
        yield studies.Claim(text, source, ravl["limit"] - ravl["q"], _above)
    if base and ravl:
        text = "true dynamics: RAVL's worst seed returns more than base's best (by how much)"
        yield studies.Claim(text, source, ravl["return"] - base["return"].max(), _above)
    if base and learned:
        text = (
            "base's best seed returns less with the truth than its worst with the learned model (by how much)"
        )
        yield studies.Claim(text, source, learned["return"].min() - base["return"], _above)
    if penalised := rows.get(("ravl", 0)):
        text = (
            "learned model: the deviation of RAVL's critics grows with MOPO's penalty (Pearson's correlation)"
        )
        yield studies.Claim(
            text,
            f"RAVL (Sims et al., NeurIPS 2024), of the critics' variance: {_correlations()}",
            penalised["spread_aleatoric"],
            _above,
        )


def _correlations() -> str:
    return ", ".join(f"{value} ({name})" for name, value in PUBLISHED["correlation"].items())


def _above(values: np.ndarray) -> tuple[bool | None, str]:
    """Above 0 in every seed or in none; open where seeds disagree or one diverged before it logged that."""
    above = values > 0
    agree = above.all() == above.any() and not np.isnan(values).any()
    return bool(above.all()) if agree else None, studies.extremes(values)


def draw(folder: Path, settings: Settings, rows: list[dict[str, Any]]) -> None:
    """Returns against worlds; and Q over training in the truth, if it was among them."""
    curves = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        runs = [row for row in rows if row["method"] == method]
        returns = np.stack([row["return"] for row in runs])
        curves[method] = ([row["world"] for row in runs], returns.mean(1), returns.min(1), returns.max(1))
    plot.lines(
        folder / "interpolation.png",
        curves,
        "world: -1 untrained model, 0 learned model, 1 true dynamics",
        "return of an episode",
        title=Path(settings.dataset).stem,
        note="mean, worst and best seed",
    )
    true = {row["method"]: row["q_curve"].values() for row in rows if row["world"] == 1}
    if true:
        bounds = {method: (step, q.mean(1), q.min(1), q.max(1)) for method, (step, q) in true.items()}
        plot.lines(
            folder / "q_in_the_truth.png",
            bounds,
            "updates",
            "mean Q on batches",
            title="True dynamics: what Q does",
            note="mean, smallest and largest seed",
        )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield f"# {Path(settings['dataset']).stem}: from an untrained model to the truth"
    yield f"`{result['command']}`, {result['hardware']['cores']} cores."
    yield (
        f"After {settings['epochs'] * settings['updates']} updates with {settings['length']}-step rollouts, "
        f"{settings['seeds']} seeds: mean return of an episode [worst, best seed], mean Q on batches [smallest, "
        "largest seed], and the largest value there can be, from the logged rewards and the entropy's own temperature."
    )
    rows = result["rows"]
    yield studies.table(
        ("method", "world", "return", "Q", "at most"),
        [
            (
                *_label(row),
                studies.extremes(row["return"]),
                studies.extremes(row["q"]) + (" (diverged)" if row["diverged"] else ""),
                studies.extremes(row["limit"]),
            )
            for row in rows
        ],
    )
    yield (
        "The last epoch's diagnosis, mean over seeds: share of next states at the estimated edge of reach, Q there and "
        "elsewhere, deviation of Q over critics, MOPO's penalty, their correlation, and how far the world's rewards "
        "are from the true ones."
    )
    yield studies.table(
        ("method", "world", *(name.replace("_", " ") for name in DIAGNOSES)),
        [(*_label(row), *(studies.digits(np.mean(row[name])) for name in DIAGNOSES)) for row in rows],
    )
    if any(row["world"] < 1 for row in rows):
        yield (
            f"Published, with learned models: a correlation of {_correlations()} after 3,000,000 updates. As others "
            "report it, it is that of the critics' variance. *Spread aleatoric* is Pearson's correlation over rows of "
            "rollouts, too, but of the critics' deviation, which is what the paper's code logs. On rewards the paper "
            "has a sentence and no number: those of rollouts in a learned model are close to the true ones."
        )


def _label(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["method"], f"{row['world']:g}"


if __name__ == "__main__":
    studies.main(Settings(), run)
