"""rl.networks.entity against NumPy, and what sets promise: no order, and any number of entities.

All networks, of random parameters, are compiled together, once for all tests.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from rl.networks import entity
from rl.networks.base import Network

SHAPE = entity.Shape(width=8, inner=6, heads=2, layers=2)
COUNT, GOALS, FEATURES, ACTIONS, OUTPUTS, ROWS = 4, 3, 5, 2, 3, 2
KEY = jax.random.key(0)
Tree = Any


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Inputs(NamedTuple):
    entities: Any
    goal: Any
    action: Any
    noisy: Any
    time: Any


PLAIN = Inputs(
    normal(ROWS, COUNT, FEATURES, seed=1),
    normal(ROWS, GOALS, FEATURES, seed=2),
    normal(ROWS, ACTIONS, seed=3),
    normal(ROWS, COUNT, FEATURES, seed=4),
    np.array([0.0, 7.0], np.float32),
)
NETWORKS: dict[str, tuple[Network, Any]] = {  # with how each is called
    "value": (entity.state_value(OUTPUTS, SHAPE), lambda x: (x.entities, x.goal)),
    "critic": (entity.critic(OUTPUTS, SHAPE), lambda x: (x.entities, x.goal, x.action)),
    "policy": (entity.deterministic_policy(ACTIONS, SHAPE), lambda x: (x.entities, x.goal)),
    "regressor": (entity.regressor(FEATURES, SHAPE), lambda x: (x.entities, x.goal)),
    "denoiser": (entity.denoiser(FEATURES, SHAPE), lambda x: (x.noisy, x.time, x.entities, x.goal)),
}


@functools.cache
def parameters() -> dict[str, Tree]:
    rng = np.random.default_rng(5)
    fill = lambda x: rng.normal(0.1, 0.9, x.shape).astype(np.float32)
    params = {
        name: jax.tree.map(fill, jax.eval_shape(network.init, KEY, *call(PLAIN)))
        for name, (network, call) in NETWORKS.items()
    }
    # Centred, or all of the policy's actions would be 1 or -1
    exact = jax.tree.map(lambda x: x.astype(np.float64), params["policy"])
    raw = [interaction(exact, PLAIN.entities[row], PLAIN.goal[row]) for row in range(ROWS)]
    params["policy"]["decode"]["Dense_3"]["bias"] -= np.mean(raw, 0).astype(np.float32)
    return params


SWAP, SWAP_GOAL, SWAP_NOISY = (np.random.default_rng(i).permutation(n) for i, n in ((0, 4), (4, 3), (3, 4)))
MANY_ACTIONS = normal(3, ROWS, ACTIONS, seed=6)
MANY_NOISY = normal(3, ROWS, COUNT, FEATURES, seed=7)
ALIKE = {  # cases of one shape, computed side by side
    "plain": PLAIN,
    "swapped": PLAIN._replace(entities=PLAIN.entities[:, SWAP], noisy=PLAIN.noisy[:, SWAP]),
    "goal": PLAIN._replace(goal=PLAIN.goal[:, SWAP_GOAL]),
    "noisy": PLAIN._replace(noisy=PLAIN.noisy[:, SWAP_NOISY]),
    "last": PLAIN._replace(action=MANY_ACTIONS[2], noisy=MANY_NOISY[2], time=np.full(2, 7, np.float32)),
}
OTHERS = {  # of the critic and the denoiser
    "double": PLAIN._replace(
        **{name: np.repeat(getattr(PLAIN, name), 2, 1) for name in ("entities", "goal", "noisy")}
    ),
    "many": PLAIN._replace(action=MANY_ACTIONS, noisy=MANY_NOISY, time=np.float32(7)),
}


@functools.cache
def outputs() -> dict[str, dict[str, np.ndarray]]:
    """Of each case, by each network."""
    together = jax.tree.map(lambda *x: np.stack(x), *ALIKE.values())

    def apply(name: str, params: dict[str, Tree], x: Inputs) -> jax.Array:
        network, call = NETWORKS[name]
        return network.apply(params[name], *call(x))

    def every(params: dict[str, Tree], alike: Inputs, others: dict[str, Inputs]) -> tuple[Any, Any]:
        return (
            {name: apply(name, params, alike) for name in NETWORKS},
            {
                case: {name: apply(name, params, x) for name in ("critic", "denoiser")}
                for case, x in others.items()
            },
        )

    stacked, others = jax.device_get(jax.jit(every)(parameters(), together, OTHERS))
    return others | {case: {name: x[i] for name, x in stacked.items()} for i, case in enumerate(ALIKE)}


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


# ---- against NumPy, in float64 ------------------------------------------------------------------------------


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def linear(p: Tree, x: np.ndarray) -> np.ndarray:
    return x @ p["kernel"] + p.get("bias", 0)


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def scaled(p: Tree, x: np.ndarray) -> np.ndarray:
    return standard(x) * p["scale"] + p["bias"]


def mlp(p: Tree, x: np.ndarray, norm_after: bool = False) -> np.ndarray:
    last = sum(name.startswith("Dense") for name in p) - 1
    for i in range(last):
        normalise = lambda x, i=i: scaled(p[f"LayerNorm_{i}"], x) if f"LayerNorm_{i}" in p else x
        x = linear(p[f"Dense_{i}"], x)
        x = normalise(gelu(x)) if norm_after else gelu(normalise(x))
    return linear(p[f"Dense_{last}"], x)


def norm(p: Tree, x: np.ndarray, c: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """And its gate."""
    if c is None:
        return scaled(p["LayerNorm_0"], x), 1.0
    shift, scale, *gate = np.split(linear(p["Dense_0"], c), linear(p["Dense_0"], c).shape[-1] // x.shape[-1])
    return standard(x) * (1 + scale) + shift, gate[0] if gate else 1.0


def attention(p: Tree, x: np.ndarray, context: np.ndarray) -> np.ndarray:
    query, key, value = (linear(p[n], y) for n, y in (("query", x), ("key", context), ("value", context)))
    size, heads = x.shape[-1] // SHAPE.heads, []
    for head in range(SHAPE.heads):
        part = slice(head * size, (head + 1) * size)
        weight = special.softmax(query[:, part] @ key[:, part].T / np.sqrt(size), -1)
        heads.append(weight @ value[:, part])
    return linear(p["out"], np.concatenate(heads, -1))


def block(
    p: Tree, x: np.ndarray, context: np.ndarray | None = None, c: np.ndarray | None = None
) -> np.ndarray:
    y, gate = norm(p["attention_norm"], x, c)
    x = x + gate * attention(p["attention"], y, y if context is None else scaled(p["context_norm"], context))
    y, gate = norm(p["inner_norm"], x, c)
    for i in range(sum(name[:6] == "inner_" and name[6:].isdigit() for name in p)):
        y = gelu(linear(p[f"inner_{i}"], y))
    return x + gate * linear(p["inner_out"], y)


def interaction(p: Tree, s: np.ndarray, g: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
    x, g = mlp(p["embed"], s), mlp(p["embed"], g)
    c = None if action is None else mlp(p["action"], action)
    x = block(p["self_1"], block(p["goal"], block(p["self_0"], x, None, c), g, c), None, c)
    x = block(p["pool"], p["token"], x, c)[0] if "pool" in p else block(p["self_2"], x)
    return mlp(p["decode"], norm(p["norm"], x, c)[0], norm_after=True)


def denoiser(p: Tree, noisy: np.ndarray, time: np.ndarray, s: np.ndarray, g: np.ndarray) -> np.ndarray:
    half = SHAPE.width // 2
    angle = time * 10_000.0 ** (-np.arange(half) / (half - 1))
    c = mlp(p["time"]["MLP_0"], np.concatenate([np.sin(angle), np.cos(angle)]))
    x = np.concatenate(
        [mlp(p["embed"], x) + which for x, which in zip((noisy, s, g), p["sets"], strict=True)]
    )
    x = x + c
    for i in range(SHAPE.layers):
        x = block(jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"]), x, None, c)
    decode = p["decode"]
    x = linear(decode["head"], norm(decode["norm"], x[: len(noisy)], c)[0])
    return mlp(decode["decode"], x)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_what_their_docstrings_say(name: str) -> None:
    reference = {"denoiser": denoiser, "policy": lambda *x: np.tanh(interaction(*x))}.get(name, interaction)
    params = jax.tree.map(lambda x: x.astype(np.float64), parameters()[name])
    for row in range(ROWS):
        inputs = [np.float64(x[row]) for x in NETWORKS[name][1](PLAIN)]
        assert_close(outputs()["plain"][name][row], reference(params, *inputs))


# ---- sets ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_order_does_not_matter(name: str) -> None:
    """Values and actions stay, entities of a subgoal come out in the order in which they went in."""
    plain, swapped = outputs()["plain"][name], outputs()["swapped"][name]
    is_set = name in ("regressor", "denoiser")
    assert_close(swapped, plain[:, SWAP] if is_set else plain)
    assert_close(outputs()["goal"][name], plain)
    if name == "denoiser":  # which of them is whose, their features say alone
        assert_close(outputs()["noisy"][name], plain[:, SWAP_NOISY])
    for other in ("plain", "swapped"):
        rows = outputs()[other][name]
        assert np.abs(rows[0] - rows[1]).max() > 1e-2, "it must look at its inputs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critic", "denoiser"])
def test_a_set_in_which_each_entity_is_twice_is_the_same_set(name: str) -> None:
    """With the parameters of a smaller one: attention is an average."""
    plain, double = outputs()["plain"][name], outputs()["double"][name]
    assert_close(double, np.repeat(plain, 2, 1) if name == "denoiser" else plain)


@pytest.mark.slow
def test_more_actions_or_candidates_than_observations_are_each_computed_alone() -> None:
    for name in ("critic", "denoiser"):
        assert outputs()["many"][name].shape[0] == 3
        assert_close(outputs()["many"][name][2], outputs()["last"][name])


# ---- where they start ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_published_numbers_of_parameters() -> None:
    """In 10,000: those of HECRL's actor, value, critic and diffuser, for cubes in 6 features without ids."""
    x = Inputs(normal(1, 4, 6), normal(1, 4, 6), normal(1, 5), normal(1, 4, 6), np.zeros(1))
    networks = {
        "policy": entity.deterministic_policy(5),
        "value": entity.state_value(1),
        "critic": entity.critic(1),
        "denoiser": entity.denoiser(6),
    }
    for (name, network), expected in zip(networks.items(), (63, 63, 76, 68), strict=True):
        params = jax.eval_shape(network.init, KEY, *NETWORKS[name][1](x))
        assert round(sum(leaf.size for leaf in jax.tree.leaves(params)) / 10_000) == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critic", "denoiser"])
