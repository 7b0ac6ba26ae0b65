"""Figures of Lazy Transformers: how much each token still changes, and what stopping early saves.

Built from a run's records alone. Similarity is the squared cosine between a state before and after
a step: at 1 nothing changes. A gate is the share of the proposed update that a token takes.
"""

import contextlib
import functools
import math
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

from deepenough import figure as fig

HEADING = "Lazy"
TOKENS, STEPS, PROGRAMS = "lazy_tokens", "steps", "programs"
"""Kinds of the records that are read here."""

SIDES = {"encoder": "source", "decoder": "target"}
QUALITIES = {"bleu": "BLEU", "exact": "exact match", "perplexity": "perplexity"}
"""What a task is measured by: the name in a record, and the one people use."""
MAX_TOKENS = 60
"""Tokens of one side that a heat map shows."""
MAX_NUMBERED = 16
"""More steps than this leave no room for a number in each cell."""


# -- records ----------------------------------------------------------------------------------


SAME = (
    *("split", "test", "sentences", "programs", "length", "nesting", "beams", "length_penalty"),
    *("length_formula", "epsilon", "decoder_epsilon", "patience", "halt_on"),
)
"""What is the same in all points of a sweep over steps."""


def step_points(run: fig.Run) -> tuple[str, list[dict[str, Any]]]:
    """Return what a sweep over steps measured, and its points as far as measured as the last."""
    found = [
        r.values for r in run.of_kind(STEPS) if fig.numbers(r.values, "decoder_steps") is not None
    ]
    quality = next(name for name in (*QUALITIES, "") if name in found[-1] or not name)
    last = [found[-1].get(name) for name in SAME]
    points = [values for values in found if [values.get(name) for name in SAME] == last]
    return quality, [values for values in points if fig.number(values.get(quality)) is not None]


def step_grid(run: fig.Run) -> dict[tuple[int, int], float]:
    """Return the quality by encoder and decoder steps; a language model makes 0 of the former."""
    quality, points = step_points(run)
    return {
        (values.get("encoder_steps", 0), values["decoder_steps"]): values[quality]
        for values in points
    }


def _last(run: fig.Run, kind: str) -> dict[str, Any]:
    """Return the values of the last record of a kind, none if there is no record."""
    found = run.of_kind(kind)
    return found[-1].values if found else {}


# -- figures ----------------------------------------------------------------------------------


def _if_recorded(build: Callable[[fig.Run], fig.FigureSpec]) -> fig.FigureBuilder:
    """Return a builder that returns None where the run lacks a record, or it is damaged."""

    @functools.wraps(build)
    def guarded(run: fig.Run) -> fig.FigureSpec | None:
        with contextlib.suppress(
            LookupError, TypeError, ValueError, AttributeError, ArithmeticError
        ):
            return build(run)
        return None

    return guarded


@_if_recorded
def tokens_figure(run: fig.Run) -> fig.FigureSpec:
    """Return gates and similarities of the inspected pair, token by step."""
    pair = _last(run, TOKENS)
    panels = []
    for side, name in _sides(pair).items():
        part = pair[side]
        if "gates" in part:
            scale = fig.Axis("gate", "root", low=0.0, high=1.0)
            panels.append(_heat(part, "gates", scale, f"{name}: gate (share of the update taken)"))
        low = math.floor(10 * min(*map(min, part["similarity"]), 0.9)) / 10
        scale = fig.Axis("similarity", "angle", low=max(low, 0.0), high=1.0)
        panels.append(_heat(part, "similarity", scale, f"{name}: similarity to the step before"))
    texts = [pair[key] for key in ("source", "target") if key in pair]
    caption = " and ".join(f"“{fig.shortened(fig.visible(text), 80)}”" for text in texts) + "."
    if any(panel.framed for panel in panels):
        caption += f" Frames: the last step of a token with epsilon {pair['epsilon']:g}."
    longest = max(len(pair[side]["tokens"]) for side in _sides(pair))
    if longest > MAX_TOKENS:
        caption += f" The first {MAX_TOKENS} of {longest} tokens are shown."
    title, columns = "How much each token still changes", len(panels) // len(_sides(pair))
    command = _plot_command(run, pair)
    return fig.FigureSpec(
        "lazy_tokens", title, caption, panels, run.name, command, columns=columns, wide=True
    )


