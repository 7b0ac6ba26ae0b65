"""Imports only go from a layer to those before it, wherever in a file they stand."""

import ast
from collections.abc import Iterator
from pathlib import Path

import deepenough

PACKAGE = Path(deepenough.__file__).parent

# Modules of one row may import each other. The public names of `__init__` are for users: it names
# every layer, so a layer that imported from it would depend on everything.
LAYERS = [
    {"errors"},
    {"provenance", "settings", "runs"},
    {"data"},
    {"models"},
    {"adaptive"},
    {"measure"},
    {"train"},
    {"report"},
    {"cli"},
    {"__init__", "__main__"},
]
RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row}

# A picture is drawn from files: it needs no model and none of the libraries that run one.
REPORT_MAY_IMPORT = {"errors", "settings", "runs", "report"}
REPORT_MUST_NOT_IMPORT = {"accelerate", "datasets", "sentencepiece", "torch", "transformers"}


def violations(package: Path) -> tuple[list[str], int]:
    """Forbidden imports of a package, and how many imports within the package were checked."""
    found: list[str] = []
    num_checked = 0
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).with_suffix("").parts
        part, where = module[0], path.relative_to(package)
        if part not in RANK:
            found.append(f"{where}: {part} belongs to no layer")
            continue
        for target in imported_modules(path, package):
            names = target.split(".")
            if names[0] != package.name:
                if part == "report" and names[0] in REPORT_MUST_NOT_IMPORT:
                    found.append(f"{where}: report imports {target}")
                continue
            num_checked += 1
            to = names[1] if len(names) > 1 else "__init__"
            outside_report = part == "report" and to not in REPORT_MAY_IMPORT
            if RANK.get(to, len(LAYERS)) > RANK[part] or outside_report:
                found.append(f"{where}: {part} imports {target}")
    return found, num_checked


def imported_modules(path: Path, package: Path) -> Iterator[str]:
    """Full names of all that a file imports: absolute, relative, in functions, by literal name."""
    own = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level] if node.level else ()
            source = ".".join((*base, *([node.module] if node.module else [])))
            # `from package import data` names a module, `from package import Record` a public name.
            for alias in node.names:
                is_part = source == package.name and alias.name in RANK
                yield f"{source}.{alias.name}" if is_part else source
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            literal = node.args[0]
            if called.endswith("import_module") and isinstance(literal, ast.Constant):
                yield str(literal.value)


def test_no_module_imports_upwards() -> None:
    found, num_checked = violations(PACKAGE)
    assert found == []
    assert num_checked > 10


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
            "errors.py": "import sample.runs",
            "data/files.py": "from sample.train.loop import fit",
            "data/names.py": "from sample import Record",
            "data/quiet.py": "from sample import __version__",
            "models/late.py": "def f():\n    from ..cli import parse",
            "models/hidden.py": "import importlib\nimportlib.import_module('sample.report')",
            "report/plots.py": "from sample import models",
            "report/heavy.py": "import torch.nn",
            "utils.py": "import os",
        },
    )
    found, _ = violations(package)
    assert found == [
        "data/files.py: data imports sample.train.loop",
        "data/names.py: data imports sample",
        "data/quiet.py: data imports sample",
        "errors.py: errors imports sample.runs",
        "models/hidden.py: models imports sample.report",
        "models/late.py: models imports sample.cli",
        "report/heavy.py: report imports torch.nn",
        "report/plots.py: report imports sample.models",
        "utils.py: utils belongs to no layer",
    ]


def test_downward_imports_are_allowed(tmp_path: Path) -> None:
    package = make_package(
        tmp_path,
        {
            "__init__.py": "from sample.train.loop import fit",
            "__main__.py": "from sample import __version__",
            "settings.py": "from sample.errors import UserError\nimport sample.runs",
            "train/loop.py": "from . import steps\nfrom ..models import block\nimport torch",
            "report/plots.py": "from sample import runs\nimport numpy",
            "cli/show.py": "from sample.report import plots\nfrom sample.cli.parse import parse",
        },
    )
    assert violations(package) == ([], 9)
