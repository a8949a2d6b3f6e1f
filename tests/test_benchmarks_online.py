"""benchmarks.online and on_device: every row is measured, and the table says what it should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest

from benchmarks import on_device, online

ROWS = [
    {"env": "A-v1", "utd": 4, "loop": "headway", "seconds": [2.0, 1.0, 9.0]},
    {"env": "A-v1", "utd": 4, "loop": "updates", "seconds": [1.0]},
    {"env": "A-v1", "utd": 4, "loop": "environment", "seconds": [0.5]},
    {"env": "A-v1", "utd": 4, "loop": online.PEER, "seconds": [5.0]},
]


def test_the_table_holds_rates_of_medians() -> None:
    hardware = {"cpu": "X", "cores": 2, "memory_gib": 1.0, "backend": "cpu", "device": "cpu"}
    versions = dict.fromkeys(("python", "jax", "jaxlib"), "1")
    provenance = {"hardware": hardware, "versions": versions, "commit": "c", "command": "python"}
    results = provenance | {"settings": {"steps": 100}, "peer": {online.PEER: "2"}, "rows": ROWS}
    lines = online.render(results).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "A-v1" in line]
    assert cells == [
        ["A-v1", "4", "headway", "50", "200", "2.5"],
        ["A-v1", "4", "updates", "", "400", ""],
        ["A-v1", "4", "environment", "200", "", ""],
        ["A-v1", "4", online.PEER, "20", "80", ""],
    ]
    assert "not installed: pip install stable-baselines3" in online.render(results | {"peer": {}})
    assert "on the CPU" not in online.render(results) and "Monitor" not in online.render(results)
    # Where JAX runs on a GPU, a ratio is not of two programs on one processor; and both leave the same out.
    on_gpu = results | {"hardware": hardware | {"backend": "gpu"}, "left_out": online._LEFT_OUT}
    page = online.render(on_gpu)
    assert f"| x {online.PEER} on the CPU |" in page and f"| {online.PEER} on the CPU |" in page
    assert page.endswith(f"\n\n{online._LEFT_OUT}\n") and "no Monitor" in page


def test_the_peer_has_neither_a_monitor_nor_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `headway` has not, either. The library itself is not installed where this runs: what it is given is."""
    asked: list[tuple[object, ...]] = []

    class Model:
        def __init__(self, policy: str, env: object, **settings: object) -> None:
            asked.append((policy, env, settings["device"]))

        def learn(self, steps: int, **how: object) -> None:
            asked.append((steps, how))

    vectors = SimpleNamespace(DummyVecEnv=lambda makers: ("vector", [make() for make in makers]))
    monkeypatch.setitem(sys.modules, "stable_baselines3", SimpleNamespace(SAC=Model))
    monkeypatch.setitem(sys.modules, "stable_baselines3.common", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env", vectors)
    monkeypatch.setattr(gymnasium, "make", lambda name: f"{name}, made")
    online._peer("A-v1", 4, online.Settings(warm=8, steps=3))()
    assert asked == [
        ("MlpPolicy", ("vector", ["A-v1, made"]), "cpu"),
        (9, {"log_interval": None}),
        (3, {"log_interval": None, "reset_num_timesteps": False}),
    ]


@pytest.mark.slow
@pytest.mark.command
def test_every_loop_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    settings = online.Settings(
        envs="Pendulum-v1", utds=(1,), steps=4, warm=8, replay=50, repeats=2, peer=False, out=str(path)
    )
    online.run(settings)
    rows = json.loads(path.read_text())["rows"]
    assert [row["loop"] for row in rows] == ["headway", "updates", "environment"]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert "Pendulum-v1" in path.with_suffix(".md").read_text()


@pytest.mark.command
@pytest.mark.slow
def test_every_loop_in_jax_is_measured_and_compared(tmp_path: Path) -> None:
    settings = on_device.Settings(
        environments="jax/Pendulum-v1",
        seeds=(2,),
        copies=(1,),
        steps=40,
        replay=100,
        repeats=1,
        out=str(tmp_path / "out.json"),
    )
    results = on_device.run(settings)
    loops = [on_device.DEVICE, on_device.HOST, on_device.UPDATES, on_device.ENVIRONMENT]
    assert [row["loop"] for row in results["rows"]] == loops
    for row, seconds in zip(results["rows"], (2.0, 8.0, 1.0, 0.5), strict=True):
        row["seconds"] = [seconds]
    lines = [line for line in on_device.render(results).splitlines() if "Pendulum-v1 " in line]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [row[3:] for row in cells] == [
        [on_device.DEVICE, "40", "10", "4", "0.75"],
        [on_device.HOST, "10", "2.5", "", ""],
        [on_device.UPDATES, "", "20", "", ""],
        [on_device.ENVIRONMENT, "160", "", "", ""],
    ]
