"""Text from a model, compiled: a batch of prompts at once, keys and values of what is read kept.

What is sampled is a `Decoder`: a language model alone, one whose choices are steered by values, or any function
of their features. Prompts are padded on the left, so that all rows write their next token into the same slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.language.model import LM
from rl.language.tokenizer import decode
from rl.types import Array, Key, Params


class Choice(NamedTuple):
    """What the next token is drawn from."""

    logits: Array  # [B, A]
    policy: Array | None = None  # [B, A], logits whose nucleus ``top_p`` keeps; None: that of ``logits``


class Decoder(NamedTuple):
    """What the choice of the next token needs."""

    cache: Callable[[int, int], Any]  # (B, M) -> an empty cache for M tokens
    # params, tokens [B, S], segment [B, S] (0: padding), cache -> the choice of the token after them, and the cache
    extend: Callable[[Params, Array, Array, Any], tuple[Choice, Any]]


class Texts(NamedTuple):
    """What was generated. After a text's end, tokens are 0 and log probabilities too.

    They are of these very tokens. A text of them (`texts`) that is tokenised again, as a dialogue's next turn is, may
    have others: special tokens are not in it, and the rest may be split elsewhere.
    """

    tokens: Array  # [B, steps] int32
    length: Array  # [B] int32, tokens up to the end, the stop token included
    log_prob: Array  # [B, steps] float32, each token's under the decoder, before temperature and top_p


def decoder(lm: LM, score: Callable[[Params, Array], Array] | None = None) -> Decoder:
    """A decoder of ``lm``.

    Args:
      lm: the model; the decoder's params are its own, unless ``score`` is given.
      score: (params, features [B, D]) -> logits [B, A]; params must then be ``{"lm": ..., anything else}``.
    """

    def extend(params: Params, tokens: Array, segment: Array, cache: Any) -> tuple[Choice, Any]:
        features, cache = lm.extend(params["lm"] if score else params, tokens, segment, cache)
        return Choice((score or lm.logits)(params, features[:, -1])), cache

    return Decoder(lm.cache, extend)


def steered(policy: Decoder, advantage: Decoder, weight: float) -> Decoder:
    """``log pi(a|s) + weight * (Q(s, a) - V(s))``, the two from models of their own (ILQL, Snell et al. 2022, 4.3).

    Its params are the pair of theirs. ``advantage`` gives Q - V or Q alone: V is the same for every token. The nucleus
    that ``top_p`` keeps is the policy's, as in the authors' code: that of the sum could be a token which the policy
    never writes, and whose Q no data has corrected. The temperature is that of the sum, theirs divides log pi alone.
    """

    def cache(rows: int, slots: int) -> Any:
        return policy.cache(rows, slots), advantage.cache(rows, slots)

    def extend(params: Params, tokens: Array, segment: Array, caches: Any) -> tuple[Choice, Any]:
        (logits, _), one = policy.extend(params[0], tokens, segment, caches[0])
        (values, _), other = advantage.extend(params[1], tokens, segment, caches[1])
        return Choice(jax.nn.log_softmax(logits) + weight * values, logits), (one, other)

    return Decoder(cache, extend)


def generator(
    decoder: Decoder,
    steps: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    tokens: int | None = None,
) -> Callable[[Params, Array, Array, Key], Texts]:
    """A compiled function of (params, prompts [B, P], segment [B, P], key), made once and used for many batches.

    Prompts and their segments are those of `pad_left`. The key of step ``t`` is ``fold_in(key, t)``.

    Args:
      decoder: what chooses.
      steps: the most tokens to add.
      temperature: 0 takes the likeliest token.
      top_p: sample from the smallest set of tokens that holds this much probability (Holtzman et al. 2020);
        of a decoder that is `steered`, before values are added.
      stop: tokens that end a text.
      tokens: how many there are, where the model has more rows: an embedding may be padded to a round number, and
        values of what is never logged, which steer, may be large there. All rows, if not given.

    Raises:
      ValueError: settings out of range; or, when called, a prompt and ``steps`` longer than the model's context.
    """
    if steps < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"generation needs steps >= 1, temperature >= 0 and 0 < top_p <= 1, not {steps}, {temperature}, {top_p}"
        )
    stops = jnp.asarray(stop, jnp.int32).reshape(-1)

    @jax.jit
    def generate(params: Params, prompts: Array, segment: Array, key: Key) -> Texts:
        rows, length = prompts.shape
        cache = decoder.cache(rows, length + steps)
        blank = Texts(
            jnp.zeros((rows, steps), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, steps))
        )

        def write(step, choice, texts, over):
            policy = None if choice.policy is None else choice.policy[:, :tokens]
            step_key = jax.random.fold_in(key, step)
            token = choose(choice.logits[:, :tokens], step_key, temperature, top_p, policy)
            chance = jnp.take_along_axis(jax.nn.log_softmax(choice.logits), token[:, None], 1)[:, 0]
            texts = Texts(
                texts.tokens.at[:, step].set(jnp.where(over, 0, token)),
                texts.length + ~over,
                texts.log_prob.at[:, step].set(jnp.where(over, 0.0, chance)),
            )
            return token, texts, over | (token[:, None] == stops).any(1)

        def unfinished(carry) -> Array:
            step, *_, over = carry
            return (step < steps) & ~over.all()

        def add(carry):
            step, token, cache, texts, over = carry
            choice, cache = decoder.extend(params, token[:, None], jnp.ones((rows, 1), jnp.int32), cache)
            token, texts, over = write(step, choice, texts, over)
            return step + 1, token, cache, texts, over

        # The last token is written and not read: each pass of the model is of a token that another one follows.
        choice, cache = decoder.extend(params, prompts, segment, cache)
        token, texts, over = write(0, choice, blank, jnp.zeros(rows, bool))
        return jax.lax.while_loop(unfinished, add, (jnp.ones((), jnp.int32), token, cache, texts, over))[3]

    return generate


def choose(
    logits: Array, key: Key, temperature: float = 1.0, top_p: float = 1.0, policy: Array | None = None
) -> Array:
    """One token [B] int32 for each row of ``logits`` [B, A]; see `generator` and, for ``policy`` [B, A], `Choice`.

    The nucleus is that of the logits divided by the temperature, or that of ``policy`` as it is: divided, a low
    temperature would leave one token, and nothing to steer.
    """
    if policy is not None and top_p < 1:
        logits = jnp.where(_in_nucleus(policy, top_p), logits, -jnp.inf)
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if policy is None and top_p < 1:
        logits = jnp.where(_in_nucleus(logits, top_p), logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _in_nucleus(logits: Array, top_p: float) -> Array:
    """Whether a token is in the smallest set of probability ``top_p``, [B, A]."""
    order = jnp.argsort(logits, -1, descending=True)  # of equal ones the earlier comes first
    ordered = jnp.take_along_axis(jax.nn.softmax(logits), order, -1)
    kept = jnp.cumsum(ordered, -1) - ordered < top_p  # the likeliest always is
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, kept, -1, inplace=False)


def pad_left(prompts: Sequence[Sequence[int]], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths as tokens [B, P] and segments [B, P]: 1 for text, 0 for padding before it.

    Args:
      prompts: token lists.
      length: ``P``; the longest prompt's, if not given. Few different ones mean few compilations.

    Raises:
      ValueError: no prompt, an empty one, or one longer than ``length``.
    """
    if not prompts or not all(map(len, prompts)):
        raise ValueError("every prompt needs at least one token: give the model's first token, or a newline")
    longest = max(map(len, prompts))
    length = length or longest
    if longest > length:
        raise ValueError(f"a prompt of {longest} tokens does not fit into {length}")
    tokens, segment = np.zeros((2, len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        segment[row, length - len(prompt) :] = 1
    return tokens, segment


def texts(generated: Texts, tokenizer: Any, stop: Sequence[int] = ()) -> list[str]:
    """The generated texts as strings, as they go on with the prompts, without the stop token.

    Special tokens within a text vanish, as in `rl.language.tokenizer.decode`: see `Texts`.
    """
    rows = zip(np.asarray(generated.tokens), np.asarray(generated.length), strict=True)
    tokens = [row[:length].tolist() for row, length in rows]
    return decode(tokenizer, [row[:-1] if row[-1] in stop else row for row in tokens])
