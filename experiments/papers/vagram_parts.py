"""What the study of VaGraM trains: its problems and its variants. What for, `experiments.papers.vagram` says."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import studies
from rl.agents import optimisers, robust_vi
from rl.dynamics import loss as losses
from rl.dynamics import network as dynamics
from rl.dynamics import value_aware
from rl.dynamics.config import Config
from rl.dynamics.rows import Rows
from rl.envs import distractors, pendulum
from rl.envs.tabular import MDP
from rl.networks import mlp
from rl.networks.base import Network
from rl.networks.layers import Architecture
from rl.types import Array, Key, Params
from rl.values import heads

PARTS = ("pendulum", "landscape", "changing", "toy", "heads")
PIECES = 20  # measurements of a training run, or steps of its progress
GAMMA = 0.98
TORQUES = np.linspace(-1, 1, 11)
SPEEDS = 8.0  # largest angular velocity
TASK = 3  # dimensions of the pendulum's own observation
UNIT = 50.0  # in which values are learned
CAP = 1e6  # numbers beyond it count as this, and so do errors that are no numbers
# What is better the larger it is, and the worst that it can be, in place of what is no number.
WORST = {"return": -CAP, "true_return": -CAP, "cosine": -1.0}

WORLDS: dict[str, tuple[str, int]] = {
    "no distractors": ("distractors", 0),
    "4 distractors": ("distractors", 4),
    "16 distractors": ("distractors", 16),
    "16 of noise": ("noise", 16),
    "16 of noise predicted whole": ("noise", 16),
}
PLAIN, FEW, MANY, NOISE, WHOLE = WORLDS
NARROW = 8  # the width at which claims are judged, and the only one for noise
FIXED = value_aware.Settings()  # of all losses, but in the toy


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about these studies."""

    parts: str = ",".join(PARTS)  # which to run, comma-separated
    losses: str = ",".join(value_aware.LOSSES)  # which to compare in pendulum and changing, comma-separated
    seeds: int = 5
    widths: tuple[int, ...] = (4, 8, 16, 64)  # of the model's hidden layer, in pendulum
    grid: int = 101  # points of each axis in value iteration
    value_hidden: tuple[int, ...] = (64, 64)  # widths of value networks
    value_updates: int = 10_000  # of the known value
    transitions: int = 16_000  # to learn a model from
    test_transitions: int = 4_000
    batch_size: int = 256
    updates: int = 10_000  # of a model
    learning_rate: float = 3e-3  # of models and values; a cosine takes it to 0 in all parts but changing
    changing_learning_rate: float = 5e-4  # of the values of changing, which take the largest of noisy ones
    starts: int = 64  # hanging ones, from which greedy control is judged
    changing_updates: int = 12_000  # of changing: as many of the model as of the value
    toy_updates: int = 20_000  # of toy
    heads_updates: int = 10_000  # of the values of heads
    seed: int = 0  # of all
    out: str = "results/papers/vagram"


# ---- the pendulum on a grid ----------------------------------------------------------------------------------------


def corners(points: int, observation: Array) -> tuple[Array, Array]:
    """The four states of the grid around observations [..., 3], and their bilinear weights, [..., 4] each."""
    angle, speed = jnp.arctan2(observation[..., 1], observation[..., 0]), observation[..., 2]
    column = (angle + jnp.pi) / (2 * jnp.pi) * points
    row = (speed + SPEEDS) / (2 * SPEEDS) * (points - 1)
    left = jnp.floor(column)
    below = jnp.clip(jnp.floor(row), 0, points - 2)
    x, y = column - left, row - below
    i = jnp.stack([left, left, left + 1, left + 1], -1).astype(jnp.int32) % points  # angles are a circle
    j = jnp.stack([below, below + 1, below, below + 1], -1).astype(jnp.int32)
    weight = jnp.stack([(1 - x) * (1 - y), (1 - x) * y, x * (1 - y), x * y], -1)
    return i * points + j, weight


def grid_states(points: int) -> Array:
    """The observations [points^2, 3] of all states of the grid; the angular velocity changes first."""
    angle = -jnp.pi + 2 * jnp.pi * jnp.arange(points) / points
    return _observed(jnp.repeat(angle, points), jnp.tile(jnp.linspace(-SPEEDS, SPEEDS, points), points))


def grid(points: int) -> MDP:
    """The pendulum on ``points`` angles and as many velocities: a step leads to the `corners` of where it ends."""
    states = grid_states(points)
    following, reward = pendulum.step(states[:, None], jnp.asarray(TORQUES, jnp.float32)[None, :, None])
    successor, transition = corners(points, following)
    count = len(states)
    return MDP(
        transition=transition,
        successor=successor,
        reward=reward,
        discount=jnp.ones(count),
        start=jnp.full(count, 1 / count),
        allowed=jnp.ones((count, len(TORQUES)), bool),
    )


@functools.cache
def solved(points: int) -> robust_vi.Solution:
    """The values [points^2] of the grid, and its Q."""
    return jax.jit(lambda: robust_vi.value_iteration(grid(points), GAMMA, tolerance=1e-3))()


