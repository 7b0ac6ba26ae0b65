"""`generate` of a faster model: what transformers gives, what it takes, and what it refuses."""

import threading

import pytest
import torch
from transformers import (
    BatchEncoding,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from deepenough import UserError
from deepenough.decoding import request
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.early_exit import TopProbability

GREEDY = {"do_sample": False, "max_new_tokens": 16}
WAYS = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "sampled with history": {"do_sample": True, "repetition_penalty": 1.4},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "several ends": {"eos_token_id": [2, 5, 9, 11], "pad_token_id": 2},
    "length": {"max_new_tokens": None, "max_length": 20, "min_length": 15},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 2, "suppress_tokens": [7, 8]},
    "biased": {"sequence_bias": {(5, 6): 9.0, (7,): 3.0}, "bad_words_ids": [[8], [9, 10]]},
    "prompt": {"encoder_repetition_penalty": 2.0, "encoder_no_repeat_ngram_size": 1},
    "narrowed": {"do_sample": True, "min_p": 0.1, "typical_p": 0.5, "top_h": 0.5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_those_of_transformers(small, prompts, rows, way) -> None:
    """Sampled too: the same draws are made from the same probabilities."""
    check_same(small, prompts(rows), {**GREEDY, **WAYS[way]})


@pytest.mark.parametrize("way", ["greedy", "sampled with history"])
def test_tokens_of_every_architecture(model, prompts, way) -> None:
    check_same(model, prompts(3), {**GREEDY, **WAYS[way]})


def check_same(model, given, options) -> None:
    torch.manual_seed(3)
    expected = model.generate(**given, **options)
    torch.manual_seed(3)
    assert torch.equal(speculate(model, "none").generate(**given, **options), expected)


def test_padding_on_the_right_is_as_good(small, prompts) -> None:
    """transformers would continue after the padding; here a row is its tokens alone."""
    left = prompts(3)
    right = {name: value.clone() for name, value in left.items()}
    for row, missing in ((0, 3), (1, 1)):
        for name in right:
            right[name][row] = right[name][row].roll(-missing)
    fast = speculate(small, "none")
    new = [fast.generate(**given, **GREEDY)[:, 7:] for given in (left, right)]
    assert torch.equal(*new)


@pytest.mark.parametrize("drafter", ["none", None])
def test_padding_is_known_without_a_mask(model, prompts, drafter) -> None:
    ids = prompts(3)["input_ids"]
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(speculate(model, drafter).generate(ids, **GREEDY), expected)


def test_model_is_saved_and_loaded_as_before(make_model, prompts, tmp_path) -> None:
    model = make_model()
    fast = speculate(model, "none")
    fast.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_output_has_scores_and_trace(small, prompts) -> None:
    model = small
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    options |= {"output_logits": True}
    expected = model.generate(**prompts(3), **options)
    found = speculate(model, "none").generate(**prompts(3), **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(found.logits) == len(expected.scores)
    live = expected.sequences[:, 7 : 7 + len(found.scores)]
    for place, (own, other) in enumerate(zip(found.scores, expected.scores, strict=True)):
        rows = (live[:, :place] != 2).all(1)  # finished rows go on with padding
        torch.testing.assert_close(own[rows], other[rows], rtol=1e-4, atol=1e-4)
    new = found.sequences.shape[1] - 7
    assert found.trace.depth.shape == (3, new)
    ended = (found.sequences[:, 7:] == 2).cumsum(1) - (found.sequences[:, 7:] == 2).int() > 0
    assert torch.equal(found.trace.depth, torch.where(ended, 0, 3))
    assert bool((found.trace.flops[~ended] > 0).all())
    assert found.passes == new - 1 and found.drafted == 0


class EndAfter(StoppingCriteria):
    """Looks at the whole batch, as criteria may."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, input_ids, scores, **kwargs):
        assert len(input_ids) == self.rows
        return input_ids[:, -1] % 5 == 0


class Favour(LogitsProcessor):
    """Has a state: each call prefers another token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, 3 + self.calls % 30] += 3.0
        return scores


@pytest.mark.parametrize("rows", [1, 3])
def test_own_processors_and_criteria(small, prompts, rows) -> None:
    def options():
        return {
            **GREEDY,
            "logits_processor": LogitsProcessorList([Favour()]),
            "stopping_criteria": StoppingCriteriaList([EndAfter(rows)]),
        }

    expected = small.generate(**prompts(rows), **options())
    for drafter in ("none", None):
        found = speculate(small, drafter).generate(**prompts(rows), **options())
        assert torch.equal(found, expected)


class Sure(StoppingCriteria):
    """Ends where the best word's score is high enough, as kept scores tell."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].max(-1).values > 4.0


@pytest.mark.parametrize("rows", [1, 3])
def test_criteria_see_the_scores_that_are_kept(small, prompts, rows) -> None:
    options = {
        **GREEDY,
        "stopping_criteria": StoppingCriteriaList([Sure()]),
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    expected = small.generate(**prompts(rows), **options)
    found = speculate(small, "none").generate(**prompts(rows), **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores) < 16


def test_strings_to_stop_at_may_be_the_models_own(make_model, prompts) -> None:
    model = make_model()
    model.generation_config.stop_strings = ["a"]
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    with pytest.raises(UserError, match="stop_strings need the tokenizer"):
        speculate(model, "none").generate(**prompts(1), generation_config=config)


class Collected:
    def __init__(self) -> None:
        self.parts, self.ended = [], False

    def put(self, value) -> None:
        self.parts.append(value.flatten())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("drafter", ["none", None])
def test_streamers_get_prompt_and_tokens(small, prompts, drafter) -> None:
    streamer = Collected()
    found = speculate(small, drafter).generate(**prompts(1), **GREEDY, streamer=streamer)
    assert torch.equal(torch.cat(streamer.parts), found[0])
    assert streamer.ended


def test_calls_from_several_threads_wait_for_each_other(small, prompts) -> None:
    fast = speculate(small)
    expected = [small.generate(**prompts(2, seed=seed), **GREEDY) for seed in range(4)]
    found = {}

    def work(seed: int) -> None:
        found[seed] = fast.generate(**prompts(2, seed=seed), **GREEDY)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in range(4))


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("mode", ["full", "exit"])
def test_other_threads_may_use_the_same_weights(make_model, prompts, shortcuts, name, mode) -> None:
    model = make_model(name)
    given = {**prompts(2), **GREEDY}
    makers = [model]
    for _ in range(2):
        options = {"policy": TopProbability(0.3), "exit_layers": [1, 2]}
        exits = mode == "exit"
        makers.append(
            early_exit(model, shortcuts, **options) if exits else speculate(model, "none")
        )
    ids = given["input_ids"]
    expected = [(maker.generate(**given), maker(ids).logits) for maker in makers]
    found: list[list] = [[] for _ in makers]

    def work(number: int) -> None:
        for _ in range(3):
            found[number].append((makers[number].generate(**given), makers[number](ids).logits))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for wanted, made in zip(expected, found, strict=True):
        assert len(made) == 3
        for sequences, logits in made:
            assert torch.equal(sequences, wanted[0])
            assert torch.allclose(logits, wanted[1], atol=1e-4)


def test_a_processor_may_call_the_model(small, prompts, shortcuts) -> None:
    """As guidance does: it must not wait for the generation that it is a part of."""
    fast = early_exit(small, shortcuts, policy=TopProbability(0.3), exit_layers=[1, 2])
    found = []

    def work() -> None:
        found.append(fast.generate(**prompts(1), **GREEDY, guidance_scale=1.5))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert len(found) == 1 and found[0].shape[1] > 7


class Interrupt(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == 12:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_interrupted_generation_returns_what_it_has(small, prompts) -> None:
    expected = small.generate(**prompts(1), **GREEDY)
    found = speculate(small, "none").generate(
        **prompts(1),
        **GREEDY,
        stopping_criteria=StoppingCriteriaList([Interrupt()]),
        return_dict_in_generate=True,
    )
    assert found.interrupted
    assert torch.equal(found.sequences, expected[:, :12])


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    return cache


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"custom_generate": "x"}, "custom_generate"),
        ({"stop_strings": ["a"]}, "tokenizer"),
        ({"max_new_tokens": 60}, "at most 57 new tokens"),
        ({"position_ids": torch.arange(5, 12)[None]}, "does not take position_ids"),
        ({"inputs_embeds": torch.zeros(1, 7, 32)}, "does not take inputs_embeds"),
        ({"past_key_values": filled_cache()}, "does not take past_key_values"),
        ({"assistant_model": torch.nn.Linear(1, 1)}, "does not take assistant_model"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"synced_gpus": True}, "does not take synced_gpus"),
        ({"cache_implementation": "static"}, "does not take cache_implementation"),
        ({"cache_implementation": "paged"}, "does not take cache_implementation"),
        ({"prefill_chunk_size": 2}, "does not take prefill_chunk_size"),
        ({"is_assistant": True}, "does not take is_assistant"),
        ({"attention_mask": torch.arange(9)[None] > 1}, "attention mask has the shape"),
    ],
)
def test_what_is_not_done_is_refused_by_name(small, prompts, options, words) -> None:
    with pytest.raises(UserError, match=words):
        speculate(small, "none").generate(**{**prompts(1), **GREEDY, **options})


def test_every_setting_of_transformers_is_honoured_refused_or_without_effect(
    small, prompts, monkeypatch
) -> None:
    settings = set(GenerationConfig().to_dict())
    known = request._HONOURED | request._WITHOUT_EFFECT
    assert not request._HONOURED & request._WITHOUT_EFFECT
    refused = {
        *("use_mtp", "cache_implementation", "token_healing", "prefill_chunk_size"),
        *("output_attentions", "output_hidden_states", "is_assistant", "speculation_type"),
        *("assistant_early_exit", "assistant_ensemble_weight", "prompt_lookup_num_tokens"),
        *("penalty_alpha", "dola_layers", "constraints", "force_words_ids"),
        "continuous_batching_config",
    }
    assert settings - known <= refused
    # One that a newer transformers may bring.
    monkeypatch.setattr(request, "_HONOURED", request._HONOURED - {"repetition_penalty"})
    with pytest.raises(UserError, match="does not take repetition_penalty"):
        speculate(small).generate(**prompts(1), **GREEDY, repetition_penalty=1.3)


def test_settings_without_effect_change_nothing(small, prompts) -> None:
    expected = small.generate(**prompts(3), **GREEDY)
    options = {"early_stopping": True, "length_penalty": 2.0, "use_cache": False}
    options |= {"num_assistant_tokens": 3, "cache_implementation": "dynamic"}
    assert torch.equal(speculate(small).generate(**prompts(3), **GREEDY, **options), expected)


def test_rows_that_criteria_end_go_on_where_there_is_no_end_token(small, prompts) -> None:
    """So does transformers: without an end token it pads nothing."""

    def options():
        criteria = StoppingCriteriaList([EndAfter(3)])
        return {**GREEDY, "eos_token_id": None, "stopping_criteria": criteria}

    small.generation_config.eos_token_id = None
    expected = small.generate(**prompts(3), **options())
    assert torch.equal(speculate(small).generate(**prompts(3), **options()), expected)


def test_bad_prompts_are_refused(small, prompts) -> None:
    fast = speculate(small, "none")
    with pytest.raises(UserError, match="empty"):
        fast.generate(input_ids=torch.empty(1, 0, dtype=torch.long), **GREEDY)
    with pytest.raises(UserError, match="empty"):
        fast.generate(**GREEDY)
    given = prompts(2)
    given["attention_mask"][0] = 0
    with pytest.raises(UserError, match="row 0 is empty"):
        fast.generate(**given, **GREEDY)
    given = prompts(1)
    given["attention_mask"][0, 3] = 0
    with pytest.raises(UserError, match="in the middle"):
        fast.generate(**given, **GREEDY)
    for wrong in ("some words", [[5, 6]], BatchEncoding({"input_ids": [[5, 6]]})):
        with pytest.raises(UserError, match="must be a tensor, not a"):
            fast.generate(wrong, **GREEDY)
    with pytest.raises(UserError, match="shorten the prompt"):
        fast.generate(input_ids=torch.full((1, 70), 5), do_sample=False, max_new_tokens=5)


def test_a_model_is_given_by_name_too(small, prompts, tmp_path) -> None:
    from transformers import BertTokenizer

    small.save_pretrained(tmp_path)
    words = tmp_path / "words"
    words.mkdir()
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "words"]
    (words / "vocab.txt").write_text("\n".join(vocab))
    BertTokenizer.from_pretrained(words).save_pretrained(tmp_path)
    given = prompts(1)
    expected = small.generate(**given, do_sample=False, max_new_tokens=5)
    fast = speculate(str(tmp_path))
    assert torch.equal(fast.generate(**given, do_sample=False, max_new_tokens=5), expected)
    with pytest.raises(UserError, match="was not found"):
        speculate("nobody/nothing")
