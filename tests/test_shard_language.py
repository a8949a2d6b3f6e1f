"""Language learners on eight devices compute what they do on one, and continue from their checkpoints to the bit."""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from test_shard import on_eight_devices  # noqa: F401 (a fixture)

from rl import checkpoint, shard, train
from rl.agents import bcoder, ilql
from rl.language import adapters, model
from rl.language.model import LM, Config
from rl.networks.transformer import Shape
from rl.replay import tokens as replay
from rl.replay.tokens import Turn, episode
from rl.types import Learner, TokenBatch
from rl.values import heads

CONFIG = Config(
    24, 16, Shape(width=16, layers=2, heads=4, kv_heads=2, head_size=8, inner=24, qkv_bias=True), tied=False
)
ROWS = 8


def data() -> TokenBatch:
    """Episodes of very different lengths, some of which are copied."""
    generator = np.random.default_rng(0)
    episodes = []
    for number in range(ROWS):
        answer = generator.integers(0, 24, 1 + number).tolist()
        turns = [Turn([3, 1]), Turn(answer, True, float(generator.uniform(-1, 1)))]
        episodes.append(episode(turns, terminated=number % 2 == 0, imitate=float(number % 3 == 0)))
    return jax.tree.map(jnp.asarray, replay.pack(episodes, 12, together=False))


def weights() -> Any:
    generator = np.random.default_rng(1)

    def draw(x: Any) -> Any:
        return (0.3 * generator.standard_normal(x.shape)).astype(np.float32)

    return jax.tree.map(draw, jax.eval_shape(model.make(CONFIG).init, jax.random.key(0)))


def language_model() -> LM:
    return model.pretrained(model.make(CONFIG), weights())


def learner(name: str, lm: LM, optimiser: Any = optax.sgd, value_updates: int = 1) -> Learner:
    if name == "bcoder":
        config = bcoder.Config(
            value_updates=value_updates, value_learning_rate=0.1, learning_rate=0.1, inner=8, chunk=4
        )
        return bcoder.make(config, lm, heads.scalar(), optimiser)
    config = ilql.Config(learning_rate=0.1, cql_weight=0.1, target_rate=0.5, inner=8, chunk=4)
    return ilql.make(config, lm, heads.make("hl_gauss", -2.0, 2.0, 21), optimiser)


def epoch(agent: Learner, sample: Any, steps: int) -> Any:
    return train.scan_updates(agent.update, sample, steps)


def everything(data: TokenBatch, key: Any, step: Any) -> TokenBatch:
    return data


def close(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), one, other)


# ---- accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcoder", pytest.param("ilql", marks=pytest.mark.long)])
def test_accumulated_gradients_are_those_of_the_whole_batch(name: str) -> None:
    lm, batch = language_model(), data()
    plain, split = (learner(name, one, value_updates=0) for one in (lm, model.accumulated(lm, 2)))
    state = jax.jit(plain.init)(jax.random.key(0), batch)
    close(*(jax.jit(one.update)(state, batch, jax.random.key(0))[0] for one in (plain, split)))


