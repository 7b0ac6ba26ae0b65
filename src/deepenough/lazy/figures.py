"""Figures of Lazy Transformers: how much each token still changes, and what stopping early saves.

Built from a run's records alone. Similarity is the squared cosine between a state before and after
a step: at 1 nothing changes. A gate is the share of the proposed update that a token takes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deepenough.figure import (
    BLACK,
    BLUE,
    GREEN,
    VERMILION,
    Axis,
    Bars,
    Chart,
    FigureBuilder,
    FigureSpec,
    HeatMap,
    Line,
    Panel,
    Rule,
    Run,
    Section,
    TokenText,
    build_figures,
    number,
    numbers,
    shortened,
    visible,
)
from deepenough.runs import Record

HEADING = "Lazy"
TOKENS, STOPS, STEPS, EPSILON, PROGRAMS = (
    "lazy_tokens",
    "lazy_rest",
    "steps",
    "epsilon",
    "programs",
)
"""Kinds of the records that are read here."""

MAX_TOKENS = 60
"""Tokens of one side that a heat map shows."""
MAX_NUMBERED = 16
"""More steps than this leave no room for a number in each cell."""
NO_LOSS = 0.2
"""BLEU points within which a score counts as unchanged."""


# -- records ----------------------------------------------------------------------------------


class SideNames(NamedTuple):
    """What a task calls its two sides, and many of the first."""

    source: str
    target: str
    sources: str


TRANSLATION = SideNames("source", "translation", "source sentences")
SIDE_NAMES = {"programs": SideNames("program", "output", "programs")}


def side_names(values: Mapping[str, Any]) -> SideNames:
    """Return the names for the task that a record gives; without one it is a translation."""
    return SIDE_NAMES.get(str(values.get("task")), TRANSLATION)


@dataclass(frozen=True)
class SideStates:
    """How the T tokens of one side change over N steps."""

    name: str
    tokens: list[str]
    similarity: np.ndarray
    """[T, N], squared cosine of a token's state before and after each step."""
    sentence: np.ndarray
    """[N], the same of the mean state."""
    gates: np.ndarray | None
    """[T, N], of lazy models."""
    depth: list[int] | None
    """Steps that each token made with early stopping, where that was measured."""


@dataclass(frozen=True)
class PairStates:
    """The inspected pair: a sentence and its translation, or a program and its output."""

    source: str
    target: str
    sides: Sequence[SideStates]
    epsilon: float | None
    names: SideNames = TRANSLATION


def last_pair(run: Run) -> PairStates | None:
    """Return the pair that was inspected last; None if its record is incomplete."""
    values = _last(run, TOKENS)
    if values is None:
        return None
    names = side_names(values)
    try:
        sides = [_side(names.source, values["encoder"]), _side(names.target, values["decoder"])]
        source, target = str(values["source"]), str(values["target"])
    except (KeyError, TypeError, ValueError):
        return None
    return PairStates(source, target, sides, number(values.get("epsilon")), names)


def _side(name: str, values: dict[str, Any]) -> SideStates:
    tokens = [str(token) for token in values["tokens"]]
    similarity = np.array(values["similarity"], dtype=float)
    sentence = np.array(values["sentence"], dtype=float)
    gates, depth = values.get("gates"), values.get("depth")
    gates = None if gates is None else np.array(gates, dtype=float)
    depth = None if depth is None else [int(steps) for steps in depth]
    shape = (len(tokens), len(sentence))
    if 0 in shape or similarity.shape != shape or (gates is not None and gates.shape != shape):
        raise ValueError("a table that does not fit its tokens")
    if depth is not None and len(depth) != len(tokens):
        raise ValueError("depths that do not fit their tokens")
    return SideStates(name, tokens, similarity, sentence, gates, depth)