def test_conditioned_blocks_start_as_the_identity_and_nothing_else_does(name: str) -> None:
    network, call = NETWORKS[name]
    params = jax.jit(network.init)(KEY, *call(PLAIN))
    paths = jax.tree_util.tree_leaves_with_path(params)
    adaptive = {"critic": 9, "denoiser": 3}[name]  # layers; those of stacked blocks count once
    zeros = [jax.tree_util.keystr(path) for path, leaf in paths if "kernel" in str(path) and not leaf.any()]
    assert len(zeros) == adaptive and all("norm']['Dense_0" in path for path in zeros), zeros


# ---- ids ----------------------------------------------------------------------------------------------------


def test_ids_are_one_hot_and_of_episodes_all_different() -> None:
    ids = np.stack([entity.random_ids(key, 4, 9) for key in jax.random.split(KEY, 50)])
    assert (ids[:, 0] == 0).all() and set(ids[:, 1:].ravel()) == set(range(1, 9))
    assert all(len(set(row)) == 4 for row in ids)
    entities = entity.with_ids(PLAIN.entities, ids[0], 9)
    np.testing.assert_array_equal(entities[..., :FEATURES], PLAIN.entities)
    np.testing.assert_array_equal(entities[1, :, FEATURES:], np.eye(9)[ids[0]])


def test_chamfers_distance_knows_no_order_and_asks_each_entity_of_both_sets() -> None:
    """Against loops; of sets of different sizes, one of which has an entity that is near to none."""
    some, others = PLAIN.entities, np.concatenate([PLAIN.goal, 9 + 0 * PLAIN.goal[:, :1]], 1)[:, [3, 0, 2]]
    expected = []
    for x, y in zip(some, others, strict=True):
        apart = np.array([[np.abs(one - other).mean() for other in y] for one in x])
        expected.append(np.mean([min(row) for row in apart]) + np.mean([min(row) for row in apart.T]))
    assert_close(entity.chamfer(some, others), np.array(expected))
    assert_close(entity.chamfer(others, some[:, SWAP]), np.array(expected))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"4 entities, but ids for 3 only: give entities more id slots"):
        entity.with_ids(PLAIN.entities, jnp.arange(4), 3)
    with pytest.raises(ValueError, match=r"4 entities, but ids for 3 only"):
        entity.random_ids(KEY, 4, 3)
    with pytest.raises(ValueError, match=r"network.width=10 must be a multiple of network.heads=4"):
        entity.Shape(width=10, heads=4)
