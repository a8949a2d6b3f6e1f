"""Damages small files of every layout that is read, and counts what the readers make of them.

    python -m tests.fuzz_readers --mutations=10000

A mutation changes bytes anywhere in a valid file, or one thing that a person may get wrong (`WRONG`, `HARMLESS`). The
reader must refuse with a `DataError` that names the file (of models and of programs, with a ValueError of theirs), or
read the file; what is known to be wrong it must refuse. Every structured mutation comes once, then random ones.
``--only=17`` repeats the 17th and shows its traceback.

`test_data_fuzz.py` runs a few hundred of the same in CI.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import resource
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import jax
import numpy as np
from tqdm import tqdm

from rl import checkpoint, data, exported, nest
from rl.agents import ilql
from rl.data import dialogues
from rl.data.steps import MAX_ACTIONS, Loaded
from rl.files import DataError
from rl.language import huggingface, model, pretrained, weights
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.networks.transformer import Shape
from rl.programs import problems
from rl.values import heads

STEPS, EPISODE = 48, 6
EPISODES = 3  # of Minari's, which are slow to write
LIMIT = 20.0  # seconds for a file of some kilobytes; more is a hang
MEMORY = 8 * 2**30  # bytes that a reader may ask for beyond what the process has, in the command

Fields = dict[str, Any]  # arrays by their place in the file
After = Callable[[Path], None] | None  # what is left to do to the file that was written
Mutate = Callable[[np.random.Generator, Fields], After]


class Layout(NamedTuple):
    """A kind of file."""

    ending: str  # of its name
    fields: Callable[[], Fields]  # of a valid one
    write: Callable[[Path, Fields], None]
    read: Callable[[str], Any]
    wrong: dict[str, Mutate]  # structured mutations that no reader may accept without a word
    harmless: dict[str, Mutate]  # and some that all must accept
    refusal: type[Exception] | tuple[type[Exception], ...] = DataError  # what explains why a file is refused


class Outcome(NamedTuple):
    """What became of a file."""

    kind: str  # read, refused, unexplained, accepted (though it is wrong), rejected (though it is right), or hang
    layout: str
    mutation: str
    message: str


FAULTS = ("hang", "unexplained", "accepted", "rejected")


# Valid files.


def log(discrete: bool) -> Fields:
    """Episodes of six steps, half of them terminated, with next observations."""
    rng = np.random.default_rng(0)
    path = rng.normal(size=(STEPS + STEPS // EPISODE, 3)).astype(np.float32)
    step = np.arange(STEPS)
    first = step + step // EPISODE  # episodes have one observation more than steps
    ends = step % EPISODE == EPISODE - 1
    terminal = ends & (step // EPISODE % 2 == 0)
    choices = step % 5
    return {
        "observations": path[first],
        "actions": choices if discrete else rng.uniform(-1, 1, (STEPS, 2)).astype(np.float32),
        "rewards": rng.normal(size=STEPS).astype(np.float32),
        "terminals": terminal,
        "timeouts": ends & ~terminal,
        "next_observations": path[first + 1],
    }


def trajectories(discrete: bool) -> Fields:
    """OGBench's layout: no rewards, and the last state of a trajectory is marked."""
    steps = log(discrete)
    return {
        "observations": steps["observations"],
        "actions": steps["actions"],
        "terminals": steps["terminals"] | steps["timeouts"],
        "qpos": steps["observations"],
    }


def episodes(discrete: bool) -> Fields:
    """Minari's layout: an episode's arrays in its group, and what its metadata says."""
    from gymnasium import spaces
    from minari.serialization import serialize_space

    steps, fields = log(discrete), {}
    for number, start in enumerate(range(0, EPISODES * EPISODE, EPISODE)):
        rows, last = slice(start, start + EPISODE), start + EPISODE - 1
        observations = np.concatenate([steps["observations"][rows], steps["next_observations"][last:][:1]])
        for name, array in (
            ("observations", observations),
            ("actions", steps["actions"][rows]),
            ("rewards", steps["rewards"][rows]),
            ("terminations", steps["terminals"][rows]),
            ("truncations", steps["timeouts"][rows]),
        ):
            fields[f"episode_{number}/{name}"] = array
    action_space = spaces.Discrete(5) if discrete else spaces.Box(-1, 1, (2,), np.float32)
    fields["metadata"] = {
        "total_episodes": EPISODES,
        "total_steps": EPISODES * EPISODE,
        "data_format": "hdf5",
        "observation_space": serialize_space(spaces.Box(-np.inf, np.inf, (3,), np.float32)),
        "action_space": serialize_space(action_space),
        "dataset_id": "test/log-v0",
        "minari_version": "0.5.3",
        "ref_min_score": 0.0,
        "ref_max_score": 1.0,
    }
    return fields


def conversations() -> Fields:
    turns = [{"text": "2+2=", "is_action": False}, {"text": "4", "is_action": True, "reward": 1.0}]
    return {f"line {i}": {"turns": turns, "terminated": True, "imitate": 1} for i in range(4)}


def write_hdf5(path: Path, fields: Fields) -> None:
    with h5py.File(path, "w") as file:
        for name, array in fields.items():
            file[name] = array


def write_npz(path: Path, fields: Fields) -> None:
    np.savez(path, **fields)


