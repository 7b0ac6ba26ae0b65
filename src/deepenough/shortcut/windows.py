"""From texts to batches of token ids, and the positions of each whose states are wanted.

- Text is taken as the tokenizer gives it, special tokens included. A text of fewer than two tokens
  of its own is skipped. One longer than the window becomes several, each with the special tokens.
- A random position is a function of the seed and the number of the text, whatever the batches and
  the processes, and is never that of a special token. A causal model cannot see what comes later,
  so its text is cut there. A masked model gets `[MASK]` there, also if all positions are wanted:
  it then sees one `[MASK]` in every window, as it did in training.
- Texts of a pool are sorted by length before they are batched, so that little is padded.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deepenough.errors import UserError

Positions = Literal["all", "random"]

_POOL_TEXTS, _POOL_CHARACTERS = 4096, 4_000_000
_LONGEST = 1024
"""Longest window by default: what a longer context adds to a state is little, to memory much."""

logger = logging.getLogger(__name__)


class Window(NamedTuple):
    """A stretch of a text that is run at once."""

    ids: list[int]
    position: int | None
    """The position whose state is wanted; None for all."""
    length: int
    """Tokens of the window before it was cut at the position."""
    text: int


class TokenBatch(NamedTuple):
    """Windows side by side, padded on the right."""

    ids: Tensor
    """`[B, T]`"""
    mask: Tensor | None
    """`[B, T]`, 1 for a token, 0 for padding; None if no row is padded."""
    windows: list[Window]
    texts: int = 0
    """Texts that are done with after this batch: of its pool, the share that batches are."""


@dataclass
class Tally:
    """What has been read so far."""

    texts: int = 0
    skipped: int = 0
    """Texts of fewer than two tokens."""
    windowed: int = 0
    """Texts that became several windows."""
    digest: Any = field(default_factory=hashlib.sha256, repr=False)

    @property
    def fingerprint(self) -> str:
        """A hash of the texts."""
        return str(self.digest.hexdigest()[:16])


@dataclass(frozen=True)
class Reading:
    """How text becomes batches: with the same texts, the same batches."""

    kind: str
    """Of the model: causal, masked or encoder."""
    positions: Positions = "all"
    seed: int = 0
    batch_tokens: int = 2048
    window: int = _LONGEST

    def __post_init__(self) -> None:
        if self.positions not in ("all", "random"):
            raise UserError(
                f"The positions {self.positions!r} are not known: choose 'all' or 'random'."
            )
        if self.batch_tokens < 1:
            raise UserError(f"A batch cannot have {self.batch_tokens} tokens: give 1 or more.")


def choose_window(window: int | None, max_length: int | None) -> int:
    """The length of a window: what is asked for, within what the model can read."""
    if window is None:
        return min(_LONGEST, max_length or _LONGEST)
    if window < 2 or (max_length is not None and window > max_length):
        limit = "" if max_length is None else f" and at most {max_length}, the model's context"
        raise UserError(f"A window of {window} tokens is not possible: give at least 2{limit}.")
    return window


def batches(
    tokenizer: Any, texts: Iterable[str], reading: Reading, tally: Tally | None = None
) -> Iterator[TokenBatch]:
    """All batches in an order that depends on the texts and on nothing else."""
    if isinstance(texts, str):
        raise UserError("The texts are a single string: give a list of texts.")
    if reading.kind == "masked" and getattr(tokenizer, "mask_token_id", None) is None:
        raise UserError(
            f"{type(tokenizer).__name__} has no mask token, which a masked model needs: "
            "give the tokenizer that belongs to the model."
        )
    tally = Tally() if tally is None else tally
    padding = getattr(tokenizer, "pad_token_id", None) or 0
    said = False
    for pool in _pools(texts):
        start = tally.texts
        windows = list(_windows(tokenizer, pool, reading, tally))
        if tally.windowed and not said:
            said = True
            logger.warning(
                "Texts of more than %d tokens are read in windows of that length.", reading.window
            )
        groups = _grouped(windows, reading.batch_tokens)
        for number, rows in enumerate(groups, start=1):
            yield _pad(rows, padding, start + len(pool) * number // len(groups))


def _grouped(windows: list[Window], batch_tokens: int) -> list[list[Window]]:
    """Windows of similar length together, padded no larger than a batch may be."""
    groups: list[list[Window]] = []
    for window in sorted(windows, key=lambda window: len(window.ids)):
        if not groups or (len(groups[-1]) + 1) * len(window.ids) > batch_tokens:
            groups.append([])
        groups[-1].append(window)
    return groups


def _pools(texts: Iterable[str]) -> Iterator[list[str]]:
    pool: list[str] = []
    characters = 0
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"A text is a {type(text).__name__}: give strings.")
        pool.append(text)
        characters += len(text)
        if len(pool) >= _POOL_TEXTS or characters >= _POOL_CHARACTERS:
            yield pool
            pool, characters = [], 0
    if pool:
        yield pool


def _windows(tokenizer: Any, pool: list[str], reading: Reading, tally: Tally) -> Iterator[Window]:
    encoded = tokenizer(
        pool, return_special_tokens_mask=True, return_attention_mask=False, verbose=False
    )
    for text, ids, special in zip(
        pool, encoded["input_ids"], encoded["special_tokens_mask"], strict=True
    ):
        index = tally.texts
        tally.texts += 1
        tally.digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
        if special.count(0) < 2:
            tally.skipped += 1
            continue
        first = special.index(0)
        last = len(special) - special[::-1].index(0)
        parts = _cut(ids[:first], ids[first:last], ids[last:], reading.window)
        tally.windowed += len(parts) > 1
        draw = random.Random(f"{reading.seed} {index}")
        if reading.positions == "random":
            # One position of the whole text; of its windows only the one that holds it is run.
            number, offset = divmod(draw.randrange(last - first), reading.window - _extra(special))
            parts, chosen = [parts[number]], [first + offset]
        else:
            chosen = [first + draw.randrange(len(part) - _extra(special)) for part in parts]
        for part, position in zip(parts, chosen, strict=True):
            yield _window(tokenizer, reading, part, position, index)


def _extra(special: list[int]) -> int:
    """Special tokens around a text, which every window gets."""
    return special.index(0) + special[::-1].index(0)


def _cut(before: list[int], body: list[int], after: list[int], window: int) -> list[list[int]]:
    step = window - len(before) - len(after)
    if step < 1:
        raise UserError(
            f"A window of {window} tokens has no room beside the special tokens: give a longer one."
        )
    return [before + body[start : start + step] + after for start in range(0, len(body), step)]


def _window(tokenizer: Any, reading: Reading, ids: list[int], position: int, text: int) -> Window:
    length = len(ids)
    if reading.kind == "masked":
        ids = [*ids[:position], tokenizer.mask_token_id, *ids[position + 1 :]]
    if reading.positions == "all":
        return Window(ids, None, length, text)
    if reading.kind == "causal":
        ids = ids[: position + 1]
    return Window(ids, position, length, text)


def _pad(windows: list[Window], padding: int, texts: int) -> TokenBatch:
    lengths = torch.tensor([len(window.ids) for window in windows])
    longest = int(lengths.max())
    ids = torch.tensor([w.ids + [padding] * (longest - len(w.ids)) for w in windows])
    mask = None
    if int(lengths.min()) < longest:
        mask = (torch.arange(longest) < lengths[:, None]).long()
    return TokenBatch(ids, mask, windows, texts)
