"""How good a policy is: episodes in the environment, estimates from logged data alone, and which one to report.

Scores stay apart by name. ``return`` is the undiscounted sum of rewards, ``normalized_return`` the same on the
scale from a random policy (0) to an expert (100), ``success`` whether the environment said so at any step of
the episode, ``final_success`` whether it did at the last one. What many scores say is `rl.statistics`'s
business; nothing here logs, plots or saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from rl import envs
from rl.types import Array, Key

_COPIES = 32  # environments held at once by default: a manipulation task takes 50 MB and 0.7 s to build


class Evaluator:
    """Runs episodes of ``S`` policies at once. Made by `evaluator`; call it, and close it or use ``with``."""

    def __init__(
        self,
        policy: Callable[[Any, Array, Array], Array],
        vector: envs.Vector,
        shape: tuple[int, int, int],
        reference: tuple[float, float] | None,
        base_seed: int,
        name: str,
    ):
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
            ``return`` (float64) and ``length`` (int64), [S, episodes]; ``success`` and ``final_success`` if
            the environment reports success, 0 or 1 [S, episodes]; ``normalized_return`` if a reference was
            given.

        Raises:
            FloatingPointError: a policy returned NaN or an infinite action.
            RuntimeError: an environment failed or its worker died.
        """
        seeds, copies, rounds = self._seeds, self._copies, self._rounds
        count = seeds * copies
        starts = self._starts(index)  # [count, rounds]
        score = np.zeros((4, count, rounds))  # return, length, success, final success
        score[2:] = np.nan
        episode = np.zeros(count, int)
        active = np.ones(count, bool)
        observation = self._vector.reset(starts[:, 0].tolist())
        time = 0
        with tqdm(total=count * rounds, desc=f"evaluate {self._name}", unit="ep", delay=3, leave=False) as bar:
            while active.any():
                step = self._vector.step(self._act(states, observation, index, time), active)
                time += 1
                rows, columns = np.flatnonzero(active), episode[active]
                score[0, rows, columns] += step.reward[rows]
                score[1, rows, columns] += 1
                score[2, rows, columns] = np.fmax(score[2, rows, columns], step.success[rows])
                score[3, rows, columns] = step.success[rows]
                observation = step.observation
                over = active & (step.terminated | step.truncated)
                if over.any():
                    bar.update(int(over.sum()))
                    episode += over
                    active &= episode < rounds
                    again = over & active
                    if again.any():
                        observation = self._vector.reset(
                            [int(starts[i, episode[i]]) if again[i] else None for i in range(count)]
                        )
        return self._named(score)

    def close(self) -> None:
        """Close the environments and end their workers."""
        self._vector.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _starts(self, index: int) -> np.ndarray:
        """Environment seeds [S * copies, rounds]; copy ``c`` runs the episodes c, c + copies, ..."""
        episodes = self._copies * self._rounds
        seeds = [
            np.random.SeedSequence((self._base_seed, index, s)).generate_state(episodes)
            for s in range(self._seeds)
        ]
        return np.reshape(seeds, (self._seeds, self._rounds, self._copies)).swapaxes(1, 2).reshape(-1, self._rounds)

    def _act(self, states: Any, observation: np.ndarray, index: int, time: int) -> np.ndarray:
        """Actions [S * copies, ...]; transfers are explicit, so that `jax.transfer_guard` can stay on."""
        stacked = observation.reshape(self._seeds, self._copies, *observation.shape[1:])
        actions = np.array(
            jax.device_get(self._policy(states, *jax.device_put((stacked, np.array([index, time], np.uint32)))))
        )
        if not np.isfinite(actions).all():
            bad = [s for s in range(self._seeds) if not np.isfinite(actions[s]).all()]
            raise FloatingPointError(f"policies {bad} (of {self._seeds}) returned an action that is not finite")
        return actions.reshape(-1, *actions.shape[2:])

    def _named(self, score: np.ndarray) -> dict[str, np.ndarray]:
        """Scores [4, S * copies, rounds] by name, each [S, episodes] with episodes in their own order."""
        by_episode = score.reshape(4, self._seeds, self._copies, self._rounds).swapaxes(2, 3)
        returns, length, success, final = by_episode.reshape(4, self._seeds, -1)
        named = {"return": returns, "length": length.astype(np.int64)}
        if self._reference is not None:
            named["normalized_return"] = normalize(returns, self._reference)
        if not np.isnan(success).any():
            named |= {"success": success, "final_success": final}
        return named


def evaluator(
    act: Callable[[Any, Array, Key], Array],
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
            the ``act`` of `rl.train.population`, or ``jax.vmap`` of a learner's.
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
        copies = max(n for n in range(1, episodes + 1) if episodes % n == 0 and (n == 1 or seeds * n <= _COPIES))
    if copies < 1 or episodes % copies:
        raise ValueError(f"copies must divide the {episodes} episodes of each policy, got {copies}")
    if reference is not None:
        normalize(0.0, reference)  # refuse a bad one before the environments are built

    def policy(states: Any, observations: Array, clock: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(base_seed), clock[0]), clock[1])
        return act(states, observations, jax.random.split(key, seeds))

    vector = envs.vector(name, seeds * copies, processes)
    shape = (seeds, copies, episodes // copies)
    return Evaluator(jax.jit(policy), vector, shape, reference, base_seed, name)


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


class Choice(NamedTuple):
    """One evaluation of each training run, and what it scored."""

    score: np.ndarray  # [S]
    index: np.ndarray  # [S] which of the T evaluations


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
