"""Which evaluation of a training run to report, and what choosing among several policies gives."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from rl.types import Array, Key


class Chosen(NamedTuple):
    """The score of the policy that a bandit would choose after 1, 2, ... pulls."""

    mean: np.ndarray  # [pulls]
    low: np.ndarray  # [pulls], of a bootstrap interval; NaN for a single policy, whose spread is unknown
    high: np.ndarray  # [pulls]


def select(scores: ArrayLike, estimates: ArrayLike | None = None, tasks: int = 1) -> dict[str, np.ndarray]:
    """What to report of each training run, [S]: the scores of three evaluations that must not be mixed up.

    ``last``: the end of training. An unbiased score of what training for that long gives.

    ``best``: the evaluation with the highest mean score. Optimistic: it is chosen by the very episodes it is
    scored on, the more so the more evaluations there are, and it needs the environment. Report it only under
    its name.

    ``selected``: chosen without the scores that it reports. With ``estimates`` (of `rl.fitted_q`, say), the
    evaluation with the highest finite estimate, scored on all its episodes: what one gets without an environment, and
    the last one where no estimate is finite, as those of a fit that diverged are not.
    Without, the one that is best on the first half of the episodes, scored on the second half: unbiased, but
    it needs the environment.

    Args:
        scores: [T, S, episodes] scores of T evaluations of S training runs.
        estimates: [T, S] off-policy estimates, higher is better.
        tasks: how many tasks the episodes take turns in: both halves have equally many episodes of each.

    Raises:
        ValueError: wrong axes, scores that are NaN, episodes that are not equally many of each task, or a single one
            where it must be halved.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 3 or scores.size == 0:
        raise ValueError(f"scores must be [evaluations, seeds, episodes], got shape {scores.shape}")
    mean = scores.mean(-1)
    if estimates is not None:
        given = np.asarray(estimates, np.float64)
        if given.shape != mean.shape:
            raise ValueError(f"estimates must be [evaluations, seeds] {mean.shape}, got {given.shape}")
        chosen_by, scored_by = np.where(np.isfinite(given), given, -np.inf), mean
    else:
        each, rest = divmod(scores.shape[-1], tasks)
        if rest:
            raise ValueError(f"{scores.shape[-1]} episodes are not equally many of each of {tasks} tasks")
        half = each // 2 * tasks
        if half == 0:
            raise ValueError("selecting by half of the episodes needs at least 2 of them, got 1")
        chosen_by, scored_by = scores[..., :half].mean(-1), scores[..., half:].mean(-1)
    if np.isnan(mean).any():
        raise ValueError("scores must not be NaN")
    runs = np.arange(mean.shape[1])
    selected = np.where(np.isneginf(chosen_by).all(0), len(mean) - 1, chosen_by.argmax(0))
    return {
        "last": mean[-1],
        "best": mean.max(0),
        "selected": scored_by[selected, runs],
    }


def expected_best(scores: ArrayLike, k: int, chosen_by: ArrayLike | None = None) -> float:
    """The expected score of the best of ``k`` policies that are drawn at random, each of them at most once.

    The expected online performance of Kurenkov & Kolesnikov (2022), "Showing Your Offline Reinforcement Learning Work",
    after Dodge et al. (2019): what one gets who can try ``k`` settings of ``P``. They draw with replacement, which is
    biased; this is the mean over all subsets of ``k`` (Tang et al. 2020, "Showing Your Work Doesn't Always Work"). The
    i-th smallest of ``P`` scores is the largest of a subset with probability C(i - 1, k - 1) / C(P, k).

    The largest of noisy scores is partly noise. ``chosen_by`` chooses by other scores than those that count, such as
    those of other seeds, which takes this optimism away.

    Args:
        scores: [P], one of each policy.
        k: how many are tried, 1 to P.
        chosen_by: [P], what decides which is the best; by default the scores themselves. Ties are broken by chance.

    Raises:
        ValueError: wrong axes, NaN or infinite scores, or a ``k`` that is not one of 1 to P.
    """
    values = np.asarray(scores, np.float64)
    by = values if chosen_by is None else np.asarray(chosen_by, np.float64)
    if values.ndim != 1 or values.size == 0 or by.shape != values.shape:
        raise ValueError(f"scores and chosen_by must be [policies], got shapes {values.shape} and {by.shape}")
    if not (np.isfinite(values).all() and np.isfinite(by).all()):
        raise ValueError("scores and chosen_by must be finite")
    count = len(values)
    if not 1 <= k <= count:
        raise ValueError(f"k={k} of {count} policies cannot be tried: give 1 to {count}")
    # Each probability from the next larger one: binomial coefficients themselves would overflow.
    rank = np.arange(count, 1, -1)
    probability = k / count * np.cumprod(np.concatenate([[1.0], np.maximum(rank - k, 0) / (rank - 1)]))[::-1]
    _, group = np.unique(by, return_inverse=True)
    sizes = np.bincount(group)
    of_group = np.bincount(np.sort(group), probability) / sizes
    return float(of_group[group] @ values)


