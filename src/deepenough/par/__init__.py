"""PAR: choose the blocks of a language model (Pay Attention when Required, arXiv 2009.04534)."""

from transformers import AutoConfig, AutoModelForCausalLM

from deepenough.par.config import ParConfig
from deepenough.par.model import ParForCausalLM, ParOutput

AutoConfig.register("par", ParConfig)
AutoModelForCausalLM.register(ParConfig, ParForCausalLM)

__all__ = ["ParConfig", "ParForCausalLM", "ParOutput"]
