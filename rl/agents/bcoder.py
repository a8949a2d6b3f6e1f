"""B-Coder: value-based learning of programs from a language model (Yu, Tao, Chen, Sun & Yang, ICLR 2024).

With logits ``l``, advantages ``A = alpha (l - max l)`` and the frozen model it starts from, ``ckpt``:

    value stage:   Q = A_ckpt + V                          only V is trained
    policy stage:  Q = A_theta + (V + V_r)                 the policy theta and its residual V_r are trained
    L_Q  = E_D[ loss_Q(s, a)(r + gamma d Q(s', a^)) ],     a^ = argmax p_ckpt(. | s')            (conservative)
    L    = L_Q + beta_adv E*[ |A(s, a)| ] - beta_ce E*[ log pi(a | s) ]

where E* is over actions of weight ``imitate`` (ground truth, or programs that passed), and targets follow the
current parameters. The ablations are flags: ``operator='max'`` takes the policy's own best token at s', ``'sarsa'``
the logged one; ``value_updates=0`` leaves the value stage out, -1 the policy stage.

Values are bounded above by ``maximum``: with the scalar head as in appendix G.1, ``maximum - SoftAbs(v)``, where
SoftAbs is 0 at 0 (the sign of the paper's constant would put the bound at -0.39, below the reward of a pass), and so
for each output of the quantile head. The residual lies within the bound, ``maximum - SoftAbs(v + v_r)``, so that no Q
exceeds ``maximum``: the paper can be read as adding V_r outside. A categorical head is bounded by its own support,
whatever ``maximum`` is: give it a support that ends there. V_r is the difference of two heads with one initialisation,
of which one learns (appendix G.2) and is not decayed: the other stays, so that decay would move V_r without any
gradient. With a categorical head it is added to V's logits. Any head's Q is its V plus the scalar A, see
`rl.values.tokens.dueling_loss`.

What frozen models say of a row never changes within a stage. `value_rows` and `policy_rows` compute it, and updates of
what they return leave these forward passes out, a fifth to a third of the work, where rows are drawn more than once.

Differences: the paper's model has an encoder, shared and frozen; here all is one causal model, and the value a second
copy of it. L_Q and both anchors are means over all tokens of a batch, not over each program's first, and learning rates
are constant by default (that of the paper's policy stage falls to 0 along a line). Half of the paper's batches is
ground truth (appendix H), lest generated programs dominate: an agent draws no batches, `experiments.papers.bcoder_dsl`
does so, and `experiments.language` draws rows uniformly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.agents.lm_bc import next_token
from rl.agents.optimisers import Adam, Optimiser, adamw
from rl.agents.requirements import require_ranges
from rl.agents.state import descend, start
from rl.language.model import LM
from rl.networks import token_heads
from rl.settings import require_choices
from rl.types import Array, Key, Learner, Metrics, Params, State, TokenBatch
from rl.values import tokens
from rl.values.heads import ValueHead
from rl.values.tokens import TokenValues

OPERATORS = ("conservative", "max", "sarsa")


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are the paper's."""

    discount: float = 0.999  # gamma, the weight of a reward that comes one token later
    alpha: float = 1.0  # temperature: Q / alpha are the policy's logits; 0: Q is V, of whatever policy
    operator: str = "conservative"  # the token that a target continues with: conservative, max or sarsa
    value_updates: int = 18_000  # updates of the value stage, before the policy stage; -1: all
    maximum: float = 1.0  # R_max, the largest return; categorical heads are bounded by their support
    advantage_weight: float = 0.1  # beta_adv, weight of the advantage term of the policy's loss
    imitation_weight: float = 0.5  # beta_ce, weight of the imitation term of the policy's loss
    value_learning_rate: float = 1e-5  # AdamW, value stage
    learning_rate: float = 3e-5  # AdamW, policy stage
    weight_decay: float = 0.05  # AdamW's weight decay, of neither norms nor biases, nor of V_r
    inner: int = 256  # width of the hidden layer of the value heads
    chunk: int = 128  # columns of tokens whose logits are held at a time
    value_optimiser: Adam = Adam()  # of V; its updates are those of the value stage
    policy_optimiser: Adam = Adam()  # of the policy and, apart, of V_r; its updates are the policy stage's

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.value_updates < -1:
            raise ValueError(f"value_updates={self.value_updates} must be at least 0, or -1 for all updates")
        require_choices(self, {"operator": OPERATORS})


