"""Figures of a PAR search: the probability of every block type over training, and the pattern.

Built from a run's records alone.
"""

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepenough import figure as fig
from deepenough.par.config import (
    BRANCH_NAMES,
    BRANCHES,
    IDENTITY,
    check_pattern,
    check_probabilities,
)

HEADING = "PAR"


@dataclass(frozen=True)
class BlockState:
    """The probabilities of the block types at one step."""

    step: int
    pi: np.ndarray
    """[num_blocks, 3], columns in the order of `BRANCHES`."""
    tau: float | None

    @property
    def pattern(self) -> str:
        """The most probable type of every block, as letters."""
        return "".join(BRANCHES[i] for i in self.pi.argmax(axis=1))

    def frame(self) -> fig.Frame:
        """Return the heat map of this step, the greatest value of each block written in."""
        tau = "" if self.tau is None else f", temperature {self.tau:.2f}"
        name = f"step {self.step:,}{tau}: {fig.shortened(self.pattern, 48)}"
        texts = [["" for _ in self.pi] for _ in BRANCHES]
        for block, row in enumerate(self.pi):
            texts[int(row.argmax())][block] = f"{row.max():.2f}"
        return fig.Frame(name, self.pi.T.tolist(), texts)


def block_states(run: fig.Run) -> list[BlockState]:
    """Return every state recorded in training with as many blocks as the last one."""
    states = [
        BlockState(record.step, pi, fig.number(record.values.get("tau")))
        for record in run.of_kind("train")
        if (pi := _probabilities(record.values.get("pi"))) is not None
    ]
    return [state for state in states if state.pi.shape == states[-1].pi.shape]


def _probabilities(value: Any) -> np.ndarray | None:
    """Return [num_blocks, 3] probabilities, or None if `value` is anything else."""
    with contextlib.suppress(ValueError):
        return np.array(check_probabilities(value))
    return None


def blocks_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return the probabilities of the block types at every recorded step."""
    frames = [state.frame() for state in block_states(run)]
    if not frames:
        return None
    last = frames[-1]
    panel = fig.HeatMap(
        [BRANCH_NAMES[letter] for letter in BRANCHES],
        [str(block + 1) for block in range(len(last.values[0]))],
        last.values,
        fig.Axis("block"),
        fig.Axis(),
        fig.Axis("probability", low=0.0, high=1.0),
        texts=last.texts,
        frames=frames,
        title=last.name,
    )
    return fig.FigureSpec(
        "blocks",
        "Block probabilities",
        "The probability of each type of block; the letters are the most probable types.",
        [panel],
        run.name,
        training_command(run),
        wide=True,
    )


def architecture_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return the pattern that was derived or given, or the one that is most probable so far."""
    pattern, what = _pattern(run)
    if not pattern:
        return None
    cost = fig.number(fig.last_value(run, "relative_cost"))
    return pattern_figure(pattern, f"{run.name}, {what}", cost, training_command(run))


def pattern_figure(
    pattern: str, subject: str = "", relative_cost: float | None = None, command: str = ""
) -> fig.FigureSpec:
    """Return the drawing of any pattern, such as `aadad-`; what is not known is not written."""
    facts = [fig.shortened(check_pattern(pattern), 64), *_counts(pattern)]
    if relative_cost is not None:
        facts.append(f"relative cost {relative_cost:.2f}")
    diagram = fig.Diagram([BRANCH_NAMES[letter] for letter in pattern], " · ".join(facts))
    caption = "The blocks from the input to the output; an identity passes its input on."
    return fig.FigureSpec(
        "architecture", "Architecture", caption, [diagram], subject, command, wide=True
    )


def _pattern(run: fig.Run) -> tuple[str, str]:
    """Return the pattern of a run and where it comes from, or nothing where no block computes."""
    model = run.config.get("model")
    given = model.get("pattern") if isinstance(model, Mapping) else None
    patterns = [(fig.last_value(run, "pattern"), "derived"), (given, "as given")]
    for state in block_states(run)[-1:]:
        patterns.append((state.pattern, f"most probable at step {state.step:,}"))
    for pattern, what in patterns:
        if isinstance(pattern, str) and set(pattern) <= set(BRANCHES) and set(pattern) - {IDENTITY}:
            return pattern, what
    return "", ""


def _counts(pattern: str) -> list[str]:
    return [f"{pattern.count(a)} {BRANCH_NAMES[a]}" for a in BRANCHES if a in pattern]


FIGURES: tuple[fig.FigureBuilder, ...] = (blocks_figure, architecture_figure)


def training_command(run: fig.Run) -> str:
    """Return the command that searches or trains the run again."""
    verb = "search" if "search" in run.config else "train"
    return f"deepenough par {verb} --config {shlex.quote(f'{run.path}/config.yaml')}"


def section(run: fig.Run) -> fig.Section | None:
    """Return what a search, or the training of a pattern, has recorded; None if nothing."""
    figures = fig.build_figures(run, FIGURES)
    states = block_states(run)
    findings = []
    pattern, what = _pattern(run)
    if states and pattern:
        start = "The search chose" if what == "derived" else "So far the most probable pattern is"
        least = float(states[-1].pi.max(axis=1).min())
        findings.append(
            f"{start} {pattern} ({', '.join(_counts(pattern))}); its least certain block has "
            f"probability {least:.2f}."
        )
    _, perplexities = fig.series(run, "test", "perplexity")
    if perplexities and (figures or run.method == "par"):
        whose = " of the mixture of all blocks" if "search" in run.config else ""
        findings.append(f"Perplexity{whose} on the test text: {perplexities[-1]:.4g}.")
    if not figures and not findings:
        return None
    about = ""
    if states:
        about = "Every block chooses between attention, a dense layer and nothing (identity); "
        about += "training makes the choice."
    heading = "PAR search" if states else "PAR model"
    return fig.Section(heading, about, findings, figures, fig.BLOCKS)
