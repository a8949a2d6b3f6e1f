"""Why offline model-based agents fail when their model is perfect, and what repairs them (RAVL, NeurIPS 2024).

    python -m experiments.papers.edge_of_reach

The world is `rl.envs.plane`, known exactly: there is no model error that any penalty could see. Agents start rollouts
of k steps from logged states and learn from nothing else. Some points can be reached at the last step only; targets
continue from their values, and nothing ever trains these. The study asks, with several seeds each:

  story     base (two critics) at k = 10 and with whole episodes; an oracle that corrects the values of those points
            alone; the same oracle at as many points chosen at random; RAVL's ensemble
  k and N   base with other rollout lengths; k = 10 with other numbers of critics
  ablation  minimum over N critics x EDAC's diversity x value head: is a bounded support enough?
  support   two critics with categorical heads whose support is ten times as wide, with as narrow bins: is it the bound?
  start     two and twenty critics from other initial weights
  oracle    other corrections: those points worth 0 instead of their value; the points that the last two steps reach

and checks the outcome that the paper's argument predicts. By default the story and the sweeps are run, 40 minutes of
one core; the ablation alone is an hour and a half. What is finished in --workdir under the same commit is not trained
again: parts may be run side by side, and then all for one report: --parts=story,k,N,ablation,support,start,oracle.

Published are k = 10, the horizon of 30 and the oracle; the random control, the sweeps and the ablation are what
reviewers asked for, or new.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import log, model_based, plot, train
from rl.agents import sac_n
from rl.dynamics import base, termination
from rl.envs import plane
from rl.replay.dataset import Dataset
from rl.types import Array, Key, Learner, Metrics, Params, State, Transition
from rl.values import heads

WORLD = base.true(plane.step)
DISCOUNT = 0.99
SUPPORT = (-100.0, 130.0)  # of categorical heads: the worst and the best reward, for ever
LOGGED = 100_000  # states
EVALUATED = 256  # episodes of an evaluation
EXTENT = 20.0  # of the value landscape, in each direction


class Variant(NamedTuple):
    """One kind of agent."""

    critics: int = 2  # N
    length: int = 10  # k
    diversity: float = 0.0  # eta
    head: str = "scalar"
    support: float = 1.0  # of a categorical head, in widths of `SUPPORT`
    start: str = "biased"  # initial weights; see `started`
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
STARTS = ("biased", "library", "transposed")
ABLATION = [
    Variant(critics, 10, diversity, head) for head in HEADS for critics in (2, 20) for diversity in (0.0, 0.1)
]
ORACLES = [
    Variant(patch=patch) for patch in ("edge", "random", "edge, worth 0", "random, worth 0", "last two steps")
]
START = [Variant(critics, start=start) for start in STARTS for critics in (2, 20)]


@dataclasses.dataclass(frozen=True)
class Settings:
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
    out: str = "results/papers/edge_of_reach"  # where result.json, the figures and the table land


PARTS: dict[str, list[Variant]] = {
    "story": list(STORY.values()),
    "k": [Variant(length=k) for k in LENGTHS],
    "N": [Variant(critics=n) for n in CRITICS],
    "ablation": ABLATION,
    "support": [Variant(head=head, support=width) for head in HEADS[1:] for width in (1.0, 10.0)],
    "start": START,
    "oracle": ORACLES,
}


class Outcome(NamedTuple):
    """What a variant's agents did; [T] are epochs and [S] seeds."""

    metrics: dict[str, np.ndarray]  # {name: [T, S]}
    landscape: np.ndarray  # [H, W] the first seed's values of the plane
    seconds: float = 0.0


def run(settings: Settings) -> dict[str, Any]:
    """Trains all variants, writes what came out, and returns what result.json holds.

    Raises:
      ValueError: an unknown part, or too few seeds for an interval.
    """
    variants = chosen(settings)
    outcomes: dict[Variant, Outcome] = {}
    with log.progress(len(variants) * settings.epochs, "edge of reach") as bar:
        for variant in variants:
            bar.set_postfix_str(describe(variant))
            outcome = recall(settings, variant)
            if outcome:
                bar.update(settings.epochs)
            else:
                outcome = train_variant(settings, variant, bar.update)
                remember(settings, variant, outcome)
            outcomes[variant] = outcome
    result = {
        **log.provenance(),
        "settings": dataclasses.asdict(settings),
        "wall_seconds": sum(outcome.seconds for outcome in outcomes.values()),
        "variants": [
            {"name": describe(variant), **variant._asdict(), **summary(outcome.metrics)}
            for variant, outcome in outcomes.items()
        ],
        "checks": checks(outcomes),
    }
    folder = Path(settings.out)
    studies.write(folder, result, table(result, outcomes))
    draw(folder, settings, outcomes)
    return result