def write_minari(path: Path, fields: Fields) -> None:
    path.mkdir(exist_ok=True)
    arrays = dict(fields)
    (path / "metadata.json").write_text(json.dumps(arrays.pop("metadata")))
    write_hdf5(path / "main_data.hdf5", arrays)


def write_lines(path: Path, fields: Fields) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in fields.values()))


# Structured mutations.


def some(rng: np.random.Generator, fields: Fields, *names: str) -> str:
    """The place of one array of these names, or of any."""
    places = [place for place in fields if place != "metadata" and place.rpartition("/")[2] in names]
    return str(rng.choice(places or [place for place in fields if place not in ("metadata", "qpos")]))


def changed(change: Callable[[np.ndarray], Any], *names: str) -> Mutate:
    """A mutation that replaces one array by what ``change`` makes of it."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        place = some(rng, fields, *names)
        fields[place] = change(fields[place])
        return None

    return mutate


def put(value: Any, *names: str) -> Mutate:
    """A mutation that puts ``value`` into a random step of one array, whose type becomes one that holds it."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        place = some(rng, fields, *names)
        array = fields[place].astype(np.asarray(value).dtype)
        row = array[rng.integers(len(array))] if array.ndim > 1 else array
        row[rng.integers(len(row))] = value
        fields[place] = array
        return None

    return mutate


def missing(*names: str) -> Mutate:
    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        del fields[some(rng, fields, *names)]
        return None

    return mutate


def compound(array: np.ndarray) -> np.ndarray:
    return np.zeros(len(array), [("x", "f4"), ("y", "i4")])


WITHIN = ("observations", "actions", "rewards", "terminations", "truncations")  # an episode of Minari's
OBSERVED = ("observations", "next_observations")
NUMBERS = (*OBSERVED, "rewards")
FLAGS = ("terminals", "timeouts", "terminations", "truncations")

WRONG: dict[str, Mutate] = {
    "a scalar": changed(lambda x: x.reshape(-1)[0]),
    "no rows": changed(lambda x: x[:0]),
    "a row less": changed(lambda x: x[:-1]),
    "a row more": changed(lambda x: np.concatenate([x, x[-1:]])),
    "twice as long": changed(lambda x: np.concatenate([x, x])),
    "text": changed(lambda x: np.full(x.shape, b"True")),
    "complex": changed(lambda x: x.astype(np.complex64)),
    "compound": changed(compound),
    "bytes of no type": changed(lambda x: np.zeros(x.shape, "V3")),
    "two numbers": changed(lambda x: np.stack([x, x], 1), "rewards", *FLAGS),
    "NaN": put(np.nan, *NUMBERS),
    "infinity": put(-np.inf, *NUMBERS),
    "beyond float32": put(1e300, *NUMBERS),
    "an odd flag": put(2, *FLAGS),
    "a flag of -1": put(-1, *FLAGS),
    "half a flag": put(0.5, *FLAGS),
    "a flag of NaN": put(np.nan, *FLAGS),
    "a flag of 2**40": put(2**40, *FLAGS),
    "observations without width": changed(lambda x: x[:, :0], "observations"),
    "flat observations": changed(lambda x: x[:, 0], "observations"),
}
REQUIRED = {"a missing array": missing("observations", "actions", "rewards", "terminals")}
CONTINUOUS: dict[str, Mutate] = {
    "an action of NaN": put(np.nan, "actions"),
    "an action outside": put(1.5, "actions"),
    "an action far outside": put(-1e30, "actions"),
    "actions without width": changed(lambda x: x[:, :0], "actions"),
    "actions of bool": changed(lambda x: x > 0, "actions"),
}
DISCRETE: dict[str, Mutate] = {
    **{
        f"action {value}": put(value, "actions")
        for value in (-1, -(2**40), MAX_ACTIONS, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
    },
    "actions of floats": changed(lambda x: x.astype(np.float64), "actions"),
    "pairs of actions": changed(lambda x: np.stack([x, x], 1), "actions"),
}
HARMLESS: dict[str, Mutate] = {
    "nothing": lambda rng, fields: None,
    "float64": changed(lambda x: x.astype(np.float64), *NUMBERS),
    "flags of int8": changed(lambda x: x.astype(np.int8), *FLAGS),
    "flags of float32": changed(lambda x: x.astype(np.float32), *FLAGS),
}


def extra(rng: np.random.Generator, fields: Fields) -> After:
    fields["extra"] = np.full(3, b"text")
    return None


def permuted(rng: np.random.Generator, fields: Fields) -> After:
    fields["next_observations"] = rng.permutation(fields["next_observations"])
    return None


def shifted(rng: np.random.Generator, fields: Fields) -> After:
    fields["next_observations"] = fields["next_observations"] + np.float32(rng.normal())
    return None


def unmarked(rng: np.random.Generator, fields: Fields) -> After:
    fields.pop("next_observations", None)
    for name in FLAGS:
        if name in fields:
            fields[name] = np.zeros(STEPS, bool)
    return None


def in_hdf5(change: Callable[[h5py.File, str], None], *names: str) -> Mutate:
    """A mutation of the file itself; the array that ``change`` is given is gone."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        place = some(rng, fields, *names)
        del fields[place]

        def after(path: Path) -> None:
            with h5py.File(path / "main_data.hdf5" if path.is_dir() else path, "a") as file:
                change(file, place)

        return after

    return mutate


def references(file: h5py.File, place: str) -> None:
    file.create_dataset(place, (STEPS,), h5py.ref_dtype)


def variable_text(file: h5py.File, place: str) -> None:
    file.create_dataset(place, data=["True"] * STEPS, dtype=h5py.string_dtype())


def ragged(file: h5py.File, place: str) -> None:
    file.create_dataset(place, (STEPS,), h5py.vlen_dtype(np.float32))


def endless(file: h5py.File, place: str) -> None:
    file.create_dataset(place, (2**50, 3), np.float32, chunks=(1, 3))


NODES: dict[str, Mutate] = {
    "a group": in_hdf5(lambda file, place: file.create_group(place)),
    "a type": in_hdf5(lambda file, place: file.__setitem__(place, np.dtype("f4"))),
    "nothing at all": in_hdf5(lambda file, place: file.__setitem__(place, h5py.Empty("f4"))),
    "a link to nothing": in_hdf5(lambda file, place: file.__setitem__(place, h5py.SoftLink("/none"))),
    "a link to no file": in_hdf5(
        lambda file, place: file.__setitem__(place, h5py.ExternalLink("no.hdf5", "/x"))
    ),
    "a link to itself": in_hdf5(lambda file, place: file.__setitem__(place, h5py.SoftLink(f"/{place}"))),
    "object references": in_hdf5(references),
    "text of any length": in_hdf5(variable_text),
    "rows of any length": in_hdf5(ragged),
    "an endless array": in_hdf5(endless),
}


def attributes(**values: Any) -> Mutate:
    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        def after(path: Path) -> None:
            with h5py.File(path, "a") as file:
                file.attrs.update(values)

        return after

    return mutate


FLAT: dict[str, Mutate] = {
    "integer observations": changed(lambda x: x.astype(np.int64), "observations"),
    "no ends": unmarked,
}


def renamed(name: str, called: str) -> Mutate:
    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        fields[called] = fields.pop(name)
        return None

    return mutate


FILES: dict[str, Mutate] = {
    **{f"timeouts called {called}": renamed("timeouts", called) for called in ("timeout", "truncations")},
    "next observations called next_obs": renamed("next_observations", "next_obs"),
    "next observations in another order": permuted,
    "next observations that are shifted": shifted,
    "narrower next observations": changed(lambda x: x[:, :-1], "next_observations"),
    "a card of nothing": attributes(regenerated=True),
    "a card of text": attributes(regenerated=True, reference_d4rl="low", environment="Hopper-v5"),
    "a card of NaN": attributes(regenerated=True, reference_d4rl="[NaN, 1]", environment="Hopper-v5"),
}


def member(content: Callable[[bytes], bytes]) -> Mutate:
    """A mutation of the bytes of one array in an npz archive, whose checksum is right again."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        chosen = some(rng, fields) + ".npy"

        def after(path: Path) -> None:
            with zipfile.ZipFile(path) as archive:
                parts = {name: archive.read(name) for name in archive.namelist()}
            with zipfile.ZipFile(path, "w") as archive:
                for name, part in parts.items():
                    archive.writestr(name, content(part) if name == chosen else part)

        return after

    return mutate


def header(text: str) -> Mutate:
    """A mutation of what an array in an npz archive says of its type and shape."""

    def content(part: bytes) -> bytes:
        line = text.encode().ljust(117) + b"\n"
        return part[:8] + len(line).to_bytes(2, "little") + line + part[128:]

    return member(content)


def shape(text: str) -> Mutate:
    return header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {text}, }}")


