"""Deep Q-learning for integer actions (Mnih et al., 2015), double by default (van Hasselt et al., 2016).

    y   = r + gamma d Q'(s', argmax_a Q(s', a))
    L_Q = E_D[ loss_Q(s, a)(y) ]

With the ``c51`` head this is C51, with ``quantile`` QR-DQN, with ``hl_gauss`` the agent of "Stop Regressing"
(each with the double estimator unless ``double=False``). The ``scalar`` head's squared error stands where
the 2015 paper clips the error's gradient. Images (observations [H, W, C]) go through the 2015 paper's
convolutions, histories of vectors (observations [T, D]) through a causal transformer. Targets over
several steps are made by the replay (`rl.replay.ring.transitions`). Layers start as those of Dopamine's DQN, with every
head: Glorot's uniform kernels and biases of 0. (Kernels of its networks of distributions on Atari start as U(-b, b),
b = 1.32 / sqrt(fan_in).)

With ``sarsa`` targets continue with the logged next action, ``y = r + gamma d Q'(s', a')``: from a log these are the
values of the policy that recorded it, and acting is one step of improvement on it (Brandfonbrener et al. 2021). Rows
whose next action is unknown have weight 0.

With a ``temperature`` alpha above 0 targets have the soft maximum over actions in place of the largest value, entropy
included (soft Q-learning: Haarnoja et al. 2017; `rl.values.bellman.soft_max_action`), and ``double`` is not used:

    y   = r + gamma d alpha log sum_a exp( Q'(s', a) / alpha )

With a weight ``munchausen`` above 0 as well it is Munchausen DQN (Vieillard, Pietquin & Geist 2020, equation 2), whose
rewards gain the log-probability of the action under the soft policy ``pi' = softmax(Q' / alpha)``, clipped from below:

    r + munchausen [ alpha log pi'(a | s) ]_floor^0

Published settings for Atari: ``temperature=0.03, munchausen=0.9, munchausen_floor=-1``; with ``quantile`` it is a
Munchausen QR-DQN (theirs is of IQN).

It explores with probability epsilon, which falls from 1 to ``epsilon`` over ``epsilon_updates`` updates.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from rl.agents.augmentation import augmented
from rl.agents.optimisers import Adam, Optimiser, build
from rl.agents.requirements import require, require_next_actions, require_no_policy, require_ranges
from rl.agents.state import descend, follow, is_off, start
from rl.networks import mlp
from rl.networks.layers import Architecture
from rl.replay.dataset import for_ever
from rl.settings import is_known
from rl.types import Array, Key, Learner, Metrics, Spec, State, Transition
from rl.values import bellman, heads
from rl.values.heads import ValueHead


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; defaults are ours, for vectors. Dopamine's for Atari are published settings (``--preset``)."""

    discount: float = 0.99  # gamma, the weight of a reward that comes one step later
    double: bool = True  # choose the next action with the online network
    sarsa: bool = False  # continue with the logged next action, not with the best one
    temperature: float = 0.0  # alpha of soft Q-learning, in units of value; 0: the largest value
    munchausen: float = 0.0  # weight of the log-policy in rewards, with a temperature; 0: none
    munchausen_floor: float = -1.0  # the least that alpha times the log-policy counts there, at most 0
    target_rate: float = 0.005  # Polyak step of the target network; 1 copies
    target_period: int = 1  # updates between steps of the target network (Dopamine: 2000 with target_rate 1)
    epsilon: float = 0.05  # how often it explores in the end
    epsilon_updates: int = 10_000  # updates until epsilon, 0: none; Dopamine's 250,000 steps are 62,500
    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of layers or blocks; 512 after the convolutions of images
    layer_norm: bool = False  # LayerNorm in the dense layers
    network: Architecture = Architecture(initialiser="glorot")  # of every network
    # Its epsilon in Dopamine is 1.5e-4, with categorical heads 3.125e-4.
    critic_optimiser: Adam = Adam()  # of the network

    def __post_init__(self) -> None:
        require_ranges(self)
        if is_known(self.epsilon) and self.epsilon > 1:
            raise ValueError(f"epsilon={self.epsilon} must lie in [0, 1]: it is how often actions are random")
        if self.sarsa and not is_off(self.temperature):
            raise ValueError(
                f"sarsa=true continues with the logged next action, and temperature={self.temperature} with the soft "
                "maximum over all: leave one of them out"
            )
        if not is_off(self.munchausen) and is_off(self.temperature):
            raise ValueError(
                f"munchausen={self.munchausen} weighs the log-probability of a soft policy, and temperature=0 is a "
                "greedy one: give a temperature, such as 0.03"
            )
        if is_known(self.munchausen_floor) and not self.munchausen_floor <= 0:
            raise ValueError(
                f"munchausen_floor={self.munchausen_floor} must be at most 0, as log-probabilities are"
            )


