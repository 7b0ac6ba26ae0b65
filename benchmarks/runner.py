"""Run benchmarks, keep their figures as JSON, and check figures that were kept.

A benchmark is a file in this folder with a function `measure`, which returns a nested dictionary
(see `figures.py`). The first sentence of its docstring is the claim; these constants describe it:

- `QUICK`: True if it takes minutes and needs nothing that was trained before;
- `SEEDS`: the seeds it uses;
- `VARIANTS`: optional, the keyword arguments of each variant by its name. Variant `b` of `a.py` is
  the benchmark `a-b` with a result file of its own.

Nothing is imported to list benchmarks, so `--list` and `--render` need no torch.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Unavailable, figures_of
from benchmarks.render import PAGES, render_page

FOLDER = Path(__file__).parent
RESULTS = "results"
#: Figures in these units depend on the machine: they are kept, and a check does not judge them.
MACHINE_UNITS = {"s", "ms", "min", "tokens/s", "steps/s", "MB", "GFLOP/s"}
#: By what share of its value a figure may lie outside its recorded interval: ratios of times, rest.
SLACK = {"x": 0.3, None: 0.05}


@dataclass(frozen=True)
class Benchmark:
    """One claim: where it is measured, with which options, and how long that takes."""

    name: str
    path: Path
    claim: str
    quick: bool
    seeds: list[int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that measures it with its own options."""
        return f"python -m benchmarks {self.name}"

    def measure(self, options: dict[str, Any]) -> dict[str, Any]:
        """Run the benchmark and return its nested figures and settings."""
        spec = importlib.util.spec_from_file_location(f"benchmarks.{self.path.stem}", self.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and subprocesses look it up there
        spec.loader.exec_module(module)
        values: dict[str, Any] = module.measure(**(self.options | options))
        return values


def find_benchmarks(folder: Path = FOLDER) -> dict[str, Benchmark]:
    """Return all benchmarks of a folder by name, read from their source without importing it."""
    return {
        benchmark.name: benchmark
        for path in sorted(folder.glob("*.py"))
        for benchmark in _read(path)
    }


def _read(path: Path) -> Iterator[Benchmark]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body):
        return
    constants: dict[str, Any] = {"VARIANTS": {"": {}}}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id in ("QUICK", "SEEDS", "VARIANTS"):
                constants[target.id] = ast.literal_eval(node.value)
    claim = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
    for variant, options in constants["VARIANTS"].items():
        name = f"{path.stem}-{variant}" if variant else path.stem
        yield Benchmark(name, path, claim, constants["QUICK"], constants["SEEDS"], options)


def run(benchmark: Benchmark, options: dict[str, Any]) -> dict[str, Any]:
    """Measure a benchmark and return its record: figures and how they came about."""
    started = time.perf_counter()
    values = dict(benchmark.measure(options))
    seconds = time.perf_counter() - started
    settings = {**benchmark.options, **options, **values.pop("settings", {})}
    given = "".join(f" {name}={value}" for name, value in options.items())
    figures = {name: _as_json(figure) for name, figure in figures_of(values).items()}
    return {
        "name": benchmark.name,
        "claim": benchmark.claim,
        "command": benchmark.command + given,
        "seeds": settings.pop("seeds", benchmark.seeds),
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "figures": figures,
    }


def _as_json(figure: Figure) -> dict[str, Any]:
    return {name: value for name, value in asdict(figure).items() if value is not None}


def machine() -> dict[str, Any]:
    """Return what a time depends on: system, CPU, instruction sets and threads."""
    info: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        info = {
            key.strip(): text.strip() for key, _, text in (line.partition(":") for line in lines)
        }
    except OSError:
        pass
    flags = set(info.get("flags", "").split())
    torch = sys.modules.get("torch")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": info.get("model name") or platform.processor() or None,
        "avx2": "avx2" in flags if flags else None,
        "avx512": "avx512f" in flags if flags else None,
        "vnni": bool(flags & {"avx512_vnni", "avx_vnni"}) if flags else None,
        "threads": torch.get_num_threads() if torch else None,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that figures depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepenough"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """Return the commit that is checked out, marked `-dirty` if source files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(FOLDER.parent), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "src", "benchmarks/*.py")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def compare(recorded: dict[str, Any], measured: dict[str, Any]) -> tuple[list[str], bool]:
    """Compare the figures of two records of one benchmark.

    Returns:
        One line per figure, and whether all that can be judged lie in their recorded intervals,
        widened by `SLACK`. Times and sizes depend on the machine and are shown only. A recorded
        figure that was not measured fails.
    """
    lines, good = [], True
    for name, old in recorded["figures"].items():
        new = measured["figures"].get(name)
        if new is None:
            lines.append(f"  MISSING  {name}: recorded {old['value']:.6g}, not measured now")
            good = False
            continue
        unit = old.get("unit")
        slack = abs(old["value"]) * SLACK.get(unit, SLACK[None])
        low, high = old.get("low", old["value"]) - slack, old.get("high", old["value"]) + slack
        within = low <= new["value"] <= high
        judged = unit not in MACHINE_UNITS
        word = ("ok" if within else "OUTSIDE") if judged else "shown"
        good = good and (within or not judged)
        lines.append(
            f"  {word:8} {name}: {new['value']:.6g} {unit or ''}, "
            f"recorded {old['value']:.6g}, accepted {low:.6g} to {high:.6g}"
        )
    lines += [
        f"  new      {name}: {new['value']:.6g} {new.get('unit', '')}"
        for name, new in measured["figures"].items()
        if name not in recorded["figures"]
    ]
    return lines, good


