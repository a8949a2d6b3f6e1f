"""rl.agents against their own papers: one update against NumPy, many updates against known fixed points.

The oracle of one update writes each docstring's losses down again, in NumPy and float64, and takes
gradients by central differences; it shares no line with the agents. Random draws are replaced by a fixed
table, so that it needs no keys. The oracle of many updates is dynamic programming, or the stationarity
condition of the objective, solved by SciPy.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cqn_reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize, special, stats

from rl import agents, nest, train
from rl.agents import flow_policy
from rl.agents import sac_n as sac_n_module
from rl.agents import td3 as td3_module
from rl.agents.augmentation import augmented
from rl.agents.cql import continuous, penalty
from rl.agents.optimisers import Adam
from rl.networks import mlp as networks
from rl.networks.cnn import random_shift
from rl.networks.layers import Architecture
from rl.replay.dataset import Dataset
from rl.types import Learner, Spec, State, Transition
from rl.values import heads

Tree = Any
Loss = Callable[[Tree], Any]

# Of programs of thousands of updates: the level between that of all tests, none, and the usual one.
QUICK = {"xla_backend_optimization_level": 1}

DIMENSIONS, ACTIONS = 2, 3  # of a continuous action, and how many discrete ones

# ---- the oracle: networks and gradients -----------------------------------------------------------------


def mlp(params: Tree, x: np.ndarray) -> np.ndarray:
    last = sum(name.startswith("Dense") for name in params) - 1
    for i in range(last + 1):
        x = x @ params[f"Dense_{i}"]["kernel"] + params[f"Dense_{i}"]["bias"]
        if i < last and f"LayerNorm_{i}" in params:
            x = x - x.mean(-1, keepdims=True)
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            x = x * params[f"LayerNorm_{i}"]["scale"] + params[f"LayerNorm_{i}"]["bias"]
        if i < last:
            x = x * (x.real > 0)
    return x


def critics(params: Tree, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Outputs [E, ..., K]; integer actions enter one-hot."""
    if action.dtype.kind == "i":
        action = np.eye(ACTIONS)[action]
    observation = np.broadcast_to(observation, action.shape[:-1] + observation.shape[-1:])
    x = np.concatenate([observation, action], -1)
    members = len(params["Dense_0"]["bias"])
    return np.stack([mlp(jax.tree.map(lambda leaf, i=i: leaf[i], params), x) for i in range(members)])


