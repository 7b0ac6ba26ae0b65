"""The import rules of the house, wherever in a file an import stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import deepenough
from deepenough.registry import METHODS

PACKAGE = Path(deepenough.__file__).parent

CORE = {
    *("errors", "config", "devices", "runs", "trace", "measurement", "artifacts", "figure"),
    *("hf", "data", "nn", "training"),
}
PARTS = {method.package for method in METHODS}
ABOVE = {
    "compare",
    "report",
    "profiling",
    "explorer",
    "demo",
    "cli",
    "registry",
    "__init__",
    "__main__",
}

FINDS_CLASSES = "hf/loading.py"
"""Looks up the class of a saved model of our own among the public names, by its name."""

# What a figure is drawn from are files: it needs no model and no library that runs one.
HEAVY = {"accelerate", "datasets", "sentencepiece", "torch", "transformers"}


def may_import(part: str, target: str) -> bool:
    """Return whether code of one part of the package may import another part."""
    if part == target or part == "__init__" or target == "errors":
        return True
    if part in CORE:
        return target in CORE
    if part in PARTS:
        return target in CORE or (part, target) == ("decoding", "shortcut")
    return target in CORE | (ABOVE - {"__init__"}) or (part, target) == ("cli", "__init__")


def violations(package: Path, parts: set[str] = PARTS) -> tuple[list[str], int]:
    """Return the forbidden imports of a package, and how many of its own imports were checked."""
    found: list[str] = []
    num_checked = 0
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        part = where.with_suffix("").parts[0]
        if part not in CORE | parts | ABOVE:
            found.append(f"{where}: {part} belongs nowhere")
            continue
        draws = part == "report" or where.name == "figures.py"
        for target in imported_modules(path, package):
            names = target.split(".")
            if names[0] != package.name:
                if draws and names[0] in HEAVY:
                    found.append(f"{where}: a figure needs {target}")
                continue
            num_checked += 1
            to = names[1] if len(names) > 1 else "__init__"
            if to == "__init__" and where.as_posix() == FINDS_CLASSES:
                continue
            if not may_import(part, to):
                found.append(f"{where}: {part} imports {target}")
    return found, num_checked


def imported_modules(path: Path, package: Path) -> Iterator[str]:
    """Yield the full names of all that a file imports, in functions and by literal name too."""
    own = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level] if node.level else ()
            source = ".".join((*base, *([node.module] if node.module else [])))
            # `from package import data` names a module, `from package import Record` a public name.
            for alias in node.names:
                is_part = source == package.name and alias.name in CORE | PARTS | ABOVE
                yield f"{source}.{alias.name}" if is_part else source
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            literal = node.args[0]
            if called.endswith("import_module") and isinstance(literal, ast.Constant):
                yield str(literal.value)


def test_the_import_rules_are_kept() -> None:
    found, num_checked = violations(PACKAGE)
    assert found == []
    assert num_checked > 300


def test_only_the_registry_names_all_methods() -> None:
    named = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if all(f'"{method.package}"' in path.read_text(encoding="utf-8") for method in METHODS)
    }
    assert named == {"registry.py"}


def make_package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "sample"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_forbidden_imports_are_noticed(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "data/files.py": "from sample.par.training import fit",
            "data/names.py": "from sample import Record",
            "nn/late.py": "def f():\n    from ..cli import parse",
            "hf/hidden.py": "import importlib\nimportlib.import_module('sample.report')",
            "par/other.py": "from sample.ponder import halting",
            "par/figures.py": "import torch.nn",
            "shortcut/up.py": "from sample.decoding.engine import Engine",
            "compare/direct.py": "from sample.lazy.evaluation import open_candidate",
            "report/plots.py": "from sample import par",
            "utils.py": "import os",
        },
    )
    found, _ = violations(package)
    assert found == [
        "compare/direct.py: compare imports sample.lazy.evaluation",
        "data/files.py: data imports sample.par.training",
        "data/names.py: data imports sample",
        "hf/hidden.py: hf imports sample.report",
        "nn/late.py: nn imports sample.cli",
        "par/figures.py: a figure needs torch.nn",
        "par/other.py: par imports sample.ponder",
        "report/plots.py: report imports sample.par",
        "shortcut/up.py: shortcut imports sample.decoding.engine",
        "utils.py: utils belongs nowhere",
    ]


def test_the_other_imports_are_allowed(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "__init__.py": "from sample.par.modeling import Model",
            "config.py": "from sample.errors import UserError\nimport sample.runs",
            "par/training.py": "from . import search\nfrom ..hf import adapter\nimport torch",
            "par/figures.py": "from sample.figure import FigureSpec",
            "decoding/drafters.py": "from sample.shortcut.modeling import Shortcuts",
            "report/plots.py": "from sample import registry\nimport numpy",
            "cli.py": "from sample.registry import METHODS\nfrom sample.compare import commands",
        },
    )
    assert violations(package) == ([], 10)
