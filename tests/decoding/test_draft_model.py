"""Draft heads: they begin as linear, draft as they are trained, and change nothing that is said."""

import pytest
import torch

from deepenough import UserError
from deepenough.decoding.api import speculate
from deepenough.decoding.draft_model import DraftHead, DraftModel, HeadShape
from deepenough.decoding.drafters import (
    DraftModelDrafter,
    FallbackDrafter,
    LinearDrafter,
    LookupDrafter,
)
from deepenough.hf.adapter import adapt

WORDS = torch.arange(39, 2, -1)
GREEDY = {"do_sample": False, "max_new_tokens": 20}

CHOICE = {"names": ["lookup"], "num_draft_tokens": 2, "vocab_size": 4}


def make_linear(width: int = 32) -> LinearDrafter:
    generator = torch.Generator().manual_seed(0)
    maps = [
        (torch.randn(width, (n + 1) * width, generator=generator), torch.ones(width))
        for n in (1, 2)
    ]
    return LinearDrafter(maps, WORDS)


def make_head(model, trained: bool = True) -> DraftHead:
    torch.manual_seed(0)
    head = DraftHead(HeadShape.of(adapt(model)))
    head.start_from(*make_linear().maps[0], scale_D=torch.rand(32) + 0.5)
    if trained:
        with torch.no_grad():
            head.o_proj.normal_()
            head.down_proj.normal_()
            head.norm.add_(torch.rand(32))
    return head.eval().requires_grad_(False)


def test_an_untrained_head_drafts_what_carry_drafts(small, prompts) -> None:
    found = []
    for source in (
        LinearDrafter(make_linear().maps, WORDS, num_draft_tokens=1),
        DraftModelDrafter(make_head(small, False), WORDS, 1),
    ):
        drafts, propose = [], source.propose

        def record(rows, state_BD, engine, propose=propose, drafts=drafts):
            drafts.append((proposal := propose(rows, state_BD, engine)).tokens)
            return proposal

        source.propose = record
        speculate(small, drafter=[source]).generate(**prompts(3), **GREEDY)
        found.append(drafts)
    assert found[0] == found[1] and len(found[0]) > 5


@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_those_of_the_whole_text(model, prompts, rows) -> None:
    """Token by token over the cache, with rejected drafts, as in training on the text at once."""
    head = make_head(model)
    source = DraftModelDrafter(head, WORDS, 2)
    asked = []
    propose = source.propose

    def record(rows, state_BD, engine):
        proposal = propose(rows, state_BD, engine)
        for row, drafts in zip(rows, proposal.tokens, strict=True):
            asked.append((row.index, list(row.context), drafts))
        return proposal

    source.propose = record
    expected = model.generate(**prompts(rows), **GREEDY)
    fast = speculate(model, drafter=[source])
    assert torch.equal(fast.generate(**prompts(rows), **GREEDY), expected)
    adapter, embed = adapt(model), model.get_input_embeddings()
    lm_head = model.get_output_embeddings()
    for _, context, drafts in asked:
        # The first draft follows the context, the second the first.
        ids = torch.tensor([[*context, drafts[0]]])
        states = adapter.final_norm(adapter.states(ids)[-1]) / head.scale
        one, two = head(embed(ids), states)
        for predicted, draft in zip((one[0, -2], two[0, -1]), drafts, strict=True):
            logits = lm_head(predicted * head.scale)[WORDS]
            best = logits.topk(2).values
            assert int(WORDS[logits.argmax()]) == draft or best[0] - best[1] < 1e-3
    assert len(asked) >= 10


def test_with_other_sources_and_without_fusing(small, prompts) -> None:
    head = make_head(small)
    expected = small.generate(**prompts(3), **GREEDY)
    for backend in (None, "general"):
        source = FallbackDrafter([LookupDrafter(2), DraftModelDrafter(head, WORDS, 3)])
        fast = speculate(small, drafter=[source], backend=backend)
        found = fast.generate(**prompts(3), **GREEDY, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected) and found.drafted > 0


def test_one_head_serves_models_of_different_numbers(make_model, prompts) -> None:
    single, double = make_model(), make_model().double()
    head = make_head(single)
    fast = {
        model: speculate(model, drafter=[DraftModelDrafter(head, WORDS, 2)])
        for model in (single, double)
    }
    for model in (single, double, single):
        expected = model.generate(**prompts(2), **GREEDY)
        assert torch.equal(fast[model].generate(**prompts(2), **GREEDY), expected)
    single.double()
    expected = single.generate(**prompts(2), **GREEDY)
    assert torch.equal(fast[single].generate(**prompts(2), **GREEDY), expected)


def test_the_second_prediction_by_hand(small) -> None:
    """A token at a time: what it sees before it as it was, itself as predicted."""
    head = make_head(small)
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(1, 5, 32, generator=generator)
    states = torch.randn(1, 5, 32, generator=generator)
    one, two = head(embeddings, states)
    for last in range(1, 5):
        changed = states.clone()
        changed[:, last - 1] = one[:, last - 1]
        alone, _ = head(embeddings[:, : last + 1], changed[:, : last + 1])
        torch.testing.assert_close(alone[:, last], two[:, last], rtol=1e-4, atol=1e-4)


def test_tuned_is_saved_and_loaded(small, tmp_path) -> None:
    linear = make_linear()
    linear.meta["model"] = adapt(small).identity()
    tuned = DraftModel(linear, make_head(small), {"a": 1}, CHOICE)
    tuned.save_pretrained(tmp_path / "run" / "model")
    again = DraftModel.from_pretrained(tmp_path / "run")
    for name, value in tuned.head.state_dict().items():
        assert torch.equal(value, again.head.state_dict()[name])
    assert again.meta == tuned.meta and again.choice == tuned.choice
    assert torch.equal(again.linear_drafter.draft_vocab, WORDS)
    speculate(small, ["draft_model"], draft_model=again)
    with torch.no_grad():
        small.model.layers[0].mlp.up_proj.weight.add_(1.0)
    with pytest.raises(UserError, match="drafts are made with were made for"):
        speculate(small, draft_model=again)
    path = tmp_path / "run" / "model" / "draft_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="tune it again"):
        DraftModel.from_pretrained(tmp_path / "run")
    with pytest.raises(UserError, match="holds no draft model"):
        DraftModel.from_pretrained(tmp_path)
