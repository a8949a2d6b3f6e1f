"""The page that `experiments.report` makes of its result: Markdown and figures."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments import studies
from rl import plot

WHICH = {
    "last": "Last evaluation",
    "best": "Best evaluation, chosen with hindsight",
    "selected": "Selected evaluation: chosen on half of the episodes (or by estimates), scored on the rest",
}
_CURVES = 8  # the most of one figure
_ROUNDING = 1e-9  # by which the bounds of an interval without width may differ, as a part of them
AGGREGATES = {"iqm": "IQM", "median": "median", "mean": "mean", "optimality_gap": "optimality gap"}


def blocks(result: Mapping[str, Any]) -> Iterator[str]:
    """The page, in blocks of Markdown."""
    files = result["settings"]["files"]
    yield f"# {', '.join(Path(file).stem for file in files)}"
    if result.get("question"):
        yield result["question"]
    yield f"`{result['command']}`, commit {result['commit']}, of {', '.join(f'`{file}`' for file in files)}."
    states = [program["state"] for program in result["programs"]]
    counted = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))
    listed = " What is not done is listed at the end." if {*states} != {"done"} else ""
    yield (
        f"{len(states)} compiled program{'s' * (len(states) > 1)} (the seeds of a setting, or several settings): "
        f"{counted}.{listed}"
    )
    yield from _answers(result)
    if not result["cells"]:
        yield "No agent has all of its runs yet."
    else:
        yield (
            f"Scores are `{result['score']}`, means over episodes and seeds, with 95 % intervals over seeds: "
            + ("Wilson's." if result["rate"] else "Student's.")
        )
        yield from _provenance(result)
        if result["data"]:
            data = [f"{card['transitions']:,} transitions of {task}" for task, card in result["data"].items()]
            scored = any(card.get(result["score"]) is not None for card in result["data"].values())
            column = " *The data* is their mean score." if scored else ""
            yield f"The data were made here: {', '.join(data)}.{column}"
        yield from _aggregate_blocks(result)
        for which, title in WHICH.items():
            yield f"## {_last(result) if which == 'last' else title}"
            yield _table(result, which)
        yield from _tuning_blocks(result)
    if result["cells"]:
        yield from _published_blocks(result)
    yield from _curve_blocks(result)
    yield from _missing(result)


def _last(result: Mapping[str, Any]) -> str:
    """The title of last scores."""
    count = result["settings"].get("evaluations", 1)
    return WHICH["last"] if count == 1 else f"Mean of the last {count} evaluations"


def _answers(result: Mapping[str, Any]) -> Iterator[str]:
    """One line per baseline: who beats it, and on how many tasks."""
    against: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["better"]:
        against.setdefault(row["baseline"], []).append(row)
    for base, of_base in against.items():
        rows = [row for row in of_base if len(row["tasks"])]
        words = []
        for row in (row for row in rows if len(row["better"]) or len(row["worse"])):
            worse = f", worse on {len(row['worse'])}" if len(row["worse"]) else ""
            words.append(f"`{row['variant']}` on {len(row['better'])} of {len(row['tasks'])} tasks{worse}")
        if len(words) < len(rows):
            words.append(f"no other of {len(rows)}" if words else f"no other (0 of {len(rows)})")
        text = "; ".join(words) or "nothing to compare yet"
        compared = {base, *(row["variant"] for row in of_base)}
        without = "".join(_without_interval(result, compared))
        if failed := [*_failed(result, compared)]:
            without += f" Not compared, which flatters those whose runs failed: {'; '.join(failed)}."
        yield f"**Better than `{base}` (95 % intervals of the last scores do not overlap):** {text}.{without}"


def _without_interval(result: Mapping[str, Any], variants: Collection[str]) -> Iterator[str]:
    """Sentences on scores of these variants that are compared with none, as they have no interval."""
    last = [cell["last"] for cell in result["cells"] if cell["variant"] in variants]
    without = [len(one["each"]) for one in last if not has_width(one["ci95"])]
    if 1 in without:
        yield " A single seed has no interval and is not compared."
    if any(seeds > 1 for seeds in without):
        yield " Where all seeds score the same, their spread was not seen, and nothing is compared."


def _provenance(result: Mapping[str, Any]) -> Iterator[str]:
    """What the finished runs were made with, unless it is one machine and the report's code; where data or lengths
    differ, or lines were lost."""
    machines = result["machines"]
    if len(machines) > 1 or any(row["commit"] != studies.short(result["commit"]) for row in machines):
        rows = [f"{row['programs']} of commit {row['commit']} on {row['hardware']}" for row in machines]
        yield f"Finished programs: {'; '.join(rows)}."
    if len(result["other_data"]):
        yield (
            f"**Not the same data:** runs on {', '.join(result['other_data'])} were trained on files that differ, as "
            "their digests say."
        )
    if result["other_lengths"]:
        unit = "environment steps" if result["unit"] == "steps" else "updates"
        tasks = [
            f"on {task} {', '.join(f'`{variant}` {length:,}' for variant, length in of_task.items())}"
            for task, of_task in result["other_lengths"].items()
        ]
        yield f"**Not the same number of {unit}:** {'; '.join(tasks)}."
    for variant, names in result["other_settings"].items():
        flags = {f"--{name}={value} on {task}" for name, of in names.items() for task, value in of.items()}
        yield f"**Not the same settings on all tasks:** `{variant}` has {', '.join(sorted(flags))}."
    if result["lost_lines"]:
        runs = "; ".join(f"{lines} in `{folder}`" for folder, lines in result["lost_lines"].items())
        yield f"**Lines of metrics were lost before a run went on** ({runs}): best and selected scores lack them."


def _style(result: Mapping[str, Any]) -> str:
    return ".2f" if result["rate"] else ".1f"


def has_width(bounds: Sequence[float]) -> bool:
    """Whether an interval says anything: not that of a single seed, nor where all seeds scored the same."""
    low, high = bounds
    return bool(high - low > _ROUNDING * max(1.0, abs(low)))  # NaN is not


def _between(mean: float, bounds: Sequence[float], style: str) -> str:
    """A value with its interval, or alone where there is none: of one seed, or if all resamples agree."""
    if not has_width(bounds):
        return format(float(mean), style)
    return studies.between({"mean": mean, "ci95": bounds}, style)


def _cell(summary: Mapping[str, Any], style: str) -> str:
    """A mean over seeds with its interval; where all of several seeds score the same, their number."""
    seeds = len(summary["each"])
    same = seeds > 1 and not has_width(summary["ci95"])
    return _between(summary["mean"], summary["ci95"], style) + f" (all {seeds} seeds)" * same


def _fewest_seeds(result: Mapping[str, Any]) -> int:
    """Of a variant in the aggregates on a task."""
    return min(
        len(cell["last"]["each"])
        for cell in result["cells"]
        if cell["variant"] in result["aggregates"] and cell["task"] in result["aggregate_tasks"]
    )


def _bootstrap_width(seeds: int, tasks: int) -> float:
    """The width of a stratified bootstrap's 95 % interval of a mean, as a part of what it should be, at most.

    The variance of a resampled mean is that of the seeds seen, not of those that there might be, (S - 1) / S of it; and
    its quantiles are a normal distribution's, not Student's. This is of normal scores that scatter alike on all tasks:
    where some scatter more, fewer degrees of freedom are left, and the interval is narrower still.
    """
    return np.sqrt(1 - 1 / seeds) * stats.norm.ppf(0.975) / stats.t.ppf(0.975, tasks * (seeds - 1))


def _aggregate_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    tasks, aggregates = result["aggregate_tasks"], result["aggregates"]
    if not aggregates:
        if unequal := result.get("unequal_seeds"):
            yield (
                "No aggregates, as these have different numbers of seeds on their tasks: "
                f"{'; '.join(f'`{variant}` {dict(counts)}' for variant, counts in unequal.items())}."
            )
        elif result.get("unaggregated"):
            yield (
                "Aggregates, profiles and probabilities of improvement are over 2 tasks or more that all have "
                f"finished; here there {'is 1' if tasks else 'is none'}. From Python "
                "`rl.statistics.probability_of_improvement` compares on one task, too: it takes `each` of "
                "`result.json` as [seeds, 1]." + _lost_to_failures(result, result["variants"])
            )
        return
    yield "## Aggregates"
    yield _aggregate_caption(result)
    if len(result["profiles"]):
        yield _aggregate_table(result)
        yield "![interquartile means](iqm.png)"
        yield "Performance profile: the share of runs, over seeds and tasks, that score above a threshold."
        yield "![performance profiles](profiles.png)"
    else:
        yield (
            f"There are no means over tasks, as `{result['score']}` has no scale that tasks share: those with large "
            "numbers would decide. Probabilities of improvement compare on each task apart."
        )
    yield from _improvement_blocks(result)


def _aggregate_caption(result: Mapping[str, Any]) -> str:
    """What aggregates are of, and how far their intervals can be trusted."""
    tasks, aggregates = result["aggregate_tasks"], result["aggregates"]
    of = f"Last scores over {len(tasks)} of {len(result['tasks'])} tasks, those that all of these have finished"
    if left := [name for name in result["variants"] if name not in aggregates]:
        failed = "; ".join(_failed(result, left))
        of += (
            f" (without {', '.join(f'`{name}`' for name in left)}, too little of which is finished"
            f"{f': {failed}' * bool(failed)})"
        )
    intervals = "Intervals: stratified bootstrap, seeds resampled within each task"
    if (seeds := _fewest_seeds(result)) > 1 and len(result["profiles"]):
        width = _bootstrap_width(seeds, len(tasks))
        intervals += (
            f", with {seeds} seeds at most {width:.2f} times as wide as they should be, and in the figure of "
            "interquartile means divided by that"
        )
    sentences = [f"{of}.{_lost_to_failures(result, aggregates)}", f"{intervals}."]
    if len(result["profiles"]):
        sentences.append("The optimality gap is how far scores fall short of the optimum.")
    return " ".join(sentences)


def _lost_to_failures(result: Mapping[str, Any], variants: Collection[str]) -> str:
    """A sentence on the tasks that failed runs of these variants take from all of them."""
    if not (failed := [*_failed(result, variants)]):
        return ""
    return (
        f" **Lost to runs that failed: {'; '.join(failed)}.** These tasks count for none, which flatters those whose "
        "runs failed."
    )


def _failed(result: Mapping[str, Any], variants: Collection[str]) -> Iterator[str]:
    """On which tasks runs of these variants diverged or failed, in words."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for row in result.get("failures", []):  # which older results do not tell
        if row["variant"] in variants and row["state"] != "no scores":
            tasks.setdefault((row["variant"], row["state"]), []).append(row["task"])
    for (variant, state), on in tasks.items():
        yield f"`{variant}` {state} on {', '.join(on)}"


