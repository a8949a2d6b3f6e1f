"""HECRL's subgoals on cubes that are pushed, picked and placed: what do they add, and how much depends on the radius R?

    python -m experiments.papers.hecrl_cubes

One policy is trained for every head and judged in several ways (Haramati et al., ICLR 2026):

  no subgoals   the goal itself is pursued (EC-IQL)
  diffusion     subgoals of the diffusion model that the value selects (HECRL, EC-SGIQL)
  ... R         the same at other radii; the one of the paper is -30
  unfiltered    the best candidate by value, feasible or not; the goal still where its value is above
  random        any feasible candidate; the paper's is one draw without the filter
  awr           a subgoal that is regressed with weights, on the same values and policy; it is pursued as it is, without
                filter and direct goal (EC-SGIQL-AWR)

Each is judged with as many cubes as in training, from random starts to random goals, which must hold at the last
step; and some with one more. Success at any step, the share of cubes that end at their goals, and what is left of the
way, the sum of distances at the end over that at the start, tell apart what success alone does not. How many cubes a
subgoal moves is counted on held-out pairs of states and goals of one episode, where the value does not choose the goal
itself; the paper's code counts the first subgoal of episodes between random states, whatever is chosen.

The data are made here after the paper's protocol (`rl.data.recipes.manipulation` says what differs). The paper trains
on three cubes, 2.5M updates of 512 rows; here are two, and a fraction of that, so that two cores finish: published
numbers stand beside ours for orientation only. So few updates need other settings (`Settings` has the published ones
beside them). What matters most is that values end at the goal (``mask``), as in OGBench's agents. The logged behaviour
leaves a goal as soon as it is there, so that without it the value of being at the goal is learned last. With two cubes
an episode has room for 32 subgoals of 25 steps, and as many are pursued, as the paper does with three; with two it
pursues 28, and the goal itself in what is left.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import checks, common, goals, studies
from rl import checkpoint, plot, run_folder, shard, statistics
from rl.agents import hecrl
from rl.data import recipes
from rl.envs import entities
from rl.nest import GOAL, OBSERVATION
from rl.networks import entity
from rl.types import State

NUMBERS = ("single", "double", "triple", "quadruple")
HEADS = ("scalar", "hl_gauss")
MOVED = 0.04  # decimetres by which a subgoal moves a cube: the paper's threshold, 4 mm
DIRECT, DIFFUSION, UNFILTERED, RANDOM, AWR = "no subgoals", "diffusion", "unfiltered", "random", "awr"
TRAINED, MORE = "as in training", "one more cube"
PUBLISHED = studies.published("hecrl")
PAPER = "HECRL (Haramati et al., ICLR 2026), three cubes: "


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    dataset: str = "heavy-cube-double-ppp-v0"  # of `rl.data.recipes`
    transitions: int = 200_000  # logged steps; 3,000,000 in the paper
    seeds: int = 3  # trained at once
    updates: int = 20_000  # of each seed; 2,500,000 in the paper
    eval_every: int = 2_000  # updates after which a killed training goes on
    batch_size: int = 128  # 512 in the paper
    learning_rate: float = 1e-3  # 3e-4 in the paper
    schedule: str = "cosine"  # of it, for all networks; constant in the paper
    target_rate: float = 0.02  # 0.005 in the paper
    mask: bool = True  # values end at the goal; False in the paper
    alpha: float = 2.5  # weight of cloning; 0.1 in the paper
    width: int = 32  # of an entity; 64 in the paper, where hidden layers are 4 times as wide, here twice
    layers: int = 2  # of the diffusion model; 8 in the paper
    candidates: int = 32  # N; 256 in the paper
    radii: tuple[int, ...] = (-10, -20, -30, -40, -50, -60)  # R
    radius: int = -30  # R of everything else
    eval_episodes: int = 20  # of each seed, at least 2
    pairs: int = 512  # of states and goals on which subgoals are counted
    seed: int = 0  # of data and agents
    workdir: str = "runs/hecrl_cubes"  # data and runs
    out: str = "results/papers/hecrl_cubes"


MEASURES = {
    "success": "all cubes at their goals at the last step",
    "once": "at any step",
    "placed": "cubes at theirs before the last step",
    "left": "of the way left",
}


class Judged(NamedTuple):
    """A way to act with what one run has trained."""

    head: str
    trained: str  # subgoals of the run: diffusion or awr
    acts: str  # DIRECT, ...
    radius: int
    cubes: str = TRAINED

    @property
    def name(self) -> str:
        """In words."""
        return ", ".join([self.head, self.acts, f"R {self.radius}", self.cubes])


def run(settings: Settings) -> dict[str, Any]:
    """Makes the data, trains and judges what is missing; writes and returns what came out.

    Raises:
      ValueError: a dataset that is not of cubes, or settings that a run refuses.
    """
    check(settings)
    path = recipes.collect(
        settings.dataset,
        out=Path(settings.workdir) / "data",
        transitions=settings.transitions,
        seed=settings.seed,
    )
    common_settings = studies.chosen(settings, "radii")
    ways = judgements(settings)
    digests = {key: run_digest(settings, str(path), *key) for key in runs()}
    places = {key: Path(settings.workdir) / f"{'-'.join(key)}.{x[:12]}" for key, x in digests.items()}
    if settings.overwrite:
        for place in places.values():
            shutil.rmtree(place, ignore_errors=True)

    @functools.cache  # each is judged in several ways
    def of_run(head: str, kind: str) -> Trained:
        return trained(settings, places[head, kind], str(path), head, kind)

    variants = {
        f"subgoals, {head}, {kind}": studies.Variant(
            functools.partial(of_subgoals, settings, of_run, head, kind),
            {**common_settings, "run": digests[head, kind]},
        )
        for head, kind in runs()
    }
    variants |= {
        way.name: studies.Variant(
            functools.partial(of_success, settings, of_run, way),
            {**common_settings, "run": digests[way.head, way.trained]},
        )
        for way in ways
    }

    def write() -> dict[str, Any]:
        finished = studies.recall(settings, variants)
        rows = [
            {**way._asdict(), **finished.outcomes[way.name]} for way in ways if way.name in finished.outcomes
        ]
        moved = {
            f"{head}, {kind}": finished.outcomes[name]
            for head, kind in runs()
            if (name := f"subgoals, {head}, {kind}") in finished.outcomes
        }
        outcomes = {"wall_seconds": finished.seconds, "rows": rows, "moved": moved}
        return studies.finish(settings, outcomes, report, claims, trained=finished)

    studies.train(settings, variants, "HECRL on cubes", write)
    result = write()
    draw(Path(settings.out), result)
    return result


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on what `run` would find out only after an hour."""
    studies.check_seeds(settings.seeds)
    for radius in settings.radii:  # an agent refuses what no agent can have
        planning(dataclasses.replace(settings, radius=radius), agent_config(settings, DIFFUSION))
    checks.several_episodes(settings)
    checks.multiple(settings, "updates", "eval_every")
    if settings.dataset not in recipes.RECIPES or "cube" not in settings.dataset:
        raise ValueError(f"--dataset={settings.dataset} is not one of cubes, such as {Settings.dataset}")
    if not any(f"-{number}-" in settings.dataset for number in NUMBERS[:-1]):
        raise ValueError(
            f"--dataset={settings.dataset}: agents are also judged with one more cube, and no environment has it: "
            f"choose data of {', '.join(NUMBERS[:-1])} cubes"
        )
    if settings.radius not in settings.radii:
        raise ValueError(
            f"--radius={settings.radius} must be one of --radii={','.join(map(str, settings.radii))}"
        )


