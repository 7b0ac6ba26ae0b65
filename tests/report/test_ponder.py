"""Pictures of pondering from records alone; what cannot be read is left out, not drawn wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from deepenough.report import style
from deepenough.report.parity import draw_parity
from deepenough.report.ponder import draw_passes, draw_ponder_frontier
from deepenough.report.ponder_halting import draw_halting
from deepenough.report.ponder_source import (
    exit_points,
    halting_examples,
    parity_bands,
    pass_tables,
)
from deepenough.report.source import Run
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
    rows[4] = 0  # nobody settled there
    groups = [str(n) for n in range(1, 7)]
    by_difficulty = {"by": "difficulty", "groups": groups, "counts": rows.tolist()}
    return [Record(9, "ponder_passes", about | by) for by in (by_label, by_difficulty)]


def examples() -> list[Record]:
    texts = [
        "unflinchingly bleak and desperate",
        "it 's a charming and often affecting journey .",
        "allows us to hope that nolan is poised to embark a major career as a commercial yet "
        "inventive filmmaker , whatever that may come to mean in the years ahead of us all .",
        "a $tex$ \u4f60\u597d text",
    ]
    found = []
    for place, text in enumerate(texts):
        p = np.exp(-((np.arange(6) - 1.2 * place) ** 2))
        answers = ["negative"] * place + ["positive"] * (6 - place)
        values: dict[str, Any] = {"text": text, "label": "positive", "answers": answers}
        values |= {"halting": (p / p.sum()).tolist(), "passes": place + 1}
        values["confidence"] = np.linspace(0.6, 0.99, 6).tolist()
        found.append(Record(9, "ponder_example", values | {"model": "ponder", "evaluation": 1}))
    return found


def parity(mechanism: str, knee: float) -> Run:
    records = []
    for lowest in range(1, 65, 8):
        accuracy = 0.5 + 0.5 / (1 + np.exp((lowest - knee) / 4))
        values = {"lowest": lowest, "highest": lowest + 7, "beyond": lowest > 32}
        values |= {"accuracy": accuracy, "passes": 4 + lowest / 3, "mechanism": mechanism}
        records.append(Record(5, "parity", values))
    return Run(mechanism, records)


def save(figure: Figure | None, tmp_path: Path) -> None:
    assert figure is not None
    for path in style.save(figure, tmp_path / "picture"):
        assert path.stat().st_size > 2000


def test_the_frontier_of_three_models(tmp_path: Path) -> None:
    run = Run(
        "sst2", exits("ponder") + exits("weighted", shift=-0.004) + exits("last", shift=0.003)
    )
    figure = draw_ponder_frontier(run)
    save(figure, tmp_path)
    assert figure is not None
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert "pondering, halting" in labels and "PABEE-trained, patience" in labels
    assert "full depth, fine-tuned alone" in labels


def test_the_last_evaluation_counts() -> None:
    run = Run("r", exits("ponder", 1) + exits("weighted", 2) + exits("ponder", 3, shift=-0.1))
    points = exit_points(run)
    assert len([p for p in points if p.model == "ponder"]) == len(exits("ponder"))
    assert max(p.accuracy for p in points if p.model == "ponder") < 0.85
    assert any(p.model == "weighted" for p in points)


def test_passes_by_label_and_difficulty(tmp_path: Path) -> None:
    save(draw_passes(Run("r", tables())), tmp_path)
    save(draw_passes(Run("r", tables()[1:])), tmp_path)
    many = {"model": "ponder", "by": "label", "groups": [f"answer {n}" for n in range(20)]}
    counts = np.random.default_rng(1).integers(0, 9, (20, 6)).tolist()
    save(draw_passes(Run("r", [Record(1, "ponder_passes", many | {"counts": counts})])), tmp_path)


def test_halting_of_chosen_examples(tmp_path: Path) -> None:
    save(draw_halting(Run("r", examples())), tmp_path)
    save(draw_halting(Run("r", examples()[:1])), tmp_path)


def test_parity_of_one_run_and_of_several(tmp_path: Path) -> None:
    save(draw_parity([parity("ponder", 50)]), tmp_path)
    save(draw_parity([parity("ponder", 50), parity("act", 30), parity("fixed", 25)]), tmp_path)


def test_nothing_recorded_is_nothing_drawn() -> None:
    run = Run("r", [Record(1, "train", {"loss": 1.0})])
    assert draw_ponder_frontier(run) is None
    assert draw_passes(run) is None
    assert draw_halting(run) is None
    assert draw_parity([run]) is None


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("ponder_exit", {"policy": "fixed", "setting": 1, "passes": None, "accuracy": 0.5}),
        ("ponder_exit", {"policy": "fixed", "setting": 1, "passes": 1.0, "accuracy": float("nan")}),
        ("ponder_passes", {"by": "label", "groups": ["a"], "counts": [[1], [2]]}),
        ("ponder_passes", {"by": "label", "groups": ["a"], "counts": [["x"]]}),
        ("ponder_passes", {"by": "label", "groups": 3, "counts": [[1]]}),
        ("ponder_example", {"halting": [0.5, 0.5], "answers": ["a"], "confidence": [1.0, 1.0]}),
        ("ponder_example", {"halting": "much"}),
        ("parity", {"lowest": 1, "highest": 2, "accuracy": "good", "passes": 3}),
    ],
)
def test_records_that_lack_something_are_left_out(kind: str, values: dict[str, Any]) -> None:
    run = Run("r", [Record(1, kind, values | ({"passes": 1} if "answers" in values else {}))])
    assert not exit_points(run) + pass_tables(run) + halting_examples(run) + parity_bands(run)  # type: ignore[operator]
