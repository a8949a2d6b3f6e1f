"""Environments that are functions of JAX's arrays, so that acting and learning are one compiled program.

Many copies step together, and where an episode is over the next one begins in the same step. By name:

| name | environment |
|---|---|
| ``gymnax/CartPole-v1`` | one of gymnax (Lange 2022); MinAtar's games with sticky actions (`rl.envs.minatar`) |
| ``jax/Pendulum-v1``, ``jax/CartPoleSwingUp-v0`` | `rl.envs.pendulum` and `rl.envs.cartpole_swingup` |
| ``jax/module.function`` | one of your own: a function without arguments that returns a `World` |

`rl.on_device` learns in them. `Stepped` is one copy as gymnasium has it, for whatever steps environments on the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rl import masks, nest
from rl.envs import cartpole_swingup, minatar, pendulum
from rl.envs.registry import GYMNAX, OURS
from rl.envs.world import Outcome, World
from rl.types import Array, Key, Spec

__all__ = ["Outcome", "Stepped", "World", "make", "time_limit", "timed"]

_TIMED: dict[str, ModuleType] = {"Pendulum-v1": pendulum, "CartPoleSwingUp-v0": cartpole_swingup}
_TRIED = 50  # steps with random actions in which a world of one's own is tried out


def make(name: str) -> World:
    """The environment of a name as in the table above.

    Raises:
      ImportError: gymnax, or the module of one of your own, cannot be imported.
      ValueError: an unknown name, spaces that agents here cannot use, or a world of one's own that does not do what
        `World` says.
    """
    if "+" in name:
        raise ValueError(
            f"environment {name!r}: distractors are added on the host, and this is an environment in JAX: leave out "
            "what follows the +"
        )
    if name.startswith(GYMNAX):
        return _of_gymnax(name, name.removeprefix(GYMNAX))
    base = name.removeprefix(OURS)
    if base in _TIMED:
        return timed(_TIMED[base].SPEC, _TIMED[base].reset, _TIMED[base].step, _TIMED[base].LIMIT)
    module, _, function = base.rpartition(".")
    try:
        maker = getattr(importlib.import_module(module), function, None) if module else None
    except ImportError as error:
        raise ImportError(
            f"environment {name!r} is a function of {module}, which cannot be imported: {error}"
        ) from error
    if not callable(maker):
        raise ValueError(
            f"unknown environment {name!r}: in pure JAX there are {', '.join(OURS + x for x in _TIMED)}, those of "
            f"gymnax ({GYMNAX}CartPole-v1) and your own ({OURS}module.function, which returns a "
            "rl.envs.world.World)"
        )
    return _users(name, base, maker)


@functools.cache  # since it is compiled to be tried out
def _users(name: str, base: str, maker: Callable[[], World]) -> World:
    """A world of one's own, ``base``; raises as `make`."""
    try:
        world = maker()
    except TypeError as error:
        raise ValueError(
            f"environment {name!r}: {base} must be callable without arguments ({error})"
        ) from error
    if not isinstance(world, World):
        raise ValueError(
            f"environment {name!r}: {base} must return a rl.envs.world.World, not {type(world).__name__}"
        )
    _check(name, world)
    _check_ends(name, world)
    return world


def time_limit(name: str) -> int:
    """Steps after which an episode of the environment is cut; 0 where that is not known, as of one of your own."""
    base = name.removeprefix(OURS)
    if base in _TIMED:
        return int(_TIMED[base].LIMIT)
    if (
        not name.startswith(GYMNAX)
        or (base := name.removeprefix(GYMNAX)) not in minatar.gymnax().registered_envs
    ):
        return 0
    return int(getattr(minatar.gymnax().make(base)[1], "max_steps_in_episode", 0))


