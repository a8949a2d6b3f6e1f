"""What may be said of scores from several seeds: aggregates over tasks and confidence intervals, in NumPy.

Score matrices are ``[S, K]``, ``S`` seeds (independent training runs) by ``K`` tasks, as in Agarwal et al.
(2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice". Episodes are averaged before
they come here: ten episodes of one policy say nothing about the next seed. No JAX, files or plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_CHUNK = 2**22  # resampled scores held at once, 32 MiB
_ROUNDING = 1e-9  # by which success rates that are the same may differ


class Interval(NamedTuple):
    """A confidence interval; both bounds are NaN where the data cannot give one."""

    low: float
    high: float


def mean(scores: ArrayLike) -> np.ndarray:
    """Mean over seeds and tasks, [..., S, K] -> [...]."""
    return _matrix(scores).mean((-2, -1))


def median(scores: ArrayLike) -> np.ndarray:
    """Median over tasks of the mean over seeds, [..., S, K] -> [...]."""
    return np.median(_matrix(scores).mean(-2), -1)


def iqm(scores: ArrayLike) -> np.ndarray:
    """Interquartile mean, [..., S, K] -> [...]: the mean of the middle half of all S·K scores.

    A quarter of the scores, rounded down, is dropped at either end (a mean trimmed by 25 %).
    """
    matrix = _matrix(scores)
    flat = np.sort(matrix.reshape(*matrix.shape[:-2], -1), -1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(-1)


def optimality_gap(scores: ArrayLike, optimum: float = 100.0) -> np.ndarray:
    """How far scores fall short of ``optimum`` on average, what exceeds it not counted, [..., S, K] -> [...].

    The default is the expert's score on this library's normalised scale, 0 (random) to 100 (expert).
    """
    return optimum - np.minimum(_matrix(scores), optimum).mean((-2, -1))


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    """P(a run of X scores above a run of Y), ties counting half, averaged over tasks.

    Args:
        x: [..., S, K].
        y: [..., S', K]; the number of seeds may differ.

    Raises:
        ValueError: different numbers of tasks.
    """
    x, y = _matrix(x), _matrix(y)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} tasks and y has {y.shape[-1]}: compare on the same tasks")
    difference = x[..., :, None, :] - y[..., None, :, :]
    return ((np.sign(difference) + 1) / 2).mean((-3, -2, -1))


def performance_profile(scores: ArrayLike, thresholds: ArrayLike) -> np.ndarray:
    """Share of all S·K runs that score above each threshold, [..., S, K] and [T] -> [..., T].

    The run-score distribution of Agarwal et al. (2021), section 4.2: where one curve lies above another everywhere, its
    method is better at every quantile of runs and tasks.
    """
    matrix = _matrix(scores)
    above = [(matrix > threshold).mean((-2, -1)) for threshold in np.asarray(thresholds, float)]
    return np.stack(above, -1)


def bootstrap(
    statistic: Callable[..., np.ndarray],
    *scores: ArrayLike,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of a statistic by the stratified bootstrap: seeds are resampled within each task.

    Meant for aggregates over many tasks. On one task with few seeds it is too narrow: use `interval`, whose
    docstring has the coverage of both. Where seeds of two methods do not overlap on any task, all resamples have the
    same probability of improvement: an interval without width is none.

    Args:
        statistic: a function of this module, or any that maps [..., S, K] arrays to [...], or to [..., T].
        *scores: one [S, K] matrix for each argument of ``statistic``, resampled independently.
        confidence: probability that the interval is meant to cover.
        resamples: number of bootstrap samples.
        seed: equal seeds give equal intervals.

    Returns:
        The interval, of [T] arrays where the statistic is one, each entry by itself; NaN bounds where any matrix has a
        single seed, whose spread is unknown.

    Raises:
        ValueError: an empty matrix, a wrong number of axes, or NaN.
    """
    matrices = [_matrix(s) for s in scores]
    for matrix in matrices:
        if matrix.ndim != 2:
            raise ValueError(f"bootstrap needs [seeds, tasks] matrices, got shape {matrix.shape}")
    if min(len(matrix) for matrix in matrices) == 1:
        return Interval(np.nan, np.nan)
    rng = np.random.default_rng(seed)
    # A statistic of two matrices may look at all pairs of their seeds.
    numbers = max(sum(x.size for x in matrices), math.prod(map(len, matrices)) * matrices[0].shape[1])
    chunk = max(1, _CHUNK // numbers)
    values = []
    for start in range(0, resamples, chunk):
        count = min(chunk, resamples - start)
        values.append(statistic(*(_resample(rng, matrix, count) for matrix in matrices)))
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(np.concatenate(values), [tail, 1.0 - tail], axis=0)
    return Interval(low, high) if np.ndim(low) else Interval(float(low), float(high))


def interval(scores: ArrayLike, confidence: float = 0.95) -> Interval:
    """Student-t interval of the mean score on one task, from one score per seed [S].

    This is the interval to report for a handful of seeds. Simulated coverage of nominal 95 % intervals of the
    mean (20,000 experiments for Student's t, 4,000 for the percentile bootstrap; standard error 0.003):

    ==============================  ======  ======  ======  ======
    scores                          t, S=5  t, S=8  b, S=5  b, S=8
    ==============================  ======  ======  ======  ======
    normal                           0.95    0.95    0.84    0.89
    uniform                          0.93    0.94    0.83    0.90
    exponential                      0.88    0.89    0.79    0.83
    lognormal (0, 1)                 0.83    0.83    0.72    0.79
    a fifth of the seeds fails       0.70    0.83    0.66    0.83
    ==============================  ======  ======  ======  ======

    So it is the better of the two everywhere, exact for normal scores, and still too narrow where rare seeds
    decide the mean: then only more seeds help. Where all seeds score the same it has no width, which says that
    the spread was not seen, not that there is none.

    Returns:
        The interval; NaN bounds for a single seed, whose spread is unknown.

    Raises:
        ValueError: no scores, more than one axis, or NaN.
    """
    x = np.asarray(scores, np.float64)
    if x.ndim != 1:
        raise ValueError(f"interval needs one score per seed, [S], got shape {x.shape}")
    _finite(x)
    if len(x) == 1:
        return Interval(np.nan, np.nan)
    centre = x.mean()
    half = _student(len(x), confidence) * x.std(ddof=1) / np.sqrt(len(x))
    return Interval(float(centre - half), float(centre + half))


def _student(scores: int, confidence: float) -> float:
    """The quantile of Student's distribution for a two-sided interval of so many scores."""
    from scipy import special  # half a second that only intervals wait for

    return float(special.stdtrit(scores - 1, (1 + confidence) / 2))


def rate_interval(rates: ArrayLike, confidence: float = 0.95) -> Interval:
    """Interval within 0 and 1 of the mean success rate on one task, from one rate per seed [S].

    Wilson's interval with the effective sample size of Student's quantile, as Franco et al. (2019) recommend it for
    clustered samples ("Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys"): all
    means p with ``|mean - p| <= t sqrt(p (1 - p) d / S)``, where ``d`` is the variance between seeds in units of the
    largest that it could be at this mean, ``mean (1 - mean)``. Away from 0 and 1 it is close to Student's `interval`.

    Where all seeds have the same rate their spread was not seen, and ``d`` is 1: each seed may succeed always or
    never. That interval is wide, and it is meant to be: four seeds that always succeed leave [0.28, 1], but as soon
    as one of them fails one episode in twenty, the spread has a scale, and they leave [0.87, 1].

    Simulated coverage of nominal 95 % intervals (20,000 experiments; standard error 0.002), Student's beside it:

    ========================================  ======  ======  ======  ======
    rates of seeds                              S=4     S=8   t, S=4  t, S=8
    ========================================  ======  ======  ======  ======
    20 episodes at 0.5                          0.96    0.95    0.96    0.95
    20 episodes at 0.95                         0.97    0.97    0.98    0.92
    20 episodes, rates Beta(18, 2)              0.98    0.95    0.94    0.92
    a fifth of the seeds fails, others 1        1.00    0.99    0.59    0.83
    a fifth fails, others 20 episodes at 0.9    0.72    0.83    0.63    0.83
    ========================================  ======  ======  ======  ======

    So where rare seeds decide the mean it is too narrow, as Student's is: then only more seeds help.

    Returns:
        The interval; NaN bounds for a single seed, whose spread is unknown.

    Raises:
        ValueError: no rates, more than one axis, NaN, or one outside 0 and 1.
    """
    x = np.asarray(rates, np.float64)
    student = interval(x, confidence)  # which checks them
    if x.min() < 0 or x.max() > 1:
        raise ValueError(f"success rates lie in [0, 1], not in [{x.min():g}, {x.max():g}]")
    if len(x) == 1:
        return student
    mean, variance = x.mean(), x.var(ddof=1)
    # Equal rates that are means over tasks may differ by rounding.
    spread = variance / (mean * (1 - mean)) if np.ptp(x) > _ROUNDING else 1.0
    square = _student(len(x), confidence) ** 2 * spread / len(x)
    centre = (mean + square / 2) / (1 + square)
    half = np.sqrt(square * (mean * (1 - mean) + square / 4)) / (1 + square)
    return Interval(float(max(0.0, centre - half)), float(min(1.0, centre + half)))


def ratio_interval(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> Interval:
    """Interval of the ratio of two means, ``mean(x) / mean(y)``, from one score of each per seed [S] (Fieller, 1954).

    It holds all ratios r for which `interval` of ``x - r y`` has 0 in it, so it is as exact as Student's for normal
    scores, whether or not ``x`` and ``y`` of a seed depend on each other.

    Returns:
        The interval; NaN bounds for a single seed, and where that of ``y`` has 0 in it: any ratio, however large, is
        then possible.

    Raises:
        ValueError: no scores, different numbers of them, more than one axis, or NaN.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    student = interval(x, confidence), interval(y, confidence)  # which check them
    if x.shape != y.shape:
        raise ValueError(f"a ratio needs as many scores above as below, got {len(x)} and {len(y)}")
    if len(x) == 1 or student[1].low <= 0 <= student[1].high:
        return Interval(np.nan, np.nan)
    square = _student(len(x), confidence) ** 2 / len(x)
    # Where mean(x - r y)^2 = square var(x - r y), which is a r^2 - 2 b r + c = 0.
    (xx, xy), (_, yy) = np.outer([x.mean(), y.mean()], [x.mean(), y.mean()]) - square * np.cov(x, y)
    half = np.sqrt(max(0.0, xy**2 - xx * yy))
    return Interval(float((xy - half) / yy), float((xy + half) / yy))


def held_out_best(scores: ArrayLike) -> np.ndarray:
    """What each seed scores with the choice that is best on average for the other seeds, [S, C] -> [S].

    The largest of the ``C`` scores of a seed is no estimate of what choosing gives: it is the choice that chance helped
    most, the more so the noisier scores are. Here no score has a part in the choice that it is counted for.

    Raises:
      ValueError: a single seed, which has no others; no choice, or NaN.
    """
    matrix = _matrix(scores)
    if matrix.ndim != 2 or len(matrix) < 2:
        raise ValueError(
            f"a choice by other seeds needs scores [seeds, choices] of two seeds or more, got shape {matrix.shape}"
        )
    return matrix[np.arange(len(matrix)), of_others(matrix).argmax(1)]


def of_others(matrix: np.ndarray) -> np.ndarray:
    """The sum over all seeds but each one, [S, C] -> [S, C], in units of the largest score; equal sums are equal.

    As differences from the sum over all they differ by rounding, and choices that tie would not.
    """
    sums = matrix.sum(0) - matrix
    return np.round(sums / max(np.abs(matrix).max(), np.finfo(float).tiny), 9)


def summary(scores: ArrayLike, *, rate: bool = False) -> dict[str, Any]:
    """What a result says of one score per seed [S]: its mean, its 95 % interval, and each.

    The interval is Student's, or `rate_interval` if scores are success rates.
    """
    each = np.asarray(scores, float)
    bounds = rate_interval(each) if rate else interval(each)
    return {"mean": float(each.mean()), "ci95": list(bounds), "each": each}


def _resample(rng: np.random.Generator, matrix: np.ndarray, count: int) -> np.ndarray:
    """``count`` matrices [count, S, K] whose every column is drawn with replacement from that of ``matrix``."""
    seeds, tasks = matrix.shape
    rows = rng.integers(seeds, size=(count, seeds, tasks))
    return matrix[rows, np.arange(tasks)]


def _matrix(scores: ArrayLike) -> np.ndarray:
    matrix = np.asarray(scores, np.float64)
    if matrix.ndim < 2:
        raise ValueError(
            f"scores must be [..., seeds, tasks], got shape {matrix.shape}; one task is [seeds, 1]"
        )
    _finite(matrix)
    return matrix


def _finite(scores: np.ndarray) -> None:
    if scores.size == 0:
        raise ValueError(f"no scores: shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{np.sum(~np.isfinite(scores))} of {scores.size} scores are NaN or infinite")
