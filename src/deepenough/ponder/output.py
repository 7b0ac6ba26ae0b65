"""What a pondering classifier returns.

Shapes: B examples, N passes, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from deepenough.trace import DepthTrace


@dataclass
class PonderOutput(ModelOutput):
    loss: Tensor | None = None
    """Of all passes where all were made; else of the answers given."""
    logits: Tensor | None = None
    """`[B, C]`: each row is the answer of the pass at which that example halted."""
    passes: Tensor | None = None
    """`[B]`: at which pass each example halted, counted from 1."""
    halting: Tensor | None = None
    """`[B, N]`: the distribution `p_n`; 0 after the pass at which an example really stopped."""
    halt_probabilities: Tensor | None = None
    """`[B, N]`: `lambda_n`, 1 at the last pass; 0 after an example stopped."""
    step_logits: Tensor | None = None
    """`[N, B, C]`: the answers of every pass, where all were made."""
    terms: dict[str, Tensor] | None = None
    """The terms of the loss: `task` and `kl`, before its weight."""
    trace: DepthTrace | None = None
    """In evaluation: passes, which of them ran, and their cost."""
