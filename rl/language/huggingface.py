"""Model folders as Hugging Face's transformers reads and writes them: ``config.json`` and ``*.safetensors``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl import extras
from rl.language import weights
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.log import replacing
from rl.networks.rotary import Rope
from rl.networks.transformer import Shape
from rl.types import Params

_INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# What a folder has besides weights, architecture and tokenizer: templates of chats, tokens of a role, how to sample.
_TOKENS, _SAMPLING = "tokenizer_config.json", "generation_config.json"
COMPANIONS = (_TOKENS, _SAMPLING, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


def load(folder: str | os.PathLike[str]) -> tuple[Config, Params]:
    """The architecture and the parameters (NumPy, float32) in ``folder``.

    Raises:
      FileNotFoundError: there is no ``config.json``, or no weights.
      WeightsError: an architecture that is not supported, a damaged file, or tensors missing or left over.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json")
    tensors: dict[str, np.ndarray] = {}
    for path in _files(folder):
        some = read_safetensors(path)
        if twice := sorted(tensors.keys() & some.keys()):
            raise WeightsError(
                f"{path}: tensor {twice[0]} is in another file as well: download the model again"
            )
        tensors |= some
    if not config.shape.rms:
        prefix = "transformer."  # which GPT-2's original files lack
        tensors = {_prefixed(name, prefix): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not _ignored(name, config)}
    return config, weights.assemble(config, _entries(config), tensors, str(folder))


