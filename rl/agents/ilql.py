"""Implicit language Q-learning (Snell, Kostrikov, Su, Yang & Levine, ICLR 2023), one action per token.

With heads Q_1, Q_2 (every token) and V on one trunk, and target networks Q' of the Q heads and the trunk:

    L_V   = E_D[ |tau - 1(u < 0)| loss_V(min_i Q'_i(s, x)) ],   u = min_i Q'_i(s, x) - V(s)
    L_Q   = sum_i E_D[ loss_Qi(s, x)(r + gamma d V(s')) ]
    L_CQL = sum_i E_D[ log sum_a exp Q_i(s, a) - Q_i(s, x) ]
    L_BC  = - E_D[ w log pi_beta(x | s) ] / E_D[ w ]            a model of its own
    L     = L_Q + L_V + c_cql L_CQL + c_bc L_BC

and acts by ``log pi_beta(a | s) + beta min_i Q'_i(s, a)`` (V, the same for every token, cancels). Where sampling keeps
a nucleus (``top_p``), it is that of pi_beta, taken before Q is added, as in the authors' code: a token that was never
logged has a Q that no data has corrected, and must not be all that is chosen. Variants are flags:
``backup='sarsa'`` continues with ``min_i Q'_i(s', x')`` of the logged next token, ``'mc'`` regresses Q on the
discounted return. LMRL-Gym (Abdulhai et al. 2023) has both without L_V, and the second with one Q head, whose current
parameters steer; here all else stays as it is, so that L_V moves the trunk.

The scalar head's loss is the full square, as in the authors' code; LMRL-Gym halves it, so that its ``cql_weight`` of
0.01 is 0.02 here, twice the default. For Wordle it has a learning rate of 3e-5, and outputs of Q and V that start at
``bias`` = -4.4: where all rewards are negative, tokens that were never logged look best from 0. There these outputs
start with weights of 0, too; here the weights are random, so that values start about 0.2 apart. Heads have ``inner``
units, there as many as the trunk has features, in the authors' code twice as many. Steering is by the target networks,
as in the authors' code; LMRL-Gym's evaluation steers by the current ones.

Of the published code these are not here: cloning weighted by exp(beta A) (none of its settings uses it; trlx has it as
AWAC), an upper clip of what steering adds, and beam search by values. ``imitate`` says what is cloned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rl.agents.optimisers import Adam, Optimiser, adamw
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, follow, is_off, start
from rl.language import generate
from rl.language.generate import Decoder
from rl.language.model import LM, log_probabilities
from rl.networks import token_heads
from rl.networks.token_heads import VocabularyValues
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Params, State, TokenBatch
from rl.values import bellman, heads, losses, tokens
from rl.values.heads import ValueHead
from rl.values.tokens import TokenValues

BACKUPS = ("expectile", "sarsa", "mc")


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; discount, expectile and target_rate are LMRL-Gym's for Wordle, cql_weight is half of its."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one token later
    backup: str = "expectile"  # what Q is regressed on: expectile, sarsa or mc
    expectile: float = 0.7  # tau: 0.5 is the mean over logged actions, towards 1 their maximum
    cql_weight: float = 0.01  # c_cql, weight of the CQL term
    bc_weight: float = 1.0  # c_bc, weight of cloning; 0 leaves pi_beta as it is
    steering: float = 4.0  # beta, weight of Q against log pi_beta in what is played
    target_rate: float = 0.005  # Polyak step of the target networks
    learning_rate: float = 1e-4  # AdamW, all networks
    weight_decay: float = 0.0  # AdamW's weight decay, of neither norms nor biases
    inner: int = 256  # width of the hidden layer of the heads
    bias: float = 0.0  # bias of every output that is a value; with negative rewards about the mean return
    chunk: int = 128  # columns of tokens whose values of all tokens are held at a time
    trunk_optimiser: Adam = Adam()  # of the trunk of Q and V
    critic_optimiser: Adam = Adam()  # of Q's heads
    value_optimiser: Adam = Adam()  # of V's head
    policy_optimiser: Adam = Adam()  # of pi_beta

    def __post_init__(self) -> None:
        require_ranges(self)
        require_choices(self, {"backup": BACKUPS})


def make(config: Config, lm: LM, head: ValueHead, optimiser: Optimiser | None = None) -> Learner:
    """The learner of `TokenBatch` [B, T]; see `rl.types.Learner`. Both its models start from what ``lm.init`` gives.

    ``act`` and ``value`` take texts [B, T] without padding: the tokens [B] that `decoder` thinks likeliest, and V of
    them [B].

    Raises:
      ValueError: a bias of a head whose outputs are logits.
    """
    if not is_off(config.bias) and not head.are_values:
        raise ValueError(
            f"bias={config.bias:g} would be added to every logit of a categorical head, which changes no value: leave "
            "it out, and give the head its start (--head_start)"
        )
    q_values = _q_values(config, lm, head)
    v_values = token_heads.state_values(head.size, config.inner, config.bias)
    settings = {
        "trunk": config.trunk_optimiser,
        "q": config.critic_optimiser,
        "v": config.value_optimiser,
        "policy": config.policy_optimiser,
    }
    optimisers = {
        name: adamw(adam, config.learning_rate, config.weight_decay, optimiser)
        for name, adam in settings.items()
    }

    def init(key: Key, batch: TokenBatch) -> State:
        del batch
        keys = jax.random.split(key, 3)
        features = jnp.zeros(lm.config.shape.width)
        params = {
            "trunk": lm.init(keys[0]),
            "q": q_values.init(keys[1], features),
            "v": v_values.init(keys[2], features),
            "policy": lm.init(keys[0]),
        }
        return start(params, optimisers, targets=["trunk", "q"])

    logged_outputs = functools.partial(_logged_outputs, config, q_values)

    def backup(steps: tokens.Steps, q_slow: Array, v: Array) -> tuple[Array, Array]:
        """Q's target [B, S, ...], given slow outputs [B, S, K] and V's [B, T, K]; and where it is clipped, [B, S]."""
        if config.backup == "mc":
            returns = tokens.returns_to_go(steps, config.discount)
            clipped = head.clipped(returns, jnp.zeros_like(returns), v[:, :-1])
            return heads.scalar_target(head, returns), clipped
        following = jnp.pad(q_slow, ((0, 0), (0, 1), (0, 0))) if config.backup == "sarsa" else v
        step = steps.reward, config.discount * steps.discount, tokens.at(following, steps.next)
        return head.target(*step), head.clipped(*step)

    def value_objective(v: Array, q_slow: Array, target: Array, taken: Array) -> tuple[Array, Array]:
        """L_V, and u [B, S]."""
        advantage = head.value(q_slow) - head.value(v)
        weight = losses.expectile_weight(advantage, config.expectile)
        return tokens.mean(weight * head.loss(v, target), taken), advantage

    def critic_objective(q: Array, target: Array, has_target: Array) -> Array:
        """L_Q."""
        return tokens.mean(jax.vmap(head.loss, (0, None))(q, target).sum(0), has_target)

    def cql_term(params: Params, features: Array, steps: tokens.Steps) -> Array:
        """L_CQL."""

        def gap(features: Array, token: Array) -> Array:
            values = head.value(q_values.all(params, features))
            chosen = jnp.take_along_axis(values, token[None, ..., None], -1)[..., 0]
            return (jax.nn.logsumexp(values, -1) - chosen).sum(0)

        each = tokens.in_chunks(gap, config.chunk, features[:, :-1], steps.action, needed=steps.taken)
        return tokens.mean(each, steps.taken)

    def policy_objective(params: Params, batch: TokenBatch, steps: tokens.Steps) -> Array:
        """L_BC."""
        log_prob = log_probabilities(
            lm, params, batch.tokens, batch.segment, config.chunk, needed=batch.is_action
        )[:, 1:]
        return -tokens.mean(log_prob, steps.imitate * steps.taken)

    def update(state: State, batch: TokenBatch, key: Key) -> tuple[State, Metrics]:
        del key
        steps = tokens.steps(batch)
        taken = has_target = steps.taken
        if config.backup == "sarsa":  # which cannot continue where no next token was logged
            has_target = taken & (steps.has_next | (steps.discount == 0))
        slow = lm.features(state.target["trunk"], batch.tokens, batch.segment)
        q_slow = bellman.min_member(head, logged_outputs(state.target["q"], slow, steps))
        v_target = heads.same_target(head, q_slow)

        def loss(params):
            features = lm.features(params["trunk"], batch.tokens, batch.segment)
            v = v_values.apply(params["v"], features)
            value_loss, advantage = value_objective(v[:, :-1], q_slow, v_target, taken)
            q = logged_outputs(params["q"], features, steps)
            q_target, clipped = backup(steps, q_slow, jax.lax.stop_gradient(v))
            critic_loss = critic_objective(q, q_target, has_target)
            metrics = {
                "critic_loss": critic_loss,
                "clipped": tokens.mean(clipped, has_target),
                "value_loss": value_loss,
                "q": tokens.mean(head.value(q).mean(0), taken),
                "v": tokens.mean(head.value(v[:, :-1]), taken),
                "advantage": tokens.mean(advantage, taken),
            }
            total = critic_loss + value_loss
            if not is_off(config.cql_weight):
                metrics["cql"] = cql_term(params["q"], features, steps)
                total = total + config.cql_weight * metrics["cql"]
            if not is_off(config.bc_weight):
                metrics["policy_loss"] = policy_objective(params["policy"], batch, steps)
                total = total + config.bc_weight * metrics["policy_loss"]
            return total, metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
        if is_off(config.bc_weight):  # or weight decay would move it
            del gradients["policy"]
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics

    chooser = decoder(config, lm, head)

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        cache = chooser.cache(*observation.shape)
        segment = jnp.ones_like(observation)
        return chooser.extend(decoder_params(state), observation, segment, cache)[0].logits.argmax(-1)

    def value(state: State, observation: Array, key: Key) -> Array:
        del key
        features = lm.features(state.params["trunk"], observation, jnp.ones_like(observation))
        return head.value(v_values.apply(state.params["v"], features[:, -1]))

    return Learner(init, update, act, value)


def token_values(config: Config, lm: LM, head: ValueHead) -> Callable[[State, TokenBatch], TokenValues]:
    """A function that values the actions of any texts, whoever wrote them; to be jitted by the caller.

    Q is min_i Q'_i(s, x), by which `decoder` steers, and a token's score its advantage Q - V. A text's is their sum,
    ``rl.values.tokens.per_episode(values.score, batch.segment, n)``: what steering adds to its log-probability, over
    beta. Were the values exact and gamma 1, it would be the text's return less V of the prompt, so it ranks answers to
    one prompt.
    """
    q_values = _q_values(config, lm, head)
    v_values = token_heads.state_values(head.size, config.inner, config.bias)

    def run(state: State, batch: TokenBatch) -> TokenValues:
        steps = tokens.steps(batch)

        def features(params: Params) -> Array:
            return lm.features(params["trunk"], batch.tokens, batch.segment)

        q = head.value(
            _logged_outputs(config, q_values, state.target["q"], features(state.target), steps)
        ).min(0)
        v = head.value(v_values.apply(state.params["v"], features(state.params)))
        v = v[:, :-1]
        return TokenValues(*(tokens.at_tokens(steps, x) for x in (q - v, q, v)))

    return run


def decoder(config: Config, lm: LM, head: ValueHead) -> Decoder:
    """What samples from the learner's policy, for `rl.language.generate`; its params are `decoder_params`."""
    q_values = _q_values(config, lm, head)

    def smallest(params: Params, features: Array) -> Array:
        return head.value(q_values.all(params["q"], features)).min(0)

    return generate.steered(generate.decoder(lm), generate.decoder(lm, smallest), config.steering)


def decoder_params(state: State) -> Params:
    """What `decoder` takes of a state: pi_beta, and the target networks."""
    return state.params["policy"], {"lm": state.target["trunk"], "q": state.target["q"]}


def _q_values(config: Config, lm: LM, head: ValueHead) -> VocabularyValues:
    return token_heads.vocabulary_values(
        lm.config.vocabulary, head.size, config.inner, members=2, bias=config.bias
    )


def _logged_outputs(
    config: Config, q_values: VocabularyValues, params: Params, features: Array, steps: tokens.Steps
) -> Array:
    """Q's outputs [E, B, S, K] of the logged tokens."""

    def chosen_values(features: Array, token: Array) -> Array:
        return jnp.moveaxis(q_values.at(params, features, token), 0, 2)

    outputs = tokens.in_chunks(
        chosen_values, config.chunk, features[:, :-1], steps.action, needed=steps.taken
    )
    return jnp.moveaxis(outputs, 2, 0)
