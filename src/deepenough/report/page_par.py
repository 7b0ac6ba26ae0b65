"""A search or a training in a report: block probabilities with a slider, curves, the pattern."""

from __future__ import annotations

import base64
import shlex
import tempfile
from pathlib import Path

import numpy as np

from deepenough.report.animation import MAX_FRAMES, animate_blocks
from deepenough.report.page_parts import Limits, Part, Shown, line, plain, thin
from deepenough.report.source import Run, block_states, last_value, number, series
from deepenough.report.style import BRANCHES, LETTERS
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
    part = Part(method=_method(run))
    part.figures.append(
        Shown("lines", "Loss", "As it was recorded while training.", _command(run, path), data)
    )
    perplexity = next((number(r.values.get("perplexity")) for r in _kind(run, "test")), None)
    if perplexity is not None:
        whose = " of the mixture of all blocks" if "search" in run.config else ""
        part.summary.append(f"Perplexity{whose} on the test text: {perplexity:.4g}.")
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
        method="PAR search",
        about="Every block chooses between attention, a dense layer and nothing (identity); the "
        "choice starts open and is settled by training.",
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
        part.thinned.append(f"{len(shown)} of {len(states)} recorded steps on the slider")
    command = _command(run, path)
    part.figures.append(Shown("frames", "Block probabilities", caption, command, data, wide=True))
    if limits.pictures:
        part.figures += _moving(run, path, limits)
        if limits.pictures < min(MAX_FRAMES, len(states)):
            part.thinned.append(f"{limits.pictures} pictures of the moving one")
    else:
        part.thinned.append("the moving picture is left out")
    part.summary.append(_verdict(run, states[-1].pi))
    return part


def _verdict(run: Run, pi: np.ndarray) -> str:
    pattern = last_value(run, "pattern")
    done = isinstance(pattern, str)
    letters = pattern if done else "".join(LETTERS[i] for i in pi.argmax(axis=1))
    named = f"The search chose {letters}" if done else f"So far the search leads to {letters}"
    counts = ", ".join(
        f"{letters.count(letter)} {name}"
        for letter, name in zip(LETTERS, BRANCHES, strict=True)
        if letter in letters
    )
    sure = float(pi.max(axis=1).min())
    return f"{named} ({counts}); its least certain block is {100 * sure:.0f} % sure."


def _moving(run: Run, path: str, limits: Limits) -> list[Shown]:
    animation = animate_blocks(run, limits.pictures)
    if animation is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        content = animation.save(Path(folder) / "blocks")[0].read_bytes()
    source = f"data:image/gif;base64,{base64.b64encode(content).decode()}"
    command = f"deepenough plot {shlex.quote(path)}"
    caption = "The same as a moving picture, to be saved and sent."
    return [Shown("image", "Block probabilities, moving", caption, command, {"source": source})]


def _command(run: Run, path: str) -> str:
    return f"deepenough {_trained_by(run)[0]} --config {shlex.quote(f'{path}/config.yaml')}"


def _method(run: Run) -> str:
    return _trained_by(run)[1]


def _trained_by(run: Run) -> tuple[str, str]:
    """The command that trained the run, by what its settings have, and a heading for it."""
    sections = run.config
    data, model = (sections.get(name) or {} for name in ("data", "model"))
    if "search" in sections:
        return "search", "PAR search"
    if "dataset" in data:
        return "ponder train", "Ponder"
    if "train_nonzero" in data:
        return "ponder parity", "Ponder"
    if "encoder_steps" in model or "mechanism" in model:
        return "lazy train", "Lazy"
    return "train", "Language model"
