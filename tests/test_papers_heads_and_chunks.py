"""experiments.papers.heads_and_chunks: what is run, what its tables and claims make of it, and once to the report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import offline, studies
from experiments.papers import heads_and_chunks as paper
from rl import log

CUBE, SCENE = paper.DATASETS


def rows(value: Any) -> dict[str, Any]:
    """A result with three seeds of every cell on the cube, almost 1 per cent apart; ``value``: cell -> the first."""
    settings = dataclasses.asdict(paper.Settings(datasets=CUBE, seeds=3))
    cells = [
        {
            "dataset": CUBE,
            "agent": agent,
            "head": head,
            "chunk": chunk,
            "success": (value((agent, head, chunk)) + np.arange(3) * nearly_one(agent, head, chunk)) / 100,
            "diverged": (agent, head, chunk) == ("fql", "c51", 1),
        }
        for agent in paper.AGENTS
        for head in settings["heads"].split(",")
        for chunk in paper.lengths(settings["chunks"])
    ]
    return {
        "settings": settings,
        "rows": cells,
        "command": "x",
        "hardware": {"cores": 2},
        "wall_seconds": 7200.0,
    }


def nearly_one(agent: str, head: str, chunk: int) -> float:
    """Another number for each cell, so that no difference is the same for all seeds."""
    return 1 + 1e-3 * paper.AGENTS.index(agent) + 1e-2 * (head == "scalar") + 1e-4 * chunk


def better(cell: paper.Cell) -> float:
    """What everybody expects: FQL above IQL, DEAS above both, heads and chunks worth something."""
    agent, head, chunk = cell
    return (
        {"iql": 10, "fql": 20, "deas": 40}[agent]
        + 5 * (head != "scalar")
        + chunk * (1 if agent == "deas" else 0.01)
    )


def test_tables_and_claims_are_of_the_numbers() -> None:
    result = rows(better)
    # The mean is one above the first.
    table = paper.success_table(result, CUBE)
    assert "| `deas` | hl_gauss | 0.47 [0.45, 0.49] | 0.51 [0.49, 0.53] | 0.54 [0.52, 0.56] |" in table
    assert "| `fql` | c51 | diverged | 0.26 [0.24, 0.29] | 0.26 [0.24, 0.29] |" in table
    # A run that diverged is compared with nothing.
    assert ("fql", "c51", 1) not in paper.scores(result)[CUBE]
    assert paper.categorical_gain(paper.scores(result)[CUBE]) is None
    for row in result["rows"]:
        row["diverged"] = False
    verdicts = {row["claim"]: row for row in studies.judged(paper.claims(result))}
    assert {row["verdict"] for row in verdicts.values()} == {studies.HOLDS} and len(verdicts) == 8
    gain = paper.categorical_gain(paper.scores(result)[CUBE])
    np.testing.assert_allclose(gain, [5, 4.99, 4.98])
    np.testing.assert_allclose(paper.chunk_gain(paper.scores(result)[CUBE], "deas", 1, 8), 7, rtol=1e-3)
    assert any(row["published"] == "97 against 88, FQL's table, task 1" for row in verdicts.values())
    # What DEAS reports is of chunks of 8, and of some other lengths alone.
    result["settings"]["chunks"] = "1,5"
    result["rows"] = [row for row in result["rows"] if row["chunk"] < 8]
    published = [row["published"] for row in studies.judged(paper.claims(result))]
    assert published[0] == "88 against 63, DEAS's ablation on puzzle-4x4, second-hand, in chunks of 8"
    assert published[2].startswith("of other lengths: {1: 21, 2: 25, 8: 88, 16: 84}, DEAS's ablation")
    result = rows(better)
    worse = studies.judged(paper.claims(rows(lambda cell: -better(cell))))
    assert {row["verdict"] for row in worse} == {studies.FAILS}
    result["rows"][3]["clipped"], result["rows"][-1]["clipped"] = 0.25, 0.125
    text = "\n".join(paper.report(result))
    assert "at most 25.0% (`iql`, two_hot, chunks of 1)" in text
    assert "IQL 0.88, FQL 0.97 (FQL's table)" in text and "Protocol `ogbench-fql`" in text
    result["rows"] = [row for row in result["rows"] if row["head"] != "two_hot"]
    assert paper.categorical_gain(paper.scores(result)[CUBE]) is None
    assert "| `iql` | two_hot | - | - | - |" in paper.success_table(result, CUBE)


def test_cells_differ_in_what_they_are_named_by_and_have_published_settings() -> None:
    settings, digests = paper.Settings(), set()
    for agent in ("iql", "fql", "deas"):
        for head, chunk in (("scalar", 1), ("c51", 1), ("c51", 8)):
            variant = paper.variant(settings, SCENE, agent, head, chunk, "digest of the data")
            chosen, config = variant.train.args
            assert (chosen.agent, chosen.head, chosen.chunk, chosen.head_size) == (agent, head, chunk, 51)
            assert chosen.preset == ("none" if agent == "deas" else paper.PROTOCOL)
            assert (chosen.head_start == 0.0) == (head == "c51")  # a scalar starts there by itself
            bounded = agent == "deas" and head == "c51"  # by its discount to -5,000 else
            assert (chosen.head_low == -1000.0) == bounded
            assert config.hidden == (128, 128) and (agent != "fql" or config.alpha == 300.0)
            digests.add(json.dumps(variant.settings, default=str))
    assert len(digests) == 9
    deas = paper.variant(settings, SCENE, "deas", "c51", 8, "").train.args[1]
    assert (deas.discount, deas.chunk_discount, deas.critics, deas.extraction) == (0.999, 0.9, 2, "best_of")
    whole = sum(
        paper.seconds(settings, dataset, agent, head, chunk)
        for dataset in paper.DATASETS
        for agent in paper.AGENTS
        for head in paper.HEADS
        for chunk in paper.lengths(settings.chunks)
    )
    assert f"about {whole / 3600:.0f} hours" in (paper.__doc__ or "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"datasets": "cube-single-play-v0"}, "--datasets: cube-single-play-v0 is none of cube-single"),
        ({"agents": "iql,bc"}, "--agents: bc is none of iql, deas, fql"),
        ({"heads": "c52"}, "--heads: c52 is none of scalar"),
        ({"chunks": "0,1"}, "--chunks=0,1: give whole numbers of at least 1"),
        ({"chunks": "1,,5"}, "--chunks=1,,5: give whole numbers of at least 1"),
        ({"evaluations": 2}, "--evaluations=2: a score is the mean of the last 3"),
        ({"updates": 7}, "--updates=7 is not a multiple"),
        ({"seeds": 1}, "--seeds=1"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper.run(paper.Settings(**fields))


@pytest.mark.long
@pytest.mark.command
def test_from_data_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, training in chunks, evaluation in the simulator, report and figure; nothing is trained twice."""
    pytest.importorskip("ogbench")
    whole = offline.run

    def alone(chosen: offline.Settings, config: Any) -> Any:
        return whole(dataclasses.replace(chosen, eval_processes=0, tensorboard=False), config)

    monkeypatch.setattr(offline, "run", alone)
    settings = paper.Settings(
        datasets=CUBE, agents="deas", heads="hl_gauss", chunks="5", transitions=400, seeds=2, updates=6, evaluations=3,
        eval_episodes=2, batch_size=8, hidden=(8,), workdir=str(tmp_path / "runs"), out=str(tmp_path / "out"),
    )  # fmt: skip
    result = paper.run(settings)
    (row,) = result["rows"]
    assert row["success"].shape == (2,) and row["curve"]["success"].shape == (3, 2)
    assert "chunks of 5" in (tmp_path / "out" / studies.REPORT).read_text()
    assert (tmp_path / "out" / "cube.png").exists() and (tmp_path / "out" / log.RESULT).exists()
    monkeypatch.setattr(offline, "run", lambda *_: pytest.fail("a finished run was trained again"))
    np.testing.assert_equal(paper.run(settings)["rows"], result["rows"])
