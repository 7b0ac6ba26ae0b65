"""Measurement of a classifier: cases worked by hand, a trained run, other examples."""

import io
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.__main__ import main
from deepenough.data.classification import EncodedExamples, Example
from deepenough.errors import UserError
from deepenough.measurement import ComparedData
from deepenough.ponder.config import ExitConfig, PonderConfig, PonderEvalConfig, PonderGrid
from deepenough.ponder.evaluation import (
    CONFIDENCES,
    THRESHOLDS,
    AllPasses,
    FinishedRun,
    all_passes,
    choose_exit,
    evaluate,
    load_classifier,
    open_candidate,
    passes_by,
    predict,
    quality,
    records,
    settled_at,
    sweep,
)
from deepenough.ponder.halting import (
    ConfidenceExit,
    FixedExit,
    PatienceExit,
    QuantileExit,
    make_policy,
)
from deepenough.runs import Record, read_records

# Answers of four examples after three passes; the right one is always 1.
ANSWERS = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]])
LAMBDAS = torch.tensor([[0.6, 0.5], [0.1, 0.8], [0.2, 0.2], [0.5, 0.9]])


@pytest.fixture
def answers() -> AllPasses:
    logits = torch.nn.functional.one_hot(ANSWERS, 2) * 2.0
    return AllPasses(logits, LAMBDAS.logit(), torch.ones(4, dtype=torch.long))


