"""Fitted-Q evaluation: the value of policies from logged data alone, to choose one without an environment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl import log, nest
from rl.agents import state as learner_state
from rl.networks import mlp
from rl.replay.dataset import Dataset, sampler, size, take
from rl.types import Array, Key, Params, Spec, State, Transition
from rl.values.heads import ValueHead

_ROWS = 4096  # first steps that an estimate is averaged over
_UPDATES_PER_CALL = 1000  # between two steps of a progress bar


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are our own choice, not a paper's."""

    discount: float = 0.99  # gamma
    updates: int = 20_000
    batch_size: int = 256
    target_rate: float = 0.005  # Polyak step
    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of the critic's layers
    layer_norm: bool = True  # without it estimates of policies that leave the data often diverge


def estimator(
    act: Callable[[Any, Array, Key], Array], spec: Spec, head: ValueHead, config: Config = Config()
) -> Callable[[Any, Dataset, Key], Array]:
    """Estimates of the values of policies.

    Le, Voloshin & Yue (2019): regress Q(s, a) on r + gamma d Q'(s', pi(s')) over logged steps, where Q' is a
    target network, and answer with Q'. Paine et al. (2020) choose offline-RL hyper-parameters by it: use it
    to rank policies. Its absolute values are biased where policies leave the data.

    Args:
        act: (states, observations [S, n, *observation], keys [S]) -> actions [S, n, ...]: a policy without memory, as
            the ``act`` of `rl.train.population`.
        spec: of the environment that was logged; observations must be flat.
        head: represents Q. A categorical one needs a support for the values of the policies evaluated.
        config: hyper-parameters.

    Returns:
        A function of (states of ``S`` policies, dataset, keys [S]), compiled once however often it is called. It
        returns [S]: the mean over logged first observations of Q'(s, pi(s)), the expected discounted return. It is NaN
        or infinite where the fit diverged.

    Raises:
        ValueError: observations that are images or dictionaries.
    """
    nest.require_array(spec.observation_shape, "fitted-Q evaluation")
    if len(spec.observation_shape) != 1:
        raise ValueError(f"fitted-Q evaluation takes flat observations, not shape {spec.observation_shape}")
    critic = mlp.critic(spec, head.size, config.hidden, config.layer_norm)
    # As environments do with what a policy returns.
    taken = (lambda action: action) if spec.discrete else (lambda action: jnp.clip(action, -1.0, 1.0))
    optimisers = {"critic": optax.adam(config.learning_rate)}
    sample = jax.vmap(sampler(config.batch_size), (None, 0, None))

    @jax.jit
    def start(dataset: Dataset, keys: Key) -> State:
        """A critic for each policy, [S, ...]."""
        row = take(dataset, jnp.zeros(1, jnp.int32))
        params = jax.vmap(critic.init, (0, None, None))(keys, row.observation, row.action)
        return jax.vmap(lambda p: learner_state.start({"critic": p}, optimisers, targets=["critic"]))(params)

    def update(q: State, batch: Transition, next_action: Array) -> State:
        """One step of one policy's regression."""
        q_next = critic.apply(q.target["critic"], batch.next_observation, next_action)
        target = head.target(batch.reward, config.discount * batch.discount, q_next)

        def loss(params: Params) -> Array:
            return head.loss(critic.apply(params["critic"], batch.observation, batch.action), target).mean()

        q = learner_state.descend(q, jax.grad(loss)(q.params), optimisers)
        q = learner_state.follow(q, config.target_rate)
        return q._replace(step=q.step + 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def fit(q: State, states: Any, dataset: Dataset, keys: Key, updates: Array) -> State:
        """All critics after some more ``updates`` []."""

        def one(_: Array, q: State) -> State:
            sample_keys, act_keys = _split(jax.vmap(jax.random.fold_in)(keys, q.step), 2)
            batch = sample(dataset, sample_keys, 0)
            return jax.vmap(update)(q, batch, taken(act(states, batch.next_observation, act_keys)))

        return jax.lax.fori_loop(0, updates, one, q)

    @jax.jit
    def estimate(q: State, states: Any, dataset: Dataset, keys: Key) -> Array:
        """The mean value [S] of logged first observations."""
        index, weight = _first_steps(dataset)
        first = dataset.transitions.observation[index]
        first = jnp.broadcast_to(first, (len(keys), *first.shape))
        # Split, though there is one draw: estimates that were recorded are of this key.
        action = taken(act(states, first, _split(keys, 1)[0]))
        # The target network: an average over updates, so less noisy than the last iterate.
        values = head.value(jax.vmap(critic.apply)(q.target["critic"], first, action))
        return jnp.matmul(values, weight, precision=jax.lax.Precision.HIGHEST)

    def run(states: Any, dataset: Dataset, keys: Key) -> Array:
        states, dataset = jax.device_put((states, dataset))
        init_keys, fit_keys, estimate_keys = _split(keys, 3)
        q = start(dataset, init_keys)
        with log.progress(config.updates, "fitted-Q evaluation", unit="update", delay=3, leave=False) as bar:
            for done in range(0, config.updates, _UPDATES_PER_CALL):
                updates = min(_UPDATES_PER_CALL, config.updates - done)
                q = jax.block_until_ready(fit(q, states, dataset, fit_keys, jnp.int32(updates)))
                bar.update(updates)
        return estimate(q, states, dataset, estimate_keys)

    return run


def _split(keys: Key, count: int) -> tuple[Key, ...]:
    """``count`` independent keys from each of ``keys`` [S]."""
    return tuple(jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(keys), 1, 0))


def _first_steps(dataset: Dataset) -> tuple[Array, Array]:
    """Indices of at most `_ROWS` first steps of episodes, evenly spaced in the log, and weights that sum to 1."""
    starts = jnp.cumsum(jnp.concatenate([jnp.ones(1, jnp.int32), dataset.last[:-1].astype(jnp.int32)]))
    episodes = starts[-1]
    used = jnp.minimum(episodes, _ROWS)
    slot = jnp.arange(min(_ROWS, size(dataset)))
    number = (slot * (episodes / used)).astype(jnp.int32)  # of the episode, from 0
    return jnp.searchsorted(starts, number + 1), (slot < used) / used
