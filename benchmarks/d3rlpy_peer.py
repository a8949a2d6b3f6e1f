"""Offline agents of d3rlpy with the hyper-parameters, the networks and the weights of ours, for `benchmarks.parity`.

What its configuration cannot say is changed on the learner itself, where it is to be ``adapted``, and nothing else is:

- IQL's standard deviation. Its logarithm is a sigmoid between -5 and 2 there, which starts at -1.5; here it is the
  parameter itself, clipped to these bounds, which starts at 0. It gets ours.
- CQL's targets. They take the policy's mode there unless they hold the entropy; ours, as the authors' code, a sample.
  It gets ours. Its deviations may be as small as exp(-20), and get our bound, exp(-5).
- The order of updates. IQL and CQL move the critics first there, and the policy by the new ones; ours take all
  gradients at the same parameters. They get ours. TD3's policy moves on updates 1, 3, ... there; it gets our 2, 4, ...
- LayerNorm adds 1e-5 to the variance there, and gets our 1e-6.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from rl.machine import usable_cores
from rl.networks.mlp import LOG_STD_MAX, LOG_STD_MIN
from rl.types import Spec, Transition

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # gym's remarks
    import d3rlpy
    import torch
    from d3rlpy.models import VectorEncoderFactory
    from d3rlpy.models.torch import build_squashed_gaussian_distribution
    from d3rlpy.optimizers import AdamFactory
    from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory

Losses = Mapping[str, float]

# {agent: {name of our metric: what it is of the losses there}}; an update without it leaves it out.
LOSSES: dict[str, dict[str, Callable[[Losses, Any], float]]] = {
    "iql": {
        "critic_loss": lambda x, _: x["q_loss"],
        "value_loss": lambda x, _: x["v_loss"],
        "policy_loss": lambda x, _: x["actor_loss"],
    },
    "td3_bc": {
        "critic_loss": lambda x, _: x["critic_loss"],
        "policy_loss": lambda x, _: x["actor_loss"],
        "cloning": lambda x, _: x["bc_loss"],
    },
    "cql": {
        "critic_loss": lambda x, _: x["critic_loss"] - x["conservative_loss"],
        "conservative_gap": lambda x, config: x["conservative_loss"] / (2 * config.weight),
        "policy_loss": lambda x, _: x["actor_loss"],
        "alpha": lambda x, _: x["temp"],
    },
}
LOSSES["rebrac"] = LOSSES["td3_bc"]


def learner(agent: str, config: Any, spec: Spec, batch_size: int, seed: int, *, adapted: bool = True) -> Any:
    """d3rlpy's learner of these hyper-parameters, with weights of its own.

    Args:
      agent: a name in `LOSSES`.
      config: our hyper-parameters of it.
      spec: of the data.
      batch_size: transitions per update.
      seed: of its weights and its noise.
      adapted: whether it gets what this module's docstring lists.

    Raises:
      ValueError: hyper-parameters that it does not have.
    """
    check(agent, config)
    d3rlpy.seed(seed)
    torch.set_num_threads(usable_cores())
    norm = getattr(config, "layer_norm", False)
    common = {
        "batch_size": batch_size,
        "gamma": config.discount,
        "tau": config.target_rate,
        "critic_learning_rate": config.learning_rate,
        "actor_learning_rate": getattr(config, "policy_learning_rate", config.learning_rate),
        "critic_encoder_factory": VectorEncoderFactory(list(config.hidden), use_layer_norm=norm),
        "actor_encoder_factory": VectorEncoderFactory(list(config.hidden)),
        "critic_optim_factory": _adam(config.critic_optimiser),
        "actor_optim_factory": _adam(config.policy_optimiser),
    }
    algo = _OF[agent](config, common).create(device="cpu")
    algo.create_impl(spec.observation_shape, spec.action_size)
    if adapted:
        _adapt(agent, algo)
    return algo


def _iql(config: Any, common: Mapping[str, Any]) -> Any:
    return d3rlpy.algos.IQLConfig(
        **common,
        value_encoder_factory=VectorEncoderFactory(list(config.hidden), use_layer_norm=config.layer_norm),
        expectile=config.expectile,
        weight_temp=config.temperature,
        n_critics=config.critics,
    )


def _td3(config: Any) -> dict[str, Any]:
    return {
        "target_smoothing_sigma": config.policy_noise,
        "target_smoothing_clip": config.noise_clip,
        "update_actor_interval": config.policy_delay,
        "n_critics": config.critics,
    }


def _cql(config: Any, common: Mapping[str, Any]) -> Any:
    return d3rlpy.algos.CQLConfig(
        **common,
        conservative_weight=config.weight,
        n_action_samples=config.samples,
        temp_learning_rate=config.policy_learning_rate,
        alpha_learning_rate=0.0,  # no Lagrange multiplier
        alpha_threshold=0.0,
    )


_OF: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "iql": _iql,
    "td3_bc": lambda c, common: d3rlpy.algos.TD3PlusBCConfig(**common, **_td3(c), alpha=c.alpha),
    "cql": _cql,
    "rebrac": lambda c, common: d3rlpy.algos.ReBRACConfig(
        **common, **_td3(c), actor_beta=c.policy_cloning, critic_beta=c.critic_cloning
    ),
}


def _adam(settings: Any) -> Any:
    """torch's Adam with our settings of one network's."""
    cosine = CosineAnnealingLRFactory(T_max=settings.decay_updates)
    return AdamFactory(
        eps=settings.epsilon,
        clip_grad_norm=settings.clip or None,
        lr_scheduler_factory=cosine if settings.schedule == "cosine" else None,
    )


def check(agent: str, config: Any) -> None:
    """Raises ValueError, naming the field, for hyper-parameters that d3rlpy's agent does not have."""
    norm = getattr(config, "layer_norm", False)
    needed = {"network.activation": "relu", "network.dropout": 0.0, "network.residual": False}
    needed |= {"network.policy_layer_norm": False, "candidates": 1, "aggregation": "min"}
    needed |= {"network.norm_after": True} if norm else {}
    needed |= {"variant": "h", "target_gap": 0.0, "backup_entropy": False, "max_backup": False}
    for part in ("critic", "policy", "value"):
        needed |= {f"{part}_optimiser.warm_up": 0, f"{part}_optimiser.weight_decay": 0.0}
    if agent == "iql" and config.value_optimiser != config.critic_optimiser:
        raise ValueError("d3rlpy's IQL moves critics and value by one optimiser: give both the same settings")
    for name, value in needed.items():
        try:
            setting = functools.reduce(getattr, name.split("."), config)
        except AttributeError:
            continue
        if setting != value:
            raise ValueError(f"agent.{name}={setting}: d3rlpy's {agent} has {value} alone")


