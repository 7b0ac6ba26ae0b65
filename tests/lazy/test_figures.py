"""Figures of Lazy Transformers: what was recorded is what is shown; damaged records are not."""

from typing import Any

import pytest

from deepenough.figure import Run
from deepenough.lazy.figures import (
    FIGURES,
    epsilon_figure,
    epsilon_points,
    grid_figure,
    programs_figure,
    section,
    sentence_figure,
    stops_figure,
    tokens_figure,
)
from deepenough.runs import Record

SIDE = {"similarity": [[0.5, 0.9], [0.6, 1.0]], "gates": [[0.4, 0.1], [0.3, 0.0]]}
PAIR = {
    "source": "a dog", "target": "ein Hund", "epsilon": 0.2,
    "encoder": {"tokens": ["a", " dog"], "sentence": [0.5, 0.9], "depth": [2, 1], **SIDE},
    "decoder": {"tokens": ["ein", " Hund"], "sentence": [0.4, 1.0], **SIDE},
}  # fmt: skip
MANY = {
    "sentences": 9, "similarity": [0.4, 0.9], "quartiles": [[0.3, 0.8], [0.5, 1.0]],
    "epsilon": 0.2, "patience": 1, "tokens_by_steps": [3, 9],
}  # fmt: skip


def run_of(*records: tuple[str, dict[str, Any]], **config: Any) -> Run:
    return Run("lazy", [Record(5, kind, values) for kind, values in records], config, path="r")


def test_gates_and_similarities_are_shown_token_by_step() -> None:
    figure = tokens_figure(run_of(("lazy_tokens", PAIR)))
    assert figure is not None
    assert [panel.title.partition(":")[0] for panel in figure.panels] == [
        "source", "source", "translation", "translation",
    ]  # fmt: skip
    gates, similarity = figure.panels[:2]
    assert gates.values == SIDE["gates"] and similarity.values == SIDE["similarity"]
    assert gates.rows == ["a", "␣dog"]
    assert gates.framed == [(0, 1), (1, 0)] and not similarity.framed
    assert gates.texts == [[".40", ".10"], [".30", ".00"]]
    assert "with epsilon 0.2" in figure.caption


def test_a_model_without_gates_has_similarities_alone() -> None:
    sides = {side: {k: v for k, v in PAIR[side].items() if k not in ("gates", "depth")}
             for side in ("encoder", "decoder")}  # fmt: skip
    run = run_of(("lazy_tokens", PAIR | sides | {"epsilon": None}))
    figure = tokens_figure(run)
    assert figure is not None and len(figure.panels) == 2
    found = section(run)
    assert found is not None and "gate" not in found.about


def test_whole_sentences_and_when_tokens_stop() -> None:
    run = run_of(("lazy_tokens", PAIR), ("lazy_rest", MANY | {"task": "programs"}))
    figure = sentence_figure(run)
    assert figure is not None
    names = [line.name for line in figure.panels[0].lines]
    assert names == ["mean of 9 programs", "the inspected source", "the inspected translation"]
    assert figure.panels[0].lines[0].low == [0.3, 0.8]
    figure = stops_figure(run)
    assert figure is not None
    (bars,) = figure.panels[0].bars
    assert bars.values == [0.25, 0.75] and bars.hatched == [1]
    assert figure.panels[0].rules[0].name == "mean: 1.8 of 2 steps"


def test_the_steps_of_training_are_framed_in_the_grid() -> None:
    grid = [
        ("steps", {"encoder_steps": e, "decoder_steps": d, "bleu": 10.0 * e + d})
        for e, d in ((2, 1), (2, 2), (4, 2))
    ]
    figure = grid_figure(run_of(*grid, model={"encoder_steps": 4, "decoder_steps": 2}))
    assert figure is not None
    (heat,) = figure.panels
    assert (heat.rows, heat.columns) == (["1", "2"], ["2", "4"])
    assert heat.values == [[21.0, None], [22.0, 42.0]]
    assert heat.framed == [(1, 1)] and "Framed" in figure.caption
    other = grid_figure(run_of(*grid))
    assert other is not None and "Framed" not in other.caption


