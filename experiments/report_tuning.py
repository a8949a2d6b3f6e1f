"""What a report says of sweeps over an agent's hyper-parameters: how good is what one gets who can try k settings?"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import report_runs, report_scores
from experiments.report_runs import Part
from rl import outcomes, selection, statistics

_LEAST = 3  # settings of one agent, below which nothing is said
_TRIES = (1, 2, 3, 5, 10, 20, 50)  # of settings, before all of them
_EPISODES = 100  # that the bandit plays


def tuned(
    parts: Sequence[Part], cells: Sequence[Mapping[str, Any]], score: str
) -> dict[str, list[dict[str, Any]]]:
    """{"tuned": one entry for each agent and task}, or nothing where no agent has three settings finished on a task.

    Settings differ in the agent's hyper-parameters; runs with another head, say, are another agent's. Those that
    diverged or are not finished have no score to be drawn. An entry has

    - ``variants``: the settings that are drawn from;
    - ``without``: {why a setting is not among them: how many}, of all that are planned;
    - ``best``: for each number of ``tries``, the expected last score of the best of as many settings, by the seed that
      is left out: the other seeds choose, and it counts (`rl.selection.expected_best`); a single seed does both. Two
      choices share all seeds but two, so that Student's interval of these scores would be none;
    - ``first_seeds``: of settings with different numbers of seeds, how many of each are taken;
    - ``bandit``: the expected score of the policy that a bandit chooses among all settings and seeds after 1, 2, ...
      episodes (`rl.selection.bandit`). It plays the first half of the last evaluation, and the other half counts. None
      where there are no such episodes.
    """
    scores = {(cell["variant"], cell["task"]): np.asarray(cell["last"]["each"]) for cell in cells}
    ended = {(row["variant"], row["task"]): row["state"] for row in report_runs.failures(parts, score)}
    groups: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[str, list[Part]]] = {}
    for part in parts:
        settings = groups.setdefault((part.task, _agent(part), _shared(part)), {})
        settings.setdefault(part.variant, []).append(part)
    rows = []
    for (task, agent, _), planned in groups.items():
        settings = {variant: of_one for variant, of_one in planned.items() if (variant, task) in scores}
        if len(settings) < _LEAST:
            continue
        without = [ended.get((variant, task), "unfinished") for variant in planned if variant not in settings]
        row: dict[str, Any] = {"agent": agent, "task": task, "variants": list(settings)}
        row["without"] = dict(collections.Counter(without))
        row |= _best([scores[variant, task] for variant in settings])
        row["bandit"] = _bandit([part for of_one in settings.values() for part in of_one], score)
        rows.append(row)
    return {"tuned": rows} if rows else {}


def _shared(part: Part) -> tuple[tuple[str, str], ...]:
    """What all settings of one agent have in common."""
    without = {name for name in part.parameters if name.startswith("agent.")} | {*report_runs.INDIFFERENT}
    return tuple((name, str(x)) for name, x in report_scores.identity(part).items() if name not in without)


def _agent(part: Part) -> str:
    """The name of a row, without the hyper-parameters: ``iql, hl_gauss``."""
    name = part.variant
    for parameter, x in part.parameters.items():
        if parameter.startswith("agent."):
            name = name.replace(f", {parameter.removeprefix('agent.')}={x}", "")
    return name


def _best(of_settings: Sequence[np.ndarray]) -> dict[str, Any]:
    """Scores by the number of settings that are tried, from those of each setting [S]."""
    seeds = min(map(len, of_settings))
    matrix = np.stack([each[:seeds] for each in of_settings], 1)  # [S, P]
    chosen_by = statistics.of_others(matrix) if seeds > 1 else matrix
    tries = [k for k in _TRIES if k < matrix.shape[1]] + [matrix.shape[1]]
    each = [
        [selection.expected_best(row, k, by) for row, by in zip(matrix, chosen_by, strict=True)]
        for k in tries
    ]
    result = {"tries": tries, "best": [{"mean": np.mean(x), "each": x} for x in each]}
    return result | ({"first_seeds": seeds} if max(map(len, of_settings)) > seeds else {})


def _bandit(parts: Sequence[Part], score: str) -> dict[str, Any] | None:
    """The bandit's curve."""
    of_parts = [x for part in parts if (x := _episodes(part, score)) is not None]
    if len(of_parts) < len(parts) or len({x.shape[-1] for x in of_parts}) > 1:
        return None
    returns = np.concatenate(of_parts)  # [P, E]
    # Equally many of each task, where they take turns.
    each = report_runs.arguments(parts[0])[0].eval_episodes
    half = each // 2 * (returns.shape[-1] // each)
    if half == 0:
        return None
    played, counted = returns[:, :half], returns[:, half:].mean(-1)
    curve = selection.bandit(
        played, _EPISODES, jax.random.key(0), scores=counted, alpha=2.0 * float(np.ptp(played)) ** 2
    )
    return {"episodes": np.arange(1, _EPISODES + 1), **curve._asdict()}


def _episodes(part: Part, score: str) -> np.ndarray | None:
    """Scores [S, E] of the episodes of a run's last evaluation; None where its lines were lost, or hold means alone."""
    assert part.scores is not None
    try:
        _, logged = outcomes.series(part.folder, score, report_runs.length(part))
    except (KeyError, FileNotFoundError):
        return None
    if logged.ndim != 3:
        return None
    scores = np.split(logged[-1], part.runs)[part.index]
    return scores if np.allclose(scores.mean(-1), part.scores[score]["last"]["per_seed"]) else None
