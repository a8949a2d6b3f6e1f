"""Model losses that ask a value function (VaGraM, Voelcker et al., ICLR 2022): what they gain, and when.

    python -m experiments.papers.vagram
    python -m experiments.papers.vagram --parts=pendulum --losses=mse,vagram --widths=8

Everything takes about 85 minutes of one core, the second line about 5. What --stored=FOLDER,... holds is taken from
there and not trained again.

No number of the paper's can be found anywhere, so that all here are ours: problems, data and results. Where something
is published it is a sentence; the thresholds of some claims are those of a prototype of ours. The losses are those of
`rl.dynamics.value_aware`, models and values the library's networks, the distractors those of the paper's code
(`rl.envs.distractors`, one map for all seeds).

- pendulum: Pendulum-v1 with distractors. A model with one hidden layer learns the next observation (the reward is
  known) from uniform states and torques. The value function is known: a network, fitted to value iteration on a grid,
  that sees the whole observation and had to learn to ignore the distractors. Then one-step greedy control with the
  model, ``max_a r(s, a) + gamma V(f(s, a))``, from hanging starts. *anisotropic* is VaGraM whose weights are given to
  other dimensions by one random permutation for each seed, *anisotropic_rows* by a new one for each row: the controls
  that tell what a value knows from what uneven weights do. Distractors vary more than what the value depends on, so
  that *mse* spends its units on them; *standardised* does not, and asks no value. Models predict s' - s, as those of
  `rl.dynamics` do; in *16 of noise predicted whole* they predict s', so that noise that nobody can foresee needs no
  unit of theirs.
- landscape: what each loss charges for every prediction of one next state.
- changing: the value is learned from the model while the model learns from the value. Every update of the model is
  followed by one of the value, on ``max_a r + gamma V'(f(s, a))`` at states of the data, V' a target network. Beside
  it, the same value learned from the true model.
- toy: a transition with two outcomes, -1 and 1, and V(s) = s^2 + s. A Gaussian without inputs learns it; the least
  values of all losses have closed forms.
- heads: values of the optimal policy, learned by temporal differences with each value head, from rewards with and
  without noise. Their gradients beside those of the grid, and models that are fitted with them as weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import studies
from experiments.papers import vagram_parts as trained
from experiments.papers.vagram_parts import (
    CHANGING,
    CHEAP,
    GOLDEN,
    HEADS,
    MANY,
    NARROW,
    NOISE,
    PARTS,
    PIECES,
    PLAIN,
    SAMPLES,
    TOY,
    WHOLE,
    WORLDS,
    Settings,
    expected,
)
from rl import plot
from rl.dynamics import value_aware

_IN_WORDS = {
    "mle": "MLE",
    "mse": "MSE",
    "vagram": "VaGraM",
    "taylor": "Taylor",
    "vaml": "VAML",
    "value_weighted": "weighted by |V|",
    "anisotropic": "anisotropic, same for all rows",
    "anisotropic_rows": "anisotropic, anew for each row",
}


def run(settings: Settings) -> dict[str, Any]:
    """Runs the parts, and writes and returns what came out.

    Raises:
      ValueError: an unknown part or loss, too few seeds, updates that measurements do not divide, or stored results
        of other settings.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    chosen = studies.names("losses", settings.losses, value_aware.LOSSES)
    studies.check_seeds(settings.seeds)
    for flag in ("value_updates", "updates", "changing_updates", "toy_updates", "heads_updates"):
        if getattr(settings, flag) % PIECES:
            raise ValueError(
                f"--{flag}={getattr(settings, flag)} must be a multiple of {PIECES}, the number of measurements"
            )
    earlier = studies.stored_results(settings, choosing=("widths",))
    work: dict[str, tuple[Callable[..., Any], int]] = {}
    if "pendulum" in parts:
        for world in WORLDS:
            work[f"pendulum, {world}"] = (partial(trained.known, settings, world), 1)
            for width in (NARROW,) if world in (NOISE, WHOLE) else settings.widths:
                for loss in chosen:
                    work[f"pendulum, {world}, {width}, {loss}"] = (
                        partial(trained.fixed, settings, world, width, loss), PIECES
                    )  # fmt: skip
    if "landscape" in parts:
        work["landscape"] = (partial(trained.landscape, settings), 1)
    if "changing" in parts:
        for loss in (*chosen, trained.TRUE):
            work[f"changing, {loss}"] = (partial(trained.changing, settings, loss), PIECES)
    if "toy" in parts:
        for loss in TOY:
            work[f"toy, {loss}"] = (partial(trained.toy, settings, loss), PIECES)
    if "heads" in parts:
        for noise, head in itertools.product(trained.REWARD_NOISE, HEADS):
            work[f"heads, {noise:g}, {head}"] = (partial(trained.of_head, settings, head, noise), 2 * PIECES)
    before = {name: one for result in earlier for name in work if (one := held(result, name))}
    # What is compared decides which variants there are, not what becomes of one.
    of_all = studies.chosen(settings, "losses", "widths")
    variants = {
        name: studies.Variant(function, of_all, steps)
        for name, (function, steps) in work.items()
        if name not in before
    }
    finished = studies.train(settings, variants, "VaGraM")
    outcomes: dict[str, Any] = {part: {} for part in PARTS if part in parts}
    for name in work:
        outcome = before[name].outcome if name in before else finished.outcomes[name]
        part, *where = name.split(", ")
        place = outcomes
        for step in (part, *where)[:-1]:
            place = place.setdefault(step, {})
        place.setdefault((part, *where)[-1], {}).update(outcome)
    # Results into which one training was divided have the same time to the last bit: it counts once.
    seconds = finished.seconds + sum({one["wall_seconds"] for one in earlier})
    outcomes = {"wall_seconds": seconds, **outcomes}
    if makers := finished.others | {name: one.provenance for name, one in before.items()}:
        outcomes["rows"] = studies.named(work, makers)
    result = studies.finish(settings, outcomes, report, claims)
    if "pendulum" in result:
        studies.write_blocks(Path(settings.out) / POINTS, points(result))
    draw(Path(settings.out), result)
    return result


