"""Updates as others write them: ILQL's and B-Coder's, with one-hot selectors in JAX and with PyTorch.

Written for timing, with the arithmetic and the sizes of `rl.agents.ilql` (scalar head, no cloned model) and
`rl.agents.bcoder`, whose losses they equal (tests/test_benchmarks_language.py). The first follow LMRL-Gym's code: Q or
logits of every token, of all members and target networks, in float32, and a matrix [N, N] that picks the states of
actions among N = batch x (length - 1). With PyTorch, the models are those of transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl.agents import bcoder, ilql
from rl.agents.state import descend, follow
from rl.language import huggingface
from rl.language.model import LM, Config
from rl.networks import token_heads
from rl.types import Array, Key, Learner, Metrics, Params, State, TokenBatch
from rl.values import heads

CONFIG = ilql.Config(bc_weight=0.0)
CODER = bcoder.Config()


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

    def update(state: State, batch: TokenBatch, key: Key) -> tuple[State, Metrics]:
        del key
        taken = batch.is_action[:, 1:]
        pick, count = _selector(taken), taken.sum()
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


def one_hot_bcoder(lm: LM, stage: str) -> Learner:
    """B-Coder's ``stage``, value or policy, with the state of `rl.agents.bcoder`. Every row is one whole episode."""
    config = dataclasses.replace(CODER, value_updates=-1 if stage == "value" else 0)
    same = bcoder.make(config, lm, heads.scalar())
    body = token_heads.state_values(1, config.inner)
    optimisers = {
        "policy": optax.adamw(config.learning_rate, weight_decay=config.weight_decay),
        "residual": optax.adamw(config.learning_rate, weight_decay=0.0),
        "value": optax.adamw(config.value_learning_rate, weight_decay=config.weight_decay),
    }

    def update(state: State, batch: TokenBatch, key: Key) -> tuple[State, Metrics]:
        del key
        taken = batch.is_action[:, 1:]
        pick, count = _selector(taken), taken.sum()
        tokens = jax.nn.one_hot(batch.tokens[:, 1:], lm.config.vocabulary)
        known = pick.sum(1)
        reward = pick @ batch.reward[:, 1:].reshape(-1)
        goes_on = pick @ batch.discount[:, 1:].reshape(-1)

        def chosen(every: Array, one: Array) -> Array:
            return pick @ (every * one).sum(-1).reshape(-1)  # [N]

        def logits(params: Params) -> tuple[Array, Array]:
            features = lm.features(params, batch.tokens, batch.segment)[:, :-1]
            return features, lm.logits(params, features)

        def advantages(logits: Array) -> Array:
            return config.alpha * (logits - logits.max(-1, keepdims=True))

        def values(value: Params, change: Array | float = 0.0) -> Array:
            features = lm.features(value["lm"], batch.tokens, batch.segment)[:, :-1]
            raw = pick @ (body.apply(value["head"], features)[..., 0] + change).reshape(-1)
            return config.maximum - bcoder.soft_abs(raw)

        def error(advantage: Array, v: Array, ahead: Array | float) -> Array:
            after = jnp.roll(v + ahead, -1)
            target = reward + config.discount * goes_on * jax.lax.stop_gradient(after)
            return (jnp.square(advantage + v - target) * known).sum() / count

        def value_loss(trained: Params) -> tuple[Array, Metrics]:
            every = advantages(logits(state.target["policy"])[1])
            critic = error(chosen(every, tokens), values(trained["value"]), 0.0)
            return critic, {"critic_loss": critic}

        def policy_loss(trained: Params) -> tuple[Array, Metrics]:
            best = jax.nn.one_hot(logits(state.target["policy"])[1].argmax(-1), lm.config.vocabulary)
            features, all_logits = logits(trained["policy"])
            every = advantages(all_logits)
            change = body.apply(trained["residual"], features) - body.apply(
                state.target["residual"], features
            )
            advantage = chosen(every, tokens)
            critic = error(advantage, values(state.params["value"], change[..., 0]), chosen(every, best))
            surprise = optax.softmax_cross_entropy(all_logits, tokens).reshape(-1)
            imitation = (pick @ surprise * known).sum() / count
            anchor = -(advantage * known).sum() / count
            total = critic + config.advantage_weight * anchor + config.imitation_weight * imitation
            return total, {"critic_loss": critic, "imitation_loss": imitation, "advantage_loss": anchor}

        loss, names = (value_loss, ("value",)) if stage == "value" else (policy_loss, ("policy", "residual"))
        gradients, metrics = jax.grad(loss, has_aux=True)({name: state.params[name] for name in names})
        state = descend(state, gradients, optimisers)
        return state._replace(step=state.step + 1), metrics

    return same._replace(update=update)


