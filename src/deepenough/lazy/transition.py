"""The lazy transition: a state moves only as far as its update is new (ACL 2022, long 208).

A block, applied again and again, proposes an update of every token's state `x`:

    y      = block(x)
    sigma  = stop_gradient(CKA(x, y))          per token, over the channels
    new x  = norm(x + (1 - sigma) * dropout(y))

`1 - sigma` is called the *gate* here: the share of the update that is applied. It is 1 where the
update is orthogonal to the state and 0 where it only repeats the state's own direction, that is, in
equilibrium: after a norm a state is its direction, which no longer changes.

Linear CKA of two vectors, channels taken as samples and not centred, is the squared cosine of the
angle between them: the Gram matrices are `x x^T` and `y y^T`, their inner product is `(x.y)^2`.

`norm` is the paper's; a block that normalises its input needs none here, but one after the last
step (as in the authors' later code). Departures from that code: a block returns the update alone,
since `x + update` would count the residual twice; and sigma is computed before dropout, whose noise
would make every update look newer than it is.

With `compare` "state", `x` is compared with the state that the whole update would produce:

    sigma = stop_gradient(CKA(x, x + y)),   new x = sigma * x + (1 - sigma) * (x + y)

Then a gate is the squared sine of the angle by which the state would turn, which in equilibrium is
zero; "update", the formula above, counts an update that is tiny but orthogonal as new.

A state that has been through dropout is `x + e`, with zero-mean noise `e` that is orthogonal to
everything else and makes the vectors less similar than they are without it. Where `noise`, the
expected `|e|^2`, is given, it is subtracted before the products are divided: `x.(x + y)`, `x.x` and
`(x + y).(x + y)` all contain `|e|^2` once.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepenough.nn.layers import Dropout

UPDATE, STATE = "update", "state"
"""What the state is compared with: the update, or the state that the whole update would produce."""


class TransitionOutput(NamedTuple):
    """Result of one transition over states `[..., D]`."""

    state: Tensor
    """`[..., D]`, the new states."""
    gate: Tensor
    """`[...]`, the share of the update that was applied: `1 - sigma`, without a gradient."""
    noise: Tensor | None = None
    """`[...]`, the expected `|e|^2` that dropout has left in the states, where it is tracked."""
    clean: Tensor | None = None
    """`[..., D]`, the new states without this step's dropout and gradient, where asked for."""


class LazyTransition(nn.Module):
    """Wrap a block so that states are updated lazily.

    Args:
        block: Maps states `[..., D]` (and any further arguments) to updates without the residual.
        norm: Applied to the new states, as in the paper; None for none.
        dropout: Probability with which channels of the update are dropped in training.
        lazy: False makes this a plain residual connection, with which a shared block is a Universal
            Transformer.
        compare: What sigma compares the state with, `update` or `state`.
    """

    def __init__(
        self,
        block: nn.Module,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
        lazy: bool = True,
        compare: str = UPDATE,
    ) -> None:
        super().__init__()
        self.block = block
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.lazy, self.compare = lazy, compare

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the new states alone, so that a transition can replace a residual block."""
        return self.step(state, *args, **kwargs).state

    def step(
        self,
        state: Tensor,
        *args: Any,
        noise: Tensor | None = None,
        keep_clean: bool = False,
        **kwargs: Any,
    ) -> TransitionOutput:
        """Return the new states, the gates and the tracked noise.

        `noise` is what earlier dropout left in the states, to be removed from the gates; None
        leaves the gates as they are. With `keep_clean`, the new states without dropout come too;
        all other arguments are the block's.
        """
        update = self.block(state, *args, **kwargs)
        dropped = self.dropout(update)
        if self.lazy:
            gate = update_gate(state, update, self.compare, noise)
            moved = torch.addcmul(state, dropped, gate.unsqueeze(-1))
        else:
            gate = state.new_ones(()).expand(state.shape[:-1])
            moved = state + dropped
        clean = None
        if keep_clean:
            with torch.no_grad():
                clean = torch.addcmul(state, update, gate.unsqueeze(-1))
                clean = clean if self.norm is None else self.norm(clean)
        if noise is not None:
            noise = noise + gate.square() * dropout_noise(dropped, self.dropout.p)
        if self.norm is not None:
            before, moved = moved, self.norm(moved)
            if noise is not None:  # scaled as the norm has scaled the states
                old, new = (torch.linalg.vecdot(x, x) for x in (before.detach(), moved.detach()))
                noise = noise * (new / old.clamp(min=torch.finfo(old.dtype).tiny))
        return TransitionOutput(moved, gate, noise, clean)


@torch.no_grad()
def update_gate(
    state: Tensor, update: Tensor, compare: str = UPDATE, noise: Tensor | None = None
) -> Tensor:
    """Return the gate `1 - sigma` of every token, `[...]`."""
    if compare == STATE:
        return 1.0 - squared_cosine(state, state + update, noise, noise)
    return 1.0 - squared_cosine(state, update, noise)


@torch.no_grad()
def dropout_noise(dropped: Tensor, probability: float) -> Tensor:
    """Return the expected squared length of the noise that dropout put into each token, `[...]`.

    With `d = m x / (1 - p)`, m a mask: `E|d - x|^2 = p / (1 - p) |x|^2 = p E|d|^2`.
    """
    return probability * torch.linalg.vecdot(dropped, dropped)


def squared_cosine(
    x: Tensor, y: Tensor, x_noise: Tensor | None = None, common: Tensor | None = None
) -> Tensor:
    """Return `(x.y)^2 / (x.x * y.y)` over the last axis, within [0, 1]; 0 for a zero vector.

    `x_noise` is subtracted from `x.x`; `common`, noise that both share, from `x.y` and `y.y`.
    """
    dot, square_x, square_y = (torch.linalg.vecdot(a, b) for a, b in ((x, y), (x, x), (y, y)))
    if x_noise is not None:
        square_x = square_x - x_noise
    if common is not None:
        dot, square_y = dot - common, square_y - common
    # Divided one after the other: the product of two squares leaves the range of a float sooner.
    tiny = torch.finfo(x.dtype).tiny
    cosine2 = dot / square_x.clamp(min=tiny) * (dot / square_y.clamp(min=tiny))
    return cosine2.clamp(0.0, 1.0)


def step_similarity(states: Sequence[Tensor]) -> Tensor:
    """Return the squared cosines of N + 1 consecutive states, `[..., N]`."""
    return torch.stack([squared_cosine(*pair) for pair in pairwise(states)], -1)


def step_cka(states: Sequence[Tensor]) -> Tensor:
    """Return the linear CKA of a text's states `[T, D]` at any two of N + 1 steps, `[N+1, N+1]`.

    `<K, L> / sqrt(<K, K> * <L, L>)` with `K = x x^T` over the tokens, centred (arXiv 1905.00414,
    eq. 1 and 3); of a single token over its channels, as in its gate.
    """
    samples = [x - x.mean(0) if len(x) > 1 else x.T for x in states]
    grams = torch.stack([(x @ x.T).flatten() for x in samples])
    grams = grams / grams.norm(dim=1, keepdim=True).clamp(min=torch.finfo(grams.dtype).tiny)
    return (grams @ grams.T).clamp(0.0, 1.0)
