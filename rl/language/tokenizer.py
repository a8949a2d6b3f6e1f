"""Tokenizers, as the package ``tokenizers`` has them (``encode(text).ids``, ``decode(ids)``), from model files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl.replay.tokens import Episode, Turn
from rl.replay.tokens import episode as join

_INSTALL = "the package 'tokenizers' is missing: pip install 'headway[lm]'"
_CONTROL = 3  # llama.cpp's kind of token that no text contains
_SPARE = 0.05  # share of an embedding's rows that may have no token: some are padded to a round number


def read(folder: str | os.PathLike[str]) -> Any:
    """The `tokenizers.Tokenizer` of a model's folder.

    Raises:
      FileNotFoundError: there is no ``tokenizer.json``.
      ImportError: the package is missing.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: save the tokenizer there")
    return _package().Tokenizer.from_file(str(path))


def from_gguf(metadata: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` that a GGUF file's metadata describe: byte-level BPE.

    Raises:
      ValueError: it is of another kind.
      ImportError: the package is missing.
    """
    package = _package()
    kind, before = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or before not in _SPLITS:
        raise ValueError(
            f"a GGUF tokenizer of model {kind!r} with pre-tokenizer {before!r} is not supported: "
            f"use a model folder with a tokenizer.json, or one of gpt2 with {', '.join(_SPLITS)}"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges))
    bytes_ = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = [package.pre_tokenizers.Digits(individual_digits=True)] if _SPLITS[before] else []
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = package.decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def characters(texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` with one token for every character in ``texts``, and 0 for the end of a text.

    For games with few symbols, where values of every token need few rows. Other characters are an error.

    Raises:
      ImportError: the package is missing.
    """
    package = _package()
    symbols = sorted(set().union(*texts))
    vocabulary = {symbol: index for index, symbol in enumerate(["<end>", *symbols])}
    tokenizer = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = package.decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def episode(tokenizer: Any, turns: Iterable[Any], terminated: bool, imitate: float = 1.0) -> Episode:
    """An episode in words (turns with ``text``, ``is_action`` and ``reward``) as tokens, each turn by itself."""
    said = [Turn(tokenizer.encode(turn.text).ids, turn.is_action, turn.reward) for turn in turns]
    return join(said, terminated, imitate)


def check(tokenizer: Any, vocabulary: int) -> None:
    """Raises ValueError if the tokenizer cannot be that of an embedding with ``vocabulary`` rows."""
    size = 1 + max(tokenizer.get_vocab().values())
    if not (1 - _SPARE) * vocabulary <= size <= vocabulary:
        raise ValueError(
            f"the tokenizer has {size} tokens and the embedding {vocabulary} rows: they belong to different models"
        )


# llama.cpp's name of what splits a text before BPE -> whether every digit stands alone
_SPLITS = {"gpt-2": False, "smollm": True}


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    return tokenizers
