"""Pictures of runs, drawn from their files alone: no model is loaded, nothing is measured again."""

from deepenough.report.architecture import draw_architecture
from deepenough.report.figures import ANIMATIONS, FIGURES, write_comparison, write_figures
from deepenough.report.frontier import draw_frontier, pareto, plot_frontier
from deepenough.report.source import Run, read_run, read_runs
from deepenough.report.style import save

__all__ = [
    "ANIMATIONS",
    "FIGURES",
    "Run",
    "draw_architecture",
    "draw_frontier",
    "pareto",
    "plot_frontier",
    "read_run",
    "read_runs",
    "save",
    "write_comparison",
    "write_figures",
]
