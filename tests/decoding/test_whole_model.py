"""Models that are run as a whole: the tokens of `generate`, whatever is drafted."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from deepenough import UserError
from deepenough.decoding import backends as engines
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.backends import make_engine
from deepenough.decoding.drafters import Drafter, LookupDrafter, Proposal
from deepenough.decoding.engine import Pace
from deepenough.decoding.general_backend import WholeModelEngine
from deepenough.hf.twin import _scatter

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
END = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, **END, sliding_window=5))


def lfm2() -> Any:
    kinds = ["conv", "full_attention"]
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, **HEADS, **END, layer_types=kinds))


def rwkv() -> Any:
    return RwkvForCausalLM(RwkvConfig(**SIZES, **END, attention_hidden_size=32))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(**SIZES, **END, state_size=4))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=40, **sizes, **END, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def whisper() -> Any:
    sizes = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "vocab_size": 40}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
    tokens = {**END, "decoder_start_token_id": 1, "begin_suppress_tokens": None}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **tokens, suppress_tokens=None))
    model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=1)
    return model


@pytest.fixture
def build():
    def made(make: Any) -> Any:
        torch.manual_seed(0)
        model = make().eval().requires_grad_(False)
        _scatter(model)
        return model

    return made


class Corrupted(Drafter):
    """Drafts the true continuation, with a token in three replaced at random."""

    def __init__(self, expected_BN: Tensor) -> None:
        super().__init__(num_draft_tokens=3)
        self.expected_BN, self.drawn = expected_BN, torch.Generator().manual_seed(0)

    def propose(self, rows: list[Any], state_BD: Tensor, engine: Any) -> Proposal:
        drafts = []
        for row in rows:
            start = len(row.tokens)
            line = self.expected_BN[row.index, start : start + 3].tolist()
            wrong = torch.rand(len(line), generator=self.drawn) < 1 / 3
            drafts.append([token ^ int(bad) for token, bad in zip(line, wrong, strict=True)])
        return Proposal(drafts)


def whole(model: Any, drafter: Any) -> Any:
    """Return a speculating model that is run as a whole, whether it must or not."""
    fast = speculate(model, drafter)
    fast.engine_and_state = engines._whole_engine(model), fast.engine_and_state[1]
    return fast


@pytest.mark.parametrize("make", [mistral, lfm2, rwkv, mamba, t5])
@pytest.mark.parametrize("prompt", [1, 4, 17])
def test_tokens_are_those_of_generate_whatever_is_drafted(build, make, prompt) -> None:
    model, new = build(make), 24
    ids = torch.randint(3, 40, (1, prompt), generator=torch.Generator().manual_seed(prompt))
    expected = model.generate(ids, do_sample=False, max_new_tokens=new)
    fast = whole(model, Corrupted(expected[:, -new:]))
    assert isinstance(fast.decoding_engine, WholeModelEngine)
    options = {"do_sample": False, "max_new_tokens": new, "return_dict_in_generate": True}
    found = fast.generate(ids, **options)
    assert torch.equal(found.sequences, expected)
    assert found.backend == "general"
    if make is mamba:  # its several tokens would forget those before them
        assert found.drafted == 0 and found.passes == new - 1
    else:
        assert 0 < found.accepted < found.drafted and found.passes < new - 1


@pytest.mark.parametrize("make", [mistral, mamba, t5])
def test_a_batch_goes_on_together(build, make, prompts) -> None:
    model = build(make)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    end = int(model.generate(**prompts(3), **options)[0, -6])  # one ends before the others
    options["eos_token_id"] = end
    expected = model.generate(**prompts(3), **options)
    assert int(expected[0, -1]) == 0
    assert torch.equal(whole(model, "lookup").generate(**prompts(3), **options), expected)


@pytest.mark.parametrize("make", [mistral, lfm2, t5])
def test_logits_are_those_of_generate(build, make) -> None:
    """So sampled tokens have the same distribution: the drafts are accepted by these alone."""
    model, ids = build(make), torch.tensor([[5, 9, 11, 4, 6, 7]])
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    expected = model.generate(ids, output_logits=True, **options)
    fast = whole(model, Corrupted(expected.sequences[:, -12:]))
    found = fast.generate(ids, output_logits=True, **options)
    assert found.accepted > 0
    torch.testing.assert_close(
        torch.cat(found.logits), torch.cat(expected.logits), atol=1e-4, rtol=1e-4
    )


def test_the_encoder_runs_once(build) -> None:
    model = build(t5)
    calls: list[int] = []
    ids, mask = torch.randint(3, 40, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    fast = speculate(model)
    with torch.no_grad():
        handle = model.encoder.block[0].register_forward_hook(lambda *_: calls.append(1))
        assert fast.decoding_engine is not None  # made anew for the hook
        calls.clear()
        found = fast.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
        assert len(calls) == 1
        handle.remove()
    assert torch.equal(
        found, model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    )


def test_whisper_returns_what_its_own_generate_makes_of_the_output(build) -> None:
    model = build(whisper)
    heard = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    for rows in (1, 2):
        options = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
        options["output_scores"] = True
        found, expected = (
            each.generate(heard[:rows], **options) for each in (speculate(model), model)
        )
        assert torch.equal(found["sequences"], expected["sequences"])
        torch.testing.assert_close(torch.stack(found["scores"]), torch.stack(expected["scores"]))


def test_what_one_engine_does_not_take_the_whole_model_does(make_model, prompts) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [7.0] * 4}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}
    model = make_model(rope_parameters={"rope_theta": 10000.0, **scaling})

    class ReadsStates(LookupDrafter):
        reads_states = True

    options = {"do_sample": False, "max_new_tokens": 30, "return_dict_in_generate": True}
    expected = model.generate(**prompts(1), **options).sequences
    for drafter, drafts in ((Corrupted(expected[:, -30:]), True), (ReadsStates(), False)):
        found = speculate(model, drafter).generate(**prompts(1), **options)
        assert torch.equal(found.sequences, expected)
        assert bool(found.drafted) == drafts
    short = speculate(model).generate(**prompts(1), **options | {"max_new_tokens": 5})
    assert torch.equal(short.sequences, expected[:, : short.sequences.shape[1]])


def test_no_pass_crosses_a_border() -> None:
    assert Pace().limit(5) is None
    assert [Pace(borders=(4, 8)).limit(length) for length in (1, 3, 4, 7, 8)] == [3, 1, 4, 1, None]
    assert [Pace(single_from=4).limit(length) for length in (1, 3, 4, 9)] == [3, 1, 1, 1]
    assert Pace.possible([]) == [Pace(), Pace(single_from=0)]
    assert Pace.possible([8, 16])[1:3] == [Pace(borders=(8, 16)), Pace(single_from=8)]


def test_without_a_small_model_switches_are_passed_token_by_token(build, monkeypatch) -> None:
    monkeypatch.setattr(engines, "_trials", {})
    monkeypatch.setattr(engines, "make_twin", lambda model: (None, [5, 20]))
    assert engines._whole_engine(build(mistral)).pace == Pace(single_from=5)


def test_a_pass_that_differs_is_not_taken(build, monkeypatch) -> None:
    """A model whose logits depend on how many tokens it reads at once is run token by token."""
    model = build(mistral)
    own = type(model).forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        past = output.past_key_values.get_seq_length()
        if 1 < output.logits.shape[1] < past:
            output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(type(model), "forward", other)
    monkeypatch.setattr(engines, "_trials", {})
    assert engines._whole_engine(model).pace == Pace(single_from=0)


def test_what_needs_layers_is_refused_by_name(build, prompts) -> None:
    with pytest.raises(UserError, match="keeps LinearAttentionLayer in its cache"):
        early_exit(build(mamba), None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is an encoder-decoder"):
        make_engine(build(t5))

    class ReadsStates(LookupDrafter):
        reads_states = True

    with pytest.raises(UserError, match="is run as a whole, without states"):
        speculate(build(mamba), ReadsStates())
    with pytest.raises(UserError, match="takes prompts padded on the left"):
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        speculate(build(mamba)).generate(mask + 4, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(UserError, match="does not take past_key_values"):
        speculate(build(t5)).generate(torch.ones(1, 2).long(), past_key_values=object())
    with pytest.raises(UserError, match="not by beam_search"):
        speculate(build(t5)).generate(torch.ones(1, 2).long(), num_beams=2, max_new_tokens=4)


def test_copies_generate_the_same(build) -> None:
    model = build(rwkv)
    fast = speculate(model)
    ids = torch.tensor([[5, 6, 7]])
    found = copy.deepcopy(fast).generate(ids, do_sample=False, max_new_tokens=5)
    assert torch.equal(found, fast.generate(ids, do_sample=False, max_new_tokens=5))
