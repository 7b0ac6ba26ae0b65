"""A batch of token ids as pondering needs it: rows can leave, padding can be cut off.

Shapes: R examples, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepenough.errors import UserError


@dataclass(frozen=True)
class Inputs:
    input_ids: Tensor
    attention_mask: Tensor | None = None
    token_type_ids: Tensor | None = None

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    def __len__(self) -> int:
        return len(self.input_ids)

    def as_arguments(self) -> dict[str, Any]:
        """What is given of it, by the names that encoders use."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def select(self, rows: Tensor) -> Inputs:
        return self._map(lambda tensor: tensor[rows])

    def trim(self) -> Inputs:
        """Without the columns at the end that are padding in every row."""
        if self.attention_mask is None:
            return self
        used = self.attention_mask.bool().any(0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return self if length == self.length else self._map(lambda tensor: tensor[:, :length])

    def with_second_cls(self) -> Inputs:
        """The first token twice, the second one for the halting head."""

        def double(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[:, :1], tensor], 1)

        return self._map(double)

    def check(self, max_length: int | None) -> None:
        if self.input_ids.ndim != 2 or not self.input_ids.numel():
            raise UserError(
                "A pondering model needs token ids of shape [examples, tokens], neither of them "
                f"0: got {tuple(self.input_ids.shape)}."
            )
        if max_length is not None and self.length > max_length:
            raise UserError(
                f"The texts are {self.length} tokens long, and the model takes at most "
                f"{max_length}: truncate them (truncation=True, max_length={max_length})."
            )

    def _map(self, change: Any) -> Inputs:
        return Inputs(**{name: change(value) for name, value in self.as_arguments().items()})
