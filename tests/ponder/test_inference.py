"""Inference that stops, in a batch and in a stream: equal to one example at a time."""

from itertools import count, islice

import pytest
import torch

from deepenough import UserError
from deepenough.ponder.halting import FixedExit, PatienceExit, QuantileExit, SampledExit
from deepenough.ponder.inference import replay, run_batch, run_batch_ref, select_pass

ARCHITECTURES = ("bert", "roberta", "mpnet", "distilbert", "electra", "modernbert", "albert")
POLICIES = {
    "quantile": QuantileExit(0.5),
    "sampled": SampledExit(5),
    "patience": PatienceExit(1),
    "fixed": FixedExit(2),
}


def same(left, right):
    assert torch.equal(left.passes, right.passes)
    torch.testing.assert_close(left.logits, right.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", ["bert", "ponder_albert"])
@torch.no_grad()
def test_batch_equals_one_by_one(make_model, make_albert, make_batch, kind, policy):
    model = make_albert(num_passes=6) if kind == "ponder_albert" else make_model(kind)
    batch = make_batch(rows=14)
    inputs, ids = model.prepare(**batch), torch.arange(14)
    output = run_batch(model, inputs, policy, ids)
    expected = run_batch_ref(model, inputs, policy, ids)
    same(output, expected)
    torch.testing.assert_close(output.halting, expected.halting, rtol=1e-4, atol=1e-5)
    if policy.needs_halting:
        assert len(output.passes.unique()) > 1  # else nobody ever left the batch


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_every_architecture_answers_as_at_full_depth(make_model, batch, kind):
    """Each answer is that of the pass at which the example halted, among those of all passes."""
    model = make_model(kind)
    whole = model(**batch, all_passes=True)
    output = model(**batch)
    same(output, whole)
    assert output.step_logits is None
    for row, passes in enumerate(output.passes.tolist()):
        torch.testing.assert_close(
            output.logits[row], whole.step_logits[passes - 1, row], rtol=1e-4, atol=1e-5
        )
        known = output.halting[row]
        torch.testing.assert_close(
            known[:passes], whole.halting[row, :passes], rtol=1e-4, atol=1e-5
        )
        assert not known[passes:].any()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@torch.no_grad()
def test_replay_tells_what_a_policy_would_do(make_model, batch, policy):
    model = make_model()
    whole = model(**batch, all_passes=True)
    halts = whole.halt_probabilities[:, :-1].logit()
    passes = replay(policy, whole.step_logits, halts, torch.arange(9))
    output = model(**batch, policy=policy)
    assert torch.equal(output.passes, passes)
    torch.testing.assert_close(output.logits, select_pass(whole.step_logits, passes))


@torch.no_grad()
def test_halted_examples_are_not_computed(make_model, batch):
    model = make_model()
    rows = []
    for layer in model.stack.layers:
        layer.intermediate.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    model(**batch)
    rows.clear()  # the first call also learned what layers return
    output = model(**batch)
    running = [(output.passes > index).sum().item() for index in range(output.passes.max())]
    assert rows == running
    assert len(set(rows)) > 1


@torch.no_grad()
def test_padding_goes_when_the_long_texts_have_gone(make_model, batch):
    model = make_model()
    shapes = []
    layer = model.stack.layers[1]
    layer.intermediate.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    batch["attention_mask"][1:, 6:] = 0

    class LongFirst(FixedExit):
        def step(self, view, memory):
            return (torch.arange(len(view.passes)) == 0) | (view.passes > 1), memory

    output = model(**batch, policy=LongFirst())
    assert output.passes[0] == 1
    assert shapes == [(8, 6, 16)]


def test_extremes(make_model, batch):
    model = make_model()
    all_passes = model(**batch, policy=QuantileExit(1.0))
    assert all_passes.passes.tolist() == [4] * 9
    assert all_passes.halting.sum(-1).tolist() == pytest.approx([1.0] * 9)
    assert model(**batch, policy=QuantileExit(1e-9)).passes.tolist() == [1] * 9


def test_the_config_names_the_policy_and_a_seed_repeats_it(make_model, batch):
    model = make_model(exit="sampled", exit_seed=1)
    first, again = model(**batch), model(**batch)
    assert torch.equal(first.passes, again.passes)
    moved = model(**batch, example_ids=torch.arange(100, 109))
    assert not torch.equal(moved.passes, first.passes)


def test_loss_of_answers(make_model, batch):
    model = make_model()
    labels = torch.arange(9) % 3
    output = model(**batch, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits, labels)
    assert output.loss.item() == pytest.approx(expected.item())
    output.loss.backward()  # answers of different passes are one graph
    assert model.trunk.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_a_model_without_halting_refuses_to_guess(make_model, batch):
    model = make_model(objective="weighted", exit="patience")
    assert model(**batch).halting is None
    with pytest.raises(UserError, match="no halting probabilities for QuantileExit"):
        model(**batch, policy=QuantileExit(0.5))


def test_tuple_output(make_model, batch):
    torch.testing.assert_close(model_tuple(make_model(), batch), make_model()(**batch).logits)


def model_tuple(model, batch):
    return model(**batch, return_dict=False)[0]


def encodings(num: int, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (num,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(5, 60, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def model_of(kind, make_model, make_albert, **options):
    return make_albert(num_passes=6, **options) if kind == "albert" else make_model(kind, **options)


CASES = [(QuantileExit(0.5), 1), (QuantileExit(0.5), 50)]
STREAM_POLICIES = (QuantileExit(0.5), SampledExit(3), PatienceExit(1), FixedExit(2))
CASES += [(policy, 4) for policy in STREAM_POLICIES]


@pytest.mark.parametrize(("policy", "rows"), CASES)
@pytest.mark.parametrize("kind", ["albert", "mpnet"])
@torch.no_grad()
def test_equal_to_one_by_one_in_order(make_model, make_albert, kind, policy, rows):
    model = model_of(kind, make_model, make_albert)
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
    model = model_of(kind, make_model, make_albert)
    list(model.stream(encodings(2)))  # the first call also learns what layers return
    sizes = []
    for layer in dict.fromkeys(model.stack.layers):
        layer.attention.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    answers = list(model.stream(encodings(100), batch_size=8))
    passes = sum(answer.passes for answer in answers)
    assert sum(sizes) == passes
    assert len({answer.passes for answer in answers}) > 1
    draining = 2 * model.num_passes  # the end of a stream cannot fill its batches
    assert len(sizes) <= passes / 8 + draining


@pytest.mark.parametrize("kind", ["albert", "bert"])
def test_an_endless_stream_gives_answers_and_reads_little_ahead(make_model, make_albert, kind):
    model = model_of(kind, make_model, make_albert)
    taken = 0
    sample = encodings(40)

    def endless():
        nonlocal taken
        for number in count():
            taken += 1
            yield sample[number % 40]

    answers = list(islice(model.stream(endless(), batch_size=4), 60))
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
    answers = model.stream((row for row in encodings(1) * 1000), FirstIsSlow(), batch_size=2)
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
    for answer, encoding in zip(model.stream(given, batch_size=1), given, strict=True):
        alone = model(torch.tensor([encoding["input_ids"]]))
        assert answer.passes == alone.passes.item()
        assert answer.flops >= alone.trace.total_flops


def test_nothing_in_nothing_out(make_model):
    assert list(make_model().stream([])) == []


def test_misuse_is_refused(make_model):
    model = make_model()
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        model.stream([], batch_size=0)
    with pytest.raises(UserError, match=r"model\.eval\(\)"):
        model.train().stream([])
