"""Tuned maps: the loss against its definition, progress on held-out text, resumption, files."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.runs import Record, RunFolder, read_records
from deepenough.shortcut.config import TuneTrainingConfig
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.training import TuneTask, TuningStates, tune
from deepenough.shortcut.tuned_maps import (
    PartialHead,
    TokenSampler,
    TunedMaps,
    closed_form_error,
    divergences,
    whitening,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDTH, LAYERS = 16, 3

FEW: dict[str, Any] = {"steps": 12, "batch": 32, "top_tokens": None, "log_every": 4}
"""A tuning that takes a second."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: place for place, word in enumerate(["[UNK]", "[PAD]", "[MASK]", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
    )


def make_texts(seed: int, num: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(8, 24))) for _ in range(num)]


def divergences_ref(
    mapped_LND: Tensor, logits: Callable[[Tensor], Tensor], log_p_NV: Tensor, log_weight_V: Tensor
) -> Tensor:
    """The KL divergence token by token, from the definition."""
    totals = []
    for mapped_ND in mapped_LND:
        total = mapped_ND.new_zeros(())
        for state_D, log_p_V in zip(mapped_ND, log_p_NV, strict=True):
            scores_V = logits(state_D[None])[0] + log_weight_V
            log_q_V = scores_V - scores_V.exp().sum().log()
            for log_p, log_q in zip(log_p_V, log_q_V, strict=True):
                total = total + log_p.exp() * (log_p - log_q)
        totals.append(total / len(mapped_ND))
    return torch.stack(totals)


def tiny_llama(vocab_size: int = 29) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,  # so that it has opinions
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def closed_form(llama: PreTrainedModel, tokenizer: Any) -> Shortcuts:
    return Shortcuts.fit(llama, tokenizer, make_texts(0, 120), targets="last")


@torch.no_grad()
def mean_kl(model: PreTrainedModel, tokenizer: Any, maps: Any, texts: list[str]) -> list[float]:
    """KL from each layer on texts, straight from the model, text by text."""
    adapter = adapt(model)
    totals, num = [0.0] * LAYERS, 0
    for text in texts:
        states = adapter.states(tokenizer(text, return_tensors="pt").input_ids)
        log_p = adapter.logits(states[-1]).log_softmax(-1)
        for layer in range(LAYERS):
            log_q = adapter.logits(maps(states[layer], layer)).log_softmax(-1)
            totals[layer] += float((log_p.exp() * (log_p - log_q)).sum())
        num += log_p.shape[1]
    return [total / num for total in totals]


# -- what is minimised -----------------------------------------------------------------------


def test_divergences_equal_the_definition_and_so_does_their_gradient() -> None:
    torch.manual_seed(1)
    adapter = adapt(tiny_llama(11).double())
    log_p = torch.randn(5, 11, dtype=torch.float64).log_softmax(-1)
    log_weight = torch.tensor([0.0] * 8 + [1.5] * 3, dtype=torch.float64)
    found, expected = (
        torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for _ in range(2)
    )
    weights = torch.tensor([1.0, -0.5])
    values = divergences(found.requires_grad_(), adapter.logits, log_p, log_weight)
    wanted = divergences_ref(expected.requires_grad_(), adapter.logits, log_p, log_weight)
    (weights * values).sum().backward()
    (weights * wanted).sum().backward()
    assert torch.allclose(values, wanted, rtol=1e-10)
    assert found.grad is not None and expected.grad is not None
    assert float(expected.grad.abs().min()) > 0
    assert torch.allclose(found.grad, expected.grad, rtol=1e-8, atol=1e-12)


def test_a_divergence_worked_by_hand() -> None:
    """Logits are the states themselves: p = (1/2, 1/2) against q = (3/4, 1/4)."""
    state = torch.tensor([[[0.75, 0.25]]]).log().requires_grad_()
    log_p = torch.tensor([[0.5, 0.5]]).log()
    value = divergences(state, lambda hidden: hidden, log_p, torch.zeros(2))
    assert value.tolist() == pytest.approx([0.5 * math.log(4 / 3)])
    value.sum().backward()
    assert state.grad is not None
    assert state.grad.flatten().tolist() == pytest.approx([0.25, -0.25])  # q - p