class ValueRows(NamedTuple):
    """Rows and what the value stage knows of them: 4 bytes per token."""

    batch: TokenBatch  # [..., T]
    advantage: Any  # [..., T] float32, A_ckpt of the token that follows


class PolicyRows(NamedTuple):
    """Rows and what the policy stage knows of them: 4 (1 + K) bytes per token."""

    batch: TokenBatch  # [..., T]
    best: Any  # [..., T] int32, a^; None where the operator asks for none
    outputs: Any  # [..., T, K] float32, V's without residual and bound


class _PolicyOutputs(NamedTuple):
    """What one policy says of all T states, and of the tokens that follow them."""

    features: Array  # [B, T, D]
    advantage: Array  # [B, T], A of the token that follows
    of: Array  # [B, T], A of the queried token
    log_prob: Array  # [B, T], of the token that follows
    best: Array  # [B, T] int32, the likeliest token


def make(config: Config, lm: LM, head: ValueHead, optimiser: Optimiser | None = None) -> Learner:
    """The learner of `TokenBatch` [B, T]; see `rl.types.Learner`. All its models start from what ``lm.init`` gives.

    ``act`` and ``value`` take texts [B, T] without padding: the likeliest next tokens [B], and V of them [B]. Sample
    with `rl.language.generate` and ``state.params["policy"]``, whose logits are Q / alpha; rank with `token_values`.

    Raises:
      ValueError: a head whose outputs are neither values, which ``maximum`` bounds, nor logits over a support.
    """
    if not head.are_values and head.probabilities is None:
        raise ValueError(
            "bcoder bounds values by maximum, or by the head's support: a head whose outputs are neither values nor "
            "logits has no bound"
        )
    body = token_heads.state_values(head.size, config.inner)
    decay, of_policy = config.weight_decay, config.policy_optimiser
    undecayed = dataclasses.replace(of_policy, weight_decay=0.0)
    optimisers = {
        "policy": adamw(of_policy, config.learning_rate, decay, optimiser),
        "residual": adamw(undecayed, config.learning_rate, 0.0, optimiser),
        "value": adamw(config.value_optimiser, config.value_learning_rate, decay, optimiser),
    }

    def init(key: Key, batch: TokenBatch) -> State:
        del batch
        keys = jax.random.split(key, 3)
        features = jnp.zeros(lm.config.shape.width)
        params = {
            "policy": lm.init(keys[0]),
            "residual": body.init(keys[1], features),
            "value": {"lm": lm.init(keys[0]), "head": body.init(keys[2], features)},
        }
        return start(params, optimisers, targets=["policy", "residual"])

    policy_outputs = functools.partial(_policy_outputs, config, lm)
    outputs, bounded = (
        functools.partial(_outputs, config, lm, head),
        functools.partial(_bounded, config, head),
    )

    def error(
        batch: TokenBatch, advantage: Array, v: Array, next_advantage: Array
    ) -> tuple[Array, tokens.Steps, dict[str, Array]]:
        """L_Q, given A [B, T], V's outputs [B, T, K] and A [B, T] of the token that each state continues with."""
        steps = tokens.steps(batch)
        discount = config.discount * steps.discount
        following = jax.lax.stop_gradient(tokens.at(v, steps.next))
        reward = steps.reward + discount * jax.lax.stop_gradient(tokens.at(next_advantage, steps.next))
        each = tokens.dueling_loss(head, v[:, :-1], advantage[:, :-1], reward, discount, following)
        known = steps.taken
        if config.operator == "sarsa":
            known = known & (steps.has_next | (steps.discount == 0))
        td, value = tokens.mean(each, known), head.value(v[:, :-1])
        clipped = head.clipped(*jax.lax.stop_gradient((reward - advantage[:, :-1], discount, following)))
        metrics = {
            "critic_loss": td,
            "q": tokens.mean(value + advantage[:, :-1], steps.taken),
            "v": tokens.mean(value, steps.taken),
            "clipped": tokens.mean(clipped, known),
        }
        return td, steps, metrics

    def value_stage(state: State, rows: ValueRows) -> tuple[State, Metrics]:
        batch, advantage = rows

        def loss(params):
            v = bounded(outputs(params, batch))
            # The conservative token and the best one are the same here, and its advantage is 0.
            following = advantage if config.operator == "sarsa" else jnp.zeros_like(advantage)
            td, _, metrics = error(batch, advantage, v, following)
            # Nothing is anchored yet.
            return td, {**metrics, "imitation_loss": jnp.zeros(()), "advantage_loss": jnp.zeros(())}

        gradients, metrics = jax.grad(loss, has_aux=True)(state.params["value"])
        return descend(state, {"value": gradients}, optimisers), metrics

    def policy_stage(state: State, rows: PolicyRows) -> tuple[State, Metrics]:
        batch, greedy, frozen = rows

        def loss(params):
            student = policy_outputs(params["policy"], batch, greedy)
            v = bounded(frozen, (params["residual"], state.target["residual"], student.features))
            following = {
                "conservative": student.of,
                "max": jnp.zeros_like(student.of),
                "sarsa": student.advantage,
            }[config.operator]
            td, steps, metrics = error(batch, student.advantage, v, following)
            weight = steps.imitate * steps.taken
            imitation = -tokens.mean(student.log_prob[:, :-1], weight)
            anchor = tokens.mean(-student.advantage[:, :-1], weight)
            total = td + config.advantage_weight * anchor + config.imitation_weight * imitation
            return total, {**metrics, "imitation_loss": imitation, "advantage_loss": anchor}

        trained = {name: state.params[name] for name in ("policy", "residual")}
        gradients, metrics = jax.grad(loss, has_aux=True)(trained)
        return descend(state, gradients, optimisers), metrics

    def learn_value(state: State, batch: TokenBatch) -> tuple[State, Metrics]:
        return value_stage(state, value_rows(config, lm, state, batch))

    def learn_policy(state: State, batch: TokenBatch) -> tuple[State, Metrics]:
        return policy_stage(state, policy_rows(config, lm, head, state, batch))

    def update(state: State, batch: TokenBatch | ValueRows | PolicyRows, key: Key) -> tuple[State, Metrics]:
        del key
        if isinstance(batch, ValueRows):
            state, metrics = value_stage(state, batch)
        elif isinstance(batch, PolicyRows):
            state, metrics = policy_stage(state, batch)
        elif config.value_updates > 0:
            first = state.step < config.value_updates
            state, metrics = jax.lax.cond(first, learn_value, learn_policy, state, batch)
        else:
            state, metrics = (learn_value if config.value_updates else learn_policy)(state, batch)
        return state._replace(step=state.step + 1), metrics

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return next_token(lm, state.params["policy"], observation)

    def value(state: State, observation: Array, key: Key) -> Array:
        del key
        segment = jnp.ones_like(observation)
        batch = TokenBatch(observation, segment, *(None,) * 4)
        features = lm.features(state.params["policy"], observation, segment)
        residual = state.params["residual"], state.target["residual"], features
        return head.value(bounded(outputs(state.params["value"], batch), residual)[:, -1])

    return Learner(init, update, act, value)


