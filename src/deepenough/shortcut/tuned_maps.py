"""Affine maps from many layers to the last one, made to be trained, and what is minimised.

The model's final distribution `p` is the target, `q_i = softmax(head(final_norm(A_i h_i + b_i)))`
what layer `i` predicts through its map. Minimised is `KL(p || q_i)` in nats, the mean over
positions, as in the tuned lens (arXiv 2303.08112). Departures:

- A map starts from the closed-form one `(A0, b0)`, not from the identity.
- What is trained is the difference `D` in whitened coordinates `x = P (h - m)`, where `P` is the
  inverse root of the covariance of `h`: `A h + b = A0 h + b0 + s * (D x + c)`, with `s`, by
  coordinate, the error that the closed form makes. The variances of a residual stream differ by
  factors of a million; so put, all its directions learn at one pace, one learning rate serves all
  layers, and weight decay pulls towards the closed form.

Shapes: L layers, N positions, D width, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Logits = Callable[[Tensor], Tensor]


class Whitening(NamedTuple):
    """`x = (h - mean) @ root`: about uncorrelated coordinates of about unit variance."""

    mean_LD: Tensor
    root_LDD: Tensor

    def __call__(self, states_LND: Tensor) -> Tensor:
        mean_LD, root_LDD = (tensor.to(states_LND.device) for tensor in self)
        return torch.bmm(states_LND - mean_LD[:, None], root_LDD)


def whitening(states_LND: Tensor) -> Whitening:
    """From a sample. `floor` keeps directions of little variance, where noise is, from counting as
    much as the others."""
    means, roots = [], []
    for states_ND in states_LND:
        states = states_ND.double()
        mean = states.mean(0)
        centred = states - mean
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(states))
        floor = 0.1 * variances.clamp_min(0).median() + torch.finfo(torch.float32).tiny
        scales = (variances.clamp_min(0) + floor).rsqrt()
        means.append(mean.float())
        roots.append(((directions * scales) @ directions.T).float())
    return Whitening(torch.stack(means), torch.stack(roots))


def closed_form_error(
    matrices_LDD: Tensor, biases_LD: Tensor, states_LND: Tensor, last_ND: Tensor
) -> Tensor:
    """By layer and coordinate, how far the closed form is off in the mean square, `[L, D]`."""
    mapped_LND = torch.baddbmm(biases_LD[:, None], states_LND, matrices_LDD.transpose(1, 2))
    error_LD = (mapped_LND - last_ND).square().mean(1).sqrt()
    # Where there is no error there is nothing to learn, but a step of nothing would stay there.
    return error_LD.clamp_min(1e-6 * float(last_ND.std()))


class TunedMaps(nn.Module):
    """The maps of all layers as one batched product over whitened states."""

    def __init__(
        self, matrices_LDD: Tensor, biases_LD: Tensor, white: Whitening, error_LD: Tensor
    ) -> None:
        super().__init__()
        self.matrices, self.biases, self.white = matrices_LDD, biases_LD, white
        # W x + c = A0 h + b0 for x = P (h - m): W = A0 P^-1, c = A0 m + b0
        start = torch.linalg.solve(white.root_LDD.double(), matrices_LDD.double(), left=False)
        offset = torch.einsum("lij,lj->li", matrices_LDD, white.mean_LD) + biases_LD
        self.register_buffer("start", start.float())
        self.register_buffer("offset", offset)
        self.register_buffer("error", error_LD)
        self.start: Tensor
        self.offset: Tensor
        self.error: Tensor
        self.change = nn.Parameter(torch.zeros_like(self.start))
        self.shift = nn.Parameter(torch.zeros_like(offset))

    def forward(self, white_LND: Tensor) -> Tensor:
        """What the maps make of whitened states: states as of the last layer, `[L, N, D]`."""
        weight_LDD = torch.addcmul(self.start, self.error[..., None], self.change)
        bias_LD = torch.addcmul(self.offset, self.error, self.shift)
        return torch.baddbmm(bias_LD[:, None], white_LND, weight_LDD.transpose(1, 2))

    @torch.no_grad()
    def maps(self) -> tuple[Tensor, Tensor]:
        """`(A, b)` of every layer, for states as they are."""
        change, shift, error = (t.detach().cpu() for t in (self.change, self.shift, self.error))
        difference_LDD = torch.bmm(error[..., None] * change, self.white.root_LDD)
        moved_LD = torch.einsum("lij,lj->li", difference_LDD, self.white.mean_LD)
        return self.matrices + difference_LDD, self.biases + error * shift - moved_LD


class _Divergences(torch.autograd.Function):
    """The gradient is found on the way, so that the logits of one layer exist at a time.

    By the logits it is `q - p`, whatever made them; how the head and the final norm take it to the
    state is left to autograd.
    """

    @staticmethod
    def forward(ctx, mapped_LND, logits, log_p_NV, log_weight_V):  # type: ignore[no-untyped-def]
        p_NV, num = log_p_NV.exp(), mapped_LND.shape[1]
        negative_entropy = torch.vdot(p_NV.flatten(), log_p_NV.flatten())
        values, gradients = [], []
        for mapped_ND in mapped_LND:
            with torch.enable_grad():
                state_ND = mapped_ND.detach().requires_grad_()
                logits_NV = logits(state_ND)
            log_q_NV = (logits_NV.detach().to(p_NV) + log_weight_V).log_softmax(-1)
            cross_entropy = -torch.vdot(p_NV.flatten(), log_q_NV.flatten())
            values.append((negative_entropy + cross_entropy) / num)
            by_logits_NV = log_q_NV.exp_().sub_(p_NV).div_(num).to(logits_NV)
            gradients += torch.autograd.grad(logits_NV, state_ND, by_logits_NV)
        ctx.save_for_backward(torch.stack(gradients))
        return torch.stack(values)

    @staticmethod
    def backward(ctx, weight_L):  # type: ignore[no-untyped-def]
        (gradient_LND,) = ctx.saved_tensors
        return weight_L[:, None, None] * gradient_LND, None, None, None


def divergences(
    mapped_LND: Tensor, logits: Logits, log_p_NV: Tensor, log_weight_V: Tensor
) -> Tensor:
    """`KL(p || q)` of every layer, the mean over positions; `log_weight` belongs to both."""
    found: Tensor = _Divergences.apply(mapped_LND, logits, log_p_NV, log_weight_V)
    return found


def divergences_ref(
    mapped_LND: Tensor, logits: Logits, log_p_NV: Tensor, log_weight_V: Tensor
) -> Tensor:
    """The same, word by word from the definition."""
    totals = []
    for mapped_ND in mapped_LND:
        total = mapped_ND.new_zeros(())
        for state_D, log_p_V in zip(mapped_ND, log_p_NV, strict=True):
            scores_V = logits(state_D[None])[0] + log_weight_V
            log_q_V = scores_V - scores_V.exp().sum().log()
            for log_p, log_q in zip(log_p_V, log_q_V, strict=True):
                total = total + log_p.exp() * (log_p - log_q)
        totals.append(total / len(mapped_ND))
    return torch.stack(totals)