def last_summary(run: Run) -> dict[str, Any] | None:
    """Return what was measured last over many sentences; None if its record is incomplete."""
    values = _last(run, STOPS)
    if values is None or numbers(values, "sentences") is None:
        return None
    try:
        curves = np.array([values["similarity"], *values["quartiles"]], dtype=float)
        counts = np.array(values.get("tokens_by_steps", [1]), dtype=float)
    except (KeyError, TypeError, ValueError):
        return None
    stops = "tokens_by_steps" not in values or numbers(values, "epsilon", "patience") is not None
    good = curves.shape[0] == 3 and curves.ndim == 2 and counts.ndim == 1 and counts.sum() > 0
    return values if good and stops else None


def step_grid(run: Run) -> dict[tuple[int, int], float]:
    """Return BLEU by encoder and decoder steps, the latest of each."""
    records = _with(run, STEPS, "encoder_steps", "decoder_steps", "bleu")
    return {
        (values["encoder_steps"], values["decoder_steps"]): values["bleu"]
        for values in _comparable(records, "epsilon", "patience")
    }


def epsilon_points(run: Run) -> list[dict[str, Any]]:
    """Return the measurements of the sweep over epsilons, the latest of each, by epsilon."""
    records = _with(run, EPSILON, "epsilon", "bleu", "encoder_flops", "encoder_seconds")
    same = ("encoder_steps", "decoder_steps", "patience")
    found = {values["epsilon"]: values for values in _comparable(records, *same)}
    return [found[epsilon] for epsilon in sorted(found)]


def _comparable(records: Sequence[Record], *names: str) -> list[dict[str, Any]]:
    """Return those measured on the same sentences in the same way as the last."""
    same = ("split", "test", "sentences", "beams", "decoder_epsilon", *names)
    ways = [tuple(record.values.get(name) for name in same) for record in records]
    return [record.values for record, way in zip(records, ways, strict=True) if way == ways[-1]]


def _with(run: Run, kind: str, *names: str) -> list[Record]:
    """Return the records of a kind that have a number under each of the names."""
    return [record for record in run.of_kind(kind) if numbers(record.values, *names) is not None]


def exact_shares(run: Run) -> tuple[list[int], dict[str, list[float | None]]] | None:
    """Return lengths, and by kind of program the share executed exactly at each length."""
    values = _last(run, PROGRAMS)
    try:
        rows = [] if values is None else list(values["exact_by"])
        counts: dict[tuple[str, int], np.ndarray] = {}
        for row in rows:
            key = (str(row["kind"]), int(row["length"]))
            own = np.array([row["exact"] * row["programs"], row["programs"]], dtype=float)
            counts[key] = counts.get(key, np.zeros(2)) + own
    except (KeyError, TypeError, ValueError):
        return None
    lengths = sorted({length for _, length in counts})
    shares: dict[str, list[float | None]] = {}
    for kind in dict.fromkeys(kind for kind, _ in counts):
        own_counts = [counts.get((kind, length)) for length in lengths]
        shares[kind] = [float(c[0] / c[1]) if c is not None and c[1] else None for c in own_counts]
    return (lengths, shares) if counts else None


def _last(run: Run, kind: str) -> dict[str, Any] | None:
    found = run.of_kind(kind)
    return found[-1].values if found else None


# -- figures ----------------------------------------------------------------------------------


def tokens_figure(run: Run) -> FigureSpec | None:
    """Return gates and similarities of the inspected pair, token by step."""
    pair = last_pair(run)
    if pair is None:
        return None
    panels = []
    for side in pair.sides:
        if side.gates is not None:
            scale = Axis("gate", "root", low=0.0, high=1.0)
            panels.append(_heat(side, side.gates, scale, "gate (share of the update taken)"))
        low = math.floor(10 * min(float(side.similarity.min()), 0.9)) / 10
        scale = Axis("similarity", "angle", low=max(low, 0.0), high=1.0)
        panels.append(_heat(side, side.similarity, scale, "similarity to the step before"))
    caption = f"“{shortened(pair.source, 80)}” and “{shortened(pair.target, 80)}”."
    if any(panel.framed for panel in panels):
        caption += f" Frames: the last step of a token with epsilon {pair.epsilon:g}."
    longest = max(len(side.tokens) for side in pair.sides)
    if longest > MAX_TOKENS:
        caption += f" The first {MAX_TOKENS} of {longest} tokens are shown."
    columns = 2 if pair.sides[0].gates is not None else 1
    command = _inspect_pair(run, pair)
    return FigureSpec(
        "lazy_tokens", "How much each token still changes", caption, panels, run.name, command,
        columns=columns, wide=True,
    )  # fmt: skip


