"""Pruning: choices, costs, maps in the places of parts, and models that are saved and used."""

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import deepenough as de
from deepenough.cli import main
from deepenough.decoding.engine import DecodingCosts
from deepenough.decoding.native_backend import make
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.shortcut import pruning, pruning_search
from deepenough.shortcut.config import HealTrainingConfig
from deepenough.shortcut.healing import heal
from deepenough.shortcut.normal_equations import AffineMap, NormalEquations
from deepenough.shortcut.pruned_model import PrunedConfig
from deepenough.shortcut.pruning import compare_outputs, prune, report_of
from deepenough.shortcut.pruning_costs import Costs, find_costs, token_seconds
from deepenough.shortcut.pruning_search import GreedySearch, moves
from deepenough.shortcut.refitting import SequentialFit
from deepenough.shortcut.replaceable import PARTS, Block, Choice, ReplaceableModel, best_ridge
from tests.shortcut.conftest import make_tokenizer

SMALL = {"fit_tokens": 1200, "choose_tokens": 300}
VOCABULARY = 95


def llama(layers: int = 4, hidden_size: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, **sizes)).eval()


def bert(cls: type) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_labels=3,
    )
    return cls(config).eval()


@pytest.fixture(scope="module")
def whole(plain, texts) -> ReplaceableModel:
    found = ReplaceableModel(llama(), plain, texts, **SMALL)
    found.fit()
    return found


def weights_of(whole: ReplaceableModel) -> Costs:
    return find_costs(whole, "weights")


# -- exactness -----------------------------------------------------------------------------------


def test_keeping_everything_changes_no_bit(plain, texts):
    model = llama()
    ids = torch.arange(3, 20)[None]
    same = prune(model, plain, texts, keep=1.0)
    assert torch.equal(same(ids).logits, model(ids).logits)
    assert type(same) is LlamaForCausalLM
    embeddings = same.get_input_embeddings().weight, model.get_input_embeddings().weight
    assert embeddings[0].data_ptr() != embeddings[1].data_ptr()


