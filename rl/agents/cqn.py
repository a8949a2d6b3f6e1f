"""CQN, the coarse-to-fine Q-network (Seo, Uruc & James, CoRL 2024): one network, no actor, continuous actions.

Each of the ``D`` dimensions of an action is cut into ``B`` intervals, of which one is chosen and cut again, ``L``
times (`rl.values.coarse`). At level ``l`` the network sees the observation, the centres ``c_l`` of the intervals that
the levels before have chosen, and the level. For every dimension, independently of the others, it says the return's
distribution in each bin ``b``, by a dueling network:

    Z_ld(s, c_l, b) = V_ld(s, c_l) + A_ld(s, c_l, b) - mean_b' A_ld(s, c_l, b')

Greedy actions ``a(s)`` zoom in: ``b_ld = argmax_b Q_ld(s, c_l, b)`` with ``Q = E[Z]``, for l = 1 ... L. The same reward
is that of every level and dimension:

    y_ld   = r + gamma d Z'_ld(s', a(s'))         a(s') by the online network, Z' the target network
    L_TD   = E_D[ mean_ld loss(Z_ld(s, a), y_ld) ]
    L_fosd = E_demo[ mean_ldb dominance(Z_ld(s, a), Z_ld(s, b)) ]                         (`heads.dominance`)
    L_m    = E_demo[ mean_ldb max(m - (Q_ld(s, a) - Q_ld(s, b)), 0) ]

In all of them the intervals of the levels before are those of the action ``a`` in the batch. The last two are for
demonstrations alone: by default the rows of logged data, which are all rows of a fixed dataset. Every value head is
used directly. With ``c51`` this is the paper's; with ``scalar`` the dominance term is a hinge.

The defaults are the networks and rates of CQN on vectors in the comparison of ARSQ (Liu et al., ICML 2025), but for
the support, [0, 4000] with 51 atoms there, which is `experiments`' to choose. What differs from that code, and from
the authors':

- Terminations are respected. The code of that comparison bootstraps beyond them, which ``ignore_terminals`` reproduces;
  the authors' does not.
- Its weight of the dominance term multiplies that term twice; here once. Weights are one for each term.
- In updates and exploration, bins whose values are within 1e-4 of the greatest are tied and one of them is drawn; the
  authors draw only where all bins are that close. Evaluation takes the greatest, the first of equal ones.
- Exploration adds normal noise and clips it to the box, as there; the first random actions are the loop's.
- Layers start orthogonal with gain sqrt(2), where the authors' linear ones have 1: a LayerNorm follows each.
- Dense layers have biases, also before a LayerNorm. Of images the target network has an encoder of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from rl.agents.augmentation import augmented
from rl.agents.demonstrations import demonstrated, require_demonstrations
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_no_policy, require_ranges
from rl.agents.state import descend, follow, is_off, start
from rl.networks.dueling import dueling
from rl.networks.layers import Architecture
from rl.replay import dataset
from rl.types import Array, Key, Learner, Metrics, Params, Spec, State, Transition
from rl.values import bellman, coarse, heads
from rl.values.heads import ValueHead

_TIE = 1e-4  # in units of value
_OFF = "dominance_weight=0 and margin_weight=0"


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are those of CQN in ARSQ's comparison on vectors."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    levels: int = 3  # L, how often the interval of a dimension is cut
    bins: int = 5  # B, parts into which an interval is cut each time: actions are exact to B^-L
    td_weight: float = 1.0  # weight of L_TD; the authors: 0.1 on RLBench
    dominance_weight: float = 1.0  # weight of L_fosd, on demonstrations; 0 turns it off
    margin_weight: float = 1.0  # weight of L_m, on demonstrations; 0 turns it off
    margin: float = 1.0  # m, in units of value; the authors: 0.01 on RLBench
    demonstrations: int = 0  # origin of the rows that L_fosd and L_m are for; 0 is logged data, all of it
    ignore_terminals: bool = False  # bootstrap beyond terminations, as ARSQ's comparison does
    target_rate: float = 0.005  # Polyak step of the target network; the authors: 0.02
    slow_policy: bool = True  # act by the target network, as published; else by the online one
    exploration_noise: float = 0.1  # deviation of the normal noise with which it collects experience
    learning_rate: float = 1e-4  # Adam
    features: int = 64  # width of what each stream keeps of the observation; 0: all of it
    hidden: tuple[int, ...] = (512, 512)  # widths of the layers of each stream
    layer_norm: bool = True  # LayerNorm in the streams
    network: Architecture = Architecture(activation="silu", initialiser="orthogonal")  # of every network
    critic_optimiser: Adam = Adam()  # of the network

    def __post_init__(self) -> None:
        require_ranges(self)
        coarse.Grid(self.levels, self.bins)


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for integer actions."""
    require(spec, "cqn", discrete=False)
    require_no_policy(config.network, "cqn")
    grid = coarse.Grid(config.levels, config.bins)
    network = dueling(
        spec,
        config.levels,
        config.bins,
        head.size,
        config.features,
        config.hidden,
        config.layer_norm,
        config.network,
    )
    optimisers = {"q": build(config.critic_optimiser, config.learning_rate, optimiser)}
    every_level = jnp.arange(config.levels)

    def init(key: Key, batch: Transition) -> State:
        return start({"q": network.init(key, batch.observation)}, optimisers, targets=["q"])

    def greedy(params: Params, observation: Array, key: Key | None = None) -> Array:
        """The cells [..., D] that the network zooms into."""
        features = network.encode(params, observation)
        cells = jnp.zeros((*features[0].shape[:-1], spec.action_size), jnp.int32)
        for level in range(config.levels):
            outputs = network.apply(params, features, coarse.centre(grid, cells, level), level)
            at_level = None if key is None else jax.random.fold_in(key, level)
            cells = coarse.set_bin(grid, cells, level, best(head.value(outputs), at_level))
        return cells

    def distributions(params: Params, observation: Array, cells: Array) -> Array:
        """The outputs [L, ..., D, B, K] of all bins, at each level in the interval that ``cells`` [..., D] lie in."""
        features = network.encode(params, observation)
        centres = jnp.stack([coarse.centre(grid, cells, level) for level in range(config.levels)])
        level = every_level.reshape(-1, *[1] * (cells.ndim - 1))
        return network.apply(params, features, centres, jnp.broadcast_to(level, centres.shape[:-1]))

    def chosen(outputs: Array, cells: Array) -> Array:
        """Of `distributions` those [L, ..., D, K] of the bins in ``cells`` [..., D]."""
        return bellman.at_action(outputs, jnp.moveaxis(coarse.digits(grid, cells), -2, 0))

    def bootstrap(state: State, observation: Array, key: Key) -> Array:
        """The outputs [L, ..., D, K] with which targets continue."""
        cells = greedy(state.params["q"], observation, key)
        return chosen(distributions(state.target["q"], observation, cells), cells)

    def weighted(state: State, batch: Transition, weight: Array, key: Key) -> tuple[State, Metrics, Array]:
        next_outputs = bootstrap(state, batch.next_observation, key)
        # Over several steps an episode that ended is continued with the discount of one: experiments refuse the pair.
        alive = (
            jnp.where(batch.discount == 0, 1.0, batch.discount) if config.ignore_terminals else batch.discount
        )
        backup = batch.reward, config.discount * alive, next_outputs
        target, clipped = over_bins(head.target)(*backup), over_bins(head.clipped)(*backup).mean()
        cells = coarse.cell(grid, batch.action)

        def loss(params):
            every = distributions(params["q"], batch.observation, cells)
            logged = chosen(every, cells)
            td_loss = (weight * mean_bins(head.loss(logged, target))).mean()
            distance = mean_bins(heads.divergence(head, logged, target))
            q = head.value(logged)
            metrics = {"critic_loss": td_loss, "q": q.mean(), "clipped": clipped}
            terms: dict[str, tuple[float | Array, Callable[[], Array]]] = {
                "dominance_loss": (
                    config.dominance_weight,
                    lambda: heads.dominance(head, logged[..., None, :], every),
                ),
                "margin_loss": (
                    config.margin_weight,
                    lambda: jnp.maximum(config.margin - (q[..., None] - head.value(every)), 0.0),
                ),
            }
            total = config.td_weight * td_loss
            for name, (term_weight, term) in terms.items():
                if not is_off(term_weight):
                    rows = demonstrated(batch, config.demonstrations, _OFF)
                    row_loss = weight * rows * mean_bins(term().mean(-1))
                    metrics[name] = row_loss.sum() / jnp.maximum(rows.sum(), 1.0)
                    total = total + term_weight * metrics[name]
            return total, (distance, metrics)

        gradients, (distance, metrics) = jax.grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate)
        return state._replace(step=state.step + 1), metrics, distance

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        return weighted(state, batch, jnp.ones_like(batch.reward), key)[:2]

    def policy(state: State) -> Params:
        return (state.target if config.slow_policy else state.params)["q"]

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return coarse.centre(grid, greedy(policy(state), observation))

    def explore(state: State, observation: Array, key: Key) -> Array:
        tie_key, noise_key = jax.random.split(key)
        action = coarse.centre(grid, greedy(policy(state), observation, tie_key))
        noise = config.exploration_noise * jax.random.normal(noise_key, action.shape)
        return coarse.centre(grid, coarse.cell(grid, action + noise))  # in the box: cells clip

    def value(state: State, observation: Array, key: Key) -> Array:
        return mean_bins(head.value(bootstrap(state, observation, key)))

    def critics(state: State, observation: Array, action: Array) -> Array:
        cells = coarse.cell(grid, action)
        outputs = chosen(distributions(state.params["q"], observation, cells), cells)
        return mean_bins(head.value(outputs))[None]

    learner = Learner(init, update, act, value, explore, weighted, critics)
    return augmented(learner, spec, config.network)


