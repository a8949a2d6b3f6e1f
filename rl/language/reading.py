"""What a trained agent makes of logged texts, whichever agent it is: log-probabilities, values and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl import log
from rl.language import model
from rl.language.model import LM
from rl.types import Array, State, TokenBatch
from rl.values import tokens
from rl.values.tokens import TokenValues


def reader(
    lm: LM, token_values: Callable[[State, TokenBatch], TokenValues] | None = None, discount: float = 1.0
) -> Callable[[State, TokenBatch], dict[str, Array]]:
    """A compiled function of a state and a batch [B, T]: log-probabilities, values and returns, [B, T] at the tokens.

    ``score`` is what texts are ranked by, summed over their tokens: the rewards that B-Coder's values imply, ILQL's
    advantages, the log-probabilities of what has learned no values. ``taken`` says at which tokens there is something.

    Args:
      lm: the model; its parameters are ``state.params["policy"]``.
      token_values: what the function of this name in the agent's module gives; None where it has no values.
      discount: of the returns.
    """

    @jax.jit
    def read(state: State, batch: TokenBatch) -> dict[str, Array]:
        steps = tokens.steps(batch)
        log_probability = model.log_probabilities(lm, state.params["policy"], batch.tokens, batch.segment)
        outputs = {
            "taken": jnp.pad(steps.taken, ((0, 0), (1, 0))),
            "returns": tokens.at_tokens(steps, tokens.returns_to_go(steps, discount)),
            "log_probability": log_probability,
        }
        if token_values is None:
            return outputs | {"score": jnp.where(outputs["taken"], log_probability, 0.0)}
        judged = token_values(state, batch)
        return outputs | {"score": judged.score, "q": judged.q}

    return read


def against_returns(outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How far Q of logged actions is from the discounted return that followed them, the root of the mean square, beside
    the deviation of these returns: what a constant would be off by. Only Monte Carlo backups aim at them.

    Args:
      outputs: of `reader`, for logged texts.
    """
    taken = outputs["taken"]
    scores = {"log_probability": outputs["log_probability"][taken].mean()}
    if "q" in outputs:
        scores["value_error"] = np.sqrt(np.square((outputs["q"] - outputs["returns"])[taken]).mean())
        scores["return_deviation"] = outputs["returns"][taken].std()
    return {name: float(value) for name, value in scores.items()}


def in_batches(function: Callable[[Any, TokenBatch], Any], params: Any, rows: TokenBatch, size: int) -> Any:
    """``function(params, batch)`` of all rows, ``size`` at a time, as NumPy arrays; rows of padding fill the last."""
    count = len(rows.tokens)
    padded = jax.tree.map(lambda x: np.pad(x, ((0, -count % size), (0, 0))), rows)
    outputs = []
    with log.progress(count, "rows read", delay=3) as bar:
        for first in range(0, count, size):
            batch = jax.tree.map(lambda x, first=first: x[first : first + size], padded)
            outputs.append(jax.device_get(function(params, batch)))
            bar.update(min(size, count - first))
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *outputs)


def by_length(function: Callable[[Any, TokenBatch], Any], params: Any, rows: TokenBatch, size: int) -> Any:
    """`in_batches` of texts [B, T], one in a row, whose outputs are [B, T]: short ones without most of their padding.

    They are read at T tokens, at half of it, and so on to 32, each of which is compiled, if that at least halves the
    work: one long text among short ones would else have all of them read at its length.
    """
    used, longest = (rows.segment > 0).sum(1), rows.tokens.shape[1]
    lengths = [longest]
    while lengths[-1] > 32:
        lengths.append(-(-lengths[-1] // 2))
    enough = np.array([min(x for x in lengths if x >= text) for text in used])
    groups = {x: np.flatnonzero(enough == x) for x in sorted(set(enough.tolist()))}
    whole = lambda count: -(-count // size) * size  # the last batch is filled up
    if 2 * sum(whole(len(group)) * x for x, group in groups.items()) > whole(len(used)) * longest:
        return in_batches(function, params, rows, size)
    outputs = []
    for length, group in groups.items():
        cut = jax.tree.map(lambda x, group=group, length=length: x[group, :length], rows)
        read = in_batches(function, params, cut, size)
        outputs.append(
            jax.tree.map(lambda x, length=length: np.pad(x, ((0, 0), (0, longest - length))), read)
        )
    places = np.argsort(np.concatenate(list(groups.values())))
    return jax.tree.map(lambda *x: np.concatenate(x)[places], *outputs)