def _heat(side: SideStates, values: np.ndarray, scale: Axis, title: str) -> HeatMap:
    shown = values[:MAX_TOKENS]
    framed = []
    if scale.label == "gate" and side.depth is not None:
        framed = [(token, steps - 1) for token, steps in enumerate(side.depth[:MAX_TOKENS])]
    texts = [[_digits(value) for value in row] for row in shown]
    return HeatMap(
        [shortened(visible(token), 16) for token in side.tokens[:MAX_TOKENS]],
        [str(step + 1) for step in range(shown.shape[1])],
        shown.tolist(),
        Axis("step"),
        Axis(),
        scale,
        texts=texts if shown.shape[1] <= MAX_NUMBERED else (),
        framed=framed,
        title=f"{side.name}: {title}",
    )


def _digits(value: float) -> str:
    """Return two digits behind the point, three where a value is almost 1."""
    text = f"{value:.3f}" if 0.985 <= value < 0.9995 else f"{value:.2f}"
    return "1" if text == "1.00" else text.removeprefix("0")


def depth_figure(run: Run) -> FigureSpec | None:
    """Return the inspected source, every token shaded by the steps it made."""
    pair = last_pair(run)
    if pair is None or pair.sides[0].depth is None or pair.epsilon is None:
        return None
    side = pair.sides[0]
    assert side.depth is not None
    tokens = [visible(token) for token in side.tokens]
    num_steps = side.similarity.shape[1]
    panel = TokenText(tokens, [float(n) for n in side.depth], num_steps, "steps made")
    caption = f"A dark token stopped early, a bright one made all {num_steps} steps; epsilon is "
    caption += f"{pair.epsilon:g}."
    title = f"Steps of each token of the {side.name}"
    command = _inspect_pair(run, pair)
    return FigureSpec("lazy_depth", title, caption, [panel], run.name, command, wide=True)


def sentence_figure(run: Run) -> FigureSpec | None:
    """Return how much the mean state still changes from step to step."""
    pair, many = last_pair(run), last_summary(run)
    lines = []
    caption = "Squared cosine of the mean state before and after each step; at 1 nothing changes."
    if many is not None:
        mean = [float(value) for value in many["similarity"]]
        low, high = many["quartiles"]
        name = f"mean of {many['sentences']} {side_names(many).sources}"
        lines.append(Line(name, _counted(mean), mean, BLUE, low=low, high=high))
        caption += " The band holds the middle half of them."
    for side, color, style in zip(
        pair.sides if pair else (), (BLACK, VERMILION), ("dashed", "dotted"), strict=False
    ):
        own = side.sentence.tolist()
        lines.append(Line(f"the inspected {side.name}", _counted(own), own, color, style))
    if not lines:
        return None
    lowest = min(min([*line.y, *line.low]) for line in lines)
    y = Axis("similarity to the step before", "angle", low=max(0.0, lowest - 0.05), high=1.0)
    chart = Chart(Axis("step", whole=True), y, lines)
    command = _inspect_many(run, many)
    title = "How much a whole sentence still changes"
    return FigureSpec("lazy_sentence", title, caption, [chart], run.name, command)


def _counted(values: Sequence[float]) -> list[float]:
    return [float(step) for step in range(1, len(values) + 1)]


