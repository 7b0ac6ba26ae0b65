"""What is read from the states after a pass: an answer, and whether to halt.

Shapes: R examples, D width, C labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HALTING_WIDTH = 128
"""Units of the halting head's hidden layers: it decides one number, whatever the model's width."""

LEAD_GAIN = 10.0
"""Of the weight of an answer's lead: a single weight would else take thousands of Adam's steps to
become as large as is useful."""


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
    anything (PALBERT, arXiv 2204.03276). `answer`: the same, and a multiple of the lead of the best
    answer's logit over the second: how sure an answer is tells best whether more passes would help,
    and a head that must find it in the states needs far more examples. `second_cls`: one layer over
    a token of its own.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("previous", "answer"):
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
        self.lead = nn.Parameter(torch.zeros(())) if kind == "answer" else None

    def forward(self, now_RD: Tensor, before_RD: Tensor, logits_RC: Tensor) -> Tensor:
        read = now_RD if self.kind == "second_cls" else torch.cat([now_RD, before_RD], -1)
        logit: Tensor = self.out(self.hidden(read)).squeeze(-1) + self.bias
        if self.lead is not None:
            # Not a way for the wish to halt to change the answers.
            best_R2 = logits_RC.detach().topk(2, -1).values
            logit = logit + LEAD_GAIN * self.lead * (best_R2[:, 0] - best_R2[:, 1])
        return logit
