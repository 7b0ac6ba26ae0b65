"""`generate()`: with a cache, without one, in batches, beams and samples."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from deepenough.errors import UserError

FORMS = [
    {"pattern": "aad"},
    {"pattern": "d-a"},
    {"num_blocks": 3},
    {"pattern": "ada", "cutoffs": [10, 20]},
    {"pattern": "ad", "cutoffs": [10, 20], "adaptive_input": True},
    {"pattern": "aa", "mem_len": 0},
    {"pattern": "a", "mem_len": 0, "length": 1},
    {"pattern": "d-d"},
]
NAMES = [" ".join(f"{value}" for value in form.values()) for form in FORMS]
NUM_NEW = 16  # the window is 9 tokens, or less


@pytest.fixture
def make_writer(make_model):
    """Models whose blocks are strong enough that they do not repeat one token for ever."""

    def make(**changes):
        model = make_model(**changes).double()  # so that rounding decides nothing
        with torch.no_grad():
            model.norm.bias.zero_()
            model.norm.weight.fill_(1.0)
            for parameter in model.blocks.parameters():
                parameter.mul_(4.0)
        return model

    return make


def prompt(lanes: int = 2, length: int = 3) -> torch.Tensor:
    return torch.randint(1, 40, (lanes, length), generator=torch.Generator().manual_seed(1))


def write(model, ids, **options):
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0} | options
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("length", [1, 20])
def test_cache_gives_the_tokens_of_recomputing(make_writer, form, length):
    """Beyond the window, where the cache has dropped what training never saw."""
    model = make_writer(**form)
    ids = prompt(length=length)
    cached = write(model, ids)
    assert cached.shape == (2, length + NUM_NEW)
    assert torch.equal(cached, write(model, ids, use_cache=False))


def test_the_models_written_with_here_say_different_things(make_writer):
    assert len(write(make_writer(pattern="aad"), prompt())[:, 3:].unique()) > 8


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_logits_with_a_cache_equal_those_of_the_whole_text(make_writer, form):
    model = make_writer(**form)
    ids = prompt(length=30)
    whole = model(ids).logits
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        parts = [
            model(piece, past_key_values=cache).logits
            for piece in ids.split((4, 1, 1, 12, 1, 11), 1)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_cache_is_made_when_asked_for(make_writer):
    model = make_writer(pattern="ad")
    first = model(prompt(), use_cache=True)
    assert first.memories is None
    second = model(prompt(), past_key_values=first.past_key_values)
    whole = model(torch.cat([prompt(), prompt()], 1)).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole)
    assert model(prompt()).past_key_values is None


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_generation_goes_on_from_memory(make_writer, form):
    """With and without a cache; and as from the whole text, where the window shows all of it."""
    model = make_writer(**form)
    read, ids = prompt(length=4), prompt(length=3)
    memories = model(read).memories
    cached = write(model, ids, memories=memories)
    assert torch.equal(cached, write(model, ids, memories=memories, use_cache=False))
    if model.config.mem_len >= 4:
        whole = write(model, torch.cat([read, ids], 1))
        assert torch.equal(cached, whole[:, 4:])


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_padded_batch_equals_one_by_one(make_writer, form):
    model = make_writer(**form)
    texts = [prompt(lanes=1, length=length)[0] for length in (7, 2, 12)]
    batch = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, text in enumerate(texts):
        batch[row, -len(text) :] = text
        mask[row, -len(text) :] = 1
    together = write(model, batch, attention_mask=mask)
    assert torch.equal(together, write(model, batch, attention_mask=mask, use_cache=False))
    for row, text in enumerate(texts):
        alone = write(model, text[None])
        assert torch.equal(together[row, 12:], alone[0, len(text) :])


@pytest.mark.parametrize("form", FORMS[1:4], ids=NAMES[1:4])
def test_beams_with_a_cache_equal_beams_without(make_writer, form):
    model = make_writer(**form)
    cached = write(model, prompt(), num_beams=3, num_return_sequences=2)
    assert cached.shape == (4, 3 + NUM_NEW)
    recomputed = write(model, prompt(), num_beams=3, num_return_sequences=2, use_cache=False)
    assert torch.equal(cached, recomputed)


def test_sampling_repeats_with_its_seed(make_writer):
    model = make_writer(pattern="ad")
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(write(model, prompt(), do_sample=True, temperature=1.5, top_k=20))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_generation_stops_at_the_end_token(make_writer):
    model = make_writer(pattern="ad")
    free = write(model, prompt(lanes=1))[0, 3:].tolist()
    end = free[5]
    stopped = write(model, prompt(lanes=1), eos_token_id=end)[0, 3:].tolist()
    assert stopped == free[: free.index(end) + 1]


def test_generation_gives_hidden_states_of_every_block(make_model):
    model, ids = make_model(pattern="ad-a"), prompt()
    written = write(model, ids, output_hidden_states=True, return_dict_in_generate=True)
    shapes = [[tuple(state.shape) for state in step] for step in written.hidden_states]
    assert shapes[0] == [(2, 3, model.config.d_model)] * 5
    assert shapes[1:] == [[(2, 1, model.config.d_model)] * 5] * (NUM_NEW - 1)
    output = model(ids, output_hidden_states=True)
    torch.testing.assert_close(output.logits, model.output(output.hidden_states[-1]))
    assert model(ids).hidden_states is None


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"cache_implementation": "static"}, "cache that grows"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attention weights"),
        ({"prompt_lookup_num_tokens": 3}, "without prompt_lookup_num_tokens"),
    ],
)
def test_what_cannot_be_generated_with_is_refused_by_name(make_model, option, named):
    model = make_model(pattern="ad")
    with pytest.raises(UserError, match=named):
        write(model, prompt(lanes=1), **option)
    with pytest.raises(UserError, match=named):
        model.generate(prompt(lanes=1), GenerationConfig(max_new_tokens=4, **option))
