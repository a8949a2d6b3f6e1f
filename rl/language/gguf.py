"""GGUF files, as llama.cpp uses them: metadata, tensors (dequantised) and the tokenizer, in one file.

Read with NumPy alone. Of the quantisations those are here that small models are published in; for others,
convert the file to F16 or Q8_0.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rl.language import weights
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.networks.transformer import Rope, Shape
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
    if metadata["general.architecture"] == "llama":
        for name in list(tensors):
            heads = {"attn_q": config.shape.heads, "attn_k": config.shape.kv_heads}.get(name.split(".")[-2])
            if heads:
                tensors[name] = _halves(tensors[name], heads)
    return config, weights.assemble(config, weights.GGUF, tensors, str(path)), metadata


def read(path: str | os.PathLike[str]) -> File:
    """Every field and every tensor of the file.

    Raises:
      FileNotFoundError: no such file.
      WeightsError: it is cut short, no GGUF file, or of a quantisation that is not supported.
    """
    path = Path(path)
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
    tensors = {}
    for name, shape, kind, offset in described:
        if kind not in _FORMATS:
            known = ", ".join(form.name for form in _FORMATS.values())
            raise WeightsError(
                f"{path}: tensor {name} has GGUF type {kind}; supported are {known}: convert it"
            )
        form, count = _FORMATS[kind], math.prod(shape)
        if name in tensors:
            raise WeightsError(f"{path}: tensor {name} is there twice: the file is damaged")
        if offset % alignment or shape[-1:] == [] or shape[-1] % form.block:
            raise WeightsError(
                f"{path}: tensor {name} of shape {shape} cannot lie at byte {offset} as {form.name}: a damaged file"
            )
        raw = cursor.slice(start + offset, count // form.block * form.bytes, f"tensor {name}")
        tensors[name] = form.decode(raw.reshape(-1, form.bytes)).reshape(shape)
    return File(metadata, tensors)


def ends(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: of all texts, and of a turn."""
    names = (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom"))
    found = dict.fromkeys(metadata[name] for name in names if name in metadata)
    return tuple(token for token in found if type(token) is int)


def roles(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of a role, by transformers' name of it."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {f"{name}_token": metadata.get(f"tokenizer.ggml.{own}_token_id") for own, name in names.items()}
    return {name: token for name, token in found.items() if type(token) is int}


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """How a model wants to be asked, as a Jinja template."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


# ---- quantisations: blocks of bytes [N, bytes] -> float32 [N, block] ---------------------------------------------


class _Format(NamedTuple):
    name: str
    block: int  # numbers in a block
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _plain(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


_FORMATS = {
    0: _Format("F32", 1, 4, _plain(np.float32)),
    1: _Format("F16", 1, 2, _plain(np.float16)),
    2: _Format("Q4_0", 32, 18, _q4_0),
    3: _Format("Q4_1", 32, 20, _q4_1),
    8: _Format("Q8_0", 32, 34, _q8_0),
    30: _Format("BF16", 1, 2, _plain(jnp.bfloat16)),
}


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

_ARCHITECTURES = ("llama", "qwen2", "qwen3")


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

    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise WeightsError(f"{path}: stretched rotary positions are not supported in GGUF: use safetensors")
    width, heads = field("embedding_length"), field("attention.head_count")
    return Config(
        vocabulary=tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
        context=field("context_length"),
        tied="output.weight" not in tensors,
        shape=Shape(
            width=width,
            layers=field("block_count"),
            heads=heads,
            kv_heads=field("attention.head_count_kv", heads),
            head_size=field("attention.key_length", width // heads),
            inner=field("feed_forward_length"),
            rope=Rope(field("rope.freq_base", 10_000.0)),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            qk_norm=kind == "qwen3",
            epsilon=field("attention.layer_norm_rms_epsilon"),
        ),
    )


def _halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * size, ...] from llama.cpp's order, which rotates neighbours, to ours, which rotates halves."""
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
