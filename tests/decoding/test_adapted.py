"""Adapted early layers: copies are changed, the model is not, and nothing that is said."""

import pytest
import torch

from deepenough import UserError
from deepenough.decoding.accelerate import accelerate
from deepenough.decoding.adapted import Adapted, Change, changeable, guess, merge
from deepenough.decoding.adapted_draft import AdaptedDraft
from deepenough.decoding.carry import Carry
from deepenough.decoding.drafts import FirstOf, Lookup
from deepenough.decoding.fastest import candidates
from deepenough.decoding.first_layers import first_layers
from deepenough.decoding.head import DraftHead, HeadShape
from deepenough.decoding.making import make_engine
from deepenough.decoding.sources import Drafting, Workshop
from deepenough.decoding.tuned import Tuned
from deepenough.hf.adapter import adapt

WORDS = torch.arange(39, 2, -1)
GREEDY = {"do_sample": False, "max_new_tokens": 20}


def make_adapted(model, layers: int = 2, size: float = 0.3) -> Adapted:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    changes = {}
    for name, module in changeable(adapt(model).layers[:layers]).items():
        rows, columns = module.weight.shape
        if type(module) is not torch.nn.Linear:
            rows, columns = columns, rows
        changes[name] = Change(drawn(2, columns), size * drawn(rows, 2))
    maps = [(drawn(32, 64), drawn(32)) for _ in range(layers)]
    return Adapted(changes, maps, torch.rand(32, generator=generator) + 0.5)


def make_tuned(model, adapted: Adapted | None) -> Tuned:
    maps = [(torch.randn(32, (n + 1) * 32), torch.ones(32)) for n in (1, 2)]
    carry = Carry(maps, WORDS, {"model": adapt(model).identity()})
    return Tuned(carry, DraftHead(HeadShape.of(adapt(model))), adapted=adapted)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_first_layers_alone_are_the_models_own(model) -> None:
    ids = torch.tensor([[5, 9, 3, 30], [7, 8, 9, 10]])
    adapter = adapt(model)
    expected = adapter.states(ids)
    short = first_layers(adapter, 2)
    found = adapt(short).states(ids)
    assert len(found) == 3 and adapt(model).num_layers == 3
    for one, other in zip(found, expected, strict=False):
        assert torch.equal(one, other)
    embeddings = [each.get_input_embeddings().weight for each in (short, model)]
    assert embeddings[0] is embeddings[1]
    for name, module in changeable(adapt(short).layers).items():
        own = changeable(adapter.layers)[name].weight
        assert module.weight.data_ptr() != own.data_ptr() and torch.equal(module.weight, own)


def test_no_change_is_no_change(model) -> None:
    """With B = 0, as training begins."""
    adapted, ids = make_adapted(model, size=0.0), torch.tensor([[5, 9, 3, 30]])
    for one, other in zip(
        adapt(adapted.layers_of(adapt(model))).states(ids),
        adapt(model).states(ids),
        strict=False,
    ):
        assert torch.equal(one, other)


def test_merged_copies_are_what_peft_computes(model) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted, ids = make_adapted(model), torch.tensor([[5, 9, 3, 30]])
    before = weights_of(model)
    short = first_layers(adapt(model), 2)
    layers = torch.nn.ModuleList(adapt(short).layers)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=2,
        target_modules=list(adapted.changes),
        fan_in_fan_out=model.config.model_type == "gpt2",
    )
    peft.inject_adapter_in_model(config, layers)
    own = dict(layers.named_parameters())
    with torch.no_grad():
        for name, change in adapted.changes.items():
            own[f"{name}.lora_A.default.weight"].copy_(change.down_RI)
            own[f"{name}.lora_B.default.weight"].copy_(change.up_OR)
    expected = adapt(short).states(ids)
    found = adapt(adapted.layers_of(adapt(model))).states(ids)
    assert float((found[-1] - adapt(model).states(ids)[2]).abs().max()) > 0.1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(("rows", "layer"), [(1, 1), (3, 2)])
