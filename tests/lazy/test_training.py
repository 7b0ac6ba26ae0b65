"""Training a translator: from text to BLEU, exact resumption, and what is refused."""

import csv
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from deepenough.config import resolve
from deepenough.data.batches import TokenBatches
from deepenough.data.config import TranslationDataConfig
from deepenough.data.translation import encode_split, joint_tokenizer, open_parallel
from deepenough.errors import UserError
from deepenough.lazy.config import (
    BeamSearchConfig,
    LanguageTrainConfig,
    LazyEvalConfig,
    LazyModelConfig,
    LazyPlotConfig,
    TranslationTrainConfig,
)
from deepenough.lazy.evaluation import evaluate
from deepenough.lazy.inference import (
    TrainedModel,
    bleu,
    last_words,
    load_translator,
    load_writer,
    trained_with,
)
from deepenough.lazy.inspection import inspect_run
from deepenough.lazy.training import (
    TranslationTask,
    new_translator,
    train_translation,
)
from deepenough.runs import read_records

WORDS = {"red": "rot", "dog": "hund", "man": "mann", "big": "gross", "runs": "rennt"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Word for word, backwards: the least that needs attention."""
    folder = tmp_path_factory.mktemp("parallel")
    sentences = list(itertools.permutations(WORDS, 4)) + list(itertools.permutations(WORDS, 3))
    for split, part in (("train", sentences[::2]), ("val", sentences[1::8])):
        english = [" ".join(words) for words in part]
        german = [" ".join(WORDS[word] for word in reversed(words)) for words in part]
        (folder / f"{split}.en").write_text("\n".join(english) + "\n")
        (folder / f"{split}.de").write_text("\n".join(german) + "\n")
    (folder / "test.en").write_text("red dog runs\nbig man runs\n")
    (folder / "test.de").write_text("rennt hund rot\nrennt mann gross\n")
    return folder


@pytest.fixture
def tiny(corpus, shared_cache):
    def make(folder: Path, **changes):
        values = {
            "out": str(folder),
            "data": str(corpus),
            "dataset.cache": str(shared_cache),
            "dataset.vocab_size": 290,
            "dataset.max_length": 32,
            "dataset.batch_tokens": 160,
            "model.d_model": 32,
            "model.num_heads": 2,
            "model.d_ff": 64,
            "model.encoder_steps": 2,
            "model.decoder_steps": 2,
            "model.dropout": 0.1,
            "search.beams": 2,
            "epochs": None,
            "train.steps": 8,
            "train.warmup": 4,
            "train.lr": 0.005,
            "train.log_every": 1,
            "train.valid_every": 8,
            "train.save_every": 4,
        }
        return resolve(
            TranslationTrainConfig,
            None,
            values | {k.replace("__", "."): v for k, v in changes.items()},
        )

    return make


def losses(folder: Path, kind: str = "train") -> dict[int, float]:
    records, _ = read_records(folder / "metrics.jsonl")
    return {record.step: record.values["loss"] for record in records if record.kind == kind}


@pytest.mark.parametrize("mechanism", ["lazy", "universal", "act", "transformer"])
def test_a_training_from_text_to_bleu(tiny, tmp_path, mechanism):
    run = train_translation(tiny(tmp_path / "run", model__mechanism=mechanism))
    falling = losses(run.path)
    assert falling[8] < falling[1] - 0.3
    records, _ = read_records(run.metrics)
    measured = {record.kind: record.values for record in records}
    for kind in ("valid", "test"):
        assert 0 <= measured[kind]["bleu"] <= 100
        assert measured[kind]["loss"] > 0
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in run.log.read_text()
    model = AutoModelForSeq2SeqLM.from_pretrained(run.model)
    assert model.config.mechanism == mechanism
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    ids = torch.tensor([[*tokenizer.encode("red dog"), tokenizer.eos_token_id]])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5)
    assert written[0, 0] == tokenizer.bos_token_id


def test_a_resumed_training_is_the_uninterrupted_one(tiny, tmp_path):
    changes = {"fewest_encoder_steps": 1, "most_encoder_steps": 4, "most_epsilon": 0.5}
    changes["train__accumulate"] = 2
    train_translation(tiny(tmp_path / "whole", **changes))
    run = tmp_path / "cut"
    train_translation(tiny(run, **changes))
    # As if it had been killed after step 4: later checkpoint and model gone.
    newest = sorted((run / "checkpoints").iterdir())[-1]
    for path in (*newest.iterdir(), *(run / "model").iterdir()):
        path.unlink()
    newest.rmdir()
    (run / "model").rmdir()
    train_translation(tiny(run, resume=True, **changes))
    assert losses(run) == losses(tmp_path / "whole")
    assert losses(run, "test") == losses(tmp_path / "whole", "test")


@pytest.mark.parametrize("world_size", [2, 3, 40])
def test_the_mean_over_processes_is_the_mean_over_tokens(corpus, shared_cache, world_size):
    """Also of more processes than there are pairs."""
    dataset = TranslationDataConfig(
        cache=str(shared_cache), vocab_size=290, max_length=32, batch_tokens=160
    )
    text = open_parallel(str(corpus), dataset)
    tokenizer = joint_tokenizer(text, dataset)
    pairs = {"train": encode_split(text, "train", tokenizer, dataset.max_length, truncate=False)}
    small = LazyModelConfig(d_model=32, num_heads=2, d_ff=64, encoder_steps=2, decoder_steps=2)
    model = new_translator(small, tokenizer, dataset.max_length).eval()

    def task(rank: int, world: int) -> TranslationTask:
        place = SimpleNamespace(process_index=rank, num_processes=world)
        config = TranslationTrainConfig(dataset=dataset)
        return TranslationTask(config, model, tokenizer, pairs, place)

    alone = task(0, 1).loss(model, "weights", 3, 0)
    shares = [task(rank, world_size).loss(model, "weights", 3, 0) for rank in range(world_size)]
    assert len({share.units for share in shares}) > 1, "equal shares would prove nothing"
    assert sum(share.units for share in shares) == alone.units
    for name in ("objective", "loss"):
        mean = torch.stack([getattr(share, name) for share in shares]).mean()
        torch.testing.assert_close(mean, getattr(alone, name))


@pytest.mark.parametrize("changes", [{"model__epsilon": 0.2}, {"search__beams": 1}])
def test_what_a_finished_training_would_ignore_is_refused(tiny, tmp_path, changes):
    """While it goes on, such a setting is applied: it is saved with the model, and used."""
    train_translation(tiny(tmp_path / "run"))
    (name,) = changes
    said = f"cannot be resumed with another {name.replace('__', '.')}, because the training is fin"
    with pytest.raises(UserError, match=said):
        train_translation(tiny(tmp_path / "run", resume=True, **changes))
    longer = changes | {"train__steps": 10, "resume": True}
    run = train_translation(tiny(tmp_path / "run", **longer))
    saved = resolve(TranslationTrainConfig, run.config)
    assert (saved.model.epsilon, saved.search.beams) in ((0.2, 2), (0.0, 1))
    model = AutoModelForSeq2SeqLM.from_pretrained(run.model)
    assert model.config.epsilon == saved.model.epsilon


def test_epochs_become_steps(tiny, tmp_path):
    """Two epochs are as many steps as they have batches, which are counted here by hand."""
    settings = tiny(tmp_path / "run", epochs=2.0, dataset__batch_tokens=800, train__accumulate=2)
    run = train_translation(settings)
    text = open_parallel(settings.data, settings.dataset)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    longest = settings.dataset.max_length
    pairs = encode_split(text, "train", tokenizer, longest, truncate=False)
    lengths = pairs.source.lengths, pairs.target.lengths
    batches = TokenBatches(*lengths, 800, settings.train.seed)
    epoch = [batches.rows(index) for index in range(len(batches))]
    assert sorted(row for rows in epoch for row in rows) == list(range(len(pairs)))
    assert len(epoch) > 1
    last = read_records(run.metrics)[0][-1].step
    assert last == resolve(TranslationTrainConfig, run.config).train.steps == len(epoch)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": 0.0}, "epochs must be above 0"),
        ({"fewest_encoder_steps": 3}, r"at most model.encoder_steps \(2\): got 3"),
        ({"fewest_encoder_steps": 3, "most_encoder_steps": 2}, r"at most most_encoder_steps \(2\)"),
        ({"most_encoder_steps": 2}, "needs fewest_encoder_steps"),
        ({"most_epsilon": 0.1, "model__mechanism": "universal"}, "needs the mechanism lazy"),
        ({"model__encoder_steps": 0}, "encoder_steps must be at least 1: got 0"),
        ({"search__beams": 0}, "search.beams must be at least 1"),
        ({"search__epsilon": 2.0}, "search.epsilon must be at least 0 and at most 1"),
        ({"model__mechanism": "universal", "search__epsilon": 0.1}, "Only lazy models have gates"),
        ({"model__mechanism": "transformer", "search__decoder_steps": 3}, "shares no block"),
        ({"dataset__target": "fr"}, "has no training text"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(tiny, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        train_translation(tiny(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_bleu_needs_as_many_references():
    assert bleu(["a b c d e"], ["a b c d e"]).score == pytest.approx(100.0)
    with pytest.raises(UserError, match="BLEU needs references"):
        bleu(["a"], [])
    with pytest.raises(UserError, match="2 translations but 1 references"):
        bleu(["a", "b"], ["a"])


def test_a_model_without_capitals_is_measured_without_them(tiny, tmp_path):
    upper = ["Red Dog Runs", "Big Man Runs Now"]
    lower = [line.lower() for line in upper]
    assert bleu(lower, upper).score < 10.0
    measured = bleu(lower, upper, lowercase=True)
    assert measured.score == pytest.approx(100.0) and "case:lc" in measured.signature
    settings = tiny(tmp_path / "run", dataset__lowercase=True, train__steps=1)
    train_translation(settings)
    values = evaluate(LazyEvalConfig(settings.out, search=BeamSearchConfig(beams=1)))
    assert "case:lc" in values["signature"]


def test_search_settings_leave_to_the_model_what_is_not_given():
    assert BeamSearchConfig(beams=1).generation() == {"num_beams": 1, "do_sample": False}
    given = BeamSearchConfig(encoder_steps=9, epsilon=0.2).generation()
    assert given["encoder_steps"] == 9 and given["epsilon"] == 0.2
    assert "decoder_steps" not in given


# -- language modelling


@pytest.fixture(scope="module")
def language_run(tmp_path_factory, lazy, text_file, shared_cache) -> Path:
    folder = tmp_path_factory.mktemp("language") / "run"
    values = {
        "task": "language",
        "out": folder,
        "data": text_file,
        "dataset.cache": shared_cache,
        "dataset.vocab_size": 400,
        "dataset.batch_size": 4,
        "dataset.length": 8,
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.d_ff": 32,
        "model.decoder_steps": 2,
        "model.label_smoothing": 0.1,
        "train.steps": 8,
        "train.warmup": 2,
        "train.lr": 0.01,
        "train.log_every": 1,
        "train.valid_every": 8,
        "train.save_every": 4,
    }
    assert lazy("train", *(f"--{name}={value}" for name, value in values.items())) == 0
    return folder


def test_a_language_model_is_measured_in_perplexity(language_run):
    records, _ = read_records(language_run / "metrics.jsonl")
    losses = [record.values["loss"] for record in records if record.kind == "train"]
    assert losses[-1] < losses[0]
    test = next(record.values for record in records if record.kind == "test")
    assert test["perplexity"] == pytest.approx(math.exp(test["loss"]))


def test_eval_repeats_the_test_and_takes_other_steps(lazy, language_run, capsys):
    assert lazy("eval", language_run) == 0
    assert "perplexity" in capsys.readouterr().out
    records, _ = read_records(language_run / "metrics.jsonl")
    test = next(record.values for record in records if record.kind == "test")
    again = records[-1].values
    assert records[-1].kind == "language"
    assert again["loss"] == pytest.approx(test["loss"], abs=1e-6)
    assert lazy("eval", language_run, "--decoder_steps", "4", "--split", "valid") == 0
    deeper = read_records(language_run / "metrics.jsonl")[0][-1].values
    assert deeper["flops_per_token"] > again["flops_per_token"]
    assert lazy("eval", language_run, "--decoder_epsilon", "1.0") == 0
    sooner = read_records(language_run / "metrics.jsonl")[0][-1].values
    assert sooner["flops_per_token"] < again["flops_per_token"]


def test_a_split_or_steps_that_cannot_be_are_refused(lazy, language_run):
    with pytest.raises(UserError, match="has no split 'dev'"):
        lazy("eval", language_run, "--split", "dev")
    with pytest.raises(UserError, match="steps must be at least 1: got 0"):
        lazy("eval", language_run, "--decoder_steps", "0")
    with pytest.raises(UserError, match="patience must be at least 1: got 0"):
        lazy("eval", language_run, "--decoder_epsilon", "0.5", "--patience", "0")
    with pytest.raises(UserError, match="which a language model does not have: give decoder_"):
        lazy("eval", language_run, "--epsilon", "0.5")


def test_a_language_model_writes_what_a_plain_loop_writes(lazy, language_run, capsys):
    words = ["The function", "--tokens", "5", "--temperature", "0", "--decoder_steps", "3"]
    assert lazy("generate", language_run, *words) == 0
    model, tokenizer = load_writer(str(language_run))
    ids = tokenizer.encode("The function", add_special_tokens=False)
    for _ in range(5):
        logits = model(torch.tensor([ids]), decoder_steps=3).logits
        ids.append(int(logits[0, -1].argmax()))
    lines = tokenizer.decode(ids).replace(tokenizer.eos_token, "\n")
    assert capsys.readouterr().out.split() == lines.split()
    with pytest.raises(UserError, match="longer than the model's 1024 positions"):
        lazy("generate", language_run, "The", "--tokens", "2000")
    with pytest.raises(UserError, match="The prompt is empty"):
        lazy("generate", language_run, " ")
    with pytest.raises(UserError, match="which a language model does not have"):
        lazy("generate", language_run, "The", "--epsilon", "0.1")


def test_a_language_model_is_swept_and_drawn(lazy, language_run, capsys):
    assert lazy("sweep", language_run, "--decoder_steps", "[1,2]", "--epsilons", "[0.9]") == 0
    table = list(csv.DictReader((language_run / "sweep.csv").read_text().splitlines()))
    assert [row["decoder_steps"] for row in table] == ["1", "2", "2"]
    flops = [float(row["flops_per_token"]) for row in table]
    assert flops[0] < flops[1] and flops[2] < flops[1]
    capsys.readouterr()
    assert lazy("plot", language_run, "--source", "The function returns") == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert {"lazy_tokens", "lazy_sentence", "lazy_cka", "lazy_steps"} <= names
    inside = read_records(language_run / "metrics.jsonl")[0][-1].values
    assert "encoder" not in inside and len(inside["decoder"]["depth"]) >= 3
    inspect_run(LazyPlotConfig(str(language_run), sentence=1))
    other = read_records(language_run / "metrics.jsonl")[0][-1].values
    assert len(other["decoder"]["tokens"]) == 8 and other["source"] != inside["source"]
    for words, sentence in (
        (["sweep", "--encoder_steps", "[2]"], "which a language model does not have"),
        (["sweep", "--sentences", "2"], "measured on a whole text: leave out sentences"),
        (["plot", "--sentence", "100000"], "segments, counted from 0: got 100000"),
        (["plot", "--source", " "], "The source is empty"),
        (["eval", "--test", "a"], "test is an option of translation"),
    ):
        with pytest.raises(UserError, match=sentence):
            lazy(words[0], language_run, *words[1:])


class Scripted:
    """A language model that continues texts as told."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers = tokenizer, answers

    def generate(self, ids, attention_mask, **_):
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        written = [text + self.answers[text] for text in texts]
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in written]
        longest = max(map(len, encoded))
        pad = self.tokenizer.pad_token_id
        return torch.tensor([ids + [pad] * (longest - len(ids)) for ids in encoded])