def make(config: Config, spec: Spec, head: ValueHead, optimiser: Optimiser = optax.adam) -> Learner:
    """The learner; see `rl.types.Learner`. Raises ValueError for continuous actions."""
    require(spec, "dqn", discrete=True)
    require_no_policy(config.network, "dqn")
    network = mlp.action_values(spec, head.size, config.hidden, config.layer_norm, config.network)
    optimisers = {"q": build(config.critic_optimiser, config.learning_rate, optimiser)}

    def init(key: Key, batch: Transition) -> State:
        return start({"q": network.init(key, batch.observation)}, optimisers, targets=["q"])

    def bootstrap(state: State, observation: Array, logged: Array | None = None) -> tuple[Array, Array]:
        """The outputs [..., K] with which a target continues, and what entropy adds to their value [...].

        ``logged`` [...] are the actions of SARSA; None: the agent's own.
        """
        q = network.apply(state.target["q"], observation)
        if logged is not None:
            return bellman.at_action(q, logged), jnp.zeros(q.shape[:-2])
        if not is_off(config.temperature):
            return bellman.soft_max_action(head, q, config.temperature)
        selector = network.apply(state.params["q"], observation) if config.double else q
        return bellman.double_q(head, q, selector), jnp.zeros(q.shape[:-2])

    def log_policy(state: State, batch: Transition) -> Array | float:
        """What Munchausen's rewards gain [B]."""
        if is_off(config.munchausen):
            return 0.0
        q = head.value(network.apply(state.target["q"], batch.observation))
        soft = bellman.at_action(bellman.soft_advantage(q, config.temperature)[..., None], batch.action)[
            ..., 0
        ]
        return config.munchausen * jnp.clip(soft, config.munchausen_floor, 0.0)

    def weighted(state: State, batch: Transition, weight: Array, key: Key) -> tuple[State, Metrics, Array]:
        del key
        logged = batch.next_action if config.sarsa else None
        next_outputs, bonus = bootstrap(state, batch.next_observation, logged)
        discount = config.discount * batch.discount
        # A terminal step has a target without a next action.
        known = jnp.where(discount > 0, batch.has_next_action, 1.0) if config.sarsa else 1.0
        reward = batch.reward + log_policy(state, batch)
        backup = (reward + discount * bonus, discount, next_outputs)
        target, clipped = head.target(*backup), head.clipped(*backup).mean()

        def loss(params):
            q = bellman.at_action(network.apply(params["q"], batch.observation), batch.action)
            each = head.loss(q, target)
            distance = heads.divergence(head, q, target)
            # A row without a target has no priority either, or it would be drawn again and again.
            return (weight * known * each).mean(), (known * distance, head.value(q).mean())

        (value, (distance, q)), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = follow(descend(state, gradients, optimisers), config.target_rate, config.target_period)
        metrics = {"critic_loss": value, "q": q, "clipped": clipped}
        return state._replace(step=state.step + 1), metrics, distance

    def update(state: State, batch: Transition, key: Key) -> tuple[State, Metrics]:
        return weighted(state, batch, jnp.ones_like(batch.reward), key)[:2]

    def act(state: State, observation: Array, key: Key) -> Array:
        del key
        return head.value(network.apply(state.params["q"], observation)).argmax(-1)

    def explore(state: State, observation: Array, key: Key) -> Array:
        which, what = jax.random.split(key)
        best = act(state, observation, key)
        progress = state.step / config.epsilon_updates if config.epsilon_updates else 1.0
        epsilon = jnp.maximum(config.epsilon, 1 - (1 - config.epsilon) * progress)
        random = jax.random.randint(what, best.shape, 0, spec.action_size)
        return jnp.where(jax.random.uniform(which, best.shape) < epsilon, random, best)

    def value(state: State, observation: Array, key: Key) -> Array:
        """Of the agent's own actions, with ``sarsa``, too."""
        del key
        outputs, bonus = bootstrap(state, observation)
        return head.value(outputs) + bonus

    def critics(state: State, observation: Array, action: Array) -> Array:
        outputs = network.apply(state.params["q"], observation)
        return head.value(bellman.at_action(outputs, action))[None]

    learner = Learner(init, update, act, value, explore, weighted, critics)
    return augmented(learner, spec, config.network)


def check_data(config: Config, logged: Transition | None) -> None:
    """Raises ValueError if the ``logged`` data (None: there are none) lack next actions, which ``sarsa`` asks for."""
    if config.sarsa:
        require_next_actions(logged, "sarsa=true continues with the next actions of the data", "sarsa=false")


def target_range(config: Config, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """The range [low, high] of values, widened by the entropy of all steps to come, of at most log A each.

    And by the least that Munchausen's rewards lose from this step on.
    """
    if not config.temperature:  # no entropy, and Munchausen's rewards are of soft values
        return low, high
    steps = for_ever(1.0, config.discount)
    high += config.temperature * math.log(spec.action_size) * config.discount * steps
    return low + (config.munchausen * config.munchausen_floor * steps if config.munchausen else 0.0), high


def unused(config: Config) -> dict[str, str]:
    """Settings that do nothing; see `rl.agents.unused`."""
    reasons = {}
    if config.sarsa:
        reasons["double"] = "with sarsa targets continue with the logged action"
    if not is_off(config.temperature):
        reasons["double"] = "with a temperature targets have the soft maximum of the target network"
    if is_off(config.munchausen):
        reasons["munchausen_floor"] = "it is of munchausen"
    return reasons
