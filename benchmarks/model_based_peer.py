"""RAVL's loop in PyTorch in the manner of its published code: one update per Python step, indices drawn on the host.

Written for timing, with the same arithmetic and sizes as `rl.model_based`: rollouts ask every network and pick an elite
per row from a Python list, each update draws its rows with NumPy, and logged numbers are fetched one by one. The
reward, the next observation and the end of episodes come from the networks; nothing ends.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rl.types import Spec


class Layers(nn.Module):
    """``members`` perceptrons as batched matrix products, [members, B, inputs] -> [members, B, outputs]."""

    def __init__(self, members: int, sizes: list[int], activation: Any):
        super().__init__()
        self.activation = activation
        pairs = list(itertools.pairwise(sizes))
        draw = lambda *shape, fan: nn.Parameter(torch.empty(*shape).uniform_(-1, 1) / fan**0.5)
        self.weights = nn.ParameterList([draw(members, a, b, fan=a) for a, b in pairs])
        self.biases = nn.ParameterList([draw(members, 1, b, fan=a) for a, b in pairs])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if index + 1 < len(self.weights):
                x = self.activation(x)
        return x


class Buffer:
    """Rows (s, a, r, s', d) on the device, the newest kept; drawn by the host without replacement."""

    def __init__(self, spec: Spec, capacity: int, device: str):
        size = spec.observation_shape[0]
        self.columns = [torch.zeros(capacity, n, device=device) for n in (size, spec.action_size, 1, size, 1)]
        self.capacity, self.head, self.count = capacity, 0, 0
        self.rng = np.random.default_rng(0)

    def add(self, *rows: torch.Tensor) -> None:
        block = len(rows[0])
        slots = np.arange(self.head, self.head + block) % self.capacity
        for column, new in zip(self.columns, rows, strict=True):
            column[slots] = new
        self.head, self.count = (self.head + block) % self.capacity, min(self.count + block, self.capacity)

    def sample(self, batch_size: int) -> list[torch.Tensor]:
        slots = self.rng.choice(self.count, batch_size, replace=False)
        return [column[slots] for column in self.columns]


class Agent:
    """SAC with ``critics`` critics and EDAC's diversity term."""

    def __init__(self, spec: Spec, critics: int, diversity: float, hidden: int, device: str):
        size = spec.observation_shape[0]
        widths = [hidden] * 3
        self.spec, self.critics, self.diversity = spec, critics, diversity
        self.policy = Layers(1, [size, *widths, 2 * spec.action_size], functional.relu).to(device)
        self.critic = Layers(critics, [size + spec.action_size, *widths, 1], functional.relu).to(device)
        self.slow = copy.deepcopy(self.critic)
        self.log_alpha = torch.zeros(1, requires_grad=True, device=device)
        adam = lambda parameters: torch.optim.Adam(parameters, lr=3e-4)
        self.adams = [adam([self.log_alpha]), adam(self.policy.parameters()), adam(self.critic.parameters())]

    def act(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [B, D] and their log densities [B]."""
        mean, log_std = self.policy(state[None])[0].chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clip(-5, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        return action, (normal.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(-1)

    def value(self, network: Layers, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Values [critics, B]."""
        joined = torch.cat([state, action], -1)
        return network(joined[None].expand(self.critics, -1, -1))[..., 0]

    def update(self, batch: list[torch.Tensor]) -> dict[str, float]:
        state, action, reward, following, done = batch
        with torch.no_grad():
            surplus = self.act(state)[1] - self.spec.action_size
        self._descend(0, loss_alpha := -(self.log_alpha * surplus).mean())
        alpha = self.log_alpha.exp().detach()

        drawn, log_prob = self.act(state)
        q = self.value(self.critic, state, drawn)
        self._descend(1, loss_policy := (alpha * log_prob - q.min(0).values).mean())

        with torch.no_grad():
            next_action, next_log_prob = self.act(following)
            slow = self.value(self.slow, following, next_action).min(0).values - alpha * next_log_prob
            target = reward[:, 0] + 0.99 * (1 - done[:, 0]) * slow
        loss = (self.value(self.critic, state, action) - target).square().mean(1).sum()
        if self.diversity:
            loss = loss + self.diversity * self._similarity(state, action)
        self._descend(2, loss)
        with torch.no_grad():
            for old, new in zip(self.slow.parameters(), self.critic.parameters(), strict=True):
                old.copy_(0.995 * old + 0.005 * new)
        return {
            "alpha": alpha.item(),
            "alpha_loss": loss_alpha.item(),
            "policy_loss": loss_policy.item(),
            "critic_loss": loss.item(),
            "entropy": -log_prob.mean().item(),
            "q": q.mean().item(),
            "q_std": q.std(0).mean().item(),
        }

    def _similarity(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        each = action[None].repeat(self.critics, 1, 1).requires_grad_(True)
        joined = torch.cat([state[None].expand(self.critics, -1, -1), each], -1)
        gradient = torch.autograd.grad(self.critic(joined).sum(), each, create_graph=True)[0]
        unit = (gradient / (gradient.norm(dim=2, keepdim=True) + 1e-10)).transpose(0, 1)
        products = unit @ unit.transpose(1, 2)
        others = 1 - torch.eye(self.critics, device=products.device)
        return (products * others).sum((1, 2)).mean() / (self.critics - 1)

    def _descend(self, which: int, loss: torch.Tensor) -> None:
        self.adams[which].zero_grad()
        loss.backward()
        self.adams[which].step()


class Model:
    """Seven probabilistic networks, five of them elites."""

    def __init__(self, spec: Spec, device: str, hidden: int = 200):
        size, outputs = spec.observation_shape[0] + spec.action_size, spec.observation_shape[0] + 1
        self.networks = Layers(7, [size, *[hidden] * 4, 2 * outputs], functional.silu).to(device)
        self.bounds = [torch.full((outputs,), x, device=device, requires_grad=True) for x in (0.5, -10.0)]
        self.adam = torch.optim.Adam([*self.networks.parameters(), *self.bounds], lr=1e-3)
        self.elites = list(range(5))
        self.device = device

    def distribution(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and log-variances [7, B, O + 1] of inputs [7, B, I]."""
        mean, raw = self.networks(inputs).chunk(2, -1)
        high, low = self.bounds
        raw = high - functional.softplus(high - raw)
        return mean, low + functional.softplus(raw - low)

    @torch.no_grad()
    def step(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.distribution(torch.cat([state, action], -1)[None].expand(7, -1, -1))
        drawn = mean + torch.randn_like(mean) * log_variance.exp().sqrt()
        elites = [self.elites[index] for index in torch.randint(0, len(self.elites), (len(state),))]
        chosen = drawn[torch.tensor(elites, device=self.device), torch.arange(len(state))]
        return state + chosen[:, :-1], chosen[:, -1:]

    def update(self, inputs: torch.Tensor, outputs: torch.Tensor) -> float:
        """One step on each network's own batch [7, B, ...]."""
        mean, log_variance = self.distribution(inputs)
        loss = ((mean - outputs).square() * (-log_variance).exp() + log_variance).mean((1, 2)).sum()
        loss = loss + 0.01 * (self.bounds[0].sum() - self.bounds[1].sum())
        rates = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
        decay = zip(rates, self.networks.weights, strict=True)
        loss = loss + sum(0.5 * rate * weight.square().sum() for rate, weight in decay)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return loss.item()

    @torch.no_grad()
    def errors(self, inputs: torch.Tensor, outputs: torch.Tensor) -> list[float]:
        """Each network's squared error on rows [B, ...] that all share, in one piece as in the published code."""
        mean, _ = self.distribution(inputs.expand(7, -1, -1))
        return (mean - outputs).square().mean((1, 2)).tolist()


def rollouts(agent: Agent, model: Model, buffer: Buffer, states: torch.Tensor, length: int) -> None:
    """``length`` steps from each of ``states``, added to the buffer."""
    for _ in range(length):
        with torch.no_grad():
            action, _ = agent.act(states)
            following, reward = model.step(states, action)
        buffer.add(states, action, reward, following, torch.zeros_like(reward))
        states = following


def updates(agent: Agent, logged: Buffer, imagined: Buffer, count: int, batch_size: int, real: float) -> None:
    """``count`` updates on batches of logged and model rows."""
    for _ in range(count):
        rows = logged.sample(int(real * batch_size)), imagined.sample(batch_size - int(real * batch_size))
        agent.update([torch.cat(columns) for columns in zip(*rows, strict=True)])


# ---- online -------------------------------------------------------------------------------------------------------


def explore(env: Any, taken: Buffer, count: int) -> None:
    """``count`` random steps of the environment."""
    observation, _ = env.reset()
    for _ in range(count):
        observation = _step(env, taken, observation, taken.rng.uniform(-1, 1, env.action_space.shape))


def steps(
    env: Any, agent: Agent, taken: Buffer, imagined: Buffer, count: int, updates_per_step: int, share: float
) -> None:
    """``count`` steps of the environment by the agent's actions, with updates after each."""
    observation, _ = env.reset()
    for _ in range(count):
        with torch.no_grad():
            action, _ = agent.act(torch.as_tensor(observation[None], device=taken.columns[0].device))
        observation = _step(env, taken, observation, action[0].cpu().numpy())
        whole_batches(agent, taken, imagined, updates_per_step, share)


def whole_batches(agent: Agent, taken: Buffer, imagined: Buffer, count: int, share: float) -> None:
    """``count`` updates, the batch of each from one buffer: with probability ``share`` that of rollouts."""
    for _ in range(count):
        agent.update((imagined if taken.rng.random() < share else taken).sample(256))


def refit(model: Model, taken: Buffer, epochs: int) -> None:
    """``epochs`` passes over bootstrap samples of four fifths of the buffer, each with a check on the rest."""
    held = taken.count // 5
    state, action, reward, following, _ = (column[: taken.count] for column in taken.columns)
    inputs, outputs = torch.cat([state, action], -1), torch.cat([following - state, reward], -1)
    sample = taken.rng.integers(held, taken.count, (7, taken.count - held))
    for _ in range(epochs):
        order = taken.rng.permutation(taken.count - held)
        for chosen in np.array_split(order, -(-len(order) // 256)):
            rows = sample[:, chosen]
            model.update(inputs[rows], outputs[rows])
        model.errors(inputs[:held], outputs[:held])


def _step(env: Any, taken: Buffer, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    following, reward, terminated, truncated, _ = env.step(action)
    row = (observation, action, [reward], following, [float(terminated)])
    device = taken.columns[0].device
    taken.add(*(torch.as_tensor(np.asarray(x, np.float32)[None], device=device) for x in row))
    return env.reset()[0] if terminated or truncated else following
