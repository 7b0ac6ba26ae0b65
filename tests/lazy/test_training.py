"""Training a translator: from text to BLEU, exact resumption, and what is refused."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from deepenough.config import resolve
from deepenough.data.translation import TranslationData, open_parallel
from deepenough.data.translation_pairs import joint_tokenizer
from deepenough.errors import UserError
from deepenough.lazy.evaluation import LazyEvaluation, evaluate
from deepenough.lazy.settings import LazySettings
from deepenough.lazy.training import LazyTraining, encode_splits, make_model, train
from deepenough.lazy.translate import TranslationTask
from deepenough.lazy.translate_score import SearchSettings, bleu
from deepenough.runs import read_records
from deepenough.training.config import TrainingConfig

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
            "run.folder": str(folder),
            "data.corpus": str(corpus),
            "data.cache": str(shared_cache),
            "data.vocab_size": 290,
            "data.max_length": 32,
            "data.batch_tokens": 160,
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
            LazyTraining, None, values | {k.replace("__", "."): v for k, v in changes.items()}
        )

    return make


def losses(folder: Path, kind: str = "train") -> dict[int, float]:
    records, _ = read_records(folder / "metrics.jsonl")
    return {record.step: record.values["loss"] for record in records if record.kind == kind}


@pytest.mark.parametrize("mechanism", ["lazy", "universal", "act", "transformer"])
def test_a_training_from_text_to_bleu(tiny, tmp_path, mechanism):
    run = train(tiny(tmp_path / "run", model__mechanism=mechanism))
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
    changes = {"fewest_encoder_steps": 1, "train__accumulate": 2}
    train(tiny(tmp_path / "whole", **changes))
    run = tmp_path / "cut"
    train(tiny(run, **changes))
    # As if it had been killed after step 4: later checkpoint and model gone.
    newest = sorted((run / "checkpoints").iterdir())[-1]
    for path in (*newest.iterdir(), *(run / "model").iterdir()):
        path.unlink()
    newest.rmdir()
    (run / "model").rmdir()
    train(tiny(run, run__resume=True, **changes))
    assert losses(run) == losses(tmp_path / "whole")
    assert losses(run, "test") == losses(tmp_path / "whole", "test")


@pytest.mark.parametrize("world_size", [2, 3, 40])
def test_the_mean_over_processes_is_the_mean_over_tokens(corpus, shared_cache, world_size):
    """Also of more processes than there are pairs."""
    data = TranslationData(
        str(corpus), cache=str(shared_cache), vocab_size=290, max_length=32, batch_tokens=160
    )
    text = open_parallel(data)
    tokenizer = joint_tokenizer(text, data)
    pairs = encode_splits(text, tokenizer, data.max_length)
    small = LazySettings(d_model=32, num_heads=2, d_ff=64, encoder_steps=2, decoder_steps=2)
    model = make_model(small, tokenizer, data.max_length).eval()

    def task(rank: int, world: int) -> TranslationTask:
        place = SimpleNamespace(process_index=rank, num_processes=world)
        settings = TrainingConfig()
        return TranslationTask(model, tokenizer, pairs, data, settings, SearchSettings(), place)

    alone = task(0, 1).loss(model, "weights", 3, 0)
    shares = [task(rank, world_size).loss(model, "weights", 3, 0) for rank in range(world_size)]
    assert len({share.units for share in shares}) > 1, "equal shares would prove nothing"
    assert sum(share.units for share in shares) == alone.units
    for name in ("objective", "loss"):
        mean = torch.stack([getattr(share, name) for share in shares]).mean()
        torch.testing.assert_close(mean, getattr(alone, name))


def test_epochs_become_steps(tiny, tmp_path):
    settings = tiny(tmp_path / "run", epochs=1.0, data__batch_tokens=800)
    run = train(settings)
    steps = json.loads(run.metrics.read_text().splitlines()[-1])["step"]
    assert 1 <= steps < 8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": 0.0}, "epochs must be above 0"),
        ({"fewest_encoder_steps": 3}, r"from 1 to model.encoder_steps \(2\): got 3"),
        ({"model__encoder_steps": 0}, "encoder_steps must be at least 1: got 0"),
        ({"search__beams": 0}, "search.beams must be at least 1"),
        ({"search__epsilon": 2.0}, r"epsilon must be in \[0, 1\]"),
        ({"model__mechanism": "universal", "search__epsilon": 0.1}, "Only lazy models have gates"),
        ({"model__mechanism": "transformer", "search__decoder_steps": 3}, "shares no block"),
        ({"data__target": "fr"}, "has no training text"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(tiny, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        train(tiny(tmp_path / "run", **changes))
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
    settings = tiny(tmp_path / "run", data__lowercase=True, train__steps=1)
    train(settings)
    values = evaluate(LazyEvaluation(settings.run.folder, search=SearchSettings(beams=1)))
    assert "case:lc" in values["signature"]


def test_search_settings_leave_to_the_model_what_is_not_given():
    assert SearchSettings(beams=1).arguments() == {"num_beams": 1, "do_sample": False}
    given = SearchSettings(encoder_steps=9, epsilon=0.2).arguments()
    assert given["encoder_steps"] == 9 and given["epsilon"] == 0.2
    assert "decoder_steps" not in given
