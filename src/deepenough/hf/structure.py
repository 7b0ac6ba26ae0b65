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
from deepenough.hf.layouts import Layout, Path, resolve

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
    """Layouts that the model may have, the likeliest first; a UserError if it has no layers."""
    trunk = model.base_model
    for layers in find_layers(model, trunk):
        owner_path, _, name = layers.rpartition(".")
        owner = trunk.get_submodule(owner_path)
        norms = [f"{owner_path}.{norm}".lstrip(".") for norm in _norms(owner)]
        norms += [norm for norm in _norms(trunk) if owner is not trunk]
        for norm in (*reversed(norms), None):
            yield Layout(layers=layers, final_norm=norm)
            if owner is not trunk:  # a model that goes past its trunk to the stack inside
                inside = norm.removeprefix(f"{owner_path}.") if norm else None
                yield Layout(trunk=owner_path, layers=name, final_norm=inside)


def find_layers(model: PreTrainedModel, trunk: nn.Module) -> list[str]:
    """Paths, from the trunk, of what may be the list of layers."""
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
            f"{count} modules is inside model.base_model ({type(trunk).__name__}); {advice(model)}"
        )

    def weight(name: str) -> int:
        return sum(parameter.numel() for parameter in lists[name].parameters())

    # A list of norms or of gates may be as long as the list of layers, but not as heavy.
    return sorted(lists, key=weight, reverse=True)


def advice(model: PreTrainedModel) -> str:
    """How to help where the search fails: the end of each of its errors."""
    return (
        "say where they are with deepenough.hf.layouts.register("
        f"{model.config.model_type!r}, Layout(layers='path.to.layers', "
        "final_norm='path.to.norm'))."
    )


def find_parts(block: nn.Module) -> tuple[Path, Path, tuple[str, ...]]:
    """Paths of attention, feed-forward and norms inside a block; empty where there is none."""
    attention, feed_forward = (
        next((path for path in paths if has(block, path)), ())
        for paths in (ATTENTION, FEED_FORWARD)
    )
    return attention, feed_forward, (*_norms(block), *(p for p in NORMS_INSIDE if has(block, p)))


def has(block: nn.Module, path: Path) -> bool:
    """Whether every step of a path is a module of the block."""
    steps = (path,) if isinstance(path, str) else path
    return all(isinstance(resolve(block, step), nn.Module) for step in steps)


def _norms(module: nn.Module) -> list[str]:
    """Names of a module's own norms, in the order they were put in."""
    names = [n for n, child in module.named_children() if "norm" in type(child).__name__.lower()]
    # Those of a cross-attention to an encoder that is not there never run.
    return [name for name in names if "encoder" not in name and "cross" not in name]
