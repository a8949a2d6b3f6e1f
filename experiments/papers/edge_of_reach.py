"""Why offline model-based agents fail when their model is perfect, and what repairs them (RAVL, NeurIPS 2024).

    python -m experiments.papers.edge_of_reach

The world is `rl.envs.plane`, known exactly: there is no model error that any penalty could see. Agents start rollouts
of k steps from logged states and learn from nothing else. Some points can be reached at the last step only; targets
continue from their values, and nothing ever trains these. The study asks, with several seeds each:

  story     base (two critics) at k = 10 and with whole episodes; an oracle that corrects the values of those points
            alone; the same oracle at as many rows of each batch, drawn anew every time; RAVL's ensemble
  k and N   base with other rollout lengths; k = 10 with other numbers of critics
  ablation  minimum over N critics x EDAC's diversity x value head: is a bounded support enough?
  support   two critics with categorical heads whose support is ten times as wide, with as narrow bins, and a
            scalar whose targets are clipped to either support: is it the bound?
  zero      two critics with HL-Gauss whose untrained values are near 0, as a scalar's are, and not in the middle of
            the support, and a scalar whose values start there: is it the start?
  start     two and twenty critics, and two with HL-Gauss, from other initial weights
  oracle    other corrections: those points worth 0 instead of their value; the points that the last two steps reach
  fixed     true values, or 0, in 1 % of the plane's cells, which each seed draws once: the same points are corrected
            every time, as at the edge of reach

and checks the outcome that the paper's argument predicts. By default the story and the sweeps are run, 40 minutes of
one core; the ablation alone is an hour and a half. What is finished in --workdir is not trained again unless its code
or settings change: parts may be run side by side, and then all for one report:
--parts=story,k,N,ablation,support,zero,start,oracle,fixed. What --stored=FOLDER,... holds is taken from there, without
curves, so that figures which need them are not drawn again.

Published are k = 10, the horizon of 30 and the oracle; the random controls, the sweeps and the ablation are what
reviewers asked for, or new.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import model_based, plot, train
from rl.agents import sac_n
from rl.dynamics import base, termination
from rl.envs import plane
from rl.replay.dataset import Dataset
from rl.types import Array, Key, Learner, Metrics, Params, State, Transition
from rl.values import heads
from rl.values.heads import ValueHead

WORLD = base.true(plane.step)
DISCOUNT = 0.99
SUPPORT = (-100.0, 130.0)  # of categorical heads: the worst and the best reward, for ever
LOGGED = 100_000  # states
EVALUATED = 256  # episodes of an evaluation
EXTENT = 20.0  # of the value landscape, in each direction
CELL = 0.25  # side of the plane's cells in which an oracle at fixed states corrects all states or none
SHARE = 0.01  # of these cells; about as many of base's next states are at the edge of reach


class Variant(NamedTuple):
    """One kind of agent."""

    critics: int = 2  # N
    length: int = 10  # k
    diversity: float = 0.0  # eta
    head: str = "scalar"
    support: float = (
        1.0  # of a categorical head, or to which a scalar's targets are clipped, in widths of `SUPPORT`
    )
    start: str = "biased"  # initial weights; see `started`
    untrained: float | None = None  # about the first values; None: 0 of a scalar, else the support's middle
    patch: str = ""  # which target values the oracle gives: see `patched`


BASE, WHOLE, RAVL = Variant(), Variant(length=plane.LIMIT), Variant(critics=20)
STORY = {
    "base, k = 10": BASE,
    "base, k = 30, whole episodes": WHOLE,
    "oracle at the edge of reach": Variant(patch="edge"),
    "oracle at as many random states": Variant(patch="random"),
    "RAVL, N = 20": RAVL,
}
LENGTHS = (5, 10, 15, 20, 30)
CRITICS = (2, 5, 10, 20, 50)
HEADS = ("scalar", "two_hot", "hl_gauss")
CLIPPED = "clipped scalar"  # bounded as categorical heads are, and nothing else of theirs
STARTS = ("biased", "library", "transposed")
ABLATION = [
    Variant(critics, 10, diversity, head) for head in HEADS for critics in (2, 20) for diversity in (0.0, 0.1)
]
ORACLES = [
    Variant(patch=patch) for patch in ("edge", "random", "edge, worth 0", "random, worth 0", "last two steps")
]
FIXED = [Variant(patch=patch) for patch in ("fixed", "fixed, worth 0")]
ZERO = [Variant(head="hl_gauss", support=width, untrained=0.0) for width in (1.0, 10.0)]
ZERO += [Variant(untrained=sum(SUPPORT) / 2)]
START = [Variant(critics, start=start) for start in STARTS for critics in (2, 20)]
START += [Variant(head="hl_gauss", start=start) for start in STARTS[1:]]  # from the first: in the ablation


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about this study."""

    seeds: int = 5  # agents of each kind
    epochs: int = 40  # of rollouts and updates
    updates: int = 500  # per epoch
    rollouts: int = 256  # started per epoch
    batch_size: int = 256  # rows per update
    hidden: tuple[int, ...] = (64, 64)  # widths of every network's layers
    parts: str = "story,k,N"  # what to run, comma-separated
    seed: int = 0  # of everything
    workdir: str = "runs/edge_of_reach"  # of what is finished
    out: str = "results/papers/edge_of_reach"


