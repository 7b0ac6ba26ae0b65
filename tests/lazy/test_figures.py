"""Figures of Lazy Transformers: what was recorded is what is shown; damaged records are not."""

from typing import Any

import pytest

from deepenough.figure import Run
from deepenough.lazy.figures import (
    FIGURES,
    cka_figure,
    grid_figure,
    section,
    sentence_figure,
    step_grid,
    tokens_figure,
)
from deepenough.runs import Record

SIDE = {"similarity": [[0.5, 0.9], [0.6, 1.0]], "gates": [[0.4, 0.1], [0.3, 0.0]]}
PAIR = {
    "source": "a dog", "target": "ein Hund", "epsilon": 0.2,
    "encoder": {"tokens": ["a", " dog"], "sentence": [0.5, 0.9], "depth": [2, 1], **SIDE},
    "decoder": {"tokens": ["ein", " Hund"], "sentence": [0.4, 1.0], **SIDE},
}  # fmt: skip


def run_of(*records: tuple[str, dict[str, Any]], **config: Any) -> Run:
    return Run("lazy", [Record(5, kind, values) for kind, values in records], config, path="r")


def test_gates_and_similarities_are_shown_token_by_step() -> None:
    figure = tokens_figure(run_of(("lazy_tokens", PAIR)))
    assert figure is not None
    assert [panel.title.partition(":")[0] for panel in figure.panels] == [
        "source", "source", "target", "target",
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


def test_whole_sentences() -> None:
    figure = sentence_figure(run_of(("lazy_tokens", PAIR)))
    assert figure is not None
    lines = figure.panels[0].lines
    assert [(line.name, line.x, line.y) for line in lines] == [
        ("source", [1.0, 2.0], [0.5, 0.9]), ("target", [1.0, 2.0], [0.4, 1.0]),
    ]  # fmt: skip


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


def test_sweeps_that_do_not_compare_are_not_shown_together() -> None:
    def point(steps: int, sentences: int) -> tuple[str, dict[str, Any]]:
        values = {"encoder_steps": steps, "decoder_steps": 1, "bleu": 30.0}
        return "steps", values | {"sentences": sentences}

    points = [point(1, 4), point(2, 4), point(3, 2)]
    assert set(step_grid(run_of(*points))) == {(3, 1)}
    points.append(point(3, 4))
    assert set(step_grid(run_of(*points))) == {(1, 1), (2, 1), (3, 1)}


def test_the_share_of_exact_programs_is_a_finding() -> None:
    found = section(run_of(("programs", {"exact": 0.6})))
    assert found is not None and found.findings[0].startswith("60.0 % of programs")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("lazy_tokens", {"source": "a", "target": "b", "encoder": {"tokens": ["a"]}}),
        ("steps", {"encoder_steps": 2}),
        ("programs", {"exact": "all"}),
    ],
)
def test_damaged_records_are_left_out(kind: str, values: dict[str, Any]) -> None:
    run = run_of((kind, values))
    assert [build(run) for build in FIGURES] == [None] * len(FIGURES)
    assert section(run) is None


@pytest.mark.parametrize("damage", [{"depth": [1]}, {"gates": [[1.0]]}, {"similarity": 3}])
def test_tables_that_do_not_fit_their_tokens_are_left_out(damage: dict[str, Any]) -> None:
    pair = PAIR | {"encoder": PAIR["encoder"] | damage}
    assert tokens_figure(run_of(("lazy_tokens", pair))) is None


def test_the_cka_of_any_two_steps_is_shown() -> None:
    table = [[1.0, 0.7, 0.6], [0.7, 1.0, 0.9], [0.6, 0.9, 1.0]]
    sides = {side: PAIR[side] | {"cka": table} for side in ("encoder", "decoder")}
    figure = cka_figure(run_of(("lazy_tokens", PAIR | sides)))
    assert figure is not None and len(figure.panels) == 2
    assert figure.panels[0].values == table and list(figure.panels[0].rows) == ["0", "1", "2"]
    alone = {"source": "a dog", "decoder": sides["decoder"]}
    figure = cka_figure(run_of(("lazy_tokens", alone)))
    assert figure is not None and [p.title[:5] for p in figure.panels] == ["text:"]
    damaged = alone | {"decoder": sides["decoder"] | {"cka": table[:2]}}
    assert cka_figure(run_of(("lazy_tokens", damaged))) is None


def test_a_language_model_has_a_curve_of_perplexity_by_steps() -> None:
    points = [("steps", {"decoder_steps": n, "perplexity": 20.0 - n}) for n in (2, 4)]
    figure = grid_figure(run_of(*points, ("steps", {"decoder_steps": 6, "loss": 1.0})))
    assert figure is None  # the last point says nothing of quality
    figure = grid_figure(run_of(*points))
    assert figure is not None and figure.title == "Perplexity by number of steps"
    assert figure.panels[0].lines[0].y == [18.0, 16.0]