def test_a_ridge_map_is_least_squares_with_a_penalty_and_the_ridge_that_fits_others():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=draw), torch.randn(40, 3, generator=draw)
    others = torch.randn(30, 5, generator=draw), torch.randn(30, 3, generator=draw)
    sums, held_out = NormalEquations(5, 3), NormalEquations(5, 3)
    sums.update(x, y)
    held_out.update(*others)
    found = best_ridge(sums, held_out)
    x, y = x.double().numpy(), y.double().numpy()
    xc, yc = x - x.mean(0), y - y.mean(0)
    candidates = []
    for ridge in (1e-4, 1e-3, 1e-2, 1e-1):
        penalty = np.diag(ridge * (x**2).sum(0))
        weight = np.linalg.solve(xc.T @ xc + penalty, xc.T @ yc).T
        bias = y.mean(0) - weight @ x.mean(0)
        error = ((others[1].numpy() - others[0].numpy() @ weight.T - bias) ** 2).sum()
        candidates.append((error, weight, bias))
        own = AffineMap(torch.tensor(weight), torch.tensor(bias))
        squares = float((others[1].double() ** 2).sum())
        assert held_out.excess_error(own) + squares == pytest.approx(error)
    _, weight, bias = min(candidates, key=lambda each: each[0])
    np.testing.assert_allclose(found.weight, weight, atol=1e-10)
    np.testing.assert_allclose(found.bias, bias, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gpt2", "masked", "classes"])
def test_what_is_built_saved_and_loaded_is_what_was_measured(name, plain, wrapped, texts, tmp_path):
    makes = {
        "llama": (llama, AutoModelForCausalLM),
        "gpt2": (gpt2, AutoModelForCausalLM),
        "masked": (lambda: bert(BertForMaskedLM), AutoModelForMaskedLM),
        "classes": (
            lambda: bert(BertForSequenceClassification),
            AutoModelForSequenceClassification,
        ),
    }
    make, auto = makes[name]
    model, tokenizer = make(), plain if name in ("llama", "gpt2") else wrapped
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pruned = prune(model, tokenizer, texts, keep=0.55, budget="weights", **SMALL)
    report = report_of(pruned)
    assert isinstance(pruned.config, PrunedConfig) and 0.3 < report["share"] <= 0.55
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    whole = ReplaceableModel(model, tokenizer, texts, **SMALL)
    total = count = 0.0
    with torch.no_grad():
        for batch in whole.held_out:
            ids, mask = batch.ids, batch.mask
            expected, found = (
                each(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
                for each in (model, pruned)
            )
            if expected.ndim == 3:
                expected, found = expected[mask.bool()], found[mask.bool()]
            total += float((expected.exp() * (expected - found)).sum())
            count += len(found)
    assert total / count == pytest.approx(report["kl"], rel=2e-2, abs=1e-3)
    pruned.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    ids = torch.arange(5, 21)[None]
    own, loaded = pruned.state_dict(), again.state_dict()
    assert own.keys() == loaded.keys()
    assert all(torch.equal(own[key], loaded[key]) for key in own)
    # Weights from a file lie elsewhere in memory, which may change the order of a sum.
    torch.testing.assert_close(again(ids).logits, pruned(ids).logits, rtol=1e-5, atol=1e-5)
    assert report_of(again) == report


def test_only_whole_layers_removed_make_an_ordinary_model(plain, texts, tmp_path):
    pruned = prune(llama(), plain, texts, 0.5, method="influence", budget="weights", **SMALL)
    assert type(pruned) is LlamaForCausalLM and pruned.config.num_hidden_layers == 2
    pruned.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.num_hidden_layers == 2 and report_of(again)["method"] == "influence"


def test_a_cache_that_misses_layers_gives_the_tokens_of_none(whole):
    choice = Choice(
        {("attention", 1, 0): "linear", ("feed_forward", 2, 0): "removed"}, (Block(2, 4),)
    )
    choice = choice if Block(2, 4) in whole.maps else Choice(choice.parts)
    pruned = pruning.build(whole, choice, {})
    ids = torch.arange(3, 12)[None]
    found = pruned.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = ids
    for _ in range(12):
        token = pruned(expected).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, token], 1)
    assert torch.equal(found, expected)
    fast = de.speculate(pruned)
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_native_backend_runs_maps_in_the_places_of_parts_and_of_layers(tokens, plain, texts):
    wide = llama(6, hidden_size=32)  # what is removed, mapped and kept, next to each other
    whole = ReplaceableModel(wide, plain, texts, **SMALL)
    whole.fit()
    run = Block(4, 6)
    whole.maps.setdefault(run, whole.maps["attention", 3, 0])
    # A linear feed-forward both with an attention that stays and with one that does not.
    parts = {("attention", 1, 0): "removed", ("feed_forward", 1, 0): "linear"}
    parts |= {
        ("feed_forward", 0, 0): "linear",
        ("attention", 2, 0): "linear",
        ("feed_forward", 3, 0): "removed",
    }
    pruned = pruning.build(whole, Choice(parts, (run,)), {})
    engine = make(adapt(pruned))
    if engine is None:
        pytest.skip("no compiled backend")
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    engine.prefill(ids, None, 12 + tokens)
    new = torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(1))
    step = engine.start_step(new)
    found = engine.head(engine.norm(engine.run_layers(step, step.hidden, 0, engine.num_layers)))
    expected = pruned(torch.cat([ids, new], 1)).logits[:, 12:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    costs, full = DecodingCosts(adapt(pruned)), DecodingCosts(adapt(wide))
    assert costs.attends == [True, False, False, True, False] and all(full.attends)
    # Of five layers two attend; the full model's six do.
    assert costs.token(9) - costs.token(0) == pytest.approx((full.token(9) - full.token(0)) * 2 / 6)


def test_as_a_draft_of_the_full_model_it_changes_no_token(whole):
    full = whole.adapter.model
    choice = Choice({("attention", 1, 0): "linear", ("feed_forward", 2, 0): "removed"})
    pruned, ids = pruning.build(whole, choice, {}), torch.arange(3, 12)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        full.generate(ids, assistant_model=pruned, **options), full.generate(ids, **options)
    )


