"""Relative attention with memory (Transformer-XL, arXiv 1901.02860, section 3.3), or both ways.

    logits[i, j] = ((q_i + u) . k_j + (q_i + v) . W_r R_(i-j)) / sqrt(d_head)

`R_delta` is the sinusoidal code of the distance; `u` and `v` are learned. The second term is the
additive mask of `scaled_dot_product_attention`, so torch picks the kernel. Only where gradients
must flow through that mask, which none of torch's CPU kernels can do, are the same four steps
written out: torch's own fallback for that case takes 1.4 times as long.

Causal attention needs the distances 0 to K. An encoder's looks ahead too, to the distance 1 - S.

Shapes: B batch, S new tokens, K keys (memory and new tokens, K >= S), H heads, D width, E = D / H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def distance_codes(num_distances: int, width: int, first: int = 0) -> Tensor:
    """Return `R`, one row per distance from `first` up: first half sines, second half cosines."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    distances = torch.arange(first, first + num_distances, dtype=torch.float32)
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def relative_shift(scores: Tensor, num_keys: int) -> Tensor:
    """Return scores by key `[..., S, K]` from scores by distance `[..., S, C]`, without a copy.

    Column `c` of the input is distance `K - c`. Key `j` is at distance `K - S + i - j` from query
    `i`, hence in column `S - i + j`, whose offset in the flattened rows is `S + i * (C - 1) + j`.
    With `C = K + S` columns every key has one. With `C = K + 1`, down to distance 0, keys in a
    query's future receive numbers of the next row; the causal mask covers exactly those.
    """
    *_, num_queries, columns = scores.shape
    shifted = scores.flatten(-2)[..., num_queries:].unflatten(-1, (num_queries, columns - 1))
    return shifted[..., :num_keys]


def visible_keys(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Return True where query `i` may look at key `j`: not ahead of it, nearer than `window`.

    Without a window attention looks both ways: every key is visible.
    """
    if window is None:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    query = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distance = query - torch.arange(num_keys)
    return (distance >= 0) & (distance < window)


def projects_queries(num_queries: int, head_width: int) -> bool:
    """Return whether `W_r` meets the queries rather than the codes, which is cheaper for a few.

    `N D^2 + H N C D` against `C D^2 + N C D` multiplications; a step of generation has N = 1.
    """
    return num_queries < head_width


class RelativeAttention(nn.Module):
    """Multi-head attention by content and distance, on keys that may include memory."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.query = nn.Linear(width, width)  # its bias is u, all heads in a row
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)  # W_r
        self.output = nn.Linear(width, width, bias=False)
        self.v_minus_u = nn.Parameter(torch.zeros(width))

    def keys_values(self, context_BKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, `[B, H, K, E]` each, of memory and new tokens."""
        heads = self.key_value(context_BKD).unflatten(-1, (2, self.num_heads, self.head_width))
        key_BHKE, value_BHKE = heads.permute(2, 0, 3, 1, 4)
        return key_BHKE, value_BHKE

    def forward(
        self,
        hidden_BSD: Tensor,
        key_BHKE: Tensor,
        value_BHKE: Tensor,
        codes_CD: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Return the mixed values, projected, of every new token.

        `codes_CD` are the sinusoids of the distances K, K-1, ..., 0; down to 1 - S to look both
        ways. `mask` is added to the logits, -inf where a key must not be seen.
        """
        num_streams, num_queries, width = hidden_BSD.shape
        shape = (self.num_heads, self.head_width)
        scale = self.head_width**-0.5
        # Heads come first: the codes are the same for every stream, so that one matrix product per
        # head serves them all, and the rows of its result shift without a copy.
        query_HNE = self.query(hidden_BSD.flatten(0, 1)).unflatten(-1, shape).transpose(0, 1)
        query_HNE = query_HNE.contiguous()  # q + u
        distance_HNC = self._distance_logits(query_HNE, codes_CD * scale)
        distance_HBSC = distance_HNC.unflatten(1, (num_streams, num_queries))
        position_HBSK = relative_shift(distance_HBSC, key_BHKE.shape[2])
        query_HBSE = query_HNE.unflatten(1, (num_streams, num_queries))
        mask = mask.to(position_HBSK.dtype)  # which is lower than the mask's under autocast
        if torch.is_grad_enabled() and position_HBSK.requires_grad:
            key_HBKE, value_HBKE = key_BHKE.transpose(0, 1), value_BHKE.transpose(0, 1)
            if mask.dim() == 4:  # B1SK
                mask = mask.transpose(0, 1).expand_as(position_HBSK).flatten(0, 1)
            bias = position_HBSK.flatten(0, 1) + mask
            mixed_HBSE = self._attend(query_HBSE, key_HBKE, value_HBKE, bias)
            mixed_BSHE = mixed_HBSE.permute(1, 2, 0, 3)
        else:
            mixed_BSHE = F.scaled_dot_product_attention(
                query_HBSE.transpose(0, 1),
                key_BHKE,
                value_BHKE,
                attn_mask=position_HBSK.transpose(0, 1) + mask,
                scale=scale,
            ).transpose(1, 2)
        return self.output(mixed_BSHE.reshape(-1, width)).view_as(hidden_BSD)

    def _distance_logits(self, query_HNE: Tensor, codes_CD: Tensor) -> Tensor:
        """Return `(q + v) . W_r R` of every query and distance, `[H, N, C]`."""
        shape = (self.num_heads, self.head_width)
        query_HNE = query_HNE + self.v_minus_u.view(*shape)[:, None]
        if projects_queries(query_HNE.shape[1], self.head_width):
            weight_HED = self.position.weight.unflatten(0, shape)
            return torch.bmm(query_HNE, weight_HED) @ codes_CD.T
        by_distance_HEC = self.position(codes_CD).unflatten(-1, shape).permute(1, 2, 0)
        return torch.bmm(query_HNE, by_distance_HEC)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Return softmax attention with a bias that has a gradient, heads first.

        `bias`, `[H * B, S, K]`, becomes the logits in place. It must not be a view of anything:
        autograd would copy what it shows at every step.
        """
        shape = query.shape[:2]
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        logits = bias.baddbmm_(query, key.mT, alpha=self.head_width**-0.5)
        return torch.bmm(logits.softmax(-1), value).unflatten(0, shape)
