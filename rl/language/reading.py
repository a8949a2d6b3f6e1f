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
            return outputs | {"score": log_probability}
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
