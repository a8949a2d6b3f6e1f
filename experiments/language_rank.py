"""Ranks the candidates of `experiments.language` by an agent's values, by likelihood and by a second model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.language_log import Task
from experiments.language_settings import Settings
from rl import log, shard
from rl.agents import lm_bc
from rl.language import model, ranking, reading
from rl.types import State, TokenBatch

RANKED, RANKING, CONTROL = "ranked.jsonl", "ranking.json", "control"  # in the run folder


def rank(
    settings: Settings,
    task: Task,
    read: Callable[[State, TokenBatch], dict[str, jax.Array]],
    state: State,
    folder: Path,
    baselines: Mapping[str, State],
    mesh: Mesh,
) -> dict[str, Any] | None:
    """Scores all candidates, and writes a line for each prompt: the scores, and who has them from the best on.

    Returns what `rl.language.ranking.report` says of the rows that have outcomes, and writes it, too; None if none has.

    Args:
      settings, task, state: of the run.
      read: what the agent makes of rows, see `rl.language.reading.reader`.
      folder: of the run.
      baselines: parameters of other models to rank by.
      mesh: of the run; all hosts must call this, and one of them writes.
    """
    look = shard.on_all_hosts(read, mesh)
    assert task.candidates is not None
    likelihood = lambda params, rows: model.log_probabilities(task.lm, params, rows.tokens, rows.segment)
    likely = shard.on_all_hosts(jax.jit(likelihood), mesh)
    readings = reading.by_length(look, state, task.candidates, settings.batch_size)
    tokens = readings["taken"].sum(1)
    sums = {"scores": readings["score"]}
    untrained = shard.place_language(task.pretrained.params if task.base is None else task.base, mesh)
    for name, params in {"log_probabilities": untrained, **baselines}.items():
        sums[name] = reading.by_length(likely, params, task.candidates, settings.batch_size)
    sums = {name: np.where(readings["taken"], each, 0.0).sum(1) for name, each in sums.items()}
    sums |= {f"{name}_per_token": each / tokens for name, each in sums.items()}
    candidate_sets = list(task.candidate_sets.values())
    ends = np.cumsum([len(row.candidates) for row in candidate_sets])[:-1]
    of_each = {name: np.split(each, ends) for name, each in sums.items()}
    if not shard.is_main():
        return None
    with log.replacing(folder / RANKED) as partial, open(partial, "w", encoding="utf-8") as file:
        for number, (row, size) in enumerate(zip(candidate_sets, np.split(tokens, ends), strict=True)):
            entry = {name: each[number] for name, each in of_each.items()}
            entry |= {"tokens": size, "order": ranking.best_of(entry["scores"][None], len(size))[0]}
            out = {**row.row, **{name: values.tolist() for name, values in entry.items()}}
            file.write(json.dumps(out) + "\n")
    known = [number for number, row in enumerate(candidate_sets) if row.outcomes]
    if not known:
        (folder / RANKING).unlink(missing_ok=True)  # of other candidates
        return None
    report = ranking.report(
        {name: [each[number] for number in known] for name, each in of_each.items()},
        [np.array(candidate_sets[number].outcomes) for number in known],
        against="log_probabilities_per_token",
    )
    log.write_json(folder / RANKING, report)
    return report


def check_control(task: Task) -> None:
    """Raises ValueError if what the control would be fine-tuned on is all of the log, or nothing."""
    weights = task.rows.imitate[task.rows.is_action]
    if weights.min() == weights.max():
        raise ValueError(
            "--control=rft is fine-tuned on what is to be imitated, and that is all of the log alike, or nothing: give "
            "imitate in each row, or --best=0.1, for which returns must differ"
        )


def control(settings: Settings, config: Any, task: Task, folder: Path) -> tuple[Settings, lm_bc.Config, Task]:
    """What to train as the control: rejection fine-tuning, as many updates of the likelihood of what is to be imitated.

    Args:
      settings, config, task: of the run.
      folder: of the run, in which that of the control lies.
    """
    workdir = str(folder / CONTROL)
    of_control = dataclasses.replace(settings, agent="lm_bc", workdir=workdir, tensorboard=False, wandb=False)
    adam = config.policy_optimiser
    if adam.schedule == "cosine":  # B-Coder's need be no longer than its second stage
        adam = dataclasses.replace(adam, decay_updates=max(adam.decay_updates, settings.updates))
    likelihood = lm_bc.Config(config.learning_rate, config.weight_decay, config.chunk, adam)
    return of_control, likelihood, task._replace(game=None)
