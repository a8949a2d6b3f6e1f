"""The harness of studies: nothing finished is trained twice, nothing else is recalled, and claims have verdicts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import checks, goals, offline, source_code, studies, study_runs
from rl import log
from rl.train import Diverged

TRAINED: list[str] = []


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    seeds: int = 3
    workdir: str = "here"


def tiny(name: str, dies: bool, work: studies.Work) -> Any:
    TRAINED.append(name)
    if dies:
        raise KeyboardInterrupt
    work.folder.mkdir(exist_ok=True)
    work.progress(2)
    return {"returns": [1.0, float("nan")], "name": name, "rows": [[1, 2], [3]], 4.0: ()}


tiny.__module__ = "tests.test_studies"  # as seen from the project


def variants(dies: str = "", **settings: Any) -> dict[str, studies.Variant]:
    return {
        name: studies.Variant(functools.partial(tiny, name, name == dies), settings, 2)
        for name in ("first", "second")
    }


def train(folder: Path, chosen: dict[str, studies.Variant], **changes: Any) -> studies.Finished:
    return studies.train(Settings(workdir=str(folder), **changes), chosen, "tiny")


@pytest.fixture(autouse=True)
def nothing_trained() -> None:
    TRAINED.clear()


def test_a_study_that_was_killed_trains_only_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, variants(dies="second"))
    assert TRAINED == ["first", "second"]
    (clock,) = tmp_path.glob("second.*.seconds.json")
    assert json.loads(clock.read_text())["seconds"] > 0
    clock.write_text('{"seconds": 1000}')  # of the variant that was stopped
    finished = train(tmp_path, variants())
    assert 1000 < finished.seconds < 1100 and not clock.exists()
    assert TRAINED == ["first", "second", "second"] and list(finished.outcomes) == ["first", "second"]
    again = train(tmp_path, variants())
    assert len(TRAINED) == 3 and again.seconds == finished.seconds > 0
    np.testing.assert_equal(again.outcomes, finished.outcomes)
    np.testing.assert_array_equal(finished.outcomes["first"]["returns"], [1, np.nan])
    assert finished.outcomes["second"]["name"] == "second" and finished.outcomes["first"]["4.0"] == []


def together(barrier: threading.Barrier, name: str, work: studies.Work) -> Any:
    TRAINED.append(name)
    barrier.wait(timeout=60)  # until the other process trains, too
    with pytest.raises(ValueError, match=r"--overwrite: another process trains (first|second)"):
        train(work.folder.parent, shared(barrier), overwrite=True)
    return {"name": name}


together.__module__ = "tests.test_studies"


def shared(barrier: threading.Barrier) -> dict[str, studies.Variant]:
    return {x: studies.Variant(functools.partial(together, barrier, x), {}) for x in ("first", "second")}


def test_processes_of_one_study_share_its_variants(tmp_path: Path) -> None:
    chosen = shared(threading.Barrier(2))
    with concurrent.futures.ThreadPoolExecutor(
        2
    ) as pool:  # a lock is an open file's: threads are like processes
        finished = list(pool.map(lambda _: train(tmp_path, chosen), range(2)))
    assert sorted(TRAINED) == ["first", "second"]
    assert [sorted(x.outcomes) for x in finished] == [["first", "second"]] * 2


def test_a_changed_setting_or_a_wish_trains_again(tmp_path: Path) -> None:
    train(tmp_path, variants(rate=0.1))
    train(tmp_path, variants(rate=0.2))
    assert TRAINED == ["first", "second"] * 2
    train(tmp_path, {"first": variants(rate=0.2)["first"]}, overwrite=True)
    train(tmp_path, variants(rate=0.2))
    assert TRAINED == ["first", "second"] * 2 + ["first"]
    train(
        tmp_path, variants(rate=0.1)
    )  # each has files of its own: commands of other settings may run beside it
    assert len(TRAINED) == 5
    for file in tmp_path.glob("first.*.json"):
        file.write_text("{}")
    train(tmp_path, variants(rate=0.2))
    assert TRAINED[5:] == ["first"]


STUDY = '''
"""A study."""
from experiments import goals, offline, studies
from rl import agent, plot as pictures
from rl.heads import mean

RATE, COLOUR = 0.1, "red"
WIDTH = 3

def train(work):
    """Trains."""
    import rl.late
    return helper(RATE)

def helper(rate):
    return agent.update(rate)  # a comment

def draw(width=WIDTH):
    pictures.lines(mean(width))
'''
PROJECT = {
    "experiments/a_study.py": STUDY,
    "experiments/studies.py": "",
    "rl/__init__.py": "",
    "rl/agent.py": "from rl.inner import part\n\ndef update(x):\n    return part.ONE * x\n\nBY_NAME = 'rl.named'\n",
    "rl/named.py": "FIVE = 5",
    "rl/heads/__init__.py": "mean = 1",
    "rl/inner/__init__.py": "from rl.inner import part, other",
    "rl/inner/part.py": "ONE = 1",
    "rl/inner/other.py": "TWO = 2",
    "rl/late.py": "THREE = 3",
    "rl/plot.py": "FOUR = 4",
    "README.md": "words",
}


def test_the_digest_is_of_the_code_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training uses changes it; words, figures, and modules that it does not import do not."""
    monkeypatch.setattr(source_code, "_ROOT", tmp_path)
    for path, text in PROJECT.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def train() -> None: ...

    train.__module__, train.__qualname__ = "experiments.a_study", "train"
    variant = studies.Variant(train, {"updates": 3})  # type: ignore[arg-type]

    def forget() -> None:
        for cached in (source_code._file, source_code.needed, source_code._whole):
            cached.cache_clear()

    def digest_with(path: str, old: str, new: str) -> str:
        text = PROJECT[path]
        assert old in text
        (tmp_path / path).write_text(text.replace(old, new))
        forget()
        try:
            return studies.digest("a", variant)
        finally:
            (tmp_path / path).write_text(text)
            forget()

    forget()

    try:
        before = studies.digest("a", variant)
        same = [
            ("README.md", "words", "other words"),
            ("experiments/a_study.py", "A study.", "Another docstring."),
            ("experiments/a_study.py", "Trains.", "Trains, differently put."),
            ("experiments/a_study.py", "# a comment", "# another"),
            ("experiments/a_study.py", "pictures.lines(", "pictures.bars("),
            ("experiments/a_study.py", "WIDTH = 3", "WIDTH = 4"),
            ("rl/heads/__init__.py", "1", "2"),
            ("rl/inner/__init__.py", "other", "other as another"),
            ("rl/inner/other.py", "2", "3"),
            ("rl/plot.py", "4", "5"),
        ]
        assert [change for change in same if digest_with(*change) != before] == []
        other = [
            ("experiments/a_study.py", "0.1", "0.2"),
            ("experiments/a_study.py", "agent.update(rate)", "agent.update(2 * rate)"),
            ("rl/agent.py", "return part", "return 2 * part"),
            ("rl/inner/part.py", "1", "2"),
            ("rl/late.py", "3", "4"),
            ("rl/named.py", "5", "6"),  # which importlib would import
        ]
        assert [change for change in other if digest_with(*change) == before] == []
        assert studies.digest("b", variant) != before
        assert studies.digest("a", variant._replace(settings={"updates": 4})) != before
        assert studies.digest("a", variant._replace(steps=7)) == before
    finally:
        forget()


