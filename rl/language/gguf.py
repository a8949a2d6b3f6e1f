"""GGUF files, as llama.cpp uses them: metadata, tensors (dequantised) and the tokenizer, in one file.

Read with NumPy alone. Of the quantisations those are here that models are mostly published in; for others, convert the
file to F16 or Q8_0.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
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
    tensors, places = {}, []
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
        size = count // form.block * form.bytes
        places.append((offset, offset + size, name))
        raw = cursor.slice(start + offset, size, f"tensor {name}")
        tensors[name] = form.decode(raw.reshape(-1, form.bytes)).reshape(shape)
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


# ---- quantisations: blocks of bytes [N, bytes] -> float32 [N, block] ---------------------------------------------


class _Format(NamedTuple):
    name: str
    block: int  # numbers in a block
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _fields(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The numbers [N, 8 / bits * bytes] of so many bits in ``packed`` [N, bytes].

    Of each ``run`` bytes come the lowest bits of all, then the next ones of all, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _grouped(numbers: np.ndarray, scale: np.ndarray, least: np.ndarray | float = 0.0) -> np.ndarray:
    """``scale * numbers - least`` of [N, 256] numbers, of whose groups each has a scale [N, groups] and a minimum."""
    groups = numbers.reshape(*scale.shape, -1).astype(np.float32)
    least = least[..., None] if isinstance(least, np.ndarray) else least
    return (scale[..., None] * groups - least).reshape(len(numbers), -1)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4, 16).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4, 16) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = blocks[:, :16] & 15, blocks[:, :16] >> 4
    numbers = _fields(blocks[:, 16:80], 2, 32)
    return _grouped(numbers, _half(blocks, 80) * scale, _half(blocks, 82) * least)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    high, low = _fields(blocks[:, :32], 1, 32), _fields(blocks[:, 32:96], 2, 32)
    scale = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    numbers = (low | high << 2).astype(np.int8) - 4
    return _grouped(numbers, _half(blocks, 108) * (scale.astype(np.float32) - 32))


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight numbers of 6 bits each, from 12 bytes: the last four's lower bits stand apart, and their higher ones above
    the first four."""
    scale, least, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([scale & 63, last & 15 | scale >> 6 << 4], 1)
    return scale, np.concatenate([least & 63, last >> 4 | least >> 6 << 4], 1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = _scales_and_minima(blocks[:, 4:16])
    numbers = _fields(blocks[:, 16:], 4, 32)
    return _grouped(numbers, _half(blocks, 0) * scale, _half(blocks, 2) * least)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = _scales_and_minima(blocks[:, 4:16])
    numbers = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _grouped(numbers, _half(blocks, 0) * scale, _half(blocks, 2) * least)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    numbers = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return _grouped(numbers.astype(np.int8) - 32, _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _plain(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


_FORMATS = {
    0: _Format("F32", 1, 4, _plain(np.float32)),
    1: _Format("F16", 1, 2, _plain(np.float16)),
    2: _Format("Q4_0", 32, 18, _q4_0),
    3: _Format("Q4_1", 32, 20, _q4_1),
    8: _Format("Q8_0", 32, 34, _q8_0),
    10: _Format("Q2_K", 256, 84, _q2_k),
    11: _Format("Q3_K", 256, 110, _q3_k),
    12: _Format("Q4_K", 256, 144, _q4_k),
    13: _Format("Q5_K", 256, 176, _q5_k),
    14: _Format("Q6_K", 256, 210, _q6_k),
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
            rope=_rope(field, path),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            qk_norm=kind == "qwen3",
            epsilon=field("attention.layer_norm_rms_epsilon"),
            nope_layers=tuple(range(_NOPE_INTERVAL - 1, field("block_count"), _NOPE_INTERVAL))
            if kind == "smollm3"
            else (),
        ),
    )


def _rope(field: Callable[..., Any], path: Any) -> Rope:
    base, kind = field("rope.freq_base", 10_000.0), field("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise WeightsError(f"{path}: rotary positions stretched as {kind!r} says are not supported in GGUF")
    factor = 1.0 if kind == "none" else field("rope.scaling.factor")
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
