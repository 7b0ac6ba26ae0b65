"""Figures of shortcuts: what each layer already knows, what early exit saves, and the lens.

Heat maps, curves and the early-exit sweep are those of "Jump to Conclusions" (arXiv 2303.09435).
Built from a run's records alone: a number that is missing, infinite or outside the range of its
quantity is absent, and of two measurements of the same thing the later counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from deepenough.figure import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Axis,
    Bars,
    Chart,
    FigureBuilder,
    FigureSpec,
    HeatMap,
    LensTable,
    Line,
    Panel,
    Run,
    Section,
    TokenText,
    build_figures,
    number,
    readable,
    share,
    shortened,
    visible,
)

HEADING = "Shortcuts"

MODES = {
    "id": ("id (no map)", BLACK, "dashed"),
    "mat": ("mat (linear map)", BLUE, "solid"),
    "affine": ("affine map", SKY, "dashed"),
    "tuned": ("KL-tuned map", VERMILION, "solid"),
    "attention": ("attention made linear", ORANGE, "solid"),
    "feed_forward": ("feed-forward made linear", GREEN, "dashed"),
    "norms": ("norms made linear", PURPLE, "dotted"),
}
"""Mode: its name, colour and line, in the order of drawing."""
SUBMODULES = ("attention", "feed_forward", "norms")
"""Modes that replace parts of the blocks; the others jump from a layer to the last."""

QUANTITIES = {
    "precision_1": "precision@1",
    "precision_5": "precision@5",
    "precision_10": "precision@10",
    "surprisal": "surprisal (nats)",
    "kl": "KL to the last layer (nats)",
}
LOG_SCALE_FACTOR = 10.0
"""A quantity that reaches this many times its median needs a logarithmic scale."""
LEAST_NATS = 0.01
"""Fewer nats than this are as good as none and would stretch that scale down without end."""
MAX_LENSES = 3

Curve = tuple[np.ndarray, np.ndarray]


# -- records ----------------------------------------------------------------------------------


def square(value: Any) -> np.ndarray | None:
    """Return `value` as a square table of floats, NaN where a number is missing, or None.

    A table has two layers or more and a number for at least one pair.
    """
    try:
        table = np.array(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        return None
    if table.ndim != 2 or table.shape[0] != table.shape[1] or len(table) < 2:
        return None
    table[~np.isfinite(table)] = np.nan
    return table if np.isfinite(table).any() else None


def r2_tables(run: Run) -> dict[str, np.ndarray]:
    """Return r^2 [from, to] by mode; only tables as large as the last, which is of one model."""
    tables: dict[str, np.ndarray] = {}
    for record in run.of_kind("r2"):
        table = square(record.values.get("table"))
        if table is not None:
            tables.pop(_mode(record.values), None)
            tables[_mode(record.values)] = table
    if not tables:
        return {}
    size = len(list(tables.values())[-1])
    return _in_order({mode: t for mode, t in tables.items() if len(t) == size})


def cka_table(run: Run) -> np.ndarray | None:
    """Return the last table of linear CKA between layers."""
    tables = [square(record.values.get("table")) for record in run.of_kind("cka")]
    return next((table for table in reversed(tables) if table is not None), None)


def measured(run: Run, kind: str, key: str) -> dict[str, dict[float, Mapping[str, Any]]]:
    """Return the values of the records of a kind by mode and by rising `key`."""
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for record in run.of_kind(kind):
        at = number(record.values.get(key))
        if at is not None:
            found.setdefault(_mode(record.values), {})[at] = record.values
    return _in_order({mode: dict(sorted(at.items())) for mode, at in found.items()})


def layer_curves(run: Run, name: str) -> dict[str, Curve]:
    """Return layers and values of one quantity by mode; a mode without a value is left out."""
    check = share if name.startswith("precision") else number
    by_mode = measured(run, "layer", "layer")
    return _curves(
        {m: [(x, check(v.get(name))) for x, v in at.items()] for m, at in by_mode.items()}
    )


def exit_curves(run: Run) -> dict[str, Curve]:
    """Return the share of layers saved and the agreement by mode, by rising threshold."""
    by_mode = measured(run, "exit", "lambda")
    return _curves(
        {
            mode: [(share(v.get("saved")), share(v.get("agreement"))) for v in at.values()]
            for mode, at in by_mode.items()
        }
    )


def _curves(points: Mapping[str, Sequence[tuple[float | None, float | None]]]) -> dict[str, Curve]:
    curves = {}
    for mode, own in points.items():
        known = [point for point in own if None not in point]
        if known:
            x, y = np.array(known, dtype=float).T
            curves[mode] = (x, y)
    return curves


def fixed_exit_curves(run: Run) -> dict[str, Curve]:
    """Return the same for leaving always at one layer: saved 1 - layer / L, precision@1."""
    curves = layer_curves(run, "precision_1")
    last = max((layers.max() for layers, _ in curves.values()), default=0.0)
    if last <= 0:
        return {}
    return {mode: (1 - layers / last, values) for mode, (layers, values) in curves.items()}


def fitted_model(run: Run) -> str:
    """Return the name of the model that the shortcuts are for, or nothing."""
    names = [record.values.get("model") for record in run.of_kind("fit")]
    return next((name for name in reversed(names) if isinstance(name, str)), "")


def _mode(values: Mapping[str, Any]) -> str:
    return str(values.get("mode") or "mat")


def _in_order(by_mode: dict[str, Any]) -> dict[str, Any]:
    """Return the known modes first, in the order of drawing, then the others by name."""
    order = {mode: i for i, mode in enumerate(MODES)}
    return {mode: by_mode[mode] for mode in sorted(by_mode, key=lambda m: (order.get(m, 99), m))}


@dataclass(frozen=True)
class Lens:
    """One prompt seen through one mode; rows are layers, the last layer last."""

    prompt: str
    mode: str
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    predictions: tuple[tuple[str, ...], ...]
    """[layer][token], the likeliest next token, or the token in place of a mask."""
    probability: np.ndarray
    """[layer, token], NaN where it was not recorded."""
    agrees: np.ndarray
    """[layer, token], whether the prediction is the last layer's."""

    def known_from(self) -> np.ndarray:
        """Return for each token the first row from which on every layer agrees with the last."""
        later_agree = np.logical_and.accumulate(self.agrees[::-1], axis=0)
        return np.minimum(len(self.layers) - later_agree.sum(axis=0), len(self.layers) - 1)

    def depth(self) -> list[int]:
        """Return for each token the layer from which on every layer agrees with the last."""
        return [self.layers[row] for row in self.known_from().tolist()]


