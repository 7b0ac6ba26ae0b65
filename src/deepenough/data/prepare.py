"""From a text to tokens on disk: corpus, tokenizer, one token file per split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.data.config import DatasetConfig
from deepenough.data.corpus import Corpus, open_corpus
from deepenough.data.tokenizer import load_tokenizer, train_tokenizer
from deepenough.data.tokens import TokenFile, token_file
from deepenough.errors import UserError

# Part of a trained tokenizer's key: to be changed with the way tokenizers are trained.
TRAINING_RECIPE = "1"


@dataclass(frozen=True)
class Prepared:
    """Text ready for training."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    tokens: dict[str, TokenFile]


def prepare(text: str, dataset: DatasetConfig) -> Prepared:
    """Open a text, load or train the tokenizer, encode every split; all of it is cached.

    Args:
        text: A name as `open_corpus` takes it: a file, a folder, `python`, a data set of the hub.
        dataset: How to split and tokenize it.

    Returns:
        The corpus, its tokenizer and the token file of every split.
    """
    corpus = _open(text, dataset)
    cache = cache_folder(dataset.cache)
    if dataset.tokenizer is None:
        tokenizer = _trained_tokenizer(corpus, dataset, cache)
    else:
        tokenizer = load_tokenizer(dataset.tokenizer, dataset.lowercase)
    tokens = {
        split: token_file(corpus, split, tokenizer, end_of_line=dataset.ends_lines, cache_dir=cache)
        for split in corpus.splits
    }
    return Prepared(corpus, tokenizer, tokens)


def split_tokens(
    text: str,
    dataset: DatasetConfig,
    split: str | None,
    tokenizer: PreTrainedTokenizerBase,
    end_of_line: bool,
) -> tuple[TokenFile, str]:
    """Return the tokens of one split of a text under a model's own tokenizer, and its name.

    Args:
        text: A name as `open_corpus` takes it.
        dataset: Where to cache, and how much is held out; its tokenizer is not read.
        split: Which part; None for test, else valid, else train.
        tokenizer: The tokenizer of the model that will read the tokens.
        end_of_line: Whether the tokenizer's end token follows each line.

    Raises:
        UserError: The text has no such split.
    """
    corpus = _open(text, dataset)
    if split is None:
        split = next(name for name in ("test", "valid", "train") if name in corpus.splits)
    if split not in corpus.splits:
        known = ", ".join(corpus.splits)
        raise UserError(f"The corpus {text} has no split {split!r}: it has {known}.")
    cache = cache_folder(dataset.cache)
    tokens = token_file(corpus, split, tokenizer, end_of_line=end_of_line, cache_dir=cache)
    return tokens, split


def _open(text: str, dataset: DatasetConfig) -> Corpus:
    return open_corpus(
        text,
        valid_fraction=dataset.valid_fraction,
        test_fraction=dataset.test_fraction,
        cache=cache_folder(dataset.cache),
    )


def _trained_tokenizer(
    corpus: Corpus, dataset: DatasetConfig, cache: Path
) -> PreTrainedTokenizerBase:
    key = key_of(
        TRAINING_RECIPE,
        corpus.fingerprint("train"),
        str(dataset.vocab_size),
        str(dataset.lowercase),
        *dataset.symbols,
    )

    def fill(folder: Path) -> None:
        lines = corpus.lines("train")
        train_tokenizer(lines, dataset.vocab_size, dataset.lowercase, dataset.symbols, folder)

    return load_tokenizer(entry(cache / "tokenizers" / key, fill))