def _adapt(agent: str, algo: Any) -> None:
    """Changes what the configuration cannot say."""
    modules = algo.impl.modules
    everywhere = modules.get_torch_modules().values()  # target networks, too
    for module in (module for part in everywhere for module in part.modules()):
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    if agent in ("iql", "cql"):
        algo.impl.inner_update = functools.partial(_at_once, algo.impl)
    else:
        algo.set_grad_step(1)
    if agent == "iql":
        with torch.no_grad():
            modules.policy._logstd.zero_()
        modules.policy.forward = functools.partial(_plain_deviation, modules.policy, modules.policy.forward)
    if agent == "cql":
        modules.policy._min_logstd = LOG_STD_MIN
        algo.impl.compute_target = functools.partial(_sampled_target, algo.impl)
        algo.impl.update_temp = functools.partial(_keep_surplus, algo.impl)


def _plain_deviation(policy: Any, forward: Callable[[Any], Any], observation: Any) -> Any:
    """The policy's output with our standard deviation."""
    return forward(observation)._replace(logstd=policy._logstd.clamp(LOG_STD_MIN, LOG_STD_MAX))


def _at_once(impl: Any, batch: Any, grad_step: int) -> dict[str, float]:
    """An update with all gradients at the same parameters."""
    del grad_step
    actor = impl.compute_actor_grad(batch)
    critic = impl.compute_critic_grad(
        batch
    )  # which clears the gradient that the policy's loss left in the critics
    impl.modules.critic_optim.step()
    impl.modules.actor_optim.step()
    if hasattr(impl, "surplus"):
        _move_temperature(impl)
    impl.update_critic_target()
    return {name: value.item() for loss in (critic, actor) for name, value in vars(loss).items()}


def _keep_surplus(impl: Any, log_prob: Any) -> Any:
    """In place of a step of the temperature: what it descends, for `_move_temperature`."""
    impl.surplus = (log_prob.detach() - impl._action_size).mean()
    return torch.zeros(())


