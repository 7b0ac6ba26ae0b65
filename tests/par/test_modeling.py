"""The model and its config: patterns, memory, losses, decisions, files, generation."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

from deepenough import ParConfig, ParForCausalLM, UserError

FORMS = [{}, {"cutoffs": [10, 20]}]


def tokens(streams: int = 3, length: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 40, (streams, length), generator=torch.Generator().manual_seed(seed))


# -- the SuperNet and its patterns ---------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", ["".join(p) for p in itertools.product("ad-", repeat=2)][:-1])
def test_supernet_with_all_weight_on_one_branch_equals_the_fixed_pattern(make_model, form, pattern):
    """The neutral setting equals the base model."""
    supernet = make_model(num_blocks=2, **form)
    with torch.no_grad():
        for row, kind in zip(supernet.choice.alpha, pattern, strict=True):
            row.copy_(200.0 * F.one_hot(torch.tensor("ad-".index(kind)), 3))
    fixed = supernet.with_pattern(pattern)
    assert fixed.pattern == pattern
    assert fixed.choice is None
    memories = [None, None]
    for seed in range(3):
        ids = tokens(seed=seed)
        outputs = [
            model(ids, memories=memory)
            for model, memory in zip((supernet, fixed), memories, strict=True)
        ]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
        memories = [output.memories for output in outputs]


def test_given_blocks_of_a_search_compute_one_branch(make_model):
    model = make_model(pattern="d*-")
    called = []
    for index, block in enumerate(model.blocks):
        for name in ("attention", "dense"):
            if (branch := getattr(block, name)) is not None:
                branch.register_forward_hook(lambda *_, call=f"{name} {index}": called.append(call))
    model.train()(tokens(), targets=tokens(seed=2)).loss.backward()
    assert called == ["dense 0", "attention 1", "dense 1"]
    assert (model.choice.alpha.grad[[0, 2]] == 0).all()
    assert (model.choice.alpha.grad[1] != 0).any()
    given = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(model.choice.probabilities()[[0, 2]], given)


def test_identity_blocks_do_nothing(make_model):
    model = make_model(pattern="ad")
    longer = make_model(pattern="-a--d-", seed=3)
    state = model.state_dict()
    names = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.4."}
    renamed = {names.get(name[:9], name[:9]) + name[9:]: value for name, value in state.items()}
    longer.load_state_dict(renamed)
    assert torch.equal(longer(tokens()).logits, model(tokens()).logits)


def test_evaluation_of_a_supernet_repeats_and_training_does_not(make_model):
    model = make_model(num_blocks=2)
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)
    model.train()
    assert not torch.equal(model(tokens()).logits, model(tokens()).logits)


def test_given_noise_replaces_the_draw(make_model):
    model = make_model(num_blocks=2).train()
    noise = torch.randn(2, 3, 3)
    logits = model(tokens(), noise=noise).logits
    assert torch.equal(model(tokens(), noise=noise).logits, logits)
    # Lanes have their own draw and see nothing of each other's.
    part = model(tokens()[1:], noise=noise[:, 1:]).logits
    torch.testing.assert_close(part, logits[1:])


@pytest.mark.parametrize("straight_through", [False, True])
def test_gradient_reaches_every_choice_and_weight(make_model, straight_through):
    model = make_model(num_blocks=3, straight_through=straight_through, learn_tau=True).train()
    # Large enough a batch that every branch is drawn somewhere.
    model(tokens(streams=24), targets=tokens(streams=24, seed=2)).loss.backward()
    assert (model.choice.alpha.grad != 0).all()
    assert model.choice.log_tau.grad != 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and (parameter.grad != 0).any(), name


def test_patterns_come_only_out_of_models_that_have_their_weights(make_model):
    with pytest.raises(UserError, match=r"The pattern da cannot be taken out of ad: there are no"):
        make_model(pattern="ad").with_pattern("da")
    with pytest.raises(UserError, match="no block"):
        make_model(num_blocks=2).with_pattern("--")


def test_extracted_model_keeps_mode_and_dtype(make_model):
    model = make_model(num_blocks=2).double().train()
    other = model.with_pattern("ad")
    assert other.dtype == torch.float64
    assert other.training
    assert not model.eval().with_pattern("ad").training


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(8, 8), (5, 8, 3), (1, 1, 6, 8), (16,)])
@pytest.mark.parametrize("pattern", ["aad", "d-a", "***"])
def test_a_stream_in_segments_equals_one_long_segment(make_model, pattern, pieces):
    """Where the window allows it: no token of the 16 lies beyond memory and segment."""
    model = make_model(pattern=pattern, mem_len=15, length=16)
    ids = tokens(length=16)
    memories, parts = None, []
    for piece in ids.split(pieces, 1):
        output = model(piece, memories=memories)
        memories = output.memories
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)


def test_memory_reaches_mem_len_back_and_no_further(make_model):
    model = make_model(pattern="a", mem_len=3, length=4)
    first = tokens(streams=2, length=6)
    first[1, 3:] = first[0, 3:]  # the streams agree in the last three tokens alone
    second = tokens(streams=1, length=4, seed=2).repeat(2, 1)
    logits = model(second, memories=model(first).memories).logits
    torch.testing.assert_close(logits[0], logits[1])
    first[1, 3] = (first[0, 3] + 1) % 40
    logits = model(second, memories=model(first).memories).logits
    assert not torch.allclose(logits[0, 0], logits[1, 0])


def test_memories_are_detached_and_grow_to_mem_len(make_model):
    model = make_model(pattern="ad*", mem_len=7).train()
    memories, lengths = None, []
    for _ in range(5):
        output = model(tokens(length=2), targets=tokens(length=2), memories=memories)
        memories = output.memories
        assert memories[1] is None
        assert not memories[0].requires_grad and not memories[2].requires_grad
        lengths.append((memories[0].shape[1], memories[2].shape[1]))
    assert lengths == [(n, n) for n in (2, 4, 6, 7, 7)]


@pytest.mark.parametrize("pattern", ["ad", "**"])
def test_without_memory_segments_are_strangers(make_model, pattern):
    model = make_model(pattern=pattern, mem_len=0).train()
    output = model(tokens(), targets=tokens(seed=2))
    output.loss.backward()
    model.eval()
    alone = model(tokens(seed=3)).logits
    torch.testing.assert_close(model(tokens(seed=3), memories=output.memories).logits, alone)


def test_padding_is_hidden_and_memory_before_it_is_not(make_model):
    """A mask of the segment alone is enough."""
    model = make_model(pattern="ad")
    memories = model(tokens(seed=5)).memories
    ids, others = tokens(seed=6), tokens(seed=6)
    others[:, 0] = (ids[:, 0] + 1) % 40
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[:, 0] = 0
    for each in (mask, mask.bool()):
        logits = model(ids, memories=memories, attention_mask=each).logits[:, 1:]
        same = model(others, memories=memories, attention_mask=each).logits[:, 1:]
        torch.testing.assert_close(same, logits)
        without = model(ids, attention_mask=each).logits[:, 1:]
        torch.testing.assert_close(without, model(ids[:, 1:]).logits)
        assert not torch.allclose(without, logits)


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_loss_is_the_cross_entropy_of_the_logits(make_model, form):
    model = make_model(pattern="ad", **form)
    ids, targets = tokens(), tokens(seed=2)
    logits = model(ids).logits
    assert logits.shape == (3, 5, 40)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    output = model(ids, targets=targets)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_shifted_targets(make_model, form):
    model = make_model(pattern="ad", **form)
    ids, labels = tokens(), tokens()
    labels[0, 2:4] = -100
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, model(ids, targets=targets).loss)
    torch.testing.assert_close(output.logits, model(ids).logits)
    kept = targets != -100
    expected = F.cross_entropy(output.logits[kept], targets[kept])
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_labels_and_targets_agree(make_model, form):
    model = make_model(pattern="ad", **form).train()
    labels = tokens()
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    parameters = list(model.parameters())
    by_labels = torch.autograd.grad(model(tokens(), labels=labels).loss, parameters)
    by_targets = torch.autograd.grad(model(tokens(), targets=targets).loss, parameters)
    for got, expected in zip(by_labels, by_targets, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_the_last_tokens_alone(make_model, form):
    model = make_model(pattern="ad", **form)
    expected = model(tokens()).logits
    torch.testing.assert_close(model(tokens(), logits_to_keep=2).logits, expected[:, -2:])
    if form:
        torch.testing.assert_close(expected.exp().sum(-1), torch.ones(3, 5))


def test_tuple_instead_of_an_output(make_model):
    model = make_model(pattern="ad")
    output, values = model(tokens()), model(tokens(), return_dict=False)
    assert torch.equal(values[0], output.logits)
    assert len(values) == len(output.to_tuple())


@pytest.mark.parametrize("form", FORMS)
def test_new_weights_begin_with_states_of_unit_variance(make_config, form):
    torch.manual_seed(0)
    model = ParForCausalLM(make_config(pattern="ad", d_model=64, **form)).eval()
    states = model.embedding(torch.arange(40)) * 8.0
    for rows in (states[:10], states[10:20], states[20:]):
        assert 0.7 < rows.std().item() < 1.3


# -- the trace -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_trace_of_a_pattern(make_model, form):
    model = make_model(pattern="a-d", **form)
    trace = model(tokens()).trace
    assert trace.depth.tolist() == [[3] * 5] * 3
    assert trace.ran.shape == (3, 5, 3)
    assert trace.ran.reshape(-1, 3).unique(dim=0).tolist() == [[True, False, True]]
    assert trace.flops.shape == (3, 5)
    assert (trace.flops > 0).all()
    assert trace.mean_blocks == 2
    assert model.train()(tokens()).trace is None


def test_trace_tells_which_tokens_needed_the_output_layer(make_model):
    model = make_model(pattern="ad")
    flops = model(tokens(), logits_to_keep=1).trace.flops
    assert torch.equal(flops[:, -1] - flops[:, 0], torch.full((3,), 2.0 * 16 * 40).double())


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"pattern": "ad-"},
        {"num_blocks": 3},
        {"num_blocks": 2, "learn_tau": True, "straight_through": True},
        {"pattern": "a*", "cutoffs": [10, 20]},
        {"pattern": "ad", "tie_word_embeddings": False},
    ],
)
def test_save_and_load(make_model, tmp_path, form):
    model = make_model(**form)
    if model.choice is not None:
        model.choice.set_tau(0.4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is ParForCausalLM
    assert not loaded.training
    assert loaded.config.to_diff_dict() == AutoConfig.from_pretrained(tmp_path).to_diff_dict()
    assert loaded.pattern == model.pattern
    own, other = model.state_dict(), loaded.state_dict()
    assert own.keys() == other.keys()
    for name in own:
        assert torch.equal(own[name], other[name]), name
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_tied_weights_are_one_tensor(make_model, tmp_path):
    model = make_model(pattern="ad")
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path), model.with_pattern("ad")):
        assert each.output.weight is each.embedding.weight
        before = each(tokens()).logits
        with torch.no_grad():
            each.embedding.weight.mul_(2.0)
        assert not torch.equal(each(tokens()).logits, before)
        assert torch.equal(each.output.weight, each.embedding.weight)


# -- number formats ------------------------------------------------------------------------------


@pytest.fixture
def plain_kernels():
    """Some virtual machines announce bfloat16 units that end the process when oneDNN uses them."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(was_enabled)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(make_model, form, autocast):
    model = make_model(num_blocks=2, **form)
    ids, targets = tokens(), tokens(seed=2)
    noise = torch.randn(2, 3, 3)
    memories = model(ids).memories
    expected = model(ids, targets=targets, memories=memories).loss
    if not autocast:
        model = model.bfloat16()
        memories = tuple(memory.bfloat16() for memory in memories)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            evaluated = model(ids, targets=targets, memories=memories)
            assert model(ids, memories=memories).logits.isfinite().all()
        torch.testing.assert_close(evaluated.loss.float(), expected, atol=0.1, rtol=0.02)
        model.train()
        model(ids, targets=targets, memories=memories, noise=noise).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


