r"""Value heads by lengths of chunks by agents on two of OGBench's single tasks: which of them is it that matters?

    python -m experiments.papers.heads_and_chunks
    python -m experiments.papers.heads_and_chunks --updates=1000000 --evaluations=10 --eval_episodes=50 \
        --batch_size=256 --hidden=512,512,512,512 --transitions=0 --seeds=8

Five heads, all categorical ones with equal atoms, times chunks of 1, 5 and 8 actions, times IQL, DEAS and FQL, by the
protocol ogbench-fql (experiments/presets.yaml): OGBench's own rewards, and two critics. Chunks are executed to their
end. IQL and FQL have the settings that the FQL paper has for the task; DEAS those of its paper, and IFQL's where that
leaves them open. All heads start near a value of 0, as a scalar does, and not in the middle of their support, -250 in
scene. DEAS's discount of 0.999 allows values of -5,000 in scene and -1,000 with the cube. Its supports end at a fifth
of that, for every categorical head alike, because in scene a scalar's mean values end within a tenth of it; the report
says what share of targets was cut. Sizes are flags; those of the second command are the published ones, and are for a
GPU. The data are made again by OGBench's own protocol (`rl.data.recipes`).

At the defaults the 90 runs take about 21 hours of one core, by `seconds`. A command that is killed loses what it
trained since the last evaluation, and the same command goes on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks, common, offline, presets, studies, study_runs
from rl import log, plot
from rl.data import recipes
from rl.values import heads

PUBLISHED = studies.published("heads_and_chunks")
DEAS_CHUNK = 8  # of its ablation of heads
DATASETS = tuple(f"{name}-task1-v0" for name in PUBLISHED["success"])
AGENTS = ("iql", "deas", "fql")
PROTOCOL = "ogbench-fql"
CATEGORICAL = ("two_hot", "hl_gauss", "c51")
EVALUATIONS = 3  # the last ones, over which a score is the mean
# Lower ends of DEAS's supports: a fifth of what its discount allows.
DEAS_LOW = {"cube": -200.0, "scene": -1000.0}

# CPU time of one update of one seed, two layers of 128 and batches of 128, on a busy AMD EPYC, of single actions and a
# scalar head; what chunks and heads make of it; and of one step in the simulator.
MILLISECONDS = {"iql": 1.6, "deas": 2.4, "fql": 3.6}
HEADS = {"scalar": 1.0, "two_hot": 1.3, "hl_gauss": 1.4, "c51": 1.4, "quantile": 1.5}
STEP = 2.0
LENGTH = {"cube": 200, "scene": 750}  # steps of an episode that does not succeed
START = 30.0  # seconds: compilation and data


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about this study."""

    datasets: str = ",".join(DATASETS)  # comma-separated
    agents: str = ",".join(AGENTS)  # comma-separated
    heads: str = ",".join(heads.NAMES)  # comma-separated
    chunks: str = "1,5,8"  # actions in each decision, comma-separated
    transitions: int = 0  # steps of each dataset; 0: as published, 1,000,000
    atoms: int = 51  # outputs of every head but the scalar one
    seeds: int = 3  # of each run, trained at once
    updates: int = 60_000  # of each seed
    evaluations: int = 4  # of each run, at least 3
    eval_episodes: int = 10  # per seed and evaluation
    batch_size: int = 128  # transitions per update
    hidden: tuple[int, ...] = (128, 128)  # widths of every network's layers
    seed: int = 0  # of data and agents
    workdir: str = "runs/heads_and_chunks"  # data and runs
    out: str = "results/papers/heads_and_chunks"


