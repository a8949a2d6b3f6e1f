"""experiments.report: what it says of run folders, against brute force and scipy; what is missing; what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from absl import flags as absl_flags
from scipy import stats

from experiments import (
    presets,
    report,
    report_page,
    report_runs,
    report_scores,
    report_sources,
    report_tuning,
    studies,
)
from rl import agents, data, log, model_based, outcomes, selection, statistics
from sweeps import layout, records
from sweeps.layout import Program

pytestmark = pytest.mark.slow  # numbers and texts, which another interpreter does not change

ROOT = Path(__file__).parents[1]
TASKS = [f"hopper-{tier}-regen-v5" for tier in ("medium", "medium-replay", "expert")]
SEEDS, EPISODES = 4, 6
SCORES = np.random.default_rng(0).normal(40, 15, size=(2, 3, 2, SEEDS, EPISODES))  # agent, task, evaluation
SCORES[1] += np.array([40, 25, -60])[:, None, None, None]  # IQL is better on two tasks and worse on one


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where data would be that were made on this machine."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))


def board(path: Path, **changed: Any) -> str:
    """A grid of cloning and IQL on three tiers."""
    parameters = {
        "agent": {"values": ["bc", "iql"]},
        "dataset": {"values": TASKS},
        "seeds": {"value": SEEDS},
        "updates": {"value": 20},
        "eval_every": {"value": 10},
    }
    sweep = {
        "method": "grid",
        "metric": {"name": "eval/normalized_return", "goal": "maximize"},
        "parameters": parameters,
    }
    file = path / "board.yaml"
    file.write_text(f"# Does IQL beat\n# cloning? A test.\n{yaml.safe_dump(sweep | changed)}")
    return str(file)


def leave(place: Path, scores: np.ndarray, finished: bool = True, **said: Any) -> None:
    """What a run leaves that has had these evaluations [T, S, episodes], but for config.json."""
    place.mkdir(parents=True)
    rows = [{"step": 10 * (t + 1), "eval/normalized_return": row.tolist()} for t, row in enumerate(scores)]
    (place / log.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        scored = {
            "updates": 20,
            "wall_seconds": 1.0,
            "scores": outcomes.summary(outcomes.scored_rows(place)),
        }
        log.result(place, scored | said)


def card(program: Program, place: Path) -> None:
    """Its config.json."""
    settings, config, _ = layout.arguments(program, place)
    stored = {"agent": settings.agent, "settings": {}, "config": dataclasses.asdict(config)}
    began = {"started": "2026-01-01T00:00:00+00:00", "resumed": []}
    log.write_json(place / log.CONFIG, {**began, "config": stored})


def report_on(*argv: str) -> dict[str, Any]:
    """``python -m experiments.report`` in this process; what result.json holds."""
    values = absl_flags.FlagValues()
    report.define(values)
    report.main(values(["experiments.report", *argv]), values)
    return studies.load(Path(values.out) / log.RESULT)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str], dict[Path, Program]]:
    """The file, the flags and the programs of a board whose runs are all finished; the first tier is of 600 steps."""
    (tmp_path / "locomotion").mkdir()
    record = {"transitions": 600, "normalized_return_d4rl": 12.34}
    log.write_json(tmp_path / "locomotion" / f"{TASKS[0]}.json", record)
    file = board(tmp_path)
    plan = layout.load(file, {}, str(tmp_path / "runs"))
    for (agent, task), place in zip(itertools.product(range(2), range(3)), plan.programs, strict=True):
        leave(place, SCORES[agent, task], transitions=None if task else 600)
        card(plan.programs[place], place)
    return file, [f"--workdir={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}"], plan.programs


@pytest.mark.slow
def test_scores_and_aggregates_are_those_of_their_definitions(finished: Any, tmp_path: Path) -> None:
    file, where, _ = finished
    result = report_on(file, *where)
    each = SCORES.mean(-1)  # [agent, task, evaluation, seed]
    first, second = SCORES[..., : EPISODES // 2].mean(-1), SCORES[..., EPISODES // 2 :].mean(-1)
    expected = {
        "last": each[:, :, -1],
        "best": each.max(2),
        "selected": np.take_along_axis(second, first.argmax(2)[:, :, None], 2)[:, :, 0],
    }
    for i, cell in enumerate(result["cells"]):
        for which, values in expected.items():
            scores = values[i // 3, i % 3]
            np.testing.assert_allclose(cell[which]["each"], scores)
            t = stats.ttest_1samp(scores, 0).confidence_interval(0.95)
            np.testing.assert_allclose(cell[which]["ci95"], t)
    bc, iql = expected["last"]  # [task, seed]
    aggregates = result["aggregates"]
    assert aggregates["iql"]["iqm"]["value"] == pytest.approx(stats.trim_mean(iql.ravel(), 0.25))
    gap = np.mean(100 - np.minimum(iql, 100))
    assert aggregates["iql"]["optimality_gap"]["value"] == pytest.approx(gap)
    low, high = aggregates["iql"]["mean"]["ci95"]
    rng = np.random.default_rng(1)
    means = np.mean([rng.choice(scores, (50_000, SEEDS)).mean(1) for scores in iql], 0)  # within tasks
    np.testing.assert_allclose([low, high], np.quantile(means, [0.025, 0.975]), atol=0.5)
    (pair,) = [row for row in result["improvement"] if (row["x"], row["y"]) == ("iql", "bc")]
    wins = [a > b for k in range(3) for a in iql[k] for b in bc[k]]
    assert pair["value"] == pytest.approx(np.mean(wins))
    profile = result["profiles"]["iql"]["value"]
    above = [np.mean(iql > threshold) for threshold in result["profiles"]["thresholds"]]
    np.testing.assert_allclose(profile, above)
    assert profile[0] > 0.9 and profile[-1] == 0.0
    (verdict,) = result["better"]
    bounds = {(cell["variant"], cell["task"]): cell["last"]["ci95"] for cell in result["cells"]}
    assert verdict["better"] == [task for task in TASKS if bounds["iql", task][0] > bounds["bc", task][1]]
    assert verdict["better"] and verdict["worse"]
    assert verdict["worse"] == [task for task in TASKS if bounds["iql", task][1] < bounds["bc", task][0]]
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert text.startswith("# board\n\nDoes IQL beat cloning?\n\n")
    assert (
        "6 compiled programs (the seeds of a setting, or several settings): 6 done." in text
        and "## Missing" not in text
    )
    assert f"made here: 600 transitions of {TASKS[0]}." in text
    assert f"| task | the data | `bc` | `iql` |\n|---|---|---|---|\n| {TASKS[0]} | 12.3 | " in text
    assert f"`iql` on {len(verdict['better'])} of 3 tasks" in text
    assert all(f"## {title}\n" in text for title in report_page.WHICH.values())
    for name in ("iqm", "profiles", *TASKS):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 0 and f"({name}.png)" in text


@pytest.mark.slow
def test_a_last_score_is_the_mean_of_as_many_evaluations_as_asked(finished: Any, tmp_path: Path) -> None:
    """As published tables of OGBench have it; best and selected ones are of one evaluation whatever is asked."""
    file, where, programs = finished
    with pytest.raises(ValueError, match=r"--evaluations=9: .* has \d of them"):
        report_on(file, *where, "--evaluations=9")
    cut = next(iter(programs)) / log.METRICS
    lines = cut.read_text()
    cut.write_text(2 * lines.splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=f"{cut} does not end with the scores of result.json"):
        report_on(file, *where, "--evaluations=2")
    # What a run begins with is no evaluation of it.
    earlier = json.dumps(json.loads(lines.splitlines()[0]) | {"step": 0}) + "\n"
    cut.write_text(earlier + lines)
    count = len(lines.splitlines())
    with pytest.raises(ValueError, match=f"--evaluations={count + 1}: .* has {count} of them"):
        report_on(file, *where, f"--evaluations={count + 1}")
    cut.write_text(lines)
    result = report_on(file, *where, "--evaluations=2")
    each = SCORES.mean(-1)  # [agent, task, evaluation, seed]
    for i, cell in enumerate(result["cells"]):
        np.testing.assert_allclose(cell["last"]["each"], each[i // 3, i % 3, -2:].mean(0))
        np.testing.assert_allclose(cell["best"]["each"], each[i // 3, i % 3].max(0))
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert "## Mean of the last 2 evaluations\n" in text and "## Last evaluation" not in text
    assert "last scores are of 2 evaluations, not 1" in text


@pytest.mark.slow
def test_published_numbers_stand_beside_only_where_the_protocol_is_the_same(tmp_path: Path) -> None:
    names = ["hopper-medium-v2", "hopper-medium-regen-v5"]
    parameters = {"agent": {"value": "iql"}, "dataset": {"values": names}, "seeds": {"value": SEEDS}}
    beside: dict[int, dict[str, list[str]]] = {}
    for updates in (20, 1_000_000):
        all_parameters = parameters | {"updates": {"value": updates}, "eval_every": {"value": 10}}
        plan = layout.load(board(tmp_path, parameters=all_parameters), {}, str(tmp_path / f"{updates}"))
        for place in plan.programs:
            leave(place, SCORES[0, 0])
            stored = log.read_json(place / log.RESULT)
            log.write_json(place / log.RESULT, stored | {"updates": updates})
        result = report.run([plan], str(tmp_path / f"out{updates}"))
        beside[updates] = {row["task"]: list(row["differs"]) for row in result["published"]}
        assert {row["mean"] for row in result["published"]} == {66.3}
    assert beside[20] == {
        "hopper-medium-v2": ["20 updates"],
        "hopper-medium-regen-v5": ["data are not D4RL's own -v2 files", "20 updates"],
    }
    assert beside[1_000_000] == {
        "hopper-medium-v2": [],
        "hopper-medium-regen-v5": ["data are not D4RL's own -v2 files"],
    }
    part = next(report_runs.read(plan))
    protocol = {"score": "normalized_return", "data": "D4RL's", "datasets": ["*"], "updates": 1_000_000}
    protocol |= {"evaluations": 3, "eval_every": 500}
    differs = report_sources._differences(
        part, report_runs.arguments(part)[0], protocol, "normalized_return", 3
    )
    assert differs == ["evaluations are 10 updates apart, not 500"]
    place = next(iter(plan.programs))  # under the same name, but made here
    log.write_json(
        place / log.RESULT, stored | {"updates": updates, "source": "D4RL layout, regenerated: x.hdf5"}
    )
    again = report.run([plan], str(tmp_path / "again"))
    assert list(again["published"][0]["differs"]) == ["data are not D4RL's own -v2 files"]
    blocks = list(report_page.blocks(result))
    (table,) = [block for block in blocks if block.startswith("| task | `iql` | `iql`, published |")]
    lines = table.splitlines()[2:]
    assert lines[0].endswith("| 66.3 |") and lines[1].endswith("|  |")
    (apart,) = [block for block in blocks if block.startswith("Not to be compared")]
    assert "here data are not D4RL's own -v2 files." in apart
    row = {"source": "a paper", "variant": "iql", "mean": 1.0, "deviation": None}
    differs = {
        TASKS[0]: ["20 updates", "n_step=1"],
        TASKS[1]: ["20 updates", "n_step=3"],
        TASKS[2]: ["20 updates"],
    }
    rows = [row | {"task": task, "differs": words} for task, words in differs.items()]
    *_, text, table = report_page._published_blocks({"published": rows, "rate": False})
    assert "here 20 updates. Mean" in text  # and what is of one task in its row
    assert [line.split(" | ")[2] for line in table.splitlines()[2:]] == ["n_step=1 |", "n_step=3 |", " |"]
    rows = [
        row | {"task": TASKS[0], "variant": name, "differs": ["x", *own]}
        for name, own in (("bc", ["y"]), ("iql", []))
    ]
    *_, text, of_variant, table = report_page._published_blocks({"published": rows, "rate": False})
    assert "here x. Mean" in text and of_variant == "- `bc`: y."
    nothing = result | {"cells": [], "better": [], "curves": []}
    assert not any("Published" in block for block in report_page.blocks(nothing))


def test_published_numbers_do_not_stand_beside_runs_of_other_settings(tmp_path: Path) -> None:
    """IQL's published expectile on these tasks is 0.7."""
    own = {
        "dataset": {"value": "hopper-medium-v2"},
        "updates": {"value": 1_000_000},
        "eval_every": {"value": 1000},
        "agent.expectile": {"values": [0.7, 0.9]},
        "batch_size": {"values": [256, 32]},
        "head_size": {"value": 51},
        "head_sigma": {"value": 1.0},  # which a scalar head does not read
    }
    parts = report_runs.read(layout.load(board(tmp_path, parameters=own), {}))
    of = lambda score: [
        row["differs"] for part in parts for row in report_sources.published([part], [], score, 1)
    ]
    differs = of("normalized_return")
    assert all("scores are not of normalized_return" in row for row in of("return"))
    flags = ["", "--agent.expectile=0.9", "--batch_size=32", "--batch_size=32 --agent.expectile=0.9"]
    assert sorted(map(str, differs)) == sorted(
        str([f"other settings than published ({flag})"] if flag else []) for flag in flags
    )


