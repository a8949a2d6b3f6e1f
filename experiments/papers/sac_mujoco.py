"""SAC on MuJoCo's robots beside published learning curves.

    python -m experiments.papers.sac_mujoco

Trains SAC online with the paper's settings where there is no finished run yet, and lays its evaluations beside those of
ten seeds that were published with SimbaV2 (Lee et al. 2025, Apache-2.0): evaluation returns of its SAC baseline on
gymnasium's -v4 tasks, at the same number of environment steps. Ours are on -v5, which differ by little: Walker2d's feet
have equal friction, and the step on which Hopper or Walker2d falls earns no reward for being healthy.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from absl import app

from experiments import flags, online, studies
from rl import log, plot, statistics
from rl.agents import sac

ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")

# Steps in thousands: smallest, median and largest return of ten seeds. The curves have a point every 16,666 steps; the
# one at 49,998 stands for 50,000, and so on.
PUBLISHED: dict[str, dict[int, tuple[int, int, int]]] = {
    "HalfCheetah-v5": {
        50: (3463, 4378, 4879),
        100: (4986, 6056, 7510),
        150: (5850, 6788, 8448),
        200: (6497, 7506, 9168),
        250: (6825, 8196, 9606),
        300: (7103, 8546, 9843),
        500: (7996, 10248, 10797),
        1000: (8900, 11353, 12531),
    },
    "Hopper-v5": {
        50: (10, 491, 1234),
        100: (408, 1017, 1717),
        150: (295, 1185, 2506),
        200: (787, 2655, 3428),
        250: (345, 2109, 3419),
        300: (183, 1866, 3431),
        500: (1119, 3346, 3542),
        1000: (1303, 3041, 3637),
    },
    "Walker2d-v5": {
        50: (126, 343, 718),
        100: (261, 753, 1049),
        150: (647, 1035, 2999),
        200: (65, 2117, 3474),
        250: (1012, 3255, 3878),
        300: (131, 3268, 4207),
        500: (350, 3811, 4769),
        1000: (3835, 4390, 5206),
    },
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about this study."""

    runs: str = "results/online"  # folder with a run folder for each environment; those missing are trained
    steps: int = 1_000_000  # environment steps of the runs that are trained
    seeds: int = 1  # seeds of each, trained at once
    environments: str = ",".join(ENVIRONMENTS)  # comma-separated


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing and writes result.json, README.md and a figure for each environment to ``runs``.

    Raises:
      ValueError: an environment without published curves here.
    """
    names = studies.names("environments", settings.environments, ENVIRONMENTS)
    root, provenance = Path(settings.runs), log.provenance()  # before anything stored is drawn again
    found = {}
    for name in names:
        if not (root / name / log.RESULT).exists():
            train(settings, name, root / name)
        steps, returns = curve(root / name)
        draw(root / f"{name}.png", name, steps, returns)
        found[name] = beside(name, steps, returns)
    result = {**provenance, "settings": settings, "environments": found}
    studies.write(root, result, table(result).splitlines())
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
    bounds = np.array([statistics.interval(row) for row in returns]).T
    plot.lines(
        path,
        {
            "published, 10 seeds": (reached, median, low, high),
            f"ours, {returns.shape[1]} seed(s)": (steps / 1000, returns.mean(-1), *bounds),
        },
        xlabel="thousand environment steps",
        ylabel="evaluation return",
        title=f"SAC, {name}",
        note="published: median, range\nours: mean, 95 % interval",
    )


def table(result: dict[str, Any]) -> str:
    """Ours beside the published spread."""
    rows = [
        f"| {name} | {row['steps']:,} | {row['published']['median']:,} "
        f"[{row['published']['smallest']:,}, {row['published']['largest']:,}] | "
        f"{', '.join(f'{x:,.0f}' for x in row['ours'])} | {'yes' if row['within'] else 'no'} |"
        for name, by_step in result["environments"].items()
        for row in by_step
    ]
    return f"""# SAC on MuJoCo's robots

`{result["command"]}`. Mean evaluation return of each of our seeds (ten episodes, the policy's mode, -v5), beside the
median and the range of ten seeds published with SimbaV2 for its SAC baseline (-v4). Each run folder says how it was
made.

| task | environment steps | published median [range] | ours, each seed | mean within the range |
|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    run(settings)
    print((Path(settings.runs) / "README.md").read_text())


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
