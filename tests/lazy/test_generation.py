"""`generate()`: with a cache for every step and without, in beams, in batches, with other steps."""

from functools import partial

import pytest
import torch

from deepenough.errors import UserError
from deepenough.hf.generation import GnmtLengthPenalty

FORMS = [
    {},
    {"mechanism": "universal"},
    {"mechanism": "act"},
    {"mechanism": "transformer"},
    {"norm": "every", "step_encoding": "learned"},
    {"decoder_epsilon": 0.8},
    {"decoder_epsilon": 0.9, "epsilon": 0.9, "patience": 2, "decoder_steps": 5},
]
NAMES = [" ".join(map(str, form.values())) or "lazy" for form in FORMS]
NUM_NEW = 8
# With an output layer of its own, an untrained model does not repeat the token it reads.
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture
def make_translator(make_translator):
    return partial(make_translator, **UNTIED)


@pytest.fixture
def make_writer(make_writer):
    return partial(make_writer, **UNTIED)


def write(model, sources, **options):
    defaults = {"max_new_tokens": NUM_NEW, "min_new_tokens": 4, "eos_token_id": 39}
    return model.generate(**sources, **(defaults | options))


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("beams", [1, 4])
def test_a_cache_changes_nothing(make_translator, sources, form, beams):
    model = make_translator(**form)
    options = {"num_beams": beams, "length_penalty": 0.6} if beams > 1 else {}
    cached = write(model, sources, **options)
    assert torch.equal(cached, write(model, sources, use_cache=False, **options))
    assert len(cached.unique()) > 2  # else equality would mean little


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_the_causal_model_too(make_writer, form):
    form = {name: value for name, value in form.items() if name != "epsilon"}
    model = make_writer(**form)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cached = write(model, batch)
    assert torch.equal(cached, write(model, batch, use_cache=False))
    beams = write(model, batch, num_beams=3)
    assert torch.equal(beams, write(model, batch, num_beams=3, use_cache=False))


@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_a_batch_is_its_sentences_one_by_one(make_translator, sources, epsilon):
    model = make_translator(epsilon=epsilon, decoder_epsilon=epsilon)
    together = write(model, sources, num_beams=3)
    for row, length in enumerate([7, 4, 5]):
        alone = {name: tensor[row : row + 1, :length] for name, tensor in sources.items()}
        written = write(model, alone, num_beams=3)[0]
        assert torch.equal(together[row, : len(written)], written)


def test_padded_prompts_of_a_causal_model(make_writer):
    model = make_writer()
    ids, mask = torch.tensor([[5, 6, 7], [3, 8, 9]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    together = write(model, {"input_ids": ids, "attention_mask": mask})
    alone = write(model, {"input_ids": ids[1:, 1:], "attention_mask": mask[1:, 1:]})
    assert torch.equal(together[1, 1:], alone[0])


def test_more_steps_than_in_training_with_a_cache(make_translator, sources):
    model = make_translator()
    options = {"encoder_steps": 5, "decoder_steps": 4, "num_beams": 2}
    cached = write(model, sources, **options)
    assert torch.equal(cached, write(model, sources, use_cache=False, **options))
    assert not torch.equal(cached, write(model, sources, num_beams=2))


def test_keys_of_the_source_are_kept_once_for_a_shared_block(make_translator, sources):
    model = make_translator()
    start = torch.full((3, 1), model.config.decoder_start_token_id)
    cache = model(**sources, decoder_input_ids=start, use_cache=True).past_key_values
    assert len(cache.self_attention_cache.layers) == 2
    assert len(cache.cross_attention_cache.layers) == 1


def test_tokens_guessed_from_the_prompt_change_nothing(make_writer):
    """Where some guesses are right and some are taken back again."""
    model = make_writer()
    prompt = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    written = write(model, prompt, max_new_tokens=24)
    again = {"input_ids": torch.cat([written[:, 5:], prompt["input_ids"]], 1)}
    plain = write(model, again, max_new_tokens=24)
    assert torch.equal(plain, write(model, again, max_new_tokens=24, prompt_lookup_num_tokens=3))


def test_generation_gives_hidden_states_of_every_step(make_writer):
    options = {"output_hidden_states": True, "return_dict_in_generate": True}
    written = write(make_writer(), {"input_ids": torch.tensor([[5, 6, 7]])}, **options)
    shapes = [[tuple(state.shape) for state in token] for token in written.hidden_states]
    assert shapes == [[(1, 3, 16)] * 3] + [[(1, 1, 16)] * 3] * (len(shapes) - 1)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"cache_implementation": "static"}, "cache that grows"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attention weights"),
    ],
)
def test_what_cannot_be_generated_with_is_refused_by_name(
    make_translator, make_writer, sources, option, named
):
    for model in (make_translator(), make_writer()):
        with pytest.raises(UserError, match=named):
            write(model, sources, **option)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "divisor"),
    [
        (float, lambda length, alpha: length**alpha),
        (GnmtLengthPenalty, lambda length, alpha: ((5 + length) / 6) ** alpha),
    ],
    ids=["power", "gnmt"],
)
def test_beams_are_ranked_by_the_formula(make_translator, sources, kind, divisor):
    model, alpha = make_translator(), 0.6
    ends = list(range(20, 40))
    options = {"num_beams": 4, "num_return_sequences": 4, "min_new_tokens": 2}
    options["eos_token_id"] = ends
    found = write(
        model,
        {name: tensor[:1] for name, tensor in sources.items()},
        **options,
        length_penalty=kind(alpha),
        output_scores=True,
        return_dict_in_generate=True,
    )
    lengths = set()
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        end = torch.isin(sequence[1:], torch.tensor(ends)).nonzero()
        length = int(end[0]) + 1 if len(end) else len(sequence) - 1
        lengths.add(length)
        written = sequence[None, : length + 1]
        logits = model(
            **{name: tensor[:1] for name, tensor in sources.items()},
            decoder_input_ids=written[:, :-1],
        ).logits
        log_probs = logits.log_softmax(-1).gather(2, written[:, 1:, None]).sum()
        assert float(score) == pytest.approx(float(log_probs) / divisor(length, alpha), rel=1e-5)
    assert len(lengths) > 1  # else a formula could not change the ranking
