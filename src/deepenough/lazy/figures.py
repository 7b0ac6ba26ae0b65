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
    build_figures,
    number,
    numbers,
    shortened,
    visible,
)

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
    last_steps: list[tuple[int, int]]
    """Every token with the index of its last step, where early stopping was measured."""


def last_pair(run: Run) -> tuple[dict[str, Any], list[SideStates]] | None:
    """Return the record of the pair that was inspected last and its two sides; None if broken."""
    values = _last(run, TOKENS)
    names = side_names(values)
    try:
        sides = [_side(names.source, values["encoder"]), _side(names.target, values["decoder"])]
    except (KeyError, TypeError, ValueError):
        return None
    return values, sides


def _side(name: str, values: dict[str, Any]) -> SideStates:
    tokens = [str(token) for token in values["tokens"]]
    sentence = np.array(values["sentence"], dtype=float)
    similarity, gates = (
        None if values.get(key) is None else np.array(values[key], dtype=float)
        for key in ("similarity", "gates")
    )
    last_steps = [(token, int(steps) - 1) for token, steps in enumerate(values.get("depth", ()))]
    shape = (len(tokens), len(sentence))
    tables = [table for table in (similarity, gates) if table is not None]
    fits = all(table.shape == shape for table in tables) and len(last_steps) in (0, shape[0])
    if 0 in shape or similarity is None or not fits:
        raise ValueError("a table that is missing or does not fit its tokens")
    return SideStates(name, tokens, similarity, sentence, gates, last_steps)


def last_summary(run: Run) -> dict[str, Any] | None:
    """Return what was measured last over many sentences; None if its record is incomplete."""
    values = _last(run, STOPS)
    try:
        curves = np.array([values["similarity"], *values["quartiles"]], dtype=float)
        counts = np.array(values.get("tokens_by_steps", [1]), dtype=float)
    except (KeyError, TypeError, ValueError):
        return None
    needed = ("sentences", "epsilon", "patience")
    has_numbers = numbers(values, *needed[: 3 if "tokens_by_steps" in values else 1]) is not None
    good = curves.shape[0] == 3 and curves.ndim == 2 and counts.ndim == 1 and counts.sum() > 0
    return values if good and has_numbers else None


def step_grid(run: Run) -> dict[tuple[int, int], float]:
    """Return BLEU by encoder and decoder steps, the latest of each."""
    found = _comparable(run, STEPS, ("encoder_steps", "decoder_steps", "bleu"), ("epsilon",))
    return {(point["encoder_steps"], point["decoder_steps"]): point["bleu"] for point in found}


def epsilon_points(run: Run) -> list[dict[str, Any]]:
    """Return the sweep over epsilons, the latest measurement of each, by epsilon."""
    names = ("epsilon", "bleu", "encoder_flops", "encoder_seconds")
    found = _comparable(run, EPSILON, names, ("encoder_steps", "decoder_steps"))
    latest = {point["epsilon"]: point for point in found}
    return [latest[epsilon] for epsilon in sorted(latest)]