def _check(name: str, world: World) -> None:
    """Raises ValueError, naming the member, if what a world of one's own returns is not as its spec says."""
    spec, copies = world.spec, 2
    keys = jax.random.split(jax.random.key(0), copies)
    action = jnp.zeros(copies, jnp.int32) if spec.discrete else jnp.zeros((copies, spec.action_size))
    first, state = _shapes(name, "reset", world.reset, tuple, keys)
    outcome = _shapes(name, "step", world.step, Outcome, keys, state, action)
    for member, x in (
        ("first observation", first),
        ("next_observation", outcome.next_observation),
        ("observation", outcome.observation),
    ):
        _check_shapes(name, member, x, copies, spec.observation_shape, "float32", "uint8")
    _check_kinds(name, first)
    _check_shapes(name, "reward", outcome.reward, copies, (), "float32")
    _check_shapes(name, "terminated", outcome.terminated, copies, (), "bool")
    _check_shapes(name, "first", outcome.first, copies, (), "bool")
    trees: list[Any] = [jax.tree.structure(one) for one in (state, outcome.state)]
    leaves = [[_in_words(leaf) for leaf in jax.tree.leaves(one)] for one in (state, outcome.state)]
    if trees[0] != trees[1] or leaves[0] != leaves[1]:
        raise ValueError(
            f"environment {name!r}: its state is {trees[0]} of {', '.join(leaves[0])} after a reset and {trees[1]} of "
            f"{', '.join(leaves[1])} after a step, but must stay alike"
        )


def _check_ends(name: str, world: World) -> None:
    """Raises ValueError if an episode of a world of one's own goes on after it terminated, in `_TRIED` random steps.

    Learners would not notice: values would end in the middle of an episode, and its return would go on.
    """
    spec, copies = world.spec, 2

    def step(state: Any, key: Key) -> tuple[Any, Array]:
        action_key, key = jax.random.split(key)
        if spec.discrete:
            action = jax.random.randint(action_key, (copies,), 0, spec.action_size)
        else:
            action = jax.random.uniform(action_key, (copies, spec.action_size), minval=-1.0)
        outcome = world.step(jax.random.split(key, copies), state, action)
        return outcome.state, outcome.terminated & ~outcome.first

    @jax.jit
    def goes_on(key: Key) -> Array:
        _, state = world.reset(jax.random.split(key, copies))
        return jax.lax.scan(step, state, jax.random.split(key, _TRIED))[1]

    count = int(goes_on(jax.random.key(0)).sum())
    if count:
        raise ValueError(
            f"environment {name!r}: in {count} of {copies * _TRIED} steps with random actions terminated is true and "
            "first is not. Where an episode is over, step begins the next one: set first there (terminated | the time "
            "limit is reached), and return the observation and the state of a reset"
        )


def _shapes(name: str, member: str, function: Callable[..., Any], kind: type[tuple], *arguments: Any) -> Any:
    """What a function of the world returns, as shapes. Raises ValueError if it fails, or returns another ``kind``."""
    try:
        returned = jax.eval_shape(function, *arguments)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"environment {name!r}: its {member} fails: {error}") from error
    if not isinstance(returned, kind) or (kind is tuple and len(returned) != 2):
        needed = "(observations, states)" if kind is tuple else "a rl.envs.world.Outcome"
        raise ValueError(
            f"environment {name!r}: its {member} must return {needed}, not {type(returned).__name__}"
        )
    return returned


def _check_shapes(name: str, member: str, value: Any, copies: int, shape: Any, *dtypes: str) -> None:
    """Raises ValueError unless ``value`` has the shape [copies, *shape], or a dict of such, of one of the types."""
    shapes = nest.map_structure(lambda axes: [copies, *axes], shape)
    wanted = {place: f"{' or '.join(dtypes)}{x}" for place, x in nest.named(member, shapes).items()}
    actual = {place: _in_words(x) for place, x in nest.named(member, value).items()}
    for place in {**wanted, **actual}:
        if actual.get(place) not in [wanted.get(place, "").replace(" or ".join(dtypes), x) for x in dtypes]:
            raise ValueError(
                f"environment {name!r}: its {place} is {actual.get(place, 'missing')} for {copies} copies, and by its "
                f"spec {wanted.get(place, 'nothing')}"
            )