def _sides(pair: dict[str, Any]) -> dict[str, str]:
    """Return the sides of an inspected text and their names; a language model has one."""
    found = {side: name for side, name in SIDES.items() if side in pair}
    return found if "encoder" in found else {"decoder": "text"}


def _heat(part: dict[str, Any], key: str, scale: fig.Axis, title: str) -> fig.HeatMap:
    """Return one table of a side, tokens by steps; the last steps are framed in that of gates."""
    tokens, num_steps = part["tokens"], len(part["sentence"])
    table = np.array(part[key], dtype=float)
    depth = part.get("depth", ()) if key == "gates" else ()
    if table.shape != (len(tokens), num_steps) or len(depth) not in (0, len(tokens)):
        raise ValueError("a table that does not fit its tokens")
    names = [fig.shortened(fig.visible(token), 16) for token in tokens[:MAX_TOKENS]]
    steps = [str(step + 1) for step in range(num_steps)]
    framed = [(token, last - 1) for token, last in enumerate(depth[:MAX_TOKENS])]
    return _step_map(
        names, steps, table[:MAX_TOKENS], fig.Axis(), scale, title=title, framed=framed
    )


def _step_map(
    rows: list[str], steps: list[str], table: np.ndarray, y: fig.Axis, scale: fig.Axis, **look: Any
) -> fig.HeatMap:
    """Return a table by steps, with its numbers where there is room for them."""
    texts = [[_digits(value) for value in row] for row in table]
    look["texts"] = texts if len(steps) <= MAX_NUMBERED else ()
    return fig.HeatMap(rows, steps, table.tolist(), fig.Axis("step"), y, scale, **look)


def _digits(value: float) -> str:
    """Return two digits behind the point, three where a value is almost 1."""
    text = f"{value:.3f}" if 0.985 <= value < 0.9995 else f"{value:.2f}"
    return "1" if text == "1.00" else text.removeprefix("0")


@_if_recorded
def sentence_figure(run: fig.Run) -> fig.FigureSpec:
    """Return how much the mean state of each side still changes from step to step."""
    pair = _last(run, TOKENS)
    lines = []
    looks = {"encoder": (fig.BLUE, "solid"), "decoder": (fig.VERMILION, "dashed")}
    for side, name in _sides(pair).items():
        own = pair[side]["sentence"]
        steps = [float(step) for step in range(1, len(own) + 1)]
        lines.append(fig.Line(name, steps, own, *looks[side]))
    lowest = min(min(line.y) for line in lines)
    y = fig.Axis("similarity to the step before", "angle", low=max(0.0, lowest - 0.05), high=1.0)
    caption = "Squared cosine of the mean state before and after each step; at 1 nothing changes."
    chart = fig.Chart(fig.Axis("step", whole=True), y, lines)
    title = "How much a whole sentence still changes"
    return fig.FigureSpec(
        "lazy_sentence", title, caption, [chart], run.name, _plot_command(run, pair)
    )


@_if_recorded
def cka_figure(run: fig.Run) -> fig.FigureSpec:
    """Return how alike all states of the inspected text are at any two steps."""
    pair = _last(run, TOKENS)
    panels = []
    for side, name in _sides(pair).items():
        table = np.array(pair[side]["cka"], dtype=float)
        steps = [str(step) for step in range(len(pair[side]["sentence"]) + 1)]
        if table.shape != (len(steps), len(steps)):
            raise ValueError("a table that does not fit its steps")
        scale = fig.Axis("CKA", low=math.floor(10 * table.min()) / 10, high=1.0)
        look = {"upwards": True, "square": True, "title": f"{name}: CKA of the states at two steps"}
        panels.append(_step_map(steps, steps, table, fig.Axis("step"), scale, **look))
    caption = f"Linear CKA over the tokens of “{fig.shortened(fig.visible(pair['source']), 80)}”"
    caption += " and its target" * ("target" in pair) + "; step 0 are the embeddings."
    title = "How alike a sentence is at any two steps"
    command = _plot_command(run, pair)
    return fig.FigureSpec(
        "lazy_cka", title, caption, panels, run.name, command, columns=len(panels), wide=True
    )


