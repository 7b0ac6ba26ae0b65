"""The engine for a model: fused where its layout is written out, general otherwise, or refused."""

from __future__ import annotations

from transformers import PreTrainedModel

from deepenough.decoding import gpt2_layout, llama_layout
from deepenough.decoding.engine import Engine, agrees, check_cache
from deepenough.decoding.general import GeneralEngine
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt


def make_engine(model: PreTrainedModel, fused: bool = True) -> Engine:
    """An engine that gives the model's own logits; `fused=False` uses the model's own layers."""
    adapter = adapt(model)
    check_cache(adapter)
    if model.training:
        raise UserError("The model is in training mode, with dropout: call model.eval() first.")
    if fused and llama_layout.fits(adapter):
        engine: Engine = llama_layout.LlamaEngine(adapter)
    elif fused and gpt2_layout.fits(adapter):
        engine = gpt2_layout.GPT2Engine(adapter)
    else:
        engine = GeneralEngine(adapter)
    try:
        same = agrees(engine)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{type(model).__name__} cannot be decoded layer by layer ({reason}): use its own "
            "generate()."
        ) from error
    if not same:
        raise UserError(
            f"{type(model).__name__} gives other logits layer by layer than as a whole, so that it "
            "cannot be decoded this way: use its own generate()."
        )
    return engine