# -- the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "3 heads do not divide the width 16: choose num_heads so that"),
        ({"pattern": "axd"}, "'axd' has the unknown letter 'x'"),
        ({"pattern": "--"}, "'--' has no block"),
        ({"pattern": ""}, "has no block"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"cutoffs": [20, 10]}, r"\[20, 10\] are not sorted and distinct: give them in rising"),
        ({"cutoffs": [10, 10]}, "not sorted and distinct"),
        ({"cutoffs": [0, 10]}, "each of cutoffs must be at least 1: got 0"),
        ({"cutoffs": [-3]}, "each of cutoffs must be at least 1: got -3"),
        ({"cutoffs": [10, 41]}, "must lie between 1 and 39"),
        ({"cutoffs": [10, 40]}, "the vocabulary size, 40, is not one of them"),
        ({"cutoffs": [10, 20], "div_value": 5.0}, "2 cutoffs with a div_value of 5 do not fit the"),
        ({"cutoffs": [10], "div_value": 0.0}, "div_value must be at least 1"),
        ({"mem_len": -1}, "mem_len must be at least 0: got -1"),
        ({"length": 0}, "length must be at least 1: got 0"),
        ({"d_model": 0}, "d_model must be at least 1: got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1: got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"d_ff": 0}, "d_ff must be at least 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1: got 1.0"),
    ],
)
def test_bad_values_get_one_sentence(make_config, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        make_config(**changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_search_is_a_pattern_of_stars(make_config):
    assert make_config(num_blocks=3).pattern == "***"
    fixed = make_config(num_blocks=3, pattern="ad-d")
    assert (fixed.pattern, fixed.num_blocks, fixed.num_hidden_layers) == ("ad-d", 4, 4)


def test_what_follows_from_the_sizes(make_config):
    config = make_config()
    assert config.sliding_window == 9
    assert config.initializer_range == 0.25
    assert config.tie_word_embeddings
    assert not make_config(cutoffs=[10]).tie_word_embeddings


def test_other_blocks_and_nothing_else(make_config):
    config = make_config(num_blocks=3, cutoffs=[10, 20], learn_tau=True)
    other = config.with_pattern("ad--")
    assert other.pattern == "ad--"
    same, changed = config.to_dict(), other.to_dict()
    for values in (same, changed):
        del values["pattern"], values["num_blocks"]
    assert same == changed


def test_round_trip(make_config, tmp_path):
    config = make_config(pattern="a*-", cutoffs=[10, 20], straight_through=True)
    config.save_pretrained(tmp_path)
    assert ParConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


# -- generate(): with a cache, without one, in batches, beams and samples -----------------------

WRITERS = [
    {"pattern": "aad"},
    {"pattern": "d-a"},
    {"num_blocks": 3},
    {"pattern": "ada", "cutoffs": [10, 20]},
    {"pattern": "aa", "mem_len": 0},
    {"pattern": "a", "mem_len": 0, "length": 1},
    {"pattern": "d-d"},
]
WRITER_NAMES = [" ".join(f"{value}" for value in form.values()) for form in WRITERS]
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


def prompt(streams: int = 2, length: int = 3) -> torch.Tensor:
    return torch.randint(1, 40, (streams, length), generator=torch.Generator().manual_seed(1))


def write(model, ids, **options):
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0} | options
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


@pytest.mark.parametrize("form", WRITERS, ids=WRITER_NAMES)
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


@pytest.mark.parametrize("form", WRITERS, ids=WRITER_NAMES)
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", [1, 4, 7])
def test_a_prompt_read_in_parts_equals_one_read_at_once(make_writer, monkeypatch, form, part):
    """Also behind padding; memory then grows with the prompt, not with its square."""
    model = make_writer(**form)
    ids = tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    how = {"attention_mask": mask, "use_cache": True, "output_hidden_states": True}
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    whole, written = model(ids, **how), model.generate(ids, **options)
    seen = []
    run = type(model)._run_blocks

    def watched(self, part_ids, num_keys, *rest):
        seen.append((part_ids.shape[1], num_keys))
        return run(self, part_ids, num_keys, *rest)

    monkeypatch.setattr(type(model), "_run_blocks", watched)
    monkeypatch.setattr("deepenough.par.modeling.READ_AT_ONCE", part)
    parts = model(ids, **how)
    assert len(seen) == -(-23 // part)
    assert max(keys for _, keys in seen) <= model.config.sliding_window - 1 + part
    visible = mask.bool()
    torch.testing.assert_close(parts.logits[visible], whole.logits[visible])
    for one, other in zip(parts.hidden_states, whole.hidden_states, strict=True):
        torch.testing.assert_close(one[visible], other[visible])
    assert parts.trace.total_flops <= whole.trace.total_flops
    assert torch.equal(model.generate(ids, **options), written)
    last = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
    torch.testing.assert_close(last.logits, whole.logits[:, -1:])


def test_cache_is_made_when_asked_for(make_writer):
    model = make_writer(pattern="ad")
    first = model(prompt(), use_cache=True)
    assert first.memories is None
    second = model(prompt(), past_key_values=first.past_key_values)
    whole = model(torch.cat([prompt(), prompt()], 1)).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole)
    assert model(prompt()).past_key_values is None


@pytest.mark.parametrize("form", WRITERS, ids=WRITER_NAMES)
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


@pytest.mark.parametrize("form", WRITERS, ids=WRITER_NAMES)
def test_padded_batch_equals_one_by_one(make_writer, form):
    model = make_writer(**form)
    texts = [prompt(streams=1, length=length)[0] for length in (7, 2, 12)]
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


@pytest.mark.parametrize("form", WRITERS[1:4], ids=WRITER_NAMES[1:4])
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
    free = write(model, prompt(streams=1))[0, 3:].tolist()
    end = free[5]
    stopped = write(model, prompt(streams=1), eos_token_id=end)[0, 3:].tolist()
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
        write(model, prompt(streams=1), **option)
    with pytest.raises(UserError, match=named):
        model.generate(prompt(streams=1), GenerationConfig(max_new_tokens=4, **option))


def test_each_further_cluster_is_narrower_by_the_projection_factor(make_model):
    """Widths d / factor, d / factor^2, ..., and the loss is that of these very matrices."""
    model = make_model(pattern="d", cutoffs=[10, 20], div_value=4.0)
    widths = [tail[0].out_features for tail in model.output.tail]
    assert widths == [16 // 4, 16 // 16]
    hidden, targets = torch.randn(6, 16), torch.tensor([3, 9, 10, 19, 20, 39])
    head = model.output.head(hidden).log_softmax(-1)
    expected = []
    for row, target in enumerate(targets.tolist()):
        cluster = sum(target >= cutoff for cutoff in (10, 20))
        if cluster == 0:
            expected.append(head[row, target])
        else:
            tail = model.output.tail[cluster - 1](hidden[row]).log_softmax(-1)
            expected.append(head[row, 10 + cluster - 1] + tail[target - 10 * cluster])
    found = model._loss(hidden.unsqueeze(0), targets.unsqueeze(0))
    torch.testing.assert_close(found, -torch.stack(expected).mean())