ARCHIVES: dict[str, Mutate] = {
    "objects": changed(lambda x: np.array([{"a": 1}] * len(x), object)),
    "a member that is no array": member(lambda part: b"not an array"),
    "an empty member": member(lambda part: b""),
    "a header cut short": header("{'descr': '<f4', 'fortran_order'"),
    "a header of no tokens": header("{'descr': '<f4', ''' : ("),
    "a header of code": header("__import__('os').getcwd()"),
    "a header of brackets": header("[" * 110),
    "a type that is none": header("{'descr': 'what', 'fortran_order': False, 'shape': (48,), }"),
    "a shape of code": shape("(2**40, 3)"),
    "a shape beyond memory": shape("(1099511627776, 3)"),
    "a shape beyond integers": shape("(340282366920938463463374607431768211456,)"),
    "a negative shape": shape("(-48, 3)"),
    "rewards that nobody reads": lambda rng, fields: fields.update(rewards=np.ones(STEPS, np.float32)),
}


def metadata(**values: Any) -> Mutate:
    """A mutation of one of the entries, of which None stands for its absence."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        name = str(rng.choice(list(values)))
        if values[name] is None:
            del fields["metadata"][name]
        else:
            fields["metadata"][name] = values[name]
        return None

    return mutate


def whole_episode(change: Callable[[np.ndarray, str], Any]) -> Mutate:
    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        episode = some(rng, fields, "rewards").partition("/")[0]
        for place in [place for place in fields if place.startswith(f"{episode}/")]:
            array = change(fields[place], place)
            if array is None:
                del fields[place]
            else:
                fields[place] = array
        return None

    return mutate


RECORDED = (
    *("total_episodes", "total_steps", "data_format", "observation_space"),
    *("action_space", "dataset_id", "minari_version"),
)
MINARI: dict[str, Mutate] = {
    "a missing array": missing(*WITHIN),
    "an empty episode": whole_episode(lambda x, place: x[: place.endswith("/observations")]),
    "a missing episode": whole_episode(lambda x, place: None),
    "a shorter episode": whole_episode(lambda x, place: x[:-1]),
    "fewer episodes": metadata(total_episodes=EPISODES - 1),
    **{f"no {name}": metadata(**{name: None}) for name in RECORDED},
    **{f"a number as {name}": metadata(**{name: 7}) for name in RECORDED},
    **{f"text as {name}": metadata(**{name: "many"}) for name in RECORDED if name != "dataset_id"},
    "no metadata": lambda rng, fields: fields.update(metadata=[]),
    "another action space": metadata(action_space='{"type": "MultiBinary", "n": 3}'),
    "a wider action space": metadata(
        action_space='{"type": "Box", "dtype": "float32", "shape": [4], "low": [-1, -1, -1, -1], "high": [1, 1, 1, 1]}'
    ),
    "a space of nothing": metadata(
        observation_space='{"type": "Dict"}', action_space='{"type": "Box", "low": [0]}'
    ),
    "references that are none": metadata(ref_min_score="low", ref_max_score=float("nan")),
    "references the wrong way round": metadata(ref_min_score=2.0, ref_max_score=-1.0),
}


def line(change: Callable[[dict[str, Any]], Any]) -> Mutate:
    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        place = some(rng, fields)
        fields[place] = change(json.loads(json.dumps(fields[place])))
        return None

    return mutate


def turn(**values: Any) -> Mutate:
    return line(lambda row: row | {"turns": [*row["turns"], {"text": "5", **values}]})


def text(content: str) -> Mutate:
    return lambda rng, fields: lambda path: path.write_text(path.read_text() + content)


LINES: dict[str, Mutate] = {
    "no turns": line(lambda row: {}),
    "turns of numbers": line(lambda row: row | {"turns": [1, 2]}),
    "a list": line(lambda row: [row]),
    "another key": line(lambda row: row | {"reward": 1}),
    "a reward of text": turn(reward="1"),
    "a reward of NaN": turn(reward=float("nan")),
    "a reward beyond floats": turn(reward=10**400),
    "a weight below 0": line(lambda row: row | {"imitate": -1}),
    "a number without end": text("1" * 5000),
    "brackets without end": text("[" * 100_000),
    "half a line": text('{"turns": [{"te'),
    "another encoding": lambda rng, fields: (
        lambda path: path.write_bytes(path.read_bytes() + b'{"turns": "\xe4"}')
    ),
}


# Language models, and files of programs.


@functools.cache
def small_model() -> tuple[Any, Any]:
    """An architecture, and random parameters."""
    shape = Shape(width=16, layers=2, heads=4, kv_heads=2, head_size=8, inner=24)
    config, rng = Config(61, 64, shape, tied=False), np.random.default_rng(0)
    shapes = jax.eval_shape(model.make(config).init, jax.random.key(0))
    return config, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def model_folder() -> Fields:
    config, params = small_model()
    tokens = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(61)}, "unk_token": "w0"},
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [],
        **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")),
    }
    return {
        "config.json": huggingface.describe(config) | {"eos_token_id": [1, 2]},
        "generation_config.json": {"eos_token_id": 3},
        "tokenizer.json": tokens,
        "weights": weights.disassemble(config, weights.LLAMA, params),
        "header": lambda header: None,
    }


def write_model(path: Path, fields: Fields) -> None:
    path.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (path / name).write_text(json.dumps(fields[name]))
    file = path / "model.safetensors"
    huggingface.write_safetensors(file, fields["weights"])
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    fields["header"](header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


def these(**values: Any) -> Mutate:
    """A mutation of how a file or a folder is written."""
    return lambda rng, fields: fields.update(values)


def write_shards(path: Path, fields: Fields) -> None:
    """The same folder with its weights in two files, and the index of them."""
    write_model(path, fields)
    (path / "model.safetensors").unlink()
    names, index = sorted(fields["weights"]), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        index |= dict.fromkeys(part, f"{number}.safetensors")
        tensors = {name: fields["weights"][name] for name in {*part, *fields.get("more", ())}}
        huggingface.write_safetensors(path / f"{number}.safetensors", tensors)
    weight_map = fields.get("index", lambda index: index)(index)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


SHARDS: dict[str, Mutate] = {
    "a tensor in both": these(more=["model.norm.weight"]),
    "an index of one alone": these(index=lambda index: dict.fromkeys(index, "0.safetensors")),
    "an index of a third": these(index=lambda index: index | {"more": "2.safetensors"}),
    "an index that is a list": these(index=list),
    "an index of numbers": these(index=lambda index: dict.fromkeys(index, 5)),
}


def within(name: str, **values: Any) -> Mutate:
    """A mutation of what one of a folder's JSON files says."""
    return lambda rng, fields: fields[name].update(values)


