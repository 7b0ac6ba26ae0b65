"""A study of layers in a report: what each layer knows, what early exit saves, the lens."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from deepenough.report.lens_source import Lens, lenses
from deepenough.report.lens_words import readable, visible
from deepenough.report.page_parts import Limits, Part, Shown, line, plain
from deepenough.report.shortcut_look import mode_name
from deepenough.report.shortcut_source import (
    cka_table,
    exit_curves,
    fitted_model,
    fixed_exit_curves,
    layer_curves,
    measured,
    r2_tables,
    share,
)
from deepenough.report.source import Run

MAX_LENSES = 3


def shortcut_part(run: Run, path: str, limits: Limits) -> Part | None:
    """All that a study of layers has measured."""
    part = Part("Shortcuts")
    command = _command(run, path)
    part.figures += [
        *_layer_lines(run, command, limits),
        *_exit_lines(run, command, limits),
        *_tables(run, command),
    ]
    for lens in lenses(run)[:MAX_LENSES]:
        part.figures.append(_tokens(lens, path, limits))
        if len(lens.tokens) > limits.tokens:
            part.thinned.append(f"the last {limits.tokens} of {len(lens.tokens)} tokens of a lens")
    if not part.figures:
        return None
    model = fitted_model(run)
    part.about = f"What each layer{f' of {model}' if model else ''} already knows of the last one."
    part.summary += _verdicts(run)
    return part


def _layer_lines(run: Run, command: str, limits: Limits) -> list[Shown]:
    found = []
    for name, title, caption in (
        ("precision_1", "How early the model knows", "Share of tokens whose word is already the "
         "last layer's, when the layer is mapped to the last by each kind of map."),
        ("surprisal", "How surprised the last layer is", "At each layer's word, in nats; the "
         "lower, the nearer a layer's prediction is to the last one's."),
    ):  # fmt: skip
        curves = layer_curves(run, name)
        if not curves:
            continue
        series = [line(mode_name(m), xs, ys, limits) for m, (xs, ys) in curves.items()]
        label = "agreement" if name == "precision_1" else "nats"
        data: dict[str, Any] = {"x_label": "layer", "y_label": label, "series": series}
        data["percent"] = name == "precision_1"
        found.append(Shown("lines", title, caption, command, data))
    return found


def _exit_lines(run: Run, command: str, limits: Limits) -> list[Shown]:
    curves, fixed = exit_curves(run), fixed_exit_curves(run)
    if not curves:
        return []
    series = [line(f"{mode_name(m)}, when sure", x, y, limits) for m, (x, y) in curves.items()]
    series += [
        line(f"{mode_name(m)}, one layer for all", x, y, limits, dashed=True)
        for m, (x, y) in fixed.items()
        if m in curves
    ]
    for each in series:
        each["x"] = plain([100 * x for x in each["x"]], 4)
    data = {"x_label": "layers saved, %", "y_label": "agreement", "series": series, "percent": True}
    caption = "Tokens leave when the gap between their two best words is large enough; dashed, all "
    caption += "tokens leave at one layer."
    return [Shown("lines", "Early exit", caption, command, data)]


def _tables(run: Run, command: str) -> list[Shown]:
    tables = {f"r² of {mode_name(mode)}": (table, "r²") for mode, table in r2_tables(run).items()}
    cka = cka_table(run)
    if cka is not None:
        tables["Similarity of layers (CKA)"] = (cka, "CKA")
    found = []
    for title, (table, name) in tables.items():
        names = [str(layer) for layer in range(len(table))]
        data: dict[str, Any] = {
            "rows": names,
            "columns": names,
            "values": plain(np.where(np.isfinite(table), table, np.nan), 3),
            "low": 0.0,
            "high": 1.0,
            "row_name": "from layer",
            "column_name": "to layer",
            "value_name": name,
            "x_label": "to layer",
            "y_label": "from layer",
            "upwards": True,
        }
        caption = "How much of a layer a linear map from another explains; bright is all of it."
        if name == "CKA":
            caption = "How alike the states of two layers are, up to rotation and scale."
        found.append(Shown("heat", title, caption, command, data))
    return found


def _tokens(lens: Lens, path: str, limits: Limits) -> Shown:
    """Every token shaded by the layer from which on all layers have the last one's word."""
    cut = lens.last_tokens(limits.tokens)
    rows = np.minimum(cut.known_from(), len(cut.layers) - 1)
    data = {
        "tokens": [readable(token) for token in cut.tokens],
        "depth": [cut.layers[row] for row in rows.tolist()],
        "last": max(1, cut.layers[-1]),
        "depth_name": "layers until the word is settled",
        "lens": {
            "layers": list(cut.layers),
            "words": [[visible(word) for word in row] for row in cut.words],
            "probability": plain(cut.probability, 3),
            "agrees": cut.agrees.tolist(),
        },
    }
    words = [lens.prompt, "--run", path, "--mode", lens.mode]
    command = f"deepenough shortcut lens {shlex.join(words)}"
    caption = (
        "The text that was read. A token's shade: after how many layers the model has settled on "
        "the word that follows it. Choose a token to see what every layer would say."
    )
    title = f"Token by token ({mode_name(lens.mode)})"
    return Shown("tokens", title, caption, command, data, wide=True)


def _verdicts(run: Run) -> list[str]:
    said = []
    best: tuple[float, str, float] | None = None
    for mode, by_level in measured(run, "saved", "agreement").items():
        for level, values in by_level.items():
            saved = share(values.get("saved"))
            if saved is not None and (best is None or (level, saved) > (best[2], best[0])):
                best = (saved, mode, level)
    if best is not None:
        said.append(
            f"Leaving when sure saves {100 * best[0]:.1f} % of the layers while {100 * best[2]:g} "
            f"% of the words stay the last layer's ({mode_name(best[1])})."
        )
    for lens in lenses(run)[:1]:
        rows = np.minimum(lens.known_from(), len(lens.layers) - 1)
        mean = float(np.mean([lens.layers[row] for row in rows]))
        said.append(
            f"On the text below the next word is settled after {mean:.1f} of {lens.layers[-1]} "
            "layers, on average."
        )
    return said


def _command(run: Run, path: str) -> str:
    about = next((r.values for r in reversed(run.records) if r.kind == "evaluation"), {})
    settings = about.get("settings")
    words = [path]
    if isinstance(settings, dict):
        chosen = {**(settings.get("text") or {}), **settings}
        for name in ("data", "split", "lines", "positions", "seed"):
            if isinstance(chosen.get(name), str | int):
                words += [f"--{name}", str(chosen[name])]
    return f"deepenough shortcut eval {shlex.join(words)}"
