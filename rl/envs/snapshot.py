"""The whole state of an environment as JSON, so that a run can stop in the middle of an episode and go on.

Possible where everything that an environment and its wrappers remember is plain: numbers, text, NumPy arrays,
generators of NumPy or Python, lists, dictionaries and the like of these, the moments of a normalising wrapper, and the
state of a MuJoCo simulation or of an Atari console. An object may stand in several places, but no array may be a part
of another. Classic control, the MuJoCo tasks, Adroit and OGBench's mazes are such. Others (OGBench's manipulation
tasks) say what stands in the way.
"""

from __future__ import annotations

import base64
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd
from numpy.lib import array_utils

# JSON: one dict for each wrapper from the outermost, then the environment itself, and those that any of them holds.
Snapshot = list[dict[str, Any]]

# What an environment is made of, and does not change from step to step; environments have a layer of their own.
_PARTS = (
    gymnasium.Env,
    gymnasium.envs.registration.EnvSpec,
    type,
    types.FunctionType,
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
    layers, encoder = _layers(env), _Encoder()
    snapshot = [
        {
            name: encoder.attribute(value, f"{type(layer).__name__}.{name}")
            for name, value in vars(layer).items()
            if not _is_part(name, value)
        }
        for layer in layers
    ]
    encoder.check_memory(
        [value for layer in layers for value in vars(layer).values() if _kind(value) == "MjData"]
    )
    return snapshot


def put(env: gymnasium.Env, snapshot: Snapshot) -> None:
    """Brings ``env`` to the state in ``snapshot``, taken of a copy built in the same way.

    Raises:
      ValueError: it was taken of an environment of another make.
    """
    layers, decoder = _layers(env), _Decoder()
    if len(layers) != len(snapshot):
        raise ValueError(f"the snapshot is of {len(snapshot)} layers, the environment has {len(layers)}")
    for layer, attributes in zip(layers, snapshot, strict=True):
        for name, value in attributes.items():
            old = getattr(layer, name, None)
            if _kind(old) in _SIMULATORS:
                _SIMULATORS[_kind(old)][1](old, value)
            elif isinstance(old, gymnasium.Space):
                for space, generator in zip(_spaces(old), value["spaces"], strict=True):
                    space._np_random = decoder.decode(generator)
            else:
                setattr(layer, name, decoder.decode(value))


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
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        # A generator's, say, is bound to the one that was there before `put`.
        of = value.__self__
        return of is None or isinstance(of, gymnasium.Space) or _kind(of) in _SIMULATORS or _is_part("", of)
    return name in _FIXED or isinstance(value, _PARTS) or type(value).__name__ in _PART_NAMES


def _spaces(space: gymnasium.Space) -> list[gymnasium.Space]:
    """``space`` and those that it is made of."""
    spaces = [space]
    for value in vars(space).values():
        items = value.values() if isinstance(value, dict) else value
        several = items if isinstance(value, dict | list | tuple) else [value]
        spaces += [part for item in several if isinstance(item, gymnasium.Space) for part in _spaces(item)]
    return spaces


def _kind(value: Any) -> str:
    return type(value).__name__


# ---- plain values -------------------------------------------------------------------------------------------------


class _Encoder:
    """Values as JSON; an object that is met again is a reference to where it was met first."""

    def __init__(self) -> None:
        # Those that can change, and their numbers, by identity.
        self._objects: dict[int, tuple[int, Any]] = {}
        self._arrays: list[tuple[str, np.ndarray]] = []

    def attribute(self, value: Any, where: str) -> Any:
        """An environment's attribute: these alone are what `put` brings to a state in place."""
        if isinstance(value, gymnasium.Space):
            return {"spaces": [self.encode(part._np_random, where) for part in _spaces(value)]}
        if _kind(value) in _SIMULATORS:
            return _SIMULATORS[_kind(value)][0](value)
        return self.encode(value, where)

    def encode(self, value: Any, where: str) -> Any:
        if isinstance(value, np.generic):  # first: NumPy's float64 is a float too
            return _encode_array(np.asarray(value), "scalar", where)
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is tuple:
            return {"tuple": [self.encode(item, where) for item in value]}
        if id(value) in self._objects:
            return {"same": self._objects[id(value)][0]}
        number = len(self._objects)
        self._objects[id(value)] = number, value  # held, so that no other object has its identity
        return {"number": number, **self._object(value, where)}

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, np.ndarray):
            self._arrays.append((where, value))
            return _encode_array(value, "array", where)
        if isinstance(value, np.random.Generator):
            return {"generator": self.encode(value.bit_generator, where)}
        if isinstance(value, np.random.BitGenerator):
            return {"bits": self.encode(value.state, where)}
        if type(value) in (dict, OrderedDict):
            if all(type(key) is str for key in value):
                items = {key: self.encode(item, where) for key, item in value.items()}
                return {"dict": items, "ordered": type(value) is OrderedDict}
            pairs = [[self.encode(key, where), self.encode(item, where)] for key, item in value.items()]
            return {"pairs": pairs, "ordered": type(value) is OrderedDict}
        if type(value) is random.Random:
            return {"random": self.encode(value.getstate(), where)}
        if type(value) is RunningMeanStd:
            return {"moments": self.encode(vars(value), where)}
        if type(value) in (list, deque):
            members = [self.encode(item, where) for item in value]
            return {_kind(value): members, "most": getattr(value, "maxlen", None)}
        raise NoSnapshot(f"{where} is {type(value).__module__}.{_kind(value)}")

    def check_memory(self, simulations: list[Any]) -> None:
        """Raises NoSnapshot if a part of one array is another one: `put` would make two of them."""
        # What `put` writes in place, and what overlaps as it likes.
        of_simulations = [("", array) for data in simulations for array in _mujoco_arrays(data).values()]
        spans = sorted(
            (
                (array_utils.byte_bounds(array), where, array)
                for where, array in self._arrays + of_simulations
            ),
            key=lambda span: span[0],
        )
        reached: list[tuple[int, str, np.ndarray]] = []  # those that end behind the beginning of the next
        for (begin, end), where, array in spans:
            reached = [one for one in reached if one[0] > begin]
            for _, other, earlier in reached:
                if (where or other) and np.shares_memory(array, earlier):
                    names = sorted(name or "a part of MjData" for name in (where, other))
                    raise NoSnapshot(f"{names[0]} shares memory with {names[1]}")
            reached.append((end, where, array))