def _selector(is_action: Array) -> Array:
    """[N, N]: row i picks the i-th action's column; rows beyond the last action pick nothing."""
    order = jnp.cumsum(is_action.reshape(-1)) - 1
    return jax.nn.one_hot(jnp.where(is_action.reshape(-1), order, -1), order.size).T


# ---- PyTorch --------------------------------------------------------------------------------------------------


class Manner(NamedTuple):
    """How PyTorch computes, as `rl.language.model.make` has it."""

    bfloat16: bool = False
    remat: bool = False


PLAIN = Manner()


def torch_model(config: Config, manner: Manner = PLAIN) -> Any:
    """transformers' model of the same architecture, on the GPU if torch finds one."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**huggingface.describe(config)))
    if manner.remat:
        model.train()
        model.gradient_checkpointing_enable()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def torch_head(config: Config, model: Any, outputs: int) -> Any:
    """A head of two layers, where the model is."""
    from torch import nn

    layers = nn.Linear(config.shape.width, CONFIG.inner), nn.ReLU(), nn.Linear(CONFIG.inner, outputs)
    return nn.Sequential(*layers).to(next(model.parameters()).device)


def torch_ilql(
    config: Config,
    batch: TokenBatch,
    parts: dict[str, Any] | None = None,
    slow: Any = None,
    manner: Manner = PLAIN,
) -> Callable[[], dict[str, float]]:
    """One update of ILQL that returns its losses, as a function.

    Args:
      config: the trunk's.
      batch: every row one whole episode.
      parts: trunk, q and v; made by default.
      slow: the target networks, of the trunk and the Q heads; by default equal to them.
      manner: how to compute.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    if parts is None:
        trunk = torch_model(config, manner).model
        pair = nn.ModuleList([torch_head(config, trunk, config.vocabulary) for _ in range(2)])
        parts = {"trunk": trunk, "q": pair, "v": torch_head(config, trunk, 1)}
    trunk, q_heads, v_head = parts["trunk"], parts["q"], parts["v"]
    slow_trunk, slow_heads = slow or (copy.deepcopy(trunk), copy.deepcopy(q_heads))
    trained = [*trunk.parameters(), *q_heads.parameters(), *v_head.parameters()]
    adam = torch.optim.AdamW(trained, lr=CONFIG.learning_rate, weight_decay=0.0)
    tokens, action, reward, discount = _tensors(trunk, batch)

    def losses() -> dict[str, Any]:
        with torch.no_grad():
            hidden = slow_trunk(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
            slow = torch.minimum(*(_of(head(hidden), action) for head in slow_heads))
        hidden = trunk(input_ids=tokens, use_cache=False).last_hidden_state
        v = v_head(hidden)[..., 0]
        target = reward + CONFIG.discount * discount * v[:, 1:].detach()
        v = v[:, :-1]
        weight = torch.where(slow > v, CONFIG.expectile, 1 - CONFIG.expectile)
        value = (weight * (v - slow) ** 2).mean()
        critic = cql = torch.zeros((), device=tokens.device)
        for head in q_heads:
            every = head(hidden[:, :-1])
            critic = critic + ((_of(every, action) - target) ** 2).mean()
            cql = cql + functional.cross_entropy(every.flatten(0, 1), action.flatten())
        total = critic + value + CONFIG.cql_weight * cql
        return {"critic_loss": critic, "value_loss": value, "cql": cql, "total": total}

    def update() -> dict[str, float]:
        metrics = _descend(adam, losses, tokens, manner)
        with torch.no_grad():
            for module, online in ((slow_trunk, trunk), (slow_heads, q_heads)):
                for old, new in zip(module.parameters(), online.parameters(), strict=True):
                    old.lerp_(new, CONFIG.target_rate)
        return metrics

    return update


def torch_bcoder(
    config: Config,
    batch: TokenBatch,
    stage: str,
    parts: dict[str, Any] | None = None,
    frozen: Any = None,
    manner: Manner = PLAIN,
) -> Callable[[], dict[str, float]]:
    """One update of B-Coder's ``stage``, value or policy, as `torch_ilql` has it.

    Args:
      config: the models'.
      batch: every row one whole episode, every action to be imitated.
      stage: which.
      parts: policy, residual, trunk and head of the value; made by default.
      frozen: what the policy and the residual were at the start; by default equal to them.
      manner: how to compute.
    """
    import torch
    from torch.nn import functional

    if parts is None:
        policy = torch_model(config, manner)
        small = [torch_head(config, policy, 1) for _ in range(2)]
        parts = {
            "policy": policy,
            "residual": small[0],
            "trunk": torch_model(config, manner).model,
            "head": small[1],
        }
    policy, residual, trunk, head = (parts[name] for name in ("policy", "residual", "trunk", "head"))
    checkpoint, old_residual = frozen or (copy.deepcopy(policy), copy.deepcopy(residual))
    modules = (trunk, head) if stage == "value" else (policy, residual)
    rate = CODER.value_learning_rate if stage == "value" else CODER.learning_rate
    trained = [parameter for module in modules for parameter in module.parameters()]
    adam = torch.optim.AdamW(trained, lr=rate, weight_decay=CODER.weight_decay)
    tokens, action, reward, discount = _tensors(policy, batch)

    def read(model: Any) -> tuple[Any, Any]:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden, model.lm_head(hidden)

    def advantages(logits: Any) -> Any:
        return CODER.alpha * (logits - logits.max(-1, keepdim=True).values)

    def outputs() -> Any:
        return head(trunk(input_ids=tokens, use_cache=False).last_hidden_state)[..., 0]

    def error(advantage: Any, v: Any, ahead: Any) -> Any:
        v = CODER.maximum - ((functional.softplus(v) + functional.softplus(-v)) / 2 - math.log(2))
        target = reward + CODER.discount * discount * (v + ahead)[:, 1:].detach()
        return ((advantage + v[:, :-1] - target) ** 2).mean()

    def value_losses() -> dict[str, Any]:
        with torch.no_grad():
            advantage = _of(advantages(read(checkpoint)[1])[:, :-1], action)
        critic = error(advantage, outputs(), 0.0)
        return {"critic_loss": critic, "total": critic}

    def policy_losses() -> dict[str, Any]:
        with torch.no_grad():
            best, base = read(checkpoint)[1].argmax(-1), outputs()
        hidden, logits = read(policy)
        every = advantages(logits)
        advantage = _of(every[:, :-1], action)
        change = (residual(hidden) - old_residual(hidden))[..., 0]
        critic = error(advantage, base + change, _of(every, best))
        imitation = functional.cross_entropy(logits[:, :-1].flatten(0, 1), action.flatten())
        anchor = -advantage.mean()
        total = critic + CODER.advantage_weight * anchor + CODER.imitation_weight * imitation
        return {"critic_loss": critic, "imitation_loss": imitation, "advantage_loss": anchor, "total": total}

    return functools.partial(
        _descend, adam, value_losses if stage == "value" else policy_losses, tokens, manner
    )


def _tensors(model: Any, batch: TokenBatch) -> tuple[Any, ...]:
    """Tokens [B, T]; and actions, rewards and discounts [B, T - 1], where the model is."""
    import torch

    device = next(model.parameters()).device
    arrays = batch.tokens.astype(np.int64), batch.reward[:, 1:], batch.discount[:, 1:]
    tokens, reward, discount = (torch.from_numpy(np.array(x)).to(device) for x in arrays)
    return tokens, tokens[:, 1:], reward, discount


def _of(every: Any, action: Any) -> Any:
    return every.gather(-1, action[..., None])[..., 0]


def _descend(
    adam: Any, losses: Callable[[], dict[str, Any]], tokens: Any, manner: Manner
) -> dict[str, float]:
    """One step down the total; the losses before it."""
    import torch

    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=manner.bfloat16):
        terms = losses()
    adam.zero_grad()
    terms.pop("total").backward()
    adam.step()
    return {name: float(loss.detach()) for name, loss in terms.items()}


def torch_generate(
    config: Config, prompts: np.ndarray, steps: int, manner: Manner = PLAIN
) -> Callable[[], Any]:
    """Samples ``steps`` tokens after each of ``prompts`` [B, T] with transformers' own loop and cache."""
    import torch

    model = torch_model(config).eval()
    tokens = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
    chosen = {"do_sample": True, "top_k": 0, "max_new_tokens": steps, "min_new_tokens": steps}

    def call() -> Any:
        with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=manner.bfloat16):
            return model.generate(tokens, attention_mask=torch.ones_like(tokens), **chosen, pad_token_id=0)

    return call