@pytest.mark.slow
def test_accumulation_takes_the_memory_of_its_rows() -> None:
    lm = model.make(dataclasses.replace(CONFIG, context=128))
    params = jax.eval_shape(lm.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((64, 128), jnp.int32)

    def temporary(lm: LM) -> int:
        gradient = jax.jit(jax.grad(lambda p, t: lm.features(p, t, jnp.ones_like(t)).sum()))
        return gradient.lower(params, tokens).compile().memory_analysis().temp_size_in_bytes

    assert 8 * temporary(model.accumulated(lm, 2)) < temporary(lm)
    with pytest.raises(ValueError, match="64 rows do not divide into groups of 5"):
        temporary(model.accumulated(lm, 5))


# ---- devices ------------------------------------------------------------------------------------------------------


# AdamW whose steps still show a gradient that is summed where it should be averaged.
adamw = functools.partial(optax.adamw, eps=1.0)


def fetched_as_on_several_hosts(tree: Any, mesh: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """What `fetch_language` gives where no array is wholly here, and the shapes that it put on each device."""
    module, shapes = sys.modules[shard.fetch_language.__module__], []

    def gather(leaf: Any, mesh: Any) -> Any:
        shapes.append(leaf.shape)
        return shard.gather(leaf, mesh)

    # JAX itself must know where they are.
    here = property(lambda _: sys._getframe(1).f_globals["__name__"] != module.__name__)
    array = type(jax.tree.leaves(tree)[0])
    with mock.patch.object(array, "is_fully_addressable", here), mock.patch.object(module, "gather", gather):
        return shard.fetch_language(tree, mesh), shapes


def on_eight(name: str) -> None:
    """Two updates on a grid, from one placement to the next and through a checkpoint, beside one device."""
    mesh = shard.grid(data=4, model=2)
    lm, batch = language_model(), data()
    agent = learner(name, model.accumulated(lm, 4), adamw)
    start = jax.jit(agent.init)(jax.random.key(0), batch)
    alone, _ = jax.jit(epoch(agent, everything, 2))(start, batch, jax.random.key(0))

    def init(params: Any, key: Any) -> Any:
        return learner(name, model.pretrained(model.make(CONFIG), params), adamw).init(key, batch)

    inputs = shard.place_language(weights(), mesh), shard.place(jax.random.key(0), mesh)
    split = shard.init_language(init, mesh, *inputs)
    fetched, shapes = fetched_as_on_several_hosts(split, mesh)
    jax.tree.map(np.testing.assert_array_equal, fetched, jax.device_get(start))
    # Of blocks one layer at a time.
    blocks = {leaf.shape for leaf in jax.tree.leaves(weights()["blocks"]) if leaf.ndim > 2}
    assert blocks.isdisjoint(shapes) and {shape[1:] for shape in blocks} <= set(shapes)
    # No device ever held more than its part, to be given or made.
    held = jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, split)).lower(*inputs).compile()
    part = held.memory_analysis()
    most = part.argument_size_in_bytes + part.output_size_in_bytes + part.temp_size_in_bytes
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.device_get((weights(), start))))
    assert most < total / 3  # an eighth, what is too small to be split, and what is needed meanwhile

    run = jax.jit(shard.over_grid(epoch(agent, shard.data_parallel(everything, mesh), 1), mesh))
    placed, dataset = shard.place_language(start, mesh), shard.place(batch, mesh)
    key = shard.place(jax.random.key(0), mesh)
    first, _ = run(placed, dataset, key)
    last, _ = run(first, dataset, key)
    close(shard.gather(last, mesh), jax.device_get(alone))
    for tree in (placed, split, last):
        moments = tree.optimiser["policy"][0]
        for whole in (tree.params["policy"], moments.mu, moments.nu):
            leaf = whole["blocks"]["query"]["kernel"]
            assert leaf.sharding.spec == P(None, "data", "model")
            assert leaf.addressable_shards[0].data.size == leaf.size // 8
    assert any(np.any(leaf) for leaf in jax.tree.leaves(last.optimiser["policy"][0].mu))

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, 1, first, {"agent": name})
        restored, _ = checkpoint.restore(folder, placed, {"agent": name})  # type: ignore[misc]
        assert restored.params["policy"]["embedding"].sharding.spec == P("model", "data")
        again, _ = run(restored, dataset, key)
        jax.tree.map(np.testing.assert_array_equal, shard.gather(again, mesh), shard.gather(last, mesh))
        single, _ = checkpoint.restore(folder, jax.device_get(start), {"agent": name})  # type: ignore[misc]
        jax.tree.map(np.testing.assert_array_equal, single, shard.gather(first, mesh))


@pytest.mark.long
@pytest.mark.parametrize("name", ["bcoder", "ilql"])
def test_eight_devices_compute_what_one_does(name: str, on_eight_devices: Callable[[str], None]) -> None:  # noqa: F811
    on_eight_devices(f"on_eight({name!r})")


