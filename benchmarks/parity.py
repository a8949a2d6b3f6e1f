"""Do our agents learn what d3rlpy's learn? Both on the same data, with the same networks, settings and batches.

    python -m benchmarks.parity --agents=iql,td3_bc --tiers=hopper-medium-regen-v5 --seeds=5 --updates=50000

Each seed of both libraries starts from the same weights, ours, and sees the same batches in the same order, so that
until rounding and the noise of targets and policies have grown, their losses are the same numbers: differences are
taken seed by seed. Rewards, observations and hyper-parameters are the published ones for the tier (``--set`` changes
them), transformed by this library; policies of both are played by the same code in the same episodes. Rows whose
next action nobody knows, the last of episodes that a time limit cut, are left out: d3rlpy does not use them.
LayerNorm stands after the activation, as there.

Losses are means over the updates of a window, which ends with an evaluation. Values and deviations are measured on
--probe rows of the data, a few times in each window: the critics' mean value of the data's actions and of the
policy's, IQL's value of states, and the mean squared distance of the policy's action from the data's.

What d3rlpy's agents do otherwise by design, and what is done about it here (``--unadapted``: nothing), stands in
`benchmarks.d3rlpy_peer`.

Every run of one seed is stored when it is finished; the same command goes on with the rest, and the report is written
after each. Started several times, its processes share the runs. Those that other commands have stored, also with
other numbers of seeds, come in by ``--stored``. On one core 50,000 updates of published size take ours and theirs in
minutes: IQL 7 and 16, TD3+BC 6 and 13, ReBRAC 59 and 59, CQL 250 and 210. Examples:

  A first look, in minutes:   python -m benchmarks.parity --agents=iql --seeds=2 --updates=4000 --eval_every=2000
  Do initial weights matter?  Each library with its own, PyTorch's there; IQL's published ones are orthogonal:
    python -m benchmarks.parity --agents=iql --tiers=walker2d-medium-regen-v5 --seeds=20 --updates=40000 --own_weights
  The same with PyTorch's here, too, and observations standardised, as CORL's IQL has it:
    python -m benchmarks.parity ... --own_weights --set=agent.network.initialiser=pytorch,normalize_observations=true
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from benchmarks import peers
from experiments import checks, common, offline, presets, studies
from rl import acting, agents, keys, statistics, train
from rl.data import recipes
from rl.files import expanded
from rl.replay import dataset as replay
from rl.replay import transform
from rl.settings import require_at_least_one
from rl.types import Key, Learner, State, Transition

LOSSES = {  # {agent: those of our metrics that d3rlpy logs, too}
    "iql": ("critic_loss", "value_loss", "policy_loss"),
    "td3_bc": ("critic_loss", "policy_loss", "cloning"),
    "cql": ("critic_loss", "conservative_gap", "policy_loss", "alpha"),
    "rebrac": ("critic_loss", "policy_loss", "cloning"),
}
OURS, THEIRS = "headway", "d3rlpy"
SCORE = "normalized_return"
PARTS = 10  # of a window, after each of which values and deviations are measured
DRAWN = 50  # batches drawn at once for d3rlpy
PART = PARTS * DRAWN  # updates, of which a window is a multiple


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about the comparison."""

    agents: str = "iql,td3_bc,cql,rebrac"  # which, comma-separated
    tiers: str = "hopper-medium-regen-v5,walker2d-medium-regen-v5"  # datasets of locomotion, comma-separated
    seeds: int = 5  # runs of each library
    updates: int = 50_000  # of each run
    eval_every: int = 5000  # updates of a window, which ends with an evaluation
    eval_episodes: int = 10  # of each evaluation
    probe: int = 5000  # rows of the data on which values and deviations are measured
    hidden: tuple[int, ...] = ()  # widths of all layers; none: the published ones
    set: str = (
        ""  # flags of experiments.offline over the published ones, comma-separated: agent.expectile=0.8
    )
    own_weights: bool = False  # d3rlpy keeps the weights that it starts with, instead of ours
    unadapted: bool = False  # d3rlpy keeps what it does otherwise by design, too
    data_folder: str = ""  # where the tiers lie, if not in their usual folder
    out: str = "results/benchmarks/parity"


