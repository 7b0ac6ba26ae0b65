"""The fused backend: layers as few large operations, for layouts whose arithmetic is written here.

Against the model's own layers this saves what is not arithmetic: projections that read the same
input are one product, products add to the residual stream themselves, the cache is never copied,
masks and rotary cos/sin are made once a step, and attention is a single kernel. Weights are not
held twice: `join` lays the matrices of one input side by side and makes the model's own parameters
views of the result.

Layouts: Llama (arXiv 2302.13971), which Mistral and Qwen 2 share, and GPT-2.

Shapes: B sequences, T tokens, D width, H heads, K head width, N = B * T.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

from deepenough.decoding.engine import Engine, Step, is_untouched, row_lengths
from deepenough.decoding.kv_cache import KVCache, StepContext, attend
from deepenough.hf.adapter import Adapter


def make(adapter: Adapter) -> FusedEngine | None:
    """Return a fused engine for a model, or None if its layout is not one of those known here."""
    for layout in (LlamaEngine, GPT2Engine):
        if layout.fits(adapter):
            return layout(adapter)
    return None


class FusedLinear:
    """`x W + b` of states `[N, D]`, as one operation; `W` is a view of a module's own matrix."""

    def __init__(self, weight_DE: Tensor, bias_E: Tensor | None) -> None:
        self.weight, self.bias = weight_DE, bias_E

    def __call__(self, states_ND: Tensor) -> Tensor:
        """Return the map of the states, `[N, E]`."""
        if self.bias is None:
            return torch.mm(states_ND, self.weight)
        return torch.addmm(self.bias, states_ND, self.weight)

    def added(self, residual_NE: Tensor, states_ND: Tensor) -> Tensor:
        """Return the residual plus the map of the states."""
        summed = torch.addmm(residual_NE, states_ND, self.weight)
        return summed if self.bias is None else summed.add_(self.bias)

    def outputs_from(self, first: int) -> FusedLinear:
        """Return the map to the outputs from `first` on."""
        return FusedLinear(self.weight[:, first:], None if self.bias is None else self.bias[first:])


def join(modules: Sequence[nn.Linear]) -> FusedLinear:
    """Return the maps as one; the modules' own parameters become views of its tensors."""
    weights: list[Any] = [module.weight for module in modules]
    biases: list[Any] = [module.bias for module in modules if module.bias is not None]
    joined = _concatenated(biases) if len(biases) == len(modules) else None
    return FusedLinear(_concatenated(weights).t(), joined)


def _concatenated(parts: Sequence[nn.Parameter]) -> Tensor:
    """Return one tensor of all parts; the same as last time if they are views of one already."""
    first, address = parts[0].detach(), parts[0].data_ptr()
    together = True
    for part in parts:
        together = together and part.is_contiguous() and part.data_ptr() == address
        address += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    storage = first.untyped_storage()
    together = together and address <= storage.data_ptr() + storage.nbytes()
    if together:
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


@dataclass
class FusedLayer:
    """What a layer of any layout does, in this order."""

    input_norm: Callable[[Tensor], Tensor]
    qkv_proj: FusedLinear
    o_proj: FusedLinear
    mlp_norm: Callable[[Tensor], Tensor]
    up_proj: FusedLinear
    """Into the feed-forward, with its gate if it has one."""
    activation: Callable[[Tensor], Tensor]
    down_proj: FusedLinear
    scale: float | None = None
    """Factor of the attention scores; None for `K ** -0.5`."""