def chosen(settings: Settings) -> list[Variant]:
    """The variants of all parts asked for, each once."""
    parts = settings.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts has {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    studies.check_seeds(settings.seeds)
    return list(dict.fromkeys(variant for part in parts for variant in PARTS[part]))


def describe(variant: Variant) -> str:
    """A variant in a few words: what differs from base at k = 10."""
    words = [f"N = {variant.critics}", f"k = {variant.length}"]
    words += [f"eta = {variant.diversity:g}"] if variant.diversity else []
    words += [f"{variant.start} start"] if variant.start != "biased" else []
    words += [variant.head] if variant.head != "scalar" else []
    words += [f"support x {variant.support:g}"] if variant.support != 1 else []
    words += [f"oracle ({variant.patch})"] if variant.patch else []
    return ", ".join(words)


def recall(settings: Settings, variant: Variant) -> Outcome | None:
    """What is finished of ``variant``, if it was trained by these settings and this commit."""
    commit, path = log.commit(), _file(settings, variant)
    if commit is None or commit.endswith("-dirty") or not path.exists():
        return None
    with np.load(path) as found:
        arrays = dict(found)
    if str(arrays.pop("identity")) != _identity(settings, variant, commit):
        return None
    seconds, drawn = arrays.pop("seconds").item(), arrays.pop("landscape")
    return Outcome(arrays, drawn, seconds)


def remember(settings: Settings, variant: Variant, outcome: Outcome) -> None:
    """Stores what `recall` finds."""
    path = _file(settings, variant)
    path.parent.mkdir(parents=True, exist_ok=True)
    with log.replacing(path) as partial, partial.open("wb") as file:
        np.savez(
            file,
            identity=_identity(settings, variant, log.commit()),
            seconds=outcome.seconds,
            landscape=outcome.landscape,
            **outcome.metrics,
        )


def _file(settings: Settings, variant: Variant) -> Path:
    return Path(settings.workdir) / f"{describe(variant)}.npz"


def _identity(settings: Settings, variant: Variant, commit: str | None) -> str:
    """All that an outcome depends on."""
    places = ("parts", "workdir", "out")
    chosen = {name: x for name, x in dataclasses.asdict(settings).items() if name not in places}
    return json.dumps({"commit": commit, **variant._asdict(), **chosen})


# ---- training ---------------------------------------------------------------------------------------------


def train_variant(settings: Settings, variant: Variant, finished: Callable[[int], Any]) -> Outcome:
    """All seeds of one variant; ``finished`` is told of every epoch by the number 1."""
    began = time.time()
    config = sac_n.Config(DISCOUNT, variant.critics, variant.diversity, hidden=settings.hidden)
    low, high = (variant.support * end for end in SUPPORT)
    head = heads.make(variant.head, low, high, round(50 * variant.support) + 1)
    learner = sac_n.make(config, plane.SPEC, head)
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
            learner, learner.critics, WORLD, lambda point, *_: plane.edge_of_reach(point, variant.length)
        ),
    )
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    source = model_based.Source(logged(jax.random.key(settings.seed)), ())
    epoch = model_based.over_seeds(loop.epoch, batched=jax.default_backend() != "cpu")
    start = jax.jit(jax.vmap(loop.init, (0, None)))(keys, source.dataset)
    evaluate = jax.jit(jax.vmap(lambda state: episode_return(learner, state)))
    rows = []
    for carry, report in train.epochs(epoch, start, source, keys, settings.epochs):
        rows.append({**report.metrics, "return": evaluate(carry.learner)})
        finished(1)
    metrics = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
    first = jax.tree.map(lambda x: x[0], carry.learner)
    drawn = np.asarray(jax.jit(landscape, static_argnums=0)(learner, first))
    return Outcome(metrics, drawn, time.time() - began)


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

    They continue with the best policy's true value at the ``edge`` of reach, at as many states chosen at ``random``, or
    at those that only the ``last two steps`` reach, few of which are ever trained; or with 0, where it ends in
    ``worth 0``.
    """
    if not variant.patch:
        return learner
    length = variant.length - (variant.patch == "last two steps")
    worth = 0.0 if variant.patch.endswith("worth 0") else DISCOUNT

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        choice_key, update_key = jax.random.split(key)
        where = plane.edge_of_reach(batch.next_observation, length)
        if variant.patch.startswith("random"):
            where = jax.random.permutation(choice_key, where)
        known = worth * plane.value(batch.next_observation, DISCOUNT)
        corrected = batch._replace(
            reward=batch.reward + jnp.where(where, known, 0.0), discount=batch.discount * ~where
        )
        return learner.update(state, corrected, update_key)

    return learner._replace(update=update)


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


def checks(outcomes: Mapping[Variant, Outcome]) -> dict[str, bool]:
    """What the argument predicts, of those variants that were run: for all seeds, not on average."""
    predictions: dict[str, tuple[Variant, Callable[[dict[str, np.ndarray]], np.ndarray]]] = {
        "base fails, its Q above 150": (BASE, lambda m: (m["return"] < 0) & (m["q"] > 150)),
        "whole episodes work": (WHOLE, lambda m: m["return"] > 30),
        "the oracle at the edge of reach repairs it": (Variant(patch="edge"), lambda m: m["return"] > 30),
        "the oracle elsewhere does not": (Variant(patch="random"), lambda m: m["return"] < 0),
        "nor do values of 0 elsewhere": (Variant(patch="random, worth 0"), lambda m: m["return"] < 0),
        "values of 0 at the edge repair it": (Variant(patch="edge, worth 0"), lambda m: m["return"] > 30),
        "RAVL works": (RAVL, lambda m: m["return"] > 35),
    }
    return {
        name: bool(holds({key: values[-1] for key, values in outcomes[variant].metrics.items()}).all())
        for name, (variant, holds) in predictions.items()
        if variant in outcomes
    }


def draw(folder: Path, settings: Settings, outcomes: Mapping[Variant, Outcome]) -> None:
    """The story, the value landscape and the two sweeps, of what was run."""
    if set(STORY.values()) <= set(outcomes):
        updates = settings.updates * np.arange(1, settings.epochs + 1)

        def curves(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
            return {label: (updates, outcomes[variant].metrics[name]) for label, variant in STORY.items()}

        plot.learning_curves(
            folder / "story.png",
            {"return of an episode": curves("return"), "mean Q on training batches": curves("q")},
            title="A perfect model, truncated rollouts",
        )
        truth = plane.value(_grid(), DISCOUNT)
        plot.maps(
            folder / "landscape.png",
            {"best policy": np.asarray(truth)}
            | {label: outcomes[variant].landscape for label, variant in STORY.items()},
            EXTENT,
            (0.0, 250.0),
            squares={"reached before the last of 10 steps": 11.0, "cliff": plane.CLIFF},
            title="Value of a point: min Q at the policy's action, first seed",
        )
    for part, name, values in (("k", "length", LENGTHS), ("N", "critics", CRITICS)):
        if set(PARTS[part]) <= set(outcomes):
            last = np.stack([outcomes[variant].metrics["return"][-1] for variant in PARTS[part]])
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


def table(result: dict[str, Any], outcomes: Mapping[Variant, Outcome]) -> Iterator[str]:
    """The lines of a Markdown report."""
    settings = result["settings"]
    yield "# The edge-of-reach problem on a plane"
    yield ""
    yield f"`{result['command']}`, {result['wall_seconds'] / 60:.0f} minutes of training."
    yield ""
    yield (
        f"After {settings['epochs'] * settings['updates']} updates, {settings['seeds']} seeds: mean return of an "
        "episode with its range (the best is about 36.5), mean Q on batches, share of next states that are "
        "edge-of-reach, and the mean value that targets continue with there and elsewhere."
    )
    yield ""
    yield "| agent | return [worst, best seed] | failed | Q | edge share | V there | V elsewhere |"
    yield "|---|---|---|---|---|---|---|"
    for variant in outcomes:
        last = {name: values[-1] for name, values in outcomes[variant].metrics.items()}
        scores = last["return"]
        yield (
            f"| {describe(variant)} | {scores.mean():.1f} [{scores.min():.1f}, {scores.max():.1f}] "
            f"| {(scores < 0).sum()}/{len(scores)} | {last['q'].mean():.0f} | {last['edge_share'].mean():.2%} "
            f"| {last['edge_q'].mean():.0f} | {last['elsewhere_q'].mean():.0f} |"
        )
    yield ""
    yield from studies.verdicts("| what the argument predicts | in every seed |", result["checks"])


if __name__ == "__main__":
    studies.main(Settings(), run)