def test_functions_that_a_variant_is_given_are_part_of_its_code_by_place_or_by_name() -> None:
    def digest(*arguments: Any, **named: Any) -> str:
        train = functools.partial(checks.multiple, *arguments, **named)
        return studies.digest("a", studies.Variant(train, {}))

    assert digest(by=checks.number) == digest(checks.number) != digest()


def test_code_outside_the_project_is_refused() -> None:
    with pytest.raises(ValueError, match="json is no module of"):
        studies.digest("a", studies.Variant(json.dumps, {}))  # type: ignore[arg-type]


def test_claims_hold_or_do_not_or_are_undecided() -> None:
    rows = studies.judged(
        [
            studies.Claim("all above 1", "ours", [2.0, 3.0], studies.every(lambda x: x > 1)),
            studies.Claim("all above 2", "a paper", [2.0, 3.0], studies.every(lambda x: x > 2)),
            studies.Claim("mean above 2", "", np.array([2, 3]), studies.mean_within(low=2)),
            studies.Claim("mean near 1", "", [1.0, 1.1, 0.9], studies.mean_within(0.7, 1.3)),
            studies.Claim("mean near 1", "", [1.0, 1.1, 0.9], studies.mean_within(0.8, 1.3)),
            studies.Claim("mean below 0.7", "", [1.0, 1.1, 0.9], studies.mean_within(high=0.7)),
            studies.Claim("mean above 0", "", [1.0], studies.positive),
            studies.Claim("mean above 0", "", [1.0, np.nan], studies.positive),
            studies.Claim("gains", "", [1.0, 1.1, 0.9], studies.positive),
            studies.Claim("gains", "", [-1.0, -1.1, -0.9], studies.positive),
            studies.Claim("gains", "", [-1.0, 1.1, 0.9], studies.positive),
            studies.Claim("all the same", "", [1.0, 1.0], studies.positive),
        ]
    )
    assert [row["verdict"] for row in rows] == [
        "holds", "does not hold", studies.OPEN, "holds", studies.OPEN, "does not hold", studies.OPEN,
        studies.OPEN, "holds", "does not hold", studies.OPEN, studies.OPEN,
    ]  # fmt: skip
    assert rows[1] == {
        "claim": "all above 2", "published": "a paper", "here": "2.5 [2, 3]",
        "verdict": "does not hold",
    }  # fmt: skip
    assert rows[3]["here"] == "1 [0.752, 1.25]"
    _, table = studies.claims_table(rows[:1])
    assert table.splitlines() == [
        "| claim | published | here | verdict |", "|---|---|---|---|", "| all above 1 | ours | 2.5 [2, 3] | holds |",
    ]  # fmt: skip
    assert list(studies.claims_table([])) == []


