"""Sweeps and tables from the answers of all passes, on cases worked by hand."""

import pytest
import torch

from deepenough.ponder.measure import (
    CONFIDENCES,
    AllPasses,
    passes_by,
    passes_of,
    quality,
    records,
    settled_at,
    spread,
    sweep,
)
from deepenough.ponder.policies import FixedExit, PatienceExit, QuantileExit

# Answers of four examples after three passes; the right one is always 1.
ANSWERS = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]])
LAMBDAS = torch.tensor([[0.6, 0.5], [0.1, 0.8], [0.2, 0.2], [0.5, 0.9]])


@pytest.fixture
def answers() -> AllPasses:
    logits = torch.nn.functional.one_hot(ANSWERS, 2) * 2.0
    return AllPasses(logits, LAMBDAS.logit(), torch.ones(4, dtype=torch.long))


def test_where_examples_stop(answers: AllPasses) -> None:
    assert passes_of(answers, QuantileExit(0.5)).tolist() == [1, 2, 3, 1]
    assert passes_of(answers, QuantileExit(1.0)).tolist() == [3, 3, 3, 3]
    assert passes_of(answers, PatienceExit(1)).tolist() == [2, 3, 2, 3]
    assert passes_of(answers, FixedExit(2)).tolist() == [2, 2, 2, 2]


def test_quality_is_that_of_the_answers_given(answers: AllPasses) -> None:
    values = quality(answers, QuantileExit(0.5))
    assert values["accuracy"] == 0.75  # the third is wrong at every pass
    assert values["passes"] == pytest.approx(7 / 4)
    assert values["share"] == pytest.approx(7 / 12)
    right, wrong = 0.126928, 2.126928  # -log softmax of 2 and of 0
    assert values["loss"] == pytest.approx((3 * right + wrong) / 4, abs=1e-5)


def test_difficulty_is_the_pass_from_which_the_answer_stays(answers: AllPasses) -> None:
    assert settled_at(answers).tolist() == [1, 2, 1, 3]


def test_the_sweep_has_every_way_once(answers: AllPasses) -> None:
    points = sweep(answers, thresholds=(0.5, 1.0))
    ways = [(point["policy"], point["setting"]) for point in points]
    assert ways == [
        *[("quantile", 0.5), ("quantile", 1.0)],
        *[("confidence", value) for value in CONFIDENCES],
        *[("patience", 1), ("patience", 2)],
        *[("fixed", 1), ("fixed", 2), ("fixed", 3)],
    ]
    for point in points:
        if point["policy"] == "fixed":
            expected = (ANSWERS[int(point["setting"]) - 1] == 1).double().mean()
            assert point["accuracy"] == pytest.approx(float(expected))
    baseline = AllPasses(answers.step_logits, None, answers.labels)
    assert {point["policy"] for point in sweep(baseline)} == {"confidence", "patience", "fixed"}


def test_passes_by_group() -> None:
    groups, passes = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 3, 3, 2])
    assert passes_by(groups, 4, passes, 3) == [[1, 0, 0], [0, 0, 2], [0, 1, 0], [0, 0, 0]]


def test_chosen_examples_span_the_whole_range() -> None:
    values = torch.tensor([5.0, 1.0, 9.0, 3.0, 7.0])
    assert spread(values, 3) == [1, 0, 2]
    assert spread(values, 9) == [1, 3, 0, 4, 2]


def test_records_hold_what_pictures_need(answers: AllPasses) -> None:
    found = records(
        answers, QuantileExit(0.5), ["no", "yes"], list("abcd"), step=7, about={"model": "ponder"}
    )
    assert all(r.step == 7 and r.values["num_passes"] == 3 for r in found)
    tables = {r.values["by"]: r.values for r in found if r.kind == "ponder_passes"}
    assert tables["label"]["counts"] == [[0, 0, 0], [2, 1, 1]]
    assert tables["difficulty"]["counts"] == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]
    shown = [r.values for r in found if r.kind == "ponder_example"]
    assert [example["text"] for example in shown] == ["d", "a", "b", "c"]  # by expected passes
    first = shown[1]
    assert first["halting"] == pytest.approx([0.6, 0.2, 0.2], abs=1e-5)
    assert first["answers"] == ["yes"] * 3 and first["passes"] == 1
    assert all(r.to_json() for r in found)
