"""How good a policy is: episodes in the environment, estimates from logged data alone, and which one to report.

Scores stay apart by name. ``return`` is the undiscounted sum of rewards, ``normalized_return`` the same on the
scale from a random policy (0) to an expert (100), ``success`` whether the environment said so at any step of
the episode, ``final_success`` whether it did at the last one. What many scores say is `rl.statistics`'s
business; nothing here logs, plots or saves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from rl import acting, envs
from rl.agents import state as learner_state
from rl.networks import mlp
from rl.replay.dataset import Dataset, sampler, size, take
from rl.types import Actor, Array, Key, Params, Spec, State, Transition
from rl.values.heads import ValueHead

_COPIES = 32  # environments held at once by default: a manipulation task takes 50 MB and 0.7 s to build
_ROWS = 4096  # logged steps that an estimate is averaged over
_UPDATES_PER_CALL = 1000  # between two steps of a progress bar


class Evaluator:
    """Runs episodes of ``S`` policies at once. Made by `evaluator`; call it, and close it or use ``with``."""

    def __init__(
        self,
        policy: Actor,
        vector: envs.Vector,
        shape: tuple[int, int, int],
        reference: tuple[float, float] | None,
        base_seed: int,
        name: str,
    ):
        self.spec = vector.spec
        self._policy, self._vector, self._reference = policy, vector, reference
        self._seeds, self._copies, self._rounds = shape
        self._base_seed, self._name = base_seed, name

    def __call__(self, states: Any, index: int = 0) -> dict[str, np.ndarray]:
        """Scores of the policies held in ``states``.

        Args:
            states: what ``act`` takes first, for all ``S`` policies.
            index: number of this evaluation, 0 or more. Episode ``e`` of policy ``s`` starts from an
                environment seed that depends on (base seed, index, s, e) alone, so an evaluation can be
                repeated; policies never share episodes, so their scores are independent.

        Returns:
            {name: [S, episodes]}: ``return`` and ``length``; ``normalized_return`` if there is a reference;
            ``success`` and ``final_success``, 0 or 1, if the environment reports success.

        Raises:
            FloatingPointError: a policy returned NaN or an infinite action.
            RuntimeError: an environment failed or its worker died.
        """
        count, rounds = self._seeds * self._copies, self._rounds
        starts, first = self._starts(index), np.ones(count, bool)
        returns, length = np.zeros((count, rounds)), np.zeros((count, rounds), np.int64)
        success, final_success = np.full((count, rounds), np.nan), np.full((count, rounds), np.nan)
        episode, active = np.zeros(count, np.int64), np.ones(count, bool)
        observation = self._vector.reset(starts[:, 0].tolist())
        memory = self._policy.start(states, jax.device_put(self._by_seed(observation)))
        time = 0
        with tqdm(
            total=count * rounds, desc=f"evaluate {self._name}", unit="ep", delay=3, leave=False, disable=None
        ) as bar:
            while active.any():
                actions, memory = self._act(states, memory, observation, first, (index, time))
                step = self._vector.step(actions, active)
                observation, time = step.observation, time + 1
                now = np.flatnonzero(active), episode[active]
                returns[now] += step.reward[active]
                length[now] += 1
                success[now] = np.fmax(success[now], step.success[active])  # fmax: NaN is no report
                final_success[now] = step.success[active]
                over = active & (step.terminated | step.truncated)
                bar.update(int(over.sum()))
                episode += over
                active &= episode < rounds
                first = over & active
                if first.any():
                    observation = self._vector.reset(
                        [int(starts[i, episode[i]]) if first[i] else None for i in range(count)]
                    )
        scores = {"return": returns, "length": length}
        if self._reference is not None:
            scores["normalized_return"] = normalize(returns, self._reference)
        if not np.isnan(success).all():
            scores |= {"success": success, "final_success": final_success}
        return {name: self._in_order(score) for name, score in scores.items()}

    def close(self) -> None:
        """Close the environments and end their workers."""
        self._vector.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _starts(self, index: int) -> np.ndarray:
        """Environment seeds [S * n, rounds]; copy ``c`` of ``n`` runs the episodes c, c + n, c + 2n, ..."""
        episodes = self._rounds * self._copies
        seeds = [
            np.random.SeedSequence((self._base_seed, index, s)).generate_state(episodes)
            for s in range(self._seeds)
        ]
        by_round = np.reshape(seeds, (self._seeds, self._rounds, self._copies))
        return by_round.swapaxes(1, 2).reshape(-1, self._rounds)

    def _in_order(self, score: np.ndarray) -> np.ndarray:
        """The inverse of the layout of `_starts`: [S * n, rounds] -> [S, episodes]."""
        by_copy = score.reshape(self._seeds, self._copies, self._rounds)
        return by_copy.swapaxes(1, 2).reshape(self._seeds, -1)

    def _by_seed(self, rows: np.ndarray) -> np.ndarray:
        """[S * n, ...] -> [S, n, ...]."""
        return rows.reshape(self._seeds, self._copies, *rows.shape[1:])

    def _act(
        self, states: Any, memory: Any, observation: np.ndarray, first: np.ndarray, clock: tuple[int, int]
    ) -> tuple[np.ndarray, Any]:
        """Actions [S * n, ...] and memory; transfers are explicit, so that `jax.transfer_guard` can stay on."""
        now = self._by_seed(observation), self._by_seed(first), np.array(clock, np.uint32)
        chosen, memory = self._policy.act(states, memory, *jax.device_put(now))
        actions = jax.device_get(chosen)
        if not np.isfinite(actions).all():
            bad = [s for s in range(self._seeds) if not np.isfinite(actions[s]).all()]
            raise FloatingPointError(
                f"policies {bad} (of {self._seeds}) returned an action that is not finite"
            )
        return actions.reshape(-1, *actions.shape[2:]), memory


def evaluator(
    act: Callable[[Any, Array, Key], Array] | Actor,
    name: str,
    *,
    seeds: int,
    episodes: int,
    copies: int | None = None,
    processes: int | None = None,
    reference: tuple[float, float] | None = None,
    base_seed: int = 0,
) -> Evaluator:
    """An evaluator of ``S`` policies, trained together, in the environment ``name``.

    All policies act in one compiled call on the fixed shape [S, n, ...], traced once however many states are
    evaluated. Every environment runs the same number of episodes, each to its end: to stop when enough
    episodes are over would favour short ones.

    Args:
        act: (states, observations [S, n, *observation], keys [S]) -> actions [S, n, D], or integers [S, n]:
            the ``act`` of `rl.train.population`, or ``jax.vmap`` of a learner's. A policy with memory is an `Actor`
            of the same axes (the ``actor`` there, or `rl.acting.over_seeds`); its memory starts anew with every
            episode of every environment.
        name: an environment's name (see `rl.envs.make`). It must end its episodes, by termination or a time
            limit.
        seeds: ``S``.
        episodes: episodes for each policy in one evaluation.
        copies: environments ``n`` for each policy, a divisor of ``episodes``. By default the most that keep
            ``S * n`` within 32.
        processes: worker processes (see `rl.envs.vector`).
        reference: mean (random, expert) return, for ``normalized_return``.
        base_seed: of the environments' and the policies' randomness.

    Raises:
        ValueError: counts that are not positive or do not divide, an unknown environment, a reference whose
            expert is no better than random.
        TypeError, ImportError, RuntimeError: as `rl.envs.make`.
    """
    if seeds < 1 or episodes < 1:
        raise ValueError(f"seeds and episodes must be at least 1, got {seeds} and {episodes}")
    if copies is None:
        copies = max(
            n for n in range(1, episodes + 1) if episodes % n == 0 and (n == 1 or seeds * n <= _COPIES)
        )
    if copies < 1 or episodes % copies:
        raise ValueError(f"copies must divide the {episodes} episodes of each policy, got {copies}")
    if reference is not None:
        normalize(0.0, reference)  # refuse a bad one before the environments are built

    policy = acting.resetting(act if isinstance(act, Actor) else acting.memoryless(act))

    def step(states: Any, memory: Any, observations: Array, first: Array, clock: Array) -> tuple[Array, Any]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(base_seed), clock[0]), clock[1])
        actions, memory = policy.act(states, memory, observations, first, jax.random.split(key, seeds))
        if actions.shape[:2] != (seeds, copies):
            raise ValueError(f"act must return [{seeds}, {copies}, ...] actions, got shape {actions.shape}")
        return actions, memory

    vector = envs.vector(name, seeds * copies, processes)
    shape = (seeds, copies, episodes // copies)
    compiled = Actor(jax.jit(policy.start), jax.jit(step))
    return Evaluator(compiled, vector, shape, reference, base_seed, name)


def normalize(returns: ArrayLike, reference: tuple[float, float]) -> np.ndarray:
    """Returns on the scale from a random policy (0) to an expert (100), as D4RL's normalised score.

    Args:
        returns: [...] undiscounted returns.
        reference: (random, expert) mean returns.

    Raises:
        ValueError: an expert that is no better than random.
    """
    random, expert = reference
    if not expert > random:
        raise ValueError(f"the reference must be (random, expert) with random < expert, got {reference}")
    return 100.0 * (np.asarray(returns, np.float64) - random) / (expert - random)


@dataclasses.dataclass(frozen=True)
class FittedQ:
    """Hyper-parameters of `fitted_q`; the defaults are our own choice, not a paper's."""

    discount: float = 0.99  # gamma
    updates: int = 20_000
    batch_size: int = 256
    target_rate: float = 0.005  # Polyak step
    learning_rate: float = 3e-4  # Adam
    hidden: tuple[int, ...] = (256, 256)  # widths of the critic's layers
    layer_norm: bool = True  # without it estimates of policies that leave the data often diverge


