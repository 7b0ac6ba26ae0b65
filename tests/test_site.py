"""The documentation site: every public name is on it, and it builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepenough as de

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_documented_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    documented = re.findall(r"^\.\. auto\w+:: deepenough\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(de.__all__)


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in de.__all__ if not getattr(de, name).__doc__] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site needs deepenough[docs]")
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs")]
    done = subprocess.run([*build, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "index.html").read_text("utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        place = page.relative_to(ROOT / "docs").with_suffix(".html")
        if page.stem not in ("capabilities", "index"):
            assert (tmp_path / place).is_file() and f'href="{place}"' in index, place
    api = (tmp_path / "api.html").read_text("utf-8")
    assert [name for name in de.__all__ if f'id="deepenough.{name}"' not in api] == []
