"""The updates of FQL, QC and DEAS in PyTorch, in the manner of published code: one update per Python call.

Written for timing, with the arithmetic and the sizes of `rl.agents.fql` (scalar head; QC is its ``extraction=best_of``
on chunks of actions) and `rl.agents.deas` (scalar head, or HL-Gauss), whose losses they equal
(tests/test_benchmarks_proposals.py). Batches are drawn by NumPy and uploaded, members of an ensemble and steps of a
flow are Python loops, and logged numbers are fetched one by one.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import coarse_peer
from rl.types import Spec, Transition

AGENTS = {"fql": ("scalar",), "qc": ("scalar",), "deas": ("scalar", "hl_gauss")}  # and their value heads

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError:  # only what is above this line may be used then
    torch = None  # type: ignore[assignment]


def updates(
    name: str,
    config: Any,
    size: int,
    support: tuple[float, float],
    spec: Spec,
    sample: Callable[[], Transition],
) -> Callable[[], Any]:
    """One update on a batch that ``sample`` draws; finished when it returns.

    Args:
      name: one of `AGENTS`.
      config: the agent's own.
      size: outputs of the value head; 1 is scalar, more are bins of HL-Gauss.
      support: of the bins, low and high.
      spec: of the data; vectors. The action is a chunk where the agent decides on several.
      sample: a batch of NumPy arrays.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    agent = DEAS(config, spec, size, support, device) if name == "deas" else FQL(config, spec, device)
    return lambda: agent.update(sample())


