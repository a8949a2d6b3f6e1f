"""Where a report's numbers come from: data, settings and machines of the runs, and the numbers others published."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments import presets, report_runs, studies
from experiments.report_runs import Part
from rl import log
from rl.data import recipes
from rl.files import expanded
from sweeps import records
from sweeps.scripts import SCRIPTS

# Settings of how a run is scored, and those that its head, which a protocol names itself, may not read.
_SCORING = (
    *("eval_every", "eval_episodes", "policy_estimates"),
    *("head", "head_size", "head_low", "head_high", "head_start", "head_kappa", "head_sigma"),
)


def data(parts: Sequence[Part], earlier: Path) -> dict[str, dict[str, Any]]:
    """{task: transitions, digest and mean score} of data that were made here and that finished runs were trained on.

    The mean score is what ``earlier`` has, or else that of the file on this machine, if it is of the same data. Tasks
    whose runs had different data (`other_data`), or do not say which, are left out.
    """
    known = log.read_json(earlier).get("data", {}) if earlier.exists() else {}
    runs: dict[str, list[Mapping[str, Any]]] = {}
    cards: dict[str, dict[str, Any]] = {}
    for part in parts:
        settings, _ = report_runs.arguments(part)
        if part.result and (name := getattr(settings, "dataset", "")) in recipes.LOCOMOTION:
            runs.setdefault(part.task, []).append(part.result)
            cards[part.task] = _card(name, settings.data_folder)
    entries = {}
    for task, results in runs.items():
        distinct = {
            name: {result[name] for result in results if result.get(name)}
            for name in ("digest", "transitions")
        }
        if any(len(values) > 1 for values in distinct.values()):
            continue
        of_runs = {name: value for name, values in distinct.items() for value in values}
        fitting = [card for card in (known.get(task, {}), cards[task]) if _same_data(card, of_runs)]
        scored = [card for card in fitting if card.get("normalized_return") is not None]
        entry = next(iter(scored or fitting), {}) | of_runs
        if "transitions" in entry:
            entries[task] = entry
    return entries


def _card(name: str, folder: str) -> dict[str, Any]:
    """What there is to say of a dataset's file on this machine; empty if it is not there."""
    recipe = recipes.LOCOMOTION[name]
    card = recipes.read_card(expanded(folder or recipes.default_folder(recipe.family)) / recipe.file)
    of_report = {"transitions": "transitions", "normalized_return": "normalized_return_d4rl"}
    return {key: card.get(there) for key, there in of_report.items()} if card else {}


