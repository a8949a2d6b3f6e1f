"""What the documentation site says that the code says already: generated while it is built, in no file.

Four fences in a page are replaced by Markdown:

| fence | becomes |
|---|---|
| ``{agent} iql`` | the objective of `rl.agents.iql`, from its docstring, and a table of its settings |
| ``{settings} rl.mbpo.Config`` | a table of the fields of a dataclass |
| ``{commands} experiments.papers`` | every script of a package with its docstring |
| ``{modules} rl.values`` | the reference of every public module of a package |

This needs no Sphinx: `docs.extension` has the rest of the site.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from experiments import flags
from rl.agents.optimisers import Adam
from rl.networks.layers import Architecture
from rl.replay.goals import Goals, Hindsight

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```\{(agent|settings|commands|modules)\} (\S+)\n```$", re.MULTILINE)
_SHAPE = re.compile(r"[\[(][^\[\]()`]*\*[^\[\]()`]*[\])]")
_EMPHASIS = re.compile(r"\*\w[^*]*\w\*")
# Dataclasses that many agents have as a setting: a table of their own, to which the others link.
_PAGE = "/docs/agents/index.md"
_SHARED = {
    Adam: f"{_PAGE}#settings-of-an-optimiser",
    Architecture: f"{_PAGE}#settings-of-a-network",
    Hindsight: f"{_PAGE}#settings-of-goals",
    Goals: f"{_PAGE}#settings-of-goals",
}


# ---- Markdown from code ------------------------------------------------------------------------------------


def agent(name: str) -> str:
    """The objective and the settings of an agent, as the docstring of its module and its ``Config`` have them."""
    module = importlib.import_module(f"rl.agents.{name}")
    parts = [_docstring(module)]
    if hasattr(module, "Config"):
        parts.append(settings(f"{module.__name__}.Config"))
    return "\n\n".join(parts)


def settings(path: str) -> str:
    """A table of the fields of a dataclass, ``package.module.Class``: name, default, and the comment on its line."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    comments = flags.comments(kind)
    rows = ["| setting | default | what |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        rows.append(f"| `{field.name}` | {_default(default)} | {_cell(comments.get(field.name, ''))} |")
    return "\n".join(rows)


def commands(package: str) -> str:
    """Every script of a package with its docstring, which says how it is run and what it does."""
    folder = ROOT / package.replace(".", "/")
    parts = []
    for path in sorted(folder.glob("[!_]*.py")):
        source = path.read_text()
        if "__main__" not in source:
            continue
        text = ast.get_docstring(ast.parse(source))
        if not text:
            raise ValueError(f"{path} has no docstring to be shown")
        if f"python -m {package}.{path.stem}" not in text:
            raise ValueError(f"the docstring of {path} does not say how it is run")
        parts.append(f"## {path.stem}\n\n{_rst(text, f'{package}.{path.stem}')}")
    return "\n\n".join(parts)


def modules(package: str) -> str:
    """The reference of a package's public modules; of ``rl`` itself, those that are in no package."""
    members = pkgutil.iter_modules(importlib.import_module(package).__path__, package + ".")
    shown = [
        member.name
        for member in members
        if not (package == "rl" and member.ispkg) and not member.name.rpartition(".")[2].startswith("_")
    ]
    return "\n\n".join([_reference(package), *(f"## {name}\n\n{_reference(name)}" for name in shown)])


def _reference(module: str) -> str:
    return f"```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n   :ignore-module-all:\n```"


GENERATORS = {"agent": agent, "settings": settings, "commands": commands, "modules": modules}


def _docstring(module: Any) -> str:
    return _rst(inspect.getdoc(module) or "", module.__name__)


def _rst(text: str, module: str) -> str:
    """A docstring in a Markdown page, whose references are those of its module."""
    body = "\n".join(markup(text.splitlines()))
    return f"````{{eval-rst}}\n.. py:currentmodule:: {module}\n\n{body}\n\n.. py:currentmodule:: None\n````"


def markup(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText reads it: formulas as they are typed, tables, and shapes such as [B, *S]."""
    out: list[str] = []
    row = 0  # of the current table
    literal = False  # inside of a formula
    last = ""  # the last line that is not blank
    for line in lines:
        stripped = line.strip()
        indented = line.startswith("  ")
        if not indented and stripped:
            literal = False
        elif indented and out and not out[-1].strip() and last and not last.startswith((" ", "-", "*")):
            if not literal and not last.endswith("::"):
                out += ["::", ""]
            literal = True
        if stripped.startswith("|") and stripped.endswith("|") and not literal:
            cells = [cell.strip() for cell in stripped.strip("|").split(" | ")]
            if row == 0:
                out += ["", ".. list-table::", "   :header-rows: 1", ""]
            if row != 1:  # which is the rule under the head
                out += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(cells)]
            row += 1
        else:
            if row:
                out.append("")
            row = 0
            out.append(line if literal else _escaped(line))
        last = line if stripped else last
    return out


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        different = [
            f"{field.name}={getattr(value, field.name)!r}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default and not dataclasses.is_dataclass(field.default)
        ]
        name = type(value).__name__
        label = f"[{name}]({_SHARED[type(value)]})" if type(value) in _SHARED else f"`{name}`"
        return f"{label} with `{', '.join(different)}`" if different else label
    text = ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _escaped(line: str) -> str:
    """The line with stars of shapes and bars of absolute values as they are typed."""
    parts = line.split("``")
    parts[::2] = [_SHAPE.sub(_starred, part.replace("|", "\\|")) for part in parts[::2]]
    return "``".join(parts)


def _starred(shape: re.Match[str]) -> str:
    return shape[0] if _EMPHASIS.search(shape[0]) else shape[0].replace("*", "\\*")