class Run(NamedTuple):
    """What tells a run from others."""

    agent: str
    tier: str
    seed: int
    library: str


class Subject(NamedTuple):
    """An agent on a tier."""

    settings: offline.Settings
    config: Any
    problem: common.Problem
    rows: replay.Dataset  # that are drawn from, on the device
    probe: Transition  # [P]
    learner: Learner
    population: train.Population  # of one seed, whose epoch is a part of a window
    epoch: Any  # compiled
    draw: Any  # (rows, key [], number of the first update) -> `DRAWN` batches
    measure: Any  # (state of one seed, probe) -> metrics


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing, and writes result.json and the report; returns what result.json holds.

    Raises:
      ValueError: a flag that cannot be used, or d3rlpy is not installed.
    """
    names, tiers = check(settings)
    runs = [
        Run(agent, tier, seed, library)
        for tier in tiers
        for agent in names
        for seed in range(settings.seeds)
        for library in STEPS
    ]
    earlier = studies.stored(settings, Run._fields, words=["set"], choosing=["seeds"])
    names_of = {run: f"{run.tier}, {run.agent}, {run.library}, seed {run.seed}" for run in runs}
    data = {tier: data_digest(settings, tier) for tier in tiers}
    variants = {
        names_of[run]: variant(settings, run, data[run.tier]) for run in runs if run not in earlier.rows
    }
    versions = {", ".join(f"{name} {version}" for name, version in peers.versions().items())}
    return studies.train_rows(
        settings,
        variants,
        [(run._asdict(), names_of[run]) for run in runs],
        report,
        lambda result: (),
        earlier,
        "updates",
        d3rlpy=sorted(versions.union(*(result["d3rlpy"] for result in earlier.results))),
    )


def variant(settings: Settings, run: Run, data: str | None) -> studies.Variant:
    """A run on the tier whose file has the digest ``data``."""
    steps = STEPS[run.library]
    chosen, config = (dataclasses.asdict(x) for x in resolved(settings, run.agent, run.tier))
    del chosen["data_folder"]
    return studies.Variant(
        functools.partial(train_one, settings, run.agent, run.tier, steps, run.seed, data),
        {
            **studies.chosen(settings, "agents", "tiers", "seeds", "data_folder"),
            "data": data,
            "chosen": chosen,
            "config": config,
            **(peers.versions() if run.library == THEIRS else {}),
        },
        settings.updates,
    )


def check(settings: Settings) -> tuple[list[str], list[str]]:
    """The agents and the tiers. Raises ValueError, naming the flag, on what cannot be compared."""
    if message := peers.missing():
        raise ValueError(f"nothing to compare with: {message}")
    names = studies.names("agents", settings.agents, LOSSES)
    tiers = studies.names("tiers", settings.tiers, recipes.LOCOMOTION)
    studies.check_seeds(settings.seeds)
    require_at_least_one(settings, "probe", prefix="--")
    checks.several_episodes(settings)
    checks.multiple(settings, "updates", "eval_every")
    if settings.eval_every % PART:
        raise ValueError(
            f"--eval_every={settings.eval_every} must be a multiple of {PART}: a window has {PARTS} "
            f"parts, and batches are drawn {DRAWN} at a time"
        )
    configs = [(agent, resolved(settings, agent, tier)[1]) for tier in tiers for agent in names]
    from benchmarks import d3rlpy_peer as peer

    for agent, config in configs:
        peer.check(agent, config)
    return names, tiers


def data_digest(settings: Any, tier: str) -> str | None:
    """The digest of the tier's file, which another number of transitions changes; None if nobody knows."""
    recipe = recipes.LOCOMOTION[tier]
    folder = expanded(settings.data_folder or recipes.default_folder(recipe.family))
    return (recipes.read_card(folder / recipe.file) or {}).get("sha256")


# ---- one run -------------------------------------------------------------------------------------------------------