class Held(NamedTuple):
    """What another command trained."""

    outcome: dict[str, Any]
    provenance: dict[str, Any]


def held(result: Mapping[str, Any], name: str) -> Held | None:
    """What a result holds of what `run` trains under this name; None if it has not been trained there."""
    path = name.split(", ")
    outcome: Any = result
    for step in path:
        if step not in outcome:
            return None
        outcome = outcome[step]
    if path[0] == "pendulum" and len(path) == 2:  # the world itself; its models have names of their own
        outcome = {"known": outcome["known"]}
    return Held(outcome, studies.provenance(result, name))


# ---- reports -------------------------------------------------------------------------------------------------------

POINTS = "points.md"  # the long tables
PROTOTYPE = "our prototype, with other distractors: "
PAPER = "VaGraM (Voelcker et al., ICLR 2022), "


def within(share: float) -> studies.Predicate:
    """The mean over seeds is 1 to within ``share``, by its interval."""
    return studies.mean_within(1 - share, 1 + share)


def above(bound: float) -> studies.Predicate:
    return studies.every(lambda x: x > bound)


def below(bound: float) -> studies.Predicate:
    return studies.every(lambda x: x < bound)


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper says in words, what our prototype saw, and what we ask."""
    for part, of in {
        "pendulum": _pendulum_claims,
        "landscape": _landscape_claims,
        "changing": _changing_claims,
        "toy": _toy_claims,
        "heads": _heads_claims,
    }.items():
        if part in result:
            yield from of(result[part])


def _pendulum_claims(worlds: Mapping[str, Any]) -> Iterator[studies.Claim]:
    published = studies.published("vagram")["pendulum"]
    many, plain = (worlds.get(name, {}).get(str(NARROW), {}) for name in (MANY, PLAIN))
    place = f"{MANY}, width {NARROW}"
    weight = worlds[MANY]["known"]["weight"]
    text = f"{MANY}: VaGraM's mean weight on distractors, in largest weights, is below 1 %"
    yield studies.Claim(text, f"{PROTOTYPE}by construction", weight, below(0.01))
    for loss in ("vagram", "taylor", "vaml"):
        if loss in many:
            text = f"{place}: with a known value {loss} returns more than -500"
            yield studies.Claim(text, PROTOTYPE + published[loss], many[loss]["return"], above(-500))
    if "mse" in many:
        text = f"{place}: mse returns less than -1200 on average"
        bad = studies.mean_within(high=-1200)
        yield studies.Claim(text, PROTOTYPE + published["mse"], many["mse"]["return"], bad)
    if {"mse", "vagram"} <= plain.keys():
        text = f"{PLAIN}, width {NARROW}: returns of vagram and mse differ by at most 15 % (ratio)"
        ratio = plain["vagram"]["return"] / plain["mse"]["return"]
        yield studies.Claim(text, PROTOTYPE + published["plain"], ratio, within(0.15))
    if {"mse", "vagram"} <= many.keys():
        text = f"{place}: the value error of vagram is smaller than that of mse (log of the ratio)"
        ratio = GAINS["value error"](many["vagram"], many["mse"])
        yield studies.Claim(text, PROTOTYPE + published["value_error"], ratio, studies.positive)
    controls = {
        "standardised": "squared errors over the variance of each dimension",
        "anisotropic": "a random permutation of its weights for each seed",
        "anisotropic_rows": "of a random permutation of its weights for each row",
        "value_weighted": "weights |V|, equal in all dimensions",
    }
    for loss, meaning in controls.items():
        if {loss, "vagram"} <= many.keys():
            text = f"{place}: the value error of vagram is smaller than that of {loss} (log of the ratio)"
            ratio = GAINS["value error"](many["vagram"], many[loss])
            yield studies.Claim(text, studies.OURS, ratio, studies.positive)
            text = f"{place}: vagram returns more than {loss}, {meaning} (difference)"
            gain = many["vagram"]["return"] - many[loss]["return"]
            yield studies.Claim(text, studies.OURS, gain, studies.positive)
        if {loss, "mse"} <= many.keys():
            text = f"{place}: {loss} returns more than mse (difference)"
            yield studies.Claim(
                text, studies.OURS, many[loss]["return"] - many["mse"]["return"], studies.positive
            )
    for name, where in (
        (NOISE, "expected before the study (ours): noise costs no capacity in expectation"),
        (WHOLE, "ours: such models need not cancel the last noise, which s' - s holds"),
    ):
        row = worlds.get(name, {}).get(str(NARROW), {})
        if {"mse", "vagram"} <= row.keys():
            text = f"{name}, width {NARROW}: vagram returns less than 100 more than mse (mean difference)"
            gain = row["vagram"]["return"] - row["mse"]["return"]
            yield studies.Claim(text, where, gain, studies.mean_within(high=100))


def _landscape_claims(outcome: Mapping[str, Any]) -> Iterator[studies.Claim]:
    reach = outcome["reach"]
    for loss, where in (
        ("vaml", f"{PAPER}authors' blog: VAML follows the value's iso-lines"),
        ("taylor", f"{PAPER}in words: of rank one, unbounded where the gradient is 0"),
    ):
        text = f"landscape: predictions that {loss} charges little reach farther than vagram's (difference)"
        yield studies.Claim(text, where, reach[loss] - reach["vagram"], studies.positive)
    text = "landscape: vagram's cheap predictions reach less than half as far as vaml's (ratio)"
    where = f"{PAPER}authors' blog: it is centred on the sample, as plain errors are"
    yield studies.Claim(text, where, reach["vagram"] / reach["vaml"], below(0.5))


def _changing_claims(curves: Mapping[str, Any]) -> Iterator[studies.Claim]:
    if "vagram" not in curves:
        return
    place = f"changing value, {CHANGING[0]}, width {CHANGING[1]}"
    for loss, where in (
        ("taylor", f"{PAPER}in words: the bounded loss is stable, Taylor's is not"),
        ("vaml", f"{PAPER}in words: VAML is unstable where the value is not yet learnt"),
        ("mse", studies.OURS),
        ("standardised", studies.OURS),
        ("anisotropic", studies.OURS),
    ):
        if loss in curves:
            for what, summary in (("the mean", late), ("the worst", worst)):
                text = f"{place}: {what} return in the second half is higher by vagram than by {loss} (difference)"
                gain = summary(curves["vagram"]["return"]) - summary(curves[loss]["return"])
                yield studies.Claim(text, where, gain, studies.positive)


def late(curve: np.ndarray) -> np.ndarray:
    """The mean [S] over the second half of the measurements [PIECES, S]."""
    return curve[len(curve) // 2 :].mean(0)


def worst(curve: np.ndarray) -> np.ndarray:
    """The smallest [S] of the second half of the measurements [PIECES, S]."""
    return curve[len(curve) // 2 :].min(0)


def _toy_claims(curves: Mapping[str, Any]) -> Iterator[studies.Claim]:
    end = {loss: (row["mean"][-1], row["deviation"][-1]) for loss, row in curves.items()}
    later = "Calibrated VAML (arXiv 2505.22772), in words"
    text = "toy: raw VAML collapses the deviation, below 0.05"
    yield studies.Claim(text, later, end["vaml"][1], below(0.05))
    text = f"toy: raw VAML ends at the closed form, mean {GOLDEN:.3f} (distance, below 0.02)"
    yield studies.Claim(text, "closed form", np.abs(end["vaml"][0] - GOLDEN), below(0.02))
    text = "toy: the calibrated loss keeps the deviation, above 0.3"
    yield studies.Claim(text, later, end["calibrated"][1], above(0.3))
    text = "toy: the calibrated loss ends where E V(s^) = E V(s') (distance, below 0.05)"
    off = np.sqrt(expected("calibrated", *end["calibrated"]))
    yield studies.Claim(text, "closed form", off, below(0.05))
    text = "toy: the likelihood ends at mean 0 and deviation 1 (largest distance, below 0.05)"
    off = np.maximum(np.abs(end["mle"][0]), np.abs(end["mle"][1] - 1))
    yield studies.Claim(text, "closed form", off, below(0.05))


def _heads_claims(outcome: Mapping[str, Any]) -> Iterator[studies.Claim]:
    for noise, rows in outcome.items():
        for head in HEADS[1:]:
            if {head, "scalar"} <= rows.keys():
                place = f"heads, reward noise {noise}"
                text = f"{place}: the gradient of {head} is closer to the grid's than scalar's (cosine, difference)"
                closer = rows[head]["cosine"] - rows["scalar"]["cosine"]
                yield studies.Claim(text, studies.OURS, closer, studies.positive)
                text = f"{place}: vagram with {head} has a smaller value error than with scalar (log of the ratio)"
                ratio = np.log(rows["scalar"]["value_error"] / rows[head]["value_error"])
                yield studies.Claim(text, studies.OURS, ratio, studies.positive)


# What a model is worth -> how much better one is than another, per seed: of two rows, the first's gain.
GAINS: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "value error": lambda one, other: np.log(other["value_error"] / one["value_error"]),
    "return": lambda one, other: one["return"] - other["return"],
}


def sentence(result: Mapping[str, Any]) -> str:
    """What the random control says of VaGraM's gain, by both measures."""
    many = result.get("pendulum", {}).get(MANY, {}).get(str(NARROW), {})
    if not {"mse", "vagram", "anisotropic"} <= many.keys():
        return "Without mse, vagram and anisotropic there is no answer to what VaGraM gains by."
    sentences = " ".join(f"By {measure}, {_comparison(many, gain)}." for measure, gain in GAINS.items())
    return f"With {MANY} and {NARROW} hidden units: {sentences}"