def test_the_published_length_of_an_agent_with_a_model_is_in_updates(tmp_path: Path) -> None:
    """3,000 epochs of 1,000 updates each are the preset's; what else differs is said, too."""
    differs = {}
    for epochs in (3000, 30):
        own = {"agent": "mopo", "dataset": "hopper-medium-v2", "preset": "paper", "epochs": epochs}
        given = {name: {"value": x} for name, x in own.items()}
        file = board(tmp_path, program="experiments/model_based.py", parameters=given)
        parts = report_runs.read(layout.load(file, {}))
        (row,) = report_sources.published(list(parts), [], "normalized_return", 1)
        differs[epochs] = [text for text in row["differs"] if text.endswith(" epochs")]
    assert differs == {3000: [], 30: ["30 epochs"]}


def test_published_numbers_are_of_agents_and_tasks_that_there_are() -> None:
    """A name that is misspelt in a file would never be found."""
    names: dict[str, list[str]] = {}
    for name in data.names():
        names.setdefault(presets.task_name(name), []).append(name)
    entries = {path.stem: yaml.safe_load(path.read_text()) for path in studies._PUBLISHED.glob("*.yaml")}
    with_protocol = {name: entry for name, entry in entries.items() if "protocol" in entry}
    assert set(with_protocol) == {"locomotion", "singletask"}
    for entry in with_protocol.values():
        assert entry["source"] and {"data", "datasets", "updates"} <= entry["protocol"].keys()
        for task, numbers in entry["scores"].items():
            assert numbers.keys() <= {*agents.AGENTS, *model_based.METHODS}
            numbered = f"{task}-v0"  # OGBench's, which `data.names` does not list
            versions = names.get(task) or [numbered] * data.ogbench.known(numbered)
            patterns = entry["protocol"]["datasets"]
            assert any(fnmatch.fnmatch(name, pattern) for name in versions for pattern in patterns)


