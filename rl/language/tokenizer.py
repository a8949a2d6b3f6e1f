"""Tokenizers, as the package ``tokenizers`` has them (``encode(text).ids``, ``decode(ids)``), from model files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl import extras
from rl.language.weights import WeightsError
from rl.replay.tokens import Episode, Turn
from rl.replay.tokens import episode as join

_CONTROL, _ADDED = 3, 4  # llama.cpp's kinds of tokens that no merge makes: those that say no text, and others
_LINE_END = "\n"
_SPARE = 0.05  # share of an embedding's rows that may have no token: some are padded to a round number


def read(folder: str | os.PathLike[str]) -> Any:
    """The `tokenizers.Tokenizer` of a model's folder; it neither cuts nor pads texts, whatever the file says.

    Raises:
      FileNotFoundError: there is no ``tokenizer.json``.
      WeightsError: it is damaged.
      ImportError: the package is missing.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: save the tokenizer there")
    package = _package()
    try:
        tokenizer = package.Tokenizer.from_file(str(path))
    except Exception as error:  # of no special kind
        raise WeightsError(f"{path} is no tokenizer ({error}): download it again") from error
    tokenizer.no_truncation()  # which files keep from training, and which would cut episodes short
    tokenizer.no_padding()
    return tokenizer


def from_gguf(metadata: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` that a GGUF file's metadata describe: byte-level BPE.

    It puts the file's first token before a text where llama.cpp does.

    Raises:
      ValueError: it is of another kind, or splits texts in another way than those known here.
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
    llama = before == "llama-bpe"  # whose words that are tokens are not merged
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama))
    splits = [package.pre_tokenizers.Split(package.Regex(pattern), "isolated") for pattern in _SPLITS[before]]
    bytes_ = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([*splits, bytes_])
    if before == "qwen2":
        tokenizer.normalizer = package.normalizers.NFC()
    tokenizer.decoder = package.decoders.ByteLevel()
    kinds = list(zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False))
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == _CONTROL])
    added = [token for token, kind in kinds if kind == _ADDED]
    tokenizer.add_tokens([package.AddedToken(token, normalized=False) for token in added])
    first = metadata.get("tokenizer.ggml.bos_token_id")
    if first is not None and metadata.get("tokenizer.ggml.add_bos_token", llama):
        tokenizer.post_processor = package.processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
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


def prompt(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text's beginning: with those that the tokenizer puts before a text, without those after it.

    A Llama tokenizer, for instance, puts one before every text that it is given. What goes on with a text that has
    begun must have none: `continuation`. A text that has it already is warned of: the model would read it twice.
    """
    encoding = tokenizer.encode(text)
    places = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    if places and places[0] and encoding.ids[places[0]] == encoding.ids[places[0] - 1]:
        first = tokenizer.id_to_token(encoding.ids[places[0]])
        warnings.warn(
            f"a text begins with {first!r}, which the tokenizer puts before every text: leave it out, or the model "
            "reads it twice",
            stacklevel=2,
        )
    return encoding.ids[: places[-1] + 1] if places else encoding.ids


def before(tokenizer: Any, text: str) -> list[int]:
    """The tokens that the tokenizer puts before a text, which it does not have itself."""
    encoding = tokenizer.encode(text)
    places = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    return encoding.ids[: places[0]] if places else []


def continuation(tokenizer: Any, text: str) -> list[int]:
    """The tokens of what goes on with a text that has begun, as they would be within the whole.

    Some tokenizers, those of Llama 2 and Mistral 0.1, put a space before every text that they read.
    """
    anchor = _anchor(tokenizer)
    start = _LINE_END if anchor else ""
    return tokenizer.encode(start + text, add_special_tokens=False).ids[len(anchor) :]


def decode(tokenizer: Any, rows: Iterable[Sequence[int]]) -> list[str]:
    """The texts of `continuation`'s tokens, with the space that some tokenizers take away from a text's beginning.

    Special tokens leave nothing in them, so that `continuation` of such a text does not give them back.
    """
    line_end = _anchor(tokenizer)[1:]
    texts = tokenizer.decode_batch([[*line_end, *row] for row in rows])
    return [text[len(line_end) :] for text in texts]


def _anchor(tokenizer: Any) -> list[int]:
    """The tokens of a line end that begins a text, its space first, of a tokenizer that puts one there; else none.

    Of a line end, because no merge joins it to what follows in these tokenizers.
    """
    try:
        once, twice = (tokenizer.encode(_LINE_END * count, add_special_tokens=False).ids for count in (1, 2))
    except Exception:  # of no special kind: it has no line end
        return []
    return once if len(once) == 2 and twice == [*once, once[1]] else []


def episode(
    tokenizer: Any, turns: Iterable[Any], terminated: bool, imitate: float = 1.0, end: int | None = None
) -> Episode:
    """An episode in words as tokens, each turn by itself, the first one as `prompt` has it.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      turns: with ``text``, ``is_action`` and ``reward``, as `rl.envs.text.Turn`.
      terminated: as in `rl.replay.tokens.Episode`.
      imitate: the same.
      end: a token to put after each of the agent's turns, where their texts do not have it themselves.

    Raises:
      ValueError: as `rl.replay.tokens.episode`.
    """
    tokenized: list[Turn] = []
    for turn in turns:
        ids = continuation(tokenizer, turn.text) if tokenized else prompt(tokenizer, turn.text)
        after = [end] if turn.is_action and end is not None else []
        tokenized.append(Turn([*ids, *after], turn.is_action, turn.reward))
    return join(tokenized, terminated, imitate)


def size(tokenizer: Any) -> int:
    """How many tokens there are, those that were added included: one more than the last one's number."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def check(tokenizer: Any, vocabulary: int) -> None:
    """Raises ValueError if the tokenizer cannot be that of an embedding with ``vocabulary`` rows."""
    tokens = size(tokenizer)
    if not (1 - _SPARE) * vocabulary <= tokens <= vocabulary:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the embedding {vocabulary} rows: they belong to different models"
        )


# llama.cpp's name of what splits a text before BPE -> what splits it, one after another. Qwen2's and Llama 3's, as in
# the tokenizer.json of their authors, differ in how many digits stand together.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_NEWER % r"\p{N}",),
    "llama-bpe": (_NEWER % r"\p{N}{1,3}",),
}


def _package() -> Any:
    return extras.module("tokenizers", "lm")
