"""A language model on top of another one that is frozen, and was run once over texts that are read many times.

Training then costs what lies above the frozen model: some new blocks, whose branches start at zero, so that the model
starts as the frozen one but for activations rounded to 16 bits. The texts are *answers*, programs for instance: what
the new blocks read is the last token of the prompt and the answer, both of which the frozen layers have seen the whole
prompt for. Logits cover the tokens that occur, which is the frozen model's vocabulary without the rest.

Agents know nothing of this: `learner` gives them an `rl.language.model.LM` whose features start from the activations
that came with the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.language import generate, model
from rl.language.model import LM, Config
from rl.networks import attention, transformer
from rl.types import Array, Key, Learner, Metrics, Params, State, TokenBatch
from rl.values.tokens import vocabulary_stats


class Reading(NamedTuple):
    """What a frozen model makes of one answer of ``S`` tokens; NumPy."""

    activation: np.ndarray  # [S + 1, K, D] float16: K depths, the prompt's last token and the answer's
    log_prob: np.ndarray  # [S] float32, of the answer's tokens, over the whole vocabulary
    best: np.ndarray  # [S + 1] int32, the token that was likeliest to follow


class Store(NamedTuple):
    """Everything that was read, in one row of ``P`` places; a data set's ``tokens`` are places in it."""

    token: Any  # [P] int32, as the rows of `unembedding` are numbered
    activation: Any  # [P, K, D], float16 takes half the memory
    unembedding: Any  # [A, D]


class Batch(NamedTuple):
    """A batch and what the frozen model says of its tokens."""

    tokens: TokenBatch  # [B, T]
    activation: Array  # [B, T, K, D]
    unembedding: Array  # [A, D]


