"""What studies share: variants that are trained once, tables, claims, and the files that a study leaves.

A study is a command that trains variants, each for several seeds, and says what came out. Every variant that is
finished is stored at once, under a digest of the code that it runs and of its settings: the same command started again
trains only what is missing. All that a study claims is a function of result.json, so that a stored result can be read
and judged again.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from absl import app
from numpy.typing import ArrayLike

from experiments import flags, source_code
from rl import locks, log, statistics
from rl.train import interruptible

REPORT = "README.md"
_ROOT = Path(__file__).parents[1]
_PUBLISHED = Path(__file__).parent / "papers" / "published"
Cell = TypeVar("Cell", bound=tuple[Any, ...])
Source = TypeVar("Source")
# Settings that say where things lie, or what is trained again, and decide no number.
_PLACES = {"out", "runs", "workdir", "overwrite", "stored", "data", "data_folder", "door", "cache"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about every study; with a field ``workdir``, that is where what is finished lies."""

    out: str = ""  # where result.json, the figures and the report land
    overwrite: bool = False  # train again what is finished


@dataclasses.dataclass(frozen=True)
class RowSettings(Settings):
    """What can be chosen about a study of `train_rows`."""

    stored: str = ""  # folders of this study's results, comma-separated: their rows are not trained again


# ---- variants ---------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What a variant is given to be trained."""

    folder: Path  # its own, for checkpoints and logs; not made yet. Other code or other settings have another
    progress: Callable[[int], Any]  # may be told of steps that are done, by their number


class Variant(NamedTuple):
    """One thing that a study trains."""

    # A function of its module, or a `functools.partial` of one, that returns what JSON can hold.
    train: Callable[[Work], Any]
    settings: Mapping[str, Any]  # all that the outcome depends on beside the code
    steps: int = 1  # of the progress bar


class Finished(NamedTuple):
    """What became of all variants."""

    outcomes: dict[str, Any]  # as JSON gives it back, numbers in lists as arrays
    seconds: float  # of training, also in earlier calls
    # {name: provenance} of those that were trained by another command, code, machine or versions than now
    others: dict[str, dict[str, Any]]


def train(
    settings: Any, variants: Mapping[str, Variant], title: str, each: Callable[[], Any] = lambda: None
) -> Finished:
    """Trains the variants that are not finished, one after another, each stored as soon as it is.

    A variant is finished if the study's folder of variants holds its outcome under its `digest`. A process that is
    killed loses the variant that it was training, and nothing else. Several processes share the variants that they
    have in common, and each returns when all of its own are finished.

    Args:
      settings: of the study. Their ``workdir``, or else the folder variants in their ``out``, is for one file per
        variant, and their own folders; with ``overwrite``, what is finished of these variants is forgotten.
      variants: {name: what to train}.
      title: of the progress bar.
      each: called after every variant that was trained.

    Raises:
      ValueError: ``overwrite`` while another process trains one of the variants.
    """
    digests = {name: digest(name, variant) for name, variant in variants.items()}
    files = _files(settings, digests)
    works = {name: file.with_suffix("") for name, file in files.items()}
    if settings.overwrite:
        for name, file in files.items():
            if locks.holder(file.parent, _lock(file)):
                raise ValueError(
                    f"--overwrite: another process trains {name}; stop it, or leave the flag out to share its runs"
                )
        for name, work in works.items():
            files[name].unlink(missing_ok=True)
            _clock(work).unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    finished = recall(settings, variants).outcomes
    total, done = (sum(variants[name].steps for name in which) for which in (variants, finished))
    missing = {name: file for name, file in files.items() if name not in finished}
    with log.progress(total, title, initial=done) as bar, contextlib.closing(_claimed(missing)) as claimed:
        for name in claimed:
            bar.set_postfix_str(name)
            now = recall(settings, {name: variants[name]}).outcomes
            if name not in now:  # it is if another process trained it
                with _timed(_clock(works[name])) as seconds:
                    outcome = variants[name].train(Work(works[name], bar.update))
                record = {"digest": digests[name], "seconds": seconds[0], **log.provenance()}
                log.write_json(files[name], {**record, "outcome": outcome})
                each()
            done += variants[name].steps
            bar.update(done - bar.n)  # the steps that the variant did not tell
    return recall(settings, variants)