def best(values: Array, key: Key | None = None) -> Array:
    """The bins [...] with the greatest of the values [..., B]; with a key, any that is within 1e-4 of it."""
    if key is None:
        return values.argmax(-1)
    tied = values >= values.max(-1, keepdims=True) - _TIE
    return jnp.where(tied, jax.random.uniform(key, values.shape, minval=0.0, maxval=1.0), -1.0).argmax(-1)


def mean_bins(values: Array) -> Array:
    """The mean [...] over levels and dimensions, [L, ..., D]."""
    return values.mean((0, -1))


def over_bins(backup: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """A backup of a head, of reward [B], discount [B] and outputs [L, B, D, K] -> [L, B, D] or [L, B, D, K].

    Not broadcast: what depends on reward and discount alone, for ``c51`` where each atom goes, is then computed once.
    """
    return jax.vmap(jax.vmap(backup, (None, None, 1), 1), (None, None, 0))


def check_data(config: Config, logged: Transition | None) -> None:
    """Raises ValueError if the ``logged`` data (None: there are none) are not what the settings ask for.

    That is, a row that is a demonstration, and with ``ignore_terminals`` successors of the steps that terminated.
    """
    if not (is_off(config.dominance_weight) and is_off(config.margin_weight)):
        require_demonstrations(logged, config.demonstrations, _OFF)
    if (
        config.ignore_terminals
        and logged is not None
        and (missing := dataset.without_successor(logged).sum())
    ):
        raise ValueError(
            f"ignore_terminals=true bootstraps beyond terminations, and the log does not say what was observed after "
            f"{missing} of them: give data with next_observations"
        )


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of values; unbounded with ``ignore_terminals``."""
    del spec
    return (-math.inf, math.inf) if config.ignore_terminals else (low, high)


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    reasons = {"margin": "it is of margin_weight"} if is_off(config.margin_weight) else {}
    if is_off(config.margin_weight) and is_off(config.dominance_weight):
        reasons["demonstrations"] = "it is of dominance_weight and margin_weight"
    return reasons
