"""The first layers of a model as a model of their own, which may be changed.

Its first `k` layers are copies; everything else (embeddings, norm, head) is the model's own, tensor
for tensor. So an engine of its own (`making.py`) decodes with `k` layers and a cache of `k` layers,
whatever the architecture, and nothing that is done to those layers reaches the model.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter


def first_layers(adapter: Adapter, number: int) -> PreTrainedModel:
    """A model of the first `number` layers; the rest of them is neither copied nor kept."""
    model, last = adapter.model, adapter.layers[-1]
    if not 1 <= number < adapter.num_layers:
        raise UserError(
            f"From 1 to {adapter.num_layers - 1} of the {adapter.num_layers} layers of "
            f"{type(model).__name__} can be taken alone: got {number}."
        )
    copied = {
        id(tensor)
        for layer in adapter.layers[:number]
        for tensor in (*layer.parameters(), *layer.buffers())
    }
    tensors = (*model.parameters(), *model.buffers())
    shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in copied}
    shared |= {id(layer): layer for layer in adapter.layers[number:]}  # type: ignore[misc]
    short: PreTrainedModel = copy.deepcopy(model, shared)
    lists = [
        module
        for module in short.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == adapter.num_layers
        and module[-1] is last
    ]
    if len(lists) != 1:
        raise UserError(
            f"{type(model).__name__} does not keep its layers in one list, so that the first of "
            "them cannot be taken alone: leave out lora.layers."
        )
    del lists[0][number:]
    config = short.config.get_text_config()
    config.num_hidden_layers = number
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:number]
    return short
