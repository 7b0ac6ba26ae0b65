"""From a text to tokens on disk: a split of a corpus as one memory-mapped array, written once.

Text is encoded in blocks of lines and appended to disk, so memory does not grow with the corpus.
A file is keyed by what decides its content: the text, the tokenizer, and whether line ends count.

Line ends. With `end_of_line` the tokenizer's eos id follows every line, blank ones too. What is not
in the tokens is not counted either: `num_words` and `num_bytes`, which turn a loss per token into
one per word or per byte, count a line end as a word and a byte only if the model had to predict it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.data.config import DatasetConfig
from deepenough.data.corpus import Corpus, open_corpus
from deepenough.data.encoding import encode_blocks
from deepenough.data.tokenizer import add_encoder_tokens, cached_tokenizer, load_tokenizer
from deepenough.errors import UserError
from deepenough.training.logging import announce, announce_split, reading

FORMAT = "1"
BLOCK_CHARACTERS = 1 << 21
COUNT_BLOCK = 1 << 22
IDS_FILE = "ids.bin"
COUNTS_FILE = "counts.json"


@dataclass(frozen=True)
class Prepared:
    """Text ready for training."""

    tokenizer: PreTrainedTokenizerBase
    tokens: dict[str, TokenFile]


def prepare(text: str, dataset: DatasetConfig, with_mask: bool = False) -> Prepared:
    """Return the tokenizer and the tokens of every split of a text; both are cached.

    `text` is a name as `open_corpus` takes it. `with_mask` asks for a tokenizer with a mask token.
    """
    corpus = _open(text, dataset)
    if dataset.tokenizer is None:
        lines, content = partial(corpus.lines, "train"), corpus.fingerprint("train")
        tokenizer = cached_tokenizer(lines, content, dataset)
    else:
        tokenizer = load_tokenizer(dataset.tokenizer, dataset.lowercase)
    if with_mask:
        add_encoder_tokens(tokenizer)
    tokens = {split: _tokens_of(corpus, split, tokenizer, dataset) for split in corpus.splits}
    return Prepared(tokenizer, tokens)


def split_tokens(
    text: str, dataset: DatasetConfig, split: str | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenFile, str]:
    """Return the tokens of one split of a text under a model's own tokenizer, and its name.

    The split is by default test, else valid, else train. Of `dataset` the cache, the shares held
    out, the line ends and the number of processes are read.
    """
    corpus = _open(text, dataset)
    split = split or corpus.splits[-1]
    return _tokens_of(corpus, split, tokenizer, dataset), split


def _open(text: str, dataset: DatasetConfig) -> Corpus:
    fractions = {"valid_fraction": dataset.valid_fraction, "test_fraction": dataset.test_fraction}
    return open_corpus(text, cache=dataset.cache, **fractions)


def _tokens_of(
    corpus: Corpus, split: str, tokenizer: PreTrainedTokenizerBase, dataset: DatasetConfig
) -> TokenFile:
    return token_file(
        corpus,
        split,
        tokenizer,
        end_of_line=dataset.ends_lines,
        cache_dir=dataset.cache,
        workers=dataset.workers,
    )


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split on disk, and what they were made of."""

    folder: Path
    vocab_size: int
    num_tokens: int
    num_lines: int
    num_words: int
    """Words between white space, plus line ends where they are tokens."""
    num_bytes: int
    """UTF-8 bytes of the text as the corpus has it, with line ends where they are tokens."""

    @classmethod
    def open(cls, folder: Path) -> TokenFile:
        """Return the token file in a folder; a damaged one is refused."""
        try:
            file = cls(folder, **json.loads((folder / COUNTS_FILE).read_text("utf-8")))
            if len(file.ids) != file.num_tokens:
                raise ValueError("the ids are cut")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"The token file in {folder} is damaged: delete that folder."
            ) from error
        return file

    @property
    def ids(self) -> npt.NDArray[np.unsignedinteger]:
        """Return the ids, mapped from disk and read-only."""
        return np.memmap(self.folder / IDS_FILE, dtype=id_type(self.vocab_size), mode="r")

    def __len__(self) -> int:
        return self.num_tokens

    def vocab_counts(self) -> npt.NDArray[np.int64]:
        """Return how often each id occurs, in blocks so that the file is never in memory whole."""
        dtype, total = np.dtype(id_type(self.vocab_size)), np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, len(self), COUNT_BLOCK):
            # Not through the map, whose pages would stay as long as it does.
            ids = np.fromfile(
                self.folder / IDS_FILE, dtype, COUNT_BLOCK, offset=start * dtype.itemsize
            )
            total += np.bincount(ids, minlength=self.vocab_size)
        return total


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest type that holds every id of a vocabulary."""
    return np.uint16 if vocab_size < 1 << 16 else np.uint32


def token_file(
    corpus: Corpus,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_of_line: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> TokenFile:
    """Return the tokens of a split: from the cache, or encoded now by so many processes.

    The ids do not depend on how many `workers` there are; by default a long text has one a core.
    """
    eos = tokenizer.eos_token_id if end_of_line else None
    if end_of_line and eos is None:
        raise UserError(
            "Line ends cannot be tokens with a tokenizer that has no end token: set end_of_line to "
            "false, or give another tokenizer."
        )
    key = key_of(FORMAT, corpus.fingerprint(split), tokenizer_fingerprint(tokenizer), str(eos))
    folder = cache_folder(cache_dir) / "tokens" / key
    file = TokenFile.open(entry(folder, partial(_write, corpus, split, tokenizer, eos, workers)))
    if split in corpus.held_out and corpus.cut_at_end:
        announce(
            f"The {split} split is {len(file):,} tokens from the end of {corpus.name}, which has "
            "too few lines to hold out some of them."
        )
    elif split in corpus.held_out:
        announce_split(split, f"{file.num_lines} lines", corpus.name)
    return file


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides a tokenizer's ids; the same after saving and loading."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Not the whole state: calls with padding or truncation are remembered in it.
        state = json.loads(backend.to_str())
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        return key_of(*(json.dumps(state[part], sort_keys=True) for part in parts))
    return key_of(type(tokenizer).__name__, json.dumps(tokenizer.get_vocab(), sort_keys=True))


def _write(
    corpus: Corpus,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    eos: int | None,
    workers: int | None,
    folder: Path,
) -> None:
    vocab_size = len(tokenizer)
    blocks = _blocks(corpus.lines(split))
    encoded = encode_blocks(blocks, tokenizer, eos, id_type(vocab_size), workers)
    num_tokens = num_lines = num_words = num_bytes = 0
    # Closed whatever happens, so that no process outlives what it works for.
    with (
        (folder / IDS_FILE).open("wb") as file,
        reading("bytes") as show,
        contextlib.closing(encoded),
    ):
        for block in encoded:
            block.ids.tofile(file)
            num_tokens += len(block.ids)
            num_lines += block.num_lines
            num_words += block.num_words
            num_bytes += block.num_bytes
            show(num_bytes, None)
    if num_tokens == 0:
        raise UserError(
            f"The {split} split of the corpus {corpus.name} gives no tokens: give a longer text."
        )
    num_ends = 0 if eos is None else num_lines
    counts = {
        "vocab_size": vocab_size,
        "num_tokens": num_tokens,
        "num_lines": num_lines,
        "num_words": num_words + num_ends,
        "num_bytes": num_bytes + num_ends,
    }
    (folder / COUNTS_FILE).write_text(json.dumps(counts, indent=1) + "\n", "utf-8")


def _blocks(lines: Iterator[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line) + 1
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


class ContextBatches:
    """A sequence of `{"input_ids": [b, S], "labels": [b, S]}`, `b` being this rank's streams.

    `labels[:, i]` is the token after `input_ids[:, i]`: they are shifted already.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.integer],
        batch_size: int,
        length: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size % world_size:
            raise UserError(
                f"A batch of {batch_size} streams cannot be shared by {world_size} processes: "
                f"make batch_size a multiple of {world_size}."
            )
        self.num_batches = max(len(ids) - 1, 0) // (batch_size * length)
        if self.num_batches == 0:
            raise UserError(
                f"The text has {len(ids)} tokens, but one batch of {batch_size} x {length} needs "
                f"{batch_size * length + 1}: give a longer text or lower batch_size or length."
            )
        self.length = length
        used = batch_size * self.num_batches * length
        # Views of the mapped file: nothing is read before a batch is asked for.
        share = batch_size // world_size
        streams = slice(rank * share, (rank + 1) * share)
        self._inputs = ids[:used].reshape(batch_size, -1)[streams]
        self._labels = ids[1 : used + 1].reshape(batch_size, -1)[streams]

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, t: int) -> dict[str, torch.Tensor]:
        if not 0 <= t < len(self):
            raise IndexError(f"batch {t} of {len(self)}")
        segment = slice(t * self.length, (t + 1) * self.length)
        return {
            "input_ids": torch.from_numpy(self._inputs[:, segment].astype(np.int64)),
            "labels": torch.from_numpy(self._labels[:, segment].astype(np.int64)),
        }