def value_rows(config: Config, lm: LM, state: State, batch: TokenBatch) -> ValueRows:
    """``batch`` [B, T] with what its updates in the value stage need of the frozen model."""
    return ValueRows(batch, _policy_outputs(config, lm, state.target["policy"], batch).advantage)


def policy_rows(config: Config, lm: LM, head: ValueHead, state: State, batch: TokenBatch) -> PolicyRows:
    """``batch`` [B, T] with what its updates in the policy stage need of frozen models: the state's V is final."""
    best = None
    if config.operator == "conservative":
        best = _policy_outputs(config, lm, state.target["policy"], batch).best
    return PolicyRows(batch, best, _outputs(config, lm, head, state.params["value"], batch))


def token_values(config: Config, lm: LM, head: ValueHead) -> Callable[[State, TokenBatch], TokenValues]:
    """A function that values the actions of any programs, whoever wrote them; to be jitted by the caller.

    A token's score is the reward that its values imply, Q(s, a) - gamma d V(s'), and a program's is their sum,
    ``rl.values.tokens.per_episode(values.score, batch.segment, n)``: keep the programs of highest score (section 4.5 of
    the paper, with appendix F's V(s') for Q(s', a^)). Programs must be terminated, or their last token is compared with
    a state that never was.
    """

    def run(state: State, batch: TokenBatch) -> TokenValues:
        policy = _policy_outputs(config, lm, state.params["policy"], batch)
        residual = state.params["residual"], state.target["residual"], policy.features
        outputs = _outputs(config, lm, head, state.params["value"], batch)
        v = head.value(_bounded(config, head, outputs, residual))
        steps = tokens.steps(batch)
        q = (policy.advantage + v)[:, :-1]
        reward = q - config.discount * steps.discount * tokens.at(v, steps.next)
        return TokenValues(*(tokens.at_tokens(steps, x) for x in (reward, q, v[:, :-1])))

    return run