@pytest.mark.slow
def test_it_says_what_is_missing_and_works_with_the_rest(finished: Any, tmp_path: Path) -> None:
    file, where, programs = finished
    places = list(programs)
    for place in places[3:]:  # of IQL: one half way, one failed, one of other code
        (place / log.RESULT).unlink()
    rows = (places[3] / log.METRICS).read_text().splitlines(keepends=True)
    (places[3] / log.METRICS).write_text(rows[0])
    (places[4] / log.METRICS).unlink()
    log.write_json(places[4] / records.FAILED, {"error": "OSError: no space left", "runs": 1})
    other = log.read_json(places[5] / log.CONFIG)
    other["config"]["config"]["expectile"] = 0.123
    log.write_json(places[5] / log.CONFIG, other)
    leave(tmp_path / "runs" / "iql-stranger", SCORES[0, 0])
    card(programs[places[3]], tmp_path / "runs" / "iql-stranger")
    result = report_on(file, *where)
    assert [program["state"] for program in result["programs"]] == [
        *("done", "done", "done", "stopped", "failed", "other code")
    ]
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert "settings): 3 done, 1 stopped, 1 failed, 1 other code." in text
    assert f"| `iql` | {TASKS[0]} | stopped | 50 % |  |" in text
    assert f"| `iql` | {TASKS[1]} | failed | 0 % | OSError: no space left |" in text
    assert f"| `iql` | {TASKS[2]} | other code | 0 % | " in text and "config.expectile: 0.123" in text
    assert "1 run folders there are of other parameters" in text and "iql-stranger" in text
    assert (
        "**Better than `bc` (95 % intervals of the last scores do not overlap):** nothing to compare yet."
        in text
    )
    assert list(result["aggregates"]) == ["bc"]
    curves = {(c["variant"], c["task"]): (c["finished"], len(c["steps"])) for c in result["curves"]}
    assert curves == {**{("bc", task): (True, 2) for task in TASKS}, ("iql", TASKS[0]): (False, 1)}
    for place in places[:3]:
        (place / log.RESULT).unlink()
        (place / log.METRICS).unlink()
    with pytest.raises(
        ValueError,
        match=f"3 are not finished here, or are shorter, {places[0].name[:3]}.*Nothing was written",
    ):
        report_on(file, *where)
    assert (tmp_path / "out" / studies.REPORT).read_text() == text
    (tmp_path / "out" / log.RESULT).unlink()
    assert "No agent has all of its runs yet." in "\n".join(report_page.blocks(report_on(file, *where)))
    assert "Not begun: `bc` on all 3 tasks." in (tmp_path / "out" / studies.REPORT).read_text()


def test_files_of_one_name_in_two_folders_are_two_tasks(tmp_path: Path) -> None:
    files = [str(tmp_path / folder / "x.hdf5") for folder in ("a", "b")]
    plan = layout.load(board(tmp_path), {"agent": "bc", "seeds": SEEDS}, str(tmp_path / "runs"))
    for names, expected in ((files, files), (files[:1], ["x.hdf5"]), (TASKS[:1], TASKS[:1])):
        parts = [
            part for name in names for part in report_runs.read(layout.load(plan.file, {"dataset": name}))
        ]
        assert {part.task for part in report_runs.shortened(parts)} == set(expected)


def test_one_that_has_just_begun_takes_no_tasks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aggregates are over tasks that all in them have finished, and leave out who has fewer than half of them.

    Of returns, whose scale tasks do not share, they are nothing but probabilities of improvement.
    """
    cells = [
        {"variant": name, "task": f"{k}", "last": {"each": np.arange(3.0) + k}}
        for name, count in (("bc", 5), ("iql", 3), ("cql", 1))
        for k in range(count)
    ]
    summary = report_scores.aggregated(cells, "return")
    assert summary["aggregate_tasks"] == ["0", "1", "2"] and list(summary["aggregates"]) == ["bc", "iql"]
    assert summary["aggregates"] == {"bc": {}, "iql": {}} and summary["profiles"] == {}  # of returns
    about = {"cells": cells, "better": [], "variants": ["bc", "iql", "cql"], "tasks": list("01234")}
    page = "\n".join(report_page._aggregate_blocks(about | summary | {"score": "return", "rate": False}))
    assert "`return` has no scale that tasks share" in page and "| `bc` | `iql` | 0.50 [" in page
    assert "IQM" not in page and ".png" not in page and "times as wide" not in page
    monkeypatch.setattr(report_page.plot, "bars", None)  # nor is there a figure
    report_page.draw(Path(), about | summary | {"score": "return", "rate": False, "curves": []})
    single = report_scores.aggregated(cells[:1], "return")
    (block,) = report_page._aggregate_blocks(about | single)
    assert "over 2 tasks or more that all have finished; here there is 1. " in block
    # The fewest seeds are those of the tasks that aggregates are over.
    cells[4]["last"]["each"] = np.arange(2.0)
    aggregates = report_scores.aggregated(cells, "return")
    assert report_page._fewest_seeds(about | aggregates) == 3
    cells[1]["last"]["each"] = np.arange(2.0)
    unequal = report_scores.aggregated(cells, "return")
    (block,) = report_page._aggregate_blocks(about | unequal)
    assert block.endswith("different numbers of seeds on their tasks: `bc` {'0': 3, '1': 2, '2': 3}.")


def test_settings_that_tie_for_all_other_seeds_count_the_same() -> None:
    """Sums of rates over other seeds differ by rounding, and the one that it favours would be chosen."""
    rates = [np.array([0.9, 0.9, 0.75]), np.array([0.7, 0.75, 0.7]), np.array([0.7, 0.7, 0.95])]
    best = report_tuning._best(rates)
    np.testing.assert_allclose(best["best"][-1]["each"], [0.8, 0.8, 0.75])
    assert "first_seeds" not in best and report_tuning._best([*rates, np.ones(5)])["first_seeds"] == 3


def test_figures_have_files_of_their_own() -> None:
    tasks = [("a b", ""), ("a-b", ""), ("c/d", "iql")]
    files = [report_page._curve_file(task, tasks) for task in tasks]
    assert files == ["a-b-1.png", "a-b-2.png", "c-d-iql.png"]


def test_rates_have_intervals_of_rates_and_an_optimum_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seeds of which most always succeed; the scores of the other tests are returns."""
    each = np.array([1.0, 1.0, 0.9])
    monkeypatch.setattr(report_runs, "per_seed", lambda *_: each)
    parts = [
        SimpleNamespace(variant="bc", task=task, scores={"success": 1.0}, folder=task) for task in TASKS[:2]
    ]
    cells = report_scores.cells(parts, "success", 1)
    assert [cell["last"]["ci95"] for cell in cells] == 2 * [list(statistics.rate_interval(each))]
    gap = report_scores.aggregated(cells, "success")["aggregates"]["bc"]["optimality_gap"]["value"]
    assert gap == pytest.approx(1 - each.mean())


