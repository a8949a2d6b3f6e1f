"""Results of benchmarks as Markdown: where they are from, the table, what follows from it, and the files."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kernels
from experiments import studies
from rl import log

Row = Mapping[str, Any]

_HEADER = (
    *("agent", "seeds", "loop", "updates/s", "+-", "of limit", "GFLOP/s", "x peer"),
    *("compile s", "peak MB", "data MB", "retraces"),
)

_PEERS = ("d3rlpy", "torch")


def render(results: Mapping[str, Any]) -> str:
    """All of it but the single times, which are in the JSON file; benchmarks/README.md explains the columns."""
    rows, others = results["rows"], results["d3rlpy"]
    lines = [
        *source(results, _versions(results)),
        "",
        *aligned(
            [_HEADER, *(_cells(row, rows) for row in rows if "seconds_per_update" in row)], texts={0, 2}
        ),
        "",
        *(f"- {name}: {_sizes(name, results)}" for name in results["agents"]),
        *(
            f"- {row['agent']}, {row['seeds']} at once: {row['loop']} was left out, {row['left_out']}"
            for row in rows
            if "left_out" in row
        ),
        *(
            f"- {row['agent']}, {row['seeds']} at once: {row['loop']} runs {kernels.text(row['profile'])}"
            for row in rows
            if "profile" in row
        ),
    ]
    if results["device_peak_bytes"]:
        lines.append(
            f"- peak device memory of the whole run: {studies.digits(results['device_peak_bytes'] / 1e6)} MB"
        )
    if isinstance(others, str):
        lines.append(f"- {others}")
    return "\n".join(lines) + "\n"


def _versions(results: Mapping[str, Any]) -> dict[str, str]:
    """Of the peers that were timed."""
    others = results["d3rlpy"] if isinstance(results["d3rlpy"], Mapping) else {}
    return dict(others) | ({"torch": results["torch"]} if results.get("torch") else {})


def source(results: Mapping[str, Any], others: Mapping[str, str] | None = None) -> list[str]:
    """Lines that say on what, with what (``others`` are versions of peers) and by which command."""
    hardware = results["hardware"]
    versions = {name: results["versions"][name] for name in ("python", "jax", "jaxlib")} | dict(others or {})
    device = hardware["cpu"] if hardware["backend"] == "cpu" else f"{hardware['device']} ({hardware['cpu']})"
    return [
        f"{device}, {hardware['cores']} cores, {hardware['memory_gib']} GiB. "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Commit {results['commit']}.",
        "",
        f"    {results['command']}",
    ]


def place(out: str, name: str, results: Mapping[str, Any]) -> Path:
    """The JSON file of the benchmark ``name``, whose folder is made: ``out``, or if that is empty this machine's."""
    path = Path(out or f"results/benchmarks/{name}-{slug(results['hardware'])}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, results: Mapping[str, Any], text: str) -> None:
    """Writes the results to ``path``, and their table ``text`` to the .md beside it; each whole or not at all."""
    log.write_json(path, results)
    with log.replacing(path.with_suffix(".md")) as partial:
        partial.write_text(text)


def slug(hardware: Mapping[str, Any]) -> str:
    """The machine as part of a file name."""
    text = (
        f"{hardware['cpu']} {hardware['cores']} cores" if hardware["backend"] == "cpu" else hardware["device"]
    )
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    seconds = row["seconds_per_update"]
    median = statistics.median(seconds)
    peer = [other for other in rows if other["agent"] == row["agent"] and other["loop"] in _PEERS]

    def optional(name: str, unit: float) -> str:
        return studies.digits(row[name] / unit) if name in row else ""

    return [
        row["agent"],
        str(row["seeds"]),
        row["loop"],
        studies.digits(row["updates_per_second"]),
        f"{(max(seconds) - min(seconds)) / 2 / median:.0%}",
        f"{row['of_limit']:.2f}",
        optional("flops_per_update", median * 1e9),
        studies.digits(row["updates_per_second"] / peer[0]["updates_per_second"]) if peer else "",
        optional("compile_seconds", 1),
        optional("peak_bytes", 1e6),
        optional("data_bytes", 1e6),
        str(row["retraces"]),
    ]


def _sizes(name: str, results: Mapping[str, Any]) -> str:
    """An agent's sizes and work, and whether the seeds that train at once share the dataset."""
    rows = [row for row in results["rows"] if row["agent"] == name]
    if not rows:
        return "not measured yet"
    config = results["agents"][name]
    if "hidden" in config:
        layers = "layers " + "x".join(str(width) for width in config["hidden"])
    else:
        layers = ", ".join(f"{part} {width}" for part, width in config["network"].items())
    work = rows[0]["flops_per_update"] / rows[0]["seeds"] / 1e9
    text = f"{layers}, {studies.digits(work)} GFLOP per update in {rows[0]['products']:.4g} products"
    if name in results.get("tokens", {}):
        text += f"; {results['tokens'][name]} tokens"
    for row in rows:
        if "seconds_per_call" in row:
            milliseconds = 1e3 * statistics.median(row["seconds_per_call"])
            text += f"; actions for {row['environments']} at once take {studies.digits(milliseconds)} ms"
    data = {row["seeds"]: row["data_bytes"] for row in rows if row["loop"] == "scan" and "data_bytes" in row}
    if len(data) > 1:
        verdict = "one copy of the data" if len(set(data.values())) == 1 else "NOT one copy of the data"
        text += f"; {' and '.join(str(seeds) for seeds in data)} seeds read {verdict}"
    return text


def aligned(table: Sequence[Sequence[str]], texts: Collection[int] = (0,)) -> list[str]:
    """A Markdown table aligned in plain text too; the first row is the header, ``texts`` the columns of words."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if i in texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in table
    ]
    rule = "|".join(
        "-" * (width + 2) if i in texts else "-" * (width + 1) + ":" for i, width in enumerate(widths)
    )
    return [lines[0], f"|{rule}|", *lines[1:]]
