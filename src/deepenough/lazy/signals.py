"""What tells a block where a token stands and which step it makes.

Sinusoids as in the Transformer and the Universal Transformer (arXiv 1807.03819, eq. 6 and 7), or,
for steps, learned vectors. They are added to what the block reads, behind its norm, at every step:
added to the state itself they would pile up where no norm follows each step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.lazy.config import LazyTransformerConfig

LONGEST_WAVE = 10_000.0


def sinusoids(num: int, width: int) -> Tensor:
    """`[num, width]`: sines in the first half of the channels, cosines in the second."""
    rates = torch.exp(-math.log(LONGEST_WAVE) * torch.arange(0, width, 2) / width)
    angles = torch.arange(num)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Signals(nn.Module):
    """Of positions always, of steps where the config asks for them."""

    def __init__(self, config: LazyTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.steps: nn.Embedding | None = None
        if config.step_signal == "learned":
            self.steps = nn.Embedding(config.max_steps, config.d_model)
        # Not buffers: they follow from the config, and loading a model leaves buffers unfilled.
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def positions(self, places: Tensor, like: Tensor) -> Tensor:
        """Of tokens at these places, `[*places, D]`."""
        return self._table(like)[places]

    def first_positions(self, start: int, num: int, like: Tensor) -> Tensor:
        """Of `num` tokens in a row from `start` on, `[num, D]`."""
        if start + num > self.config.max_positions:
            raise UserError(
                f"A sequence of {start + num} tokens is longer than the model's "
                f"{self.config.max_positions} positions: cut it, or raise max_positions."
            )
        return self._table(like)[start : start + num]

    def step(self, step: int, like: Tensor) -> Tensor | None:
        """Of a step, `[D]`."""
        if self.steps is not None:
            vector: Tensor = self.steps.weight[step]
            return vector
        if self.config.step_signal == "sinusoid":
            return self._table(like)[step]
        return None

    def _table(self, like: Tensor) -> Tensor:
        key = (like.device, like.dtype)
        if key not in self._tables:
            num = max(self.config.max_positions, self.config.max_steps)
            self._tables[key] = sinusoids(num, self.config.d_model).to(like)
        return self._tables[key]