def squashed(params: Tree, observation: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """``samples`` actions [N, B, D] of the squashed normal policy and their log densities [N, B]."""
    mean, log_std = np.split(mlp(params, observation), 2, -1)
    std = np.exp(np.clip(log_std, -5, 2))
    raw = mean + std * normal_table((samples, *mean.shape))
    log_prob = stats.norm.logpdf(raw, mean, std) - np.log(1 - np.tanh(raw) ** 2)
    return np.tanh(raw), log_prob.sum(-1)


def log_likelihood(params: Tree, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Of logged actions under the behaviour policy."""
    if action.dtype.kind == "i":
        return special.log_softmax(mlp(params, observation), -1)[np.arange(len(action)), action]
    if "body" not in params:  # a deviation of 1, and a mean without bounds
        return stats.norm.logpdf(action, mlp(params, observation)).sum(-1)
    mean = np.tanh(mlp(params["body"], observation))
    return stats.norm.logpdf(action, mean, np.exp(params["log_std"])).sum(-1)


def slope(loss: Loss, params: Tree, step: float = 1e-6) -> Tree:
    """Central differences of ``loss`` at ``params``, each number of which is moved and put back."""

    def of(x: np.ndarray) -> np.ndarray:
        gradient = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            here = x[index]
            x[index] = here + step
            above = loss(params)
            x[index] = here - step
            gradient[index] = (above - loss(params)) / (2 * step)
            x[index] = here
        return gradient

    return jax.tree.map(of, params)


def descend(params: dict[str, Tree], rate: float, **losses: Loss) -> dict[str, Tree]:
    """One step of gradient descent; every loss is taken at ``params``."""
    moved = {
        name: jax.tree.map(lambda x, g: x - rate * g, params[name], slope(loss, params[name]))
        for name, loss in losses.items()
    }
    return {**params, **moved}


def follow(target: Tree, params: Tree, rate: float) -> Tree:
    return jax.tree.map(lambda slow, new: (1 - rate) * slow + rate * new, target, params)


# ---- the oracle: heads -------------------------------------------------------------------------------------

LOW, HIGH, SIZE = -5.0, 5.0, 9


class Head(NamedTuple):
    value: Callable[[np.ndarray], np.ndarray]
    target: Callable[..., np.ndarray]
    loss: Callable[[np.ndarray, np.ndarray], np.ndarray]
    clipped: Callable[..., float]  # of the arguments of `target`: the mean share beyond the support
    # outputs of what should dominate, and of what should be dominated
    dominance: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda x, y: np.maximum(y - x, 0).mean(-1)


def numpy_head(name: str) -> Head:
    """The heads' definitions; of `quantile` with kappa 1."""
    if name == "scalar":
        value = lambda x: x[..., 0]
        return Head(
            value, lambda r, d, x: r + d * value(x), lambda x, y: (value(x) - y) ** 2, lambda r, d, x: 0.0
        )
    if name == "quantile":
        return Head(
            lambda x: x.mean(-1),
            lambda r, d, x: r[..., None] + d[..., None] * x,
            quantile_regression,
            lambda r, d, x: 0.0,
        )

    padding = 3 if name == "hl_gauss" else 0
    width = (HIGH - LOW) / (SIZE - 2 * padding if name == "hl_gauss" else SIZE - 1)
    atoms = LOW + width * (np.arange(SIZE) - padding + (0.5 if name == "hl_gauss" else 0.0))

    def split(y: np.ndarray) -> np.ndarray:
        return np.maximum(0, 1 - np.abs(np.clip(y, LOW, HIGH)[..., None] - atoms) / width)

    def smear(y: np.ndarray) -> np.ndarray:
        edges = np.append(atoms, atoms[-1] + width) - width / 2
        mass = np.diff(stats.norm.cdf(edges, np.clip(y, LOW, HIGH)[..., None], 0.75 * width))
        return mass / mass.sum(-1, keepdims=True)

    def value(x: np.ndarray) -> np.ndarray:
        weight = np.exp(x - x.real.max(-1, keepdims=True))  # special.softmax takes no complex numbers
        return (weight * atoms).sum(-1) / weight.sum(-1)

    def target(r: np.ndarray, d: np.ndarray, x: np.ndarray) -> np.ndarray:
        if name == "c51":
            moved = split(r[..., None] + d[..., None] * atoms)
            return np.einsum("...i,...ij->...j", special.softmax(x, -1), moved)
        return (smear if name == "hl_gauss" else split)(r + d * value(x))

    def clipped(r: np.ndarray, d: np.ndarray, x: np.ndarray) -> float:
        y = r[..., None] + d[..., None] * (atoms if name == "c51" else value(x)[..., None])
        weight = special.softmax(x, -1) if name == "c51" else np.ones_like(y)
        return float((weight * ((y < LOW) | (y > HIGH))).sum(-1).mean())

    def dominance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        better, worse = (special.softmax(logits, -1) for logits in (x, y))
        excess = [
            np.maximum(better[..., : i + 1].sum(-1) - worse[..., : i + 1].sum(-1), 0) for i in range(SIZE)
        ]
        return sum(excess)

    return Head(value, target, lambda x, y: -(y * special.log_softmax(x, -1)).sum(-1), clipped, dominance)


def quantile_regression(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    error = y[..., None, :] - x[..., :, None]
    levels = (np.arange(SIZE)[:, None] + 0.5) / SIZE
    huber = np.where(np.abs(error) < 1, error**2 / 2, np.abs(error) - 0.5)
    return (np.where(error < 0, 1 - levels, levels) * huber).mean(-1).sum(-1)


def pick(outputs: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    """Outputs [..., K] along an axis other than the last, by an index without either."""
    return np.take_along_axis(outputs, np.expand_dims(index, (axis, -1)), axis).squeeze(axis)


def smallest(head: Head, outputs: np.ndarray) -> np.ndarray:
    return pick(outputs, head.value(outputs).argmin(0), 0)


# ---- the oracle: one update of each agent -------------------------------------------------------------------


class Expected(NamedTuple):
    params: dict[str, Tree]
    target: dict[str, Tree]
    metrics: dict[str, Any]


class Setting(NamedTuple):
    """What an update is made of, in float64."""

    config: Any
    head: Head
    params: dict[str, Tree]
    target: dict[str, Tree]
    step: int
    batch: Transition

    def critic_loss(self, y: np.ndarray) -> Loss:
        """sum_i E[loss_Qi(y)]"""
        return lambda q: sum(
            self.head.loss(member, y).mean()
            for member in critics(q, self.batch.observation, self.batch.action)
        )

    def q(self, params: Tree) -> np.ndarray:
        """Values [E, B] of the logged actions."""
        return self.head.value(critics(params, self.batch.observation, self.batch.action))


def bc(s: Setting) -> Expected:
    def loss(pi: Tree) -> float:
        return -log_likelihood(pi, s.batch.observation, s.batch.action).mean()

    return Expected(
        descend(s.params, s.config.learning_rate, policy=loss), {}, {"policy_loss": loss(s.params["policy"])}
    )


def as_distribution(h: Head, outputs: np.ndarray) -> np.ndarray:
    """The target that has the distribution of outputs that are logits."""
    return special.softmax(outputs, -1)


class Implicit(NamedTuple):
    """What IQL says of value and critics, whatever the policy is."""

    losses: dict[str, Loss]
    advantage: np.ndarray  # [B]
    metrics: dict[str, Any]


def implicit(s: Setting, imitated: Callable[[Head, np.ndarray], np.ndarray] | None = None) -> Implicit:
    c, h, b = s.config, s.head, s.batch
    slow = smallest(h, critics(s.target["critic"], b.observation, b.action))
    u = h.value(slow) - h.value(mlp(s.params["value"], b.observation))
    y_value = imitated(h, slow) if imitated else h.target(0 * b.reward, 1 + 0 * b.reward, slow)
    backup = b.reward, c.discount * b.discount, mlp(s.params["value"], b.next_observation)
    weight = np.where(u < 0, 1 - c.expectile, c.expectile)
    if c.gumbel:
        z = u / c.gumbel
        weight = np.expm1(z) / z * np.exp(-max(z.max(), -1))
    losses: dict[str, Loss] = {
        "value": lambda v: (weight * h.loss(mlp(v, b.observation), y_value)).mean(),
        "critic": s.critic_loss(h.target(*backup)),
    }
    metrics = {
        "q": s.q(s.params["critic"]).mean(),
        "clipped": h.clipped(*backup),
        "v": h.value(mlp(s.params["value"], b.observation)).mean(),
        "advantage": u.mean(),
    }
    return Implicit(losses, u, metrics)


def of_losses(s: Setting, losses: dict[str, Loss]) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Parameters after one step of each, all taken at the same ones, and their values before it."""
    params = descend(s.params, s.config.learning_rate, **losses)
    return params, {f"{name}_loss": loss(s.params[name]) for name, loss in losses.items()}


def iql(s: Setting) -> Expected:
    c, b, (losses, u, metrics) = s.config, s.batch, implicit(s)
    if not c.slow_advantage:
        q = s.head.value(smallest(s.head, critics(s.params["critic"], b.observation, b.action)))
        u = q - s.head.value(mlp(s.params["value"], b.observation))
        metrics["advantage"] = u.mean()
    weight = np.minimum(np.exp(c.temperature * u), 100)
    policy = lambda pi: -(weight * log_likelihood(pi, b.observation, b.action)).mean()
    params, values = of_losses(s, {**losses, "policy": policy})
    target = {"critic": follow(s.target["critic"], params["critic"], c.target_rate)}
    return Expected(params, target, metrics | values)


def velocity(params: Tree, observation: np.ndarray, x: np.ndarray, time: np.ndarray | float) -> np.ndarray:
    time = np.broadcast_to(time, (len(x), 1))
    return mlp(params, np.concatenate([observation, x, time], -1))


def flow_loss(s: Setting) -> Loss:
    """The straight path from the table's noise to the logged actions."""
    a, z = s.batch.action, normal_table(s.batch.action.shape)
    t = uniform_table(s.batch.reward.shape, 0.0, 1.0)[:, None].astype(float)
    return lambda v: ((velocity(v, s.batch.observation, (1 - t) * z + t * a, t) - (a - z)) ** 2).mean()


def ifql(s: Setting, imitated: Callable[[Head, np.ndarray], np.ndarray] | None = None) -> Expected:
    losses, _, metrics = implicit(s, imitated)
    losses["flow"] = flow_loss(s)
    if s.config.extraction == "distilled":
        losses["policy"], of_policy = distilled(s)
        metrics |= of_policy
    params, values = of_losses(s, losses)
    target = follow(s.target["critic"], s.params["critic"], s.config.target_rate)
    return Expected(params, {"critic": target}, metrics | values)


def deas(s: Setting) -> Expected:
    return ifql(s, as_distribution)


def best_draw(s: Setting, observation: np.ndarray) -> np.ndarray:
    """QC's action: of several draws of the flow the best by the critics."""
    c = s.config
    drawn, values = [], []
    for z in normal_table((len(observation), c.candidates, DIMENSIONS)).swapaxes(0, 1):
        x = z
        for t in np.arange(c.flow_steps) / c.flow_steps:
            x = x + velocity(s.params["flow"], observation, x, t) / c.flow_steps
        drawn.append(np.clip(x, -1, 1))
        q = s.head.value(critics(s.params["critic"], observation, drawn[-1]))
        values.append(q.min(0) if c.aggregation == "min" else q.mean(0))
    return np.stack(drawn)[np.argmax(values, 0), np.arange(len(observation))]


def one_step(pi: Tree, observation: np.ndarray) -> np.ndarray:
    return mlp(pi, np.concatenate([observation, normal_table((len(observation), DIMENSIONS))], -1))


def distilled(s: Setting) -> tuple[Loss, dict[str, Any]]:
    """The loss of FQL's policy, and what is reported of it."""
    c, h, b = s.config, s.head, s.batch
    x, width = normal_table(b.action.shape), 1 / c.flow_steps
    for t in np.arange(c.flow_steps) * width:
        field = lambda x, t: velocity(s.params["flow"], b.observation, x, t)
        if c.integrator == "midpoint":
            x = x + width * field(x + width / 2 * field(x, t), t + width / 2)
        else:
            x = x + width * field(x, t)
    box = lambda x: np.clip(x, -1, 1)
    distillation = lambda pi: ((one_step(pi, b.observation) - box(x)) ** 2).mean()
    action = lambda pi: box(one_step(pi, b.observation))
    q = lambda pi: h.value(critics(s.params["critic"], b.observation, action(pi))).mean(0)
    of_policy = q(s.params["policy"])
    scale = 1 / np.abs(of_policy).mean() if c.normalize_q else 1.0
    metrics = {"distillation": distillation(s.params["policy"]), "policy_q": of_policy.mean()}
    return lambda pi: c.alpha * distillation(pi) - scale * q(pi).mean(), metrics


def fql(s: Setting) -> Expected:
    c, h, b = s.config, s.head, s.batch
    is_distilled, following = c.extraction == "distilled", b.next_observation
    action = (
        np.clip(one_step(s.params["policy"], following), -1, 1) if is_distilled else best_draw(s, following)
    )
    q_next = critics(s.target["critic"], following, action)
    together = smallest(h, q_next) if c.aggregation == "min" else q_next.mean(0)  # of outputs that are values
    backup = b.reward, c.discount * b.discount, together
    losses: dict[str, Loss] = {"critic": s.critic_loss(h.target(*backup)), "flow": flow_loss(s)}
    metrics = {"q": s.q(s.params["critic"]).mean(), "clipped": h.clipped(*backup)}
    if is_distilled:
        losses["policy"], of_policy = distilled(s)
        metrics |= of_policy
    params, values = of_losses(s, losses)
    target = follow(s.target["critic"], s.params["critic"], c.target_rate)
    return Expected(params, {"critic": target}, metrics | values)


def together(s: Setting, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
    """Outputs of all critics as one, and what is taken off its value; means of outputs that are values."""
    if s.config.aggregation == "min":
        return smallest(s.head, outputs), 0.0
    q = s.head.value(outputs)
    deviation = np.sqrt(((q - q.mean(0)) ** 2).mean(0))
    return outputs.mean(0), s.config.deviations * deviation * (s.config.aggregation == "pessimistic")


def td3(s: Setting, penalty: Callable[[np.ndarray], np.ndarray], actor: Callable[..., Any]) -> Expected:
    """Twin delayed critics; ``penalty`` of the next action, ``actor`` loss from (Q [E, B], pi - a)."""
    c, h, b = s.config, s.head, s.batch
    mode = np.tanh(mlp(s.target["policy"], b.next_observation))
    noise = np.clip(c.policy_noise * normal_table(mode.shape), -c.noise_clip, c.noise_clip)
    action = np.clip(mode + noise, -1, 1)
    discount = c.discount * b.discount
    q_next, off = together(s, critics(s.target["critic"], b.next_observation, action))
    backup = b.reward - discount * (penalty(action) + off), discount, q_next
    loss = s.critic_loss(h.target(*backup))
    metrics = {
        "critic_loss": loss(s.params["critic"]),
        "q": s.q(s.params["critic"]).mean(),
        "clipped": h.clipped(*backup),
    }
    params = descend(s.params, c.learning_rate, critic=loss)
    if (s.step + 1) % c.policy_delay:
        return Expected(params, s.target, metrics | {"policy_loss": 0, "cloning": 0})

    def q_and_distance(pi: Tree) -> tuple[np.ndarray, np.ndarray]:
        a = np.tanh(mlp(pi, b.observation))
        return h.value(critics(params["critic"], b.observation, a)), a - b.action

    policy_loss, cloning = actor(*q_and_distance(s.params["policy"]))
    metrics |= {
        "policy_loss": c.policy_delay * policy_loss(*q_and_distance(s.params["policy"])),
        "cloning": c.policy_delay * cloning,
    }
    params = descend(params, c.learning_rate, policy=lambda pi: policy_loss(*q_and_distance(pi)))
    return Expected(params, follow(s.target, {k: params[k] for k in s.target}, c.target_rate), metrics)


def td3_bc(s: Setting) -> Expected:
    def actor(q: np.ndarray, distance: np.ndarray) -> tuple[Callable[..., Any], float]:
        scale = s.config.alpha / np.abs(q[0]).mean()
        return lambda q, distance: -scale * q[0].mean() + (distance**2).mean(), (distance**2).mean()

    return td3(s, lambda action: 0 * s.batch.reward, actor)


def plain_td3(s: Setting) -> Expected:
    def actor(q: np.ndarray, distance: np.ndarray) -> tuple[Callable[..., Any], float]:
        return lambda q, distance: -q[0].mean(), 0.0

    expected = td3(s, lambda action: 0 * s.batch.reward, actor)
    del expected.metrics["cloning"]
    return expected


def rebrac(s: Setting) -> Expected:
    def actor(q: np.ndarray, distance: np.ndarray) -> tuple[Callable[..., Any], float]:
        def aggregated(q: np.ndarray) -> np.ndarray:
            if s.config.aggregation == "min":
                return q.min(0)
            return q.mean(0) - s.config.deviations * q.std(0) * (s.config.aggregation == "pessimistic")

        scale = 1 / np.abs(aggregated(q)).mean()
        cloning = lambda distance: (distance**2).sum(-1).mean()
        loss = lambda q, distance: s.config.policy_cloning * cloning(distance) - scale * aggregated(q).mean()
        return loss, cloning(distance)

    def penalty(action: np.ndarray) -> np.ndarray:
        distance = ((action - s.batch.next_action) ** 2).sum(-1)
        return s.config.critic_cloning * np.where(s.batch.has_next_action == 1, distance, 0)

    return td3(s, penalty, actor)


def sac_n(s: Setting) -> Expected:
    c, h, b = s.config, s.head, s.batch
    entropy = -squashed(s.params["policy"], b.observation, 1)[1].mean()
    params, due = s.params, (s.step + 1) % c.policy_delay == 0
    rate = lambda adam: adam.learning_rate or c.learning_rate
    if due:
        surplus = entropy - (-DIMENSIONS if c.target_entropy is None else c.target_entropy)
        params = descend(params, rate(c.temperature_optimiser), log_alpha=lambda x: x * surplus)
    alpha = np.exp(params["log_alpha"])

    def policy_loss(pi: Tree) -> float:
        action, log_prob = squashed(pi, b.observation, 1)
        q = h.value(critics(s.params["critic"], b.observation, action[0]))
        return (alpha * log_prob[0] - (q.mean(0) if c.subset else q.min(0))).mean()

    improved = {"policy_loss": policy_loss(params["policy"]), "entropy": entropy}
    metrics = {"alpha": alpha} | {name: due * c.policy_delay * x for name, x in improved.items()}
    if due:
        params = descend(params, rate(c.policy_optimiser), policy=policy_loss)
    action, log_prob = squashed(params["policy"], b.next_observation, 1)
    discount = c.discount * b.discount
    q_next = critics(s.target["critic"], b.next_observation, action[0])
    if c.subset:
        next_key = jax.random.split(jax.random.key(0), 3)[1]
        q_next = q_next[jax.random.permutation(jax.random.fold_in(next_key, 1), c.critics)[: c.subset]]
    bonus = -alpha * log_prob[0] * c.backup_entropy
    backup = b.reward + discount * bonus, discount, smallest(h, q_next)
    td_loss = s.critic_loss(h.target(*backup))
    metrics["clipped"] = h.clipped(*backup)

    def critic_loss(q: Tree) -> float:
        return td_loss(q) + c.diversity * similarity(s, q)

    q = s.q(params["critic"])
    metrics |= {"critic_loss": critic_loss(params["critic"]), "q": q.mean(), "q_std": q.std(0).mean()}
    params = descend(params, rate(c.critic_optimiser), critic=critic_loss)
    moved = c.target_rate * ((s.step + 1) % c.target_period == 0)
    return Expected(params, {"critic": follow(s.target["critic"], params["critic"], moved)}, metrics)


def similarity(s: Setting, params: Tree) -> float:
    """EDAC's E[sum_{i != j} <g_i, g_j>] / (N - 1); action gradients by a complex step, exact to rounding."""
    b, tiny = s.batch, 1e-30
    gradient = np.stack(
        [
            s.head.value(critics(params, b.observation, b.action + 1j * tiny * axis)).imag / tiny
            for axis in np.eye(DIMENSIONS)
        ],
        -1,
    )
    length = np.linalg.norm(gradient, axis=-1, keepdims=True)
    unit = gradient / np.where(length > 0, length, np.inf)  # where all units are dead there is no direction
    cosine = np.einsum("ibd,jbd->ijb", unit, unit)
    members = len(unit)
    return sum(cosine[i, j].mean() for i in range(members) for j in range(members) if i != j) / (members - 1)


def cql(s: Setting) -> Expected:
    discrete = "q" in s.params
    c, name = s.config, "q" if discrete else "critic"
    td_loss, values, log_proposal, data, rest, metrics = (cql_discrete if discrete else cql_continuous)(s)
    frozen = special.softmax(values(s.params[name]), -1)

    def gap(q: Tree) -> Any:
        """Of each critic: values [..., B, N] are pushed down, the data's [..., B] up."""
        v = values(q)
        if c.variant == "h":
            return (special.logsumexp(v - log_proposal, -1) - data(q)).mean(-1)
        return ((frozen * v).sum(-1) - data(q)).mean(-1) if c.variant == "rho" else v.std(-1).mean(-1)

    multiplier = np.clip(np.exp(s.params["log_multiplier"]), 0, 1e6) if c.target_gap else 1.0
    here = gap(s.params[name])
    rates = dict.fromkeys(("critic", "q", "log_multiplier"), c.learning_rate)
    losses: dict[str, Loss] = rest | {name: lambda q: td_loss(q) + multiplier * c.weight * np.sum(gap(q))}
    if c.target_gap:
        losses["log_multiplier"] = lambda x: (
            -np.clip(np.exp(x), 0, 1e6) * np.mean(c.weight * here - c.target_gap)
        )
    params = dict(s.params)
    for part, loss in losses.items():
        params[part] = descend(s.params, rates.get(part, c.policy_learning_rate), **{part: loss})[part]
    metrics |= {
        "critic_loss": td_loss(s.params[name]),
        "conservative_gap": np.mean(here),
        "weight": multiplier * c.weight,
        "q": data(s.params[name]).mean(),
    }
    return Expected(params, {name: follow(s.target[name], params[name], c.target_rate)}, metrics)


def cql_continuous(s: Setting) -> tuple:
    c, h, b = s.config, s.head, s.batch
    alpha, pi = np.exp(s.params["log_alpha"]), s.params["policy"]
    next_action, next_log_prob = squashed(pi, b.next_observation, c.samples if c.max_backup else 1)
    q_next = critics(s.target["critic"], b.next_observation, next_action)
    q_next = smallest(h, pick(q_next, h.value(q_next).argmax(1), 1))  # each critic's best action
    discount = c.discount * b.discount
    bonus = discount * alpha * next_log_prob[0] if c.backup_entropy and not c.max_backup else 0
    backup = b.reward - bonus, discount, q_next
    td_loss = s.critic_loss(h.target(*backup))

    action, log_proposal = squashed(pi, b.observation, c.samples)
    if c.variant == "h":
        other, other_log = squashed(pi, b.next_observation, c.samples)
        random = uniform_table((c.samples, len(b.reward), DIMENSIONS), -1, 1)
        action = np.concatenate([action, other, random])
        log_proposal = np.concatenate(
            [log_proposal, other_log, np.full(random.shape[:2], -DIMENSIONS * np.log(2))]
        )

    def values(q: Tree) -> np.ndarray:
        return np.moveaxis(h.value(critics(q, b.observation, action)), 1, -1)

    def policy_loss(x: Tree) -> float:
        a, log_prob = squashed(x, b.observation, 1)
        return (alpha * log_prob - h.value(critics(s.params["critic"], b.observation, a)).min(0)).mean()

    entropy = -squashed(pi, b.observation, 1)[1].mean()
    rest = {"policy": policy_loss, "log_alpha": lambda x: x * (entropy + DIMENSIONS)}
    metrics = {
        "policy_loss": policy_loss(pi),
        "entropy": entropy,
        "alpha": alpha,
        "clipped": h.clipped(*backup),
    }
    return td_loss, values, log_proposal.T, s.q, rest, metrics


def cql_discrete(s: Setting) -> tuple:
    td_loss, all_values, data, clipped = q_learning(s)
    return td_loss, all_values, 0.0, data, {}, {"clipped": clipped}


def q_learning(s: Setting) -> tuple[Loss, Loss, Loss, float]:
    """The TD loss, the values [B, A], and those of the logged actions [B], as functions of the parameters.

    And the share of targets beyond the support.
    """
    c, h, b = s.config, s.head, s.batch

    def outputs(q: Tree, observation: np.ndarray) -> np.ndarray:
        return mlp(q, observation).reshape(len(observation), ACTIONS, -1)

    slow = outputs(s.target["q"], b.next_observation)
    chooser = outputs(s.params["q"], b.next_observation) if c.double else slow
    q_next, bonus = pick(slow, h.value(chooser).argmax(-1), 1), 0.0
    if temperature := getattr(c, "temperature", 0.0):
        q_next, bonus = soft_maximum(h, slow, temperature)
    weight = np.ones(len(b.reward))
    if getattr(c, "sarsa", False):
        q_next, weight = pick(slow, b.next_action, 1), np.where(b.discount == 0, 1, b.has_next_action)
    discount, reward = c.discount * b.discount, b.reward
    if munchausen := getattr(c, "munchausen", 0.0):
        policy = special.softmax(h.value(outputs(s.target["q"], b.observation)) / temperature, -1)
        chance = pick(policy[..., None], b.action, 1)[..., 0]
        gained = np.maximum(temperature * np.log(chance), c.munchausen_floor)
        reward = reward + munchausen * gained
    backup = reward + discount * bonus, discount, q_next
    y = h.target(*backup)

    def logged(q: Tree) -> np.ndarray:
        return pick(outputs(q, b.observation), b.action, 1)

    return (
        lambda q: (weight * h.loss(logged(q), y)).mean(),
        lambda q: h.value(outputs(q, b.observation)),
        lambda q: h.value(logged(q)),
        h.clipped(*backup),
    )


def soft_maximum(head: Head, outputs: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, K], of scalars or logits, whose value with the bonus [B] is that of soft Q-learning."""
    policy = special.softmax(head.value(outputs) / temperature, -1)
    mean = lambda x: (policy[..., None] * x).sum(1)
    mixed = mean(outputs) if outputs.shape[-1] == 1 else np.log(mean(special.softmax(outputs, -1)))
    return mixed, temperature * special.entr(policy).sum(-1)


def dqn(s: Setting) -> Expected:
    loss, _, data, clipped = q_learning(s)
    params = descend(s.params, s.config.learning_rate, q=loss)
    due = (s.step + 1) % s.config.target_period == 0
    target = follow(s.target["q"], params["q"], s.config.target_rate) if due else s.target["q"]
    metrics = {"critic_loss": loss(s.params["q"]), "q": data(s.params["q"]).mean(), "clipped": clipped}
    return Expected(params, {"q": target}, metrics)


def cqn(s: Setting) -> Expected:
    c, h, b = s.config, s.head, s.batch
    walk = functools.partial(cqn_reference.walk, levels=c.levels, size=DIMENSIONS)
    action = walk(s.params["q"], b.next_observation, cqn_reference.greedy(h.value))[2]
    backup = [np.broadcast_to(x[:, None], (len(x), DIMENSIONS)) for x in (b.reward, c.discount * b.discount)]
    every, bins, _ = walk(s.target["q"], b.next_observation, cqn_reference.follow(action))
    slow = cqn_reference.picked(every, bins)
    y = [h.target(*backup, at_level) for at_level in slow]

    def terms(q: Tree) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The losses [L, B, D], those of demonstrations [L, B, D, bins], and the values [L, B, D]."""
        every, bins, _ = walk(q, b.observation, cqn_reference.follow(b.action))
        logged = cqn_reference.picked(every, bins)
        td = np.stack([h.loss(one, target) for one, target in zip(logged, y, strict=True)])
        fosd = h.dominance(logged[..., None, :], every)
        margin = np.maximum(c.margin - (h.value(logged)[..., None] - h.value(every)), 0)
        return td, fosd, margin, h.value(logged)

    def loss(q: Tree) -> float:
        td, fosd, margin, _ = terms(q)
        return c.td_weight * td.mean() + c.dominance_weight * fosd.mean() + c.margin_weight * margin.mean()

    params = descend(s.params, c.learning_rate, q=loss)
    names = ("critic_loss", "dominance_loss", "margin_loss", "q")
    metrics = {name: term.mean() for name, term in zip(names, terms(s.params["q"]), strict=True)}
    metrics["clipped"] = np.mean([h.clipped(*backup, at_level) for at_level in slow])
    return Expected(params, {"q": follow(s.target["q"], params["q"], c.target_rate)}, metrics)


def bins_and_contexts(action: np.ndarray, levels: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Of actions [B, D]: the bin [B, T] of every token and what it sees [B, T, D], by cutting one interval each."""
    low, high = -np.ones_like(action), np.ones_like(action)
    chosen, seen = [], []
    for token in range(levels * action.shape[1]):
        d = token % action.shape[1]
        seen.append((low + high) / 2)
        width = (high[:, d] - low[:, d]) / bins
        chosen.append(np.floor((action[:, d] - low[:, d]) / width).astype(int))
        low[:, d] += chosen[-1] * width
        high[:, d] = low[:, d] + width
    return np.stack(chosen, 1), np.stack(seen, 1)


def member(params: Tree, *index: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[index], params)


def arsq_parts(s: Setting, params: Tree, bins: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V's outputs [E, B, K], and the advantages [E, B, T, n] of all bins."""
    c, observation = s.config, s.batch.observation
    repeated = np.broadcast_to(observation[:, None], (*bins.shape, observation.shape[-1]))
    v, u = [], []
    for i in range(c.critics):
        v.append(mlp(member(params["value"], i), observation))
        every = mlp(member(params["advantage"], i, 0), np.concatenate([repeated, seen], -1))
        blocks = every.reshape(*bins.shape, bins.shape[1], c.bins)
        u.append(np.stack([blocks[:, t, t] for t in range(bins.shape[1])], 1))
    scaled = np.exp(np.stack(u) / c.temperature)
    return np.stack(v), c.temperature * np.log(scaled / scaled.sum(-1, keepdims=True))


def arsq(s: Setting) -> Expected:
    """With the scalar head the paper's loss as it stands; with others V and the advantages apart."""
    c, h, b = s.config, s.head, s.batch
    bins, seen = bins_and_contexts(b.action, c.levels, c.bins)
    row, token = np.indices(bins.shape)
    other = np.arange(c.bins) != bins[..., None]
    slow = smallest(h, np.stack([mlp(member(s.target["q"]["value"], i), b.next_observation) for i in (0, 1)]))
    y = b.reward + c.discount * b.discount * h.value(slow)

    def parts(q: Tree) -> tuple[np.ndarray, np.ndarray, float]:
        v, advantages = arsq_parts(s, q, bins, seen)
        logged = advantages[:, row, token, bins]
        if c.bc == "cql":
            behind = np.log((np.exp(advantages) * other).sum(-1)) - logged
            cloning = np.maximum(behind, c.bc_clip)
        else:
            behind = np.maximum(advantages - logged[..., None], c.bc_clip)
            cloning = (behind * other).sum(-1) / (c.bins - 1)
        return v, logged.sum(-1), cloning.sum() / len(bins)

    v0, a0, cloning0 = parts(s.params["q"])
    backups = [(b.reward - a, c.discount * b.discount, slow) for a in a0]
    critic_loss = lambda v: sum(
        h.loss(x, h.target(*backup)).mean() for x, backup in zip(v, backups, strict=True)
    )
    advantage_loss = lambda a: ((h.value(v0) + a - y) ** 2).mean(1).sum()

    def loss(q: Tree) -> float:
        v, a, cloning = parts(q)
        if v.shape[-1] == 1:
            return ((v[..., 0] + a - y) ** 2).mean(1).sum() + c.bc_weight * cloning
        return critic_loss(v) + advantage_loss(a) + c.bc_weight * cloning

    params = descend(s.params, c.learning_rate, q=loss)
    metrics = {
        "critic_loss": critic_loss(v0),
        "advantage_loss": advantage_loss(a0),
        "bc_loss": cloning0,
        "q": (h.value(v0) + a0).mean(),
        "v": h.value(v0).mean(),
        "clipped": np.mean([h.clipped(*backup) for backup in backups]),
    }
    return Expected(params, {"q": follow(s.target["q"], params["q"], c.target_rate)}, metrics)


ORACLES: dict[str, Callable[[Setting], Expected]] = {
    "arsq": arsq,
    "bc": bc,
    "cql": cql,
    "cqn": cqn,
    "deas": deas,
    "dqn": dqn,
    "edac": sac_n,
    "fql": fql,
    "ifql": ifql,
    "iql": iql,
    "rebrac": rebrac,
    "sac": sac_n,
    "sac_n": sac_n,
    "td3": plain_td3,
    "td3_bc": td3_bc,
}

# ---- one update ---------------------------------------------------------------------------------------------

# Each differs from its neighbour in something that shows in numbers: rates, discount, weights.
COMMON = {"hidden": (4,), "learning_rate": 0.1}
DISCOUNTED = {**COMMON, "discount": 0.9, "target_rate": 0.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "arsq": {**DISCOUNTED, "bins": 3, "temperature": 0.6, "bc_clip": -0.3, "network": Architecture()},
    "bc": COMMON,
    "cql": {**DISCOUNTED, "policy_learning_rate": 0.03, "weight": 0.7, "samples": 3},
    "cqn": {
        **DISCOUNTED | {"levels": 2, "bins": 3, "features": 3, "network": Architecture()},
        **COMMON | {"td_weight": 0.7, "dominance_weight": 0.4, "margin_weight": 0.3, "margin": 0.5},
    },
    "deas": {**DISCOUNTED, "candidates": 3, "flow_steps": 2, "network": Architecture()},
    "dqn": DISCOUNTED,
    "edac": {**DISCOUNTED, "critics": 3, "diversity": 0.7},
    "fql": {**DISCOUNTED, "alpha": 0.6, "flow_steps": 3, "network": Architecture()},
    "ifql": {**DISCOUNTED, "candidates": 3, "flow_steps": 2, "network": Architecture()},
    "iql": DISCOUNTED,
    "rebrac": {**DISCOUNTED, "policy_cloning": 0.3, "critic_cloning": 0.4},
    "sac": DISCOUNTED,
    "sac_n": {**DISCOUNTED, "critics": 3},
    "td3": DISCOUNTED,
    "td3_bc": DISCOUNTED,
}
CONTINUOUS = (
    *("arsq", "bc", "cql", "cqn", "edac", "fql", "ifql", "iql", "rebrac", "sac", "sac_n", "td3", "td3_bc"),
)
DISCRETE = ("bc", "cql", "dqn", "iql")

# What its code's settings have beside those of SAC's: rates of each part, and target networks that wait.
VAGRAM = {"target_entropy": -0.7, "target_period": 2} | {
    f"{part}_optimiser": Adam(learning_rate=rate)
    for part, rate in (("critic", 0.02), ("policy", 0.03), ("temperature", 0.4))
}
# Its targets here are without entropy, as RLPD's are on some tasks.
REDQ = {"critics": 3, "subset": 2, "policy_delay": 2, "backup_entropy": False}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    *(("continuous", agent, "scalar", {}) for agent in CONTINUOUS),
    *(("continuous", agent, "hl_gauss", {}) for agent in ("cql", "edac", "iql", "td3_bc")),
    *(("continuous", agent, "quantile", {}) for agent in ("cql", "rebrac", "sac_n")),
    ("continuous", "cqn", "c51", {}),
    ("continuous", "arsq", "hl_gauss", {"bc": "margin"}),
    ("continuous", "arsq", "quantile", {}),
    ("continuous", "cql", "scalar", {"variant": "rho"}),
    ("continuous", "cql", "scalar", {"variant": "var"}),
    ("continuous", "cql", "scalar", {"target_gap": 0.4}),
    ("continuous", "cql", "scalar", {"backup_entropy": True}),
    ("continuous", "cql", "hl_gauss", {"max_backup": True, "samples": 5}),
    ("continuous", "fql", "hl_gauss", {"aggregation": "min", "normalize_q": True, "integrator": "midpoint"}),
    ("continuous", "fql", "quantile", {"extraction": "best_of", "candidates": 4}),
    # IFQL's code but for the target of the value
    ("continuous", "deas", "hl_gauss", {"extraction": "distilled"}),
    ("continuous", "iql", "scalar", {"layer_norm": True, "critics": 3}),
    ("continuous", "iql", "c51", {"unit_policy": True, "slow_advantage": False, "gumbel": 2.0}),
    ("continuous", "rebrac", "quantile", {"critics": 3, "aggregation": "pessimistic", "deviations": 0.7}),
    *(("discrete", agent, "scalar", {}) for agent in DISCRETE),
    *(("discrete", "dqn", head, {}) for head in heads.NAMES if head != "scalar"),
    ("discrete", "iql", "c51", {}),
    ("discrete", "cql", "two_hot", {}),
    ("discrete", "cql", "scalar", {"variant": "rho"}),
    ("discrete", "cql", "scalar", {"variant": "var"}),
    ("discrete", "cql", "scalar", {"target_gap": 0.4}),
    ("discrete", "cql", "scalar", {"double": False}),
    ("continuous", "sac", "hl_gauss", REDQ),
    ("continuous", "sac", "scalar", VAGRAM),
    ("discrete", "dqn", "scalar", {"double": False}),
    ("discrete", "dqn", "scalar", {"temperature": 0.6}),
    ("discrete", "dqn", "c51", {"temperature": 0.6}),
    ("discrete", "dqn", "hl_gauss", {"temperature": 0.6, "munchausen": 0.9, "munchausen_floor": -0.6}),
    ("discrete", "dqn", "c51", {"double": False, "target_period": 2, "target_rate": 1.0}),
    ("discrete", "dqn", "c51", {"sarsa": True}),
]


def name_of(case: tuple[str, str, str, dict[str, Any]]) -> str:
    fields = {field: getattr(value, "learning_rate", value) for field, value in case[3].items()}
    return "-".join([*case[:3], *(f"{field}={value}" for field, value in fields.items())])


class Case(NamedTuple):
    agent: str
    config: Any
    learner: Learner
    update: Callable[..., Any]  # compiled, with its draws taken from a table
    draws: int  # how many keys it draws with
    head: str
    state: State
    batch: Transition

    def updated(self, step: int = 0, **fields: Any) -> tuple[State, dict[str, Any]]:
        state = self.state._replace(step=np.int32(step))
        return self.update(state, self.batch._replace(**fields), jax.random.key(0))


def normal_table(shape: tuple[int, ...]) -> np.ndarray:
    """Stands in for `jax.random.normal`: the same numbers for the same shape, whatever the key."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def uniform_table(shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    return np.random.default_rng(shape).uniform(low, high, shape).astype(np.float32)


def compile_without_chance(learner: Learner, *arguments: Any) -> tuple[Callable[..., Any], int]:
    """The update with its draws taken from the tables, and how many different keys it draws with."""
    keys = {}  # they are tracers: alike only if identical

    def normal(key: Any, shape: Any = (), dtype: Any = np.float32) -> np.ndarray:
        keys[id(key)] = key
        return normal_table(shape)

    def uniform(key: Any, shape: Any, minval: float, maxval: float) -> np.ndarray:
        keys[id(key)] = key
        return uniform_table(shape, minval, maxval)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", normal)
        patch.setattr(jax.random, "uniform", uniform)
        lowered = jax.jit(learner.update).lower(*arguments)
    return lowered.compile(), len(keys)


def random_batch(discrete: bool, rows: int = 8) -> Transition:
    """With ends of episodes of both kinds among its rows."""
    rng = np.random.default_rng(0)

    def action() -> np.ndarray:
        if discrete:
            return rng.integers(ACTIONS, size=rows).astype(np.int32)
        return rng.uniform(-1, 1, (rows, DIMENSIONS)).astype(np.float32)

    def observation() -> np.ndarray:
        return rng.normal(size=(rows, 3)).astype(np.float32)

    return Transition(
        observation(),
        action(),
        rng.normal(size=rows).astype(np.float32),
        np.float32([1, 1, 0, 1, 1, 0, 1, 1]),
        observation(),
        action(),
        np.float32([1, 1, 0, 1, 0, 0, 1, 0]),
    )


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest) -> Case:
    kind, agent, head, overrides = request.param
    discrete = kind == "discrete"
    config = agents.get(agent).Config(**{**SETTINGS[agent], **overrides})
    spec = Spec((3,), ACTIONS if discrete else DIMENSIONS, discrete)
    learner = agents.get(agent).make(config, spec, heads.make(head, LOW, HIGH, SIZE), optax.sgd)
    batch = random_batch(discrete)
    state = jax.eval_shape(learner.init, jax.random.key(0), batch)
    rng = np.random.default_rng(1)
    # Anything but an initialisation: biases, targets and temperatures that differ from their defaults.
    fill = lambda x: rng.normal(0, 0.7, x.shape).astype(np.float32)
    state = state._replace(
        params=jax.tree.map(fill, state.params),
        target=jax.tree.map(fill, state.target),
        optimiser=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.optimiser),
        step=np.int32(0),
    )
    update, draws = compile_without_chance(learner, state, batch, jax.random.key(0))
    return Case(agent, config, learner, update, draws, head, state, batch)


def float64(tree: Tree) -> Tree:
    """Floats in float64, integers as they are."""
    wide = lambda x: np.array(x, np.float64 if np.asarray(x).dtype.kind == "f" else None)
    return jax.tree.map(wide, tree)


def assert_close(path: Any, actual: Any, expected: Any) -> None:
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("step", [0, 1])
def test_one_update_is_the_docstrings_equations(case: Case, step: int) -> None:
    """For TD3's heirs, step 0 leaves the policy and all targets alone; step 1 moves them."""
    state, metrics = case.updated(step)
    expected = ORACLES[case.agent](
        Setting(
            case.config,
            numpy_head(case.head),
            float64(case.state.params),
            float64(case.state.target),
            step,
            float64(case.batch),
        )
    )
    assert state.step == step + 1
    for part in ("params", "target"):
        before, after, wanted = (float64(getattr(of, part)) for of in (case.state, state, expected))
        assert jax.tree.structure(after) == jax.tree.structure(wanted)
        moves = (jax.tree.map(np.subtract, of, before) for of in (after, wanted))
        jax.tree.map_with_path(assert_close, *moves)
    assert set(metrics) == set(expected.metrics)
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_actions_are_those_of_the_parameters_and_not_of_their_targets(case: Case) -> None:
    """But for CQN's, which are of its targets; the targets here are no copies."""
    act = jax.jit(case.learner.act)
    other = case.state._replace(target=jax.tree.map(lambda x: -x, case.state.target))
    taken, others = (act(state, case.batch.observation, jax.random.key(0)) for state in (case.state, other))
    if case.agent == "cqn":
        assert (taken != others).any()
    else:
        np.testing.assert_array_equal(taken, others)


def test_critics_say_what_their_parameters_do(case: Case) -> None:
    if case.agent == "bc":
        assert case.learner.critics is None
        return
    assert case.learner.critics is not None
    setting = Setting(
        case.config,
        numpy_head(case.head),
        float64(case.state.params),
        float64(case.state.target),
        0,
        float64(case.batch),
    )
    if case.agent == "cqn":
        walk, batch = cqn_reference.follow(setting.batch.action), setting.batch
        every, bins, _ = cqn_reference.walk(setting.params["q"], batch.observation, walk, 2, DIMENSIONS)
        expected = setting.head.value(cqn_reference.picked(every, bins)).mean((0, 2))[None]
    elif case.agent == "arsq":
        bins, seen = bins_and_contexts(setting.batch.action, case.config.levels, case.config.bins)
        v, advantages = arsq_parts(setting, setting.params["q"], bins, seen)
        rows, tokens = np.indices(bins.shape)
        expected = setting.head.value(v) + advantages[:, rows, tokens, bins].sum(-1)
    elif "q" in case.state.params:
        expected = q_learning(setting)[2](setting.params["q"])[None]
    else:
        expected = setting.q(setting.params["critic"])
    values = jax.jit(case.learner.critics)(case.state, case.batch.observation, case.batch.action)
    assert values.shape == expected.shape and values.shape[1:] == case.batch.reward.shape
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("agent", ["fql", "ifql", "iql"])
def test_who_acts_by_draws_takes_the_best_of_them(agent: str) -> None:
    """One step of FQL's policy; of several draws of a flow, or of IQL's policy, the critics' minimum decides."""
    fields: dict[str, Any] = {"candidates": 5} if agent == "iql" else {}
    if agent == "ifql":
        fields = {"integrator": "midpoint"}
    learner, batch = build("continuous", agent, network=Architecture(), **fields)
    state, key, rows = start(learner, batch), jax.random.key(3), random_batch(False).observation
    result = jax.jit(learner.act)(state, rows, key)
    params = float64(state.params)
    if agent == "fql":
        noise = np.asarray(jax.random.normal(key, (8, 2)))
        drawn = [mlp(params["policy"], np.concatenate([rows, noise], -1))]
    elif agent == "ifql":
        drawn = list(np.asarray(jax.random.normal(key, (8, 3, 2))).swapaxes(0, 1))
        for time in (0.0, 0.5):
            slope = lambda x, time: velocity(params["flow"], rows, x, time)
            drawn = [x + 0.5 * slope(x + 0.25 * slope(x, time), time + 0.25) for x in drawn]
    else:
        policy = networks.behaviour_policy(Spec((3,), 2), (4, 4), Architecture())
        drawn = list(policy.apply(state.params["policy"], rows).sample(seed=key, sample_shape=(5,)))
    actions = np.clip(np.stack(drawn), -1, 1)
    q = np.stack([critics(params["critic"], rows, action)[..., 0].min(0) for action in actions])
    expected = actions[q.argmax(0), np.arange(8)]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert agent == "fql" or len(set(q.argmax(0))) > 1


def test_exploration_is_what_its_settings_say() -> None:
    """TD3's normal noise in the box, draws of SAC's and IQL's policies, and DQN's epsilon, which falls on a line."""
    rows = np.tile(random_batch(False).observation[:1], (4000, 1))

    def explored(kind: str, agent: str, **fields: Any) -> tuple[Learner, State, Callable[..., Any]]:
        learner, batch = build(kind, agent, network=Architecture(), **fields)
        assert learner.explore is not None
        return learner, start(learner, batch), jax.jit(learner.explore)

    key = jax.random.key(0)
    learner, state, explore = explored("continuous", "td3", exploration_noise=0.05)
    mode = np.tanh(mlp(float64(state.params["policy"]), rows[:1]))
    noise = np.asarray(explore(state, rows, key)) - mode
    np.testing.assert_allclose(noise.mean(0), 0, atol=0.005)
    np.testing.assert_allclose(noise.std(0), 0.05, rtol=0.05)
    wide = {**state.params, "policy": jax.tree.map(lambda x: 50 * x, state.params["policy"])}
    assert np.abs(explore(state._replace(params=wide), rows, key)).max() == 1

    for agent in ("sac", "cql"):
        learner, state, explore = explored("continuous", agent)
        mean, log_std = np.split(mlp(float64(state.params["policy"]), rows[0]), 2)
        raw = np.arctanh(np.float64(explore(state, rows, key)))
        np.testing.assert_allclose(raw.mean(0), mean, atol=0.1 * np.exp(log_std).max())
        np.testing.assert_allclose(raw.std(0), np.exp(log_std), rtol=0.05)

    learner, state, explore = explored("continuous", "iql")
    policy = {**state.params["policy"], "log_std": np.full(DIMENSIONS, -3, np.float32)}
    noise = explore(state._replace(params={**state.params, "policy": policy}), rows, key) - np.tanh(
        mlp(float64(policy["body"]), rows[:1])
    )
    np.testing.assert_allclose(np.std(noise, 0), np.exp(-3), rtol=0.05)

    learner, state, explore = explored("discrete", "dqn", epsilon=0.1, epsilon_updates=100)
    best = jax.jit(learner.act)(state, rows, key)
    for step, epsilon in ((0, 1.0), (50, 0.55), (100, 0.1), (1000, 0.1)):
        other = np.mean(explore(state._replace(step=np.int32(step)), rows, key) != best)
        np.testing.assert_allclose(other, epsilon * (1 - 1 / ACTIONS), atol=0.03)


def poison(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``x`` with the rows marked True replaced by large values (any other integer action)."""
    wrong = (x + 1) % ACTIONS if x.dtype.kind == "i" else 1e6 * np.sign(x)
    return np.where(rows.reshape(-1, *[1] * (x.ndim - 1)), wrong, x)


def test_nothing_beyond_a_terminal_step_matters(case: Case) -> None:
    state, metrics = case.updated(1)
    beyond = poison(case.batch.next_observation, case.batch.discount == 0)
    poisoned, other = case.updated(1, next_observation=beyond)
    if case.agent == "cql" and "critic" in state.params and case.config.variant == "h":
        # The policy proposes actions at s' too, whatever s' is; their densities keep them harmless.
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(poisoned))
        same = lambda state, metrics: (state.params["policy"], metrics["critic_loss"])
        state, metrics, poisoned, other = (*same(state, metrics), *same(poisoned, other))
    jax.tree.map_with_path(assert_close, (state, metrics), (poisoned, other))


def test_the_next_action_matters_only_to_rebrac_and_sarsa_and_where_it_was_logged(case: Case) -> None:
    state, _ = case.updated(1)
    reads = case.agent == "rebrac" or getattr(case.config, "sarsa", False)
    unused = (case.batch.has_next_action == 0) | (not reads)
    poisoned, _ = case.updated(1, next_action=poison(case.batch.next_action, unused))
    jax.tree.map_with_path(assert_close, state, poisoned)


def test_rows_that_sarsa_cannot_learn_from_have_no_priority() -> None:
    """Nothing brings them nearer to their targets: prioritised replay would draw them again and again."""
    learner, batch = build("discrete", "dqn", sarsa=True)
    state = jax.eval_shape(learner.init, jax.random.key(0), batch)
    state = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)
    distance = jax.jit(learner.weighted)(state, batch, jnp.ones(len(batch.reward)), jax.random.key(0))[2]
    known = (batch.discount == 0) | (batch.has_next_action == 1)
    assert 0 < known.sum() < len(known)
    np.testing.assert_array_equal(distance > 0, known)


@pytest.mark.parametrize("agent", ["td3", "td3_bc"])
@pytest.mark.slow
def test_td3s_policy_asks_the_first_critic_alone(agent: str) -> None:
    """And no other is computed for it: 0 times what is not finite there would be in the gradient."""
    learner = agents.get(agent).make(
        agents.get(agent).Config(**SETTINGS[agent]), Spec((3,), DIMENSIONS), heads.scalar()
    )
    batch = random_batch(False)
    state = learner.init(jax.random.key(0), batch)
    broken = jax.tree.map(lambda x: x.at[1:].set(jnp.nan), state.params["critic"])
    state = state._replace(params={**state.params, "critic": broken}, step=jnp.int32(1))
    after, _ = learner.update(state, batch, jax.random.key(0))
    policies = jax.tree.leaves(after.params["policy"]), jax.tree.leaves(state.params["policy"])
    for new, old in zip(*policies, strict=True):
        assert np.isfinite(new).all() and (new != old).any()


@pytest.mark.parametrize("log_multiplier", [0.0, -1.0, 20.0])
def test_cqls_multiplier_is_that_of_the_authors_code(log_multiplier: float) -> None:
    """`CQLTrainer.train_from_torch` of aviralkumar2907/CQL, line by line, with its published weight and threshold."""
    rng = np.random.default_rng(0)
    q_rand, q_next, q_curr = rng.normal(0, 3, (3, 2, 8, 4))  # [critics, rows, samples]
    new_log_pis, curr_log_pis = rng.normal(size=(2, 8, 4))
    q_pred = rng.normal(size=(2, 8))
    random_density = np.log(0.5**DIMENSIONS)
    min_q_weight, lagrange_thresh = 5.0, 10.0
    alpha_prime = np.clip(np.exp(log_multiplier), 0.0, 1000000.0)
    min_qf_loss = []
    for i in range(2):
        cat_q = np.concatenate(
            [q_rand[i] - random_density, q_next[i] - new_log_pis, q_curr[i] - curr_log_pis], 1
        )
        loss = special.logsumexp(cat_q, axis=1).mean() * min_q_weight - q_pred[i].mean() * min_q_weight
        min_qf_loss.append(alpha_prime * (loss - lagrange_thresh))
    alpha_prime_loss = (-min_qf_loss[0] - min_qf_loss[1]) * 0.5

    config = agents.get("cql").Config(weight=min_q_weight, target_gap=lagrange_thresh)
    values = np.concatenate([q_rand, q_next, q_curr], -1)
    density = np.concatenate([np.full((8, 4), random_density), new_log_pis, curr_log_pis], -1)

    @jax.jit
    def weigh(values: Any, density: Any, q_pred: Any, log_multiplier: Any) -> tuple[Any, Any, Any]:
        gaps = continuous.sampled_gap("h", values, density, q_pred).mean(1)
        return penalty.weigh(config, gaps, log_multiplier)

    conservative, loss, weight = weigh(*map(np.float32, (values, density, q_pred, log_multiplier)))
    np.testing.assert_allclose(conservative, sum(min_qf_loss), rtol=1e-5)
    np.testing.assert_allclose(loss, alpha_prime_loss, rtol=1e-5)
    np.testing.assert_allclose(weight, alpha_prime * min_q_weight, rtol=1e-6)


def test_every_draw_has_its_own_key(case: Case) -> None:
    """The next action; SAC's action, which temperature and actor share; CQL's three kinds of proposals; CQN's ties.

    A flow's noise and times, and the noise that FQL's policy shares with the flow.
    """
    draws = {"cqn": 2, "td3": 1, "td3_bc": 1, "rebrac": 1, "sac": 2, "sac_n": 2, "edac": 2, "cql": 5}
    draws = (draws | {"fql": 4, "ifql": 2, "deas": 3}).get(case.agent, 0)
    if case.agent == "fql" and case.config.extraction == "best_of":
        draws = 3  # no policy to be distilled
    if case.agent == "cql" and case.config.variant != "h":
        draws = 3  # the policy's own proposals alone
    assert case.draws == (0 if (case.agent, "q" in case.state.params) == ("cql", True) else draws)


def test_where_a_temperature_starts() -> None:
    learner, batch = build("continuous", "sac", initial_alpha=0.1)
    assert np.exp(learner.init(jax.random.key(0), batch).params["log_alpha"]) == pytest.approx(0.1)
    low, high = agents.target_range("sac", agents.get("sac").Config(discount=0.5), Spec((3,), 2), -1.0, 1.0)
    assert (low, high) == pytest.approx((-3.0, 1 + 2 * np.log(2)))
    chosen = agents.get("sac").Config(discount=0.5, target_entropy=-5.0, initial_alpha=2.0)
    low, high = agents.target_range("sac", chosen, Spec((3,), 2), -1.0, 1.0)
    assert (low, high) == pytest.approx((-11.0, 1 + 4 * np.log(2)))
    # 0 is a target like any other, and not the sign for minus the number of dimensions.
    chosen = agents.get("sac").Config(discount=0.5, target_entropy=0.0)
    assert agents.target_range("sac", chosen, Spec((3,), 2), -1.0, 1.0)[0] == -1.0


def test_where_a_learner_starts() -> None:
    learner = agents.get("cql").make(
        agents.get("cql").Config(**SETTINGS["cql"]), Spec((3,), 2), heads.scalar()
    )
    state = jax.jit(learner.init)(jax.random.key(0), random_batch(False))
    assert state.step == 0
    assert state.params["log_alpha"] == 0
    assert state.params["log_multiplier"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.target, {"critic": state.params["critic"]})


# ---- networks and optimisers that settings choose ---------------------------------------------------------------

EVERY = [("continuous", agent) for agent in CONTINUOUS] + [("discrete", agent) for agent in DISCRETE]
# Those built by a module of another one; where networks are asked about and not what is done with them, that will do.
HEIRS = {"edac": "sac_n", "rebrac": "td3", "sac": "sac_n", "td3_bc": "td3"}
BUILDERS = [pytest.param(*pair, marks=[pytest.mark.long] * (pair[1] in HEIRS)) for pair in EVERY]
PUBLISHED = {  # initialisers of each agent's published code
    "arsq": "ppo",
    "bc": "pytorch",
    "cql": "rlkit",
    "cqn": "orthogonal",
    "dqn": "glorot",
    "edac": "rlkit",
    "fql": "glorot",
    "ifql": "glorot",
    "iql": "orthogonal",
    "rebrac": "rlkit",
    "sac": "glorot",
    "sac_n": "rlkit",
    "td3": "pytorch",
    "td3_bc": "pytorch",
}


def build(
    kind: str, agent: str, shape: Any = (3,), hidden: tuple[int, ...] = (4, 4), **fields: Any
) -> tuple[Learner, Transition]:
    """A learner on observations of this shape (images of uint8), or these shapes, and a batch for it."""
    discrete = kind == "discrete"
    sizes = ("bins", "candidates", "critics", "features", "flow_steps", "levels", "samples")
    small = {name: value for name, value in SETTINGS[agent].items() if name in sizes}
    config = agents.get(agent).Config(hidden=hidden, **small | fields)
    spec = Spec(shape, ACTIONS if discrete else DIMENSIONS, discrete)
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 256, (8, *shape)).astype(np.uint8 if len(shape) == 3 else np.float32)

    observation, following = (nest.map_structure(draw, shape) for _ in range(2))
    batch = random_batch(discrete)._replace(observation=observation, next_observation=following)
    return agents.get(agent).make(config, spec, heads.scalar()), batch


def layers(params: Tree) -> dict[str, Tree]:
    """{path: kernel and bias} of all dense layers."""
    dense: dict[str, Tree] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *outer, name = (str(part.key) for part in path)
        if outer and outer[-1].startswith("Dense"):
            dense.setdefault("/".join(outer), {})[name] = leaf
    return dense


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "agent"), BUILDERS)
def test_settings_reach_every_network(kind: str, agent: str) -> None:
    """By what initial parameters and traced updates are, without compiling any of them but ``init``."""
    assert agents.get(agent).Config().network.initialiser == PUBLISHED[agent]
    key = jax.random.key(0)
    has_policy = agent not in ("arsq", "cqn", "dqn") and (kind, agent) != ("discrete", "cql")
    network = Architecture(
        initialiser="rlkit", activation="silu", policy_layer_norm=has_policy, dropout=0.5 * has_policy
    )
    learner, batch = build(kind, agent, network=network, **({"policy_delay": 1} if "td3" in agent else {}))
    params = learner.init(key, batch).params
    for path, layer in layers(params).items():
        if not path.endswith("Dense_2"):
            np.testing.assert_array_equal(layer["bias"], np.float32(0.1), err_msg=path)
        else:
            last = 1e-3 if "policy" in path or "flow" in path else 3e-3
            assert max(np.abs(x).max() for x in layer.values()) <= last, path
    if has_policy:
        policy = params["flow" if agent == "ifql" else "policy"]
        norms = {str(path) for path, _ in jax.tree_util.tree_leaves_with_path(policy)}
        assert any("LayerNorm_1" in path for path in norms)

    plain, _ = build(kind, agent)
    state = jax.eval_shape(learner.init, key, batch)
    other = jax.eval_shape(plain.init, key, batch)
    code = lambda function, *inputs: str(jax.make_jaxpr(function)(*inputs))
    program, plain_program = code(learner.update, state, batch, key), code(plain.update, other, batch, key)
    more = program.count("random_bits") - plain_program.count("random_bits")
    assert (more > 0) == has_policy
    for of_one, its_state in ((learner, state), (plain, other)):
        drawn = code(of_one.act, its_state, batch.observation, key).count("random_bits")
        assert drawn == (agent in ("fql", "ifql")), "more than the noise that an action is made of"
    assert "logistic" in program and "custom_jvp_call[name=relu" not in program


@pytest.mark.parametrize(("kind", "agent"), EVERY)
def test_optimiser_settings_reach_their_networks(kind: str, agent: str) -> None:
    """A warm-up counts updates: the state of that network's optimiser, and no other, holds one number more."""

    def count(**fields: Any) -> dict[str, int]:
        learner, batch = build(kind, agent, **fields)
        state = jax.eval_shape(learner.init, jax.random.key(0), batch)
        return {name: len(jax.tree.leaves(of_one)) for name, of_one in state.optimiser.items()}

    names = [f.name for f in dataclasses.fields(agents.get(agent).Config) if f.name.endswith("_optimiser")]
    assert names
    constant = {name: Adam() for name in names}
    plain = count(**constant)
    for name in names:
        network = name.removesuffix("_optimiser").replace("temperature", "log_alpha")
        network = "q" if network == "critic" and "q" in plain else network
        expected = {of_one: number + (of_one == network) for of_one, number in plain.items()}
        assert count(**{**constant, name: Adam(warm_up=3)}) == expected


@pytest.mark.parametrize("agent", PUBLISHED)
def test_learning_rates_fall_only_where_published(agent: str) -> None:
    """Of IQL's policy alone, unless a setting says otherwise; other tests of updates choose their optimisers."""
    settings = dataclasses.asdict(agents.get(agent).Config())
    falling = [
        name for name in settings if name.endswith("_optimiser") and settings[name]["schedule"] != "constant"
    ]
    assert falling == ["policy_optimiser"] * (agent == "iql")


@pytest.mark.parametrize("agent", ["td3", "td3_bc", "rebrac", "sac"])
def test_a_delayed_policy_has_a_schedule_in_updates_of_its_agent(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so has SAC's temperature, which waits with its policy."""
    periods = set()

    def build_one(settings: Adam, rate: float, optimiser: Any, period: int = 1) -> Any:
        periods.add((settings.schedule, period))
        return optimiser(rate)

    for module in (td3_module, sac_n_module):
        monkeypatch.setattr(module, "build", build_one)
    late = ("policy", "temperature") if agent == "sac" else ("policy",)
    build("continuous", agent, policy_delay=3, **{f"{part}_optimiser": Adam("cosine") for part in late})
    assert periods == {("constant", 1), ("cosine", 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "agent", "fields"),
    [
        ("continuous", "td3", {}),
        ("continuous", "fql", {}),
        ("continuous", "fql", {"extraction": "best_of"}),
        ("continuous", "ifql", {"extraction": "distilled", "gumbel": 2.0}),
        ("discrete", "dqn", {}),
        ("discrete", "dqn", {"temperature": 0.5}),
        ("continuous", "cql", {"max_backup": True}),
        ("continuous", "cqn", {"margin_weight": 0.0, "dominance_weight": 0.0}),
        ("continuous", "arsq", {"bc_weight": 0.0}),
    ],
)
def test_settings_that_are_called_unused_change_no_program(
    kind: str, agent: str, fields: dict[str, Any]
) -> None:
    """Another setting changes it, or this would compare nothing."""

    def programs(**changes: Any) -> list[str]:
        learner, batch = build(kind, agent, **fields | changes)
        key = jax.random.key(0)
        state = jax.eval_shape(learner.init, key, batch)
        traced = (
            jax.make_jaxpr(learner.update)(state, batch, key),
            jax.make_jaxpr(learner.act)(state, batch.observation, key),
        )
        return [re.sub("0x[0-9a-f]+", "", str(program)) for program in traced]

    def another(value: Any) -> Any:
        if isinstance(value, Adam):
            return Adam(clip=1.0)
        if isinstance(value, str):
            return {"cql": "margin"}[value]
        if isinstance(value, float):
            return value / 2 or 1.0
        return not value if isinstance(value, bool) else value + 1

    config = agents.get(agent).Config(**fields)
    names = agents.unused(agent, config).keys()
    assert names
    plain = programs()
    assert programs(**{name: another(getattr(config, name)) for name in names}) == plain
    assert programs(target_rate=0.25) != plain


def test_heirs_call_the_same_settings_unused() -> None:
    for agent, of in {"td3_bc": "td3", "rebrac": "td3", "deas": "ifql"}.items():
        assert agents.get(agent).unused is agents.get(of).unused


def test_fqls_choice_among_draws_has_its_aggregation(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its targets: the best draw by the minimum of the critics, or by their mean."""
    chosen, make = [], flow_policy.make
    monkeypatch.setattr(flow_policy, "make", lambda *setting: chosen.append(setting[-1]) or make(*setting))
    for name in ("min", "mean"):
        build("continuous", "fql", extraction="best_of", aggregation=name)
    assert chosen == ["min", "mean"]


@pytest.mark.parametrize(("kind", "agent"), BUILDERS)
def test_every_agent_takes_images_histories_and_dictionaries(kind: str, agent: str) -> None:
    """Of any leading axes where it acts; an update keeps every shape and type of the state."""
    key = jax.random.key(0)
    shapes: list[tuple[Any, tuple[int, ...]]] = [({"goal": (3,), "view": (8, 8, 2)}, (4,))]
    shapes += [((8, 8, 2), (4,)), ((5, 3), (8,))] if agent in ("arsq", "cqn", "dqn", "iql", "td3") else []
    for shape, hidden in shapes:
        learner, batch = build(kind, agent, shape, hidden, network=Architecture(shift=2))
        state = jax.eval_shape(learner.init, key, batch)
        after, metrics = jax.eval_shape(learner.update, state, batch, key)
        same = jax.tree.map(lambda one, two: (one.shape, one.dtype) == (two.shape, two.dtype), state, after)
        assert all(jax.tree.leaves(same)) and all(metric.shape == () for metric in metrics.values())
        one = jax.eval_shape(learner.act, state, jax.tree.map(lambda x: x[0], batch.observation), key)
        many = jax.eval_shape(learner.act, state, batch.observation, key)
        assert (one.shape, many.shape) == (batch.action.shape[1:], batch.action.shape)
        if learner.critics is not None:
            values = jax.eval_shape(learner.critics, state, batch.observation, batch.action)
            assert values.shape[1:] == (8,)


def test_images_are_learned_from_and_shifted_by_the_updates_key() -> None:
    """All parameters move, convolutions among them, and otherwise with another key; without shifts nothing is added."""
    learner, batch = build("continuous", "bc", (8, 8, 2), (4,), network=Architecture(shift=2))
    state = start(learner, batch)
    update = jax.jit(learner.update)
    one, other = (jax.device_get(update(state, batch, jax.random.key(seed))[0].params) for seed in (0, 1))
    different = lambda x, y: jax.tree.map(lambda a, b: bool((a != b).any()), x, y)
    assert all(jax.tree.leaves(different(state.params, one)))
    assert any(jax.tree.leaves(different(one, other)))
    images, vectors = (Spec(shape, 2) for shape in ((8, 8, 2), (3,)))
    assert augmented(learner, images, Architecture()) is learner
    assert augmented(learner, vectors, Architecture(shift=2)) is learner


def test_of_a_dictionary_the_images_are_shifted_each_by_its_own_draws() -> None:
    view = np.broadcast_to(np.arange(64, dtype=np.uint8).reshape(8, 8, 1), (16, 8, 8, 1))
    see = Learner(lambda *_: None, lambda state, batch, key: (state, {"seen": batch}), lambda *_: None)
    shape = {"eyes": {"left": (8, 8, 1), "right": (8, 8, 1)}, "goal": (3,)}
    observation = {"eyes": {"left": view, "right": view}, "goal": np.ones((16, 3))}
    rows = random_batch(False)._replace(observation=observation, next_observation=observation)
    key, shift = jax.random.key(0), Architecture(shift=2)
    update = jax.jit(augmented(see, Spec(shape, 2), shift).update)
    seen = jax.device_get(update(None, rows, key)[1]["seen"])
    images = [seen.observation["eyes"][side] for side in ("left", "right")]
    images.append(seen.next_observation["eyes"]["left"])
    for i, image in enumerate(images):
        assert image.shape == view.shape and all((image != other).any() for other in [view, *images[:i]])
    np.testing.assert_array_equal(seen.observation["goal"], observation["goal"])
    # One image has the key that it had before there were dictionaries.
    update = jax.jit(augmented(see, Spec((8, 8, 1), 2), shift).update)
    alone = update(None, rows._replace(observation=view, next_observation=view), key)[1]["seen"]
    first = jax.random.split(jax.random.split(key)[0])[0]
    expected = jax.jit(random_shift, static_argnums=2)(view, first, 2)
    np.testing.assert_array_equal(alone.observation, expected)


def test_updates_by_weight_see_the_same_shifts_as_the_others() -> None:
    """Those that prioritised memories make: of shifted images too, with the key that both draw by."""
    view = np.broadcast_to(np.arange(64, dtype=np.uint8).reshape(8, 8, 1), (8, 8, 8, 1))
    see = Learner(
        lambda *_: None,
        lambda state, batch, key: (state, {"seen": batch}),
        lambda *_: None,
        weighted=lambda state, batch, weight, key: (state, {"seen": batch}, weight),
    )
    rows, key = random_batch(False)._replace(observation=view, next_observation=view), jax.random.key(0)
    of = augmented(see, Spec((8, 8, 1), 2), Architecture(shift=2))
    run = jax.jit(lambda: (of.update(None, rows, key)[1], of.weighted(None, rows, rows.discount, key)[1]))
    seen, weighted = run()
    jax.tree.map(np.testing.assert_array_equal, seen, weighted)
    assert (seen["seen"].observation != view).any()


def test_deviations_between_critics_need_two_and_a_penalty_needs_next_actions() -> None:
    """One critic's deviation is 0, and its derivative no number; a log in no order has hardly any next action."""
    rows = random_batch(False)._replace(has_next_action=np.zeros(8, np.float32))
    for agent in ("td3", "td3_bc", "rebrac"):
        with pytest.raises(ValueError, match="critics=1 has none: give at least 2"):
            agents.get(agent).Config(critics=1, aggregation="pessimistic")
    with pytest.raises(ValueError, match=r"critic_cloning=0.01 compares .* only 0% of the steps have one"):
        agents.check_data("rebrac", agents.get("rebrac").Config(), rows)
    agents.check_data("rebrac", agents.get("rebrac").Config(critic_cloning=0.0), rows)
    with pytest.raises(
        ValueError, match=r"sarsa=true continues .* only 0% of the steps have one .*: give sarsa=false"
    ):
        agents.check_data("dqn", agents.get("dqn").Config(sarsa=True), rows)
    with pytest.raises(
        ValueError, match=r"sarsa=true continues with the logged next action, and temperature=0.1"
    ):
        agents.get("dqn").Config(sarsa=True, temperature=0.1)


@pytest.mark.parametrize("field", ["dropout", "policy_layer_norm"])
@pytest.mark.parametrize(
    ("kind", "agent"),
    [("discrete", "dqn"), ("discrete", "cql"), ("continuous", "arsq"), ("continuous", "cqn")],
)
def test_agents_without_a_policy_refuse_its_settings(kind: str, agent: str, field: str) -> None:
    value = 0.5 if field == "dropout" else True
    with pytest.raises(ValueError, match=f"network.{field} is for policies, and {agent}.* has none"):
        build(kind, agent, network=Architecture(**{field: value}))


# ---- many updates -------------------------------------------------------------------------------------------

STEPS = 5000


def start(learner: Learner, batch: Transition) -> State:
    """A state much like that of ``init``, which would take as long to compile as the updates."""
    rng = np.random.default_rng(0)

    def fill(path: Any, x: Any) -> np.ndarray:
        name = str(path[-1])
        if "kernel" in name:
            return rng.uniform(-1, 1, x.shape).astype(np.float32) / np.sqrt(x.shape[-2])
        return (np.ones if "scale" in name else np.zeros)(x.shape, x.dtype)

    state = jax.eval_shape(learner.init, jax.random.key(0), batch)
    params = jax.tree.map_with_path(fill, state.params)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (state.optimiser, state.step))
    return State(params, {name: params[name] for name in state.target}, *zeros)


@functools.cache
def program(
    agent: str, spec: Spec, head: str, hidden: tuple[int, ...], fields: tuple[tuple[str, Any], ...]
) -> tuple[Learner, Callable[..., State]]:
    """A learner and its training on the whole dataset at once, for several values of some fields."""
    config = agents.get(agent).Config(hidden=hidden, **dict(fields))
    value_head = heads.quantile(21, kappa=0.01) if head == "quantile" else heads.make(head, LOW, HIGH, SIZE)
    decayed = lambda rate: optax.adam(optax.cosine_decay_schedule(rate, STEPS))
    make = lambda config: agents.get(agent).make(config, spec, value_head, decayed)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(states: State, batch: Transition, sweep: dict[str, Any], keys: Any) -> State:
        runs = train.population(
            make, config, lambda dataset, key, step: dataset.transitions, STEPS, sweep=sweep
        )
        return runs.epoch(states, Dataset(batch, None), keys)[0]

    return make(config), run


def learn(
    agent: str,
    spec: Spec,
    batch: Transition,
    head: str = "scalar",
    hidden: tuple[int, ...] = (),
    sweep: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Learner, list[State]]:
    """The learner and its final states, one per value in ``sweep`` (or one)."""
    hypers = {name: np.float32(values) for name, values in (sweep or {}).items()}
    count = max((len(values) for values in hypers.values()), default=1)
    learner, run = program(agent, spec, head, hidden, tuple(sorted(fields.items())))
    repeat = lambda x: np.broadcast_to(x, (count, *x.shape))
    first = start(learner, batch)
    states = jax.tree.map(repeat, first._replace(step=None))._replace(step=first.step)
    states = run(states, batch, hypers, jnp.broadcast_to(jax.random.key(0), count))
    states = jax.device_get(states)
    apart = states._replace(step=repeat(states.step))
    return learner, [jax.tree.map(lambda x, i=i: x[i], apart) for i in range(count)]


# ---- many updates: a table of 4 states and 3 actions ----------------------------------------------------------

STATES, GAMMA = 4, 0.9
TABULAR = Spec((STATES,), ACTIONS, discrete=True)
EYE = np.eye(STATES, dtype=np.float32)
FAST = {"discount": GAMMA, "target_rate": 0.05, "learning_rate": 0.05}


class Table(NamedTuple):
    """Logged steps of a small MDP, every action in every state; row by row and as tables."""

    batch: Transition
    count: np.ndarray  # [S, A] of each action in each state
    reward: np.ndarray  # [S, A] mean
    next: np.ndarray  # [S, A, S] mean of discount, apart by next state

    def backup(self, value: np.ndarray) -> np.ndarray:
        """E[r + gamma d V(s')], [S, A]."""
        return self.reward + GAMMA * self.next @ value


def table(unseen: tuple[int, int] | None = None) -> Table:
    """Rewards and next states are random, behaviour is not uniform, one action ends half of its episodes.

    The rows of the (state, action) that is to be ``unseen`` are given to another action.
    """
    rng = np.random.default_rng(3)
    rows = []
    for s in range(STATES):
        for a in range(ACTIONS):
            mean = rng.uniform(-0.4, 0.4)
            for next_state in rng.integers(STATES, size=2):
                for _ in range(rng.integers(1, 4)):
                    alive = not (s == 2 and a == 0 and next_state % 2)
                    a_logged = (a + 1) % ACTIONS if (s, a) == unseen else a
                    rows.append((s, a_logged, next_state, mean + rng.normal(0, 0.1), alive))
    s, a, n, r, d = (np.array(column) for column in zip(*rows, strict=True))
    action = a.astype(np.int32)
    batch = Transition(EYE[s], action, np.float32(r), np.float32(d), EYE[n], action, np.float32(d))
    count, total = np.zeros((2, STATES, ACTIONS))
    following = np.zeros((STATES, ACTIONS, STATES))
    np.add.at(count, (s, a), 1)
    np.add.at(total, (s, a), r)
    np.add.at(following, (s, a, n), d)
    seen = np.maximum(count, 1)
    return Table(batch, count, total / seen, following / seen[..., None])


def iterate(backup: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The fixed point [S, A] of a contraction."""
    q = np.zeros((STATES, ACTIONS))
    for _ in range(400):
        q = backup(q)
    return q


def tolerance(head: str) -> float:
    """Of a quantile head, half the bias it admits to: (range / 2K + kappa) per backup, over the horizon."""
    return 0.5 * (1 / (2 * 21) + 0.01) / (1 - GAMMA) if head == "quantile" else 5e-3


def table_of_q(head: str, params: Tree) -> np.ndarray:
    outputs = mlp(float64(params), np.float64(EYE)).reshape(STATES, ACTIONS, -1)
    return outputs[..., 0] if head == OWN_HEAD else numpy_head(head).value(outputs)


OWN_HEAD = "docs.example_head.gaussian"


@pytest.mark.parametrize(
    "head",
    [pytest.param(name, marks=[pytest.mark.long] * (name in ("two_hot", "c51"))) for name in heads.NAMES]
    + [OWN_HEAD],
)  # HL-Gauss's loss is that of these two, and their targets are in the tests of one update
def test_dqn_finds_the_optimal_values(head: str) -> None:
    mdp = table()
    optimal = iterate(lambda q: mdp.backup(q.max(1)))
    learner, [state] = learn("dqn", TABULAR, mdp.batch, head, **FAST)
    np.testing.assert_allclose(table_of_q(head, state.params["q"]), optimal, atol=tolerance(head))
    greedy = jax.jit(learner.act)(state, EYE, jax.random.key(0))
    if head != "quantile":
        np.testing.assert_array_equal(greedy, optimal.argmax(1))


def expectile(values: np.ndarray, weights: np.ndarray, tau: float) -> float:
    """The root of E[|tau - 1(x < v)| (x - v)]."""
    slack = lambda v: (weights * np.where(values < v, 1 - tau, tau) * (values - v)).sum()
    return optimize.brentq(slack, values.min() - 1, values.max() + 1)


def log_mean_exp(values: np.ndarray, weights: np.ndarray, temperature: float) -> float:
    """X-QL's value: ``b log E exp(x / b)``."""
    return temperature * special.logsumexp(values / temperature, b=weights / weights.sum())


@functools.cache
def implicit_values(kind: str, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The fixed point of IQL or X-QL: Q [S, A], and V [S] of Q under the frequencies of the logged actions."""
    mdp = table()
    of = {"expectile": expectile, "gumbel": log_mean_exp}[kind]

    def values(q: np.ndarray) -> np.ndarray:
        return np.array([of(*row, level) for row in zip(q, mdp.count, strict=True)])

    q = iterate(lambda q: mdp.backup(values(q)))
    return q, values(q)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "levels", "head"),
    [
        ("expectile", [0.5, 0.8, 0.95], "hl_gauss"),
        *(
            pytest.param("expectile", [0.5, 0.8, 0.95], head, marks=pytest.mark.long)
            for head in ("scalar", "two_hot", "c51", "quantile")
        ),
        *(pytest.param("gumbel", [0.2, 1.0], head, marks=pytest.mark.long) for head in heads.NAMES),
    ],
)
def test_iql_finds_the_implicit_value_of_every_state_and_weighs_its_policy_by_it(
    kind: str, levels: list[float], head: str
) -> None:
    mdp, beta = table(), 2.0
    _, states = learn(
        "iql",
        TABULAR,
        mdp.batch,
        head,
        (32,),
        {kind: levels},
        temperature=beta,
        **{**FAST, "learning_rate": 0.01},
    )
    every = np.indices((STATES, ACTIONS))
    for level, state in zip(levels, states, strict=True):
        q, v = implicit_values(kind, level)
        params, value = float64(state.params), numpy_head(head).value
        learned_q = value(critics(params["critic"], np.float64(EYE)[every[0]], every[1]))
        learned_v = value(mlp(params["value"], np.float64(EYE)))
        for member in learned_q:
            np.testing.assert_allclose(member, q, atol=tolerance(head))
        np.testing.assert_allclose(learned_v, v, atol=tolerance(head))
        advantage = learned_q.min(0) - learned_v[:, None]
        policy = mdp.count * np.exp(beta * advantage)
        np.testing.assert_allclose(
            special.softmax(mlp(params["policy"], np.float64(EYE)), -1),
            policy / policy.sum(1, keepdims=True),
            atol=5e-3,
        )


def test_bc_clones_frequencies_and_moments() -> None:
    mdp = table()
    _, [state] = learn("bc", TABULAR, mdp.batch, learning_rate=0.05)
    policy = special.softmax(mlp(float64(state.params["policy"]), np.float64(EYE)), -1)
    np.testing.assert_allclose(policy, mdp.count / mdp.count.sum(1, keepdims=True), atol=2e-3)

    state_of = mdp.batch.observation.argmax(1)
    action = np.random.default_rng(0).uniform(-0.9, 0.9, (len(state_of), DIMENSIONS)).astype(np.float32)
    batch = mdp.batch._replace(action=action, next_action=action)
    learner, [state] = learn("bc", Spec((STATES,), DIMENSIONS), batch, learning_rate=0.05)
    mean = np.stack([action[state_of == s].mean(0) for s in range(STATES)])
    np.testing.assert_allclose(jax.jit(learner.act)(state, EYE, jax.random.key(0)), mean, atol=2e-3)
    residual = action - mean[state_of]
    np.testing.assert_allclose(np.exp(state.params["policy"]["log_std"]), residual.std(0), atol=2e-3)


def conservative_values(mdp: Table, weight: float) -> np.ndarray:
    """Where the gradient of squared TD errors plus ``weight`` times the CQL(H) gap vanishes, [S, A]."""
    n = mdp.count

    def gradient(flat: np.ndarray) -> np.ndarray:
        q = flat.reshape(n.shape)
        pushed = special.softmax(q, -1) * n.sum(1, keepdims=True) - n
        return (2 * n * (q - mdp.backup(q.max(1))) + weight * pushed).ravel()

    solution = optimize.root(gradient, iterate(lambda q: mdp.backup(q.max(1))).ravel(), tol=1e-12)
    assert solution.success
    return solution.x.reshape(n.shape)


def test_discrete_cql_stops_where_its_objective_is_stationary() -> None:
    mdp, weights = table(), [0.1, 0.5, 2.0]
    _, states = learn("cql", TABULAR, mdp.batch, sweep={"weight": weights}, **FAST)
    for weight, state in zip(weights, states, strict=True):
        expected = conservative_values(mdp, weight)
        np.testing.assert_allclose(table_of_q("scalar", state.params["q"]), expected, atol=5e-3)


def test_discrete_cqls_multiplier_holds_the_gap() -> None:
    mdp = table()

    def gap(q: np.ndarray) -> float:
        return (mdp.count * (special.logsumexp(q, -1, keepdims=True) - q)).sum() / mdp.count.sum()

    wanted = gap(conservative_values(mdp, 0.7))
    fields = {**FAST, "target_gap": float(3 * wanted), "weight": 3.0}
    _, [state] = learn("cql", TABULAR, mdp.batch, **fields)
    np.testing.assert_allclose(gap(table_of_q("scalar", state.params["q"])), wanted, atol=2e-3)
    np.testing.assert_allclose(3.0 * np.exp(state.params["log_multiplier"]), 0.7, atol=0.02)


def test_a_larger_weight_pushes_an_unseen_action_further_down() -> None:
    _, states = learn("cql", TABULAR, table(unseen=(1, 2)).batch, sweep={"weight": [0.1, 0.5, 2.0]}, **FAST)
    unseen = [table_of_q("scalar", state.params["q"])[1, 2] for state in states]
    assert unseen[0] > unseen[1] + 0.1 > unseen[2] + 0.2


# ---- many updates: one state that leads to itself, and continuous actions --------------------------------------

BANDIT = Spec((1,), 1)
DEEP = (64,)
CRITIC_KINKS = 0.1  # how far from the peak of a parabola that of a fitted polygon may lie
HALF = {"discount": 0.5, "target_rate": 0.05, "learning_rate": 5e-3}
on_two_heads = pytest.mark.parametrize("head", [pytest.param("scalar", marks=pytest.mark.long), "hl_gauss"])


def reward(action: Any) -> Any:
    return -0.25 - (action - 0.5) ** 2


def bandit(next_actions: tuple[float, ...] = (0.0,)) -> Transition:
    """19 actions on a line, each with every one of ``next_actions``, of which those above 0.3 are not there."""
    action, following = (x.ravel() for x in np.meshgrid(np.linspace(-1, 0.8, 19), next_actions))
    column = lambda x: np.float32(x)[:, None]
    ones = np.ones_like(action)
    return Transition(
        column(ones),
        column(action),
        np.float32(reward(action)),
        np.float32(ones),
        column(ones),
        column(following),
        np.float32(following <= 0.3),
    )


def greedy(learner: Learner, state: State) -> float:
    return float(
        np.asarray(jax.jit(learner.act)(state, np.ones((1, 1), np.float32), jax.random.key(0)))[0, 0]
    )


def critic_values(head: str, state: State, actions: np.ndarray) -> np.ndarray:
    """[E, N] values of actions [N, D]."""
    return numpy_head(head).value(
        critics(float64(state.params["critic"]), np.ones((1, 1)), np.float64(actions))
    )


@pytest.mark.slow
@on_two_heads
def test_td3_bc_settles_between_the_best_action_and_the_data(head: str) -> None:
    batch, alphas = bandit(), [0.3, 2.5, 20.0]
    learner, states = learn("td3_bc", BANDIT, batch, head, DEEP, {"alpha": alphas}, policy_noise=0.0, **HALF)
    for alpha, state in zip(alphas, states, strict=True):

        def value(a: float) -> float:
            """Of doing ``a`` for ever."""
            return reward(a) / (1 - 0.5)

        def slope(a: float, alpha: float = alpha) -> float:
            return alpha / abs(value(a)) * (a - 0.5) + (a - batch.action.mean())

        action = optimize.brentq(slope, -1, 1)
        assert abs(greedy(learner, state) - action) < CRITIC_KINKS
        q = critic_values(head, state, batch.action[:19])
        assert np.abs(q - (batch.reward[:19] + 0.5 * value(action))).max() < CRITIC_KINKS


@pytest.mark.long
def test_rebrac_settles_there_too_and_its_critic_pays_for_the_distance() -> None:
    batch = bandit((-0.8, -0.3, 0.4))
    sweep = {"policy_cloning": [0.02, 0.3, 2.0], "critic_cloning": [1.0, 0.5, 0.2]}
    learner, states = learn("rebrac", BANDIT, batch, "scalar", DEEP, sweep, policy_noise=0.0, **HALF)
    for beta1, beta2, state in zip(*sweep.values(), states, strict=True):

        def future(a: float, beta2: float = beta2) -> float:
            """gamma (V - the penalty), when doing ``a`` for ever."""
            distance = (batch.has_next_action * (a - batch.next_action[:, 0]) ** 2).mean()
            return 0.5 / (1 - 0.5) * (reward(a) - beta2 * distance)

        def slope(a: float, beta1: float = beta1, future: Callable[[float], float] = future) -> float:
            return beta1 * (a - batch.action.mean()) + (a - 0.5) / abs(reward(a) + future(a))

        action = optimize.brentq(slope, -1, 1)
        assert abs(greedy(learner, state) - action) < CRITIC_KINKS
        q = critic_values("scalar", state, batch.action[:19])
        assert np.abs(q - (batch.reward[:19] + future(action))).max() < CRITIC_KINKS


@pytest.mark.long
def test_cqn_finds_the_mean_of_every_interval_and_continues_with_the_best() -> None:
    """At each of two levels: the mean reward of the logged actions in an interval, and the best value of that level."""
    batch = bandit()
    actions = batch.action[:, 0].astype(np.float64)
    fields = {"levels": 2, "bins": 3, "features": 8, "dominance_weight": 0.0, "margin_weight": 0.0}
    learner, [state] = learn("cqn", BANDIT, batch, "c51", (32,), **HALF, **fields)
    cell = np.floor((actions + 1) / 2 * 9).astype(int)
    expected = 0.0
    inside = np.ones(len(actions), bool)  # the interval that the levels before have chosen
    for at_level in (cell // 3, cell):
        mean = {number: reward(actions[at_level == number]).mean() for number in np.unique(at_level)}
        best = max(np.unique(at_level[inside]), key=lambda number, mean=mean: mean[number])
        inside = at_level == best
        expected = expected + np.array([mean[number] + 0.5 * mean[best] / 0.5 for number in at_level]) / 2
    assert learner.critics is not None
    values = np.asarray(jax.jit(learner.critics)(state, batch.observation, batch.action))[0]
    np.testing.assert_allclose(values, expected, atol=0.02)
    assert greedy(learner, state) == pytest.approx((2 * best + 1) / 9 - 1)


def soft_optimum() -> tuple[float, float, float]:
    """Greedy action, temperature and value of the squashed normal that earns most at an entropy of -1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()

    def earns(mean: float, log_std: float) -> tuple[float, float]:
        raw = mean + np.exp(log_std) * nodes
        entropy = stats.norm.entropy() + log_std - 2 * weights @ np.log(np.cosh(raw))
        return weights @ reward(np.tanh(raw)), entropy

    def best(log_alpha: float) -> np.ndarray:
        cost = lambda x: -earns(*x)[0] - np.exp(log_alpha) * earns(*x)[1]
        return optimize.minimize(cost, [0.5, -2.0], method="Nelder-Mead", options={"fatol": 1e-12}).x

    log_alpha = optimize.brentq(lambda x: earns(*best(x))[1] + 1, -8, 0)
    mean, log_std = best(log_alpha)
    alpha = np.exp(log_alpha)
    return np.tanh(mean), alpha, (earns(mean, log_std)[0] - alpha) / (1 - 0.5)


@pytest.mark.slow
@on_two_heads
def test_sac_n_finds_the_best_policy_of_its_entropy(head: str) -> None:
    action, alpha, value = soft_optimum()
    batch = bandit()
    learner, [state] = learn("sac_n", BANDIT, batch, head, DEEP, critics=3, **HALF)
    assert abs(greedy(learner, state) - action) < CRITIC_KINKS
    np.testing.assert_allclose(np.exp(state.params["log_alpha"]), alpha, rtol=0.2)
    q = critic_values(head, state, batch.action[:19])
    assert np.abs(q - (batch.reward[:19] + 0.5 * value)).max() < CRITIC_KINKS


@pytest.mark.long
def test_edacs_diversity_makes_critics_disagree_off_the_data_alone() -> None:
    """All data lies on a line: along it the reward sets the gradients, across it diversity spreads them."""
    flat = bandit()
    flatten = lambda action: np.concatenate([action, 0 * action], -1)
    batch = flat._replace(action=flatten(flat.action), next_action=flatten(flat.next_action))
    sweep = {"diversity": [0.0, 0.1]}
    _, states = learn("edac", Spec((1,), 2), batch, "scalar", DEEP, sweep, critics=4, **HALF)
    line = batch.action[:19]
    on, off = (
        [critic_values("scalar", state, line + shift).std(0).mean() for state in states]
        for shift in (np.zeros(2), np.array([0, 0.9]))
    )
    assert off[1] > 10 * off[0]
    assert on[1] < 0.1 * off[1]


def skewed_density(action: np.ndarray) -> np.ndarray:
    return (1 + 0.8 * action) / 2


def conservative_curve(weight: float, action: np.ndarray) -> np.ndarray:
    """Q(a) that minimises the squared error to the reward plus the CQL(H) gap, both over that density."""
    q = reward(action)
    for _ in range(2000):
        pushed = np.exp(q) / np.trapezoid(np.exp(q), action) / skewed_density(action)
        q = 0.95 * q + 0.05 * (reward(action) + weight / 2 * (1 - pushed))
    return q


@pytest.mark.long
def test_continuous_cql_fits_the_minimiser_of_its_objective() -> None:
    """With a policy that stays as broad as it starts: only then do its proposals integrate over all actions."""
    fine = np.linspace(-1, 1, 2001)
    cumulative = np.cumsum(skewed_density(fine)) / skewed_density(fine).sum()
    action = np.interp((np.arange(31) + 0.5) / 31, cumulative, fine).astype(np.float32)[:, None]
    ones = np.ones(31, np.float32)
    batch = Transition(ones[:, None], action, reward(action[:, 0]), ones, ones[:, None], action, ones)
    sweep = {"weight": [0.3, 2.0, 0.03], "policy_learning_rate": [0.0, 0.0, 5e-3]}
    fields = {**HALF, "discount": 0.0, "samples": 5}
    learner, [*fixed, learned] = learn("cql", BANDIT, batch, "scalar", DEEP, sweep, **fields)
    for weight, state in zip(sweep["weight"], fixed, strict=False):
        error = critic_values("scalar", state, fine[:, None]) - conservative_curve(weight, fine)
        assert np.sqrt((error**2).mean()) < 0.05
    assert abs(greedy(learner, learned) - 0.5) < CRITIC_KINKS