def _claimed(files: Mapping[str, Path]) -> Generator[str]:
    """The names of the files, each held for this process until the next; those that another holds, once it lets go."""
    left = list(files)
    while left:
        held = []
        for name in left:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(locks.alone(files[name].parent, _lock(files[name])))
                except locks.InUse:
                    held.append(name)
                    continue
                yield name
        if held == left:
            time.sleep(1.0)
        left = held


def _lock(file: Path) -> str:
    """The name of what the process that trains a variant locks, beside its file."""
    return f".{file.stem}.lock"


def _clock(work: Path) -> Path:
    """Where the seconds of an unfinished variant are kept, beside its folder."""
    return work.with_name(f"{work.name}.seconds.json")


@contextlib.contextmanager
def _timed(file: Path) -> Iterator[list[float]]:
    """Seconds of the block, with those of earlier ones that failed or were stopped, which ``file`` remembers."""
    began, seconds = time.time(), [log.read_json(file)["seconds"] if file.exists() else 0.0]
    try:
        yield seconds
    except BaseException:
        log.write_json(file, {"seconds": seconds[0] + time.time() - began})
        raise
    seconds[0] += time.time() - began
    file.unlink(missing_ok=True)


class Stored(NamedTuple):
    """What was trained before by other commands of a study, perhaps elsewhere."""

    # {what tells a row from others: the row, with its provenance}
    rows: dict[tuple[Any, ...], dict[str, Any]]
    results: list[dict[str, Any]]  # that they are from


def stored(
    settings: Any, names: Sequence[str], words: Collection[str] = (), choosing: Collection[str] = ()
) -> Stored:
    """The rows of the results in the folders that ``settings.stored`` lists; of several that are alike the last.

    Args:
      settings: of the study, a `RowSettings`.
      names: of what tells a row from others.
      words: settings that are text and choose no rows.
      choosing: settings that are numbers and do, such as how many seeds there are where each has a row.

    Raises:
      ValueError: as in `stored_results`.
    """
    results = stored_results(settings, words, choosing)
    rows = {}
    for result in results:
        for row in result["rows"]:
            rows[tuple(row[name] for name in names)] = {
                "provenance": provenance(result, row.get("name", "")),
                **row,
            }
    return Stored(rows, results)