def runs() -> list[tuple[str, str]]:
    """(head, subgoals) of what is trained."""
    return [*((head, DIFFUSION) for head in HEADS), (HEADS[0], AWR)]


def judgements(settings: Settings) -> list[Judged]:
    """All ways to act, each in the environments in which it is judged; those that need no other radius first."""
    kinds = [(head, DIFFUSION, acts) for head in HEADS for acts in (DIRECT, DIFFUSION, UNFILTERED, RANDOM)]
    kinds.append((HEADS[0], AWR, AWR))
    ways = [Judged(*kind, settings.radius) for kind in kinds]
    ways += [
        way._replace(cubes=MORE)
        for way in ways
        if way.head == HEADS[0] and way.acts in (DIRECT, DIFFUSION, AWR)
    ]
    ways += [
        Judged(head, DIFFUSION, DIFFUSION, radius)
        for radius in settings.radii
        if radius != settings.radius
        for head in HEADS
    ]
    return ways


# ---- runs ----------------------------------------------------------------------------------------------------------


def run_settings(settings: Settings, path: str, head: str, kind: str) -> goals.Settings:
    """A run of `experiments.goals`, without evaluation."""
    return goals.Settings(
        agent="hecrl",
        dataset=path + entities.SUFFIX,
        environment=environment(settings) + entities.SUFFIX,
        protocol="hecrl",
        head=head,
        head_start=math.nan if head == "scalar" else 0.0,  # near which a scalar begins, too
        normalize_observations=True,
        seeds=settings.seeds,
        seed=settings.seed,
        updates=settings.updates,
        eval_every=settings.eval_every,
        eval_episodes=0,
        batch_size=settings.batch_size,
    )


