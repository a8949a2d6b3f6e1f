"""The study of ARSQ and CQN on robots: what it runs, what it makes of the numbers, and once from data to report."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import offline, online, presets, studies
from experiments.papers import arsq_control as paper
from rl import log

pytest.importorskip("mujoco")
pytest.importorskip("h5py")

HOPPER, CHEETAH = "hopper-medium-expert-regen-v5", "halfcheetah-medium-regen-v5"
RETURNS = {"arsq": 3000.0, "cqn": 2500.0, "iql": 1500.0, "td3_bc": 1400.0, "bc": 1000.0}
TRAINED: list[str] = []


def source(settings: paper.Settings, task: str) -> paper.Source:
    environment = {"ho": "Hopper-v5", "ha": "HalfCheetah-v5"}.get(task[:2], paper.DOOR_ENVIRONMENT)
    return paper.Source("data.hdf5", environment, (0.0, 5000.0), "digest of the data", 12.3)


def script(chosen: Any, config: Any) -> None:
    """In place of a training run: evaluations of three seeds, of which those after the first are a tenth worse."""
    TRAINED.append(chosen.agent)
    mean = RETURNS[chosen.agent] - 1500 * getattr(config, "ignore_terminals", False)
    mean -= 500 * (getattr(config, "temperature", 0.01) == 1.0)
    Path(chosen.workdir).mkdir(parents=True)
    end = chosen.steps if hasattr(chosen, "steps") else chosen.updates
    due = range(chosen.eval_every, end + 1, chosen.eval_every)
    means = [mean, *[0.9 * mean] * (len(due) - 1)]
    rows = [
        {"step": step, "eval/return": [[x + seed, x - seed] for seed in range(3)]}
        for step, x in zip(due, means, strict=True)
    ]
    (Path(chosen.workdir) / log.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes a second for every variant: a digest of all code, and git's word on the commit."""
    monkeypatch.setattr(studies, "digest", lambda name, variant: f"{name} {variant.settings}")
    monkeypatch.setattr(log, "provenance", lambda: {"command": "python", "hardware": {"cores": 2}})


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> dict[str, Any]:
    monkeypatch.setattr(paper, "source", source)
    monkeypatch.setattr(offline, "run", script)
    monkeypatch.setattr(online, "run", script)
    TRAINED.clear()
    (tmp_path / "door.hdf5").touch()
    settings = paper.Settings(
        tiers=f"{HOPPER},{CHEETAH}",
        door=str(tmp_path / "door.hdf5"),
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "out"),
    )
    return paper.run(settings)