def _comparison(many: Mapping[str, Any], gain: Callable[[Any, Any], np.ndarray]) -> str:
    vagram, random, plain = many["vagram"], many["anisotropic"], many["mse"]
    better = lambda one, other: studies.positive(gain(one, other))[0]  # None: not decided
    over_plain, over_random, uneven = better(vagram, plain), better(vagram, random), better(random, plain)
    if not over_plain:
        return f"VaGraM {'is worse than' if over_plain is False else 'shows no gain over'} plain errors"
    if not over_random:
        relation = "is smaller than" if over_random is False else "is not told apart from"
        return f"VaGraM's gain {relation} that of its weights given to random dimensions"
    if uneven:
        return "uneven weights alone gain something, and knowing which dimensions the value depends on gains more"
    control = (
        "whether its weights given to random dimensions gain anything over plain errors is not decided"
        if uneven is None
        else "its weights given to random dimensions are worse than plain errors"
    )
    if "standardised" not in many:
        return f"VaGraM gains, and more than its weights given to random dimensions; {control}"
    over_standardised = better(vagram, many["standardised"])
    if not over_standardised:
        relation = "is smaller than" if over_standardised is False else "is not told apart from"
        return (
            f"VaGraM's gain {relation} that of squared errors over the variance of each dimension, which ask no value; "
            f"{control}"
        )
    return (
        "VaGraM gains by what the value knows, more than squared errors over the variance of each dimension do; "
        f"{control}"
    )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """What came out, in tables."""
    settings = result["settings"]
    yield "# VaGraM: models that know what values need"
    command = f"`{result['command']}`, {result['wall_seconds']:.0f} s on {result['hardware']['cores']} cores."
    yield (
        f"{studies.origin(result) if 'rows' in result else command} "
        f"{studies.program(result, __file__)} says what is compared. All problems, data and "
        f"numbers are ours: of the paper's own there are none to compare with. {settings['seeds']} seeds; mean "
        "and 95 % interval."
    )
    if "pendulum" in result:
        yield f"**{sentence(result)}**"
        yield from _pendulum_report(result["pendulum"], settings)
    if "landscape" in result:
        yield from _landscape_report(result["landscape"])
    if "changing" in result:
        yield from _changing_report(result["changing"], settings)
    if "toy" in result:
        yield from _toy_report(result["toy"], settings)
    if "heads" in result:
        yield from _heads_report(result["heads"], settings)


