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

Three backends, the first that fits is used: `native_backend.py` (compiled code, for Llama-like
models on a CPU), `torch_backend.py` (layouts whose arithmetic is written out there, any device) and
`general_backend.py`, which calls the model's own layers or, where these cannot be called one by
one, the whole model. Sequences may keep different numbers of tokens, unless the model counts
padding as tokens or is run as a whole.

An engine is made for a model as it is; `ModelState` tells whether it is still the same.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from deepenough.artifacts import fingerprint
from deepenough.decoding.draft_price import PassTimes
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt, adapt_whole, is_deferred
from deepenough.hf.generation import has_usual_generate, inputs_of_generate, random_states
from deepenough.hf.intercept import others_hooks
from deepenough.hf.layouts import LAYOUTS
from deepenough.hf.twin import LONGEST, SWITCH, make_twin


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
        """The whole model, for what this engine does not take; see `suited_engine`."""

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


#: The fastest first.
BACKENDS = ("native", "torch", "general")


def make_engine(model: Any, backend: str | None = None, layered: bool = True) -> Engine:
    """Return an engine that gives the model's own logits, or refuse the model.

    By default the first of `BACKENDS` that fits the model and gives its logits. Without `layered`,
    a model that cannot be decoded layer by layer is run as a whole.
    """
    if backend not in (None, *BACKENDS):
        raise UserError(f"There is no backend {backend}: choose one of {', '.join(BACKENDS)}.")
    if hasattr(type(model), "decoding_engine"):
        raise UserError("The model decodes adaptively already: give the one it was made of.")
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{type(model).__name__} is not a model of transformers: give the one it wraps, which "
            "is model._orig_mod if it is compiled, model.module if it runs in parallel, and with "
            "PEFT model.get_base_model(), where LoRA layers are in it but no learned prompts."
        )
    if backend in (None, "native") and is_deferred(model) and is_untouched(model):
        deferred = _deferred_engine(model)
        if deferred is not None:
            return deferred
    _check_untouched(model, model.base_model)
    if model.training or model.base_model.training:
        raise UserError("The model is in training mode, with dropout: call model.eval() first.")
    try:
        return _layered_engine(model, backend)
    except UserError:
        if layered or backend not in (None, "general"):
            raise
        return _whole_engine(model)


def suited_engine(engine: Engine, tokens: Sequence[int], new_tokens: int) -> Engine:
    """Return an engine for prompts of so many tokens: the one given, or else the whole model."""
    limit = engine.adapter.limit
    fits = limit is None or max(tokens) + new_tokens <= limit
    if fits and (engine.ignores_padding or len(set(tokens)) == 1):
        return engine
    engine.release()
    if engine.whole is None:
        engine.whole = _whole_engine(engine.adapter.model)
    return engine.whole


def _layered_engine(model: Any, backend: str | None) -> Engine:
    """Return an engine that runs a model layer by layer, or refuse the model."""
    adapter = adapt(model)
    _check_supported(adapter)
    backends = BACKENDS if backend is None else (backend,)
    adapter.limit, takes_padding = _tried_on_twin(adapter, backends)
    engine = _new_engine(adapter, backends)
    try:
        while not (same := _gives_same_logits(engine)):
            others = backends[backends.index(engine.backend) + 1 :]
            if not others:
                break
            engine = _new_engine(adapter, others)
    except _FAILURES as error:
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
    if takes_padding is None:
        takes_padding = not _difference(engine, _FEW, padded=True)
    engine.ignores_padding = takes_padding
    engine.release()
    return engine


def _deferred_engine(model: Any) -> Engine | None:
    """Return a native engine that reads a deferred model's weights from disk; None if none fits.

    What cannot be compared then, the model's own logits, is compared with a small model's.
    """
    layout = LAYOUTS.get(model.config.model_type)
    native: Any = importlib.import_module("deepenough.decoding.native_backend")
    if layout is None or not native.fits(adapter := Adapter(model, layout)):
        return None
    adapter.limit, takes_padding = _tried_on_twin(adapter, ("native",))
    if takes_padding is None:
        return None
    engine: Engine = native.make(adapter)
    engine.ignores_padding = takes_padding
    return engine


def _whole_engine(model: Any) -> Engine:
    """Return an engine that runs a model as a whole, or refuse the model.

    How many tokens a pass may take is tried on a small model of the same config; that it gives the
    model's own logits, on the model itself.
    """
    general: Any = importlib.import_module("deepenough.decoding.general_backend")
    name = type(model).__name__
    adapter = adapt_whole(model)
    writes = adapter.kind == "causal" or model.config.is_encoder_decoder
    if not writes or not model.can_generate():
        raise UserError(
            f"{name} does not generate text: give a causal language model (AutoModelForCausalLM) "
            "or an encoder-decoder (AutoModelForSeq2SeqLM)."
        )
    if not has_usual_generate(model):
        raise UserError(
            f"{name} has a generate() of its own, which decoding cannot follow: use it."
        )
    engine = general.WholeModelEngine(adapter)
    for pace in _tried_paces(engine):
        engine.pace = pace
        problem = _difference(engine, _FEW, padded=False)
        if not problem:
            engine.release()
            return engine  # type: ignore[no-any-return]
    raise UserError(
        f"{name} cannot be run as its generate() runs it ({problem}): use its own generate()."
    )


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