@pytest.mark.slow
def test_the_whole_study_without_training(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts are planned, trained once each, scored, judged and reported."""
    # 6 + 5 agents on Hopper, 5 + 4 on HalfCheetah, where both CQNs are one; 7 ablations, 4 temperatures, 5 at the door
    assert len(TRAINED) == 6 + 5 + 5 + 4 + 7 + 4 + 5
    rows = paper.table(result)
    np.testing.assert_allclose(rows[paper.Run("offline", HOPPER, "arsq")]["last"]["each"], [54] * 3)
    np.testing.assert_allclose(rows[paper.Run("online", HOPPER, "cqn_ignoring")]["best"]["each"], [20] * 3)
    np.testing.assert_allclose(rows[paper.Run("online", CHEETAH, "cqn_ignoring")]["best"]["each"], [50] * 3)
    report = (tmp_path / "out" / studies.REPORT).read_text()
    # Last returns: 54, 45 and 18 on Hopper. 27 of the lead of 36 points are the fault.
    ratios = "3.00 [3.00, 3.00] | 1.20 [1.20, 1.20] | 0.75 [0.75, 0.75]"
    assert f"| offline | last | those that terminate | 54.0 | 45.0 | 18.0 | {ratios} |" in report
    answer = (
        "**Offline, all tiers, last returns:** ARSQ has 1.71 [1.71, 1.71] times the score of CQN that ignores"
    )
    assert answer in report and "that the fault explains: 0.60 [0.60, 0.60]." in report
    assert "| online | published | all tiers | 73.5 | - | 53.5 | 1.37 | - | - |" in report
    assert "| `cqn_ignoring` | 18.0 ± 0.0 (20.0) | 45.0 ± 0.0 (50.0) | 31.5 ± 0.0 (35.0) |" in report
    for theirs in ("110.9 | 43.7 | 77.3", "101.3 | 45.6 | 73.5"):  # of both of the paper's tables
        assert f"| arsq, published | {theirs} |" in report
    assert "| alpha 1 | 45.0 ± 0.0 | 50.0 | **-9.0 [-9.0, -9.0]** | 76.2 |" in report
    assert "| online | `iql` |" in report and "was not run" not in report
    figures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert figures == {"offline.png", "online.png", "ablations.png", "temperature.png"}
    stored = studies.load(tmp_path / "out" / log.RESULT)
    assert stored["claims"] == result["claims"] == studies.judged(paper.claims(stored))
    trained = len(TRAINED)
    monkeypatch.setattr(paper, "draw", lambda *_: None)
    paper.run(paper.Settings(**{**result["settings"], "hidden": (128, 128)}))
    assert len(TRAINED) == trained
    # Rows of another machine, on other data: half of the study is joined with them and is not trained again.
    elsewhere = {
        "command": "elsewhere",
        "commit": "1234567",
        "versions": {},
        "hardware": {"cpu": "Another", "cores": 1},
    }
    there = {**stored, **elsewhere, "data_digests": {task: ["other"] for task in stored["data_digests"]}}
    (tmp_path / "there").mkdir()
    log.write_json(tmp_path / "there" / log.RESULT, {**there, "rows": [*rows.values()][::2]})
    places = {"stored": str(tmp_path / "there"), "out": str(tmp_path / "joined")}
    joined = paper.run(paper.Settings(**{**result["settings"], "hidden": (128, 128), **places}))
    assert len(TRAINED) == trained and len(joined["rows"]) == len(rows)
    assert sum("provenance" in one for one in joined["rows"]) == len(range(0, len(rows), 2))
    assert "not to the same bits" in (tmp_path / "joined" / studies.REPORT).read_text()


def row(setting: str, tier: str, agent: str, scores: list[float], change: str = paper.FULL) -> dict[str, Any]:
    # A little more for one seed, so that no difference is the same for all.
    own = 1e-3 * (sum(map(ord, f"{tier}{agent}{change}")) % 11) * np.eye(len(scores))[0]
    each = {"each": np.array(scores) + own}
    return {**paper.Run(setting, tier, agent, change)._asdict(), "last": each, "best": each}


def verdicts(*rows: dict[str, Any], **settings: str) -> dict[str, str]:
    outcome = {"settings": dataclasses.asdict(paper.Settings(tiers=HOPPER, **settings)), "rows": rows}
    return {
        judged["claim"].partition(" (")[0]: judged["verdict"]
        for judged in studies.judged(paper.claims(outcome))
    }


def test_claims_are_of_differences_over_seeds() -> None:
    online_rows = [
        row("online", HOPPER, "arsq", [60, 61, 62]),
        row("online", HOPPER, "cqn_ignoring", [20, 21, 22]),
    ]
    assert verdicts(*online_rows) == {}  # nothing is claimed before all three are there
    for cqn, expected in (
        ([50, 51, 51], "YYYY"),
        ([61, 60, 63], "Y?YY"),
        ([20, 22, 23], "YY?N"),
        ([10, 11, 12], "YYNN"),
    ):
        claims = verdicts(*online_rows, row("online", HOPPER, "cqn", cqn))
        marks = {studies.HOLDS: "Y", studies.FAILS: "N", studies.OPEN: "?"}
        assert "".join(marks[verdict] for verdict in claims.values()) == expected, cqn
        assert list(claims)[3].endswith("that terminate: terminations are more than half of ARSQ's lead")
    behind = verdicts(
        row("online", HOPPER, "arsq", [9, 8, 9]), online_rows[1], row("online", HOPPER, "cqn", [9, 9, 8])
    )
    assert list(behind.values()) == [studies.FAILS, studies.OPEN, studies.FAILS]  # no lead to have a half of
    changed = [
        row("offline", HOPPER, "arsq", [30, 31, 32]),
        row("offline", HOPPER, "arsq", [20, 21, 21], "neither seen"),
    ]
    assert verdicts(*changed, parts="ablations") == {
        "changed: ARSQ returns more than with neither seen": studies.HOLDS
    }
    door = [
        row("online", paper.DOOR, agent, scores)
        for agent, scores in (("arsq", [1, 2, 3]), ("iql", [4, 5, 6.5]))
    ]
    assert verdicts(*door, parts="door") == {"online, door: ARSQ returns more than `iql`": studies.FAILS}


def test_each_claim_has_the_papers_numbers_of_its_own_setting() -> None:
    """Table 1 is offline; online the paper has neither IQL nor TD3+BC."""
    rows = [
        row(setting, HOPPER, agent, scores)
        for setting in paper.SETTINGS
        for agent, scores in (("arsq", [60, 61, 62]), ("iql", [20, 21, 22]))
    ]
    outcome = {"settings": dataclasses.asdict(paper.Settings(tiers=HOPPER)), "rows": rows}
    published = {judged["claim"]: judged["published"] for judged in studies.judged(paper.claims(outcome))}
    claim = "mean of the tiers: ARSQ returns more than `iql` (difference)"
    assert published[f"offline, {claim}"].endswith("741.1 against 692.4, table 1 (Liu et al.)")
    assert published[f"online, {claim}"] == paper.OURS


def test_changes_are_ranked_among_those_that_the_paper_has_on_the_same_tiers() -> None:
    tier = paper.Settings().ablation_tier

    def ranked(scores: dict[str, float]) -> dict[str, Any]:
        noise = np.array([0.0, 0.1, 0.2])
        rows = [row("offline", tier, "arsq", [*(score + noise)], name) for name, score in scores.items()]
        return {"settings": dataclasses.asdict(paper.Settings(parts="ablations,temperature")), "rows": rows}

    theirs = {name: paper.published_change(name)[1] for name in paper.CHANGES}
    as_published = ranked(theirs | {paper.FULL: 97.5})
    table = [paper.ranks(order) for order in paper.orders(as_published)]
    assert [(name, tiers, count) for name, tiers, count, *_ in table] == [
        ("structural changes", "the mean of hopper-medium-expert and hopper-medium-replay", "5"),
        ("trunks", "hopper-medium", "2"),
        ("temperatures", "hopper-medium", "5"),
    ]
    assert table[0][3:] == (
        "1.00",
        "1.00 [1.00, 1.00]",
        "0.8%",
        *["other dimensions unseen"] * 2,
    )  # one of 120
    assert table[1][3:] == ("1.00", "-", "-", *["a trunk for each token"] * 2)
    assert table[2][-2:] == ("alpha 0.01", "alpha 0.01")
    text = "changed: ranks of {} correlate with the published ones"

    def verdicts() -> dict[str, str]:
        judged = studies.judged(paper.claims(as_published))
        return {one["claim"].partition(" (")[0]: one["verdict"] for one in judged}

    assert (
        verdicts()[text.format("temperatures")] == studies.OPEN
    )  # all seeds have the same, an interval of no width
    alphas = [one["last"]["each"] for one in as_published["rows"] if one["change"].startswith("alpha")]
    *_, second, best = sorted(alphas, key=lambda each: each.mean())
    second[0], best[0] = best[0], second[0]
    assert verdicts()[text.format("temperatures")] == studies.HOLDS
    assert text.format("trunks") not in verdicts()
    # The full agent is a temperature and no structural change; a group that was not run whole has no rank.
    reverse = ranked({name: -score for name, score in theirs.items() if name != "alpha 1"} | {paper.FULL: 0})
    (structure, trunks) = paper.orders(reverse)
    assert (structure.name, trunks.name) == ("structural changes", "trunks")
    assert paper.ranks(structure)[3] == paper.ranks(trunks)[3] == "-1.00"


@pytest.mark.slow
def test_published_settings_and_what_differs_from_them() -> None:
    """The two CQNs differ in nothing but terminations; ARSQ's are the tier's but for cloning, its alpha is 0.01."""
    settings, digests = paper.Settings(), set()
    for setting in ("offline", "online"):
        both = [
            paper.variant(settings, paper.Run(setting, HOPPER, agent), source(settings, HOPPER))
            for agent in ("cqn", "cqn_ignoring")
        ]
        digests |= {studies.digest("a", variant) for variant in both}
        cqn, ignoring = (variant.settings for variant in both)
        assert ignoring == {**cqn, "config": {**cqn["config"], "ignore_terminals": True}}
        assert "digest of the data" in cqn.values() and "data.hdf5" not in cqn.values()
        assert (cqn["head"], cqn["head_high"], cqn["config"]["dominance_weight"]) == ("c51", 500.0, 0.1)
    for tier in paper.TIERS:
        run, config = paper.offline_run(settings, paper.Run("offline", tier, "arsq"), source(settings, tier))
        assert (config.levels, config.bins, config.target_rate) == (2, 7, 0.02)
        assert paper.TEMPERATURES[config.temperature] == paper.FULL and config.hidden == settings.hidden
        assert (run.batch_size, run.updates, run.dataset) == (128, 12_000, "data.hdf5")
        # The code has the margin on halfcheetah-medium-expert, the paper cql: there as on medium.
        cloned_as = tier.replace("halfcheetah-medium-expert", "halfcheetah-medium")
        published = presets.find("offline", "arsq", cloned_as, "scalar")
        assert published and config.bc_weight == 20 * published.flags["agent.bc_weight"]
        assert (config.bc, config.bc_clip) == tuple(
            published.flags[name] for name in ("agent.bc", "agent.bc_clip")
        )
    assert len(digests) == 4  # nothing is taken for another


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": "offline,figures"}, "--parts: figures is none of offline, online"),
        ({"tiers": "hopper-random-regen-v5"}, "--tiers: hopper-random-regen-v5 is none of halfcheetah-medium-regen-v5"),
        ({"agents": "arsq,sac"}, "--agents: sac is none of arsq, cqn, cqn_ignoring"),
        ({"ablation_tier": CHEETAH}, "--ablation_tier: halfcheetah-medium-regen-v5 is none of hopper-medium-regen-v5"),
        ({"seeds": 1}, "--seeds=1: an interval"),
        ({"updates": 7}, "--updates=7 is not a multiple of --evaluations=6"),
        ({"steps": 7}, "--steps=7 is not a multiple of --evaluations=6"),
        ({"evaluations": 0}, "--evaluations=0 must be at least 1"),
        ({"eval_episodes": 1}, "--eval_episodes=1: give at least 2"),
        ({"batch_size": 9}, "--batch_size=9 must be even"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_made(
    change: Any, message: str, tmp_path: Path
) -> None:
    settings = paper.Settings(workdir=str(tmp_path / "runs"), out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=message):
        paper.run(dataclasses.replace(settings, **change))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_from_data_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """The settings are those that both scripts take, and the report is of what these leave."""
    for module, alone in ((offline, {}), (online, {"env_processes": 0})):
        whole = functools.partial(
            in_this_process, module.run, {"eval_processes": 0, "tensorboard": False} | alone
        )
        monkeypatch.setattr(module, "run", whole)
    settings = paper.Settings(
        parts="offline,online,door",
        tiers=HOPPER,
        agents="arsq",
        door=str(tmp_path / "absent.hdf5"),
        transitions=200,
        seeds=2,
        updates=4,
        steps=40,
        evaluations=2,
        eval_episodes=2,
        batch_size=8,
        hidden=(8,),
        workdir=str(tmp_path / "runs"),
        out=str(tmp_path / "out"),
    )
    result = paper.run(settings)
    shapes = {row["setting"]: row["curve"]["score"].shape for row in result["rows"]}
    assert shapes == {"offline": (2, 2), "online": (2, 2)}
    assert not any(row["diverged"] for row in result["rows"])
    report = (tmp_path / "out" / studies.REPORT).read_text()
    assert "AdroitHandDoor-v1 was not run: there is no file" in report and "absent.hdf5" in report


def in_this_process(run: Any, changes: dict[str, Any], chosen: Any, config: Any) -> Any:
    return run(dataclasses.replace(chosen, **changes), config)
