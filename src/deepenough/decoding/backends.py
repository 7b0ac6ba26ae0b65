"""`make_engine`: the fastest backend that gives a model's own logits, or a refusal by name.

Nothing is believed of a model: the logits of a short prompt are compared with the model's own, and,
on a small model of the same config, those of longer texts, past every length at which it begins to
compute something else, alone and in a padded batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from deepenough.artifacts import fingerprint
from deepenough.decoding.engine import Engine, Pace, is_untouched
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt, adapt_whole, is_deferred
from deepenough.hf.generation import has_usual_generate, inputs_of_generate, random_states
from deepenough.hf.layouts import LAYOUTS
from deepenough.hf.twin import LONGEST, SWITCH, make_twin

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
        if engine.whole is not None:
            engine.whole.release()
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
