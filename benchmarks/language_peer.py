"""ILQL's update as others write it: with one-hot selectors in JAX, and with PyTorch and transformers.

Written for timing, with the arithmetic and the sizes of `rl.agents.ilql` (scalar head, no cloned model), whose losses
they equal (tests/test_benchmarks_language.py). The first follows LMRL-Gym's code: Q of every token, of both members
and their slow copies, in float32, and a matrix [N, N] that picks the states of actions among N = batch x (length - 1).
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl.agents import ilql
from rl.agents.state import descend, follow
from rl.language import huggingface
from rl.language.model import LM, Config
from rl.networks import token_heads
from rl.types import Array, Key, Learner, Metrics, Params, State, TokenBatch
from rl.values import heads

CONFIG = ilql.Config(bc_weight=0.0)


def versions() -> dict[str, str]:
    """Of PyTorch and transformers; empty where they are not installed."""
    try:
        return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    except importlib.metadata.PackageNotFoundError:
        return {}


# ---- one-hot selectors ----------------------------------------------------------------------------------------


def one_hot(lm: LM) -> Learner:
    """ILQL with the state and the parameters of `rl.agents.ilql`. Every row is one whole episode."""
    same = ilql.make(CONFIG, lm, heads.scalar())
    q_net = token_heads.vocabulary_values(lm.config.vocabulary, 1, CONFIG.inner)
    v_net = token_heads.state_values(1, CONFIG.inner)
    optimisers = dict.fromkeys(("trunk", "q", "v"), optax.adamw(CONFIG.learning_rate, weight_decay=0.0))

    def every(trunk: Params, q: Params, batch: TokenBatch) -> tuple[Array, Array]:
        features = lm.features(trunk, batch.tokens, batch.segment)
        return features, q_net.all(q, features[:, :-1])[..., 0]  # [E, B, S, A]

    def selector(is_action: Array) -> Array:
        """[N, N]: row i picks the i-th action's column; rows beyond the last action pick nothing."""
        order = jnp.cumsum(is_action.reshape(-1)) - 1
        return jax.nn.one_hot(jnp.where(is_action.reshape(-1), order, -1), order.size).T

    def update(state: State, batch: TokenBatch, key: Key) -> tuple[State, Metrics]:
        del key
        taken = batch.is_action[:, 1:]
        pick, count = selector(taken), taken.sum()
        tokens = jax.nn.one_hot(batch.tokens[:, 1:], lm.config.vocabulary)

        def chosen(q: Array) -> Array:
            return (pick @ (q * tokens).sum(-1).reshape(len(q), -1).T).T  # [E, N]

        known = pick.sum(1)
        reward = pick @ batch.reward[:, 1:].reshape(-1)
        goes_on = pick @ batch.discount[:, 1:].reshape(-1)
        slow = chosen(every(state.target["trunk"], state.target["q"], batch)[1]).min(0)

        def loss(params: Params) -> tuple[Array, Metrics]:
            features, q_all = every(params["trunk"], params["q"], batch)
            v = pick @ v_net.apply(params["v"], features[:, :-1])[..., 0].reshape(-1)
            following = jax.lax.stop_gradient(jnp.roll(v, -1))
            target = reward + CONFIG.discount * goes_on * following
            q = chosen(q_all)
            critic = (jnp.square(q - target) * known).sum() / count
            weight = jnp.where(slow > v, CONFIG.expectile, 1 - CONFIG.expectile)
            value = (weight * jnp.square(v - slow) * known).sum() / count
            entropy = optax.softmax_cross_entropy(q_all, tokens).sum(0).reshape(-1)
            cql = (pick @ entropy * known).sum() / count
            metrics = {"critic_loss": critic, "value_loss": value, "cql": cql}
            return critic + value + CONFIG.cql_weight * cql, metrics

        trained = {name: state.params[name] for name in optimisers}
        gradients, metrics = jax.grad(loss, has_aux=True)(trained)
        state = follow(descend(state, gradients, optimisers), CONFIG.target_rate)
        return state._replace(step=state.step + 1), metrics

    return same._replace(update=update)


# ---- PyTorch --------------------------------------------------------------------------------------------------


