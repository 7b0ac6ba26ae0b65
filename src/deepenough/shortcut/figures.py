"""Figures of shortcuts: what each layer already knows, what early exit saves, and the lens.

Heat maps, curves and the early-exit sweep are those of "Jump to Conclusions" (arXiv 2303.09435).
Built from a run's records alone: a number that is missing, infinite or outside the range of its
quantity is absent, and of two measurements of the same thing the later counts.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deepenough import figure as fig

HEADING = "Shortcuts"

MODES = {
    "id": ("id (no map)", fig.BLACK, "dashed"),
    "mat": ("mat (linear map)", fig.BLUE, "solid"),
    "affine": ("affine map", fig.SKY, "dashed"),
    "tuned": ("KL-tuned map", fig.VERMILION, "solid"),
    "attention": ("attention made linear", fig.ORANGE, "solid"),
    "feed_forward": ("feed-forward made linear", fig.GREEN, "dashed"),
    "norms": ("norms made linear", fig.PURPLE, "dotted"),
}
"""Mode: its name, colour and line."""
IN_WORDS = {"id": "no map", "mat": "a linear map", "affine": "an affine map", "tuned": "tuned maps"}
CKA = "linear CKA"
SUBMODULES = ("attention", "feed_forward", "norms")
"""Modes that replace parts of the blocks; the others jump from a layer to the last."""

QUANTITIES = {
    "precision_1": "precision@1",
    "precision_5": "precision@5",
    "precision_10": "precision@10",
    "surprisal": "surprisal (nats)",
    "kl": "KL to the last layer (nats)",
    "cross_entropy": "loss on the next token (nats)",
}
UNBOUNDED = ("layer", "layers_mean", "surprisal", "kl", "cross_entropy")
"""Values that are not shares of 1."""
LOG_SCALE_FACTOR = 10.0
"""A quantity that reaches this many times its median needs a logarithmic scale."""
LEAST_NATS = 0.01
"""Fewer nats than this are as good as none and would stretch that scale down without end."""
R2_LEVEL = 0.9
"""Share of the last layer's variation that a model without a head is asked about."""

MAX_LIKELIEST = 20_000
"""Likeliest tokens that all cells of a lens show together."""

STATISTICS = {
    "probability": ("probability of the prediction", 0.0, "linear"),
    "entropy": ("entropy (nats)", 0.0, "linear"),
    "kl": ("KL to the last layer (nats)", 0.0, "root"),
    "target_rank": ("rank of the real next token", 1.0, "log"),
    "cross_entropy": ("loss on the next token (nats)", 0.0, "linear"),
}
"""What a lens shows of a cell: its name, least value and scale."""
LENS_STATISTICS = {name: STATISTICS[name][0] for name in STATISTICS if name != "probability"}
"""What a lens may know beside probabilities, and what a page calls it."""

PRUNED = {"linear": "L", "removed": "–", "one map": "M", "in the map": "M"}
"""Letters for what may become of a part of a layer."""

Curve = tuple[np.ndarray, ...]
"""x, y and, where intervals are known of all points, the ends of a band around y."""


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


def measured(run: fig.Run, kind: str, key: str) -> dict[str, dict[float, Mapping[str, Any]]]:
    """Return the values of the records of a kind by mode and by rising `key`."""
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for record in run.of_kind(kind):
        at = fig.number(record.values.get(key))
        if at is not None:
            found.setdefault(_mode(record.values), {})[at] = record.values
    return {mode: dict(sorted(at.items())) for mode, at in found.items()}


def curves(run: fig.Run, kind: str, key: str, x: str, y: str) -> dict[str, Curve]:
    """Return two values of the records of a kind by mode, by rising `key`.

    A point with a value that is missing or out of range is left out, and so is a mode without any.
    """

    def value(values: Mapping[str, Any], name: str) -> float | None:
        return (fig.number if name in UNBOUNDED else fig.share)(values.get(name))

    found: dict[str, Curve] = {}
    for mode, by_key in measured(run, kind, key).items():
        points = []
        for values in by_key.values():
            low, high = _ends(values, y) or (None, None)
            points.append((value(values, x), value(values, y), low, high))
        known = [point for point in points if None not in point[:2]]
        if known:
            columns = tuple(np.array(known, dtype=float).T)
            found[mode] = columns if np.isfinite(columns).all() else columns[:2]
    return found


