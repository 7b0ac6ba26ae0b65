"""EAGLE-3 heads: they compute what the equations say, draft so, and change nothing that is said."""

import json
from dataclasses import asdict

import pytest
import torch

from deepenough import UserError
from deepenough.decoding import native_backend
from deepenough.decoding.api import speculate
from deepenough.decoding.backends import BACKENDS, make_engine
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.drafters import FallbackDrafter, LinearDrafter, LookupDrafter
from deepenough.decoding.eagle3 import (
    Eagle3Config,
    Eagle3Drafter,
    Eagle3Head,
    TorchHead,
    count_accepted,
    layers_read,
)
from deepenough.decoding.export import public_tensors
from deepenough.decoding.self_generated import continue_prompts
from deepenough.hf.adapter import adapt
from tests.decoding.eagle3_ref import HeadRef, drafts_ref

needs_native = pytest.mark.skipif(
    native_backend.load_library() is None, reason="compiled where there is a C++ compiler"
)
WORDS = torch.tensor([3, 4, 5, 7, 8, *range(11, 39)])
GREEDY = {"do_sample": False, "max_new_tokens": 20}


def make_linear(width: int = 32) -> LinearDrafter:
    maps = [(torch.zeros(width, (n + 1) * width), torch.ones(width)) for n in (1, 2)]
    return LinearDrafter(maps, WORDS)


def make_head(model) -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.of(adapt(model), len(WORDS)))
    head.d2t.copy_(WORDS - torch.arange(len(WORDS)))
    for name, tensor in head.named_parameters():
        torch.nn.init.normal_(tensor, 1.0 if "norm" in name else 0.0, 0.3)
    head.input_scale.copy_(torch.rand(96) + 0.5)
    return head.eval().requires_grad_(False)


def make_ref(head: Eagle3Head) -> HeadRef:
    return HeadRef(public_tensors(head), asdict(head.config))


def test_the_layers_read_are_those_of_engines() -> None:
    assert layers_read(30) == (2, 15, 27) and layers_read(32) == (2, 16, 29)
    assert layers_read(3) == (0, 1, 2) and layers_read(1) == (0, 0, 0)


def test_every_step_of_training_is_that_of_the_equations(small) -> None:
    head = make_head(small)
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(1, 6, 32, generator=generator)
    inputs = torch.randn(1, 6, 96, generator=generator)
    found = head(embeddings, inputs)
    for last in range(6):
        # Rounds that begin at `begin` draft their way to the position `last`.
        for number in range(min(last + 1, 3)):
            ref, begin = make_ref(head), last - number
            for place in range(begin + 1):
                v = ref.step(embeddings[0, place], ref.fuse(inputs[0, place]))
            for place in range(begin + 1, last + 1):
                v = ref.step(embeddings[0, place], v)
            got = found[number][0, last].double()
            torch.testing.assert_close(got, v, rtol=1e-4, atol=1e-4)
            logits = head.logits(found[number][0, last]).double()
            torch.testing.assert_close(logits, ref.logits(v), rtol=1e-4, atol=1e-4)


@needs_native
def test_native_steps_are_those_of_torch(small) -> None:
    """Prompts of two lengths, then single tokens of one sequence, through fc, layer and logits."""
    head, engine = make_head(small), make_engine(small, "native")
    own = engine.draft_head(head)
    assert own.formats == {"F32"} and engine.draft_head(head) is own
    torch.manual_seed(3)
    ways = [own, TorchHead(head, engine)]
    for way in ways:
        way.begin(2, 700)
    for tokens, starts, rows in ((600, [0, 0], [0, 1]), (2, [600, 300], [0, 1]), (1, [301], [1])):
        ids = torch.randint(40, (len(rows), tokens))
        inputs = torch.randn(len(rows), tokens, 96)
        features = [way.fuse(inputs) for way in ways]
        torch.testing.assert_close(*features, rtol=1e-5, atol=1e-5)
        hidden = [way.step(ids, features[0], starts, rows) for way in ways]
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)
        logits = [way.logits(hidden[0]) for way in ways]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@needs_native
