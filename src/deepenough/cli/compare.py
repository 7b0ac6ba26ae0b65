"""`deepenough compare`: every run at several operating points, under one protocol."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deepenough.cli.parse import parse


def main(argv: list[str]) -> int:
    from deepenough.compare.config import CompareSettings

    settings = parse(
        "compare",
        CompareSettings,
        _with_runs(argv),
        description="Measure runs of one task at several operating points: quality against layers,"
        "\nFLOPs and milliseconds, with intervals, in frontier.json and pictures.",
        example="deepenough compare runs/first runs/second --out runs/both",
    )
    from deepenough.compare.frontier import FRONTIER, compare
    from deepenough.report.frontier_file import read_frontier, write_frontier_figures
    from deepenough.training.progress import reading

    with reading("passes") as progress:
        content = compare(settings, progress)
    for note in content["notes"]:
        print(f"deepenough: note: {note}", file=sys.stderr)
    quality = content["task"]["quality"]
    print(f"{'run':24}{'point':16}{quality:>12}{'layers':>9}{'MFLOPs':>10}{'ms':>10}  best in")
    for point in content["points"]:
        print(
            f"{point['run'][-23:]:24}{point['name'][:15]:16}{point['quality']:12.4g}"
            f"{point['layers']:9.2f}{point['flops'] / 1e6:10.4g}{point['milliseconds']:10.4g}  "
            + ", ".join(point["optimal"])
        )
    unit = content["task"]["unit"]
    print(
        f"costs are of one {unit}; bookkeeping took {content['bookkeeping']:.2%} of the measured "
        "time"
    )
    file = Path(settings.out) / FRONTIER
    print(file, *write_frontier_figures(read_frontier(file), Path(settings.out)), sep="\n")
    return 0


def _with_runs(argv: list[str]) -> list[str]:
    """The folders that stand first, as the option they are."""
    count = 0
    while count < len(argv) and not argv[count].startswith("-"):
        count += 1
    return [f"--runs={json.dumps(argv[:count])}", *argv[count:]] if count else argv