def reader(
    lm: LM, rows: int = 4, lengths: Sequence[int] = (32, 64, 128), depths: Sequence[int] = ()
) -> Callable[[Params, Sequence[int], Sequence[Sequence[int]]], list[Reading]]:
    """A function of (params, prompt, answers) that reads the prompt once for all answers to it.

    Args:
      lm: the model; its activations are those on the residual path, as its last norm scales them, less its weights.
      rows: answers read at a time.
      lengths: to which answers are padded; few different ones mean few compilations.
      depths: the blocks after which activations are kept, counted from 1; the last block is always the last of them.

    Raises:
      ValueError: a depth that the model does not have; when called, an answer that is empty or longer than the last of
        ``lengths``.
    """

    shape = lm.config.shape
    if not all(1 <= depth <= shape.layers for depth in depths):
        raise ValueError(f"depths={tuple(depths)} must lie between 1 and the model's {shape.layers} blocks")
    layers = jnp.array([*(depth - 1 for depth in depths if depth != shape.layers), shape.layers - 1])

    def normal(residual: Array) -> Array:
        """As the model's norm has it before its weights."""
        x = residual.astype(jnp.float32)
        x = x if shape.rms else x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + shape.epsilon)

    @jax.jit
    def read(params: Params, prompt: Array, seen: Array, answers: Array, segment: Array) -> tuple[Array, ...]:
        cache = lm.cache(1, prompt.shape[1] + answers.shape[1])
        before, cache = lm.residuals(params, prompt, seen, cache)
        many = functools.partial(jnp.repeat, repeats=len(answers), axis=1)
        cache = cache._replace(
            key=many(cache.key), value=many(cache.value), segment=jnp.repeat(cache.segment, len(answers), 0)
        )
        after, _ = lm.residuals(params, answers, segment, cache)
        last = jnp.repeat(before[layers, :, -1:], len(answers), 1)
        activation = normal(jnp.concatenate([last, after[layers]], 2))
        norm = params["norm"]
        features = activation[-1] * norm["scale"] + norm.get("bias", 0.0)
        chosen = jnp.pad(answers, ((0, 0), (0, 1)))[..., None]
        summary = vocabulary_stats(functools.partial(lm.logits, params), features, chosen, chunk=32)
        log_prob = (summary.chosen[..., 0] - summary.total)[:, :-1]
        return jnp.moveaxis(activation, 0, 2).astype(jnp.float16), log_prob, summary.best

    def run(params: Params, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> list[Reading]:
        if not all(0 < len(answer) <= lengths[-1] for answer in answers):
            raise ValueError(f"answers must have from 1 to {lengths[-1]} tokens")
        room = lm.config.context - len(prompt)

        def padded_length(size: int) -> int:
            """Of an answer; less where the model's context ends, in which padding counts."""
            return max(size, min(next(length for length in lengths if length >= size), room))

        longest = padded_length(max(map(len, answers), default=1))
        usual = -(-len(prompt) // lengths[0]) * lengths[0]
        tokens, seen = generate.pad_left([prompt], max(len(prompt), min(usual, lm.config.context - longest)))
        readings: list[Reading | None] = [None] * len(answers)
        order = sorted(range(len(answers)), key=lambda number: len(answers[number]))
        for start in range(0, len(order), rows):
            group = order[start : start + rows]
            padded, segment = np.zeros((2, rows, padded_length(len(answers[group[-1]]))), np.int32)
            for row, number in enumerate(group):
                padded[row, : len(answers[number])], segment[row, : len(answers[number])] = answers[number], 1
            every = jax.device_get(read(params, tokens, seen, padded, segment))
            for row, number in enumerate(group):
                size = len(answers[number])
                activation, log_prob, best = (x[row] for x in every)
                readings[number] = Reading(activation[: size + 1], log_prob[:size], best[: size + 1])
        return [one for one in readings if one is not None]

    return run


def store(token: np.ndarray, activation: np.ndarray, best: np.ndarray, table: np.ndarray) -> Store:
    """A store whose vocabulary is the tokens that occur and those that were likeliest somewhere.

    Args:
      token: [P], of the frozen model, one text after another: each the prompt's last token and the answer's.
      activation: [P, K, D], as in `Reading`.
      best: [P], as in `Reading`.
      table: [vocabulary, D], the frozen model's embedding, or unembedding if it has one.
    """
    vocabulary, number = np.unique(np.concatenate([token, best]), return_inverse=True)
    return Store(number[: len(token)].astype(np.int32), activation, table[vocabulary])


def gather(data: TokenBatch, store: Store) -> Batch:
    """The batch whose tokens are the places that ``data`` has."""
    place = data.tokens
    activation = store.activation[place].astype(jnp.float32)
    return Batch(data._replace(tokens=store.token[place]), activation, store.unembedding)


def on_top(frozen: Config, params: Params, blocks: int, inner: int, depths: int = 1) -> Callable[[Batch], LM]:
    """The models that have ``blocks`` new blocks above the frozen one, as a function of what they read.

    Their parameters are ``{"blocks", "norm"}``, and with several depths ``{"depths"}``: what they add of activations
    below the last, by products that start at zero. They cannot generate, because they read no text that is new to the
    frozen model.

    Args:
      frozen: the architecture below.
      params: its parameters, of which the last norm's are copied.
      blocks: how many.
      inner: width inside their feed-forward layers.
      depths: of the activations that they read.
    """
    alike: dict[str, Any] = {"window": 0, "global_layers": (), "nope_layers": ()}
    shape = dataclasses.replace(frozen.shape, layers=blocks, inner=inner, qk_norm=False, **alike)
    body = transformer.trunk(shape)
    norm = jax.tree.map(np.asarray, params["norm"])

    def init(key: Key) -> Params:
        params = body.init(key)
        for branch in ("out", "down"):
            params["blocks"][branch] = jax.tree.map(jnp.zeros_like, params["blocks"][branch])
        below = {"depths": jnp.zeros((depths - 1, shape.width, shape.width))} if depths > 1 else {}
        return {**params, "norm": jax.tree.map(jnp.asarray, norm), **below}

    def build(batch: Batch) -> LM:
        def features(params: Params, tokens: Array, segment: Array) -> Array:
            del tokens
            x = batch.activation[:, :, -1]
            if depths > 1:
                x += jnp.einsum("btkd,kde->bte", batch.activation[:, :, :-1], params["depths"])
            return body.apply(params, x, transformer.positions(segment), segment)

        def logits(params: Params, features: Array) -> Array:
            del params
            return attention.capped(features.astype(jnp.float32) @ batch.unembedding.T, frozen.logit_cap)

        config = Config(batch.unembedding.shape[0], frozen.context, shape)
        return LM(config, init, features, logits, _no_cache, _no_cache, _no_cache)

    return build


def learner(make: Callable[[LM], Learner], build: Callable[[Batch], LM]) -> Learner:
    """The learner of `Batch` that ``make`` gives for the models of ``build`` (`on_top`); it cannot act."""

    def init(key: Key, batch: Batch) -> State:
        return make(build(batch)).init(key, batch.tokens)

    def update(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
        return make(build(batch)).update(state, batch.tokens, key)

    return Learner(init, update, _no_cache)


def log_probabilities(build: Callable[[Batch], LM], params: Params, batch: Batch) -> Array:
    """As `rl.language.model.log_probabilities`, over the tokens that occur."""
    return model.log_probabilities(build(batch), params, batch.tokens.tokens, batch.tokens.segment)


def _no_cache(*_: object) -> Any:
    raise NotImplementedError(
        "a model on cached activations reads no new text: it can neither act nor generate"
    )
