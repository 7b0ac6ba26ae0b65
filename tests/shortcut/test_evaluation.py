"""Evaluation of shortcuts: one batched pass against a loop over texts, and what is kept of it."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.measurement import resampled_interval
from deepenough.runs import Record
from deepenough.shortcut import evaluation
from deepenough.shortcut.config import PAPER_LAMBDAS, ExitSweep
from deepenough.shortcut.evaluation import (
    AGREEMENTS,
    LAMBDAS,
    Evaluation,
    evaluate,
    exit_layers,
    exit_point,
    fixed_exits,
    layers_saved,
    thresholds,
)
from deepenough.shortcut.lens import TokenScores, lens
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import ReadingConfig, batches
from deepenough.shortcut.submodules import KINDS, Replacement

Make = Callable[[str], PreTrainedModel]
SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "intermediate_size": 24,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=16, n_layer=3, n_head=2, n_positions=40)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SHAPE)),
    "encoder": lambda: BertModel(BertConfig(**SHAPE)),
}


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], PreTrainedModel]:
    def make(name: str) -> PreTrainedModel:
        torch.manual_seed(0)
        model = MODELS[name]().eval().requires_grad_(False)
        for parameter in model.parameters():  # of a size at which every part matters
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        return model

    return make


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, 60)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"
    )


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 texts of 1 to 12 words; the few of one word are too short to measure."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 13, (120,), generator=generator).tolist()
    return [
        " ".join(f"w{i}" for i in torch.randint(3, 60, (n,), generator=generator).tolist())
        for n in lengths
    ]


def fit(model: PreTrainedModel, words: Any, texts: list[str], **options: Any) -> Shortcuts:
    return Shortcuts.fit(model, words, texts, positions="all", **options)


def by_place(records: list[Record]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(r.values["mode"], r.values["layer"]): r.values for r in records if r.kind == "layer"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("positions", ["random", "all"])
def test_one_pass_equals_a_loop_over_texts(
    name: str, positions: Any, make_model: Make, words: Any, texts: list[str], score_ref: Any
) -> None:
    """Whole texts, one by one, every mode and layer a run of its own, scored by definition."""
    model = make_model(name)
    adapter = adapt(model)
    linear, affine = fit(model, words, texts), fit(model, words, texts, affine=True)
    affine.tuned = {
        layer: (torch.eye(16) * 1.1, torch.ones(16) / 10) for layer in range(adapter.num_layers)
    }
    submodules = fit(model, words, texts, submodules=True).submodules
    some = texts[:6]
    found = by_place(
        evaluate(
            model,
            words,
            [linear, affine],
            some,
            positions=positions,
            submodules=submodules,
            seed=5,
            batch_tokens=40,
        ).records()
    )
    replacement = Replacement(submodules, adapter)
    expected: dict[tuple[str, int], list[Any]] = {}
    for batch in batches(words, some, ReadingConfig(adapter.kind, positions, 5, 1, 40)):
        (window,) = batch.windows
        where = slice(None) if window.position is None else [window.position]
        last = model(batch.ids).logits[0, where]
        text = words(some[window.text])["input_ids"]
        targets = torch.tensor([*text[1:], -1] if name != "bert" else text)[where]
        states = adapter.states(batch.ids)
        for layer in range(adapter.num_layers + 1):
            hidden = states[layer][0, where]
            taken = {
                "id": hidden,
                "mat": linear.apply(hidden, layer, adapter.num_layers),
                "affine": affine.apply(hidden, layer, adapter.num_layers),
                "tuned": affine.apply(hidden, layer, adapter.num_layers, "tuned"),
            }
            logits = {mode: adapter.logits(state) for mode, state in taken.items()}
            for kind in KINDS:
                with replacement.replaced(kind, layer):
                    logits[kind] = model(batch.ids).logits[0, where]
            for mode, each in logits.items():
                expected.setdefault((mode, layer), []).append(score_ref(each, last, targets))
    assert found.keys() == expected.keys()
    for place, pieces in expected.items():
        rank, surprisal, kl, entropy = (
            torch.cat([getattr(piece, field) for piece in pieces]).double()
            for field in ("rank", "surprisal", "kl", "entropy")
        )
        known = torch.cat([piece.target_rank > 0 for piece in pieces])
        assert known.sum() > 0 and (name == "bert" or known.sum() < len(known))
        for field in ("cross_entropy", "target_rank"):
            own = torch.cat([getattr(piece, field) for piece in pieces]).double()[known]
            assert found[place][field] == pytest.approx(own.mean().item(), rel=1e-4)
        assert found[place]["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
        low, high = found[place]["intervals"]["surprisal"]
        half = 1.96 * surprisal.std(correction=0).item() / len(surprisal) ** 0.5
        assert [low, high] == pytest.approx(
            [surprisal.mean().item() - half, surprisal.mean().item() + half], rel=1e-4, abs=1e-5
        )
        assert found[place]["positions"] == len(rank)
        for k in (1, 5, 10):
            assert found[place][f"precision_{k}"] == pytest.approx((rank < k).double().mean())
        assert found[place]["surprisal"] == pytest.approx(surprisal.mean().item(), rel=1e-4)
        assert found[place]["kl"] == pytest.approx(kl.mean().item(), rel=1e-3, abs=1e-4)


def test_batches_and_blocks_do_not_matter(
    make_model: Make, words: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    shortcuts = fit(model, words, texts)
    submodules = fit(model, words, texts, submodules=True).submodules
    texts = texts[:30]
    whole = evaluate(model, words, shortcuts, texts, submodules=submodules)
    monkeypatch.setattr(evaluation, "_LOGIT_BYTES", 4 * 60 * 20)
    pieces = evaluate(model, words, shortcuts, texts, submodules=submodules, batch_tokens=1)
    assert pieces.positions == whole.positions == sum(" " in text for text in texts)
    few, many = by_place(whole.records()), by_place(pieces.records())
    assert few.keys() == many.keys()
    for place, values in few.items():
        numbers = {k: value for k, value in values.items() if k not in ("mode", "intervals")}
        found = {name: many[place][name] for name in numbers}
        assert found == pytest.approx(numbers, rel=1e-4, abs=1e-5)


def test_records(make_model: Make, words: Any, texts: list[str], iterate_states: Any) -> None:
    model = make_model("gpt2")
    shortcuts = fit(model, words, texts)
    evaluation = evaluate(model, words, shortcuts, texts[:40])
    records = evaluation.records()
    kinds = [record.kind for record in records]
    assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {
        "r2": 2,
        "cka": 1,
        "layer": 2 * 4,
        "decided": 2,
        "exit": 2 * 35,
        "saved": 2 * 3,
    }
    for mode in ("id", "mat"):
        last = by_place(records)[mode, 3]
        assert (last["precision_1"], last["kl"]) == (1.0, 0.0)
    tables = {r.values["mode"]: r.values["table"] for r in records if r.kind == "r2"}
    states = [
        torch.cat(pieces)
        for pieces in zip(
            *(
                states
                for _, states in iterate_states(adapt(model), words, texts[:40], positions="random")
            ),
            strict=True,
        )
    ]
    for mode, table in tables.items():
        expected = shortcuts.r2(states, mode)
        for i in range(4):
            for j in range(4):
                assert (table[i][j] is None) == (j < i) == bool(math.isnan(expected[i, j]))
                if j >= i:
                    assert table[i][j] == pytest.approx(float(expected[i, j]), rel=1e-6)
    for record in records:
        assert Record.from_json(record.to_json()).values == record.values
    exits = [r.values for r in records if r.kind == "exit" and r.values["mode"] == "mat"]
    assert [e["lambda"] for e in exits] == sorted(e["lambda"] for e in exits)
    assert all(e["saved"] == pytest.approx(1 - e["layers_mean"] / 3) for e in exits)


def test_decided_and_saved_as_their_definitions_say(
    make_model: Make, words: Any, texts: list[str]
) -> None:
    """Slowly: token by token, and with the whole procedure repeated on texts drawn anew."""
    model = make_model("gpt2")
    evaluation = evaluate(model, words, fit(model, words, texts), texts[:30], positions="all")
    agrees = torch.stack([evaluation.scores["mat", layer].rank == 0 for layer in range(4)])
    depths = []
    for token in range(evaluation.positions):
        layer = 3
        while layer > 0 and agrees[layer - 1, token]:
            layer -= 1
        depths.append(layer)
    records = [r for r in evaluation.records() if r.values.get("mode") == "mat"]
    found = next(r.values for r in records if r.kind == "decided")
    shares = [sum(depth <= layer for depth in depths) / len(depths) for layer in range(4)]
    assert found["shares"] == pytest.approx(shares)
    assert found["layer"] == next(layer for layer in range(4) if shares[layer] >= 0.5)

    by_text = [(evaluation.text == number).nonzero()[:, 0] for number in evaluation.text.unique()]
    exits = [layers for _, layers in evaluation.exits("mat")]

    def saved(chosen: Any, level: float) -> float:
        tokens = torch.cat([by_text[number] for number in chosen])
        best = 0.0
        for layers in exits:
            agreement = agrees[layers[tokens], tokens].double().mean().item()
            if agreement >= level:
                best = max(best, 1 - layers[tokens].double().mean().item() / 3)
        return best

    for record in (r.values for r in records if r.kind == "saved"):
        level = record["agreement"]
        expected = resampled_interval(partial(saved, level=level), len(by_text))
        assert record["saved"] == pytest.approx(expected.value)
        assert record["intervals"]["saved"] == pytest.approx(list(expected[1:]))


def test_a_model_without_a_head_has_tables(make_model: Make, words: Any, texts: list[str]) -> None:
    model = make_model("encoder")
    evaluation = evaluate(model, words, fit(model, words, texts), texts[:30])
    assert [record.kind for record in evaluation.records()] == ["r2", "r2", "cka"]


def test_progress(make_model: Make, words: Any, texts: list[str]) -> None:
    model = make_model("gpt2")
    seen: list[tuple[int, int | None]] = []
    evaluate(
        model,
        words,
        fit(model, words, texts),
        texts,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (120, 120)


def test_what_cannot_be_measured_is_refused(make_model: Make, words: Any, texts: list[str]) -> None:
    model = make_model("gpt2")
    shortcuts = fit(model, words, texts)
    with pytest.raises(UserError, match="nothing to measure"):
        evaluate(model, words, shortcuts, ["", "w5"])
    with pytest.raises(UserError, match="Two of the shortcuts"):
        evaluate(model, words, [shortcuts, shortcuts], texts)
    with pytest.raises(UserError, match="no shortcuts"):
        evaluate(model, words, [], texts)
    with pytest.raises(UserError, match="shortcuts were made for"):
        evaluate(make_model("llama"), words, shortcuts, texts)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_lens(name: str, make_model: Make, words: Any, texts: list[str]) -> None:
    model = make_model(name)
    shortcuts = fit(model, words, texts)
    found = lens(model, words, shortcuts, "w5 w9 [MASK] w7").values
    assert (found["mode"], found["layers"]) == ("mat", [0, 1, 2, 3])
    assert found["tokens"] == ["w5", "w9", "[MASK]", "w7"]
    ids = words("w5 w9 [MASK] w7", return_tensors="pt")["input_ids"]
    expected = model(ids).logits[0].softmax(-1)
    assert found["words"][3] == [words.decode([i]) for i in expected.argmax(-1).tolist()]
    assert found["probability"][3] == pytest.approx(expected.amax(-1).tolist(), rel=1e-5)
    assert found["agrees"][3] == [True] * 4
    logits = model(ids).logits[0].double()
    real = [*ids[0, 1:].tolist(), None] if name == "gpt2" else ids[0].tolist()
    losses = [
        None if t is None else -float(logits[n].log_softmax(-1)[t]) for n, t in enumerate(real)
    ]
    ranks = [
        None if t is None else 1 + int((logits[n] > logits[n, t]).sum()) for n, t in enumerate(real)
    ]
    assert [v is None for v in found["cross_entropy"][3]] == [t is None for t in real]
    known = [v for v in found["cross_entropy"][3] if v is not None]
    assert known == pytest.approx([loss for loss in losses if loss is not None], rel=1e-4)
    assert found["target_rank"][3] == ranks
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    assert found["entropy"][3] == pytest.approx(entropy.tolist(), rel=1e-4)
    for layer in range(4):
        same = [a == b for a, b in zip(found["words"][layer], found["words"][3], strict=True)]
        assert found["agrees"][layer] == same
        state = model(ids, output_hidden_states=True).hidden_states[layer][0]
        if layer == 3:  # of which transformers gives the state behind the norm
            own = logits
        else:
            own = adapt(model).logits(shortcuts.apply(state, layer, 3)).double()
        top = own.softmax(-1).topk(10)
        assert found["top"][layer] == [[words.decode([i]) for i in row] for row in top.indices]
        for token, row in enumerate(top.values.tolist()):
            assert found["top_probability"][layer][token] == pytest.approx(row, abs=1e-5)
        kl = (logits.softmax(-1) * (logits.log_softmax(-1) - own.log_softmax(-1))).sum(-1)
        assert found["kl"][layer] == pytest.approx(kl.tolist(), abs=1e-5)
    plain = lens(model, words, shortcuts, "w5 w9 [MASK] w7", "id").values
    assert plain["mode"] == "id"
    assert plain["probability"][0] != found["probability"][0]


def test_prompts_that_cannot_be_looked_at(make_model: Make, words: Any, texts: list[str]) -> None:
    model = make_model("gpt2")
    shortcuts = fit(model, words, texts)
    with pytest.raises(UserError, match="no tokens"):
        lens(model, words, shortcuts, "  ")
    with pytest.raises(UserError, match="41 tokens and the model reads 40"):
        lens(model, words, shortcuts, "w5 " * 41)


def test_maps_of_some_layers_alone_are_measured_there(
    make_model: Make, words: Any, texts: list[str]
) -> None:
    model = make_model("gpt2")
    shortcuts = fit(model, words, texts)
    shortcuts.tuned = {1: (torch.eye(16), torch.zeros(16))}
    evaluation = evaluate(model, words, shortcuts, texts[:4])
    measured = by_place(evaluation.records())
    assert [layer for mode, layer in measured if mode == "tuned"] == [1, 3]
    assert measured["tuned", 1]["kl"] == pytest.approx(measured["id", 1]["kl"], abs=1e-5)
    exits = {r.values["mode"] for r in evaluation.records() if r.kind == "exit"}
    assert exits == {"id", "mat"}
    found = lens(model, words, shortcuts, "w5 w9 w7", "tuned").values
    assert found["layers"] == [1, 3] and len(found["words"]) == 2


def source_early_exit(
    logits_LNV: Tensor, token_positions: Sequence[int], lmbda: float, minimal_layer: int = 1
) -> tuple[float, float]:
    """Mean layers processed and precision@1, in the way of the paper's code.

    Sentence by sentence, layer by layer: below the minimal layer the threshold is 2, which no gap
    exceeds; N is the mean of the positions plus one; at the last layer there is no test.
    """
    num_of_layers = len(logits_LNV) - 1
    lengths = [position + 1 for position in token_positions]
    N = float(sum(lengths) / len(lengths))
    layers_processed, hits = 0.0, 0
    for idx, token_position in enumerate(token_positions):
        final_top = logits_LNV[num_of_layers, idx].softmax(dim=-1).topk(k=10)[1]
        layer = 0
        while layer < num_of_layers:
            top2 = logits_LNV[layer, idx].softmax(dim=-1).topk(k=2)[0]
            threshold = 2.0
            if layer >= minimal_layer:
                threshold = 0.9 * lmbda + 0.1 * math.exp(-4.0 * token_position / N)
            if (top2[0] - top2[1]).item() > threshold:
                break
            layer += 1
        layers_processed += layer
        hits += int(logits_LNV[layer, idx].softmax(dim=-1).topk(k=10)[1][0] == final_top[0])
    return layers_processed / len(token_positions), hits / len(token_positions)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_early_exit_is_that_of_the_papers_code(
    name: str, make_model: Make, words: Any, texts: list[str]
) -> None:
    """To 1e-9 on the same logits, for its values of lambda, the negative one too."""
    model = make_model(name)
    model.get_output_embeddings().weight.mul_(4)  # gaps of all sizes
    adapter = adapt(model)
    shortcuts = fit(model, words, texts)
    rule = ExitSweep(lambdas=list(PAPER_LAMBDAS))
    records = evaluate(model, words, shortcuts, texts, seed=5).records(rule)
    states: list[list[Tensor]] = []
    positions: list[int] = []
    for batch in batches(words, texts, ReadingConfig(adapter.kind, "random", 5, 1, 40)):
        (window,) = batch.windows
        assert window.position is not None
        positions.append(window.position)
        states.append([state[0, window.position] for state in adapter.states(batch.ids)])
    spread = set()
    for mode in ("id", "mat"):
        logits = torch.stack(
            [
                adapter.logits(shortcuts.apply(torch.stack(column), layer, 3, mode))
                for layer, column in enumerate(zip(*states, strict=True))
            ]
        )
        points = [r.values for r in records if r.kind == "exit" and r.values["mode"] == mode]
        assert [point["lambda"] for point in points] == list(PAPER_LAMBDAS)
        for point in points:
            layers, precision = source_early_exit(logits, positions, point["lambda"])
            assert point["layers_mean"] == pytest.approx(layers, abs=1e-9)
            assert point["agreement"] == pytest.approx(precision, abs=1e-9)
            spread.add(layers)
        assert points[0]["layers_mean"] == 1.0 and points[-1]["layers_mean"] == 3.0
    assert len(spread) > 5


def test_other_conventions_of_early_exit_have_names() -> None:
    """Layer 0 allowed, N by the length of the texts or given, one position for all tokens."""
    nothing = torch.zeros(2)
    gaps = torch.tensor([0.06, 0.06]), nothing
    scores = {
        ("id", layer): TokenScores(gap, *[nothing] * 6, torch.empty(2, 0))
        for layer, gap in enumerate(gaps)
    }
    evaluation = Evaluation(1, torch.tensor([0, 9]), torch.tensor([0, 1]), 20.0, scores)

    def exits(**options: Any) -> list[int]:
        ((_, found),) = evaluation.exits("id", ExitSweep(lambdas=[0.0], **options))
        return found.tolist()

    assert exits() == [1, 1]
    assert exits(min_layer=0) == [1, 0]  # thresholds 0.1 and 0.1 exp(-36 / 5.5)
    assert exits(min_layer=0, length="text") == [1, 0]  # 0.1 exp(-36 / 20) = 0.017
    assert exits(min_layer=0, mean_length=100.0) == [1, 1]  # 0.1 exp(-0.36) = 0.070
    assert exits(min_layer=0, at_position=9) == [0, 0]
    assert exits(min_layer=0, at_position=3, length="text") == [0, 0]  # 0.1 exp(-0.6) = 0.055
    assert exits(min_layer=0, at_position=2, length="text") == [1, 1]  # 0.1 exp(-0.4) = 0.067


NAMES = ("lambda", "layers_mean", "saved", "agreement")
SAVED = ("agreement", "saved", "lambda", "fixed_layer_saved")


def sweep(
    gap_LN: Tensor,
    agrees_LN: Tensor,
    position_N: Tensor,
    mean_length: float,
    lambdas: Sequence[float] = LAMBDAS,
    min_layer: int = 0,
) -> list[dict[str, float]]:
    points = []
    for lambda_ in lambdas:
        limits = thresholds(lambda_, position_N, mean_length)
        layers = exit_layers(gap_LN, limits, min_layer)
        points.append({"lambda": lambda_, **exit_point(layers, agrees_LN)})
    return points


def sweep_ref(
    gap_LN: Tensor,
    agrees_LN: Tensor,
    position_N: Tensor,
    mean_length: float,
    lambdas: Sequence[float] = LAMBDAS,
    min_layer: int = 0,
) -> list[dict[str, float]]:
    """The rule as it is written, token by token and layer by layer."""
    num_layers, num_tokens = len(gap_LN) - 1, gap_LN.shape[1]
    points = []
    for lambda_ in lambdas:
        layers, agreeing = 0, 0
        for token in range(num_tokens):
            t = position_N[token].item()
            layer = 0
            while layer < num_layers and not (
                layer >= min_layer
                and gap_LN[layer, token].item()
                > 0.9 * lambda_ + 0.1 * math.exp(-4.0 * t / mean_length)
            ):
                layer += 1
            layers += layer
            agreeing += bool(agrees_LN[layer, token])
        mean = layers / num_tokens
        values = (lambda_, mean, 1 - mean / num_layers, agreeing / num_tokens)
        points.append(dict(zip(NAMES, values, strict=True)))
    return points


# Two layers over the embeddings, four tokens, all at position 0: the threshold is 0.9 lambda + 0.1.
GAP = torch.tensor(
    [
        [0.05, 0.30, 0.60, 0.95],
        [0.50, 0.20, 0.70, 0.10],
        [0.90, 0.90, 0.90, 0.90],
    ]
)
AGREES = torch.tensor(
    [
        [False, False, True, True],
        [True, False, True, True],
        [True, True, True, True],
    ]
)
POSITION = torch.zeros(4, dtype=torch.long)


def test_a_sweep_by_hand():
    # lambda 0:   threshold 0.10: they leave at 1, 0, 0, 0; the second does not agree.
    # lambda 0.5: threshold 0.55: they leave at 2, 2, 0, 0; all agree.
    # lambda 1:   threshold 1.00: all run to the end.
    low, middle, high = sweep(GAP, AGREES, POSITION, 10.0, [0.0, 0.5, 1.0])
    assert low == dict(zip(NAMES, (0.0, 0.25, 0.875, 0.75), strict=True))
    assert middle == dict(zip(NAMES, (0.5, 1.0, 0.5, 1.0), strict=True))
    assert high == dict(zip(NAMES, (1.0, 2.0, 0.0, 1.0), strict=True))


def test_fixed_exits_and_layers_saved_by_hand():
    fixed = fixed_exits(AGREES)
    assert [point["agreement"] for point in fixed] == [0.5, 0.75, 1.0]
    assert [point["saved"] for point in fixed] == [1.0, 0.5, 0.0]
    points = sweep(GAP, AGREES, POSITION, 10.0, [0.0, 0.5, 1.0])
    rough, exact = layers_saved(points, fixed, [0.75, 0.9])
    assert rough == dict(zip(SAVED, (0.75, 0.875, 0.0, 0.5), strict=True))
    assert exact == dict(zip(SAVED, (0.9, 0.5, 0.5, 0.0), strict=True))


def test_thresholds_fall_along_the_text():
    found = thresholds(0.5, torch.tensor([0, 10, 1000]), 20.0)
    expected = [0.45 + 0.1, 0.45 + 0.1 * math.exp(-2.0), 0.45]
    assert found.tolist() == pytest.approx(expected)


def test_no_threshold_is_good_enough():
    """If even the strictest threshold errs too often, all layers are run and nothing is saved."""
    gap = torch.full((3, 5), 0.999)
    agrees = torch.tensor([[False] * 5, [False] * 5, [True] * 5])
    points = sweep(gap, agrees, torch.full((5,), 99), 10.0, [0.0, 0.5, 1.0])
    for row in layers_saved(points, fixed_exits(agrees)):
        assert (row["saved"], row["lambda"], row["fixed_layer_saved"]) == (0.0, None, 0.0)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9), st.integers(0, 8))
def test_fast_equals_loop(seed: int, num_layers: int, num_tokens: int, min_layer: int):
    generator = torch.Generator().manual_seed(seed)
    gap = torch.rand(num_layers + 1, num_tokens, generator=generator)
    agrees = torch.rand(num_layers + 1, num_tokens, generator=generator) < 0.6
    agrees[-1] = True
    position = torch.randint(0, 40, (num_tokens,), generator=generator)
    lambdas = (-1.112, *LAMBDAS)
    found = sweep(gap, agrees, position, 17.5, lambdas, min_layer)
    assert found == sweep_ref(gap, agrees, position, 17.5, lambdas, min_layer)


@given(st.integers(0, 10_000))
def test_a_higher_threshold_saves_no_more(seed: int):
    generator = torch.Generator().manual_seed(seed)
    gap = torch.rand(5, 20, generator=generator)
    points = sweep(gap, gap > 0.3, torch.arange(20), 10.0)
    saved = [point["saved"] for point in points]
    assert saved == sorted(saved, reverse=True)
    assert all(0.0 <= share <= 1.0 for share in saved)


def test_the_sweep_has_35_thresholds_and_ends_with_running_all_layers():
    assert len(LAMBDAS) == 35
    assert LAMBDAS[0] == 0.0 and 1.0 in LAMBDAS
    assert sorted(set(LAMBDAS)) == list(LAMBDAS)
    sure = torch.ones(4, 6)
    agrees = torch.zeros(4, 6, dtype=torch.bool)
    agrees[-1] = True
    last = sweep(sure, agrees, torch.arange(6), 3.0)[-1]
    assert (last["saved"], last["agreement"]) == (0.0, 1.0)
    assert AGREEMENTS == (0.90, 0.95, 0.99)


def test_a_model_that_is_being_trained_is_measured_without_dropout(
    make_model: Make, words: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    """And is in training again afterwards, but for the parts that were not."""
    model = make_model("gpt2")
    fitted = Shortcuts.fit(model, words, texts)
    parts = fit(model, words, texts, submodules=True).submodules
    prompt = "w3 w4 w5 w6"

    def measured() -> list[Record]:
        found = evaluate(model, words, fitted, texts, submodules=parts).records()
        return [*found, lens(model, words, fitted, prompt), *refit()]

    def refit() -> list[Record]:
        again = Shortcuts.fit(model, words, texts)
        inside = fit(model, words, texts, submodules=True).submodules
        sums = {str(place): float(m.weight.sum()) for place, m in inside.maps.items()}
        return [Record(0, "sums", sums | {"map": float(again.matrix(0, 3).sum())})]

    expected = [record.values for record in measured()]
    model.train().transformer.drop.eval()
    assert [record.values for record in measured()] == expected
    assert model.training and model.transformer.h[0].training
    assert not model.transformer.drop.training


def test_sub_modules_of_other_text_are_refused(
    make_model: Make, words: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    model = make_model("llama")
    fitted = Shortcuts.fit(model, words, texts)
    parts = fit(model, words, texts[1:], submodules=True).submodules
    with pytest.raises(UserError, match="fitted on other text than the maps"):
        evaluate(model, words, fitted, texts, submodules=parts)


def test_tokens_that_the_model_does_not_know_are_refused(
    make_model: Make, words: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    model = make_model("gpt2")
    fitted = Shortcuts.fit(model, words, texts)
    other = copy.deepcopy(words)
    other.add_tokens(["w60"])
    for use in (
        lambda: Shortcuts.fit(model, other, [*texts, "w3 w60"]),
        lambda: fit(model, other, [*texts, "w3 w60"], submodules=True),
        lambda: evaluate(model, other, fitted, ["w3 w60"], positions="all"),
        lambda: lens(model, other, fitted, "w3 w60"),
    ):
        with pytest.raises(UserError, match="gives token 60, and the model knows tokens 0 to 59"):
            use()


def test_a_diverged_model_is_refused_by_its_first_bad_layer(
    make_model: Make, words: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    model = make_model("gpt2")
    model.transformer.h[1].mlp.c_proj.bias.fill_(math.nan)
    fitted = Shortcuts(3, 16, {(i, 3): torch.eye(16) for i in range(3)}, targets="last")
    for use in (
        lambda: Shortcuts.fit(model, words, texts),
        lambda: fit(model, words, texts, submodules=True),
        lambda: evaluate(model, words, fitted, texts),
        lambda: lens(model, words, fitted, "w3 w4"),
    ):
        with pytest.raises(UserError, match="states of layer 2 hold NaN"):
            use()