def grid_value(table: Array, points: int, observation: Array) -> Array:
    """The table's [points^2] value [...] of observations [..., 3 or more]."""
    index, weight = corners(points, observation[..., :TASK])
    return (weight * table[index]).sum(-1)


def grid_gradient(table: Array, points: int, observation: Array) -> Array:
    """Its derivatives [..., 2] by angle and velocity, from differences over four cells."""
    angle, speed = jnp.arctan2(observation[..., 1], observation[..., 0]), observation[..., 2]
    across, up = 4 * jnp.pi / points, 4 * SPEEDS / (points - 1)
    at = lambda a, s: grid_value(table, points, _observed(a, s.clip(-SPEEDS, SPEEDS)))
    by_angle = (at(angle + across, speed) - at(angle - across, speed)) / (2 * across)
    # At the largest velocities the difference is to one side.
    step = (speed + up).clip(max=SPEEDS) - (speed - up).clip(min=-SPEEDS)
    return jnp.stack([by_angle, (at(angle, speed + up) - at(angle, speed - up)) / step], -1)


def _observed(angle: Array, speed: Array) -> Array:
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], -1)


# ---- data ----------------------------------------------------------------------------------------------------------


def make_world(name: str) -> distractors.World:
    kind, count = WORLDS[name]
    return distractors.around(pendulum, kind, count)


