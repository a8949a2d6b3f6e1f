"""What the documentation site says that the code says already: generated while it is built, in no file.

Four fences in a page are replaced by Markdown:

| fence | becomes |
|---|---|
| ``{agent} iql`` | the objective of `rl.agents.iql`, from its docstring, and a table of its settings |
| ``{settings} rl.mbpo.Config`` | a table of the fields of a dataclass |
| ``{commands} experiments.papers`` | every script of a package with its docstring |
| ``{modules} rl.values`` | the reference of every public module of a package |

Links from a page to a Python module of the reference lead there; links to folders become plain text, or lead to the
published repository if `docs.notebooks.address` knows it.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import find_pending_xref_condition

from docs import notebooks
from experiments import flags
from rl import agents
from rl.agents.optimisers import Adam
from rl.networks.layers import Architecture
from rl.replay.goals import Goals, Hindsight

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^```\{(agent|settings|commands|modules)\} (\S+)\n```$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?!https?:|#)([^()\s#]+)\)")
_SHAPE = re.compile(r"(?<!`)\[[^\[\]`]*\*[^\[\]`]*\](?!`)")
# Dataclasses that many agents have as a setting: a table of their own, to which the others link.
_PAGE = "/docs/agents/index.md"
_SHARED = {
    Adam: f"{_PAGE}#settings-of-an-optimiser",
    Architecture: f"{_PAGE}#settings-of-a-network",
    Hindsight: f"{_PAGE}#settings-of-goals",
    Goals: f"{_PAGE}#settings-of-goals",
}
_OURS = ("rl", "experiments", "sweeps", "benchmarks", "docs")
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("source-read", _expand)
    app.add_post_transform(_Names)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _describe, priority=400)  # before Google's sections are read
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True}


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
    said = flags.comments(kind)
    rows = ["| setting | default | what |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        rows.append(f"| `{field.name}` | {_default(default)} | {_cell(said.get(field.name, ''))} |")
    return "\n".join(rows)


def commands(package: str) -> str:
    """Every script of a package: its command, and what its docstring says of it."""
    folder = ROOT / package.replace(".", "/")
    parts = []
    for path in sorted(folder.glob("[!_]*.py")):
        source = path.read_text()
        if "__main__" not in source:
            continue
        text = ast.get_docstring(ast.parse(source))
        if not text:
            raise ValueError(f"{path} has no docstring to be shown")
        command = f"```sh\npython -m {package}.{path.stem}\n```"
        parts.append(f"## {path.stem}\n\n{command}\n\n{_rst(text, f'{package}.{path.stem}')}")
    return "\n\n".join(parts)


def modules(package: str) -> str:
    """The reference of a package's public modules; of ``rl`` itself, those that are in no package."""
    members = pkgutil.iter_modules(importlib.import_module(package).__path__, package + ".")
    names = [package, *(member.name for member in members if not (package == "rl" and member.ispkg))]
    return "\n\n".join(
        f"## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```"
        for name in names
        if not name.rpartition(".")[2].startswith("_")
    )


_GENERATORS = {"agent": agent, "settings": settings, "commands": commands, "modules": modules}


def _docstring(module: Any) -> str:
    return _rst(inspect.getdoc(module) or "", module.__name__)


def _rst(text: str, module: str) -> str:
    """A docstring in a Markdown page, whose references are those of its module."""
    body = "\n".join(_markup(text.splitlines()))
    return f"````{{eval-rst}}\n.. py:currentmodule:: {module}\n\n{body}\n\n.. py:currentmodule:: None\n````"