def lenses(run: Run) -> list[Lens]:
    """Return every lens of the run, the latest first; of one prompt and mode only the latest."""
    found: dict[tuple[str, str], Lens] = {}
    for record in run.of_kind("lens"):
        lens = read_lens(record.values)
        if lens is not None:
            found.pop((lens.prompt, lens.mode), None)
            found[lens.prompt, lens.mode] = lens
    return list(found.values())[::-1]


def read_lens(values: dict[str, Any]) -> Lens | None:
    """Return the lens in a record, or None if its parts do not fit together."""
    tokens, rows = values.get("tokens"), values.get("words")
    if not _texts(tokens) or not isinstance(rows, list) or not rows:
        return None
    if not all(_texts(row) and len(row) == len(tokens) for row in rows):
        return None
    shape = (len(rows), len(tokens))
    recorded = values.get("layers")
    layers = [number(layer) for layer in (recorded if isinstance(recorded, list) else [])]
    known = [int(layer) for layer in layers if layer is not None]
    agrees, sure = _grid(values.get("agrees"), shape), _grid(values.get("probability"), shape)
    probability = np.full(shape, np.nan)
    if sure is not None:
        probability = np.where((sure >= -1e-5) & (sure <= 1 + 1e-5), sure.clip(0, 1), np.nan)
    return Lens(
        prompt=str(values.get("prompt") or "".join(tokens)),
        mode=_mode(values),
        tokens=tuple(tokens),
        layers=tuple(known if len(known) == len(rows) else range(len(rows))),
        predictions=tuple(map(tuple, rows)),
        probability=probability,
        # If agreement was not recorded, equal texts agree.
        agrees=np.array(rows) == np.array(rows[-1]) if agrees is None else agrees == 1.0,
    )


