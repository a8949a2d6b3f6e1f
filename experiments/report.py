"""Turns sweeps, finished or not, into a report: scores with intervals, aggregates, curves, and what is missing.

    python -m experiments.report sweeps/boards/locomotion.yaml
    python -m experiments.report sweeps/boards/heads.yaml --set=updates=20000 --out=runs/boards/heads

It reads what `sweeps.run` left and trains nothing, so it may be called while that goes on. The flags --set, --workdir,
--count, --seed and --together must be those of `sweeps.run`: they decide which runs there are. Several files make one
report, if they have one metric: runs that differ in nothing but --seed count as seeds of one run, and those that two
files would have the same name, the settings in which they differ are added to it.

    python -m experiments.report sweeps/boards/locomotion.yaml --store
    python -m experiments.report sweeps/boards/locomotion.yaml --finished=other/machine/finished

The first also copies what a report needs of finished runs, without their checkpoints, to the folder ``finished`` of
the report, whose runs every later report in that folder counts. The second counts such runs of any folder, of another
machine say, beside those in the sweep's own, as `sweeps.run` does with the same flag. A report names the commits and
the machines of its runs, and never overwrites a report of more runs.

Aggregates, their intervals by the stratified bootstrap, probabilities of improvement and performance profiles are those
of Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice". Published numbers
stand in the tables where data, updates and settings are the same, and in a table of their own where they are not.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app
from absl import flags as absl_flags

from experiments import (
    flags,
    report_page,
    report_runs,
    report_scores,
    report_sources,
    report_tuning,
    studies,
)
from experiments.report_runs import Part
from rl import log, outcomes
from rl.files import expanded
from sweeps import files, layout
from sweeps.layout import Sweep
from sweeps.scripts import SCRIPTS

STORED = "finished"  # the folder of a report in which finished runs are stored


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a report was made with, as it is stored."""

    files: tuple[str, ...]
    out: str
    baseline: str = ""  # parameter=value of what others are compared with
    evaluations: int = 1  # the last ones, of which a last score is the mean


def run(plans: Sequence[Sweep], out: str, baseline: str = "", evaluations: int = 1) -> dict[str, Any]:
    """Writes result.json, README.md and the figures into ``out``; returns what result.json holds.

    Args:
      plans: the sweeps.
      out: a folder, made if missing.
      baseline: ``parameter=value`` of what others are compared with; by default behaviour cloning or the scalar head.
      evaluations: the last ones, of which a last score is the mean.

    Raises:
      ValueError: sweeps of several metrics, or of one that is to be small, a metric that no run has, two sweeps of one
        run, an unknown baseline, a run of fewer evaluations or whose metrics were cut, or a report of other finished
        programs, or of longer ones, in ``out``.
    """
    score = _score(plans)
    parts = report_runs.told_apart([part for plan in plans for part in report_runs.read(plan)])
    parts = report_runs.with_rates(report_runs.shortened(parts), score)
    report_runs.check_apart(parts)
    report_runs.check_metric(parts, score, plans)
    of_program: dict[Path, list[Part]] = {}
    for part in parts:
        of_program.setdefault(part.program, []).append(part)
    states = [report_runs.program_state(group, score) for group in of_program.values()]
    report_runs.check_kept(Path(out) / log.RESULT, states)
    cells, lost = report_scores.cells(parts, score, evaluations), report_scores.without_curve(parts)
    against = report_scores.baselines(parts, baseline)
    outcome = {
        "question": _question(plans[0].file),
        "score": score,
        "rate": score in outcomes.RATES,
        "unit": _unit(plans[0].script),
        "tasks": list(dict.fromkeys(part.task for part in parts)),
        "variants": list(dict.fromkeys(part.variant for part in parts)),
        "programs": states,
        "failures": report_runs.failures(parts, score),
        "strangers": [name for plan in plans for name in report_runs.unplanned_folders(plan)],
        "data": report_sources.data(parts, Path(out) / log.RESULT),
        "other_data": report_sources.other_data(parts),
        "other_lengths": report_sources.other_lengths(parts),
        "other_settings": report_sources.other_settings(parts),
        "lost_lines": {
            str(x.folder): x.result["lost_lines"] for x in parts if x.result and "lost_lines" in x.result
        },
        "machines": report_sources.machines(parts),
        "cells": cells,
        "better": report_scores.better(cells, against),
        **report_scores.aggregated(cells, score),
        **report_tuning.tuned(parts, cells, score),
        "published": report_sources.published(parts, cells, score, evaluations),
        "curves": report_scores.curves(parts, score, lost),
        "lost": lost,
    }
    settings = Settings(tuple(plan.file for plan in plans), out, baseline, evaluations)
    result = studies.finish(settings, outcome, report_page.blocks)
    report_page.draw(Path(out), result)
    return result


