"""Lazy: Universal Transformers that update only what still changes (ACL 2022, long 208)."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from deepenough.lazy.causal import LazyTransformerForCausalLM
from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.model import LazyTransformerForConditionalGeneration
from deepenough.lazy.output import LazyEncoderOutput, LazyOutput
from deepenough.lazy.transition import LazyTransition

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
