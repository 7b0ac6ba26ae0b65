"""The public API: complete, the same for people and type checkers, and free until used."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import deepenough


@pytest.mark.parametrize("name", deepenough.__all__)
def test_public_name_loads(name: str) -> None:
    assert callable(getattr(deepenough, name))
    assert getattr(deepenough, name).__name__.rpartition(".")[2] == name
    assert name in dir(deepenough)


def test_the_citation_names_this_version() -> None:
    citation = Path(__file__).parents[1] / "CITATION.cff"
    assert yaml.safe_load(citation.read_text(encoding="utf-8"))["version"] == deepenough.__version__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No deepenough attribute Nothing"):
        _ = deepenough.Nothing


def test_importing_the_package_loads_no_heavy_library() -> None:
    program = (
        "import sys, deepenough; print(*{'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("", 0)
