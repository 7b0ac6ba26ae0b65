"""Find the layers, their parts and the final norm of a model that has no row in `layouts.py`.

The layers are the `nn.ModuleList` with as many modules as the config says there are layers. Which
norm ends the trunk is not guessed from names: each candidate is tried on three tokens, and the one
that turns the last layer's output into exactly what the trunk returns is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from deepenough.errors import UserError
from deepenough.models.layouts import Layout, Path

ATTENTION_NAMES = ("self_attn", "self_attention", "attention", "attn", "mixer", "temporal_block")
FEED_FORWARD_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "dense")
# In a row, where the feed-forward part is no module of its own.
FEED_FORWARD_PAIRS = (("fc1", "fc2"), ("intermediate", "output.dense"), ("ffn", "ffn_output"))


def candidates(model: PreTrainedModel) -> Iterator[Layout]:
    """Layouts that the model may have, the likeliest first; a UserError if it has no layers."""
    trunk = model.base_model
    layers = find_layers(model, trunk)
    owner_path = layers.rpartition(".")[0]
    owner = trunk.get_submodule(owner_path)
    norms = [name for name, child in owner.named_children() if is_norm(child)]
    for norm in (*reversed(norms), None):
        path = f"{owner_path}.{norm}".lstrip(".") if norm else None
        yield Layout(layers=layers, final_norm=path)
        if owner_path and owner is not trunk:  # a model that calls its decoder by itself
            inner = layers.rpartition(".")[2]
            yield Layout(layers=inner, final_norm=norm, trunk=owner_path)


def find_layers(model: PreTrainedModel, trunk: nn.Module) -> str:
    """The path of the list of layers from the trunk."""
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in trunk.named_modules()
        if isinstance(module, nn.ModuleList)
        and (len(module) == wanted if wanted else len(module) > 1)
    }
    if not lists:
        count = f"config.num_hidden_layers = {wanted}" if wanted else "two or more"
        raise UserError(
            f"{type(model).__name__} has no layers that could be found: no torch.nn.ModuleList of "
            f"{count} modules is inside model.base_model ({type(trunk).__name__}); say where they "
            f"are with deepenough.models.layouts.register({model.config.model_type!r}, "
            "Layout(layers='path.to.layers', final_norm='path.to.norm'))."
        )
    # A list of norms or of gates may be as long as the list of layers, but not as heavy.
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))


def find_parts(block: nn.Module) -> tuple[Path, Path, tuple[str, ...]]:
    """Paths of attention, feed-forward and norms inside a block; empty where there is none."""
    children = dict(block.named_children())
    attention = next((name for name in ATTENTION_NAMES if name in children), ())
    feed_forward: Path = next((name for name in FEED_FORWARD_NAMES if name in children), ())
    for first, last in FEED_FORWARD_PAIRS:
        if first in children and last.partition(".")[0] in children:
            feed_forward = (first, last)
    return attention, feed_forward, tuple(name for name in children if is_norm(children[name]))


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
