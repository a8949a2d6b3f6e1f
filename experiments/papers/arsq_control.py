"""ARSQ and CQN on robots (Liu et al., ICML 2025): how much of ARSQ's lead is a fault of the baseline, and what else is.

    python -m experiments.papers.arsq_control
    python -m experiments.papers.arsq_control --parts=offline

The code of the paper's baseline, CQN, bootstraps beyond terminations, while ARSQ respects them. Here CQN is trained
both ways, everything else being equal: ``cqn`` respects terminations, ``cqn_ignoring`` is the published baseline.

  offline      agents on logged data alone (the paper's table 1)
  online       agents in the environment from the start, half of each batch logged (its figure 4; no pre-training),
               the other half the run's own steps; the authors' replay begins with the log, which that half draws, too
  ablations    ARSQ on one tier of Hopper: order of tokens, what they see, coarse-to-fine, trunks
  temperature  the same, at five temperatures
  door         28 joints: AdroitHandDoor with 25 human demonstrations, offline and online; --door=FILE has them

The tiers are regenerated (`rl.data.recipes.locomotion`): other policies, on gymnasium's -v5. Published numbers beside
ours are therefore those of other data, networks and budgets. Agents have their published settings for each tier
(experiments/presets.yaml) but for the widths of layers, the batch and the number of updates, which are the same for
all, and what `shorter` says: with a fortieth of the published updates the values of ARSQ and CQN would not get to where
they belong. HalfCheetah never terminates, so both CQNs are one program there, and are trained once.

Hours of one core (Intel Xeon) at the default sizes, all seeds in one program: offline 2, online 2, ablations 0.3,
temperature 0.2, door 0.6, making the data 0.1. A command that is killed loses what it trained since its last
evaluation, and the same command goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr

from experiments import checks, common, offline, online, presets, studies, study_runs
from rl import data, evaluate, plot, statistics
from rl.data import d4rl, recipes
from rl.settings import require_at_least_one

PUBLISHED = studies.published("arsq_control")
PARTS = ("offline", "online", "ablations", "temperature", "door")
TIERS = tuple(f"{tier}-regen-v5" for tier in PUBLISHED["offline"]["arsq"])
TERMINATING = ("hopper", "walker2d")  # HalfCheetah's episodes end by their time limit alone
ALL, ENDING, ENDLESS = "all tiers", "those that terminate", "those that never do"
SETTINGS = ("offline", "online")
OURS = "ours: not in the paper"
RATIO = "1.62 = 76.1 / 47.1, figure 4 (Liu et al., ICML 2025)"

# {name here: the agent, and what it is given beside its published settings}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "arsq": ("arsq", {}),
    "cqn": ("cqn", {}),
    "cqn_ignoring": ("cqn", {"agent.ignore_terminals": True}),
    "bc": ("bc", {}),
    "iql": ("iql", {}),
    "td3_bc": ("td3_bc", {}),
}
OFFLINE_ONLY = ("bc",)  # has no use for steps of its own

# What ARSQ and CQN are given for a short training, in place of published settings (results/README.md has the trials).
# Values that follow targets at a rate of 0.005 are half of what they should be after 10,000 updates; 0.02 is the
# published rate of both on RLBench. Learning rates are about three times the published ones.
SHORTER: dict[str, dict[str, Any]] = {
    "arsq": {"agent.learning_rate": 1e-3, "agent.target_rate": 0.02},
    "cqn": {"agent.learning_rate": 3e-4, "agent.target_rate": 0.02},
}
# On ARSQ's published weights of cloning. While V is off by some units, as it is early on, the squared error moves
# advantages by as much, and the policy with them, unless cloning holds it. CQN's dominance term has its published
# weight, not the square of it that the code makes.
BC_FACTOR = 20.0
# The code has the margin here, the paper names cql for all of medium and medium-expert. With 20 times the published
# weight the margin leaves a return of 0.5; cql has the weight of halfcheetah-medium.
CLONING: dict[str, dict[str, Any]] = {
    "halfcheetah-medium-expert": {"agent.bc": "cql", "agent.bc_weight": 1.0}
}
# One for all tiers: CQN is three times as slow on the published grid of HalfCheetah and Walker2d, 1 x 41.
GRID = {"agent.levels": 2, "agent.bins": 7}
# Of CQN's values. The published [0, 4000] begins at its middle, from which 10,000 updates do not bring values down.
SUPPORTS = {"hopper": (0.0, 500.0), "walker2d": (0.0, 500.0), "halfcheetah": (-100.0, 1000.0)}

# {name: what is changed of ARSQ}
FULL = "full"
ABLATIONS: dict[str, dict[str, Any]] = {
    FULL: {},
    "dimension by dimension": {"agent.order": "dimension"},
    "coarser levels unseen": {"agent.see_levels": False},
    "other dimensions unseen": {"agent.see_dimensions": False},
    "neither seen": {"agent.see_levels": False, "agent.see_dimensions": False},
    "one level of 49 bins": {"agent.levels": 1, "agent.bins": 49},
    "a trunk for each level": {"agent.trunk": "level"},
    "a trunk for each token": {"agent.trunk": "token"},
}
# {temperature: its name}; the full agent's is the published one of all tiers.
TEMPERATURES = {1.0: "alpha 1", 0.1: "alpha 0.1", 0.01: FULL, 1e-3: "alpha 0.001", 1e-4: "alpha 0.0001"}
CHANGES = ABLATIONS | {
    name: {"agent.temperature": value} for value, name in TEMPERATURES.items() if name != FULL
}

# Nothing is published for these but IQL's settings.
DOOR, DOOR_ENVIRONMENT = "door-human", "AdroitHandDoor-v1"
DOOR_AGENTS: dict[str, dict[str, Any]] = {"arsq": {"agent.bc_weight": 1.0}, "bc": {}, "iql": {}}
DOOR_DATA = {"environment": DOOR_ENVIRONMENT, "clip_actions": True, "normalize_observations": True}

# CPU time of one update of three seeds, layers of 128 and batches of 256, on an Intel Xeon.
_SIX_JOINTS = {"arsq": 29, "cqn": 140, "cqn_ignoring": 140, "bc": 2, "iql": 11, "td3_bc": 7}
MILLISECONDS: dict[str, dict[str, float]] = {
    "hopper": {"arsq": 16, "cqn": 64, "cqn_ignoring": 64, "bc": 2, "iql": 9, "td3_bc": 6},
    "halfcheetah": _SIX_JOINTS,
    "walker2d": _SIX_JOINTS,
    "door": {"arsq": 373, "bc": 2, "iql": 11},
}
ONLINE = (
    2.0  # how much longer an update takes with a step in the environment, its action and seeds in a batch
)
START = 100.0  # seconds: compilation and evaluations


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about this study."""

    parts: str = ",".join(PARTS)  # what to run, comma-separated
    tiers: str = (  # regenerated tiers of offline and online, comma-separated
        "hopper-medium-regen-v5,hopper-medium-replay-regen-v5,hopper-medium-expert-regen-v5,"
        "halfcheetah-medium-regen-v5,halfcheetah-medium-replay-regen-v5,halfcheetah-medium-expert-regen-v5"
    )
    agents: str = ",".join(AGENTS)  # of offline and online, comma-separated
    ablation_tier: str = "hopper-medium-expert-regen-v5"  # of ablations and temperature
    door: str = "door_human.hdf5"  # file of the demonstrations, in D4RL's layout
    transitions: int = 200_000  # steps of each tier; 0: as D4RL's protocol has it, up to 2,000,000
    seeds: int = 3  # of each run, trained at once
    updates: int = 12_000  # of each seed offline
    steps: int = 6_000  # environment steps of each seed online, with one update each
    evaluations: int = 6  # of each run
    eval_episodes: int = 10  # per seed and evaluation
    batch_size: int = 128  # transitions per update
    hidden: tuple[int, ...] = (128, 128)  # widths of every network's layers
    seed: int = 0  # of data and agents
    workdir: str = "runs/arsq_control"  # data and runs
    out: str = "results/papers/arsq_control"