PARTS: dict[str, list[Variant]] = {
    "story": list(STORY.values()),
    "k": [Variant(length=k) for k in LENGTHS],
    "N": [Variant(critics=n) for n in CRITICS],
    "ablation": ABLATION,
    "support": [Variant(head=head, support=width) for width in (1.0, 10.0) for head in (*HEADS[1:], CLIPPED)],
    "zero": ZERO,
    "start": START,
    "oracle": ORACLES,
    "fixed": FIXED,
}


def run(settings: Settings) -> dict[str, Any]:
    """Trains all variants, writes what came out, and returns what result.json holds.

    Raises:
      ValueError: an unknown part, too few seeds for an interval, or stored results of other settings.
    """
    kinds = {describe(variant): variant for variant in chosen(settings)}
    earlier = studies.stored(settings, ["name"])
    variants = {
        name: studies.Variant(
            functools.partial(train_variant, settings, variant),
            {**studies.chosen(settings), **variant._asdict()},
            settings.epochs,
        )
        for name, variant in kinds.items()
        if (name,) not in earlier.rows
    }
    finished = studies.train(settings, variants, "edge of reach")
    rows = [
        {
            "name": name,
            **variant._asdict(),
            **(earlier.rows.get((name,)) or summary(finished.outcomes[name]["metrics"])),
        }
        for name, variant in kinds.items()
    ]
    # Results into which one training was divided have the same time to the last bit: it counts once.
    seconds = finished.seconds + sum({one["wall_seconds"] for one in earlier.results})
    result = studies.finish(
        settings, {"wall_seconds": seconds, "rows": rows}, report, claims, trained=finished
    )
    trained = {variant: finished.outcomes[name] for name, variant in kinds.items() if name in variants}
    draw(Path(settings.out), settings, trained, dict(zip(kinds.values(), rows, strict=True)))
    return result


def chosen(settings: Settings) -> list[Variant]:
    """The variants of all parts asked for, each once."""
    parts = studies.names("parts", settings.parts, PARTS)
    studies.check_seeds(settings.seeds)
    return list(dict.fromkeys(variant for part in parts for variant in PARTS[part]))


def describe(variant: Variant) -> str:
    """A variant in a few words: what differs from base at k = 10."""
    words = [f"N = {variant.critics}", f"k = {variant.length}"]
    words += [f"eta = {variant.diversity:g}"] if variant.diversity else []
    words += [f"{variant.start} start"] if variant.start != "biased" else []
    words += [variant.head] if variant.head != "scalar" else []
    words += [f"support x {variant.support:g}"] if variant.support != 1 else []
    words += [f"values from {variant.untrained:g}"] if variant.untrained is not None else []
    words += [f"oracle ({variant.patch})"] if variant.patch else []
    return ", ".join(words)


# ---- training ---------------------------------------------------------------------------------------------


