"""rl.agents.optimisers against NumPy: Adam with everything that settings may add to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl.agents.optimisers import Adam, adamw, build, share
from rl.networks.token_heads import vocabulary_values

PARAMS = {
    "Dense_0": {"kernel": np.full((2, 3), 2.0), "bias": np.full(3, -1.0)},
    "LayerNorm_0": {"scale": np.full(3, 1.5), "bias": np.full(3, 0.5)},
    "log_std": np.full(2, 0.3),
}


def adam(settings: Adam, rate: float, params: Any, gradients: list[Any]) -> Any:
    """AdamW (Loshchilov & Hutter 2019) written down, in float64; gradients come as lists of leaves."""
    leaves, tree = jax.tree.flatten(params)
    kernels = ["kernel" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    first, second = [0 * x for x in leaves], [0 * x for x in leaves]
    for step, gradient in enumerate(gradients):
        parts = jax.tree.leaves(gradient)
        norm = np.sqrt(sum((g**2).sum() for g in parts))
        if settings.clip and norm > settings.clip:
            parts = [g * settings.clip / norm for g in parts]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, parts, strict=True)]
        second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, parts, strict=True)]
        now = settings.learning_rate or rate
        if settings.warm_up:
            now *= min(1, (step + 1) / settings.warm_up)
        if settings.schedule == "cosine":
            span = settings.decay_updates - settings.warm_up
            now *= (1 + np.cos(np.pi * np.clip((step - settings.warm_up) / span, 0, 1))) / 2
        move = [
            m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + settings.epsilon)
            for m, v in zip(first, second, strict=True)
        ]
        leaves = [
            x - now * (d + settings.weight_decay * x * is_kernel)
            for x, d, is_kernel in zip(leaves, move, kernels, strict=True)
        ]
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize(
    "settings",
    [
        Adam(),
        Adam(epsilon=0.1),
        Adam(clip=1.0, learning_rate=0.02),
        Adam(weight_decay=0.3),
        Adam(warm_up=9, decay_updates=6),
        Adam("cosine", 6),
        Adam("cosine", 7, 2, 0.5, 0.2, 1e-3),
    ],
    ids=str,
)
def test_eight_steps_are_those_of_adam_with_what_settings_add(settings: Adam) -> None:
    rng = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: rng.normal(size=x.shape), PARAMS) for _ in range(8)]
    optimiser = build(settings, 0.1)

    @jax.jit
    def run(params: Any, stacked: Any) -> Any:
        def one(carry: Any, gradient: Any) -> Any:
            updates, moments = optimiser.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), moments), None

        return jax.lax.scan(one, (params, optimiser.init(params)), stacked)[0][0]

    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    actual = run(wide, jax.tree.map(lambda *x: jnp.asarray(np.stack(x), jnp.float32), *gradients))
    expected = adam(settings, 0.1, PARAMS, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


def test_a_constant_rate_needs_no_counter_and_a_swept_one_may_be_an_array() -> None:
    """Plain Adam's state is optax's."""
    params = {"kernel": jnp.ones(2)}
    plain, other = build(Adam(), 0.1).init(params), optax.adam(0.1).init(params)
    assert jax.tree.structure(plain) == jax.tree.structure(other)

    def first(rate: Any) -> Any:
        optimiser = build(Adam("cosine", 10), rate)
        return optimiser.update(params, optimiser.init(params), params)[0]["kernel"]

    np.testing.assert_allclose(jax.vmap(first)(jnp.array([0.1, 0.2])), [[-0.1] * 2, [-0.2] * 2], rtol=1e-5)


def test_another_optimiser_takes_the_schedule_and_nothing_else() -> None:
    optimiser = build(Adam(warm_up=2), 0.1, optax.sgd)
    updates, state = optimiser.update(jnp.ones(()), optimiser.init(jnp.ones(())))
    np.testing.assert_allclose([updates, optimiser.update(jnp.ones(()), state)[0]], [-0.05, -0.1], rtol=1e-6)
    for fields in ({"clip": 1.0}, {"weight_decay": 0.1}, {"epsilon": 1e-5}):
        with pytest.raises(ValueError, match=f"{next(iter(fields))}=.* is for Adam"):
            build(Adam(**fields), 0.1, optax.sgd)


def test_a_parameter_without_a_name_does_not_decay() -> None:
    """QRL's multiplier is all of its tree, and has the optimiser of the distance."""
    one = jnp.ones(())
    for optimiser in (build(Adam(weight_decay=0.3), 0.1), build(Adam(), 0.1)):
        updates, _ = optimiser.update(jnp.zeros(()), optimiser.init(one), one)
        assert updates == 0


def test_schedules_count_the_agents_updates_where_a_network_moves_on_every_second() -> None:
    """TD3's policy: its cosine ends with the agent's, and is not at its middle then."""
    settings = Adam("cosine", 6, 2)
    optimiser = build(settings, 1.0, optax.sgd, period=2)
    state, moves = optimiser.init(jnp.ones(())), []
    for _ in range(4):
        move, state = optimiser.update(jnp.ones(()), state)
        moves.append(-float(move))
    np.testing.assert_allclose(moves, [share(settings, jnp.int32(step)) for step in (1, 3, 5, 7)], atol=1e-6)
    assert moves[0] == 1 and moves[-1] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "cos"}, r"schedule='cos': did you mean 'cosine'\? choose one of constant, cosine"),
        ({"warm_up": -1}, "warm_up=-1 must be at least 0"),
        ({"schedule": "cosine", "warm_up": 5, "decay_updates": 5}, "warm_up=5 .* less than decay_updates=5"),
        ({"clip": -1.0}, "clip=-1.0 must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0"),
        *(
            ({name: float("nan")}, f"{name}=nan must be")
            for name in ("learning_rate", "clip", "weight_decay")
        ),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be at least 0, and finite"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be positive"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adam(**fields)


def test_language_models_decay_neither_norms_nor_biases() -> None:
    params = {"embedding": jnp.ones(2), "blocks": {"up": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}}
    params["blocks"]["norm"] = {"scale": jnp.ones(2)}
    q = jax.eval_shape(vocabulary_values(3, 1, inner=2).init, jax.random.key(0), jnp.ones(2))
    params["q"] = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), q)
    optimiser = adamw(Adam(), 0.1, 0.5)
    moved, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    expected = {"embedding": -0.05, "kernel": -0.05, "bias": 0.0, "scale": 0.0}
    expected |= {"inner": -0.05, "rows": -0.05, "inner_bias": 0.0, "rows_bias": 0.0}  # of ILQL's Q
    for path, leaf in jax.tree.leaves_with_path(moved):
        np.testing.assert_allclose(leaf, expected[path[-1].key], atol=1e-7)
