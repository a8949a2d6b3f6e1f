"""From a name to one environment that follows the library's convention.

Nothing here knows about processes or batches, and JAX is not imported (see ``rl.envs.workers``).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import re
import string
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl import extras, nest
from rl.envs import atari, distractors, entities, goals, pixels

if TYPE_CHECKING:
    from rl.types import Spec

GYMNAX, OURS = "gymnax/", "jax/"  # what the names of environments in JAX start with
_OURS = {"CartPoleSwingUp": "rl.envs.cartpole", "TwoRooms": "rl.envs.two_rooms"}
# What names start with, the module whose import registers them, and its extra. The first one counts.
_PACKAGES = (
    (("Adroit", "AntMaze", "Fetch", "FrankaKitchen", "Hand", "PointMaze"), "gymnasium_robotics", "d4rl"),
    (("ALE/",), "ale_py", "atari"),
    (("heavy-cube",), "rl.envs.heavy_cubes", "ogbench"),
    (("D4RLPen",), "rl.envs.d4rl_pen", "d4rl"),
    (("DirectionalAnt",), "rl.envs.directional_ant", "ogbench"),
    # Gymnasium's own names are capitalised, OGBench's never.
    (tuple(string.ascii_lowercase), "ogbench", "ogbench"),
)
# Warnings that every worker would repeat into the progress bar: the caller chose the version (D4RL's scores
# refer to -v4), float64 spaces become float32 on purpose, and nothing is drawn on a screen.
_HARMLESS = (".*out of date", ".*precision lowered", ".*DISPLAY environment variable")
_OLD_MUJOCO = (
    "; the Fetch, Hand and Kitchen tasks need mujoco < 3.12: "
    "pip install 'mujoco==3.11.0' 'dm-control==1.0.44'"
)


def make(name: str, *, seed: int | None = None) -> gymnasium.Env:
    """One environment by its registered name, in the library's convention.

    Names are those of gymnasium (``Hopper-v4``), gymnasium-robotics (``AdroitHandDoor-v1``), OGBench
    (``cube-single-singletask-task1-v0``) and the Arcade Learning Environment (``ALE/Pong-v5``, as `rl.envs.atari`
    shows it). ``pixels/Hopper-v5`` is the MuJoCo task after the slash from pixels (`rl.envs.pixels`), and
    ``goals/pointmaze-medium-v0`` one whose observations hold its goal (`rl.envs.goals`). Behind a ``+``
    stand distractors that are added to observations: ``Hopper-v5+distractors10``, ``Hopper-v5+noise10``
    (`rl.envs.distractors`); in ``goals/cube-double-v0+entities`` the scene is a set of objects (`rl.envs.entities`). A
    name of the form ``module:Name-v0`` imports ``module`` first, which registers it: an environment of your own.
    ``gymnax/CartPole-v1`` and ``jax/Pendulum-v1`` are environments in pure JAX (`rl.envs.functional`), stepped on the
    CPU.

    Observations become float32: vectors [D], or histories [T, D] where they have two axes. Images [H, W, C] of uint8
    keep their shape and type; networks divide them by 255, as vectors of bytes (uint8 from 0 to 255) are here.
    Dictionaries of arrays, nested ones too, become plain dicts of these. Continuous actions are flat vectors in [-1,
    1] (values outside are clipped) mapped linearly onto the environment's own box; discrete ones count from 0. Given a
    seed, ``reset`` and every later step depend on that seed alone, also for OGBench, whose environments draw from
    NumPy's global generator and from an unseeded action space. Success is what the info of a step holds as ``success``
    or, as in the Fetch and Hand tasks, ``is_success``: a number between 0 and 1.

    The Fetch, Hand (not Adroit) and Kitchen tasks of gymnasium-robotics 1.4 cannot be built with mujoco >= 3.12: pin
    ``mujoco==3.11.0`` and ``dm-control==1.0.44`` for them.

    Args:
        name: a registered environment.
        seed: makes the first ``reset()`` and the sampling of actions reproducible.

    Raises:
        ImportError: the package that registers this name is not installed, or MuJoCo cannot render.
        ValueError: no environment has this name (the nearest names are listed), its version is retired, or what
            follows a ``+`` names no distractors; an observation or action space that agents here cannot use, or
            distractors for observations that are no vectors.
        RuntimeError: the simulator could not build it.
    """
    whole = name.removesuffix(entities.SUFFIX)
    parts = distractors.parse(whole)
    with _quiet():
        env = _uniform(_build(parts.base), parts.base)
    if whole != name:
        env = entities.Entities(env, whole)
    if parts.kind:
        env = distractors.Distracted(env, parts.kind, parts.size, parts.map_seed)
    if seed is not None:
        env.reset(seed=seed)
        env.action_space.seed(seed)
    return env


def spec(env: gymnasium.Env) -> Spec:
    """What an agent must know of an environment made by `make`."""
    from rl.types import Spec

    return Spec(*describe(env))


def describe(env: gymnasium.Env) -> tuple[Any, int, bool]:
    """The fields of `rl.types.Spec` without importing JAX: observation shape, action size, discrete."""
    actions = env.action_space
    discrete = isinstance(actions, spaces.Discrete)
    size = int(actions.n) if isinstance(actions, spaces.Discrete) else math.prod(actions.shape or ())
    shape = nest.map_structure(lambda box: tuple(box.shape or ()), env.observation_space)
    return shape, size, discrete


def first_action(env: gymnasium.Env) -> int:
    """The environment's own number of the integer action that is 0 in one made by `make`."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, _FromZero):
            return env.first
        env = env.env
    return 0