def test_each_is_compared_with_what_differs_in_the_baseline_alone(tmp_path: Path) -> None:
    parameters = {
        "agent": {"values": ["iql", "td3_bc"]},
        "head": {"values": ["scalar", "c51"]},
        "seed": {"values": [0, 1]},
    }
    plan = layout.load(board(tmp_path, parameters=parameters), {}, str(tmp_path))
    parts = list(report_runs.read(plan))
    assert [part.variant for part in parts[::2]] == [
        "iql, scalar",
        "iql, c51",
        "td3_bc, scalar",
        "td3_bc, c51",
    ]
    assert report_scores.baselines(parts, "") == {"iql, c51": "iql, scalar", "td3_bc, c51": "td3_bc, scalar"}
    other = {"head": {"values": ["hl_gauss"]}, "seeds": {"value": 8}, "eval_processes": {"value": 1}}
    more = layout.load(board(tmp_path, parameters=parameters | other), {}, str(tmp_path))
    both = report_runs.told_apart(
        [*parts, *report_runs.read(more)]
    )  # with other numbers of seeds and processes
    pairs = report_scores.baselines([part for part in both if "c51" not in part.variant], "")
    assert pairs == {"iql": "iql, scalar", "td3_bc": "td3_bc, scalar"}
    by_agent = report_scores.baselines(parts, "agent=iql")
    assert by_agent == {"td3_bc, scalar": "iql, scalar", "td3_bc, c51": "iql, c51"}
    with pytest.raises(ValueError, match="--baseline=agent=bc: no run of these sweeps has that"):
        report_scores.baselines(parts, "agent=bc")


def test_scores_whose_spread_was_not_seen_decide_nothing() -> None:
    """Equal seeds leave an interval without width, but for rounding, which would lie above any other."""
    scores = {
        ("bc", "flat"): [-200.0, -200.0],
        ("own", "flat"): [-199.9] * 3,
        ("bc", "wide"): [0.0, 1.0],
        ("own", "wide"): [50.0, 51.0],
        ("bc", "half"): [0.0, 1.0],
        ("own", "half"): [500.0] * 3,
    }
    cells = [
        {"variant": variant, "task": task, "last": statistics.summary(each)}
        for (variant, task), each in scores.items()
    ]
    better = report_scores.better(cells, {"own": "bc"})
    assert better == [
        {"variant": "own", "baseline": "bc", "tasks": ["wide"], "better": ["wide"], "worse": []}
    ]
    (answer,) = report_page._answers({"better": better, "cells": cells})
    assert answer.endswith(
        " `own` on 1 of 1 tasks. Where all seeds score the same, their spread was not seen, "
        + "and nothing is compared."
    )
    about = {"cells": cells, "rate": False, "variants": ["bc", "own"], "tasks": ["half"]}
    table = report_page._table(about | {"published": [], "data": {}, "score": "return"}, "last")
    assert table.splitlines()[-2:] == ["| `bc` | 0.5 [-5.9, 6.9] |", "| `own` | 500.0 (all 3 seeds) |"]


@pytest.mark.slow
def test_seeds_of_several_runs_are_pooled_and_those_of_one_program_kept_apart(tmp_path: Path) -> None:
    parameters = {
        "agent.expectile": {"values": [0.5, 0.9]},
        "seed": {"values": [0, 1]},
        "seeds": {"value": SEEDS},
        "updates": {"value": 20},
        "eval_every": {"value": 10},
    }
    plan = layout.load(board(tmp_path, parameters=parameters), {}, str(tmp_path / "runs"))
    assert [program.runs for program in plan.programs.values()] == [2, 2]
    for i, place in enumerate(plan.programs):
        both = np.concatenate([SCORES[i, 0], SCORES[i, 1]], 1)  # of two expectiles
        leave(place, both)
        halves = [
            {"parameters": {}, "scores": outcomes.summary(outcomes.scored_rows(place), half, 2)}
            for half in (0, 1)
        ]
        log.result(place, {"updates": 20, "wall_seconds": 1.0, "variants": halves})
    result = report.run([plan], str(tmp_path / "out"))
    assert result["variants"] == ["iql, expectile=0.5", "iql, expectile=0.9"]
    for k, (cell, curve) in enumerate(zip(result["cells"], result["curves"], strict=True)):
        expected = np.concatenate([SCORES[0, k], SCORES[1, k]], 1).mean(-1)  # [evaluation, seed]
        np.testing.assert_allclose(cell["last"]["each"], expected[-1])
        np.testing.assert_allclose(curve["scores"], expected)
    card(plan.programs[place], place)
    (place / log.RESULT).unlink()  # of the second half of the seeds: the rest is no score of the run
    result = report.run([plan], str(tmp_path / "half"))
    assert "| synthetic-continuous (seed 1) | stopped |" in (tmp_path / "half" / studies.REPORT).read_text()
    assert result["cells"] == [] and [curve["finished"] for curve in result["curves"]] == [False] * 2


@pytest.mark.parametrize(
    ("changed", "names", "message"),
    [
        ({"seed": 1}, ["td3_bc"], None),
        ({"seed": 0}, ["td3_bc"], "with the same seed"),  # the default, which the other file does not write
        ({"seed": 1, "updates": 40}, ["td3_bc"], "no seeds of one run: the second has --updates=40. Report"),
        ({"seed": 1, "head": "c51", "agent.alpha": 5.0}, ["td3_bc", "td3_bc, alpha=5.0, c51"], None),
        ({"agent.network.activation": "gelu"}, ["td3_bc", "td3_bc, network.activation=gelu"], None),
        ({"eval_every": 20}, ["td3_bc, eval_every=10", "td3_bc, eval_every=20"], None),
    ],
)
def test_runs_of_several_files_are_pooled_only_if_they_differ_in_their_seeds(
    changed: dict[str, Any], names: list[str], message: str | None, tmp_path: Path
) -> None:
    """What one file sets and the other leaves at its default is in the name of the first's runs, on every task."""
    plain = {"agent": "td3_bc", "dataset": TASKS[0], "seeds": SEEDS, "updates": 20, "eval_every": 10}
    parts = []
    for values in (plain, plain | changed):
        file = board(tmp_path, parameters={name: {"value": value} for name, value in values.items()})
        parts += report_runs.read(layout.load(file, {}))
    parts = report_runs.told_apart([*parts, parts[-1]._replace(task="another")])
    assert [*dict.fromkeys(part.variant for part in parts)] == names
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        report_runs.check_apart(parts)


def test_runs_of_a_program_that_diverged_are_missing_only_if_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "draw", lambda folder, result: None)
    parameters = {"agent.expectile": {"values": [0.5, 0.9]}, "dataset": {"value": TASKS[0]}}
    parameters |= {"updates": {"value": 20}, "eval_every": {"value": 10}}
    plan = layout.load(board(tmp_path, parameters=parameters), {}, str(tmp_path / "runs"))
    ((place, program),) = plan.programs.items()
    leave(place, np.concatenate([SCORES[0, 0]] * 2, 1), finished=False)
    card(program, place)
    log.write_json(place / records.FAILED, {"error": "diverged: at update 5", "runs": 1})
    log.write_json(place / records.DIVERGED, {})
    for i, states in enumerate((["diverged", "expectile=0.9"], ["done", ""])):  # the first run, then both
        leave(place / f"{i:03d}", SCORES[0, i])
        alone = {"parameters": {}, "scores": outcomes.summary(outcomes.scored_rows(place / f"{i:03d}"))}
        log.result(place / f"{i:03d}", {"updates": 20, "wall_seconds": 1.0, "variants": [alone]})
        result = report.run([plan], str(tmp_path / "out"))
        assert result["programs"][0]["state"] == states[0] and len(result["cells"]) == i + 1
        missing = "".join(report_page._missing(result))
        assert states[1] in missing and "expectile=0.5" not in missing
        failed = {"variant": "iql, expectile=0.9", "task": TASKS[0], "state": "diverged"}
        assert result["failures"] == [failed][i:]


