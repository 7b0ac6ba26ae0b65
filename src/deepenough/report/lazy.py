"""All pictures of a Lazy Transformer, each beside the numbers it was drawn from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.lazy_curves import draw_rest, draw_sentence
from deepenough.report.lazy_source import EPSILON, REST, STEPS, TOKENS
from deepenough.report.lazy_sweep import draw_epsilon_curve, draw_step_grid
from deepenough.report.lazy_tokens import draw_tokens
from deepenough.report.source import Run

#: File name without its ending -> what draws it, and the kinds of the records it is drawn from.
LAZY_FIGURES: dict[str, tuple[Callable[[Run], Figure | None], tuple[str, ...]]] = {
    "lazy_tokens": (draw_tokens, (TOKENS,)),
    "lazy_sentence": (draw_sentence, (TOKENS, REST)),
    "lazy_rest": (draw_rest, (REST,)),
    "lazy_steps": (draw_step_grid, (STEPS,)),
    "lazy_epsilon": (draw_epsilon_curve, (EPSILON,)),
}


def write_lazy_figures(run: Run, folder: Path) -> list[Path]:
    """PNG, PDF and SVG of each picture that the run has data for, and its data as JSON."""
    written: list[Path] = []
    for name, (draw, kinds) in LAZY_FIGURES.items():
        figure = draw(run)
        if figure is None:
            continue
        written += style.save(figure, folder / name)
        svg, data = folder / f"{name}.svg", folder / f"{name}.json"
        with style.applied(), style.writing(folder):
            figure.savefig(svg, metadata={"Date": None})
            records = [
                {"kind": record.kind, **record.values}
                for record in run.records
                if record.kind in kinds
            ]
            data.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8")
        written += [svg, data]
    if not written:
        raise UserError(
            f"The run {run.name} has recorded nothing of a Lazy Transformer that could be drawn."
        )
    return written