def weight(number: float) -> Mutate:
    """A mutation of one number of one tensor."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        name = str(rng.choice(sorted(fields["weights"])))
        tensor = fields["weights"][name].copy()
        tensor.reshape(-1)[rng.integers(tensor.size)] = number
        fields["weights"][name] = tensor
        return None

    return mutate


def placed(change: Callable[[list[Any]], Any]) -> Mutate:
    """A mutation of what a safetensors file says of its tensors: ``change`` has their descriptions, in their order."""
    return lambda rng, fields: fields.update(
        header=lambda header: change([entry for name, entry in header.items() if name != "__metadata__"])
    )


def moved(index: int, by: int) -> Mutate:
    def change(entries: list[Any]) -> None:
        entries[index]["data_offsets"] = [at + by for at in entries[index]["data_offsets"]]

    return placed(change)


def in_weights(change: Callable[[bytes], bytes]) -> Mutate:
    def after(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return lambda rng, fields: after


def header_twice(content: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    text = content[8:end].rstrip()
    text = text[:-1] + b"," + text[1:]
    return len(text).to_bytes(8, "little") + text + content[end:]


MODELS: dict[str, Mutate] = {
    **{
        f"config: {name}={value}": within("config.json", **{name: value})
        for name, value in (
            *(
                ("rms_norm_eps", value)
                for value in (float("nan"), float("inf"), 0, -1e-5, "1e-5", None, True)
            ),
            *(("max_position_embeddings", value) for value in ({}, 0, -1, 2.5, "64", True, 10**30)),
            *(("hidden_size", value) for value in ("16", 0, 17, None, [16])),
            *(("num_hidden_layers", value) for value in (0, 1, 3, 2.5, 10**9, "2")),
            *(("num_attention_heads", value) for value in (0, 3, -4, None)),
            *(("num_key_value_heads", value) for value in (3, -1, [])),
            *(("head_dim", value) for value in (7, -8, 8.0)),
            *(("vocab_size", value) for value in (60, -1, 10**12)),
            *(("tie_word_embeddings", value) for value in ("no", 1, [])),
            *(
                ("rope_parameters", value)
                for value in ([], 5, {"rope_theta": float("nan")}, {"rope_type": []})
            ),
            *(
                ("rope_parameters", {"rope_type": "linear", "factor": value})
                for value in (0, -2.0, "4", None)
            ),
            *(
                ("rope_parameters", {"rope_type": "yarn", "factor": 4.0} | value)
                for value in ({"rope_theta": 1.0}, {"beta_slow": 40}, {"truncate": "no"})
            ),
            *(("model_type", value) for value in ([], None, "mamba")),
            *(("eos_token_id", value) for value in ("x", [-1], {}, 61, [1.5])),
        )
    },
    **{
        f"sampling: {value}": within("generation_config.json", eos_token_id=value)
        for value in ("x", 61, [None])
    },
    **{f"tokenizer: model={value}": within("tokenizer.json", model=value) for value in ({}, 5, None)},
    "tokenizer: no tokens": within(
        "tokenizer.json", model={"type": "WordLevel", "vocab": {}, "unk_token": "a"}
    ),
    "tokenizer: of a larger model": within(
        "tokenizer.json",
        model={"type": "WordLevel", "vocab": {f"w{n}": n for n in range(62)}, "unk_token": "w0"},
    ),
    **{f"a weight of {number}": weight(number) for number in (np.nan, np.inf, -np.inf)},
    "a tensor over the one before": moved(1, -4),
    "a tensor behind a hole": moved(-1, 4),
    "a tensor before the first": moved(0, -4),
    "a tensor within a number": placed(lambda entries: entries[0].update(data_offsets=[1, 5], shape=[1])),
    "a tensor from a half": moved(0, 0.5),
    "a negative shape": placed(lambda entries: entries[0].update(shape=[-1, -1])),
    "a shape of text": placed(lambda entries: entries[0].update(shape="ab")),
    "no shape": placed(lambda entries: entries[0].pop("shape")),
    "no type": placed(lambda entries: entries[0].pop("dtype")),
    "a type that is none": placed(lambda entries: entries[0].update(dtype=[])),
    "a tensor that is none": placed(lambda entries: entries[0].clear()),
    "two tensors in one place": placed(lambda entries: entries[1].update(entries[0])),
    "bytes behind the last": in_weights(lambda content: content + bytes(4)),
    "every tensor twice": in_weights(header_twice),
    "brackets as header": in_weights(lambda content: (50_000).to_bytes(8, "little") + b"[" * 50_000),
}


@functools.cache
def agent_parts() -> tuple[Any, Any]:
    """What an exported agent has beside its policy: the card, and the values."""
    config, _ = small_model()
    lm, head = model.make(config), heads.HeadSettings("scalar", 0.0, 1.0, 101)
    learner = ilql.make(ilql.Config(), lm, heads.make(*head))
    shapes = jax.eval_shape(learner.init, jax.random.key(0), None)
    like = exported._parts("ilql", shapes)
    values = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in checkpoint.named(like).items()}
    card = {
        "agent": "ilql",
        "config": dataclasses.asdict(ilql.Config()),
        "head": head._asdict(),
        "stop": "w1",
    }
    return card, values


def agent_folder() -> Fields:
    card, values = agent_parts()
    return model_folder() | {"card": json.loads(json.dumps(card)), "values": dict(values)}


def write_agent(path: Path, fields: Fields) -> None:
    write_model(path, fields)
    (path / exported.CARD).write_text(json.dumps(fields["card"]))
    huggingface.write_safetensors(path / exported.VALUES, fields["values"])


def value_tensor(change: Callable[[np.ndarray], np.ndarray]) -> Mutate:
    """A mutation of one tensor of the values."""

    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        name = str(rng.choice(sorted(fields["values"])))
        fields["values"][name] = change(fields["values"][name])
        return None

    return mutate


AGENTS: dict[str, Mutate] = {
    **{
        f"card: {name}={value}": within("card", **{name: value})
        for name, value in (
            ("agent", 5),
            ("agent", "iql"),
            ("config", None),
            ("config", {"more": 1}),
            ("config", {"discount": 2.0}),
            ("config", {"inner": -1}),
            ("head", {}),
            ("head", {"name": "none", "low": 0.0, "high": 1.0, "size": 2}),
            ("head", {"name": "hl_gauss", "low": 1.0, "high": 0.0, "size": 11}),
            ("head", {"name": "hl_gauss", "low": 0.0, "high": 1.0, "size": 11}),
            ("stop", 5),
        )
    },
    "a value that is none": value_tensor(lambda x: np.full_like(x, np.nan)),
    "values of another shape": value_tensor(lambda x: x[None]),
    "no values": these(values={}),
}


def gguf_file() -> Fields:
    config, params = small_model()
    shape = config.shape
    numbers = {
        "context_length": config.context,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": shape.epsilon,
    }
    return {
        "metadata": {
            "general.architecture": "qwen2",
            **{f"qwen2.{name}": number for name, number in numbers.items()},
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [f"w{n}" for n in range(61)],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 1,
        },
        "tensors": weights.disassemble(config, weights.GGUF, params),
        "offset": 0,  # of the first tensor
        "step": 0,  # by which every next one lies too far
    }


def write_gguf(path: Path, fields: Fields) -> None:
    """Numbers and texts of the types that llama.cpp gives them, tensors in float32."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def field(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        return struct.pack("<Ii", 5, value)

    metadata, tensors = fields["metadata"], fields["tensors"]
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    content += b"".join(text(name) + field(value) for name, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        shape = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *tensor.shape[::-1])
        data += bytes(max(fields["step"], 0) if data else 0)
        start = max(len(data) + min(fields["step"], 0), 0) + fields["offset"]
        content += text(name) + shape + struct.pack("<IQ", 0, start)
        data += tensor.tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(content + bytes(-len(content) % 32) + data + bytes(fields["offset"]))


