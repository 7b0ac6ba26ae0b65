"""A short hash that changes when a model's config or weights do.

All weights would take seconds to hash, and minutes for a large model; a few numbers of every tensor
show any training step. They are rounded to bfloat16, so that one model has one fingerprint whether
it is loaded in half or in full precision, and the config counts only where it departs from its
class's defaults, so that a default added by a newer library changes nothing.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

NUM_SAMPLES = 64
# Set by how a model is loaded, saved or asked, not by what it computes.
IGNORED = {
    *("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "tokenizer_class"),
}


def fingerprint(config: PreTrainedConfig, *modules: nn.Module) -> str:
    """16 hexadecimal digits for a config and the modules whose weights matter."""
    settings = {k: v for k, v in config.to_diff_dict().items() if k not in IGNORED}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for number, module in enumerate(modules):
        for name, weight in module.state_dict().items():
            digest.update(f"{number}.{name}{tuple(weight.shape)}".encode())
            digest.update(_samples(weight))
    return digest.hexdigest()[:16]


def _samples(weight: Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // NUM_SAMPLES)].to("cpu", torch.bfloat16)
    return bytes(chosen.contiguous().view(torch.uint8).numpy())
