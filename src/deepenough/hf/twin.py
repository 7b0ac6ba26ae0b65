"""A small model of the same class and config as a large one, to try out what would take too long.

`make_twin` keeps everything of a config but its sizes: few layers (one of each kind), few heads of
the same width, few experts, a small vocabulary. The lengths at which a model begins to compute
something else (a sliding window, the original length of a rotary scaling) become a few tokens, so
that a short text goes past them. Weights are random and no norm is the identity, so that a part
that is forgotten, or applied twice, shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

#: Tokens at which a twin begins to compute something else, and the most that it can read.
SWITCH, LONGEST = 6, 64
_VOCABULARY, _MOST_PARAMETERS = 64, 20_000_000
_SWITCHES = r".*window(_size|_len)?|.*chunk_size|original_max_position_embeddings|.*floor(_scale)?"
_SIZES: list[tuple[str, int]] = [
    (r"(?!type|task_type).*vocab_size.*", _VOCABULARY),
    (r".*experts_per_tok(en)?|(moe_)?top_?k|top_k_experts|moe_k", 2),
    (r".*experts", 4),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*(intermediate|ffn|inner|ff).*(size|dim|inner)?", 64),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions", LONGEST),
]
_HEADS, _KV_HEADS = r"(n|num|decoder|encoder)_(attention_)?heads?|attention_heads", r"num_(key_value|kv)_heads"
_WIDTHS = r"hidden_size|d_model|n_embd|dim|emb_dim|embed(ding)?_(size|dim)|word_embed_proj_dim"
_LAYERS = r"(n|num|decoder|encoder)_(hidden_)?layers?"


def switch_points(config: PreTrainedConfig) -> list[int]:
    """Return the lengths in tokens at which a model of this config may compute something else."""
    return sorted(set(_switches(config.get_text_config().to_dict())))


def _switches(values: Mapping[str, Any]) -> Iterator[int]:
    dynamic = "dynamic" in str(values.get("rope_parameters"))
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _switches(value)
        elif _is_number(value) and value > 1 and re.fullmatch(_SWITCHES, name):
            yield value
        elif dynamic and name == "max_position_embeddings":
            yield value


def make_twin(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a small model like another, in eval mode, on the CPU; None if it cannot be built."""
    try:
        config = type(model.config).from_dict(_small(model.config.to_dict()))
        with torch.device("meta"):
            if sum(p.numel() for p in type(model)(config).parameters()) > _MOST_PARAMETERS:
                return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = type(model)(config).float().eval().requires_grad_(False)
            _scatter(twin)
        twin.generation_config = GenerationConfig()  # no token ends a text
        twin(input_ids=torch.arange(1, SWITCH)[None])
    except Exception:  # configs refuse sizes in many ways
        return None
    return twin


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with small sizes."""
    one = {name: value for name, value in values.items() if _is_number(value)}
    heads = next((v for n, v in one.items() if re.fullmatch(_HEADS, n)), 1)
    kv_heads = next((v for n, v in one.items() if re.fullmatch(_KV_HEADS, n)), heads)
    width = next((v for n, v in one.items() if re.fullmatch(_WIDTHS, n)), 0)
    layers = next((v for n, v in one.items() if re.fullmatch(_LAYERS, n)), 0)
    few = min(heads, 4)
    few_kv = few if kv_heads == heads else min(kv_heads, 2)
    # A width that is not that of all heads together is free, but for kernels that read 16 at once.
    unit = -(-width // heads // 16) * 16 if "head_dim" in values else width // heads
    kept = _kept_layers(values, layers)
    dynamic = "dynamic" in str(values.get("rope_parameters"))
    small: dict[str, Any] = {}
    for name, value in values.items():
        small[name] = value
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            small[name] = _small(value)
        elif isinstance(value, list) and len(value) == layers:
            small[name] = [value[index] for index in kept]
        elif not _is_number(value):
            continue
        elif re.fullmatch(_KV_HEADS, name):
            small[name] = few_kv
        elif re.fullmatch(_HEADS, name):
            small[name] = few
        elif re.fullmatch(_WIDTHS, name) and heads > 1:
            small[name] = few * unit if value == width else value * few // heads
        elif re.fullmatch(_LAYERS, name):
            small[name] = len(kept) if value == layers else min(value, len(kept))
        elif name.endswith(("token_id", "token_index")):
            small[name] = min(value, _VOCABULARY - 1)
        elif value > 1 and re.fullmatch(_SWITCHES, name):
            small[name] = min(value, SWITCH)
        elif dynamic and name == "max_position_embeddings":
            small[name] = SWITCH
        else:
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)
            small[name] = min(value, size)
    return small


def _kept_layers(values: Mapping[str, Any], layers: int) -> list[int]:
    """Return the first layer of each kind, by all lists that have an entry for each layer."""
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == layers]
    kinds = {str([each[index] for each in lists]): index for index in reversed(range(layers))}
    first = sorted(kinds.values())
    return first if len(first) > 1 else list(range(min(layers, 2)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@torch.no_grad()
def _scatter(model: nn.Module) -> None:
    """Draw weights under which every part of a model matters and no two logits are near."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            spread = 1.5 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.2
            spread = 1.0 if isinstance(module, nn.Embedding) else spread
            base = 0.0 if weight.ndim > 1 else weight
            weight.copy_(base + spread * torch.randn_like(weight))