def of_gguf(**values: Any) -> Mutate:
    """A mutation of the metadata, with ``_`` for the dots."""
    return lambda rng, fields: fields["metadata"].update(
        {name.replace("__", "."): value for name, value in values.items()}
    )


def gguf_number(number: float) -> Mutate:
    def mutate(rng: np.random.Generator, fields: Fields) -> After:
        name = str(rng.choice(sorted(fields["tensors"])))
        fields["tensors"][name] = np.full_like(fields["tensors"][name], number)
        return None

    return mutate


GGUFS: dict[str, Mutate] = {
    **{f"alignment {value}": of_gguf(general__alignment=value) for value in (0, -32, 3, 33, "32")},
    **{
        f"{name}={value}": of_gguf(**{f"qwen2__{name}": value})
        for name, value in (
            ("context_length", -1),
            ("context_length", "64"),
            ("embedding_length", 0),
            ("block_count", 3),
            ("block_count", -1),
            ("attention__head_count", 0),
            ("attention__head_count", 3),
            ("attention__key_length", 7),
            ("attention__layer_norm_rms_epsilon", float("nan")),
            ("attention__layer_norm_rms_epsilon", 0.0),
            ("rope__freq_base", float("inf")),
        )
    },
    "tokens of another model": of_gguf(tokenizer__ggml__tokens=["a", "b"]),
    "tokens that are a number": of_gguf(tokenizer__ggml__tokens=3),
    "a merge of nothing": of_gguf(tokenizer__ggml__merges=["zz"]),
    "an end that is no token": of_gguf(tokenizer__ggml__eos_token_id=61),
    **{f"weights of {number}": gguf_number(number) for number in (np.nan, np.inf)},
    "tensors from a half on": these(offset=4),
    "tensors that share bytes": these(step=-32),
    "a hole between tensors": these(step=32),
    "more than its tensors": lambda rng, fields: lambda path: path.write_bytes(path.read_bytes() + bytes(32)),
}


