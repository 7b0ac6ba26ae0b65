"""`deepenough shortcut paper`: from raw text to every sample's results and all plots."""

import csv
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from deepenough import Shortcuts
from deepenough.__main__ import main
from deepenough.artifacts import load_tensors
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.runs import read_records
from deepenough.shortcut.config import PAPER_LAMBDAS, SentencesConfig
from deepenough.shortcut.paper import draw_sentences, split_sentences
from deepenough.shortcut.reading import ReadingConfig, batches
from deepenough.shortcut.submodules import Replacement

MODES = ("id", "mat", "attention", "feed_forward", "norms")
TRAIN, TEST = 200, 40


@pytest.mark.parametrize(
    "sentences",
    [
        ["The tower is 330 m tall.", "It was built in 1889!", "Is it open?", "Yes."],
        ["Dr. A. B. Smith met Mr. Jones of the U.S. Army, e.g. Gen. Lee.", "They spoke."],
        ["It grew by 3.5 % in Jan. 2020.", "Then (as in Fig. 3) it fell.", "“Why?”", "Who knew?"],
        ['He said " yes . "', "She left ."],  # the spaces of WikiText
        ["So he and I.", "Then we left…", "Ébène est noir."],
        ["それは高い。", "とても高い！"],
        ["no end and no start"],
        [],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    gap = "" if sentences and "。" in sentences[0] else "  "
    assert split_sentences(gap.join(sentences)) == sentences


def test_sentences_are_drawn_with_a_seed_once_each(tmp_path: Path) -> None:
    lines = ["= A heading of many words ="]
    lines += [f"Here is number {n} of them. Yes." for n in range(50) for _ in range(2)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    (tmp_path / "valid.txt").write_text("Not in here, but it is long enough.")
    data, chosen = str(tmp_path), SentencesConfig(train=30, test=15)
    train, test = draw_sentences(data, chosen)
    assert (len(train), len(test), len({*train, *test})) == (30, 15, 45)
    assert all(sentence.startswith("Here is number") for sentence in (*train, *test))
    assert draw_sentences(data, chosen) == (train, test)
    assert draw_sentences(data, SentencesConfig(train=30, test=15, seed=1)) != (train, test)
    with pytest.raises(UserError, match="has 50 different sentences of 4 words or more, and 40"):
        draw_sentences(data, SentencesConfig(train=40, test=15))


def make(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    words = ["[UNK]", "[MASK]", "[CLS]", "[SEP]", "."] + [f"W{n}" for n in range(35)]
    model: PreTrainedModel
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_layer": 3, "n_head": 2, "n_embd": 8, "n_positions": 32}
        sizes |= {"bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.6}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **sizes))
    else:
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
        sizes |= {"intermediate_size": 16, "max_position_embeddings": 32, "initializer_range": 0.6}
        model = BertForMaskedLM(BertConfig(vocab_size=len(words), **sizes))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"mask_token": "[MASK]", "unk_token": "[UNK]"}
    if kind == "bert":
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    lines = [
        " ".join(
            " ".join(f"W{draw.randrange(35)}" for _ in range(draw.randrange(4, 12))) + "."
            for _ in range(3)
        )
        for _ in range(120)
    ]
    path = tmp_path_factory.mktemp("text") / "raw.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds, and one run is drawn by `run` below."""
    monkeypatch.setattr("deepenough.cli.plot", lambda _: None)


def words(model: Path, text: Path, out: Path) -> list[str]:
    sizes = ["--train", str(TRAIN), "--test", str(TEST)]
    return ["shortcut", "paper", str(model), "--data", str(text), "--out", str(out), *sizes]


@pytest.fixture(scope="module")
def run(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "paper"
    assert main(words(model, text, folder)) == 0
    return folder


def test_every_sample_is_what_a_run_of_its_own_gives(run: Path, model: Path) -> None:
    """Top-10 tokens and surprisal at every layer of the five mappings, sentence by sentence."""
    found, _ = load_tensors(run / "results.safetensors")
    sentences = (run / "sentences.txt").read_text().splitlines()
    assert len(sentences) == TRAIN + TEST
    shortcuts = Shortcuts.from_pretrained(run / "shortcuts")
    assert shortcuts.pairs == [(i, j) for i in range(4) for j in range(i + 1, 4)]
    assert shortcuts.submodules is not None and len(shortcuts.submodules.maps) == 6 * 3
    loaded = GPT2LMHeadModel.from_pretrained(model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    adapter, replacement = adapt(loaded), Replacement(shortcuts.submodules, adapt(loaded))
    windows = [
        window
        for batch in batches(tokenizer, sentences[TRAIN:], ReadingConfig("causal", "random", 1))
        for window in batch.windows
    ]
    windows.sort(key=lambda window: window.text)
    assert found["position"].tolist() == [window.position for window in windows]
    assert found["sentence"].tolist() == [window.text for window in windows] == list(range(TEST))
    with torch.no_grad():
        for sample in range(0, TEST, 7):
            ids = torch.tensor([windows[sample].ids])
            last = loaded(ids).logits[0, -1].softmax(-1)
            states = adapter.states(ids)
            for layer in range(4):
                hidden = states[layer][0, -1]
                logits = {"id": adapter.logits(hidden)}
                logits["mat"] = adapter.logits(shortcuts.apply(hidden, layer, 3))
                for kind in MODES[2:]:
                    with replacement.replaced(kind, layer):
                        logits[kind] = loaded(ids).logits[0, -1]
                for mode in MODES:
                    top = found[f"{mode}.top"][layer, sample]
                    assert top.shape == (10,)
                    values, expected = logits[mode].sort(descending=True)
                    if float((values[:10] - values[1:11]).min()) > 1e-4:  # else rounding decides
                        assert top.tolist() == expected[:10].tolist()
                    surprisal = -float(last[top[0]].log())
                    assert float(found[f"{mode}.surprisal"][layer, sample]) == pytest.approx(
                        surprisal, rel=1e-3
                    )


def test_means_and_exits_follow_from_the_samples(run: Path) -> None:
    found, _ = load_tensors(run / "results.safetensors")
    with open(run / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    jumps = [row for row in rows if row["kind"] == "layer"]
    exits = [row for row in rows if row["kind"] == "exit"]
    assert len(jumps) == 5 * 4 and len(exits) == 2 * len(PAPER_LAMBDAS)
    for row in jumps:
        mode, layer = row["mode"], int(row["layer"])
        top, last = found[f"{mode}.top"][layer], found["id.top"][3]
        for k in (1, 5, 10):
            share = (top[:, :1] == last[:, :k]).any(1).double().mean()
            assert float(row[f"precision_{k}"]) == pytest.approx(float(share))
            assert float(row[f"precision_{k}_low"]) <= share <= float(row[f"precision_{k}_high"])
        mean = found[f"{mode}.surprisal"][layer].double().mean()
        assert float(row["surprisal"]) == pytest.approx(float(mean))
    assert found["exit.lambdas"].tolist() == pytest.approx(PAPER_LAMBDAS)
    for row in exits:
        number = PAPER_LAMBDAS.index(float(row["lambda"]))
        layers = found[f"exit.{row['mode']}"][number].long()
        top = found[f"{row['mode']}.top"][layers, torch.arange(TEST), 0]
        share = (top == found["id.top"][3, :, 0]).double().mean()
        assert float(row["agreement"]) == float(row["precision_1"]) == pytest.approx(float(share))
        assert float(row["layers_mean"]) == pytest.approx(float(layers.double().mean()))
    assert [float(row["layers_mean"]) for row in exits[:: len(PAPER_LAMBDAS)]] == [1.0, 1.0]


def test_all_plots_are_there(run: Path) -> None:
    names = {"pre", "surp", "parts_pre1", "parts_pre5", "parts_pre10", "parts_surp", "ee_pre1"}
    wanted = {f"paper_{name}_3.{end}" for name in names for end in ("pdf", "png")}
    wanted |= {f"{name}.{end}" for name in ("r2", "cka", "layers") for end in ("pdf", "png")}
    assert wanted <= {path.name for path in (run / "plots").iterdir()}
    assert '"low": [' in (run / "plots" / "paper.data.json").read_text()
    kinds = {record.kind for record in read_records(run / "metrics.jsonl")[0]}
    assert {"fit", "evaluation", "paper", "layer", "exit", "r2"} <= kinds


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_is_looked_at_and_other_settings_are_refused(
    run: Path, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = words(model, text, run)
    assert main(again) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*again, "--resume"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert main([*again, "--resume", "--seed", "3"]) == 2
    assert "sentences = {" in capsys.readouterr().err
    assert main(["shortcut", "lens", str(run), "--prompt", "W1 W2 W3", "--show", "rank"]) == 0
    assert "shown: rank" in capsys.readouterr().out
    measure = ["--data", str(text), "--lines", "5", "--min-chars", "1", "--submodules"]
    assert main(["shortcut", "eval", str(run), *measure]) == 0
    assert "attention" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_stopped_after_the_fit_it_goes_on(
    run: Path, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepenough.shortcut import evaluation, paper

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", stop)
        assert main(words(model, text, out)) == 130
    assert not (out / paper.RESULTS).exists()
    with monkeypatch.context() as patch:
        patch.setattr(Shortcuts, "fit", stop)  # the maps are there
        assert main([*words(model, text, out), "--resume"]) == 0
    ours, theirs = (load_tensors(folder / paper.RESULTS)[0] for folder in (out, run))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if tensor.is_floating_point() or "." not in name:
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert main([*words(model, text, out), "--overwrite"]) == 0


@pytest.mark.usefixtures("undrawn")
def test_a_masked_model(text: Path, tmp_path: Path) -> None:
    assert main(words(make("bert", tmp_path / "bert"), text, tmp_path / "run")) == 0
    found, _ = load_tensors(tmp_path / "run" / "results.safetensors")
    assert found["mat.top"].shape == (3, TEST, 10)
    assert int(found["position"].min()) > 0  # never that of [CLS]
    assert bool((found["id.target_rank"] > 0).all())  # what the mask hides is always known


def test_published_matrices_are_imported(
    run: Path, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the paper's code would have saved of these fits gives the same measurement."""
    fitted = Shortcuts.from_pretrained(run / "shortcuts")
    source = tmp_path / "source"
    source.mkdir()
    assert fitted.submodules is not None
    places = [("norms", 0), ("attention", 0), ("residuals", 0)]
    places += [("norms", 1), ("feed_forward", 0), ("residuals", 1)]
    tensors = {f"{i}_{j}": matrix for (i, j), matrix in fitted.maps.items()}
    for block in range(3):
        for b, (kind, number) in enumerate(places, start=1):
            part = fitted.submodules.maps[kind, block, number]
            tensors[f"p{block}_{b - 1}_{b}"] = part.weight
    for name, tensor in tensors.items():
        with open(source / f"{name}.pickle", "wb") as file:
            pickle.dump(tensor.clone(), file)
    out = tmp_path / "imported"
    given = [str(source), "--model.name", str(model), "--out", str(out)]
    assert main(["shortcut", "import", *given]) == 0
    assert "6 maps between layers and 18 of sub-modules" in capsys.readouterr().out
    measure = ["--data", str(text), "--lines", "8", "--min-chars", "1", "--submodules"]
    tables = []
    for folder in (run, out):
        assert main(["shortcut", "eval", str(folder), *measure]) == 0
        records = read_records(folder / "metrics.jsonl")[0]
        tables.append([record.values for record in records if record.kind == "layer"])
    assert tables[0] == tables[1]
    assert main(["shortcut", "import", str(tmp_path), "--out", str(tmp_path / "new")]) == 2
    assert "no file such as 0_12.pickle" in capsys.readouterr().err
