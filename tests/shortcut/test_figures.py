"""Figures of shortcuts: what was recorded is what is shown, at every depth."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from deepenough.figure import Run
from deepenough.runs import Record
from deepenough.shortcut.figures import (
    FIGURES,
    cka_figure,
    exit_figure,
    layers_figure,
    lens_figure,
    lens_panel,
    r2_figure,
    section,
    submodules_figure,
)

JUMPS = {"id": 4.0, "mat": 1.6, "affine": 1.5, "tuned": 1.1}
SUBMODULES = {"attention": 1.2, "feed_forward": 2.0, "norms": 0.4}


def shortcut_records(num_layers: int = 30) -> list[Record]:
    """Records shaped as a real model's are: `id` knows late, maps earlier, early exits save."""
    layers = np.arange(num_layers + 1)
    depth = layers / num_layers
    records = [("fit", {"model": "smollm2", "positions": 41_231, "seconds": 12.0, "pairs": 465})]
    for mode in ("id", "mat", "affine"):
        apart = np.abs(depth - depth[:, None])
        table = 1 - (9.0 if mode == "id" else 0.55) * apart ** (0.8 if mode == "id" else 1.3)
        table[np.tril_indices(num_layers + 1, -1)] = np.nan
        rows = [[None if math.isnan(v) else v for v in row] for row in table.tolist()]
        records.append(("r2", {"mode": mode, "table": rows}))
    records.append(("cka", {"table": np.exp(-2 * np.abs(depth[:, None] - depth)).tolist()}))
    for mode, power in (JUMPS | SUBMODULES).items():
        for layer in layers:
            first = 0.02 if mode == "id" else 0.33
            known = first + (1 - first) * depth[layer] ** power
            values = {
                "precision_1": known,
                "precision_5": known**0.8,
                "precision_10": known**0.6,
                "surprisal": 1.8 + 9 * (1 - known) ** 1.5,
                "kl": 8 * (1 - known) ** 1.4,
            }
            records.append(
                ("layer", {"mode": mode, "layer": int(layer), "positions": 3000} | values)
            )
    for mode, power in JUMPS.items():
        for threshold in np.linspace(0, 1, 35):
            saved = (1 - threshold) ** 1.2 * (0.97 - 0.1 * power)
            values = {"lambda": threshold, "layers_mean": num_layers * (1 - saved), "saved": saved}
            agreement = 1 - saved ** (1.0 + 1.6 / power)
            records.append(("exit", {"mode": mode, "agreement": agreement} | values))
        for level in (0.9, 0.95, 0.99):
            saved = 2 * (1 - level) + 0.2 / power
            values = {"saved": saved if mode != "id" or level < 0.99 else None, "lambda": 0.5}
            fixed = {"fixed_layer_saved": max(0.0, saved - 0.12)}
            records.append(("saved", {"mode": mode, "agreement": level} | values | fixed))
    return [Record(0, kind, values, 0.0) for kind, values in records]


def shortcut_run(num_layers: int = 30, kinds: Iterable[str] | None = None) -> Run:
    records = shortcut_records(num_layers)
    return Run("jumps", [r for r in records if kinds is None or r.kind in kinds])


def replaced(run: Run, kind: str, **values: Any) -> Run:
    """The same run with some values of every record of a kind replaced."""
    records = [
        Record(0, r.kind, r.values | values if r.kind == kind else r.values, 0.0)
        for r in run.records
    ]
    return Run(run.name, records)


def test_the_tables_are_shown_as_recorded_mat_beside_id() -> None:
    run = shortcut_run(12)
    figure = r2_figure(run)
    assert figure is not None
    titles = [panel.title for panel in figure.panels]
    assert titles == ["mat (linear map)", "id (no map)", "affine map"]
    recorded = {r.values["mode"]: r.values["table"] for r in run.records if r.kind == "r2"}
    for panel, mode in zip(figure.panels, ("mat", "id", "affine"), strict=True):
        assert panel.values == recorded[mode]
    assert "Grey: below 0" in figure.caption
    positive = [r for r in run.records if r.values.get("mode") == "mat"]
    figure = r2_figure(Run("r", positive))
    assert figure is not None and "hatched" not in figure.caption