def run_digest(settings: Settings, path: str, head: str, kind: str) -> str:
    """A digest of the settings of a run and of the code that it runs: a run of others has another folder."""
    chosen = run_settings(settings, path, head, kind), agent_config(settings, kind)
    fields = {type(part).__module__: dataclasses.asdict(part) for part in chosen}
    return studies.digest(f"{head}, {kind}", studies.Variant(trained, fields))


def environment(settings: Settings, more: int = 0) -> str:
    """The environment of the data, or one with more cubes."""
    env = recipes.RECIPES[settings.dataset].env
    (number,) = (number for number in NUMBERS if f"-{number}-" in env)
    return env.replace(number, NUMBERS[NUMBERS.index(number) + more])


def agent_config(settings: Settings, kind: str) -> hecrl.Config:
    """HECRL's settings at the sizes of this study; ``kind`` is what proposes subgoals."""
    selects = kind != AWR  # as published: see the table of `rl.agents.hecrl`
    adam = dataclasses.replace(hecrl.CLIPPED, schedule=settings.schedule, decay_updates=settings.updates)
    return hecrl.Config(
        alpha=settings.alpha,
        learning_rate=settings.learning_rate,
        target_rate=settings.target_rate,
        critic_optimiser=adam,
        value_optimiser=adam,
        policy_optimiser=adam,
        subgoal_optimiser=adam,
        goals=dataclasses.replace(hecrl.GOALS, mask=settings.mask),
        subgoals=kind,
        filtered=selects,
        direct=selects,
        # What only plans is no part of a run, which is the same whatever is asked of it: see `planning`.
        candidates=Settings.candidates,
        radius=float(Settings.radius),
        ids=entities.IDS,
        network=entity.Shape(settings.width, 2 * settings.width, 8, settings.layers),
    )


def planning(settings: Settings, config: hecrl.Config) -> hecrl.Config:
    """The settings of a trained agent with those by which it is to plan."""
    return dataclasses.replace(config, candidates=settings.candidates, radius=float(settings.radius))


class Trained(NamedTuple):
    """What a run has learned."""

    task: goals.Problem
    settings: goals.Settings
    config: hecrl.Config  # as it plans
    state: State  # [S, ...]


OfRun = Callable[[str, str], Trained]  # (head, subgoals) -> `trained`, computed once


