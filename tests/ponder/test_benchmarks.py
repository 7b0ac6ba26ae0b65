"""What the long benchmarks of pondering rest on: data kept apart, and halting as it is named."""

import pytest
import torch

from benchmarks.ponder_babi import join, make_tokenizer, universal
from benchmarks.ponder_sst2 import hold_out
from deepenough.data.classification import Example, LabelledTexts
from tests.nn.test_adaptive_computation_time import act_halting_ref

WHOLE = "a warm and funny film about two old friends"
OTHER = "a long and dull story about nothing that one would want to know"


def test_no_phrase_of_a_held_out_sentence_is_trained_on() -> None:
    texts = [WHOLE, "warm and funny film", "a warm", OTHER, "long and dull story", "nothing"]
    rows = [Example(text, None, number % 2) for number, text in enumerate(texts)]
    kept, held_out = hold_out(rows, 1)
    assert len(held_out) == 1 and held_out[0].text in (WHOLE, OTHER)
    left = {row.text for row in kept}
    assert not any(len(text.split()) > 2 and text in held_out[0].text for text in left)
    assert {"a warm", "nothing"} < left and len(left) == 4
    again, same = hold_out(rows, 1)
    assert (again, same) == (kept, held_out)
    kept, held_out = hold_out(rows, 9)  # no phrase is taken for a sentence
    assert {row.text for row in held_out} == {WHOLE, OTHER}


def test_the_universal_encoder_halts_by_adaptive_computation_time() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(5, 4, 3, generator=generator)
    halts = torch.randn(4, 4, generator=generator)
    mixed, passes, cost = universal(steps, halts)
    for row in range(4):
        lambdas = [*halts[row].sigmoid().tolist(), 1.0]
        weights, num = act_halting_ref(lambdas)
        expected = sum(w * steps[n, row] for n, w in enumerate(weights))
        torch.testing.assert_close(mixed[row], expected)
        assert passes[row] == num
        assert cost[row].item() == pytest.approx(num + weights[num - 1], abs=1e-5)


def test_tasks_are_joined_with_the_answers_of_all(tmp_path) -> None:
    def task(name: str, labels: tuple[str, ...]) -> LabelledTexts:
        rows = [Example(f"A {name}. B.", "Who?", number) for number in range(len(labels))]
        return LabelledTexts(name, dict.fromkeys(("train", "valid", "test"), rows), labels)

    joined = join([task("x", ("yes", "no")), task("y", ("maybe", "no"))])
    assert joined.labels == ("maybe", "no", "yes")
    assert [row.label for row in joined.splits["test"]] == [2, 1, 0, 1]
    tokenizer = make_tokenizer(joined, tmp_path / "tokenizer")
    ids = tokenizer("A x. " * 9, "Who?", truncation=True, max_length=8)["input_ids"]
    # Of a story that is too long the oldest statements are left out, and the question is whole.
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "[CLS]",
        "a",
        "x",
        ".",
        "[SEP]",
        "who",
        "?",
        "[SEP]",
    ]
