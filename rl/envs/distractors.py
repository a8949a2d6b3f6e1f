"""Observations with distractors: numbers that move by themselves and that nothing the agent wants depends on.

VaGraM (Voelcker et al., ICLR 2022) adds them to Hopper: a model that predicts all of the observation spends its
capacity on them, one that knows what values need does not. Two kinds:

- ``distractors``: the recurrence of the paper's code (``mbrl/env/distractor_dimensions.py``). With a matrix ``A`` of
  N(0, 1) entries, ``Omega`` of entries (10 N(0, 1))^2 and a vector ``c`` of N(0, 1) entries,

      d <- A d,    d <- d + 0.1 sin(Omega d),    d_i <- c_i where |d_i| > 20

  An episode starts with d from N(0, 0.01), advanced once. Over several steps the state is chaotic, while one step is
  all but linear in pieces: a model with enough units can learn it, a small one cannot.
- ``noise``: N(0, 1) at every step, which no model can learn.

The map (``A``, ``Omega``, ``c``) belongs to the environment: it is drawn from a seed of its own and is the same in
training and in evaluation. (The paper's code draws two different ones.) What is random in an episode is drawn from
the episode's seed.

In gymnasium an environment has them by its name, `Name` says how; that part imports no JAX, as workers hold none. In
JAX, `around` adds them to an environment such as `rl.envs.pendulum`. The state is float32 in both, so that it can be
read off the observation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np

if TYPE_CHECKING:
    from rl.types import Array, Key, Spec

KINDS = ("distractors", "noise")
LIMIT = 20.0  # a component beyond it is put back
_START = 0.1  # standard deviation of the state before the first observation
_WAVE = 0.1
_STREAM = 1
_SUFFIX = re.compile(rf"(?P<kind>{'|'.join(KINDS)})(?P<count>\d+)(-map(?P<map>\d+))?")


class Name(NamedTuple):
    """An environment's name and what is added to it: ``Hopper-v5+distractors10``, ``Hopper-v5+noise10-map3``."""

    base: str  # without distractors
    kind: str = ""  # one of `KINDS`; empty: none
    size: int = 0  # dimensions that are added
    map_seed: int = 0


def parse(name: str) -> Name:
    """The parts of an environment's name.

    Raises:
      ValueError: what follows the ``+`` is no number of distractors.
    """
    base, plus, suffix = name.partition("+")
    if not plus:
        return Name(base)
    parts = _SUFFIX.fullmatch(suffix)
    if parts is None or int(parts["count"]) < 1:
        raise ValueError(
            f"environment {name!r}: +{suffix} names no distractors; write {base}+distractors10 for ten that a model "
            f"can learn, {base}+noise10 for ten of noise, and -map3 at the end for the map of seed 3"
        )
    return Name(base, parts["kind"], int(parts["count"]), int(parts["map"] or 0))


class Map(NamedTuple):
    """What the recurrence is made of, float32."""

    linear: Any  # [M, M] A
    frequency: Any  # [M, M] Omega
    back: Any  # [M] c, where components beyond `LIMIT` are put


def draw(count: int, seed: int = 0) -> Map:
    """The map of ``count`` distractors, a function of the seed alone."""
    rng = np.random.default_rng(seed)
    linear = rng.standard_normal((count, count))
    frequency = np.square(10 * rng.standard_normal((count, count)))
    return Map(*(x.astype(np.float32) for x in (linear, frequency, rng.standard_normal(count))))


def advance(rule: Map, state: Any, numpy: Any = np) -> Any:
    """The distractors [..., M] after those in ``state`` [..., M]; ``numpy`` is NumPy, or `jax.numpy` for its arrays."""
    state = state @ rule.linear.T
    state = state + _WAVE * numpy.sin(state @ rule.frequency.T)
    return numpy.where(numpy.abs(state) > LIMIT, rule.back, state)


# ---- gymnasium -----------------------------------------------------------------------------------------------------