def sweep(*points: tuple[float, float, float]) -> Run:
    return run_of(
        *(
            ("epsilon", {"epsilon": e, "bleu": b, "encoder_flops": f, "encoder_seconds": f / 2})
            for e, b, f in points
        )
    )


def test_costs_are_relative_to_epsilon_0() -> None:
    run = sweep((0.0, 30.0, 100.0), (0.1, 29.9, 60.0), (0.5, 20.0, 30.0))
    figure = epsilon_figure(run)
    assert figure is not None
    (line,) = figure.panels[0].lines
    assert (line.x, line.y, line.labels) == (
        [1.0, 0.6, 0.3],
        [30.0, 29.9, 20.0],
        ["0", "0.1", "0.5"],
    )
    found = section(run)
    assert found is not None
    assert found.findings == [
        "BLEU 30.0 with all steps; 29.9 at epsilon 0.1, with 60 % of the encoder's FLOPs."
    ]
    found = section(sweep((0.0, 30.0, 100.0), (0.5, 20.0, 30.0)))
    assert found is not None and "no epsilon that was measured saves FLOPs" in found.findings[0]
    assert epsilon_figure(sweep((0.1, 30.0, 100.0), (0.5, 20.0, 30.0))) is None


def test_sweeps_that_do_not_compare_are_not_shown_together() -> None:
    def point(epsilon: float, sentences: int) -> tuple[str, dict[str, Any]]:
        values = {"epsilon": epsilon, "bleu": 30.0, "encoder_flops": 1.0, "encoder_seconds": 1.0}
        return "epsilon", values | {"sentences": sentences}

    points = [point(0.0, 4), point(1.0, 4), point(0.5, 2)]
    assert [p["epsilon"] for p in epsilon_points(run_of(*points))] == [0.5]
    points.append(point(0.5, 4))
    assert [p["epsilon"] for p in epsilon_points(run_of(*points))] == [0.0, 0.5, 1.0]


def test_programs_by_kind_and_length() -> None:
    rows = [
        {"kind": "addition", "length": 1, "exact": 1.0, "programs": 3},
        {"kind": "addition", "length": 1, "exact": 0.0, "programs": 1},
        {"kind": "loop", "length": 2, "exact": 0.5, "programs": 4},
    ]
    run = run_of(("programs", {"exact": 0.6, "exact_by": rows}))
    figure = programs_figure(run)
    assert figure is not None
    (chart,) = figure.panels
    assert [(bars.name, bars.values) for bars in chart.bars] == [
        ("addition", [0.75, None]), ("loop", [None, 0.5]),
    ]  # fmt: skip
    found = section(run)
    assert found is not None and found.findings[0].startswith("60.0 % of programs")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("lazy_tokens", {"source": "a", "target": "b", "encoder": {"tokens": ["a"]}}),
        ("lazy_tokens", PAIR | {"decoder": PAIR["encoder"] | {"depth": [1]}}),
        ("lazy_tokens", PAIR | {"encoder": PAIR["encoder"] | {"gates": [[1.0]]}}),
        ("lazy_rest", {"sentences": 3}),
        ("lazy_rest", MANY | {"quartiles": [[0.1]]}),
        ("lazy_rest", MANY | {"tokens_by_steps": "many"}),
        ("lazy_rest", MANY | {"epsilon": None}),
        ("steps", {"encoder_steps": 2}),
        ("epsilon", {"epsilon": "all"}),
        ("programs", {"exact_by": [{"kind": "a"}]}),
        ("programs", {"exact_by": 3}),
    ],
)
def test_damaged_records_are_left_out(kind: str, values: dict[str, Any]) -> None:
    run = run_of((kind, values))
    assert [build(run) for build in FIGURES] == [None] * len(FIGURES)
    assert section(run) is None