def stored_results(
    settings: Any, words: Collection[str] = (), choosing: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The results in the folders that ``settings.stored`` lists.

    Args:
      settings: of the study, a `RowSettings`.
      words: settings that are text and do not choose what is trained.
      choosing: settings that are numbers and do.

    Raises:
      ValueError: a folder without a result, or one whose numbers were other settings of this study.
    """
    folders = [Path(folder) for folder in settings.stored.split(",") if folder]
    if missing := [str(folder) for folder in folders if not (folder / log.RESULT).is_file()]:
        raise ValueError(f"--stored: there is no {log.RESULT} in {', '.join(missing)}")
    results = [load(folder / log.RESULT) for folder in folders]
    for folder, result in zip(folders, results, strict=True):
        before = {name: value for name, value in result["settings"].items() if name not in choosing}
        _check_comparable(settings, folder, before, words)
    return results


def provenance(result: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """What made a result, or the outcome of this ``name`` in it, which `named` tells."""
    for row in (*result.get("rows", ()), *result.get("others", ())):
        if name and row["name"] == name and "provenance" in row:
            return dict(row["provenance"])
    return {field: result[field] for field in ("command", "commit", "versions", "hardware")}


def named(names: Iterable[str], taken: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a result that is no table: the names of its outcomes, with what made those that were ``taken``."""
    return [{"name": name, **_made(taken.get(name))} for name in names]


def _made(provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a row says of its provenance, if that is not the result's."""
    return {} if provenance is None else {"provenance": provenance}


def _check_comparable(
    settings: Any, folder: Path, earlier: Mapping[str, Any], words: Collection[str]
) -> None:
    """Raises ValueError if a number among the settings was another one; text chooses rows, but for ``words``.

    A setting whose name begins with that of a part, ``hopper_steps`` say, counts only where that part was run.
    """
    plain = lambda value: tuple(value) if isinstance(value, list | np.ndarray) else value
    absent = set(getattr(settings, "parts", "").split(",")) - set(earlier.get("parts", "").split(","))
    for name, value in dataclasses.asdict(settings).items():
        before = plain(earlier.get(name, value))
        counts = (
            (not isinstance(value, str) or name in words)
            and name != "overwrite"
            and name.partition("_")[0] not in absent
        )
        if counts and before != plain(value):
            raise ValueError(
                f"--stored: {folder} was made with --{name}={before}, and this command has {value}, so that their rows "
                "do not compare; give it the same, or leave that folder out"
            )


def data_digests(digests: Mapping[str, str], earlier: Stored) -> dict[str, list[str]]:
    """{data: all digests of what rows were trained on}, for a result of `train_rows`.

    Args:
      digests: {data: digest} of what rows are trained on here.
      earlier: rows that other commands trained.
    """
    known = {name: {digest} for name, digest in digests.items()}
    for result in earlier.results:
        for name, several in result.get("data_digests", {}).items():
            known.setdefault(name, set()).update(several)
    return {name: sorted(several) for name, several in known.items()}


def other_data(result: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on data of which rows of a result were trained on several versions, by its `data_digests`."""
    if several := [name for name, digests in result.get("data_digests", {}).items() if len(digests) > 1]:
        yield (
            f"Rows of {', '.join(several)} were trained on data that were made again on another machine, by the same "
            "policies and seed but not to the same bits."
        )


def train_rows(
    settings: Any,
    variants: Mapping[str, Variant],
    rows: Iterable[tuple[Mapping[str, Any], str]],
    report: Callable[[Mapping[str, Any]], Iterable[str]],
    claims: Callable[[Mapping[str, Any]], Iterable[Claim]],
    earlier: Stored,
    steps: str = "seconds of one core",
    **parts: Any,
) -> dict[str, Any]:
    """Trains the variants, and after each writes a result with the rows that are finished; returns the last one.

    Args:
      settings: of the study.
      variants: {name: what to train}, whose outcomes are dicts.
      rows: what tells each row from others, and the name of its variant. Several rows may share one.
      report: as `finish` takes it, of ``rows``, ``wall_seconds`` and ``parts``.
      claims: likewise.
      earlier: rows that are taken as they are; they need no variant.
      steps: what the variants' steps are.
      parts: what else the result holds.
    """
    planned = [(tuple(row.values()), row, name) for row, name in rows]
    # Results into which one training was divided have the same time to the last bit: it counts once.
    before = sum({result["wall_seconds"] for result in earlier.results})

    def write() -> dict[str, Any]:
        finished = recall(settings, variants)
        done = {
            key: earlier.rows.get(key)
            or {**row, **finished.outcomes[name], **_made(finished.others.get(name))}
            for key, row, name in planned
            if key in earlier.rows or name in finished.outcomes
        }
        outcome = {
            "wall_seconds": before + finished.seconds,
            **parts,
            "rows": list(done.values()),
            "unfinished": [", ".join(map(str, key)) for key, *_ in planned if key not in done],
        }
        return finish(settings, outcome, report, claims)

    train(settings, variants, steps, write)
    return write()


def train_cells(
    settings: Any,
    names: Sequence[str],
    cells: Mapping[Cell, str],
    source: Callable[[str], Source],
    variant: Callable[[Cell, Source], Variant],
    report: Callable[[Mapping[str, Any]], Iterable[str]],
    claims: Callable[[Mapping[str, Any]], Iterable[Claim]],
    draw: Callable[[Path, Mapping[str, Any]], None],
    *,
    data: str = "dataset",
    parts: Callable[[dict[str, Source], Stored], Mapping[str, Any]],
) -> dict[str, Any]:
    """Makes the data of cells that are not stored, trains these as `train_rows` does, and draws; returns the result.

    Args:
      settings: of the study, a `RowSettings`.
      names: of the columns that tell a cell from others.
      cells: {values of these columns: name of the variant}. Several cells may share one.
      source: name of data -> where they lie, made where they are missing.
      variant: (cell, its source) -> what is trained for it.
      report: as `train_rows` takes it.
      claims: likewise.
      draw: (folder, result) -> draws its figures there.
      data: the column that names the data.
      parts: ({data: source} of the cells that are not stored, the stored rows) -> what else the result holds.
    """
    earlier = stored(settings, names)
    data_of = {cell: cell[names.index(data)] for cell in cells if cell not in earlier.rows}
    sources = {name: source(name) for name in dict.fromkeys(data_of.values())}
    variants = {cells[cell]: variant(cell, sources[name]) for cell, name in data_of.items()}
    rows = [(dict(zip(names, cell, strict=True)), name) for cell, name in cells.items()]
    result = train_rows(settings, variants, rows, report, claims, earlier, **parts(sources, earlier))
    draw(Path(settings.out), result)
    return result


def undiverged(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result without the rows of runs that diverged: nothing is compared with these, or claimed of them.

    All seeds of a run share a program. Where one diverges all stop, and none has a score at the end.
    """
    return {**result, "rows": [row for row in result["rows"] if not row.get("diverged")]}


def about_diverged(result: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on runs that diverged, if there are any."""
    if any(row.get("diverged") for row in result["rows"]):
        yield (
            "*Diverged*: one of a run's seeds did, and the others, which share its program, stopped with it. Such a "
            "run has no score and enters no claim; in figures its last scores go on to the end."
        )


def origin(result: Mapping[str, Any]) -> str:
    """What made a result of `train_rows`, what of it was made by other commands, and what is not yet, in sentences."""
    cores, hours = result["hardware"]["cores"], result["wall_seconds"] / 3600
    text = f"`{result['command']}`, {cores} core{'s' * (cores > 1)}, {hours:.1f} hours of training."
    text = " ".join([text, *origins(result["rows"], versions=result.get("versions"))])
    if unfinished := result.get("unfinished"):
        planned = len(unfinished) + len(result["rows"])
        text += f" **Not finished**: {len(unfinished)} of {planned} rows, listed at the end (the same command goes on)."
    return text


def origins(
    rows: Sequence[Mapping[str, Any]], what: str = "rows", versions: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A sentence on each other command that made some of the rows.

    Args:
      rows: of a result.
      what: they are.
      versions: of the result, if the others' that differ are to be named.
    """
    makers = [_maker(row["provenance"], versions or {}) for row in rows if "provenance" in row]
    for command, where in dict.fromkeys(makers):
        yield f"{makers.count((command, where))} of {len(rows)} {what} are of `{command}` ({where})."


def _maker(provenance: Mapping[str, Any], versions: Mapping[str, str]) -> tuple[str, str]:
    """The command of a provenance; its commit, its processor and what has another version there, in words."""
    commit = short(provenance["commit"]) if provenance["commit"] else "no checkout"
    hardware = provenance["hardware"]
    cores = f"{hardware['cores']} core{'s' * (hardware['cores'] > 1)}"
    other = [
        f"{name} {version} for {versions[name]}"
        for name, version in provenance.get("versions", {}).items()
        if versions.get(name, version) != version
    ]
    return provenance["command"], ", ".join([commit, hardware["cpu"], cores, *other])


def _brief(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A provenance with what `_maker` says of the machine alone: not its memory, say, or its kernel."""
    of_machine = {name: provenance.get("hardware", {}).get(name) for name in ("cpu", "cores")}
    return {**provenance, "hardware": of_machine}


def recall(settings: Any, variants: Mapping[str, Variant]) -> Finished:
    """What is finished of the variants, as they are now, in their order."""
    outcomes, seconds, others = {}, 0.0, {}
    now = log.provenance()
    digests = {name: digest(name, variant) for name, variant in variants.items()}
    for name, path in _files(settings, digests).items():
        record = load(path) if path.exists() else {}
        if record.get("digest") == digests[name]:
            outcomes[name] = record["outcome"]
            seconds += record["seconds"]
            then = {field: record.get(field) for field in now}
            if _brief(then) != _brief(now):
                others[name] = then
    return Finished(outcomes, seconds, others)


def _files(settings: Any, digests: Mapping[str, str]) -> dict[str, Path]:
    """{name: the file of its outcome}, which is another one for other settings or other code."""
    folder = Path(settings.workdir) if hasattr(settings, "workdir") else Path(settings.out) / "variants"
    plain = {name: name.replace("/", "-").replace(".", "_") for name in digests}
    return {name: folder / f"{plain[name]}.{digest[:12]}.json" for name, digest in digests.items()}


def chosen(settings: Any, *without: str) -> dict[str, Any]:
    """The settings of a study that its variants depend on: all but ``without`` and where things are stored."""
    places = {"out", "workdir", "overwrite", "parts", "stored", *without}
    return {name: x for name, x in dataclasses.asdict(settings).items() if name not in places}


def digest(name: str, variant: Variant) -> str:
    """A digest of a variant's settings and of the code of this project that it runs, without docstrings and comments.

    The code is what its function, and functions that are given to it by a `functools.partial`, need of their own
    module, and of all modules that this imports the whole. Of the study's report and figures, which need the outcome
    and not the other way round, nothing is in it.
    """
    function: Any = variant.train
    functions: list[Any] = []
    while isinstance(function, functools.partial):
        arguments = (*function.args, *function.keywords.values())
        functions += [argument for argument in arguments if isinstance(argument, types.FunctionType)]
        function = function.func
    code = {}
    for one in (function, *functions):
        module = one.__module__
        if module == "__main__":
            module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
        code[f"{module}.{one.__qualname__}"] = source_code.needed(module, one.__qualname__.partition(".")[0])
    settings = json.loads(json.dumps(dict(variant.settings), default=str, sort_keys=True))
    return hashlib.sha256(json.dumps([name, settings, code], sort_keys=True).encode()).hexdigest()


def load(path: str | Path) -> dict[str, Any]:
    """A JSON file of `rl.log`: lists of numbers are arrays, and NaN and infinities numbers again."""
    return _arrays(log.read_json(Path(path)))


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _arrays(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    items = [_arrays(item) for item in value]
    numeric = all(isinstance(item, bool | int | float | np.ndarray) for item in items)
    if items and numeric and len({np.shape(item) for item in items}) == 1:
        return np.array(items)
    return items


# ---- claims -----------------------------------------------------------------------------------------------

# What was measured, one number per seed -> whether the claim holds (None: not decided), and the numbers in words.
Predicate = Callable[[np.ndarray], tuple[bool | None, str]]

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided by these intervals"
OURS = "ours; nothing is published"  # of a claim that no paper makes


class Claim(NamedTuple):
    """A sentence that is true or not of what was measured."""

    claim: str
    published: str  # the sentence or number that it repeats, and where that stands; or whose prediction it is
    values: ArrayLike  # what was measured, one number per seed
    predicate: Predicate


def every(test: Callable[[np.ndarray], np.ndarray]) -> Predicate:
    """In every seed, and not on average."""
    return lambda values: (bool(test(values).all()), extremes(values))


def mean_within(low: float = -np.inf, high: float = np.inf) -> Predicate:
    """The mean lies between two bounds: its 95 % interval over seeds does; undecided where a bound is in that.

    Undecided, too, where a seed has no finite number, such as a ratio to 0, and where all seeds have the same: their
    spread was not seen then, and an interval without width is none.
    """

    def predicate(values: np.ndarray) -> tuple[bool | None, str]:
        if not np.isfinite(values).all():
            return None, extremes(values)
        least, most = statistics.interval(values)
        width = most > least
        inside, outside = width and low < least and most < high, width and (most < low or least > high)
        mean, *bounds = (digits(round(x, 12) + 0.0) for x in band(values))
        return True if inside else False if outside else None, f"{mean} [{', '.join(bounds)}]"

    return predicate


positive = mean_within(low=0.0)


def judged(claims: Iterable[Claim]) -> list[dict[str, str]]:
    """The verdicts on claims, for result.json."""
    rows = []
    for claim in claims:
        holds, here = claim.predicate(np.asarray(claim.values, float))
        verdict = OPEN if holds is None else HOLDS if holds else FAILS
        rows.append({"claim": claim.claim, "published": claim.published, "here": here, "verdict": verdict})
    return rows


def claims_table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Judged claims as blocks of Markdown; nothing if there are none."""
    if rows:
        names = ("claim", "published", "here", "verdict")
        yield "## Claims"
        yield table(names, ([row[name] for name in names] for row in rows))


def published(name: str) -> dict[str, Any]:
    """The numbers that others reported, from ``papers/published/NAME.yaml``.

    Raises:
      ValueError: the file does not say where they come from.
    """
    path = _PUBLISHED / f"{name}.yaml"
    entry = yaml.safe_load(path.read_text())
    if not entry.get("source"):
        raise ValueError(f"{path} has no entry 'source' that says where its numbers were published")
    return entry


# ---- tables -----------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def band(scores: Any, *, rate: bool = False) -> tuple[float, float, float]:
    """Mean and 95 % interval, of one score per seed or of what `statistics.summary` says of them, to be drawn."""
    summary = scores if isinstance(scores, Mapping) else statistics.summary(scores, rate=rate)
    low, high = summary["ci95"]
    return float(summary["mean"]), float(low), float(high)


def bands(scores: Iterable[Any]) -> np.ndarray:
    """Means, lower and upper bounds [3, n] of ``n`` results, to be drawn as a line."""
    return np.transpose([band(one) for one in scores])


def between(scores: Any, style: str = ".2f", *, rate: bool = False) -> str:
    """Mean and 95 % interval in brackets; what is left of a sum of opposites is 0."""
    mean, low, high = (format(round(x, 12) + 0.0, style) for x in band(scores, rate=rate))
    return f"{mean} [{low}, {high}]"


def plus_minus(scores: Any, style: str = ".3f") -> str:
    """Mean and half the width of Student's 95 % interval; the mean alone where there is none."""
    mean, low, high = band(scores)
    return format(mean, style) + ("" if np.isnan(low) else f" ± {(high - low) / 2:{style}}")


def stacked(rows: Sequence[Any]) -> Any:
    """Nested dicts of one number or array per seed as one of arrays [S, ...], in the order that they have."""
    if isinstance(rows[0], Mapping):
        return {name: stacked([row[name] for row in rows]) for name in rows[0]}
    return np.array(rows)


def difference(summary: Mapping[str, Any], style: str) -> str:
    """Mean and interval of a difference with their signs, bold where the interval leaves out 0."""
    low, high = summary["ci95"]
    text = between(summary, f"+{style}")
    return text if low <= 0 <= high else f"**{text}**"


def extremes(values: ArrayLike) -> str:
    """Mean, and the smallest and largest in brackets."""
    x = np.asarray(values, float)
    return f"{digits(x.mean())} [{digits(x.min())}, {digits(x.max())}]"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ---- settings and files -----------------------------------------------------------------------------------


def names(flag: str, text: str, known: Collection[str], separator: str = ",") -> list[str]:
    """The names in ``text``, which ``separator`` separates.

    Raises:
      ValueError: one that is not among ``known``; the message names the flag and all that are.
    """
    selection = text.split(separator)
    if unknown := set(selection) - set(known):
        listed = f"{separator} ".join(known)
        raise ValueError(f"--{flag}: {', '.join(sorted(unknown))} is none of {listed}")
    return selection


def check_seeds(seeds: int, flag: str = "seeds") -> None:
    """Raises ValueError, naming the flag, if there are too few seeds for an interval."""
    if seeds < 2:
        raise ValueError(f"--{flag}={seeds}: an interval over seeds needs at least 2")


def finish(
    settings: Any,
    outcome: Mapping[str, Any],
    report: Callable[[Mapping[str, Any]], Iterable[str]],
    claims: Callable[[Mapping[str, Any]], Iterable[Claim]] = lambda result: (),
    name: str = REPORT,
    trained: Finished | None = None,
) -> dict[str, Any]:
    """Leaves result.json and the report in ``settings.out``; returns what result.json holds.

    Args:
      settings: of the study, with a field ``out``.
      outcome: what came out.
      report: the blocks of Markdown on a result: headings, paragraphs and tables. The claims follow them, what other
        commands trained, and rows that are not finished.
      claims: what is claimed of a result.
      name: of the report.
      trained: what the outcome is of, where its rows do not say what made them: the result then does.

    Raises:
      ValueError: a study with other settings has left its result there meanwhile.
    """
    if isinstance(settings, Settings):
        check_kept(settings, settings)
    result = {**log.provenance(), "settings": dataclasses.asdict(settings), **outcome}
    if trained and trained.others:
        result["others"] = named(trained.outcomes, trained.others)
    result["claims"] = judged(claims(result))
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    log.write_json(folder / log.RESULT, result)
    blocks = [*report(result), *claims_table(result["claims"])]
    if "others" in result:
        blocks.append(" ".join(origins(result["others"], "trained variants", result["versions"])))
    if unfinished := result.get("unfinished"):
        blocks += ["## Not finished", "\n".join(f"- {row}" for row in unfinished)]
    write_blocks(folder / name, blocks)
    return result


def check_kept(settings: Any, usual: Any) -> None:
    """Raises ValueError if ``settings.out`` holds a result of other settings, which that of this command would replace.

    Lists of names, such as parts, may have grown: the new result then has all that the old one had.

    Args:
      settings: of the study.
      usual: its default settings, which an older result had of what could not be chosen then.
    """
    path = Path(settings.out) / log.RESULT
    if getattr(settings, "overwrite", False) or not path.exists():
        return
    earlier = log.read_json(path).get("settings")
    if not isinstance(earlier, dict):
        raise ValueError(
            f"{path} is not a result of this study: give another --out, such as runs/papers/NAME"
        )
    now, default = (json.loads(json.dumps(dataclasses.asdict(x), default=str)) for x in (settings, usual))
    before = {name: earlier.get(name, default[name]) for name in now if name not in _PLACES}
    if changed := [
        f"--{name}={x} there, {now[name]} here" for name, x in before.items() if not _covers(now[name], x)
    ]:
        has = {field.name for field in dataclasses.fields(settings)}
        place = "out" if "out" in has else "runs"
        replace = ", or --overwrite to replace it, which also trains again what is finished" * (
            "overwrite" in has
        )
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(changed)}) and would be lost: give another --{place}, "
            f"such as --{place}=runs/papers/NAME{replace}"
        )


def _covers(now: Any, before: Any) -> bool:
    """Whether a setting is as it was, or a list of names that has all that it had."""
    if not (isinstance(now, str) and isinstance(before, str)):
        return bool(now == before)
    separator = ";" if ";" in now else ","
    return set(before.split(separator)) <= set(now.split(separator))


def short(commit: str | None) -> str:
    """A commit in twelve letters, and whether files differed from it."""
    return f"{str(commit)[:12]}{'-dirty' * str(commit).endswith('-dirty')}"


def program(result: Mapping[str, Any], file: str) -> str:
    """A link from the report of ``result`` to the source ``file`` of its study."""
    folder = _ROOT / result["settings"]["out"]
    return f"[The program]({os.path.relpath(file, folder)})"


def write_blocks(path: Path, blocks: Iterable[str]) -> None:
    """Writes blocks of Markdown, whole or not at all."""
    with log.replacing(path) as partial:
        partial.write_text("\n\n".join(blocks) + "\n")


def main(settings: Any, run: Callable[[Any], Any], name: str = REPORT) -> None:
    """The command line of a study: reads its flags, runs it, and prints the report in the folder ``settings.out``.

    A result of other settings there is kept (`check_kept`): nothing is trained then.
    """

    def command(_: list[str]) -> None:
        run_settings = flags.read(settings)
        check_kept(run_settings, settings)
        with interruptible():  # so that the time of what was begun counts
            run(run_settings)
        print((Path(run_settings.out) / name).read_text())
        print(f"Everything is in {run_settings.out}; look at {name} first.")

    app.run(flags.reporting(command), flags_parser=flags.parser(settings))


def listing() -> Iterator[str]:
    """The commands that are studies, one line for each: how it is called, and the first sentence of what it says."""
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.glob("papers/*.py")]):
        text = path.read_text()
        if path.stem != "studies" and "\n    studies.main(" in text:
            module = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
            yield f"  python -m {module:42s} {about}"


if __name__ == "__main__":
    print(
        "experiments.studies is what studies share, and no command itself. Each of these has a --help of its own:\n"
    )
    print("\n".join(listing()))
