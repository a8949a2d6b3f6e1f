r"""OGBench's goal-conditioned table (Park et al., ICLR 2025) at two cores' budget: six agents, mazes and a cube.

    python -m experiments.papers.ogbench_goals
    python -m experiments.papers.ogbench_goals --updates=1000000 --evaluations=10 --eval_episodes=50 \
        --batch_size=1024 --hidden=512,512,512 --latent=512 --cube_transitions=0 --seeds=8

Every agent has its published settings for the dataset (experiments/presets.yaml) but for the sizes that are flags here;
the second command has these, too, and is for a GPU. The data are made again by OGBench's own protocol
(`rl.data.recipes`): as many steps as published of the mazes, ``--cube_transitions`` of the cube. A score is OGBench's:
success at any step of an episode, the mean over the five tasks and the last three evaluations. At the defaults, 3.3
hours of one core, that is 2 % of the published updates, on networks of a twentieth of the size: curves against
updates stand beside the scores.

A command that is killed loses what it trained since the last evaluation, and the same command goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments import checks, common, goals, presets, studies, study_runs
from rl import agents, plot, statistics
from rl.data import recipes
from rl.settings import require_at_least_one

PUBLISHED = studies.published("ogbench_goals")
DATASETS = tuple(PUBLISHED["success"])
AGENTS = ("gcbc", "gcivl", "gciql", "qrl", "crl", "hiql")  # in the order of the paper's table
TABLE = "OGBench's table"

# CPU time of one update of one seed, three layers of 128 and batches of 256, on an AMD EPYC; and of one step in a
# simulator.
MILLISECONDS = {"gcbc": 2.0, "gcivl": 12.0, "gciql": 12.0, "qrl": 25.0, "crl": 13.0, "hiql": 14.0}
STEP = {"pointmaze": 0.2, "cube": 2.0}
LENGTH = {"pointmaze": 1000, "cube": 200}  # steps of an episode that does not succeed
START = 20.0  # seconds: compilation


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about this study."""

    datasets: str = ",".join(DATASETS)  # of the published table, comma-separated
    agents: str = ",".join(AGENTS)  # comma-separated
    cube_transitions: int = 200_000  # steps of each cube dataset; 0: as published, 1,000,000
    maze_transitions: int = 0  # steps of each maze dataset; 0: as published, 1,000,000
    seeds: int = 3  # of each run, trained at once
    updates: int = 20_000  # of each seed
    evaluations: int = 5  # of each run, at least 3
    eval_episodes: int = 6  # per seed, task and evaluation
    batch_size: int = 128  # transitions per update
    hidden: tuple[int, ...] = (128, 128)  # widths of every network's layers
    latent: int = 64  # numbers of which CRL and QRL make their distances
    seed: int = 0  # of data and agents
    workdir: str = "runs/ogbench_goals"  # data and runs
    out: str = "results/papers/ogbench_goals"


