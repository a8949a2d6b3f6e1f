"""Behaviour cloning of tokens: supervised fine-tuning of a language model.

    L = - E_D[ w_t log pi(x_t | x_<t) ] / E_D[ w_t ]     over the agent's own tokens

with the weights ``imitate`` of the data: all 1 for plain fine-tuning, 1 for chosen episodes and 0 for others for
filtered cloning (`rl.replay.tokens.best`) or rejection fine-tuning (those that passed). It learns no value: a head
is accepted, and unused.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rl.agents.optimisers import Adam, Optimiser, adamw
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, start
from rl.language.model import LM
from rl.types import Array, Key, Learner, Metrics, State, TokenBatch
from rl.values import tokens
from rl.values.heads import ValueHead

IGNORES_REWARDS = True  # and has no value for a head


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are LMRL-Gym's."""

    learning_rate: float = 1e-4  # AdamW
    weight_decay: float = 0.0  # AdamW's weight decay, of neither norms nor biases
    chunk: int = 128  # columns of tokens whose logits are held at a time
    policy_optimiser: Adam = Adam()  # of the policy

    def __post_init__(self) -> None:
        require_ranges(self)


def make(config: Config, lm: LM, head: ValueHead, optimiser: Optimiser | None = None) -> Learner:
    """The learner of `TokenBatch` [B, T]; see `rl.types.Learner`. It starts from what ``lm.init`` gives.

    ``act`` maps texts [B, T] without padding to the likeliest next tokens [B]; sample with `rl.language.generate`
    and ``state.params["policy"]``.
    """
    del head
    optimisers = {
        "policy": adamw(config.policy_optimiser, config.learning_rate, config.weight_decay, optimiser)
    }

    def init(key: Key, batch: TokenBatch) -> State:
        del batch
        return start({"policy": lm.init(key)}, optimisers)

    def update(state: State, batch: TokenBatch, key: Key) -> tuple[State, Metrics]:
        del key
        steps = tokens.steps(batch)

        def loss(params):
            features = lm.features(params["policy"], batch.tokens, batch.segment)[:, :-1]
            logits = functools.partial(lm.logits, params["policy"])
            stats = tokens.vocabulary_stats(
                logits, features, steps.action[..., None], config.chunk, steps.taken
            )
            log_prob = stats.chosen[..., 0] - stats.total
            right = (stats.best == steps.action).astype(jnp.float32)
            return -tokens.mean(log_prob, steps.imitate * steps.taken), tokens.mean(right, steps.taken)

        (value, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), {"policy_loss": value, "accuracy": accuracy}

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return next_token(lm, state.params["policy"], observation)

    return Learner(init, update, act)


def token_values(config: Config, lm: LM, head: ValueHead) -> None:
    """None, where agents with values give a function of texts: likelihood is all that can be said of them."""
    del config, lm, head


def next_token(lm: LM, params, text: Array) -> Array:
    """The likeliest token [B] after ``text`` [B, T], which has no padding."""
    features = lm.features(params, text, jnp.ones_like(text))
    return lm.logits(params, features[:, -1]).argmax(-1)
