"""What studies share: checks of their flags, the files that they leave, and their command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import app

from experiments import flags
from rl import log

_REPORT = "README.md"


def names(flag: str, text: str, known: Collection[str]) -> list[str]:
    """The comma-separated names in ``text``.

    Raises:
      ValueError: one that is not among ``known``; the message names the flag and all that are.
    """
    given = text.split(",")
    if unknown := set(given) - set(known):
        raise ValueError(f"--{flag}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return given


def check_seeds(seeds: int) -> None:
    """Raises ValueError if there are too few seeds for an interval."""
    if seeds < 2:
        raise ValueError(f"--seeds={seeds}: an interval over seeds needs at least 2")


def write(folder: Path, result: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Leaves result.json and the ``lines`` of a Markdown report in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    log.write_json(folder / log.RESULT, result)
    with log.replacing(folder / _REPORT) as partial:
        partial.write_text("\n".join(lines) + "\n")


def verdicts(header: str, checks: Mapping[str, bool]) -> Iterable[str]:
    """The lines of a Markdown table of what holds; ``header`` is its first line."""
    yield header
    yield "|---|---|"
    for name, holds in checks.items():
        yield f"| {name} | {'yes' if holds else 'NO'} |"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(settings: Any, run: Callable[[Any], Any]) -> None:
    """The command line of a study: reads its flags, runs it, and prints the report in the folder ``settings.out``."""

    def command(_: list[str]) -> None:
        chosen = flags.read(settings)
        run(chosen)
        print((Path(chosen.out) / _REPORT).read_text())

    app.run(flags.reporting(command), flags_parser=flags.parser(settings))
