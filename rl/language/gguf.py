"""GGUF files, as llama.cpp uses them: metadata, tensors (dequantised) and the tokenizer, in one file.

The package gguf turns blocks of quantised numbers into floats, of every kind that it knows. The header is read here: a
damaged one lets that package's own reader run for ever, or read tensors from wrong places.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl import extras
from rl.language import weights
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.networks.rotary import Rope
from rl.networks.transformer import Shape
from rl.types import Params


class File(NamedTuple):
    """What a GGUF file holds."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]  # as in the file: [out, in], float32


def load(path: str | os.PathLike[str]) -> tuple[Config, Params, dict[str, Any]]:
    """The architecture, the parameters (NumPy, float32) and the metadata of the model in the file.

    Raises:
      FileNotFoundError: no such file.
      WeightsError: it is cut short or no GGUF file, its architecture or quantisation is not supported, or tensors
        are missing or left over.
    """
    metadata, tensors = read(path)
    config = weights.check_config(lambda: _config(metadata, tensors, path), path)
    if metadata["general.architecture"] in _NEIGHBOURS:
        rotated = {"attn_q": config.shape.heads, "attn_k": config.shape.kv_heads}
        for name in list(tensors):
            of_layer = re.fullmatch(r"blk\.\d+\.(attn_[qk])\.(weight|bias)", name)
            heads = rotated[of_layer[1]] if of_layer else 0
            if heads and len(tensors[name]) % (2 * heads) == 0:  # what has another shape is refused below
                tensors[name] = _halves(tensors[name], heads)
    return config, weights.assemble(config, weights.GGUF, tensors, str(path)), metadata


