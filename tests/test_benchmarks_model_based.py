"""benchmarks.model_based: a whole table on a tiny part, and a peer that computes what we compute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases, model_based, products
from rl.agents import sac_n
from rl.dynamics import ensemble, rows
from rl.values import heads, losses

TINY = model_based.Settings(
    critics=2,
    diversity=0.0,
    part=0.002,  # two updates, 100 rollouts, one step of the environment
    transitions=400,
    steps=256,
    fit_epochs=1,
    rollouts=256,
    repeats=1,
)


@pytest.mark.long
def test_the_table_holds_an_epoch_and_a_fit_beside_their_products(tmp_path: Path) -> None:
    results = model_based.run(dataclasses.replace(TINY, out=str(tmp_path / "new" / "speed.json")))
    assert [row["work"] for row in results["rows"]] == ["epoch", "fit", "steps", "updates", "retraining"]
    assert [row["compilations"] for row in results["rows"]] == [0] * 5
    programs = ["ours", "products", *(["torch"] if results["torch"] else [])]
    assert all(row[name][0] > 0 for row in results["rows"] for name in programs)
    stored = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert stored["rows"] == results["rows"]
    text = (tmp_path / "new" / "speed.md").read_text()
    assert text == model_based.render(results)
    for work in ("epoch", "fit", "steps", "updates", "retraining"):
        assert f"| {work} " in text
    assert "compiled 0 times in the timed rounds" in text


def test_compilations_are_counted() -> None:
    with model_based.compilations() as names:
        double = jax.jit(lambda x: 2 * x)
        for size in (2, 3, 2):
            double(jnp.zeros(size))
    assert names.count("<lambda>") == 2


@pytest.mark.parametrize(
    "fields", [{"part": 0.0}, {"part": 2.0}, {"seeds": ()}, {"seeds": (0,)}, {"repeats": 0}]
)
def test_nothing_to_time_is_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match="--part must be in"):
        model_based.run(dataclasses.replace(TINY, **fields))


@pytest.mark.parametrize("fields", [{"part": 0.001}, {"transitions": 255}, {"steps": 255}, {"rollouts": 255}])
def test_less_than_a_batch_of_the_peers_is_refused(fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_based, "_torch_version", lambda: "2.0")
    with pytest.raises(ValueError, match=r"PyTorch draws 256 different rows.*or --no_torch"):
        model_based.run(dataclasses.replace(TINY, **fields))


def test_the_peers_critics_and_diversity_are_ours() -> None:
    """With our parameters in its networks."""
    torch = pytest.importorskip("torch")
    from benchmarks import model_based_peer as peer

    config = sac_n.Config(critics=3, hidden=(8, 8, 8))
    learner = sac_n.make(config, cases.SPEC, heads.scalar())
    critics = learner.critics
    batch = jax.tree.map(lambda x: jnp.asarray(x[:5]), cases.synthetic(10).transitions)
    state = learner.init(jax.random.key(0), batch)
    theirs = peer.Agent(cases.SPEC, 3, 1.0, 8, "cpu")
    for index, name in enumerate(sorted(state.params["critic"])):
        layer = state.params["critic"][name]
        theirs.critic.weights[index].data = torch.tensor(np.asarray(layer["kernel"]))
        theirs.critic.biases[index].data = torch.tensor(np.asarray(layer["bias"]))[:, None]
    tensors = torch.tensor(np.asarray(batch.observation)), torch.tensor(np.asarray(batch.action))
    values = theirs.value(theirs.critic, *tensors).detach().numpy()
    np.testing.assert_allclose(values, critics(state, batch.observation, batch.action), atol=1e-5)

    def value(action: jax.Array, member: int) -> jax.Array:
        return critics(state, batch.observation, action)[member].sum()

    gradients = jnp.stack([jax.grad(value)(batch.action, member) for member in range(3)])
    expected = losses.gradient_diversity(gradients).mean()
    np.testing.assert_allclose(theirs._similarity(*tensors).item(), expected, rtol=1e-4)


def test_the_limit_of_a_fit_is_an_epoch_of_updates_and_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks, for three seeds; forward and twice backward, but for the inputs of the first layer."""
    done = []
    monkeypatch.setattr(
        model_based, "_limit", lambda matmuls, steps: done.append(products.flops(matmuls) * steps)
    )
    steps = cases.synthetic(2 * model_based.BLOCK).transitions
    columns = steps.observation, steps.action, steps.reward, steps.discount, steps.next_observation
    data = rows.prepare(cases.SPEC, *map(jnp.asarray, columns), jnp.int32(len(steps.reward)))
    model_based._fit_limit(ensemble.Config(), data.rows, rows.sizes(ensemble.Config(), data), 3)
    layers = [23 * 200, *[200 * 200] * 3, 200 * 36]
    trained, held = 2 * model_based.BLOCK * 4 // 5, 2 * model_based.BLOCK // 5
    assert done[0] == 3 * 2 * 7 * trained * (3 * sum(layers) - layers[0])
    assert done[1] == 3 * 2 * 7 * held * sum(layers)


def test_the_peer_learns_online() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import model_based_peer as peer

    torch.manual_seed(0)
    agent, model = peer.Agent(cases.SPEC, 2, 0.0, 16, "cpu"), peer.Model(cases.SPEC, "cpu", 16)
    taken, rollouts = (peer.Buffer(cases.SPEC, size, "cpu") for size in (300, 400))
    env = model_based.envs.make(model_based.ENVIRONMENT, seed=0)
    peer.explore(env, taken, 280)
    inputs = torch.cat(taken.columns[:2], -1)[:50]
    outputs = torch.cat([taken.columns[3] - taken.columns[0], taken.columns[2]], -1)[:50]
    before = sum(model.errors(inputs, outputs))
    peer.refit(model, taken, 20)
    assert sum(model.errors(inputs, outputs)) < before
    peer.rollouts(agent, model, rollouts, taken.columns[0][:280], 1)
    weight = agent.critic.weights[0].clone()
    peer.steps(env, agent, taken, rollouts, 2, 1, 0.5)
    assert taken.count == 282 and (agent.critic.weights[0] != weight).any()


def test_the_peer_learns() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import model_based_peer as peer

    torch.manual_seed(0)
    agent = peer.Agent(cases.SPEC, 2, 1.0, 16, "cpu")
    model, logged = peer.Model(cases.SPEC, "cpu"), peer.Buffer(cases.SPEC, 300, "cpu")
    rollouts = peer.Buffer(cases.SPEC, 60, "cpu")
    state, action, reward = torch.randn(300, 17), torch.rand(300, 6), torch.ones(300, 1)
    logged.add(state, action, reward, state, torch.ones(300, 1))
    peer.rollouts(agent, model, rollouts, state[:20], 5)
    assert rollouts.count == 60 and rollouts.head == 100 % 60
    before = agent.update(logged.sample(64))["critic_loss"]
    for _ in range(60):
        after = agent.update(logged.sample(64))["critic_loss"]
    assert after - 2 < before - 2  # the diversity term is at most 2
    peer.updates(agent, logged, rollouts, 2, 20, 0.5)
    errors = [model.update(torch.randn(7, 32, 23), torch.zeros(7, 32, 18)) for _ in range(30)]
    assert errors[-1] < errors[0]
    inputs, outputs = torch.randn(9, 23), torch.randn(9, 18)
    third = model.distribution(inputs[None].expand(7, -1, -1))[0][3]
    assert model.errors(inputs, outputs)[3] == pytest.approx((third - outputs).square().mean().item())
