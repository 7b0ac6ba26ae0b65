"""Linear maps in the places of norms, multiplied into the linear layers that read them.

`W (A x) = (W A) x`: where a replaced norm is read by linear layers only, as in pre-norm blocks, the
map costs nothing if those layers carry the product. Who reads a norm is seen in a short pass; that
nobody else does is not seen, so whoever folds compares the result with the plain replacement.

Shapes: D width, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deepenough.hf.adapter import Adapter
from deepenough.hf.intercept import hidden_input, hidden_output, hooked
from deepenough.shortcut.submodules import LinearMap


def readers_of(adapter: Adapter, norms: list[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """The linear layers that read exactly what each norm returns."""
    outputs: dict[nn.Module, Tensor] = {}
    readers: dict[nn.Module, list[nn.Module]] = {norm: [] for norm in norms}

    def returned(norm: nn.Module, _: Any, output: Any) -> None:
        outputs[norm] = hidden_output(output)

    def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_input(args, kwargs)
        for norm, output in outputs.items():
            if hidden is output and module not in readers[norm]:
                readers[norm].append(module)

    linear = [
        module
        for layer in dict.fromkeys(adapter.layers)
        for module in layer.modules()
        if type(module) in (nn.Linear, Conv1D)
    ]
    before, after = dict.fromkeys(linear, read), dict.fromkeys(readers, returned)
    with hooked(before.items(), after.items()):
        ids = torch.ones(1, 2, dtype=torch.long, device=adapter.model.device)
        adapter.states(ids, torch.ones_like(ids))
    return readers


@torch.no_grad()
def folded(reader: nn.Module, norm: LinearMap) -> LinearMap:
    """The map of a linear layer after that of the norm it reads."""
    assert isinstance(reader, nn.Linear | Conv1D)
    weight_OD = reader.weight.T if isinstance(reader, Conv1D) else reader.weight
    bias: Tensor | None = reader.bias
    if norm.bias is not None:
        shift = weight_OD @ norm.bias
        bias = shift if bias is None else bias + shift
    return LinearMap(weight_OD @ norm.weight, bias)