def train_variant(settings: Settings, variant: Variant, work: studies.Work) -> dict[str, Any]:
    """All seeds of one variant: metrics {name: [T, S]} by epoch and seed, and the first seed's values of the plane."""
    config = sac_n.Config(DISCOUNT, variant.critics, variant.diversity, hidden=settings.hidden)
    learner = sac_n.make(config, plane.SPEC, value_head(variant))
    learner = started(learner, variant.start)
    loop = model_based.make(
        model_based.Config(
            rollouts=settings.rollouts,
            length=variant.length,
            updates=settings.updates,
            batch_size=settings.batch_size,
            real=0.0,
        ),
        patched(learner, variant),
        WORLD,
        termination.never,
        model_based.diagnosis(
            learner, learner.critics, WORLD, lambda point: plane.edge_of_reach(point, variant.length)
        ),
    )
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    source = model_based.Inputs(logged(jax.random.key(settings.seed)), ())
    epoch = model_based.over_seeds(loop.epoch, batched=jax.default_backend() != "cpu")
    start = jax.jit(jax.vmap(loop.init, (0, None), model_based.STACKED))(keys, source.dataset)
    evaluate = jax.jit(jax.vmap(lambda state: episode_return(learner, state), (train.STACKED,)))
    rows = []
    for carry, report in train.epochs(epoch, start, source, keys, settings.epochs):
        rows.append({**report.metrics, "return": evaluate(carry.learner)})
        work.progress(1)
    metrics = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
    first = train.member(carry.learner, 0)
    drawn = np.asarray(jax.jit(landscape, static_argnums=0)(learner, first))
    return {"metrics": metrics, "landscape": drawn}


def value_head(variant: Variant) -> ValueHead:
    """The head of a variant's critics; bins of all supports are equally wide."""
    low, high = (variant.support * end for end in SUPPORT)
    scalar = heads.scalar()
    if variant.head == "scalar":
        return from_value(scalar, variant.untrained or 0.0)
    if variant.head != CLIPPED:
        return heads.make(variant.head, low, high, round(50 * variant.support) + 1, start=variant.untrained)
    return scalar._replace(target=lambda *backup: scalar.target(*backup).clip(low, high))


def from_value(scalar: ValueHead, start: float) -> ValueHead:
    """A scalar whose outputs of 0 stand for ``start``."""
    return scalar._replace(
        value=lambda outputs: scalar.value(outputs + start),
        target=lambda reward, discount, outputs: scalar.target(reward, discount, outputs + start),
        loss=lambda outputs, target: scalar.loss(outputs + start, target),
    )


def started(learner: Learner, start: str) -> Learner:
    """The learner with other initial weights, on which the outcome depends more than on anything else.

    ``biased`` leaves them as EDAC's authors have them: hidden weights U(+-1/sqrt(inputs)), hidden biases 0.1, last
    layers near 0. ``library`` starts without biases, as this library once did. ``transposed`` is ``biased`` with the
    critics' hidden weights U(+-1/sqrt(outputs)): RAVL's code stores them transposed, so that PyTorch's initialiser
    takes outputs for inputs.
    """
    if start == "biased":
        return learner

    def layer(key: Key, parameters: Params, last: bool) -> Params:
        kernel, bias = parameters["kernel"], parameters["bias"]
        if start == "library":
            return {"kernel": kernel, "bias": jnp.zeros_like(bias)}
        bound = kernel.shape[-1] ** -0.5
        drawn = jax.random.uniform(key, kernel.shape, minval=-bound, maxval=bound)
        return {"kernel": kernel if last else drawn, "bias": bias}

    def layers(key: Key, network: Params) -> Params:
        names = sorted(network)
        keys = jax.random.split(key, len(names))
        return {
            name: layer(key, network[name], name == names[-1]) for key, name in zip(keys, names, strict=True)
        }

    def init(key: Key, batch: Transition) -> State:
        keys = jax.random.split(key, 3)
        state = learner.init(keys[0], batch)
        params = {**state.params, "critic": layers(keys[1], state.params["critic"])}
        if start == "library":
            params["policy"] = layers(keys[2], state.params["policy"])
        return state._replace(params=params, target={"critic": jax.tree.map(jnp.copy, params["critic"])})

    return learner._replace(init=init)


def logged(key: Key) -> Dataset:
    """Start states, and nothing else that rollouts read."""
    point = np.asarray(plane.reset(key, LOGGED))
    nothing = np.zeros(LOGGED, np.float32)
    steps = Transition(point, point, nothing, nothing, point, point, nothing)
    return jax.device_put(Dataset(steps, np.ones(LOGGED, bool)))


