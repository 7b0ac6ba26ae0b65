"""Figures of pondering from records alone; what cannot be read is left out, not drawn wrong."""

from typing import Any

import numpy as np
import pytest

from deepenough.figure import Run
from deepenough.ponder.figures import (
    FIGURES,
    exit_points,
    frontier_figure,
    parity_figure,
    passes_figure,
    section,
)
from deepenough.runs import Record

NUM_PASSES = 6


def exits(model: str, evaluation: int = 1, shift: float = 0.0) -> list[Record]:
    about = {"model": model, "evaluation": evaluation, "num_passes": NUM_PASSES}
    found = []
    policies: dict[str, list[float]] = {"fixed": [1, 2, 3, 4, 5, 6]}
    if model != "last":
        policies["patience"] = [1, 2, 3, 4, 5]
    if model == "ponder":
        policies["quantile"] = [0.1 * k for k in range(1, 11)]
    for policy, settings in policies.items():
        for place, setting in enumerate(settings):
            share = (place + 1) / len(settings)
            lift = {"fixed": 0.0, "patience": 0.02, "quantile": 0.035}[policy]
            accuracy = 0.91 - 0.12 * (1 - share) ** 2 + lift * (1 - share) + shift
            values = {"policy": policy, "setting": setting, "passes": NUM_PASSES * share}
            found.append(Record(9, "ponder_exit", about | values | {"accuracy": accuracy}))
    return found


def tables() -> list[Record]:
    about = {"model": "ponder", "evaluation": 1}
    by_label = {"by": "label", "groups": ["negative", "positive"]}
    by_label["counts"] = [[20, 200, 120, 60, 20, 8], [60, 260, 90, 25, 6, 3]]  # type: ignore[assignment]
    rows = np.random.default_rng(0).multinomial(100, np.full(6, 1 / 6), size=6)
    rows = np.triu(rows) + np.eye(6, dtype=int) * 60
    rows[4] = 0  # no example changed its answer there last
    groups = [str(n) for n in range(1, 7)]
    by_difficulty = {"by": "difficulty", "groups": groups, "counts": rows.tolist()}
    return [Record(9, "ponder_passes", about | by) for by in (by_label, by_difficulty)]


def parity(mechanism: str, knee: float) -> Run:
    records = []
    for lowest in range(1, 65, 8):
        accuracy = 0.5 + 0.5 / (1 + np.exp((lowest - knee) / 4))
        values = {"lowest": lowest, "highest": lowest + 7, "beyond": lowest > 32}
        values |= {"accuracy": accuracy, "passes": 4 + lowest / 3, "mechanism": mechanism}
        records.append(Record(5, "parity", values))
    return Run(mechanism, records)


def test_the_frontier_has_a_line_for_every_way_to_stop() -> None:
    figure = frontier_figure(Run("sst2", exits("ponder")))
    assert figure is not None
    (chart,) = figure.panels
    names = [line.name for line in chart.lines]
    assert names == ["halting probability", "patience", "fixed number of passes"]
    for line in chart.lines:
        assert list(line.x) == sorted(line.x)


def test_accuracies_far_below_the_best_are_cut_off_and_that_is_said() -> None:
    values = {"model": "ponder", "policy": "fixed", "setting": 1}
    records = [
        Record(9, "ponder_exit", values | {"passes": n, "accuracy": a})
        for n, a in ((1, 0.5), (6, 0.9))
    ]
    figure = frontier_figure(Run("r", records))
    assert figure is not None
    assert figure.panels[0].y.low == pytest.approx(0.776)
    assert "Settings below 78% accuracy are not shown." in figure.caption


def test_the_last_evaluation_counts() -> None:
    run = Run("r", exits("ponder", 1) + exits("ponder", 2, shift=-0.1))
    points = exit_points(run)
    assert len(points) == len(exits("ponder"))
    assert max(point.score for point in points) < 0.85