def read(path: str | os.PathLike[str]) -> File:
    """Every field and every tensor of the file.

    Raises:
      FileNotFoundError: no such file.
      ImportError: the package gguf is missing.
      WeightsError: it is cut short, no GGUF file, or of a quantisation that the package gguf does not know.
    """
    package, path = extras.module("gguf", "lm"), Path(path)
    content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    cursor = _Cursor(content, path)
    if bytes(cursor.take(4)) != b"GGUF":
        raise WeightsError(f"{path} is no GGUF file: its first bytes are not 'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise WeightsError(f"{path}: GGUF version {version} is not supported: convert it to version 3")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(field_count):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.number("I"))
    described = []
    for _ in range(tensor_count):
        name = cursor.text()
        shape = [cursor.number("Q") for _ in range(cursor.number("I"))][::-1]
        described.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise WeightsError(
            f"{path}: general.alignment is {alignment!r}, not a power of 2 from 8 on: a damaged file"
        )
    start = -(-cursor.at // alignment) * alignment
    tensors, places = {}, []
    for name, shape, kind, offset in described:
        if name in tensors:
            raise WeightsError(f"{path}: tensor {name} is there twice: the file is damaged")
        try:
            kind = package.GGMLQuantizationType(kind)
            block, width = package.GGML_QUANT_SIZES[kind]  # numbers of a block, and its bytes
        except (KeyError, ValueError) as error:
            raise WeightsError(
                f"{path}: tensor {name} has GGUF type {kind}, which the package gguf does not know: get its newest "
                "version, or convert the file to F16"
            ) from error
        if offset % alignment or 0 in (shape or [0]) or shape[-1] % block:
            raise WeightsError(
                f"{path}: tensor {name} of shape {shape} cannot lie at byte {offset} as {kind.name}: a damaged file"
            )
        rows = [*shape[:-1], shape[-1] // block * width]
        size = math.prod(rows)
        places.append((offset, offset + size, name))
        raw = cursor.slice(start + offset, size, f"tensor {name}").reshape(rows)
        try:
            tensors[name] = package.dequantize(raw, kind)
        except NotImplementedError as error:  # integers
            raise WeightsError(f"{path}: tensor {name} is of {kind.name}, which no weights are") from error
    _check_places(path, sorted(places), len(content) - start, alignment)
    return File(metadata, tensors)


def _check_places(path: Path, places: Sequence[tuple[int, int, str]], size: int, alignment: int) -> None:
    """Refuses tensors (first byte, end, name), in their order, that share bytes of ``size``, or leave some of them."""
    end, before = 0, ""
    for first, last, name in places:
        if first < end:
            raise WeightsError(f"{path}: tensors {before} and {name} share bytes: the file is damaged")
        if first >= end + alignment:
            raise WeightsError(
                f"{path}: {first - end} bytes before tensor {name} are no tensor's: a damaged file"
            )
        end, before = last, name
    if size >= end + alignment:
        raise WeightsError(f"{path}: {size - end} bytes at its end are no tensor's: the file is damaged")


def ends(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: of all texts, and of a turn."""
    names = (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom"))
    tokens = dict.fromkeys(metadata[name] for name in names if name in metadata)
    return tuple(token for token in tokens if type(token) is int)


def roles(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of a role, by transformers' name of it."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    tokens = {
        f"{name}_token": metadata.get(f"tokenizer.ggml.{role}_token_id") for role, name in names.items()
    }
    return {name: token for name, token in tokens.items() if type(token) is int}


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """How a model wants to be asked, as a Jinja template."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


# ---- reading -----------------------------------------------------------------------------------------------------

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Cursor:
    """Reads little-endian values one after another, and says so where the file ends too early."""

    def __init__(self, content: np.ndarray, path: Path) -> None:
        self.content, self.path, self.at = content, path, 0

    def slice(self, first: int, size: int, what: str) -> np.ndarray:
        if first + size > len(self.content):
            raise WeightsError(
                f"{self.path} is cut short: {what} would end at byte {first + size} of {len(self.content)}; "
                "download it again"
            )
        return self.content[first : first + size]

    def take(self, size: int) -> np.ndarray:
        taken = self.slice(self.at, size, "its header")
        self.at += size
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, bytes(self.take(struct.calcsize("<" + code))))[0]

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in _NUMBERS:
                code = np.dtype("<" + _NUMBERS[kind])
                return self.take(count * code.itemsize).copy().view(code).tolist()
            return [self.value(kind) for _ in range(count)]
        if kind not in _NUMBERS:
            raise WeightsError(f"{self.path}: a field has the unknown type {kind}: the file is damaged")
        number = self.number(_NUMBERS[kind])
        # The shortest number that float32 stores so: 1e-05 and not 9.999999747378752e-06.
        return float(str(np.float32(number))) if _NUMBERS[kind] == "f" else number


# ---- the architecture --------------------------------------------------------------------------------------------

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
_NEIGHBOURS = ("llama", "smollm3")  # whose files rotate neighbours
_NOPE_INTERVAL = 4  # of SmolLM3's layers, which no field says


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], path: Any) -> Config:
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise WeightsError(f"{path}: architecture {kind!r} is not supported in GGUF: use one of {known}")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{name}", default)
        if value is None:
            raise WeightsError(f"{path} does not say {kind}.{name}: the file is damaged")
        return value

    if "rope_freqs.weight" in tensors:
        raise WeightsError(f"{path}: rotary positions stretched as Llama 3.1's: use its safetensors folder")
    width, heads = field("embedding_length"), field("attention.head_count")
    rope, size = _rope(field, path), field("attention.key_length", width // heads)
    if field("rope.dimension_count", size) != size:
        raise WeightsError(f"{path}: heads of which rotary positions turn only a part are not supported")
    return Config(
        vocabulary=tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
        context=weights.stretched_context(field("context_length"), rope),
        tied="output.weight" not in tensors,
        shape=Shape(
            width=width,
            layers=field("block_count"),
            heads=heads,
            kv_heads=field("attention.head_count_kv", heads),
            head_size=size,
            inner=field("feed_forward_length"),
            rope=rope,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            qk_norm=kind == "qwen3",
            epsilon=field("attention.layer_norm_rms_epsilon"),
            nope_layers=tuple(range(_NOPE_INTERVAL - 1, field("block_count"), _NOPE_INTERVAL))
            if kind == "smollm3"
            else (),
        ),
    )


def _rope(field: Callable[..., Any], path: Any) -> Rope:
    """As llama.cpp reads it: a factor without a type is linear, and once had another name."""
    base, kind = field("rope.freq_base", 10_000.0), field("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise WeightsError(f"{path}: rotary positions stretched as {kind!r} says are not supported in GGUF")
    factor = 1.0 if kind == "none" else field("rope.scaling.factor", field("rope.scale_linear", 1.0))
    if factor == 1.0:
        return Rope(base)
    if kind == "linear":
        return Rope(base, factor, kind=kind)
    low, high = field("rope.scaling.yarn_beta_slow", 1.0), field("rope.scaling.yarn_beta_fast", 32.0)
    gain = field("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor))
    original = field("rope.scaling.original_context_length", field("context_length"))
    return Rope(base, factor, low, high, original, kind, gain=gain)


def _halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * size, ...] from llama.cpp's order, which rotates neighbours, to ours, which rotates halves."""
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