def layer_curves(run: fig.Run, name: str) -> dict[str, Curve]:
    """Return layers and values of one quantity by mode."""
    return curves(run, "layer", "layer", "layer", name)


def fitted_model(run: fig.Run) -> str:
    """Return the name of the model that the shortcuts are for, or nothing."""
    return str(_latest(run, "fit").get("model") or "")


def _latest(run: fig.Run, kind: str) -> Mapping[str, Any]:
    """Return the values of the latest record of a kind, empty if there is none."""
    return next((record.values for record in reversed(run.of_kind(kind))), {})


def _mode(values: Mapping[str, Any]) -> str:
    return str(values.get("mode") or "mat")


def lens_panel(values: Mapping[str, Any]) -> fig.TokenText | None:
    """Return the prompt of a lens record and what every layer predicts at each of its tokens.

    None if the parts of the record do not fit together. A token's depth is the layer from which on
    every layer predicts what the last one does.
    """
    try:
        tokens, layers = list(map(str, values["tokens"])), list(map(int, values["layers"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    shape = (len(layers), len(tokens))
    predictions, agrees = _grid(values, "words", shape, str), _grid(values, "agrees", shape, bool)
    probability = _grid(values, "probability", shape)
    if 0 in shape or predictions is None or agrees is None or probability is None:
        return None
    num_agreeing = np.logical_and.accumulate(agrees[::-1], axis=0).sum(axis=0)
    first_rows = np.minimum(len(layers) - num_agreeing, len(layers) - 1)
    more: dict[str, Any] = {}
    top, shares = _grid(values, "top", shape, str), _grid(values, "top_probability", shape)
    if top is not None and shares is not None and top.shape == shares.shape:
        num = max(1, min(10, MAX_LIKELIEST // predictions.size))
        words, places = np.unique(top[..., :num], return_inverse=True)
        more = {"words": [fig.visible(word) for word in words.tolist()]}
        more["top"] = places.reshape(*shape, -1).tolist()
        more["top_probability"] = shares[..., :num].round(4).tolist()
    tables = {title: _grid(values, name, shape) for name, title in LENS_STATISTICS.items()}
    return fig.TokenText(
        [fig.readable(token) for token in tokens],
        [layers[row] for row in first_rows],
        max(1, layers[-1]),
        "layer from which the prediction stays the same",
        fig.LensTable(
            layers,
            [[fig.visible(text) for text in row] for row in predictions.tolist()],
            [[fig.share(value) for value in row] for row in probability.tolist()],
            statistics={name: t.tolist() for name, t in tables.items() if t is not None},
            **more,
        ),
        title=f"{_prompt(values)} · {mode_name(_mode(values))}",
    )


def lens_grid(values: Mapping[str, Any], statistic: str = "probability") -> fig.FigureSpec:
    """Return a lens as layers by tokens, coloured by a statistic; each cell tells the likeliest."""
    label, low, scale = STATISTICS[statistic]
    table = values[statistic]
    largest = max((value for row in table for value in row if value is not None), default=low)
    high = 1.0 if statistic == "probability" else max(largest, low + 1e-3)
    layers, tokens = values["layers"], values["tokens"]
    panel = fig.HeatMap(
        [str(layer) for layer in layers],
        [fig.shortened(fig.visible(token), 12) for token in tokens],
        table,
        fig.Axis("token read"),
        fig.Axis("layer"),
        fig.Axis(label, scale, low=low, high=high),
        [[fig.shortened(fig.visible(word), 10) for word in row] for row in values["words"]],
        upwards=True,
        details=[
            [_cell(values, statistic, layer, token) for token in range(len(tokens))]
            for layer in range(len(layers))
        ],
    )
    caption = (
        f"The token that every layer would predict, {mode_name(_mode(values))}; colour: {label}. "
        "Choose a cell for its ten likeliest tokens."
    )
    return fig.FigureSpec("lens", "Layers by tokens", caption, [panel], wide=True)


def _cell(values: Mapping[str, Any], shown: str, layer: int, token: int) -> str:
    """Return the statistics of a cell beside the one shown, and its likeliest tokens, as lines."""
    lines = [
        f"{label} {value:.4g}" if value < 1000 else f"{label} {value:,.0f}"
        for name, (label, _, _) in STATISTICS.items()
        if name != shown and (value := values[name][layer][token]) is not None
    ]
    likeliest = zip(
        values["top"][layer][token], values["top_probability"][layer][token], strict=True
    )
    top = (f"{n}. {fig.visible(word)} {p:.3f}" for n, (word, p) in enumerate(likeliest, start=1))
    return "\n".join([*lines, *top])


def _grid(
    values: Mapping[str, Any], name: str, shape: tuple[int, int], kind: type = float
) -> np.ndarray | None:
    """Return a table by layer and token, NaN where a number is missing; None if it is none."""
    try:
        table: np.ndarray = np.array(values[name], dtype=kind)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    ndim = 3 if name.startswith("top") else 2
    return table if table.shape[:2] == shape and table.ndim == ndim else None


def _prompt(values: Mapping[str, Any]) -> str:
    return fig.shortened(fig.readable(str(values.get("prompt"))), 60)


# -- figures ----------------------------------------------------------------------------------


def mode_name(mode: str) -> str:
    """Return what legends call a mode."""
    return MODES[mode][0] if mode in MODES else fig.shortened(fig.readable(mode), 24)


def _line(mode: str, curve: Curve, **options: Any) -> fig.Line:
    name, color, style = MODES.get(mode, (mode_name(mode), None, "solid"))
    columns = dict(zip(("x", "y", "low", "high"), (c.tolist() for c in curve), strict=False))
    return fig.Line(**({"name": name, "color": color, "style": style} | options | columns))


def r2_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return r^2 of the maps from every layer to every later one, a panel a mode."""
    every = {_mode(r.values): square(r.values.get("table")) for r in run.of_kind("r2")}
    found = {mode: table for mode, table in every.items() if table is not None}
    if not found:
        return None
    # The maps first, beside them what is reached without a map.
    tables = {mode: found[mode] for mode in ("mat", "id") if mode in found} | found
    caption = "r² of predicting the states of a later layer from those of an earlier one"
    caption += ": 1 is exact, 0 no better than always predicting the mean state."
    if "id" in tables:
        caption += " With id there is no map: the earlier states themselves are the prediction."
    panels = _pair_panels(tables, fig.Axis("r²", low=0.0, high=1.0))
    if isinstance(panels[0], fig.HeatMap) and any((table < 0).any() for table in tables.values()):
        caption += " Grey: below 0."
    return _figure(run, "r2", "Maps between layers", caption, panels, wide=len(panels) > 1)


def cka_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return linear CKA between all pairs of layers."""
    table = square(_latest(run, "cka").get("table"))
    if table is None:
        return None
    panels = _pair_panels({CKA: table}, fig.Axis("linear CKA", low=0.0, high=1.0))
    caption = "How similar the states of two layers are, up to rotation and scale (linear CKA)."
    return _figure(run, "cka", "Similarity of layers", caption, panels)


def _pair_panels(tables: Mapping[str, np.ndarray], value: fig.Axis) -> list[fig.Panel]:
    """Return a heat map for each table [from, to], or curves if all are about the last layer."""
    known = np.isfinite(next(iter(tables.values())))
    last = len(known) - 1
    if last > 1 and not known[0, 1:last].any():
        lines = []
        for mode, table in tables.items():
            layers = np.flatnonzero(np.isfinite(table[:, last]))
            lines.append(_line(mode, (layers.astype(float), table[layers, last])))
        lowest = min(0.0, *(min(line.y) for line in lines))
        # Far below 0 nothing is to be told apart, and the part above would become a flat line.
        y = fig.Axis(f"{value.label}, layer {last}", low=max(lowest - 0.05, -1.0), high=1.03)
        return [fig.Chart(fig.Axis("from layer", whole=True), y, lines)]
    names = [str(layer) for layer in range(last + 1)]
    x, y = fig.Axis("to layer"), fig.Axis("from layer")
    panels: list[fig.Panel] = []
    for mode, table in tables.items():
        values = [[None if np.isnan(cell) else float(cell) for cell in row] for row in table]
        panels.append(
            fig.HeatMap(names, names, values, x, y, value, square=True, title=mode_name(mode))
        )
    return panels


def layers_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return what a prediction from each layer shares with the model's own, by kind of map."""
    panels = _layer_panels(run, SUBMODULES, "prediction from layer")
    if not panels:
        return None
    caption = "Precision@k: how often a layer's most likely token is among the k most likely ones "
    caption += "of the last layer. Surprisal: how unlikely the last layer finds that token."
    return _figure(run, "layers", "What each layer predicts", caption, panels, wide=True)


def decided_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return the share of tokens that are decided by each layer."""
    lines, values = [], _decided(run)
    for mode, (shares, _) in values.items():
        layers = [float(layer) for layer in range(len(shares))]
        lines.append(_line(mode, (np.array(layers), np.array(shares))))
    if not lines:
        return None
    x, y = fig.Axis("layer", whole=True), fig.Axis("tokens decided", percent=True, low=0, high=1.02)
    chart = fig.Chart(x, y, lines, rules=[fig.Rule(0.5, "half of the tokens")])
    caption = (
        "A token is decided at the layer from which on every layer predicts what the last does."
    )
    return _figure(run, "decided", "Tokens decided by each layer", caption, [chart], wide=True)


def _decided(run: fig.Run) -> dict[str, tuple[list[float], list[float]]]:
    """Return by mode the shares decided by layer, and the layer of half of them with its ends."""
    found = {}
    for values in (record.values for record in run.of_kind("decided")):
        given, layer = values.get("shares"), fig.number(values.get("layer"))
        ends = _ends(values, "layer")
        shares = [fig.share(value) for value in given] if isinstance(given, list) else []
        if layer is not None and ends and len(shares) > 1 and None not in shares:
            found[_mode(values)] = ([share or 0.0 for share in shares], [layer, *ends])
    return found


def submodules_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return the same with parts of the blocks replaced by linear maps."""
    if not measured(run, "layer", "layer").keys() & set(SUBMODULES):
        return None
    panels = _layer_panels(run, ("affine", "tuned"), "replaced from layer")
    caption = "From a layer on, attention, feed-forward or norms are replaced by linear maps; "
    caption += "for comparison, all blocks are replaced by one map (mat) or left out (id)."
    title = "Parts of the blocks made linear"
    return _figure(run, "submodules", title, caption, panels, wide=True)


def _layer_panels(run: fig.Run, left_out: Sequence[str], label: str) -> list[fig.Panel]:
    panels: list[fig.Panel] = []
    for name, title in QUANTITIES.items():
        shown = {m: curve for m, curve in layer_curves(run, name).items() if m not in left_out}
        if not shown:
            continue
        values = np.concatenate([curve[1] for curve in shown.values()])
        if name.startswith("precision"):
            y = fig.Axis(title, percent=True, low=0.0, high=1.03)
        elif values.max() > LOG_SCALE_FACTOR * max(np.median(values), LEAST_NATS):
            y = fig.Axis(title, "log", low=max(LEAST_NATS, float(values.min())))
        else:
            # Rounding may leave a divergence of zero a little below it.
            y = fig.Axis(title, low=0.0 if values.min() > -1e-3 else None)
        lines = [_line(mode, curve) for mode, curve in shown.items()]
        panels.append(fig.Chart(fig.Axis(label, whole=True), y, lines, title=title))
    return panels


def exit_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return layers saved against agreement, and what is saved at fixed levels of agreement."""
    swept = curves(run, "exit", "lambda", "saved", "agreement")
    if not swept:
        return None
    lines = [_line(mode, curve, style="solid") for mode, curve in swept.items()]
    for mode, (layers, agreement, *_) in layer_curves(run, "precision_1").items():
        if mode in swept and layers.max() > 0:
            name = f"{mode_name(mode)}, one layer for all"
            fixed = (1 - layers / layers.max(), agreement)
            lines.append(_line(mode, fixed, name=name, style="dotted"))
    x = fig.Axis("layers saved", percent=True, low=-0.02, high=1.02)
    y = fig.Axis("agreement with the last layer", percent=True, high=1.02)
    panels = [fig.Chart(x, y, lines, title="every threshold")]
    if levels_by_mode := measured(run, "saved", "agreement"):
        panels.append(_saved_bars(levels_by_mode))
    caption = (
        "A token leaves once the gap between its two most likely tokens is large. Dotted: all "
        "tokens leave at the same layer. Bars: layers saved while so much agreement is kept."
    )
    return _figure(run, "early_exit", "Early exit", caption, panels, columns=2, wide=True)


def _saved_bars(by_mode: Mapping[str, Mapping[float, Mapping[str, Any]]]) -> fig.Chart:
    levels = sorted({level for by_level in by_mode.values() for level in by_level})
    bars = []
    for mode, by_level in by_mode.items():
        rows = [by_level.get(level, {}) for level in levels]
        saved = [fig.share(row.get("saved")) for row in rows]
        texts = ["–" if value is None else f"{100 * value:.1f}" for value in saved]
        marks = [fig.share(row.get("fixed_layer_saved")) for row in rows]
        color = MODES[mode][1] if mode in MODES else None
        heights = [value or 0.0 for value in saved]
        bars.append(fig.Bars(mode_name(mode), heights, color, texts, marks))
    # Where nothing is saved, noise must not fill the panel.
    most = max((value or 0.0) for bar in bars for value in (*bar.values, *bar.marks))
    return fig.Chart(
        fig.Axis("agreement kept"),
        fig.Axis("layers saved", percent=True, low=0.0, high=max(0.1, 1.15 * most)),
        bars=bars,
        categories=[f"{100 * level:.4g}%" for level in levels],
        mark_name="the same layer for all",
        title="at these agreements",
    )


def paper_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return the plots of the paper's code, one picture each, under the names that they have there.

    Those of r^2 stand together in `r2_figure`.
    """
    by_quantity = {name: layer_curves(run, name) for name in QUANTITIES}
    precision = by_quantity["precision_1"]
    if not run.of_kind("paper") or not precision:
        return None
    last = int(max(curve[0].max() for curve in precision.values()))
    panels: list[fig.Panel] = []

    def add(key: str, label: str, lines: Sequence[fig.Line], x: str = "layer") -> None:
        axis = fig.Axis(x, whole=True, low=0.0, high=float(last))
        y = fig.Axis(label, low=0.0, high=1.03 if label.startswith("Precision") else None)
        panels.append(fig.Chart(axis, y, lines, title=label, key=f"{key}_{last}"))

    def lines(
        found: Mapping[str, Curve], modes: Sequence[str], suffix: str = "", **options: Any
    ) -> list[fig.Line]:
        names = {mode: mode_name(mode) + suffix for mode in modes if mode in found}
        return [_line(mode, found[mode], name=name, **options) for mode, name in names.items()]

    jumps, parts = ("mat", "id"), ("attention", "norms", "feed_forward", "mat")
    styles = {1: "solid", 5: "dashed", 10: "dotted"}
    every = []
    for k, style in styles.items():
        every += lines(by_quantity[f"precision_{k}"], jumps, f", k={k}", style=style)
    add("pre", "Precision@k", every)
    add("surp", "Surprisal", lines(by_quantity["surprisal"], jumps))
    if precision.keys() & set(SUBMODULES):
        for k in styles:
            add(f"parts_pre{k}", f"Precision@{k}", lines(by_quantity[f"precision_{k}"], parts))
        add("parts_surp", "Surprisal", lines(by_quantity["surprisal"], parts))
    exits = curves(run, "exit", "lambda", "layers_mean", "precision_1")
    both = lines(exits, jumps, ", early exit", style="solid")
    both += lines(precision, jumps, ", fixed exit", style="dotted")
    add("ee_pre1", "Precision@1", both, "layers processed")
    caption = "The plots of Jump to Conclusions; bands are 95 % intervals over samples."
    return _figure(run, "paper", "The paper's plots", caption, panels, choice="plot")


def lens_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return the latest prompt, with what every layer predicts at each of its tokens."""
    values = _latest(run, "lens")
    panel = lens_panel(values)
    if panel is None:
        return None
    words = [run.path, "--prompt", str(values.get("prompt")), "--mode", _mode(values)]
    caption = (
        "The prompt. A token's shade: the layer from which on every layer predicts the same next "
        "token as the last one. Below: what every layer predicts after every token."
    )
    figure = _figure(run, "lens", "Token by token", caption, [panel], wide=True)
    return replace(figure, command=f"deepenough shortcut lens {shlex.join(words)}")


def pruned_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return what became of every layer of a pruned model."""
    values = _latest(run, "pruned")
    try:
        words = np.array(values["layers"], dtype=str).T[::-1]
        left = np.array(values["left"], dtype=float).T[::-1]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if (
        words.ndim != 2
        or words.shape != left.shape
        or len(words) != 2
        or not np.isfinite(left).all()
    ):
        return None
    share, kl = fig.number(values.get("share")), fig.number(values.get("kl"))
    title = "" if share is None else f"{share:.2f} of the layers' {values.get('budget')}"
    title += "" if kl is None else f", KL {kl:.3f} nats"
    panel = fig.HeatMap(
        ("feed-forward", "attention"),
        [str(layer + 1) for layer in range(words.shape[1])],
        left.clip(0.0, 1.0).tolist(),
        fig.Axis("layer"),
        fig.Axis(),
        fig.Axis("share of its cost", low=0.0, high=1.0),
        texts=[[PRUNED.get(word, "") for word in row] for row in words],
        title=title,
    )
    caption = (
        "The parts of every layer: kept, replaced by a linear map (L), removed (–), or in a run of "
        "layers that one map of the states stands for (M)."
    )
    command = f"deepenough shortcut prune --config {shlex.quote(f'{run.path}/config.yaml')}"
    return fig.FigureSpec("pruned", "What was kept", caption, [panel], run.name, command, wide=True)


FIGURES: tuple[fig.FigureBuilder, ...] = (
    pruned_figure,
    decided_figure,
    layers_figure,
    exit_figure,
    r2_figure,
    cka_figure,
    submodules_figure,
    paper_figure,
    lens_figure,
)


def _figure(
    run: fig.Run, name: str, title: str, caption: str, panels: Sequence[fig.Panel], **layout: Any
) -> fig.FigureSpec:
    # The name of the run, and of the model where it is another.
    subject = " · ".join(dict.fromkeys(filter(None, (run.name, fitted_model(run)))))
    return fig.FigureSpec(name, title, caption, panels, subject, _eval_command(run), **layout)


def _eval_command(run: fig.Run) -> str:
    settings = _latest(run, "evaluation").get("settings") or {}
    chosen = {**(settings.get("dataset") or {}), **settings}
    words = [run.path]
    for name in ("data", "split", "lines", "positions"):
        if chosen.get(name) is not None:
            words += [f"--{name}", str(chosen[name])]
    return f"deepenough shortcut eval {shlex.join(words)}"


def training_command(run: fig.Run) -> str:
    """Return the command that fits the run's maps again."""
    return f"deepenough shortcut fit --config {shlex.quote(f'{run.path}/config.yaml')}"


def section(run: fig.Run) -> fig.Section | None:
    """Return what a study of layers has measured, or None if nothing."""
    figures = fig.build_figures(run, FIGURES)
    if not figures:
        return None
    model = fitted_model(run)
    about = f"What each layer{f' of {model}' if model else ''} already knows of the last one."
    if data := _measured_on(run):
        about += f" Measured on {data}."
    findings = [*_decided_findings(run), *_saved_findings(run), *_r2_findings(run)]
    question = fig.BLOCKS if run.of_kind("pruned") else fig.EARLY
    return fig.Section(HEADING, about, findings, figures, question)


def _decided_findings(run: fig.Run) -> list[str]:
    """Say by which layer half of the tokens are decided, with the maps that know it earliest."""
    found = _decided(run)
    if not found:
        return []
    mode, (shares, (layer, *ends)) = min(found.items(), key=lambda item: item[1][1])
    last = len(shares) - 1
    if ends[0] >= last:
        return [f"Most tokens are decided by the last of {last} layers alone."]
    said = f"Half of the tokens are decided by layer {layer:.0f} of {last} ({ends[0]:.0f} to "
    said += f"{ends[1]:.0f}), read with {IN_WORDS.get(mode, mode)}."
    command = f"deepenough shortcut lens {shlex.quote(run.path)} --prompt 'Once upon a time'"
    return [fig.Finding(said, command)]


def _saved_findings(run: fig.Run) -> list[str]:
    """Say how many layers could be saved at each agreement, where any are for certain."""
    by_mode = measured(run, "saved", "agreement")
    told: list[tuple[float, str, list[str]]] = []
    for mode, by_level in by_mode.items():
        parts, total = [], 0.0
        for level, values in by_level.items():
            saved, ends = fig.share(values.get("saved")), _ends(values, "saved")
            if not saved or (ends is not None and ends[0] <= 0):
                continue
            total += saved
            interval = "" if ends is None else f" ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
            parts.append(f"{100 * saved:.1f} %{interval} at {100 * level:g} % agreement")
        told.append((total, mode, parts))
    if not told:
        return []
    total, mode, parts = max(told)
    if not total:
        level = 100 * min(level for by_level in by_mode.values() for level in by_level)
        return [f"No layer is saved for certain if {level:g} % of the tokens are to stay the same."]
    own = run.config.get("model")
    model = own.get("name") if isinstance(own, dict) else None
    words = [str(model or fitted_model(run) or "MODEL"), "--shortcuts", f"{run.path}/shortcuts"]
    words += ["--data", _measured_on(run) or "TEXT"]
    said = "Layers that could be saved if each token stopped as soon as it is sure: "
    said += f"{', '.join(parts)} with the last layer, read with {IN_WORDS.get(mode, mode)}."
    return [fig.Finding(said, f"deepenough decode calibrate {shlex.join(words)}")]


def _measured_on(run: fig.Run) -> str:
    settings = _latest(run, "evaluation").get("settings")
    return str(settings.get("data") or "") if isinstance(settings, dict) else ""


def _ends(values: Mapping[str, Any], name: str) -> list[float] | None:
    """Return the ends of a value's interval, None if the record has none."""
    intervals = values.get("intervals")
    ends = intervals.get(name) if isinstance(intervals, dict) else None
    known = [fig.number(end) for end in ends] if isinstance(ends, list) else []
    return known if len(known) == 2 and None not in known else None  # type: ignore[return-value]


def _r2_findings(run: fig.Run) -> list[str]:
    """Say from which layer on a map explains nine tenths of the last one, of a model with no head.

    The interval is of the parts that the text was measured in.
    """
    values = _latest(run, "r2_by_layer")
    rows = values.get("layers")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    known = [fig.numbers(row, "value", "low", "high") for row in rows]
    if not known or None in known:
        return []
    for layer, (value, low, high) in enumerate(filter(None, known[:-1])):
        if low >= R2_LEVEL:
            told = f"Layer {layer} of {len(known) - 1} explains {100 * value:.0f} % "
            told += f"({100 * low:.0f} to {100 * high:.0f}) of the last layer's states with "
            return [f"{told}{IN_WORDS.get(_mode(values), 'a map')}."]
    return [f"No layer but the last explains {100 * R2_LEVEL:g} % of its states."]
