"""What all attention branches of one forward pass share: the codes of distances and the mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepenough.nn.relative_attention import distance_codes, visible_keys
from deepenough.par.config import ParConfig


@dataclass(frozen=True)
class Context:
    codes: Tensor
    """Distance codes from the farthest to 0, one row more than there are keys."""
    mask: Tensor
    """Added to the logits: -inf where a key must not be seen. `[S, K]`, or `[B, 1, S, K]`."""


class Contexts:
    """One context for every shape met, made once: a stream of text meets two or three."""

    def __init__(self, config: ParConfig) -> None:
        self.config = config
        self._known: dict[tuple[object, ...], Context] = {}

    def get(
        self, num_new: int, num_keys: int, like: Tensor, attention_mask: Tensor | None
    ) -> Context:
        """In the dtype and on the device of `like`; `attention_mask` is 0 at padding, `[B, *]`."""
        window = self.config.sliding_window  # anew: a model can be given another memory
        key = (num_new, num_keys, window, like.dtype, like.device)
        if key not in self._known:
            if len(self._known) > 64:  # generation without a cache meets every length once
                self._known.clear()
            codes = distance_codes(num_keys + 1, self.config.d_model).flip(0)
            visible = visible_keys(num_new, num_keys, window)
            mask = torch.zeros(num_new, num_keys).masked_fill(~visible, -torch.inf)
            self._known[key] = Context(codes.to(like), mask.to(like))
        context = self._known[key]
        if attention_mask is None or bool(attention_mask.all()):
            return context
        # The newest keys are the last ones. Memory, which the mask does not know of, is all seen.
        seen = F.pad(attention_mask, (num_keys - attention_mask.shape[1], 0), value=1)
        # The most negative number, not -inf: a row of padding alone must not become NaN.
        lowest = torch.finfo(like.dtype).min
        mask = context.mask.masked_fill(seen[:, None, None] == 0, lowest).clamp(min=lowest)
        return Context(context.codes, mask)