def train_one(
    settings: Settings, agent: str, tier: str, steps: Any, seed: int, data: str | None, work: studies.Work
) -> dict[str, Any]:
    """One seed of one library, whose ``steps`` are `ours` or `theirs`.

    Returns:
      ``updates`` [W], ``metrics`` {name: [W]} and ``returns`` [W], of all windows, and ``data``.
    """
    of = subject(dataclasses.replace(settings, seeds=2, agents="", tiers="", out=""), agent, tier)
    run_keys = keys.seeds(jax.random.key(seed), 1)
    state = jax.jit(of.population.init)(run_keys, replay.sampler(2)(of.rows, jax.random.key(0), 0))
    parts = steps(settings, of, agent, state, run_keys, seed)
    actor = acting.observing(
        of.population.actor, functools.partial(transform.observations, of.problem.transform)
    )
    curves: dict[str, list[float]] = {}
    returns = []
    length = settings.eval_every // PARTS
    played = dataclasses.replace(of.settings, seed=seed)
    loaded = of.problem.loaded
    with common.evaluator(played, actor, str(loaded.environment), 1, loaded) as episodes:
        for window in range(1, settings.updates // settings.eval_every + 1):
            rows = []
            for _ in range(PARTS):
                state, metrics = next(parts)
                alone = train.member(state, 0)
                rows.append(metrics | jax.device_get(of.measure(alone, of.probe)))
                work.progress(length)
            check_finite(
                rows, f"{steps.__name__} of {agent} on {tier}, seed {seed}", window * settings.eval_every
            )
            for name in rows[0]:
                curves.setdefault(name, []).append(float(np.mean([row[name] for row in rows])))
            returns.append(float(episodes(state, window)[SCORE].mean()))
    ends = [settings.eval_every * (i + 1) for i in range(len(returns))]
    return {"updates": ends, "metrics": curves, "returns": returns, "data": data}


def check_finite(rows: Sequence[Mapping[str, float]], run: str, updates: int) -> None:
    """Raises `rl.train.Diverged` if a number of these parts of a ``run`` is not finite: its means say nothing."""
    if bad := sorted({name for row in rows for name, x in row.items() if not np.isfinite(x)}):
        raise train.Diverged(
            f"{run}: {', '.join(bad)} not finite within {updates} updates. What is finished stays; leave this agent "
            "out with --agents, or change its settings with --set"
        )


def ours(
    settings: Settings, of: Subject, agent: str, state: State, run_keys: Key, seed: int
) -> Iterator[tuple[State, dict[str, float]]]:
    """The state of one seed [1] after each part of a window, and the means of its losses."""
    del settings, seed
    while True:
        state, report = of.epoch(state, of.rows, run_keys)
        train.check_finite(report)
        yield state, {name: float(report.metrics[name][0]) for name in LOSSES[agent]}


def theirs(
    settings: Settings, of: Subject, agent: str, state: State, run_keys: Key, seed: int
) -> Iterator[tuple[State, dict[str, float]]]:
    """The same of d3rlpy's learner, whose weights stand in the state in place of ours."""
    from benchmarks import d3rlpy_peer as peer

    config, length = of.config, of.settings.eval_every // PARTS
    params = jax.device_get(jax.tree.map(lambda x: x[0], state.params))
    algo = peer.learner(
        agent, config, of.problem.loaded.spec, of.settings.batch_size, seed, adapted=not settings.unadapted
    )
    if not settings.own_weights:
        peer.load(algo, params)
    step = 0
    while True:
        losses: dict[str, list[float]] = {}
        for first in range(step, step + length, DRAWN):
            batches = jax.device_get(of.draw(of.rows, run_keys[0], first))
            for i in range(DRAWN):
                one = jax.tree.map(lambda x, i=i: x[i], batches)
                for name, value in peer.update(algo, agent, config, one).items():
                    losses.setdefault(name, []).append(value)
        step += length
        current = jax.tree.map(lambda x: x[None], peer.weights(algo, params))
        yield state._replace(params=current), {name: float(np.mean(x)) for name, x in losses.items()}


STEPS = {OURS: ours, THEIRS: theirs}


def resolved(settings: Settings, agent: str, tier: str) -> tuple[offline.Settings, Any]:
    """The published settings of an offline run, and the agent's."""
    pairs = [item.partition("=") for item in settings.set.split(",") if item]
    overrides: dict[str, Any] = {name.removeprefix("--"): yaml.safe_load(value) for name, _, value in pairs}
    if settings.hidden:
        overrides["agent.hidden"] = list(settings.hidden)
    sizes = {
        name: getattr(settings, name) for name in ("updates", "eval_every", "eval_episodes", "data_folder")
    }
    overrides |= {"agent": agent, "dataset": tier, "eval_processes": 0, **sizes}
    return presets.resolve("offline", offline.PUBLISHED, common.config, "dataset", overrides)


@functools.lru_cache(maxsize=1)  # data and compiled programs, for all seeds of an agent on a tier
def subject(settings: Settings, agent: str, tier: str) -> Subject:
    """The agent on the tier, with everything compiled that its runs share."""
    run_settings, config = resolved(settings, agent, tier)
    problem = offline.problem(run_settings, [config])
    rows = jax.device_put(usable(problem.dataset))
    spread = np.linspace(0, replay.size(rows) - 1, settings.probe).astype(int)
    sample = replay.sampler(run_settings.batch_size)
    make = lambda config: agents.get(agent).make(config, problem.loaded.spec, problem.head)
    population = train.population(make, config, sample, run_settings.eval_every // PARTS, batched=False)

    def draw(rows: replay.Dataset, key: Key, first: int) -> Transition:
        """The batches of `rl.train.scan_updates`."""
        run_key = keys.of(key, "update")
        one = lambda step: sample(rows, jax.random.split(jax.random.fold_in(run_key, step))[0], step)
        return jax.vmap(one)(first + jnp.arange(DRAWN))

    learner = make(config)
    return Subject(
        run_settings,
        config,
        problem,
        rows,
        replay.take(rows, spread),
        learner,
        population,
        jax.jit(population.epoch),
        jax.jit(draw),
        jax.jit(functools.partial(measured, learner, agent)),
    )


def usable(data: replay.Dataset) -> replay.Dataset:
    """The rows that d3rlpy draws: all but the last ones of episodes that were cut."""
    mask = (data.transitions.has_next_action > 0) | (data.transitions.discount == 0)
    return jax.tree.map(lambda x: np.asarray(x)[mask], data)


def measured(learner: Learner, agent: str, state: State, probe: Transition) -> dict[str, Any]:
    """Values and the deviation of the policy on rows of the data [P]."""
    key = jax.random.key(0)  # no policy draws: they act with their modes
    action, critics = learner.act(state, probe.observation, key), acting.critics(learner)
    metrics = {
        "q_data": critics(state, probe.observation, probe.action).mean(),
        "q_policy": critics(state, probe.observation, action).mean(),
        "deviation": jnp.square(action - probe.action).mean(),
    }
    if agent == "iql":  # the others' value needs target networks, which d3rlpy's weights do not have
        assert learner.value is not None
        metrics["v"] = learner.value(state, probe.observation, key).mean()
    return metrics


# ---- the comparison ------------------------------------------------------------------------------------------------


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences seed by seed, theirs less ours, for each agent on each tier.

    Args:
      rows: a `Run` each, with its outcome. A seed counts that both libraries have finished on the same data.
    """
    runs: dict[tuple[str, str], dict[tuple[int, str], dict[str, Any]]] = {}
    for row in rows:
        seeds = runs.setdefault((row["agent"], row["tier"]), {})
        seeds.setdefault((row["seed"], row["data"]), {})[row["library"]] = row
    blocks = []
    for (agent, tier), seeds in runs.items():
        pairs = [pair for pair in seeds.values() if len(pair) == len(STEPS)]
        if len(pairs) < 2:
            continue
        values = lambda of, pairs=pairs: _sides({side: [of(pair[side]) for pair in pairs] for side in STEPS})
        blocks.append(
            {
                "agent": agent,
                "tier": tier,
                "seeds": len(pairs),
                "updates": pairs[0][OURS]["updates"],
                "returns": values(lambda row: row["returns"]),
                "metrics": {
                    name: values(lambda row, name=name: row["metrics"][name])
                    for name in pairs[0][OURS]["metrics"]
                },
            }
        )
    return blocks


def _sides(values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Both libraries' values [S, W] and their difference: in each window, over all of them and over the later half."""
    sides = {library: np.array(side, float) for library, side in values.items()}
    sides["difference"] = sides[THEIRS] - sides[OURS]
    windows = sides["difference"].shape[1]
    mean = lambda first: {name: statistics.summary(side[:, first:].mean(1)) for name, side in sides.items()}
    return {
        **{name: [statistics.summary(side[:, w]) for w in range(windows)] for name, side in sides.items()},
        "whole": mean(0),
        "later": mean(windows // 2),
    }


def _excludes_zero(summary: Mapping[str, Any]) -> bool:
    low, high = summary["ci95"]
    return not low <= 0 <= high


def _disjoint(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    (low, high), (other_low, other_high) = one["ci95"], other["ci95"]
    return bool(low > other_high or high < other_low)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of Markdown on a result."""
    settings, blocks = result["settings"], compared(result["rows"])
    yield "# Ours beside d3rlpy's"
    yield (
        f"{studies.origin(result)} {' and '.join(result['d3rlpy'])}. Each "
        + (
            "library starts from weights of its own"
            if settings["own_weights"]
            else "seed starts from the same weights"
        )
        + (", d3rlpy as it is," if settings["unadapted"] else "")
        + " and sees the same batches. Differences are d3rlpy's value less ours, seed by seed, with Student's 95 % "
        "interval; bold where that leaves out 0, which one in twenty does by chance. Where both start from the "
        "same weights, the first windows differ by little, and the mean over all of them less than the last."
    )
    if not blocks:
        yield "No agent has two seeds of both libraries yet."
        return
    points = [(block["returns"], w) for block in blocks for w in range(len(block["updates"]))]
    apart = sum(_disjoint(of[OURS][w], of[THEIRS][w]) for of, w in points)
    paired = sum(_excludes_zero(of["difference"][w]) for of, w in points)
    yield (
        f"**Returns:** of {len(points)} checkpoints, {apart} have the libraries' intervals apart, and at {paired} the "
        f"interval of the difference leaves out 0; by chance the second would be about {len(points) / 20:.0f}."
    )
    for block in blocks:
        yield f"## {block['agent']}, {block['tier']}, {block['seeds']} seeds"
        yield studies.table(
            (
                "",
                OURS,
                THEIRS,
                "difference",
                "in %",
                "in the last window, in %",
                "windows whose interval leaves out 0",
            ),
            [_metric(name, of) for name, of in block["metrics"].items()],
        )
        returns, updates = block["returns"], block["updates"]
        at = lambda w, returns=returns: {name: returns[name][w] for name in (OURS, THEIRS, "difference")}
        lines = {f"{step:,.0f}": at(w) for w, step in enumerate(updates)}
        lines["mean of all"] = returns["whole"]
        lines[f"mean from {updates[len(updates) // 2]:,.0f} on"] = returns["later"]
        yield "Normalised returns. Single checkpoints vary much; the means of several say more:"
        yield studies.table(
            ("updates", OURS, THEIRS, "difference"),
            [
                (
                    name,
                    studies.between(of[OURS], ".1f"),
                    studies.between(of[THEIRS], ".1f"),
                    studies.difference(of["difference"], ".1f"),
                )
                for name, of in lines.items()
            ],
        )


def _metric(name: str, of: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table of losses, values and deviations: means over all windows, and the last one's difference."""
    whole, count = of["whole"], len(of["difference"])
    last = {"difference": of["difference"][-1], OURS: of[OURS][-1]}
    return (
        f"`{name}`",
        studies.between(whole[OURS], ".4g"),
        studies.between(whole[THEIRS], ".4g"),
        studies.difference(whole["difference"], ".2g"),
        f"{_percent(whole)[0]:+.2f}",
        "{:+.2f} [{:+.2f}, {:+.2f}]".format(*_percent(last)),
        f"{sum(map(_excludes_zero, of['difference']))} of {count}",
    )


def _percent(of: Mapping[str, Any]) -> tuple[float, ...]:
    """A difference and its interval in percent of our mean."""
    mean = abs(float(of[OURS]["mean"]))
    return tuple(100 * x / mean if mean else np.nan for x in studies.band(of["difference"]))


if __name__ == "__main__":
    studies.main(Settings(), run)