class FusedEngine(Engine):
    """What the layouts share: a `KVCache`, and layers of attention and feed-forward over it."""

    backend = "torch"

    def __init__(self, adapter: Adapter, heads: int, kv_heads: int, head_width: int) -> None:
        super().__init__(adapter)
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.cache = KVCache()
        self.layers = [self.take_apart(layer) for layer in adapter.layers]

    @abstractmethod
    def take_apart(self, layer: Any) -> FusedLayer:
        """Return the parts of one of the model's layers."""

    @abstractmethod
    def embed(self, tokens_BT: Tensor, context: StepContext) -> Tensor:
        """Return `h_0` of tokens at their positions."""

    def encode_positions(self, context: StepContext, like: Tensor) -> None:
        """Give a step its rotary cos/sin, where the layers rotate queries and keys."""

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Start a batch from its prompts; see `Engine.prefill`."""
        lengths = row_lengths(ids_BT, mask_BT)
        batch, width = ids_BT.shape
        if mask_BT is not None:
            # Every sequence begins at position 0; padding goes behind it, where nobody looks.
            order = mask_BT.bool().int().argsort(dim=1, descending=True, stable=True)
            ids_BT = ids_BT.gather(1, order)
        device = ids_BT.device
        self.capacity = max(capacity, width)
        shape = (batch, self.kv_heads, self.capacity, self.head_width)
        self.cache = KVCache(self.num_layers, shape, self.adapter.model.dtype, device)
        self.lengths = [0] * batch
        step = self.start_step(ids_BT)
        hidden_BTD = self.run_through(step, step.hidden)
        self.lengths = lengths
        self.prompt, self.prompt_inputs = (
            [row[:length] for row, length in zip(states, lengths, strict=True)]
            for states in (hidden_BTD, self.layer_inputs)
        )
        last = torch.tensor(lengths, device=device) - 1
        return self.norm(hidden_BTD[torch.arange(batch, device=device), last])

    def start_step(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """Embed the next tokens of every sequence; see `Engine.start_step`."""
        starts = [length + offset for length in self.lengths]
        context = self._context(starts, tokens_BT.shape[1])
        step = Step(self.embed(tokens_BT, context), offset, context)
        self.encode_positions(context, step.hidden)
        return step

    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """Make a step of states of some sequences; see `Engine.resume`."""
        subset = None if len(rows) == len(self.lengths) else rows
        context = self._context(starts, hidden_BTD.shape[1], subset)
        self.encode_positions(context, hidden_BTD)
        return Step(hidden_BTD, 0, context)

    def _context(
        self, starts: Sequence[int], tokens: int, rows: Sequence[int] | None = None
    ) -> StepContext:
        model, groups = self.adapter.model, self.heads // self.kv_heads
        return StepContext(starts, tokens, groups, model.dtype, model.device, rows)

    def run_layers(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """Return `h_last` from `h_first`; see `Engine.run_layers`."""
        hidden = hidden_BTD.flatten(0, 1)
        for index in range(first, last):
            own = self.layers[index]
            query, key, value = self._qkv(own, own.qkv_proj, hidden, step)
            mixed = attend(step.context, self.cache, index, query, key, value, own.scale)
            hidden = own.o_proj.added(hidden, mixed)
            inner = own.activation(own.up_proj(own.mlp_norm(hidden)))
            hidden = own.down_proj.added(hidden, inner)
        return hidden.view(hidden_BTD.shape)

    def write_kv(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Write a layer's keys and values only; see `Engine.write_kv`."""
        own = self.layers[index]
        behind_queries = own.qkv_proj.outputs_from(self.heads * self.head_width)
        _, key, value = self._qkv(own, behind_queries, hidden_ND, step)
        step.context.store(self.cache.keys[index], key)
        step.context.store(self.cache.values[index], value)

    def _qkv(
        self, layer: FusedLayer, proj: FusedLinear, hidden_ND: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, T, H, K]`, as far as they are in `proj`."""
        joint = proj(layer.input_norm(hidden_ND))
        heads = joint.view(*step.hidden.shape[:2], -1, self.head_width)
        rotated, value = heads[:, :, : -self.kv_heads], heads[:, :, -self.kv_heads :]
        if step.context.rotary is not None:
            rotated = rotate(rotated, step.context.rotary)
        return rotated[:, :, : -self.kv_heads], rotated[:, :, -self.kv_heads :], value

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        self.cache.select(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def keep_prefix(self, count: int, capacity: int) -> bool:
        """Go on from the first tokens of what is cached; see `Engine.keep_prefix`."""
        self.cache.grow(capacity)
        self.capacity, self.lengths = max(capacity, self.capacity), [count]
        return True

    def head(self, normed: Tensor) -> Tensor:
        """Return the logits `[..., V]` of normed states."""
        return self.adapter.model.lm_head(normed)

    def release(self) -> None:
        """Free the memory of the cache."""
        self.cache, self.lengths, self.prompt, self.prompt_inputs = KVCache(), [], [], []


# -- Llama ---------------------------------------------------------------------------------------

#: Architectures whose blocks compute exactly this; Qwen 2 adds biases to queries, keys and values.
LLAMA_MODEL_TYPES = ("llama", "mistral", "qwen2")
#: Rotary encodings that are a function of the position alone, and so can be tabled.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
_LLAMA_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


class LlamaEngine(FusedEngine):
    """Decodes Llama, Mistral and Qwen 2."""

    def __init__(self, adapter: Adapter) -> None:
        config, first = adapter.model.config, cast(Any, adapter.layers[0])
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        like = adapter.trunk.norm.weight
        self.eps = torch.tensor(config.rms_norm_eps, dtype=like.dtype, device=like.device)
        self._rotary: tuple[Tensor, Tensor] | None = None
        super().__init__(adapter, heads, kv_heads, first.self_attn.head_dim)

    @staticmethod
    def fits(adapter: Adapter) -> bool:
        """Return whether the model is of this layout: no adapters, no quantised projections."""
        if adapter.model.config.model_type not in LLAMA_MODEL_TYPES:
            return False
        if adapter.trunk.rotary_emb.rope_type not in _FIXED_ROPES:
            return False
        if not all(map(is_untouched, adapter.trunk.modules())):
            return False
        for layer in adapter.layers:
            owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
            linears = [layer.get_submodule(name) for name in _LLAMA_LINEARS if name in owners]
            if owners != {*_LLAMA_LINEARS, *_LLAMA_NORMS}:
                return False
            if any(type(module) is not nn.Linear for module in linears):
                return False
        return True

    def take_apart(self, layer: Any) -> FusedLayer:
        """Return the parts of a layer, projections of the same input joined."""
        attention, mlp = layer.self_attn, layer.mlp
        act = F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn

        def gated(joint_NF: Tensor) -> Tensor:
            gate, up = joint_NF.chunk(2, dim=-1)
            return act(gate) * up

        return FusedLayer(
            input_norm=partial(rms_norm, layer.input_layernorm.weight, self.eps),
            qkv_proj=join([attention.q_proj, attention.k_proj, attention.v_proj]),
            o_proj=join([attention.o_proj]),
            mlp_norm=partial(rms_norm, layer.post_attention_layernorm.weight, self.eps),
            up_proj=join([mlp.gate_proj, mlp.up_proj]),
            activation=gated,
            down_proj=join([mlp.down_proj]),
        )

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm between the last layer and the head."""
        return rms_norm(self.adapter.trunk.norm.weight, self.eps, hidden)

    def embed(self, tokens_BT: Tensor, context: StepContext) -> Tensor:
        """Return the token embeddings."""
        return self.adapter.trunk.embed_tokens(tokens_BT)

    def encode_positions(self, context: StepContext, like: Tensor) -> None:
        """Look up the rotary cos/sin of the step's positions."""
        cos, sin = self._rotary_tables(context.end, like)
        context.rotary = cos[context.positions][:, :, None], sin[context.positions][:, :, None]

    def _rotary_tables(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of all positions so far, one row each."""
        if self._rotary is None or len(self._rotary[0]) < positions:
            grown = torch.arange(max(256, 2 * positions), device=like.device)[None]
            cos, sin = self.adapter.trunk.rotary_emb(like, grown)
            half = self.head_width // 2
            signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
            self._rotary = cos[0], signed
        return self._rotary

    def release(self) -> None:
        """Free the memory of the cache, and of the rotary tables."""
        super().release()
        self._rotary = None


def rotate(heads_BTHK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions given as cos and signed sin.

    With `(x_1, x_2)` the halves of a head, `(-x_2, x_1)` is `x` rolled by half its width with the
    sign put into the sine.
    """
    cos, sin = rotary
    return torch.addcmul(heads_BTHK * cos, heads_BTHK.roll(heads_BTHK.shape[-1] // 2, -1), sin)


def rms_norm(weight: Tensor, eps: Tensor, hidden: Tensor) -> Tensor:
    """Return `x / sqrt(|x|^2 / D + eps) * weight`.

    On a CPU torch composes its own of nine operations. For the few states of a decoding step, whose
    cost is that of calling them, these five take half the time.
    """
    if hidden.dtype not in (torch.float32, torch.float64) or hidden.device.type != "cpu":
        return F.rms_norm(hidden, hidden.shape[-1:], weight, float(eps))
    size = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, size, size, value=1 / hidden.shape[-1]).rsqrt_()
    return torch.mul(hidden, weight).mul_(scale)


# -- GPT-2 ---------------------------------------------------------------------------------------

_FUSED_GELU = partial(F.gelu, approximate="tanh")


class GPT2Engine(FusedEngine):
    """Decodes GPT-2."""

    def __init__(self, adapter: Adapter) -> None:
        heads = adapter.model.config.num_attention_heads
        super().__init__(adapter, heads, heads, adapter.width // heads)

    @staticmethod
    def fits(adapter: Adapter) -> bool:
        """Return whether the model is of this layout, with nothing added to its blocks."""
        config = adapter.model.config
        return (
            config.model_type == "gpt2"
            and not config.add_cross_attention
            and all(len(list(layer.parameters())) == 12 for layer in adapter.layers)
            and all(map(is_untouched, adapter.trunk.modules()))
        )

    def take_apart(self, layer: Any) -> FusedLayer:
        """Return the parts of a layer; its `Conv1D`s keep matrices as products want them."""
        attention, mlp = layer.attn, layer.mlp
        return FusedLayer(
            input_norm=partial(_layer_norm, layer.ln_1),
            qkv_proj=FusedLinear(attention.c_attn.weight, attention.c_attn.bias),
            o_proj=FusedLinear(attention.c_proj.weight, attention.c_proj.bias),
            mlp_norm=partial(_layer_norm, layer.ln_2),
            up_proj=FusedLinear(mlp.c_fc.weight, mlp.c_fc.bias),
            activation=_FUSED_GELU if isinstance(mlp.act, NewGELUActivation) else mlp.act,
            down_proj=FusedLinear(mlp.c_proj.weight, mlp.c_proj.bias),
            scale=attention.scaling,
        )

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm between the last layer and the head."""
        return _layer_norm(self.adapter.trunk.ln_f, hidden)

    def embed(self, tokens_BT: Tensor, context: StepContext) -> Tensor:
        """Return the embeddings of tokens and positions."""
        trunk = self.adapter.trunk
        # Padding behind the prompts may reach beyond the last position there is; nobody reads it.
        positions = context.positions.clamp_max(trunk.wpe.num_embeddings - 1)
        return trunk.wte(tokens_BT) + trunk.wpe(positions)


def _layer_norm(module: Any, hidden: Tensor) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], module.weight, module.bias, module.eps)