def save(
    folder: str | os.PathLike[str],
    config: Config,
    params: Params,
    tokenizer: Any = None,
    ends: Sequence[int] = (),
    companions: Mapping[str, str] | None = None,
) -> None:
    """Writes a folder that `load` and transformers' ``AutoModelForCausalLM.from_pretrained`` read.

    Args:
      folder: made if missing; files of the same names there are replaced, each whole or not at all.
      config: the architecture.
      params: any dtype of float; stored as it is.
      tokenizer: a `tokenizers.Tokenizer` to go with it, for ``AutoTokenizer``.
      ends: the tokens that end a text, for ``generate``.
      companions: all texts of `COMPANIONS`, written as they are (`companions`); others that are in the folder are
        deleted, as they are another model's. None: those that are there stay.

    Raises:
      WeightsError: no family can hold the architecture (`describe`); nothing is written.
    """
    described = describe(config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS, weights.disassemble(config, _entries(config), params))
    # That of a model in several files, which was there before, would be read instead.
    (folder / _INDEX).unlink(missing_ok=True)
    stated = {"eos_token_id": ends[0] if len(ends) == 1 else list(ends)} if ends else {}
    _write_json(folder / "config.json", described | stated)
    texts = dict(companions or {})
    for name in COMPANIONS if companions is not None else ():
        if name not in texts:
            (folder / name).unlink(missing_ok=True)
    if tokenizer is not None:
        with replacing(folder / "tokenizer.json") as partial:
            tokenizer.save(str(partial))
        if _TOKENS not in texts:
            texts |= described_tokens(tokenizer, {"eos_token": ends[0]} if ends else {})
    for name, text in texts.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def companions(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The texts of those of `COMPANIONS` that the folder has, by name.

    Raises:
      WeightsError: one is not in UTF-8.
    """
    texts = {}
    for path in (Path(folder) / name for name in COMPANIONS):
        try:
            if path.exists():
                texts[path.name] = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise WeightsError(f"{path} is not in UTF-8 ({error}): download it again") from error
    return texts


def described_tokens(
    tokenizer: Any, roles: Mapping[str, int], chat_template: str | None = None
) -> dict[str, str]:
    """The companion that says which tokens have a role, such as ``eos_token``, and how a chat is written."""
    values = {name: tokenizer.id_to_token(token) for name, token in roles.items()}
    values |= {} if chat_template is None else {"chat_template": chat_template}
    return {_TOKENS: json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **values}, indent=2) + "\n"}


def ends(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """All tokens that end a text, as ``config.json`` and ``generation_config.json`` say; the former's first one first.

    Raises:
      WeightsError: a file is no JSON, or says something that is no token.
    """
    tokens: dict[int, None] = {}
    for path in (Path(folder) / name for name in ("config.json", _SAMPLING)):
        if not path.exists():
            continue
        end = _read_json(path).get("eos_token_id")
        for token in end if isinstance(end, list) else [] if end is None else [end]:
            if type(token) is not int or token < 0:
                raise WeightsError(
                    f"{path}: eos_token_id is {json.dumps(end)[:40]}, and no token: download it again"
                )
            tokens[token] = None
    return tuple(tokens)


# ---- the architecture --------------------------------------------------------------------------------------------


def read_config(path: str | os.PathLike[str]) -> Config:
    """The architecture that a ``config.json`` describes.

    Raises:
      WeightsError: not JSON, a field missing, or an architecture that is not supported.
    """
    return _config(_read_json(path), path)


def _config(values: Mapping[str, Any], path: str | os.PathLike[str]) -> Config:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise WeightsError(
            f"{path}: architecture {kind!r} is not supported: use one of {', '.join(_READERS)}"
        )
    try:
        return weights.check_config(lambda: _READERS[kind](values, _Refusal(path)), path)
    except KeyError as error:
        raise WeightsError(f"{path} does not say {error}: is it the file of a {kind} model?") from error


def describe(config: Config) -> dict[str, Any]:
    """What ``config.json`` says of ``config``, the inverse of `read_config`.

    Raises:
      WeightsError: the families cannot hold the architecture; it names the fields, and what the nearest family has.
    """
    # No special tokens: transformers would take the numbers that they have in the family's own vocabulary.
    described = _described(config) | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    # As it will be read: what JSON makes of NumPy's numbers, for instance.
    read = _config(json.loads(json.dumps(described)), "config.json of this model")
    wanted, held = _arithmetic(config), _arithmetic(read)
    lost = [f"{name}={held[name]} and not {wanted[name]}" for name in wanted if wanted[name] != held[name]]
    if lost:
        raise WeightsError(
            f"no supported family of transformers computes what this model does: {described['model_type']}, the "
            f"nearest, has {', '.join(lost)}. Make a model of one family, or store the parameters by "
            "rl.checkpoint.export"
        )
    return described


def _arithmetic(config: Config) -> dict[str, Any]:
    """The fields that decide what a model computes; equal where models compute the same.

    The context is left out. Learned positions are read back with it, and with rotary ones it bounds lengths alone.
    """
    s = config.shape
    slides = s.window > 0 and len(set(s.global_layers)) < s.layers
    fields = {**vars(config), **vars(s)}
    del fields["shape"], fields["context"]
    return fields | {
        "embedding_scale": float(np.float32(config.embedding_scale)),
        "rope": _used(s.rope),
        "geglu": s.gated and s.geglu,
        "query_size": _query_size(s),
        "window": s.window if slides else 0,
        "global_layers": sorted(set(s.global_layers)) if slides else [],
        "nope_layers": sorted(set(s.nope_layers)) if s.rope else [],
    }


def _used(rope: Rope | None) -> Rope | None:
    """The same positions, with the defaults of all that their kind does not use."""
    if rope is None or (rope.kind == "yarn" and (rope.factor, rope.gain) != (1.0, 1.0)):
        return rope
    if rope.factor == 1.0:
        return Rope(rope.base, gain=rope.gain)
    if rope.kind == "linear":
        return Rope(rope.base, rope.factor, kind=rope.kind, gain=rope.gain)
    return dataclasses.replace(rope, whole=True)


def _query_size(shape: Shape) -> float:
    return shape.head_size if shape.query_size is None else shape.query_size


def _described(config: Config) -> dict[str, Any]:
    """What ``config.json`` says of ``config`` in the nearest family, which may lack some of it."""
    s = config.shape
    if not s.rms:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": config.vocabulary,
            "n_positions": config.context,
            "n_embd": s.width,
            "n_layer": s.layers,
            "n_head": s.heads,
            "n_inner": s.inner,
            "layer_norm_epsilon": s.epsilon,
            "tie_word_embeddings": config.tied,
        }
    kind = _kind(s)
    described = {
        "model_type": kind,
        "architectures": [_CLASSES[kind] + "ForCausalLM"],
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_size,
        "intermediate_size": s.inner,
        "rms_norm_eps": s.epsilon,
        "hidden_act": "gelu_pytorch_tanh" if s.geglu else "silu",
        "tie_word_embeddings": config.tied,
        **(_describe_rope(s.rope) if s.rope else {}),
    }
    if kind not in ("qwen2", "mistral"):
        described["attention_bias"] = s.qkv_bias
    if kind in ("llama", "smollm3"):
        described["mlp_bias"] = s.inner_bias
    types = ["full_attention" if n in s.global_layers else "sliding_attention" for n in range(s.layers)]
    if kind == "mistral":
        described["sliding_window"] = s.window
    if kind == "smollm3":
        described["no_rope_layers"] = [int(n not in s.nope_layers) for n in range(s.layers)]
        described |= {"use_sliding_window": bool(s.window), "sliding_window": s.window or None}
        described["layer_types"] = types if s.window else ["full_attention"] * s.layers
    if kind == "gemma2":
        described |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": _query_size(s)}
        # transformers wants a window even where no layer has one.
        described["sliding_window"] = s.window or config.context
        described["layer_types"] = types if s.window else ["full_attention"] * s.layers
        described["attn_logit_softcapping"] = s.score_cap or None
        described["final_logit_softcapping"] = config.logit_cap or None
    return described


_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}


def _kind(shape: Shape) -> str:
    """The family whose arithmetic this is."""
    if shape.geglu:
        return "gemma2" if shape.post_norms else "gemma"
    if shape.nope_layers:
        return "smollm3"
    if shape.window:
        return "mistral"
    return "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias and not shape.out_bias else "llama"


def _entries(config: Config) -> tuple[weights.Entry, ...]:
    if not config.shape.rms:
        return weights.GPT2
    return {"gemma": weights.GEMMA, "gemma2": weights.GEMMA2}.get(_kind(config.shape), weights.LLAMA)


class _Refusal:
    """Says that a setting is not supported."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def unless(self, fine: bool, setting: str) -> None:
        if not fine:
            raise WeightsError(f"{self.path}: {setting} is not supported")


# What transformers takes where a file does not say it.
_UNSAID: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "qwen3": {"head_dim": 128},
}
_GELU = ("gelu_pytorch_tanh", "gelu")  # Gemma's files say gelu where the approximation is meant


