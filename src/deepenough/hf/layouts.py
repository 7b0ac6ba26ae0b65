"""Where an architecture keeps its layers, their parts, and its final norm: one row of paths each.

Only what differs between architectures is written here; how a model makes logits from the output of
its trunk is not, since `adapter.py` has the model do that itself. An architecture without a row is
searched by its structure, so a row is needed only where the search would be wrong.

The parts of a block are what stands between its residual connections, so that each can be replaced
by another function of its input:

- attention: from the (normalised) hidden states to what is added to the stream, with the output
  projection, without residual or norm;
- feed-forward: from the (normalised) hidden states to what is added to the stream, in the same way;
- norms: every norm on the block's own level, one by one. In a post-norm block (BERT) a norm reads
  the sum of the stream and the part before it.

Where a part is no module of its own but several in a row, its path is a tuple: it begins with the
input of the first and ends with the output of the last. In BERT, attention is `attention.self` and
then `attention.output.dense`; residual and norm, which follow inside `attention.output`, are left
out.

Which norm ends the trunk is not guessed from names: `adapter.py` tries each candidate on two texts,
and the one that turns the last layer's output into what the trunk returns is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from deepenough.errors import UserError

Path = str | tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Dotted paths to the parts of a model.

    The trunk's path starts from `model.base_model`; those of `layers`, `final_norm` and
    `projection` start from the trunk, those of a block's parts from the block.
    """

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
    """Return the layers in order of use; consecutive ones share a group (arXiv 1909.11942)."""
    groups, times = trunk.encoder.albert_layer_groups, trunk.config.num_hidden_layers
    chosen = [groups[int(i / (times / len(groups)))] for i in range(times)]
    return [layer for group in chosen for layer in group.albert_layers]


LAYOUTS: dict[str, Layout] = {
    # The parts of these blocks are found by the search below.
    "gpt2": Layout(layers="h", final_norm="ln_f"),
    "gpt_neox": Layout(layers="layers", final_norm="final_layer_norm"),
    "distilbert": Layout(layers="transformer.layer"),
    **dict.fromkeys(
        (
            *("llama", "mistral", "mixtral", "qwen2", "qwen3", "smollm3", "olmo", "olmo2"),
            *("granite", "gemma", "gemma2", "gemma3_text", "phi3"),
        ),
        Layout(layers="layers", final_norm="norm"),
    ),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text"),
        Layout(layers="encoder.layer"),
    ),
    # Of these the search would miss something.
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


def register(model_type: str, layout: Layout) -> None:
    """Say where models with this `config.model_type` keep their layers; replaces what is known."""
    LAYOUTS[model_type] = layout


def resolve(root: Any, path: str) -> Any:
    """Return what a dotted path leads to, or None where something on the way is absent."""
    for name in path.split(".") if path else ():
        root = getattr(root, name, None)
    return root


# -- search by structure -----------------------------------------------------------------------

# Tried in this order. Several in a row, where a part is no module of its own or its module also
# holds the residual connection.
ATTENTION: tuple[Path, ...] = (
    ("attention.self", "attention.output.dense"),
    *("self_attn", "self_attention", "attention", "attn", "mixer", "temporal_block"),
)
FEED_FORWARD: tuple[Path, ...] = (
    ("fc1", "fc2"),
    ("intermediate", "output.dense"),
    ("ffn", "ffn_output"),
    *("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "dense"),
)
# Norms of post-norm blocks stand inside the parts they follow.
NORMS_INSIDE = ("attention.output.LayerNorm", "output.LayerNorm")


def candidates(model: PreTrainedModel) -> Iterator[Layout]:
    """Yield layouts that a model may have, the likeliest first; UserError if it has no layers."""
    trunk = model.base_model
    for layers in _find_layers(model, trunk):
        owner_path, _, name = layers.rpartition(".")
        owner = trunk.get_submodule(owner_path)
        norms = [f"{owner_path}.{norm}".lstrip(".") for norm in _norms(owner)]
        norms += [norm for norm in _norms(trunk) if owner is not trunk]
        # First without: a norm of something else, before it is trained, leaves normed states alone.
        for norm in (None, *reversed(norms)):
            yield Layout(layers=layers, final_norm=norm)
        for norm in (None, *reversed(norms)):
            if owner is not trunk:  # a model that goes past its trunk to the stack inside
                inside = norm.removeprefix(f"{owner_path}.") if norm else None
                yield Layout(trunk=owner_path, layers=name, final_norm=inside)


def _find_layers(model: PreTrainedModel, trunk: nn.Module) -> list[str]:
    """Return paths, from the trunk, of what may be the list of layers, the heaviest first."""
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in trunk.named_modules()
        if isinstance(module, nn.ModuleList)
        and (len(module) == wanted if wanted else len(module) > 1)
        and not all(_is_norm(child) for child in module)  # XLM's layers each end with one of a list
    }
    if not lists:
        count = f"config.num_hidden_layers = {wanted}" if wanted else "two or more"
        raise UserError(
            f"{type(model).__name__} has no layers that could be found: no torch.nn.ModuleList of "
            f"{count} modules is inside model.base_model ({type(trunk).__name__}); {advice(model)}"
        )

    def weight(name: str) -> int:
        return sum(parameter.numel() for parameter in lists[name].parameters())

    # A list of norms or of gates may be as long as the list of layers, but not as heavy.
    return sorted(lists, key=weight, reverse=True)


def heaviest_list(trunk: nn.Module) -> list[nn.Module]:
    """Return the modules of the heaviest list inside a trunk, or the trunk alone if it has none."""
    lists = [list(module) for module in trunk.modules() if isinstance(module, nn.ModuleList)]

    def weight(modules: list[nn.Module]) -> int:
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    return max(lists, key=weight, default=[trunk])


def advice(model: PreTrainedModel) -> str:
    """Return the end of an error message: how to say where the layers are."""
    return (
        "say where they are with deepenough.hf.layouts.register("
        f"{model.config.model_type!r}, Layout(layers='path.to.layers', "
        "final_norm='path.to.norm'))."
    )


def find_parts(block: nn.Module) -> tuple[Path, Path, tuple[str, ...]]:
    """Return paths of attention, feed-forward and norms inside a block; empty where absent."""
    attention, feed_forward = (
        next((path for path in paths if _has(block, path)), ())
        for paths in (ATTENTION, FEED_FORWARD)
    )
    return attention, feed_forward, (*_norms(block), *(p for p in NORMS_INSIDE if _has(block, p)))


def _has(block: nn.Module, path: Path) -> bool:
    """Return whether every step of a path is a module of the block."""
    steps = (path,) if isinstance(path, str) else path
    return all(isinstance(resolve(block, step), nn.Module) for step in steps)


def _norms(module: nn.Module) -> list[str]:
    """Return the names of a module's own norms, in the order they were added."""
    names = [name for name, child in module.named_children() if _is_norm(child)]
    # Those of a cross-attention to an encoder that is not there never run.
    return [name for name in names if "encoder" not in name and "cross" not in name]


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, and no layer that is named after its norms."""
    return "norm" in type(module).__name__.lower() and not list(module.children())
