"""ARSQ, the autoregressive soft Q-network (Liu et al., ICML 2025): continuous actions without an actor.

An action is a sequence of ``T = L D`` bins ``b_t``, from coarse to fine (`rl.values.coarse`). With raw outputs
``u_t(. | s, c_t)`` of a network that sees the bins chosen before as a context ``c_t``, and temperature ``alpha``:

    A_t(b)  = u_t(b) - alpha log sum_b' exp(u_t(b') / alpha)        so that  sum_b exp(A_t(b) / alpha) = 1
    Q(s, a) = V(s) + sum_t A_t(b_t | s, c_t)                        so that  alpha log sum_a exp(Q(s, a) / alpha) = V(s)
    pi(a | s) = prod_t exp(A_t(b_t) / alpha)

V is the soft value without a maximum over actions, or a policy to make one. Twin networks i = 1, 2 learn

    y    = r + gamma d min_i V'_i(s')
    L_Q  = E_D[ sum_i (Q_i(s, a) - y)^2 ]
    L_BC = E_demonstrations[ sum_i sum_t  max(A_t(o) - A_t(b_t), c)              averaged over other bins o ]   margin
           E_demonstrations[ sum_i sum_t  max(log sum_o exp A_t(o) - A_t(b_t), c) ]                             cql

and act on ``min_i A_t,i``, bin after bin: the best one, or to explore one drawn in proportion to
``exp(min_i A_t,i / alpha)``. Temperature ``alpha`` is in units of value: it means less where rewards are larger.

**Value heads.** Which part of Q can be a distribution? Not the sum: ``A`` is ``alpha log pi``, a number that its
normalisation ties to those of all other actions, and no softmax over atoms of each ``Q(s, a)`` keeps
``alpha log sum_a exp(E Q / alpha) = V``. V can: the distribution of ``Q(s, a)`` is then that of V, moved by the number
``A``, and to say that Q is distributed as ``r + gamma d V'`` is to say that V is as ``r - A + gamma d V'``. So

    loss_V,i(r - A_i + gamma d V'_j(s')),  j the member with the smaller value     moves V alone,
    (V_i + A_i - y)^2                                                              moves A alone,

where ``loss`` is the head's. With the scalar head these are the two halves of the gradient of ``L_Q``. Supports
reach as far as V with its entropy bonus does (`target_range`); before A has been learned, targets may lie beyond.

Paper and code. Where the two differ, this is the authors' code for D4RL, whose weights the table of settings holds:
``L_Q`` without the paper's 1/2; ``margin`` averaged over the other bins where equation 15 sums; the online
networks act, not the target networks (those act in the code for RLBench). The code chooses ``margin`` for
halfcheetah-medium-expert where the paper names ``cql`` for all of medium and medium-expert. Its buffers, which drop the
worst episodes of data beyond a million steps, are not copied. With observations other than vectors, V and A of one
member share an encoder.

Not in the paper: ``weighted`` updates (prioritised replay), whose weights stand at both losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl import nest
from rl.agents.augmentation import augmented
from rl.agents.demonstrations import demonstrated, require_demonstrations
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_no_policy, require_ranges
from rl.agents.state import descend, follow, is_off, start
from rl.networks.autoregressive import soft_dueling
from rl.networks.layers import Architecture
from rl.replay.dataset import for_ever
from rl.settings import is_known, require_choices
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition
from rl.values import bellman, coarse, heads, losses
from rl.values.heads import ValueHead

CLONING: dict[str, Callable[[Array, Array, float | Array], Array]] = {
    "margin": losses.advantage_margin,
    "cql": losses.advantage_cql,
}
_OFF = "bc_weight=0"
TRUNKS: dict[str, Callable[[coarse.Tokens], np.ndarray]] = {  # which trunk is each token's
    "shared": lambda tokens: np.zeros(tokens.size, np.int32),
    "level": lambda tokens: tokens.level,
    "token": lambda tokens: np.arange(tokens.size),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are the authors' for D4RL's hopper-medium."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    levels: int = 2  # L, how often an interval of actions is cut
    bins: int = 7  # B, parts into which an interval is cut each time
    temperature: float = 0.01  # alpha, in units of value
    bc: str = "cql"  # the BC term: cql or margin
    bc_weight: float = 0.5  # weight of the BC term; 0 leaves it out
    bc_clip: float = -1.0  # c: where a logged bin leads by -c (above 0: lags by less than c) nothing pulls
    demonstrations: int = 0  # origin of the rows that the BC term is for; 0 is logged data, all of it
    trunk: str = "shared"  # layers under advantages: shared by all tokens, one per level, or one per token
    order: str = "level"  # order of tokens: level (all dimensions, then the next level) or dimension
    see_levels: bool = True  # tokens see what was chosen at coarser levels
    see_dimensions: bool = True  # tokens see what was chosen for other dimensions
    critics: int = 2  # twin networks, combined by their minimum
    target_rate: float = 0.005  # Polyak step of the target network
    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of the layers of V and of a trunk
    layer_norm: bool = False  # LayerNorm in V and trunks
    network: Architecture = Architecture(activation="tanh", initialiser="ppo")  # of every network
    critic_optimiser: Adam = Adam()  # of V and advantages

    def __post_init__(self) -> None:
        coarse.Grid(self.levels, self.bins)
        require_choices(self, {"bc": CLONING, "trunk": TRUNKS, "order": coarse.ORDERS})
        if is_known(self.temperature) and not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} must be positive: advantages are its multiples; for a policy that is "
                "nearly greedy take 0.0001"
            )
        require_ranges(self)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "arsq", discrete=False)
    require_no_policy(config.network, "arsq")
    grid = coarse.Grid(config.levels, config.bins)
    tokens = coarse.tokens(
        grid,
        spec.action_size,
        config.order,
        see_levels=config.see_levels,
        see_dimensions=config.see_dimensions,
    )
    network = soft_dueling(
        spec,
        head.size,
        TRUNKS[config.trunk](tokens),
        config.bins,
        config.hidden,
        config.layer_norm,
        config.network,
        config.critics,
    )
    optimisers = {"q": build(config.critic_optimiser, config.learning_rate, optimiser)}

    def init(key: Key, batch: Transition) -> State:
        return start({"q": network.init(key, batch.observation)}, optimisers, targets=["q"])

    def bootstrap(state: State, observation: Any) -> Array:
        """The outputs [..., K] with which a target continues."""
        return bellman.min_member(head, network.values(state.target["q"], observation))

    def value_and_advantages(params: Params, observation: Any, action: Array) -> tuple[Array, Array, Array]:
        """V's outputs [E, ..., K], all tokens' advantages [E, ..., T, B], and the action's bins [..., T]."""
        cells = coarse.cell(grid, action)
        v, u = network.both(params, observation, coarse.contexts(tokens, cells))
        return v, bellman.soft_advantage(u, config.temperature), coarse.chosen(tokens, cells)

    def weighted(state: State, batch: Transition, weight: Array, key: Key) -> tuple[State, Metrics, Array]:
        del key
        v_next = bootstrap(state, batch.next_observation)
        discount = config.discount * batch.discount
        y = batch.reward + discount * head.value(v_next)

        def loss(params):
            v, advantages, bins = value_and_advantages(params["q"], batch.observation, batch.action)
            advantage = bellman.of_bins(advantages, bins).sum(-1)
            backup = (
                batch.reward - jax.lax.stop_gradient(advantage),
                bellman.per_member(discount, len(v)),
                bellman.per_member(v_next, len(v)),
            )
            target = head.target(*backup)
            critic_loss = (weight * head.loss(v, target)).mean(1).sum()
            q = jax.lax.stop_gradient(head.value(v)) + advantage
            advantage_loss = (weight * jnp.square(q - y)).mean(1).sum()
            metrics = {
                "critic_loss": critic_loss,
                "advantage_loss": advantage_loss,
                "q": q.mean(),
                "v": head.value(v).mean(),
                "clipped": head.clipped(*backup).mean(),
            }
            total = critic_loss + advantage_loss
            if not is_off(config.bc_weight):
                cloning = CLONING[config.bc](advantages, bins, config.bc_clip).sum((0, -1))
                rows = demonstrated(batch, config.demonstrations, _OFF)
                metrics["bc_loss"] = (weight * rows * cloning).sum() / jnp.maximum(rows.sum(), 1.0)
                total = total + config.bc_weight * metrics["bc_loss"]
            return total, (metrics, heads.divergence(head, v, target).mean(0))

        gradients, (metrics, distance) = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics, distance

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        return weighted(state, batch, jnp.ones_like(batch.reward), key)[:2]

    def choose(
        state: State, observation: Any, pick: Callable[[Array, Key | None], Array], keys: Key | None
    ) -> Array:
        """An action [..., D], bin after bin: ``pick`` takes the members' smallest advantages [..., B] and a key."""
        params = state.params["q"]
        begun = network.begin(params, observation)

        def step(cells: Array, token_and_key: tuple[Array, Key | None]) -> tuple[Array, None]:
            token, key = token_and_key
            u = network.step(params, begun, coarse.context(tokens, token, cells), token)
            smallest = bellman.soft_advantage(u, config.temperature).min(0)
            return coarse.append(tokens, token, cells, pick(smallest, key)), None

        whole = jnp.zeros((*nest.leading(observation, spec.observation_shape), spec.action_size), jnp.int32)
        return coarse.centre(grid, jax.lax.scan(step, whole, (jnp.arange(tokens.size), keys))[0])

    def act(state: State, observation: Any, key: Key) -> Array:
        del key
        return choose(state, observation, lambda advantage, key: advantage.argmax(-1), None)

    def explore(state: State, observation: Any, key: Key) -> Array:
        draw = lambda advantage, key: jax.random.categorical(key, advantage / config.temperature)
        return choose(state, observation, draw, jax.random.split(key, tokens.size))

    def value(state: State, observation: Any, key: Key) -> Array:
        del key
        return head.value(bootstrap(state, observation))

    def critics(state: State, observation: Any, action: Array) -> Array:
        v, advantages, bins = value_and_advantages(state.params["q"], observation, action)
        # Member by member: actions may have more leading axes than observations.
        return jax.vmap(jnp.add)(head.value(v), bellman.of_bins(advantages, bins).sum(-1))

    learner = Learner(init, update, act, value, explore, weighted, critics)
    return augmented(learner, spec, config.network)


def check_data(config: Config, logged: Transition | None) -> None:
    """Raises ValueError if no row of the ``logged`` data (None: there are none) is the demonstration it should be."""
    if not is_off(config.bc_weight):
        require_demonstrations(logged, config.demonstrations, _OFF)


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of V, widened by the entropy bonus of all steps from this one on.

    The bonus of a step is ``alpha`` times an entropy, from 0 to that of uniform bins, ``T ln B``.
    """
    bonus = config.temperature * config.levels * spec.action_size * math.log(config.bins)
    return low, high + for_ever(bonus, config.discount)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    if not is_off(config.bc_weight):
        return {}
    return dict.fromkeys(("bc", "bc_clip", "demonstrations"), "it is of bc_weight")
