"""Masked models: attention both ways, the tokens to be filled in, search, training, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

import deepenough as de
from deepenough import ParConfig, ParForCausalLM, ParForMaskedLM, UserError
from deepenough.config import ContinueConfig, resolve
from deepenough.data.config import DatasetConfig
from deepenough.data.encoding import encoder_of
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import ContextBatches, prepare, split_tokens
from deepenough.measurement import ComparedData
from deepenough.par.config import ParEvalConfig, ParSearchConfig, ParTrainConfig
from deepenough.par.evaluation import ParCandidate, continue_text, evaluate
from deepenough.par.modeling import ParModel
from deepenough.par.search import count_block_costs, measure_block_costs
from deepenough.par.training import search, train
from deepenough.runs import read_records
from deepenough.training.config import seed_at
from deepenough.training.distributed import make_accelerator
from deepenough.training.language import LanguageTask, Masking
from deepenough.training.task import WEIGHTS

Tiny = Callable[..., dict[str, Any]]
MASKED: dict[str, Any] = {"objective": "masked", "mem_len": 0}
SETTINGS = {"model.objective": "masked", "model.mem_len": None}
FORMS: list[dict[str, Any]] = [
    {"pattern": "a"},
    {"pattern": "da-"},
    {"num_blocks": 2},
    {"pattern": "a*", "cutoffs": [10, 20]},
]


def tokens(streams: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 40, (streams, length), generator=torch.Generator().manual_seed(seed))


def some_targets(ids: torch.Tensor) -> torch.Tensor:
    targets = torch.full_like(ids, -100)
    targets[:, 1::3] = ids[:, 1::3]
    return targets


# -- the model


@pytest.mark.parametrize("form", FORMS)
def test_every_token_sees_every_other(make_model, form):
    model = make_model(**form, **MASKED).double()
    ids = tokens(1)
    logits = model(ids).logits
    for changed in range(ids.shape[1]):
        other = ids.clone()
        other[0, changed] = 39 - other[0, changed]
        assert not torch.isclose(model(other).logits, logits).all(-1).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(make_model, form, side):
    model = make_model(**form, **MASKED).double()
    texts = [tokens(1, length, seed=length)[0] for length in (7, 2, 5)]
    batch, mask = torch.zeros(2, 3, 7, dtype=torch.long)
    places = [slice(len(t)) if side == "right" else slice(7 - len(t), 7) for t in texts]
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        batch[row, place], mask[row, place] = text, 1
    together = model(batch, attention_mask=mask).logits
    assert together.isfinite().all()
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        torch.testing.assert_close(together[row, place], model(text[None]).logits[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_of_the_masked_tokens_alone(make_model, form):
    model = make_model(**form, **MASKED)
    ids = tokens()
    targets = some_targets(ids)
    whole = model(ids).logits
    asked = targets != -100
    by_hand = F.nll_loss(whole.log_softmax(-1)[asked], ids[asked])
    by_targets, by_labels = model(ids, targets=targets), model(ids, labels=targets)
    torch.testing.assert_close(by_targets.loss, by_hand)
    torch.testing.assert_close(by_labels.loss, by_hand)
    torch.testing.assert_close(by_targets.logits, whole[asked])
    assert torch.equal(by_labels.logits, whole)
    if model.choice is None:
        trained = model.train()(ids, targets=targets)
        torch.testing.assert_close(trained.loss, by_hand)
        assert trained.logits is None and trained.trace is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streams", [1, 3])
def test_trace_equals_torchs_counter(make_model, form, streams):
    model = make_model(**form, **MASKED)
    ids = tokens(streams)
    trunk = ParModel(model.config).eval()
    for run, given in (
        (model, {}),
        (model, {"targets": some_targets(ids)}),
        (model, {"labels": ids}),
        (trunk, {}),
    ):
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            trace = run(ids, **given).trace
        assert trace.total_flops == pytest.approx(counter.get_total_flops(), rel=1e-12)
    each = [trunk.layer_flops(block, streams, 7) for block in range(len(trunk.blocks))]
    assert sum(each) == pytest.approx(trace.total_flops, rel=1e-12)


def test_a_supernet_with_all_weight_on_one_branch_is_the_fixed_pattern(make_model):
    supernet = make_model(num_blocks=3, **MASKED)
    with torch.no_grad():
        for row, kind in zip(supernet.choice.alpha, "ad-", strict=True):
            row.copy_(200.0 * F.one_hot(torch.tensor("ad-".index(kind)), 3))
    fixed = supernet.with_pattern("ad-")
    assert type(fixed) is ParForMaskedLM
    torch.testing.assert_close(fixed(tokens()).logits, supernet(tokens()).logits)


@pytest.mark.parametrize("form", FORMS)
def test_save_and_load_with_and_without_its_output_layer(make_model, tmp_path, form):
    model = make_model(**form, **MASKED)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is ParForMaskedLM and loaded.config.bidirectional
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert type(trunk) is ParModel and not any("output." in n for n in dict(trunk.named_modules()))
    states = model(tokens(), output_hidden_states=True).hidden_states
    found = trunk(tokens(), output_hidden_states=True)
    assert torch.equal(found.last_hidden_state, states[-1]) and len(found.hidden_states) == (
        len(model.blocks) + 1
    )
    assert torch.equal(trunk(tokens(), return_dict=False)[0], states[-1])


def test_what_a_masked_model_does_not_do_is_refused(make_model, make_config, tmp_path):
    model = make_model(pattern="ad", **MASKED)
    memories = make_model(pattern="ad")(tokens()).memories
    with pytest.raises(UserError, match="reads every text by itself: give neither memories"):
        model(tokens(), memories=memories)
    with pytest.raises(UserError, match="fills in tokens and does not continue a text"):
        model.generate(tokens())
    assert not model.can_generate()
    with pytest.raises(UserError, match=r"'masked', and ParForCausalLM is for 'causal'"):
        ParForCausalLM(model.config)
    with pytest.raises(UserError, match=r"'causal', and ParForMaskedLM is for 'masked'"):
        ParForMaskedLM(make_config(pattern="ad"))
    with pytest.raises(UserError, match=r"keeps no memory: leave model\.mem_len out, which is 4"):
        make_config(objective="masked")
    with pytest.raises(UserError, match="objective must be one of causal, masked: got 'both'"):
        make_config(objective="both")
    assert ParConfig(objective="masked").mem_len == 0 and ParConfig().mem_len == 32


# -- what is masked


@pytest.fixture(scope="module")
def tokenizer(text_file: Path, shared_cache: Path) -> Any:
    settings = DatasetConfig(vocab_size=400, cache=str(shared_cache))
    return prepare(str(text_file), settings, with_mask=True).tokenizer


def test_a_tokenizer_gets_a_mask_token_and_keeps_its_ids(tokenizer, text_file, shared_cache):
    settings = DatasetConfig(vocab_size=400, cache=str(shared_cache))
    plain, masked = (prepare(str(text_file), settings, with_mask=w) for w in (False, True))
    assert plain.tokenizer.mask_token is None and len(plain.tokenizer) == 400
    assert masked.tokenizer.mask_token_id == 400 and len(masked.tokenizer) == 401
    for split, file in plain.tokens.items():
        assert (masked.tokens[split].ids == file.ids).all()


def test_of_every_text_15_percent_are_masked_replaced_or_kept(tokenizer):
    masking = Masking(tokenizer)
    ids = torch.randint(4, 400, (2000, 40))
    batch = masking(ids, seed=1)
    inputs, labels = batch["input_ids"], batch["labels"]
    drawn = labels != -100
    assert (drawn.sum(1) == 6).all()
    assert torch.equal(labels[drawn], ids[drawn]) and torch.equal(inputs[~drawn], ids[~drawn])
    is_mask = inputs[drawn] == tokenizer.mask_token_id
    is_kept = inputs[drawn] == ids[drawn]
    assert float(is_mask.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(is_kept.float().mean()) == pytest.approx(0.1, abs=0.015)
    places = drawn.float().mean(0)  # every place equally often
    assert float(places.min()) > 0.11 and float(places.max()) < 0.19
    assert int(inputs[drawn][~is_mask & ~is_kept].unique().numel()) > 350


def test_special_tokens_are_masked_only_where_there_is_nothing_else(tokenizer):
    masking, end = Masking(tokenizer), tokenizer.eos_token_id
    ids = torch.randint(4, 400, (200, 20))
    ids[:, ::2] = end
    assert (masking(ids, seed=0)["labels"] != end).all()
    ids[:, 2:] = end  # one token of text is left, and three are to be masked
    labels = masking(ids, seed=0)["labels"]
    assert ((labels != -100).sum(1) == 3).all() and (labels[:, 1] == ids[:, 1]).all()


def test_masks_follow_from_the_seed_and_not_from_the_processes(tokenizer):
    masking, ids = Masking(tokenizer), torch.randint(4, 400, (4, 20))
    whole = masking(ids, seed=3)
    assert torch.equal(masking(ids, seed=3)["input_ids"], whole["input_ids"])
    assert not torch.equal(masking(ids, seed=4)["labels"], whole["labels"])
    parts = [masking(part, 3, rank, 2) for rank, part in enumerate(ids.chunk(2))]
    for name in whole:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_every_step_masks_anew_and_trains_on_it(tmp_path, tiny):
    config = resolve(ParTrainConfig, None, tiny(tmp_path, SETTINGS | {"model.pattern": "ad"}))
    prepared = prepare(config.data, config.dataset, with_mask=True)
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32, "dropout": 0.0, "pattern": "ad"}
    model = ParForMaskedLM(ParConfig(len(prepared.tokenizer), objective="masked", **sizes)).train()
    accelerator = make_accelerator(config.train)
    task = LanguageTask(model, prepared, config.dataset, config.train, accelerator)
    turns = len(task.batches[WEIGHTS])
    found = [task.loss(model, WEIGHTS, step, 0) for step in (0, 0, turns)]
    assert found[0].loss == found[1].loss != found[2].loss  # the same text, masked otherwise
    assert found[0].units == 4 * 8 and task.state() == {}
    masking, ids = Masking(prepared.tokenizer), task.batches[WEIGHTS][0]["input_ids"]
    batch = masking(ids, seed_at(config.train.seed, "masked", WEIGHTS, 0))
    assert torch.equal(model(batch["input_ids"], targets=batch["labels"]).loss, found[0].loss)


# -- search, train, measure


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, text_file, shared_cache) -> Path:
    """A finished search with the pattern trained, an encoder of `a*d` and adaptive softmax."""
    folder = tmp_path_factory.mktemp("encoder") / "run"
    settings = {
        "out": str(folder),
        "data": str(text_file),
        "dataset.cache": str(shared_cache),
        "dataset.vocab_size": 400,
        "dataset.batch_size": 4,
        "dataset.length": 16,
        "model.objective": "masked",
        "model.pattern": "a*d",
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.d_ff": 32,
        "model.cutoffs": [100],
        "search.retrain": "supernet",
        "search.cost": "flops",
        "train.steps": 30,
        "train.warmup": 3,
        "train.lr": 0.02,
        "train.log_every": 5,
        "train.valid_every": 15,
    }
    search(resolve(ParSearchConfig, None, settings))
    return folder


def test_a_search_derives_and_trains_an_encoder(encoder: Path) -> None:
    records, _ = read_records(encoder / "metrics.jsonl")
    (derived,) = [record.values for record in records if record.kind == "derive"]
    assert derived["pattern"][0] == "a" and derived["pattern"][2] == "d"
    valid = [record.values for record in records if record.kind == "valid"]
    assert valid[-1]["loss"] < valid[0]["loss"]
    assert 0 < valid[-1]["accuracy"] < 1 and "bits_per_byte" not in valid[-1]
    model, tokenizer = de.load(str(encoder / "derived"))
    assert type(model) is ParForMaskedLM and model.config.pattern == derived["pattern"]
    assert model.config.vocab_size == len(tokenizer) == 401
    assert tokenizer.mask_token == "<|mask|>" and tokenizer.padding_side == "right"
    filled = pipeline("fill-mask", model=model, tokenizer=tokenizer)("The <|mask|> of a list")
    assert len(filled) == 5 and filled[0]["score"] > 0


def test_evaluation_by_hand(encoder: Path, text_file: Path, shared_cache: Path) -> None:
    given = {"run": str(encoder / "derived"), "data": str(text_file), "split": "valid"}
    given |= {"dataset.cache": str(shared_cache), "dataset.batch_size": 4}
    values = evaluate(resolve(ParEvalConfig, None, given))
    model, tokenizer = de.load(str(encoder / "derived"))
    dataset = DatasetConfig(cache=str(shared_cache))
    text, _ = split_tokens(str(text_file), dataset, "valid", tokenizer)
    total, right, count = 0.0, 0, 0
    for index, batch in enumerate(ContextBatches(text.ids, 4, 16)):
        masked = Masking(tokenizer)(batch["input_ids"], seed_at("evaluation", index))
        asked = masked["labels"] != -100
        scores = model(masked["input_ids"]).logits.log_softmax(-1)[asked]
        answers = masked["labels"][asked]
        total -= float(scores.gather(1, answers[:, None]).sum())
        right += int((scores.argmax(-1) == answers).sum())
        count += len(answers)
    assert values["loss"] == pytest.approx(total / count, rel=1e-5)
    assert values["accuracy"] == right / count and values["masked_tokens"] == count
    assert values["tokens"] == len(text) // 64 * 64 == pytest.approx(count * 8)
    assert {"word_perplexity", "bits_per_byte"}.isdisjoint(values)
    low, high = values["intervals"]["perplexity"]
    assert low < values["perplexity"] < high


def test_a_saved_tokenizer_encodes_as_the_one_that_was_trained(encoder: Path, tokenizer) -> None:
    loaded = load_tokenizer(encoder / "derived" / "model")
    lines = ["The list  of a", " a function"]
    assert encoder_of(loaded)(lines) == encoder_of(tokenizer)(lines)
    assert hasattr(loaded, "sentencepiece_encoder")
    assert AutoTokenizer.from_pretrained(encoder / "model")("<|mask|>")["input_ids"] == [400]


def test_commands_for_causal_models_refuse_an_encoder(encoder: Path, tiny: Tiny) -> None:
    run = str(encoder / "derived")
    with pytest.raises(UserError, match=r"fill in masked tokens .* leave --mem_len out"):
        evaluate(ParEvalConfig(run, mem_len=4))
    with pytest.raises(UserError, match=r"fill in masked tokens .* with --objective causal"):
        continue_text(ContinueConfig(run))
    with pytest.raises(UserError, match=r"fill in masked tokens .* compare the classifiers"):
        ParCandidate(run, "encoder", ComparedData())
    changes = {"model.pattern": "ad", "model.cutoffs": [100], "start": run}
    with pytest.raises(UserError, match=r"has model\.objective masked, not causal"):
        train(resolve(ParTrainConfig, None, tiny(encoder / "other", changes)))
    assert not (encoder / "other").exists()
    with pytest.raises(UserError, match="objective 'masked', and ParForCausalLM is for"):
        de.load(run, kind="causal")


def test_costs_are_of_what_an_encoder_runs(make_config):
    """The output layer scores the masked tokens alone; attention looks at the segment alone."""
    sizes = {"length": 64, "d_model": 32, "d_ff": 128, "vocab_size": 400, "num_blocks": 2}
    config = make_config(**MASKED, **sizes)
    causal = make_config(mem_len=0, **sizes)
    costs, others = count_block_costs(config, 4), count_block_costs(causal, 4)
    assert costs.rest == pytest.approx(others.rest * 10 / 64)
    assert costs.dense == others.dense
    # Twice the distances, and as many keys.
    assert 1 < costs.attention / others.attention < 1.5
    measured = measure_block_costs(config, 4, rounds=2)
    assert measured.attention > 0 and measured.rest > 0


def test_a_config_without_an_objective_is_causal(make_model, tmp_path):
    """As those were saved that know of no other."""
    make_model(pattern="ad").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["objective"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (tmp_path / "checksums.json").unlink()
    assert not ParForCausalLM.from_pretrained(tmp_path).config.bidirectional
