"""From texts to batches of token ids, and to the states of a model at the positions wanted.

- Text is taken as the tokenizer gives it, special tokens included. A text of fewer than two tokens
  of its own is skipped. One longer than the window becomes several, each with the special tokens.
- A random position is a function of the seed and the number of the text, whatever the batches and
  the processes, and is never that of a special token. A causal model cannot see what comes later,
  so its text is cut there. A masked model gets `[MASK]` there, also if all positions are wanted:
  it then sees one `[MASK]` in every window, as it did in training.
- Texts of a pool are sorted by length before they are batched, so that little is padded.
"""

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from deepenough.config import bounded, validate
from deepenough.devices import device_of, to_device
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.hf.intercept import OneDnnProducts, eval_mode, patched_forward
from deepenough.shortcut.statistics import check_finite

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
    """Number of its text."""
    targets: list[int]
    """What is to be predicted at each position wanted: of a causal model the next token, else the
    token itself, before it was masked; -1 where the window ends."""


class TokenBatch(NamedTuple):
    """Windows side by side, padded on the right."""

    ids: Tensor
    """`[B, T]`"""
    mask: Tensor
    """`[B, T]`, 1 for a token, 0 for padding."""
    windows: list[Window]
    texts: int = 0
    """Number of texts that have been read after this batch."""

    def wanted(self) -> tuple[Tensor, Tensor]:
        """Return row and position of every token whose state is wanted, in the order of states."""
        if self.windows[0].position is not None:
            return torch.arange(len(self.windows)), torch.tensor([w.position for w in self.windows])
        row, position = self.mask.nonzero(as_tuple=True)
        return row, position

    def targets(self) -> Tensor:
        """Return the token to be predicted at every place of `wanted`, -1 where there is none."""
        return torch.tensor([target for window in self.windows for target in window.targets])

    def inputs(self, adapter: Adapter) -> tuple[Tensor, Tensor | None]:
        """Return ids and attention mask on the device of a model.

        Padding stands on the right, where a causal model never looks: without a mask it is faster.
        """
        device = device_of(adapter.model)
        check_vocabulary(adapter, int(self.ids.max()))
        mask = None if adapter.kind == "causal" else to_device(self.mask, device)
        return to_device(self.ids, device), mask


@dataclass
class Tally:
    """Counts of what has been read so far."""

    texts: int = 0
    skipped: int = 0
    """Texts of fewer than two tokens."""
    windowed: int = 0
    """Texts that became several windows."""
    digest: Any = field(default_factory=hashlib.sha256, repr=False)

    @property
    def fingerprint(self) -> str:
        """Hash of the texts read so far."""
        return str(self.digest.hexdigest()[:16])


@dataclass(frozen=True)
class ReadingConfig:
    """How text becomes batches: the same texts give the same batches."""

    kind: str
    """Kind of the model: causal, masked or encoder."""
    positions: Positions = "all"
    seed: int = 0
    batch_tokens: int = bounded(2048, ge=1)
    window: int = _LONGEST


def make_reading(
    adapter: Adapter,
    positions: Positions = "all",
    seed: int = 0,
    batch_tokens: int = 2048,
    window: int | None = None,
) -> ReadingConfig:
    """Return how texts are read for a model; `window` is limited by what the model can read."""
    longest = adapter.max_length
    if window is None:
        window = min(_LONGEST, longest or _LONGEST)
    elif window < 2 or (longest is not None and window > longest):
        limit = "" if longest is None else f" and at most {longest}, the model's context"
        raise UserError(f"A window of {window} tokens is not possible: give at least 2{limit}.")
    return validate(ReadingConfig(adapter.kind, positions, seed, batch_tokens, window))


def check_mask(tokenizer: Any, kind: str) -> None:
    """Refuse a tokenizer without a mask token for a masked model."""
    if kind == "masked" and getattr(tokenizer, "mask_token_id", None) is None:
        raise UserError(
            f"{type(tokenizer).__name__} has no mask token, which a masked model needs: "
            "give the tokenizer that belongs to the model."
        )