def torch_trunk(config: Config) -> Any:
    """transformers' model of the same architecture, on the GPU if torch finds one."""
    import torch
    import transformers

    described = transformers.LlamaConfig(**huggingface.describe(config))
    return transformers.LlamaModel(described).to("cuda" if torch.cuda.is_available() else "cpu")


def torch_update(
    config: Config, batch: TokenBatch, parts: dict[str, Any] | None = None, slow: Any = None
) -> Callable[[], dict[str, float]]:
    """One update of ILQL that returns its losses, as a function.

    Args:
      config: the trunk's.
      batch: every row one whole episode.
      parts: as from `torch_parts`, which makes them by default.
      slow: the slow copies of the trunk and the Q heads; by default equal to them.
    """
    import torch
    from torch.nn import functional

    parts = parts or torch_parts(config)
    trunk, q_heads, v_head = parts["trunk"], parts["q"], parts["v"]
    slow_trunk, slow_heads = slow or (copy.deepcopy(trunk), copy.deepcopy(q_heads))
    device = next(trunk.parameters()).device
    trained = [*trunk.parameters(), *q_heads.parameters(), *v_head.parameters()]
    adam = torch.optim.AdamW(trained, lr=CONFIG.learning_rate, weight_decay=0.0)
    tokens, reward, discount = (
        torch.from_numpy(np.array(x)).to(device)
        for x in (batch.tokens.astype(np.int64), batch.reward[:, 1:], batch.discount[:, 1:])
    )
    action = tokens[:, 1:]

    def of_action(every: Any) -> Any:
        return every.gather(-1, action[..., None])[..., 0]

    def update() -> dict[str, float]:
        with torch.no_grad():
            hidden = slow_trunk(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
            slow = torch.minimum(*(of_action(head(hidden)) for head in slow_heads))
        hidden = trunk(input_ids=tokens, use_cache=False).last_hidden_state
        v = v_head(hidden)[..., 0]
        target = reward + CONFIG.discount * discount * v[:, 1:].detach()
        v = v[:, :-1]
        weight = torch.where(slow > v, CONFIG.expectile, 1 - CONFIG.expectile)
        value = (weight * (v - slow) ** 2).mean()
        critic = cql = torch.zeros((), device=device)
        for head in q_heads:
            every = head(hidden[:, :-1])
            critic = critic + ((of_action(every) - target) ** 2).mean()
            cql = cql + functional.cross_entropy(every.flatten(0, 1), action.flatten())
        adam.zero_grad()
        (critic + value + CONFIG.cql_weight * cql).backward()
        adam.step()
        with torch.no_grad():
            for module, own in ((slow_trunk, trunk), (slow_heads, q_heads)):
                for old, new in zip(module.parameters(), own.parameters(), strict=True):
                    old.lerp_(new, CONFIG.target_rate)
        losses = {"critic_loss": critic, "value_loss": value, "cql": cql}
        return {name: float(loss.detach()) for name, loss in losses.items()}

    return update


def torch_parts(config: Config) -> dict[str, Any]:
    """The trunk, and heads of two layers each."""
    from torch import nn

    trunk = torch_trunk(config)

    def head(outputs: int) -> Any:
        layers = nn.Linear(config.shape.width, CONFIG.inner), nn.ReLU(), nn.Linear(CONFIG.inner, outputs)
        return nn.Sequential(*layers).to(next(trunk.parameters()).device)

    return {
        "trunk": trunk,
        "q": nn.ModuleList([head(config.vocabulary), head(config.vocabulary)]),
        "v": head(1),
    }


def torch_generate(config: Config, prompts: np.ndarray, steps: int) -> Callable[[], Any]:
    """Samples ``steps`` tokens after each of ``prompts`` [B, T] with transformers' own loop and cache."""
    import torch
    import transformers

    described = transformers.LlamaConfig(**huggingface.describe(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.LlamaForCausalLM(described).to(device).eval()
    given = torch.from_numpy(prompts.astype(np.int64)).to(device)
    chosen = {"do_sample": True, "top_k": 0, "max_new_tokens": steps, "min_new_tokens": steps}

    def call() -> Any:
        with torch.no_grad():
            return model.generate(given, attention_mask=torch.ones_like(given), **chosen, pad_token_id=0)

    return call