def is_functional(name: str) -> bool:
    """Whether the environment is JAX's arrays and functions (`rl.envs.functional`)."""
    return name.startswith((GYMNAX, OURS))


def user_module(name: str) -> str:
    """The module that the name of an environment of one's own names; "" for any other environment."""
    if name.startswith(OURS):
        return name.removeprefix(OURS).rpartition(".")[0]
    return _base(name).rpartition(":")[0]


def check_name(name: str) -> None:
    """Raises ValueError, with the nearest names, if no environment is called so; none is built.

    Raises ImportError where what registers such names cannot be imported.
    """
    if is_functional(name):
        _functional().make(name)
    elif registered(_base(name)) is None:
        raise ValueError(f"unknown environment {name!r}{_nearest(_base(name))}")


def draws(name: str) -> bool:
    """Whether the environment renders what it shows, which takes seconds to set up, or a display."""
    return _is_atari(name) or name.startswith(pixels.PREFIX) or _base(name).startswith("visual-")


def _base(name: str) -> str:
    """What an environment is registered as: without prefixes and suffixes of ours."""
    base = distractors.parse(name.removesuffix(entities.SUFFIX)).base
    for prefix in (pixels.PREFIX, goals.TASKS, goals.RANDOM):
        base = base.removeprefix(prefix)
    return base


def stacked_frames(name: str) -> int:
    """How many frames each observation of the environment stacks, where only the newest is new; 0 elsewhere."""
    return atari.STACK if _is_atari(name) else pixels.STACK if name.startswith(pixels.PREFIX) else 0


def time_limit(name: str) -> int:
    """Steps after which an episode is cut, by what the environment is registered with; 0 where that is nothing.

    Prefixes and suffixes of ours do not change it. Of an environment in JAX it is `rl.envs.functional.time_limit`.
    """
    if is_functional(name):
        return int(_functional().time_limit(name))
    known = registered(_base(name))
    return (known.max_episode_steps or 0) if known else 0