def batches(
    tokenizer: Any, texts: Iterable[str], reading: ReadingConfig, tally: Tally | None = None
) -> Iterator[TokenBatch]:
    """Yield all batches, in an order that depends on the texts alone, which `tally` counts."""
    if isinstance(texts, str):
        raise UserError("The texts are a single string: give a list of texts.")
    check_mask(tokenizer, reading.kind)
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
    """Group windows of similar length, padded no larger than a batch may be."""
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


def _windows(
    tokenizer: Any, pool: list[str], reading: ReadingConfig, tally: Tally
) -> Iterator[Window]:
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
        extra = len(ids) - (last - first)  # special tokens around a text, which every window gets
        step = reading.window - extra
        if step < 1:
            raise UserError(
                f"A window of {reading.window} tokens has no room beside the special tokens: give "
                "a longer one."
            )
        parts = [
            ids[:first] + ids[start : min(start + step, last)] + ids[last:]
            for start in range(first, last, step)
        ]
        tally.windowed += len(parts) > 1
        draw = random.Random(f"{reading.seed} {index}")
        if reading.positions == "random":
            # One position of the whole text; of its windows only the one that holds it is run.
            number, offset = divmod(draw.randrange(last - first), step)
            parts, chosen = [parts[number]], [first + offset]
        else:
            chosen = [first + draw.randrange(len(part) - extra) for part in parts]
        for part, position in zip(parts, chosen, strict=True):
            length = len(part)
            targets = [*part[1:], -1] if reading.kind == "causal" else list(part)
            if reading.kind == "masked":
                part[position] = tokenizer.mask_token_id
            if reading.positions == "all":
                yield Window(part, None, length, index, targets)
            else:
                seen = part[: position + 1] if reading.kind == "causal" else part
                yield Window(seen, position, length, index, [targets[position]])


def _pad(windows: list[Window], padding: int, texts: int) -> TokenBatch:
    rows = [torch.tensor(window.ids) for window in windows]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return TokenBatch(ids, mask, windows, texts)


def check_vocabulary(adapter: Adapter, largest: int) -> None:
    """Refuse the ids of a tokenizer that knows more tokens than the model."""
    table: Any = adapter.model.get_input_embeddings()
    if largest >= (num := len(table.weight)):
        raise UserError(
            f"The tokenizer gives token {largest}, and the model knows tokens 0 to {num - 1}: give "
            "the tokenizer that belongs to the model."
        )


@contextmanager
def only_wanted(adapter: Adapter, batch: TokenBatch) -> Iterator[None]:
    """Run the last layer's feed-forward for the tokens alone whose states are wanted.

    Nothing reads what it returns for others: with one token of a text wanted, a twentieth of the
    work of a pass is saved. Where the feed-forward is not a module of its own, all of it is run.
    """
    part = adapter.submodules(adapter.num_layers - 1).get("feed_forward")
    is_shared = adapter.layers.count(adapter.layers[-1]) > 1
    if batch.windows[0].position is None or not isinstance(part, nn.Module) or is_shared:
        yield
        return
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0].shape[:2] == batch.ids.shape:
            row, position = (place.to(args[0].device) for place in batch.wanted())
            output = run(args[0][row, position][:, None])
            if isinstance(output, Tensor):
                found = torch.zeros_like(args[0])
                found[row, position] = output[:, 0]
                return found
        return run(*args, **kwargs)

    with patched_forward({part: forward}):
        yield


@torch.no_grad()
def run_batch(adapter: Adapter, batch: TokenBatch) -> list[Tensor]:
    """Run the model on a batch; return `h_0 ... h_L`, `[n, d]` each, at the positions wanted."""
    ids, mask = batch.inputs(adapter)
    with eval_mode(adapter.model), only_wanted(adapter, batch), OneDnnProducts():
        states = adapter.states(ids, attention_mask=mask)
    row, position = batch.wanted()
    for layer, state in enumerate(states):  # one by one: the full state is freed at once
        if row.device != state.device:  # once, but where layers stand on several devices
            row, position = row.to(state.device), position.to(state.device)
        states[layer] = state[row, position]
    check_finite(states)
    return states