def test_drafts_are_those_of_the_whole_text(model, prompts, rows, layer) -> None:
    """Token by token over the cache, with rejected drafts, as in training on the text at once."""
    adapted, before = make_adapted(model), weights_of(model)
    source = AdaptedDraft(adapted, adapt(model), WORDS, 2, layer)
    asked = []
    propose = source.propose

    def record(rows, state_BD, engine):
        proposal = propose(rows, state_BD, engine)
        for row, drafts in zip(rows, proposal.tokens, strict=True):
            asked.append((list(row.context), drafts))
        assert proposal.flops > 0
        return proposal

    source.propose = record
    expected = model.generate(**prompts(rows), **GREEDY)
    fast = accelerate(model, mode="speculative", drafts=[source])
    assert torch.equal(fast.generate(**prompts(rows), **GREEDY), expected)
    adapter, lm_head = adapt(model), model.get_output_embeddings()
    changed = adapt(first_layers(adapter, 2))
    merge(changed, adapted.changes)
    for context, drafts in asked[::4]:
        # The first draft follows the context, the second the first.
        ids = torch.tensor([[*context, drafts[0]]])
        hidden = changed.states(ids)[layer][0]
        known = adapter.final_norm(adapter.states(ids)[-1])[0, -3] / adapted.scale
        for place, draft in zip((-2, -1), drafts, strict=True):
            known = guess(*adapted.maps[layer - 1], hidden[place], known)
            logits = lm_head(known * adapted.scale)[WORDS]
            best = logits.topk(2).values
            assert int(WORDS[logits.argmax()]) == draft or best[0] - best[1] < 1e-3
    assert len(asked) >= 10
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_after_lookup_rows_are_caught_up_on(model, prompts) -> None:
    """To the end of the context, so that filled rows reach beyond it."""
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 57}
    expected = model.generate(**prompts(3), **options)
    adapted = AdaptedDraft(make_adapted(model), adapt(model), WORDS, 3)
    source = FirstOf([Lookup(3, longest=2, shortest=1), adapted])
    fast = accelerate(model, mode="speculative", drafts=[source])
    found = fast.generate(**prompts(3), **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected) and found.accepted > 0


def test_room_is_added_as_the_text_grows(make_model, prompts, monkeypatch) -> None:
    monkeypatch.setattr("deepenough.decoding.adapted_draft._PIECE", 8)
    for name in ("llama", "gpt_neox"):
        model = make_model(name)
        source = AdaptedDraft(make_adapted(model), adapt(model), WORDS, 2)
        fast = accelerate(model, mode="speculative", drafts=[source])
        found = fast.generate(**prompts(3), **GREEDY)
        assert torch.equal(found, model.generate(**prompts(3), **GREEDY))


def test_drafts_serve_sampling_and_begin_anew(small, prompts) -> None:
    source = AdaptedDraft(make_adapted(small), adapt(small), WORDS, 2)
    fast = accelerate(small, mode="speculative", drafts=[source])
    torch.manual_seed(0)
    found = fast.generate(
        **prompts(3), do_sample=True, max_new_tokens=12, return_dict_in_generate=True
    )
    assert found.sequences.shape[1] <= 19 and found.drafted > 0
    # Nothing is left of the rows of an earlier text.
    for rows in (1, 3):
        expected = small.generate(**prompts(rows), **GREEDY)
        assert torch.equal(fast.generate(**prompts(rows), **GREEDY), expected)


def test_tuned_brings_adapted_layers(small, prompts, tmp_path) -> None:
    adapted = make_adapted(small)
    adapted.meta = {"model": adapt(small).identity(), "after": {"accepted": 0.5}}
    make_tuned(small, adapted).save_pretrained(tmp_path / "model")
    tuned = Tuned.from_pretrained(tmp_path)
    assert tuned.adapted.meta == adapted.meta and torch.equal(tuned.adapted.scale, adapted.scale)
    for name, change in adapted.changes.items():
        assert all(map(torch.equal, change, tuned.adapted.changes[name]))
    for names in (["adapted"], ["lookup", "adapted"]):
        fast = accelerate(small, mode="speculative", tuned=tuned, drafts=names, num_drafts=1)
        found = fast.generate(**prompts(3), **GREEDY, return_dict_in_generate=True)
        assert torch.equal(found.sequences, small.generate(**prompts(3), **GREEDY))
        assert found.drafted > 0
    raced = candidates(Workshop(make_engine(small), tuned=tuned), (1, 2), None)
    for depth in (1, 2):
        assert Drafting(("lookup", "adapted"), 2, None, depth) in raced
    # All sources of a race share one copy of the layers.
    workshop = Workshop(make_engine(small), tuned=tuned)
    first, second = (workshop.make(Drafting(("adapted",), 2, None, d)) for d in (1, 2))
    assert first.engine.adapter.model is second.engine.adapter.model


def test_what_cannot_be_used_is_refused(small, tmp_path, make_model) -> None:
    adapted = make_adapted(small)
    with pytest.raises(UserError, match="layers 1 to 2: got 3"):
        accelerate(
            small,
            mode="speculative",
            tuned=make_tuned(small, adapted),
            drafts="adapted",
            draft_layer=3,
        )
    with pytest.raises(UserError, match=r"tuning with --lora\.layers"):
        accelerate(small, mode="speculative", tuned=make_tuned(small, None), drafts="adapted")
    with pytest.raises(UserError, match="From 1 to 2 of the 3 layers"):
        first_layers(adapt(small), 3)
    adapted.meta = {"model": adapt(make_model("gpt2")).identity()}
    with pytest.raises(UserError, match="adapted for"):
        accelerate(small, mode="speculative", tuned=make_tuned(small, adapted), drafts="adapted")
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "lora.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="adapt them again"):
        Adapted.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no adapted layers"):
        Adapted.from_pretrained(tmp_path / "nowhere")
