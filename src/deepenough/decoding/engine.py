"""`Engine`: a causal model taken apart for decoding, one cache and any range of layers at a time.

The loop that decodes, the sources of drafts and the policies of early exit see nothing else of it:

    prefill(prompts)            -> normed state of every row's last token
    step = enter(tokens)        the tokens that follow what is kept, as embeddings
    through(step, h, i, j)      -> h_j from h_i: layers i+1 ... j, whose keys and values are cached
    norm(h), head(normed)       -> logits
    keep(counts)                of the tokens entered since, how many of each row are there to stay

and, where some rows go further than others, `resume` for those that do and `fill` for the rest.

Two implementations: `fused.py` for layouts whose arithmetic is written out here, `general.py` for
all others, which calls the model's own layers. Rows may keep different numbers of tokens.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter


@dataclass
class Step:
    """Tokens on their way through the layers."""

    hidden: Tensor
    """`h_0`, `[B, T, D]`."""
    offset: int
    """How many tokens, entered before, lie between these and what is kept."""
    context: Any = None
    """What the layers of an implementation need: masks, position codes."""


class Engine(ABC):
    """A model, and the cache of the rows it is decoding."""

    takes_groups: bool = True
    """Whether `resume` takes several tokens of a row, from before the latest on."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.num_layers = adapter.num_layers
        """Layers that run; fewer where no state behind them is wanted."""
        self.lengths: list[int] = []
        """Tokens of each row whose keys and values are kept."""
        self.prompt: list[Tensor] = []
        """`h_L` of each row's prompt, `[T, D]`, as `prefill` has left it."""

    @abstractmethod
    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Begin with prompts, padded on either side; room for `capacity` tokens a row.

        Gives the normed state of every row's last token, `[B, D]`.
        """

    @abstractmethod
    def enter(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """The next tokens of every row; `offset` of them have been entered already."""

    @abstractmethod
    def through(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """`h_last` from `h_first`; each layer in between sees and extends the cache."""

    @abstractmethod
    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """States of tokens at `starts` and after, of some rows, on their way to further layers."""

    @abstractmethod
    def fill(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Keys and values of a layer alone, of tokens that resumed, from what it would read."""

    @abstractmethod
    def norm(self, hidden: Tensor) -> Tensor:
        """The norm between the last layer and the head."""

    @abstractmethod
    def head(self, normed: Tensor) -> Tensor:
        """Logits of normed states, `[..., V]`."""

    @abstractmethod
    def keep(self, counts: Sequence[int]) -> None:
        """Of the tokens entered since the last call, the first `counts[row]` of each row stay."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""

    def run(self, tokens_BT: Tensor) -> Tensor:
        """Normed states `[B, T, D]` of the next tokens, through all layers."""
        step = self.enter(tokens_BT)
        return self.norm(self.through(step, step.hidden, 0, self.num_layers))

    def refresh(self) -> None:  # noqa: B027
        """Notice what was done to the model's weights between two generations."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory of the cache."""


def row_lengths(ids_BT: Tensor, mask_BT: Tensor | None) -> list[int]:
    """Tokens of each prompt; padding may stand on either side of them, but not between."""
    batch, width = ids_BT.shape
    if width == 0:
        raise UserError("The prompt is empty: give at least one token, such as the model's BOS.")
    if mask_BT is None:
        return [width] * batch
    mask_BT = mask_BT.bool()
    lengths = [int(length) for length in mask_BT.sum(1)]
    if 0 in lengths:
        row = lengths.index(0)
        raise UserError(f"The prompt of row {row} is empty: give at least one token in every row.")
    if bool((mask_BT[:, 1:] != mask_BT[:, :-1]).sum(1).gt(1).any()):
        raise UserError(
            "The attention mask leaves out tokens in the middle of a prompt: decoding takes "
            "prompts in one piece, padded on one side."
        )
    return lengths


def check_cache(adapter: Adapter) -> None:
    """Refuse models that keep anything else than all keys and values of all tokens."""
    model: Any = adapter.model
    name = type(model).__name__
    if adapter.kind != "causal":
        raise UserError(
            f"{name} does not generate text: give a causal language model (AutoModelForCausalLM)."
        )
    if len(set(adapter.layers)) < adapter.num_layers:
        raise UserError(f"{name} applies one layer several times, which decoding does not support.")
    if not model._supports_default_dynamic_cache():
        raise UserError(f"{name} has a cache of its own kind, which decoding does not support.")
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if getattr(model.config.get_text_config(), "sliding_window", None) and not kinds:
        kinds = {"a sliding window"}
    if kinds - {"DynamicLayer"}:
        raise UserError(
            f"{name} keeps {', '.join(sorted(kinds))} in its cache, where decoding supports full "
            "attention alone, without sliding window or recurrent layers."
        )


@torch.no_grad()
def agrees(engine: Engine) -> bool:
    """Whether a short prompt, cached, gives the logits of the model itself."""
    model: Any = engine.adapter.model
    size = model.config.get_text_config().vocab_size
    ids_BT = torch.arange(1, 11, device=model.device).view(2, 5).remainder(size)
    expected = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits[:, 2:]
    first = engine.prefill(ids_BT[:, :3], None, capacity=5)
    found = engine.head(torch.cat([first[:, None], engine.run(ids_BT[:, 3:])], 1))
    # Sums are made in another order, and a few logits are large: relative to the largest.
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