def test_what_a_study_leaves_can_be_read_and_judged_again(tmp_path: Path) -> None:
    def claims(result: Any) -> list[studies.Claim]:
        return [studies.Claim("gain", "ours", result["gain"], studies.positive)]

    settings = Settings(out=str(tmp_path / "new"))
    result = studies.finish(settings, {"gain": np.array([1.0, 2.0])}, lambda result: ["# Title"], claims)
    stored = studies.load(tmp_path / "new" / log.RESULT)
    assert stored["claims"] == result["claims"] == studies.judged(claims(stored))
    assert {"command", "commit", "versions", "hardware", "settings"} < stored.keys()
    lines = (tmp_path / "new" / studies.REPORT).read_text().splitlines()
    assert lines[0] == "# Title" and lines[2] == "## Claims" and "not decided" in lines[-1]
    assert studies.chosen(settings) == {"seeds": 3} and studies.chosen(settings, "seeds") == {}


@dataclasses.dataclass(frozen=True)
class RowSettings(studies.RowSettings):
    seeds: int = 3
    parts: str = "small,large"
    tasks: str = "first,second"
    large_steps: int = 10


def train_rows(folder: Path, **changes: Any) -> dict[str, Any]:
    """A study of two rows; those that are stored are not asked to be trained."""
    settings = RowSettings(out=str(folder), **changes)
    earlier = studies.stored(settings, ["task"])
    chosen = {name: x for name, x in variants().items() if (name,) not in earlier.rows}
    rows = [({"task": name}, name) for name in settings.tasks.split(",")]
    return studies.train_rows(settings, chosen, rows, lambda x: [studies.origin(x)], lambda x: (), earlier)


