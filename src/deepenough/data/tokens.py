"""Token files: a split of a corpus as one memory-mapped array of ids, written once.

Text is encoded in blocks of lines and appended to disk, so memory does not grow with the corpus.
A file is keyed by what decides its content: the text, the tokenizer, and whether line ends count.

Line ends. With `end_of_line` the tokenizer's eos id follows every line, blank ones too. What is not
in the tokens is not counted either: `num_words` and `num_bytes`, which turn a loss per token into
one per word or per byte, count a line end as a word and a byte only if the model had to predict it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import (
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from transformers import PreTrainedTokenizerBase

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.data.corpus import Corpus
from deepenough.data.tokenizer import encoder_of
from deepenough.errors import UserError

FORMAT = "1"
BLOCK_CHARACTERS = 1 << 21
COUNT_BLOCK = 1 << 22
IDS_FILE = "ids.bin"
COUNTS_FILE = "counts.json"


@dataclass(frozen=True)
class Counts:
    """What a token file holds; written beside the ids."""

    vocab_size: int
    num_tokens: int
    num_lines: int
    num_words: int
    num_bytes: int


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split on disk."""

    folder: Path
    counts: Counts

    @classmethod
    def open(cls, folder: Path) -> TokenFile:
        """Return the token file in a folder; a damaged one is refused."""
        damaged = UserError(f"The token file in {folder} is damaged: delete that folder.")
        try:
            counts = Counts(**json.loads((folder / COUNTS_FILE).read_text("utf-8")))
            num_bytes = (folder / IDS_FILE).stat().st_size
        except (OSError, ValueError, TypeError) as error:
            raise damaged from error
        if num_bytes != counts.num_tokens * np.dtype(id_type(counts.vocab_size)).itemsize:
            raise damaged
        return cls(folder, counts)

    @property
    def ids(self) -> npt.NDArray[np.unsignedinteger]:
        """Return the ids, mapped from disk and read-only."""
        return np.memmap(self.folder / IDS_FILE, dtype=id_type(self.vocab_size), mode="r")

    def __len__(self) -> int:
        return self.counts.num_tokens

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary that the ids are of."""
        return self.counts.vocab_size

    @property
    def num_words(self) -> int:
        """Words between white space, plus line ends where they are tokens."""
        return self.counts.num_words

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text as the corpus has it, with line ends where they are tokens."""
        return self.counts.num_bytes

    def vocab_counts(self) -> npt.NDArray[np.int64]:
        """Return how often each id occurs, in blocks so that the file is never in memory whole."""
        ids, total = self.ids, np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, len(ids), COUNT_BLOCK):
            total += np.bincount(ids[start : start + COUNT_BLOCK], minlength=self.vocab_size)
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
) -> TokenFile:
    """Return the tokens of a split: from the cache, or encoded now."""
    eos = tokenizer.eos_token_id if end_of_line else None
    if end_of_line and eos is None:
        raise UserError(
            "Line ends cannot be tokens with a tokenizer that has no end token: set end_of_line to "
            "false, or give another tokenizer."
        )
    key = key_of(FORMAT, corpus.fingerprint(split), tokenizer_fingerprint(tokenizer), str(eos))
    folder = cache_folder(cache_dir) / "tokens" / key
    return TokenFile.open(entry(folder, partial(_write, corpus, split, tokenizer, eos)))


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
    corpus: Corpus, split: str, tokenizer: PreTrainedTokenizerBase, eos: int | None, folder: Path
) -> None:
    vocab_size, encode = len(tokenizer), encoder_of(tokenizer)
    line_end = [] if eos is None else [eos]
    num_tokens = num_lines = num_words = num_bytes = 0
    with (folder / IDS_FILE).open("wb") as file, _progress() as progress:
        task = progress.add_task(f"Encoding {corpus.name}, {split}", total=None)
        for lines in _blocks(corpus.lines(split)):
            ids = [number for line in encode(lines) for number in (*line, *line_end)]
            np.array(ids, dtype=id_type(vocab_size)).tofile(file)
            block_bytes = sum(len(line.encode("utf-8")) for line in lines)
            num_tokens += len(ids)
            num_lines += len(lines)
            num_words += sum(len(line.split()) for line in lines)
            num_bytes += block_bytes
            progress.advance(task, block_bytes)
    if num_tokens == 0:
        raise UserError(
            f"The {split} split of the corpus {corpus.name} gives no tokens: give a longer text."
        )
    if eos is not None:
        num_words, num_bytes = num_words + num_lines, num_bytes + num_lines
    counts = Counts(vocab_size, num_tokens, num_lines, num_words, num_bytes)
    (folder / COUNTS_FILE).write_text(json.dumps(asdict(counts), indent=1) + "\n", "utf-8")


def _progress() -> Progress:
    # The size of a streamed corpus is unknown beforehand, so what is shown is the rate.
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


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


Batch = dict[str, torch.Tensor]


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
        if batch_size < 1 or length < 1:
            raise UserError(
                f"Batch size and length must be at least 1: got {batch_size} and {length}."
            )
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
        self.batch_size, self.length = batch_size, length
        self.rank, self.world_size = rank, world_size
        used = batch_size * self.num_batches * length
        # Views of the mapped file: nothing is read before a batch is asked for.
        share = batch_size // world_size
        streams = slice(rank * share, (rank + 1) * share)
        self._inputs = ids[:used].reshape(batch_size, -1)[streams]
        self._labels = ids[1 : used + 1].reshape(batch_size, -1)[streams]
        self.num_dropped = len(ids) - used - 1
        """Tokens at the end that are neither input nor label."""

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, t: int) -> Batch:
        if not -len(self) <= t < len(self):
            raise IndexError(f"batch {t} of {len(self)}")
        start = t % len(self) * self.length
        segment = slice(start, start + self.length)
        return {
            "input_ids": torch.from_numpy(self._inputs[:, segment].astype(np.int64)),
            "labels": torch.from_numpy(self._labels[:, segment].astype(np.int64)),
        }

    def __iter__(self) -> Iterator[Batch]:
        return self.iter_from(0)

    def iter_from(self, t: int) -> Iterator[Batch]:
        """Yield the batches from `t` on, to continue a run where it stopped."""
        return (self[i] for i in range(t, len(self)))
