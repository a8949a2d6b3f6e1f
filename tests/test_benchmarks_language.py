"""benchmarks.language: peers compute the same losses, every row is measured, and the table says what it should."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import language, language_peer
from rl.agents import bcoder, ilql
from rl.language import huggingface, model
from rl.types import State, TokenBatch
from rl.values import heads

CONFIG = language.SIZES["tiny"]


def batch() -> TokenBatch:
    return language.example(CONFIG, 2, 7)


@functools.cache
def ours() -> tuple[State, dict[str, float], State]:
    """A start whose target networks are others, and the losses and the state of the first update."""
    learner = ilql.make(language_peer.CONFIG, model.make(CONFIG), heads.scalar())
    state = jax.jit(learner.init)(jax.random.key(0), batch())
    state = state._replace(target=jax.tree.map(lambda x: 0.5 * x, state.target))
    after, metrics = jax.jit(learner.update)(state, batch(), jax.random.key(0))
    return state, {name: float(value) for name, value in metrics.items()}, after


@pytest.mark.slow
def test_one_hot_selectors_compute_the_same_update() -> None:
    state, expected, after = ours()
    learner = language_peer.one_hot(model.make(CONFIG))
    updated, metrics = jax.jit(learner.update)(state, batch(), jax.random.key(0))
    for name, value in metrics.items():
        assert float(value) == pytest.approx(expected[name], rel=1e-4), name
    for name in ("q", "v"):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), updated.params[name], after.params[name]
        )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["value", pytest.param("policy", marks=pytest.mark.long)])
def test_one_hot_selectors_compute_the_same_update_of_bcoder(stage: str) -> None:
    state, expected, after = coder(stage)
    learner = language_peer.one_hot_bcoder(model.make(CONFIG), stage)
    updated, metrics = jax.jit(learner.update)(state, batch(), jax.random.key(0))
    for name, value in metrics.items():
        assert float(value) == pytest.approx(float(expected[name]), rel=1e-4), name

    def moved(state_after: State) -> Any:
        change = jax.tree.map(np.subtract, state_after.params, state.params)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(change)])

    # Adam's first step is nearly the sign of the gradient, which rounding decides where it is all but 0.
    assert np.linalg.norm(moved(updated) - moved(after)) < 0.05 * np.linalg.norm(moved(after))


def coder(stage: str) -> tuple[State, Any, State]:
    """As `ours`, for a stage of B-Coder."""
    config = dataclasses.replace(language_peer.CODER, value_updates=-1 if stage == "value" else 0)
    learner = bcoder.make(config, model.make(CONFIG), heads.scalar())
    state = jax.jit(learner.init)(jax.random.key(0), batch())
    state = state._replace(target=jax.tree.map(lambda x: 0.5 * x, state.target))
    after, metrics = jax.jit(learner.update)(state, batch(), jax.random.key(0))
    return state, metrics, after


def fill(head: Any, weights: list[Any]) -> None:
    import torch

    for parameter, value in zip(head.parameters(), weights, strict=True):
        parameter.data = torch.from_numpy(np.array(value))


def layers(params: Any) -> list[Any]:
    first, last = params["Dense_0"], params["Dense_1"]
    return [first["kernel"].T, first["bias"], last["kernel"].T, last["bias"]]


def test_torch_computes_the_same_losses_as_ilql(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    state, expected, _ = ours()
    huggingface.save(tmp_path / "trunk", CONFIG, state.params["trunk"])
    huggingface.save(tmp_path / "slow", CONFIG, state.target["trunk"])
    trunk, slow_trunk = (
        transformers.AutoModel.from_pretrained(tmp_path / name) for name in ("trunk", "slow")
    )
    head = functools.partial(language_peer.torch_head, CONFIG, trunk)
    parts = {"trunk": trunk, "q": [head(CONFIG.vocabulary), head(CONFIG.vocabulary)], "v": head(1)}
    fill(parts["v"], layers(state.params["v"]))

    def of_member(q: Any, member: int) -> list[Any]:
        one = jax.tree.map(lambda x: np.asarray(x)[member], q)
        return [one["inner"].T, one["inner_bias"], one["rows"][:, 0], one["rows_bias"][:, 0]]

    import torch

    parts["q"] = torch.nn.ModuleList(parts["q"])
    slow = copy.deepcopy(parts["q"])
    for q_heads, q in ((slow, state.target["q"]), (parts["q"], state.params["q"])):
        for member, one in enumerate(q_heads):
            fill(one, of_member(q, member))
    update = language_peer.torch_ilql(CONFIG, batch(), parts, (slow_trunk, slow))
    for name, value in update().items():
        assert value == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize("stage", ["value", "policy"])
def test_torch_computes_the_same_losses_as_bcoder(stage: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    state, expected, _ = coder(stage)

    def load(name: str, params: Any, kind: Any = transformers.AutoModelForCausalLM) -> Any:
        huggingface.save(tmp_path / name, CONFIG, params)
        return kind.from_pretrained(tmp_path / name)

    policy = load("policy", state.params["policy"])
    residual, old, head = (language_peer.torch_head(CONFIG, policy, 1) for _ in range(3))
    parameters = (state.params["residual"], state.target["residual"], state.params["value"]["head"])
    for one, params in zip((residual, old, head), parameters, strict=True):
        fill(one, layers(params))
    trunk = load("value", state.params["value"]["lm"], transformers.AutoModel)
    parts = {"policy": policy, "residual": residual, "trunk": trunk, "head": head}
    frozen = load("old", state.target["policy"]), old
    losses = language_peer.torch_bcoder(CONFIG, batch(), stage, parts, frozen)()
    assert "critic_loss" in losses
    for name, value in losses.items():
        assert value == pytest.approx(float(expected[name]), rel=1e-3), name


@pytest.mark.long
def test_every_row_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "language.json"
    settings = language.Settings(
        size="tiny", batch=2, length=8, steps=3, programs=0, repeats=1, torch=False, out=str(path)
    )
    language.run(settings)
    rows = json.loads(path.read_text())["rows"]
    names = ["lm step", "forward", "ilql", "bcoder value", "bcoder policy"]
    names += ["bcoder value read once", "bcoder policy read once"]
    names += ["lm step adapters", "ilql adapters", "bcoder value adapters", "bcoder policy adapters"]
    names += ["ilql one-hot", "bcoder value one-hot", "bcoder policy one-hot", "prefill", "generate"]
    assert [row["name"] for row in rows] == names
    assert all(len(row["seconds"]) == 1 and min(row["seconds"]) > 0 for row in rows)
    assert "| ilql" in path.with_suffix(".md").read_text()
    with pytest.raises(ValueError, match="--size=7b: choose from tiny, small, 135m"):
        language.run(language.Settings(size="7b"))


def row(name: str, seconds: list[float], work: int, forwards: int = 0, **more: Any) -> dict[str, Any]:
    blank = {"flops": 0.0, "bytes": None, "bytes_per_parameter": None}
    return {"name": name, "seconds": seconds, "work": work, "forwards": forwards, **blank, **more}


ROWS = [
    row("lm step", [1.0], 1000, flops=4e12, bytes=[2e6, 4e6], bytes_per_parameter=12.0),
    row("forward", [0.2], 1000, flops=1e12),
    row("ilql", [3.0, 1.2, 1.0], 1000, 1, flops=3e12, bytes=[3e6, 6e6], bytes_per_parameter=28.0),
    row("ilql adapters", [0.5], 1000, bytes=[3e6, 6e6], bytes_per_parameter=2.507),
    row("prefill", [0.5], 1000, bytes=[7e6, 15e6]),
    row("ilql torch", [5.7, 2.4, 2.1], 1000, 1),
    row("programs", [4.0], 600),
]


def test_the_table_holds_rates_of_medians() -> None:
    hardware = {"cpu": "X", "cores": 2, "memory_gib": 1.0, "backend": "cpu", "device": "cpu"}
    versions = dict.fromkeys(("python", "jax", "jaxlib"), "1")
    provenance = {"hardware": hardware, "versions": versions, "commit": "c", "command": "python"}
    settings = {"batch": 8, "length": 125, "rank": 4, "peak_tflops": 10.0}
    results = provenance | {
        "settings": settings,
        "peer": {"torch": "2"},
        "rows": ROWS,
        "parameters": {"blocks": 1_000_000, "logits": 2_000_000, "prompt": 512},
    }
    text = language.render(results)
    cells = {
        row[0]: row[1:]
        for row in (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line
        )
    }
    assert cells["lm step"] == ["1,000", "1", "", "", "2", "4", "12.00", "4.000", "40.0%"]
    assert cells["ilql"] == [
        "833",
        "1.2",
        f"{1.2 / 1.5:.2f}",
        "2.00 [1.90, 2.10]",
        "3",
        "6",
        "28.00",
        "2.500",
        "25.0%",
    ]
    assert cells["ilql adapters"] == ["2,000", "0.5", "", "", "3", "6", "2.51", "", ""]
    assert cells["prefill"] == ["2,000", "", "", "", "7", "15", "", "", ""]
    assert cells["programs"][0] == "150"
    assert "have rank 4; prompts of the row `prefill` have 512 tokens" in text and "not installed" not in text
    assert "would be too large" not in text  # the row was not asked for
    large = results | {"settings": results["settings"] | {"batch": 10**5}}
    assert "One-hot selectors would be too large" in language.render(large)
    assert "not installed" in language.render(results | {"peer": {}})


def test_an_example_is_one_episode_a_row() -> None:
    rows = batch()
    assert rows.is_action.sum() == 12 and rows.reward.sum() == 2
    np.testing.assert_array_equal(np.argwhere(rows.discount == 0), [[0, 6], [1, 6]])


@pytest.mark.parametrize("bfloat16", [False, True])
def test_pytorch_samples_in_the_arithmetic_that_ours_does(
    bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    class Asked:
        device = torch.device("cpu")

        def eval(self) -> Asked:
            return self

        def generate(self, *_: Any, **__: Any) -> bool:
            return torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(language_peer, "torch_model", lambda config: Asked())
    prompts, manner = np.ones((1, 2), np.int32), language_peer.Manner(bfloat16)
    assert language_peer.torch_generate(CONFIG, prompts, 1, manner)() is bfloat16
