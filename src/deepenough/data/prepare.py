"""From settings to tokens on disk: corpus, tokenizer, one token file per split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from deepenough.data.cache import cache_folder, entry, key_of
from deepenough.data.corpus import Corpus, open_corpus
from deepenough.data.settings import DataSettings
from deepenough.data.tokenizer import load_tokenizer, train_tokenizer
from deepenough.data.tokens import TokenFile, token_file

# Part of a trained tokenizer's key: to be changed with the way tokenizers are trained.
TRAINING_RECIPE = "1"


@dataclass(frozen=True)
class Prepared:
    """Text ready for training."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    tokens: dict[str, TokenFile]


def prepare(settings: DataSettings) -> Prepared:
    """Open the corpus, load or train the tokenizer, encode every split; all of it cached."""
    cache = cache_folder(settings.cache)
    corpus = open_corpus(
        settings.corpus,
        valid_fraction=settings.valid_fraction,
        test_fraction=settings.test_fraction,
        cache=cache,
    )
    if settings.tokenizer is None:
        tokenizer = _trained(corpus, settings, cache)
    else:
        tokenizer = load_tokenizer(settings.tokenizer, settings.lowercase)
    end_of_line = settings.end_of_line
    if end_of_line is None:
        end_of_line = settings.tokenizer is None
    tokens = {
        split: token_file(corpus, split, tokenizer, end_of_line=end_of_line, cache_dir=cache)
        for split in corpus.splits
    }
    return Prepared(corpus, tokenizer, tokens)


def _trained(corpus: Corpus, settings: DataSettings, cache: Path) -> PreTrainedTokenizerBase:
    key = key_of(
        TRAINING_RECIPE,
        corpus.fingerprint("train"),
        str(settings.vocab_size),
        str(settings.lowercase),
        *settings.symbols,
    )

    def fill(folder: Path) -> None:
        lines = corpus.lines("train")
        train_tokenizer(lines, settings.vocab_size, settings.lowercase, settings.symbols, folder)

    return load_tokenizer(entry(cache / "tokenizers" / key, fill))
