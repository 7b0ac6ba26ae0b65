"""The states of a model at chosen positions, batch by batch, with nothing stored on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.windows import (
    Positions,
    Reading,
    Tally,
    TokenBatch,
    batches,
    choose_window,
)


class StateBatch(NamedTuple):
    """States of `n` positions."""

    states: list[Tensor]
    """`h_0 ... h_L`, each `[n, d]`."""
    position: Tensor
    """`[n]`: number of the token in its window."""
    length: Tensor
    """`[n]`: tokens of that window, whether or not it was cut at the position."""
    text_index: Tensor
    """`[n]`: number of the text."""


def iterate_states(
    adapter: Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    positions: Positions = "all",
    seed: int = 0,
    batch_tokens: int = 2048,
    window: int | None = None,
    tally: Tally | None = None,
    share: tuple[int, int] = (0, 1),
) -> Iterator[StateBatch]:
    """States of all texts; of every `share[1]` batches only number `share[0]`, for one of several
    processes."""
    reading = make_reading(adapter, positions, seed, batch_tokens, window)
    for number, batch in enumerate(batches(tokenizer, texts, reading, tally)):
        if number % share[1] == share[0]:
            yield run_batch(adapter, batch)


def make_reading(
    adapter: Adapter,
    positions: Positions = "all",
    seed: int = 0,
    batch_tokens: int = 2048,
    window: int | None = None,
) -> Reading:
    """How texts are read for a model."""
    length = choose_window(window, adapter.max_length)
    return Reading(adapter.kind, positions, seed, batch_tokens, length)


@torch.no_grad()
def run_batch(adapter: Adapter, batch: TokenBatch) -> StateBatch:
    """The states that one batch is read for."""
    device = adapter.model.device
    # Padding stands on the right, where a causal model never looks: without a mask it is faster.
    mask = None if batch.mask is None or adapter.kind == "causal" else batch.mask.to(device)
    with _evaluating(adapter.model):
        states = adapter.states(batch.ids.to(device), attention_mask=mask)
    row, position = _wanted(batch)
    width = batch.ids.shape[1]
    everything = len(row) == batch.ids.numel()
    chosen = (row * width + position).to(device)
    for layer, state in enumerate(states):  # one by one: the full state is freed at once
        flat = state.reshape(-1, state.shape[-1])
        states[layer] = flat if everything else flat.index_select(0, chosen)
    check_finite(states)
    lengths = torch.tensor([window.length for window in batch.windows])
    indices = torch.tensor([window.text for window in batch.windows])
    return StateBatch(states, position, lengths[row], indices[row])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, also for a model that is being trained."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def _wanted(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Row and position in the batch of every state that is wanted."""
    if batch.windows[0].position is not None:
        return torch.arange(len(batch.windows)), torch.tensor([w.position for w in batch.windows])
    mask = torch.ones_like(batch.ids) if batch.mask is None else batch.mask
    row, position = mask.nonzero(as_tuple=True)
    return row, position


def check_finite(states: Sequence[Tensor]) -> None:
    """Refuse NaN and infinity, by the layer that has them."""
    for layer, state in enumerate(states):
        # A sum is finite if its terms are, short of overflow, and costs a tenth of `isfinite`.
        if not bool(state.sum(dtype=torch.float64).isfinite()):
            what = "NaN" if bool(state.isnan().any()) else "infinite values"
            raise UserError(
                f"The states of layer {layer} hold {what}: run the model in float32, or look at "
                "its weights and inputs."
            )