def _texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _grid(value: Any, shape: tuple[int, int]) -> np.ndarray | None:
    try:
        grid = np.array(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        return None
    return grid if grid.shape == shape else None


# -- figures ----------------------------------------------------------------------------------


def mode_name(mode: str) -> str:
    """Return what legends call a mode."""
    return MODES[mode][0] if mode in MODES else shortened(visible(mode), 24)


def _line(mode: str, curve: Curve, **options: Any) -> Line:
    name, color, style = MODES.get(mode, (mode_name(mode), None, "dotted"))
    x, y = curve
    return Line(
        **({"name": name, "color": color, "style": style} | options), x=x.tolist(), y=y.tolist()
    )


def r2_figure(run: Run) -> FigureSpec | None:
    """Return r^2 of the maps from every layer to every later one, a panel a mode."""
    found = r2_tables(run)
    if not found:
        return None
    # The maps first, beside them what is reached without a map.
    tables = {mode: found[mode] for mode in ("mat", "id") if mode in found} | found
    target = _only_target(tables)
    caption = "How much of a layer's states the states of an earlier layer explain, with each map."
    if target is not None:
        panels: list[Panel] = [_to_one_layer(tables, target, f"r² of layer {target}")]
    else:
        axes = (Axis("to layer"), Axis("from layer"), Axis("r²", low=0.0, high=1.0))
        panels = [_heat(mode_name(mode), table, *axes) for mode, table in tables.items()]
        if any((table[np.isfinite(table)] < 0).any() for table in tables.values()):
            caption += " Hatched: below 0, worse than predicting the mean."
    return _figure(run, "r2", "Maps between layers", caption, panels, wide=len(panels) > 1)


def cka_figure(run: Run) -> FigureSpec | None:
    """Return linear CKA between all pairs of layers."""
    table = cka_table(run)
    if table is None:
        return None
    upper = {"mat": np.where(np.tri(len(table), k=-1, dtype=bool), np.nan, table)}
    target = _only_target(upper)
    if target is not None:
        panels: list[Panel] = [_to_one_layer(upper, target, f"CKA with layer {target}", "CKA")]
    else:
        axes = (Axis("layer"), Axis("layer"), Axis("linear CKA", low=0.0, high=1.0))
        panels = [_heat("", table, *axes)]
    caption = "How similar the states of two layers are, up to rotation and scale (linear CKA)."
    return _figure(run, "cka", "Similarity of layers", caption, panels)


def _heat(title: str, table: np.ndarray, x: Axis, y: Axis, value: Axis) -> HeatMap:
    layers = [str(layer) for layer in range(len(table))]
    values = [[None if np.isnan(cell) else float(cell) for cell in row] for row in table]
    return HeatMap(layers, layers, values, x, y, value, square=True, title=title)


def _only_target(tables: Mapping[str, np.ndarray]) -> int | None:
    """Return the one layer that all maps lead to, those of a layer to itself aside, or None."""
    known = np.sum([np.isfinite(table) for table in tables.values()], axis=0)
    np.fill_diagonal(known, 0)
    targets = np.flatnonzero(known.any(axis=0))
    return int(targets[0]) if len(targets) == 1 and len(known) > 2 else None


def _to_one_layer(
    tables: Mapping[str, np.ndarray], target: int, label: str, name: str = ""
) -> Chart:
    lines = []
    for mode, table in tables.items():
        values = table[: target + 1, target]
        layers = np.flatnonzero(np.isfinite(values))
        options = {"name": name} if name else {}
        lines.append(_line(mode, (layers.astype(float), values[layers]), **options))
    lowest = min(min(line.y, default=0.0) for line in lines)
    # Far below 0 nothing is to be told apart, and the part above would become a flat line.
    y = Axis(label, low=max(min(lowest, 0.0) - 0.05, -1.0), high=1.03)
    return Chart(Axis("from layer", whole=True), y, lines)


def layers_figure(run: Run) -> FigureSpec | None:
    """Return what a prediction from each layer shares with the model's own, by kind of map."""
    panels = _layer_panels(run, lambda mode: mode not in SUBMODULES, "prediction from layer")
    if not panels:
        return None
    caption = "Precision@k: how often a layer's most likely token is among the k most likely ones "
    caption += "of the last layer. Surprisal: how unlikely the last layer finds that token."
    return _figure(run, "layers", "How early the model knows", caption, panels, wide=True)


def submodules_figure(run: Run) -> FigureSpec | None:
    """Return the same with parts of the blocks replaced by linear maps."""
    modes = {mode for name in QUANTITIES for mode in layer_curves(run, name)}
    if not modes & set(SUBMODULES):
        return None
    compared = ("id", "mat", *SUBMODULES)
    panels = _layer_panels(run, lambda mode: mode in compared, "replaced from layer")
    caption = "From a layer on, attention, feed-forward or norms are replaced by linear maps; "
    caption += "for comparison, all blocks are replaced by one map (mat) or left out (id)."
    title = "Parts of the blocks made linear"
    return _figure(run, "submodules", title, caption, panels, wide=True)


def _layer_panels(run: Run, wanted: Callable[[str], bool], label: str) -> list[Panel]:
    panels: list[Panel] = []
    for name, title in QUANTITIES.items():
        curves = {m: curve for m, curve in layer_curves(run, name).items() if wanted(m)}
        if not curves:
            continue
        values = np.concatenate([values for _, values in curves.values()])
        if name.startswith("precision"):
            y = Axis(title, percent=True, low=0.0, high=1.03)
        elif values.max() > LOG_SCALE_FACTOR * max(np.median(values), LEAST_NATS):
            y = Axis(title, "log", low=max(LEAST_NATS, float(values.min())))
        else:
            # Rounding may leave a divergence of zero a little below it.
            y = Axis(title, low=0.0 if values.min() > -1e-3 else None)
        lines = [_line(mode, curve) for mode, curve in curves.items()]
        panels.append(Chart(Axis(label, whole=True), y, lines, title=title))
    return panels


def exit_figure(run: Run) -> FigureSpec | None:
    """Return layers saved against agreement, and what is saved at fixed levels of agreement."""
    curves, fixed = exit_curves(run), fixed_exit_curves(run)
    levels_by_mode = {m: at for m, at in measured(run, "saved", "agreement").items() if at}
    panels: list[Panel] = []
    parts = []
    if curves:
        lines = [_line(mode, curve, style="solid") for mode, curve in curves.items()]
        for mode in curves:
            if mode in fixed:
                name = f"{mode_name(mode)}, one layer for all"
                lines.append(_line(mode, fixed[mode], name=name, style="dotted"))
        x = Axis("layers saved", percent=True, low=-0.02, high=1.02)
        y = Axis("agreement with the last layer", percent=True, high=1.02)
        panels.append(Chart(x, y, lines, title="every threshold"))
        parts.append("A token leaves once the gap between its two most likely tokens is large.")
        if any(mode in fixed for mode in curves):
            parts.append("Dotted: all tokens leave at the same layer.")
    if levels_by_mode:
        panels.append(_saved_bars(levels_by_mode))
        parts.append("Bars: layers saved while so much agreement is kept.")
    if not panels:
        return None
    return _figure(run, "early_exit", "Early exit", " ".join(parts), panels, columns=2, wide=True)


def _saved_bars(by_mode: Mapping[str, Mapping[float, Mapping[str, Any]]]) -> Chart:
    levels = sorted({level for by_level in by_mode.values() for level in by_level})
    bars = []
    for mode, by_level in by_mode.items():
        rows = [by_level.get(level, {}) for level in levels]
        saved = [share(row.get("saved")) for row in rows]
        texts = ["–" if value is None else f"{100 * value:.1f}" for value in saved]
        marks = [share(row.get("fixed_layer_saved")) for row in rows]
        color = MODES[mode][1] if mode in MODES else None
        heights = [value or 0.0 for value in saved]
        bars.append(Bars(mode_name(mode), heights, color, texts, marks))
    # Where nothing is saved, noise must not fill the panel.
    most = max((value or 0.0) for bar in bars for value in (*bar.values, *bar.marks))
    return Chart(
        Axis("agreement kept"),
        Axis("layers saved", percent=True, low=0.0, high=max(0.1, 1.15 * most)),
        bars=bars,
        categories=[f"{100 * level:.4g}%" for level in levels],
        mark_name="the same layer for all",
        title="at these agreements",
    )


def lens_figure(run: Run) -> FigureSpec | None:
    """Return the latest prompts, with what every layer predicts at each of their tokens."""
    found = lenses(run)[:MAX_LENSES]
    if not found:
        return None
    panels = [
        TokenText(
            [readable(token) for token in lens.tokens],
            lens.depth(),
            max(1, lens.layers[-1]),
            "layer from which the prediction stays the same",
            LensTable(
                list(lens.layers),
                [[visible(text) for text in row] for row in lens.predictions],
                [[None if np.isnan(p) else float(p) for p in row] for row in lens.probability],
                lens.agrees.tolist(),
            ),
            title=f"{shortened(readable(lens.prompt), 60)} · {mode_name(lens.mode)}",
            key="" if place == 0 else str(place + 1),
        )
        for place, lens in enumerate(found)
    ]
    words = [run.path, "--prompt", found[0].prompt, "--mode", found[0].mode]
    caption = (
        "The prompt. A token's shade: the layer from which on every layer predicts the same next "
        "token as the last one. Choose a token to see what every layer predicts."
    )
    return FigureSpec(
        "lens", "Token by token", caption, panels, _subject(run),
        f"deepenough shortcut lens {shlex.join(words)}", choice="prompt", wide=True,
    )  # fmt: skip


FIGURES: tuple[FigureBuilder, ...] = (
    layers_figure,
    exit_figure,
    r2_figure,
    cka_figure,
    submodules_figure,
    lens_figure,
)


def _figure(
    run: Run, name: str, title: str, caption: str, panels: Sequence[Panel], **layout: Any
) -> FigureSpec:
    return FigureSpec(name, title, caption, panels, _subject(run), _eval_command(run), **layout)


def _subject(run: Run) -> str:
    """Return the name of the run, and of the model where it is another."""
    return " · ".join(dict.fromkeys(name for name in (run.name, fitted_model(run)) if name))


def _eval_command(run: Run) -> str:
    about = next((record.values for record in reversed(run.of_kind("evaluation"))), {})
    settings = about.get("settings")
    words = [run.path]
    if isinstance(settings, dict):
        nested = settings.get("text") or settings.get("dataset")
        chosen = {**(nested if isinstance(nested, dict) else {}), **settings}
        for name in ("data", "split", "lines", "positions", "seed"):
            if isinstance(chosen.get(name), str | int):
                words += [f"--{name}", str(chosen[name])]
    return f"deepenough shortcut eval {shlex.join(words)}"


def training_command(run: Run) -> str:
    """Return the command that fits the run's maps again."""
    return f"deepenough shortcut fit --config {shlex.quote(f'{run.path}/config.yaml')}"


# -- section ----------------------------------------------------------------------------------


def section(run: Run) -> Section | None:
    """Return what a study of layers has measured, or None if nothing."""
    figures = build_figures(run, FIGURES)
    if not figures:
        return None
    model = fitted_model(run)
    about = f"What each layer{f' of {model}' if model else ''} already knows of the last one."
    return Section(HEADING, about, [*_saved_findings(run), *_lens_findings(run)], figures)


def _saved_findings(run: Run) -> list[str]:
    best: tuple[float, float, str] | None = None
    for mode, by_level in measured(run, "saved", "agreement").items():
        for level, values in by_level.items():
            saved = share(values.get("saved"))
            if saved is not None and (best is None or (level, saved) > best[:2]):
                best = (level, saved, mode)
    if best is None:
        return []
    level, saved, mode = best
    return [
        f"Early exit by confidence saves {100 * saved:.1f} % of the layers while {100 * level:g} "
        f"% of the tokens stay the last layer's ({mode_name(mode)})."
    ]


def _lens_findings(run: Run) -> list[str]:
    return [
        f"On “{shortened(lens.prompt, 60)}” the next token is known after "
        f"{float(np.mean(lens.depth())):.1f} of {lens.layers[-1]} layers on average."
        for lens in lenses(run)[:1]
    ]
