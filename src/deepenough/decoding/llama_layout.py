"""Layers as in Llama (arXiv 2302.13971): RMS norms, rotary positions, grouped keys, gated SiLU.

Rotary codes are applied to queries and keys in one go. With `x' = (x_1, x_2)` the halves of a head,
`rotate(x) = (-x_2, x_1)` is `x` rolled by half its width with the sign put into the sines.

Shapes: B rows, T tokens, D width, H heads of queries, K width of a head, N = B * T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepenough.decoding.engine import Step
from deepenough.decoding.fused import FusedEngine, LinearMap, join
from deepenough.decoding.slots import Place
from deepenough.hf.adapter import Adapter

#: Architectures whose blocks compute exactly this; Qwen 2 adds biases to queries, keys and values.
MODEL_TYPES = ("llama", "mistral", "qwen2")
#: Rotary codes that are a function of the position alone, and so can be tabled.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
_MAPS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass
class _Layer:
    norm_in: Tensor
    into_heads: LinearMap
    out_of_heads: LinearMap
    norm_mid: Tensor
    gate_up: LinearMap
    down: LinearMap
    act: Any


def fits(adapter: Adapter) -> bool:
    """Whether the model is of this layout, its maps plain `nn.Linear`s."""
    config = adapter.model.config
    if config.model_type not in MODEL_TYPES:
        return False
    if adapter.trunk.rotary_emb.rope_type not in _FIXED_ROPES:
        return False
    return all(_is_plain(layer) for layer in adapter.layers)


def _is_plain(layer: nn.Module) -> bool:
    """Nothing but these modules has parameters: no adapters, no quantised maps."""
    owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    maps = [layer.get_submodule(name) for name in _MAPS if name in owners]
    return owners == {*_MAPS, *_NORMS} and all(type(module) is nn.Linear for module in maps)


class LlamaEngine(FusedEngine):
    def __init__(self, adapter: Adapter) -> None:
        config, first = adapter.model.config, cast(Any, adapter.layers[0])
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        super().__init__(adapter, heads, key_heads, first.self_attn.head_dim)
        self._codes: tuple[Tensor, Tensor] | None = None

    def refresh(self) -> None:
        self.layers = [_taken_apart(layer) for layer in self.adapter.layers]
        first = self.layers[0].norm_in
        self.eps = torch.tensor(
            self.adapter.model.config.rms_norm_eps, dtype=first.dtype, device=first.device
        )
        self._codes = None

    def norm(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.adapter.trunk.norm.weight, self.eps)

    def head(self, normed: Tensor) -> Tensor:
        return self.adapter.model.lm_head(normed)

    def embed(self, tokens_BT: Tensor, place: Place) -> Tensor:
        return self.adapter.trunk.embed_tokens(tokens_BT)

    def code(self, place: Place, like: Tensor) -> None:
        cos, sin = self._tables(place.end, like)
        place.codes = cos[place.positions][:, :, None], sin[place.positions][:, :, None]

    def layer(self, index: int, hidden_ND: Tensor, step: Step) -> Tensor:
        own = self.layers[index]
        batch, tokens = step.hidden.shape[:2]
        joint = own.into_heads(rms_norm(hidden_ND, own.norm_in, self.eps))
        heads = joint.view(batch, tokens, -1, self.head_width)
        turned = heads[:, :, : self.heads + self.key_heads]
        cos, sin = step.context.codes
        rolled = turned.roll(self.head_width // 2, -1)
        turned = torch.addcmul(turned * cos, rolled, sin)
        mixed = self.attend(
            index,
            step,
            turned[:, :, : self.heads],
            turned[:, :, self.heads :],
            heads[:, :, self.heads + self.key_heads :],
        )
        hidden_ND = own.out_of_heads.added(hidden_ND, mixed)
        normed = rms_norm(hidden_ND, own.norm_mid, self.eps)
        gate, up = own.gate_up(normed).chunk(2, dim=-1)
        return own.down.added(hidden_ND, own.act(gate) * up)

    def fill(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        own, place = self.layers[index], step.context
        batch, tokens = step.hidden.shape[:2]
        behind_queries = own.into_heads.rows(self.heads * self.head_width)
        heads = behind_queries(rms_norm(hidden_ND, own.norm_in, self.eps))
        key, value = heads.view(batch, tokens, 2, self.key_heads, self.head_width).unbind(2)
        cos, sin = place.codes
        key = torch.addcmul(key * cos, key.roll(self.head_width // 2, -1), sin)
        place.store(self.slots.keys[index], key)
        place.store(self.slots.values[index], value)

    def _tables(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all positions so far, a line each."""
        if self._codes is None or len(self._codes[0]) < positions:
            grown = torch.arange(max(256, 2 * positions), device=like.device)[None]
            cos, sin = self.adapter.trunk.rotary_emb(like, grown)
            half = self.head_width // 2
            signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
            self._codes = cos[0], signed
        return self._codes


def rms_norm(hidden: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 / D + eps) * weight`.

    On a CPU torch composes its own of nine operations. For the few states of a decoding step, whose
    cost is that of calling them, these five take half the time.
    """
    if hidden.dtype not in (torch.float32, torch.float64) or hidden.device.type != "cpu":
        return F.rms_norm(hidden, hidden.shape[-1:], weight, float(eps))
    size = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, size, size, value=1 / hidden.shape[-1]).rsqrt_()
    return torch.mul(hidden, weight).mul_(scale)


def _taken_apart(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        into_heads=join([attention.q_proj, attention.k_proj, attention.v_proj]),
        out_of_heads=join([attention.o_proj]),
        norm_mid=layer.post_attention_layernorm.weight,
        gate_up=join([mlp.gate_proj, mlp.up_proj]),
        down=join([mlp.down_proj]),
        act=F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn,
    )