def test_maps_to_the_last_layer_alone_become_curves() -> None:
    table = np.full((5, 5), np.nan)
    table[:, 4] = [0.2, 0.4, 0.6, 0.8, 1.0]
    np.fill_diagonal(table, 1.0)
    figure = r2_figure(Run("r", [Record(0, "r2", {"mode": "mat", "table": table.tolist()}, 0.0)]))
    assert figure is not None
    (line,) = figure.panels[0].lines
    assert (line.x, line.y) == ([0, 1, 2, 3, 4], [0.2, 0.4, 0.6, 0.8, 1.0])
    assert figure.panels[0].y.label == "r², layer 4"
    both_ways = np.where(np.isnan(table), table.T, table).tolist()
    figure = cka_figure(Run("r", [Record(0, "cka", {"table": both_ways}, 0.0)]))
    assert figure is not None
    assert figure.panels[0].lines[0].y == line.y


@pytest.mark.parametrize(
    "table",
    [None, 3, "x", [], [[1.0]], [[1.0, 2.0]], [[None, None], [None, None]], [[1, 2], [3]],
     [["a", "b"], ["c", "d"]], [[math.nan, math.inf], [math.nan, -math.inf]]],
)  # fmt: skip
def test_what_is_no_table_is_not_shown(table: Any) -> None:
    run = shortcut_run(4, kinds=("r2", "cka"))
    assert r2_figure(replaced(run, "r2", table=table)) is None
    assert cka_figure(replaced(run, "cka", table=table)) is None


def test_every_quantity_has_its_panel_and_every_mode_its_line() -> None:
    run = shortcut_run(12)
    figure = layers_figure(run)
    assert figure is not None
    names = ("precision_1", "precision_5", "precision_10", "surprisal", "kl")
    for panel, name in zip(figure.panels, names, strict=True):
        assert len(panel.lines) == len(JUMPS)
        for line, mode in zip(panel.lines, JUMPS, strict=True):
            own = [r.values for r in run.records if r.kind == "layer" and r.values["mode"] == mode]
            assert line.name.startswith(mode if mode != "tuned" else "KL-tuned")
            assert line.x == [values["layer"] for values in own]
            assert line.y == pytest.approx([values[name] for values in own])


def test_submodules_stand_beside_mat_and_id() -> None:
    figure = submodules_figure(shortcut_run(12))
    assert figure is not None
    assert [line.name.split()[0] for line in figure.panels[0].lines] == [
        "id", "mat", "attention", "feed-forward", "norms",
    ]  # fmt: skip
    only_jumps = [r for r in shortcut_run(12).records if r.values.get("mode") not in SUBMODULES]
    assert submodules_figure(Run("r", only_jumps)) is None


def test_a_missing_value_is_a_missing_point_and_a_missing_quantity_a_missing_panel() -> None:
    run = replaced(shortcut_run(4, kinds=("layer",)), "layer", kl=None, precision_10=1.7)
    run.records[2].values["surprisal"] = math.nan
    figure = layers_figure(run)
    assert figure is not None
    assert [p.title for p in figure.panels] == ["precision@1", "precision@5", "surprisal (nats)"]
    assert [len(line.x) for line in figure.panels[2].lines] == [4, 5, 5, 5]


def test_a_divergence_of_many_sizes_is_seen_whole() -> None:
    run = shortcut_run(6, kinds=("layer",))
    figure = layers_figure(run)
    assert figure is not None
    assert [panel.y.scale for panel in figure.panels] == ["linear"] * 5
    next(r for r in run.records if r.values["mode"] == "id").values["kl"] = 300.0
    figure = layers_figure(run)
    assert figure is not None
    assert [panel.y.scale for panel in figure.panels] == ["linear"] * 4 + ["log"]
    assert figure.panels[4].y.low == 0.01


def test_a_layer_measured_again_counts_once() -> None:
    run = shortcut_run(4, kinds=("layer",))
    again = replaced(run, "layer", precision_1=0.25)
    figure = layers_figure(Run("r", [*run.records, *again.records]))
    assert figure is not None
    assert all(line.y == [0.25] * 5 for line in figure.panels[0].lines)


def test_exits_stand_against_fixed_layers() -> None:
    run = shortcut_run(10)
    figure = exit_figure(run)
    assert figure is not None
    lines = {line.name: line for line in figure.panels[0].lines}
    swept, fixed = lines["mat (linear map)"], lines["mat (linear map), one layer for all"]
    layers = [r.values for r in run.records if r.kind == "layer" and r.values["mode"] == "mat"]
    assert fixed.x == pytest.approx([1 - v["layer"] / 10 for v in layers])
    assert fixed.y == pytest.approx([v["precision_1"] for v in layers])
    exits = [r.values for r in run.records if r.kind == "exit" and r.values["mode"] == "mat"]
    assert swept.x == pytest.approx([v["saved"] for v in exits])
    assert swept.y == pytest.approx([v["agreement"] for v in exits])


