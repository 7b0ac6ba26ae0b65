"""The head of any Hugging Face model: what it does to the output of its trunk to make logits.

Heads differ: a transform before the projection (BERT), capped logits (Gemma 2), scaled logits
(Granite, Cohere). Instead of a copy of each, the model's own `forward` is run on a shallow copy of
the model in which the trunk hands its `inputs_embeds` on unchanged. Nothing of the model itself is
changed, its weights are shared, and gradients flow.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


class _TrunkOutput(BaseModelOutputWithPast):
    def __getattr__(self, name: str) -> None:
        """Whatever else a model takes from its trunk's output is not there."""
        if name.startswith("__"):
            raise AttributeError(name)


def _hand_on(*_: Any, inputs_embeds: Tensor, **__: Any) -> _TrunkOutput:
    return _TrunkOutput(last_hidden_state=cast(Any, inputs_embeds))


def run_head(model: PreTrainedModel, trunk: str, hidden_BTD: Tensor) -> Tensor:
    """The logits that `model` makes of `hidden_BTD`, the output of its trunk at that path."""
    shell = copy.copy(model)
    parent: nn.Module = shell
    *way, last = trunk.split(".")
    for name in way:
        parent = _replace(parent, name, copy.copy(getattr(parent, name)))
    echo = _replace(parent, last, copy.copy(getattr(parent, last)))
    echo.forward = _hand_on  # type: ignore[method-assign]
    # Hooks would see, and could change, a pass through the trunk that does not take place.
    echo._forward_hooks, echo._forward_pre_hooks = OrderedDict(), OrderedDict()
    output = shell.forward(inputs_embeds=hidden_BTD)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


def _replace(parent: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put `module` in the place of a child of a copied parent, which still shares its table."""
    parent._modules = {**parent._modules, name: module}
    return module
