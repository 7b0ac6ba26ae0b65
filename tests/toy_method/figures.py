"""The toy's figure: its error by blocks."""

from __future__ import annotations

from deepenough.figure import Axis, Chart, FigureSpec, Line, Run, Section, build_figures, numbers


def error_figure(run: Run) -> FigureSpec | None:
    """Return the error at each depth that was measured, or None without any."""
    measured = [numbers(r.values, "blocks", "error") for r in run.records if r.kind == "toy"]
    found = sorted(values for values in measured if values)
    if not found:
        return None
    line = Line("error", [blocks for blocks, _ in found], [error for _, error in found])
    chart = Chart(Axis("blocks", whole=True), Axis("error"), lines=(line,))
    return FigureSpec("toy_error", "Error of the toy", "How far predictions are off.", (chart,))


FIGURES = (error_figure,)


def section(run: Run) -> Section | None:
    """Return the toy's part of a report, or None if there is nothing to show."""
    figures = build_figures(run, FIGURES)
    return Section("Toy", "A line is learned.", [], figures) if figures else None