def _encode_array(array: np.ndarray, kind: str, where: str = "") -> dict[str, Any]:
    if array.dtype.hasobject:
        raise NoSnapshot(f"{where} is an array of Python objects")
    return {
        kind: base64.b64encode(array.tobytes()).decode(),
        "type": array.dtype.str,
        "shape": list(array.shape),
    }


class _Decoder:
    """What an `_Encoder` has written, and snapshots of older versions, in which nothing is met again."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}  # by their numbers

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "same" in value:
            return self._objects[value["same"]]
        if "scalar" in value:
            return _decode_array(value, "scalar")[()]
        if "tuple" in value:
            return tuple(self.decode(item) for item in value["tuple"])
        whole, fill = self._object(value)
        if "number" in value:
            self._objects[value["number"]] = whole
        fill()  # afterwards: a list may hold itself
        return whole

    def _object(self, value: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
        """An object, and what fills it."""
        if "array" in value:
            return _decode_array(value, "array"), lambda: None
        if "generator" in value:
            bits = self.decode(value["generator"])
            return np.random.Generator(
                bits if isinstance(bits, np.random.BitGenerator) else _bits(bits)
            ), lambda: None
        if "bits" in value:
            return _bits(self.decode(value["bits"])), lambda: None
        if "random" in value:
            chance = random.Random()
            chance.setstate(self.decode(value["random"]))
            return chance, lambda: None
        if "moments" in value:
            moments = RunningMeanStd()
            return moments, lambda: vars(moments).update(self.decode(value["moments"]))
        if "dict" in value or "pairs" in value:
            whole: Any = OrderedDict() if value.get("ordered") else {}
            pairs = value["dict"].items() if "dict" in value else value["pairs"]
            fill = lambda: {
                key if isinstance(key, str) else self.decode(key): self.decode(x) for key, x in pairs
            }
            return whole, lambda: whole.update(fill())
        name = "list" if "list" in value else "deque"
        items: Any = [] if name == "list" else deque(maxlen=value["most"])
        return items, lambda: items.extend(self.decode(item) for item in value[name])


def _decode_array(value: dict[str, Any], kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value[kind]), value["type"]).reshape(value["shape"]).copy()


def _bits(state: Any) -> np.random.BitGenerator:
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return bits


# ---- simulators ----------------------------------------------------------------------------------------------------


# What environments change in a model from episode to episode: where a door stands, how heavy a body is.
_MODEL_PARTS = ("actuator_", "body_", "dof_", "eq_", "geom_", "jnt_", "site_", "tendon_")


def _encode_model(model: Any) -> dict[str, Any]:
    names = [name for name in dir(model) if name.startswith(_MODEL_PARTS)]
    arrays = {name: value for name in names if isinstance(value := getattr(model, name), np.ndarray)}
    return {name: _encode_array(value, "array") for name, value in arrays.items()}


def _put_model(model: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        getattr(model, name)[...] = _decode_array(value, "array")


def _encode_mujoco(data: Any) -> dict[str, Any]:
    """Time and every array, those included that a step computes and the next one reads (an Ant's position)."""
    return {
        "time": data.time,
        **{name: _encode_array(value, "array") for name, value in _mujoco_arrays(data).items()},
    }


def _mujoco_arrays(data: Any) -> dict[str, np.ndarray]:
    arrays = {name: value for name in dir(data) if isinstance(value := getattr(data, name), np.ndarray)}
    return {name: value for name, value in arrays.items() if name[0] != "_"}


def _put_mujoco(data: Any, saved: dict[str, Any]) -> None:
    data.time = saved["time"]
    for name, value in saved.items():
        # Lists of contacts and constraints differ in length from step to step; a step makes them anew.
        if name != "time" and getattr(data, name).shape == tuple(value["shape"]):
            getattr(data, name)[...] = _decode_array(value, "array")


def _encode_atari(console: Any) -> dict[str, Any]:
    if console.getFloat("repeat_action_probability"):
        raise NoSnapshot(
            "ALEInterface repeats its last action, which it does not tell (repeat_action_probability)"
        )
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
