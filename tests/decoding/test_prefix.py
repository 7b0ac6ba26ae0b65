"""Keys and values of a beginning that two calls share are computed once; all else is the same."""

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from deepenough import UserError
from deepenough.decoding import backends as engines
from deepenough.decoding.api import early_exit, speculate

OPTIONS = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
KEEPING = ["native", "torch", "general"]


def asked(fast, ids, **options):
    return fast.generate(ids, attention_mask=torch.ones_like(ids), **(OPTIONS | options))


def check(fast, model, ids, reused: int, **options) -> torch.Tensor:
    """What a call writes is what the model itself writes, with so many tokens not read again."""
    found = asked(fast, ids, **options)
    assert found.sequences.tolist() == asked(model, ids, **options).sequences.tolist()
    assert found.reused == reused
    return found.sequences


@pytest.fixture
def model(make_model):
    return make_model(eos_token_id=None)


def more(ids: torch.Tensor, seed: int, count: int = 5) -> torch.Tensor:
    new = torch.randint(3, 40, (1, count), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, new], 1)


@pytest.mark.parametrize("drafter", ["none", "lookup"])
@pytest.mark.parametrize("backend", [*KEEPING, "whole"])
def test_a_chat_is_read_once(model, backend, drafter) -> None:
    fast = speculate(model, drafter, backend="general" if backend == "whole" else backend)
    if backend == "whole":
        fast.engine_and_state = engines._whole_engine(model), fast.engine_and_state[1]
    ids, known = more(torch.empty(1, 0, dtype=torch.long), 0), 0
    for turn in range(3):
        ids = check(fast, model, ids, known)
        known = ids.shape[1] - 1  # the last token has not been through the model
        ids = more(ids, turn + 1)
    # The same prompt again, one that ends earlier, one that differs in the middle, and another.
    check(fast, model, ids, known)
    check(fast, model, ids[:, :10], 9)
    other = ids.clone()
    other[0, 6] = (other[0, 6] + 1) % 40
    check(fast, model, other, 6)
    check(fast, model, (other + 1) % 40, 0)


def test_what_a_window_has_dropped_is_read_anew(make_model) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=10)).eval()
    fast = speculate(model)
    ids = check(fast, model, more(torch.empty(1, 0, dtype=torch.long), 0, 20), 0)
    known, ids = ids.shape[1] - 1, more(ids, 1)
    check(fast, model, ids, known)
    check(fast, model, ids[:, :-2], 0)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    given = {"attention_mask": (torch.arange(padded.shape[1]) >= 3).long()[None]}
    for _ in range(2):
        found = fast.generate(padded, **given, **OPTIONS)
        assert torch.equal(found.sequences, model.generate(padded, **given, **OPTIONS).sequences)
        assert not found.reused


@pytest.mark.parametrize("backend", KEEPING)
def test_sampled_and_padded_and_processed(model, backend) -> None:
    fast = speculate(model, backend=backend)
    ids = check(fast, model, more(torch.empty(1, 0, dtype=torch.long), 0), 0)
    torch.manual_seed(3)
    sampled = {"do_sample": True, "top_k": 0}
    expected = asked(model, ids, **sampled).sequences
    torch.manual_seed(3)
    found = asked(fast, ids, **sampled)
    assert torch.equal(found.sequences, expected) and found.reused == ids.shape[1] - 1
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    found = fast.generate(padded, attention_mask=mask, **OPTIONS)
    expected = model.generate(padded, attention_mask=mask, **OPTIONS)
    assert torch.equal(found.sequences, expected.sequences) and found.reused
    check(fast, model, ids, ids.shape[1] - 1, repetition_penalty=1.3)
    mask[0, 5] = 0
    with pytest.raises(UserError, match="middle of a prompt"):
        fast.generate(padded, attention_mask=mask, **OPTIONS)


@pytest.mark.parametrize("backend", KEEPING)
def test_what_comes_between_frees_the_cache(model, prompts, backend) -> None:
    fast = speculate(model, backend=backend)
    ids = more(torch.empty(1, 0, dtype=torch.long), 0, 9)

    def batch() -> None:
        found = fast.generate(**prompts(3), **OPTIONS)
        assert torch.equal(found.sequences, model.generate(**prompts(3), **OPTIONS).sequences)
        assert found.past_key_values is None

    def failure() -> None:
        with pytest.raises(ZeroDivisionError):
            asked(fast, ids, stopping_criteria=[lambda *_: 1 // 0])

    def changed() -> None:
        model.model.embed_tokens.weight.mul_(1.5)

    def engine() -> None:
        fast.decoding_engine.prefill((ids + 1) % 40, None, 12)

    def freed() -> None:
        fast.free_cache()
        assert fast.decoding_engine.lengths == []

    for between in (batch, failure, changed, engine, freed):
        check(fast, model, ids, 0)
        between()
        check(fast, model, ids, 0)
        check(fast, model, ids, ids.shape[1] - 1)
        fast.free_cache()


def test_exits_leave_nothing(model, shortcuts) -> None:
    fast = early_exit(model, shortcuts, 0.1, exit_layers=[1])
    ids = more(torch.empty(1, 0, dtype=torch.long), 0)
    first, second = asked(fast, ids), asked(fast, ids)
    assert torch.equal(first.sequences, second.sequences) and second.reused == 0
    assert second.past_key_values is None


def test_past_key_values_are_handed_back_and_forth(model) -> None:
    fast = speculate(model)
    first = asked(fast, more(torch.empty(1, 0, dtype=torch.long), 0))
    past = first.past_key_values
    assert past.get_seq_length() == first.sequences.shape[1] - 1
    ids = more(first.sequences, 1)
    found = asked(fast, ids, past_key_values=past)
    assert torch.equal(found.sequences, asked(model, ids).sequences)
    assert found.reused == past.get_seq_length()
    # By now the model has other keys and values: the text is read anew where it differs.
    asked(fast, (ids + 1) % 40)
    assert torch.equal(asked(fast, ids, past_key_values=past).sequences, found.sequences)
    with pytest.raises(UserError, match="does not begin with the 12 tokens"):
        asked(fast, (ids + 1) % 40, past_key_values=past)


def test_an_empty_cache_may_be_given_to_every_turn_of_a_chat(model) -> None:
    """As transformers' own guide to chats does."""
    fast, cache = speculate(model), DynamicCache()
    ids = more(torch.empty(1, 0, dtype=torch.long), 0)
    for turn in (1, 2):
        found = asked(fast, ids, past_key_values=cache)
        assert torch.equal(found.sequences, asked(model, ids).sequences)
        assert (found.reused > 0) == (turn > 1)
        ids = more(found.sequences, turn)
    with pytest.raises(UserError, match="leaves it empty"):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("backend", KEEPING)
def test_acceptance_is_told_by_place(model, backend) -> None:
    fast = speculate(model, "lookup", num_draft_tokens=3, backend=backend)
    ids = more(torch.empty(1, 0, dtype=torch.long), 0).repeat(1, 3)
    found = asked(fast, ids, max_new_tokens=30)
    assert sum(found.drafted_at) == found.drafted > 0
    assert sum(found.accepted_at) == found.accepted == int(found.from_draft.sum())
    assert found.from_draft.shape == (1, 30)
    pairs = list(zip(found.drafted_at, found.accepted_at, strict=True))
    assert len(pairs) == 3 and all(right <= all_ for all_, right in pairs)
    assert found.accepted_at == sorted(found.accepted_at, reverse=True)
    assert found.passes + 1 + found.accepted == 30
