"""Tiny models with random weights, of every text architecture of the installed transformers.

A config is made small by the names of its fields: widths, heads, layers, vocabulary, experts. What
that does not make buildable has a row in `OVERRIDES`. `variants_of` says which of its switches a
config has (sliding window, grouped keys, rotary scaling, ...) and turns each of them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, LAYERS, LONGEST = 64, 32, 4, 8, 4, 64
#: Shorter than the sequences that are run, so that they go past it.
SWITCH = 8
MOST_PARAMETERS = 8_000_000

#: Sizes by the names of fields, the first that matches.
SIZES: list[tuple[str, int]] = [
    (r"qk_head_dim|type_vocab_size|task_type_vocab_size|n_langs|num_labels", -1),
    (r".*vocab_size.*|.*byte_group_vocab", VOCABULARY),
    (r".*num_key_value_heads|num_kv_heads|num_query_groups", HEADS),
    (r"(n|num|decoder|encoder|swa_num|mamba_num|mamba_n|n_mamba)_(.*_)?heads?", HEADS),
    (r"attention_heads|index_n_heads|linear_num_heads|linear_num_(key|value)_heads", HEADS),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 16),
    (r"attention_head_dim", 16),
    (r".*head_dim|d_kv|d_head|dim_head|kv_channels|rotary_dim|attention_head_size", HEAD_WIDTH),
    (r"num_kv_shared_layers|first_k_dense_replace|num_dense_layers|num_decoder_layers", 1),
    (r"num_(nextn_predict|mtp)_layers|inner_group_num|num_hidden_groups", -1),
    (r"(n|num|decoder|encoder)_(.*_)?layers?|num_layers_per_stack", LAYERS),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|ffn_hidden_size|expert_ffn_hidden_size", 48),
    (r"d_ff|dff|dim_ff|d_inner|hidden_dim|feed_forward_size|n_inner|mamba_d_ssm", 64),
    (r"hidden_size_per_layer_input|.*lora_rank|laurel_rank|hc_lowrank|embedding_rank", 16),
    (r"router_hidden_size|adapter_rank|entity_emb_size|prompt_mid_dim|dim_model_base", 16),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|embedding_dim|d_latents", WIDTH),
    (r"(input|output)_embedding_size|word_embed_proj_dim|attention_hidden_size|lru_width", WIDTH),
    (r"backbone_hidden_size|pooler_hidden_size|prediction_head_size|ple_embed_dim", WIDTH),
    (r"true_hidden_size|intra_bottleneck_size|shape_embed_dim|pronunciation_embed_dim", WIDTH),
    (r"num_.*experts_per_tok(en)?|top_k_experts|moe_topk|moe_k", 2),
    (r"(n|num)_shared_experts|moe_num_shared_experts", 1),
    (r".*experts|zero_expert_num", 4),
    (r"n_group|topk_group|num_expert_group|o_groups", 1),
    (r"(mamba_)?n_?groups", 1),
    (
        r"max_(position_embeddings|seq_len|target_positions)|n_positions|n_ctx|context_length",
        LONGEST,
    ),
    (r"model_max_length|position_bias_max_distance|rel_extent", LONGEST),
    (
        r".*sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention",
        LONGEST,
    ),
    (r"local_attention_window_len|window_size|log_scaling_n_floor|floor_scale", LONGEST),
    (r"keep_window_size", LONGEST),
    (r"original_max_position_embeddings", LONGEST),
    (r"index_topk|index_topk_blocks|num_centroids", 16),
    (r"state_size|mamba_d_state|ssm_state_size|time_step_rank|mamba_dt_rank", 8),
    (r"(mamba_)?chunk_size|max_inference_chunksize", 8),
    (r"layer_group_size|global_attn_every_n_layers|_?sliding_window_pattern", 2),
    (r"no_rope_layer_interval|attn_layer_period|layer_pattern", 2),
    (r"attn_layer_offset|moe_layer_end_index", 1),
    (r"image_size", 16),
    (r"num_latents|num_landmarks|num_hash", 8),
]
#: Text that is not: the fields that name other inputs are made small in the same way.
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
#: What the names of the fields do not tell.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_WIDTH,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": ROPE["rope_parameters"],
            "sliding_attention": ROPE["rope_parameters"],
        },
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": None, "head_dim": 16},
    "esm": {"vocab_size": VOCABULARY},
    "funnel": {"block_sizes": [2, 2]},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": HEAD_WIDTH, **ROPE},
    "hunyuan_v1_moe": {"head_dim": HEAD_WIDTH, **ROPE},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longformer": {"attention_window": [SWITCH] * LAYERS},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "ministral": {"head_dim": HEAD_WIDTH, **ROPE},
    "mistral4": {"qk_rope_head_dim": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": HEADS},
    "neomme": {"head_dim": 16},
    "nystromformer": {"segment_means_seq_len": 64, "num_landmarks": 64},
    "qwen4_exp": QSA,
    "qwen4_exp_text": QSA,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


PAIR = "encoder-decoder"
#: Those that read text, and those that read speech and write text.
PAIR_TABLES = {
    AutoModelForSeq2SeqLM: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForSpeechSeq2Seq: modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}


def model_types() -> dict[str, list[str]]:
    """Return the text types of the installed transformers, each with the kinds it comes in."""
    tables = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        PAIR: [name for table in PAIR_TABLES.values() for name in table if _is_pair(name)],
    }
    names = {*ALL_TYPES, *tables[PAIR]}
    found = {name: [kind for kind in tables if name in tables[kind]] for name in names}
    encoders = {
        *tables["masked"],
        *modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    for name, kinds in found.items():
        if (name in encoders and "causal" not in kinds) or "masked" in kinds:
            kinds.append("encoder")
    return {name: kinds for name, kinds in sorted(found.items()) if kinds}


def _is_pair(model_type: str) -> bool:
    """Return whether the config of a type is that of an encoder and a decoder."""
    return bool(getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", True)) or (
        model_type in ("encoder-decoder", "speech-encoder-decoder")
    )


ALL_TYPES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
)


# -- configs ---------------------------------------------------------------------------------------


def tiny_config(model_type: str, kind: str, **changes: Any) -> Any:
    """Return a small config; `changes` go to the config of the text."""
    config_class = CONFIG_MAPPING[model_type]
    own = OVERRIDES.get(model_type, {})
    try:
        values = config_class().to_dict()
    except Exception:
        values = {}
    small = shrunk(values)
    if kind == "causal" and "is_decoder" in values:
        small["is_decoder"] = True
        if values.get("is_encoder_decoder"):
            small["is_encoder_decoder"] = False
    inside = "text_config" if isinstance(small.get("text_config"), dict) else None
    target = small[inside] if inside else small
    for name, value in {**own, **changes}.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            target[name] = {**target[name], **value}
        else:
            target[name] = value
    config = config_class(**small)
    config.architectures = config.architectures or []
    return config


def shrunk(values: dict[str, Any], layers: int | None = None) -> dict[str, Any]:
    """Return the fields of a config that have to be small, or that lead to such."""
    layers = layers or next((values[n] for n in ("num_hidden_layers", "n_layer") if n in values), 0)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("id2label", "label2id", "transformers_version", "model_type", "dtype"):
            continue
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {**shrunk(value), "model_type": value["model_type"]}
        elif isinstance(value, list) and value and (len(value) == layers or name == "layer_types"):
            small[name] = _few(name, value)
        elif name.endswith(("token_id", "token_index")):
            if isinstance(value, int):
                small[name] = TOKENS.get(name, VOCABULARY - 1)
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            small[name] = TOKENS[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = _size(name)
            if size >= 0:
                small[name] = size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in values:
            small[name] = TOKENS[name]
    return small


def _size(name: str) -> int:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), -1)


def _few(name: str, values: list[Any]) -> list[Any]:
    """Return a list with an entry for each layer for as many as are kept, with all its kinds."""
    if isinstance(values[0], int) and not isinstance(values[0], bool) and _size(name) >= 0:
        return [_size(name)] * LAYERS
    kinds = list(dict.fromkeys(map(str, values)))
    chosen = [next(v for v in values if str(v) == kind) for kind in kinds]
    return [chosen[index % len(chosen)] for index in range(max(LAYERS, len(chosen)))][:LAYERS]


# -- variants --------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": SWITCH},
    "longrope": {
        "short_factor": [1.0] * (HEAD_WIDTH // 2),
        "long_factor": [1.0 + 0.7 * n for n in range(HEAD_WIDTH // 2)],
        "factor": 4.0,
        "original_max_position_embeddings": SWITCH,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": SWITCH,
    },
}
WINDOWS = (
    *("sliding_window", "attention_window_size", "local_attention", "window_size"),
    *("sliding_window_size", "keep_window_size", "local_attention_window_len"),
)
PARALLEL = ("use_parallel_residual", "parallel_attn", "new_decoder_architecture", "alibi")
NORMS = (
    *("do_layer_norm_before", "normalize_before", "pre_norm", "norm_after", "use_post_norm"),
    *("apply_residual_connection_post_layernorm", "normalization_type", "use_sandwich_norm"),
)
CAPS = ("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap")


def variants_of(model_type: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return the changes of a config that turn one of its switches each, by name."""
    found: dict[str, dict[str, Any]] = {"plain": {}}
    try:
        config = tiny_config(model_type, kind).get_text_config()
    except Exception:
        return found
    has = config.to_dict()
    window = {name: SWITCH - 2 for name in WINDOWS if name in has}
    if window:
        if "use_sliding_window" in has:
            window |= {"use_sliding_window": True, "max_window_layers": 2}
        found["window"] = window
    if "attention_chunk_size" in has:
        found["chunked"] = {"attention_chunk_size": SWITCH - 2}
    groups = next((n for n in ("num_key_value_heads", "num_kv_heads") if has.get(n)), None)
    if groups and kind == "causal" and not has.get("kv_lora_rank"):
        found |= {"gqa": {groups: 2}, "mqa": {groups: 1}}
    rope = has.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        for name, options in ROPES.items():
            theta = {"rope_theta": rope["rope_theta"] or 10_000.0}
            found[name] = {"rope_parameters": {**rope, **theta, "rope_type": name, **options}}
            if name == "dynamic":
                found[name]["max_position_embeddings"] = SWITCH
            elif "original_max_position_embeddings" in has and "original" in str(options):
                found[name]["original_max_position_embeddings"] = SWITCH
    if "tie_word_embeddings" in has:
        tied = bool(has["tie_word_embeddings"])
        found["untied" if tied else "tied"] = {"tie_word_embeddings": not tied}
    for name in (*PARALLEL, *NORMS):
        if isinstance(has.get(name), bool):
            found[f"{name}={not has[name]}"] = {name: not has[name]}
    caps = {name: 5.0 for name in CAPS if name in has}
    if caps:
        found["capped"] = caps
    return found


