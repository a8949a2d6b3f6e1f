"""The whole state of an environment as JSON, so that a run can stop in the middle of an episode and go on.

Possible where everything that an environment and its wrappers remember is plain: numbers, text, NumPy arrays and
generators, containers of these, and the state of a MuJoCo simulation or of an Atari console. Classic control, the
MuJoCo tasks, Adroit and OGBench's mazes are such. Others (OGBench's manipulation tasks) say what stands in the way.
"""

from __future__ import annotations

import base64
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

# JSON: one dict for each wrapper from the outermost, then the environment itself, and those that any of them holds.
Snapshot = list[dict[str, Any]]

# What an environment is made of, and does not change from step to step; environments have a layer of their own.
_PARTS = (
    gymnasium.Env,
    gymnasium.Space,
    gymnasium.envs.registration.EnvSpec,
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)
_PART_NAMES = ("MjvCamera", "MujocoModelNames", "MujocoRenderer")
_FIXED = ("metadata", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "_action_set")


class NoSnapshot(TypeError):
    """The environment remembers something that cannot be written down; the message names it."""


def take(env: gymnasium.Env) -> Snapshot:
    """What `put` needs to bring another copy of ``env`` to where this one is.

    Raises:
      NoSnapshot: see the module's docstring.
    """
    return [
        {
            name: _encode(value, f"{type(layer).__name__}.{name}")
            for name, value in vars(layer).items()
            if not _is_part(name, value)
        }
        for layer in _layers(env)
    ]


def put(env: gymnasium.Env, snapshot: Snapshot) -> None:
    """Brings ``env`` to the state in ``snapshot``, taken of a copy built in the same way.

    Raises:
      ValueError: it was taken of an environment of another make.
    """
    layers = _layers(env)
    if len(layers) != len(snapshot):
        raise ValueError(f"the snapshot is of {len(snapshot)} layers, the environment has {len(layers)}")
    for layer, attributes in zip(layers, snapshot, strict=True):
        for name, value in attributes.items():
            old = getattr(layer, name, None)
            if _kind(old) in _SIMULATORS:
                _SIMULATORS[_kind(old)][1](old, value)
            else:
                setattr(layer, name, _decode(value))


def _layers(env: gymnasium.Env) -> list[gymnasium.Env]:
    """``env`` and every environment that is an attribute of one, what a wrapper wraps among them; each once."""
    layers: list[gymnasium.Env] = []

    def visit(layer: gymnasium.Env) -> None:
        if any(layer is other for other in layers):
            return
        layers.append(layer)
        for _, value in sorted(vars(layer).items()):
            if isinstance(value, gymnasium.Env):
                visit(value)

    visit(env)
    return layers


def _is_part(name: str, value: Any) -> bool:
    return name in _FIXED or isinstance(value, _PARTS) or type(value).__name__ in _PART_NAMES


def _kind(value: Any) -> str:
    return type(value).__name__


# ---- plain values -------------------------------------------------------------------------------------------------


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):  # first: NumPy's float64 is a float too
        return _encode_array(np.asarray(value), "array" if isinstance(value, np.ndarray) else "scalar", where)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.random.Generator):
        return {"generator": _encode(value.bit_generator.state, where)}
    if isinstance(value, np.random.BitGenerator):
        return {"bits": _encode(value.state, where)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item, where) for key, item in value.items()}}
    if type(value) in _CONTAINERS.values():
        return {
            _kind(value): [_encode(item, where) for item in value],
            "most": getattr(value, "maxlen", None),
        }
    if _kind(value) in _SIMULATORS:
        return _SIMULATORS[_kind(value)][0](value)
    raise NoSnapshot(f"{where} is {type(value).__module__}.{_kind(value)}")


def _encode_array(array: np.ndarray, kind: str, where: str = "") -> dict[str, Any]:
    if array.dtype.hasobject:
        raise NoSnapshot(f"{where} is an array of Python objects")
    return {
        kind: base64.b64encode(array.tobytes()).decode(),
        "type": array.dtype.str,
        "shape": list(array.shape),
    }


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value or "scalar" in value:
        data = base64.b64decode(value["array"] if "array" in value else value["scalar"])
        array = np.frombuffer(data, value["type"]).reshape(value["shape"]).copy()
        return array if "array" in value else array[()]
    if "generator" in value:
        return np.random.Generator(_bits(value["generator"]))
    if "bits" in value:
        return _bits(value["bits"])
    if "dict" in value:
        return {key: _decode(item) for key, item in value["dict"].items()}
    (name,) = value.keys() & _CONTAINERS.keys()
    items = [_decode(item) for item in value[name]]
    return deque(items, value["most"]) if name == "deque" else _CONTAINERS[name](items)


def _bits(encoded: Any) -> np.random.BitGenerator:
    state = _decode(encoded)
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return bits


_CONTAINERS: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "deque": deque}


# ---- simulators ----------------------------------------------------------------------------------------------------


# What environments change in a model from episode to episode: where a door stands, how heavy a body is.
_MODEL_PARTS = ("actuator_", "body_", "dof_", "eq_", "geom_", "jnt_", "site_", "tendon_")


def _encode_model(model: Any) -> dict[str, Any]:
    names = [name for name in dir(model) if name.startswith(_MODEL_PARTS)]
    arrays = {name: value for name in names if isinstance(value := getattr(model, name), np.ndarray)}
    return {name: _encode_array(value, "array") for name, value in arrays.items()}


def _put_model(model: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        getattr(model, name)[...] = _decode(value)


def _encode_mujoco(data: Any) -> dict[str, Any]:
    """Time and every array, those included that a step computes and the next one reads (an Ant's position)."""
    arrays = {name: value for name in dir(data) if isinstance(value := getattr(data, name), np.ndarray)}
    return {
        "time": data.time,
        **{name: _encode_array(value, "array") for name, value in arrays.items() if name[0] != "_"},
    }


def _put_mujoco(data: Any, saved: dict[str, Any]) -> None:
    data.time = saved["time"]
    for name, value in saved.items():
        # Lists of contacts and constraints differ in length from step to step; a step makes them anew.
        if name != "time" and getattr(data, name).shape == tuple(value["shape"]):
            getattr(data, name)[...] = _decode(value)


def _encode_atari(console: Any) -> dict[str, Any]:
    return {"console": base64.b64encode(console.cloneState(include_rng=True).serialize()).decode()}


def _put_atari(console: Any, saved: dict[str, Any]) -> None:
    from ale_py import ALEState

    console.restoreState(ALEState(base64.b64decode(saved["console"])))


# By the name of the type, so that none of them need be installed.
_SIMULATORS: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[Any, dict[str, Any]], None]]] = {
    "MjData": (_encode_mujoco, _put_mujoco),
    "MjModel": (_encode_model, _put_model),
    "ALEInterface": (_encode_atari, _put_atari),
}