def test_early_exit_that_never_exits_gives_the_pruned_models_tokens(whole, plain, texts):
    choice = Choice({("attention", 2, 0): "linear", ("feed_forward", 3, 0): "linear"})
    pruned = pruning.build(whole, choice, {})
    shortcuts = de.Shortcuts.fit(pruned, plain, texts[:40])
    never = de.early_exit(pruned, shortcuts, threshold=1.0, exit_layers=[1, 2])
    ids = torch.arange(3, 12)[None]
    expected = pruned.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(never.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_the_first_layer_keeps_its_attention(whole):
    assert all(
        ("attention", 0, 0) not in choice.parts and not any(run.first == 0 for run in choice.runs)
        for _, choice, _ in moves(whole, Choice())
    )


# -- the search ----------------------------------------------------------------------------------


def test_costs_by_hand():
    parts = {
        (kind, layer, 0): 4.0 if kind == "attention" else 8.0
        for kind in PARTS
        for layer in range(3)
    }
    costs = Costs(parts, linear=1.0, rest=[2.0] * 3)
    assert costs.of(Choice()) == 3 * 14
    one = Choice({("attention", 1, 0): "linear"})
    assert costs.of(one) == 42 - 3
    gone = Choice({("attention", 1, 0): "removed", ("feed_forward", 1, 0): "removed"})
    assert gone.is_dropped(1) and costs.of(gone) == 28
    run = one.with_run(Block(1, 3))
    assert run.parts == {} and costs.of(run) == 14 + 1
    assert costs.left(run)[1] == [1 / 24] * 2 and costs.left(one)[1] == [0.25, 1.0]


def test_lazy_greedy_takes_what_full_greedy_takes(whole, monkeypatch):
    """With made-up divergences whose increases only grow, as lazy greedy assumes."""
    draw = np.random.default_rng(0)
    harm: dict = {}

    def measured(choice: Choice, first: int = 0, tokens: int | None = None) -> float:
        items = [*choice.parts.items(), *choice.runs]
        return float(sum(map(harm_of, items)) ** 1.5)

    def harm_of(item: Any) -> float:
        """Return made-up harm, that of a removal no less than of the linear map."""
        if str(item) not in harm:
            harm[str(item)] = draw.uniform(0.1, 1.0)
            if item[1] == "removed":
                harm[str(item)] += harm_of((item[0], "linear"))
        return harm[str(item)]

    monkeypatch.setattr(whole, "divergence", measured)
    monkeypatch.setattr(whole, "settle", lambda choice, first=0: None)
    monkeypatch.setattr(pruning_search, "_TRIED", 0)
    costs = weights_of(whole)
    budget = 0.5 * costs.of(Choice())
    current = Choice()
    while (cost := costs.of(current)) > budget:
        found = []
        for _, choice, _ in moves(whole, current):
            saved = min(cost - costs.of(choice), cost - budget)
            if saved > 0:
                found.append(((measured(choice) - measured(current)) / saved, choice))
        current = min(found, key=lambda each: each[0])[1]
    assert GreedySearch(whole, costs, budget).run() == current


def test_fitting_again_never_makes_it_worse(whole):
    before = dict(whole.maps)
    choice = Choice(
        {
            ("attention", 1, 0): "linear",
            ("feed_forward", 1, 0): "linear",
            ("feed_forward", 3, 0): "linear",
        }
    )
    whole.settle(Choice())
    first = whole.divergence(choice)
    reached = SequentialFit(whole, choice).run()
    assert reached <= first and whole.divergence(choice) == pytest.approx(reached, rel=1e-4)
    whole.maps, whole.corrected = before, {}
    whole.settle(Choice())


def test_a_layer_that_does_nothing_goes_first(plain, texts):
    model = llama()
    with torch.no_grad():
        layer = model.model.layers[2]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for method in ("influence", "contiguous", "replace"):
        pruned = prune(model, plain, texts, 0.75, method=method, budget="weights", **SMALL)
        assert report_of(pruned)["kl"] < 1e-6
        if method != "replace":
            assert report_of(pruned)["layers"][2] == ["removed", "removed"]


def test_measured_time_is_of_all_parts(whole):
    costs = find_costs(whole, "time")
    assert set(costs.parts) == {(kind, layer, 0) for kind in PARTS for layer in range(4)}
    assert all(value > 0 for value in costs.parts.values()) and costs.of(Choice()) > 0
    model = whole.adapter.model
    seconds = token_seconds({"one": (model, nullcontext)}, whole.held_out, 2, 2)
    assert 0 < seconds["one"] < 1


def test_a_budget_of_time_says_what_share_was_measured_in_the_end(plain, texts, monkeypatch):
    costs = Costs({(k, n, 0): 1.0 for k in PARTS for n in range(4)}, 0.5, [0.0] * 4)
    monkeypatch.setattr(pruning, "find_costs", lambda *_: costs)
    monkeypatch.setattr(pruning, "token_seconds", lambda *_: {"full": 10.0, "pruned": 8.0})
    report = report_of(prune(llama(), plain, texts, 0.8, refit=False, **SMALL))
    assert report["measured_share"] == pytest.approx(1 - 2 / 8) and report["share"] <= 0.8


def test_an_interrupted_search_goes_on(plain, texts, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    model, options = llama(), {"budget": "weights", "refit": False, **SMALL}
    expected = prune(model, plain, texts, 0.5, **options)
    save, counter = pruning.PruneCheckpoint.save_choice, itertools.count()

    def stop(self, whole, choice):
        save(self, whole, choice)
        if next(counter) == 1:
            raise Stop

    monkeypatch.setattr(pruning.PruneCheckpoint, "save_choice", stop)
    with pytest.raises(Stop):
        prune(model, plain, texts, 0.5, folder=tmp_path, **options)
    monkeypatch.setattr(ReplaceableModel, "fit", lambda *_: pytest.fail("fitted twice"))
    found = prune(model, plain, texts, 0.5, folder=tmp_path, **options)
    assert report_of(found)["layers"] == report_of(expected)["layers"]
    with pytest.raises(pytest.fail.Exception, match="fitted twice"):  # other text, as long
        prune(
            model,
            plain,
            [text.replace("w1", "w2") for text in texts],
            0.5,
            folder=tmp_path,
            **options,
        )
    (tmp_path / "maps.safetensors").write_bytes(b"broken")
    with pytest.raises(pytest.fail.Exception, match="fitted twice"):
        prune(model, plain, texts, 0.5, folder=tmp_path, **options)


def test_scores_on_other_text(plain, texts):
    model = llama()
    pruned = prune(model, plain, texts, 0.6, budget="flops", **SMALL)
    scores = compare_outputs(model, pruned, plain, texts[:40])
    assert scores["kl"] > 0 and 0 < scores["agreement"] < 1
    same = compare_outputs(model, model, plain, texts[:40])
    assert same["kl"] == pytest.approx(0, abs=1e-6) and same["agreement"] == 1
    assert same["perplexity"] == same["full_perplexity"] == scores["full_perplexity"]


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (llama, {"keep": 0.0}, "keep"),
        (llama, {"keep": 1.2}, "keep"),
        (llama, {"keep": 0.01, "budget": "weights", **SMALL}, "cannot cost less than"),
        (lambda: bert(BertModel), {"keep": 0.5}, "no output"),
        (
            lambda: BloomForCausalLM(
                BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
            ).eval(),
            {"keep": 0.5},
            "not modules of their own",
        ),
        (
            lambda: AlbertForMaskedLM(
                AlbertConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=16,
                    num_attention_heads=2,
                    intermediate_size=32,
                    num_hidden_layers=3,
                    embedding_size=8,
                )
            ).eval(),
            {"keep": 0.5},
            "share weights",
        ),
    ],
)
def test_bad_input(make, options, words, wrapped, texts):
    with pytest.raises(UserError, match=words):
        prune(make(), wrapped, texts, **options)


