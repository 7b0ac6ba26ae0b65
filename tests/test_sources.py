"""The table of the sources: no empty cell, and every test that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)]
NAMED = sorted(set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", "\n".join(ROWS))))


def test_every_row_has_all_cells() -> None:
    assert len(ROWS) > 150
    for row in ROWS:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 4 and all(cells), row


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_what_compares_exists(path: str, name: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), name


def test_further_tests_of_a_file_exist() -> None:
    """A cell may name several tests of one file: `tests/a.py::test_b`, `::test_c`."""
    for row in ROWS:
        for path, others in re.findall(
            r"(tests/[\w/]+\.py)((?:::\w+)?`?(?:[,;] `::\w+[^`]*`)+)", row
        ):
            text = (ROOT / path).read_text(encoding="utf-8")
            for name in re.findall(r"::(\w+)", others):
                assert re.search(rf"^\s*def {name}\b", text, re.MULTILINE), f"{path}::{name}"