if torch:

    class Layers(nn.Module):
        """Dense layers with GELU and then, if asked for, LayerNorm after all but the last; inputs side by side."""

        def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, norm: bool):
            super().__init__()
            self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise([inputs, *hidden]))
            self.norms = nn.ModuleList(nn.LayerNorm(b, eps=1e-6) for b in hidden) if norm else None
            self.last = nn.Linear(hidden[-1], outputs)

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            lead = torch.broadcast_shapes(*(x.shape[:-1] for x in inputs))
            x = torch.cat([x.expand(*lead, x.shape[-1]) for x in inputs], -1)
            for i, dense in enumerate(self.dense):
                x = functional.gelu(dense(x), approximate="tanh")
                x = self.norms[i](x) if self.norms else x
            return self.last(x)

    class Flow:
        """The cloned policy of both agents: its velocity, its loss and its draws."""

        def __init__(self, config: Any, spec: Spec, device: str):
            self.config, self.actions, self.device = config, spec.action_size, device
            inputs = spec.observation_shape[0] + self.actions + 1
            self.velocity = Layers(inputs, config.hidden, self.actions, False).to(device)

        def loss(self, seen: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            noise, time = self.normal(action.shape), self.uniform((len(action), 1))
            error = self.velocity(seen, (1 - time) * noise + time * action, time) - (action - noise)
            return error.square().mean()

        @torch.no_grad()
        def carried(self, seen: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            """Where Euler's method carries ``noise``, clipped to the box."""
            x, steps = noise, self.config.flow_steps
            for step in range(steps):
                x = x + self.velocity(seen, x, torch.full((1,), step / steps, device=self.device)) / steps
            return x.clip(-1, 1)

        def draws(self, seen: torch.Tensor) -> torch.Tensor:
            """Candidates [N, B, D] at each of ``seen`` [B, O]."""
            return self.carried(seen, self.normal((self.config.candidates, len(seen), self.actions)))

        def normal(self, shape: Sequence[int]) -> torch.Tensor:
            return torch.randn(*shape, device=self.device)

        def uniform(self, shape: Sequence[int]) -> torch.Tensor:
            return torch.rand(*shape, device=self.device)

    def picked(candidates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Of candidates [N, B, D] those of greatest value [N, B]."""
        index = values.argmax(0)[None, :, None].expand(1, -1, candidates.shape[-1])
        return candidates.gather(0, index)[0]

    def critics(config: Any, spec: Spec, size: int, device: str) -> nn.ModuleList:
        inputs = spec.observation_shape[0] + spec.action_size
        members = (Layers(inputs, config.hidden, size, config.layer_norm) for _ in range(config.critics))
        return nn.ModuleList(members).to(device)

    def together(members: Iterable[nn.Module], *inputs: torch.Tensor) -> torch.Tensor:
        """Outputs [E, ..., K] of all members."""
        return torch.stack([member(*inputs) for member in members])

    class FQL:
        """The agent, with the distilled policy, or the best of the flow's draws."""

        def __init__(self, config: Any, spec: Spec, device: str):
            self.config, self.device = config, device
            self.flow = Flow(config, spec, device)
            self.critics = critics(config, spec, 1, device)
            self.slow = copy.deepcopy(self.critics)
            parts = [self.critics, self.flow.velocity]
            self.policy = None
            if config.extraction == "distilled":
                inputs = spec.observation_shape[0] + spec.action_size
                self.policy = Layers(inputs, config.hidden, spec.action_size, False).to(device)
                parts.append(self.policy)
            self.adams = [torch.optim.Adam(part.parameters(), lr=config.learning_rate) for part in parts]

        def joined(self, q: torch.Tensor) -> torch.Tensor:
            return q.mean(0) if self.config.aggregation == "mean" else q.min(0).values

        @torch.no_grad()
        def act(self, seen: torch.Tensor) -> torch.Tensor:
            if self.policy is not None:
                return self.policy(seen, self.flow.normal((len(seen), self.flow.actions))).clip(-1, 1)
            candidates = self.flow.draws(seen)
            return picked(candidates, self.joined(together(self.critics, seen, candidates)[..., 0]))

        def losses(self, batch: Transition) -> dict[str, torch.Tensor]:
            c = self.config
            seen, action, reward, discount, following = coarse_peer.uploaded(batch, self.device)
            with torch.no_grad():
                q_next = self.joined(together(self.slow, following, self.act(following))[..., 0])
                target = reward + c.discount * discount * q_next
            q = together(self.critics, seen, action)[..., 0]
            losses = {
                "critic_loss": (q - target).square().mean(1).sum(),
                "flow_loss": self.flow.loss(seen, action),
            }
            return losses | self.improvement(seen, action) | {"q": q.mean()}

        def improvement(self, seen: torch.Tensor, action: torch.Tensor) -> dict[str, torch.Tensor]:
            """The loss of the distilled policy."""
            if self.policy is None:
                return {}
            noise = self.flow.normal(action.shape)
            chosen = self.policy(seen, noise)
            distillation = (chosen - self.flow.carried(seen, noise)).square().mean()
            for critic in self.critics.parameters():
                critic.requires_grad_(False)
            q = together(self.critics, seen, chosen.clip(-1, 1))[..., 0].mean(0)
            for critic in self.critics.parameters():
                critic.requires_grad_(True)
            scale = 1 / q.abs().mean().detach().clip(min=1e-6) if self.config.normalize_q else 1.0
            loss = self.config.alpha * distillation - scale * q.mean()
            return {"policy_loss": loss, "distillation": distillation, "policy_q": q.mean()}

        def update(self, batch: Transition) -> dict[str, float]:
            losses = self.losses(batch)
            total = sum(
                losses[name] for name in ("critic_loss", "flow_loss", "policy_loss") if name in losses
            )
            return descend(self, total, losses)

    class DEAS:
        """The agent: IQL on chunks, with a value of its own and the best of the flow's draws."""

        def __init__(self, config: Any, spec: Spec, size: int, support: tuple[float, float], device: str):
            self.config, self.device, self.size = config, device, size
            self.flow = Flow(config, spec, device)
            self.critics = critics(config, spec, size, device)
            self.slow = copy.deepcopy(self.critics)
            self.v = Layers(spec.observation_shape[0], config.hidden, size, config.layer_norm).to(device)
            parts = [self.critics, self.v, self.flow.velocity]
            self.adams = [torch.optim.Adam(part.parameters(), lr=config.learning_rate) for part in parts]
            self.low, self.interior = support[0], size - 6  # three bins beyond either end
            self.width = (support[1] - support[0]) / max(self.interior, 1)
            self.edges = torch.arange(-3, size - 2, dtype=torch.float32, device=device)

        def value(self, outputs: torch.Tensor) -> torch.Tensor:
            if self.size == 1:
                return outputs[..., 0]
            centres = self.low + self.width * (self.edges[:-1] + 0.5)
            return (outputs.softmax(-1) * centres).sum(-1)

        def target(self, value: torch.Tensor) -> torch.Tensor:
            """A value [...], or its histogram [..., K]."""
            if self.size == 1:
                return value
            place = ((value - self.low) / self.width).clip(0, self.interior)
            cdf = torch.erf((self.edges - place[..., None]) / (math.sqrt(2) * 0.75))
            mass = cdf.diff(dim=-1).clip(min=0)
            return mass / mass.sum(-1, keepdim=True)

        def error(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if self.size == 1:
                return (outputs[..., 0] - target).square()
            return -(target * outputs.log_softmax(-1)).sum(-1)

        def losses(self, batch: Transition) -> dict[str, torch.Tensor]:
            c = self.config
            seen, action, reward, discount, following = coarse_peer.uploaded(batch, self.device)
            with torch.no_grad():
                members = together(self.slow, seen, action)
                index = self.value(members).argmin(0)[None, :, None].expand(1, -1, self.size)
                slow = members.gather(0, index)[0]
                v_target = self.value(slow) if self.size == 1 else slow.softmax(-1)
                q_target = self.target(reward + c.discount * discount * self.value(self.v(following)))
            v = self.v(seen)
            advantage = self.value(slow) - self.value(v)
            weight = (c.expectile - (advantage < 0).float()).abs().detach()
            q = together(self.critics, seen, action)
            return {
                "critic_loss": sum(self.error(member, q_target).mean() for member in q),
                "value_loss": (weight * self.error(v, v_target)).mean(),
                "flow_loss": self.flow.loss(seen, action),
                "q": self.value(q).mean(),
                "v": self.value(v).mean(),
                "advantage": advantage.mean(),
            }

        def update(self, batch: Transition) -> dict[str, float]:
            losses = self.losses(batch)
            return descend(self, losses["critic_loss"] + losses["value_loss"] + losses["flow_loss"], losses)

    def descend(agent: Any, total: torch.Tensor, losses: dict[str, torch.Tensor]) -> dict[str, float]:
        """Target networks follow the critics before the update, and then every network moves."""
        for adam in agent.adams:
            adam.zero_grad(set_to_none=True)
        total.backward()
        coarse_peer.polyak(agent.slow, agent.critics, agent.config.target_rate)
        for adam in agent.adams:
            adam.step()
        return {name: value.item() for name, value in losses.items()}