def registered(name: str) -> gymnasium.envs.registration.EnvSpec | None:
    """What an environment's name, without a prefix or suffix of ours, is registered with; None where that is nothing.

    Of a name without a version it is the newest, as `make` takes it. Environments in pure JAX are never registered.

    Raises:
        ImportError: the package or module that registers such names cannot be imported.
    """
    if is_functional(name):
        return None
    module, _, name = name.rpartition(":")
    with _quiet():
        importlib.import_module(module) if module else _register(name)
    versions = [known for known in gymnasium.registry.values() if known.id == f"{name}-v{known.version}"]
    return gymnasium.registry.get(name) or max(versions, key=lambda known: known.version or 0, default=None)


def _build(name: str) -> gymnasium.Env:
    """The environment as its authors made it, with its time limit, or that environment from pixels or with goals."""
    if is_functional(name):
        return _functional().Stepped(name)
    if name.startswith(pixels.PREFIX):
        return pixels.from_pixels(_task(name.removeprefix(pixels.PREFIX), pixels.OPTIONS))
    for prefix in (goals.TASKS, goals.RANDOM):
        if name.startswith(prefix):
            task = name.removeprefix(prefix)
            return goals.GoalConditioned(_build(task), prefix, task)
    return _task(name, atari.OPTIONS if _is_atari(name) else {})


def _task(name: str, options: dict[str, Any]) -> gymnasium.Env:
    _register(name)
    try:
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        newer = re.sub(r"-v[23]$", "-v5", name)
        remedy = f". Use {newer}" if newer != name and newer in gymnasium.registry else ""
        raise ImportError(
            f"environment {name!r} needs a package that cannot be imported: {error}{remedy}"
        ) from error
    except gymnasium.error.Error as error:
        raise ValueError(f"unknown environment {name!r} ({error}){_nearest(name)}") from None
    except Exception as error:  # simulators fail in their own ways, some with an empty message
        if options is pixels.OPTIONS and isinstance(error, TypeError):
            raise ValueError(
                f"environment {name!r} has no version {pixels.PREFIX}{name}: it is no MuJoCo task that can be "
                f"made with {', '.join(options)} ({error})"
            ) from error
        remedy = _OLD_MUJOCO if name.startswith(("Fetch", "FrankaKitchen", "Hand")) else ""
        raise RuntimeError(f"environment {name!r} could not be built: {error!r}{remedy}") from error
    assert env.spec is not None
    if _is_atari(name):
        return atari.Screen(env)
    theirs = any(kind.__module__.startswith("ogbench.") for kind in type(env.unwrapped).__mro__)
    return _OwnRandomness(env) if theirs else env


def _functional() -> Any:
    """The module of environments in JAX, which imports JAX: nothing here does by itself."""
    return importlib.import_module("rl.envs.functional")


def _is_atari(name: str) -> bool:
    return name.startswith("ALE/")


def _register(name: str) -> None:
    """Import the package whose import registers ``name``, unless that has happened or gymnasium knows it."""
    if ":" in name or name in gymnasium.registry:
        return
    for start, module in _OURS.items():
        if name.startswith(start):
            importlib.import_module(module)
            return
    for starts, module, extra in _PACKAGES:
        if name.startswith(starts):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ImportError(
                    f"environment {name!r} would be registered by {module}, which cannot be imported ({error}); "
                    f"install it with: {extras.command(extra)}"
                ) from error
            return


def _nearest(name: str) -> str:
    module, _, own = name.rpartition(":")
    names = difflib.get_close_matches(own, gymnasium.registry, n=3)
    nearest = f"; the nearest names are {', '.join(names)}" if names else ""
    if not module:
        # Worker processes never run the caller's script, and know nothing that it registered.
        return (
            f"{nearest}; if a script or notebook of yours registers it, put that into a module and name it "
            f"module:{name}, or give processes=0"
        )
    if registered(name):
        return nearest
    return f": {module} was imported and registers no such id: call gymnasium.register(id={own!r}, ...) in it{nearest}"