@_if_recorded
def grid_figure(run: fig.Run) -> fig.FigureSpec:
    """Return the quality for other numbers of steps than those of training."""
    found = step_grid(run)
    quality = QUALITIES[step_points(run)[0]]
    title = f"{quality[0].upper()}{quality[1:]} by number of steps"
    encoder, decoder = (sorted({key[side] for key in found}) for side in (0, 1))
    caption = "The same weights, run for more or fewer steps than they were trained with."
    model = run.config.get("model")
    trained: tuple[Any, ...] = ()
    if isinstance(model, dict):
        trained = model.get("encoder_steps"), model.get("decoder_steps")
    framed = []
    if trained in found:
        framed = [(decoder.index(trained[1]), encoder.index(trained[0]))]
        caption += " Framed: the steps of training."
    if encoder == [0]:
        line = fig.Line(
            quality, [float(d) for d in decoder], [found[0, d] for d in decoder], fig.BLUE
        )
        chart = fig.Chart(fig.Axis("steps", whole=True), fig.Axis(quality), [line])
        command = _command(run, "sweep", decoder_steps=decoder)
        return fig.FigureSpec("lazy_steps", title, caption, [chart], run.name, command)
    values = [[found.get((e, d)) for e in encoder] for d in decoder]
    panel = fig.HeatMap(
        [f"{steps}" for steps in decoder],
        [f"{steps}" for steps in encoder],
        values,
        fig.Axis("encoder steps"),
        fig.Axis("decoder steps"),
        fig.Axis(quality, low=min(found.values()), high=max(found.values())),
        texts=[["" if value is None else f"{value:.3g}" for value in row] for row in values],
        framed=framed,
        upwards=True,
    )
    command = _command(run, "sweep", encoder_steps=encoder, decoder_steps=decoder)
    return fig.FigureSpec("lazy_steps", title, caption, [panel], run.name, command)


FIGURES: tuple[fig.FigureBuilder, ...] = (tokens_figure, sentence_figure, cka_figure, grid_figure)


def _plot_command(run: fig.Run, pair: dict[str, Any]) -> str:
    options = {name: pair.get(name) for name in ("source", "epsilon", "halt_on")}
    return _command(run, "plot", **options)


def _command(run: fig.Run, verb: str, **options: Any) -> str:
    """Return a command line without the options that are None; lists become `[1,2]`."""
    words = [run.path]
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", f"[{','.join(f'{item:g}' for item in value)}]"]
        elif value is not None:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return f"deepenough lazy {verb} {shlex.join(words)}"


def training_command(run: fig.Run) -> str:
    """Return the command that trains the run again."""
    return f"deepenough lazy train --config {shlex.quote(f'{run.path}/config.yaml')}"


# -- section ----------------------------------------------------------------------------------


def section(run: fig.Run) -> fig.Section | None:
    """Return what a Lazy Transformer or its baselines have recorded, or None if nothing."""
    figures = fig.build_figures(run, FIGURES)
    findings = []
    exact = fig.number(_last(run, PROGRAMS).get("exact"))
    if exact is not None:
        findings.append(
            f"{100 * exact:.1f} % of programs never trained on are executed without an error."
        )
    perplexity = fig.number(_last(run, "test").get("perplexity"))
    if run.method == "lazy" and perplexity is not None:
        findings.append(f"Perplexity on the test text: {perplexity:.4g}.")
    if not figures and not findings:
        return None
    about = "One block is applied several times."
    if _last(run, TOKENS).get("epsilon") is not None:
        about += " A gate decides how much of each update a token takes, and a token whose gate "
        about += "stays below epsilon is not computed any further."
    return fig.Section(HEADING, about, findings, figures, fig.CHANGES)