def _markup(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText reads it: formulas as they are typed, tables, and shapes such as [B, *S]."""
    out: list[str] = []
    row = 0  # of the current table
    literal = False  # inside of a formula
    last = ""  # the last line that is not blank
    for line in lines:
        stripped = line.strip()
        indented = line.startswith("    ")
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
            out.append(line if literal else _SHAPE.sub(lambda shape: shape[0].replace("*", "\\*"), line))
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


# ---- pages -------------------------------------------------------------------------------------------------


def _expand(app: Sphinx, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".md":
        return

    def generated(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "agent":
            app.env.documented_agents = {*getattr(app.env, "documented_agents", ()), name}  # type: ignore[attr-defined]
        return _GENERATORS[kind](name)

    if not source[0].lstrip().startswith("# "):  # a table of a study
        source[0] = f"# {path.parent.name}\n\n{source[0]}"
    source[0] = _LINK.sub(functools.partial(_link, path), _FENCE.sub(generated, source[0]))


def _link(page: Path, match: re.Match[str]) -> str:
    """A link to code or to a folder, as the site can follow it."""
    text, target = match.groups()
    path = (page.parent / target).resolve()
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
    if inside is None or not path.exists():
        return match[0]  # the build says that it leads nowhere
    if inside.parts[0] == "rl" and (path.suffix == ".py" or (path / "__init__.py").exists()):
        name = ".".join(inside.with_suffix("").parts)
        return f"{{py:mod}}`{text.strip('`')} <{name}>`"
    if path.is_dir():
        return f"[{text}]({notebooks.address()}/tree/main/{inside})" if notebooks.address() else text
    return match[0]


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    """An agent that no page describes is an error."""
    for name in sorted(agents.AGENTS.keys() - getattr(env, "documented_agents", set())):
        _log.warning("no page describes the agent %r: give it a section with ```{agent} %s", name, name)


# ---- references and members --------------------------------------------------------------------------------


class _Names(SphinxPostTransform):
    """Names in docstrings and signatures, looked up as Python would look them up there.

    `heads.make` leads to `rl.values.heads.make` where ``heads`` is imported. What exists in another library or in a
    script has no page to lead to, and becomes plain text. What does not exist stays, and the build says so.
    """

    default_priority = 5  # before Sphinx's own, which searches all names for each

    def run(self, **options: Any) -> None:
        objects = self.env.domains.python_domain.objects
        for node in list(self.document.findall(pending_xref)):
            if node.get("refdomain") != "py":
                continue
            names = _lookup(node.get("py:module"), node.get("py:class"), node["reftarget"])
            known = next((name for name in names if name in objects), None)
            if known is not None:
                node["reftarget"] = known
                node["refspecific"] = False
                node["reftype"] = "obj"
            elif names:
                node.replace_self((find_pending_xref_condition(node, "resolved") or node).children)


@functools.cache
def _lookup(module: str | None, kind: str | None, target: str) -> tuple[str, ...]:
    """Full names of what ``target`` means in a class or module, or as it stands; none if it means nothing."""
    parts = target.split(".")
    if module:
        scope = importlib.import_module(module)
        if kind:
            parts_of_kind = [*kind.split("."), *parts]
            if _has(scope, parts_of_kind):
                return (f"{module}.{kind}.{target}",)
        if _has(scope, parts):
            value = _get(scope, parts)
            if inspect.ismodule(value):
                return (value.__name__,)
            home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
            return (f"{module}.{target}", home, _through_class(scope, parts))
    if hasattr(builtins, target) or (
        parts[1:] and parts[0] not in _OURS and importlib.util.find_spec(parts[0])
    ):
        return (target,)
    for count in range(len(parts), 0, -1):
        try:
            scope = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return (target,) if _has(scope, parts[count:]) else ()
    return ()


def _get(scope: Any, parts: list[str]) -> Any:
    """The attribute; None for a field of a class that has no default, which is no attribute."""
    *path, last = parts or [""]
    owner = functools.reduce(getattr, path, scope)
    return scope if not parts else getattr(owner, last, None)


def _has(scope: Any, parts: list[str]) -> bool:
    if not parts:
        return True
    first, *rest = parts
    if not hasattr(scope, first):
        return not rest and first in getattr(scope, "__annotations__", {})
    return _has(getattr(scope, first), rest)


def _through_class(scope: Any, parts: list[str]) -> str:
    """`checkpoint.Store.latest` by where ``Store`` is defined."""
    *path, last = parts
    owner = functools.reduce(getattr, path, scope)
    place = (
        f"{owner.__module__}.{owner.__qualname__}"
        if inspect.isclass(owner)
        else getattr(owner, "__name__", "")
    )
    return f"{place}.{last}"


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Fields of named tuples have no docstrings but Python's: they are listed with their class."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _describe(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Adds the fields of a named tuple or dataclass with the comments on their lines; all as reStructuredText."""
    if inspect.isclass(obj) and (hasattr(obj, "_fields") or dataclasses.is_dataclass(obj)):
        for field, comment in flags.comments(obj).items():
            lines += ["", f":ivar {field}: {comment}"]
    lines[:] = _markup(lines)