class Distracted(gymnasium.Wrapper):
    """An environment of vectors whose observations [O + M] end with ``count`` distractors.

    All that it remembers is plain (`rl.envs.snapshot`).
    """

    def __init__(self, env: gymnasium.Env, kind: str, count: int, map_seed: int = 0):
        """Adds to ``env``.

        Args:
          env: observes float32 vectors.
          kind: one of `KINDS`.
          count: of the dimensions that are added.
          map_seed: of the map.

        Raises:
          ValueError: observations are no vectors.
        """
        super().__init__(env)
        seen = env.observation_space
        if not isinstance(seen, gymnasium.spaces.Box) or len(seen.shape) != 1 or seen.dtype != np.float32:
            raise ValueError(
                f"distractors are added to observations that are vectors of float32, not to {seen}"
            )
        unbounded = np.full(count, np.inf, np.float32)
        self.observation_space = gymnasium.spaces.Box(
            np.concatenate([seen.low, -unbounded]), np.concatenate([seen.high, unbounded]), dtype=np.float32
        )
        rule = draw(count, map_seed)

        def follow(state: np.ndarray, generator: np.random.Generator) -> np.ndarray:
            if kind == "noise":
                return generator.standard_normal(count, np.float32)
            return advance(rule, state)

        self._follow = follow
        self._generator = np.random.default_rng()
        self._state = np.zeros(count, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode; its distractors are a function of the seed, where there is one."""
        if seed is not None:
            # Not the stream that the environment itself draws from the same seed.
            self._generator = np.random.default_rng((seed, _STREAM))
        observation, info = self.env.reset(seed=seed, options=options)
        self._state = np.float32(_START) * self._generator.standard_normal(len(self._state), np.float32)
        return self._observed(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Steps the environment, and the distractors whatever the action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._observed(observation), reward, terminated, truncated, info

    def _observed(self, observation: np.ndarray) -> np.ndarray:
        self._state = self._follow(self._state, self._generator)
        return np.concatenate([observation, self._state])


# ---- JAX -----------------------------------------------------------------------------------------------------------


class World(NamedTuple):
    """An environment whose state is its observation, as pure functions; `rl.envs.pendulum` is one, as a module."""

    SPEC: Spec
    LIMIT: int  # steps of an episode
    reset: Callable[[Key, int], Array]  # (key, count) -> observations [count, O]
    # (observations [..., O], actions [..., D], key) -> next observations [..., O], rewards [...]; noise alone needs the
    # key
    step: Callable[..., tuple[Array, Array]]


def around(world: Any, kind: str, count: int, map_seed: int = 0) -> World:
    """``world`` with ``count`` distractors at the end of its observations; none for a ``count`` of 0.

    Args:
      world: a `World`, or a module with ``SPEC``, ``LIMIT``, ``reset`` and ``step``.
      kind: one of `KINDS`.
      count: of the dimensions that are added.
      map_seed: of the map.

    Raises:
      ValueError: an unknown kind.
    """
    import jax
    import jax.numpy as jnp

    if kind not in KINDS:
        raise ValueError(f"unknown kind of distractors {kind!r}: choose one of {', '.join(KINDS)}")
    (size,) = world.SPEC.observation_shape
    rule = draw(count, map_seed)

    def follow(state: Array, key: Key | None) -> Array:
        if kind == "distractors":
            with jax.default_matmul_precision(
                "highest"
            ):  # frequencies of hundreds leave sines no digits to lose
                return advance(rule, state, jnp)
        if key is None:
            raise ValueError("distractors of noise are random: give the step a key")
        return jax.random.normal(key, state.shape)

    def reset(key: Key, number: int) -> Array:
        keys = jax.random.split(key, 3)
        state = follow(_START * jax.random.normal(keys[1], (number, count)), keys[2])
        return jnp.concatenate([world.reset(keys[0], number), state], -1)

    def step(observation: Array, action: Array, key: Key | None = None) -> tuple[Array, Array]:
        following, reward = world.step(observation[..., :size], action)
        state = follow(observation[..., size:], key) if count else observation[..., size:]
        return jnp.concatenate([following, state], -1), reward

    return World(world.SPEC._replace(observation_shape=(size + count,)), world.LIMIT, reset, step)
