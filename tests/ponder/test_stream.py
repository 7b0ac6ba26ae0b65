"""A stream through a batch that stays full: the answers of one by one, in order."""

from itertools import count, islice

import pytest
import torch

from deepenough import UserError
from deepenough.ponder.policies import FixedExit, PatienceExit, QuantileExit, SampledExit


def encodings(num: int, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (num,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(5, 60, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def make(kind, make_model, make_albert, **options):
    return make_albert(num_passes=6, **options) if kind == "albert" else make_model(kind, **options)


CASES = [(QuantileExit(0.5), 1), (QuantileExit(0.5), 50)]
POLICIES = (QuantileExit(0.5), SampledExit(3), PatienceExit(1), FixedExit(2))
CASES += [(policy, 4) for policy in POLICIES]


@pytest.mark.parametrize(("policy", "rows"), CASES)
@pytest.mark.parametrize("kind", ["albert", "mpnet"])
@torch.no_grad()
def test_equal_to_one_by_one_in_order(make_model, make_albert, kind, policy, rows):
    model = make(kind, make_model, make_albert)
    given = encodings(13)
    answers = list(model.stream(given, policy, rows))
    assert [answer.index for answer in answers] == list(range(13))
    for answer, encoding in zip(answers, given, strict=True):
        ids = torch.tensor([encoding["input_ids"]])
        alone = model(ids, policy=policy, example_ids=torch.tensor([answer.index]))
        assert answer.passes == alone.passes.item()
        torch.testing.assert_close(answer.logits, alone.logits[0], rtol=1e-4, atol=1e-5)
        expected = alone.halting[0, : answer.passes].tolist()
        assert answer.halting == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["albert", "bert"])
def test_layers_run_full_batches(make_model, make_albert, kind):
    model = make(kind, make_model, make_albert)
    list(model.stream(encodings(2)))  # the first call also learns what layers return
    sizes = []
    for layer in dict.fromkeys(model.stack.layers):
        layer.attention.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    answers = list(model.stream(encodings(100), rows=8))
    passes = sum(answer.passes for answer in answers)
    assert sum(sizes) == passes
    assert len({answer.passes for answer in answers}) > 1
    draining = 2 * model.num_passes  # the end of a stream cannot fill its batches
    assert len(sizes) <= passes / 8 + draining


@pytest.mark.parametrize("kind", ["albert", "bert"])
def test_an_endless_stream_gives_answers_and_reads_little_ahead(make_model, make_albert, kind):
    model = make(kind, make_model, make_albert)
    taken = 0
    sample = encodings(40)

    def endless():
        nonlocal taken
        for number in count():
            taken += 1
            yield sample[number % 40]

    answers = list(islice(model.stream(endless(), rows=4), 60))
    assert [answer.index for answer in answers] == list(range(60))
    assert taken <= 60 + 4 * 4 * model.num_passes


def test_one_slow_example_does_not_hold_up_the_others_for_ever(make_model):
    """All but the first halt at once: its group would never fill."""

    class FirstIsSlow(FixedExit):
        def start(self, example_ids, num_labels):
            return (example_ids == 0).float()[:, None]

        def step(self, view, memory):
            return memory[:, 0] == 0, memory

    model = make_model()
    answers = model.stream((row for row in encodings(1) * 1000), FirstIsSlow(), rows=2)
    first = next(answers)
    assert (first.index, first.passes) == (0, 4)


def test_padding_and_pairs_are_understood(make_model):
    model = make_model()
    given = {
        "input_ids": [2, 7, 9, 1, 1],
        "attention_mask": [1, 1, 1, 0, 0],
        "token_type_ids": [0, 0, 1, 0, 0],
    }
    other = {"input_ids": [2, 8, 8, 8]}
    answers = list(model.stream([given, other]))
    alone = model(torch.tensor([[2, 7, 9]]), token_type_ids=torch.tensor([[0, 0, 1]]))
    torch.testing.assert_close(answers[0].logits, alone.logits[0], rtol=1e-4, atol=1e-5)


def test_second_cls_and_costs(make_albert):
    model = make_albert(num_passes=5, halting_head="second_cls")
    given = encodings(9)
    for answer, encoding in zip(model.stream(given, rows=1), given, strict=True):
        alone = model(torch.tensor([encoding["input_ids"]]))
        assert answer.passes == alone.passes.item()
        assert answer.flops >= alone.trace.total_flops


def test_nothing_in_nothing_out(make_model):
    assert list(make_model().stream([])) == []


def test_misuse_is_refused(make_model):
    model = make_model()
    with pytest.raises(UserError, match="at least 1 row"):
        model.stream([], rows=0)
    with pytest.raises(UserError, match=r"model\.eval\(\)"):
        model.train().stream([])