# -- models ----------------------------------------------------------------------------------------

CLASSES = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "encoder": AutoModel}


class NotBuilt(Exception):
    """A model of this type cannot be made small from its config alone; says why."""


def build(model_type: str, kind: str, **changes: Any) -> PreTrainedModel:
    """Return a tiny model in eval mode whose weights make it write more than one token."""
    try:
        config = tiny_config(model_type, kind, **changes)
        made_by = CLASSES.get(kind) or next(
            made_by for made_by, table in PAIR_TABLES.items() if model_type in table
        )
        with torch.device("meta"):
            size = sum(p.numel() for p in made_by.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"its smallest has {size:,} parameters")
        torch.manual_seed(0)
        model = made_by.from_config(tiny_config(model_type, kind, **changes))
        scatter(model)
        model = model.eval().requires_grad_(False).float()
        if hasattr(model, "generation_config"):  # without tokens that it forces or forbids
            start = 1 if kind == PAIR else None
            model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=start)
        if not config.is_encoder_decoder:
            ids = torch.arange(3, 15)[None]
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except NotBuilt:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise NotBuilt(f"{type(error).__name__}: {reason}") from error
    return model


@torch.no_grad()
def scatter(model: nn.Module) -> None:
    """Draw weights under which every part of a model matters and no two logits are near."""
    seen: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen or not weight.is_floating_point():
                continue
            seen.add(id(weight))
            if isinstance(module, nn.Embedding) and weight.ndim == 2:
                weight.copy_(torch.randn_like(weight))
            elif name == "weight" and isinstance(module, nn.Linear | Conv1D):
                fan_in = weight.shape[0 if isinstance(module, Conv1D) else 1]
                weight.copy_(1.5 * torch.randn_like(weight) / fan_in**0.5)
            elif weight.ndim == 3:
                weight.copy_(0.2 * torch.randn_like(weight))
            else:
                weight.add_(0.2 * torch.randn_like(weight))
