"""The code of this project that a function runs, as syntax trees without docstrings and comments.

A study stores what it trained under a digest of it (`experiments.studies.digest`), and trains again what other code
would train.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_MODULE = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)+")
# They parse flags, print, store and draw, and cannot change what is trained.
_REPORTING = ("experiments.flags", "experiments.notes", "experiments.studies", "rl.plot")


@functools.cache  # as the code was when it was first asked for: a file that is edited meanwhile is not what runs
def needed(module: str, name: str) -> dict[str, str]:
    """{module: its code} of all that ``name`` in ``module`` runs."""
    statements, imported = _needed(_parsed(module), name)
    code = {module: "\n".join(ast.dump(part) for part in statements)}
    todo = [*imported, *(one for part in statements for one in _imports(part))]
    while todo:
        other = todo.pop()
        if other not in code and other not in _REPORTING:
            code[other], imports = _whole(other)
            todo += imports
    return code


@functools.cache
def _whole(module: str) -> tuple[str, list[str]]:
    """The code of a module, and the modules of this project that it imports."""
    tree = _parsed(module)
    return ast.dump(tree), sorted(set(_imports(tree)))


def _needed(tree: ast.Module, name: str) -> tuple[list[ast.stmt], set[str]]:
    """The statements of a module that ``name`` refers to, directly or by others; the modules that these import."""
    binding: dict[str, list[ast.stmt]] = {}
    imported: dict[str, list[str]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                bound = alias.asname or alias.name.partition(".")[0]
                imported.setdefault(bound, []).extend(_modules(statement, alias))
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            binding.setdefault(statement.name, []).append(statement)
        else:
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            for bound in {node.id for node in stored if isinstance(node.ctx, ast.Store)}:
                binding.setdefault(bound, []).append(statement)
    needed: list[ast.stmt] = []
    modules: set[str] = set()
    todo, seen = [name], {name}
    while todo:
        word = todo.pop()
        modules.update(imported.get(word, []))
        for statement in binding.get(word, []):
            if statement not in needed:
                needed.append(statement)
                words = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - seen
                seen |= words
                todo += words
    return sorted(needed, key=lambda statement: statement.lineno), modules


def _imports(tree: ast.AST) -> Iterator[str]:
    """The modules of this project that are imported or named anywhere in ``tree``.

    What `importlib` imports stands there as a text: the modules of environments, which `rl.envs.registry` names.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield from _modules(node, alias)
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(str(node.value)) and _file(str(node.value)):
            yield str(node.value)


def _modules(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> list[str]:
    """The module of this project that one name of an import comes from, if it is one."""
    if isinstance(statement, ast.Import):
        candidates = [alias.name]
    else:
        candidates = [f"{statement.module}.{alias.name}", f"{statement.module}"]
    return [module for module in candidates if _file(module)][:1]


@functools.cache
def _file(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def _parsed(module: str) -> ast.Module:
    """A module without docstrings; comments are in no syntax tree."""
    path = _file(module)
    if path is None:
        raise ValueError(f"{module} is no module of {_ROOT}, so that a change of its code would go unseen")
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