def test_passes_by_label_and_difficulty() -> None:
    figure = passes_figure(Run("r", tables()))
    assert figure is not None
    by_label, heat = figure.panels
    assert by_label.rows == ["negative (428)", "positive (444)"]
    assert sum(by_label.values[0]) == pytest.approx(1.0)
    assert len(heat.rows) == 5  # the group without an example is left out
    assert all(sum(row) == pytest.approx(1.0) for row in heat.values)


def test_parity_by_difficulty() -> None:
    figure = parity_figure(parity("ponder", 50))
    assert figure is not None
    accuracy, passes = figure.panels
    assert [line.name for line in accuracy.lines] == ["PonderNet"]
    assert passes.lines[0].x[:2] == [4.5, 12.5]
    assert accuracy.spans[0].low == 32.5 and accuracy.spans[0].high == 64.5


def test_nothing_recorded_is_no_figure_and_no_section() -> None:
    run = Run("r", [Record(1, "train", {"loss": 1.0})])
    assert [build(run) for build in FIGURES] == [None] * len(FIGURES)
    assert section(run) is None


def test_findings_follow_the_data() -> None:
    found = section(Run("sst2", exits("ponder"), path="runs/sst2"))
    assert found is not None
    assert found.findings == [
        "Accuracy 91.0 % with 6.00 passes; at least as accurate with 4.80 passes (by halting "
        "probability)."
    ]
    slower = [r for r in exits("ponder") if r.values["policy"] == "fixed"]
    found = section(Run("sst2", slower))
    assert found is not None and "no setting that stops earlier" in found.findings[0]
    found = section(parity("fixed", 50))
    assert found is not None
    assert "decides" not in found.about
    assert found.findings[1].startswith("Parity of vectors harder than any in training: 82.5 %")
    assert len(found.findings) == 2  # what decides nothing does not compute longer


def test_longer_on_harder_inputs_is_said_only_where_it_is_so() -> None:
    def told(run: Run) -> list[str]:
        found = section(run)
        return [] if found is None else [f for f in found.findings if "computes" in f]

    rising = parity("ponder", 50)
    assert told(rising)[0].startswith("It computes longer on harder vectors: the correlation")
    for change, words in ((lambda p: 40 - p, ["shorter"]), (lambda p: 4.0, [])):
        records = [
            Record(5, "parity", r.values | {"passes": change(r.values["passes"])})
            for r in rising.records
        ]
        assert [word for word in words if word in told(Run("r", records))[0]] == words
        assert len(told(Run("r", records))) == len(words)
    assert "longer on harder examples" in told(Run("r", tables()))[0]
    flat = {"by": "difficulty", "groups": ["1", "2"], "counts": [[9, 8], [8, 9]]}
    assert told(Run("r", [Record(9, "ponder_passes", flat)])) == []


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("ponder_exit", {"policy": "fixed", "setting": 1, "passes": None, "accuracy": 0.5}),
        ("ponder_exit", {"policy": "fixed", "setting": 1, "passes": 1.0, "accuracy": float("nan")}),
        ("ponder_passes", {"by": "label", "groups": ["a"], "counts": [[1], [2]]}),
        ("ponder_passes", {"by": "label", "groups": ["a"], "counts": [["x"]]}),
        ("ponder_passes", {"by": "label", "groups": 3, "counts": [[1]]}),
        ("ponder_passes", {"by": "label", "groups": ["a"], "counts": [[0, 0]]}),
        ("ponder_passes", {"by": "label", "groups": ["a"], "counts": [[1, float("nan")]]}),
        ("parity", {"lowest": 1, "highest": 2, "accuracy": "good", "passes": 3}),
    ],
)
def test_records_that_lack_something_are_left_out(kind: str, values: dict[str, Any]) -> None:
    run = Run("r", [Record(1, kind, values)])
    assert [build(run) for build in FIGURES] == [None] * len(FIGURES)