def test_tasks_that_failed_runs_take_from_all_are_named(finished: Any, tmp_path: Path) -> None:
    """An agent is compared only where it did not break; one that is unfinished takes its tasks for a while only."""
    file, _, programs = finished
    places = list(programs)
    score = "normalized_return"

    def said() -> tuple[list[str], str]:
        parts = [*report_runs.read(layout.load(file, {}, str(tmp_path / "runs")))]
        cells = report_scores.cells(parts, score, 1)
        better = report_scores.better(cells, {"iql": "bc"})
        about = {"cells": cells, "better": better, "variants": ["bc", "iql"], "tasks": TASKS, "rate": False}
        about |= {"failures": report_runs.failures(parts, score), **report_scores.aggregated(cells, score)}
        page = "".join([*report_page._answers(about), *report_page._aggregate_blocks(about)])
        return [report_runs.fate(part, score) for part in parts], page

    assert "Lost to" not in said()[1]
    (places[4] / log.RESULT).unlink()
    log.write_json(places[4] / records.FAILED, {"error": "diverged: at update 5", "runs": 1})
    lost = f" **Lost to runs that failed: `iql` diverged on {TASKS[1]}.**"
    fates, page = said()
    assert fates == [*["done"] * 4, "diverged", "done"]
    assert f"Last scores over 2 of 3 tasks, those that all of these have finished.{lost}" in page
    apart = f" Not compared, which flatters those whose runs failed: `iql` diverged on {TASKS[1]}."
    assert f"`iql` on 1 of 2 tasks, worse on 1.{apart}" in page
    result = (places[2] / log.RESULT).read_bytes()
    (places[2] / log.RESULT).unlink()
    fates, page = said()
    assert fates[2] == "stopped" and "here there is 1. " in page and lost in page and TASKS[2] not in page
    (places[2] / log.RESULT).write_bytes(result)
    (places[5] / log.RESULT).unlink()
    assert f"(without `iql`, too little of which is finished: `iql` diverged on {TASKS[1]})" in said()[1]


def test_runs_that_are_not_equally_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline of a tenth of the updates is no baseline."""
    monkeypatch.setattr(report_page, "draw", lambda folder, result: None)
    plans = []
    for agent, updates in (("bc", 20), ("iql", 200)):
        values = {"agent": agent, "dataset": TASKS[0], "updates": updates, "eval_every": 10}
        file = board(tmp_path, parameters={name: {"value": value} for name, value in values.items()})
        plans.append(layout.load(file, {}, str(tmp_path / agent)))
        (place,) = plans[-1].programs
        leave(place, SCORES[0, 0])
        log.result(place, {**log.read_json(place / log.RESULT), "updates": updates})
    result = report.run(plans, str(tmp_path / "out"))
    blocks = list(report_page.blocks(result))
    assert f"**Not the same number of updates:** on {TASKS[0]} `bc` 20, `iql` 200." in blocks
    assert report.run(plans[:1], str(tmp_path / "alone"))["other_lengths"] == {}


def test_epochs_are_reported_as_updates_and_not_beside_environment_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "draw", lambda folder, result: None)
    own = {"agent": "bc", "dataset": TASKS[0], "updates": 20, "eval_every": 10}
    of_model = {"agent": "mopo", "dataset": TASKS[0], "epochs": 2, "agent.updates": 10, "eval_every": 1}
    online = {"agent": "sac", "env": "Hopper-v5", "steps": 20, "learning_starts": 10, "eval_every": 10}
    plans = []
    for script, values in (("offline", own), ("model_based", of_model), ("online", online)):
        given = {name: {"value": x} for name, x in values.items()}
        file = board(tmp_path, program=f"experiments/{script}.py", parameters=given)
        plans.append(layout.load(file, {}, str(tmp_path / script)))
        (place,) = plans[-1].programs
        leave(place, SCORES[0, 0], epochs=2, steps=20)
    result = report.run(plans[:2], str(tmp_path / "out"))
    assert [(x["state"], x["length"]) for x in result["programs"]] == [("done", 20)] * 2
    assert (result["unit"], result["other_lengths"]) == ("updates", {})
    # Evaluations are as many updates apart, too.
    assert report.run(plans[1:2], str(tmp_path / "alone"), evaluations=2)["unit"] == "updates"
    with pytest.raises(ValueError, match=r"updates in .*, steps in .* cannot share an axis"):
        report.run(plans, str(tmp_path / "mixed"))


def test_finished_runs_of_several_machines_make_one_report(
    finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one machine stored counts on another, in reports and for `sweeps.run`, which trains none of it again."""
    monkeypatch.setattr(report_page, "draw", lambda folder, result: None)
    file, where, programs = finished
    places = list(programs)
    machine = {"cpu": "Abacus", "cores": 2, "backend": "cpu", "device": "cpu", "devices": 1}
    for i, place in enumerate(places):  # three on this machine, three on another and on other data
        hardware = machine | {"cores": 2 + i // 3}
        provenance = {"commit": f"{i // 3}" * 40, "digest": f"{i // 5}", "hardware": hardware}
        log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | provenance)
        (place / "checkpoints").mkdir()
    whole = report_on(file, *where, "--store")
    stored = tmp_path / "out" / report.STORED
    assert sorted(path.name for path in stored.iterdir()) == sorted(place.name for place in places)
    assert {path.name for path in stored.glob("*/*")} == {log.CONFIG, log.METRICS, log.RESULT}
    assert "6 more finished programs are stored" in capsys.readouterr().out
    assert "0 more finished programs" in (report_on(file, *where, "--store"), capsys.readouterr().out)[1]
    for place in (*places[3:], tmp_path / "locomotion"):
        shutil.rmtree(place)
    (stored / places[0].name / log.RESULT).write_text(
        '{"updates": 19}'
    )  # not finished: the sweep's own counts
    joined = report_on(file, *where)
    assert [program["state"] for program in joined["programs"]] == ["done"] * 6
    assert [Path(program["folder"]).parent.name for program in joined["programs"]] == ["runs"] * 3 + [
        "finished"
    ] * 3
    for name in ("cells", "curves"):
        for one, other in zip(whole[name], joined[name], strict=True):
            for key in ("last", "scores"):
                np.testing.assert_equal(one.get(key), other.get(key))
    assert joined["other_data"] == [TASKS[2]]
    assert joined["data"] == whole["data"] and joined["data"]  # though nothing of them lies here any more
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert "3 of commit 000000000000 on Abacus, 2 cores; 3 of commit 111111111111 on Abacus, 3 cores." in text
    assert f"**Not the same data:** runs on {TASKS[2]} were" in text
    plan = layout.with_finished(layout.load(file, {}, str(tmp_path / "runs")), [str(stored)])
    assert [line.split()[0] for line in list(records.status(plan.programs))[1:7]] == ["done"] * 6
    again = layout.with_finished(
        layout.load(file, {"overwrite": True}, str(tmp_path / "runs")), [str(stored)]
    )
    assert set(again.programs) == set(places)  # what is to be trained again is trained in its own folder
    with pytest.raises(ValueError, match=r"is no folder: experiments\.report --store"):
        report_on(file, *where, "--finished=nowhere")


