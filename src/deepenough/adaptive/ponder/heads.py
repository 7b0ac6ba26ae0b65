"""What is read from the states after a pass: an answer, and whether to halt.

Shapes: R examples, D width, C labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HALTING_WIDTH = 128
"""Units of the halting head's hidden layers: it decides one number, whatever the model's width."""


class Classifier(nn.Module):
    """Dense, tanh, dropout, labels: the classification head of BERT with its pooler."""

    def __init__(self, width: int, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, num_labels)

    def forward(self, pooled_RD: Tensor) -> Tensor:
        logits: Tensor = self.out(self.dropout(self.dense(pooled_RD).tanh()))
        return logits


class HaltingHead(nn.Module):
    """The logit of `lambda_n`, `[R]`.

    `previous`: three layers over `h_n` and `h_(n-1)` joined, which see whether a pass still changed
    anything (PALBERT, arXiv 2204.03276). `second_cls`: one layer over a token of its own.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "previous":
            self.hidden: nn.Module = nn.Sequential(
                nn.Linear(2 * width, HALTING_WIDTH),
                nn.Tanh(),
                nn.Linear(HALTING_WIDTH, HALTING_WIDTH),
                nn.Tanh(),
            )
            self.out = nn.Linear(HALTING_WIDTH, 1, bias=False)
        else:
            self.hidden = nn.Identity()
            self.out = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(()))  # starts at the prior's halting probability

    def forward(self, now_RD: Tensor, before_RD: Tensor) -> Tensor:
        read = torch.cat([now_RD, before_RD], -1) if self.kind == "previous" else now_RD
        logit: Tensor = self.out(self.hidden(read)).squeeze(-1) + self.bias
        return logit
