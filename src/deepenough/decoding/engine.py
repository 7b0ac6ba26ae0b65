"""`Engine`: a causal language model taken apart for decoding, with its KV cache.

The decoding loop, the drafters and early exit see nothing of a model but this contract:

    prefill(prompts)               -> normed state of every sequence's last token
    step = start_step(tokens)      the tokens that follow what is committed, as embeddings
    run_layers(step, h, i, j)      -> h_j from h_i: layers i+1 ... j, extending the cache
    run_through(step, h)           -> h_L, keeping the inputs of some layers for drafters
    norm(h), head(normed)          -> logits
    keep(counts)                   commit the first tokens of each sequence, roll back the rest
    keep_prefix(count)             go on from the first tokens of the text before

and, where some sequences leave at an earlier layer than others, `resume` for those that continue
and `write_kv` for those that have left.

Of three backends, `backends.py` takes the first that fits: `native_backend.py` (compiled code, for
Llama-like models on a CPU), `torch_backend.py` (layouts whose arithmetic is written out there, any
device) and `general_backend.py`, which calls the model's own layers or, where these cannot be
called one by one, the whole model. Sequences may keep different numbers of tokens, unless the model
counts padding as tokens or is run as a whole.

An engine is made for a model as it is; `ModelState` tells whether it is still the same.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepenough.decoding.draft_price import PassTimes
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, is_deferred
from deepenough.hf.intercept import others_hooks
from deepenough.shortcut.pruned_model import LinearPart


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

    backend: str
    """Its name among `BACKENDS`."""
    takes_groups: bool = True
    """Whether `resume` takes several tokens of a sequence at once."""
    ignores_padding: bool = True
    """Whether sequences may differ in length: found by trying it, when an engine is made."""
    layered: bool = True
    """Whether there are states to be had between layers; else the states are logits."""

    tokens_at_once: int = 2048
    """Most tokens of a prompt that are read in one pass behind a beginning that is cached."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.num_layers = adapter.num_layers
        longest = None if _extends_positions(adapter.model) else adapter.max_length
        self.max_length = min(filter(None, (longest, adapter.limit)), default=None)
        """Longest sequence in tokens, or None where there is no limit."""
        self.lengths: list[int] = []
        """Committed tokens of each sequence."""
        self.capacity = 0
        """Tokens of each sequence that the cache holds at most."""
        self.prompt: list[Tensor] = []
        """`h_L` of each sequence's prompt, `[T, D]`, as `prefill` has left it."""
        self.layers_read: tuple[int, ...] = ()
        """Layers whose inputs `run_through` keeps, for drafters that read them."""
        self.layer_inputs = torch.empty(0)
        """Those of the last pass, `h_i` of each layer `i` side by side, `[B, T, 3 D]` of three."""
        self.prompt_inputs: list[Tensor] = []
        """Those of each sequence's prompt, `[T, 3 D]` of three, as `prefill` has left them."""
        self.pass_times = PassTimes()
        """What passes took lately, by the number of rows."""
        self.inputs: dict[str, Any] = {}
        """What else transformers would call the model with: set before `prefill`."""
        self.whole: Engine | None = None
        """The whole model, for what this engine does not take; see `backends.suited_engine`."""

    @abstractmethod
    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Start a batch and return the normed state of every prompt's last token, `[B, D]`.

        Prompts may be padded on either side, where `mask_BT` is 0; None if there is no padding. The
        cache will hold `capacity` tokens of each sequence.
        """

    @abstractmethod
    def start_step(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """Embed the next tokens of every sequence, behind `offset` tokens not yet committed."""

    def pass_limit(self) -> int | None:
        """Return how many tokens of each sequence the next pass may take, None for any number."""
        return None

    @abstractmethod
    def run_layers(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """Return `h_last` from `h_first`; each layer in between reads and extends the cache."""

    def run_through(self, step: Step, hidden_BTD: Tensor, first: int = 0) -> Tensor:
        """Return `h_L` from `h_first`, and keep the inputs of the layers `layers_read`."""
        found = {}
        for layer in sorted({*self.layers_read}):
            hidden_BTD = self.run_layers(step, hidden_BTD, first, layer)
            found[layer], first = hidden_BTD, layer
        kept = [found[layer] for layer in self.layers_read]
        self.layer_inputs = torch.cat(kept, -1) if kept else hidden_BTD[..., :0]
        return self.run_to_end(step, hidden_BTD, first)

    def run_to_end(self, step: Step, hidden_BTD: Tensor, first: int) -> Tensor:
        """Return `h_L` from `h_first`, for a caller who wants the logits next."""
        return self.run_layers(step, hidden_BTD, first, self.num_layers)

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

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[..., D]`."""
        embedding: Any = self.adapter.model.get_input_embeddings()
        found: Tensor = embedding(tokens)
        return found

    def draft_head(self, head: Any) -> Any:
        """Return a draft head as this backend runs it, None for as torch does."""
        return None

    def exit_maps(self, shortcuts: Any, vocab: Tensor | None) -> Any:
        """Return maps and a head of some tokens as this backend runs them, None as torch does."""
        return None

    def best(self, logits: Tensor) -> Tensor | None:
        """Return the tokens of the largest logits if they are known already, else None."""
        return None

    @cached_property
    def costs(self) -> DecodingCosts:
        """What a token costs."""
        return DecodingCosts(self.adapter)

    def keep(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[row]` tokens entered since the last call; forget the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""

    def keep_prefix(self, count: int, capacity: int) -> bool:
        """Go on from the first `count` tokens of the one sequence that is cached, with more room.

        Returns False where that cannot be done, and the prompt has to be read anew.
        """
        return False

    @abstractmethod
    def release(self) -> None:
        """Free the memory of the cache."""


class Pace(NamedTuple):
    """How many tokens a pass over a whole model may take."""

    borders: tuple[int, ...] = ()
    """Lengths that no pass may cross, because the model computes something else behind them."""
    single_from: int | None = None
    """Length from which on a pass takes one token, as in `generate`; None for none."""

    @classmethod
    def possible(cls, switches: Sequence[int]) -> list[Pace]:
        """Return the paces for a model with these switch points, the fastest first."""
        some = [cls(borders=tuple(switches)), cls(single_from=switches[0])] if switches else []
        return [cls(), *some, cls(single_from=0)]

    def limit(self, length: int) -> int | None:
        """Return how many tokens the next pass over a sequence may take, None for any number."""
        single = [] if self.single_from is None else [self.single_from]
        ends = [*single, *(border for border in self.borders if border > length)]
        return max(1, min(ends) - length) if ends else None


@dataclass(init=False)
class ModelState:
    """What differs between two looks at a model if it was changed in between.

    Seen are replaced modules and parameters (adapters, quantisation), values (torch counts every
    write but those through `.data`), hooks, training mode, moves to another device or dtype, and
    numbers such as a norm's epsilon. Buffers that are not saved are left out: models compute them.
    """

    content: list[Any]
    """Identities, classes, hooks and numbers of modules; identities and versions of tensors."""
    places: list[Any]
    """Memory, dtype and device of each tensor."""
    kept: list[Any] = field(compare=False)
    """All modules and tensors, so that no other gets the identity of one that was deleted."""

    def __init__(self, model: nn.Module) -> None:
        self.content, self.places, self.kept = [], [], []
        for module in [model] if is_deferred(model) else model.modules():
            own = vars(module)
            self.content += [id(module), type(module), own["training"], own.get("forward")]
            self.content += [module._compiled_call_impl, *others_hooks(module)]
            self.content += [value for value in own.values() if type(value) is float]
            temporary = module._non_persistent_buffers_set
            saved = [buffer for name, buffer in module._buffers.items() if name not in temporary]
            tensors = [each for each in (*module._parameters.values(), *saved) if each is not None]
            for tensor in tensors:
                self.content += [id(tensor), 0 if tensor.is_inference() else tensor._version]
                address = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
                self.places.append((address, tensor.dtype, tensor.device))
            self.kept.extend((module, *tensors))


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module runs as its class says: without hooks or another `forward`."""
    replaced = "forward" in vars(module) or module._compiled_call_impl is not None
    return not replaced and not others_hooks(module)


def row_lengths(ids_BT: Tensor, mask_BT: Tensor | None) -> list[int]:
    """Return the tokens of each prompt; padding may stand on either side, but not between."""
    batch, width = ids_BT.shape
    if width == 0:
        raise UserError("The prompt is empty: give at least one token, such as the model's BOS.")
    if mask_BT is None:
        return [width] * batch
    mask_BT = mask_BT.bool()
    lengths: list[int] = mask_BT.sum(1).tolist()
    if 0 in lengths:
        row = lengths.index(0)
        raise UserError(f"The prompt of row {row} is empty: give at least one token in every row.")
    if bool((mask_BT[:, 1:] != mask_BT[:, :-1]).sum(1).gt(1).any()):
        raise UserError(
            "The attention mask leaves out tokens in the middle of a prompt: decoding takes "
            "prompts in one piece, padded on one side."
        )
    return lengths


def _extends_positions(model: Any) -> bool:
    """Return whether a model stretches its positions for texts that are longer than it knows."""
    return "dynamic" in str(getattr(model.config.get_text_config(), "rope_parameters", None))


def attends(adapter: Adapter, layer: int) -> bool:
    """Return whether a layer has attention, which pruning may have replaced or removed."""
    whole: Any = adapter.layers[layer]
    return not any(
        isinstance(each, LinearPart)
        for each in (whole, adapter.submodules(layer).get("attention", whole))
    )


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
            for layer in adapter.skeleton.layers
        ]
        self.attends = [attends(adapter.skeleton, layer) for layer in range(adapter.num_layers)]
        first = getattr(config, "per_layer_config", [config])[0]
        heads = getattr(first, "num_attention_heads", None)
        head_width = getattr(first, "head_dim", None)
        self.attention_width = heads * head_width if heads and head_width else adapter.width
        kv_heads = getattr(first, "num_key_value_heads", None) or heads or 1
        self.keys = 4.0 * adapter.width * self.attention_width * kv_heads / (heads or 1)
        """FLOPs of the keys and values of one layer."""
        self.map = 2.0 * adapter.width**2
        self.head = 2.0 * config.vocab_size * adapter.width

    def token(self, context: int, first: int = 0, last: int | None = None) -> float:
        """Return the cost of layers `first + 1 ... last` for a token that sees `context` tokens."""
        attending = sum(self.attends[first:last])
        return sum(self.layers[first:last]) + 4.0 * context * self.attention_width * attending

    def filling(self, depth: int, kv_propagation: str) -> float:
        """Return the cost of the keys and values of the layers behind `depth` that a token skips.

        The first of them takes the state as it is. With `deferred`, they are computed by the layers
        themselves, at the cost of the later token that takes this one along.
        """
        if kv_propagation == "deferred":
            return 0.0
        skipped = len(self.layers) - depth
        maps = skipped - 1 if kv_propagation == "shortcut" else 0
        return sum(self.attends[depth:]) * self.keys + maps * self.map