def _tried_paces(engine: Any) -> list[Pace]:
    """Return the paces of a model that were not found wrong on a small one of the same config."""
    key = _trial_key(engine.adapter.model, "whole")
    if key not in _trials:
        twin, switches = make_twin(engine.adapter.model)
        # Without a small model nothing is known of several tokens behind a switch point.
        paces, first = Pace.possible(switches), 2 if switches else 0
        if twin is not None:
            small = type(engine)(Adapter(twin, engine.adapter.layout))
            tokens = min(3 * SWITCH, (small.max_length or LONGEST) - _PROMPT)
            for number, pace in enumerate(Pace.possible([SWITCH] if switches else [])):
                small.pace, first = pace, number
                if not _difference(small, tokens, padded=False):
                    break
        _trials[key] = paces[first:]
    found: list[Pace] = _trials[key]
    return found


def _new_engine(adapter: Adapter, backends: Sequence[str]) -> Engine:
    """Return an engine of the first backend that fits the model."""
    for name in backends:
        backend = importlib.import_module(f"deepenough.decoding.{name}_backend")
        engine: Engine | None = backend.make(adapter)
        if engine is not None:
            return engine
    raise UserError(
        f"The {backends[0]} backend does not know {type(adapter.model).__name__} in this form: "
        "leave the backend open."
    )


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


def _extends_positions(model: Any) -> bool:
    """Return whether a model stretches its positions for texts that are longer than it knows."""
    return "dynamic" in str(getattr(model.config.get_text_config(), "rope_parameters", None))


def _check_untouched(model: Any, *modules: nn.Module) -> None:
    """Refuse a model with something around all of its layers."""
    compiled = (each._compiled_call_impl or hasattr(each, "_orig_mod") for each in model.modules())
    if any(compiled) or not all(map(is_untouched, (model, *modules))):
        raise UserError(
            f"{type(model).__name__} has a hook around all of its layers, or runs another forward "
            "(torch.compile, accelerate), which decoding layer by layer would pass by: remove it, "
            "or use the model's own generate()."
        )


def _check_supported(adapter: Adapter) -> None:
    """Refuse models that cache anything else than keys and values of tokens, layer by layer."""
    model: Any = adapter.model
    name = type(model).__name__
    _check_untouched(model, adapter.trunk)
    if adapter.kind != "causal":
        raise UserError(
            f"{name} does not generate text: give a causal language model (AutoModelForCausalLM)."
        )
    if adapter.trunk.training:
        raise UserError("The model is in training mode, with dropout: call model.eval() first.")
    if len(set(adapter.layers)) < adapter.num_layers:
        raise UserError(f"{name} applies one layer several times, which decoding does not support.")
    if not model._supports_default_dynamic_cache():
        raise UserError(f"{name} has a cache of its own kind, which decoding does not support.")
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if others := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        raise UserError(
            f"{name} keeps {', '.join(sorted(kind.__name__ for kind in others))} in its cache, "
            "and layer by layer attention alone is decoded: use speculate(), which runs it whole."
        )


@torch.no_grad()
def _gives_same_logits(engine: Engine) -> bool:
    """Compare the logits of a short prompt and what follows with those of the model itself.

    It reads them in the same two pieces: in half precision others would be rounded otherwise.
    """
    model: Any = engine.adapter.model
    ids_BT = _token_rows(model)
    mask_BT = torch.ones_like(ids_BT)
    prompt = model(input_ids=ids_BT[:, :3], attention_mask=mask_BT[:, :3], use_cache=True)
    cache = prompt.past_key_values
    after = model(input_ids=ids_BT[:, 3:], attention_mask=mask_BT, past_key_values=cache)
    first_BD = engine.prefill(ids_BT[:, :3], None, capacity=5)
    same = _is_close(engine.head(first_BD), prompt.logits[:, 2])
    return same and _is_close(_next_logits(engine, ids_BT[:, 3:]), after.logits)


#: What models raise when they are called otherwise than they expect.
_FAILURES = (
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError),
)
#: Tokens of the prompts that are tried, and how many follow them where a pass takes long.
_PROMPT, _FEW = 4, 3
#: What was found out with twins, by class and config.
_trials: dict[tuple[Any, ...], Any] = {}