def patched(learner: Learner, variant: Variant) -> Learner:
    """The learner whose targets at some next states do not continue with what the critics say.

    They continue with the best policy's true value at the ``edge`` of reach, at as many rows of a batch drawn at
    ``random``, anew in every batch, in ``fixed`` random cells, the same from the first update to the last (`in_cells`),
    or at states that only the ``last two steps`` reach, few of which are ever trained; or with 0, where it ends in
    ``worth 0``. Of ``fixed`` cells a seed's own are drawn with its initial weights, as the parameter ``cells``, which
    nothing trains; the metric ``corrected`` is the share of next states in them.
    """
    if not variant.patch:
        return learner
    fixed = variant.patch.startswith("fixed")
    length = variant.length - (variant.patch == "last two steps")
    worth = 0.0 if variant.patch.endswith("worth 0") else DISCOUNT

    def init(key: Key, batch: Transition) -> State:
        state = learner.init(key, batch)
        # A number that no split of the key gives.
        cells = jax.random.bits(jax.random.fold_in(key, np.uint32(zlib.crc32(b"cells"))))
        return state._replace(params={**state.params, "cells": cells})

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        choice_key, update_key = jax.random.split(key)
        where = plane.edge_of_reach(batch.next_observation, length)
        if variant.patch.startswith("random"):
            where = jax.random.permutation(choice_key, where)
        if fixed:
            where = in_cells(state.params["cells"], batch.next_observation)
        known = worth * plane.value(batch.next_observation, DISCOUNT)
        corrected = batch._replace(
            reward=batch.reward + jnp.where(where, known, 0.0), discount=batch.discount * ~where
        )
        state, metrics = learner.update(state, corrected, update_key)
        return state, {**metrics, "corrected": where.mean()} if fixed else metrics

    return learner._replace(init=init if fixed else learner.init, update=update)


def in_cells(number: Array, point: Array) -> Array:
    """Whether points [..., 2] lie in one of the cells that this ``number`` [] chooses, `SHARE` of all; [...] bool."""
    column, row = jnp.moveaxis(jnp.floor(point / CELL).astype(jnp.int32), -1, 0)
    # 2^16 cells in each direction are more than any rollout crosses.
    cell = (column.astype(jnp.uint32) << 16) | (row.astype(jnp.uint32) & 0xFFFF)
    draw = lambda cell: jax.random.uniform(jax.random.fold_in(jax.random.key(number), cell))
    return jax.vmap(draw)(cell.reshape(-1)).reshape(cell.shape) < SHARE


def episode_return(learner: Learner, state: State) -> Array:
    """Mean return of whole episodes; the same starts for every policy."""

    def step(point: Array, _: None) -> tuple[Array, Array]:
        return plane.step(point, learner.act(state, point, jax.random.key(0)))

    starts = plane.reset(jax.random.key(0), EVALUATED)
    return jax.lax.scan(step, starts, length=plane.LIMIT)[1].sum(0).mean()


def landscape(learner: Learner, state: State) -> Array:
    """The smallest critic's value of the policy's own action over the plane, [81, 81]; the first axis is y."""
    points = _grid()
    return learner.critics(state, points, learner.act(state, points, jax.random.key(0))).min(0)


# ---- what came out ----------------------------------------------------------------------------------------


