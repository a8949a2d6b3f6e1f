"""The updates of CQN and ARSQ in PyTorch, in the manner of their published code: one update per Python call.

Written for timing, with the arithmetic and the sizes of `rl.agents.cqn` (scalar head or C51) and `rl.agents.arsq`
(scalar head), whose losses they equal (tests/test_benchmarks.py). Batches are drawn by NumPy and uploaded, levels and
tokens are Python loops, distributions are projected by scattered sums, and logged numbers are fetched one by one.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.types import Spec, Transition

AGENTS = {"arsq": ("scalar",), "cqn": ("scalar", "c51")}  # and the value heads that are transcribed

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError:  # only what is above this line may be used then
    torch = None  # type: ignore[assignment]


def version() -> str | None:
    """Of PyTorch; None where it is not installed."""
    return importlib.metadata.version("torch") if torch else None


def updates(
    name: str,
    config: Any,
    size: int,
    support: tuple[float, float],
    spec: Spec,
    sample: Callable[[], Transition],
) -> Callable[[], Any]:
    """One update on a batch that ``sample`` draws, of demonstrations alone; finished when it returns.

    Args:
      name: one of `AGENTS`.
      config: the agent's own.
      size: outputs of the value head; 1 is scalar, more are C51's atoms.
      support: of the atoms, low and high.
      spec: of the data; vectors.
      sample: a batch of NumPy arrays.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    agent = CQN(config, spec, size, support, device) if name == "cqn" else ARSQ(config, spec, device)
    return lambda: agent.update(sample())