def soft_abs(x: Array) -> Array:
    """``(softplus(x) + softplus(-x)) / 2 - ln 2``: smooth, 0 at 0, ``|x| / 2`` far from it (appendix G.1)."""
    return (jax.nn.softplus(x) + jax.nn.softplus(-x)) / 2 - jnp.log(2.0)


def _policy_outputs(
    config: Config, lm: LM, params: Params, batch: TokenBatch, queried: Array | None = None
) -> _PolicyOutputs:
    """What the policy with ``params`` says; ``queried`` [B, T] are tokens whose advantages are wanted, too."""
    features = lm.features(params, batch.tokens, batch.segment)
    after = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    candidates = jnp.stack([after, after if queried is None else queried], -1)
    needed = tokens.visited(tokens.steps(batch))
    stats = tokens.vocabulary_stats(
        functools.partial(lm.logits, params), features, candidates, config.chunk, needed
    )
    advantage = config.alpha * (stats.chosen - stats.top[..., None])
    log_prob = stats.chosen[..., 0] - stats.total
    return _PolicyOutputs(features, advantage[..., 0], advantage[..., 1], log_prob, stats.best)


def _outputs(config: Config, lm: LM, head: ValueHead, params: Params, batch: TokenBatch) -> Array:
    """The value head's outputs [B, T, K] in all states, from the parameters ``{"lm", "head"}``."""
    body = token_heads.state_values(head.size, config.inner)
    return body.apply(params["head"], lm.features(params["lm"], batch.tokens, batch.segment))


def _bounded(
    config: Config, head: ValueHead, outputs: Array, residual: tuple[Params, Params, Array] | None = None
) -> Array:
    """V's outputs; ``residual`` is what learns of it, what does not, and their features."""
    if residual is not None:
        body = token_heads.state_values(head.size, config.inner)
        trained, frozen, features = residual
        outputs = outputs + body.apply(trained, features) - body.apply(frozen, features)
    return config.maximum - soft_abs(outputs) if head.are_values else outputs
