"""SAC on MuJoCo's robots beside published learning curves.

    python -m experiments.papers.sac_mujoco

Trains SAC online with the paper's settings where there is no finished run yet (a run of days stands as it is, whatever
became of the code: each says by which it was made), and lays its evaluations beside those of
ten seeds that were published with SimbaV2 (Lee et al. 2025, Apache-2.0): evaluation returns of its SAC baseline on
gymnasium's -v4 tasks, at the same number of environment steps. Ours are on -v5, which differ by little: Walker2d's feet
have equal friction, and the step on which Hopper or Walker2d falls earns no reward for being healthy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import online, studies
from rl import log, plot, statistics
from rl.agents import sac

ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")

# {task: {thousand steps: [smallest, median, largest return of ten seeds]}}
PUBLISHED: dict[str, dict[int, list[int]]] = studies.published("sac_mujoco")["returns"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about this study."""

    runs: str = "results/online"  # folder with a run folder for each environment; those missing are trained
    steps: int = 1_000_000  # environment steps of the runs that are trained
    seeds: int = 1  # seeds of each, trained at once
    environments: str = ",".join(ENVIRONMENTS)  # comma-separated

    @property
    def out(self) -> str:
        """Where result.json, the figures and the report land."""
        return self.runs


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing and writes result.json, README.md and a figure for each environment to ``runs``.

    Raises:
      ValueError: an environment without published curves here.
    """
    names = studies.names("environments", settings.environments, ENVIRONMENTS)
    root, comparisons = Path(settings.runs), {}
    for name in names:
        if not (root / name / log.RESULT).exists():
            train(settings, name, root / name)
        comparisons[name] = beside(name, *curve(root / name))
    result = studies.finish(settings, {"environments": comparisons}, report, claims)
    for name in names:  # last: what is stored may be under version control, and its commit was just noted
        draw(root / f"{name}.png", name, *curve(root / name))
    return result


def train(settings: Settings, name: str, folder: Path) -> None:
    """One run of the paper's SAC; continues where an earlier one was stopped."""
    chosen = online.Settings(
        agent="sac", env=name, steps=settings.steps, seeds=settings.seeds, workdir=str(folder)
    )
    online.run(chosen, sac.Config())


def curve(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps [T] of a run's evaluations and the mean return of each seed [T, S]."""
    steps, returns = log.series(folder, "eval/return")
    return steps, returns.mean(-1)


def beside(name: str, steps: np.ndarray, returns: np.ndarray) -> list[dict[str, Any]]:
    """At each published step that the run has reached: the published spread, and ours."""
    rows = []
    for thousands, (low, median, high) in PUBLISHED[name].items():
        at = np.flatnonzero(steps == 1000 * thousands)
        if not at.size:
            continue
        ours = returns[at[0]]
        rows.append(
            {
                "steps": 1000 * thousands,
                "published": {"smallest": low, "median": median, "largest": high},
                "ours": ours,
                "mean": ours.mean(),
                "ci95": list(statistics.interval(ours)),
                "within": bool((low <= ours.mean()) & (ours.mean() <= high)),
            }
        )
    return rows


def draw(path: Path, name: str, steps: np.ndarray, returns: np.ndarray) -> None:
    """The learning curve, and the published median and range."""
    reached = [at for at in PUBLISHED[name] if 1000 * at <= steps[-1]] or [min(PUBLISHED[name])]
    low, median, high = zip(*(PUBLISHED[name][at] for at in reached), strict=True)
    plot.lines(
        path,
        {
            "published, 10 seeds": (reached, median, low, high),
            f"ours, {returns.shape[1]} seed(s)": (steps / 1000, *studies.bands(returns)),
        },
        xlabel="thousand environment steps",
        ylabel="evaluation return",
        title=f"SAC, {name}",
        note="published: median, range\nours: mean, 95 % interval",
    )


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """Ours is the published SAC: nowhere outside what ten of its seeds did."""
    for name, rows in result["environments"].items():
        for row in rows:
            low, median, high = row["published"].values()
            yield studies.Claim(
                f"{name}, {row['steps']:,} steps: within the published range, in every seed",
                f"{median:,} [{low:,}, {high:,}], SAC of SimbaV2, 10 seeds",
                row["ours"],
                studies.every(lambda x, low=low, high=high: (low <= x) & (x <= high)),
            )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """Ours beside the published spread."""
    yield "# SAC on MuJoCo's robots"
    yield (
        f"`{result['command']}`. Mean evaluation return of each of our seeds (ten episodes, the policy's mode, -v5), "
        "beside the median and the range of ten seeds published with SimbaV2 for its SAC baseline (-v4). Each run "
        "folder says how it was made."
    )
    head = (
        "task",
        "environment steps",
        "published median [range]",
        "ours, each seed",
        "mean within the range",
    )
    yield studies.table(
        head,
        [
            (
                name,
                f"{row['steps']:,}",
                "{1:,} [{0:,}, {2:,}]".format(*row["published"].values()),
                ", ".join(f"{x:,.0f}" for x in row["ours"]),
                "yes" if row["within"] else "no",
            )
            for name, by_step in result["environments"].items()
            for row in by_step
        ],
    )


if __name__ == "__main__":
    studies.main(Settings(), run)
