"""The documentation site: `make docs` builds it into build/site, with warnings as errors."""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import deepenough  # noqa: E402  after the path that it is found by

REPOSITORY = "https://github.com/deepenough/deepenough"

project = "deepenough"
author = "The deepenough authors"
copyright = "The deepenough authors"
version = release = deepenough.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["capabilities.md"]  # for those who knew the first versions: on GitHub only

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Docstrings write code in single backticks, as Markdown does.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# What a hub or an index answers is not ours to test; addresses are checked by hand with
# `sphinx-build -b linkcheck`, where there is a network.
linkcheck_ignore = [rf"{REPOSITORY}/.*"]

html_theme = "furo"
html_title = "deepenough"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False


def link_to_the_repository(_: Sphinx, page: str, source: list[str]) -> None:
    """Point links that leave docs/ to the repository: the site holds no other files."""
    outside = r"\]\((?:\.\./)+((?!images/)[\w./-]+)"
    depth = page.count("/") + 1

    def address(link: re.Match[str]) -> str:
        if link.group(0).count("../") < depth:
            return link.group(0)
        kind = "tree" if (ROOT / link.group(1)).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{link.group(1)}"

    source[0] = re.sub(outside, address, source[0])


def keep_colons(app: Sphinx, what: str, *described: Any) -> None:
    """Keep napoleon from taking what stands before a colon for the type of an attribute."""
    lines: list[str] = described[-1]
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " - ", 1)


def setup(app: Sphinx) -> None:
    """Register what happens to pages and docstrings before they are parsed."""
    app.connect("autodoc-process-docstring", keep_colons, priority=1)
    app.connect("source-read", link_to_the_repository)