def test_too_little_text(plain, texts):
    with pytest.raises(UserError, match="too few"):
        prune(llama(), plain, texts[:2], 0.5)


def test_a_config_that_names_no_such_part_is_refused():
    parts = [{"first": "model.layers.9.mlp", "last": "model.layers.9.mlp", "is_linear": True}]
    with pytest.raises(UserError, match="does not have"):
        de.PrunedForCausalLM(PrunedConfig(llama().config, "LlamaForCausalLM", parts))
    with pytest.raises(UserError, match="NoSuchModel"):
        de.PrunedForCausalLM(PrunedConfig(llama().config, "NoSuchModel"))


def test_the_pruned_model_is_seen_by_its_layers(whole):
    pruned = pruning.build(whole, Choice({("feed_forward", 2, 0): "linear"}), {})
    adapter = adapt(pruned)
    assert adapter.num_layers == 4 and adapter.kind == "causal"


@pytest.mark.parametrize("trained", ["maps", "all"])
def test_healing_brings_the_outputs_nearer(trained, plain, texts, tmp_path):
    model = llama()
    pruned = prune(model, plain, texts, 0.6, budget="weights", **SMALL)
    before = {name: weight.clone() for name, weight in pruned.named_parameters()}
    settings = HealTrainingConfig(str(tmp_path / "run"), batch=256, trained=trained)
    settings.train = replace(settings.train, steps=30, lr=3e-3)
    found = heal(model, pruned, plain, texts, settings)
    assert found["after"] < 0.97 * found["before"]
    changed = {n for n, w in pruned.named_parameters() if not torch.equal(w, before[n])}
    kept = {n for n in before if "embed" in n or "q_proj" in n}
    assert kept <= changed if trained == "all" else not kept & changed
    assert {n for n in before if "norm" in n} & changed


