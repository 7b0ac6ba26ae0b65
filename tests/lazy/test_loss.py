"""The smoothed cross-entropy: equal to torch's, with its gradient."""

import pytest
import torch
import torch.nn.functional as F

from deepenough.lazy.loss import smoothed_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_equal_to_torchs(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, 11, generator=generator)).requires_grad_()
    targets = torch.randint(11, (7,), generator=generator)
    smoothed, plain = smoothed_cross_entropy(logits, targets, smoothing)
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert smoothed.item() == pytest.approx(expected.item(), rel=1e-5)
    assert plain.item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert not plain.requires_grad
    own = torch.autograd.grad(3 * smoothed, logits)[0]
    theirs = torch.autograd.grad(3 * expected, logits)[0]
    assert torch.allclose(own, theirs, atol=1e-6)


def test_by_hand():
    """Two words of equal score: log 2, smoothed or not."""
    smoothed, plain = smoothed_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), 0.1)
    assert smoothed.item() == pytest.approx(0.6931472)
    assert plain.item() == pytest.approx(0.6931472)