def _same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two are of the same data: by digest if both have it, and else by transitions."""
    shared = [name for name in ("digest", "transitions") if name in one and name in other]
    return bool(shared) and one[shared[0]] == other[shared[0]]


def other_data(parts: Sequence[Part]) -> list[str]:
    """The tasks whose finished runs were not all trained on the same data, by the digests that runs keep."""
    versions = records.data_versions((part.task, part.result) for part in parts if part.result)
    return [task for task, count in versions.items() if count > 1]


def other_lengths(parts: Sequence[Part]) -> dict[str, dict[str, int]]:
    """{task: {variant: updates, or environment steps}} where the finished runs of a task were not equally long."""
    lengths: dict[str, dict[str, int]] = {}
    for part in (part for part in parts if part.scores is not None):
        lengths.setdefault(part.task, {})[part.variant] = report_runs.length(part)
    return {task: of_task for task, of_task in lengths.items() if len(set(of_task.values())) > 1}


def other_settings(parts: Sequence[Part]) -> dict[str, dict[str, dict[str, str]]]:
    """{variant: {parameter: {task: value}}} of what the runs of one name do not share on all tasks."""
    values: dict[str, dict[str, dict[str, str]]] = {}
    tasks: dict[str, set[str]] = {}
    for part in parts:
        tasks.setdefault(part.variant, set()).add(part.task)
        of_variant = values.setdefault(part.variant, {})
        script = SCRIPTS[part.script]
        for name, value in part.parameters.items():
            if name not in (script.task, *report_runs.INDIFFERENT):
                of_variant.setdefault(name, {})[part.task] = str(value)
    differ = {
        variant: {
            name: of_task
            for name, of_task in of_variant.items()
            if len(set(of_task.values())) > 1 or of_task.keys() != tasks[variant]
        }
        for variant, of_variant in values.items()
    }
    return {variant: names for variant, names in differ.items() if names}


def machines(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """What finished runs were made with: commits and hardware of all their sessions, and how many runs there are."""
    results = {part.folder: part.result for part in parts if part.result and "hardware" in part.result}
    counts: dict[tuple[str, str], int] = {}
    for folder, result in results.items():
        first = log.read_json(folder / log.CONFIG) if (folder / log.CONFIG).exists() else {}
        sessions = [one for one in (first, *first.get("resumed", [])) if "hardware" in one] or [result]
        commits = dict.fromkeys(studies.short(one["commit"]) for one in sessions)
        machines = dict.fromkeys(_machine(one["hardware"]) for one in sessions)
        key = (", then ".join(commits), ", then ".join(machines))
        counts[key] = counts.get(key, 0) + 1
    return [{"commit": commit, "hardware": machine, "programs": n} for (commit, machine), n in counts.items()]


def _machine(host: Mapping[str, Any]) -> str:
    name = host["cpu"] if host["backend"] == "cpu" else f"{host['devices']} {host['device']}"
    return f"{name}, {host['cores']} {'core' if host['cores'] == 1 else 'cores'}"


def published(
    parts: Sequence[Part], cells: Sequence[Mapping[str, Any]], score: str, evaluations: int
) -> list[dict[str, Any]]:
    """What others reported for the agents and tasks of the sweeps, and in what their protocol differs from ours."""
    finished = {(cell["variant"], cell["task"]) for cell in cells}
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    settled = [(part, report_runs.arguments(part)[0]) for part in parts]
    for path in sorted((Path(__file__).parent / "papers" / "published").glob("*.yaml")):
        entry = yaml.safe_load(path.read_text())
        if "protocol" not in entry:
            continue
        for part, settings in settled:
            protocol = entry["protocol"] | entry.get("agents", {}).get(settings.agent, {})
            task = presets.task_name(str(getattr(settings, SCRIPTS[part.script].task)))
            numbers = entry["scores"].get(task, {}).get(settings.agent)
            if numbers is None or getattr(settings, "head", "scalar") != protocol.get("head", "scalar"):
                continue
            rows[path.stem, part.variant, part.task] = {
                "source": entry["source"],
                "variant": part.variant,
                "task": part.task,
                "mean": numbers[0],
                "deviation": numbers[1] if len(numbers) > 1 else None,
                "differs": _differences(part, settings, protocol, score, evaluations),
                "finished": (part.variant, part.task) in finished,
            }
    return list(rows.values())


def _differences(
    part: Part, settings: Any, protocol: Mapping[str, Any], score: str, evaluations: int
) -> list[str]:
    """In words, what a run does otherwise than a published protocol."""
    script = SCRIPTS[part.script]
    length = getattr(settings, script.length)
    differs = [] if score == protocol["score"] else [f"scores are not of {protocol['score']}"]
    known = any(fnmatch.fnmatchcase(part.task, pattern) for pattern in protocol["datasets"])
    if not known or "regenerated" in (part.result or {}).get("source", ""):
        differs.append(f"data are not {protocol['data']}")
    if report_runs.length(part) != protocol.get(script.per_unit or script.length):
        differs.append(f"{length:,} {script.length}")
    if evaluations != (theirs := protocol.get("evaluations", 1)):
        differs.append(f"last scores are of {evaluations} evaluations, not {theirs}")
    elif evaluations > 1 and settings.eval_every != (
        every := protocol.get("eval_every", settings.eval_every)
    ):
        differs.append(f"evaluations are {settings.eval_every:,} {script.length} apart, not {every:,}")
    if getattr(settings, "preset", presets.NONE) == presets.NONE:
        differs.append("no published settings")
        return differs
    # A schedule may be as long as the run.
    chosen = ("agent", "preset", script.task, script.length, *_SCORING)
    preset = {name: x for name, x in part.parameters.items() if name in chosen}
    if changed := report_runs.changed(part._replace(parameters=preset), part, script.length, *_SCORING):
        differs.append(f"other settings than published ({' '.join(changed)})")
    published = presets.of_settings(part.script, settings, script.task)
    return differs + [f"not here: {text}" for text in (published.missing if published else ())]
