"""A search or a training in a report: block probabilities with a slider, curves, the pattern."""

from __future__ import annotations

import base64
import shlex
import tempfile
from pathlib import Path

import numpy as np

from deepenough.report.animation import animate_blocks
from deepenough.report.page_parts import Limits, Part, Shown, line, plain, thin
from deepenough.report.source import Run, block_states, last_value, number, series
from deepenough.report.style import BRANCHES
from deepenough.runs import Record


def training_part(run: Run, path: str, limits: Limits) -> Part | None:
    """Loss over training, for whatever was trained."""
    curves = []
    for kind, name in (("train", "training"), ("valid", "validation")):
        steps, losses = series(run, kind, "loss")
        if len(steps) > 1:
            curves.append(line(name, steps, losses, limits, dashed=kind == "valid"))
    if not curves:
        return None
    data = {"x_label": "step", "y_label": "loss", "series": curves}
    part = Part()
    part.figures.append(
        Shown("lines", "Loss", "As it was recorded while training.", _command(run, path), data)
    )
    perplexity = next((number(r.values.get("perplexity")) for r in _kind(run, "test")), None)
    if perplexity is not None:
        part.summary.append(f"Perplexity {perplexity:.4g} on the test text.")
    return part


def _kind(run: Run, kind: str) -> list[Record]:
    return [record for record in reversed(run.records) if record.kind == kind]


def par_part(run: Run, path: str, limits: Limits) -> Part | None:
    """The search: what every block was likely to be, at every recorded step."""
    states = block_states(run)
    if not states:
        return None
    shown = thin(states, limits.frames)
    part = Part(
        about="Every block chooses between attention, a dense layer and nothing (identity); the "
        "choice starts open and is settled by training."
    )
    data = {
        "rows": list(BRANCHES),
        "columns": [str(block) for block in range(1, len(states[-1].pi) + 1)],
        "frames": [
            {
                "step": state.step,
                "tau": plain(state.tau, 3),
                "pattern": state.pattern,
                "values": plain(state.pi.T, 3),
            }
            for state in shown
        ],
        "low": 0.0,
        "high": 1.0,
        "row_name": "branch",
        "column_name": "block",
        "value_name": "probability",
        "x_label": "block",
        "y_label": "",
        "row_width": 76,
        "cell_height": 48,
    }
    caption = "Move the slider to see the choice being made; letters are the likeliest pattern."
    if len(shown) < len(states):
        part.thinned.append(f"{run.name}: {len(shown)} of {len(states)} recorded steps on slider")
    command = _command(run, path)
    part.figures.append(Shown("frames", "Block probabilities", caption, command, data, wide=True))
    if limits.pictures:
        part.figures += _moving(run, path)
    else:
        part.thinned.append(f"{run.name}: the moving picture")
    part.summary.append(_verdict(run, states[-1].pi))
    return part


def _verdict(run: Run, pi: np.ndarray) -> str:
    leading = pi.argmax(axis=1)
    pattern = last_value(run, "pattern")
    named = f"The search chose {pattern}" if isinstance(pattern, str) else "So far the search leads"
    counts = ", ".join(
        f"{int((leading == i).sum())} {name}" for i, name in enumerate(BRANCHES) if i in leading
    )
    sure = float(pi.max(axis=1).min())
    return f"{named} ({counts}); its least certain block is {100 * sure:.0f} % sure."


def _moving(run: Run, path: str) -> list[Shown]:
    animation = animate_blocks(run)
    if animation is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        content = animation.save(Path(folder) / "blocks")[0].read_bytes()
    source = f"data:image/gif;base64,{base64.b64encode(content).decode()}"
    command = f"deepenough plot {shlex.quote(path)}"
    caption = "The same as a moving picture, to be saved and sent."
    return [Shown("image", "Block probabilities, moving", caption, command, {"source": source})]


def _command(run: Run, path: str) -> str:
    config = shlex.quote(f"{path}/config.yaml")
    sections = run.config
    if "search" in sections:
        return f"deepenough search --config {config}"
    if "dataset" in (sections.get("data") or {}):
        return f"deepenough ponder train --config {config}"
    if "train_nonzero" in (sections.get("data") or {}):
        return f"deepenough ponder parity --config {config}"
    if "encoder_steps" in (sections.get("model") or {}):
        return f"deepenough lazy train --config {config}"
    return f"deepenough train --config {config}"