def test_data_are_those_of_the_finished_runs_whatever_lies_on_this_machine(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "draw", lambda folder, result: None)
    file, where, programs = finished
    places = list(programs)[::3]  # of the first tier

    def reported(transitions: int, score: float | None = None) -> Any:
        """With a file of this many on this machine, whose mean score is a hundredth of that unless it is given."""
        record = {"transitions": transitions, "normalized_return_d4rl": score or transitions / 100}
        log.write_json(tmp_path / "locomotion" / f"{TASKS[0]}.json", record)
        return report_on(file, *where, f"--set=dataset={TASKS[0]}")["data"].get(TASKS[0])

    def say(place: Path, **said: Any) -> None:
        log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | said)

    say(places[0], digest="a")
    say(places[1], digest="a", transitions=None)  # as older runs
    known = {"transitions": 600, "normalized_return": 6.0, "digest": "a"}
    assert reported(600) == known
    assert reported(100) == known  # of the earlier report
    say(places[0], transitions=None)
    assert reported(100) == known  # by its digest
    for place in places:
        say(place, digest="b", transitions=600)
    assert reported(100) == {"transitions": 600, "digest": "b"}  # the earlier report's are other data
    assert reported(600) == known | {"digest": "b"}
    assert reported(600, score=99.0) == known | {"digest": "b"}  # a file of other data of that size
    say(place, digest="c")
    assert reported(600) is None
    assert (
        f"**Not the same data:** runs on {TASKS[0]} were" in (tmp_path / "out" / studies.REPORT).read_text()
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a sweep file: python -m experiments.report"),
        (["{file}", "--set=sedes=2"], "board.yaml: .* no setting 'sedes': did you mean 'seeds'"),
        (["{file}", "--set=dataset"], "--set takes flag=value"),
        (["{file}", "--count=3"], "board.yaml: --count: only a random sweep draws its runs"),
        (["{file}", "{random}", "--count=3"], "in .*board.yaml, eval/success in"),  # and not its --count
        (["{file}", "{file}", "--workdir=runs"], "--workdir is the folder of one sweep"),
        (["{file}", "--workdir=nosuch"], "--workdir=nosuch is no folder"),
        (["{file}", "{file}"], r"are both bc on hopper-medium-regen-v5 with the same seed"),
        (["{file}", "{success}"], "eval/normalized_return in .*board.yaml, eval/success in .*other.yaml"),
        (
            ["{success}", "--workdir={runs}"],
            "no finished run has scores of the metric eval/success; they have eval/norm",
        ),
        (["{file}", "--baseline=sac"], "--baseline=sac: no run of these sweeps has that"),
        (["{file}x"], "there is no file .*board.yamlx; .*give a sweep file, such as"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    argv: list[str], message: str, finished: Any, tmp_path: Path
) -> None:
    file, where, _ = finished
    other = tmp_path / "other.yaml"
    other.write_text(Path(file).read_text().replace("eval/normalized_return", "eval/success"))
    random = tmp_path / "random.yaml"
    random.write_text(other.read_text().replace("grid", "random"))
    names = {
        "file": file,
        "success": str(other),
        "random": str(random),
        "runs": str(tmp_path / "runs"),
    }
    with pytest.raises(ValueError, match=message):
        report_on(*(word.format(**names) for word in argv), where[1])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sweep_says_what_one_gets_who_can_try_k_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which settings are one agent's, whose scores choose and which count, of runs that were trained together."""
    monkeypatch.setattr(report_tuning, "_EPISODES", 5)
    parameters = {
        "agent": {"value": "iql"},
        "agent.temperature": {"values": [1.0, 3.0, 9.0, 27.0]},
        "head": {"values": ["scalar", "quantile"]},
        "dataset": {"value": TASKS[0]},
        "seeds": {"value": 3},
        "updates": {"value": 20},
        "eval_every": {"value": 10},
        "eval_episodes": {"value": EPISODES},
    }
    file = board(tmp_path, parameters=parameters)
    plan = layout.load(file, {}, str(tmp_path / "runs"))
    place, other = plan.programs
    scores = np.random.default_rng(1).normal(size=(2, 4, 3, EPISODES)) + np.arange(4)[:, None, None] / 9
    for folder in (place, other):
        leave(folder, scores.reshape(2, 12, EPISODES), finished=False)
        variants = [
            {"parameters": {"t": i}, "scores": outcomes.summary(outcomes.scored_rows(folder), i, 4)}
            for i in range(4)
        ]
        log.result(folder, {"updates": 20, "wall_seconds": 1.0, "variants": variants})
    (other / log.METRICS).unlink()
    part = next(report_runs.read(plan))
    of_lists = part._replace(
        variant="iql, hidden=[8, 8], scalar", parameters=part.parameters | {"agent.hidden": [8, 8]}
    )
    assert report_tuning._agent(of_lists) == "iql, scalar"
    result = report.run([plan], str(tmp_path / "out"))
    row, lost = result["tuned"]
    assert (row["agent"], row["task"], len(row["variants"])) == ("iql, scalar", TASKS[0], 4)
    assert (lost["agent"], lost["bandit"]) == ("iql, quantile", None)
    last = scores[-1]
    each = last.mean(-1)  # [setting, seed]
    for k, best in zip([1, 2, 3, 4], row["best"], strict=True):
        expected = []
        for seed in range(3):
            others = np.delete(each, seed, 1).mean(1)
            subsets = [list(subset) for subset in itertools.combinations(range(4), k)]
            expected.append(np.mean([each[subset, seed][others[subset].argmax()] for subset in subsets]))
        np.testing.assert_allclose(best["each"], expected)
        assert "ci95" not in best  # these three share seeds
        np.testing.assert_allclose(best["mean"], np.mean(expected))
    played, counted = last[..., : EPISODES // 2].reshape(12, -1), last[..., EPISODES // 2 :].reshape(12, -1)
    curve = selection.bandit(
        played, 5, jax.random.key(0), scores=counted.mean(1), alpha=2 * float(np.ptp(played)) ** 2
    )
    np.testing.assert_array_equal(row["bandit"]["mean"], curve.mean)
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert "| agent | task | k = 1 | k = 2 | k = 3 | all |\n" in text and "] (4) |\n" in text
    assert f" | {np.mean(expected):.1f} [{min(expected):.1f}, {max(expected):.1f}] (4) |\n" in text
    assert f"]({TASKS[0]}-choice.png)" in text and (tmp_path / "out" / f"{TASKS[0]}-choice.png").exists()
    assert f"episodes of the last evaluation are missing: `iql, quantile` on {TASKS[0]}." in text
    parts, name = [*report_runs.read(plan)], "normalized_return"
    diverged = records.State("failed", 1, 2, 0.0, f"{records.DIVERGENCE}: at update 5")
    others = [  # two settings of the first row: one that diverged, and one that has not begun
        part._replace(
            variant=part.variant.replace(str(part.parameters["agent.temperature"]), str(temperature)),
            parameters=part.parameters | {"agent.temperature": temperature},
            state=state,
            result=None,
            scores=None,
        )
        for part, temperature, state in (
            (parts[0], 88.0, diverged),
            (parts[1], 99.0, diverged._replace(name="waiting")),
        )
    ]
    row, lost = report_tuning.tuned([*parts, *others], result["cells"], name)["tuned"]
    assert row["without"] == {"diverged": 1, "unfinished": 1} and lost["without"] == {}
    assert row["tries"] == [1, 2, 3, 4]
    blocks = [*report_page._tuning_blocks({"tuned": [row, lost], "rate": False})]
    assert "] (4 of 6: 1 diverged, 1 unfinished) |\n" in blocks[3] and "] (4) |" in blocks[3]
    assert blocks[2].startswith("Settings without a score are left out")
    two = [part for part in parts if part.index < 2]
    # As of two files, whose labels do not name what each of them fixes.
    four = [part._replace(parameters=part.parameters | {"n_step": 1 + part.index % 2}) for part in parts]
    for parts in (two, four):
        assert report_tuning.tuned(parts, result["cells"], name) == {}


# ---- what is stored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("results/boards/*/result.json")), ids=lambda x: x.parent.name
)
def test_a_stored_board_says_what_its_numbers_say(path: Path) -> None:
    """Nothing is typed in, and its scores are those of the runs that are stored with it."""
    result = studies.load(path)
    text = (path.parent / studies.REPORT).read_text()
    assert all(block in text for block in report_page.blocks(result))
    assert {*re.findall(r"\]\(([^)]*\.png)\)", text)} == {file.name for file in path.parent.glob("*.png")}
    stored = path.parent / report.STORED
    done = {Path(program["folder"]).name for program in result["programs"] if program["state"] == "done"}
    assert done == {place.name for place in stored.iterdir()} and done
    for place in stored.iterdir():
        assert (place / log.CONFIG).is_file() and (place / log.RESULT).is_file()


def test_many_curves_are_drawn_in_a_figure_for_each_agent_or_each_of_its_heads() -> None:
    """The stored pointmaze has three agents with five heads each, and four agents more."""
    text = (ROOT / "results" / "boards" / "pointmaze" / studies.REPORT).read_text()
    groups = re.findall(r"!\[pointmaze-medium-navigate-singletask-v0, (\w+)\]", text)
    assert groups == ["iql", "others", "rebrac", "td3_bc"]
    text = (ROOT / "results" / "boards" / "parallel" / studies.REPORT).read_text()  # one agent with fifteen
    groups = re.findall(r"!\[gymnax/CartPole-v1, dqn, (\w+)\]", text)
    assert groups == ["scalar", "two_hot", "hl_gauss", "c51", "quantile"]


def test_the_stored_online_agents_solve_their_tasks() -> None:
    """Near enough on average over seeds, from 20 steps of balance at random and from -1200."""
    least = {"CartPole-v1": 400.0, "Pendulum-v1": -250.0}
    folder = ROOT / "results" / "boards" / "classic"
    cells = studies.load(folder / log.RESULT)["cells"]
    assert len(cells) == 7
    text = (folder / studies.REPORT).read_text()  # more agents than tasks: those go down
    assert "|  | CartPole-v1 | Pendulum-v1 |\n" in text and "\n| `sac` |  | -1" in text
    assert {(x["variant"], x["task"]) for x in cells if x["last"]["mean"] < least[x["task"]]} == set()


@pytest.mark.slow
def test_shorter_runs_take_the_place_of_no_longer_ones(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a report nor where it stores them: their folders have the same names."""
    file, where, programs = finished
    report_on(file, *where, "--store")
    short = layout.load(file, {"updates": 10}, str(tmp_path / "short"))
    for place, program in short.programs.items():
        leave(place, SCORES[0, 0, :1])
        card(program, place)
        log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | {"updates": 10})
    assert {place.name for place in short.programs} == {place.name for place in programs}
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    flags = ["--set=updates=10", f"--workdir={tmp_path / 'short'}", f"--out={tmp_path / 'out'}", "--store"]
    with pytest.raises(ValueError, match="6 are not finished here, or are shorter"):
        report_on(file, *flags)
    with pytest.raises(ValueError, match="holds a run of 20 updates, more than the 10 of"):
        report_runs.store([short], tmp_path / "out" / report.STORED)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    # A copy over a shorter run that is cut short leaves no result of the one beside metrics of the other.
    assert report_runs.store([short], tmp_path / "other") == 6

    def full(source: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(report_runs.shutil, "copyfile", full)
    with pytest.raises(OSError, match="no space left"):
        report_runs.store([layout.load(file, {}, where[0].partition("=")[2])], tmp_path / "other")
    assert len(list((tmp_path / "other").rglob(log.RESULT))) == 5


@pytest.mark.parametrize(
    "file, folder",
    [
        ("boards/heads.yaml", "results/boards/heads"),
        ("heads_pointmaze.yaml", "runs/sweeps/heads_pointmaze/report"),
    ],
)
def test_only_reports_of_boards_go_to_the_stored_results(file: str, folder: str) -> None:
    assert report.usual_folder(layout.load(str(ROOT / "sweeps" / file), {}, "")) == Path(folder)


@pytest.mark.slow
def test_a_run_whose_metrics_were_lost_is_stored_and_named(finished: Any, tmp_path: Path) -> None:
    """Its scores are known; means over several evaluations are not."""
    file, where, programs = finished
    lost = next(iter(programs))
    (lost / log.METRICS).unlink()
    result = report_on(file, *where, "--store")
    kept = {path.name for path in (tmp_path / "out" / report.STORED / lost.name).iterdir()}
    assert kept == {log.CONFIG, log.RESULT}
    assert len(result["cells"]) == len(result["curves"]) + 1
    assert (
        f"metrics of their runs were lost: `{result['cells'][0]['variant']}` on"
        in (tmp_path / "out" / studies.REPORT).read_text()
    )
    with pytest.raises(ValueError, match=f"{lost.name} has no metrics.jsonl: leave --evaluations out"):
        report_on(file, *where, "--evaluations=2")


def test_all_sessions_of_a_run_are_named(finished: Any, tmp_path: Path) -> None:
    """A run that went on under other code, or on another machine, is not the last one's alone."""
    file, where, programs = finished
    host = {"cpu": "A", "backend": "cpu", "cores": 1, "device": "cpu", "devices": 1}
    sessions = [
        {"commit": f"{name * 40}{tail}", "hardware": host} for name, tail in (("a", ""), ("b", "-dirty"))
    ]
    for place in programs:
        first = log.read_json(place / log.CONFIG) | sessions[0] | {"resumed": [sessions[1]]}
        log.write_json(place / log.CONFIG, first)
        log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | sessions[1])
    (row,) = report_on(file, *where)["machines"]
    assert row["commit"] == f"{'a' * 12}, then {'b' * 12}-dirty"
    assert (row["hardware"], row["programs"]) == ("A, 1 core", 6)


def test_a_metric_that_is_to_be_small_has_no_report(tmp_path: Path) -> None:
    file = board(tmp_path, metric={"name": "eval/length", "goal": "minimize"})
    with pytest.raises(ValueError, match="the goal of eval/length is to minimize it"):
        report.run([layout.load(file, {}, str(tmp_path / "runs"))], str(tmp_path / "out"))


def test_one_name_with_several_settings_is_said(tmp_path: Path) -> None:
    """Of two files with one task each, whose scores are put together."""
    plans = []
    for task, rate in zip(TASKS[:2], (0.1, 0.2), strict=True):
        parameters = {"agent": "bc", "dataset": task, "seeds": SEEDS, "updates": 20, "eval_every": 10}
        given = {name: {"value": x} for name, x in (parameters | {"agent.learning_rate": rate}).items()}
        plan = layout.load(board(tmp_path, parameters=given), {}, str(tmp_path / task))
        for place, program in plan.programs.items():
            leave(place, SCORES[0, 0])
            card(program, place)
        plans.append(plan)
    result = report.run(plans, str(tmp_path / "out"))
    assert result["other_settings"] == {
        "bc": {"agent.learning_rate": dict(zip(TASKS[:2], ("0.1", "0.2"), strict=True))}
    }
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert (
        f"`bc` has --agent.learning_rate=0.1 on {TASKS[0]}, --agent.learning_rate=0.2 on {TASKS[1]}" in text
    )


def test_curves_of_seeds_meet_at_the_same_steps_and_scores_at_those_that_are_due(tmp_path: Path) -> None:
    """Where one of two runs lost a line of its metrics."""
    parameters = {
        "agent": {"value": "bc"},
        "dataset": {"value": TASKS[0]},
        "seed": {"values": [0, 1]},
        "seeds": {"value": SEEDS},
        "updates": {"value": 40},
        "eval_every": {"value": 10},
    }
    plan = layout.load(board(tmp_path, parameters=parameters), {}, str(tmp_path / "runs"))
    scores = np.concatenate([SCORES[0, 0], SCORES[0, 1]])  # four evaluations
    for place, program in plan.programs.items():
        leave(place, scores)
        card(program, place)
        log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | {"updates": 40})
    lines = (place / log.METRICS).read_text().splitlines(keepends=True)
    (place / log.METRICS).write_text("".join(lines[:2] + lines[3:]))
    (curve,) = report.run([plan], str(tmp_path / "out"))["curves"]
    assert curve["steps"].tolist() == [10, 20, 40]
    each = scores.mean(-1)[[0, 1, 3]]
    np.testing.assert_allclose(curve["scores"], np.concatenate([each, each], 1))
    with pytest.raises(ValueError, match="lacks some of the last ones"):
        report.run([plan], str(tmp_path / "out"), evaluations=2)


