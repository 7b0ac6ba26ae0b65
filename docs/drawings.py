"""Draw the two pictures of architecture.md: `python docs/drawings.py`.

`images/dataflow.svg` is the way data takes through the package; `images/imports.svg` is the graph
of imports between its parts, read from the source by `ast`, so that it cannot be out of date.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "src" / "deepenough"

INK, BLUE, ORANGE, GREEN, GREY = "#1a1a1a", "#0072b2", "#d55e00", "#009e73", "#8a8a8a"

STATIONS = [
    ("text", "file, folder,\ncorpus name"),
    ("tokens", "data/"),
    ("batch", "data/, training/"),
    ("model +\nmechanism", "par ponder lazy\nshortcut decoding"),
    ("output with\n.trace", "DepthTrace"),
    ("Record", "metrics.jsonl"),
    ("frontier", "compare/"),
    ("page", "report/"),
]

ROWS = [
    ["cli", "demo"],
    ["registry", "compare", "report"],
    ["par", "ponder", "lazy", "decoding", "shortcut"],
    ["training", "hf", "data", "nn"],
    ["measurement", "figure", "runs", "trace", "artifacts", "devices", "config"],
]


def box(axes: Axes, x: float, y: float, text: str, color: str, width: float, height: float) -> None:
    """Draw a box with a text in its middle."""
    axes.add_patch(
        plt.Rectangle(
            (x - width / 2, y - height / 2),
            width,
            height,
            facecolor="white",
            edgecolor=color,
            lw=1.6,
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)


def draw_dataflow(path: Path) -> None:
    """Draw the stations of the data from left to right, each with where it is made."""
    figure, axes = plt.subplots(figsize=(11, 1.9))
    for place, (name, where) in enumerate(STATIONS):
        color = ORANGE if "mechanism" in name else BLUE
        box(axes, place, 0, name, color, 0.78, 0.5)
        axes.text(place, -0.48, where, ha="center", va="top", fontsize=7.5, color=GREY)
        if place:
            axes.annotate(
                "",
                (place - 0.4, 0),
                (place - 0.6, 0),
                arrowprops={"arrowstyle": "->", "color": INK},
            )
    axes.set(xlim=(-0.5, len(STATIONS) - 0.5), ylim=(-0.95, 0.4))
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def imports_between_parts() -> dict[tuple[str, str], int]:
    """Return how many imports of the package lead from one of its parts to another."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepenough."):
                target = str(node.module).split(".")[1]
                if target not in (part, "errors"):
                    found[part, target] += 1
    return dict(found)


def draw_imports(path: Path) -> None:
    """Draw the parts in rows, upper ones importing lower ones."""
    places = {
        part: (4.0 * (place + 0.5) / len(row), len(ROWS) - level)
        for level, row in enumerate(ROWS)
        for place, part in enumerate(row)
    }
    colors = [GREY, ORANGE, BLUE, GREEN, GREEN]
    figure, axes = plt.subplots(figsize=(9, 5.2))
    for (source, target), count in sorted(imports_between_parts().items()):
        if source not in places or target not in places:
            continue
        start, end = places[source], places[target]
        bend = 0.0 if start[1] != end[1] else -0.35
        axes.annotate(
            "",
            (end[0], end[1] + 0.17),
            (start[0], start[1] - 0.17 if bend == 0 else start[1] + 0.17),
            arrowprops={
                "arrowstyle": "->",
                "color": GREY,
                "alpha": min(0.85, 0.25 + 0.04 * count),
                "lw": 0.9,
                "connectionstyle": f"arc3,rad={bend}",
            },
        )
    for level, row in enumerate(ROWS):
        for part in row:
            box(axes, *places[part], part, colors[level], 0.6, 0.34)
    axes.set(xlim=(-0.1, 4.1), ylim=(0.6, len(ROWS) + 0.5))
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "deepenough"
    matplotlib.rcParams["savefig.dpi"] = 110
    draw_dataflow(DOCS / "images" / "dataflow.svg")
    draw_imports(DOCS / "images" / "imports.svg")
