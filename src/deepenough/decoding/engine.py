"""`Engine`: a causal language model taken apart for decoding, with its KV cache.

The decoding loop, the drafters and early exit see nothing of a model but this contract:

    prefill(prompts)               -> normed state of every sequence's last token
    step = start_step(tokens)      the tokens that follow what is committed, as embeddings
    run_layers(step, h, i, j)      -> h_j from h_i: layers i+1 ... j, extending the cache
    norm(h), head(normed)          -> logits
    keep(counts)                   commit the first tokens of each sequence, roll back the rest

and, where some sequences leave at an earlier layer than others, `resume` for those that continue
and `write_kv` for those that have left.

Two implementations: `torch_backend.py` for layouts whose arithmetic is written out there, and
`general_backend.py` for all others, which calls the model's own layers. Sequences may keep
different numbers of tokens.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt


@dataclass
class Step:
    """Tokens on their way through the layers."""

    hidden: Tensor
    """`h_0`, `[B, T, D]`."""
    offset: int
    """Tokens entered before these that are not committed yet."""
    context: Any = None
    """What the layers of a backend need: masks, rotary cos/sin."""


class Engine(ABC):
    """A model, and the KV cache of the sequences it is decoding."""

    takes_groups: bool = True
    """Whether `resume` takes several tokens of a sequence at once."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.num_layers = adapter.num_layers
        self.lengths: list[int] = []
        """Committed tokens of each sequence."""
        self.capacity = 0
        """Tokens of each sequence that the cache holds at most."""
        self.prompt: list[Tensor] = []
        """`h_L` of each sequence's prompt, `[T, D]`, as `prefill` has left it."""

    @abstractmethod
    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Start a batch and return the normed state of every prompt's last token, `[B, D]`.

        Prompts may be padded on either side, where `mask_BT` is 0; None if there is no padding. The
        cache will hold `capacity` tokens of each sequence.
        """

    @abstractmethod
    def start_step(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """Embed the next tokens of every sequence, behind `offset` tokens not yet committed."""

    @abstractmethod
    def run_layers(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """Return `h_last` from `h_first`; each layer in between reads and extends the cache."""

    @abstractmethod
    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """Make a step of states that continue to deeper layers, of the sequences `rows` only.

        `starts` are the positions of the first of these tokens in each sequence.
        """

    @abstractmethod
    def write_kv(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Write the keys and values that layer `index` (from 0) makes of its input, nothing else.

        `step`, from `start_step` or `resume`, says where the tokens stand.
        """

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm between the last layer and the head."""
        return self.adapter.final_norm(hidden)

    def head(self, normed: Tensor) -> Tensor:
        """Return the logits `[..., V]` of normed states."""
        return self.adapter.head(normed)

    def keep(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[row]` tokens entered since the last call; forget the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""

    def refresh(self) -> None:  # noqa: B027
        """Notice what was done to the model's weights between two generations."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory of the cache."""


def make_engine(model: PreTrainedModel, fused: bool = True) -> Engine:
    """Return an engine that gives the model's own logits, or refuse the model.

    The fused torch backend is used where `fused` and where the model's layout is known to it.
    """
    from deepenough.decoding.general_backend import GeneralEngine
    from deepenough.decoding.torch_backend import make_fused

    if hasattr(model, "decoding_engine"):
        raise UserError("The model decodes adaptively already: give the one it was made of.")
    adapter = adapt(model)
    _check_supported(adapter)
    if model.training:
        raise UserError("The model is in training mode, with dropout: call model.eval() first.")
    engine = (make_fused(adapter) if fused else None) or GeneralEngine(adapter)
    try:
        same = _gives_same_logits(engine)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{type(model).__name__} cannot be decoded layer by layer ({reason}): use its own "
            "generate()."
        ) from error
    if not same:
        raise UserError(
            f"{type(model).__name__} gives other logits layer by layer than as a whole, so it "
            "cannot be decoded this way: use its own generate()."
        )
    return engine


def row_lengths(ids_BT: Tensor, mask_BT: Tensor | None) -> list[int]:
    """Return the tokens of each prompt; padding may stand on either side, but not between."""
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


def _check_supported(adapter: Adapter) -> None:
    """Refuse models that cache anything else than all keys and values of all tokens."""
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
def _gives_same_logits(engine: Engine) -> bool:
    """Compare the logits of a short prompt, cached, with those of the model itself."""
    model: Any = engine.adapter.model
    size = model.config.get_text_config().vocab_size
    ids_BT = torch.arange(1, 11, device=model.device).view(2, 5).remainder(size)
    expected = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits[:, 2:]
    first_BD = engine.prefill(ids_BT[:, :3], None, capacity=5)
    step = engine.start_step(ids_BT[:, 3:])
    hidden_BTD = engine.run_layers(step, step.hidden, 0, engine.num_layers)
    found = engine.head(torch.cat([first_BD[:, None], engine.norm(hidden_BTD)], 1))
    # Sums are made in another order, and a few logits are large: relative to the largest.
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


class DecodingCosts:
    """FLOPs of decoding one token in closed form, a multiply-add counted as two.

    A layer costs two operations for each entry of its matrices and, for attention over `c` tokens,
    `4 * c * width`. Of a mixture of experts all matrices are counted. Norms and positional
    encodings are left out.
    """

    def __init__(self, adapter: Adapter) -> None:
        config = adapter.model.config.get_text_config()
        self.layers = [
            2.0 * sum(p.numel() for p in layer.parameters() if p.ndim > 1)
            for layer in adapter.layers
        ]
        heads = getattr(config, "num_attention_heads", None)
        head_width = getattr(config, "head_dim", None)
        self.attention_width = heads * head_width if heads and head_width else adapter.width
        kv_heads = getattr(config, "num_key_value_heads", None) or heads or 1
        self.keys = 4.0 * adapter.width * self.attention_width * kv_heads / (heads or 1)
        """FLOPs of the keys and values of one layer."""
        self.map = 2.0 * adapter.width**2
        self.head = 2.0 * config.vocab_size * adapter.width

    def token(self, context: int, first: int = 0, last: int | None = None) -> float:
        """Return the cost of layers `first + 1 ... last` for a token that sees `context` tokens."""
        chosen = self.layers[first:last]
        return sum(chosen) + 4.0 * context * self.attention_width * len(chosen)

    def filling(self, depth: int, kv_propagation: str) -> float:
        """Return the cost of the keys and values of the layers behind `depth` that a token skips.

        With `deferred`, they are computed by the layers themselves later, and cost nothing here.
        """
        if kv_propagation == "deferred":
            return 0.0
        mapped = self.map if kv_propagation == "shortcut" else 0.0
        return (len(self.layers) - depth) * (self.keys + mapped)