@pytest.mark.parametrize(
    "of, said",
    [
        ({}, "2 tasks, last evaluation, 3 seeds, 200,000 updates"),
        ({"variants": []}, "2 tasks, last evaluation, 3 seeds"),
        ({"length": 100}, "2 tasks, last evaluation, 3 seeds, 100 to 200,000 updates"),
    ],
)
def test_figures_of_aggregates_say_of_how_many_seeds_and_updates(of: dict[str, Any], said: str) -> None:
    program = {"state": "done", "task": "a", "variants": ["iql"], "length": 200_000}
    result = {
        "aggregate_tasks": ["a", "b"],
        "aggregates": {"iql": {}},
        "cells": [{"variant": "iql", "task": task, "last": {"each": [1.0] * 3}} for task in "ab"],
        "programs": [program | of, program | {"task": "b"} | of | {"length": 200_000}],
        "unit": "updates",
        "data": {},
    }
    assert report_page._of_what(result) == said
    assert report_page._of_what(result | {"data": {"a": {}}}).startswith("2 tasks, data regenerated here,\n")


def test_error_bars_of_interquartile_means_are_as_wide_as_students() -> None:
    """With the t of printed tables, 12.706 for one degree of freedom and 2.064 for 24; and by simulation."""
    assert report_page._bootstrap_width(2, 1) == pytest.approx(np.sqrt(1 / 2) * 1.960 / 12.706, rel=1e-3)
    assert report_page._bootstrap_width(5, 6) == pytest.approx(np.sqrt(4 / 5) * 1.960 / 2.064, rel=1e-3)
    seen = []
    for scores in np.random.default_rng(0).normal(size=(200, 5, 1)):
        low, high = statistics.bootstrap(statistics.mean, scores, resamples=400)
        seen.append((high - low) / np.ptp(statistics.interval(scores[:, 0])))
    assert np.mean(seen) == pytest.approx(report_page._bootstrap_width(5, 1), rel=0.05)
    assert report_page._widened(5.0, [4.0, 7.0], width=0.5, rate=False) == (5.0, 3.0, 9.0)
    assert report_page._widened(0.9, [0.8, 0.96], width=0.5, rate=True) == pytest.approx((0.9, 0.7, 1.0))


