"""Write recorded figures into the tables of README and docs.

A page shows the table `benchmarks/tables/NAME.md` between `<!-- results: NAME -->` and
`<!-- /results -->`. A table is Markdown with references in braces:

    {figure:.2f}            a figure of the result file with the table's own name
    {file/figure:.1%}       a figure of another result file; the format is Python's
    {figure.low:.2f}        the lower end of its interval (`.high`: the upper)
    {a - b:+.2f}, {a / b}   the difference or the ratio of two figures, spaces required
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- results: (?P<name>[\w.-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
_REFERENCE = re.compile(r"\{([^{}]+?)(?::([^:{}]*))?\}")


def render_page(page: Path, folder: Path = FOLDER) -> bool:
    """Render all tables of a page and return whether that changed it."""
    text = page.read_text(encoding="utf-8")
    rendered = render_text(text, folder)
    if rendered != text:
        page.write_text(rendered, encoding="utf-8")
    return rendered != text


def render_text(text: str, folder: Path = FOLDER) -> str:
    """Return a page's text with all its tables filled from the recorded figures."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{render_table(match['name'], folder)}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def render_table(name: str, folder: Path = FOLDER) -> str:
    """Return a table with its figures filled in."""
    template = (folder / "tables" / f"{name}.md").read_text(encoding="utf-8")
    return _REFERENCE.sub(
        lambda m: _shown(_value(m[1], name, folder), m[2] or ""), template
    ).strip()


def _shown(value: float, form: str) -> str:
    """Return a value in a format, without the sign of a zero."""
    text = format(value, form)
    return text[1:] if text[:1] in "+-" and not text.strip("+-0.%") else text


def _value(reference: str, table: str, folder: Path) -> float:
    for operator in (" - ", " / "):
        left, found, right = reference.partition(operator)
        if found:
            a, b = _value(left, table, folder), _value(right, table, folder)
            return a - b if operator == " - " else a / b
    file, slash, name = reference.rpartition("/")
    path = folder / "results" / f"{file if slash else table}.json"
    figures = _figures(path, path.stat().st_mtime_ns)
    for end in ("low", "high"):
        if name not in figures and name.endswith(f".{end}"):
            return float(figures[name.removesuffix(f".{end}")][end])
    value: float = figures[name]["value"]
    return value


@functools.cache
def _figures(path: Path, changed: int) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return figures