if torch:

    class Layers(nn.Module):
        """Dense layers, LayerNorm and activation after all but the last; ``trunk`` sees the observation alone."""

        def __init__(
            self,
            observation: int,
            trunk: int,
            others: int,
            hidden: Sequence[int],
            outputs: int,
            norm: bool,
            activation: str,
        ):
            super().__init__()
            self.activation = getattr(functional, activation)
            self.trunk = nn.Linear(observation, trunk) if trunk else None
            self.trunk_norm = nn.LayerNorm(trunk, eps=1e-6) if trunk else None
            widths = [(trunk or observation) + others, *hidden]
            self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
            self.norms = nn.ModuleList(nn.LayerNorm(b, eps=1e-6) for b in hidden) if norm else None
            self.last = nn.Linear(widths[-1], outputs)

        def forward(self, observation: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            if self.trunk is not None and self.trunk_norm is not None:
                observation = torch.tanh(self.trunk_norm(self.trunk(observation)))
            x = torch.cat([observation, *others], -1)
            for i, dense in enumerate(self.dense):
                x = dense(x)
                x = self.activation(self.norms[i](x) if self.norms is not None else x)
            return self.last(x)

    def uploaded(batch: Transition, device: str) -> list[torch.Tensor]:
        columns = batch.observation, batch.action, batch.reward, batch.discount, batch.next_observation
        return [torch.as_tensor(np.asarray(x), device=device) for x in columns]

    def polyak(slow: nn.Module, network: nn.Module, rate: float) -> None:
        with torch.no_grad():
            for old, new in zip(slow.parameters(), network.parameters(), strict=True):
                old.copy_((1 - rate) * old + rate * new)

    def encode(action: torch.Tensor, levels: int, bins: int) -> list[torch.Tensor]:
        """The bins [B, D] of every level."""
        low, width = -torch.ones_like(action), 2.0
        chosen = []
        for _ in range(levels):
            width = width / bins
            chosen.append(((action - low) / width).floor().clip(0, bins - 1))
            low = low + width * chosen[-1]
        return [x.long() for x in chosen]

    class CQN:
        """The agent; its network is a list of two streams, advantage and value."""

        def __init__(self, config: Any, spec: Spec, size: int, support: tuple[float, float], device: str):
            observation, actions = spec.observation_shape[0], spec.action_size
            self.config, self.actions, self.size, self.device = config, actions, size, device
            stream = functools.partial(
                Layers,
                observation,
                config.features,
                actions + config.levels,
                config.hidden,
                norm=config.layer_norm,
                activation=config.network.activation,
            )
            advantage, value = stream(actions * config.bins * size), stream(actions * size)
            self.network = nn.ModuleList([advantage, value]).to(device)
            for layers in self.network:
                nn.init.zeros_(layers.last.weight)
                nn.init.zeros_(layers.last.bias)
            self.slow = copy.deepcopy(self.network)
            self.adam = torch.optim.Adam(self.network.parameters(), lr=config.learning_rate)
            self.low, self.high = support
            self.atoms = torch.linspace(*support, size, device=device)

        def outputs(
            self, network: Any, level: int, seen: torch.Tensor, centres: torch.Tensor
        ) -> torch.Tensor:
            """[B, D, bins, K] of all bins at a level."""
            one_hot = torch.eye(self.config.levels, device=self.device)[level].expand(len(seen), -1)
            advantage = network[0](seen, centres, one_hot).view(-1, self.actions, self.config.bins, self.size)
            value = network[1](seen, centres, one_hot).view(-1, self.actions, 1, self.size)
            return value + advantage - advantage.mean(-2, keepdim=True)

        def value(self, outputs: torch.Tensor) -> torch.Tensor:
            return outputs[..., 0] if self.size == 1 else (outputs.softmax(-1) * self.atoms).sum(-1)

        def greedy(self, seen: torch.Tensor) -> list[torch.Tensor]:
            low, width = -torch.ones(len(seen), self.actions, device=self.device), 2.0
            chosen = []
            for level in range(self.config.levels):
                values = self.value(self.outputs(self.network, level, seen, low + width / 2))
                best = values.max(-1).indices
                tied = values.max(-1).values - values.min(-1).values < 1e-4
                if tied.sum() > 0:
                    best = torch.where(
                        tied, torch.randint(0, self.config.bins, best.shape, device=self.device), best
                    )
                chosen.append(best)
                width = width / self.config.bins
                low = low + width * best
            return chosen

        def forward(
            self, network: Any, seen: torch.Tensor, chosen: list[torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Outputs of all bins [B, L, D, bins, K], and of those that were ``chosen`` [B, L, D, K]."""
            low, width = -torch.ones(len(seen), self.actions, device=self.device), 2.0
            every, picked = [], []
            for level, bins in enumerate(chosen):
                every.append(self.outputs(network, level, seen, low + width / 2))
                index = bins[..., None, None].expand(-1, -1, 1, self.size)
                picked.append(every[-1].gather(2, index)[:, :, 0])
                width = width / self.config.bins
                low = low + width * bins
            return torch.stack(every, 1), torch.stack(picked, 1)

        def project(
            self, outputs: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor
        ) -> torch.Tensor:
            """The target of [B, L, D, K], probabilities or values."""
            reward, discount = reward[:, None, None], discount[:, None, None]
            if self.size == 1:
                return reward + discount * outputs[..., 0]
            probabilities = outputs.softmax(-1).view(-1, self.size)
            moved = (reward + discount * self.atoms).clip(self.low, self.high)
            moved = moved.expand(-1, outputs.shape[1] * outputs.shape[2], -1).reshape(-1, self.size)
            place = (moved - self.low) / (self.high - self.low) * (self.size - 1)
            lower, upper = place.floor().long(), place.ceil().long()
            lower[(upper > 0) & (lower == upper)] -= 1
            upper[(lower < self.size - 1) & (lower == upper)] += 1
            target = torch.zeros_like(probabilities)
            first = (torch.arange(len(target), device=self.device) * self.size)[:, None]
            target.view(-1).index_add_(
                0, (lower + first).view(-1), (probabilities * (upper - place)).view(-1)
            )
            target.view(-1).index_add_(
                0, (upper + first).view(-1), (probabilities * (place - lower)).view(-1)
            )
            return target.view(outputs.shape)

        def losses(self, batch: Transition) -> dict[str, torch.Tensor]:
            """The losses of one batch, each without its weight."""
            c = self.config
            seen, action, reward, discount, following = uploaded(batch, self.device)
            with torch.no_grad():
                slow = self.forward(self.slow, following, self.greedy(following))[1]
                target = self.project(slow, reward, c.discount * discount)
            every, logged = self.forward(self.network, seen, encode(action, c.levels, c.bins))
            if self.size == 1:
                td = functional.mse_loss(logged[..., 0], target)
                dominance = (every - logged[..., None, :])[..., 0].clip(min=0).mean()
            else:
                td = -(target * logged.log_softmax(-1)).sum(-1).mean()
                better, worse = logged.softmax(-1).cumsum(-1), every.softmax(-1).cumsum(-1)
                dominance = (better[..., None, :] - worse).clip(min=0).sum(-1).mean()
            ahead = self.value(logged)[..., None] - self.value(every)
            return {
                "critic_loss": td,
                "dominance_loss": dominance,
                "margin_loss": (c.margin - ahead).clip(min=0).mean(),
                "q": self.value(logged).mean(),
            }

        def update(self, batch: Transition) -> dict[str, float]:
            c, losses = self.config, self.losses(batch)
            self.adam.zero_grad(set_to_none=True)
            (
                c.td_weight * losses["critic_loss"]
                + c.dominance_weight * losses["dominance_loss"]
                + c.margin_weight * losses["margin_loss"]
            ).backward()
            self.adam.step()
            polyak(self.slow, self.network, c.target_rate)
            return {name: value.item() for name, value in losses.items()}

    class ARSQ:
        """The agent; each of two members is a list of V and the advantages, one trunk for all tokens."""

        def __init__(self, config: Any, spec: Spec, device: str):
            observation, actions = spec.observation_shape[0], spec.action_size
            self.config, self.actions, self.device = config, actions, device
            self.tokens = config.levels * actions
            layers = functools.partial(
                Layers,
                observation,
                0,
                hidden=config.hidden,
                norm=config.layer_norm,
                activation=config.network.activation,
            )
            self.members = [
                nn.ModuleList([layers(0, outputs=1), layers(actions, outputs=self.tokens * config.bins)]).to(
                    device
                )
                for _ in range(config.critics)
            ]
            self.slow = copy.deepcopy(self.members)
            self.adams = [
                torch.optim.Adam(member.parameters(), lr=config.learning_rate) for member in self.members
            ]

        def contexts(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """The bin [B, T] of every token, and the centres [B, T, D] that it sees."""
            low, width = -torch.ones_like(action), torch.full_like(action, 2.0)
            chosen, seen = [], []
            for _, d in itertools.product(range(self.config.levels), range(self.actions)):
                seen.append(low + width / 2)
                low, width = low.clone(), width.clone()
                width[:, d] = width[:, d] / self.config.bins
                chosen.append(
                    ((action[:, d] - low[:, d]) / width[:, d]).floor().clip(0, self.config.bins - 1)
                )
                low[:, d] = low[:, d] + width[:, d] * chosen[-1]
            return torch.stack(chosen, 1).long(), torch.stack(seen, 1)

        def advantages(self, member: Any, seen: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
            """Soft advantages [B, T, bins]: all tokens' outputs of every row, of which one block is used."""
            repeated = seen[:, None].expand(-1, self.tokens, -1)
            every = member[1](repeated, contexts).view(-1, self.tokens, self.tokens, self.config.bins)
            token = torch.arange(self.tokens, device=self.device)
            u = every[:, token, token]
            alpha = self.config.temperature
            return u - alpha * torch.logsumexp(u / alpha, -1, keepdim=True)

        def losses(self, batch: Transition) -> list[dict[str, torch.Tensor]]:
            """Of each member."""
            c = self.config
            seen, action, reward, discount, following = uploaded(batch, self.device)
            with torch.no_grad():
                slow = torch.stack([member[0](following)[:, 0] for member in self.slow]).min(0).values
                target = reward + c.discount * discount * slow
            bins, contexts = self.contexts(action)
            other = torch.ones(*bins.shape, c.bins, device=self.device).scatter(-1, bins[..., None], 0.0)
            losses = []
            for member in self.members:
                every = self.advantages(member, seen, contexts)
                logged = every.gather(-1, bins[..., None])
                q = member[0](seen)[:, 0] + logged.sum((1, 2))
                if c.bc == "cql":
                    rest = every.masked_fill(other == 0, -torch.inf)
                    bc = (torch.logsumexp(rest, -1) - logged[..., 0]).clip(min=c.bc_clip)
                else:
                    bc = ((every - logged).clip(min=c.bc_clip) * other).sum(-1) / (c.bins - 1)
                losses.append(
                    {
                        "critic_loss": functional.mse_loss(q, target),
                        "bc_loss": bc.sum(1).mean(),
                        "q": q.mean(),
                    }
                )
            return losses

        def update(self, batch: Transition) -> dict[str, float]:
            losses = self.losses(batch)
            total = sum(one["critic_loss"] + self.config.bc_weight * one["bc_loss"] for one in losses)
            for adam in self.adams:
                adam.zero_grad(set_to_none=True)
            total.backward()
            for adam in self.adams:
                adam.step()
            for slow, member in zip(self.slow, self.members, strict=True):
                polyak(slow, member, self.config.target_rate)
            return {f"{name}{i}": value.item() for i, one in enumerate(losses) for name, value in one.items()}
