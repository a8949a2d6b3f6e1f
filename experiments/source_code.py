"""The code of this project that a function runs, as syntax trees without docstrings and comments.

A study stores what it trained under a digest of it (`experiments.studies.digest`), and trains again what other code
would train. A run stores digests of the user's own modules that it names (`user_code`), and is not continued with
others.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_MODULE = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)+")
# They parse flags, print, store and draw, and cannot change what is trained.
_REPORTING = ("experiments.flags", "experiments.notes", "experiments.studies", "rl.plot")
# Packages that are the library's, whose commits say which code ran.
_LIBRARY = ("benchmarks", "experiments", "rl", "sweeps")
_INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages

# {module: what it was imported by, and `user_code` of it}
_known: dict[str, tuple[ModuleSpec, dict[str, str]]] = {}


@functools.cache  # as the code was when it was first asked for: a file that is edited meanwhile is not what runs
def needed(module: str, name: str) -> dict[str, str]:
    """{module: its code} of all that ``name`` in ``module`` runs."""
    statements, imported = _needed(_parsed(module), name)
    code = {module: "\n".join(ast.dump(part) for part in statements)}
    todo = [*imported, *(one for part in statements for one in _imports(part))]
    while todo:
        other = todo.pop()
        if other not in code and not other.startswith(_REPORTING):
            code[other], imports = _whole(other)
            todo += imports
    return code


def user_code(module: str) -> dict[str, str]:
    """{file: digest of its code} of a user's module and of those that it imports from beside it.

    Nothing of a module of this library, or of one that is not found. Beside it is the folder in which names of modules
    start from which its own is found; of an installed package, the package alone. A module that is imported has the
    code that it had when it was first asked for: a file that is edited meanwhile is not what runs.
    """
    if module.partition(".")[0] in _LIBRARY:
        return {}
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None) if loaded else _found(module)
    if spec is None or not str(spec.origin).endswith(".py"):
        return {}
    if module not in _known or _known[module][0] is not spec:
        _known[module] = spec, _user_code(module, Path(str(spec.origin)))
    return _known[module][1]


def _found(module: str) -> ModuleSpec | None:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(module)
    return None


def _user_code(module: str, file: Path) -> dict[str, str]:
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    own_top = module.partition(".")[0]
    code: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        top, path = name.partition(".")[0], _file_in(root, name)
        others = top in (*_LIBRARY, *sys.stdlib_module_names) or (root.name in _INSTALLED and top != own_top)
        if path is None or others or path.relative_to(root).as_posix() in code:
            continue
        parent = name.rpartition(".")[0]
        words, imported = _of_user(path, name if path.name == "__init__.py" else parent)
        code[path.relative_to(root).as_posix()] = hashlib.sha256(words).hexdigest()[:16]
        todo += [module for module in (*imported, parent) if module]
    return code


def _of_user(path: Path, package: str) -> tuple[bytes, list[str]]:
    """A user's file in words, and the names that it imports. What is no Python stays as it is: it need not run."""
    try:
        tree = _tree(path)
    except SyntaxError:
        return path.read_bytes(), []
    return _words(tree).encode(), list(_imported(tree, package))


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The names that a module of a package imports, of which some may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (package or not node.level):
            with contextlib.suppress(ImportError):  # beyond the package, where it cannot run
                origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


def _words(part: Any) -> str:
    """A syntax tree as a text that no version of Python writes differently: what is empty in it is left out."""
    if isinstance(part, ast.AST):
        fields = ((name, _words(value)) for name, value in ast.iter_fields(part))
        there = (f"{name}={words}" for name, words in fields if words not in ("None", "[]"))
        return f"{type(part).__name__}({', '.join(there)})"
    return f"[{', '.join(map(_words, part))}]" if isinstance(part, list) else repr(part)


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
    return _file_in(_ROOT, module)


def _file_in(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    files = (path.parent / f"{path.name}.py", path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def _parsed(module: str) -> ast.Module:
    """A module of this project without docstrings; comments are in no syntax tree."""
    path = _file(module)
    if path is None:
        raise ValueError(f"{module} is no module of {_ROOT}, so that a change of its code would go unseen")
    return _tree(path)


def _tree(path: Path) -> ast.Module:
    tree = ast.parse(path.read_bytes())
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