def adapters_on_eight() -> None:
    """Two updates of adapters, on a base that is split as well, beside one device."""
    mesh = shard.grid(data=4, model=2)
    agent = adapters.learner(lambda lm: learner("ilql", lm, adamw), model.make(CONFIG), 4)
    dataset = adapters.Batch(data(), adapters.frozen(weights()))
    start = jax.jit(agent.init)(jax.random.key(0), dataset)
    alone, _ = jax.jit(epoch(agent, everything, 2))(start, dataset, jax.random.key(0))
    sample = adapters.sampler(shard.data_parallel(everything, mesh))
    run = jax.jit(shard.over_grid(epoch(agent, sample, 2), mesh))
    state, key = shard.init_language(agent.init, mesh, jax.random.key(0), dataset), jax.random.key(0)
    placed = shard.place_language(dataset, mesh)
    assert placed.base["blocks"]["query"]["kernel"].sharding.spec == P(None, "data", "model")
    last, _ = run(state, placed, shard.place(key, mesh))
    close(shard.gather(last, mesh), jax.device_get(alone))
    moments = last.optimiser["trunk"][0].mu["blocks"]["down_lora"]
    parts = {name: leaf.addressable_shards[0].data.shape for name, leaf in moments.items()}
    assert parts == {"a": (2, 12, 4), "b": (2, 4, 4)}


@pytest.mark.long
def test_adapters_on_eight_devices(on_eight_devices: Callable[[str], None]) -> None:  # noqa: F811
    on_eight_devices("adapters_on_eight()")


# ---- rules --------------------------------------------------------------------------------------------------------


class Two(NamedTuple):
    """A mesh, as far as rules look at it."""

    shape: Mapping[str, int] = MappingProxyType({"data": 2, "model": 4})


def test_rules_name_every_large_array() -> None:
    lm = language_model()
    for name in ("bcoder", "ilql"):
        agent = learner(name, lm, optax.adamw)
        state = jax.eval_shape(agent.init, jax.random.key(0), data())
        specs = checkpoint.named(state)
        partition = shard.language_specs(state, Two())  # type: ignore[arg-type]
        flat = jax.tree.leaves(partition, is_leaf=lambda x: isinstance(x, P))
        split = dict(zip(specs, flat, strict=True))
        for path, leaf in specs.items():
            big = leaf.size >= 16 * 16 and "/head/" not in path and "inner" not in path.split("/")[-1]
            if big and "Dense" not in path:
                assert any(split[path]), path
        moments = [path for path in specs if path.endswith("mu/blocks/down/kernel")]
        assert moments and all(split[path] == P(None, "model", "data") for path in moments)
        assert split["step"] == P()


def test_adapters_lie_as_their_layers_do() -> None:
    """What a layer's product is summed over devices for, an adapter's is too; the rank is on none."""
    shapes = {"query": (16, 24), "out": (24, 16)}
    tree = {
        f"{name}_lora": {
            "a": jax.ShapeDtypeStruct((2, n, 4), float),
            "b": jax.ShapeDtypeStruct((2, 4, m), float),
        }
        for name, (n, m) in shapes.items()
    }
    assert shard.language_specs(tree, Two()) == {  # type: ignore[arg-type]
        "query_lora": {"a": P(None, "data", None), "b": P(None, None, "model")},
        "out_lora": {"a": P(None, "model", None), "b": P(None, None, "data")},
    }


def test_what_does_not_divide_stays_whole() -> None:
    tree = {"blocks": {"query": {"kernel": jax.ShapeDtypeStruct((2, 16, 6), jnp.float32)}}}
    assert shard.language_specs(tree, Two())["blocks"]["query"]["kernel"] == P(None, "data", None)  # type: ignore[arg-type]


def test_grids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 devices do not divide into data=1 times model=3"):
        shard.grid(model=3)
    assert dict(shard.grid().shape) == {"data": 1, "model": 1}
