"""Sphinx configuration of the documentation site, which ``make docs`` builds.

The source folder is the repository, so that pages link to results, notebooks and data files where they lie. Nothing is
downloaded while the site is built. What `docs.extension` generates from the code is in no file.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs import notebooks  # noqa: E402

project = "headway"
root_doc = "docs/index"
_SHOWN = {"docs", "notebooks", "results", "benchmarks", "CHANGELOG.md"}
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in _SHOWN] + [
    "**/.ipynb_checkpoints",
    "results/**/points.md",  # tables of hundreds of rows: files to which pages link
]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.extension",
]
html_theme = "furo"
html_title = "headway"
html_theme_options = (
    {"source_repository": notebooks.address(), "source_branch": "main"} if notebooks.address() else {}
)
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks show the outputs that they store

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "py:obj"  # `rl.keys` in a docstring is a link; one that leads nowhere is an error

smartquotes = False  # [..., K] in a docstring is typed so
toc_object_entries = False  # only modules in the contents, not every function
nitpicky = True