SUM = "print(sum(map(int, input().split())))"
ROWS: dict[str, Fields] = {
    "chats": {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "reward": 1.0,
    },
    "candidates": {"prompt": "b", "candidates": ["c", "d"]},
    "samples": {"task_id": "a", "prompt": "b", "samples": ["c", "d"]},
    "prompts": {"prompt": "2+2="},
    "problems": {
        "task_id": 1,
        "text": "Add.",
        "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3"],
    },
    "humaneval": {
        "task_id": "a",
        "prompt": "def add(a, b):\n    'Add.'\n",
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    },
    "apps": {
        "problem_id": 1,
        "question": "Add.",
        "solutions": json.dumps([SUM]),
        "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]}),
        "starter_code": "",
    },
    "contests": {
        "name": "a",
        "description": "Add.",
        "public_tests": {"input": ["1 2"], "output": ["3"]},
        "solutions": {"language": [3], "solution": [SUM]},
    },
}


def rows_layout(row: str, read: Callable[[str], Any], keys: Sequence[str], **more: Any) -> Layout:
    """A file of JSON lines like one of `ROWS`, in which every one of ``keys`` is needed and none is a number."""
    wrong = {
        f"{key}: {value}": line(lambda row, k=key, v=value: row | {k: v})
        for key in keys
        for value in (5, None, [5])
    }
    wrong |= {
        f"no {key}": line(lambda row, k=key: {name: row[name] for name in row if name != k}) for key in keys
    }
    shared = ("a list", "half a line", "another encoding", "brackets without end", "a number without end")
    wrong |= {name: LINES[name] for name in shared}

    def fields() -> Fields:
        return {f"line {i}": ROWS[row] for i in range(3)}

    return Layout(".jsonl", fields, write_lines, read, wrong, {"nothing": lambda rng, fields: None}, **more)


