"""When an episode ends, as a function of the next observation alone: what models are not asked to learn.

The rules are those of gymnasium's tasks, MuJoCo's of -v4 and -v5, written in terms of observations. Time limits are no
part of them: a rollout is cut by its own length.
"""

from __future__ import annotations

import importlib
import math
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rl.envs import distractors
from rl.envs.registry import OURS, user_module
from rl.settings import did_you_mean
from rl.types import Array, Spec

Rule = Callable[[Array], Array]  # next observations [..., O] -> [...] bool


def never(observation: Array) -> Array:
    """For tasks that only a time limit ends."""
    return jnp.zeros(observation.shape[:-1], bool)


def hopper(observation: Array) -> Array:
    """Unless the height is above 0.7, the angle within 0.2 and everything else finite and within 100."""
    height, angle = observation[..., 0], observation[..., 1]
    calm = (jnp.abs(observation[..., 1:]) < 100).all(-1)  # False for NaN
    return ~(jnp.isfinite(height) & (height > 0.7) & (jnp.abs(angle) < 0.2) & calm)


def walker2d(observation: Array) -> Array:
    """Unless the height is between 0.8 and 2 and the angle within 1."""
    height, angle = observation[..., 0], observation[..., 1]
    return ~((height > 0.8) & (height < 2.0) & (jnp.abs(angle) < 1.0))


def ant(observation: Array) -> Array:
    """Unless everything is finite and the height between 0.2 and 1."""
    height = observation[..., 0]
    return ~(jnp.isfinite(observation).all(-1) & (height >= 0.2) & (height <= 1.0))


def humanoid(observation: Array) -> Array:
    """Unless the height is between 1 and 2."""
    height = observation[..., 0]
    return ~((height > 1.0) & (height < 2.0))


def inverted_pendulum(observation: Array) -> Array:
    """Unless everything is finite and the pole's angle within 0.2."""
    return ~(jnp.isfinite(observation).all(-1) & (jnp.abs(observation[..., 1]) <= 0.2))


def cartpole(observation: Array) -> Array:
    """Of CartPole-v1: unless the cart is within 2.4 and the pole's angle within 12 degrees."""
    position, angle = observation[..., 0], observation[..., 2]
    return ~((jnp.abs(position) <= 2.4) & (jnp.abs(angle) <= math.radians(12)))


FILES = (".hdf5", ".h5", ".npz")
# Tasks whose names begin like those of `RULES` and which show something else.
OTHERS = ("antmaze", "antsoccer", "humanoidmaze", "humanoidstandup")
RULES: dict[str, Rule] = {
    "ant": ant,
    "cartpole": cartpole,
    "cartpoleswingup": never,
    "halfcheetah": never,
    "hopper": hopper,
    "humanoid": humanoid,
    "invertedpendulum": inverted_pendulum,
    "pendulum": never,
    "reacher": never,
    "swimmer": never,
    "walker2d": walker2d,
}


def of(name: str) -> Rule:
    """The rule of an environment or dataset that begins with its task: ``Hopper-v5``, ``walker2d-medium-v2``.

    The longest beginning counts: ``inverted_pendulum-mine`` is an inverted pendulum. A file is named by its own name,
    as its folders may be called anything; a dataset of Minari by any part of its name, ``mujoco/hopper/expert-v0``; one
    that is given as a path by its last folder, or by these three. An environment of a module of the user's,
    ``module:Name-v0``, has a rule if the module has a function ``terminates(observation)``, as those here are.

    Raises:
      ValueError: no beginning is one of `RULES`; or the environment is of a module of the user's, which has none,
        or of dm_control, whose tasks have gymnasium's names and other observations.
      ImportError: what that module imports is missing.
    """
    is_file = pathlib.PurePath(name).suffix in FILES
    module = "" if is_file or name.startswith("minari:") else user_module(name)
    if module and (rule := _of_module(module)):
        return rule
    parts = name.lower().removeprefix("minari:").split("/")
    if is_file:
        parts = parts[-1:]
    elif name.removeprefix("minari:").startswith(("/", ".", "~")):
        parts = [
            part for part in parts if part not in ("", "data")
        ]  # the latter is Minari's own in a dataset's
        parts = parts[-2:] if parts[-3:-2] == ["mujoco"] else parts[-1:]
    of_user = ":" in "/".join(parts) or (name.startswith(OURS) and "." in name and not is_file)
    if not of_user and parts[0] != "dm_control":
        for words in ([word for word in re.split(r"[^a-z0-9]+", part) if word] for part in reversed(parts)):
            for count in range(len(words), 0, -1):
                task, with_next = "".join(words[:count]), "".join(words[: count + 1])
                if task in RULES and with_next not in OTHERS:
                    return RULES[task]
    hint = "" if of_user else did_you_mean(re.split(r"[^a-z0-9]+", parts[-1])[0], RULES)
    if module:
        hint = f"give {module} a function terminates(observation), [..., O] to bool [...]: "
    raise ValueError(
        f"no termination rule for {name!r}: {hint}rollouts in a model must know where episodes end; there are rules "
        f"for {', '.join(RULES)}"
    )


