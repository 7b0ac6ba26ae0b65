"""Figures of a PAR search: the probability of every block type over training, and the pattern.

Built from a run's records alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepenough.errors import UserError
from deepenough.figure import (
    Axis,
    Diagram,
    FigureBuilder,
    FigureSpec,
    Frame,
    HeatMap,
    Run,
    Section,
    build_figures,
    last_value,
    number,
    shortened,
)
from deepenough.par.config import BRANCH_NAMES, BRANCHES

HEADING = "PAR"


@dataclass(frozen=True)
class BlockState:
    """The probabilities of the block types at one step."""

    step: int
    pi: np.ndarray
    """[num_blocks, 3], columns in the order of `BRANCHES`."""
    tau: float | None = None

    @property
    def pattern(self) -> str:
        """The most probable type of every block, as letters."""
        return "".join(BRANCHES[i] for i in self.pi.argmax(axis=1))

    @property
    def name(self) -> str:
        """Step, temperature where it is known, and pattern."""
        tau = "" if self.tau is None else f", temperature {self.tau:.2f}"
        return f"step {self.step:,}{tau}: {shortened(self.pattern, 48)}"


def block_states(run: Run) -> list[BlockState]:
    """Return every recorded state with as many blocks as the last one, a step once."""
    states: dict[int, BlockState] = {}
    for record in run.records:
        pi = _probabilities(record.values.get("pi"))
        if pi is None:
            continue
        tau = number(record.values.get("tau"))
        earlier = states.get(record.step)
        if tau is None and earlier is not None:
            tau = earlier.tau
        states[record.step] = BlockState(record.step, pi, tau)
    ordered = [states[step] for step in sorted(states)]
    return [s for s in ordered if s.pi.shape == ordered[-1].pi.shape]


def _probabilities(value: Any) -> np.ndarray | None:
    """Return [num_blocks, 3] probabilities, or None if `value` is anything else."""
    try:
        pi = np.array(value, dtype=float)
    except (TypeError, ValueError):
        return None
    if pi.ndim != 2 or pi.shape[0] == 0 or pi.shape[1] != len(BRANCHES):
        return None
    # 1e-2 forgives values rounded for the file; anything further off is not a distribution.
    sums_to_one = np.all(np.abs(pi.sum(axis=1) - 1) < 1e-2)
    return pi if np.all(np.isfinite(pi)) and np.all(pi >= 0) and sums_to_one else None


def blocks_figure(run: Run) -> FigureSpec | None:
    """Return the probabilities of the block types at every recorded step."""
    states = block_states(run)
    if not states:
        return None
    frames = [Frame(state.name, state.pi.T.tolist(), _leading_texts(state)) for state in states]
    panel = HeatMap(
        [BRANCH_NAMES[letter] for letter in BRANCHES],
        [str(block + 1) for block in range(len(states[-1].pi))],
        frames[-1].values,
        Axis("block"),
        Axis(),
        Axis("probability", low=0.0, high=1.0),
        texts=frames[-1].texts,
        frames=frames,
        title=frames[-1].name,
    )
    caption = "The probability of each type of block; the letters are the most probable types."
    return FigureSpec(
        "blocks",
        "Block probabilities",
        caption,
        [panel],
        run.name,
        training_command(run),
        wide=True,
    )


def _leading_texts(state: BlockState) -> list[list[str]]:
    """Return the greatest value of each block as text: it is what the pattern is read from."""
    texts = [["" for _ in state.pi] for _ in BRANCHES]
    for block, row in enumerate(state.pi):
        texts[int(row.argmax())][block] = f"{row.max():.2f}"
    return texts


def architecture_figure(run: Run) -> FigureSpec | None:
    """Return the pattern that was derived or given, or the one that is most probable so far."""
    pattern, what = _pattern(run)
    if not pattern:
        return None
    return pattern_figure(
        pattern,
        f"{run.name}, {what}",
        parameters=number(last_value(run, "parameters")),
        relative_cost=number(last_value(run, "relative_cost")),
        command=training_command(run),
    )


def pattern_figure(
    pattern: str,
    subject: str = "",
    *,
    parameters: float | None = None,
    relative_cost: float | None = None,
    command: str = "",
) -> FigureSpec:
    """Return the drawing of any pattern, such as `aadad-`; what is not known is not written."""
    if not pattern:
        raise UserError("The pattern is empty; give one letter a block, such as aadad-.")
    unknown = sorted(set(pattern) - set(BRANCHES))
    if unknown:
        raise UserError(
            f"The pattern {shortened(pattern)!r} has the unknown letter {unknown[0]!r}; "
            "use a for attention, d for dense and - for identity."
        )
    facts = [shortened(pattern, 64), *_counts(pattern)]
    if parameters is not None:
        facts.append(f"{parameters / 1e6:.4g}M parameters")
    if relative_cost is not None:
        facts.append(f"relative cost {relative_cost:.2f}")
    diagram = Diagram([BRANCH_NAMES[letter] for letter in pattern], " · ".join(facts))
    caption = "The blocks from the input to the output; an identity passes its input on."
    return FigureSpec(
        "architecture", "Architecture", caption, [diagram], subject, command, wide=True
    )


def _pattern(run: Run) -> tuple[str, str]:
    """Return the pattern of a run, or nothing, and where it comes from."""
    derived = _known(last_value(run, "pattern"))
    if derived:
        return derived, "derived"
    for place in (run.config.get("model"), run.config):
        given = _known(place.get("pattern")) if isinstance(place, Mapping) else ""
        if given:
            return given, "as given"
    states = block_states(run)
    return (
        (states[-1].pattern, f"most probable at step {states[-1].step:,}") if states else ("", "")
    )


def _known(value: object) -> str:
    """Return `value` if it is a pattern that can be drawn, else nothing."""
    return value if isinstance(value, str) and value and set(value) <= set(BRANCHES) else ""


def _counts(pattern: str) -> list[str]:
    return [f"{pattern.count(a)} {BRANCH_NAMES[a]}" for a in BRANCHES if a in pattern]


FIGURES: tuple[FigureBuilder, ...] = (blocks_figure, architecture_figure)


def training_command(run: Run) -> str:
    """Return the command that searches or trains the run again."""
    verb = "search" if "search" in run.config else "train"
    return f"deepenough par {verb} --config {shlex.quote(f'{run.path}/config.yaml')}"


def section(run: Run) -> Section | None:
    """Return what a search, or the training of a pattern, has recorded; None if nothing."""
    figures = build_figures(run, FIGURES)
    states = block_states(run)
    findings = []
    pattern, _ = _pattern(run)
    if states:
        derived = bool(_known(last_value(run, "pattern")))
        start = "The search chose" if derived else "So far the most probable pattern is"
        least = float(states[-1].pi.max(axis=1).min())
        findings.append(
            f"{start} {pattern} ({', '.join(_counts(pattern))}); its least certain block has "
            f"probability {least:.2f}."
        )
    perplexities = [number(record.values.get("perplexity")) for record in run.of_kind("test")]
    if perplexities and perplexities[-1] is not None and (figures or run.method == "par"):
        whose = " of the mixture of all blocks" if "search" in run.config else ""
        findings.append(f"Perplexity{whose} on the test text: {perplexities[-1]:.4g}.")
    if not figures and not findings:
        return None
    about = ""
    if states:
        about = "Every block chooses between attention, a dense layer and nothing (identity); "
        about += "training makes the choice."
    return Section("PAR search" if states else "PAR model", about, findings, figures)