def test_the_next_word_is_a_whole_word(language_run):
    tokenizer = load_writer(str(language_run)).tokenizer
    answers = {
        "he went to the": " door and",
        "he said": " don't go",
        "a glued wo": "rd next",
        "he stopped": ", then",
        "nothing": "",
        "she opened the": " doorway",
    }
    writer = TrainedModel(Scripted(tokenizer, answers), tokenizer)
    assert last_words(writer, list(answers), 64) == ["door", "don't", "", "", "", "doorway"]


def test_last_words_of_passages_are_counted(lazy, language_run, tmp_path, capsys):
    writer = load_writer(str(language_run))
    rests = ["The function returns a", "for each of the", "a much longer text than the others to"]
    alone = [last_words(writer, [rest], 8)[0] for rest in rests]
    assert last_words(writer, rests, 8) == alone  # padding changes nothing
    told = [word or "x" for word in alone]
    told[0] = "wrong"
    texts = [f"{rest} {word} ." for rest, word in zip(rests, told, strict=True)]
    (tmp_path / "passages.txt").write_text("\n\n".join(texts))
    (tmp_path / "passages.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in texts))
    expected = sum(word == own for word, own in zip(told, alone, strict=True)) / 3
    for name in ("passages.txt", "passages.jsonl"):
        assert lazy("eval", language_run, "--last_words", tmp_path / name) == 0
        values = read_records(language_run / "metrics.jsonl")[0][-1].values
        assert values["last_word_accuracy"] == pytest.approx(expected)
        assert values["passages"] == 3
        assert (language_run / "hypotheses.txt").read_text().splitlines() == alone


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "one\n", "Line 1 of .* is no passage of two words"),
        ("a.jsonl", '{"text": "two words"}\n{"words": 1}\n', "Line 2 of .* under the key"),
        ("a.txt", "\n", "holds no passage"),
    ],
)
def test_passages_that_are_none_are_refused(lazy, language_run, tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        lazy("eval", language_run, "--last_words", tmp_path / name)


# -- weights of another run


def test_a_translator_starts_from_a_language_model(lazy, language_run, corpus, tmp_path, capfd):
    values = {"data": corpus, "start": language_run, "d_model": 16, "num_heads": 2, "d_ff": 32}
    values |= {"epochs": "null", "train.steps": 1, "train.lr": 1e-9, "out": tmp_path / "run"}
    values |= {"train.warmup": 0, "train.weight_decay": 0}
    assert lazy("train", *(f"--{name}={value}" for name, value in values.items())) == 0
    assert "weights start as in" in capfd.readouterr().err
    before, tokenizer = load_writer(str(language_run))
    after, own_tokenizer = load_translator(str(tmp_path / "run"))
    assert own_tokenizer.get_vocab() == tokenizer.get_vocab()
    weights = dict(after.named_parameters())
    shared = {name: weight for name, weight in before.named_parameters() if name in weights}
    assert len(shared) > 8 and "decoder.stack.transitions.0.block.qkv_proj.weight" in shared
    assert all(torch.allclose(weights[name], shared[name], atol=1e-7) for name in shared)


def test_a_language_model_is_tuned_on_other_text(lazy, language_run, text_file, tmp_path):
    (tmp_path / "more.txt").write_text(text_file.read_text()[::-1][:6000])
    values = {"task": "language", "data": tmp_path / "more.txt", "start": language_run}
    values |= {"d_model": 16, "num_heads": 2, "d_ff": 32, "decoder_steps": 3, "train.steps": 1}
    values |= {"dataset.batch_size": 2, "dataset.length": 8, "out": tmp_path / "run"}
    words = [f"--{name}={value}" for name, value in values.items()]
    assert lazy("train", *words) == 0
    tuned = trained_with(LanguageTrainConfig, str(tmp_path / "run")).dataset
    assert tuned.ends_lines and tuned.tokenizer == str(language_run / "model")
    assert lazy("train", "--config", str(tmp_path / "run" / "config.yaml"), "--overwrite") == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--d_ff", "64"], "has d_ff 32, but 64 is asked for: give --model.d_ff 32"),
        (["--num_heads", "4"], "has num_heads 2, but 4 is asked for"),
        (["--dataset.tokenizer", "other"], "are for its own tokenizer: leave out"),
        (["--start", "nowhere"], "There is no model in nowhere"),
    ],
)
def test_weights_that_do_not_fit_are_refused(lazy, language_run, corpus, tmp_path, words, sentence):
    own = ["--data", corpus, "--start", language_run, "--d_model", "16", "--num_heads", "2"]
    with pytest.raises(UserError, match=sentence):
        lazy("train", *own, "--d_ff", "32", "--out", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_programs_do_not_start_from_words(lazy, language_run, tmp_path):
    own = ["--d_model", "16", "--num_heads", "2", "--d_ff", "32", "--start", language_run]
    with pytest.raises(UserError, match="tokens, but the tokenizer here has"):
        lazy("train", "--task", "programs", *own, "--out", tmp_path / "run")


def test_a_language_model_does_not_translate(language_run):
    with pytest.raises(UserError, match="LazyTransformerForCausalLM, which has no source"):
        load_translator(str(language_run))