def read_result(path: Path) -> dict[str, Any]:
    """Return one record."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def write_result(record: dict[str, Any], folder: Path) -> Path:
    """Write a record, one figure a line, and return its file."""
    figures = record["figures"]
    head = json.dumps({**record, "figures": {}}, indent=1, ensure_ascii=False)
    lines = [f"  {json.dumps(name)}: {json.dumps(figure)}" for name, figure in figures.items()]
    body = "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
    path = folder / f"{record['name']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("{}\n}") + body + "\n}\n", encoding="utf-8")
    return path


def choose(
    found: dict[str, Benchmark], names: Sequence[str], quick: bool, every: bool
) -> list[Benchmark]:
    """Return the benchmarks that are asked for; a name without variant stands for all of them."""
    chosen: dict[str, Benchmark] = {}
    for name in names:
        matching = {n: b for n, b in found.items() if n == name or b.path.stem == name}
        if not matching:
            raise SystemExit(f"There is no benchmark {name}. See python -m benchmarks --list.")
        chosen |= matching
    if not names and (quick or every):
        chosen = dict(found)
    return [benchmark for benchmark in chosen.values() if benchmark.quick or not quick]


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments in words such as `rounds=3` or `runs=runs/mine`."""
    options: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """Run the command line and return its exit code: 1 if a benchmark or a check fails.

    Args:
        argv: The words after `python -m benchmarks`.
        folder: Where the benchmarks and their `results/` are.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the documents claim and keep it in benchmarks/results.",
        epilog="Example: python -m benchmarks cutoffs rounds=3, then python -m benchmarks --render",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME | OPTION=VALUE", help="benchmarks, and options for them"
    )
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--quick", action="store_true", help="only those that take minutes")
    parser.add_argument(
        "--check", action="store_true", help="measure again and compare with what is recorded"
    )
    parser.add_argument("--list", action="store_true", help="list all benchmarks and their claims")
    parser.add_argument(
        "--render", action="store_true", help="write the recorded figures into README and docs"
    )
    arguments = parser.parse_args(argv)
    options = parse_options([word for word in arguments.names if "=" in word])
    names = [word for word in arguments.names if "=" not in word]
    found = find_benchmarks(folder)
    if arguments.list:
        for benchmark in found.values():
            length = "quick" if benchmark.quick else "long"
            print(f"{benchmark.name} ({length}, seeds {benchmark.seeds})\n    {benchmark.claim}")
        return 0
    every = arguments.all or arguments.check
    chosen = choose(found, names, arguments.quick, every)
    if not chosen and not arguments.render:
        parser.error("name a benchmark, or give --all, --quick, --check, --list or --render")
    good = True
    for benchmark in chosen:
        print(f"== {benchmark.name}: {benchmark.claim}", flush=True)
        path = folder / RESULTS / f"{benchmark.name}.json"
        if arguments.check and not path.is_file():
            print("  nothing is recorded for it yet")
            continue
        try:
            record = run(benchmark, options)
        except Unavailable as reason:
            print(f"SKIPPED: {benchmark.name}: {reason}", flush=True)
            continue
        except Exception as error:  # the others still run
            traceback.print_exc()
            print(f"FAILED: {benchmark.name}: {error}", flush=True)
            good = False
            continue
        if arguments.check:
            lines, same = compare(read_result(path), record)
            print(*lines, sep="\n", flush=True)
            good = good and same
        else:
            print(f"written: {write_result(record, folder / RESULTS)}")
    if arguments.render:
        for page in PAGES:
            if render_page(page, folder):
                print(f"rendered: {page}")
    return 0 if good else 1