def _check_kinds(name: str, first: Any) -> None:
    """Raises ValueError unless observations [copies, ...] are as agents see them on the host (`nest.agent_shape`)."""
    for place, x in nest.named("observation", first).items():
        shape = x.shape[1:]
        try:
            seen = nest.agent_shape(shape, x.dtype)
        except ValueError as error:
            raise ValueError(f"environment {name!r}: its {place} is {_in_words(x)}, and {error}") from None
        if x.dtype == np.uint8 and len(shape) < 3:
            raise ValueError(
                f"environment {name!r}: its {place} is {_in_words(x)}, and networks scale only images [H, W, C]: "
                "return it as float32 (bytes divided by 255)"
            )
        if seen != shape:
            raise ValueError(
                f"environment {name!r}: its {place} is {x.dtype}{list(shape)}, but float32 is a vector [D] or a "
                f"history [T, D]: make it uint8 if these are pixels, or else return it as a vector {list(seen)}"
            )


def _in_words(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else type(x).__name__


def timed(
    spec: Spec,
    reset: Callable[[Key, int], Array],
    step: Callable[[Array, Array], tuple[Array, Array]],
    limit: int,
) -> World:
    """The world of an environment whose state is its observation, and whose episodes a time limit alone ends.

    Args:
      spec: of the environment.
      reset: (key, N) -> first observations [N, O].
      step: (observations [N, O], actions [N, D]) -> next observations [N, O], rewards [N].
      limit: steps of an episode.
    """
    start = jax.vmap(lambda key: reset(key, 1)[0])

    def begin(keys: Key) -> tuple[Array, Any]:
        observation = start(keys)
        return observation, (observation, jnp.zeros(len(keys), jnp.int32))

    def advance(keys: Key, state: Any, action: Array) -> Outcome:
        observation, count = state
        following, reward = step(observation, action)
        over = count + 1 == limit
        now = masks.select_rows(over, start(keys), following)
        never = jnp.zeros(over.shape, bool)
        return Outcome(following, reward, never, now, over, (now, jnp.where(over, 0, count + 1)))

    return World(spec, begin, advance)


def _of_gymnax(name: str, base: str) -> World:
    gymnax = minatar.gymnax()
    if base not in gymnax.registered_envs:
        raise ValueError(f"unknown environment {name!r}: gymnax has {', '.join(gymnax.registered_envs)}")
    return minatar.make(base) if "MinAtar" in base else _vectors(gymnax, name, base)


def _vectors(gymnax: ModuleType, name: str, base: str) -> World:
    """One of gymnax's environments with observations [O] of float32 and actions in [-1, 1], or integers from 0."""
    environment, params = gymnax.make(base)
    box, actions = environment.observation_space(params), environment.action_space(params)
    discrete = hasattr(actions, "n")
    if not hasattr(box, "low") or not (discrete or hasattr(actions, "low")):
        raise ValueError(
            f"environment {name!r} observes {box} and takes {actions}, but agents here take arrays (Box) and act with "
            "one integer (Discrete) or with a real vector between finite bounds (Box)"
        )
    flat = lambda x: jnp.reshape(x, (x.shape[0], -1)).astype(jnp.float32)
    shape = tuple(getattr(actions, "shape", ()))
    size = int(actions.n) if discrete else math.prod(shape)

    def theirs(action: Array) -> Array:
        if discrete:
            return action
        unit = jnp.clip(action, -1, 1).reshape(-1, *shape)
        return actions.low + (unit + 1) / 2 * (actions.high - actions.low)

    def begin(keys: Key) -> tuple[Array, Any]:
        observation, state = jax.vmap(environment.reset, (0, None))(keys, params)
        return flat(observation), state

    def advance(keys: Key, state: Any, action: Array) -> Outcome:
        observation, state, reward, terminated, truncated, info = jax.vmap(environment.step, (0, 0, 0, None))(
            keys, state, theirs(action), params
        )
        return Outcome(
            flat(info["final_observation"]),
            reward.astype(jnp.float32),
            terminated,
            flat(observation),
            terminated | truncated,
            state,
        )

    return World(Spec((math.prod(box.shape),), size, discrete), begin, advance)


def _program(name: str) -> tuple[Spec, Any, Callable[..., Any], Callable[..., Any]]:
    """`_compiled`, anew where a function of the user's was reloaded."""
    module, _, function = name.removeprefix(OURS).rpartition(".")
    if module and module not in sys.modules:
        with contextlib.suppress(ImportError, TypeError):  # which `make` explains
            importlib.import_module(module)
    return _compiled(name, getattr(sys.modules.get(module), function, None))


@functools.cache
def _compiled(name: str, maker: Any) -> tuple[Spec, Any, Callable[..., Any], Callable[..., Any]]:
    """What all copies of an environment share: spec, an observation [1, ...] as shapes and types, reset and step.

    The last two are `World.reset` and `World.step`, compiled for the CPU. States are lists of NumPy arrays, keys of
    random numbers among them.
    """
    del maker  # makes the world, if the environment is one of the user's
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        world = make(name)

    def reset(keys: Key) -> tuple[Any, Any]:
        observation, state = world.reset(keys)
        return observation, jax.tree.map(_plain, state)

    def step(keys: Key, state: Any, action: Array) -> Outcome:
        outcome = world.step(keys, jax.tree.map(_typed, typed, state), action)
        return outcome._replace(state=jax.tree.map(_plain, outcome.state))

    reset, step = jax.jit(reset), jax.jit(step)
    keys = lambda seed, time: jax.random.fold_in(jax.random.key(seed), time)[None]
    seen, typed = jax.eval_shape(world.reset, keys(0, 0))
    structure = jax.tree.structure(typed)

    def begin(seed: int, time: int) -> tuple[Any, list[np.ndarray]]:
        with jax.default_device(cpu):
            observation, state = jax.device_get(reset(keys(seed, time)))
        return observation, jax.tree.leaves(state)

    def advance(
        seed: int, time: int, leaves: list[np.ndarray], action: Any
    ) -> tuple[Outcome, list[np.ndarray]]:
        state = jax.tree.unflatten(structure, leaves)
        with jax.default_device(cpu):
            outcome = jax.device_get(step(keys(seed, time), state, jnp.asarray(action)[None]))
        return outcome, jax.tree.leaves(outcome.state)

    return world.spec, seen, begin, advance


def _is_key(x: Any) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def _plain(x: Array) -> Array:
    """The numbers of a key of random numbers; of an array itself."""
    return jax.random.key_data(x) if _is_key(x) else x


def _typed(like: Any, x: Array) -> Array:
    """`_plain` undone, where ``like`` is a key."""
    return jax.random.wrap_key_data(x) if _is_key(like) else x


def _space(seen: Any) -> spaces.Space:
    """That of an observation [1, ...], given as shapes and types."""
    if isinstance(seen, Mapping):
        return spaces.Dict({key: _space(part) for key, part in seen.items()})
    if seen.dtype != np.uint8:
        return spaces.Box(-np.inf, np.inf, seen.shape[1:], seen.dtype)
    # Vectors of them are cells that are empty or not, which learners see as they are, and no bytes to be scaled.
    return spaces.Box(0, 255 if len(seen.shape) > 3 else 1, seen.shape[1:], seen.dtype)


class Stepped(gymnasium.Env):
    """One copy of a `World` for whatever steps environments on the host, on the CPU; made by `rl.envs.make`.

    All that it remembers is plain, so that it can be put back (`rl.envs.snapshot`).
    """

    def __init__(self, name: str):
        spec, seen, *_ = _program(name)
        self._name, self._seed, self._time = name, 0, 0
        self._state: list[np.ndarray] = []
        self.observation_space = _space(seen)
        one = (spec.action_size,)
        self.action_space = (
            spaces.Discrete(spec.action_size) if spec.discrete else spaces.Box(-1.0, 1.0, one, np.float32)
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """The first observation of an episode, which depends on the seed alone; without one, on what was played."""
        del options
        if seed is not None:
            self._seed, self._time = seed, 0
        self._time += 1
        observation, self._state = _program(self._name)[2](self._seed, self._time)
        return _only(observation), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """As gymnasium's."""
        self._time += 1
        outcome, self._state = _program(self._name)[3](self._seed, self._time, self._state, action)
        over, terminated = bool(outcome.first[0]), bool(outcome.terminated[0])
        seen = _only(outcome.next_observation)
        return seen, float(outcome.reward[0]), terminated, over and not terminated, {}


def _only(observation: Any) -> Any:
    """The observation of the one copy that there is."""
    return nest.map_structure(lambda x: np.asarray(x[0]), observation)