def trained(settings: Settings, folder: Path, path: str, head: str, kind: str) -> Trained:
    """The run of a head and of what proposes subgoals, trained in its folder where it is not yet."""
    chosen, config = run_settings(settings, path, head, kind), agent_config(settings, kind)
    chosen = dataclasses.replace(chosen, workdir=str(folder))
    result = goals.run(chosen, config)
    task, mesh = goals.problem(chosen, config, [config]), shard.mesh(1, 1)
    population, run_keys = goals.learners(chosen, config, {}, task, mesh)
    like = jax.eval_shape(population.init, run_keys, goals.example(chosen, config, task.trajectories))
    stored = checkpoint.read(Path(result["folder"]) / run_folder.CHECKPOINTS)
    assert stored is not None  # the run has ended
    leaves = [jnp.asarray(stored[1][name]) for name in checkpoint.named({"state": like})]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Trained(task, chosen, planning(settings, config), state)


def acting(config: hecrl.Config, way: Judged) -> hecrl.Config:
    """The agent's settings for a way to act."""
    changes: dict[str, dict[str, Any]] = {
        DIRECT: {"subgoals": "none"},
        UNFILTERED: {"filtered": False},
        RANDOM: {"choice": "random"},
    }
    return dataclasses.replace(config, radius=float(way.radius), **changes.get(way.acts, {}))