def test_what_was_not_reached_is_a_dash() -> None:
    figure = exit_figure(shortcut_run(12))
    assert figure is not None
    chart = figure.panels[1]
    assert [bars.texts for bars in chart.bars[:2]] == [
        ["25.0", "15.0", "–"],
        ["32.5", "22.5", "14.5"],
    ]
    assert chart.bars[0].values[2] == 0.0


@pytest.mark.parametrize("kind", ["r2", "cka", "layer", "exit", "fit"])
def test_a_run_with_one_kind_of_record_shows_what_it_has(kind: str) -> None:
    run = shortcut_run(6, kinds=(kind,))
    expected = {"layer": {"layers", "submodules"}, "exit": {"early_exit"}, "fit": set()}
    found = {figure.name for build in FIGURES if (figure := build(run)) is not None}
    assert found == expected.get(kind, {kind})
    assert (section(run) is None) == (kind == "fit")


def test_an_unknown_mode_is_shown_too() -> None:
    run = replaced(shortcut_run(4, kinds=("layer",)), "layer", mode="$new\n")
    figure = layers_figure(run)
    assert figure is not None
    assert [line.name for line in figure.panels[0].lines] == ["$new↵"]


def test_findings_follow_the_data() -> None:
    found = section(Run("r", [*shortcut_run(12).records, Record(0, "lens", lens_values(), 0.0)]))
    assert found is not None and found.about.startswith("What each layer of smollm2")
    assert found.findings == [
        "Layers that could be saved if each token stopped as soon as it is sure: 38.2 % at 90 % "
        "agreement, 28.2 % at 95 % agreement, 20.2 % at 99 % agreement with the last layer, read "
        "with tuned maps.",
    ]


def findings(*records: Record) -> list[str]:
    """Return what is said of a run with a figure and these records."""
    layer = Record(0, "layer", {"mode": "mat", "layer": 1, "precision_1": 0.5}, 0.0)
    found = section(Run("r", [layer, *records], path="runs/mine"))
    assert found is not None
    return list(found.findings)


def decided(layer: float, low: float, high: float, mode: str = "mat") -> Record:
    values = {"layer": layer, "shares": [0.1, 0.4, 0.6, 1.0], "intervals": {"layer": [low, high]}}
    return Record(0, "decided", {"mode": mode, **values}, 0.0)


def test_half_of_the_tokens_is_said_only_where_the_data_bears_it_out() -> None:
    (said,) = findings(decided(3, 3, 3, "id"), decided(2, 1, 3))
    assert (
        said == "Half of the tokens are decided by layer 2 of 3 (1 to 3), read with a linear map."
    )
    assert said.command == "deepenough shortcut lens runs/mine --prompt 'Once upon a time'"
    assert findings(decided(3, 3, 3)) == ["Most tokens are decided by the last of 3 layers alone."]
    assert findings(Record(0, "decided", {"mode": "mat", "layer": 2, "shares": "x"}, 0.0)) == []


def test_layers_saved_are_told_with_their_intervals_and_none_where_that_is_not_sure() -> None:
    def saved(level: float, value: float, *ends: float) -> Record:
        values = {"agreement": level, "saved": value, "intervals": {"saved": list(ends)}}
        return Record(0, "saved", {"mode": "mat", **values}, 0.0)

    (said,) = findings(saved(0.9, 0.2, 0.15, 0.25), saved(0.99, 0.01, 0.0, 0.02))
    assert (
        "20.0 % (15.0 to 25.0) at 90 % agreement with the last layer" in said and "99" not in said
    )
    assert "decode calibrate MODEL --shortcuts runs/mine/shortcuts --data TEXT" in said.command
    (said,) = findings(saved(0.9, 0.01, 0.0, 0.05))
    assert said == "No layer is saved for certain if 90 % of the tokens are to stay the same."