def run(settings: Settings) -> dict[str, Any]:
    """Makes what is missing of data and runs; writes and returns what came out.

    Raises:
      ValueError: an unknown dataset or agent, or settings that a run refuses.
    """
    check(settings)
    cells = itertools.product(settings.datasets.split(","), settings.agents.split(","))
    return studies.train_cells(
        settings,
        ("dataset", "agent"),
        {cell: ", ".join(cell) for cell in cells},
        functools.partial(source, settings),
        lambda cell, source: variant(settings, *cell, *source),
        report,
        claims,
        draw,
        parts=lambda sources, earlier: {
            "data_digests": studies.data_digests({name: of[1] for name, of in sources.items()}, earlier)
        },
    )


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on what `run` would find out only after an hour."""
    studies.names("datasets", settings.datasets, DATASETS)
    studies.names("agents", settings.agents, AGENTS)
    studies.check_seeds(settings.seeds)
    require_at_least_one(settings, "latent", prefix="--")
    if settings.latent % 8 and "qrl" in settings.agents.split(","):
        raise ValueError(
            f"--latent={settings.latent} must be a multiple of 8, the intervals of a group in qrl"
        )
    checks.sizes(settings, goals.EVALUATIONS)


# ---- runs -----------------------------------------------------------------------------------------------------


def source(settings: Settings, dataset: str) -> tuple[str, str]:
    """The file of a dataset, made where it does not lie there yet, and the digest of what is in it."""
    size = settings.maze_transitions if dataset.startswith("pointmaze") else settings.cube_transitions
    path = recipes.collect(
        dataset, out=Path(settings.workdir) / "data", transitions=size or None, seed=settings.seed
    )
    return str(path), recipes.read_card(path)["sha256"]["train"]


def variant(settings: Settings, dataset: str, agent: str, path: str, digest: str) -> studies.Variant:
    """What is trained for an agent on a dataset, and all that its outcome depends on."""
    flags = {
        "agent": agent,
        "preset": presets.PAPER,
        "dataset": dataset,
        **study_runs.sizes(settings),
    }
    if hasattr(agents.get(agent).Config, "latent"):
        flags["agent.latent"] = settings.latent
    chosen, config = presets.resolve("goals", goals.Settings(), common.config, "dataset", flags)
    return studies.Variant(
        functools.partial(trained, dataclasses.replace(chosen, dataset=path), config),
        {**dataclasses.asdict(chosen), "data": digest, "config": dataclasses.asdict(config)},
        round(seconds(settings, dataset, agent)),
    )


def seconds(settings: Settings, dataset: str, agent: str) -> float:
    """What a run takes on one core, about: to weigh runs against each other in the time that is left."""
    robot = dataset.partition("-")[0]
    size = settings.batch_size / 256 * (settings.hidden[-1] / 128) ** 2 * len(settings.hidden) / 3
    episodes = 5 * settings.eval_episodes * settings.evaluations
    updates, steps = settings.updates * MILLISECONDS[agent] * size, episodes * LENGTH[robot] * STEP[robot]
    return START + settings.seeds * (updates + steps) / 1000


def trained(chosen: goals.Settings, config: Any, work: studies.Work) -> dict[str, Any]:
    """One run; goes on from the last evaluation of one that was killed.

    Returns its score and that of each task over the last evaluations, and its successes in all of them [T, S].
    """
    chosen = dataclasses.replace(chosen, workdir=str(work.folder))
    diverged = bool(study_runs.divergence(goals.run, chosen, config))
    steps, success = study_runs.curve(work.folder, "eval/success", chosen, diverged)
    try:
        tasks = goals.reached(chosen, work.folder, "goals/")["tasks"]
    except (FileNotFoundError, KeyError):
        if not diverged:
            raise
        tasks = {"all": statistics.summary(success[-1], rate=True)}
    return {
        "success": tasks.pop("all"),
        "tasks": tasks,
        "curve": {"steps": steps, "success": success},
        "diverged": diverged,
    }


# ---- claims ---------------------------------------------------------------------------------------------------


def scores(result: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """{dataset: {agent: success in per cent, one per seed [S]}} of what is finished and did not diverge."""
    success: dict[str, dict[str, np.ndarray]] = {row["dataset"]: {} for row in result["rows"]}
    for row in studies.undiverged(result)["rows"]:
        success[row["dataset"]][row["agent"]] = 100 * np.asarray(row["success"]["each"])
    return success


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """Which differences of the published table are seen at this budget."""
    success = scores(result)
    for dataset, ours in success.items():
        theirs = {agent: PUBLISHED["success"][dataset][agent][0] for agent in AGENTS}
        best = max(theirs, key=theirs.__getitem__)
        pairs = [(best, "gcbc")]
        if dataset.startswith("pointmaze"):
            pairs += [("hiql", "gcivl")] + ([("qrl", "crl")] if "stitch" in dataset else [])
        else:
            pairs += [("gciql", "hiql"), ("gciql", "qrl")]
        for first, second in pairs:
            if first in ours and second in ours:
                text = f"{dataset}: `{first}` reaches more goals than `{second}` (difference, per cent)"
                table = f"{theirs[first]} against {theirs[second]}, {TABLE}"
                yield studies.Claim(text, table, ours[first] - ours[second], studies.positive)
        if len(ours) == len(AGENTS):
            yield studies.Claim(
                f"{dataset}: agents' ranks correlate with the published ones (Spearman's, of each seed)",
                f"1 with {TABLE} itself",
                [
                    _rank(list(theirs.values()), [ours[agent][seed] for agent in theirs])
                    for seed in range(result["settings"]["seeds"])
                ],
                studies.positive,
            )
    play, noisy = (success.get(f"cube-single-{kind}-v0", {}).get("gciql") for kind in ("play", "noisy"))
    if play is not None and noisy is not None:
        text = "cube-single: `gciql` reaches more goals with noisy data than with play (difference, per cent)"
        yield studies.Claim(text, f"99 against 68, {TABLE}", noisy - play, studies.positive)


def _rank(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Spearman's correlation; 0 where all of ours are the same."""
    return 0.0 if np.ptp(ours) == 0 else float(spearmanr(theirs, ours).statistic)