def _read_llama(values: Mapping[str, Any], refuse: _Refusal) -> Config:
    kind = values["model_type"]
    values = _UNSAID.get(kind, {}) | dict(values)
    heads, width, layers = (
        values[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if type(layers) is not int or layers > weights.MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers!r}")
    gemma = kind.startswith("gemma")
    activation = values.get("hidden_activation") if gemma else None
    activation = activation or values.get("hidden_act", "gelu_pytorch_tanh" if gemma else "silu")
    refuse.unless(activation in (_GELU if gemma else ("silu",)), f"hidden_act {activation!r}")
    refuse.unless(not values.get("use_bidirectional_attention"), "use_bidirectional_attention")
    bias = values.get("attention_bias", False)
    nope = _nope_layers(values, layers) if kind == "smollm3" else ()
    window, global_layers = _window(values, layers, nope, refuse)
    rope = _read_rope(values, refuse)
    return Config(
        vocabulary=values["vocab_size"],
        context=weights.stretched_context(values["max_position_embeddings"], rope),
        tied=values.get("tie_word_embeddings", False),
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        logit_cap=values["final_logit_softcapping"] or 0.0 if kind == "gemma2" else 0.0,
        shape=Shape(
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_size=values.get("head_dim") or width // heads,
            inner=values["intermediate_size"],
            rope=rope,
            qkv_bias=kind == "qwen2" or bias,
            out_bias=kind != "qwen2" and bias,
            inner_bias=kind in ("llama", "smollm3") and values.get("mlp_bias", False),
            qk_norm=kind == "qwen3",
            epsilon=values["rms_norm_eps"],
            geglu=gemma,
            post_norms=kind == "gemma2",
            query_size=values["query_pre_attn_scalar"] if kind == "gemma2" else None,
            score_cap=values["attn_logit_softcapping"] or 0.0 if kind == "gemma2" else 0.0,
            window=window,
            global_layers=global_layers,
            nope_layers=nope,
        ),
    )


def _nope_layers(values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers of a SmolLM3 that rotate nothing."""
    rotates = values.get("no_rope_layers")  # 1 where one does rotate
    if rotates is None:
        every = values.get("no_rope_layer_interval", 4)
        rotates = [(n + 1) % every for n in range(layers)]
    _require_each(rotates, layers, "no_rope_layers")
    return tuple(n for n in range(layers) if not rotates[n])


def _require_each(values: Sequence[Any], layers: int, name: str) -> None:
    if len(values) < layers:
        raise ValueError(f"{name} has {len(values)} entries for {layers} layers")


def _window(
    values: Mapping[str, Any], layers: int, nope: Sequence[int], refuse: _Refusal
) -> tuple[int, tuple[int, ...]]:
    """How far attention reaches, 0 for everywhere, and the layers that are an exception."""
    kind, window = values["model_type"], values.get("sliding_window")
    if kind not in ("mistral", "smollm3", "gemma2"):
        sliding = kind.startswith("qwen") and values.get("use_sliding_window", False)
        refuse.unless(not sliding, "attention in a sliding window")
        return 0, ()
    if window is None or (kind == "smollm3" and not values.get("use_sliding_window", False)):
        return 0, ()
    usual = {
        "mistral": [True] * layers,
        "smollm3": [n in nope for n in range(layers)],
        "gemma2": [n % 2 == 0 for n in range(layers)],
    }[kind]
    types = values.get("layer_types") if kind != "mistral" else None
    types = types or ["sliding_attention" if slides else "full_attention" for slides in usual]
    _require_each(types, layers, "layer_types")
    unknown = sorted({str(one) for one in types} - {"sliding_attention", "full_attention"})
    refuse.unless(not unknown, f"layer_types with {', '.join(unknown)}")
    full = tuple(n for n in range(layers) if types[n] == "full_attention")
    return (0, ()) if len(full) == layers else (window, full)


def _read_gpt2(values: Mapping[str, Any], refuse: _Refusal) -> Config:
    activation = values.get("activation_function", "gelu_new")
    refuse.unless(activation in ("gelu_new", "gelu_pytorch_tanh"), f"activation_function {activation!r}")
    refuse.unless(values.get("scale_attn_weights", True), "scale_attn_weights=false")
    refuse.unless(not values.get("scale_attn_by_inverse_layer_idx", False), "scale_attn_by_inverse_layer_idx")
    width, heads = values["n_embd"], values["n_head"]
    return Config(
        vocabulary=values["vocab_size"],
        context=values["n_positions"],
        tied=values.get("tie_word_embeddings", True),
        shape=Shape(
            width=width,
            layers=values["n_layer"],
            heads=heads,
            kv_heads=heads,
            head_size=width // heads,
            inner=values.get("n_inner") or 4 * width,
            rms=False,
            gated=False,
            rope=None,
            qkv_bias=True,
            out_bias=True,
            inner_bias=True,
            epsilon=values.get("layer_norm_epsilon", 1e-5),
        ),
    )


_READERS: dict[str, Callable[[Mapping[str, Any], _Refusal], Config]] = {
    **dict.fromkeys(_CLASSES, _read_llama),
    "gpt2": _read_gpt2,
}


def _read_rope(values: Mapping[str, Any], refuse: _Refusal) -> Rope:
    # Since transformers 5 all of it is in `rope_parameters`; before, the base stood apart from `rope_scaling`.
    stated = [values.get(name) for name in ("rope_parameters", "rope_scaling")]
    stretch: Any = next((each for each in stated if each not in (None, {})), {})
    base = stretch.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = stretch.get("rope_type", stretch.get("type", "default"))
    refuse.unless(kind in ("default", "linear", "llama3", "yarn"), f"rope_type {kind!r}")
    refuse.unless(not values.get("rope_interleaved", False), "rope_interleaved")
    refuse.unless(stretch.get("partial_rotary_factor") in (None, 1.0), "partial_rotary_factor")
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, stretch["factor"], kind=kind)
    if kind == "yarn":
        return _read_yarn(base, stretch, values["max_position_embeddings"])
    return Rope(
        base,
        stretch["factor"],
        stretch["low_freq_factor"],
        stretch["high_freq_factor"],
        stretch["original_max_position_embeddings"],
    )


def _read_yarn(base: float, stretch: Mapping[str, Any], context: int) -> Rope:
    original = stretch.get("original_max_position_embeddings") or context
    factor = stretch.get("factor") or context / original

    def gain(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, mscale_all_dim = stretch.get("mscale"), stretch.get("mscale_all_dim")
    attention_factor = stretch.get("attention_factor")
    if attention_factor is None:
        attention_factor = gain(mscale) / gain(mscale_all_dim) if mscale and mscale_all_dim else gain()
    low, high = stretch.get("beta_slow") or 1, stretch.get("beta_fast") or 32
    return Rope(base, factor, low, high, original, "yarn", stretch.get("truncate", True), attention_factor)


def _describe_rope(rope: Rope) -> dict[str, Any]:
    """In the form of both the newer and the older transformers."""
    if rope.factor == 1.0 and rope.gain == 1.0:
        return {
            "rope_theta": rope.base,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.base},
        }
    stretch: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    original = {"original_max_position_embeddings": rope.original}
    if rope.kind == "llama3":
        stretch |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high, **original}
    if rope.kind == "yarn":
        stretch |= {"beta_slow": rope.low, "beta_fast": rope.high, **original}
        stretch |= {"truncate": rope.whole, "attention_factor": rope.gain}
    return {
        "rope_theta": rope.base,
        "rope_scaling": stretch,
        "rope_parameters": {"rope_theta": rope.base, **stretch},
    }


# ---- the weights -------------------------------------------------------------------------------------------------


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Every tensor of the file by its name.

    Raises:
      FileNotFoundError: no such file.
      ImportError: the package safetensors is missing.
      WeightsError: the file is damaged or cut short, or holds a type that NumPy lacks; the message names it.
    """
    package = extras.module("safetensors", "lm")
    tensors = {}
    try:
        with package.safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                tensors[name] = file.get_tensor(name)
    except package.SafetensorError as error:
        raise WeightsError(f"{path} is damaged or cut short ({error}): download it again") from error
    except AttributeError as error:  # numpy.float8_e4m3fn, say
        raise WeightsError(f"{path}: tensor {name} is of a type that is not supported ({error})") from error
    return tensors


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes named tensors, whole or not at all. Raises ImportError where the package safetensors is missing."""
    package = extras.module("safetensors.numpy", "lm")
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with replacing(path) as partial:
        package.save_file(whole, partial, metadata={"format": "pt"})  # which transformers asks for


def _files(folder: Path) -> list[Path]:
    """The weight files: one, or the several that an index names."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / WEIGHTS).exists():
            raise FileNotFoundError(f"no {WEIGHTS} and no {_INDEX} in {folder}: is it a model's folder?")
        return [folder / WEIGHTS]
    try:
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{index} does not say which file holds which tensor ({error!r}): download it again"
        ) from error
    absent = [path.name for path in files if not path.exists()]
    if absent:
        raise FileNotFoundError(
            f"{index} names {', '.join(absent)}, not there: download the rest of the model"
        )
    return files


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _ignored(name: str, config: Config) -> bool:
    """Constants that older checkpoints hold beside their parameters, and a tied model's second name."""
    constant = name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
    return constant or (config.tied and name == "lm_head.weight")


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is no JSON ({error}): download it again") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds no object that describes a model: download it again")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n")