def test_a_finished_run_without_the_score_is_listed(finished: Any, tmp_path: Path) -> None:
    file, where, programs = finished
    place = next(iter(programs))
    log.write_json(place / log.RESULT, log.read_json(place / log.RESULT) | {"scores": {}})
    result = report_on(file, *where)
    assert [program["state"] for program in result["programs"]] == ["no scores", *["done"] * 5]
    assert "its result has no normalized_return" in (tmp_path / "out" / studies.REPORT).read_text()


def test_runs_that_never_succeed_count_where_an_environment_reports_only_successes(tmp_path: Path) -> None:
    """They have no such score in their logs: left out, the others' mean would be that of all.

    Cloning succeeds with one seed and never with the other, nor does IQL, one of whose runs is not finished.
    """
    values = {
        "agent": ["bc", "iql"],
        "dataset": TASKS[:1],
        "seed": [0, 2],
        "seeds": [2],
        "updates": [20],
        "eval_every": [10],
    }
    parameters = {name: {"values": x} for name, x in values.items()}
    plan = layout.load(board(tmp_path, parameters=parameters), {}, str(tmp_path / "runs"))
    for number, (place, program) in enumerate(plan.programs.items()):
        place.mkdir(parents=True)
        card(program, place)
        row = {"step": 20, "eval/return": [[1.0, 1.0]] * 2}
        row |= {"eval/success": [[1.0, 1.0]] * 2} if number == 0 else {}
        (place / log.METRICS).write_text(json.dumps(row) + "\n")
        if number < 3:
            scores = outcomes.summary(outcomes.scored_rows(place))
            log.result(place, {"updates": 20, "wall_seconds": 1.0, "scores": scores})
    parts = list(report_runs.read(plan))
    returns, filled = (report_runs.with_rates(parts, score) for score in ("return", "success"))
    assert returns == parts
    curves = {row["variant"]: row["scores"] for row in report_scores.curves(filled, "success", [])}
    np.testing.assert_equal(curves, {"bc": [[1, 1, 0, 0]], "iql": [[0, 0, 0, 0]]})
    (cell,) = report_scores.cells(filled, "success", 1)
    assert (cell["variant"], cell["last"]["mean"]) == ("bc", 0.5)
    assert [report_runs.fate(part, "success") for part in filled] == [
        "done",
        "done",
        "done",
        parts[3].state.name,
    ]


def test_seeds_that_do_not_overlap_have_no_interval(finished: Any, tmp_path: Path) -> None:
    """Of the probability of improvement: all resamples say the same."""
    file, where, programs = finished
    for (agent, task), place in zip(itertools.product(range(2), range(3)), programs, strict=True):
        shutil.rmtree(place)
        leave(place, SCORES[0, task] + 1000 * agent)
        card(programs[place], place)
    report_on(file, *where)
    text = (tmp_path / "out" / studies.REPORT).read_text()
    assert "| `iql` | `bc` | 1.00 |" in text and "Without an interval where the seeds" in text