def _aggregate_table(result: Mapping[str, Any]) -> str:
    style = _style(result)
    rows = [
        (f"`{variant}`", *(_between(estimates[n]["value"], estimates[n]["ci95"], style) for n in AGGREGATES))
        for variant, estimates in result["aggregates"].items()
    ]
    return studies.table(("", *AGGREGATES.values()), rows)


def _improvement_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    """Probabilities of improvement over the baselines or, without any, of each pair once."""
    against = {row["variant"]: row["baseline"] for row in result["better"]}
    order = list(result["aggregates"])
    pairs = [
        row
        for row in result["improvement"]
        if against.get(row["x"]) == row["y"]
        or (not against and order.index(row["x"]) < order.index(row["y"]))
    ]
    if not pairs:
        return
    yield "Probability that a run of the one scores above a run of the other, on a task drawn at random:"
    yield studies.table(
        ("one", "other", "probability of improvement"),
        [(f"`{r['x']}`", f"`{r['y']}`", _between(r["value"], r["ci95"], ".2f")) for r in pairs],
    )
    if any(r["ci95"][0] == r["ci95"][1] for r in pairs):
        yield (
            "Without an interval where the seeds of both do not overlap on any task: all resamples say the same, "
            "and so few seeds cannot say how often they would."
        )