def _of_module(name: str) -> Rule | None:
    """The rule of a module of the user's; None where it has none, or where there is no such module."""
    try:
        rule = getattr(importlib.import_module(name), "terminates", None)
    except TypeError:  # no name of a module
        return None
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # of what it imports
    return _checked(name, rule) if callable(rule) and rule not in RULES.values() else rule


def _checked(module: str, rule: Rule) -> Rule:
    """The rule, which raises ValueError where it gives something else than a boolean for each observation.

    One boolean for all of them would be taken for each.
    """

    def terminates(observation: Array) -> Array:
        try:
            ended = jnp.asarray(rule(observation))
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise ValueError(
                f"terminates(observation) of {module} cannot be compiled, as rollouts in a model are: write it with "
                f"jax.numpy and operators, not with NumPy, `if` or float() ({str(error).splitlines()[0]})"
            ) from error
        if ended.shape != observation.shape[:-1] or ended.dtype != bool:
            raise ValueError(
                f"terminates(observation) of {module} gives {ended.dtype}{list(ended.shape)} for observations "
                f"{list(observation.shape)}: it must give a boolean for each of them, bool"
                f"{list(observation.shape[:-1])}, by observation[..., i] or .any(-1) say"
            )
        return ended

    return terminates


def check(rule: Rule, spec: Spec) -> None:
    """Raises ValueError if a rule cannot be compiled, or gives no boolean for each observation of the ``spec``."""
    jax.eval_shape(rule, jax.ShapeDtypeStruct((2, *spec.observation_shape), jnp.float32))


def contradicted(rule: Rule, next_observation: np.ndarray, terminated: np.ndarray) -> str:
    """What recorded steps say against a rule, in words; "" where no more than a few of them do.

    Few are 1 % of the steps after which an episode went on or was cut, and half of those that ended one.

    Args:
      rule: any.
      next_observation: [N, O].
      terminated: [N] bool.
    """
    ends = np.asarray(rule(jnp.asarray(next_observation)))
    wrong, missed = int((ends & ~terminated).sum()), int((~ends & terminated).sum())
    others, ended = int((~terminated).sum()), int(terminated.sum())
    if 100 * wrong <= others and 2 * missed <= ended:
        return ""
    return (
        f"by the termination rule {wrong:,} of {others:,} recorded steps would have ended an episode that went on or "
        f"was cut, and {missed:,} of {ended:,} that ended one would not: rollouts in a model end by that rule "
        "(rl.dynamics.termination, or terminates of a module of your own)"
    )


def of_environment(environment: str) -> Rule:
    """`of` an environment to act in, by the part of its observations that is the task's: distractors end nothing.

    Raises:
      ValueError: there is no rule, or what follows a ``+`` names no distractors.
    """
    rule, size = of(environment), distractors.parse(environment).size
    return (lambda observation: rule(observation[..., :-size])) if size and rule is not never else rule


def known(environment: str | None, dataset: str = "") -> Rule | None:
    """`of_environment`, or the rule of the dataset where there is no environment; None where no rule is known."""
    try:
        return of_environment(environment) if environment else of(dataset)
    except ValueError:
        return None
