"""Where an architecture keeps its layers, their parts, and its final norm: one row of paths each.

Only what differs between architectures is written here. How a model makes logits from the output of
its trunk is not: `heads.py` has the model do that itself. An architecture without a row is searched
by structure (`structure.py`), so a row is needed where the search would be wrong, and is wanted
where the parts of a block matter.

The parts of a block are what stands between its residual connections, so that each can be replaced
by another function of its input:

- attention: from the (normalised) hidden states to what is added to the stream, with the output
  projection, without residual or norm;
- feed-forward: likewise;
- norms: every norm on the block's own level, one by one. In a post-norm block (BERT) a norm reads
  the sum of the stream and the part before it.

Where a part is no module of its own but several in a row, its path is a tuple: it begins with the
input of the first and ends with the output of the last. In BERT, attention is `attention.self` and
then `attention.output.dense`; residual and norm, which follow inside `attention.output`, are left
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

Path = str | tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Dotted paths: to the trunk from `model.base_model`, to `layers`, `final_norm` and
    `projection` from the trunk, to a part of a block from the block."""

    layers: str | Callable[[Any], list[nn.Module]]
    """The list of layers, or a function from the trunk to the layers in the order they are applied,
    where one module may stand several times."""
    final_norm: str | None = None
    """The norm between the last layer and the head; absent in post-norm models."""
    trunk: str = ""
    """What the model with a head calls to get hidden states, where it is not `base_model`."""
    projection: str | None = None
    """A map at the end of the trunk, behind the final norm (OPT-350m); may be absent."""
    head: str | Callable[[PreTrainedModel, Tensor], Tensor] | None = None
    """A method or module of the model that makes logits of the trunk's output; None: found."""
    attention: Path = ()
    feed_forward: Path = ()
    norms: tuple[str, ...] = ()
    """Those that a model does not have are passed over; with no part named, all are searched."""


def _albert_layers(trunk: Any) -> list[nn.Module]:
    """Few layers applied often: consecutive applications share a group (arXiv 1909.11942)."""
    groups, times = trunk.encoder.albert_layer_groups, trunk.config.num_hidden_layers
    chosen = [groups[int(i / (times / len(groups)))] for i in range(times)]
    return [layer for group in chosen for layer in group.albert_layers]


_LLAMA = Layout(
    layers="layers",
    final_norm="norm",
    attention="self_attn",
    feed_forward="mlp",
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",  # Gemma 2; OLMo 2 has norms behind the parts alone
    ),
)

_BERT = Layout(
    layers="encoder.layer",
    attention=("attention.self", "attention.output.dense"),
    feed_forward=("intermediate", "output.dense"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)

LAYOUTS: dict[str, Layout] = {
    "gpt2": Layout(
        layers="h",
        final_norm="ln_f",
        attention="attn",
        feed_forward="mlp",
        norms=("ln_1", "ln_2"),
    ),
    "gpt_neox": Layout(
        layers="layers",
        final_norm="final_layer_norm",
        attention="attention",
        feed_forward="mlp",
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
    "opt": Layout(
        trunk="decoder",
        layers="layers",
        final_norm="final_layer_norm",
        projection="project_out",
        attention="self_attn",
        feed_forward=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
    ),
    # These two add the residual inside the module of the part, behind its last map.
    "bloom": Layout(
        layers="h",
        final_norm="ln_f",
        attention=("self_attention", "self_attention.dense"),
        feed_forward=("mlp", "mlp.dense_4h_to_h"),
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
    "mpt": Layout(
        layers="blocks",
        final_norm="norm_f",
        attention="attn",
        feed_forward=("ffn", "ffn.down_proj"),
        norms=("norm_1", "norm_2"),
    ),
    "roberta-prelayernorm": Layout(
        layers="encoder.layer",
        final_norm="LayerNorm",
        attention=("attention.self", "attention.output.dense"),
        feed_forward=("intermediate.dense", "output.dense"),
        norms=("attention.LayerNorm", "intermediate.LayerNorm"),
    ),
    "distilbert": Layout(
        layers="transformer.layer",
        attention="attention",
        feed_forward="ffn",
        norms=("sa_layer_norm", "output_layer_norm"),
    ),
    "albert": Layout(
        layers=_albert_layers,
        attention=("attention", "attention.dense"),
        feed_forward=("ffn", "ffn_output"),
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
    ),
    "modernbert": Layout(
        layers="layers",
        final_norm="final_norm",
        attention="attn",
        feed_forward="mlp",
        norms=("attn_norm", "mlp_norm"),
    ),
    "mpnet": Layout(
        layers="encoder.layer",
        attention="attention.attn",
        feed_forward=("intermediate", "output.dense"),
        norms=("attention.LayerNorm", "output.LayerNorm"),
    ),
    # deepenough's own; its norms are functions without weights.
    "par": Layout(
        layers="blocks",
        final_norm="norm",
        head="_logits",
        attention="attention",
        feed_forward="dense",
    ),
}
for _name in (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "smollm3", "olmo", "olmo2", "granite"),
    *("gemma", "gemma2", "gemma3_text", "phi3"),
):
    LAYOUTS[_name] = _LLAMA
for _name in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text"):
    LAYOUTS[_name] = _BERT


def register(model_type: str, layout: Layout) -> None:
    """Say where models with this `config.model_type` keep their layers; replaces what is known."""
    LAYOUTS[model_type] = layout


def resolve(root: Any, path: str) -> Any:
    """What a dotted path leads to; None where something on the way is absent or None."""
    for name in path.split(".") if path else ():
        root = getattr(root, name, None)
    return root