def _table(result: Mapping[str, Any], which: str) -> str:
    """Tasks down, variants across, or the other way round if these are more.

    Beside last scores stand those of the data, and published ones of the same protocol.
    """
    style = _style(result)
    summaries = {(cell["variant"], cell["task"]): cell[which] for cell in result["cells"]}
    columns = [name for name in result["variants"] if any(name == variant for variant, _ in summaries)]
    same = [row for row in result["published"] if not len(row["differs"])] if which == "last" else []
    beside = {(row["variant"], row["task"]): row for row in same}
    of_data = {task: card.get(result["score"]) for task, card in result["data"].items() if which == "last"}
    logged = ["the data"] if any(x is not None for x in of_data.values()) else []
    reported = [name for name in columns if any(name == variant for variant, _ in beside)]
    rows = []
    for task in result["tasks"]:
        cells = [summaries.get((name, task)) for name in columns]
        if any(cells):
            rows.append(
                (
                    task,
                    *("" if of_data.get(task) is None else format(of_data[task], style) for _ in logged),
                    *(_cell(one, style) if one else "" for one in cells),
                    *(_reported(beside.get((name, task)), style) for name in reported),
                )
            )
    head = [
        "task",
        *logged,
        *(f"`{name}`" for name in columns),
        *(f"`{name}`, published" for name in reported),
    ]
    if len(columns) > len(rows):
        (_, *names), *rows = zip(head, *rows, strict=True)
        head = ["", *names]
    return studies.table(head, rows)