def _uniform(env: gymnasium.Env, name: str) -> gymnasium.Env:
    """``env`` in the library's convention, or an error that says which space does not fit."""
    observations, actions = env.observation_space, env.action_space
    for place, space in nest.named("observation", observations).items():
        if not isinstance(space, spaces.Box):
            remedy = "wrapped in gymnasium.wrappers.FlattenObservation"
            if any(map(_is_image, nest.leaves(observations))):
                remedy = (
                    f"in which {place} is an array (one-hot, say), as flattened pixels are not divided by 255"
                )
            raise ValueError(
                f"environment {name!r} observes {observations}, but agents here take arrays (Box) and dictionaries of "
                f"them (Dict), and {place} is {space}; register under a name of your own a version {remedy}"
            )
        try:
            nest.agent_shape(space.shape, space.dtype)
        except ValueError as error:
            raise ValueError(f"environment {name!r}: {place} is {space}, and {error}") from None
        if len(space.shape) >= 3 and np.issubdtype(space.dtype, np.floating):
            warnings.warn(
                f"environment {name!r}: {place} is {space}, which agents see as a vector of {math.prod(space.shape)} "
                "numbers: if these are images, return them as uint8 [H, W, C], from 0 to 255 (networks divide by 255)",
                stacklevel=2,
            )
    if not (_is_atari(name) or name.startswith(pixels.PREFIX)):
        env = _float_observations(env)
    if isinstance(actions, spaces.Discrete):
        return _FromZero(env, actions) if actions.start else env
    if isinstance(actions, spaces.Box) and np.issubdtype(actions.dtype, np.floating) and actions.is_bounded():
        return _unit_actions(env)
    raise ValueError(
        f"environment {name!r} takes {actions}, but agents here act with one integer (Discrete) or with a real vector "
        "between finite bounds (Box): register a version under a name of your own, wrapped in "
        f"{_action_wrapper(actions)}"
    )


def _action_wrapper(actions: spaces.Space) -> str:
    """What makes actions that agents here do not take into ones that they do.

    Not ClipAction or RescaleAction: the first has infinite bounds itself, and the second keeps them.
    """
    if isinstance(actions, spaces.Box) and np.issubdtype(actions.dtype, np.floating):
        return (
            "gymnasium.wrappers.TransformAction(env, lambda action: action, gymnasium.spaces.Box(-1.0, 1.0, "
            f"{actions.shape})), with the bounds that the task needs"
        )
    if isinstance(actions, spaces.MultiBinary | spaces.MultiDiscrete):
        counts = getattr(actions, "nvec", np.full(actions.shape, 2))
        sizes, number = tuple(map(int, counts.flat)), math.prod(map(int, counts.flat))
        return (
            "gymnasium.wrappers.TransformAction(env, lambda i: numpy.reshape(numpy.unravel_index(i, "
            f"{sizes}), {actions.shape}), gymnasium.spaces.Discrete({number})), which numbers all combinations"
        )
    return (
        "gymnasium.wrappers.TransformAction(env, actions.__getitem__, gymnasium.spaces.Discrete(len(actions))), where "
        "actions is a list of those to choose from"
    )


def _float_observations(env: gymnasium.Env) -> gymnasium.Env:
    """Vectors and histories of float32, in the dictionaries that hold them; images stay, and must be of their space."""
    theirs = env.observation_space

    def seen(box: spaces.Box, x: Any) -> np.ndarray:
        if _is_image(box):
            image = np.asarray(x)
            if image.shape != box.shape or image.dtype != np.uint8:
                raise ValueError(
                    f"an observation of shape {image.shape}, {image.dtype}, is not of its space, {box}: mend the "
                    "environment, which must return uint8 from 0 to 255"
                )
            return image
        if np.size(x) != math.prod(box.shape):
            raise ValueError(
                f"an observation of shape {np.shape(x)} is not of its space, {box}: mend the environment"
            )
        vector = np.reshape(x, nest.agent_shape(box.shape, box.dtype)).astype(np.float32)
        return vector / np.float32(255.0) if _is_bytes(box) else vector

    def seen_space(space: Any) -> spaces.Space:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: seen_space(part) for key, part in space.items()})
        if _is_image(space):
            return space
        return spaces.Box(-np.inf, np.inf, nest.agent_shape(space.shape, space.dtype), np.float32)

    return gymnasium.wrappers.TransformObservation(
        env, lambda x: nest.map_structure(seen, theirs, x), seen_space(theirs)
    )


