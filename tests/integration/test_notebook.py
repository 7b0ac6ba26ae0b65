"""The notebook runs from beginning to end in an empty folder, and shows what its text promises."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

pytestmark = pytest.mark.slow


def notebooks() -> list[Path]:
    found = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert found
    return found


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_notebook_is_committed_clean(path: Path) -> None:
    """No outputs, no counters, no editor's metadata: what is committed is what was written."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


# One test, not several with a common fixture: pytest-xdist would run the notebook in each worker.
@pytest.mark.timeout(900)  # three quarters of a minute of one core, much longer on a busy machine
def test_par(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CACHE_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(NOTEBOOKS / "par.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(work)}})
    client.execute()

    shown = shown_kinds(notebook)
    assert shown.count("image/png") >= 3
    assert shown.count("image/gif") == 1

    found = re.search(r"pattern to train: ([ad-]{4})$", printed(notebook, "derive"), re.MULTILINE)
    assert found is not None
    table = printed(notebook, "compare")
    assert re.search(rf"derived +{re.escape(found[1])} +\d", table)
    assert re.search(r"interleaved +adad +\d", table)

    prompt = "The function returns the"
    written = printed(notebook, "sample")
    assert written.count(prompt) == 2
    assert len(written) > 2 * len(prompt) + 40

    assert {entry.name for entry in work.iterdir()} == {"runs"}
    for name in ("search", "derived", "interleaved"):
        assert (work / "runs" / "notebook" / name / "model" / "config.json").is_file()


def printed(notebook: Any, cell_id: str) -> str:
    cell = next(cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def shown_kinds(notebook: Any) -> list[str]:
    """The forms of everything displayed, such as image/png."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [kind for output in outputs for kind in output.get("data", {})]
