"""EAGLE-3 straight from its equations, one position at a time, from tensors by public names."""

import math
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn channel `i` and channel `i + half` by `position * theta ** (-i / half)`."""
    half = len(x) // 2
    found = x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        found[i] = x[i] * cos - x[i + half] * sin
        found[i + half] = x[i + half] * cos + x[i] * sin
    return found


class HeadRef:
    """A head over a growing list of keys and values, in float64."""

    def __init__(self, tensors: dict[str, Tensor], sizes: dict[str, Any]) -> None:
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.sizes = sizes
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []

    def fuse(self, inputs: Tensor) -> Tensor:
        return self.t["fc.weight"] @ inputs.double()

    def step(self, embedding: Tensor, g: Tensor) -> Tensor:
        """Append one position, of the token after it and `g`, and return `v`."""
        t, eps, width = self.t, self.sizes["rms_norm_eps"], self.sizes["head_dim"]
        theta, position = self.sizes["rope_theta"], len(self.keys)
        own = {n.removeprefix("midlayer."): w for n, w in t.items() if n.startswith("midlayer.")}
        e = rms(embedding.double(), own["input_layernorm.weight"], eps)
        z = torch.cat([e, rms(g, own["hidden_norm.weight"], eps)])
        q, k, v = (own[f"self_attn.{n}_proj.weight"] @ z for n in "qkv")
        self.keys.append([rotated(each, position, theta) for each in k.split(width)])
        self.values.append(list(v.split(width)))
        queries = [rotated(each, position, theta) for each in q.split(width)]
        groups = len(queries) // len(self.keys[0])
        mixed = []
        for number, query in enumerate(queries):
            scores = torch.stack([query @ key[number // groups] for key in self.keys])
            weights = (scores / math.sqrt(width)).softmax(0)
            parts = zip(weights, self.values, strict=True)
            mixed.append(sum(weight * value[number // groups] for weight, value in parts))
        u = g + own["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = rms(u, own["post_attention_layernorm.weight"], eps)
        gate, up = own["mlp.gate_proj.weight"] @ x, own["mlp.up_proj.weight"] @ x
        return u + own["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def logits(self, v: Tensor) -> Tensor:
        eps = self.sizes["rms_norm_eps"]
        return self.t["lm_head.weight"] @ rms(v, self.t["norm.weight"], eps)


def drafts_ref(ref: HeadRef, embed: Any, context: list[int], inputs: Tensor, steps: int) -> Any:
    """Return drafts after a context and their logits; `inputs` are of all tokens but the last."""
    for token, row in zip(context[1:], inputs, strict=True):
        v = ref.step(embed(torch.tensor(token)), ref.fuse(row))
    tokens = ref.t["d2t"].long() + torch.arange(len(ref.t["d2t"]))
    found, logits = [], []
    for number in range(steps):
        logits.append(ref.logits(v))
        found.append(int(tokens[logits[-1].argmax()]))
        if number < steps - 1:
            v = ref.step(embed(torch.tensor(found[-1])), v)
    return found, logits
