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
- Projecting to the whole vocabulary is most of what a head costs, and most tokens have next to no
  probability. The most probable ones are always in the softmax; a few others, drawn anew for every
  batch, stand for all the rest, each counting as many times as there are tokens it stands for, so
  that the sum over the vocabulary is right in the mean (sampled softmax, arXiv 1412.2007).

Shapes: L layers, N positions, D width, V tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepenough.devices import exact
from deepenough.hf.adapter import Adapter
from deepenough.hf.intercept import patched_forward

Logits = Callable[[Tensor], Tensor]


class Whitening(NamedTuple):
    """`x = (h - mean) @ root`: about uncorrelated coordinates of about unit variance."""

    mean_LD: Tensor
    root_LDD: Tensor

    def __call__(self, states_LND: Tensor) -> Tensor:
        """Return whitened states."""
        mean_LD, root_LDD = (tensor.to(states_LND.device) for tensor in self)
        return torch.bmm(states_LND - mean_LD[:, None], root_LDD)


def whitening(states_LND: Tensor) -> Whitening:
    """Return the whitening of a sample of states.

    A floor keeps directions of little variance, where noise is, from counting as much as others.
    """
    means, roots = [], []
    for states_ND in states_LND:
        states = exact(states_ND)
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
    """Return how far the closed form is off in the mean square, by layer and coordinate."""
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
        start = torch.linalg.solve(exact(white.root_LDD), exact(matrices_LDD), left=False)
        offset = torch.einsum("lij,lj->li", matrices_LDD, white.mean_LD) + biases_LD
        self.start, self.offset = nn.Buffer(start.float()), nn.Buffer(offset)
        self.error = nn.Buffer(error_LD)
        self.change = nn.Parameter(torch.zeros_like(self.start))
        self.shift = nn.Parameter(torch.zeros_like(offset))

    def forward(self, white_LND: Tensor) -> Tensor:
        """Map whitened states to states as of the last layer, `[L, N, D]`."""
        weight_LDD = torch.addcmul(self.start, self.error[..., None], self.change)
        bias_LD = torch.addcmul(self.offset, self.error, self.shift)
        return torch.baddbmm(bias_LD[:, None], white_LND, weight_LDD.transpose(1, 2))

    @torch.no_grad()
    def matrices_and_biases(self) -> tuple[Tensor, Tensor]:
        """Return `A` and `b` of every layer, for states that are not whitened."""
        change, shift, error = (t.detach().cpu() for t in (self.change, self.shift, self.error))
        difference_LDD = torch.bmm(error[..., None] * change, self.white.root_LDD)
        moved_LD = torch.einsum("lij,lj->li", difference_LDD, self.white.mean_LD)
        return self.matrices + difference_LDD, self.biases + error * shift - moved_LD


def divergences(
    mapped_LND: Tensor, logits: Logits, log_p_NV: Tensor, log_weight_V: Tensor
) -> Tensor:
    """Return `KL(p || q)` of every layer, the mean over positions.

    Gradients by the states are found on the way, so that the logits of one layer exist at a time.
    `log_weight_V` is added to them; the target `log_p_NV` has it already.
    """
    values = []
    for mapped_ND in mapped_LND:
        state_ND = mapped_ND.detach().requires_grad_()
        log_q_NV = (logits(state_ND).to(log_p_NV) + log_weight_V).log_softmax(-1)
        value = F.kl_div(log_q_NV, log_p_NV, log_target=True, reduction="batchmean")
        (gradient_ND,) = torch.autograd.grad(value, state_ND)
        # The second term is zero and has this gradient.
        values.append(value.detach() + ((mapped_ND - state_ND.detach()) * gradient_ND).sum())
    return torch.stack(values)


class TokenSampler:
    """Chooses the `size` tokens with most mass, and `num_drawn` others for the rest."""

    def __init__(self, mass_V: Tensor, size: int, num_drawn: int) -> None:
        order = mass_V.argsort(descending=True, stable=True)
        self.kept, self.others = order[:size].sort().values, order[size:].sort().values
        self.num_drawn = min(num_drawn, len(self.others))

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the tokens of one batch, and what to add to their logits before a softmax."""
        drawn = torch.randperm(len(self.others), generator=generator)[: self.num_drawn]
        ids = torch.cat([self.kept, self.others[drawn]])
        log_weight = torch.zeros(len(ids))
        if self.num_drawn:
            log_weight[len(self.kept) :] = math.log(len(self.others) / self.num_drawn)
        return ids, log_weight


class PartialHead:
    """`adapter.head(...)[..., ids]`, without making the other columns if the model allows that."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._last_map = adapter.model.get_output_embeddings()
        if not isinstance(self._last_map, nn.Linear) or not self._is_divisible():
            self._last_map = None

    def __call__(self, ids: Tensor) -> Logits:
        """Return the head for the tokens `ids`."""
        last_map = self._last_map
        if last_map is None:
            return lambda normed: self.adapter.head(normed)[..., ids]
        weight = last_map.weight.detach()[ids]
        bias = None if last_map.bias is None else last_map.bias.detach()[ids]

        def head(normed: Tensor) -> Tensor:
            with patched_forward({last_map: lambda hidden: F.linear(hidden, weight, bias)}):
                return self.adapter.head(normed)

        return head

    @torch.no_grad()
    def _is_divisible(self) -> bool:
        """Return, by trying, whether the rows of the head's last map can be taken alone."""
        generator = torch.Generator().manual_seed(0)
        state = torch.randn(1, self.adapter.width, generator=generator)
        normed = self.adapter.final_norm(state.to(self.adapter.model.device))
        expected = self.adapter.head(normed)
        ids = torch.arange(0, expected.shape[-1], 7, device=expected.device)
        try:
            found = self(ids)(normed)
        except (RuntimeError, IndexError, AttributeError):
            return False
        wanted = expected[..., ids]
        return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