def test_a_model_without_a_head_is_told_by_its_states() -> None:
    def r2(*layers: tuple[float, float, float]) -> Record:
        rows = [dict(zip(("value", "low", "high"), row, strict=True)) for row in layers]
        return Record(0, "r2_by_layer", {"mode": "mat", "layers": rows}, 0.0)

    (said,) = findings(r2((0.5, 0.4, 0.6), (0.95, 0.91, 0.97), (1, 1, 1)))
    assert said.startswith("Layer 1 of 2 explains 95 % (91 to 97) of the last layer's states")
    (said,) = findings(r2((0.5, 0.4, 0.6), (0.95, 0.85, 0.97), (1, 1, 1)))
    assert said == "No layer but the last explains 90 % of its states."


# -- the lens ---------------------------------------------------------------------------------


def lens_values(tokens: tuple[str, ...] = ("one", " two", " three")) -> dict[str, Any]:
    """Return a lens of five layers whose tokens are known from layers 2, 3 and 4."""
    rows = [["x"] * len(tokens) for _ in range(4)] + [[f"w{i}" for i in range(len(tokens))]]
    agrees = [[layer >= 2 + token % 3 for token in range(len(tokens))] for layer in range(5)]
    return {
        "prompt": "".join(tokens), "mode": "mat", "tokens": list(tokens),
        "layers": list(range(5)), "words": rows, "agrees": agrees,
        "probability": [[0.2 * layer] * len(tokens) for layer in range(5)],
    }  # fmt: skip


def lens_run(*values: dict[str, Any]) -> Run:
    return Run("jumps", [Record(0, "lens", v, 0.0) for v in values])


def test_a_lens_is_shown_as_recorded() -> None:
    values = lens_values()
    figure = lens_figure(lens_run(values))
    assert figure is not None
    (text,) = figure.panels
    assert text.tokens == values["tokens"] and text.depth == [2, 3, 4] and text.last == 4
    assert text.lens.predictions == values["words"]
    assert not text.lens.top and not text.lens.statistics


def test_a_lens_has_the_likeliest_tokens_and_statistics_where_they_are_whole() -> None:
    cells = [[["x", "y z"], ["y z", "q"], ["x", "q"]]] * 5
    more = {"top": cells, "top_probability": [[[0.5, 0.25]] * 3] * 5, "kl": [[0.1, None, 0.3]] * 5}
    panel = lens_panel(lens_values() | more | {"entropy": [[1.0]]})
    assert panel is not None and panel.lens is not None
    words = [[[panel.lens.words[i] for i in cell] for cell in row] for row in panel.lens.top]
    assert words == [[["x", "y␣z"], ["y␣z", "q"], ["x", "q"]]] * 5
    assert panel.lens.top_probability[4][2] == [0.5, 0.25]
    (kl,) = panel.lens.statistics.values()
    assert kl[0][0] == 0.1 and np.isnan(kl[0][1])
    for broken in ({"top": 3}, {"top": [[["x"]]]}, {"top_probability": [[[0.5]] * 3] * 5}):
        panel = lens_panel(lens_values() | more | broken)
        assert panel is not None and panel.lens is not None and not panel.lens.top


def test_a_token_is_known_where_the_agreement_no_longer_breaks() -> None:
    agrees = [[1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    panel = lens_panel(lens_values() | {"agrees": agrees, "layers": [0, 2, 4, 6, 8]})
    assert panel is not None and panel.depth == [4, 4, 8]


def test_the_latest_lens_is_shown() -> None:
    figure = lens_figure(lens_run(lens_values(("one",)), lens_values(("two",)) | {"mode": "id"}))
    assert figure is not None
    assert [panel.title for panel in figure.panels] == ["two · id (no map)"]
    assert "--prompt two --mode id" in figure.command


def test_a_missing_probability_leaves_the_prediction() -> None:
    values = lens_values(("a", "b"))
    values["probability"][1] = [None, float("nan")]
    values["probability"][2] = [7.0, 0.5]
    panel = lens_panel(values)
    assert panel is not None and panel.lens is not None
    assert panel.lens.probability[1:3] == [[None, None], [None, 0.5]]
    assert panel.lens.predictions == values["words"]


@pytest.mark.parametrize(
    "broken",
    [{"tokens": []}, {"tokens": None}, {"words": []}, {"words": [["a", "b"]]}, {"words": "abc"},
     {"words": [["a"], ["b", "c"]]}, {"agrees": None}, {"layers": None}, {"probability": 3}],
)  # fmt: skip
def test_a_broken_lens_is_left_out(broken: dict[str, Any]) -> None:
    assert lens_figure(lens_run(lens_values(("a",)) | broken)) is None
    assert lens_figure(lens_run()) is None
