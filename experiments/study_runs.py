"""What studies share whose variants are runs of scripts: their flags, whether they diverged, and what they logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rl import log, train


def sizes(settings: Any) -> dict[str, Any]:
    """The flags of an offline run at the sizes of a study, whose ``evaluations`` are those of each run."""
    names = ("seeds", "seed", "updates", "eval_episodes", "batch_size")
    return {
        **{name: getattr(settings, name) for name in names},
        "eval_every": settings.updates // settings.evaluations,
        "agent.hidden": settings.hidden,
    }


def divergence(run: Callable[[Any, Any], Any], settings: Any, config: Any) -> str:
    """Runs a script; returns with what message it diverged, "" if it did not.

    Where that is a result, what was logged before stands. A model of the environment that diverges raises
    FloatingPointError.
    """
    try:
        run(settings, config)
    except (train.Diverged, FloatingPointError) as error:
        return str(error)
    return ""


def curve(
    folder: Path, name: str, settings: Any, diverged: bool, before: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """What a run logged of its evaluations: when they are due [T], and their means over episodes [T, S].

    Of a run that diverged the last evaluation stands for those that it did not reach, and ``before`` if there is none:
    to be drawn, for its seeds share a program, and those that did not diverge stopped, too. What is judged leaves such
    a run out (`experiments.studies.undiverged`).

    Raises:
      ValueError: a run that did not diverge lacks an evaluation, because lines of its metrics.jsonl were lost.
    """
    end = settings.steps if hasattr(settings, "steps") else settings.updates
    due = np.arange(settings.eval_every, end + 1, settings.eval_every)
    means = np.full((len(due), settings.seeds), before)
    try:
        steps, scores = log.series(folder, name)
    except (FileNotFoundError, KeyError):
        if not diverged:
            raise
    else:
        missing = sorted(set(due.tolist()) - set(steps.tolist()))
        if missing and not diverged:
            raise ValueError(
                f"{folder / log.METRICS} lacks {name} of steps {missing}: remove {folder} to train it again"
            )
        # Each stands until the next; without losses and divergence there is one at every step that is due.
        latest = np.searchsorted(steps, due, side="right") - 1
        means[latest >= 0] = scores.mean(-1)[latest[latest >= 0]]
    return due, means