def test_a_head_that_was_trained_on_is_packed_anew(small) -> None:
    head, engine = make_head(small), make_engine(small, "native")
    before = engine.draft_head(head)
    with torch.no_grad():
        head.fc.weight.mul_(2)
    after = engine.draft_head(head)
    inputs = torch.randn(1, 3, 96)
    assert after is not before
    torch.testing.assert_close(after.fuse(inputs), head.fuse(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_keeps_the_inputs_of_layers(small, prompts, backend) -> None:
    texts = continue_prompts(
        make_engine(small, backend), [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]], 12, layers=(0, 1, 2)
    )
    for text in texts:
        states = small(text.ids_T[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0, :-1] for layer in (0, 1, 2)], dim=-1)
        torch.testing.assert_close(text.inputs_TZ, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_those_of_the_whole_text(model, prompts, rows) -> None:
    """Over the cache, with rejected drafts, they are those of a new head that reads all of it."""
    head = make_head(model)
    source = Eagle3Drafter(head, 3)
    asked = []
    propose = source.propose

    def record(rows, state_BD, engine):
        proposal = propose(rows, state_BD, engine)
        for row, drafts in zip(rows, proposal.tokens, strict=True):
            asked.append((list(row.context), drafts))
        return proposal

    source.propose = record
    expected = model.generate(**prompts(rows), **GREEDY)
    fast = speculate(model, drafter=[source])
    assert torch.equal(fast.generate(**prompts(rows), **GREEDY), expected)
    adapter, embed = adapt(model), model.get_input_embeddings()
    for context, drafts in asked[:: 1 + rows]:
        states = adapter.states(torch.tensor([context[:-1]]))
        inputs = torch.cat([states[layer][0] for layer in head.config.layers], dim=-1)
        found, logits = drafts_ref(make_ref(head), embed, context, inputs, 3)
        close = [float(each.topk(2).values.diff().abs()) < 1e-3 for each in logits]
        for draft, expected_draft, tie in zip(drafts, found, close, strict=True):
            assert draft == expected_draft or tie
            if draft != expected_draft:
                break
    assert len(asked) >= 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_other_drafters_on_every_backend(small, prompts, shortcuts, backend) -> None:
    expected = small.generate(**prompts(3), **GREEDY)
    head = make_head(small)
    for others in ([LookupDrafter(2)], ["shortcut"]):
        given = {"drafter": [*others, Eagle3Drafter(head, 3)], "backend": backend}
        fast = speculate(small, **given, shortcuts=shortcuts, draft_layer=1)
        found = fast.generate(**prompts(3), **GREEDY, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected) and found.drafted > 0
        assert isinstance(fast.drafter, FallbackDrafter)


def test_one_head_serves_models_of_different_numbers(make_model, prompts) -> None:
    single, double = make_model(), make_model().double()
    head = make_head(single)
    fast = {model: speculate(model, drafter=[Eagle3Drafter(head, 2)]) for model in (single, double)}
    for model in (single, double, single):
        expected = model.generate(**prompts(2), **GREEDY)
        assert torch.equal(fast[model].generate(**prompts(2), **GREEDY), expected)
    single.double()
    expected = single.generate(**prompts(2), **GREEDY)
    assert torch.equal(fast[single].generate(**prompts(2), **GREEDY), expected)


def test_rounds_are_counted_as_an_engine_drafts() -> None:
    right = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1]]).bool()
    # From 0: first and second right, third too (0, 1, 2). From 4: first right, second not. From 6.
    assert count_accepted(right) == [2, 2, 1, 1]
    # From 2: none. From 3: the first, the second at 4, the third at 5.
    assert count_accepted(right, 2) == [2, 1, 1, 1]
    assert count_accepted(right, 2, 3) == [1, 0, 0, 0]


def test_a_draft_model_is_saved_and_loaded(small, tmp_path) -> None:
    linear = make_linear()
    linear.meta["model"] = adapt(small).identity()
    tuned = DraftModel(linear, make_head(small), {"a": 1})
    tuned.save_pretrained(tmp_path / "run" / "model")
    again = DraftModel.from_pretrained(tmp_path / "run")
    for name, value in tuned.head.state_dict().items():
        assert torch.equal(value, again.head.state_dict()[name])
    assert again.meta == tuned.meta and again.head.config == tuned.head.config
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


def test_one_of_an_older_version_is_refused(small, tmp_path) -> None:
    from deepenough.artifacts import write_json

    tuned = DraftModel(make_linear(), make_head(small))
    tuned.save_pretrained(tmp_path)
    path = tmp_path / "draft_model.json"
    index = json.loads(path.read_text())
    sizes = {"width": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    old = {"version": 1, "shape": sizes, "format": index["format"], "sha256": index["sha256"]}
    write_json(path, old | {"meta": {}})
    with pytest.raises(UserError, match=r"older version .* tune it again"):
        DraftModel.from_pretrained(tmp_path)