def run(settings: Settings) -> dict[str, Any]:
    """Makes what is missing of data and runs; writes and returns what came out.

    Raises:
      ValueError: an unknown dataset, agent or head, or settings that a run refuses.
    """
    check(settings)
    cells = {
        (dataset, agent, head, chunk): f"{dataset}, {agent}, {head}, chunks of {chunk}"
        for dataset in settings.datasets.split(",")
        for chunk in lengths(settings.chunks)
        for head in settings.heads.split(",")
        for agent in settings.agents.split(",")
    }
    return studies.train_cells(
        settings,
        ("dataset", "agent", "head", "chunk"),
        cells,
        functools.partial(source, settings),
        lambda cell, digest: variant(settings, *cell, digest),
        report,
        claims,
        draw,
        parts=lambda digests, earlier: {"data_digests": studies.data_digests(digests, earlier)},
    )


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on what `run` would find out only after an hour."""
    studies.names("datasets", settings.datasets, DATASETS)
    studies.names("agents", settings.agents, AGENTS)
    studies.names("heads", settings.heads, heads.NAMES)
    studies.check_seeds(settings.seeds)
    checks.sizes(settings, EVALUATIONS)
    lengths(settings.chunks)


def lengths(text: str) -> list[int]:
    """The lengths of chunks in ``text``, comma-separated. Raises ValueError, naming the flag, for what is none."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"--chunks={text}: give whole numbers of at least 1, as in 1,5,8")
    return [int(word) for word in words]


# ---- runs -----------------------------------------------------------------------------------------------------


def source(settings: Settings, dataset: str) -> str:
    """The digest of a dataset's steps, made where they do not lie there yet."""
    plain = dataset.partition("-singletask")[0] + "-v0"
    path = recipes.collect(
        plain, out=folder(settings), transitions=settings.transitions or None, seed=settings.seed
    )
    return recipes.read_card(path)["sha256"]["train"]


def folder(settings: Settings) -> Path:
    """Of the data."""
    return Path(settings.workdir) / "data"


def variant(
    settings: Settings, dataset: str, agent: str, head: str, chunk: int, digest: str
) -> studies.Variant:
    """What is trained, and all that its outcome depends on."""
    # No reward is above 0. Other heads start near 0 by themselves.
    support = {"head_high": 0.0, "head_start": 0.0} if head in CATEGORICAL else {}
    if support and agent == "deas":
        support["head_low"] = DEAS_LOW[dataset.partition("-")[0]]
    flags = {
        "agent": agent,
        "preset": presets.NONE if agent == "deas" else PROTOCOL,
        "dataset": dataset,
        "head": head,
        "head_size": settings.atoms,
        "chunk": chunk,
        **support,
        **study_runs.sizes(settings),
    }
    chosen, config = presets.resolve("offline", offline.Settings(), common.config, "dataset", flags)
    return studies.Variant(
        functools.partial(trained, dataclasses.replace(chosen, data_folder=str(folder(settings))), config),
        {**dataclasses.asdict(chosen), "data": digest, "config": dataclasses.asdict(config)},
        round(seconds(settings, dataset, agent, head, chunk)),
    )


def seconds(settings: Settings, dataset: str, agent: str, head: str, chunk: int) -> float:
    """What a run takes on one core, about: to weigh runs against each other in the time that is left."""
    size = settings.batch_size / 128 * (settings.hidden[-1] / 128) ** 2 * len(settings.hidden) / 2
    update = MILLISECONDS[agent] * HEADS[head] * size * (1 + 0.05 * (chunk - 1))
    steps = settings.eval_episodes * settings.evaluations * LENGTH[dataset.partition("-")[0]] * STEP
    return START + settings.seeds * (settings.updates * update + steps) / 1000


def trained(chosen: offline.Settings, config: Any, work: studies.Work) -> dict[str, Any]:
    """One run; goes on from the last evaluation of one that was killed.

    Returns its success over the last evaluations [S], that of all of them [T, S], and what share of targets lay outside
    the support at the end.
    """
    chosen = dataclasses.replace(chosen, workdir=str(work.folder))
    diverged = bool(study_runs.divergence(offline.run, chosen, config))
    steps, success = study_runs.curve(work.folder, "eval/success", chosen, diverged)
    return {
        "success": success[-EVALUATIONS:].mean(0),
        "curve": {"steps": steps, "success": success},
        "clipped": float("nan") if diverged else log.series(work.folder, "train/clipped")[1][-1].mean(),
        "diverged": diverged,
    }


# ---- claims ---------------------------------------------------------------------------------------------------

Cell = tuple[str, str, int]  # agent, head, chunk