def _tried_on_twin(adapter: Adapter, backends: Sequence[str]) -> tuple[int | None, bool | None]:
    """Return up to how many tokens a model is decoded as by itself, and whether padded batches are.

    Tried on a small model of the same config, past every length at which it begins to compute
    something else. Where it differs there, or cannot be built, the limit is the first such length;
    None is no limit. Without such a model nothing is known of padding, which is None, too.
    """
    model: Any = adapter.model
    key = _trial_key(model, *backends)
    if key in _trials:
        return _trials[key]
    twin: Any
    twin, switches = make_twin(model)
    limits = [None, switches[0]] if switches else [None]
    found: tuple[int | None, bool | None] = limits[-1], None
    problem = ""
    for limit in limits if twin else ():
        small = Adapter(twin, adapter.layout)
        small.limit = None if limit is None else SWITCH
        engine = _new_engine(small, backends)
        tokens = min(3 * SWITCH, (engine.max_length or LONGEST) - _PROMPT)
        problem = _difference(engine, tokens, padded=False)
        if not problem:
            found = limit, not _difference(engine, tokens, padded=True)
            break
    if problem:
        raise UserError(
            f"A small model of the same kind as {type(model).__name__} cannot be decoded layer by "
            f"layer ({problem}): use the model's own generate()."
        )
    return _trials.setdefault(key, found)


def _trial_key(model: Any, *how: str) -> tuple[Any, ...]:
    return (type(model), fingerprint(model.config), model.config._attn_implementation, *how)


@torch.no_grad()
def _difference(engine: Engine, new_tokens: int, padded: bool) -> str:
    """Return how an engine's logits differ from those of the model's `generate`; "" if they do not.

    Three tokens are entered in each pass, of which a sequence keeps one or two.
    """
    model: Any = engine.adapter.model
    ids_BT = _token_rows(model)[: 1 + padded, :_PROMPT]
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1:, :2] = 0
    given: dict[str, Any] = {"inputs": ids_BT, "attention_mask": mask_BT}
    if model.main_input_name != "input_ids":
        given = {"encoder_outputs": random_states(model, len(ids_BT))}
    config = GenerationConfig(pad_token_id=0, decoder_start_token_id=int(ids_BT[0, 0]))
    usual, model.generation_config = model.generation_config, config
    options: Any = {"max_new_tokens": new_tokens, "return_dict_in_generate": True}
    made: Any
    try:
        made = GenerationMixin.generate(model, **given, output_logits=True, **options)
        expected_BNV, tokens_BC = torch.stack(made.logits, 1), F.pad(made.sequences, (0, 4))
        if not engine.layered:
            ids_BT, engine.inputs = inputs_of_generate(model, **given)
        prompt = ids_BT.shape[1]
        state_BD = engine.prefill(ids_BT, mask_BT if padded else None, tokens_BC.shape[1])
        if not _is_close(engine.head(state_BD), expected_BNV[:, 0]):
            return "the logits after the prompt are others"
        kept, passes = [0] * len(ids_BT), 0
        while max(kept) < expected_BNV.shape[1] - 1:
            most = min(3, engine.pass_limit() or 3)
            lines = [row[prompt + n :][:most] for row, n in zip(tokens_BC, kept, strict=True)]
            for row, found_TV in enumerate(_next_logits(engine, torch.stack(lines))):
                own_TV = expected_BNV[row, kept[row] + 1 :][:most]
                if not _is_close(found_TV[: len(own_TV)], own_TV):
                    return f"the logits after {prompt + kept[row] + 1} tokens are others"
            counts = [min(most, 1 + (passes + row) % 2) for row in range(len(kept))]
            engine.keep(counts)
            kept, passes = [n + more for n, more in zip(kept, counts, strict=True)], passes + 1
    except _FAILURES as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.generation_config = usual
    return ""


def _next_logits(engine: Engine, tokens_BT: Tensor) -> Tensor:
    step = engine.start_step(tokens_BT)
    hidden_BTD = engine.run_layers(step, step.hidden, 0, engine.num_layers)
    return engine.head(engine.norm(hidden_BTD))


def _token_rows(model: Any) -> Tensor:
    """Return two rows of five tokens from the middle of the vocabulary, where words are."""
    size = model.config.get_text_config().vocab_size
    places = torch.arange(10, device=model.device) * max(size // 31, 1)
    return (size // 3 + places).view(2, 5).remainder(size)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits are the same but for rounding, relative to the largest."""
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 3e-2
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
            for layer in adapter.skeleton.layers
        ]
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
        chosen = self.layers[first:last]
        return sum(chosen) + 4.0 * context * self.attention_width * len(chosen)

    def filling(self, depth: int, kv_propagation: str) -> float:
        """Return the cost of the keys and values of the layers behind `depth` that a token skips.

        The first of them takes the state as it is. With `deferred`, they are computed by the layers
        themselves, at the cost of the later token that takes this one along.
        """
        if kv_propagation == "deferred":
            return 0.0
        skipped = len(self.layers) - depth
        maps = skipped - 1 if kv_propagation == "shortcut" else 0
        return skipped * self.keys + maps * self.map