def test_rows_that_other_commands_trained_are_taken_with_where_they_are_from(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    train_rows(elsewhere, tasks="first")
    log.write_json(
        elsewhere / log.RESULT,
        {
            **studies.load(elsewhere / log.RESULT),
            "commit": "1234567890",
            "hardware": {"cpu": "Another", "cores": 1},
        },
    )
    TRAINED.clear()
    result = train_rows(here, stored=str(elsewhere))
    assert TRAINED == ["second"] and [row["task"] for row in result["rows"]] == ["first", "second"]
    first, second = result["rows"]
    assert first["provenance"]["commit"] == "1234567890" and "provenance" not in second
    assert "1 of 2 rows are of" in studies.origin(
        result
    ) and "(1234567890, Another, 1 core)" in studies.origin(result)
    # A result that was joined keeps where its rows are from when it is joined again, and the last folder counts.
    result = train_rows(tmp_path / "third", stored=f"{elsewhere},{here}")
    assert [row["provenance"]["hardware"]["cpu"] == "Another" for row in result["rows"]] == [True, False]
    assert TRAINED == ["second"]


def test_what_was_trained_by_other_code_or_elsewhere_keeps_its_own_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a study goes on after an update of JAX, or on another machine: the header is of the last command alone."""
    train_rows(tmp_path / "rows")
    next((tmp_path / "rows" / "variants").glob("second.*.json")).unlink()
    train(tmp_path / "named", {"first": variants()["first"]})
    TRAINED.clear()
    before = log.provenance()
    now = before | {"versions": before["versions"] | {"jax": "99.0"}, "commit": "1234567890"}
    monkeypatch.setattr(log, "provenance", lambda: now)
    result = train_rows(tmp_path / "rows")
    assert [row.get("provenance") for row in result["rows"]] == [before, None]
    assert f", jax {before['versions']['jax']} for 99.0)." in studies.origin(result)
    finished = train(tmp_path / "named", variants())
    assert finished.others == {"first": before} and TRAINED == ["second", "second"]
    settings = RowSettings(out=str(tmp_path))
    result = studies.finish(settings, {}, lambda _: ["# Title"], trained=finished)
    assert [row.get("provenance") for row in result["others"]] == [before, None]
    assert "1 of 2 trained variants are of `" in (tmp_path / studies.REPORT).read_text()
    only = finished._replace(others={})
    assert "others" not in studies.finish(settings, {}, lambda _: ["# Title"], trained=only)


def test_a_report_names_the_rows_that_are_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    monkeypatch.setattr(studies, "write_blocks", lambda path, blocks: reports.append(blocks))
    train_rows(tmp_path)
    (first, heading, rows), *_, last = reports
    assert " **Not finished**: 1 of 2 rows, listed at the end" in first
    assert (heading, rows) == ("## Not finished", "- second")
    assert len(last) == 1 and "finished" not in last[0]


def test_rows_that_were_trained_on_other_data_are_named() -> None:
    results = [{"data_digests": {"maze": ["b", "c"], "cube": ["d"]}}, {}]  # one is of before they were stored
    digests = studies.data_digests({"maze": "a", "cube": "d"}, studies.Stored({}, results))
    assert digests == {"maze": ["a", "b", "c"], "cube": ["d"]}
    (sentence,) = studies.other_data({"data_digests": digests})
    assert sentence.startswith("Rows of maze were trained on data that were made again")
    assert list(studies.other_data({})) == list(studies.other_data({"data_digests": {"cube": ["d"]}})) == []


def test_only_cells_that_are_not_stored_have_their_data_made(tmp_path: Path) -> None:
    made, drawn = [], []

    def source(name: str) -> str:
        made.append(name)
        return f"{name}.npz"

    def study(folder: Path, cells: dict[tuple[str, str], str], stored: str = "") -> dict[str, Any]:
        return studies.train_cells(
            RowSettings(out=str(folder), stored=stored),
            ("task", "log"),
            cells,
            source,
            lambda cell, place: variants(place=place)[cells[cell]],
            lambda result: ["# Title"],
            lambda result: (),
            lambda folder, result: drawn.append((folder, len(result["rows"]))),
            data="log",
            parts=lambda sources, earlier: {"sources": sources, "stored": len(earlier.rows)},
        )

    first = {("walk", "slow"): "first"}
    study(tmp_path / "one", first)
    result = study(
        tmp_path / "all",
        first | {("run", "fast"): "second", ("jump", "fast"): "second"},
        stored=str(tmp_path / "one"),
    )
    assert made == ["slow", "fast"] and TRAINED == ["first", "second"]
    assert drawn == [(tmp_path / "one", 1), (tmp_path / "all", 3)]
    assert result["sources"] == {"fast": "fast.npz"} and result["stored"] == 1
    told = [(row["task"], row["log"], row["name"]) for row in result["rows"]]
    assert told == [("walk", "slow", "first"), ("run", "fast", "second"), ("jump", "fast", "second")]


def test_stored_rows_that_do_not_compare_are_refused(tmp_path: Path) -> None:
    train_rows(tmp_path / "few", seeds=2)
    with pytest.raises(ValueError, match=r"few was made with --seeds=2, and this command has 3"):
        train_rows(tmp_path / "more", stored=str(tmp_path / "few"))
    # What was set of a part that was not run does not count.
    for parts, refused in (("small,large", True), ("small", False)):
        train_rows(tmp_path / parts.replace(",", "-"), parts=parts, large_steps=5)
        with pytest.raises(ValueError, match="large_steps=5") if refused else contextlib.nullcontext():
            train_rows(tmp_path / "more", stored=str(tmp_path / parts.replace(",", "-")))
    with pytest.raises(ValueError, match=r"--stored: there is no result.json in .*nowhere"):
        train_rows(tmp_path / "more", stored=str(tmp_path / "nowhere"))


def test_a_study_prints_its_report_and_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(out=str(tmp_path))
    monkeypatch.setattr(studies.flags, "read", lambda _: settings)
    monkeypatch.setattr(studies.app, "run", lambda command, flags_parser: command([]))
    studies.main(settings, lambda chosen: studies.finish(chosen, {}, lambda _: ["# Title"]))
    stdout = capsys.readouterr().out
    monkeypatch.setattr(studies.flags, "read", lambda _: dataclasses.replace(settings, seeds=2))
    with pytest.raises(SystemExit):  # before anything is trained
        studies.main(settings, lambda chosen: pytest.fail("it ran"))
    assert "--seeds=3 there, 2 here" in capsys.readouterr().err
    assert stdout.startswith("# Title\n")
    assert stdout.endswith(f"Everything is in {tmp_path}; look at {studies.REPORT} first.\n")


def test_a_result_of_other_settings_is_kept(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Study(studies.RowSettings):
        seeds: int = 3
        parts: str = "one,two"
        hidden: tuple[int, ...] = (64, 64)

    usual = Study(out=str(tmp_path))
    studies.finish(usual, {}, lambda _: ["# Title"])
    change = functools.partial(dataclasses.replace, usual)
    for settings in (
        usual,
        change(stored="runs/more"),
        change(parts="two,three,one"),
        change(seeds=2, overwrite=True),
        change(seeds=2, out=str(tmp_path / "elsewhere")),
    ):
        studies.check_kept(settings, usual)
    for changes, names in (
        ({"seeds": 2, "hidden": (8,)}, r"--seeds=3 there, 2 here; --hidden=\[64, 64\] there, \[8\] here"),
        ({"parts": "one"}, "--parts=one,two there, one here"),
    ):
        with pytest.raises(ValueError, match=rf"{names}.*--out=runs/papers/NAME, or --overwrite"):
            studies.check_kept(change(**changes), usual)
    log.write_json(tmp_path / log.RESULT, {"settings": {}})
    studies.check_kept(usual, usual)
    with pytest.raises(ValueError, match="--seeds=3 there, 2 here"):
        studies.check_kept(change(seeds=2), usual)  # an older result had the default
    log.write_json(tmp_path / log.RESULT, {})
    with pytest.raises(ValueError, match="not a result of this study"):
        studies.check_kept(usual, usual)


STORED = {
    **{name: [f"papers/{name}"] for name in ("iwocs", "r2pvi", "robust_deep", "icu_sepsis")},
    "stop_regressing": [
        f"papers/stop_regressing{place}"
        for place in ("", "/rates", "/plasticity", "/linear", "/sarsa", "/scaled")
    ],
    "arsq": ["papers/arsq", "papers/arsq/finer"],
    "edge_of_reach": [f"papers/edge_of_reach{place}" for place in ("", "/support", "/corrections", "/zero")],
    "model_quality": ["papers/model_quality", "papers/model_quality/critics_20"],
    "bcoder_dsl": ["papers/bcoder_dsl", "papers/bcoder_dsl/ablations"],
    "bcoder_rank": ["papers/bcoder_rank"],
    "hecrl": ["papers/hecrl", "papers/hecrl/longer"],
    "hecrl_cubes": ["papers/hecrl_cubes"],
    "proposals": ["papers/proposals", "papers/proposals/chunks"],
    "ilql_maze": [
        f"papers/ilql_maze{place}" for place in ("", "/c51_quantile", "/cloning", "/equal_updates")
    ],
    "stop_regressing_games": ["papers/stop_regressing_games", "papers/stop_regressing_games/wide"],
    "vagram": ["papers/vagram", "papers/vagram/standardised"],
    "vagram_online": ["papers/vagram_online", "papers/vagram_online/sizes"],
    "sac_mujoco": ["online"],
    "ogbench_goals": ["papers/ogbench_goals"],
}


@pytest.mark.parametrize("name", STORED)
def test_stored_claims_are_those_of_the_stored_numbers(name: str) -> None:
    """Nothing is typed in: every stored verdict follows from the numbers beside it, and stands in the report."""
    paper = importlib.import_module(f"experiments.papers.{name}")
    for folder in (Path(__file__).parents[1] / "results" / place for place in STORED[name]):
        stored = studies.load(folder / log.RESULT)
        assert stored["claims"] and stored["claims"] == studies.judged(paper.claims(stored))
        report = (folder / getattr(paper, "REPORT", studies.REPORT)).read_text()
        assert all(block in report for block in studies.claims_table(stored["claims"]))


def test_documented_commands_may_write_over_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is said to repeat a study would be refused where the stored result has other settings."""
    monkeypatch.chdir(Path(__file__).parents[1])
    pages = "".join(Path(page).read_text() for page in ("docs/papers.md", "results/README.md"))
    commands = re.findall(r"`python -m (experiments\.papers\.\w+)([^`]*)`", pages)
    assert {f"experiments.papers.{name}" for name in STORED} < {module for module, _ in commands}
    checked = 0
    for module, given in commands:
        usual = importlib.import_module(module).Settings()
        chosen = {
            name: type(getattr(usual, name))(text) for name, text in re.findall(r"--(\w+)=(\S+)", given)
        }
        settings = dataclasses.replace(usual, **chosen)
        if not settings.out.startswith("runs/"):  # which a clone does not have
            studies.check_kept(settings, usual)
            checked += Path(settings.out, log.RESULT).exists()
    assert checked > 40


def test_numbers_as_text() -> None:
    scores = np.array([3.0, 5.0, 4.0])
    assert studies.plus_minus(scores, ".2f") == "4.00 ± 2.48" and studies.plus_minus([4.0], ".1f") == "4.0"
    assert studies.between(scores, ".1f") == "4.0 [1.5, 6.5]"
    assert studies.between([1.0, 1.0], ".1f", rate=True) == "1.0 [0.0, 1.0]"
    assert studies.between({"mean": 1, "ci95": [0, 2]}, ".0f") == "1 [0, 2]"
    np.testing.assert_allclose(studies.bands([[1, 1], [2, 2]]), [[1, 2]] * 3)


def test_published_numbers_say_where_they_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(studies._PUBLISHED.glob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        assert len(studies.published(path.stem)["source"]) > 20
    monkeypatch.setattr(studies, "_PUBLISHED", tmp_path)
    (tmp_path / "a.yaml").write_text("numbers: [1]")
    with pytest.raises(ValueError, match=r"a\.yaml has no entry 'source'"):
        studies.published("a")


# ---- runs that diverge -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluated", [0, 1])
@pytest.mark.parametrize("name", ["heads_and_chunks", "ogbench_goals", "arsq_control"])
def test_a_run_that_diverges_keeps_its_last_evaluation(
    name: str, evaluated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that of no success and of random actions, where it ends before the first one."""
    paper = importlib.import_module(f"experiments.papers.{name}")
    script = goals if name == "ogbench_goals" else offline
    chosen = script.Settings(updates=6, eval_every=2, eval_episodes=1, seeds=2)

    def diverging(chosen: Any, config: Any) -> None:
        scores = {"eval/success": np.ones((2, 5)), "eval/return": np.full((2, 5), 30.0)}
        with log.open_run(chosen.workdir, {}, tensorboard=False) as opened:
            for number in range(evaluated):
                opened.write(2 * number + 2, scores)
        raise Diverged("critic_loss is not finite")

    monkeypatch.setattr(script, "run", diverging)
    arguments = (diverging, chosen, None, (10.0, 50.0)) if name == "arsq_control" else (chosen, None)
    outcome = paper.trained(*arguments, studies.Work(tmp_path / "run", lambda steps: None))
    assert outcome["diverged"] and outcome["curve"]["steps"].tolist() == [2, 4, 6]
    score = outcome["curve"]["score" if name == "arsq_control" else "success"]
    np.testing.assert_allclose(score, np.full((3, 2), evaluated * (50.0 if name == "arsq_control" else 1.0)))


def test_evaluations_are_placed_by_their_steps(tmp_path: Path) -> None:
    """One that was never due shifts no others, and one that was lost is missed."""
    settings = offline.Settings(updates=6, eval_every=2, eval_episodes=1, seeds=1)
    with log.open_run(tmp_path, {}, tensorboard=False) as opened:
        for step in (0, 2, 6):
            opened.write(step, {"eval/return": np.full((1, 5), step)})
    with pytest.raises(
        ValueError, match=r"metrics.jsonl lacks eval/return of steps \[4\]: remove .* to train"
    ):
        study_runs.curve(tmp_path, "eval/return", settings, False)
    steps, returns = study_runs.curve(tmp_path, "eval/return", settings, True)
    assert (steps.tolist(), returns.tolist()) == ([2, 4, 6], [[2.0], [2.0], [6.0]])