def test_healing_that_does_not_help_is_undone(plain, texts, tmp_path, caplog):
    model = llama()
    pruned = prune(model, plain, texts, 0.6, budget="weights", **SMALL)
    before = {name: weight.clone() for name, weight in pruned.state_dict().items()}
    settings = HealTrainingConfig(str(tmp_path / "run"), batch=256)
    settings.train = replace(settings.train, steps=3, lr=1.0)
    found = heal(model, pruned, plain, texts, settings)
    assert found["after"] == found["before"]
    assert all(torch.equal(weight, before[name]) for name, weight in pruned.state_dict().items())
    assert "3 steps of healing did not bring the outputs nearer" in caplog.text


def test_corrections_bring_states_nearer_and_are_ridge_regressions(whole, monkeypatch):
    """With the definition: what is missing behind a part, regressed on what its product reads."""
    # The passes below are in float32, and so must be those of the fit.
    monkeypatch.setattr("deepenough.hf.intercept.processor_has", lambda *_: False)
    choice = Choice({("feed_forward", 1, 0): "removed"})
    whole.settle(choice)
    before = whole.divergence(choice)
    fit = SequentialFit(whole, choice)
    assert fit.run() <= before and whole.corrected
    assert all(place[1] > 1 for place in whole.corrected)  # nothing is wrong before
    (kind, layer, _), found = next(iter(whole.corrected.items()))
    corrected, whole.corrected = whole.corrected, {}
    model = whole.adapter.model
    block = model.model.layers[layer]
    product = block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj
    rows: dict[str, list] = {"x": [], "y": []}

    def read(module, args, output):
        rows["x"].append(args[0].flatten(0, 1))

    def behind(module, args, output):
        hidden = output if kind == "feed_forward" else args[0]
        rows["y"].append(hidden.flatten(0, 1))

    watched = block if kind == "feed_forward" else block.post_attention_layernorm
    for which in (Choice(), choice):
        with torch.no_grad(), whole.replaced(which):
            handles = [product.register_forward_hook(read), watched.register_forward_hook(behind)]
            for batch in whole.fitted:
                model(batch.ids)
            for handle in handles:
                handle.remove()
    at = torch.cat(
        [(batch.mask.bool() & (batch.mask.cumsum(1) > 1)).flatten() for batch in whole.fitted]
    )
    half = len(rows["x"]) // 2
    x = torch.cat(rows["x"][half:])[at].double()
    y = (torch.cat(rows["y"][:half]) - torch.cat(rows["y"][half:]))[at].double()
    added = (found.weight - product.weight).detach().double()
    errors = []
    for ridge in (1e-3, 1e-2, 1e-1, 1.0):
        penalty = torch.diag(ridge * x.square().sum(0))
        expected = torch.linalg.solve(x.T @ x + penalty, x.T @ y).T
        errors.append(float((expected - added).abs().max() / expected.abs().max()))
    assert min(errors) < 1e-3
    whole.corrected = corrected
    pruned = pruning.build(whole, choice, {})
    name = "self_attn.o_proj" if kind == "attention" else "mlp.down_proj"
    built = pruned.model.model.layers[layer].get_submodule(name).weight
    assert torch.equal(built, found.weight) and not torch.equal(built, product.weight)
    whole.corrected = {}
    whole.settle(Choice())