def _pendulum_report(worlds: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Pendulum: a known value"
    yield f"{settings['updates']:,} updates on {settings['transitions']:,} transitions."
    yield from _world_tables(MANY, worlds[MANY])
    many = worlds[MANY].get(str(NARROW), {})
    if many:
        yield "![returns](returns.png)\n\n![value error against width](value_error.png)"
        yield f"### {MANY}, width {NARROW}: where the errors are"
        yield "Squared errors per dimension."
        yield studies.table(
            ("loss", "pendulum", "distractors"),
            [
                (
                    loss,
                    studies.between(row["task_error"], ".3g"),
                    studies.between(row["distractor_error"], ".3g"),
                )
                for loss, row in many.items()
            ],
        )
    yield (
        f"[Other distractors]({POINTS}) have the same tables. The value behind each is worth this: how far it is from "
        "the grid's (root of the mean square), VaGraM's mean weight on distractors in largest weights, and the return "
        "of greedy control with the true model."
    )
    yield studies.table(
        ("", "error of V", "weight on distractors", "return, true model"),
        [
            (
                name,
                studies.between(world["known"]["value_rmse"]),
                f"{world['known']['weight'].mean():.1e}",
                studies.between(world["known"]["true_return"], ".0f"),
            )
            for name, world in worlds.items()
        ],
    )


def points(result: Mapping[str, Any]) -> Iterator[str]:
    """The tables of the pendulum with other distractors than the report's."""
    yield "# VaGraM: every width, loss and kind of distractors"
    for name, world in result["pendulum"].items():
        if name != MANY:
            yield from _world_tables(name, world)


def _world_tables(name: str, world: Mapping[str, Any]) -> Iterator[str]:
    """Returns and value errors of all losses and widths."""
    widths = _widths(world)
    for what, title, style in (
        ("return", "return of greedy control", ".0f"),
        ("value_error", "value error, E (V(s^') - V(s'))^2", ".3g"),
    ):
        if widths:
            yield f"### {name}: {title}"
            yield studies.table(
                ("loss", *(f"width {width}" for width in widths)),
                [
                    (loss, *(studies.between(world[width][loss][what], style) for width in widths))
                    for loss in world[widths[0]]
                ],
            )


def _widths(world: Mapping[str, Any]) -> list[str]:
    return sorted((name for name in world if name != "known"), key=int)


def _landscape_report(outcome: Mapping[str, Any]) -> Iterator[str]:
    yield "## Landscape: what losses charge"
    angle, speed = outcome["truth"]
    yield (
        f"Pictures: log10 of the loss over its median, for predictions of the next state at angle {angle:.2f} (half "
        f"turns) and velocity {speed:.2f} (of the largest). Table: the largest distance of predictions that cost less "
        f"than {CHEAP:.0%} of the median, mean over {SAMPLES} states of each seed."
    )
    yield studies.table(
        ("loss", "reach"), [(loss, studies.between(x)) for loss, x in outcome["reach"].items()]
    )
    yield "![loss landscapes](landscape.png)"


def _changing_report(curves: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Changing: a value learned from the model"
    yield (
        f"{CHANGING[0]}, width {CHANGING[1]}, {settings['changing_updates']:,} updates of both. Returns of greedy "
        "control with this model and this value over the second half of the measurements, their worst, and "
        "at the end: how far the value is above the grid's, mean and standard deviation over states, and the "
        "error of the model."
    )
    yield studies.table(
        ("loss", "mean return", "worst return", "V above the grid's", "its spread", "pendulum error"),
        [
            (
                loss,
                studies.between(late(row["return"]), ".0f"),
                studies.between(worst(row["return"]), ".0f"),
                studies.between(row["bias"][-1], ".3g"),
                studies.between(row["spread"][-1], ".3g"),
                studies.between(row["task_error"][-1], ".3g"),
            )
            for loss, row in curves.items()
        ],
    )
    yield "![learning with a changing value](changing.png)"


def _toy_report(curves: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Toy: two outcomes"
    yield (
        f"After {settings['toy_updates']:,} updates. Closed forms: the likelihood is least at mean 0 and deviation 1; "
        f"raw VAML at mean {GOLDEN:.3f} and deviation 0; the calibrated loss wherever m^2 + d^2 + m = 1, which the "
        "likelihood's minimum is one of. In brackets the smallest and largest of all seeds, which start apart."
    )
    yield studies.table(
        ("loss", "mean", "deviation", "E V(s^) - E V(s')"),
        [
            (
                loss,
                studies.extremes(row["mean"][-1]),
                studies.extremes(row["deviation"][-1]),
                studies.extremes(row["mean"][-1] ** 2 + row["deviation"][-1] ** 2 + row["mean"][-1] - 1),
            )
            for loss, row in curves.items()
        ],
    )
    yield "![deviation of the prediction](toy.png)"


def _heads_report(outcome: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Heads: whose gradients are weights"
    yield (
        f"{MANY}; values of the optimal policy by {settings['heads_updates']:,} updates with temporal differences, "
        f"then models of width {NARROW} with VaGraM. Errors of models and returns are with the known value of the "
        "first part, the same for all heads."
    )
    columns = {
        "rmse": ("error of V", ".3g"),
        "cosine": ("cosine with the grid's gradient", ".3f"),
        "spread": ("99 % norm over median", ".3g"),
        "weight": ("weight on distractors", ".1e"),
        "value_error": ("value error of the model", ".3g"),
        "return": ("return", ".0f"),
    }
    yield studies.table(
        ("reward noise", "head", *(title for title, _ in columns.values())),
        [
            (noise, head, *(studies.between(row[what], style) for what, (_, style) in columns.items()))
            for noise, rows in outcome.items()
            for head, row in rows.items()
        ],
    )
    yield "![closeness of gradients](heads.png)"


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """The figures of all parts that ran."""
    if "pendulum" in result:
        _draw_pendulum(folder, result["pendulum"])
    if "landscape" in result:
        pictures = {in_words(loss): np.asarray(x) for loss, x in result["landscape"]["picture"].items()}
        plot.maps(
            folder / "landscape.png",
            pictures,
            1.0,
            (-3, 1),
            title="log10 of loss / median over predictions: angle / pi, velocity / 8",
            columns=4,
        )
    if "changing" in result:
        updates = result["settings"]["changing_updates"] // PIECES * np.arange(1, PIECES + 1)
        panels = {
            "return of greedy control": "return",
            "spread of the error of V": "spread",
        }
        plot.learning_curves(
            folder / "changing.png",
            {
                title: {in_words(loss): (updates, row[what]) for loss, row in result["changing"].items()}
                for title, what in panels.items()
            },
            title="Model and value learned from each other",
        )
    if "toy" in result:
        updates = result["settings"]["toy_updates"] // PIECES * np.arange(1, PIECES + 1)
        plot.learning_curve(
            folder / "toy.png",
            {in_words(loss): (updates, row["deviation"]) for loss, row in result["toy"].items()},
            "deviation of the prediction",
            references={"outcomes": 1.0},
            title="Two outcomes, V(s) = s^2 + s",
        )
    if "heads" in result:
        plot.bars(
            folder / "heads.png",
            {
                f"{head.replace('_', ' ')}, noise {noise}": studies.band(row["cosine"])
                for noise, rows in result["heads"].items()
                for head, row in rows.items()
            },
            "cosine of the value's gradient with the grid's, mean and 95 % interval",
        )


def in_words(loss: str) -> str:
    """The name of a loss in figures."""
    return _IN_WORDS.get(loss, loss)


def _draw_pendulum(folder: Path, worlds: Mapping[str, Any]) -> None:
    many = worlds[MANY]
    widths = _widths(many)
    if not widths:
        return
    place = str(NARROW) if str(NARROW) in widths else widths[0]
    plot.bars(
        folder / "returns.png",
        {
            **{in_words(loss): studies.band(row["return"]) for loss, row in many[place].items()},
            "true model": studies.band(many["known"]["true_return"]),
        },
        "return of greedy control, mean and 95 % interval",
        title=f"{MANY}, width {place}",
    )
    plot.lines(
        folder / "value_error.png",
        {
            in_words(loss): (
                [int(width) for width in widths],
                *studies.bands(many[width][loss]["value_error"] for width in widths),
            )
            for loss in many[widths[0]]
        },
        "hidden units of the model",
        "E (V(s^') - V(s'))^2",
        title=MANY,
        logarithmic=True,
    )


if __name__ == "__main__":
    studies.main(Settings(), run)
