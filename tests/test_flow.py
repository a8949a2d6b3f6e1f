"""rl.networks.flow against closed forms: noise N(0, 1) carried to data N(m, s^2), whose velocity is known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.networks import flow
from rl.types import Spec

MEAN, DEVIATION = 0.7, 0.4
KEY = jax.random.key(0)


def moments(time: Any) -> tuple[Any, Any]:
    """Variance of x_t = (1 - t) z + t a, and covariance of it with a - z."""
    return (1 - time) ** 2 + (time * DEVIATION) ** 2, time * DEVIATION**2 - (1 - time)


def exact(x: Any, time: Any) -> Any:
    """E[a - z | x_t = x], the velocity that flow matching learns."""
    variance, covariance = moments(time)
    return MEAN + covariance / variance * (x - time * MEAN)


# ---- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("integrator", "order"), [("euler", 1), ("midpoint", 2)])
def test_errors_fall_with_the_order_of_the_integrator(integrator: str, order: int) -> None:
    """dx = (1 + t) x dt: half the step, half the error of Euler's method and a quarter of the midpoint rule's."""
    field = lambda x, time: (1 + time) * x
    drawn = [flow.sample(field, jnp.ones(1), steps, integrator)[0] for steps in (16, 32, 64)]
    error = np.abs(np.array(drawn) - np.exp(1.5))
    np.testing.assert_allclose(np.log2(error[:-1] / error[1:]), order, atol=0.15)


@pytest.mark.parametrize(("integrator", "largest"), [("euler", 0.05), ("midpoint", 1e-4)])
def test_the_exact_velocity_carries_noise_to_the_data(integrator: str, largest: float) -> None:
    """Of Gaussians the flow's map is m + s z."""
    noise = jnp.linspace(-2, 2, 9)
    error = flow.sample(exact, noise, 32, integrator) - (MEAN + DEVIATION * noise)
    assert np.abs(error).max() < largest


def test_times_are_the_starts_of_equal_steps_and_one_number_for_all_rows() -> None:
    """dx = t dt, of chunks of actions: after 4 steps (0 + 1 + 2 + 3) / 16; the midpoint rule is exact."""
    seen = []

    def field(x: jax.Array, time: jax.Array) -> jax.Array:
        seen.append(time.shape)
        return time * jnp.ones_like(x)

    for integrator, expected in (("euler", 0.375), ("midpoint", 0.5)):
        drawn = flow.sample(field, jnp.zeros((5, 3, 2)), 4, integrator)
        np.testing.assert_allclose(drawn, np.full((5, 3, 2), expected), rtol=1e-6)
    assert set(seen) == {()}


# ---- learning ------------------------------------------------------------------------------------------------------


def test_the_loss_is_least_at_the_velocity_and_has_its_closed_form() -> None:
    """Its mean is that of Var(a - z | x_t) over times in [0, 1]; a constant or a slope of time off it costs its square.

    Four standard errors of the mean over rows are 0.02.
    """
    count = 100_000

    @jax.jit
    def losses() -> list[jax.Array]:
        data = MEAN + DEVIATION * jax.random.normal(jax.random.key(1), (count, 2))
        wrong = lambda x, time: exact(x, time[:, None]) + 0.5 * time[:, None]
        return [flow.loss(field, data, KEY) for field in (lambda x, t: exact(x, t[:, None]), wrong)]

    least, more = losses()
    assert least.shape == (count,)
    time = (np.arange(10_000) + 0.5) / 10_000
    variance, covariance = moments(time)
    expected = (1 + DEVIATION**2 - covariance**2 / variance).mean()
    assert abs(least.mean() - expected) < 0.02
    assert abs(more.mean() - expected - 0.25 / 3) < 0.02