def layouts() -> dict[str, Layout]:
    """All, continuous and discrete; Minari's where its package is installed. What is wrong for both comes once."""
    result: dict[str, Layout] = {}
    for discrete in (False, True):
        word = "discrete" if discrete else "continuous"
        result[f"hdf5, {word}"] = Layout(
            ".hdf5",
            functools.partial(log, discrete),
            write_hdf5,
            data.load,
            DISCRETE if discrete else WRONG | CONTINUOUS | REQUIRED | FLAT | NODES | FILES,
            {
                **HARMLESS,
                "another array": extra,
                "attributes like JSON": attributes(note="[draft] my log", more="{", when=h5py.Empty("f4")),
                "no next observations": missing("next_observations"),
            },
        )
        result[f"npz, {word}"] = Layout(
            ".npz",
            functools.partial(trajectories, discrete),
            write_npz,
            data.load,
            DISCRETE if discrete else WRONG | CONTINUOUS | REQUIRED | FLAT | ARCHIVES,
            {**HARMLESS, "another array": extra},
        )
        result[f"minari, {word}"] = Layout(
            "",
            functools.partial(episodes, discrete),
            write_minari,
            lambda name: data.load(f"minari:{name}"),
            DISCRETE if discrete else WRONG | CONTINUOUS | NODES | MINARI,
            {**HARMLESS, "another array": extra},
        )
    result["dialogues"] = Layout(
        ".jsonl",
        conversations,
        write_lines,
        dialogues.read,
        LINES,
        {"nothing": lambda rng, fields: None},
    )
    nothing: dict[str, Mutate] = {"nothing": lambda rng, fields: None}
    result |= {
        "chats": rows_layout("chats", dialogues.read, ("messages",)),
        "candidates": rows_layout("candidates", dialogues.read_candidates, ("prompt", "candidates")),
        "samples": rows_layout("samples", problems.read_samples, ("prompt", "samples"), refusal=ValueError),
        "samples to learn from": rows_layout("samples", dialogues.read, ("prompt", "samples")),
        "prompts": rows_layout("prompts", dialogues.read_prompts, ("prompt",)),
        "problems": rows_layout("problems", problems.read_mbpp, ("code", "test_list"), refusal=ValueError),
        "humaneval": rows_layout(
            "humaneval",
            problems.read_humaneval,
            ("prompt", "entry_point", "test"),
            refusal=ValueError,
        ),
        "apps": rows_layout("apps", problems.read_apps, ("question", "input_output"), refusal=ValueError),
        "contests": rows_layout(
            "contests", problems.read_code_contests, ("description", "public_tests"), refusal=ValueError
        ),
        "agent": Layout(
            "", agent_folder, write_agent, exported.load, AGENTS, nothing, (WeightsError, FileNotFoundError)
        ),
        "shards": Layout(
            "",
            model_folder,
            write_shards,
            pretrained.load,
            SHARDS,
            nothing,
            (WeightsError, FileNotFoundError),
        ),
        "model": Layout(
            "", model_folder, write_model, pretrained.load, MODELS, nothing, (WeightsError, FileNotFoundError)
        ),
        "gguf": Layout(".gguf", gguf_file, write_gguf, pretrained.load, GGUFS, nothing, WeightsError),
    }
    absent = [name for name in ("minari", "tokenizers") if importlib.util.find_spec(name) is None]
    of = {"minari": ("minari",), "tokenizers": ("model", "gguf", "shards", "agent")}
    return {
        name: layout
        for name, layout in result.items()
        if not any(name.startswith(of[package]) for package in absent)
    }


# Mutations of bytes.


def damage(rng: np.random.Generator, content: bytes) -> bytes:
    """A file after one accident: cut, bits flipped, or a stretch zeroed, overwritten, lost, doubled or moved."""
    whole = bytearray(content)
    start = int(rng.integers(len(whole)))
    stretch = slice(start, start + int(2 ** rng.uniform(0, 10)))
    accident = rng.integers(7)
    if accident == 0:
        del whole[start:]
    elif accident == 1:
        for _ in range(int(2 ** rng.uniform(0, 5))):
            whole[rng.integers(len(whole))] ^= 1 << rng.integers(8)
    elif accident == 2:
        whole[stretch] = bytes(len(whole[stretch]))
    elif accident == 3:
        whole[stretch] = rng.bytes(len(whole[stretch]))
    elif accident == 4:
        del whole[stretch]
    elif accident == 5:
        whole[start:start] = whole[stretch]
    else:
        part = whole[stretch]
        del whole[stretch]
        place = int(rng.integers(len(whole) + 1))
        whole[place:place] = part
    return bytes(whole)


# Trials.


