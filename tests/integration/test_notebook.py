"""Every notebook runs from beginning to end in an empty folder, and shows what it promises."""

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
def test_notebook_is_committed_as_it_ran(path: Path) -> None:
    """With outputs in the order of its cells, none of them an error, and no other metadata."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert f"notebooks/{path.name})" in notebook.cells[0].source  # opens in Colab
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert kinds and kinds <= {"stream", "execute_result", "display_data"}
    assert not any(cell.metadata for cell in notebook.cells)


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """Run a notebook in an empty folder, and return it with that folder."""
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(folder / variable.lower()))
    work = folder / "work"
    work.mkdir()
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(work)}})
    client.execute()
    return notebook, work


@pytest.mark.timeout(900)
def test_shortcut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, _ = execute("shortcut", tmp_path, monkeypatch)
    assert "image/png" in shown_kinds(notebook)
    assert re.search(r"layer 30 +' Paris'", printed(notebook, "lens"))
    assert re.search(r"layer 30 +id 100.0% +mat 100.0%", printed(notebook, "measure"))


@pytest.mark.timeout(900)
def test_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, _ = execute("decoding", tmp_path, monkeypatch)
    assert "identical: True" in printed(notebook, "same")
    assert printed(notebook, "time").count("with drafts") == 2


@pytest.mark.timeout(900)
def test_ponder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, _ = execute("ponder", tmp_path, monkeypatch)
    right = re.findall(r"(\d+) of 100 right, ([\d.]+) layers", printed(notebook, "look"))
    assert len(right) == 2 and all(int(num) >= 90 and float(mean) < 6 for num, mean in right)


@pytest.mark.timeout(900)
def test_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, _ = execute("lazy", tmp_path, monkeypatch)
    rows = re.findall(r"([\d.]+)% of the FLOPs, +([\d.]+)% right", printed(notebook, "save"))
    assert rows[0][0] == "100.0" and float(rows[0][1]) > 90
    assert min(float(share) for share, _ in rows) < 90


# One test, not several with a common fixture: pytest-xdist would run the notebook in each worker.
@pytest.mark.timeout(900)  # three quarters of a minute of one core, much longer on a busy machine
def test_par(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notebook, work = execute("par", tmp_path, monkeypatch)

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