def make_maps(num: int = 200) -> tuple[TunedMaps, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    states = torch.randn(2, num, 6) * torch.tensor([1e3, 2.0, 1.0, 1.0, 0.5, 0.3]) + 5
    matrices, biases, last = torch.randn(2, 6, 6), torch.randn(2, 6), torch.randn(num, 6)
    error = closed_form_error(matrices, biases, states, last)
    return TunedMaps(matrices, biases, whitening(states), error), states, matrices, biases


def test_maps_start_as_the_closed_form() -> None:
    maps, states, matrices, biases = make_maps()
    expected = states @ matrices.transpose(1, 2) + biases[:, None]
    found = maps(maps.white(states))
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-2)
    assert all(
        torch.equal(*pair)
        for pair in zip(maps.matrices_and_biases(), (matrices, biases), strict=True)
    )


def test_maps_for_plain_states_equal_those_for_whitened_ones() -> None:
    maps, states, *_ = make_maps()
    with torch.no_grad():
        maps.change.normal_()
        maps.shift.normal_()
        matrices, biases = maps.matrices_and_biases()
        expected = maps(maps.white(states))
    found = states @ matrices.transpose(1, 2) + biases[:, None]
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_whitened_states_are_uncorrelated_and_of_about_unit_variance() -> None:
    maps, states, *_ = make_maps(5000)
    for white in maps.white(states):
        covariance = white.T.cov()
        assert float((covariance - covariance.diag().diag()).abs().max()) < 2e-2
        # A tenth of the median variance, here 1, is added to each.
        variances = torch.tensor([1e6, 4.0, 1.0, 1.0, 0.25, 0.09])
        assert torch.allclose(covariance.diag(), variances / (variances + 0.1), atol=0.03)
        assert float(white.mean(0).abs().max()) < 1e-2


def test_directions_without_variance_are_not_blown_up() -> None:
    states = torch.randn(1, 50, 4) * torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert float(whitening(states)(states).abs().max()) < 10
    assert float(whitening(torch.ones(1, 5, 4)).root_LDD.abs().max()) < float("inf")


# -- the vocabulary --------------------------------------------------------------------------


def gemma() -> PreTrainedModel:
    config = Gemma2Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=2.0,
    )
    return Gemma2ForCausalLM(config).eval()


def bert(kind: type = BertForMaskedLM) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=29, num_hidden_layers=LAYERS, initializer_range=0.3, **sizes)
    model: PreTrainedModel = kind(config).eval()
    return model