def _is_image(space: spaces.Space) -> bool:
    return space.dtype == np.uint8 and len(space.shape or ()) >= 3


def shows_bytes(env: gymnasium.Env) -> bool:
    """Whether an environment from `make` observes a vector of bytes, which is divided by 255."""
    theirs = env.unwrapped.observation_space
    return isinstance(theirs, spaces.Box) and len(theirs.shape) < 3 and _is_bytes(theirs)


def in_own_units(env: gymnasium.Env, actions: np.ndarray) -> bool:
    """Whether actions [N, A] all lie in a box narrower than [-1, 1], an environment's own, as no policy's here do."""
    box = env.unwrapped.action_space
    if not isinstance(box, spaces.Box) or np.shape(actions)[-1] != math.prod(box.shape):
        return False
    low, high = box.low.ravel() - 1e-6, box.high.ravel() + 1e-6
    narrower = bool((low > -1).any() or (high < 1).any())
    return narrower and bool((actions.min(0) >= low).all() and (actions.max(0) <= high).all())


def _is_bytes(box: spaces.Box) -> bool:
    """Whether these are vectors of all that a byte can be, as a console's memory."""
    return box.dtype == np.uint8 and bool((box.high == 255).all())


def _unit_actions(env: gymnasium.Env) -> gymnasium.Env:
    """Actions in [-1, 1] mapped linearly onto the environment's box; the identity where that is its box."""
    box: Any = env.action_space
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    centre, half = (high + low) / 2, (high - low) / 2

    def to_box(action: np.ndarray) -> np.ndarray:
        unit = np.reshape(action, box.shape).astype(np.float64)
        return np.clip(centre + half * unit, low, high).astype(box.dtype)

    size = math.prod(box.shape)
    return gymnasium.wrappers.TransformAction(env, to_box, spaces.Box(-1.0, 1.0, (size,), np.float32))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings in `_HARMLESS`."""
    with warnings.catch_warnings():
        for message in _HARMLESS:
            warnings.filterwarnings("ignore", message=message)
        yield


class _FromZero(gymnasium.wrappers.TransformAction):
    """Integer actions that count from 0, whatever those of the environment begin with."""

    def __init__(self, env: gymnasium.Env, theirs: spaces.Discrete):
        self.first = int(theirs.start)
        super().__init__(env, lambda action: theirs.start + action, spaces.Discrete(int(theirs.n)))


class _OwnRandomness(gymnasium.Wrapper):
    """Gives one copy of an environment its own stream behind NumPy's global generator, and one action space.

    Without it a seeded OGBench episode depends on which other copies run in the same process, and so does the goal of
    its manipulation tasks: they would build a new unseeded action space for each random step on the way there.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._stream = np.random.MT19937()
        task: Any = env.unwrapped
        if isinstance(getattr(type(task), "action_space", None), property):
            attributes = {"action_space": task.action_space}
            task.__class__ = type(type(task).__name__, (type(task),), attributes)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        with _quiet():
            if seed is not None:
                self._stream = np.random.MT19937(seed)
                self.unwrapped.action_space.seed(seed)
            with self._installed():
                return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        with self._installed():
            return self.env.step(action)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        before = np.random.mtrand.get_bit_generator()
        np.random.mtrand.set_bit_generator(self._stream)
        try:
            yield
        finally:
            np.random.mtrand.set_bit_generator(before)