# ---- report ---------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield "# OGBench's goals"
    yield f"{studies.origin(result)} {studies.program(result, __file__)} says what is run."
    size = lambda steps: f"{steps:,} steps" if steps else "as many steps as published"
    yield (
        f"{settings['updates']:,} updates with batches of {settings['batch_size']}, layers of "
        f"{list(settings['hidden'])}, {settings['seeds']} seeds (published: 1,000,000, 1024, [512, 512, 512], 8). Data "
        f"are made again: {size(settings['maze_transitions'])} of each maze, {size(settings['cube_transitions'])} of "
        "each cube. Other settings are the published ones of the dataset. Success in per cent at any step, mean over "
        f"five tasks of {settings['eval_episodes']} episodes and the last {goals.EVALUATIONS} evaluations (published: "
        "50 episodes), and its 95 % interval over seeds; published numbers ± one deviation."
    )
    yield from studies.other_data(result)
    yield "## Success"
    yield success_table(result)
    yield from studies.about_diverged(result)
    yield (
        "*reprinted*: later papers print the same numbers; *transcribed*: read from one transcription of the table. On "
        "cube-single-play HIQL is published as 44 ± 9, too, with expectile 0.9 and inverse temperatures 0.3."
    )
    yield "## Each task"
    yield tasks_table(result)
    yield "Against updates: success.png."


def success_table(result: Mapping[str, Any]) -> str:
    """Datasets by agents, and below each the published ones."""
    names, success = result["settings"]["agents"].split(","), scores(result)
    diverged = {(row["dataset"], row["agent"]) for row in result["rows"] if row["diverged"]}
    rows = []
    for dataset, ours in success.items():
        cells = [
            _per_cent(ours[name]) if name in ours else "diverged" if (dataset, name) in diverged else "-"
            for name in names
        ]
        rows.append((dataset, *cells))
        theirs = PUBLISHED["success"][dataset]
        tag = PUBLISHED["tags"][dataset]
        rows.append((f"published ({tag})", *("{} ± {}".format(*theirs[name]) for name in names)))
    return studies.table(("dataset", *(f"`{name}`" for name in names)), rows)


def _per_cent(success: np.ndarray) -> str:
    """Of success in per cent, one number per seed [S]: mean and interval, which stays within 0 and 100."""
    mean, low, high = (f"{100 * x:.0f}" for x in studies.band(success / 100, rate=True))
    return f"{mean} [{low}, {high}]"


def tasks_table(result: Mapping[str, Any]) -> str:
    """Success of each task, a row per run."""
    rows = []
    for row in result["rows"]:
        tasks = [] if row["diverged"] else row["tasks"].values()
        each = [f"{100 * task['mean']:.0f}" for task in tasks] or ["diverged"] * 5
        rows.append((row["dataset"], f"`{row['agent']}`", *each))
    return studies.table(("dataset", "agent", *(f"task {i}" for i in range(1, 6))), rows)


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Success against updates, a panel for each dataset that all agents have finished."""
    names = result["settings"]["agents"].split(",")
    curves = {(row["dataset"], row["agent"]): row["curve"] for row in result["rows"]}
    panels = {
        dataset: {name: tuple(curves[dataset, name][x] for x in ("steps", "success")) for name in names}
        for dataset in result["settings"]["datasets"].split(",")
        if all((dataset, name) in curves for name in names)
    }
    if panels:
        plot.learning_curves(
            folder / "success.png",
            panels,
            title="success at any step",
            ylabel="success rate",
            rate=True,
            columns=3,
            intervals=False,
        )


if __name__ == "__main__":
    studies.main(Settings(), run)