@pytest.mark.parametrize("make", [tiny_llama, gemma, bert])
def test_the_head_of_some_words_is_a_part_of_the_head(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where logits are capped (Gemma) or come out of a transform with a bias (BERT)."""
    adapter = adapt(make())
    if (bias := adapter.model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    ids = torch.tensor([28, 3, 17])
    state = torch.randn(4, adapter.width)
    before = {name: value.clone() for name, value in adapter.model.state_dict().items()}
    small = PartialHead(adapter)(ids)
    full = adapter.head(state)
    # The large map is not asked.
    monkeypatch.setattr(adapter.model.get_output_embeddings(), "forward", None)
    assert torch.allclose(small(state), full[:, ids], atol=1e-6)
    after = adapter.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_an_unusual_head_is_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapt(tiny_llama())
    monkeypatch.setattr(type(adapter.model), "get_output_embeddings", lambda self: None)
    ids, state = torch.tensor([4, 2]), torch.randn(3, WIDTH)
    assert torch.equal(PartialHead(adapter)(ids)(state), adapter.head(state)[:, ids])


def test_the_most_probable_tokens_are_always_taken() -> None:
    words = TokenSampler(torch.tensor([1.0, 5.0, 2.0, 0.5, 1.5]), size=2, num_drawn=0)
    assert words.draw(torch.Generator())[0].tolist() == [1, 2]


def test_sampled_tokens_make_the_sum_over_the_vocabulary_right_in_the_mean() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200)
    words = TokenSampler(logits.softmax(-1), size=20, num_drawn=30)
    generator = torch.Generator().manual_seed(0)
    sums = []
    for _ in range(400):
        ids, log_weight = words.draw(generator)
        assert len(ids.unique()) == 50
        sums.append(float((logits[ids] + log_weight).exp().sum()))
    assert sum(sums) / len(sums) == pytest.approx(float(logits.exp().sum()), rel=0.01)


# -- states ----------------------------------------------------------------------------------


def test_states_are_kept_as_exactly_as_the_limit_allows(
    llama: PreTrainedModel, tokenizer: Any, caplog: Any
) -> None:
    def kept(limit: float) -> TuningStates:
        found = TuningStates(adapt(llama), tokenizer, make_texts(0, 60), [0, 2], 32, 0)
        found.keep(whitening(found.sample(found.tuned_on, 10_000).states), limit)
        return found

    full = kept(1e9)
    exact = full.states.nbytes + full.last.nbytes
    assert full.states.dtype == torch.float32 and len(full.last) > 500
    assert torch.equal(kept(exact).states, full.states)
    half = kept(exact - 1)
    assert half.states.dtype == torch.bfloat16 and not caplog.text
    exact_batch, half_batch = full.batch(3)[0], half.batch(3)[0]
    assert torch.allclose(exact_batch.states, half_batch.states, rtol=0.01)
    part = kept(0.4 * exact)  # of 2/3 that all of them take in bfloat16
    assert "60 % of the text" in caplog.text
    assert 0.5 * len(full.last) < len(part.last) < 0.7 * len(full.last)
    assert (part.last[:, None] == full.last).all(-1).any(1).all()


def test_an_epoch_has_every_position_once(llama: PreTrainedModel, tokenizer: Any) -> None:
    found = TuningStates(adapt(llama), tokenizer, make_texts(0, 60), [0, 2], 1, 0)
    found.keep(whitening(found.sample(found.tuned_on, 10_000).states), 1e9)
    total = sum(found.batch(index)[0].last.double().sum(0) for index in range(len(found.last)))
    torch.testing.assert_close(total, found.last.double().sum(0))


def test_processes_share_the_text_but_not_the_sample(
    llama: PreTrainedModel, tokenizer: Any
) -> None:
    whole, *parts = (
        TuningStates(adapt(llama), tokenizer, make_texts(0, 60), [0], 32, 0, share)
        for share in ((0, 1), (0, 2), (1, 2))
    )
    for each in (whole, *parts):
        each.keep(whitening(each.sample(each.tuned_on, 10_000).states), 1e9)
    assert sum(len(part.last) for part in parts) == len(whole.last)
    for index in range(12):  # into the second epoch
        (expected, share), *found = (each.batch(index) for each in (whole, *parts))
        assert share == 1 and sum(own for _, own in found) == pytest.approx(2)
        rows = [row for batch, own in found if own for row in batch.last.tolist()]
        assert sorted(rows) == sorted(expected.last.tolist())
    samples = [part.sample(part.tuned_on, 50).last for part in parts]
    assert torch.equal(*samples)
    held_out = [part.sample(part.held_out, 20).last for part in parts]
    assert torch.equal(*held_out) and len(held_out[0]) == 20


# -- tuning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_tokens", [None, 8])
def test_divergence_on_new_text_falls_below_the_closed_form(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts, top_tokens: int | None
) -> None:
    tuned = tune(
        closed_form,
        llama,
        tokenizer,
        make_texts(0, 120),
        steps=40,
        lr=1e-2,
        batch=64,
        top_tokens=top_tokens,
        sampled_tokens=8,
    )
    assert sorted(tuned.tuned) == [0, 1, 2] and not closed_form.tuned
    new = make_texts(1, 60)
    before = mean_kl(llama, tokenizer, lambda h, i: closed_form.apply(h, i, LAYERS), new)
    after = mean_kl(llama, tokenizer, lambda h, i: tuned.apply(h, i, LAYERS, "tuned"), new)
    assert all(b < 0.97 * a for a, b in zip(before, after, strict=True)), (before, after)


@torch.no_grad()
def closed_form_quality(
    model: PreTrainedModel, maps: Shortcuts, states: Tensor, last: Tensor, layer: int
) -> tuple[float, float]:
    log_p = adapt(model).logits(last).log_softmax(-1)
    log_q = adapt(model).logits(maps.apply(states, layer, LAYERS)).log_softmax(-1)
    agreed = log_p.argmax(-1) == log_q.argmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), float(agreed.float().mean())


def test_records_tell_the_closed_form_and_the_end(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts, tmp_path: Path
) -> None:
    """Measured on held-out text over the whole vocabulary, whatever tokens are sampled."""
    few = FEW | {"top_tokens": 6, "sampled_tokens": 2, "layers": [0, 2], "held_out": 40}
    tune(closed_form, llama, tokenizer, make_texts(0, 40), out=str(tmp_path / "run"), **few)
    records = read_records(tmp_path / "run" / "metrics.jsonl")[0]
    assert [(r.step, r.kind) for r in records] == [
        (0, "valid"),
        (4, "train"),
        (8, "train"),
        (12, "train"),
        (12, "valid"),
    ]
    texts = TuningStates(adapt(llama), tokenizer, make_texts(0, 40), [0, 2], batch=32, seed=0)
    states, last = texts.sample(texts.held_out, 40)
    for place, layer in enumerate((0, 2)):
        kl, agreed = closed_form_quality(llama, closed_form, states[place], last, layer)
        assert records[0].values[f"kl_{layer}"] == pytest.approx(kl, rel=1e-3)
        assert records[0].values[f"agreement_{layer}"] == pytest.approx(agreed, abs=0.03)


def test_the_whole_vocabulary_is_not_sampled(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts, monkeypatch: Any
) -> None:
    """And one that leaves out nothing but is taken as a list gives the same maps."""
    texts = make_texts(0, 40)
    full = tune(closed_form, llama, tokenizer, texts, **FEW)
    same = tune(closed_form, llama, tokenizer, texts, **FEW | {"top_tokens": 29})
    everything = TokenSampler(torch.ones(29), 29, 0)
    monkeypatch.setattr("deepenough.shortcut.training._make_sampler", lambda *_: everything)
    listed = tune(closed_form, llama, tokenizer, texts, **FEW)
    for layer, (matrix, bias) in full.tuned.items():
        assert torch.equal(same.tuned[layer][0], matrix)
        assert torch.allclose(listed.tuned[layer][0], matrix, rtol=1e-4, atol=1e-4)
        assert torch.allclose(listed.tuned[layer][1], bias, rtol=1e-4, atol=1e-4)


def test_a_layer_is_tuned_the_same_whatever_others_are(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts
) -> None:
    texts = make_texts(0, 40)
    every = tune(closed_form, llama, tokenizer, texts, **FEW)
    one = tune(closed_form, llama, tokenizer, texts, **FEW, layers=[1])
    assert sorted(one.tuned) == [1]
    assert torch.allclose(one.tuned[1][0], every.tuned[1][0], rtol=1e-4, atol=1e-4)


class Killed(Exception):
    """Stands for a kill."""


def test_a_resumed_tuning_equals_an_uninterrupted_one(
    llama: PreTrainedModel,
    tokenizer: Any,
    closed_form: Shortcuts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: Callable[[Path], list[Record]],
) -> None:
    def run(folder: str) -> Shortcuts:
        few = FEW | {"top_tokens": 6, "sampled_tokens": 4, "save_every": 5}
        place = {"out": str(tmp_path / folder), "resume": True}
        return tune(closed_form, llama, tokenizer, make_texts(0, 40), **place, **few)

    def stop_at_eight(task: TuneTask, step: int) -> None:
        if step == 8:
            raise Killed

    whole = run("whole")
    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr(TuneTask, "begin_step", stop_at_eight)
        run("broken")
    resumed = run("broken")
    for layer, (matrix, bias) in whole.tuned.items():
        assert torch.equal(resumed.tuned[layer][0], matrix)
        assert torch.equal(resumed.tuned[layer][1], bias)
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    again = run("broken")  # finished: read back, not tuned further
    assert torch.equal(again.tuned[0][0], whole.tuned[0][0])


def test_another_tuning_is_not_resumed(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts, tmp_path: Path
) -> None:
    run = FEW | {"out": str(tmp_path / "run"), "resume": True}
    tune(closed_form, llama, tokenizer, make_texts(0, 40), **run)
    with pytest.raises(UserError, match="texts was"):
        tune(closed_form, llama, tokenizer, make_texts(5, 60), **run)
    with pytest.raises(UserError, match=r"tune\.layers was"):
        tune(closed_form, llama, tokenizer, make_texts(0, 40), **run, layers=[1])


def test_tuned_maps_are_written_with_the_shortcuts(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    tuned = tune(closed_form, llama, tokenizer, make_texts(0, 40), out=str(run.path), **FEW)
    loaded = Shortcuts.from_pretrained(run.model)
    assert loaded.tuned.keys() == tuned.tuned.keys()
    for layer, (matrix, bias) in tuned.tuned.items():
        assert torch.equal(loaded.tuned[layer][0], matrix)
        assert torch.equal(loaded.tuned[layer][1], bias)
        assert torch.equal(loaded.matrix(layer, LAYERS), closed_form.matrix(layer, LAYERS))
    assert loaded.meta["tune"]["steps"] == 12
    assert run.config.is_file() and "top_tokens" in run.config.read_text()


@pytest.mark.parametrize("affine", [False, True])
def test_masked_models_and_affine_maps_can_be_tuned(tokenizer: Any, affine: bool) -> None:
    model = bert()
    texts = make_texts(0, 40)
    start = Shortcuts.fit(model, tokenizer, texts, targets="last", affine=affine)
    tuned = tune(start, model, tokenizer, texts, **FEW)
    assert sorted(tuned.tuned) == [0, 1, 2]


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [3]}, r"tune\.layers must be some of 0 to 2"),
        ({"layers": []}, r"tune\.layers must be some of 0 to 2"),
        ({"batch": 0}, r"tune\.batch must be at least 1"),
        ({"top_tokens": 0}, r"tune\.top_tokens must be at least 1"),
        ({"memory": float("nan")}, r"tune\.memory must be above 0"),
        ({"steps": 0}, r"train\.steps must be at least 1"),
        ({"batch": 100_000}, "give more text or a smaller batch"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    llama: PreTrainedModel,
    tokenizer: Any,
    closed_form: Shortcuts,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        tune(closed_form, llama, tokenizer, make_texts(0, 40), out=str(tmp_path / "run"), **changes)
    assert not (tmp_path / "run").exists()


def test_models_that_cannot_be_tuned_are_refused(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts
) -> None:
    other = tiny_llama()
    torch.nn.init.normal_(other.model.embed_tokens.weight)
    with pytest.raises(UserError, match="give the model they belong to"):
        tune(closed_form, other, tokenizer, make_texts(0, 60))
    encoder = bert(BertModel)
    start = Shortcuts.fit(encoder, tokenizer, make_texts(0, 60), targets="last")
    with pytest.raises(UserError, match="predicts no tokens"):
        tune(start, encoder, tokenizer, make_texts(0, 60))
    same = tiny_llama().train()
    with pytest.raises(UserError, match=r"call model\.eval\(\)"):
        tune(closed_form, same, tokenizer, make_texts(0, 60))


def test_unknown_settings_are_errors(
    llama: PreTrainedModel, tokenizer: Any, closed_form: Shortcuts
) -> None:
    with pytest.raises(TypeError, match="stepps"):
        tune(closed_form, llama, tokenizer, [], TuneTrainingConfig(), stepps=3)
