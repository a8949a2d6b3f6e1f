"""Between a model's parameters and the named tensors of weight files: two dialects, one table per family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rl import checkpoint
from rl.language import model
from rl.language.model import Config
from rl.networks.rotary import Rope
from rl.types import Params

_LARGEST, MOST_LAYERS = 2**31 - 1, 10_000
_LISTED = 8  # names in an error before the rest are counted


class WeightsError(ValueError):
    """Weights that cannot be used; the message names the file or the tensors, and the remedy."""


def check_config(make: Callable[[], Config], source: Any) -> Config:
    """The architecture that ``make`` reads from the file ``source``.

    Raises:
      WeightsError: a size that is no whole number or out of range, a number that is not finite, or sizes that do not
        go together; it names the file and the field.
    """
    try:
        config = make()
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(
            f"{source} describes no model that there can be ({error}): download it again"
        ) from error
    shape, rope = config.shape, config.shape.rope
    sizes = {"vocabulary": config.vocabulary, "context": config.context}
    sizes |= {
        name: getattr(shape, name) for name in ("width", "layers", "heads", "kv_heads", "head_size", "inner")
    }
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= (MOST_LAYERS if name == "layers" else _LARGEST):
            raise WeightsError(f"{source}: its {name} is {size!r}, which cannot be: download it again")
    numbers = {"epsilon of its norms": shape.epsilon, "scale of its embeddings": config.embedding_scale}
    if shape.query_size is not None:
        numbers["query_pre_attn_scalar"] = shape.query_size
    if rope:
        names = ("base", "factor", "low", "high", "original", "gain")
        numbers |= {f"{name} of its rotary positions": getattr(rope, name) for name in names}
    caps = {
        "cap of its scores": shape.score_cap,
        "cap of its logits": config.logit_cap,
        "window": shape.window,
    }
    for name, number in (numbers | caps).items():
        least = 0 if name in caps else math.ulp(0.0)
        if type(number) not in (int, float) or not least <= number < math.inf:
            raise WeightsError(f"{source}: the {name} is {number!r}, which cannot be: download it again")
    if rope and rope.factor != 1 and not (rope.low < rope.high and rope.base > 1):
        raise WeightsError(
            f"{source}: rotary positions with base {rope.base} cannot be stretched between {rope.low} and {rope.high} "
            "turns: download it again"
        )
    if type(shape.window) is not int or shape.window > _LARGEST:
        raise WeightsError(f"{source}: the window is {shape.window!r}, which cannot be: download it again")
    switches = {"tied": config.tied} | ({"truncate": rope.whole} if rope else {})
    switches |= {name: getattr(shape, name) for name in ("qkv_bias", "out_bias", "inner_bias", "qk_norm")}
    for name, switch in switches.items():
        if type(switch) is not bool:
            raise WeightsError(f"{source}: {name} is {switch!r}, and not true or false: download it again")
    return config


def stretched_context(context: int, rope: Rope) -> int:
    """The most tokens that a model can read whose file says ``context``.

    Where YaRN stretches positions, files may still say the length before, as Qwen2.5's model cards ask for.
    """
    return max(context, round(rope.factor * rope.original)) if rope.kind == "yarn" else context


class Entry(NamedTuple):
    """Where one parameter lies in a file."""

    path: str  # in the parameters; under "blocks/" once for every layer
    name: str  # in the file, with {} for the layer
    turned: bool = False  # [out, in] in the file, [in, out] here
    part: int | None = None  # which third of the tensor (GPT-2 keeps query, key and value in one)
    less: float = 0.0  # what the file's numbers lack (Gemma's norms are stored less 1)


def _llama(rows: Iterable[tuple[str, str, str]], column: int) -> tuple[Entry, ...]:
    return tuple(Entry(row[0], row[column], row[0].endswith("kernel")) for row in rows)


def _gemma(entries: Iterable[Entry], names: Mapping[str, str]) -> tuple[Entry, ...]:
    """The entries with Gemma's norms, of which ``names`` has those that are called otherwise."""
    by_path = {entry.path: entry for entry in entries}
    by_path |= {path: Entry(path, f"model.layers.{{}}.{name}.weight") for path, name in names.items()}
    return tuple(
        entry._replace(less=1.0) if entry.path.endswith("scale") else entry for entry in by_path.values()
    )