def of_success(settings: Settings, of_run: OfRun, way: Judged, work: studies.Work) -> dict[str, Any]:
    """How near the cubes of an episode come to their goals, and how long it is, [S] each; see `MEASURES`."""
    del work
    of = of_run(way.head, way.trained)
    config = acting(of.config, way)
    population, _ = goals.learners(of.settings, config, {}, of.task, shard.mesh(1, 1))
    name = environment(settings, way.cubes == MORE) + entities.SUFFIX
    chosen = dataclasses.replace(of.settings, eval_episodes=settings.eval_episodes)
    actor = goals.observing(population.actor, of.task)
    seen: list[np.ndarray] = []  # before every step of all episodes, and after the last
    with common.evaluator(chosen, actor, f"{goals.RANDOM}{name}", settings.seeds) as episodes:
        scores = episodes(of.state, 0, lambda observation, *_: seen.append(distances(observation)))
    length = int(np.max(scores["length"]))  # of every episode: none ends early
    by_step = np.reshape(seen[:-1], (-1, length, settings.seeds, np.size(seen[0]) // settings.seeds))
    start, end = (np.moveaxis(by_step[:, time], 1, 0).reshape(settings.seeds, -1) for time in (0, -1))
    return {
        "success": np.mean(scores["final_success"], -1),
        "once": np.mean(scores["success"], -1),
        "placed": np.mean(end <= entities.NEAR, -1),
        "left": np.sum(end, -1) / np.sum(start, -1),
        "length": np.mean(scores["length"], -1),
    }


def distances(observation: Mapping[str, Any]) -> np.ndarray:
    """From every cube to its goal in decimetres, [N, cubes]."""
    away = entities.positions(observation[OBSERVATION]) - entities.positions(observation[GOAL])
    return np.linalg.norm(away, axis=-1)


def of_subgoals(
    settings: Settings, of_run: OfRun, head: str, kind: str, work: studies.Work
) -> dict[str, Any]:
    """How many cubes the selected subgoals and the logged ones move on held-out pairs, [S] each."""
    del work
    of = of_run(head, kind)
    held_out = of.task.validation or of.task.trajectories
    draw = goals.source(dataclasses.replace(of.settings, batch_size=settings.pairs), of.config)
    batch = draw(jax.device_put(held_out), jax.random.key(settings.seed), 0)
    s, g = batch.value.observation[OBSERVATION], batch.actor_goal
    nets = hecrl.networks(of.config, of.task.data.loaded.spec, of.task.data.head)

    @jax.jit
    def count(params: Any, key: Any) -> dict[str, Any]:
        plan = hecrl.plan(of.config, nets, of.task.data.head, params, s, g, key)
        moved = displaced(of.task, s, plan.subgoal)
        return {
            "moved": jnp.where(plan.is_goal, 0.0, moved).sum() / jnp.maximum((~plan.is_goal).sum(), 1),
            "goals": plan.is_goal.mean(),
            "logged": displaced(of.task, s, batch.actor_subgoal).mean(),
        }

    rows = [
        count(jax.tree.map(lambda x, i=i: x[i], of.state.params), jax.random.key(i))
        for i in range(settings.seeds)
    ]
    return studies.stacked([jax.tree.map(float, row) for row in rows])


def displaced(task: goals.Problem, before: Any, after: Any) -> Any:
    """How many cubes [...] of standardised entities are more than `MOVED` from where they were; clipping aside."""
    deviation = jnp.asarray(task.data.transform.deviation)[:3]
    away = (entities.positions(after) - entities.positions(before)) * deviation
    return (jnp.linalg.norm(away, axis=-1) > MOVED).sum(-1).astype(jnp.float32)


# ---- what may be said ----------------------------------------------------------------------------------------------


def row(result: Mapping[str, Any], way: Judged, measure: str = "success") -> np.ndarray | None:
    """One of `MEASURES` [S] of a way to act, or None before it is there."""
    for outcome in result["rows"]:
        if Judged(*(outcome[field] for field in Judged._fields)) == way:
            return np.asarray(outcome[measure])
    return None


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper says, and what nobody has asked."""
    radius = result["settings"]["radius"]
    way = lambda acts, head=HEADS[0], cubes=TRAINED: Judged(
        head, AWR if acts == AWR else DIFFUSION, acts, radius, cubes
    )
    table = PUBLISHED["success"]["PPP-Cube, state"]
    mixed, stacked = (f"{x['diffusion']} against {x['awr']}" for x in PUBLISHED["displaced"].values())
    with_subgoals = f"{PAPER}{table['HECRL'][0]} against {table['no subgoals'][0]}"
    for cubes in (TRAINED, MORE):
        for other, source in (
            (DIRECT, with_subgoals if cubes == TRAINED else studies.OURS),
            (AWR, f"{PAPER}in words"),
        ):
            for measure, sign, text in (
                ("success", 1, "HECRL succeeds more often than"),
                ("left", -1, "HECRL leaves less of the way than"),
            ):
                ours, theirs = (row(result, way(acts, cubes=cubes), measure) for acts in (DIFFUSION, other))
                if ours is not None and theirs is not None:
                    claim = f"{cubes}: {text} {other} (difference)"
                    published = source if measure == "success" else studies.OURS
                    yield studies.Claim(claim, published, sign * (ours - theirs), studies.positive)
    for other, source in ((UNFILTERED, f"{PAPER}in words"), (RANDOM, studies.OURS)):
        ours, theirs = row(result, way(DIFFUSION)), row(result, way(other))
        if ours is not None and theirs is not None:
            text = f"the filter and the choice by value help: HECRL against {other} (difference)"
            yield studies.Claim(text, source, ours - theirs, studies.positive)
    moved = {name: result["moved"].get(f"{HEADS[0]}, {name}") for name in (DIFFUSION, AWR)}
    if all(moved.values()):
        text = "a subgoal of the diffusion moves fewer cubes than a regressed one (difference)"
        source = f"{PAPER}{mixed} entities; where they are stacked {stacked}"
        fewer = moved[AWR]["moved"] - moved[DIFFUSION]["moved"]
        yield studies.Claim(text, source, fewer, studies.positive)
    curves = [curve for head in HEADS if (curve := over_radii(result, head)) is not None]
    if len(curves) == len(HEADS):
        text = "at its best R, HL-Gauss succeeds more often than a scalar (difference)"
        best = [statistics.held_out_best(curve.T) for curve in curves]
        yield studies.Claim(text, studies.OURS, best[1] - best[0], studies.positive)
        text = "HL-Gauss depends less on the choice of R: mean success over R, less that at the best R (difference)"
        mean_less_best = [curve.mean(0) - top for curve, top in zip(curves, best, strict=True)]
        yield studies.Claim(text, studies.OURS, mean_less_best[1] - mean_less_best[0], studies.positive)


def over_radii(result: Mapping[str, Any], head: str, measure: str = "success") -> Any:
    """One of `MEASURES` [R, S] of a head's selection against the radius, or None before all of it is there."""
    ways = [Judged(head, DIFFUSION, DIFFUSION, radius) for radius in result["settings"]["radii"]]
    rows = [x for way in ways if (x := row(result, way, measure)) is not None]
    return np.stack(rows) if len(rows) == len(ways) else None


def cell(scores: np.ndarray | None, measure: str) -> str:
    """Mean and interval, or - before they are there; what is left of a way is no rate and may exceed 1."""
    return "-" if scores is None else studies.between(scores, rate=measure != "left")


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield "# HECRL on cubes that are pushed, picked and placed"
    yield (
        f"`{result['command']}`, {result['wall_seconds'] / 60:.0f} minutes on {result['hardware']['cores']} cores. "
        f"{studies.program(result, __file__)} says what is compared. "
        f"{settings['dataset']}, {settings['transitions']:,} regenerated transitions; {settings['seeds']} seeds, "
        f"{settings['updates']:,} updates of {settings['batch_size']} rows, width {settings['width']}; "
        f"{settings['eval_episodes']} episodes per seed. Mean and 95 % interval."
    )
    yield (
        f"Learning rate {settings['learning_rate']:g}, {settings['schedule']}; target rate "
        f"{settings['target_rate']:g}; weight of cloning {settings['alpha']:g}; values "
        f"{'end' if settings['mask'] else 'do not end'} at the goal. Published are 0.0003, constant; 0.005; 0.1; and "
        "values that do not end there."
    )
    radius = settings["radius"]
    for cubes in (TRAINED, MORE):
        ways = {
            f"{head}, {acts}": Judged(head, AWR if acts == AWR else DIFFUSION, acts, radius, cubes)
            for head in HEADS
            for acts in (DIRECT, DIFFUSION, UNFILTERED, RANDOM, AWR)
        }
        rows = [
            (name, *(cell(row(result, way, measure), measure) for measure in MEASURES))
            for name, way in ways.items()
            if row(result, way) is not None
        ]
        if rows:
            yield f"## Cubes: {cubes}"
            yield studies.table(("", *MEASURES.values()), rows)
    table = PUBLISHED["success"]["PPP-Cube, state"]
    theirs = ", ".join(f"{name} {mean} ± {deviation}" for name, (mean, deviation) in table.items())
    yield f"Published, as others reprint it, for three cubes and 2.5M updates of 512 rows, in %: {theirs}."
    if all(over_radii(result, head) is not None for head in HEADS):
        yield "## The radius R"
        yield studies.table(
            ("", *(f"R = {radius}" for radius in settings["radii"])),
            [
                (f"{head}, {MEASURES[measure]}", *(cell(x, measure) for x in curve))
                for measure in ("success", "left")
                for head in HEADS
                if (curve := over_radii(result, head, measure)) is not None
            ],
        )
        yield "![of the way left against R](radius.png)"
    if result["moved"]:
        mixed, stacked = (
            f"{x['diffusion']} with a diffusion, {x['awr']} regressed"
            for x in PUBLISHED["displaced"].values()
        )
        yield "## Cubes moved by a subgoal"
        yield (
            "On held-out pairs of a state and a later one; pairs whose goal is pursued itself are left out, and their "
            "share stands apart. Published, as others reprint it, for three cubes, counted otherwise (first subgoals "
            f"of episodes between random states): {mixed}; where cubes are stacked {stacked}."
        )
        yield studies.table(
            ("", "moved", "goal pursued itself", "moved by the logged subgoal"),
            [
                (name, *(studies.between(outcome[what]) for what in ("moved", "goals", "logged")))
                for name, outcome in result["moved"].items()
            ],
        )


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """What is left of the way against the radius."""
    radii = result["settings"]["radii"]
    curves = {head: over_radii(result, head, "left") for head in HEADS}
    drawn = {head: (radii, *studies.bands(curve)) for head, curve in curves.items() if curve is not None}
    if drawn:
        plot.lines(folder / "radius.png", drawn, "R", "of the way left", title="HECRL's selection")


if __name__ == "__main__":
    studies.main(Settings(), run)
