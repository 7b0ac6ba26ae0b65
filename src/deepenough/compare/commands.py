"""`deepenough compare`: every run at several operating points, under one protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepenough.config import Command

if TYPE_CHECKING:
    from deepenough.compare.config import CompareConfig


def _compare(config: CompareConfig) -> None:
    """Measure, print a table, and write frontier.json with its pictures."""
    from deepenough.compare.frontier import run_comparison
    from deepenough.report.drawing import save_figures
    from deepenough.report.figures import FRONTIER, frontier_section, read_frontier
    from deepenough.training.logging import reading

    with reading("passes") as progress:
        content = run_comparison(config, progress)
    quality = content["task"]["quality"]
    print(f"{'run':24}{'point':16}{quality:>12}{'layers':>9}{'MFLOPs':>10}{'ms':>10}  best in")
    for point in content["points"]:
        print(
            f"{point['run'][-23:]:24}{point['name'][:15]:16}{point['quality']:12.4g}"
            f"{point['layers']:9.2f}{point['flops'] / 1e6:10.4g}{point['milliseconds']:10.4g}  "
            + ", ".join(point["optimal"])
        )
    section = frontier_section(read_frontier(config.out))
    print(*section.findings, sep="\n")
    print(
        f"costs are of one {content['task']['unit']}; bookkeeping took "
        f"{content['bookkeeping']:.2%} of the measured time"
    )
    written = save_figures(section.figures[:1], config.out)
    print(Path(config.out) / FRONTIER, *written, sep="\n")


COMPARE = Command(
    name="compare",
    help="measure runs of one task at several depths, on one chart",
    config="deepenough.compare.config:CompareConfig",
    run=_compare,
    description="Measure runs of one task at several operating points: quality against layers,\n"
    "FLOPs and milliseconds, with intervals, in frontier.json and pictures.",
    goes_on=True,
    example="deepenough compare runs/first runs/second --out runs/both",
    positional=("runs*",),
)
