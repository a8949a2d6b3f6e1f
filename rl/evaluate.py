"""How good a policy is: episodes in the environment.

Scores stay apart by name. ``return`` is the undiscounted sum of rewards, ``normalized_return`` the same on the
scale from a random policy (0) to an expert (100), ``success`` whether the environment said so at any step of
the episode, ``final_success`` whether it did at the last one. What many scores say is `rl.statistics`'s
business; nothing here logs, plots or saves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from rl import acting, envs, keys, log
from rl.envs import workers
from rl.types import Actor, Array, Key

# (what each of the S * n environments shows, [S * n, *observation]; memory [S, n, ...] after the actions chosen there;
# which of them take a step now [S * n] bool): called before every step, and once more when all episodes are over
Watch = Callable[[Any, Any, np.ndarray], None]

LONG_EPISODE = 100_000  # steps of an episode that may never end: the longest of the usual tasks have 27,000
_COPIES = 16  # environments held at once by default: a manipulation task takes 150 MB and 0.8 s to build


class _Tally:
    """Scores of the episodes of ``C`` environments, each of which plays ``R``, one after another."""

    def __init__(self, environments: int, rounds: int):
        shape = environments, rounds
        self.returns, self.length = np.zeros(shape), np.zeros(shape, np.int64)
        self.success, self.final_success = np.full(shape, np.nan), np.full(shape, np.nan)
        self.episode = np.zeros(environments, np.int64)  # [C], which one is played: R when all are over
        self.active = np.ones(environments, bool)  # [C], whether one is

    def add(self, step: workers.Step) -> None:
        """Counts a step of the environments that are active."""
        active = self.active
        now = np.flatnonzero(active), self.episode[active]
        self.returns[now] += step.reward[active]
        self.length[now] += 1
        self.success[now] = np.fmax(self.success[now], step.success[active])  # fmax: NaN is no report
        self.final_success[now] = step.success[active]

    def end(self, over: np.ndarray) -> np.ndarray:
        """Goes on to the next episode where one is ``over`` [C]; returns where there is one, [C]."""
        self.episode += over
        self.active &= self.episode < self.returns.shape[1]
        return over & self.active

    def scores(self, name: str) -> dict[str, np.ndarray]:
        """By name, [C, R]; warns if the environment, ``name``, reported success in some episodes, and in others not."""
        scores = {"return": self.returns, "length": self.length}
        if np.isnan(self.success).all():
            return scores
        if np.isnan(self.final_success).any():
            warnings.warn(
                f'environment {name!r} reports info["success"] at the last step of some episodes only: where it does '
                "not, that counts as no success",
                stacklevel=3,
            )
        successes = {"success": self.success, "final_success": self.final_success}
        return scores | {what: np.nan_to_num(score) for what, score in successes.items()}


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
        options: Sequence[Mapping[str, Any]],
    ):
        self.spec = vector.spec
        self._policy, self._vector, self._reference = policy, vector, reference
        self._seeds, self._copies, self._rounds = shape
        self._base_seed, self._name, self._options = base_seed, name, options

    def __call__(self, states: Any, index: int = 0, watch: Watch | None = None) -> dict[str, np.ndarray]:
        """Scores of the policies held in ``states``.

        Args:
            states: what ``act`` takes first, for all ``S`` policies.
            index: number of this evaluation, 0 or more. Episode ``e`` of policy ``s`` starts from an
                environment seed that depends on (base seed, index, s, e) alone, so an evaluation can be
                repeated; policies never share episodes, so their scores are independent. Not so where an
                environment remembers across episodes, as gymnasium's normalising wrappers do.
            watch: sees every step; see `Watch`.

        Returns:
            {name: [S, episodes]}: ``return`` and ``length``; ``normalized_return`` if there is a reference;
            ``success`` and ``final_success``, between 0 and 1, if the environment reports success in any episode; 0
            of those in which it does not.

        Raises:
            FloatingPointError: a policy returned NaN or an infinite action, or the environment such a reward or
                observation.
            RuntimeError: an environment failed or its worker died.
        """
        count, rounds = self._seeds * self._copies, self._rounds
        starts, first = self._starts(index), np.ones(count, bool)
        tally = _Tally(count, rounds)
        observation = self._reset(starts, tally.episode, first)
        self._check(observation, tally)
        memory = self._policy.start(states, jax.device_put(self._by_seed(observation)))
        time = 0
        with log.progress(count * rounds, f"evaluate {self._name}", unit="ep", delay=3, leave=False) as bar:
            while tally.active.any():
                actions, memory = self._act(states, memory, observation, first, (index, time))
                if watch:
                    watch(observation, memory, tally.active)
                step = self._vector.step(actions, tally.active)
                observation, time = step.observation, time + 1
                tally.add(step)
                self._check(observation, tally, step.reward)
                over = tally.active & (step.terminated | step.truncated)
                bar.update(int(over.sum()))
                first = tally.end(over)
                if first.any():
                    observation = self._reset(starts, tally.episode, first)
                    self._check(observation, tally)
        if watch:
            watch(observation, memory, tally.active)
        scores = tally.scores(self._name)
        if self._reference is not None:
            scores["normalized_return"] = normalize(scores["return"], self._reference)
        return {name: self._in_order(score) for name, score in scores.items()}

    def render(self, which: np.ndarray, goal: bool = False) -> list[np.ndarray | str | None]:
        """Pictures of the environments as they are now; see `rl.envs.workers.Vector.render`."""
        return self._vector.render(which, goal)

    def close(self) -> None:
        """Close the environments and end their workers."""
        self._vector.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reset(self, starts: np.ndarray, episode: np.ndarray, first: np.ndarray) -> Any:
        """Starts the episode [S * n] of every environment that is at its ``first`` step."""
        seeds = [int(starts[i, episode[i]]) if first[i] else None for i in range(len(first))]
        if not self._options:
            return self._vector.reset(seeds)
        numbers = np.arange(len(first)) % self._copies + self._copies * episode
        return self._vector.reset(seeds, [self._options[number % len(self._options)] for number in numbers])

    def _check(self, observation: Any, tally: _Tally, reward: np.ndarray | None = None) -> None:
        """Raises FloatingPointError on what is not finite; warns of episodes that may never end."""
        playing = np.minimum(tally.episode, self._rounds - 1)
        steps = tally.length[np.arange(len(playing)), playing]
        workers.check_finite(self._name, observation, playing, steps, reward)
        if reward is not None and (steps[tally.active] == LONG_EPISODE).any():
            warnings.warn(
                f"an episode of {self._name} has lasted {LONG_EPISODE:,} steps. Episodes are played to their end: if "
                "the environment has no time limit, register it with max_episode_steps",
                stacklevel=3,
            )

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

    def _by_seed(self, rows: Any) -> Any:
        """[S * n, ...] -> [S, n, ...]."""
        return jax.tree.map(lambda x: x.reshape(self._seeds, self._copies, *x.shape[1:]), rows)

    def _act(
        self, states: Any, memory: Any, observation: Any, first: np.ndarray, clock: tuple[int, int]
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
    options: Sequence[Mapping[str, Any]] = (),
) -> Evaluator:
    """An evaluator of ``S`` policies, trained together, in the environment ``name``.

    All policies act in one compiled call on the fixed shape [S, n, ...], traced once however many states are
    evaluated. Every environment runs the same number of episodes, each to its end: to stop when enough
    episodes are over would favour short ones.

    Args:
        act: (states, observations [S, n, *observation], keys [S]) -> actions [S, n, D], or integers [S, n]:
            the ``act`` of `rl.train.population`, or ``jax.vmap(learner.act, (rl.train.STACKED, 0, 0))``, as stacked
            states share their step. A policy with memory is an `Actor` of the same axes (the ``actor`` there, or
            ``rl.acting.over_seeds(rl.acting.actor(learner), rl.train.STACKED)``); its memory starts anew with every
            episode of every environment.
        name: an environment's name (see `rl.envs.make`). It must end its episodes, by termination or a time
            limit.
        seeds: ``S``.
        episodes: episodes for each policy in one evaluation.
        copies: environments ``n`` for each policy, a divisor of ``episodes``. By default the most that keep
            ``S * n`` within 16.
        processes: worker processes (see `rl.envs.vector`).
        reference: mean (random, expert) return, for ``normalized_return``.
        base_seed: of the environments' and the policies' randomness.
        options: what environments are reset with, in turn: episode ``e`` with ``options[e % len(options)]``.

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

    def step(states: Any, memory: Any, observations: Any, first: Array, clock: Array) -> tuple[Array, Any]:
        root = keys.of(jax.random.key(base_seed), "evaluate")
        key = jax.random.fold_in(jax.random.fold_in(root, clock[0]), clock[1])
        each = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(seeds))
        actions, memory = policy.act(states, memory, observations, first, each)
        if actions.shape != expected:
            raise ValueError(
                f"act must return actions {list(expected)} of {seeds} policies in {copies} copies of {name}, which has "
                f"{vector.spec.action_size} {'actions' if vector.spec.discrete else 'numbers in an action'}: it "
                f"returns {list(actions.shape)}"
            )
        return actions, memory

    vector = envs.vector(name, seeds * copies, processes)
    expected = (seeds, copies) if vector.spec.discrete else (seeds, copies, vector.spec.action_size)
    shape = (seeds, copies, episodes // copies)
    compiled = Actor(jax.jit(policy.start), jax.jit(step))
    return Evaluator(compiled, vector, shape, reference, base_seed, name, options)


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