def test_each_row_has_its_own_noise_and_time_and_an_action_is_a_mean() -> None:
    """Of a point at 0: x_t = (1 - t) z and a - z = -z, so that every draw can be read off what a field is shown."""
    shown: dict[str, np.ndarray] = {}

    def field(x: jax.Array, time: jax.Array) -> jax.Array:
        shown.update(x=np.asarray(x), time=np.asarray(time))
        return jnp.zeros_like(x)

    loss = flow.loss(field, jnp.zeros((2000, 6)), KEY)
    time, z = shown["time"], shown["x"] / (1 - shown["time"])[:, None]
    assert time.shape == (2000,) and len(np.unique(z)) > 11_900
    np.testing.assert_allclose(np.histogram(time, 10, (0, 1))[0], 200, atol=60)
    np.testing.assert_allclose(loss, (z**2).mean(1), rtol=1e-3)


def test_distillation_pulls_the_policy_and_not_the_flow() -> None:
    action, target = jnp.float32([[1, 2], [3, 5]]), jnp.float32([[0, 2], [1, 1]])
    np.testing.assert_allclose(flow.distillation(action, target), [0.5, 10])
    slopes = jax.grad(lambda a, t: flow.distillation(a, t).sum(), (0, 1))(action, target)
    np.testing.assert_allclose(slopes, [action - target, 0 * target])


# ---- the best of several -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [(), (3,)])
def test_the_best_of_several_is_chosen_at_each_place(event: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    candidates, values = rng.normal(size=(4, 5, 2, *event)), rng.normal(size=(4, 5, 2))
    chosen = flow.best_of(jnp.float32(candidates), jnp.float32(values))
    assert chosen.shape == (5, 2, *event)
    for place in np.ndindex(5, 2):
        best = candidates[(values[(slice(None), *place)].argmax(), *place)]
        np.testing.assert_allclose(chosen[place], best, rtol=1e-6)


# ---- networks ------------------------------------------------------------------------------------------------------


def test_a_field_sees_the_time_and_takes_several_draws_at_an_observation() -> None:
    network, student = (make(Spec((3,), 2), (8,)) for make in (flow.velocity, flow.one_step))

    @jax.jit
    def program() -> tuple[jax.Array, ...]:
        observation, x, time = jnp.ones((5, 3)), jax.random.normal(KEY, (6, 5, 2)), jnp.linspace(0, 1, 5)
        params = network.init(KEY, observation, x[0])
        field, alone = network.apply(params, observation), network.apply(params, observation[2])
        step = student.apply(student.init(KEY, observation, x[0]), observation)
        return field(x, time), field(x, 0.0), alone(x[3, 2], time[2]), step(x)

    each, at_0, alone, step = program()
    assert each.shape == at_0.shape == step.shape == (6, 5, 2)
    np.testing.assert_allclose(each[3, 2], alone, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(each[:, 0], at_0[:, 0], rtol=1e-4, atol=1e-6)
    assert not np.allclose(each[:, 4], at_0[:, 4])


def test_an_image_is_encoded_once_for_all_steps_and_draws() -> None:
    network = flow.velocity(Spec((16, 16, 3), 2), (8,))
    image, noise = jnp.zeros((16, 16, 3), jnp.uint8), jnp.zeros((7, 2))
    params = jax.eval_shape(network.init, KEY, image, noise[0])
    draw = lambda params: flow.sample(network.apply(params, image), noise, 5)
    outside, inside = set(), set()

    def walk(equations: Any, loop: bool) -> None:
        for equation in equations:
            (inside if loop else outside).add(equation.primitive.name)
            for value in equation.params.values():
                program = getattr(value, "jaxpr", value)
                walk(getattr(program, "eqns", ()), loop or equation.primitive.name == "scan")

    walk(jax.make_jaxpr(draw)(params).eqns, False)
    assert "conv_general_dilated" in outside and "conv_general_dilated" not in inside
    assert "dot_general" in inside


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(ValueError, match="flow_steps=0 must be at least 1"):
        flow.sample(exact, jnp.zeros(2), 0)
    with pytest.raises(ValueError, match="integrator='rk4': choose one of euler, midpoint"):
        flow.sample(exact, jnp.zeros(2), 3, "rk4")
    with pytest.raises(ValueError, match="candidates=0 must be at least 1"):
        flow.best_of(jnp.zeros((0, 3, 2)), jnp.zeros((0, 3)))