def stops_figure(run: Run) -> FigureSpec | None:
    """Return after how many steps source tokens stop; None for a model that does not stop."""
    many = last_summary(run)
    if many is None or "tokens_by_steps" not in many:
        return None
    names = side_names(many)
    counts = np.array(many["tokens_by_steps"], dtype=float)
    shares = counts / counts.sum()
    mean = float(shares @ np.arange(1, len(counts) + 1))
    last = len(counts) - 1
    bars = Bars(
        names.sources, shares.tolist(), BLUE, texts=[f"{part:.0%}" for part in shares],
        hatched=[last],
    )  # fmt: skip
    chart = Chart(
        Axis(f"steps that a token of the {names.source} makes"),
        Axis(f"tokens of {many['sentences']} {names.sources}", percent=True, low=0.0),
        bars=[bars],
        categories=[str(step + 1) for step in range(len(counts))],
        rules=[Rule(mean - 1, f"mean: {mean:.1f} of {len(counts)} steps", vertical=True)],
    )
    caption = (
        f"With epsilon {many['epsilon']:g} and patience {many['patience']}. Tokens of the last "
        "step (hatched) may still be changing: there were no more steps."
    )
    command = _inspect_many(run, many)
    return FigureSpec("lazy_stops", "When tokens stop", caption, [chart], run.name, command)


def grid_figure(run: Run) -> FigureSpec | None:
    """Return BLEU for other numbers of steps than those of training."""
    found = step_grid(run)
    if not found:
        return None
    encoder, decoder = (sorted({key[side] for key in found}) for side in (0, 1))
    caption = "The same weights, run for more or fewer steps than they were trained with."
    framed: list[tuple[int, int]] = []
    trained = _trained_steps(run)
    if trained in found:
        framed = [(decoder.index(trained[1]), encoder.index(trained[0]))]
        caption += " Framed: the steps of training."
    values = [[found.get((e, d)) for e in encoder] for d in decoder]
    panel = HeatMap(
        [f"{steps}" for steps in decoder],
        [f"{steps}" for steps in encoder],
        values,
        Axis("encoder steps"),
        Axis("decoder steps"),
        Axis("BLEU", low=min(found.values()), high=max(found.values())),
        texts=[["" if value is None else f"{value:.1f}" for value in row] for row in values],
        framed=framed,
        upwards=True,
    )
    command = _sweep(run, encoder_steps=encoder, decoder_steps=decoder, epsilons=[])
    title = "BLEU by number of steps"
    return FigureSpec("lazy_steps", title, caption, [panel], run.name, command)


def _trained_steps(run: Run) -> tuple[int, int]:
    model = run.config.get("model", {})
    try:
        return int(model["encoder_steps"]), int(model["decoder_steps"])
    except (KeyError, TypeError, ValueError):
        return (-1, -1)


def epsilon_figure(run: Run) -> FigureSpec | None:
    """Return BLEU against the encoder's FLOPs and seconds; None without a sweep from epsilon 0."""
    points = epsilon_points(run)
    full = next((point for point in points if point["epsilon"] == 0.0), None)
    if full is None or len(points) < 2:
        return None
    panels: list[Panel] = []
    labels = [f"{point['epsilon']:g}" for point in points]
    scores = [float(point["bleu"]) for point in points]
    for cost, name, color in (
        ("encoder_flops", "encoder FLOPs", BLUE),
        ("encoder_seconds", "encoder seconds", GREEN),
    ):
        shares = [float(point[cost] / full[cost]) for point in points]
        line = Line(name, shares, scores, color, labels=labels)
        x = Axis(f"{name}, relative to epsilon 0", percent=True)
        panels.append(Chart(x, Axis("BLEU"), [line], title=name))
    caption = "A token stops when its change falls below epsilon, the number at each point."
    command = _sweep(run, encoder_steps=[], epsilons=[point["epsilon"] for point in points])
    return FigureSpec(
        "lazy_epsilon", "BLEU against the encoder's cost", caption, panels, run.name, command,
        columns=2, wide=True,
    )  # fmt: skip