def test_where_examples_stop(answers: AllPasses) -> None:
    assert answers.passes(QuantileExit(0.5)).tolist() == [1, 2, 3, 1]
    assert answers.passes(QuantileExit(1.0)).tolist() == [3, 3, 3, 3]
    assert answers.passes(PatienceExit(1)).tolist() == [2, 3, 2, 3]
    assert answers.passes(FixedExit(2)).tolist() == [2, 2, 2, 2]


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
    points = sweep(answers)
    ways = [(point["policy"], point["setting"]) for point in points]
    assert ways == [
        *[("quantile", value) for value in THRESHOLDS],
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


def test_records_hold_what_pictures_need(answers: AllPasses) -> None:
    found = list(records(answers, QuantileExit(0.5), ["no", "yes"]))
    assert all(values["num_passes"] == 3 for _, values in found)
    tables = {values["by"]: values for kind, values in found if kind == "ponder_passes"}
    assert tables["label"]["counts"] == [[0, 0, 0], [2, 1, 1]]
    assert tables["difficulty"]["counts"] == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert all(Record(7, kind, values).to_json() for kind, values in found)


def test_evaluate_writes_the_whole_frontier(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "metrics.jsonl").write_text("")  # other tests measure the same run
    values = evaluate(PonderEvalConfig(str(run)))
    assert values["split"] == "valid" and values["examples"] == 40
    assert values["accuracy"] > 0.9
    evaluate(PonderEvalConfig(str(run)))
    records, _ = read_records(run / "metrics.jsonl")
    first = [record for record in records if record.values.get("evaluation") == 1]
    again = [record for record in records if record.values.get("evaluation") == 2]
    kinds = [record.kind for record in first]
    assert [record.kind for record in again] == kinds
    exits = [record.values for record in first if record.kind == "ponder_exit"]
    assert {point["policy"] for point in exits} == {"quantile", "confidence", "patience", "fixed"}
    full = next(p for p in exits if p["policy"] == "fixed" and p["setting"] == 3)
    assert full["passes"] == 3.0 and full["share"] == 1.0
    assert next(p for p in exits if p["policy"] == "quantile" and p["setting"] == 1.0) == {
        **full,
        "policy": "quantile",
        "setting": 1.0,
    }
    tables = {r.values["by"]: r.values for r in first if r.kind == "ponder_passes"}
    for table in tables.values():
        assert sum(map(sum, table["counts"])) == 40


def test_what_is_replayed_is_what_really_stops(trained: Path) -> None:
    """The quality of the sweep is that of inference that leaves the batch."""
    finished = FinishedRun(str(trained))
    texts, split = finished.open_split(None, None)
    examples = EncodedExamples(texts.split(split), finished.tokenizer, finished.token_limit)
    batches = [examples.batch(list(range(start, start + 10))) for start in range(0, 40, 10)]
    outputs = [finished.model(**batch, policy=QuantileExit(0.5)) for batch in batches]
    labels = torch.tensor(examples.labels)
    expected = quality(all_passes(finished.model, examples), QuantileExit(0.5))
    passes = torch.cat([output.passes for output in outputs]).double().mean()
    right = torch.cat([output.logits for output in outputs]).argmax(-1) == labels
    assert float(passes) == pytest.approx(expected["passes"])
    assert float(right.double().mean()) == pytest.approx(expected["accuracy"])


def test_predictions_stream(trained: Path) -> None:
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield "a very good film" if asked % 2 else "so awful a plot"

    answers = predict(str(trained), endless(), batch_size=4)
    found = [next(answers) for _ in range(6)]
    assert [answer.label for answer in found] == ["1", "0"] * 3
    assert all(0.5 < answer.probability <= 1 and 1 <= answer.passes <= 3 for answer in found)
    assert asked < 2000
    fixed = predict(str(trained), ["good"], ExitConfig(exit="fixed", passes=2))
    assert next(fixed).passes == 2


@pytest.mark.parametrize(
    ("exit_", "said"),
    [
        (ExitConfig(threshold=0.0), "threshold"),
        (ExitConfig(threshold=1.5), "threshold"),
        (ExitConfig(exit="fixed", passes=4), "exit_pass"),
        (ExitConfig(exit="patience", patience=0), "patience"),
    ],
)
def test_impossible_exits_are_refused(trained: Path, exit_: ExitConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        next(predict(str(trained), ["good"], exit_))


def test_other_examples_and_a_folder_without_a_run(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "more.jsonl"
    rows = [{"text": "very good", "label": 1}, {"text": "very bad", "label": "0"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = evaluate(PonderEvalConfig(str(trained / "model"), str(path)))
    assert values["examples"] == 2
    path.write_text('{"text": "good", "label": 2}\n')
    with pytest.raises(UserError, match=r"2 in row 1 of more\.jsonl"):
        evaluate(PonderEvalConfig(str(trained), str(path)))
    with pytest.raises(UserError, match="has no split 'test'"):
        evaluate(PonderEvalConfig(str(trained), split="test"))
    with pytest.raises(UserError, match="no model"):
        evaluate(PonderEvalConfig(str(tmp_path)))


def test_processes_share_the_measuring(trained: Path) -> None:
    class Share:
        """One of two processes, whose sums with the other are made later."""

        num_processes = 2

        def __init__(self, process_index: int) -> None:
            self.process_index = process_index
            self.parts: list[torch.Tensor] = []

        def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
            assert reduction == "sum"
            self.parts.append(tensor)
            return tensor

    model, tokenizer = load_classifier(str(trained))
    rows = [Example("a very good film " * (1 + n % 5), None, 0) for n in range(130)]
    examples = EncodedExamples(rows, tokenizer, 16)
    alone = all_passes(model, examples)
    shares = [Share(0), Share(1)]
    for share in shares:
        all_passes(model, examples, share)  # type: ignore[arg-type]
    logits, halts = (sum(parts) for parts in zip(*(share.parts for share in shares), strict=True))
    torch.testing.assert_close(logits, alone.step_logits)
    torch.testing.assert_close(halts, alone.halt_logits)


def test_the_exit_chosen_answers_best_in_the_fewest_passes() -> None:
    """Three passes, four examples: pass 1 errs on the two that it would go on with."""
    right = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 1, 0, 1])
    steps = torch.stack([right[labels]] * 3)
    steps[0, 2:] = steps[0, 2:].flip(-1)
    lambdas = torch.tensor([[0.9, 0.9], [0.9, 0.9], [0.2, 0.6], [0.2, 0.6]])
    answers = AllPasses(steps, lambdas.logit(), labels)
    options, reason = choose_exit(answers, PonderConfig(num_passes=3))
    # The hard ones have halted with 0.2 after pass 1 and 0.68 after pass 2, the easy ones with 0.9.
    assert (options.exit, options.exit_threshold) == ("quantile", 0.65)
    assert "(1.5 of 3) at the best accuracy (1.000) on 4 validation" in reason
    sure = AllPasses(steps, None, labels)
    options, _ = choose_exit(sure, PonderConfig(num_passes=3, objective="weighted"))
    assert (options.exit, options.exit_pass) == ("fixed", 2)
    options, reason = choose_exit(sure, PonderConfig(num_passes=3, objective="last"))
    assert options.exit_setting == "fixed at all passes"


def test_a_threshold_of_one_exit_is_none_of_another(trained: Path) -> None:
    finished = FinishedRun(str(trained))
    finished.model.config.exit, finished.model.config.exit_threshold = "quantile", 0.35
    own, sure = finished.policy(ExitConfig()), finished.policy(ExitConfig("confidence"))
    assert isinstance(own, QuantileExit) and own.threshold == 0.35
    assert isinstance(sure, ConfidenceExit) and sure.threshold == 0.9


def test_an_option_belongs_to_its_exit(trained: Path) -> None:
    finished = FinishedRun(str(trained))
    assert isinstance(finished.policy(ExitConfig("fixed", passes=1)), FixedExit)
    assert isinstance(finished.policy(ExitConfig("patience", patience=1)), PatienceExit)
    assert isinstance(finished.policy(ExitConfig("confidence", 0.7)), ConfidenceExit)
    own = finished.policy(ExitConfig(threshold=0.7))
    assert isinstance(own, QuantileExit) and own.threshold == 0.7
    with pytest.raises(UserError, match=r"exit\.passes is an option of the fixed exit, not"):
        finished.policy(ExitConfig("confidence", passes=2))
    with pytest.raises(UserError, match=r"leave it out, or give --exit\.exit patience"):
        finished.policy(ExitConfig(patience=1))


def test_a_line_that_is_not_utf8_is_labelled(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"good caf\xe9\r\nbad\n"))
    monkeypatch.setattr("sys.stdin", given)
    assert main(["ponder", "predict", str(trained)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_run_as_a_candidate_of_a_comparison(trained: Path, tmp_path: Path) -> None:
    data = ComparedData(limit=16, batch_size=8, grid=PonderGrid())
    candidate = open_candidate(str(trained), "reviews", data)
    assert (candidate.task.split, candidate.task.detail["examples"]) == ("valid", 16)
    points = candidate.points()
    assert [point.mechanism for point in points[:3]] == ["fixed depth"] * 3
    scores = {point.name: candidate.judge(point, candidate.run(point)) for point in points}
    assert scores["3 passes"].layers == 3 and scores["1 pass"].layers == 1
    assert scores["1 pass"].flops < scores["halt 0.95"].flops <= scores["3 passes"].flops
    assert scores["3 passes"].units == 16 and scores["3 passes"].quality.value > 0.8
    for point in points:  # what the chart says runs the model so, does
        words = shlex.split(point.command)[1:]
        assert main(words) == 0
    file = tmp_path / "other.csv"
    file.write_text("text,label\na good film,1\nso awful,0\n")
    data = ComparedData(data=str(file), grid=PonderGrid())
    other = open_candidate(str(trained), "other", data)
    assert f"--data {file} --split train" in other.points()[0].command
    with pytest.raises(UserError, match="makes 3 passes, so that 9 cannot be compared"):
        data = ComparedData(grid=PonderGrid(passes=[9]))
        open_candidate(str(trained), "deep", data).points()


def test_a_budget_takes_the_most_cautious_exit_within_it(answers: AllPasses) -> None:
    for kind, budget in (("quantile", 0.6), ("confidence", 0.5), (None, 0.7), (None, 0.34)):
        asked = PonderConfig(num_passes=3, exit=kind, exit_budget=budget)
        options, reason = choose_exit(answers, asked)
        found = quality(answers, make_policy(options))
        assert found["share"] <= budget and options.exit_budget is None
        assert kind is None or options.exit == kind
        assert "within the budget" in reason and "on 4 validation examples" in reason
        options.check_depth(3, shared=False)  # the saved model is one that loads
    options, _ = choose_exit(answers, PonderConfig(exit="quantile", exit_budget=0.6))
    more = quality(answers, QuantileExit(options.exit_threshold + 0.005))
    assert more["share"] > 0.6
    options, _ = choose_exit(answers, PonderConfig(exit="patience", exit_budget=0.4))
    assert options.exit_setting == "fixed at 1"  # no answer is repeated within one pass


@pytest.mark.parametrize(
    "options", [{"objective": "last"}, {"exit": "sampled"}, {"exit_threshold": 0.3}]
)
def test_a_budget_with_nothing_to_choose_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="exit_budget lets training choose"):
        PonderConfig(exit_budget=0.5, **options).check_depth(4, shared=False)
    with pytest.raises(UserError, match="less than one of 4 passes"):
        PonderConfig(exit_budget=0.2).check_depth(4, shared=False)
