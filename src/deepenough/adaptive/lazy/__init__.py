"""Lazy: Universal Transformers that update only what still changes (ACL 2022, long 208)."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from deepenough.adaptive.lazy.causal import LazyTransformerForCausalLM
from deepenough.adaptive.lazy.config import LazyTransformerConfig
from deepenough.adaptive.lazy.model import LazyTransformerForConditionalGeneration
from deepenough.adaptive.lazy.output import LazyEncoderOutput, LazyOutput
from deepenough.adaptive.lazy.transition import LazyTransition

AutoConfig.register(LazyTransformerConfig.model_type, LazyTransformerConfig)
AutoModelForSeq2SeqLM.register(LazyTransformerConfig, LazyTransformerForConditionalGeneration)
AutoModelForCausalLM.register(LazyTransformerConfig, LazyTransformerForCausalLM)

__all__ = [
    "LazyEncoderOutput",
    "LazyOutput",
    "LazyTransformerConfig",
    "LazyTransformerForCausalLM",
    "LazyTransformerForConditionalGeneration",
    "LazyTransition",
]