def _tuning_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    """What trying several settings of a sweep gives; nothing where it has no such sweep (`report_tuning.tuned`)."""
    rows = result.get("tuned", [])
    if not rows:
        return
    yield "## With k settings to try"
    alone = any(len(row["best"][0]["each"]) == 1 for row in rows)
    yield (
        "What one gets who trains k of the settings, drawn at random, and keeps the best: expected last scores "
        "(`rl.selection.expected_best`). The other seeds choose the best, and the one that is left out counts: the "
        "mean over which one that is, and in brackets the smallest and the largest. That is no confidence interval, "
        "as the choices share seeds." + " A single seed does both, which flatters." * alone
    )
    if any(len(row["without"]) for row in rows):
        yield (
            "Settings without a score are left out, as the rows say: the numbers are of draws from the others, which "
            "flatters where a setting diverged or failed."
        )
    style = _style(result)
    *some, _ = max((row["tries"] for row in rows), key=len)
    yield studies.table(
        ("agent", "task", *(f"k = {k}" for k in some), "all"),
        [
            (
                f"`{row['agent']}`",
                row["task"],
                *(_ranging(x["each"], style) for x in row["best"][:-1]),
                *[""] * (len(some) + 1 - len(row["best"])),
                f"{_ranging(row['best'][-1]['each'], style)} ({_drawn_from(row)})",
            )
            for row in rows
        ],
    )
    if figures := _choices(result):
        yield (
            "And with n episodes to choose by: a UCB bandit plays the policies of all settings and seeds, one episode "
            "at a time, and keeps the one with the largest mean so far (Jackson et al. 2025; `rl.selection.bandit`). "
            "It plays the first half of the episodes of the last evaluation, and the other half counts. Intervals: "
            "bootstrap over policies."
        )
    for task in figures:
        yield f"![{task}, with n episodes]({_choice_file(task, figures)})"
    if without := [f"`{row['agent']}` on {row['task']}" for row in rows if row["bandit"] is None]:
        yield f"Without a curve, as episodes of the last evaluation are missing: {', '.join(without)}."


