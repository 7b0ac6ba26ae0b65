"""FLOPs of decoding one token, multiply-adds counted as two, in closed form.

A layer costs two operations for each entry of its matrices and, for attention over `c` tokens,
`4 * c * width`. Of a mixture of experts all matrices are counted. Norms and codes are left out.
"""

from __future__ import annotations

from deepenough.hf.adapter import Adapter


class Costs:
    def __init__(self, adapter: Adapter) -> None:
        config = adapter.model.config.get_text_config()
        self.layers = [
            2.0 * sum(p.numel() for p in layer.parameters() if p.ndim > 1)
            for layer in adapter.layers
        ]
        heads = getattr(config, "num_attention_heads", None)
        head_width = getattr(config, "head_dim", None)
        self.attention_width = heads * head_width if heads and head_width else adapter.width
        key_heads = getattr(config, "num_key_value_heads", None) or heads or 1
        self.keys = 4.0 * adapter.width * self.attention_width * key_heads / (heads or 1)
        """Keys and values of a layer alone."""
        self.map = 2.0 * adapter.width**2
        self.head = 2.0 * config.vocab_size * adapter.width

    def token(self, context: int, first: int = 0, last: int | None = None) -> float:
        """Layers `first + 1 ... last` for a token that sees `context` tokens, without the head."""
        chosen = self.layers[first:last]
        return sum(chosen) + 4.0 * context * self.attention_width * len(chosen)

    def filling(self, depth: int, fill: str) -> float:
        """Keys and values of the layers that a token skips; `deferred` owes them."""
        if fill == "deferred":
            return 0.0
        mapped = self.map if fill == "shortcut" else 0.0
        return (len(self.layers) - depth) * (self.keys + mapped)
