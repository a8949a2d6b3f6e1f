"""The study of OGBench's goals: what it runs, what it makes of the numbers, and once from data to report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import goals, studies
from experiments.papers import ogbench_goals as paper
from rl import agents, log

# Ours in place of a training run: of every agent the published mean of the dataset, but for HIQL.
HIQL = 3.0


def script(chosen: goals.Settings, config: Any) -> None:
    """Five evaluations of three seeds, tasks nearly alike, nothing reached in the first two."""
    dataset = Path(chosen.dataset).stem
    mean = HIQL if chosen.agent == "hiql" else paper.PUBLISHED["success"][dataset][chosen.agent][0]
    folder = Path(chosen.workdir)
    folder.mkdir(parents=True)
    of_task = np.tile([1.005, 1.0, 1.0, 1.0, 0.995], chosen.eval_episodes)
    rows = []
    # Of every agent and dataset another one, so that no difference is the same for all seeds.
    spread = 0.1 + 1e-4 * (paper.AGENTS.index(chosen.agent) - paper.AGENTS.index("qrl"))
    spread += 1e-5 * paper.DATASETS.index(dataset)
    for step in range(1, 6):
        each = [(step > 2) * (mean + spread * seed) / 100 * of_task for seed in range(chosen.seeds)]
        rows.append({"step": step * chosen.eval_every, "eval/success": np.array(each).tolist()})
    (folder / log.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.command
def test_the_whole_study_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "digest", lambda name, variant: f"{name} {variant.settings}")
    monkeypatch.setattr(log, "provenance", lambda: {"command": "python", "hardware": {"cores": 2}})
    monkeypatch.setattr(paper, "source", lambda settings, dataset: (f"{dataset}.npz", "digest"))
    monkeypatch.setattr(goals, "run", script)
    result = paper.run(paper.Settings(workdir=str(tmp_path / "runs"), out=str(tmp_path / "out")))
    assert len(result["rows"]) == 36
    row = next(row for row in result["rows"] if row["dataset"] == paper.DATASETS[0] and row["agent"] == "qrl")
    np.testing.assert_allclose(row["success"]["each"], np.array([82, 82.1, 82.2]) / 100)
    np.testing.assert_allclose(row["tasks"]["task5"]["mean"], 0.821 * 0.995)
    report = (tmp_path / "out" / studies.REPORT).read_text()
    cells = ("9 [9, 9]", "63 [63, 63]", "53 [53, 53]", "82 [82, 82]", "29 [29, 29]", "3 [3, 3]")
    assert f"| pointmaze-medium-navigate-v0 | {' | '.join(cells)} |" in report
    assert "| published (reprinted) | 9 ± 6 | 63 ± 6 | 53 ± 8 | 82 ± 5 | 29 ± 7 | 79 ± 5 |" in report
    verdicts = {row["claim"]: row["verdict"] for row in result["claims"]}
    first = "pointmaze-medium-navigate-v0: "
    assert verdicts[f"{first}`qrl` reaches more goals than `gcbc` (difference, per cent)"] == studies.HOLDS
    assert verdicts[f"{first}`hiql` reaches more goals than `gcivl` (difference, per cent)"] == studies.FAILS
    # Ranks are the same in all seeds, so that their correlations have intervals of no width.
    ranks = [verdict for claim, verdict in verdicts.items() if "ranks correlate" in claim]
    assert ranks == [studies.OPEN] * 6 and list(verdicts.values()).count(studies.OPEN) == 6
    assert list(verdicts.values()).count(studies.HOLDS) == 13 and len(verdicts) == 6 * 3 + 2 + 2 + 1
    assert (tmp_path / "out" / "success.png").exists()


@pytest.mark.parametrize("agent", paper.AGENTS)
def test_agents_have_what_was_published_for_the_dataset_but_the_sizes_of_the_study(agent: str) -> None:
    settings = paper.Settings(batch_size=256, updates=20_000, hidden=(128, 128, 128))
    variant = paper.variant(settings, "pointmaze-large-stitch-v0", agent, "data.npz", "digest")
    chosen, config = variant.train.args
    assert (chosen.dataset, chosen.batch_size, chosen.eval_every) == ("data.npz", 256, 4000)
    assert config.hidden == (128, 128, 128) and getattr(config, "latent", 64) == 64
    assert config.goals.actor.random == (
        0.5 if agent != "gcbc" else agents.get(agent).Config().goals.actor.random
    )
    assert variant.settings["data"] == "digest"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agents": "gcbc,iql"}, "--agents: iql is none of gcbc"),
        ({"datasets": "cube-single"}, "--datasets: cube-single is none of"),
        ({"evaluations": 2}, "--evaluations=2: a score is the mean of the last 3"),
        ({"updates": 7}, "--updates=7 is not a multiple"),
        ({"latent": 60}, "--latent=60 must be a multiple of 8"),
        ({"seeds": 1}, "--seeds=1"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper.run(paper.Settings(**fields))
