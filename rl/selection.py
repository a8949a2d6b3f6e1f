"""Which evaluation of a training run to report."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def select(scores: ArrayLike, estimates: ArrayLike | None = None, tasks: int = 1) -> dict[str, np.ndarray]:
    """What to report of each training run, [S]: the scores of three evaluations that must not be mixed up.

    ``last``: the end of training. An unbiased score of what training for that long gives.

    ``best``: the evaluation with the highest mean score. Optimistic: it is chosen by the very episodes it is
    scored on, the more so the more evaluations there are, and it needs the environment. Report it only under
    its name.

    ``selected``: chosen without the scores that it reports. With ``estimates`` (of `rl.fitted_q`, say), the
    evaluation with the highest estimate, scored on all its episodes: what one gets without an environment, and the
    last one where no estimate is finite.
    Without, the one that is best on the first half of the episodes, scored on the second half: unbiased, but
    it needs the environment.

    Args:
        scores: [T, S, episodes] scores of T evaluations of S training runs.
        estimates: [T, S] off-policy estimates, higher is better.
        tasks: how many tasks the episodes take turns in: both halves have equally many episodes of each.

    Raises:
        ValueError: wrong axes, NaN, episodes that are not equally many of each task, or a single one where it must be
            halved.
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
        each, rest = divmod(scores.shape[-1], tasks)
        if rest:
            raise ValueError(f"{scores.shape[-1]} episodes are not equally many of each of {tasks} tasks")
        half = each // 2 * tasks
        if half == 0:
            raise ValueError("selecting by half of the episodes needs at least 2 of them, got 1")
        chosen_by, scored_by = scores[..., :half].mean(-1), scores[..., half:].mean(-1)
    if np.isnan(mean).any() or np.isnan(chosen_by).any():
        raise ValueError("scores and estimates must not be NaN")
    runs = np.arange(mean.shape[1])
    selected = np.where(np.isneginf(chosen_by).all(0), len(mean) - 1, chosen_by.argmax(0))
    return {
        "last": mean[-1],
        "best": mean.max(0),
        "selected": scored_by[selected, runs],
    }
