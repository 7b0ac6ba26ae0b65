"""Cross-entropy with smoothed labels, and the plain one beside it, in few passes over the logits.

With a share `s` of the target's probability spread over all `V` words, target included,

    loss = logsumexp(z) - (1 - s) * z_target - s * mean(z)
    d loss / d z = softmax(z) - (1 - s) * onehot(target) - s / V

as `torch.nn.functional.cross_entropy(..., label_smoothing=s)`, which holds several tensors of the
logits' size at once; here the gradient is made in one. What is recorded is the plain loss: a
smoothed one has no meaning as a measure.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def smoothed_cross_entropy(
    logits_RV: Tensor, targets_R: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Mean over R tokens of the smoothed loss, and of the plain one (without a gradient)."""
    logits = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    smoothed, plain = _SmoothedCrossEntropy.apply(logits, targets_R, smoothing)
    return smoothed, plain


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        total = logits.logsumexp(-1)
        picked = logits.gather(1, targets[:, None]).squeeze(1)
        plain = (total - picked).mean()
        smoothed = (1.0 - smoothing) * plain
        if smoothing:
            smoothed += smoothing * (total.mean() - logits.mean())
        ctx.save_for_backward(logits, total, targets)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(plain)
        return smoothed, plain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, total, targets = ctx.saved_tensors
        num_rows, num_words = logits.shape
        grad = torch.sub(logits, total[:, None]).exp_()
        if ctx.smoothing:
            grad.sub_(ctx.smoothing / num_words)
        rows = torch.arange(num_rows, device=grad.device)
        grad[rows, targets] -= 1.0 - ctx.smoothing
        return grad.mul_(grads[0] / num_rows), None, None