def programs_figure(run: Run) -> FigureSpec | None:
    """Return the share of programs executed exactly, by kind and length."""
    found = exact_shares(run)
    if found is None:
        return None
    lengths, shares = found
    chart = Chart(
        Axis("digits of the numbers"),
        Axis("programs with every digit correct", percent=True, low=0.0, high=1.0),
        bars=[Bars(kind, values) for kind, values in shares.items()],
        categories=[str(length) for length in lengths],
    )
    caption = "On programs that were never trained on."
    command = f"deepenough lazy eval {shlex.quote(run.path)}"
    title = "Programs executed correctly"
    return FigureSpec("lazy_programs", title, caption, [chart], run.name, command)


FIGURES: tuple[FigureBuilder, ...] = (
    tokens_figure,
    depth_figure,
    sentence_figure,
    stops_figure,
    grid_figure,
    epsilon_figure,
    programs_figure,
)


def _inspect_pair(run: Run, pair: PairStates) -> str:
    words = [run.path, "--source", pair.source, "--target", pair.target]
    words += [] if pair.epsilon is None else ["--epsilon", f"{pair.epsilon:g}"]
    return f"deepenough lazy plot {shlex.join(words)}"


def _inspect_many(run: Run, many: dict[str, Any] | None) -> str:
    words = [run.path]
    if many is not None:
        words += ["--sentences", str(many["sentences"])]
        words += [] if "epsilon" not in many else ["--epsilon", f"{many['epsilon']:g}"]
    return f"deepenough lazy plot {shlex.join(words)}"


def _sweep(run: Run, **lists: list[Any]) -> str:
    words = [run.path]
    for name, values in lists.items():
        words += [f"--{name}", f"[{','.join(f'{value:g}' for value in values)}]"]
    return f"deepenough lazy sweep {shlex.join(words)}"


def training_command(run: Run) -> str:
    """Return the command that trains the run again."""
    return f"deepenough lazy train --config {shlex.quote(f'{run.path}/config.yaml')}"


# -- section ----------------------------------------------------------------------------------


def section(run: Run) -> Section | None:
    """Return what a Lazy Transformer or its baselines have recorded, or None if nothing."""
    figures = build_figures(run, FIGURES)
    findings = [*_epsilon_findings(run), *_exact_findings(run), *_change_findings(run)]
    perplexities = [number(record.values.get("perplexity")) for record in run.of_kind("test")]
    if run.method == "lazy" and perplexities and perplexities[-1] is not None:
        findings.append(f"Perplexity on the test text: {perplexities[-1]:.4g}.")
    if not figures and not findings:
        return None
    about = "One block is applied several times."
    pair = last_pair(run)
    if pair is not None and pair.sides[0].gates is not None:
        about += " A gate decides how much of each update a token takes, and a token whose gate "
        about += "stays below epsilon is not computed any further."
    return Section(HEADING, about, findings, figures)


def _epsilon_findings(run: Run) -> list[str]:
    points = epsilon_points(run)
    full = next((point for point in points if point["epsilon"] == 0.0), None)
    if full is None or len(points) < 2:
        return []
    alike = [p for p in points if p["bleu"] >= full["bleu"] - NO_LOSS]
    least = min(alike, key=lambda p: p["encoder_flops"])
    found = f"BLEU {full['bleu']:.1f} with all steps"
    if least is full:
        return [f"{found}; no epsilon that was measured saves FLOPs within {NO_LOSS} of it."]
    part = 100 * least["encoder_flops"] / full["encoder_flops"]
    return [
        f"{found}; {least['bleu']:.1f} at epsilon {least['epsilon']:g}, with {part:.0f} % of the "
        "encoder's FLOPs."
    ]


def _exact_findings(run: Run) -> list[str]:
    exact = number((_last(run, PROGRAMS) or {}).get("exact"))
    if exact is None:
        return []
    return [f"{100 * exact:.1f} % of programs never trained on are executed without an error."]


def _change_findings(run: Run) -> list[str]:
    pair = last_pair(run)
    if pair is None:
        return []
    last = float(np.mean([side.similarity[:, -1].mean() for side in pair.sides]))
    start = "States hardly change in" if last > 0.98 else "States still change in"
    return [f"{start} the last step: their mean similarity to the step before is {last:.3f}."]
