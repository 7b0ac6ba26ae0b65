"""Tables and curves of shortcuts: what was recorded is what is drawn, at every depth."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepenough.report import FIGURES, Run, read_run, save, write_figures
from deepenough.report.shortcut_exit import draw_exit
from deepenough.report.shortcut_layers import draw_layers, draw_submodules
from deepenough.report.shortcut_look import LOOKS, layer_ticks
from deepenough.report.shortcut_tables import draw_cka, draw_r2
from deepenough.runs import Metrics, Record, RunFolder

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


def lines(axes: Axes) -> dict[str, np.ndarray]:
    """Colour -> the points of the line drawn in it."""
    return {str(line.get_color()): np.asarray(line.get_xydata()) for line in axes.get_lines()}


def nothing_overlaps(figure: Figure) -> None:
    """Numbers on an axis do not touch, and neither a panel nor a legend leaves the figure."""
    figure.draw_without_rendering()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    for axes in figure.axes:
        boxes = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text()]
        assert all(a.x1 < b.x0 for a, b in pairwise(sorted(boxes, key=lambda b: b.x0)))
        boxes = [t.get_window_extent() for t in axes.get_yticklabels() if t.get_text()]
        assert all(a.y1 < b.y0 for a, b in pairwise(sorted(boxes, key=lambda b: b.y0)))
        box = axes.get_tightbbox()
        assert box is not None
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= figure.bbox.width + 1
        assert box.y1 <= figure.bbox.height + 1


@pytest.mark.parametrize("num_layers", [1, 12, 48])
@pytest.mark.parametrize("draw", [draw_r2, draw_cka, draw_layers, draw_submodules, draw_exit])
def test_nothing_overlaps_at_any_depth(
    draw: Callable[[Run], Figure | None], num_layers: int
) -> None:
    figure = draw(shortcut_run(num_layers))
    assert figure is not None
    nothing_overlaps(figure)


def test_the_tables_are_drawn_as_recorded_mat_beside_id() -> None:
    run = shortcut_run(12)
    figure = draw_r2(run)
    assert figure is not None
    panels = [axes for axes in figure.axes if axes.get_xlabel()]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles == ["mat (linear map)", "id (no map)", "affine map"]
    recorded = {r.values["mode"]: r.values["table"] for r in run.records if r.kind == "r2"}
    for axes, mode in zip(panels, ("mat", "id", "affine"), strict=True):
        drawn = np.ma.filled(axes.get_images()[0].get_array(), np.nan)
        np.testing.assert_allclose(drawn, np.array(recorded[mode], dtype=float))


def test_only_values_below_zero_are_hatched() -> None:
    table = [[1.0, -3.0, 0.5], [None, 1.0, -0.1], [None, None, 1.0]]
    figure = draw_r2(Run("r", [Record(0, "r2", {"mode": "id", "table": table}, 0.0)]))
    assert figure is not None
    (hatched,) = figure.axes[0].collections
    centres = {tuple(path.vertices[:4].mean(axis=0)) for path in hatched.get_paths()}
    assert centres == {(1.0, 0.0), (2.0, 1.0)}
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["below 0"]


def test_maps_to_the_last_layer_alone_become_curves() -> None:
    table = np.full((5, 5), np.nan)
    table[:, 4] = [0.2, 0.4, 0.6, 0.8, 1.0]
    np.fill_diagonal(table, 1.0)
    run = Run("r", [Record(0, "r2", {"mode": "mat", "table": table.tolist()}, 0.0)])
    figure = draw_r2(run)
    assert figure is not None
    (points,) = lines(figure.axes[0]).values()
    np.testing.assert_allclose(points.T, [[0, 1, 2, 3, 4], [0.2, 0.4, 0.6, 0.8, 1.0]])
    assert figure.axes[0].get_ylabel() == "r² of layer 4"
    both_ways = np.where(np.isnan(table), table.T, table).tolist()
    figure = draw_cka(Run("r", [Record(0, "cka", {"table": both_ways}, 0.0)]))
    assert figure is not None
    (same,) = lines(figure.axes[0]).values()
    np.testing.assert_allclose(same, points)


@pytest.mark.parametrize(
    "table",
    [None, 3, "x", [], [[1.0]], [[1.0, 2.0]], [[None, None], [None, None]], [[1, 2], [3]],
     [["a", "b"], ["c", "d"]], [[math.nan, math.inf], [math.nan, -math.inf]]],
)  # fmt: skip
def test_what_is_no_table_is_not_drawn(table: Any) -> None:
    run = shortcut_run(4, kinds=("r2", "cka"))
    assert draw_r2(replaced(run, "r2", table=table)) is None
    assert draw_cka(replaced(run, "cka", table=table)) is None


def test_tables_of_an_earlier_model_are_left_out() -> None:
    old, new = shortcut_run(6, kinds=("r2",)), shortcut_run(4, kinds=("r2",))
    newest = [record for record in new.records if record.values["mode"] == "mat"]
    figure = draw_r2(Run("r", [*old.records, *newest]))
    assert figure is not None
    assert [
        axes.get_images()[0].get_array().shape for axes in figure.axes if axes.get_xlabel()
    ] == [(5, 5)]


def test_every_quantity_has_its_panel_and_every_mode_its_line() -> None:
    run = shortcut_run(12)
    figure = draw_layers(run)
    assert figure is not None
    names = ("precision_1", "precision_5", "precision_10", "surprisal", "kl")
    for axes, name in zip(figure.axes, names, strict=False):
        drawn = lines(axes)
        assert set(drawn) == {LOOKS[mode][1] for mode in JUMPS}
        for mode in JUMPS:
            recorded = [
                (r.values["layer"], r.values[name])
                for r in run.records
                if r.kind == "layer" and r.values["mode"] == mode
            ]
            np.testing.assert_allclose(drawn[LOOKS[mode][1]], recorded)


def test_submodules_stand_beside_mat_and_id() -> None:
    figure = draw_submodules(shortcut_run(12))
    assert figure is not None
    compared = {"id", "mat", *SUBMODULES}
    assert set(lines(figure.axes[0])) == {LOOKS[mode][1] for mode in compared}
    only_jumps = [r for r in shortcut_run(12).records if r.values.get("mode") not in SUBMODULES]
    assert draw_submodules(Run("r", only_jumps)) is None


def test_a_missing_value_is_a_missing_point_and_a_missing_quantity_a_missing_panel() -> None:
    run = replaced(shortcut_run(4, kinds=("layer",)), "layer", kl=None, precision_10=1.7)
    run.records[2].values["surprisal"] = math.nan
    figure = draw_layers(run)
    assert figure is not None
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["precision@1", "precision@5", "surprisal (nats)"]
    assert [len(points) for points in lines(figure.axes[2]).values()] == [4, 5, 5, 5]
    nothing_overlaps(figure)


def test_a_divergence_of_many_sizes_is_seen_whole() -> None:
    run = shortcut_run(6, kinds=("layer",))
    figure = draw_layers(run)
    assert figure is not None
    assert [axes.get_yscale() for axes in figure.axes[:5]] == ["linear"] * 5
    next(r for r in run.records if r.values["mode"] == "id").values["kl"] = 300.0
    figure = draw_layers(run)
    assert figure is not None
    assert [axes.get_yscale() for axes in figure.axes[:5]] == ["linear"] * 4 + ["log"]
    low, high = figure.axes[4].get_ylim()
    assert 0 < low <= 0.01 < 300 < high
    nothing_overlaps(figure)


def test_a_layer_measured_again_counts_once() -> None:
    run = shortcut_run(4, kinds=("layer",))
    again = replaced(run, "layer", precision_1=0.25)
    figure = draw_layers(Run("r", [*run.records, *again.records]))
    assert figure is not None
    for points in lines(figure.axes[0]).values():
        np.testing.assert_allclose(points[:, 1], [0.25] * 5)


def test_exits_stand_against_fixed_layers() -> None:
    run = shortcut_run(10)
    figure = draw_exit(run)
    assert figure is not None
    drawn = [line for line in figure.axes[0].get_lines() if line.get_color() == LOOKS["mat"][1]]
    fixed, sweep = (np.asarray(line.get_xydata()) for line in drawn)
    layers = [r.values for r in run.records if r.kind == "layer" and r.values["mode"] == "mat"]
    np.testing.assert_allclose(fixed, [(1 - v["layer"] / 10, v["precision_1"]) for v in layers])
    exits = [r.values for r in run.records if r.kind == "exit" and r.values["mode"] == "mat"]
    np.testing.assert_allclose(sweep, [(v["saved"], v["agreement"]) for v in exits])


def test_what_was_not_reached_is_a_dash() -> None:
    figure = draw_exit(shortcut_run(12, kinds=("saved",)))
    assert figure is not None
    written = [text.get_text() for text in figure.axes[0].texts]
    assert written[:6] == ["25.0", "15.0", "–", "32.5", "22.5", "14.5"]


@pytest.mark.parametrize("kind", ["r2", "cka", "layer", "exit", "saved", "fit"])
def test_a_run_with_one_kind_of_record_leaves_what_it_has(kind: str) -> None:
    run = shortcut_run(6, kinds=(kind,))
    expected = {"r2": {"r2"}, "cka": {"cka"}, "layer": {"layers", "submodules"}, "fit": set()}
    figures = {name: figure for name, draw in FIGURES.items() if (figure := draw(run)) is not None}
    for figure in figures.values():
        nothing_overlaps(figure)
    assert set(figures) == expected.get(kind, {"early_exit"})


def test_the_pictures_come_from_the_files_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    metrics = Metrics(folder.metrics)
    for record in shortcut_records(3):
        metrics.append(record)
    written = write_figures(read_run(folder.path), folder.plots)
    names = ["r2", "cka", "layers", "submodules", "early_exit"]
    assert [path.name for path in written] == [f"{n}.{k}" for n in names for k in ("png", "pdf")]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        figure = draw_r2(shortcut_run(4))
        assert figure is not None
        contents.append([path.read_bytes() for path in save(figure, tmp_path / name)])
    assert contents[0] == contents[1]


def test_an_unknown_mode_is_drawn_too() -> None:
    run = replaced(shortcut_run(4, kinds=("layer",)), "layer", mode="$new\n")
    figure = draw_layers(run)
    assert figure is not None
    assert len(lines(figure.axes[0])) == 1
    nothing_overlaps(figure)


@pytest.mark.parametrize("last", [1, 2, 6, 12, 30, 31, 48, 126])
def test_layers_are_numbered_from_the_first_and_not_too_densely(last: int) -> None:
    ticks = layer_ticks(last, inches=3.7)
    assert ticks[0] == 0
    assert ticks[-1] <= last
    assert len(ticks) <= 17
    assert last - ticks[-1] < max(1, ticks[-1] - (ticks[-2] if len(ticks) > 1 else 0))