class Run(NamedTuple):
    """One agent on one task, with all its seeds."""

    setting: str  # offline or online
    task: str  # a tier, or DOOR
    agent: str  # of AGENTS
    change: str = FULL  # of CHANGES

    @property
    def program(self) -> Run:
        """The run that is trained for it: where nothing terminates, ignoring terminations changes nothing."""
        same = self.agent == "cqn_ignoring" and not terminates(self.task)
        return self._replace(agent="cqn") if same else self

    @property
    def name(self) -> str:
        """In words."""
        return ", ".join(self if self.change != FULL else self[:3])


class Source(NamedTuple):
    """Logged data and where they are from."""

    path: str
    environment: str
    reference: tuple[float, float]  # mean (random, expert) return
    digest: str
    score: float  # mean normalised return of whole episodes; NaN where none is recorded


def run(settings: Settings) -> dict[str, Any]:
    """Makes what is missing of data and runs; writes and returns what came out.

    Raises:
      ValueError: an unknown part, tier or agent, or settings that a run refuses.
    """
    check(settings)

    def parts(sources: Mapping[str, Source], earlier: studies.Stored) -> dict[str, Any]:
        scores = {task: score for result in earlier.results for task, score in result["data_scores"].items()}
        digests = {task: of.digest for task, of in sources.items()}
        return {
            "data_scores": scores | {task: of.score for task, of in sources.items()},
            "data_digests": studies.data_digests(digests, earlier),
            "skipped": skipped(settings),
        }

    return studies.train_cells(
        settings,
        Run._fields,
        {run: run.program.name for run in planned(settings)},
        functools.partial(source, settings),
        lambda run, source: variant(settings, run.program, source),
        report,
        claims,
        draw,
        data="task",
        parts=parts,
    )


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on what `run` would find out only after an hour."""
    studies.names("parts", settings.parts, PARTS)
    studies.names("tiers", settings.tiers, TIERS)
    studies.names("agents", settings.agents, AGENTS)
    studies.names(
        "ablation_tier", settings.ablation_tier, [tier for tier in TIERS if tier.startswith("hopper")]
    )
    studies.check_seeds(settings.seeds)
    require_at_least_one(settings, "updates", "steps", "evaluations", prefix="--")
    checks.several_episodes(settings)
    for name in ("updates", "steps"):
        checks.multiple(settings, name, "evaluations")
    if settings.batch_size < 2 or settings.batch_size % 2:
        raise ValueError(
            f"--batch_size={settings.batch_size} must be even: online, half of each batch is logged"
        )


def planned(settings: Settings) -> list[Run]:
    """The runs of all parts asked for, each once."""
    parts, runs = settings.parts.split(","), []
    for setting in (setting for setting in SETTINGS if setting in parts):
        runs += [
            Run(setting, tier, agent)
            for tier in settings.tiers.split(",")
            for agent in settings.agents.split(",")
            if setting == "offline" or agent not in OFFLINE_ONLY
        ]
    for part, changes in (("ablations", ABLATIONS), ("temperature", TEMPERATURES.values())):
        if part in parts:
            runs += [Run("offline", settings.ablation_tier, "arsq", change) for change in changes]
    if "door" in parts and not skipped(settings):
        runs += [
            Run(setting, DOOR, agent)
            for setting in SETTINGS
            for agent in DOOR_AGENTS
            if setting == "offline" or agent not in OFFLINE_ONLY
        ]
    return list(dict.fromkeys(runs))


def skipped(settings: Settings) -> list[str]:
    """Sentences on what was asked for and cannot be run."""
    if "door" in settings.parts.split(",") and not Path(settings.door).expanduser().is_file():
        return [
            f"{DOOR_ENVIRONMENT} was not run: there is no file {settings.door} with D4RL's 25 human demonstrations "
            "(`--door=FILE`)."
        ]
    return []


def robot(task: str) -> str:
    """hopper of hopper-medium-regen-v5, and door of door-human."""
    return task.partition("-")[0]


def terminates(task: str) -> bool:
    """Whether episodes of a task can end other than by their time limit."""
    return task.startswith(TERMINATING)


# ---- runs -----------------------------------------------------------------------------------------------------


def source(settings: Settings, task: str) -> Source:
    """The data of a task; a tier is made where it does not lie there yet."""
    if task == DOOR:
        loaded = data.load(settings.door, clip_actions=True, environment=DOOR_ENVIRONMENT)
        assert loaded.reference is not None
        return Source(settings.door, DOOR_ENVIRONMENT, loaded.reference, loaded.digest, np.nan)
    path = recipes.collect(
        task,
        out=Path(settings.workdir) / "data",
        transitions=settings.transitions or None,
        seed=settings.seed,
    )
    environment = recipes.LOCOMOTION[task].env
    reference, card = d4rl.locomotion_reference(environment), d4rl.recorded(path)
    return Source(
        str(path), environment, reference, card["sha256"], card.get("normalized_return_d4rl", np.nan)
    )


def variant(settings: Settings, run: Run, source: Source) -> studies.Variant:
    """What is trained for a run, and all that its outcome depends on."""
    logged, config = offline_run(settings, run, source)
    script, chosen, place = offline.run, logged, "dataset"
    if run.setting == "online":
        script, chosen, place = online.run, online_run(settings, logged, source), "offline_data"
    return studies.Variant(
        functools.partial(trained, script, chosen, config, source.reference),
        {**dataclasses.asdict(chosen), place: source.digest, "config": dataclasses.asdict(config)},
        round(seconds(settings, run)),
    )


def offline_run(settings: Settings, run: Run, source: Source) -> tuple[offline.Settings, Any]:
    """A run on logged data alone: published settings of the agent for the task, at this study's sizes."""
    agent, overrides = AGENTS[run.agent]
    chosen, config = presets.resolve(
        "offline",
        offline.Settings(),
        common.config,
        "dataset",
        {
            "agent": agent,
            "preset": presets.PAPER,
            "dataset": run.task,
            **study_runs.sizes(settings),
            **shorter(agent, run.task),
            **overrides,
            **CHANGES[run.change],
            **(DOOR_DATA | DOOR_AGENTS[run.agent] if run.task == DOOR else {}),
        },
    )
    if agent == "arsq":
        config = dataclasses.replace(config, bc_weight=BC_FACTOR * config.bc_weight)
    if agent == "cqn":
        config = dataclasses.replace(config, dominance_weight=config.margin_weight)
    return dataclasses.replace(chosen, dataset=source.path), config