def _drawn_from(row: Mapping[str, Any]) -> str:
    """How many settings have a score; where that is not all of them, of how many, and why not."""
    finished, without = row["tries"][-1], row["without"]
    seeds = f", by the first {row['first_seeds']} seeds of each" if "first_seeds" in row else ""
    if not len(without):
        return f"{finished}{seeds}"
    reasons = ", ".join(f"{n} {why}" for why, n in without.items())
    return f"{finished} of {finished + sum(without.values())}: {reasons}{seeds}"


def _ranging(each: Sequence[float], style: str) -> str:
    """The mean, and the smallest and the largest of several in brackets."""
    mean, *extremes = (format(float(by(each)), style) for by in (np.mean, np.min, np.max))
    return mean + f" [{', '.join(extremes)}]" * (len(each) > 1)


def _choices(result: Mapping[str, Any]) -> dict[str, dict[str, tuple[Any, Any, Any, Any]]]:
    """{task: {agent: the bandit's curve}}."""
    figures: dict[str, dict[str, tuple[Any, Any, Any, Any]]] = {}
    for row in result.get("tuned", []):
        if row["bandit"] is not None:
            curve = tuple(row["bandit"][name] for name in ("episodes", "mean", "low", "high"))
            of_task = figures.setdefault(row["task"], {})
            # Two files may sweep an agent with different heads, say, which their labels do not name.
            of_task[row["agent"] if row["agent"] not in of_task else row["variants"][0] + ", ..."] = curve
    return figures


def _choice_file(task: str, tasks: Iterable[str]) -> str:
    return _curve_file((task, "choice"), [(each, "choice") for each in tasks])


def _reported(row: Mapping[str, Any] | None, style: str) -> str:
    if row is None:
        return ""
    deviation = "" if row["deviation"] is None else f" ± {row['deviation']:{style}}"
    return f"{row['mean']:{style}}{deviation}"


def _published_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    """Tables of numbers that were published under another protocol, one for each source."""
    apart = [row for row in result["published"] if len(row["differs"])]
    for source in dict.fromkeys(row["source"] for row in apart):
        rows = [row for row in apart if row["source"] == source]
        published = {(row["variant"], row["task"]): row for row in rows}
        names = list(dict.fromkeys(row["variant"] for row in rows))
        everywhere, of_variant, of_task = _otherwise(rows)
        here = f": here {'; '.join(everywhere)}" if everywhere else ""
        yield "## Published under another protocol"
        yield f"Not to be compared number by number{here}. Mean ± deviation over seeds, from {source}."
        if of_variant:
            yield "\n".join(f"- `{name}`: {'; '.join(words)}." for name, words in of_variant.items())
        yield studies.table(
            ("task", *(f"`{name}`" for name in names), *["otherwise here"] * bool(of_task)),
            [
                (
                    task,
                    *(_reported(published.get((name, task)), _style(result)) for name in names),
                    *["; ".join(of_task.get(task, []))] * bool(of_task),
                )
                for task in dict.fromkeys(row["task"] for row in rows)
            ],
        )


def _otherwise(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[str], dict[str, list[str]], dict[str, list[str]]]:
    """What differs from a published protocol everywhere, on all tasks of a variant, and the rest by task."""
    everywhere: list[str] = []
    of_variant: dict[str, list[str]] = {}
    of_task: dict[str, list[str]] = {}
    for word in dict.fromkeys(word for row in rows for word in row["differs"]):
        having = [row for row in rows if word in row["differs"]]
        variants = dict.fromkeys(row["variant"] for row in having)
        if len(having) == len(rows):
            everywhere.append(word)
        elif len(having) == sum(row["variant"] in variants for row in rows):
            for variant in variants:
                of_variant.setdefault(variant, []).append(word)
        else:
            for task in dict.fromkeys(row["task"] for row in having):
                of_task.setdefault(task, []).append(word)
    return everywhere, of_variant, of_task


def _curve_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    figures, lost = _figures(result), result.get("lost", [])
    if figures or lost:
        yield "## Learning curves"
    for figure in figures:
        yield f"![{', '.join(filter(None, figure))}]({_curve_file(figure, figures)})"
    if lost:
        names = ", ".join(f"`{variant}` on {task}" for variant, task in lost)
        yield f"Without a curve, as metrics of their runs were lost: {names}."