def _question(file: str) -> str:
    """The first sentence of the comment that a sweep file begins with: what it is made for."""
    lines = files.find(file).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
    words = " ".join(line[2:].strip() for line in comment)
    return re.split(r"(?<=[.?])\s", words, maxsplit=1)[0]


def _score(plans: Sequence[Sweep]) -> str:
    """The name of the score that the sweeps are of. Raises ValueError if there is none for all."""
    metrics = {plan.metric: plan.file for plan in plans}
    if len(metrics) > 1:
        listed = ", ".join(f"{name} in {file}" for name, file in metrics.items())
        raise ValueError(f"a report has one metric, and these files have several: {listed}")
    for plan in plans:
        if plan.goal != "maximize":
            raise ValueError(
                f"{plan.file}: the goal of {plan.metric} is to {plan.goal} it, and reports say who has more of a "
                "score: sweeps.run ranks such runs"
            )
    units = {_unit(plan.script): plan.file for plan in plans}
    if len(units) > 1:
        listed = ", ".join(f"{name} in {file}" for name, file in units.items())
        raise ValueError(f"curves of {listed} cannot share an axis: report these files apart")
    return next(iter(metrics)).removeprefix("eval/")


def _unit(script: str) -> str:
    """What the curves of a script count: updates, also where its length is in epochs, or environment steps."""
    return "updates" if SCRIPTS[script].per_unit else SCRIPTS[script].length


def main(argv: list[str], values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    names = argv[1:]
    if not names:
        raise ValueError("give a sweep file: python -m experiments.report sweeps/boards/locomotion.yaml")
    if values.workdir and len(names) > 1:
        raise ValueError(
            "--workdir is the folder of one sweep, and these are several files: report them apart"
        )
    if values.workdir and not expanded(values.workdir).is_dir():
        raise ValueError(f"--workdir={values.workdir} is no folder: give that of sweeps.run")
    layout.check_draws(names, values)
    plans = [layout.from_flags(name, {}, values) for name in names]
    out = str(expanded(values.out or usual_folder(plans[0])))
    stored = [str(folder) for folder in [Path(out) / STORED] if folder.is_dir()]
    plans = [layout.with_finished(plan, stored) for plan in plans]
    result = run(plans, out, values.baseline, values.evaluations)
    if values.store:
        print(
            f"{report_runs.store(plans, Path(out) / STORED)} more finished programs are stored in {Path(out) / STORED}"
        )
        for place in (place for plan in plans for place in report_runs.diverged(plan)):
            print(
                f"{place} is not stored: some of its runs diverged, so that it is not finished as a program"
            )
    print((Path(out) / studies.REPORT).read_text())
    print(f"Everything is in {result['settings']['out']}; look at {studies.REPORT} first.")


def usual_folder(plan: Sweep) -> Path:
    """Where the report of a sweep goes: those of the boards here are stored, others are not."""
    file = files.find(plan.file).resolve()
    board = file.parent == Path(layout.__file__).parent / "boards"
    return Path("results/boards", file.stem) if board else plan.root / "report"


def define(values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """The flags of the command."""
    layout.define(values)
    absl_flags.adopt_module_key_flags(layout, values)  # --help lists them here, too
    absl_flags.DEFINE_string(
        "out",
        "",
        "folder of the report; by default results/boards/FILE for a file of sweeps/boards, and else the folder report "
        "in the sweep's own (runs/sweeps/FILE)",
        values,
    )
    absl_flags.DEFINE_bool(
        "store", False, "copy the finished runs, without their checkpoints, to the report's folder", values
    )
    absl_flags.DEFINE_string(
        "baseline",
        "",
        "parameter=value of the runs that others are compared with; by default agent=bc, or else head=scalar",
        values,
    )
    absl_flags.DEFINE_integer(
        "evaluations",
        1,
        "how many of the last evaluations a last score is the mean of (published tables of OGBench: 3)",
        1,
        flag_values=values,
    )


if __name__ == "__main__":
    define()
    app.run(flags.reporting(main), flags_parser=flags.parser(words=99))