def shorter(agent: str, task: str) -> dict[str, Any]:
    """What ARSQ and CQN are given for a short training on a task, but for what is relative to published weights."""
    if agent == "arsq":
        return SHORTER[agent] | GRID | CLONING.get(short(task), {})
    if agent == "cqn":
        return (
            SHORTER[agent] | GRID | dict(zip(("head_low", "head_high"), SUPPORTS[robot(task)], strict=True))
        )
    return {}


def online_run(settings: Settings, logged: offline.Settings, source: Source) -> online.Settings:
    """The same agent from the start in the environment, half of each batch logged.

    Observations are as they are. At the door, episodes that succeed join the demonstrations.
    """
    every = settings.steps // settings.evaluations
    shared = ("agent", "head", "head_size", "head_low", "head_high", "reward_scale", "seeds", "seed")
    return online.Settings(
        **{name: getattr(logged, name) for name in (*shared, "batch_size", "eval_episodes", "clip_actions")},
        env=source.environment,
        steps=settings.steps,
        learning_starts=max(1, settings.steps // 20),
        replay=settings.steps,
        eval_every=every,
        save_every=every,
        offline_data=source.path,
        offline_ratio=0.5,
        relabel_success="success" if source.environment == DOOR_ENVIRONMENT else "",
    )


def seconds(settings: Settings, run: Run) -> float:
    """What a run takes on one core, about: to weigh runs against each other in the time that is left."""
    updates = settings.updates if run.setting == "offline" else settings.steps
    update = MILLISECONDS[robot(run.task)][run.agent] / 1000 * (ONLINE if run.setting == "online" else 1.0)
    return START + updates * update * settings.seeds / 3 * settings.batch_size / 256


def trained(
    script: Callable[[Any, Any], Any],
    chosen: Any,
    config: Any,
    reference: tuple[float, float],
    work: studies.Work,
) -> dict[str, Any]:
    """One run of a script; goes on from the last evaluation of one that was killed.

    Returns its normalised returns: of the last evaluation, of each seed's best one, and of all [T, S].
    """
    diverged = bool(
        study_runs.divergence(script, dataclasses.replace(chosen, workdir=str(work.folder)), config)
    )
    steps, returns = study_runs.curve(work.folder, "eval/return", chosen, diverged, before=reference[0])
    scores = evaluate.normalize(returns, reference)
    return {
        "last": statistics.summary(scores[-1]),
        "best": statistics.summary(scores.max(0)),
        "curve": {"steps": steps, "score": scores},
        "diverged": diverged,
    }


# ---- claims ---------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> dict[Run, Mapping[str, Any]]:
    """The rows of a result by their runs."""
    return {Run(*(row[field] for field in Run._fields)): row for row in result["rows"]}


def tiers_of(result: Mapping[str, Any]) -> list[str]:
    """The tiers of offline and online, each once."""
    return list(dict.fromkeys(result["settings"]["tiers"].split(",")))


def settings_of(result: Mapping[str, Any]) -> list[str]:
    """Which of offline and online was asked for."""
    parts = result["settings"]["parts"].split(",")
    return [setting for setting in SETTINGS if setting in parts]


def groups(tiers: Sequence[str]) -> dict[str, list[str]]:
    """The tiers by whether their episodes can terminate; and all, if they are of both kinds."""
    ending, endless = ([tier for tier in tiers if terminates(tier) == ends] for ends in (True, False))
    kinds = {ENDING: ending, ENDLESS: endless}
    return ({ALL: list(tiers)} if ending and endless else {}) | {k: v for k, v in kinds.items() if v}


def mean(
    result: Mapping[str, Any], setting: str, tasks: Sequence[str], agent: str, which: str
) -> np.ndarray | None:
    """An agent's last or best score, its mean over tasks, one per seed [S].

    None before all of them are there, and where one diverged.
    """
    rows = table(studies.undiverged(result))
    runs = [Run(setting, task, agent) for task in tasks]
    if not all(run in rows for run in runs):
        return None
    return np.mean([rows[run][which]["each"] for run in runs], 0)


class Lead(NamedTuple):
    """Scores of the three agents of the comparison, one per seed [S]."""

    arsq: np.ndarray
    cqn: np.ndarray
    ignoring: np.ndarray


def lead(result: Mapping[str, Any], setting: str, tiers: Sequence[str], which: str) -> Lead | None:
    """The comparison on these tiers, by the last or the best returns; None before all of it is there."""
    means = [mean(result, setting, tiers, agent, which) for agent in ("arsq", "cqn", "cqn_ignoring")]
    return Lead(*(x for x in means if x is not None)) if all(x is not None for x in means) else None


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper says, and what becomes of it when the baseline respects terminations; by last returns."""
    for setting in settings_of(result):
        for group, members in groups(tiers_of(result)).items():
            comparison = lead(result, setting, members, "last")
            if comparison is not None:
                yield from claims_of_lead(f"{setting}, {group}", comparison, endless=group == ENDLESS)
        for other in ("iql", "td3_bc"):
            totals = PUBLISHED["totals"]
            source = (
                f"offline, nine tiers in all: {totals['arsq']} against {totals[other]}, table 1 (Liu et al.)"
            )
            if setting == "online":  # figure 4 has neither of them
                source = OURS
            yield from more_than(result, setting, tiers_of(result), other, "mean of the tiers", source)
    for setting in SETTINGS:
        for other in ("bc", "iql"):
            yield from more_than(result, setting, [DOOR], other, "door", OURS)
    changed = last_of_changes(result)
    for change in (change for change in changed if change != FULL and FULL in changed):
        full, without = published_change(change)
        yield studies.Claim(
            f"changed: ARSQ returns more than with {change} (difference)",
            f"{full} against {without} on {published_tiers(change)} (Liu et al.)",
            changed[FULL] - changed[change],
            studies.positive,
        )
    for order in orders(result):
        if len(order.published) > 2:
            yield studies.Claim(
                f"changed: ranks of {order.name} correlate with the published ones (Spearman's, of each seed)",
                f"1 with the paper's on {order.tiers} (Liu et al.)",
                [rank_correlation(order.published, scores) for scores in order.each.T],
                studies.positive,
            )


def claims_of_lead(where: str, comparison: Lead, endless: bool) -> Iterator[studies.Claim]:
    """Whether there is a lead, and how much of it is left; where nothing terminates both CQNs are one."""
    arsq, cqn, ignoring = comparison
    text = f"{where}: ARSQ returns more than CQN that ignores terminations (difference)"
    yield studies.Claim(
        text, RATIO if where.startswith("online") else OURS, arsq - ignoring, studies.positive
    )
    if endless:
        return
    text = f"{where}: ARSQ returns more than CQN that respects terminations (difference)"
    yield studies.Claim(text, OURS, arsq - cqn, studies.positive)
    text = f"{where}: CQN returns more if it respects terminations (difference)"
    yield studies.Claim(text, OURS, cqn - ignoring, studies.positive)
    if arsq.mean() > ignoring.mean():
        text = f"{where}: terminations are more than half of ARSQ's lead (CQN beyond the middle of both)"
        yield studies.Claim(text, OURS, cqn - (arsq + ignoring) / 2, studies.positive)


def more_than(
    result: Mapping[str, Any], setting: str, tasks: Sequence[str], other: str, where: str, source: str
) -> Iterator[studies.Claim]:
    """That ARSQ returns more than another agent, if both were run."""
    ours, theirs = (mean(result, setting, tasks, agent, "last") for agent in ("arsq", other))
    if ours is not None and theirs is not None:
        text = f"{setting}, {where}: ARSQ returns more than `{other}` (difference)"
        yield studies.Claim(text, source, ours - theirs, studies.positive)


def ablated(result: Mapping[str, Any]) -> dict[Run, Mapping[str, Any]]:
    """The rows of ablations and temperatures, the full agent among them; none if neither part was asked for."""
    parts, tier = result["settings"]["parts"].split(","), result["settings"]["ablation_tier"]
    requested = "ablations" in parts or "temperature" in parts
    of_tier = {run: row for run, row in table(result).items() if run[:3] == ("offline", tier, "arsq")}
    return of_tier if requested else {}


def last_of_changes(result: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """{change: last scores [S]} of `ablated`, of runs that did not diverge."""
    return {run.change: row["last"]["each"] for run, row in ablated(studies.undiverged(result)).items()}


def published_change(change: str) -> tuple[float, float]:
    """The published score of the full agent and of a changed one, on the same tiers."""
    if change not in ABLATIONS:
        temperatures = {TEMPERATURES[value]: score for value, score in PUBLISHED["temperatures"]}
        return temperatures[FULL], temperatures[change]
    full = PUBLISHED["full_trunk"] if "trunk" in change else PUBLISHED["ablations"][FULL]
    return full, PUBLISHED["ablations"][change]


def published_tiers(change: str) -> str:
    """What `published_change` is of."""
    if "trunk" in change or change not in ABLATIONS:
        return "hopper-medium"
    return "the mean of hopper-medium-expert and hopper-medium-replay"


class Order(NamedTuple):
    """Several changes of ARSQ that the paper has on the same tiers."""

    name: str
    changes: tuple[str, ...]
    tiers: str  # of the paper
    published: tuple[float, ...]  # scores
    each: np.ndarray  # [changes, S] last scores here


def orders(result: Mapping[str, Any]) -> Iterator[Order]:
    """Changes to be ranked among themselves, those groups that were run; the full agent only as a temperature."""
    of_change = last_of_changes(result)
    structure = [change for change in ABLATIONS if change != FULL and "trunk" not in change]
    trunks = [change for change in ABLATIONS if "trunk" in change]
    for name, group in (
        ("structural changes", structure),
        ("trunks", trunks),
        ("temperatures", [*TEMPERATURES.values()]),
    ):
        if set(group) <= set(of_change):
            # The full agent has several published scores: the one beside the others of its group counts.
            scores = [published_change(group[0])[0] if x == FULL else published_change(x)[1] for x in group]
            each = np.array([of_change[change] for change in group])
            yield Order(name, tuple(group), published_tiers(group[0]), tuple(scores), each)


def rank_correlation(theirs: Sequence[float], ours: Sequence[float] | np.ndarray) -> float:
    """Spearman's; 0 where all of ours are the same."""
    return 0.0 if np.ptp(ours) == 0 else float(spearmanr(theirs, ours).statistic)


# ---- report ---------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield "# ARSQ and CQN on robots"
    yield f"{studies.origin(result)} {studies.program(result, __file__)} says what is run."
    yield (
        f"{settings['updates']:,} updates offline, {settings['steps']:,} steps with one update each online, batches of "
        f"{settings['batch_size']}, layers of {[*map(int, settings['hidden'])]}, {settings['seeds']} seeds. Scores are "
        "normalised by D4RL's references: *last* is the mean of the last evaluation over seeds ± half of Student's "
        "95 % interval, *best* the mean over seeds of each one's best evaluation, chosen with hindsight (the paper's "
        "code logs both). Published scores are of D4RL's own files, up to 500,000 updates and layers of 512: of other "
        "data and another effort."
    )
    yield (
        "For so short a training published settings of ARSQ and CQN were changed (in brackets the published ones): a "
        "target rate of 0.02 (0.005), learning rates of 1e-3 (ARSQ, 3e-4) and 3e-4 (CQN, 1e-4), two levels of seven "
        f"bins on every robot, for CQN a support that ends at {SUPPORTS['hopper'][1]:g} on Hopper and at "
        f"{SUPPORTS['halfcheetah'][1]:g} on HalfCheetah (4,000) and one weight for both of its terms of cloning, for "
        f"ARSQ {BC_FACTOR:g} times the weight of cloning, and on halfcheetah-medium-expert the kind of cloning that "
        "the paper names (cql; its code has the margin). These were chosen on Hopper's and that offline tier, with the "
        "seeds that are reported; `results/README.md` has the trials."
    )
    yield from result["skipped"]
    yield from studies.other_data(result)
    yield from studies.about_diverged(result)
    yield from fault(result)
    for setting in settings_of(result):
        yield f"## {setting.capitalize()}: last (best)"
        yield tiers_table(result, setting)
        if setting == "online":
            yield (
                "Online every agent starts from nothing, half of each batch logged; none is trained before, and "
                "observations are as they are (offline, `bc` and `td3_bc` see them standardised)."
            )
    if ablated(result):
        yield f"## ARSQ, changed: {settings['ablation_tier']}, offline"
        yield changes_table(result)
        yield (
            "Published: mean of hopper-medium-expert and hopper-medium-replay; trunks and temperatures hopper-medium "
            f"({PUBLISHED['full_trunk']} for the full agent)."
        )
        if rows := [ranks(order) for order in orders(result)]:
            yield "### Is the order the paper's?"
            yield studies.table(
                (
                    "order of",
                    "published on",
                    "how many",
                    "rank correlation",
                    "of each seed",
                    "by chance",
                    "best there",
                    "best here",
                ),
                rows,
            )
            yield (
                "All differences above are with the same full agent. If its mean is high by chance, all of them are "
                "negative: their signs are not independent. Ranks among the changed agents do not depend on it. *Rank "
                "correlation* (Spearman's) is of the means over seeds, 1 for the paper's own order; *of each seed*: "
                "the mean of one for each seed, with its interval; *by chance*: the share of all possible orders that "
                "are as near to the paper's, or nearer. Among the temperatures the full agent counts, with 0.01."
            )
    at_door = {run: row for run, row in table(result).items() if run.task == DOOR}
    if at_door:
        yield "## 28 joints: AdroitHandDoor, 25 human demonstrations"
        rows = [(run.setting, f"`{run.agent}`", *last_best(row)) for run, row in at_door.items()]
        yield studies.table(("setting", "agent", "last", "best"), rows)
        yield (
            "Online, agents start from nothing, half of each batch are demonstrations, and episodes that succeed join "
            "them. Offline, observations are standardised; online they are not."
        )


def fault(result: Mapping[str, Any]) -> Iterator[str]:
    """How much of ARSQ's lead is the termination fault: a table, and what its columns are."""
    by_group, rows = groups(tiers_of(result)), []
    for setting, which, group in itertools.product(SETTINGS, ("last", "best"), by_group):
        comparison = lead(result, setting, by_group[group], which)
        if comparison is None:
            continue
        arsq, cqn, ignoring = comparison
        share = "-" if group == ENDLESS else ratio(cqn - ignoring, arsq - ignoring)
        means = (f"{x.mean():.1f}" for x in comparison)
        rows.append((setting, which, group, *means, ratio(arsq, ignoring), ratio(arsq, cqn), share))
    if not rows:
        return
    for group, members in by_group.items():
        arsq, ignoring = (
            np.mean([PUBLISHED["online"][agent][short(tier)] for tier in members])
            for agent in ("arsq", "cqn_ignoring")
        )
        scores = f"{arsq:.1f}", "-", f"{ignoring:.1f}", f"{arsq / ignoring:.2f}"
        rows.append(("online", "published", group, *scores, "-", "-"))
    yield "## How much of ARSQ's 1.62 over CQN is the termination fault?"
    agents = "ARSQ", "CQN", "CQN ignoring"
    ratios = "ARSQ / CQN ignoring", "ARSQ / CQN", "share"
    for setting, which, group, *_, with_fault, without, share in rows:
        if which == "last" and group == next(iter(by_group)):
            yield (
                f"**{setting.capitalize()}, {group}, last returns:** ARSQ has {with_fault} times the score of CQN that "
                f"ignores terminations and {without} times that of CQN that respects them; the share of its lead that "
                f"the fault explains: {share}."
            )
    yield studies.table(("setting", "returns", "tiers", *agents, *ratios), rows)
    yield (
        "*CQN ignoring* bootstraps beyond terminations, as the paper's baseline does; *CQN* differs from it in nothing "
        "else, and where nothing terminates they are one program. Ratios are of means over the tiers, with Fieller's "
        "95 % interval over seeds. *Share* is (CQN - CQN ignoring) / (ARSQ - CQN ignoring), the part of ARSQ's lead "
        "that is gone once the baseline respects terminations. An interval is open where the seeds do not tell the "
        "denominator from 0. The paper's 1.62 is of nine tiers; *published* is of those here."
    )


def ratio(x: np.ndarray, y: np.ndarray) -> str:
    """The ratio of two means and its interval over seeds."""
    if not y.mean() > 0:
        return "-"
    low, high = statistics.ratio_interval(x, y)
    bounds = "open" if np.isnan(low) else f"[{low:z.2f}, {high:z.2f}]"
    return f"{x.mean() / y.mean():z.2f} {bounds}"


def tiers_table(result: Mapping[str, Any], setting: str) -> str:
    """Agents by tiers, and below them the published ones."""
    tiers, by_run = tiers_of(result), table(result)
    logged = [result["data_scores"][tier] for tier in tiers]
    rows = [("the data", *("-" if np.isnan(x) else f"{x:.1f}" for x in (*logged, np.mean(logged))))]
    for agent in result["settings"]["agents"].split(","):
        row = [by_run.get(Run(setting, tier, agent)) for tier in tiers]
        over_tiers = {which: mean(result, setting, tiers, agent, which) for which in ("last", "best")}
        cells = [*row, over_tiers if over_tiers["last"] is not None else None]
        if any(row):
            rows.append(
                (f"`{agent}`", *("{} ({})".format(*last_best(cell)) if cell else "-" for cell in cells))
            )
    for agent, scores in PUBLISHED[setting].items():
        published = [scores[short(tier)] for tier in tiers]
        rows.append((f"{agent}, published", *map(str, published), f"{np.mean(published):.1f}"))
    return studies.table(("agent", *map(short, tiers), "mean"), rows)


def changes_table(result: Mapping[str, Any]) -> str:
    """Ablations and temperatures of ARSQ beside the full agent."""
    scores, rows = last_of_changes(result), []
    for change, row in ((run.change, row) for run, row in ablated(result).items()):
        gain = "-"
        if change != FULL and {change, FULL} <= scores.keys():
            gain = studies.difference(statistics.summary(scores[change] - scores[FULL]), ".1f")
        rows.append((change, *last_best(row), gain, published_change(change)[1]))
    return studies.table(("ARSQ", "last", "best", "last, difference with full", "published"), rows)


def ranks(order: Order) -> tuple[str, ...]:
    """A row on how near an order is to the published one."""
    means = order.each.mean(1)
    correlation = rank_correlation(order.published, means)
    best = (label(order.changes[np.argmax(scores)]) for scores in (order.published, means))
    of_seeds, by_chance = "-", "-"
    if len(means) > 2:
        of_seeds = studies.between([rank_correlation(order.published, scores) for scores in order.each.T])
        shuffled = [rank_correlation(order.published, x) for x in itertools.permutations(means)]
        by_chance = f"{np.mean(np.array(shuffled) >= correlation - 1e-9):.1%}"
    return order.name, order.tiers, str(len(means)), f"{correlation:.2f}", of_seeds, by_chance, *best


def label(change: str) -> str:
    """A change in a table; the full agent stands among temperatures there."""
    return "alpha 0.01" if change == FULL else change


def last_best(row: Mapping[str, Any]) -> tuple[str, str]:
    """Last score with half of its interval, and best score, of a row of the result or of scores [S]."""
    if row.get("diverged"):
        return "diverged", "-"
    return studies.plus_minus(row["last"], ".1f"), f"{studies.band(row['best'])[0]:.1f}"


def short(tier: str) -> str:
    """The published name of a tier."""
    return tier.removesuffix("-regen-v5")


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Learning curves of each setting, a panel for each tier; ARSQ's changes; temperatures beside the published."""
    rows, tasks = table(result), result["settings"]["tiers"].split(",")
    for setting, unit in (("offline", "updates"), ("online", "environment steps")):
        agents = [
            agent
            for agent in result["settings"]["agents"].split(",")
            if all(Run(setting, task, agent) in rows for task in tasks)
        ]
        if agents:
            panels = {
                short(task): {
                    agent: tuple(rows[Run(setting, task, agent)]["curve"][x] for x in ("steps", "score"))
                    for agent in agents
                }
                for task in tasks
            }
            plot.learning_curves(
                folder / f"{setting}.png", panels, title=setting, xlabel=unit, ylabel="normalised return"
            )
    scores = {change: studies.band(each) for change, each in last_of_changes(result).items()}
    if bars := {change: score for change, score in scores.items() if change in ABLATIONS}:
        title = f"ARSQ, {result['settings']['ablation_tier']}"
        plot.bars(
            folder / "ablations.png", bars, "last normalised return, 95 % interval over seeds", title=title
        )
    present = {value: scores[name] for value, name in TEMPERATURES.items() if name in scores}
    if len(present) > 1:
        ours = np.log10(list(present)), *np.transpose(list(present.values()))
        values, theirs = np.transpose(PUBLISHED["temperatures"])
        nothing = np.full(len(theirs), np.nan)
        plot.lines_in_panels(
            folder / "temperature.png",
            {
                result["settings"]["ablation_tier"]: {"here: mean, 95 % interval": ours},
                "hopper-medium": {"published": (np.log10(values), theirs, nothing, nothing)},
            },
            "log10 of the temperature",
            "last normalised return",
            title="ARSQ's temperature on two tasks: orders compare, heights do not",
            note="",
            shared=False,
        )


if __name__ == "__main__":
    studies.main(Settings(), run)