def _comparable(
    run: Run, kind: str, names: tuple[str, ...], same: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the measurements with these numbers that were made in the same way as the last."""
    same = ("split", "test", "sentences", "beams", "decoder_epsilon", "patience", *same)
    found = [r.values for r in run.of_kind(kind) if numbers(r.values, *names) is not None]
    ways = [[values.get(name) for name in same] for values in found]
    return [values for values, way in zip(found, ways, strict=True) if way == ways[-1]]


def exact_shares(run: Run) -> tuple[list[int], dict[str, list[float | None]]] | None:
    """Return lengths, and by kind of program the share executed exactly at each length."""
    counts: dict[tuple[str, int], np.ndarray] = {}
    try:
        for row in _last(run, PROGRAMS).get("exact_by", ()):
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


def _last(run: Run, kind: str) -> dict[str, Any]:
    """Return the values of the last record of a kind, none if there is no record."""
    found = run.of_kind(kind)
    return found[-1].values if found else {}


# -- figures ----------------------------------------------------------------------------------


def tokens_figure(run: Run) -> FigureSpec | None:
    """Return gates and similarities of the inspected pair, token by step."""
    found = last_pair(run)
    if found is None:
        return None
    pair, sides = found
    panels = []
    for side in sides:
        if side.gates is not None:
            scale = Axis("gate", "root", low=0.0, high=1.0)
            title = "gate (share of the update taken)"
            panels.append(_heat(side, side.gates, scale, title, side.last_steps[:MAX_TOKENS]))
        low = math.floor(10 * min(float(side.similarity.min()), 0.9)) / 10
        scale = Axis("similarity", "angle", low=max(low, 0.0), high=1.0)
        panels.append(_heat(side, side.similarity, scale, "similarity to the step before"))
    source, target = (str(pair.get(name, "")) for name in ("source", "target"))
    caption = f"“{shortened(source, 80)}” and “{shortened(target, 80)}”."
    epsilon = number(pair.get("epsilon"))
    if epsilon is not None and any(panel.framed for panel in panels):
        caption += f" Frames: the last step of a token with epsilon {epsilon:g}."
    longest = max(len(side.tokens) for side in sides)
    if longest > MAX_TOKENS:
        caption += f" The first {MAX_TOKENS} of {longest} tokens are shown."
    command = _command(run, "plot", source=source, target=target, epsilon=epsilon)
    return FigureSpec(
        "lazy_tokens", "How much each token still changes", caption, panels, run.name, command,
        columns=len(panels) // 2, wide=True,
    )  # fmt: skip


def _heat(
    side: SideStates,
    values: np.ndarray,
    scale: Axis,
    title: str,
    framed: Sequence[tuple[int, int]] = (),
) -> HeatMap:
    shown = values[:MAX_TOKENS]
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
    looks = ((BLACK, "dashed"), (VERMILION, "dotted"))
    for side, look in zip(pair[1] if pair else (), looks, strict=False):
        own = side.sentence.tolist()
        lines.append(Line(f"the inspected {side.name}", _counted(own), own, *look))
    if not lines:
        return None
    lowest = min(min([*line.y, *line.low]) for line in lines)
    y = Axis("similarity to the step before", "angle", low=max(0.0, lowest - 0.05), high=1.0)
    chart = Chart(Axis("step", whole=True), y, lines)
    title = "How much a whole sentence still changes"
    return FigureSpec("lazy_sentence", title, caption, [chart], run.name, _plot_command(run, many))


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
    texts = [f"{part:.0%}" for part in shares]
    bars = Bars(names.sources, shares.tolist(), BLUE, texts=texts, hatched=[len(counts) - 1])
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
    command = _plot_command(run, many)
    return FigureSpec("lazy_stops", "When tokens stop", caption, [chart], run.name, command)


def grid_figure(run: Run) -> FigureSpec | None:
    """Return BLEU for other numbers of steps than those of training."""
    found = step_grid(run)
    if not found:
        return None
    encoder, decoder = (sorted({key[side] for key in found}) for side in (0, 1))
    caption = "The same weights, run for more or fewer steps than they were trained with."
    framed: list[tuple[int, int]] = []
    model = run.config.get("model")
    names = ("encoder_steps", "decoder_steps")
    trained = tuple(numbers(model, *names) or ()) if isinstance(model, dict) else ()
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
    command = _command(run, "sweep", encoder_steps=encoder, decoder_steps=decoder, epsilons=[])
    title = "BLEU by number of steps"
    return FigureSpec("lazy_steps", title, caption, [panel], run.name, command)


def epsilon_figure(run: Run) -> FigureSpec | None:
    """Return BLEU against the encoder's FLOPs and seconds; None without a sweep from epsilon 0."""
    points = epsilon_points(run)
    if len(points) < 2 or points[0]["epsilon"] != 0.0:
        return None
    full = points[0]
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
    epsilons = [point["epsilon"] for point in points]
    command = _command(run, "sweep", encoder_steps=[], epsilons=epsilons)
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
    title = "Programs executed correctly"
    command = _command(run, "eval")
    return FigureSpec("lazy_programs", title, caption, [chart], run.name, command)


FIGURES: tuple[FigureBuilder, ...] = (
    tokens_figure,
    sentence_figure,
    stops_figure,
    grid_figure,
    epsilon_figure,
    programs_figure,
)


def _plot_command(run: Run, many: dict[str, Any] | None) -> str:
    values = many or {}
    return _command(run, "plot", sentences=values.get("sentences"), epsilon=values.get("epsilon"))


def _command(run: Run, verb: str, **options: Any) -> str:
    """Return a command line without the options that are None; lists become `[1,2]`."""
    words = [run.path]
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", f"[{','.join(f'{item:g}' for item in value)}]"]
        elif value is not None:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return f"deepenough lazy {verb} {shlex.join(words)}"


def training_command(run: Run) -> str:
    """Return the command that trains the run again."""
    return f"deepenough lazy train --config {shlex.quote(f'{run.path}/config.yaml')}"


# -- section ----------------------------------------------------------------------------------


def section(run: Run) -> Section | None:
    """Return what a Lazy Transformer or its baselines have recorded, or None if nothing."""
    figures = build_figures(run, FIGURES)
    findings = _epsilon_findings(run)
    exact = number(_last(run, PROGRAMS).get("exact"))
    if exact is not None:
        findings.append(
            f"{100 * exact:.1f} % of programs never trained on are executed without an error."
        )
    perplexity = number(_last(run, "test").get("perplexity"))
    if run.method == "lazy" and perplexity is not None:
        findings.append(f"Perplexity on the test text: {perplexity:.4g}.")
    if not figures and not findings:
        return None
    about = "One block is applied several times."
    pair = last_pair(run)
    if pair is not None and pair[1][0].gates is not None:
        about += " A gate decides how much of each update a token takes, and a token whose gate "
        about += "stays below epsilon is not computed any further."
    return Section(HEADING, about, findings, figures)


def _epsilon_findings(run: Run) -> list[str]:
    points = epsilon_points(run)
    if len(points) < 2 or points[0]["epsilon"] != 0.0:
        return []
    full = points[0]
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