def _move_temperature(impl: Any) -> None:
    """One step along the gradient of log(temperature) * -surplus."""
    optimiser = impl.modules.temp_optim
    optimiser.zero_grad()  # the policy's loss left a gradient in it
    (-next(impl.modules.log_temp.parameters()) * impl.surplus).sum().backward()
    optimiser.step()


@torch.no_grad()
def _sampled_target(impl: Any, batch: Any) -> Any:
    """The smaller target critic's value of an action that is drawn from the policy."""
    policy = build_squashed_gaussian_distribution(impl.modules.policy(batch.next_observations))
    action = policy.sample()
    return impl._targ_q_func_forwarder.compute_target(batch.next_observations, action, reduction="min")


# ---- weights -----------------------------------------------------------------------------------------------------


def _networks(algo: Any) -> dict[str, Any]:
    """{name of our parameters: d3rlpy's module of them}."""
    modules = algo.impl.modules
    named = {
        "critic": modules.q_funcs,
        "value": getattr(modules, "value_func", None),
        "policy": modules.policy,
    }
    return {name: module for name, module in named.items() if module is not None}


def load(algo: Any, params: Mapping[str, Any]) -> None:
    """Gives the learner our weights, and its target networks the same.

    Args:
      algo: from `learner`.
      params: those of one seed of the agent of the same hyper-parameters.
    """
    with torch.no_grad():
        for ours, theirs in _ties(algo, jax.tree.map(np.array, dict(params))):
            theirs.copy_(torch.as_tensor(ours))
    modules = algo.impl.modules
    for name in ("q_funcs", "policy"):
        if hasattr(modules, f"targ_{name}"):
            getattr(modules, f"targ_{name}").load_state_dict(getattr(modules, name).state_dict())


def weights(algo: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The learner's weights as our parameters.

    Args:
      algo: from `learner`.
      params: any of ours of the same shapes; what d3rlpy's networks do not hold, temperatures, stays as it is there.
    """
    arrays = jax.tree.map(np.array, dict(params))
    for ours, theirs in _ties(algo, arrays):
        ours[...] = theirs.detach().numpy()
    return arrays


def _ties(algo: Any, params: Mapping[str, Any]) -> Iterator[tuple[np.ndarray, Any]]:
    """Views on our arrays and the parameters there that hold the same numbers."""
    for name, module in _networks(algo).items():
        if name == "critic":
            for i, member in enumerate(module):
                yield from _tied(jax.tree.map(lambda x, i=i: x[i], params["critic"]), member)
        else:
            subtree = params[name]
            yield from _tied(subtree.get("body", subtree), module)
            if "log_std" in subtree:
                yield subtree["log_std"][None], module._logstd


def _tied(layers: Mapping[str, Any], module: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """The same for one network. A layer of ours may be several there: the mean and the deviation of a policy."""
    linears = (part for part in module.modules() if isinstance(part, torch.nn.Linear))
    norms = (part for part in module.modules() if isinstance(part, torch.nn.LayerNorm))
    for i in range(sum(name.startswith("Dense_") for name in layers)):
        kernel, bias, start = layers[f"Dense_{i}"]["kernel"], layers[f"Dense_{i}"]["bias"], 0
        while start < len(bias):
            linear = next(linears)
            part = slice(start, start + linear.out_features)
            yield kernel[:, part].T, linear.weight
            yield bias[part], linear.bias
            start = part.stop
        if f"LayerNorm_{i}" in layers:
            norm = next(norms)
            yield layers[f"LayerNorm_{i}"]["scale"], norm.weight
            yield layers[f"LayerNorm_{i}"]["bias"], norm.bias


# ---- training ----------------------------------------------------------------------------------------------------


def update(algo: Any, agent: str, config: Any, batch: Transition) -> dict[str, float]:
    """One update with a batch [B] of ours, NumPy arrays; its losses by our names."""
    column = lambda x: np.asarray(x, np.float32)[:, None]
    losses = algo.update(
        d3rlpy.dataset.TransitionMiniBatch(
            observations=np.asarray(batch.observation),
            actions=np.asarray(batch.action),
            rewards=column(batch.reward),
            next_observations=np.asarray(batch.next_observation),
            next_actions=np.asarray(batch.next_action),
            terminals=column(1 - np.asarray(batch.discount)),
            intervals=np.ones((len(batch.reward), 1), np.float32),
            transitions=[],
        )
    )
    metrics = {}
    for name, of in LOSSES[agent].items():
        with contextlib.suppress(KeyError):  # of a policy that moves every second update
            metrics[name] = float(of(losses, config))
    return metrics
