"""The documentation site's hooks in Sphinx: fences, links, references and members.

`docs.generated` writes what fences become. A link from a page to a Python module of the reference leads there. A link
to a folder becomes plain text, or leads to the published repository if `docs.notebooks.address` knows it.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import find_pending_xref_condition

from docs import generated, notebooks
from experiments import flags
from rl import agents

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?!https?:|#)([^()\s#]+)\)")
_OURS = ("rl", "experiments", "sweeps", "benchmarks", "docs")
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("source-read", _expand)
    app.add_post_transform(_Names)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _describe, priority=400)  # before Google's sections are read
    app.connect("env-check-consistency", _check)
    # `_check` knows only the agents of the pages that its own process has read.
    return {"parallel_read_safe": False}


# ---- pages -------------------------------------------------------------------------------------------------


def _expand(app: Sphinx, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".md":
        return

    def filled(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "agent":
            app.env.documented_agents = {*getattr(app.env, "documented_agents", ()), name}  # type: ignore[attr-defined]
        return generated.GENERATORS[kind](name)

    if not source[0].lstrip().startswith("# "):  # a table of a study
        source[0] = f"# {path.parent.name}\n\n{source[0]}"
    source[0] = _LINK.sub(functools.partial(_link, app.env, path), generated.FENCE.sub(filled, source[0]))


def _link(env: BuildEnvironment, page: Path, match: re.Match[str]) -> str:
    """A link to code, to a folder or to a file that is no page, as the site can follow it."""
    text, target = match.groups()
    path = (page.parent / target).resolve()
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
    if inside is None or not path.exists():
        return match[0]  # the build says that it leads nowhere
    if inside.parts[0] == "rl" and (path.suffix == ".py" or (path / "__init__.py").exists()):
        name = ".".join(inside.with_suffix("").parts)
        return f"{{py:mod}}`{text.strip('`')} <{name}>`"
    if path.suffix == ".md" and env.path2doc(str(path)) not in env.found_docs:
        return f"{{download}}`{text} <{target}>`"
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
            elif names or "refexplicit" not in node:  # a type in a signature, which no role has named
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
    lines[:] = generated.markup(lines)