class Hang(BaseException):
    """No `Exception`, or a reader's guard would explain it."""


def alarm(*_: Any) -> None:
    raise Hang


def trial(all_layouts: dict[str, Layout], index: int, seed: int, folder: Path, show: bool = False) -> Outcome:
    """The outcome of mutation ``index``: the first are all that are structured, once each."""
    rng = np.random.default_rng([seed, index])
    structured = [
        (name, mutation)
        for name, layout in all_layouts.items()
        for mutation in layout.wrong | layout.harmless
    ]
    if index < len(structured):
        name, mutation = structured[index]
    else:
        name = str(rng.choice(list(all_layouts)))
        choices = list(all_layouts[name].wrong | all_layouts[name].harmless)
        mutation = str(rng.choice(choices)) if rng.uniform() < 0.3 else "bytes"
    layout = all_layouts[name]
    path = folder / f"log of {name}{layout.ending}"
    fields = layout.fields()
    change = (layout.wrong | layout.harmless).get(mutation)
    after = change(rng, fields) if change else None
    layout.write(path, fields)
    if after:
        after(path)
    if mutation == "bytes":
        file = path if path.is_file() else rng.choice(sorted(path.iterdir()))
        file.write_bytes(damage(rng, file.read_bytes()))
    kind, message = reading(layout, path, show)
    if kind == "refused" and path.name not in message:
        kind = "unexplained"
    if kind == "read" and mutation in layout.wrong:
        kind = "accepted"
    if kind == "refused" and mutation in layout.harmless:
        kind = "rejected"
    return Outcome(kind, name, mutation, message)


def reading(layout: Layout, path: Path, show: bool) -> tuple[str, str]:
    """What the reader does with the file, and what it says."""
    previous = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = layout.read(str(path))
    except layout.refusal as error:
        if show:
            traceback.print_exc()
        return "refused", str(error)
    except Hang:
        return "hang", f"over {LIMIT} s"
    except Exception as error:
        if show:
            traceback.print_exc()
        return "unexplained", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    if messages:
        return "refused", f"{path.name}: {messages[0]}"
    return ("read", "") if not isinstance(result, Loaded) or sound(result) else ("accepted", "not sound")


def sound(loaded: Loaded) -> bool:
    """Whether every law of a `Dataset` holds."""
    steps, last, _ = loaded.dataset
    rows = len(last)
    numbers = [*nest.leaves(steps.observation), *nest.leaves(steps.next_observation), steps.reward]
    size = loaded.spec.action_size
    in_box = (
        (steps.action >= 0) & (steps.action < size) if loaded.spec.discrete else np.abs(steps.action) <= 1
    )
    return bool(
        rows
        and all(len(array) == rows and np.isfinite(array).all() for array in numbers)
        and np.isin(steps.discount, (0, 1)).all()
        and last.dtype == bool
        and last[-1]
        and in_box.all()
        and 0 < size <= MAX_ACTIONS
    )


def run(mutations: int, seed: int, folder: Path, first: int = 0) -> Iterator[Outcome]:
    """Their outcomes in turn, in this process; in ``folder`` a file replaces the last of its kind."""
    all_layouts = layouts()
    for index in range(first, mutations):
        yield trial(all_layouts, index, seed, folder)


def serve(connection: Any, *arguments: Any) -> None:
    """`run` in a process of its own, which a crash or a hang inside a library ends alone."""
    with contextlib.suppress(OSError):  # where the system does not say what a process has, it has no limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send(None)  # it has started
    for outcome in run(*arguments):
        connection.send(outcome)


def watched(mutations: int, seed: int) -> Iterator[Outcome]:
    """The outcomes of `run`, also of what ends its process or never returns to Python."""
    context, index = multiprocessing.get_context("spawn"), 0
    with tempfile.TemporaryDirectory() as folder:
        while index < mutations:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(sender, mutations, seed, Path(folder), index))
            process.start()
            sender.close()
            receiver.recv()
            lost = None
            while lost is None and index < mutations:
                try:
                    answers = receiver.poll(3 * LIMIT)
                    outcome = receiver.recv() if answers else Outcome("hang", "", "", "no answer")
                except EOFError:
                    answers, outcome = False, Outcome("unexplained", "", "", "the process crashed")
                if not answers:
                    outcome = lost = outcome._replace(mutation=f"number {index}")
                yield outcome
                index += 1
            if lost is not None:
                process.kill()
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this one, and show its traceback")
    chosen = parser.parse_args()
    if chosen.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(trial(layouts(), chosen.only, chosen.seed, Path(folder), show=True))
        return 0
    counts: Counter[tuple[str, str]] = Counter()
    faults = []
    for index, outcome in enumerate(tqdm(watched(chosen.mutations, chosen.seed), total=chosen.mutations)):
        counts[outcome.layout, outcome.kind] += 1
        if outcome.kind in FAULTS:
            faults.append((index, outcome))
    for (layout, kind), count in sorted(counts.items()):
        print(f"{layout:<22} {kind:<12} {count:>6}")
    for kind in FAULTS:
        print(f"{kind}: {sum(outcome.kind == kind for _, outcome in faults)} of {chosen.mutations}")
    for index, outcome in faults[:20]:
        print(
            f"--only={index}: {outcome.kind}: {outcome.layout}, {outcome.mutation}: {outcome.message[:300]}"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
