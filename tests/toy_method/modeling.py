"""The toy's model: `y = x * sum(w)`, a block for every weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from deepenough.trace import DepthTrace


class ToyConfig(PreTrainedConfig):
    """Number of blocks."""

    model_type = "toy"
    num_blocks: int = 3


@dataclass
class ToyOutput(ModelOutput):
    """Predictions, and what they cost."""

    prediction: Tensor | None = None
    trace: DepthTrace | None = None


class ToyModel(PreTrainedModel):
    """Blocks that each add a share of the slope."""

    config_class = ToyConfig
    base_model_prefix = "toy"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.weights = nn.Parameter(torch.zeros(config.num_blocks))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, x: Tensor, blocks: int | None = None) -> ToyOutput:
        """Return predictions of the first `blocks` blocks, with their trace."""
        last = len(self.weights) if blocks is None else blocks
        depth = torch.full(x.shape, last)
        ran = torch.arange(len(self.weights)) < depth[..., None]
        trace = DepthTrace(depth=depth, ran=ran, flops=2.0 * ran.sum(-1))
        return ToyOutput(prediction=x * self.weights[:last].sum(), trace=trace)
