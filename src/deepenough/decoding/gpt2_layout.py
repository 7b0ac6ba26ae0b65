"""Layers as in GPT-2: layer norms, learned positions, queries, keys and values from one map.

Shapes: B rows, T tokens, D width, N = B * T.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

from deepenough.decoding.engine import Step
from deepenough.decoding.fused import FusedEngine, LinearMap
from deepenough.decoding.slots import Place
from deepenough.hf.adapter import Adapter

_FUSED_GELU = partial(F.gelu, approximate="tanh")


def fits(adapter: Adapter) -> bool:
    """Whether the model is of this layout, with nothing added to its blocks."""
    config = adapter.model.config
    return (
        config.model_type == "gpt2"
        and not config.add_cross_attention
        and all(len(list(layer.parameters())) == 12 for layer in adapter.layers)
    )


class GPT2Engine(FusedEngine):
    def __init__(self, adapter: Adapter) -> None:
        heads = adapter.model.config.num_attention_heads
        super().__init__(adapter, heads, heads, adapter.width // heads)

    def norm(self, hidden: Tensor) -> Tensor:
        return _norm(hidden, self.adapter.trunk.ln_f)

    def head(self, normed: Tensor) -> Tensor:
        return self.adapter.model.lm_head(normed)

    def embed(self, tokens_BT: Tensor, place: Place) -> Tensor:
        trunk = self.adapter.trunk
        # Padding behind the prompts may reach beyond the last position there is; nobody reads it.
        positions = place.positions.clamp_max(trunk.wpe.num_embeddings - 1)
        return trunk.wte(tokens_BT) + trunk.wpe(positions)

    def layer(self, index: int, hidden_ND: Tensor, step: Step) -> Tensor:
        own: Any = self.adapter.layers[index]
        batch, tokens = step.hidden.shape[:2]
        attn, mlp = own.attn, own.mlp
        joint = _map(attn.c_attn)(_norm(hidden_ND, own.ln_1))
        heads = joint.view(batch, tokens, 3, self.heads, self.head_width)
        query, key, value = heads.unbind(2)
        mixed = self.attend(index, step, query, key, value, attn.scaling)
        hidden_ND = _map(attn.c_proj).added(hidden_ND, mixed)
        inner = _map(mlp.c_fc)(_norm(hidden_ND, own.ln_2))
        act = _FUSED_GELU if isinstance(mlp.act, NewGELUActivation) else mlp.act
        return _map(mlp.c_proj).added(hidden_ND, act(inner))

    def fill(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        own: Any = self.adapter.layers[index]
        place: Place = step.context
        batch, tokens, width = step.hidden.shape
        joint = _map(own.attn.c_attn).rows(width)(_norm(hidden_ND, own.ln_1))
        key, value = joint.view(batch, tokens, 2, self.heads, self.head_width).unbind(2)
        place.store(self.slots.keys[index], key)
        place.store(self.slots.values[index], value)


def _norm(hidden: Tensor, module: Any) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], module.weight, module.bias, module.eps)


def _map(module: Any) -> LinearMap:
    """GPT-2 keeps its matrices as products want them."""
    return LinearMap(module.weight, module.bias)