class Estimate(NamedTuple):
    """What logged data say of ``S`` policies, each [S]. NaN or infinite where the fit diverged."""

    value: Array  # mean over logged first observations of Q(s, pi(s)): the expected discounted return
    spread: Array  # its standard deviation over first observations
    bellman_error: (
        Array  # root mean square of r + gamma d Q(s', pi(s')) - Q(s, a) on logged steps, noise included
    )


def fitted_q(
    act: Callable[[Any, Array, Key], Array], spec: Spec, head: ValueHead, config: FittedQ = FittedQ()
) -> Callable[[Any, Dataset, Key], Estimate]:
    """Fitted-Q evaluation: the value of policies from logged data alone, to choose one without an environment.

    Le, Voloshin & Yue (2019): regress Q(s, a) on r + gamma d Q'(s', pi(s')) over logged steps, where Q' is a
    slow copy of Q, and answer with Q'. Paine et al. (2020) choose offline-RL hyper-parameters by it: use it
    to rank policies. Its absolute values are biased where policies leave the data, and a small Bellman error
    on logged steps does not rule that out.

    Args:
        act: as in `evaluator`.
        spec: of the environment that was logged; observations must be flat.
        head: represents Q. A categorical one needs a support for the values of the policies evaluated.
        config: hyper-parameters.

    Returns:
        A function of (states of ``S`` policies, dataset, keys [S]), compiled once however often it is called.

    Raises:
        ValueError: image observations.
    """
    if len(spec.observation_shape) != 1:
        raise ValueError(f"fitted_q takes flat observations, not shape {spec.observation_shape}")
    critic = mlp.critic(spec, head.size, config.hidden, config.layer_norm)
    optimisers = {"critic": optax.adam(config.learning_rate)}
    sample = jax.vmap(sampler(config.batch_size), (None, 0, None))

    @jax.jit
    def start(dataset: Dataset, keys: Key) -> State:
        row = take(dataset, jnp.zeros(1, jnp.int32))
        params = jax.vmap(critic.init, (0, None, None))(keys, row.observation, row.action)
        return jax.vmap(lambda p: learner_state.start({"critic": p}, optimisers, targets=["critic"]))(params)

    def update(q: State, batch: Transition, next_action: Array) -> State:
        q_next = critic.apply(q.target["critic"], batch.next_observation, next_action)
        target = head.target(batch.reward, config.discount * batch.discount, q_next)

        def loss(params: Params) -> Array:
            return head.loss(critic.apply(params["critic"], batch.observation, batch.action), target).mean()

        q = learner_state.descend(q, jax.grad(loss)(q.params), optimisers)
        q = learner_state.follow(q, config.target_rate)
        return q._replace(step=q.step + 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def fit(q: State, states: Any, dataset: Dataset, keys: Key, updates: Array) -> State:
        def one(_: Array, q: State) -> State:
            sample_keys, act_keys = _split(jax.vmap(jax.random.fold_in)(keys, q.step))
            batch = sample(dataset, sample_keys, 0)
            return jax.vmap(update)(q, batch, act(states, batch.next_observation, act_keys))

        return jax.lax.fori_loop(0, updates, one, q)

    @jax.jit
    def estimate(q: State, states: Any, dataset: Dataset, keys: Key) -> Estimate:
        def value(observation: Array, action: Array) -> Array:
            # The slow copy: an average over updates, so less noisy than the last iterate.
            return head.value(jax.vmap(critic.apply)(q.target["critic"], observation, action))

        act_keys, row_keys = _split(keys)
        index, weight = _first_steps(dataset)
        first = jnp.broadcast_to(
            dataset.transitions.observation[index], (len(keys), len(index), *spec.observation_shape)
        )
        values = value(first, act(states, first, act_keys))
        mean = values @ weight
        rows = jax.vmap(lambda key: jax.random.randint(key, (_ROWS,), 0, size(dataset)))(row_keys)
        batch = take(dataset, rows)
        v_next = value(batch.next_observation, act(states, batch.next_observation, act_keys))
        error = (
            batch.reward + config.discount * batch.discount * v_next - value(batch.observation, batch.action)
        )
        return Estimate(
            value=mean,
            spread=jnp.sqrt(jnp.square(values - mean[:, None]) @ weight),
            bellman_error=jnp.sqrt(jnp.square(error).mean(-1)),
        )

    def run(states: Any, dataset: Dataset, keys: Key) -> Estimate:
        dataset = jax.device_put(dataset)
        init_keys, fit_keys = _split(keys)
        q = start(dataset, init_keys)
        with tqdm(
            total=config.updates,
            desc="fitted-Q evaluation",
            unit="update",
            delay=3,
            leave=False,
            disable=None,
        ) as bar:
            for done in range(0, config.updates, _UPDATES_PER_CALL):
                updates = min(_UPDATES_PER_CALL, config.updates - done)
                q = jax.block_until_ready(fit(q, states, dataset, fit_keys, jnp.int32(updates)))
                bar.update(updates)
        return estimate(q, states, dataset, init_keys)

    return run


def _split(keys: Key) -> tuple[Key, Key]:
    """Two independent keys from each of ``keys`` [S]."""
    both = jax.vmap(jax.random.split)(keys)
    return both[:, 0], both[:, 1]


def _first_steps(dataset: Dataset) -> tuple[Array, Array]:
    """Indices of at most `_ROWS` first steps of episodes, evenly spaced in the log, and weights that sum to 1."""
    starts = jnp.cumsum(jnp.concatenate([jnp.ones(1, jnp.int32), dataset.last[:-1].astype(jnp.int32)]))
    episodes = starts[-1]
    used = jnp.minimum(episodes, _ROWS)
    slot = jnp.arange(min(_ROWS, size(dataset)))
    number = (slot * (episodes / used)).astype(jnp.int32)  # of the episode, from 0
    return jnp.searchsorted(starts, number + 1), (slot < used) / used


class Choice(NamedTuple):
    """One evaluation of each training run, and what it scored."""

    score: np.ndarray  # [S]
    evaluation: np.ndarray  # [S] which of the T it was


def select(scores: ArrayLike, estimates: ArrayLike | None = None) -> dict[str, Choice]:
    """Which evaluation of each training run to report: three answers that must not be mixed up.

    ``last``: the end of training. An unbiased score of what training for that long gives.

    ``best``: the evaluation with the highest mean score. Optimistic: it is chosen by the very episodes it is
    scored on, the more so the more evaluations there are, and it needs the environment. Report it only under
    its name.

    ``selected``: chosen without the scores that it reports. With ``estimates`` (`fitted_q`, say), the
    evaluation with the highest estimate, scored on all its episodes: what one gets without an environment.
    Without, the one that is best on the first half of the episodes, scored on the second half: unbiased, but
    it needs the environment.

    Args:
        scores: [T, S, episodes] scores of T evaluations of S training runs.
        estimates: [T, S] off-policy estimates, higher is better.

    Raises:
        ValueError: wrong axes, NaN, or a single episode where it must be halved.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 3 or scores.size == 0:
        raise ValueError(f"scores must be [evaluations, seeds, episodes], got shape {scores.shape}")
    mean = scores.mean(-1)
    if estimates is not None:
        chosen_by, scored_by = np.asarray(estimates, np.float64), mean
        if chosen_by.shape != mean.shape:
            raise ValueError(f"estimates must be [evaluations, seeds] {mean.shape}, got {chosen_by.shape}")
    else:
        half = scores.shape[-1] // 2
        if half == 0:
            raise ValueError("selecting by half of the episodes needs at least 2 of them, got 1")
        chosen_by, scored_by = scores[..., :half].mean(-1), scores[..., half:].mean(-1)
    if np.isnan(mean).any() or np.isnan(chosen_by).any():
        raise ValueError("scores and estimates must not be NaN")
    runs = np.arange(mean.shape[1])
    last, best, selected = np.full(runs.shape, len(mean) - 1), mean.argmax(0), chosen_by.argmax(0)
    return {
        "last": Choice(mean[last, runs], last),
        "best": Choice(mean[best, runs], best),
        "selected": Choice(scored_by[selected, runs], selected),
    }