def _missing(result: Mapping[str, Any]) -> Iterator[str]:
    """What is not in the tables, and why."""
    missing = [program for program in result["programs"] if program["state"] != "done"]
    if missing:
        yield "## Missing"
    begun = [program for program in missing if program["state"] != "waiting"]
    if begun:
        rows = [
            (
                _runs(program),
                _place(program),
                program["state"],
                f"{100 * program['share']:.0f} %",
                _one_line(program["error"]),
            )
            for program in begun
        ]
        yield studies.table(("run", "task", "state", "trained", "why"), rows)
    waiting: dict[str, list[str]] = {}
    for program in missing:
        if program["state"] == "waiting":
            waiting.setdefault(_runs(program), []).append(_place(program))
    if waiting:
        everywhere = {program["task"] for program in result["programs"]}
        for runs, places in waiting.items():
            if len(everywhere) > 1 and {*places} == everywhere:
                waiting[runs] = [f"all {len(everywhere)} tasks"]
        yield "Not begun: " + "; ".join(f"{runs} on {', '.join(on)}" for runs, on in waiting.items()) + "."
    if len(result["strangers"]):
        yield (
            f"{len(result['strangers'])} run folders there are of other parameters than asked for, by another --set: "
            + ", ".join(f"`{name}`" for name in result["strangers"])
            + "."
        )


def _runs(program: Mapping[str, Any]) -> str:
    return "; ".join(f"`{name}`" for name in program["variants"])


def _place(program: Mapping[str, Any]) -> str:
    """Where the runs of a program learn, with their seed if the sweep has several."""
    return program["task"] if program["seed"] is None else f"{program['task']} (seed {program['seed']})"


def _one_line(error: str) -> str:
    return " ".join(error.split()).replace("|", "/")


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """The figures that the report shows."""
    if result["profiles"]:
        _draw_aggregates(folder, result)
    else:
        for name in ("iqm.png", "profiles.png"):  # of an earlier report
            (folder / name).unlink(missing_ok=True)
    _draw_choices(folder, result)
    _draw_curves(folder, result)


def _draw_aggregates(folder: Path, result: Mapping[str, Any]) -> None:
    score, seeds = _score(result), _fewest_seeds(result)
    width = _bootstrap_width(seeds, len(result["aggregate_tasks"])) if seeds > 1 else 1.0
    note = f":\nthe bootstrap's, divided by {width:.2f} because of {seeds} seeds" if seeds > 1 else ""
    plot.bars(
        folder / "iqm.png",
        {
            variant: _widened(**estimates["iqm"], width=width, rate=result["rate"])
            for variant, estimates in result["aggregates"].items()
        },
        f"interquartile mean of {score}, 95 % interval{note}",
        title=_of_what(result),
        rate=result["rate"],
    )
    thresholds = result["profiles"]["thresholds"]
    plot.lines(
        folder / "profiles.png",
        {
            name: (thresholds, profile["value"], *profile["ci95"])
            for name, profile in result["profiles"].items()
            if name != "thresholds"
        },
        f"threshold of {score}",
        "share of runs above it",
        title=_of_what(result),
        note="share, 95 % interval",
        rate=True,
    )


def _draw_choices(folder: Path, result: Mapping[str, Any]) -> None:
    tasks = _choices(result)
    for task, choices in tasks.items():
        plot.lines(
            folder / _choice_file(task, tasks),
            choices,
            "episodes that the bandit played",
            f"{_score(result)} of the policy it chooses",
            title=task,
            note="mean, 95 % interval over policies",
            rate=result["rate"],
        )