def summary(metrics: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The last epoch of every metric, one number per seed, and how many seeds fail."""
    last = {name: values[-1] for name, values in metrics.items()}
    return {"failed": int((last["return"] < 0).sum()), **last}


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the argument predicts, of those variants that were run: for all seeds, not on average."""
    rows = {row["name"]: row for row in result["rows"]}
    good, bad = studies.every(lambda x: x > 30), studies.every(lambda x: x < 0)
    ravl, ours = "RAVL (Sims et al., NeurIPS 2024)", "ours: a control"
    predictions = [
        ("base fails: its return is below 0", ravl, BASE, "return", bad),
        ("base's Q ends above 150", ravl, BASE, "q", studies.every(lambda x: x > 150)),
        ("whole episodes work: return above 30", ravl, WHOLE, "return", good),
        ("the oracle at the edge of reach repairs it", ravl, Variant(patch="edge"), "return", good),
        ("the oracle elsewhere does not", ours, Variant(patch="random"), "return", bad),
        ("nor do values of 0 elsewhere", ours, Variant(patch="random, worth 0"), "return", bad),
        ("nor do true values at fixed random states", ours, Variant(patch="fixed"), "return", bad),
        ("nor do values of 0 at fixed random states", ours, Variant(patch="fixed, worth 0"), "return", bad),
        ("values of 0 at the edge repair it", ours, Variant(patch="edge, worth 0"), "return", good),
        ("RAVL works: return above 35", ravl, RAVL, "return", studies.every(lambda x: x > 35)),
        ("a scalar with clipped targets fails, too", ours, Variant(head=CLIPPED), "return", bad),
        ("HL-Gauss needs no narrow support", ours, Variant(head="hl_gauss", support=10.0), "return", good),
        ("HL-Gauss works with values from 0", ours, ZERO[0], "return", good),
        ("nor does it then need a narrow support", ours, ZERO[1], "return", good),
        ("a scalar fails with values from HL-Gauss's start, too", ours, ZERO[2], "return", bad),
    ]
    for start, words in (("library", "without biases"), ("transposed", "as RAVL's code has them")):
        works = f"with initial weights {words}: RAVL works: return above 35"
        above = studies.every(lambda x: x > 35)
        predictions.append((works, ravl, Variant(20, start=start), "return", above))
        works = f"with initial weights {words}: two critics with HL-Gauss work: return above 30"
        predictions.append((works, ours, Variant(head="hl_gauss", start=start), "return", good))
    for text, source, variant, score, predicate in predictions:
        if describe(variant) in rows:
            yield studies.Claim(f"{text}, in every seed", source, rows[describe(variant)][score], predicate)


def draw(
    folder: Path, settings: Settings, outcomes: Mapping[Variant, Any], rows: Mapping[Variant, Any]
) -> None:
    """The story, the value landscape and the two sweeps, of what was run.

    Args:
      folder: for the figures.
      settings: of the study.
      outcomes: what was trained here, with its curves.
      rows: of the result, also those that other commands trained.
    """
    if set(STORY.values()) <= set(outcomes):
        updates = settings.updates * np.arange(1, settings.epochs + 1)

        def curves(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
            return {label: (updates, outcomes[variant]["metrics"][name]) for label, variant in STORY.items()}

        plot.learning_curves(
            folder / "story.png",
            {"return of an episode": curves("return"), "mean Q on training batches": curves("q")},
            title="A perfect model, truncated rollouts",
        )
        truth = plane.value(_grid(), DISCOUNT)
        plot.maps(
            folder / "landscape.png",
            {"best policy": np.asarray(truth)}
            | {label: outcomes[variant]["landscape"] for label, variant in STORY.items()},
            EXTENT,
            (0.0, 250.0),
            squares={"reached before the last of 10 steps": 11.0, "cliff": plane.CLIFF},
            title="Value of a point: min Q at the policy's action, first seed",
        )
    for part, name, values in (("k", "length", LENGTHS), ("N", "critics", CRITICS)):
        if set(PARTS[part]) <= set(rows):
            last = np.stack([rows[variant]["return"] for variant in PARTS[part]])
            plot.lines(
                folder / f"sweep_{part}.png",
                {"each seed's mean": (values, last.mean(1), last.min(1), last.max(1))},
                {"length": "steps of a rollout, k", "critics": "critics, N"}[name],
                "return of an episode",
                title={"k": "Two critics, rollouts of k steps", "N": "N critics, rollouts of 10 steps"}[part],
                note="mean, worst and best seed",
            )


def _grid() -> Array:
    axis = jnp.linspace(-EXTENT, EXTENT, 81)
    return jnp.stack(jnp.meshgrid(axis, axis), -1)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    yield "# The edge-of-reach problem on a plane"
    yield studies.origin(result)
    yield (
        f"After {settings['epochs'] * settings['updates']} updates, {settings['seeds']} seeds: mean return of an "
        "episode with its range (the best is about 36.5), mean Q on batches, share of next states that are "
        "edge-of-reach, and the mean value that targets continue with there and elsewhere."
    )
    head = ("agent", "return [worst, best seed]", "failed", "Q", "edge share", "V there", "V elsewhere")
    yield studies.table(head, map(_row, result["rows"]))
    names = {row["patch"] for row in result["rows"]}
    if any(name.startswith("random") for name in names):
        yield "*random*: as many rows of each batch as are at the edge of reach there, drawn anew in every batch."
    if shares := [
        f"{row['corrected'].mean():.2%} ({row['name']})" for row in result["rows"] if "corrected" in row
    ]:
        yield (
            f"*fixed*: all states in random cells of side {CELL:g}, the same from the first update to the last; in the "
            f"last epoch they held {', '.join(shares)} of the next states."
        )


def _row(row: Mapping[str, Any]) -> list[str]:
    scores = row["return"]
    return [
        row["name"],
        f"{scores.mean():.1f} [{scores.min():.1f}, {scores.max():.1f}]",
        f"{row['failed']}/{len(scores)}",
        f"{row['q'].mean():.0f}",
        f"{row['edge_share'].mean():.2%}",
        f"{row['edge_q'].mean():.0f}",
        f"{row['elsewhere_q'].mean():.0f}",
    ]


if __name__ == "__main__":
    studies.main(Settings(), run)