def bandit(
    returns: ArrayLike,
    pulls: int,
    key: Key,
    *,
    policies: int | None = None,
    scores: ArrayLike | None = None,
    alpha: float = 2.0,
    trials: int = 500,
    resamples: int = 200,
) -> Chosen:
    """How good is the policy that a bandit chooses with a budget of episodes?

    The protocol of Jackson et al. (2025), "A Clean Slate for Offline Reinforcement Learning": in each trial a UCB1
    bandit (Auer et al. 2002) plays an episode at a time, which is one of the logged ``returns``, drawn with
    replacement. Pull number t takes the policy with the largest mean so far plus ``sqrt(alpha ln(t) / its pulls)``, and
    the policy chosen after it is the one with the largest mean so far. Ties are broken by an order that each trial
    draws.

    It differs from their code in two points. Only a policy that was played can be chosen: there one that was not counts
    as 0, which beats negative returns. And the interval is over policies, drawn again with replacement, since others
    would have been trained by another seed: theirs is over trials, and gets as narrow as one lets it run.

    Args:
        returns: [P, E] of E episodes of each of P policies (hyper-parameters, seeds).
        pulls: episodes that the bandit plays.
        key: equal keys give equal curves.
        policies: how many of the P each trial draws; all by default.
        scores: [P], what each policy is worth; by default the mean of its returns, which flatters the choice where
            episodes are few, as it is made by the same ones.
        alpha: of the bonus. 2 is for returns within [0, 1], and theirs for any; for a range R it is 2 R^2.
        trials: that means are over.
        resamples: bootstrap samples of the policies, for the 95 % interval by their percentiles.

    Returns:
        The curve. One program is compiled for all trials and resamples, and once for arguments of equal sizes.

    Raises:
        ValueError: wrong axes, returns or scores that are not finite, or a number that is out of range.
    """
    played = np.asarray(returns, np.float64)
    if played.ndim != 2 or played.size == 0:
        raise ValueError(f"returns must be [policies, episodes], got shape {played.shape}")
    worth = played.mean(1) if scores is None else np.asarray(scores, np.float64)
    if worth.shape != played.shape[:1]:
        raise ValueError(f"scores must be [policies] ({len(played)},), got shape {worth.shape}")
    if not (np.isfinite(played).all() and np.isfinite(worth).all()):
        raise ValueError("returns and scores must be finite")
    drawn = len(played) if policies is None else policies
    if not 1 <= drawn <= len(played):
        raise ValueError(f"policies={drawn} of {len(played)} cannot be drawn: give 1 to {len(played)}")
    if min(pulls, trials, resamples) < 1 or not alpha >= 0:
        raise ValueError(
            f"pulls={pulls}, trials={trials} and resamples={resamples} must be at least 1, and alpha={alpha} not "
            "negative"
        )
    # What is compared are differences: without the common part float32 holds them.
    level = played.mean()
    curves = _curves(
        jnp.float32(played - level), jnp.float32(worth - level), alpha, key, pulls, drawn, trials, resamples
    )
    mean, *resampled = np.asarray(curves, np.float64) + level
    if len(played) == 1:
        return Chosen(mean, *np.full((2, pulls), np.nan))
    return Chosen(mean, *np.quantile(resampled, [0.025, 0.975], axis=0))


@functools.partial(jax.jit, static_argnames=("pulls", "drawn", "trials", "resamples"))
def _curves(
    returns: Array, scores: Array, alpha: Array, key: Key, pulls: int, drawn: int, trials: int, resamples: int
) -> Array:
    """[1 + resamples, pulls] means over trials: with the policies themselves, and with each resample of them."""
    count, episodes = returns.shape

    def trial(pool: Array, key: Key) -> Array:
        arm_key, episode_key = jax.random.split(key)
        arms = jax.random.permutation(arm_key, pool)[:drawn]
        return _trial(returns, scores, alpha, arms, jax.random.randint(episode_key, (pulls,), 0, episodes))

    def of_pool(number: Array) -> Array:
        pool_key, trial_key = jax.random.split(jax.random.fold_in(key, number))
        resampled = jax.random.randint(pool_key, (count,), 0, count)
        pool = jnp.where(number == 0, jnp.arange(count), resampled)
        return jax.vmap(trial, (None, 0))(pool, jax.random.split(trial_key, trials)).mean(0)

    return jax.lax.map(of_pool, jnp.arange(1 + resamples))


def _trial(returns: Array, scores: Array, alpha: Array, arms: Array, episodes: Array) -> Array:
    """Scores [pulls] of the policy chosen after each pull.

    Args:
        returns, scores, alpha: as of `bandit`.
        arms: [K] numbers of the policies that take part, the first of which win ties.
        episodes: [pulls] number of the episode that each pull sees, of whichever policy it takes.
    """

    def pull(seen: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (counts, sums), (number, episode) = seen, now
        bonus = jnp.sqrt(alpha * jnp.log(number) / counts)
        arm = jnp.where(counts > 0, sums / counts + bonus, jnp.inf).argmax()
        counts, sums = counts.at[arm].add(1), sums.at[arm].add(returns[arms[arm], episode])
        best = jnp.where(counts > 0, sums / counts, -jnp.inf).argmax()
        return (counts, sums), scores[arms[best]]

    nothing = jnp.zeros(len(arms))
    numbers = jnp.arange(1.0, len(episodes) + 1)
    return jax.lax.scan(pull, (nothing, nothing), (numbers, episodes))[1]