def pool(world: distractors.World, key: Key, count: int) -> Array:
    """What distractors are like [P, M], P at least ``count``: those of all steps of whole episodes."""
    still = jnp.zeros((-(-count // world.LIMIT), 1))
    start = world.reset(key, len(still))

    def step(observation: Array, key: Key) -> tuple[Array, Array]:
        return world.step(observation, still, key)[0], observation[:, TASK:]

    seen = jax.lax.scan(step, start, jax.random.split(key, world.LIMIT))[1]
    return jnp.concatenate(seen)


def uniform(distracting: Array, key: Key, count: int) -> Array:
    """Observations [count, O] of uniform angles and velocities, each with a random row of ``distracting`` [P, M]."""
    keys = jax.random.split(key, 3)
    angle = jax.random.uniform(keys[0], (count,), minval=-jnp.pi, maxval=jnp.pi)
    speed = jax.random.uniform(keys[1], (count,), minval=-SPEEDS, maxval=SPEEDS)
    beside = distracting[jax.random.randint(keys[2], (count,), 0, len(distracting))]
    return jnp.concatenate([_observed(angle, speed), beside], -1)


class Data(NamedTuple):
    """Transitions of one seed, and what inputs are standardised by."""

    observation: Array  # [N, O]
    action: Array  # [N, 1]
    next_observation: Array  # [N, O]
    mean: Array  # [O + 1]
    deviation: Array  # [O + 1]
    annotation: Any = ()  # what values say of a next observation, where it does not change (`Rows.annotation`)


def transitions(world: distractors.World, distracting: Array, key: Key, count: int) -> Data:
    """``count`` steps from uniform states by uniform torques."""
    keys = jax.random.split(key, 3)
    observation = uniform(distracting, keys[0], count)
    action = jax.random.uniform(keys[1], (count, 1), minval=-1.0, maxval=1.0)
    following, _ = world.step(observation, action, keys[2])
    inputs = jnp.concatenate([observation, action], -1)
    return Data(observation, action, following, inputs.mean(0), inputs.std(0))


def rows(data: Data, place: Array) -> Rows:
    """The rows at ``place`` [B] for a single member: [1, B, ...]. The reward is known, and 0 here."""
    observation, action, following, annotation = jax.tree.map(
        lambda x: x[place][None], (data.observation, data.action, data.next_observation, data.annotation)
    )
    outputs = jnp.concatenate([following - observation, jnp.zeros_like(following[..., :1])], -1)
    return Rows(standardised(data, observation, action), outputs, following, annotation)


def annotated(loss: losses.Loss, context: value_aware.Context, batch: Rows) -> Rows:
    """The rows [1, B, ...] with what the loss asks of their values now."""
    if loss.annotate is None:
        return batch
    annotation = loss.annotate(context, batch.next_observation[0])
    return batch._replace(annotation=jax.tree.map(lambda x: x[None], annotation))


def standardised(data: Data, observation: Array, action: Array) -> Array:
    inputs = jnp.concatenate([observation, action], -1)
    return dynamics.standardize(inputs, data.mean, data.deviation)


# ---- values --------------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A value network's parameters, and what its observations are standardised by."""

    params: Params
    mean: Array  # [O]
    deviation: Array  # [O]


class Valued(NamedTuple):
    """A value function: a network and the head that its outputs are for, in units of `UNIT`."""

    network: Network
    head: heads.ValueHead

    def outputs(self, value: Value, observation: Array) -> Array:
        """[..., K] of observations [..., O]."""
        return self.network.apply(value.params, (observation - value.mean) / value.deviation)

    def of(self, value: Value, observation: Array) -> Array:
        """[...] of observations [..., O]."""
        return UNIT * self.head.value(self.outputs(value, observation))

    def start(self, key: Key, data: Data) -> Value:
        size = data.observation.shape[-1]
        params = self.network.init(key, jnp.zeros(size))
        return Value(params, data.mean[:size], data.deviation[:size])


def make_valued(settings: Settings, head: heads.ValueHead) -> Valued:
    architecture = Architecture(activation="tanh", initialiser="lecun")
    return Valued(mlp.state_value(head.size, settings.value_hidden, architecture=architecture), head)


def adam(settings: Settings, updates: int) -> optax.GradientTransformation:
    return optimisers.build(optimisers.Adam("cosine", decay_updates=updates), settings.learning_rate)


def value_update(
    valued: Valued,
    optimiser: optax.GradientTransformation,
    carry: tuple[Value, Any],
    observation: Array,
    target: Array,
) -> tuple[Value, Any]:
    """(value, moments) after an update on a batch of observations [B, O] and targets as the head's loss takes them."""
    value, moments = carry

    def error(params: Params) -> Array:
        outputs = valued.outputs(value._replace(params=params), observation)
        return valued.head.loss(outputs, target).mean()

    steps, moments = optimiser.update(jax.grad(error)(value.params), moments, value.params)
    return value._replace(params=optax.apply_updates(value.params, steps)), moments


def in_pieces(
    update: Callable[..., Any], carry: Any, updates: int, work: studies.Work, *read: Any
) -> Iterator[Any]:
    """Trains all seeds, and gives what is trained after each of `PIECES` equal parts.

    Args:
      update: (carry, number of the update, ...) -> carry, of one seed.
      carry: what is trained [S, ...]. Each piece takes its memory from the one before: copy what is to be kept.
      updates: in all pieces together.
      work: is told of each piece.
      read: what the update reads beside [S, ...].
    """
    count = updates // PIECES

    def advance(carry: Any, piece: Array, *read: Any) -> Any:
        one = lambda carry, number: (update(carry, number, *read), None)
        return jax.lax.scan(one, carry, piece * count + jnp.arange(count))[0]

    compiled = jax.jit(jax.vmap(advance, (0, None, *(0 for _ in read))), donate_argnums=0)
    for piece in range(PIECES):
        carry = compiled(carry, jnp.int32(piece), *read)
        yield carry
        work.progress(1)


class Known(NamedTuple):
    """A world with its value function and data, of all seeds [S, ...]."""

    world: distractors.World
    whole: bool  # models predict the next observation, and not by how much it differs from the last
    valued: Valued
    value: Value
    pool: Array  # [S, P, M]
    train: Data
    test: Data


@functools.cache
def prepared(settings: Settings, name: str) -> Known:
    """The world of that name: its data, and V fitted to the grid's on states and distractors drawn independently."""
    world, valued = make_world(name), make_valued(settings, heads.scalar())
    optimiser = adam(settings, settings.value_updates)
    table = solved(settings.grid).value

    def one(key: Key) -> tuple[Value, Array, Data, Data]:
        keys = jax.random.split(key, 5)
        distracting = pool(world, keys[0], settings.transitions)
        train = transitions(world, distracting, keys[1], settings.transitions)
        test = transitions(world, distracting, keys[2], settings.test_transitions)
        test = test._replace(mean=train.mean, deviation=train.deviation)
        start = valued.start(keys[3], train)

        def update(carry: tuple[Value, Any], key: Key) -> tuple[tuple[Value, Any], None]:
            observation = uniform(distracting, key, settings.batch_size)
            of_grid = grid_value(table, settings.grid, observation) / UNIT
            target = heads.scalar_target(valued.head, of_grid)
            return value_update(valued, optimiser, carry, observation, target), None

        keys = jax.random.split(keys[4], settings.value_updates)
        (value, _), _ = jax.lax.scan(update, (start, optimiser.init(start.params)), keys)
        return value, distracting, train, test

    value, distracting, train, test = jax.jit(jax.vmap(one))(seed_keys(settings, f"known, {name}"))
    return Known(world, name == WHOLE, valued, value, distracting, train, test)


def seed_keys(settings: Settings, purpose: str) -> Key:
    """A key [S] for each seed, other ones for each purpose."""
    root = jax.random.fold_in(jax.random.key(settings.seed), np.uint32(zlib.crc32(purpose.encode())))
    return jax.random.split(root, settings.seeds)


# ---- models --------------------------------------------------------------------------------------------------------


def model_config(width: int, loss: str) -> Config:
    """One hidden layer and one member, which predicts variances where the loss asks for them."""
    plain = value_aware.is_deterministic(loss)
    return Config(members=1, elites=1, hidden=(width,), decay=(0.0, 0.0), deterministic=plain)


def start_model(config: Config, world: distractors.World, key: Key) -> Params:
    model = dynamics.init(config, world.SPEC, key)
    return {"members": model.members, "bounds": model.bounds}


def predict(params: Params, data: Data, observation: Array, action: Array, whole: bool = False) -> Array:
    """The mean next observation [..., O]; ``whole`` as in `Known`."""
    inputs = standardised(data, observation, action)
    mean, _ = dynamics.distribution(params["members"], params["bounds"], inputs[None])
    return mean[0, ..., :-1] + (0.0 if whole else observation)


def model_error(
    loss: losses.Loss,
    params: Params,
    batch: Rows,
    context: value_aware.Context,
    key: Key,
    whole: bool = False,
) -> Array:
    """What a batch costs; the reward, which is known, costs nothing."""
    mean, log_variance = dynamics.distribution(params["members"], params["bounds"], batch.inputs)
    if whole:  # losses compare differences from the last observation
        mean = mean.at[..., :-1].add(batch.outputs[..., :-1] - batch.next_observation)
    known = lambda x: None if x is None else x.at[..., -1].set(0.0)
    paid = loss.train(context, losses.Prediction(known(mean), known(log_variance)), batch, key).mean()
    if params["bounds"]:
        paid += 0.01 * (params["bounds"]["max"].sum() - params["bounds"]["min"].sum())
    return paid


def model_update(
    loss: losses.Loss,
    optimiser: optax.GradientTransformation,
    carry: tuple[Params, Any],
    batch: Rows,
    context: value_aware.Context,
    key: Key,
    whole: bool = False,
) -> tuple[Params, Any]:
    """(parameters, moments) after an update on a batch."""
    params, moments = carry
    gradient = jax.grad(partial(model_error, loss))(params, batch, context, key, whole)
    steps, moments = optimiser.update(gradient, moments, params)
    return optax.apply_updates(params, steps), moments


def fit(
    settings: Settings,
    known: Known,
    name: str,
    width: int,
    values: value_aware.Values,
    state: Any,
    work: studies.Work,
) -> Params:
    """The parameters [S, ...] of a model for each seed; ``state`` [S, ...] is what values read."""
    config, loss = model_config(width, name), value_aware.make(name, values, FIXED)
    optimiser = adam(settings, settings.updates)
    (size,) = known.world.SPEC.observation_shape
    keys = seed_keys(settings, "model")  # the same batches for all losses

    def begin(state: Any, data: Data, key: Key) -> tuple[value_aware.Context, Data, Any]:
        # One key for two purposes: `start_model` splits the same key, and ``split(key)[1]`` is ``fold_in(key, 1)``.
        # It stays, or the stored results of anisotropic could not be made again.
        permutation = value_aware.permutations(jax.random.fold_in(key, 1), size)
        context = value_aware.Context(state, permutation=permutation)
        if loss.annotate is not None:
            data = data._replace(annotation=loss.annotate(context, data.next_observation))
        params = start_model(config, known.world, key)
        return context, data, (params, optimiser.init(params))

    def update(carry: Any, number: Array, context: value_aware.Context, data: Data, key: Key) -> Any:
        keys = jax.random.split(jax.random.fold_in(key, 2 + number))
        batch = rows(data, jax.random.randint(keys[0], (settings.batch_size,), 0, len(data.action)))
        return model_update(loss, optimiser, carry, batch, context, keys[1], known.whole)

    context, data, carry = jax.jit(jax.vmap(begin))(state, known.train, keys)
    *_, (params, _) = in_pieces(update, carry, settings.updates, work, context, data, keys)
    return params


# ---- what a model is worth -----------------------------------------------------------------------------------------

# (observations [..., O], torques [..., 1], key) -> next observations [..., O]
Guess = Callable[[Array, Array, Key], Array]


def control(
    world: distractors.World, guess: Guess, value: Callable[[Array], Array], key: Key, starts: int
) -> Array:
    """The mean return [] of ``max_a r(s, a) + gamma V(guess(s, a))`` in the world, from hanging starts."""
    keys = jax.random.split(key, 3)
    angle, speed = jax.random.uniform(keys[0], (2, starts), minval=-0.05, maxval=0.05)
    first = world.reset(keys[1], starts).at[:, :TASK].set(_observed(jnp.pi + angle, speed))
    torques = jnp.asarray(TORQUES, jnp.float32)[:, None]

    def step(observation: Array, key: Key) -> tuple[Array, Array]:
        guess_key, step_key = jax.random.split(key)
        every = jnp.broadcast_to(observation[:, None], (starts, len(torques), observation.shape[-1]))
        action = jnp.broadcast_to(torques, (starts, *torques.shape))
        reward = pendulum.step(every[..., :TASK], action)[1]
        best = (reward + GAMMA * value(guess(every, action, guess_key))).argmax(-1)
        return world.step(observation, torques[best], step_key)

    return jax.lax.scan(step, first, jax.random.split(keys[2], world.LIMIT))[1].sum(0).mean()


def judge(known: Known, starts: int) -> Callable[..., dict[str, Array]]:
    """(parameters [S, ...], values [S, ...], keys [S]) -> what the models are worth, [S] each.

    ``value_error`` is the mean of (V(s^') - V(s'))^2 over held-out transitions, ``task_error`` and ``distractor_error``
    those of (s^' - s')^2 per dimension, and ``return`` that of greedy control.
    """

    def one(params: Params, value: Value, data: Data, key: Key) -> dict[str, Array]:
        guess = lambda observation, action, key: predict(params, data, observation, action, known.whole)
        of = partial(known.valued.of, value)
        following = guess(data.observation, data.action, key)
        error = jnp.square(following - data.next_observation)
        return {
            "value_error": jnp.square(of(following) - of(data.next_observation)).mean(),
            "task_error": error[:, :TASK].mean(),
            "distractor_error": error[:, TASK:].mean() if error.shape[1] > TASK else jnp.zeros(()),
            "return": control(known.world, guess, of, key, starts),
        }

    compiled = jax.jit(jax.vmap(one))
    return lambda params, value, keys: compiled(params, value, known.test, keys)


def capped(outcome: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Numbers as they are stored: none beyond `CAP`, and the worst possible in place of what is no number."""
    bounded = lambda x, worst: np.clip(np.nan_to_num(np.asarray(x, float), nan=worst), -CAP, CAP)
    return {name: bounded(x, WORST.get(name, CAP)) for name, x in outcome.items()}


@functools.cache
def judging(settings: Settings, name: str) -> Callable[..., dict[str, Array]]:
    """`judge` of a world: one program for all losses of a width."""
    return judge(prepared(settings, name), settings.starts)


# ---- pendulum ------------------------------------------------------------------------------------------------------


def asked(valued: Valued) -> value_aware.Values:
    """A value function as the only one that a loss asks."""
    return lambda value, observation: valued.of(value, observation)[None]


def known(settings: Settings, name: str, work: studies.Work) -> dict[str, np.ndarray]:
    """What a world's value function is like, [S] each.

    ``value_rmse``: how far it is from the grid's; ``weight``: the mean of VaGraM's weights on distractors, as a share
    of the largest mean weight of a dimension; ``true_return``: of greedy control with the true model.
    """
    del work
    world = prepared(settings, name)
    table = solved(settings.grid).value

    def one(value: Value, data: Data, key: Key) -> dict[str, Array]:
        of = partial(world.valued.of, value)
        error = of(data.observation) - grid_value(table, settings.grid, data.observation)
        annotation = value_aware.annotate(asked(world.valued), value, data.next_observation)
        weight = jnp.square(annotation.gradient[:, 0]).mean(0)
        beside = weight[TASK:].mean() if len(weight) > TASK else jnp.zeros(())
        guess = lambda observation, action, key: world.world.step(observation, action, key)[0]
        return {
            "value_rmse": jnp.sqrt(jnp.square(error).mean()),
            "weight": beside / weight.max(),
            "true_return": control(world.world, guess, of, key, settings.starts),
        }

    judged = jax.jit(jax.vmap(one))(world.value, world.test, seed_keys(settings, "judge"))
    return {"known": capped(judged)}


def fixed(settings: Settings, name: str, width: int, loss: str, work: studies.Work) -> dict[str, Any]:
    """What models of that width are worth that a known value helped to fit; see `judge`."""
    world = prepared(settings, name)
    params = fit(settings, world, loss, width, asked(world.valued), world.value, work)
    return capped(judging(settings, name)(params, world.value, seed_keys(settings, "judge")))


# ---- landscape -----------------------------------------------------------------------------------------------------

LANDSCAPE = PLAIN  # the world of the pictures; distractors would be foreseen rightly
SHAPES = ("mse", "vagram", "taylor", "vaml")
PIXELS = 61  # of a picture's side
SAMPLES = 32  # next states of each seed
CHEAP = 0.01  # of a loss's median over all predictions


def charged(values: value_aware.Values, state: Any, name: str, truth: Array, guesses: Array) -> Array:
    """What the loss of that name charges [N] for predictions [N, O] of the next observation ``truth`` [O]."""
    count, size = guesses.shape
    settings = dataclasses.replace(FIXED, normalise=False, clip_quantile=1.0)  # nothing of a batch
    following = jnp.broadcast_to(truth, (1, count, size))
    nothing = jnp.zeros((1, count, size + 1))
    error = jnp.concatenate([guesses - truth, jnp.zeros((count, 1))], -1)[None]
    context, loss = value_aware.Context(state), value_aware.make(name, values, settings)
    batch = annotated(loss, context, Rows(jnp.zeros((1, count, 0)), nothing, following))
    return loss.train(context, losses.Prediction(error, None), batch, jax.random.key(0))[0]


def landscape(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """Pictures [H, W] of one next state's losses, and how far [S] a prediction can be off and still be cheap.

    ``reach``: the largest distance, in half turns and in largest velocities, of predictions that cost less than `CHEAP`
    of the median over all; mean over next states. A picture's rows are velocities.
    """
    del work
    world = prepared(settings, LANDSCAPE)
    line = jnp.linspace(-1, 1, PIXELS)
    speed, angle = (x.reshape(-1) for x in jnp.meshgrid(line, line, indexing="ij"))
    guessed = _observed(jnp.pi * angle, SPEEDS * speed)

    def one(value: Value, data: Data) -> dict[str, dict[str, Array]]:
        def of_state(truth: Array) -> dict[str, tuple[Array, Array]]:
            here = jnp.arctan2(truth[1], truth[0]) / jnp.pi, truth[2] / SPEEDS
            beside = jnp.broadcast_to(truth[TASK:], (len(guessed), len(truth) - TASK))
            guesses = jnp.concatenate([guessed, beside], -1)
            across = jnp.abs(angle - here[0])
            distance = jnp.hypot(jnp.minimum(across, 2 - across), speed - here[1])
            shares = {}
            for name in SHAPES:
                cost = charged(asked(world.valued), value, name, truth, guesses)
                share = cost / jnp.median(cost)
                shares[name] = share, jnp.where(share < CHEAP, distance, 0.0).max()
            return shares

        shares = jax.lax.map(of_state, data.next_observation[:SAMPLES])
        return {
            "picture": {name: share[0] for name, (share, _) in shares.items()},
            "reach": {name: reach.mean() for name, (_, reach) in shares.items()},
        }

    drawn = jax.jit(jax.vmap(one))(world.value, world.test)
    truth = np.asarray(world.test.next_observation[0, 0])
    pictures = {name: np.asarray(drawn["picture"][name][0]).reshape(PIXELS, PIXELS) for name in SHAPES}
    return {
        "picture": {name: np.log10(np.maximum(x, 1e-9)).round(3) for name, x in pictures.items()},
        "truth": [float(np.arctan2(truth[1], truth[0]) / np.pi), float(truth[2] / SPEEDS)],
        "reach": {name: np.asarray(drawn["reach"][name]) for name in SHAPES},
    }


# ---- changing ------------------------------------------------------------------------------------------------------

CHANGING = (FEW, 16)  # the world, and the width of its models
TRUE = "true model"  # in place of a loss: the world itself, to tell what learning the value costs
SLOW = 0.005  # of the copy that values continue with
FIRST = 0.05  # share of the updates in which plain error is added, VaGraM's first epoch
FEWER = TORQUES[::2]  # that the value looks at, as many times as there are updates


def changing(settings: Settings, loss: str, work: studies.Work) -> dict[str, Any]:
    """Model and value learned from each other, `PIECES` times in between [PIECES, S] what they are worth.

    ``return``: of greedy control with this model and this value; ``bias`` and ``spread``: mean and standard deviation
    of how far the value is above the grid's, over held-out states; ``task_error``: of the model. For the loss `TRUE`
    the model is the world.
    """
    name, width = CHANGING
    exact = loss == TRUE
    loss = "mse" if exact else loss
    world = prepared(settings, name)
    table, valued = solved(settings.grid).value, world.valued
    config, updates = model_config(width, loss), settings.changing_updates
    optimiser, value_optimiser = (
        optimisers.build(optimisers.Adam(), rate)
        for rate in (settings.learning_rate, settings.changing_learning_rate)
    )

    class Carry(NamedTuple):
        model: tuple[Params, Any]
        value: tuple[Value, Any]
        slow: Value
        count: Array

    def values(state: Carry, observation: Array) -> Array:
        """The value and its target network, as the paper's code asks critics and target critics."""
        return jnp.stack([valued.of(one, observation) for one in (state.value[0], state.slow)])

    cost = value_aware.make(loss, values, FIXED)

    def foresee(carry: Carry, data: Data, observation: Array, action: Array) -> Array:
        if exact:
            return world.world.step(observation, action)[0]
        return predict(carry.model[0], data, observation, action)

    def start(key: Key, data: Data) -> Carry:
        keys = jax.random.split(key)
        params, value = start_model(config, world.world, keys[0]), valued.start(keys[1], data)
        return Carry(
            (params, optimiser.init(params)), (value, value_optimiser.init(value.params)), value, jnp.int32(0)
        )

    def follow_model(carry: Carry, data: Data, key: Key) -> tuple[Value, Any]:
        """An update of the value, from imagined steps."""
        place = jax.random.randint(key, (settings.batch_size,), 0, len(data.action))
        observation = data.observation[place]
        every = jnp.broadcast_to(observation[:, None], (len(place), len(FEWER), observation.shape[-1]))
        torque = jnp.broadcast_to(jnp.asarray(FEWER, jnp.float32)[:, None], (*every.shape[:-1], 1))
        imagined = foresee(carry, data, every, torque)
        reward = pendulum.step(every[..., :TASK], torque)[1]
        # The largest of noisy values drifts upwards; none is above 0, as no reward is.
        best = (reward + GAMMA * valued.of(carry.slow, imagined)).max(-1).clip(max=0.0) / UNIT
        target = heads.scalar_target(valued.head, best)
        return value_update(valued, value_optimiser, carry.value, observation, target)

    def advance(carry: Carry, data: Data, key: Key) -> Carry:
        (size,) = world.world.SPEC.observation_shape
        # One key for two purposes: ``fold_in(key, 1)`` is ``split(key)[1]``, of which the value network starts. It
        # stays, or the stored results of anisotropic could not be made again.
        permutation = value_aware.permutations(jax.random.fold_in(key, 1), size)

        def one(carry: Carry, _: None) -> tuple[Carry, None]:
            keys = jax.random.split(jax.random.fold_in(key, 2 + carry.count), 3)
            plain = (carry.count < FIRST * updates).astype(jnp.float32)
            context = value_aware.Context(carry, plain, permutation)
            if not exact:
                place = jax.random.randint(keys[0], (settings.batch_size,), 0, len(data.action))
                batch = annotated(cost, context, rows(data, place))
                model = model_update(cost, optimiser, carry.model, batch, context, keys[1])
                carry = carry._replace(model=model)
            value = follow_model(carry, data, keys[2])
            slow = optax.incremental_update(value[0].params, carry.slow.params, SLOW)
            return Carry(carry.model, value, carry.slow._replace(params=slow), carry.count + 1), None

        return jax.lax.scan(one, carry, length=updates // PIECES)[0]

    def measure(carry: Carry, data: Data, test: Data, key: Key) -> dict[str, Array]:
        of = partial(valued.of, carry.value[0])
        guess = lambda observation, action, key: foresee(carry, data, observation, action)
        error = of(test.observation) - grid_value(table, settings.grid, test.observation)
        off = guess(test.observation, test.action, key) - test.next_observation
        return {
            "return": control(world.world, guess, of, key, settings.starts // 4 or 1),
            "bias": error.mean(),
            "spread": error.std(),
            "task_error": jnp.square(off[:, :TASK]).mean(),
        }

    keys, judge_keys = seed_keys(settings, "changing"), seed_keys(settings, "judge")
    carry = jax.jit(jax.vmap(start))(keys, world.train)
    compiled = jax.jit(jax.vmap(advance), donate_argnums=0)
    measured = jax.jit(jax.vmap(measure))
    curves = []
    for _ in range(PIECES):
        carry = compiled(carry, world.train, keys)
        curves.append(capped(measured(carry, world.train, world.test, judge_keys)))
        work.progress(1)
    return {name: np.stack([curve[name] for curve in curves]) for name in curves[0]}


# ---- toy -----------------------------------------------------------------------------------------------------------

TOY = ("mle", "vaml", "calibrated")
GOLDEN = (5**0.5 - 1) / 2


def toy_value(observation: Array) -> Array:
    """s^2 + s [...] of [..., 1]."""
    return jnp.square(observation[..., 0]) + observation[..., 0]


def expected(loss: str, mean: Any, deviation: Any) -> Any:
    """What a Gaussian is charged in expectation by a loss of `TOY`, without constants.

    With outcomes -1 and 1, V(s) = s^2 + s and s ~ N(m, d^2),

        E V(s^) = m^2 + d^2 + m,    Var V(s^) = 2 d^4 + (2 m + 1)^2 d^2,    E V(s') = 1

    mle: ``(m^2 + 1) / d^2 + log d^2``; calibrated: ``(E V(s^) - 1)^2``; vaml: that plus ``Var V(s^)``.
    """
    if loss == "mle":
        return (mean**2 + 1) / deviation**2 + 2 * np.log(deviation)
    gap = mean**2 + deviation**2 + mean - 1
    variance = 2 * deviation**4 + (2 * mean + 1) ** 2 * deviation**2
    return gap**2 + (variance if loss == "vaml" else 0.0)


def toy(settings: Settings, loss: str, work: studies.Work) -> dict[str, np.ndarray]:
    """Mean and deviation of the prediction, [PIECES, S] each, from different starts."""
    values = lambda state, observation: toy_value(observation)[None]
    of = value_aware.make(loss, values, value_aware.Settings(normalise=False, clip_quantile=1.0))
    optimiser, size = adam(settings, settings.toy_updates), settings.batch_size
    keys = seed_keys(settings, "toy")

    def start(key: Key) -> tuple[Params, Any]:
        mean, log_variance = jax.random.uniform(key, (2,), minval=-0.5, maxval=0.5)
        params = {"mean": mean, "log_variance": log_variance - 1.0}
        return params, optimiser.init(params)

    def update(carry: tuple[Params, Any], number: Array, key: Key) -> tuple[Params, Any]:
        params, moments = carry
        keys = jax.random.split(jax.random.fold_in(key, number))
        outcome = jax.random.rademacher(keys[0], (1, size, 1), float)
        outputs = jnp.concatenate([outcome, jnp.zeros_like(outcome)], -1)  # from state 0; rewards are 0

        def cost(params: Params) -> Array:
            both = lambda x: jnp.zeros_like(outputs).at[..., 0].set(x)
            prediction = losses.Prediction(both(params["mean"]), both(params["log_variance"]))
            context = value_aware.Context(())
            batch = annotated(of, context, Rows(jnp.zeros((1, size, 0)), outputs, outcome))
            return of.train(context, prediction, batch, keys[1]).mean()

        steps, moments = optimiser.update(jax.grad(cost)(params), moments, params)
        return optax.apply_updates(params, steps), moments

    means, deviations = [], []
    for params, _ in in_pieces(update, jax.jit(jax.vmap(start))(keys), settings.toy_updates, work, keys):
        means.append(np.array(params["mean"]))
        deviations.append(jnp.exp(0.5 * params["log_variance"]))
    return {"mean": np.stack(means), "deviation": np.stack(deviations)}


# ---- heads ---------------------------------------------------------------------------------------------------------

HEADS = ("scalar", "two_hot", "hl_gauss", "c51")
REWARD_NOISE = (0.0, 4.0)  # standard deviation of what is added to rewards
MARGIN = 1.2  # of supports beyond the smallest value and 0, in `UNIT`: three deviations of a noisy return
OUTPUTS = 51
TD_SLOW = 0.02  # of the copy that a value continues with, where no largest of noisy values is taken


def of_head(settings: Settings, name: str, noise: float, work: studies.Work) -> dict[str, np.ndarray]:
    """What the gradients of a value with that head are like, [S] each, and a model that they weigh; see `judge`.

    ``rmse``: of the value, from the grid's; ``cosine``: of its gradient by angle and velocity, in half turns and
    largest velocities, with the grid's; ``spread``: the 99 % quantile of the gradient's norm over its median;
    ``weight``: as in `known`.
    """
    world = prepared(settings, MANY)
    solution = solved(settings.grid)
    low = float(solution.value.min()) / UNIT
    valued = make_valued(settings, heads.make(name, low - MARGIN, MARGIN, OUTPUTS))
    optimiser = adam(settings, settings.heads_updates)

    def update(
        carry: tuple[Value, Any, Params], number: Array, distracting: Array, key: Key
    ) -> tuple[Value, Any, Params]:
        """On steps of the optimal policy from uniform states."""
        value, moments, slow = carry
        keys = jax.random.split(jax.random.fold_in(key, number), 3)
        observation = uniform(distracting, keys[0], settings.batch_size)
        index, weight = corners(settings.grid, observation[:, :TASK])
        best = (weight[..., None] * solution.q[index]).sum(-2).argmax(-1)
        following, reward = world.world.step(
            observation, jnp.asarray(TORQUES, jnp.float32)[best][:, None], keys[1]
        )
        reward = (reward + noise * jax.random.normal(keys[2], reward.shape)) / UNIT
        target = valued.head.target(
            reward,
            jnp.full_like(reward, GAMMA),
            valued.outputs(value._replace(params=slow), following),
        )
        value, moments = value_update(valued, optimiser, (value, moments), observation, target)
        return value, moments, optax.incremental_update(value.params, slow, TD_SLOW)

    def start(key: Key, data: Data) -> tuple[Value, Any, Params]:
        value = valued.start(key, data)
        return value, optimiser.init(value.params), value.params

    keys = seed_keys(settings, "heads")
    carry = jax.jit(jax.vmap(start))(keys, world.train)
    *_, (value, *_) = in_pieces(update, carry, settings.heads_updates, work, world.pool, keys)
    described = jax.jit(jax.vmap(partial(described_by, settings, solution.value, valued)))(value, world.test)
    params = fit(settings, world, "vagram", NARROW, asked(valued), value, work)
    judged = judging(settings, MANY)(params, world.value, seed_keys(settings, "judge"))
    return capped({**described, **judged})


UNITS = np.array([np.pi, SPEEDS], np.float32)  # half a turn, and the largest velocity


def described_by(
    settings: Settings, table: Array, valued: Valued, value: Value, data: Data
) -> dict[str, Array]:
    """What a value and its gradient are like beside the ``table`` of the grid, over held-out states; see `of_head`."""
    seen = data.observation
    gradient = value_aware.annotate(asked(valued), value, seen).gradient[:, 0]
    error = valued.of(value, seen) - grid_value(table, settings.grid, seen)
    true = grid_gradient(table, settings.grid, seen) * UNITS
    by_head = by_state(seen, gradient) * UNITS
    norm = jnp.linalg.norm(by_head, axis=-1)
    cosine = (by_head * true).sum(-1) / jnp.maximum(norm * jnp.linalg.norm(true, axis=-1), 1e-9)
    weight = jnp.square(gradient).mean(0)
    return {
        "rmse": jnp.sqrt(jnp.square(error).mean()),
        "cosine": cosine.mean(),
        "spread": jnp.quantile(norm, 0.99) / jnp.median(norm),
        "weight": weight[TASK:].mean() / weight.max(),
    }


def by_state(observation: Array, gradient: Array) -> Array:
    """Derivatives [..., 2] by angle and velocity, of those [..., O] by observations."""
    cosine, sine = observation[..., 0], observation[..., 1]
    return jnp.stack([cosine * gradient[..., 1] - sine * gradient[..., 0], gradient[..., 2]], -1)