# parameter, Hugging Face, GGUF
_LLAMA = [
    ("embedding", "model.embed_tokens.weight", "token_embd.weight"),
    ("norm/scale", "model.norm.weight", "output_norm.weight"),
    ("unembedding", "lm_head.weight", "output.weight"),
]
for _parameter, _face, _gguf in (
    ("attention_norm/scale", "input_layernorm.weight", "attn_norm.weight"),
    ("query_norm/scale", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("key_norm/scale", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("inner_norm/scale", "post_attention_layernorm.weight", "ffn_norm.weight"),
):
    _LLAMA.append((f"blocks/{_parameter}", f"model.layers.{{}}.{_face}", f"blk.{{}}.{_gguf}"))
for _parameter, _face, _gguf in (
    ("query", "self_attn.q_proj", "attn_q"),
    ("key", "self_attn.k_proj", "attn_k"),
    ("value", "self_attn.v_proj", "attn_v"),
    ("out", "self_attn.o_proj", "attn_output"),
    ("gate", "mlp.gate_proj", "ffn_gate"),
    ("up", "mlp.up_proj", "ffn_up"),
    ("down", "mlp.down_proj", "ffn_down"),
):
    for _leaf, _suffix in (("kernel", "weight"), ("bias", "bias")):
        _LLAMA.append(
            (
                f"blocks/{_parameter}/{_leaf}",
                f"model.layers.{{}}.{_face}.{_suffix}",
                f"blk.{{}}.{_gguf}.{_suffix}",
            )
        )

LLAMA = _llama(_LLAMA, 1)  # and Mistral, SmolLM3, Qwen2, Qwen3
GEMMA = _gemma(LLAMA, {})
GEMMA2 = _gemma(
    LLAMA,
    {
        "blocks/out_norm/scale": "post_attention_layernorm",
        "blocks/inner_norm/scale": "pre_feedforward_layernorm",
        "blocks/down_norm/scale": "post_feedforward_layernorm",
    },
)
GGUF = _llama(_LLAMA, 2)

GPT2 = (
    Entry("embedding", "transformer.wte.weight"),
    Entry("position", "transformer.wpe.weight"),
    Entry("norm/scale", "transformer.ln_f.weight"),
    Entry("norm/bias", "transformer.ln_f.bias"),
    Entry("unembedding", "lm_head.weight"),
    *(
        Entry(f"blocks/{ours}/{leaf}", f"transformer.h.{{}}.{theirs}.{suffix}", part=part)
        for ours, theirs, part, leaves in (
            ("attention_norm", "ln_1", None, ("scale", "bias")),
            ("query", "attn.c_attn", 0, ("kernel", "bias")),
            ("key", "attn.c_attn", 1, ("kernel", "bias")),
            ("value", "attn.c_attn", 2, ("kernel", "bias")),
            ("out", "attn.c_proj", None, ("kernel", "bias")),
            ("inner_norm", "ln_2", None, ("scale", "bias")),
            ("up", "mlp.c_fc", None, ("kernel", "bias")),
            ("down", "mlp.c_proj", None, ("kernel", "bias")),
        )
        for leaf, suffix in zip(leaves, ("weight", "bias"), strict=True)
    ),
)


def assemble(
    config: Config, entries: Iterable[Entry], tensors: Mapping[str, np.ndarray], source: str
) -> Params:
    """The parameters (NumPy, float32) of ``config`` from the named ``tensors`` of the file ``source``.

    Raises:
      WeightsError: tensors that are missing, of another shape, left over, or with numbers that are not finite; it names
        them.
    """
    wanted = checkpoint.named(jax.eval_shape(model.make(config).init, jax.random.key(0)))
    used, wrong, endless = set(), [], []
    leaves: dict[str, np.ndarray] = {}
    for entry in entries:
        if entry.path not in wanted:
            continue
        shape, stacked = wanted[entry.path].shape, entry.path.startswith("blocks/")
        pieces = []
        for layer in range(config.shape.layers if stacked else 1):
            name = entry.name.format(layer)
            used.add(name)
            if name not in tensors:
                continue
            piece = _piece(tensors[name], entry)
            if piece.shape != shape[stacked:]:
                wrong.append(f"{name} gives {list(piece.shape)} where {list(shape[stacked:])} is wanted")
                continue
            with np.errstate(over="ignore"):  # of numbers beyond float32, which are refused below
                pieces.append(piece.astype(np.float32))
            if not np.isfinite(pieces[-1]).all():
                endless.append(name)
            if entry.less:
                pieces[-1] = pieces[-1] + np.float32(entry.less)
        if pieces:
            leaves[entry.path] = np.stack(pieces) if stacked else pieces[0]
    complaints = [
        ("missing tensors", sorted(used - tensors.keys())),
        ("tensors that the architecture has no place for", sorted(tensors.keys() - used)),
        ("tensors of another shape", wrong),
        ("tensors with numbers that are not finite", sorted(set(endless))),
    ]
    if any(names for _, names in complaints):
        text = "; ".join(f"{what}: {_few(names)}" for what, names in complaints if names)
        raise WeightsError(
            f"{source}: {text}. The weights are damaged, or not those of the configuration beside them"
        )
    return checkpoint.nested(leaves)


def disassemble(config: Config, entries: Iterable[Entry], params: Params) -> dict[str, np.ndarray]:
    """The named tensors of ``params``, the inverse of `assemble`."""
    leaves = checkpoint.named(params)
    parts: dict[str, list[np.ndarray]] = {}
    for entry in entries:
        if entry.path not in leaves:
            continue
        leaf, stacked = np.asarray(leaves[entry.path]), entry.path.startswith("blocks/")
        for layer in range(config.shape.layers if stacked else 1):
            piece = leaf[layer] if stacked else leaf
            piece = piece - piece.dtype.type(entry.less) if entry.less else piece
            parts.setdefault(entry.name.format(layer), []).append(piece.T if entry.turned else piece)
    return {
        name: np.concatenate(pieces, -1) if len(pieces) > 1 else pieces[0] for name, pieces in parts.items()
    }


def _piece(tensor: np.ndarray, entry: Entry) -> np.ndarray:
    if entry.part is not None:
        size = tensor.shape[-1] // 3
        tensor = tensor[..., entry.part * size : (entry.part + 1) * size]
    return tensor.T if entry.turned else tensor


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