def _draw_curves(folder: Path, result: Mapping[str, Any]) -> None:
    score = _score(result)
    figures = _figures(result)
    for (task, group), curves in figures.items():
        lost = sum(where == task for _, where in result.get("lost", []))
        finished = sum(cell["task"] == task for cell in result["cells"])
        without = f"{lost} of {finished} finished variants have no stored curve" if lost else ""
        plot.learning_curve(
            folder / _curve_file((task, group), figures),
            {
                curve["variant"] + ("" if curve["finished"] else " (unfinished)"): (
                    curve["steps"],
                    curve["scores"],
                )
                for curve in curves
            },
            ylabel=score,
            title="\n".join(filter(None, (", ".join(filter(None, (task, group))), without))),
            xlabel="environment steps" if result["unit"] == "steps" else "updates",
            references=_of_data(result, task)
            | {
                f"{row['variant']}, published": row["mean"]
                for row in result["published"]
                if row["task"] == task and not len(row["differs"])
            },
            rate=result["rate"],
            # Bands of two evaluations would cover the whole picture.
            intervals=max(len(curve["steps"]) for curve in curves) > 2,
        )


def _score(result: Mapping[str, Any]) -> str:
    """The name of the score in words."""
    return str(result["score"]).replace("_", " ")


def _widened(value: float, ci95: Sequence[float], width: float, rate: bool) -> tuple[float, float, float]:
    """A value and its interval, of which it has this part of its ``width``, as it should be."""
    low, high = value + (np.asarray(ci95) - value) / width
    return (value, max(low, 0.0), min(high, 1.0)) if rate else (value, low, high)


def _of_what(result: Mapping[str, Any]) -> str:
    """What aggregates are of: tasks, data, which evaluation, how many seeds, and how long they were trained."""
    tasks, variants = set(result["aggregate_tasks"]), set(result["aggregates"])
    seeds = {
        len(cell["last"]["each"])
        for cell in result["cells"]
        if cell["task"] in tasks and cell["variant"] in variants
    }
    lengths = {
        program["length"]
        for program in result["programs"]
        if program["state"] == "done" and program["task"] in tasks and variants & set(program["variants"])
    }
    unit = "environment steps" if result["unit"] == "steps" else result["unit"]
    # Where programs diverged, runs that were trained alone may be finished and none of their programs.
    length = f", {_span(lengths)} {unit}" if lengths else ""
    data = ", data regenerated here,\n" if result["data"] else ", "
    return f"{len(tasks)} tasks{data}last evaluation, {_span(seeds)} seeds{length}"


def _span(numbers: Collection[int]) -> str:
    """The numbers in words: 3, or 3 to 5."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))


def _figures(result: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """{(task, group): curves of one figure}: all of a task, or if they are many those of an agent, and the others.

    If those of an agent are still many, they are those of an agent and a head.
    """
    words = [curve["variant"].split(", ") for curve in result["curves"]]
    task_of = [curve["task"] for curve in result["curves"]]
    # {how many words: how many curves of the task begin with the same ones}
    counts = [
        collections.Counter(zip(task_of, (", ".join(x[:n]) for x in words), strict=True)) for n in range(3)
    ]
    figures: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for task, names, curve in zip(task_of, words, result["curves"], strict=True):
        size = lambda n, task=task, names=names: counts[n][task, ", ".join(names[:n])]
        if size(0) <= _CURVES:
            group = ""
        elif size(1) <= _CURVES or size(2) == 1:
            group = names[0] if size(1) > 1 else "others"
        else:
            group = ", ".join(names[:2])
        figures.setdefault((task, group), []).append(curve)
    return figures


def _of_data(result: Mapping[str, Any], task: str) -> dict[str, float]:
    """The score of the data, to be drawn."""
    score = result["data"].get(task, {}).get(result["score"])
    return {} if score is None else {"the data": score}


def _curve_file(figure: tuple[str, str], figures: Iterable[tuple[str, str]]) -> str:
    """The file of one of the figures: with a number where names differ in characters alone that files do without."""
    plain = lambda one: re.sub("[^A-Za-z0-9+._-]", "-", "-".join(filter(None, one)))
    alike = [one for one in figures if plain(one) == plain(figure)]
    return f"{plain(figure)}{f'-{alike.index(figure) + 1}' * (len(alike) > 1)}.png"
