"""A small model of the same class and config as a large one, to try out what would take too long.

`make_twin` keeps everything of a config but its sizes: few layers (one of each kind), few heads of
the same width, few experts, a small vocabulary. The lengths at which a model begins to compute
something else (a sliding window, the original length of a rotary scaling) become a few tokens, so
that a short text goes past them. Weights are random and no norm is the identity, so that a part
that is forgotten, or applied twice, shows.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

#: Tokens at which a twin begins to compute something else, and the most that it reads.
SWITCH, LONGEST = 6, 64
_VOCABULARY, _MOST_PARAMETERS = 64, 32_000_000
_SWITCHES = (
    r".*window(_size|_len)?|attention_chunk_size|original_max_position_embeddings|.*floor(_scale)?"
)
_LAYERS = r"(n|num|decoder|encoder)_((hidden|decoder|encoder)_)?layers?"
_HEADS = r"(n|num|decoder|encoder)_(attention_)?heads?|attention_heads"
_KV_HEADS = r"num_(key_value|kv)_heads"
_WIDTHS = r"hidden_size|d_model|n_embd|dim|emb_dim|embed(ding)?_(size|dim)|word_embed_proj_dim"
_SIZES = {
    r"(?!type|task_type).*vocab_size.*": _VOCABULARY,
    r".*experts_per_tok(en)?|(moe_)?top_?k|top_k_experts|moe_k": 2,
    r".*experts": 4,
    r"n_groups?|topk_group|num_expert_group": 1,
    r"(mamba_)?chunk_size": SWITCH,
    r".*(intermediate|ffn|inner|ff).*": 64,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions": LONGEST,
    r".*token_(id|index)": _VOCABULARY - 1,
}


def make_twin(model: PreTrainedModel) -> tuple[PreTrainedModel | None, list[int]]:
    """Return a small model like another, and the lengths at which that computes something else.

    The twin is in eval mode, on the CPU, and None if it cannot be built. Its `SWITCH` stands for
    all of these lengths.
    """
    switches: list[int] = []
    values = _small(model.config.to_dict(), switches)
    try:
        config = type(model.config).from_dict(values)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in type(model)(config).parameters())
        if size > _MOST_PARAMETERS:
            return None, sorted(switches)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = type(model)(config).float().eval().requires_grad_(False)
            _scatter(twin)
        twin.generation_config = GenerationConfig()  # no token ends a text
        if not config.is_encoder_decoder:
            twin(input_ids=torch.arange(1, SWITCH)[None])
    except Exception:  # configs and models refuse sizes in many ways
        return None, sorted(switches)
    return twin, sorted(switches)


def _small(values: Mapping[str, Any], switches: list[int]) -> dict[str, Any]:
    """Return the fields of a config with small sizes; note the switch points that were replaced."""

    def first(pattern: str, default: int) -> int:
        numbers = (v for n, v in values.items() if _is_number(v) and re.fullmatch(pattern, n))
        return next(numbers, default)

    heads, width, layers = first(_HEADS, 1), first(_WIDTHS, 0), first(_LAYERS, 0)
    kv_heads, few = first(_KV_HEADS, heads), min(heads, 4)
    # A width that is not that of all heads together is free, but for kernels that read 16 at once.
    unit = -(-width // heads // 16) * 16 if "head_dim" in values else width // heads
    kept = _kept_layers(values, layers)
    dynamic = "dynamic" in str(values.get("rope_parameters"))
    small = dict(values)
    for name, value in values.items():
        if name == "per_layer_config" and value:
            own = {int(layer): _small(fields, switches) for layer, fields in value.items()}
            small[name] = {new: own[old] for new, old in enumerate(kept) if old in own}
        elif isinstance(value, dict) and name not in ("id2label", "label2id"):
            small[name] = _small(value, switches)
        elif isinstance(value, list) and len(value) == layers:
            small[name] = [value[index] for index in kept]
        elif not _is_number(value):
            continue
        elif re.fullmatch(_KV_HEADS, name):
            small[name] = few if kv_heads == heads else min(kv_heads, 2)
        elif re.fullmatch(_HEADS, name):
            small[name] = few
        elif re.fullmatch(_WIDTHS, name) and heads > 1:
            small[name] = few * unit if value == width else value * few // heads
        elif re.fullmatch(_LAYERS, name):
            small[name] = min(value, len(kept))
        elif (value > 1 and re.fullmatch(_SWITCHES, name)) or (
            dynamic and name == "max_position_embeddings"
        ):
            switches.append(value)
            small[name] = min(value, SWITCH)
        else:
            sizes = (size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name))
            small[name] = min(value, next(sizes, value))
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