def scores(result: Mapping[str, Any]) -> dict[str, dict[Cell, np.ndarray]]:
    """{dataset: {cell: success in per cent, one per seed [S]}} of what is finished and did not diverge."""
    success: dict[str, dict[Cell, np.ndarray]] = {row["dataset"]: {} for row in result["rows"]}
    for row in studies.undiverged(result)["rows"]:
        cell = row["agent"], row["head"], int(row["chunk"])
        success[row["dataset"]][cell] = 100 * np.asarray(row["success"])
    return success


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What others report or expect, on these tasks and at this budget."""
    several = lengths(result["settings"]["chunks"])
    short, long = min(several), max(several)
    deas = PUBLISHED["deas"]
    source = "DEAS's ablation on puzzle-4x4, second-hand"
    of_deas = source if long == DEAS_CHUNK else f"{source}, in chunks of {DEAS_CHUNK}"
    by_length = deas["by_length"]
    if short in by_length and long in by_length:
        longer = f"{by_length[long]} against {by_length[short]}, {source}"
    else:
        longer = f"of other lengths: {by_length}, {source}"
    for dataset, ours in scores(result).items():
        pairs = {
            f"DEAS with HL-Gauss succeeds more often than with scalar heads, in chunks of {long}": (
                ("deas", "hl_gauss", long),
                ("deas", "scalar", long),
                f"{deas['deas']} against {deas['iql_scalar']}, {of_deas}",
            ),
            f"... than FQL with HL-Gauss, whose value is of the policy's actions, in chunks of {long}": (
                ("deas", "hl_gauss", long),
                ("fql", "hl_gauss", long),
                f"{deas['deas']} against {deas['hl_gauss_not_detached']}, {of_deas}",
            ),
            f"DEAS with HL-Gauss succeeds more often in chunks of {long} than of {short}": (
                ("deas", "hl_gauss", long),
                ("deas", "hl_gauss", short),
                longer,
            ),
            "FQL succeeds more often than IQL, with scalar heads and single actions": (
                ("fql", "scalar", 1),
                ("iql", "scalar", 1),
                "{1} against {0}, FQL's table, task 1".format(*anchors(dataset)),
            ),
        }
        for text, (first, second, published) in pairs.items():
            if first != second and first in ours and second in ours:
                claim = f"{dataset}: {text} (difference, per cent)"
                yield studies.Claim(claim, published, ours[first] - ours[second], studies.positive)
        of_chunks = {
            "deas": longer,
            "fql": "{1} against {0} in chunks of 5, DEAS's table, five tasks of scene, second-hand".format(
                *PUBLISHED["fql_in_chunks"]["scene-play"]
            ),
        }
        for agent in AGENTS:
            if (gain := chunk_gain(ours, agent, short, long)) is not None:
                claim = f"{agent.upper()} succeeds more often in chunks of {long} than of {short}, over heads"
                yield studies.Claim(
                    f"{dataset}: {claim} (difference, per cent)",
                    of_chunks.get(agent, "not known"),
                    gain,
                    studies.positive,
                )
        gains = categorical_gain(ours)
        if gains is not None:
            cost = PUBLISHED["simba"]["cost_of_squared_error"]
            yield studies.Claim(
                f"{dataset}: categorical heads succeed more often than scalar ones, over agents and chunks (per cent)",
                f"a categorical loss is worth {cost:.0%} on average, SimbaV2's files, online",
                gains,
                studies.positive,
            )


def anchors(dataset: str) -> tuple[int, int]:
    """What the FQL paper has for IQL and FQL on the task."""
    name, _, task = dataset.removesuffix("-v0").rpartition("-task")
    row = PUBLISHED["success"][name]
    return row["iql"][int(task) - 1], row["fql"][int(task) - 1]


def chunk_gain(ours: Mapping[Cell, np.ndarray], agent: str, short: int, long: int) -> np.ndarray | None:
    """Mean over all heads of what an agent gains by longer chunks [S]; None if any head is missing."""
    if short == long or any((agent, head, chunk) not in ours for head in HEADS for chunk in (short, long)):
        return None
    return np.mean([ours[agent, head, long] - ours[agent, head, short] for head in HEADS], 0)


def categorical_gain(ours: Mapping[Cell, np.ndarray]) -> np.ndarray | None:
    """Mean over agents and chunks of the categorical heads' mean less the scalar head's [S]; None if any is missing."""
    rows = {(agent, chunk) for agent, _, chunk in ours}
    needed = ("scalar", *CATEGORICAL)
    if any((agent, head, chunk) not in ours for agent, chunk in rows for head in needed):
        return None
    return np.mean(
        [
            np.mean([ours[agent, head, chunk] for head in CATEGORICAL], 0) - ours[agent, "scalar", chunk]
            for agent, chunk in rows
        ],
        0,
    )


# ---- report ---------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield "# Heads, chunks and agents"
    yield f"{studies.origin(result)} {studies.program(result, __file__)} says what is run."
    size = f"{settings['transitions']:,} steps" if settings["transitions"] else "as many steps as published"
    yield (
        f"Protocol `{PROTOCOL}`. {settings['updates']:,} updates with batches of {settings['batch_size']}, layers of "
        f"{[*map(int, settings['hidden'])]}, {settings['seeds']} seeds, {settings['atoms']} atoms, data of "
        f"{size} (published: 1,000,000, 256, [512, 512, 512, 512] and for IQL [256, 256, 256, 256], 8, scalar heads, "
        "1,000,000 steps). Success at any step, a share, "
        f"mean over {settings['eval_episodes']} episodes and the last {EVALUATIONS} evaluations, with "
        "Wilson's 95 % interval over seeds."
    )
    yield from studies.other_data(result)
    for dataset in scores(result):
        yield f"## {dataset}"
        yield success_table(result, dataset)
        yield from most_clipped(result, dataset)
        iql, fql = anchors(dataset)
        yield f"Published, single actions and scalar heads: IQL {iql / 100}, FQL {fql / 100} (FQL's table)."
    yield from studies.about_diverged(result)
    yield "Against updates: one figure for each dataset, with a panel for each agent and length of chunks."


def success_table(result: Mapping[str, Any], dataset: str) -> str:
    """Agents and heads by lengths of chunks."""
    settings, ours = result["settings"], scores(result)[dataset]
    diverged = {
        (row["agent"], row["head"], int(row["chunk"]))
        for row in result["rows"]
        if row["dataset"] == dataset and row["diverged"]
    }
    several = lengths(settings["chunks"])

    def text(cell: Cell) -> str:
        if cell not in ours:
            return "diverged" if cell in diverged else "-"
        return studies.between(ours[cell] / 100, rate=True)

    rows = [
        (f"`{agent}`", head, *(text((agent, head, n)) for n in several))
        for agent in settings["agents"].split(",")
        for head in settings["heads"].split(",")
    ]
    return studies.table(("agent", "head", *(f"chunks of {n}" for n in several)), rows)


def most_clipped(result: Mapping[str, Any], dataset: str) -> Iterator[str]:
    """The run that cut most of its targets to the support, if any did."""
    rows = [row for row in result["rows"] if row["dataset"] == dataset and row.get("clipped", 0) > 0]
    if rows:
        row = max(rows, key=lambda row: row["clipped"])
        cell = f"`{row['agent']}`, {row['head']}, chunks of {row['chunk']}"
        yield f"Targets outside the support at the end of training: at most {row['clipped']:.1%} ({cell})."


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Success against updates of every finished dataset: a row for each agent, a column for each length of chunks."""
    settings = result["settings"]
    curves = {
        (row["dataset"], row["agent"], row["head"], int(row["chunk"])): row["curve"] for row in result["rows"]
    }
    agents, heads = settings["agents"].split(","), settings["heads"].split(",")
    for dataset in settings["datasets"].split(","):
        cells = {
            f"{agent}, chunks of {chunk}": {head: (dataset, agent, head, chunk) for head in heads}
            for agent in agents
            for chunk in lengths(settings["chunks"])
        }
        if all(cell in curves for row in cells.values() for cell in row.values()):
            panels = {
                name: {head: (curves[cell]["steps"], curves[cell]["success"]) for head, cell in row.items()}
                for name, row in cells.items()
            }
            plot.learning_curves(
                folder / f"{dataset.partition('-')[0]}.png",
                panels,
                title=dataset,
                ylabel="success rate",
                rate=True,
                columns=len(lengths(settings["chunks"])),
            )


if __name__ == "__main__":
    studies.main(Settings(), run)