def test_an_exchange_is_made_where_the_divergence_falls(whole, monkeypatch):
    """A made-up model in which the first two replacements together are bad."""
    first, second, third = (("feed_forward", layer, 0) for layer in (1, 2, 3))

    def measured(choice: Choice, layer: int = 0, tokens: int | None = None) -> float:
        harm = {first: 1.0, second: 1.1, third: 1.2}
        if any(mode == "removed" or place not in harm for place, mode in choice.parts.items()):
            return 100.0
        both = {first, second} <= choice.parts.keys() and third in choice.parts
        return 100.0 * bool(choice.runs) + sum(harm[p] for p in choice.parts) + both

    monkeypatch.setattr(whole, "divergence", measured)
    monkeypatch.setattr(whole, "settle", lambda choice, first=0: None)
    monkeypatch.setattr(whole, "singles", {})
    costs = weights_of(whole)
    start = Choice({second: "linear", third: "linear"})
    search = GreedySearch(whole, costs, costs.of(start), start)
    search.estimates = {(first, "linear"): 1.0}
    assert search.run().parts.keys() == {first, second}


def test_the_command_leaves_a_model_that_generates(tmp_path, texts, capsys):
    base, text, run = tmp_path / "base", tmp_path / "text.txt", tmp_path / "run"
    llama().save_pretrained(base)
    make_tokenizer(wraps=False).save_pretrained(base)
    text.write_text("\n".join(texts * 2))
    words = ["shortcut", "prune", str(base), "--data", str(text), "--min_chars", "1"]
    words += ["--fit_tokens", "1200", "--choose_tokens", "300", "--heal_steps", "2"]
    assert main([*words, "--keep", "0.6", "--out", str(run)]) == 0
    out = capsys.readouterr().out
    assert "of the full model's time" in out and "perplexity" in out
    model, _ = de.load(str(run))
    assert report_of(model)["healed"]["after"] > 0
    assert model.generate(torch.arange(3, 9)[None], max_new_tokens=3).shape == (1, 9)
    assert (run / "plots" / "pruned.png").is_file()
    card = (run / "model" / "README.md").read_text()
    assert "feed-forward" in card and "--keep 0.6" in card and "share of the cost" in card
    compared = ["compare", str(run), "--out", str(tmp_path / "both"), "--rounds", "1"]
    compared += ["--prompt_tokens", "8", "--new_tokens", "4", "--limit", "2"]
    assert main([*compared, "--mechanisms", "[full,pruned]"]) == 0
    points = json.loads((tmp_path / "both" / "frontier.json").read_text())["points"]
    costs = {point["name"]: (point["layers"], point["flops"]) for point in points}
    assert costs["full"][0] == 4 and costs["pruned"] < costs["full"]
    assert costs["pruned"][1] < costs["full"][1]
    other = tmp_path / "other"
    assert main([*words, "--keep", "3", "--out", str(other)]) != 0
    assert main([*words, "--keep", "0.001", "--budget", "weights", "--out", str(other)]) != 0
    assert "cannot cost less" in capsys.readouterr().err and not (other / "model").exists()
